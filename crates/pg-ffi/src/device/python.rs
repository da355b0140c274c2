//! What `torch.tpu` calls: the module `tpu_dist._C.device`.

use std::path::PathBuf;
use std::time::Duration;

use pyo3::exceptions::{PyImportError, PyRuntimeError};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use tpu_dist_runtime::config::Config;
use tpu_dist_runtime::device;
use tpu_dist_runtime::pjrt::Value;

use super::bridge::ffi;

fn failed(error: device::Error) -> PyErr {
    PyRuntimeError::new_err(error.to_string())
}

/// Where Python packages with plugins may be.
#[pyfunction]
fn set_search_path(directories: Vec<PathBuf>) {
    device::set_search_path(directories);
}

/// Registers guard, allocator, hooks and generator with torch, which opens nothing.
#[pyfunction]
fn register_device() -> PyResult<()> {
    ffi::register_device().map_err(|error| PyRuntimeError::new_err(error.what().to_owned()))
}

/// Whether this host has a TPU.
#[pyfunction]
fn has_tpu() -> bool {
    device::has_tpu()
}

/// The plugin's file, or `None`.
#[pyfunction]
fn plugin() -> Option<PathBuf> {
    device::plugin()
}

/// Whether there is a device, without opening it.
#[pyfunction]
fn is_available() -> bool {
    device::is_available()
}

/// Whether there is one that torch should choose.
#[pyfunction]
fn is_preferred() -> bool {
    device::is_preferred()
}

/// Whether the device has been opened in this process.
#[pyfunction]
fn is_opened() -> bool {
    device::opened().is_some()
}

/// Whether this process was forked from one that had opened the device.
#[pyfunction]
fn is_forked() -> bool {
    device::is_forked()
}

/// Opens the device if it is not.
#[pyfunction]
fn open(py: Python<'_>) -> PyResult<()> {
    py.detach(device::get).map(|_| ()).map_err(failed)
}

/// Waits for everything launched so far; raises the first failure not reported before.
#[pyfunction]
fn synchronize(py: Python<'_>) -> PyResult<()> {
    let Some(device) = device::opened() else {
        return Ok(());
    };
    py.detach(|| device.synchronize()).map_err(failed)
}

/// Waits for the device before the interpreter ends.
#[pyfunction]
fn close(py: Python<'_>) {
    if let Some(device) = device::opened() {
        py.detach(|| device.settle(Duration::from_secs(20)));
    }
}

/// What storages hold, in bytes and buffers, and what the plugin counts.
#[pyfunction]
fn memory_stats(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let stats = device::memory_stats();
    let result = PyDict::new(py);
    for (name, current, peak, allocated) in [
        (
            "allocated_bytes",
            stats.bytes,
            stats.peak_bytes,
            stats.allocated_bytes,
        ),
        (
            "allocation",
            stats.buffers,
            stats.peak_buffers,
            stats.allocated_buffers,
        ),
    ] {
        result.set_item(format!("{name}.all.current"), current)?;
        result.set_item(format!("{name}.all.peak"), peak)?;
        result.set_item(format!("{name}.all.allocated"), allocated)?;
        result.set_item(
            format!("{name}.all.freed"),
            allocated.saturating_sub(current),
        )?;
    }
    let plugin = device::opened().and_then(|device| device.executor().device().memory_stats().ok());
    if let Some(plugin) = plugin {
        result.set_item("device.bytes_in_use", plugin.bytes_in_use)?;
        for (name, value) in [
            ("device.peak_bytes_in_use", plugin.peak_bytes_in_use),
            ("device.bytes_limit", plugin.bytes_limit),
            ("device.bytes_reserved", plugin.bytes_reserved),
            ("device.num_allocs", plugin.num_allocs),
        ] {
            if let Some(value) = value {
                result.set_item(name, value)?;
            }
        }
    }
    Ok(result)
}

/// Makes the present the peak.
#[pyfunction]
fn reset_peak_memory_stats() {
    device::reset_peak();
}

/// Counts totals from zero again.
#[pyfunction]
fn reset_accumulated_memory_stats() {
    device::reset_accumulated();
}

