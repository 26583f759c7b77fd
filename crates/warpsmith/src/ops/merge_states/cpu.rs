//! `merge_states` on the CPU, one source for all tiers.

use super::{COUNTS, LSE, LSES, OUT, OUTS, Problem};
use crate::cpu::prefetch::{AHEAD, fetch};
use crate::cpu::rows::{
    Narrow, can_stream, for_vectors, load_at, load_unordered_at, put_near_at, store_at, with_float,
};
use crate::cpu::simd::MAX_LANES;
use crate::cpu::{
    CpuElement, Need, Region, Simd, Task, dispatch, math, parallel_for_with_scratch, should_stream,
};
use crate::error::Result;
use crate::op::Launch;
use std::marker::PhantomData;
use std::ops::Range;

/// The fewest elements a thread reads: less does not pay for waking a thread.
const GRAIN: usize = 1 << 15;

pub(super) fn run(launch: &Launch<'_, Problem>) -> Result<()> {
    let p = launch.problem;
    let rows = p.num_tokens * p.num_heads;
    let stream = should_stream(rows * p.head_dim * p.to.size());
    let row = (p.num_parts * p.head_dim).max(1);
    let need = Weights::need(p.num_parts).and::<f32>(p.head_dim).and::<(usize, f32)>(p.num_parts);
    parallel_for_with_scratch(rows, GRAIN.div_ceil(row), need, |rows, region| {
        with_float!(p.from, T => {
            dispatch(launch.tier, Merge::<T> { launch, rows, stream, region, t: PhantomData });
        });
    });
    Ok(())
}

struct Merge<'a, T> {
    launch: &'a Launch<'a, Problem>,
    rows: Range<usize>,
    stream: bool,
    region: Region<'a>,
    t: PhantomData<T>,
}

/// Weights of the parts of as many rows as a vector has lanes: exponentials of a single row would be one chain of
/// dependent operations.
struct Weights<'a> {
    /// For each part the lse of each row; minus infinity if the row does not have the part.
    lses: &'a mut [f32],
    weights: &'a mut [f32],
    /// What a row's weighted sum is multiplied by, and its merged lse.
    inverses: [f32; MAX_LANES],
    merged: [f32; MAX_LANES],
}

impl<'a> Weights<'a> {
    /// Scratch for [`Weights::new`], on any tier.
    fn need(num_parts: usize) -> Need {
        Need::of::<f32>(num_parts * MAX_LANES).and::<f32>(num_parts * MAX_LANES)
    }

    fn new(region: &mut Region<'a>, num_parts: usize, lanes: usize) -> Self {
        let [lses, weights] = [0; 2].map(|_| region.filled(num_parts * lanes, f32::NEG_INFINITY));
        Weights { lses, weights, inverses: [0.0; MAX_LANES], merged: [0.0; MAX_LANES] }
    }

    /// Works out the weights once all lses are in place.
    #[inline(always)]
    fn fill<S: Simd>(&mut self, s: S) {
        let none = s.splat(f32::NEG_INFINITY);
        let (mut largest, mut sum) = (none, s.zero());
        // SAFETY: each chunk is as long as a vector, and so are the first lanes of the arrays.
        unsafe {
            for lses in self.lses.chunks_exact(S::N) {
                largest = s.max_nan(largest, s.load(lses.as_ptr()));
            }
            for (lses, weights) in self.lses.chunks_exact(S::N).zip(self.weights.chunks_exact_mut(S::N)) {
                let lse = s.load(lses.as_ptr());
                let weight = math::exp(s, s.sub(lse, largest));
                s.store(weights.as_mut_ptr(), weight);
                sum = s.add(sum, s.select(s.eq(lse, none), s.zero(), weight));
            }
            let inverse = s.select(s.eq(largest, none), s.zero(), s.div(s.splat(1.0), sum));
            s.store(self.inverses.as_mut_ptr(), inverse);
            s.store(self.merged.as_mut_ptr(), s.add(largest, math::log(s, sum)));
        }
    }

