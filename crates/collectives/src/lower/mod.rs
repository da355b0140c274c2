//! StableHLO programs for collectives over ICI: one for each collective, shape and group.
//!
//! A program is for `num_partitions` partitions of one replica, compiled with SPMD
//! partitioning: that is what libtpu takes collectives with global device ids in. Each
//! partition passes its own data; shapes are those of one partition. Partition p is device p of
//! the device assignment, so a program over members only and one over the whole world differ only
//! in the groups and the assignment.
//!
//! What libtpu 0.0.52 cannot compile is expressed by what it can, with the same bits:
//!
//! | collective | program |
//! |---|---|
//! | all_reduce, reduce | `all_reduce`; of complex numbers on real and imaginary parts; where the type has no such reduction (64 bits other than sums), `all_gather` and a local reduction in rank order |
//! | reduce_scatter | `reduce_scatter`, along each dimension of the group's [`Grid`] in turn; where the type has none, `all_to_all` and a local reduction |
//! | all_gather, gather | `all_gather` |
//! | all_to_all | `all_to_all`; uneven: [`ragged_all_to_all`] with sizes at run time |
//! | broadcast | an integer `all_reduce` of the root's bits and zeros elsewhere; 64-bit floats `all_gather` and take the root's |
//! | scatter | `all_to_all`, of which the root's piece is taken |
//! | barrier | `all_reduce` of one integer |
//! | send, recv | [`permute`]: `collective_permute` |
//!
//! A [`Placement`] says on which devices a group's program runs, and what it cannot have there.

mod element;
mod placement;
mod text;

pub use placement::Placement;

use crate::op::ReduceKind;
use crate::{DType, Kind};
use element::Element;
use text::{Body, Groups, Type, Value};

/// A collective to compile.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Collective {
    /// What is done. `Send` and `Recv` are [`permute`].
    pub kind: Kind,
    /// The operator, for reductions.
    pub op: Option<ReduceKind>,
    /// Element type.
    pub dtype: DType,
    /// Elements of each piece, as in [`Request::counts`](crate::schedule::Request::counts): one
    /// entry, or one for each rank of a group. Ranks bring and get as many as the largest piece;
    /// what is beyond their own is padding.
    pub counts: Vec<u64>,
    /// The groups, of equal size, which name every partition once. All do the collective at
    /// once.
    pub groups: Vec<Vec<u32>>,
    /// How a group's ranks stand on a torus; `None` for a line or when it is not known.
    pub grid: Option<Grid>,
    /// How reductions of floating-point types of at most 16 bits accumulate.
    pub accumulation: Accumulation,
    /// Whether data is gathered and reduced by each rank, where libtpu has no reduction for the
    /// groups: see [`Placement::gathered`].
    pub gathered: bool,
}

/// The box that the ranks of every group fill.
///
/// libtpu turns the reduce-scatter of a whole torus into an all-reduce and a slice, but keeps
/// those along one dimension: one after the other they have half the traffic.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grid {
    sides: Vec<u32>,
    order: Vec<u32>,
}

impl Grid {
    /// A box with these sides, which ranks fill in their order, the first side fastest.
    pub fn new(sides: impl Into<Vec<u32>>) -> Grid {
        let sides = sides.into();
        let ranks = sides.iter().product();
        Grid::ordered(sides, (0..ranks).collect::<Vec<_>>())
    }

    /// A box with these sides, of which rank `order[place]` has the given place, the first side
    /// fastest.
    pub fn ordered(sides: impl Into<Vec<u32>>, order: impl Into<Vec<u32>>) -> Grid {
        Grid {
            sides: sides.into(),
            order: order.into(),
        }
    }

    /// Its sides.
    pub fn sides(&self) -> &[u32] {
        &self.sides
    }

    /// The rank at each place.
    pub fn order(&self) -> &[u32] {
        &self.order
    }

    fn fits(&self, ranks: usize) -> bool {
        let inside: u64 = self.sides.iter().map(|&side| u64::from(side)).product();
        let mut order = self.order.clone();
        order.sort_unstable();
        inside == ranks as u64 && order.into_iter().eq(0..ranks as u32)
    }

    fn is_in_order(&self) -> bool {
        self.order.is_sorted()
    }
}

/// How narrow floating-point types accumulate in a reduction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Accumulation {
    /// In f32, rounded once; the links carry f32.
    #[default]
    Wide,
    /// In their own type: half the bytes on the links, rounded at each step.
    Native,
}

/// A program as text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    /// Its name, as `all_reduce`.
    pub name: &'static str,
    /// StableHLO in MLIR's text form.
    pub text: String,
    /// Partitions that it must be compiled for.
    pub partitions: u32,
}

