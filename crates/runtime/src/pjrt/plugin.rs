//! Loading a plugin and calling its functions.

use std::collections::HashMap;
use std::ffi::c_void;
use std::fmt;
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::{Mutex, PoisonError};

use super::error::{Code, Error};
use super::sys::{self, Args};
use super::value::{self, Attributes};

/// Oldest minor version whose argument structs are known to agree with this crate's.
const MINOR_OLDEST: i32 = 54;

/// A loaded PJRT plugin. Copies are the same plugin; it stays loaded until the process
/// ends, since plugins own threads and exit handlers that unloading would pull away.
///
/// A process that has loaded a plugin must not fork without exec: the child would have
/// the plugin's locks and none of its threads.
#[derive(Clone, Copy)]
pub struct Plugin(&'static Loaded);

struct Loaded {
    path: PathBuf,
    table: *const sys::ApiHeader,
    slots: usize,
    major: i32,
    minor: i32,
    attributes: Attributes,
}

// SAFETY: `table` points to static data of a library that is never unloaded, and PJRT's
// functions may be called from any thread.
unsafe impl Send for Loaded {}
// SAFETY: as above.
unsafe impl Sync for Loaded {}

impl Plugin {
    /// Loads the plugin in file `path` and initialises it. The same file gives the same
    /// plugin again.
    ///
    /// libtpu looks for a TPU while it loads, guided by the process's environment:
    /// without one, `TPU_SKIP_MDS_QUERY=1` keeps it from asking a metadata server for
    /// minutes, and `ALLOW_MULTIPLE_LIBTPU_LOAD=1` lets several processes load it.
    ///
    /// # Errors
    /// [`Error::Load`] when the file is missing, is no PJRT plugin, or speaks a version
    /// of PJRT this crate does not; [`Error::Status`] when its initialisation fails.
    pub fn load(path: impl AsRef<Path>) -> Result<Plugin, Error> {
        static LOADED: Mutex<Option<HashMap<PathBuf, Plugin>>> = Mutex::new(None);

        let path = path.as_ref();
        let failed = |reason: String| Error::Load {
            path: path.to_path_buf(),
            reason,
        };
        let path = path
            .canonicalize()
            .map_err(|error| failed(error.to_string()))?;
        // Held while loading: a plugin is initialised once.
        let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        let loaded = loaded.get_or_insert_default();
        if let Some(plugin) = loaded.get(&path) {
            return Ok(*plugin);
        }
        let plugin = Plugin::open(path.clone())?;
        loaded.insert(path, plugin);
        Ok(plugin)
    }

    fn open(path: PathBuf) -> Result<Plugin, Error> {
        let failed = |reason: String| Error::Load {
            path: path.clone(),
            reason,
        };
        // SAFETY: running a library's initialisers is what loading a plugin means; the
        // caller names a file it trusts to be one.
        let library = unsafe { libloading::Library::new(&path) }
            .map_err(|error| failed(error.to_string()))?;
        // Leaked at once: whatever happens below, the library is never unloaded.
        let library = Box::leak(Box::new(library));
        // SAFETY: every PJRT plugin exports this function with this signature.
        let entry = unsafe {
            library.get::<unsafe extern "C" fn() -> *const sys::ApiHeader>(b"GetPjrtApi\0")
        }
        .map_err(|_| failed("it has no function GetPjrtApi".to_string()))?;
        // SAFETY: as above; it takes nothing.
        let table = unsafe { entry() };
        if table.is_null() {
            return Err(failed("GetPjrtApi returned null".to_string()));
        }
        // SAFETY: the header is the fixed part of what GetPjrtApi returns.
        let header = unsafe { &*table };
        let (major, minor) = (header.version.major, header.version.minor);
        if major != 0 || minor < MINOR_OLDEST {
            return Err(failed(format!(
                "it speaks PJRT {major}.{minor}; expected 0.{MINOR_OLDEST} or a later minor version"
            )));
        }
        let functions = header
            .struct_size
            .saturating_sub(size_of::<sys::ApiHeader>());
        let slots = functions / size_of::<*const c_void>();
        let mut loaded = Loaded {
            path: path.clone(),
            table,
            slots,
            major,
            minor,
            attributes: Attributes::new(),
        };
        // SAFETY: the arguments hold no pointers.
        unsafe { loaded.call(&mut sys::PluginInitialize::new()) }?;
        let mut args = sys::PluginAttributes::new();
        // SAFETY: the arguments hold no pointers; what comes back lives as long as the
        // process.
        loaded.attributes = unsafe {
            loaded.call(&mut args)?;
            value::read(args.attributes, args.num_attributes)
        };
        Ok(Plugin(Box::leak(Box::new(loaded))))
    }

    /// The plugin's file, without symbolic links.
    pub fn path(&self) -> &'static Path {
        &self.0.path
    }

    /// The version of PJRT the plugin was built with: major, minor.
    pub fn version(&self) -> (i32, i32) {
        (self.0.major, self.0.minor)
    }

    /// What the plugin says of itself, StableHLO versions for example.
    pub fn attributes(&self) -> &'static Attributes {
        &self.0.attributes
    }

    /// Whether the plugin has the function whose arguments are `A`.
    pub fn has<A: Args>(&self) -> bool {
        self.0.function(A::SLOT).is_some()
    }

    /// Calls a function.
    ///
    /// # Safety
    /// Every pointer in `args` is what the function's contract in PJRT's header asks
    /// for, and the objects pointed to belong to this plugin.
    ///
    /// # Errors
    /// [`Error::Missing`] when the plugin lacks the function, [`Error::Status`] when it
    /// fails.
    #[inline]
    pub unsafe fn call<A: Args>(&self, args: &mut A) -> Result<(), Error> {
        // SAFETY: the caller's promise.
        unsafe { self.0.call(args) }
    }

    /// Takes an error object over: reads and destroys it. `Ok` when it is null.
    ///
    /// # Safety
    /// `error` is null or an error of this plugin that the caller owns.
    pub(super) unsafe fn check(
        &self,
        function: &'static str,
        error: *mut sys::Error,
    ) -> Result<(), Error> {
        if error.is_null() {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        Err(unsafe { self.0.take_error(function, error) })
    }

    /// Calls a function that frees a handle and has no way to fail that matters.
    ///
    /// # Safety
    /// As [`Plugin::call`].
    #[inline]
    pub(super) unsafe fn destroy<A: Args>(&self, args: &mut A) {
        // SAFETY: the caller's promise.
        if let Err(error) = unsafe { self.0.call(args) } {
            tracing::error!(%error, "PJRT failed to free an object");
        }
    }
}

