//! The device as tensors see it: storages, and operators that run as programs on them.
//!
//! # Storages
//! A [`Cell`] is what a tensor library calls a storage: so many bytes that tensors view. It holds
//! an immutable PJRT buffer that covers all of them, or none, and then reads as zeros.
//! Writing to a storage replaces its buffer by the result of a program, which may reuse the
//! memory of the old one when nothing else holds it. Copies of whole storages share a
//! buffer. Views never come to the device: programs resolve them, where XLA fuses them
//! with what follows.
//!
//! # Operators
//! [`Device::launch`] takes a call of an operator as [words](words), which say everything
//! about it but the contents of tensors and the values of run-time scalars. Calls with equal
//! words, on buffers of equal types, run the same program. Where there is none yet,
//! [`Device::define`] makes it from the types of the results, by [`crate::aten`].
//!
//! # Work of the host
//! [`Device::host_work`] lends the memory of storages to the host, ordered among the
//! programs and without waiting: a collective on a CPU device, for example.
//! [`Device::take`] and [`Device::put`] are its parts, for what is not host memory.
//!
//! # Collectives
//! Where the host reaches the memory of storages, [`Device::collective`] is work of the host.
//! Elsewhere [`Device::plan`] finds the program that all members run.

mod cell;
mod error;
mod fork;
mod group;
mod host;
mod ici;
mod interned;
mod memory;
mod plugin;
mod programs;
mod scalars;
pub mod words;

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

pub use cell::Cell;
pub use error::Error;
pub use fork::is_forked;
pub use host::CellWork;
pub(crate) use ici::Members;
pub use ici::Plan;
pub use memory::{MemoryStats, reset_accumulated, reset_peak, stats as memory_stats};
pub use plugin::{find as plugin, has_tpu, is_available, is_preferred, set_search_path};
pub use programs::{Call, Outcome, Results};

use crate::aten;
use crate::config::{Config, Fallback};
use crate::executor::{self, Executor};
use crate::pjrt::CompileOptions;

/// The device of this process.
#[derive(Debug)]
pub struct Device {
    executor: Executor,
    /// How programs of operators are compiled.
    options: CompileOptions,
    programs: programs::Programs,
    scalars: scalars::Scalars,
}

// Lives until the process ends: what other threads run at exit may still use it.
static DEVICE: OnceLock<Device> = OnceLock::new();

/// The device, if it has been opened.
pub fn opened() -> Option<&'static Device> {
    DEVICE.get().filter(|_| !is_forked())
}

/// The device, which the first call opens.
///
/// # Errors
/// [`Error::NoPlugin`] when nothing to run on is installed, [`Error::Forked`] in a child
/// process of one that used the device, [`Error::Executor`] when it cannot be opened.
#[inline]
pub fn get() -> Result<&'static Device, Error> {
    match DEVICE.get() {
        Some(device) if !is_forked() => Ok(device),
        _ => open(),
    }
}

#[cold]
fn open() -> Result<&'static Device, Error> {
    static OPENING: Mutex<()> = Mutex::new(());
    if is_forked() {
        return Err(Error::Forked);
    }
    let _opening = lock(&OPENING);
    if let Some(device) = DEVICE.get() {
        return Ok(device);
    }
    let plugin = plugin::find().ok_or(Error::NoPlugin)?;
    tracing::info!("device \"tpu\" is that of {}", plugin.display());
    let config = Config::get();
    let mut settings = executor::Config::new(plugin);
    settings.blocking = config.blocking;
    settings.cache.directory = config.cache_directory.clone();
    settings.cache.max_bytes = config.cache_bytes;
    settings.cache.salt = config.plugin_flags.clone();
    let executor = Executor::open(&settings).or_else(|error| match error {
        // A home that cannot be written to is no reason not to compute.
        executor::Error::Cache(error) => {
            tracing::warn!("compiled programs are not kept on disk: {error}");
            settings.cache.directory = None;
            Executor::open(&settings)
        }
        error => Err(error),
    })?;
    let description = executor.device().description()?;
    fork::watch();
    Ok(DEVICE.get_or_init(|| Device {
        executor,
        options: aten::compile_options(description.id),
        programs: programs::Programs::default(),
        scalars: scalars::Scalars::default(),
    }))
}

impl Device {
    /// What runs the programs.
    #[inline]
    pub fn executor(&self) -> &Executor {
        &self.executor
    }

    /// Waits for everything launched so far.
    ///
    /// # Errors
    /// The first failure of an operation that was not reported before.
    pub fn synchronize(&self) -> Result<(), Error> {
        Ok(self.executor.synchronize(None)?)
    }

    /// Waits at most `limit` for everything launched so far, whatever becomes of it.
    pub fn settle(&self, limit: Duration) {
        if let Err(error) = self.executor.synchronize(Some(limit)) {
            tracing::debug!(%error, "at exit");
        }
    }
}

static FALLBACKS: Mutex<BTreeMap<String, u64>> = Mutex::new(BTreeMap::new());

/// Counts a call of `operator` that runs on the CPU for want of a program.
///
/// # Errors
/// [`Error::NoLowering`] with `TPU_DIST_FALLBACK=error`.
pub fn fall_back(operator: &str, reason: &str) -> Result<(), Error> {
    if Config::get().fallback == Fallback::Error {
        return Err(Error::NoLowering {
            operator: operator.to_owned(),
            reason: reason.to_owned(),
        });
    }
    let mut fallbacks = lock(&FALLBACKS);
    match fallbacks.get_mut(operator) {
        Some(count) => *count += 1,
        None => {
            tracing::info!("{operator} runs on the CPU: {reason}");
            fallbacks.insert(operator.to_owned(), 1);
        }
    }
    Ok(())
}

/// How often each operator ran on the CPU.
pub fn fallbacks() -> BTreeMap<String, u64> {
    lock(&FALLBACKS).clone()
}

/// Counts from zero again.
pub fn reset_fallbacks() {
    lock(&FALLBACKS).clear();
}

/// Locks what is whole between any two calls that could panic.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
