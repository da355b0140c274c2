//! Storages in the host's hands.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ptr::NonNull;
use std::sync::Arc;

use smallvec::SmallVec;

use super::cell::{Cell, Held};
use super::interned::{self, BufferType};
use super::{Device, Error};
use crate::Segment;
use crate::executor::HostWork;
use crate::pjrt::{self, Buffer, Code, ElementType, HostMemory, Outputs};

/// Memory of storages in the host's hands. Dropped unfinished, their contents are lost, and
/// whatever uses them fails.
#[derive(Debug)]
pub struct CellWork {
    work: HostWork,
    /// Which of the buffers is that of each cell.
    places: SmallVec<[usize; 4]>,
}

impl CellWork {
    /// Where each storage's bytes are, in the order in which the cells were given; a cell that
    /// was given twice has the same memory twice. To be read and written until the
    /// work is finished. Tensors are at their offsets in it, with their strides.
    ///
    /// # Errors
    /// When what was to fill the storages has failed; they hold nothing of use.
    pub fn memory(&self) -> Result<SmallVec<[Segment; 4]>, &pjrt::Error> {
        let memory = self.work.memory()?;
        Ok(self.places.iter().map(|place| memory[*place]).collect())
    }

    /// Lets the programs go on that use the storages, or fails them.
    pub fn finish(self, result: Result<(), (Code, &str)>) {
        self.work.finish(result);
    }
}

/// Zeros that a buffer can use in place.
pub(super) struct Zeros {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the memory is the owner's alone.
unsafe impl Send for Zeros {}

impl Zeros {
    pub(super) fn new(bytes: usize) -> Zeros {
        // What XLA's CPU plugins want in order not to copy.
        let layout = Layout::from_size_align(bytes.max(1), 64).expect("less than isize::MAX");
        // SAFETY: the layout has a size.
        let start = unsafe { alloc_zeroed(layout) };
        match NonNull::new(start) {
            Some(start) => Zeros { start, layout },
            None => handle_alloc_error(layout),
        }
    }
}

impl Drop for Zeros {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, and freed once.
        unsafe { dealloc(self.start.as_ptr(), self.layout) };
    }
}

/// Zeros as an array of bytes of a given length.
pub(super) struct ZeroArray(pub(super) Zeros, pub(super) usize);

// SAFETY: on the heap, and nobody else knows it.
unsafe impl HostMemory for ZeroArray {
    const MUTABLE: bool = true;

    fn bytes(&self) -> (*const u8, usize) {
        (self.0.start.as_ptr(), self.1)
    }
}

impl Device {
    /// Takes a storage's contents out of it, as a buffer that nothing else holds and that covers the
    /// whole storage, in an element type and dimensions of its own. The storage reads as
    /// zeros until [`Device::put`] gives it a successor of the same bytes.
    ///
    /// Copies where another storage shares the buffer; makes one where there is none.
    ///
    /// # Errors
    /// When the device has no memory, or the contents cannot be copied because what was to
    /// fill them failed.
    pub fn take(&self, cell: &Cell) -> Result<Buffer, Error> {
        let (held, bytes) = {
            let mut state = cell.state();
            (state.held.take(), state.bytes as usize)
        };
        let Some(held) = held else {
            let zeros = ZeroArray(Zeros::new(bytes), bytes);
            let dims = [bytes as i64];
            return Ok(self.executor.import(zeros, ElementType::U8, &dims)?.buffer);
        };
        Arc::try_unwrap(held)
            .map(Held::into_buffer)
            .or_else(|shared| {
                let copied = self.copy(shared.buffer());
                if copied.is_err() {
                    cell.state().held = Some(shared);
                }
                copied
            })
    }

    /// A copy of `buffer`, by way of a program that returns its argument.
    fn copy(&self, buffer: &Buffer) -> Result<Buffer, Error> {
        let element = buffer.element_type()?;
        let dims: String = (buffer.dims()?.iter())
            .map(|dim| format!("{dim}x"))
            .collect();
        let of = format!("tensor<{dims}{}>", element.name());
        let text =
            format!("module @copy {{ func.func @main(%a: {of}) -> {of} {{ return %a : {of} }} }}");
        let program = self.executor.compile("copy", text.as_bytes())?;
        let outputs = self
            .executor
            .launch(&program, &[buffer], pjrt::LaunchOptions::default())?;
        let mut outputs = outputs.into_iter();
        outputs.next().ok_or_else(|| {
            Error::from(pjrt::Error::Status {
                function: "PJRT_LoadedExecutable_Execute",
                code: Code::Internal,
                message: "no output".to_owned(),
            })
        })
    }

    /// Makes `buffer` the contents of a storage.
    ///
    /// # Errors
    /// [`Error::Size`] when it does not cover the storage.
    pub fn put(&self, cell: &Cell, buffer: Buffer) -> Result<(), Error> {
        let found = buffer.host_bytes()? as u64;
        let element = buffer.element_type()?;
        let dims = buffer.dims()?.to_vec();
        let of = interned::id(BufferType { element, dims });
        let mut state = cell.state();
        if state.bytes != found {
            let expected = state.bytes;
            return Err(Error::Size { expected, found });
        }
        let held = Arc::new(Held::new(buffer, of, found));
        let _old = state.held.replace(held);
        Ok(())
    }

    /// Lends the memory of `cells` to the host, and returns at once: `work` is called when
    /// everything launched before has ended, on this thread or one of the plugin's, and should only
    /// pass the work on. Programs launched from now on that use the storages wait until it is
    /// finished. Cells may be given twice.
    ///
    /// `name` is for error messages.
    ///
    /// # Errors
    /// When the memory is not the host's, or the device has none left; the storages are
    /// then as before, and `work` is not called. With `TPU_LAUNCH_BLOCKING=1` also when the
    /// work failed.
    pub fn host_work(
        &self,
        name: &str,
        cells: &[&Cell],
        work: impl FnOnce(CellWork) + Send + 'static,
    ) -> Result<(), Error> {
        let mut distinct = SmallVec::<[&Cell; 4]>::new();
        let mut places = SmallVec::<[usize; 4]>::new();
        for cell in cells {
            let known = distinct
                .iter()
                .position(|other| std::ptr::eq(*other, *cell));
            places.push(known.unwrap_or(distinct.len()));
            if known.is_none() {
                distinct.push(cell);
            }
        }
        let mut buffers = Outputs::new();
        let mut failed = None;
        for cell in &distinct {
            match self.take(cell) {
                Ok(buffer) => buffers.push(buffer),
                Err(error) => {
                    failed = Some(error);
                    break;
                }
            }
        }
        let mut result = Ok(());
        if let Some(error) = failed {
            result = Err(error);
        } else {
            let started = self.executor.host_work(name, buffers, move |host| {
                work(CellWork { work: host, places })
            });
            buffers = started.unwrap_or_else(|refused| {
                result = Err(refused.error.into());
                refused.buffers
            });
        }
        for (cell, buffer) in distinct.iter().zip(buffers) {
            self.put(cell, buffer)?;
        }
        result
    }
}
