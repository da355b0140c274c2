//! Loss functions and their derivatives.

use super::operands;
use crate::aten::Error;
use crate::aten::call::Call;
use crate::aten::element::opmath;
use crate::aten::request::Number;
use crate::aten::table::{OperatorRow, Several};
use crate::aten::value::{Value, iota};

pub(super) static ROWS: &[OperatorRow] = &[
    OperatorRow::several("nll_loss_forward", nll_loss),
    OperatorRow::several("nll_loss2d_forward", nll_loss),
    OperatorRow::new("nll_loss_backward", nll_loss_backward),
    OperatorRow::new("nll_loss2d_backward", nll_loss_backward),
    OperatorRow::new("mse_loss", |call| {
        reduced(call, 2, |a, b| Ok((a - b) * (a - b)))
    }),
    OperatorRow::new("mse_loss_backward", |call| {
        derivative(call, 3, |a, b| Ok(2. * (a - b)))
    }),
    OperatorRow::new("smooth_l1_loss", |call| {
        let beta = call.float(3)?;
        reduced(call, 2, |a, b| {
            let distance = (a - b).abs();
            if beta == 0. {
                return Ok(distance);
            }
            let near = 0.5 / beta * (distance * distance);
            Ok(distance.lt(beta).select(near, distance - 0.5 * beta))
        })
    }),
    OperatorRow::new("smooth_l1_loss_backward", |call| {
        let beta = call.float(4)?;
        derivative(call, 3, |a, b| {
            let distance = a - b;
            let side = direction(distance);
            if beta == 0. {
                return Ok(side);
            }
            Ok(distance.abs().lt(beta).select(distance / beta, side))
        })
    }),
    OperatorRow::new("huber_loss", |call| {
        let delta = call.float(3)?;
        reduced(call, 2, |a, b| {
            let distance = (a - b).abs();
            let near = 0.5 * (distance * distance);
            Ok(distance
                .le(delta)
                .select(near, delta * (distance - 0.5 * delta)))
        })
    }),
    OperatorRow::new("huber_loss_backward", |call| {
        let delta = call.float(4)?;
        derivative(call, 3, |a, b| {
            let distance = a - b;
            Ok(distance.maximum(-delta).minimum(delta))
        })
    }),
    OperatorRow::new("binary_cross_entropy", |call| {
        let weight = weight(call, 2)?;
        reduced(call, 3, |probability, target| {
            // The logarithms are cut off, so that a certain error is not infinite.
            let no = (1. - probability).log().maximum(-100.);
            let yes = probability.log().maximum(-100.);
            let loss = (target - 1.) * no - target * yes;
            Ok(weight.map_or(loss, |weight| loss * weight))
        })
    }),
    OperatorRow::new("binary_cross_entropy_backward", |call| {
        let weight = weight(call, 3)?;
        derivative(call, 4, |probability, target| {
            let variance = ((1. - probability) * probability).maximum(1e-12);
            let slope = (probability - target) / variance;
            Ok(weight.map_or(slope, |weight| slope * weight))
        })
    }),
];

/// How the losses of elements become one.
#[derive(Clone, Copy, PartialEq)]
enum Reduction {
    None,
    Mean,
    Sum,
}

impl Reduction {
    fn of(call: &Call<'_>, argument: usize) -> Result<Reduction, Error> {
        match call.int(argument)? {
            0 => Ok(Reduction::None),
            1 => Ok(Reduction::Mean),
            2 => Ok(Reduction::Sum),
            other => call.malformed("reduction", "0, 1 or 2", other),
        }
    }
}

/// -1, 0 or 1.
fn direction(value: Value<'_>) -> Value<'_> {
    let element = value.element();
    value.gt(0.).convert(element) - value.lt(0.).convert(element)
}

/// The weights that may be argument `index`.
fn weight<'b>(call: &Call<'b>, index: usize) -> Result<Option<Value<'b>>, Error> {
    let weight = call.optional(index)?;
    Ok(weight.map(|weight| weight.convert(opmath(weight.element()))))
}

