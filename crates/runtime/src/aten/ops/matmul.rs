//! Products of matrices.

use crate::aten::Error;
use crate::aten::body::{Dims, Type};
use crate::aten::call::Call;
use crate::aten::table::OperatorRow;
use crate::aten::value::Value;
use crate::pjrt::ElementType::{self, *};

pub(super) static ROWS: &[OperatorRow] = &[
    OperatorRow::new("mm", |call| product(call, 0, 1)),
    OperatorRow::new("bmm", |call| product(call, 0, 1)),
];

/// The type in which products of `element` are summed.
pub(super) fn accumulator(element: ElementType) -> ElementType {
    match element {
        F16 | BF16 => F32,
        other => other,
    }
}

/// The product of two matrices, or of two batches of them, summed in a wider type.
fn product<'b>(call: &Call<'b>, a: usize, b: usize) -> Result<Value<'b>, Error> {
    Ok(multiply(call.tensor(a)?, call.tensor(b)?))
}

/// `a b` of matrices in the last two dimensions, in the accumulator's type.
pub(super) fn multiply<'b>(a: Value<'b>, b: Value<'b>) -> Value<'b> {
    let (left, right) = (a.ty(), b.ty());
    let batches = left.dims.len() - 2;
    let mut dims = Dims::from_slice(&left.dims[..=batches]);
    dims.push(right.dims[batches + 1]);
    let ty = Type::new(accumulator(left.element), &dims);
    let batch: Vec<usize> = (0..batches).collect();
    a.body().push(
        ty.clone(),
        format_args!(
            "stablehlo.dot_general {a}, {b}, batching_dims = {batch:?} x {batch:?}, \
             contracting_dims = [{}] x [{batches}], precision = [DEFAULT, DEFAULT] : ({left}, {right}) -> {ty}",
            batches + 1
        ),
    )
}
