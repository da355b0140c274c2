//! The crate's one error type.

use crate::{Coord, Generation, Shape};

/// What can be wrong with a topology, a mesh or a route.
///
/// Each variant says what was asked, what is wrong with it and what would be right.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A name that is no TPU generation.
    #[error("unknown TPU generation {name:?}; known: v2, v3, v4, v5e, v5p, v6e, v7x")]
    UnknownGeneration {
        /// The name given.
        name: String,
    },
    /// A topology name that cannot be read.
    #[error("cannot read topology {text:?}: {reason}")]
    Parse {
        /// The text given.
        text: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A shape that the generation is not built in.
    #[error("{generation} has no {}slice {shape}; {legal}", if *.twisted { "twisted " } else { "" })]
    IllegalShape {
        /// The generation.
        generation: Generation,
        /// The shape given.
        shape: Shape,
        /// Whether a twist was asked for.
        twisted: bool,
        /// Words that list or describe the legal shapes.
        legal: String,
    },
    /// A number of chips or cores for which the generation has no slice.
    #[error("{generation} has no slice of {count} {unit}; legal: {legal}")]
    IllegalCount {
        /// The generation.
        generation: Generation,
        /// The number given.
        count: u32,
        /// `chips` or `cores`.
        unit: &'static str,
        /// Legal numbers.
        legal: String,
    },
    /// An option that does not fit the slice.
    #[error("{option} {value} does not fit {slice}: {reason}")]
    Option {
        /// The option's name.
        option: &'static str,
        /// The value given.
        value: String,
        /// The slice.
        slice: String,
        /// What would fit.
        reason: String,
    },
    /// A chip outside the slice.
    #[error("chip {coord} is outside slice {shape}")]
    OutOfRange {
        /// The coordinates given.
        coord: Coord,
        /// The slice's shape.
        shape: Shape,
    },
    /// Two chips that no link joins.
    #[error("no link joins chips {a} and {b}")]
    NoLink {
        /// One end.
        a: Coord,
        /// The other end.
        b: Coord,
    },
    /// An end of a route is a dead chip.
    #[error("chip {chip} is dead")]
    DeadChip {
        /// The dead chip.
        chip: Coord,
    },
    /// Faults separate the two ends of a route.
    #[error("no route from {from} to {to}: {}", describe_cut(.cut_off))]
    CutOff {
        /// Where the route starts.
        from: Coord,
        /// Where it should end.
        to: Coord,
        /// The smaller side of the cut: the live chips that cannot reach the rest.
        cut_off: Vec<Coord>,
    },
    /// A ring that the links do not allow.
    #[error("no ring over {what}: {reason}")]
    NoRing {
        /// What the ring should visit.
        what: String,
        /// Why there is none.
        reason: String,
    },
    /// A logical mesh that does not fit the devices.
    #[error("mesh shape {shape:?} has {product} positions, {topology} has {devices} devices")]
    MeshSize {
        /// The logical shape.
        shape: Vec<u32>,
        /// Its product.
        product: u64,
        /// The topology's name.
        topology: String,
        /// Devices of the topology.
        devices: u32,
    },
    /// A mesh argument that contradicts another.
    #[error("{argument}: {reason}")]
    Mesh {
        /// The argument's name.
        argument: &'static str,
        /// Expected and given.
        reason: String,
    },
    /// A launch argument that does not fit the topology.
    #[error("{argument}: {reason}")]
    Launch {
        /// The argument's name.
        argument: &'static str,
        /// Expected and given.
        reason: String,
    },
}

fn describe_cut(chips: &[Coord]) -> String {
    const SHOWN: usize = 8;
    let names: Vec<_> = chips.iter().take(SHOWN).map(Coord::to_string).collect();
    let rest = match chips.len().saturating_sub(SHOWN) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    let (noun, verb) = if chips.len() == 1 {
        ("chip", "is")
    } else {
        ("chips", "are")
    };
    format!("{noun} {}{rest} {verb} cut off", names.join(", "))
}
