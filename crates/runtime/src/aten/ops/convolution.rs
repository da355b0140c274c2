//! Convolutions of one to three dimensions, transposed or not, and their derivatives.

use super::matmul::accumulator;
use crate::aten::Error;
use crate::aten::body::{Dims, Type};
use crate::aten::call::Call;
use crate::aten::element::is_float;
use crate::aten::table::{OperatorRow, Several};
use crate::aten::value::Value;

pub(super) static ROWS: &[OperatorRow] = &[
    OperatorRow::new("convolution_overrideable", forward),
    OperatorRow::several("convolution_backward_overrideable", backward),
];

/// The parameters of a convolution, for each of its spatial dimensions.
struct Parameters {
    precision: &'static str,
    stride: Dims,
    padding: Dims,
    dilation: Dims,
    transposed: bool,
    output_padding: Dims,
    groups: i64,
}

/// One convolution as XLA has it: features first, windows over the rest.
struct Convolution {
    stride: Dims,
    low: Dims,
    high: Dims,
    lhs_dilation: Dims,
    rhs_dilation: Dims,
    feature_groups: i64,
    batch_groups: i64,
    /// Which dimensions are what: of the operand, kernel and result.
    layout: [&'static str; 3],
}

/// Batch and features of the operand and the result first, output then input features of the kernel.
const FORWARD: [&str; 3] = ["b, f", "o, i", "b, f"];
/// The operand's batch is summed over, its features are many samples.
const WEIGHT: [&str; 3] = ["f, b", "i, o", "f, b"];

impl Parameters {
    /// From arguments `first` on, of values with `spatial` dimensions besides two.
    fn read(call: &Call<'_>, first: usize, spatial: usize) -> Result<Parameters, Error> {
        let list = |index: usize| -> Result<Dims, Error> {
            match call.ints(index)? {
                [one] => Ok(Dims::from_elem(*one, spatial)),
                all if all.len() == spatial => Ok(Dims::from_slice(all)),
                other => call.malformed(
                    format!("argument {index}"),
                    format!("{spatial} numbers"),
                    other,
                ),
            }
        };
        Ok(Parameters {
            precision: call.precision(),
            stride: list(first)?,
            padding: list(first + 1)?,
            dilation: list(first + 2)?,
            transposed: call.bool(first + 3)?,
            output_padding: list(first + 4)?,
            groups: call.int(first + 5)?,
        })
    }

    /// Spatial sizes of the output, by torch's formulas.
    fn output(&self, dims: &[i64], kernel: &[i64]) -> Dims {
        (0..self.stride.len())
            .map(|i| {
                let span = self.dilation[i] * (kernel[i + 2] - 1) + 1;
                let (size, padding) = (dims[i + 2], 2 * self.padding[i]);
                if self.transposed {
                    (size - 1) * self.stride[i] - padding + span + self.output_padding[i]
                } else {
                    (size + padding - span) / self.stride[i] + 1
                }
            })
            .collect()
    }

    /// Windows over `input`, at as many places as `sizes` says.
    fn direct<'b>(&self, input: Value<'b>, weight: Value<'b>, sizes: &[i64]) -> Value<'b> {
        let (dims, kernel) = (input.dims(), weight.dims());
        let high = (0..sizes.len())
            .map(|i| {
                let end =
                    (sizes[i] - 1) * self.stride[i] + (kernel[i + 2] - 1) * self.dilation[i] + 1;
                end - dims[i + 2] - self.padding[i]
            })
            .collect();
        let convolution = Convolution {
            stride: self.stride.clone(),
            low: self.padding.clone(),
            high,
            lhs_dilation: Dims::from_elem(1, sizes.len()),
            rhs_dilation: self.dilation.clone(),
            feature_groups: self.groups,
            batch_groups: 1,
            layout: FORWARD,
        };
        convolution.push(self.precision, input, weight)
    }

    /// The adjoint of [`Parameters::direct`]: each element of `input` spread over a window of a result
    /// of `sizes`.
    fn adjoint<'b>(&self, input: Value<'b>, weight: Value<'b>, sizes: &[i64]) -> Value<'b> {
        let kernel = weight.dims();
        let dims = input.dims();
        let span = |i: usize| (kernel[i + 2] - 1) * self.dilation[i] + 1;
        let low: Dims = (0..sizes.len())
            .map(|i| span(i) - 1 - self.padding[i])
            .collect();
        let high = (0..sizes.len())
            .map(|i| {
                let spread = (dims[i + 2] - 1) * self.stride[i] + 1;
                sizes[i] + span(i) - 1 - spread - low[i]
            })
            .collect();
        let convolution = Convolution {
            stride: Dims::from_elem(1, sizes.len()),
            low,
            high,
            lhs_dilation: self.stride.clone(),
            rhs_dilation: self.dilation.clone(),
            feature_groups: self.groups,
            batch_groups: 1,
            layout: FORWARD,
        };
        convolution.push(self.precision, input, self.reversed(weight))
    }

