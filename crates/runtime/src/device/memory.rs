//! What storages hold, counted.

use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes and buffers that storages hold. A buffer that several storages share counts
/// once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryStats {
    /// Bytes held now.
    pub bytes: u64,
    /// Most bytes ever held, since the last [`reset_peak`].
    pub peak_bytes: u64,
    /// Bytes of all buffers so far, since the last [`reset_accumulated`].
    pub allocated_bytes: u64,
    /// Buffers held now.
    pub buffers: u64,
    /// Most buffers ever held.
    pub peak_buffers: u64,
    /// Buffers so far.
    pub allocated_buffers: u64,
}

struct Gauge {
    now: AtomicU64,
    peak: AtomicU64,
    total: AtomicU64,
}

impl Gauge {
    const fn new() -> Gauge {
        Gauge {
            now: AtomicU64::new(0),
            peak: AtomicU64::new(0),
            total: AtomicU64::new(0),
        }
    }

    fn add(&self, amount: u64) {
        let now = self.now.fetch_add(amount, Ordering::Relaxed) + amount;
        // Mostly it is not a new peak.
        if now > self.peak.load(Ordering::Relaxed) {
            self.peak.fetch_max(now, Ordering::Relaxed);
        }
        self.total.fetch_add(amount, Ordering::Relaxed);
    }
}

static BYTES: Gauge = Gauge::new();
static BUFFERS: Gauge = Gauge::new();

/// A count of one buffer, until dropped.
#[derive(Debug)]
pub(super) struct Counted(u64);

impl Counted {
    pub(super) fn new(bytes: u64) -> Counted {
        BYTES.add(bytes);
        BUFFERS.add(1);
        Counted(bytes)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        BYTES.now.fetch_sub(self.0, Ordering::Relaxed);
        BUFFERS.now.fetch_sub(1, Ordering::Relaxed);
    }
}

/// What storages hold.
pub fn stats() -> MemoryStats {
    let of = |value: &AtomicU64| value.load(Ordering::Relaxed);
    MemoryStats {
        bytes: of(&BYTES.now),
        peak_bytes: of(&BYTES.peak),
        allocated_bytes: of(&BYTES.total),
        buffers: of(&BUFFERS.now),
        peak_buffers: of(&BUFFERS.peak),
        allocated_buffers: of(&BUFFERS.total),
    }
}

/// Makes the present the peak.
pub fn reset_peak() {
    for gauge in [&BYTES, &BUFFERS] {
        gauge
            .peak
            .store(gauge.now.load(Ordering::Relaxed), Ordering::Relaxed);
    }
}

/// Counts totals from zero again.
pub fn reset_accumulated() {
    for gauge in [&BYTES, &BUFFERS] {
        gauge.total.store(0, Ordering::Relaxed);
    }
}
