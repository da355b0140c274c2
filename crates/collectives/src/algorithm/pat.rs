use super::cost::{Domain, Formula, Reduce};
use super::timeline::{Clock, Timeline};
use super::{Algorithm, CostModel, Prediction, Transport};
use crate::Kind;
use crate::schedule::{Buffer, Chunk, Pieces, RankPlan, Request};

/// Parallel aggregated trees: one binomial tree for each piece, all shifted copies of one
/// another, so that each round has all ranks send over the same distance.
///
/// In an all-gather, far ranks get their pieces first, one piece; near ones last, half of all. A
/// reduce-scatter is the same backwards. When all pieces fit into one message, the pieces
/// of a round are packed into one. Else each travels alone; a reduce-scatter then
/// goes through the trees depth first, so that 2 log2 n partial sums at a time are enough.
///
/// Alpha terms: log2 n rounded up when packed; elements sent by a rank: all pieces but one.
/// Reductions have one reducer for each element.
///
/// Use: small and medium pieces on a network whose far links are slow; any n; uneven
/// pieces. Source: Jeaugey, "PAT: a new algorithm for all-gather and reduce-scatter
/// operations at scale", arXiv 2506.20252.
#[derive(Clone, Copy, Debug, Default)]
pub struct Pat;

impl Algorithm for Pat {
    fn name(&self) -> &'static str {
        "pat"
    }

    fn supports(&self, request: &Request) -> bool {
        matches!(request.kind, Kind::AllGather | Kind::ReduceScatter)
    }

    fn steps(&self, request: &Request, rank: u32) -> RankPlan {
        let pieces = request.pieces();
        let packed = pieces.total() <= request.max_message;
        let part = Part {
            request,
            rank,
            pieces,
        };
        match (request.kind, packed) {
            (Kind::AllGather, true) => part.all_gather_packed(),
            (Kind::AllGather, false) => part.all_gather(),
            (_, true) => part.reduce_scatter_packed(),
            (_, false) => part.reduce_scatter(),
        }
    }

    fn cost(&self, request: &Request, model: &dyn CostModel, transport: Transport) -> Prediction {
        let domain = Domain::Idle;
        Formula::predict(request, model, transport, domain, |formula| {
            let pieces = request.pieces();
            let piece = pieces.largest() as f64 * formula.element;
            let ranks = request.ranks;
            let reduced = if request.is_reduction() {
                Reduce::Each
            } else {
                Reduce::No
            };
            if pieces.total() > request.max_message {
                return match request.kind {
                    Kind::AllGather => {
                        (0..ranks.next_power_of_two().ilog2())
                            .map(|level| (ranks - (1 << level)).div_ceil(2 << level))
                            .map(|places| formula.rounds(f64::from(places), 1.0, piece, Reduce::No))
                            .sum::<f64>()
                            + formula.copy(piece)
                    }
                    _ => formula.rounds(f64::from(ranks - 1), 1.0, piece, Reduce::Each),
                };
            }
            (0..ranks.next_power_of_two().ilog2())
                .map(|level| (ranks - (1 << level)).div_ceil(2 << level))
                .map(|places| {
                    let bytes = f64::from(places) * piece;
                    formula.rounds(1.0, 1.0, bytes, reduced) + formula.copy(2.0 * bytes)
                })
                .sum()
        })
    }
}

struct Part<'a> {
    request: &'a Request,
    rank: u32,
    pieces: Pieces,
}

/// Packed pieces of one round.
struct Pack {
    /// Offset of each place's piece, and how many places above zero are between.
    chunks: Vec<(u32, Chunk)>,
    whole: Chunk,
}

