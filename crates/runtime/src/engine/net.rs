//! Collectives of ranks on several hosts: the steps of a plan, over the links.
//!
//! A collective begins with an *agreement*: all ranks exchange their signatures, in a
//! logarithmic number of rounds (each rank passes on all it knows, at doubling
//! distances), so that every rank knows before any data is used whether all agree.
//! Small data travels along, and then all is there; otherwise the steps run.

use std::future::poll_fn;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::Poll;

use lru::LruCache;
use smallvec::SmallVec;
use tpu_dist_collectives::algorithm::{Constants, Transport};
use tpu_dist_collectives::reduce::copy;
use tpu_dist_collectives::schedule::{Buffer, Chunk, RankPlan, Request, Step};
use tpu_dist_collectives::select::{MESSAGE_BYTES, Selector};
use tpu_dist_collectives::{DType, Kind, ReduceKind, Signature};

use super::data::Data;
use super::{Failure, Job, contiguous, walk};
use crate::call::Segment;
use crate::config::Config;
use crate::fabric::Peer;
use crate::link::{EAGER_BYTES, Key, LinkError, Mode, Transfer};
use crate::wire::Class;

/// Bytes for each rank of a part of an all-reduce. Two parts run at a time, so that one is
/// gathered while the next is reduced, and what was reduced is still in the cache when it is
/// sent.
const PART_BYTES: u64 = 256 << 10;
/// Receives that are posted ahead of the running step.
const WINDOW: usize = 16;
/// Parts of a collective that exchange messages; each has its own channel.
const PHASES: u64 = 4;
/// The factor of PREMUL_SUM, with which each rank's record begins.
const SCALE_BYTES: usize = 8;
/// Plans that a group keeps: a training step asks for the same ones again.
const PLANS: NonZeroUsize = NonZeroUsize::new(64).expect("not zero");

/// What decides on a plan.
#[derive(PartialEq, Eq, Hash)]
struct Asked {
    request: Request,
    part: Option<u64>,
    reduction: Option<(ReduceKind, DType)>,
}

/// The engine of a group on several hosts. One collective at a time uses it.
pub(crate) struct Net {
    me: u32,
    ranks: u32,
    key: u64,
    peers: Vec<Option<Arc<Peer>>>,
    /// Buffers to use again.
    pool: Mutex<Vec<Vec<u8>>>,
    /// Plans to use again.
    plans: Mutex<LruCache<Asked, Arc<RankPlan>>>,
    /// Which ranks' signatures of the running collective have come: its number, and how
    /// many, counted upwards from the own rank.
    known: AtomicU64,
    written: AtomicU64,
}

/// A message of the engine, given up when dropped before it ended.
struct Flight<'a> {
    peer: &'a Arc<Peer>,
    rank: u32,
    transfer: Arc<Transfer>,
}

impl Flight<'_> {
    async fn done(&self) -> Result<(), Failure> {
        let result = poll_fn(|_| self.transfer.result().map_or(Poll::Pending, Poll::Ready)).await;
        result.map_err(|error| Failure::Link {
            rank: self.rank,
            error,
        })
    }
}

impl Drop for Flight<'_> {
    fn drop(&mut self) {
        if self.transfer.result().is_none() {
            self.peer.link.cancel(&self.transfer);
        }
    }
}

/// A message with memory of its own. The flight is dropped first: then nobody uses the
/// memory.
struct Message<'a> {
    flight: Flight<'a>,
    data: Pooled<'a>,
}

/// A buffer that goes back to the pool.
struct Pooled<'a> {
    data: Vec<u8>,
    pool: &'a Mutex<Vec<Vec<u8>>>,
}

impl Drop for Pooled<'_> {
    fn drop(&mut self) {
        let mut pool = self.pool.lock().expect("no panic while the pool is held");
        if pool.len() < 4 * WINDOW {
            pool.push(std::mem::take(&mut self.data));
        }
    }
}

impl Net {
    pub(crate) fn new(key: u64, me: u32, peers: Vec<Option<Arc<Peer>>>) -> Net {
        Net {
            me,
            ranks: peers.len() as u32,
            key,
            peers,
            pool: Mutex::default(),
            plans: Mutex::new(LruCache::new(PLANS)),
            known: AtomicU64::new(0),
            written: AtomicU64::new(0),
        }
    }

