//! The memory that a rank shares in a group, and the counters in it.
//!
//! Only atomics are accessed by several ranks at once. All else belongs to one rank at a time,
//! and passes from one to another by a counter, stored with release and read with acquire.

#[cfg(tpu_dist_loom)]
pub(super) use loom::sync::atomic::AtomicU64;
#[cfg(not(tpu_dist_loom))]
pub(super) use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering;

use std::mem::offset_of;
use std::ptr::NonNull;

use tpu_dist_collectives::Signature;

use super::ONE_SHOT;

/// Data that fits beside the sequence number and the signature.
pub(super) const INLINE_BYTES: usize = 128 - size_of::<u64>() - Signature::LEN;
/// Bytes of each of the two buffers for small data and for the tables of an all-to-all.
pub(super) const SMALL_BYTES: usize = 64 << 10;
/// Bytes of a staging buffer: all that are in use stay in the cache.
pub(super) const STAGE_BYTES: usize = 256 << 10;
/// The same where ranks share cores, and each round makes them take turns.
pub(super) const CROWDED_STAGE_BYTES: usize = 1 << 20;
/// Staging buffers, used in turn; as few as can be where all interleavings are tried.
pub(super) const STAGES: usize = if cfg!(tpu_dist_loom) { 3 } else { 4 };

/// A rank's shared memory in a group; small buffers and staging buffers follow it.
#[repr(C, align(128))]
pub(super) struct Seat {
    /// Not 0 once the group has failed on this rank: what stands in its slots is void.
    pub(super) failed: AtomicU64,
    /// One bit for each rank: it will not touch this seat any more.
    pub(super) detached: [AtomicU64; MAX_RANKS / 64],
    /// Bytes of each of its staging buffers.
    pub(super) stage_bytes: AtomicU64,
    pub(super) progress: Progress,
    pub(super) slots: [Slot; 2],
}

#[repr(C, align(128))]
pub(super) struct Progress {
    pub(super) produced: AtomicU64,
    pub(super) reduced: AtomicU64,
    pub(super) consumed: AtomicU64,
}

/// An arrival.
#[repr(C, align(128))]
pub(super) struct Slot {
    /// Number of the collective.
    pub(super) sequence: AtomicU64,
    pub(super) signature: [u8; Signature::LEN],
    pub(super) inline: [u8; INLINE_BYTES],
    pub(super) scale: f64,
    /// Where large input and output lie in the rank's region; `NOWHERE` if not in it.
    pub(super) input: u64,
    pub(super) output: u64,
    /// Where large input lies in the rank's memory; `NOWHERE` if in several places, or if this
    /// rank cannot read the memory of another one or has reason not to.
    pub(super) address: u64,
}

/// Not in shared memory, or not in one place.
pub(super) const NOWHERE: u64 = u64::MAX;

pub(super) const SMALL_OFFSET: usize = size_of::<Seat>().next_multiple_of(4096);
pub(super) const STAGE_OFFSET: usize = SMALL_OFFSET + 2 * SMALL_BYTES;
// A rank stages a round before it has read the round before the last one.
const _: () = assert!(STAGES >= 3);

/// Bytes of a seat with what follows it.
pub(super) fn footprint(stage_bytes: usize) -> usize {
    STAGE_OFFSET + STAGES * stage_bytes
}

/// The rounds that all ranks must have consumed before the staging buffer of `round` is written.
pub(super) fn free_after(round: u64) -> Option<u64> {
    (round + 1).checked_sub(STAGES as u64)
}

/// Largest group: the tables of an all-to-all and small data must fit in a small buffer.
pub(crate) const MAX_RANKS: usize = 2048;
const _: () = assert!(TABLES * 8 * MAX_RANKS + ONE_SHOT <= SMALL_BYTES);
/// Tables of an all-to-all, of a number for each rank.
pub(super) const TABLES: usize = 3;

/// The address of a seat.
#[derive(Clone, Copy)]
pub(super) struct SeatPtr(NonNull<u8>);

// SAFETY: a seat is shared memory that the group keeps mapped (its own region and
// the mappings of its peers); the protocol says who may touch which part when.
unsafe impl Send for SeatPtr {}
// SAFETY: as above.
unsafe impl Sync for SeatPtr {}

impl SeatPtr {
    /// # Safety
    /// At `memory` lies a seat, zeroed before first use, that outlives what is made of this; what
    /// follows it too, as far as it is used.
    pub(super) unsafe fn new(memory: NonNull<u8>) -> SeatPtr {
        SeatPtr(memory)
    }

