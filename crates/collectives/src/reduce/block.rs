//! The kernel for any element type and CPU: loops that the compiler turns into vector code.

use std::marker::PhantomData;
use std::mem::MaybeUninit;

use super::element::{self, BFloat16, Element, Float16};
use super::kernel::{Operand, Operands};
use super::operator::Operator;

/// Elements that are accumulated before a result is stored: few enough that accumulators of
/// 16 bytes stay in the first-level cache, many enough that starting over costs nothing.
const BLOCK: usize = 256;

/// Elements reduced a block at a time, in accumulators of their own.
///
/// Nothing is stored before all sources have been read, so a destination may be a source; and
/// as the accumulators overlap nothing else, the compiler can use the longest vectors that the
/// CPU has.
pub(super) struct Block<E>(PhantomData<E>);

impl<E: Element> Operand for Block<E> {
    type Acc = E::Acc;
    const SHORTEST: usize = 0;

    #[inline(always)]
    unsafe fn reduce<O: Operator<E::Acc>>(operands: Operands<'_>) {
        let Operands {
            dsts,
            srcs,
            count,
            scales,
            divisor,
        } = operands;
        let mut block = [const { MaybeUninit::<E::Acc>::uninit() }; BLOCK];
        for start in (0..count).step_by(BLOCK) {
            let acc = &mut block[..BLOCK.min(count - start)];
            let operand = |source: usize| {
                let src = srcs[source].cast::<E>().wrapping_add(start);
                let factor = scales.get(source).copied().unwrap_or(1.0);
                // SAFETY: the caller vouches for `count` elements; `start + i` is one of them.
                move |i| O::scale(unsafe { src.add(i).read_unaligned() }.widen(), factor)
            };
            let first = operand(0);
            if srcs.len() == 1 {
                for (i, acc) in acc.iter_mut().enumerate() {
                    acc.write(first(i));
                }
            } else {
                let second = operand(1);
                for (i, acc) in acc.iter_mut().enumerate() {
                    acc.write(O::combine(first(i), second(i)));
                }
            }
            for source in 2..srcs.len() {
                let next = operand(source);
                for (i, acc) in acc.iter_mut().enumerate() {
                    // SAFETY: written above.
                    acc.write(O::combine(unsafe { acc.assume_init() }, next(i)));
                }
            }
            if let Some(divisor) = divisor {
                for acc in acc.iter_mut() {
                    // SAFETY: written above.
                    acc.write(O::divide(unsafe { acc.assume_init() }, divisor));
                }
            }
            for dst in dsts {
                let dst = dst.cast::<E>().wrapping_add(start);
                for (i, acc) in acc.iter().enumerate() {
                    // SAFETY: as for the sources; the accumulator was written above.
                    unsafe { dst.add(i).write_unaligned(E::narrow(acc.assume_init())) };
                }
            }
        }
    }
}

macro_rules! names {
    ($($name:ident = $element:ty;)*) => {
        $(pub(super) type $name = Block<$element>;)*
    };
}

// As vectors are called.
names! {
    U8 = u8;
    I8 = i8;
    U16 = u16;
    I16 = i16;
    U32 = u32;
    I32 = i32;
    U64 = u64;
    I64 = i64;
    Bools = element::Bool;
    F16 = Float16;
    BF16 = BFloat16;
    F32 = f32;
    F64 = f64;
}
