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
    pub(crate) fn new(stream: TcpStream) -> io::Result<Tcp> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        choose_congestion_control(&SockRef::from(&stream))?;
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

/// Sets what `TPU_DIST_TCP_CONGESTION` names, or cubic in place of BBR.
///
/// # Errors
/// The system does not have it.
pub(crate) fn choose_congestion_control(socket: &SockRef<'_>) -> io::Result<()> {
    if let Some(name) = &Config::get().congestion {
        return socket.set_tcp_congestion(name.as_bytes()).map_err(|error| {
            let known = "/proc/sys/net/ipv4/tcp_available_congestion_control";
            let known = std::fs::read_to_string(known).unwrap_or_default();
            let message = format!(
                "TPU_DIST_TCP_CONGESTION: expected one of {}, got {name:?}: {error}",
                known.split_whitespace().collect::<Vec<_>>().join(", ")
            );
            io::Error::new(error.kind(), message)
        });
    }
    if socket
        .tcp_congestion()
        .is_ok_and(|name| name.starts_with(b"bbr"))
    {
        // Where this is not allowed, it stays as it is.
        let _ = socket.set_tcp_congestion(b"cubic");
    }
    Ok(())
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
