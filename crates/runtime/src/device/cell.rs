//! Storages.

use std::mem::ManuallyDrop;
use std::sync::{Arc, Mutex};

use super::interned::{self, BufferType, TypeId};
use super::memory::Counted;
use super::{Device, Error, get, is_forked, lock};
use crate::pjrt::{Buffer, ElementType};

/// A buffer that storages hold.
#[derive(Debug)]
pub(super) struct Held {
    buffer: ManuallyDrop<Buffer>,
    pub(super) of: TypeId,
    _counted: Counted,
}

impl Held {
    pub(super) fn new(buffer: Buffer, of: TypeId, bytes: u64) -> Held {
        Held {
            buffer: ManuallyDrop::new(buffer),
            of,
            _counted: Counted::new(bytes),
        }
    }

    #[inline]
    pub(super) fn buffer(&self) -> &Buffer {
        &self.buffer
    }

    /// The buffer itself.
    pub(super) fn into_buffer(self) -> Buffer {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: neither field is used or dropped again.
        unsafe {
            std::ptr::drop_in_place(&mut this._counted);
            ManuallyDrop::take(&mut this.buffer)
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // In a forked child the plugin may have been in the middle of anything.
        if !is_forked() {
            // SAFETY: dropped once, and not used after this.
            unsafe { ManuallyDrop::drop(&mut self.buffer) };
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) bytes: u64,
    pub(super) held: Option<Arc<Held>>,
}

/// A storage. Its address is its identity.
#[derive(Debug)]
pub struct Cell(Mutex<State>);

impl Cell {
    /// A storage of `bytes` bytes that are zero. Takes no memory of the device.
    pub fn new(bytes: u64) -> Cell {
        Cell(Mutex::new(State { bytes, held: None }))
    }

    pub(super) fn with(held: Held, bytes: u64) -> Cell {
        Cell(Mutex::new(State {
            bytes,
            held: Some(Arc::new(held)),
        }))
    }

    #[inline]
    pub(super) fn state(&self) -> std::sync::MutexGuard<'_, State> {
        lock(&self.0)
    }

    /// Its size in bytes.
    pub fn bytes(&self) -> u64 {
        self.state().bytes
    }

    /// Whether it has a buffer; without one it reads as zeros.
    pub fn is_written(&self) -> bool {
        self.state().held.is_some()
    }

    /// Makes all of it zero, and gives its memory back.
    pub fn clear(&self) {
        // Dropped after the lock is.
        let _old = self.state().held.take();
    }

    /// Makes it a copy of `other`, of the same size. They share memory until one is written to.
    ///
    /// # Errors
    /// [`Error::Size`] when the sizes differ.
    pub fn share(&self, other: &Cell) -> Result<(), Error> {
        let (held, found) = {
            let state = other.state();
            (state.held.clone(), state.bytes)
        };
        let mut state = self.state();
        if state.bytes != found {
            return Err(Error::Size {
                expected: state.bytes,
                found,
            });
        }
        let _old = std::mem::replace(&mut state.held, held);
        Ok(())
    }

    /// Changes its size, keeping the bytes there is room for; added ones are zero.
    /// Blocks where bytes are kept.
    ///
    /// # Errors
    /// When the bytes that stay cannot be copied.
    pub fn resize(&self, bytes: u64) -> Result<(), Error> {
        let (held, old) = {
            let state = self.state();
            (state.held.clone(), state.bytes)
        };
        let kept = old.min(bytes);
        let held = match held {
            Some(held) if kept > 0 => {
                let mut contents = vec![0; old as usize];
                get()?.executor().download(held.buffer(), &mut contents)?;
                contents.resize(bytes as usize, 0);
                let device = get()?;
                Some(Arc::new(device.held(
                    &contents,
                    ElementType::U8,
                    &[bytes as i64],
                )?))
            }
            _ => None,
        };
        let mut state = self.state();
        state.bytes = bytes;
        let _old = std::mem::replace(&mut state.held, held);
        Ok(())
    }

    /// Copies `data`, a row-major array that covers the whole storage, into it.
    ///
    /// # Errors
    /// [`Error::Size`] when it does not cover the storage.
    pub fn upload(&self, data: &[u8], element: ElementType, dims: &[i64]) -> Result<(), Error> {
        let expected = self.bytes();
        if data.len() as u64 != expected {
            return Err(Error::Size {
                expected,
                found: data.len() as u64,
            });
        }
        let held = if data.is_empty() {
            None
        } else {
            Some(Arc::new(get()?.held(data, element, dims)?))
        };
        let _old = std::mem::replace(&mut self.state().held, held);
        Ok(())
    }

    /// Waits for the contents and copies all of them to `destination`.
    ///
    /// # Errors
    /// [`Error::Size`] when the lengths differ, else the failure of the operation that was to fill
    /// the storage.
    pub fn download(&self, destination: &mut [u8]) -> Result<(), Error> {
        let (held, expected) = {
            let state = self.state();
            (state.held.clone(), state.bytes)
        };
        if destination.len() as u64 != expected {
            return Err(Error::Size {
                expected,
                found: destination.len() as u64,
            });
        }
        match held {
            Some(held) => Ok(get()?.executor().download(held.buffer(), destination)?),
            None => {
                destination.fill(0);
                Ok(())
            }
        }
    }
}

impl Device {
    pub(super) fn held(
        &self,
        data: &[u8],
        element: ElementType,
        dims: &[i64],
    ) -> Result<Held, Error> {
        let buffer = self.executor.upload(data, element, dims)?;
        let dims = dims.to_vec();
        let of = interned::id(BufferType { element, dims });
        Ok(Held::new(buffer, of, data.len() as u64))
    }
}
