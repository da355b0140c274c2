//! Functions of one number.

use std::f64::consts::{LN_2, LN_10};

use super::{float_map, map, real_map};
use crate::aten::body::Type;
use crate::aten::call::Call;
use crate::aten::request::Number;
use crate::aten::special;
use crate::aten::table::OperatorRow;
use crate::aten::value::Value;
use crate::pjrt::ElementType;

pub(super) static ROWS: &[OperatorRow] = &[
    OperatorRow::new("exp", |call| float_map(call, [0], |[x]| x.exp())),
    OperatorRow::new("exp2", |call| {
        real_map(call, [0], |[x]| 2f64.value_like(x).power(x))
    }),
    OperatorRow::new("expm1", |call| float_map(call, [0], |[x]| x.expm1())),
    OperatorRow::new("log", |call| float_map(call, [0], |[x]| x.log())),
    OperatorRow::new("log1p", |call| float_map(call, [0], |[x]| x.log1p())),
    OperatorRow::new("log2", |call| real_map(call, [0], |[x]| x.log() / LN_2)),
    OperatorRow::new("log10", |call| real_map(call, [0], |[x]| x.log() / LN_10)),
    OperatorRow::new("sin", |call| float_map(call, [0], |[x]| x.sin())),
    OperatorRow::new("cos", |call| float_map(call, [0], |[x]| x.cos())),
    OperatorRow::new("tan", |call| float_map(call, [0], |[x]| x.tan())),
    OperatorRow::new("tanh", |call| float_map(call, [0], |[x]| x.tanh())),
    OperatorRow::new("sinh", |call| real_map(call, [0], |[x]| sinh(x))),
    OperatorRow::new("cosh", |call| {
        real_map(call, [0], |[x]| (x - LN_2).exp() + (-x - LN_2).exp())
    }),
    OperatorRow::new("asin", |call| {
        real_map(call, [0], |[x]| x.atan2(cathetus(x)))
    }),
    OperatorRow::new("acos", |call| {
        real_map(call, [0], |[x]| cathetus(x).atan2(x))
    }),
    OperatorRow::new("atan", |call| real_map(call, [0], |[x]| atan(x))),
    OperatorRow::new("asinh", |call| real_map(call, [0], |[x]| asinh(x))),
    OperatorRow::new("acosh", |call| {
        real_map(call, [0], |[x]| {
            let near = (x + ((x + 1.) * (x - 1.)).sqrt()).log();
            x.gt(large(x)).select(x.log() + LN_2, near)
        })
    }),
    OperatorRow::new("atanh", |call| {
        real_map(call, [0], |[x]| 0.5 * (x.log1p() - (-x).log1p()))
    }),
    OperatorRow::new("sigmoid", |call| float_map(call, [0], |[x]| x.logistic())),
    OperatorRow::new("sqrt", |call| float_map(call, [0], |[x]| x.sqrt())),
    OperatorRow::new("rsqrt", |call| float_map(call, [0], |[x]| x.rsqrt())),
    OperatorRow::new("reciprocal", |call| float_map(call, [0], |[x]| 1. / x)),
    OperatorRow::new("erf", |call| real_map(call, [0], |[x]| special::erf(x))),
    OperatorRow::new("erfc", |call| real_map(call, [0], |[x]| special::erfc(x))),
    OperatorRow::new("erfinv", |call| {
        real_map(call, [0], |[x]| special::erf_inverse(x))
    }),
    OperatorRow::new("neg", |call| map(call, [0], |[x]| -x)),
    OperatorRow::new("abs", |call| map(call, [0], |[x]| x.abs())),
    OperatorRow::new("sign", |call| map(call, [0], |[x]| sign(x))),
    OperatorRow::new("sgn", |call| map(call, [0], sgn)),
    OperatorRow::new("signbit", |call| Ok(call.tensor(0)?.sign_bit())),
    OperatorRow::new("floor", |call| map(call, [0], |[x]| whole(x, Value::floor))),
    OperatorRow::new("ceil", |call| map(call, [0], |[x]| whole(x, Value::ceil))),
    OperatorRow::new("trunc", |call| map(call, [0], |[x]| x.trunc())),
    OperatorRow::new("round", |call| {
        map(call, [0], |[x]| whole(x, Value::round_even))
    }),
    OperatorRow::new("round.decimals", |call| {
        let decimals = call.int(1)?;
        map(call, [0], |[x]| {
            if !x.is_float() || decimals == 0 {
                return whole(x, Value::round_even);
            }
            let scale = 10f64.powi(decimals.unsigned_abs().min(400) as i32);
            if decimals > 0 {
                (x * scale).round_even() / scale
            } else {
                (x / scale).round_even() * scale
            }
        })
    }),
    OperatorRow::new("frac", |call| map(call, [0], |[x]| x - x.trunc())),
    OperatorRow::new("isnan", |call| Ok(call.tensor(0)?.is_nan())),
    OperatorRow::new("isinf", |call| {
        let value = call.tensor(0)?;
        let infinite = |x| is(x, |x| x.abs().eq(f64::INFINITY));
        Ok(infinite(value.real()).or(infinite(value.imag())))
    }),
    OperatorRow::new("isposinf", |call| {
        Ok(is(call.tensor(0)?, |x| x.eq(f64::INFINITY)))
    }),
    OperatorRow::new("isneginf", |call| {
        Ok(is(call.tensor(0)?, |x| x.eq(f64::NEG_INFINITY)))
    }),
    OperatorRow::new("nan_to_num", nan_to_num),
    OperatorRow::new("bitwise_not", |call| Ok(!call.tensor(0)?)),
    OperatorRow::new("logical_not", |call| {
        Ok(!call.tensor(0)?.convert(ElementType::Pred))
    }),
];

