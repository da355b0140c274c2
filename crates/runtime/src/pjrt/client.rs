//! A plugin's devices, opened.

use std::cell::Cell;
use std::fmt;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::thread;

use super::error::Error;
use super::plugin::Plugin;
use super::sys;
use super::value::{self, Attributes, Value};

/// The devices of a plugin. Clones are the same client; the last one closes it.
#[derive(Clone)]
pub struct Client(Arc<Open>);

struct Open {
    plugin: Plugin,
    raw: NonNull<sys::Client>,
    platform: String,
    platform_version: String,
    devices: Vec<NonNull<sys::Device>>,
    addressable: Vec<NonNull<sys::Device>>,
}

// SAFETY: PJRT's clients may be used and destroyed on any thread; devices are owned by
// the client and live as long as it.
unsafe impl Send for Open {}
// SAFETY: as above.
unsafe impl Sync for Open {}

thread_local! {
    /// Whether this thread is running a callback of a plugin.
    static IN_CALLBACK: Cell<bool> = const { Cell::new(false) };
}

/// Runs `callback`, noting that the thread may be one of a plugin's own.
pub(super) fn in_callback<R>(callback: impl FnOnce() -> R) -> R {
    struct Restore(bool);
    impl Drop for Restore {
        fn drop(&mut self) {
            IN_CALLBACK.set(self.0);
        }
    }
    let _restore = Restore(IN_CALLBACK.replace(true));
    callback()
}

impl Client {
    /// Opens the devices of `plugin`. XLA's CPU plugin takes `cpu_device_count`.
    ///
    /// # Errors
    /// [`Error::Status`] when there is no device, or another process has it.
    pub fn create(plugin: Plugin, options: &[(&str, Value)]) -> Result<Client, Error> {
        let options = value::lower(options);
        let mut args = sys::ClientCreate::new();
        args.create_options = options.as_ptr();
        args.num_options = options.len();
        // SAFETY: the options outlive the call; the key-value callbacks are optional.
        unsafe { plugin.call(&mut args) }?;
        let raw = NonNull::new(args.client)
            .ok_or_else(|| Error::broken("PJRT_Client_Create", "no client came back"))?;
        let mut open = Open {
            plugin,
            raw,
            platform: String::new(),
            platform_version: String::new(),
            devices: Vec::new(),
            addressable: Vec::new(),
        };

        let mut name = sys::ClientPlatformName::new();
        name.client = raw.as_ptr();
        let mut version = sys::ClientPlatformVersion::new();
        version.client = raw.as_ptr();
        let mut devices = sys::ClientDevices::new();
        devices.client = raw.as_ptr();
        let mut addressable = sys::ClientAddressableDevices::new();
        addressable.client = raw.as_ptr();
        // SAFETY: the client is live, and what it hands out lives as long as it.
        unsafe {
            plugin.call(&mut name)?;
            open.platform = value::text(name.platform_name, name.platform_name_size);
            plugin.call(&mut version)?;
            open.platform_version =
                value::text(version.platform_version, version.platform_version_size);
            plugin.call(&mut devices)?;
            open.devices = non_null(value::list(devices.devices, devices.num_devices));
            plugin.call(&mut addressable)?;
            open.addressable = non_null(value::list(addressable.devices, addressable.num_devices));
        }
        Ok(Client(Arc::new(open)))
    }

    /// The plugin.
    #[inline]
    pub fn plugin(&self) -> Plugin {
        self.0.plugin
    }

    /// `cpu` or `tpu`.
    pub fn platform(&self) -> &str {
        &self.0.platform
    }

    /// Free text: versions, build dates.
    pub fn platform_version(&self) -> &str {
        &self.0.platform_version
    }

    /// This process's index among those of a slice.
    ///
    /// # Errors
    /// [`Error::Status`] when PJRT fails.
    pub fn process_index(&self) -> Result<i32, Error> {
        let mut args = sys::ClientProcessIndex::new();
        args.client = self.as_ptr();
        // SAFETY: the client is live.
        unsafe { self.plugin().call(&mut args) }?;
        Ok(args.process_index)
    }

    /// Every device the client knows, other processes' included.
    pub fn devices(&self) -> Vec<Device> {
        self.0
            .devices
            .iter()
            .map(|raw| Device {
                client: self.clone(),
                raw: *raw,
            })
            .collect()
    }

    /// The devices this process can use.
    pub fn addressable_devices(&self) -> Vec<Device> {
        self.0
            .addressable
            .iter()
            .map(|raw| Device {
                client: self.clone(),
                raw: *raw,
            })
            .collect()
    }

    /// PJRT's handle.
    #[inline]
    pub fn as_ptr(&self) -> *mut sys::Client {
        self.0.raw.as_ptr()
    }

    /// Whether both are the same client.
    #[inline]
    pub fn is(&self, other: &Client) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// A device that a function of this client returned.
    pub(super) fn device(&self, raw: *mut sys::Device) -> Option<Device> {
        NonNull::new(raw).map(|raw| Device {
            client: self.clone(),
            raw,
        })
    }
}

fn non_null(raw: &[*mut sys::Device]) -> Vec<NonNull<sys::Device>> {
    raw.iter()
        .filter_map(|device| NonNull::new(*device))
        .collect()
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client")
            .field("platform", &self.0.platform)
            .field("devices", &self.0.devices.len())
            .finish_non_exhaustive()
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        struct Handle(Plugin, *mut sys::Client);
        // SAFETY: a client may be destroyed on any thread.
        unsafe impl Send for Handle {}
        impl Handle {
            fn destroy(self) {
                let mut args = sys::ClientDestroy::new();
                args.client = self.1;
                // SAFETY: this is the last use of the client: whatever depends on it
                // holds a clone.
                unsafe { self.0.destroy(&mut args) };
            }
        }

        let handle = Handle(self.plugin, self.raw.as_ptr());
        if IN_CALLBACK.get() {
            // Destroying joins the plugin's threads, of which this may be one.
            let spawned = thread::Builder::new()
                .name("pjrt-close".to_string())
                .spawn(move || handle.destroy());
            if let Err(error) = spawned {
                tracing::error!(%error, "no thread to close a PJRT client; it stays open");
            }
        } else {
            handle.destroy();
        }
    }
}

