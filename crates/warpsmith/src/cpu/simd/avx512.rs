//! AVX-512: 16 lanes, tails by mask registers.

use super::{Pair, Simd, TABLE, Task, avx512_fp8};
use crate::cpu::tier::Tier;
use std::arch::x86_64::*;

/// Proof that AVX-512 F, BW, DQ and VL can be used.
#[derive(Copy, Clone)]
pub struct Avx512 {
    /// Lanes whose conversion to bf16 must be emulated: none if the machine has AVX512_BF16, else all.
    emulated: __mmask16,
}

/// Runs `task` compiled for AVX-512.
// Inline: compiled with the caller, as `parallel_for` says.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi1,bmi2,lzcnt,popcnt")]
pub(super) fn run<T: Task>(task: T) -> T::Out {
    let emulated = if std::arch::is_x86_feature_detected!("avx512bf16") { 0 } else { !0 };
    task.run(Avx512 { emulated })
}

/// What [`Simd::f32_to_bf16`] does elsewhere, for lanes AVX512_BF16 would flush to zero and machines without it: the
/// bits of bf16 in the lower half of each lane.
#[cold]
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn emulated_bf16(v: __m512) -> __m512i {
    let bits = _mm512_castps_si512(v);
    let high = _mm512_srli_epi32::<16>(bits);
    let odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
    let sum = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(v, v);
    let rounded = _mm512_srli_epi32::<16>(sum);
    _mm512_mask_or_epi32(rounded, nan, high, _mm512_set1_epi32(0x40))
}

/// The lanes that AVX512_BF16 would flush to zero.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
fn subnormal(v: __m512) -> __mmask16 {
    const SUBNORMAL: i32 = 0x20;
    _mm512_fpclass_ps_mask::<SUBNORMAL>(v)
}

/// The first `n` of 16 lanes.
#[inline(always)]
fn first(n: usize) -> __mmask16 {
    !(u32::MAX.wrapping_shl(n as u32)) as __mmask16
}

