//! One group of ranks.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use foldhash::HashMap;
use tpu_dist_collectives::algorithm::Transport;
use tpu_dist_collectives::estimate::Estimator;
use tpu_dist_collectives::{Kind, Signature};

use crate::call::{Call, MessageCall, Pieces, Segment};
use crate::check::{check, check_peer};
use crate::config::Config;
use crate::deferred::Deferred;
use crate::device::Members;
use crate::engine::local::{self, Local};
use crate::engine::net::Net;
use crate::engine::{Failure, Job};
use crate::fabric::{Fabric, Member, Peer, hash, is_forked, words};
use crate::link::{Key, Link, LinkError, Mode, Transfer};
use crate::operation::{Completion, Entry, Message, Operation};
use crate::progress::{Background, Interrupted, Step, Work, is_crowded, wait};
use crate::stats::{SAMPLED_BYTES, Stat, Stats};
use crate::transport::region::group_key;
use crate::wire::{Class, Control};
use crate::world::World;
use crate::{Error, Store};

/// How long after a rank has left in good order an operation that it keeps waiting is
/// given up: what it sent before may still be on its way.
pub(crate) const LEAVE_GRACE: Duration = Duration::from_millis(300);
/// How long ranks are given to say which collective they have entered.
const PROBE: Duration = Duration::from_millis(200);
/// From this size on, an asynchronous collective wakes the background thread at once.
const URGENT_BYTES: usize = 64 << 10;
/// How often a thread looks for its peers before it begins to wait: about a microsecond.
const LOOKS: usize = 100;
/// Collectives that may wait for their turn before their callers are slowed down.
const BACKLOG: usize = 1000;

/// Who a group is.
#[derive(Clone, Debug)]
pub struct GroupSpec {
    /// Equal on all members, and used by no other group of the job at the time.
    pub id: String,
    /// For messages.
    pub name: String,
    /// Own rank in the group.
    pub rank: u32,
    /// Number of ranks, at least 1.
    pub size: u32,
    /// The global rank of each rank of the group.
    pub global_ranks: Vec<u32>,
    /// Whether this is the job's default group, of which subgroups are made.
    pub default: bool,
    /// Timeout of operations that name none.
    pub timeout: Duration,
}

impl GroupSpec {
    fn check(&self) -> Result<(), Error> {
        let invalid = |argument, message| {
            Err(Error::InvalidArgument {
                operation: "create group",
                argument,
                message,
            })
        };
        if self.size == 0 || self.rank >= self.size {
            return invalid(
                "rank",
                format!("expected below size {}, got {}", self.size, self.rank),
            );
        }
        if self.global_ranks.len() != self.size as usize {
            return invalid(
                "global_ranks",
                format!(
                    "expected {} ranks, got {}",
                    self.size,
                    self.global_ranks.len()
                ),
            );
        }
        Ok(())
    }
}

enum Engine {
    Local(Local),
    Net(Net),
}

impl Engine {
    async fn run(&self, job: &Job, sequence: u64) -> Result<(), Failure> {
        match self {
            Engine::Local(local) => local.run(job, sequence).await,
            Engine::Net(net) => net.run(job, sequence).await,
        }
    }
}

type Running = Pin<Box<dyn Future<Output = Result<(), Failure>> + Send>>;

/// The collectives of a group, one at a time, in order.
#[derive(Default)]
struct Lane {
    /// A thread runs one at this moment.
    running: bool,
    /// The first one, once begun.
    begun: Option<(Arc<Operation>, Running)>,
    queue: VecDeque<(Arc<Operation>, Job)>,
}

impl Lane {
    fn is_empty(&self) -> bool {
        self.begun.is_none() && self.queue.is_empty()
    }

    fn first(&self) -> Option<&Arc<Operation>> {
        let begun = self.begun.as_ref().map(|(operation, _)| operation);
        begun.or_else(|| self.queue.front().map(|(operation, _)| operation))
    }
}

/// A message whose memory is not known yet, or that follows one.
struct WaitingMessage {
    id: u64,
    operation: Arc<Operation>,
    data: Segment,
    memory: Option<Arc<Deferred>>,
}

impl WaitingMessage {
    /// Its data, once that is known.
    fn data(&self) -> Option<Result<Segment, String>> {
        let Some(memory) = &self.memory else {
            return Some(Ok(self.data));
        };
        let blocks = memory.get()?;
        Some(
            blocks
                .map_err(str::to_owned)
                .and_then(|blocks| self.data.resolve(blocks)),
        )
    }
}

/// What operations share; they keep it alive.
pub(crate) struct Group {
    this: Weak<Group>,
    pub(crate) spec: GroupSpec,
    pub(crate) key: u64,
    pub(crate) fabric: Arc<Fabric>,
    world: Arc<World>,
    peers: Vec<Option<Arc<Peer>>>,
    engine: Engine,
    pub(crate) crowded: bool,
    timeout: AtomicU64,
    lane: Mutex<Lane>,
    /// Collectives begun; the number of the last one.
    sequence: AtomicU64,
    pending: Mutex<HashMap<u64, Arc<Operation>>>,
    last_message: AtomicU64,
    /// Messages begin in the order of their calls.
    waiting: Mutex<VecDeque<WaitingMessage>>,
    pub(crate) failure: OnceLock<Error>,
    left: Mutex<Vec<(u32, String, Instant)>>,
    has_left: AtomicBool,
    shut_down: AtomicBool,
    stats: Stats,
    children: Mutex<Vec<Weak<Group>>>,
    /// Where the ranks' devices are, once that was asked.
    members: OnceLock<Arc<Members>>,
}

