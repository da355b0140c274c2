//! One stream of a link: frames on their way out, and the one that is coming in.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use smallvec::SmallVec;

use super::transfer::Finished;
use super::{Key, ReadPart, Stream, Transfer, WritePart};
use crate::wire::Frame;

/// What a network stream reads ahead of frames.
pub(super) const READ_AHEAD: usize = 64 << 10;
/// What a ring in shared memory does: a small message at once.
pub(super) const READ_AHEAD_IN_MEMORY: usize = 256;
/// What a network stream reads ahead of large payloads: the next heads, but little that is to be copied.
pub(super) const READ_AHEAD_OF_PAYLOADS: usize = 512;
/// Frames that one call writes, and the bytes after which no more are added.
pub(super) const BATCH: usize = 8;
pub(super) const BATCH_BYTES: usize = 128 << 10;

/// A frame being written.
pub(super) struct Outgoing {
    pub(super) head: [u8; Frame::LEN],
    /// Transfer, offset and length of the payload.
    pub(super) payload: Option<(Arc<Transfer>, usize, usize)>,
    pub(super) written: usize,
}

/// Where the payload being read goes.
pub(super) enum Sink {
    Receive {
        transfer: Arc<Transfer>,
        offset: usize,
        receive: Option<u64>,
    },
    Store {
        key: Key,
        source: u32,
        data: Vec<u8>,
    },
    Discard,
}

/// One stream of a link, with the frames it is writing and the one it is reading.
pub(super) struct Lane {
    pub(super) stream: Box<dyn Stream>,
    /// Up to [`BATCH`] frames, the first of which may have been written in part.
    pub(super) writing: VecDeque<Outgoing>,
    /// Bytes read and not yet understood: `buffer[start..end]`.
    pub(super) buffer: Box<[u8]>,
    pub(super) start: usize,
    pub(super) end: usize,
    pub(super) reading: Option<(Sink, usize)>,
}

impl Outgoing {
    fn total(&self) -> usize {
        Frame::LEN + self.payload.as_ref().map_or(0, |(_, _, bytes)| *bytes)
    }

    /// Bytes that are not yet written.
    pub(super) fn left(&self) -> usize {
        self.total() - self.written
    }

    /// An upper bound of the parts that [`Outgoing::parts`] gives.
    fn most_parts(&self) -> usize {
        let payload = self.payload.as_ref();
        1 + payload.map_or(0, |(transfer, ..)| transfer.segments.len().clamp(1, 14))
    }

    /// What is not yet written, up to 15 parts; returns the bytes they hold.
    fn parts(&self, parts: &mut SmallVec<[WritePart; 16]>) -> usize {
        static ZEROS: [u8; 16 << 10] = [0; 16 << 10];
        let head = &self.head[self.written.min(Frame::LEN)..];
        let mut held = head.len();
        if !head.is_empty() {
            parts.push(WritePart {
                ptr: head.as_ptr(),
                bytes: head.len(),
            });
        }
        if let Some((transfer, offset, bytes)) = &self.payload {
            let done = self.written.saturating_sub(Frame::LEN);
            if transfer.is_cancelled() {
                let bytes = (bytes - done).min(ZEROS.len());
                parts.push(WritePart {
                    ptr: ZEROS.as_ptr(),
                    bytes,
                });
                held += bytes;
            } else {
                transfer.parts(offset + done, bytes - done, |ptr, bytes| {
                    parts.push(WritePart { ptr, bytes });
                    held += bytes;
                });
            }
        }
        held
    }
}

