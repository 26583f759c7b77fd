//! Shared by row kernels: loops over the vectors of a row, sums in a fixed order, strided rows.

use super::element::CpuElement;
use super::prefetch::{AHEAD, LINE, claim_ahead, fetch};
use super::scratch::{Need, Region};
use super::simd::{MAX_LANES, Pair, Simd, Task, dispatch};
use super::tier::Tier;
use crate::tensor::DType;

/// Calls `f(start, count)` for each vector of a row of `n` elements: `count` is `S::N` except for the last. `f` is
/// inlined once for each of the two, so that whole vectors pay nothing for the tail.
#[inline(always)]
pub fn for_vectors<S: Simd>(n: usize, mut f: impl FnMut(usize, usize)) {
    let whole = n - n % S::N;
    let mut i = 0usize;
    while i < whole {
        f(i, S::N);
        i = i.wrapping_add(S::N);
    }
    if i < n {
        f(i, n - i);
    }
}

/// Reads `count` elements from `p + i`; lanes past them are zero.
///
/// # Safety
/// `p + i .. p + i + count` must be readable and `count <= N`.
#[inline(always)]
pub unsafe fn load_at<S: Simd, T: CpuElement>(s: S, p: *const T, i: usize, count: usize) -> S::V {
    // SAFETY: passed on.
    unsafe { if count == S::N { T::load(s, p.add(i)) } else { T::load_partial(s, p.add(i), count) } }
}

/// [`load_at`] with the lanes of whole vectors in any order, the same for every row.
///
/// # Safety
/// As [`load_at`].
#[inline(always)]
pub unsafe fn load_unordered_at<S: Simd, T: CpuElement>(s: S, p: *const T, i: usize, count: usize) -> S::V {
    // SAFETY: passed on.
    unsafe {
        if count == S::N { T::load_unordered(s, p.add(i)) } else { T::load_partial(s, p.add(i), count) }
    }
}

/// Writes `count` elements to `p + i`, in cache.
///
/// # Safety
/// `p + i .. p + i + count` must be writable and `count <= N`.
#[inline(always)]
pub unsafe fn store_at<S: Simd, T: CpuElement>(s: S, p: *mut T, i: usize, count: usize, v: S::V) {
    // SAFETY: passed on.
    unsafe {
        if count == S::N { T::put(s, p.add(i), v, false) } else { T::store_partial(s, p.add(i), v, count) }
    }
}

/// Writes `count` elements of a result to `p + i`: whole vectors bypass the caches if `stream`, else the cache lines of
/// later results are prefetched for writing.
///
/// # Safety
/// `p + i .. p + i + count` must be writable and `count <= N`; with `stream`, `p` must be aligned as
/// [`can_stream`] says and `i` a multiple of `N`.
#[inline(always)]
pub unsafe fn put_at<S: Simd, T: CpuElement>(s: S, p: *mut T, i: usize, count: usize, v: S::V, stream: bool) {
    // SAFETY: passed on.
    unsafe {
        if count == S::N && stream {
            return T::put(s, p.add(i), v, true);
        }
        claim_ahead::<S, T>(p.wrapping_add(i));
        store_at(s, p, i, count, v);
    }
}

/// [`put_at`] from lanes in the order of [`load_unordered_at`].
///
/// # Safety
/// As [`put_at`].
#[inline(always)]
pub unsafe fn put_unordered_at<S: Simd, T: CpuElement>(
    s: S,
    p: *mut T,
    i: usize,
    count: usize,
    v: S::V,
    stream: bool,
) {
    // SAFETY: passed on. What is left of a row is in order.
    unsafe {
        if count != S::N {
            return T::store_partial(s, p.add(i), v, count);
        }
        if !stream {
            claim_ahead::<S, T>(p.wrapping_add(i));
        }
        T::put_unordered(s, p.add(i), v, stream);
    }
}