/// A group of ranks: collectives and messages among them.
///
/// Collectives run in the order in which they are started, on every rank the same.
/// Messages match first in, first out by (source, tag), and wait for nothing else.
/// All methods may be called from several threads.
pub struct Communicator {
    group: Arc<Group>,
}

impl Communicator {
    /// Creates a group together with its other members, whom it finds through `store`, or
    /// without a word when they are part of the default group.
    ///
    /// # Errors
    /// [`Error::Timeout`] names the ranks that did not join in time.
    pub fn create(spec: GroupSpec, store: Arc<dyn Store>) -> Result<Arc<Communicator>, Error> {
        spec.check()?;
        refuse_fork("create group")?;
        let fabric = Fabric::get()?;
        let known = if spec.default {
            None
        } else {
            World::current(&spec.global_ranks)
        };
        let world = match known {
            Some(world) => world,
            None => Arc::new(World::meet(&fabric, &spec, store.as_ref())?),
        };
        if spec.default {
            world.make_current();
        }
        Group::start(fabric, world, spec)
    }

    /// Creates a group of members of this one, without a word between them. Aborting this
    /// group aborts it too.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when a global rank is not a member of this group's world.
    pub fn split(&self, spec: GroupSpec) -> Result<Arc<Communicator>, Error> {
        spec.check()?;
        self.group.check_usable("split")?;
        for rank in &spec.global_ranks {
            if !self.group.spec.global_ranks.contains(rank) {
                return Err(Error::InvalidArgument {
                    operation: "split",
                    argument: "global_ranks",
                    message: format!(
                        "expected members of group '{}' ({:?}), got {rank}",
                        self.group.spec.name, self.group.spec.global_ranks
                    ),
                });
            }
        }
        let child = Group::start(self.group.fabric.clone(), self.group.world.clone(), spec)?;
        let mut children = self
            .group
            .children
            .lock()
            .expect("no panic while children are held");
        children.retain(|child| child.strong_count() > 0);
        children.push(Arc::downgrade(&child.group));
        Ok(child)
    }

    /// Starts a collective; runs it, unless `call.asynchronous`.
    ///
    /// # Errors
    /// Wrong arguments, or a group that cannot be used. How the collective itself went is
    /// the operation's to tell.
    ///
    /// # Safety
    /// The segments of `call` stay valid, and nobody else touches them, until the
    /// operation has ended and dropped `completion`.
    pub unsafe fn collective(
        &self,
        call: Call,
        completion: Option<Box<dyn Completion>>,
    ) -> Result<Arc<Operation>, Error> {
        self.group.check_usable(call.kind.name())?;
        let (signature, reducer) = check(&call, self.rank(), self.size())?;
        let bytes = call.input.bytes().max(call.output.bytes());
        let job = Job {
            call,
            signature,
            reducer,
        };
        // SAFETY: passed on.
        unsafe { self.start(job, bytes, completion) }
    }

    /// Runs a collective to its end.
    ///
    /// # Errors
    /// Wrong arguments, a group that cannot be used, or how the collective failed.
    ///
    /// # Safety
    /// As [`Communicator::collective`].
    pub unsafe fn run(&self, call: Call) -> Result<(), Error> {
        let group = &self.group;
        group.check_usable(call.kind.name())?;
        let (signature, reducer) = check(&call, self.rank(), self.size())?;
        let bytes = call.input.bytes().max(call.output.bytes());
        let mut job = Job {
            call,
            signature,
            reducer,
        };
        job.call.asynchronous = false;
        if let Some(mut entry) = group.take_lane(&job, bytes) {
            return group.run_here(&mut entry, &job);
        }
        // SAFETY: passed on.
        unsafe { self.start(job, bytes, None) }?.wait(None)
    }

    /// Waits until all ranks are about to carry out `call`, by other means than the host's, and
    /// mean the same by it.
    ///
    /// # Errors
    /// As a collective: wrong arguments, ranks that call something else, do not come or are lost.
    pub(crate) fn agree(&self, call: &Call) -> Result<(), Error> {
        self.group.check_usable(call.kind.name())?;
        let (signature, _) = check(call, self.rank(), self.size())?;
        let bytes = call.input.bytes().max(call.output.bytes());
        let job = Job {
            call: Call {
                kind: Kind::Barrier,
                op: None,
                input: Pieces::new(),
                output: Pieces::new(),
                memory: None,
                asynchronous: false,
                ..call.clone()
            },
            signature,
            reducer: None,
        };
        // SAFETY: there is no segment.
        let operation = unsafe { self.start(job, bytes, None) }?;
        // It was not asynchronous.
        operation.result().expect("it has ended")
    }

    /// Starts a checked collective on `bytes` bytes.
    ///
    /// # Safety
    /// As [`Communicator::collective`].
    #[inline]
    unsafe fn start(
        &self,
        job: Job,
        bytes: usize,
        completion: Option<Box<dyn Completion>>,
    ) -> Result<Arc<Operation>, Error> {
        let group = &self.group;
        let asynchronous = job.call.asynchronous;
        if !asynchronous && let Some(mut entry) = group.take_lane(&job, bytes) {
            let result = group.run_here(&mut entry, &job);
            if let Some(completion) = completion {
                completion.complete(&result);
            }
            return Ok(Arc::new(Operation::ended(group.clone(), entry, result)));
        }
        let mut lane = group.lane();
        let entry = Entry {
            started: Some(Instant::now()),
            ..group.enter(&lane, &job, bytes)
        };
        let operation = Arc::new(Operation::new(group.clone(), entry, completion, None));
        lane.queue.push_back((operation.clone(), job));
        let backlog = lane.queue.len();
        drop(lane);
        if asynchronous {
            // A first step at once: what this rank brings is there when the others come.
            group.advance_lane();
            if !operation.is_completed() {
                group.notice(bytes >= URGENT_BYTES);
            }
            if backlog > BACKLOG {
                group.ease_backlog();
            }
        } else {
            // How it went is in the operation; a signal leaves it running.
            if let Err(error @ Error::Interrupted { .. }) = operation.wait(None) {
                return Err(error);
            }
        }
        Ok(operation)
    }

