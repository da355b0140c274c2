//! Products of matrices.

use crate::aten::Error;
use crate::aten::body::{Dims, Type};
use crate::aten::call::Call;
use crate::aten::element;
use crate::aten::table::OperatorRow;
use crate::aten::value::Value;
use crate::pjrt::ElementType::{self, *};

pub(super) static ROWS: &[OperatorRow] = &[
    OperatorRow::new("mm", |call| product(call, 0)),
    OperatorRow::new("bmm", |call| product(call, 0)),
    OperatorRow::new("mv", |call| {
        let vector = call.tensor(1)?.unsqueeze(1);
        Ok(multiply(call, call.tensor(0)?, vector).squeeze(1))
    }),
    OperatorRow::new("dot", |call| dot(call, call.tensor(0)?)),
    OperatorRow::new("vdot", |call| dot(call, call.tensor(0)?.conj())),
    OperatorRow::new("addmm", |call| add_to(call, product(call, 1)?)),
    OperatorRow::new("baddbmm", |call| add_to(call, product(call, 1)?)),
    OperatorRow::new("addbmm", |call| {
        let sum = product(call, 1)?.sum(&[0]);
        add_to(call, sum)
    }),
    OperatorRow::new("addmv", |call| {
        let vector = call.tensor(2)?.unsqueeze(1);
        let product = multiply(call, call.tensor(1)?, vector).squeeze(1);
        add_to(call, product)
    }),
    OperatorRow::new("addr", |call| {
        let element = accumulator(call.promoted(&[0, 1, 2])?);
        let column = call.tensor_as(1, element)?.unsqueeze(1);
        let row = call.tensor_as(2, element)?.unsqueeze(0);
        add_to(call, column * row)
    }),
];

/// The type in which products of `element` are summed.
pub(super) fn accumulator(element: ElementType) -> ElementType {
    element::opmath(element)
}

/// The product of two matrices or batches of them: arguments `first` and the next.
fn product<'b>(call: &Call<'b>, first: usize) -> Result<Value<'b>, Error> {
    let (a, b) = (call.tensor(first)?, call.tensor(first + 1)?);
    if a.element() != b.element() {
        return call.malformed("matrices", "one element type", [a.element(), b.element()]);
    }
    Ok(multiply(call, a, b))
}

fn dot<'b>(call: &Call<'b>, a: Value<'b>) -> Result<Value<'b>, Error> {
    let b = call.tensor(1)?.unsqueeze(1);
    Ok(multiply(call, a.unsqueeze(0), b).reshape(&[]))
}

/// `beta self + alpha product` of arguments 0, 3 and 4.
fn add_to<'b>(call: &Call<'b>, product: Value<'b>) -> Result<Value<'b>, Error> {
    let element = product.element();
    let mut sum = product;
    if !call.is_number(4, 1.) {
        sum = sum * call.scalar(4, element)?;
    }
    // By torch's definition what is not a number does not count then.
    if call.is_number(3, 0.) {
        return Ok(sum);
    }
    let mut start = call.tensor_as(0, element)?;
    if !call.is_number(3, 1.) {
        start = start * call.scalar(3, element)?;
    }
    Ok(start + sum)
}

/// `a b` of matrices in the last two dimensions, in the accumulator's type.
pub(super) fn multiply<'b>(call: &Call<'b>, a: Value<'b>, b: Value<'b>) -> Value<'b> {
    let (left, right) = (a.ty(), b.ty());
    let batches = left.dims.len() - 2;
    if !element::is_float(left.element) && !element::is_complex(left.element) {
        // A TPU has no such product of 64 bits.
        let products = a.unsqueeze(batches + 2) * b.unsqueeze(batches);
        return products.sum(&[batches + 1]);
    }
    if batches > 0 && left.dims[..batches].iter().all(|&size| size == 1) {
        // XLA's CPU runtime refuses such a batch of 16 bits whose matrices are transposed.
        let alone = |value: Value<'b>, ty: &Type| value.reshape(&ty.dims[batches..]);
        let product = multiply(call, alone(a, &left), alone(b, &right));
        let mut dims = product.dims();
        dims.insert_from_slice(0, &left.dims[..batches]);
        return product.reshape(&dims);
    }
    let mut dims = Dims::from_slice(&left.dims[..=batches]);
    dims.push(right.dims[batches + 1]);
    let batch: Vec<usize> = (0..batches).collect();
    contract(call, a, b, [&batch, &batch], [batches + 1, batches], &dims)
}

/// The products of `a` and `b` summed along dimension `along` of each, and in parallel along `batch`
/// of each; `dims` are the sizes of the result.
pub(super) fn contract<'b>(
    call: &Call<'b>,
    a: Value<'b>,
    b: Value<'b>,
    batch: [&[usize]; 2],
    along: [usize; 2],
    dims: &[i64],
) -> Value<'b> {
    let (left, right) = (a.ty(), b.ty());
    let ty = Type::new(accumulator(left.element), dims);
    let precision = match left.element {
        F32 | F64 | C64 | C128 => call.precision(),
        _ => "DEFAULT",
    };
    let ([first, second], [inner, outer]) = (batch, along);
    a.body().push(
        ty.clone(),
        format_args!(
            "stablehlo.dot_general {a}, {b}, batching_dims = {first:?} x {second:?}, contracting_dims = \
             [{inner}] x [{outer}], precision = [{precision}, {precision}] : ({left}, {right}) -> {ty}"
        ),
    )
}

/// Multiplies the vectors along a dimension by a matrix, whose dimension `along` goes with them.
pub(super) fn transform<'b>(
    call: &Call<'b>,
    value: Value<'b>,
    matrix: Value<'b>,
    dimension: usize,
    along: usize,
) -> Value<'b> {
    let mut dims = value.dims();
    dims.remove(dimension);
    dims.push(matrix.dims()[1 - along]);
    let product = contract(call, value, matrix, [&[], &[]], [dimension, along], &dims);
    // The new dimension came last.
    let mut order: Vec<usize> = (0..dims.len() - 1).collect();
    order.insert(dimension, dims.len() - 1);
    product.transpose(&order)
}
