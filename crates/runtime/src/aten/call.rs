//! One call while it is lowered: its arguments as values, its results as outputs.

use super::body::{Body, Type};
use super::element::{self, Rank};
use super::request::{
    Argument, Destination, Kind, Number, Operand, Precision, Request, ResultType, Scalar,
    StorageType, View,
};
use super::table::{OperatorRow, Rule};
use super::value::{Value, broadcast};
use super::{Error, Lowered, Output, view};
use crate::pjrt::ElementType::{self, *};

/// A call, with the program that its row appends to.
pub(super) struct Call<'b> {
    body: &'b Body,
    request: &'b Request<'b>,
    /// Contents of the storages; `None` of those that are absent.
    arrays: Vec<Option<Value<'b>>>,
    scalars: Vec<Value<'b>>,
    state: Option<Value<'b>>,
    precision: Precision,
}

/// Lowers `request` with its row.
pub(super) fn lower(
    row: &OperatorRow,
    request: &Request<'_>,
    precision: Precision,
) -> Result<Lowered, Error> {
    let body = Body::default();
    let parameter = |storage: &StorageType| {
        (!storage.absent).then(|| body.parameter(Type::new(storage.element, &storage.dims)))
    };
    let arrays = request.storages.iter().map(parameter).collect();
    let scalars = scalar_types(request)?;
    let call = Call {
        body: &body,
        request,
        arrays,
        scalars: (scalars.iter())
            .map(|&element| body.parameter(Type::new(element, &[])))
            .collect(),
        state: (row.random).then(|| body.parameter(Type::new(U64, &[2]))),
        precision,
    };
    let values = match row.rule {
        Rule::One(rule) => vec![Some(rule(&call)?)],
        Rule::Several(rule) => rule(&call)?,
    };
    let (outputs, values) = call.store(&values)?;
    let types: Vec<Type> = values.iter().map(|value| value.ty()).collect();

    // A storage gives its buffer to its new contents if that is an array of the same type.
    let mut donate = Vec::new();
    let mut aliases = Vec::new();
    for (number, array) in call.arrays.iter().enumerate() {
        let Some(array) = array else { continue };
        let output = (outputs.iter())
            .position(|&output| output == Output::Storage(number))
            .filter(|&output| types[output] == array.ty());
        donate.extend(output.map(|_| number));
        aliases.push(output);
    }
    let name: String = (request.operator.chars())
        .map(|letter| {
            if letter.is_ascii_alphanumeric() {
                letter
            } else {
                '_'
            }
        })
        .collect();
    Ok(Lowered {
        text: body.finish(&name, &values, &aliases),
        outputs,
        types: types
            .into_iter()
            .map(|ty| (ty.element, ty.dims.to_vec()))
            .collect(),
        donate,
        scalars,
        random: row.random,
    })
}

/// Element types of the run-time scalars.
fn scalar_types(request: &Request<'_>) -> Result<Vec<ElementType>, Error> {
    let wide = |element: ElementType| element::real(element) == F64;
    let operands = request
        .arguments
        .iter()
        .flat_map(|argument| match argument {
            Argument::Tensor(operand) => std::slice::from_ref(operand).iter().collect(),
            Argument::Tensors(operands) => operands.iter().flatten().collect(),
            _ => Vec::new(),
        });
    let wide = operands.map(|operand: &Operand| operand.element).any(wide)
        || (request.results.iter().flatten()).any(|result| wide(result.element));
    let scalars = request
        .arguments
        .iter()
        .flat_map(|argument| match argument {
            Argument::Scalar(scalar) => std::slice::from_ref(scalar),
            Argument::Scalars(scalars) => scalars,
            _ => &[],
        });
    let mut found: Vec<(usize, ElementType)> = scalars
        .filter_map(|scalar| match *scalar {
            Scalar::Constant(_) => None,
            Scalar::Runtime { index, kind } => Some((
                index,
                match kind {
                    Kind::Bool => Pred,
                    Kind::Int => S64,
                    Kind::Float => {
                        if wide {
                            F64
                        } else {
                            F32
                        }
                    }
                    Kind::Complex => {
                        if wide {
                            C128
                        } else {
                            C64
                        }
                    }
                },
            )),
        })
        .collect();
    found.sort_by_key(|&(index, _)| index);
    found.dedup();
    if let Some(place) = (0..found.len()).find(|&place| found[place].0 != place) {
        return Err(Error::Malformed {
            operator: request.operator.to_string(),
            argument: "run-time scalars".to_string(),
            expected: format!("one with index {place}"),
            found: format!("index {}", found[place].0),
        });
    }
    Ok(found.into_iter().map(|(_, element)| element).collect())
}

