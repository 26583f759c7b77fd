//! Softmax on the CPU, one source for all tiers.

use super::backward::{DOUT, DX, Y};
use super::{OUT, Problem, X};
use crate::cpu::rows::{
    Ahead, Scratch, can_stream, for_vectors, keep_first, load_at, load_unordered_at, replace_rest, store_at,
    sum_vectors, with_float,
};
use crate::cpu::simd::{MAX_LANES, Pair};
use crate::cpu::{
    CpuElement, Simd, Task, bf16, coarse, dispatch, l2_bytes, math, parallel_for, should_stream,
};
use crate::dtype::DType;
use crate::error::Result;
use crate::registry::Launch;
use std::marker::PhantomData;
use std::ops::Range;

/// Elements a thread works on at least: less is not worth waking one.
const GRAIN: usize = 1 << 14;

/// Rows too long for the cache are gone through in pieces of this many elements, which stay in L1.
const PIECE: usize = 4096;

pub(super) fn run(launch: &Launch<'_, Problem>) -> Result<()> {
    let p = launch.problem;
    let stream = should_stream(p.tensor_bytes());
    parallel_for(
        p.num_rows,
        GRAIN.div_ceil(p.hidden.max(1)),
        |rows| with_float!(p.dtype, T => dispatch(launch.tier, Forward::<T> { launch, rows, stream, t: PhantomData })),
    );
    Ok(())
}

struct Forward<'a, T> {
    launch: &'a Launch<'a, Problem>,
    rows: Range<usize>,
    stream: bool,
    t: PhantomData<T>,
}

impl<T: CpuElement> Task for Forward<'_, T> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let s = Pair(s);
        let p = self.launch.problem;
        let args = self.launch.args;
        let at = |index: usize, offset: usize| (args.address(index) as *mut T).wrapping_add(offset);
        let mut scratch = Scratch::<T>::new(p.hidden, &p.steps[..2]);
        // Half of L2 for the exponentials, the rest for the row itself and for what comes next.
        let fits = p.hidden * size_of::<f32>() <= l2_bytes() / 2;
        let mut powers = vec![0f32; if fits { p.hidden } else { 0 }];
        let scale = Scale::new(s, p.scale());
        for row in self.rows {
            let [x_at, out_at, _, _] = p.rows.offsets(row);
            // SAFETY: `check` bound both shapes to these sizes and strides, so every row lies in its tensor; threads
            // get disjoint rows; out is x only element for element, and each is read for the last time before it is
            // written.
            unsafe {
                let x = scratch.gather(0, at(X, x_at), p.steps[0]);
                let out = scratch.target(1, at(OUT, out_at), p.steps[1]);
                let stream = self.stream && can_stream::<S, T>(out);
                if fits {
                    let next = p.rows.offsets((row + 1).min(p.num_rows - 1))[0];
                    let ahead = Ahead::new(at(X, next).cast_const(), p.hidden, p.steps[0]);
                    row_in_cache(s, x, out, &mut powers, &scale, stream, ahead);
                } else {
                    long_row(s, x, out, p.hidden, &scale, stream);
                }
                scratch.scatter(1, at(OUT, out_at), p.steps[1]);
            }
        }
        if self.stream {
            s.fence();
        }
    }
}

/// The scale as a sign and a magnitude: with the sign applied first, the row's largest element is the pivot.
struct Scale<S: Simd> {
    negative: bool,
    sign: S::V,
    magnitude: S::V,
    /// The magnitude for powers of two.
    binary: S::V,
}

impl<S: Simd> Scale<S> {
    #[inline(always)]
    fn new(s: S, scale: f64) -> Self {
        let negative = scale < 0.0;
        let binary = scale.abs() * std::f64::consts::LOG2_E;
        Scale {
            negative,
            sign: s.splat(if negative { -1.0 } else { 1.0 }),
            magnitude: s.splat(scale.abs() as f32),
            binary: s.splat(binary as f32),
        }
    }

