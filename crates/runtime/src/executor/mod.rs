//! One device, driven eagerly.
//!
//! [`Executor::launch`] starts a program and returns its results at once, as buffers
//! that other programs can use before they are filled. Programs take effect in the order
//! in which they are launched. A program that fails does so at its launch if that is
//! known by then, and otherwise at the next synchronisation, with the name of the
//! operation; in blocking mode every launch waits, and fails by itself. What is computed
//! from the results of a failed program fails too; other buffers stay good.
//!
//! [`Executor::host_work`] lets the host work on buffers in place, in that same order
//! and without waiting: a host collective on a CPU device, for example.

mod host_work;
mod queue;

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::compile_cache::{self, CompileCache};
use crate::pjrt::{
    self, Buffer, Client, CompileOptions, Device, ElementType, HostMemory, Imported, LaunchOptions,
    LoadedExecutable, Outputs, Plugin, Value,
};
pub use host_work::{HostWork, Refused};
pub use queue::Marker;
use queue::Queue;

/// How to open a device.
#[derive(Clone, Debug)]
pub struct Config {
    /// The plugin's file.
    pub plugin: PathBuf,
    /// Options for the plugin's client.
    pub client_options: Vec<(String, Value)>,
    /// Index among the devices that this process can use.
    pub device: usize,
    /// Wait for each program, so that it fails where it is launched
    /// (`TPU_LAUNCH_BLOCKING=1`).
    pub blocking: bool,
    /// Programs that may be under way; a further launch waits for the oldest.
    pub max_in_flight: usize,
    /// Compiled programs.
    pub cache: compile_cache::Config,
}

impl Config {
    /// The first device of the plugin in file `plugin`, asynchronously, nothing kept on
    /// disk.
    pub fn new(plugin: impl Into<PathBuf>) -> Config {
        Config {
            plugin: plugin.into(),
            client_options: Vec::new(),
            device: 0,
            blocking: false,
            max_in_flight: 1024,
            cache: compile_cache::Config::default(),
        }
    }
}

/// Why an operation of the device failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A program, or work of the host, failed.
    #[error("{operation}: {source}")]
    Operation {
        /// What it was called when it was compiled or started.
        operation: Arc<str>,
        /// Its number, counting from 0.
        sequence: u64,
        /// What PJRT said.
        source: pjrt::Error,
    },
    /// A program does not compile.
    #[error("{program}: {source}")]
    Compile {
        /// The name given to it.
        program: Arc<str>,
        /// What the compiler said.
        source: pjrt::Error,
    },
    /// PJRT failed otherwise.
    #[error(transparent)]
    Pjrt(#[from] pjrt::Error),
    /// The compile cache could not be opened.
    #[error(transparent)]
    Cache(#[from] compile_cache::Error),
    /// There is no such device.
    #[error(
        "device: expected an index below {count}, the number of devices of this process, got {index}"
    )]
    NoDevice {
        /// The index asked for.
        index: usize,
        /// The devices there are.
        count: usize,
    },
    /// Programs are still under way.
    #[error("{operation} has not ended after {timeout:?}")]
    Timeout {
        /// The oldest that is under way.
        operation: Arc<str>,
        /// Its number.
        sequence: u64,
        /// The time given.
        timeout: Duration,
    },
}

impl Error {
    /// PJRT's code for the failure, where it has one.
    pub fn code(&self) -> Option<pjrt::Code> {
        match self {
            Error::Operation { source, .. }
            | Error::Compile { source, .. }
            | Error::Pjrt(source) => Some(source.code()),
            Error::Cache(compile_cache::Error::Pjrt(source)) => Some(source.code()),
            Error::Timeout { .. } => Some(pjrt::Code::DeadlineExceeded),
            Error::Cache(_) | Error::NoDevice { .. } => None,
        }
    }
}

/// A compiled program with a name for error messages.
pub struct Program {
    name: Arc<str>,
    executable: Arc<LoadedExecutable>,
}

impl Program {
    /// The name given when it was compiled.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The compiled program.
    pub fn executable(&self) -> &LoadedExecutable {
        &self.executable
    }
}

impl fmt::Debug for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Program({})", self.name)
    }
}

/// One device. It may be used from any thread.
pub struct Executor {
    client: Client,
    device: Device,
    /// For programs of this device alone.
    options: CompileOptions,
    cache: CompileCache,
    blocking: bool,
    queue: Queue,
}

impl Executor {
    /// Opens the device.
    ///
    /// # Errors
    /// When the plugin cannot be loaded, has no such device, or the compile cache cannot
    /// be opened.
    pub fn open(config: &Config) -> Result<Executor, Error> {
        let plugin = Plugin::load(&config.plugin)?;
        let options: Vec<_> = config
            .client_options
            .iter()
            .map(|(name, value)| (name.as_str(), value.clone()))
            .collect();
        let client = Client::create(plugin, &options)?;
        let mut devices = client.addressable_devices();
        let count = devices.len();
        if config.device >= count {
            return Err(Error::NoDevice {
                index: config.device,
                count,
            });
        }
        let device = devices.swap_remove(config.device);
        Ok(Executor {
            options: CompileOptions::for_device(device.description()?.id),
            cache: CompileCache::open(&client, &config.cache)?,
            blocking: config.blocking,
            queue: Queue::new(config.max_in_flight),
            client,
            device,
        })
    }

    /// The client.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The compiled programs.
    pub fn cache(&self) -> &CompileCache {
        &self.cache
    }

    /// Programs launched, and pieces of host work started, so far.
    pub fn launched(&self) -> u64 {
        self.queue.launched()
    }