    /// A weight for the way back: mirrored, input features for output features in each group.
    fn reversed<'b>(&self, weight: Value<'b>) -> Value<'b> {
        let dims = weight.dims();
        let spatial: Vec<usize> = (2..dims.len()).collect();
        let mut split = Dims::from_slice(&[self.groups, dims[0] / self.groups, dims[1]]);
        split.extend_from_slice(&dims[2..]);
        let mut joined = Dims::from_slice(&[self.groups * dims[1], dims[0] / self.groups]);
        joined.extend_from_slice(&dims[2..]);
        let swapped = weight.reshape(&split).swap(1, 2).reshape(&joined);
        swapped.reverse(&spatial)
    }

    /// The gradient by the weight of `gradient = direct(input, weight)`, of `sizes`.
    fn weight_gradient<'b>(
        &self,
        input: Value<'b>,
        gradient: Value<'b>,
        sizes: &[i64],
    ) -> Value<'b> {
        let (dims, places) = (input.dims(), gradient.dims());
        let high = (0..sizes.len())
            .map(|i| {
                // The last kernel element's window ends here.
                let end =
                    (places[i + 2] - 1) * self.stride[i] + (sizes[i] - 1) * self.dilation[i] + 1;
                end - dims[i + 2] - self.padding[i]
            })
            .collect();
        let convolution = Convolution {
            stride: self.dilation.clone(),
            low: self.padding.clone(),
            high,
            lhs_dilation: Dims::from_elem(1, sizes.len()),
            rhs_dilation: self.stride.clone(),
            feature_groups: 1,
            batch_groups: self.groups,
            layout: WEIGHT,
        };
        convolution.push(self.precision, input, gradient)
    }
}

impl Convolution {
    fn push<'b>(&self, precision: &str, lhs: Value<'b>, rhs: Value<'b>) -> Value<'b> {
        let (left, right) = (lhs.ty(), rhs.ty());
        let spatial = self.stride.len();
        let forward = self.layout == FORWARD;
        let mut dims = if forward {
            Dims::from_slice(&[left.dims[0], right.dims[0]])
        } else {
            Dims::from_slice(&[right.dims[1], left.dims[1] / self.batch_groups])
        };
        for i in 0..spatial {
            let size =
                (left.dims[i + 2] - 1) * self.lhs_dilation[i] + 1 + self.low[i] + self.high[i];
            let span = (right.dims[i + 2] - 1) * self.rhs_dilation[i] + 1;
            dims.push((size - span) / self.stride[i] + 1);
        }
        let ty = Type::new(accumulator(left.element), &dims);
        let numbers: String = (0..spatial).map(|i| format!(", {i}")).collect();
        let [operand, kernel, result] = self.layout;
        let padding: Vec<[i64; 2]> = (self.low.iter().zip(&self.high))
            .map(|(&low, &high)| [low, high])
            .collect();
        let precision = if left.element.size() >= 4 {
            precision
        } else {
            "DEFAULT"
        };
        let Convolution {
            stride,
            lhs_dilation,
            rhs_dilation,
            feature_groups,
            batch_groups,
            ..
        } = self;
        lhs.body().push(
            ty.clone(),
            format_args!(
                "stablehlo.convolution({lhs}, {rhs}) dim_numbers = [{operand}{numbers}]x[{kernel}{numbers}]->\
                 [{result}{numbers}], window = {{stride = {stride:?}, pad = {padding:?}, \
                 lhs_dilate = {lhs_dilation:?}, rhs_dilate = {rhs_dilation:?}}} \
                 {{batch_group_count = {batch_groups} : i64, feature_group_count = {feature_groups} : i64, \
                 precision_config = [#stablehlo<precision {precision}>, #stablehlo<precision {precision}>]}} : \
                 ({left}, {right}) -> {ty}"
            ),
        )
    }
}

/// Arguments that are values with a batch dimension, and of one type.
fn value<'b>(call: &Call<'b>, index: usize) -> Result<Value<'b>, Error> {
    let value = call.tensor(index)?;
    if !is_float(value.element()) {
        return call.unsupported(format!("for {} elements", value.element().name()));
    }
    if value.rank() < 3 {
        return call.malformed(
            format!("argument {index}"),
            "at least 3 dimensions",
            &value.dims()[..],
        );
    }
    Ok(value)
}

fn forward<'b>(call: &Call<'b>) -> Result<Value<'b>, Error> {
    let (input, weight) = (value(call, 0)?, value(call, 1)?);
    let parameters = Parameters::read(call, 3, input.rank() - 2)?;
    let sizes = parameters.output(&input.dims(), &weight.dims());
    let output = if parameters.transposed {
        parameters.adjoint(input, weight, &sizes)
    } else {
        parameters.direct(input, weight, &sizes)
    };
    let Some(bias) = call.optional(2)? else {
        return Ok(output);
    };
    let mut over = Dims::from_elem(1, output.rank());
    over[1] = bias.count();
    Ok(output + bias.convert(output.element()).reshape(&over))
}

/// Results: gradients by input, weight and bias.
fn backward<'b>(call: &Call<'b>) -> Several<'b> {
    let (gradient, input, weight) = (value(call, 0)?, value(call, 1)?, value(call, 2)?);
    let rank = input.rank();
    let parameters = Parameters::read(call, 3, rank - 2)?;
    let kernel = &weight.dims()[2..];
    let by_input = || {
        if parameters.transposed {
            parameters.direct(gradient, weight, &input.dims()[2..])
        } else {
            parameters.adjoint(gradient, weight, &input.dims()[2..])
        }
    };
    let by_weight = || {
        if parameters.transposed {
            parameters.weight_gradient(gradient, input, kernel)
        } else {
            parameters.weight_gradient(input, gradient, kernel)
        }
    };
    let by_bias = || {
        let others: Vec<usize> = (0..rank).filter(|&dimension| dimension != 1).collect();
        gradient
            .convert(accumulator(gradient.element()))
            .sum(&others)
    };
    Ok(vec![
        call.wants(0).then(by_input),
        call.wants(1).then(by_weight),
        call.wants(2).then(by_bias),
    ])
}
