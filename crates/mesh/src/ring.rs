//! Rings over physical links: one over all chips, or as many without a common link as the
//! torus holds.

use crate::{Axis, ChipId, Coord, Direction, Error, LinkGraph, Shape, Slice, Torus};

/// An order of all chips of a slice in which neighbours, the last and the first included,
/// are joined by links.
///
/// Without wrap it is a snake with one column kept free for the way back; a slice of two
/// chips goes to and fro over its one link.
///
/// ```
/// use tpu_dist_mesh::{Slice, ring};
/// let ring = ring::ring(&"v5e:2x2".parse::<Slice>()?);
/// assert_eq!(ring.iter().map(|chip| chip.0).collect::<Vec<_>>(), [0, 1, 3, 2]);
/// # Ok::<(), tpu_dist_mesh::Error>(())
/// ```
pub fn ring(slice: &Slice) -> Vec<ChipId> {
    // All extents of legal slices are even or 1.
    let order = cycle(&slice.shape().extents()).expect("a box of even extents has a cycle");
    order.into_iter().map(ChipId).collect()
}

/// Rings over all live chips that share no link: with wrap along every axis as many as the torus has
/// dimensions (2 or 3), otherwise 1, as the chips at the corners of a mesh have too few links for
/// more. Using each in both directions uses every link of the torus.
///
/// Rings over dead links are left out. Where none is left, or where chips are dead, there is one
/// ring around what is dead, if the live chips are whole squares of four neighbours, as they are when
/// hosts of 2x2 chips die.
///
/// # Errors
/// [`Error::NoRing`], which says whether there is none or only none that is looked for. One dead
/// chip leaves none: neighbours stand on even and odd places in turn, and as many of each are
/// needed.
///
/// The construction starts from the axes, each a set of rings, and exchanges opposite
/// sides of unit squares between two sets until each set is one ring. That a torus decomposes into
/// rings is due to Kotzig (two dimensions) and Foregger (three).
pub fn rings(links: &LinkGraph) -> Result<Vec<Vec<ChipId>>, Error> {
    let slice = links.slice();
    let shape = slice.shape();
    let axes: Vec<_> = Axis::ALL
        .into_iter()
        .filter(|axis| shape.extents()[axis.index()] > 1)
        .collect();
    let closed = axes.iter().all(|axis| slice.wrap()[axis.index()]);
    let all = if closed && axes.len() > 1 {
        Decomposition::new(slice.torus(), &axes).solve()
    } else {
        vec![ring(slice)]
    };
    let live = |ring: &Vec<ChipId>| {
        (0..ring.len()).all(|at| {
            let (from, to) = (ring[at], ring[(at + 1) % ring.len()]);
            links.is_alive(from)
                && (from == to || links.live_links(from).any(|(_, link)| link.to == to))
        })
    };
    let rings: Vec<_> = all.into_iter().filter(live).collect();
    if !rings.is_empty() {
        return Ok(rings);
    }
    match around(links, &axes) {
        Some(ring) => Ok(vec![ring]),
        None => Err(Error::NoRing {
            what: slice.name(),
            reason: why_none(links),
        }),
    }
}

/// Why [`around`] found nothing.
fn why_none(links: &LinkGraph) -> String {
    let shape = links.slice().shape();
    let odd = |chip: ChipId| shape.coord(chip).0.iter().sum::<u32>() % 2 == 1;
    let (dead, alive): (Vec<_>, Vec<_>) = shape
        .coords()
        .map(|coord| shape.chip(coord))
        .partition(|&chip| !links.is_alive(chip));
    let what = match dead[..] {
        [] => "each crosses a dead link".to_owned(),
        [chip] => format!("chip {} is dead", shape.coord(chip)),
        [chip, ..] => format!(
            "{} chips are dead, {} the first",
            dead.len(),
            shape.coord(chip)
        ),
    };
    let alternate = alive.iter().all(|&chip| {
        links
            .live_links(chip)
            .all(|(_, link)| odd(link.from) != odd(link.to))
    });
    let odds = alive.iter().filter(|&&chip| odd(chip)).count();
    let evens = alive.len() - odds;
    if alternate && odds != evens && alive.len() > 1 {
        return format!(
            "{what}; neighbours alternate between {evens} even and {odds} odd places, of which a \
             ring needs as many"
        );
    }
    format!("{what}; others are looked for only where whole squares of four chips live")
}

