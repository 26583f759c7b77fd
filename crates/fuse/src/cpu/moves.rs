//! Between memory and registers: loads that widen, stores that round, reductions of blocks.

use crate::op::Reduce;
use half::{bf16, f16};
use warpsmith::DType;
use warpsmith::cpu::rows::for_vectors;
use warpsmith::cpu::{CpuElement, Simd, Task, Tier, dispatch};

/// Bytes of a register's element.
pub(super) fn register_size(dtype: DType) -> usize {
    if matches!(dtype, DType::I32 | DType::I64) { 8 } else { 4 }
}

struct Widen<T>(*const T, *mut f32, usize);

impl<T: CpuElement> Task for Widen<T> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Widen(from, to, n) = self;
        for_vectors::<S>(
            n,
            #[inline(always)]
            |i, count| {
                // SAFETY: whoever made the task promised `n` elements on both sides.
                unsafe {
                    let v = if count == S::N {
                        T::load(s, from.add(i))
                    } else {
                        T::load_partial(s, from.add(i), count)
                    };
                    if count == S::N { s.store(to.add(i), v) } else { s.store_partial(to.add(i), v, count) }
                }
            },
        );
    }
}

struct Narrow<T>(*const f32, *mut T, usize, bool);

impl<T: CpuElement> Task for Narrow<T> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Narrow(from, to, n, stream) = self;
        let stream = stream && (to as usize).is_multiple_of(64);
        for_vectors::<S>(
            n,
            #[inline(always)]
            |i, count| {
                // SAFETY: whoever made the task promised `n` elements on both sides; streamed ones are aligned.
                unsafe {
                    let v =
                        if count == S::N { s.load(from.add(i)) } else { s.load_partial(from.add(i), count) };
                    if count < S::N {
                        T::store_partial(s, to.add(i), v, count);
                    } else {
                        T::put(s, to.add(i), v, stream);
                    }
                }
            },
        );
        if stream {
            s.fence();
        }
    }
}

/// Copies `count` elements, `step` elements apart, to a register.
///
/// # Safety
/// They must be readable, and the register have room.
pub(super) unsafe fn load(tier: Tier, dtype: DType, from: *const u8, step: isize, to: *mut u8, count: usize) {
    let floats = to.cast::<f32>();
    let ints = to.cast::<i64>();
    // SAFETY: passed on.
    unsafe {
        match (dtype, step) {
            (DType::F32, 1) => dispatch(tier, Widen(from.cast::<f32>(), floats, count)),
            (DType::BF16, 1) => dispatch(tier, Widen(from.cast::<bf16>(), floats, count)),
            (DType::F16, 1) => dispatch(tier, Widen(from.cast::<f16>(), floats, count)),
            (DType::I64, 1) => std::ptr::copy_nonoverlapping(from.cast(), ints, count),
            (DType::F32, _) => each(from, step, floats, count, |x: f32| x),
            (DType::BF16, _) => each(from, step, floats, count, bf16::to_f32),
            (DType::F16, _) => each(from, step, floats, count, f16::to_f32),
            (DType::I64, _) => each(from, step, ints, count, |x: i64| x),
            (DType::I32, _) => each(from, step, ints, count, |x: i32| i64::from(x)),
            // Any byte but 0 is true.
            _ => each(from, step, floats, count, |x: u8| f32::from(u8::from(x != 0))),
        }
    }
}

#[inline(always)]
unsafe fn each<T: Copy, R>(from: *const u8, step: isize, to: *mut R, count: usize, f: impl Fn(T) -> R) {
    let from = from.cast::<T>();
    if step == 0 && count > 0 {
        for i in 0..count {
            // SAFETY: passed on.
            unsafe { to.add(i).write(f(from.read())) };
        }
        return;
    }
    for i in 0..count {
        // SAFETY: passed on.
        unsafe { to.add(i).write(f(from.offset((i as isize).wrapping_mul(step)).read())) };
    }
}

