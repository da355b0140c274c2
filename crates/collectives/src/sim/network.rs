/// Links and the routes over them, as a simulation sees them.
///
/// Links carry one direction; they are numbered from 0.
pub trait Network {
    /// Number of ranks.
    fn ranks(&self) -> u32;

    /// Number of links.
    fn links(&self) -> usize;

    /// Bytes a second of a link.
    fn bandwidth(&self, link: usize) -> f64;

    /// Seconds from one end of a link to the other.
    fn latency(&self, link: usize) -> f64;

    /// Seconds that a message takes beside its links' latencies and bytes.
    fn startup(&self, from: u32, to: u32) -> f64;

    /// Appends the links from one rank to another, in order.
    fn route(&self, from: u32, to: u32, links: &mut Vec<u32>) -> Result<(), Unroutable>;
}

/// Two ranks that cannot reach each other.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no route from rank {from} to rank {to}: {reason}")]
pub struct Unroutable {
    /// Sending rank.
    pub from: u32,
    /// Receiving rank.
    pub to: u32,
    /// Why.
    pub reason: String,
}

/// Ranks with one port each way on a switch that is never the bottleneck.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Switch {
    /// Number of ranks.
    pub ranks: u32,
    /// Bytes a second of a port, each way.
    pub bandwidth: f64,
    /// Seconds from port to port.
    pub latency: f64,
}

impl Network for Switch {
    fn ranks(&self) -> u32 {
        self.ranks
    }

    /// Ports out of the ranks, then ports into them.
    fn links(&self) -> usize {
        2 * self.ranks as usize
    }

    fn bandwidth(&self, _: usize) -> f64 {
        self.bandwidth
    }

    fn latency(&self, link: usize) -> f64 {
        if link < self.ranks as usize {
            self.latency
        } else {
            0.0
        }
    }

    fn startup(&self, _: u32, _: u32) -> f64 {
        0.0
    }

    fn route(&self, from: u32, to: u32, links: &mut Vec<u32>) -> Result<(), Unroutable> {
        links.extend([from, self.ranks + to]);
        Ok(())
    }
}

/// Some of the ranks of another network, under numbers of their own.
pub struct Group<'a> {
    network: &'a dyn Network,
    ranks: Vec<u32>,
}

impl<'a> Group<'a> {
    /// Rank p of the group is rank `ranks[p]` of `network`.
    pub fn new(network: &'a dyn Network, ranks: impl Into<Vec<u32>>) -> Group<'a> {
        Group {
            network,
            ranks: ranks.into(),
        }
    }
}

impl Network for Group<'_> {
    fn ranks(&self) -> u32 {
        self.ranks.len() as u32
    }

    fn links(&self) -> usize {
        self.network.links()
    }

    fn bandwidth(&self, link: usize) -> f64 {
        self.network.bandwidth(link)
    }

    fn latency(&self, link: usize) -> f64 {
        self.network.latency(link)
    }

    fn startup(&self, from: u32, to: u32) -> f64 {
        self.network
            .startup(self.ranks[from as usize], self.ranks[to as usize])
    }

    fn route(&self, from: u32, to: u32, links: &mut Vec<u32>) -> Result<(), Unroutable> {
        self.network
            .route(self.ranks[from as usize], self.ranks[to as usize], links)
    }
}
