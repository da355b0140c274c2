//! Placement: which logical mesh axes lie on which physical axes.
//!
//! A physical axis (the devices of a chip, x, y, z, the slices) can be split among several
//! logical axes: from inner to outer each takes a factor. [`place`] tries every way to
//! factor every physical axis and every order of the factors, and takes the one with the least
//! modelled time for the traffic that the user names. [`evaluate`] gives the same score to any
//! order of ranks, so that placements from elsewhere can be compared.

use std::collections::HashMap;

use serde::{Serialize, Serializer};

use crate::{
    Axis, Coord, Device, Error, Fabric, MultiSlice,
    cost::{self, Collective, Dimension, Wiring},
    ring,
};

/// What one logical axis carries.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Traffic {
    /// The logical axis.
    pub axis: usize,
    /// What is done along it.
    pub collective: Collective,
    /// Bytes, as [`Collective`] counts them.
    pub bytes: f64,
}

/// A physical axis as placement sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Physical {
    /// The devices of a chip.
    Core,
    /// Chips along an axis of the torus.
    Torus(Axis),
    /// Slices.
    Dcn,
}

impl std::fmt::Display for Physical {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Physical::Core => f.write_str("core"),
            Physical::Torus(axis) => axis.fmt(f),
            Physical::Dcn => f.write_str("dcn"),
        }
    }
}

impl Serialize for Physical {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// A part of a physical axis that belongs to a logical one.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Component {
    /// The physical axis.
    pub physical: Physical,
    /// Members along it.
    pub size: u32,
    /// Distance between members.
    pub stride: u32,
    /// Whether the members form a ring, or a line, or have ports of their own.
    pub wiring: Wiring,
}

/// A logical axis after placement.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LogicalAxis {
    /// Its size.
    pub size: u32,
    /// What it lies on, innermost first; empty for size 1 and for [`evaluate`]d orders that
    /// are no product of stretches of physical axes.
    pub components: Vec<Component>,
    /// Whether [`place`] put neighbours along the axis, last and first included, one stride
    /// of one component apart; always false for [`evaluate`]d orders.
    pub is_ring: bool,
}

/// Modelled time of one entry of the traffic.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct TrafficTime {
    /// What it is.
    pub traffic: Traffic,
    /// Seconds.
    pub seconds: f64,
}

/// A logical mesh on a topology.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Placement {
    /// The topology's name.
    pub topology: String,
    /// The logical mesh.
    pub shape: Vec<u32>,
    /// What each logical axis lies on.
    pub axes: Vec<LogicalAxis>,
    /// The rank (position in [`MultiSlice::devices`]) at each place of the mesh, last
    /// axis fastest.
    pub ranks: Vec<u32>,
    /// Modelled time of each entry of the traffic.
    pub times: Vec<TrafficTime>,
    /// Their sum: the score.
    pub seconds: f64,
}

impl Placement {
    /// libtpu's device ids in the order of [`Placement::ranks`].
    pub fn device_ids(&self, job: &MultiSlice) -> Vec<u32> {
        let devices = job.devices();
        self.ranks
            .iter()
            .map(|&rank| devices[rank as usize].id)
            .collect()
    }
}

/// Traffic for a mesh about which nothing is said, from the names of its axes: what a
/// transformer layer does along axes of that name. Other names get an all-reduce that
/// grows towards the last axis, as JAX's `mesh_utils` expects its axes in the order of increasing
/// network intensity.
///
/// Names (any case): `tp`, `model`, `tensor` all-reduce activations; `cp`, `sp`, `context`,
/// `sequence` all-gather; `ep`, `expert` all-to-all; `fsdp`, `dp_shard` all-gather and
/// reduce-scatter; `dp`, `data`, `dp_replicate`, `replica` all-reduce; `pp`, `stage` permute.
pub fn default_traffic(names: &[&str]) -> Vec<Traffic> {
    const MIB: f64 = 1048576.0;
    let mut all = Vec::new();
    for (axis, name) in names.iter().enumerate() {
        let mut add = |collective, mib: f64| {
            all.push(Traffic {
                axis,
                collective,
                bytes: mib * MIB,
            });
        };
        match name.to_ascii_lowercase().as_str() {
            "tp" | "model" | "tensor" => add(Collective::AllReduce, 256.0),
            "cp" | "sp" | "context" | "sequence" => add(Collective::AllGather, 128.0),
            "ep" | "expert" => add(Collective::AllToAll, 128.0),
            "fsdp" | "dp_shard" => {
                add(Collective::AllGather, 64.0);
                add(Collective::ReduceScatter, 64.0);
            }
            "dp" | "data" | "dp_replicate" | "replica" => add(Collective::AllReduce, 32.0),
            "pp" | "stage" => add(Collective::Permute, 8.0),
            _ => add(Collective::AllReduce, 16.0 * 4f64.powi(axis.min(8) as i32)),
        }
    }
    all
}