/// Copies `count` elements of a register to memory, `step` elements apart; dense and aligned ones past the caches if
/// `stream`.
///
/// # Safety
/// They must be writable, and the register hold as many.
pub(super) unsafe fn store(
    tier: Tier,
    dtype: DType,
    from: *const u8,
    to: *mut u8,
    step: isize,
    count: usize,
    stream: bool,
) {
    let (floats, ints) = (from.cast::<f32>(), from.cast::<i64>());
    // SAFETY: passed on.
    unsafe {
        match (dtype, step) {
            (DType::F32, 1) => dispatch(tier, Narrow(floats, to.cast::<f32>(), count, stream)),
            (DType::BF16, 1) => dispatch(tier, Narrow(floats, to.cast::<bf16>(), count, stream)),
            (DType::F16, 1) => dispatch(tier, Narrow(floats, to.cast::<f16>(), count, stream)),
            (DType::F32, _) => put(floats, to, step, count, |x: f32| x),
            (DType::BF16, _) => put(floats, to, step, count, bf16::from_f32),
            (DType::F16, _) => put(floats, to, step, count, f16::from_f32),
            (DType::I64, _) => put(ints, to, step, count, |x: i64| x),
            (DType::I32, _) => put(ints, to, step, count, |x: i64| x as i32),
            _ => put(floats, to, step, count, |x: f32| u8::from(x != 0.0)),
        }
    }
}

#[inline(always)]
unsafe fn put<T: Copy, R>(from: *const T, to: *mut u8, step: isize, count: usize, f: impl Fn(T) -> R) {
    for i in 0..count {
        // SAFETY: passed on.
        unsafe { to.cast::<R>().offset((i as isize).wrapping_mul(step)).write(f(from.add(i).read())) };
    }
}

struct SumOf(*const f32, usize);

impl Task for SumOf {
    type Out = f32;

    /// In four vectors at a time, whose order depends on the count alone.
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f32 {
        let SumOf(from, n) = self;
        let mut sums = [s.zero(); 4];
        let mut i = 0usize;
        let whole = n - n % S::N.wrapping_mul(4);
        while i < whole {
            for (k, sum) in sums.iter_mut().enumerate() {
                // SAFETY: whoever made the task promised `n` elements.
                *sum = s.add(*sum, unsafe { s.load(from.add(i.wrapping_add(k.wrapping_mul(S::N)))) });
            }
            i = i.wrapping_add(S::N.wrapping_mul(4));
        }
        while i < n {
            let count = (n - i).min(S::N);
            // SAFETY: as above; lanes past the count are zero.
            sums[0] = s.add(sums[0], unsafe { s.load_partial(from.add(i), count) });
            i = i.wrapping_add(S::N);
        }
        s.reduce_add(s.add(s.add(sums[0], sums[1]), s.add(sums[2], sums[3])))
    }
}

struct DotOf(*const f32, *const f32, usize);

impl Task for DotOf {
    type Out = f32;

    /// As [`SumOf`].
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f32 {
        let DotOf(a, b, n) = self;
        let mut sums = [s.zero(); 4];
        let mut i = 0usize;
        let whole = n - n % S::N.wrapping_mul(4);
        while i < whole {
            for (k, sum) in sums.iter_mut().enumerate() {
                let at = i.wrapping_add(k.wrapping_mul(S::N));
                // SAFETY: whoever made the task promised `n` elements of both.
                *sum = unsafe { s.fma(s.load(a.add(at)), s.load(b.add(at)), *sum) };
            }
            i = i.wrapping_add(S::N.wrapping_mul(4));
        }
        while i < n {
            let count = (n - i).min(S::N);
            // SAFETY: as above; lanes past the count are zero.
            sums[0] =
                unsafe { s.fma(s.load_partial(a.add(i), count), s.load_partial(b.add(i), count), sums[0]) };
            i = i.wrapping_add(S::N);
        }
        s.reduce_add(s.add(s.add(sums[0], sums[1]), s.add(sums[2], sums[3])))
    }
}

