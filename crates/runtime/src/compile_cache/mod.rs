//! Compiled programs, kept in memory and on disk.
//!
//! Compiling takes milliseconds to seconds, loading what was compiled before about two
//! milliseconds, finding it in memory less than two microseconds. Entries on disk are
//! shared by all processes that name the same directory, and outlive them. Of several that want the
//! same program at the same time one compiles, and the others wait for it.
//!
//! An entry is known by everything that decides what the compiler makes: the contents of
//! the plugin's file, its PJRT version, platform and topology (on a CPU that includes the
//! processor's features), the compile options with the device assignment, the program's
//! text, and what the caller adds, for environment variables that the plugin reads. What
//! is damaged, or was made for something else, is never used. The checksum finds
//! accidents, not malice: the directory holds machine code and must be the user's own.

mod disk;
mod key;
mod lock;

use std::io;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use lru::LruCache;

use crate::pjrt::{self, Client, CompileOptions, LoadedExecutable, Topology};
use disk::{Disk, Found};
pub use key::{Key, KeyBuilder};

/// Where programs are kept, and how many.
#[derive(Clone, Debug)]
pub struct Config {
    /// A directory of the user's own; `None` keeps programs in memory only.
    pub directory: Option<PathBuf>,
    /// What the entries in the directory may take, in bytes.
    pub max_bytes: u64,
    /// Programs to keep in memory. On the CPU each takes four mappings and more, of which a process
    /// may have 65530 by default (`vm.max_map_count`).
    pub max_loaded: NonZeroUsize,
    /// How long to wait for another process that compiles the same program, before doing
    /// it here too.
    pub patience: Duration,
    /// Whatever else decides what the compiler makes: the values of `XLA_FLAGS` and
    /// `LIBTPU_INIT_ARGS`, for example.
    pub salt: String,
}

impl Default for Config {
    /// In memory only; 4 GiB once a directory is given.
    fn default() -> Config {
        Config {
            directory: None,
            max_bytes: 4 << 30,
            max_loaded: NonZeroUsize::new(4096).unwrap_or(NonZeroUsize::MIN),
            patience: Duration::from_secs(60),
            salt: String::new(),
        }
    }
}

/// Why a cache could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// PJRT did not tell what the key depends on.
    #[error(transparent)]
    Pjrt(#[from] pjrt::Error),
    /// The directory cannot be used, or the plugin's file not be read.
    #[error("compile cache: {}: {source}", path.display())]
    Io {
        /// The directory or file.
        path: PathBuf,
        /// What the operating system said.
        source: io::Error,
    },
}

/// What a cache did so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Programs found in memory.
    pub memory_hits: u64,
    /// Programs loaded from disk.
    pub disk_hits: u64,
    /// Programs compiled.
    pub misses: u64,
    /// Entries on disk that were damaged, or that the plugin refused. Each was a miss.
    pub rejected: u64,
    /// Entries written to disk.
    pub stored: u64,
    /// Entries removed from disk to make room.
    pub evicted: u64,
    /// Times the disk could not be used; the program was compiled all the same.
    pub disk_errors: u64,
    /// Time spent compiling.
    pub compiling: Duration,
    /// Time spent loading from disk.
    pub loading: Duration,
}

#[derive(Default)]
struct Counters {
    memory_hits: AtomicU64,
    disk_hits: AtomicU64,
    misses: AtomicU64,
    rejected: AtomicU64,
    stored: AtomicU64,
    evicted: AtomicU64,
    disk_errors: AtomicU64,
    compiling_ns: AtomicU64,
    loading_ns: AtomicU64,
    complained: AtomicBool,
}

fn count(counter: &AtomicU64, by: u64) {
    counter.fetch_add(by, Ordering::Relaxed);
}

/// Filled by the first who wants the program, while the others wait for the lock.
type Slot = Mutex<Option<Arc<LoadedExecutable>>>;

/// The programs of one client.
pub struct CompileCache {
    client: Client,
    /// What all keys have in common.
    base: KeyBuilder,
    disk: Option<Disk>,
    patience: Duration,
    memory: Mutex<LruCache<Key, Arc<Slot>>>,
    counters: Counters,
}

impl CompileCache {
    /// Opens a cache for programs of `client`.
    ///
    /// # Errors
    /// When the directory cannot be made or written to, the plugin's file cannot be read,
    /// or the plugin does not describe its topology.
    pub fn open(client: &Client, config: &Config) -> Result<CompileCache, Error> {
        let plugin = client.plugin();
        let (major, minor) = plugin.version();
        let mut base = KeyBuilder::new();
        let mut disk = None;
        // In memory alone, keys meet only those of the same client.
        if let Some(directory) = &config.directory {
            let opened = Disk::open(directory, config.max_bytes).map_err(|source| Error::Io {
                path: directory.clone(),
                source,
            })?;
            let hash = opened.hash_of(plugin.path()).map_err(|source| Error::Io {
                path: plugin.path().to_path_buf(),
                source,
            })?;
            let topology = Topology::of(client)?;
            base = base
                .part(hash.as_bytes())
                .part(format!("PJRT {major}.{minor}").as_bytes())
                .part(client.platform().as_bytes())
                .part(client.platform_version().as_bytes())
                .part(&topology.serialize()?)
                // Plugins that have no fingerprint are told from others by their hash.
                .part(&topology.fingerprint().unwrap_or_default().to_le_bytes())
                .part(config.salt.as_bytes());
            disk = Some(opened);
        }
        Ok(CompileCache {
            client: client.clone(),
            base,
            disk,
            patience: config.patience,
            memory: Mutex::new(LruCache::new(config.max_loaded)),
            counters: Counters::default(),
        })
    }