/// The fastest placement of a logical mesh.
///
/// `dcn_shape` says how many slices each logical axis spans (1 for most); without it
/// every factoring of the slices is tried. `shape` counts all devices, so its product is that of
/// the job.
///
/// # Errors
/// [`Error::MeshSize`] where the product differs from the devices; [`Error::Mesh`] for a
/// `dcn_shape` that does not fit or traffic on an axis that does not exist.
///
/// ```
/// use tpu_dist_mesh::{MultiSlice, assign};
/// let job: MultiSlice = "v5p:4x4x8".parse()?;
/// let traffic = assign::default_traffic(&["dp", "tp"]);
/// let placement = assign::place(&job, &[8, 16], None, &traffic)?;
/// // tp gets the 4x4 plane, where two rings work at once.
/// let plane = &placement.axes[1].components;
/// assert_eq!(plane.iter().map(|c| c.size).collect::<Vec<_>>(), [4, 4]);
/// # Ok::<(), tpu_dist_mesh::Error>(())
/// ```
pub fn place(
    job: &MultiSlice,
    shape: &[u32],
    dcn_shape: Option<&[u32]>,
    traffic: &[Traffic],
) -> Result<Placement, Error> {
    check(job, shape, traffic)?;
    if let Some(dcn) = dcn_shape {
        check_dcn(job, shape, dcn)?;
    }
    let model = Model::new(job, shape, traffic);
    let layout = Search::new(&model, dcn_shape).run();
    Ok(model.finish(&layout))
}

/// The score of any order of ranks: `ranks` holds positions in [`MultiSlice::devices`], last
/// axis of `shape` fastest.
///
/// Groups that are products of stretches of physical axes are costed as in [`place`]. Others
/// run rings in the order given, or send directly, and the busiest channel counts with all groups of
/// the axis at once.
///
/// # Errors
/// As [`place`]; [`Error::Mesh`] where `ranks` is not a permutation.
pub fn evaluate(
    job: &MultiSlice,
    shape: &[u32],
    ranks: &[u32],
    traffic: &[Traffic],
) -> Result<Placement, Error> {
    check(job, shape, traffic)?;
    let mut seen = vec![false; job.device_count() as usize];
    let is_permutation = ranks.len() == seen.len()
        && ranks.iter().all(|&rank| {
            seen.get_mut(rank as usize)
                .is_some_and(|seen| !std::mem::replace(seen, true))
        });
    if !is_permutation {
        return Err(Error::Mesh {
            argument: "ranks",
            reason: format!("expected each of 0 to {} once", job.device_count() - 1),
        });
    }
    let model = Model::new(job, shape, traffic);
    let devices = job.devices();
    let order: Vec<&Device> = ranks.iter().map(|&rank| &devices[rank as usize]).collect();
    let mut fabric = None;
    let mut axes = Vec::new();
    let mut times = vec![0.0; traffic.len()];
    for (axis, &size) in shape.iter().enumerate() {
        let components = model.detect(axis, &order);
        for (time, entry) in times
            .iter_mut()
            .zip(traffic)
            .filter(|(_, t)| t.axis == axis)
        {
            *time = match &components {
                Some(components) => {
                    let dimensions: Vec<_> = components.iter().map(|c| dimension(job, c)).collect();
                    cost::seconds(entry.collective, entry.bytes, &dimensions)
                }
                None => {
                    let fabric = fabric.get_or_insert_with(|| Fabric::new(job));
                    model.measure(fabric, axis, ranks, entry)?
                }
            };
        }
        let components = components.unwrap_or_default();
        axes.push(LogicalAxis {
            size,
            components,
            is_ring: false,
        });
    }
    let times: Vec<_> = traffic
        .iter()
        .zip(times)
        .map(|(&traffic, seconds)| TrafficTime { traffic, seconds })
        .collect();
    Ok(Placement {
        topology: job.to_string(),
        shape: shape.to_vec(),
        axes,
        ranks: ranks.to_vec(),
        seconds: times.iter().map(|time| time.seconds).sum(),
        times,
    })
}