    /// `exp(magnitude (sign x - pivot))`, as accurate as `T` can tell; the pivot is at least every `sign x`.
    #[inline(always)]
    fn power<T: CpuElement>(&self, s: S, x: S::V, pivot: S::V) -> S::V {
        let below = s.fma(x, self.sign, s.neg(pivot));
        match T::DTYPE {
            DType::BF16 => bf16::exp2(s, s.mul(below, self.binary)),
            DType::F16 => coarse::exp2(s, s.mul(below, self.binary)),
            _ => math::exp(s, s.mul(below, self.magnitude)),
        }
    }
}

/// The largest of `sign x` over `n` elements, at least the lowest finite number: a pivot of `-inf` would turn parts
/// of a row that are all `-inf` into NaN. NaN is passed over; it returns with the sum.
///
/// # Safety
/// `x` must be readable for `n` elements.
#[inline(always)]
unsafe fn largest<S: Simd, T: CpuElement>(s: S, x: *const T, n: usize, scale: &Scale<S>) -> f32 {
    let pairs = Pair(s);
    let lowest = pairs.splat(f32::MIN);
    let mut top = lowest;
    // SAFETY: all positions are below `n`. The operand order of `max` passes over NaN, and lanes past the end hold
    // what cannot be larger.
    unsafe {
        if scale.negative {
            for_vectors::<Pair<S>>(
                n,
                #[inline(always)]
                |i, count| {
                    let v = pairs.neg(load_unordered_at(pairs, x, i, count));
                    top = pairs.max(replace_rest(pairs, v, count, f32::MIN), top);
                },
            );
        } else {
            for_vectors::<Pair<S>>(
                n,
                #[inline(always)]
                |i, count| {
                    let v = load_unordered_at(pairs, x, i, count);
                    top = pairs.max(replace_rest(pairs, v, count, f32::MIN), top);
                },
            );
        }
    }
    pairs.reduce_max(top)
}

/// A row whose exponentials stay in cache, in `powers`: each is computed once.
///
/// # Safety
/// `x` must be readable and `out` writable for as many elements as `powers` has; with `stream`, `out` must be
/// aligned as [`can_stream`] says.
#[inline(always)]
unsafe fn row_in_cache<S: Simd, T: CpuElement>(
    s: S,
    x: *const T,
    out: *mut T,
    powers: &mut [f32],
    scale: &Scale<S>,
    stream: bool,
    ahead: Ahead<T>,
) {
    let n = powers.len();
    let powers = powers.as_mut_ptr();
    // SAFETY: all positions are below `n`.
    unsafe {
        let pivot = s.splat(largest(s, x, n, scale));
        let [sum] = sum_vectors(
            s,
            n,
            #[inline(always)]
            |i, count, sums: &mut [S::V; 1]| {
                ahead.fetch::<S>(i);
                let e = keep_first(s, scale.power::<T>(s, load_at(s, x, i, count), pivot), count);
                store_at(s, powers, i, count, e, false);
                sums[0] = s.add(sums[0], e);
            },
        );
        let inverse = s.splat(1.0 / sum);
        for_vectors::<S>(
            n,
            #[inline(always)]
            |i, count| {
                let e = load_at(s, powers.cast_const(), i, count);
                store_at(s, out, i, count, s.mul(e, inverse), stream);
            },
        );
    }
}