/// One device of a client.
#[derive(Clone)]
pub struct Device {
    client: Client,
    raw: NonNull<sys::Device>,
}

// SAFETY: devices are immutable objects owned by the client, which is held.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

/// Memory of a device in bytes. What a plugin does not report is `None`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryStats {
    /// Allocated now.
    pub bytes_in_use: i64,
    /// Most ever allocated.
    pub peak_bytes_in_use: Option<i64>,
    /// Allocations made.
    pub num_allocs: Option<i64>,
    /// Largest single allocation.
    pub largest_alloc_size: Option<i64>,
    /// What the device has.
    pub bytes_limit: Option<i64>,
    /// Kept for the runtime's own use.
    pub bytes_reserved: Option<i64>,
    /// Largest block that could be allocated.
    pub largest_free_block_bytes: Option<i64>,
}

impl Device {
    /// The client.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// PJRT's handle.
    #[inline]
    pub fn as_ptr(&self) -> *mut sys::Device {
        self.raw.as_ptr()
    }

    /// What the device is: id, coordinates, kind.
    ///
    /// # Errors
    /// [`Error::Status`] when PJRT fails.
    pub fn description(&self) -> Result<DeviceDescription, Error> {
        let mut args = sys::DeviceGetDescription::new();
        args.device = self.as_ptr();
        // SAFETY: the device is live, and its description lives as long as its client.
        unsafe {
            self.client.plugin().call(&mut args)?;
            DeviceDescription::read(self.client.plugin(), args.device_description)
        }
    }

    /// Place among the host's devices.
    ///
    /// # Errors
    /// [`Error::Status`] when the device belongs to another process.
    pub fn local_hardware_id(&self) -> Result<i32, Error> {
        let mut args = sys::DeviceLocalHardwareId::new();
        args.device = self.as_ptr();
        // SAFETY: the device is live.
        unsafe { self.client.plugin().call(&mut args) }?;
        Ok(args.local_hardware_id)
    }

    /// Memory in use.
    ///
    /// # Errors
    /// [`Error::Status`] with [`Code::Unimplemented`](super::Code::Unimplemented) where
    /// the plugin does not count, as XLA's CPU plugins do not.
    pub fn memory_stats(&self) -> Result<MemoryStats, Error> {
        let mut args = sys::DeviceMemoryStats::new();
        args.device = self.as_ptr();
        // SAFETY: the device is live.
        unsafe { self.client.plugin().call(&mut args) }?;
        let given = |is_set: bool, value: i64| is_set.then_some(value);
        Ok(MemoryStats {
            bytes_in_use: args.bytes_in_use,
            peak_bytes_in_use: given(args.peak_bytes_in_use_is_set, args.peak_bytes_in_use),
            num_allocs: given(args.num_allocs_is_set, args.num_allocs),
            largest_alloc_size: given(args.largest_alloc_size_is_set, args.largest_alloc_size),
            bytes_limit: given(args.bytes_limit_is_set, args.bytes_limit),
            bytes_reserved: given(args.bytes_reserved_is_set, args.bytes_reserved),
            largest_free_block_bytes: given(
                args.largest_free_block_bytes_is_set,
                args.largest_free_block_bytes,
            ),
        })
    }
}

impl PartialEq for Device {
    fn eq(&self, other: &Device) -> bool {
        ptr::eq(self.as_ptr(), other.as_ptr())
    }
}

impl Eq for Device {}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.description() {
            Ok(description) => f.write_str(&description.text),
            Err(error) => write!(f, "Device({error})"),
        }
    }
}

/// What a device is, whether it exists or not.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct DeviceDescription {
    /// Id, unique among all processes.
    pub id: i32,
    /// The process that can use it.
    pub process_index: i32,
    /// Vendor's name, `TPU v5` for example.
    pub kind: String,
    /// For people.
    pub text: String,
    /// On a TPU: `coords`, `core_on_chip`, `slice_index` and others.
    pub attributes: Attributes,
}

impl DeviceDescription {
    /// # Safety
    /// `raw` is a device description of `plugin` that stays valid during the call.
    pub(super) unsafe fn read(
        plugin: Plugin,
        raw: *mut sys::DeviceDescription,
    ) -> Result<DeviceDescription, Error> {
        let mut id = sys::DeviceDescriptionId::new();
        id.device_description = raw;
        let mut process = sys::DeviceDescriptionProcessIndex::new();
        process.device_description = raw;
        let mut kind = sys::DeviceDescriptionKind::new();
        kind.device_description = raw;
        let mut text = sys::DeviceDescriptionToString::new();
        text.device_description = raw;
        let mut attributes = sys::DeviceDescriptionAttributes::new();
        attributes.device_description = raw;
        // SAFETY: the caller's promise; strings and attributes live as long as the
        // description.
        unsafe {
            plugin.call(&mut id)?;
            plugin.call(&mut process)?;
            plugin.call(&mut kind)?;
            plugin.call(&mut text)?;
            plugin.call(&mut attributes)?;
            Ok(DeviceDescription {
                id: id.id,
                process_index: process.process_index,
                kind: value::text(kind.device_kind, kind.device_kind_size),
                text: value::text(text.to_string, text.to_string_size),
                attributes: value::read(attributes.attributes, attributes.num_attributes),
            })
        }
    }
}