    fn field<T>(&self, offset: usize) -> &T {
        // SAFETY: only called with offsets of atomic fields of a seat (or of its slots), which
        // are aligned and live as long as the group.
        unsafe { self.0.add(offset).cast().as_ref() }
    }

    pub(super) fn failed(&self) -> &AtomicU64 {
        self.field(offset_of!(Seat, failed))
    }

    pub(super) fn detached(&self) -> &[AtomicU64; MAX_RANKS / 64] {
        self.field(offset_of!(Seat, detached))
    }

    pub(super) fn stage_bytes(&self) -> &AtomicU64 {
        self.field(offset_of!(Seat, stage_bytes))
    }

    pub(super) fn progress(&self) -> &Progress {
        self.field(offset_of!(Seat, progress))
    }

    /// Whether the rank has come so far: `target` is a collective's number for `Arrived`, and a
    /// number of rounds for the others.
    pub(super) fn has(&self, counter: Counter, target: u64) -> bool {
        let value = match counter {
            Counter::Attached => return true,
            Counter::Arrived => self.sequence(target),
            Counter::Produced => &self.progress().produced,
            Counter::Reduced => &self.progress().reduced,
            Counter::Consumed => &self.progress().consumed,
        };
        value.load(Ordering::Acquire) >= target
    }

    pub(super) fn slot(&self, sequence: u64) -> NonNull<Slot> {
        let offset = offset_of!(Seat, slots) + (sequence % 2) as usize * size_of::<Slot>();
        // SAFETY: inside the seat.
        unsafe { self.0.add(offset).cast() }
    }

    pub(super) fn sequence(&self, sequence: u64) -> &AtomicU64 {
        // SAFETY: an atomic of a slot, as in `field`.
        unsafe { &(*self.slot(sequence).as_ptr()).sequence }
    }

    /// What the rank said in its arrival.
    ///
    /// # Safety
    /// The arrival was published, and the collective after it has not ended on this rank.
    pub(super) unsafe fn signature(&self, sequence: u64) -> [u8; Signature::LEN] {
        // SAFETY: inside the seat; published before the sequence number, and not written
        // until all ranks have entered the next collective.
        unsafe { (*self.slot(sequence).as_ptr()).signature }
    }

    pub(super) fn inline(&self, sequence: u64) -> *mut u8 {
        // SAFETY: the address of a field of the slot; nothing is read.
        unsafe { (&raw mut (*self.slot(sequence).as_ptr()).inline).cast() }
    }

    pub(super) fn small(&self, sequence: u64) -> *mut u8 {
        // SAFETY: inside the seat's memory.
        unsafe {
            self.0
                .add(SMALL_OFFSET + (sequence % 2) as usize * SMALL_BYTES)
                .as_ptr()
        }
    }

    /// The staging buffer of a round, in a group whose rounds have `bytes`.
    pub(super) fn stage(&self, round: u64, bytes: usize) -> *mut u8 {
        // SAFETY: inside the seat's memory: no seat's buffers are smaller (`round_bytes`).
        unsafe {
            self.0
                .add(STAGE_OFFSET + (round % STAGES as u64) as usize * bytes)
                .as_ptr()
        }
    }
}

/// A counter that ranks wait for.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Counter {
    Attached,
    Arrived,
    Produced,
    Reduced,
    Consumed,
}

impl Counter {
    pub(super) const ALL: [Counter; 5] = [
        Counter::Attached,
        Counter::Arrived,
        Counter::Produced,
        Counter::Reduced,
        Counter::Consumed,
    ];
}

#[cfg(all(test, tpu_dist_loom))]
mod loom_tests {
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;

    use super::*;

    /// Two ranks: their seats, and cells that stand for what the protocol guards. Loom reports
    /// two accesses to a cell of which neither is before the other.
    struct Ranks {
        seats: [Box<Seat>; 2],
        data: [Vec<UnsafeCell<u64>>; 2],
    }

    // SAFETY: loom checks the accesses to the cells.
    unsafe impl Send for Ranks {}
    // SAFETY: as above.
    unsafe impl Sync for Ranks {}

    impl Ranks {
        fn new(cells: usize) -> Arc<Ranks> {
            let seat = || {
                let zero = || AtomicU64::new(0);
                let slot = || Slot {
                    sequence: zero(),
                    signature: [0; Signature::LEN],
                    inline: [0; INLINE_BYTES],
                    scale: 0.0,
                    input: 0,
                    output: 0,
                    address: 0,
                };
                Box::new(Seat {
                    failed: zero(),
                    detached: std::array::from_fn(|_| zero()),
                    stage_bytes: zero(),
                    progress: Progress {
                        produced: zero(),
                        reduced: zero(),
                        consumed: zero(),
                    },
                    slots: [slot(), slot()],
                })
            };
            let data = || (0..cells).map(|_| UnsafeCell::new(0)).collect();
            Arc::new(Ranks {
                seats: [seat(), seat()],
                data: [data(), data()],
            })
        }

