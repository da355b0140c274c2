use std::sync::Arc;

use super::cost::{Domain, Formula, Reduce, Rounds};
use super::order::Order;
use super::timeline::{Clock, Timeline};
use super::{Algorithm, CostModel, Prediction, Transport};
use crate::Kind;
use crate::schedule::{Buffer, Chunk, Pieces, RankPlan, Request};

/// Every rank sends to the next one only.
///
/// An all-reduce is a reduce-scatter, in which each segment travels once around and
/// collects all ranks, then an all-gather. Results are bit-equal: the last rank on a
/// segment's way finishes it for all.
///
/// | kind | alpha terms | elements sent by a rank |
/// |---|---|---|
/// | all_reduce | 2 (n - 1) | 2 count (n - 1) / n |
/// | all_gather, reduce_scatter | n - 1 | all pieces but one |
///
/// In both directions at once (`bidirectional_ring`) half of each segment goes either
/// way: the same alpha terms, half the bytes over each link.
///
/// Use: large sizes; any n; uneven pieces. A link carries one neighbour's traffic only, so
/// on a torus follow a Hamiltonian cycle with [`Ring::along`]. Source: Patarasuk and
/// Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 2009.
#[derive(Clone, Debug, Default)]
pub struct Ring {
    order: Option<Order>,
    both_ways: bool,
}

impl Ring {
    /// One way around, in rank order.
    pub fn new() -> Ring {
        Ring::default()
    }

    /// Both ways around, in rank order.
    pub fn bidirectional() -> Ring {
        Ring {
            order: None,
            both_ways: true,
        }
    }

    /// The same around `order`, which names every rank once. Requests for another number
    /// of ranks are not supported.
    pub fn along(self, order: impl Into<Arc<[u32]>>) -> Ring {
        Ring {
            order: Some(Order::new(order.into())),
            ..self
        }
    }

    /// The lanes of `rank`.
    fn lanes(&self, ranks: u32, rank: u32) -> Vec<Lane> {
        let at = |position: u32| self.rank_at(0, ranks, position);
        let position = self.order.as_ref().map_or(rank, |order| order.place(rank));
        let next = at((position + 1) % ranks);
        let previous = at((position + ranks - 1) % ranks);
        let forward = Lane {
            ranks,
            position,
            next,
            previous,
        };
        // Both ways are one between two ranks.
        if !self.both_ways || ranks <= 2 {
            return vec![forward];
        }
        let position = ranks - 1 - position;
        vec![
            forward,
            Lane {
                ranks,
                position,
                next: previous,
                previous: next,
            },
        ]
    }

    /// The rank at a lane's position.
    fn rank_at(&self, lane: usize, ranks: u32, position: u32) -> u32 {
        let position = if lane == 0 {
            position
        } else {
            ranks - 1 - position
        };
        self.order
            .as_ref()
            .map_or(position, |order| order.rank(position))
    }
}

impl Algorithm for Ring {
    fn name(&self) -> &'static str {
        if self.both_ways {
            "bidirectional_ring"
        } else {
            "ring"
        }
    }

    fn supports(&self, request: &Request) -> bool {
        matches!(
            request.kind,
            Kind::AllReduce | Kind::AllGather | Kind::ReduceScatter
        ) && self
            .order
            .as_ref()
            .is_none_or(|order| order.fits(request.ranks))
    }

    fn steps(&self, request: &Request, rank: u32) -> RankPlan {
        let pieces = request.pieces();
        let ranks = request.ranks;
        let lanes = self.lanes(ranks, rank);
        let parts = lanes.len() as u32;
        let clock = Clock::new(
            0,
            pieces.largest().div_ceil(parts.into()),
            request.max_message,
        );
        let mut timeline = Timeline::default();
        let mut scratch = 0;
        // The part of a piece that a lane carries; `origin` is where the piece starts.
        let share = |chunk: Chunk, lane: usize| {
            let share = Pieces::split(chunk.count, parts);
            chunk.part(share.offset(lane as u32), share.count(lane as u32))
        };
        let own = Chunk::new(Buffer::Output, 0..pieces.count(rank));
        let piece = |buffer, of: u32| Chunk::new(buffer, pieces.range(of..of + 1));
        for (number, lane) in lanes.iter().enumerate() {
            let of = |position| self.rank_at(number, ranks, position);
            let output = |position| share(piece(Buffer::Output, of(position)), number);
            let input = |position| share(piece(Buffer::Input, of(position)), number);
            match request.kind {
                Kind::AllReduce => {
                    lane.reduce_scatter(&mut timeline, clock, 0, output, true);
                    lane.all_gather(&mut timeline, clock, u64::from(ranks - 1), output, output);
                }
                Kind::AllGather => {
                    let own = share(
                        Chunk {
                            buffer: Buffer::Input,
                            ..own
                        },
                        number,
                    );
                    let source = |position| {
                        if position == lane.position {
                            own
                        } else {
                            output(position)
                        }
                    };
                    lane.all_gather(&mut timeline, clock, 0, source, output);
                    timeline.copy_meanwhile(0, own, output(lane.position));
                }
                _ => {
                    let slots = Slots {
                        start: scratch,
                        count: clock.cuts() + 2,
                        size: pieces.largest().min(request.max_message),
                    };
                    if ranks > 2 {
                        scratch += slots.count * slots.size;
                    }
                    lane.reduce_scatter_from(
                        &mut timeline,
                        clock,
                        input,
                        share(own, number),
                        slots,
                        true,
                    );
                }
            }
        }
        timeline.into_plan(scratch)
    }

    fn cost(&self, request: &Request, model: &dyn CostModel, transport: Transport) -> Prediction {
        let domain = Domain::Every;
        Formula::predict(request, model, transport, domain, |formula| {
            let lanes = if self.both_ways && request.ranks > 2 {
                2.0
            } else {
                1.0
            };
            let piece = request.pieces().largest() as f64 * formula.element / lanes;
            let rounds = f64::from(request.ranks - 1);
            let half = |reduce| Rounds {
                count: rounds,
                fan: lanes,
                bytes: piece,
                reduce,
            };
            match request.kind {
                Kind::AllReduce => formula.stream(&[half(Reduce::Each), half(Reduce::No)], 0.0),
                Kind::AllGather => formula.stream(&[half(Reduce::No)], piece * lanes),
                _ => formula.stream(&[half(Reduce::Together)], 0.0),
            }
        })
    }
}

