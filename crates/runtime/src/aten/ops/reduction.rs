//! Reductions over dimensions.

use crate::aten::Error;
use crate::aten::body::{Dims, Type};
use crate::aten::call::{Call, Results};
use crate::aten::element::opmath;
use crate::aten::request::Number;
use crate::aten::table::OperatorRow;
use crate::aten::value::Value;

pub(super) static ROWS: &[OperatorRow] = &[
    OperatorRow::new("sum.dim_IntList", sum),
    OperatorRow::new("sum", sum),
];

/// Combines the elements along `dimensions`, which disappear.
pub(super) fn reduce<'b>(
    value: Value<'b>,
    operation: &str,
    initial: Number,
    dimensions: &[usize],
) -> Value<'b> {
    if dimensions.is_empty() {
        return value;
    }
    let from = value.ty();
    let dims: Dims = (0..from.dims.len())
        .filter(|dimension| !dimensions.contains(dimension))
        .map(|dimension| from.dims[dimension])
        .collect();
    let start = value.point(initial);
    let (ty, number) = (Type::new(from.element, &dims), start.ty());
    value.body().push(
        ty.clone(),
        format_args!(
            "stablehlo.reduce({value} init: {start}) applies stablehlo.{operation} across \
             dimensions = {dimensions:?} : ({from}, {number}) -> {ty}"
        ),
    )
}

/// `value`, reduced over `dimensions`, in the shape of result 0 (which keeps dimensions or not).
pub(super) fn shaped<'b>(call: &Call<'b>, value: Value<'b>) -> Result<Value<'b>, Error> {
    let sizes = &call.result(0)?.view.sizes;
    if sizes.iter().product::<i64>() != value.count() {
        return call.malformed("result 0", format!("{} elements", value.count()), sizes);
    }
    Ok(value.reshape(sizes))
}

fn sum<'b>(call: &Call<'b>) -> Results<'b> {
    let element = opmath(call.result(0)?.element);
    let value = call.tensor(0)?.convert(element);
    // The overload without dimensions has the type in their place.
    let dimensions = match call.ints(1) {
        Ok(_) => call.dimensions(1, value.rank())?,
        Err(_) => (0..value.rank()).collect(),
    };
    Ok(vec![shaped(
        call,
        reduce(value, "add", Number::Int(0), &dimensions),
    )?])
}
