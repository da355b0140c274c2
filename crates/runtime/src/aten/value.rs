//! Values of a program, and the operations on them.
//!
//! A [`Value`] is a small handle; its methods and operators append to the program. Binary
//! operations broadcast as torch does, and take a plain `f64` for a constant.

use std::fmt;
use std::ops::{Add, Div, Mul, Neg, Not, Rem, Sub};

use super::body::{Body, Dims, List, Type, Types};
use super::element;
use super::request::Number;
use crate::pjrt::ElementType;

/// An array that the program computes.
#[derive(Clone, Copy)]
pub(super) struct Value<'b> {
    body: &'b Body,
    id: u32,
}

impl fmt::Display for Value<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "%{}", self.id)
    }
}

/// How two numbers are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Comparison {
    EQ,
    NE,
    LT,
    LE,
    GT,
    GE,
}

/// A second operand: a value, or a number that becomes a constant of the first one's type.
pub(super) trait Operand<'b> {
    fn value(self, like: Value<'b>) -> Value<'b>;
}

impl<'b> Operand<'b> for Value<'b> {
    fn value(self, _: Value<'b>) -> Value<'b> {
        self
    }
}

impl<'b> Operand<'b> for f64 {
    fn value(self, like: Value<'b>) -> Value<'b> {
        like.constant(Number::Float(self))
    }
}

/// Methods for operations of one operand of the same type.
macro_rules! unary {
    ($($name:ident = $operation:literal;)*) => {
        impl<'b> Value<'b> {
            $(pub(super) fn $name(self) -> Value<'b> { self.unary($operation) })*
        }
    };
}

unary! {
    ceil = "ceil";
    cos = "cosine";
    exp = "exponential";
    expm1 = "exponential_minus_one";
    floor = "floor";
    log = "log";
    log1p = "log_plus_one";
    logistic = "logistic";
    round_even = "round_nearest_even";
    rsqrt = "rsqrt";
    sin = "sine";
    sqrt = "sqrt";
    tan = "tan";
    tanh = "tanh";
}

/// Methods for operations of two operands of the same type.
macro_rules! binary {
    ($($name:ident = $operation:literal;)*) => {
        impl<'b> Value<'b> {
            $(pub(super) fn $name(self, other: impl Operand<'b>) -> Value<'b> {
                self.binary($operation, other)
            })*
        }
    };
}

binary! {
    and = "and";
    atan2 = "atan2";
    maximum = "maximum";
    minimum = "minimum";
    or = "or";
    power = "power";
    shift_left = "shift_left";
    shift_right_arithmetic = "shift_right_arithmetic";
    shift_right_logical = "shift_right_logical";
    xor = "xor";
}

macro_rules! operators {
    ($($operator:ident $method:ident = $name:literal;)*) => {
        $(impl<'b, T: Operand<'b>> $operator<T> for Value<'b> {
            type Output = Value<'b>;

            fn $method(self, other: T) -> Value<'b> {
                self.binary($name, other)
            }
        })*
    };
}

operators! {
    Add add = "add";
    Sub sub = "subtract";
    Mul mul = "multiply";
    Div div = "divide";
    Rem rem = "remainder";
}

/// A plain number as the first operand.
macro_rules! from_left {
    ($($operator:ident $method:ident;)*) => {
        $(impl<'b> $operator<Value<'b>> for f64 {
            type Output = Value<'b>;

            fn $method(self, other: Value<'b>) -> Value<'b> {
                $operator::$method(Operand::value(self, other), other)
            }
        })*
    };
}

from_left! {
    Add add;
    Sub sub;
    Mul mul;
    Div div;
}

impl<'b> Neg for Value<'b> {
    type Output = Value<'b>;

    fn neg(self) -> Value<'b> {
        self.unary("negate")
    }
}

impl<'b> Not for Value<'b> {
    type Output = Value<'b>;

    fn not(self) -> Value<'b> {
        self.unary("not")
    }
}

impl<'b> Value<'b> {
    pub(super) fn new(body: &'b Body, id: u32) -> Value<'b> {
        Value { body, id }
    }

    pub(super) fn id(self) -> u32 {
        self.id
    }

    pub(super) fn body(self) -> &'b Body {
        self.body
    }

