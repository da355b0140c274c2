/// Memory that a step works on.
///
/// `Input` and `Output` are the user's. They are the pieces of a rank one after the
/// other, in rank order. `AllReduce`, `Reduce` and `Broadcast` work in `Output` alone:
/// the executor has put the input there.
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
