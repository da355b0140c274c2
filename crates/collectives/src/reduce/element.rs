//! Element types: how they are stored, and in what type they are reduced.

use std::ops::Sub;

use super::minifloat::{self, Format, Specials};

/// An element as it lies in memory.
pub(super) trait Element: Copy + 'static {
    /// The type of the accumulation.
    type Acc: Number;
    /// Converts for accumulation, exactly.
    fn widen(self) -> Self::Acc;
    /// Converts a result back, rounding once.
    fn narrow(acc: Self::Acc) -> Self;
}

/// Accumulators with an arithmetic.
pub(super) trait Number: Copy {
    /// What `PREMUL_SUM` multiplies by.
    type Factor: Copy;
    fn factor(factor: f64) -> Self::Factor;
    fn scale(self, factor: Self::Factor) -> Self;
    fn divide(self, divisor: u32) -> Self;
    fn add(self, other: Self) -> Self;
    fn mul(self, other: Self) -> Self;
}

/// Accumulators with an order.
pub(super) trait Ordered: Copy {
    fn min(self, other: Self) -> Self;
    fn max(self, other: Self) -> Self;
}

/// Accumulators made of bits.
pub(super) trait Bits: Copy {
    fn and(self, other: Self) -> Self;
    fn or(self, other: Self) -> Self;
    fn xor(self, other: Self) -> Self;
}

macro_rules! integers {
    ($($int:ident divided as $wide:ident;)*) => {$(
        impl Element for $int {
            type Acc = $int;
            #[inline(always)]
            fn widen(self) -> $int {
                self
            }
            #[inline(always)]
            fn narrow(acc: $int) -> $int {
                acc
            }
        }

        impl Number for $int {
            type Factor = $int;
            #[inline(always)]
            fn factor(factor: f64) -> $int {
                factor as $int
            }
            #[inline(always)]
            fn scale(self, factor: $int) -> $int {
                self.wrapping_mul(factor)
            }
            #[inline(always)]
            fn divide(self, divisor: u32) -> $int {
                (self as $wide / divisor as $wide) as $int
            }
            #[inline(always)]
            fn add(self, other: $int) -> $int {
                self.wrapping_add(other)
            }
            #[inline(always)]
            fn mul(self, other: $int) -> $int {
                self.wrapping_mul(other)
            }
        }

        impl Ordered for $int {
            #[inline(always)]
            fn min(self, other: $int) -> $int {
                Ord::min(self, other)
            }
            #[inline(always)]
            fn max(self, other: $int) -> $int {
                Ord::max(self, other)
            }
        }

        impl Bits for $int {
            #[inline(always)]
            fn and(self, other: $int) -> $int {
                self & other
            }
            #[inline(always)]
            fn or(self, other: $int) -> $int {
                self | other
            }
            #[inline(always)]
            fn xor(self, other: $int) -> $int {
                self ^ other
            }
        }
    )*};
}

// CPUs have no vector division of integers. Both operands are exact in `f64`, and a
// quotient below an integer is below it by at least 1/divisor, which is more than `f64`
// rounds off: the truncation is exact.
integers! {
    u8 divided as f64;
    i8 divided as f64;
    u16 divided as f64;
    i16 divided as f64;
    u32 divided as f64;
    i32 divided as f64;
    u64 divided as u64;
    i64 divided as i64;
}

macro_rules! floats {
    ($($float:ident)*) => {$(
        impl Element for $float {
            type Acc = $float;
            #[inline(always)]
            fn widen(self) -> $float {
                self
            }
            #[inline(always)]
            fn narrow(acc: $float) -> $float {
                acc
            }
        }

        impl Number for $float {
            type Factor = $float;
            #[inline(always)]
            fn factor(factor: f64) -> $float {
                factor as $float
            }
            #[inline(always)]
            fn scale(self, factor: $float) -> $float {
                self * factor
            }
            #[inline(always)]
            fn divide(self, divisor: u32) -> $float {
                self / divisor as $float
            }
            #[inline(always)]
            fn add(self, other: $float) -> $float {
                self + other
            }
            #[inline(always)]
            fn mul(self, other: $float) -> $float {
                self * other
            }
        }

        // A comparison with NaN is false, so `other` wins if it is NaN; what remains is
        // NaN in `self`.
        impl Ordered for $float {
            #[inline(always)]
            fn min(self, other: $float) -> $float {
                let least = if self < other { self } else { other };
                if self.is_nan() { self } else { least }
            }
            #[inline(always)]
            fn max(self, other: $float) -> $float {
                let greatest = if self > other { self } else { other };
                if self.is_nan() { self } else { greatest }
            }
        }
    )*};
}