    /// The parts that the row in this lane has, and their weights.
    #[inline(always)]
    fn of(&self, lanes: usize, lane: usize) -> impl Iterator<Item = (usize, f32)> {
        let places = (lane..self.lses.len()).step_by(lanes).enumerate();
        let parts = places.filter(|&(_, place)| self.lses[place] != f32::NEG_INFINITY);
        parts.map(|(part, place)| (part, self.weights[place]))
    }
}

impl<T: CpuElement> Task for Merge<'_, T> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let p = self.launch.problem;
        let args = self.launch.args;
        // A row of another type is merged in f32 and rounded by a task of its own.
        let merged = self.region.slice::<f32>(p.head_dim);
        let mut weights = Weights::new(&mut self.region, p.num_parts, S::N);
        // The parts of a row that is merged.
        let mut parts_of_row = self.region.list(p.num_parts);
        let Range { start, end } = self.rows;
        for row in start..end {
            let lane = (row - start) % S::N;
            // SAFETY: `check` bound all shapes to these sizes and strides; threads get disjoint rows.
            unsafe {
                if lane == 0 {
                    for (lane, row) in (row..end).take(S::N).enumerate() {
                        let lses = (args.address(LSES) as *const f32).wrapping_add(p.rows.offsets(row)[1]);
                        let count = match p.counts {
                            Some(stride) => {
                                let token = (row / p.num_heads) as isize;
                                *(args.address(COUNTS) as *const i32).offset(token * stride)
                            }
                            None => i32::MAX,
                        };
                        for part in 0..p.num_parts {
                            weights.lses[part * S::N + lane] = match (part as i64) < count as i64 {
                                true => *lses.offset(part as isize * p.part_strides[1]),
                                false => f32::NEG_INFINITY,
                            };
                        }
                    }
                    weights.fill(s);
                }
                let [outs_at, _, out_at, lse_at] = p.rows.offsets(row);
                if p.has_lse {
                    *(args.address(LSE) as *mut f32).add(lse_at) = weights.merged[lane];
                }
                parts_of_row.clear();
                parts_of_row.extend(weights.of(S::N, lane));
                let row = (&parts_of_row[..], weights.inverses[lane]);
                let parts = (args.address(OUTS) as *const T).wrapping_add(outs_at);
                if p.from == p.to && p.steps == [1, 1] {
                    let out = (args.address(OUT) as *mut T).wrapping_add(out_at);
                    let stream = self.stream && can_stream::<S::Pair, T>(out);
                    merge_row(
                        s.pair(),
                        p,
                        row,
                        parts,
                        #[inline(always)]
                        |row, i, count| load_unordered_at(s.pair(), row, i, count),
                        #[inline(always)]
                        |i, count, v| put_near_at(s.pair(), out, i, count, v, stream),
                    );
                    continue;
                }
                let (values, step) = (merged.as_mut_ptr(), p.steps[0]);
                merge_row(
                    s.pair(),
                    p,
                    row,
                    parts,
                    #[inline(always)]
                    |row, i, count| match step {
                        1 => load_at(s.pair(), row, i, count),
                        _ => gather(s.pair(), row.wrapping_offset(i as isize * step), step, count),
                    },
                    #[inline(always)]
                    |i, count, v| store_at(s.pair(), values, i, count, v),
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
    (weights, inverse): (&[(usize, f32)], f32),
    parts: *const T,
    load: impl Fn(*const T, usize, usize) -> S::V,
    put: impl Fn(usize, usize, S::V),
) {
    let inverse = s.splat(inverse);
    for_vectors::<S>(
        p.head_dim,
        #[inline(always)]
        |i, count| {
            let mut total = s.zero();
            for &(part, weight) in weights {
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
    let mut lanes = [0.0; MAX_LANES];
    for (i, lane) in lanes[..count].iter_mut().enumerate() {
        // SAFETY: `i < count`.
        *lane = unsafe { *p.offset(i as isize * step) }.to_f32();
    }
    // SAFETY: no vector has more lanes.
    unsafe { s.load(lanes.as_ptr()) }
}
