//! Reductions over dimensions.

use crate::aten::Error;
use crate::aten::call::Call;
use crate::aten::element::opmath;
use crate::aten::table::OperatorRow;
use crate::aten::value::Value;

pub(super) static ROWS: &[OperatorRow] = &[
    OperatorRow::new("sum.dim_IntList", sum),
    OperatorRow::new("sum", sum),
];

/// `value`, reduced over `dimensions`, in the shape of result 0 (which keeps dimensions or not).
pub(super) fn shaped<'b>(call: &Call<'b>, value: Value<'b>) -> Result<Value<'b>, Error> {
    let sizes = &call.result(0)?.view.sizes;
    if sizes.iter().product::<i64>() != value.count() {
        return call.malformed("result 0", format!("{} elements", value.count()), sizes);
    }
    Ok(value.reshape(sizes))
}

fn sum<'b>(call: &Call<'b>) -> Result<Value<'b>, Error> {
    let element = opmath(call.result(0)?.element);
    let value = call.tensor(0)?.convert(element);
    // The overload without dimensions has the type in their place.
    let dimensions = match call.ints(1) {
        Ok(_) => call.dimensions(1, value.rank())?,
        Err(_) => (0..value.rank()).collect(),
    };
    shaped(call, value.sum(&dimensions))
}