/// The loss of arguments 0 and 1, element by element and then reduced.
fn reduced<'b>(
    call: &Call<'b>,
    reduction: usize,
    loss: impl FnOnce(Value<'b>, Value<'b>) -> Result<Value<'b>, Error>,
) -> Result<Value<'b>, Error> {
    let [a, b] = operands(call, [0, 1])?;
    let loss = loss(a, b)?;
    let all: Vec<usize> = (0..loss.rank()).collect();
    Ok(match Reduction::of(call, reduction)? {
        Reduction::None => loss,
        Reduction::Mean => loss.mean(&all),
        Reduction::Sum => loss.sum(&all),
    })
}

/// The gradient, argument 0, times the derivative of the loss of arguments 1 and 2 by the first.
fn derivative<'b>(
    call: &Call<'b>,
    reduction: usize,
    slope: impl FnOnce(Value<'b>, Value<'b>) -> Result<Value<'b>, Error>,
) -> Result<Value<'b>, Error> {
    let [gradient, a, b] = operands(call, [0, 1, 2])?;
    let slope = slope(a, b)? * gradient;
    Ok(match Reduction::of(call, reduction)? {
        Reduction::Mean => slope / slope.count() as f64,
        _ => slope,
    })
}

/// The targets of a loss of log-probabilities.
struct Targets<'b> {
    /// Their classes.
    class: Value<'b>,
    /// Whether they count: false of those ignored.
    counts: Value<'b>,
    /// Their weights: 0 of those ignored.
    weight: Value<'b>,
    /// The input's dimension of classes.
    dimension: usize,
}

impl<'b> Targets<'b> {
    /// For `input`, from the classes, weights and ignored class that are arguments `first`, the next and
    /// the third after it.
    fn read(call: &Call<'b>, input: Value<'b>, first: usize) -> Result<Targets<'b>, Error> {
        let class = call.tensor(first)?;
        let ignored = call.int(first + 3)?;
        let counts = class.ne(class.constant(Number::Int(ignored)));
        let weight = match call.optional(first + 1)? {
            None => counts.convert(input.element()),
            Some(weight) => counts.select(weight.convert(input.element()).take(0, class), 0.),
        };
        Ok(Targets {
            class,
            counts,
            weight,
            dimension: usize::from(input.rank() > 1),
        })
    }

    /// Something shaped as the targets with a dimension for classes.
    fn expanded(&self, value: Value<'b>) -> Value<'b> {
        value.unsqueeze(self.dimension.min(value.rank()))
    }
}

fn nll_loss<'b>(call: &Call<'b>) -> Several<'b> {
    let [input] = operands(call, [0])?;
    let targets = Targets::read(call, input, 1)?;
    let chosen = input.gather(targets.dimension, targets.expanded(targets.class));
    let chosen = chosen.reshape(&targets.class.dims());
    let loss = targets.counts.select(-chosen * targets.weight, 0.);
    let all: Vec<usize> = (0..loss.rank()).collect();
    let (sum, total) = (loss.sum(&all), targets.weight.sum(&all));
    let (loss, total) = match Reduction::of(call, 3)? {
        Reduction::None => (loss, total.zeros()),
        Reduction::Mean => (sum / total, total),
        Reduction::Sum => (sum, total),
    };
    Ok(vec![Some(loss), Some(total)])
}

fn nll_loss_backward<'b>(call: &Call<'b>) -> Result<Value<'b>, Error> {
    let [gradient, input] = operands(call, [0, 1])?;
    let targets = Targets::read(call, input, 2)?;
    let mut slope = -gradient * targets.weight;
    if Reduction::of(call, 4)? == Reduction::Mean {
        slope = slope / call.tensor_as(6, input.element())?;
    }
    let classes = iota(
        call.body(),
        targets.class.element(),
        &input.dims(),
        targets.dimension,
    );
    let hit = classes.eq(targets.expanded(targets.class));
    let hit = hit.and(targets.expanded(targets.counts));
    Ok(hit.select(targets.expanded(slope), 0.))
}
