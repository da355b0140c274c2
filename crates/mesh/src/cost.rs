//! What collectives cost: alpha-beta formulas for the wires of a TPU.
//!
//! A group of ranks is a product of [`Dimension`]s: stretches of physical axes, the devices
//! of a chip, slices over the data-center network. For each algorithm a closed formula
//! gives the seconds as steps times latency plus bytes on the busiest wire over its bandwidth.
//! Sources: Thakur et al., "Optimization of Collective Communication Operations in MPICH", 2005
//! (ring, halving and doubling, trees); Sack and Gropp, "Collective Algorithms for Multiported Torus
//! Networks", 2015 (bucket); De Sensi et al., "Swing", NSDI 2024; Jeaugey, "PAT", 2025
//! (arXiv 2506.20252); Cho et al., "BlueConnect", 2019 (hierarchical).
//!
//! A [`Prediction`] says where its formula holds: there the plan, played on the links of a slice,
//! takes the predicted time within 2 %. Elsewhere rounds overlap, or messages of different rounds
//! meet on the links, and no closed formula follows that: the sum of latency and bytes is then
//! an estimate, good enough to compare algorithms with.
//!
//! Bytes are, as each [`Collective`] says, per rank and before the operation is
//! split.

use std::fmt;

use serde::Serialize;

use crate::draw::duration;
use crate::{DCN_STARTUP, Error, ICI_HOP, ICI_STARTUP};

/// What is done; the kinds for which there is a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Collective {
    /// Bytes: the vector that every rank brings.
    AllReduce,
    /// Bytes: the gathered result.
    AllGather,
    /// Bytes: the vector that every rank brings.
    ReduceScatter,
    /// Bytes: all that a rank brings for the whole group.
    AllToAll,
    /// Every rank sends to the next of its group. Bytes: what a rank sends.
    Permute,
}

impl Collective {
    /// Every kind.
    pub const ALL: [Collective; 5] = [
        Collective::AllReduce,
        Collective::AllGather,
        Collective::ReduceScatter,
        Collective::AllToAll,
        Collective::Permute,
    ];

    /// The name, as `all_reduce`.
    pub const fn name(self) -> &'static str {
        match self {
            Collective::AllReduce => "all_reduce",
            Collective::AllGather => "all_gather",
            Collective::ReduceScatter => "reduce_scatter",
            Collective::AllToAll => "all_to_all",
            Collective::Permute => "permute",
        }
    }
}

impl fmt::Display for Collective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for Collective {
    type Err = Error;

    fn from_str(name: &str) -> Result<Collective, Error> {
        Collective::ALL
            .into_iter()
            .find(|kind| kind.name() == name)
            .ok_or_else(|| {
                let known: Vec<_> = Collective::ALL.iter().map(|kind| kind.name()).collect();
                Error::Mesh {
                    argument: "collective",
                    reason: format!("expected one of {}, got {name:?}", known.join(", ")),
                }
            })
    }
}

/// How the members of a dimension are joined.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Wiring {
    /// Neighbours, and the last to the first.
    Ring,
    /// Neighbours only.
    Line,
    /// All to all through ports of their own.
    Switch,
}

/// One dimension of a group.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Dimension {
    /// Members along it.
    pub size: u32,
    /// How they are joined.
    pub wiring: Wiring,
    /// Bytes a second, one direction of one wire (or port), for one of the groups that
    /// share it.
    pub bandwidth: f64,
    /// Seconds to start a message.
    pub startup: f64,
    /// Seconds a message takes from a member to its neighbour, without start-up.
    pub hop: f64,
    /// Whether other groups send over the same wires.
    pub shared: bool,
}

/// Predicted seconds, and whether they are more than an estimate.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Prediction {
    /// A closed formula applies: a simulation of the plan agrees within 2 %.
    Formula(f64),
    /// None does. Rounds one after the other, each at the pace of its busiest wire: enough to
    /// compare algorithms with. A simulation says more.
    Estimate(f64),
}

impl Prediction {
    /// The seconds, whichever it is.
    pub const fn seconds(self) -> f64 {
        match self {
            Prediction::Formula(seconds) | Prediction::Estimate(seconds) => seconds,
        }
    }

    /// The seconds where a formula applies.
    pub const fn formula(self) -> Option<f64> {
        match self {
            Prediction::Formula(seconds) => Some(seconds),
            Prediction::Estimate(_) => None,
        }
    }
}

/// For which sizes the formula of an algorithm holds on a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Domain {
    /// All: members do the same at the same time.
    Every,
    /// Those that latency or wires decide: the time lies between the larger and the sum.
    Extremes,
    /// Those that latency decides: where wires do, messages of different rounds meet on them.
    Small,
}

