//! One slice: a generation, a torus, its hosts and its devices.

use std::fmt;

use serde::Serialize;

use crate::{ChipId, Coord, Error, Generation, LegalSlice, Shape, Torus};

/// A device as libtpu shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct Device {
    /// libtpu's global id.
    pub id: u32,
    /// The chip's place in its slice.
    pub coords: Coord,
    /// Which of the chip's devices.
    pub core: u32,
    /// The process (host) that owns it.
    pub process: u32,
    /// The slice; 0 where there is only one.
    pub slice: u32,
}

/// A slice of one TPU generation.
///
/// ```
/// use tpu_dist_mesh::{Generation, Shape, Slice};
/// let slice = Slice::new(Generation::V5p, Shape::new3(4, 4, 8))?.with_twist(true)?;
/// assert_eq!(slice.name(), "v5p:4x4x8_twisted");
/// assert_eq!(slice.chips(), 128);
/// assert_eq!(slice.host_bounds(), [2, 2, 8]);
/// let devices = slice.devices();
/// assert_eq!((devices[2].id, devices[2].coords.0), (4, [0, 1, 0]));
/// # Ok::<(), tpu_dist_mesh::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct Slice {
    generation: Generation,
    torus: Torus,
    chips_per_host: [u32; 3],
    devices_per_chip: u32,
}

impl Slice {
    /// A slice as the generation builds it: wrap as in [`Generation::legal_slices`], no
    /// twist, libtpu's default process grid.
    ///
    /// # Errors
    /// [`Error::IllegalShape`] for a shape the generation does not have.
    pub fn new(generation: Generation, shape: Shape) -> Result<Slice, Error> {
        let legal = find_legal(generation, shape, false)?;
        let spec = generation.spec();
        let extents = legal.shape.extents();
        Ok(Slice {
            generation,
            torus: Torus::new(legal.shape, legal.wrap),
            chips_per_host: std::array::from_fn(|a| spec.chips_per_host[a].min(extents[a])),
            devices_per_chip: spec.devices_per_chip,
        })
    }

    /// The same slice with or without twist.
    ///
    /// # Errors
    /// [`Error::IllegalShape`] where the shape has no twisted form.
    pub fn with_twist(self, twisted: bool) -> Result<Slice, Error> {
        let legal = find_legal(self.generation, self.shape(), twisted)?;
        let torus = if twisted {
            Torus::twisted(legal.shape)
        } else {
            Torus::new(legal.shape, legal.wrap)
        };
        Ok(Slice { torus, ..self })
    }

    /// The same slice with other axes closed. libtpu leaves all axes open unless told
    /// otherwise; machines close them as in [`Generation::legal_slices`].
    ///
    /// # Errors
    /// [`Error::Option`] where the slice is twisted, or for an axis shorter than 3 chips.
    pub fn with_wrap(self, wrap: [bool; 3]) -> Result<Slice, Error> {
        let fail = |slice: &Slice, reason: &str| Error::Option {
            option: "wrap",
            value: format!("{wrap:?}"),
            slice: slice.name(),
            reason: reason.to_owned(),
        };
        if self.is_twisted() && wrap != [true; 3] {
            return Err(fail(&self, "a twisted torus wraps along every axis"));
        }
        let extents = self.shape().extents();
        if (0..3).any(|axis| wrap[axis] && extents[axis] < 3) {
            return Err(fail(&self, "an axis needs 3 chips to be a ring"));
        }
        if self.is_twisted() {
            return Ok(self);
        }
        Ok(Slice {
            torus: Torus::new(self.shape(), wrap),
            ..self
        })
    }

    /// The same slice with another process grid: chips a host along x, y and z.
    ///
    /// # Errors
    /// [`Error::Option`] where the bounds do not divide the shape.
    pub fn with_chips_per_host(self, bounds: [u32; 3]) -> Result<Slice, Error> {
        let extents = self.shape().extents();
        if (0..3).any(|a| bounds[a] == 0 || !extents[a].is_multiple_of(bounds[a])) {
            return Err(Error::Option {
                option: "chips_per_host",
                value: format!("{bounds:?}"),
                slice: self.name(),
                reason: format!("each bound must divide {extents:?}"),
            });
        }
        Ok(Slice {
            chips_per_host: bounds,
            ..self
        })
    }

