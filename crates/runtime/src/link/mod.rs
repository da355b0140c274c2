//! Messages between two processes, over any byte stream.
//!
//! A [`Link`] matches messages first in, first out by ([`Class`], group, channel). Small
//! ones go out at once ([`FrameKind::Eager`]) and wait in memory when nobody has asked
//! for them, up to a credit; large ones wait at the sender until the receiver has
//! named a place for them. So a message that nobody receives never blocks another
//! one, and memory stays bounded. Nobody owns a link's progress: whoever waits calls
//! [`Link::progress`].

mod any_source;
mod lane;
mod stream;
mod transfer;

use std::collections::VecDeque;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use foldhash::HashMap;
use smallvec::SmallVec;

use crate::wire::{Class, Frame, FrameKind};
pub(crate) use any_source::AnySource;
use lane::{
    BATCH, BATCH_BYTES, Lane, Outgoing, READ_AHEAD, READ_AHEAD_IN_MEMORY, READ_AHEAD_OF_PAYLOADS,
    Sink,
};
pub(crate) use stream::{Pulled, ReadPart, Stream, WritePart};
use transfer::Finished;
pub(crate) use transfer::{LinkError, Transfer};

/// Largest message that goes out before anyone asked for it.
pub(crate) const EAGER_BYTES: usize = 64 << 10;
/// Largest message that the receiver reads from the sender's memory. Through a ring, what is
/// larger moves as fast, and others get their turn in between.
const PULL_BYTES: usize = 1 << 20;
/// Eager bytes that may wait unasked-for at a peer.
const CREDIT_BYTES: usize = 4 << 20;
/// Largest part of a large message in one frame: others get their turn in between.
const FRAGMENT_BYTES: usize = 256 << 10;

/// Which messages match.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Key {
    pub(crate) class: Class,
    pub(crate) group: u64,
    pub(crate) channel: u64,
}

/// A message that came before its receive.
enum Unexpected {
    Eager { source: u32, data: Vec<u8> },
    Offer(Offer),
}

/// A large message that waits at its sender.
#[derive(Clone, Copy)]
struct Offer {
    source: u32,
    id: u64,
    bytes: u64,
    /// In the sender's memory; 0 if it is not to be read there.
    address: u64,
}

/// A large message whose receiver is ready.
struct Sending {
    transfer: Arc<Transfer>,
    receive: u64,
    next: usize,
}

#[derive(Default)]
struct Inner {
    lanes: Vec<Lane>,
    /// Frames to write, in order, on the first stream.
    frames: VecDeque<Outgoing>,
    /// Large messages to write, in turns, on any stream.
    sending: VecDeque<Sending>,
    posted: HashMap<Key, VecDeque<Arc<Transfer>>>,
    unexpected: HashMap<Key, VecDeque<Unexpected>>,
    /// Sends that wait for the answer to their offer.
    offered: HashMap<u64, Arc<Transfer>>,
    /// Large collective sends that wait for their receiver, and receivers that wait for
    /// their send.
    awaiting: HashMap<Key, VecDeque<Arc<Transfer>>>,
    ready: HashMap<Key, VecDeque<u64>>,
    receiving: HashMap<u64, Arc<Transfer>>,
    last_id: u64,
    eager_unacknowledged: usize,
    eager_consumed: usize,
    stored: usize,
    closed: Option<String>,
}

/// How a message is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// By size and credit.
    PointToPoint,
    /// Both sides know the size: at most [`EAGER_BYTES`] go at once, more when the receiver
    /// says it is ready, without an offer.
    Collective,
}

/// All messages between this process and one peer.
pub(crate) struct Link {
    inner: Mutex<Inner>,
    any: Arc<AnySource>,
    /// Whether a transfer or frame waits for the other side.
    busy: AtomicBool,
}