/// [`put_unordered_at`] of approximations, whose halfway cases may be rounded away from zero.
///
/// # Safety
/// As [`put_at`].
#[inline(always)]
pub unsafe fn put_near_at<S: Simd, T: CpuElement>(
    s: S,
    p: *mut T,
    i: usize,
    count: usize,
    v: S::V,
    stream: bool,
) {
    // SAFETY: passed on.
    unsafe {
        if count != S::N || T::DTYPE != DType::BF16 {
            return put_unordered_at(s, p, i, count, v, stream);
        }
        if !stream {
            claim_ahead::<S, T>(p.wrapping_add(i));
        }
        T::put_near(s, p.add(i), v, stream);
    }
}

/// The whole number `offset` elements past the address `base` of a tensor of i64 or i32.
///
/// # Safety
/// The tensor must have this dtype and the offset be that of one of its elements.
#[inline(always)]
pub unsafe fn index_at(base: usize, dtype: DType, offset: usize) -> i64 {
    // SAFETY: passed on.
    unsafe {
        match dtype {
            DType::I32 => *(base as *const i32).add(offset) as i64,
            _ => *(base as *const i64).add(offset),
        }
    }
}

/// Whether vectors of a row that starts at `p` may be streamed.
#[inline(always)]
pub fn can_stream<S: Simd, T: CpuElement>(p: *mut T) -> bool {
    // Pairs are streamed a cache line at a time.
    (p as usize).is_multiple_of((S::N * size_of::<T>()).min(LINE))
}

/// Sums `f(start, count, sums)` over the vectors of a row, `K` sums at once. `f` adds its vector to each running sum;
/// lanes past `count` must add zero. The order depends on `n` alone. Each addition depends on the one before: use pairs
/// of vectors, or pairs of pairs, for sums that do little else.
#[inline(always)]
pub fn sum_vectors<S: Simd, const K: usize>(
    s: S,
    n: usize,
    mut f: impl FnMut(usize, usize, &mut [S::V; K]),
) -> [f32; K] {
    let mut sums = [s.zero(); K];
    for_vectors::<S>(
        n,
        #[inline(always)]
        |i, count| f(i, count, &mut sums),
    );
    // Not `map`: its closure would not be inlined, and every intrinsic would become a call.
    let mut totals = [0.0; K];
    for (total, sum) in totals.iter_mut().zip(sums) {
        *total = s.reduce_add(sum);
    }
    totals
}

/// `v` with zero in the lanes from `count` on, which are not part of the row.
#[inline(always)]
pub fn keep_first<S: Simd>(s: S, v: S::V, count: usize) -> S::V {
    replace_rest(s, v, count, 0.0)
}

/// `v` with `fill` in the lanes from `count` on.
#[inline(always)]
pub fn replace_rest<S: Simd>(s: S, v: S::V, count: usize, fill: f32) -> S::V {
    if count == S::N {
        return v;
    }
    let mut lanes = [fill; MAX_LANES];
    // SAFETY: no vector has more lanes, and `count <= N`.
    unsafe {
        s.store_partial(lanes.as_mut_ptr(), v, count.min(S::N));
        s.load(lanes.as_ptr())
    }
}

/// The closure itself. Attributes are allowed on arguments but not in `let`, and a closure that is not forced inline is
/// compiled without the tier's instructions.
#[inline(always)]
pub fn inlined<R, F: Fn(usize, usize) -> R>(f: F) -> F {
    f
}

/// Copies of rows whose elements are `step` apart: they are gathered before and scattered after the work, so that the
/// arithmetic, and its bits, are those of dense rows.
pub struct DenseRows<'a, T> {
    copies: &'a mut [T],
    /// Elements from one copy to the next.
    apart: usize,
    n: usize,
    /// A bit for each tensor that is not dense: those have copies, in their order.
    strided: u32,
}

impl<'a, T: CpuElement> DenseRows<'a, T> {
    /// Scratch for [`DenseRows::new`] with elements of this type.
    pub fn need(dtype: DType, n: usize, steps: &[isize]) -> Need {
        let row = Need::of::<u8>(n.saturating_mul(dtype.size()));
        row.times(strided(steps).count_ones() as usize, LINE)
    }

