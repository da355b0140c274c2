//! Memory that becomes known after an operation was started, such as that of a device
//! whose programs have yet to fill it.

use std::ptr::without_provenance_mut;
use std::sync::{Arc, OnceLock};

use smallvec::SmallVec;

use crate::call::Segment;
use crate::fabric::Fabric;

/// Bits of an address that hold the offset in a block; the others hold the block's number.
const OFFSET_BITS: u32 = 44;

/// The blocks of memory of an operation. The operation takes its place in the order at once, and
/// begins when they are [provided](Deferred::provide).
#[derive(Debug, Default)]
pub struct Deferred(OnceLock<Result<SmallVec<[Segment; 4]>, String>>);

impl Deferred {
    /// Blocks that are not known yet.
    pub fn new() -> Arc<Deferred> {
        Arc::default()
    }

    /// Says where the blocks are: from now on they are the operation's. The first word
    /// counts.
    pub fn provide(&self, blocks: &[Segment]) {
        let _ = self.0.set(Ok(blocks.into()));
        wake();
    }

    /// Says that there will be no memory, and so no operation.
    pub fn fail(&self, reason: String) {
        let _ = self.0.set(Err(reason));
        wake();
    }

    pub(crate) fn get(&self) -> Option<Result<&[Segment], &str>> {
        self.0
            .get()
            .map(|known| known.as_deref().map_err(String::as_str))
    }
}

fn wake() {
    if let Some(fabric) = Fabric::existing() {
        fabric.ring_own();
    }
}

impl Segment {
    /// `bytes` at `offset` of block number `block` of [`Deferred`] memory.
    ///
    /// # Panics
    /// For an offset of 16 TiB or more.
    pub fn deferred(block: usize, offset: usize, bytes: usize) -> Segment {
        assert!(offset >> OFFSET_BITS == 0, "offset {offset} in a block");
        Segment {
            ptr: without_provenance_mut((block + 1) << OFFSET_BITS | offset),
            bytes,
        }
    }

    /// The number of the block and the offset in it that [`Segment::deferred`] was given.
    pub fn place(self) -> Option<(usize, usize)> {
        let address = self.ptr.addr();
        let block = (address >> OFFSET_BITS).checked_sub(1)?;
        Some((block, address & ((1 << OFFSET_BITS) - 1)))
    }

    /// The memory that [`Segment::deferred`] stands for.
    pub(crate) fn resolve(self, blocks: &[Segment]) -> Result<Segment, String> {
        let (block, offset) = match self.place() {
            Some((block, offset)) => (blocks.get(block), offset),
            None => (None, 0),
        };
        match block {
            Some(block) if offset + self.bytes <= block.bytes => Ok(Segment {
                ptr: block.ptr.wrapping_add(offset),
                bytes: self.bytes,
            }),
            _ if self.bytes == 0 => Ok(self),
            _ => Err(format!(
                "expected {} bytes at {offset} of a block of its memory, got {blocks:?}",
                self.bytes
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_find_their_blocks() {
        let mut memory = [0u8; 64];
        let blocks = [
            Segment {
                ptr: memory.as_mut_ptr(),
                bytes: 16,
            },
            Segment {
                ptr: memory.as_mut_ptr().wrapping_add(16),
                bytes: 48,
            },
        ];
        let found = Segment::deferred(1, 8, 40).resolve(&blocks).unwrap();
        assert_eq!(found.ptr, memory.as_mut_ptr().wrapping_add(24));
        assert_eq!(found.bytes, 40);
        assert!(Segment::deferred(1, 9, 40).resolve(&blocks).is_err());
        assert!(Segment::deferred(2, 0, 1).resolve(&blocks).is_err());
        assert!(blocks[0].resolve(&blocks).is_err());
        assert!(Segment::deferred(2, 0, 0).resolve(&blocks).is_ok());
    }
}
