//! The part of the PJRT C API that this crate calls.
//!
//! Layouts and slots follow header version 0.114. PJRT only ever appends: to the table
//! of functions, and to the argument structs, each of which begins with the size the
//! caller knows. A plugin refuses a struct shorter than its oldest supported form and
//! ignores what it does not know at the end, so these layouts serve older and newer
//! plugins alike (tried with 0.81, 0.115 and 0.117). Every struct's size, as PJRT
//! counts it (up to the end of its last field, without tail padding), is checked when
//! this file is compiled.

use std::ffi::{c_char, c_void};
use std::mem::{offset_of, size_of};
use std::ptr;

macro_rules! handles {
    ($($name:ident)*) => {$(
        #[doc = concat!("Opaque `PJRT_", stringify!($name), "`.")]
        #[repr(C)]
        pub struct $name {
            _opaque: [u8; 0],
            // The plugin may mutate the object behind a shared pointer, from any
            // thread, and it must not be moved.
            _marker: std::marker::PhantomData<(*mut u8, std::marker::PhantomPinned)>,
        }
    )*};
}

handles! {
    Buffer Client Device DeviceDescription Error Event Executable ExecuteContext
    LoadedExecutable Memory SerializedExecutable SerializedTopology TopologyDescription
}

/// A node in a plugin's list of extensions.
#[repr(C)]
pub struct ExtensionBase {
    /// Size of the extension's own struct.
    pub struct_size: usize,
    /// Which extension.
    pub kind: u32,
    /// The next node, or null.
    pub next: *mut ExtensionBase,
}

/// The version a plugin was built with.
#[repr(C)]
pub struct ApiVersion {
    /// Size of this struct.
    pub struct_size: usize,
    /// Unused.
    pub extension_start: *mut ExtensionBase,
    /// Changes when the interface breaks; 0 so far.
    pub major: i32,
    /// Grows with every addition.
    pub minor: i32,
}

/// What precedes the table of functions in `PJRT_Api`.
#[repr(C)]
pub struct ApiHeader {
    /// Size of the whole struct, table included.
    pub struct_size: usize,
    /// First extension, or null.
    pub extension_start: *mut ExtensionBase,
    /// The plugin's version.
    pub version: ApiVersion,
}

const _: () = assert!(size_of::<ExtensionBase>() == 24);
const _: () = assert!(size_of::<ApiHeader>() == 40);

/// Every function in the table takes one struct of arguments. Those that cannot fail
/// return nothing, which a caller must not read.
pub type Function = unsafe extern "C" fn(*mut c_void) -> *mut Error;

/// Types for which all bytes zero is a value.
///
/// # Safety
/// It must be one.
unsafe trait Zeroable {}
// SAFETY: plain integers.
unsafe impl Zeroable for i32 {}
// SAFETY: as above.
unsafe impl Zeroable for u32 {}
// SAFETY: as above.
unsafe impl Zeroable for i64 {}
// SAFETY: as above.
unsafe impl Zeroable for u64 {}
// SAFETY: as above.
unsafe impl Zeroable for usize {}
// SAFETY: false.
unsafe impl Zeroable for bool {}
// SAFETY: the null pointer.
unsafe impl<T> Zeroable for *const T {}
// SAFETY: the null pointer.
unsafe impl<T> Zeroable for *mut T {}
// SAFETY: `None`; function pointers have the null niche.
unsafe impl<A> Zeroable for Option<unsafe extern "C" fn(A)> {}
// SAFETY: as above.
unsafe impl<A, B> Zeroable for Option<unsafe extern "C" fn(A, B)> {}

const fn zeroable<T: Zeroable>() {}

/// Arguments of one PJRT function.
///
/// # Safety
/// `SLOT` is the function's place in the table of `PJRT_Api`, and the type is
/// `repr(C)` with the layout of that function's arguments.
pub unsafe trait Args {
    /// Place in the table of functions.
    const SLOT: usize;
    /// PJRT's name of the function.
    const NAME: &'static str;
}