/// A ring over all live chips where these are whole squares of a tiling: the squares, joined one
/// to the other by exchanging a side of each for the two links between them.
fn around(links: &LinkGraph, axes: &[Axis]) -> Option<Vec<ChipId>> {
    let shape = links.slice().shape();
    let chips = shape.chips() as usize;
    let step = |chip: u32, axis: Axis| {
        let direction = Direction {
            axis,
            positive: true,
        };
        let link = links.port(ChipId(chip), direction)?;
        links.is_live(link).then(|| links.link(link).to.0)
    };
    let pairs = axes
        .iter()
        .enumerate()
        .flat_map(|(at, &first)| axes[at + 1..].iter().map(move |&second| (first, second)));
    for (first, second) in pairs {
        // The two neighbours of each chip, and the ring it is in.
        let mut next = vec![[u32::MAX; 2]; chips];
        let mut squares = vec![u32::MAX; chips];
        let corner = |chip: &u32| {
            let Coord(at) = shape.coord(ChipId(*chip));
            at[first.index()].is_multiple_of(2) && at[second.index()].is_multiple_of(2)
        };
        for a in (0..chips as u32).filter(corner) {
            let (Some(b), Some(c)) = (step(a, first), step(a, second)) else {
                continue;
            };
            let d = step(c, first);
            if d.is_none() || d != step(b, second) {
                continue;
            }
            let square = [a, b, d.unwrap_or(a), c];
            for (at, &chip) in square.iter().enumerate() {
                next[chip as usize] = [square[(at + 1) % 4], square[(at + 3) % 4]];
                squares[chip as usize] = a;
            }
        }
        let covered = |chip: u32| squares[chip as usize] != u32::MAX;
        if (0..chips as u32).any(|chip| links.is_alive(ChipId(chip)) != covered(chip)) {
            continue;
        }
        let mut parents: Vec<u32> = (0..chips as u32).collect();
        let mut joined = true;
        while joined {
            joined = false;
            for a in (0..chips as u32).filter(|&chip| covered(chip)) {
                for axis in axes {
                    for side in 0..2 {
                        let b = next[a as usize][side];
                        let (Some(c), Some(d)) = (step(a, *axis), step(b, *axis)) else {
                            continue;
                        };
                        let ends = [a, c].map(|chip| find(&mut parents, squares[chip as usize]));
                        if ends[0] == ends[1] || !next[c as usize].contains(&d) {
                            continue;
                        }
                        parents[ends[0] as usize] = ends[1];
                        for (chip, old, new) in [(a, b, c), (b, a, d), (c, d, a), (d, c, b)] {
                            let places = &mut next[chip as usize];
                            let place = usize::from(places[0] != old);
                            places[place] = new;
                        }
                        joined = true;
                    }
                }
            }
        }
        let start = (0..chips as u32).find(|&chip| covered(chip))?;
        let mut ring = vec![ChipId(start)];
        let (mut before, mut chip) = (start, next[start as usize][0]);
        while chip != start {
            ring.push(ChipId(chip));
            let [a, b] = next[chip as usize];
            (before, chip) = (chip, if a == before { b } else { a });
        }
        if ring.len() == (0..chips as u32).filter(|&chip| covered(chip)).count() {
            return Some(ring);
        }
    }
    None
}

/// The representative of a set of a union-find structure.
fn find(parents: &mut [u32], mut at: u32) -> u32 {
    while parents[at as usize] != at {
        parents[at as usize] = parents[parents[at as usize] as usize];
        at = parents[at as usize];
    }
    at
}

