//! What a link moves bytes over.

use std::io;
use std::os::fd::BorrowedFd;

/// Readable memory.
#[derive(Clone, Copy)]
pub(crate) struct WritePart {
    pub(crate) ptr: *const u8,
    pub(crate) bytes: usize,
}

/// Writable memory.
#[derive(Clone, Copy)]
pub(crate) struct ReadPart {
    pub(crate) ptr: *mut u8,
    pub(crate) bytes: usize,
}

/// A non-blocking byte stream. 0 bytes mean: not now.
pub(crate) trait Stream: Send {
    /// Writes what it takes of the parts, in order.
    fn write(&mut self, parts: &[WritePart]) -> io::Result<usize>;

    /// Fills the parts, in order, with what has come.
    fn read(&mut self, parts: &[ReadPart]) -> io::Result<usize>;

    /// The descriptor to wait on, where there is one.
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Bytes written that would be lost if the process ended now.
    fn unsent(&self) -> usize {
        0
    }

    /// Lets the peer read message `id` where it lies in this process's memory; false if it cannot.
    fn offer(&self, _id: u64) -> bool {
        false
    }

    /// Ends that: when this returns, the peer will know if it read the memory too late.
    fn withdraw(&self, _id: u64) {}

    /// Reads message `id` at address `from` of the peer's memory.
    ///
    /// # Safety
    /// The parts are writable, and nobody else uses them.
    unsafe fn pull(&mut self, _id: u64, _to: &[ReadPart], _from: u64) -> Pulled {
        Pulled::Impossible
    }
}

/// What came of [`Stream::pull`].
pub(crate) enum Pulled {
    /// The message was read.
    Done,
    /// Its sender gave up meanwhile.
    Withdrawn,
    /// It has to come through the stream.
    Impossible,
}
