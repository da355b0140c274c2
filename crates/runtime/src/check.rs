//! Checking a call before it starts.

use tpu_dist_collectives::reduce::Reducer;
use tpu_dist_collectives::{Kind, Signature};

use crate::Error;
use crate::call::{Call, Pieces};

/// Checks a collective of rank `rank` of `size`; returns what all ranks must agree on, and
/// the reducer of a reduction.
///
/// # Errors
/// Names the argument, what was expected and what came.
#[inline]
pub(crate) fn check(
    call: &Call,
    rank: u32,
    size: u32,
) -> Result<(Signature, Option<Reducer>), Error> {
    let kind = call.kind;
    let ranks = size as usize;
    let width = call.dtype.size();
    let invalid = |argument, message| {
        Err(Error::InvalidArgument {
            operation: kind.name(),
            argument,
            message,
        })
    };
    let rooted = matches!(
        kind,
        Kind::Broadcast | Kind::Reduce | Kind::Gather | Kind::Scatter
    );
    if rooted && call.root >= size {
        return invalid(
            "root",
            format!("expected a rank below {ranks}, got {}", call.root),
        );
    }
    let is_root = call.root == rank;
    let (inputs, outputs) = match kind {
        Kind::Barrier => (0, 0),
        Kind::Broadcast => (usize::from(is_root), usize::from(!is_root)),
        Kind::AllReduce => (1, 1),
        Kind::Reduce => (1, usize::from(is_root)),
        Kind::AllGather => (1, ranks),
        Kind::ReduceScatter => (ranks, 1),
        Kind::AllToAll => (ranks, ranks),
        Kind::Gather => (1, if is_root { ranks } else { 0 }),
        Kind::Scatter => (if is_root { ranks } else { 0 }, 1),
        Kind::Send | Kind::Recv | Kind::MonitoredBarrier => {
            return invalid("kind", "expected a collective".to_owned());
        }
    };
    if call.input.len() != inputs {
        return invalid(
            "input",
            format!("expected {inputs} pieces, got {}", call.input.len()),
        );
    }
    if call.output.len() != outputs {
        return invalid(
            "output",
            format!("expected {outputs} pieces, got {}", call.output.len()),
        );
    }
    let all = call.input.segments().iter().chain(call.output.segments());
    for segment in all {
        if segment.bytes % width != 0 {
            return invalid(
                "input",
                format!(
                    "expected whole elements of {width} bytes, got {} bytes",
                    segment.bytes
                ),
            );
        }
    }
    let me = rank as usize;
    let same = |argument, expected: usize, got: usize| {
        if expected == got {
            return Ok(());
        }
        Err(Error::InvalidArgument {
            operation: kind.name(),
            argument,
            message: format!(
                "expected {} elements, got {}",
                expected / width,
                got / width
            ),
        })
    };
    let bytes = |pieces: &Pieces| pieces.bytes();
    match kind {
        Kind::AllReduce => same("output", bytes(&call.input), bytes(&call.output))?,
        Kind::Reduce if is_root => same("output", bytes(&call.input), bytes(&call.output))?,
        Kind::AllGather => same("output", bytes(&call.input), call.output.piece_bytes(me))?,
        Kind::ReduceScatter => same("output", call.input.piece_bytes(me), bytes(&call.output))?,
        Kind::AllToAll => same(
            "output",
            call.input.piece_bytes(me),
            call.output.piece_bytes(me),
        )?,
        Kind::Gather if is_root => {
            for piece in 0..ranks {
                same("output", bytes(&call.input), call.output.piece_bytes(piece))?;
            }
        }
        Kind::Scatter if is_root => {
            for piece in 0..ranks {
                same("input", bytes(&call.output), call.input.piece_bytes(piece))?;
            }
        }
        _ => {}
    }
    let reducer = match (kind, call.op) {
        (Kind::AllReduce | Kind::Reduce | Kind::ReduceScatter, Some(op)) => {
            let reducer = Reducer::new(op.kind(), call.dtype);
            Some(reducer.map_err(|unsupported| Error::Unsupported {
                operation: kind.name(),
                op: unsupported.op,
                dtype: unsupported.dtype,
            })?)
        }
        (Kind::AllReduce | Kind::Reduce | Kind::ReduceScatter, None) => {
            return invalid("op", "expected a reduce operator, got none".to_owned());
        }
        _ => None,
    };
    Ok((signature(call), reducer))
}

/// Checks the other side of a message of rank `rank` of `size`; none is any rank.
pub(crate) fn check_peer(kind: Kind, peer: Option<u32>, rank: u32, size: u32) -> Result<(), Error> {
    match peer {
        Some(peer) if peer >= size || peer == rank => Err(Error::InvalidArgument {
            operation: kind.name(),
            argument: if kind == Kind::Send { "dst" } else { "src" },
            message: format!(
                "expected another rank of the group of {size}, got {peer} on rank {rank}"
            ),
        }),
        _ => Ok(()),
    }
}

/// What all ranks must agree on, see [`Signature`].
fn signature(call: &Call) -> Signature {
    let size = call.dtype.size();
    let sizes = |pieces: &Pieces| {
        Signature::layout_of(pieces.segments().iter().map(|segment| segment.bytes as u64))
    };
    let total = |pieces: &Pieces| (pieces.bytes() / size) as u64;
    let rooted = matches!(
        call.kind,
        Kind::Broadcast | Kind::Reduce | Kind::Gather | Kind::Scatter
    );
    let (count, layout) = match call.kind {
        Kind::AllReduce | Kind::Reduce | Kind::Gather | Kind::ReduceScatter | Kind::AllToAll => {
            (total(&call.input), sizes(&call.input))
        }
        Kind::AllGather | Kind::Scatter => (total(&call.output), sizes(&call.output)),
        Kind::Broadcast => {
            let data = if call.input.is_empty() {
                &call.output
            } else {
                &call.input
            };
            (total(data), sizes(data))
        }
        Kind::Barrier | Kind::Send | Kind::Recv | Kind::MonitoredBarrier => (0, 0),
    };
    Signature {
        kind: call.kind,
        op: call.op.map(|op| op.kind()),
        dtype: (call.kind != Kind::Barrier).then_some(call.dtype),
        root: rooted.then_some(call.root),
        tensors: call.tensors,
        count,
        layout,
    }
}
