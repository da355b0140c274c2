//! Algorithms: pure functions from a [`Request`] to the steps of a rank.
//!
//! A rank plans its own part alone, in time proportional to its own steps; all ranks
//! that plan the same request with the same algorithm fit together. [`plan`] collects
//! the parts of all ranks, for the verifier, the simulator and tests.

mod bucket;
mod cost;
mod direct;
mod dissemination;
mod halving_doubling;
mod hierarchical;
mod one_shot;
mod order;
mod pairwise;
mod pat;
mod reordered;
mod ring;
mod swing;
mod timeline;
mod tree;

pub use bucket::{Bucket, Colour};
pub use cost::{Constants, CostModel, Figures, Transport};
pub use direct::Direct;
pub use dissemination::Dissemination;
pub use halving_doubling::{HalvingDoubling, RecursiveDoubling};
pub use hierarchical::Hierarchical;
pub use one_shot::OneShot;
pub use pairwise::Pairwise;
pub use pat::Pat;
pub use reordered::Reordered;
pub use ring::Ring;
pub use swing::Swing;
pub use tpu_dist_mesh::cost::Prediction;
pub use tree::{Binomial, DoubleBinaryTree};

use crate::schedule::{Chunk, RankPlan, Request, RequestError, Schedule, Step};

/// A way to do collectives.
pub trait Algorithm: std::fmt::Debug + Send + Sync {
    /// The name by which users choose it.
    fn name(&self) -> &'static str;

    /// Whether it can plan this request, which must have passed [`Request::check`].
    fn supports(&self, request: &Request) -> bool;

    /// Whether all operands of each element of a reduction meet in one
    /// [`Step::Reduce`], so that the result is rounded once. 16-bit types need it.
    fn rounds_once(&self) -> bool {
        false
    }

    /// The part of `rank` in a request that it [`supports`](Algorithm::supports).
    fn steps(&self, request: &Request, rank: u32) -> RankPlan;

    /// What a request that it supports takes, on ranks with one port each way and all equally
    /// near. Uneven pieces count as if all were as large as the largest.
    ///
    /// A [`Prediction::Formula`] is what the [simulator](crate::sim) says within 2 %. Where ranks
    /// are not in step, that is, where
    /// - rounds overlap in a tree or are cut in an exchange of all with all,
    /// - a group is folded to a power of two, or
    /// - ranks' own work on memory overlaps with the wires in part,
    ///
    /// no formula applies and it is a [`Prediction::Estimate`].
    fn cost(&self, request: &Request, model: &dyn CostModel, transport: Transport) -> Prediction;
}

/// A request that an algorithm does not plan.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// The request itself is wrong.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// The algorithm does not do this.
    #[error("algorithm {algorithm} does not support {} of {} ranks with these counts", .request.kind, .request.ranks)]
    Unsupported {
        /// Its name.
        algorithm: &'static str,
        /// What was asked for.
        request: Box<Request>,
    },
    /// A rank outside the group.
    #[error("rank: expected below {ranks}, got {rank}")]
    Rank {
        /// What was given.
        rank: u32,
        /// Ranks in the group.
        ranks: u32,
    },
}

/// The part of `rank`.
pub fn plan_rank(
    algorithm: &dyn Algorithm,
    request: &Request,
    rank: u32,
) -> Result<RankPlan, PlanError> {
    check(algorithm, request)?;
    if rank >= request.ranks {
        return Err(PlanError::Rank {
            rank,
            ranks: request.ranks,
        });
    }
    Ok(algorithm.steps(request, rank))
}

/// The parts of all ranks.
pub fn plan(algorithm: &dyn Algorithm, request: &Request) -> Result<Schedule, PlanError> {
    check(algorithm, request)?;
    let parts = (0..request.ranks).map(|rank| algorithm.steps(request, rank));
    let (scratch, steps) = parts.map(|part| (part.scratch, part.steps)).unzip();
    Ok(Schedule {
        algorithm: algorithm.name(),
        scratch,
        steps,
    })
}

/// Whether `algorithm` can plan `request`.
pub fn check(algorithm: &dyn Algorithm, request: &Request) -> Result<(), PlanError> {
    request.check()?;
    if algorithm.supports(request) {
        return Ok(());
    }
    Err(PlanError::Unsupported {
        algorithm: algorithm.name(),
        request: Box::new(request.clone()),
    })
}

/// Appends steps; those on no elements are left out.
impl RankPlan {
    fn send(&mut self, to: u32, chunk: Chunk) {
        if chunk.count > 0 {
            self.steps.push(Step::Send { to, chunk });
        }
    }

    fn recv(&mut self, from: u32, chunk: Chunk) {
        if chunk.count > 0 {
            self.steps.push(Step::Recv { from, chunk });
        }
    }

    fn reduce(&mut self, dst: Chunk, sources: Vec<Chunk>) {
        if dst.count > 0 && sources != [dst] {
            self.steps.push(Step::Reduce { dst, sources });
        }
    }

    fn copy(&mut self, src: Chunk, dst: Chunk) {
        if src.count > 0 {
            self.steps.push(Step::Copy { src, dst });
        }
    }

    fn finish(&mut self, chunk: Chunk) {
        if chunk.count > 0 {
            self.steps.push(Step::Finish { chunk });
        }
    }

    /// Sends a message without elements.
    fn signal(&mut self, to: u32) {
        self.steps.push(Step::Send { to, chunk: NOTHING });
    }

    /// Receives a message without elements.
    fn await_signal(&mut self, from: u32) {
        self.steps.push(Step::Recv {
            from,
            chunk: NOTHING,
        });
    }
}

const NOTHING: Chunk = Chunk {
    buffer: crate::schedule::Buffer::Scratch,
    offset: 0,
    count: 0,
};
