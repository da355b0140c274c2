//! What plans cost, by closed formulas.

use tpu_dist_mesh::cost::Prediction;

use crate::schedule::Request;

/// How ranks reach each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Transport {
    /// Memory of one host.
    Local,
    /// A network between hosts.
    Network,
}

/// The figures in the formulas, after LogGP (Alexandrov, Ionescu, Schauser, Scheiman,
/// SPAA 1995): a rank has one port each way, and all pairs are equally near.
pub trait CostModel {
    /// Seconds from the start of a message to its arrival, without its bytes.
    fn alpha(&self, transport: Transport) -> f64;

    /// Seconds for each byte through a rank's port; where ranks share a port, through its share.
    fn beta(&self, transport: Transport) -> f64;

    /// Seconds of a rank's time for each message that it sends.
    fn overhead(&self, transport: Transport) -> f64;

    /// Seconds of a rank's time for each byte of an operand that it reduces or copies.
    fn gamma(&self, transport: Transport) -> f64;
}

/// Figures of one transport, in seconds; see [`CostModel`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Figures {
    /// Seconds from the start of a message to its arrival, without its bytes.
    pub alpha: f64,
    /// Seconds for each byte through a rank's port.
    pub beta: f64,
    /// Seconds of a rank's time for each message that it sends.
    pub overhead: f64,
    /// Seconds of a rank's time for each byte of an operand that it reduces or copies.
    pub gamma: f64,
}

/// A cost model that is a table.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Constants {
    /// Memory of one host.
    pub local: Figures,
    /// A network between hosts.
    pub network: Figures,
}

impl Constants {
    /// Measured on a two-core x86 server with AVX-512: a cache line crosses cores in 0.1 to
    /// 0.13 us and a copied message of one line in 0.2 us; large f32 all-reduces through shared
    /// memory reach 13 GB/s; a core reduces 14 GB/s in its caches. TCP over loopback carries
    /// 4.3 GB/s on one stream with a round trip of 7 us when polled and 80 us when slept.
    pub const DEFAULT: Constants = Constants {
        local: Figures {
            alpha: 0.3e-6,
            beta: 1.0 / 13e9,
            overhead: 0.1e-6,
            gamma: 1.0 / 14e9,
        },
        network: Figures {
            alpha: 15e-6,
            beta: 1.0 / 4.3e9,
            overhead: 2e-6,
            gamma: 1.0 / 14e9,
        },
    };

    fn of(&self, transport: Transport) -> &Figures {
        match transport {
            Transport::Local => &self.local,
            Transport::Network => &self.network,
        }
    }
}

impl Default for Constants {
    fn default() -> Constants {
        Constants::DEFAULT
    }
}

impl CostModel for Constants {
    fn alpha(&self, transport: Transport) -> f64 {
        self.of(transport).alpha
    }

    fn beta(&self, transport: Transport) -> f64 {
        self.of(transport).beta
    }

    fn overhead(&self, transport: Transport) -> f64 {
        self.of(transport).overhead
    }

    fn gamma(&self, transport: Transport) -> f64 {
        self.of(transport).gamma
    }
}

/// Where the formula of an algorithm holds.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Domain {
    /// Everywhere.
    Every,
    /// Where a rank's work on memory, which overlaps with the wires in part, does not count.
    Idle,
    /// Where neither bytes nor a rank's work for a message count.
    Small,
    /// Nowhere.
    Never,
}

/// The part of the whole from which on something counts.
const NEGLIGIBLE: f64 = 0.01;

/// The formulas' building blocks for one request on one transport.
#[derive(Clone, Copy)]
pub(super) struct Formula {
    alpha: f64,
    beta: f64,
    overhead: f64,
    gamma: f64,
    /// Bytes of the largest message.
    max_bytes: f64,
    pub(super) element: f64,
}