fn check(job: &MultiSlice, shape: &[u32], traffic: &[Traffic]) -> Result<(), Error> {
    let product = shape
        .iter()
        .fold(1u64, |product, &size| product.saturating_mul(size.into()));
    if product != u64::from(job.device_count()) {
        return Err(Error::MeshSize {
            shape: shape.to_vec(),
            product,
            topology: job.to_string(),
            devices: job.device_count(),
        });
    }
    for entry in traffic {
        if entry.axis >= shape.len() {
            return Err(Error::Mesh {
                argument: "traffic",
                reason: format!("axis {} of a mesh with {} axes", entry.axis, shape.len()),
            });
        }
        if !(entry.bytes >= 0.0 && entry.bytes.is_finite()) {
            return Err(Error::Mesh {
                argument: "traffic",
                reason: format!("expected a number of bytes, got {}", entry.bytes),
            });
        }
    }
    Ok(())
}

fn check_dcn(job: &MultiSlice, shape: &[u32], dcn: &[u32]) -> Result<(), Error> {
    let fail = |reason: String| {
        Err(Error::Mesh {
            argument: "dcn_shape",
            reason,
        })
    };
    if dcn.len() != shape.len() {
        return fail(format!(
            "expected {} entries, one a mesh axis, got {dcn:?}",
            shape.len()
        ));
    }
    let product: u64 = dcn.iter().map(|&size| u64::from(size)).product();
    if product != u64::from(job.slices()) {
        return fail(format!(
            "{dcn:?} multiplies to {product}, {job} has {} slices",
            job.slices()
        ));
    }
    match (0..shape.len()).find(|&axis| !shape[axis].is_multiple_of(dcn[axis])) {
        None => Ok(()),
        Some(axis) => fail(format!(
            "{dcn:?} does not divide mesh shape {shape:?} in axis {axis}"
        )),
    }
}

/// A component as the cost model sees it.
pub fn dimension(job: &MultiSlice, component: &Component) -> Dimension {
    let slice = job.slice();
    let spec = slice.generation().spec();
    match component.physical {
        Physical::Core => Dimension::die(component.size, spec.die_bandwidth),
        Physical::Torus(_) => Dimension::ici(
            component.size,
            component.stride,
            component.wiring == Wiring::Ring,
            slice.devices_per_chip(),
            spec.link_bandwidth,
        ),
        Physical::Dcn => {
            let chips: u32 = slice.chips_per_host().iter().product();
            let devices = f64::from(chips * slice.devices_per_chip());
            Dimension::dcn(component.size, job.dcn_bandwidth_per_host() / devices)
        }
    }
}

