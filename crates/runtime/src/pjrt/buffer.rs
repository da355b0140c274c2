//! Memory of a device.

use std::ffi::c_void;
use std::fmt;
use std::marker::PhantomData;
use std::ops::Deref;
use std::ptr::{self, NonNull};
use std::slice;

use smallvec::SmallVec;

use super::client::{Client, Device};
use super::element::ElementType;
use super::error::{Code, Error};
use super::event::Event;
use super::plugin::Plugin;
use super::sys::{self, host_buffer_semantics};
use super::value;

/// An array on a device. It may still be under way: a buffer is usable as soon as the
/// work that fills it has been started.
pub struct Buffer {
    raw: NonNull<sys::Buffer>,
    client: Client,
    /// Whether the memory is the host's, and others may be reading it.
    shared: bool,
}

// SAFETY: PJRT's buffers may be used and destroyed on any thread.
unsafe impl Send for Buffer {}
// SAFETY: as above.
unsafe impl Sync for Buffer {}

/// Host memory that a buffer may use in place.
///
/// # Safety
/// `bytes` gives the same memory every time, wherever the owner itself moves, and the
/// memory stays valid until the owner is dropped. Until then nobody writes to it, and if
/// `MUTABLE`, nobody else reads it either.
pub unsafe trait HostMemory: Send + 'static {
    /// Whether programs may take the memory over and write to it.
    const MUTABLE: bool;

    /// Address and length.
    fn bytes(&self) -> (*const u8, usize);
}

// SAFETY: a vector's memory is on the heap, and ours alone.
unsafe impl HostMemory for Vec<u8> {
    const MUTABLE: bool = true;

    fn bytes(&self) -> (*const u8, usize) {
        (self.as_ptr(), self.len())
    }
}

// SAFETY: shared, so nobody writes; on the heap.
unsafe impl HostMemory for std::sync::Arc<[u8]> {
    const MUTABLE: bool = false;

    fn bytes(&self) -> (*const u8, usize) {
        (self.as_ptr(), self.len())
    }
}

/// A buffer made of host memory.
#[derive(Debug)]
pub struct Imported {
    /// The buffer.
    pub buffer: Buffer,
    /// Whether it uses the memory itself; false when the plugin copied.
    pub aliased: bool,
}

/// Bytes of a row-major array in host memory, or what is wrong with its dimensions.
fn host_bytes(element: ElementType, dims: &[i64]) -> Result<usize, Error> {
    dims.iter()
        .try_fold(element.size(), |bytes, &dim| {
            usize::try_from(dim).ok()?.checked_mul(bytes)
        })
        .filter(|&bytes| isize::try_from(bytes).is_ok())
        .ok_or_else(|| {
            Error::argument(
                "dims",
                format!("expected dimensions of an array, got {dims:?}"),
            )
        })
}

impl Client {
    /// Copies a row-major array to `device`. The call returns when `data` is no longer
    /// needed.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when `data` has another length than the array, or the
    /// device belongs to another client; [`Error::Status`] when PJRT fails.
    pub fn buffer_from_host(
        &self,
        data: &[u8],
        element: ElementType,
        dims: &[i64],
        device: &Device,
    ) -> Result<Buffer, Error> {
        let semantics = host_buffer_semantics::IMMUTABLE_ONLY_DURING_CALL;
        // SAFETY: `data` outlives the call, which is all these semantics ask for.
        let (buffer, _done) =
            unsafe { self.place(data.as_ptr(), data.len(), element, dims, device, semantics) }?;
        Ok(buffer)
    }

