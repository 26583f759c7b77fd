//! Both norms on the CPU, one source for all tiers.

use super::{BIAS, OUT, Problem, RESIDUAL, SUM, WEIGHT, X, backward as back};
use crate::cpu::prefetch::Ahead;
use crate::cpu::rows::{
    Scratch, can_stream, for_vectors, inlined, keep_first, load_at, load_unordered_at, put_at,
    put_unordered_at, store_at, sum_vectors, with_float,
};
use crate::cpu::simd::Pair;
use crate::cpu::{CpuElement, Simd, Task, Tier, dispatch, parallel_for, should_stream};
use crate::device::DeviceInfo;
use crate::error::Result;
use crate::ops::column_sum::{self, cpu::groups, cpu::rows_per_group};
use crate::registry::{Kernel, Launch};
use std::ops::Range;

/// Elements a thread works on at least: less is not worth waking one.
const GRAIN: usize = 1 << 15;

pub(in crate::ops) fn run(launch: &Launch<'_, Problem>) -> Result<()> {
    let p = launch.problem;
    let stream = should_stream(p.num_rows * p.hidden * p.dtype.size());
    parallel_for(
        p.num_rows,
        GRAIN.div_ceil(p.hidden.max(1)),
        |rows| with_float!(p.dtype, T => dispatch(launch.tier, Forward::<T> { launch, rows, stream, t: std::marker::PhantomData })),
    );
    Ok(())
}

struct Forward<'a, T> {
    launch: &'a Launch<'a, Problem>,
    rows: Range<usize>,
    stream: bool,
    t: std::marker::PhantomData<T>,
}

impl<T: CpuElement> Task for Forward<'_, T> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        // Four sums at once: additions wait for one another.
        let s = Pair(Pair(s));
        let p = self.launch.problem;
        let args = self.launch.args;
        let at = |index: usize, offset: usize| (args.address(index) as *mut T).wrapping_add(offset);
        let mut scratch = Scratch::<T>::new(p.hidden, &p.steps);
        let [x_step, out_step, residual_step, sum_step, weight_step, bias_step] = p.steps;
        // SAFETY: `check` bound all shapes to these sizes and strides, so every row lies in its tensor; threads get
        // disjoint rows; outputs overlap inputs only element for element, and each is read before it is written.
        unsafe {
            let vector = |present: bool, t: usize, index: usize, step: isize, scratch: &mut Scratch<T>| {
                if present { scratch.gather(t, at(index, 0), step) } else { std::ptr::null() }
            };
            let affine = Affine {
                weight: vector(p.has_weight, 4, WEIGHT, weight_step, &mut scratch),
                bias: vector(p.has_bias, 5, BIAS, bias_step, &mut scratch),
            };
            for row in self.rows {
                let [x_at, out_at, residual_at, sum_at] = p.rows.offsets(row);
                let [x_next, _, residual_next, _] = p.rows.offsets((row + 1).min(p.num_rows - 1));
                let ahead = Ahead::new(at(X, x_next).cast_const(), p.hidden, x_step);
                let x = scratch.gather(0, at(X, x_at), x_step);
                let out = scratch.target(1, at(OUT, out_at), out_step);
                if p.has_residual {
                    let residual = scratch.gather(2, at(RESIDUAL, residual_at), residual_step);
                    let sum = scratch.target(3, at(SUM, sum_at), sum_step);
                    let residual_ahead =
                        Ahead::new(at(RESIDUAL, residual_next).cast_const(), p.hidden, residual_step);
                    let stream = self.stream && can_stream::<Pair<S>, T>(sum);
                    // The sum is formed once a pass, first from memory and then from cache: that is cheaper than
                    // writing it where it must be read back. Closures as arguments, because only there can they be
                    // forced inline; out of line they would be compiled without the tier's instructions.
                    normalise(
                        s,
                        p,
                        &affine,
                        (out, self.stream),
                        #[inline(always)]
                        |i, count| {
                            let r = load_unordered_at(s, residual, i, count);
                            T::rounded(s, s.add(load_unordered_at(s, x, i, count), r))
                        },
                        #[inline(always)]
                        |i| {
                            ahead.fetch::<Pair<Pair<S>>>(i);
                            residual_ahead.fetch::<Pair<Pair<S>>>(i);
                        },
                        #[inline(always)]
                        |i, count, v| put_unordered_at(s, sum, i, count, v, stream),
                    );
                    scratch.scatter(3, at(SUM, sum_at), sum_step);
                } else {
                    normalise(
                        s,
                        p,
                        &affine,
                        (out, self.stream),
                        #[inline(always)]
                        |i, count| load_unordered_at(s, x, i, count),
                        #[inline(always)]
                        |i| ahead.fetch::<Pair<Pair<S>>>(i),
                        #[inline(always)]
                        |_, _, _| {},
                    );
                }
                scratch.scatter(1, at(OUT, out_at), out_step);
            }
        }
        if self.stream {
            s.fence();
        }
    }
}

