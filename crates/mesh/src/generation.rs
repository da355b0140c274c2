//! TPU generations and their published figures.
//!
//! Sources, by the names used below:
//! - *docs*: the architecture pages at `docs.cloud.google.com/tpu/docs/{v2,v3,v4,v5e,v5p,v6e,tpu7x}`;
//! - *scaling book*: "How to Scale Your Model", `jax-ml.github.io/scaling-book`;
//! - *v4 paper*: Jouppi et al., "TPU v4: An Optically Reconfigurable Supercomputer for
//!   Machine Learning with Hardware Support for Embeddings", ISCA 2023 (arXiv 2304.01433);
//! - *v2/v3 paper*: Norrie et al., "The Design Process for Google's Training Chips: TPUv2
//!   and TPUv3", IEEE Micro 2021;
//! - *libtpu*: what libtpu 0.0.52 answers.

use std::{fmt, str::FromStr};

use serde::{Serialize, Serializer};

use crate::{Error, Shape};

/// A TPU generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Generation {
    /// TPU v2.
    V2,
    /// TPU v3.
    V3,
    /// TPU v4.
    V4,
    /// TPU v5e, "v5 lite", "v5litepod".
    V5e,
    /// TPU v5p; libtpu's kind is "TPU v5".
    V5p,
    /// TPU v6e, Trillium, "v6 lite".
    V6e,
    /// TPU7x, Ironwood.
    V7x,
}

/// What is known about a generation. Bandwidths are bytes a second, powers of ten.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Spec {
    /// The short name, as in `v5p`.
    pub name: &'static str,
    /// The name that libtpu accepts in a topology name.
    pub libtpu_name: &'static str,
    /// The device kind that libtpu and JAX report.
    pub kind: &'static str,
    /// Dimensions of the torus: 2 or 3.
    pub dimensions: u32,
    /// Largest number of chips in one slice.
    pub max_chips: u32,
    /// ICI ports a chip.
    pub links_per_chip: u32,
    /// One direction of one ICI link.
    pub link_bandwidth: f64,
    /// TensorCores a chip (libtpu).
    pub cores_per_chip: u32,
    /// Devices a chip that libtpu shows by default on Cloud TPU.
    pub devices_per_chip: u32,
    /// Between the two devices of one chip, one direction; 0 with one device a chip.
    pub die_bandwidth: f64,
    /// Chips a host along x, y and z: libtpu's default process grid.
    pub chips_per_host: [u32; 3],
    /// HBM of a chip, bytes.
    pub hbm_bytes: u64,
    /// HBM of a chip, bytes a second.
    pub hbm_bandwidth: f64,
    /// Data-center network of a host with `dcn_chips_per_host` chips, Gbit/s and direction.
    pub dcn_gbit_per_host: f64,
    /// The chips that share `dcn_gbit_per_host`.
    pub dcn_chips_per_host: u32,
    /// Whether cloud accelerator types count cores (`v5p-128`) and not chips (`v6e-16`).
    pub type_counts_cores: bool,
}

const GIB: u64 = 1 << 30;

/// v2. Links: 496 Gbit/s each way (v2/v3 paper). HBM 16 GiB, 700 GB/s (docs). Dies: two
/// cores share a chip without a published figure; half of HBM bandwidth is assumed. DCN:
/// no published figure; one 100 Gbit/s NIC a host is assumed.
static V2: Spec = Spec {
    name: "v2",
    libtpu_name: "v2",
    kind: "TPU v2",
    dimensions: 2,
    max_chips: 256,
    links_per_chip: 4,
    link_bandwidth: 62e9,
    cores_per_chip: 2,
    devices_per_chip: 2,
    die_bandwidth: 350e9,
    chips_per_host: [2, 2, 1],
    hbm_bytes: 16 * GIB,
    hbm_bandwidth: 700e9,
    dcn_gbit_per_host: 100.0,
    dcn_chips_per_host: 4,
    type_counts_cores: true,
};

/// v3. Links: 656 Gbit/s each way (v2/v3 paper), used here; the v4 paper says 70 GB/s and
/// the scaling book 100 GB/s. HBM 32 GiB, 900 GB/s (docs). Dies and DCN as for v2: assumed.
static V3: Spec = Spec {
    name: "v3",
    libtpu_name: "v3",
    kind: "TPU v3",
    max_chips: 1024,
    link_bandwidth: 82e9,
    die_bandwidth: 450e9,
    hbm_bytes: 32 * GIB,
    hbm_bandwidth: 900e9,
    ..V2
};

