//! The PyTorch boundary: the Python module `tpu_dist._C`.
//!
//! C++ holds what c10d asks for as C++ classes (`cpp/`), Rust the rest. This crate
//! translates; it decides nothing.

// The bridge macro makes its items public.
#[allow(unreachable_pub)]
mod bridge;
mod device;
mod groups;
mod log;
mod mesh;
mod store;

use pyo3::exceptions::PyImportError;
use pyo3::prelude::*;

/// The compiled part of `tpu_dist`.
#[pymodule(name = "_C")]
fn native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    log::install();
    tpu_dist_runtime::set_interrupt_check(bridge::ffi::check_signals);
    module.add_function(wrap_pyfunction!(groups::stats, module)?)?;
    mesh::register(module)?;
    device::register(module)?;
    // SAFETY: the address is that of a live module object, and the GIL is held.
    unsafe { bridge::ffi::register_classes(module.as_ptr() as usize) }
        .map_err(|error| PyImportError::new_err(error.what().to_owned()))
}
