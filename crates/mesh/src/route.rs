//! Routes, what they do to the links, and bisection.

use std::collections::VecDeque;

use crate::{Axis, ChipId, Coord, Direction, Error, LinkGraph, LinkId};

impl LinkGraph {
    /// The links from one chip to another: along x, then y, then z, by a shortest way;
    /// around faults by a shortest way that is left.
    ///
    /// # Errors
    /// [`Error::OutOfRange`]; [`Error::DeadChip`] where an end is dead; [`Error::CutOff`],
    /// naming the chips, where faults separate the ends.
    ///
    /// ```
    /// use tpu_dist_mesh::{Coord, LinkGraph, Slice};
    /// let slice: Slice = "v5p:4x4x4".parse()?;
    /// let mut links = LinkGraph::new(&slice);
    /// let (a, b) = (Coord([0, 0, 0]), Coord([3, 1, 0]));
    /// assert_eq!(links.route(a, b)?.len(), 2);
    /// links.kill_link(a, Coord([3, 0, 0]))?;
    /// assert_eq!(links.route(a, b)?.len(), 2);
    /// links.kill_link(a, Coord([0, 1, 0]))?;
    /// assert_eq!(links.route(a, b)?.len(), 4);
    /// # Ok::<(), tpu_dist_mesh::Error>(())
    /// ```
    pub fn route(&self, from: Coord, to: Coord) -> Result<Vec<LinkId>, Error> {
        let (start, end) = (self.slice().chip(from)?, self.slice().chip(to)?);
        for (chip, coord) in [(start, from), (end, to)] {
            if !self.is_alive(chip) {
                return Err(Error::DeadChip { chip: coord });
            }
        }
        let mut route = Vec::new();
        self.walk(from, self.slice().torus().displacement(from, to), |link| {
            route.push(link)
        });
        if !self.has_faults() || route.iter().all(|&link| self.is_live(link)) {
            return Ok(route);
        }
        self.search(start, end).ok_or_else(|| Error::CutOff {
            from,
            to,
            cut_off: self.cut_off(),
        })
    }

    /// Visits the links of a displacement along x, then y, then z.
    pub(crate) fn walk(&self, from: Coord, way: [i32; 3], mut visit: impl FnMut(LinkId)) {
        let mut chip = self.slice().shape().chip(from);
        for axis in Axis::ALL {
            let hops = way[axis.index()];
            let direction = Direction {
                axis,
                positive: hops > 0,
            };
            for _ in 0..hops.unsigned_abs() {
                let link = self
                    .port(chip, direction)
                    .expect("a displacement follows links");
                visit(link);
                chip = self.link(link).to;
            }
        }
    }

    /// A shortest route over live links, by breadth-first search.
    fn search(&self, start: ChipId, end: ChipId) -> Option<Vec<LinkId>> {
        let mut via: Vec<Option<LinkId>> = vec![None; self.slice().chips() as usize];
        let mut queue = VecDeque::from([start]);
        while let Some(chip) = queue.pop_front() {
            if chip == end {
                let mut route = Vec::new();
                let mut at = end;
                while at != start {
                    let link = via[at.index()]?;
                    route.push(link);
                    at = self.link(link).from;
                }
                route.reverse();
                return Some(route);
            }
            for (id, link) in self.live_links(chip) {
                if link.to != start && via[link.to.index()].is_none() {
                    via[link.to.index()] = Some(id);
                    queue.push_back(link.to);
                }
            }
        }
        None
    }

    /// Live chips that the largest connected part of the slice cannot reach, by index.
    pub fn cut_off(&self) -> Vec<Coord> {
        let shape = self.slice().shape();
        let mut part = vec![usize::MAX; shape.chips() as usize];
        let mut sizes = Vec::new();
        for start in (0..shape.chips())
            .map(ChipId)
            .filter(|&chip| self.is_alive(chip))
        {
            if part[start.index()] != usize::MAX {
                continue;
            }
            let mut size = 0;
            let mut stack = vec![start];
            part[start.index()] = sizes.len();
            while let Some(chip) = stack.pop() {
                size += 1;
                for (_, link) in self.live_links(chip) {
                    if part[link.to.index()] == usize::MAX {
                        part[link.to.index()] = sizes.len();
                        stack.push(link.to);
                    }
                }
            }
            sizes.push(size);
        }
        // Of equal parts the first counts as the largest.
        let largest = (0..sizes.len()).rev().max_by_key(|&part| sizes[part]);
        shape
            .coords()
            .filter(|&coord| {
                let part = part[shape.chip(coord).index()];
                part != usize::MAX && Some(part) != largest
            })
            .collect()
    }

    /// What a traffic pattern of (from, to, bytes) puts on each link. With `balance`, a
    /// transfer with several shortest displacements is spread evenly over them, as torus
    /// collectives do; otherwise it takes the one route of [`LinkGraph::route`].
    ///
    /// # Errors
    /// As [`LinkGraph::route`].
    pub fn congestion(
        &self,
        pattern: impl IntoIterator<Item = (Coord, Coord, f64)>,
        balance: bool,
    ) -> Result<Congestion, Error> {
        let mut bytes = vec![0.0; self.len()];
        for (from, to, amount) in pattern {
            if balance && !self.has_faults() {
                self.slice().chip(from)?;
                self.slice().chip(to)?;
                let ways = self.slice().torus().displacements(from, to);
                let share = amount / ways.len() as f64;
                for way in ways {
                    self.walk(from, way, |link| bytes[link.index()] += share);
                }
            } else {
                for link in self.route(from, to)? {
                    bytes[link.index()] += amount;
                }
            }
        }
        Ok(Congestion {
            bytes,
            bandwidth: self.bandwidth(),
        })
    }

    /// Bytes a second that can cross from one half of the slice to the other, one direction:
    /// the smallest over all cuts into two equal boxes. Dead links do not count.
    pub fn bisection_bandwidth(&self) -> f64 {
        let shape = self.slice().shape();
        let mut fewest = usize::MAX;
        for axis in Axis::ALL {
            let extent = shape.extents()[axis.index()];
            if !extent.is_multiple_of(2) {
                continue;
            }
            for start in 0..extent / 2 {
                let upper = |chip: ChipId| {
                    let at = shape.coord(chip).get(axis);
                    (at + extent - start) % extent >= extent / 2
                };
                let crossing = self
                    .links()
                    .filter(|&(id, link)| !upper(link.from) && upper(link.to) && self.is_live(id));
                fewest = fewest.min(crossing.count());
            }
        }
        if fewest == usize::MAX {
            0.0
        } else {
            fewest as f64 * self.bandwidth()
        }
    }
}

/// Bytes on each link of a slice.
#[derive(Clone, Debug, PartialEq)]
pub struct Congestion {
    bytes: Vec<f64>,
    bandwidth: f64,
}

impl Congestion {
    /// Bytes on each link direction, by [`LinkId`].
    pub fn bytes(&self) -> &[f64] {
        &self.bytes
    }

    /// Bytes on the busiest link direction.
    pub fn max_bytes(&self) -> f64 {
        self.bytes.iter().copied().fold(0.0, f64::max)
    }

    /// Seconds until the busiest link is done.
    pub fn seconds(&self) -> f64 {
        self.max_bytes() / self.bandwidth
    }
}