    /// Makes a row-major array on `device` of memory of the host, in place where the
    /// plugin can: XLA's CPU plugins need an address divisible by 64, and otherwise copy
    /// without a word. `memory` is dropped when the plugin no longer needs it, which may
    /// be on one of its threads.
    ///
    /// # Errors
    /// As [`Client::buffer_from_host`].
    pub fn import<M: HostMemory>(
        &self,
        memory: M,
        element: ElementType,
        dims: &[i64],
        device: &Device,
    ) -> Result<Imported, Error> {
        let semantics = if M::MUTABLE {
            host_buffer_semantics::MUTABLE_ZERO_COPY
        } else {
            host_buffer_semantics::IMMUTABLE_ZERO_COPY
        };
        let (address, length) = memory.bytes();
        // SAFETY: `memory` keeps the bytes valid until `done` is ready.
        let made = unsafe { self.place(address, length, element, dims, device, semantics) };
        let (mut buffer, done) = made?;
        match done {
            Some(done) => {
                // When PJRT takes no callback, it is not known when the memory is free.
                let memory = std::mem::ManuallyDrop::new(memory);
                done.on_ready(move |_| drop(std::mem::ManuallyDrop::into_inner(memory)))?;
            }
            None => std::mem::forget(memory),
        }
        let aliased = length > 0 && buffer.address().is_ok_and(|own| own == address as usize);
        buffer.shared = aliased && !M::MUTABLE;
        Ok(Imported { buffer, aliased })
    }

    /// # Safety
    /// `length` bytes at `address` stay valid for as long as `semantics` ask for.
    unsafe fn place(
        &self,
        address: *const u8,
        length: usize,
        element: ElementType,
        dims: &[i64],
        device: &Device,
        semantics: u32,
    ) -> Result<(Buffer, Option<Event>), Error> {
        let expected = host_bytes(element, dims)?;
        if length != expected {
            return Err(Error::argument(
                "data",
                format!(
                    "expected {expected} bytes for {} {dims:?}, got {length}",
                    element.name()
                ),
            ));
        }
        if !device.client().is(self) {
            return Err(Error::argument("device", "it belongs to another client"));
        }
        let mut args = sys::ClientBufferFromHostBuffer::new();
        args.client = self.as_ptr();
        args.data = address.cast();
        args.element_type = element.raw();
        args.dims = dims.as_ptr();
        args.num_dims = dims.len();
        args.host_buffer_semantics = semantics;
        args.device = device.as_ptr();
        // SAFETY: client and device are live, the data is as long as the array, and the
        // caller answers for its lifetime. Buffer and event are handed over.
        unsafe {
            self.plugin().call(&mut args)?;
            let done = NonNull::new(args.done_with_host_buffer).map(|raw| Event::own(self, raw));
            let raw = NonNull::new(args.buffer).ok_or_else(|| {
                Error::broken("PJRT_Client_BufferFromHostBuffer", "no buffer came back")
            })?;
            Ok((Buffer::own(self, raw), done))
        }
    }
}

impl Buffer {
    /// # Safety
    /// `raw` is a buffer of `client` that the caller owns.
    #[inline]
    pub(super) unsafe fn own(client: &Client, raw: NonNull<sys::Buffer>) -> Buffer {
        Buffer {
            raw,
            client: client.clone(),
            shared: false,
        }
    }

    /// The client.
    #[inline]
    pub fn client(&self) -> &Client {
        &self.client
    }

    fn plugin(&self) -> Plugin {
        self.client.plugin()
    }

    /// PJRT's handle.
    #[inline]
    pub fn as_ptr(&self) -> *mut sys::Buffer {
        self.raw.as_ptr()
    }

    /// Type of the elements.
    ///
    /// # Errors
    /// [`Error::Status`] when the buffer holds what no array can, a token for example.
    pub fn element_type(&self) -> Result<ElementType, Error> {
        let mut args = sys::BufferElementType::new();
        args.buffer = self.as_ptr();
        // SAFETY: the buffer is live.
        unsafe { self.plugin().call(&mut args) }?;
        ElementType::from_raw(args.element_type).ok_or_else(|| Error::Status {
            function: "PJRT_Buffer_ElementType",
            code: Code::Unimplemented,
            message: format!("element type {} is not supported", args.element_type),
        })
    }

    /// Dimensions, major to minor.
    ///
    /// # Errors
    /// [`Error::Status`] when PJRT fails.
    pub fn dims(&self) -> Result<&[i64], Error> {
        let mut args = sys::BufferDimensions::new();
        args.buffer = self.as_ptr();
        // SAFETY: the buffer is live, and owns the list until it is dropped.
        unsafe {
            self.plugin().call(&mut args)?;
            Ok(value::list(args.dims, args.num_dims))
        }
    }

    /// Bytes of the array in row-major order in host memory.
    ///
    /// # Errors
    /// As [`Buffer::element_type`].
    pub fn host_bytes(&self) -> Result<usize, Error> {
        host_bytes(self.element_type()?, self.dims()?)
    }

