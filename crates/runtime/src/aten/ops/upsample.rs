//! Resampling of images to other sizes.

use super::matmul::transform;
use super::operands;
use crate::aten::Error;
use crate::aten::call::Call;
use crate::aten::table::OperatorRow;
use crate::aten::value::{Value, iota};
use crate::pjrt::ElementType::{self, F32, F64, S32};

pub(super) static ROWS: &[OperatorRow] = &[
    OperatorRow::new("upsample_nearest1d", |call| nearest(call, 1, 0.)),
    OperatorRow::new("upsample_nearest2d", |call| nearest(call, 2, 0.)),
    OperatorRow::new("upsample_nearest3d", |call| nearest(call, 3, 0.)),
    OperatorRow::new("_upsample_nearest_exact1d", |call| nearest(call, 1, 0.5)),
    OperatorRow::new("_upsample_nearest_exact2d", |call| nearest(call, 2, 0.5)),
    OperatorRow::new("_upsample_nearest_exact3d", |call| nearest(call, 3, 0.5)),
    OperatorRow::new("upsample_nearest1d_backward", |call| {
        nearest_backward(call, 1, 0.)
    }),
    OperatorRow::new("upsample_nearest2d_backward", |call| {
        nearest_backward(call, 2, 0.)
    }),
    OperatorRow::new("upsample_nearest3d_backward", |call| {
        nearest_backward(call, 3, 0.)
    }),
    OperatorRow::new("_upsample_nearest_exact1d_backward", |call| {
        nearest_backward(call, 1, 0.5)
    }),
    OperatorRow::new("_upsample_nearest_exact2d_backward", |call| {
        nearest_backward(call, 2, 0.5)
    }),
    OperatorRow::new("_upsample_nearest_exact3d_backward", |call| {
        nearest_backward(call, 3, 0.5)
    }),
    OperatorRow::new("upsample_linear1d", |call| linear(call, 1)),
    OperatorRow::new("upsample_bilinear2d", |call| linear(call, 2)),
    OperatorRow::new("upsample_trilinear3d", |call| linear(call, 3)),
    OperatorRow::new("upsample_linear1d_backward", |call| {
        linear_backward(call, 1)
    }),
    OperatorRow::new("upsample_bilinear2d_backward", |call| {
        linear_backward(call, 2)
    }),
    OperatorRow::new("upsample_trilinear3d_backward", |call| {
        linear_backward(call, 3)
    }),
];

/// One dimension that is resampled.
struct Axis {
    dimension: usize,
    /// Elements of the original.
    size: i64,
    /// Elements of the resampled.
    places: i64,
    /// Distance in the original of neighbours in the resampled.
    scale: f64,
    /// The type in which positions are computed, as torch does: it decides where a place falls.
    element: ElementType,
}

impl Axis {
    /// The last `spatial` dimensions of an original and a resampled array, with the scales that may be
    /// arguments `first` and the following.
    fn all(
        call: &Call<'_>,
        spatial: usize,
        [original, resampled]: [&[i64]; 2],
        first: usize,
        element: ElementType,
    ) -> Result<Vec<Axis>, Error> {
        let outer = original.len() - spatial;
        (0..spatial)
            .map(|i| {
                let (size, places) = (original[outer + i], resampled[outer + i]);
                let scale = if call.has(first + i) {
                    rounded(1. / call.float(first + i)?, element)
                } else {
                    ratio(size, places, element)
                };
                Ok(Axis {
                    dimension: outer + i,
                    size,
                    places,
                    scale,
                    element,
                })
            })
            .collect()
    }

