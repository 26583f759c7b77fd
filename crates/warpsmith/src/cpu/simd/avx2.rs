//! AVX2 with FMA and F16C: 8 lanes. Tails of `f32` go through the masked moves, narrower ones through the stack.

use super::{Pair, Simd, Task};
use crate::cpu::tier::Tier;
use std::arch::x86_64::*;

/// Proof that AVX2, FMA and F16C can be used.
#[derive(Copy, Clone)]
pub struct Avx2(());

/// Runs `task` compiled for AVX2.
// Inline: compiled with the caller, as `parallel_for` says.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,lzcnt,popcnt")]
pub(super) fn run<T: Task>(task: T) -> T::Out {
    task.run(Avx2(()))
}

/// Eight lanes of this read `8 - n` lanes in select the first `n`.
static MASKS: [i32; 16] = [-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0];

/// The first `n` of 8 lanes.
///
/// # Safety
/// AVX2 must be present and `n <= 8`.
#[inline(always)]
unsafe fn first(n: usize) -> __m256i {
    // SAFETY: `n <= 8` keeps the eight lanes inside the sixteen of `MASKS`.
    unsafe { _mm256_loadu_si256(MASKS.as_ptr().add(8usize.wrapping_sub(n)).cast()) }
}

/// Copies `n <= 16` bytes in at most five moves; a call to `memcpy` would cost more than the work around it.
///
/// # Safety
/// `src..src + n` must be readable, `dst..dst + n` writable, and the two apart.
#[inline(always)]
unsafe fn copy_short(mut src: *const u8, mut dst: *mut u8, n: usize) {
    // SAFETY: the pieces add up to `n`, so every access is inside what the caller promised.
    unsafe {
        macro_rules! piece {
            ($t:ty) => {
                if n & size_of::<$t>() != 0 {
                    dst.cast::<$t>().write_unaligned(src.cast::<$t>().read_unaligned());
                    src = src.add(size_of::<$t>());
                    dst = dst.add(size_of::<$t>());
                }
            };
        }
        piece!(u128);
        piece!(u64);
        piece!(u32);
        piece!(u16);
        if n & 1 != 0 {
            *dst = *src;
        }
    }
}

/// Methods whose only hazard is the instruction set.
macro_rules! value_methods {
    ($(fn $name:ident($($arg:ident: $t:ty),*) -> $out:ty = $body:expr;)*) => {$(
        #[inline(always)]
        fn $name(self, $($arg: $t),*) -> $out {
            // SAFETY: the token is only made where AVX2, FMA and F16C were detected; nothing here touches memory.
            unsafe { $body }
        }
    )*};
}

/// Methods whose memory hazard is the caller's.
macro_rules! memory_methods {
    ($(fn $name:ident($($arg:ident: $t:ty),*) $(-> $out:ty)? = $body:expr;)*) => {$(
        #[inline(always)]
        unsafe fn $name(self, $($arg: $t),*) $(-> $out)? {
            // SAFETY: the token proves AVX2; the caller promised the lanes that are touched and `n <= 8`.
            unsafe { $body }
        }
    )*};
}

impl Simd for Avx2 {
    type V = __m256;
    type I = __m256i;
    type H = __m128i;
    /// The low eight bytes.
    type B = __m128i;
    type M = __m256;
    type Pair = Pair<Self>;
    const N: usize = 8;
    const TIER: Tier = Tier::Avx2;

    #[inline(always)]
    fn pair(self) -> Pair<Self> {
        Pair(self)
    }

