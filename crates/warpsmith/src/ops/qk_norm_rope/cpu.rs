//! `qk_norm_rope` on the CPU, one source for all tiers: the factors of a token are worked out once for all its heads, and each
//! head is computed in f32, in scratch.

use super::{COS, K, K_OUT, K_WEIGHT, POSITIONS, Problem, Q, Q_OUT, Q_WEIGHT, SIN};
use crate::cpu::rows::{for_vectors, index_at, load_at, store_at, with_float};
use crate::cpu::{CpuElement, Need, Region, Simd, Task, dispatch, parallel_for_with_scratch};
use crate::error::Result;
use crate::op::Launch;
use crate::ops::rope::cpu::{Factors, Head, Row};
use std::marker::PhantomData;
use std::ops::Range;

/// The fewest elements a thread works on: less does not pay for waking a thread.
const GRAIN: usize = 1 << 14;

pub(super) fn run(launch: &Launch<'_, Problem>) -> Result<()> {
    let p = launch.problem;
    let positions = (0..p.num_tokens).map(|token| position(launch, token));
    p.rotation.check_positions(launch.args.spec().name, positions)?;
    let frequencies = Factors::frequencies(&p.rotation)?;
    let tables = [COS, SIN].map(|index| launch.args.address(index));
    let factors = &Factors::new(&p.rotation, tables, frequencies.as_ref());
    let head = Need::of::<f32>(p.head_dim);
    let need = head.and::<f32>(p.head_dim).and::<f32>(p.head_dim).plus(Row::need(&p.rotation));
    let grain = GRAIN.div_ceil((p.heads() * p.head_dim).max(1));
    parallel_for_with_scratch(p.num_tokens, grain, need, |tokens, region| {
        with_float!(p.dtype, T => {
            dispatch(launch.tier, Heads::<T> { launch, factors, tokens, region, t: PhantomData })
        });
    });
    Ok(())
}

fn position(launch: &Launch<'_, Problem>, token: usize) -> i64 {
    let p = launch.problem;
    // SAFETY: one of the tensor's elements.
    unsafe { index_at(launch.args.address(POSITIONS), p.position_dtype, p.positions.offsets(token)[0]) }
}

/// The heads of some tokens.
struct Heads<'a, T> {
    launch: &'a Launch<'a, Problem>,
    factors: &'a Factors<'a>,
    tokens: Range<usize>,
    region: Region<'a>,
    t: PhantomData<T>,
}

impl<T: CpuElement> Task for Heads<'_, T> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let (p, args) = (self.launch.problem, self.launch.args);
        let (dim, eps) = (p.head_dim, p.eps());
        let values = self.region.slice::<f32>(dim);
        let weights = [(Q_WEIGHT, 0), (K_WEIGHT, 1)].map(|(index, side)| {
            let weight = self.region.slice::<f32>(dim);
            with_float!(p.weight_dtype, W => {
                // SAFETY: the weight has an element for each of a head.
                unsafe { widen((args.address(index) as *const W, p.weight_steps[side]), weight) }
            });
            weight
        });
        let mut row = Row::new(&mut self.region, &p.rotation);
        for token in self.tokens.clone() {
            // SAFETY: `run` has bound the positions to the tables.
            unsafe { row.fill(s, self.factors, position(self.launch, token)) };
            let starts = p.tokens.offsets(token);
            for (side, (from, to)) in [(Q, Q_OUT), (K, K_OUT)].into_iter().enumerate() {
                for head in 0..p.heads[side] {
                    let at = |index: usize, side: usize| {
                        let start = (args.address(index) as *mut T).wrapping_add(starts[side]);
                        (start.wrapping_offset(head as isize * p.head_strides[side]), p.steps[side])
                    };
                    let (x, step) = at(from, side);
                    // SAFETY: `check` bound all shapes to these sizes and strides; threads get disjoint tokens. A head is
                    // read before it is written.
                    unsafe {
                        gather(s, (x.cast_const(), step), values);
                        normalise(s, values, weights[side], eps);
                        let at_values = values.as_mut_ptr();
                        let head =
                            Head { row: &row, x: at_values.cast_const(), out: at_values, stream: false };
                        head.rotate(self.launch.tier);
                        scatter(s, values, at(to, side + 2));
                    }
                }
            }
        }
    }
}

/// One by one.
///
/// # Safety
/// As many elements as `values` has must be readable at the address, at their distance.
unsafe fn widen<T: CpuElement>((x, step): (*const T, isize), values: &mut [f32]) {
    for (i, value) in values.iter_mut().enumerate() {
        // SAFETY: passed on.
        *value = unsafe { *x.offset(i as isize * step) }.to_f32();
    }
}

/// # Safety
/// As many elements as `values` has must be readable at the address, at their distance.
#[inline(always)]
unsafe fn gather<S: Simd, T: CpuElement>(s: S, (x, step): (*const T, isize), values: &mut [f32]) {
    if step != 1 {
        // SAFETY: passed on.
        return unsafe { widen((x, step), values) };
    }
    let out = values.as_mut_ptr();
    for_vectors::<S>(
        values.len(),
        #[inline(always)]
        |i, count| {
            // SAFETY: passed on; both sides have these elements.
            unsafe { store_at(s, out, i, count, load_at(s, x, i, count)) }
        },
    );
}

/// # Safety
/// As many elements as `values` has must be writable at the address, at their distance.
#[inline(always)]
unsafe fn scatter<S: Simd, T: CpuElement>(s: S, values: &[f32], (out, step): (*mut T, isize)) {
    if step != 1 {
        for (i, &value) in values.iter().enumerate() {
            // SAFETY: passed on.
            unsafe { *out.offset(i as isize * step) = T::from_f32(value) };
        }
        return;
    }
    let x = values.as_ptr();
    for_vectors::<S>(
        values.len(),
        #[inline(always)]
        |i, count| {
            // SAFETY: passed on; both sides have these elements.
            unsafe { store_at(s, out, i, count, load_at(s, x, i, count)) }
        },
    );
}

/// `x / sqrt(mean(x²) + eps) * weight`, in place.
#[inline(always)]
fn normalise<S: Simd>(s: S, x: &mut [f32], weight: &[f32], eps: f32) {
    let (n, x) = (x.len(), x.as_mut_ptr());
    let mut squares = s.zero();
    for_vectors::<S>(
        n,
        #[inline(always)]
        |i, count| {
            // SAFETY: `i + count <= n`; lanes past the count are zero.
            let v = unsafe { load_at(s, x.cast_const(), i, count) };
            squares = s.fma(v, v, squares);
        },
    );
    let scale = s.splat(1.0 / (s.reduce_add(squares) / n as f32 + eps).sqrt());
    for_vectors::<S>(
        n,
        #[inline(always)]
        |i, count| {
            // SAFETY: as above; the weight has `n` elements too.
            unsafe {
                let v = s.mul(load_at(s, x.cast_const(), i, count), scale);
                store_at(s, x, i, count, s.mul(v, load_at(s, weight.as_ptr(), i, count)));
            }
        },
    );
}
