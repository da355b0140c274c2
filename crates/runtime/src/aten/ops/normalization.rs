//! Normalisation over layers, batches and groups, with derivatives.

use crate::aten::Error;
use crate::aten::body::Dims;
use crate::aten::call::Call;
use crate::aten::table::{OperatorRow, Several};
use crate::aten::value::Value;
use crate::pjrt::ElementType;

pub(super) static ROWS: &[OperatorRow] = &[
    OperatorRow::several("native_layer_norm", layer_norm),
    OperatorRow::several("native_layer_norm_backward", layer_norm_backward),
    OperatorRow::several("native_batch_norm", batch_norm).writes(&[3, 4]),
    OperatorRow::several("_native_batch_norm_legit", batch_norm),
    OperatorRow::several("_native_batch_norm_legit.no_stats", |call| {
        let Batch {
            output,
            mean,
            deviation,
            ..
        } = Batch::trained(call, call.float(5)?)?;
        Ok(vec![Some(output), Some(mean), Some(deviation)])
    }),
    OperatorRow::several("native_batch_norm_backward", batch_norm_backward),
    OperatorRow::several("native_group_norm", group_norm),
    OperatorRow::several("native_group_norm_backward", group_norm_backward),
];

/// Values with mean 0 and variance 1 over some dimensions, and what it took.
struct Normal<'b> {
    value: Value<'b>,
    mean: Value<'b>,
    /// One over the standard deviation.
    inverse: Value<'b>,
    variance: Value<'b>,
}

/// Normalises over `dimensions`; the statistics keep them with size 1.
fn normalize<'b>(value: Value<'b>, dimensions: &[usize], eps: f64) -> Normal<'b> {
    let dims = value.dims();
    let mean = value.mean(dimensions).keep(&dims, dimensions);
    let distance = value - mean;
    let variance = (distance * distance)
        .mean(dimensions)
        .keep(&dims, dimensions);
    let inverse = (variance + eps).rsqrt();
    Normal {
        value: distance * inverse,
        mean,
        inverse,
        variance,
    }
}

/// The gradient by the input of a normalisation: `gradient` is that by its result `normal`.
fn through<'b>(
    gradient: Value<'b>,
    normal: Value<'b>,
    inverse: Value<'b>,
    dimensions: &[usize],
) -> Value<'b> {
    let dims = normal.dims();
    let mean = |value: Value<'b>| value.mean(dimensions).keep(&dims, dimensions);
    inverse * (gradient - mean(gradient) - normal * mean(gradient * normal))
}

/// Tensor `index`, if given, to compute on.
fn parameter<'b>(
    call: &Call<'b>,
    index: usize,
    element: ElementType,
) -> Result<Option<Value<'b>>, Error> {
    Ok(call.optional(index)?.map(|value| value.convert(element)))
}

/// `value` if result `index` is wanted.
fn wanted<'b>(
    call: &Call<'b>,
    index: usize,
    value: impl FnOnce() -> Value<'b>,
) -> Option<Value<'b>> {
    call.wants(index).then(value)
}

fn layer_norm<'b>(call: &Call<'b>) -> Several<'b> {
    let [value] = super::operands(call, [0])?;
    let outer = value.rank() - call.ints(1)?.len();
    let inner: Vec<usize> = (outer..value.rank()).collect();
    let normal = normalize(value, &inner, call.float(4)?);
    let mut output = normal.value;
    if let Some(weight) = parameter(call, 2, value.element())? {
        output = output * weight;
    }
    if let Some(bias) = parameter(call, 3, value.element())? {
        output = output + bias;
    }
    Ok(vec![Some(output), Some(normal.mean), Some(normal.inverse)])
}

fn layer_norm_backward<'b>(call: &Call<'b>) -> Several<'b> {
    let [gradient, value] = super::operands(call, [0, 1])?;
    let (outer, inner): (Vec<usize>, Vec<usize>) = {
        let split = value.rank() - call.ints(2)?.len();
        ((0..split).collect(), (split..value.rank()).collect())
    };
    let mut kept = value.dims();
    inner.iter().for_each(|&dimension| kept[dimension] = 1);
    let element = value.element();
    let mean = call.tensor_as(3, element)?.reshape(&kept);
    let inverse = call.tensor_as(4, element)?.reshape(&kept);
    let normal = (value - mean) * inverse;
    let scaled = match parameter(call, 5, element)? {
        Some(weight) => gradient * weight,
        None => gradient,
    };
    Ok(vec![
        wanted(call, 0, || through(scaled, normal, inverse, &inner)),
        wanted(call, 1, || (gradient * normal).sum(&outer)),
        wanted(call, 2, || gradient.sum(&outer)),
    ])
}

/// All dimensions but that of channels.
fn but_channels(rank: usize) -> Vec<usize> {
    (0..rank).filter(|&dimension| dimension != 1).collect()
}

/// A vector over channels, to go with values of `rank`.
fn along_channels(vector: Value<'_>, rank: usize) -> Value<'_> {
    let mut dims = Dims::from_elem(1, rank);
    dims[1] = vector.count();
    vector.reshape(&dims)
}

/// A batch normalised by its own statistics.
struct Batch<'b> {
    output: Value<'b>,
    mean: Value<'b>,
    variance: Value<'b>,
    deviation: Value<'b>,
}

