//! The synchronisation that lives in shared memory.

#[cfg(tpu_dist_loom)]
use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
#[cfg(not(tpu_dist_loom))]
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
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

/// Says which peers have news: a bit for each.
///
/// A peer stores its news, then calls [`Inbox::mark`]; the owner takes the marks, then
/// looks at the news of each marked peer. Either the owner's look sees the news, or a
/// mark is set after it: each side has a sequentially consistent fence between its store
/// (the news; the taking of the mark) and its load (the mark; the news).
#[repr(C, align(128))]
pub(crate) struct Inbox([AtomicU64; Inbox::WORDS]);

impl Inbox {
    const WORDS: usize = 16;
    /// Number of bits.
    pub(crate) const BITS: usize = 64 * Inbox::WORDS;

    #[cfg(tpu_dist_loom)]
    fn new() -> Inbox {
        Inbox(std::array::from_fn(|_| AtomicU64::new(0)))
    }

    /// Says that the peer with `bit` has news, which it has stored.
    pub(crate) fn mark(&self, bit: u32) {
        let word = &self.0[bit as usize / 64];
        let mask = 1 << (bit % 64);
        fence(Ordering::SeqCst);
        if word.load(Ordering::Relaxed) & mask == 0 {
            word.fetch_or(mask, Ordering::Release);
        }
    }

    /// Takes all marks, calling `visit` with each bit.
    pub(crate) fn take(&self, mut visit: impl FnMut(u32)) {
        for (index, word) in self.0.iter().enumerate() {
            if word.load(Ordering::Relaxed) == 0 {
                continue;
            }
            let mut bits = word.swap(0, Ordering::Acquire);
            fence(Ordering::SeqCst);
            while bits != 0 {
                visit(index as u32 * 64 + bits.trailing_zeros());
                bits &= bits - 1;
            }
        }
    }

    /// Whether any mark is set.
    pub(crate) fn is_marked(&self) -> bool {
        self.0.iter().any(|word| word.load(Ordering::Acquire) != 0)
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

    /// News is never lost: when the owner took a mark without seeing the news that goes with
    /// it, another mark is set.
    #[test]
    fn no_mark_is_lost() {
        loom::model(|| {
            let inbox = Arc::new(Inbox::new());
            let news = Arc::new(AtomicU32::new(0));
            let peer = {
                let (inbox, news) = (inbox.clone(), news.clone());
                loom::thread::spawn(move || {
                    for count in 1..=2 {
                        news.store(count, Ordering::Release);
                        inbox.mark(3);
                    }
                })
            };
            let mut seen = 0;
            inbox.take(|bit| {
                assert_eq!(bit, 3);
                seen = news.load(Ordering::Acquire);
            });
            peer.join().unwrap();
            inbox.take(|_| seen = news.load(Ordering::Acquire));
            assert_eq!(seen, 2);
        });
    }

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
