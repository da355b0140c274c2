//! Sorting and selection.

use crate::aten::Error;
use crate::aten::body::{List, Type, Types};
use crate::aten::call::Call;
use crate::aten::table::{OperatorRow, Several};
use crate::aten::value::{Value, iota};
use crate::pjrt::ElementType::S32;

pub(super) static ROWS: &[OperatorRow] = &[
    OperatorRow::several("sort", |call| sort(call, 1, 2)),
    OperatorRow::several("sort.stable", |call| sort(call, 2, 3)),
    OperatorRow::several("topk", |call| {
        let value = call.tensor(0)?;
        let count = call.int(1)?;
        if value.rank() == 0 {
            return Ok(vec![Some(value), Some(call.zeros(S32, &[]))]);
        }
        let dimension = call.dimension(2, value.rank())?;
        let sorted = sorted(call, value, dimension, call.bool(3)?)?;
        Ok(sorted
            .map(|all| Some(all.narrow(dimension, 0, count)))
            .into())
    }),
];

/// Arguments `dimension` and `descending` say how argument 0 is sorted.
fn sort<'b>(call: &Call<'b>, dimension: usize, descending: usize) -> Several<'b> {
    let value = call.tensor(0)?;
    if value.rank() == 0 {
        return Ok(vec![Some(value), Some(call.zeros(S32, &[]))]);
    }
    let dimension = call.dimension(dimension, value.rank())?;
    let sorted = sorted(call, value, dimension, call.bool(descending)?)?;
    Ok(sorted.map(Some).into())
}

/// The elements in order along a dimension, and the places where they were. What is not a number
/// counts as greater than any.
pub(super) fn sorted<'b>(
    call: &Call<'b>,
    value: Value<'b>,
    dimension: usize,
    descending: bool,
) -> Result<[Value<'b>; 2], Error> {
    if value.is_complex() {
        return call.unsupported("for complex elements");
    }
    let body = call.body();
    let place = iota(body, S32, &value.dims(), dimension);
    let (number, index) = (Type::new(value.element(), &[]), Type::new(S32, &[]));
    let parameters = vec![number.clone(), number, index.clone(), index];
    let region = body.region(parameters, |of| {
        let (low, high) = if descending {
            (of[1], of[0])
        } else {
            (of[0], of[1])
        };
        let less = low.lt(high);
        vec![if value.is_float() {
            less.or(high.is_nan().and(!low.is_nan()))
        } else {
            less
        }]
    });
    let both = [value, place];
    let (names, types) = (List(&both), Types(&both));
    let results = body.push_all(
        both.iter().map(|value| value.ty()).collect(),
        format_args!(
            "\"stablehlo.sort\"({names}) <{{dimension = {dimension} : i64, is_stable = true}}> ({region}) : \
             ({types}) -> ({types})"
        ),
    );
    Ok([results[0], results[1]])
}
