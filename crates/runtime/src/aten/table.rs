//! The table of lowered operators.

use std::collections::HashMap;
use std::sync::LazyLock;

use super::Error;
use super::call::Call;
use super::ops;
use super::value::Value;

/// An operator that can be lowered.
#[derive(Debug)]
pub struct OperatorRow {
    /// Name and overload, without the namespace: `add.Tensor`. Of a functional overload where
    /// there is one that is dispatched: its in-place form (`add_.Tensor`) and that with
    /// `out` arguments (`add.out`) are lowered by the same row. Else of the in-place one
    /// (`uniform_`), or else of that with `out` arguments (`arange.start_out`).
    pub name: &'static str,
    /// Positions of `Scalar` arguments that must be constants.
    pub constants: &'static [usize],
    /// Positions of arguments that are written though the schema does not say so.
    pub writes: &'static [usize],
    /// Positions of `float` arguments that may be run-time scalars, and should be: they change from
    /// call to call (a learning rate).
    pub runtime: &'static [usize],
    /// It draws random numbers.
    pub random: bool,
    /// The values of numbers decide how large its result is.
    pub sized_by_numbers: bool,
    pub(super) rule: Rule,
}

/// How a call is lowered: to one value for each result, which the caller converts and stores.
#[derive(Clone, Copy, Debug)]
pub(super) enum Rule {
    /// Of one result.
    One(for<'b> fn(&Call<'b>) -> Result<Value<'b>, Error>),
    /// Of several. `None` of a result that is not wanted, or not written.
    Several(for<'b> fn(&Call<'b>) -> Several<'b>),
}

/// Values of several results.
pub(super) type Several<'b> = Result<Vec<Option<Value<'b>>>, Error>;

impl OperatorRow {
    /// An operator of one result, whose numbers may all be known at run time only.
    pub(super) const fn new(
        name: &'static str,
        rule: for<'b> fn(&Call<'b>) -> Result<Value<'b>, Error>,
    ) -> OperatorRow {
        OperatorRow::with(name, Rule::One(rule))
    }

    /// An operator of several results.
    pub(super) const fn several(
        name: &'static str,
        rule: for<'b> fn(&Call<'b>) -> Several<'b>,
    ) -> OperatorRow {
        OperatorRow::with(name, Rule::Several(rule))
    }

    const fn with(name: &'static str, rule: Rule) -> OperatorRow {
        OperatorRow {
            name,
            constants: &[],
            writes: &[],
            runtime: &[],
            random: false,
            sized_by_numbers: false,
            rule,
        }
    }

    /// With arguments that are written though the schema does not say so.
    pub(super) const fn writes(self, writes: &'static [usize]) -> OperatorRow {
        OperatorRow { writes, ..self }
    }

    /// With numbers that must be constants.
    pub(super) const fn constants(self, constants: &'static [usize]) -> OperatorRow {
        OperatorRow { constants, ..self }
    }

    /// With `float` arguments that change from call to call.
    pub(super) const fn runtime(self, runtime: &'static [usize]) -> OperatorRow {
        OperatorRow { runtime, ..self }
    }

    /// With a result whose size depends on the values of numbers.
    pub(super) const fn sized_by_numbers(self) -> OperatorRow {
        OperatorRow {
            sized_by_numbers: true,
            ..self
        }
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