    /// Compiles a StableHLO program, text or bytecode, for this device, or finds it in
    /// the cache. `name` is for error messages.
    ///
    /// # Errors
    /// [`Error::Compile`] with the compiler's text.
    pub fn compile(&self, name: &str, stablehlo: &[u8]) -> Result<Arc<Program>, Error> {
        self.compile_with(name, stablehlo, &self.options)
    }

    /// Compiles a program that this device runs together with those of other processes.
    ///
    /// # Errors
    /// [`Error::Compile`] with the compiler's text.
    pub fn compile_with(
        &self,
        name: &str,
        stablehlo: &[u8],
        options: &CompileOptions,
    ) -> Result<Arc<Program>, Error> {
        let name: Arc<str> = name.into();
        match self.cache.compile(stablehlo, options) {
            Ok(executable) => Ok(Arc::new(Program { name, executable })),
            Err(source) => Err(Error::Compile {
                program: name,
                source,
            }),
        }
    }

    /// Starts a program. Arguments that it was compiled to take over are gone
    /// afterwards, unless `options` keeps them.
    ///
    /// # Errors
    /// [`Error::Operation`] when the arguments do not fit, when the program is known to
    /// have failed by the end of this call (always so in blocking mode), or when an
    /// earlier one, whose name is given, has failed and this one uses its results.
    #[inline]
    pub fn launch(
        &self,
        program: &Arc<Program>,
        arguments: &[&Buffer],
        options: LaunchOptions<'_>,
    ) -> Result<Outputs, Error> {
        let (execution, sequence) = self
            .queue
            .start(|| program.executable.execute(arguments, options));
        let execution = match execution {
            Ok(execution) => execution,
            Err(source) => {
                let operation = Arc::clone(&program.name);
                return Err(Error::Operation {
                    operation,
                    sequence,
                    source,
                });
            }
        };
        let complete = execution.complete;
        if self.blocking || complete.is_ready() {
            if let Err(source) = complete.wait() {
                return Err(self.failed(&program.name, sequence, source));
            }
            self.queue.reap();
        } else {
            self.queue.push(&program.name, sequence, complete, false);
        }
        Ok(execution.outputs)
    }

    /// The failure to report for an operation that failed: that of an earlier one, which
    /// most likely is its cause, or its own.
    #[cold]
    fn failed(&self, name: &Arc<str>, sequence: u64, source: pjrt::Error) -> Error {
        self.queue.reap();
        self.queue
            .take_failure(sequence)
            .unwrap_or_else(|| Error::Operation {
                operation: Arc::clone(name),
                sequence,
                source,
            })
    }

    /// Copies a row-major array to the device.
    ///
    /// # Errors
    /// As [`Client::buffer_from_host`].
    pub fn upload(&self, data: &[u8], element: ElementType, dims: &[i64]) -> Result<Buffer, Error> {
        Ok(self
            .client
            .buffer_from_host(data, element, dims, &self.device)?)
    }

    /// Makes an array on the device of memory of the host, in place where possible.
    ///
    /// # Errors
    /// As [`Client::import`].
    pub fn import<M: HostMemory>(
        &self,
        memory: M,
        element: ElementType,
        dims: &[i64],
    ) -> Result<Imported, Error> {
        Ok(self.client.import(memory, element, dims, &self.device)?)
    }

    /// Waits for `buffer` and copies it to `destination`, in row-major order.
    ///
    /// # Errors
    /// [`Error::Operation`] when the operation that fills the buffer failed,
    /// [`Error::Pjrt`] when `destination` has the wrong length or the buffer is deleted.
    pub fn download(&self, buffer: &Buffer, destination: &mut [u8]) -> Result<(), Error> {
        buffer.to_host(destination).map_err(|error| {
            // The operation at fault ends about now, and knows its name.
            match self.synchronize(Some(Duration::from_secs(1))) {
                Err(failure @ Error::Operation { .. }) => failure,
                _ => Error::Pjrt(error),
            }
        })
    }

    /// Marks the present end of the queue, to wait for what was launched until now.
    pub fn record(&self) -> Marker {
        self.queue.record()
    }

    /// Waits until everything launched before `marker` was recorded has ended.
    ///
    /// # Errors
    /// [`Error::Operation`] for the first that failed and was not reported before;
    /// [`Error::Timeout`] when some have not ended after `timeout`.
    pub fn wait(&self, marker: &Marker, timeout: Option<Duration>) -> Result<(), Error> {
        self.queue.wait(marker, timeout)
    }

    /// Waits until everything launched so far has ended.
    ///
    /// # Errors
    /// As [`Executor::wait`].
    pub fn synchronize(&self, timeout: Option<Duration>) -> Result<(), Error> {
        self.queue.wait(&self.record(), timeout)
    }

    /// Hands `buffers` to the host and returns their successors: the same memory, in
    /// buffers that programs launched from now on may use, and that are ready when the
    /// host has finished. `work` is called once the buffers are filled and all programs
    /// launched so far have ended (but not other work of the host, on other buffers), on
    /// this thread or one of the plugin's, and should only pass the work on. Copies to
    /// the host that were started with [`Buffer::to_host_async`] are not waited for.
    ///
    /// `name` is for error messages.
    ///
    /// # Errors
    /// [`Refused`] gives the buffers back when one is deleted, is given twice, is being
    /// viewed, is an import of memory that is not mutable, or is not in host memory, or
    /// the plugin is too old to make buffers wait; `work` is then not called. In blocking mode also when the work failed.
    pub fn host_work(
        &self,
        name: &str,
        buffers: Outputs,
        work: impl FnOnce(HostWork) + Send + 'static,
    ) -> Result<Outputs, Box<Refused>> {
        host_work::start(self, name.into(), buffers, work)
    }
}

impl fmt::Debug for Executor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Executor")
            .field("device", &self.device)
            .field("launched", &self.launched())
            .finish_non_exhaustive()
    }
}
