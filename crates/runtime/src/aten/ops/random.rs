//! Random numbers: torch's distributions from Philox bits, not torch's sequences.

use std::f64::consts::PI;

use crate::aten::Error;
use crate::aten::body::Type;
use crate::aten::call::Call;
use crate::aten::element::{self, opmath};
use crate::aten::request::Number;
use crate::aten::table::{OperatorRow, Several};
use crate::aten::value::Value;
use crate::pjrt::ElementType::{self, *};

pub(super) static ROWS: &[OperatorRow] = &[
    OperatorRow::new("uniform_", |call| {
        let (low, high) = (call.float(1)?, call.float(2)?);
        Ok(fraction(call)? * (high - low) + low)
    })
    .random(),
    OperatorRow::new("normal_", |call| {
        let (mean, deviation) = (call.float(1)?, call.float(2)?);
        Ok(normal(call)? * deviation + mean)
    })
    .random(),
    OperatorRow::new("normal.Tensor_float", normal_of).random(),
    OperatorRow::new("normal.float_Tensor", normal_of).random(),
    OperatorRow::new("normal.Tensor_Tensor", normal_of).random(),
    OperatorRow::new("log_normal_", |call| {
        let (mean, deviation) = (call.float(1)?, call.float(2)?);
        Ok((normal(call)? * deviation + mean).exp())
    })
    .random(),
    OperatorRow::new("exponential_", |call| {
        let rate = call.float(1)?;
        Ok(-(-fraction(call)?).log1p() / rate)
    })
    .random(),
    OperatorRow::new("bernoulli_.float", |call| {
        let sizes = &call.result(0)?.view.sizes;
        Ok(fraction_of(call, F32, sizes)?.lt(call.float(1)?))
    })
    .random(),
    OperatorRow::new("bernoulli_.Tensor", |call| bernoulli(call, 1)).random(),
    OperatorRow::new("bernoulli", |call| bernoulli(call, 0)).random(),
    OperatorRow::new("multinomial", multinomial).random(),
    OperatorRow::several("native_dropout", dropout).random(),
    OperatorRow::new("native_dropout_backward", |call| {
        let scale = call.float(2)?;
        // The mask counts as numbers of the result's type.
        let element = opmath(call.result(0)?.element);
        let [gradient, mask] = super::all_as(call, [0, 1], element)?;
        Ok(gradient * mask * scale)
    }),
    OperatorRow::new("random_", |call| integers(call, 0, None)).random(),
    OperatorRow::new("random_.to", |call| integers(call, 0, Some(call.int(1)?))).random(),
    OperatorRow::new("random_.from", |call| {
        let end = call.has(2).then(|| call.int(2)).transpose()?;
        integers(call, call.int(1)?, end)
    })
    .random(),
    OperatorRow::new("randperm.generator_out", permutation).random(),
];

/// Unsigned integers of random bits.
fn bits<'b>(call: &Call<'b>, element: ElementType, sizes: &[i64]) -> Result<Value<'b>, Error> {
    let state = call.state()?;
    let (old, ty) = (state.ty(), Type::new(element, sizes));
    let results = call.body().push_all(
        vec![old.clone(), ty.clone()],
        format_args!(
            "stablehlo.rng_bit_generator {state}, algorithm = PHILOX : ({old}) -> ({old}, {ty})"
        ),
    );
    Ok(results[1])
}

/// Uniformly distributed numbers from 0 to less than 1, as many as a type of `element` has; in the type
/// in which is computed on it.
fn fraction_of<'b>(
    call: &Call<'b>,
    element: ElementType,
    sizes: &[i64],
) -> Result<Value<'b>, Error> {
    let (word, digits) = match element {
        F64 => (U64, 53),
        F32 => (U32, 24),
        F16 => (U32, 11),
        BF16 => (U32, 8),
        other => return call.unsupported(format!("for {} elements", other.name())),
    };
    let unused = 8 * word.size() as i32 - digits;
    let number = bits(call, word, sizes)?.shift_right_logical(f64::from(unused));
    // So few bits that the signed type has them, which converts faster.
    let signed = number.bitcast(if word == U64 { S64 } else { S32 });
    Ok(signed.convert(opmath(element)) * 2f64.powi(-digits))
}

/// Uniformly distributed numbers from 0 to less than 1 for the result.
fn fraction<'b>(call: &Call<'b>) -> Result<Value<'b>, Error> {
    let result = call.result(0)?;
    fraction_of(call, result.element, &result.view.sizes)
}

/// Standard normally distributed numbers for the result, by the transformation of Box and Muller.
fn normal<'b>(call: &Call<'b>) -> Result<Value<'b>, Error> {
    let result = call.result(0)?;
    if !element::is_float(result.element) {
        return call.unsupported(format!("for {} elements", result.element.name()));
    }
    let mut sizes = result.view.sizes.clone();
    sizes.push(2);
    let both = fraction_of(call, opmath(result.element), &sizes)?;
    let last = sizes.len() - 1;
    let part = |number| both.narrow(last, number, number + 1).squeeze(last);
    let radius = (-2. * (-part(0)).log1p()).sqrt();
    Ok(radius * (part(1) * (2. * PI)).cos())
}

