//! How threads wait, and the thread that moves operations nobody waits for.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::thread::Thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{SigSet, SigmaskHow, pthread_sigmask};

use crate::config::Config;
use crate::fabric::{Fabric, is_forked};

/// Longest sleep of a waiting thread before it looks at deadlines and signals again.
const NAP: Duration = Duration::from_millis(20);
const INTERRUPT_EVERY: Duration = Duration::from_millis(100);
/// How long the background thread stays alert after the last unfinished operation.
const ALERT: Duration = Duration::from_secs(1);

static INTERRUPT_CHECK: OnceLock<fn() -> bool> = OnceLock::new();

/// Installs a function that waiting threads call about every 100 ms: when it returns
/// true, the wait ends with [`crate::Error::Interrupted`]. The first one stays.
pub fn set_interrupt_check(check: fn() -> bool) {
    let _ = INTERRUPT_CHECK.set(check);
}

/// The wait was ended by a signal.
pub(crate) struct Interrupted;

/// How many processes share the cores, which decides how long it pays to spin.
pub(crate) fn is_crowded(ranks_on_host: usize) -> bool {
    static CORES: OnceLock<usize> = OnceLock::new();
    ranks_on_host
        > *CORES.get_or_init(|| std::thread::available_parallelism().map_or(1, usize::from))
}

/// What a look at an awaited operation showed.
pub(crate) enum Step<T> {
    /// It has ended.
    Done(T),
    /// It goes on, and has moved since the last look.
    Moved,
    /// Nothing has changed.
    Idle,
}

impl<T> Step<T> {
    /// For an operation that cannot tell whether it moves.
    pub(crate) fn of(value: Option<T>) -> Step<T> {
        value.map_or(Step::Idle, Step::Done)
    }
}

/// Waits until `poll` is done. As long as something moves, the thread stays at it; when
/// nothing does, it spins, then yields, then sleeps on the doorbell. `check` looks at
/// slower conditions (deadlines, failures) and may end the wait too; it runs now and
/// then.
pub(crate) fn wait<T>(
    fabric: &Fabric,
    crowded: bool,
    mut poll: impl FnMut() -> Step<T>,
    mut check: impl FnMut(Instant) -> Option<T>,
) -> Result<T, Interrupted> {
    // A peer on another core answers within microseconds: spin. A peer that shares this core
    // needs it: yield, which costs next to nothing when nobody else wants the core.
    let spins = if crowded { 20 } else { 500 };
    // Sleep costs more where another host has to wake: the network, the thread that watches it,
    // then this one. Two ranks that slept for each other would not stop. Ranks that share cores
    // yield meanwhile, which costs the others nothing, and wait for longer.
    let factor = if crowded || fabric.has_remote() { 4 } else { 1 };
    let patience = Config::get().spin * factor;
    let mut last_interrupt = None;
    let mut idle = 0u32;
    let mut idle_since = None;
    for round in 1u64.. {
        let moved = match poll() {
            Step::Done(value) => return Ok(value),
            Step::Moved => true,
            Step::Idle => fabric.poll(),
        };
        let mut sleep = false;
        if moved {
            idle = 0;
            idle_since = None;
        } else if idle < spins {
            idle += 1;
            std::hint::spin_loop();
        } else {
            idle += 1;
            let since = *idle_since.get_or_insert_with(Instant::now);
            sleep = idle.is_multiple_of(8) && since.elapsed() >= patience;
            if !sleep {
                std::thread::yield_now();
            }
        }
        if sleep {
            fabric.watch_links();
            let mut value = None;
            fabric.doorbell().sleep_unless(NAP, || {
                let moved = fabric.poll();
                match poll() {
                    Step::Done(done) => value = Some(done),
                    Step::Moved => return true,
                    Step::Idle => {}
                }
                moved || value.is_some() || fabric.has_news()
            });
            if let Some(value) = value {
                return Ok(value);
            }
            idle = 0;
            idle_since = None;
        }
        if sleep || round.is_multiple_of(4096) {
            let now = Instant::now();
            if let Some(value) = check(now) {
                return Ok(value);
            }
            if now - *last_interrupt.get_or_insert(now) >= INTERRUPT_EVERY {
                last_interrupt = Some(now);
                if INTERRUPT_CHECK
                    .get()
                    .is_some_and(|interrupted| interrupted())
                {
                    return Err(Interrupted);
                }
            }
        }
    }
    unreachable!("the loop has no end")
}