/// A cyclic order of the cells of a box, first extent fastest, in which neighbours are adjacent
/// cells; `None` where there is none (one axis of more than two cells, or an odd number of cells).
pub(crate) fn cycle(extents: &[u32]) -> Option<Vec<u32>> {
    let cells: u32 = extents.iter().product();
    if cells <= 2 {
        return Some((0..cells).collect());
    }
    // The box is a grid of its first axis by a snake through the others.
    let axis = extents.iter().position(|&extent| extent > 1)?;
    let columns = extents[axis];
    let rows = snake(&extents[axis + 1..]);
    let height = rows.len() as u32;
    if height < 2 {
        return None;
    }
    let cell = |column: u32, row: u32| rows[row as usize] * columns + column;
    if height.is_multiple_of(2) {
        Some(
            comb(columns, height)
                .into_iter()
                .map(|(column, row)| cell(column, row))
                .collect(),
        )
    } else if columns.is_multiple_of(2) {
        Some(
            comb(height, columns)
                .into_iter()
                .map(|(row, column)| cell(column, row))
                .collect(),
        )
    } else {
        None
    }
}

/// A Hamiltonian cycle of a grid with an even number of rows: along the first row, a snake
/// through the others without column 0, back along column 0.
fn comb(columns: u32, rows: u32) -> Vec<(u32, u32)> {
    let mut order = vec![(0, 0)];
    for row in 0..rows {
        let along = 1..columns;
        if row % 2 == 0 {
            order.extend(along.map(|column| (column, row)));
        } else {
            order.extend(along.rev().map(|column| (column, row)));
        }
    }
    order.extend((1..rows).rev().map(|row| (0, row)));
    order
}

/// An order of the cells of a box, first extent fastest, in which neighbours are adjacent.
pub(crate) fn snake(extents: &[u32]) -> Vec<u32> {
    let mut order = vec![0];
    let mut stride = 1;
    for &extent in extents {
        let below = order.clone();
        order.clear();
        for at in 0..extent {
            let layer = below.iter().map(|cell| cell + at * stride);
            if at % 2 == 0 {
                order.extend(layer);
            } else {
                order.extend(layer.rev());
            }
        }
        stride *= extent;
    }
    order
}

/// A partition of a torus's links into one set a colour; in each, every chip has two.
struct Decomposition {
    shape: Shape,
    axes: Vec<Axis>,
    /// `neighbours[chip][direction]`
    neighbours: Vec<[u32; 6]>,
    /// The colour of the link at each port.
    colours: Vec<[u8; 6]>,
    /// Per colour and chip: which cycle, and where in it.
    cycles: Vec<Vec<(u32, u32)>>,
    counts: Vec<u32>,
}

/// The square at a chip spanned by two axes.
#[derive(Clone, Copy)]
struct Square {
    chip: u32,
    first: Axis,
    second: Axis,
}

impl Decomposition {
    fn new(torus: &Torus, axes: &[Axis]) -> Decomposition {
        let shape = torus.shape();
        let neighbours = shape
            .coords()
            .map(|coord| {
                Direction::ALL.map(|direction| {
                    torus
                        .neighbour(coord, direction)
                        .map_or(0, |next| shape.chip(next).0)
                })
            })
            .collect();
        let by_axis = Direction::ALL.map(|direction| direction.axis as u8);
        let mut this = Decomposition {
            shape,
            axes: axes.to_vec(),
            neighbours,
            colours: vec![by_axis; shape.chips() as usize],
            cycles: vec![Vec::new(); 3],
            counts: vec![0; 3],
        };
        for axis in axes {
            this.label(*axis as u8);
        }
        this
    }

    fn next(&self, chip: u32, axis: Axis) -> u32 {
        self.neighbours[chip as usize][Direction {
            axis,
            positive: true,
        }
        .index()]
    }

    fn colour(&self, chip: u32, axis: Axis) -> u8 {
        self.colours[chip as usize][Direction {
            axis,
            positive: true,
        }
        .index()]
    }

