//! The table of lowered operators.

use std::collections::HashMap;
use std::sync::LazyLock;

use super::call::{Call, Results};
use super::ops;

/// An operator that can be lowered.
#[derive(Debug)]
pub struct OperatorRow {
    /// Name and overload, without the namespace: `add.Tensor`. Of a functional overload where
    /// there is one that is dispatched: its in-place form (`add_.Tensor`) and that with
    /// `out` arguments (`add.out`) are lowered by the same row. Else of the in-place one
    /// (`uniform_`).
    pub name: &'static str,
    /// Positions of `Scalar` arguments that must be constants.
    pub constants: &'static [usize],
    /// It draws random numbers.
    pub random: bool,
    pub(super) rule: Rule,
}

/// How a call is lowered.
pub(super) type Rule = for<'b> fn(&Call<'b>) -> Results<'b>;

impl OperatorRow {
    /// A row whose numbers may all be known at run time only.
    pub(super) const fn new(name: &'static str, rule: Rule) -> OperatorRow {
        OperatorRow {
            name,
            constants: &[],
            random: false,
            rule,
        }
    }

    /// With numbers that must be constants.
    pub(super) const fn constants(self, constants: &'static [usize]) -> OperatorRow {
        OperatorRow { constants, ..self }
    }

    /// With random numbers.
    pub(super) const fn random(self) -> OperatorRow {
        OperatorRow {
            random: true,
            ..self
        }
    }
}

static BY_NAME: LazyLock<HashMap<&'static str, &'static OperatorRow>> =
    LazyLock::new(|| operators().map(|row| (row.name, row)).collect());

/// All operators that can be lowered.
pub fn operators() -> impl Iterator<Item = &'static OperatorRow> {
    ops::FAMILIES.iter().flat_map(|family| family.iter())
}

pub(super) fn find(name: &str) -> Option<&'static OperatorRow> {
    BY_NAME.get(name).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_operator_has_one_row() {
        assert_eq!(BY_NAME.len(), operators().count());
    }
}
