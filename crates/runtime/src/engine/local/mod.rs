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

mod all_to_all;
mod in_place;
mod rounds;
mod seat;

use std::future::poll_fn;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::Poll;

use smallvec::SmallVec;
use tpu_dist_collectives::reduce::copy;
use tpu_dist_collectives::{Kind, ReduceKind, Signature};

use super::data::Data;
use super::{Failure, Job, walk};
use crate::Error;
use crate::call::{Pieces, joined};
use crate::fabric::{Fabric, Peer};
use crate::sync::{Doorbell, publish_fence};
pub(crate) use seat::MAX_RANKS;
use seat::{
    CROWDED_STAGE_BYTES, Counter, INLINE_BYTES, NOWHERE, STAGE_BYTES, Seat, SeatPtr, footprint,
};

/// Up to here data travels with the arrival, and all ranks read all of it.
const ONE_SHOT: usize = 8 << 10;
/// The same for an all-reduce, where above it each rank reduces a part, and the parts are
/// gathered.
const ONE_SHOT_REDUCE: usize = 4 << 10;

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
        let memory = fabric.region.mapping.at(own_offset, bytes)?;
        // SAFETY: fresh, zeroed memory of that size, in a region that the fabric keeps.
        let own = unsafe { SeatPtr::new(memory) };
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
        let seat = self.seats[rank].get();
        seat.is_some_and(|seat| seat.has(counter, target))
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
        // SAFETY: it holds the seat, and the peer keeps it mapped.
        let head = unsafe { SeatPtr::new(head) };
        let stage_bytes = head.stage_bytes().load(Ordering::Acquire) as usize;
        if ![STAGE_BYTES, CROWDED_STAGE_BYTES].contains(&stage_bytes) {
            return false;
        }
        let Ok(seat) = mapping.at(offset, footprint(stage_bytes)) else {
            return false;
        };
        // SAFETY: as above, with all that follows.
        let _ = self.seats[rank].set(unsafe { SeatPtr::new(seat) });
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

    fn tell(&self, counter: &seat::AtomicU64, value: u64) {
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