/// The part of the whole that latency or wires may add to the other where only
/// one of them should count.
const NEGLIGIBLE: f64 = 0.01;

impl Dimension {
    /// Members of a slice along a physical axis at distances of `stride` chips. Groups
    /// between share the links, and so do the devices of a chip.
    pub fn ici(size: u32, stride: u32, closed: bool, devices_per_chip: u32, link: f64) -> Self {
        Dimension {
            size,
            wiring: if closed { Wiring::Ring } else { Wiring::Line },
            bandwidth: link / f64::from(stride * devices_per_chip),
            startup: ICI_STARTUP,
            hop: ICI_HOP * f64::from(stride),
            shared: stride * devices_per_chip > 1,
        }
    }

    /// The devices of one chip.
    pub fn die(size: u32, bandwidth: f64) -> Self {
        Dimension {
            size,
            wiring: Wiring::Line,
            bandwidth,
            startup: ICI_STARTUP,
            hop: 0.0,
            shared: false,
        }
    }

    /// Slices; `bandwidth` is a rank's part of its host's.
    pub fn dcn(size: u32, bandwidth: f64) -> Self {
        Dimension {
            size,
            wiring: Wiring::Switch,
            bandwidth,
            startup: DCN_STARTUP,
            hop: 0.0,
            shared: true,
        }
    }

    /// Seconds for an empty message between neighbours.
    pub fn alpha(&self) -> f64 {
        self.startup + self.hop
    }

    /// Bytes a second at which reduce-scatter and all-gather go through a member: both ways of a
    /// ring; on a line the end members have one wire; a port is one.
    fn rate(&self) -> f64 {
        match self.wiring {
            Wiring::Ring => 2.0 * self.bandwidth,
            Wiring::Line | Wiring::Switch => self.bandwidth,
        }
    }

    /// Messages on the busiest wire and the longest way in neighbours, for messages by the
    /// shorter way; half a ring goes up from even members and down from odd ones, as
    /// [`crate::Torus::displacement`] has it.
    fn congestion(&self, messages: impl IntoIterator<Item = (u32, u32)>) -> (f64, u32) {
        if self.wiring == Wiring::Switch {
            return (1.0, 1);
        }
        let size = self.size;
        let mut up = vec![0u32; size as usize];
        let mut down = vec![0u32; size as usize];
        let mut longest = 0;
        for (from, to) in messages {
            if from == to {
                continue;
            }
            let ahead = (to + size - from) % size;
            let go_up = match self.wiring {
                Wiring::Ring if 2 * ahead == size => from.is_multiple_of(2),
                Wiring::Ring => 2 * ahead < size,
                _ => to > from,
            };
            let hops = if go_up { ahead } else { size - ahead };
            longest = longest.max(hops);
            for hop in 0..hops {
                if go_up {
                    up[((from + hop) % size) as usize] += 1;
                } else {
                    down[((from + size - hop) % size) as usize] += 1;
                }
            }
        }
        let busiest = up.into_iter().chain(down).max().unwrap_or(0);
        (f64::from(busiest), longest)
    }

    /// Seconds of one step in which every member i sends `bytes` to `to(i)`.
    fn step(&self, bytes: f64, to: impl Fn(u32) -> u32) -> f64 {
        let (messages, hops) = self.congestion((0..self.size).map(|from| (from, to(from))));
        self.startup + f64::from(hops) * self.hop + bytes * messages / self.bandwidth
    }

    /// Seconds of one step in which members of a ring send `bytes` to the member `distance` further,
    /// all in the same sense (`apart` 1) or every second one in the other (2).
    ///
    /// By symmetry all messages come to their k-th wire at the same time, and leave it after
    /// those that come later there: once the wire has carried the message that is `apart`
    /// wires younger, and once the latency of the wire before has passed.
    fn shift(&self, bytes: f64, distance: u32, apart: usize) -> f64 {
        let message = bytes / self.bandwidth;
        if self.wiring == Wiring::Switch {
            return self.alpha() + message;
        }
        let mut starts = vec![0.0; distance.max(1) as usize];
        let latency = |wire: usize| if wire == 0 { self.alpha() } else { self.hop };
        for wire in 1..starts.len() {
            let free = wire.checked_sub(apart);
            let free = free.map_or(0.0, |younger: usize| starts[younger] + message);
            starts[wire] = f64::max(starts[wire - 1] + latency(wire - 1), free);
        }
        let last = starts.len() - 1;
        starts[last] + message + latency(last)
    }

    /// [`Dimension::shift`] by the shorter way; half turns go both ways, as
    /// [`crate::Torus::displacement`] has it.
    fn turn(&self, bytes: f64, distance: u32) -> f64 {
        let half = 2 * distance == self.size;
        self.shift(
            bytes,
            distance.min(self.size - distance),
            if half { 2 } else { 1 },
        )
    }