macro_rules! structs {
    ($($(#[$doc:meta])* $name:ident: $size:literal { $($field:ident: $type:ty,)* })*) => {$(
        $(#[$doc])*
        #[repr(C)]
        #[allow(missing_docs)]
        pub struct $name {
            pub struct_size: usize,
            pub extension_start: *mut ExtensionBase,
            $(pub $field: $type,)*
        }

        impl $name {
            /// The size as PJRT counts it.
            pub const STRUCT_SIZE: usize = {
                #[allow(unused_mut)]
                let mut end = 2 * size_of::<usize>();
                $(
                    let field_end = offset_of!($name, $field) + size_of::<$type>();
                    if field_end > end {
                        end = field_end;
                    }
                )*
                end
            };

            /// The size set, everything else zero.
            #[allow(clippy::new_without_default)]
            pub fn new() -> $name {
                $(zeroable::<$type>();)*
                // SAFETY: every field is `Zeroable`, checked in the lines above.
                let mut value: $name = unsafe { std::mem::zeroed() };
                value.struct_size = Self::STRUCT_SIZE;
                value
            }
        }

        const _: () = assert!($name::STRUCT_SIZE == $size);
    )*};
}

macro_rules! functions {
    ($($slot:literal $c_name:ident $name:ident: $size:literal { $($field:ident: $type:ty,)* })*) => {
        structs! {$(
            #[doc = concat!("Arguments of `", stringify!($c_name), "`.")]
            $name: $size { $($field: $type,)* }
        )*}
        $(
            // SAFETY: slot and layout are those of header 0.114; the size is asserted.
            unsafe impl Args for $name {
                const SLOT: usize = $slot;
                const NAME: &'static str = stringify!($c_name);
            }
        )*
    };
}

/// What a [`NamedValue`] holds; `value_size` and `kind` say which and how many.
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(missing_docs)]
pub union NamedValueUnion {
    pub string: *const c_char,
    pub int64: i64,
    pub int64_list: *const i64,
    pub float: f32,
    pub boolean: bool,
}

// SAFETY: the null pointer is a value of the pointer members.
unsafe impl Zeroable for NamedValueUnion {}

/// `PJRT_NamedValue_Type`.
#[allow(missing_docs)]
pub mod named_value_kind {
    pub const STRING: u32 = 0;
    pub const INT64: u32 = 1;
    pub const INT64_LIST: u32 = 2;
    pub const FLOAT: u32 = 3;
    pub const BOOL: u32 = 4;
}

/// `PJRT_HostBufferSemantics`.
#[allow(missing_docs)]
pub mod host_buffer_semantics {
    pub const IMMUTABLE_ONLY_DURING_CALL: u32 = 0;
    pub const IMMUTABLE_ZERO_COPY: u32 = 2;
    pub const MUTABLE_ZERO_COPY: u32 = 3;
}

/// `PJRT_Buffer_MemoryLayout_Type_Tiled`.
pub const LAYOUT_TILED: u32 = 0;

structs! {
    /// An option or attribute.
    NamedValue: 56 {
        name: *const c_char,
        name_size: usize,
        kind: u32,
        value: NamedValueUnion,
        value_size: usize,
    }
    /// Code to compile, or room for code that comes back.
    Program: 48 {
        code: *mut c_char,
        code_size: usize,
        format: *const c_char,
        format_size: usize,
    }
    /// How dimensions lie in memory: an order, and tiles.
    ///
    /// PJRT nests this in a union with a shorter form by strides, which this crate does
    /// not use; the nested header is spelled out here.
    MemoryLayout: 76 {
        tiled_struct_size: usize,
        tiled_extension_start: *mut ExtensionBase,
        minor_to_major: *const i64,
        minor_to_major_size: usize,
        tile_dims: *const i64,
        tile_dim_sizes: *const usize,
        num_tiles: usize,
        kind: u32,
    }
    /// How to run a program.
    ExecuteOptions: 144 {
        send_callbacks: *mut c_void,
        recv_callbacks: *mut c_void,
        num_send_ops: usize,
        num_recv_ops: usize,
        launch_id: i32,
        non_donatable_input_indices: *const i64,
        num_non_donatable_input_indices: usize,
        context: *mut ExecuteContext,
        call_location: *const c_char,
        num_tasks: usize,
        task_ids: *mut i32,
        incarnation_ids: *mut i64,
        multi_slice_config: *mut c_void,
        use_major_to_minor_data_layout_for_callbacks: bool,
        hlo_output_callbacks: *mut c_void,
        num_hlo_output_callbacks: usize,
    }
}

/// Size of the tiled layout inside [`MemoryLayout`].
pub const TILED_LAYOUT_SIZE: usize = 56;

/// Handed to the function that [`BufferDonateWithControlDependency`] returns. It has no
/// field for extensions.
#[repr(C)]
#[allow(missing_docs)]
pub struct DependencyReady {
    pub struct_size: usize,
    pub callback_data: *mut c_void,
    pub error_code: u32,
    pub error_message: *const c_char,
    pub error_message_size: usize,
}

const _: () = assert!(size_of::<DependencyReady>() == 40);

/// Called when an event is ready; owns `error`.
pub type OnReady = unsafe extern "C" fn(error: *mut Error, user_arg: *mut c_void);

functions! {
    0 PJRT_Error_Destroy ErrorDestroy: 24 { error: *mut Error, }
    1 PJRT_Error_Message ErrorMessage: 40 {
        error: *const Error,
        message: *const c_char,
        message_size: usize,
    }
    2 PJRT_Error_GetCode ErrorGetCode: 28 { error: *const Error, code: u32, }
    3 PJRT_Plugin_Initialize PluginInitialize: 16 {}
    4 PJRT_Plugin_Attributes PluginAttributes: 32 {
        attributes: *const NamedValue,
        num_attributes: usize,
    }
    5 PJRT_Event_Destroy EventDestroy: 24 { event: *mut Event, }
    6 PJRT_Event_IsReady EventIsReady: 25 { event: *mut Event, is_ready: bool, }
    7 PJRT_Event_Error EventError: 24 { event: *mut Event, }
    8 PJRT_Event_Await EventAwait: 24 { event: *mut Event, }
    9 PJRT_Event_OnReady EventOnReady: 40 {
        event: *mut Event,
        callback: Option<OnReady>,
        user_arg: *mut c_void,
    }
    10 PJRT_Client_Create ClientCreate: 88 {
        create_options: *const NamedValue,
        num_options: usize,
        kv_get_callback: *mut c_void,
        kv_get_user_arg: *mut c_void,
        kv_put_callback: *mut c_void,
        kv_put_user_arg: *mut c_void,
        client: *mut Client,
        kv_try_get_callback: *mut c_void,
        kv_try_get_user_arg: *mut c_void,
    }
    11 PJRT_Client_Destroy ClientDestroy: 24 { client: *mut Client, }
    12 PJRT_Client_PlatformName ClientPlatformName: 40 {
        client: *mut Client,
        platform_name: *const c_char,
        platform_name_size: usize,
    }
    13 PJRT_Client_ProcessIndex ClientProcessIndex: 28 {
        client: *mut Client,
        process_index: i32,
    }
    14 PJRT_Client_PlatformVersion ClientPlatformVersion: 40 {
        client: *mut Client,
        platform_version: *const c_char,
        platform_version_size: usize,
    }
    15 PJRT_Client_Devices ClientDevices: 40 {
        client: *mut Client,
        devices: *const *mut Device,
        num_devices: usize,
    }
    16 PJRT_Client_AddressableDevices ClientAddressableDevices: 40 {
        client: *mut Client,
        devices: *const *mut Device,
        num_devices: usize,
    }
    20 PJRT_Client_Compile ClientCompile: 56 {
        client: *mut Client,
        program: *const Program,
        compile_options: *const c_char,
        compile_options_size: usize,
        executable: *mut LoadedExecutable,
    }
    22 PJRT_Client_BufferFromHostBuffer ClientBufferFromHostBuffer: 120 {
        client: *mut Client,
        data: *const c_void,
        element_type: u32,
        dims: *const i64,
        num_dims: usize,
        byte_strides: *const i64,
        num_byte_strides: usize,
        host_buffer_semantics: u32,
        device: *mut Device,
        memory: *mut Memory,
        device_layout: *mut MemoryLayout,
        done_with_host_buffer: *mut Event,
        buffer: *mut Buffer,
    }
    23 PJRT_DeviceDescription_Id DeviceDescriptionId: 28 {
        device_description: *mut DeviceDescription,
        id: i32,
    }
    24 PJRT_DeviceDescription_ProcessIndex DeviceDescriptionProcessIndex: 28 {
        device_description: *mut DeviceDescription,
        process_index: i32,
    }
    25 PJRT_DeviceDescription_Attributes DeviceDescriptionAttributes: 40 {
        device_description: *mut DeviceDescription,
        num_attributes: usize,
        attributes: *const NamedValue,
    }
    26 PJRT_DeviceDescription_Kind DeviceDescriptionKind: 40 {
        device_description: *mut DeviceDescription,
        device_kind: *const c_char,
        device_kind_size: usize,
    }
    28 PJRT_DeviceDescription_ToString DeviceDescriptionToString: 40 {
        device_description: *mut DeviceDescription,
        to_string: *const c_char,
        to_string_size: usize,
    }
    29 PJRT_Device_GetDescription DeviceGetDescription: 32 {
        device: *mut Device,
        device_description: *mut DeviceDescription,
    }
    31 PJRT_Device_LocalHardwareId DeviceLocalHardwareId: 28 {
        device: *mut Device,
        local_hardware_id: i32,
    }
    34 PJRT_Device_MemoryStats DeviceMemoryStats: 201 {
        device: *mut Device,
        bytes_in_use: i64,
        peak_bytes_in_use: i64,
        peak_bytes_in_use_is_set: bool,
        num_allocs: i64,
        num_allocs_is_set: bool,
        largest_alloc_size: i64,
        largest_alloc_size_is_set: bool,
        bytes_limit: i64,
        bytes_limit_is_set: bool,
        bytes_reserved: i64,
        bytes_reserved_is_set: bool,
        peak_bytes_reserved: i64,
        peak_bytes_reserved_is_set: bool,
        bytes_reservable_limit: i64,
        bytes_reservable_limit_is_set: bool,
        largest_free_block_bytes: i64,
        largest_free_block_bytes_is_set: bool,
        pool_bytes: i64,
        pool_bytes_is_set: bool,
        peak_pool_bytes: i64,
        peak_pool_bytes_is_set: bool,
        peak_allocated_bytes: i64,
        peak_allocated_bytes_is_set: bool,
    }
    40 PJRT_Executable_Destroy ExecutableDestroy: 24 { executable: *mut Executable, }
    41 PJRT_Executable_Name ExecutableName: 40 {
        executable: *mut Executable,
        executable_name: *const c_char,
        executable_name_size: usize,
    }
    44 PJRT_Executable_NumOutputs ExecutableNumOutputs: 32 {
        executable: *mut Executable,
        num_outputs: usize,
    }
    46 PJRT_Executable_GetCostAnalysis ExecutableGetCostAnalysis: 40 {
        executable: *mut Executable,
        num_properties: usize,
        properties: *const NamedValue,
    }
    48 PJRT_Executable_OptimizedProgram ExecutableOptimizedProgram: 32 {
        executable: *mut Executable,
        program: *mut Program,
    }
    49 PJRT_Executable_Serialize ExecutableSerialize: 56 {
        executable: *const Executable,
        serialized_bytes: *const c_char,
        serialized_bytes_size: usize,
        serialized_executable: *mut SerializedExecutable,
        serialized_executable_deleter: Option<unsafe extern "C" fn(*mut SerializedExecutable)>,
    }
    50 PJRT_LoadedExecutable_Destroy LoadedExecutableDestroy: 24 {
        executable: *mut LoadedExecutable,
    }
    51 PJRT_LoadedExecutable_GetExecutable LoadedExecutableGetExecutable: 32 {
        loaded_executable: *mut LoadedExecutable,
        executable: *mut Executable,
    }
    52 PJRT_LoadedExecutable_AddressableDevices LoadedExecutableAddressableDevices: 40 {
        executable: *mut LoadedExecutable,
        devices: *const *mut Device,
        num_devices: usize,
    }
    55 PJRT_LoadedExecutable_Execute LoadedExecutableExecute: 80 {
        executable: *mut LoadedExecutable,
        options: *mut ExecuteOptions,
        argument_lists: *const *const *mut Buffer,
        num_devices: usize,
        num_args: usize,
        output_lists: *const *mut *mut Buffer,
        device_complete_events: *mut *mut Event,
        execute_device: *mut Device,
    }
    56 PJRT_Executable_DeserializeAndLoad ExecutableDeserializeAndLoad: 72 {
        client: *mut Client,
        serialized_executable: *const c_char,
        serialized_executable_size: usize,
        loaded_executable: *mut LoadedExecutable,
        overridden_compile_options: *const c_char,
        overridden_compile_options_size: usize,
        load_options: *mut c_void,
    }
    58 PJRT_Buffer_Destroy BufferDestroy: 24 { buffer: *mut Buffer, }
    59 PJRT_Buffer_ElementType BufferElementType: 28 {
        buffer: *mut Buffer,
        element_type: u32,
    }
    60 PJRT_Buffer_Dimensions BufferDimensions: 40 {
        buffer: *mut Buffer,
        dims: *const i64,
        num_dims: usize,
    }
    64 PJRT_Buffer_OnDeviceSizeInBytes BufferOnDeviceSizeInBytes: 32 {
        buffer: *mut Buffer,
        on_device_size_in_bytes: usize,
    }
    65 PJRT_Buffer_Device BufferDevice: 32 { buffer: *mut Buffer, device: *mut Device, }
    67 PJRT_Buffer_Delete BufferDelete: 24 { buffer: *mut Buffer, }
    68 PJRT_Buffer_IsDeleted BufferIsDeleted: 25 { buffer: *mut Buffer, is_deleted: bool, }
    69 PJRT_Buffer_CopyToDevice BufferCopyToDevice: 40 {
        buffer: *mut Buffer,
        dst_device: *mut Device,
        dst_buffer: *mut Buffer,
    }
    70 PJRT_Buffer_ToHostBuffer BufferToHostBuffer: 56 {
        src: *mut Buffer,
        host_layout: *mut MemoryLayout,
        dst: *mut c_void,
        dst_size: usize,
        event: *mut Event,
    }
    71 PJRT_Buffer_IsOnCpu BufferIsOnCpu: 25 { buffer: *mut Buffer, is_on_cpu: bool, }
    72 PJRT_Buffer_ReadyEvent BufferReadyEvent: 32 { buffer: *mut Buffer, event: *mut Event, }
    73 PJRT_Buffer_UnsafePointer BufferUnsafePointer: 32 {
        buffer: *mut Buffer,
        buffer_pointer: usize,
    }
    74 PJRT_Buffer_IncreaseExternalReferenceCount BufferIncreaseExternalReferenceCount: 24 {
        buffer: *mut Buffer,
    }
    75 PJRT_Buffer_DecreaseExternalReferenceCount BufferDecreaseExternalReferenceCount: 24 {
        buffer: *mut Buffer,
    }
    82 PJRT_TopologyDescription_Create TopologyDescriptionCreate: 56 {
        topology_name: *const c_char,
        topology_name_size: usize,
        create_options: *const NamedValue,
        num_options: usize,
        topology: *mut TopologyDescription,
    }
    83 PJRT_TopologyDescription_Destroy TopologyDescriptionDestroy: 24 {
        topology: *mut TopologyDescription,
    }
    84 PJRT_TopologyDescription_PlatformName TopologyDescriptionPlatformName: 40 {
        topology: *mut TopologyDescription,
        platform_name: *const c_char,
        platform_name_size: usize,
    }
    85 PJRT_TopologyDescription_PlatformVersion TopologyDescriptionPlatformVersion: 40 {
        topology: *mut TopologyDescription,
        platform_version: *const c_char,
        platform_version_size: usize,
    }
    86 PJRT_TopologyDescription_GetDeviceDescriptions TopologyDescriptionGetDeviceDescriptions: 40 {
        topology: *mut TopologyDescription,
        descriptions: *const *mut DeviceDescription,
        num_descriptions: usize,
    }
    87 PJRT_TopologyDescription_Serialize TopologyDescriptionSerialize: 56 {
        topology: *mut TopologyDescription,
        serialized_bytes: *const c_char,
        serialized_bytes_size: usize,
        serialized_topology: *mut SerializedTopology,
        serialized_topology_deleter: Option<unsafe extern "C" fn(*mut SerializedTopology)>,
    }
    88 PJRT_TopologyDescription_Attributes TopologyDescriptionAttributes: 40 {
        topology: *mut TopologyDescription,
        attributes: *const NamedValue,
        num_attributes: usize,
    }
    89 PJRT_Compile Compile: 64 {
        topology: *const TopologyDescription,
        program: *const Program,
        compile_options: *const c_char,
        compile_options_size: usize,
        client: *mut Client,
        executable: *mut Executable,
    }
    90 PJRT_Executable_OutputElementTypes ExecutableOutputElementTypes: 40 {
        executable: *mut Executable,
        output_types: *mut u32,
        num_output_types: usize,
    }
    91 PJRT_Executable_OutputDimensions ExecutableOutputDimensions: 48 {
        executable: *mut Executable,
        num_outputs: usize,
        dims: *const i64,
        dim_sizes: *const usize,
    }
    94 PJRT_Executable_Fingerprint ExecutableFingerprint: 40 {
        executable: *mut Executable,
        executable_fingerprint: *const c_char,
        executable_fingerprint_size: usize,
    }
    95 PJRT_Client_TopologyDescription ClientTopologyDescription: 32 {
        client: *mut Client,
        topology: *mut TopologyDescription,
    }
    96 PJRT_Executable_GetCompiledMemoryStats ExecutableGetCompiledMemoryStats: 144 {
        executable: *mut Executable,
        generated_code_size_in_bytes: i64,
        argument_size_in_bytes: i64,
        output_size_in_bytes: i64,
        alias_size_in_bytes: i64,
        temp_size_in_bytes: i64,
        host_generated_code_size_in_bytes: i64,
        host_argument_size_in_bytes: i64,
        host_output_size_in_bytes: i64,
        host_alias_size_in_bytes: i64,
        host_temp_size_in_bytes: i64,
        peak_memory_in_bytes: i64,
        total_size_in_bytes: i64,
        total_allocation_bytes: i64,
        indefinite_allocations: i64,
        peak_unpadded_heap_bytes: i64,
    }
    125 PJRT_Buffer_DonateWithControlDependency BufferDonateWithControlDependency: 48 {
        buffer: *mut Buffer,
        callback_data: *mut c_void,
        dependency_ready_callback: Option<unsafe extern "C" fn(*mut DependencyReady)>,
        out_buffer: *mut Buffer,
    }
    133 PJRT_TopologyDescription_Fingerprint TopologyDescriptionFingerprint: 32 {
        topology: *mut TopologyDescription,
        fingerprint: u64,
    }
}

impl MemoryLayout {
    /// Dense and row-major; `minor_to_major` counts down to 0 and must outlive the use.
    pub fn dense(minor_to_major: &[i64]) -> MemoryLayout {
        let mut layout = MemoryLayout::new();
        layout.tiled_struct_size = TILED_LAYOUT_SIZE;
        layout.tiled_extension_start = ptr::null_mut();
        layout.minor_to_major = minor_to_major.as_ptr();
        layout.minor_to_major_size = minor_to_major.len();
        layout.kind = LAYOUT_TILED;
        layout
    }
}
