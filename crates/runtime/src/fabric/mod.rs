//! All that a process shares with its peers: one for all groups.
//!
//! The fabric owns the shared memory of the process, the connection to each peer, and
//! the control thread that makes connections and notices when they end.

mod control;
mod fork;
mod interface;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, RwLock, Weak};
use std::time::{Duration, Instant};

use crate::Error;
use crate::arena::Arena;
use crate::config::{Config, TransportChoice};
use crate::link::{AnySource, Link};
use crate::sync::{Doorbell, Inbox, publish_fence};
use crate::transport::peer_memory::PeerMemory;
use crate::transport::region::{Mapping, OwnRegion};
use crate::transport::ring::RING_FOOTPRINT;
use crate::wire::{Control, ProcessInfo, VERSION};
pub(crate) use fork::is_forked;

/// A group, as far as the fabric knows it: who wants to hear what.
pub(crate) trait Member: Send + Sync {
    /// A process ended, in good order or not.
    fn peer_gone(&self, peer: &Peer, reason: &str, in_order: bool);
    /// A peer left the group in good order.
    fn peer_left(&self, peer: &Peer);
    /// A peer aborted the group, or failed in it.
    fn aborted_by(&self, peer: &Peer, reason: &str);
    /// Number of collectives that this process has entered.
    fn entered(&self) -> u64;
}

/// Another process.
pub(crate) struct Peer {
    pub(crate) info: ProcessInfo,
    /// Its shared memory, when it is on this host.
    pub(crate) mapping: Option<Arc<Mapping>>,
    /// The rest of its memory, when it is on this host and can be read.
    pub(crate) memory: Option<PeerMemory>,
    pub(crate) link: Link,
    control: tokio::sync::mpsc::UnboundedSender<Control>,
    /// With shared memory: its bit in this process's inbox and where its ring lies in this
    /// process's region; given back when it is gone.
    seat: Option<(u32, usize)>,
    /// Set once the control thread has written the goodbye.
    said_goodbye: AtomicBool,
    gone: OnceLock<Gone>,
    /// Milliseconds since the fabric's start at which a waiting thread last polled it.
    polled: AtomicU64,
}

/// How a peer ended.
#[derive(Clone, Debug)]
pub(crate) struct Gone {
    pub(crate) reason: String,
    pub(crate) in_order: bool,
}

impl Peer {
    /// Sends a control message; lost when the peer is gone.
    pub(crate) fn tell(&self, message: Control) {
        let _ = self.control.send(message);
    }

    pub(crate) fn gone(&self) -> Option<&Gone> {
        self.gone.get()
    }

    /// As `host vm1, pid 17`.
    pub(crate) fn place(&self) -> String {
        format!("host {}, pid {}", self.info.host, self.info.pid)
    }
}

/// Who holds an inbox bit.
#[derive(Clone)]
enum Bit {
    Free,
    /// A connection is being made.
    Taken,
    Peer(Arc<Peer>),
}

/// See the module.
pub(crate) struct Fabric {
    pub(crate) info: ProcessInfo,
    pub(crate) region: Arc<OwnRegion>,
    pub(crate) arena: Arena,
    pub(crate) any_source: Arc<AnySource>,
    /// This process has begun to say goodbye.
    leaving: AtomicBool,
    peers: Mutex<HashMap<u128, Arc<Peer>>>,
    peer_added: Condvar,
    /// Peers by inbox bit, for the polling threads.
    by_bit: RwLock<Vec<Bit>>,
    /// Peers reached by TCP, for the polling threads.
    remote: RwLock<Vec<Arc<Peer>>>,
    has_remote: AtomicBool,
    groups: Mutex<HashMap<u64, Weak<dyn Member>>>,
    control: control::Handle,
    start: Instant,
    probes: Mutex<HashMap<u64, Option<Option<u64>>>>,
    probe_answered: Condvar,
    last_probe: AtomicU64,
}