/// A row of any length, read from memory twice: once for the sum, which is scaled down whenever a piece has a larger
/// pivot, and once for the result.
///
/// # Safety
/// `x` must be readable and `out` writable for `n` elements; with `stream`, `out` must be aligned as [`can_stream`]
/// says.
#[inline(always)]
unsafe fn long_row<S: Simd, T: CpuElement>(
    s: S,
    x: *const T,
    out: *mut T,
    n: usize,
    scale: &Scale<S>,
    stream: bool,
) {
    let (mut pivot, mut sum) = (f32::MIN, 0f32);
    // SAFETY: all positions are below `n`.
    unsafe {
        for start in (0..n).step_by(PIECE) {
            let (piece, len) = (x.add(start), PIECE.min(n - start));
            let top = largest(s, piece, len, scale);
            if top > pivot {
                let below = s.splat(pivot - top);
                let mut lanes = [0f32; MAX_LANES];
                s.store(lanes.as_mut_ptr(), math::exp(s, s.mul(below, scale.magnitude)));
                sum *= lanes[0];
                pivot = top;
            }
            let pivots = s.splat(pivot);
            let [more] = sum_vectors(
                s,
                len,
                #[inline(always)]
                |i, count, sums: &mut [S::V; 1]| {
                    let e = scale.power::<T>(s, load_at(s, piece, i, count), pivots);
                    sums[0] = s.add(sums[0], keep_first(s, e, count));
                },
            );
            sum += more;
        }
        let (pivot, inverse) = (s.splat(pivot), s.splat(1.0 / sum));
        for_vectors::<S>(
            n,
            #[inline(always)]
            |i, count| {
                let e = scale.power::<T>(s, load_at(s, x, i, count), pivot);
                store_at(s, out, i, count, s.mul(e, inverse), stream);
            },
        );
    }
}

pub(super) fn run_backward(launch: &Launch<'_, Problem>) -> Result<()> {
    let p = launch.problem;
    let stream = should_stream(p.tensor_bytes());
    parallel_for(
        p.num_rows,
        GRAIN.div_ceil(p.hidden.max(1)),
        |rows| with_float!(p.dtype, T => dispatch(launch.tier, Backward::<T> { launch, rows, stream, t: PhantomData })),
    );
    Ok(())
}

struct Backward<'a, T> {
    launch: &'a Launch<'a, Problem>,
    rows: Range<usize>,
    stream: bool,
    t: PhantomData<T>,
}

impl<T: CpuElement> Task for Backward<'_, T> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let s = Pair(s);
        let p = self.launch.problem;
        let args = self.launch.args;
        let at = |index: usize, offset: usize| (args.address(index) as *mut T).wrapping_add(offset);
        let mut scratch = Scratch::<T>::new(p.hidden, &p.steps[..3]);
        let scale = s.splat(p.scale() as f32);
        for row in self.rows {
            let [y_at, dout_at, dx_at, _] = p.rows.offsets(row);
            // SAFETY: `check` bound all shapes to these sizes and strides, so every row lies in its tensor; threads
            // get disjoint rows; dx is dout only element for element, and each is read for the last time before it
            // is written.
            unsafe {
                let y = scratch.gather(0, at(Y, y_at), p.steps[0]);
                let dout = scratch.gather(1, at(DOUT, dout_at), p.steps[1]);
                let dx = scratch.target(2, at(DX, dx_at), p.steps[2]);
                let [y_next, dout_next, _, _] = p.rows.offsets((row + 1).min(p.num_rows - 1));
                let y_ahead = Ahead::new(at(Y, y_next).cast_const(), p.hidden, p.steps[0]);
                let dout_ahead = Ahead::new(at(DOUT, dout_next).cast_const(), p.hidden, p.steps[1]);
                let [dot] = sum_vectors(
                    s,
                    p.hidden,
                    #[inline(always)]
                    |i, count, sums: &mut [[S::V; 2]; 1]| {
                        let dout = load_unordered_at(s, dout, i, count);
                        sums[0] = s.fma(load_unordered_at(s, y, i, count), dout, sums[0]);
                    },
                );
                let dot = s.splat(dot);
                let stream = self.stream && can_stream::<S, T>(dx);
                for_vectors::<Pair<S>>(
                    p.hidden,
                    #[inline(always)]
                    |i, count| {
                        y_ahead.fetch::<Pair<S>>(i);
                        dout_ahead.fetch::<Pair<S>>(i);
                        let slope = s.mul(scale, load_at(s, y, i, count));
                        let v = s.mul(slope, s.sub(load_at(s, dout, i, count), dot));
                        store_at(s, dx, i, count, v, stream);
                    },
                );
                scratch.scatter(2, at(DX, dx_at), p.steps[2]);
            }
        }
        if self.stream {
            s.fence();
        }
    }
}
