//! Compiled programs.

use std::fmt;
use std::ptr::{self, NonNull};

use smallvec::SmallVec;

use super::buffer::Buffer;
use super::client::{Client, Device};
use super::element::ElementType;
use super::error::Error;
use super::event::Event;
use super::options::CompileOptions;
use super::plugin::Plugin;
use super::sys;
use super::value::{self, Attributes};

const FORMAT: &str = "mlir";

/// PJRT's form of a StableHLO program, which the result points into.
pub(super) fn program(stablehlo: &[u8]) -> sys::Program {
    let mut program = sys::Program::new();
    // PJRT reads the code; the pointer is mutable because the struct also serves to
    // bring code back.
    program.code = stablehlo.as_ptr().cast_mut().cast();
    program.code_size = stablehlo.len();
    program.format = FORMAT.as_ptr().cast();
    program.format_size = FORMAT.len();
    program
}

/// Element type and dimensions of an array.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Type of the elements; `None` for what no buffer can hold, a token for example.
    pub element: Option<ElementType>,
    /// Dimensions, major to minor.
    pub dims: SmallVec<[i64; 6]>,
}

/// Memory a program needs on its device, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ProgramMemory {
    /// Code.
    pub generated_code: i64,
    /// Arguments.
    pub arguments: i64,
    /// Results.
    pub outputs: i64,
    /// Arguments whose memory becomes that of results.
    pub aliased: i64,
    /// Scratch.
    pub temporaries: i64,
    /// Most in use at one time; 0 where the plugin does not say.
    pub peak: i64,
}

/// A compiled program. It may be for devices that do not exist.
pub struct Executable {
    raw: NonNull<sys::Executable>,
    plugin: Plugin,
}

// SAFETY: executables are immutable and may be used and destroyed on any thread.
unsafe impl Send for Executable {}
// SAFETY: as above.
unsafe impl Sync for Executable {}

impl Executable {
    /// # Safety
    /// `raw` is null or an executable of `plugin` that the caller owns.
    pub(super) unsafe fn own(
        plugin: Plugin,
        raw: *mut sys::Executable,
        function: &'static str,
    ) -> Result<Executable, Error> {
        let raw =
            NonNull::new(raw).ok_or_else(|| Error::broken(function, "no executable came back"))?;
        Ok(Executable { raw, plugin })
    }

    /// The module's name.
    ///
    /// # Errors
    /// [`Error::Status`] when PJRT fails.
    pub fn name(&self) -> Result<String, Error> {
        let mut args = sys::ExecutableName::new();
        args.executable = self.raw.as_ptr();
        // SAFETY: the executable is live, and so is its name.
        unsafe {
            self.plugin.call(&mut args)?;
            Ok(value::text(args.executable_name, args.executable_name_size))
        }
    }

    /// What each device returns, in order.
    ///
    /// # Errors
    /// [`Error::Status`] when PJRT fails.
    pub fn outputs(&self) -> Result<Vec<Shape>, Error> {
        let mut types = sys::ExecutableOutputElementTypes::new();
        types.executable = self.raw.as_ptr();
        let mut dims = sys::ExecutableOutputDimensions::new();
        dims.executable = self.raw.as_ptr();
        // SAFETY: the executable is live and owns both lists.
        let (types, sizes, mut all) = unsafe {
            self.plugin.call(&mut types)?;
            self.plugin.call(&mut dims)?;
            let sizes = value::list(dims.dim_sizes, dims.num_outputs);
            let total = sizes.iter().sum();
            (
                value::list(types.output_types, types.num_output_types),
                sizes,
                value::list(dims.dims, total),
            )
        };
        if types.len() != sizes.len() {
            return Err(Error::broken(
                "PJRT_Executable_OutputDimensions",
                "numbers of output types and output dimensions differ",
            ));
        }
        let mut shapes = Vec::with_capacity(types.len());
        for (raw, rank) in types.iter().zip(sizes) {
            let (own, rest) = all.split_at(*rank);
            all = rest;
            shapes.push(Shape {
                element: ElementType::from_raw(*raw),
                dims: SmallVec::from_slice(own),
            });
        }
        Ok(shapes)
    }