static FABRIC: OnceLock<Result<Arc<Fabric>, Error>> = OnceLock::new();

impl Fabric {
    /// The fabric of this process, made at the first call.
    pub(crate) fn get() -> Result<Arc<Fabric>, Error> {
        FABRIC.get_or_init(Fabric::start).clone()
    }

    /// The fabric, if there is one.
    pub(crate) fn existing() -> Option<&'static Arc<Fabric>> {
        FABRIC.get()?.as_ref().ok()
    }

    fn start() -> Result<Arc<Fabric>, Error> {
        fork::watch();
        let config = Config::get();
        let region = Arc::new(OwnRegion::new()?);
        let process = random();
        let (listeners, addresses) = control::listen(config, process)?;
        let machine = machine();
        let shares_memory = config.transport == TransportChoice::Auto && listeners.unix.is_some();
        let info = ProcessInfo {
            version: VERSION,
            process,
            token: random(),
            nonce: 0,
            pid: std::process::id(),
            host: nix::unistd::gethostname()
                .map(|name| name.to_string_lossy().into_owned())
                .unwrap_or_else(|_| "unknown".to_owned()),
            machine,
            // A domain of its own when nobody can share memory with it.
            domain: if shares_memory {
                hash([machine, network_namespace()])
            } else {
                process as u64
            },
            addresses,
        };
        let (control, runtime) = control::Handle::new(listeners.streams)?;
        let fabric = Arc::new(Fabric {
            info,
            arena: Arena::new(region.clone()),
            region,
            any_source: Arc::default(),
            leaving: AtomicBool::new(false),
            peers: Mutex::default(),
            peer_added: Condvar::new(),
            by_bit: RwLock::default(),
            remote: RwLock::default(),
            has_remote: AtomicBool::new(false),
            groups: Mutex::default(),
            control,
            start: Instant::now(),
            probes: Mutex::default(),
            probe_answered: Condvar::new(),
            last_probe: AtomicU64::new(0),
        });
        control::start(fabric.clone(), listeners, runtime)?;
        // SAFETY: the function takes no argument, does not unwind, and stays loaded as
        // long as the process: the library is never unloaded.
        unsafe { libc::atexit(say_goodbye) };
        Ok(fabric)
    }

    /// The doorbell of this process.
    pub(crate) fn doorbell(&self) -> &Doorbell {
        self.region.mapping.doorbell()
    }

    /// Wakes the waiting threads of this process.
    pub(crate) fn ring_own(&self) {
        publish_fence();
        self.doorbell().ring();
    }

    /// Connects to every process in `infos` that is not a peer yet.
    pub(crate) fn connect(
        self: &Arc<Fabric>,
        infos: &[ProcessInfo],
        names: &[String],
        deadline: Instant,
    ) -> Result<Vec<Option<Arc<Peer>>>, Error> {
        let failures = Arc::new(Mutex::new(HashMap::<u128, String>::new()));
        for info in infos {
            if info.version != VERSION {
                return Err(Error::Network(format!(
                    "version {} of tpu_dist's protocol on host {}, {VERSION} here; install one version everywhere",
                    info.version, info.host
                )));
            }
            if self.is_own(info) || self.live_peer(info.process).is_some() {
                continue;
            }
            if info.machine == self.info.machine && info.domain != self.info.domain {
                self.warn_no_shared_memory();
            }
            // Of two processes, the one with the smaller identity connects.
            if self.info.process < info.process {
                self.control
                    .connect(self.clone(), info.clone(), deadline, failures.clone());
            }
        }
        let mut found = Vec::with_capacity(infos.len());
        for (info, name) in infos.iter().zip(names) {
            if self.is_own(info) {
                found.push(None);
                continue;
            }
            let mut peers = self.peers.lock().expect("no panic while peers are held");
            loop {
                if let Some(peer) = peers.get(&info.process)
                    && peer.gone().is_none()
                {
                    found.push(Some(peer.clone()));
                    break;
                }
                if let Some(failure) = failures
                    .lock()
                    .expect("no panic while failures are held")
                    .get(&info.process)
                {
                    return Err(Error::Network(format!(
                        "cannot reach {name} (host {}, pid {}): {failure}",
                        info.host, info.pid
                    )));
                }
                let left = deadline.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    return Err(Error::Network(format!(
                        "{name} (host {}, pid {}) did not connect in time; its addresses are {}, ours {}",
                        info.host,
                        info.pid,
                        info.addresses.join(", "),
                        self.info.addresses.join(", ")
                    )));
                }
                let step = left.min(Duration::from_millis(100));
                peers = self
                    .peer_added
                    .wait_timeout(peers, step)
                    .expect("as above")
                    .0;
            }
        }
        Ok(found)
    }

    fn is_own(&self, info: &ProcessInfo) -> bool {
        info.process == self.info.process
    }

    fn live_peer(&self, process: u128) -> Option<Arc<Peer>> {
        let peers = self.peers.lock().expect("no panic while peers are held");
        peers
            .get(&process)
            .filter(|peer| peer.gone().is_none())
            .cloned()
    }

    fn warn_no_shared_memory(&self) {
        static WARNED: AtomicBool = AtomicBool::new(false);
        let chosen = Config::get().transport == TransportChoice::Tcp;
        if !chosen && !WARNED.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                "ranks of this machine are in different network namespaces (containers?) and cannot share \
                 memory: they use TCP, which is slower"
            );
        }
    }

    /// A bit of the inbox for a new peer.
    fn take_bit(&self) -> Result<u32, Error> {
        let mut by_bit = self.by_bit.write().expect("no panic while bits are held");
        let free = by_bit.iter().position(|bit| matches!(bit, Bit::Free));
        let bit = free.unwrap_or(by_bit.len());
        if bit == Inbox::BITS {
            return Err(Error::Resource(format!(
                "more than {} processes on one host",
                Inbox::BITS
            )));
        }
        if bit == by_bit.len() {
            by_bit.push(Bit::Free);
        }
        by_bit[bit] = Bit::Taken;
        Ok(bit as u32)
    }

    fn set_bit(&self, bit: u32, holder: Bit) {
        self.by_bit.write().expect("no panic while bits are held")[bit as usize] = holder;
    }

    fn add_peer(&self, peer: Arc<Peer>) {
        match peer.seat {
            Some((bit, _)) => self.set_bit(bit, Bit::Peer(peer.clone())),
            None => {
                self.remote
                    .write()
                    .expect("no panic while peers are held")
                    .push(peer.clone());
                self.has_remote.store(true, Ordering::Release);
            }
        }
        self.peers
            .lock()
            .expect("no panic while peers are held")
            .insert(peer.info.process, peer);
        self.peer_added.notify_all();
    }

    /// A peer's control connection ended.
    fn peer_gone(&self, peer: &Arc<Peer>, reason: String, in_order: bool) {
        // What it sent before it ended still counts.
        peer.link.close(&reason);
        if peer
            .gone
            .set(Gone {
                reason: reason.clone(),
                in_order,
            })
            .is_err()
        {
            return;
        }
        if !in_order {
            tracing::debug!("lost {}: {reason}", peer.place());
        }
        for group in self.groups() {
            group.peer_gone(peer, &reason, in_order);
        }
        self.peers
            .lock()
            .expect("no panic while peers are held")
            .remove(&peer.info.process);
        match peer.seat {
            Some((bit, ring)) => {
                self.set_bit(bit, Bit::Free);
                self.region.release(ring, RING_FOOTPRINT);
            }
            None => {
                let mut remote = self.remote.write().expect("no panic while peers are held");
                remote.retain(|other| !Arc::ptr_eq(other, peer));
            }
        }
        self.ring_own();
        self.peer_added.notify_all();
    }

    fn handle(&self, peer: &Arc<Peer>, message: Control) {
        let group = |key: u64| {
            let groups = self.groups.lock().expect("no panic while groups are held");
            groups.get(&key).and_then(Weak::upgrade)
        };
        match message {
            Control::Heartbeat | Control::Goodbye => {}
            Control::Abort { group: key, reason } => {
                if let Some(group) = group(key) {
                    group.aborted_by(peer, &reason);
                    self.ring_own();
                }
            }
            Control::Leave { group: key } => {
                if let Some(group) = group(key) {
                    group.peer_left(peer);
                    self.ring_own();
                }
            }
            Control::Probe { id, group: key } => {
                let count = group(key).map(|group| group.entered());
                peer.tell(Control::Entered { id, count });
            }
            Control::Entered { id, count } => {
                let mut probes = self.probes.lock().expect("no panic while probes are held");
                if let Some(answer) = probes.get_mut(&id) {
                    *answer = Some(count);
                    self.probe_answered.notify_all();
                }
            }
        }
    }

    /// Asks peers how many collectives of `group` they have entered. `None` for those that
    /// do not answer in time or do not know the group.
    pub(crate) fn probe(
        &self,
        group: u64,
        peers: &[&Arc<Peer>],
        wait: Duration,
    ) -> Vec<Option<u64>> {
        let deadline = Instant::now() + wait;
        let lock = || self.probes.lock().expect("no panic while probes are held");
        let ids: Vec<u64> = peers
            .iter()
            .map(|_| self.last_probe.fetch_add(1, Ordering::Relaxed))
            .collect();
        lock().extend(ids.iter().map(|&id| (id, None)));
        for (&id, peer) in ids.iter().zip(peers) {
            peer.tell(Control::Probe { id, group });
        }
        let mut probes = lock();
        while ids.iter().any(|id| probes.get(id) == Some(&None)) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            probes = self
                .probe_answered
                .wait_timeout(probes, left)
                .expect("as above")
                .0;
        }
        ids.iter()
            .map(|id| probes.remove(id).flatten().flatten())
            .collect()
    }

    pub(crate) fn add_group(&self, key: u64, group: Weak<dyn Member>) {
        self.groups
            .lock()
            .expect("no panic while groups are held")
            .insert(key, group);
    }

    pub(crate) fn remove_group(&self, key: u64) {
        self.groups
            .lock()
            .expect("no panic while groups are held")
            .remove(&key);
    }

    fn groups(&self) -> Vec<Arc<dyn Member>> {
        let groups = self.groups.lock().expect("no panic while groups are held");
        groups.values().filter_map(Weak::upgrade).collect()
    }

    /// Moves what can be moved on all links; returns whether anything did.
    pub(crate) fn poll(&self) -> bool {
        let mut moved = false;
        if self.region.mapping.inbox().is_marked() {
            let by_bit = self.by_bit.read().expect("no panic while bits are held");
            let mut ready: smallvec::SmallVec<[Arc<Peer>; 8]> = smallvec::SmallVec::new();
            self.region.mapping.inbox().take(|bit| {
                if let Some(Bit::Peer(peer)) = by_bit.get(bit as usize) {
                    ready.push(peer.clone());
                }
            });
            drop(by_bit);
            for peer in ready {
                if peer.link.progress() {
                    moved = true;
                    // A turn reads a bounded amount: there may be more.
                    if let Some((bit, _)) = peer.seat {
                        self.region.mapping.inbox().mark(bit);
                    }
                }
            }
        }
        if self.has_remote() {
            let now = self.milliseconds();
            for peer in self
                .remote
                .read()
                .expect("no panic while peers are held")
                .iter()
            {
                if peer.link.is_busy() {
                    peer.polled.store(now, Ordering::Relaxed);
                    moved |= peer.link.try_progress();
                }
            }
        }
        moved
    }

    /// Has the control thread watch the connections that a thread was polling, because
    /// that thread goes to sleep.
    pub(crate) fn watch_links(&self) {
        if self.has_remote() {
            for peer in self
                .remote
                .read()
                .expect("no panic while peers are held")
                .iter()
            {
                if peer.link.is_busy() {
                    peer.polled.store(0, Ordering::Relaxed);
                    self.control.arm(peer);
                }
            }
        }
    }

    /// Whether any peer is reached over the network.
    pub(crate) fn has_remote(&self) -> bool {
        self.has_remote.load(Ordering::Acquire)
    }

    /// Whether [`Fabric::poll`] would find something in shared memory.
    pub(crate) fn has_news(&self) -> bool {
        self.region.mapping.inbox().is_marked()
    }

    fn milliseconds(&self) -> u64 {
        self.start.elapsed().as_millis() as u64
    }

    /// Waits until what was sent has reached the peers' systems, at most `wait`.
    pub(crate) fn flush(&self, wait: Duration) {
        let deadline = Instant::now() + wait;
        let peers: Vec<Arc<Peer>> = self
            .peers
            .lock()
            .expect("no panic while peers are held")
            .values()
            .cloned()
            .collect();
        for peer in peers {
            while peer.gone().is_none() && peer.link.unsent() > 0 {
                peer.link.progress();
                if Instant::now() >= deadline {
                    return;
                }
                std::thread::sleep(Duration::from_micros(200));
            }
        }
    }
}