    memory_methods! {
        fn load(p: *const f32) -> __m256 = _mm256_loadu_ps(p);
        fn load_partial(p: *const f32, n: usize) -> __m256 = _mm256_maskload_ps(p, first(n));
        fn store(p: *mut f32, v: __m256) = _mm256_storeu_ps(p, v);
        fn store_partial(p: *mut f32, v: __m256, n: usize) = _mm256_maskstore_ps(p, first(n), v);
        fn stream(p: *mut f32, v: __m256) = _mm256_stream_ps(p, v);
        fn load_h(p: *const u16) -> __m128i = _mm_loadu_si128(p.cast());
        fn load_h_partial(p: *const u16, n: usize) -> __m128i = {
            let mut lanes = [0u16; 8];
            copy_short(p.cast(), lanes.as_mut_ptr().cast(), n << 1);
            _mm_loadu_si128(lanes.as_ptr().cast())
        };
        fn store_h(p: *mut u16, h: __m128i) = _mm_storeu_si128(p.cast(), h);
        fn store_h_partial(p: *mut u16, h: __m128i, n: usize) = {
            let mut lanes = [0u16; 8];
            _mm_storeu_si128(lanes.as_mut_ptr().cast(), h);
            copy_short(lanes.as_ptr().cast(), p.cast(), n << 1);
        };
        fn stream_h(p: *mut u16, h: __m128i) = _mm_stream_si128(p.cast(), h);
        fn load_b(p: *const u8) -> __m128i = _mm_loadl_epi64(p.cast());
        fn load_b_partial(p: *const u8, n: usize) -> __m128i = {
            let mut lanes = [0u8; 8];
            copy_short(p, lanes.as_mut_ptr(), n);
            _mm_loadl_epi64(lanes.as_ptr().cast())
        };
        fn store_b(p: *mut u8, b: __m128i) = _mm_storel_epi64(p.cast(), b);
        fn store_b_partial(p: *mut u8, b: __m128i, n: usize) = {
            let mut lanes = [0u8; 8];
            _mm_storel_epi64(lanes.as_mut_ptr().cast(), b);
            copy_short(lanes.as_ptr(), p, n);
        };
        fn stream_b(p: *mut u8, b: __m128i) = _mm_stream_si64(p.cast(), _mm_cvtsi128_si64(b));
    }