/// Rounds of a plan.
#[derive(Clone, Copy)]
pub(super) struct Rounds {
    /// How many.
    pub(super) count: f64,
    /// How many others a rank sends to in each, `bytes` to every one.
    pub(super) fan: f64,
    /// Bytes for each of them.
    pub(super) bytes: f64,
    /// What it does with what it receives.
    pub(super) reduce: Reduce,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Reduce {
    /// Nothing.
    No,
    /// Reduces each message when it comes.
    Each,
    /// Reduces all of a round at once.
    Together,
}

impl Formula {
    /// What `seconds` says with the model's figures, and whether that holds.
    pub(super) fn predict(
        request: &Request,
        model: &dyn CostModel,
        transport: Transport,
        domain: Domain,
        seconds: impl Fn(&Formula) -> f64,
    ) -> Prediction {
        let element = f64::from(request.element_size);
        let formula = Formula {
            alpha: model.alpha(transport),
            beta: model.beta(transport),
            overhead: model.overhead(transport),
            gamma: model.gamma(transport),
            max_bytes: request.max_message as f64 * element,
            element,
        };
        let whole = seconds(&formula);
        let without = |formula: Formula| whole - seconds(&formula) <= NEGLIGIBLE * whole;
        let holds = match domain {
            Domain::Every => true,
            Domain::Never => false,
            Domain::Idle => without(Formula {
                gamma: 0.0,
                ..formula
            }),
            Domain::Small => without(Formula {
                beta: 0.0,
                gamma: 0.0,
                overhead: 0.0,
                ..formula
            }),
        };
        if holds {
            Prediction::Formula(whole)
        } else {
            Prediction::Estimate(whole)
        }
    }

    /// Messages into which `bytes` are cut.
    pub(super) fn cuts(&self, bytes: f64) -> f64 {
        (bytes / self.max_bytes).ceil().max(1.0)
    }

    /// Seconds to copy.
    pub(super) fn copy(&self, bytes: f64) -> f64 {
        bytes * self.gamma
    }

    /// Equal rounds after one another; see [`Formula::stream`].
    pub(super) fn rounds(&self, count: f64, fan: f64, bytes: f64, reduce: Reduce) -> f64 {
        self.stream(
            &[Rounds {
                count,
                fan,
                bytes,
                reduce,
            }],
            0.0,
        )
    }

    /// Rounds of messages of one size. While the first are under way, a rank copies `copied` bytes.
    ///
    /// Where rounds are cut, the second message is sent while the first is under way, and so
    /// on: one starts when the one before has left the port, the rank itself is ready, and the one
    /// before that has been received. So the last starts after the longest chain of
    /// those: all ports, or a whole message for every two.
    pub(super) fn stream(&self, rounds: &[Rounds], copied: f64) -> f64 {
        let rounds = rounds
            .iter()
            .filter(|r| r.count > 0.0 && r.fan > 0.0 && r.bytes > 0.0);
        let parts: Vec<(f64, Step)> = rounds
            .map(|r| (r.count * self.cuts(r.bytes), Step::new(self, r)))
            .collect();
        let (Some(&(_, first)), Some(&(_, last))) = (parts.first(), parts.last()) else {
            return 0.0;
        };
        let copy = self.copy(copied);
        let messages: f64 = parts.iter().map(|(count, _)| count).sum();
        if first.single {
            let all: f64 = parts.iter().map(|(count, step)| count * step.whole).sum();
            return all + f64::max(0.0, first.work + copy - first.whole);
        }
        // The longest chain from the start of message `from` to that of the last.
        let chain = |from: f64| {
            let (mut ports, mut wholes, mut at) = (0.0, 0.0, 0.0);
            let end = messages - 1.0;
            // An odd one at the start is a port's.
            let odd = (end - from) % 2.0;
            for (count, step) in &parts {
                let passed = f64::min(at + count, end) - f64::max(at, from);
                ports += passed.max(0.0) * step.port;
                // Every second message from the first on.
                let skip = from + odd;
                let before = ((at - skip) / 2.0).ceil().max(0.0);
                let until = ((f64::min(at + count, end) - skip) / 2.0).ceil().max(0.0);
                wholes += (until - before) * step.whole;
                at += count;
            }
            ports.max(wholes + odd * first.port)
        };
        let second = f64::max(first.port, first.work + copy + first.work);
        let start = if messages > 1.0 {
            chain(0.0).max(second + chain(1.0))
        } else {
            0.0
        };
        start + last.whole
    }

