use super::cost::{Domain, Formula, Reduce};
use super::timeline::{Clock, Timeline};
use super::{Algorithm, CostModel, Prediction, Transport};
use crate::Kind;
use crate::schedule::{Buffer, Chunk, Pieces, RankPlan, Request};

/// Recursive halving, then recursive doubling: pairs of ranks exchange half of what they
/// hold, then half of that, and so on.
///
/// For an n that is no power of two, r = n - 2^floor(log2 n) ranks first give their data to
/// a neighbour and get the result from it at the end. In an all-reduce near ranks
/// exchange the large halves. Results are bit-equal: each element is finished
/// by one rank.
///
/// | kind | alpha terms | elements sent by a rank |
/// |---|---|---|
/// | all_reduce | 2 log2 n | 2 count (n - 1) / n |
/// | all_gather, reduce_scatter | log2 n | all pieces but one |
/// | no power of two | 2 more (floor of log2 n) | up to all elements more |
///
/// Use: medium sizes on a network where all pairs are near. Source: Rabenseifner,
/// "Optimization of Collective Reduction Operations", ICCS 2004; Thakur, Rabenseifner,
/// Gropp, IJHPCA 2005.
#[derive(Clone, Copy, Debug, Default)]
pub struct HalvingDoubling;

/// Pairs of ranks exchange all they hold, log2 n times.
///
/// All ranks finish each element for themselves, in an order that is symmetric (two
/// operands commute), so results are bit-equal. For an n that is no power of two
/// as in [`HalvingDoubling`].
///
/// Alpha terms: log2 n (2 more for no power of two). Elements sent by a rank:
/// count log2 n.
///
/// Use: small all-reduces of more ranks than one-shot serves. Source: as
/// [`HalvingDoubling`].
#[derive(Clone, Copy, Debug, Default)]
pub struct RecursiveDoubling;

/// The largest power of two among `ranks` ranks do the work. The others are odd ranks below
/// twice their number; the even rank before each stands for both.
#[derive(Clone, Copy)]
pub(super) struct Fold {
    extra: u32,
    /// Logarithm of the number of active ranks.
    pub(super) levels: u32,
}

impl Fold {
    pub(super) fn new(ranks: u32) -> Fold {
        let levels = ranks.ilog2();
        Fold {
            extra: ranks - (1 << levels),
            levels,
        }
    }

    /// Number among the active ranks.
    pub(super) fn number(&self, rank: u32) -> Option<u32> {
        if rank >= 2 * self.extra {
            Some(rank - self.extra)
        } else {
            rank.is_multiple_of(2).then_some(rank / 2)
        }
    }

    /// The first rank that active rank `number` stands for; for one past the last, one
    /// past the last rank.
    pub(super) fn rank(&self, number: u32) -> u32 {
        number + number.min(self.extra)
    }

    /// Messages' latencies that folding in does not add: ranks that do not fold are one
    /// exchange ahead, and where they are the most, nobody waits for two.
    fn hidden(&self, formula: &Formula) -> f64 {
        if self.extra > 0 && 2 * self.extra <= 1 << self.levels {
            formula.signals(1.0, 0.0)
        } else {
            0.0
        }
    }

    /// Seconds to fold `bytes` in and out.
    fn cost(&self, formula: &Formula, bytes: f64) -> f64 {
        match self.extra {
            0 => 0.0,
            _ => {
                formula.rounds(1.0, 1.0, bytes, Reduce::Each)
                    + formula.rounds(1.0, 1.0, bytes, Reduce::No)
            }
        }
    }

    /// The other rank of a pair.
    pub(super) fn partner(&self, rank: u32) -> Option<u32> {
        (rank < 2 * self.extra).then_some(rank ^ 1)
    }
}

/// An all-reduce by halving and doubling in which active rank `number` meets
/// `peer(step)` in step 0, 1, ... and ends with segment `label`. The label's
/// highest bit says which half it keeps in step 0, and so on.
pub(super) struct Butterfly<P> {
    pub(super) levels: u32,
    pub(super) label: u32,
    pub(super) peer: P,
    /// Whether a message is received before the next is sent.
    pub(super) lockstep: bool,
}

