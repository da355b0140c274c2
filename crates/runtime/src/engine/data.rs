//! A rank's side of a collective's data: moving it between the caller's pieces and
//! memory that ranks share or exchange.

use std::sync::atomic::{AtomicU64, Ordering};

use nix::errno::Errno;
use smallvec::SmallVec;
use tpu_dist_collectives::Kind;
use tpu_dist_collectives::reduce::{copy, copy_nontemporal};

use super::{Job, walk};
use crate::call::Segment;
use crate::link::ReadPart;
use crate::transport::peer_memory::PeerMemory;

/// Outputs from this size on are written past the caches.
const UNCACHED_BYTES: usize = 8 << 20;

/// The data of one rank in one collective.
#[derive(Clone, Copy)]
pub(crate) struct Data<'a> {
    pub(crate) job: &'a Job,
    pub(crate) me: usize,
    pub(crate) ranks: usize,
    /// Bytes that the engine has written for collectives of this kind.
    pub(crate) written: &'a AtomicU64,
}

impl<'a> Data<'a> {
    /// Counts `bytes` as written.
    pub(crate) fn count(self, bytes: usize) {
        // One collective at a time writes, so no addition is lost.
        let before = self.written.load(Ordering::Relaxed);
        self.written.store(before + bytes as u64, Ordering::Relaxed);
    }

    /// What this rank brings for others to read: segments and bytes.
    pub(crate) fn contribution(self) -> (&'a [Segment], usize) {
        let call = &self.job.call;
        let brings = match call.kind {
            Kind::Broadcast | Kind::Scatter => call.root as usize == self.me,
            _ => true,
        };
        if brings {
            (call.input.segments(), call.input.bytes())
        } else {
            (&[], 0)
        }
    }

    /// What `rank` brings, in bytes; not for all-to-all, where only `rank` knows.
    pub(crate) fn contribution_of(self, rank: usize) -> usize {
        let call = &self.job.call;
        match call.kind {
            Kind::AllGather => call.output.piece_bytes(rank),
            _ => self.largest_contribution(),
        }
    }

    /// The most that any rank brings: the same value on all ranks that agree.
    pub(crate) fn largest_contribution(self) -> usize {
        let call = &self.job.call;
        match call.kind {
            Kind::Barrier => 0,
            Kind::Broadcast => call.input.bytes().max(call.output.bytes()),
            Kind::Scatter => self.ranks * call.output.piece_bytes(0),
            Kind::AllGather => (0..self.ranks)
                .map(|rank| call.output.piece_bytes(rank))
                .max()
                .unwrap_or(0),
            _ => call.input.bytes(),
        }
    }

    /// Whether other ranks read what `rank` brings.
    pub(crate) fn is_read_from(self, rank: usize) -> bool {
        let call = &self.job.call;
        let root = call.root as usize;
        match call.kind {
            Kind::Broadcast | Kind::Scatter => rank == root,
            Kind::Reduce | Kind::Gather => rank != root,
            _ => true,
        }
    }

    fn others(self) -> impl Iterator<Item = usize> {
        (1..self.ranks).map(move |step| (self.me + step) % self.ranks)
    }

    /// Makes the output, where all of what each rank brings lies at `data(rank)`. Not for
    /// all-to-all.
    pub(crate) fn finish_whole(self, scales: &[f64], data: impl Fn(usize) -> *const u8) {
        let call = &self.job.call;
        let root = call.root as usize;
        match call.kind {
            Kind::AllReduce | Kind::Reduce => {
                if call.kind == Kind::AllReduce || root == self.me {
                    self.reduce_range(scales, 0, call.input.bytes(), (0, 0), &[], data);
                }
            }
            Kind::ReduceScatter => {
                let before: usize = (0..self.me).map(|rank| call.input.piece_bytes(rank)).sum();
                let bytes = call.input.piece_bytes(self.me);
                self.reduce_range(scales, 0, bytes, (self.me, 0), &[], |rank| {
                    data(rank).wrapping_add(before)
                });
            }
            Kind::AllGather | Kind::Gather => {
                if call.kind == Kind::AllGather || root == self.me {
                    self.copy_own();
                    for rank in self.others() {
                        self.copy_in(rank, 0, call.output.piece_bytes(rank), data(rank));
                    }
                }
            }
            Kind::Broadcast if root != self.me => {
                self.copy_in(0, 0, call.output.bytes(), data(root));
            }
            Kind::Scatter if root == self.me => self.copy_own(),
            Kind::Scatter => {
                let bytes = call.output.piece_bytes(0);
                self.copy_in(0, 0, bytes, data(root).wrapping_add(bytes * self.me));
            }
            Kind::Barrier
            | Kind::Broadcast
            | Kind::AllToAll
            | Kind::Send
            | Kind::Recv
            | Kind::MonitoredBarrier => {}
        }
    }

    /// Copies the rank's own piece from input to output.
    pub(crate) fn copy_own(self) {
        self.copy_own_part(0, usize::MAX);
    }

