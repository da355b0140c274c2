//! A pair of rings in shared memory, as the byte stream of a link.

use std::io;
use std::sync::Arc;

use super::peer_memory::PeerMemory;
use super::region::{Mapping, OwnRegion};
use super::ring::{Consumer, Producer};
use crate::link::{Pulled, ReadPart, Stream, WritePart};
use crate::sync::publish_fence;

/// What is written before the peer is shown it, so that it reads while the next is written.
const CHUNK_BYTES: usize = 8 << 10;

/// The rings between this process and a peer on the same host.
pub(crate) struct Shm {
    producer: Producer,
    consumer: Consumer,
    peer: Arc<Mapping>,
    /// The rest of its memory, if it can be read.
    memory: Option<PeerMemory>,
    /// This process's bit in the peer's inbox.
    bit: u32,
    /// Keeps the incoming ring's memory.
    _own: Arc<OwnRegion>,
}

impl Shm {
    pub(crate) fn new(
        producer: Producer,
        consumer: Consumer,
        peer: Arc<Mapping>,
        memory: Option<PeerMemory>,
        bit: u32,
        own: Arc<OwnRegion>,
    ) -> Shm {
        Shm {
            producer,
            consumer,
            peer,
            memory,
            bit,
            _own: own,
        }
    }

    fn notify(&self) {
        self.peer.inbox().mark(self.bit);
        publish_fence();
        self.peer.doorbell().ring();
    }
}

impl Stream for Shm {
    fn write(&mut self, parts: &[WritePart]) -> io::Result<usize> {
        let mut total = 0;
        let mut shown = 0;
        'parts: for part in parts {
            for start in (0..part.bytes).step_by(CHUNK_BYTES) {
                if total - shown >= CHUNK_BYTES {
                    self.producer.commit();
                    self.notify();
                    shown = total;
                }
                let bytes = CHUNK_BYTES.min(part.bytes - start);
                // SAFETY: a part is readable memory for the time of the call.
                let written = unsafe { self.producer.write(part.ptr.add(start), bytes) };
                total += written;
                if written < bytes {
                    break 'parts;
                }
            }
        }
        if total > shown {
            self.producer.commit();
            self.notify();
        }
        Ok(total)
    }

    fn read(&mut self, parts: &[ReadPart]) -> io::Result<usize> {
        let mut total = 0;
        for part in parts {
            // SAFETY: a part is writable memory for the time of the call.
            let read = unsafe { self.consumer.read(part.ptr, part.bytes) };
            total += read;
            if read < part.bytes {
                break;
            }
        }
        if self.consumer.commit() {
            self.notify();
        }
        Ok(total)
    }

    fn offer(&self, id: u64) -> bool {
        self.producer.offer(id)
    }

    fn withdraw(&self, id: u64) {
        self.producer.withdraw(id);
    }

    unsafe fn pull(&mut self, id: u64, to: &[ReadPart], from: u64) -> Pulled {
        let Some(memory) = &self.memory else {
            return Pulled::Impossible;
        };
        // SAFETY: the caller vouches for the parts.
        match unsafe { memory.read(to, from) } {
            Ok(()) if self.consumer.is_offered(id) => Pulled::Done,
            Ok(()) => Pulled::Withdrawn,
            Err(_) => Pulled::Impossible,
        }
    }
}