    fn paint(&mut self, chip: u32, axis: Axis, colour: u8) {
        let there = Direction {
            axis,
            positive: true,
        };
        let next = self.next(chip, axis);
        self.colours[chip as usize][there.index()] = colour;
        self.colours[next as usize][there.reversed().index()] = colour;
    }

    /// The chips of the cycle of `colour` through `start`, in order.
    fn trace(&self, colour: u8, start: u32, mut visit: impl FnMut(u32)) {
        let mut chip = start;
        let mut came: Option<usize> = None;
        loop {
            visit(chip);
            let leave = (0..Direction::ALL.len())
                .find(|&port| {
                    self.colours[chip as usize][port] == colour
                        && Some(port) != came
                        && self.axes.contains(&Direction::ALL[port].axis)
                })
                .expect("every chip has two links of each colour");
            came = Some(Direction::ALL[leave].reversed().index());
            chip = self.neighbours[chip as usize][leave];
            if chip == start {
                return;
            }
        }
    }

    fn label(&mut self, colour: u8) {
        const NONE: u32 = u32::MAX;
        let mut labels = vec![(NONE, 0); self.shape.chips() as usize];
        let mut count = 0;
        for start in 0..self.shape.chips() {
            if labels[start as usize].0 == NONE {
                let mut at = 0;
                self.trace(colour, start, |chip| {
                    labels[chip as usize] = (count, at);
                    at += 1;
                });
                count += 1;
            }
        }
        self.cycles[colour as usize] = labels;
        self.counts[colour as usize] = count;
    }

    /// The two colours that could exchange the sides of a square.
    fn exchangeable(&self, square: Square) -> Option<(u8, u8)> {
        let Square {
            chip,
            first,
            second,
        } = square;
        let a = self.colour(chip, first);
        let b = self.colour(chip, second);
        (a != b
            && a == self.colour(self.next(chip, second), first)
            && b == self.colour(self.next(chip, first), second))
        .then_some((a, b))
    }

    /// By how much the exchange changes the number of cycles of `colour`, whose sides join
    /// p to q and r to s, with p next to r and q next to s.
    fn change(&self, colour: u8, [p, q, r, s]: [u32; 4]) -> i32 {
        let at = |chip: u32| self.cycles[colour as usize][chip as usize];
        if at(p).0 != at(r).0 {
            return -1;
        }
        // Within one cycle the two sides are passed in the same sense, and the exchange turns the
        // part between them round, or in opposite senses, and it comes off.
        let forward = |from: u32, to: u32| {
            let (a, b) = (at(from).1, at(to).1);
            b == a + 1 || (b == 0 && a != 1)
        };
        if forward(p, q) == forward(r, s) { 0 } else { 1 }
    }

    fn corners(&self, square: Square) -> [u32; 4] {
        let right = self.next(square.chip, square.first);
        let up = self.next(square.chip, square.second);
        [square.chip, right, up, self.next(up, square.first)]
    }

    fn exchange(&mut self, square: Square, (a, b): (u8, u8)) {
        let [chip, right, up, _] = self.corners(square);
        self.paint(chip, square.first, b);
        self.paint(up, square.first, b);
        self.paint(chip, square.second, a);
        self.paint(right, square.second, a);
    }

