//! `merge_states` on the CPU, one source for all tiers.

use super::{COUNTS, LSE, LSES, OUT, OUTS, Problem};
use crate::cpu::prefetch::{AHEAD, fetch};
use crate::cpu::rows::{
    Narrow, can_stream, for_vectors, load_at, load_unordered_at, put_near_at, store_at, with_float,
};
use crate::cpu::simd::Pair;
use crate::cpu::{CpuElement, Simd, Task, dispatch, math, parallel_rows, should_stream};
use crate::error::Result;
use crate::registry::Launch;
use std::marker::PhantomData;
use std::ops::Range;

/// Elements a thread reads at least: less is not worth waking one.
const GRAIN: usize = 1 << 15;

pub(super) fn run(launch: &Launch<'_, Problem>) -> Result<()> {
    let p = launch.problem;
    let rows = p.num_tokens * p.num_heads;
    let stream = should_stream(rows * p.head_dim * p.to.size());
    let row = (p.num_parts * p.head_dim).max(1);
    parallel_rows(rows, GRAIN.div_ceil(row), |rows| {
        with_float!(p.from, T => {
            dispatch(launch.tier, Merge::<T> { launch, rows, stream, t: PhantomData });
        });
    });
    Ok(())
}

struct Merge<'a, T> {
    launch: &'a Launch<'a, Problem>,
    rows: Range<usize>,
    stream: bool,
    t: PhantomData<T>,
}

/// The parts of one token and head that are not empty: position of each, and its weight.
struct Weights {
    parts: Vec<usize>,
    weights: Vec<f32>,
}

impl Weights {
    /// Takes the parts whose lses are `lses`; returns the sum of the weights and the merged lse.
    #[inline(always)]
    fn fill<S: Simd>(&mut self, s: S, lses: impl Iterator<Item = f32>) -> (f32, f32) {
        self.parts.clear();
        self.weights.clear();
        let mut largest = f32::NEG_INFINITY;
        for (part, lse) in lses.enumerate().filter(|(_, lse)| *lse != f32::NEG_INFINITY) {
            self.parts.push(part);
            self.weights.push(lse);
            largest = if largest.is_nan() || largest > lse { largest } else { lse };
        }
        let (at, m) = (self.weights.as_mut_ptr(), s.splat(largest));
        for_vectors::<S>(
            self.weights.len(),
            #[inline(always)]
            |i, count| {
                // SAFETY: inside the vector.
                unsafe {
                    let weight = math::exp(s, s.sub(load_at(s, at.cast_const(), i, count), m));
                    store_at(s, at, i, count, weight);
                }
            },
        );
        let sum = self.weights.iter().fold(0.0, |sum, &weight| sum + weight);
        (sum, if self.parts.is_empty() { largest } else { largest + f32::ln(sum) })
    }
}

impl<T: CpuElement> Task for Merge<'_, T> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let p = self.launch.problem;
        let args = self.launch.args;
        // A row of another type is merged in f32 and rounded by a task of its own.
        let mut merged = vec![0.0; p.head_dim];
        let mut weights =
            Weights { parts: Vec::with_capacity(p.num_parts), weights: Vec::with_capacity(p.num_parts) };
        for row in self.rows {
            let [outs_at, lses_at, out_at, lse_at] = p.rows.offsets(row);
            let token = row / p.num_heads;
            // SAFETY: `check` bound all shapes to these sizes and strides; threads get disjoint rows.
            unsafe {
                let count = match p.counts {
                    Some(stride) => *(args.address(COUNTS) as *const i32).offset(token as isize * stride),
                    None => i32::MAX,
                };
                let count = (count.max(0) as usize).min(p.num_parts);
                let lses = (args.address(LSES) as *const f32).wrapping_add(lses_at);
                let lses = (0..count as isize).map(|part| *lses.offset(part * p.part_strides[1]));
                let (sum, lse) = weights.fill(s, lses);
                if p.has_lse {
                    *(args.address(LSE) as *mut f32).add(lse_at) = lse;
                }
                let parts = (args.address(OUTS) as *const T).wrapping_add(outs_at);
                if p.from == p.to && p.steps == [1, 1] {
                    let out = (args.address(OUT) as *mut T).wrapping_add(out_at);
                    let stream = self.stream && can_stream::<Pair<S>, T>(out);
                    merge_row(
                        Pair(s),
                        p,
                        (&weights, sum),
                        parts,
                        #[inline(always)]
                        |row, i, count| load_unordered_at(Pair(s), row, i, count),
                        #[inline(always)]
                        |i, count, v| put_near_at(Pair(s), out, i, count, v, stream),
                    );
                    continue;
                }
                let (values, step) = (merged.as_mut_ptr(), p.steps[0]);
                merge_row(
                    Pair(s),
                    p,
                    (&weights, sum),
                    parts,
                    #[inline(always)]
                    |row, i, count| match step {
                        1 => load_at(Pair(s), row, i, count),
                        _ => gather(Pair(s), row.wrapping_offset(i as isize * step), step, count),
                    },
                    #[inline(always)]
                    |i, count, v| store_at(Pair(s), values, i, count, v),
                );
                with_float!(p.to, U => {
                    let out = (args.address(OUT) as *mut U).wrapping_add(out_at);
                    let (x, n, stream) = (merged.as_ptr(), p.head_dim, self.stream);
                    match p.steps[1] {
                        1 => Narrow { x, out, n, divisor: 1.0, stream }.store(self.launch.tier),
                        step => merged.iter().enumerate().for_each(|(i, &value)| {
                            *out.offset(i as isize * step) = CpuElement::from_f32(value);
                        }),
                    }
                });
            }
        }
        if self.stream {
            s.fence();
        }
    }
}

/// Gives `put` the merged vectors of a row, in the order of those that `load` reads.
#[inline(always)]
fn merge_row<S: Simd, T>(
    s: S,
    p: &Problem,
    (weights, sum): (&Weights, f32),
    parts: *const T,
    load: impl Fn(*const T, usize, usize) -> S::V,
    put: impl Fn(usize, usize, S::V),
) {
    let inverse = s.splat(if weights.parts.is_empty() { 0.0 } else { 1.0 / sum });
    for_vectors::<S>(
        p.head_dim,
        #[inline(always)]
        |i, count| {
            let mut total = s.zero();
            for (&part, &weight) in weights.parts.iter().zip(&weights.weights) {
                let row = parts.wrapping_offset(part as isize * p.part_strides[0]);
                fetch::<S, T>(row.wrapping_add(i).wrapping_byte_add(AHEAD));
                total = s.fma(s.splat(weight), load(row, i, count), total);
            }
            put(i, count, s.mul(total, inverse));
        },
    );
}

/// Elements that are `step` apart.
///
/// # Safety
/// `count` of them must be readable from `p` on, and `count` be at most `N`.
#[inline(always)]
unsafe fn gather<S: Simd, T: CpuElement>(s: S, p: *const T, step: isize, count: usize) -> S::V {
    let mut lanes = [0.0; crate::cpu::simd::MAX_LANES];
    for (i, lane) in lanes[..count].iter_mut().enumerate() {
        // SAFETY: `i < count`.
        *lane = unsafe { *p.offset(i as isize * step) }.to_f32();
    }
    // SAFETY: no vector has more lanes.
    unsafe { s.load(lanes.as_ptr()) }
}
