//! Which plugin the device is that of.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock};

use super::lock;
use crate::config::Config;

/// Where to look, and what was found there.
struct Search {
    path: Vec<PathBuf>,
    installed: Option<Option<PathBuf>>,
}

static SEARCH: Mutex<Search> = Mutex::new(Search {
    path: Vec::new(),
    installed: None,
});

/// Where Python packages are looked for, in order.
pub fn set_search_path(path: Vec<PathBuf>) {
    *lock(&SEARCH) = Search {
        path,
        installed: None,
    };
}

const TPU: &str = "libtpu/libtpu.so";

/// Plugins that run on the CPU, the newest first.
const CPU: &[&str] = &[
    "lammps_jax_pjrt_cpu/pjrt_c_api_cpu_plugin.so",
    "xla_plugins/xla_cpu_pjrt/xla_cpu_pjrt.so",
];

/// PCI devices that are TPUs, of vendor 0x1ae0: v2 and v3, two kinds of v4, v5p, v5e, v6e, 7x; as
/// in jax/_src/hardware_utils.py.
const TPU_PCI_IDS: &[&str] = &[
    "0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076",
];

/// Whether this host has a TPU. Asked often by torch, so looked up once.
pub fn has_tpu() -> bool {
    static HAS: OnceLock<bool> = OnceLock::new();
    *HAS.get_or_init(look_for_tpu)
}

fn look_for_tpu() -> bool {
    let read = |path: PathBuf| fs::read_to_string(path).unwrap_or_default();
    let is_tpu = |device: &Path| {
        read(device.join("vendor")).trim() == "0x1ae0"
            && TPU_PCI_IDS.contains(&read(device.join("device")).trim())
    };
    Path::new("/dev/accel0").exists()
        || fs::read_dir("/sys/bus/pci/devices")
            .is_ok_and(|devices| devices.flatten().any(|device| is_tpu(&device.path())))
}

/// The plugin's file: what `TPU_DIST_PJRT_PLUGIN` says, libtpu on a host with a TPU, else
/// an installed one for the CPU.
pub fn find() -> Option<PathBuf> {
    if let Some(plugin) = &Config::peek().plugin {
        return Some(plugin.clone());
    }
    let Search { path, installed } = &mut *lock(&SEARCH);
    let find = |name: &&str| {
        path.iter()
            .map(|directory| directory.join(name))
            .find(|file| file.exists())
    };
    installed
        .get_or_insert_with(|| match has_tpu() {
            true => find(&TPU),
            false => CPU.iter().find_map(find),
        })
        .clone()
}

/// Whether there is a plugin for the device. Opens nothing.
pub fn is_available() -> bool {
    find().is_some_and(|plugin| plugin.exists())
}

/// Whether the device is what this host is for: it has a TPU, or a virtual slice or a
/// plugin was asked for. A plugin for the CPU that merely is installed makes the device
/// available, but not the one that torch chooses where none is named.
pub fn is_preferred() -> bool {
    let config = Config::peek();
    (config.plugin.is_some() || config.virtual_slice.is_some() || has_tpu()) && is_available()
}
