//! Large data that moves through staging buffers, in rounds.

use std::sync::atomic::Ordering;

use super::seat::{Counter, free_after};
use super::{Job, Local};

impl Local {
    /// Numbers `count` rounds for the running collective; returns the first.
    pub(super) fn begin(&self, count: u64) -> u64 {
        self.rounds.fetch_add(count, Ordering::Relaxed)
    }

    /// Waits until the staging buffer of `round` is free.
    pub(super) async fn free(&self, round: u64) {
        if let Some(target) = free_after(round) {
            self.all_have(Counter::Consumed, target).await;
        }
    }

    pub(super) fn produced(&self, round: u64) {
        self.tell(&self.own().progress().produced, round + 1);
    }

    pub(super) fn consumed(&self, round: u64) {
        self.tell(&self.own().progress().consumed, round + 1);
    }

    /// Sets all counters as after `end` rounds, for ranks that had no part in some.
    pub(super) fn end(&self, end: u64) {
        let own = self.own();
        let progress = own.progress();
        progress.produced.store(end, Ordering::Release);
        progress.reduced.store(end, Ordering::Release);
        self.tell(&progress.consumed, end);
    }

    pub(super) async fn all_reduce(&self, job: &Job, scales: &[f64]) {
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
    pub(super) async fn collect(
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

    pub(super) async fn all_gather(&self, job: &Job) {
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

    pub(super) async fn reduce_scatter(&self, job: &Job, scales: &[f64]) {
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

    pub(super) async fn broadcast(&self, job: &Job) {
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

    pub(super) async fn reduce(&self, job: &Job, scales: &[f64]) {
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

    pub(super) async fn gather(&self, job: &Job) {
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

    pub(super) async fn scatter(&self, job: &Job) {
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
}
