//! What is asked: one call of an ATen operator, and what to make of its results.

use std::sync::Arc;

use crate::pjrt::ElementType;

/// A strided view of a storage; strides and offset in elements of the view's type.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct View {
    /// Size of each dimension.
    pub sizes: Vec<i64>,
    /// Elements from one index to the next in each dimension; as many as sizes.
    pub strides: Vec<i64>,
    /// The first element.
    pub offset: i64,
}

impl View {
    /// All of a storage, in row-major order.
    pub fn contiguous(sizes: &[i64]) -> View {
        let mut strides = vec![1; sizes.len()];
        for i in (1..sizes.len()).rev() {
            strides[i - 1] = strides[i] * sizes[i].max(1);
        }
        View {
            sizes: sizes.to_vec(),
            strides,
            offset: 0,
        }
    }
}

/// The buffer that a storage has when the program starts.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct StorageType {
    /// Element type of the buffer; may differ from that of tensors on the storage.
    pub element: ElementType,
    /// Dimensions of the buffer, in row-major order; they cover the whole storage.
    pub dims: Vec<i64>,
    /// There is no buffer: the storage reads as zeros and is no parameter of the program.
    /// `element` and `dims` then mean nothing.
    pub absent: bool,
    /// Size of the storage in bytes.
    pub bytes: u64,
}

/// A tensor argument.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Operand {
    /// Index of its storage in [`Request::storages`].
    pub storage: usize,
    /// The tensor's element type.
    pub element: ElementType,
    /// Where its elements are.
    pub view: View,
}

/// A number.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Number {
    /// A truth value.
    Bool(bool),
    /// An integer.
    Int(i64),
    /// A real number.
    Float(f64),
    /// A complex number: real and imaginary part.
    Complex(f64, f64),
}

/// The kind of a number that is known when the program runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// A truth value.
    Bool,
    /// An integer.
    Int,
    /// A real number.
    Float,
    /// A complex number.
    Complex,
}

/// An argument of type `Scalar`, or a number that stands for a tensor (a "wrapped number",
/// or a 0-d tensor on the CPU).
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scalar {
    /// Part of the program.
    Constant(Number),
    /// The program's parameter number `index` after the storages, a 0-d tensor of the
    /// element type in [`Lowered::scalars`](super::Lowered::scalars).
    Runtime {
        /// Number among the run-time scalars of the request: 0, 1, 2, ...
        index: usize,
        /// What it is.
        kind: Kind,
    },
}

/// An argument of the operator.
#[derive(Clone, Debug, PartialEq)]
pub enum Argument {
    /// An optional argument that is not given.
    None,
    /// A tensor.
    Tensor(Operand),
    /// A list of tensors, some of which may be undefined (`Tensor?[]`).
    Tensors(Vec<Option<Operand>>),
    /// A number; also where the schema says `Tensor`.
    Scalar(Scalar),
    /// A list of numbers (`Scalar[]`).
    Scalars(Vec<Scalar>),
    /// `bool`.
    Bool(bool),
    /// `int` or `SymInt`; also enumerations like a memory format or a reduction.
    Int(i64),
    /// `float`.
    Float(f64),
    /// `int[]` or `SymInt[]`.
    Ints(Vec<i64>),
    /// `float[]`.
    Floats(Vec<f64>),
    /// `bool[]`.
    Bools(Vec<bool>),
    /// `ScalarType`.
    Element(ElementType),
    /// `str`.
    Text(Arc<str>),
    /// `Generator`, `Device`, `Layout` and what else does not matter to the computation.
    Opaque,
}

/// Where a result goes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Destination {
    /// A new tensor on a storage of its own.
    New,
    /// A tensor that exists: the program returns its storage's new contents.
    Into {
        /// Index of the storage in [`Request::storages`].
        storage: usize,
        /// The tensor's place in it.
        view: View,
    },
}

/// A tensor that the operator returns or writes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ResultType {
    /// Its element type.
    pub element: ElementType,
    /// Its sizes, and the strides that a new tensor shall have (dense, without overlap).
    pub view: View,
    /// Where it goes.
    pub destination: Destination,
}

/// One call of an operator.
#[derive(Clone, Debug, PartialEq)]
pub struct Request<'a> {
    /// [`OperatorRow::name`](super::OperatorRow::name) of the operator.
    pub operator: &'a str,
    /// Arguments in the order of the schema, without `out` arguments. Trailing ones that
    /// have their default value are given too.
    pub arguments: Vec<Argument>,
    /// The storages of tensor arguments and of destinations, each once.
    pub storages: Vec<StorageType>,
    /// What the operator returns, in the order of the schema, a list of tensors as so many
    /// results; then the tensors it writes without returning them (those marked
    /// in the schema, and [`OperatorRow::writes`](super::OperatorRow::writes)), in the order of arguments.
    /// `None` where the operator returns an undefined tensor, or such an argument is not given.
    pub results: Vec<Option<ResultType>>,
}

/// How exact products of `f32` matrices are (`torch.set_float32_matmul_precision`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Precision {
    /// As `f32` is.
    #[default]
    Highest,
    /// As three products of `bf16`.
    High,
    /// As one product of `bf16`.
    Medium,
}
