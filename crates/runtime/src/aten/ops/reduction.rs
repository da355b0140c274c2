//! Reductions over dimensions.

use super::floating;
use crate::aten::Error;
use crate::aten::call::Call;
use crate::aten::element::{self, opmath};
use crate::aten::request::Number;
use crate::aten::table::{OperatorRow, Several};
use crate::aten::value::Value;
use crate::pjrt::ElementType::{self, Pred, S64};

pub(super) static ROWS: &[OperatorRow] = &[
    OperatorRow::new("sum", |call| total(call, Dimensions::All, Value::sum)),
    OperatorRow::new("sum.dim_IntList", |call| {
        total(call, Dimensions::Given(1), Value::sum)
    }),
    OperatorRow::new("nansum", |call| {
        total(call, Dimensions::Given(1), |value, dimensions| {
            let value = if value.is_float() {
                value.is_nan().select(value.zeros(), value)
            } else {
                value
            };
            value.sum(dimensions)
        })
    }),
    OperatorRow::new("mean", |call| total(call, Dimensions::All, Value::mean)),
    OperatorRow::new("mean.dim", |call| {
        total(call, Dimensions::Given(1), Value::mean)
    }),
    OperatorRow::new("prod", |call| total(call, Dimensions::All, product)),
    OperatorRow::new("prod.dim_int", |call| {
        total(call, Dimensions::Given(1), product)
    }),
    OperatorRow::new("amax", |call| {
        extreme(call, Dimensions::Given(1), Value::max)
    }),
    OperatorRow::new("amin", |call| {
        extreme(call, Dimensions::Given(1), Value::min)
    }),
    OperatorRow::new("max", |call| extreme(call, Dimensions::All, Value::max)),
    OperatorRow::new("min", |call| extreme(call, Dimensions::All, Value::min)),
    OperatorRow::several("aminmax", |call| {
        let value = call.tensor(0)?;
        let dimensions = Dimensions::Given(1).of(call, value)?;
        Ok(vec![
            Some(shaped(call, 0, value.min(&dimensions))?),
            Some(shaped(call, 1, value.max(&dimensions))?),
        ])
    }),
    OperatorRow::several("max.dim", |call| extreme_and_place(call, true)),
    OperatorRow::several("min.dim", |call| extreme_and_place(call, false)),
    OperatorRow::new("argmax", |call| place(call, true)),
    OperatorRow::new("argmin", |call| place(call, false)),
    OperatorRow::new("all", |call| truth(call, Dimensions::All, "and", true)),
    OperatorRow::new("all.dim", |call| {
        truth(call, Dimensions::Given(1), "and", true)
    }),
    OperatorRow::new("all.dims", |call| {
        truth(call, Dimensions::Exactly(1), "and", true)
    }),
    OperatorRow::new("any", |call| truth(call, Dimensions::All, "or", false)),
    OperatorRow::new("any.dim", |call| {
        truth(call, Dimensions::Given(1), "or", false)
    }),
    OperatorRow::new("any.dims", |call| {
        truth(call, Dimensions::Exactly(1), "or", false)
    }),
    OperatorRow::new("count_nonzero.dim_IntList", |call| {
        let value = call.tensor(0)?;
        let dimensions = Dimensions::Given(1).of(call, value)?;
        Ok(value.convert(Pred).convert(S64).sum(&dimensions))
    }),
    OperatorRow::new("var.correction", |call| {
        let [variance, _] = moments(call)?;
        shaped(call, 0, variance)
    })
    .constants(&[2]),
    OperatorRow::new("std.correction", |call| {
        let [variance, _] = moments(call)?;
        shaped(call, 0, variance.sqrt())
    })
    .constants(&[2]),
    OperatorRow::several("var_mean.correction", |call| {
        let [variance, mean] = moments(call)?;
        both(call, [variance, mean])
    })
    .constants(&[2]),
    OperatorRow::several("std_mean.correction", |call| {
        let [variance, mean] = moments(call)?;
        both(call, [variance.sqrt(), mean])
    })
    .constants(&[2]),
    OperatorRow::new("logsumexp", logsumexp),
    OperatorRow::new("linalg_vector_norm", vector_norm).constants(&[1]),
    OperatorRow::new("norm.ScalarOpt_dim", vector_norm).constants(&[1]),
    OperatorRow::new("norm.ScalarOpt_dim_dtype", vector_norm).constants(&[1]),
    OperatorRow::new("cumsum", |call| scan(call, "add", Number::Int(0))),
    OperatorRow::new("cumprod", |call| scan(call, "multiply", Number::Int(1))),
];

/// The dimensions that an operator reduces.
#[derive(Clone, Copy)]
enum Dimensions {
    All,
    /// Those of this argument, all if there are none.
    Given(usize),
    /// Those of this argument, all if it is not given; an empty list is none.
    Exactly(usize),
}

impl Dimensions {
    fn of(self, call: &Call<'_>, value: Value<'_>) -> Result<Vec<usize>, Error> {
        match self {
            Dimensions::All => Ok((0..value.rank()).collect()),
            Dimensions::Exactly(argument)
                if call.has(argument) && call.ints(argument)?.is_empty() =>
            {
                Ok(Vec::new())
            }
            Dimensions::Given(argument) | Dimensions::Exactly(argument) => {
                call.dimensions(argument, value.rank())
            }
        }
    }
}

/// What was reduced in the shape of a result, which keeps the dimensions or not.
fn shaped<'b>(call: &Call<'b>, result: usize, value: Value<'b>) -> Result<Value<'b>, Error> {
    let sizes = &call.result(result)?.view.sizes;
    if sizes.iter().product::<i64>() != value.count() {
        let expected = format!("{} elements", value.count());
        return call.malformed(format!("result {result}"), expected, sizes);
    }
    Ok(value.reshape(sizes))
}

