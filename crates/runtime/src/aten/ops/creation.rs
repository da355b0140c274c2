//! Tensors from nothing, and parts of matrices.

use crate::aten::Error;
use crate::aten::call::Call;
use crate::aten::element::opmath;
use crate::aten::table::OperatorRow;
use crate::aten::value::{Comparison, Value, iota};
use crate::pjrt::ElementType::{S32, S64};

pub(super) static ROWS: &[OperatorRow] = &[
    OperatorRow::new("fill_.Scalar", |call| {
        call.scalar(1, call.result(0)?.element)
    }),
    OperatorRow::new("fill_.Tensor", |call| call.tensor(1)),
    OperatorRow::new("zero_", |call| {
        let result = call.result(0)?;
        Ok(call.zeros(result.element, &result.view.sizes))
    }),
    OperatorRow::new("arange.start_out", |call| {
        let result = call.result(0)?;
        let element = opmath(result.element);
        let place = iota(call.body(), S64, &result.view.sizes, 0).convert(element);
        Ok(call.scalar(0, element)? + place * call.scalar(2, element)?)
    })
    .sized_by_numbers(),
    OperatorRow::new("linspace.out", linspace),
    OperatorRow::new("eye.out", eye),
    OperatorRow::new("eye.m_out", eye),
    OperatorRow::new("tril", |call| triangle(call, Comparison::LE)),
    OperatorRow::new("triu", |call| triangle(call, Comparison::GE)),
];

/// Numbers at equal distances, counted from the nearer end.
fn linspace<'b>(call: &Call<'b>) -> Result<Value<'b>, Error> {
    let result = call.result(0)?;
    let element = opmath(result.element);
    if !crate::aten::element::is_float(element) {
        return call.unsupported("for elements that are not real numbers");
    }
    let count = result.view.sizes[0];
    let (start, end) = (call.scalar(0, element)?, call.scalar(1, element)?);
    let place = iota(call.body(), S32, &result.view.sizes, 0);
    if count == 1 {
        return Ok(start);
    }
    let step = (end - start) / (count - 1) as f64;
    let forward = start + step * place.convert(element);
    let back = end - step * ((count - 1) as f64 - place.convert(element));
    Ok(place.lt((count / 2) as f64).select(forward, back))
}

/// Column less row of each place of the last two dimensions.
pub(super) fn diagonal<'b>(call: &Call<'b>, dims: &[i64]) -> Value<'b> {
    let last = dims.len() - 1;
    let along = |dimension| iota(call.body(), S32, dims, dimension);
    along(last) - along(last - 1)
}

fn eye<'b>(call: &Call<'b>) -> Result<Value<'b>, Error> {
    let sizes = &call.result(0)?.view.sizes;
    Ok(diagonal(call, sizes).eq(0.))
}

fn triangle<'b>(call: &Call<'b>, how: Comparison) -> Result<Value<'b>, Error> {
    let value = call.tensor(0)?;
    // Beyond any diagonal nothing changes.
    let limit = i64::from(i32::MAX);
    let number = call.int(1)?.clamp(-limit, limit);
    let inside = diagonal(call, &value.dims()).compare(how, number as f64);
    Ok(inside.select(value, value.zeros()))
}
