//! Two vectors in lock-step.
//!
//! A chain of dependent operations, such as a polynomial, leaves the processor waiting for each result. Its scheduler
//! looks ahead by too few instructions to reach the next vector of a loop; with two independent chains instruction by
//! instruction, it need not.

use super::{Simd, TABLE};
use crate::cpu::tier::Tier;

/// Vectors of twice the lanes of `S`, which may be a pair itself. Elementwise results have the bits of `S`.
#[derive(Copy, Clone)]
pub struct Pair<S>(pub S);

/// Methods on values: the same for both halves.
macro_rules! both {
    ($(fn $name:ident($($arg:ident: $t:ident),*) -> $out:ident;)*) => {$(
        #[inline(always)]
        fn $name(self, $($arg: Self::$t),*) -> Self::$out {
            let s = self.0;
            [s.$name($($arg[0]),*), s.$name($($arg[1]),*)]
        }
    )*};
}

/// Methods on values with long latency: the same for both halves, and kept side by side.
macro_rules! in_step {
    ($(fn $name:ident($($arg:ident),*);)*) => {$(
        #[inline(always)]
        fn $name(self, $($arg: Self::V),*) -> Self::V {
            let s = self.0;
            s.in_step(s.$name($($arg[0]),*), s.$name($($arg[1]),*))
        }
    )*};
}

/// Shifts by a constant.
macro_rules! shifts {
    ($($name:ident)*) => {$(
        #[inline(always)]
        fn $name(self, a: Self::I, k: u32) -> Self::I {
            [self.0.$name(a[0], k), self.0.$name(a[1], k)]
        }
    )*};
}

/// Accesses to memory: the upper half follows the lower.
macro_rules! memory {
    ($($element:ty, $vector:ident:
        $load:ident $load_partial:ident $store:ident $store_partial:ident $stream:ident;)*) => {$(
        #[inline(always)]
        unsafe fn $load(self, p: *const $element) -> Self::$vector {
            // SAFETY: `2 N` elements are readable, as the caller promised.
            unsafe { [self.0.$load(p), self.0.$load(p.add(S::N))] }
        }

        #[inline(always)]
        unsafe fn $load_partial(self, p: *const $element, n: usize) -> Self::$vector {
            let low = n.min(S::N);
            // SAFETY: the halves hold `low` and `n - low` of the `n` readable elements.
            unsafe { [self.0.$load_partial(p, low), self.0.$load_partial(p.wrapping_add(low), n.wrapping_sub(low))] }
        }

        #[inline(always)]
        unsafe fn $store(self, p: *mut $element, v: Self::$vector) {
            // SAFETY: `2 N` elements are writable, as the caller promised.
            unsafe {
                self.0.$store(p, v[0]);
                self.0.$store(p.add(S::N), v[1]);
            }
        }

        #[inline(always)]
        unsafe fn $store_partial(self, p: *mut $element, v: Self::$vector, n: usize) {
            let low = n.min(S::N);
            // SAFETY: the halves hold `low` and `n - low` of the `n` writable elements.
            unsafe {
                self.0.$store_partial(p, v[0], low);
                self.0.$store_partial(p.wrapping_add(low), v[1], n.wrapping_sub(low));
            }
        }

        #[inline(always)]
        unsafe fn $stream(self, p: *mut $element, v: Self::$vector) {
            // SAFETY: `2 N` elements are writable, and both halves are aligned if the lower is.
            unsafe {
                self.0.$stream(p, v[0]);
                self.0.$stream(p.add(S::N), v[1]);
            }
        }
    )*};
}

/// Writes `N` values, past the caches if `stream`.
///
/// # Safety
/// As [`Simd::store`] or [`Simd::stream`].
#[inline(always)]
unsafe fn put<S: Simd>(s: S, p: *mut f32, v: S::V, stream: bool) {
    // SAFETY: passed on.
    unsafe { if stream { s.stream(p, v) } else { s.store(p, v) } }
}

