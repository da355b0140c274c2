//! Several equal slices joined by the data-center network.

use std::fmt;

use serde::Serialize;

use crate::{Device, Error, Generation, Shape, Slice};

/// One or more equal slices. With one it is just that slice.
///
/// ```
/// use tpu_dist_mesh::MultiSlice;
/// let job: MultiSlice = "2*v5p:2x2x2".parse()?;
/// assert_eq!(job.device_count(), 16);
/// let device = job.devices()[8];
/// assert_eq!((device.id, device.slice, device.process), (200000, 1, 2));
/// # Ok::<(), tpu_dist_mesh::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct MultiSlice {
    slice: Slice,
    count: u32,
}

impl MultiSlice {
    /// `count` slices like `slice`.
    ///
    /// # Errors
    /// [`Error::Option`] for a count of 0, or of so many slices that libtpu's ids
    /// overflow.
    pub fn new(slice: Slice, count: u32) -> Result<MultiSlice, Error> {
        if count == 0 || count > u32::MAX / SLICE_ID_STRIDE - 1 {
            return Err(Error::Option {
                option: "num_slices",
                value: count.to_string(),
                slice: slice.name(),
                reason: "must be at least 1 and fit libtpu's device ids".to_owned(),
            });
        }
        Ok(MultiSlice { slice, count })
    }

    /// The job whose devices libtpu shows as `devices`, of a given kind (`TPU v5` for example);
    /// `None` where they are not those of whole slices. Wrap and twist do not show: they are
    /// what machines of that shape have.
    pub fn recognize(kind: &str, devices: &[Device]) -> Option<MultiSlice> {
        let generation = Generation::ALL
            .into_iter()
            .find(|generation| generation.spec().kind == kind)?;
        let most = |of: fn(&Device) -> u32| devices.iter().map(of).max().map(|most| most + 1);
        let extents = |devices: &[Device]| {
            let along = |axis: usize| {
                devices
                    .iter()
                    .map(move |device| device.coords.0[axis])
                    .max()
            };
            Some([along(0)? + 1, along(1)? + 1, along(2)? + 1])
        };
        let [x, y, z] = extents(devices)?;
        let first: Vec<Device> = (devices.iter().copied())
            .filter(|device| device.process == 0)
            .collect();
        let slice = Slice::new(generation, Shape::new3(x, y, z))
            .ok()?
            .with_devices_per_chip(most(|device| device.core)?)
            .ok()?
            .with_chips_per_host(extents(&first)?)
            .ok()?;
        let job = MultiSlice::new(slice, most(|device| device.slice)?).ok()?;
        let mut found = devices.to_vec();
        found.sort_unstable_by_key(|device| (device.process, device.id));
        (job.devices() == found).then_some(job)
    }

    /// What each slice is.
    pub const fn slice(&self) -> &Slice {
        &self.slice
    }

    /// Number of slices.
    pub const fn slices(&self) -> u32 {
        self.count
    }

    /// Devices of all slices.
    pub const fn device_count(&self) -> u32 {
        self.slice.device_count() * self.count
    }

    /// Hosts of all slices.
    pub fn hosts(&self) -> u32 {
        self.slice.hosts() * self.count
    }

    /// All devices in libtpu's list order: by process, then by id. The processes of slice s
    /// start at s times the hosts of a slice; ids start at (s + 1) 100000 where there
    /// is more than one slice.
    pub fn devices(&self) -> Vec<Device> {
        let local = self.slice.devices();
        if self.count == 1 {
            return local;
        }
        let hosts = self.slice.hosts();
        (0..self.count)
            .flat_map(|slice| {
                local.iter().map(move |device| Device {
                    id: (slice + 1) * SLICE_ID_STRIDE + device.id,
                    process: slice * hosts + device.process,
                    slice,
                    ..*device
                })
            })
            .collect()
    }

    /// Bytes a second that one host can send over the data-center network: the published
    /// figure scaled to the chips that a host of this slice has.
    pub fn dcn_bandwidth_per_host(&self) -> f64 {
        let spec = self.slice.generation().spec();
        let chips: u32 = self.slice.chips_per_host().iter().product();
        spec.dcn_gbit_per_host * 1e9 / 8.0 * f64::from(chips) / f64::from(spec.dcn_chips_per_host)
    }
}

/// libtpu numbers the devices of slice s from (s + 1) times this.
const SLICE_ID_STRIDE: u32 = 100_000;

impl From<Slice> for MultiSlice {
    fn from(slice: Slice) -> MultiSlice {
        MultiSlice { slice, count: 1 }
    }
}

impl fmt::Display for MultiSlice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.count {
            1 => self.slice.fmt(f),
            count => write!(f, "{count}*{}", self.slice),
        }
    }
}
