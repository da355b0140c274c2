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

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::hash::{BuildHasherDefault, DefaultHasher};

pub use fabric::FabricNetwork;
pub use network::{Network, Switch, Unroutable};

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
    programs: Vec<Program>,
    routes: Routes,
}

type FastMap<K, V> = HashMap<K, V, BuildHasherDefault<DefaultHasher>>;

/// The routes of all pairs that meet, one after the other.
#[derive(Default)]
struct Routes {
    links: Vec<u32>,
    of: Vec<Route>,
    by_pair: FastMap<(u32, u32), u32>,
}

#[derive(Clone, Copy)]
struct Route {
    start: u32,
    end: u32,
    startup: f64,
}

#[derive(Clone, Copy)]
enum Op {
    Send { channel: u32, bytes: f64 },
    Recv { channel: u32, reduced: f64 },
    Work { bytes: f64 },
}

struct Program {
    /// The operations of all ranks, one after the other, and where each rank's start.
    ops: Vec<Op>,
    starts: Vec<usize>,
    /// For each ordered pair of ranks that meet: its route, and who receives.
    channels: Vec<u32>,
    receivers: Vec<u32>,
}

impl<'a> Simulation<'a> {
    /// Nothing to play yet.
    pub fn new(network: &'a dyn Network) -> Simulation<'a> {
        Simulation {
            network,
            compute: Compute::default(),
            programs: Vec::new(),
            routes: Routes::default(),
        }
    }

    /// Sets what a rank's own work costs.
    pub fn compute(mut self, compute: Compute) -> Simulation<'a> {
        self.compute = compute;
        self
    }

    /// Adds what `algorithm` plans.
    pub fn add(&mut self, algorithm: &dyn Algorithm, request: &Request) -> Result<(), SimError> {
        algorithm::check(algorithm, request)?;
        self.program(request, |rank| algorithm.steps(request, rank).steps)
    }

    /// Adds a schedule.
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
        let mut ops = Vec::new();
        let mut starts = Vec::with_capacity(program as usize + 1);
        let mut channels = Channels::default();
        for rank in 0..program {
            starts.push(ops.len());
            for step in steps(rank) {
                ops.push(match step {
                    Step::Send { to, chunk } => Op::Send {
                        channel: channels.of(rank, to, &mut self.routes, self.network)?,
                        bytes: size(chunk.count),
                    },
                    Step::Recv { from, .. } => Op::Recv {
                        channel: channels.of(from, rank, &mut self.routes, self.network)?,
                        reduced: 0.0,
                    },
                    Step::RecvReduce { from, chunk } => Op::Recv {
                        channel: channels.of(from, rank, &mut self.routes, self.network)?,
                        reduced: size(chunk.count),
                    },
                    Step::Reduce { dst, sources } => {
                        let operands = sources.len().saturating_sub(1).max(1) as f64;
                        Op::Work {
                            bytes: size(dst.count) * operands,
                        }
                    }
                    Step::Copy { dst, .. } => Op::Work {
                        bytes: size(dst.count),
                    },
                    Step::Finish { .. } => continue,
                });
            }
        }
        starts.push(ops.len());
        ops.shrink_to_fit();
        self.programs.push(Program {
            ops,
            starts,
            channels: channels.routes,
            receivers: channels.receivers,
        });
        Ok(())
    }

    /// Plays all programs from time zero.
    pub fn run(&self) -> Result<Outcome, SimError> {
        Player::new(self).run()
    }
}

/// The channels of a program while it is read.
#[derive(Default)]
struct Channels {
    by_pair: FastMap<(u32, u32), u32>,
    routes: Vec<u32>,
    receivers: Vec<u32>,
}