    /// Bytes on the device, padding included.
    ///
    /// # Errors
    /// [`Error::Status`] when PJRT fails.
    pub fn device_bytes(&self) -> Result<usize, Error> {
        let mut args = sys::BufferOnDeviceSizeInBytes::new();
        args.buffer = self.as_ptr();
        // SAFETY: the buffer is live.
        unsafe { self.plugin().call(&mut args) }?;
        Ok(args.on_device_size_in_bytes)
    }

    /// Where the buffer is.
    ///
    /// # Errors
    /// [`Error::Status`] when PJRT fails.
    pub fn device(&self) -> Result<Device, Error> {
        let mut args = sys::BufferDevice::new();
        args.buffer = self.as_ptr();
        // SAFETY: the buffer is live, and its device the client's.
        unsafe { self.plugin().call(&mut args) }?;
        self.client
            .device(args.device)
            .ok_or_else(|| Error::broken("PJRT_Buffer_Device", "no device came back"))
    }

    /// Whether the memory is gone: deleted, or taken over by a program.
    ///
    /// # Errors
    /// [`Error::Status`] when PJRT fails.
    pub fn is_deleted(&self) -> Result<bool, Error> {
        let mut args = sys::BufferIsDeleted::new();
        args.buffer = self.as_ptr();
        // SAFETY: the buffer is live; this may be asked of a deleted one.
        unsafe { self.plugin().call(&mut args) }?;
        Ok(args.is_deleted)
    }

    /// Gives the memory back as soon as the work that uses it has ended. Dropping the
    /// buffer does so too.
    ///
    /// # Errors
    /// [`Error::Status`] when PJRT fails.
    pub fn delete(&self) -> Result<(), Error> {
        let mut args = sys::BufferDelete::new();
        args.buffer = self.as_ptr();
        // SAFETY: the buffer is live.
        unsafe { self.plugin().call(&mut args) }
    }

    /// Ready when the contents are, or cannot be.
    ///
    /// # Errors
    /// [`Error::Status`] when PJRT fails. That the buffer is deleted is told by the
    /// event.
    pub fn ready(&self) -> Result<Event, Error> {
        let mut args = sys::BufferReadyEvent::new();
        args.buffer = self.as_ptr();
        // SAFETY: the buffer is live; the event is handed over.
        unsafe {
            self.plugin().call(&mut args)?;
            let raw = NonNull::new(args.event)
                .ok_or_else(|| Error::broken("PJRT_Buffer_ReadyEvent", "no event came back"))?;
            Ok(Event::own(&self.client, raw))
        }
    }

    /// The address the plugin gives for the contents: on a CPU, where they are.
    ///
    /// # Errors
    /// [`Error::Status`] when the buffer is deleted, or the plugin gives none.
    pub fn address(&self) -> Result<usize, Error> {
        let mut args = sys::BufferUnsafePointer::new();
        args.buffer = self.as_ptr();
        // SAFETY: the buffer is live.
        unsafe { self.plugin().call(&mut args) }?;
        Ok(args.buffer_pointer)
    }

    /// Whether the contents are in host memory.
    ///
    /// # Errors
    /// [`Error::Status`] when PJRT fails.
    pub fn is_on_cpu(&self) -> Result<bool, Error> {
        let mut args = sys::BufferIsOnCpu::new();
        args.buffer = self.as_ptr();
        // SAFETY: the buffer is live.
        unsafe { self.plugin().call(&mut args) }?;
        Ok(args.is_on_cpu)
    }

    /// Waits for the contents and copies them to `destination` in row-major order.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when `destination` has another length than the array;
    /// [`Error::Status`] when the work that fills the buffer failed, or it is deleted.
    pub fn to_host(&self, destination: &mut [u8]) -> Result<(), Error> {
        // SAFETY: `destination` outlives the wait.
        unsafe { self.to_host_async(destination.as_mut_ptr(), destination.len()) }?.wait()
    }

