//! A symbolic verifier: plays all ranks of a schedule and proves its result.
//!
//! Memory is tracked by intervals, not elements: each holds the set of ranks whose input
//! is reduced into it, which element of theirs it is, and a fingerprint of the
//! order of operations. The play is deterministic, so a schedule that ends here with
//! channels of a given capacity ends on every executor with at least that capacity.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ops::Range;
use std::rc::Rc;

use super::{Buffer, Chunk, Request, RequestError, Schedule, Step};
use crate::Kind;

/// What a correct schedule is like.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// Messages sent by all ranks.
    pub messages: u64,
    /// Elements sent by the rank that sends most.
    pub sent: u64,
    /// Elements received by the rank that receives most.
    pub received: u64,
    /// Longest chain of messages each of which waits for the one before.
    pub rounds: u32,
    /// How often the result that was rounded most was rounded: 1 when all operands
    /// of each element met in a single `Reduce`; 0 when nothing is reduced.
    pub roundings: u32,
    /// Whether all copies of each element of the result come from the same operations
    /// in the same order, up to the order of two operands, and so are bit-equal.
    pub bit_equal: bool,
    /// Writes to memory whose send may still be under way; an executor that sends in place
    /// has to wait there.
    pub hazards: Vec<Hazard>,
}

/// A step that changes what an earlier send of the same rank may still read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hazard {
    /// The rank.
    pub rank: u32,
    /// Index of the send.
    pub send: usize,
    /// Index of the step that writes.
    pub write: usize,
}

/// A schedule that is wrong.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum VerifyError {
    /// The request itself is wrong.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// The schedule is for another number of ranks.
    #[error("schedule has steps for {steps} and scratch for {scratch} ranks, request has {ranks}")]
    Ranks {
        /// Lists of steps.
        steps: usize,
        /// Entries of scratch sizes.
        scratch: usize,
        /// Ranks asked for.
        ranks: u32,
    },
    /// A step that no executor can run or that has a wrong effect.
    #[error("rank {rank}, step {step}: {fault}")]
    Step {
        /// The rank.
        rank: u32,
        /// Index of the step in its list.
        step: usize,
        /// What is wrong.
        fault: Fault,
    },
    /// Ranks that wait for one another.
    #[error("deadlock: {}", list_blocked(.blocked))]
    Deadlock {
        /// Each rank that waits, the index of its step, and the step.
        blocked: Vec<(u32, usize, Step)>,
    },
    /// Messages that nobody receives.
    #[error("{count} messages from rank {from} to rank {to} are never received")]
    Unreceived {
        /// Sending rank.
        from: u32,
        /// Receiving rank.
        to: u32,
        /// How many.
        count: usize,
    },
    /// A result that is not what the collective promises.
    #[error("rank {rank}, result {chunk}: {fault}")]
    Result {
        /// The rank.
        rank: u32,
        /// The elements that are wrong.
        chunk: Chunk,
        /// What is wrong.
        fault: Fault,
    },
    /// A rank that may leave a barrier before another has entered it.
    #[error("rank {rank} may leave the barrier before rank {other} has entered")]
    Barrier {
        /// The rank that leaves.
        rank: u32,
        /// The rank that may not have entered.
        other: u32,
    },
}