impl Link {
    pub(crate) fn new(any: Arc<AnySource>) -> Link {
        Link {
            inner: Mutex::default(),
            any,
            busy: AtomicBool::new(false),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().expect("no panic while a link is held")
    }

    /// Adds a stream. Frames that keep order use the first one.
    pub(crate) fn add_stream(&self, stream: Box<dyn Stream>) {
        let ahead = if stream.fd().is_some() {
            READ_AHEAD
        } else {
            READ_AHEAD_IN_MEMORY
        };
        self.lock().lanes.push(Lane {
            stream,
            writing: VecDeque::with_capacity(BATCH),
            buffer: vec![0; ahead].into_boxed_slice(),
            start: 0,
            end: 0,
            reading: None,
        });
    }

    /// Whether anything waits for the other side.
    pub(crate) fn is_busy(&self) -> bool {
        self.busy.load(Ordering::Relaxed)
    }

    /// Calls `visit` with the descriptor of each stream, and whether it waits to write.
    pub(crate) fn descriptors(&self, mut visit: impl FnMut(BorrowedFd<'_>, bool)) {
        for lane in &self.lock().lanes {
            if let Some(fd) = lane.stream.fd() {
                visit(fd, !lane.writing.is_empty());
            }
        }
    }

    /// Bytes that would be lost if the process ended now.
    pub(crate) fn unsent(&self) -> usize {
        let inner = self.lock();
        if inner.closed.is_some() {
            return 0;
        }
        let queued = inner.frames.len() + inner.sending.len();
        let lanes = inner.lanes.iter();
        let unsent = lanes.map(|lane| lane.stream.unsent() + lane.writing.len());
        queued + unsent.sum::<usize>()
    }

    /// Starts a send.
    pub(crate) fn send(&self, key: Key, source: u32, transfer: Arc<Transfer>, mode: Mode) {
        let mut finished = Finished::default();
        {
            let mut inner = self.lock();
            inner.send(key, source, transfer, mode, &mut finished);
            inner.turn(self, &mut finished);
        }
        finished.tell();
    }

    /// Posts a receive. That of a collective moves nothing yet on a connection: whoever runs one
    /// sends or polls next, and what there is to say goes out with that.
    pub(crate) fn receive(&self, key: Key, source: u32, transfer: Arc<Transfer>, mode: Mode) {
        let mut finished = Finished::default();
        {
            let mut inner = self.lock();
            inner.receive(key, source, transfer, mode, &mut finished);
            // Rings are polled only when the peer says that it has moved.
            let polled = inner.lanes.iter().any(|lane| lane.stream.fd().is_some());
            if mode == Mode::Collective && polled {
                self.busy.store(true, Ordering::Relaxed);
            } else {
                inner.turn(self, &mut finished);
            }
        }
        finished.tell();
    }

    /// Hands a waiting message for `key` to a receive from any source.
    fn offer_to_any(&self, key: &Key) {
        let mut finished = Finished::default();
        {
            let mut inner = self.lock();
            if inner.unexpected.contains_key(key)
                && let Some(transfer) = self.any.take(key, u64::MAX)
            {
                inner.match_unexpected(key, transfer, &mut finished);
                inner.turn(self, &mut finished);
            }
        }
        finished.tell();
    }

    /// Writes and reads what can be; returns whether anything moved.
    pub(crate) fn progress(&self) -> bool {
        let mut finished = Finished::default();
        let moved = self.lock().turn(self, &mut finished);
        finished.tell();
        moved
    }

    /// As [`Link::progress`], unless another thread is at it.
    pub(crate) fn try_progress(&self) -> bool {
        let mut finished = Finished::default();
        let Ok(mut inner) = self.inner.try_lock() else {
            return false;
        };
        let moved = inner.turn(self, &mut finished);
        drop(inner);
        finished.tell();
        moved
    }

    /// Gives up a transfer: when this returns, its memory is not touched any more.
    pub(crate) fn cancel(&self, transfer: &Arc<Transfer>) {
        let mut finished = Finished::default();
        {
            let mut inner = self.lock();
            if transfer.result().is_none() {
                inner.cancel(transfer);
                finished.add(transfer.clone(), Err(LinkError::Cancelled));
            }
            inner.turn(self, &mut finished);
        }
        finished.tell();
    }

    /// Forgets what waits for a group that is gone.
    pub(crate) fn forget_group(&self, group: u64) {
        let mut inner = self.lock();
        let mut consumed = 0;
        inner.unexpected.retain(|key, queue| {
            if key.group == group && key.class == Class::PointToPoint {
                consumed += queue
                    .iter()
                    .map(|message| match message {
                        Unexpected::Eager { data, .. } => data.len(),
                        Unexpected::Offer(_) => 0,
                    })
                    .sum::<usize>();
            }
            key.group != group
        });
        inner.stored -= consumed;
        inner.consume(consumed);
        inner.ready.retain(|key, _| key.group != group);
    }

    /// Ends the link after reading what has come; pending transfers fail with `reason`.
    pub(crate) fn close(&self, reason: &str) {
        let mut finished = Finished::default();
        {
            let mut inner = self.lock();
            while inner.closed.is_none() && inner.read(&self.any, &mut finished) {}
            inner.close(reason, &mut finished);
            self.busy.store(false, Ordering::Relaxed);
        }
        finished.tell();
    }
}

impl Inner {
    fn next_id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }

    fn push(&mut self, frame: Frame, payload: Option<(Arc<Transfer>, usize, usize)>) {
        self.frames.push_back(Outgoing {
            head: frame.encode(),
            payload,
            written: 0,
        });
    }

    fn send(
        &mut self,
        key: Key,
        source: u32,
        transfer: Arc<Transfer>,
        mode: Mode,
        finished: &mut Finished,
    ) {
        if let Some(reason) = &self.closed {
            finished.add(transfer, Err(LinkError::Closed(reason.clone())));
            return;
        }
        let bytes = transfer.bytes;
        let mut frame = frame(FrameKind::Eager, key, source);
        frame.bytes = bytes as u64;
        let eager = bytes <= EAGER_BYTES
            && (mode == Mode::Collective || self.eager_unacknowledged + bytes <= CREDIT_BYTES);
        if eager {
            if mode == Mode::PointToPoint {
                self.eager_unacknowledged += bytes;
            }
            self.push(frame, Some((transfer, 0, bytes)));
        } else if mode == Mode::PointToPoint {
            frame.kind = FrameKind::Offer;
            frame.id = self.next_id();
            frame.other = self.offer(frame.id, &transfer);
            self.offered.insert(frame.id, transfer);
            self.push(frame, None);
        } else if let Some(receive) = pop(&mut self.ready, &key) {
            self.sending.push_back(Sending {
                transfer,
                receive,
                next: 0,
            });
        } else {
            self.awaiting.entry(key).or_default().push_back(transfer);
        }
    }

    fn receive(
        &mut self,
        key: Key,
        source: u32,
        transfer: Arc<Transfer>,
        mode: Mode,
        finished: &mut Finished,
    ) {
        if mode == Mode::Collective && transfer.bytes > EAGER_BYTES {
            if let Some(reason) = &self.closed {
                finished.add(transfer, Err(LinkError::Closed(reason.clone())));
                return;
            }
            let mut frame = frame(FrameKind::Ready, key, source);
            frame.id = self.next_id();
            frame.bytes = transfer.bytes as u64;
            self.receiving.insert(frame.id, transfer);
            self.push(frame, None);
        } else if self.unexpected.contains_key(&key) {
            self.match_unexpected(&key, transfer, finished);
        } else if let Some(reason) = &self.closed {
            finished.add(transfer, Err(LinkError::Closed(reason.clone())));
        } else {
            self.posted.entry(key).or_default().push_back(transfer);
        }
    }

    /// Gives `transfer` the first message that waits for `key`; there is one.
    fn match_unexpected(&mut self, key: &Key, transfer: Arc<Transfer>, finished: &mut Finished) {
        match pop(&mut self.unexpected, key) {
            Some(Unexpected::Eager { source, data }) => {
                if key.class == Class::PointToPoint {
                    self.stored -= data.len();
                    self.consume(data.len());
                }
                transfer.source.store(source, Ordering::Release);
                let result = transfer.fits(data.len() as u64);
                if result.is_ok() {
                    let mut at = 0;
                    while at < data.len() {
                        transfer.parts(at, data.len() - at, |ptr, bytes| {
                            // SAFETY: a pending transfer's memory is writable, and `bytes`
                            // never exceeds what is left of `data`.
                            unsafe { ptr.copy_from_nonoverlapping(data[at..].as_ptr(), bytes) };
                            at += bytes;
                        });
                    }
                    transfer.left.fetch_sub(at, Ordering::Relaxed);
                }
                finished.add(transfer, result);
            }
            Some(Unexpected::Offer(offer)) => self.accept(key, offer, transfer, finished),
            None => {}
        }
    }

    /// Answers an offer that found its receive.
    fn accept(
        &mut self,
        key: &Key,
        offer: Offer,
        transfer: Arc<Transfer>,
        finished: &mut Finished,
    ) {
        transfer.source.store(offer.source, Ordering::Release);
        let mut answer = frame(FrameKind::Ready, *key, offer.source);
        answer.bytes = transfer.bytes as u64;
        if let Err(error) = transfer.fits(offer.bytes) {
            answer.kind = FrameKind::Refuse;
            answer.id = offer.id;
            finished.add(transfer, Err(error));
        } else {
            match self.pull(&offer, &transfer) {
                Pulled::Done => {
                    answer.kind = FrameKind::Pulled;
                    answer.id = offer.id;
                    finished.add(transfer, Ok(()));
                }
                Pulled::Withdrawn => return finished.add(transfer, Err(LinkError::Cancelled)),
                Pulled::Impossible => {
                    answer.id = self.next_id();
                    answer.other = offer.id;
                    self.receiving.insert(answer.id, transfer);
                }
            }
        }
        self.push(answer, None);
    }

    /// Lets the peer read a message where it lies; returns its address, or 0.
    fn offer(&mut self, id: u64, transfer: &Transfer) -> u64 {
        match (transfer.segments.as_slice(), self.lanes.first_mut()) {
            (&[whole], Some(lane)) if whole.bytes <= PULL_BYTES && lane.stream.offer(id) => {
                whole.ptr as u64
            }
            _ => 0,
        }
    }

    /// Takes the message that waits under `id` for the peer.
    fn take_offered(&mut self, id: u64) -> Option<Arc<Transfer>> {
        let transfer = self.offered.remove(&id)?;
        if let Some(lane) = self.lanes.first_mut() {
            lane.stream.withdraw(id);
        }
        Some(transfer)
    }

    /// Reads an offered message where it lies.
    fn pull(&mut self, offer: &Offer, transfer: &Transfer) -> Pulled {
        let Some(lane) = self.lanes.first_mut().filter(|_| offer.address != 0) else {
            return Pulled::Impossible;
        };
        let mut parts: SmallVec<[ReadPart; 16]> = SmallVec::new();
        let mut held = 0;
        transfer.parts(0, offer.bytes as usize, |ptr, bytes| {
            parts.push(ReadPart { ptr, bytes });
            held += bytes;
        });
        if held as u64 != offer.bytes {
            return Pulled::Impossible;
        }
        // SAFETY: the memory of a pending transfer is writable, and this link alone touches it.
        let pulled = unsafe { lane.stream.pull(offer.id, &parts, offer.address) };
        if matches!(pulled, Pulled::Done) {
            transfer.left.fetch_sub(held, Ordering::Relaxed);
        }
        pulled
    }

    /// Gives credit back to the sender, a good part at a time.
    fn consume(&mut self, bytes: usize) {
        self.eager_consumed += bytes;
        if self.eager_consumed >= CREDIT_BYTES / 4 {
            let key = Key {
                class: Class::PointToPoint,
                group: 0,
                channel: 0,
            };
            let mut frame = frame(FrameKind::Credit, key, 0);
            frame.bytes = std::mem::take(&mut self.eager_consumed) as u64;
            self.push(frame, None);
        }
    }

    fn cancel(&mut self, transfer: &Arc<Transfer>) {
        let other = |held: &Arc<Transfer>| !Arc::ptr_eq(held, transfer);
        transfer.cancelled.store(true, Ordering::Relaxed);
        for queues in [&mut self.posted, &mut self.awaiting] {
            queues.retain(|_, queue| {
                queue.retain(other);
                !queue.is_empty()
            });
        }
        let offers = self.offered.iter();
        let given_up = offers.filter(|&(_, held)| Arc::ptr_eq(held, transfer));
        for id in given_up.map(|(&id, _)| id).collect::<SmallVec<[u64; 1]>>() {
            self.take_offered(id);
        }
        // Frames that name the memory stay: zeros go out in its place, so that the stream
        // stays in step. Fragments that have not started are dropped, and the receiver
        // is told.
        let mut told = Vec::new();
        self.sending.retain(|sending| {
            let keep = other(&sending.transfer);
            if !keep {
                told.push(sending.receive);
            }
            keep
        });
        for receive in told {
            let key = Key {
                class: Class::PointToPoint,
                group: 0,
                channel: 0,
            };
            let mut frame = frame(FrameKind::Cancelled, key, 0);
            frame.id = receive;
            self.push(frame, None);
        }
        // Data that still comes for it finds no receive and is discarded.
        self.receiving.retain(|_, held| other(held));
    }

    /// Writes and reads what can be.
    fn turn(&mut self, link: &Link, finished: &mut Finished) -> bool {
        if self.closed.is_some() {
            return false;
        }
        let mut wrote = self.write(finished);
        let read = self.read(&link.any, finished);
        if read {
            // What came may have asked for an answer.
            wrote |= self.write(finished);
        }
        let busy = !self.posted.is_empty()
            || !self.frames.is_empty()
            || !self.sending.is_empty()
            || !self.offered.is_empty()
            || !self.awaiting.is_empty()
            || !self.receiving.is_empty()
            || self
                .lanes
                .iter()
                .any(|lane| !lane.writing.is_empty() || lane.reading.is_some());
        link.busy.store(busy, Ordering::Relaxed);
        wrote || read
    }

    fn write(&mut self, finished: &mut Finished) -> bool {
        let mut moved = false;
        for index in 0..self.lanes.len() {
            loop {
                let mut queued: usize = self.lanes[index].writing.iter().map(Outgoing::left).sum();
                while self.lanes[index].writing.len() < BATCH && queued < BATCH_BYTES {
                    let Some(outgoing) = self.next_outgoing(index == 0) else {
                        break;
                    };
                    queued += outgoing.left();
                    self.lanes[index].writing.push_back(outgoing);
                }
                let lane = &mut self.lanes[index];
                if lane.writing.is_empty() {
                    break;
                }
                let (written, offered) = match lane.write(finished) {
                    Ok(bytes) => bytes,
                    Err(error) => {
                        self.fail(&error, finished);
                        return true;
                    }
                };
                moved |= written > 0;
                // A connection that took a part is full; a ring may have room by now.
                if written == 0 || (written < offered && lane.stream.fd().is_some()) {
                    break;
                }
            }
        }
        moved
    }

    fn next_outgoing(&mut self, ordered: bool) -> Option<Outgoing> {
        if ordered && let Some(outgoing) = self.frames.pop_front() {
            return Some(outgoing);
        }
        let mut sending = self.sending.pop_front()?;
        let bytes = FRAGMENT_BYTES.min(sending.transfer.bytes - sending.next);
        let key = Key {
            class: Class::PointToPoint,
            group: 0,
            channel: 0,
        };
        let mut frame = frame(FrameKind::Data, key, 0);
        frame.id = sending.receive;
        frame.other = sending.next as u64;
        frame.bytes = bytes as u64;
        let payload = Some((sending.transfer.clone(), sending.next, bytes));
        sending.next += bytes;
        if sending.next < sending.transfer.bytes {
            self.sending.push_back(sending);
        }
        Some(Outgoing {
            head: frame.encode(),
            payload,
            written: 0,
        })
    }

    fn read(&mut self, any: &AnySource, finished: &mut Finished) -> bool {
        let mut moved = false;
        // Of large payloads little comes by way of the buffer: it would be copied once more.
        let most = if self.receiving.is_empty() {
            READ_AHEAD
        } else {
            READ_AHEAD_OF_PAYLOADS
        };
        for index in 0..self.lanes.len() {
            // One turn reads a bounded amount, so that a fast sender cannot hold a thread.
            for _ in 0..16 {
                let lane = &mut self.lanes[index];
                let drained = match lane.fill(most) {
                    Ok((0, _)) => break,
                    // A connection that gave less than it could is empty; a ring may have
                    // more by now.
                    Ok((read, room)) => {
                        moved = true;
                        read < room && lane.stream.fd().is_some()
                    }
                    Err(error) => {
                        self.understand(index, any, finished);
                        self.fail(&error, finished);
                        return true;
                    }
                };
                if !self.understand(index, any, finished) {
                    let error = io::Error::new(io::ErrorKind::InvalidData, "malformed message");
                    self.fail(&error, finished);
                    return true;
                }
                if drained {
                    break;
                }
            }
        }
        moved
    }

    /// Handles what lane `index` has read. False: the peer broke the protocol.
    fn understand(&mut self, index: usize, any: &AnySource, finished: &mut Finished) -> bool {
        loop {
            let lane = &mut self.lanes[index];
            if let Some((_, 0)) = &lane.reading {
                let (sink, _) = lane.reading.take().expect("just seen");
                self.complete(sink, any, finished);
                continue;
            }
            if lane.reading.is_some() {
                if lane.start == lane.end {
                    return true;
                }
                lane.drain_buffer();
                continue;
            }
            let Some(head) = lane.buffer[lane.start..lane.end].first_chunk() else {
                return true;
            };
            let Some(frame) = Frame::decode(head) else {
                return false;
            };
            lane.start += Frame::LEN;
            match self.handle(frame, any, finished) {
                Some(sink) => {
                    let payload = matches!(frame.kind, FrameKind::Eager | FrameKind::Data);
                    if payload {
                        self.lanes[index].reading = Some((sink, frame.bytes as usize));
                    }
                }
                None => return false,
            }
        }
    }

    /// Acts on a frame; returns where its payload goes. `None`: the peer broke the protocol.
    fn handle(&mut self, frame: Frame, any: &AnySource, finished: &mut Finished) -> Option<Sink> {
        let key = Key {
            class: frame.class,
            group: frame.group,
            channel: frame.channel,
        };
        match frame.kind {
            FrameKind::Eager => {
                if frame.bytes > EAGER_BYTES as u64 {
                    return None;
                }
                let Some(transfer) = self.take_for_next(&key, any) else {
                    if key.class == Class::PointToPoint {
                        self.stored += frame.bytes as usize;
                        if self.stored > CREDIT_BYTES {
                            return None;
                        }
                    }
                    let data = Vec::with_capacity(frame.bytes as usize);
                    return Some(Sink::Store {
                        key,
                        source: frame.source,
                        data,
                    });
                };
                if key.class == Class::PointToPoint {
                    self.consume(frame.bytes as usize);
                }
                transfer.source.store(frame.source, Ordering::Release);
                if let Err(error) = transfer.fits(frame.bytes) {
                    finished.add(transfer, Err(error));
                    return Some(Sink::Discard);
                }
                Some(Sink::Receive {
                    transfer,
                    offset: 0,
                    receive: None,
                })
            }
            FrameKind::Offer => {
                let offer = Unexpected::Offer(Offer {
                    source: frame.source,
                    id: frame.id,
                    bytes: frame.bytes,
                    address: frame.other,
                });
                self.unexpected.entry(key).or_default().push_back(offer);
                if let Some(transfer) = self.take_posted(&key, any) {
                    self.match_unexpected(&key, transfer, finished);
                }
                Some(Sink::Discard)
            }
            FrameKind::Ready => {
                let sender = if frame.other != 0 {
                    self.take_offered(frame.other)
                } else {
                    let waiting = pop(&mut self.awaiting, &key);
                    if waiting.is_none() {
                        self.ready.entry(key).or_default().push_back(frame.id);
                        return Some(Sink::Discard);
                    }
                    waiting
                };
                match sender {
                    Some(transfer) if transfer.bytes as u64 == frame.bytes => {
                        self.sending.push_back(Sending {
                            transfer,
                            receive: frame.id,
                            next: 0,
                        });
                    }
                    Some(transfer) => {
                        let sent = transfer.bytes as u64;
                        finished.add(
                            transfer,
                            Err(LinkError::Size {
                                sent,
                                expected: frame.bytes,
                            }),
                        );
                    }
                    // Given up in the meantime.
                    None => self.push(
                        Frame {
                            kind: FrameKind::Cancelled,
                            ..frame
                        },
                        None,
                    ),
                }
                Some(Sink::Discard)
            }
            FrameKind::Data => {
                let Some(transfer) = self.receiving.get(&frame.id) else {
                    return Some(Sink::Discard);
                };
                let end = frame.other.checked_add(frame.bytes)?;
                if end > transfer.bytes as u64 || frame.bytes == 0 {
                    return None;
                }
                let (transfer, offset) = (transfer.clone(), frame.other as usize);
                Some(Sink::Receive {
                    transfer,
                    offset,
                    receive: Some(frame.id),
                })
            }
            FrameKind::Refuse => {
                if let Some(transfer) = self.take_offered(frame.id) {
                    let sent = transfer.bytes as u64;
                    finished.add(
                        transfer,
                        Err(LinkError::Size {
                            sent,
                            expected: frame.bytes,
                        }),
                    );
                }
                Some(Sink::Discard)
            }
            FrameKind::Pulled => {
                if let Some(transfer) = self.take_offered(frame.id) {
                    finished.add(transfer, Ok(()));
                }
                Some(Sink::Discard)
            }
            FrameKind::Cancelled => {
                if let Some(transfer) = self.receiving.remove(&frame.id) {
                    finished.add(transfer, Err(LinkError::Cancelled));
                }
                Some(Sink::Discard)
            }
            FrameKind::Credit => {
                self.eager_unacknowledged = self
                    .eager_unacknowledged
                    .checked_sub(frame.bytes as usize)?;
                Some(Sink::Discard)
            }
        }
    }

    /// The receive for a message that has just come, unless others have to be received before it:
    /// a receive from any source is posted before it is offered to the links.
    fn take_for_next(&mut self, key: &Key, any: &AnySource) -> Option<Arc<Transfer>> {
        match self.unexpected.get(key) {
            Some(earlier) if !earlier.is_empty() => None,
            _ => self.take_posted(key, any),
        }
    }

    /// The receive that the first message for `key` belongs to.
    fn take_posted(&mut self, key: &Key, any: &AnySource) -> Option<Arc<Transfer>> {
        let ticket = self
            .posted
            .get(key)
            .and_then(|queue| queue.front())
            .map(|first| first.ticket);
        if key.class == Class::PointToPoint
            && let Some(transfer) = any.take(key, ticket.unwrap_or(u64::MAX))
        {
            return Some(transfer);
        }
        pop(&mut self.posted, key)
    }

    /// A payload is complete.
    fn complete(&mut self, sink: Sink, any: &AnySource, finished: &mut Finished) {
        match sink {
            Sink::Receive {
                transfer, receive, ..
            } => {
                if receive.is_none() || transfer.left.load(Ordering::Relaxed) == 0 {
                    if let Some(id) = receive {
                        self.receiving.remove(&id);
                    }
                    finished.add(transfer, Ok(()));
                }
            }
            Sink::Store { key, source, data } => {
                self.unexpected
                    .entry(key)
                    .or_default()
                    .push_back(Unexpected::Eager { source, data });
                // A receive may have been posted while the payload was on its way.
                if let Some(transfer) = self.take_posted(&key, any) {
                    self.match_unexpected(&key, transfer, finished);
                }
            }
            Sink::Discard => {}
        }
    }

    fn fail(&mut self, error: &io::Error, finished: &mut Finished) {
        let reason = match error.kind() {
            io::ErrorKind::UnexpectedEof => "the connection was closed".to_owned(),
            _ => format!("the connection failed: {error}"),
        };
        self.close(&reason, finished);
    }

    fn close(&mut self, reason: &str, finished: &mut Finished) {
        if self.closed.is_some() {
            return;
        }
        self.closed = Some(reason.to_owned());
        for id in self.offered.keys().copied().collect::<Vec<_>>() {
            if let Some(transfer) = self.take_offered(id) {
                finished.add(transfer, Err(LinkError::Closed(reason.to_owned())));
            }
        }
        let queued = std::mem::take(&mut self.frames);
        let writing = self.lanes.drain(..).flat_map(|lane| lane.writing);
        let from_frames = queued
            .into_iter()
            .chain(writing)
            .filter_map(|out| out.payload);
        let mut pending: Vec<_> = from_frames.map(|(transfer, ..)| transfer).collect();
        pending.extend(
            std::mem::take(&mut self.sending)
                .into_iter()
                .map(|sending| sending.transfer),
        );
        pending.extend(std::mem::take(&mut self.receiving).into_values());
        pending.extend(std::mem::take(&mut self.posted).into_values().flatten());
        pending.extend(std::mem::take(&mut self.awaiting).into_values().flatten());
        for transfer in pending {
            finished.add(transfer, Err(LinkError::Closed(reason.to_owned())));
        }
    }
}

fn frame(kind: FrameKind, key: Key, source: u32) -> Frame {
    Frame {
        kind,
        class: key.class,
        group: key.group,
        channel: key.channel,
        source,
        id: 0,
        other: 0,
        bytes: 0,
    }
}

fn pop<T>(queues: &mut HashMap<Key, VecDeque<T>>, key: &Key) -> Option<T> {
    let queue = queues.get_mut(key)?;
    let first = queue.pop_front();
    if queue.is_empty() {
        queues.remove(key);
    }
    first
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};