        fn seat(&self, rank: usize) -> SeatPtr {
            // SAFETY: a seat, which lives as long as this.
            unsafe { SeatPtr::new(NonNull::from(&*self.seats[rank]).cast()) }
        }

        fn wait(&self, rank: usize, counter: Counter, target: u64) {
            while !self.seat(rank).has(counter, target) {
                loom::thread::yield_now();
            }
        }

        fn write(&self, rank: usize, cell: usize, value: u64) {
            // SAFETY: loom checks it.
            self.data[rank][cell].with_mut(|data| unsafe { *data = value });
        }

        fn read(&self, rank: usize, cell: usize) -> u64 {
            // SAFETY: loom checks it.
            self.data[rank][cell].with(|data| unsafe { *data })
        }
    }

    fn model(
        cells: usize,
        preemptions: usize,
        rank: impl Fn(&Ranks, usize) + Send + Sync + Copy + 'static,
    ) {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(preemptions);
        model.check(move || {
            let ranks = Ranks::new(cells);
            let other = {
                let ranks = ranks.clone();
                loom::thread::spawn(move || rank(&ranks, 1))
            };
            rank(&ranks, 0);
            other.join().unwrap();
        });
    }

    /// The slots alternate, and nothing else is said: a rank that has seen all arrivals of a
    /// collective may write the slot of the one before.
    #[test]
    fn arrivals_take_turns() {
        model(2, 3, |ranks, me| {
            for sequence in 1..=4 {
                let slot = sequence as usize % 2;
                ranks.write(me, slot, sequence);
                ranks
                    .seat(me)
                    .sequence(sequence)
                    .store(sequence, Ordering::Release);
                ranks.wait(1 - me, Counter::Arrived, sequence);
                assert_eq!(ranks.read(1 - me, slot), sequence);
            }
        });
    }

    /// The rounds of a broadcast, as `Local::broadcast` orders them: a staging buffer is written
    /// again when it has been read.
    #[test]
    fn staging_buffers_are_read_before_they_are_written_again() {
        model(STAGES, 3, |ranks, me| {
            for round in 0..STAGES as u64 + 2 {
                let cell = round as usize % STAGES;
                let seat = ranks.seat(me);
                if me == 0 {
                    if let Some(target) = free_after(round) {
                        ranks.wait(1, Counter::Consumed, target);
                    }
                    ranks.write(0, cell, round);
                    seat.progress().produced.store(round + 1, Ordering::Release);
                } else {
                    ranks.wait(0, Counter::Produced, round + 1);
                    assert_eq!(ranks.read(0, cell), round);
                    seat.progress().consumed.store(round + 1, Ordering::Release);
                }
            }
        });
    }

    /// The rounds of an all-reduce of two ranks, as `Local::all_reduce` orders them: each stages
    /// for the other, who puts the result in the same place.
    #[test]
    fn rounds_take_turns() {
        model(STAGES, 1, |ranks, me| {
            let count = STAGES as u64 + 1;
            let (own, progress) = (ranks.seat(me), ranks.seat(me));
            let progress = progress.progress();
            let stage = |round: u64| {
                if let Some(target) = free_after(round) {
                    ranks.wait(1 - me, Counter::Consumed, target);
                }
                ranks.write(me, round as usize % STAGES, 2 * round);
                own.progress().produced.store(round + 1, Ordering::Release);
            };
            let collect = |round: u64| {
                ranks.wait(1 - me, Counter::Reduced, round + 1);
                assert_eq!(ranks.read(me, round as usize % STAGES), 2 * round + 1);
                progress.consumed.store(round + 1, Ordering::Release);
            };
            stage(0);
            for round in 0..count {
                if round + 1 < count {
                    stage(round + 1);
                }
                ranks.wait(1 - me, Counter::Produced, round + 1);
                let cell = round as usize % STAGES;
                let staged = ranks.read(1 - me, cell);
                assert_eq!(staged, 2 * round);
                ranks.write(1 - me, cell, staged + 1);
                progress.reduced.store(round + 1, Ordering::Release);
                if round > 0 {
                    collect(round - 1);
                }
            }
            collect(count - 1);
        });
    }
}