    /// Seconds without bytes of a ring's `size - 1` steps. On a line the message from the last
    /// member to the first crosses all wires, but its steps overlap: it counts once.
    fn ring_latency(&self) -> f64 {
        let extra = if self.wiring == Wiring::Line {
            f64::from(self.size - 2)
        } else {
            0.0
        };
        f64::from(self.size - 1) * self.alpha() + extra * self.hop
    }
}

/// An algorithm with a closed formula.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Algorithm {
    /// One way round: p - 1 steps, 2 (p - 1) for all-reduce.
    Ring,
    /// Half of the data each way round.
    BidirectionalRing,
    /// Dimension after dimension, each both ways round; with D dimensions D colours start in
    /// different ones, so that all wires work at once.
    Bucket,
    /// Halves with partners at distances 1, 2, 4...: a power of two of members.
    HalvingDoubling,
    /// Halves with partners at distances 1, -1, 3, -5, 11...: a power of two on a ring.
    Swing,
    /// Two complementary binary trees with half of the data each, pipelined.
    Tree,
    /// Parallel aggregated trees: far and few first, near and many last; any size.
    Pat,
    /// Every member to every other at once.
    Direct,
    /// Reduce-scatter within the slice, all-reduce between slices, all-gather within.
    Hierarchical,
}

impl Algorithm {
    /// Every algorithm.
    pub const ALL: [Algorithm; 9] = [
        Algorithm::Ring,
        Algorithm::BidirectionalRing,
        Algorithm::Bucket,
        Algorithm::HalvingDoubling,
        Algorithm::Swing,
        Algorithm::Tree,
        Algorithm::Pat,
        Algorithm::Direct,
        Algorithm::Hierarchical,
    ];

