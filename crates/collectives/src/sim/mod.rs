//! A discrete simulator: plays plans over a network of links in virtual time.
//!
//! # Model
//! A rank runs its steps in order; sends take [`Compute::overhead`] of its time, receives
//! wait for the message, and work on memory takes [`Compute::seconds_per_byte`] for each byte of
//! an operand. A message waits at each link of its route until those that came there
//! before it have left, occupies it for its bytes over the link's bandwidth, and reaches the next
//! link after the latency, while its end is still on this one (cut-through). Buffers
//! have no limit. Everything is deterministic.

mod fabric;
mod network;

use std::collections::{BTreeMap, HashMap, VecDeque};

pub use fabric::FabricNetwork;
pub use network::{Group, Network, Switch, Unroutable};

use crate::algorithm::{self, Algorithm, PlanError};
use crate::schedule::{Request, Schedule, Step};

/// What a rank's own work costs. The default is nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Compute {
    /// Seconds of a rank's time for each message that it sends.
    pub overhead: f64,
    /// Seconds of a rank's time for each byte of an operand that it reduces or copies.
    pub seconds_per_byte: f64,
}

/// A simulation that cannot be done.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SimError {
    /// A plan cannot be made.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The network has no way for a message.
    #[error(transparent)]
    Unroutable(#[from] Unroutable),
    /// Ranks that the network does not have.
    #[error("ranks: network has {network}, program has {program}")]
    Ranks {
        /// Ranks of the network.
        network: u32,
        /// Ranks of the program.
        program: u32,
    },
    /// Steps that wait for messages that nobody sends.
    #[error("program {program}: rank {rank} waits for ever")]
    Stuck {
        /// Index of the program.
        program: usize,
        /// The first rank that waits.
        rank: u32,
    },
}

/// What happened.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// Seconds until the last rank was done.
    pub seconds: f64,
    /// Messages sent.
    pub messages: u64,
    /// Bytes sent, each counted once however many links it crossed.
    pub bytes: f64,
    /// Seconds for which each link was busy.
    pub busy: Vec<f64>,
}

impl Outcome {
    /// The part of the time for which the busiest link was busy, from 0 to 1.
    pub fn utilisation(&self) -> f64 {
        let most = self.busy.iter().copied().fold(0.0, f64::max);
        if self.seconds > 0.0 {
            most / self.seconds
        } else {
            0.0
        }
    }
}

/// Collects programs and plays them together.
///
/// A program is the plan of one collective. Programs share the links but do not wait for one
/// another: the colours of a multi-colour algorithm, or several groups at once. Only the
/// peers and sizes of messages are kept, and one rank is planned at a time.
///
/// ```
/// use tpu_dist_collectives::Kind;
/// use tpu_dist_collectives::algorithm::Ring;
/// use tpu_dist_collectives::schedule::Request;
/// use tpu_dist_collectives::sim::{Simulation, Switch};
///
/// let network = Switch { ranks: 8, bandwidth: 10e9, latency: 10e-6 };
/// let request = Request {
///     kind: Kind::AllReduce,
///     ranks: 8,
///     root: 0,
///     counts: vec![1 << 20],
///     element_size: 4,
///     max_message: 1 << 20,
/// };
/// let mut simulation = Simulation::new(&network);
/// simulation.add(&Ring::new(), &request)?;
/// let seconds = simulation.run()?.seconds;
/// // 14 rounds of 10 us and half a MiB.
/// assert!((seconds / (14.0 * (10e-6 + 524288.0 / 10e9)) - 1.0).abs() < 1e-9);
/// # Ok::<(), tpu_dist_collectives::sim::SimError>(())
/// ```
pub struct Simulation<'a> {
    network: &'a dyn Network,
    compute: Compute,
    /// The operations of all actors, one after the other, and where each actor's start and
    /// the last one's end. An actor is a rank in a program.
    ops: Vec<Op>,
    starts: Vec<usize>,
    /// How many actors there are up to the end of each program.
    programs: Vec<u32>,
    channels: Vec<Channel>,
    /// Of all channels, those after the first.
    links: Vec<u32>,
}

