use super::cost::{Domain, Formula, Reduce};
use super::halving_doubling::{
    Butterfly, Fold, butterfly_cost, butterfly_ticks, folded_all_reduce,
};
use super::timeline::Timeline;
use super::{Algorithm, CostModel, Prediction, Transport};
use crate::Kind;
use crate::schedule::{Buffer, Chunk, Pieces, RankPlan, Request};

/// Halving and doubling in which ranks swing to and fro: in step s a rank meets the one at
/// distance (1 - (-2)^(s+1)) / 3, to the right for even ranks and to the left for odd ones.
///
/// The distances 1, 1, 3, 5, 11, ... are shorter than the powers of two, so a ring or torus
/// suffers less congestion. Results are bit-equal: each element is finished by
/// one rank.
///
/// Alpha terms: 2 log2 n. Elements sent by a rank: 2 count (n - 1) / n. On a ring, step
/// s loads a link with as many messages as its distance is long.
///
/// [`Swing::torus`] takes the dimensions in turn and runs 2 D colours with rotated
/// dimensions and mirrored directions, each on its share.
///
/// Use: small and medium all-reduces on a torus. Source: De Sensi, Bonato, Saam, Hoefler,
/// "Swing: Short-cutting Rings for Higher Bandwidth Allreduce", NSDI 2024
/// (arXiv 2401.09356).
#[derive(Clone, Debug, Default)]
pub struct Swing {
    /// Empty: a line of any length.
    sides: Vec<u32>,
}

impl Swing {
    /// On one ring of any number of ranks; those beyond a power of two are folded as in
    /// [`HalvingDoubling`](super::HalvingDoubling).
    pub fn new() -> Swing {
        Swing::default()
    }

    /// On a torus, the first dimension fastest in rank order. Only sides that are powers
    /// of two are supported.
    pub fn torus(sides: impl Into<Vec<u32>>) -> Swing {
        Swing {
            sides: sides.into(),
        }
    }

    /// The first dimension of each colour, and whether it is mirrored.
    fn colours(&self) -> Vec<(usize, bool)> {
        let mut colours: Vec<_> = [false, true]
            .into_iter()
            .flat_map(|mirrored| (0..self.sides.len()).map(move |first| (first, mirrored)))
            .collect();
        // A mirrored pair is the same pair.
        colours.retain(|&(first, mirrored)| self.sides[first] > if mirrored { 2 } else { 1 });
        if colours.is_empty() {
            colours.push((0, false));
        }
        colours
    }

    /// The dimension and the step in it for each step of a colour that begins with `first`.
    fn steps_of(&self, first: usize) -> Vec<(usize, u32)> {
        let count = self.sides.len();
        let longest = self.sides.iter().max().map_or(0, |side| side.ilog2());
        (0..longest)
            .flat_map(|step| (0..count).map(move |offset| ((first + offset) % count, step)))
            .filter(|&(dimension, step)| step < self.sides[dimension].ilog2())
            .collect()
    }
}

/// (1 - (-2)^(step+1)) / 3.
fn reach(step: u32) -> i64 {
    (1 - (-2i64).pow(step + 1)) / 3
}

/// Whom position `at` on a ring of 2^levels meets.
fn peer(levels: u32, at: u32, step: u32) -> u32 {
    let reach = if at.is_multiple_of(2) {
        reach(step)
    } else {
        -reach(step)
    };
    (i64::from(at) + reach).rem_euclid(1 << levels) as u32
}

/// For each step, whether position `at` stands on the other side from position 0.
///
/// It is the way from 0 to `at` by some of the steps in their order. Steps after
/// `step` all have the same reach modulo 2^(step+2), so what is left to go tells
/// whether this one is taken.
fn sides_taken(levels: u32, at: u32) -> Vec<bool> {
    let mut here = 0u32;
    (0..levels)
        .map(|step| {
            let left = i64::from(at) - i64::from(here);
            let left = if here.is_multiple_of(2) { left } else { -left };
            let modulus = 1i64 << levels.min(step + 2);
            let left = left.rem_euclid(modulus);
            let later = reach(step + 1).rem_euclid(modulus);
            let taken = left != 0 && (left != later || step + 1 == levels);
            if taken {
                here = peer(levels, here, step);
            }
            taken
        })
        .collect()
}

fn label(taken: impl Iterator<Item = bool>) -> u32 {
    taken.fold(0, |label, taken| label << 1 | u32::from(taken))
}

