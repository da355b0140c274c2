//! What plans cost, by closed formulas.

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

impl Formula {
    pub(super) fn new(request: &Request, model: &dyn CostModel, transport: Transport) -> Formula {
        let element = f64::from(request.element_size);
        Formula {
            alpha: model.alpha(transport),
            beta: model.beta(transport),
            overhead: model.overhead(transport),
            gamma: model.gamma(transport),
            max_bytes: request.max_message as f64 * element,
            element,
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

    /// Equal rounds, in each of which every rank sends `fan` times `bytes` to different ranks,
    /// and receives and reduces `reduced` of them. A message is sent while the one before is
    /// under way where rounds have several: then the slower of the port, the rank itself and
    /// half of a round trip sets the pace.
    pub(super) fn rounds(&self, rounds: f64, fan: f64, bytes: f64, reduced: f64) -> f64 {
        if rounds == 0.0 || fan == 0.0 || bytes == 0.0 {
            return 0.0;
        }
        let messages = rounds * self.cuts(bytes);
        let single = self.cuts(bytes) == 1.0;
        let step = Step::new(self, fan, bytes, reduced);
        (messages - 1.0) * if single { step.whole } else { step.pace() } + step.whole
    }

    /// Two rounds that are cut into messages and overlap, the first of which reduces.
    pub(super) fn halves(&self, fan: f64, bytes: f64, reduced: f64) -> f64 {
        if fan == 0.0 || bytes == 0.0 {
            return 0.0;
        }
        let first = Step::new(self, fan, bytes, reduced);
        let second = Step::new(self, fan, bytes, 0.0);
        let both = Step {
            whole: first.whole + second.whole - self.alpha,
            port: first.port + second.port,
        };
        (self.cuts(bytes) - 1.0) * both.pace() + first.whole + second.whole
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
struct Step {
    /// Seconds from its start until it is received and reduced.
    whole: f64,
    /// Seconds for which it keeps the port, or the rank, whichever is longer.
    port: f64,
}

impl Step {
    fn new(formula: &Formula, fan: f64, bytes: f64, reduced: f64) -> Step {
        let bytes = bytes / formula.cuts(bytes);
        let (message, overhead) = (bytes * formula.beta, formula.overhead);
        let reduce = reduced * bytes * formula.gamma;
        // The last of the messages that a rank sends one after the other has left.
        let sent = overhead.max(message) * (fan - 1.0) + overhead + message;
        Step {
            whole: sent + formula.alpha + reduce,
            port: (fan * message).max(fan * overhead + reduce),
        }
    }

    /// Seconds from one to the next, with two under way.
    fn pace(&self) -> f64 {
        self.port.max(self.whole / 2.0)
    }
}
