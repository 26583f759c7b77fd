//! Both norms on the CPU, one source for all tiers.

use super::{BIAS, OUT, Problem, RESIDUAL, SUM, WEIGHT, X, backward as back};
use crate::cpu::prefetch::{Ahead, FAR_AHEAD, fetch_near};
use crate::cpu::rows::{
    DenseRows, can_stream, for_vectors, inlined, keep_first, load_at, load_unordered_at, put_at, put_near_at,
    store_at, sum_vectors, with_float,
};
use crate::cpu::{
    CpuElement, Need, Region, Simd, Task, Tier, dispatch, parallel_for_with_scratch, should_stream,
};
use crate::device::DeviceInfo;
use crate::error::Result;
use crate::op::{Kernel, Launch};
use crate::ops::column_sum::{self, cpu::groups, cpu::rows_per_group};
use std::ops::Range;

/// The fewest elements a thread works on: less does not pay for waking a thread.
const GRAIN: usize = 1 << 15;

pub(in crate::ops) fn run(launch: &Launch<'_, Problem>) -> Result<()> {
    let p = launch.problem;
    let stream = should_stream(p.num_rows * p.hidden * p.dtype.size());
    parallel_for_with_scratch(
        p.num_rows,
        GRAIN.div_ceil(p.hidden.max(1)),
        forward_need(p),
        |rows, region| {
            with_float!(p.dtype, T => {
                dispatch(launch.tier, Forward::<T> { launch, rows, stream, region, t: std::marker::PhantomData })
            })
        },
    );
    Ok(())
}

/// Scratch of [`Forward`]: weight and bias, two rows, and a sum with the residual.
fn forward_need(p: &Problem) -> Need {
    let row = DenseRows::<f32>::need(p.dtype, p.hidden, &p.steps[..4]);
    let vectors = DenseRows::<f32>::need(p.dtype, p.hidden, &p.steps[4..]);
    let held = if p.has_residual { p.hidden * p.dtype.size() } else { 0 };
    vectors.plus(row).plus(row).and::<u8>(held)
}

struct Forward<'a, T> {
    launch: &'a Launch<'a, Problem>,
    rows: Range<usize>,
    stream: bool,
    region: Region<'a>,
    t: std::marker::PhantomData<T>,
}

impl<T: CpuElement> Task for Forward<'_, T> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        // Four sums at once: each addition depends on the one before.
        let s = s.pair().pair();
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
    /// The rows, each stored while the next is summed: memory is read and written at the same time.
    ///
    /// # Safety
    /// The rows must be inside their tensors and used by nothing else.
    #[inline(always)]
    unsafe fn rows<S: Simd, const ADD: bool>(&mut self, s: S) {
        let p = self.launch.problem;
        let args = self.launch.args;
        let rows = self.rows.clone();
        let at = |index: usize, offset: usize| (args.address(index) as *mut T).wrapping_add(offset);
        let [x_step, out_step, residual_step, sum_step, weight_step, bias_step] = p.steps;
        let region = &mut self.region;
        let mut vectors = DenseRows::<T>::new(region, p.hidden, &[weight_step, bias_step]);
        // Buffers for a row and the next.
        let mut scratch = [0, 1].map(|_| DenseRows::<T>::new(region, p.hidden, &p.steps[..4]));
        // A row with its residual added; the next row replaces it element by element.
        let held = region.slice(if ADD { p.hidden } else { 0 }).as_mut_ptr();
        let want_stream = self.stream;
        // SAFETY: passed on.
        unsafe {
            let mut vector = |present: bool, t: usize, index: usize, step: isize| {
                if present { vectors.gather(t, at(index, 0), step) } else { std::ptr::null() }
            };
            let affine = Affine {
                weight: vector(p.has_weight, 0, WEIGHT, weight_step),
                bias: vector(p.has_bias, 1, BIAS, bias_step),
            };
            let row_at = |row: usize, scratch: &mut DenseRows<'_, T>| {
                let [x_at, _, residual_at, sum_at] = p.rows.offsets(row);
                let x = scratch.gather(0, at(X, x_at), x_step);
                if !ADD {
                    return Row::<T, ADD> { x, residual: x, sum: std::ptr::null_mut(), held, stream: false };
                }
                let residual = scratch.gather(2, at(RESIDUAL, residual_at), residual_step);
                let sum = scratch.target(3, at(SUM, sum_at), sum_step);
                Row {
                    x,
                    residual,
                    sum,
                    held,
                    stream: want_stream && sum_step == 1 && can_stream::<S, T>(sum),
                }
            };
            let Range { start, end } = rows;
            let mut row = row_at(start, &mut scratch[start % 2]);
            let mut sums = row.sums(
                s,
                p,
                #[inline(always)]
                |_, _| {},
            );
            for index in start..end {
                let [_, out_at, _, sum_at] = p.rows.offsets(index);
                if ADD {
                    scratch[index % 2].scatter(3, at(SUM, sum_at), sum_step);
                }
                let out = scratch[index % 2].target(1, at(OUT, out_at), out_step);
                let stream = want_stream && out_step == 1 && can_stream::<S, T>(out);
                let normal = Normal::new(
                    s,
                    p,
                    sums,
                    #[inline(always)]
                    |i, count| row.load(s, i, count),
                );
                let this = row;
                let store = inlined(
                    #[inline(always)]
                    |i, count| {
                        let y = normal.of(s, p.center, &affine, this.load(s, i, count), i, count);
                        put_near_at(s, out, i, count, y, stream);
                    },
                );
                if index + 1 < end {
                    row = row_at(index + 1, &mut scratch[(index + 1) % 2]);
                    sums = row.sums(s, p, store);
                } else {
                    for_vectors::<S>(p.hidden, store);
                }
                scratch[index % 2].scatter(1, at(OUT, out_at), out_step);
            }
        }
    }
}