impl<S: Simd> Simd for Pair<S> {
    type V = [S::V; 2];
    type I = [S::I; 2];
    type H = [S::H; 2];
    type B = [S::B; 2];
    type M = [S::M; 2];
    type Pair = Pair<Self>;
    const N: usize = 2 * S::N;
    const TIER: Tier = S::TIER;
    const LOOKS_UP_IN_REGISTERS: bool = S::LOOKS_UP_IN_REGISTERS;

    #[inline(always)]
    fn pair(self) -> Pair<Self> {
        Pair(self)
    }

    memory! {
        f32, V: load load_partial store store_partial stream;
        u16, H: load_h load_h_partial store_h store_h_partial stream_h;
        u8, B: load_b load_b_partial store_b store_b_partial stream_b;
    }

    both! {
        fn h_to_i(h: H) -> I;
        fn i_to_h(i: I) -> H;
        fn b_to_i(b: B) -> I;
        fn i_to_b(i: I) -> B;
        fn f16_to_f32(h: H) -> V;
        fn f32_to_f16(v: V) -> H;
        fn add(a: V, b: V) -> V;
        fn sub(a: V, b: V) -> V;
        fn mul(a: V, b: V) -> V;
        fn div(a: V, b: V) -> V;
        fn sqrt(a: V) -> V;
        fn max(a: V, b: V) -> V;
        fn min(a: V, b: V) -> V;
        fn floor(a: V) -> V;
        fn round(a: V) -> V;
        fn lt(a: V, b: V) -> M;
        fn le(a: V, b: V) -> M;
        fn eq(a: V, b: V) -> M;
        fn is_nan(a: V) -> M;
        fn select(m: M, a: V, b: V) -> V;
        fn iadd(a: I, b: I) -> I;
        fn isub(a: I, b: I) -> I;
        fn iand(a: I, b: I) -> I;
        fn ior(a: I, b: I) -> I;
        fn ixor(a: I, b: I) -> I;
        fn imin(a: I, b: I) -> I;
        fn igt(a: I, b: I) -> M;
        fn iselect(m: M, a: I, b: I) -> I;
        fn bits_of(v: V) -> I;
        fn of_bits(i: I) -> V;
        fn i_to_f32(i: I) -> V;
        fn f32_to_i(v: V) -> I;
        fn swap_pairs(v: V) -> V;
        fn pow2(n: V) -> V;
        fn scale2(v: V, n: V) -> V;
        fn f32_to_bf16(v: V) -> H;
        fn interleave_bf16(low: V, high: V) -> I;
        fn interleave_bf16_near(low: V, high: V) -> I;
    }

    in_step! {
        fn fma(a, b, c);
        fn fnma(a, b, c);
        fn fraction(v);
        fn scale2_floor(v, n);
        fn scale2_floor_normal(v, n);
    }

    shifts! { shl shr sar }

