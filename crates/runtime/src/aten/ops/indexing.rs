//! Reading and writing at indices.

use super::operands;
use crate::aten::Error;
use crate::aten::body::Dims;
use crate::aten::call::Call;
use crate::aten::element::{highest, lowest, opmath};
use crate::aten::request::Number;
use crate::aten::scatter::Combine;
use crate::aten::table::OperatorRow;
use crate::aten::value::{Value, broadcast};
use crate::pjrt::ElementType::{Pred, S64, U8};

pub(super) static ROWS: &[OperatorRow] = &[
    OperatorRow::new("index.Tensor", |call| {
        let value = call.tensor(0)?;
        let at = Places::read(call, value)?;
        Ok(value.take_at(&at.dimensions, &at.indices, at.place))
    }),
    OperatorRow::new("_index_put_impl_", |call| {
        let value = call.tensor(0)?;
        let at = Places::read(call, value)?;
        let combine = if call.bool(3)? {
            Combine::By("add")
        } else {
            Combine::Replace
        };
        let updates = call.tensor_as(2, value.element())?.expand(&at.sizes(value));
        let wide = widened(value, combine);
        let updates = updates.convert(wide.element());
        Ok(wide.put_at(&at.dimensions, &at.indices, at.place, updates, combine))
    }),
    OperatorRow::new("index_select", |call| {
        let value = call.tensor(0)?;
        let index = call.tensor(2)?;
        if value.rank() == 0 {
            return Ok(value);
        }
        Ok(value.take(call.dimension(1, value.rank())?, index.flatten()))
    }),
    OperatorRow::new("take", |call| {
        let value = call.tensor(0)?.flatten();
        if value.count() == 0 {
            return Ok(call.zeros(value.element(), &call.tensor(1)?.dims()));
        }
        Ok(value.take(0, call.tensor(1)?.wrap_index(value.count())))
    }),
    OperatorRow::new("embedding", |call| {
        call.tensor(0)
            .and_then(|table| Ok(table.take(0, call.tensor(1)?)))
    }),
    OperatorRow::new("embedding_dense_backward", embedding_backward),
    OperatorRow::new("gather", |call| {
        let (value, index) = (call.tensor(0)?, call.tensor(2)?);
        if index.count() == 0 {
            return Ok(call.zeros(value.element(), &index.dims()));
        }
        let (value, dims) = (vector(value), index.dims());
        let dimension = call.dimension(1, value.rank())?;
        Ok(value.gather(dimension, vector(index)).reshape(&dims))
    }),
    OperatorRow::new("scatter.src", |call| scatter(call, Combine::Replace, true)),
    OperatorRow::new("scatter.value", |call| {
        scatter(call, Combine::Replace, true)
    }),
    OperatorRow::new("scatter.reduce", |call| scatter_by_name(call, true)),
    OperatorRow::new("scatter.value_reduce", |call| scatter_by_name(call, true)),
    OperatorRow::new("scatter_add", |call| {
        scatter(call, Combine::By("add"), true)
    }),
    OperatorRow::new("scatter_reduce.two", |call| {
        let include = call.bool(5)?;
        scatter_by_name(call, include)
    }),
    OperatorRow::new("index_add", |call| {
        let value = call.tensor(0)?;
        let wide = widened(value, Combine::By("add"));
        let source = call.tensor_as(3, wide.element())?;
        let source = if call.is_number(4, 1.) {
            source
        } else {
            source * call.scalar(4, wide.element())?
        };
        along(call, wide, source, Combine::By("add"))
    }),
    OperatorRow::new("index_copy", |call| {
        let value = call.tensor(0)?;
        let source = call.tensor_as(3, value.element())?;
        along(call, value, source, Combine::Replace)
    }),
    OperatorRow::new("index_fill.int_Scalar", index_fill),
    OperatorRow::new("index_fill.int_Tensor", index_fill),
    OperatorRow::new("masked_scatter", |call| {
        let mask = call.tensor(1)?.convert(Pred);
        let (mask, value) = mask.broadcast_with(call.tensor(0)?);
        let source = call.tensor(2)?.flatten();
        if source.count() == 0 {
            return Ok(value);
        }
        let number = mask.flatten().convert(S64).scan("add", Number::Int(0), 0) - 1.;
        let chosen = source.take(0, number.maximum(0.)).reshape(&value.dims());
        Ok(mask.select(chosen, value))
    }),
];