    /// Number of arrays each device returns.
    ///
    /// # Errors
    /// [`Error::Status`] when PJRT fails.
    pub fn num_outputs(&self) -> Result<usize, Error> {
        let mut args = sys::ExecutableNumOutputs::new();
        args.executable = self.raw.as_ptr();
        // SAFETY: the executable is live.
        unsafe { self.plugin.call(&mut args) }?;
        Ok(args.num_outputs)
    }

    /// The plugin's fingerprint of the program. libtpu's does not change with the device
    /// assignment.
    ///
    /// # Errors
    /// [`Error::Status`] where the plugin has none.
    pub fn fingerprint(&self) -> Result<Vec<u8>, Error> {
        let mut args = sys::ExecutableFingerprint::new();
        args.executable = self.raw.as_ptr();
        // SAFETY: the executable is live and owns the bytes.
        unsafe {
            self.plugin.call(&mut args)?;
            let bytes = args.executable_fingerprint.cast::<u8>();
            Ok(value::list(bytes, args.executable_fingerprint_size).to_vec())
        }
    }

    /// The compiler's estimates: `flops`, `bytes accessed` and others. They know no
    /// interconnect.
    ///
    /// # Errors
    /// [`Error::Status`] where the plugin has none.
    pub fn cost_analysis(&self) -> Result<Attributes, Error> {
        let mut args = sys::ExecutableGetCostAnalysis::new();
        args.executable = self.raw.as_ptr();
        // SAFETY: the executable is live and owns the properties.
        unsafe {
            self.plugin.call(&mut args)?;
            Ok(value::read(args.properties, args.num_properties))
        }
    }

    /// Memory needed to run.
    ///
    /// # Errors
    /// [`Error::Status`] where the plugin does not say.
    pub fn memory(&self) -> Result<ProgramMemory, Error> {
        let mut args = sys::ExecutableGetCompiledMemoryStats::new();
        args.executable = self.raw.as_ptr();
        // SAFETY: the executable is live.
        unsafe { self.plugin.call(&mut args) }?;
        Ok(ProgramMemory {
            generated_code: args.generated_code_size_in_bytes,
            arguments: args.argument_size_in_bytes,
            outputs: args.output_size_in_bytes,
            aliased: args.alias_size_in_bytes,
            temporaries: args.temp_size_in_bytes,
            peak: args.peak_memory_in_bytes,
        })
    }

    /// The program after optimisation: its format, `hlo` or `hlo_with_config` for
    /// example, and the bytes, a serialized protobuf in those formats.
    ///
    /// # Errors
    /// [`Error::Status`] where the plugin does not give it out.
    pub fn optimized_program(&self) -> Result<(String, Vec<u8>), Error> {
        let mut program = sys::Program::new();
        let mut args = sys::ExecutableOptimizedProgram::new();
        args.executable = self.raw.as_ptr();
        args.program = &mut program;
        // SAFETY: the executable is live; without room for code PJRT tells its size.
        unsafe { self.plugin.call(&mut args) }?;
        let size = program.code_size;
        let mut code = vec![0u8; size];
        let mut program = sys::Program::new();
        program.code = code.as_mut_ptr().cast();
        program.code_size = size;
        args.program = &mut program;
        // SAFETY: the executable is live, and there is room for the size it gave. The
        // format is the executable's.
        unsafe {
            self.plugin.call(&mut args)?;
            code.truncate(program.code_size);
            Ok((value::text(program.format, program.format_size), code))
        }
    }

    /// The program as bytes, for this very plugin: one of another version may load them
    /// and compute garbage.
    ///
    /// # Errors
    /// [`Error::Status`] when PJRT fails.
    pub fn serialize(&self) -> Result<Vec<u8>, Error> {
        let mut args = sys::ExecutableSerialize::new();
        args.executable = self.raw.as_ptr();
        // SAFETY: the executable is live; the bytes are copied before what holds them is
        // given back.
        unsafe {
            self.plugin.call(&mut args)?;
            let bytes = value::list(
                args.serialized_bytes.cast::<u8>(),
                args.serialized_bytes_size,
            )
            .to_vec();
            if let Some(delete) = args.serialized_executable_deleter {
                delete(args.serialized_executable);
            }
            Ok(bytes)
        }
    }
}