    /// Starts to copy the contents to `length` bytes at `destination`, in row-major
    /// order, when they are ready.
    ///
    /// # Safety
    /// The bytes stay valid, and nobody else uses them, until the event is ready.
    ///
    /// # Errors
    /// As [`Buffer::to_host`]; the work's failure comes from the event.
    pub unsafe fn to_host_async(
        &self,
        destination: *mut u8,
        length: usize,
    ) -> Result<Event, Error> {
        let dims = self.dims()?;
        let expected = host_bytes(self.element_type()?, dims)?;
        if length != expected {
            return Err(Error::argument(
                "destination",
                format!("expected {expected} bytes for {dims:?}, got {length}"),
            ));
        }
        let order: SmallVec<[i64; 8]> = (0..dims.len() as i64).rev().collect();
        let mut layout = sys::MemoryLayout::dense(&order);
        let mut args = sys::BufferToHostBuffer::new();
        args.src = self.as_ptr();
        args.host_layout = &mut layout;
        args.dst = destination.cast::<c_void>();
        args.dst_size = length;
        // An empty array may come with no address, which would ask PJRT for the size.
        if destination.is_null() {
            args.dst = NonNull::<u64>::dangling().as_ptr().cast();
        }
        // SAFETY: the buffer is live, the layout outlives the call, and the caller
        // answers for the destination. The event is handed over.
        unsafe {
            self.plugin().call(&mut args)?;
            let raw = NonNull::new(args.event)
                .ok_or_else(|| Error::broken("PJRT_Buffer_ToHostBuffer", "no event came back"))?;
            Ok(Event::own(&self.client, raw))
        }
    }

    /// Waits for the contents and gives them in place. While the view lives, a program
    /// that would take the memory over works on a copy and leaves the buffer as it is.
    ///
    /// # Errors
    /// [`Error::Status`] when the contents are not in host memory, the work that fills
    /// the buffer failed, or it is deleted.
    pub fn view(&self) -> Result<HostView<'_>, Error> {
        if !self.is_on_cpu()? {
            return Err(Error::Status {
                function: "PJRT_Buffer_IsOnCpu",
                code: Code::FailedPrecondition,
                message: "the buffer is not in host memory".to_string(),
            });
        }
        let mut args = sys::BufferIncreaseExternalReferenceCount::new();
        args.buffer = self.as_ptr();
        // SAFETY: the buffer is live. The count is given back when the view is dropped.
        unsafe { self.plugin().call(&mut args) }?;
        let mut view = HostView {
            buffer: self,
            start: NonNull::dangling(),
            length: 0,
        };
        self.ready()?.wait()?;
        view.length = self.device_bytes()?;
        let address = ptr::with_exposed_provenance_mut::<u8>(self.address()?);
        match NonNull::new(address) {
            Some(start) => view.start = start,
            None => view.length = 0,
        }
        Ok(view)
    }

    /// Copies the contents to another device of the client.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when the device belongs to another client;
    /// [`Error::Status`] when PJRT fails, or the buffer is there already.
    pub fn copy_to(&self, device: &Device) -> Result<Buffer, Error> {
        if !device.client().is(&self.client) {
            return Err(Error::argument("device", "it belongs to another client"));
        }
        let mut args = sys::BufferCopyToDevice::new();
        args.buffer = self.as_ptr();
        args.dst_device = device.as_ptr();
        // SAFETY: buffer and device are live; the new buffer is handed over.
        unsafe {
            self.plugin().call(&mut args)?;
            let raw = NonNull::new(args.dst_buffer)
                .ok_or_else(|| Error::broken("PJRT_Buffer_CopyToDevice", "no buffer came back"))?;
            Ok(Buffer::own(&self.client, raw))
        }
    }

    /// Takes the memory over into a new buffer, which is ready no sooner than the
    /// dependency is resolved. This buffer is deleted.
    ///
    /// # Errors
    /// [`Error::Missing`] where the plugin is too old (0.81 is); [`Error::Status`] when
    /// the buffer is deleted or someone holds a view of it; [`Error::InvalidArgument`]
    /// when it is an import of memory that is not mutable.
    pub fn donate_until(&self) -> Result<(Buffer, Dependency), Error> {
        let function = "PJRT_Buffer_DonateWithControlDependency";
        if self.shared {
            // Plugins would hand it over; programs they give a copy.
            let message = "the buffer is an import of memory that must not be written to";
            return Err(Error::argument("buffer", message));
        }
        let mut args = sys::BufferDonateWithControlDependency::new();
        args.buffer = self.as_ptr();
        // SAFETY: the buffer is live. The new one is handed over, and with it the duty
        // to call the callback once, which is `Dependency`'s.
        unsafe {
            self.plugin().call(&mut args)?;
            let callback = args
                .dependency_ready_callback
                .ok_or_else(|| Error::broken(function, "no callback came back"))?;
            let dependency = Dependency {
                callback,
                data: args.callback_data,
                _client: self.client.clone(),
            };
            let raw = NonNull::new(args.out_buffer)
                .ok_or_else(|| Error::broken(function, "no buffer came back"))?;
            Ok((Buffer::own(&self.client, raw), dependency))
        }
    }
}