    /// One register holds the pair's values: those at even places are one shift away, those at odd places a mask.
    #[inline(always)]
    unsafe fn load_bf16_unordered(self, p: *const u16) -> Self::V {
        let s = self.0;
        // SAFETY: `2 N` values of 16 bits are `N` of 32, and any alignment will do.
        let bits = s.bits_of(unsafe { s.load(p.cast()) });
        [s.of_bits(s.shl(bits, 16)), s.of_bits(s.iand(bits, s.isplat(-0x1_0000)))]
    }

    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut u16, v: Self::V, stream: bool) {
        // SAFETY: passed on.
        unsafe { self.0.store_bf16_pair(p, v[0], v[1], stream) }
    }

    #[inline(always)]
    unsafe fn store_bf16_unordered(self, p: *mut u16, v: Self::V, stream: bool) {
        let s = self.0;
        // SAFETY: as for the load; `p` is as aligned as values of 32 bits must be.
        unsafe { put(s, p.cast(), s.of_bits(s.interleave_bf16(v[0], v[1])), stream) }
    }

    #[inline(always)]
    unsafe fn store_bf16_near(self, p: *mut u16, v: Self::V, stream: bool) {
        let s = self.0;
        // SAFETY: as above.
        unsafe { put(s, p.cast(), s.of_bits(s.interleave_bf16_near(v[0], v[1])), stream) }
    }

    #[inline(always)]
    unsafe fn load_e4m3_unordered(self, p: *const u8) -> Self::V {
        // SAFETY: passed on.
        unsafe { self.0.load_e4m3_pair(p) }
    }

    #[inline(always)]
    unsafe fn store_e4m3(self, p: *mut u8, v: Self::V, unordered: bool, stream: bool) {
        // SAFETY: passed on.
        unsafe { self.0.store_e4m3_pair(p, v, unordered, stream) }
    }

    #[inline(always)]
    unsafe fn load_e4m3_pair(self, p: *const u8) -> [Self::V; 2] {
        // SAFETY: each half has `2 S::N` of the `4 S::N` values.
        let [[a, b], [c, d]] = unsafe { [self.0.load_e4m3_pair(p), self.0.load_e4m3_pair(p.add(2 * S::N))] };
        [[a, c], [b, d]]
    }

    #[inline(always)]
    unsafe fn store_e4m3_pair(self, p: *mut u8, v: [Self::V; 2], zipped: bool, stream: bool) {
        let [[a, b], [c, d]] = v;
        let [first, second] = if zipped { [[a, c], [b, d]] } else { v };
        // SAFETY: as above.
        unsafe {
            self.0.store_e4m3_pair(p, first, zipped, stream);
            self.0.store_e4m3_pair(p.add(2 * S::N), second, zipped, stream);
        }
    }

    #[inline(always)]
    fn to_bf16_unordered(self, v: Self::V) -> Self::V {
        let (even, odd) = self.0.unzip(v[0], v[1]);
        [even, odd]
    }

    #[inline(always)]
    fn swap_pairs_bf16_unordered(self, v: Self::V) -> Self::V {
        [v[1], v[0]]
    }

    #[inline(always)]
    fn in_step(self, a: Self::V, b: Self::V) -> [Self::V; 2] {
        [a, b]
    }

    #[inline(always)]
    fn fence(self) {
        self.0.fence();
    }

    #[inline(always)]
    fn splat(self, x: f32) -> Self::V {
        [self.0.splat(x); 2]
    }

    #[inline(always)]
    fn isplat(self, x: i32) -> Self::I {
        [self.0.isplat(x); 2]
    }

    #[inline(always)]
    fn unzip(self, a: Self::V, b: Self::V) -> (Self::V, Self::V) {
        let ((a_even, a_odd), (b_even, b_odd)) = (self.0.unzip(a[0], a[1]), self.0.unzip(b[0], b[1]));
        ([a_even, b_even], [a_odd, b_odd])
    }

    #[inline(always)]
    fn zip(self, even: Self::V, odd: Self::V) -> (Self::V, Self::V) {
        let ((a, b), (c, d)) = (self.0.zip(even[0], odd[0]), self.0.zip(even[1], odd[1]));
        ([a, b], [c, d])
    }

    #[inline(always)]
    fn look_up(self, table: &[f32; TABLE], index: Self::I) -> Self::V {
        [self.0.look_up(table, index[0]), self.0.look_up(table, index[1])]
    }

    #[inline(always)]
    fn differing(self, a: Self::I, b: Self::I, from: i32) -> Self::I {
        [self.0.differing(a[0], b[0], from), self.0.differing(a[1], b[1], from)]
    }

    #[inline(always)]
    fn any_differs(self, i: Self::I, from: i32, bits: i32) -> bool {
        self.0.any_bits(self.0.differing(i[0], i[1], from), bits)
    }

    #[inline(always)]
    fn any_bits(self, i: Self::I, bits: i32) -> bool {
        self.0.any_bits(self.0.ior(i[0], i[1]), bits)
    }

    #[inline(always)]
    fn any(self, m: Self::M) -> bool {
        self.0.any(m[0]) || self.0.any(m[1])
    }

    #[inline(always)]
    fn reduce_add(self, v: Self::V) -> f32 {
        self.0.reduce_add(self.0.add(v[0], v[1]))
    }

    #[inline(always)]
    fn reduce_max(self, v: Self::V) -> f32 {
        self.0.reduce_max(self.0.max_nan(v[0], v[1]))
    }
}