    /// Starts a message to or from another rank.
    ///
    /// # Errors
    /// Wrong arguments, or a group that cannot be used.
    ///
    /// # Safety
    /// As [`Communicator::collective`], for the message's data.
    pub unsafe fn message(
        &self,
        call: MessageCall,
        completion: Option<Box<dyn Completion>>,
    ) -> Result<Arc<Operation>, Error> {
        let group = &self.group;
        let MessageCall {
            kind,
            peer,
            tag,
            data,
            dtype,
            shape,
            timeout,
            memory,
        } = call;
        group.check_usable(kind.name())?;
        check_peer(kind, peer, group.spec.rank, group.spec.size)?;
        let signature = Signature {
            kind,
            op: None,
            dtype: Some(dtype),
            root: peer,
            tensors: 1,
            count: (data.bytes / dtype.size()) as u64,
            layout: 0,
        };
        let key = Key {
            class: Class::PointToPoint,
            group: group.key,
            channel: tag as u32 as u64,
        };
        let entry = Entry {
            signature,
            shape,
            sequence: group.sequence.load(Ordering::Relaxed),
            bytes: data.bytes as u64,
            started: Some(Instant::now()),
            timeout: timeout.unwrap_or_else(|| self.timeout()),
        };
        let message = Message {
            key,
            peer,
            transfer: OnceLock::new(),
        };
        let operation = Operation::new(group.clone(), entry, completion, Some(message));
        let operation = Arc::new(operation);
        let id = group.last_message.fetch_add(1, Ordering::Relaxed);
        group.pending().insert(id, operation.clone());
        {
            let mut waiting = group.waiting();
            if memory.is_some() || !waiting.is_empty() {
                let operation = operation.clone();
                waiting.push_back(WaitingMessage {
                    id,
                    operation,
                    data,
                    memory,
                });
                drop(waiting);
                group.begin_waiting();
            } else {
                // Held on: a later message must not overtake this one.
                // SAFETY: passed on.
                unsafe { group.begin_message(id, &operation, data) };
            }
        }
        if !operation.is_completed() {
            group.notice(false);
        }
        Ok(operation)
    }

    /// Waits until all ranks have called it; names those that have not.
    ///
    /// Rank 0 collects all others, and tells them how it went. The group stays usable after
    /// a failure.
    ///
    /// # Errors
    /// [`Error::Monitored`] names the first rank that is missing after `timeout`, or with
    /// `wait_all_ranks` all of them.
    pub fn monitored_barrier(
        &self,
        timeout: Option<Duration>,
        wait_all_ranks: bool,
    ) -> Result<(), Error> {
        let group = &self.group;
        group.check_usable(Kind::MonitoredBarrier.name())?;
        group.monitored_barrier(timeout.unwrap_or_else(|| self.timeout()), wait_all_ranks)
    }

    /// Where the ranks' devices are, once that was asked.
    pub(crate) fn members(&self) -> &OnceLock<Arc<Members>> {
        &self.group.members
    }

    /// Own rank in the group.
    pub fn rank(&self) -> u32 {
        self.group.spec.rank
    }

    /// Number of ranks.
    pub fn size(&self) -> u32 {
        self.group.spec.size
    }

    /// Whether its ranks reach each other's memory, and so work in place on data that
    /// lies in the [`arena`](crate::arena).
    pub fn shares_memory(&self) -> bool {
        matches!(&self.group.engine, Engine::Local(local) if local.ranks() > 1)
    }

    /// The id it was created with.
    pub fn id(&self) -> &str {
        &self.group.spec.id
    }

    /// Timeout of operations that name none.
    pub fn timeout(&self) -> Duration {
        Duration::from_millis(self.group.timeout.load(Ordering::Relaxed))
    }

    /// Changes [`Communicator::timeout`], for operations that start from now on.
    pub fn set_timeout(&self, timeout: Duration) {
        self.group
            .timeout
            .store(timeout.as_millis() as u64, Ordering::Relaxed);
    }

    /// Number of collectives started.
    pub fn sequence(&self) -> u64 {
        self.group.sequence.load(Ordering::Relaxed)
    }

    /// The failure that left the group unusable.
    pub fn error(&self) -> Option<Error> {
        self.group.failure.get().cloned()
    }

    /// Ends all operations of this group and of its children with [`Error::Aborted`], here
    /// and on the other ranks; the group cannot be used any more. Never blocks.
    pub fn abort(&self, reason: &str) {
        if !is_forked() {
            self.group.abort(reason);
        }
    }

    /// Leaves the group in good order. Operations under way go on.
    pub fn shutdown(&self) {
        if is_forked() || self.group.shut_down.swap(true, Ordering::AcqRel) {
            return;
        }
        if self.group.spec.default {
            self.group.world.retire();
        }
        if !self.group.is_pending() {
            self.group.tell_all(|| Control::Leave {
                group: self.group.key,
            });
        }
    }

