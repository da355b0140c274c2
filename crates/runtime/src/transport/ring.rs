//! A byte stream from one process to another through shared memory.
//!
//! One producer, one consumer. The ring lies in the consumer's region. `head` counts
//! bytes written, `tail` bytes read; both only grow.

#[cfg(tpu_dist_loom)]
use loom::sync::atomic::{AtomicU64, Ordering, fence};
#[cfg(not(tpu_dist_loom))]
use std::sync::atomic::{AtomicU64, Ordering, fence};

use std::ptr::NonNull;

use crossbeam::utils::CachePadded;

/// Bytes of data that a ring holds; a power of two.
pub(crate) const RING_BYTES: usize = 512 << 10;

/// The shared counters of a ring; `RING_BYTES` of data follow them.
#[repr(C, align(128))]
pub(crate) struct Counters {
    head: CachePadded<AtomicU64>,
    tail: CachePadded<AtomicU64>,
    /// 1 while the producer waits for space.
    blocked: CachePadded<AtomicU64>,
    /// Messages that the consumer may read from the producer's memory, by number modulo
    /// [`OFFERS`]; 0 for none.
    offers: [AtomicU64; OFFERS],
}

/// Messages that a producer can leave in its memory at a time.
const OFFERS: usize = 64;

/// Bytes of shared memory that a ring takes.
pub(crate) const RING_FOOTPRINT: usize = size_of::<Counters>() + RING_BYTES;

/// The part of a ring protocol that both ends share.
struct End {
    counters: NonNull<Counters>,
    data: NonNull<u8>,
    capacity: usize,
}

// SAFETY: an end points into a mapping that its owner keeps alive, and reaches it
// through atomics and through ranges that the counters grant to it alone.
unsafe impl Send for End {}

impl End {
    /// # Safety
    /// `memory` holds [`RING_FOOTPRINT`] bytes, 128-aligned, zeroed before first use, that
    /// outlive the end.
    unsafe fn new(memory: NonNull<u8>) -> End {
        // SAFETY: inside the memory the caller vouches for.
        let data = unsafe { memory.add(size_of::<Counters>()) };
        End {
            counters: memory.cast(),
            data,
            capacity: RING_BYTES,
        }
    }

    fn head(&self) -> &AtomicU64 {
        // SAFETY: valid for the end's life; accessed by atomics alone.
        unsafe { &self.counters.as_ref().head }
    }

    fn tail(&self) -> &AtomicU64 {
        // SAFETY: as above.
        unsafe { &self.counters.as_ref().tail }
    }

    fn blocked(&self) -> &AtomicU64 {
        // SAFETY: as above.
        unsafe { &self.counters.as_ref().blocked }
    }

    fn offer(&self, id: u64) -> &AtomicU64 {
        // SAFETY: as above.
        unsafe { &self.counters.as_ref().offers[id as usize % OFFERS] }
    }

    /// The contiguous part of `[position, position + bytes)` and where it lies.
    fn range(&self, position: u64, bytes: usize) -> (NonNull<u8>, usize) {
        let start = position as usize % self.capacity;
        // SAFETY: `start` is below the capacity.
        (
            unsafe { self.data.add(start) },
            bytes.min(self.capacity - start),
        )
    }
}

/// The writing end.
pub(crate) struct Producer {
    end: End,
    head: u64,
}

impl Producer {
    /// # Safety
    /// `memory` is a ring's, as [`RING_FOOTPRINT`] says, and has no other producer.
    pub(crate) unsafe fn new(memory: NonNull<u8>) -> Producer {
        // SAFETY: passed on.
        let end = unsafe { End::new(memory) };
        let head = end.head().load(Ordering::Relaxed);
        Producer { end, head }
    }

    /// Writes what fits of `bytes` bytes at `source`; returns how many. They are visible to
    /// the consumer after [`Producer::commit`].
    ///
    /// # Safety
    /// `source` is readable for `bytes` bytes.
    pub(crate) unsafe fn write(&mut self, source: *const u8, bytes: usize) -> usize {
        let mut space = self.space();
        if space < bytes {
            // Either this second look sees what the consumer freed, or the consumer's look
            // at `blocked` sees the mark: both store before they load.
            self.end.blocked().store(1, Ordering::Relaxed);
            fence(Ordering::SeqCst);
            space = self.space();
        }
        let bytes = bytes.min(space);
        let mut written = 0;
        while written < bytes {
            let (to, count) = self.end.range(self.head + written as u64, bytes - written);
            // SAFETY: the bytes between head and tail + capacity are the producer's.
            unsafe { std::ptr::copy_nonoverlapping(source.add(written), to.as_ptr(), count) };
            written += count;
        }
        self.head += written as u64;
        written
    }

    fn space(&self) -> usize {
        let tail = self.end.tail().load(Ordering::Acquire);
        let used = self.head.wrapping_sub(tail) as usize;
        // A consumer that misbehaves can only make the ring look full.
        self.end.capacity.saturating_sub(used)
    }

