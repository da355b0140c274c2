//! What a caller hands to a communicator.

use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;
use tpu_dist_collectives::{DType, Kind, ReduceOp};

use crate::deferred::Deferred;

/// Contiguous memory of the caller.
#[derive(Clone, Copy, Debug)]
pub struct Segment {
    /// First byte; may be dangling when `bytes` is 0.
    pub ptr: *mut u8,
    /// Length in bytes.
    pub bytes: usize,
}

impl Segment {
    /// `bytes` of it from `offset` on.
    pub(crate) fn part(self, offset: usize, bytes: usize) -> Segment {
        debug_assert!(offset + bytes <= self.bytes);
        Segment {
            ptr: self.ptr.wrapping_add(offset),
            bytes,
        }
    }
}

impl From<&mut [u8]> for Segment {
    fn from(memory: &mut [u8]) -> Segment {
        Segment {
            ptr: memory.as_mut_ptr(),
            bytes: memory.len(),
        }
    }
}

// SAFETY: a segment is an address. Who dereferences it relies on the contract of
// `Communicator::collective`: the memory stays valid and untouched until the
// operation has ended, whichever thread works on it.
unsafe impl Send for Segment {}
// SAFETY: as above; a shared segment gives no more access than a copied one.
unsafe impl Sync for Segment {}

/// The segments as one range, where they follow each other in memory; `None` for none.
pub(crate) fn joined(segments: &[Segment]) -> Option<Segment> {
    let (first, rest) = segments.split_first()?;
    let mut whole = *first;
    for segment in rest {
        if whole.ptr.wrapping_add(whole.bytes) != segment.ptr {
            return None;
        }
        whole.bytes += segment.bytes;
    }
    Some(whole)
}

/// A list of pieces, one for each peer (or one alone), each a list of segments.
///
/// One piece has several segments when the caller coalesces tensors: piece r holds
/// the r-th part of every tensor, in order. Pieces of one segment are the rule.
#[derive(Clone, Debug, Default)]
pub struct Pieces {
    segments: SmallVec<[Segment; 4]>,
    /// End of each piece in `segments`.
    ends: SmallVec<[u32; 4]>,
    /// Of all segments.
    bytes: usize,
}

impl Pieces {
    /// No pieces.
    pub fn new() -> Pieces {
        Pieces::default()
    }

    /// One piece of one segment.
    pub fn one(ptr: *mut u8, bytes: usize) -> Pieces {
        let mut pieces = Pieces::new();
        pieces.push(ptr, bytes);
        pieces.end_piece();
        pieces
    }

    /// Equal pieces of one contiguous block.
    pub fn split(ptr: *mut u8, piece_bytes: usize, count: usize) -> Pieces {
        let mut pieces = Pieces::new();
        for piece in 0..count {
            pieces.push(ptr.wrapping_add(piece * piece_bytes), piece_bytes);
            pieces.end_piece();
        }
        pieces
    }

    /// Adds a segment to the piece being built.
    pub fn push(&mut self, ptr: *mut u8, bytes: usize) {
        self.segments.push(Segment { ptr, bytes });
        self.bytes += bytes;
    }

    /// Ends the piece being built; it may be empty.
    pub fn end_piece(&mut self) {
        self.ends.push(self.segments.len() as u32);
    }

    /// Number of pieces.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there is no piece.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// The segments of piece `index`.
    ///
    /// # Panics
    /// When there is no such piece.
    pub fn piece(&self, index: usize) -> &[Segment] {
        let start = if index == 0 { 0 } else { self.ends[index - 1] };
        &self.segments[start as usize..self.ends[index] as usize]
    }

    /// Bytes of piece `index`.
    pub fn piece_bytes(&self, index: usize) -> usize {
        if self.ends.len() == 1 && index == 0 {
            return self.bytes;
        }
        self.piece(index).iter().map(|segment| segment.bytes).sum()
    }

    /// Bytes of all pieces.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The pieces in memory that was [`Deferred`].
    pub(crate) fn resolve(&mut self, blocks: &[Segment]) -> Result<(), String> {
        for segment in &mut self.segments {
            *segment = segment.resolve(blocks)?;
        }
        Ok(())
    }

    /// All segments, in order.
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }
}

/// The sizes of a tensor, for messages: as many as fit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shape {
    dims: u8,
    sizes: [i64; Shape::MAX_DIMS],
}

impl Shape {
    /// Sizes that are kept.
    pub const MAX_DIMS: usize = 6;

