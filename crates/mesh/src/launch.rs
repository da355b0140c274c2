//! What to start where: ranks, chips and the environment that libtpu reads.
//!
//! Plain data; nothing here reads or sets an environment.

use std::ops::Range;

use serde::Serialize;

use crate::{Coord, Error, MultiSlice};

/// How a host's chips are shared out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Processes {
    /// One process a host sees all of its chips, as JAX has it.
    PerHost,
    /// One process a chip, as PyTorch has it.
    PerChip,
}

/// Ports and names that the environment needs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Options {
    /// How a host's chips are shared out.
    pub processes: Processes,
    /// First port of a host's processes for libtpu's slice builder.
    pub port: u16,
    /// Port of the coordinator between slices.
    pub megascale_port: u16,
}

impl Default for Options {
    /// One process a chip, ports from 8471 (libtpu's default, which Ray uses), and 8081 as in Ray
    /// between slices.
    fn default() -> Options {
        Options {
            processes: Processes::PerChip,
            port: 8471,
            megascale_port: 8081,
        }
    }
}

/// One process to start.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Process {
    /// Index of the process in the job: host by host, chip by chip.
    pub index: u32,
    /// The ranks of its devices: positions in [`MultiSlice::devices`].
    pub ranks: Range<u32>,
    /// Its slice.
    pub slice: u32,
    /// Its host among all hosts.
    pub host: u32,
    /// Its number on the host.
    pub local_index: u32,
    /// The chips it sees, as the host numbers them.
    pub visible_chips: Vec<u32>,
    /// Where its chips are.
    pub coords: Vec<Coord>,
    /// What libtpu needs to find in the environment, in alphabetical order.
    pub environment: Vec<(&'static str, String)>,
}

