//! Arithmetic on two tensors, or a tensor and a number.

use crate::aten::call::{Call, Results};
use crate::aten::element::{self, opmath};
use crate::aten::table::OperatorRow;
use crate::aten::value::Value;
use crate::pjrt::ElementType;

pub(super) static ROWS: &[OperatorRow] = &[
    OperatorRow::new("add.Tensor", |call| add(call, |a, b| a + b)),
    OperatorRow::new("add.Scalar", |call| add(call, |a, b| a + b)),
    OperatorRow::new("sub.Tensor", |call| add(call, |a, b| a - b)),
    OperatorRow::new("sub.Scalar", |call| add(call, |a, b| a - b)),
    OperatorRow::new("mul.Tensor", |call| binary(call, |a, b| a * b)),
    OperatorRow::new("mul.Scalar", |call| binary(call, |a, b| a * b)),
    OperatorRow::new("div.Tensor", |call| float_binary(call, |a, b| a / b)),
    OperatorRow::new("div.Scalar", |call| float_binary(call, |a, b| a / b)),
];

/// Arguments 0 and 1 in the type in which torch computes on them.
pub(super) fn pair<'b>(call: &Call<'b>) -> Result<[Value<'b>; 2], crate::aten::Error> {
    let element = opmath(call.promoted(&[0, 1])?);
    Ok([call.tensor_as(0, element)?, call.tensor_as(1, element)?])
}

/// A function of two operands in their common type.
pub(super) fn binary<'b>(
    call: &Call<'b>,
    function: impl FnOnce(Value<'b>, Value<'b>) -> Value<'b>,
) -> Results<'b> {
    let [a, b] = pair(call)?;
    Ok(vec![function(a, b)])
}

/// The type of floating-point results for arguments of `element`.
pub(super) fn floating(
    call: &Call<'_>,
    element: ElementType,
) -> Result<ElementType, crate::aten::Error> {
    if element::is_float(element) || element::is_complex(element) {
        return Ok(opmath(element));
    }
    // Integers become torch's default type, which the result has.
    Ok(opmath(call.result(0)?.element))
}

/// A function of two operands that are not integers.
pub(super) fn float_binary<'b>(
    call: &Call<'b>,
    function: impl FnOnce(Value<'b>, Value<'b>) -> Value<'b>,
) -> Results<'b> {
    let element = floating(call, call.promoted(&[0, 1])?)?;
    Ok(vec![function(
        call.tensor_as(0, element)?,
        call.tensor_as(1, element)?,
    )])
}

/// `a + alpha b` or `a - alpha b`.
fn add<'b>(
    call: &Call<'b>,
    function: impl FnOnce(Value<'b>, Value<'b>) -> Value<'b>,
) -> Results<'b> {
    let [a, b] = pair(call)?;
    if call.is_number(2, 1.) {
        return Ok(vec![function(a, b)]);
    }
    let alpha = call.scalar(2, a.element())?;
    Ok(vec![function(a, b * alpha)])
}