    /// Ranks whose signature of collective `sequence` has not come; a superset of the late
    /// ones, as signatures travel through other ranks.
    pub(crate) fn unknown(&self) -> Vec<u32> {
        let known = self.known.load(Ordering::Relaxed) as u32;
        (known..self.ranks)
            .map(|step| (self.me + step) % self.ranks)
            .collect()
    }

    /// Runs collective number `sequence`.
    pub(crate) async fn run(&self, job: &Job, sequence: u64) -> Result<(), Failure> {
        self.known.store(1, Ordering::Relaxed);
        let data = Data {
            job,
            me: self.me as usize,
            ranks: self.ranks as usize,
            written: &self.written,
        };
        let small = self.is_small(data);
        let tables = job.call.kind == Kind::AllToAll && self.tables_bytes() <= self.room();
        let records = self.own_record(data, small, tables);
        let records = self.agree(job, sequence, records).await?;
        let scale = |rank: usize| {
            let bytes = records
                .of(rank)
                .first_chunk()
                .expect("a record begins with its factor");
            f64::from_le_bytes(*bytes)
        };
        if tables {
            return self
                .all_to_all(data, sequence, |rank| &records.of(rank)[SCALE_BYTES..])
                .await;
        }
        if job.call.kind == Kind::AllToAll {
            let tables = self.gather_tables(data, sequence).await?;
            return self
                .all_to_all(data, sequence, |rank| tables.of(rank))
                .await;
        }
        if small {
            let scales: SmallVec<[f64; 8]> = match job.scale() {
                Some(_) => (0..data.ranks).map(scale).collect(),
                None => SmallVec::new(),
            };
            data.finish_whole(&scales, |rank| records.of(rank)[SCALE_BYTES..].as_ptr());
            return Ok(());
        }
        let memory = Memory::new(self, job);
        let counts = memory.counts(job);
        let part = u64::from(self.ranks) * PART_BYTES / job.call.dtype.size() as u64;
        if job.call.kind != Kind::AllReduce || counts[0] <= part {
            let plan = self.plan(job, counts, None)?;
            return self
                .execute(job, self.channel(sequence, 2), &plan, memory)
                .await;
        }
        let run = async |lane: u64| {
            let key = self.channel(sequence, 2 + lane);
            for begin in (lane * part..counts[0]).step_by(2 * part as usize) {
                let range = begin..(begin + part).min(counts[0]);
                let plan = self.plan(job, counts.clone(), Some(range.end - range.start))?;
                let memory = memory.part(range, job.call.dtype.size());
                self.execute(job, key, &plan, memory).await?;
            }
            Ok(())
        };
        tokio::try_join!(run(0), run(1)).map(|_| ())
    }

    /// This rank's steps, by the algorithm that is predicted to be fastest for the whole call: for
    /// all of it, or for a `part` with so many elements.
    fn plan(
        &self,
        job: &Job,
        counts: Vec<u64>,
        part: Option<u64>,
    ) -> Result<Arc<RankPlan>, Failure> {
        let size = job.call.dtype.size();
        let request = Request {
            kind: job.call.kind,
            ranks: self.ranks,
            root: job.call.root,
            counts,
            element_size: size as u32,
            max_message: (MESSAGE_BYTES / size as u64).max(1),
        };
        let asked = Asked {
            request,
            part,
            reduction: job.call.op.map(|op| (op.kind(), job.call.dtype)),
        };
        let plans = || self.plans.lock().expect("no panic while plans are held");
        if let Some(plan) = plans().get(&asked) {
            return Ok(plan.clone());
        }
        let model = Constants::default();
        let selector =
            Selector::new(&model, Transport::Network).force(Config::get().algorithm.as_deref());
        let choice = selector.select(&asked.request, asked.reduction);
        let choice = choice.map_err(|error| Failure::Plan(error.to_string()))?;
        let steps = match part {
            None => choice.algorithm.steps(&asked.request, self.me),
            Some(count) => {
                let request = Request {
                    counts: vec![count],
                    ..asked.request.clone()
                };
                choice.algorithm.steps(&request, self.me)
            }
        };
        let plan = Arc::new(steps);
        plans().put(asked, plan.clone());
        Ok(plan)
    }

    /// Whether the data travels with the agreement: the same answer on all ranks that agree.
    fn is_small(&self, data: Data<'_>) -> bool {
        // Only the root brings something: the others would send as much for nothing.
        let most = match data.job.call.kind {
            Kind::Broadcast | Kind::Scatter => 2 << 10,
            Kind::AllToAll => return false,
            _ => 16 << 10,
        };
        data.largest_contribution() <= most.min(self.room())
    }