    use super::*;
    use crate::call::Segment;
    use crate::transport::tcp::Tcp;

    /// A payload that has come in part keeps the link busy: nobody polls an idle one.
    #[test]
    fn half_a_payload_is_busy() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let link = Link::new(Arc::default());
        link.add_stream(Box::new(Tcp::new(listener.accept().unwrap().0).unwrap()));
        let key = Key {
            class: Class::Collective,
            group: 1,
            channel: 1,
        };
        let mut memory = [0u8; 100];
        let segment = Segment::from(&mut memory[..]);
        // SAFETY: the memory outlives the link, and is looked at when the transfer has ended.
        let transfer = unsafe { Transfer::new(&[segment], None) };
        link.receive(key, 0, transfer.clone(), Mode::Collective);
        let mut frame = frame(FrameKind::Eager, key, 1);
        frame.bytes = 100;
        peer.write_all(&[&frame.encode()[..], &[7; 60]].concat())
            .unwrap();
        while transfer.received() < 60 {
            assert!(link.is_busy());
            link.progress();
        }
        assert!(link.is_busy());
        peer.write_all(&[7; 40]).unwrap();
        while transfer.result().is_none() {
            link.progress();
        }
        assert!(!link.is_busy());
        assert_eq!(transfer.result(), Some(Ok(())));
        assert_eq!(memory, [7; 100]);
    }
}
