//! `grouped_linear_backward` on the CPU: a pass over `dout` where it is not `dz` itself, and then the products of all groups.

use super::super::cpu::{clear, read_counts};
use super::{BackwardProblem, COUNTS, DBIAS, DOUT, DW, DX, SPEC, W, X, Z};
use crate::cpu::rows::{DenseRows, for_vectors, load_at, store_at, with_float};
use crate::cpu::scratch::{self, Need, Region};
use crate::cpu::{CpuElement, Simd, Task, Tier, dispatch, parallel_for_with_scratch};
use crate::error::Result;
use crate::op::{Kernel, Launch};
use crate::ops::elementwise::function::{Function, with_function};
use crate::ops::grouped::cpu::{Group, multiply};
use crate::ops::grouped::sums::ColumnSums;
use crate::ops::linear::problem::{Matrix, Part, Problem as Product};
use crate::tensor::DType;
use std::marker::PhantomData;
use std::ops::Range;

/// The kernel of a tier.
pub(super) const fn kernel(name: &'static str, tier: Tier) -> Kernel<BackwardProblem> {
    Kernel::cpu(name, tier, run)
}

/// The fewest elements a thread works on: less does not pay for waking a thread.
const GRAIN: usize = 1 << 13;

fn run(launch: &Launch<'_, BackwardProblem>) -> Result<()> {
    let (p, args) = (launch.problem, launch.args);
    scratch::with(Need::of::<usize>(p.groups + 1), |mut region| {
        let starts = region.filled(p.groups + 1, 0usize);
        read_counts(SPEC.name, args.address(COUNTS), p.counts_step, p.rows, &mut starts[1..])?;
        let used = starts[p.groups];
        let elements = used.saturating_mul(p.n);
        let narrow = if p.stores_dz() { elements.saturating_mul(p.dtype.size()) } else { 0 };
        let wide = if p.dbias.is_some() { elements } else { 0 };
        scratch::with(Need::of::<u8>(narrow).and::<f32>(wide).and::<Group>(p.groups), |mut region| {
            let dz = region.slice::<u8>(narrow).as_mut_ptr() as usize;
            let exact = region.slice::<f32>(wide).as_mut_ptr() as usize;
            compute(&Call { launch, starts, dz, exact }, region);
        });
        Ok(())
    })
}

/// A call, with scratch for what it needs.
struct Call<'a> {
    launch: &'a Launch<'a, BackwardProblem>,
    starts: &'a [usize],
    /// Rows of `dz`, rounded and not.
    dz: usize,
    exact: usize,
}

