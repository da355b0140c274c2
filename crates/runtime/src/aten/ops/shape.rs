//! Copies, and rearrangements that are no views.

use crate::aten::Error;
use crate::aten::body::Dims;
use crate::aten::call::Call;
use crate::aten::table::OperatorRow;
use crate::aten::value::{Value, concatenate};

pub(super) static ROWS: &[OperatorRow] = &[
    OperatorRow::new("clone", |call| call.tensor(0)),
    // Arguments: destination, source.
    OperatorRow::new("copy_", |call| call.tensor(1)),
    OperatorRow::new("cat", cat),
    OperatorRow::new("flip", |call| {
        let value = call.tensor(0)?;
        if call.ints(1)?.is_empty() {
            return Ok(value);
        }
        Ok(value.reverse(&call.dimensions(1, value.rank())?))
    }),
    OperatorRow::new("roll", roll),
    OperatorRow::new("pixel_shuffle", |call| {
        let (value, factor) = (call.tensor(0)?, call.int(1)?);
        let (outer, [channels, height, width]) = image(call, value)?;
        let shape = [
            outer,
            channels / (factor * factor),
            factor,
            factor,
            height,
            width,
        ];
        let moved = value.reshape(&shape).transpose(&[0, 1, 4, 2, 5, 3]);
        Ok(moved.reshape(&call.result(0)?.view.sizes))
    }),
    OperatorRow::new("pixel_unshuffle", |call| {
        let (value, factor) = (call.tensor(0)?, call.int(1)?);
        let (outer, [channels, height, width]) = image(call, value)?;
        let shape = [
            outer,
            channels,
            height / factor,
            factor,
            width / factor,
            factor,
        ];
        let moved = value.reshape(&shape).transpose(&[0, 1, 3, 5, 2, 4]);
        Ok(moved.reshape(&call.result(0)?.view.sizes))
    }),
    OperatorRow::new("trace", |call| {
        let value = call.tensor(0)?;
        let element = call.result(0)?.element;
        let wide = value.convert(crate::aten::element::opmath(element));
        let inside = super::creation::diagonal(call, &value.dims()).eq(0.);
        Ok(inside.select(wide, 0.).sum(&[0, 1]))
    }),
    OperatorRow::new("constant_pad_nd", constant_pad),
    OperatorRow::new("select_backward", |call| {
        let gradient = call.tensor(0)?;
        let sizes = call.ints(1)?;
        let dimension = call.dimension(2, sizes.len())?;
        let index = call.int(3)?;
        let index = if index < 0 {
            index + sizes[dimension]
        } else {
            index
        };
        Ok(spread(
            gradient.unsqueeze(dimension),
            sizes,
            dimension,
            index,
            1,
        ))
    }),
    OperatorRow::new("slice_backward", |call| {
        let gradient = call.tensor(0)?;
        let sizes = call.ints(1)?;
        let dimension = call.dimension(2, sizes.len())?;
        let start = call.int(3)?;
        let size = sizes[dimension];
        let start = (if start < 0 { start + size } else { start }).clamp(0, size);
        Ok(spread(gradient, sizes, dimension, start, call.int(5)?))
    }),
];

/// Zeros of `sizes`, but along `dimension` from `start` by `step` the slices of `value`.
fn spread<'b>(
    value: Value<'b>,
    sizes: &[i64],
    dimension: usize,
    start: i64,
    step: i64,
) -> Value<'b> {
    let count = value.dims()[dimension];
    if count == 0 {
        return value.zero().broadcast_in_dim(sizes, &[]);
    }
    let mut low = Dims::from_elem(0, sizes.len());
    let (mut high, mut interior) = (low.clone(), low.clone());
    low[dimension] = start;
    interior[dimension] = step - 1;
    high[dimension] = sizes[dimension] - start - (count - 1) * step - 1;
    value.pad(value.zero(), &low, &high, &interior)
}

/// The product of the outer dimensions, and the last three: channels, height, width.
fn image(call: &Call<'_>, value: Value<'_>) -> Result<(i64, [i64; 3]), Error> {
    match value.dims()[..] {
        [ref outer @ .., channels, height, width] => {
            Ok((outer.iter().product(), [channels, height, width]))
        }
        ref other => call.malformed("argument 0", "at least 3 dimensions", other),
    }
}

fn cat<'b>(call: &Call<'b>) -> Result<Value<'b>, Error> {
    let element = call.promoted(&[0])?;
    let mut values = call.tensors(0)?;
    // An empty vector joins with anything.
    if values.iter().any(|value| value.rank() > 1) {
        values.retain(|value| value.dims()[..] != [0]);
    }
    let dimension = call.dimension(1, values[0].rank())?;
    let values: Vec<_> = values.iter().map(|value| value.convert(element)).collect();
    Ok(concatenate(&values, dimension))
}

fn roll<'b>(call: &Call<'b>) -> Result<Value<'b>, Error> {
    let value = call.tensor(0)?;
    let shifts = call.ints(1)?;
    let dimensions = if call.has(2) { call.ints(2)? } else { &[] };
    if dimensions.is_empty() {
        let rolled = roll_along(value.flatten(), 0, shifts.iter().sum());
        return Ok(rolled.reshape(&value.dims()));
    }
    let rank = value.rank().max(1) as i64;
    let moves = shifts.iter().zip(dimensions);
    Ok(moves.fold(value, |value, (&shift, &dimension)| {
        roll_along(value, dimension.rem_euclid(rank) as usize, shift)
    }))
}

fn roll_along(value: Value<'_>, dimension: usize, shift: i64) -> Value<'_> {
    let Some(&size) = value.dims().get(dimension) else {
        return value;
    };
    if size == 0 || shift % size == 0 {
        return value;
    }
    let cut = size - shift.rem_euclid(size);
    let parts = [
        value.narrow(dimension, cut, size),
        value.narrow(dimension, 0, cut),
    ];
    concatenate(&parts, dimension)
}

fn constant_pad<'b>(call: &Call<'b>) -> Result<Value<'b>, Error> {
    let value = call.tensor(0)?;
    let pads = call.ints(1)?;
    let rank = value.rank();
    if pads.len() % 2 != 0 || pads.len() > 2 * rank {
        return call.malformed("pad", format!("up to {rank} pairs"), pads);
    }
    let mut low = Dims::from_elem(0, rank);
    let mut high = low.clone();
    let interior = low.clone();
    // The last dimension comes first.
    for (number, pair) in pads.chunks(2).enumerate() {
        (low[rank - 1 - number], high[rank - 1 - number]) = (pair[0], pair[1]);
    }
    let fill = call.scalar(2, value.element())?;
    Ok(value.pad(fill, &low, &high, &interior))
}
