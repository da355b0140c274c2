//! Operators on lists of tensors, one program for all of them.

use super::arithmetic::lerp;
use super::reduction::norm;
use crate::aten::call::Call;
use crate::aten::element::{self, opmath};
use crate::aten::table::{OperatorRow, Several};
use crate::aten::value::Value;
use crate::pjrt::ElementType;

/// A row for each name, all by the same function of the given arguments.
macro_rules! rows {
    ($($($name:literal)+ => $arguments:expr, $function:expr;)*) => {
        &[$($(
            OperatorRow::several($name, |call| each(call, $arguments, opmath, $function)),
        )+)*]
    };
}

pub(super) static ROWS: &[OperatorRow] = rows! {
    "_foreach_add.List" "_foreach_add.Tensor" => [0, 1, 2], |[a, b, alpha]| a + b * alpha;
    "_foreach_add.Scalar" "_foreach_add.ScalarList" => [0, 1], |[a, b]| a + b;
    "_foreach_sub.List" => [0, 1, 2], |[a, b, alpha]| a - b * alpha;
    "_foreach_sub.Scalar" "_foreach_sub.ScalarList" => [0, 1], |[a, b]| a - b;
    "_foreach_mul.List" "_foreach_mul.Tensor" "_foreach_mul.Scalar" "_foreach_mul.ScalarList"
        => [0, 1], |[a, b]| a * b;
    "_foreach_maximum.List" "_foreach_maximum.Scalar" "_foreach_maximum.ScalarList"
        => [0, 1], |[a, b]| a.maximum(b);
    "_foreach_minimum.List" "_foreach_minimum.Scalar" "_foreach_minimum.ScalarList"
        => [0, 1], |[a, b]| a.minimum(b);
    "_foreach_clamp_min.List" "_foreach_clamp_min.Scalar" "_foreach_clamp_min.ScalarList"
        => [0, 1], |[a, b]| a.maximum(b);
    "_foreach_clamp_max.List" "_foreach_clamp_max.Scalar" "_foreach_clamp_max.ScalarList"
        => [0, 1], |[a, b]| a.minimum(b);
    "_foreach_addcmul.Scalar" "_foreach_addcmul.ScalarList"
        => [0, 1, 2, 3], |[sum, a, b, factor]| sum + factor * a * b;
    "_foreach_addcdiv.Scalar" "_foreach_addcdiv.ScalarList"
        => [0, 1, 2, 3], |[sum, a, b, factor]| sum + factor * a / b;
    "_foreach_lerp.List" "_foreach_lerp.Scalar" "_foreach_lerp.ScalarList" => [0, 1, 2], lerp;
    "_foreach_neg" => [0], |[x]| -x;
    "_foreach_abs" => [0], |[x]| x.abs();
    "_foreach_zero_" => [0], |[x]| x.zeros();
    "_foreach_copy_" => [0, 1], |[_, source]| source;
};

pub(super) static FLOATING: &[OperatorRow] = &[
    OperatorRow::several("_foreach_div.List", |call| {
        floating(call, [0, 1], |[a, b]| a / b)
    }),
    OperatorRow::several("_foreach_div.Tensor", |call| {
        floating(call, [0, 1], |[a, b]| a / b)
    }),
    OperatorRow::several("_foreach_div.Scalar", |call| {
        floating(call, [0, 1], |[a, b]| a / b)
    }),
    OperatorRow::several("_foreach_div.ScalarList", |call| {
        floating(call, [0, 1], |[a, b]| a / b)
    }),
    OperatorRow::several("_foreach_sqrt", |call| floating(call, [0], |[x]| x.sqrt())),
    OperatorRow::several("_foreach_rsqrt", |call| {
        floating(call, [0], |[x]| x.rsqrt())
    }),
    OperatorRow::several("_foreach_reciprocal", |call| {
        floating(call, [0], |[x]| 1. / x)
    }),
    OperatorRow::several("_foreach_exp", |call| floating(call, [0], |[x]| x.exp())),
    OperatorRow::several("_foreach_norm.Scalar", |call| {
        let order = call.float(1)?;
        (0..call.length(0)?)
            .map(|item| {
                let [value] = call.items([0], item, |element| element)?;
                let all: Vec<usize> = (0..value.rank()).collect();
                let element = opmath(call.result(item)?.element);
                Ok(Some(norm(value, order, element, &all)))
            })
            .collect()
    })
    .constants(&[1]),
];

/// A function of the items of lists, in the type that `choose` makes of theirs.
fn each<'b, const N: usize>(
    call: &Call<'b>,
    arguments: [usize; N],
    choose: fn(ElementType) -> ElementType,
    function: impl Fn([Value<'b>; N]) -> Value<'b>,
) -> Several<'b> {
    (0..call.length(0)?)
        .map(|item| Ok(Some(function(call.items(arguments, item, choose)?))))
        .collect()
}

/// A function of items as real or complex numbers.
fn floating<'b, const N: usize>(
    call: &Call<'b>,
    arguments: [usize; N],
    function: impl Fn([Value<'b>; N]) -> Value<'b>,
) -> Several<'b> {
    // Integers become torch's default type.
    let choose = |element| {
        if element::is_float(element) || element::is_complex(element) {
            opmath(element)
        } else {
            ElementType::F32
        }
    };
    each(call, arguments, choose, function)
}