/// The dimensions of one group of ranks (positions in [`MultiSlice::devices`]), with like groups
/// beside it assumed busy.
///
/// A group that is no product of stretches of physical axes is one ring in the order given, on the
/// links that its busiest channel leaves it.
///
/// # Errors
/// [`Error::Mesh`] for ranks that repeat or do not exist.
pub fn group(job: &MultiSlice, ranks: &[u32]) -> Result<Vec<Dimension>, Error> {
    let devices = job.devices();
    let mut seen = vec![false; devices.len()];
    for &rank in ranks {
        match seen.get_mut(rank as usize) {
            Some(seen) if !*seen => *seen = true,
            _ => {
                return Err(Error::Mesh {
                    argument: "ranks",
                    reason: format!("{rank} repeats or is not below {}", devices.len()),
                });
            }
        }
    }
    let model = Model::new(job, &[], &[]);
    let members: Vec<_> = ranks.iter().map(|&rank| &devices[rank as usize]).collect();
    if let Some(parts) = model.parts_of(members) {
        return Ok(model
            .components(&parts)
            .iter()
            .map(|c| dimension(job, c))
            .collect());
    }
    let fabric = Fabric::new(job);
    let mut busy = vec![0u32; fabric.channels()];
    let (mut startup, mut latency) = (0.0f64, 0.0f64);
    for (at, &from) in ranks.iter().enumerate() {
        let to = ranks[(at + 1) % ranks.len()];
        let route = fabric.route(from, to)?;
        startup = startup.max(fabric.startup(from, to));
        latency = latency.max(route.iter().map(|&c| fabric.channel(c).latency).sum());
        route.iter().for_each(|channel| busy[channel.index()] += 1);
    }
    let bandwidth = (0..busy.len())
        .filter(|&at| busy[at] > 0)
        .map(|at| fabric.channel(crate::ChannelId(at as u32)).bandwidth / f64::from(busy[at]))
        .fold(f64::INFINITY, f64::min);
    let bandwidth = bandwidth / f64::from(job.slice().devices_per_chip());
    let size = ranks.len() as u32;
    Ok(vec![Dimension {
        size,
        wiring: Wiring::Line,
        bandwidth,
        startup,
        hop: latency,
        shared: true,
    }])
}

/// The factors of one physical axis, innermost first: (logical axis, size above 1).
type Factors = Vec<(usize, u32)>;

/// A part of a physical axis: its size and stride.
type Part = (Physical, u32, u32);

/// What all candidates share.
struct Model<'a> {
    job: &'a MultiSlice,
    shape: &'a [u32],
    traffic: &'a [Traffic],
    /// Physical axes of extent above 1.
    physical: Vec<(Physical, u32)>,
}

impl<'a> Model<'a> {
    fn new(job: &'a MultiSlice, shape: &'a [u32], traffic: &'a [Traffic]) -> Self {
        let slice = job.slice();
        let torus = Axis::ALL
            .into_iter()
            .map(|axis| (Physical::Torus(axis), slice.shape().extents()[axis.index()]));
        let physical = std::iter::once((Physical::Dcn, job.slices()))
            .chain(std::iter::once((Physical::Core, slice.devices_per_chip())))
            .chain(torus)
            .filter(|&(_, extent)| extent > 1)
            .collect();
        Model {
            job,
            shape,
            traffic,
            physical,
        }
    }

    /// The wiring of a stretch of a torus axis: closed where it goes all the way round an axis that
    /// wraps. The shifted end of a twisted axis lands in the same group where the group
    /// holds all of the axes that it shifts along; `whole` tells.
    fn wiring(&self, axis: Axis, size: u32, stride: u32, whole: &[bool; 3]) -> Wiring {
        let torus = self.job.slice().torus();
        let extent = torus.shape().extents()[axis.index()];
        let shifts_out = torus
            .shift(axis)
            .iter()
            .zip(whole)
            .any(|(&shift, &whole)| shift != 0 && !whole);
        // Two members have one link to each other each way, closed or not.
        let closed = torus.wrap()[axis.index()] && size * stride == extent && !shifts_out;
        if closed && size > 2 {
            Wiring::Ring
        } else {
            Wiring::Line
        }
    }

    /// The components of a logical axis's parts.
    fn components(&self, parts: &[Part]) -> Vec<Component> {
        let extents = self.job.slice().shape().extents();
        let mut whole = extents.map(|extent| extent == 1);
        for &(physical, size, _) in parts {
            if let Physical::Torus(axis) = physical {
                whole[axis.index()] |= size == extents[axis.index()];
            }
        }
        parts
            .iter()
            .map(|&(physical, size, stride)| {
                let wiring = match physical {
                    Physical::Core => Wiring::Line,
                    Physical::Torus(axis) => self.wiring(axis, size, stride, &whole),
                    Physical::Dcn => Wiring::Switch,
                };
                Component {
                    physical,
                    size,
                    stride,
                    wiring,
                }
            })
            .collect()
    }