impl Channels {
    fn of(
        &mut self,
        from: u32,
        to: u32,
        routes: &mut Routes,
        network: &dyn Network,
    ) -> Result<u32, SimError> {
        if let Some(&channel) = self.by_pair.get(&(from, to)) {
            return Ok(channel);
        }
        let route = match routes.by_pair.get(&(from, to)) {
            Some(&route) => route,
            None => {
                let start = routes.links.len() as u32;
                network.route(from, to, &mut routes.links)?;
                let end = routes.links.len() as u32;
                let number = routes.of.len() as u32;
                routes.of.push(Route {
                    start,
                    end,
                    startup: network.startup(from, to),
                });
                routes.by_pair.insert((from, to), number);
                number
            }
        };
        let channel = self.routes.len() as u32;
        self.routes.push(route);
        self.receivers.push(to);
        self.by_pair.insert((from, to), channel);
        Ok(channel)
    }
}

/// Seconds as a key: times are never negative, so their bits have their order.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Instant(u64);

impl Instant {
    fn new(seconds: f64) -> Instant {
        Instant(seconds.to_bits())
    }

    fn seconds(self) -> f64 {
        f64::from_bits(self.0)
    }
}

/// A message on the way, at the link with this index of its route.
struct Flight {
    program: u32,
    channel: u32,
    hop: u32,
    bytes: f64,
    /// When its end has left the link before.
    tail: f64,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// A rank goes on.
    Rank { program: u32, rank: u32 },
    /// The head of a flight comes to its next link.
    Hop { flight: u32 },
}

struct ChannelState {
    arrived: VecDeque<f64>,
    /// The rank that waits here.
    waiting: bool,
}

struct Player<'a> {
    simulation: &'a Simulation<'a>,
    /// By program and rank: the next operation.
    next: Vec<Vec<usize>>,
    /// When each rank was last known to be.
    now: Vec<Vec<f64>>,
    channels: Vec<Vec<ChannelState>>,
    flights: Vec<Flight>,
    free_flights: Vec<u32>,
    /// When each link is free.
    free: Vec<f64>,
    outcome: Outcome,
    /// Events of equal times come in the order in which they were made.
    events: BinaryHeap<Reverse<(Instant, u64, Event)>>,
    made: u64,
    bandwidth: Vec<f64>,
    latency: Vec<f64>,
}

