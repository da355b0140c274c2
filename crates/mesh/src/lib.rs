//! The TPU interconnect: generations, slices, links, routes, rings, placement, cost.
//!
//! The model answers what libtpu answers (device ids, coordinates, processes, list order,
//! legal slices) and what it does not: which links a route crosses, which rings a torus
//! holds, how long a collective takes, and which order of ranks makes it fast.
//!
//! This crate is pure: no threads, sockets, clocks, environment or files.
//!
//! ```
//! use tpu_dist_mesh::Slice;
//! let slice: Slice = "v5p:4x4x4".parse()?;
//! assert_eq!(slice.wrap(), [true; 3]);
//! assert_eq!(slice.hosts(), 16);
//! # Ok::<(), tpu_dist_mesh::Error>(())
//! ```
#![forbid(unsafe_code)]

pub mod assign;
mod coord;
pub mod cost;
pub mod draw;
mod error;
mod fabric;
mod generation;
pub mod launch;
mod link;
mod multislice;
pub mod parse;
pub mod ring;
mod route;
mod shape;
mod slice;
mod torus;

pub use coord::{Axis, ChipId, Coord, Direction};
pub use error::Error;
pub use fabric::{Channel, ChannelId, ChannelKind, DCN_STARTUP, Fabric, ICI_HOP, ICI_STARTUP};
pub use generation::{Generation, LegalSlice, Spec};
pub use link::{Link, LinkGraph, LinkId};
pub use multislice::MultiSlice;
pub use route::Congestion;
pub use shape::Shape;
pub use slice::{Device, Slice};
pub use torus::Torus;