/// All processes of a job in the order of their index.
///
/// `hosts` are addresses without port, slice by slice and in each in the order of libtpu's worker
/// ids; IPv6 addresses with or without brackets. The bounds are set under the current names
/// (`TPU_PROCESS_BOUNDS`) and those that TorchTPU and Ray set (`TPU_HOST_BOUNDS`), so that
/// inherited values cannot disagree.
///
/// # Errors
/// [`Error::Launch`] for a wrong number of hosts, a repeated or empty one, or ports that
/// overflow.
///
/// ```
/// use tpu_dist_mesh::{MultiSlice, launch};
/// let job: MultiSlice = "v5p:2x2x2".parse()?;
/// let hosts = ["10.0.0.1", "10.0.0.2"];
/// let processes = launch::plan(&job, &hosts, &launch::Options::default())?;
/// assert_eq!((processes[5].host, processes[5].ranks.start), (1, 5));
/// let bounds = ("TPU_PROCESS_BOUNDS", "2,2,2".to_owned());
/// assert!(processes[5].environment.contains(&bounds));
/// # Ok::<(), tpu_dist_mesh::Error>(())
/// ```
pub fn plan(job: &MultiSlice, hosts: &[&str], options: &Options) -> Result<Vec<Process>, Error> {
    let hosts = check_hosts(job, hosts)?;
    let slice = job.slice();
    let chips: u32 = slice.chips_per_host().iter().product();
    let (per_host, chips_each) = match options.processes {
        Processes::PerHost => (1, chips),
        Processes::PerChip => (chips, 1),
    };
    if u32::from(options.port) + per_host > u32::from(u16::MAX) + 1 {
        return Err(Error::Launch {
            argument: "port",
            reason: format!(
                "{} leaves no room for {per_host} processes a host",
                options.port
            ),
        });
    }
    let ports = || (0..per_host).map(|local| u32::from(options.port) + local);
    let bounds = |bounds: [u32; 3]| bounds.map(|bound| bound.to_string()).join(",");
    let (process_bounds, chip_bounds) = match options.processes {
        Processes::PerHost => (slice.host_bounds(), slice.chips_per_host()),
        Processes::PerChip => (slice.shape().extents(), [1; 3]),
    };

    let mut processes = Vec::new();
    for host in 0..job.hosts() {
        let in_slice = host % slice.hosts();
        let slice_index = host / slice.hosts();
        let first = (slice_index * slice.hosts()) as usize;
        let workers = &hosts[first..first + slice.hosts() as usize];
        let addresses: Vec<_> = workers
            .iter()
            .flat_map(|worker| ports().map(move |port| format!("{worker}:{port}")))
            .collect();
        let coords: Vec<_> = slice.chips_of_host(in_slice).collect();
        for local in 0..per_host {
            let index = host * per_host + local;
            let devices = chips_each * slice.devices_per_chip();
            let visible: Vec<u32> = (local * chips_each..(local + 1) * chips_each).collect();
            let task = in_slice * per_host + local;
            let names: Vec<_> = visible.iter().map(u32::to_string).collect();
            let mut environment = vec![
                ("CLOUD_TPU_TASK_ID", task.to_string()),
                ("TPU_ACCELERATOR_TYPE", slice.accelerator_type()),
                ("TPU_CHIPS_PER_HOST_BOUNDS", bounds(chip_bounds)),
                ("TPU_CHIPS_PER_PROCESS_BOUNDS", bounds(chip_bounds)),
                ("TPU_HOST_BOUNDS", bounds(process_bounds)),
                ("TPU_PROCESS_ADDRESSES", addresses.join(",")),
                ("TPU_PROCESS_BOUNDS", bounds(process_bounds)),
                (
                    "TPU_PROCESS_PORT",
                    (u32::from(options.port) + local).to_string(),
                ),
                ("TPU_TOPOLOGY", slice.shape().to_string()),
                (
                    "TPU_TOPOLOGY_WRAP",
                    slice.wrap().map(|wrap| wrap.to_string()).join(","),
                ),
                ("TPU_VISIBLE_CHIPS", names.join(",")),
                ("TPU_WORKER_HOSTNAMES", workers.join(",")),
                ("TPU_WORKER_ID", in_slice.to_string()),
            ];
            if job.slices() > 1 {
                environment.extend([
                    (
                        "MEGASCALE_COORDINATOR_ADDRESS",
                        format!("{}:{}", hosts[0], options.megascale_port),
                    ),
                    ("MEGASCALE_NUM_SLICES", job.slices().to_string()),
                    ("MEGASCALE_PORT", options.megascale_port.to_string()),
                    ("MEGASCALE_SLICE_ID", slice_index.to_string()),
                ]);
            }
            environment.sort_unstable();
            let chips = visible.iter().map(|&chip| coords[chip as usize]).collect();
            processes.push(Process {
                index,
                ranks: index * devices..(index + 1) * devices,
                slice: slice_index,
                host,
                local_index: local,
                visible_chips: visible,
                coords: chips,
                environment,
            });
        }
    }
    Ok(processes)
}

/// Hosts as libtpu wants them, IPv6 addresses in brackets.
fn check_hosts(job: &MultiSlice, hosts: &[&str]) -> Result<Vec<String>, Error> {
    let fail = |reason: String| Error::Launch {
        argument: "hosts",
        reason,
    };
    if hosts.len() != job.hosts() as usize {
        return Err(fail(format!(
            "{job} has {} hosts, got {}",
            job.hosts(),
            hosts.len()
        )));
    }
    let mut named = Vec::with_capacity(hosts.len());
    for host in hosts {
        let bare = host.trim();
        let bare = bare
            .strip_prefix('[')
            .and_then(|b| b.strip_suffix(']'))
            .unwrap_or(bare);
        let name = match bare.matches(':').count() {
            0 => bare.to_owned(),
            1 => {
                return Err(fail(format!(
                    "expected an address without port, got {host:?}"
                )));
            }
            _ => format!("[{bare}]"),
        };
        if name.is_empty() || name.contains([',', ' ']) {
            return Err(fail(format!("expected one address, got {host:?}")));
        }
        if named.contains(&name) {
            return Err(fail(format!("{host:?} is there twice")));
        }
        named.push(name);
    }
    Ok(named)
}