impl Algorithm for Swing {
    fn name(&self) -> &'static str {
        if self.sides.is_empty() {
            "swing"
        } else {
            "torus_swing"
        }
    }

    fn supports(&self, request: &Request) -> bool {
        let ranks: u64 = self.sides.iter().map(|&side| u64::from(side)).product();
        request.kind == Kind::AllReduce
            && (self.sides.is_empty()
                || ranks == u64::from(request.ranks)
                    && self.sides.iter().all(|s| s.is_power_of_two()))
    }

    fn steps(&self, request: &Request, rank: u32) -> RankPlan {
        if self.sides.is_empty() {
            let body = |timeline: &mut Timeline, fold: Fold, number: u32, start| {
                let whole = Chunk::new(Buffer::Output, 0..request.counts[0]);
                let levels = fold.levels;
                let butterfly = Butterfly {
                    levels,
                    label: label(sides_taken(levels, number).into_iter()),
                    peer: |step| fold.rank(peer(levels, number, step)),
                    lockstep: false,
                };
                butterfly.all_reduce(timeline, start, whole, whole.count, request.max_message)
            };
            return folded_all_reduce(request, rank, body, butterfly_ticks(request));
        }
        let mut timeline = Timeline::default();
        let colours = self.colours();
        let shares = Pieces::split(request.counts[0], colours.len() as u32);
        for (number, &(first, mirrored)) in colours.iter().enumerate() {
            let steps = self.steps_of(first);
            let coordinate = |dimension: usize| {
                let stride: u32 = self.sides[..dimension].iter().product();
                let side = self.sides[dimension];
                let at = rank / stride % side;
                (
                    stride,
                    side,
                    at,
                    if mirrored { (side - at) % side } else { at },
                )
            };
            let taken: Vec<Vec<bool>> = (0..self.sides.len())
                .map(|dimension| {
                    let (_, side, _, at) = coordinate(dimension);
                    sides_taken(side.ilog2(), at)
                })
                .collect();
            let butterfly = Butterfly {
                levels: steps.len() as u32,
                label: label(
                    steps
                        .iter()
                        .map(|&(dimension, step)| taken[dimension][step as usize]),
                ),
                peer: |level| {
                    let (dimension, step) = steps[level as usize];
                    let (stride, side, at, seen) = coordinate(dimension);
                    let to = peer(side.ilog2(), seen, step);
                    let to = if mirrored { (side - to) % side } else { to };
                    rank - at * stride + to * stride
                },
                // Where one dimension is left, all colours meet on it.
                lockstep: self.sides.iter().any(|&side| side != self.sides[0]),
            };
            let number = number as u32;
            let share = Chunk::new(Buffer::Output, shares.range(number..number + 1));
            butterfly.all_reduce(
                &mut timeline,
                0,
                share,
                shares.largest(),
                request.max_message,
            );
        }
        timeline.into_plan(0)
    }

    fn cost(&self, request: &Request, model: &dyn CostModel, transport: Transport) -> Prediction {
        // Folded ranks begin while others wait.
        let domain = match request.ranks.is_power_of_two() {
            true => Domain::Every,
            false => Domain::Never,
        };
        Formula::predict(request, model, transport, domain, |formula| {
            if self.sides.is_empty() {
                return butterfly_cost(request, formula);
            }
            let colours = self.colours().len() as f64;
            let share = request.counts[0] as f64 * formula.element / colours;
            (1..=request.ranks.ilog2())
                .map(|level| {
                    let bytes = share / f64::from(1u32 << level);
                    formula.rounds(1.0, colours, bytes, Reduce::Each)
                        + formula.rounds(1.0, colours, bytes, Reduce::No)
                })
                .sum()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_are_those_of_the_paper() {
        let distances: Vec<i64> = (0..6).map(reach).collect();
        assert_eq!(distances, [1, -1, 3, -5, 11, -21]);
    }

    #[test]
    fn peers_meet_and_labels_split_by_step() {
        for levels in 0..10 {
            let mut seen = std::collections::HashSet::new();
            for at in 0..1u32 << levels {
                let mine = sides_taken(levels, at);
                assert!(seen.insert(label(mine.iter().copied())));
                for step in 0..levels {
                    let other = peer(levels, at, step);
                    assert_eq!(peer(levels, other, step), at);
                    let theirs = sides_taken(levels, other);
                    let step = step as usize;
                    assert_eq!(
                        mine[..step],
                        theirs[..step],
                        "{levels} levels, {at}, step {step}"
                    );
                    assert_ne!(
                        mine[step], theirs[step],
                        "{levels} levels, {at}, step {step}"
                    );
                }
            }
        }
    }
}