/// A 0-d value as a vector of one element.
fn vector(value: Value<'_>) -> Value<'_> {
    if value.rank() == 0 {
        value.unsqueeze(0)
    } else {
        value
    }
}

/// The value in the type in which many elements are added.
fn widened(value: Value<'_>, combine: Combine) -> Value<'_> {
    match combine {
        Combine::Replace => value,
        Combine::By(_) => value.convert(opmath(value.element())),
    }
}

/// The places that a list of index tensors means.
struct Places<'b> {
    /// The dimensions that have an index.
    dimensions: Vec<usize>,
    /// Their indices, all of the same sizes.
    indices: Vec<Value<'b>>,
    /// Where the indices' dimensions come among the others.
    place: usize,
}

impl<'b> Places<'b> {
    /// Argument 1, for `value`.
    fn read(call: &Call<'b>, value: Value<'b>) -> Result<Places<'b>, Error> {
        let mut dimensions = Vec::new();
        let mut indices = Vec::new();
        let mut shape = Dims::new();
        for (dimension, index) in call.optionals(1)?.into_iter().enumerate() {
            let Some(index) = index else { continue };
            if matches!(index.element(), Pred | U8) {
                return call.unsupported("for masks, whose number of elements is not known");
            }
            let Some(&size) = value.dims().get(dimension) else {
                return call.malformed("indices", format!("up to {}", value.rank()), dimension + 1);
            };
            shape = broadcast(&shape, &index.dims());
            dimensions.push(dimension);
            indices.push(index.convert(S64).wrap_index(size));
        }
        let (Some(&first), Some(&last)) = (dimensions.first(), dimensions.last()) else {
            return call.malformed("indices", "at least one", ());
        };
        let adjacent = last - first + 1 == dimensions.len();
        Ok(Places {
            indices: indices
                .into_iter()
                .map(|index| index.expand(&shape))
                .collect(),
            place: if adjacent { first } else { 0 },
            dimensions,
        })
    }

    /// Sizes of the elements at the places.
    fn sizes(&self, value: Value<'b>) -> Dims {
        let mut sizes = crate::aten::reduce::without(&value.dims(), &self.dimensions);
        sizes.insert_many(self.place, self.indices[0].dims());
        sizes
    }
}

/// Arguments: gradient, indices, number of rows, padding row, whether to divide by how often a row
/// occurs.
fn embedding_backward<'b>(call: &Call<'b>) -> Result<Value<'b>, Error> {
    let [gradient] = operands(call, [0])?;
    let index = call.tensor(1)?.flatten();
    let (rows, padding) = (call.int(2)?, call.int(3)?);
    let width = gradient.dims().last().copied().unwrap_or(1);
    let mut updates = gradient.reshape(&[index.count(), width]);
    let element = updates.element();
    if call.bool(4)? {
        let ones = call.zeros(element, &[index.count()]) + 1.;
        let counts =
            call.zeros(element, &[rows])
                .put_at(&[0], &[index], 0, ones, Combine::By("add"));
        updates = updates / counts.take(0, index).unsqueeze(1);
    }
    let padded = index.eq(index.constant(Number::Int(padding))).unsqueeze(1);
    let updates = padded.select(updates.zeros(), updates);
    Ok(call
        .zeros(element, &[rows, width])
        .put_at(&[0], &[index], 0, updates, Combine::By("add")))
}

/// `source` combined into `value` at the indices, argument 2, along a dimension, argument 1.
fn along<'b>(
    call: &Call<'b>,
    value: Value<'b>,
    source: Value<'b>,
    combine: Combine,
) -> Result<Value<'b>, Error> {
    let index = vector(call.tensor(2)?);
    let dims = value.dims();
    let (value, source) = (vector(value), vector(source));
    let dimension = call.dimension(1, value.rank())?;
    let index = index.wrap_index(value.dims()[dimension]);
    Ok(value
        .put_at(&[dimension], &[index], dimension, source, combine)
        .reshape(&dims))
}

fn index_fill<'b>(call: &Call<'b>) -> Result<Value<'b>, Error> {
    let value = call.tensor(0)?;
    let dimension = call.dimension(1, value.rank())?;
    let mut sizes = vector(value).dims();
    sizes[dimension] = call.tensor(2)?.count();
    let fill = call
        .tensor_as(3, value.element())?
        .broadcast_in_dim(&sizes, &[]);
    along(call, value, fill, Combine::Replace)
}