/// Normally distributed numbers of mean and deviation that are arguments, tensors or numbers.
fn normal_of<'b>(call: &Call<'b>) -> Result<Value<'b>, Error> {
    let unit = normal(call)?;
    let mean = call.tensor_as(0, unit.element())?;
    let deviation = call.tensor_as(1, unit.element())?;
    Ok(unit * deviation + mean)
}

/// True with the probabilities that are argument `index`.
fn bernoulli<'b>(call: &Call<'b>, index: usize) -> Result<Value<'b>, Error> {
    let probability = call.tensor(index)?;
    let element = if probability.element() == F64 {
        F64
    } else {
        F32
    };
    let unit = fraction_of(call, element, &call.result(0)?.view.sizes)?;
    Ok(unit.lt(probability.convert(element)))
}

/// Results: the input with elements left out and the others scaled; the mask of those left.
fn dropout<'b>(call: &Call<'b>) -> Several<'b> {
    let [value] = super::operands(call, [0])?;
    let probability = call.float(1)?;
    let train = !call.has(2) || call.bool(2)?;
    if !train || probability == 0. {
        let mask = call
            .body()
            .constant(Number::Bool(true), Type::new(Pred, &value.dims()));
        return Ok(vec![Some(value), Some(mask)]);
    }
    let mask = fraction_of(call, F32, &value.dims())?.ge(probability);
    let scale = if probability == 1. {
        0.
    } else {
        1. / (1. - probability)
    };
    // As a product, in which what is not a number stays.
    let scaled = value * mask.convert(value.element()) * scale;
    Ok(vec![Some(scaled), Some(mask)])
}

/// Uniformly distributed integers from `start` to less than `end`, or to the greatest that the
/// result's type has without gaps.
fn integers<'b>(call: &Call<'b>, start: i64, end: Option<i64>) -> Result<Value<'b>, Error> {
    let result = call.result(0)?;
    let range = match end {
        Some(end) if end > start => end.wrapping_sub(start) as u64,
        Some(end) => return call.malformed("to", format!("more than {start}"), end),
        None => greatest(result.element).wrapping_sub(start) as u64,
    };
    // 0: all numbers of 64 bits.
    let word = if range != 0 && range < 1 << 32 {
        U32
    } else {
        U64
    };
    let number = bits(call, word, &result.view.sizes)?;
    let number = match range {
        0 => number,
        _ => number % number.constant(Number::Int(range as i64)),
    };
    let number = if word == U64 {
        number.bitcast(S64)
    } else {
        number.convert(S64)
    };
    Ok(number + number.constant(Number::Int(start)))
}

/// One more than the greatest integer up to which a type has all.
fn greatest(element: ElementType) -> i64 {
    match element {
        Pred => 2,
        F16 => (1 << 11) + 1,
        BF16 => (1 << 8) + 1,
        F32 => (1 << 24) + 1,
        F64 => (1 << 53) + 1,
        other => match element::highest(other) {
            Number::Int(value) if value > 0 => value.wrapping_add(1),
            // Unsigned, whose range is that of the bits.
            _ => 1i64.checked_shl(8 * other.size() as u32).unwrap_or(0),
        },
    }
}

/// The numbers below argument 0 in random order: sorted by random keys.
fn permutation<'b>(call: &Call<'b>) -> Result<Value<'b>, Error> {
    let sizes = &call.result(0)?.view.sizes;
    let keys = bits(call, U32, sizes)?.bitcast(S32);
    let [_, places] = super::sorting::sorted(call, keys, 0, false)?;
    Ok(places)
}

/// Arguments: weights of categories, number of draws, whether with replacement. The first of independent
/// arrivals at rates that are the weights is of a category with the probability asked for, the second
/// of one of the others, and so on.
fn multinomial<'b>(call: &Call<'b>) -> Result<Value<'b>, Error> {
    let [weights] = super::operands(call, [0])?;
    let (count, replace) = (call.int(1)?, call.bool(2)?);
    let last = weights.rank() - 1;
    let mut sizes = weights.dims();
    if replace {
        sizes.insert(last, count);
    }
    let unit = fraction_of(call, weights.element(), &sizes)?;
    let weights = if replace {
        weights.unsqueeze(last)
    } else {
        weights
    };
    // Greater for earlier arrivals; at no rate none comes.
    let order = weights / -(-unit).log1p();
    let order = weights
        .eq(0.)
        .select(order.constant(Number::Int(-1)), order);
    if replace {
        let [_, place] = order.extreme(true, last + 1);
        return Ok(place);
    }
    let [_, places] = super::sorting::sorted(call, order, last, true)?;
    Ok(places.narrow(last, 0, count))
}