impl<'b> Batch<'b> {
    fn trained(call: &Call<'b>, eps: f64) -> Result<Batch<'b>, Error> {
        let [value] = super::operands(call, [0])?;
        let normal = normalize(value, &but_channels(value.rank()), eps);
        Ok(Batch {
            output: affine(call, normal.value)?,
            mean: normal.mean.flatten(),
            variance: normal.variance.flatten(),
            deviation: normal.inverse.flatten(),
        })
    }
}

/// `value`, scaled by argument 1 and moved by argument 2, over channels.
fn affine<'b>(call: &Call<'b>, value: Value<'b>) -> Result<Value<'b>, Error> {
    let mut value = value;
    if let Some(weight) = parameter(call, 1, value.element())? {
        value = value * along_channels(weight, value.rank());
    }
    if let Some(bias) = parameter(call, 2, value.element())? {
        value = value + along_channels(bias, value.rank());
    }
    Ok(value)
}

/// Results: output, mean and inverse deviation of the batch, running mean and variance.
fn batch_norm<'b>(call: &Call<'b>) -> Several<'b> {
    let eps = call.float(7)?;
    let [value] = super::operands(call, [0])?;
    let element = value.element();
    let running = |index| parameter(call, index, element);
    if call.bool(5)? {
        let batch = Batch::trained(call, eps)?;
        let momentum = call.float(6)?;
        let count = value.count() / value.dims()[1].max(1);
        let unbiased = batch.variance * (count as f64 / (count - 1) as f64);
        let moved = |old: Option<Value<'b>>, new: Value<'b>| {
            old.map(|old| (1. - momentum) * old + momentum * new)
        };
        return Ok(vec![
            Some(batch.output),
            Some(batch.mean),
            Some(batch.deviation),
            moved(running(3)?, batch.mean),
            moved(running(4)?, unbiased),
        ]);
    }
    let (Some(mean), Some(variance)) = (running(3)?, running(4)?) else {
        return call.malformed("running statistics", "tensors, in evaluation", ());
    };
    let scale = (variance + eps).rsqrt();
    let over = |vector| along_channels(vector, value.rank());
    let output = affine(call, (value - over(mean)) * over(scale))?;
    // The statistics of the batch, which were not needed.
    let unused = |index: usize| {
        call.result(index)
            .map(|ty| Some(call.zeros(ty.element, &ty.view.sizes)))
    };
    Ok(vec![Some(output), unused(1)?, unused(2)?, None, None])
}

fn batch_norm_backward<'b>(call: &Call<'b>) -> Several<'b> {
    let [gradient, value] = super::operands(call, [0, 1])?;
    let (element, rank) = (value.element(), value.rank());
    let over = |vector: Value<'b>| along_channels(vector.convert(element), rank);
    let others = but_channels(rank);
    let train = call.bool(7)?;
    let eps = call.float(8)?;
    let (mean, inverse) = if train {
        (over(call.tensor(5)?), over(call.tensor(6)?))
    } else {
        let variance = call.tensor_as(4, element)?;
        (over(call.tensor(3)?), over((variance + eps).rsqrt()))
    };
    let normal = (value - mean) * inverse;
    let scaled = match call.optional(2)? {
        Some(weight) => gradient * over(weight),
        None => gradient,
    };
    Ok(vec![
        wanted(call, 0, || {
            if train {
                through(scaled, normal, inverse, &others)
            } else {
                scaled * inverse
            }
        }),
        wanted(call, 1, || (gradient * normal).sum(&others)),
        wanted(call, 2, || gradient.sum(&others)),
    ])
}

/// Arguments of group normalisation: samples, channels, elements of a channel, groups; from argument
/// `first` on.
fn groups(call: &Call<'_>, first: usize) -> Result<[i64; 4], Error> {
    let mut numbers = [0; 4];
    for (place, number) in numbers.iter_mut().enumerate() {
        *number = call.int(first + place)?;
    }
    let [_, channels, _, groups] = numbers;
    if groups < 1 || channels % groups != 0 {
        return call.malformed("group", format!("a divisor of {channels}"), groups);
    }
    Ok(numbers)
}

fn group_norm<'b>(call: &Call<'b>) -> Several<'b> {
    let [value] = super::operands(call, [0])?;
    let [samples, channels, elements, groups] = groups(call, 3)?;
    let normal = normalize(
        value.reshape(&[samples, groups, channels / groups * elements]),
        &[2],
        call.float(7)?,
    );
    let output = affine(call, normal.value.reshape(&[samples, channels, elements]))?;
    let statistic = |value: Value<'b>| Some(value.reshape(&[samples, groups]));
    Ok(vec![
        Some(output.reshape(&value.dims())),
        statistic(normal.mean),
        statistic(normal.inverse),
    ])
}

fn group_norm_backward<'b>(call: &Call<'b>) -> Several<'b> {
    let [gradient, value] = super::operands(call, [0, 1])?;
    let element = value.element();
    let [samples, channels, elements, groups] = groups(call, 5)?;
    let grouped =
        |value: Value<'b>| value.reshape(&[samples, groups, channels / groups * elements]);
    let by_channel = |value: Value<'b>| value.reshape(&[samples, channels, elements]);
    let statistic = |index| -> Result<Value<'b>, Error> {
        Ok(call
            .tensor_as(index, element)?
            .reshape(&[samples, groups, 1]))
    };
    let (mean, inverse) = (statistic(2)?, statistic(3)?);
    let normal = (grouped(value) - mean) * inverse;
    let gradient = by_channel(gradient);
    let scaled = match parameter(call, 4, element)? {
        Some(weight) => gradient * along_channels(weight, 3),
        None => gradient,
    };
    Ok(vec![
        wanted(call, 0, || {
            through(grouped(scaled), normal, inverse, &[2]).reshape(&value.dims())
        }),
        wanted(call, 1, || (gradient * by_channel(normal)).sum(&[0, 2])),
        wanted(call, 2, || gradient.sum(&[0, 2])),
    ])
}
