//! AVX-512 F, BW, DQ and BF16.

use std::arch::x86_64::*;
use std::sync::atomic::{Ordering, compiler_fence};

use super::super::element::{
    Addition, BFloat16, Bits, Bool, Float16, Multiplication, Order, Weighting,
};
use super::super::vector::{Pair, Vector};

integers! {
    U8(__m512i of u8): _mm512_add_epi8, mul_epi8, _mm512_min_epu8, _mm512_max_epu8;
    I8(__m512i of i8): _mm512_add_epi8, mul_epi8, _mm512_min_epi8, _mm512_max_epi8;
    U16(__m512i of u16): _mm512_add_epi16, _mm512_mullo_epi16, _mm512_min_epu16, _mm512_max_epu16;
    I16(__m512i of i16): _mm512_add_epi16, _mm512_mullo_epi16, _mm512_min_epi16, _mm512_max_epi16;
    U32(__m512i of u32): _mm512_add_epi32, _mm512_mullo_epi32, _mm512_min_epu32, _mm512_max_epu32;
    I32(__m512i of i32): _mm512_add_epi32, _mm512_mullo_epi32, _mm512_min_epi32, _mm512_max_epi32;
    U64(__m512i of u64): _mm512_add_epi64, _mm512_mullo_epi64, _mm512_min_epu64, _mm512_max_epu64;
    I64(__m512i of i64): _mm512_add_epi64, _mm512_mullo_epi64, _mm512_min_epi64, _mm512_max_epi64;
}

floats! {
    F32(__m512 of f32): _mm512_add_ps, _mm512_mul_ps, min_ps, max_ps, _mm512_div_ps, _mm512_set1_ps;
    F64(__m512d of f64): _mm512_add_pd, _mm512_mul_pd, min_pd, max_pd, _mm512_div_pd, _mm512_set1_pd;
}

operations! { U8: Bits { and = _mm512_and_si512, or = _mm512_or_si512, xor = _mm512_xor_si512 } }

functions! {
    // The instructions return `b` if one operand is NaN.
    min_ps(a, b: __m512) = _mm512_mask_mov_ps(_mm512_min_ps(a, b), _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(a, a), a);
    max_ps(a, b: __m512) = _mm512_mask_mov_ps(_mm512_max_ps(a, b), _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(a, a), a);
    min_pd(a, b: __m512d) = _mm512_mask_mov_pd(_mm512_min_pd(a, b), _mm512_cmp_pd_mask::<_CMP_UNORD_Q>(a, a), a);
    max_pd(a, b: __m512d) = _mm512_mask_mov_pd(_mm512_max_pd(a, b), _mm512_cmp_pd_mask::<_CMP_UNORD_Q>(a, a), a);

    // What AVX-512 lacks.
    mul_epi8(a, b: __m512i) = {
        let even = _mm512_mullo_epi16(a, b);
        let odd = _mm512_mullo_epi16(_mm512_srli_epi16::<8>(a), _mm512_srli_epi16::<8>(b));
        _mm512_mask_blend_epi8(0x5555_5555_5555_5555, _mm512_slli_epi16::<8>(odd), even)
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
        unsafe { U8(_mm512_min_epu8(raw.0, _mm512_set1_epi8(1))) }
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
    type Raw = __m256i;
    type Acc = F32;

    #[inline(always)]
    unsafe fn widen(raw: __m256i) -> F32 {
        // SAFETY: the caller vouches for the instruction set.
        unsafe { F32(_mm512_cvtph_ps(raw)) }
    }
    #[inline(always)]
    fn narrow(acc: F32) -> __m256i {
        // SAFETY: the CPU has the instruction set, or there would be no accumulators.
        unsafe { _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(acc.0) }
    }
}

/// `bfloat16`: those at even places and those at odd places, so that none has to change its
/// place between 16-bit and 32-bit lanes.
pub(in super::super) struct BF16;

impl Vector for BF16 {
    type Element = BFloat16;
    type Raw = __m512i;
    type Acc = Pair<F32>;

    #[inline(always)]
    unsafe fn widen(pairs: __m512i) -> Pair<F32> {
        // SAFETY: the caller vouches for the instruction set.
        unsafe {
            let even = _mm512_slli_epi32::<16>(pairs);
            let odd = _mm512_and_si512(pairs, _mm512_set1_epi32(!0xffff));
            Pair(
                F32(_mm512_castsi512_ps(even)),
                F32(_mm512_castsi512_ps(odd)),
            )
        }
    }

    #[inline(always)]
    fn narrow(Pair(even, odd): Pair<F32>) -> __m512i {
        const DENORMAL: i32 = 0x20;
        // SAFETY: the CPU has the instruction set, or there would be no accumulators.
        unsafe {
            let halves = _mm512_cvtne2ps_pbh(odd.0, even.0);
            let halves = std::mem::transmute::<__m512bh, __m512i>(halves);
            let order = std::mem::transmute::<[u16; 32], __m512i>(INTERLEAVE);
            let mut pairs = _mm512_permutexvar_epi16(order, halves);
            // The conversion takes denormals for zeros. They are rare: look for them only
            // where there are zeros. (The fences keep the compiler from looking anyway.)
            if _mm512_testn_epi16_mask(pairs, _mm512_set1_epi16(0x7fff)) != 0 {
                compiler_fence(Ordering::Acquire);
                let denormals = _mm512_fpclass_ps_mask::<DENORMAL>(even.0)
                    | _mm512_fpclass_ps_mask::<DENORMAL>(odd.0);
                if denormals != 0 {
                    compiler_fence(Ordering::Acquire);
                    let even = _mm512_srli_epi32::<16>(round_to_bf16(even.0));
                    pairs = _mm512_mask_blend_epi16(0xaaaa_aaaa, even, round_to_bf16(odd.0));
                }
            }
            pairs
        }
    }
}

/// Places 0, 16, 1, 17, ...
const INTERLEAVE: [u16; 32] = {
    let mut places = [0; 32];
    let mut i = 0;
    while i < 32 {
        places[i] = (i / 2 + i % 2 * 16) as u16;
        i += 1;
    }
    places
};

/// As [`super::super::minifloat::encode_bf16`], but into the upper halves.
#[inline(always)]
unsafe fn round_to_bf16(values: __m512) -> __m512i {
    // SAFETY: the CPU has the instruction set, or there would be no accumulators.
    unsafe {
        let bits = _mm512_castps_si512(values);
        let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
        _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd)
    }
}