    /// Room for a row of up to `n` elements of each of the tensors with these steps; dense tensors need none.
    pub fn new(region: &mut Region<'a>, n: usize, steps: &[isize]) -> Self {
        let apart = (n * size_of::<T>()).next_multiple_of(LINE) / size_of::<T>();
        let strided = strided(steps);
        DenseRows { copies: region.slice(strided.count_ones() as usize * apart), apart, n, strided }
    }

    /// Sets the length of rows to `n`, at most what there is room for.
    pub fn set_len(&mut self, n: usize) {
        assert!(n <= self.apart, "{n} elements of a row, room for {}", self.apart);
        self.n = n;
    }

    #[inline]
    fn copy(&mut self, t: usize) -> &mut [T] {
        assert!(self.strided & 1 << t != 0, "tensor {t} was dense, and has no copy");
        let at = (self.strided & ((1 << t) - 1)).count_ones() as usize;
        &mut self.copies[at * self.apart..][..self.n]
    }

    /// The row at `p` of tensor `t`, dense.
    ///
    /// # Safety
    /// The `n` elements `step` apart from `p` must be readable, with the `step` given to `new`.
    #[inline]
    pub unsafe fn gather(&mut self, t: usize, p: *const T, step: isize) -> *const T {
        if step == 1 {
            return p;
        }
        let copy = self.copy(t);
        for (i, slot) in copy.iter_mut().enumerate() {
            // SAFETY: `i < n`.
            *slot = unsafe { *p.offset(i as isize * step) };
        }
        copy.as_ptr()
    }

    /// Where to write the dense row of tensor `t` that belongs at `p`; [`DenseRows::scatter`] puts it there.
    #[inline]
    pub fn target(&mut self, t: usize, p: *mut T, step: isize) -> *mut T {
        if step == 1 { p } else { self.copy(t).as_mut_ptr() }
    }

    /// Puts the row of tensor `t` in its place.
    ///
    /// # Safety
    /// The `n` elements `step` apart from `p` must be writable.
    #[inline]
    pub unsafe fn scatter(&mut self, t: usize, p: *mut T, step: isize) {
        if step != 1 {
            for (i, value) in self.copy(t).iter().enumerate() {
                // SAFETY: `i < n`.
                unsafe { *p.offset(i as isize * step) = *value };
            }
        }
    }
}

/// A bit for each of these steps that is not 1.
fn strided(steps: &[isize]) -> u32 {
    steps.iter().enumerate().fold(0, |bits, (t, &step)| bits | u32::from(step != 1) << t)
}

/// A dense row of `n` values over `divisor`, rounded to `U` and stored. A task of its own: conversions to narrow types
/// are long; inlined into each kernel for each type it reads, they would take minutes to compile.
pub struct Narrow<T, U> {
    /// The values.
    pub x: *const T,
    /// Where they go; dense.
    pub out: *mut U,
    /// How many.
    pub n: usize,
    /// 1 leaves values as they are.
    pub divisor: f32,
    /// Bypasses the caches where `out` allows it: call [`Simd::fence`] before others read them.
    pub stream: bool,
}

impl<T: CpuElement, U: CpuElement> Narrow<T, U> {
    /// Stores the row.
    ///
    /// # Safety
    /// `x` must be readable and `out` writable for `n` elements, the two apart.
    pub unsafe fn store(self, tier: Tier) {
        dispatch(tier, self);
    }
}

/// Division of many values by one number, with the same bits as a division.
#[derive(Clone, Copy)]
pub struct Divide<S: Simd> {
    divisor: S::V,
    inverse: S::V,
    /// Whether the inverse is good enough to correct a quotient by.
    invertible: bool,
}

impl<S: Simd> Divide<S> {
    /// By `divisor`.
    #[inline(always)]
    pub fn by(s: S, divisor: f32) -> Self {
        const MANTISSA: u32 = 0x007f_ffff;
        let moderate = (1e-18..1e18).contains(&divisor.abs());
        let invertible = moderate && divisor.to_bits() & MANTISSA != MANTISSA;
        Divide { divisor: s.splat(divisor), inverse: s.splat(1.0 / divisor), invertible }
    }

