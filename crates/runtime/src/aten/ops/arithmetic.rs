//! Arithmetic on tensors and numbers.

use super::{float_map, map, operands, real_map};
use crate::aten::Error;
use crate::aten::call::Call;
use crate::aten::request::Number;
use crate::aten::table::OperatorRow;
use crate::aten::value::Value;

pub(super) static ROWS: &[OperatorRow] = &[
    OperatorRow::new("add.Tensor", |call| scaled(call, |a, b| a + b)),
    OperatorRow::new("add.Scalar", |call| scaled(call, |a, b| a + b)),
    OperatorRow::new("sub.Tensor", |call| scaled(call, |a, b| a - b)),
    OperatorRow::new("sub.Scalar", |call| scaled(call, |a, b| a - b)),
    OperatorRow::new("rsub.Tensor", reversed_sub),
    OperatorRow::new("rsub.Scalar", reversed_sub),
    OperatorRow::new("mul.Tensor", |call| map(call, [0, 1], |[a, b]| a * b)),
    OperatorRow::new("mul.Scalar", |call| map(call, [0, 1], |[a, b]| a * b)),
    OperatorRow::new("div.Tensor", |call| float_map(call, [0, 1], |[a, b]| a / b)),
    OperatorRow::new("div.Scalar", |call| float_map(call, [0, 1], |[a, b]| a / b)),
    OperatorRow::new("div.Tensor_mode", rounded_div),
    OperatorRow::new("div.Scalar_mode", rounded_div),
    OperatorRow::new("floor_divide", |call| {
        map(call, [0, 1], |[a, b]| floor_div(a, b))
    }),
    OperatorRow::new("remainder.Tensor", |call| {
        map(call, [0, 1], |[a, b]| remainder(a, b))
    }),
    OperatorRow::new("remainder.Scalar", |call| {
        map(call, [0, 1], |[a, b]| remainder(a, b))
    }),
    OperatorRow::new("remainder.Scalar_Tensor", |call| {
        map(call, [0, 1], |[a, b]| remainder(a, b))
    }),
    OperatorRow::new("fmod.Tensor", |call| map(call, [0, 1], |[a, b]| a % b)),
    OperatorRow::new("fmod.Scalar", |call| map(call, [0, 1], |[a, b]| a % b)),
    OperatorRow::new("maximum", |call| map(call, [0, 1], |[a, b]| a.maximum(b))),
    OperatorRow::new("minimum", |call| map(call, [0, 1], |[a, b]| a.minimum(b))),
    OperatorRow::new("fmax", |call| {
        map(call, [0, 1], |[a, b]| number_of(a, b, a.maximum(b)))
    }),
    OperatorRow::new("fmin", |call| {
        map(call, [0, 1], |[a, b]| number_of(a, b, a.minimum(b)))
    }),
    OperatorRow::new("atan2", |call| real_map(call, [0, 1], |[a, b]| a.atan2(b))),
    OperatorRow::new("copysign.Tensor", |call| {
        real_map(call, [0, 1], |[a, b]| {
            let (a, b) = a.broadcast_with(b);
            a.copy_sign(b)
        })
    }),
    OperatorRow::new("hypot", |call| {
        real_map(call, [0, 1], |[a, b]| {
            let (a, b) = (a.abs(), b.abs());
            let (large, small) = (a.maximum(b), a.minimum(b));
            let ratio = small / large;
            let length = large * (ratio * ratio + 1.).sqrt();
            let plain = large.eq(0.).or(large.eq(f64::INFINITY));
            plain.select(large, length)
        })
    }),
    OperatorRow::new("logaddexp", |call| {
        real_map(call, [0, 1], |[a, b]| {
            let large = a.maximum(b);
            let sum = large + (-(a - b).abs()).exp().log1p();
            // Equal infinities have no difference.
            a.eq(b)
                .and(large.abs().eq(f64::INFINITY))
                .select(large, sum)
        })
    }),
    OperatorRow::new("xlogy.Tensor", |call| {
        real_map(call, [0, 1], |[a, b]| {
            let product = a * b.log();
            let zero = a.eq(0.).and(!b.is_nan());
            zero.select(product.zeros(), product)
        })
    }),
    OperatorRow::new("pow.Tensor_Scalar", power_by_constant).constants(&[1]),
    OperatorRow::new("pow.Tensor_Tensor", |call| {
        map(call, [0, 1], |[a, b]| a.power(b))
    }),
    OperatorRow::new("pow.Scalar", |call| map(call, [0, 1], |[a, b]| a.power(b))),
    OperatorRow::new("addcmul", |call| {
        map(call, [0, 1, 2, 3], |[sum, a, b, factor]| {
            sum + factor * a * b
        })
    }),
    OperatorRow::new("addcdiv", |call| {
        map(call, [0, 1, 2, 3], |[sum, a, b, factor]| {
            sum + factor * a / b
        })
    }),
    OperatorRow::new("lerp.Scalar", |call| map(call, [0, 1, 2], lerp)),
    OperatorRow::new("lerp.Tensor", |call| map(call, [0, 1, 2], lerp)),
    OperatorRow::new("clamp", clamp),
    OperatorRow::new("clamp.Tensor", clamp),
    OperatorRow::new("clamp_min", |call| map(call, [0, 1], |[a, b]| a.maximum(b))),
    OperatorRow::new("clamp_min.Tensor", |call| {
        map(call, [0, 1], |[a, b]| a.maximum(b))
    }),
    OperatorRow::new("clamp_max", |call| map(call, [0, 1], |[a, b]| a.minimum(b))),
    OperatorRow::new("clamp_max.Tensor", |call| {
        map(call, [0, 1], |[a, b]| a.minimum(b))
    }),
];