/// The inputs of a row, and where its sum with the residual goes.
#[derive(Clone, Copy)]
struct Row<T, const ADD: bool> {
    x: *const T,
    residual: *const T,
    sum: *mut T,
    /// Has the sum once it was taken; in any order of lanes, the same for every row.
    held: *mut T,
    stream: bool,
}

impl<T: CpuElement, const ADD: bool> Row<T, ADD> {
    /// A vector of the row, in any order of lanes. A sum with the residual is stored, and held.
    ///
    /// # Safety
    /// The elements must exist.
    #[inline(always)]
    unsafe fn take<S: Simd>(&self, s: S, i: usize, count: usize) -> S::V {
        // SAFETY: passed on.
        unsafe {
            let x = load_unordered_at(s, self.x, i, count);
            if !ADD {
                return x;
            }
            let sum = s.add(x, load_unordered_at(s, self.residual, i, count));
            if count == S::N {
                T::put_unordered(s, self.held.add(i), sum, false);
            } else {
                T::store_partial(s, self.held.add(i), sum, count);
            }
            // Rounding again changes nothing.
            let sum = self.load(s, i, count);
            put_near_at(s, self.sum, i, count, sum, self.stream);
            sum
        }
    }

    /// A vector of the row after it was taken.
    ///
    /// # Safety
    /// The elements must exist.
    #[inline(always)]
    unsafe fn load<S: Simd>(&self, s: S, i: usize, count: usize) -> S::V {
        // SAFETY: passed on.
        unsafe { load_unordered_at(s, if ADD { self.held.cast_const() } else { self.x }, i, count) }
    }

    /// Reads the row and sums it; calls `before` ahead of each vector.
    ///
    /// # Safety
    /// The row must exist.
    #[inline(always)]
    unsafe fn sums<S: Simd>(&self, s: S, p: &Problem, before: impl Fn(usize, usize)) -> Sums {
        let shift = if p.center {
            Sums::shift(
                s,
                p.hidden,
                #[inline(always)]
                |i, count| {
                    // SAFETY: elements of the row; past them are zeros.
                    let x = unsafe { load_unordered_at(s, self.x, i, count) };
                    if !ADD {
                        return x;
                    }
                    // SAFETY: as above.
                    s.add(x, unsafe { load_unordered_at(s, self.residual, i, count) })
                },
            )
        } else {
            0.0
        };
        Sums::of(
            s,
            p.hidden,
            p.center,
            shift,
            #[inline(always)]
            |i, count| {
                fetch_near(self.x.wrapping_add(i).wrapping_byte_add(FAR_AHEAD).cast(), S::N * size_of::<T>());
                if ADD {
                    let residual = self.residual.wrapping_add(i).wrapping_byte_add(FAR_AHEAD);
                    fetch_near(residual.cast(), S::N * size_of::<T>());
                }
                before(i, count);
                // SAFETY: `Sums` asks for elements below `hidden`.
                unsafe { self.take(s, i, count) }
            },
        )
    }
}

