use std::fmt;
use std::ops::Range;

use super::pieces::bound;

/// Memory that a step works on.
///
/// `Input` and `Output` are the user's. They are the pieces of a rank one after the
/// other, in rank order. `AllReduce`, `Reduce` and `Broadcast` work in `Output` alone:
/// the executor has put the input there, and a rank that is not the root of a `Reduce`
/// finds it unchanged afterwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Buffer {
    /// What the rank brings; read only.
    Input,
    /// What the rank gets.
    Output,
    /// Memory of the operation itself, with undefined contents at first.
    Scratch,
}

/// A range of elements in a buffer: `[offset, offset + count)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Chunk {
    /// The memory.
    pub buffer: Buffer,
    /// First element.
    pub offset: u64,
    /// Number of elements.
    pub count: u64,
}

impl Chunk {
    /// The elements `range` of `buffer`.
    pub fn new(buffer: Buffer, range: Range<u64>) -> Chunk {
        Chunk {
            buffer,
            offset: range.start,
            count: range.end - range.start,
        }
    }

    /// One past the last element.
    pub fn end(&self) -> u64 {
        self.offset.saturating_add(self.count)
    }

    /// The part that starts `skip` elements in and has at most `limit` elements.
    pub fn part(&self, skip: u64, limit: u64) -> Chunk {
        let skip = skip.min(self.count);
        Chunk {
            buffer: self.buffer,
            offset: self.offset + skip,
            count: (self.count - skip).min(limit),
        }
    }

    /// Part `index` of the fewest parts of at most `limit` elements that differ by no more than
    /// one; empty past the last.
    pub fn cut(&self, index: u64, limit: u64) -> Chunk {
        let parts = self.count.div_ceil(limit);
        if index >= parts {
            return self.part(self.count, 0);
        }
        let start = bound(self.count, index, parts);
        self.part(start, bound(self.count, index + 1, parts) - start)
    }

    /// All of these parts; none for an empty chunk.
    pub fn cuts(self, limit: u64) -> impl Iterator<Item = Chunk> {
        (0..self.count.div_ceil(limit)).map(move |index| self.cut(index, limit))
    }

    /// Whether both have an element in common.
    pub fn overlaps(&self, other: &Chunk) -> bool {
        self.buffer == other.buffer
            && self.count > 0
            && other.count > 0
            && self.offset < other.end()
            && other.offset < self.end()
    }
}

impl fmt::Display for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Buffer::Input => "input",
            Buffer::Output => "output",
            Buffer::Scratch => "scratch",
        })
    }
}

/// As `output[4..8]`.
impl fmt::Display for Chunk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}[{}..{}]", self.buffer, self.offset, self.end())
    }
}