/// Scatter with the reduction that the last text argument names.
fn scatter_by_name<'b>(call: &Call<'b>, include_self: bool) -> Result<Value<'b>, Error> {
    let operation = match call.text(4)? {
        None => return scatter(call, Combine::Replace, true),
        Some("sum" | "add") => "add",
        Some("prod" | "multiply") => "multiply",
        Some("amax") => "maximum",
        Some("amin") => "minimum",
        Some("mean") => return scatter_mean(call, include_self),
        Some(other) => return call.malformed("reduce", "sum, prod, mean, amax or amin", other),
    };
    scatter(call, Combine::By(operation), include_self)
}

/// Arguments: value, dimension, index, source (a number or at least of the index's sizes).
struct Scatter<'b> {
    /// All of the value, in the type to combine in.
    whole: Value<'b>,
    /// The part of it that has the index's sizes in all other dimensions.
    part: Value<'b>,
    dimension: usize,
    index: Value<'b>,
    source: Value<'b>,
}

impl<'b> Scatter<'b> {
    fn read(call: &Call<'b>, combine: Combine) -> Result<Scatter<'b>, Error> {
        let whole = vector(widened(call.tensor(0)?, combine));
        let index = vector(call.tensor(2)?);
        let dimension = call.dimension(1, whole.rank())?;
        let origin = Dims::from_elem(0, whole.rank());
        let steps = Dims::from_elem(1, whole.rank());
        let mut limits = index.dims();
        let source = vector(call.tensor_as(3, whole.element())?);
        let source = if source.rank() == whole.rank() && source.count() != 1 {
            source.slice(&origin, &limits, &steps)
        } else {
            source.reshape(&[]).broadcast_in_dim(&limits, &[])
        };
        limits[dimension] = whole.dims()[dimension];
        let part = whole.slice(&origin, &limits, &steps);
        Ok(Scatter {
            whole,
            part,
            dimension,
            index,
            source,
        })
    }

    /// `source` combined into `into`.
    fn apply(&self, into: Value<'b>, source: Value<'b>, combine: Combine) -> Value<'b> {
        into.scatter(self.dimension, self.index, source, combine)
    }

    /// The whole value with `part` in its place.
    fn finish(&self, call: &Call<'b>, part: Value<'b>) -> Result<Value<'b>, Error> {
        let whole = if part.dims() == self.whole.dims() {
            part
        } else {
            let zero = self.index.zero();
            self.whole.update(part, &vec![zero; self.whole.rank()])
        };
        Ok(whole.reshape(&call.result(0)?.view.sizes))
    }
}

fn scatter<'b>(call: &Call<'b>, combine: Combine, include_self: bool) -> Result<Value<'b>, Error> {
    if call.tensor(2)?.count() == 0 {
        return call.tensor(0);
    }
    let scatter = Scatter::read(call, combine)?;
    let mut start = scatter.part;
    if let (Combine::By(operation), false) = (combine, include_self) {
        // What is written starts from what makes no difference.
        let neutral = match operation {
            "add" => Number::Int(0),
            "multiply" => Number::Int(1),
            "maximum" => lowest(start.element()),
            _ => highest(start.element()),
        };
        let neutral = scatter.source.constant(neutral);
        start = scatter.apply(start, neutral, Combine::Replace);
    }
    let part = scatter.apply(start, scatter.source, combine);
    scatter.finish(call, part)
}

fn scatter_mean<'b>(call: &Call<'b>, include_self: bool) -> Result<Value<'b>, Error> {
    if call.tensor(2)?.count() == 0 {
        return call.tensor(0);
    }
    let add = Combine::By("add");
    let scatter = Scatter::read(call, add)?;
    let one = |like: Value<'b>| like.constant(Number::Int(1));
    let (source, part) = (scatter.source, scatter.part);
    let (start, counts) = if include_self {
        (part, one(part))
    } else {
        let written = scatter.apply(part, source.zeros(), Combine::Replace);
        (written, part.zeros())
    };
    let sum = scatter.apply(start, source, add);
    let counts = scatter.apply(counts, one(source), add);
    let counts = counts.maximum(1.);
    let mean = sum / counts;
    let mean = if mean.is_float() || mean.is_complex() {
        mean
    } else {
        // Integers round down.
        let rest = sum % counts;
        rest.lt(0.).select(mean - 1., mean)
    };
    scatter.finish(call, mean)
}
