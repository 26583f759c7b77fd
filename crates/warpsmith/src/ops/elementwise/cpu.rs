//! The engine on the CPU, one source for all tiers.

use super::{Grid, MAX_STREAMS};
use crate::cpu::rows::{Scratch, can_stream, for_vectors, load_at, store_at, with_float};
use crate::cpu::simd::{MAX_LANES, Pair};
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
        let s = Pair(Pair(s));
        let blocks = grid.columns.div_ceil(BLOCK);
        let (mut scratch, mut room) = (Scratch::<T>::new(0, &grid.steps[..I + O]), 0);
        // What is left of a row is worked on in copies of a whole vector: one body for both halves the code.
        let lanes = <Pair<Pair<S>>>::N;
        let mut ends = [[T::from_f32(0.0); MAX_LANES]; MAX_STREAMS];
        for unit in units {
            let (row, start) = (unit / blocks, unit % blocks * BLOCK);
            let n = BLOCK.min(grid.columns - start);
            if n != room {
                (scratch, room) = (Scratch::new(n, &grid.steps[..I + O]), n);
            }
            let offsets = grid.rows.offsets(row);
            let at = |t: usize| {
                let offset = offsets[t] as isize + start as isize * grid.steps[t];
                (addresses[t] as *mut T).wrapping_offset(offset)
            };
            // SAFETY: the caller of `run` promised the tensors; blocks are disjoint; outputs overlap inputs only
            // element for element, and each element is read before it is written.
            unsafe {
                let mut inputs = [std::ptr::null::<T>(); I];
                let mut outputs = [std::ptr::null_mut::<T>(); O];
                for (t, input) in inputs.iter_mut().enumerate() {
                    *input = scratch.gather(t, at(t), grid.steps[t]);
                }
                for (t, output) in outputs.iter_mut().enumerate() {
                    *output = scratch.target(I + t, at(I + t), grid.steps[I + t]);
                }
                let stream = stream && outputs.iter().all(|&p| can_stream::<S, T>(p));
                let tail = n % lanes;
                let (mut from, mut to) = (inputs, outputs);
                let (mut end, mut rest, mut streamed) = (n - tail, tail, stream);
                loop {
                    let mut i = 0usize;
                    while i < end {
                        let mut x = [s.zero(); I];
                        for (x, input) in x.iter_mut().zip(from) {
                            *x = T::load(s, input.add(i));
                        }
                        let y = e.apply::<Pair<Pair<S>>, T>(s, x);
                        for (y, output) in y.into_iter().zip(to) {
                            store_at(s, output, i, lanes, y, streamed);
                        }
                        i = i.wrapping_add(lanes);
                    }
                    if rest == 0 {
                        break;
                    }
                    for (t, input) in from.iter_mut().enumerate() {
                        std::ptr::copy_nonoverlapping(input.add(end), ends[t].as_mut_ptr(), tail);
                        *input = ends[t].as_ptr();
                    }
                    for (t, output) in to.iter_mut().enumerate() {
                        *output = ends[I + t].as_mut_ptr();
                    }
                    (end, rest, streamed) = (lanes, 0, false);
                }
                for (t, output) in outputs.iter().enumerate() {
                    std::ptr::copy_nonoverlapping(ends[I + t].as_ptr(), output.add(n - tail), tail);
                }
                for t in I..I + O {
                    scratch.scatter(t, at(t), grid.steps[t]);
                }
            }
        }
        if stream {
            s.fence();
        }
    }
}

struct Paired<'a, T, E, const I: usize, const O: usize>(Part<'a, T, E>);

impl<T: CpuElement, E: Expression<I, O>, const I: usize, const O: usize> Task for Paired<'_, T, E, I, O> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Part { grid, addresses, units, stream, e, .. } = self.0;
        let blocks = grid.columns.div_ceil(BLOCK);
        let (mut scratch, mut room) = (Scratch::<T>::new(0, &grid.steps[..I + O]), 0);
        for unit in units {
            let (row, start) = (unit / blocks, unit % blocks * BLOCK);
            let n = BLOCK.min(grid.columns - start);
            if n != room {
                (scratch, room) = (Scratch::new(n, &grid.steps[..I + O]), n);
            }
            let offsets = grid.rows.offsets(row);
            let at = |t: usize| {
                let offset = offsets[t] as isize + start as isize * grid.steps[t];
                (addresses[t] as *mut T).wrapping_offset(offset)
            };
            let pairs_out = O == 2;
            // SAFETY: as above. A pair of tensors is one dense run of twice the elements.
            unsafe {
                let packed_in = at(0).cast_const();
                let mut inputs = [packed_in; I];
                for (t, input) in inputs.iter_mut().enumerate().skip(2) {
                    *input = scratch.gather(t, at(t), grid.steps[t]);
                }
                let out_at = at(I);
                let dense_out = pairs_out || grid.steps[I] == 1;
                let out = if pairs_out { out_at } else { scratch.target(I, out_at, grid.steps[I]) };
                let stream = stream && dense_out && can_stream::<S, T>(out);
                for_vectors::<S>(
                    n,
                    #[inline(always)]
                    |i, count| {
                        let mut x = [s.zero(); I];
                        let at = i.wrapping_mul(2);
                        let (low, high) = ((2 * count).min(S::N), (2 * count).saturating_sub(S::N));
                        let above = at.wrapping_add(low);
                        let a = load_at(s, packed_in, at, low);
                        let b = load_at(s, packed_in, above, high);
                        (x[0], x[1]) = s.unzip(a, b);
                        for (x, input) in x.iter_mut().zip(inputs).skip(2) {
                            *x = load_at(s, input, i, count);
                        }
                        let y = e.apply::<S, T>(s, x);
                        if pairs_out {
                            let (a, b) = s.zip(y[0], y[1]);
                            store_at(s, out, at, low, a, stream);
                            store_at(s, out, above, high, b, stream);
                        } else {
                            store_at(s, out, i, count, y[0], stream);
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
