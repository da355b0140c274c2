//! The operators, by family.

mod arithmetic;
mod copy;
mod matmul;
mod reduction;

use super::table::OperatorRow;

pub(super) static FAMILIES: &[&[OperatorRow]] =
    &[arithmetic::ROWS, copy::ROWS, matmul::ROWS, reduction::ROWS];
