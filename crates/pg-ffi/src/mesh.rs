//! `tpu_dist._C.mesh`: topologies, placements, launch plans and pictures for Python.

use std::fmt::Display;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use tpu_dist_collectives::algorithm::{Constants, Transport};
use tpu_dist_collectives::schedule::Request;
use tpu_dist_collectives::select::{MESSAGE_BYTES, Selector, Verdict};
use tpu_dist_collectives::{DType, Kind, ReduceKind, estimate};
use tpu_dist_mesh::{
    self as mesh, Coord, Generation, LinkGraph, MultiSlice, Slice,
    assign::{self, Traffic},
    cost,
    draw::Drawing,
    launch, parse, ring,
};

/// Adds the submodule to the parent.
pub(crate) fn register(parent: &Bound<'_, PyModule>) -> PyResult<()> {
    let module = PyModule::new(parent.py(), "mesh")?;
    module.add_class::<Topology>()?;
    module.add_class::<Placement>()?;
    module.add_function(wrap_pyfunction!(legal_topologies, &module)?)?;
    module.add_function(wrap_pyfunction!(default_traffic, &module)?)?;
    parent.add_submodule(&module)
}

fn value_error(error: impl Display) -> PyErr {
    PyValueError::new_err(error.to_string())
}

/// The variant of that name.
fn named<T: Copy>(
    argument: &str,
    name: &str,
    all: &[T],
    name_of: impl Fn(T) -> &'static str,
) -> PyResult<T> {
    let known = || all.iter().map(|&one| name_of(one)).collect::<Vec<_>>();
    let found = all.iter().copied().find(|&one| name_of(one) == name);
    found.ok_or_else(|| {
        let known = known().join(", ");
        PyValueError::new_err(format!("{argument}: expected one of {known}, got {name:?}"))
    })
}

/// (axis, collective, bytes)
type TrafficTuple = (usize, String, f64);
/// (id, x, y, z, core, process, slice)
type DeviceTuple = (u32, u32, u32, u32, u32, u32, u32);
/// (x, y, z)
type CoordTuple = (u32, u32, u32);

const fn coord_tuple(coord: Coord) -> CoordTuple {
    let [x, y, z] = coord.0;
    (x, y, z)
}

fn read_traffic(traffic: Vec<TrafficTuple>) -> PyResult<Vec<Traffic>> {
    traffic
        .into_iter()
        .map(|(axis, collective, bytes)| {
            let collective = collective.parse().map_err(value_error)?;
            Ok(Traffic {
                axis,
                collective,
                bytes,
            })
        })
        .collect()
}

/// One or more equal TPU slices.
#[pyclass(frozen, eq, hash, module = "tpu_dist._C.mesh")]
#[derive(PartialEq, Eq, Hash)]
struct Topology {
    job: MultiSlice,
}

impl Topology {
    fn links(
        &self,
        dead_links: Vec<([u32; 3], [u32; 3])>,
        dead_chips: Vec<[u32; 3]>,
    ) -> PyResult<LinkGraph> {
        let mut links = LinkGraph::new(self.job.slice());
        for (a, b) in dead_links {
            links.kill_link(Coord(a), Coord(b)).map_err(value_error)?;
        }
        for chip in dead_chips {
            links.kill_chip(Coord(chip)).map_err(value_error)?;
        }
        Ok(links)
    }
}

#[pymethods]
impl Topology {
    /// Reads a name, as `v5e:4x4`, `v5p-128`, `2*v5e:16x16`. Keywords change what the generation
    /// has by default: slices, axes that close to rings, chips of a host along x, y and z, and
    /// devices a chip (v4 shows 1 or 2).
    #[new]
    #[pyo3(signature = (name, *, num_slices=None, wrap=None, chips_per_host=None, devices_per_chip=None))]
    fn new(
        name: &str,
        num_slices: Option<u32>,
        wrap: Option<[bool; 3]>,
        chips_per_host: Option<[u32; 3]>,
        devices_per_chip: Option<u32>,
    ) -> PyResult<Topology> {
        let job: MultiSlice = name.parse().map_err(value_error)?;
        let mut slice = job.slice().clone();
        if let Some(wrap) = wrap {
            slice = slice.with_wrap(wrap).map_err(value_error)?;
        }
        if let Some(bounds) = chips_per_host {
            slice = slice.with_chips_per_host(bounds).map_err(value_error)?;
        }
        if let Some(devices) = devices_per_chip {
            slice = slice.with_devices_per_chip(devices).map_err(value_error)?;
        }
        let count = num_slices.unwrap_or_else(|| job.slices());
        Ok(Topology {
            job: MultiSlice::new(slice, count).map_err(value_error)?,
        })
    }