    /// The time that a call would take, by the model: on the chips of the virtual slice where
    /// there is one (`TPU_DIST_VIRTUAL_SLICE`), else between these hosts. `bytes` are as for
    /// [`Estimator::collective`]; `peer` is the other side of a message.
    ///
    /// # Errors
    /// [`Error::Resource`] when the slice has no such name or no such ranks.
    pub fn estimate(&self, kind: Kind, bytes: u64, peer: Option<u32>) -> Result<Duration, Error> {
        let spec = &self.group.spec;
        let unknown = |what: &dyn std::fmt::Display| {
            Error::Resource(format!("TPU_DIST_VIRTUAL_SLICE: {what}"))
        };
        let estimator = match &Config::get().virtual_slice {
            Some(name) => {
                let slice = name.parse().map_err(|error| unknown(&error))?;
                Estimator::on_chips(&slice, &spec.global_ranks).map_err(|error| unknown(&error))?
            }
            None => {
                let local = matches!(self.group.engine, Engine::Local(_));
                let transport = if local {
                    Transport::Local
                } else {
                    Transport::Network
                };
                Estimator::on_hosts(spec.size, transport)
            }
        };
        let prediction = match peer {
            Some(peer) => estimator.message(spec.rank, peer, bytes),
            None => estimator.collective(kind, bytes),
        };
        let seconds = prediction.map_err(|error| unknown(&error))?.seconds();
        Ok(Duration::from_secs_f64(seconds))
    }

    /// What the group has done so far.
    pub fn stats(&self) -> Vec<Stat> {
        let stats = &self.group.stats;
        match &self.group.engine {
            Engine::Local(local) => {
                let transport = if local.ranks() == 1 { "self" } else { "shm" };
                stats.list(transport, |kind| local.written(kind))
            }
            Engine::Net(_) => stats.list("tcp", |_| 0),
        }
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        self.shutdown();
    }
}

impl Group {
    fn start(
        fabric: Arc<Fabric>,
        world: Arc<World>,
        spec: GroupSpec,
    ) -> Result<Arc<Communicator>, Error> {
        reap(None);
        let ranks = spec.global_ranks.iter().map(|&rank| u64::from(rank));
        let base = hash([world.id].into_iter().chain(words(&spec.id)).chain(ranks));
        let key = group_key(hash([base, world.count_group(base)]));
        let peers = world.peers(&spec.global_ranks);
        let share = world.share_memory(&spec.global_ranks) && peers.len() <= local::MAX_RANKS;
        let crowded = is_crowded(world.ranks_on_host(&fabric));
        let engine = if share {
            let peers = peers.clone();
            Engine::Local(Local::new(fabric.clone(), key, spec.rank, peers, crowded)?)
        } else {
            Engine::Net(Net::new(key, spec.rank, peers.clone()))
        };
        let timeout = AtomicU64::new(spec.timeout.as_millis() as u64);
        let group = Arc::new_cyclic(|this| Group {
            this: this.clone(),
            spec,
            key,
            fabric: fabric.clone(),
            world,
            peers,
            engine,
            crowded,
            timeout,
            lane: Mutex::default(),
            sequence: AtomicU64::new(0),
            pending: Mutex::default(),
            last_message: AtomicU64::new(0),
            waiting: Mutex::default(),
            failure: OnceLock::new(),
            left: Mutex::default(),
            has_left: AtomicBool::new(false),
            shut_down: AtomicBool::new(false),
            stats: Stats::default(),
            children: Mutex::default(),
            members: OnceLock::new(),
        });
        let member: Weak<dyn Member> = Arc::downgrade(&group) as Weak<dyn Member>;
        fabric.add_group(key, member);
        let work: Weak<dyn Work> = Arc::downgrade(&group) as Weak<dyn Work>;
        Background::get().add(work);
        // Peers that went before the group was registered.
        for peer in group.peers.iter().flatten() {
            if let Some(gone) = peer.gone() {
                group.peer_gone(peer, &gone.reason, gone.in_order);
            }
        }
        Ok(Arc::new(Communicator { group }))
    }

    pub(crate) fn fabric(&self) -> &Fabric {
        &self.fabric
    }

    pub(crate) fn is_crowded(&self) -> bool {
        self.crowded
    }

    pub(crate) fn stats(&self) -> &Stats {
        &self.stats
    }

