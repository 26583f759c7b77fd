//! The engine on the CPU, one source for all tiers.

use super::{Grid, MAX_STREAMS};
use crate::cpu::prefetch::{AHEAD, fetch};
use crate::cpu::rows::{
    Scratch, can_stream, for_vectors, load_at, put_at, put_near_at, put_unordered_at, with_float,
};
use crate::cpu::simd::{Four, MAX_LANES};
use crate::cpu::{CpuElement, Simd, Task, Tier, dispatch, parallel_for, should_stream};
use std::marker::PhantomData;
use std::ops::Range;

/// Columns worked on at a time: strided ones are gathered first, and the copies must stay in the caches.
const BLOCK: usize = 4096;
/// Elements a thread works on at least: less is not worth waking one.
const GRAIN: usize = 1 << 15;

/// What is computed for each element: `I` inputs to `O` outputs, on vectors. `T` is the type in memory: expressions
/// may be as coarse as it allows.
pub(in crate::ops) trait Expression<const I: usize, const O: usize>:
    Copy + Send + Sync
{
    /// Whether the first two inputs may be the even and odd elements of one tensor; the code for that is only made
    /// where it can be needed.
    const PAIRS: bool = false;
    /// Whether results are approximations, for which it does not matter how halfway cases are rounded.
    const NEAR: bool = false;

    /// Implementations must be `#[inline(always)]`.
    fn apply<S: Simd, T: CpuElement>(self, s: S, x: [S::V; I]) -> [S::V; O];
}

/// Evaluates `expression` over `grid`; `addresses` are those of the inputs, then of the outputs.
///
/// # Safety
/// The tensors must lie at the addresses as `grid` describes, and outputs overlap inputs only element for element.
pub(in crate::ops) unsafe fn run<const I: usize, const O: usize>(
    grid: &Grid,
    tier: Tier,
    addresses: &[usize],
    expression: impl Expression<I, O>,
) {
    const { assert!(I + O <= MAX_STREAMS) };
    assert_eq!(addresses.len(), I + O);
    let stream = should_stream(grid.len() * O * grid.dtype.size());
    let blocks = grid.columns.div_ceil(BLOCK);
    let grain = GRAIN.div_ceil(grid.columns.clamp(1, BLOCK));
    let e = expression;
    parallel_for(grid.num_rows * blocks, grain, |units| {
        with_float!(grid.dtype, T => {
            let part = Part::<T, _> { grid, addresses, units: units.clone(), stream, e, t: PhantomData };
            run_part::<T, _, I, O>(tier, part);
        })
    });
}

fn run_part<T: CpuElement, E: Expression<I, O>, const I: usize, const O: usize>(
    tier: Tier,
    part: Part<'_, T, E>,
) {
    if E::PAIRS && part.grid.paired {
        return dispatch(tier, Paired::<T, _, I, O>(part));
    }
    dispatch(tier, Unpaired::<T, _, I, O>(part));
}

/// Some blocks of columns.
struct Part<'a, T, E> {
    grid: &'a Grid,
    addresses: &'a [usize],
    units: Range<usize>,
    stream: bool,
    e: E,
    t: PhantomData<T>,
}

struct Unpaired<'a, T, E, const I: usize, const O: usize>(Part<'a, T, E>);

impl<T: CpuElement, E: Expression<I, O>, const I: usize, const O: usize> Task for Unpaired<'_, T, E, I, O> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Part { grid, addresses, units, stream, e, .. } = self.0;
        // Four vectors in lock-step: the longest expressions are chains of dozens of operations.
        let s = s.pair().pair();
        let (mut scratch, mut room) = (Scratch::<T>::new(0, &grid.steps[..I + O]), 0);
        // What is left of a row is worked on in copies of a whole vector: one body for both halves the code.
        let lanes = <Four<S> as Simd>::N;
        let mut ends = [[T::from_f32(0.0); MAX_LANES]; MAX_STREAMS];
        let last = units.end.wrapping_sub(1);
        for unit in units {
            let at = Block::<T>::new(grid, addresses, unit);
            let n = at.n;
            if n != room {
                (scratch, room) = (Scratch::new(n, &grid.steps[..I + O]), n);
            }
            let next = Block::new(grid, addresses, last.min(unit + 1));
            // SAFETY: the caller of `run` promised the tensors; blocks are disjoint; outputs overlap inputs only
            // element for element, and each element is read before it is written.
            unsafe {
                let mut inputs = [std::ptr::null::<T>(); I];
                let mut outputs = [std::ptr::null_mut::<T>(); O];
                let mut following = inputs;
                for (t, input) in inputs.iter_mut().enumerate() {
                    *input = scratch.gather(t, at.of(t), grid.steps[t]);
                    following[t] = if grid.steps[t] == 1 { next.of(t) } else { *input };
                }
                for (t, output) in outputs.iter_mut().enumerate() {
                    *output = scratch.target(I + t, at.of(I + t), grid.steps[I + t]);
                }
                let stream = stream && outputs.iter().all(|&p| can_stream::<S::Pair, T>(p));
                let tail = n % lanes;
                let whole = n - tail;
                // What is asked for are elements of this block as long as there are any, then the next block's.
                let near = n.saturating_sub(AHEAD / size_of::<T>()) / lanes * lanes;
                let mut ahead = inputs.map(|p| p.wrapping_add(n - near));
                let (mut from, mut to, mut streamed) = (inputs, outputs, stream);
                let ranges = [0..near, near..whole, 0..if tail > 0 { lanes } else { 0 }];
                for (part, range) in ranges.into_iter().enumerate() {
                    if part == 1 {
                        ahead = following.map(|p| p.wrapping_sub(near));
                    } else if part == 2 && tail > 0 {
                        for (t, input) in from.iter_mut().enumerate() {
                            std::ptr::copy_nonoverlapping(input.add(whole), ends[t].as_mut_ptr(), tail);
                            *input = ends[t].as_ptr();
                        }
                        for (t, output) in to.iter_mut().enumerate() {
                            *output = ends[I + t].as_mut_ptr();
                        }
                        (ahead, streamed) = (from, false);
                    }
                    let mut i = range.start;
                    while i < range.end {
                        let mut x = [s.zero(); I];
                        for ((x, input), ahead) in x.iter_mut().zip(from).zip(ahead) {
                            fetch::<Four<S>, T>(ahead.wrapping_add(i));
                            *x = T::load_unordered(s, input.add(i));
                        }
                        let y = e.apply::<Four<S>, T>(s, x);
                        for (y, output) in y.into_iter().zip(to) {
                            if E::NEAR {
                                put_near_at(s, output, i, lanes, y, streamed);
                            } else {
                                put_unordered_at(s, output, i, lanes, y, streamed);
                            }
                        }
                        i = i.wrapping_add(lanes);
                    }
                }
                for (t, output) in outputs.iter().enumerate() {
                    std::ptr::copy_nonoverlapping(ends[I + t].as_ptr(), output.add(whole), tail);
                }
                for t in I..I + O {
                    scratch.scatter(t, at.of(t), grid.steps[t]);
                }
            }
        }
        if stream {
            s.fence();
        }
    }
}

