//! Vectors of x86-64, under the same names for each instruction set.
//!
//! None of these functions enables its instruction set: they are all inlined into kernels that
//! do.

/// Implements a trait of binary operations.
macro_rules! operations {
    ($vector:ident: $trait:ident { $($method:ident = $intrinsic:ident),* }) => {
        impl $trait for $vector {
            $(
                #[inline(always)]
                fn $method(self, other: $vector) -> $vector {
                    // SAFETY: the CPU has the instruction set, or there would be no accumulators.
                    unsafe { $vector($intrinsic(self.0, other.0)) }
                }
            )*
        }
    };
}

/// Defines a vector whose accumulators are its elements.
macro_rules! vector {
    ($vector:ident($register:ident of $element:ident)) => {
        #[derive(Clone, Copy)]
        pub(in super::super) struct $vector($register);

        impl Vector for $vector {
            type Element = $element;
            type Raw = $vector;
            type Acc = $vector;

            #[inline(always)]
            unsafe fn widen(raw: $vector) -> $vector {
                raw
            }
            #[inline(always)]
            fn narrow(acc: $vector) -> $vector {
                acc
            }
        }
    };
}

/// Defines vectors of integers and their operations.
macro_rules! integers {
    ($(
        $vector:ident($register:ident of $element:ident):
        $add:ident, $multiply:ident, $min:ident, $max:ident;
    )*) => {$(
        vector! { $vector($register of $element) }
        operations! { $vector: Addition { add = $add } }
        operations! { $vector: Multiplication { multiply = $multiply } }
        operations! { $vector: Order { least = $min, greatest = $max } }
    )*};
}

/// Defines vectors of floats and their operations.
macro_rules! floats {
    ($(
        $vector:ident($register:ident of $element:ident):
        $add:ident, $multiply:ident, $min:ident, $max:ident, $divide:ident, $splat:ident;
    )*) => {$(
        vector! { $vector($register of $element) }
        operations! { $vector: Addition { add = $add } }
        operations! { $vector: Multiplication { multiply = $multiply } }
        operations! { $vector: Order { least = $min, greatest = $max } }

        impl Weighting for $vector {
            #[inline(always)]
            fn scale(self, factor: f64) -> $vector {
                let factor = if factor.is_nan() { $element::NAN } else { factor as $element };
                // SAFETY: the CPU has the instruction set, or there would be no accumulators.
                unsafe { $vector($multiply(self.0, $splat(factor))) }
            }

            #[inline(always)]
            fn divide(self, divisor: u32) -> $vector {
                // SAFETY: as above.
                unsafe {
                    let divided = if divisor.is_power_of_two() {
                        $multiply(self.0, $splat((divisor as $element).recip()))
                    } else {
                        $divide(self.0, $splat(divisor as $element))
                    };
                    $vector(divided)
                }
            }
        }
    )*};
}

/// Implements a function of two registers.
macro_rules! functions {
    ($($(#[$meta:meta])* $name:ident($a:ident, $b:ident: $register:ident) = $value:expr;)*) => {$(
        $(#[$meta])*
        #[inline(always)]
        unsafe fn $name($a: $register, $b: $register) -> $register {
            // SAFETY: the CPU has the instruction set, or there would be no accumulators.
            unsafe { $value }
        }
    )*};
}

pub(super) mod avx2;
pub(super) mod avx512;
