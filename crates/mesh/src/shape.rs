//! Extents of a slice.

use std::fmt;

use serde::{Serialize, Serializer};

use crate::{ChipId, Coord};

/// The extents of a slice along x, y and z, in chips.
///
/// A two-dimensional shape has z = 1 and is written without it.
///
/// ```
/// use tpu_dist_mesh::{Coord, Shape};
/// let shape = Shape::new3(4, 4, 8);
/// assert_eq!(shape.to_string(), "4x4x8");
/// assert_eq!(shape.chips(), 128);
/// assert_eq!(shape.coord(shape.chip(Coord([3, 1, 5]))), Coord([3, 1, 5]));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Shape {
    extents: [u32; 3],
    dimensions: u8,
}

impl Shape {
    /// A two-dimensional shape.
    pub const fn new2(x: u32, y: u32) -> Shape {
        Shape {
            extents: [x, y, 1],
            dimensions: 2,
        }
    }

    /// A three-dimensional shape.
    pub const fn new3(x: u32, y: u32, z: u32) -> Shape {
        Shape {
            extents: [x, y, z],
            dimensions: 3,
        }
    }

    /// Extents along x, y and z.
    pub const fn extents(self) -> [u32; 3] {
        self.extents
    }

    /// 2 or 3.
    pub const fn dimensions(self) -> usize {
        self.dimensions as usize
    }

    /// Number of chips.
    pub const fn chips(self) -> u32 {
        self.extents[0] * self.extents[1] * self.extents[2]
    }

    /// Whether the chip is inside.
    pub fn contains(self, coord: Coord) -> bool {
        coord
            .0
            .iter()
            .zip(self.extents)
            .all(|(&at, extent)| at < extent)
    }

    /// The index of a chip that is inside.
    pub const fn chip(self, coord: Coord) -> ChipId {
        let [x, y, z] = coord.0;
        ChipId(x + self.extents[0] * (y + self.extents[1] * z))
    }

    /// The coordinates of a chip.
    pub const fn coord(self, chip: ChipId) -> Coord {
        let [x, y, _] = self.extents;
        Coord([chip.0 % x, chip.0 / x % y, chip.0 / (x * y)])
    }

    /// All chips in the order of their index.
    pub fn coords(self) -> impl Iterator<Item = Coord> {
        (0..self.chips()).map(move |chip| self.coord(ChipId(chip)))
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [x, y, z] = self.extents;
        write!(f, "{x}x{y}")?;
        if self.dimensions == 3 {
            write!(f, "x{z}")?;
        }
        Ok(())
    }
}

impl Serialize for Shape {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}
