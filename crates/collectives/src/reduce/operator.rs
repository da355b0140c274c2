//! Operators as types, so that each kernel is compiled for one.

use super::element::{Addition, Bits, Multiplication, Order, Weighting};

/// Combines accumulators, or vectors of them.
pub(super) trait Operator<A> {
    fn combine(left: A, right: A) -> A;

    /// Multiplies an operand by a factor of `PREMUL_SUM`.
    #[inline(always)]
    fn scale(operand: A, _factor: f64) -> A {
        operand
    }

    /// Divides a result by the number of ranks.
    #[inline(always)]
    fn divide(result: A, _divisor: u32) -> A {
        result
    }
}

/// `AVG` and `PREMUL_SUM`.
pub(super) struct WeightedSum;

impl<A: Weighting> Operator<A> for WeightedSum {
    #[inline(always)]
    fn combine(left: A, right: A) -> A {
        left.add(right)
    }
    #[inline(always)]
    fn scale(operand: A, factor: f64) -> A {
        operand.scale(factor)
    }
    #[inline(always)]
    fn divide(result: A, divisor: u32) -> A {
        result.divide(divisor)
    }
}

macro_rules! operators {
    ($($(#[$meta:meta])* $name:ident: $bound:ident::$method:ident;)*) => {$(
        $(#[$meta])*
        pub(super) struct $name;

        impl<A: $bound> Operator<A> for $name {
            #[inline(always)]
            fn combine(left: A, right: A) -> A {
                left.$method(right)
            }
        }
    )*};
}

operators! {
    /// `SUM`.
    Sum: Addition::add;
    /// `PRODUCT`.
    Product: Multiplication::multiply;
    /// `MIN`.
    Min: Order::least;
    /// `MAX`.
    Max: Order::greatest;
    /// `BAND`.
    And: Bits::and;
    /// `BOR`.
    Or: Bits::or;
    /// `BXOR`.
    Xor: Bits::xor;
}
