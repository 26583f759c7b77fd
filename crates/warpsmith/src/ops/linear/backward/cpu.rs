//! `linear_backward` on the CPU.

use super::super::cpu::multiply;
use super::{BackwardProblem, DBIAS, DOUT, Z};
use crate::cpu::rows::{for_vectors, load_at, with_float};
use crate::cpu::{CpuElement, Simd, Task, Tier, dispatch, parallel_for};
use crate::error::Result;
use crate::op::{Kernel, Launch};
use crate::ops::elementwise::function::{Function, with_function};
use std::marker::PhantomData;
use std::ops::Range;

/// Columns a thread goes down at a time: their sums fit the registers of every tier.
const COLUMNS: usize = 32;

/// The kernel of a tier.
pub(super) const fn kernel(name: &'static str, tier: Tier) -> Kernel<BackwardProblem> {
    Kernel::cpu(name, tier, run).with_workspace(|p, _| p.workspace())
}

fn run(launch: &Launch<'_, BackwardProblem>) -> Result<()> {
    let p = launch.problem;
    if p.has_pass() {
        parallel_for(p.n.div_ceil(COLUMNS), 1, |strips| {
            with_float!(p.dtype, T => dispatch(launch.tier, Strips::<T> { launch, strips, t: PhantomData }));
        });
    }
    // SAFETY: `check` made the products of these tensors, and `dz` is complete.
    p.parts(launch.args, launch.workspace)
        .for_each(|(product, part)| unsafe { multiply(product, &part, launch.tier, None) });
    Ok(())
}

/// Strips of columns, over all rows: `dz` of each element, and the sum of each column.
struct Strips<'a, T> {
    launch: &'a Launch<'a, BackwardProblem>,
    strips: Range<usize>,
    t: PhantomData<T>,
}

impl<T: CpuElement> Task for Strips<'_, T> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        match self.launch.problem.activation {
            None => self.go(
                s,
                #[inline(always)]
                |_| s.splat(1.0),
            ),
            Some(kind) => with_function!(kind, F in Gelu GeluTanh Silu Relu => {
                // In full f32 accuracy whatever `T` is: a sum of many shows errors that rounding hides in each term.
                // Compared with the products it takes no time.
                self.go(s, #[inline(always)] |z| F::derivative::<S, f32>(s, z))
            }),
        }
    }
}

impl<T: CpuElement> Strips<'_, T> {
    #[inline(always)]
    fn go<S: Simd>(self, s: S, slope: impl Fn(S::V) -> S::V) {
        let (p, args) = (self.launch.problem, self.launch.args);
        let at = |index: usize, offset: isize| (args.address(index) as *mut T).wrapping_offset(offset);
        let (scale, has_slope) = (s.splat(f32::from_bits(p.scale_bits)), p.activation.is_some());
        for strip in self.strips {
            let first = strip * COLUMNS;
            let columns = COLUMNS.min(p.n - first);
            let mut sums = [0f32; COLUMNS];
            for line in 0..p.lines {
                let offset = |row: isize, col: isize| line as isize * row + first as isize * col;
                let (mut dz, mut z) = ([0f32; COLUMNS], [0f32; COLUMNS]);
                // SAFETY: `check` bound all shapes to these sizes and strides, the scratch memory holds `lines` rows of
                // `n` elements, and strips are disjoint columns; the arrays are whole vectors.
                unsafe {
                    gather(s, &mut dz, at(DOUT, offset(p.dout.row, p.dout.col)), p.dout.col, columns);
                    if has_slope {
                        gather(s, &mut z, at(Z, offset(p.z.row, p.z.col)), p.z.col, columns);
                    }
                    for i in (0..COLUMNS).step_by(S::N) {
                        let mut d = s.mul(s.load(dz.as_ptr().add(i)), scale);
                        if has_slope {
                            d = s.mul(d, slope(s.load(z.as_ptr().add(i))));
                        }
                        s.store(dz.as_mut_ptr().add(i), d);
                        s.store(sums.as_mut_ptr().add(i), s.add(s.load(sums.as_ptr().add(i)), d));
                    }
                    if p.stores_dz {
                        let to = (self.launch.workspace as *mut T).add(line * p.n + first);
                        for_vectors::<S>(
                            columns,
                            #[inline(always)]
                            |i, count| {
                                let d = s.load(dz.as_ptr().add(i));
                                match count == S::N {
                                    true => T::store(s, to.add(i), d),
                                    false => T::store_partial(s, to.add(i), d, count),
                                }
                            },
                        );
                    }
                }
            }
            if p.has_dbias {
                for (i, &sum) in sums[..columns].iter().enumerate() {
                    // SAFETY: `check` bound the shape of `dbias`.
                    unsafe { *at(DBIAS, (first + i) as isize * p.dbias_step) = T::from_f32(sum) };
                }
            }
        }
    }
}

/// # Safety
/// `count` elements `step` apart from `from` must be readable, at most as many as `to` holds.
#[inline(always)]
unsafe fn gather<S: Simd, T: CpuElement>(
    s: S,
    to: &mut [f32; COLUMNS],
    from: *const T,
    step: isize,
    count: usize,
) {
    if step == 1 {
        return for_vectors::<S>(
            count,
            #[inline(always)]
            // SAFETY: passed on; the array is whole vectors.
            |i, count| unsafe { s.store(to.as_mut_ptr().add(i), load_at(s, from, i, count)) },
        );
    }
    for (i, to) in to[..count].iter_mut().enumerate() {
        // SAFETY: passed on.
        *to = unsafe { (*from.offset(i as isize * step)).to_f32() };
    }
}
