//! Activation functions and their derivatives.

use std::f64::consts::{FRAC_1_SQRT_2, FRAC_2_PI, FRAC_2_SQRT_PI};

use super::{float_map, map, real_map};
use crate::aten::Error;
use crate::aten::call::Call;
use crate::aten::special::erf;
use crate::aten::table::OperatorRow;
use crate::aten::value::{Value, concatenate};

pub(super) static ROWS: &[OperatorRow] = &[
    OperatorRow::new("relu", |call| map(call, [0], |[x]| x.maximum(0.))),
    OperatorRow::new("threshold", |call| {
        map(call, [0, 1, 2], |[x, limit, value]| {
            x.le(limit).select(value, x)
        })
    }),
    OperatorRow::new("threshold_backward", |call| {
        map(call, [0, 1, 2], |[gradient, x, limit]| {
            x.le(limit).select(gradient.zeros(), gradient)
        })
    }),
    OperatorRow::new("hardtanh", |call| {
        map(call, [0, 1, 2], |[x, least, greatest]| {
            x.maximum(least).minimum(greatest)
        })
    }),
    OperatorRow::new("hardtanh_backward", |call| {
        map(call, [0, 1, 2, 3], |[gradient, x, least, greatest]| {
            let outside = x.le(least).or(x.ge(greatest));
            outside.select(gradient.zeros(), gradient)
        })
    }),
    OperatorRow::new("leaky_relu", |call| {
        map(call, [0, 1], |[x, slope]| x.gt(0.).select(x, x * slope))
    }),
    OperatorRow::new("leaky_relu_backward", |call| {
        map(call, [0, 1, 2], |[gradient, x, slope]| {
            x.gt(0.).select(gradient, gradient * slope)
        })
    }),
    OperatorRow::new("elu", |call| {
        map(call, [0, 1, 2, 3], |[x, alpha, scale, input_scale]| {
            let negative = (x * input_scale).expm1() * (alpha * scale);
            x.le(0.).select(negative, x * scale)
        })
    }),
    OperatorRow::new("elu_backward", elu_backward),
    OperatorRow::new("softplus", |call| {
        real_map(call, [0, 1, 2], |[x, beta, threshold]| {
            let scaled = x * beta;
            let curve = scaled.exp().log1p() / beta;
            scaled.gt(threshold).select(x, curve)
        })
    }),
    OperatorRow::new("softplus_backward", |call| {
        real_map(call, [0, 1, 2, 3], |[gradient, x, beta, threshold]| {
            let scaled = x * beta;
            scaled
                .gt(threshold)
                .select(gradient, gradient * scaled.logistic())
        })
    }),
    OperatorRow::new("gelu", gelu),
    OperatorRow::new("gelu_backward", gelu_backward),
    OperatorRow::new("silu", |call| float_map(call, [0], |[x]| x * x.logistic())),
    OperatorRow::new("silu_backward", |call| {
        real_map(call, [0, 1], |[gradient, x]| {
            let gate = x.logistic();
            gradient * gate * (x * (1. - gate) + 1.)
        })
    }),
    OperatorRow::new("mish", |call| {
        real_map(call, [0], |[x]| x * x.exp().log1p().tanh())
    }),
    OperatorRow::new("mish_backward", |call| {
        real_map(call, [0, 1], |[gradient, x]| {
            let gate = x.logistic();
            let curve = x.exp().log1p().tanh();
            gradient * (curve + x * gate * (1. - curve * curve))
        })
    }),
    OperatorRow::new("hardsigmoid", |call| {
        real_map(call, [0], |[x]| (x + 3.).maximum(0.).minimum(6.) / 6.)
    }),
    OperatorRow::new("hardsigmoid_backward", |call| {
        real_map(call, [0, 1], |[gradient, x]| {
            x.gt(-3.).and(x.lt(3.)).select(gradient / 6., 0.)
        })
    }),
    OperatorRow::new("hardswish", |call| {
        real_map(call, [0], |[x]| x * (x + 3.).maximum(0.).minimum(6.) / 6.)
    }),
    OperatorRow::new("hardswish_backward", |call| {
        real_map(call, [0, 1], |[gradient, x]| {
            let between = gradient * (x / 3. + 0.5);
            let above = x.ge(3.).select(gradient, between);
            x.le(-3.).select(gradient.zeros(), above)
        })
    }),
    OperatorRow::several("log_sigmoid_forward", |call| {
        let value = real_map(call, [0], |[x]| x.minimum(0.) - (-x.abs()).exp().log1p())?;
        // The second result is a buffer of the CPU's implementation.
        let buffer = call.wants(1).then(|| call.result(1)).transpose()?;
        Ok(vec![
            Some(value),
            buffer.map(|ty| call.zeros(ty.element, &ty.view.sizes)),
        ])
    }),
    OperatorRow::new("log_sigmoid_backward", |call| {
        real_map(call, [0, 1], |[gradient, x]| gradient * (-x).logistic())
    }),
    OperatorRow::new("softshrink", |call| {
        map(call, [0, 1], |[x, lambda]| {
            let low = x.lt(-lambda).select(x + lambda, x * 0.);
            x.gt(lambda).select(x - lambda, low)
        })
    }),
    OperatorRow::new("softshrink_backward", shrink_backward),
    OperatorRow::new("hardshrink", |call| {
        map(call, [0, 1], |[x, lambda]| {
            within(x, lambda).select(x.zeros(), x)
        })
    }),
    OperatorRow::new("hardshrink_backward", shrink_backward),
    OperatorRow::new("tanh_backward", |call| {
        float_map(call, [0, 1], |[gradient, y]| gradient * (1. - y * y).conj())
    }),
    OperatorRow::new("sigmoid_backward", |call| {
        float_map(call, [0, 1], |[gradient, y]| {
            gradient * ((1. - y) * y).conj()
        })
    }),
    OperatorRow::new("logit", |call| {
        let eps = call.has(1).then(|| call.float(1)).transpose()?;
        real_map(call, [0], |[x]| {
            let x = eps.map_or(x, |eps| {
                let least = x.constant_of(eps);
                let greatest = x.constant_of(1. - eps);
                x.lt(least)
                    .select(least, x.gt(greatest).select(greatest, x))
            });
            (x / (1. - x)).log()
        })
    }),
    OperatorRow::new("logit_backward", |call| {
        let eps = call.has(2).then(|| call.float(2)).transpose()?;
        real_map(call, [0, 1], |[gradient, x]| {
            let slope = gradient / (x * (1. - x));
            let (least, outside) = eps.map_or((0., f64::NAN), |eps| (eps, 0.));
            x.lt(least)
                .or(x.gt(1. - least))
                .select(slope.constant_of(outside), slope)
        })
    }),
    OperatorRow::new("glu", |call| {
        let [first, second] = halves(call, 0, 1)?;
        Ok(first * second.logistic())
    }),
    OperatorRow::new("glu_backward", |call| {
        let [first, second] = halves(call, 1, 2)?;
        let gradient = call.tensor_as(0, first.element())?;
        let gate = second.logistic();
        let through = gradient * gate;
        let dimension = call.dimension(2, first.rank())?;
        Ok(concatenate(
            &[through, through * (1. - gate) * first],
            dimension,
        ))
    }),
];