    /// The same slice with another number of devices a chip: v4 shows its two cores as
    /// one device (megacore, as Cloud TPU does) or as two.
    ///
    /// # Errors
    /// [`Error::Option`] for a number the generation does not offer.
    pub fn with_devices_per_chip(self, devices: u32) -> Result<Slice, Error> {
        let default = self.generation.spec().devices_per_chip;
        if devices != default && !(self.generation == Generation::V4 && devices == 2) {
            return Err(Error::Option {
                option: "devices_per_chip",
                value: devices.to_string(),
                slice: self.name(),
                reason: match self.generation {
                    Generation::V4 => "v4 shows 1 or 2".to_owned(),
                    other => format!("{other} shows {default}"),
                },
            });
        }
        Ok(Slice {
            devices_per_chip: devices,
            ..self
        })
    }

    /// The generation.
    pub const fn generation(&self) -> Generation {
        self.generation
    }

    /// Neighbours and distances.
    pub const fn torus(&self) -> &Torus {
        &self.torus
    }

    /// Extents.
    pub const fn shape(&self) -> Shape {
        self.torus.shape()
    }

    /// Which axes are closed.
    pub const fn wrap(&self) -> [bool; 3] {
        self.torus.wrap()
    }

    /// Whether the torus is twisted.
    pub fn is_twisted(&self) -> bool {
        self.torus.is_twisted()
    }

    /// Chips a host along x, y and z.
    pub const fn chips_per_host(&self) -> [u32; 3] {
        self.chips_per_host
    }

    /// Hosts along x, y and z: libtpu's process bounds.
    pub fn host_bounds(&self) -> [u32; 3] {
        let extents = self.shape().extents();
        std::array::from_fn(|axis| extents[axis] / self.chips_per_host[axis])
    }

    /// Number of hosts.
    pub fn hosts(&self) -> u32 {
        self.host_bounds().iter().product()
    }

    /// Number of chips.
    pub const fn chips(&self) -> u32 {
        self.shape().chips()
    }

    /// Devices a chip.
    pub const fn devices_per_chip(&self) -> u32 {
        self.devices_per_chip
    }

    /// Number of devices.
    pub const fn device_count(&self) -> u32 {
        self.chips() * self.devices_per_chip
    }

    /// The chip of a coordinate.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for a coordinate outside the slice.
    pub fn chip(&self, coord: Coord) -> Result<ChipId, Error> {
        if self.shape().contains(coord) {
            Ok(self.shape().chip(coord))
        } else {
            Err(Error::OutOfRange {
                coord,
                shape: self.shape(),
            })
        }
    }

    /// The host of a chip: row-major over the process grid, x fastest.
    pub fn host_of(&self, coord: Coord) -> u32 {
        let [hx, hy, _] = self.host_bounds();
        let [x, y, z] =
            std::array::from_fn::<u32, 3, _>(|axis| coord.0[axis] / self.chips_per_host[axis]);
        x + hx * (y + hy * z)
    }

    /// The chips of a host in the order of their index.
    pub fn chips_of_host(&self, host: u32) -> impl Iterator<Item = Coord> {
        let [hx, hy, _] = self.host_bounds();
        let at = [host % hx, host / hx % hy, host / (hx * hy)];
        let bounds = self.chips_per_host;
        let inside = Shape::new3(bounds[0], bounds[1], bounds[2]);
        inside.coords().map(move |offset| {
            Coord(std::array::from_fn(|axis| {
                at[axis] * bounds[axis] + offset.0[axis]
            }))
        })
    }

    /// The device of a chip and core.
    pub fn device(&self, coords: Coord, core: u32) -> Device {
        Device {
            id: self.shape().chip(coords).0 * self.devices_per_chip + core,
            coords,
            core,
            process: self.host_of(coords),
            slice: 0,
        }
    }

    /// All devices in libtpu's list order: by process, then by id.
    ///
    /// A device's position in this list is its rank in a job with one process a device.
    pub fn devices(&self) -> Vec<Device> {
        (0..self.hosts())
            .flat_map(|host| self.chips_of_host(host))
            .flat_map(|coords| (0..self.devices_per_chip).map(move |core| (coords, core)))
            .map(|(coords, core)| self.device(coords, core))
            .collect()
    }