/// A constant from a plain number on the left.
trait ValueLike {
    fn value_like(self, like: Value<'_>) -> Value<'_>;
}

impl ValueLike for f64 {
    fn value_like(self, like: Value<'_>) -> Value<'_> {
        like.constant(Number::Float(self))
    }
}

/// Whether a real number has a property that whole numbers do not have.
fn is<'b>(value: Value<'b>, property: impl FnOnce(Value<'b>) -> Value<'b>) -> Value<'b> {
    if value.is_float() {
        return property(value);
    }
    let ty = Type::new(ElementType::Pred, &value.dims());
    value.body().constant(Number::Bool(false), ty)
}

/// Rounds what is not an integer already.
fn whole<'b>(value: Value<'b>, round: impl FnOnce(Value<'b>) -> Value<'b>) -> Value<'b> {
    if value.is_float() {
        round(value)
    } else {
        value
    }
}

/// The sign as a number: of what is not a number, 0.
fn sign(value: Value<'_>) -> Value<'_> {
    if value.is_bool() {
        return value;
    }
    let element = value.element();
    value.gt(0.).convert(element) - value.lt(0.).convert(element)
}

/// The sign, of complex numbers their direction.
fn sgn([value]: [Value<'_>; 1]) -> Value<'_> {
    if !value.is_complex() {
        return sign(value);
    }
    let size = value.abs();
    let direction = (value.real() / size).complex(value.imag() / size);
    size.eq(0.).select(value.zeros(), direction)
}

/// sqrt(1 - x^2).
fn cathetus(x: Value<'_>) -> Value<'_> {
    ((1. - x) * (1. + x)).sqrt()
}

/// From here on adding 1 to a square makes no difference.
fn large(x: Value<'_>) -> f64 {
    if x.element() == ElementType::F64 {
        1e150
    } else {
        1e18
    }
}

fn sinh(x: Value<'_>) -> Value<'_> {
    let small = x.expm1();
    let small = 0.5 * (small + small / (small + 1.));
    let big = (x - LN_2).exp() - (-x - LN_2).exp();
    x.abs().lt(1.).select(small, big)
}

fn atan(x: Value<'_>) -> Value<'_> {
    if x.element() != ElementType::F64 {
        return x.atan2(1.);
    }
    // XLA's CPU compiler gives wrong values for 64 and more float64 numbers and a constant: half
    // the angle is that of x and 1 + sqrt(x^2 + 1).
    let size = x.abs();
    let root = size.gt(1e8).select(size, (x * x + 1.).sqrt());
    x.atan2(root + 1.) * 2.
}

/// log(|x| + sqrt(x^2 + 1)), without loss near 0.
fn asinh(x: Value<'_>) -> Value<'_> {
    let size = x.abs();
    let square = size * size;
    let near = (size + square / ((square + 1.).sqrt() + 1.)).log1p();
    let value = size.gt(large(x)).select(size.log() + LN_2, near);
    value.copy_sign(x)
}

fn nan_to_num<'b>(call: &Call<'b>) -> Result<Value<'b>, crate::aten::Error> {
    let value = call.tensor(0)?;
    if !value.is_float() {
        return if value.is_complex() {
            call.unsupported("for complex elements")
        } else {
            Ok(value)
        };
    }
    let (least, greatest) = finite_limits(value.element());
    let number = |argument: usize, default: f64| {
        if call.has(argument) {
            call.float(argument)
        } else {
            Ok(default)
        }
    };
    let constant = |number| value.constant(Number::Float(number));
    let nan = constant(number(1, 0.)?);
    let high = constant(number(2, greatest)?);
    let low = constant(number(3, least)?);
    let finite = value.eq(f64::INFINITY).select(high, value);
    let finite = value.eq(f64::NEG_INFINITY).select(low, finite);
    Ok(value.is_nan().select(nan, finite))
}

/// The least and greatest finite number of a type.
fn finite_limits(element: ElementType) -> (f64, f64) {
    let greatest = match element {
        ElementType::F64 => f64::MAX,
        ElementType::F16 => 65504.,
        ElementType::BF16 => f64::from(f32::from_bits(0x7F7F_0000)),
        _ => f64::from(f32::MAX),
    };
    (-greatest, greatest)
}