impl<'b> Value<'b> {
    /// An array of one real number, of this one's type.
    fn constant_of(self, number: f64) -> Value<'b> {
        self.constant(crate::aten::request::Number::Float(number))
    }
}

fn within<'b>(x: Value<'b>, lambda: Value<'b>) -> Value<'b> {
    x.ge(-lambda).and(x.le(lambda))
}

fn shrink_backward<'b>(call: &Call<'b>) -> Result<Value<'b>, Error> {
    map(call, [0, 1, 2], |[gradient, x, lambda]| {
        within(x, lambda).select(gradient.zeros(), gradient)
    })
}

fn elu_backward<'b>(call: &Call<'b>) -> Result<Value<'b>, Error> {
    let of_result = call.bool(4)?;
    map(
        call,
        [0, 1, 2, 3, 5],
        |[gradient, alpha, scale, input_scale, x]| {
            let negative = if of_result {
                gradient * input_scale * (x + alpha * scale)
            } else {
                gradient * input_scale * alpha * scale * (x * input_scale).exp()
            };
            x.le(0.).select(negative, gradient * scale)
        },
    )
}

/// Whether argument `index` asks for the approximation by tanh.
fn by_tanh(call: &Call<'_>, index: usize) -> Result<bool, Error> {
    match call.text(index)? {
        None | Some("none") => Ok(false),
        Some("tanh") => Ok(true),
        other => call.malformed("approximate", "'none' or 'tanh'", other),
    }
}

/// sqrt(2 / pi), and the cubic coefficient of the approximation.
fn tanh_coefficients() -> (f64, f64) {
    (FRAC_2_PI.sqrt(), 0.044715)
}

fn gelu<'b>(call: &Call<'b>) -> Result<Value<'b>, Error> {
    let approximate = by_tanh(call, 1)?;
    real_map(call, [0], |[x]| {
        let curve = if approximate {
            let (scale, cubic) = tanh_coefficients();
            (scale * (x + cubic * (x * x * x))).tanh()
        } else {
            erf(x * FRAC_1_SQRT_2)
        };
        0.5 * x * (1. + curve)
    })
}

fn gelu_backward<'b>(call: &Call<'b>) -> Result<Value<'b>, Error> {
    let approximate = by_tanh(call, 2)?;
    real_map(call, [0, 1], |[gradient, x]| {
        let slope = if approximate {
            let (scale, cubic) = tanh_coefficients();
            let square = x * x;
            let curve = (scale * (x + cubic * (square * x))).tanh();
            let inner = scale * (1. + 3. * cubic * square);
            0.5 * (1. + curve) + 0.5 * x * (1. - curve * curve) * inner
        } else {
            let density = (-0.5 * (x * x)).exp() * (0.5 * FRAC_2_SQRT_PI * FRAC_1_SQRT_2);
            0.5 * (1. + erf(x * FRAC_1_SQRT_2)) + x * density
        };
        gradient * slope
    })
}

/// The halves of tensor `argument` along the dimension that is argument `dimension`, to compute on.
fn halves<'b>(call: &Call<'b>, argument: usize, dimension: usize) -> Result<[Value<'b>; 2], Error> {
    let [value] = super::operands(call, [argument])?;
    let dimension = call.dimension(dimension, value.rank())?;
    let size = value.dims()[dimension];
    Ok([
        value.narrow(dimension, 0, size / 2),
        value.narrow(dimension, size / 2, size),
    ])
}