    /// The name, as `halving_doubling`.
    pub const fn name(self) -> &'static str {
        match self {
            Algorithm::Ring => "ring",
            Algorithm::BidirectionalRing => "bidirectional_ring",
            Algorithm::Bucket => "bucket",
            Algorithm::HalvingDoubling => "halving_doubling",
            Algorithm::Swing => "swing",
            Algorithm::Tree => "tree",
            Algorithm::Pat => "pat",
            Algorithm::Direct => "direct",
            Algorithm::Hierarchical => "hierarchical",
        }
    }

    /// What `collective` of `bytes` over a group takes, or `None` where the algorithm does not
    /// do it.
    ///
    /// `Direct` does everything on any group, `Bucket` all but all-to-all and permute within a
    /// slice or between slices, `Hierarchical` the same on groups within and between slices.
    /// The rings also go through several dimensions of a torus; the others take one dimension.
    ///
    /// A [`Prediction::Formula`] it is
    /// - for every size: the one-way ring on a ring or line, the two-way ring, Swing and PAT on
    ///   a ring, the bucket on a torus whose axes all close, halving and doubling on up to 4 members of a
    ///   ring, and permute; and everything of one message a round between ports; all this with
    ///   wires that no other group uses;
    /// - where latency or bytes are below 1 % of the other: direct exchanges along one dimension and
    ///   the bucket on one line or one shared ring;
    /// - where bytes are below 1 % of latency: all else.
    pub fn predict(
        self,
        collective: Collective,
        bytes: f64,
        dimensions: &[Dimension],
    ) -> Option<Prediction> {
        let dimensions = longer(dimensions);
        if dimensions.is_empty() {
            return Some(Prediction::Formula(0.0));
        }
        let seconds = self.sum(collective, bytes, &dimensions)?;
        let latency = self.sum(collective, 0.0, &dimensions)?;
        let wires = seconds - latency;
        let holds = match self.domain(collective, &dimensions) {
            Domain::Every => true,
            Domain::Extremes => latency.min(wires) <= NEGLIGIBLE * latency.max(wires),
            Domain::Small => wires <= NEGLIGIBLE * latency,
        };
        Some(if holds {
            Prediction::Formula(seconds)
        } else {
            Prediction::Estimate(seconds)
        })
    }

    /// The seconds of [`Algorithm::predict`].
    pub fn seconds(
        self,
        collective: Collective,
        bytes: f64,
        dimensions: &[Dimension],
    ) -> Option<f64> {
        match longer(dimensions)[..] {
            [] => Some(0.0),
            ref dimensions => self.sum(collective, bytes, dimensions),
        }
    }

    fn domain(self, collective: Collective, dimensions: &[Dimension]) -> Domain {
        let first = dimensions[0];
        let single = dimensions.len() == 1;
        let alone = dimensions.iter().all(|d| !d.shared);
        let rings = dimensions.iter().all(|d| d.wiring == Wiring::Ring);
        let equal = dimensions.iter().all(|d| *d == first);
        let port = first.wiring == Wiring::Switch;
        let every = match self {
            Algorithm::Ring => true,
            Algorithm::BidirectionalRing => rings || !single || port,
            Algorithm::Bucket => rings || equal && first.size == 2 || single && port,
            Algorithm::HalvingDoubling => port || first.size == 2 || rings && first.size == 4,
            Algorithm::Swing | Algorithm::Pat => true,
            Algorithm::Direct => collective == Collective::Permute || first.size == 2 && single,
            Algorithm::Tree | Algorithm::Hierarchical => false,
        };
        match self {
            _ if every && alone => Domain::Every,
            Algorithm::Direct | Algorithm::Bucket if single => Domain::Extremes,
            _ => Domain::Small,
        }
    }

    /// Rounds one after the other.
    fn sum(self, collective: Collective, bytes: f64, dimensions: &[Dimension]) -> Option<f64> {
        match collective {
            Collective::AllToAll => {
                (self == Algorithm::Direct).then(|| all_to_all(bytes, dimensions))
            }
            Collective::Permute => (self == Algorithm::Direct).then(|| permute(bytes, dimensions)),
            Collective::AllReduce => {
                if self == Algorithm::Tree {
                    return one(dimensions).map(|dimension| tree(bytes, dimension));
                }
                if self == Algorithm::Hierarchical {
                    return hierarchical(bytes, dimensions);
                }
                Some(2.0 * self.half(bytes, dimensions, true)?)
            }
            Collective::AllGather | Collective::ReduceScatter => {
                self.half(bytes, dimensions, false)
            }
        }
    }

    /// Reduce-scatter or all-gather, which mirror each other; `near_first` where they are parts of
    /// an all-reduce.
    fn half(self, bytes: f64, dimensions: &[Dimension], near_first: bool) -> Option<f64> {
        let slices = dimensions
            .iter()
            .filter(|d| d.wiring == Wiring::Switch)
            .count();
        let mixed = slices > 0 && slices < dimensions.len();
        match self {
            Algorithm::Bucket => return (!mixed).then(|| bucket(bytes, dimensions)),
            Algorithm::Hierarchical => return mixed.then(|| bucket(bytes, dimensions)),
            Algorithm::Direct => return Some(all_to_all(bytes, dimensions)),
            _ => {}
        }
        let through = match self {
            Algorithm::Ring | Algorithm::BidirectionalRing => through_all(dimensions),
            _ => one(dimensions).copied(),
        };
        let dimension = &through?;
        let size = f64::from(dimension.size);
        let power_of_two = dimension.size.is_power_of_two();
        let rounds = dimension.size.ilog2();
        match self {
            Algorithm::Ring => {
                Some(dimension.ring_latency() + bytes * (size - 1.0) / size / dimension.bandwidth)
            }
            // Between the ends of a line one direction's last step is in the other's way.
            Algorithm::BidirectionalRing => {
                (dimension.wiring != Wiring::Line || size == 2.0).then(|| pass(bytes, dimension))
            }
            Algorithm::HalvingDoubling if power_of_two => {
                // Half of the data crosses the largest distance, except in an all-reduce,
                // whose two parts can begin and end with the smallest.
                let round = |k: u32| {
                    let rest = if near_first { k } else { rounds - 1 - k };
                    dimension.step(bytes / f64::from(2u32 << rest), |i| i ^ (1 << k))
                };
                Some((0..rounds).map(round).sum())
            }
            Algorithm::Swing if power_of_two && dimension.wiring != Wiring::Line => {
                let round = |k: u32| {
                    let distance = swing_peer(0, k, dimension.size);
                    let distance = distance.min(dimension.size - distance);
                    dimension.shift(bytes / f64::from(2u32 << k), distance, 2)
                };
                Some((0..rounds).map(round).sum())
            }
            Algorithm::Pat if dimension.wiring != Wiring::Line => {
                let size = dimension.size;
                let mut total = 0.0;
                for k in (0..size.next_power_of_two().ilog2()).rev() {
                    let distance = 1u32 << k;
                    // Chunks that a member forwards in this round: one for each pair of rounds so
                    // far, those beyond the group left out.
                    let chunks = (size - distance).div_ceil(2 * distance);
                    let bytes = bytes / f64::from(size) * f64::from(chunks);
                    total += dimension.turn(bytes, distance);
                }
                Some(total)
            }
            _ => None,
        }
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The algorithms that do `collective` over a group with what they take, fastest first.
pub fn ranking(
    collective: Collective,
    bytes: f64,
    dimensions: &[Dimension],
) -> Vec<(Algorithm, Prediction)> {
    let mut all: Vec<_> = Algorithm::ALL
        .into_iter()
        .filter_map(|a| Some((a, a.predict(collective, bytes, dimensions)?)))
        .collect();
    all.sort_by(|a, b| a.1.seconds().total_cmp(&b.1.seconds()));
    all
}

/// One of several ways to do something.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Contender<'a> {
    /// Its name.
    pub name: &'a str,
    /// Seconds in all.
    pub seconds: f64,
    /// Seconds without bytes.
    pub latency: f64,
}

