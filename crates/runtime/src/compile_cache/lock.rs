//! Locks between processes, on single bytes of a file.
//!
//! They are Linux's locks of open file descriptions: threads of one process exclude each
//! other as processes do, and the kernel releases what a killed process held.

use std::fs::{File, OpenOptions};
use std::io;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};

/// A byte of a file, locked.
pub(super) struct ByteLock {
    file: File,
    byte: i64,
}

impl ByteLock {
    /// Locks `byte` of the file `path`, which is made if need be. `None` when someone
    /// else still holds it after `timeout`: a stopped process cannot stop others.
    pub(super) fn acquire(
        path: &Path,
        byte: i64,
        timeout: Duration,
    ) -> io::Result<Option<ByteLock>> {
        let file = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .open(path)?;
        let deadline = Instant::now() + timeout;
        let mut pause = Duration::from_millis(1);
        loop {
            match set(&file, byte, libc::F_WRLCK) {
                Ok(()) => return Ok(Some(ByteLock { file, byte })),
                Err(Errno::EAGAIN | Errno::EACCES) => {}
                Err(error) => return Err(error.into()),
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            thread::sleep(pause.min(left));
            pause = (pause * 2).min(Duration::from_millis(20));
        }
    }
}

impl Drop for ByteLock {
    fn drop(&mut self) {
        // Closing is not enough: a child forked meanwhile shares the description.
        if let Err(error) = set(&self.file, self.byte, libc::F_UNLCK) {
            tracing::warn!(%error, "a lock of the compile cache was not released");
        }
    }
}

fn set(file: &File, byte: i64, kind: i32) -> Result<(), Errno> {
    let range = libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: byte,
        l_len: 1,
        l_pid: 0,
    };
    fcntl(file, FcntlArg::F_OFD_SETLK(&range)).map(drop)
}
