//! Softmax and its logarithm.

use super::operands;
use crate::aten::Error;
use crate::aten::call::Call;
use crate::aten::table::OperatorRow;
use crate::aten::value::Value;

pub(super) static ROWS: &[OperatorRow] = &[
    OperatorRow::new("_softmax", |call| {
        let (shifted, along) = shifted(call)?;
        let powers = shifted.exp();
        Ok(powers / total(powers, &along))
    }),
    OperatorRow::new("_log_softmax", |call| {
        let (shifted, along) = shifted(call)?;
        Ok(shifted - total(shifted.exp(), &along).log())
    }),
    OperatorRow::new("_softmax_backward_data", |call| {
        let [gradient, output] = operands(call, [0, 1])?;
        let along = dimension(call, output, 2)?;
        let weighted = gradient * output;
        Ok(weighted - output * total(weighted, &along))
    }),
    OperatorRow::new("_log_softmax_backward_data", |call| {
        let [gradient, output] = operands(call, [0, 1])?;
        let along = dimension(call, output, 2)?;
        Ok(gradient - output.exp() * total(gradient, &along))
    }),
];

/// The dimension that is argument `index`, of which a 0-d tensor has none.
fn dimension(call: &Call<'_>, value: Value<'_>, index: usize) -> Result<Vec<usize>, Error> {
    let dimension = call.dimension(index, value.rank())?;
    Ok(if value.rank() == 0 {
        Vec::new()
    } else {
        vec![dimension]
    })
}

fn total<'b>(value: Value<'b>, along: &[usize]) -> Value<'b> {
    value.sum(along).keep(&value.dims(), along)
}

/// Argument 0 less its greatest element along the dimension.
fn shifted<'b>(call: &Call<'b>) -> Result<(Value<'b>, Vec<usize>), Error> {
    let [value] = operands(call, [0])?;
    let along = dimension(call, value, 1)?;
    let greatest = value.max(&along).keep(&value.dims(), &along);
    Ok((value - greatest, along))
}
