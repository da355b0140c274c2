//! The synchronisation that lives in shared memory.

#[cfg(tpu_dist_loom)]
use loom::sync::atomic::{AtomicU32, Ordering, fence};
#[cfg(not(tpu_dist_loom))]
use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::time::Duration;

/// On which the threads of one process sleep until another process has news.
///
/// A publisher stores its news, then calls [`Doorbell::ring`]. A sleeper looks for
/// news inside [`Doorbell::sleep_unless`]. Either the sleeper's look sees the news, or
/// the publisher's look at `sleepers` sees the sleeper: both order their store
/// before their load by a sequentially consistent fence.
#[repr(C, align(128))]
pub(crate) struct Doorbell {
    count: AtomicU32,
    sleepers: AtomicU32,
}

impl Doorbell {
    #[cfg(tpu_dist_loom)]
    fn new() -> Doorbell {
        Doorbell {
            count: AtomicU32::new(0),
            sleepers: AtomicU32::new(0),
        }
    }

    /// Wakes whoever sleeps. The caller has stored its news and passed
    /// [`publish_fence`].
    #[inline]
    pub(crate) fn ring(&self) {
        if self.sleepers.load(Ordering::Relaxed) != 0 {
            self.wake();
        }
    }

    #[cold]
    fn wake(&self) {
        self.count.fetch_add(1, Ordering::SeqCst);
        futex::wake_all(&self.count);
    }

    /// Sleeps until rung or until `timeout` has passed, unless `ready` says that there
    /// is news already.
    pub(crate) fn sleep_unless(&self, timeout: Duration, ready: impl FnOnce() -> bool) {
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        let seen = self.count.load(Ordering::SeqCst);
        fence(Ordering::SeqCst);
        if !ready() {
            futex::wait(&self.count, seen, timeout);
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Orders the news stored before it ahead of the look at a doorbell's sleepers.
#[inline]
pub(crate) fn publish_fence() {
    fence(Ordering::SeqCst);
}

#[cfg(not(tpu_dist_loom))]
mod futex {
    use super::*;
    use rustix::thread::futex;

    pub(super) fn wake_all(word: &AtomicU32) {
        // A failure would mean an unmapped address; the reference excludes it.
        let _ = futex::wake(word, futex::Flags::empty(), i32::MAX as u32);
    }

    pub(super) fn wait(word: &AtomicU32, seen: u32, timeout: Duration) {
        let timeout = futex::Timespec {
            tv_sec: timeout.as_secs() as i64,
            tv_nsec: timeout.subsec_nanos().into(),
        };
        // Woken, changed, timed out, interrupted: the caller looks again in every case.
        let _ = futex::wait(word, futex::Flags::empty(), seen, Some(&timeout));
    }
}

/// A futex as loom can explore it: waiting is a loop that yields.
#[cfg(tpu_dist_loom)]
mod futex {
    use super::*;

    pub(super) fn wake_all(_word: &AtomicU32) {}

    pub(super) fn wait(word: &AtomicU32, seen: u32, _timeout: Duration) {
        while word.load(Ordering::SeqCst) == seen {
            loom::thread::yield_now();
        }
    }
}

#[cfg(all(test, tpu_dist_loom))]
mod loom_tests {
    use super::*;
    use loom::sync::Arc;

    /// A sleeper never misses news: if it did, its wait loop would not end, and loom
    /// would report the run as one that cannot progress.
    #[test]
    fn no_news_is_missed() {
        loom::model(|| {
            let bell = Arc::new(Doorbell::new());
            let news = Arc::new(AtomicU32::new(0));
            let publisher = {
                let (bell, news) = (bell.clone(), news.clone());
                loom::thread::spawn(move || {
                    news.store(1, Ordering::Release);
                    publish_fence();
                    bell.ring();
                })
            };
            bell.sleep_unless(Duration::MAX, || news.load(Ordering::Acquire) == 1);
            // Woken by the ring, or not asleep because the news was there.
            assert_eq!(news.load(Ordering::Acquire), 1);
            publisher.join().unwrap();
        });
    }
}
