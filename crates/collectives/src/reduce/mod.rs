//! Reduction kernels: the arithmetic of `all_reduce`, `reduce` and `reduce_scatter`.
//!
//! A [`Reducer`] combines any number of equally long inputs, element by element and
//! from left to right, into one or several outputs:
//!
//! - 16-bit and 8-bit floats (and the parts of `complex32`) are accumulated in `f32` and
//!   rounded once, to nearest even, when the result is stored. `float32` and `float64`
//!   are accumulated as they are; integers wrap at their own width.
//! - Averages divide the accumulated sum; integers truncate towards zero.
//! - `MIN` and `MAX` return NaN as soon as one input is NaN, as PyTorch does.
//! - Booleans: `SUM`, `MAX` and `BOR` are *or*, `PRODUCT`, `MIN` and `BAND` are *and*,
//!   `BXOR` is *exclusive or*. Any byte other than 0 is true; results are 0 or 1.
//! - `PREMUL_SUM` casts each factor to the type of the accumulation first, so `int32`
//!   tensors are multiplied by integers, as in NCCL.
//!
//! The best instruction set that this CPU has is chosen when the `Reducer` is made. All of them
//! run the same operations in the same order, so results are bit-identical on all CPUs but for
//! the payloads of NaNs. x86-64 has kernels in explicit vectors of AVX2 and AVX-512; the
//! compiler makes vectors for the less frequent types, and of NEON for AArch64.

mod block;
mod copy;
mod element;
mod isa;
mod kernel;
mod minifloat;
mod operator;
mod table;
#[cfg(target_arch = "x86_64")]
mod vector;
#[cfg(target_arch = "x86_64")]
mod x86;

use std::fmt;

pub use copy::{copy, copy_nontemporal};
pub use isa::Isa;

use crate::{DType, ReduceKind};
use isa::Kernel;
use kernel::Operands;

/// A reduce operator resolved for one element type and this CPU.
///
/// Cheap to copy and to keep; a call costs one indirect call and never allocates.
#[derive(Clone, Copy)]
pub struct Reducer {
    kind: ReduceKind,
    dtype: DType,
    kernel: Kernel,
}

/// The operator has no meaning for elements of this type.
#[derive(thiserror::Error, Debug, Clone, PartialEq, Eq)]
#[error("{op} cannot reduce elements of type {dtype}: {}", reason(*.op, *.dtype))]
#[non_exhaustive]
pub struct Unsupported {
    /// The operator asked for.
    pub op: ReduceKind,
    /// The element type asked for.
    pub dtype: DType,
}

fn reason(op: ReduceKind, dtype: DType) -> &'static str {
    use DType::*;
    match dtype {
        F8E8M0FNU => "it holds scale factors, which collectives move but do not reduce",
        F4E2M1FNX2 => "packed 4-bit floats are moved but not reduced",
        QI8 | QU8 | QI32 => "quantised tensors may differ in scale and zero point",
        Bool => "booleans have no average and no factor; convert to a number first",
        C32 | C64 | C128 if matches!(op, ReduceKind::Min | ReduceKind::Max) => {
            "complex numbers have no order"
        }
        _ => "bitwise operators take integers and booleans only",
    }
}

impl Reducer {
    /// Resolves `op` on `dtype` for this CPU.
    ///
    /// # Errors
    /// [`Unsupported`] when the operator has no meaning for the type: bitwise operators on
    /// floats and complex numbers, `MIN` and `MAX` on complex numbers, `AVG` and
    /// `PREMUL_SUM` on booleans, anything on `float8_e8m0fnu`, `float4_e2m1fn_x2` and the
    /// quantised types.
    pub fn new(op: ReduceKind, dtype: DType) -> Result<Reducer, Unsupported> {
        Reducer::with_isa(op, dtype, Isa::best())
    }

    /// As [`Reducer::new`], with a given instruction set instead of the best one.
    ///
    /// # Errors
    /// As [`Reducer::new`].
    pub fn with_isa(op: ReduceKind, dtype: DType, isa: Isa) -> Result<Reducer, Unsupported> {
        match table::resolve(op, dtype, isa) {
            Some(kernel) => Ok(Reducer {
                kind: op,
                dtype,
                kernel,
            }),
            None => Err(Unsupported { op, dtype }),
        }
    }

    /// The type of the elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The operator.
    pub fn kind(&self) -> ReduceKind {
        self.kind
    }

    /// Reduces `srcs` element by element, from left to right, into every one of `dsts`.
    ///
    /// `scales` holds one factor for each source (`PREMUL_SUM`) or is empty. `divisor` is
    /// the number of ranks where this call makes the final result of an `AVG`, and `None`
    /// for a partial one; the other operators ignore it.
    ///
    /// # Panics
    /// If `srcs` is empty, `scales` is neither empty nor as long as `srcs`, or `divisor` is 0.
    ///
    /// # Safety
    /// Every pointer is valid for `count` elements, which nobody else writes (or, of a
    /// destination, reads) meanwhile; no alignment is needed. A destination may be the
    /// same as a source, but must not overlap one in part, nor another destination at all.
    #[inline]
    pub unsafe fn reduce(
        &self,
        dsts: &[*mut u8],
        srcs: &[*const u8],
        count: usize,
        scales: &[f64],
        divisor: Option<u32>,
    ) {
        assert!(!srcs.is_empty(), "a reduction needs at least one source");
        assert!(
            scales.is_empty() || scales.len() == srcs.len(),
            "{} factors for {} sources",
            scales.len(),
            srcs.len()
        );
        assert!(divisor != Some(0), "an average over 0 ranks");
        let kernel = &self.kernel;
        let operands = Operands {
            dsts,
            srcs,
            count: count * kernel.parts,
            scales,
            divisor: divisor.filter(|_| self.kind == ReduceKind::Avg),
        };
        let reduce = if operands.count < kernel.shortest {
            kernel.reduce_few
        } else {
            kernel.reduce
        };
        // SAFETY: the caller vouches for the pointers; the kernel is for elements of
        // this type and for an instruction set that this CPU has.
        unsafe { reduce(operands) }
    }

    /// Divides `data` by the number of ranks in place, which makes the partial result of an
    /// `AVG` final. Nothing for the other operators.
    ///
    /// # Panics
    /// If `divisor` is 0.
    ///
    /// # Safety
    /// `data` is valid for reads and writes of `count` elements.
    pub unsafe fn finish(&self, data: *mut u8, count: usize, divisor: u32) {
        if self.kind == ReduceKind::Avg {
            // SAFETY: the caller vouches for `data`, the source and the destination.
            unsafe { self.reduce(&[data], &[data], count, &[], Some(divisor)) }
        }
    }

    /// Multiplies `data` by `scale` in place, rounding to the element type: one rank's
    /// contribution to a `PREMUL_SUM`. Nothing for the other operators.
    ///
    /// # Safety
    /// `data` is valid for reads and writes of `count` elements.
    pub unsafe fn scale(&self, data: *mut u8, count: usize, scale: f64) {
        if self.kind == ReduceKind::PremulSum {
            // SAFETY: the caller vouches for `data`, the source and the destination.
            unsafe { self.reduce(&[data], &[data], count, &[scale], None) }
        }
    }
}

impl fmt::Debug for Reducer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reducer")
            .field("kind", &self.kind)
            .field("dtype", &self.dtype)
            .field("isa", &self.kernel.isa)
            .finish()
    }
}