/// v4. Links: 50 GB/s each way (v4 paper); the docs' pod figures (all-reduce 1.1 PB/s, bisection
/// 24 TB/s over 4096 chips) and the scaling book imply 45 to 47 GB/s. HBM 32 GiB,
/// 1200 GB/s (docs). DCN: 25 GB/s a host (scaling book). Dies: with `devices_per_chip` 2
/// the cores share HBM; half its bandwidth is assumed.
static V4: Spec = Spec {
    name: "v4",
    libtpu_name: "v4",
    kind: "TPU v4",
    dimensions: 3,
    max_chips: 4096,
    links_per_chip: 6,
    link_bandwidth: 50e9,
    devices_per_chip: 1,
    die_bandwidth: 600e9,
    hbm_bandwidth: 1200e9,
    dcn_gbit_per_host: 200.0,
    ..V3
};

/// v5e. Links: 400 GB/s bidirectional a chip over 4 ports (docs), so 50 GB/s each way; the
/// scaling book says 45. HBM 16 GB (docs), 819 GB/s (docs: 800 GiB/s in places, 819 GB/s
/// in others). DCN: 2 x 100 Gbit/s for a host of 8 chips (docs).
static V5E: Spec = Spec {
    name: "v5e",
    libtpu_name: "v5e",
    kind: "TPU v5 lite",
    dimensions: 2,
    max_chips: 256,
    links_per_chip: 4,
    link_bandwidth: 50e9,
    cores_per_chip: 1,
    devices_per_chip: 1,
    die_bandwidth: 0.0,
    chips_per_host: [2, 2, 1],
    hbm_bytes: 16 * GIB,
    hbm_bandwidth: 819e9,
    dcn_gbit_per_host: 200.0,
    dcn_chips_per_host: 8,
    type_counts_cores: false,
};

/// v5p. Links: 1200 GB/s bidirectional a chip over 6 ports (docs), so 100 GB/s each way; the
/// scaling book says 90. HBM 95 GiB, 2765 GB/s (docs); libtpu
/// offers 95.7 GiB. DCN: 50 Gbit/s a chip (docs). The
/// docs' largest job is 6144 chips; libtpu accepts slices up to the pod's 8960.
static V5P: Spec = Spec {
    name: "v5p",
    libtpu_name: "v5p",
    kind: "TPU v5",
    max_chips: 8960,
    link_bandwidth: 100e9,
    die_bandwidth: 0.0,
    hbm_bytes: 95 * GIB,
    hbm_bandwidth: 2765e9,
    dcn_gbit_per_host: 200.0,
    ..V4
};

/// v6e. Links: 800 GB/s bidirectional a chip over 4 ports (docs), so 100 GB/s each way; the
/// scaling book says 90. HBM 32 GB, 1640 GB/s (docs). DCN: 100 Gbit/s a chip, 800 for a host of 8
/// chips (docs).
static V6E: Spec = Spec {
    name: "v6e",
    libtpu_name: "v6e",
    kind: "TPU v6 lite",
    link_bandwidth: 100e9,
    hbm_bytes: 32 * GIB,
    hbm_bandwidth: 1640e9,
    dcn_gbit_per_host: 800.0,
    dcn_chips_per_host: 8,
    ..V5E
};

/// TPU7x. Links: 1200 GB/s bidirectional a chip (docs) over the 6 ports of a 3D torus, so
/// 100 GB/s each way; derived. Dies: two chiplets a chip, joined six times as fast as one
/// ICI axis (JAX pull request 39340), so 6 x 100 GB/s each way. HBM 192 GiB, 7380 GB/s (docs). DCN:
/// 100 Gbit/s a chip (docs).
static V7X: Spec = Spec {
    name: "v7x",
    libtpu_name: "tpu7x",
    kind: "TPU7x",
    max_chips: 9216,
    devices_per_chip: 2,
    die_bandwidth: 600e9,
    hbm_bytes: 192 * GIB,
    hbm_bandwidth: 7380e9,
    dcn_gbit_per_host: 400.0,
    ..V5P
};

/// A slice that a generation is built in: shape, wrap and twist.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub struct LegalSlice {
    /// Extents.
    pub shape: Shape,
    /// Axes whose ends are joined.
    pub wrap: [bool; 3],
    /// Whether the joined ends are shifted; see [`crate::Torus`].
    pub twisted: bool,
}

impl Generation {
    /// All generations, oldest first.
    pub const ALL: [Generation; 7] = [
        Generation::V2,
        Generation::V3,
        Generation::V4,
        Generation::V5e,
        Generation::V5p,
        Generation::V6e,
        Generation::V7x,
    ];

