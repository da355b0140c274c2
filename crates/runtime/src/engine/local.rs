//! Collectives of ranks that share memory.
//!
//! Each rank has a [`Seat`] for the group in its process's region. A collective begins
//! with an *arrival*: each rank writes its signature, and its data when that is
//! small, into one of two slots (they alternate), and waits until all have arrived.
//! So when a rank completes collective k, all have entered k, and so have left k-1: a
//! slot can be written again two collectives later without another word. Large data
//! goes through staging buffers in *rounds*, numbered through the life of the group:
//! three counters of each rank say which rounds it has staged (`produced`), reduced
//! (`reduced`) and read completely (`consumed`).
//!
//! Large data that lies in the ranks' regions anyway (see [`crate::arena`]) is not
//! staged: the arrival says where it is, the others use it in place, and a rank leaves
//! when all have done so, which takes one round. In the same way, ranks that may read each
//! other's memory (see [`crate::transport::peer_memory`]) fetch what is moved and not reduced from
//! where it is.

use std::future::poll_fn;
use std::mem::offset_of;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::Poll;

use nix::errno::Errno;
use smallvec::SmallVec;
use tpu_dist_collectives::reduce::copy;
use tpu_dist_collectives::{Kind, ReduceKind, Signature};

use super::data::Data;
use super::{Failure, Job, walk};
use crate::Error;
use crate::call::{Call, Pieces, Segment, joined};
use crate::fabric::{Fabric, Peer};
use crate::sync::{Doorbell, publish_fence};

/// Data that fits beside the sequence number and the signature.
const INLINE_BYTES: usize = 128 - size_of::<u64>() - Signature::LEN;
/// Bytes of each of the two buffers for small data and for the tables of an all-to-all.
const SMALL_BYTES: usize = 64 << 10;
/// Bytes of a staging buffer: all that are in use stay in the cache.
const STAGE_BYTES: usize = 256 << 10;
/// The same where ranks share cores, and each round makes them take turns.
const CROWDED_STAGE_BYTES: usize = 1 << 20;
/// Staging buffers, used in turn.
const STAGES: usize = 4;
/// Up to here data travels with the arrival, and all ranks read all of it.
const ONE_SHOT: usize = 8 << 10;
/// The same for an all-reduce, where above it each rank reduces a part, and the parts are
/// gathered.
const ONE_SHOT_REDUCE: usize = 4 << 10;

/// Whether it pays for ranks to read pieces of so many bytes from each other's memory. Larger
/// ones move through the staging buffers, which the caches hold, as fast. Between ranks that
/// share cores a round costs less than the system calls, and what several ranks read from one
/// buffer is in their cache.
fn pays_to_pull(kind: Kind, crowded: bool, piece: usize) -> bool {
    match (kind, crowded) {
        (Kind::AllToAll, true) => (256 << 10..=8 << 20).contains(&piece),
        (Kind::AllGather | Kind::AllToAll, false) => piece <= 16 << 20,
        (Kind::Gather | Kind::Scatter | Kind::Broadcast, false) => piece <= 2 << 20,
        _ => false,
    }
}

/// A rank's shared memory in a group; small buffers and staging buffers follow it.
#[repr(C, align(128))]
struct Seat {
    /// Not 0 once the group has failed on this rank: what stands in its slots is void.
    failed: AtomicU64,
    /// One bit for each rank: it will not touch this seat any more.
    detached: [AtomicU64; MAX_RANKS / 64],
    /// Bytes of each of its staging buffers.
    stage_bytes: AtomicU64,
    progress: Progress,
    slots: [Slot; 2],
}

#[repr(C, align(128))]
struct Progress {
    produced: AtomicU64,
    reduced: AtomicU64,
    consumed: AtomicU64,
}

/// An arrival.
#[repr(C, align(128))]
struct Slot {
    /// Number of the collective.
    sequence: AtomicU64,
    signature: [u8; Signature::LEN],
    inline: [u8; INLINE_BYTES],
    scale: f64,
    /// Where large input and output lie in the rank's region; `NOWHERE` if not in it.
    input: u64,
    output: u64,
    /// Where large input lies in the rank's memory; `NOWHERE` if in several places, or if this
    /// rank cannot read the memory of another one or has reason not to.
    address: u64,
}

/// Not in shared memory, or not in one place.
const NOWHERE: u64 = u64::MAX;

const SMALL_OFFSET: usize = size_of::<Seat>().next_multiple_of(4096);
const STAGE_OFFSET: usize = SMALL_OFFSET + 2 * SMALL_BYTES;
// A rank stages a round before it has read the round before the last one.
const _: () = assert!(STAGES >= 3);

/// Bytes of a seat with what follows it.
fn footprint(stage_bytes: usize) -> usize {
    STAGE_OFFSET + STAGES * stage_bytes
}

/// Largest group: the tables of an all-to-all and small data must fit in a small buffer.
pub(crate) const MAX_RANKS: usize = 2048;
const _: () = assert!(TABLES * 8 * MAX_RANKS + ONE_SHOT <= SMALL_BYTES);
/// Tables of an all-to-all, of a number for each rank.
const TABLES: usize = 3;

/// The address of a seat.
#[derive(Clone, Copy)]
struct SeatPtr(NonNull<u8>);

// SAFETY: a seat is shared memory that the group keeps mapped (its own region and
// the mappings of its peers); the protocol above says who may touch which part when.
unsafe impl Send for SeatPtr {}
// SAFETY: as above.
unsafe impl Sync for SeatPtr {}

impl SeatPtr {
    fn field<T>(&self, offset: usize) -> &T {
        // SAFETY: only called with offsets of atomic fields of a seat (or of its slots), which
        // are aligned and live as long as the group.
        unsafe { self.0.add(offset).cast().as_ref() }
    }

