//! How collectives run: [`local`] for groups on one host, [`net`] for all others.
//!
//! Both are written as futures that never wake anyone: whoever waits polls them (see
//! [`crate::progress`]). An engine runs one collective at a time, in the order of
//! their sequence numbers, and touches the output only after all ranks of the group
//! have said the same signature.

mod data;
pub(crate) mod local;
pub(crate) mod net;

use std::future::poll_fn;
use std::task::Poll;

use nix::errno::Errno;
use tpu_dist_collectives::reduce::Reducer;
use tpu_dist_collectives::{Kind, ReduceOp, Signature};

use crate::call::{Call, Segment};
use crate::link::LinkError;

/// A checked call.
pub(crate) struct Job {
    pub(crate) call: Call,
    pub(crate) signature: Signature,
    /// For reductions.
    pub(crate) reducer: Option<Reducer>,
}

impl Job {
    /// Waits for memory that was deferred.
    pub(crate) async fn memory(&mut self) -> Result<(), Failure> {
        let Some(memory) = self.call.memory.take() else {
            return Ok(());
        };
        poll_fn(|_| memory.get().map_or(Poll::Pending, |_| Poll::Ready(()))).await;
        let blocks = memory
            .get()
            .expect("ready")
            .map_err(|reason| reason.to_owned());
        blocks
            .and_then(|blocks| {
                self.call.input.resolve(blocks)?;
                self.call.output.resolve(blocks)
            })
            .map_err(Failure::Memory)
    }

    /// The own factor of PREMUL_SUM.
    pub(crate) fn scale(&self) -> Option<f64> {
        match self.call.op {
            Some(ReduceOp::PremulSum(factor)) => Some(factor),
            _ => None,
        }
    }

    /// What all ranks must agree on. The pieces of an all-to-all are compared pairwise.
    pub(crate) fn agreed(&self) -> Signature {
        let mut signature = self.signature;
        if signature.kind == Kind::AllToAll {
            signature.count = 0;
            signature.layout = 0;
        }
        signature
    }
}

/// How a collective fails, in the engine's words.
#[derive(Debug)]
pub(crate) enum Failure {
    /// Two ranks called different things.
    Mismatch {
        rank: u32,
        theirs: Signature,
        own_rank: u32,
        ours: Signature,
    },
    /// In an all-to-all, what one rank sends is not what another expects (bytes).
    Splits {
        from: u32,
        to: u32,
        sent: u64,
        expected: u64,
    },
    /// The memory of a rank cannot be read: most likely it has ended.
    Unreadable { rank: u32, error: Errno },
    /// The group has failed on a rank, which says why on another way.
    Gone { rank: u32 },
    /// The memory that it was to work on was not to be had.
    Memory(String),
    /// No algorithm does it.
    Plan(String),
    /// The connection to a rank failed.
    Link { rank: u32, error: LinkError },
}

/// The contiguous part of a list of segments at `offset`: address and length.
pub(crate) fn contiguous(segments: &[Segment], offset: usize) -> Option<(*mut u8, usize)> {
    let mut skip = offset;
    for segment in segments {
        if skip < segment.bytes {
            return Some((segment.ptr.wrapping_add(skip), segment.bytes - skip));
        }
        skip -= segment.bytes;
    }
    None
}

/// Calls `visit` for the contiguous parts of `[offset, offset + bytes)` of a list of
/// segments: address, offset from the start of the range, length.
pub(crate) fn walk(
    segments: &[Segment],
    offset: usize,
    bytes: usize,
    mut visit: impl FnMut(*mut u8, usize, usize),
) {
    if let [only] = segments
        && offset < only.bytes
        && bytes > 0
    {
        let run = bytes.min(only.bytes - offset);
        return visit(only.ptr.wrapping_add(offset), 0, run);
    }
    let mut done = 0;
    while done < bytes {
        let Some((ptr, run)) = contiguous(segments, offset + done) else {
            return;
        };
        let run = run.min(bytes - done);
        visit(ptr, done, run);
        done += run;
    }
}
