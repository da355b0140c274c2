//! The text of a module while it grows.

use std::cell::RefCell;
use std::fmt::{self, Write as _};

use smallvec::SmallVec;

use super::request::Number;
use super::value::Value;
use crate::pjrt::ElementType;

/// Sizes of an array's dimensions.
pub(super) type Dims = SmallVec<[i64; 6]>;

/// The type of an array.
#[derive(Clone, PartialEq)]
pub(super) struct Type {
    pub(super) element: ElementType,
    pub(super) dims: Dims,
}

impl Type {
    pub(super) fn new(element: ElementType, dims: &[i64]) -> Type {
        Type {
            element,
            dims: Dims::from_slice(dims),
        }
    }
}

impl fmt::Display for Type {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("tensor<")?;
        for size in &self.dims {
            write!(f, "{size}x")?;
        }
        write!(f, "{}>", self.element.name())
    }
}

#[derive(Default)]
struct State {
    lines: String,
    types: Vec<Type>,
    parameters: Vec<u32>,
}

/// The function's body: appended to through its [`Value`]s.
#[derive(Default)]
pub(super) struct Body(RefCell<State>);

impl Body {
    /// A further parameter of the function.
    pub(super) fn parameter(&self, ty: Type) -> Value<'_> {
        let value = self.name(ty);
        self.0.borrow_mut().parameters.push(value.id());
        value
    }

    /// A value that is not computed by a line of its own.
    fn name(&self, ty: Type) -> Value<'_> {
        let types = &mut self.0.borrow_mut().types;
        types.push(ty);
        Value::new(self, types.len() as u32 - 1)
    }

    pub(super) fn type_of(&self, id: u32) -> Type {
        self.0.borrow().types[id as usize].clone()
    }

    /// Adds an operation with one result.
    pub(super) fn push(&self, ty: Type, operation: fmt::Arguments<'_>) -> Value<'_> {
        let value = self.name(ty);
        self.line(format!("{value} = {operation}\n"));
        value
    }

    /// Adds an operation with several results.
    pub(super) fn push_all(
        &self,
        types: Vec<Type>,
        operation: fmt::Arguments<'_>,
    ) -> Vec<Value<'_>> {
        let values: Vec<_> = types.into_iter().map(|ty| self.name(ty)).collect();
        self.line(format!("{} = {operation}\n", List(&values)));
        values
    }

    /// Adds a line, which was formatted before: that looks at the types.
    fn line(&self, line: String) {
        self.0.borrow_mut().lines.push_str(&line);
    }

    /// The text of a region: its block has parameters of `types` and returns what `inside`
    /// makes of them.
    pub(super) fn region<'b>(
        &'b self,
        types: Vec<Type>,
        inside: impl FnOnce(&[Value<'b>]) -> Vec<Value<'b>>,
    ) -> String {
        let outside = std::mem::take(&mut self.0.borrow_mut().lines);
        let arguments: Vec<_> = types.into_iter().map(|ty| self.name(ty)).collect();
        let results = inside(&arguments);
        let lines = std::mem::replace(&mut self.0.borrow_mut().lines, outside);
        let declared = Declarations(&arguments);
        let ty = Types(&results);
        format!(
            "{{\n^bb0({declared}):\n{lines}stablehlo.return {} : {ty}\n}}",
            List(&results)
        )
    }

    /// An array of one number.
    pub(super) fn constant(&self, number: Number, ty: Type) -> Value<'_> {
        let empty = ty.dims.contains(&0);
        let literal = if empty {
            String::new()
        } else {
            literal(number, ty.element)
        };
        self.push(
            ty.clone(),
            format_args!("stablehlo.constant dense<{literal}> : {ty}"),
        )
    }

    /// The module that returns `results`; parameter `i` gives its memory to output `aliases[i]`.
    pub(super) fn finish(
        &self,
        name: &str,
        results: &[Value<'_>],
        aliases: &[Option<usize>],
    ) -> String {
        let state = self.0.borrow();
        let mut text = format!("module @{name} {{\nfunc.func public @main(");
        for (number, &id) in state.parameters.iter().enumerate() {
            let separator = if number == 0 { "" } else { ", " };
            write!(text, "{separator}%{id}: {}", state.types[id as usize]).expect("strings grow");
            if let Some(Some(output)) = aliases.get(number) {
                write!(text, " {{tf.aliasing_output = {output} : i32}}").expect("strings grow");
            }
        }
        write!(
            text,
            ") -> ({}) {{\n{}return {} : {}\n}}\n}}\n",
            Types(results),
            state.lines,
            List(results),
            Types(results)
        )
        .expect("strings grow");
        text
    }
}

