//! Chips, axes and directions.

use std::fmt;

use serde::Serialize;

/// A physical axis of the interconnect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Axis {
    /// First coordinate; the fastest in device ids.
    X = 0,
    /// Second coordinate.
    Y = 1,
    /// Third coordinate; extent 1 on two-dimensional generations.
    Z = 2,
}

impl Axis {
    /// All axes, X first.
    pub const ALL: [Axis; 3] = [Axis::X, Axis::Y, Axis::Z];

    /// Position in a coordinate triple.
    pub const fn index(self) -> usize {
        self as usize
    }
}

impl fmt::Display for Axis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(["x", "y", "z"][self.index()])
    }
}

/// A way along an axis: one of a chip's up to six ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub struct Direction {
    /// The axis.
    pub axis: Axis,
    /// Towards larger coordinates.
    pub positive: bool,
}

impl Direction {
    /// All six, as +x, -x, +y, -y, +z, -z.
    pub const ALL: [Direction; 6] = [
        Direction {
            axis: Axis::X,
            positive: true,
        },
        Direction {
            axis: Axis::X,
            positive: false,
        },
        Direction {
            axis: Axis::Y,
            positive: true,
        },
        Direction {
            axis: Axis::Y,
            positive: false,
        },
        Direction {
            axis: Axis::Z,
            positive: true,
        },
        Direction {
            axis: Axis::Z,
            positive: false,
        },
    ];

    /// Position in [`Direction::ALL`].
    pub const fn index(self) -> usize {
        self.axis as usize * 2 + !self.positive as usize
    }

    /// The other way along the same axis.
    pub const fn reversed(self) -> Direction {
        Direction {
            axis: self.axis,
            positive: !self.positive,
        }
    }
}

impl fmt::Display for Direction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", if self.positive { '+' } else { '-' }, self.axis)
    }
}

/// A chip's place in its slice, as libtpu's `coords`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub struct Coord(pub [u32; 3]);

impl Coord {
    /// The coordinate along `axis`.
    pub const fn get(self, axis: Axis) -> u32 {
        self.0[axis as usize]
    }
}

impl fmt::Display for Coord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [x, y, z] = self.0;
        write!(f, "({x},{y},{z})")
    }
}

/// A chip's index in its slice: x + X (y + Y z).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub struct ChipId(pub u32);

impl ChipId {
    /// As an array index.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}