    /// Bytes that each rank can tell all others along with its signature and factor: half of all
    /// records must fit in a message.
    fn room(&self) -> usize {
        let records = (self.ranks as usize / 2).max(1);
        ((EAGER_BYTES - Note::LEN) / records).saturating_sub(SCALE_BYTES)
    }

    /// Bytes of what a rank sends to each in an all-to-all, and expects from each.
    fn tables_bytes(&self) -> usize {
        2 * size_of::<u64>() * self.ranks as usize
    }

    /// Room for a record of `length` bytes from each rank.
    fn records(&self, length: usize) -> Records<'_> {
        let ranks = self.ranks as usize;
        Records {
            buffer: self.buffer(ranks * length + EAGER_BYTES),
            length,
            me: self.me as usize,
            ranks,
        }
    }

    /// What this rank tells all others along with its signature, with room for what they tell:
    /// `small` data, or the tables of an all-to-all.
    fn own_record(&self, data: Data<'_>, small: bool, tables: bool) -> Records<'_> {
        let bytes = match (small, tables) {
            (true, _) => data.largest_contribution(),
            (_, true) => self.tables_bytes(),
            _ => 0,
        };
        let mut records = self.records(SCALE_BYTES + bytes);
        let (factor, rest) = records.buffer.data.split_at_mut(SCALE_BYTES);
        factor.copy_from_slice(&data.job.scale().unwrap_or(1.0).to_le_bytes());
        if tables {
            write_tables(data, rest);
        } else if small {
            let (segments, bytes) = data.contribution();
            walk(segments, 0, bytes, |from, at, count| {
                // SAFETY: the record has room for the largest contribution.
                unsafe { copy(rest.as_mut_ptr().add(at), from, count) };
            });
        }
        records
    }

    /// The rounds in which all tell all: how many records are known, how many are passed on, to
    /// whom, and from whom as many come.
    fn rounds(&self) -> impl Iterator<Item = (usize, usize, u32, u32)> {
        let (me, ranks) = (self.me, self.ranks);
        let counts = std::iter::successors(Some(1u32), |count| count.checked_mul(2));
        counts
            .take_while(move |&count| count < ranks)
            .map(move |count| {
                let more = count.min(ranks - count) as usize;
                let (to, from) = ((me + ranks - count) % ranks, (me + count) % ranks);
                (count as usize, more, to, from)
            })
    }

    /// The tables of all ranks of an all-to-all that has too many for the agreement.
    async fn gather_tables<'a>(
        &'a self,
        data: Data<'_>,
        sequence: u64,
    ) -> Result<Records<'a>, Failure> {
        let mut records = self.records(self.tables_bytes());
        write_tables(data, &mut records.buffer.data);
        let length = records.length;
        let key = self.channel(sequence, 1);
        let known = Segment::from(&mut records.buffer.data[..]);
        for (count, more, to, from) in self.rounds() {
            let bytes = more * length;
            // SAFETY: the flights end in this round or are dropped before the records; they use
            // what is known and what follows it.
            let (received, sent) = unsafe {
                (
                    self.receive(from, key, &[known.part(count * length, bytes)]),
                    self.send(to, key, &[known.part(0, bytes)]),
                )
            };
            received.done().await?;
            sent.done().await?;
        }
        Ok(records)
    }

    fn peer(&self, rank: u32) -> &Arc<Peer> {
        self.peers[rank as usize]
            .as_ref()
            .expect("plans name other ranks")
    }

    fn channel(&self, sequence: u64, phase: u64) -> Key {
        Key {
            class: Class::Collective,
            group: self.key,
            channel: sequence * PHASES + phase,
        }
    }

    /// At least so many bytes; what they hold does not matter.
    fn buffer(&self, bytes: usize) -> Pooled<'_> {
        let mut pool = self.pool.lock().expect("no panic while the pool is held");
        let fitting = pool.iter().enumerate();
        let fitting = fitting
            .filter(|(_, data)| data.len() >= bytes)
            .min_by_key(|(_, data)| data.len())
            .map(|(index, _)| index);
        let data = fitting.map(|index| pool.swap_remove(index));
        drop(pool);
        // Sizes that are much alike serve each other.
        let fresh = || vec![0; bytes.next_multiple_of(EAGER_BYTES)];
        Pooled {
            data: data.unwrap_or_else(fresh),
            pool: &self.pool,
        }
    }

    /// # Safety
    /// The segments stay valid and untouched as long as the flight lives.
    unsafe fn send(&self, to: u32, key: Key, segments: &[Segment]) -> Flight<'_> {
        // SAFETY: passed on; the flight cancels the transfer when it is dropped.
        let transfer = unsafe { Transfer::new(segments, None) };
        let peer = self.peer(to);
        peer.link
            .send(key, self.me, transfer.clone(), Mode::Collective);
        Flight {
            peer,
            rank: to,
            transfer,
        }
    }

    /// # Safety
    /// As [`Net::send`], and nobody else uses the memory.
    unsafe fn receive(&self, from: u32, key: Key, segments: &[Segment]) -> Flight<'_> {
        // SAFETY: passed on.
        let transfer = unsafe { Transfer::new(segments, None) };
        let peer = self.peer(from);
        peer.link
            .receive(key, self.me, transfer.clone(), Mode::Collective);
        Flight {
            peer,
            rank: from,
            transfer,
        }
    }

    fn receive_owned(&self, from: u32, key: Key, bytes: usize) -> Message<'_> {
        let mut data = self.buffer(bytes);
        let segment = Segment {
            ptr: data.data.as_mut_ptr(),
            bytes,
        };
        // SAFETY: as above.
        let flight = unsafe { self.receive(from, key, &[segment]) };
        Message { flight, data }
    }

    /// All ranks compare their signatures, and get the record of every rank. Ranks that agree
    /// have records of one length.
    ///
    /// # Errors
    /// [`Failure::Mismatch`] on every rank, when two of them differ.
    async fn agree<'a>(
        &'a self,
        job: &Job,
        sequence: u64,
        mut records: Records<'a>,
    ) -> Result<Records<'a>, Failure> {
        let length = records.length;
        let key = self.channel(sequence, 0);
        let mut note = Note {
            signature: job.agreed().encode(),
            differ: None,
        };
        // Records from the own rank upwards, as far as they are known.
        let known = Segment::from(&mut records.buffer.data[..]);
        // A note to send and one to receive for each round.
        let mut notes = self.buffer(2 * self.rounds().count() * Note::LEN);
        let notes = Segment::from(&mut notes.data[..]);
        // Dropped first: then nobody uses the memory.
        let mut sent = SmallVec::<[Flight<'_>; 8]>::new();
        for (round, (count, more, to, from)) in self.rounds().enumerate() {
            let incoming = notes.part((2 * round + 1) * Note::LEN, Note::LEN);
            // Who does not agree may send more than there is to come.
            let rest = known.part(count * length, EAGER_BYTES - Note::LEN);
            // SAFETY: the flight is dropped before the buffers; the place is this round's, and
            // what of the records lies behind it is written in later rounds.
            let transfer = unsafe { Transfer::up_to(&[incoming, rest]) };
            let peer = self.peer(from);
            peer.link
                .receive(key, self.me, transfer.clone(), Mode::Collective);
            let received = Flight {
                peer,
                rank: from,
                transfer,
            };

            let outgoing = notes.part(2 * round * Note::LEN, Note::LEN);
            let encoded = note.encode();
            // SAFETY: this round's place in the notes, which is not sent yet.
            unsafe {
                outgoing
                    .ptr
                    .copy_from_nonoverlapping(encoded.as_ptr(), Note::LEN)
            };
            // Who disagrees goes on to say so: every rank hears from every other.
            let told = known.part(0, note.differ.map_or(more * length, |_| 0));
            // SAFETY: the flight is dropped before the buffers, of which only what follows is
            // written from here on.
            sent.push(unsafe { self.send(to, key, &[outgoing, told]) });

            received.done().await?;
            // SAFETY: the buffer holds all rounds' notes, and this one is complete or was
            // initialised before.
            let head = unsafe { &*incoming.ptr.cast::<[u8; Note::LEN]>() };
            let theirs = received
                .transfer
                .received()
                .checked_sub(Note::LEN)
                .map(|bytes| (Note::decode(head), bytes));
            let Some((theirs, bytes)) = theirs else {
                return Err(self.malformed(from));
            };
            if note.differ.is_none() {
                note.differ = theirs.differ.or_else(|| {
                    (theirs.signature != note.signature)
                        .then_some([(self.me, note.signature), (from, theirs.signature)])
                });
            }
            if note.differ.is_none() && bytes != more * length {
                return Err(self.malformed(from));
            }
            self.known.store((count + more) as u64, Ordering::Relaxed);
        }
        for flight in &sent {
            flight.done().await?;
        }
        if let Some([(first, ours), (second, theirs)]) = note.differ {
            let decode = |rank: u32, bytes: &[u8; Signature::LEN]| {
                Signature::decode(bytes).ok_or_else(|| self.malformed(rank))
            };
            return Err(Failure::Mismatch {
                rank: second,
                theirs: decode(second, &theirs)?,
                own_rank: first,
                ours: decode(first, &ours)?,
            });
        }
        drop(sent);
        Ok(records)
    }

    fn malformed(&self, rank: u32) -> Failure {
        let reason = "it sent a malformed message".to_owned();
        Failure::Link {
            rank,
            error: LinkError::Closed(reason),
        }
    }

    // ---- the steps of a plan ----

    async fn execute(
        &self,
        job: &Job,
        key: Key,
        plan: &RankPlan,
        mut memory: Memory<'_>,
    ) -> Result<(), Failure> {
        let size = job.call.dtype.size();
        let steps = &plan.steps[..];
        let scratch = plan.scratch as usize * size;
        let mut buffer = self.buffer(scratch);
        memory.scratch = [Segment {
            ptr: buffer.data.as_mut_ptr(),
            bytes: scratch,
        }];
        let memory = &memory;
        let mut posted: SmallVec<[Option<Posted<'_>>; WINDOW]> = SmallVec::new();
        let mut sends: Vec<(Chunk, Flight<'_>)> = Vec::new();
        // Whether the step before has done what remains to be done for the next `Finish`.
        let mut finished = false;
        for (index, step) in steps.iter().enumerate() {
            sends.retain(|(_, flight)| flight.transfer.result() != Some(Ok(())));
            self.post_ahead(job, key, &steps[index..], memory, &mut posted, &sends);
            let ready = if posted.is_empty() {
                None
            } else {
                posted.remove(0)
            };
            match step {
                Step::Send { to, chunk } => {
                    let segments = memory.segments(*chunk, size);
                    // SAFETY: the call's memory and the scratch outlive this future, and no later
                    // step changes the chunk before the flight has ended (`settle`).
                    sends.push((*chunk, unsafe { self.send(*to, key, &segments) }));
                }
                Step::Recv { from, chunk } => {
                    if let Some(Posted::InPlace(flight)) = ready {
                        flight.done().await?;
                    } else {
                        settle(&mut sends, chunk).await?;
                        let segments = memory.segments(*chunk, size);
                        // SAFETY: as above; the chunk is this step's alone.
                        unsafe { self.receive(*from, key, &segments) }
                            .done()
                            .await?;
                    }
                }
                Step::RecvReduce { from, chunk } => {
                    let message = match ready {
                        Some(Posted::Aside(message)) => message,
                        _ => self.receive_owned(*from, key, chunk.count as usize * size),
                    };
                    message.flight.done().await?;
                    settle(&mut sends, chunk).await?;
                    let received = message.data.data.as_ptr();
                    memory.each(*chunk, size, |ptr, at, bytes| {
                        let reducer = job.reducer.expect("reductions are given one");
                        let received = received.wrapping_add(at);
                        // SAFETY: the chunk is this rank's, the message lies apart from it.
                        unsafe {
                            reducer.reduce(&[ptr], &[ptr, received], bytes / size, &[], None)
                        };
                    });
                }
                Step::Reduce { dst, sources } => {
                    settle(&mut sends, dst).await?;
                    // A result that is finished next is finished here: rounded once.
                    let last = matches!(steps.get(index + 1), Some(Step::Finish { chunk }) if chunk == dst);
                    self.reduce(job, memory, *dst, sources, last.then_some(self.ranks));
                    finished = last;
                }
                Step::Copy { src, dst } => {
                    settle(&mut sends, dst).await?;
                    memory.each(*dst, size, |to, at, bytes| {
                        let from = Chunk {
                            offset: src.offset + (at / size) as u64,
                            count: (bytes / size) as u64,
                            ..*src
                        };
                        memory.each(from, size, |from, inner, bytes| {
                            let to = to.wrapping_add(inner);
                            if to != from {
                                // SAFETY: the ranges of a copy do not overlap.
                                unsafe { copy(to, from, bytes) };
                            }
                        });
                    });
                }
                Step::Finish { chunk } => {
                    let average = job.call.op.is_some_and(|op| op.kind() == ReduceKind::Avg);
                    if average && !std::mem::take(&mut finished) {
                        settle(&mut sends, chunk).await?;
                        memory.each(*chunk, size, |ptr, _, bytes| {
                            let reducer = job.reducer.expect("reductions are given one");
                            // SAFETY: the chunk is this rank's.
                            unsafe { reducer.finish(ptr, bytes / size, self.ranks) };
                        });
                    }
                }
            }
        }
        for (_, flight) in &sends {
            flight.done().await?;
        }
        Ok(())
    }

    /// Posts the receives among the next steps that no step before them concerns. A receive
    /// that reduces lands aside, so nothing concerns it.
    fn post_ahead<'a>(
        &'a self,
        job: &Job,
        key: Key,
        steps: &[Step],
        memory: &Memory<'_>,
        posted: &mut SmallVec<[Option<Posted<'a>>; WINDOW]>,
        sends: &[(Chunk, Flight<'_>)],
    ) {
        let size = job.call.dtype.size();
        let mut blocked: SmallVec<[u32; 8]> = SmallVec::new();
        for (index, step) in steps.iter().take(WINDOW).enumerate() {
            if index < posted.len() {
                // A receive that was passed over keeps later ones from its sender waiting, so
                // that they match in order.
                if let (None, Step::Recv { from, .. } | Step::RecvReduce { from, .. }) =
                    (&posted[index], step)
                {
                    blocked.push(*from);
                }
                continue;
            }
            posted.push(match step {
                Step::Recv { from, chunk } if !blocked.contains(from) => {
                    let free = !steps[..index].iter().any(|before| concerns(before, chunk))
                        && !sends.iter().any(|(sent, _)| overlap(sent, chunk));
                    if free {
                        let segments = memory.segments(*chunk, size);
                        // SAFETY: as in `execute`; no step before this one touches the chunk.
                        Some(Posted::InPlace(unsafe {
                            self.receive(*from, key, &segments)
                        }))
                    } else {
                        blocked.push(*from);
                        None
                    }
                }
                Step::RecvReduce { from, chunk } if !blocked.contains(from) => Some(Posted::Aside(
                    self.receive_owned(*from, key, chunk.count as usize * size),
                )),
                Step::Recv { .. }
                | Step::RecvReduce { .. }
                | Step::Send { .. }
                | Step::Reduce { .. }
                | Step::Copy { .. }
                | Step::Finish { .. } => None,
            });
        }
    }

    fn reduce(
        &self,
        job: &Job,
        memory: &Memory<'_>,
        dst: Chunk,
        sources: &[Chunk],
        divisor: Option<u32>,
    ) {
        let size = job.call.dtype.size();
        let reducer = job.reducer.expect("reductions are given one");
        let mut done = 0;
        let total = dst.count as usize * size;
        while done < total {
            let at = |chunk: &Chunk| {
                let list = memory.buffer(chunk.buffer);
                contiguous(list, chunk.offset as usize * size + done)
                    .expect("chunks lie in their buffer")
            };
            let (to, mut run) = at(&dst);
            let mut from: SmallVec<[*const u8; 16]> = SmallVec::new();
            for source in sources {
                let (ptr, length) = at(source);
                from.push(ptr);
                run = run.min(length);
            }
            run = run.min(total - done);
            // SAFETY: the chunks lie in this rank's memory; `dst` is one of the sources or apart
            // from all.
            unsafe { reducer.reduce(&[to], &from, run / size, &[], divisor) };
            done += run;
        }
    }

    // ---- all-to-all, whose pieces may differ ----

    /// `tables(rank)` holds what the rank sends to each, then what it expects from each.
    async fn all_to_all<'t>(
        &self,
        data: Data<'_>,
        sequence: u64,
        tables: impl Fn(usize) -> &'t [u8],
    ) -> Result<(), Failure> {
        let (call, ranks) = (&data.job.call, data.ranks);
        let entry =
            |rank: usize, index: usize| u64::from_le_bytes(tables(rank).as_chunks().0[index]);
        for from in 0..ranks {
            for to in 0..ranks {
                let (sent, expected) = (entry(from, to), entry(to, ranks + from));
                if sent != expected {
                    let (from, to) = (from as u32, to as u32);
                    return Err(Failure::Splits {
                        from,
                        to,
                        sent,
                        expected,
                    });
                }
            }
        }
        data.copy_own();
        let key = self.channel(sequence, 2);
        let mut flights = Vec::new();
        for step in 1..self.ranks {
            let to = (self.me + step) % self.ranks;
            let from = (self.me + self.ranks - step) % self.ranks;
            // SAFETY: the call's memory outlives this future.
            unsafe {
                if call.output.piece_bytes(from as usize) > 0 {
                    flights.push(self.receive(from, key, call.output.piece(from as usize)));
                }
                if call.input.piece_bytes(to as usize) > 0 {
                    flights.push(self.send(to, key, call.input.piece(to as usize)));
                }
            }
        }
        for flight in &flights {
            flight.done().await?;
        }
        Ok(())
    }
}

/// A receive that was posted ahead of its step.
enum Posted<'a> {
    InPlace(Flight<'a>),
    Aside(Message<'a>),
}

/// Waits for the sends of a chunk that is about to change.
async fn settle(sends: &mut Vec<(Chunk, Flight<'_>)>, chunk: &Chunk) -> Result<(), Failure> {
    for (_, flight) in sends.iter().filter(|(sent, _)| overlap(sent, chunk)) {
        flight.done().await?;
    }
    sends.retain(|(sent, _)| !overlap(sent, chunk));
    Ok(())
}

fn overlap(a: &Chunk, b: &Chunk) -> bool {
    a.buffer == b.buffer && a.offset < b.offset + b.count && b.offset < a.offset + a.count
}

/// Whether a step reads or writes the chunk.
fn concerns(step: &Step, chunk: &Chunk) -> bool {
    match step {
        Step::Send { chunk: other, .. }
        | Step::Recv { chunk: other, .. }
        | Step::RecvReduce { chunk: other, .. }
        | Step::Finish { chunk: other } => overlap(other, chunk),
        Step::Reduce { dst, sources } => {
            overlap(dst, chunk) || sources.iter().any(|source| overlap(source, chunk))
        }
        Step::Copy { src, dst } => overlap(src, chunk) || overlap(dst, chunk),
    }
}

/// What ranks tell each other to find out whether they agree.
struct Note {
    signature: [u8; Signature::LEN],
    /// Two ranks that do not, and what they called.
    differ: Option<[(u32, [u8; Signature::LEN]); 2]>,
}

impl Note {
    const LEN: usize = 1 + Signature::LEN + 2 * (4 + Signature::LEN);

    fn encode(&self) -> [u8; Note::LEN] {
        let mut bytes = [0; Note::LEN];
        let (differ, rest) = bytes.split_at_mut(1);
        differ[0] = u8::from(self.differ.is_some());
        let (own, mut rest) = rest.split_at_mut(Signature::LEN);
        own.copy_from_slice(&self.signature);
        for (rank, signature) in self.differ.iter().flatten() {
            let (number, behind) = rest.split_at_mut(4);
            number.copy_from_slice(&rank.to_le_bytes());
            let (place, behind) = behind.split_at_mut(Signature::LEN);
            place.copy_from_slice(signature);
            rest = behind;
        }
        bytes
    }

    fn decode(bytes: &[u8; Note::LEN]) -> Note {
        fn part<const N: usize>(bytes: &[u8; Note::LEN], at: usize) -> [u8; N] {
            std::array::from_fn(|index| bytes[at + index])
        }
        let pair = [0, 1].map(|side| {
            let at = 1 + Signature::LEN + side * (4 + Signature::LEN);
            (u32::from_le_bytes(part(bytes, at)), part(bytes, at + 4))
        });
        Note {
            signature: part(bytes, 1),
            differ: (bytes[0] != 0).then_some(pair),
        }
    }
}

/// What a rank sends to each in an all-to-all, and expects from each, in bytes.
fn write_tables(data: Data<'_>, to: &mut [u8]) {
    let call = &data.job.call;
    let sent = (0..data.ranks).map(|rank| call.input.piece_bytes(rank));
    let expected = (0..data.ranks).map(|rank| call.output.piece_bytes(rank));
    for (entry, size) in to.as_chunks_mut().0.iter_mut().zip(sent.chain(expected)) {
        *entry = (size as u64).to_le_bytes();
    }
}

/// What all ranks told each other, from the own rank upwards.
struct Records<'a> {
    buffer: Pooled<'a>,
    length: usize,
    me: usize,
    ranks: usize,
}

impl Records<'_> {
    fn of(&self, rank: usize) -> &[u8] {
        let index = (rank + self.ranks - self.me) % self.ranks;
        &self.buffer.data[index * self.length..][..self.length]
    }
}

/// Where a plan's buffers lie.
struct Memory<'a> {
    input: SmallVec<[Segment; 4]>,
    output: SmallVec<[Segment; 4]>,
    scratch: [Segment; 1],
    /// Memory in place of the caller's, where a plan would change what the caller keeps.
    _own: [Option<Pooled<'a>>; 2],
}

impl<'a> Memory<'a> {
    /// Plans of all-reduce, reduce and broadcast work in the output alone, which must hold
    /// the input; PREMUL_SUM wants the input multiplied.
    fn new(net: &'a Net, job: &Job) -> Memory<'a> {
        let call = &job.call;
        let mut own = [None, None];
        let mut input: SmallVec<[Segment; 4]> = call.input.segments().into();
        let mut output: SmallVec<[Segment; 4]> = call.output.segments().into();
        let bytes = call.input.bytes();
        let fill = |from: &[Segment], to: &[Segment]| {
            walk(from, 0, bytes, |from, at, count| {
                walk(to, at, count, |to, inner, count| {
                    let from = from.wrapping_add(inner);
                    if from != to {
                        // SAFETY: the caller's input and output coincide or lie apart.
                        unsafe { copy(to, from, count) };
                    }
                });
            });
        };
        let fresh = |index: usize, own: &mut [Option<Pooled<'a>>; 2]| {
            let mut buffer = net.buffer(bytes);
            let segment = Segment {
                ptr: buffer.data.as_mut_ptr(),
                bytes,
            };
            own[index] = Some(buffer);
            segment
        };
        match call.kind {
            Kind::Broadcast if call.root == net.me => output = input.clone(),
            Kind::AllReduce => fill(&input, &output),
            Kind::Reduce => {
                if call.root != net.me {
                    output = [fresh(0, &mut own)].into_iter().collect();
                }
                fill(&input, &output);
            }
            Kind::ReduceScatter if job.scale().is_some() => {
                let copy: SmallVec<[Segment; 4]> = [fresh(1, &mut own)].into_iter().collect();
                fill(&input, &copy);
                input = copy;
            }
            _ => {}
        }
        if let (Some(scale), Some(reducer)) = (job.scale(), job.reducer) {
            let scaled = if call.kind == Kind::ReduceScatter {
                &input
            } else {
                &output
            };
            for segment in scaled {
                // SAFETY: the output, or a copy of the input.
                unsafe { reducer.scale(segment.ptr, segment.bytes / call.dtype.size(), scale) };
            }
        }
        Memory {
            input,
            output,
            scratch: [Segment {
                ptr: std::ptr::null_mut(),
                bytes: 0,
            }],
            _own: own,
        }
    }

    /// Elements of each piece, as a planner wants them.
    fn counts(&self, job: &Job) -> Vec<u64> {
        let call = &job.call;
        let size = call.dtype.size();
        let count = |bytes: usize| (bytes / size) as u64;
        let pieces = |pieces: &crate::Pieces| {
            (0..pieces.len())
                .map(|piece| count(pieces.piece_bytes(piece)))
                .collect()
        };
        match call.kind {
            Kind::AllGather => pieces(&call.output),
            Kind::ReduceScatter => pieces(&call.input),
            Kind::Gather => vec![count(call.input.bytes())],
            Kind::Scatter => vec![count(call.output.bytes())],
            _ => vec![count(call.input.bytes().max(call.output.bytes()))],
        }
    }

    /// A range of the elements of the output, in which an all-reduce works.
    fn part(&self, elements: Range<u64>, size: usize) -> Memory<'static> {
        let output = self.segments(Chunk::new(Buffer::Output, elements), size);
        Memory {
            input: SmallVec::new(),
            output,
            scratch: self.scratch,
            _own: [None, None],
        }
    }

    fn buffer(&self, buffer: Buffer) -> &[Segment] {
        match buffer {
            Buffer::Input => &self.input,
            Buffer::Output => &self.output,
            Buffer::Scratch => &self.scratch,
        }
    }

    fn each(&self, chunk: Chunk, size: usize, visit: impl FnMut(*mut u8, usize, usize)) {
        let (offset, bytes) = (chunk.offset as usize * size, chunk.count as usize * size);
        walk(self.buffer(chunk.buffer), offset, bytes, visit);
    }

    fn segments(&self, chunk: Chunk, size: usize) -> SmallVec<[Segment; 4]> {
        let mut segments = SmallVec::new();
        self.each(chunk, size, |ptr, _, bytes| {
            segments.push(Segment { ptr, bytes })
        });
        segments
    }
}