fn compute(call: &Call<'_>, mut region: Region<'_>) {
    let (p, args, tier) = (call.launch.problem, call.launch.args, call.launch.tier);
    let used = call.starts[p.groups];
    if p.stores_dz() || p.dbias.is_some() {
        let steps = [p.dout.col, p.z.col];
        let need = DenseRows::<f32>::need(p.dtype, p.n, &steps);
        parallel_for_with_scratch(used, GRAIN.div_ceil(p.n.max(1)), need, |rows, region| {
            with_float!(p.dtype, T => dispatch(tier, Rows::<T> { call, steps, rows, region, t: PhantomData }));
        });
    }
    if let Some(strides) = p.dbias {
        let out = args.address(DBIAS);
        let (starts, out_dtype) = (call.starts, p.dtype);
        let (rows, dtype, weights) = (call.exact, DType::F32, None);
        // SAFETY: the pass has made these rows, and `check` bound the result.
        unsafe { ColumnSums { rows, dtype, n: p.n, starts, weights, out, out_dtype, strides }.run(tier) };
    }
    let (dz, dz_at) = (p.dz(), if p.stores_dz() { call.dz } else { args.address(DOUT) });
    let size = p.dtype.size() as isize;
    let at = |base: usize, elements: isize| base.wrapping_add_signed(elements * size);
    let mut groups = region.list::<Group>(p.groups);
    let each = || call.starts.windows(2).enumerate().map(|(group, ends)| (group as isize, ends[0], ends[1]));
    if let Some(dx) = p.dx {
        let w = Matrix { row: p.w.row, col: p.w.col, aligned: false };
        let product = Product::product(p.dtype, false, [1, p.k, p.n], [dz, w.transposed(), dx]);
        groups.extend(each().map(|(group, start, end)| {
            let first = start as isize;
            let part = Part::product(
                at(dz_at, first * dz.row),
                at(args.address(W), group * p.w.group),
                at(args.address(DX), first * dx.row),
            );
            Group { rows: end - start, depth: p.n, product: 0, part }
        }));
        // SAFETY: `check` made the product of these tensors, and `dz` is complete.
        unsafe {
            multiply(&[product], &groups, tier);
            clear(&product, args.address(DX), used..p.rows);
        }
    }
    if let Some(dw) = p.dw {
        let to = Matrix { row: dw.row, col: dw.col, aligned: false };
        let matrices = [dz.transposed(), p.x.transposed(), to];
        let product = Product::product(p.dtype, false, [p.n, p.k, 0], matrices);
        groups.clear();
        groups.extend(each().map(|(group, start, end)| {
            let first = start as isize;
            let part = Part::product(
                at(dz_at, first * dz.row),
                at(args.address(X), first * p.x.row),
                at(args.address(DW), group * dw.group),
            );
            Group { rows: p.n, depth: end - start, product: 0, part }
        }));
        // SAFETY: as above.
        unsafe { multiply(&[product], &groups, tier) };
    }
}

/// Some rows of `dz`.
struct Rows<'a, T> {
    call: &'a Call<'a>,
    /// Strides along rows of `dout` and `z`.
    steps: [isize; 2],
    rows: Range<usize>,
    region: Region<'a>,
    t: PhantomData<T>,
}

impl<T: CpuElement> Task for Rows<'_, T> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        match self.call.launch.problem.activation {
            None => self.go(
                s,
                #[inline(always)]
                |_| s.splat(1.0),
            ),
            Some(kind) => with_function!(kind, F in Gelu GeluTanh Silu Relu => {
                // In full f32 accuracy whatever `T` is: a sum of many shows errors that rounding hides in each term.
                self.go(s, #[inline(always)] |z| F::derivative::<S, f32>(s, z))
            }),
        }
    }
}

impl<T: CpuElement> Rows<'_, T> {
    #[inline(always)]
    fn go<S: Simd>(mut self, s: S, slope: impl Fn(S::V) -> S::V) {
        let (p, args) = (self.call.launch.problem, self.call.launch.args);
        let (scale, has_slope) = (s.splat(f32::from_bits(p.scale_bits)), p.activation.is_some());
        let mut scratch = DenseRows::<T>::new(&mut self.region, p.n, &self.steps);
        for row in self.rows {
            // SAFETY: `check` bound rows and steps, and scratch has a row for each; threads have rows of their own.
            unsafe {
                let at = |index: usize, stride: isize| {
                    (args.address(index) as *const T).wrapping_offset(row as isize * stride)
                };
                let dout = scratch.gather(0, at(DOUT, p.dout.row), self.steps[0]);
                let z = if has_slope { scratch.gather(1, at(Z, p.z.row), self.steps[1]) } else { dout };
                let dz = (self.call.dz as *mut T).wrapping_add(row * p.n);
                let exact = (self.call.exact as *mut f32).wrapping_add(row * p.n);
                for_vectors::<S>(
                    p.n,
                    #[inline(always)]
                    |i, count| {
                        let mut d = s.mul(load_at(s, dout, i, count), scale);
                        if has_slope {
                            d = s.mul(d, slope(load_at(s, z, i, count)));
                        }
                        if p.stores_dz() {
                            store_at(s, dz, i, count, d);
                        }
                        if p.dbias.is_some() {
                            store_at(s, exact, i, count, d);
                        }
                    },
                );
            }
        }
    }
}
