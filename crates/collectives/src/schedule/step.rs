use super::Chunk;

/// One thing that a rank does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Send the chunk.
    Send {
        /// Receiving rank.
        to: u32,
        /// What is sent.
        chunk: Chunk,
    },
    /// Receive into the chunk, over what it held.
    Recv {
        /// Sending rank.
        from: u32,
        /// Where it goes.
        chunk: Chunk,
    },
    /// Receive and combine: `chunk = chunk op received`.
    RecvReduce {
        /// Sending rank.
        from: u32,
        /// Operand and result.
        chunk: Chunk,
    },
    /// `dst = sources[0] op sources[1] op ...`, accumulated at full precision and rounded
    /// once. `dst` may be one of the sources. With one source it is a copy.
    Reduce {
        /// Result.
        dst: Chunk,
        /// Operands, in this order.
        sources: Vec<Chunk>,
    },
    /// `dst = src`. The ranges do not overlap.
    Copy {
        /// Source.
        src: Chunk,
        /// Destination, of the same count.
        dst: Chunk,
    },
    /// The chunk now holds the sum of all ranks: apply what remains of the operator
    /// (the division of AVG). A planner emits it once for each element of a
    /// reduction's result, on the rank that finishes that element.
    Finish {
        /// Operand and result.
        chunk: Chunk,
    },
}