impl<'a> Player<'a> {
    fn new(simulation: &'a Simulation<'a>) -> Player<'a> {
        let links = simulation.network.links();
        let of_ranks = |program: &Program| program.starts[..program.starts.len() - 1].to_vec();
        let mut player = Player {
            simulation,
            next: simulation.programs.iter().map(of_ranks).collect(),
            now: simulation
                .programs
                .iter()
                .map(|p| vec![0.0; p.starts.len() - 1])
                .collect(),
            channels: simulation
                .programs
                .iter()
                .map(|program| {
                    let idle = || ChannelState {
                        arrived: VecDeque::new(),
                        waiting: false,
                    };
                    program.channels.iter().map(|_| idle()).collect()
                })
                .collect(),
            flights: Vec::new(),
            free_flights: Vec::new(),
            free: vec![0.0; links],
            outcome: Outcome {
                seconds: 0.0,
                messages: 0,
                bytes: 0.0,
                busy: vec![0.0; links],
            },
            events: BinaryHeap::new(),
            made: 0,
            bandwidth: (0..links)
                .map(|link| simulation.network.bandwidth(link))
                .collect(),
            latency: (0..links)
                .map(|link| simulation.network.latency(link))
                .collect(),
        };
        for (program, ranks) in player.next.clone().iter().enumerate() {
            for rank in 0..ranks.len() {
                player.at(
                    0.0,
                    Event::Rank {
                        program: program as u32,
                        rank: rank as u32,
                    },
                );
            }
        }
        player
    }

    fn at(&mut self, time: f64, event: Event) {
        self.made += 1;
        self.events
            .push(Reverse((Instant::new(time), self.made, event)));
    }

    fn run(mut self) -> Result<Outcome, SimError> {
        while let Some(Reverse((time, _, event))) = self.events.pop() {
            match event {
                Event::Rank { program, rank } => self.rank(time.seconds(), program, rank),
                Event::Hop { flight } => {
                    let Flight {
                        program,
                        channel,
                        hop,
                        bytes,
                        tail,
                    } = self.flights[flight as usize];
                    self.free_flights.push(flight);
                    self.hop(
                        time.seconds(),
                        Flight {
                            program,
                            channel,
                            hop,
                            bytes,
                            tail,
                        },
                    );
                }
            }
        }
        for (program, next) in self.next.iter().enumerate() {
            let starts = &self.simulation.programs[program].starts;
            if let Some(rank) = (0..next.len()).find(|&rank| next[rank] < starts[rank + 1]) {
                return Err(SimError::Stuck {
                    program,
                    rank: rank as u32,
                });
            }
        }
        let finished = self.now.iter().flatten().copied().fold(0.0, f64::max);
        self.outcome.seconds = finished;
        Ok(self.outcome)
    }

    /// Runs a rank until it has to wait.
    fn rank(&mut self, mut time: f64, program: u32, rank: u32) {
        let simulation = self.simulation;
        let Program { ops, starts, .. } = &simulation.programs[program as usize];
        let compute = simulation.compute;
        let end = starts[rank as usize + 1];
        let mut next = self.next[program as usize][rank as usize];
        while next < end {
            // When the rank is at the next operation, and whether that is now.
            let done = match ops[next] {
                Op::Send { channel, bytes } => {
                    let leaves = time + compute.overhead;
                    self.send(leaves, program, channel, bytes);
                    leaves
                }
                Op::Recv { channel, reduced } => {
                    let state = &mut self.channels[program as usize][channel as usize];
                    let Some(arrival) = state.arrived.pop_front() else {
                        state.waiting = true;
                        break;
                    };
                    time.max(arrival) + reduced * compute.seconds_per_byte
                }
                Op::Work { bytes } => time + bytes * compute.seconds_per_byte,
            };
            next += 1;
            if done > time && next < end {
                // Others act before.
                self.at(done, Event::Rank { program, rank });
                time = done;
                break;
            }
            time = done;
        }
        self.next[program as usize][rank as usize] = next;
        self.now[program as usize][rank as usize] = time;
    }

    fn send(&mut self, time: f64, program: u32, channel: u32, bytes: f64) {
        self.outcome.messages += 1;
        self.outcome.bytes += bytes;
        self.hop(
            time,
            Flight {
                program,
                channel,
                hop: 0,
                bytes,
                tail: 0.0,
            },
        );
    }

    /// Puts a message on the next link of its route.
    fn hop(&mut self, time: f64, mut flight: Flight) {
        let simulation = self.simulation;
        let program = &simulation.programs[flight.program as usize];
        let route = simulation.routes.of[program.channels[flight.channel as usize] as usize];
        let links = &simulation.routes.links[route.start as usize..route.end as usize];
        let Some(&link) = links.get(flight.hop as usize) else {
            // A route without links.
            return self.arrive(time + route.startup, &flight);
        };
        let link = link as usize;
        let start = time.max(self.free[link]);
        let seconds = flight.bytes / self.bandwidth[link];
        self.free[link] = start + seconds;
        self.outcome.busy[link] += seconds;
        // The start-up is between the first link and what follows.
        let latency = self.latency[link] + if flight.hop == 0 { route.startup } else { 0.0 };
        flight.tail = (start + seconds).max(flight.tail) + latency;
        flight.hop += 1;
        if flight.hop as usize == links.len() {
            return self.arrive(flight.tail, &flight);
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
        self.at(start + latency, Event::Hop { flight: number });
    }

    fn arrive(&mut self, time: f64, flight: &Flight) {
        let state = &mut self.channels[flight.program as usize][flight.channel as usize];
        // Messages of a pair are received in the order in which they were sent.
        let time = state
            .arrived
            .back()
            .map_or(time, |&before| time.max(before));
        state.arrived.push_back(time);
        if !std::mem::take(&mut state.waiting) {
            return;
        }
        let program = &self.simulation.programs[flight.program as usize];
        let rank = program.receivers[flight.channel as usize];
        let now = self.now[flight.program as usize][rank as usize];
        self.at(
            now.max(time),
            Event::Rank {
                program: flight.program,
                rank,
            },
        );
    }
}