impl Drop for Buffer {
    #[inline]
    fn drop(&mut self) {
        let mut args = sys::BufferDestroy::new();
        args.buffer = self.as_ptr();
        // SAFETY: the buffer is ours and not used after this. Work under way keeps the
        // memory it needs.
        unsafe { self.plugin().destroy(&mut args) };
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer")
            .field("element_type", &self.element_type())
            .field("dims", &self.dims())
            .finish_non_exhaustive()
    }
}

/// The contents of a buffer in place.
#[derive(Debug)]
pub struct HostView<'a> {
    buffer: &'a Buffer,
    start: NonNull<u8>,
    length: usize,
}

// SAFETY: a view is a shared slice and a count held on the buffer, which is `Sync`.
unsafe impl Send for HostView<'_> {}
// SAFETY: as above.
unsafe impl Sync for HostView<'_> {}

impl Deref for HostView<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the contents are ready and in host memory, and the count held keeps
        // the memory from being freed or written to.
        unsafe { slice::from_raw_parts(self.start.as_ptr(), self.length) }
    }
}

impl Drop for HostView<'_> {
    fn drop(&mut self) {
        let mut args = sys::BufferDecreaseExternalReferenceCount::new();
        args.buffer = self.buffer.as_ptr();
        // SAFETY: the buffer is live, and the count was raised when the view was made.
        unsafe { self.buffer.plugin().destroy(&mut args) };
    }
}

/// What keeps a buffer made by [`Buffer::donate_until`] from being ready. Dropped
/// without a result, it fails.
#[must_use = "the buffer is not ready until this is resolved"]
pub struct Dependency {
    callback: unsafe extern "C" fn(*mut sys::DependencyReady),
    data: *mut c_void,
    _client: Client,
}

// SAFETY: PJRT lets the callback run on any thread.
unsafe impl Send for Dependency {}
// SAFETY: a shared reference gives access to nothing.
unsafe impl Sync for Dependency {}

impl Dependency {
    /// Lets those who wait for the buffer go on, or fail.
    pub fn resolve(self, result: Result<(), (Code, &str)>) {
        let this = std::mem::ManuallyDrop::new(self);
        // SAFETY: `this` is neither dropped nor used again; moving the client out of it
        // leaves nothing to drop.
        let client = unsafe { ptr::read(&this._client) };
        this.call(result);
        drop(client);
    }

    /// Called once: by `resolve`, which then forgets the value, or by its drop.
    fn call(&self, result: Result<(), (Code, &str)>) {
        let (code, message) = match result {
            Ok(()) => (0, ""),
            Err((code, message)) => (code.raw(), message),
        };
        let mut args = sys::DependencyReady {
            struct_size: size_of::<sys::DependencyReady>(),
            callback_data: self.data,
            error_code: code,
            error_message: message.as_ptr().cast(),
            error_message_size: message.len(),
        };
        // SAFETY: the data is what came with the callback, which is called once; the
        // message is copied during the call.
        unsafe { (self.callback)(&mut args) };
    }
}

impl Drop for Dependency {
    fn drop(&mut self) {
        self.call(Err((
            Code::Cancelled,
            "the work that the buffer waited for was given up",
        )));
    }
}

impl fmt::Debug for Dependency {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dependency").finish_non_exhaustive()
    }
}

// Buffers are handed between threads by value and by reference.
const _: () = {
    const fn shared<T: Send + Sync>() -> PhantomData<T> {
        PhantomData
    }
    shared::<Buffer>();
    shared::<Event>();
    shared::<Client>();
    shared::<super::LoadedExecutable>();
};
