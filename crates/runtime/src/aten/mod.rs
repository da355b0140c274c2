//! ATen operators as StableHLO programs.
//!
//! [`lower`] turns one call of an operator into the text of one module. The module
//! resolves strided views of storages (XLA fuses that with what follows), computes, and gives each
//! result in its tensor's memory order, or writes it into a view of an existing storage.
//! [`operators`] lists what can be lowered. Nothing here has state or does IO.
//!
//! # The program
//! Parameters, in order: each storage that is not absent, with its buffer's type; each
//! run-time scalar, 0-d, of the type in [`Lowered::scalars`]; if [`Lowered::random`], the state of
//! the generator, `tensor<2xui64>`: seed and offset.
//!
//! Results, in order: [`Lowered::outputs`]. A new tensor is an array of its sizes in the
//! order of descending strides. A storage that is written is its new contents.
//! Results that go into one storage are written in their order. A result with a
//! destination that the operator leaves alone this time (the running statistics of an
//! evaluation) has no output.

mod arguments;
mod body;
mod call;
mod element;
mod error;
mod ops;
mod reduce;
mod request;
mod scatter;
mod special;
mod table;
mod value;
mod view;
mod window;

pub use error::Error;
pub use request::{
    Argument, Destination, Kind, Number, Operand, Precision, Request, ResultType, Scalar,
    StorageType, View,
};
pub use table::{OperatorRow, operators};

use crate::pjrt::{CompileOptions, ElementType, OptionOverride};

/// What one output of a program is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Output {
    /// The new tensor of this number in [`Request::results`].
    Result(usize),
    /// The new contents of this storage.
    Storage(usize),
}

/// A program for a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lowered {
    /// The StableHLO module; its function is `main`.
    pub text: String,
    /// What the program returns.
    pub outputs: Vec<Output>,
    /// Element types and dimensions of the outputs' buffers.
    pub types: Vec<(ElementType, Vec<i64>)>,
    /// Storages whose buffers an output takes over (`tf.aliasing_output`), unless they are kept at
    /// launch ([`LaunchOptions::keep`](crate::pjrt::LaunchOptions::keep)).
    pub donate: Vec<usize>,
    /// Element types of the run-time scalars, by their index: `i1` or `i64`; `f32` or
    /// `complex<f32>`, twice as wide where a tensor of the call has 64-bit floats.
    pub scalars: Vec<ElementType>,
    /// The program takes the generator's state, and draws from it: at most one step of the offset for
    /// each element of its largest result.
    pub random: bool,
}

/// How to compile programs for the device with id `device`.
///
/// XLA's CPU backend may by default leave out that `maximum` and `minimum` of what is not a number are not
/// numbers, as torch and StableHLO define them; other backends do not look at these options.
pub fn compile_options(device: i32) -> CompileOptions {
    let mut options = CompileOptions::for_device(device);
    for name in ["xla_cpu_enable_fast_min_max", "xla_cpu_enable_fast_math"] {
        let off = OptionOverride::Bool(false);
        options.overrides.insert(name.to_string(), off);
    }
    options
}

/// The program that turns an array into a line of elements of type `to`, of the same bytes; `None`
/// where these do not make up whole elements.
pub fn line(from: ElementType, dims: &[i64], to: ElementType) -> Option<String> {
    let body = body::Body::default();
    let array = body.parameter(body::Type::new(from, dims));
    let elements = view::reinterpret(array, to)?;
    let line = elements.reshape(&[elements.count()]);
    Some(body.finish("line", &[line], &[None]))
}

/// The program for a call, with products of `f32` as exact as that type; `None` if the operator has
/// no row in the table.
///
/// # Errors
/// [`Error::Unsupported`] if the row does not cover the call's types or options;
/// [`Error::Malformed`] if the request does not fit the operator.
pub fn lower(request: &Request<'_>) -> Option<Result<Lowered, Error>> {
    lower_with(request, Precision::Highest)
}

/// [`lower`] with products of a given precision.
pub fn lower_with(request: &Request<'_>, precision: Precision) -> Option<Result<Lowered, Error>> {
    table::find(request.operator).map(|row| call::lower(row, request, precision))
}