    /// Reads the labels of GKE (`tpu-v5p-slice`, `2x2x1`) and Ray (`TPU-V6E`, `4x4`).
    #[staticmethod]
    #[pyo3(signature = (accelerator, topology, num_slices=1))]
    fn from_labels(accelerator: &str, topology: &str, num_slices: u32) -> PyResult<Topology> {
        let slice = parse::labels(accelerator, topology).map_err(value_error)?;
        Ok(Topology {
            job: MultiSlice::new(slice, num_slices).map_err(value_error)?,
        })
    }

    fn __str__(&self) -> String {
        self.job.to_string()
    }

    fn __repr__(&self) -> String {
        format!("Topology({:?})", self.job.to_string())
    }

    /// The short name, as `v5p:4x4x8_twisted`.
    #[getter]
    fn name(&self) -> String {
        self.job.to_string()
    }

    /// The name that libtpu accepts for a slice.
    #[getter]
    fn libtpu_name(&self) -> String {
        self.job.slice().libtpu_name()
    }

    /// The generation, as `v5p`.
    #[getter]
    fn generation(&self) -> &'static str {
        self.job.slice().generation().spec().name
    }

    /// The device kind that libtpu and JAX report.
    #[getter]
    fn kind(&self) -> &'static str {
        self.job.slice().generation().spec().kind
    }

    /// The cloud accelerator type, as `v5p-256`.
    #[getter]
    fn accelerator_type(&self) -> String {
        self.job.slice().accelerator_type()
    }

    /// Chips of a slice along x, y and z.
    #[getter]
    fn shape(&self) -> CoordTuple {
        coord_tuple(Coord(self.job.slice().shape().extents()))
    }

    /// Whether x, y and z close to rings.
    #[getter]
    fn wrap(&self) -> (bool, bool, bool) {
        let [x, y, z] = self.job.slice().wrap();
        (x, y, z)
    }

    /// Whether the closing links are shifted.
    #[getter]
    fn twisted(&self) -> bool {
        self.job.slice().is_twisted()
    }

    /// Number of slices.
    #[getter]
    fn num_slices(&self) -> u32 {
        self.job.slices()
    }

    /// Chips of a slice.
    #[getter]
    fn chips(&self) -> u32 {
        self.job.slice().chips()
    }

    /// Hosts of all slices.
    #[getter]
    fn hosts(&self) -> u32 {
        self.job.hosts()
    }

    /// Devices of all slices.
    #[getter]
    fn device_count(&self) -> u32 {
        self.job.device_count()
    }

    /// Devices of a chip.
    #[getter]
    fn devices_per_chip(&self) -> u32 {
        self.job.slice().devices_per_chip()
    }

    /// Hosts of a slice along x, y and z.
    #[getter]
    fn host_bounds(&self) -> CoordTuple {
        coord_tuple(Coord(self.job.slice().host_bounds()))
    }

    /// Chips of a host along x, y and z.
    #[getter]
    fn chips_per_host(&self) -> CoordTuple {
        coord_tuple(Coord(self.job.slice().chips_per_host()))
    }

    /// Bytes a second of one ICI link, one way.
    #[getter]
    fn link_bandwidth(&self) -> f64 {
        self.job.slice().generation().spec().link_bandwidth
    }

    /// Bytes of memory of one device.
    #[getter]
    fn memory_per_device(&self) -> u64 {
        let slice = self.job.slice();
        slice.generation().spec().hbm_bytes / u64::from(slice.devices_per_chip())
    }

    /// Bytes a second of a host's data-center network, one way.
    #[getter]
    fn dcn_bandwidth_per_host(&self) -> f64 {
        self.job.dcn_bandwidth_per_host()
    }

    /// (id, x, y, z, core, process, slice) of every device in libtpu's list order: by process,
    /// then by id. The position is the rank.
    fn devices(&self) -> Vec<DeviceTuple> {
        self.job
            .devices()
            .iter()
            .map(|d| {
                let [x, y, z] = d.coords.0;
                (d.id, x, y, z, d.core, d.process, d.slice)
            })
            .collect()
    }

    /// Bytes a second between the halves of a slice, one way, over the narrowest cut.
    #[pyo3(signature = (*, dead_links=vec![], dead_chips=vec![]))]
    fn bisection_bandwidth(
        &self,
        dead_links: Vec<([u32; 3], [u32; 3])>,
        dead_chips: Vec<[u32; 3]>,
    ) -> PyResult<f64> {
        Ok(self.links(dead_links, dead_chips)?.bisection_bandwidth())
    }

    /// The chips on a shortest route, both ends included, around what is dead.
    ///
    /// Raises ValueError where faults separate the ends, naming the chips cut off.
    #[pyo3(signature = (start, end, *, dead_links=vec![], dead_chips=vec![]))]
    fn route(
        &self,
        start: [u32; 3],
        end: [u32; 3],
        dead_links: Vec<([u32; 3], [u32; 3])>,
        dead_chips: Vec<[u32; 3]>,
    ) -> PyResult<Vec<CoordTuple>> {
        let links = self.links(dead_links, dead_chips)?;
        let route = links.route(Coord(start), Coord(end)).map_err(value_error)?;
        let shape = self.job.slice().shape();
        let ends = route
            .into_iter()
            .map(|link| coord_tuple(shape.coord(links.link(link).to)));
        Ok(std::iter::once(coord_tuple(Coord(start)))
            .chain(ends)
            .collect())
    }

    /// Rings of neighbours over all chips of a slice that share no link: as many as the torus
    /// has dimensions where all axes close, otherwise one. Rings over dead links are left out; around
    /// dead hosts of 2x2 chips there is one.
    ///
    /// Raises ValueError where there is no ring, saying why.
    #[pyo3(signature = (*, dead_links=vec![], dead_chips=vec![]))]
    fn rings(
        &self,
        dead_links: Vec<([u32; 3], [u32; 3])>,
        dead_chips: Vec<[u32; 3]>,
    ) -> PyResult<Vec<Vec<CoordTuple>>> {
        let links = self.links(dead_links, dead_chips)?;
        let shape = self.job.slice().shape();
        let rings = ring::rings(&links).map_err(value_error)?;
        let coords = |ring: Vec<mesh::ChipId>| {
            ring.into_iter()
                .map(|chip| coord_tuple(shape.coord(chip)))
                .collect()
        };
        Ok(rings.into_iter().map(coords).collect())
    }

    /// The fastest placement of a mesh for traffic of (axis, collective, bytes).
    #[pyo3(signature = (shape, traffic, dcn_shape=None))]
    fn place(
        &self,
        py: Python<'_>,
        shape: Vec<u32>,
        traffic: Vec<TrafficTuple>,
        dcn_shape: Option<Vec<u32>>,
    ) -> PyResult<Placement> {
        let traffic = read_traffic(traffic)?;
        let placement = py
            .detach(|| assign::place(&self.job, &shape, dcn_shape.as_deref(), &traffic))
            .map_err(value_error)?;
        Ok(Placement {
            job: self.job.clone(),
            placement,
        })
    }

    /// The same score for an order of ranks from elsewhere.
    fn evaluate(
        &self,
        py: Python<'_>,
        shape: Vec<u32>,
        ranks: Vec<u32>,
        traffic: Vec<TrafficTuple>,
    ) -> PyResult<Placement> {
        let traffic = read_traffic(traffic)?;
        let placement = py
            .detach(|| assign::evaluate(&self.job, &shape, &ranks, &traffic))
            .map_err(value_error)?;
        Ok(Placement {
            job: self.job.clone(),
            placement,
        })
    }

    /// (algorithm, seconds) of all algorithms that do a collective on a group, fastest first.
    #[pyo3(signature = (ranks, collective, nbytes))]
    fn costs(
        &self,
        ranks: Vec<u32>,
        collective: &str,
        nbytes: f64,
    ) -> PyResult<Vec<(&'static str, f64)>> {
        let collective = collective.parse().map_err(value_error)?;
        let dimensions = assign::group(&self.job, &ranks).map_err(value_error)?;
        let ranking = cost::ranking(collective, nbytes, &dimensions);
        Ok(ranking
            .into_iter()
            .map(|(algorithm, prediction)| (algorithm.name(), prediction.seconds()))
            .collect())
    }

    /// Which algorithm a group of chips would take for a collective, and why: the candidates,
    /// fastest first, each with its seconds, those without bytes, and whether they are a formula that
    /// holds or an estimate.
    #[pyo3(signature = (ranks, collective, nbytes))]
    fn explain_chips<'py>(
        &self,
        py: Python<'py>,
        ranks: Vec<u32>,
        collective: &str,
        nbytes: f64,
    ) -> PyResult<Bound<'py, PyDict>> {
        let collective: cost::Collective = collective.parse().map_err(value_error)?;
        let dimensions = assign::group(&self.job, &ranks).map_err(value_error)?;
        let candidates = PyList::empty(py);
        let mut contenders = Vec::new();
        for (algorithm, prediction) in cost::ranking(collective, nbytes, &dimensions) {
            let latency = algorithm.seconds(collective, 0.0, &dimensions);
            let contender = cost::Contender {
                name: algorithm.name(),
                seconds: prediction.seconds(),
                latency: latency.unwrap_or(0.0),
            };
            contenders.push(contender);
            let entry = PyDict::new(py);
            entry.set_item("algorithm", contender.name)?;
            entry.set_item("seconds", contender.seconds)?;
            entry.set_item("latency", contender.latency)?;
            entry.set_item("formula", prediction.formula().is_some())?;
            candidates.append(entry)?;
        }
        let why = contenders
            .first()
            .map(|best| cost::why(best, contenders.get(1)));
        let answer = PyDict::new(py);
        answer.set_item("chosen", contenders.first().map(|best| best.name))?;
        answer.set_item("why", why.unwrap_or_default())?;
        answer.set_item("candidates", candidates)?;
        Ok(answer)
    }

    /// Which algorithm the host engine runs for a collective of a group with one process a device,
    /// and why: whether its ranks share memory, and the candidates, usable ones by time, each with
    /// its seconds and whether a formula gave them, or None and what rules it out.
    #[pyo3(signature = (ranks, collective, nbytes, *, op="SUM", dtype="float32", algorithm=None))]
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    fn explain_hosts<'py>(
        &self,
        py: Python<'py>,
        ranks: Vec<u32>,
        collective: &str,
        nbytes: u64,
        op: &str,
        dtype: &str,
        algorithm: Option<&str>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let kind = named("collective", collective, Kind::ALL, |kind| kind.name())?;
        let op = named("op", op, ReduceKind::ALL, |op| op.name())?;
        let dtype = named("dtype", dtype, DType::ALL, |dtype| dtype.name())?;
        let transport = estimate::transport(&self.job, &ranks).map_err(value_error)?;
        let size = dtype.size() as u32;
        let request = Request::of_bytes(kind, ranks.len() as u32, nbytes, size, MESSAGE_BYTES);
        let model = Constants::DEFAULT;
        let selector = Selector::on_hosts(&model, transport).force(algorithm);
        let choice = selector.select(&request, Some((op, dtype)));
        let choice = choice.map_err(value_error)?;
        let candidates = PyList::empty(py);
        for candidate in &choice.explanation.candidates {
            let entry = PyDict::new(py);
            entry.set_item("algorithm", candidate.name)?;
            let (seconds, formula, excluded) = match candidate.verdict {
                Verdict::Predicted(prediction) => {
                    let formula = prediction.formula().is_some();
                    (Some(prediction.seconds()), formula, None)
                }
                Verdict::RoundsOften => (None, false, Some("rounds partial sums")),
                _ => (None, false, Some("not for this")),
            };
            entry.set_item("seconds", seconds)?;
            entry.set_item("formula", formula)?;
            entry.set_item("excluded", excluded)?;
            candidates.append(entry)?;
        }
        let answer = PyDict::new(py);
        answer.set_item("chosen", choice.explanation.chosen)?;
        answer.set_item("forced", choice.explanation.forced)?;
        answer.set_item("shared_memory", transport == Transport::Local)?;
        answer.set_item("why", selector.why(&request, &choice))?;
        answer.set_item("candidates", candidates)?;
        Ok(answer)
    }

    /// The dimensions of a group: how many members each has, how they are joined, bytes a
    /// second of a wire and way, seconds to start a message and to the next member.
    fn group<'py>(&self, py: Python<'py>, ranks: Vec<u32>) -> PyResult<Bound<'py, PyList>> {
        let list = PyList::empty(py);
        for dimension in assign::group(&self.job, &ranks).map_err(value_error)? {
            let entry = PyDict::new(py);
            entry.set_item("size", dimension.size)?;
            entry.set_item("wiring", wiring(dimension.wiring))?;
            entry.set_item("bandwidth", dimension.bandwidth)?;
            entry.set_item("startup", dimension.startup)?;
            entry.set_item("hop", dimension.hop)?;
            list.append(entry)?;
        }
        Ok(list)
    }

    /// The processes to start on hosts (addresses, slice by slice, in the order of their worker
    /// ids): ranks, visible chips, and the environment that libtpu reads.
    #[pyo3(signature = (hosts, *, processes="per_chip", port=None, megascale_port=None))]
    fn launch<'py>(
        &self,
        py: Python<'py>,
        hosts: Vec<String>,
        processes: &str,
        port: Option<u16>,
        megascale_port: Option<u16>,
    ) -> PyResult<Bound<'py, PyList>> {
        let mut options = launch::Options::default();
        options.processes = match processes {
            "per_chip" => launch::Processes::PerChip,
            "per_host" => launch::Processes::PerHost,
            other => {
                let words = format!("processes: expected per_chip or per_host, got {other:?}");
                return Err(PyValueError::new_err(words));
            }
        };
        options.port = port.unwrap_or(options.port);
        options.megascale_port = megascale_port.unwrap_or(options.megascale_port);
        let hosts: Vec<&str> = hosts.iter().map(String::as_str).collect();
        let list = PyList::empty(py);
        for process in launch::plan(&self.job, &hosts, &options).map_err(value_error)? {
            let entry = PyDict::new(py);
            entry.set_item("index", process.index)?;
            entry.set_item("ranks", process.ranks.collect::<Vec<_>>())?;
            entry.set_item("slice", process.slice)?;
            entry.set_item("host", process.host)?;
            entry.set_item("local_index", process.local_index)?;
            entry.set_item("visible_chips", process.visible_chips)?;
            let coords: Vec<_> = process.coords.into_iter().map(coord_tuple).collect();
            entry.set_item("coords", coords)?;
            let environment = PyDict::new(py);
            for (name, value) in process.environment {
                environment.set_item(name, value)?;
            }
            entry.set_item("environment", environment)?;
            list.append(entry)?;
        }
        Ok(list)
    }

    /// The slice as text.
    fn text(&self) -> String {
        Drawing::slice(&self.job).text()
    }

    /// The slice as SVG.
    fn svg(&self) -> String {
        Drawing::slice(&self.job).svg()
    }
}

