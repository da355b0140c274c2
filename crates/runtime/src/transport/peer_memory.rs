//! Reading another process's memory with one system call (Linux's cross-memory attach).
//!
//! It saves a copy where data is moved and not reduced. The kernel allows it between
//! processes of one user, unless a security module or a container's filter forbids it;
//! so each process tries it on its peer before it relies on it.

use std::io::IoSliceMut;

use nix::errno::Errno;
use nix::sys::uio::{RemoteIoVec, process_vm_readv};
use nix::unistd::Pid;

use crate::link::ReadPart;

/// The memory of a process on this host, which lets this process read it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PeerMemory(Pid);

impl PeerMemory {
    /// The memory of process `pid`, if it can be read and is indeed that of the process whose
    /// `identity` stands at `address`.
    pub(crate) fn find(pid: i32, address: u64, identity: u128) -> Option<PeerMemory> {
        let memory = PeerMemory(Pid::from_raw(pid));
        let mut found = [0; size_of::<u128>()];
        let part = ReadPart {
            ptr: found.as_mut_ptr(),
            bytes: found.len(),
        };
        // SAFETY: the part is a local array.
        unsafe { memory.read(&[part], address) }.ok()?;
        (u128::from_ne_bytes(found) == identity).then_some(memory)
    }

    /// Fills `to` with what stands at `from` and after it.
    ///
    /// # Errors
    /// The process has ended, or has no such memory.
    ///
    /// # Safety
    /// The parts are writable, and nobody else uses them meanwhile.
    pub(crate) unsafe fn read(&self, to: &[ReadPart], from: u64) -> Result<(), Errno> {
        let mut from = from as usize;
        for part in to {
            let mut done = 0;
            while done < part.bytes {
                // SAFETY: the caller vouches for the part.
                let left = unsafe {
                    std::slice::from_raw_parts_mut(part.ptr.add(done), part.bytes - done)
                };
                let remote = RemoteIoVec {
                    base: from,
                    len: left.len(),
                };
                let read = process_vm_readv(self.0, &mut [IoSliceMut::new(left)], &[remote])?;
                if read == 0 {
                    return Err(Errno::EFAULT);
                }
                done += read;
                from += read;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_found_by_what_stands_in_it() {
        let identity = 0x0123_4567_89ab_cdef_u128 << 40;
        let address = std::ptr::from_ref(&identity) as u64;
        let pid = std::process::id() as i32;
        let memory = PeerMemory::find(pid, address, identity).unwrap();
        assert!(PeerMemory::find(pid, address, identity + 1).is_none());
        assert!(PeerMemory::find(pid, 0, identity).is_none());
        let source: Vec<u8> = (0..100_000u32).map(|i| (i % 251) as u8).collect();
        let mut target = vec![0; source.len()];
        let (head, tail) = target.split_at_mut(33_333);
        let parts = [head, tail].map(|part| ReadPart {
            ptr: part.as_mut_ptr(),
            bytes: part.len(),
        });
        // SAFETY: the parts are local vectors.
        unsafe { memory.read(&parts, source.as_ptr() as u64) }.unwrap();
        assert_eq!(target, source);
        // SAFETY: as above.
        assert_eq!(unsafe { memory.read(&parts, 8) }, Err(Errno::EFAULT));
    }
}
