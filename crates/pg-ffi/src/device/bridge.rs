//! What C++ and Rust call of each other for the device.

use std::cell::Cell as StdCell;
use std::panic::{AssertUnwindSafe, catch_unwind};

use smallvec::SmallVec;
use tpu_dist_runtime::aten::{self, Number};
use tpu_dist_runtime::device::{self, Error};
use tpu_dist_runtime::executor;
use tpu_dist_runtime::pjrt::{Code, ElementType};

#[cxx::bridge(namespace = "tpu_dist::device::ffi")]
pub(crate) mod ffi {
    /// What became of a call.
    #[repr(u8)]
    enum Outcome {
        /// Its program is under way.
        Launched,
        /// There is no program for it yet.
        Unknown,
        /// There is none for it.
        Unsupported,
    }

    /// What kind of failure the last one of this thread was.
    #[repr(u8)]
    enum Failure {
        Other,
        OutOfMemory,
        NotImplemented,
    }

    /// The value of a run-time scalar: a kind of number as in words, and its bits.
    #[derive(Clone, Copy)]
    struct Scalar {
        kind: u8,
        bits: [u64; 2],
    }

    /// An operator that can be lowered.
    struct Operator {
        name: String,
        /// Positions of scalars that are part of the program.
        constants: Vec<u32>,
        /// Positions of arguments that are written though the schema does not say so.
        writes: Vec<u32>,
        random: bool,
        /// The values of numbers decide how large its result is.
        sized_by_numbers: bool,
    }

    /// What storages hold.
    struct MemoryStats {
        bytes: u64,
        peak_bytes: u64,
        allocated_bytes: u64,
        buffers: u64,
        peak_buffers: u64,
        allocated_buffers: u64,
    }

    extern "Rust" {
        type Cell;
        type Results;
        type Marker;

        /// The kind of the failure that was thrown last on this thread.
        fn last_failure() -> Failure;

        fn is_available() -> bool;
        fn is_preferred() -> bool;
        fn is_opened() -> bool;
        /// Opens the device, or does nothing.
        fn open() -> Result<()>;
        fn memory_stats() -> MemoryStats;
        fn reset_peak_memory();
        fn reset_accumulated_memory();

        fn operators() -> Vec<Operator>;

        /// A storage of zeros, to be given back to `drop_cell`.
        unsafe fn new_cell(bytes: u64) -> *mut Cell;
        unsafe fn drop_cell(cell: *mut Cell);
        fn clear(self: &Cell);
        fn share(self: &Cell, other: &Cell) -> Result<()>;
        fn resize(self: &Cell, bytes: u64) -> Result<()>;
        /// `element` is PJRT's number of the element type.
        fn upload(self: &Cell, data: &[u8], element: u8, dims: &[i64]) -> Result<()>;
        fn download(self: &Cell, destination: &mut [u8]) -> Result<()>;

        fn new_results() -> Box<Results>;
        /// What the results are.
        fn words(self: &Results) -> &[u64];
        /// The storage of the next new one.
        unsafe fn next_cell(self: &mut Results) -> *mut Cell;
        fn draws(self: &Results) -> u64;
        /// Why a call is unsupported.
        fn reason(self: &Results) -> &str;

        /// Starts the program of a call. `cells` are addresses of storages.
        unsafe fn launch(
            words: &[u64],
            cells: &[usize],
            scalars: &[Scalar],
            seed: u64,
            offset: u64,
            results: &mut Results,
        ) -> Result<Outcome>;
        /// Makes the program of a call.
        unsafe fn define(words: &[u64], cells: &[usize], results: &[u64]) -> Result<()>;
        unsafe fn define_unsupported(words: &[u64], cells: &[usize], reason: &str) -> Result<()>;

        /// Counts a call that runs on the CPU, or says why it must not.
        fn fall_back(name: &str, reason: &str) -> Result<()>;

        fn synchronize() -> Result<()>;
        fn record() -> Result<Box<Marker>>;
        fn is_complete(self: &Marker) -> bool;
        fn wait(self: &Marker) -> Result<()>;
    }

