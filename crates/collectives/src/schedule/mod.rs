//! A collective as data: for each rank a list of [`Step`]s over [`Chunk`]s.
//!
//! # Meaning
//! A rank runs its steps in order. A send is asynchronous and has the contents of its
//! chunk at the time the step runs: an executor that sends in place must wait before
//! it lets a later step change the chunk. A receive may be posted early when no step
//! before it touches its chunk. The k-th send from rank a to rank b is met by the
//! k-th receive (of either kind) at b from a, and has the same count.

mod chunk;
mod step;

pub use chunk::{Buffer, Chunk};
pub use step::Step;

use crate::Kind;

/// What a planner is asked for. Counts are in elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// The collective.
    pub kind: Kind,
    /// Number of ranks in the group.
    pub ranks: u32,
    /// Root rank, for `Broadcast`, `Reduce`, `Gather` and `Scatter`.
    pub root: u32,
    /// Elements of each piece. `AllReduce`, `Reduce` and `Broadcast` have one piece;
    /// `AllGather`, `ReduceScatter`, `Gather` and `Scatter` one for each rank, in rank
    /// order. `Barrier` has none. Uniform pieces may be given as one entry
    /// for all ranks. `AllToAll` is uniform here; uneven exchanges are planned
    /// by the runtime from its own splits.
    pub counts: Vec<u64>,
    /// Bytes an element.
    pub element_size: u32,
    /// Largest message, in elements; larger transfers are cut into several, so that a
    /// receiver can reduce one while the next is on its way. At least 1.
    pub max_message: u64,
}

/// The steps of all ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schedule {
    /// Name of the algorithm that planned it.
    pub algorithm: &'static str,
    /// Elements of scratch memory that a rank needs.
    pub scratch: Vec<u64>,
    /// One list for each rank.
    pub steps: Vec<Vec<Step>>,
}
