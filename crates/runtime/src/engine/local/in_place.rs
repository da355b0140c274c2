//! Large data that is used where it lies: in the ranks' regions, or anywhere in their memory.

use std::ptr::NonNull;
use std::sync::atomic::Ordering;

use nix::errno::Errno;
use smallvec::SmallVec;
use tpu_dist_collectives::Kind;

use super::seat::{Counter, NOWHERE};
use super::{Data, Failure, Job, Local};
use crate::call::{Call, Segment, joined};

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

/// Where a rank's data lies in shared memory, as far as it does.
pub(super) struct Window {
    pub(super) input: Option<*mut u8>,
    pub(super) output: Option<*mut u8>,
}

// SAFETY: addresses of shared memory, which stays mapped as long as the group; who may
// touch it when, the protocol says.
unsafe impl Send for Window {}
// SAFETY: as above.
unsafe impl Sync for Window {}

impl Local {
    /// Where each rank's data lies, when all that ranks need of each other is in shared
    /// memory: the same answer on all ranks.
    ///
    /// `bytes` is what a rank brings; input counts where `is_needed`.
    pub(super) fn windows(
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
    pub(super) async fn in_place(
        &self,
        job: &Job,
        scales: &[f64],
        windows: &[Window],
    ) -> Result<(), Failure> {
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
    pub(super) async fn leave_window(&self, data: &Data<'_>, round: u64) -> Result<(), Failure> {
        if data.is_read_from(self.me) {
            self.all_have(Counter::Consumed, round + 1).await;
        }
        // A rank that gave up may have used its memory for something else since.
        self.none_failed()
    }

    pub(super) fn none_failed(&self) -> Result<(), Failure> {
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
    pub(super) fn would_pull(&self, job: &Job) -> bool {
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
    pub(super) fn address(&self, job: &Job, segments: &[Segment]) -> u64 {
        match joined(segments) {
            _ if !self.would_pull(job) => NOWHERE,
            Some(whole) => whole.ptr as u64,
            None if segments.is_empty() => 0,
            None => NOWHERE,
        }
    }

    /// Where `rank` said that its input lies.
    pub(super) fn address_of(&self, rank: usize, sequence: u64) -> u64 {
        // SAFETY: as in `compare`.
        unsafe { (*self.seat(rank).slot(sequence).as_ptr()).address }
    }

    /// Whether all ranks fetch what they need: the same answer on all ranks.
    pub(super) fn can_pull(&self, sequence: u64) -> bool {
        (0..self.ranks).all(|rank| self.address_of(rank, sequence) != NOWHERE)
    }

    pub(super) async fn pull(&self, data: &Data<'_>, sequence: u64) -> Result<(), Failure> {
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
    pub(super) fn fetch(
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
}