    unsafe extern "C++" {
        include!("device/bridge.hpp");

        /// Registers the device with torch, once.
        #[namespace = "tpu_dist::device"]
        fn register_device() -> Result<()>;
        /// Adds the functions that C++ defines to the Python module at `module`.
        #[namespace = "tpu_dist::device"]
        unsafe fn register_functions(module: usize) -> Result<()>;
    }
}

/// A storage, as C++ holds it.
#[repr(transparent)]
pub(crate) struct Cell(device::Cell);

/// A point in the order of programs, as C++ holds it.
pub(crate) struct Marker(executor::Marker);

/// What a launch gives back. C++ keeps one and reuses its memory.
pub(crate) struct Results {
    results: device::Results,
    taken: usize,
    reason: std::sync::Arc<str>,
}

thread_local! {
    static LAST: StdCell<ffi::Failure> = const { StdCell::new(ffi::Failure::Other) };
}

fn last_failure() -> ffi::Failure {
    LAST.get()
}

/// Runs `body`, notes the kind of its failure, and makes a panic, which is a bug of ours,
/// one of them.
fn guarded<T>(body: impl FnOnce() -> Result<T, Error>) -> Result<T, String> {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => {
            LAST.set(match &error {
                Error::NoLowering { .. } => ffi::Failure::NotImplemented,
                error if error.code() == Some(Code::ResourceExhausted) => ffi::Failure::OutOfMemory,
                _ => ffi::Failure::Other,
            });
            Err(error.to_string())
        }
        Err(panic) => {
            LAST.set(ffi::Failure::Other);
            let text = panic
                .downcast_ref::<&str>()
                .map(|text| (*text).to_owned())
                .or_else(|| panic.downcast_ref::<String>().cloned())
                .unwrap_or_default();
            Err(format!("internal error: {text}"))
        }
    }
}

fn is_available() -> bool {
    device::is_available()
}

fn is_preferred() -> bool {
    device::is_preferred()
}

fn is_opened() -> bool {
    device::opened().is_some()
}

fn open() -> Result<(), String> {
    guarded(|| device::get().map(|_| ()))
}

fn memory_stats() -> ffi::MemoryStats {
    let stats = device::memory_stats();
    ffi::MemoryStats {
        bytes: stats.bytes,
        peak_bytes: stats.peak_bytes,
        allocated_bytes: stats.allocated_bytes,
        buffers: stats.buffers,
        peak_buffers: stats.peak_buffers,
        allocated_buffers: stats.allocated_buffers,
    }
}

fn reset_peak_memory() {
    device::reset_peak();
}

fn reset_accumulated_memory() {
    device::reset_accumulated();
}

fn operators() -> Vec<ffi::Operator> {
    let numbers = |list: &[usize]| list.iter().map(|position| *position as u32).collect();
    aten::operators()
        .map(|row| ffi::Operator {
            name: row.name.to_owned(),
            constants: numbers(row.constants),
            writes: numbers(row.writes),
            random: row.random,
            sized_by_numbers: row.sized_by_numbers,
        })
        .collect()
}

/// # Safety
/// None of its own; `unsafe` because it returns a pointer to be released once.
unsafe fn new_cell(bytes: u64) -> *mut Cell {
    Box::into_raw(Box::new(Cell(device::Cell::new(bytes))))
}

/// # Safety
/// `cell` came from `new_cell` or `next_cell` and is not used again.
unsafe fn drop_cell(cell: *mut Cell) {
    // SAFETY: both made it with `Box::into_raw`, and the caller gives it up.
    drop(unsafe { Box::from_raw(cell) });
}

impl Cell {
    fn clear(&self) {
        self.0.clear();
    }

    fn share(&self, other: &Cell) -> Result<(), String> {
        guarded(|| self.0.share(&other.0))
    }

    fn resize(&self, bytes: u64) -> Result<(), String> {
        guarded(|| self.0.resize(bytes))
    }

    fn upload(&self, data: &[u8], element: u8, dims: &[i64]) -> Result<(), String> {
        let element = ElementType::from_raw(element.into()).unwrap_or(ElementType::U8);
        guarded(|| self.0.upload(data, element, dims))
    }

    fn download(&self, destination: &mut [u8]) -> Result<(), String> {
        guarded(|| self.0.download(destination))
    }
}

