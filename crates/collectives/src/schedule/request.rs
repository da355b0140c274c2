use super::{Buffer, Pieces};
use crate::Kind;

/// What a planner is asked for. Counts are in elements.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Request {
    /// The collective.
    pub kind: Kind,
    /// Number of ranks in the group.
    pub ranks: u32,
    /// Root rank, for `Broadcast`, `Reduce`, `Gather`, `Scatter` and
    /// `MonitoredBarrier`.
    pub root: u32,
    /// Elements of each piece. `AllReduce`, `Reduce` and `Broadcast` have one piece;
    /// `AllGather`, `ReduceScatter`, `Gather` and `Scatter` one for each rank, in rank
    /// order. `Barrier` has none. Uniform pieces may be given as one entry
    /// for all ranks. `AllToAll` is uniform here; uneven exchanges are planned
    /// by the runtime from its own splits.
    pub counts: Vec<u64>,
    /// Bytes an element.
    pub element_size: u32,
    /// Largest message, in elements; larger transfers are cut into several, so that a
    /// receiver can reduce one while the next is on its way. At least 1.
    pub max_message: u64,
}

/// A request that cannot be planned.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RequestError {
    /// A group without ranks.
    #[error("ranks: expected at least 1, got 0")]
    NoRanks,
    /// A root that is not in the group.
    #[error("root: expected a rank below {ranks}, got {root}")]
    Root {
        /// What was given.
        root: u32,
        /// Ranks in the group.
        ranks: u32,
    },
    /// The wrong number of counts.
    #[error("counts: {kind} of {ranks} ranks expects {expected}, got {got} entries")]
    Counts {
        /// The collective.
        kind: Kind,
        /// Ranks in the group.
        ranks: u32,
        /// What is legal.
        expected: &'static str,
        /// Entries given.
        got: usize,
    },
    /// More elements than 64 bits can count.
    #[error("counts: {kind} of {ranks} ranks has more than 2^63 elements")]
    TooLarge {
        /// The collective.
        kind: Kind,
        /// Ranks in the group.
        ranks: u32,
    },
    /// An element without bytes.
    #[error("element_size: expected at least 1, got 0")]
    ElementSize,
    /// A message that can hold nothing.
    #[error("max_message: expected at least 1, got 0")]
    MaxMessage,
    /// Point-to-point operations have no plan.
    #[error("kind: {0} is not a collective and has no plan")]
    NotCollective(Kind),
}

impl Request {
    /// A collective of `bytes` in all: one vector, or all pieces, which are equal (the last
    /// bytes may be padding). Rank 0 is the root; messages have at most `message_bytes`.
    pub fn of_bytes(
        kind: Kind,
        ranks: u32,
        bytes: u64,
        element_size: u32,
        message_bytes: u64,
    ) -> Request {
        let size = u64::from(element_size.max(1));
        let elements = bytes.div_ceil(size);
        let counts = match kind {
            Kind::Barrier | Kind::MonitoredBarrier => Vec::new(),
            Kind::AllReduce | Kind::Reduce | Kind::Broadcast => vec![elements],
            _ => vec![elements.div_ceil(ranks.max(1).into())],
        };
        Request {
            kind,
            ranks,
            root: 0,
            counts,
            element_size,
            max_message: (message_bytes / size).max(1),
        }
    }

    /// Checks what planners rely on.
    pub fn check(&self) -> Result<(), RequestError> {
        let Request {
            kind, ranks, root, ..
        } = *self;
        if ranks == 0 {
            return Err(RequestError::NoRanks);
        }
        if self.element_size == 0 {
            return Err(RequestError::ElementSize);
        }
        if self.max_message == 0 {
            return Err(RequestError::MaxMessage);
        }
        if self.is_rooted() && root >= ranks {
            return Err(RequestError::Root { root, ranks });
        }
        let got = self.counts.len();
        let counts = |expected| {
            Err(RequestError::Counts {
                kind,
                ranks,
                expected,
                got,
            })
        };
        match kind {
            Kind::Send | Kind::Recv => return Err(RequestError::NotCollective(kind)),
            Kind::Barrier | Kind::MonitoredBarrier if got != 0 => return counts("no entry"),
            Kind::Broadcast | Kind::AllReduce | Kind::Reduce | Kind::AllToAll if got != 1 => {
                return counts("one entry");
            }
            Kind::AllGather | Kind::ReduceScatter | Kind::Gather | Kind::Scatter
                if got != 1 && got != ranks as usize =>
            {
                return counts("one entry, or one for each rank");
            }
            _ => {}
        }
        let whole: u128 = self.counts.iter().map(|&count| u128::from(count)).sum();
        let copies = if got == 1 { u128::from(ranks) } else { 1 };
        if whole * copies * u128::from(self.element_size) > i64::MAX as u128 {
            return Err(RequestError::TooLarge { kind, ranks });
        }
        Ok(())
    }

    /// Whether one rank is special.
    pub fn is_rooted(&self) -> bool {
        matches!(
            self.kind,
            Kind::Broadcast | Kind::Reduce | Kind::Gather | Kind::Scatter | Kind::MonitoredBarrier
        )
    }