/// Weight and bias; null if absent.
struct Affine<T> {
    weight: *const T,
    bias: *const T,
}

/// One row: `load` gives its vectors, in any order of lanes; `ahead` asks for what the next row needs; `also` sees the vectors before the result is stored, streamed if asked and possible.
///
/// # Safety
/// `out` must be writable for `hidden` elements; weight and bias, unless null, readable for as many.
#[inline(always)]
unsafe fn normalise<S: Simd, T: CpuElement>(
    s: S,
    p: &Problem,
    affine: &Affine<T>,
    (out, stream): (*mut T, bool),
    load: impl Fn(usize, usize) -> S::V,
    ahead: impl Fn(usize),
    also: impl Fn(usize, usize, S::V),
) {
    let n = p.hidden;
    let (mean, squares) = moments(s, n, p.center, &load);
    let (mean, scale) =
        (s.splat(mean), s.splat(1.0 / (squares / n as f32 + f32::from_bits(p.eps_bits)).sqrt()));
    let stream = stream && can_stream::<S, T>(out);
    for_vectors::<S>(
        n,
        #[inline(always)]
        |i, count| {
            ahead(i);
            let v = load(i, count);
            also(i, count, v);
            let mut y = s.mul(if p.center { s.sub(v, mean) } else { v }, scale);
            // SAFETY: `i + count <= n`.
            unsafe {
                if !affine.weight.is_null() {
                    y = s.mul(y, load_unordered_at(s, affine.weight, i, count));
                }
                if !affine.bias.is_null() {
                    y = s.add(y, load_unordered_at(s, affine.bias, i, count));
                }
                put_unordered_at(s, out, i, count, y, stream);
            }
        },
    );
}

/// The mean (zero unless `center`) and the sum of squared distances from it, in two passes: the textbook formula
/// in one would lose everything to cancellation when the mean is large.
#[inline(always)]
fn moments<S: Simd>(s: S, n: usize, center: bool, load: &impl Fn(usize, usize) -> S::V) -> (f32, f32) {
    let mut mean = 0.0;
    if center {
        let [total] = sum_vectors(
            s,
            n,
            #[inline(always)]
            |i, count, sums: &mut [S::V; 1]| sums[0] = s.add(sums[0], load(i, count)),
        );
        mean = total / n as f32;
    }
    let means = s.splat(mean);
    let [squares] = sum_vectors(
        s,
        n,
        #[inline(always)]
        |i, count, sums: &mut [S::V; 1]| {
            let v = load(i, count);
            let v = if center { keep_first(s, s.sub(v, means), count) } else { v };
            sums[0] = s.fma(v, v, sums[0]);
        },
    );
    (mean, squares)
}

/// One partial sum of each summed gradient for each block of rows, in f32.
fn backward_workspace(p: &back::Problem, _: &DeviceInfo) -> usize {
    column_sum::cpu::workspace(p.num_sums(), p.num_rows, p.hidden)
}

/// The backward kernel of a tier.
pub(in crate::ops) const fn backward(name: &'static str, tier: Tier) -> Kernel<back::Problem> {
    Kernel::cpu(name, tier, run_backward).with_workspace(backward_workspace)
}

fn run_backward(launch: &Launch<'_, back::Problem>) -> Result<()> {
    let p = launch.problem;
    let per_block = rows_per_group(p.num_rows);
    let blocks = groups(p.num_rows);
    let grain = GRAIN.div_ceil(p.hidden.max(1) * per_block);
    parallel_for(
        blocks,
        grain,
        |blocks| with_float!(p.dtype, T => dispatch(launch.tier, BackwardBlocks::<T> { launch, blocks, t: std::marker::PhantomData })),
    );
    let sums = [(p.has_dweight, back::DWEIGHT, p.steps[5]), (p.has_dbias, back::DBIAS, p.steps[6])];
    let targets = sums.into_iter().filter(|(wanted, _, _)| *wanted);
    let targets = targets.map(|(_, index, step)| (launch.args.address(index), step));
    // SAFETY: the workspace has the size `backward_workspace` asked for; `check` bound the gradients' shapes.
    unsafe { column_sum::cpu::add(launch.workspace, p.num_rows, p.hidden, p.dtype, targets) };
    Ok(())
}

struct BackwardBlocks<'a, T> {
    launch: &'a Launch<'a, back::Problem>,
    blocks: Range<usize>,
    t: std::marker::PhantomData<T>,
}

