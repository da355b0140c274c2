use super::cost::Formula;
use super::ring::Lane;
use super::timeline::{Clock, Timeline};
use super::{Algorithm, CostModel, Transport};
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
/// Alpha terms: 2 sum(s_i - 1) for sides s_i. Elements sent by a rank: 2 count (n - 1) / n,
/// over each link: that divided by 2 D.
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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Colour {
    first: usize,
    backward: bool,
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
        let mut bucket = Bucket { sides, colours };
        if bucket.colours.is_empty() {
            bucket.colours.push(Colour {
                first: 0,
                backward: false,
            });
        }
        bucket
    }

    /// The same algorithm with one colour only: colour `index` of [`Bucket::colours`].
    pub fn only(&self, index: usize) -> Bucket {
        Bucket {
            sides: self.sides.clone(),
            colours: vec![self.colours[index]],
        }
    }

    /// Number of colours.
    pub fn colours(&self) -> usize {
        self.colours.len()
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
        request.kind == Kind::AllReduce && ranks == u64::from(request.ranks)
    }

    fn steps(&self, request: &Request, rank: u32) -> RankPlan {
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

    fn cost(&self, request: &Request, model: &dyn CostModel, transport: Transport) -> f64 {
        let formula = Formula::new(request, model, transport);
        let colours = self.colours.len() as f64;
        let mut share = request.counts[0] as f64 * formula.element / colours;
        let mut seconds = 0.0;
        for dimension in self.dimensions(self.colours[0]) {
            let side = f64::from(self.sides[dimension]);
            share /= side;
            seconds += formula.rounds(side - 1.0, colours, share, colours)
                + formula.rounds(side - 1.0, colours, share, 0.0);
        }
        seconds
    }
}
