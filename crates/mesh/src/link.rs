//! The links of a slice as a graph, with faults.

use petgraph::graph::{DiGraph, EdgeIndex, NodeIndex};
use serde::Serialize;

use crate::{ChipId, Coord, Direction, Error, Slice};

/// One direction of one ICI link; an index into [`LinkGraph`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub struct LinkId(pub u32);

impl LinkId {
    /// As an array index.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// One direction of one ICI link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct Link {
    /// Where data leaves.
    pub from: ChipId,
    /// Where data arrives.
    pub to: ChipId,
    /// The port of `from`.
    pub direction: Direction,
    /// Whether the link closes its axis.
    pub wraps: bool,
}

/// The link graph of a slice: one node a chip, one edge a link and direction.
///
/// Chips and links can be marked dead; routes then go around them.
#[derive(Clone, Debug)]
pub struct LinkGraph {
    slice: Slice,
    graph: DiGraph<(), Link, u32>,
    /// Six ports a chip; `NO_LINK` where a port leads nowhere.
    ports: Vec<u32>,
    dead_links: Vec<bool>,
    dead_chips: Vec<bool>,
    faulty: bool,
}

const NO_LINK: u32 = u32::MAX;

impl LinkGraph {
    /// All links of `slice`, none dead.
    pub fn new(slice: &Slice) -> LinkGraph {
        let shape = slice.shape();
        let chips = shape.chips() as usize;
        let mut graph = DiGraph::with_capacity(chips, chips * Direction::ALL.len());
        let mut ports = vec![NO_LINK; chips * Direction::ALL.len()];
        for _ in 0..chips {
            graph.add_node(());
        }
        for coord in shape.coords() {
            let from = shape.chip(coord);
            for direction in Direction::ALL {
                let Some(next) = slice.torus().neighbour(coord, direction) else {
                    continue;
                };
                let to = shape.chip(next);
                let axis = direction.axis.index();
                let wraps = coord.0[axis].abs_diff(next.0[axis]) != 1;
                let link = Link {
                    from,
                    to,
                    direction,
                    wraps,
                };
                let edge = graph.add_edge(NodeIndex::from(from.0), NodeIndex::from(to.0), link);
                ports[from.index() * Direction::ALL.len() + direction.index()] =
                    edge.index() as u32;
            }
        }
        let links = graph.edge_count();
        LinkGraph {
            slice: slice.clone(),
            graph,
            ports,
            dead_links: vec![false; links],
            dead_chips: vec![false; chips],
            faulty: false,
        }
    }

    /// The slice.
    pub const fn slice(&self) -> &Slice {
        &self.slice
    }

    /// The graph itself, dead parts included: node i is chip i, edge i is link i.
    pub const fn graph(&self) -> &DiGraph<(), Link, u32> {
        &self.graph
    }

    /// Bytes a second of every link and direction.
    pub fn bandwidth(&self) -> f64 {
        self.slice.generation().spec().link_bandwidth
    }

    /// Number of link directions.
    pub fn len(&self) -> usize {
        self.graph.edge_count()
    }

    /// Whether there is no link: a slice of one chip.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A link's ends and port.
    ///
    /// # Panics
    /// For an id of another graph.
    pub fn link(&self, id: LinkId) -> Link {
        self.graph[EdgeIndex::from(id.0)]
    }

    /// All link directions.
    pub fn links(&self) -> impl Iterator<Item = (LinkId, Link)> {
        self.graph
            .edge_weights()
            .enumerate()
            .map(|(id, &link)| (LinkId(id as u32), link))
    }

    /// The link at a chip's port, dead or alive.
    pub fn port(&self, chip: ChipId, direction: Direction) -> Option<LinkId> {
        let id = self.ports[chip.index() * Direction::ALL.len() + direction.index()];
        (id != NO_LINK).then_some(LinkId(id))
    }

    /// The live link from one chip to a neighbour.
    ///
    /// # Errors
    /// [`Error::OutOfRange`], or [`Error::NoLink`] where none joins them.
    pub fn between(&self, from: Coord, to: Coord) -> Result<LinkId, Error> {
        let (start, end) = (self.slice.chip(from)?, self.slice.chip(to)?);
        self.live_links(start)
            .find(|&(_, link)| link.to == end)
            .map(|(id, _)| id)
            .ok_or(Error::NoLink { a: from, b: to })
    }

    /// The live links that leave a chip.
    pub fn live_links(&self, chip: ChipId) -> impl Iterator<Item = (LinkId, Link)> {
        Direction::ALL
            .into_iter()
            .filter_map(move |direction| self.port(chip, direction))
            .filter(|id| !self.dead_links[id.index()])
            .map(|id| (id, self.link(id)))
            .filter(|(_, link)| self.is_alive(link.to) && self.is_alive(link.from))
    }

    /// Whether a chip is alive.
    pub fn is_alive(&self, chip: ChipId) -> bool {
        !self.dead_chips[chip.index()]
    }

    /// Whether anything is dead.
    pub const fn has_faults(&self) -> bool {
        self.faulty
    }

    /// Whether a link direction and both of its ends are alive.
    pub fn is_live(&self, id: LinkId) -> bool {
        let link = self.link(id);
        !self.dead_links[id.index()] && self.is_alive(link.from) && self.is_alive(link.to)
    }

    /// Marks both directions of the link between two neighbours dead.
    ///
    /// # Errors
    /// [`Error::OutOfRange`], or [`Error::NoLink`] where none joins them.
    pub fn kill_link(&mut self, a: Coord, b: Coord) -> Result<(), Error> {
        let (there, back) = (self.between(a, b)?, self.between(b, a)?);
        for id in [there, back] {
            self.dead_links[id.index()] = true;
        }
        self.faulty = true;
        Ok(())
    }

    /// Marks a chip, and with it all of its links, dead.
    ///
    /// # Errors
    /// [`Error::OutOfRange`].
    pub fn kill_chip(&mut self, coord: Coord) -> Result<(), Error> {
        let chip = self.slice.chip(coord)?;
        self.dead_chips[chip.index()] = true;
        self.faulty = true;
        Ok(())
    }
}
