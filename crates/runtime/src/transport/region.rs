//! A process's shared memory: one memfd that its peers on the host map.
//!
//! The memfd has no name, so nothing is left when its holders are gone. It is sparse:
//! only pages that were written take memory. Layout: a header (doorbell, inbox
//! bits, directory of groups), then space that [`OwnRegion::allocate`] hands out.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};

use crate::Error;
use crate::sync::{Doorbell, Inbox};

/// Bytes of address space of a region; memory is taken page by page as it is used.
pub(crate) const REGION_BYTES: usize = 8 << 30;
const MAGIC: u64 = 0x7470_755f_6469_7374;
const PAGE: usize = 4096;
const DIRECTORY: usize = 8192;

#[repr(C, align(128))]
struct Header {
    magic: AtomicU64,
    doorbell: Doorbell,
    inbox: Inbox,
    directory: [Entry; DIRECTORY],
}

/// A group's seat: `key` names the group, `offset` is where its seat lies.
#[repr(C)]
struct Entry {
    key: AtomicU64,
    offset: AtomicU64,
}

const FREE: u64 = 0;
const TOMBSTONE: u64 = 1;

/// A mapped region, own or a peer's.
pub(crate) struct Mapping {
    base: NonNull<u8>,
}

// SAFETY: the mapping is shared memory that lives until drop; all access to it goes
// through atomics or through ranges whose exclusive use the protocols grant.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps a whole region.
    pub(crate) fn new(fd: BorrowedFd<'_>) -> Result<Mapping, Error> {
        let size = nix::sys::stat::fstat(fd)
            .map_err(resource("fstat"))?
            .st_size;
        if size as usize != REGION_BYTES {
            return Err(Error::Network(format!(
                "a peer's shared memory has {size} bytes, expected {REGION_BYTES}"
            )));
        }
        let length = NonZeroUsize::new(REGION_BYTES).expect("a constant above 0");
        // SAFETY: a fresh shared mapping of a file of at least `length` bytes; a peer
        // that truncated it would raise SIGBUS, which the seal below excludes.
        let base = unsafe {
            mmap(
                None,
                length,
                ProtFlags::PROT_READ | ProtFlags::PROT_WRITE,
                MapFlags::MAP_SHARED | MapFlags::MAP_NORESERVE,
                fd,
                0,
            )
        }
        .map_err(resource("mapping shared memory"))?;
        Ok(Mapping { base: base.cast() })
    }

    fn header(&self) -> &Header {
        // SAFETY: the mapping starts with a header, is page-aligned and zeroed at
        // first, for which every field is valid; it is only accessed by atomics.
        unsafe { self.base.cast().as_ref() }
    }

    /// Whether the region was set up by a process that speaks this layout.
    pub(crate) fn is_valid(&self) -> bool {
        self.header().magic.load(Ordering::Acquire) == MAGIC
    }

    pub(crate) fn doorbell(&self) -> &Doorbell {
        &self.header().doorbell
    }

    pub(crate) fn inbox(&self) -> &Inbox {
        &self.header().inbox
    }

    /// Where the owner's seat in group `key` lies, once the owner has made it.
    pub(crate) fn find_seat(&self, key: u64) -> Option<usize> {
        let directory = &self.header().directory;
        for probe in 0..DIRECTORY {
            let entry = &directory[(key as usize).wrapping_add(probe) % DIRECTORY];
            match entry.key.load(Ordering::Acquire) {
                FREE => return None,
                found if found == key => {
                    return Some(entry.offset.load(Ordering::Acquire) as usize);
                }
                _ => {}
            }
        }
        None
    }

    /// The address of `[offset, offset + bytes)`.
    ///
    /// # Errors
    /// When a peer named a range outside the region.
    pub(crate) fn at(&self, offset: usize, bytes: usize) -> Result<NonNull<u8>, Error> {
        match offset.checked_add(bytes) {
            Some(end) if end <= REGION_BYTES && offset.is_multiple_of(128) => {
                // SAFETY: the range lies inside the mapping.
                Ok(unsafe { self.base.add(offset) })
            }
            _ => Err(Error::Network(format!(
                "a peer named bytes {offset}+{bytes}, outside its shared memory"
            ))),
        }
    }

    /// Where `bytes` at `ptr` lie in the region, if they lie in it.
    pub(crate) fn offset_of(&self, ptr: *const u8, bytes: usize) -> Option<usize> {
        let offset = (ptr as usize).checked_sub(self.base.as_ptr() as usize)?;
        (offset.checked_add(bytes)? <= REGION_BYTES).then_some(offset)
    }

    /// The address of the `bytes` at `offset`, which a peer named; `None` outside the
    /// region.
    pub(crate) fn window(&self, offset: u64, bytes: usize) -> Option<NonNull<u8>> {
        let offset = usize::try_from(offset).ok()?;
        // SAFETY: the range lies inside the mapping.
        (offset.checked_add(bytes)? <= REGION_BYTES).then(|| unsafe { self.base.add(offset) })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped with this length in `new`; nothing borrows from it any more.
        let _ = unsafe { munmap(self.base.cast(), REGION_BYTES) };
    }
}

