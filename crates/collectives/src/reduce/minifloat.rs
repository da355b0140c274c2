//! Floats of 8 and 16 bits: exact conversion to `f32`, and back with one rounding.
//!
//! Written without branches so that loops over them become vector code, and without
//! denormal `f32` operands so that a thread that flushes denormals gets the same answers.

/// What a format does with its largest codes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Specials {
    /// The largest exponent is infinity and NaNs (IEEE 754).
    Ieee,
    /// No infinity; all ones is NaN, and what overflows is the largest number ("fn").
    Finite,
    /// No infinity and no negative zero, whose code is NaN, also for what overflows ("fnuz").
    FiniteUnsignedZero,
}

/// A format of `BITS` bits with `MANTISSA` explicit mantissa bits.
pub(super) trait Format: Copy + 'static {
    const BITS: u32;
    const MANTISSA: u32;
    const BIAS: u32;
    const SPECIALS: Specials;
}

/// Widens a code; the bits above `F::BITS` are zero.
#[inline(always)]
pub(super) fn decode<F: Format>(code: u32) -> f32 {
    let sign_bit = 1 << (F::BITS - 1);
    let magnitude = code & (sign_bit - 1);
    let sign = (code & sign_bit) << (32 - F::BITS);
    let aligned = magnitude << (23 - F::MANTISSA);
    // The smallest normal number: adding the mantissa to it and subtracting it again
    // normalises a subnormal.
    let tiny = (128 - F::BIAS) << 23;
    let subnormal = (f32::from_bits(aligned + tiny) - f32::from_bits(tiny)).to_bits();
    let normal = aligned + ((127 - F::BIAS) << 23);
    let finite = if magnitude < 1 << F::MANTISSA {
        subnormal
    } else {
        normal
    };
    let bits = match F::SPECIALS {
        Specials::Ieee if magnitude >= infinity::<F>() => aligned | 0x7f80_0000,
        Specials::Finite if magnitude == sign_bit - 1 => 0x7fc0_0000,
        Specials::FiniteUnsignedZero if code == sign_bit => 0x7fc0_0000,
        _ => finite,
    };
    f32::from_bits(bits | sign)
}

/// Narrows to the nearest code, ties to even, as PyTorch 2.15 casts.
#[inline(always)]
pub(super) fn encode<F: Format>(value: f32) -> u32 {
    let sign_bit = 1 << (F::BITS - 1);
    let shift = 23 - F::MANTISSA;
    let magnitude = value.to_bits() & 0x7fff_ffff;
    let sign = (value.to_bits() >> (32 - F::BITS)) & sign_bit;
    let odd = (magnitude >> shift) & 1;
    let normal = magnitude
        .wrapping_sub((127 - F::BIAS) << 23)
        .wrapping_add((1 << (shift - 1)) - 1 + odd)
        >> shift;
    // The unit in the last place of `coarse` is the smallest subnormal, so the addition
    // rounds to one.
    let coarse = (151 - F::BIAS - F::MANTISSA) << 23;
    let subnormal = (f32::from_bits(magnitude) + f32::from_bits(coarse))
        .to_bits()
        .wrapping_sub(coarse);
    let rounded = if magnitude < (128 - F::BIAS) << 23 {
        subnormal
    } else {
        normal
    };
    let (overflow, nan) = match F::SPECIALS {
        Specials::Ieee => (infinity::<F>(), infinity::<F>() | 1 << (F::MANTISSA - 1)),
        Specials::Finite => (sign_bit - 2, sign_bit - 1),
        Specials::FiniteUnsignedZero => (sign_bit, sign_bit),
    };
    let code = if magnitude > 0x7f80_0000 {
        nan
    } else {
        rounded.min(overflow)
    };
    match F::SPECIALS {
        // Zero and NaN have one code each.
        Specials::FiniteUnsignedZero if code == 0 || code == sign_bit => code,
        _ => code | sign,
    }
}

const fn infinity<F: Format>() -> u32 {
    (1 << (F::BITS - 1)) - (1 << F::MANTISSA)
}

/// `bfloat16` to `f32`.
#[inline(always)]
pub(super) fn decode_bf16(code: u16) -> f32 {
    f32::from_bits(u32::from(code) << 16)
}

/// `f32` to the nearest `bfloat16`, ties to even; denormals are kept.
///
/// A NaN must be quiet and have no payload in its lower half, or it could be rounded to
/// something else. That holds for all NaNs that come from a `bfloat16` or from arithmetic.
#[inline(always)]
pub(super) fn encode_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    (bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16) as u16
}