    /// Whether elements of different ranks are combined.
    pub fn is_reduction(&self) -> bool {
        matches!(
            self.kind,
            Kind::AllReduce | Kind::Reduce | Kind::ReduceScatter
        )
    }

    /// The pieces of a gather-like or scatter-like collective as the user has them; for
    /// one-piece collectives the piece split evenly over all ranks.
    pub fn pieces(&self) -> Pieces {
        match (self.kind, self.counts.as_slice()) {
            (_, []) => Pieces::uniform(0, self.ranks),
            (Kind::AllReduce | Kind::Reduce | Kind::Broadcast, [count, ..]) => {
                Pieces::split(*count, self.ranks)
            }
            (_, [count]) => Pieces::uniform(*count, self.ranks),
            (_, counts) => Pieces::uneven(counts),
        }
    }

    /// Elements that `rank` has in `Input` or `Output`; 0 for `Scratch`, which the plan sizes.
    pub fn len(&self, buffer: Buffer, rank: u32) -> u64 {
        let pieces = self.pieces();
        let at_root = |count| if rank == self.root { count } else { 0 };
        match (self.kind, buffer) {
            (_, Buffer::Scratch) => 0,
            (Kind::Broadcast | Kind::AllReduce | Kind::Reduce, Buffer::Input) => 0,
            (Kind::Broadcast | Kind::AllReduce | Kind::Reduce, Buffer::Output) => pieces.total(),
            (Kind::AllGather | Kind::Gather, Buffer::Input) => pieces.count(rank),
            (Kind::AllGather, Buffer::Output) => pieces.total(),
            (Kind::Gather, Buffer::Output) => at_root(pieces.total()),
            (Kind::ReduceScatter | Kind::AllToAll, Buffer::Input) => pieces.total(),
            (Kind::ReduceScatter | Kind::Scatter, Buffer::Output) => pieces.count(rank),
            (Kind::Scatter, Buffer::Input) => at_root(pieces.total()),
            (Kind::AllToAll, Buffer::Output) => pieces.total(),
            (Kind::Barrier | Kind::MonitoredBarrier | Kind::Send | Kind::Recv, _) => 0,
        }
    }

    /// Bytes that the collective moves, in the convention of nccl-tests: the whole of
    /// all pieces.
    pub fn bytes(&self) -> u64 {
        self.pieces().total() * u64::from(self.element_size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(kind: Kind, ranks: u32, counts: &[u64]) -> Request {
        Request {
            kind,
            ranks,
            root: 0,
            counts: counts.to_vec(),
            element_size: 4,
            max_message: 8,
        }
    }

    #[test]
    fn bad_requests_name_the_argument() {
        let good = request(Kind::AllGather, 3, &[1, 2, 3]);
        assert_eq!(good.check(), Ok(()));
        let cases: [(Request, &str); 8] = [
            (
                Request {
                    ranks: 0,
                    ..good.clone()
                },
                "ranks: expected at least 1",
            ),
            (
                Request {
                    element_size: 0,
                    ..good.clone()
                },
                "element_size",
            ),
            (
                Request {
                    max_message: 0,
                    ..good.clone()
                },
                "max_message",
            ),
            (
                Request {
                    kind: Kind::Gather,
                    root: 3,
                    ..good.clone()
                },
                "root: expected a rank below 3",
            ),
            (
                Request {
                    counts: vec![1, 2],
                    ..good.clone()
                },
                "got 2 entries",
            ),
            (
                Request {
                    kind: Kind::AllReduce,
                    ..good.clone()
                },
                "expects one entry, got 3",
            ),
            (
                Request {
                    counts: vec![u64::MAX / 8],
                    ..good.clone()
                },
                "more than 2^63",
            ),
            (
                Request {
                    kind: Kind::Send,
                    ..good.clone()
                },
                "not a collective",
            ),
        ];
        for (request, message) in cases {
            let error = request.check().expect_err(message).to_string();
            assert!(error.contains(message), "{error:?} lacks {message:?}");
        }
    }

    #[test]
    fn lengths_follow_the_kind() {
        let uneven = |kind| request(kind, 3, &[1, 2, 3]);
        let one = |kind| request(kind, 3, &[5]);
        use Buffer::{Input, Output};
        let cases = [
            (one(Kind::AllReduce), [0, 5], [0, 5]),
            (one(Kind::AllToAll), [15, 15], [15, 15]),
            (one(Kind::AllGather), [5, 15], [5, 15]),
            (uneven(Kind::AllGather), [1, 6], [2, 6]),
            (uneven(Kind::Gather), [1, 6], [2, 0]),
            (uneven(Kind::Scatter), [6, 1], [0, 2]),
            (uneven(Kind::ReduceScatter), [6, 1], [6, 2]),
        ];
        for (request, root, other) in cases {
            for (rank, lengths) in [(0, root), (1, other)] {
                let got = [request.len(Input, rank), request.len(Output, rank)];
                assert_eq!(got, lengths, "{request:?} rank {rank}");
            }
        }
    }
}