/// A source of background work: a group.
pub(crate) trait Work: Send + Sync {
    /// Moves what can be moved. Returns whether anything moved.
    fn advance(&self, now: Instant) -> bool;
    /// Whether an operation is unfinished.
    fn is_pending(&self) -> bool;
}

/// The background thread of a process.
#[derive(Default)]
pub(crate) struct Background {
    work: Mutex<Vec<Weak<dyn Work>>>,
    thread: OnceLock<Thread>,
    /// The thread sleeps without end: it must be woken.
    parked: AtomicBool,
    /// Threads that wait for, and so move, some operation.
    waiting: AtomicUsize,
}

/// Counts a waiting thread, for as long as it lives.
pub(crate) struct Waiting(&'static Background);

impl Background {
    /// The background of this process.
    pub(crate) fn get() -> &'static Background {
        static BACKGROUND: OnceLock<Background> = OnceLock::new();
        BACKGROUND.get_or_init(Background::default)
    }

    /// Adds a group.
    pub(crate) fn add(&self, work: Weak<dyn Work>) {
        let mut list = self.work.lock().expect("no panic while the list is held");
        list.retain(|work| work.strong_count() > 0);
        list.push(work);
    }

    /// Says that the caller moves operations itself for a while.
    pub(crate) fn waiting(&'static self) -> Waiting {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        Waiting(self)
    }

    /// An operation was started that nobody may wait for. Unless it is `urgent`, an alert
    /// thread gets to it within a millisecond, without being woken.
    pub(crate) fn notice(&'static self, fabric: &'static Fabric, urgent: bool) {
        let thread = self.thread.get_or_init(|| {
            let run = move || {
                // Signals are for the user's threads.
                let _ = pthread_sigmask(SigmaskHow::SIG_SETMASK, Some(&SigSet::all()), None);
                self.run(fabric);
            };
            let thread = std::thread::Builder::new()
                .name("tpu_dist-bg".to_owned())
                .spawn(run);
            thread
                .expect("the system can start one thread")
                .thread()
                .clone()
        });
        // The work was added under the locks under which the thread looks for it before it parks:
        // so that thread sees the work, or this one sees it parked.
        if urgent || self.parked.load(Ordering::Acquire) {
            self.parked.store(false, Ordering::Release);
            thread.unpark();
        }
    }

    fn list(&self) -> Vec<Arc<dyn Work>> {
        let list = self.work.lock().expect("no panic while the list is held");
        list.iter().filter_map(Weak::upgrade).collect()
    }

    fn run(&self, fabric: &'static Fabric) {
        let mut last_pending = Instant::now();
        while !is_forked() {
            let now = Instant::now();
            let list = self.list();
            let pending = list.iter().any(|work| work.is_pending());
            if !pending && now - last_pending > ALERT {
                self.parked.store(true, Ordering::SeqCst);
                drop(list);
                if !self.list().iter().any(|work| work.is_pending()) {
                    std::thread::park();
                }
                self.parked.store(false, Ordering::SeqCst);
                last_pending = Instant::now();
                continue;
            }
            if pending {
                last_pending = now;
            }
            if !pending || self.waiting.load(Ordering::Relaxed) > 0 {
                // Nothing to do, or a waiting thread does it; deadlines still count.
                if pending {
                    for work in &list {
                        work.advance(now);
                    }
                }
                drop(list);
                std::thread::park_timeout(Duration::from_millis(1));
                continue;
            }
            let round = || {
                let mut moved = fabric.poll();
                let now = Instant::now();
                for work in &list {
                    moved |= work.advance(now);
                }
                moved
            };
            let mut idle = 0;
            while idle < 50 {
                if round() {
                    idle = 0;
                } else {
                    idle += 1;
                    std::thread::yield_now();
                }
                if !list.iter().any(|work| work.is_pending()) {
                    break;
                }
            }
            if list.iter().any(|work| work.is_pending()) {
                fabric.watch_links();
                fabric
                    .doorbell()
                    .sleep_unless(Duration::from_millis(5), || round() || fabric.has_news());
            }
        }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}