    /// The generation's figures.
    pub fn spec(self) -> &'static Spec {
        match self {
            Generation::V2 => &V2,
            Generation::V3 => &V3,
            Generation::V4 => &V4,
            Generation::V5e => &V5E,
            Generation::V5p => &V5P,
            Generation::V6e => &V6E,
            Generation::V7x => &V7X,
        }
    }

    /// Every slice that libtpu's tables list for this generation.
    ///
    /// Two-dimensional generations have a fixed list, and an axis wraps where it spans the
    /// pod. Three-dimensional ones have small meshes without wrap, and from 4x4x4 up every
    /// stack of 4x4x4 cubes that fits the pod, with wrap along all axes.
    pub fn legal_slices(self) -> Vec<LegalSlice> {
        let flat = |pod: u32, shapes: &[(u32, u32)]| {
            let wraps = |extent| extent == pod;
            shapes
                .iter()
                .map(|&(x, y)| LegalSlice {
                    shape: Shape::new2(x, y),
                    wrap: [wraps(x), wraps(y), false],
                    twisted: false,
                })
                .collect()
        };
        match self {
            Generation::V2 => flat(16, &[(1, 1), (2, 2), (4, 4), (8, 8), (8, 16), (16, 16)]),
            Generation::V3 => flat(
                32,
                &[
                    (1, 1),
                    (2, 2),
                    (4, 2),
                    (4, 4),
                    (4, 8),
                    (8, 8),
                    (8, 16),
                    (16, 16),
                    (16, 32),
                    (32, 32),
                ],
            ),
            Generation::V5e | Generation::V6e => flat(
                16,
                &[
                    (1, 1),
                    (2, 2),
                    (2, 4),
                    (4, 4),
                    (4, 8),
                    (8, 8),
                    (8, 16),
                    (16, 16),
                ],
            ),
            Generation::V4 | Generation::V5p | Generation::V7x => self.legal_cubes(),
        }
    }

    fn legal_cubes(self) -> Vec<LegalSlice> {
        const SMALL: [(u32, u32, u32); 6] = [
            (1, 1, 1),
            (1, 2, 1),
            (2, 2, 1),
            (2, 2, 2),
            (2, 2, 4),
            (2, 4, 4),
        ];
        const LONGEST_AXIS: u32 = 256;
        let max = self.spec().max_chips;
        let mut slices: Vec<_> = SMALL
            .iter()
            .map(|&(x, y, z)| LegalSlice {
                shape: Shape::new3(x, y, z),
                wrap: [false; 3],
                twisted: false,
            })
            .collect();
        // v4 lists every order of the extents, later generations the ascending one.
        let ascending = self != Generation::V4;
        let axis = || (4..=LONGEST_AXIS).step_by(4);
        for x in axis().take_while(|x| x * 16 <= max) {
            for y in axis().take_while(|y| x * y * 4 <= max) {
                for z in axis().take_while(|z| x * y * z <= max) {
                    if ascending && !(x <= y && y <= z) {
                        continue;
                    }
                    let shape = Shape::new3(x, y, z);
                    let slice = LegalSlice {
                        shape,
                        wrap: [true; 3],
                        twisted: false,
                    };
                    slices.push(slice);
                    if self.twists(x, y, z) {
                        slices.push(LegalSlice {
                            twisted: true,
                            ..slice
                        });
                    }
                }
            }
        }
        slices
    }

    /// The twisted shapes are k x k x 2k, k x 2k x 2k, and on v7x also k x 2k x nk for n = 4,
    /// 8, 16 with the long axis up to 64.
    fn twists(self, x: u32, y: u32, z: u32) -> bool {
        let short = x == y && z == 2 * x || y == 2 * x && z == y;
        let long = self == Generation::V7x
            && y == 2 * x
            && z.is_multiple_of(x)
            && (z / x).is_power_of_two()
            && z >= 4 * x
            && z <= 64;
        short || long
    }
}

impl fmt::Display for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.spec().name)
    }
}

impl Serialize for Generation {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.spec().name)
    }
}

/// Reads any name in use: `v5p`, `tpu7x`, `v5litepod`, libtpu's kinds (`TPU v5 lite`), GKE's
/// labels (`tpu-v5p-slice`) and Ray's (`TPU-V6E`).
impl FromStr for Generation {
    type Err = Error;

    fn from_str(name: &str) -> Result<Generation, Error> {
        let key: String = name
            .trim()
            .to_ascii_lowercase()
            .chars()
            .map(|c| if c == ' ' || c == '_' { '-' } else { c })
            .collect();
        let short = key.strip_prefix("tpu-").unwrap_or(&key);
        let short = short
            .strip_suffix("-podslice")
            .or_else(|| short.strip_suffix("-slice"))
            .or_else(|| short.strip_suffix("-device"))
            .unwrap_or(short);
        Ok(match short {
            "v2" => Generation::V2,
            "v3" => Generation::V3,
            "v4" => Generation::V4,
            "v5e" | "v5litepod" | "v5lite" | "v5-lite" => Generation::V5e,
            "v5p" | "v5" => Generation::V5p,
            "v6e" | "v6-lite" | "trillium" => Generation::V6e,
            "v7x" | "tpu7x" | "7x" | "tpu7" | "ironwood" => Generation::V7x,
            _ => {
                return Err(Error::UnknownGeneration {
                    name: name.to_owned(),
                });
            }
        })
    }
}