    fn failed(&self) -> &AtomicU64 {
        self.field(offset_of!(Seat, failed))
    }

    fn detached(&self) -> &[AtomicU64; MAX_RANKS / 64] {
        self.field(offset_of!(Seat, detached))
    }

    fn stage_bytes(&self) -> &AtomicU64 {
        self.field(offset_of!(Seat, stage_bytes))
    }

    fn progress(&self) -> &Progress {
        self.field(offset_of!(Seat, progress))
    }

    fn slot(&self, sequence: u64) -> NonNull<Slot> {
        let offset = offset_of!(Seat, slots) + (sequence % 2) as usize * size_of::<Slot>();
        // SAFETY: inside the seat.
        unsafe { self.0.add(offset).cast() }
    }

    fn sequence(&self, sequence: u64) -> &AtomicU64 {
        // SAFETY: an atomic of a slot, as in `field`.
        unsafe { &(*self.slot(sequence).as_ptr()).sequence }
    }

    /// What the rank said in its arrival.
    ///
    /// # Safety
    /// The arrival was published, and the collective after it has not ended on this rank.
    unsafe fn signature(&self, sequence: u64) -> [u8; Signature::LEN] {
        // SAFETY: inside the seat; published before the sequence number, and not written
        // until all ranks have entered the next collective.
        unsafe { (*self.slot(sequence).as_ptr()).signature }
    }

    fn inline(&self, sequence: u64) -> *mut u8 {
        // SAFETY: the address of a field of the slot; nothing is read.
        unsafe { (&raw mut (*self.slot(sequence).as_ptr()).inline).cast() }
    }

    fn small(&self, sequence: u64) -> *mut u8 {
        // SAFETY: inside the seat's memory.
        unsafe {
            self.0
                .add(SMALL_OFFSET + (sequence % 2) as usize * SMALL_BYTES)
                .as_ptr()
        }
    }

    /// The staging buffer of a round, in a group whose rounds have `bytes`.
    fn stage(&self, round: u64, bytes: usize) -> *mut u8 {
        // SAFETY: inside the seat's memory: no seat's buffers are smaller (`round_bytes`).
        unsafe {
            self.0
                .add(STAGE_OFFSET + (round % STAGES as u64) as usize * bytes)
                .as_ptr()
        }
    }
}

/// Where a rank's data lies in shared memory, as far as it does.
struct Window {
    input: Option<*mut u8>,
    output: Option<*mut u8>,
}

// SAFETY: addresses of shared memory, which stays mapped as long as the group; who may
// touch it when, the protocol says.
unsafe impl Send for Window {}
// SAFETY: as above.
unsafe impl Sync for Window {}

/// A counter that ranks wait for.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum Counter {
    Attached,
    Arrived,
    Produced,
    Reduced,
    Consumed,
}

impl Counter {
    const ALL: [Counter; 5] = [
        Counter::Attached,
        Counter::Arrived,
        Counter::Produced,
        Counter::Reduced,
        Counter::Consumed,
    ];
}

/// The engine of a group on one host. One collective at a time uses it.
pub(crate) struct Local {
    me: usize,
    ranks: usize,
    key: u64,
    fabric: Arc<Fabric>,
    own_offset: usize,
    own_stage_bytes: usize,
    /// Bytes of a round: of the smallest staging buffers, once all seats were found.
    round_bytes: AtomicUsize,
    peers: Vec<Option<Arc<Peer>>>,
    crowded: bool,
    /// Whether this rank can read the memory of all others.
    reads_all: bool,
    /// The seat of each rank, once found.
    seats: Vec<OnceLock<SeatPtr>>,
    attached: AtomicBool,
    /// Rounds of all collectives so far; the running collective's to read and write.
    rounds: AtomicU64,
    /// What the running collective waits for: a counter, its target, and of whom.
    waits_for: AtomicU8,
    waits_until: AtomicU64,
    /// Bytes written, by kind.
    written: [AtomicU64; Kind::ALL.len()],
}

impl Local {
    /// Takes a seat in group `key`. Peers are by group rank; the own one is `None`.
    pub(crate) fn new(
        fabric: Arc<Fabric>,
        key: u64,
        me: u32,
        peers: Vec<Option<Arc<Peer>>>,
        crowded: bool,
    ) -> Result<Local, Error> {
        let own_stage_bytes = if crowded {
            CROWDED_STAGE_BYTES
        } else {
            STAGE_BYTES
        };
        let bytes = footprint(own_stage_bytes);
        let own_offset = fabric.region.allocate(bytes)?;
        let own = SeatPtr(fabric.region.mapping.at(own_offset, bytes)?);
        own.stage_bytes()
            .store(own_stage_bytes as u64, Ordering::Release);
        fabric.region.publish_seat(key, own_offset)?;
        fabric.ring_peers(&peers);
        let seats: Vec<OnceLock<SeatPtr>> = peers.iter().map(|_| OnceLock::new()).collect();
        let _ = seats[me as usize].set(own);
        Ok(Local {
            me: me as usize,
            ranks: peers.len(),
            key,
            fabric,
            own_offset,
            own_stage_bytes,
            round_bytes: AtomicUsize::new(STAGE_BYTES),
            crowded,
            reads_all: peers.iter().flatten().all(|peer| peer.memory.is_some()),
            peers,
            seats,
            attached: AtomicBool::new(false),
            rounds: AtomicU64::new(0),
            waits_for: AtomicU8::new(0),
            waits_until: AtomicU64::new(0),
            written: Default::default(),
        })
    }

