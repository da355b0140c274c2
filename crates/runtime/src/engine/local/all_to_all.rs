//! All-to-all, whose pieces may differ.

use smallvec::SmallVec;
use tpu_dist_collectives::reduce::copy;

use super::seat::{Counter, NOWHERE, TABLES};
use super::{Failure, Job, Local, ONE_SHOT, walk};

impl Local {
    /// Bytes of the tables that stand before small all-to-all data: what the rank sends to
    /// each, what it expects from each, and where what it sends to each lies in its memory.
    pub(super) fn tables_bytes(&self) -> usize {
        TABLES * 8 * self.ranks
    }

    pub(super) fn write_tables(&self, job: &Job, sequence: u64) {
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
    pub(super) fn sizes(&self, sequence: u64, from: usize, to: usize) -> (u64, u64) {
        (
            self.table(sequence, from, to),
            self.table(sequence, to, self.ranks + from),
        )
    }

    /// A number in the tables of `rank`.
    pub(super) fn table(&self, sequence: u64, rank: usize, index: usize) -> u64 {
        let tables = self.seat(rank).small(sequence).cast::<u64>();
        // SAFETY: published with the arrival, and unchanged until its owner has left the
        // next collective.
        unsafe { tables.add(index).read() }
    }

    pub(super) async fn all_to_all(&self, job: &Job, sequence: u64) -> Result<(), Failure> {
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
}
