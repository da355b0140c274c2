use std::fmt;

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
    /// reduction's result, on the rank that finishes that element. Where a `Reduce` makes
    /// the result it follows at once on the same chunk, so that an executor can do both
    /// before it rounds.
    Finish {
        /// Operand and result.
        chunk: Chunk,
    },
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Step::Send { to, chunk } => write!(f, "send {to} {chunk}"),
            Step::Recv { from, chunk } => write!(f, "recv {from} {chunk}"),
            Step::RecvReduce { from, chunk } => write!(f, "recv_reduce {from} {chunk}"),
            Step::Reduce { dst, sources } => {
                write!(f, "reduce {dst} =")?;
                for (index, source) in sources.iter().enumerate() {
                    write!(f, "{}{source}", if index == 0 { " " } else { " + " })?;
                }
                Ok(())
            }
            Step::Copy { src, dst } => write!(f, "copy {dst} = {src}"),
            Step::Finish { chunk } => write!(f, "finish {chunk}"),
        }
    }
}
