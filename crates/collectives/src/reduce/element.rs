//! Element types: how they are stored, and in what type they are reduced.

use std::ops::{Add, Mul, Sub};

use super::minifloat::{self, Format, Specials};

/// An element as it lies in memory.
pub(super) trait Element: Copy {
    /// The type of the accumulation.
    type Acc: Copy;
    /// Converts for accumulation, exactly.
    fn widen(self) -> Self::Acc;
    /// Converts a result back, rounding once.
    fn narrow(acc: Self::Acc) -> Self;
}

/// Accumulators, or vectors of them, that can be added.
pub(super) trait Addition: Copy {
    fn add(self, other: Self) -> Self;
}

/// Sums that can be weighted.
pub(super) trait Weighting: Addition {
    /// Multiplies by a factor of `PREMUL_SUM`.
    fn scale(self, factor: f64) -> Self;
    /// Divides by the number of ranks.
    fn divide(self, divisor: u32) -> Self;
}

/// Accumulators, or vectors of them, that can be multiplied.
pub(super) trait Multiplication: Copy {
    fn multiply(self, other: Self) -> Self;
}

/// Accumulators, or vectors of them, with an order.
pub(super) trait Order: Copy {
    fn least(self, other: Self) -> Self;
    fn greatest(self, other: Self) -> Self;
}

/// Accumulators, or vectors of them, made of bits.
pub(super) trait Bits: Copy {
    fn and(self, other: Self) -> Self;
    fn or(self, other: Self) -> Self;
    fn xor(self, other: Self) -> Self;
}

macro_rules! identity {
    ($type:ident) => {
        impl Element for $type {
            type Acc = $type;
            #[inline(always)]
            fn widen(self) -> $type {
                self
            }
            #[inline(always)]
            fn narrow(acc: $type) -> $type {
                acc
            }
        }
    };
}

macro_rules! integers {
    ($($int:ident($number:ident, $divisor:ident) => $quotient:expr;)*) => {$(
        identity! { $int }

        impl Multiplication for $int {
            #[inline(always)]
            fn multiply(self, other: $int) -> $int {
                self.wrapping_mul(other)
            }
        }

        impl Addition for $int {
            #[inline(always)]
            fn add(self, other: $int) -> $int {
                self.wrapping_add(other)
            }
        }

        impl Weighting for $int {
            #[inline(always)]
            fn scale(self, factor: f64) -> $int {
                self.wrapping_mul(factor as $int)
            }
            #[inline(always)]
            fn divide(self, $divisor: u32) -> $int {
                let $number = self;
                $quotient
            }
        }

        impl Order for $int {
            #[inline(always)]
            fn least(self, other: $int) -> $int {
                self.min(other)
            }
            #[inline(always)]
            fn greatest(self, other: $int) -> $int {
                self.max(other)
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

/// Divides integers as floats: vector instructions divide those only.
///
/// The quotient truncates right where it is exact, or too far below the next integer to be
/// rounded to it. It is below by 1/divisor or more, and rounding moves it by less than 2^-24
/// (`f32`) or 2^-53 (`f64`) of itself: right for integers of 16 and 32 bits. (A divisor that `f32`
/// cannot hold is so large that the quotient is 0 anyway.)
macro_rules! divide_as {
    ($float:ident, $int:ident, $number:ident, $divisor:ident) => {
        // SAFETY: the quotient is between 0 and the number.
        unsafe { ($number as $float / $divisor as $float).to_int_unchecked::<$int>() as _ }
    };
}

integers! {
    u8(number, divisor) => divide_as!(f32, i32, number, divisor);
    i8(number, divisor) => divide_as!(f32, i32, number, divisor);
    u16(number, divisor) => divide_as!(f32, i32, number, divisor);
    i16(number, divisor) => divide_as!(f32, i32, number, divisor);
    u32(number, divisor) => divide_as!(f64, i64, number, divisor);
    i32(number, divisor) => divide_as!(f64, i32, number, divisor);
    u64(number, divisor) => number / u64::from(divisor);
    i64(number, divisor) => number / i64::from(divisor);
}

macro_rules! floats {
    ($($float:ident)*) => {$(
        identity! { $float }

        impl Multiplication for $float {
            #[inline(always)]
            fn multiply(self, other: $float) -> $float {
                self * other
            }
        }

        impl Addition for $float {
            #[inline(always)]
            fn add(self, other: $float) -> $float {
                self + other
            }
        }

        impl Weighting for $float {
            #[inline(always)]
            fn scale(self, factor: f64) -> $float {
                // One NaN only: `bfloat16` has no room for the payload of another.
                self * if factor.is_nan() { $float::NAN } else { factor as $float }
            }
            #[inline(always)]
            fn divide(self, divisor: u32) -> $float {
                if divisor.is_power_of_two() {
                    // Its reciprocal is exact, and multiplication several times as fast.
                    self * (divisor as $float).recip()
                } else {
                    self / divisor as $float
                }
            }
        }

        // A comparison with NaN is false, so `other` wins if it is NaN; what remains is
        // NaN in `self`.
        impl Order for $float {
            #[inline(always)]
            fn least(self, other: $float) -> $float {
                let least = if self < other { self } else { other };
                if self.is_nan() { self } else { least }
            }
            #[inline(always)]
            fn greatest(self, other: $float) -> $float {
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

impl<E: Element> Element for Complex<E> {
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

impl<T> Multiplication for Complex<T>
where
    T: Copy + Add<Output = T> + Sub<Output = T> + Mul<Output = T>,
{
    #[inline(always)]
    fn multiply(self, other: Complex<T>) -> Complex<T> {
        Complex {
            re: self.re * other.re - self.im * other.im,
            im: self.re * other.im + self.im * other.re,
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
