//! The kernel, the instruction sets it is compiled for, and the table that picks one.

use std::mem::MaybeUninit;

use super::element::{
    BFloat16, Bool, Complex, Element, F8E4M3Fn, F8E4M3FnUz, F8E5M2, F8E5M2FnUz, Float16, Number,
    Ordered,
};
use super::operator::{And, Max, Min, Operator, Or, Product, Sum, Xor};
use crate::{DType, ReduceKind};

/// Elements accumulated before their result is stored: few enough that accumulators of
/// 16 bytes stay in the first-level cache.
const BLOCK: usize = 256;

type ReduceFn = unsafe fn(&[*mut u8], &[*const u8], usize, &[f64], Option<u32>);

/// One operator on one element type, compiled for one instruction set.
#[derive(Clone, Copy)]
pub(super) struct Kernel {
    pub(super) isa: Isa,
    pub(super) reduce: ReduceFn,
}

/// Reduces `count` elements of each source into every destination; see
/// [`super::Reducer::reduce`] for the contract.
#[inline(always)]
unsafe fn reduce<E: Element, O: Operator<E::Acc>>(
    dsts: &[*mut u8],
    srcs: &[*const u8],
    count: usize,
    scales: &[f64],
    divisor: Option<u32>,
) {
    let mut block = [const { MaybeUninit::<E::Acc>::uninit() }; BLOCK];
    for start in (0..count).step_by(BLOCK) {
        let acc = &mut block[..BLOCK.min(count - start)];
        for (s, src) in srcs.iter().enumerate() {
            // SAFETY: the caller vouches for `count` elements, and `start` is below.
            let src = unsafe { src.cast::<E>().add(start) };
            let load = |i: usize| {
                // SAFETY: `i` is below `acc.len()`, so the element is one of the `count`.
                let value = unsafe { src.add(i).read_unaligned() }.widen();
                match scales.get(s) {
                    Some(&factor) if O::LINEAR => value.scale(E::Acc::factor(factor)),
                    _ => value,
                }
            };
            for (i, acc) in acc.iter_mut().enumerate() {
                let right = load(i);
                acc.write(match s {
                    0 => right,
                    // SAFETY: the pass over the first source wrote it.
                    _ => O::combine(unsafe { acc.assume_init() }, right),
                });
            }
        }
        if let Some(divisor) = divisor
            && O::LINEAR
        {
            for acc in &mut *acc {
                // SAFETY: there is at least one source, so it was written.
                acc.write(unsafe { acc.assume_init() }.divide(divisor));
            }
        }
        for dst in dsts {
            // SAFETY: as for the sources.
            let dst = unsafe { dst.cast::<E>().add(start) };
            for (i, acc) in acc.iter().enumerate() {
                // SAFETY: as for the sources; there is at least one, so `acc` was written.
                unsafe { dst.add(i).write_unaligned(E::narrow(acc.assume_init())) };
            }
        }
    }
}

