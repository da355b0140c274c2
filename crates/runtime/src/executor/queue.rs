//! What is under way, in order.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::Error;
use crate::pjrt::{self, Event};

/// An operation that had not ended when it was started.
pub(super) struct InFlight {
    name: Arc<str>,
    sequence: u64,
    pub(super) complete: Event,
    /// Work of the host, which uses its own buffers alone.
    pub(super) by_host: bool,
}

impl InFlight {
    fn failure(&self, source: pjrt::Error) -> Failure {
        Failure {
            name: Arc::clone(&self.name),
            sequence: self.sequence,
            source,
        }
    }
}

struct Failure {
    name: Arc<str>,
    sequence: u64,
    source: pjrt::Error,
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Error {
        Error::Operation {
            operation: failure.name,
            sequence: failure.sequence,
            source: failure.source,
        }
    }
}

#[derive(Default)]
struct State {
    launched: u64,
    in_flight: VecDeque<Arc<InFlight>>,
    /// The first failure found that nobody has been told of.
    failure: Option<Failure>,
}

impl State {
    fn note(&mut self, failure: Failure) {
        if self
            .failure
            .as_ref()
            .is_none_or(|known| failure.sequence < known.sequence)
        {
            self.failure = Some(failure);
        }
    }

    /// Drops the oldest operations that have ended.
    fn reap(&mut self) {
        while self
            .in_flight
            .front()
            .is_some_and(|oldest| oldest.complete.is_ready())
        {
            let Some(oldest) = self.in_flight.pop_front() else {
                return;
            };
            if let Err(source) = oldest.complete.wait() {
                self.note(oldest.failure(source));
            }
        }
    }

    fn take_failure(&mut self, before: u64) -> Option<Failure> {
        self.failure.take_if(|failure| failure.sequence < before)
    }
}

pub(super) struct Queue {
    state: Mutex<State>,
    max_in_flight: usize,
}

/// A point in the order of operations.
#[derive(Clone)]
pub struct Marker {
    /// Number of operations started before it.
    end: u64,
    in_flight: Vec<Arc<InFlight>>,
}

impl Marker {
    /// Whether everything before it has ended.
    pub fn is_complete(&self) -> bool {
        self.in_flight
            .iter()
            .all(|operation| operation.complete.is_ready())
    }

    pub(super) fn in_flight(&self) -> &[Arc<InFlight>] {
        &self.in_flight
    }
}

impl std::fmt::Debug for Marker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Marker(after {} operations)", self.end)
    }
}

impl Queue {
    pub(super) fn new(max_in_flight: usize) -> Queue {
        Queue {
            state: Mutex::default(),
            max_in_flight: max_in_flight.max(1),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // The state is whole between any two calls that could panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn launched(&self) -> u64 {
        self.lock().launched
    }

    /// Starts an operation and numbers it. No other is started meanwhile, so that the
    /// device gets them in the order of their numbers.
    #[inline]
    pub(super) fn start<R>(&self, operation: impl FnOnce() -> R) -> (R, u64) {
        let mut state = self.lock();
        let result = operation();
        let sequence = state.launched;
        state.launched += 1;
        (result, sequence)
    }

    /// Adds an operation that was started and has not ended. Waits while too many are
    /// under way.
    pub(super) fn push(&self, name: &Arc<str>, sequence: u64, complete: Event, by_host: bool) {
        let added = Arc::new(InFlight {
            name: Arc::clone(name),
            sequence,
            complete,
            by_host,
        });
        let mut state = self.lock();
        // Others may have added theirs since this one was started.
        let behind = state
            .in_flight
            .iter()
            .rev()
            .take_while(|it| it.sequence > sequence)
            .count();
        let place = state.in_flight.len() - behind;
        state.in_flight.insert(place, added);
        state.reap();
        while state.in_flight.len() > self.max_in_flight {
            let oldest = Arc::clone(&state.in_flight[0]);
            drop(state);
            // Its failure is found when it is reaped.
            let _ = oldest.complete.wait();
            state = self.lock();
            state.reap();
        }
    }

    /// Notes the failures of operations that have ended.
    #[inline]
    pub(super) fn reap(&self) {
        self.lock().reap();
    }

    /// The first unreported failure, if it is of an operation before number `before`.
    pub(super) fn take_failure(&self, before: u64) -> Option<Error> {
        self.lock().take_failure(before).map(Error::from)
    }

    pub(super) fn record(&self) -> Marker {
        let state = self.lock();
        Marker {
            end: state.launched,
            in_flight: state.in_flight.iter().cloned().collect(),
        }
    }

    pub(super) fn wait(&self, marker: &Marker, timeout: Option<Duration>) -> Result<(), Error> {
        let start = Instant::now();
        for operation in &marker.in_flight {
            // Failures are found when the operations are reaped.
            let Some(timeout) = timeout else {
                let _ = operation.complete.wait();
                continue;
            };
            let left = timeout.saturating_sub(start.elapsed());
            if operation.complete.wait_timeout(left).is_none() {
                return Err(Error::Timeout {
                    operation: Arc::clone(&operation.name),
                    sequence: operation.sequence,
                    timeout,
                });
            }
        }
        let mut state = self.lock();
        state.reap();
        match state.take_failure(marker.end) {
            Some(failure) => Err(failure.into()),
            None => Ok(()),
        }
    }
}