/// Why the first of several is taken: what its time consists of, and what it saves against the next.
///
/// ```
/// use tpu_dist_mesh::cost::{Contender, why};
/// let ring = Contender { name: "ring", seconds: 30e-6, latency: 10e-6 };
/// let tree = Contender { name: "tree", seconds: 42e-6, latency: 2e-6 };
/// let words = why(&ring, Some(&tree));
/// assert_eq!(
///     words,
///     "67 % of its time is bytes; against tree 8.00 us more latency and 20.0 us less for bytes"
/// );
/// ```
pub fn why(best: &Contender<'_>, next: Option<&Contender<'_>>) -> String {
    let bytes = best.seconds - best.latency;
    let (share, what) = match best.latency > bytes {
        true => (best.latency, "latency"),
        false => (bytes, "bytes"),
    };
    let words = match best.seconds > 0.0 {
        true => format!(
            "{:.0} % of its time is {what}",
            100.0 * share / best.seconds
        ),
        false => "nothing to send".to_owned(),
    };
    let Some(next) = next else {
        return format!("{words}; no other does this on the group");
    };
    let saved = [
        (next.latency - best.latency, "latency"),
        (next.seconds - next.latency - bytes, "for bytes"),
    ];
    let parts: Vec<String> = saved
        .into_iter()
        .filter(|(seconds, _)| seconds.abs() > 1e-9)
        .map(|(seconds, what)| {
            let less = if seconds > 0.0 { "less" } else { "more" };
            format!("{} {less} {what}", duration(seconds.abs()))
        })
        .collect();
    match parts[..] {
        [] => format!("{words}; {} takes as long", next.name),
        _ => format!("{words}; against {} {}", next.name, parts.join(" and ")),
    }
}

/// What `collective` of `bytes` over a group takes with the algorithm that suits its
/// dimensions whatever their number: bucket, hierarchical between slices, direct.
pub fn predict(collective: Collective, bytes: f64, dimensions: &[Dimension]) -> Prediction {
    general(collective)
        .filter_map(|algorithm| algorithm.predict(collective, bytes, dimensions))
        .min_by(|a, b| a.seconds().total_cmp(&b.seconds()))
        .unwrap_or(Prediction::Estimate(f64::INFINITY))
}

/// The seconds of [`predict`].
pub fn seconds(collective: Collective, bytes: f64, dimensions: &[Dimension]) -> f64 {
    general(collective)
        .filter_map(|algorithm| algorithm.seconds(collective, bytes, dimensions))
        .fold(f64::INFINITY, f64::min)
}

/// The algorithms that any number of dimensions has.
fn general(collective: Collective) -> impl Iterator<Item = Algorithm> {
    let direct = matches!(collective, Collective::AllToAll | Collective::Permute);
    let all: &[Algorithm] = match direct {
        true => &[Algorithm::Direct],
        false => &[Algorithm::Hierarchical, Algorithm::Bucket],
    };
    all.iter().copied()
}

/// Swing's partner of member i in round k: the distance is (1 - (-2)^(k+1)) / 3.
pub fn swing_peer(i: u32, k: u32, size: u32) -> u32 {
    let distance = (1 - (-2i64).pow(k + 1)) / 3;
    let signed = if i.is_multiple_of(2) {
        distance
    } else {
        -distance
    };
    (i64::from(i) + signed).rem_euclid(i64::from(size)) as u32
}

/// The dimensions with more than one member.
fn longer(dimensions: &[Dimension]) -> Vec<Dimension> {
    dimensions.iter().copied().filter(|d| d.size > 1).collect()
}

fn one(dimensions: &[Dimension]) -> Option<&Dimension> {
    match dimensions {
        [dimension] => Some(dimension),
        _ => None,
    }
}

