//! Copies, conversions and fills.

use crate::aten::table::OperatorRow;

pub(super) static ROWS: &[OperatorRow] = &[
    OperatorRow::new("clone", |call| call.tensor(0)),
    // Arguments: destination, source.
    OperatorRow::new("copy_", |call| call.tensor(1)),
    OperatorRow::new("fill_.Scalar", |call| {
        call.scalar(1, call.result(0)?.element)
    }),
    OperatorRow::new("zero_", |call| Ok(call.tensor(0)?.zeros())),
];
