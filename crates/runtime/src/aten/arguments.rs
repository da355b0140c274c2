//! The arguments of a call, as values of its program and as what they are.

use super::Error;
use super::body::Type;
use super::call::Call;
use super::element::{self, Rank};
use super::request::{Argument, Number, Operand, Scalar};
use super::value::Value;
use crate::pjrt::ElementType;

impl<'b> Call<'b> {
    fn argument(&self, index: usize) -> &'b Argument {
        self.arguments().get(index).unwrap_or(&Argument::None)
    }

    fn wrong<T>(&self, index: usize, expected: &str) -> Result<T, Error> {
        self.malformed(format!("argument {index}"), expected, self.argument(index))
    }

    /// A number in its own type.
    fn number_value(&self, scalar: Scalar) -> Value<'b> {
        match scalar {
            Scalar::Constant(number) => {
                let ty = Type::new(element::of_kind(number.kind()), &[]);
                self.body().constant(number, ty)
            }
            Scalar::Runtime { index, .. } => self.runtime(index),
        }
    }

    /// Argument `index`, a tensor or a number in its place, in its own element type.
    pub(super) fn tensor(&self, index: usize) -> Result<Value<'b>, Error> {
        match self.argument(index) {
            Argument::Tensor(operand) => self.operand(operand),
            &Argument::Scalar(scalar) => Ok(self.number_value(scalar)),
            _ => self.wrong(index, "a tensor"),
        }
    }

    /// Argument `index`, a tensor or a number of any sort, in type `element`.
    pub(super) fn tensor_as(&self, index: usize, element: ElementType) -> Result<Value<'b>, Error> {
        match self.value_of(self.argument(index), element)? {
            Some(value) => Ok(value),
            None => self.wrong(index, "a tensor or number"),
        }
    }

    /// An argument that is a tensor or a number, in type `element`.
    fn value_of(
        &self,
        argument: &Argument,
        element: ElementType,
    ) -> Result<Option<Value<'b>>, Error> {
        let number = match *argument {
            Argument::Tensor(ref operand) => {
                return self
                    .operand(operand)
                    .map(|value| Some(value.convert(element)));
            }
            Argument::Scalar(Scalar::Constant(number)) => number,
            Argument::Scalar(scalar) => {
                return Ok(Some(self.number_value(scalar).convert(element)));
            }
            Argument::Float(value) => Number::Float(value),
            Argument::Int(value) => Number::Int(value),
            Argument::Bool(value) => Number::Bool(value),
            _ => return Ok(None),
        };
        let ty = Type::new(element, &[]);
        Ok(Some(self.body().constant(number, ty)))
    }

    /// How many tensors argument `index`, a list, has.
    pub(super) fn length(&self, index: usize) -> Result<usize, Error> {
        match self.argument(index) {
            Argument::Tensors(operands) => Ok(operands.len()),
            _ => self.wrong(index, "a list of tensors"),
        }
    }

    /// Item `item` of those arguments that are lists, and the others themselves, in the type that
    /// `choose` makes of what they promote to.
    pub(super) fn items<const N: usize>(
        &self,
        arguments: [usize; N],
        item: usize,
        choose: impl FnOnce(ElementType) -> ElementType,
    ) -> Result<[Value<'b>; N], Error> {
        let mut found = Vec::with_capacity(N);
        for index in arguments {
            let one = match self.argument(index) {
                Argument::Tensors(operands) => {
                    operands.get(item).cloned().flatten().map(Argument::Tensor)
                }
                Argument::Scalars(scalars) => scalars.get(item).copied().map(Argument::Scalar),
                other => Some(other.clone()),
            };
            match one {
                Some(one) => found.push(one),
                None => return self.wrong(index, &format!("an item {item}")),
            }
        }
        let element = choose(self.promote(&found)?);
        let mut values = Vec::with_capacity(N);
        for (argument, index) in found.iter().zip(arguments) {
            match self.value_of(argument, element)? {
                Some(value) => values.push(value),
                None => return self.wrong(index, "tensors or numbers"),
            }
        }
        Ok(values.try_into().ok().expect("one value for each argument"))
    }

    /// Argument `index` if it is given.
    pub(super) fn optional(&self, index: usize) -> Result<Option<Value<'b>>, Error> {
        match self.argument(index) {
            Argument::None => Ok(None),
            _ => self.tensor(index).map(Some),
        }
    }

    /// Whether argument `index` is given.
    pub(super) fn has(&self, index: usize) -> bool {
        *self.argument(index) != Argument::None
    }

    /// Argument `index`, a list of tensors that may be undefined.
    pub(super) fn optionals(&self, index: usize) -> Result<Vec<Option<Value<'b>>>, Error> {
        match self.argument(index) {
            Argument::Tensors(operands) => (operands.iter())
                .map(|operand| {
                    operand
                        .as_ref()
                        .map(|operand| self.operand(operand))
                        .transpose()
                })
                .collect(),
            _ => self.wrong(index, "a list of tensors"),
        }
    }

    /// Argument `index`, a list of tensors.
    pub(super) fn tensors(&self, index: usize) -> Result<Vec<Value<'b>>, Error> {
        let all: Option<Vec<_>> = self.optionals(index)?.into_iter().collect();
        match all {
            Some(all) => Ok(all),
            None => self.wrong(index, "a list of defined tensors"),
        }
    }

    /// Argument `index`, a number, as a 0-d value of type `element`.
    pub(super) fn scalar(&self, index: usize, element: ElementType) -> Result<Value<'b>, Error> {
        match self.argument(index) {
            Argument::Tensor(_) => self.wrong(index, "a number"),
            _ => self.tensor_as(index, element),
        }
    }

    /// Argument `index`, a number that is part of the program.
    pub(super) fn number(&self, index: usize) -> Result<Number, Error> {
        match *self.argument(index) {
            Argument::Scalar(Scalar::Constant(number)) => Ok(number),
            Argument::Float(value) => Ok(Number::Float(value)),
            Argument::Int(value) => Ok(Number::Int(value)),
            Argument::Bool(value) => Ok(Number::Bool(value)),
            _ => self.wrong(index, "a constant number"),
        }
    }

    /// Argument `index`, if it is this constant number.
    pub(super) fn is_number(&self, index: usize, value: f64) -> bool {
        match self.number(index) {
            Ok(Number::Int(number)) => number as f64 == value,
            Ok(Number::Float(number)) => number == value,
            _ => false,
        }
    }

    pub(super) fn float(&self, index: usize) -> Result<f64, Error> {
        match self.number(index)? {
            Number::Float(value) => Ok(value),
            Number::Int(value) => Ok(value as f64),
            Number::Bool(value) => Ok(f64::from(u8::from(value))),
            Number::Complex(..) => self.wrong(index, "a real number"),
        }
    }

    pub(super) fn int(&self, index: usize) -> Result<i64, Error> {
        match self.number(index)? {
            Number::Int(value) => Ok(value),
            _ => self.wrong(index, "an integer"),
        }
    }

    pub(super) fn bool(&self, index: usize) -> Result<bool, Error> {
        match self.argument(index) {
            &Argument::Bool(value) => Ok(value),
            _ => self.wrong(index, "a truth value"),
        }
    }

    pub(super) fn ints(&self, index: usize) -> Result<&'b [i64], Error> {
        match self.argument(index) {
            Argument::Ints(values) => Ok(values),
            Argument::Int(value) => Ok(std::slice::from_ref(value)),
            _ => self.wrong(index, "a list of integers"),
        }
    }

    /// The text of argument `index`, if given.
    pub(super) fn text(&self, index: usize) -> Result<Option<&'b str>, Error> {
        match self.argument(index) {
            Argument::None => Ok(None),
            Argument::Text(text) => Ok(Some(text)),
            _ => self.wrong(index, "text"),
        }
    }

    /// Argument `index`, a dimension of an array of `rank`, counted from the start.
    pub(super) fn dimension(&self, index: usize, rank: usize) -> Result<usize, Error> {
        let dimension = self.int(index)?;
        self.wrap(index, dimension, rank)
    }

    fn wrap(&self, index: usize, dimension: i64, rank: usize) -> Result<usize, Error> {
        // A 0-d tensor counts as one of one dimension.
        let range = rank.max(1) as i64;
        if !(-range..range).contains(&dimension) {
            return self.wrong(index, &format!("a dimension of an array of {rank}"));
        }
        Ok(dimension.rem_euclid(range) as usize)
    }

    /// Argument `index`, dimensions of an array of `rank`; all of them if it is not given or empty.
    pub(super) fn dimensions(&self, index: usize, rank: usize) -> Result<Vec<usize>, Error> {
        let given: &[i64] = if self.has(index) {
            self.ints(index)?
        } else {
            &[]
        };
        if given.is_empty() {
            return Ok((0..rank).collect());
        }
        let mut dimensions = Vec::new();
        for &dimension in given {
            dimensions.push(self.wrap(index, dimension, rank)?);
        }
        dimensions.sort_unstable();
        // The one dimension that a 0-d tensor counts as is not there.
        dimensions.retain(|&dimension| dimension < rank);
        Ok(dimensions)
    }

    /// What arguments promote to.
    pub(super) fn promoted(&self, indices: &[usize]) -> Result<ElementType, Error> {
        self.promote(indices.iter().map(|&index| self.argument(index)))
    }

    fn promote<'a>(
        &self,
        arguments: impl IntoIterator<Item = &'a Argument>,
    ) -> Result<ElementType, Error> {
        let tensor = |operand: &Operand| {
            let point = operand.view.sizes.is_empty();
            (
                if point { Rank::Point } else { Rank::Array },
                operand.element,
            )
        };
        let mut parts = Vec::new();
        for argument in arguments {
            match argument {
                Argument::Tensor(operand) => parts.push(tensor(operand)),
                Argument::Tensors(operands) => parts.extend(operands.iter().flatten().map(tensor)),
                Argument::Scalar(scalar) => {
                    let kind = match scalar {
                        Scalar::Constant(number) => number.kind(),
                        &Scalar::Runtime { kind, .. } => kind,
                    };
                    parts.push((Rank::Number, element::of_kind(kind)));
                }
                _ => {}
            }
        }
        match element::promote(parts) {
            Some(element) => Ok(element),
            None => self.malformed("arguments", "a tensor", ()),
        }
    }
}
