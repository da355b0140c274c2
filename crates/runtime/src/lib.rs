//! The runtime of `tpu_dist`: transports, progress, groups and their failure.
//!
//! A [`Communicator`] is one group of ranks. All groups of a process share one
//! fabric: the connections, shared memory and threads belong to the process.

pub mod call;
mod error;
pub mod pjrt;
pub mod store;

pub use call::{Call, Pieces, Segment};
pub use error::Error;
pub use store::Store;