/// One ring through all members of a torus: a box of an even number of chips has one.
fn through_all(dimensions: &[Dimension]) -> Option<Dimension> {
    let (first, rest) = dimensions.split_first()?;
    let torus = |d: &Dimension| d.wiring != Wiring::Switch && d.hop > 0.0;
    if rest.is_empty() {
        return Some(*first);
    }
    if !dimensions.iter().all(torus) || dimensions.iter().all(|d| !d.size.is_multiple_of(2)) {
        return None;
    }
    Some(rest.iter().fold(
        Dimension {
            wiring: Wiring::Ring,
            ..*first
        },
        |ring, d| Dimension {
            size: ring.size * d.size,
            wiring: Wiring::Ring,
            bandwidth: ring.bandwidth.min(d.bandwidth),
            startup: ring.startup.max(d.startup),
            hop: ring.hop.max(d.hop),
            shared: ring.shared || d.shared,
        },
    ))
}

/// One pass of a bucket along a dimension.
fn pass(bytes: f64, dimension: &Dimension) -> f64 {
    let size = f64::from(dimension.size);
    dimension.ring_latency() + bytes * (size - 1.0) / size / dimension.rate()
}

/// Bucket reduce-scatter (all-gather mirrors it). The devices of a chip go first, slices last, as
/// their wires differ; between, the dimensions of the torus, either with rotated colours in
/// step or one after the other, whichever is faster.
fn bucket(bytes: f64, dimensions: &[Dimension]) -> f64 {
    let (mut total, mut bytes) = (0.0, bytes);
    let is_die = |d: &Dimension| d.hop == 0.0 && d.wiring != Wiring::Switch;
    let is_dcn = |d: &Dimension| d.wiring == Wiring::Switch;
    for dimension in dimensions.iter().filter(|d| is_die(d)) {
        total += pass(bytes, dimension);
        bytes /= f64::from(dimension.size);
    }
    let torus: Vec<_> = dimensions
        .iter()
        .copied()
        .filter(|d| !is_die(d) && !is_dcn(d))
        .collect();
    total += match rotates(bytes, &torus) {
        true => colours(bytes, &torus),
        false => sequence(bytes, &mut torus.clone(), 0),
    };
    bytes /= torus.iter().map(|d| f64::from(d.size)).product::<f64>();
    for dimension in dimensions.iter().filter(|d| is_dcn(d)) {
        total += pass(bytes, dimension);
        bytes /= f64::from(dimension.size);
    }
    total
}

/// Whether a bucket of `bytes` goes through the dimensions of a torus in rotated colours, all in
/// step, or, as latency decides, through one after the other.
pub fn rotates(bytes: f64, torus: &[Dimension]) -> bool {
    colours(bytes, torus) <= sequence(bytes, &mut torus.to_vec(), 0)
}

/// Colour c goes through the dimensions c, c + 1, ...; all colours in step.
fn colours(bytes: f64, torus: &[Dimension]) -> f64 {
    let count = torus.len();
    let mut parts = vec![bytes / count.max(1) as f64; count];
    let mut total = 0.0;
    for phase in 0..count {
        let mut slowest = 0.0f64;
        for (colour, part) in parts.iter_mut().enumerate() {
            let dimension = &torus[(colour + phase) % count];
            slowest = slowest.max(pass(*part, dimension));
            *part /= f64::from(dimension.size);
        }
        total += slowest;
    }
    total
}

/// The fastest order of one dimension after the other, from `at` on.
fn sequence(bytes: f64, torus: &mut [Dimension], at: usize) -> f64 {
    if at == torus.len() {
        return 0.0;
    }
    let mut best = f64::INFINITY;
    for next in at..torus.len() {
        torus.swap(at, next);
        let first = torus[at];
        let rest = sequence(bytes / f64::from(first.size), torus, at + 1);
        best = best.min(pass(bytes, &first) + rest);
        torus.swap(at, next);
    }
    best
}

/// Reduce-scatter and all-gather in the slice around an all-reduce between slices: between many
/// slices a ring, or halving and doubling where its fewer steps win.
fn hierarchical(bytes: f64, dimensions: &[Dimension]) -> Option<f64> {
    let (dcn, ici): (Vec<_>, Vec<_>) = dimensions
        .iter()
        .copied()
        .partition(|d| d.wiring == Wiring::Switch);
    let dcn = one(&dcn)?;
    if ici.is_empty() {
        return None;
    }
    let inside = 2.0 * bucket(bytes, &ici);
    let part = bytes / ici.iter().map(|d| f64::from(d.size)).product::<f64>();
    let between = [Algorithm::Ring, Algorithm::HalvingDoubling]
        .into_iter()
        .filter_map(|algorithm| algorithm.seconds(Collective::AllReduce, part, &[*dcn]))
        .fold(f64::INFINITY, f64::min);
    Some(inside + between)
}

