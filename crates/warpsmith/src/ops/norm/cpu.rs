//! Both norms on the CPU, one source for all tiers.

use super::{BIAS, OUT, Problem, RESIDUAL, SUM, WEIGHT, X, backward as back};
use crate::cpu::prefetch::{AHEAD, Ahead, fetch};
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
        // SAFETY: `check` bound all shapes to these sizes and strides, so every row lies in its tensor; threads get
        // disjoint rows; outputs overlap inputs only element for element, and each is read before it is written.
        unsafe {
            if self.launch.problem.has_residual { self.rows::<_, true>(s) } else { self.rows::<_, false>(s) }
        }
        if self.stream {
            s.fence();
        }
    }
}

impl<T: CpuElement> Forward<'_, T> {
    /// The rows, each stored while the first sum of the next is made: memory is read and written at the same time, and
    /// idle only for the second pass of a mean, which finds its row in the cache.
    ///
    /// # Safety
    /// The rows must lie in their tensors, and be nobody else's.
    #[inline(always)]
    unsafe fn rows<S: Simd, const ADD: bool>(&self, s: S) {
        let p = self.launch.problem;
        let args = self.launch.args;
        let at = |index: usize, offset: usize| (args.address(index) as *mut T).wrapping_add(offset);
        let [x_step, out_step, residual_step, sum_step, weight_step, bias_step] = p.steps;
        let mut vectors = Scratch::<T>::new(p.hidden, &[weight_step, bias_step]);
        // For a row and the next.
        let mut scratch = [0, 1].map(|_| Scratch::<T>::new(p.hidden, &p.steps[..4]));
        // SAFETY: passed on.
        unsafe {
            let mut vector = |present: bool, t: usize, index: usize, step: isize| {
                if present { vectors.gather(t, at(index, 0), step) } else { std::ptr::null() }
            };
            let affine = Affine {
                weight: vector(p.has_weight, 0, WEIGHT, weight_step),
                bias: vector(p.has_bias, 1, BIAS, bias_step),
            };
            let terms_of = |row: usize, scratch: &mut Scratch<T>| {
                let [x_at, _, residual_at, _] = p.rows.offsets(row);
                let x = scratch.gather(0, at(X, x_at), x_step);
                let residual =
                    if ADD { scratch.gather(2, at(RESIDUAL, residual_at), residual_step) } else { x };
                Terms::<T, ADD> { x, residual }
            };
            let Range { start, end } = self.rows;
            let mut terms = terms_of(start, &mut scratch[start % 2]);
            let mut first = first_sum(
                s,
                p.hidden,
                p.center,
                #[inline(always)]
                |i, count| terms.load(s, i, count),
            );
            for row in start..end {
                // The last row of all sums itself again, for nothing.
                let next = if row + 1 < end { terms_of(row + 1, &mut scratch[(row + 1) % 2]) } else { terms };
                let [_, out_at, _, sum_at] = p.rows.offsets(row);
                let scratch = &mut scratch[row % 2];
                let out = scratch.target(1, at(OUT, out_at), out_step);
                let sum = if ADD { scratch.target(3, at(SUM, sum_at), sum_step) } else { out };
                let sum_streams = self.stream && can_stream::<S, T>(sum);
                // Closures as arguments, because only there can they be forced inline; out of line they would be
                // compiled without the tier's instructions.
                first = normalise(
                    s,
                    p,
                    &affine,
                    (out, self.stream),
                    first,
                    #[inline(always)]
                    |i, count| terms.load(s, i, count),
                    next,
                    #[inline(always)]
                    |i, count, v| {
                        if ADD {
                            put_unordered_at(s, sum, i, count, v, sum_streams);
                        }
                    },
                );
                scratch.scatter(1, at(OUT, out_at), out_step);
                if ADD {
                    scratch.scatter(3, at(SUM, sum_at), sum_step);
                }
                terms = next;
            }
        }
    }
}

/// What a row is made of.
#[derive(Clone, Copy)]
struct Terms<T, const ADD: bool> {
    x: *const T,
    residual: *const T,
}