    /// Whether one DMA reaches only the chips of [`Slice::dma_reach`]: v5e from 4x8 up, which
    /// libtpu routes by "nhop".
    pub fn has_limited_ici(&self) -> bool {
        let [x, y, _] = self.shape().extents();
        self.generation == Generation::V5e && x >= 4 && y >= 8
    }

    /// With limited ICI connectivity, the chips that one DMA from `from` reaches: those a power of
    /// two up to 8 away along one axis. Sorted by index; libtpu answers the same for every
    /// two-dimensional slice, whether limited or not.
    pub fn dma_reach(&self, from: Coord) -> Vec<Coord> {
        let extents = self.shape().extents();
        let mut reach = Vec::new();
        for axis in 0..3 {
            for hops in [1, 2, 4, 8] {
                for sign in [1, -1] {
                    let mut to = from.0.map(i64::from);
                    to[axis] += sign * hops;
                    if self.wrap()[axis] {
                        to[axis] = to[axis].rem_euclid(i64::from(extents[axis]));
                    }
                    if (0..i64::from(extents[axis])).contains(&to[axis]) {
                        reach.push(Coord(to.map(|at| at as u32)));
                    }
                }
            }
        }
        reach.sort_by_key(|&coord| self.shape().chip(coord));
        reach.dedup();
        reach.retain(|&coord| coord != from);
        reach
    }

    /// libtpu's name for the slice, for example `tpu7x:4x4x8_twisted`.
    pub fn libtpu_name(&self) -> String {
        self.name_with(self.generation.spec().libtpu_name)
    }

    /// The slice's name, for example `v5p:4x4x8`.
    pub fn name(&self) -> String {
        self.name_with(self.generation.spec().name)
    }

    fn name_with(&self, generation: &str) -> String {
        let twist = if self.is_twisted() { "_twisted" } else { "" };
        format!("{generation}:{}{twist}", self.shape())
    }

    /// The cloud accelerator type, for example `v5p-128` or `v5litepod-16`.
    pub fn accelerator_type(&self) -> String {
        let spec = self.generation.spec();
        let prefix = match self.generation {
            Generation::V5e => "v5litepod",
            Generation::V7x => "tpu7x",
            _ => spec.name,
        };
        let units = if spec.type_counts_cores {
            spec.cores_per_chip
        } else {
            1
        };
        format!("{prefix}-{}", self.chips() * units)
    }
}

impl fmt::Display for Slice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name())
    }
}

fn find_legal(generation: Generation, shape: Shape, twisted: bool) -> Result<LegalSlice, Error> {
    let slices = generation.legal_slices();
    let fits = |s: &&LegalSlice| s.shape.extents() == shape.extents() && s.twisted == twisted;
    slices
        .iter()
        .find(fits)
        .copied()
        .ok_or_else(|| Error::IllegalShape {
            generation,
            shape,
            twisted,
            legal: describe_legal(generation, &slices, shape, twisted),
        })
}

/// What to say instead: a reordering of the same extents, then the list or the rule.
fn describe_legal(
    generation: Generation,
    slices: &[LegalSlice],
    shape: Shape,
    twisted: bool,
) -> String {
    let sorted = |shape: Shape| {
        let mut extents = shape.extents();
        extents.sort_unstable();
        extents
    };
    let names = |keep: &dyn Fn(&LegalSlice) -> bool| -> String {
        let names: Vec<_> = slices
            .iter()
            .filter(|s| keep(s))
            .map(|s| s.shape.to_string())
            .collect();
        names.join(", ")
    };
    if twisted {
        return match names(&|s| s.twisted) {
            none if none.is_empty() => format!("{generation} has no twisted slices"),
            all => format!("twisted: {all}"),
        };
    }
    let hint = slices
        .iter()
        .find(|s| sorted(s.shape) == sorted(shape) && s.shape.extents() != shape.extents())
        .map_or_else(String::new, |s| format!("did you mean {}? ", s.shape));
    let spec = generation.spec();
    if spec.dimensions == 2 {
        return format!("{hint}legal: {}", names(&|_| true));
    }
    let order = if generation == Generation::V4 {
        "in any order"
    } else {
        "in ascending order"
    };
    format!(
        "{hint}legal: {}, and multiples of 4 up to 256 {order} with at most {} chips",
        names(&|s| s.wrap == [false; 3]),
        spec.max_chips
    )
}