/// Weight and bias; null if absent.
struct Affine<T> {
    weight: *const T,
    bias: *const T,
}

/// The factors that turn elements of a row into results.
struct Normal<S: Simd> {
    mean: S::V,
    scale: S::V,
}

impl<S: Simd> Normal<S> {
    /// Of the row that has these sums.
    #[inline(always)]
    fn new(s: S, p: &Problem, sums: Sums, load: impl Fn(usize, usize) -> S::V) -> Self {
        let (mean, squares) = sums.moments(s, p.hidden, p.center, load);
        let variance = squares / p.hidden as f32;
        Normal { mean: s.splat(mean), scale: s.splat(1.0 / (variance + f32::from_bits(p.eps_bits)).sqrt()) }
    }

    /// The results for the vector `v` at `i`, in the same order of lanes.
    ///
    /// # Safety
    /// Weight and bias must have the elements, unless null.
    #[inline(always)]
    unsafe fn of<T: CpuElement>(
        &self,
        s: S,
        center: bool,
        affine: &Affine<T>,
        v: S::V,
        i: usize,
        count: usize,
    ) -> S::V {
        let y = s.mul(if center { s.sub(v, self.mean) } else { v }, self.scale);
        // SAFETY: passed on.
        unsafe {
            match (affine.weight.is_null(), affine.bias.is_null()) {
                (true, true) => y,
                (false, true) => s.mul(y, load_unordered_at(s, affine.weight, i, count)),
                (true, false) => s.add(y, load_unordered_at(s, affine.bias, i, count)),
                (false, false) => {
                    let weight = load_unordered_at(s, affine.weight, i, count);
                    s.fma(y, weight, load_unordered_at(s, affine.bias, i, count))
                }
            }
        }
    }
}

/// Sums over a row: of its elements' distances from `shift`, if they are to be centered, and of their squares.
#[derive(Clone, Copy)]
struct Sums {
    shift: f32,
    distances: f64,
    squares: f64,
}

/// Vectors whose sums are formed together.
const PART: usize = 64;

impl Sums {
    /// The best reference point for distances, judged by the first elements of a row of `n`: zero, unless most are on
    /// one side of it. It has few digits, like narrow elements: distances from a number with more digits would always
    /// be rounded in the same direction.
    #[inline(always)]
    fn shift<S: Simd>(s: S, n: usize, load: impl Fn(usize, usize) -> S::V) -> f32 {
        const FEW_DIGITS: u32 = 0xffff_0000;
        /// Fewer would often mislead.
        const FIRST: usize = 64;
        let (mut sums, mut sizes) = (s.zero(), s.zero());
        let count = n.min(FIRST.max(S::N));
        for i in (0..count).step_by(S::N) {
            let v = load(i, S::N.min(count - i));
            (sums, sizes) = (s.add(sums, v), s.add(sizes, s.abs(v)));
        }
        let (sum, size) = (s.reduce_add(sums), s.reduce_add(sizes));
        if sum.abs() < 0.5 * size {
            return 0.0;
        }
        f32::from_bits((sum / count as f32).to_bits() & FEW_DIGITS)
    }

