//! e4m3 on AVX-512, in lanes of 16 bits: two vectors at a time.

use std::arch::x86_64::*;

/// [`super::Simd::load_e4m3_pair`].
///
/// # Safety
/// As there.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) unsafe fn load_pair(p: *const u8) -> [__m512; 2] {
    // SAFETY: passed on.
    let values = decode(unsafe { _mm256_loadu_si256(p.cast()) });
    let odd = _mm512_and_si512(values, _mm512_set1_epi32(-0x1_0000));
    [_mm512_castsi512_ps(_mm512_slli_epi32::<16>(values)), _mm512_castsi512_ps(odd)]
}

/// [`super::Simd::store_e4m3_pair`].
///
/// # Safety
/// As there.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq")]
pub(super) unsafe fn store_pair(p: *mut u8, [low, high]: [__m512; 2], zipped: bool, stream: bool) {
    let codes = encode(low, high);
    let bytes = if zipped {
        let odd = _mm256_slli_epi16::<8>(_mm512_extracti64x4_epi64::<1>(codes));
        _mm256_or_si256(_mm512_castsi512_si256(codes), odd)
    } else {
        _mm512_cvtepi16_epi8(codes)
    };
    // SAFETY: passed on.
    unsafe {
        if stream { _mm256_stream_si256(p.cast(), bytes) } else { _mm256_storeu_si256(p.cast(), bytes) }
    }
}

/// The codes as bf16, which has all of their values.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn decode(codes: __m256i) -> __m512i {
    /// The subnormal numbers.
    const SUBNORMAL: [u16; 32] = {
        let mut table = [0; 32];
        let mut i = 0;
        while i < 8 {
            table[i] = ((i as f32 / 512.0).to_bits() >> 16) as u16;
            i += 1;
        }
        table
    };
    let splat = |bits: u16| _mm512_set1_epi16(bits as i16);
    let codes = _mm512_cvtepu8_epi16(codes);
    // Where bf16 has the upper three bits of its mantissa.
    let magnitude = _mm512_and_si512(_mm512_slli_epi16::<4>(codes), splat(0x7f0));
    let subnormal = _mm512_cmplt_epu16_mask(magnitude, splat(8 << 4));
    let nan = _mm512_cmpeq_epi16_mask(magnitude, splat(0x7f0));
    let normal = _mm512_add_epi16(magnitude, splat(120 << 7));
    // SAFETY: the array holds a vector.
    let table = unsafe { _mm512_loadu_si512(SUBNORMAL.as_ptr().cast()) };
    let value = _mm512_mask_permutexvar_epi16(normal, subnormal, codes, table);
    // The value, or the sign where that is: a | (b & c).
    let value = _mm512_ternarylogic_epi32::<0xf8>(value, _mm512_slli_epi16::<8>(codes), splat(0x8000));
    _mm512_mask_mov_epi16(value, nan, splat(0x7fc0))
}

/// The codes of `low` and after them those of `high`, in lanes of 16 bits.
///
/// By way of f16, whose bits are those of e4m3 and seven more if values are divided by 2^8: subnormal numbers are the same
/// there too.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq")]
fn encode(low: __m512, high: __m512) -> __m512i {
    let halves = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(half_to_odd(low)), half_to_odd(high));
    let splat = |bits: i16| _mm512_set1_epi16(bits);
    let magnitude = _mm512_and_si512(halves, splat(0x7fff));
    let nan = _mm512_cmpgt_epu16_mask(magnitude, splat(0x7c00));
    // To nearest, ties to even: half a unit more less the last bit, plus one where the unit is odd.
    let odd = _mm512_test_epi16_mask(halves, splat(1 << 7));
    let rounded = _mm512_add_epi16(magnitude, splat(0x3f));
    let rounded = _mm512_mask_add_epi16(rounded, odd, rounded, splat(1));
    let code = _mm512_srli_epi16::<7>(_mm512_min_epu16(rounded, splat(0x7e << 7)));
    let code = _mm512_mask_mov_epi16(code, nan, splat(0x7f));
    _mm512_ternarylogic_epi32::<0xf8>(code, _mm512_srli_epi16::<8>(halves), splat(0x80))
}

/// `v / 2^8` in f16, cut off. The fifth bit of the mantissa is set if any after it was, which keeps what is not halfway
/// between two values of e4m3 from looking so.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
fn half_to_odd(v: __m512) -> __m256i {
    const FIFTH: i32 = 1 << 18;
    let bits = _mm512_castps_si512(_mm512_mul_ps(v, _mm512_set1_ps(1.0 / 256.0)));
    let more = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(FIFTH - 1));
    let bits = _mm512_mask_or_epi32(bits, more, bits, _mm512_set1_epi32(FIFTH));
    _mm512_cvtps_ph::<{ _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC }>(_mm512_castsi512_ps(bits))
}