/// The region of this process.
pub(crate) struct OwnRegion {
    pub(crate) mapping: Mapping,
    fd: OwnedFd,
    /// Free ranges: offset to length.
    free: Mutex<BTreeMap<usize, usize>>,
}

impl OwnRegion {
    pub(crate) fn new() -> Result<OwnRegion, Error> {
        let fd = memfd_create(
            "tpu_dist",
            MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING,
        )
        .map_err(resource("memfd_create"))?;
        nix::unistd::ftruncate(&fd, REGION_BYTES as i64).map_err(resource("sizing a memfd"))?;
        rustix::fs::fcntl_add_seals(
            &fd,
            rustix::fs::SealFlags::SHRINK
                | rustix::fs::SealFlags::GROW
                | rustix::fs::SealFlags::SEAL,
        )
        .map_err(|error| Error::Resource(format!("sealing a memfd: {error}")))?;
        let mapping = Mapping::new(fd.as_fd())?;
        mapping.header().magic.store(MAGIC, Ordering::Release);
        let start = size_of::<Header>().next_multiple_of(PAGE);
        let free = BTreeMap::from([(start, REGION_BYTES - start)]);
        Ok(OwnRegion {
            mapping,
            fd,
            free: Mutex::new(free),
        })
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Takes `bytes` of zeroed memory, page-aligned; returns the offset.
    pub(crate) fn allocate(&self, bytes: usize) -> Result<usize, Error> {
        let bytes = bytes.next_multiple_of(PAGE);
        let mut free = self.free.lock().expect("no panic while the list is held");
        let found = free.iter().find(|(_, length)| **length >= bytes);
        let Some((&offset, &length)) = found else {
            return Err(Error::Resource(format!(
                "the {REGION_BYTES} bytes of shared memory of this process are used up; \
                 destroy process groups that are no longer needed"
            )));
        };
        free.remove(&offset);
        if length > bytes {
            free.insert(offset + bytes, length - bytes);
        }
        Ok(offset)
    }

    /// Gives the range its pages at once, which is faster than one by one as they are
    /// touched; returns `offset`.
    pub(crate) fn populate(&self, offset: usize, bytes: usize) -> usize {
        // SAFETY: the range was allocated, and its content stays as it is. Where the kernel
        // does not know the advice (before 5.14) nothing happens.
        let _ = unsafe {
            rustix::mm::madvise(
                self.mapping.base.add(offset).as_ptr().cast(),
                bytes,
                rustix::mm::Advice::LinuxPopulateWrite,
            )
        };
        offset
    }

    /// Gives the pages of a range back to the system; they read as zeros when next used.
    pub(crate) fn discard(&self, offset: usize, bytes: usize) {
        let punch = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
        let _ = rustix::fs::fallocate(&self.fd, punch, offset as u64, bytes as u64);
    }

    /// Gives back what [`OwnRegion::allocate`] gave; no peer touches it any more.
    pub(crate) fn release(&self, offset: usize, bytes: usize) {
        let mut bytes = bytes.next_multiple_of(PAGE);
        self.discard(offset, bytes);
        let mut free = self.free.lock().expect("no panic while the list is held");
        let mut start = offset;
        if let Some((&before, &length)) = free.range(..offset).next_back()
            && before + length == offset
        {
            free.remove(&before);
            start = before;
            bytes += length;
        }
        if let Some(length) = free.remove(&(start + bytes)) {
            bytes += length;
        }
        free.insert(start, bytes);
    }

    /// Publishes where the seat in group `key` lies.
    pub(crate) fn publish_seat(&self, key: u64, offset: usize) -> Result<(), Error> {
        let _writer = self.free.lock().expect("no panic while the list is held");
        let directory = &self.mapping.header().directory;
        for probe in 0..DIRECTORY {
            let entry = &directory[(key as usize).wrapping_add(probe) % DIRECTORY];
            if matches!(entry.key.load(Ordering::Relaxed), FREE | TOMBSTONE) {
                entry.offset.store(offset as u64, Ordering::Release);
                entry.key.store(key, Ordering::Release);
                return Ok(());
            }
        }
        Err(Error::Resource(format!(
            "more than {DIRECTORY} process groups at a time"
        )))
    }

    /// Takes back [`OwnRegion::publish_seat`].
    pub(crate) fn retract_seat(&self, key: u64) {
        let _writer = self.free.lock().expect("no panic while the list is held");
        let directory = &self.mapping.header().directory;
        for probe in 0..DIRECTORY {
            let at = (key as usize).wrapping_add(probe) % DIRECTORY;
            match directory[at].key.load(Ordering::Relaxed) {
                FREE => return,
                found if found == key => {
                    // A tombstone keeps later entries of the chain reachable; at its end it is not
                    // needed, and neither are those right before it.
                    directory[at].key.store(TOMBSTONE, Ordering::Release);
                    let after = directory[(at + 1) % DIRECTORY].key.load(Ordering::Relaxed);
                    if after == FREE {
                        for back in 0..DIRECTORY {
                            let key = &directory[(at + DIRECTORY - back) % DIRECTORY].key;
                            if key.load(Ordering::Relaxed) != TOMBSTONE {
                                break;
                            }
                            key.store(FREE, Ordering::Release);
                        }
                    }
                    return;
                }
                _ => {}
            }
        }
    }
}

/// A group key that is neither of the two reserved values.
pub(crate) fn group_key(hash: u64) -> u64 {
    hash | 2
}

fn resource(what: &'static str) -> impl Fn(nix::Error) -> Error {
    move |error| Error::Resource(format!("{what}: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_handed_out_taken_back_and_zeroed() {
        let region = OwnRegion::new().unwrap();
        let first = region.allocate(10_000).unwrap();
        let second = region.allocate(1).unwrap();
        assert!(second >= first + 10_000);
        let bytes = region.mapping.at(first, 10_000).unwrap();
        // SAFETY: just allocated to this test.
        unsafe { bytes.write_bytes(7, 10_000) };
        region.release(first, 10_000);
        assert_eq!(region.allocate(10_000).unwrap(), first);
        // SAFETY: as above.
        assert_eq!(unsafe { *bytes.as_ptr() }, 0);
        region.release(first, 10_000);
        region.release(second, 1);
        assert_eq!(
            region.free.lock().unwrap().len(),
            1,
            "the ranges joined again"
        );
        assert!(region.mapping.at(REGION_BYTES, 1).is_err());
        assert!(region.mapping.at(usize::MAX - 127, 1 << 20).is_err());
    }

    #[test]
    fn seats_are_found_through_another_mapping() {
        let region = OwnRegion::new().unwrap();
        let view = Mapping::new(region.fd()).unwrap();
        assert!(view.is_valid());
        // Three keys of one chain.
        let keys = [2, 2 + DIRECTORY as u64, 2 + 2 * DIRECTORY as u64];
        for (index, key) in keys.into_iter().enumerate() {
            assert_eq!(view.find_seat(key), None);
            region.publish_seat(key, (index + 1) * PAGE).unwrap();
        }
        region.retract_seat(keys[1]);
        assert_eq!(view.find_seat(keys[1]), None);
        assert_eq!(view.find_seat(keys[2]), Some(3 * PAGE));
        region.retract_seat(keys[2]);
        region.retract_seat(keys[0]);
        assert!(
            region
                .mapping
                .header()
                .directory
                .iter()
                .all(|entry| { entry.key.load(Ordering::Relaxed) == FREE })
        );
        view.inbox().mark(70);
        let mut seen = Vec::new();
        region.mapping.inbox().take(|bit| seen.push(bit));
        assert_eq!(seen, [70]);
    }
}