impl Drop for Executable {
    fn drop(&mut self) {
        let mut args = sys::ExecutableDestroy::new();
        args.executable = self.raw.as_ptr();
        // SAFETY: the executable is ours and not used after this.
        unsafe { self.plugin.destroy(&mut args) };
    }
}

impl fmt::Debug for Executable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Executable")
            .field("name", &self.name())
            .finish_non_exhaustive()
    }
}

/// Results of one device.
pub type Outputs = SmallVec<[Buffer; 2]>;

/// A program under way on one device.
#[derive(Debug)]
pub struct Execution {
    /// What it returns; usable at once as arguments of other programs.
    pub outputs: Outputs,
    /// Ready when the program has ended.
    pub complete: Event,
}

/// How to run a program.
#[derive(Clone, Copy, Debug, Default)]
pub struct LaunchOptions<'a> {
    /// Arguments, by index, whose memory the program must not take over although it was
    /// compiled to.
    pub keep: &'a [i64],
    /// Marks the executions of one launch on many hosts; the runtime can then notice
    /// hosts that launch in different orders. 0 for none.
    pub launch_id: i32,
}

/// A compiled program on devices of this process, ready to run.
pub struct LoadedExecutable {
    raw: NonNull<sys::LoadedExecutable>,
    executable: Executable,
    devices: Vec<Device>,
    num_outputs: usize,
    // Last, to be dropped last.
    client: Client,
}

// SAFETY: loaded executables may be used and destroyed on any thread.
unsafe impl Send for LoadedExecutable {}
// SAFETY: as above.
unsafe impl Sync for LoadedExecutable {}

impl Client {
    /// Compiles StableHLO text or bytecode for this client's devices.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for options that contradict themselves,
    /// [`Error::Status`] with the compiler's text when the program is wrong.
    pub fn compile(
        &self,
        stablehlo: &[u8],
        options: &CompileOptions,
    ) -> Result<LoadedExecutable, Error> {
        let options = options.encode()?;
        let program = program(stablehlo);
        let mut args = sys::ClientCompile::new();
        args.client = self.as_ptr();
        args.program = &program;
        args.compile_options = options.as_ptr().cast();
        args.compile_options_size = options.len();
        // SAFETY: client, program and options outlive the call, which hands over the
        // executable.
        unsafe {
            self.plugin().call(&mut args)?;
            LoadedExecutable::own(self, args.executable, "PJRT_Client_Compile")
        }
    }

    /// Loads what [`Executable::serialize`] gave.
    ///
    /// # Safety
    /// `bytes` came, unchanged, from a program that the same version of the same plugin
    /// compiled for the same kind of device: plugins do not check, and run what they get.
    ///
    /// # Errors
    /// [`Error::Status`] when the plugin refuses them.
    pub unsafe fn deserialize(&self, bytes: &[u8]) -> Result<LoadedExecutable, Error> {
        let mut args = sys::ExecutableDeserializeAndLoad::new();
        args.client = self.as_ptr();
        args.serialized_executable = bytes.as_ptr().cast();
        args.serialized_executable_size = bytes.len();
        // SAFETY: client and bytes outlive the call; the caller answers for the bytes.
        unsafe {
            self.plugin().call(&mut args)?;
            let function = "PJRT_Executable_DeserializeAndLoad";
            LoadedExecutable::own(self, args.loaded_executable, function)
        }
    }
}

impl LoadedExecutable {
    /// # Safety
    /// `raw` is null or a loaded executable of `client` that the caller owns.
    unsafe fn own(
        client: &Client,
        raw: *mut sys::LoadedExecutable,
        function: &'static str,
    ) -> Result<LoadedExecutable, Error> {
        struct Guard(Plugin, NonNull<sys::LoadedExecutable>);
        impl Drop for Guard {
            fn drop(&mut self) {
                // SAFETY: the executable is ours, and nothing else has it yet.
                unsafe { destroy(self.0, self.1) };
            }
        }

        let raw =
            NonNull::new(raw).ok_or_else(|| Error::broken(function, "no executable came back"))?;
        let plugin = client.plugin();
        let guard = Guard(plugin, raw);
        let mut inner = sys::LoadedExecutableGetExecutable::new();
        inner.loaded_executable = raw.as_ptr();
        let mut devices = sys::LoadedExecutableAddressableDevices::new();
        devices.executable = raw.as_ptr();
        // SAFETY: the executable is live; the inner one comes with ownership, and the
        // devices are the client's.
        let (executable, devices) = unsafe {
            plugin.call(&mut inner)?;
            let executable = Executable::own(
                plugin,
                inner.executable,
                "PJRT_LoadedExecutable_GetExecutable",
            )?;
            plugin.call(&mut devices)?;
            let devices = value::list(devices.devices, devices.num_devices)
                .iter()
                .filter_map(|device| client.device(*device))
                .collect();
            (executable, devices)
        };
        let num_outputs = executable.num_outputs()?;
        std::mem::forget(guard);
        Ok(LoadedExecutable {
            raw,
            client: client.clone(),
            executable,
            devices,
            num_outputs,
        })
    }