    pub(super) fn ty(self) -> Type {
        self.body.type_of(self.id)
    }

    pub(super) fn element(self) -> ElementType {
        self.ty().element
    }

    pub(super) fn dims(self) -> Dims {
        self.ty().dims
    }

    pub(super) fn rank(self) -> usize {
        self.dims().len()
    }

    /// Number of elements.
    pub(super) fn count(self) -> i64 {
        self.dims().iter().product()
    }

    pub(super) fn is_float(self) -> bool {
        element::is_float(self.element())
    }

    pub(super) fn is_complex(self) -> bool {
        element::is_complex(self.element())
    }

    pub(super) fn is_bool(self) -> bool {
        self.element() == ElementType::Pred
    }

    /// An array of one number, of this one's type.
    pub(super) fn constant(self, number: Number) -> Value<'b> {
        self.body.constant(number, self.ty())
    }

    /// A number of this one's element type.
    pub(super) fn point(self, number: Number) -> Value<'b> {
        self.body.constant(number, Type::new(self.element(), &[]))
    }

    /// A zero of this one's element type.
    pub(super) fn zero(self) -> Value<'b> {
        self.point(Number::Int(0))
    }

    /// Zeros of this one's type.
    pub(super) fn zeros(self) -> Value<'b> {
        self.constant(Number::Int(0))
    }

    /// Applies an operation that keeps the type.
    fn unary(self, operation: &str) -> Value<'b> {
        let ty = self.ty();
        self.body.push(
            ty.clone(),
            format_args!("stablehlo.{operation} {self} : {ty}"),
        )
    }

    fn binary(self, operation: &str, other: impl Operand<'b>) -> Value<'b> {
        let other = other.value(self);
        let (a, b) = self.broadcast_with(other);
        let ty = a.ty();
        debug_assert_eq!(ty.element, b.element(), "{operation}");
        self.body.push(
            ty.clone(),
            format_args!("stablehlo.{operation} {a}, {b} : {ty}"),
        )
    }

    /// Both values with the sizes that they have in common.
    pub(super) fn broadcast_with(self, other: Value<'b>) -> (Value<'b>, Value<'b>) {
        let (a, b) = (self.dims(), other.dims());
        if a == b {
            return (self, other);
        }
        let dims = broadcast(&a, &b);
        (self.expand(&dims), other.expand(&dims))
    }

    /// Compares element by element.
    pub(super) fn compare(self, how: Comparison, other: impl Operand<'b>) -> Value<'b> {
        let (a, b) = self.broadcast_with(other.value(self));
        let ty = Type::new(ElementType::Pred, &a.dims());
        let (from, to) = (a.ty(), b.ty());
        self.body.push(
            ty.clone(),
            format_args!("stablehlo.compare {how:?}, {a}, {b} : ({from}, {to}) -> {ty}"),
        )
    }

    pub(super) fn eq(self, other: impl Operand<'b>) -> Value<'b> {
        self.compare(Comparison::EQ, other)
    }

    pub(super) fn ne(self, other: impl Operand<'b>) -> Value<'b> {
        self.compare(Comparison::NE, other)
    }

    pub(super) fn lt(self, other: impl Operand<'b>) -> Value<'b> {
        self.compare(Comparison::LT, other)
    }

    pub(super) fn le(self, other: impl Operand<'b>) -> Value<'b> {
        self.compare(Comparison::LE, other)
    }

    pub(super) fn gt(self, other: impl Operand<'b>) -> Value<'b> {
        self.compare(Comparison::GT, other)
    }

    pub(super) fn ge(self, other: impl Operand<'b>) -> Value<'b> {
        self.compare(Comparison::GE, other)
    }

    /// Where not a number.
    pub(super) fn is_nan(self) -> Value<'b> {
        self.ne(self)
    }

    /// `yes` where this, a truth value, is true; else `no`. All broadcast.
    pub(super) fn select(self, yes: Value<'b>, no: impl Operand<'b>) -> Value<'b> {
        let no = no.value(yes);
        let dims = broadcast(&broadcast(&self.dims(), &yes.dims()), &no.dims());
        let [which, yes, no] = [self, yes, no].map(|value| value.expand(&dims));
        let (predicate, ty) = (which.ty(), yes.ty());
        self.body.push(
            ty.clone(),
            format_args!("stablehlo.select {which}, {yes}, {no} : {predicate}, {ty}"),
        )
    }

    /// The numbers in another type; complex ones lose their imaginary part, any number but 0 is true.
    pub(super) fn convert(self, to: ElementType) -> Value<'b> {
        let from = self.element();
        if from == to {
            return self;
        }
        if to == ElementType::Pred {
            return self.ne(self.zeros());
        }
        if self.is_complex() && !element::is_complex(to) {
            return self.real().convert(to);
        }
        let (old, ty) = (self.ty(), Type::new(to, &self.dims()));
        self.body.push(
            ty.clone(),
            format_args!("stablehlo.convert {self} : ({old}) -> {ty}"),
        )
    }

    /// float32 numbers rounded to those that a smaller type has. (A conversion there and back does
    /// not do: XLA may leave it out.)
    pub(super) fn rounded_to(self, element: ElementType) -> Value<'b> {
        let format = match element {
            ElementType::F16 => "e5m10",
            ElementType::BF16 => "e8m7",
            _ => return self,
        };
        let ty = self.ty();
        self.body.push(
            ty.clone(),
            format_args!("stablehlo.reduce_precision {self}, format = {format} : {ty}"),
        )
    }

    fn part(self, name: &str) -> Value<'b> {
        let (old, ty) = (
            self.ty(),
            Type::new(element::real(self.element()), &self.dims()),
        );
        self.body.push(
            ty.clone(),
            format_args!("stablehlo.{name} {self} : ({old}) -> {ty}"),
        )
    }

    /// The real part of complex numbers.
    pub(super) fn real(self) -> Value<'b> {
        if self.is_complex() {
            self.part("real")
        } else {
            self
        }
    }

    /// The imaginary part of complex numbers.
    pub(super) fn imag(self) -> Value<'b> {
        if self.is_complex() {
            self.part("imag")
        } else {
            self.zeros()
        }
    }

    /// The complex numbers of this real part.
    pub(super) fn complex(self, imaginary: Value<'b>) -> Value<'b> {
        let (real, imaginary) = self.broadcast_with(imaginary);
        let ty = Type::new(element::complex(self.element()), &real.dims());
        let parts = real.ty();
        self.body.push(
            ty.clone(),
            format_args!("stablehlo.complex {real}, {imaginary} : ({parts}, {parts}) -> {ty}"),
        )
    }

    /// The bits in another type, real and of the same size.
    pub(super) fn bitcast(self, to: ElementType) -> Value<'b> {
        self.bitcast_to(Type::new(to, &self.dims()))
    }

    /// The bits as a type of as many bits in all, real, whose elements make up or
    /// divide those along the last dimension.
    pub(super) fn bitcast_to(self, ty: Type) -> Value<'b> {
        let old = self.ty();
        if old == ty {
            return self;
        }
        self.body.push(
            ty.clone(),
            format_args!("stablehlo.bitcast_convert {self} : ({old}) -> {ty}"),
        )
    }

    /// The absolute value, of complex numbers a real one.
    pub(super) fn abs(self) -> Value<'b> {
        let element = self.element();
        if self.is_complex() {
            self.part("abs")
        } else if self.is_bool() || element::is_unsigned(element) {
            self
        } else {
            self.unary("abs")
        }
    }

    /// The complex conjugate.
    pub(super) fn conj(self) -> Value<'b> {
        if self.is_complex() {
            self.real().complex(-self.imag())
        } else {
            self
        }
    }

    /// Whether the sign bit is set; also of zeros and what is not a number.
    pub(super) fn sign_bit(self) -> Value<'b> {
        let bits = match self.element() {
            ElementType::F64 => ElementType::S64,
            ElementType::F32 => ElementType::S32,
            ElementType::F16 | ElementType::BF16 => ElementType::S16,
            element if element::is_unsigned(element) || self.is_bool() => {
                return self.body.constant(
                    Number::Bool(false),
                    Type::new(ElementType::Pred, &self.dims()),
                );
            }
            element => element,
        };
        self.bitcast(bits).lt(0.)
    }

    /// This with the sign of `other`.
    pub(super) fn copy_sign(self, other: Value<'b>) -> Value<'b> {
        let size = self.abs();
        other.sign_bit().select(-size, size)
    }

    /// Rounded toward zero; a whole number of floating-point type, or itself.
    pub(super) fn trunc(self) -> Value<'b> {
        if !self.is_float() {
            return self;
        }
        self.sign_bit().select(self.ceil(), self.floor())
    }

    /// The polynomial with these coefficients, that of the highest power first.
    pub(super) fn polynomial(self, coefficients: &[f64]) -> Value<'b> {
        let (first, rest) = coefficients
            .split_first()
            .expect("a polynomial has coefficients");
        let start = self.constant(Number::Float(*first));
        rest.iter()
            .fold(start, |sum, &coefficient| sum * self + coefficient)
    }

    /// In another shape, elements in row-major order.
    pub(super) fn reshape(self, dims: &[i64]) -> Value<'b> {
        let old = self.ty();
        if old.dims[..] == *dims {
            return self;
        }
        let ty = Type::new(old.element, dims);
        self.body.push(
            ty.clone(),
            format_args!("stablehlo.reshape {self} : ({old}) -> {ty}"),
        )
    }

    /// In one dimension.
    pub(super) fn flatten(self) -> Value<'b> {
        self.reshape(&[self.count()])
    }

    /// With a dimension of size 1 at `dimension`.
    pub(super) fn unsqueeze(self, dimension: usize) -> Value<'b> {
        let mut dims = self.dims();
        dims.insert(dimension, 1);
        self.reshape(&dims)
    }

    /// Without dimension `dimension`, which is of size 1.
    pub(super) fn squeeze(self, dimension: usize) -> Value<'b> {
        let mut dims = self.dims();
        dims.remove(dimension);
        self.reshape(&dims)
    }

    /// Dimension `i` of the result is dimension `order[i]`.
    pub(super) fn transpose(self, order: &[usize]) -> Value<'b> {
        if order
            .iter()
            .enumerate()
            .all(|(i, &dimension)| i == dimension)
        {
            return self;
        }
        let old = self.ty();
        let dims: Dims = order.iter().map(|&dimension| old.dims[dimension]).collect();
        let ty = Type::new(old.element, &dims);
        self.body.push(
            ty.clone(),
            format_args!("stablehlo.transpose {self}, dims = {order:?} : ({old}) -> {ty}"),
        )
    }

    /// With two dimensions exchanged.
    pub(super) fn swap(self, a: usize, b: usize) -> Value<'b> {
        let mut order: Vec<usize> = (0..self.rank()).collect();
        order.swap(a, b);
        self.transpose(&order)
    }

    /// Dimension `i` becomes dimension `places[i]` of an array of `dims`.
    pub(super) fn broadcast_in_dim(self, dims: &[i64], places: &[usize]) -> Value<'b> {
        let old = self.ty();
        if old.dims[..] == *dims {
            return self;
        }
        let ty = Type::new(old.element, dims);
        self.body.push(
            ty.clone(),
            format_args!("stablehlo.broadcast_in_dim {self}, dims = {places:?} : ({old}) -> {ty}"),
        )
    }

    /// Repeats dimensions of size 1, and adds leading ones, up to `dims`.
    pub(super) fn expand(self, dims: &[i64]) -> Value<'b> {
        let added = dims.len() - self.rank();
        let places: Vec<usize> = (added..dims.len()).collect();
        self.broadcast_in_dim(dims, &places)
    }

    /// Elements `starts[i] .. limits[i]` by `steps[i]` of each dimension `i`.
    pub(super) fn slice(self, starts: &[i64], limits: &[i64], steps: &[i64]) -> Value<'b> {
        let old = self.ty();
        let dims: Dims = (0..starts.len())
            .map(|i| (limits[i] - starts[i] + steps[i] - 1) / steps[i])
            .collect();
        if dims == old.dims {
            return self;
        }
        let ranges: Vec<String> = (0..starts.len())
            .map(|i| format!("{}:{}:{}", starts[i], limits[i], steps[i]))
            .collect();
        let ty = Type::new(old.element, &dims);
        self.body.push(
            ty.clone(),
            format_args!(
                "stablehlo.slice {self} [{}] : ({old}) -> {ty}",
                ranges.join(", ")
            ),
        )
    }

    /// Elements `start .. limit` of one dimension.
    pub(super) fn narrow(self, dimension: usize, start: i64, limit: i64) -> Value<'b> {
        let mut limits = self.dims();
        let mut starts = Dims::from_elem(0, limits.len());
        let steps = Dims::from_elem(1, limits.len());
        (starts[dimension], limits[dimension]) = (start, limit);
        self.slice(&starts, &limits, &steps)
    }

    /// Adds `low` and `high` elements `fill`, a number, at the ends of dimensions and `interior` between
    /// elements; negative ends are cut off.
    pub(super) fn pad(
        self,
        fill: Value<'b>,
        low: &[i64],
        high: &[i64],
        interior: &[i64],
    ) -> Value<'b> {
        let old = self.ty();
        let dims: Dims = (0..low.len())
            .map(|i| old.dims[i] + low[i] + high[i] + interior[i] * (old.dims[i] - 1).max(0))
            .collect();
        if dims == old.dims && low.iter().all(|&low| low == 0) {
            return self;
        }
        let ty = Type::new(old.element, &dims);
        let number = fill.ty();
        self.body.push(
            ty.clone(),
            format_args!(
                "stablehlo.pad {self}, {fill}, low = {low:?}, high = {high:?}, interior = {interior:?} : \
                 ({old}, {number}) -> {ty}"
            ),
        )
    }

    /// With the elements in reverse order along dimensions.
    pub(super) fn reverse(self, dimensions: &[usize]) -> Value<'b> {
        if dimensions.is_empty() {
            return self;
        }
        let ty = self.ty();
        self.body.push(
            ty.clone(),
            format_args!("stablehlo.reverse {self}, dims = {dimensions:?} : {ty}"),
        )
    }

    /// With `update` at `starts`, 0-d integers of one type.
    pub(super) fn update(self, update: Value<'b>, starts: &[Value<'b>]) -> Value<'b> {
        let ty = self.ty();
        let (names, types) = (List(starts), Types(starts));
        let separator = if starts.is_empty() { "" } else { ", " };
        let part = update.ty();
        self.body.push(
            ty.clone(),
            format_args!(
                "stablehlo.dynamic_update_slice {self}, {update}{separator}{names} : \
                 ({ty}, {part}{separator}{types}) -> {ty}"
            ),
        )
    }
}

