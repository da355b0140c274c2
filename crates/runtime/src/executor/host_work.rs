//! Work of the host on buffers, in the order of programs.

use std::collections::HashSet;
use std::fmt;
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};

use smallvec::SmallVec;

use super::{Error, Executor};
use crate::Segment;
use crate::pjrt::{self, Code, Dependency, Event, Outputs};

/// Buffers given back, and why.
#[derive(Debug)]
pub struct Refused {
    /// Why.
    pub error: Error,
    /// The buffers, or successors with the same contents.
    pub buffers: Outputs,
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl std::error::Error for Refused {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.error.source()
    }
}

/// Memory of buffers in the host's hands. Dropped unfinished, the buffers fail.
#[derive(Debug)]
pub struct HostWork {
    memory: SmallVec<[Segment; 2]>,
    ready: Result<(), pjrt::Error>,
    dependencies: SmallVec<[Dependency; 2]>,
}

impl HostWork {
    /// Where each buffer's contents are, to be read and written until the work is
    /// finished: nothing else uses them.
    ///
    /// # Errors
    /// When what was to fill the buffers has failed; they hold nothing of use.
    pub fn memory(&self) -> Result<&[Segment], &pjrt::Error> {
        self.ready.as_ref().map(|()| &self.memory[..])
    }

    /// Lets the programs go on that use the buffers, or fails them.
    pub fn finish(self, result: Result<(), (Code, &str)>) {
        for dependency in self.dependencies {
            dependency.resolve(result);
        }
    }
}

/// Calls `work` when the last of several events is ready.
struct Gate<F>(Mutex<Waiting<F>>);

struct Waiting<F> {
    events: usize,
    inner: Option<(F, HostWork)>,
}

impl<F: FnOnce(HostWork)> Gate<F> {
    /// One event less to wait for; its failure is passed on.
    fn open(&self, result: Result<(), pjrt::Error>) {
        let mut waiting = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let (Err(error), Some((_, host))) = (result, &mut waiting.inner) {
            host.ready = Err(error);
        }
        waiting.events -= 1;
        if waiting.events == 0
            && let Some((work, host)) = waiting.inner.take()
        {
            drop(waiting);
            work(host);
        }
    }
}

pub(super) fn start<F: FnOnce(HostWork) + Send + 'static>(
    executor: &Executor,
    name: Arc<str>,
    mut buffers: Outputs,
    work: F,
) -> Result<Outputs, Box<Refused>> {
    let refused = |sequence, source, buffers| {
        let error = Error::Operation {
            operation: Arc::clone(&name),
            sequence,
            source,
        };
        Err(Box::new(Refused { error, buffers }))
    };
    if let Err(source) = check(&buffers) {
        return refused(executor.launched(), source, buffers);
    }

    let mut host = HostWork {
        memory: SmallVec::new(),
        ready: Ok(()),
        dependencies: SmallVec::new(),
    };
    let mut filled = SmallVec::<[Event; 2]>::new();
    let mut done = SmallVec::<[Event; 2]>::new();
    let before = executor.record();
    let (taken, sequence) = executor.queue.start(|| {
        for buffer in &mut buffers {
            // The readiness of the contents, which the successor does not tell.
            let ready = buffer.ready()?;
            let bytes = buffer.device_bytes()?;
            let ptr = ptr::with_exposed_provenance_mut(buffer.address()?);
            let (successor, dependency) = buffer.donate_until()?;
            *buffer = successor;
            host.memory.push(Segment { ptr, bytes });
            host.dependencies.push(dependency);
            filled.push(ready);
            done.push(buffer.ready()?);
        }
        Ok(())
    });
    if let Err(source) = taken {
        host.finish(Ok(()));
        return refused(sequence, source, buffers);
    }
    // Programs may read the old contents; other work of the host has its own buffers.
    let before: Vec<_> = before.in_flight().iter().filter(|it| !it.by_host).collect();
    // One event more than there are: ours, so that the gate opens after all are watched.
    let events = before.len() + filled.len() + 1;
    let gate = Arc::new(Gate(Mutex::new(Waiting {
        events,
        inner: Some((work, host)),
    })));
    let watched = before.iter().map(|operation| (&operation.complete, false));
    let watched = watched.chain(filled.iter().map(|event| (event, true)));
    for (event, ours) in watched {
        let opener = Arc::clone(&gate);
        // Whether earlier programs failed is no concern of these buffers.
        let watch = event.on_ready(move |result| opener.open(if ours { result } else { Ok(()) }));
        if watch.is_err() {
            // No callback will come.
            gate.open(watch);
        }
    }
    gate.open(Ok(()));
    // Last, since this may wait for work under way, which is now on its way to be done.
    for event in done {
        executor.queue.push(&name, sequence, event, true);
    }

    if executor.blocking
        && let Err(error) = executor.synchronize(None)
    {
        return Err(Box::new(Refused { error, buffers }));
    }
    Ok(buffers)
}

/// What can be wrong with buffers before any of them is taken.
fn check(buffers: &Outputs) -> Result<(), pjrt::Error> {
    let mut seen = HashSet::new();
    for (index, buffer) in buffers.iter().enumerate() {
        if !seen.insert(buffer.address()?) && buffer.device_bytes()? > 0 {
            return Err(pjrt::Error::InvalidArgument {
                argument: "buffers",
                message: format!("buffer {index} shares its memory with another"),
            });
        }
        if !buffer.is_on_cpu()? {
            return Err(pjrt::Error::InvalidArgument {
                argument: "buffers",
                message: format!("expected buffers in host memory, buffer {index} is not"),
            });
        }
    }
    Ok(())
}
