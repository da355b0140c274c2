//! AVX2 and F16C.

use std::arch::x86_64::*;

use super::super::element::{
    Addition, BFloat16, Bits, Bool, Float16, Multiplication, Order, Weighting,
};
use super::super::vector::{Pair, Vector};

integers! {
    U8(__m256i of u8): _mm256_add_epi8, mul_epi8, _mm256_min_epu8, _mm256_max_epu8;
    I8(__m256i of i8): _mm256_add_epi8, mul_epi8, _mm256_min_epi8, _mm256_max_epi8;
    U16(__m256i of u16): _mm256_add_epi16, _mm256_mullo_epi16, _mm256_min_epu16, _mm256_max_epu16;
    I16(__m256i of i16): _mm256_add_epi16, _mm256_mullo_epi16, _mm256_min_epi16, _mm256_max_epi16;
    U32(__m256i of u32): _mm256_add_epi32, _mm256_mullo_epi32, _mm256_min_epu32, _mm256_max_epu32;
    I32(__m256i of i32): _mm256_add_epi32, _mm256_mullo_epi32, _mm256_min_epi32, _mm256_max_epi32;
    U64(__m256i of u64): _mm256_add_epi64, mul_epi64, min_epu64, max_epu64;
    I64(__m256i of i64): _mm256_add_epi64, mul_epi64, min_epi64, max_epi64;
}

floats! {
    F32(__m256 of f32): _mm256_add_ps, _mm256_mul_ps, min_ps, max_ps, _mm256_div_ps, _mm256_set1_ps;
    F64(__m256d of f64): _mm256_add_pd, _mm256_mul_pd, min_pd, max_pd, _mm256_div_pd, _mm256_set1_pd;
}

operations! { U8: Bits { and = _mm256_and_si256, or = _mm256_or_si256, xor = _mm256_xor_si256 } }

functions! {
    // The instructions return `b` if one operand is NaN.
    min_ps(a, b: __m256) = _mm256_blendv_ps(_mm256_min_ps(a, b), a, _mm256_cmp_ps::<_CMP_UNORD_Q>(a, a));
    max_ps(a, b: __m256) = _mm256_blendv_ps(_mm256_max_ps(a, b), a, _mm256_cmp_ps::<_CMP_UNORD_Q>(a, a));
    min_pd(a, b: __m256d) = _mm256_blendv_pd(_mm256_min_pd(a, b), a, _mm256_cmp_pd::<_CMP_UNORD_Q>(a, a));
    max_pd(a, b: __m256d) = _mm256_blendv_pd(_mm256_max_pd(a, b), a, _mm256_cmp_pd::<_CMP_UNORD_Q>(a, a));

    // What AVX2 lacks.
    min_epi64(a, b: __m256i) = _mm256_blendv_epi8(a, b, _mm256_cmpgt_epi64(a, b));
    max_epi64(a, b: __m256i) = _mm256_blendv_epi8(b, a, _mm256_cmpgt_epi64(a, b));
    min_epu64(a, b: __m256i) = _mm256_blendv_epi8(a, b, greater_epu64(a, b));
    max_epu64(a, b: __m256i) = _mm256_blendv_epi8(b, a, greater_epu64(a, b));
    greater_epu64(a, b: __m256i) = {
        let sign = _mm256_set1_epi64x(i64::MIN);
        _mm256_cmpgt_epi64(_mm256_xor_si256(a, sign), _mm256_xor_si256(b, sign))
    };
    mul_epi8(a, b: __m256i) = {
        let even = _mm256_mullo_epi16(a, b);
        let odd = _mm256_mullo_epi16(_mm256_srli_epi16::<8>(a), _mm256_srli_epi16::<8>(b));
        _mm256_blendv_epi8(_mm256_slli_epi16::<8>(odd), even, _mm256_set1_epi16(0xff))
    };
    mul_epi64(a, b: __m256i) = {
        let (high_a, high_b) = (_mm256_srli_epi64::<32>(a), _mm256_srli_epi64::<32>(b));
        let cross = _mm256_add_epi64(_mm256_mul_epu32(high_a, b), _mm256_mul_epu32(a, high_b));
        _mm256_add_epi64(_mm256_mul_epu32(a, b), _mm256_slli_epi64::<32>(cross))
    };
}

/// Booleans, as 0 and 1.
pub(in super::super) struct Bools;

impl Vector for Bools {
    type Element = Bool;
    type Raw = U8;
    type Acc = U8;

    #[inline(always)]
    unsafe fn widen(raw: U8) -> U8 {
        // SAFETY: the caller vouches for the instruction set.
        unsafe { U8(_mm256_min_epu8(raw.0, _mm256_set1_epi8(1))) }
    }
    #[inline(always)]
    fn narrow(acc: U8) -> U8 {
        acc
    }
}

/// `float16`.
pub(in super::super) struct F16;

impl Vector for F16 {
    type Element = Float16;
    type Raw = __m128i;
    type Acc = F32;

    #[inline(always)]
    unsafe fn widen(raw: __m128i) -> F32 {
        // SAFETY: the caller vouches for the instruction set.
        unsafe { F32(_mm256_cvtph_ps(raw)) }
    }
    #[inline(always)]
    fn narrow(acc: F32) -> __m128i {
        // SAFETY: the CPU has the instruction set, or there would be no accumulators.
        unsafe { _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(acc.0) }
    }
}

/// `bfloat16`: those at even places and those at odd places, so that none has to change its
/// place between 16-bit and 32-bit lanes.
pub(in super::super) struct BF16;

impl Vector for BF16 {
    type Element = BFloat16;
    type Raw = __m256i;
    type Acc = Pair<F32>;

    #[inline(always)]
    unsafe fn widen(pairs: __m256i) -> Pair<F32> {
        // SAFETY: the caller vouches for the instruction set.
        unsafe {
            let even = _mm256_slli_epi32::<16>(pairs);
            let odd = _mm256_blend_epi16::<0b1010_1010>(_mm256_setzero_si256(), pairs);
            Pair(
                F32(_mm256_castsi256_ps(even)),
                F32(_mm256_castsi256_ps(odd)),
            )
        }
    }

    #[inline(always)]
    fn narrow(Pair(even, odd): Pair<F32>) -> __m256i {
        // SAFETY: the CPU has the instruction set, or there would be no accumulators.
        unsafe {
            let even = _mm256_srli_epi32::<16>(round_to_bf16(even.0));
            let odd = round_to_bf16(odd.0);
            _mm256_blend_epi16::<0b1010_1010>(even, odd)
        }
    }
}

/// As [`super::super::minifloat::encode_bf16`], but into the upper halves.
#[inline(always)]
unsafe fn round_to_bf16(values: __m256) -> __m256i {
    // SAFETY: the CPU has the instruction set, or there would be no accumulators.
    unsafe {
        let bits = _mm256_castps_si256(values);
        let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
        _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd)
    }
}