impl Loaded {
    /// The function in `slot`, when the plugin's table reaches that far and has it.
    #[inline]
    fn function(&self, slot: usize) -> Option<sys::Function> {
        if slot >= self.slots {
            return None;
        }
        // SAFETY: the table follows the header and has `slots` entries, each null or a
        // function, which is what `Option<Function>` is.
        unsafe { *self.table.add(1).cast::<Option<sys::Function>>().add(slot) }
    }

    #[inline]
    unsafe fn call<A: Args>(&self, args: &mut A) -> Result<(), Error> {
        let Some(function) = self.function(A::SLOT) else {
            return Err(self.missing(A::NAME));
        };
        // SAFETY: `A` is the argument struct of the function in its slot; the caller
        // answers for what it points to.
        let error = unsafe { function(ptr::from_mut(args).cast()) };
        if error.is_null() {
            return Ok(());
        }
        // SAFETY: a function that can fail hands the error to its caller.
        Err(unsafe { self.take_error(A::NAME, error) })
    }

    #[cold]
    fn missing(&self, function: &'static str) -> Error {
        Error::Missing {
            path: self.path.clone(),
            major: self.major,
            minor: self.minor,
            function,
        }
    }

    #[cold]
    unsafe fn take_error(&self, function: &'static str, error: *mut sys::Error) -> Error {
        let mut code_args = sys::ErrorGetCode::new();
        code_args.error = error;
        // SAFETY: `error` is live. The code of an error has no error of its own.
        let code = match unsafe { self.call(&mut code_args) } {
            Ok(()) => Code::from_raw(code_args.code),
            Err(_) => Code::Unknown,
        };
        let mut message_args = sys::ErrorMessage::new();
        message_args.error = error;
        // SAFETY: `error` is live; its message is copied before it is destroyed.
        let message = unsafe {
            self.call_void(&mut message_args);
            value::text(message_args.message, message_args.message_size)
        };
        let mut destroy_args = sys::ErrorDestroy::new();
        destroy_args.error = error;
        // SAFETY: the caller handed `error` over, and it is not used after this.
        unsafe { self.call_void(&mut destroy_args) };
        Error::Status {
            function,
            code,
            message,
        }
    }

    /// Calls a function that returns nothing.
    ///
    /// # Safety
    /// As [`Plugin::call`].
    unsafe fn call_void<A: Args>(&self, args: &mut A) {
        if let Some(function) = self.function(A::SLOT) {
            // SAFETY: only the signature's return type differs: these return nothing.
            let function: unsafe extern "C" fn(*mut c_void) =
                unsafe { std::mem::transmute(function) };
            // SAFETY: the caller's promise.
            unsafe { function(ptr::from_mut(args).cast()) };
        }
    }
}

impl PartialEq for Plugin {
    fn eq(&self, other: &Plugin) -> bool {
        ptr::eq(self.0, other.0)
    }
}

impl Eq for Plugin {}

impl fmt::Debug for Plugin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Plugin")
            .field("path", &self.0.path)
            .field(
                "version",
                &format_args!("{}.{}", self.0.major, self.0.minor),
            )
            .finish_non_exhaustive()
    }
}