impl<P: Fn(u32) -> u32> Butterfly<P> {
    /// Plans on `whole`; returns the tick at which the result is there. `largest` is
    /// the same on all ranks: the number of elements of the largest `whole`.
    pub(super) fn all_reduce(
        &self,
        timeline: &mut Timeline,
        start: u64,
        whole: Chunk,
        largest: u64,
        max_message: u64,
    ) -> u64 {
        let segments = Pieces::split(whole.count, 1 << self.levels);
        // The segments that share the label's first `level` bits.
        let block = |level: u32| {
            let size = 1 << (self.levels - level);
            let first = self.label & !(size - 1);
            (first, size)
        };
        let chunk = |(first, size): (u32, u32)| {
            let range = segments.range(first..first + size);
            whole.part(range.start, range.end - range.start)
        };
        let clock_at = |start, level: u32| {
            let clock = Clock::new(start, largest.div_ceil(2 << level), max_message);
            if self.lockstep {
                clock.lockstep()
            } else {
                clock
            }
        };
        let mut at = start;
        for level in 0..self.levels {
            let clock = clock_at(at, level);
            let peer = (self.peer)(level);
            let (first, size) = block(level + 1);
            for message in clock.messages(0, chunk((first ^ size, size))) {
                timeline.send(message.sent, peer, message.part);
            }
            for message in clock.messages(0, chunk((first, size))) {
                timeline.recv_reduce(message.received, peer, message.part);
            }
            at = clock.end(1);
        }
        timeline.finish(at, chunk(block(self.levels)));
        for level in (0..self.levels).rev() {
            let clock = clock_at(at, level);
            let peer = (self.peer)(level);
            let (first, size) = block(level + 1);
            for message in clock.messages(0, chunk((first, size))) {
                timeline.send(message.sent, peer, message.part);
            }
            for message in clock.messages(0, chunk((first ^ size, size))) {
                timeline.recv(message.received, peer, message.part);
            }
            at = clock.end(1);
        }
        at
    }
}

/// Wraps `body`, which plans an all-reduce of the active ranks in place between two
/// ticks, for a group of any size.
pub(super) fn folded_all_reduce(
    request: &Request,
    rank: u32,
    body: impl FnOnce(&mut Timeline, Fold, u32, u64) -> u64,
    duration: u64,
) -> RankPlan {
    let fold = Fold::new(request.ranks);
    let whole = Chunk::new(Buffer::Output, 0..request.counts[0]);
    let before = Clock::new(0, whole.count, request.max_message);
    let after = Clock::new(before.end(1) + duration, whole.count, request.max_message);
    let mut timeline = Timeline::default();
    let partner = fold.partner(rank);
    match (fold.number(rank), partner) {
        (Some(number), partner) => {
            if let Some(partner) = partner {
                for message in before.messages(0, whole) {
                    timeline.recv_reduce(message.received, partner, message.part);
                }
            }
            let end = body(&mut timeline, fold, number, before.end(1));
            debug_assert!(
                end <= before.end(1) + duration,
                "the body takes longer than it said"
            );
            if let Some(partner) = partner {
                for message in after.messages(0, whole) {
                    timeline.send(message.sent, partner, message.part);
                }
            }
        }
        (None, Some(partner)) => {
            for message in before.messages(0, whole) {
                timeline.send(message.sent, partner, message.part);
            }
            for message in after.messages(0, whole) {
                timeline.recv(message.received, partner, message.part);
            }
        }
        (None, None) => unreachable!("a rank without partner is active"),
    }
    timeline.into_plan(0)
}

/// More ticks than any [`Butterfly`] of these ranks takes.
pub(super) fn butterfly_ticks(request: &Request) -> u64 {
    let cuts = request.counts[0].div_ceil(request.max_message) + u64::from(request.ranks) + 1;
    2 * cuts * 64
}

/// Seconds of a folded halving and doubling.
pub(super) fn butterfly_cost(request: &Request, formula: &Formula) -> f64 {
    let whole = request.counts[0] as f64 * formula.element;
    let fold = Fold::new(request.ranks);
    let levels: f64 = (1..=fold.levels)
        .map(|level| {
            let bytes = whole / f64::from(1u32 << level);
            formula.rounds(1.0, 1.0, bytes, Reduce::Each)
                + formula.rounds(1.0, 1.0, bytes, Reduce::No)
        })
        .sum();
    levels + fold.cost(formula, whole)
}

