//! Completion of asynchronous work.

use std::ffi::c_void;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use super::client::{Client, in_callback};
use super::error::Error;
use super::plugin::Plugin;
use super::sys;

/// Becomes ready when the work it stands for has ended, well or badly.
pub struct Event {
    raw: NonNull<sys::Event>,
    // The work runs on the client's threads.
    client: Client,
}

// SAFETY: PJRT's events may be used and destroyed on any thread.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// # Safety
    /// `raw` is an event of `client`'s plugin that the caller owns.
    #[inline]
    pub(super) unsafe fn own(client: &Client, raw: NonNull<sys::Event>) -> Event {
        Event {
            raw,
            client: client.clone(),
        }
    }

    fn plugin(&self) -> Plugin {
        self.client.plugin()
    }

    /// Whether the work has ended. Never blocks.
    #[inline]
    pub fn is_ready(&self) -> bool {
        let mut args = sys::EventIsReady::new();
        args.event = self.raw.as_ptr();
        // SAFETY: the event is live.
        match unsafe { self.plugin().call(&mut args) } {
            Ok(()) => args.is_ready,
            Err(error) => {
                tracing::error!(%error, "PJRT cannot tell whether an event is ready");
                false
            }
        }
    }

    /// Waits for the end of the work.
    ///
    /// # Errors
    /// The work's own failure, for every call.
    #[inline]
    pub fn wait(&self) -> Result<(), Error> {
        let mut args = sys::EventAwait::new();
        args.event = self.raw.as_ptr();
        // SAFETY: the event is live.
        unsafe { self.plugin().call(&mut args) }
    }

    /// Waits at most `timeout`; `None` when the work has not ended by then.
    ///
    /// # Errors
    /// As [`Event::wait`].
    pub fn wait_timeout(&self, timeout: Duration) -> Option<Result<(), Error>> {
        if self.is_ready() {
            return Some(self.wait());
        }
        let shared = Arc::new((Mutex::new(None), Condvar::new()));
        let theirs = Arc::clone(&shared);
        let registered = self.on_ready(move |result| {
            *theirs.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(result);
            theirs.1.notify_one();
        });
        if let Err(error) = registered {
            return Some(Err(error));
        }
        let result = shared.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut result, _) = shared
            .1
            .wait_timeout_while(result, timeout, |result| result.is_none())
            .unwrap_or_else(PoisonError::into_inner);
        result.take()
    }

    /// Runs `callback` with the outcome when the work has ended: at once on this thread
    /// if it has, else on the plugin's thread, which the callback must not hold up.
    ///
    /// # Errors
    /// [`Error::Status`] when PJRT refuses; the callback is then dropped without a call.
    pub fn on_ready<F>(&self, callback: F) -> Result<(), Error>
    where
        F: FnOnce(Result<(), Error>) + Send + 'static,
    {
        struct Pending<F> {
            plugin: Plugin,
            callback: F,
        }

        unsafe extern "C" fn run<F: FnOnce(Result<(), Error>)>(
            error: *mut sys::Error,
            user_arg: *mut c_void,
        ) {
            // SAFETY: `user_arg` is the box leaked below, and PJRT calls back once.
            let pending = unsafe { Box::from_raw(user_arg.cast::<Pending<F>>()) };
            // SAFETY: PJRT hands the error over.
            let result = unsafe { pending.plugin.check("PJRT_Event_OnReady", error) };
            let callback = pending.callback;
            // A panic must not unwind into the plugin.
            let outcome = catch_unwind(AssertUnwindSafe(|| in_callback(|| callback(result))));
            if outcome.is_err() {
                tracing::error!("a callback of a PJRT event panicked");
            }
        }

        let pending = Box::into_raw(Box::new(Pending {
            plugin: self.plugin(),
            callback,
        }));
        let mut args = sys::EventOnReady::new();
        args.event = self.raw.as_ptr();
        args.callback = Some(run::<F>);
        args.user_arg = pending.cast();
        // SAFETY: the event is live; `run` takes the box over when it is called, on any
        // thread, which `F: Send + 'static` allows.
        let registered = unsafe { self.plugin().call(&mut args) };
        if registered.is_err() {
            // SAFETY: PJRT refuses before it stores the callback, so the box is ours.
            drop(unsafe { Box::from_raw(pending) });
        }
        registered
    }
}

impl Drop for Event {
    #[inline]
    fn drop(&mut self) {
        let mut args = sys::EventDestroy::new();
        args.event = self.raw.as_ptr();
        // SAFETY: the event is live and not used after this. Callbacks registered on it
        // still run.
        unsafe { self.plugin().destroy(&mut args) };
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Event")
            .field("ready", &self.is_ready())
            .finish()
    }
}