    /// Lets the consumer read message `id`, not 0, where it lies; false: as many others are.
    pub(crate) fn offer(&self, id: u64) -> bool {
        let word = self.end.offer(id);
        let free = word.load(Ordering::Relaxed) == 0;
        if free {
            word.store(id, Ordering::Release);
        }
        free
    }

    /// Ends that. Whatever is written to the message's memory afterwards, a consumer that reads it
    /// finds the message [withdrawn](Consumer::is_offered).
    pub(crate) fn withdraw(&self, id: u64) {
        let word = self.end.offer(id);
        if word.load(Ordering::Relaxed) == id {
            word.store(0, Ordering::Relaxed);
            fence(Ordering::SeqCst);
        }
    }

    /// Shows the consumer what was written.
    pub(crate) fn commit(&self) {
        self.end.head().store(self.head, Ordering::Release);
    }
}

/// The reading end.
pub(crate) struct Consumer {
    end: End,
    tail: u64,
}

impl Consumer {
    /// # Safety
    /// `memory` is a ring's, as [`RING_FOOTPRINT`] says, and has no other consumer.
    pub(crate) unsafe fn new(memory: NonNull<u8>) -> Consumer {
        // SAFETY: passed on.
        let end = unsafe { End::new(memory) };
        let tail = end.tail().load(Ordering::Relaxed);
        Consumer { end, tail }
    }

    /// Bytes that can be read.
    pub(crate) fn available(&self) -> usize {
        let head = self.end.head().load(Ordering::Acquire);
        // A producer that misbehaves can at most have us read what lies in the ring.
        (head.wrapping_sub(self.tail) as usize).min(self.end.capacity)
    }

    /// Reads up to `bytes` bytes into `target`; returns how many. The space is the
    /// producer's again after [`Consumer::commit`].
    ///
    /// # Safety
    /// `target` is writable for `bytes` bytes.
    pub(crate) unsafe fn read(&mut self, target: *mut u8, bytes: usize) -> usize {
        let bytes = bytes.min(self.available());
        let mut read = 0;
        while read < bytes {
            let (from, count) = self.end.range(self.tail + read as u64, bytes - read);
            // SAFETY: the bytes between tail and head are the consumer's.
            unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), target.add(read), count) };
            read += count;
        }
        self.tail += read as u64;
        read
    }

    /// Whether what was read of message `id` before this call was the message.
    pub(crate) fn is_offered(&self, id: u64) -> bool {
        fence(Ordering::SeqCst);
        self.end.offer(id).load(Ordering::Relaxed) == id
    }

    /// Gives back the space of what was read. Returns whether the producer waits for it.
    pub(crate) fn commit(&self) -> bool {
        if self.end.tail().load(Ordering::Relaxed) == self.tail {
            return false;
        }
        self.end.tail().store(self.tail, Ordering::Release);
        fence(Ordering::SeqCst);
        self.end.blocked().load(Ordering::Relaxed) != 0
            && self.end.blocked().swap(0, Ordering::Relaxed) != 0
    }
}

#[cfg(all(test, tpu_dist_loom))]
mod loom_tests {
    use super::*;

    fn counters() -> Counters {
        let line = || CachePadded::new(AtomicU64::new(0));
        Counters {
            head: line(),
            tail: line(),
            blocked: line(),
            offers: std::array::from_fn(|_| AtomicU64::new(0)),
        }
    }

    fn end(counters: &Counters, data: NonNull<u8>) -> End {
        End {
            counters: NonNull::from(counters),
            data,
            capacity: 1,
        }
    }

    /// Who reads a message after its memory was used for something else knows it.
    #[test]
    fn a_withdrawn_message_is_not_taken_for_one() {
        loom::model(|| {
            let shared = loom::sync::Arc::new((counters(), AtomicU64::new(7)));
            let at = |counters| end(counters, NonNull::dangling());
            let producer = Producer {
                end: at(&shared.0),
                head: 0,
            };
            let consumer = Consumer {
                end: at(&shared.0),
                tail: 0,
            };
            assert!(producer.offer(1));
            let reader = {
                let shared = shared.clone();
                loom::thread::spawn(move || {
                    let message = shared.1.load(Ordering::Relaxed);
                    assert!(message == 7 || !consumer.is_offered(1));
                })
            };
            producer.withdraw(1);
            shared.1.store(8, Ordering::Relaxed);
            reader.join().unwrap();
        });
    }