/// A rank's place on a ring in one direction.
#[derive(Clone, Copy)]
pub(super) struct Lane {
    pub(super) ranks: u32,
    pub(super) position: u32,
    pub(super) next: u32,
    pub(super) previous: u32,
}

/// Places in scratch memory for messages, used in turn.
pub(super) struct Slots {
    pub(super) start: u64,
    pub(super) count: u64,
    pub(super) size: u64,
}

impl Slots {
    fn at(&self, index: u64, count: u64) -> Chunk {
        let start = self.start + index % self.count * self.size;
        Chunk::new(Buffer::Scratch, start..start + count)
    }
}

impl Lane {
    /// The position that is `back` places before this one.
    fn back(&self, back: u64) -> u32 {
        let ranks = u64::from(self.ranks);
        ((u64::from(self.position) + ranks - back % ranks) % ranks) as u32
    }

    fn rounds(&self) -> u64 {
        u64::from(self.ranks - 1)
    }

    /// Reduces in place; this position ends with its own segment.
    pub(super) fn reduce_scatter(
        &self,
        timeline: &mut Timeline,
        clock: Clock,
        first_round: u64,
        segment: impl Fn(u32) -> Chunk,
        finish: bool,
    ) {
        for round in 0..self.rounds() {
            for message in clock.messages(first_round + round, segment(self.back(round + 1))) {
                timeline.send(message.sent, self.next, message.part);
            }
            for message in clock.messages(first_round + round, segment(self.back(round + 2))) {
                timeline.recv_reduce(message.received, self.previous, message.part);
                if finish && round + 1 == self.rounds() {
                    timeline.finish(message.received, message.part);
                }
            }
        }
        if finish && self.ranks == 1 {
            timeline.finish(0, segment(self.position));
        }
    }

    /// Spreads the segments that each position begins with.
    pub(super) fn all_gather(
        &self,
        timeline: &mut Timeline,
        clock: Clock,
        first_round: u64,
        source: impl Fn(u32) -> Chunk,
        segment: impl Fn(u32) -> Chunk,
    ) {
        for round in 0..self.rounds() {
            for message in clock.messages(first_round + round, source(self.back(round))) {
                timeline.send(message.sent, self.next, message.part);
            }
            for message in clock.messages(first_round + round, segment(self.back(round + 1))) {
                timeline.recv(message.received, self.previous, message.part);
            }
        }
    }

    /// Reduces what must not be written to into `own`; partial sums live in slots.
    pub(super) fn reduce_scatter_from(
        &self,
        timeline: &mut Timeline,
        clock: Clock,
        input: impl Fn(u32) -> Chunk,
        own: Chunk,
        slots: Slots,
        finish: bool,
    ) {
        if self.ranks == 1 {
            timeline.copy(0, input(self.position), own);
            timeline.finish(0, own);
        }
        for round in 0..self.rounds() {
            for message in clock.messages(round, input(self.back(round + 1))) {
                let partial = match round {
                    0 => message.part,
                    _ => slots.at(
                        (round - 1) * clock.cuts() + message.number,
                        message.part.count,
                    ),
                };
                timeline.send(message.sent, self.next, partial);
            }
            let last = round + 1 == self.rounds();
            for message in clock.messages(round, input(self.back(round + 2))) {
                let at = message.received;
                let into = if last {
                    let skip = message.part.offset - input(self.position).offset;
                    own.part(skip, message.part.count)
                } else {
                    slots.at(round * clock.cuts() + message.number, message.part.count)
                };
                timeline.recv(at, self.previous, into);
                timeline.reduce(at, into, vec![into, message.part]);
                if last && finish {
                    timeline.finish(at, into);
                }
            }
        }
    }
}
