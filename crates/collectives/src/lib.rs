//! Plans for collectives: what each rank sends, receives and reduces, and when.
//!
//! This crate is pure: no threads, sockets, clocks, environment or files. An
//! [`algorithm::Algorithm`] turns a [`schedule::Request`] into a
//! [`schedule::Schedule`]; the verifier proves the schedule correct, the simulator
//! and the cost model predict its time, the runtime executes it. The only `unsafe`
//! code is in the reduction kernels ([`reduce`]).

pub mod algorithm;
pub mod dtype;
pub mod estimate;
pub mod lower;
pub mod op;
pub mod reduce;
pub mod schedule;
pub mod select;
pub mod signature;
pub mod sim;

pub use dtype::DType;
pub use op::{Kind, ReduceKind, ReduceOp};
pub use signature::Signature;
