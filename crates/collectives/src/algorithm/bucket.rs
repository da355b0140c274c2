use std::ops::Range;

use super::cost::{Domain, Formula, Reduce};
use super::ring::{Lane, Slots};
use super::timeline::{Clock, Timeline};
use super::{Algorithm, CostModel, Prediction, Transport};
use crate::Kind;
use crate::schedule::{Buffer, Chunk, Pieces, RankPlan, Request};

/// Rings along each dimension of a torus in turn, with several colours at once.
///
/// A colour has its share of the data. It reduce-scatters along one dimension after the
/// other, each time on the segment that the one before left, then all-gathers back in the
/// reverse order. Colour c begins with dimension c mod D and goes forward or backward
/// around, so that 2 D colours load all links of a wrapped torus of equal sides at once.
/// Results are bit-equal: each element is finished by one rank.
///
/// An all-gather goes through the dimensions in their order and a reduce-scatter in the reverse
/// order, with one colour: the first.
///
/// | kind | alpha terms, for sides s_i | elements sent by a rank |
/// |---|---|---|
/// | all_reduce | 2 sum(s_i - 1) | 2 count (n - 1) / n; over each link that divided by 2 D |
/// | all_gather, reduce_scatter | sum(s_i - 1) | all pieces but one |
///
/// Use: large all-reduces on a torus; libtpu's own choice from 4 MiB. Ranks are numbered
/// with the first dimension fastest. Source: Chan, Heimlich, Purkayastha, van de Geijn,
/// "Collective communication: theory, practice, and experience", 2007; Sack and Gropp,
/// "Collective algorithms for multiported torus networks", TOPC 2015.
#[derive(Clone, Debug)]
pub struct Bucket {
    sides: Vec<u32>,
    colours: Vec<Colour>,
}

/// One of the ways in which a [`Bucket`] goes through a torus.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Colour {
    /// The dimension that it begins with.
    pub first: usize,
    /// Whether it goes around each dimension towards lower coordinates.
    pub backward: bool,
}

/// Ticks for all rounds along one dimension, so that colours change dimension together.
const PHASE: u64 = 1 << 40;

impl Bucket {
    /// On a torus with these sides, in both directions of each dimension.
    pub fn new(sides: impl Into<Vec<u32>>) -> Bucket {
        let sides = sides.into();
        // A dimension with one rank has no links; in one with two, both ways are one.
        let colours = [false, true]
            .into_iter()
            .flat_map(|backward| (0..sides.len()).map(move |first| Colour { first, backward }))
            .filter(|colour| sides[colour.first] > if colour.backward { 2 } else { 1 })
            .collect();
        Bucket { sides, colours }.checked()
    }

    /// On a torus with these sides, with these colours. Those that begin with a dimension
    /// that does not exist are left out.
    pub fn with_colours(sides: impl Into<Vec<u32>>, colours: impl Into<Vec<Colour>>) -> Bucket {
        let (sides, mut colours) = (sides.into(), colours.into());
        colours.retain(|colour| colour.first < sides.len());
        Bucket { sides, colours }.checked()
    }

    fn checked(mut self) -> Bucket {
        if self.colours.is_empty() {
            self.colours.push(Colour {
                first: 0,
                backward: false,
            });
        }
        self
    }

    /// Its colours, one at least.
    pub fn colours(&self) -> &[Colour] {
        &self.colours
    }

    /// The dimensions longer than one in the order of a colour.
    fn dimensions(&self, colour: Colour) -> Vec<usize> {
        let count = self.sides.len();
        (0..count)
            .map(|offset| (colour.first + offset) % count)
            .filter(|&dimension| self.sides[dimension] > 1)
            .collect()
    }