    /// Exchanges squares until every colour is one cycle.
    fn solve(mut self) -> Vec<Vec<ChipId>> {
        let pairs: Vec<(Axis, Axis)> = self
            .axes
            .iter()
            .enumerate()
            .flat_map(|(i, &first)| {
                self.axes[i + 1..]
                    .iter()
                    .map(move |&second| (first, second))
            })
            .collect();
        let squares: Vec<Square> = (0..self.shape.chips())
            .flat_map(|chip| {
                pairs.iter().map(move |&(first, second)| Square {
                    chip,
                    first,
                    second,
                })
            })
            .collect();
        self.merge_greedily(&squares);

        // What is left needs exchanges that only turn a cycle round; where no exchange helps, a
        // neutral one leads on. The walk is a fixed sequence, so results are reproducible.
        let mut random = 0x9e37_79b9_7f4a_7c15u64;
        while self.axes.iter().any(|&axis| self.counts[axis.index()] > 1) {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            let offset = (random % squares.len() as u64) as usize;
            let mut neutral = None;
            let better = (0..squares.len()).find_map(|step| {
                let square = squares[(offset + step) % squares.len()];
                let (a, b) = self.exchangeable(square)?;
                let [p, q, r, s] = self.corners(square);
                let change = self.change(a, [p, q, r, s]) + self.change(b, [p, r, q, s]);
                if change == 0 && neutral.is_none() {
                    neutral = Some((square, (a, b)));
                }
                (change < 0).then_some((square, (a, b)))
            });
            let (square, colours) = better
                .or(neutral)
                .expect("a torus has a square that can be exchanged");
            self.exchange(square, colours);
            self.label(colours.0);
            self.label(colours.1);
        }
        self.axes
            .iter()
            .map(|&axis| {
                let mut ring = Vec::with_capacity(self.shape.chips() as usize);
                self.trace(axis as u8, 0, |chip| ring.push(ChipId(chip)));
                ring
            })
            .collect()
    }

    /// Exchanges every square that joins two cycles of both of its colours.
    fn merge_greedily(&mut self, squares: &[Square]) {
        let mut parents: Vec<Vec<u32>> = self
            .counts
            .iter()
            .map(|&count| (0..count).collect())
            .collect();
        for &square in squares {
            let Some((a, b)) = self.exchangeable(square) else {
                continue;
            };
            let [p, q, r, _] = self.corners(square);
            let mut ends = |colour: u8, x: u32, y: u32| {
                let cycles = &self.cycles[colour as usize];
                let parents = &mut parents[colour as usize];
                let ends = (
                    find(parents, cycles[x as usize].0),
                    find(parents, cycles[y as usize].0),
                );
                (ends.0 != ends.1).then_some(ends)
            };
            if let (Some((a0, a1)), Some((b0, b1))) = (ends(a, p, r), ends(b, p, q)) {
                parents[a as usize][a0 as usize] = a1;
                parents[b as usize][b0 as usize] = b1;
                self.exchange(square, (a, b));
            }
        }
        for axis in self.axes.clone() {
            self.label(axis as u8);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn adjacent(extents: &[u32], mut a: u32, mut b: u32) -> bool {
        let mut distance = 0;
        for extent in extents {
            distance += (a % extent).abs_diff(b % extent);
            a /= extent;
            b /= extent;
        }
        distance == 1
    }

    #[test]
    fn boxes_have_snakes_and_even_ones_cycles() {
        for x in 1..6 {
            for y in 1..6 {
                for z in 1..5 {
                    for w in 1..4 {
                        let extents = [x, y, z, w];
                        let cells = x * y * z * w;
                        let lines = extents.iter().filter(|&&extent| extent > 1).count();
                        let snake = snake(&extents);
                        let mut visited = snake.clone();
                        visited.sort_unstable();
                        assert!(visited.into_iter().eq(0..cells));
                        assert!(snake.windows(2).all(|p| adjacent(&extents, p[0], p[1])));
                        let cycle = cycle(&extents);
                        let exists = cells <= 2 || (cells.is_multiple_of(2) && lines > 1);
                        assert_eq!(cycle.is_some(), exists, "{extents:?}");
                        let Some(cycle) = cycle.filter(|_| cells > 2) else {
                            continue;
                        };
                        let mut visited = cycle.clone();
                        visited.sort_unstable();
                        assert!(visited.into_iter().eq(0..cells));
                        for at in 0..cycle.len() {
                            let next = cycle[(at + 1) % cycle.len()];
                            assert!(adjacent(&extents, cycle[at], next), "{extents:?}");
                        }
                    }
                }
            }
        }
    }
}