impl Algorithm for HalvingDoubling {
    fn name(&self) -> &'static str {
        "halving_doubling"
    }

    fn supports(&self, request: &Request) -> bool {
        matches!(
            request.kind,
            Kind::AllReduce | Kind::AllGather | Kind::ReduceScatter
        )
    }

    fn steps(&self, request: &Request, rank: u32) -> RankPlan {
        match request.kind {
            Kind::AllReduce => {
                let body = |timeline: &mut Timeline, fold: Fold, number: u32, start| {
                    let whole = Chunk::new(Buffer::Output, 0..request.counts[0]);
                    let butterfly = Butterfly {
                        levels: fold.levels,
                        label: number.reverse_bits() >> (32 - fold.levels.max(1)),
                        peer: |level| fold.rank(number ^ (1u32 << level)),
                        lockstep: false,
                    };
                    butterfly.all_reduce(timeline, start, whole, whole.count, request.max_message)
                };
                folded_all_reduce(request, rank, body, butterfly_ticks(request))
            }
            Kind::AllGather => all_gather(request, rank),
            _ => reduce_scatter(request, rank),
        }
    }

    fn cost(&self, request: &Request, model: &dyn CostModel, transport: Transport) -> Prediction {
        // Folded ranks begin while others wait.
        let domain = match request.ranks.is_power_of_two() {
            true => Domain::Every,
            false => Domain::Never,
        };
        Formula::predict(request, model, transport, domain, |formula| {
            if request.kind == Kind::AllReduce {
                return butterfly_cost(request, formula);
            }
            let pieces = request.pieces();
            let fold = Fold::new(request.ranks);
            let reduced = if request.is_reduction() {
                Reduce::Each
            } else {
                Reduce::No
            };
            let piece = pieces.largest() as f64 * formula.element;
            let levels: f64 = (0..fold.levels)
                .map(|level| {
                    let bytes = largest_block(&pieces, fold, 1 << level) as f64 * formula.element;
                    formula.rounds(1.0, 1.0, bytes, reduced)
                })
                .sum();
            let whole = pieces.total() as f64 * formula.element;
            let folded = match fold.extra {
                0 => 0.0,
                _ => {
                    formula.rounds(1.0, 1.0, whole, reduced)
                        + formula.rounds(1.0, 1.0, piece, Reduce::No)
                }
            };
            levels + folded - fold.hidden(formula) + formula.copy(piece)
        })
    }
}

/// Elements of the largest run of active ranks that is exchanged when `size` of them are.
fn largest_block(pieces: &Pieces, fold: Fold, size: u32) -> u64 {
    (0..1u32 << fold.levels)
        .step_by(size as usize)
        .map(|first| {
            let range = pieces.range(fold.rank(first)..fold.rank(first + size));
            range.end - range.start
        })
        .max()
        .unwrap_or(0)
}

fn all_gather(request: &Request, rank: u32) -> RankPlan {
    let pieces = request.pieces();
    let fold = Fold::new(request.ranks);
    let max = request.max_message;
    let mut timeline = Timeline::default();
    let own = Chunk::new(Buffer::Input, 0..pieces.count(rank));
    let piece = |of: u32| Chunk::new(Buffer::Output, pieces.range(of..of + 1));
    let whole = Chunk::new(Buffer::Output, 0..pieces.total());
    let before = Clock::new(0, pieces.largest(), max);
    timeline.copy(0, own, piece(rank));
    let number = fold.number(rank);
    if let Some(partner) = fold.partner(rank) {
        if number.is_some() {
            for message in before.messages(0, piece(partner)) {
                timeline.recv(message.received, partner, message.part);
            }
        } else {
            for message in before.messages(0, own) {
                timeline.send(message.sent, partner, message.part);
            }
        }
    }
    let mut at = before.end(1);
    for level in 0..fold.levels {
        let size = 1 << level;
        let clock = Clock::new(at, largest_block(&pieces, fold, size), max);
        if let Some(number) = number {
            let first = number & !(size - 1);
            let peer = fold.rank(number ^ size);
            let block = |first: u32| {
                Chunk::new(
                    Buffer::Output,
                    pieces.range(fold.rank(first)..fold.rank(first + size)),
                )
            };
            for message in clock.messages(0, block(first)) {
                timeline.send(message.sent, peer, message.part);
            }
            for message in clock.messages(0, block(first ^ size)) {
                timeline.recv(message.received, peer, message.part);
            }
        }
        at = clock.end(1);
    }
    let after = Clock::new(at, whole.count, max);
    if let Some(partner) = fold.partner(rank) {
        for message in after.messages(0, whole) {
            if number.is_some() {
                timeline.send(message.sent, partner, message.part);
            } else {
                timeline.recv(message.received, partner, message.part);
            }
        }
    }
    timeline.into_plan(0)
}