/// A collective that has no program.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LowerError {
    /// Groups that libtpu would crash on or run wrongly.
    #[error("groups: {0}")]
    Groups(String),
    /// Counts that do not fit the collective.
    #[error("counts: {kind} of {ranks} ranks expects {expected}, got {got} entries")]
    Counts {
        /// The collective.
        kind: Kind,
        /// Ranks of a group.
        ranks: usize,
        /// What is legal.
        expected: &'static str,
        /// Entries given.
        got: usize,
    },
    /// Nothing to move: there is no program, and none is needed.
    #[error("counts: {0} of no elements")]
    Empty(Kind),
    /// A grid of other ranks.
    #[error("grid: {:?} does not have each of {ranks} ranks once", .grid.sides())]
    Grid {
        /// What was given.
        grid: Grid,
        /// Ranks of a group.
        ranks: usize,
    },
    /// A reduction without an operator.
    #[error("op: {0} needs one")]
    NoOp(Kind),
    /// An operator that the element type does not have.
    #[error("op: {op} is not defined on {dtype}")]
    Op {
        /// The operator.
        op: ReduceKind,
        /// The element type.
        dtype: DType,
    },
    /// A kind that is not done by a program of its own.
    #[error("kind: {0} has no program of its own")]
    Kind(Kind),
    /// Pairs that are no partial permutation of the partitions.
    #[error("pairs: {0}")]
    Pairs(String),
}

/// The program for a collective.
///
/// Its function `main` takes and returns one-dimensional tensors:
///
/// | kind | takes | returns |
/// |---|---|---|
/// | all_reduce, reduce, broadcast | count | count (a reduce's other ranks: what they brought) |
/// | all_gather, gather | largest piece | all pieces |
/// | reduce_scatter, scatter | all pieces | largest piece |
/// | all_to_all | ranks x piece | ranks x piece |
/// | barrier | one | one |
///
/// `PREMUL_SUM` takes the rank's factor as a second argument: a scalar of the (real) type in which
/// it accumulates. Broadcast, reduce and scatter take two more i32 scalars, the root's rank in the
/// group and this rank's: one program serves all roots. A barrier's one element is an i32.
///
/// ```
/// use tpu_dist_collectives::lower::{Accumulation, Collective, lower};
/// use tpu_dist_collectives::{DType, Kind, ReduceKind};
///
/// let program = lower(&Collective {
///     kind: Kind::AllReduce,
///     op: Some(ReduceKind::Sum),
///     dtype: DType::F32,
///     counts: vec![1024],
///     groups: vec![vec![0, 1], vec![2, 3]],
///     grid: None,
///     accumulation: Accumulation::Wide,
///     gathered: false,
/// })?;
/// assert_eq!(program.partitions, 4);
/// assert!(program.text.contains("replica_groups = dense<[[0, 1], [2, 3]]> : tensor<2x2xi64>"));
/// # Ok::<(), tpu_dist_collectives::lower::LowerError>(())
/// ```
///
/// # Errors
/// For what does not fit together; libtpu itself does not check groups.
pub fn lower(collective: &Collective) -> Result<Program, LowerError> {
    let lowering = Lowering::new(collective)?;
    let kind = collective.kind;
    let (name, text) = match kind {
        Kind::AllReduce | Kind::Reduce => (kind.name(), lowering.all_reduce()?),
        Kind::ReduceScatter => (kind.name(), lowering.reduce_scatter()?),
        Kind::AllGather | Kind::Gather => (kind.name(), lowering.all_gather()),
        Kind::AllToAll => (kind.name(), lowering.all_to_all()),
        Kind::Broadcast => (kind.name(), lowering.broadcast()),
        Kind::Scatter => (kind.name(), lowering.scatter()),
        Kind::Barrier => (kind.name(), lowering.barrier()),
        Kind::Send | Kind::Recv | Kind::MonitoredBarrier => return Err(LowerError::Kind(kind)),
    };
    Ok(Program {
        name,
        text,
        partitions: lowering.partitions,
    })
}

/// The program that moves a tensor of `count` elements from the first to the second partition
/// of each pair: sends and receives. It takes and returns `count` elements; who is
/// sent nothing gets zeros.
///
/// # Errors
/// For a partition that does not exist, sends twice or receives twice.
pub fn permute(
    dtype: DType,
    count: u64,
    pairs: &[(u32, u32)],
    partitions: u32,
) -> Result<Program, LowerError> {
    for (ends, does) in [(0, "sends"), (1, "receives")] {
        let mut seen = vec![false; partitions as usize];
        for &(from, to) in pairs {
            let end = if ends == 0 { from } else { to };
            match seen.get_mut(end as usize) {
                None => {
                    let message = format!("expected partitions below {partitions}, got {end}");
                    return Err(LowerError::Pairs(message));
                }
                Some(true) => {
                    return Err(LowerError::Pairs(format!("partition {end} {does} twice")));
                }
                Some(seen) => *seen = true,
            }
        }
    }
    let mut body = Body::new();
    let input = body.argument(Type::line(Element::of(dtype), count));
    let result = body.permute(&input, pairs);
    Ok(Program {
        name: "permute",
        text: body.finish("permute", partitions, &result),
        partitions,
    })
}