    /// The numbers of the places.
    fn numbers<'b>(&self, call: &Call<'b>) -> Value<'b> {
        iota(call.body(), S32, &[self.places], 0).convert(self.element)
    }

    /// The element nearest to each place, `offset` from its start.
    fn nearest<'b>(&self, call: &Call<'b>, offset: f64) -> Value<'b> {
        let position = (self.numbers(call) + offset) * self.scale;
        position
            .floor()
            .convert(S32)
            .minimum((self.size - 1) as f64)
    }

    /// The matrix that interpolates between the two elements next to each place.
    fn interpolation<'b>(&self, call: &Call<'b>, align_corners: bool) -> Value<'b> {
        let numbers = self.numbers(call);
        let position = if align_corners {
            numbers * ratio(self.size - 1, (self.places - 1).max(1), self.element)
        } else {
            ((numbers + 0.5) * self.scale - 0.5).maximum(0.)
        };
        let position = position.unsqueeze(1);
        let first = position.floor().minimum((self.size - 1) as f64);
        let second = (first + 1.).minimum((self.size - 1) as f64);
        let weight = (position - first).maximum(0.).minimum(1.);
        let element = iota(call.body(), S32, &[1, self.size], 1).convert(self.element);
        element.eq(first).select(1. - weight, 0.) + element.eq(second).select(weight, 0.)
    }

    /// The matrix that picks the nearest element for each place.
    fn choice<'b>(&self, call: &Call<'b>, offset: f64) -> Value<'b> {
        let nearest = self.nearest(call, offset).unsqueeze(1);
        iota(call.body(), S32, &[1, self.size], 1)
            .eq(nearest)
            .convert(F32)
    }
}

fn rounded(number: f64, element: ElementType) -> f64 {
    if element == F64 {
        number
    } else {
        (number as f32).into()
    }
}

fn ratio(a: i64, b: i64, element: ElementType) -> f64 {
    if element == F64 {
        a as f64 / b as f64
    } else {
        (a as f32 / b as f32).into()
    }
}

/// Arguments: input, output sizes, scales.
fn nearest<'b>(call: &Call<'b>, spatial: usize, offset: f64) -> Result<Value<'b>, Error> {
    let value = call.tensor(0)?;
    let sizes = [&value.dims()[..], &call.result(0)?.view.sizes];
    let axes = Axis::all(call, spatial, sizes, 2, F32)?;
    Ok(axes.iter().fold(value, |value, axis| {
        value.take(axis.dimension, axis.nearest(call, offset))
    }))
}

/// Arguments: gradient, output sizes, input sizes, scales.
fn nearest_backward<'b>(call: &Call<'b>, spatial: usize, offset: f64) -> Result<Value<'b>, Error> {
    let [gradient] = operands(call, [0])?;
    let sizes = [&call.result(0)?.view.sizes[..], &gradient.dims()];
    let axes = Axis::all(call, spatial, sizes, 3, F32)?;
    Ok(axes.iter().fold(gradient, |gradient, axis| {
        let matrix = axis.choice(call, offset).convert(gradient.element());
        transform(call, gradient, matrix, axis.dimension, 0)
    }))
}

/// Arguments: input, output sizes, whether corners are aligned, scales.
fn linear<'b>(call: &Call<'b>, spatial: usize) -> Result<Value<'b>, Error> {
    let [value] = operands(call, [0])?;
    if !value.is_float() {
        // torch has a fixed-point formula of its own for these.
        return call.unsupported("for elements that are not real numbers");
    }
    let sizes = [&value.dims()[..], &call.result(0)?.view.sizes];
    let (axes, aligned) = (
        Axis::all(call, spatial, sizes, 3, value.element())?,
        call.bool(2)?,
    );
    Ok(axes.iter().fold(value, |value, axis| {
        let matrix = axis.interpolation(call, aligned).convert(value.element());
        transform(call, value, matrix, axis.dimension, 1)
    }))
}

/// Arguments: gradient, output sizes, input sizes, whether corners are aligned, scales.
fn linear_backward<'b>(call: &Call<'b>, spatial: usize) -> Result<Value<'b>, Error> {
    let [gradient] = operands(call, [0])?;
    let sizes = [&call.result(0)?.view.sizes[..], &gradient.dims()];
    let (axes, aligned) = (
        Axis::all(call, spatial, sizes, 4, gradient.element())?,
        call.bool(3)?,
    );
    Ok(axes.iter().fold(gradient, |gradient, axis| {
        let matrix = axis
            .interpolation(call, aligned)
            .convert(gradient.element());
        transform(call, gradient, matrix, axis.dimension, 0)
    }))
}
