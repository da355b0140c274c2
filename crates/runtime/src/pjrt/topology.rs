//! Devices that need not exist, to compile for.

use std::fmt;
use std::ptr::NonNull;

use super::client::{Client, DeviceDescription};
use super::error::Error;
use super::executable::{Executable, program};
use super::options::CompileOptions;
use super::plugin::Plugin;
use super::sys;
use super::value::{self, Attributes, Value};

/// A description of devices: those of a client, or those of a name.
///
/// libtpu can bring the process down over a malformed name or program. Describe and
/// compile what is not known to be good in a child process.
pub struct Topology {
    raw: NonNull<sys::TopologyDescription>,
    plugin: Plugin,
    /// The client that owns the description; without one it is ours.
    owner: Option<Client>,
}

// SAFETY: topology descriptions are immutable, and may be destroyed on any thread.
unsafe impl Send for Topology {}
// SAFETY: as above.
unsafe impl Sync for Topology {}

impl Topology {
    /// Describes the devices that `plugin` knows by `name`: `v5p:2x2x1` of libtpu.
    ///
    /// libtpu takes the options `chips_per_host_bounds` (3 numbers), `wrap` (3 numbers,
    /// 1 where an axis is a ring; all 0 unless given, even where the slice wraps),
    /// `num_slices`, and `chip_config_name`.
    ///
    /// # Errors
    /// [`Error::Status`] when the plugin does not know the name or an option.
    pub fn create(
        plugin: Plugin,
        name: &str,
        options: &[(&str, Value)],
    ) -> Result<Topology, Error> {
        let options = value::lower(options);
        let mut args = sys::TopologyDescriptionCreate::new();
        args.topology_name = name.as_ptr().cast();
        args.topology_name_size = name.len();
        args.create_options = options.as_ptr();
        args.num_options = options.len();
        // SAFETY: name and options outlive the call.
        unsafe { plugin.call(&mut args) }?;
        let raw = NonNull::new(args.topology).ok_or_else(|| {
            Error::broken("PJRT_TopologyDescription_Create", "no topology came back")
        })?;
        Ok(Topology {
            raw,
            plugin,
            owner: None,
        })
    }

    /// The devices of a client.
    ///
    /// # Errors
    /// [`Error::Status`] when PJRT fails.
    pub fn of(client: &Client) -> Result<Topology, Error> {
        let mut args = sys::ClientTopologyDescription::new();
        args.client = client.as_ptr();
        // SAFETY: the client is live, and kept by the result, which it owns.
        unsafe { client.plugin().call(&mut args) }?;
        let raw = NonNull::new(args.topology).ok_or_else(|| {
            Error::broken("PJRT_Client_TopologyDescription", "no topology came back")
        })?;
        Ok(Topology {
            raw,
            plugin: client.plugin(),
            owner: Some(client.clone()),
        })
    }

    /// `cpu` or `tpu`.
    ///
    /// # Errors
    /// [`Error::Status`] when PJRT fails.
    pub fn platform(&self) -> Result<String, Error> {
        let mut args = sys::TopologyDescriptionPlatformName::new();
        args.topology = self.raw.as_ptr();
        // SAFETY: the topology is live, and so is its text until it is dropped.
        unsafe {
            self.plugin.call(&mut args)?;
            Ok(value::text(args.platform_name, args.platform_name_size))
        }
    }

    /// Free text: versions, build dates.
    ///
    /// # Errors
    /// [`Error::Status`] when PJRT fails.
    pub fn platform_version(&self) -> Result<String, Error> {
        let mut args = sys::TopologyDescriptionPlatformVersion::new();
        args.topology = self.raw.as_ptr();
        // SAFETY: as above.
        unsafe {
            self.plugin.call(&mut args)?;
            Ok(value::text(
                args.platform_version,
                args.platform_version_size,
            ))
        }
    }

    /// The devices, in the plugin's order, which need not be that of their ids.
    ///
    /// # Errors
    /// [`Error::Status`] when PJRT fails.
    pub fn devices(&self) -> Result<Vec<DeviceDescription>, Error> {
        let mut args = sys::TopologyDescriptionGetDeviceDescriptions::new();
        args.topology = self.raw.as_ptr();
        // SAFETY: the topology is live, and owns the descriptions.
        unsafe {
            self.plugin.call(&mut args)?;
            value::list(args.descriptions, args.num_descriptions)
                .iter()
                .map(|raw| DeviceDescription::read(self.plugin, *raw))
                .collect()
        }
    }

    /// What the plugin says of the whole.
    ///
    /// # Errors
    /// [`Error::Status`] when PJRT fails.
    pub fn attributes(&self) -> Result<Attributes, Error> {
        let mut args = sys::TopologyDescriptionAttributes::new();
        args.topology = self.raw.as_ptr();
        // SAFETY: the topology is live, and owns its attributes.
        unsafe {
            self.plugin.call(&mut args)?;
            Ok(value::read(args.attributes, args.num_attributes))
        }
    }

    /// The description as bytes, those of another machine's included; on a CPU they
    /// hold the processor's features.
    ///
    /// # Errors
    /// [`Error::Status`] when PJRT fails.
    pub fn serialize(&self) -> Result<Vec<u8>, Error> {
        let mut args = sys::TopologyDescriptionSerialize::new();
        args.topology = self.raw.as_ptr();
        // SAFETY: the topology is live; the bytes are copied before what holds them is
        // given back.
        unsafe {
            self.plugin.call(&mut args)?;
            let bytes = value::list(
                args.serialized_bytes.cast::<u8>(),
                args.serialized_bytes_size,
            )
            .to_vec();
            if let Some(delete) = args.serialized_topology_deleter {
                delete(args.serialized_topology);
            }
            Ok(bytes)
        }
    }

    /// A number for the topology; plugins of before 0.107 or so have none.
    ///
    /// # Errors
    /// [`Error::Missing`] where the plugin has none, [`Error::Status`] when PJRT fails.
    pub fn fingerprint(&self) -> Result<u64, Error> {
        let mut args = sys::TopologyDescriptionFingerprint::new();
        args.topology = self.raw.as_ptr();
        // SAFETY: the topology is live.
        unsafe { self.plugin.call(&mut args) }?;
        Ok(args.fingerprint)
    }

    /// Compiles StableHLO text or bytecode for these devices, whether they exist or not.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for options that contradict themselves,
    /// [`Error::Status`] with the compiler's text when the program is wrong.
    pub fn compile(&self, stablehlo: &[u8], options: &CompileOptions) -> Result<Executable, Error> {
        let options = options.encode()?;
        let program = program(stablehlo);
        let mut args = sys::Compile::new();
        args.topology = self.raw.as_ptr();
        args.program = &program;
        args.compile_options = options.as_ptr().cast();
        args.compile_options_size = options.len();
        if let Some(client) = &self.owner {
            args.client = client.as_ptr();
        }
        // SAFETY: topology, program and options outlive the call.
        unsafe {
            self.plugin.call(&mut args)?;
            Executable::own(self.plugin, args.executable, "PJRT_Compile")
        }
    }
}

impl Drop for Topology {
    fn drop(&mut self) {
        if self.owner.is_none() {
            let mut args = sys::TopologyDescriptionDestroy::new();
            args.topology = self.raw.as_ptr();
            // SAFETY: the description is ours and not used after this.
            unsafe { self.plugin.destroy(&mut args) };
        }
    }
}

impl fmt::Debug for Topology {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Topology")
            .field("plugin", &self.plugin)
            .finish_non_exhaustive()
    }
}