/// What is wrong with a step or a result.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Fault {
    /// A peer that is not another rank of the group.
    #[error("peer {0} is not another rank of the group")]
    Peer(u32),
    /// A range outside its buffer.
    #[error("{chunk} reaches past {length} elements")]
    OutOfRange {
        /// The range.
        chunk: Chunk,
        /// Elements in the buffer.
        length: u64,
    },
    /// A write where the caller's data must stay.
    #[error("{0} is read only")]
    ReadOnly(Chunk),
    /// Memory without contents.
    #[error("{0} is undefined")]
    Undefined(Chunk),
    /// Both sides of a message differ.
    #[error("rank {from} sends {sent} elements, {expected} are expected")]
    CountMismatch {
        /// Sending rank.
        from: u32,
        /// Elements in the message.
        sent: u64,
        /// Elements of the receive.
        expected: u64,
    },
    /// Two sides of a local step differ.
    #[error("{a} and {b} differ in count")]
    LocalCountMismatch {
        /// One operand.
        a: Chunk,
        /// Another.
        b: Chunk,
    },
    /// Ranges that must be equal or apart.
    #[error("{a} and {b} overlap")]
    Overlap {
        /// One operand.
        a: Chunk,
        /// Another.
        b: Chunk,
    },
    /// A `Reduce` without operands.
    #[error("reduces nothing")]
    NoOperand,
    /// A rank's element that would be reduced more than once.
    #[error("rank {0} would be reduced twice")]
    ReducedTwice(u32),
    /// Operands that are different elements.
    #[error("reduces different elements ({a} and {b} of the input)")]
    Misaligned {
        /// Index in the input.
        a: i128,
        /// Index in the input.
        b: i128,
    },
    /// An operand that is a final result already.
    #[error("operates on a finished result")]
    Finished,
    /// A result that lacks its `Finish`.
    #[error("is not finished")]
    Unfinished,
    /// A result that lacks a rank.
    #[error("lacks rank {0}")]
    Missing(u32),
    /// Data that the collective does not want there.
    #[error(
        "holds element {index} of rank {rank}, expected element {expected_index} of rank {expected_rank}"
    )]
    WrongElement {
        /// Rank it comes from.
        rank: u32,
        /// Its index in that rank's input.
        index: i128,
        /// Rank it should come from.
        expected_rank: u32,
        /// Index it should have.
        expected_index: i128,
    },
    /// `Finish` in a collective that reduces nothing.
    #[error("finishes in {0}, which reduces nothing")]
    NoReduction(Kind),
}

fn list_blocked(blocked: &[(u32, usize, Step)]) -> String {
    let ranks: Vec<String> = blocked
        .iter()
        .take(8)
        .map(|(rank, step, what)| format!("rank {rank} at step {step} ({what})"))
        .collect();
    let more = if blocked.len() > 8 { ", ..." } else { "" };
    format!("{}{more}", ranks.join(", "))
}

/// Proves that `schedule` does what `request` asks for when an executor can hold
/// `in_flight` messages (at least 1) for each ordered pair of ranks.
///
/// Time grows with the number of messages times ranks, not with elements.
pub fn verify(
    request: &Request,
    schedule: &Schedule,
    in_flight: usize,
) -> Result<Report, VerifyError> {
    request.check()?;
    let ranks = request.ranks as usize;
    if schedule.steps.len() != ranks || schedule.scratch.len() != ranks {
        return Err(VerifyError::Ranks {
            steps: schedule.steps.len(),
            scratch: schedule.scratch.len(),
            ranks: request.ranks,
        });
    }
    let mut play = Play::new(request, schedule, in_flight);
    play.run()?;
    play.conclude()
}

/// The set of ranks that went into a value.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Ranks(Rc<[u64]>);

impl Ranks {
    fn one(rank: u32, of: usize) -> Ranks {
        let mut words = vec![0; of.div_ceil(64)];
        words[rank as usize / 64] |= 1 << (rank % 64);
        Ranks(words.into())
    }

    fn common(&self, other: &Ranks) -> Option<u32> {
        first_bit(self.0.iter().zip(other.0.iter()).map(|(a, b)| a & b))
    }

    fn missing(&self, of: usize) -> Option<u32> {
        first_bit(self.0.iter().map(|word| !word)).filter(|&rank| (rank as usize) < of)
    }

    fn union(&self, other: &Ranks) -> Ranks {
        Ranks(
            self.0
                .iter()
                .zip(other.0.iter())
                .map(|(a, b)| a | b)
                .collect(),
        )
    }

    fn first(&self) -> u32 {
        first_bit(self.0.iter().copied()).unwrap_or(0)
    }

    fn is_only(&self, rank: u32) -> bool {
        self.first() == rank && self.0.iter().map(|word| word.count_ones()).sum::<u32>() == 1
    }
}

fn first_bit(words: impl Iterator<Item = u64>) -> Option<u32> {
    words
        .enumerate()
        .find(|(_, word)| *word != 0)
        .map(|(index, word)| index as u32 * 64 + word.trailing_zeros())
}

/// What an interval of memory holds.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Value {
    /// Whose inputs are reduced into it.
    ranks: Ranks,
    /// Element at position p is element p + shift of those inputs.
    shift: i128,
    /// Whether `Finish` was applied.
    finished: bool,
    /// Fingerprint of the operations that made it.
    order: u64,
    /// How often it was rounded.
    roundings: u32,
}