/// The conversion of AVX512_BF16. Written as assembly, because a function compiled for that feature is not inlined into
/// one that is not, and the tier includes machines without it.
///
/// # Safety
/// The machine must have AVX512_BF16.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn native_bf16(v: __m512) -> __m256i {
    let h: __m256i;
    // SAFETY: the caller promised the instruction; it touches no memory.
    unsafe {
        std::arch::asm!(
            "vcvtneps2bf16 {h:y}, {v}",
            h = lateout(zmm_reg) h,
            v = in(zmm_reg) v,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    h
}

/// [`native_bf16`] of `low`, followed by that of `high`.
///
/// # Safety
/// The machine must have AVX512_BF16.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn native_bf16_pair(low: __m512, high: __m512) -> __m512i {
    let both: __m512i;
    // SAFETY: the caller promised the instruction; it touches no memory.
    unsafe {
        std::arch::asm!(
            "vcvtne2ps2bf16 {both}, {high}, {low}",
            both = lateout(zmm_reg) both,
            high = in(zmm_reg) high,
            low = in(zmm_reg) low,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    both
}

/// An empty barrier that the compiler does not move code across: the vectors are computed before it and used after it.
#[inline]
#[target_feature(enable = "avx512f")]
fn pinned(mut a: __m512, mut b: __m512) -> [__m512; 2] {
    // SAFETY: no instruction at all.
    unsafe {
        std::arch::asm!("/* {a} {b} */", a = inout(zmm_reg) a, b = inout(zmm_reg) b, options(nomem, nostack, preserves_flags));
    }
    [a, b]
}

/// The upper half of each lane of `low`, below that of `high`. One instruction both shifts and blends. Written as
/// assembly, because compilers turn it into a permutation that takes three times as long.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn upper_halves(low: __m512i, mut high: __m512i) -> __m512i {
    const LOWER: __mmask64 = 0x3333_3333_3333_3333;
    // SAFETY: the instruction is AVX512_BW's and touches no memory.
    unsafe {
        std::arch::asm!(
            "vpalignr {high}{{{lower}}}, {low}, {low}, 2",
            high = inout(zmm_reg) high,
            low = in(zmm_reg) low,
            lower = in(kreg) LOWER,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    high
}

/// The bits in which `a` or `b` differs from `c`. Written as assembly, because compilers split it.
#[inline]
#[target_feature(enable = "avx512f")]
fn differing_bits(mut a: __m512i, b: __m512i, c: __m512i) -> __m512i {
    // SAFETY: the instruction is AVX-512's and touches no memory. Its table is that of (a ^ c) | (b ^ c).
    unsafe {
        std::arch::asm!(
            "vpternlogd {a}, {b}, {c}, 0x7e",
            a = inout(zmm_reg) a,
            b = in(zmm_reg) b,
            c = in(zmm_reg) c,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    a
}

/// Methods whose only hazard is the instruction set.
macro_rules! value_methods {
    ($(fn $name:ident($($arg:ident: $t:ty),*) -> $out:ty = $body:expr;)*) => {$(
        #[inline(always)]
        fn $name(self, $($arg: $t),*) -> $out {
            // SAFETY: the token is only made where AVX-512 was detected; nothing here touches memory.
            unsafe { $body }
        }
    )*};
}

/// Methods whose memory hazard is the caller's.
macro_rules! memory_methods {
    ($(fn $name:ident($($arg:ident: $t:ty),*) $(-> $out:ty)? = $body:expr;)*) => {$(
        #[inline(always)]
        unsafe fn $name(self, $($arg: $t),*) $(-> $out)? {
            // SAFETY: the token proves AVX-512; the caller promised the lanes that are touched.
            unsafe { $body }
        }
    )*};
}

impl Avx512 {
    /// Both vectors by one instruction, which takes no longer than that for one; or nothing, if the machine has none or
    /// a lane is subnormal.
    #[inline(always)]
    fn fast_bf16_pair(self, low: __m512, high: __m512) -> Option<__m512i> {
        if self.emulated != 0 {
            return None;
        }
        // SAFETY: the token proves AVX-512, and without an emulated lane AVX512_BF16.
        unsafe {
            let both = native_bf16_pair(low, high);
            // A subnormal has become zero, and zeros are quicker to look for than subnormals: one test of what both
            // vectors became decides most of the time.
            let zero = _mm512_testn_epi16_mask(both, _mm512_set1_epi16(i16::MAX)) != 0;
            (!zero || subnormal(low) | subnormal(high) == 0).then_some(both)
        }
    }
}

impl Simd for Avx512 {
    type V = __m512;
    type I = __m512i;
    type H = __m256i;
    type B = __m128i;
    type M = __mmask16;
    type Pair = Pair<Self>;
    const N: usize = 16;
    const TIER: Tier = Tier::Avx512;
    const LOOKS_UP_IN_REGISTERS: bool = true;

    #[inline(always)]
    fn pair(self) -> Pair<Self> {
        Pair(self)
    }

    memory_methods! {
        fn load(p: *const f32) -> __m512 = _mm512_loadu_ps(p);
        fn load_partial(p: *const f32, n: usize) -> __m512 = _mm512_maskz_loadu_ps(first(n), p);
        fn store(p: *mut f32, v: __m512) = _mm512_storeu_ps(p, v);
        fn store_partial(p: *mut f32, v: __m512, n: usize) = _mm512_mask_storeu_ps(p, first(n), v);
        fn stream(p: *mut f32, v: __m512) = _mm512_stream_ps(p, v);
        fn load_h(p: *const u16) -> __m256i = _mm256_loadu_si256(p.cast());
        fn load_h_partial(p: *const u16, n: usize) -> __m256i = _mm256_maskz_loadu_epi16(first(n), p.cast());
        fn store_h(p: *mut u16, h: __m256i) = _mm256_storeu_si256(p.cast(), h);
        fn store_h_partial(p: *mut u16, h: __m256i, n: usize) = _mm256_mask_storeu_epi16(p.cast(), first(n), h);
        fn stream_h(p: *mut u16, h: __m256i) = _mm256_stream_si256(p.cast(), h);
        fn load_b(p: *const u8) -> __m128i = _mm_loadu_si128(p.cast());
        fn load_b_partial(p: *const u8, n: usize) -> __m128i = _mm_maskz_loadu_epi8(first(n), p.cast());
        fn store_b(p: *mut u8, b: __m128i) = _mm_storeu_si128(p.cast(), b);
        fn store_b_partial(p: *mut u8, b: __m128i, n: usize) = _mm_mask_storeu_epi8(p.cast(), first(n), b);
        fn stream_b(p: *mut u8, b: __m128i) = _mm_stream_si128(p.cast(), b);
        fn load_e4m3_pair(p: *const u8) -> [__m512; 2] = avx512_fp8::load_pair(p);
        fn store_e4m3_pair(p: *mut u8, v: [__m512; 2], zipped: bool, stream: bool) = avx512_fp8::store_pair(p, v, zipped, stream);
    }

    value_methods! {
        fn fence() -> () = _mm_sfence();
        fn in_step(a: __m512, b: __m512) -> [__m512; 2] = pinned(a, b);
        fn h_to_i(h: __m256i) -> __m512i = _mm512_cvtepu16_epi32(h);
        fn i_to_h(i: __m512i) -> __m256i = _mm512_cvtepi32_epi16(i);
        fn b_to_i(b: __m128i) -> __m512i = _mm512_cvtepu8_epi32(b);
        fn i_to_b(i: __m512i) -> __m128i = _mm512_cvtepi32_epi8(i);
        fn f16_to_f32(h: __m256i) -> __m512 = _mm512_cvtph_ps(h);
        fn f32_to_f16(v: __m512) -> __m256i = _mm512_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(v);

        fn splat(x: f32) -> __m512 = _mm512_set1_ps(x);
        fn add(a: __m512, b: __m512) -> __m512 = _mm512_add_ps(a, b);
        fn sub(a: __m512, b: __m512) -> __m512 = _mm512_sub_ps(a, b);
        fn mul(a: __m512, b: __m512) -> __m512 = _mm512_mul_ps(a, b);
        fn div(a: __m512, b: __m512) -> __m512 = _mm512_div_ps(a, b);
        fn fma(a: __m512, b: __m512, c: __m512) -> __m512 = _mm512_fmadd_ps(a, b, c);
        fn fnma(a: __m512, b: __m512, c: __m512) -> __m512 = _mm512_fnmadd_ps(a, b, c);
        fn sqrt(a: __m512) -> __m512 = _mm512_sqrt_ps(a);
        fn max(a: __m512, b: __m512) -> __m512 = _mm512_max_ps(a, b);
        fn min(a: __m512, b: __m512) -> __m512 = _mm512_min_ps(a, b);
        fn floor(a: __m512) -> __m512 = _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC }>(a);
        fn round(a: __m512) -> __m512 = _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a);

        fn lt(a: __m512, b: __m512) -> __mmask16 = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b);
        fn le(a: __m512, b: __m512) -> __mmask16 = _mm512_cmp_ps_mask::<_CMP_LE_OQ>(a, b);
        fn eq(a: __m512, b: __m512) -> __mmask16 = _mm512_cmp_ps_mask::<_CMP_EQ_OQ>(a, b);
        fn is_nan(a: __m512) -> __mmask16 = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(a, a);
        fn select(m: __mmask16, a: __m512, b: __m512) -> __m512 = _mm512_mask_blend_ps(m, b, a);
        fn swap_pairs(v: __m512) -> __m512 = _mm512_permute_ps::<0b10_11_00_01>(v);

        fn isplat(x: i32) -> __m512i = _mm512_set1_epi32(x);
        fn iadd(a: __m512i, b: __m512i) -> __m512i = _mm512_add_epi32(a, b);
        fn isub(a: __m512i, b: __m512i) -> __m512i = _mm512_sub_epi32(a, b);
        fn iand(a: __m512i, b: __m512i) -> __m512i = _mm512_and_si512(a, b);
        fn ior(a: __m512i, b: __m512i) -> __m512i = _mm512_or_si512(a, b);
        fn ixor(a: __m512i, b: __m512i) -> __m512i = _mm512_xor_si512(a, b);
        fn imin(a: __m512i, b: __m512i) -> __m512i = _mm512_min_epi32(a, b);
        fn shl(a: __m512i, k: u32) -> __m512i = _mm512_sll_epi32(a, _mm_cvtsi32_si128(k as i32));
        fn shr(a: __m512i, k: u32) -> __m512i = _mm512_srl_epi32(a, _mm_cvtsi32_si128(k as i32));
        fn sar(a: __m512i, k: u32) -> __m512i = _mm512_sra_epi32(a, _mm_cvtsi32_si128(k as i32));
        fn igt(a: __m512i, b: __m512i) -> __mmask16 = _mm512_cmpgt_epi32_mask(a, b);
        fn iselect(m: __mmask16, a: __m512i, b: __m512i) -> __m512i = _mm512_mask_blend_epi32(m, b, a);

        fn bits_of(v: __m512) -> __m512i = _mm512_castps_si512(v);
        fn of_bits(i: __m512i) -> __m512 = _mm512_castsi512_ps(i);
        fn i_to_f32(i: __m512i) -> __m512 = _mm512_cvtepi32_ps(i);
        fn f32_to_i(v: __m512) -> __m512i = _mm512_cvtps_epi32(v);
        fn pow2(n: __m512) -> __m512 = _mm512_scalef_ps(_mm512_set1_ps(1.0), n);
        fn scale2(v: __m512, n: __m512) -> __m512 = _mm512_scalef_ps(v, n);
        fn fraction(v: __m512) -> __m512 = _mm512_reduce_ps::<{ _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC }>(v);
        fn scale2_floor(v: __m512, n: __m512) -> __m512 = _mm512_scalef_ps(v, n);
        fn scale2_floor_normal(v: __m512, n: __m512) -> __m512 = {
            let normal = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(n, _mm512_set1_ps(-126.0));
            _mm512_maskz_scalef_ps(normal, v, n)
        };

        fn interleave_bf16_near(low: __m512, high: __m512) -> __m512i = {
            let half = _mm512_set1_epi32(0x8000);
            let low = _mm512_add_epi32(_mm512_castps_si512(low), half);
            upper_halves(low, _mm512_add_epi32(_mm512_castps_si512(high), half))
        };
        fn differing(a: __m512i, b: __m512i, from: i32) -> __m512i = differing_bits(a, b, _mm512_set1_epi32(from));
        fn look_up(table: &[f32; TABLE], index: __m512i) -> __m512 = {
            let (low, high) = (_mm512_loadu_ps(table.as_ptr()), _mm512_loadu_ps(table.as_ptr().add(16)));
            _mm512_permutex2var_ps(low, index, high)
        };
        fn any_bits(i: __m512i, bits: i32) -> bool = _mm512_test_epi32_mask(i, _mm512_set1_epi32(bits)) != 0;
        fn unzip(a: __m512, b: __m512) -> (__m512, __m512) = {
            let even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
            let odd = _mm512_or_si512(even, _mm512_set1_epi32(1));
            (_mm512_permutex2var_ps(a, even, b), _mm512_permutex2var_ps(a, odd, b))
        };
        fn zip(even: __m512, odd: __m512) -> (__m512, __m512) = {
            let low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
            let high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
            (_mm512_permutex2var_ps(even, low, odd), _mm512_permutex2var_ps(even, high, odd))
        };

        fn reduce_add(v: __m512) -> f32 = {
            let v8 = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps::<1>(v));
            let v4 = _mm_add_ps(_mm256_castps256_ps128(v8), _mm256_extractf128_ps::<1>(v8));
            let v2 = _mm_add_ps(v4, _mm_movehl_ps(v4, v4));
            _mm_cvtss_f32(_mm_add_ss(v2, _mm_movehdup_ps(v2)))
        };
        fn reduce_max(v: __m512) -> f32 = {
            if _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(v, v) != 0 {
                return f32::NAN;
            }
            let v8 = _mm256_max_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps::<1>(v));
            let v4 = _mm_max_ps(_mm256_castps256_ps128(v8), _mm256_extractf128_ps::<1>(v8));
            let v2 = _mm_max_ps(v4, _mm_movehl_ps(v4, v4));
            _mm_cvtss_f32(_mm_max_ss(v2, _mm_movehdup_ps(v2)))
        };
    }

    /// One instruction where there is AVX512_BF16; but that one takes subnormals for zero, which must not happen.
    #[inline(always)]
    fn f32_to_bf16_flushed(self, v: __m512) -> __m256i {
        // SAFETY: as below.
        unsafe { if self.emulated != 0 { _mm512_cvtepi32_epi16(emulated_bf16(v)) } else { native_bf16(v) } }
    }

    #[inline(always)]
    fn f32_to_bf16(self, v: __m512) -> __m256i {
        // SAFETY: the token proves AVX-512, and without an emulated lane AVX512_BF16.
        unsafe {
            if subnormal(v) | self.emulated != 0 {
                return _mm512_cvtepi32_epi16(emulated_bf16(v));
            }
            native_bf16(v)
        }
    }

    #[inline(always)]
    fn interleave_bf16(self, low: __m512, high: __m512) -> __m512i {
        #[rustfmt::skip]
        const ORDER: [u16; 32] = [
            0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23,
            8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31,
        ];
        // SAFETY: the token proves AVX-512, and the array holds a vector.
        unsafe {
            match self.fast_bf16_pair(low, high) {
                Some(both) => _mm512_permutexvar_epi16(_mm512_loadu_si512(ORDER.as_ptr().cast()), both),
                None => _mm512_or_si512(emulated_bf16(low), _mm512_slli_epi32::<16>(emulated_bf16(high))),
            }
        }
    }

    #[inline(always)]
    unsafe fn store_bf16_pair(self, p: *mut u16, low: __m512, high: __m512, stream: bool) {
        // SAFETY: the token proves AVX-512; the caller promised the lanes that are touched.
        unsafe {
            match self.fast_bf16_pair(low, high) {
                Some(both) if stream => _mm512_stream_si512(p.cast(), both),
                Some(both) => _mm512_storeu_si512(p.cast(), both),
                None => {
                    self.store_h(p, _mm512_cvtepi32_epi16(emulated_bf16(low)));
                    self.store_h(p.add(Self::N), _mm512_cvtepi32_epi16(emulated_bf16(high)));
                }
            }
        }
    }

    #[inline(always)]
    fn any(self, m: __mmask16) -> bool {
        m != 0
    }
}