    fn seconds_of(&self, axis: usize, parts: &[Part]) -> f64 {
        let dimensions: Vec<_> = self
            .components(parts)
            .iter()
            .map(|component| dimension(self.job, component))
            .collect();
        self.traffic
            .iter()
            .filter(|entry| entry.axis == axis)
            .map(|entry| cost::seconds(entry.collective, entry.bytes, &dimensions))
            .sum()
    }

    /// The parts of a logical axis under a layout, with strides.
    fn parts(&self, layout: &[Factors], axis: usize) -> Vec<Part> {
        let mut parts = Vec::new();
        for (&(physical, _), factors) in self.physical.iter().zip(layout) {
            let mut stride = 1;
            for &(logical, size) in factors {
                if logical == axis {
                    parts.push((physical, size, stride));
                }
                stride *= size;
            }
        }
        parts
    }

    /// The mesh of a layout.
    fn finish(&self, layout: &[Factors]) -> Placement {
        let mut axes = Vec::new();
        // Per logical axis, for each place along it the coordinate it adds per physical axis.
        let mut places: Vec<Vec<Vec<(Physical, u32)>>> = Vec::new();
        for (axis, &size) in self.shape.iter().enumerate() {
            let parts = self.parts(layout, axis);
            let (dcn, local): (Vec<_>, Vec<_>) = parts
                .iter()
                .copied()
                .partition(|part| part.0 == Physical::Dcn);
            let extents: Vec<u32> = local.iter().map(|part| part.1).collect();
            let components = self.components(&parts);
            let lone = match &components[..] {
                [component] => component.wiring != Wiring::Line || component.size == 2,
                _ => components.is_empty(),
            };
            let cycle = if local.len() > 1 {
                ring::cycle(&extents)
            } else {
                None
            };
            let is_ring = dcn.is_empty() && (lone || cycle.is_some());
            let order = cycle.unwrap_or_else(|| ring::snake(&extents));
            let outer = dcn.iter().map(|part| part.1).product::<u32>();
            places.push(
                (0..outer)
                    .flat_map(|slice| order.iter().map(move |&cell| (slice, cell)))
                    .map(|(slice, mut cell)| {
                        let mut place = Vec::new();
                        for &(physical, size, stride) in &local {
                            place.push((physical, cell % size * stride));
                            cell /= size;
                        }
                        place.extend(dcn.iter().map(|part| (part.0, slice * part.2)));
                        place
                    })
                    .collect(),
            );
            axes.push(LogicalAxis {
                size,
                components,
                is_ring,
            });
        }

        let rank_of: HashMap<(u32, Coord, u32), u32> = self
            .job
            .devices()
            .iter()
            .zip(0..)
            .map(|(device, rank)| ((device.slice, device.coords, device.core), rank))
            .collect();
        let mut ranks = Vec::with_capacity(rank_of.len());
        let mut index = vec![0; self.shape.len()];
        for _ in 0..rank_of.len() {
            let (mut slice, mut coord, mut core) = (0, [0; 3], 0);
            for (places, &at) in places.iter().zip(&index) {
                for &(physical, offset) in &places[at] {
                    match physical {
                        Physical::Core => core += offset,
                        Physical::Torus(axis) => coord[axis.index()] += offset,
                        Physical::Dcn => slice += offset,
                    }
                }
            }
            ranks.push(rank_of[&(slice, Coord(coord), core)]);
            for axis in (0..index.len()).rev() {
                index[axis] += 1;
                if index[axis] < places[axis].len() {
                    break;
                }
                index[axis] = 0;
            }
        }
        let times: Vec<_> = self
            .traffic
            .iter()
            .map(|&traffic| {
                let dimensions: Vec<_> = axes[traffic.axis]
                    .components
                    .iter()
                    .map(|c| dimension(self.job, c))
                    .collect();
                let seconds = cost::seconds(traffic.collective, traffic.bytes, &dimensions);
                TrafficTime { traffic, seconds }
            })
            .collect();
        Placement {
            topology: self.job.to_string(),
            shape: self.shape.to_vec(),
            axes,
            ranks,
            seconds: times.iter().map(|time| time.seconds).sum(),
            times,
        }
    }