macro_rules! instruction_sets {
    ($($(#[doc = $doc:literal])* $(#[cfg($cfg:meta)])? $isa:ident = $function:ident $([$($feature:tt),*])?;)*) => {
        /// An instruction set that the kernel is compiled for, from the least to the best.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(super) enum Isa {
            $($(#[doc = $doc])* $(#[cfg($cfg)])? $isa,)*
        }

        impl Isa {
            const ALL: &'static [Isa] = &[$($(#[cfg($cfg)])? Isa::$isa),*];

            /// Whether this CPU has it.
            pub(super) fn is_available(self) -> bool {
                match self {
                    $($(#[cfg($cfg)])? Isa::$isa => {
                        true $($(&& std::arch::is_x86_feature_detected!($feature))*)?
                    })*
                }
            }

            fn kernel<E: Element, O: Operator<E::Acc>>(self) -> Kernel {
                let reduce: ReduceFn = match self {
                    $($(#[cfg($cfg)])? Isa::$isa => $function::<E, O>,)*
                };
                Kernel { isa: self, reduce }
            }
        }

        $(
            $(#[cfg($cfg)])?
            $($(#[target_feature(enable = $feature)])*)?
            unsafe fn $function<E: Element, O: Operator<E::Acc>>(
                dsts: &[*mut u8],
                srcs: &[*const u8],
                count: usize,
                scales: &[f64],
                divisor: Option<u32>,
            ) {
                // SAFETY: the contract is the same.
                unsafe { reduce::<E, O>(dsts, srcs, count, scales, divisor) }
            }
        )*
    };
}

instruction_sets! {
    /// What every CPU of this architecture has.
    Baseline = baseline;
    /// AVX2 and the conversion of `float16`: x86-64-v3.
    #[cfg(target_arch = "x86_64")]
    Avx2 = avx2 ["avx2", "f16c"];
    /// AVX-512 as in x86-64-v4.
    #[cfg(target_arch = "x86_64")]
    Avx512 = avx512 ["avx2", "f16c", "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"];
}

impl Isa {
    /// Every instruction set that this CPU has.
    pub(super) fn available() -> impl DoubleEndedIterator<Item = Isa> {
        Isa::ALL.iter().copied().filter(|isa| isa.is_available())
    }

    /// The best one that this CPU has.
    pub(super) fn best() -> Isa {
        Isa::available().next_back().unwrap_or(Isa::Baseline)
    }
}

/// The kernel for `op` on `dtype`; `None` where the operator has no meaning.
pub(super) fn resolve(op: ReduceKind, dtype: DType, isa: Isa) -> Option<Kernel> {
    match dtype {
        DType::U8 => integer::<u8>(op, isa),
        DType::I8 => integer::<i8>(op, isa),
        DType::U16 => integer::<u16>(op, isa),
        DType::I16 => integer::<i16>(op, isa),
        DType::U32 => integer::<u32>(op, isa),
        DType::I32 => integer::<i32>(op, isa),
        DType::U64 => integer::<u64>(op, isa),
        DType::I64 => integer::<i64>(op, isa),
        DType::Bool => boolean(op, isa),
        DType::F16 => real::<Float16>(op, isa),
        DType::BF16 => real::<BFloat16>(op, isa),
        DType::F32 => real::<f32>(op, isa),
        DType::F64 => real::<f64>(op, isa),
        DType::C32 => number::<Complex<Float16>>(op, isa),
        DType::C64 => number::<Complex<f32>>(op, isa),
        DType::C128 => number::<Complex<f64>>(op, isa),
        DType::F8E4M3FN => real::<F8E4M3Fn>(op, isa),
        DType::F8E5M2 => real::<F8E5M2>(op, isa),
        DType::F8E4M3FNUZ => real::<F8E4M3FnUz>(op, isa),
        DType::F8E5M2FNUZ => real::<F8E5M2FnUz>(op, isa),
        DType::F8E8M0FNU | DType::F4E2M1FNX2 | DType::QI8 | DType::QU8 | DType::QI32 => None,
    }
}

fn number<E: Element>(op: ReduceKind, isa: Isa) -> Option<Kernel> {
    match op {
        ReduceKind::Sum | ReduceKind::Avg | ReduceKind::PremulSum => Some(isa.kernel::<E, Sum>()),
        ReduceKind::Product => Some(isa.kernel::<E, Product>()),
        _ => None,
    }
}

fn real<E: Element<Acc: Ordered>>(op: ReduceKind, isa: Isa) -> Option<Kernel> {
    match op {
        ReduceKind::Min => Some(isa.kernel::<E, Min>()),
        ReduceKind::Max => Some(isa.kernel::<E, Max>()),
        _ => number::<E>(op, isa),
    }
}

fn integer<E: Element<Acc: Ordered + super::element::Bits>>(
    op: ReduceKind,
    isa: Isa,
) -> Option<Kernel> {
    match op {
        ReduceKind::BitAnd => Some(isa.kernel::<E, And>()),
        ReduceKind::BitOr => Some(isa.kernel::<E, Or>()),
        ReduceKind::BitXor => Some(isa.kernel::<E, Xor>()),
        _ => real::<E>(op, isa),
    }
}

fn boolean(op: ReduceKind, isa: Isa) -> Option<Kernel> {
    match op {
        ReduceKind::Sum | ReduceKind::Max | ReduceKind::BitOr => Some(isa.kernel::<Bool, Or>()),
        ReduceKind::Product | ReduceKind::Min | ReduceKind::BitAnd => {
            Some(isa.kernel::<Bool, And>())
        }
        ReduceKind::BitXor => Some(isa.kernel::<Bool, Xor>()),
        ReduceKind::Avg | ReduceKind::PremulSum => None,
    }
}
