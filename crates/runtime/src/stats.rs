//! What a group has done: counts for users.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tpu_dist_collectives::Kind;

/// Sums over the finished operations of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stat {
    /// The kind.
    pub kind: Kind,
    /// `shm` (all ranks on one host), `tcp` (several hosts) or `self` (one rank).
    pub transport: &'static str,
    /// Operations that ended well.
    pub calls: u64,
    /// Bytes that this rank brought and got, the larger of the two for each operation.
    pub bytes: u64,
    /// Bytes that this rank wrote for them: results, and copies to and from shared memory.
    /// Counted over `shm` alone.
    pub written: u64,
    /// Time from the start to the end of each operation; of small synchronous collectives one in
    /// 16 is timed and stands for the others, as the clock would cost a good part of their time.
    pub time: Duration,
}

/// Largest collective that need not be timed, in bytes.
pub(crate) const SAMPLED_BYTES: usize = 4 << 10;
/// One in so many of them is.
const SAMPLE: u64 = 16;

#[derive(Default)]
struct Sums {
    bytes: AtomicU64,
    /// Operations that were all timed, and their time.
    timed: AtomicU64,
    nanos: AtomicU64,
    /// Operations of which some were timed, and their bytes; the number of those, and their time.
    sampled: AtomicU64,
    sampled_bytes: AtomicU64,
    samples: AtomicU64,
    sample_nanos: AtomicU64,
}

/// The counters of a group.
#[derive(Default)]
pub(crate) struct Stats([Sums; Kind::ALL.len()]);

impl Stats {
    pub(crate) fn add(&self, kind: Kind, bytes: u64, time: Duration) {
        let sums = &self.0[kind as usize];
        sums.bytes.fetch_add(bytes, Ordering::Relaxed);
        sums.timed.fetch_add(1, Ordering::Relaxed);
        let nanos = time.as_nanos() as u64;
        sums.nanos.fetch_add(nanos, Ordering::Relaxed);
    }

    /// Whether the next small collective is to be timed.
    pub(crate) fn is_sample(&self, kind: Kind) -> bool {
        let sampled = &self.0[kind as usize].sampled;
        sampled.load(Ordering::Relaxed).is_multiple_of(SAMPLE)
    }

    /// Adds a small collective, timed if it was to be. One thread at a time may call it.
    pub(crate) fn add_sampled(&self, kind: Kind, bytes: u64, time: Option<Duration>) {
        let sums = &self.0[kind as usize];
        let add = |counter: &AtomicU64, amount| {
            let before = counter.load(Ordering::Relaxed);
            counter.store(before + amount, Ordering::Relaxed);
        };
        add(&sums.sampled_bytes, bytes);
        add(&sums.sampled, 1);
        if let Some(time) = time {
            add(&sums.samples, 1);
            add(&sums.sample_nanos, time.as_nanos() as u64);
        }
    }

    /// `written` tells the bytes written by kind.
    pub(crate) fn list(&self, transport: &'static str, written: impl Fn(Kind) -> u64) -> Vec<Stat> {
        let stats = Kind::ALL.iter().map(|&kind| {
            let sums = &self.0[kind as usize];
            let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
            let sampled = load(&sums.sampled);
            let mean = load(&sums.sample_nanos) as f64 / load(&sums.samples).max(1) as f64;
            Stat {
                kind,
                transport,
                calls: load(&sums.timed) + sampled,
                bytes: load(&sums.bytes) + load(&sums.sampled_bytes),
                written: written(kind),
                time: Duration::from_nanos(load(&sums.nanos) + (mean * sampled as f64) as u64),
            }
        });
        stats.filter(|stat| stat.calls > 0).collect()
    }
}
