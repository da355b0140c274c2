//! An operation that a caller started.

use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use tpu_dist_collectives::Signature;

use crate::Error;
use crate::call::Shape;
use crate::communicator::Group;
use crate::link::{Key, Link, Transfer};
use crate::progress::{Background, Interrupted, Step, wait};

/// Told when an operation ends: exactly once, on the thread that ended it, before waiters
/// are released, so that it may copy results to where the caller wants them. It must
/// not block. The caller's buffers are free once it is dropped.
pub trait Completion: Send {
    /// The operation ended.
    fn complete(self: Box<Self>, result: &Result<(), Error>);
}

/// A message of a point-to-point operation.
pub(crate) struct Message {
    pub(crate) key: Key,
    /// Group rank of the other side; `None` for any source.
    pub(crate) peer: Option<u32>,
    pub(crate) transfer: OnceLock<Arc<Transfer>>,
}

/// What was called.
#[derive(Clone, Copy)]
pub(crate) struct Entry {
    pub(crate) signature: Signature,
    pub(crate) shape: Shape,
    /// Number of the collective in its group, or of the last one before a message.
    pub(crate) sequence: u64,
    pub(crate) bytes: u64,
    /// `None` as long as nobody needed to know.
    pub(crate) started: Option<Instant>,
    pub(crate) timeout: Duration,
}

impl Entry {
    pub(crate) fn is_late(&self, now: Instant) -> bool {
        let started = self.started;
        started.is_some_and(|started| now.saturating_duration_since(started) >= self.timeout)
    }
}

/// A collective or a message under way, or its outcome.
pub struct Operation {
    group: Arc<Group>,
    entry: Entry,
    state: AtomicU8,
    error: OnceLock<Error>,
    completion: Mutex<Option<Box<dyn Completion>>>,
    message: Option<Message>,
    cause: OnceLock<Error>,
}

const RUNNING: u8 = 0;
const ENDING: u8 = 1;
const SUCCEEDED: u8 = 2;
const FAILED: u8 = 3;

impl Operation {
    pub(crate) fn new(
        group: Arc<Group>,
        entry: Entry,
        completion: Option<Box<dyn Completion>>,
        message: Option<Message>,
    ) -> Operation {
        Operation {
            group,
            entry,
            state: AtomicU8::new(RUNNING),
            error: OnceLock::new(),
            completion: Mutex::new(completion),
            message,
            cause: OnceLock::new(),
        }
    }

    /// One that has ended already.
    pub(crate) fn ended(group: Arc<Group>, entry: Entry, result: Result<(), Error>) -> Operation {
        let mut operation = Operation::new(group, entry, None, None);
        let state = match result {
            Ok(()) => SUCCEEDED,
            Err(error) => {
                let _ = operation.error.set(error);
                FAILED
            }
        };
        *operation.state.get_mut() = state;
        operation
    }

    /// Whether it has ended, well or not.
    pub fn is_completed(&self) -> bool {
        self.state.load(Ordering::Acquire) >= SUCCEEDED
    }

    /// How it ended; `None` while it runs.
    pub fn result(&self) -> Option<Result<(), Error>> {
        match self.state.load(Ordering::Acquire) {
            SUCCEEDED => Some(Ok(())),
            FAILED => Some(Err(self.error.get().expect("set before the state").clone())),
            _ => None,
        }
    }

    /// Waits until it has ended; the caller's thread works on it meanwhile.
    ///
    /// # Errors
    /// How the operation failed; [`Error::Timeout`] when `timeout` ran out first, and
    /// [`Error::Interrupted`] on a signal: in both cases it goes on.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<(), Error> {
        if let Some(result) = self.result() {
            return result;
        }
        let end = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let _waiting = Background::get().waiting();
        let mut stamp = 0;
        // A message moves on links; the collectives that may wait behind it matter less.
        let stride = if self.message.is_some() { 16 } else { 1 };
        let mut looks = 0u32;
        // Of the peer on this host that it waits for, without being told that there is news.
        let peer = self.message.as_ref().and_then(|message| message.peer);
        let link = peer.and_then(|peer| self.group.link_in_memory(peer));
        let waited = wait(
            self.group.fabric(),
            self.group.is_crowded(),
            || {
                looks = looks.wrapping_add(1);
                // Not every time: it takes longer than a look, and the peer may need this core.
                let moved = looks.is_multiple_of(4) && link.is_some_and(Link::try_progress);
                if looks.is_multiple_of(stride) && !self.is_completed() {
                    self.group.advance_lane();
                }
                match self.result() {
                    Some(result) => Step::Done(result),
                    None if moved || self.group.has_moved(&mut stamp) => Step::Moved,
                    None => Step::Idle,
                }
            },
            |now| {
                self.group.check_deadlines(now);
                if let Some(result) = self.result() {
                    return Some(result);
                }
                if end.is_some_and(|end| now >= end) {
                    return Some(Err(Error::Timeout {
                        context: format!("wait for {}", self.context()),
                        timeout: timeout.unwrap_or_default(),
                        detail: "the operation goes on and can be waited for again".to_owned(),
                        missing: Vec::new(),
                    }));
                }
                None
            },
        );
        waited.unwrap_or_else(|Interrupted| {
            Err(Error::Interrupted {
                context: self.context(),
            })
        })
    }

    /// Group rank that a received message came from.
    pub fn source_rank(&self) -> Option<u32> {
        let message = self.message.as_ref()?;
        message
            .transfer
            .get()
            .and_then(|transfer| transfer.source())
            .or(message.peer)
    }

    /// Sequence number in its group: of the collective, or of the last collective before a
    /// message.
    pub fn sequence(&self) -> u64 {
        self.entry.sequence
    }

    pub(crate) fn entry(&self) -> &Entry {
        &self.entry
    }

    pub(crate) fn message(&self) -> Option<&Message> {
        self.message.as_ref()
    }

    /// Group, operation, sequence number, shape, dtype.
    pub(crate) fn context(&self) -> String {
        self.group.context(&self.entry)
    }

    /// Says how it will have failed once its transfer is cancelled, which ends it.
    pub(crate) fn end_as(&self, error: Error) {
        let _ = self.cause.set(error);
    }

    /// Ends it. The first outcome stays.
    pub(crate) fn end(&self, result: Result<(), Error>) {
        let result = match (result, self.cause.get()) {
            (Err(_), Some(cause)) => Err(cause.clone()),
            (result, _) => result,
        };
        let started =
            self.state
                .compare_exchange(RUNNING, ENDING, Ordering::AcqRel, Ordering::Acquire);
        if started.is_err() {
            return;
        }
        if let (Ok(()), Some(started)) = (&result, self.entry.started) {
            let kind = self.entry.signature.kind;
            let stats = self.group.stats();
            stats.add(kind, self.entry.bytes, started.elapsed());
        }
        let completion = self
            .completion
            .lock()
            .expect("no panic while it is held")
            .take();
        if let Some(completion) = completion {
            completion.complete(&result);
        }
        let state = match result {
            Ok(()) => SUCCEEDED,
            Err(error) => {
                let _ = self.error.set(error);
                FAILED
            }
        };
        self.state.store(state, Ordering::Release);
        self.group.fabric().ring_own();
    }
}