    /// The first [`Shape::MAX_DIMS`] sizes of a tensor of `dims` dimensions.
    pub fn new(dims: usize, sizes: [i64; Shape::MAX_DIMS]) -> Shape {
        Shape {
            dims: dims.min(255) as u8,
            sizes,
        }
    }
}

/// As `[2, 3]`; nothing when there is no tensor.
impl std::fmt::Display for Shape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let kept = (self.dims as usize).min(Shape::MAX_DIMS);
        write!(f, "{:?}", &self.sizes[..kept])?;
        if kept < self.dims as usize {
            f.write_str(" and more dimensions")
        } else {
            Ok(())
        }
    }
}

/// One collective.
///
/// | kind | input pieces | output pieces |
/// |---|---|---|
/// | `Barrier` | none | none |
/// | `Broadcast` | root: 1, others: none | root: none, others: 1 |
/// | `AllReduce` | 1 | 1, may be the same memory |
/// | `Reduce` | 1 | root: 1 (may be the same memory), others: none |
/// | `AllGather` | 1 | one for each rank |
/// | `ReduceScatter` | one for each rank | 1 |
/// | `AllToAll` | one for each rank | one for each rank |
/// | `Gather` | 1 | root: one for each rank, others: none |
/// | `Scatter` | root: one for each rank, others: none | 1 |
///
/// `AllGather` and `ReduceScatter` pieces may differ in size from rank to rank, but
/// all ranks must agree on the sizes; `AllToAll` pieces may differ freely as long as
/// sender and receiver agree. Output may coincide with input exactly (`AllGather`: the
/// input may be the rank's own output piece; `ReduceScatter`: the output may be the
/// rank's own input piece), and may not overlap otherwise.
#[derive(Clone, Debug)]
pub struct Call {
    /// What to do.
    pub kind: Kind,
    /// The operator, for reductions.
    pub op: Option<ReduceOp>,
    /// Element type; ignored for `Barrier`.
    pub dtype: DType,
    /// Root rank in the group, for kinds that have one.
    pub root: u32,
    /// Number of tensors a rank brings; more than 1 when coalesced.
    pub tensors: u32,
    /// Shape of the first tensor, for messages.
    pub shape: Shape,
    /// What the rank brings.
    pub input: Pieces,
    /// Where results go.
    pub output: Pieces,
    /// The memory in which the pieces are [deferred segments](Segment::deferred); the call
    /// must be asynchronous then.
    pub memory: Option<Arc<Deferred>>,
    /// Replaces the group's timeout for this operation.
    pub timeout: Option<Duration>,
    /// False: run on the caller's thread; the operation has ended when the call
    /// returns. True: the call returns at once.
    pub asynchronous: bool,
}

impl Call {
    /// A collective without pieces yet, synchronous, with the group's timeout.
    pub fn new(kind: Kind, dtype: DType) -> Call {
        Call {
            kind,
            op: None,
            dtype,
            root: 0,
            tensors: 1,
            shape: Shape::default(),
            input: Pieces::new(),
            output: Pieces::new(),
            memory: None,
            timeout: None,
            asynchronous: false,
        }
    }
}

/// One message.
#[derive(Clone, Debug)]
pub struct MessageCall {
    pub(crate) kind: Kind,
    pub(crate) peer: Option<u32>,
    /// Tells messages between the same ranks apart.
    pub tag: i32,
    /// What is sent, or where it goes.
    pub data: Segment,
    /// Element type, for messages.
    pub dtype: DType,
    /// Shape of the tensor, for messages.
    pub shape: Shape,
    /// Replaces the group's timeout for this operation.
    pub timeout: Option<Duration>,
    /// The memory in which `data` is a [deferred segment](Segment::deferred).
    pub memory: Option<Arc<Deferred>>,
}

impl MessageCall {
    /// A message to rank `to`.
    pub fn send(to: u32, tag: i32, data: Segment, dtype: DType) -> MessageCall {
        MessageCall {
            kind: Kind::Send,
            peer: Some(to),
            tag,
            data,
            dtype,
            shape: Shape::default(),
            timeout: None,
            memory: None,
        }
    }

    /// A message from rank `from`, or from any.
    pub fn recv(from: Option<u32>, tag: i32, data: Segment, dtype: DType) -> MessageCall {
        MessageCall {
            kind: Kind::Recv,
            peer: from,
            ..MessageCall::send(0, tag, data, dtype)
        }
    }
}