    fn lane(&self) -> MutexGuard<'_, Lane> {
        self.lane.lock().expect("no panic while a lane is held")
    }

    fn pending(&self) -> MutexGuard<'_, HashMap<u64, Arc<Operation>>> {
        self.pending
            .lock()
            .expect("no panic while messages are held")
    }

    fn waiting(&self) -> MutexGuard<'_, VecDeque<WaitingMessage>> {
        self.waiting
            .lock()
            .expect("no panic while messages are held")
    }

    pub(crate) fn peer(&self, rank: u32) -> &Arc<Peer> {
        self.peers[rank as usize]
            .as_ref()
            .expect("checked to be another rank")
    }

    /// The link to a rank of this host.
    pub(crate) fn link_in_memory(&self, rank: u32) -> Option<&Link> {
        let peer = self.peer(rank);
        peer.mapping.as_ref().map(|_| &peer.link)
    }

    fn notice(&self, urgent: bool) {
        if let Some(fabric) = Fabric::existing() {
            Background::get().notice(fabric, urgent);
        }
    }

    /// As `group 'dp' (rank 1 of 4), all_reduce(SUM, float32, 8 elements) number 12`.
    pub(crate) fn context(&self, entry: &Entry) -> String {
        let Group { spec, .. } = self;
        let Entry {
            signature,
            shape,
            sequence,
            ..
        } = entry;
        let shape = match signature.dtype {
            Some(_) => format!(" of shape {shape}"),
            None => String::new(),
        };
        format!(
            "group '{}' (rank {} of {}), {signature}{shape}, sequence number {sequence}",
            spec.name, spec.rank, spec.size
        )
    }

    /// As `rank 2 (host vm1, pid 17)`.
    pub(crate) fn name(&self, rank: u32) -> String {
        let global = self.spec.global_ranks[rank as usize];
        let place = self.world.place(global);
        if global == rank {
            format!("rank {rank} ({place})")
        } else {
            format!("rank {rank} (global rank {global}, {place})")
        }
    }

    fn check_usable(&self, operation: &'static str) -> Result<(), Error> {
        refuse_fork(operation)?;
        if let Some(failure) = self.failure.get() {
            return Err(Error::Failed {
                context: format!(
                    "group '{}' (rank {}), {operation}",
                    self.spec.name, self.spec.rank
                ),
                cause: failure.to_string(),
            });
        }
        if self.shut_down.load(Ordering::Acquire) {
            return Err(Error::Aborted {
                context: format!(
                    "group '{}' (rank {}), {operation}",
                    self.spec.name, self.spec.rank
                ),
                reason: "the group was shut down on this rank".to_owned(),
            });
        }
        Ok(())
    }

    // ---- running collectives ----

    /// Counts a collective. Whoever holds the lane may.
    fn enter(&self, _lane: &Lane, job: &Job, bytes: usize) -> Entry {
        let sequence = self.sequence.load(Ordering::Relaxed) + 1;
        self.sequence.store(sequence, Ordering::Relaxed);
        Entry {
            signature: job.signature,
            shape: job.call.shape,
            sequence,
            bytes: bytes as u64,
            started: None,
            timeout: job
                .call
                .timeout
                .unwrap_or_else(|| Duration::from_millis(self.timeout.load(Ordering::Relaxed))),
        }
    }

    /// Takes the lane for a synchronous collective, unless others come first.
    fn take_lane(&self, job: &Job, bytes: usize) -> Option<Entry> {
        let mut lane = self.lane();
        if lane.running || !lane.is_empty() {
            return None;
        }
        lane.running = true;
        Some(self.enter(&lane, job, bytes))
    }

    /// Runs a collective on the caller's thread, which has taken the lane, and gives the lane
    /// back.
    fn run_here(self: &Arc<Group>, entry: &mut Entry, job: &Job) -> Result<(), Error> {
        let kind = entry.signature.kind;
        let sampled = entry.bytes <= SAMPLED_BYTES as u64;
        let timed = !sampled || self.stats.is_sample(kind);
        entry.started = timed.then(Instant::now);
        let result = self.complete_here(entry, job);
        if result.is_ok() {
            let time = entry
                .started
                .filter(|_| timed)
                .map(|started| started.elapsed());
            match time {
                Some(time) if !sampled => self.stats.add(kind, entry.bytes, time),
                time => self.stats.add_sampled(kind, entry.bytes, time),
            }
        }
        let others_wait = {
            let mut lane = self.lane();
            lane.running = false;
            !lane.is_empty()
        };
        if others_wait {
            self.fabric.ring_own();
        }
        result
    }

    fn complete_here(self: &Arc<Group>, entry: &mut Entry, job: &Job) -> Result<(), Error> {
        let mut future = pin!(self.engine.run(job, entry.sequence));
        let mut context = Context::from_waker(Waker::noop());
        let mut poll = || match future.as_mut().poll(&mut context) {
            Poll::Ready(result) => Some(result),
            Poll::Pending => None,
        };
        // A peer on another core that is about to answer does so before `wait` would be under way.
        let looks = if self.crowded { 1 } else { LOOKS };
        let outcome = match (0..looks).find_map(|_| poll()) {
            Some(result) => Ok(Ok(result)),
            None => {
                let entry: &Entry = {
                    entry.started.get_or_insert_with(Instant::now);
                    entry
                };
                let _waiting = Background::get().waiting();
                let mut stamp = 0;
                wait(
                    &self.fabric,
                    self.crowded,
                    || match poll() {
                        Some(result) => Step::Done(Ok(result)),
                        None if self.has_moved(&mut stamp) => Step::Moved,
                        None => Step::Idle,
                    },
                    |now| self.overdue(entry, now).map(Err),
                )
            }
        };
        match outcome {
            Ok(Ok(Ok(()))) => Ok(()),
            Ok(Ok(Err(failure))) => Err(self.failed(entry, failure)),
            Ok(Err(error)) => Err(error),
            Err(Interrupted) => {
                let context = self.context(entry);
                let error = Error::Interrupted { context };
                self.fail(error.clone(), true);
                Err(error)
            }
        }
    }

    /// Whether the running collective has come further since `stamp` was last set here.
    pub(crate) fn has_moved(&self, stamp: &mut u64) -> bool {
        let Engine::Local(local) = &self.engine else {
            // What moves goes over links, whose progress the waiting thread sees itself.
            return false;
        };
        let now = local.stamp();
        std::mem::replace(stamp, now) != now
    }

    /// Moves the first queued collective; returns whether one ended.
    pub(crate) fn advance_lane(self: &Arc<Group>) -> bool {
        let mut ended = false;
        loop {
            let Ok(mut lane) = self.lane.try_lock() else {
                return ended;
            };
            if lane.running {
                return ended;
            }
            let begun = lane.begun.take().or_else(|| {
                let (operation, mut job) = lane.queue.pop_front()?;
                let (group, sequence) = (self.clone(), operation.sequence());
                let future: Running = Box::pin(async move {
                    job.memory().await?;
                    group.engine.run(&job, sequence).await
                });
                Some((operation, future))
            });
            let Some((operation, mut future)) = begun else {
                return ended;
            };
            lane.running = true;
            drop(lane);
            let mut context = Context::from_waker(Waker::noop());
            let result = match future.as_mut().poll(&mut context) {
                Poll::Ready(Ok(())) => Some(Ok(())),
                Poll::Ready(Err(failure)) => Some(Err(self.failed(operation.entry(), failure))),
                Poll::Pending => self.failure_of(operation.entry()).map(Err),
            };
            match result {
                Some(result) => {
                    // The memory is the caller's again when the operation ends.
                    drop(future);
                    self.lane().running = false;
                    operation.end(result);
                    ended = true;
                }
                None => {
                    let mut lane = self.lane();
                    lane.begun = Some((operation, future));
                    lane.running = false;
                    return ended;
                }
            }
        }
    }

    /// Helps with a long queue for a while, so that callers who never wait do not fill the
    /// memory. It does not insist: what the queue waits for may be this caller's to do.
    fn ease_backlog(self: &Arc<Group>) {
        let end = Instant::now() + Duration::from_micros(200);
        while self.lane().queue.len() > BACKLOG && Instant::now() < end {
            if !self.advance_lane() {
                self.fabric.poll();
                std::thread::yield_now();
            }
        }
    }

    /// Ends what has passed its deadline, or waits for a rank that has left.
    pub(crate) fn check_deadlines(self: &Arc<Group>, now: Instant) {
        let first = {
            let lane = self.lane();
            if lane.running {
                None
            } else {
                lane.first().cloned()
            }
        };
        if let Some(operation) = first {
            // A failure of the group is noticed by whoever polls the lane.
            self.overdue(operation.entry(), now);
            self.advance_lane();
        }
        let messages: Vec<(u64, Arc<Operation>)> = {
            let pending = self.pending();
            pending
                .iter()
                .map(|(&id, operation)| (id, operation.clone()))
                .collect()
        };
        for (id, operation) in messages {
            let peer = operation.message().and_then(|message| message.peer);
            let left = peer.and_then(|peer| self.left_long_ago(&[peer], now));
            let error = if operation.entry().is_late(now) {
                Some(Error::Timeout {
                    context: operation.context(),
                    timeout: operation.entry().timeout,
                    detail: match peer {
                        Some(peer) => {
                            format!(
                                "missing ranks [{peer}]: no matching call of {}",
                                self.name(peer)
                            )
                        }
                        None => "no matching send came from any rank".to_owned(),
                    },
                    missing: peer.into_iter().collect(),
                })
            } else {
                left.map(|(rank, reason)| self.lost(&operation.context(), rank, &reason))
            };
            if let Some(error) = error {
                self.give_up(&operation, error);
                self.pending().remove(&id);
            }
        }
    }

    /// Why a running collective cannot go on, if so.
    fn overdue(self: &Arc<Group>, entry: &Entry, now: Instant) -> Option<Error> {
        if let Some(error) = self.failure_of(entry) {
            return Some(error);
        }
        let error = if entry.is_late(now) {
            let missing = self.late(entry.sequence);
            let detail = match missing.as_slice() {
                [] => "all ranks arrived, but the data did not".to_owned(),
                ranks => {
                    let names: Vec<String> = ranks.iter().map(|&rank| self.name(rank)).collect();
                    format!("missing ranks {ranks:?}: {}", names.join(", "))
                }
            };
            let (context, timeout) = (self.context(entry), entry.timeout);
            Error::Timeout {
                context,
                timeout,
                detail,
                missing,
            }
        } else {
            let waits_for = match &self.engine {
                _ if !self.has_left.load(Ordering::Acquire) => return None,
                Engine::Local(local) => local.late(),
                Engine::Net(net) => net.unknown(),
            };
            let (rank, reason) = self.left_long_ago(&waits_for, now)?;
            self.lost(&self.context(entry), rank, &reason)
        };
        self.fail(error.clone(), true);
        Some(error)
    }

    fn late(&self, sequence: u64) -> Vec<u32> {
        match &self.engine {
            Engine::Local(local) => local.late(),
            Engine::Net(net) => {
                let unknown = net.unknown();
                let asked: Vec<&Arc<Peer>> = unknown.iter().map(|&rank| self.peer(rank)).collect();
                let answers = self.fabric.probe(self.key, &asked, PROBE);
                let late = unknown.iter().zip(answers);
                late.filter(|(_, entered)| entered.is_none_or(|entered| entered < sequence))
                    .map(|(&rank, _)| rank)
                    .collect()
            }
        }
    }

    /// A rank among `ranks` that left a while ago.
    fn left_long_ago(&self, ranks: &[u32], now: Instant) -> Option<(u32, String)> {
        if !self.has_left.load(Ordering::Acquire) {
            return None;
        }
        let left = self.left.lock().expect("no panic while it is held");
        let found = left.iter().find(|(rank, _, since)| {
            ranks.contains(rank) && now.saturating_duration_since(*since) >= LEAVE_GRACE
        });
        found.map(|(rank, reason, _)| (*rank, reason.clone()))
    }

    // ---- failures ----

    /// The failure of the group, as that of one of its operations.
    fn failure_of(&self, entry: &Entry) -> Option<Error> {
        let mut error = self.failure.get()?.clone();
        match &mut error {
            Error::PeerLost { context, .. } | Error::Aborted { context, .. } => {
                *context = self.context(entry);
            }
            _ => {}
        }
        Some(error)
    }

    fn lost(&self, context: &str, rank: u32, reason: &str) -> Error {
        Error::PeerLost {
            context: context.to_owned(),
            peer: self.name(rank),
            reason: reason.to_owned(),
            rank,
        }
    }

    fn link_error(&self, entry: &Entry, rank: u32, error: &LinkError) -> Error {
        let context = &self.context(entry);
        match error {
            LinkError::Closed(reason) => self.lost(context, rank, reason),
            LinkError::Size { sent, expected } => Error::InvalidArgument {
                operation: "message",
                argument: "tensor",
                message: {
                    let size = entry.signature.dtype.map_or(1, |dtype| dtype.size()) as u64;
                    format!(
                        "{context}: the sender has {} elements ({sent} bytes), the receiver expects {} \
                         elements ({expected} bytes)",
                        sent / size,
                        expected / size
                    )
                },
            },
            LinkError::Cancelled => Error::Aborted {
                context: context.to_owned(),
                reason: format!("{} gave up", self.name(rank)),
            },
        }
    }

    /// A collective failed in the engine: what to tell the caller. Where the ranks only
    /// disagree, the group stays usable: all of them know.
    fn failed(self: &Arc<Group>, entry: &Entry, failure: Failure) -> Error {
        let context = self.context(entry);
        match failure {
            Failure::Mismatch {
                rank,
                theirs,
                own_rank,
                ours,
            } => Error::Mismatch {
                context,
                rank,
                theirs: theirs.to_string().into(),
                own_rank,
                ours: ours.to_string().into(),
            },
            Failure::Splits {
                from,
                to,
                sent,
                expected,
            } => Error::Mismatch {
                context,
                rank: from,
                theirs: format!("all_to_all sending {sent} bytes to rank {to}").into(),
                own_rank: to,
                ours: format!("all_to_all expecting {expected} bytes from rank {from}").into(),
            },
            Failure::Gone { rank } => {
                let reason = format!("{} failed in this group", self.name(rank));
                self.failed_elsewhere(entry, Error::Aborted { context, reason })
            }
            Failure::Unreadable { rank, error } => {
                let reason = format!("its memory cannot be read: {error}");
                self.failed_elsewhere(entry, self.lost(&context, rank, &reason))
            }
            Failure::Memory(reason) => {
                let reason = format!("its data is not to be had: {reason}");
                let error = Error::Aborted { context, reason };
                self.fail(error.clone(), true);
                error
            }
            Failure::Plan(message) => Error::InvalidArgument {
                operation: entry.signature.kind.name(),
                argument: "TPU_DIST_ALGO",
                message,
            },
            Failure::Link { rank, error } => {
                let cause = self.failure_of(entry);
                let error = cause.unwrap_or_else(|| self.link_error(entry, rank, &error));
                self.fail(error.clone(), true);
                error
            }
        }
    }

    /// Fails for a cause that is about to be heard of, or else with `error`.
    fn failed_elsewhere(self: &Arc<Group>, entry: &Entry, error: Error) -> Error {
        let end = Instant::now() + PROBE;
        while self.failure.get().is_none() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(1));
        }
        let tell = matches!(error, Error::PeerLost { .. });
        self.fail(error.clone(), tell);
        self.failure_of(entry).unwrap_or(error)
    }

    /// Leaves the group unusable; `tell` the other ranks, unless they know.
    fn fail(self: &Arc<Group>, error: Error, tell: bool) {
        let reason = error.to_string();
        if self.failure.set(error.clone()).is_err() {
            return;
        }
        if let Engine::Local(local) = &self.engine {
            local.fail();
            self.fabric.arena.taint();
        }
        if tell {
            // Whoever has a connection to a dead rank says so: the others may have none.
            self.tell_all(|| Control::Abort {
                group: self.key,
                reason: reason.clone(),
            });
        }
        let messages: Vec<Arc<Operation>> =
            self.pending().drain().map(|(_, message)| message).collect();
        for message in messages {
            let error = self
                .failure_of(message.entry())
                .unwrap_or_else(|| error.clone());
            self.give_up(&message, error);
        }
        self.fabric.ring_own();
        if self.is_pending() {
            self.notice(true);
        }
    }

    // ---- messages ----

    /// Begins the messages whose memory is there. Returns whether there was one.
    fn begin_waiting(self: &Arc<Group>) -> bool {
        let mut begun = false;
        // Held while one begins: the next must not overtake it.
        let mut waiting = self.waiting();
        while let Some(data) = waiting.front().and_then(WaitingMessage::data) {
            let Some(WaitingMessage { id, operation, .. }) = waiting.pop_front() else {
                break;
            };
            begun = true;
            match data {
                // It may have been given up.
                Ok(_) if operation.is_completed() => {}
                // SAFETY: the caller of `Communicator::message` vouches for the memory.
                Ok(data) => unsafe { self.begin_message(id, &operation, data) },
                Err(reason) => {
                    let error = self.failed(operation.entry(), Failure::Memory(reason));
                    self.give_up(&operation, error);
                    self.pending().remove(&id);
                }
            }
        }
        begun
    }

    /// Gives a message to its link.
    ///
    /// # Safety
    /// As [`Communicator::message`].
    unsafe fn begin_message(self: &Arc<Group>, id: u64, operation: &Arc<Operation>, data: Segment) {
        let Some(Message {
            key,
            peer,
            transfer: known,
        }) = operation.message()
        else {
            return;
        };
        let (key, peer) = (*key, *peer);
        let (owner, ended) = (Arc::downgrade(self), Arc::downgrade(operation));
        let notify = move |transfer: &Transfer| {
            let (Some(group), Some(operation)) = (owner.upgrade(), ended.upgrade()) else {
                return;
            };
            let result = match transfer.result() {
                Some(Ok(())) => Ok(()),
                Some(Err(error)) => {
                    let rank = peer.or(transfer.source()).unwrap_or(group.spec.rank);
                    Err(group.link_error(operation.entry(), rank, &error))
                }
                None => return,
            };
            operation.end(result);
            group.pending().remove(&id);
        };
        // SAFETY: the caller keeps the memory until the operation has ended; it ends with the
        // transfer, or after the transfer was cancelled (`Group::give_up`).
        let transfer = unsafe { Transfer::new(&[data], Some(Box::new(notify))) };
        let _ = known.set(transfer.clone());
        let me = self.spec.rank;
        match (operation.entry().signature.kind, peer) {
            (Kind::Send, Some(to)) => {
                let link = &self.peer(to).link;
                link.send(key, me, transfer, Mode::PointToPoint);
            }
            (_, Some(from)) => {
                let link = &self.peer(from).link;
                link.receive(key, me, transfer, Mode::PointToPoint);
            }
            (_, None) => {
                let links = self.peers.iter().flatten().map(|peer| &peer.link);
                self.fabric.any_source.post(key, transfer, links);
            }
        }
        if let Some(error) = self.failure_of(operation.entry()) {
            // The group failed in between: nobody else ends this one.
            self.give_up(operation, error);
            self.pending().remove(&id);
        }
    }

    /// Ends a message before its time.
    fn give_up(&self, operation: &Operation, error: Error) {
        if let Some(message) = operation.message()
            && let Some(transfer) = message.transfer.get()
        {
            operation.end_as(error.clone());
            match message.peer {
                Some(peer) => self.peer(peer).link.cancel(transfer),
                None => {
                    if !self.fabric.any_source.cancel(&message.key, transfer) {
                        for peer in self.peers.iter().flatten() {
                            peer.link.cancel(transfer);
                        }
                    }
                }
            }
        }
        operation.end(Err(error));
    }

    fn abort(self: &Arc<Group>, reason: &str) {
        let spec = &self.spec;
        self.fail(
            Error::Aborted {
                context: format!(
                    "group '{}' (rank {} of {})",
                    spec.name, spec.rank, spec.size
                ),
                reason: format!("rank {}: {reason}", spec.rank),
            },
            true,
        );
        if spec.default {
            self.world.retire();
        }
        let children: Vec<Arc<Group>> = {
            let children = self
                .children
                .lock()
                .expect("no panic while children are held");
            children.iter().filter_map(Weak::upgrade).collect()
        };
        for child in children {
            child.abort(reason);
        }
    }

    fn tell_all(&self, message: impl Fn() -> Control) {
        for peer in self.peers.iter().flatten() {
            peer.tell(message());
        }
    }
}