    value_methods! {
        fn fence() -> () = _mm_sfence();
        fn h_to_i(h: __m128i) -> __m256i = _mm256_cvtepu16_epi32(h);
        fn i_to_h(i: __m256i) -> __m128i = {
            // The pack saturates, so only the low halves may reach it.
            let low = _mm256_and_si256(i, _mm256_set1_epi32(0xffff));
            _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256::<1>(low))
        };
        fn b_to_i(b: __m128i) -> __m256i = _mm256_cvtepu8_epi32(b);
        fn i_to_b(i: __m256i) -> __m128i = {
            let low = _mm256_and_si256(i, _mm256_set1_epi32(0xff));
            let h = _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256::<1>(low));
            _mm_packus_epi16(h, h)
        };
        fn f16_to_f32(h: __m128i) -> __m256 = _mm256_cvtph_ps(h);
        fn f32_to_f16(v: __m256) -> __m128i = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v);

        fn splat(x: f32) -> __m256 = _mm256_set1_ps(x);
        fn add(a: __m256, b: __m256) -> __m256 = _mm256_add_ps(a, b);
        fn sub(a: __m256, b: __m256) -> __m256 = _mm256_sub_ps(a, b);
        fn mul(a: __m256, b: __m256) -> __m256 = _mm256_mul_ps(a, b);
        fn div(a: __m256, b: __m256) -> __m256 = _mm256_div_ps(a, b);
        fn fma(a: __m256, b: __m256, c: __m256) -> __m256 = _mm256_fmadd_ps(a, b, c);
        fn fnma(a: __m256, b: __m256, c: __m256) -> __m256 = _mm256_fnmadd_ps(a, b, c);
        fn sqrt(a: __m256) -> __m256 = _mm256_sqrt_ps(a);
        fn max(a: __m256, b: __m256) -> __m256 = _mm256_max_ps(a, b);
        fn min(a: __m256, b: __m256) -> __m256 = _mm256_min_ps(a, b);
        fn floor(a: __m256) -> __m256 = _mm256_floor_ps(a);
        fn round(a: __m256) -> __m256 = _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a);

        fn lt(a: __m256, b: __m256) -> __m256 = _mm256_cmp_ps::<_CMP_LT_OQ>(a, b);
        fn le(a: __m256, b: __m256) -> __m256 = _mm256_cmp_ps::<_CMP_LE_OQ>(a, b);
        fn eq(a: __m256, b: __m256) -> __m256 = _mm256_cmp_ps::<_CMP_EQ_OQ>(a, b);
        fn is_nan(a: __m256) -> __m256 = _mm256_cmp_ps::<_CMP_UNORD_Q>(a, a);
        fn select(m: __m256, a: __m256, b: __m256) -> __m256 = _mm256_blendv_ps(b, a, m);
        fn any(m: __m256) -> bool = _mm256_movemask_ps(m) != 0;
        fn swap_pairs(v: __m256) -> __m256 = _mm256_permute_ps::<0b10_11_00_01>(v);

        fn isplat(x: i32) -> __m256i = _mm256_set1_epi32(x);
        fn iadd(a: __m256i, b: __m256i) -> __m256i = _mm256_add_epi32(a, b);
        fn isub(a: __m256i, b: __m256i) -> __m256i = _mm256_sub_epi32(a, b);
        fn iand(a: __m256i, b: __m256i) -> __m256i = _mm256_and_si256(a, b);
        fn ior(a: __m256i, b: __m256i) -> __m256i = _mm256_or_si256(a, b);
        fn ixor(a: __m256i, b: __m256i) -> __m256i = _mm256_xor_si256(a, b);
        fn imin(a: __m256i, b: __m256i) -> __m256i = _mm256_min_epi32(a, b);
        fn shl(a: __m256i, k: u32) -> __m256i = _mm256_sll_epi32(a, _mm_cvtsi32_si128(k as i32));
        fn shr(a: __m256i, k: u32) -> __m256i = _mm256_srl_epi32(a, _mm_cvtsi32_si128(k as i32));
        fn sar(a: __m256i, k: u32) -> __m256i = _mm256_sra_epi32(a, _mm_cvtsi32_si128(k as i32));
        fn igt(a: __m256i, b: __m256i) -> __m256 = _mm256_castsi256_ps(_mm256_cmpgt_epi32(a, b));
        fn iselect(m: __m256, a: __m256i, b: __m256i) -> __m256i =
            _mm256_blendv_epi8(b, a, _mm256_castps_si256(m));

        fn bits_of(v: __m256) -> __m256i = _mm256_castps_si256(v);
        fn of_bits(i: __m256i) -> __m256 = _mm256_castsi256_ps(i);
        fn i_to_f32(i: __m256i) -> __m256 = _mm256_cvtepi32_ps(i);
        fn f32_to_i(v: __m256) -> __m256i = _mm256_cvtps_epi32(v);

        fn unzip(a: __m256, b: __m256) -> (__m256, __m256) = {
            // Within 128-bit halves first, then the four pairs in order.
            let (even, odd) = (_mm256_shuffle_ps::<0x88>(a, b), _mm256_shuffle_ps::<0xdd>(a, b));
            let in_order = |v| _mm256_castpd_ps(_mm256_permute4x64_pd::<0xd8>(_mm256_castps_pd(v)));
            (in_order(even), in_order(odd))
        };
        fn zip(even: __m256, odd: __m256) -> (__m256, __m256) = {
            let (low, high) = (_mm256_unpacklo_ps(even, odd), _mm256_unpackhi_ps(even, odd));
            (_mm256_permute2f128_ps::<0x20>(low, high), _mm256_permute2f128_ps::<0x31>(low, high))
        };

        fn reduce_add(v: __m256) -> f32 = {
            let v4 = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
            let v2 = _mm_add_ps(v4, _mm_movehl_ps(v4, v4));
            _mm_cvtss_f32(_mm_add_ss(v2, _mm_movehdup_ps(v2)))
        };
        fn reduce_max(v: __m256) -> f32 = {
            if _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_UNORD_Q>(v, v)) != 0 {
                return f32::NAN;
            }
            let v4 = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
            let v2 = _mm_max_ps(v4, _mm_movehl_ps(v4, v4));
            _mm_cvtss_f32(_mm_max_ss(v2, _mm_movehdup_ps(v2)))
        };
    }
}