fn new_results() -> Box<Results> {
    Box::new(Results {
        results: device::Results::default(),
        taken: 0,
        reason: "".into(),
    })
}

impl Results {
    fn words(&self) -> &[u64] {
        &self.results.words
    }

    /// # Safety
    /// None of its own; `unsafe` because it returns a pointer to be released once. Null when
    /// there are no more.
    unsafe fn next_cell(&mut self) -> *mut Cell {
        let Some(cell) = self.results.cells.get_mut(self.taken) else {
            return std::ptr::null_mut();
        };
        self.taken += 1;
        let cell = std::mem::replace(cell, Box::new(device::Cell::new(0)));
        // `Cell` is a transparent wrapper of the runtime's.
        Box::into_raw(cell).cast()
    }

    fn draws(&self) -> u64 {
        self.results.draws
    }

    fn reason(&self) -> &str {
        &self.reason
    }
}

/// # Safety
/// The addresses are those of live cells, which outlive the result.
unsafe fn cells<'a>(addresses: &[usize]) -> SmallVec<[&'a device::Cell; 8]> {
    addresses
        .iter()
        // SAFETY: the caller's promise; `Cell` is a transparent wrapper.
        .map(|address| unsafe { &*(*address as *const device::Cell) })
        .collect()
}

/// # Safety
/// As [`cells`], during the call.
unsafe fn launch(
    words: &[u64],
    addresses: &[usize],
    scalars: &[ffi::Scalar],
    seed: u64,
    offset: u64,
    results: &mut Results,
) -> Result<ffi::Outcome, String> {
    // SAFETY: passed on from the caller.
    let cells = unsafe { cells(addresses) };
    let number = |scalar: &ffi::Scalar| {
        device::words::number(scalar.kind, scalar.bits).unwrap_or(Number::Float(f64::NAN))
    };
    let scalars: SmallVec<[Number; 4]> = scalars.iter().map(number).collect();
    let call = device::Call {
        words,
        cells: &cells,
        scalars: &scalars,
        random: [seed, offset],
    };
    results.taken = 0;
    let outcome = guarded(|| device::get()?.launch(&call, &mut results.results))?;
    Ok(match outcome {
        device::Outcome::Launched => ffi::Outcome::Launched,
        device::Outcome::Unknown => ffi::Outcome::Unknown,
        device::Outcome::Unsupported(reason) => {
            results.reason = reason;
            ffi::Outcome::Unsupported
        }
    })
}

/// # Safety
/// As [`launch`].
unsafe fn define(words: &[u64], addresses: &[usize], results: &[u64]) -> Result<(), String> {
    // SAFETY: passed on from the caller.
    let cells = unsafe { cells(addresses) };
    let call = definition(words, &cells);
    guarded(|| device::get()?.define(&call, results))
}

/// # Safety
/// As [`launch`].
unsafe fn define_unsupported(
    words: &[u64],
    addresses: &[usize],
    reason: &str,
) -> Result<(), String> {
    // SAFETY: passed on from the caller.
    let cells = unsafe { cells(addresses) };
    let call = definition(words, &cells);
    guarded(|| {
        device::get()?.define_unsupported(&call, reason);
        Ok(())
    })
}

fn definition<'a>(words: &'a [u64], cells: &'a [&'a device::Cell]) -> device::Call<'a> {
    device::Call {
        words,
        cells,
        scalars: &[],
        random: [0; 2],
    }
}

fn fall_back(name: &str, reason: &str) -> Result<(), String> {
    guarded(|| device::fall_back(name, reason))
}

fn synchronize() -> Result<(), String> {
    match device::opened() {
        Some(device) => guarded(|| device.synchronize()),
        None => Ok(()),
    }
}

fn record() -> Result<Box<Marker>, String> {
    guarded(|| Ok(Box::new(Marker(device::get()?.executor().record()))))
}

impl Marker {
    fn is_complete(&self) -> bool {
        self.0.is_complete()
    }

    fn wait(&self) -> Result<(), String> {
        guarded(|| Ok(device::get()?.executor().wait(&self.0, None)?))
    }
}
