//! The plugins that are installed here, and programs to run on them.

// Each test binary uses a part of this.
#![allow(dead_code)]

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::env;
use std::fs;
use std::path::PathBuf;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tpu_dist_runtime::pjrt::{Buffer, Client, Device, ElementType, HostMemory, Plugin, Value};

/// CPU plugins: those that `TPU_DIST_PJRT_PLUGIN` names, separated by `:`, or else those
/// installed in `VIRTUAL_ENV` or the workspace's `.venv`.
pub(crate) fn cpu_plugins() -> Vec<Plugin> {
    let paths = match env::var_os("TPU_DIST_PJRT_PLUGIN") {
        Some(list) => env::split_paths(&list).collect(),
        None => installed(&[
            "lammps_jax_pjrt_cpu/pjrt_c_api_cpu_plugin.so",
            "xla_plugins/xla_cpu_pjrt/xla_cpu_pjrt.so",
        ]),
    };
    if paths.is_empty() {
        println!("skipped: no PJRT CPU plugin; set TPU_DIST_PJRT_PLUGIN or install one");
    }
    paths
        .iter()
        .map(|path| Plugin::load(path).unwrap())
        .collect()
}

/// libtpu's file, where it is installed.
pub(crate) fn libtpu() -> Option<PathBuf> {
    let found = installed(&["libtpu/libtpu.so"]).pop();
    if found.is_none() {
        println!("skipped: no libtpu in the virtual environment");
    }
    found
}

fn installed(files: &[&str]) -> Vec<PathBuf> {
    let environment = env::var_os("VIRTUAL_ENV").map_or_else(
        || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../.venv")),
        PathBuf::from,
    );
    let Ok(pythons) = fs::read_dir(environment.join("lib")) else {
        return Vec::new();
    };
    let packages: Vec<_> = pythons
        .flatten()
        .map(|python| python.path().join("site-packages"))
        .collect();
    let all = files
        .iter()
        .flat_map(|file| packages.iter().map(move |dir| dir.join(file)));
    all.filter(|path| path.exists()).collect()
}

/// A client of `devices` CPU devices.
pub(crate) fn client(plugin: Plugin, devices: i64) -> Client {
    Client::create(plugin, &[("cpu_device_count", Value::from(devices))]).unwrap()
}

pub(crate) fn first(client: &Client) -> Device {
    client.addressable_devices().swap_remove(0)
}

/// `main(a, b) = a + b` on vectors of `n`, in place of `a` if `donate`.
pub(crate) fn add(n: usize, donate: bool) -> String {
    let donated = if donate {
        "{tf.aliasing_output = 0 : i32}"
    } else {
        ""
    };
    format!(
        "module @add {{
           func.func @main(%a: tensor<{n}xf32> {donated}, %b: tensor<{n}xf32>) -> tensor<{n}xf32> {{
             %0 = stablehlo.add %a, %b : tensor<{n}xf32>
             return %0 : tensor<{n}xf32>
           }}
         }}"
    )
}

/// `main(a) = a a` on square matrices of `n`.
pub(crate) fn square(n: usize) -> String {
    format!(
        "module @square {{
           func.func @main(%a: tensor<{n}x{n}xf32>) -> tensor<{n}x{n}xf32> {{
             %0 = stablehlo.dot_general %a, %a, contracting_dims = [1] x [0]
                : (tensor<{n}x{n}xf32>, tensor<{n}x{n}xf32>) -> tensor<{n}x{n}xf32>
             return %0 : tensor<{n}x{n}xf32>
           }}
         }}"
    )
}

pub(crate) fn bytes(values: &[f32]) -> Vec<u8> {
    values
        .iter()
        .flat_map(|value| value.to_ne_bytes())
        .collect()
}

pub(crate) fn floats(bytes: &[u8]) -> Vec<f32> {
    let (values, rest) = bytes.as_chunks::<4>();
    assert!(rest.is_empty());
    values
        .iter()
        .map(|value| f32::from_ne_bytes(*value))
        .collect()
}

pub(crate) fn upload(device: &Device, values: &[f32]) -> Buffer {
    let dims = [values.len() as i64];
    device
        .client()
        .buffer_from_host(&bytes(values), ElementType::F32, &dims, device)
        .unwrap()
}

pub(crate) fn download(buffer: &Buffer) -> Vec<f32> {
    let mut out = vec![0; buffer.host_bytes().unwrap()];
    buffer.to_host(&mut out).unwrap();
    floats(&out)
}

/// Floats `offset` bytes after an address divisible by 64, counting their owners' ends.
pub(crate) struct Aligned<const MUTABLE: bool> {
    block: NonNull<u8>,
    layout: Layout,
    offset: usize,
    length: usize,
    dropped: Arc<AtomicUsize>,
}

// SAFETY: the block is on the heap and the value's alone.
unsafe impl<const MUTABLE: bool> Send for Aligned<MUTABLE> {}

impl<const MUTABLE: bool> Aligned<MUTABLE> {
    pub(crate) fn new(values: &[f32], offset: usize, dropped: &Arc<AtomicUsize>) -> Self {
        let data = bytes(values);
        let layout = Layout::from_size_align(offset + data.len(), 64).unwrap();
        // SAFETY: the layout is not empty, the block is as long as the offset and data.
        let block = unsafe {
            let block = NonNull::new(alloc_zeroed(layout)).unwrap();
            block
                .add(offset)
                .copy_from_nonoverlapping(NonNull::from(&data[..]).cast(), data.len());
            block
        };
        Aligned {
            block,
            layout,
            offset,
            length: data.len(),
            dropped: Arc::clone(dropped),
        }
    }

    pub(crate) fn address(&self) -> usize {
        self.block.as_ptr() as usize + self.offset
    }
}

// SAFETY: the block stays until the value is dropped, and nobody else has it.
unsafe impl<const MUTABLE: bool> HostMemory for Aligned<MUTABLE> {
    const MUTABLE: bool = MUTABLE;

    fn bytes(&self) -> (*const u8, usize) {
        (self.address() as *const u8, self.length)
    }
}

impl<const MUTABLE: bool> Drop for Aligned<MUTABLE> {
    fn drop(&mut self) {
        self.dropped.fetch_add(1, Ordering::SeqCst);
        // SAFETY: allocated with this layout, freed once.
        unsafe { dealloc(self.block.as_ptr(), self.layout) };
    }
}

/// Resident memory in KiB, and threads, of this process.
pub(crate) fn footprint() -> (u64, u64) {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let of = |name: &str| {
        let line = status.lines().find(|line| line.starts_with(name)).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    };
    (of("VmRSS:"), of("Threads:"))
}