    /// The client.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// The compiled form of a StableHLO program, text or bytecode: from memory, from
    /// disk, or by compiling it.
    ///
    /// # Errors
    /// As [`Client::compile`]. Trouble with the disk is counted, and reported once as a
    /// warning, but is no error.
    pub fn compile(
        &self,
        stablehlo: &[u8],
        options: &CompileOptions,
    ) -> Result<Arc<LoadedExecutable>, pjrt::Error> {
        let key = self
            .base
            .clone()
            .part(&options.encode()?)
            .part(stablehlo)
            .finish();
        let slot = {
            let mut memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(memory.get_or_insert(key, Arc::default))
        };
        // Nothing is left half done in a slot by a panic.
        let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(program) = &*slot {
            count(&self.counters.memory_hits, 1);
            return Ok(Arc::clone(program));
        }
        let program = Arc::new(self.load_or_compile(&key, stablehlo, options)?);
        *slot = Some(Arc::clone(&program));
        Ok(program)
    }

    fn load_or_compile(
        &self,
        key: &Key,
        stablehlo: &[u8],
        options: &CompileOptions,
    ) -> Result<LoadedExecutable, pjrt::Error> {
        let Some(disk) = &self.disk else {
            return self.really_compile(stablehlo, options);
        };
        if let Some(program) = self.load(disk, key) {
            return Ok(program);
        }
        // Held until the entry is stored, for those who wait to find it.
        let _lock = match disk.lock(key, self.patience) {
            Ok(lock) => lock,
            Err(error) => {
                self.complain("lock", &error);
                None
            }
        };
        // Someone may have stored it meanwhile.
        if let Some(program) = self.load(disk, key) {
            return Ok(program);
        }
        let program = self.really_compile(stablehlo, options)?;
        match program.executable().serialize() {
            Ok(bytes) => match disk.put(key, &bytes) {
                Ok(stored) => {
                    count(&self.counters.stored, 1);
                    count(&self.counters.evicted, stored.evicted);
                }
                Err(error) => self.complain("store", &error),
            },
            Err(error) => self.complain("serialize", &error),
        }
        Ok(program)
    }

    fn really_compile(
        &self,
        stablehlo: &[u8],
        options: &CompileOptions,
    ) -> Result<LoadedExecutable, pjrt::Error> {
        let start = Instant::now();
        let program = self.client.compile(stablehlo, options);
        count(
            &self.counters.compiling_ns,
            start.elapsed().as_nanos() as u64,
        );
        count(&self.counters.misses, 1);
        program
    }

    fn load(&self, disk: &Disk, key: &Key) -> Option<LoadedExecutable> {
        let start = Instant::now();
        let bytes = match disk.get(key) {
            Ok(Found::Entry(bytes)) => bytes,
            Ok(Found::Nothing) => return None,
            Ok(Found::Rejected) => {
                count(&self.counters.rejected, 1);
                return None;
            }
            Err(error) => {
                self.complain("read", &error);
                return None;
            }
        };
        // SAFETY: the checksum shows the bytes to be what was stored under this key, and
        // what is stored under a key was serialized from a program of a plugin with this
        // very file, for this very topology.
        let loaded = unsafe { self.client.deserialize(&bytes) };
        match loaded {
            Ok(program) => {
                count(&self.counters.disk_hits, 1);
                count(&self.counters.loading_ns, start.elapsed().as_nanos() as u64);
                Some(program)
            }
            Err(error) => {
                count(&self.counters.rejected, 1);
                tracing::warn!(%key, %error, "the plugin refused a cached program");
                if let Err(error) = disk.remove(key) {
                    self.complain("remove", &error);
                }
                None
            }
        }
    }

    #[cold]
    fn complain(&self, action: &str, error: &dyn std::fmt::Display) {
        count(&self.counters.disk_errors, 1);
        if !self.counters.complained.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                action,
                %error,
                "the compile cache cannot use its directory; going on without (said once)"
            );
        }
    }

    /// Forgets the programs in memory. Those in use stay usable.
    pub fn clear_memory(&self) {
        self.memory
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clear();
    }

    /// What the cache did so far.
    pub fn stats(&self) -> Stats {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Stats {
            memory_hits: of(&self.counters.memory_hits),
            disk_hits: of(&self.counters.disk_hits),
            misses: of(&self.counters.misses),
            rejected: of(&self.counters.rejected),
            stored: of(&self.counters.stored),
            evicted: of(&self.counters.evicted),
            disk_errors: of(&self.counters.disk_errors),
            compiling: Duration::from_nanos(of(&self.counters.compiling_ns)),
            loading: Duration::from_nanos(of(&self.counters.loading_ns)),
        }
    }
}

impl std::fmt::Debug for CompileCache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CompileCache")
            .field("disk", &self.disk)
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}