/// The way from one actor to another of its program.
#[derive(Clone, Copy)]
struct Channel {
    receiver: u32,
    /// The first link; the others are in `links` from `others` on.
    first: u32,
    others: u32,
    hops: u32,
    startup: f64,
}

/// What an actor does, in eight bytes: what is played lives in memory by the million, and
/// is waited for. Sizes are rounded to 24 bits.
#[derive(Clone, Copy, PartialEq)]
struct Op {
    /// [`SEND`], [`RECEIVE`] or [`WORK`] and the channel; or [`REPEAT`] and how many operations
    /// before this one are done again.
    code: u32,
    /// Sent, or worked on. For a repetition, how often it is done in all, as bits.
    bytes: f32,
}

const SEND: u32 = 0;
const RECEIVE: u32 = 1 << 30;
const WORK: u32 = 2 << 30;
const REPEAT: u32 = 3 << 30;
const CHANNEL: u32 = (1 << 30) - 1;

/// Appends the operations of an actor; what an actor of a ring does again and again, once.
fn compress(actor: &[Op], ops: &mut Vec<Op>) {
    let mut rest = actor;
    'next: while !rest.is_empty() {
        for period in [2, 4] {
            let Some((body, after)) = rest.split_at_checked(period) else {
                break;
            };
            let again = after
                .chunks_exact(period)
                .take_while(|&chunk| chunk == body)
                .count();
            if again > 0 {
                ops.extend_from_slice(body);
                ops.push(Op {
                    code: REPEAT | period as u32,
                    bytes: f32::from_bits(again as u32 + 1),
                });
                rest = &after[again * period..];
                continue 'next;
            }
        }
        ops.push(rest[0]);
        rest = &rest[1..];
    }
}

impl<'a> Simulation<'a> {
    /// Nothing to play yet.
    pub fn new(network: &'a dyn Network) -> Simulation<'a> {
        Simulation {
            network,
            compute: Compute::default(),
            ops: Vec::new(),
            starts: vec![0],
            programs: Vec::new(),
            channels: Vec::new(),
            links: Vec::new(),
        }
    }

    /// Sets what a rank's own work costs.
    pub fn compute(mut self, compute: Compute) -> Simulation<'a> {
        self.compute = compute;
        self
    }

    /// Adds what `algorithm` plans.
    ///
    /// # Errors
    /// For a request that cannot be planned, ranks that the network lacks or cannot join.
    pub fn add(&mut self, algorithm: &dyn Algorithm, request: &Request) -> Result<(), SimError> {
        algorithm::check(algorithm, request)?;
        self.program(request, |rank| algorithm.steps(request, rank).steps)
    }

    /// Adds a schedule.
    ///
    /// # Errors
    /// For ranks that the network lacks or cannot join.
    pub fn add_schedule(&mut self, request: &Request, schedule: &Schedule) -> Result<(), SimError> {
        self.program(request, |rank| {
            schedule
                .steps
                .get(rank as usize)
                .cloned()
                .unwrap_or_default()
        })
    }