/// A logical mesh on a topology.
#[pyclass(frozen, module = "tpu_dist._C.mesh")]
struct Placement {
    job: MultiSlice,
    placement: assign::Placement,
}

#[pymethods]
impl Placement {
    fn __repr__(&self) -> String {
        let seconds = mesh::draw::duration(self.placement.seconds);
        format!(
            "Placement({:?} on {:?}: {seconds})",
            self.placement.shape, self.placement.topology
        )
    }

    /// Size of each axis.
    #[getter]
    fn shape(&self) -> Vec<u32> {
        self.placement.shape.clone()
    }

    /// The rank at each place of the mesh, last axis fastest.
    #[getter]
    fn ranks(&self) -> Vec<u32> {
        self.placement.ranks.clone()
    }

    /// libtpu's device ids in the same order.
    #[getter]
    fn device_ids(&self) -> Vec<u32> {
        self.placement.device_ids(&self.job)
    }

    /// Modelled seconds of all traffic, one after the other.
    #[getter]
    fn seconds(&self) -> f64 {
        self.placement.seconds
    }

    /// For each axis its size, the stretches of physical axes it lies on, innermost first, and
    /// whether neighbours along it, last and first included, are physical neighbours.
    #[getter]
    fn axes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let axes = PyList::empty(py);
        for axis in &self.placement.axes {
            let components = PyList::empty(py);
            for component in &axis.components {
                let entry = PyDict::new(py);
                entry.set_item("physical", component.physical.to_string())?;
                entry.set_item("size", component.size)?;
                entry.set_item("stride", component.stride)?;
                entry.set_item("wiring", wiring(component.wiring))?;
                components.append(entry)?;
            }
            let entry = PyDict::new(py);
            entry.set_item("size", axis.size)?;
            entry.set_item("is_ring", axis.is_ring)?;
            entry.set_item("components", components)?;
            axes.append(entry)?;
        }
        Ok(axes)
    }

    /// (axis, collective, bytes, seconds) of each entry of the traffic.
    #[getter]
    fn times(&self) -> Vec<(usize, &'static str, f64, f64)> {
        let row = |time: &assign::TrafficTime| {
            let Traffic {
                axis,
                collective,
                bytes,
            } = time.traffic;
            (axis, collective.name(), bytes, time.seconds)
        };
        self.placement.times.iter().map(row).collect()
    }

    /// (algorithm, seconds) of all algorithms that do a collective along an axis, fastest first.
    #[pyo3(signature = (axis, collective, nbytes))]
    fn costs(
        &self,
        axis: usize,
        collective: &str,
        nbytes: f64,
    ) -> PyResult<Vec<(&'static str, f64)>> {
        let collective = collective.parse().map_err(value_error)?;
        let axis = self.placement.axes.get(axis).ok_or_else(|| {
            let axes = self.placement.axes.len();
            PyValueError::new_err(format!("axis: expected less than {axes}, got {axis}"))
        })?;
        let dimensions: Vec<_> = axis
            .components
            .iter()
            .map(|part| assign::dimension(&self.job, part))
            .collect();
        let ranking = cost::ranking(collective, nbytes, &dimensions);
        Ok(ranking
            .into_iter()
            .map(|(algorithm, prediction)| (algorithm.name(), prediction.seconds()))
            .collect())
    }

    /// The mesh on its slice as text.
    fn text(&self, names: Vec<String>) -> String {
        Drawing::mesh(&self.job, &self.placement, &names).text()
    }

    /// The mesh on its slice as SVG, axes coloured.
    fn svg(&self, names: Vec<String>) -> String {
        Drawing::mesh(&self.job, &self.placement, &names).svg()
    }
}

const fn wiring(wiring: cost::Wiring) -> &'static str {
    match wiring {
        cost::Wiring::Ring => "ring",
        cost::Wiring::Line => "line",
        cost::Wiring::Switch => "switch",
    }
}

/// The names of all slices that a generation is built in.
#[pyfunction]
fn legal_topologies(generation: &str) -> PyResult<Vec<String>> {
    let generation: Generation = generation.parse().map_err(value_error)?;
    generation
        .legal_slices()
        .into_iter()
        .map(|legal| {
            let slice =
                Slice::new(generation, legal.shape).and_then(|s| s.with_twist(legal.twisted));
            Ok(slice.map_err(value_error)?.name())
        })
        .collect()
}

/// What axes of such names usually carry: (axis, collective, bytes).
#[pyfunction]
fn default_traffic(names: Vec<String>) -> Vec<(usize, &'static str, f64)> {
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    assign::default_traffic(&names)
        .into_iter()
        .map(|entry| (entry.axis, entry.collective.name(), entry.bytes))
        .collect()
}
