//! `new_op` on the CPU, one source for all tiers.

use super::{OUT, Problem, X};
use crate::cpu::rows::{load_at, sum_vectors, with_float};
use crate::cpu::{CpuElement, Simd, Task, dispatch, map, parallel_for};
use crate::error::Result;
use crate::op::Launch;
use std::marker::PhantomData;
use std::ops::Range;

/// The fewest elements of a thread: less does not pay for waking a thread.
const GRAIN: usize = 1 << 15;

pub(super) fn run(launch: &Launch<'_, Problem>) -> Result<()> {
    let p = launch.problem;
    parallel_for(
        p.num_rows,
        GRAIN.div_ceil(p.hidden),
        |rows| with_float!(p.dtype, T => dispatch(launch.tier, Forward::<T> { launch, rows, t: PhantomData })),
    );
    Ok(())
}

struct Forward<'a, T> {
    launch: &'a Launch<'a, Problem>,
    rows: Range<usize>,
    t: PhantomData<T>,
}

impl<T: CpuElement> Task for Forward<'_, T> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let p = self.launch.problem;
        for row in self.rows {
            let [from, to, ..] = p.rows.offsets(row);
            let x = (self.launch.args.address(X) as *const T).wrapping_add(from);
            let out = (self.launch.args.address(OUT) as *mut T).wrapping_add(to);
            // SAFETY: `check` bound both tensors to these sizes and strides; threads get disjoint rows; out is x or does
            // not touch it, and each element is read before it is written.
            unsafe {
                if p.steps == [1, 1] {
                    let [sum] = sum_vectors::<S, 1>(
                        s,
                        p.hidden,
                        #[inline(always)]
                        |i, count, sum| sum[0] = s.add(sum[0], load_at(s, x, i, count)),
                    );
                    let mean = s.splat(sum / p.hidden as f32);
                    map(
                        s,
                        x,
                        out,
                        p.hidden,
                        false,
                        #[inline(always)]
                        |v| s.sub(v, mean),
                    );
                    continue;
                }
                let at = |i: usize| (*x.wrapping_offset(i as isize * p.steps[0])).to_f32();
                let mean = (0..p.hidden).map(at).sum::<f32>() / p.hidden as f32;
                for i in 0..p.hidden {
                    *out.wrapping_offset(i as isize * p.steps[1]) = T::from_f32(at(i) - mean);
                }
            }
        }
    }
}
