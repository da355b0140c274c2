//! The kernel for vectors of a given type.

use super::element::{Addition, Multiplication, Order, Weighting};
use super::kernel::{Operand, Operands};
use super::operator::Operator;

/// A vector of elements. It belongs to an instruction set, and so do its accumulators: only
/// [`Vector::widen`] makes them, so where there are some, the CPU has the instruction set.
pub(super) trait Vector {
    /// An element as it lies in memory.
    type Element: Copy;
    /// Elements as they lie in memory.
    type Raw: Copy;
    /// The accumulators of all elements, in any order.
    type Acc: Copy;
    /// Elements of a vector.
    const COUNT: usize = size_of::<Self::Raw>() / size_of::<Self::Element>();

    /// Converts for accumulation, exactly.
    ///
    /// # Safety
    /// The CPU has the instruction set.
    unsafe fn widen(raw: Self::Raw) -> Self::Acc;

    /// Converts a result back, rounding once.
    fn narrow(acc: Self::Acc) -> Self::Raw;
}

/// Accumulators that need two registers.
#[derive(Clone, Copy)]
pub(super) struct Pair<A>(pub(super) A, pub(super) A);

impl<A: Addition> Addition for Pair<A> {
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        Pair(self.0.add(other.0), self.1.add(other.1))
    }
}

impl<A: Weighting> Weighting for Pair<A> {
    #[inline(always)]
    fn scale(self, factor: f64) -> Self {
        Pair(self.0.scale(factor), self.1.scale(factor))
    }
    #[inline(always)]
    fn divide(self, divisor: u32) -> Self {
        Pair(self.0.divide(divisor), self.1.divide(divisor))
    }
}

impl<A: Multiplication> Multiplication for Pair<A> {
    #[inline(always)]
    fn multiply(self, other: Self) -> Self {
        Pair(self.0.multiply(other.0), self.1.multiply(other.1))
    }
}

impl<A: Order> Order for Pair<A> {
    #[inline(always)]
    fn least(self, other: Self) -> Self {
        Pair(self.0.least(other.0), self.1.least(other.1))
    }
    #[inline(always)]
    fn greatest(self, other: Self) -> Self {
        Pair(self.0.greatest(other.0), self.1.greatest(other.1))
    }
}

/// Vectors in flight at once: hides the latency of instructions and of the loop.
const UNROLL: usize = 4;

/// Reduces in registers, a few vectors at a time.
///
/// There are loops here where there could be iterators: whatever stands between the kernel and an
/// instruction must be inlined, or it is compiled without the instruction set.
impl<V: Vector> Operand for V {
    type Acc = V::Acc;
    const SHORTEST: usize = V::COUNT;

    #[inline(always)]
    unsafe fn reduce<O: Operator<V::Acc>>(operands: Operands<'_>) {
        let count = operands.count;
        let last = count - V::COUNT;
        // SAFETY: the caller vouches for `count` elements; nothing goes further.
        unsafe {
            // The last vector overlaps the one before unless the count is a multiple of its
            // length: its operands are read before they can be overwritten.
            let tail = combine::<V, O, 1>(&operands, last);
            let mut i = 0;
            while i + UNROLL * V::COUNT <= count {
                let acc = combine::<V, O, UNROLL>(&operands, i);
                store::<V, UNROLL>(acc, operands.dsts, i);
                i += UNROLL * V::COUNT;
            }
            while i < last {
                let acc = combine::<V, O, 1>(&operands, i);
                store::<V, 1>(acc, operands.dsts, i);
                i += V::COUNT;
            }
            store::<V, 1>(tail, operands.dsts, last);
        }
    }
}

/// Combines `N` vectors of every source, from element `i` on. All sources are read before
/// anything is stored, so a destination may be a source.
///
/// # Safety
/// Every source is valid for reading these elements. The CPU has the instruction set.
#[inline(always)]
unsafe fn combine<V: Vector, O: Operator<V::Acc>, const N: usize>(
    operands: &Operands<'_>,
    i: usize,
) -> [V::Acc; N] {
    // SAFETY: the caller vouches for all elements, and there is at least one source.
    unsafe {
        let mut acc = load::<V, O, N>(operands, 0, i);
        for source in 1..operands.srcs.len() {
            let right = load::<V, O, N>(operands, source, i);
            for v in 0..N {
                acc[v] = O::combine(acc[v], right[v]);
            }
        }
        if let Some(divisor) = operands.divisor {
            for acc in &mut acc {
                *acc = O::divide(*acc, divisor);
            }
        }
        acc
    }
}

/// Loads `N` vectors of a source and scales them if there are factors.
///
/// # Safety
/// `source` is one of the sources, valid for reading these elements. The CPU has the instruction
/// set.
#[inline(always)]
unsafe fn load<V: Vector, O: Operator<V::Acc>, const N: usize>(
    operands: &Operands<'_>,
    source: usize,
    i: usize,
) -> [V::Acc; N] {
    // SAFETY: the caller vouches for the source, its elements and the instruction set.
    unsafe {
        let src = operands.srcs.get_unchecked(source);
        let src = src.cast::<V::Element>().add(i).cast::<V::Raw>();
        let mut vectors = [V::widen(src.read_unaligned()); N];
        for (v, vector) in vectors.iter_mut().enumerate().skip(1) {
            *vector = V::widen(src.add(v).read_unaligned());
        }
        if let Some(&factor) = operands.scales.get(source) {
            for vector in &mut vectors {
                *vector = O::scale(*vector, factor);
            }
        }
        vectors
    }
}

/// Narrows `N` vectors and stores them into every destination.
///
/// # Safety
/// The destinations are valid for writing these elements. The CPU has the instruction set.
#[inline(always)]
unsafe fn store<V: Vector, const N: usize>(acc: [V::Acc; N], dsts: &[*mut u8], i: usize) {
    let mut raw = [V::narrow(acc[0]); N];
    for v in 1..N {
        raw[v] = V::narrow(acc[v]);
    }
    for dst in dsts {
        // SAFETY: the caller vouches for the elements.
        unsafe {
            let dst = dst.cast::<V::Element>().add(i).cast::<V::Raw>();
            for (v, &raw) in raw.iter().enumerate() {
                dst.add(v).write_unaligned(raw);
            }
        }
    }
}