    /// The groups along a logical axis, as positions in the mesh.
    fn groups(&self, axis: usize) -> impl Iterator<Item = impl Iterator<Item = usize> + Clone> {
        let size = self.shape[axis] as usize;
        let inner: usize = self.shape[axis + 1..]
            .iter()
            .map(|&size| size as usize)
            .product();
        let total: usize = self.job.device_count() as usize;
        (0..total / size).map(move |group| {
            let first = group / inner * inner * size + group % inner;
            (0..size).map(move |at| first + at * inner)
        })
    }

    /// The components of a logical axis in an order of devices; `None` where its groups
    /// are no products of stretches, or differ.
    fn detect(&self, axis: usize, order: &[&Device]) -> Option<Vec<Component>> {
        let mut common: Option<Vec<Part>> = None;
        for group in self.groups(axis) {
            let parts = self.parts_of(group.map(|place| order[place]).collect())?;
            match &common {
                None => common = Some(parts),
                Some(common) if *common != parts => return None,
                Some(_) => {}
            }
        }
        common.map(|parts| self.components(&parts))
    }

    /// The parts whose product a group is, if it is one.
    fn parts_of(&self, group: Vec<&Device>) -> Option<Vec<Part>> {
        let mut parts = Vec::new();
        for &(physical, _) in &self.physical {
            let mut along: Vec<u32> = group
                .iter()
                .map(|device| match physical {
                    Physical::Core => device.core,
                    Physical::Torus(axis) => device.coords.get(axis),
                    Physical::Dcn => device.slice,
                })
                .collect();
            along.sort_unstable();
            along.dedup();
            if let [first, second, ..] = along[..] {
                // Slices are as near to each other whichever they are.
                let stride = if physical == Physical::Dcn {
                    1
                } else {
                    second - first
                };
                let even = along.windows(2).all(|pair| pair[1] - pair[0] == stride);
                if !even && physical != Physical::Dcn {
                    return None;
                }
                parts.push((physical, along.len() as u32, stride));
            }
        }
        // Distinct devices inside a product of their own number are all of it.
        let product: u32 = parts.iter().map(|part| part.1).product();
        (product as usize == group.len()).then_some(parts)
    }

    /// Seconds of traffic whose groups are no products: by what it puts on each channel.
    fn measure(
        &self,
        fabric: &Fabric,
        axis: usize,
        ranks: &[u32],
        entry: &Traffic,
    ) -> Result<f64, Error> {
        let size = f64::from(self.shape[axis]);
        let mut forward = vec![0.0f64; fabric.channels()];
        let mut backward = vec![0.0f64; fabric.channels()];
        let mut latency = 0.0f64;
        let everyone = entry.collective == Collective::AllToAll;
        for group in self.groups(axis) {
            let members: Vec<u32> = group.map(|place| ranks[place]).collect();
            for (at, &from) in members.iter().enumerate() {
                let next = members[(at + 1) % members.len()];
                let peers = if everyone {
                    &members[..]
                } else {
                    std::slice::from_ref(&next)
                };
                for &to in peers.iter().filter(|&&to| to != from) {
                    let mut time = fabric.startup(from, to);
                    for channel in fabric.route(from, to)? {
                        forward[channel.index()] += 1.0;
                        time += fabric.channel(channel).latency;
                    }
                    latency = latency.max(time);
                    if !everyone {
                        for channel in fabric.route(to, from)? {
                            backward[channel.index()] += 1.0;
                        }
                    }
                }
            }
        }
        let busiest = |messages: &dyn Fn(usize) -> f64| {
            (0..forward.len())
                .map(|at| {
                    let channel = crate::ChannelId(at as u32);
                    messages(at) / fabric.channel(channel).bandwidth
                })
                .fold(0.0, f64::max)
        };
        Ok(match entry.collective {
            Collective::AllToAll => latency + entry.bytes / size * busiest(&|at| forward[at]),
            Collective::Permute => latency + entry.bytes * busiest(&|at| forward[at]),
            collective => {
                // A ring in the order given, half of the data each way.
                let passes = if collective == Collective::AllReduce {
                    2.0
                } else {
                    1.0
                };
                let half = entry.bytes / 2.0 / size * busiest(&|at| forward[at] + backward[at]);
                passes * (size - 1.0) * (latency + half)
            }
        })
    }
}