    /// Whatever the interleaving, the bytes arrive in order, and a producer that found
    /// the ring full is told when there is space: otherwise its loop would never end.
    #[test]
    fn a_blocked_producer_is_always_told() {
        struct Memory(Counters, std::cell::UnsafeCell<u8>);
        // SAFETY: the byte is only reached through the ring protocol.
        unsafe impl Sync for Memory {}
        // SAFETY: as above.
        unsafe impl Send for Memory {}
        let mut model = loom::model::Builder::new();
        model.max_branches = 20_000;
        model.check(|| {
            let memory = loom::sync::Arc::new(Memory(counters(), std::cell::UnsafeCell::new(0)));
            let end = || end(&memory.0, NonNull::new(memory.1.get()).unwrap());
            let mut producer = Producer {
                end: end(),
                head: 0,
            };
            let mut consumer = Consumer {
                end: end(),
                tail: 0,
            };
            let told = loom::sync::Arc::new(loom::sync::Notify::new());
            let (teller, keep) = (told.clone(), memory.clone());
            let data = [1u8, 2];
            // SAFETY: inside `data`.
            assert_eq!(unsafe { producer.write(data.as_ptr(), 2) }, 1);
            producer.commit();
            let reader = loom::thread::spawn(move || {
                let mut byte = 0;
                // SAFETY: one byte of room; the first byte is there.
                assert_eq!(unsafe { consumer.read(&mut byte, 1) }, 1);
                assert_eq!(byte, 1);
                if consumer.commit() {
                    teller.notify();
                }
                (consumer, keep)
            });
            // SAFETY: inside `data`.
            while unsafe { producer.write(data[1..].as_ptr(), 1) } == 0 {
                // May wake for nothing, but not for ever: loom would find the deadlock.
                told.wait();
            }
            producer.commit();
            let (mut consumer, _keep) = reader.join().unwrap();
            let mut byte = 0;
            // SAFETY: one byte of room.
            assert_eq!(unsafe { consumer.read(&mut byte, 1) }, 1);
            assert_eq!(byte, 2);
        });
    }
}

#[cfg(all(test, not(tpu_dist_loom)))]
mod tests {
    use super::*;

    fn memory() -> (Vec<u128>, NonNull<u8>) {
        let mut memory = vec![0u128; RING_FOOTPRINT / 16 + 16];
        let start = memory.as_mut_ptr().cast::<u8>();
        let aligned = start.wrapping_add(start.align_offset(128));
        (memory, NonNull::new(aligned).unwrap())
    }

    #[test]
    fn bytes_arrive_in_order_across_the_end() {
        let (_keep, at) = memory();
        // SAFETY: zeroed, aligned, large enough, one end of each kind.
        let (mut producer, mut consumer) = unsafe { (Producer::new(at), Consumer::new(at)) };
        let reader = std::thread::spawn(move || {
            let mut next = 0u32;
            let mut buffer = vec![0u8; 77_777];
            let mut kept = Vec::new();
            while next < 1_000_000 {
                // SAFETY: the buffer is that long.
                let count = unsafe { consumer.read(buffer.as_mut_ptr(), buffer.len()) };
                consumer.commit();
                kept.extend_from_slice(&buffer[..count]);
                let whole = kept.len() / 4 * 4;
                for word in kept.drain(..whole).as_slice().chunks_exact(4) {
                    assert_eq!(u32::from_le_bytes(word.try_into().unwrap()), next);
                    next += 1;
                }
            }
        });
        let data: Vec<u8> = (0..1_000_000u32).flat_map(u32::to_le_bytes).collect();
        let mut sent = 0;
        while sent < data.len() {
            let count = (data.len() - sent).min(300_001);
            // SAFETY: inside `data`.
            sent += unsafe { producer.write(data[sent..].as_ptr(), count) };
            producer.commit();
        }
        reader.join().unwrap();
    }

    #[test]
    fn a_place_holds_one_offer() {
        let (_keep, at) = memory();
        // SAFETY: as above.
        let (producer, consumer) = unsafe { (Producer::new(at), Consumer::new(at)) };
        let other = 5 + OFFERS as u64;
        assert!(producer.offer(5));
        assert!(!producer.offer(other));
        producer.withdraw(other);
        assert!(consumer.is_offered(5) && !consumer.is_offered(other));
        producer.withdraw(5);
        assert!(!consumer.is_offered(5));
        assert!(producer.offer(other));
    }

    #[test]
    fn a_full_ring_takes_no_more() {
        let (_keep, at) = memory();
        // SAFETY: as above.
        let (mut producer, mut consumer) = unsafe { (Producer::new(at), Consumer::new(at)) };
        let data = vec![1u8; RING_BYTES + 5];
        // SAFETY: inside `data`.
        let written = unsafe { producer.write(data.as_ptr(), data.len()) };
        assert_eq!(written, RING_BYTES);
        // SAFETY: inside `data`.
        assert_eq!(unsafe { producer.write(data.as_ptr(), 1) }, 0);
        assert_eq!(consumer.available(), 0, "not yet shown");
        producer.commit();
        let mut out = [0u8; 3];
        // SAFETY: inside `out`.
        assert_eq!(unsafe { consumer.read(out.as_mut_ptr(), 3) }, 3);
        assert!(consumer.commit(), "the producer had found it full");
        // SAFETY: inside `data`.
        assert_eq!(unsafe { producer.write(data.as_ptr(), 9) }, 3);
    }
}