fn both<'b>(call: &Call<'b>, values: [Value<'b>; 2]) -> Several<'b> {
    Ok(vec![
        Some(shaped(call, 0, values[0])?),
        Some(shaped(call, 1, values[1])?),
    ])
}

/// A reduction that sums in the type of the result, or a wider one.
fn total<'b>(
    call: &Call<'b>,
    dimensions: Dimensions,
    reduce: impl FnOnce(Value<'b>, &[usize]) -> Value<'b>,
) -> Result<Value<'b>, Error> {
    let value = call.tensor(0)?.convert(opmath(call.result(0)?.element));
    let dimensions = dimensions.of(call, value)?;
    shaped(call, 0, reduce(value, &dimensions))
}

fn product<'b>(value: Value<'b>, dimensions: &[usize]) -> Value<'b> {
    value.reduce("multiply", Number::Int(1), dimensions)
}

fn extreme<'b>(
    call: &Call<'b>,
    dimensions: Dimensions,
    reduce: impl FnOnce(Value<'b>, &[usize]) -> Value<'b>,
) -> Result<Value<'b>, Error> {
    let value = call.tensor(0)?;
    let dimensions = dimensions.of(call, value)?;
    shaped(call, 0, reduce(value, &dimensions))
}

/// The extreme elements along a dimension, or of all, and their places.
fn extreme_of<'b>(call: &Call<'b>, greatest: bool) -> Result<[Value<'b>; 2], Error> {
    let value = call.tensor(0)?;
    if value.is_complex() {
        return call.unsupported("for complex elements");
    }
    if value.rank() == 0 || !call.has(1) {
        return Ok(value.flatten().extreme(greatest, 0));
    }
    Ok(value.extreme(greatest, call.dimension(1, value.rank())?))
}

fn extreme_and_place<'b>(call: &Call<'b>, greatest: bool) -> Several<'b> {
    both(call, extreme_of(call, greatest)?)
}

fn place<'b>(call: &Call<'b>, greatest: bool) -> Result<Value<'b>, Error> {
    let [_, place] = extreme_of(call, greatest)?;
    shaped(call, 0, place)
}

fn truth<'b>(
    call: &Call<'b>,
    dimensions: Dimensions,
    operation: &str,
    initial: bool,
) -> Result<Value<'b>, Error> {
    let value = call.tensor(0)?.convert(Pred);
    let dimensions = dimensions.of(call, value)?;
    shaped(
        call,
        0,
        value.reduce(operation, Number::Bool(initial), &dimensions),
    )
}

/// Variance with correction, and mean, of the dimensions given.
fn moments<'b>(call: &Call<'b>) -> Result<[Value<'b>; 2], Error> {
    let value = call.tensor(0)?;
    if value.is_complex() {
        return call.unsupported("for complex elements");
    }
    let value = value.convert(opmath(value.element()));
    let dimensions = call.dimensions(1, value.rank())?;
    let correction = if call.has(2) { call.float(2)? } else { 1. };
    let dims = value.dims();
    let count: i64 = dimensions
        .iter()
        .map(|&dimension| dims[dimension])
        .product();
    let mean = value.mean(&dimensions);
    let distance = value - mean.keep(&dims, &dimensions);
    let squares = (distance * distance).sum(&dimensions);
    Ok([squares / (count as f64 - correction).max(0.), mean])
}

fn logsumexp<'b>(call: &Call<'b>) -> Result<Value<'b>, Error> {
    let value = call.tensor(0)?;
    if value.is_complex() {
        return call.unsupported("for complex elements");
    }
    let value = value.convert(floating(call, value.element())?);
    let dimensions = call.dimensions(1, value.rank())?;
    let greatest = value.max(&dimensions);
    // An infinite one has no distance to itself.
    let finite = greatest
        .abs()
        .eq(f64::INFINITY)
        .select(greatest.zeros(), greatest);
    let distance = value - finite.keep(&value.dims(), &dimensions);
    shaped(call, 0, distance.exp().sum(&dimensions).log() + finite)
}

fn vector_norm<'b>(call: &Call<'b>) -> Result<Value<'b>, Error> {
    let order = if call.has(1) { call.float(1)? } else { 2. };
    let value = call.tensor(0)?;
    let element = opmath(call.result(0)?.element);
    let dimensions = call.dimensions(2, value.rank())?;
    shaped(call, 0, norm(value, order, element, &dimensions))
}

/// The norm of an order over dimensions, computed in a real type.
pub(super) fn norm<'b>(
    value: Value<'b>,
    order: f64,
    element: ElementType,
    dimensions: &[usize],
) -> Value<'b> {
    let wide = if value.is_complex() {
        element::complex(element)
    } else {
        element
    };
    let size = value.convert(wide).abs();
    if order == f64::INFINITY {
        size.max(dimensions)
    } else if order == f64::NEG_INFINITY {
        size.min(dimensions)
    } else if order == 0. {
        size.ne(0.).convert(element).sum(dimensions)
    } else if order == 1. {
        size.sum(dimensions)
    } else if order == 2. {
        (size * size).sum(dimensions).sqrt()
    } else {
        let constant = |number| size.point(Number::Float(number));
        let powers = size.power(constant(order)).sum(dimensions);
        powers.power(constant(1. / order))
    }
}

fn scan<'b>(call: &Call<'b>, operation: &'static str, initial: Number) -> Result<Value<'b>, Error> {
    let value = call.tensor(0)?.convert(opmath(call.result(0)?.element));
    if value.rank() == 0 {
        return Ok(value);
    }
    let dimension = call.dimension(1, value.rank())?;
    Ok(value.scan(operation, initial, dimension))
}