impl Member for Group {
    fn peer_gone(&self, peer: &Peer, reason: &str, in_order: bool) {
        let Some(rank) = self.rank_of(peer) else {
            return;
        };
        if in_order {
            self.note_left(rank, reason);
        } else if let Some(group) = self.itself() {
            let context = format!("group '{}' (rank {})", self.spec.name, self.spec.rank);
            group.fail(self.lost(&context, rank, reason), true);
        }
    }

    fn peer_left(&self, peer: &Peer) {
        if let Some(rank) = self.rank_of(peer) {
            self.note_left(rank, "it left the group");
        }
    }

    fn aborted_by(&self, peer: &Peer, reason: &str) {
        let (Some(rank), Some(group)) = (self.rank_of(peer), self.itself()) else {
            return;
        };
        let context = format!("group '{}' (rank {})", self.spec.name, self.spec.rank);
        let reason = format!("by {}: {reason}", self.name(rank));
        group.fail(Error::Aborted { context, reason }, false);
    }

    fn entered(&self) -> u64 {
        self.sequence.load(Ordering::Relaxed)
    }
}

impl Group {
    fn rank_of(&self, peer: &Peer) -> Option<u32> {
        let is = |other: &Option<Arc<Peer>>| {
            other
                .as_ref()
                .is_some_and(|other| std::ptr::eq(Arc::as_ptr(other), peer))
        };
        self.peers.iter().position(is).map(|rank| rank as u32)
    }

