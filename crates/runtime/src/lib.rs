//! The runtime of `tpu_dist`: transports, progress, groups and their failure.
//!
//! A [`Communicator`] is one group of ranks. All groups of a process share one
//! fabric: the connections, shared memory and threads belong to the process.

pub mod arena;
pub mod aten;
pub mod call;
mod check;
mod communicator;
pub mod compile_cache;
pub mod config;
mod deferred;
pub mod device;
mod engine;
mod error;
pub mod executor;
mod fabric;
#[doc(hidden)]
pub mod fuzz;
mod link;
mod monitored_barrier;
mod operation;
pub mod pjrt;
mod progress;
mod stats;
pub mod store;
mod sync;
mod transport;
mod wire;
mod world;

pub use call::{Call, MessageCall, Pieces, Segment, Shape};
pub use communicator::{Communicator, GroupSpec};
pub use deferred::Deferred;
pub use error::Error;
pub use operation::{Completion, Operation};
pub use progress::set_interrupt_check;
pub use stats::Stat;
pub use store::{DirectoryStore, Store};