/// Every member sends an equal part to every other; the busiest wire of each dimension counts, and
/// dimensions work at once.
fn all_to_all(bytes: f64, dimensions: &[Dimension]) -> f64 {
    let mut wire = 0.0f64;
    let mut latency = 0.0;
    let mut startup = 0.0f64;
    for dimension in dimensions {
        let size = f64::from(dimension.size);
        let (load, hops) = match dimension.wiring {
            // All pairs by the shorter way, half turns split: s^2/4 or (s^2-1)/4 hops a member.
            Wiring::Ring => (
                ((size * size / 4.0).floor()) / (2.0 * size),
                (size / 2.0).floor(),
            ),
            // The members of one half all send across the middle.
            Wiring::Line => (
                (size / 2.0).floor() * (size / 2.0).ceil() / size,
                size - 1.0,
            ),
            Wiring::Switch => ((size - 1.0) / size, 1.0),
        };
        wire = wire.max(bytes * load / dimension.bandwidth);
        latency += hops * dimension.hop;
        startup = startup.max(dimension.startup);
    }
    startup + latency + wire
}

/// Every member to the next of a ring through the dimensions, as in one step of the slowest. On a
/// line the last member's message goes back over all wires.
fn permute(bytes: f64, dimensions: &[Dimension]) -> f64 {
    let closed = dimensions.len() > 1;
    dimensions
        .iter()
        .map(|d| {
            let back = match d.wiring {
                Wiring::Line if !closed => f64::from(d.size - 2) * d.hop,
                _ => 0.0,
            };
            d.alpha() + back + bytes / d.bandwidth
        })
        .fold(0.0, f64::max)
}