/// Physical axes that a job can have: slices, devices of a chip, x, y, z.
const MAX_PHYSICAL: usize = 5;

/// How much of each physical axis a logical axis takes, with a bound on its time.
#[derive(Clone, Copy, Debug)]
struct Share {
    sizes: [u32; MAX_PHYSICAL],
    bound: f64,
}

/// Sizes and strides of a logical axis along each physical one.
type Stretch = [(u32, u32); MAX_PHYSICAL];

/// Exhaustive search with bounds: first how much each logical axis takes of each physical
/// one, then in which order. Both walk the promising ways first and leave those whose bound is no
/// better than what was found.
struct Search<'a> {
    model: &'a Model<'a>,
    /// For each logical axis of size above 1, heaviest first, its shares, fastest first.
    options: Vec<(usize, Vec<Share>)>,
    /// Least time of the options from each on.
    least: Vec<f64>,
    /// Seconds of a logical axis by what it takes.
    known: HashMap<(usize, Stretch), f64>,
    best: f64,
    layout: Vec<Factors>,
}

impl<'a> Search<'a> {
    fn new(model: &'a Model<'a>, dcn_shape: Option<&'a [u32]>) -> Search<'a> {
        let mut search = Search {
            model,
            options: Vec::new(),
            least: Vec::new(),
            known: HashMap::new(),
            best: f64::INFINITY,
            layout: vec![Factors::new(); model.physical.len()],
        };
        for (axis, &size) in model
            .shape
            .iter()
            .enumerate()
            .filter(|(_, size)| **size > 1)
        {
            let mut shares = Vec::new();
            search.shares(
                axis,
                size,
                dcn_shape,
                0,
                &mut [1; MAX_PHYSICAL],
                &mut shares,
            );
            let parts = |share: &Share| share.sizes.iter().filter(|&&size| size > 1).count();
            shares.sort_by(|a, b| a.bound.total_cmp(&b.bound).then(parts(a).cmp(&parts(b))));
            search.options.push((axis, shares));
        }
        let first = |shares: &[Share]| shares.first().map_or(f64::INFINITY, |share| share.bound);
        search
            .options
            .sort_by(|a, b| first(&b.1).total_cmp(&first(&a.1)));
        search.least = vec![0.0; search.options.len() + 1];
        for at in (0..search.options.len()).rev() {
            search.least[at] = search.least[at + 1] + first(&search.options[at].1);
        }
        search
    }

    /// All ways to take `left` of the physical axes from `at` on.
    fn shares(
        &mut self,
        axis: usize,
        left: u32,
        dcn_shape: Option<&[u32]>,
        at: usize,
        sizes: &mut [u32; MAX_PHYSICAL],
        shares: &mut Vec<Share>,
    ) {
        let Some(&(physical, extent)) = self.model.physical.get(at) else {
            if left == 1 {
                // No order is faster than every part being innermost.
                let bound = self.seconds(axis, sizes.map(|size| (size, 1)));
                shares.push(Share {
                    sizes: *sizes,
                    bound,
                });
            }
            return;
        };
        let given = match (physical, dcn_shape) {
            (Physical::Dcn, Some(dcn)) => Some(dcn[axis]),
            _ => None,
        };
        for size in 1..=extent.min(left) {
            if extent.is_multiple_of(size)
                && left.is_multiple_of(size)
                && given.is_none_or(|given| given == size)
            {
                sizes[at] = size;
                self.shares(axis, left / size, dcn_shape, at + 1, sizes, shares);
            }
        }
        sizes[at] = 1;
    }

    fn seconds(&mut self, axis: usize, stretch: Stretch) -> f64 {
        let model = self.model;
        *self.known.entry((axis, stretch)).or_insert_with(|| {
            let parts: Vec<Part> = model
                .physical
                .iter()
                .zip(stretch)
                .filter(|(_, (size, _))| *size > 1)
                .map(|(&(physical, _), (size, stride))| (physical, size, stride))
                .collect();
            model.seconds_of(axis, &parts)
        })
    }

    fn run(mut self) -> Vec<Factors> {
        let mut left = [1; MAX_PHYSICAL];
        for (left, &(_, extent)) in left.iter_mut().zip(&self.model.physical) {
            *left = extent;
        }
        self.split(0, 0.0, left, &mut Vec::new());
        self.layout
    }

    /// Gives the logical axes from `at` on their shares of what is left.
    fn split(&mut self, at: usize, bound: f64, left: [u32; MAX_PHYSICAL], chosen: &mut Vec<Share>) {
        if at == self.options.len() {
            let stretches: Vec<Stretch> = chosen
                .iter()
                .map(|share| share.sizes.map(|size| (size, 1)))
                .collect();
            let mut order = Order {
                layout: vec![Factors::new(); self.model.physical.len()],
                times: chosen.iter().map(|share| share.bound).collect(),
                stretches,
            };
            self.order(0, 1, &mut order);
            return;
        }
        for index in 0..self.options[at].1.len() {
            let share = self.options[at].1[index];
            if bound + share.bound + self.least[at + 1] >= self.best {
                break;
            }
            let mut rest = left;
            let fits = rest.iter_mut().zip(share.sizes).all(|(rest, size)| {
                let fits = rest.is_multiple_of(size);
                *rest /= size;
                fits
            });
            if fits {
                chosen.push(share);
                self.split(at + 1, bound + share.bound, rest, chosen);
                chosen.pop();
            }
        }
    }

    /// Puts the parts of the physical axes from `at` on in order; those of axis `at` that have
    /// their place fill the `inner` chips of it.
    fn order(&mut self, at: usize, inner: u32, order: &mut Order) {
        if order.times.iter().sum::<f64>() >= self.best {
            return;
        }
        let Some(&(physical, extent)) = self.model.physical.get(at) else {
            self.best = order.times.iter().sum();
            self.layout.clone_from(&order.layout);
            return;
        };
        if inner == extent {
            self.order(at + 1, 1, order);
            return;
        }
        // Later logical axes go further in, so that of equal orders the one nearest to the
        // mesh's own is found first.
        let mut candidates: Vec<usize> = (0..self.options.len()).collect();
        candidates.sort_by_key(|&option| std::cmp::Reverse(self.options[option].0));
        let free: Vec<usize> = candidates
            .into_iter()
            .filter(|&option| {
                let axis = self.options[option].0;
                let size = order.stretches[option][at].0;
                size > 1 && order.layout[at].iter().all(|factor| factor.0 != axis)
            })
            .collect();
        for &next in &free {
            let axis = self.options[next].0;
            let size = order.stretches[next][at].0;
            let before = order.clone();
            order.layout[at].push((axis, size));
            // What is placed has its stride; the rest is at least beyond it.
            for &option in &free {
                let stride = if option == next { inner } else { inner * size };
                order.stretches[option][at].1 = stride;
                let stretch = order.stretches[option];
                order.times[option] = self.seconds(self.options[option].0, stretch);
            }
            self.order(at, inner * size, order);
            *order = before;
            // Ports and the two devices of a chip know no order.
            if !matches!(physical, Physical::Torus(_)) {
                break;
            }
        }
    }
}

/// An order in the making.
#[derive(Clone)]
struct Order {
    layout: Vec<Factors>,
    /// By option: sizes and strides, least possible ones where the place is open.
    stretches: Vec<Stretch>,
    /// By option: seconds, or a bound.
    times: Vec<f64>,
}