    /// The program itself: its outputs, costs, bytes.
    pub fn executable(&self) -> &Executable {
        &self.executable
    }

    /// The client.
    #[inline]
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// The devices of this process on which the program runs, in the order in which
    /// [`LoadedExecutable::execute_all`] wants their arguments.
    pub fn devices(&self) -> &[Device] {
        &self.devices
    }

    /// Number of arrays each device returns.
    #[inline]
    pub fn num_outputs(&self) -> usize {
        self.num_outputs
    }

    /// PJRT's handle.
    #[inline]
    pub fn as_ptr(&self) -> *mut sys::LoadedExecutable {
        self.raw.as_ptr()
    }

    /// Starts the program on its one device.
    ///
    /// Arguments that the program was compiled to take over are gone afterwards, unless
    /// `options` keeps them.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when the program has several devices here or an
    /// argument belongs to another client; [`Error::Status`] when PJRT refuses the
    /// arguments. Failures while the program runs come from the event, and from the use
    /// of what it returns.
    #[inline]
    pub fn execute(
        &self,
        arguments: &[&Buffer],
        options: LaunchOptions<'_>,
    ) -> Result<Execution, Error> {
        if self.devices.len() != 1 {
            return Err(self.wrong_device_count(1));
        }
        let mut pointers = SmallVec::<[*mut sys::Buffer; 8]>::new();
        self.collect(arguments, &mut pointers)?;
        let mut outputs = SmallVec::<[*mut sys::Buffer; 2]>::new();
        outputs.resize(self.num_outputs, ptr::null_mut());
        let mut event = ptr::null_mut();
        // SAFETY: one device, and room for its outputs and event.
        unsafe {
            self.launch(
                &[pointers.as_ptr()],
                arguments.len(),
                &[outputs.as_mut_ptr()],
                &mut event,
                options,
            )?;
            self.take(&outputs, event)
        }
    }

    /// Starts the program on every device of this process that it was compiled for,
    /// `arguments` giving each device's, in the order of [`LoadedExecutable::devices`].
    ///
    /// # Errors
    /// As [`LoadedExecutable::execute`].
    pub fn execute_all(
        &self,
        arguments: &[&[&Buffer]],
        options: LaunchOptions<'_>,
    ) -> Result<Vec<Execution>, Error> {
        let devices = self.devices.len();
        if arguments.len() != devices || devices == 0 {
            return Err(self.wrong_device_count(arguments.len()));
        }
        let count = arguments[0].len();
        if let Some(other) = arguments.iter().find(|list| list.len() != count) {
            return Err(Error::argument(
                "arguments",
                format!("expected {count} for every device, got {}", other.len()),
            ));
        }
        let mut pointers = SmallVec::<[*mut sys::Buffer; 8]>::new();
        for list in arguments {
            self.collect(list, &mut pointers)?;
        }
        let lists: Vec<_> = (0..devices)
            .map(|device| pointers[device * count..].as_ptr())
            .collect();
        let mut outputs: Vec<*mut sys::Buffer> = vec![ptr::null_mut(); devices * self.num_outputs];
        let first = outputs.as_mut_ptr();
        let rooms: Vec<_> = (0..devices)
            .map(|device| first.wrapping_add(device * self.num_outputs))
            .collect();
        let mut events = vec![ptr::null_mut(); devices];
        // SAFETY: as many lists, rooms and events as devices.
        unsafe {
            self.launch(&lists, count, &rooms, events.as_mut_ptr(), options)?;
        }
        let mut executions = Vec::with_capacity(devices);
        let mut failed = None;
        for (device, event) in events.into_iter().enumerate() {
            let outputs = &outputs[device * self.num_outputs..][..self.num_outputs];
            // SAFETY: the launch succeeded, and each output and event is taken once.
            match unsafe { self.take(outputs, event) } {
                Ok(execution) => executions.push(execution),
                Err(error) => failed = Some(error),
            }
        }
        match failed {
            Some(error) => Err(error),
            None => Ok(executions),
        }
    }

