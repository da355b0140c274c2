use crate::schedule::{Chunk, RankPlan, Step};

/// The steps of a rank by nominal time, in ticks that all ranks share.
///
/// At the same tick, receives come first, then what works on memory, then sends.
/// Where every message is received later than it is sent, no plan can deadlock: the
/// earliest receive that waits is for a message that no receive stands before.
#[derive(Default)]
pub(super) struct Timeline {
    steps: Vec<(u64, Order, Step)>,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Order {
    Receive,
    Local,
    Send,
}

impl Timeline {
    pub(super) fn send(&mut self, at: u64, to: u32, chunk: Chunk) {
        self.push(at, Order::Send, chunk, Step::Send { to, chunk });
    }

    pub(super) fn recv(&mut self, at: u64, from: u32, chunk: Chunk) {
        self.push(at, Order::Receive, chunk, Step::Recv { from, chunk });
    }

    pub(super) fn recv_reduce(&mut self, at: u64, from: u32, chunk: Chunk) {
        self.push(at, Order::Receive, chunk, Step::RecvReduce { from, chunk });
    }

    pub(super) fn reduce(&mut self, at: u64, dst: Chunk, sources: Vec<Chunk>) {
        self.push(at, Order::Local, dst, Step::Reduce { dst, sources });
    }

    pub(super) fn copy(&mut self, at: u64, src: Chunk, dst: Chunk) {
        self.push(at, Order::Local, dst, Step::Copy { src, dst });
    }

    /// Copies once the sends before it, at the same tick, are under way.
    pub(super) fn copy_meanwhile(&mut self, at: u64, src: Chunk, dst: Chunk) {
        self.push(at, Order::Send, dst, Step::Copy { src, dst });
    }

    pub(super) fn finish(&mut self, at: u64, chunk: Chunk) {
        self.push(at, Order::Local, chunk, Step::Finish { chunk });
    }

    fn push(&mut self, at: u64, order: Order, chunk: Chunk, step: Step) {
        if chunk.count > 0 {
            self.steps.push((at, order, step));
        }
    }

    pub(super) fn into_plan(mut self, scratch: u64) -> RankPlan {
        self.steps.sort_by_key(|&(at, order, _)| (at, order));
        RankPlan {
            scratch,
            steps: self.steps.into_iter().map(|(_, _, step)| step).collect(),
        }
    }
}

/// When the messages of equal rounds are sent and received, each round cut into the same
/// number of messages.
///
/// With at least two messages a round, each is sent while the one before is on its
/// way: the order is send 0, send 1, receive 0, send 2, receive 1, ... What a message
/// carries may then depend on the message with its number in the round before.
#[derive(Clone, Copy)]
pub(super) struct Clock {
    start: u64,
    tick: u64,
    cuts: u64,
    max_message: u64,
    /// Messages that are sent before the one in front of them is received.
    lead: u64,
}

impl Clock {
    /// Rounds in which no message has more than `largest` elements before it is cut.
    pub(super) fn new(start: u64, largest: u64, max_message: u64) -> Clock {
        let cuts = largest.div_ceil(max_message).max(1);
        Clock {
            start,
            tick: 1,
            cuts,
            max_message,
            lead: u64::from(cuts > 1),
        }
    }

    /// The same, but a message is received before the next is sent: for when many share a pair
    /// of ranks.
    pub(super) fn lockstep(self) -> Clock {
        Clock { lead: 0, ..self }
    }

    /// The same with `rounds` rounds in `window` ticks.
    pub(super) fn spread(self, rounds: u64, window: u64) -> Clock {
        Clock {
            tick: window / (rounds * self.cuts),
            ..self
        }
    }

    /// The tick at which the last message of `rounds` rounds is received.
    pub(super) fn end(&self, rounds: u64) -> u64 {
        self.start + (rounds * self.cuts + self.lead) * self.tick
    }

    /// For each message of a chunk in `round`: its number, when it is sent, when it is
    /// received, and its part of the chunk.
    pub(super) fn messages(
        &self,
        round: u64,
        chunk: Chunk,
    ) -> impl Iterator<Item = Message> + use<> {
        let Clock {
            start,
            tick,
            cuts,
            max_message,
            lead,
        } = *self;
        let flight = (1 + lead) * tick;
        chunk
            .cuts(max_message)
            .enumerate()
            .map(move |(number, part)| {
                let number = number as u64;
                let sent = start + (round * cuts + number) * tick;
                Message {
                    number,
                    sent,
                    received: sent + flight,
                    part,
                }
            })
    }

    /// Messages of a full round.
    pub(super) fn cuts(&self) -> u64 {
        self.cuts
    }
}

pub(super) struct Message {
    pub(super) number: u64,
    pub(super) sent: u64,
    pub(super) received: u64,
    pub(super) part: Chunk,
}
