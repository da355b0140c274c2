//! An operation that a caller started.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use tpu_dist_collectives::{Kind, Signature};

use crate::Error;
use crate::call::Shape;
use crate::communicator::Group;
use crate::link::{Key, Transfer};
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

/// A collective or a message under way, or its outcome.
pub struct Operation {
    group: Arc<Group>,
    sequence: u64,
    bytes: u64,
    signature: Signature,
    shape: Shape,
    started: Instant,
    timeout: Duration,
    state: AtomicU8,
    result: OnceLock<Result<(), Error>>,
    nanos: AtomicU64,
    completion: Mutex<Option<Box<dyn Completion>>>,
    message: Option<Message>,
    cause: OnceLock<Error>,
}

const RUNNING: u8 = 0;
const ENDING: u8 = 1;
const ENDED: u8 = 2;

impl Operation {
    #[allow(clippy::too_many_arguments, reason = "each is a field")]
    pub(crate) fn new(
        group: Arc<Group>,
        signature: Signature,
        shape: Shape,
        sequence: u64,
        bytes: u64,
        timeout: Duration,
        completion: Option<Box<dyn Completion>>,
        message: Option<Message>,
    ) -> Operation {
        Operation {
            group,
            signature,
            shape,
            sequence,
            bytes,
            started: Instant::now(),
            timeout,
            state: AtomicU8::new(RUNNING),
            result: OnceLock::new(),
            nanos: AtomicU64::new(0),
            completion: Mutex::new(completion),
            message,
            cause: OnceLock::new(),
        }
    }

    /// Whether it has ended, well or not.
    pub fn is_completed(&self) -> bool {
        self.state.load(Ordering::Acquire) == ENDED
    }

    /// How it ended; `None` while it runs.
    pub fn result(&self) -> Option<Result<(), Error>> {
        if self.is_completed() {
            self.result.get().cloned()
        } else {
            None
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
        let waited = wait(
            self.group.fabric(),
            self.group.is_crowded(),
            || {
                if !self.is_completed() {
                    self.group.advance_lane();
                }
                match self.result() {
                    Some(result) => Step::Done(result),
                    None if self.group.has_moved(&mut stamp) => Step::Moved,
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
        self.sequence
    }

    /// Time from start to end, once it has ended.
    pub fn duration(&self) -> Option<Duration> {
        self.is_completed()
            .then(|| Duration::from_nanos(self.nanos.load(Ordering::Relaxed)))
    }

    pub(crate) fn element_size(&self) -> usize {
        self.signature.dtype.map_or(1, |dtype| dtype.size())
    }

    pub(crate) fn kind(&self) -> Kind {
        self.signature.kind
    }

    pub(crate) fn message(&self) -> Option<&Message> {
        self.message.as_ref()
    }

    pub(crate) fn timeout(&self) -> Duration {
        self.timeout
    }

    pub(crate) fn is_late(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.started) >= self.timeout
    }

    /// Group, operation, sequence number, shape, dtype.
    pub(crate) fn context(&self) -> String {
        self.group
            .context(&self.signature, self.shape, self.sequence)
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
        let elapsed = self.started.elapsed();
        self.nanos
            .store(elapsed.as_nanos() as u64, Ordering::Relaxed);
        if result.is_ok() {
            self.group
                .stats()
                .add(self.signature.kind, self.bytes, elapsed);
        }
        let completion = self
            .completion
            .lock()
            .expect("no panic while it is held")
            .take();
        if let Some(completion) = completion {
            completion.complete(&result);
        }
        let _ = self.result.set(result);
        self.state.store(ENDED, Ordering::Release);
        self.group.fabric().ring_own();
    }
}