/// The sizes that two arrays have in common. Sizes that do not agree are the larger ones, which the
/// compiler then refuses.
pub(super) fn broadcast(a: &[i64], b: &[i64]) -> Dims {
    let rank = a.len().max(b.len());
    let size = |dims: &[i64], i: usize| {
        (i + dims.len())
            .checked_sub(rank)
            .map_or(1, |place| dims[place])
    };
    (0..rank)
        .map(|i| match (size(a, i), size(b, i)) {
            (1, other) | (other, 1) => other,
            (one, other) => one.max(other),
        })
        .collect()
}

/// The integers along dimension `dimension`.
pub(super) fn iota<'b>(
    body: &'b Body,
    element: ElementType,
    dims: &[i64],
    dimension: usize,
) -> Value<'b> {
    let ty = Type::new(element, dims);
    body.push(
        ty.clone(),
        format_args!("stablehlo.iota dim = {dimension} : {ty}"),
    )
}

/// Arrays one after the other along a dimension.
pub(super) fn concatenate<'b>(values: &[Value<'b>], dimension: usize) -> Value<'b> {
    let first = values[0];
    if values.len() == 1 {
        return first;
    }
    let mut ty = first.ty();
    ty.dims[dimension] = values.iter().map(|value| value.dims()[dimension]).sum();
    let (names, types) = (List(values), Types(values));
    first.body().push(
        ty.clone(),
        format_args!("stablehlo.concatenate {names}, dim = {dimension} : ({types}) -> {ty}"),
    )
}