    /// The lane of `rank` along a dimension.
    fn lane(&self, rank: u32, dimension: usize, backward: bool) -> Lane {
        let side = self.sides[dimension];
        let stride: u32 = self.sides[..dimension].iter().product();
        let at = rank / stride % side;
        let line = rank - at * stride;
        let after = line + (at + 1) % side * stride;
        let before = line + (at + side - 1) % side * stride;
        if backward {
            Lane {
                ranks: side,
                position: side - 1 - at,
                next: before,
                previous: after,
            }
        } else {
            Lane {
                ranks: side,
                position: at,
                next: after,
                previous: before,
            }
        }
    }
}

impl Algorithm for Bucket {
    fn name(&self) -> &'static str {
        "bucket"
    }

    fn supports(&self, request: &Request) -> bool {
        let ranks: u64 = self.sides.iter().map(|&side| u64::from(side)).product();
        matches!(
            request.kind,
            Kind::AllReduce | Kind::AllGather | Kind::ReduceScatter
        ) && ranks == u64::from(request.ranks)
    }

    fn steps(&self, request: &Request, rank: u32) -> RankPlan {
        match request.kind {
            Kind::AllReduce => self.all_reduce(request, rank),
            Kind::AllGather => self.all_gather(request, rank),
            _ => self.reduce_scatter(request, rank),
        }
    }

    fn cost(&self, request: &Request, model: &dyn CostModel, transport: Transport) -> Prediction {
        let domain = Domain::Every;
        Formula::predict(request, model, transport, domain, |formula| {
            let largest = request.pieces().largest() as f64 * formula.element;
            let whole = largest * f64::from(request.ranks);
            let (colours, reduced) = match request.kind {
                Kind::AllReduce => (self.colours.len() as f64, Reduce::Each),
                Kind::AllGather => (1.0, Reduce::No),
                _ => (1.0, Reduce::Each),
            };
            let mut share = whole / colours;
            let mut seconds = 0.0;
            for dimension in self.dimensions(self.colours[0]) {
                let side = f64::from(self.sides[dimension]);
                share /= side;
                seconds += formula.rounds(side - 1.0, colours, share, reduced);
                if request.kind == Kind::AllReduce {
                    seconds += formula.rounds(side - 1.0, colours, share, Reduce::No);
                }
            }
            seconds
        })
    }
}

impl Bucket {
    fn all_reduce(&self, request: &Request, rank: u32) -> RankPlan {
        let shares = Pieces::split(request.counts[0], self.colours.len() as u32);
        let mut timeline = Timeline::default();
        for (number, &colour) in self.colours.iter().enumerate() {
            let number = number as u32;
            let mut segment = Chunk::new(Buffer::Output, shares.range(number..number + 1));
            // The most elements that any rank has at this point.
            let mut largest = shares.largest();
            let dimensions = self.dimensions(colour);
            let mut phases = Vec::with_capacity(dimensions.len());
            for (phase, &dimension) in dimensions.iter().enumerate() {
                let lane = self.lane(rank, dimension, colour.backward);
                let cut = Pieces::split(segment.count, lane.ranks);
                let whole = segment;
                let part = move |position| whole.part(cut.offset(position), cut.count(position));
                largest = largest.div_ceil(lane.ranks.into());
                let clock = |phase: usize| {
                    Clock::new(phase as u64 * PHASE, largest, request.max_message)
                        .spread(lane.ranks.into(), PHASE)
                };
                lane.reduce_scatter(
                    &mut timeline,
                    clock(phase),
                    0,
                    &part,
                    phase + 1 == dimensions.len(),
                );
                segment = part(lane.position);
                phases.push((lane, clock(2 * dimensions.len() - 1 - phase), part));
            }
            if phases.is_empty() {
                timeline.finish(0, segment);
            }
            for (lane, clock, part) in phases.iter().rev() {
                lane.all_gather(&mut timeline, *clock, 0, part, part);
            }
        }
        timeline.into_plan(0)
    }

    /// The longer dimensions, the slowest last, each with the number of ranks between
    /// neighbours.
    fn strides(&self) -> Vec<(usize, u32)> {
        let mut stride = 1;
        let mut strides = Vec::with_capacity(self.sides.len());
        for (dimension, &side) in self.sides.iter().enumerate() {
            if side > 1 {
                strides.push((dimension, stride));
            }
            stride *= side;
        }
        strides
    }