    #[inline]
    fn collect(
        &self,
        arguments: &[&Buffer],
        pointers: &mut SmallVec<[*mut sys::Buffer; 8]>,
    ) -> Result<(), Error> {
        for (index, buffer) in arguments.iter().enumerate() {
            if !buffer.client().is(&self.client) {
                return Err(Error::argument(
                    "arguments",
                    format!("argument {index} belongs to another client than the program"),
                ));
            }
            pointers.push(buffer.as_ptr());
        }
        Ok(())
    }

    #[cold]
    fn wrong_device_count(&self, given: usize) -> Error {
        let expected = self.devices.len();
        Error::argument(
            "arguments",
            format!("expected those of {expected} devices of this process, got {given}"),
        )
    }

    /// # Safety
    /// `lists` holds, for each device, the address of `count` live buffers of this
    /// client; `rooms`, for each, that of room for the outputs; `events` that of room
    /// for one event a device.
    #[inline]
    unsafe fn launch(
        &self,
        lists: &[*const *mut sys::Buffer],
        count: usize,
        rooms: &[*mut *mut sys::Buffer],
        events: *mut *mut sys::Event,
        options: LaunchOptions<'_>,
    ) -> Result<(), Error> {
        let mut execute_options = sys::ExecuteOptions::new();
        execute_options.launch_id = options.launch_id;
        execute_options.non_donatable_input_indices = options.keep.as_ptr();
        execute_options.num_non_donatable_input_indices = options.keep.len();
        let mut args = sys::LoadedExecutableExecute::new();
        args.executable = self.as_ptr();
        args.options = &mut execute_options;
        args.argument_lists = lists.as_ptr();
        args.num_devices = lists.len();
        args.num_args = count;
        args.output_lists = rooms.as_ptr();
        args.device_complete_events = events;
        // SAFETY: the caller's promise; options and lists outlive the call.
        unsafe { self.client.plugin().call(&mut args) }
    }

    /// # Safety
    /// `outputs` and `event` are what a successful launch wrote for one device, not
    /// taken before.
    #[inline]
    unsafe fn take(
        &self,
        outputs: &[*mut sys::Buffer],
        event: *mut sys::Event,
    ) -> Result<Execution, Error> {
        let function = "PJRT_LoadedExecutable_Execute";
        // SAFETY: the caller's promise; each pointer is owned from here on.
        let outputs: Outputs = unsafe {
            outputs
                .iter()
                .filter_map(|raw| NonNull::new(*raw))
                .map(|raw| Buffer::own(&self.client, raw))
                .collect()
        };
        let event = NonNull::new(event)
            .ok_or_else(|| Error::broken(function, "no completion event came back"))?;
        // SAFETY: as above.
        let complete = unsafe { Event::own(&self.client, event) };
        if outputs.len() != self.num_outputs {
            return Err(Error::broken(function, "an output is missing"));
        }
        Ok(Execution { outputs, complete })
    }
}

/// # Safety
/// `raw` is a loaded executable of `plugin` that the caller owns.
unsafe fn destroy(plugin: Plugin, raw: NonNull<sys::LoadedExecutable>) {
    let mut args = sys::LoadedExecutableDestroy::new();
    args.executable = raw.as_ptr();
    // SAFETY: the caller's promise. Executions under way keep what they need.
    unsafe { plugin.destroy(&mut args) };
}

impl Drop for LoadedExecutable {
    fn drop(&mut self) {
        // SAFETY: the executable is ours and not used after this.
        unsafe { destroy(self.client.plugin(), self.raw) };
    }
}

impl fmt::Debug for LoadedExecutable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoadedExecutable")
            .field("name", &self.executable.name())
            .field("devices", &self.devices)
            .finish_non_exhaustive()
    }
}