    /// `x / divisor`, correctly rounded except for quotients below `1e-18`, which may be off by one unit in the last
    /// place.
    #[inline(always)]
    pub fn quotient(&self, s: S, x: S::V) -> S::V {
        if !self.invertible {
            return s.div(x, self.divisor);
        }
        // The remainder is exact and corrects the quotient. For infinity it is NaN, and zero would lose its sign.
        let quotient = s.mul(x, self.inverse);
        let rest = s.fnma(quotient, self.divisor, x);
        let corrected = s.fma(rest, self.inverse, quotient);
        s.select(s.lt(s.zero(), s.abs(corrected)), corrected, quotient)
    }
}

impl<T: CpuElement, U: CpuElement> Task for Narrow<T, U> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let s = Pair(s);
        let divide = Divide::by(s, self.divisor);
        let stream = self.stream && can_stream::<Pair<S>, U>(self.out);
        for_vectors::<Pair<S>>(
            self.n,
            #[inline(always)]
            |i, count| {
                fetch::<Pair<S>, T>(self.x.wrapping_add(i).wrapping_byte_add(AHEAD));
                // SAFETY: [`Narrow::store`] asks its caller for this. Both types have the same order of lanes.
                unsafe {
                    if T::DTYPE == DType::BF16 && U::DTYPE == DType::F8E4M3 {
                        let value = divide.quotient(s, load_unordered_at(s, self.x, i, count));
                        put_unordered_at(s, self.out, i, count, value, stream);
                    } else {
                        let value = divide.quotient(s, load_at(s, self.x, i, count));
                        put_at(s, self.out, i, count, value, stream);
                    }
                }
            },
        );
    }
}

/// Runs `$body` with `$T` set to the Rust type of a float dtype that ops compute on.
macro_rules! with_float {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            $crate::tensor::DType::F32 => {
                type $T = f32;
                $body
            }
            $crate::tensor::DType::F16 => {
                type $T = half::f16;
                $body
            }
            $crate::tensor::DType::BF16 => {
                type $T = half::bf16;
                $body
            }
            other => unreachable!("the op's check admits no {other}"),
        }
    };
}
pub(crate) use with_float;

/// [`with_float`] for the 8-bit floats too, which ops read and write.
macro_rules! with_element {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            $crate::tensor::DType::F8E4M3 => {
                type $T = $crate::tensor::F8E4M3;
                $body
            }
            $crate::tensor::DType::F8E5M2 => {
                type $T = $crate::tensor::F8E5M2;
                $body
            }
            other => $crate::cpu::rows::with_float!(other, $T => $body),
        }
    };
}
pub(crate) use with_element;

#[cfg(feature = "tests")]
mod tests {
    use super::*;

    struct Quotients<'a>(&'a [f32], &'a [f32]);

    impl Task for Quotients<'_> {
        type Out = ();

        #[inline(always)]
        fn run<S: Simd>(self, s: S) {
            for &divisor in self.1 {
                let divide = Divide::by(s, divisor);
                for &x in self.0 {
                    let mut lanes = [0f32; MAX_LANES];
                    // SAFETY: no vector has more lanes.
                    unsafe { s.store(lanes.as_mut_ptr(), divide.quotient(s, s.splat(x))) };
                    let (got, want) = (lanes[0], x / divisor);
                    let tiny = want.abs() < 1e-18 && x != 0.0;
                    let same = got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan()) || tiny;
                    assert!(same, "{} {x:e} / {divisor:e}: {got:e}, want {want:e}", S::TIER);
                }
            }
        }
    }

    #[test]
    fn quotients_have_the_bits_of_divisions() {
        let mut x: Vec<f32> = (0..=u32::MAX).step_by(1_000_003).map(f32::from_bits).collect();
        x.extend([0.0, -0.0]);
        let mut divisors: Vec<f32> = (0..400u32).map(|i| f32::from_bits(0x3f00_0000 + i * 104_729)).collect();
        divisors.extend([0.0, -0.0, 1.0, -3.0, 1e-39, 1e-30, 3e38, f32::INFINITY, f32::NAN]);
        divisors.extend([1.0f32.next_down(), 1.0f32.next_up(), 2.0f32.next_down()]);
        for tier in Tier::available() {
            dispatch(tier, Quotients(&x, &divisors));
        }
    }
}
