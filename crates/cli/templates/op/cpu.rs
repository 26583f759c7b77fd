//! `new_op` on the CPU, one source for all tiers.

use super::{OUT, Problem, X};
use crate::cpu::rows::with_float;
use crate::cpu::{CpuElement, Simd, Task, dispatch, map, parallel_for, should_stream};
use crate::error::Result;
use crate::op::Launch;
use std::marker::PhantomData;
use std::ops::Range;

/// Minimum number of elements per thread: fewer do not pay for waking a thread.
const GRAIN: usize = 1 << 15;

pub(super) fn run(launch: &Launch<'_, Problem>) -> Result<()> {
    let p = launch.problem;
    let stream = should_stream(p.count * p.dtype.size());
    parallel_for(
        p.count,
        GRAIN,
        |part| with_float!(p.dtype, T => dispatch(launch.tier, Forward::<T> { launch, part, stream, t: PhantomData })),
    );
    Ok(())
}

struct Forward<'a, T> {
    launch: &'a Launch<'a, Problem>,
    part: Range<usize>,
    stream: bool,
    t: PhantomData<T>,
}

impl<T: CpuElement> Task for Forward<'_, T> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let p = self.launch.problem;
        let alpha = f32::from_bits(p.alpha_bits);
        let x = self.launch.args.address(X) as *const T;
        let out = self.launch.args.address(OUT) as *mut T;
        // SAFETY: `check` bound both tensors to these sizes and strides; threads get disjoint parts; out is x or
        // does not touch it, and each element is read before it is written.
        unsafe {
            if p.dense {
                let (x, out) = (x.add(self.part.start), out.add(self.part.start));
                let alpha = s.splat(alpha);
                map(
                    s,
                    x,
                    out,
                    self.part.len(),
                    self.stream,
                    #[inline(always)]
                    |v| s.mul(v, alpha),
                );
            } else {
                for index in self.part {
                    let [from, to, ..] = p.elements.offsets(index);
                    *out.add(to) = T::from_f32((*x.add(from)).to_f32() * alpha);
                }
            }
        }
    }
}