impl<'b> Call<'b> {
    /// Zeros.
    pub(super) fn zeros(&self, element: ElementType, sizes: &[i64]) -> Value<'b> {
        self.body
            .constant(Number::Int(0), Type::new(element, sizes))
    }

    /// The attribute of a product that says how exact it is.
    pub(super) fn precision(&self) -> &'static str {
        match self.precision {
            Precision::Highest => "HIGHEST",
            Precision::High => "HIGH",
            Precision::Medium => "DEFAULT",
        }
    }

    pub(super) fn body(&self) -> &'b Body {
        self.body
    }

    /// The call is not lowered: "for complex elements".
    pub(super) fn unsupported<T>(&self, what: impl Into<String>) -> Result<T, Error> {
        Err(Error::Unsupported {
            operator: self.request.operator.to_string(),
            what: what.into(),
        })
    }

    /// The request is wrong.
    pub(super) fn malformed<T>(
        &self,
        argument: impl Into<String>,
        expected: impl Into<String>,
        found: impl std::fmt::Debug,
    ) -> Result<T, Error> {
        Err(Error::Malformed {
            operator: self.request.operator.to_string(),
            argument: argument.into(),
            expected: expected.into(),
            found: format!("{found:?}"),
        })
    }

    fn argument(&self, index: usize) -> &'b Argument {
        self.request.arguments.get(index).unwrap_or(&Argument::None)
    }

    fn wrong<T>(&self, index: usize, expected: &str) -> Result<T, Error> {
        self.malformed(format!("argument {index}"), expected, self.argument(index))
    }

    /// The tensor of an operand, in its own element type.
    fn operand(&self, operand: &Operand) -> Result<Value<'b>, Error> {
        let &Operand {
            storage,
            element,
            ref view,
        } = operand;
        self.check(storage, element, view)?;
        let Some(array) = self.arrays[storage] else {
            let ty = Type::new(element, &view.sizes);
            return Ok(self.body.constant(Number::Int(0), ty));
        };
        let array = self.contents(array, element)?;
        if !view.sizes.contains(&0) && view::end(view) > array.count() {
            return self.malformed(
                format!("storage {storage}"),
                "a buffer of the storage's size",
                array.ty().to_string(),
            );
        }
        Ok(view::read(array, view))
    }

    fn contents(&self, array: Value<'b>, element: ElementType) -> Result<Value<'b>, Error> {
        match view::reinterpret(array, element) {
            Some(array) => Ok(array),
            None => {
                self.unsupported("for a view of another type that the storage is no multiple of")
            }
        }
    }

    /// Whether a view lies in its storage.
    fn check(&self, storage: usize, element: ElementType, view: &View) -> Result<(), Error> {
        let Some(ty) = self.request.storages.get(storage) else {
            return self.malformed("storage", "an index into the storages", storage);
        };
        if view.sizes.len() != view.strides.len()
            || view.offset < 0
            || view
                .sizes
                .iter()
                .chain(&view.strides)
                .any(|&number| number < 0)
        {
            return self.malformed("view", "as many strides as sizes, none negative", view);
        }
        let empty = view.sizes.contains(&0);
        if !empty && view::end(view) as u64 * element.size() as u64 > ty.bytes {
            return self.malformed("view", format!("one within {} bytes", ty.bytes), view);
        }
        Ok(())
    }

    /// A number in its own type.
    fn number_value(&self, scalar: Scalar) -> Value<'b> {
        match scalar {
            Scalar::Constant(number) => {
                let ty = Type::new(element::of_kind(number.kind()), &[]);
                self.body.constant(number, ty)
            }
            Scalar::Runtime { index, .. } => self.scalars[index],
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
        match self.argument(index) {
            Argument::Scalar(_) => self.scalar(index, element),
            Argument::Float(_) | Argument::Int(_) | Argument::Bool(_) => {
                let number = self.number(index)?;
                Ok(self.body.constant(number, Type::new(element, &[])))
            }
            _ => Ok(self.tensor(index)?.convert(element)),
        }
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
            Argument::Scalar(Scalar::Constant(number)) => {
                Ok(self.body.constant(*number, Type::new(element, &[])))
            }
            &Argument::Scalar(scalar) => Ok(self.number_value(scalar).convert(element)),
            _ => self.wrong(index, "a number"),
        }
    }

    /// Argument `index`, a number that is part of the program.
    pub(super) fn number(&self, index: usize) -> Result<Number, Error> {
        match self.argument(index) {
            &Argument::Scalar(Scalar::Constant(number)) => Ok(number),
            &Argument::Float(value) => Ok(Number::Float(value)),
            &Argument::Int(value) => Ok(Number::Int(value)),
            &Argument::Bool(value) => Ok(Number::Bool(value)),
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

    /// The type in which arguments take part in type promotion.
    pub(super) fn promoted(&self, indices: &[usize]) -> Result<ElementType, Error> {
        let mut parts = Vec::new();
        for &index in indices {
            match self.argument(index) {
                Argument::Tensor(operand) => {
                    let rank = if operand.view.sizes.is_empty() {
                        Rank::Point
                    } else {
                        Rank::Array
                    };
                    parts.push((rank, operand.element));
                }
                Argument::Scalar(scalar) => {
                    let kind = match scalar {
                        Scalar::Constant(number) => number.kind(),
                        &Scalar::Runtime { kind, .. } => kind,
                    };
                    parts.push((Rank::Number, element::of_kind(kind)));
                }
                Argument::Tensors(operands) => {
                    parts.extend(operands.iter().flatten().map(|operand| {
                        let rank = if operand.view.sizes.is_empty() {
                            Rank::Point
                        } else {
                            Rank::Array
                        };
                        (rank, operand.element)
                    }));
                }
                _ => {}
            }
        }
        match element::promote(parts) {
            Some(element) => Ok(element),
            None => self.malformed("arguments", "a tensor", indices),
        }
    }

    /// Result `index`.
    pub(super) fn result(&self, index: usize) -> Result<&'b ResultType, Error> {
        match self.request.results.get(index) {
            Some(Some(result)) => Ok(result),
            other => self.malformed("results", format!("a result {index}"), other),
        }
    }

    /// Whether result `index` is defined.
    pub(super) fn wants(&self, index: usize) -> bool {
        matches!(self.request.results.get(index), Some(Some(_)))
    }

    /// State of the random number generator.
    pub(super) fn state(&self) -> Result<Value<'b>, Error> {
        match self.state {
            Some(state) => Ok(state),
            None => self.malformed("row", "a random one", false),
        }
    }

    /// The program's outputs for the values of the results.
    fn store(&self, values: &[Option<Value<'b>>]) -> Result<(Vec<Output>, Vec<Value<'b>>), Error> {
        if values.len() != self.request.results.len() {
            let expected = format!("{} of them", values.len());
            return self.malformed("results", expected, self.request.results.len());
        }
        let mut outputs: Vec<Output> = Vec::new();
        let mut stored: Vec<Value<'b>> = Vec::new();
        for (index, (result, &value)) in self.request.results.iter().zip(values).enumerate() {
            let Some(result) = result else { continue };
            let Some(value) = value else {
                if result.destination == Destination::New {
                    return self.malformed(
                        format!("result {index}"),
                        "an undefined tensor",
                        result,
                    );
                }
                continue;
            };
            let sizes = &result.view.sizes;
            if broadcast(&value.dims(), sizes)[..] != sizes[..] {
                return self.malformed(
                    format!("result {index}"),
                    format!("sizes {:?}", value.dims()),
                    sizes,
                );
            }
            let value = value.convert(result.element).expand(sizes);
            match &result.destination {
                Destination::New => {
                    let Some(order) = view::memory_order(&result.view, value.count()) else {
                        return self.malformed(
                            format!("result {index}"),
                            "a dense new tensor",
                            &result.view,
                        );
                    };
                    outputs.push(Output::Result(index));
                    stored.push(value.transpose(&order));
                }
                Destination::Into { storage, view } => {
                    self.check(*storage, result.element, view)?;
                    if view.sizes != *sizes {
                        return self.malformed(
                            format!("result {index}"),
                            format!("sizes {sizes:?}"),
                            view,
                        );
                    }
                    let place = outputs
                        .iter()
                        .position(|&output| output == Output::Storage(*storage));
                    let old = place.map(|place| stored[place]);
                    let new = self.write(*storage, old, view, value)?;
                    match place {
                        Some(place) => stored[place] = new,
                        None => {
                            outputs.push(Output::Storage(*storage));
                            stored.push(new);
                        }
                    }
                }
            }
        }
        Ok((outputs, stored))
    }

    /// Storage `number` with `value` in a view of it; `old` if results were already written
    /// into it.
    fn write(
        &self,
        number: usize,
        old: Option<Value<'b>>,
        view: &View,
        value: Value<'b>,
    ) -> Result<Value<'b>, Error> {
        let storage = &self.request.storages[number];
        let element = value.element();
        let count = (storage.bytes / element.size() as u64) as i64;
        let whole = storage.bytes % element.size() as u64 == 0;
        if let Some(order) = view::memory_order(view, count).filter(|_| whole) {
            return Ok(value.transpose(&order));
        }
        if (view.sizes.iter().zip(&view.strides)).any(|(&size, &stride)| size > 1 && stride == 0) {
            return self.malformed("destination", "a view without overlap", view);
        }
        let array = match old.or(self.arrays[number]) {
            Some(array) => array,
            None if whole => self
                .body
                .constant(Number::Int(0), Type::new(element, &[count])),
            None => return self.unsupported("into a storage of a part of an element"),
        };
        let contents = self.contents(array, element)?;
        if !view.sizes.contains(&0) && view::end(view) > contents.count() {
            return self.malformed(
                format!("storage {number}"),
                "a buffer of the storage's size",
                array.ty().to_string(),
            );
        }
        let written = view::write(contents, view, value);
        // The buffer keeps its type, so that it can be reused.
        match view::reinterpret(written, array.element()) {
            Some(back) if back.count() == array.count() => Ok(back.reshape(&array.dims())),
            _ => Ok(written),
        }
    }
}
