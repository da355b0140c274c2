//! One call while it is lowered: its arguments as values, its results as outputs.

use super::body::{Body, Type};
use super::element;
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

    /// The run-time scalar of this number.
    pub(super) fn runtime(&self, index: usize) -> Value<'b> {
        self.scalars[index]
    }

    /// All arguments.
    pub(super) fn arguments(&self) -> &'b [Argument] {
        &self.request.arguments
    }

    /// The tensor of an operand, in its own element type.
    pub(super) fn operand(&self, operand: &Operand) -> Result<Value<'b>, Error> {
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
        if !empty && (view::end(view) as u64).saturating_mul(element.size() as u64) > ty.bytes {
            return self.malformed("view", format!("one within {} bytes", ty.bytes), view);
        }
        Ok(())
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
        let whole = storage.bytes.is_multiple_of(element.size() as u64);
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