impl<T: CpuElement, const ADD: bool> Terms<T, ADD> {
    /// A vector of the row, in any order of lanes. The sum with the residual is formed once a pass, first from memory and
    /// then from cache: that is cheaper than writing it where it must be read back.
    ///
    /// # Safety
    /// The elements must exist.
    #[inline(always)]
    unsafe fn load<S: Simd>(&self, s: S, i: usize, count: usize) -> S::V {
        // SAFETY: passed on.
        unsafe {
            let x = load_unordered_at(s, self.x, i, count);
            if !ADD {
                return x;
            }
            T::rounded(s, s.add(x, load_unordered_at(s, self.residual, i, count)))
        }
    }

    /// Asks for what is `ahead` bytes past the vector at `i`; it need not exist.
    #[inline(always)]
    fn fetch<S: Simd>(&self, i: usize, ahead: usize) {
        fetch::<S, T>(self.x.wrapping_add(i).wrapping_byte_add(ahead));
        if ADD {
            fetch::<S, T>(self.residual.wrapping_add(i).wrapping_byte_add(ahead));
        }
    }
}

/// Weight and bias; null if absent.
struct Affine<T> {
    weight: *const T,
    bias: *const T,
}

/// One row: `load` gives its vectors, in any order of lanes, and `first` is their [`first_sum`]; that of the `next` row is
/// returned; `also` sees the vectors before the result is stored, streamed if asked and
/// possible.
///
/// # Safety
/// `out` must be writable for `hidden` elements; weight and bias, unless null, and `next` readable for as many.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
unsafe fn normalise<S: Simd, T: CpuElement, const ADD: bool>(
    s: S,
    p: &Problem,
    affine: &Affine<T>,
    (out, stream): (*mut T, bool),
    first: f32,
    load: impl Fn(usize, usize) -> S::V,
    next: Terms<T, ADD>,
    also: impl Fn(usize, usize, S::V),
) -> f32 {
    let n = p.hidden;
    let (mean, squares) = moments_after(
        s,
        n,
        p.center,
        first,
        #[inline(always)]
        |i, count| {
            next.fetch::<S>(i, 0);
            load(i, count)
        },
    );
    let (mean, scale) =
        (s.splat(mean), s.splat(1.0 / (squares / n as f32 + f32::from_bits(p.eps_bits)).sqrt()));
    let stream = stream && can_stream::<S, T>(out);
    let [first] = sum_vectors(
        s,
        n,
        #[inline(always)]
        |i, count, sums: &mut [S::V; 1]| {
            next.fetch::<S>(i, AHEAD);
            // SAFETY: `i + count <= n`.
            sums[0] = add_first(s, p.center, sums[0], unsafe { next.load(s, i, count) });
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
    first
}

/// What the first pass over a row sums: its elements if they are to be centered, else their squares.
#[inline(always)]
fn first_sum<S: Simd>(s: S, n: usize, center: bool, load: impl Fn(usize, usize) -> S::V) -> f32 {
    let [sum] = sum_vectors(
        s,
        n,
        #[inline(always)]
        |i, count, sums: &mut [S::V; 1]| sums[0] = add_first(s, center, sums[0], load(i, count)),
    );
    sum
}

#[inline(always)]
fn add_first<S: Simd>(s: S, center: bool, sum: S::V, v: S::V) -> S::V {
    if center { s.add(sum, v) } else { s.fma(v, v, sum) }
}

/// The mean (zero unless `center`) and the sum of squared distances from it, given the [`first_sum`]. With a mean that
/// takes a second pass: the textbook formula in one would lose everything to cancellation when the mean is large.
#[inline(always)]
fn moments_after<S: Simd>(
    s: S,
    n: usize,
    center: bool,
    first: f32,
    load: impl Fn(usize, usize) -> S::V,
) -> (f32, f32) {
    if !center {
        return (0.0, first);
    }
    let mean = first / n as f32;
    let means = s.splat(mean);
    let [squares] = sum_vectors(
        s,
        n,
        #[inline(always)]
        |i, count, sums: &mut [S::V; 1]| {
            let v = keep_first(s, s.sub(load(i, count), means), count);
            sums[0] = s.fma(v, v, sums[0]);
        },
    );
    (mean, squares)
}

/// [`moments_after`] the [`first_sum`].
#[inline(always)]
fn moments<S: Simd>(s: S, n: usize, center: bool, load: &impl Fn(usize, usize) -> S::V) -> (f32, f32) {
    moments_after(s, n, center, first_sum(s, n, center, load), load)
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