/// The sum of the products of `n` floats with others.
///
/// # Safety
/// They must be readable.
pub(super) unsafe fn dot(tier: Tier, a: *const f32, b: *const f32, n: usize) -> f32 {
    dispatch(tier, DotOf(a, b, n))
}

struct LargestOf(*const f32, usize, bool);

impl Task for LargestOf {
    type Out = f32;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f32 {
        let LargestOf(from, n, negate) = self;
        let mut best = s.splat(f32::NEG_INFINITY);
        let mut i = 0usize;
        let whole = n - n % S::N;
        while i < whole {
            // SAFETY: whoever made the task promised `n` elements.
            let x = unsafe { s.load(from.add(i)) };
            best = s.max_nan(if negate { s.neg(x) } else { x }, best);
            i = i.wrapping_add(S::N);
        }
        let mut result = s.reduce_max(best);
        while i < n {
            // SAFETY: as above.
            let x = unsafe { from.add(i).read() };
            result = larger(result, if negate { -x } else { x });
            i = i.wrapping_add(1);
        }
        if negate { -result } else { result }
    }
}

fn larger(a: f32, b: f32) -> f32 {
    if a.is_nan() || a > b { a } else { b }
}

/// The sum or the largest or smallest of `n` floats; a mean is a sum so far.
///
/// # Safety
/// They must be readable.
pub(super) unsafe fn reduce(tier: Tier, f: Reduce, from: *const f32, n: usize) -> f32 {
    match f {
        Reduce::Sum | Reduce::Mean => dispatch(tier, SumOf(from, n)),
        Reduce::Max => dispatch(tier, LargestOf(from, n, false)),
        Reduce::Min => dispatch(tier, LargestOf(from, n, true)),
    }
}

/// [`reduce`] of whole numbers.
///
/// # Safety
/// They must be readable.
pub(super) unsafe fn reduce_int(f: Reduce, from: *const i64, n: usize) -> i64 {
    // SAFETY: passed on.
    let all = unsafe { std::slice::from_raw_parts(from, n) };
    all.iter().fold(start_int(f), |a, &b| join_int(f, a, b))
}

/// What a reduction of no whole numbers gives.
pub(super) fn start_int(f: Reduce) -> i64 {
    match f {
        Reduce::Sum | Reduce::Mean => 0,
        Reduce::Max => i64::MIN,
        Reduce::Min => i64::MAX,
    }
}

/// Joins the results of two parts of a row.
pub(super) fn join(f: Reduce, a: f32, b: f32) -> f32 {
    match f {
        Reduce::Sum | Reduce::Mean => a + b,
        Reduce::Max => larger(a, b),
        Reduce::Min => -larger(-a, -b),
    }
}

/// Joins the results of two parts of a row.
pub(super) fn join_int(f: Reduce, a: i64, b: i64) -> i64 {
    match f {
        Reduce::Sum | Reduce::Mean => a.wrapping_add(b),
        Reduce::Max => a.max(b),
        Reduce::Min => a.min(b),
    }
}

struct AddTo(*const f32, *mut f32, usize);

impl Task for AddTo {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let AddTo(from, to, n) = self;
        for_vectors::<S>(
            n,
            #[inline(always)]
            |i, count| {
                // SAFETY: whoever made the task promised `n` elements on both sides.
                unsafe {
                    if count == S::N {
                        s.store(to.add(i), s.add(s.load(to.add(i)), s.load(from.add(i))));
                    } else {
                        let sum = s.add(s.load_partial(to.add(i), count), s.load_partial(from.add(i), count));
                        s.store_partial(to.add(i), sum, count);
                    }
                }
            },
        );
    }
}

/// Adds `n` floats to others.
///
/// # Safety
/// `from` must be readable, `to` writable, and they must not overlap.
pub(super) unsafe fn add_to(tier: Tier, from: *const f32, to: *mut f32, n: usize) {
    dispatch(tier, AddTo(from, to, n));
}