/// `a + alpha b` or `a - alpha b`.
fn scaled<'b>(
    call: &Call<'b>,
    function: impl FnOnce(Value<'b>, Value<'b>) -> Value<'b>,
) -> Result<Value<'b>, Error> {
    let [a, b] = operands(call, [0, 1])?;
    Ok(function(a, alpha(call, b)?))
}

fn reversed_sub<'b>(call: &Call<'b>) -> Result<Value<'b>, Error> {
    let [a, b] = operands(call, [0, 1])?;
    Ok(b - alpha(call, a)?)
}

/// `value` times the factor that is argument 2.
fn alpha<'b>(call: &Call<'b>, value: Value<'b>) -> Result<Value<'b>, Error> {
    if call.is_number(2, 1.) {
        return Ok(value);
    }
    Ok(value * call.scalar(2, value.element())?)
}

fn rounded_div<'b>(call: &Call<'b>) -> Result<Value<'b>, Error> {
    match call.text(2)? {
        None => float_map(call, [0, 1], |[a, b]| a / b),
        Some("trunc") => {
            let element = call.promoted(&[0, 1])?;
            // torch rounds twice.
            map(call, [0, 1], |[a, b]| (a / b).rounded_to(element).trunc())
        }
        Some("floor") => map(call, [0, 1], |[a, b]| floor_div(a, b)),
        Some(other) => call.malformed("rounding_mode", "None, 'trunc' or 'floor'", other),
    }
}

/// Whether the signs of two numbers differ.
fn signs_differ<'b>(a: Value<'b>, b: Value<'b>) -> Value<'b> {
    a.lt(0.).ne(b.lt(0.))
}

/// The quotient rounded down; of real numbers as Python computes it.
fn floor_div<'b>(a: Value<'b>, b: Value<'b>) -> Value<'b> {
    let rest = a % b;
    let down = rest.ne(0.).and(signs_differ(rest, b));
    if !a.is_float() {
        let quotient = a / b;
        return down.select(quotient - 1., quotient);
    }
    let exact = (a - rest) / b;
    let exact = down.select(exact - 1., exact);
    let floor = exact.floor();
    let whole = (exact - floor).gt(0.5).select(floor + 1., floor);
    let quotient = a / b;
    let zero = quotient.zeros().copy_sign(quotient);
    let whole = exact.ne(0.).select(whole, zero);
    b.eq(0.).select(quotient, whole)
}

/// The rest of a division, with the divisor's sign.
fn remainder<'b>(a: Value<'b>, b: Value<'b>) -> Value<'b> {
    let rest = a % b;
    let other = rest.ne(0.).and(signs_differ(rest, b));
    other.select(rest + b, rest)
}

/// `both`, or where one operand is not a number the other.
fn number_of<'b>(a: Value<'b>, b: Value<'b>, both: Value<'b>) -> Value<'b> {
    if !a.is_float() {
        return both;
    }
    a.is_nan().select(b, b.is_nan().select(a, both))
}

fn power_by_constant<'b>(call: &Call<'b>) -> Result<Value<'b>, Error> {
    let exponent = match call.number(1)? {
        Number::Int(value) => value as f64,
        Number::Float(value) => value,
        Number::Bool(value) => f64::from(u8::from(value)),
        Number::Complex(..) => f64::NAN,
    };
    map(call, [0, 1], |[base, power]| {
        let whole = !base.is_float() && !base.is_complex();
        match exponent {
            1. => base,
            2. => base * base,
            3. => base * base * base,
            0.5 if !whole => base.sqrt(),
            -0.5 if !whole => base.rsqrt(),
            -1. if !whole => 1. / base,
            -2. if !whole => 1. / (base * base),
            _ => base.power(power),
        }
    })
}

/// The point at `weight` between two, exact at both ends.
pub(super) fn lerp([start, end, weight]: [Value<'_>; 3]) -> Value<'_> {
    let span = end - start;
    let near = weight.abs().lt(0.5);
    near.select(start + weight * span, end - span * (1. - weight))
}

fn clamp<'b>(call: &Call<'b>) -> Result<Value<'b>, Error> {
    let given: Vec<usize> = [0, 1, 2].into_iter().filter(|&i| call.has(i)).collect();
    let element = crate::aten::element::opmath(call.promoted(&given)?);
    let mut value = call.tensor_as(0, element)?;
    if call.has(1) {
        value = value.maximum(call.tensor_as(1, element)?);
    }
    if call.has(2) {
        value = value.minimum(call.tensor_as(2, element)?);
    }
    Ok(value)
}