    /// Copies up to `bytes` of the rank's own piece from input to output, from `offset` on.
    pub(crate) fn copy_own_part(self, offset: usize, bytes: usize) {
        let call = &self.job.call;
        let own = |pieces: usize| if pieces > 1 { self.me } else { 0 };
        let input = call.input.piece(own(call.input.len()));
        let output = own(call.output.len());
        let bytes = bytes.min(call.output.piece_bytes(output).saturating_sub(offset));
        let put = self.put();
        walk(input, offset, bytes, |from, at, count| {
            walk(
                call.output.piece(output),
                offset + at,
                count,
                |to, inner, count| {
                    let from = from.wrapping_add(inner);
                    if to != from {
                        self.count(count);
                        // SAFETY: the caller's memory, which may coincide but not overlap.
                        unsafe { put(to, from, count) };
                    }
                },
            );
        });
    }

    /// How data is copied to the output: past the caches where they would not hold it. An
    /// all-reduce mostly works in place, on lines that it has just read.
    fn put(self) -> unsafe fn(*mut u8, *const u8, usize) {
        let call = &self.job.call;
        if call.kind != Kind::AllReduce && call.output.bytes() >= UNCACHED_BYTES {
            copy_nontemporal
        } else {
            copy
        }
    }

    /// Copies `bytes` at `data` to output piece `piece`, from `offset` on.
    pub(crate) fn copy_in(self, piece: usize, offset: usize, bytes: usize, data: *const u8) {
        self.count(bytes);
        let put = self.put();
        walk(
            self.job.call.output.piece(piece),
            offset,
            bytes,
            |to, at, count| {
                // SAFETY: `data` has been published to this rank, whole, and is not written until
                // this rank has said that it has read it.
                unsafe { put(to, data.add(at), count) };
            },
        );
    }

    /// Fills output piece `piece` from `address` in the memory of another rank.
    pub(crate) fn pull(self, piece: usize, memory: &PeerMemory, address: u64) -> Result<(), Errno> {
        let segments = self.job.call.output.piece(piece);
        self.count(segments.iter().map(|segment| segment.bytes).sum());
        let parts: SmallVec<[ReadPart; 4]> = segments
            .iter()
            .map(|&Segment { ptr, bytes }| ReadPart { ptr, bytes })
            .collect();
        // SAFETY: the output is the caller's, who vouches for it; the engine alone writes it.
        unsafe { memory.read(&parts, address) }
    }

    /// Copies `bytes` of input piece `piece`, from `offset` on, to `to`.
    pub(crate) fn copy_out(self, piece: usize, offset: usize, bytes: usize, to: *mut u8) {
        self.count(bytes);
        walk(
            self.job.call.input.piece(piece),
            offset,
            bytes,
            |from, at, count| {
                // SAFETY: `to` is memory of this rank that nobody else uses at this time.
                unsafe { copy(to.add(at), from, count) };
            },
        );
    }

    /// Reduces `[offset, offset + bytes)` of the output from all ranks in rank order: own
    /// data from input piece `input.0` at `input.1 + offset`, that of the others from
    /// `data(rank)`. The result also goes to each of `copies`.
    pub(crate) fn reduce_range(
        self,
        scales: &[f64],
        offset: usize,
        bytes: usize,
        input: (usize, usize),
        copies: &[*mut u8],
        data: impl Fn(usize) -> *const u8,
    ) {
        self.count(bytes * (1 + copies.len()));
        let call = &self.job.call;
        let reducer = self.job.reducer.expect("reductions are given one");
        let size = call.dtype.size();
        let divisor = Some(self.ranks as u32);
        // One after the other: to collect them would move them once more.
        let mut sources: SmallVec<[*const u8; 16]> = SmallVec::new();
        for rank in 0..self.ranks {
            sources.push(std::ptr::null());
            if rank != self.me {
                sources[rank] = data(rank);
            }
        }
        let mut targets: SmallVec<[*mut u8; 16]> = SmallVec::new();
        targets.push(std::ptr::null_mut());
        for &copy in copies {
            targets.push(copy);
        }
        let mut done = 0;
        walk(
            call.input.piece(input.0),
            input.1 + offset,
            bytes,
            |own, at, count| {
                walk(
                    call.output.piece(0),
                    offset + at,
                    count,
                    |to, inner, count| {
                        let step = at + inner - done;
                        done += step;
                        for source in &mut sources {
                            *source = source.wrapping_add(step);
                        }
                        for target in &mut targets {
                            *target = target.wrapping_add(step);
                        }
                        sources[self.me] = own.wrapping_add(inner);
                        targets[0] = to;
                        // SAFETY: the sources are published and stay until this rank says that it has
                        // read them; the targets are this rank's output and shared memory granted
                        // to it; a target is at most the same as one source.
                        unsafe {
                            reducer.reduce(&targets, &sources, count / size, scales, divisor)
                        };
                    },
                );
            },
        );
    }
}