/// A number as MLIR writes it for elements of type `element`.
fn literal(number: Number, element: ElementType) -> String {
    use ElementType::*;
    let (real, imaginary) = match number {
        Number::Bool(value) => (f64::from(u8::from(value)), 0.),
        Number::Int(value) => (value as f64, 0.),
        Number::Float(value) => (value, 0.),
        Number::Complex(real, imaginary) => (real, imaginary),
    };
    match element {
        Pred => (real != 0. || imaginary != 0.).to_string(),
        C64 => format!("({}, {})", float(real, F32), float(imaginary, F32)),
        C128 => format!("({}, {})", float(real, F64), float(imaginary, F64)),
        F64 | F32 | F16 | BF16 => float(real, element),
        _ if super::element::is_float(element) => format!("{real:e}").replace('e', ".0e"),
        _ => {
            let value = match number {
                Number::Int(value) => value,
                // Saturates; NaN is 0.
                _ => real as i64,
            };
            wrapped(value, element).to_string()
        }
    }
}

/// A real number as a literal of type `element`.
fn float(value: f64, element: ElementType) -> String {
    // Beyond the type's range torch's conversion gives an infinity.
    let value = match element {
        ElementType::F32 | ElementType::BF16 => f64::from(value as f32),
        ElementType::F16 if value.abs() >= 65520. => f64::INFINITY.copysign(value),
        _ => value,
    };
    if value.is_finite() {
        return format!("{value:.17e}");
    }
    let (digits, infinity, quiet) = match element {
        ElementType::F64 => (16, 0x7FF0_0000_0000_0000u64, 0x0008_0000_0000_0000u64),
        ElementType::F16 => (4, 0x7C00, 0x0200),
        ElementType::BF16 => (4, 0x7F80, 0x0040),
        _ => (8, 0x7F80_0000, 0x0040_0000),
    };
    let sign = u64::from(value == f64::NEG_INFINITY) << (4 * digits - 1);
    let bits = infinity | sign | if value.is_nan() { quiet } else { 0 };
    format!("0x{bits:0digits$X}")
}

/// An integer modulo the range of `element`, as C converts.
fn wrapped(value: i64, element: ElementType) -> i128 {
    use ElementType::*;
    match element {
        S8 => i128::from(value as i8),
        S16 => i128::from(value as i16),
        S32 => i128::from(value as i32),
        U8 => i128::from(value as u8),
        U16 => i128::from(value as u16),
        U32 => i128::from(value as u32),
        U64 => i128::from(value as u64),
        _ => i128::from(value),
    }
}

/// `%0, %1`
pub(super) struct List<'a, 'b>(pub(super) &'a [Value<'b>]);

impl fmt::Display for List<'_, '_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        join(f, self.0, |f, value| write!(f, "{value}"))
    }
}

/// `tensor<f32>, tensor<f32>`
pub(super) struct Types<'a, 'b>(pub(super) &'a [Value<'b>]);

impl fmt::Display for Types<'_, '_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        join(f, self.0, |f, value| write!(f, "{}", value.ty()))
    }
}

/// `%0: tensor<f32>, %1: tensor<f32>`
struct Declarations<'a, 'b>(&'a [Value<'b>]);

impl fmt::Display for Declarations<'_, '_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        join(f, self.0, |f, value| write!(f, "{value}: {}", value.ty()))
    }
}

fn join<T>(
    f: &mut fmt::Formatter<'_>,
    items: &[T],
    write: impl Fn(&mut fmt::Formatter<'_>, &T) -> fmt::Result,
) -> fmt::Result {
    for (number, item) in items.iter().enumerate() {
        if number > 0 {
            f.write_str(", ")?;
        }
        write(f, item)?;
    }
    Ok(())
}
