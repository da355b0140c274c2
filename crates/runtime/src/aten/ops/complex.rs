//! Complex numbers and their parts.

use std::f64::consts::PI;

use super::{map, operands};
use crate::aten::element;
use crate::aten::request::Number;
use crate::aten::table::OperatorRow;

pub(super) static ROWS: &[OperatorRow] = &[
    OperatorRow::new("complex", |call| {
        let [real, imaginary] = operands(call, [0, 1])?;
        Ok(real.complex(imaginary))
    }),
    OperatorRow::new("polar", |call| {
        let [length, angle] = operands(call, [0, 1])?;
        Ok((length * angle.cos()).complex(length * angle.sin()))
    }),
    OperatorRow::new("conj_physical", |call| Ok(call.tensor(0)?.conj())),
    OperatorRow::new("_conj_physical", |call| Ok(call.tensor(0)?.conj())),
    OperatorRow::new("angle", |call| {
        let result = call.result(0)?.element;
        map(call, [0], |[value]| {
            if value.is_complex() {
                return value.imag().atan2(value.real());
            }
            let value = value.convert(element::opmath(result));
            let half_turn = value.constant(Number::Float(PI));
            let angle = value.lt(0.).select(half_turn, 0.);
            value.is_nan().select(value, angle)
        })
    }),
];