    fn program(
        &mut self,
        request: &Request,
        steps: impl Fn(u32) -> Vec<Step>,
    ) -> Result<(), SimError> {
        let (network, program) = (self.network.ranks(), request.ranks);
        if program > network {
            return Err(SimError::Ranks { network, program });
        }
        let element = f64::from(request.element_size);
        let size = |count: u64| count as f64 * element;
        let receivers = self.programs.last().copied().unwrap_or(0);
        let mut pairs = Pairs::default();
        let mut actor = Vec::new();
        for rank in 0..program {
            actor.clear();
            for step in steps(rank) {
                let mut channel = |from, to| {
                    pairs.find(from, to, || {
                        let start = self.links.len();
                        self.network.route(from, to, &mut self.links)?;
                        let hops = (self.links.len() - start) as u32;
                        // Most routes have one link, which is then at hand.
                        let first = if hops > 0 {
                            self.links.remove(start)
                        } else {
                            0
                        };
                        let startup = self.network.startup(from, to);
                        let (receiver, others) = (receivers + to, start as u32);
                        self.channels.push(Channel {
                            receiver,
                            first,
                            others,
                            hops,
                            startup,
                        });
                        let channel = self.channels.len() as u32 - 1;
                        assert!(channel < CHANNEL, "so many channels fit into no memory");
                        Ok(channel)
                    })
                };
                let (code, bytes) = match step {
                    Step::Send { to, chunk } => (SEND | channel(rank, to)?, size(chunk.count)),
                    Step::Recv { from, .. } => (RECEIVE | channel(from, rank)?, 0.0),
                    Step::RecvReduce { from, chunk } => {
                        (RECEIVE | channel(from, rank)?, size(chunk.count))
                    }
                    Step::Reduce { dst, sources } => {
                        let operands = sources.len().saturating_sub(1).max(1) as f64;
                        (WORK, size(dst.count) * operands)
                    }
                    Step::Copy { dst, .. } => (WORK, size(dst.count)),
                    Step::Finish { .. } => continue,
                };
                let bytes = bytes as f32;
                actor.push(Op { code, bytes });
            }
            compress(&actor, &mut self.ops);
            self.starts.push(self.ops.len());
        }
        self.programs.push(receivers + program);
        Ok(())
    }

    /// Plays all programs from time zero.
    ///
    /// # Errors
    /// Where a rank waits for what nobody sends: never for a schedule that is verified.
    pub fn run(&self) -> Result<Outcome, SimError> {
        Player::new(self).run()
    }
}

/// The channels of a program by their ends, while it is read.
#[derive(Default)]
struct Pairs {
    all: HashMap<(u32, u32), u32>,
    recent: Vec<((u32, u32), u32)>,
}

/// Pairs that are looked for one by one before all are.
const RECENT: usize = 16;

impl Pairs {
    fn find(
        &mut self,
        from: u32,
        to: u32,
        new: impl FnOnce() -> Result<u32, Unroutable>,
    ) -> Result<u32, Unroutable> {
        let pair = (from, to);
        // A rank meets few others, again and again.
        if let Some(&(_, channel)) = self.recent.iter().find(|(recent, _)| *recent == pair) {
            return Ok(channel);
        }
        let channel = match self.all.get(&pair) {
            Some(&channel) => channel,
            None => {
                let channel = new()?;
                self.all.insert(pair, channel);
                channel
            }
        };
        if self.recent.len() == RECENT {
            self.recent.clear();
        }
        self.recent.push((pair, channel));
        Ok(channel)
    }
}

/// A message on the way, at the link with this index of its route.
#[derive(Clone, Copy)]
struct Flight {
    channel: u32,
    hop: u32,
    bytes: f64,
    /// When its end has left the link before.
    tail: f64,
}

#[derive(Clone, Copy)]
enum Event {
    /// An actor goes on.
    Actor(u32),
    /// The head of a flight comes to its next link.
    Hop(u32),
}

/// When the messages came that were not received yet.
struct Arrivals {
    /// Of the first of them; later than all times without one.
    first: f64,
    #[expect(
        clippy::box_collection,
        reason = "there are millions of these, nearly all without"
    )]
    others: Option<Box<VecDeque<f64>>>,
    /// Whether the receiver waits.
    awaited: bool,
}

impl Arrivals {
    const NONE: Arrivals = Arrivals {
        first: f64::INFINITY,
        others: None,
        awaited: false,
    };

    fn push(&mut self, time: f64) {
        if self.first == f64::INFINITY {
            self.first = time;
            return;
        }
        // Messages of a pair are received in the order in which they were sent.
        let others = self.others.get_or_insert_default();
        let last = others.back().copied().unwrap_or(self.first);
        others.push_back(time.max(last));
    }

    fn pop(&mut self) -> Option<f64> {
        if self.first == f64::INFINITY {
            return None;
        }
        let next = self.others.as_mut().and_then(|others| others.pop_front());
        Some(std::mem::replace(
            &mut self.first,
            next.unwrap_or(f64::INFINITY),
        ))
    }
}

#[derive(Clone, Copy)]
struct Actor {
    /// Its next operation, and after the last.
    next: usize,
    end: usize,
    /// How often the repetition that it is in is still to be done; 0 outside of one.
    repeats: u32,
    /// When it was last known to be.
    now: f64,
}