impl Part<'_> {
    /// The rounds of an all-gather as distances, far ones first.
    fn distances(&self) -> impl DoubleEndedIterator<Item = u32> + use<> {
        let levels = self.request.ranks.next_power_of_two().ilog2();
        (0..levels).rev().map(|level| 1 << level)
    }

    /// The places of a tree that are fed over `distance`. Place 0 is the tree's root; place
    /// d is d ranks after it, and is fed by the place that lacks its lowest bit.
    fn places(&self, distance: u32) -> impl Iterator<Item = u32> + use<> {
        let ranks = self.request.ranks;
        (distance..ranks).step_by(2 * distance as usize)
    }

    /// The rank whose tree has this rank in `place`.
    fn root_of(&self, rank: u32, place: u32) -> u32 {
        (rank + self.request.ranks - place) % self.request.ranks
    }

    fn after(&self, distance: u32) -> u32 {
        (self.rank + distance) % self.request.ranks
    }

    fn before(&self, distance: u32) -> u32 {
        self.root_of(self.rank, distance)
    }

    /// The piece of the tree that has this rank in `place`.
    fn piece(&self, buffer: Buffer, place: u32) -> Chunk {
        let root = self.root_of(self.rank, place);
        Chunk::new(buffer, self.pieces.range(root..root + 1))
    }

    fn own(&self, buffer: Buffer) -> Chunk {
        Chunk::new(buffer, 0..self.pieces.count(self.rank))
    }

    /// Lays out, from `start` on, the pieces of the trees that have `rank` in these places.
    fn pack(&self, rank: u32, places: impl Iterator<Item = u32>, start: u64) -> Pack {
        let mut end = start;
        let chunks = places
            .map(|place| {
                let begin = end;
                end += self.pieces.count(self.root_of(rank, place));
                (place, Chunk::new(Buffer::Scratch, begin..end))
            })
            .collect();
        Pack {
            chunks,
            whole: Chunk::new(Buffer::Scratch, start..end),
        }
    }

    fn all_gather_packed(&self) -> RankPlan {
        let mut timeline = Timeline::default();
        let mut scratch = 0;
        timeline.copy(0, self.own(Buffer::Input), self.piece(Buffer::Output, 0));
        for (round, distance) in self.distances().enumerate() {
            let round = 2 * round as u64;
            let fed = || self.places(distance);
            let (to, from) = (self.after(distance), self.before(distance));
            let leaving = self.pack(to, fed(), scratch);
            let coming = self.pack(self.rank, fed(), leaving.whole.end());
            scratch = coming.whole.end();
            for &(place, chunk) in &leaving.chunks {
                timeline.copy(round, self.piece(Buffer::Output, place - distance), chunk);
            }
            timeline.send(round, to, leaving.whole);
            timeline.recv(round + 1, from, coming.whole);
            for &(place, chunk) in &coming.chunks {
                timeline.copy(round + 1, chunk, self.piece(Buffer::Output, place));
            }
        }
        timeline.into_plan(scratch)
    }

    fn all_gather(&self) -> RankPlan {
        let mut timeline = Timeline::default();
        let mut start = 0;
        let source = |place| match place {
            0 => self.own(Buffer::Input),
            _ => self.piece(Buffer::Output, place),
        };
        for distance in self.distances() {
            let clock = Clock::new(start, self.pieces.largest(), self.request.max_message);
            let mut rounds = 0;
            for place in self.places(distance) {
                for message in clock.messages(rounds, source(place - distance)) {
                    timeline.send(message.sent, self.after(distance), message.part);
                }
                for message in clock.messages(rounds, self.piece(Buffer::Output, place)) {
                    timeline.recv(message.received, self.before(distance), message.part);
                }
                rounds += 1;
            }
            start = clock.end(rounds);
        }
        timeline.copy_meanwhile(0, self.own(Buffer::Input), self.piece(Buffer::Output, 0));
        timeline.into_plan(0)
    }

    fn reduce_scatter_packed(&self) -> RankPlan {
        let mut timeline = Timeline::default();
        // The partial sums that leave in each round, one round after the other.
        let mut scratch = 0;
        let mut sums = Vec::new();
        for distance in self.distances() {
            let pack = self.pack(self.rank, self.places(distance), scratch);
            scratch = pack.whole.end();
            sums.push(pack);
        }
        sums.reverse();
        let sum = |place: u32| {
            if place == 0 {
                return self.own(Buffer::Output);
            }
            let pack = &sums[place.trailing_zeros() as usize];
            pack.chunks[(place >> (place.trailing_zeros() + 1)) as usize].1
        };
        for place in 0..self.request.ranks {
            timeline.copy(0, self.piece(Buffer::Input, place), sum(place));
        }
        for (round, distance) in self.distances().rev().enumerate() {
            let at = 2 * round as u64;
            let (to, from) = (self.before(distance), self.after(distance));
            timeline.send(at, to, sums[round].whole);
            let coming = self.pack(from, self.places(distance), scratch);
            scratch = coming.whole.end();
            timeline.recv(at + 1, from, coming.whole);
            for &(place, chunk) in &coming.chunks {
                let sum = sum(place - distance);
                timeline.reduce(at + 1, sum, vec![sum, chunk]);
            }
        }
        timeline.finish(u64::MAX, self.own(Buffer::Output));
        timeline.into_plan(scratch)
    }

    fn reduce_scatter(&self) -> RankPlan {
        let ranks = self.request.ranks;
        let clock = Clock::new(0, self.pieces.largest(), self.request.max_message);
        let mut timeline = Timeline::default();
        // Of the sums that are open at one time no two have the same lowest bit; the next
        // with that bit differs in the bit above.
        let levels = ranks.next_power_of_two().ilog2();
        let size = self.pieces.largest();
        let sum = |place: u32| {
            if place == 0 {
                return self.own(Buffer::Output);
            }
            let bit = place.trailing_zeros();
            if bit == 0 || place + 1 == ranks {
                return self.piece(Buffer::Input, place);
            }
            let slot = 2 * (bit - 1) + (place >> (bit + 1) & 1);
            let start = u64::from(slot) * size;
            Chunk::new(
                Buffer::Scratch,
                start..start + self.piece(Buffer::Input, place).count,
            )
        };
        for (round, place) in self.depth_first().enumerate() {
            let round = round as u64;
            let distance = place & place.wrapping_neg();
            for message in clock.messages(round, sum(place)) {
                timeline.send(message.sent, self.before(distance), message.part);
            }
            let above = place - distance;
            let input = self.piece(Buffer::Input, above);
            let from = self.after(distance);
            for message in clock.messages(round, sum(above)) {
                if distance == 1 {
                    let skip = message.part.offset - sum(above).offset;
                    let input = input.part(skip, message.part.count);
                    timeline.recv(message.received, from, message.part);
                    timeline.reduce(message.received, message.part, vec![message.part, input]);
                } else {
                    timeline.recv_reduce(message.received, from, message.part);
                }
            }
        }
        if ranks == 1 {
            timeline.copy(0, self.own(Buffer::Input), self.own(Buffer::Output));
        }
        timeline.finish(u64::MAX, self.own(Buffer::Output));
        timeline.into_plan(2 * u64::from(levels.saturating_sub(1)) * size)
    }

    /// All places but the root's, each after those it feeds, near ones first.
    fn depth_first(&self) -> impl Iterator<Item = u32> + use<> {
        let mut order = Vec::with_capacity(self.request.ranks as usize);
        // Visited the other way round: parents first, far ones first.
        let mut open = vec![0u32];
        while let Some(place) = open.pop() {
            order.push(place);
            let bits = if place == 0 {
                31
            } else {
                place.trailing_zeros()
            };
            open.extend(
                (0..bits)
                    .map(|bit| place + (1 << bit))
                    .filter(|&p| p < self.request.ranks),
            );
        }
        order.into_iter().skip(1).rev()
    }
}