/// Where a block of columns lies in each tensor.
struct Block<'a, T> {
    grid: &'a Grid,
    addresses: &'a [usize],
    offsets: [usize; MAX_STREAMS],
    start: usize,
    /// Number of its columns.
    n: usize,
    t: PhantomData<T>,
}

impl<'a, T> Block<'a, T> {
    #[inline(always)]
    fn new(grid: &'a Grid, addresses: &'a [usize], unit: usize) -> Self {
        let blocks = grid.columns.div_ceil(BLOCK);
        let offsets = grid.rows.offsets(unit / blocks);
        let start = unit % blocks * BLOCK;
        Block { grid, addresses, offsets, start, n: BLOCK.min(grid.columns - start), t: PhantomData }
    }

    #[inline(always)]
    fn of(&self, t: usize) -> *mut T {
        let offset = self.offsets[t] as isize + self.start as isize * self.grid.steps[t];
        (self.addresses[t] as *mut T).wrapping_offset(offset)
    }
}

struct Paired<'a, T, E, const I: usize, const O: usize>(Part<'a, T, E>);

impl<T: CpuElement, E: Expression<I, O>, const I: usize, const O: usize> Task for Paired<'_, T, E, I, O> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Part { grid, addresses, units, stream, e, .. } = self.0;
        let (mut scratch, mut room) = (Scratch::<T>::new(0, &grid.steps[..I + O]), 0);
        for unit in units {
            let at = Block::<T>::new(grid, addresses, unit);
            let n = at.n;
            if n != room {
                (scratch, room) = (Scratch::new(n, &grid.steps[..I + O]), n);
            }
            let pairs_out = O == 2;
            // SAFETY: as above. A pair of tensors is one dense run of twice the elements.
            unsafe {
                let packed_in = at.of(0).cast_const();
                let mut inputs = [packed_in; I];
                for (t, input) in inputs.iter_mut().enumerate().skip(2) {
                    *input = scratch.gather(t, at.of(t), grid.steps[t]);
                }
                let out_at = at.of(I);
                let dense_out = pairs_out || grid.steps[I] == 1;
                let out = if pairs_out { out_at } else { scratch.target(I, out_at, grid.steps[I]) };
                let stream = stream && dense_out && can_stream::<S, T>(out);
                for_vectors::<S>(
                    n,
                    #[inline(always)]
                    |i, count| {
                        let mut x = [s.zero(); I];
                        let first = i.wrapping_mul(2);
                        let (low, high) = ((2 * count).min(S::N), (2 * count).saturating_sub(S::N));
                        let above = first.wrapping_add(low);
                        let a = load_at(s, packed_in, first, low);
                        let b = load_at(s, packed_in, above, high);
                        (x[0], x[1]) = s.unzip(a, b);
                        for (x, input) in x.iter_mut().zip(inputs).skip(2) {
                            *x = load_at(s, input, i, count);
                        }
                        let y = e.apply::<S, T>(s, x);
                        if pairs_out {
                            let (a, b) = s.zip(y[0], y[1]);
                            put_at(s, out, first, low, a, stream);
                            put_at(s, out, above, high, b, stream);
                        } else {
                            put_at(s, out, i, count, y[0], stream);
                        }
                    },
                );
                if !pairs_out {
                    scratch.scatter(I, out_at, grid.steps[I]);
                }
            }
        }
        if stream {
            s.fence();
        }
    }
}
