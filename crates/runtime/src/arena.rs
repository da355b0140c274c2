//! Memory of this process that the other ranks of its host reach in place.
//!
//! A collective whose data lies here on every rank is done without staging: ranks read
//! each other's memory, and an all-reduce writes each result once to every rank. Blocks
//! are kept when they are freed, with their pages, since touching a new page costs more
//! than copying it: at most as much is kept as was ever in use at a time.

use std::collections::{BTreeMap, HashMap};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard};

use crate::Error;
use crate::fabric::{Fabric, is_forked};
use crate::transport::region::OwnRegion;

const PAGE: usize = 4096;

/// Takes `bytes` of memory, aligned to a page. What stands in it is not defined.
///
/// # Errors
/// [`Error::Resource`] when the shared memory of this process is used up, and any error
/// of setting it up.
pub fn allocate(bytes: usize) -> Result<NonNull<u8>, Error> {
    Fabric::get()?.arena.allocate(bytes)
}

/// Gives back what [`allocate`] gave.
///
/// # Safety
/// `memory` came from [`allocate`], was not freed since, and nobody uses it any more.
pub unsafe fn free(memory: NonNull<u8>) {
    // A forked child has the parent's memory, not its own.
    if !is_forked()
        && let Some(fabric) = Fabric::existing()
    {
        fabric.arena.free(memory);
    }
}

/// The blocks of a process.
pub(crate) struct Arena {
    region: Arc<OwnRegion>,
    blocks: Mutex<Blocks>,
}

#[derive(Default)]
struct Blocks {
    /// By offset in the region.
    taken: HashMap<usize, Block>,
    /// Offsets by length.
    kept: BTreeMap<usize, Vec<usize>>,
    taken_bytes: usize,
    most_taken_bytes: usize,
    kept_bytes: usize,
}

struct Block {
    bytes: usize,
    /// A peer may still write to it: its addresses are not used again.
    tainted: bool,
}

impl Arena {
    pub(crate) fn new(region: Arc<OwnRegion>) -> Arena {
        Arena {
            region,
            blocks: Mutex::default(),
        }
    }

    fn blocks(&self) -> MutexGuard<'_, Blocks> {
        self.blocks.lock().expect("no panic while blocks are held")
    }

    fn allocate(&self, bytes: usize) -> Result<NonNull<u8>, Error> {
        let bytes = block_bytes(bytes);
        let mut blocks = self.blocks();
        let offset = match blocks.reuse(bytes) {
            Some(offset) => offset,
            None => match self.region.allocate(bytes) {
                Ok(offset) => self.region.populate(offset, bytes),
                Err(_) => {
                    blocks.trim(&self.region, 0);
                    self.region
                        .allocate(bytes)
                        .map(|offset| self.region.populate(offset, bytes))?
                }
            },
        };
        blocks.taken_bytes += bytes;
        blocks.most_taken_bytes = blocks.most_taken_bytes.max(blocks.taken_bytes);
        let tainted = false;
        blocks.taken.insert(offset, Block { bytes, tainted });
        self.region.mapping.at(offset, bytes)
    }

    fn free(&self, memory: NonNull<u8>) {
        let mut blocks = self.blocks();
        let Some(offset) = self.region.mapping.offset_of(memory.as_ptr(), 1) else {
            return;
        };
        let Some(block) = blocks.taken.remove(&offset) else {
            return;
        };
        blocks.taken_bytes -= block.bytes;
        if block.tainted {
            self.region.discard(offset, block.bytes);
            return;
        }
        blocks.kept.entry(block.bytes).or_default().push(offset);
        blocks.kept_bytes += block.bytes;
        let most = blocks.most_taken_bytes;
        blocks.trim(&self.region, most);
    }

    /// Says that peers may go on to use the memory that is taken now, after a collective
    /// failed in which they could reach it.
    pub(crate) fn taint(&self) {
        for block in self.blocks().taken.values_mut() {
            block.tainted = true;
        }
    }
}

impl Blocks {
    fn reuse(&mut self, bytes: usize) -> Option<usize> {
        let offset = self.kept.get_mut(&bytes)?.pop()?;
        self.kept_bytes -= bytes;
        Some(offset)
    }

    /// Gives memory back to the region, the largest blocks first, until at most `limit`
    /// bytes are kept.
    fn trim(&mut self, region: &OwnRegion, limit: usize) {
        while self.kept_bytes > limit
            && let Some(mut entry) = self.kept.last_entry()
        {
            let bytes = *entry.key();
            match entry.get_mut().pop() {
                Some(offset) => {
                    region.release(offset, bytes);
                    self.kept_bytes -= bytes;
                }
                None => {
                    entry.remove();
                }
            }
        }
    }
}

/// The length of the block for `bytes`: whole pages, and with a step of an eighth of the
/// size, so that buffers of about one size can follow each other in one block.
fn block_bytes(bytes: usize) -> usize {
    let bytes = bytes.max(1);
    let step = (bytes.next_power_of_two() / 16).max(PAGE);
    bytes.next_multiple_of(step)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arena() -> Arena {
        Arena::new(Arc::new(OwnRegion::new().unwrap()))
    }

    #[test]
    fn blocks_are_reused_and_bounded() {
        let arena = arena();
        let first = arena.allocate(1 << 20).unwrap();
        arena.free(first);
        assert_eq!(arena.blocks().kept_bytes, 1 << 20);
        assert_eq!(arena.allocate((1 << 20) - 5).unwrap(), first);
        // Kept: no more than was ever taken at a time.
        let second = arena.allocate(3 << 20).unwrap();
        arena.free(first);
        arena.free(second);
        let third = arena.allocate(2 << 20).unwrap();
        arena.free(third);
        assert!(arena.blocks().kept_bytes <= 4 << 20);
        assert_eq!(arena.blocks().taken_bytes, 0);
    }

    #[test]
    fn memory_that_peers_may_still_write_to_is_not_given_out_again() {
        let arena = arena();
        let first = arena.allocate(8192).unwrap();
        arena.taint();
        arena.free(first);
        assert_ne!(arena.allocate(8192).unwrap(), first);
        assert_eq!(arena.blocks().kept_bytes, 0);
    }

    #[test]
    fn what_is_kept_makes_room_for_what_is_asked_for() {
        let arena = arena();
        let most = 5 << 30;
        // Address space only: nothing this large is populated.
        let offset = arena.region.allocate(most).unwrap();
        let block = arena.allocate(1 << 20).unwrap();
        arena.free(block);
        let rest = crate::transport::region::REGION_BYTES - most - (1 << 20);
        assert!(arena.region.allocate(rest).is_err());
        arena.blocks().trim(&arena.region, 0);
        assert!(arena.region.allocate(rest).is_ok());
        arena.region.release(offset, most);
    }

    #[test]
    fn sizes_are_rounded_by_at_most_an_eighth() {
        for bytes in [1, 4096, 4097, 65_537, (1 << 20) + 1, 100_000_000] {
            let block = block_bytes(bytes);
            assert!(block >= bytes && block.is_multiple_of(PAGE));
            assert!(block <= (bytes + bytes / 8).max(PAGE).next_multiple_of(PAGE));
        }
    }
}
