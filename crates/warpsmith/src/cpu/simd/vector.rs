//! Vector operations, and those derived from them.

use super::{MAX_LANES, TABLE, fp8};
use crate::cpu::tier::Tier;

const SIGN: i32 = i32::MIN;

/// Vectors of `N` lanes and their operations.
pub trait Simd: Copy + Send + Sync + 'static {
    /// `N` lanes of `f32`.
    type V: Copy;
    /// `N` lanes of `i32`. Arithmetic wraps.
    type I: Copy;
    /// `N` lanes of 16 bits: storage of the half-width floats.
    type H: Copy;
    /// `N` lanes of 8 bits: storage of the 8-bit floats.
    type B: Copy;
    /// A yes or no per lane.
    type M: Copy;
    /// Vectors of twice the lanes, in which two chains of dependent operations hide each other's latency. Where operations
    /// are calls there is nothing to hide, and these are the same vectors.
    type Pair: Simd;
    /// Number of lanes: 16 on AVX-512, 8 elsewhere, twice that in a [`super::Pair`].
    const N: usize;
    /// The tier this token stands for.
    const TIER: Tier;
    /// Whether [`Simd::look_up`] finds its table in registers.
    const LOOKS_UP_IN_REGISTERS: bool = false;

    /// The token of [`Simd::Pair`].
    fn pair(self) -> Self::Pair;

    // ---- f32: memory ----

    /// Reads `N` values. Any alignment is fine; below, the alignment of the pointer's type.
    ///
    /// # Safety
    /// `p..p + N` must be readable.
    unsafe fn load(self, p: *const f32) -> Self::V;

    /// Reads `n` values (`n <= N`), the other lanes are zero. Touches nothing past `p + n`.
    ///
    /// # Safety
    /// `p..p + n` must be readable and `n <= N`.
    unsafe fn load_partial(self, p: *const f32, n: usize) -> Self::V;

    /// Writes `N` values.
    ///
    /// # Safety
    /// `p..p + N` must be writable.
    unsafe fn store(self, p: *mut f32, v: Self::V);

    /// Writes the first `n` values (`n <= N`). Touches nothing past `p + n`.
    ///
    /// # Safety
    /// `p..p + n` must be writable and `n <= N`.
    unsafe fn store_partial(self, p: *mut f32, v: Self::V, n: usize);

    /// Writes `N` values past the caches where the tier can. Call [`Simd::fence`] before others read them.
    ///
    /// # Safety
    /// `p..p + N` must be writable and `p` a multiple of `N * 4` bytes.
    unsafe fn stream(self, p: *mut f32, v: Self::V);

    /// Orders streamed stores before what follows.
    fn fence(self);

    /// Both vectors, computed at this point: neither moved before nor after the neighbouring steps. Compilers save
    /// registers by finishing one chain of operations before they begin the next, and the processor then waits for each
    /// result of the one chain.
    #[inline(always)]
    fn in_step(self, a: Self::V, b: Self::V) -> [Self::V; 2] {
        [a, b]
    }

    // ---- 16- and 8-bit storage ----

    /// [`Simd::load`] for 16-bit lanes.
    ///
    /// # Safety
    /// `p..p + N` must be readable.
    unsafe fn load_h(self, p: *const u16) -> Self::H;

    /// [`Simd::load_partial`] for 16-bit lanes.
    ///
    /// # Safety
    /// `p..p + n` must be readable and `n <= N`.
    unsafe fn load_h_partial(self, p: *const u16, n: usize) -> Self::H;

    /// [`Simd::store`] for 16-bit lanes.
    ///
    /// # Safety
    /// `p..p + N` must be writable.
    unsafe fn store_h(self, p: *mut u16, h: Self::H);

    /// [`Simd::store_partial`] for 16-bit lanes.
    ///
    /// # Safety
    /// `p..p + n` must be writable and `n <= N`.
    unsafe fn store_h_partial(self, p: *mut u16, h: Self::H, n: usize);

    /// [`Simd::stream`] for 16-bit lanes.
    ///
    /// # Safety
    /// `p..p + N` must be writable and `p` a multiple of `N * 2` bytes.
    unsafe fn stream_h(self, p: *mut u16, h: Self::H);

    /// [`Simd::load`] for 8-bit lanes.
    ///
    /// # Safety
    /// `p..p + N` must be readable.
    unsafe fn load_b(self, p: *const u8) -> Self::B;

    /// [`Simd::load_partial`] for 8-bit lanes.
    ///
    /// # Safety
    /// `p..p + n` must be readable and `n <= N`.
    unsafe fn load_b_partial(self, p: *const u8, n: usize) -> Self::B;

    /// [`Simd::store`] for 8-bit lanes.
    ///
    /// # Safety
    /// `p..p + N` must be writable.
    unsafe fn store_b(self, p: *mut u8, b: Self::B);

    /// [`Simd::store_partial`] for 8-bit lanes.
    ///
    /// # Safety
    /// `p..p + n` must be writable and `n <= N`.
    unsafe fn store_b_partial(self, p: *mut u8, b: Self::B, n: usize);

    /// [`Simd::stream`] for 8-bit lanes.
    ///
    /// # Safety
    /// `p..p + N` must be writable and `p` a multiple of `N` bytes.
    unsafe fn stream_b(self, p: *mut u8, b: Self::B);

    /// Widens 16-bit lanes with zeros.
    fn h_to_i(self, h: Self::H) -> Self::I;
    /// Keeps the low 16 bits of each lane.
    fn i_to_h(self, i: Self::I) -> Self::H;
    /// Widens 8-bit lanes with zeros.
    fn b_to_i(self, b: Self::B) -> Self::I;
    /// Keeps the low 8 bits of each lane.
    fn i_to_b(self, i: Self::I) -> Self::B;
    /// Widens IEEE half floats; exact, NaN becomes quiet.
    fn f16_to_f32(self, h: Self::H) -> Self::V;
    /// Rounds to IEEE half floats: nearest, ties to even, overflow to infinity.
    fn f32_to_f16(self, v: Self::V) -> Self::H;

    // ---- f32: arithmetic ----

    /// `x` in every lane.
    fn splat(self, x: f32) -> Self::V;
    /// `a + b`.
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a - b`.
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b`.
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a / b`, correctly rounded.
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`, rounded once.
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// `c - a * b`, rounded once.
    fn fnma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// Square root, correctly rounded.
    fn sqrt(self, a: Self::V) -> Self::V;
    /// The larger; exactly `if a > b { a } else { b }`, so `b` where either is NaN and `b` where they are equal.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// The smaller; exactly `if a < b { a } else { b }`, so `b` where either is NaN and `b` where they are equal.
    fn min(self, a: Self::V, b: Self::V) -> Self::V;
    /// Rounds towards minus infinity.
    fn floor(self, a: Self::V) -> Self::V;
    /// Rounds to the nearest integer, ties to even.
    fn round(self, a: Self::V) -> Self::V;

    // ---- comparison and choice ----

    /// `a < b`; no where either is NaN.
    fn lt(self, a: Self::V, b: Self::V) -> Self::M;
    /// `a <= b`; no where either is NaN.
    fn le(self, a: Self::V, b: Self::V) -> Self::M;
    /// `a == b`; no where either is NaN.
    fn eq(self, a: Self::V, b: Self::V) -> Self::M;
    /// Whether a lane is NaN.
    fn is_nan(self, a: Self::V) -> Self::M;
    /// `a` where the mask says yes, else `b`.
    fn select(self, m: Self::M, a: Self::V, b: Self::V) -> Self::V;
    /// Whether any lane says yes.
    fn any(self, m: Self::M) -> bool;
    /// Swaps lanes `2i` and `2i + 1`.
    fn swap_pairs(self, v: Self::V) -> Self::V;

    /// The table entry at the index in the lowest bits of each lane.
    #[inline(always)]
    fn look_up(self, table: &[f32; TABLE], index: Self::I) -> Self::V {
        let (mut bits, mut entries) = ([0f32; MAX_LANES], [0f32; MAX_LANES]);
        // SAFETY: the arrays hold the lanes of a vector; stores leave all bits as they are.
        unsafe {
            self.store(bits.as_mut_ptr(), self.of_bits(index));
            for (entry, bits) in entries.iter_mut().zip(bits).take(Self::N) {
                *entry = table[bits.to_bits() as usize % TABLE];
            }
            self.load(entries.as_ptr())
        }
    }

    // ---- i32 ----

    /// `x` in every lane.
    fn isplat(self, x: i32) -> Self::I;
    /// `a + b`, wrapping.
    fn iadd(self, a: Self::I, b: Self::I) -> Self::I;
    /// `a - b`, wrapping.
    fn isub(self, a: Self::I, b: Self::I) -> Self::I;
    /// Bitwise and.
    fn iand(self, a: Self::I, b: Self::I) -> Self::I;
    /// Bitwise or.
    fn ior(self, a: Self::I, b: Self::I) -> Self::I;
    /// Bitwise exclusive or.
    fn ixor(self, a: Self::I, b: Self::I) -> Self::I;
    /// The smaller, signed.
    fn imin(self, a: Self::I, b: Self::I) -> Self::I;
    /// Shift left by `k < 32`; free of cost only where `k` is a constant.
    fn shl(self, a: Self::I, k: u32) -> Self::I;
    /// Logical shift right by `k < 32`.
    fn shr(self, a: Self::I, k: u32) -> Self::I;
    /// Arithmetic shift right by `k < 32`.
    fn sar(self, a: Self::I, k: u32) -> Self::I;
    /// `a > b`, signed.
    fn igt(self, a: Self::I, b: Self::I) -> Self::M;
    /// `a` where the mask says yes, else `b`.
    fn iselect(self, m: Self::M, a: Self::I, b: Self::I) -> Self::I;

    /// The bits in which `a` or `b` differs from `from`.
    #[inline(always)]
    fn differing(self, a: Self::I, b: Self::I, from: i32) -> Self::I {
        let from = self.isplat(from);
        self.ior(self.ixor(a, from), self.ixor(b, from))
    }

    /// Whether any lane differs from `from` in any of these bits.
    #[inline(always)]
    fn any_differs(self, i: Self::I, from: i32, bits: i32) -> bool {
        self.any_bits(self.ixor(i, self.isplat(from)), bits)
    }

    /// Whether any lane has any of these bits.
    #[inline(always)]
    fn any_bits(self, i: Self::I, bits: i32) -> bool {
        let found = self.iand(i, self.isplat(bits));
        let zero = self.isplat(0);
        self.any(self.igt(found, zero)) || self.any(self.igt(zero, found))
    }

    /// The bits of floats.
    fn bits_of(self, v: Self::V) -> Self::I;
    /// Floats from their bits.
    fn of_bits(self, i: Self::I) -> Self::V;
    /// Integers to the nearest floats.
    fn i_to_f32(self, i: Self::I) -> Self::V;
    /// Floats to the nearest integers, ties to even. Lanes must be within the range of `i32`.
    fn f32_to_i(self, v: Self::V) -> Self::I;

    // ---- reductions: lane `i` with lane `i + N/2`, then the halves again, down to one ----

    /// Sum of the lanes, in the fixed tree order: the result depends on the lanes' values and `N` alone.
    fn reduce_add(self, v: Self::V) -> f32;
    /// Largest lane, or NaN if any lane is.
    fn reduce_max(self, v: Self::V) -> f32;

    // ---- derived ----

    /// Zero in every lane.
    #[inline(always)]
    fn zero(self) -> Self::V {
        self.splat(0.0)
    }

    /// `a > b`; no where either is NaN.
    #[inline(always)]
    fn gt(self, a: Self::V, b: Self::V) -> Self::M {
        self.lt(b, a)
    }

    /// The larger, or NaN where either is NaN.
    #[inline(always)]
    fn max_nan(self, a: Self::V, b: Self::V) -> Self::V {
        self.select(self.is_nan(a), a, self.max(a, b))
    }

    /// The smaller, or NaN where either is NaN.
    #[inline(always)]
    fn min_nan(self, a: Self::V, b: Self::V) -> Self::V {
        self.select(self.is_nan(a), a, self.min(a, b))
    }

    /// `-a`: flips the sign, also of zero and NaN.
    #[inline(always)]
    fn neg(self, a: Self::V) -> Self::V {
        self.of_bits(self.ixor(self.bits_of(a), self.isplat(SIGN)))
    }

    /// `|a|`.
    #[inline(always)]
    fn abs(self, a: Self::V) -> Self::V {
        self.of_bits(self.iand(self.bits_of(a), self.isplat(!SIGN)))
    }

    /// `magnitude`, which must not be negative, with the sign of `sign`.
    #[inline(always)]
    fn with_sign(self, magnitude: Self::V, sign: Self::V) -> Self::V {
        let sign = self.iand(self.bits_of(sign), self.isplat(SIGN));
        self.of_bits(self.ior(self.bits_of(magnitude), sign))
    }

    /// The lanes of even and of odd index of `a` followed by `b`.
    #[inline(always)]
    fn unzip(self, a: Self::V, b: Self::V) -> (Self::V, Self::V) {
        let (mut mixed, mut even, mut odd) = ([0f32; 2 * MAX_LANES], [0f32; MAX_LANES], [0f32; MAX_LANES]);
        // SAFETY: the arrays hold the lanes of two vectors and of one.
        unsafe {
            self.store(mixed.as_mut_ptr(), a);
            self.store(mixed.as_mut_ptr().add(Self::N), b);
            for i in 0..Self::N {
                (even[i], odd[i]) = (mixed[2 * i], mixed[2 * i + 1]);
            }
            (self.load(even.as_ptr()), self.load(odd.as_ptr()))
        }
    }

    /// Undoes [`Simd::unzip`].
    #[inline(always)]
    fn zip(self, even: Self::V, odd: Self::V) -> (Self::V, Self::V) {
        let (mut mixed, mut a, mut b) = ([0f32; 2 * MAX_LANES], [0f32; MAX_LANES], [0f32; MAX_LANES]);
        // SAFETY: the arrays hold the lanes of two vectors and of one.
        unsafe {
            self.store(a.as_mut_ptr(), even);
            self.store(b.as_mut_ptr(), odd);
            for i in 0..Self::N {
                (mixed[2 * i], mixed[2 * i + 1]) = (a[i], b[i]);
            }
            (self.load(mixed.as_ptr()), self.load(mixed.as_ptr().add(Self::N)))
        }
    }

    /// Rounds to the upper halves of floats, bf16: nearest, ties to even, overflow to infinity. NaN becomes quiet.
    #[inline(always)]
    fn f32_to_bf16(self, v: Self::V) -> Self::H {
        self.i_to_h(bf16_bits(self, v))
    }

    /// [`Simd::f32_to_bf16`], but subnormal numbers may become zero.
    #[inline(always)]
    fn f32_to_bf16_flushed(self, v: Self::V) -> Self::H {
        self.f32_to_bf16(v)
    }

    /// Rounds as [`Simd::f32_to_bf16`]: bf16 of `low` in the lower half of each lane, of `high` in the upper.
    #[inline(always)]
    fn interleave_bf16(self, low: Self::V, high: Self::V) -> Self::I {
        self.ior(bf16_bits(self, low), self.shl(bf16_bits(self, high), 16))
    }

    /// [`Simd::interleave_bf16`] of approximations, in fewer instructions: halfway cases are rounded away from zero, and
    /// NaN must have a lower half of zeros, as any has that comes of bf16 or of arithmetic.
    #[inline(always)]
    fn interleave_bf16_near(self, low: Self::V, high: Self::V) -> Self::I {
        let half = self.isplat(0x8000);
        let low = self.shr(self.iadd(self.bits_of(low), half), 16);
        self.ior(low, self.iand(self.iadd(self.bits_of(high), half), self.isplat(-0x1_0000)))
    }

    /// Reads `N` bf16 values into an unspecified order of lanes, the same for every address: for sums and elementwise
    /// work, where order does not matter.
    ///
    /// # Safety
    /// `p..p + N` must be readable.
    #[inline(always)]
    unsafe fn load_bf16_unordered(self, p: *const u16) -> Self::V {
        // SAFETY: passed on.
        let h = unsafe { self.load_h(p) };
        self.of_bits(self.shl(self.h_to_i(h), 16))
    }

    /// Rounds and writes `N` values; past the caches if `stream`.
    ///
    /// # Safety
    /// `p..p + N` must be writable, and with `stream` `p` a multiple of `N * 2` bytes or of 64.
    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut u16, v: Self::V, stream: bool) {
        let h = self.f32_to_bf16(v);
        // SAFETY: passed on.
        unsafe { if stream { self.stream_h(p, h) } else { self.store_h(p, h) } }
    }

    /// [`Simd::store_bf16`] of `low`, followed by that of `high`.
    ///
    /// # Safety
    /// As [`Simd::store_bf16`], for twice the values.
    #[inline(always)]
    unsafe fn store_bf16_pair(self, p: *mut u16, low: Self::V, high: Self::V, stream: bool) {
        // SAFETY: passed on.
        unsafe {
            self.store_bf16(p, low, stream);
            self.store_bf16(p.add(Self::N), high, stream);
        }
    }

    /// [`Simd::store_bf16`] of lanes in the order of [`Simd::load_bf16_unordered`], to where they would be read from.
    ///
    /// # Safety
    /// As [`Simd::store_bf16`].
    #[inline(always)]
    unsafe fn store_bf16_unordered(self, p: *mut u16, v: Self::V, stream: bool) {
        // SAFETY: passed on.
        unsafe { self.store_bf16(p, v, stream) }
    }

    /// [`Simd::store_bf16_unordered`] of approximations, whose halfway cases may be rounded away from zero.
    ///
    /// # Safety
    /// As [`Simd::store_bf16`].
    #[inline(always)]
    unsafe fn store_bf16_near(self, p: *mut u16, v: Self::V, stream: bool) {
        // SAFETY: passed on.
        unsafe { self.store_bf16_unordered(p, v, stream) }
    }

    /// Reads `N` values of e4m3 in the order of [`Simd::load_bf16_unordered`]. NaN has a lower half of zeros.
    ///
    /// # Safety
    /// `p..p + N` must be readable.
    #[inline(always)]
    unsafe fn load_e4m3_unordered(self, p: *const u8) -> Self::V {
        // SAFETY: passed on.
        fp8::even_nan(self, fp8::decode_e4m3(self, self.b_to_i(unsafe { self.load_b(p) })))
    }

    /// Rounds and writes `N` values of e4m3, in that order if `unordered`; past the caches if `stream`.
    ///
    /// # Safety
    /// `p..p + N` must be writable, and with `stream` `p` a multiple of `N` bytes or of 64.
    #[inline(always)]
    unsafe fn store_e4m3(self, p: *mut u8, v: Self::V, _unordered: bool, stream: bool) {
        let b = self.i_to_b(fp8::encode_e4m3(self, v));
        // SAFETY: passed on.
        unsafe { if stream { self.stream_b(p, b) } else { self.store_b(p, b) } }
    }

    /// `2 N` values of e4m3: those at even places, and those at odd places.
    ///
    /// # Safety
    /// `p..p + 2 N` must be readable.
    #[inline(always)]
    unsafe fn load_e4m3_pair(self, p: *const u8) -> [Self::V; 2] {
        // SAFETY: passed on.
        unsafe { fp8::load_pair(self, p) }
    }

    /// [`Simd::store_e4m3`] of two vectors, one after the other, or `zipped` at even and odd places.
    ///
    /// # Safety
    /// As [`Simd::store_e4m3`], for twice the values.
    #[inline(always)]
    unsafe fn store_e4m3_pair(self, p: *mut u8, v: [Self::V; 2], zipped: bool, stream: bool) {
        // SAFETY: passed on.
        unsafe { fp8::store_pair(self, p, v, zipped, stream) }
    }

    /// Permutes the lanes of a vector into the order of [`Simd::load_bf16_unordered`].
    #[inline(always)]
    fn to_bf16_unordered(self, v: Self::V) -> Self::V {
        v
    }

    /// [`Simd::swap_pairs`] of lanes in the order of [`Simd::load_bf16_unordered`].
    #[inline(always)]
    fn swap_pairs_bf16_unordered(self, v: Self::V) -> Self::V {
        self.swap_pairs(v)
    }

    /// `v - floor(v)` for `v` that are not infinity: with [`Simd::scale2_floor`] the two parts of a power of two. Rounded
    /// down, zero of either sign. NaN stays NaN.
    #[inline(always)]
    fn fraction(self, v: Self::V) -> Self::V {
        // Minus infinity minus itself would be NaN.
        let v = self.max(self.splat(-200.0), v);
        let whole = self.floor(v);
        let part = self.sub(v, whole);
        // Between -1 and 0 the difference may have been rounded up; added again, it shows.
        let above = self.lt(v, self.add(part, whole));
        let below = self.of_bits(self.isub(self.bits_of(part), self.isplat(1)));
        self.select(above, below, part)
    }

    /// `v * 2^floor(n)`, rounded once, for `v` in `0.5..2`: zero for `n` of minus infinity, infinity for large ones.
    #[inline(always)]
    fn scale2_floor(self, v: Self::V, n: Self::V) -> Self::V {
        let n = self.max(self.splat(-200.0), self.min(self.splat(200.0), n));
        self.scale2(v, self.floor(n))
    }

    /// [`Simd::scale2_floor`], but zero for `n` below -126: a result below the normal numbers would trap into microcode,
    /// for some 150 cycles.
    #[inline(always)]
    fn scale2_floor_normal(self, v: Self::V, n: Self::V) -> Self::V {
        let least = self.splat(-126.0);
        let scaled = self.scale2_floor(v, self.max(least, n));
        self.select(self.lt(n, least), self.zero(), scaled)
    }

    /// `2^n` for whole `n` in `-126..=127`.
    #[inline(always)]
    fn pow2(self, n: Self::V) -> Self::V {
        self.of_bits(self.shl(self.iadd(self.f32_to_i(n), self.isplat(127)), 23))
    }

    /// `v * 2^n`, rounded once, for whole `n` in `-252..=252` and `v` in `0.5..2`: reaches subnormals and infinity.
    #[inline(always)]
    fn scale2(self, v: Self::V, n: Self::V) -> Self::V {
        // Two factors, because one alone could not be represented near either end. The first product is exact.
        let n = self.f32_to_i(n);
        let half = self.sar(n, 1);
        let bias = self.isplat(127);
        let a = self.of_bits(self.shl(self.iadd(half, bias), 23));
        let b = self.of_bits(self.shl(self.iadd(self.isub(n, half), bias), 23));
        self.mul(self.mul(v, a), b)
    }
}

/// The bits of bf16 nearest to each lane, in its lower half.
#[inline(always)]
fn bf16_bits<S: Simd>(s: S, v: S::V) -> S::I {
    let bits = s.bits_of(v);
    let high = s.shr(bits, 16);
    let odd = s.iand(high, s.isplat(1));
    let rounded = s.shr(s.iadd(s.iadd(bits, s.isplat(0x7fff)), odd), 16);
    s.iselect(s.is_nan(v), s.ior(high, s.isplat(0x40)), rounded)
}
