//! Whole optimizer steps, one program for all parameters.

use crate::aten::Error;
use crate::aten::call::Call;
use crate::aten::table::{OperatorRow, Several};
use crate::aten::value::Value;
use crate::pjrt::ElementType::{self, F32, F64};

pub(super) static ROWS: &[OperatorRow] = &[
    OperatorRow::several("_fused_adam_", |call| adam(call, false)).runtime(&[6, 7, 8, 9, 10]),
    OperatorRow::several("_fused_adamw_", |call| adam(call, true)).runtime(&[6, 7, 8, 9, 10]),
    OperatorRow::several("_fused_adam_.tensor_lr", |call| adam(call, false))
        .runtime(&[7, 8, 9, 10]),
    OperatorRow::several("_fused_adamw_.tensor_lr", |call| adam(call, true))
        .runtime(&[7, 8, 9, 10]),
    OperatorRow::several("_fused_sgd_", sgd).runtime(&[3, 4, 5, 6]),
    OperatorRow::several("_fused_sgd_.tensor_lr", sgd).runtime(&[3, 4, 5, 6]),
];

/// What mixed-precision training says about a step: arguments `first` and the next.
struct Scaling<'b> {
    /// The gradients' factor, to divide by.
    scale: Option<Value<'b>>,
    /// Whether a gradient was not finite: then nothing is done.
    skip: Option<Value<'b>>,
}

impl<'b> Scaling<'b> {
    fn read(call: &Call<'b>, first: usize) -> Result<Scaling<'b>, Error> {
        Ok(Scaling {
            scale: call.optional(first)?.map(point),
            skip: call.optional(first + 1)?.map(|found| point(found).ne(0.)),
        })
    }

    fn unscaled(&self, gradient: Value<'b>) -> Value<'b> {
        match self.scale {
            Some(scale) => gradient / scale.convert(gradient.element()),
            None => gradient,
        }
    }

    /// `new`, or if the step is skipped `old`.
    fn choose(&self, new: Value<'b>, old: Value<'b>) -> Value<'b> {
        self.skip.map_or(new, |skip| skip.select(old, new))
    }
}

/// A value of one element without dimensions.
fn point(value: Value<'_>) -> Value<'_> {
    value.reshape(&[])
}

/// The type to compute a step in.
fn wide(element: ElementType) -> ElementType {
    if element == F64 { F64 } else { F32 }
}

/// Results that were made parameter by parameter, in the order of the lists of arguments.
fn by_list(steps: Vec<Vec<Option<Value<'_>>>>, lists: usize) -> Vec<Option<Value<'_>>> {
    (0..lists)
        .flat_map(|list| steps.iter().filter_map(move |step| step.get(list).copied()))
        .collect()
}

/// Arguments: parameters, gradients, first and second moments, greatest second moments, steps, learning rate, two
/// betas, weight decay, epsilon, amsgrad, maximize, scale, found_inf. As torch.optim.Adam and AdamW
/// document them; the step is already counted.
fn adam<'b>(call: &Call<'b>, decoupled: bool) -> Several<'b> {
    let (amsgrad, maximize) = (call.bool(11)?, call.bool(12)?);
    let scaling = Scaling::read(call, 13)?;
    let mut steps = Vec::new();
    for item in 0..call.length(0)? {
        let [parameter, gradient, first, second] = call.items([0, 1, 2, 3], item, wide)?;
        let element = parameter.element();
        let [step] = call.items([5], item, |_| element)?.map(point);
        let mut numbers = Vec::new();
        for index in 6..11 {
            numbers.push(point(call.tensor_as(index, element)?));
        }
        let [rate, beta1, beta2, decay, eps] = numbers[..] else {
            unreachable!("five numbers were read")
        };
        let unscaled = scaling.unscaled(gradient);
        let slope = if maximize { -unscaled } else { unscaled };
        let (start, slope) = if decoupled {
            (parameter - rate * decay * parameter, slope)
        } else {
            (parameter, slope + decay * parameter)
        };
        let moment1 = first + (1. - beta1) * (slope - first);
        let moment2 = beta2 * second + (1. - beta2) * slope * slope;
        let correction1 = 1. - beta1.power(step);
        let correction2 = (1. - beta2.power(step)).sqrt();
        let (greatest, size) = if amsgrad {
            let [old] = call.items([4], item, |_| element)?;
            let greatest = old.maximum(moment2);
            (Some(scaling.choose(greatest, old)), greatest)
        } else {
            (None, moment2)
        };
        let denominator = size.sqrt() / correction2 + eps;
        let next = start - rate / correction1 * (moment1 / denominator);
        let mut results = vec![
            Some(scaling.choose(next, parameter)),
            scaling.scale.map(|_| unscaled),
            Some(scaling.choose(moment1, first)),
            Some(scaling.choose(moment2, second)),
        ];
        results.extend(greatest.map(Some));
        steps.push(results);
    }
    Ok(by_list(steps, 5))
}

/// Arguments: parameters, gradients, momentum buffers, weight decay, momentum, learning rate, dampening,
/// nesterov, maximize, is_first_step, scale, found_inf. As torch.optim.SGD documents them.
fn sgd<'b>(call: &Call<'b>) -> Several<'b> {
    let (nesterov, maximize, first_step) = (call.bool(7)?, call.bool(8)?, call.bool(9)?);
    let scaling = Scaling::read(call, 10)?;
    let has_momentum = call.length(2)? > 0;
    let mut steps = Vec::new();
    for item in 0..call.length(0)? {
        let [parameter, gradient] = call.items([0, 1], item, wide)?;
        let element = parameter.element();
        let number = |index| call.tensor_as(index, element).map(point);
        let (decay, momentum, rate, dampening) = (number(3)?, number(4)?, number(5)?, number(6)?);
        let unscaled = scaling.unscaled(gradient);
        let slope = if maximize { -unscaled } else { unscaled };
        let mut slope = slope + decay * parameter;
        let mut results = vec![None, scaling.scale.map(|_| unscaled)];
        if has_momentum {
            let [old] = call.items([2], item, |_| element)?;
            let buffer = if first_step {
                slope
            } else {
                momentum * old + (1. - dampening) * slope
            };
            slope = if nesterov {
                slope + momentum * buffer
            } else {
                buffer
            };
            results.push(Some(scaling.choose(buffer, old)));
        }
        results[0] = Some(scaling.choose(parameter - rate * slope, parameter));
        steps.push(results);
    }
    Ok(by_list(steps, 3))
}