/// The program for an all-to-all whose sizes are known at run time only. Sizes may differ in
/// every call without another compilation.
///
/// It takes: the data, `input` elements; memory for the result, `output` elements, which what is
/// not received keeps; and four i32 tensors with an entry for each rank of the group: where
/// what goes to it starts in the data, how many elements go to it, where these start
/// *in its result*, and how many come from it. It returns the result.
///
/// # Errors
/// For groups that do not fit together.
pub fn ragged_all_to_all(
    dtype: DType,
    input: u64,
    output: u64,
    groups: &[Vec<u32>],
) -> Result<Program, LowerError> {
    let groups = Groups::new(groups)?;
    let element = Element::of(dtype);
    let mut body = Body::new();
    let data = body.argument(Type::line(element, input));
    let result = body.argument(Type::line(element, output));
    let sizes = Type::line(Element::of(DType::I32), groups.size() as u64);
    let sizes = [(); 4].map(|()| body.argument(sizes.clone()));
    let result = body.ragged_all_to_all(&data, &result, &sizes, &groups);
    let partitions = groups.partitions();
    Ok(Program {
        name: "ragged_all_to_all",
        text: body.finish("ragged_all_to_all", partitions, &result),
        partitions,
    })
}

struct Lowering<'a> {
    collective: &'a Collective,
    element: Element,
    groups: Groups,
    ranks: u64,
    partitions: u32,
    /// Elements of each piece; for collectives of one piece that one.
    pieces: Vec<u64>,
}