    /// Two rounds that are cut into messages and overlap, the first of which reduces.
    pub(super) fn halves(&self, fan: f64, bytes: f64) -> f64 {
        if fan == 0.0 || bytes == 0.0 {
            return 0.0;
        }
        let round = |reduce| {
            Step::new(
                self,
                &Rounds {
                    count: 1.0,
                    fan,
                    bytes,
                    reduce,
                },
            )
        };
        let (first, second) = (round(Reduce::Together), round(Reduce::No));
        let whole = first.whole + second.whole - self.alpha;
        let pace = f64::max(first.port + second.port, whole / 2.0);
        (self.cuts(bytes) - 1.0) * pace + first.whole + second.whole
    }

    /// One rank receives `bytes` from each of `peers`, and reduces `reduced` times as many.
    pub(super) fn collect(&self, peers: f64, bytes: f64, reduced: f64) -> f64 {
        if peers == 0.0 || bytes == 0.0 {
            return 0.0;
        }
        let cuts = self.cuts(bytes);
        let wire = peers * bytes / cuts * self.beta;
        let reduce = reduced * bytes / cuts * self.gamma;
        let pace = wire.max(reduce).max(self.overhead);
        self.overhead + self.alpha + wire + reduce + (cuts - 1.0) * pace
    }

    /// Rounds of messages without elements.
    pub(super) fn signals(&self, rounds: f64, fan: f64) -> f64 {
        rounds * (self.alpha + fan * self.overhead)
    }

    /// Messages through a tree: the longest way has `hops` and waits for `sends` messages to leave
    /// ports; the busiest rank sends or receives each part `fan` times, and reduces `reduced` of
    /// them.
    pub(super) fn tree(&self, hops: f64, sends: f64, fan: f64, bytes: f64, reduced: f64) -> f64 {
        if hops == 0.0 || bytes == 0.0 {
            return 0.0;
        }
        let cuts = self.cuts(bytes);
        let message = bytes / cuts * self.beta;
        let reduce = bytes / cuts * self.gamma * reduced;
        let whole = hops * (self.alpha + reduce.min(bytes / cuts * self.gamma))
            + sends * message.max(self.overhead)
            + hops * message.min(self.overhead);
        let pace = (fan * message).max(fan * self.overhead + reduce);
        whole + (cuts - 1.0) * pace
    }
}

/// One message of each round.
#[derive(Clone, Copy)]
struct Step {
    /// Seconds from its start until it is received and reduced.
    whole: f64,
    /// Seconds for which it keeps the port, or the rank, whichever is longer.
    port: f64,
    /// Seconds for which sending it keeps the rank.
    work: f64,
    /// Whether a round is one message, so that the next waits for it.
    single: bool,
}

impl Step {
    fn new(formula: &Formula, rounds: &Rounds) -> Step {
        let Rounds {
            fan, bytes, reduce, ..
        } = *rounds;
        let cuts = formula.cuts(bytes);
        let bytes = bytes / cuts;
        let (message, overhead) = (bytes * formula.beta, formula.overhead);
        let each = match reduce {
            Reduce::No => 0.0,
            _ => bytes * formula.gamma,
        };
        // The last of the messages that a rank sends one after the other has left.
        let sent = overhead.max(message) * (fan - 1.0) + overhead + message;
        // Those that came before the last are reduced already but for what takes longer.
        let rest = match reduce {
            Reduce::No => 0.0,
            Reduce::Each => each + (fan - 1.0) * f64::max(0.0, each - message.max(overhead)),
            Reduce::Together => fan * each,
        };
        Step {
            whole: sent + formula.alpha + rest,
            port: (fan * message).max(fan * (overhead + each)),
            work: fan * overhead,
            single: cuts == 1.0,
        }
    }
}
