//! A collective as data: for each rank a list of [`Step`]s over [`Chunk`]s.
//!
//! # Meaning
//! A rank runs its steps in order. A send is asynchronous and has the contents of its
//! chunk at the time the step runs: an executor that sends in place must wait before
//! it lets a later step change the chunk. A receive may be posted early when no step
//! before it touches its chunk. The k-th send from rank a to rank b is met by the
//! k-th receive (of either kind) at b from a, and has the same count.
//!
//! Every plan of this crate holds with [`IN_FLIGHT`] messages of buffer for each ordered
//! pair of ranks: a send may wait while that many messages to the same rank have not
//! been received, and nothing deadlocks. [`verify`] proves it.

mod chunk;
mod pieces;
mod request;
mod step;
pub mod verify;

use std::fmt;

pub use chunk::{Buffer, Chunk};
pub use pieces::Pieces;
pub use request::{Request, RequestError};
pub use step::Step;

/// Messages on their way from one rank to another that an executor must be able to hold
/// for the plans of this crate not to deadlock.
pub const IN_FLIGHT: usize = 4;

/// What one rank does.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RankPlan {
    /// Elements of scratch memory that the steps use.
    pub scratch: u64,
    /// The steps, in order.
    pub steps: Vec<Step>,
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

impl fmt::Display for Schedule {
    /// One line for each step, as `send 1 output[0..4]`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}, {} ranks", self.algorithm, self.steps.len())?;
        for (rank, (steps, scratch)) in self.steps.iter().zip(&self.scratch).enumerate() {
            writeln!(f, "rank {rank}, scratch {scratch}")?;
            for step in steps {
                writeln!(f, "  {step}")?;
            }
        }
        Ok(())
    }
}