floats! { f32 f64 }

/// `bfloat16`.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(super) struct BFloat16(u16);

impl Element for BFloat16 {
    type Acc = f32;
    #[inline(always)]
    fn widen(self) -> f32 {
        minifloat::decode_bf16(self.0)
    }
    #[inline(always)]
    fn narrow(acc: f32) -> BFloat16 {
        BFloat16(minifloat::encode_bf16(acc))
    }
}

macro_rules! minifloats {
    ($($(#[$meta:meta])* $name:ident($int:ident, mantissa $mantissa:literal, bias $bias:literal, $specials:ident);)*) => {$(
        $(#[$meta])*
        #[derive(Clone, Copy)]
        #[repr(transparent)]
        pub(super) struct $name($int);

        impl Format for $name {
            const BITS: u32 = $int::BITS;
            const MANTISSA: u32 = $mantissa;
            const BIAS: u32 = $bias;
            const SPECIALS: Specials = Specials::$specials;
        }

        impl Element for $name {
            type Acc = f32;
            #[inline(always)]
            fn widen(self) -> f32 {
                minifloat::decode::<$name>(self.0.into())
            }
            #[inline(always)]
            fn narrow(acc: f32) -> $name {
                $name(minifloat::encode::<$name>(acc) as $int)
            }
        }
    )*};
}

minifloats! {
    /// `float16`.
    Float16(u16, mantissa 10, bias 15, Ieee);
    /// `float8_e5m2`.
    F8E5M2(u8, mantissa 2, bias 15, Ieee);
    /// `float8_e5m2fnuz`.
    F8E5M2FnUz(u8, mantissa 2, bias 16, FiniteUnsignedZero);
    /// `float8_e4m3fn`.
    F8E4M3Fn(u8, mantissa 3, bias 7, Finite);
    /// `float8_e4m3fnuz`.
    F8E4M3FnUz(u8, mantissa 3, bias 8, FiniteUnsignedZero);
}

/// A complex number, of elements or of accumulators.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct Complex<T> {
    re: T,
    im: T,
}

impl<E: Element<Acc: Sub<Output = E::Acc>>> Element for Complex<E> {
    type Acc = Complex<E::Acc>;
    #[inline(always)]
    fn widen(self) -> Complex<E::Acc> {
        Complex {
            re: self.re.widen(),
            im: self.im.widen(),
        }
    }
    #[inline(always)]
    fn narrow(acc: Complex<E::Acc>) -> Complex<E> {
        Complex {
            re: E::narrow(acc.re),
            im: E::narrow(acc.im),
        }
    }
}

impl<T: Number + Sub<Output = T>> Number for Complex<T> {
    type Factor = T::Factor;
    #[inline(always)]
    fn factor(factor: f64) -> T::Factor {
        T::factor(factor)
    }
    #[inline(always)]
    fn scale(self, factor: T::Factor) -> Complex<T> {
        Complex {
            re: self.re.scale(factor),
            im: self.im.scale(factor),
        }
    }
    #[inline(always)]
    fn divide(self, divisor: u32) -> Complex<T> {
        Complex {
            re: self.re.divide(divisor),
            im: self.im.divide(divisor),
        }
    }
    #[inline(always)]
    fn add(self, other: Complex<T>) -> Complex<T> {
        Complex {
            re: self.re.add(other.re),
            im: self.im.add(other.im),
        }
    }
    #[inline(always)]
    fn mul(self, other: Complex<T>) -> Complex<T> {
        Complex {
            re: self.re.mul(other.re) - self.im.mul(other.im),
            im: self.re.mul(other.im).add(self.im.mul(other.re)),
        }
    }
}

/// `bool`; any byte other than 0 is true.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(super) struct Bool(u8);

impl Element for Bool {
    type Acc = u8;
    #[inline(always)]
    fn widen(self) -> u8 {
        u8::from(self.0 != 0)
    }
    #[inline(always)]
    fn narrow(acc: u8) -> Bool {
        Bool(acc)
    }
}