/// Two trees with half of the data each, up and down, pipelined: the levels count in latency,
/// the busiest wire in bytes.
fn tree(bytes: f64, dimension: &Dimension) -> f64 {
    let size = dimension.size;
    let levels = size.ilog2();
    // In-order binary tree on the places 1 to size: a place with z trailing zero bits is at height
    // z and 2^z away from its parent; parents beyond the last place are passed over.
    let parent = |mut place: u32| loop {
        let bit = 1 << place.trailing_zeros();
        place = if place & (2 * bit) == 0 {
            place + bit
        } else {
            place - bit
        };
        if place <= size {
            return Some(place);
        }
        if bit >= size {
            return None;
        }
    };
    let edges = (1..=size).filter_map(|place| Some((place - 1, parent(place)? - 1)));
    // The second tree is the first mirrored, or, of an odd number, moved on by one.
    let twin = |i: u32| {
        if size.is_multiple_of(2) {
            size - 1 - i
        } else {
            (i + size - 1) % size
        }
    };
    let messages =
        edges.flat_map(|(a, b)| [(a, b), (b, a), (twin(a), twin(b)), (twin(b), twin(a))]);
    let load = match dimension.wiring {
        // Of a port: up and down of one tree with two children, of the other with none.
        Wiring::Switch => 4.0,
        Wiring::Ring | Wiring::Line => dimension.congestion(messages).0,
    };
    let level = |height: u32| {
        let hops = match dimension.wiring {
            Wiring::Switch => 1,
            Wiring::Ring => (1u32 << height).min(size - (1 << height)),
            Wiring::Line => 1 << height,
        };
        dimension.startup + f64::from(hops) * dimension.hop
    };
    2.0 * (0..levels).map(level).sum::<f64>() + bytes / 2.0 * load / dimension.bandwidth
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ring(size: u32) -> Dimension {
        Dimension::ici(size, 1, true, 1, 100e9)
    }

    fn line(size: u32) -> Dimension {
        Dimension::ici(size, 1, false, 1, 100e9)
    }

    /// Textbook formulas, written out, at a size where both terms matter.
    #[test]
    fn formulas() {
        const N: f64 = 1e6;
        const W: f64 = 100e9;
        const A: f64 = 1e-6;
        let (cube, dcn) = ([ring(4); 3], Dimension::dcn(4, 1e9));
        for (what, algorithm, collective, dimensions, expected) in [
            (
                "ring",
                Algorithm::Ring,
                Collective::AllReduce,
                &[ring(8)][..],
                14.0 * A + 2.0 * N * 7.0 / 8.0 / W,
            ),
            (
                "both ways",
                Algorithm::BidirectionalRing,
                Collective::AllReduce,
                &[ring(8)],
                14.0 * A + N * 7.0 / 8.0 / W,
            ),
            (
                "line",
                Algorithm::Bucket,
                Collective::AllGather,
                &[line(8)],
                7.0 * A + 3.0 * A + N * 7.0 / 8.0 / W,
            ),
            (
                "bucket",
                Algorithm::Bucket,
                Collective::AllReduce,
                &cube,
                18.0 * A + N * 63.0 / 64.0 / (3.0 * W),
            ),
            (
                "bucket half",
                Algorithm::Bucket,
                Collective::ReduceScatter,
                &cube,
                9.0 * A + N * 63.0 / 64.0 / (6.0 * W),
            ),
            // Distances 1, 2, 4 with 1, 2, 2 messages a wire (half turns go both ways) carry N/2, N/4,
            // N/8 in an all-reduce, and N/8, N/4, N/2 on their own.
            (
                "halving",
                Algorithm::HalvingDoubling,
                Collective::AllReduce,
                &[ring(8)],
                2.0 * (1.5 * A + 3.5 * A + 1.25 * N / W),
            ),
            (
                "halving only",
                Algorithm::HalvingDoubling,
                Collective::ReduceScatter,
                &[ring(8)],
                1.5 * A + 3.5 * A + 1.625 * N / W,
            ),
            // Distances 1, 1, 3, 5, each message shorter than two wires' latency.
            (
                "swing",
                Algorithm::Swing,
                Collective::ReduceScatter,
                &[ring(16)],
                2.0 * A + 5.0 * A + N / W * 15.0 / 16.0,
            ),
            (
                "all-to-all",
                Algorithm::Direct,
                Collective::AllToAll,
                &[ring(8)],
                0.5 * A + 2.0 * A + N * 8.0 / 8.0 / W,
            ),
            (
                "all-to-all cube",
                Algorithm::Direct,
                Collective::AllToAll,
                &cube,
                0.5 * A + 3.0 * A + N * 4.0 / 8.0 / W,
            ),
            (
                "all-to-all line",
                Algorithm::Direct,
                Collective::AllToAll,
                &[line(8)],
                0.5 * A + 3.5 * A + N * 2.0 / W,
            ),
            (
                "pat",
                Algorithm::Pat,
                Collective::AllGather,
                &[dcn],
                2.0 * DCN_STARTUP + N * 3.0 / 4.0 / 1e9,
            ),
            (
                "tree",
                Algorithm::Tree,
                Collective::AllReduce,
                &[dcn],
                4.0 * DCN_STARTUP + 2.0 * N / 1e9,
            ),
            (
                "permute",
                Algorithm::Direct,
                Collective::Permute,
                &[ring(8)],
                A + N / W,
            ),
            (
                "hierarchical",
                Algorithm::Hierarchical,
                Collective::AllReduce,
                &[ring(4), dcn],
                6.0 * A + N * 0.75 / W + 4.0 * DCN_STARTUP + 2.0 * N / 4.0 * 0.75 / 1e9,
            ),
        ] {
            let ours = algorithm.seconds(collective, N, dimensions).unwrap();
            assert!(
                (ours / expected - 1.0).abs() < 1e-9,
                "{what}: {ours} against {expected}"
            );
        }
    }

    #[test]
    fn what_does_not_apply_is_none() {
        let some = |algorithm: Algorithm, dimensions: &[Dimension]| {
            algorithm
                .seconds(Collective::AllReduce, 1e6, dimensions)
                .is_some()
        };
        assert!(!some(Algorithm::HalvingDoubling, &[ring(12)]));
        assert!(!some(Algorithm::Swing, &[line(8)]));
        assert!(some(Algorithm::Ring, &[ring(4), ring(4)]));
        assert!(!some(Algorithm::Ring, &[ring(4), Dimension::dcn(4, 1e9)]));
        assert!(!some(Algorithm::Bucket, &[ring(4), Dimension::dcn(4, 1e9)]));
        assert!(!some(Algorithm::Pat, &[ring(4), ring(4)]));
        assert!(!some(Algorithm::Hierarchical, &[ring(4)]));
        assert!(some(Algorithm::Pat, &[ring(12)]));
        assert_eq!(
            Algorithm::Ring.seconds(Collective::AllReduce, 1e6, &[]),
            Some(0.0)
        );
        assert_eq!(seconds(Collective::AllToAll, 1e6, &[ring(1)]), 0.0);
    }

    #[test]
    fn swing_peers_are_mutual_and_cover_the_group() {
        for size in [2u32, 4, 8, 16, 32, 64, 128] {
            let mut reached: Vec<Vec<u32>> = (0..size).map(|i| vec![i]).collect();
            for k in 0..size.ilog2() {
                reached = (0..size)
                    .map(|i| {
                        let peer = swing_peer(i, k, size);
                        assert_eq!(swing_peer(peer, k, size), i);
                        let both = reached[i as usize].iter().chain(&reached[peer as usize]);
                        both.copied().collect()
                    })
                    .collect();
            }
            for mut all in reached {
                all.sort_unstable();
                all.dedup();
                assert_eq!(all.len() as u32, size);
            }
        }
    }
}
