//! How bytes move between two processes.

pub(crate) mod peer_memory;
pub(crate) mod region;
pub(crate) mod ring;
pub(crate) mod shm;
pub(crate) mod tcp;
