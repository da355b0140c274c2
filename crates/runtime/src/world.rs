//! How the processes of a group find each other.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use crate::fabric::{Fabric, Peer, hash, random};
use crate::wire::ProcessInfo;
use crate::{Error, GroupSpec, Store};

/// The processes of a default group, by global rank: what subgroups are made of without
/// another word between the ranks.
pub(crate) struct World {
    /// Equal on all members, and unlike that of any other world.
    pub(crate) id: u64,
    ranks: Vec<(u32, Option<Arc<Peer>>)>,
    infos: Vec<ProcessInfo>,
    /// Groups made so far under each name, so that a name can be used again.
    groups: Mutex<HashMap<u64, u64>>,
}

static CURRENT: Mutex<Weak<World>> = Mutex::new(Weak::new());

impl World {
    /// The world of the default group, if it has all of `ranks`.
    pub(crate) fn current(ranks: &[u32]) -> Option<Arc<World>> {
        let world = CURRENT
            .lock()
            .expect("no panic while it is held")
            .upgrade()?;
        let has = |rank: &u32| world.ranks.iter().any(|(other, _)| other == rank);
        ranks.iter().all(has).then_some(world)
    }

    /// Makes this the world that subgroups refer to.
    pub(crate) fn make_current(self: &Arc<World>) {
        *CURRENT.lock().expect("no panic while it is held") = Arc::downgrade(self);
    }

    /// Takes back [`World::make_current`].
    pub(crate) fn retire(self: &Arc<World>) {
        let mut current = CURRENT.lock().expect("no panic while it is held");
        if std::ptr::eq(current.as_ptr(), Arc::as_ptr(self)) {
            *current = Weak::new();
        }
    }

    /// The peers of the given global ranks; the own process is `None`.
    pub(crate) fn peers(&self, ranks: &[u32]) -> Vec<Option<Arc<Peer>>> {
        let peer = |rank: &u32| {
            let found = self.ranks.iter().find(|(other, _)| other == rank);
            found.and_then(|(_, peer)| peer.clone())
        };
        ranks.iter().map(peer).collect()
    }

    /// Whether the processes of the given global ranks all share memory.
    pub(crate) fn share_memory(&self, ranks: &[u32]) -> bool {
        let domain = |rank: &u32| {
            let at = self.ranks.iter().position(|(other, _)| other == rank);
            at.map(|at| self.infos[at].domain)
        };
        ranks
            .windows(2)
            .all(|pair| domain(&pair[0]) == domain(&pair[1]))
    }

    /// How many groups were made before under this name; counts this one.
    pub(crate) fn count_group(&self, name: u64) -> u64 {
        let mut groups = self.groups.lock().expect("no panic while it is held");
        let count = groups.entry(name).or_default();
        *count += 1;
        *count
    }

    /// Number of processes that share this one's host.
    pub(crate) fn ranks_on_host(&self, fabric: &Fabric) -> usize {
        self.infos
            .iter()
            .filter(|info| info.machine == fabric.info.machine)
            .count()
    }

    /// Host and pid of a global rank.
    pub(crate) fn place(&self, rank: u32) -> String {
        let at = self.ranks.iter().position(|(other, _)| *other == rank);
        at.map_or_else(String::new, |at| {
            format!("host {}, pid {}", self.infos[at].host, self.infos[at].pid)
        })
    }

    /// Meets the members of a group through its store: a count of how often this rank met
    /// on it before, one write, and one read of all.
    pub(crate) fn meet(
        fabric: &Arc<Fabric>,
        spec: &GroupSpec,
        store: &dyn Store,
    ) -> Result<World, Error> {
        let deadline = Instant::now() + spec.timeout;
        let mut info = fabric.info.clone();
        info.nonce = random() as u64;
        // A store may outlive a group, and then hold what its members wrote: they count their
        // lives, so that they read what belongs to this one.
        let life = store.add(&format!("tpu_dist/{}/life/{}", spec.id, spec.rank), 1)?;
        let key = |rank: u32| format!("tpu_dist/{}/{life}/{rank}", spec.id);
        let keys: Vec<String> = (0..spec.size).map(key).collect();
        store.set(&keys[spec.rank as usize], &info.encode())?;
        let values = match store.multi_get(&keys, spec.timeout) {
            Ok(values) => values,
            Err(error) => return Err(absent(spec, store, &keys, error)),
        };
        let mut infos = Vec::with_capacity(values.len());
        for (rank, value) in values.iter().enumerate() {
            let info = ProcessInfo::decode(value);
            infos.push(info.ok_or_else(|| {
                Error::Store(format!(
                    "key {} of rank {rank} holds {} bytes that are not tpu_dist's, or another version's",
                    keys[rank],
                    value.len()
                ))
            })?);
        }
        let own = |(rank, info): &(usize, &ProcessInfo)| {
            *rank != spec.rank as usize && info.process == fabric.info.process
        };
        if let Some((rank, _)) = infos.iter().enumerate().find(own) {
            return Err(Error::InvalidArgument {
                operation: "create group",
                argument: "rank",
                message: format!(
                    "expected each rank in a process of its own, got ranks {} and {rank} in process {}",
                    spec.rank, fabric.info.pid
                ),
            });
        }
        let names: Vec<String> = (0..spec.size).map(|rank| format!("rank {rank}")).collect();
        let left = deadline.saturating_duration_since(Instant::now());
        let peers = fabric.connect(
            &infos,
            &names,
            Instant::now() + left.max(Duration::from_secs(5)),
        )?;
        Ok(World {
            id: hash(infos.iter().map(|info| info.nonce)),
            ranks: spec.global_ranks.iter().copied().zip(peers).collect(),
            infos,
            groups: Mutex::default(),
        })
    }
}

/// The error for a store that did not have all members in time.
fn absent(spec: &GroupSpec, store: &dyn Store, keys: &[String], error: Error) -> Error {
    let Ok(present) = store.present(keys) else {
        return error;
    };
    let missing: Vec<u32> = (0..spec.size)
        .filter(|&rank| !present[rank as usize])
        .collect();
    if missing.is_empty() {
        return error;
    }
    Error::Timeout {
        context: format!("creating group '{}' of {} ranks", spec.name, spec.size),
        timeout: spec.timeout,
        detail: format!("missing ranks {missing:?}: they did not join"),
        missing,
    }
}