impl<'a> Lowering<'a> {
    fn new(collective: &'a Collective) -> Result<Lowering<'a>, LowerError> {
        let Collective {
            kind, ref counts, ..
        } = *collective;
        let groups = Groups::new(&collective.groups)?;
        let ranks = groups.size();
        if let Some(grid) = collective.grid.clone().filter(|grid| !grid.fits(ranks)) {
            return Err(LowerError::Grid { grid, ranks });
        }
        let got = counts.len();
        let fail = |expected| {
            Err(LowerError::Counts {
                kind,
                ranks,
                expected,
                got,
            })
        };
        let pieces = match kind {
            Kind::Barrier if got != 0 => return fail("no entry"),
            Kind::AllGather | Kind::Gather | Kind::ReduceScatter | Kind::Scatter => match got {
                1 => vec![counts[0]; ranks],
                _ if got == ranks => counts.clone(),
                _ => return fail("one entry, or one for each rank"),
            },
            Kind::AllReduce | Kind::Reduce | Kind::Broadcast | Kind::AllToAll if got != 1 => {
                return fail("one entry");
            }
            _ => counts.clone(),
        };
        if kind != Kind::Barrier && pieces.iter().all(|&piece| piece == 0) {
            return Err(LowerError::Empty(kind));
        }
        Ok(Lowering {
            collective,
            element: Element::of(collective.dtype),
            partitions: groups.partitions(),
            groups,
            ranks: ranks as u64,
            pieces,
        })
    }

    /// Elements of the largest piece.
    fn largest(&self) -> u64 {
        self.pieces.iter().copied().max().unwrap_or(0)
    }

    fn total(&self) -> u64 {
        self.pieces.iter().sum()
    }

    fn finish(&self, body: Body, result: &Value) -> String {
        body.finish(self.collective.kind.name(), self.partitions, result)
    }

    /// The argument of `main`.
    fn argument(&self, body: &mut Body, count: u64) -> Value {
        body.argument(Type::line(self.element, count))
    }

    fn op(&self) -> Result<ReduceKind, LowerError> {
        let Collective {
            kind, op, dtype, ..
        } = *self.collective;
        let op = op.ok_or(LowerError::NoOp(kind))?;
        if self.element.allows(op) {
            Ok(op)
        } else {
            Err(LowerError::Op { op, dtype })
        }
    }

    /// What is reduced: `pieces` equal pieces of real numbers in the type that accumulates, scaled.
    fn operand(&self, body: &mut Body, input: &Value, pieces: u64, op: ReduceKind) -> Value {
        let real = body.as_real(input, pieces);
        let accumulator = match self.collective.accumulation {
            Accumulation::Wide => real.element().wide(),
            Accumulation::Native => real.element(),
        };
        let value = body.convert(&real, accumulator);
        if op != ReduceKind::PremulSum {
            return value;
        }
        let factor = body.argument(Type::scalar(accumulator));
        body.scale(&value, &factor)
    }

    /// What remains of the operator, in the type that the caller wants.
    fn result(&self, body: &mut Body, sum: &Value, op: ReduceKind) -> Value {
        let value = match op {
            ReduceKind::Avg => body.divide(sum, self.ranks),
            _ => sum.clone(),
        };
        let value = body.convert(&value, self.element.real());
        body.as_complex(&value, self.element)
    }

    fn all_reduce(&self) -> Result<String, LowerError> {
        let op = self.op()?;
        let mut body = Body::new();
        let input = self.argument(&mut body, self.pieces[0]);
        let value = self.operand(&mut body, &input, 1, op);
        let native = value.element().reduces_natively(op) && !self.collective.gathered;
        let reduced = if native {
            body.all_reduce(&value, op, &self.groups)
        } else {
            let all = body.all_gather(&value, &self.groups);
            body.reduce(&all, op, self.ranks)
        };
        let mut result = self.result(&mut body, &reduced, op);
        if self.collective.kind == Kind::Reduce {
            let [root, rank] = body.root_and_rank();
            let at_root = body.equal(&root, &rank);
            result = body.select(&at_root, &result, &input);
        }
        Ok(self.finish(body, &result))
    }

    fn reduce_scatter(&self) -> Result<String, LowerError> {
        let op = self.op()?;
        let mut body = Body::new();
        let input = self.argument(&mut body, self.total());
        let input = body.spread(&input, &self.pieces, self.largest());
        let value = self.operand(&mut body, &input, self.ranks, op);
        let native = value.element().scatters_natively(op) && !self.collective.gathered;
        let reduced = if native {
            let (value, lines) = match &self.collective.grid {
                None => (value, vec![self.groups.clone()]),
                Some(grid) if grid.is_in_order() => (value, self.groups.lines(grid)),
                // The pieces in the order of the places.
                Some(grid) => (body.reorder(&value, grid.order()), self.groups.lines(grid)),
            };
            // The slowest dimension first: what is left is in one run each time.
            let scatter = |value, line| body.reduce_scatter(&value, op, line);
            lines.iter().rev().fold(value, scatter)
        } else {
            let all = body.all_to_all(&value, &self.groups);
            body.reduce(&all, op, self.ranks)
        };
        let result = self.result(&mut body, &reduced, op);
        Ok(self.finish(body, &result))
    }

    fn all_gather(&self) -> String {
        let mut body = Body::new();
        let input = self.argument(&mut body, self.largest());
        let all = body.all_gather(&input, &self.groups);
        let result = body.collect(&all, &self.pieces, self.largest());
        self.finish(body, &result)
    }

    fn all_to_all(&self) -> String {
        let mut body = Body::new();
        let input = self.argument(&mut body, self.ranks * self.pieces[0]);
        let result = body.all_to_all(&input, &self.groups);
        self.finish(body, &result)
    }

    fn broadcast(&self) -> String {
        let mut body = Body::new();
        let count = self.pieces[0];
        let input = self.argument(&mut body, count);
        let [root, rank] = body.root_and_rank();
        let bits = self.element.bits().filter(|_| !self.collective.gathered);
        let Some(bits) = bits else {
            let all = body.all_gather(&input, &self.groups);
            let result = body.piece(&all, &root, count);
            return self.finish(body, &result);
        };
        let real = body.as_real(&input, 1);
        let value = body.bitcast(&real, bits);
        let at_root = body.equal(&root, &rank);
        let zeros = body.zeros_like(&value);
        let value = body.select(&at_root, &value, &zeros);
        let value = body.all_reduce(&value, ReduceKind::Sum, &self.groups);
        let value = body.bitcast(&value, real.element());
        let result = body.as_complex(&value, self.element);
        self.finish(body, &result)
    }

    fn scatter(&self) -> String {
        let mut body = Body::new();
        let input = self.argument(&mut body, self.total());
        let [root, _] = body.root_and_rank();
        let value = body.spread(&input, &self.pieces, self.largest());
        let all = body.all_to_all(&value, &self.groups);
        let result = body.piece(&all, &root, self.largest());
        self.finish(body, &result)
    }

    fn barrier(&self) -> String {
        let mut body = Body::new();
        // A constant could be folded away.
        let input = body.argument(Type::line(Element::of(DType::I32), 1));
        let result = match self.collective.gathered {
            false => body.all_reduce(&input, ReduceKind::Sum, &self.groups),
            true => {
                let all = body.all_gather(&input, &self.groups);
                body.reduce(&all, ReduceKind::Sum, self.ranks)
            }
        };
        self.finish(body, &result)
    }
}