    pub(crate) fn ranks(&self) -> usize {
        self.ranks
    }

    /// Bytes that this rank has written in collectives of a kind: results, and copies to
    /// and from shared memory.
    pub(crate) fn written(&self, kind: Kind) -> u64 {
        self.written[kind as usize].load(Ordering::Relaxed)
    }

    /// Changes whenever the running collective waits for something new.
    pub(crate) fn stamp(&self) -> u64 {
        let counter = u64::from(self.waits_for.load(Ordering::Relaxed));
        self.waits_until.load(Ordering::Relaxed) * Counter::ALL.len() as u64 + counter + 1
    }

    /// Ranks that keep the running collective waiting.
    pub(crate) fn late(&self) -> Vec<u32> {
        let counter = Counter::ALL[self.waits_for.load(Ordering::Relaxed) as usize];
        let target = self.waits_until.load(Ordering::Relaxed);
        let late =
            (0..self.ranks).filter(|&rank| rank != self.me && !self.has(counter, rank, target));
        late.map(|rank| rank as u32).collect()
    }

    /// Runs collective number `sequence` (from 1).
    pub(crate) async fn run(&self, job: &Job, sequence: u64) -> Result<(), Failure> {
        if !self.attached.load(Ordering::Relaxed) {
            self.all_have(Counter::Attached, 0).await;
            let stages = (0..self.ranks)
                .map(|rank| self.seat(rank).stage_bytes().load(Ordering::Acquire) as usize);
            let least = stages.min().unwrap_or(STAGE_BYTES);
            self.round_bytes.store(least, Ordering::Relaxed);
            self.attached.store(true, Ordering::Relaxed);
        }
        let small = self.is_small(job);
        let agreed = job.agreed().encode();
        self.arrive(job, sequence, small, agreed);
        self.all_have(Counter::Arrived, sequence).await;
        self.compare(job, sequence, agreed)?;
        if job.call.kind == Kind::AllToAll {
            return self.all_to_all(job, sequence).await;
        }
        let scales = self.scales(job, sequence);
        if small {
            let data = self.data(job);
            data.finish_whole(&scales, |rank| {
                self.small_data(rank, sequence, data.contribution_of(rank))
            });
            return Ok(());
        }
        let data = self.data(job);
        let contribution = |rank| data.contribution_of(rank);
        let is_read_from = |rank| data.is_read_from(rank);
        if self.ranks > 1
            && let Some(windows) = self.windows(job, sequence, contribution, is_read_from)
        {
            return self.in_place(job, &scales, &windows).await;
        }
        if self.can_pull(sequence) {
            return self.pull(&data, sequence).await;
        }
        match job.call.kind {
            Kind::AllReduce => self.all_reduce(job, &scales).await,
            Kind::AllGather => self.all_gather(job).await,
            Kind::ReduceScatter => self.reduce_scatter(job, &scales).await,
            Kind::Broadcast => self.broadcast(job).await,
            Kind::Reduce => self.reduce(job, &scales).await,
            Kind::Gather => self.gather(job).await,
            Kind::Scatter => self.scatter(job).await,
            Kind::Barrier | Kind::AllToAll | Kind::Send | Kind::Recv | Kind::MonitoredBarrier => {}
        }
        Ok(())
    }

    fn seat(&self, rank: usize) -> SeatPtr {
        *self.seats[rank]
            .get()
            .expect("a collective runs after all seats were found")
    }

    fn own(&self) -> SeatPtr {
        self.seat(self.me)
    }

    fn round_bytes(&self) -> usize {
        self.round_bytes.load(Ordering::Relaxed)
    }

