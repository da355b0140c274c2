//! How an operation can end badly.

use std::time::Duration;

use tpu_dist_collectives::{DType, ReduceKind};

/// Why an operation, or the creation of a group, failed.
///
/// The text names the group, operation, sequence number, shape, dtype and the ranks
/// concerned; the variant tells a caller which exception type to raise.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The caller's arguments are wrong. Nothing was sent.
    #[error("{operation}: {argument}: {message}")]
    InvalidArgument {
        /// What was called, `all_reduce` for example.
        operation: &'static str,
        /// The argument at fault.
        argument: &'static str,
        /// What was expected and what came.
        message: String,
    },
    /// The operator is not defined for the element type.
    #[error("{operation}: ReduceOp.{op} is not supported for torch.{dtype}")]
    Unsupported {
        /// What was called.
        operation: &'static str,
        /// The operator.
        op: ReduceKind,
        /// The element type.
        dtype: DType,
    },
    /// The operation did not end within its timeout.
    #[error("{context}: Timed out after {timeout:?}: {detail}")]
    Timeout {
        /// Group, operation, sequence number, shape, dtype.
        context: String,
        /// The timeout that ran out.
        timeout: Duration,
        /// Who did not arrive.
        detail: String,
        /// Group ranks that did not arrive, where known.
        missing: Vec<u32>,
    },
    /// A monitored barrier was not passed by all.
    #[error("{message}")]
    Monitored {
        /// Names the ranks, as Gloo does.
        message: String,
        /// Group ranks that did not arrive.
        missing: Vec<u32>,
    },
    /// Ranks called different collectives.
    #[error(
        "{context}: ranks disagree: rank {rank} called {theirs}, rank {own_rank} called {ours}"
    )]
    Mismatch {
        /// Group and sequence number.
        context: String,
        /// A rank that differs.
        rank: u32,
        /// What it called.
        theirs: Box<str>,
        /// A rank it differs from.
        own_rank: u32,
        /// What that one called.
        ours: Box<str>,
    },
    /// A process of the group is gone.
    #[error("{context}: lost {peer}: {reason}")]
    PeerLost {
        /// Group, operation, sequence number.
        context: String,
        /// Rank, host and pid of the process.
        peer: String,
        /// How that was noticed.
        reason: String,
        /// Its rank in the group.
        rank: u32,
    },
    /// The group was aborted, here or by a peer.
    #[error("{context}: aborted: {reason}")]
    Aborted {
        /// Group, operation, sequence number.
        context: String,
        /// By whom and why.
        reason: String,
    },
    /// An earlier failure left the group unusable.
    #[error("{context}: the group failed earlier: {cause}")]
    Failed {
        /// Group and operation.
        context: String,
        /// The first failure.
        cause: String,
    },
    /// A signal ended the wait.
    #[error("{context}: interrupted by a signal")]
    Interrupted {
        /// Group, operation, sequence number.
        context: String,
    },
    /// The process forked after the group was made.
    #[error(
        "{context}: this process was forked after the group was created; groups cannot be used in the child"
    )]
    Forked {
        /// Group and operation.
        context: String,
    },
    /// The key-value store failed.
    #[error("store: {0}")]
    Store(String),
    /// A connection could not be made.
    #[error("network: {0}")]
    Network(String),
    /// Memory or another resource of this machine ran out.
    #[error("{0}")]
    Resource(String),
}