impl Lane {
    /// Writes on in one call; returns the bytes written, and those there were to write.
    pub(super) fn write(&mut self, finished: &mut Finished) -> io::Result<(usize, usize)> {
        let mut parts: SmallVec<[WritePart; 16]> = SmallVec::new();
        let mut offered = 0;
        for (index, outgoing) in self.writing.iter().enumerate() {
            // A frame has up to 15 parts; the first always goes, whatever it has.
            if index > 0 && parts.len() + outgoing.most_parts() > parts.inline_size() {
                break;
            }
            let held = outgoing.parts(&mut parts);
            offered += held;
            if held < outgoing.left() {
                break;
            }
        }
        let written = self.stream.write(&parts)?;
        let mut left = written;
        while left > 0 {
            let outgoing = self.writing.front_mut().expect("only these were written");
            let step = left.min(outgoing.left());
            outgoing.written += step;
            left -= step;
            if outgoing.left() > 0 {
                break;
            }
            let payload = self.writing.pop_front().and_then(|done| done.payload);
            if let Some((transfer, _, bytes)) = payload
                && transfer.left.fetch_sub(bytes, Ordering::Relaxed) == bytes
            {
                finished.add(transfer, Ok(()));
            }
        }
        Ok((written, offered))
    }

    /// Reads what has come: first the payload that is awaited, then at most `most` bytes ahead.
    /// Returns the bytes read, and those there was room for.
    pub(super) fn fill(&mut self, most: usize) -> io::Result<(usize, usize)> {
        let mut parts: SmallVec<[ReadPart; 16]> = SmallVec::new();
        let mut sink_bytes = 0;
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
            if let Some((sink, left)) = &mut self.reading {
                sink.parts(*left, |ptr, bytes| {
                    parts.push(ReadPart { ptr, bytes });
                    sink_bytes += bytes;
                });
                // The next head may only be read once all of this payload is placed.
                if sink_bytes < *left && sink_bytes > 0 {
                    let read = self.stream.read(&parts)?;
                    self.advance(read);
                    return Ok((read, sink_bytes));
                }
            }
        } else if self.start > 0 {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        let end = self.buffer.len().min(self.end.max(most));
        let ahead = &mut self.buffer[self.end..end];
        let room = sink_bytes + ahead.len();
        if !ahead.is_empty() {
            parts.push(ReadPart {
                ptr: ahead.as_mut_ptr(),
                bytes: ahead.len(),
            });
        }
        let read = self.stream.read(&parts)?;
        let placed = read.min(sink_bytes);
        self.advance(placed);
        self.end += read - placed;
        Ok((read, room))
    }

    /// Moves read-ahead bytes to the payload that is awaited.
    pub(super) fn drain_buffer(&mut self) {
        let Some((sink, left)) = &mut self.reading else {
            return;
        };
        let available = (self.end - self.start).min(*left);
        let source = self.buffer[self.start..].as_ptr();
        let mut moved = 0;
        sink.parts(available, |ptr, bytes| {
            // SAFETY: the sink's parts are writable and hold at most `available` bytes, all of
            // which lie in the buffer.
            unsafe { ptr.copy_from_nonoverlapping(source.add(moved), bytes) };
            moved += bytes;
        });
        if moved == 0 {
            moved = available;
        }
        self.start += moved;
        self.advance(moved);
    }

    /// Counts `bytes` of the awaited payload as placed.
    pub(super) fn advance(&mut self, bytes: usize) {
        if let Some((sink, left)) = &mut self.reading {
            *left -= bytes;
            match sink {
                Sink::Receive {
                    transfer, offset, ..
                } => {
                    *offset += bytes;
                    transfer.left.fetch_sub(bytes, Ordering::Relaxed);
                }
                Sink::Store { data, .. } => {
                    // SAFETY: the capacity was reserved for the whole payload, and `parts`
                    // handed out exactly the bytes after the length.
                    unsafe { data.set_len(data.len() + bytes) };
                }
                Sink::Discard => {}
            }
        }
    }
}

impl Sink {
    /// Memory for the next `bytes` of payload. None for what is discarded: it goes
    /// through the read-ahead buffer.
    pub(super) fn parts(&mut self, bytes: usize, mut visit: impl FnMut(*mut u8, usize)) {
        match self {
            Sink::Receive {
                transfer, offset, ..
            } => {
                if !transfer.is_cancelled() {
                    transfer.parts(*offset, bytes, visit);
                }
            }
            Sink::Store { data, .. } => {
                visit(data.spare_capacity_mut().as_mut_ptr().cast(), bytes);
            }
            Sink::Discard => {}
        }
    }
}