    /// The staging buffer of `rank` in a round.
    fn stage(&self, rank: usize, round: u64) -> *mut u8 {
        self.seat(rank).stage(round, self.round_bytes())
    }

    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let (me, ranks) = (self.me, self.ranks);
        (1..ranks).map(move |step| (me + step) % ranks)
    }

    // ---- waiting and telling ----

    fn has(&self, counter: Counter, rank: usize, target: u64) -> bool {
        if counter == Counter::Attached {
            return self.find_seat(rank);
        }
        let Some(seat) = self.seats[rank].get() else {
            return false;
        };
        let value = match counter {
            Counter::Attached => return true,
            Counter::Arrived => seat.sequence(target),
            Counter::Produced => &seat.progress().produced,
            Counter::Reduced => &seat.progress().reduced,
            Counter::Consumed => &seat.progress().consumed,
        };
        value.load(Ordering::Acquire) >= target
    }

    fn find_seat(&self, rank: usize) -> bool {
        if self.seats[rank].get().is_some() {
            return true;
        }
        let mapping = self.peers[rank]
            .as_ref()
            .and_then(|peer| peer.mapping.as_ref());
        let Some(mapping) = mapping else { return false };
        let Some(offset) = mapping.find_seat(self.key) else {
            return false;
        };
        // A peer that names a range outside its memory is never found.
        let Ok(head) = mapping.at(offset, size_of::<Seat>()) else {
            return false;
        };
        let stage_bytes = SeatPtr(head).stage_bytes().load(Ordering::Acquire) as usize;
        if ![STAGE_BYTES, CROWDED_STAGE_BYTES].contains(&stage_bytes) {
            return false;
        }
        let Ok(seat) = mapping.at(offset, footprint(stage_bytes)) else {
            return false;
        };
        let _ = self.seats[rank].set(SeatPtr(seat));
        true
    }

    async fn all_have(&self, counter: Counter, target: u64) {
        self.waits_for.store(counter as u8, Ordering::Relaxed);
        self.waits_until.store(target, Ordering::Relaxed);
        let mut next = 0;
        poll_fn(|_| {
            while next < self.ranks {
                if next != self.me && !self.has(counter, next, target) {
                    return Poll::Pending;
                }
                next += 1;
            }
            Poll::Ready(())
        })
        .await;
    }

    async fn one_has(&self, rank: usize, counter: Counter, target: u64) {
        if rank == self.me || self.has(counter, rank, target) {
            return;
        }
        self.waits_for.store(counter as u8, Ordering::Relaxed);
        self.waits_until.store(target, Ordering::Relaxed);
        poll_fn(|_| {
            if self.has(counter, rank, target) {
                Poll::Ready(())
            } else {
                Poll::Pending
            }
        })
        .await;
    }

    fn tell(&self, counter: &AtomicU64, value: u64) {
        counter.store(value, Ordering::Release);
        self.fabric.ring_peers(&self.peers);
    }

    // ---- arrival ----

    fn data<'a>(&'a self, job: &'a Job) -> Data<'a> {
        Data {
            job,
            me: self.me,
            ranks: self.ranks,
            written: &self.written[job.call.kind as usize],
        }
    }

    /// Whether the data travels with the arrival: the same answer on all ranks whose
    /// signatures agree.
    fn is_small(&self, job: &Job) -> bool {
        let limit = match job.call.kind {
            Kind::AllReduce => ONE_SHOT_REDUCE,
            _ => ONE_SHOT,
        };
        self.data(job).largest_contribution() <= limit
    }

    fn arrive(&self, job: &Job, sequence: u64, small: bool, agreed: [u8; Signature::LEN]) {
        let own = self.own();
        let slot = own.slot(sequence).as_ptr();
        // SAFETY: the slot and the small buffer of this parity are this rank's to write: all
        // ranks have left the collective that used them last, two ago.
        unsafe {
            (*slot).signature = agreed;
            if let Some(scale) = job.scale() {
                (*slot).scale = scale;
            }
        }
        if !small {
            let offset = |pieces: &Pieces| {
                let whole = joined(pieces.segments())?;
                let region = &self.fabric.region.mapping;
                region.offset_of(whole.ptr, whole.bytes)
            };
            let place = |pieces| offset(pieces).map_or(NOWHERE, |offset| offset as u64);
            // SAFETY: as above.
            unsafe {
                (*slot).input = place(&job.call.input);
                (*slot).output = place(&job.call.output);
                (*slot).address = self.address(job, job.call.input.segments());
            }
        }
        if job.call.kind == Kind::AllToAll {
            self.write_tables(job, sequence);
        } else if small {
            let data = self.data(job);
            let (segments, bytes) = data.contribution();
            data.count(bytes);
            let to = if bytes <= INLINE_BYTES {
                own.inline(sequence)
            } else {
                own.small(sequence)
            };
            // SAFETY: as above, and `bytes` fits (`is_small`).
            walk(segments, 0, bytes, |ptr, at, count| unsafe {
                copy(to.add(at), ptr, count)
            });
        }
        self.tell(own.sequence(sequence), sequence);
    }

    /// Where `rank` put `bytes` of small data.
    fn small_data(&self, rank: usize, sequence: u64, bytes: usize) -> *mut u8 {
        let seat = self.seat(rank);
        if bytes <= INLINE_BYTES {
            seat.inline(sequence)
        } else {
            seat.small(sequence)
        }
    }

    /// Says to the other ranks that this one takes no part any more.
    pub(crate) fn fail(&self) {
        if let Some(own) = self.seats[self.me].get() {
            self.tell(own.failed(), 1);
        }
    }

    fn compare(
        &self,
        job: &Job,
        sequence: u64,
        agreed: [u8; Signature::LEN],
    ) -> Result<(), Failure> {
        self.none_failed()?;
        // SAFETY: all ranks have arrived, and this one is in the collective.
        let said = |rank: usize| unsafe { self.seat(rank).signature(sequence) };
        if self.others().all(|rank| said(rank) == agreed) {
            return Ok(());
        }
        // Name the lowest rank, and the lowest that differs from it: all ranks say the same.
        let first = said(0);
        let other = (1..self.ranks)
            .find(|&rank| said(rank) != first)
            .unwrap_or(self.me);
        let signature = |rank| Signature::decode(&said(rank)).unwrap_or(job.signature);
        Err(Failure::Mismatch {
            rank: other as u32,
            theirs: signature(other),
            own_rank: 0,
            ours: signature(0),
        })
    }

    /// The factors of all ranks, for PREMUL_SUM.
    fn scales(&self, job: &Job, sequence: u64) -> SmallVec<[f64; 8]> {
        if job
            .call
            .op
            .is_none_or(|op| op.kind() != ReduceKind::PremulSum)
        {
            return SmallVec::new();
        }
        // SAFETY: as in `compare`.
        (0..self.ranks)
            .map(|rank| unsafe { (*self.seat(rank).slot(sequence).as_ptr()).scale })
            .collect()
    }

    // ---- large data, in place ----

    /// Where each rank's data lies, when all that ranks need of each other is in shared
    /// memory: the same answer on all ranks.
    ///
    /// `bytes` is what a rank brings; input counts where `is_needed`.
    fn windows(
        &self,
        job: &Job,
        sequence: u64,
        bytes: impl Fn(usize) -> usize,
        is_needed: impl Fn(usize) -> bool,
    ) -> Option<SmallVec<[Window; 8]>> {
        let window = |rank: usize| {
            // SAFETY: as in `compare`.
            let (input, output) = unsafe {
                let slot = self.seat(rank).slot(sequence).as_ptr();
                ((*slot).input, (*slot).output)
            };
            let mapping = match &self.peers[rank] {
                Some(peer) => peer.mapping.as_deref()?,
                None => &self.fabric.region.mapping,
            };
            let address = |offset| mapping.window(offset, bytes(rank)).map(NonNull::as_ptr);
            let window = Window {
                input: address(input),
                output: address(output),
            };
            let complete = (window.input.is_some() || !is_needed(rank))
                && (window.output.is_some() || job.call.kind != Kind::AllReduce);
            complete.then_some(window)
        };
        (0..self.ranks).map(window).collect()
    }

    /// Works on the ranks' data where it lies.
    async fn in_place(&self, job: &Job, scales: &[f64], windows: &[Window]) -> Result<(), Failure> {
        let data = self.data(job);
        let round = self.begin(1);
        let input = |rank: usize| windows[rank].input.unwrap_or(std::ptr::null_mut());
        if job.call.kind == Kind::AllReduce {
            // Each rank reduces a part and writes it to all.
            let bytes = job.call.input.bytes();
            let part = bytes.div_ceil(self.ranks).next_multiple_of(64);
            let start = (part * self.me).min(bytes);
            let length = (part * (self.me + 1)).min(bytes) - start;
            let copies: SmallVec<[*mut u8; 16]> = self
                .others()
                .filter_map(|rank| windows[rank].output)
                .map(|output| output.wrapping_add(start))
                .collect();
            data.reduce_range(scales, start, length, (0, 0), &copies, |rank| {
                input(rank).wrapping_add(start)
            });
        } else {
            data.finish_whole(scales, |rank| input(rank).cast_const());
        }
        self.end(round + 1);
        self.leave_window(&data, round).await
    }

    /// Ends a collective that used the ranks' data in place: waits until nobody needs that
    /// of this rank any more.
    async fn leave_window(&self, data: &Data<'_>, round: u64) -> Result<(), Failure> {
        if data.is_read_from(self.me) {
            self.all_have(Counter::Consumed, round + 1).await;
        }
        // A rank that gave up may have used its memory for something else since.
        self.none_failed()
    }

    fn none_failed(&self) -> Result<(), Failure> {
        std::sync::atomic::fence(Ordering::Acquire);
        for rank in self.others() {
            if self.seat(rank).failed().load(Ordering::Acquire) != 0 {
                return Err(Failure::Gone { rank: rank as u32 });
            }
        }
        Ok(())
    }

    // ---- large data, read from the ranks' memory ----

    /// Whether it pays for this rank to read the others' memory.
    fn would_pull(&self, job: &Job) -> bool {
        let Call {
            kind,
            input,
            output,
            ..
        } = &job.call;
        let piece = match kind {
            Kind::AllToAll => input.bytes() / self.ranks,
            Kind::Scatter => output.bytes(),
            Kind::Broadcast => input.bytes().max(output.bytes()),
            _ => input.bytes(),
        };
        self.reads_all && pays_to_pull(*kind, self.crowded, piece)
    }

    /// Where segments of the input lie in this rank's memory, for the other ranks.
    fn address(&self, job: &Job, segments: &[Segment]) -> u64 {
        match joined(segments) {
            _ if !self.would_pull(job) => NOWHERE,
            Some(whole) => whole.ptr as u64,
            None if segments.is_empty() => 0,
            None => NOWHERE,
        }
    }

    /// Where `rank` said that its input lies.
    fn address_of(&self, rank: usize, sequence: u64) -> u64 {
        // SAFETY: as in `compare`.
        unsafe { (*self.seat(rank).slot(sequence).as_ptr()).address }
    }

    /// Whether all ranks fetch what they need: the same answer on all ranks.
    fn can_pull(&self, sequence: u64) -> bool {
        (0..self.ranks).all(|rank| self.address_of(rank, sequence) != NOWHERE)
    }

    async fn pull(&self, data: &Data<'_>, sequence: u64) -> Result<(), Failure> {
        let round = self.begin(1);
        let call = &data.job.call;
        let root = call.root as usize;
        let is_root = root == self.me;
        let fetch = |rank: usize, piece: usize, offset: usize| {
            let address = self.address_of(rank, sequence) + offset as u64;
            self.fetch(data, rank, piece, address)
        };
        match call.kind {
            Kind::AllGather => self.others().try_for_each(|rank| fetch(rank, rank, 0))?,
            Kind::Gather if is_root => self.others().try_for_each(|rank| fetch(rank, rank, 0))?,
            Kind::Broadcast if !is_root => fetch(root, 0, 0)?,
            Kind::Scatter if !is_root => fetch(root, 0, call.output.bytes() * self.me)?,
            _ => {}
        }
        // The others need not wait for this.
        self.end(round + 1);
        if call.kind == Kind::AllGather || (is_root && call.kind != Kind::Broadcast) {
            data.copy_own();
        }
        self.leave_window(data, round).await
    }

    /// Fills an output piece from the memory of `rank`.
    fn fetch(
        &self,
        data: &Data<'_>,
        rank: usize,
        piece: usize,
        address: u64,
    ) -> Result<(), Failure> {
        let memory = self.peers[rank]
            .as_ref()
            .and_then(|peer| peer.memory.as_ref());
        let pulled = memory.map_or(Err(Errno::EPERM), |memory| {
            data.pull(piece, memory, address)
        });
        let rank = rank as u32;
        pulled.map_err(|error| Failure::Unreadable { rank, error })
    }

    // ---- large data, in rounds ----

    /// Numbers `count` rounds for the running collective; returns the first.
    fn begin(&self, count: u64) -> u64 {
        self.rounds.fetch_add(count, Ordering::Relaxed)
    }

    /// Waits until the staging buffer of `round` is free.
    async fn free(&self, round: u64) {
        if let Some(target) = (round + 1).checked_sub(STAGES as u64) {
            self.all_have(Counter::Consumed, target).await;
        }
    }

    fn produced(&self, round: u64) {
        self.tell(&self.own().progress().produced, round + 1);
    }

    fn consumed(&self, round: u64) {
        self.tell(&self.own().progress().consumed, round + 1);
    }

    /// Sets all counters as after `end` rounds, for ranks that had no part in some.
    fn end(&self, end: u64) {
        let own = self.own();
        let progress = own.progress();
        progress.produced.store(end, Ordering::Release);
        progress.reduced.store(end, Ordering::Release);
        self.tell(&progress.consumed, end);
    }

    async fn all_reduce(&self, job: &Job, scales: &[f64]) {
        let (me, n) = (self.me, self.ranks);
        let bytes = job.call.input.bytes();
        if n == 1 {
            self.data(job)
                .reduce_range(scales, 0, bytes, (0, 0), &[], |_| std::ptr::null());
            return;
        }
        // Chunks of equal size, in pieces of whole cache lines, one for each rank.
        let most = (self.round_bytes() / n / 64 * 64) * n;
        let count = bytes.div_ceil(most);
        let chunk = bytes.div_ceil(count).next_multiple_of(64 * n);
        let count = bytes.div_ceil(chunk) as u64;
        let base = self.begin(count);
        let piece = |round: u64, rank: usize| {
            let offset = (round - base) as usize * chunk;
            let length = chunk.min(bytes - offset);
            let part = length.div_ceil(n).next_multiple_of(64);
            let start = (part * rank).min(length);
            (offset, start, (part * (rank + 1)).min(length) - start)
        };
        let stage = |round: u64| {
            for rank in self.others() {
                let (offset, start, length) = piece(round, rank);
                let to = self.stage(self.me, round).wrapping_add(start);
                self.data(job).copy_out(0, offset + start, length, to);
            }
            self.produced(round);
        };
        // With two ranks the result goes back to where the peer staged its part: those lines
        // are in this core's cache already. With more it goes to one place for all.
        let reduce = |round: u64| {
            let (offset, start, length) = piece(round, me);
            let seat = if n == 2 { 1 - me } else { me };
            let back = self.stage(seat, round).wrapping_add(start);
            self.data(job)
                .reduce_range(scales, offset + start, length, (0, 0), &[back], |rank| {
                    self.stage(rank, round).wrapping_add(start)
                });
            self.tell(&self.own().progress().reduced, round + 1);
        };
        self.free(base).await;
        stage(base);
        for round in base..base + count {
            if round + 1 < base + count {
                self.free(round + 1).await;
                stage(round + 1);
            }
            self.all_have(Counter::Produced, round + 1).await;
            reduce(round);
            if round > base {
                self.collect(job, round - 1, &piece).await;
            }
        }
        self.collect(job, base + count - 1, &piece).await;
    }

    /// Copies the parts that the others reduced in `round`.
    async fn collect(
        &self,
        job: &Job,
        round: u64,
        piece: &impl Fn(u64, usize) -> (usize, usize, usize),
    ) {
        for rank in self.others() {
            self.one_has(rank, Counter::Reduced, round + 1).await;
            let (offset, start, length) = piece(round, rank);
            let seat = if self.ranks == 2 { self.me } else { rank };
            self.data(job).copy_in(
                0,
                offset + start,
                length,
                self.stage(seat, round).wrapping_add(start),
            );
        }
        self.consumed(round);
    }

    async fn all_gather(&self, job: &Job) {
        let bytes = |rank: usize| job.call.output.piece_bytes(rank);
        let most = (0..self.ranks).map(bytes).max().unwrap_or(0);
        let count = most.div_ceil(self.round_bytes()) as u64;
        let base = self.begin(count);
        let range = |round: u64, rank: usize| {
            let offset = (round - base) as usize * self.round_bytes();
            (
                offset,
                self.round_bytes().min(bytes(rank).saturating_sub(offset)),
            )
        };
        let stage = |round: u64| {
            let (offset, length) = range(round, self.me);
            let data = self.data(job);
            data.copy_out(0, offset, length, self.stage(self.me, round));
            self.produced(round);
            // Now, while it is in the cache.
            data.copy_own_part(offset, length);
        };
        self.free(base).await;
        stage(base);
        for round in base..base + count {
            if round + 1 < base + count {
                self.free(round + 1).await;
                stage(round + 1);
            }
            for rank in self.others() {
                self.one_has(rank, Counter::Produced, round + 1).await;
                let (offset, length) = range(round, rank);
                self.data(job)
                    .copy_in(rank, offset, length, self.stage(rank, round));
            }
            self.consumed(round);
        }
        self.end(base + count);
    }

    async fn reduce_scatter(&self, job: &Job, scales: &[f64]) {
        let bytes = |rank: usize| job.call.input.piece_bytes(rank);
        let most = (0..self.ranks).map(bytes).max().unwrap_or(0);
        let part = self.round_bytes() / self.ranks / 64 * 64;
        let count = most.div_ceil(part) as u64;
        let base = self.begin(count);
        let range = |round: u64, rank: usize| {
            let offset = (round - base) as usize * part;
            (offset, part.min(bytes(rank).saturating_sub(offset)))
        };
        let stage = |round: u64| {
            for rank in self.others() {
                let (offset, length) = range(round, rank);
                let to = self.stage(self.me, round).wrapping_add(part * rank);
                self.data(job).copy_out(rank, offset, length, to);
            }
            self.produced(round);
        };
        self.free(base).await;
        stage(base);
        for round in base..base + count {
            if round + 1 < base + count {
                self.free(round + 1).await;
                stage(round + 1);
            }
            self.all_have(Counter::Produced, round + 1).await;
            let (offset, length) = range(round, self.me);
            self.data(job)
                .reduce_range(scales, offset, length, (self.me, 0), &[], |rank| {
                    self.stage(rank, round).wrapping_add(part * self.me)
                });
            self.consumed(round);
        }
        self.end(base + count);
    }

    async fn broadcast(&self, job: &Job) {
        let root = job.call.root as usize;
        let bytes = job.call.input.bytes().max(job.call.output.bytes());
        let count = bytes.div_ceil(self.round_bytes()) as u64;
        let base = self.begin(count);
        for round in base..base + count {
            let offset = (round - base) as usize * self.round_bytes();
            let length = self.round_bytes().min(bytes - offset);
            if root == self.me {
                self.free(round).await;
                self.data(job)
                    .copy_out(0, offset, length, self.stage(self.me, round));
                // The root waits for the others in `free`, not for itself.
                self.own()
                    .progress()
                    .consumed
                    .store(round + 1, Ordering::Release);
                self.produced(round);
            } else {
                self.one_has(root, Counter::Produced, round + 1).await;
                self.data(job)
                    .copy_in(0, offset, length, self.stage(root, round));
                self.consumed(round);
            }
        }
        self.end(base + count);
    }

    async fn reduce(&self, job: &Job, scales: &[f64]) {
        let root = job.call.root as usize;
        let bytes = job.call.input.bytes();
        let count = bytes.div_ceil(self.round_bytes()) as u64;
        let base = self.begin(count);
        for round in base..base + count {
            let offset = (round - base) as usize * self.round_bytes();
            let length = self.round_bytes().min(bytes - offset);
            if root == self.me {
                self.all_have(Counter::Produced, round + 1).await;
                self.data(job)
                    .reduce_range(scales, offset, length, (0, 0), &[], |rank| {
                        self.stage(rank, round).cast_const()
                    });
                self.consumed(round);
            } else {
                self.free(round).await;
                self.data(job)
                    .copy_out(0, offset, length, self.stage(self.me, round));
                self.own()
                    .progress()
                    .consumed
                    .store(round + 1, Ordering::Release);
                self.produced(round);
            }
        }
        self.end(base + count);
    }

    async fn gather(&self, job: &Job) {
        let root = job.call.root as usize;
        let bytes = job.call.input.bytes();
        let count = bytes.div_ceil(self.round_bytes()) as u64;
        let base = self.begin(count);
        if root == self.me {
            self.data(job).copy_own();
        }
        for round in base..base + count {
            let offset = (round - base) as usize * self.round_bytes();
            let length = self.round_bytes().min(bytes - offset);
            if root == self.me {
                for rank in self.others() {
                    self.one_has(rank, Counter::Produced, round + 1).await;
                    self.data(job)
                        .copy_in(rank, offset, length, self.stage(rank, round));
                }
                self.consumed(round);
            } else {
                self.free(round).await;
                self.data(job)
                    .copy_out(0, offset, length, self.stage(self.me, round));
                self.own()
                    .progress()
                    .consumed
                    .store(round + 1, Ordering::Release);
                self.produced(round);
            }
        }
        self.end(base + count);
    }

    async fn scatter(&self, job: &Job) {
        let root = job.call.root as usize;
        let bytes = job.call.output.bytes();
        let part = self.round_bytes() / self.ranks / 64 * 64;
        let count = bytes.div_ceil(part) as u64;
        let base = self.begin(count);
        if root == self.me {
            self.data(job).copy_own();
        }
        for round in base..base + count {
            let offset = (round - base) as usize * part;
            let length = part.min(bytes - offset);
            if root == self.me {
                self.free(round).await;
                for rank in self.others() {
                    let to = self.stage(self.me, round).wrapping_add(part * rank);
                    self.data(job).copy_out(rank, offset, length, to);
                }
                self.own()
                    .progress()
                    .consumed
                    .store(round + 1, Ordering::Release);
                self.produced(round);
            } else {
                self.one_has(root, Counter::Produced, round + 1).await;
                let from = self.stage(root, round).wrapping_add(part * self.me);
                self.data(job).copy_in(0, offset, length, from);
                self.consumed(round);
            }
        }
        self.end(base + count);
    }

    // ---- all-to-all, whose pieces may differ ----

    /// Bytes of the tables that stand before small all-to-all data: what the rank sends to
    /// each, what it expects from each, and where what it sends to each lies in its memory.
    fn tables_bytes(&self) -> usize {
        TABLES * 8 * self.ranks
    }

    fn write_tables(&self, job: &Job, sequence: u64) {
        let call = &job.call;
        let to = self.own().small(sequence);
        let sent = (0..self.ranks).map(|rank| call.input.piece_bytes(rank) as u64);
        let expected = (0..self.ranks).map(|rank| call.output.piece_bytes(rank) as u64);
        let addresses = (0..self.ranks).map(|rank| self.address(job, call.input.piece(rank)));
        for (index, number) in sent.chain(expected).chain(addresses).enumerate() {
            // SAFETY: the small buffer is this rank's, aligned, and holds the tables
            // (`MAX_RANKS`).
            unsafe { to.cast::<u64>().add(index).write(number) };
        }
        if call.input.bytes() <= ONE_SHOT {
            let to = to.wrapping_add(self.tables_bytes());
            self.data(job).count(call.input.bytes());
            walk(
                call.input.segments(),
                0,
                call.input.bytes(),
                |from, at, count| {
                    // SAFETY: as above; the data fits behind the tables.
                    unsafe { copy(to.add(at), from, count) };
                },
            );
        }
    }

    /// What `from` sends to `to`, and what `to` expects from `from`.
    fn sizes(&self, sequence: u64, from: usize, to: usize) -> (u64, u64) {
        (
            self.table(sequence, from, to),
            self.table(sequence, to, self.ranks + from),
        )
    }

    /// A number in the tables of `rank`.
    fn table(&self, sequence: u64, rank: usize, index: usize) -> u64 {
        let tables = self.seat(rank).small(sequence).cast::<u64>();
        // SAFETY: published with the arrival, and unchanged until its owner has left the
        // next collective.
        unsafe { tables.add(index).read() }
    }

    async fn all_to_all(&self, job: &Job, sequence: u64) -> Result<(), Failure> {
        let n = self.ranks;
        let part = self.round_bytes() / n / 64 * 64;
        let mut count = 0;
        let mut in_slot: SmallVec<[bool; 16]> = SmallVec::new();
        let mut totals: SmallVec<[usize; 16]> = SmallVec::new();
        for from in 0..n {
            let mut total = 0;
            let mut largest = 0;
            for to in 0..n {
                let (sent, expected) = self.sizes(sequence, from, to);
                if sent != expected {
                    let (from, to) = (from as u32, to as u32);
                    return Err(Failure::Splits {
                        from,
                        to,
                        sent,
                        expected,
                    });
                }
                total += sent as usize;
                largest = largest.max(if to == from { 0 } else { sent as usize });
            }
            totals.push(total);
            in_slot.push(total <= ONE_SHOT);
            if !in_slot[from] {
                count = count.max(largest.div_ceil(part) as u64);
            }
        }
        let windows = self.windows(job, sequence, |rank| totals[rank], |rank| !in_slot[rank]);
        let data = self.data(job);
        data.copy_own();
        for from in self.others() {
            let whole = match &windows {
                _ if in_slot[from] => {
                    let small = self.seat(from).small(sequence);
                    small.wrapping_add(self.tables_bytes())
                }
                Some(windows) => windows[from].input.unwrap_or(std::ptr::null_mut()),
                None => continue,
            };
            let before: u64 = (0..self.me)
                .map(|to| self.sizes(sequence, from, to).0)
                .sum();
            let piece = whole.wrapping_add(before as usize);
            data.copy_in(from, 0, job.call.output.piece_bytes(from), piece);
        }
        if count == 0 {
            return Ok(());
        }
        let address = |from: usize, to: usize| self.table(sequence, from, 2 * n + to);
        // Those whose data came with the arrival read too.
        let can_pull = || (0..n).all(|from| (0..n).all(|to| address(from, to) != NOWHERE));
        if windows.is_some() {
            let round = self.begin(1);
            self.end(round + 1);
            return self.leave_window(&data, round).await;
        }
        if can_pull() {
            let round = self.begin(1);
            for from in self.others().filter(|&from| !in_slot[from]) {
                self.fetch(&data, from, from, address(from, self.me))?;
            }
            self.end(round + 1);
            return self.leave_window(&data, round).await;
        }
        let base = self.begin(count);
        let stage = |round: u64| {
            if !in_slot[self.me] {
                let offset = (round - base) as usize * part;
                for rank in self.others() {
                    let length = part.min(job.call.input.piece_bytes(rank).saturating_sub(offset));
                    let to = self.stage(self.me, round).wrapping_add(part * rank);
                    self.data(job).copy_out(rank, offset, length, to);
                }
            }
            self.produced(round);
        };
        self.free(base).await;
        stage(base);
        for round in base..base + count {
            if round + 1 < base + count {
                self.free(round + 1).await;
                stage(round + 1);
            }
            let offset = (round - base) as usize * part;
            for rank in self.others().filter(|&rank| !in_slot[rank]) {
                self.one_has(rank, Counter::Produced, round + 1).await;
                let length = part.min(job.call.output.piece_bytes(rank).saturating_sub(offset));
                let from = self.stage(rank, round).wrapping_add(part * self.me);
                self.data(job).copy_in(rank, offset, length, from);
            }
            self.consumed(round);
        }
        self.end(base + count);
        Ok(())
    }

    /// Leaves the group: tells each peer that its seat will not be touched any more.
    pub(crate) fn detach(&self) {
        for rank in self.others() {
            // A peer whose seat was never found may make it later; it is looked for once more.
            self.find_seat(rank);
            if let Some(seat) = self.seats[rank].get() {
                seat.detached()[self.me / 64].fetch_or(1 << (self.me % 64), Ordering::AcqRel);
            }
        }
    }

    /// Whether every peer has left, or is gone: then the seat's memory can be used again.
    pub(crate) fn is_abandoned(&self) -> bool {
        let own = self.own();
        let detached = own.detached();
        self.peers.iter().enumerate().all(|(rank, peer)| {
            let Some(peer) = peer else { return true };
            let left = detached[rank / 64].load(Ordering::Acquire) >> (rank % 64) & 1 == 1;
            left || peer.gone().is_some()
        })
    }

    /// Gives the seat's memory back.
    pub(crate) fn release(&self) {
        self.fabric.region.retract_seat(self.key);
        self.fabric
            .region
            .release(self.own_offset, footprint(self.own_stage_bytes));
    }
}

impl Fabric {
    /// Wakes sleeping threads of the peers, after news for them was stored.
    #[inline]
    fn ring_peers(&self, peers: &[Option<Arc<Peer>>]) {
        publish_fence();
        for peer in peers.iter().flatten() {
            if let Some(mapping) = &peer.mapping {
                Doorbell::ring(mapping.doorbell());
            }
        }
    }
}