impl Value {
    fn moved(&self, by: i128) -> Value {
        Value {
            shift: self.shift - by,
            ..self.clone()
        }
    }
}

fn mix(a: u64, b: u64) -> u64 {
    let mut hash = a.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ b.rotate_left(29);
    hash = (hash ^ (hash >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    hash ^ (hash >> 29)
}

/// Values by position, in order, without overlaps; gaps are undefined.
#[derive(Clone, Debug, Default)]
struct Memory(BTreeMap<u64, (u64, Value)>);

type Run = (Range<u64>, Value);

impl Memory {
    fn filled(count: u64, value: Value) -> Memory {
        let mut memory = Memory::default();
        if count > 0 {
            memory.0.insert(0, (count, value));
        }
        memory
    }

    /// The runs that make up `range`, or the first part that is undefined.
    fn read(&self, range: Range<u64>) -> Result<Vec<Run>, Range<u64>> {
        let mut runs = Vec::new();
        let mut at = range.start;
        let first = self
            .0
            .range(..=range.start)
            .next_back()
            .map_or(range.start, |(&start, _)| start);
        for (&start, (end, value)) in self.0.range(first..range.end) {
            if *end <= at {
                continue;
            }
            if start > at {
                return Err(at..start);
            }
            let stop = (*end).min(range.end);
            runs.push((at..stop, value.clone()));
            at = stop;
        }
        if at < range.end {
            Err(at..range.end)
        } else {
            Ok(runs)
        }
    }

    fn erase(&mut self, range: Range<u64>) {
        let first = self
            .0
            .range(..=range.start)
            .next_back()
            .map_or(range.start, |(&start, _)| start);
        let touched: Vec<u64> = self
            .0
            .range(first..range.end)
            .map(|(&start, _)| start)
            .collect();
        for start in touched {
            let (end, value) = self.0[&start].clone();
            if end <= range.start {
                continue;
            }
            self.0.remove(&start);
            if start < range.start {
                self.0.insert(start, (range.start, value.clone()));
            }
            if end > range.end {
                self.0.insert(range.end, (end, value));
            }
        }
    }

    fn write(&mut self, range: Range<u64>, runs: impl IntoIterator<Item = Run>) {
        if range.is_empty() {
            return;
        }
        self.erase(range);
        for (run, value) in runs {
            // Joining equal neighbours keeps memory as coarse as the plan.
            let mut start = run.start;
            if let Some((&before, (end, held))) = self.0.range(..run.start).next_back()
                && *end == run.start
                && *held == value
            {
                start = before;
            }
            let mut stop = run.end;
            if let Some((end, held)) = self.0.get(&run.end)
                && *held == value
            {
                stop = *end;
                self.0.remove(&run.end);
            }
            self.0.insert(start, (stop, value));
        }
    }
}

/// A message on its way.
struct Message {
    count: u64,
    /// Relative to the start of the message.
    runs: Vec<Run>,
    clock: Rc<[u32]>,
    depth: u32,
}

/// A send whose receipt the sender cannot know of yet.
struct Sent {
    chunk: Chunk,
    to: u32,
    /// Which message of the pair it is.
    number: usize,
    step: usize,
}

struct Rank {
    memory: [Memory; 3],
    /// Elements in each buffer.
    lengths: [u64; 3],
    next: usize,
    /// How many steps of each rank are known to be done.
    clock: Rc<[u32]>,
    depth: u32,
    sent: Vec<Sent>,
    sent_elements: u64,
    received_elements: u64,
}

#[derive(Default)]
struct Channel {
    queue: VecDeque<Message>,
    sent: usize,
    /// For each message received, the index of the step that did.
    receipts: Vec<u32>,
}

struct Play<'a> {
    request: &'a Request,
    schedule: &'a Schedule,
    in_flight: usize,
    ranks: Vec<Rank>,
    channels: HashMap<(u32, u32), Channel>,
    hazards: Vec<Hazard>,
    messages: u64,
}

impl<'a> Play<'a> {
    fn new(request: &'a Request, schedule: &'a Schedule, in_flight: usize) -> Self {
        let pieces = request.pieces();
        let count = request.ranks as usize;
        let ranks = (0..request.ranks)
            .map(|rank| {
                let value = |shift: u64| Value {
                    ranks: Ranks::one(rank, count),
                    shift: i128::from(shift),
                    finished: false,
                    order: mix(0x5eed, u64::from(rank)),
                    roundings: 0,
                };
                let held = |buffer, shift| Memory::filled(request.len(buffer, rank), value(shift));
                let mut memory: [Memory; 3] = Default::default();
                match request.kind {
                    Kind::AllReduce | Kind::Reduce => memory[1] = held(Buffer::Output, 0),
                    Kind::Broadcast if rank == request.root => memory[1] = held(Buffer::Output, 0),
                    Kind::AllGather | Kind::Gather => {
                        memory[0] = held(Buffer::Input, pieces.offset(rank));
                    }
                    _ => memory[0] = held(Buffer::Input, 0),
                }
                let [input, output] =
                    [Buffer::Input, Buffer::Output].map(|buffer| request.len(buffer, rank));
                Rank {
                    memory,
                    lengths: [input, output, schedule.scratch[rank as usize]],
                    next: 0,
                    clock: vec![0; count].into(),
                    depth: 0,
                    sent: Vec::new(),
                    sent_elements: 0,
                    received_elements: 0,
                }
            })
            .collect();
        Play {
            request,
            schedule,
            in_flight,
            ranks,
            channels: HashMap::new(),
            hazards: Vec::new(),
            messages: 0,
        }
    }

    fn run(&mut self) -> Result<(), VerifyError> {
        let mut ready: Vec<u32> = (0..self.request.ranks).rev().collect();
        while let Some(rank) = ready.pop() {
            while self.ranks[rank as usize].next < self.schedule.steps[rank as usize].len() {
                let step = self.ranks[rank as usize].next;
                match self.step(rank) {
                    Ok(Progress::Blocked) => break,
                    Ok(Progress::Local) => {}
                    Ok(Progress::Wakes(peer)) => ready.push(peer),
                    Err(fault) => return Err(VerifyError::Step { rank, step, fault }),
                }
            }
        }
        let blocked: Vec<_> = (0..self.request.ranks)
            .filter_map(|rank| {
                let next = self.ranks[rank as usize].next;
                let step = self.schedule.steps[rank as usize].get(next)?;
                Some((rank, next, step.clone()))
            })
            .collect();
        if !blocked.is_empty() {
            return Err(VerifyError::Deadlock { blocked });
        }
        let left = self
            .channels
            .iter()
            .filter(|(_, channel)| !channel.queue.is_empty())
            .min_by_key(|(pair, _)| **pair);
        if let Some((&(from, to), channel)) = left {
            return Err(VerifyError::Unreceived {
                from,
                to,
                count: channel.queue.len(),
            });
        }
        Ok(())
    }

    /// Runs the next step of `rank` if it can run now.
    fn step(&mut self, rank: u32) -> Result<Progress, Fault> {
        let steps: &'a [Step] = &self.schedule.steps[rank as usize];
        let at = self.ranks[rank as usize].next;
        let progress = match &steps[at] {
            Step::Send { to, chunk } => {
                self.peer(rank, *to)?;
                let runs = self.read(rank, *chunk)?;
                let channel = self.channels.entry((rank, *to)).or_default();
                if channel.queue.len() >= self.in_flight {
                    return Ok(Progress::Blocked);
                }
                let number = channel.sent;
                channel.sent += 1;
                self.messages += 1;
                let state = &mut self.ranks[rank as usize];
                set(&mut state.clock, rank, at);
                let clock = state.clock.clone();
                let message = Message {
                    count: chunk.count,
                    runs,
                    clock,
                    depth: state.depth + 1,
                };
                channel.queue.push_back(message);
                if chunk.count > 0 {
                    state.sent.push(Sent {
                        chunk: *chunk,
                        to: *to,
                        number,
                        step: at,
                    });
                }
                state.sent_elements += chunk.count;
                Progress::Wakes(*to)
            }
            Step::Recv { from, chunk } | Step::RecvReduce { from, chunk } => {
                self.peer(rank, *from)?;
                self.writable(rank, *chunk)?;
                let channel = self.channels.entry((*from, rank)).or_default();
                let Some(message) = channel.queue.pop_front() else {
                    return Ok(Progress::Blocked);
                };
                channel.receipts.push(at as u32);
                if message.count != chunk.count {
                    let (sent, expected) = (message.count, chunk.count);
                    return Err(Fault::CountMismatch {
                        from: *from,
                        sent,
                        expected,
                    });
                }
                let state = &mut self.ranks[rank as usize];
                let mut clock: Rc<[u32]> = state
                    .clock
                    .iter()
                    .zip(message.clock.iter())
                    .map(|(&mine, &theirs)| mine.max(theirs))
                    .collect();
                set(&mut clock, rank, at);
                state.clock = clock;
                state.depth = state.depth.max(message.depth);
                state.received_elements += chunk.count;
                let mut runs = place(message.runs, chunk.offset);
                if matches!(&steps[at], Step::RecvReduce { .. }) {
                    let held = self.read(rank, *chunk)?;
                    runs = combine(&[place(held, chunk.offset), runs])?;
                }
                self.write(rank, at, *chunk, runs);
                Progress::Wakes(*from)
            }
            Step::Reduce { dst, sources } => {
                self.writable(rank, *dst)?;
                let mut operands = Vec::with_capacity(sources.len());
                for source in sources {
                    if source.count != dst.count {
                        return Err(Fault::LocalCountMismatch {
                            a: *dst,
                            b: *source,
                        });
                    }
                    if source != dst && source.overlaps(dst) {
                        return Err(Fault::Overlap {
                            a: *dst,
                            b: *source,
                        });
                    }
                    operands.push(place(self.read(rank, *source)?, dst.offset));
                }
                let runs = combine(&operands)?;
                self.write(rank, at, *dst, runs);
                Progress::Local
            }
            Step::Copy { src, dst } => {
                self.writable(rank, *dst)?;
                if src.count != dst.count {
                    return Err(Fault::LocalCountMismatch { a: *dst, b: *src });
                }
                if src.overlaps(dst) {
                    return Err(Fault::Overlap { a: *dst, b: *src });
                }
                let runs = place(self.read(rank, *src)?, dst.offset);
                self.write(rank, at, *dst, runs);
                Progress::Local
            }
            Step::Finish { chunk } => {
                self.writable(rank, *chunk)?;
                if !self.request.is_reduction() {
                    return Err(Fault::NoReduction(self.request.kind));
                }
                let mut runs = place(self.read(rank, *chunk)?, chunk.offset);
                for (_, value) in &mut runs {
                    if value.finished {
                        return Err(Fault::Finished);
                    }
                    if let Some(missing) = value.ranks.missing(self.ranks.len()) {
                        return Err(Fault::Missing(missing));
                    }
                    value.finished = true;
                }
                self.write(rank, at, *chunk, runs);
                Progress::Local
            }
        };
        self.ranks[rank as usize].next += 1;
        Ok(progress)
    }

    fn peer(&self, rank: u32, peer: u32) -> Result<(), Fault> {
        if peer == rank || peer >= self.request.ranks {
            Err(Fault::Peer(peer))
        } else {
            Ok(())
        }
    }

    fn in_range(&self, rank: u32, chunk: Chunk) -> Result<(), Fault> {
        let length = self.ranks[rank as usize].lengths[index(chunk.buffer)];
        match chunk.offset.checked_add(chunk.count) {
            Some(end) if end <= length => Ok(()),
            _ => Err(Fault::OutOfRange { chunk, length }),
        }
    }

    fn writable(&self, rank: u32, chunk: Chunk) -> Result<(), Fault> {
        self.in_range(rank, chunk)?;
        let kept = self.request.kind == Kind::Reduce && rank != self.request.root;
        match chunk.buffer {
            Buffer::Input => Err(Fault::ReadOnly(chunk)),
            Buffer::Output if kept => Err(Fault::ReadOnly(chunk)),
            _ => Ok(()),
        }
    }

    /// The runs of a chunk, relative to its start.
    fn read(&self, rank: u32, chunk: Chunk) -> Result<Vec<Run>, Fault> {
        self.in_range(rank, chunk)?;
        let memory = &self.ranks[rank as usize].memory[index(chunk.buffer)];
        let runs = memory
            .read(chunk.offset..chunk.end())
            .map_err(|range| Fault::Undefined(Chunk::new(chunk.buffer, range)))?;
        let start = chunk.offset;
        Ok(runs
            .into_iter()
            .map(|(run, value)| {
                (
                    run.start - start..run.end - start,
                    value.moved(-i128::from(start)),
                )
            })
            .collect())
    }

    fn write(&mut self, rank: u32, step: usize, chunk: Chunk, runs: Vec<Run>) {
        let Play {
            ranks,
            channels,
            hazards,
            ..
        } = self;
        let state = &mut ranks[rank as usize];
        let clock = state.clock.clone();
        state.sent.retain(|sent| {
            if !sent.chunk.overlaps(&chunk) {
                return true;
            }
            let receipt = channels[&(rank, sent.to)].receipts.get(sent.number);
            if receipt.is_none_or(|&at| clock[sent.to as usize] <= at) {
                hazards.push(Hazard {
                    rank,
                    send: sent.step,
                    write: step,
                });
            }
            // What was overwritten once is not reported again, nor is what has arrived.
            false
        });
        state.memory[index(chunk.buffer)].write(chunk.offset..chunk.end(), runs);
    }

    fn conclude(mut self) -> Result<Report, VerifyError> {
        self.hazards
            .sort_unstable_by_key(|hazard| (hazard.rank, hazard.write, hazard.send));
        let mut roundings = 0;
        let mut bit_equal = true;
        // Fingerprints by element of the collective's input, to compare copies.
        let mut orders: BTreeMap<u64, (u64, u64)> = BTreeMap::new();
        for rank in 0..self.request.ranks {
            for want in self.wanted(rank) {
                let fail = |chunk, fault| Err(VerifyError::Result { rank, chunk, fault });
                let output = &self.ranks[rank as usize].memory[1];
                let runs = match output.read(want.range.clone()) {
                    Ok(runs) => runs,
                    Err(range) => {
                        let chunk = Chunk::new(Buffer::Output, range);
                        return fail(chunk, Fault::Undefined(chunk));
                    }
                };
                for (run, value) in runs {
                    let chunk = Chunk::new(Buffer::Output, run.clone());
                    let wrong = Fault::WrongElement {
                        rank: value.ranks.first(),
                        index: i128::from(run.start) + value.shift,
                        expected_rank: want.of.unwrap_or(value.ranks.first()),
                        expected_index: i128::from(run.start) + want.shift,
                    };
                    let right = want.of.is_none_or(|of| value.ranks.is_only(of));
                    if !right || value.shift != want.shift {
                        return fail(chunk, wrong);
                    }
                    if want.of.is_none() {
                        if let Some(missing) = value.ranks.missing(self.ranks.len()) {
                            return fail(chunk, Fault::Missing(missing));
                        }
                        if !value.finished {
                            return fail(chunk, Fault::Unfinished);
                        }
                        roundings = roundings.max(value.roundings);
                        let element = |at: u64| (i128::from(at) + value.shift) as u64;
                        bit_equal &= same_order(
                            &mut orders,
                            element(run.start)..element(run.end),
                            value.order,
                        );
                    }
                }
            }
            if matches!(self.request.kind, Kind::Barrier | Kind::MonitoredBarrier) {
                let clock = &self.ranks[rank as usize].clock;
                let early = (0..self.request.ranks)
                    .find(|&other| other != rank && clock[other as usize] == 0);
                if let Some(other) = early {
                    return Err(VerifyError::Barrier { rank, other });
                }
            }
        }
        let most = |of: fn(&Rank) -> u64| self.ranks.iter().map(of).max().unwrap_or(0);
        Ok(Report {
            messages: self.messages,
            sent: most(|rank| rank.sent_elements),
            received: most(|rank| rank.received_elements),
            rounds: most(|rank| u64::from(rank.depth)) as u32,
            roundings,
            bit_equal,
            hazards: self.hazards,
        })
    }

    /// What the output of `rank` must hold.
    fn wanted(&self, rank: u32) -> Vec<Want> {
        let request = self.request;
        let pieces = request.pieces();
        let whole = 0..request.len(Buffer::Output, rank);
        match request.kind {
            Kind::AllReduce => vec![Want {
                range: whole,
                of: None,
                shift: 0,
            }],
            Kind::Reduce if rank == request.root => vec![Want {
                range: whole,
                of: None,
                shift: 0,
            }],
            // It cannot be written to.
            Kind::Reduce => Vec::new(),
            Kind::ReduceScatter => {
                vec![Want {
                    range: whole,
                    of: None,
                    shift: pieces.offset(rank).into(),
                }]
            }
            Kind::Broadcast => vec![Want {
                range: whole,
                of: Some(request.root),
                shift: 0,
            }],
            Kind::Scatter => {
                vec![Want {
                    range: whole,
                    of: Some(request.root),
                    shift: pieces.offset(rank).into(),
                }]
            }
            Kind::AllGather | Kind::Gather if !whole.is_empty() => (0..request.ranks)
                .map(|from| Want {
                    range: pieces.range(from..from + 1),
                    of: Some(from),
                    shift: 0,
                })
                .collect(),
            Kind::AllToAll => (0..request.ranks)
                .map(|from| Want {
                    range: pieces.range(from..from + 1),
                    of: Some(from),
                    shift: i128::from(pieces.offset(rank)) - i128::from(pieces.offset(from)),
                })
                .collect(),
            _ => Vec::new(),
        }
    }
}

/// A range of a result: the reduction of all ranks, or the data of one.
struct Want {
    range: Range<u64>,
    of: Option<u32>,
    shift: i128,
}

enum Progress {
    Blocked,
    Local,
    Wakes(u32),
}

fn index(buffer: Buffer) -> usize {
    match buffer {
        Buffer::Input => 0,
        Buffer::Output => 1,
        Buffer::Scratch => 2,
    }
}

/// Notes in a clock that `rank` has done `step`.
fn set(clock: &mut Rc<[u32]>, rank: u32, step: usize) {
    Rc::make_mut(clock)[rank as usize] = step as u32 + 1;
}

/// Runs relative to zero, moved to start at `offset`.
fn place(runs: Vec<Run>, offset: u64) -> Vec<Run> {
    runs.into_iter()
        .map(|(run, value)| {
            (
                run.start + offset..run.end + offset,
                value.moved(offset.into()),
            )
        })
        .collect()
}

/// Reduces operands that cover the same positions.
fn combine(operands: &[Vec<Run>]) -> Result<Vec<Run>, Fault> {
    let [first, others @ ..] = operands else {
        return Err(Fault::NoOperand);
    };
    if others.is_empty() {
        return Ok(first.clone());
    }
    let mut cuts: Vec<u64> = operands
        .iter()
        .flatten()
        .flat_map(|(run, _)| [run.start, run.end])
        .collect();
    cuts.sort_unstable();
    cuts.dedup();
    let mut cursor = vec![0; operands.len()];
    let mut result = Vec::with_capacity(cuts.len());
    for cut in cuts.windows(2) {
        let mut values = Vec::with_capacity(operands.len());
        for (runs, cursor) in operands.iter().zip(&mut cursor) {
            while runs[*cursor].0.end <= cut[0] {
                *cursor += 1;
            }
            values.push(&runs[*cursor].1);
        }
        let mut total = Value {
            roundings: values.iter().map(|v| v.roundings).max().unwrap_or(0) + 1,
            ..values[0].clone()
        };
        for (number, value) in values.iter().enumerate() {
            if value.finished {
                return Err(Fault::Finished);
            }
            if value.shift != values[0].shift {
                let at = i128::from(cut[0]);
                return Err(Fault::Misaligned {
                    a: at + values[0].shift,
                    b: at + value.shift,
                });
            }
            if number > 0 {
                if let Some(rank) = total.ranks.common(&value.ranks) {
                    return Err(Fault::ReducedTwice(rank));
                }
                total.ranks = total.ranks.union(&value.ranks);
            }
        }
        // Two operands commute bit for bit; more are accumulated in their order.
        let mut orders: Vec<u64> = values.iter().map(|value| value.order).collect();
        if orders.len() == 2 {
            orders.sort_unstable();
        }
        total.order = orders.into_iter().fold(values.len() as u64, mix);
        result.push((cut[0]..cut[1], total));
    }
    Ok(result)
}

/// Records the order of a copy of `range`; false when an earlier copy has another.
fn same_order(orders: &mut BTreeMap<u64, (u64, u64)>, range: Range<u64>, order: u64) -> bool {
    let first = orders
        .range(..=range.start)
        .next_back()
        .map_or(range.start, |(&start, _)| start);
    let mut at = range.start;
    let mut gaps = Vec::new();
    let mut same = true;
    for (&start, &(end, held)) in orders.range(first..range.end) {
        if end <= at {
            continue;
        }
        if start > at {
            gaps.push(at..start);
        }
        same &= held == order;
        at = end;
    }
    if at < range.end {
        gaps.push(at..range.end);
    }
    for gap in gaps {
        orders.insert(gap.start, (gap.end, order));
    }
    same
}
