//! What happens to a fabric when its process forks.
//!
//! The child has no control thread and must not touch the parent's connections. Its
//! copies of their descriptors would also keep them open when the parent dies, so that
//! nobody noticed: the child closes them at once.

use std::os::fd::{AsRawFd, RawFd};
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

static FORKED: AtomicBool = AtomicBool::new(false);
const NONE: RawFd = -1;
static DESCRIPTORS: [AtomicI32; 4096] = [const { AtomicI32::new(NONE) }; 4096];

/// Whether this process was forked from one that had a fabric.
#[inline]
pub(crate) fn is_forked() -> bool {
    FORKED.load(Ordering::Relaxed)
}

pub(super) fn watch() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: the handler is async-signal-safe: it stores to atomics and calls close.
        unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    });
}

extern "C" fn in_child() {
    FORKED.store(true, Ordering::Relaxed);
    for slot in &DESCRIPTORS {
        let fd = slot.swap(NONE, Ordering::Relaxed);
        if fd != NONE {
            // SAFETY: the descriptor is the child's copy of one of the fabric's; nothing in
            // the child uses it, as `is_forked` now says.
            unsafe { libc::close(fd) };
        }
    }
}

/// Marks a descriptor as one that a forked child closes, until dropped.
pub(super) struct CloseInChild(RawFd);

impl CloseInChild {
    pub(super) fn new(fd: &impl AsRawFd) -> CloseInChild {
        let fd = fd.as_raw_fd();
        for slot in &DESCRIPTORS {
            if slot
                .compare_exchange(NONE, fd, Ordering::Relaxed, Ordering::Relaxed)
                .is_ok()
            {
                break;
            }
        }
        CloseInChild(fd)
    }
}

impl Drop for CloseInChild {
    fn drop(&mut self) {
        for slot in &DESCRIPTORS {
            if slot
                .compare_exchange(self.0, NONE, Ordering::Relaxed, Ordering::Relaxed)
                .is_ok()
            {
                break;
            }
        }
    }
}
