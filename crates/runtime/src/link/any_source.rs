//! Receives from any source.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use foldhash::HashMap;

use super::transfer::Finished;
use super::{Key, Link, LinkError, Transfer};

/// Receives that take a message from any member of their group.
#[derive(Default)]
pub(crate) struct AnySource {
    count: AtomicUsize,
    posted: Mutex<HashMap<Key, VecDeque<Arc<Transfer>>>>,
}

impl AnySource {
    fn lock(&self) -> MutexGuard<'_, HashMap<Key, VecDeque<Arc<Transfer>>>> {
        self.posted
            .lock()
            .expect("no panic while the table is held")
    }

    /// Takes the first receive for `key`, if it was posted before `ticket`.
    pub(super) fn take(&self, key: &Key, ticket: u64) -> Option<Arc<Transfer>> {
        if self.count.load(Ordering::Acquire) == 0 {
            return None;
        }
        let mut posted = self.lock();
        let queue = posted.get_mut(key)?;
        if queue.front()?.ticket > ticket {
            return None;
        }
        let transfer = queue.pop_front();
        if queue.is_empty() {
            posted.remove(key);
        }
        self.count.fetch_sub(1, Ordering::Release);
        transfer
    }

    /// Posts a receive, then looks for a message that came before it.
    pub(crate) fn post<'a>(
        &self,
        key: Key,
        transfer: Arc<Transfer>,
        links: impl Iterator<Item = &'a Link>,
    ) {
        self.lock().entry(key).or_default().push_back(transfer);
        self.count.fetch_add(1, Ordering::Release);
        for link in links {
            link.offer_to_any(&key);
        }
    }

    /// Takes back a receive that found no message. False: a link has it already.
    pub(crate) fn cancel(&self, key: &Key, transfer: &Arc<Transfer>) -> bool {
        let mut posted = self.lock();
        let Some(queue) = posted.get_mut(key) else {
            return false;
        };
        let before = queue.len();
        queue.retain(|other| !Arc::ptr_eq(other, transfer));
        let removed = queue.len() < before;
        if queue.is_empty() {
            posted.remove(key);
        }
        if removed {
            self.count.fetch_sub(1, Ordering::Release);
            let mut finished = Finished::default();
            finished.add(transfer.clone(), Err(LinkError::Cancelled));
            finished.tell();
        }
        removed
    }
}
