//! Everything that data crosses between two ranks, as numbered channels: what a simulator
//! plays on.

use serde::Serialize;

use crate::{ChipId, Device, Error, LinkGraph, LinkId, MultiSlice};

/// Seconds to start a message over ICI, and seconds for each link that it crosses.
///
/// The scaling book gives about 1 us (0.5 to 1 us) a hop between neighbours, start-up included; the
/// even split between the two parts is an assumption.
pub const ICI_STARTUP: f64 = 0.5e-6;
/// See [`ICI_STARTUP`].
pub const ICI_HOP: f64 = 0.5e-6;
/// Seconds to start a message over the data-center network. No figure is published; this is
/// the order of a TCP round trip within a data center.
pub const DCN_STARTUP: f64 = 20e-6;

/// An index into the channels of a [`Fabric`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub struct ChannelId(pub u32);

impl ChannelId {
    /// As an array index.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// What a channel is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ChannelKind {
    /// One direction of an ICI link.
    Ici {
        /// The slice.
        slice: u32,
        /// The link in the slice's graph.
        link: LinkId,
    },
    /// From one device of a chip to the other.
    Die {
        /// The slice.
        slice: u32,
        /// The chip.
        chip: ChipId,
        /// The sending device of the chip, 0 or 1.
        core: u32,
    },
    /// From a host into the data-center network.
    DcnOut {
        /// The host, counted over all slices.
        host: u32,
    },
    /// From the data-center network into a host.
    DcnIn {
        /// The host, counted over all slices.
        host: u32,
    },
}

/// One direction of something that carries data.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Channel {
    /// What it is.
    pub kind: ChannelKind,
    /// Bytes a second.
    pub bandwidth: f64,
    /// Seconds from one end to the other, without the message's start-up.
    pub latency: f64,
}

/// The channels of a job and the routes over them.
///
/// Ranks are positions in [`MultiSlice::devices`]. A message takes [`Fabric::startup`], then the
/// latencies of its channels, then its bytes at the rate that it gets on the narrowest.
///
/// ```
/// use tpu_dist_mesh::{Fabric, MultiSlice};
/// let fabric = Fabric::new(&"2*v5p:2x2x1".parse::<MultiSlice>()?);
/// assert_eq!(fabric.ranks(), 8);
/// assert_eq!(fabric.route(0, 3)?.len(), 2); // two ICI links
/// assert_eq!(fabric.route(0, 4)?.len(), 2); // out of one host, into the other
/// # Ok::<(), tpu_dist_mesh::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Fabric {
    job: MultiSlice,
    links: LinkGraph,
    devices: Vec<Device>,
}

impl Fabric {
    /// A fabric without faults.
    pub fn new(job: &MultiSlice) -> Fabric {
        Fabric {
            job: job.clone(),
            links: LinkGraph::new(job.slice()),
            devices: job.devices(),
        }
    }

    /// A fabric of one slice with the faults of `links`.
    pub fn with_links(links: LinkGraph) -> Fabric {
        let job = MultiSlice::from(links.slice().clone());
        Fabric {
            devices: job.devices(),
            job,
            links,
        }
    }

    /// The job.
    pub const fn job(&self) -> &MultiSlice {
        &self.job
    }

    /// The link graph that every slice has.
    pub const fn links(&self) -> &LinkGraph {
        &self.links
    }

    /// Number of ranks.
    pub fn ranks(&self) -> u32 {
        self.devices.len() as u32
    }

    /// The device of each rank.
    pub fn devices(&self) -> &[Device] {
        &self.devices
    }

    fn dies(&self) -> u32 {
        if self.job.slice().devices_per_chip() > 1 {
            2 * self.job.slice().chips()
        } else {
            0
        }
    }

    fn channels_per_slice(&self) -> u32 {
        self.links.len() as u32 + self.dies()
    }

    /// Number of channels: of each slice the links, then two a chip where a chip has two
    /// devices; then one out of each host and one into each.
    pub fn channels(&self) -> usize {
        let dcn = if self.job.slices() > 1 {
            2 * self.job.hosts()
        } else {
            0
        };
        (self.channels_per_slice() * self.job.slices() + dcn) as usize
    }

    /// What a channel is.
    ///
    /// # Panics
    /// For an id that is not below [`Fabric::channels`].
    pub fn channel(&self, id: ChannelId) -> Channel {
        assert!(
            id.index() < self.channels(),
            "{id:?} of {} channels",
            self.channels()
        );
        let per_slice = self.channels_per_slice();
        let spec = self.job.slice().generation().spec();
        let slice = id.0 / per_slice.max(1);
        if per_slice > 0 && slice < self.job.slices() {
            let local = id.0 % per_slice;
            let Some(die) = local.checked_sub(self.links.len() as u32) else {
                let kind = ChannelKind::Ici {
                    slice,
                    link: LinkId(local),
                };
                return Channel {
                    kind,
                    bandwidth: spec.link_bandwidth,
                    latency: ICI_HOP,
                };
            };
            let kind = ChannelKind::Die {
                slice,
                chip: ChipId(die / 2),
                core: die % 2,
            };
            return Channel {
                kind,
                bandwidth: spec.die_bandwidth,
                latency: 0.0,
            };
        }
        let host = id.0 - per_slice * self.job.slices();
        let kind = match host.checked_sub(self.job.hosts()) {
            None => ChannelKind::DcnOut { host },
            Some(host) => ChannelKind::DcnIn { host },
        };
        Channel {
            kind,
            bandwidth: self.job.dcn_bandwidth_per_host(),
            latency: 0.0,
        }
    }

    /// Seconds to start a message between two ranks.
    pub fn startup(&self, from: u32, to: u32) -> f64 {
        let [from, to] = [from, to].map(|rank| &self.devices[rank as usize]);
        if from.slice == to.slice {
            ICI_STARTUP
        } else {
            DCN_STARTUP
        }
    }

    /// The channels from one rank to another; none from a rank to itself. Between slices
    /// data leaves by the sender's host and enters by the receiver's.
    ///
    /// # Errors
    /// [`Error::Mesh`] for a rank that does not exist; as [`LinkGraph::route`] otherwise.
    pub fn route(&self, from: u32, to: u32) -> Result<Vec<ChannelId>, Error> {
        let device = |rank: u32| {
            self.devices.get(rank as usize).ok_or_else(|| Error::Mesh {
                argument: "rank",
                reason: format!("expected less than {}, got {rank}", self.ranks()),
            })
        };
        let (from, to) = (device(from)?, device(to)?);
        let per_slice = self.channels_per_slice();
        if from.slice != to.slice {
            let dcn = per_slice * self.job.slices();
            return Ok(vec![
                ChannelId(dcn + from.process),
                ChannelId(dcn + self.job.hosts() + to.process),
            ]);
        }
        let first = per_slice * from.slice;
        if from.coords == to.coords {
            if from.core == to.core {
                return Ok(Vec::new());
            }
            let chip = self.job.slice().chip(from.coords)?;
            return Ok(vec![ChannelId(
                first + self.links.len() as u32 + 2 * chip.0 + from.core,
            )]);
        }
        let route = self.links.route(from.coords, to.coords)?;
        Ok(route
            .into_iter()
            .map(|link| ChannelId(first + link.0))
            .collect())
    }
}