/// How often each operator ran on the CPU for want of a program.
#[pyfunction]
fn fallback_stats(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let result = PyDict::new(py);
    for (operator, count) in device::fallbacks() {
        result.set_item(operator, count)?;
    }
    Ok(result)
}

/// Counts from zero again.
#[pyfunction]
fn reset_fallback_stats() {
    device::reset_fallbacks();
}

/// Counters of the compile cache; times in seconds.
#[pyfunction]
fn compile_stats(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let stats = device::opened()
        .map(|device| device.executor().cache().stats())
        .unwrap_or_default();
    let result = PyDict::new(py);
    for (name, value) in [
        ("memory_hits", stats.memory_hits),
        ("disk_hits", stats.disk_hits),
        ("misses", stats.misses),
        ("rejected", stats.rejected),
        ("stored", stats.stored),
        ("evicted", stats.evicted),
        ("disk_errors", stats.disk_errors),
    ] {
        result.set_item(name, value)?;
    }
    result.set_item("compile_seconds", stats.compiling.as_secs_f64())?;
    result.set_item("load_seconds", stats.loading.as_secs_f64())?;
    Ok(result)
}

/// What the device is: `platform`, `platform_version`, `kind`, `launch_blocking`, and the
/// plugin's `attributes`.
#[pyfunction]
fn properties(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let executor = py.detach(device::get).map_err(failed)?.executor();
    let description = executor.device().description();
    let description = description.map_err(|error| failed(error.into()))?;
    let attributes = PyDict::new(py);
    for (name, value) in &description.attributes {
        match value {
            Value::String(value) => attributes.set_item(name, value)?,
            Value::Int(value) => attributes.set_item(name, value)?,
            Value::IntList(value) => attributes.set_item(name, value)?,
            Value::Float(value) => attributes.set_item(name, value)?,
            Value::Bool(value) => attributes.set_item(name, value)?,
        }
    }
    let result = PyDict::new(py);
    result.set_item("platform", executor.client().platform())?;
    result.set_item("platform_version", executor.client().platform_version())?;
    result.set_item("kind", description.kind)?;
    result.set_item("launch_blocking", Config::get().blocking)?;
    result.set_item("attributes", attributes)?;
    Ok(result)
}

/// Adds the module `device` to `parent`.
pub(crate) fn register(parent: &Bound<'_, PyModule>) -> PyResult<()> {
    let module = PyModule::new(parent.py(), "device")?;
    module.add_function(wrap_pyfunction!(set_search_path, &module)?)?;
    module.add_function(wrap_pyfunction!(register_device, &module)?)?;
    module.add_function(wrap_pyfunction!(has_tpu, &module)?)?;
    module.add_function(wrap_pyfunction!(plugin, &module)?)?;
    module.add_function(wrap_pyfunction!(is_available, &module)?)?;
    module.add_function(wrap_pyfunction!(is_preferred, &module)?)?;
    module.add_function(wrap_pyfunction!(is_opened, &module)?)?;
    module.add_function(wrap_pyfunction!(is_forked, &module)?)?;
    module.add_function(wrap_pyfunction!(open, &module)?)?;
    module.add_function(wrap_pyfunction!(synchronize, &module)?)?;
    module.add_function(wrap_pyfunction!(close, &module)?)?;
    module.add_function(wrap_pyfunction!(memory_stats, &module)?)?;
    module.add_function(wrap_pyfunction!(reset_peak_memory_stats, &module)?)?;
    module.add_function(wrap_pyfunction!(reset_accumulated_memory_stats, &module)?)?;
    module.add_function(wrap_pyfunction!(fallback_stats, &module)?)?;
    module.add_function(wrap_pyfunction!(reset_fallback_stats, &module)?)?;
    module.add_function(wrap_pyfunction!(compile_stats, &module)?)?;
    module.add_function(wrap_pyfunction!(properties, &module)?)?;
    // SAFETY: the address is that of a live module object, and the GIL is held.
    unsafe { ffi::register_functions(module.as_ptr() as usize) }
        .map_err(|error| PyImportError::new_err(error.what().to_owned()))?;
    parent.add_submodule(&module)
}
