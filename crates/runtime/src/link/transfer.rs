//! One message on its way.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use smallvec::SmallVec;

use super::EAGER_BYTES;
use crate::call::Segment;

/// How a message did not arrive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum LinkError {
    /// The connection is gone.
    Closed(String),
    /// Sender and receiver disagree about the size.
    Size { sent: u64, expected: u64 },
    /// The other side, or this one, gave up.
    Cancelled,
}

type Notify = Box<dyn Fn(&Transfer) + Send + Sync>;

/// A message on its way: the memory it comes from or goes to.
pub(crate) struct Transfer {
    pub(super) segments: SmallVec<[Segment; 2]>,
    pub(super) bytes: usize,
    /// Whether a received message must have exactly this many bytes, or may have fewer.
    exact: bool,
    /// Bytes not yet written (sender) or read (receiver).
    pub(super) left: AtomicUsize,
    state: AtomicU8,
    error: OnceLock<LinkError>,
    /// Set under the lock of the link, which alone touches the memory: once it is set,
    /// nobody does.
    pub(super) cancelled: AtomicBool,
    pub(super) source: AtomicU32,
    /// Order of posting, between receives from one and from any source.
    pub(super) ticket: u64,
    notify: Option<Notify>,
}

const PENDING: u8 = 0;
const DONE: u8 = 1;
const FAILED: u8 = 2;

impl Transfer {
    /// # Safety
    /// The segments stay valid, and unused by others, until the transfer is finished or
    /// [`Link::cancel`](super::Link::cancel) has returned.
    pub(crate) unsafe fn new(segments: &[Segment], notify: Option<Notify>) -> Arc<Transfer> {
        static TICKET: AtomicU64 = AtomicU64::new(0);
        let bytes = segments.iter().map(|segment| segment.bytes).sum();
        Arc::new(Transfer {
            segments: segments
                .iter()
                .filter(|segment| segment.bytes > 0)
                .copied()
                .collect(),
            bytes,
            exact: true,
            left: AtomicUsize::new(bytes),
            state: AtomicU8::new(PENDING),
            error: OnceLock::new(),
            cancelled: AtomicBool::new(false),
            source: AtomicU32::new(u32::MAX),
            ticket: TICKET.fetch_add(1, Ordering::Relaxed),
            notify,
        })
    }

    /// A receive of an eager message of any size up to that of the segments.
    ///
    /// # Safety
    /// As [`Transfer::new`].
    pub(crate) unsafe fn up_to(segments: &[Segment]) -> Arc<Transfer> {
        // SAFETY: passed on.
        let mut transfer = unsafe { Transfer::new(segments, None) };
        debug_assert!(transfer.bytes <= EAGER_BYTES);
        Arc::get_mut(&mut transfer).expect("not shared yet").exact = false;
        transfer
    }

    /// Bytes that have come.
    pub(crate) fn received(&self) -> usize {
        self.bytes - self.left.load(Ordering::Acquire)
    }

    /// `None` while it is on its way.
    pub(crate) fn result(&self) -> Option<Result<(), LinkError>> {
        match self.state.load(Ordering::Acquire) {
            PENDING => None,
            DONE => Some(Ok(())),
            _ => Some(Err(self
                .error
                .get()
                .cloned()
                .unwrap_or(LinkError::Cancelled))),
        }
    }

    /// Whether a message of `sent` bytes is what is expected.
    pub(super) fn fits(&self, sent: u64) -> Result<(), LinkError> {
        let expected = self.bytes as u64;
        if sent == expected || (!self.exact && sent < expected) {
            Ok(())
        } else {
            Err(LinkError::Size { sent, expected })
        }
    }

    /// Group rank of the sender, once matched.
    pub(crate) fn source(&self) -> Option<u32> {
        Some(self.source.load(Ordering::Acquire)).filter(|&source| source != u32::MAX)
    }

    /// The memory at `[offset, offset + bytes)`, as parts, up to 14 of them; returns the
    /// bytes they hold.
    pub(super) fn parts(&self, offset: usize, bytes: usize, mut visit: impl FnMut(*mut u8, usize)) {
        let mut skip = offset;
        let mut left = bytes;
        let mut count = 0;
        for segment in &self.segments {
            if skip >= segment.bytes {
                skip -= segment.bytes;
                continue;
            }
            let take = (segment.bytes - skip).min(left);
            if take == 0 || count == 14 {
                break;
            }
            visit(segment.ptr.wrapping_add(skip), take);
            left -= take;
            skip = 0;
            count += 1;
        }
    }

    pub(super) fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }
}

/// Transfers that ended while a link was locked; told after it is unlocked.
#[derive(Default)]
pub(super) struct Finished(SmallVec<[Arc<Transfer>; 4]>);

impl Finished {
    pub(super) fn add(&mut self, transfer: Arc<Transfer>, result: Result<(), LinkError>) {
        if transfer.state.load(Ordering::Relaxed) != PENDING {
            return;
        }
        match result {
            Ok(()) => transfer.state.store(DONE, Ordering::Release),
            Err(error) => {
                let _ = transfer.error.set(error);
                transfer.state.store(FAILED, Ordering::Release);
            }
        }
        self.0.push(transfer);
    }

    pub(super) fn tell(self) {
        for transfer in self.0 {
            if let Some(notify) = &transfer.notify {
                notify(&transfer);
            }
        }
    }
}
