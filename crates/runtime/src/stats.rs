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
    /// Time from the start to the end of each operation.
    pub time: Duration,
}

#[derive(Default)]
struct Sums {
    calls: AtomicU64,
    bytes: AtomicU64,
    nanos: AtomicU64,
}

/// The counters of a group.
#[derive(Default)]
pub(crate) struct Stats([Sums; Kind::ALL.len()]);

impl Stats {
    pub(crate) fn add(&self, kind: Kind, bytes: u64, time: Duration) {
        let sums = &self.0[kind as usize];
        sums.calls.fetch_add(1, Ordering::Relaxed);
        sums.bytes.fetch_add(bytes, Ordering::Relaxed);
        sums.nanos
            .fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
    }

    /// `written` tells the bytes written by kind.
    pub(crate) fn list(&self, transport: &'static str, written: impl Fn(Kind) -> u64) -> Vec<Stat> {
        let stats = Kind::ALL.iter().map(|&kind| {
            let sums = &self.0[kind as usize];
            Stat {
                kind,
                transport,
                calls: sums.calls.load(Ordering::Relaxed),
                bytes: sums.bytes.load(Ordering::Relaxed),
                written: written(kind),
                time: Duration::from_nanos(sums.nanos.load(Ordering::Relaxed)),
            }
        });
        stats.filter(|stat| stat.calls > 0).collect()
    }
}
