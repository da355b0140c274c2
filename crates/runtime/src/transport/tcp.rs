//! Non-blocking TCP, as the byte stream of a link.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};

use socket2::SockRef;

use crate::config::Config;
use crate::link::{ReadPart, Stream, WritePart};

/// A data connection.
pub(crate) struct Tcp(TcpStream);

/// Parts that one system call takes.
const PARTS: usize = 16;

impl Tcp {
    /// Takes a connected stream and makes it non-blocking.
    ///
    /// # Errors
    /// The system's; for a congestion control that it does not have, with the name.
    pub(crate) fn new(stream: TcpStream) -> io::Result<Tcp> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        let socket = SockRef::from(&stream);
        if let Some(name) = &Config::get().congestion {
            socket
                .set_tcp_congestion(name.as_bytes())
                .map_err(|error| {
                    let message = format!("TPU_DIST_TCP_CONGESTION: {name:?}: {error}");
                    io::Error::new(error.kind(), message)
                })?;
        } else if socket.tcp_congestion()?.starts_with(b"bbr") {
            // Where this is not allowed, it stays as it is.
            let _ = socket.set_tcp_congestion(b"cubic");
        }
        Ok(Tcp(stream))
    }

    /// Bytes that the peer's system has not acknowledged yet.
    pub(crate) fn unacknowledged(&self) -> usize {
        let mut count: libc::c_int = 0;
        // SAFETY: SIOCOUTQ (TIOCOUTQ) stores an int through the pointer.
        let status = unsafe {
            libc::ioctl(
                std::os::fd::AsRawFd::as_raw_fd(&self.0),
                libc::TIOCOUTQ,
                &mut count,
            )
        };
        if status == 0 { count as usize } else { 0 }
    }
}

fn would_block(result: io::Result<usize>) -> io::Result<usize> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(0),
        Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(0),
        other => other,
    }
}

impl Stream for Tcp {
    fn write(&mut self, parts: &[WritePart]) -> io::Result<usize> {
        let mut slices = [IoSlice::new(&[]); PARTS];
        let count = parts.len().min(PARTS);
        for (slice, part) in slices.iter_mut().zip(parts) {
            // SAFETY: a part is readable memory for the time of the call.
            *slice = IoSlice::new(unsafe { std::slice::from_raw_parts(part.ptr, part.bytes) });
        }
        would_block(self.0.write_vectored(&slices[..count]))
    }

    fn read(&mut self, parts: &[ReadPart]) -> io::Result<usize> {
        let mut slices = [const { std::mem::MaybeUninit::<IoSliceMut<'_>>::uninit() }; PARTS];
        let count = parts.len().min(PARTS);
        for (slice, part) in slices.iter_mut().zip(parts) {
            // SAFETY: a part is writable memory, apart from all others, for the time of the
            // call.
            let bytes = unsafe { std::slice::from_raw_parts_mut(part.ptr, part.bytes) };
            slice.write(IoSliceMut::new(bytes));
        }
        // SAFETY: the first `count` were just written.
        let slices = unsafe {
            std::slice::from_raw_parts_mut(slices.as_mut_ptr().cast::<IoSliceMut<'_>>(), count)
        };
        match self.0.read_vectored(slices) {
            Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
            other => would_block(other),
        }
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.0.as_fd())
    }

    fn unsent(&self) -> usize {
        self.unacknowledged()
    }
}
