//! Which operators there are for which element types, and by which kernel.

use super::block::Block;
use super::element::{
    Addition, Bits, Complex, Element, F8E4M3Fn, F8E4M3FnUz, F8E5M2, F8E5M2FnUz, Float16,
    Multiplication, Order, Weighting,
};
#[cfg(target_arch = "x86_64")]
use super::isa::{Avx2, Avx512};
use super::isa::{Baseline, InstructionSet, Isa, Kernel, Level};
use super::kernel::Operand;
use super::operator::{And, Max, Min, Or, Product, Sum, WeightedSum, Xor};
use crate::{DType, ReduceKind};

/// The kernel for `op` on `dtype`; `None` where the operator has no meaning.
pub(super) fn resolve(op: ReduceKind, dtype: DType, isa: Isa) -> Option<Kernel> {
    let few = baseline(op, dtype)?;
    let many = match isa.0 {
        Level::Baseline => few,
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 => avx2(op, dtype)?,
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 => avx512(op, dtype)?,
    };
    Some(Kernel {
        reduce_few: few.reduce,
        ..many
    })
}

/// Defines the table of an instruction set from the names in a module.
macro_rules! tables {
    ($($(#[$meta:meta])* $name:ident: $isa:ident, $vectors:path;)*) => {$(
        $(#[$meta])*
        fn $name(op: ReduceKind, dtype: DType) -> Option<Kernel> {
            use $vectors as v;
            match dtype {
                DType::U8 => integer::<$isa, u8, v::U8, v::U8>(op),
                DType::I8 => integer::<$isa, i8, v::I8, v::U8>(op),
                DType::U16 => integer::<$isa, u16, v::U16, v::U8>(op),
                DType::I16 => integer::<$isa, i16, v::I16, v::U8>(op),
                DType::U32 => integer::<$isa, u32, v::U32, v::U8>(op),
                DType::I32 => integer::<$isa, i32, v::I32, v::U8>(op),
                DType::U64 => integer::<$isa, u64, v::U64, v::U8>(op),
                DType::I64 => integer::<$isa, i64, v::I64, v::U8>(op),
                DType::Bool => boolean::<$isa, v::Bools>(op),
                DType::F16 => float::<$isa, v::F16>(op),
                DType::BF16 => float::<$isa, v::BF16>(op),
                DType::F32 => float::<$isa, v::F32>(op),
                DType::F64 => float::<$isa, v::F64>(op),
                DType::C32 => complex::<$isa, Float16, v::F16>(op),
                DType::C64 => complex::<$isa, f32, v::F32>(op),
                DType::C128 => complex::<$isa, f64, v::F64>(op),
                DType::F8E4M3FN => float::<$isa, Block<F8E4M3Fn>>(op),
                DType::F8E5M2 => float::<$isa, Block<F8E5M2>>(op),
                DType::F8E4M3FNUZ => float::<$isa, Block<F8E4M3FnUz>>(op),
                DType::F8E5M2FNUZ => float::<$isa, Block<F8E5M2FnUz>>(op),
                DType::F8E8M0FNU
                | DType::F4E2M1FNX2
                | DType::QI8
                | DType::QU8
                | DType::QI32 => None,
            }
        }
    )*};
}

tables! {
    baseline: Baseline, super::block;
    #[cfg(target_arch = "x86_64")]
    avx2: Avx2, super::x86::avx2;
    #[cfg(target_arch = "x86_64")]
    avx512: Avx512, super::x86::avx512;
}

/// Integers of type `E`, in vectors `V`; their bytes in vectors `B`.
fn integer<I, E, V, B>(op: ReduceKind) -> Option<Kernel>
where
    I: InstructionSet,
    E: Element<Acc: Weighting>,
    V: Operand<Acc: Addition + Multiplication + Order>,
    B: Operand<Acc: Bits>,
{
    // Bits are the same in bytes.
    let in_bytes = |kernel| {
        Some(Kernel {
            parts: size_of::<E>(),
            ..kernel
        })
    };
    match op {
        ReduceKind::Sum => Some(I::kernel::<V, Sum>()),
        // No CPU has vector instructions to divide integers.
        ReduceKind::Avg | ReduceKind::PremulSum => Some(I::kernel::<Block<E>, WeightedSum>()),
        ReduceKind::Product => Some(I::kernel::<V, Product>()),
        ReduceKind::Min => Some(I::kernel::<V, Min>()),
        ReduceKind::Max => Some(I::kernel::<V, Max>()),
        ReduceKind::BitAnd => in_bytes(I::kernel::<B, And>()),
        ReduceKind::BitOr => in_bytes(I::kernel::<B, Or>()),
        ReduceKind::BitXor => in_bytes(I::kernel::<B, Xor>()),
    }
}

fn boolean<I: InstructionSet, V: Operand<Acc: Bits>>(op: ReduceKind) -> Option<Kernel> {
    match op {
        ReduceKind::Sum | ReduceKind::Max | ReduceKind::BitOr => Some(I::kernel::<V, Or>()),
        ReduceKind::Product | ReduceKind::Min | ReduceKind::BitAnd => Some(I::kernel::<V, And>()),
        ReduceKind::BitXor => Some(I::kernel::<V, Xor>()),
        ReduceKind::Avg | ReduceKind::PremulSum => None,
    }
}

fn float<I, V>(op: ReduceKind) -> Option<Kernel>
where
    I: InstructionSet,
    V: Operand<Acc: Weighting + Multiplication + Order>,
{
    match op {
        ReduceKind::Sum => Some(I::kernel::<V, Sum>()),
        ReduceKind::Avg | ReduceKind::PremulSum => Some(I::kernel::<V, WeightedSum>()),
        ReduceKind::Product => Some(I::kernel::<V, Product>()),
        ReduceKind::Min => Some(I::kernel::<V, Min>()),
        ReduceKind::Max => Some(I::kernel::<V, Max>()),
        ReduceKind::BitAnd | ReduceKind::BitOr | ReduceKind::BitXor => None,
    }
}

/// Complex numbers whose parts are of type `E`, in vectors `V`.
fn complex<I, E, V>(op: ReduceKind) -> Option<Kernel>
where
    I: InstructionSet,
    E: Element,
    Complex<E>: Element<Acc: Multiplication>,
    V: Operand<Acc: Weighting>,
{
    // Sums, factors and divisors treat both parts alike.
    let in_parts = |kernel| Some(Kernel { parts: 2, ..kernel });
    match op {
        ReduceKind::Sum => in_parts(I::kernel::<V, Sum>()),
        ReduceKind::Avg | ReduceKind::PremulSum => in_parts(I::kernel::<V, WeightedSum>()),
        ReduceKind::Product => Some(I::kernel::<Block<Complex<E>>, Product>()),
        _ => None,
    }
}
