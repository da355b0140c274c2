//! Comparisons, logic and bits.

use super::{map, operands};
use crate::aten::Error;
use crate::aten::call::Call;
use crate::aten::request::Number;
use crate::aten::table::OperatorRow;
use crate::aten::value::{Comparison, Value};
use crate::pjrt::ElementType;

pub(super) static ROWS: &[OperatorRow] = &[
    OperatorRow::new("eq.Tensor", |call| compare(call, Comparison::EQ)),
    OperatorRow::new("eq.Scalar", |call| compare(call, Comparison::EQ)),
    OperatorRow::new("ne.Tensor", |call| compare(call, Comparison::NE)),
    OperatorRow::new("ne.Scalar", |call| compare(call, Comparison::NE)),
    OperatorRow::new("lt.Tensor", |call| compare(call, Comparison::LT)),
    OperatorRow::new("lt.Scalar", |call| compare(call, Comparison::LT)),
    OperatorRow::new("le.Tensor", |call| compare(call, Comparison::LE)),
    OperatorRow::new("le.Scalar", |call| compare(call, Comparison::LE)),
    OperatorRow::new("gt.Tensor", |call| compare(call, Comparison::GT)),
    OperatorRow::new("gt.Scalar", |call| compare(call, Comparison::GT)),
    OperatorRow::new("ge.Tensor", |call| compare(call, Comparison::GE)),
    OperatorRow::new("ge.Scalar", |call| compare(call, Comparison::GE)),
    OperatorRow::new("logical_and", |call| logical(call, |a, b| a.and(b))),
    OperatorRow::new("logical_or", |call| logical(call, |a, b| a.or(b))),
    OperatorRow::new("logical_xor", |call| logical(call, |a, b| a.xor(b))),
    OperatorRow::new("bitwise_and.Tensor", |call| {
        map(call, [0, 1], |[a, b]| a.and(b))
    }),
    OperatorRow::new("bitwise_or.Tensor", |call| {
        map(call, [0, 1], |[a, b]| a.or(b))
    }),
    OperatorRow::new("bitwise_xor.Tensor", |call| {
        map(call, [0, 1], |[a, b]| a.xor(b))
    }),
    OperatorRow::new("bitwise_left_shift.Tensor", |call| {
        map(call, [0, 1], |[a, b]| a.shift_left(b))
    }),
    OperatorRow::new("bitwise_right_shift.Tensor", |call| {
        map(call, [0, 1], |[a, b]| right_shift(a, b))
    }),
    OperatorRow::new("isin.Tensor_Tensor", is_in),
    OperatorRow::new("isin.Tensor_Scalar", is_in),
    OperatorRow::new("isin.Scalar_Tensor", is_in),
    OperatorRow::new("where.self", select),
    OperatorRow::new("masked_fill.Scalar", masked_fill),
    OperatorRow::new("masked_fill.Tensor", masked_fill),
];

fn compare<'b>(call: &Call<'b>, how: Comparison) -> Result<Value<'b>, Error> {
    let [a, b] = operands(call, [0, 1])?;
    Ok(a.compare(how, b))
}

fn logical<'b>(
    call: &Call<'b>,
    function: impl FnOnce(Value<'b>, Value<'b>) -> Value<'b>,
) -> Result<Value<'b>, Error> {
    let [a, b] = [call.tensor(0)?, call.tensor(1)?].map(|value| value.convert(ElementType::Pred));
    Ok(function(a, b))
}

fn right_shift<'b>(value: Value<'b>, by: Value<'b>) -> Value<'b> {
    if crate::aten::element::is_unsigned(value.element()) {
        value.shift_right_logical(by)
    } else {
        value.shift_right_arithmetic(by)
    }
}

/// Arguments: elements, those to find, whether they are unique, whether to find others.
fn is_in<'b>(call: &Call<'b>) -> Result<Value<'b>, Error> {
    let [value, test] = operands(call, [0, 1])?;
    let found = value.unsqueeze(value.rank()).eq(test.flatten());
    let found = found.reduce("or", Number::Bool(false), &[value.rank()]);
    Ok(if call.bool(3)? { !found } else { found })
}

fn select<'b>(call: &Call<'b>) -> Result<Value<'b>, Error> {
    let which = call.tensor(0)?.convert(ElementType::Pred);
    let element = call.promoted(&[1, 2])?;
    let (yes, no) = (call.tensor_as(1, element)?, call.tensor_as(2, element)?);
    let (yes, no) = yes.broadcast_with(no);
    Ok(which.select(yes, no))
}

fn masked_fill<'b>(call: &Call<'b>) -> Result<Value<'b>, Error> {
    let value = call.tensor(0)?;
    let which = call.tensor(1)?.convert(ElementType::Pred);
    let fill = call.tensor_as(2, value.element())?;
    Ok(which.select(fill, value))
}