    fn itself(&self) -> Option<Arc<Group>> {
        self.this.upgrade()
    }

    fn note_left(&self, rank: u32, reason: &str) {
        let mut left = self.left.lock().expect("no panic while it is held");
        left.push((rank, reason.to_owned(), Instant::now()));
        self.has_left.store(true, Ordering::Release);
    }
}

impl Work for Group {
    fn advance(&self, now: Instant) -> bool {
        let Some(group) = self.itself() else {
            return false;
        };
        let moved = group.begin_waiting() | group.advance_lane();
        group.check_deadlines(now);
        moved
    }

    fn is_pending(&self) -> bool {
        !self.lane().is_empty() || !self.pending().is_empty()
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if is_forked() {
            return;
        }
        self.fabric.remove_group(self.key);
        self.tell_all(|| Control::Leave { group: self.key });
        for peer in self.peers.iter().flatten() {
            peer.link.forget_group(self.key);
        }
        let peers = self.peers.clone();
        let placeholder = Engine::Net(Net::new(self.key, self.spec.rank, peers));
        if let Engine::Local(local) = std::mem::replace(&mut self.engine, placeholder) {
            local.detach();
            reap(Some(local));
        }
    }
}

/// Gives back the seats of groups that every member has left.
fn reap(ended: Option<Local>) {
    static ENDED: Mutex<Vec<Local>> = Mutex::new(Vec::new());
    let mut list = ENDED.lock().expect("no panic while it is held");
    list.extend(ended);
    list.retain(|local| {
        let abandoned = local.is_abandoned();
        if abandoned {
            local.release();
        }
        !abandoned
    });
}

fn refuse_fork(operation: &'static str) -> Result<(), Error> {
    if is_forked() {
        return Err(Error::Forked {
            context: operation.to_owned(),
        });
    }
    Ok(())
}
