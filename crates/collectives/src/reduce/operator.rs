//! Operators as types, so that each kernel is compiled for one.

use super::element::{Bits, Number, Ordered};

/// Combines two accumulators.
pub(super) trait Operator<A>: 'static {
    /// Whether factors may be applied before and a division after.
    const LINEAR: bool;
    fn combine(left: A, right: A) -> A;
}

macro_rules! operators {
    ($($(#[$meta:meta])* $name:ident: $bound:ident::$method:ident, linear $linear:literal;)*) => {$(
        $(#[$meta])*
        pub(super) struct $name;

        impl<A: $bound> Operator<A> for $name {
            const LINEAR: bool = $linear;
            #[inline(always)]
            fn combine(left: A, right: A) -> A {
                left.$method(right)
            }
        }
    )*};
}

operators! {
    /// Also the sum that `AVG` divides and `PREMUL_SUM` scales.
    Sum: Number::add, linear true;
    Product: Number::mul, linear false;
    Min: Ordered::min, linear false;
    Max: Ordered::max, linear false;
    And: Bits::and, linear false;
    Or: Bits::or, linear false;
    Xor: Bits::xor, linear false;
}