    /// Of a row of `n` elements, in parts: the longer a sum, the more each addition rounds. Parts have as many additions on every
    /// tier, and their sums are added in f64: where `shift` is off, sums grow with every element. `load` is called once for each
    /// vector, in order.
    #[inline(always)]
    fn of<S: Simd>(s: S, n: usize, center: bool, shift: f32, load: impl Fn(usize, usize) -> S::V) -> Self {
        let shifts = s.splat(shift);
        let (mut distances, mut squares) = (0f64, 0f64);
        let part = PART * S::N;
        for start in (0..n).step_by(part) {
            let [part_distances, part_squares] = sum_vectors(
                s,
                part.min(n - start),
                #[inline(always)]
                |i, count, sums: &mut [S::V; 2]| {
                    let mut v = load(start + i, count);
                    if center {
                        v = keep_first(s, s.sub(v, shifts), count);
                        sums[0] = s.add(sums[0], v);
                    }
                    sums[1] = s.fma(v, v, sums[1]);
                },
            );
            distances += f64::from(part_distances);
            squares += f64::from(part_squares);
        }
        Sums { shift, distances, squares }
    }

    /// The mean (zero unless `center`) and the sum of squared distances from it.
    ///
    /// With a mean that takes another pass where `shift` is far from it: the textbook formula would lose to cancellation
    /// what the squares have in common.
    #[inline(always)]
    fn moments<S: Simd>(
        self,
        s: S,
        n: usize,
        center: bool,
        load: impl Fn(usize, usize) -> S::V,
    ) -> (f32, f32) {
        if !center {
            return (0.0, self.squares as f32);
        }
        let (mean, common, rest) = self.about_mean(n);
        // Two bits lost at most; no comparison with NaN is true.
        if common <= 3.0 * rest {
            return (mean, rest as f32);
        }
        let (mean, _, rest) = Sums::of(s, n, true, mean, load).about_mean(n);
        (mean, rest as f32)
    }

    /// The mean, and the two parts of the sum of squares: from the distance of the mean to `shift`, and of the elements
    /// to the mean.
    #[inline(always)]
    fn about_mean(self, n: usize) -> (f32, f64, f64) {
        let off = self.distances / n as f64;
        let common = off * self.distances;
        ((f64::from(self.shift) + off) as f32, common, self.squares - common)
    }
}

/// [`Sums::moments`] of a row. `load` is copied: called through a reference it would not be inlined.
#[inline(always)]
fn moments<S: Simd>(s: S, n: usize, center: bool, load: impl Fn(usize, usize) -> S::V + Copy) -> (f32, f32) {
    let shift = if center { Sums::shift(s, n, load) } else { 0.0 };
    Sums::of(s, n, center, shift, load).moments(s, n, center, load)
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
    parallel_for_with_scratch(
        blocks,
        grain,
        DenseRows::<f32>::need(p.dtype, p.hidden, &p.steps),
        |blocks, region| with_float!(p.dtype, T => dispatch(launch.tier, BackwardBlocks::<T> { launch, blocks, region, t: std::marker::PhantomData })),
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
    region: Region<'a>,
    t: std::marker::PhantomData<T>,
}

impl<T: CpuElement> Task for BackwardBlocks<'_, T> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let s = s.pair();
        let p = self.launch.problem;
        let args = self.launch.args;
        let at = |index: usize, offset: usize| (args.address(index) as *mut T).wrapping_add(offset);
        let (n, eps) = (p.hidden, f32::from_bits(p.eps_bits));
        let want_stream = should_stream(p.num_rows * n * p.dtype.size());
        let mut scratch = DenseRows::<T>::new(&mut self.region, n, &p.steps);
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
                    let (mean, squares) = moments(s, n, p.center, load);
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
                        |i, count, sums: &mut [<S::Pair as Simd>::V; 2]| {
                            let g = gradient(i, count);
                            sums[0] = s.fma(centered(i, count), g, sums[0]);
                            sums[1] = s.add(sums[1], g);
                        },
                    );
                    let r = 1.0 / (squares / n as f32 + eps).sqrt();
                    let (scale, mean_gy) = (s.splat(r), s.splat(dot * r / n as f32));
                    let mean_g = s.splat(if p.center { total / n as f32 } else { 0.0 });
                    let stream = want_stream && dx_step == 1 && can_stream::<S::Pair, T>(dx);
                    for_vectors::<S::Pair>(
                        n,
                        #[inline(always)]
                        |i, count| {
                            x_ahead.fetch::<S::Pair>(i);
                            dout_ahead.fetch::<S::Pair>(i);
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

#[cfg(feature = "tests")]
#[path = "cpu_tests.rs"]
mod tests;