    /// The pieces of the ranks that share all coordinates with `rank` from the dimension of
    /// this stride on, but stand at a position of that dimension's lane.
    fn block(
        &self,
        pieces: &Pieces,
        rank: u32,
        lane: Lane,
        stride: u32,
        position: u32,
    ) -> Range<u64> {
        let backward = self.colours[0].backward;
        let at = if backward {
            lane.ranks - 1 - position
        } else {
            position
        };
        let first = rank - rank % (stride * lane.ranks) + at * stride;
        pieces.range(first..first + stride)
    }

    fn all_gather(&self, request: &Request, rank: u32) -> RankPlan {
        let pieces = request.pieces();
        let mut timeline = Timeline::default();
        let own = Chunk::new(Buffer::Input, 0..pieces.count(rank));
        for (phase, (dimension, stride)) in self.strides().into_iter().enumerate() {
            let lane = self.lane(rank, dimension, self.colours[0].backward);
            let largest = pieces.largest() * u64::from(stride);
            let clock = Clock::new(phase as u64 * PHASE, largest, request.max_message)
                .spread(lane.ranks.into(), PHASE);
            let block = |position| {
                Chunk::new(
                    Buffer::Output,
                    self.block(&pieces, rank, lane, stride, position),
                )
            };
            let source = |position| match phase {
                0 if position == lane.position => own,
                _ => block(position),
            };
            lane.all_gather(&mut timeline, clock, 0, source, block);
        }
        let place = Chunk::new(Buffer::Output, pieces.range(rank..rank + 1));
        timeline.copy_meanwhile(0, own, place);
        timeline.into_plan(0)
    }

    fn reduce_scatter(&self, request: &Request, rank: u32) -> RankPlan {
        let pieces = request.pieces();
        let mut timeline = Timeline::default();
        let own = Chunk::new(Buffer::Output, 0..pieces.count(rank));
        let mut scratch = 0;
        // What the first phase leaves, at the start of scratch memory.
        let mut left = Chunk::new(Buffer::Input, pieces.range(rank..rank + 1));
        let strides = self.strides();
        for (phase, &(dimension, stride)) in strides.iter().rev().enumerate() {
            let lane = self.lane(rank, dimension, self.colours[0].backward);
            let largest = pieces.largest() * u64::from(stride);
            let clock = Clock::new(phase as u64 * PHASE, largest, request.max_message)
                .spread(lane.ranks.into(), PHASE);
            let block = |position| self.block(&pieces, rank, lane, stride, position);
            if phase > 0 {
                let start = left.offset;
                let held = |position| {
                    let Range { start: first, end } = block(position);
                    Chunk::new(Buffer::Scratch, first - start..end - start)
                };
                lane.reduce_scatter(&mut timeline, clock, 0, held, false);
                continue;
            }
            let input = |position| Chunk::new(Buffer::Input, block(position));
            left = Chunk::new(Buffer::Input, block(lane.position));
            let single = strides.len() == 1;
            let (own, used) = match single {
                true => (own, 0),
                false => (Chunk::new(Buffer::Scratch, 0..left.count), left.count),
            };
            let slots = Slots {
                start: used,
                count: clock.cuts() + 2,
                size: largest.min(request.max_message),
            };
            scratch = used + slots.count * slots.size;
            lane.reduce_scatter_from(&mut timeline, clock, input, own, slots, single);
        }
        if strides.len() != 1 {
            let result = pieces.range(rank..rank + 1);
            let result = match strides.len() {
                0 => left,
                _ => {
                    let start = left.offset;
                    Chunk::new(Buffer::Scratch, result.start - start..result.end - start)
                }
            };
            timeline.copy(u64::MAX, result, own);
            timeline.finish(u64::MAX, own);
        }
        timeline.into_plan(scratch)
    }
}