fn reduce_scatter(request: &Request, rank: u32) -> RankPlan {
    let pieces = request.pieces();
    let fold = Fold::new(request.ranks);
    let max = request.max_message;
    let mut timeline = Timeline::default();
    let whole = Chunk::new(Buffer::Input, 0..pieces.total());
    let own = Chunk::new(Buffer::Output, 0..pieces.count(rank));
    let piece = |buffer, of: u32| Chunk::new(buffer, pieces.range(of..of + 1));
    let scratch = |chunk: Chunk| Chunk {
        buffer: Buffer::Scratch,
        ..chunk
    };
    // Partial sums have the place in scratch that their elements have in the input.
    let mut merged = false;
    let before = Clock::new(0, whole.count, max);
    let number = fold.number(rank);
    let partner = fold.partner(rank);
    if let Some(partner) = partner {
        for message in before.messages(0, whole) {
            if number.is_some() {
                let into = scratch(message.part);
                timeline.recv(message.received, partner, into);
                timeline.reduce(message.received, into, vec![into, message.part]);
                merged = true;
            } else {
                timeline.send(message.sent, partner, message.part);
            }
        }
    }
    let mut at = before.end(1);
    for level in (0..fold.levels).rev() {
        let size = 1 << level;
        let clock = Clock::new(at, largest_block(&pieces, fold, size), max);
        if let Some(number) = number {
            let first = number & !(size - 1);
            let peer = fold.rank(number ^ size);
            let block = |first: u32| {
                let range = pieces.range(fold.rank(first)..fold.rank(first + size));
                Chunk::new(
                    if merged {
                        Buffer::Scratch
                    } else {
                        Buffer::Input
                    },
                    range,
                )
            };
            for message in clock.messages(0, block(first ^ size)) {
                timeline.send(message.sent, peer, message.part);
            }
            for message in clock.messages(0, block(first)) {
                let into = scratch(message.part);
                if merged {
                    timeline.recv_reduce(message.received, peer, into);
                } else {
                    timeline.recv(message.received, peer, into);
                    timeline.reduce(message.received, into, vec![into, message.part]);
                }
            }
            merged = true;
        }
        at = clock.end(1);
    }
    let after = Clock::new(at, pieces.largest(), max);
    let result = if merged {
        Buffer::Scratch
    } else {
        Buffer::Input
    };
    match (number, partner) {
        (Some(_), partner) => {
            timeline.copy(at, piece(result, rank), own);
            timeline.finish(at, own);
            if let Some(partner) = partner {
                for message in after.messages(0, piece(result, partner)) {
                    timeline.send(message.sent, partner, message.part);
                }
            }
        }
        (None, Some(partner)) => {
            for message in after.messages(0, own) {
                timeline.recv(message.received, partner, message.part);
                timeline.finish(message.received, message.part);
            }
        }
        (None, None) => unreachable!("a rank without partner is active"),
    }
    timeline.into_plan(if merged { whole.count } else { 0 })
}

impl Algorithm for RecursiveDoubling {
    fn name(&self) -> &'static str {
        "recursive_doubling"
    }

    fn supports(&self, request: &Request) -> bool {
        request.kind == Kind::AllReduce
    }

    fn steps(&self, request: &Request, rank: u32) -> RankPlan {
        let whole = Chunk::new(Buffer::Output, 0..request.counts[0]);
        let levels = u64::from(request.ranks.ilog2());
        let clock = |start| Clock::new(start, whole.count, request.max_message);
        let body = |timeline: &mut Timeline, fold: Fold, number: u32, start| {
            let clock = clock(start);
            for level in 0..fold.levels {
                let peer = fold.rank(number ^ (1 << level));
                for message in clock.messages(level.into(), whole) {
                    timeline.send(message.sent, peer, message.part);
                    timeline.recv_reduce(message.received, peer, message.part);
                }
            }
            let end = clock.end(levels);
            timeline.finish(end, whole);
            end
        };
        folded_all_reduce(request, rank, body, clock(0).end(levels))
    }

    fn cost(&self, request: &Request, model: &dyn CostModel, transport: Transport) -> Prediction {
        // Folded ranks begin while others wait.
        let domain = match request.ranks.is_power_of_two() {
            true => Domain::Every,
            false => Domain::Never,
        };
        Formula::predict(request, model, transport, domain, |formula| {
            let whole = request.counts[0] as f64 * formula.element;
            let fold = Fold::new(request.ranks);
            formula.rounds(fold.levels.into(), 1.0, whole, Reduce::Each) + fold.cost(formula, whole)
                - fold.hidden(formula)
        })
    }
}