/// Tells the peers that this process ends in good order.
extern "C" fn say_goodbye() {
    if is_forked() {
        return;
    }
    if let Some(fabric) = Fabric::existing() {
        fabric.flush(Duration::from_secs(2));
        fabric.control.goodbye(fabric, Duration::from_millis(500));
    }
}

/// A random identity.
pub(crate) fn random() -> u128 {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).expect("the system has a source of randomness");
    u128::from_le_bytes(bytes)
}

/// A hash that is equal on all processes, unlike the standard library's.
pub(crate) fn hash(words: impl IntoIterator<Item = u64>) -> u64 {
    let mut state = 0x243f_6a88_85a3_08d3u64;
    for word in words {
        state = (state ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        state ^= state >> 29;
    }
    state.wrapping_mul(0xbf58_476d_1ce4_e5b9) ^ (state >> 32)
}

/// The words of a text, for [`hash`].
pub(crate) fn words(text: &str) -> impl Iterator<Item = u64> + '_ {
    let chunks = text.as_bytes().chunks(8).map(|chunk| {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        u64::from_le_bytes(word)
    });
    std::iter::once(text.len() as u64).chain(chunks)
}

fn machine() -> u64 {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
    let name = boot.unwrap_or_else(|_| {
        nix::unistd::gethostname()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned()
    });
    hash(words(name.trim()))
}

/// The same number for processes of one network namespace, and for no others.
fn network_namespace() -> u64 {
    namespace_cookie().unwrap_or_else(|| {
        let link = std::fs::read_link("/proc/self/ns/net").unwrap_or_default();
        hash(words(&link.to_string_lossy()))
    })
}

/// The kernel's own number for the namespace (Linux 5.14): it needs no `/proc`.
fn namespace_cookie() -> Option<u64> {
    let socket = std::net::UdpSocket::bind(("127.0.0.1", 0)).ok()?;
    let mut cookie = 0u64;
    let mut length = size_of::<u64>() as libc::socklen_t;
    // SAFETY: the option stores a u64 at the address, whose length is given.
    let status = unsafe {
        libc::getsockopt(
            std::os::fd::AsRawFd::as_raw_fd(&socket),
            libc::SOL_SOCKET,
            SO_NETNS_COOKIE,
            (&raw mut cookie).cast(),
            &mut length,
        )
    };
    (status == 0).then_some(cookie)
}

/// From the kernel's `asm-generic/socket.h`; libc lacks it.
const SO_NETNS_COOKIE: libc::c_int = 71;