/// A channel and what came through it, in one cache line.
#[repr(align(64))]
struct Pipe {
    channel: Channel,
    arrivals: Arrivals,
}

#[derive(Clone, Copy)]
struct Link {
    bandwidth: f64,
    latency: f64,
    /// When the last message has left it.
    free: f64,
    busy: f64,
}

/// Events that are prepared together.
const BATCH: usize = 32;

struct Player<'a> {
    simulation: &'a Simulation<'a>,
    actors: Vec<Actor>,
    /// By channel.
    pipes: Vec<Pipe>,
    flights: Vec<Flight>,
    free_flights: Vec<u32>,
    links: Vec<Link>,
    messages: u64,
    bytes: f64,
    /// Events by the nanosecond in which they happen; of those in one, the first made comes
    /// first. Most happen together, so that there are few entries.
    events: BTreeMap<u64, Vec<(f64, Event)>>,
    /// Empty lists to use again.
    spare: Vec<Vec<(f64, Event)>>,
}

impl<'a> Player<'a> {
    fn new(simulation: &'a Simulation<'a>) -> Player<'a> {
        let Simulation {
            network,
            starts,
            channels,
            ..
        } = simulation;
        let link = |link| Link {
            bandwidth: network.bandwidth(link),
            latency: network.latency(link),
            free: 0.0,
            busy: 0.0,
        };
        let actors = starts.len() as u32 - 1;
        let mut player = Player {
            simulation,
            actors: starts
                .iter()
                .zip(&starts[1..])
                .map(|(&next, &end)| Actor {
                    next,
                    end,
                    repeats: 0,
                    now: 0.0,
                })
                .collect(),
            pipes: channels
                .iter()
                .map(|&channel| Pipe {
                    channel,
                    arrivals: Arrivals::NONE,
                })
                .collect(),
            flights: Vec::new(),
            free_flights: Vec::new(),
            links: (0..network.links()).map(link).collect(),
            messages: 0,
            bytes: 0.0,
            events: BTreeMap::new(),
            spare: Vec::new(),
        };
        for actor in 0..actors {
            player.at(0.0, Event::Actor(actor));
        }
        player
    }

    fn at(&mut self, time: f64, event: Event) {
        let events = self.events.entry((time * 1e9) as u64);
        events
            .or_insert_with(|| self.spare.pop().unwrap_or_default())
            .push((time, event));
    }

    fn run(mut self) -> Result<Outcome, SimError> {
        while let Some((_, mut events)) = self.events.pop_first() {
            for batch in events.chunks(BATCH) {
                self.touch(batch);
                for &(time, event) in batch {
                    match event {
                        Event::Actor(actor) => self.go_on(time, actor),
                        Event::Hop(flight) => {
                            self.free_flights.push(flight);
                            self.hop(time, self.flights[flight as usize]);
                        }
                    }
                }
            }
            events.clear();
            self.spare.push(events);
        }
        let programs = &self.simulation.programs;
        let waits = |actor: &Actor| actor.next < actor.end;
        if let Some(stuck) = self.actors.iter().position(waits) {
            let program = programs.partition_point(|&end| end as usize <= stuck);
            let first = if program == 0 {
                0
            } else {
                programs[program - 1]
            };
            return Err(SimError::Stuck {
                program,
                rank: stuck as u32 - first,
            });
        }
        Ok(Outcome {
            seconds: self
                .actors
                .iter()
                .map(|actor| actor.now)
                .fold(0.0, f64::max),
            messages: self.messages,
            bytes: self.bytes,
            busy: self.links.iter().map(|link| link.busy).collect(),
        })
    }

    /// Reads what events will need, all of one kind at a time: memory then works on many reads at
    /// once, where the events one by one would wait for each.
    fn touch(&self, batch: &[(f64, Event)]) {
        let ops = &self.simulation.ops;
        let mut next = [0; BATCH];
        for (next, (_, event)) in next.iter_mut().zip(batch) {
            if let Event::Actor(actor) = event {
                *next = self.actors[*actor as usize].next;
            }
        }
        let mut channels = [[0; 2]; BATCH];
        for (channels, &next) in channels.iter_mut().zip(&next) {
            // In a repetition the operation after this one is that before.
            *channels = [next, next.saturating_sub(1)]
                .map(|at| ops.get(at).map_or(0, |op| (op.code & CHANNEL) as usize));
        }
        let mut ends = [(0, 0); 2 * BATCH];
        for (end, &channel) in ends.iter_mut().zip(channels.as_flattened()) {
            if let Some(pipe) = self.pipes.get(channel) {
                *end = (pipe.channel.first as usize, pipe.channel.receiver as usize);
            }
        }
        let mut seen = 0.0;
        for (link, receiver) in ends {
            seen += self.links.get(link).map_or(0.0, |link| link.free) + self.actors[receiver].now;
        }
        std::hint::black_box(seen);
    }

    /// Runs an actor until it has to wait.
    fn go_on(&mut self, mut time: f64, number: u32) {
        let Simulation { ops, compute, .. } = self.simulation;
        let mut actor = self.actors[number as usize];
        while actor.next < actor.end {
            let Op { code, bytes } = ops[actor.next];
            let channel = code & CHANNEL;
            if code & !CHANNEL == REPEAT {
                if actor.repeats == 0 {
                    actor.repeats = bytes.to_bits();
                }
                actor.repeats -= 1;
                match actor.repeats {
                    0 => actor.next += 1,
                    _ => actor.next -= channel as usize,
                }
                continue;
            }
            let bytes = f64::from(bytes);
            let done = match code & !CHANNEL {
                SEND => {
                    let leaves = time + compute.overhead;
                    self.messages += 1;
                    self.bytes += bytes;
                    self.hop(
                        leaves,
                        Flight {
                            channel,
                            hop: 0,
                            bytes,
                            tail: 0.0,
                        },
                    );
                    leaves
                }
                RECEIVE => {
                    let arrivals = &mut self.pipes[channel as usize].arrivals;
                    let Some(arrival) = arrivals.pop() else {
                        arrivals.awaited = true;
                        break;
                    };
                    time.max(arrival) + bytes * compute.seconds_per_byte
                }
                _ => time + bytes * compute.seconds_per_byte,
            };
            actor.next += 1;
            let later = done > time;
            time = done;
            if later && actor.next < actor.end {
                // Others act before.
                self.at(done, Event::Actor(number));
                break;
            }
        }
        actor.now = time;
        self.actors[number as usize] = actor;
    }

    /// Puts a message on the next link of its route.
    fn hop(&mut self, time: f64, mut flight: Flight) {
        let links = &self.simulation.links;
        let channel = self.pipes[flight.channel as usize].channel;
        if channel.hops == 0 {
            return self.arrive(time + channel.startup, flight.channel);
        }
        let link = match flight.hop {
            0 => channel.first,
            hop => links[(channel.others + hop - 1) as usize],
        };
        let link = &mut self.links[link as usize];
        let start = time.max(link.free);
        let seconds = flight.bytes / link.bandwidth;
        link.free = start + seconds;
        link.busy += seconds;
        // The start-up is between the first link and what follows.
        let latency = link.latency
            + if flight.hop == 0 {
                channel.startup
            } else {
                0.0
            };
        flight.tail = link.free.max(flight.tail) + latency;
        flight.hop += 1;
        if flight.hop == channel.hops {
            return self.arrive(flight.tail, flight.channel);
        }
        let number = match self.free_flights.pop() {
            Some(number) => {
                self.flights[number as usize] = flight;
                number
            }
            None => {
                self.flights.push(flight);
                self.flights.len() as u32 - 1
            }
        };
        self.at(start + latency, Event::Hop(number));
    }

    fn arrive(&mut self, time: f64, channel: u32) {
        let Pipe { channel, arrivals } = &mut self.pipes[channel as usize];
        arrivals.push(time);
        if std::mem::take(&mut arrivals.awaited) {
            let receiver = channel.receiver;
            let now = self.actors[receiver as usize].now;
            self.at(now.max(time), Event::Actor(receiver));
        }
    }
}
