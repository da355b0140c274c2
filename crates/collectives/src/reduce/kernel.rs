//! What kernels have in common.

use super::operator::Operator;

/// The arguments of [`super::Reducer::reduce`].
pub(super) struct Operands<'a> {
    pub(super) dsts: &'a [*mut u8],
    pub(super) srcs: &'a [*const u8],
    pub(super) count: usize,
    pub(super) scales: &'a [f64],
    pub(super) divisor: Option<u32>,
}

/// Elements of one type, with the kernel that reduces them.
pub(super) trait Operand {
    /// What the kernel combines: accumulators, or vectors of them.
    type Acc;

    /// The fewest elements that the kernel takes.
    const SHORTEST: usize;

    /// Reduces by one operator. Compiled anew for each instruction set.
    ///
    /// # Safety
    /// As for [`super::Reducer::reduce`]; `count` is not below `SHORTEST`, and the CPU has the
    /// instruction set of the vectors.
    unsafe fn reduce<O: Operator<Self::Acc>>(operands: Operands<'_>);
}