impl<T: CpuElement> Task for BackwardBlocks<'_, T> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let s = Pair(s);
        let p = self.launch.problem;
        let args = self.launch.args;
        let at = |index: usize, offset: usize| (args.address(index) as *mut T).wrapping_add(offset);
        let (n, eps) = (p.hidden, f32::from_bits(p.eps_bits));
        let want_stream = should_stream(p.num_rows * n * p.dtype.size());
        let mut scratch = Scratch::<T>::new(n, &p.steps);
        let [x_step, dout_step, dx_step, dsum_step, weight_step, _, _] = p.steps;
        let num_blocks = groups(p.num_rows);
        let per_block = rows_per_group(p.num_rows);
        // SAFETY: `check` bound all shapes to these sizes and strides; blocks of rows and their partial sums are
        // disjoint; dx overlaps dout only element for element, and each element is read before it is written.
        unsafe {
            let weight = if p.has_weight {
                scratch.gather(4, at(back::WEIGHT, 0), weight_step)
            } else {
                std::ptr::null()
            };
            for block in self.blocks {
                let partial = (self.launch.workspace as *mut f32).wrapping_add(block * n);
                // The partial sums of dbias follow those of dweight, if that is wanted too.
                let bias_partial = partial.wrapping_add(if p.has_dweight { num_blocks * n } else { 0 });
                if p.has_dweight {
                    partial.write_bytes(0, n);
                }
                if p.has_dbias {
                    bias_partial.write_bytes(0, n);
                }
                for row in block * per_block..((block + 1) * per_block).min(p.num_rows) {
                    let [x_at, dout_at, dx_at, dsum_at] = p.rows.offsets(row);
                    let x = scratch.gather(0, at(back::X, x_at), x_step);
                    let dout = scratch.gather(1, at(back::DOUT, dout_at), dout_step);
                    let dsum = if p.has_dsum {
                        scratch.gather(3, at(back::DSUM, dsum_at), dsum_step)
                    } else {
                        std::ptr::null()
                    };
                    let dx = scratch.target(2, at(back::DX, dx_at), dx_step);
                    let [x_next, dout_next, _, _] = p.rows.offsets((row + 1).min(p.num_rows - 1));
                    let x_ahead = Ahead::new(at(back::X, x_next).cast_const(), n, x_step);
                    let dout_ahead = Ahead::new(at(back::DOUT, dout_next).cast_const(), n, dout_step);
                    let gradient = inlined(
                        #[inline(always)]
                        |i, count| {
                            let d = load_at(s, dout, i, count);
                            if weight.is_null() { d } else { s.mul(d, load_at(s, weight, i, count)) }
                        },
                    );
                    let load = inlined(
                        #[inline(always)]
                        |i, count| load_at(s, x, i, count),
                    );
                    let (mean, squares) = moments(s, n, p.center, &load);
                    let means = s.splat(mean);
                    let centered = inlined(
                        #[inline(always)]
                        |i, count| if p.center { s.sub(load(i, count), means) } else { load(i, count) },
                    );
                    // Lanes past the end add nothing: their gradient is zero.
                    let [dot, total] = sum_vectors(
                        s,
                        n,
                        #[inline(always)]
                        |i, count, sums: &mut [[S::V; 2]; 2]| {
                            let g = gradient(i, count);
                            sums[0] = s.fma(centered(i, count), g, sums[0]);
                            sums[1] = s.add(sums[1], g);
                        },
                    );
                    let r = 1.0 / (squares / n as f32 + eps).sqrt();
                    let (scale, mean_gy) = (s.splat(r), s.splat(dot * r / n as f32));
                    let mean_g = s.splat(if p.center { total / n as f32 } else { 0.0 });
                    let stream = want_stream && can_stream::<Pair<S>, T>(dx);
                    for_vectors::<Pair<S>>(
                        n,
                        #[inline(always)]
                        |i, count| {
                            x_ahead.fetch::<Pair<S>>(i);
                            dout_ahead.fetch::<Pair<S>>(i);
                            let y = s.mul(centered(i, count), scale);
                            let d = load_at(s, dout, i, count);
                            let g = s.fnma(y, mean_gy, gradient(i, count));
                            let mut v = s.mul(scale, if p.center { s.sub(g, mean_g) } else { g });
                            if !dsum.is_null() {
                                v = s.add(v, load_at(s, dsum, i, count));
                            }
                            if p.has_dweight {
                                let sum = load_at(s, partial.cast_const(), i, count);
                                store_at(s, partial, i, count, s.fma(d, y, sum));
                            }
                            if p.has_dbias {
                                let sum = load_at(s, bias_partial.cast_const(), i, count);
                                store_at(s, bias_partial, i, count, s.add(sum, d));
                            }
                            put_at(s, dx, i, count, v, stream);
                        },
                    );
                    scratch.scatter(2, at(back::DX, dx_at), dx_step);
                }
            }
        }
        if want_stream {
            s.fence();
        }
    }
}
