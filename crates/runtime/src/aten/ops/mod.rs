//! The operators, by family.

mod activation;
mod arithmetic;
mod compare;
mod complex;
mod convolution;
mod creation;
mod foreach;
mod indexing;
mod loss;
mod matmul;
mod normalization;
mod optimizer;
mod pooling;
mod random;
mod reduction;
mod shape;
mod softmax;
mod sorting;
mod unary;
mod upsample;

use super::Error;
use super::call::Call;
use super::element::{self, opmath};
use super::table::OperatorRow;
use super::value::Value;
use crate::pjrt::ElementType;

pub(super) static FAMILIES: &[&[OperatorRow]] = &[
    activation::ROWS,
    arithmetic::ROWS,
    compare::ROWS,
    complex::ROWS,
    convolution::ROWS,
    creation::ROWS,
    foreach::ROWS,
    foreach::FLOATING,
    indexing::ROWS,
    loss::ROWS,
    matmul::ROWS,
    normalization::ROWS,
    optimizer::ROWS,
    pooling::ROWS,
    random::ROWS,
    reduction::ROWS,
    shape::ROWS,
    softmax::ROWS,
    sorting::ROWS,
    unary::ROWS,
    upsample::ROWS,
];

/// Arguments, tensors or numbers, in the type in which torch computes on them.
fn operands<'b, const N: usize>(
    call: &Call<'b>,
    arguments: [usize; N],
) -> Result<[Value<'b>; N], Error> {
    all_as(call, arguments, opmath(call.promoted(&arguments)?))
}

fn all_as<'b, const N: usize>(
    call: &Call<'b>,
    arguments: [usize; N],
    element: ElementType,
) -> Result<[Value<'b>; N], Error> {
    let mut values = Vec::with_capacity(N);
    for argument in arguments {
        values.push(call.tensor_as(argument, element)?);
    }
    Ok(values.try_into().ok().expect("one value for each argument"))
}

/// A function of arguments in the type in which torch computes on them.
fn map<'b, const N: usize>(
    call: &Call<'b>,
    arguments: [usize; N],
    function: impl FnOnce([Value<'b>; N]) -> Value<'b>,
) -> Result<Value<'b>, Error> {
    operands(call, arguments).map(function)
}

/// The type in which functions of real or complex numbers of `element` are computed.
fn floating(call: &Call<'_>, element: ElementType) -> Result<ElementType, Error> {
    if element::is_float(element) || element::is_complex(element) {
        return Ok(opmath(element));
    }
    // Integers become torch's default type, which the result has.
    let element = call.result(0)?.element;
    Ok(if element::is_float(element) {
        opmath(element)
    } else {
        ElementType::F32
    })
}

/// A function of arguments as real or complex numbers.
fn float_map<'b, const N: usize>(
    call: &Call<'b>,
    arguments: [usize; N],
    function: impl FnOnce([Value<'b>; N]) -> Value<'b>,
) -> Result<Value<'b>, Error> {
    let element = floating(call, call.promoted(&arguments)?)?;
    all_as(call, arguments, element).map(function)
}

/// A function of arguments as real numbers.
fn real_map<'b, const N: usize>(
    call: &Call<'b>,
    arguments: [usize; N],
    function: impl FnOnce([Value<'b>; N]) -> Value<'b>,
) -> Result<Value<'b>, Error> {
    let element = floating(call, call.promoted(&arguments)?)?;
    if element::is_complex(element) {
        return call.unsupported("for complex elements");
    }
    all_as(call, arguments, element).map(function)
}
