//! `linear_cross_entropy` on the CPU: for each part of the rows, the logits, their losses and gradients in their place, and
//! then the products with those. The last step of the gradients of the loss is a pass over each.

use super::backward::{self, Pair};
use super::{COUNT, DW, DX, LOSS, Part, Problem, TARGETS, W, X};
use crate::cpu::rows::{DenseRows, for_vectors, load_unordered_at, put_unordered_at, with_float};
use crate::cpu::scratch::{self, Need};
use crate::cpu::{CpuElement, Region, Simd, Task, Tier, dispatch, parallel_for, parallel_for_with_scratch};
use crate::error::Result;
use crate::op::{Kernel, Launch};
use crate::ops::cross_entropy::cpu::{IGNORED, Targets, reduce};
use crate::ops::cross_entropy::rows::{self, Slope};
use crate::ops::linear::cpu::multiply;
use crate::ops::linear::problem::Part as Operands;
use std::marker::PhantomData;
use std::ops::Range;

/// The kernel of a tier.
pub(super) const fn kernel(name: &'static str, tier: Tier) -> Kernel<Problem> {
    Kernel::cpu(name, tier, run).with_workspace(|p, _| p.logits_bytes())
}

fn run(launch: &Launch<'_, Problem>) -> Result<()> {
    let p = launch.problem;
    let args = launch.args;
    scratch::with(Need::of::<usize>(p.rows).and::<f32>(p.rows), |mut region| {
        let targets = region.slice(p.rows);
        let count = Targets {
            op: args.spec().name,
            address: args.address(TARGETS),
            dtype: p.target_dtype,
            rows: &p.targets,
            tensor: 0,
            vocab: p.vocab,
            ignore_index: p.options.ignore_index,
        }
        .read(targets)?;
        let losses = region.slice::<f32>(p.rows);
        for part in p.parts() {
            compute(launch, part, targets, losses);
        }
        // SAFETY: `check` bound both to one number.
        unsafe {
            if p.has_count {
                *(args.address(COUNT) as *mut f32) = count as f32;
            }
            *(args.address(LOSS) as *mut f32) = reduce(losses, count, p.options.reduction);
        }
        Ok(())
    })
}

/// Computes a part: the losses of its rows, and what it gives to the gradients.
fn compute(launch: &Launch<'_, Problem>, part: Part, targets: &[usize], losses: &mut [f32]) {
    let (p, args, logits) = (launch.problem, launch.args, launch.workspace);
    let x = p.row_at(args.address(X), &p.x, part.first);
    let w = args.address(W);
    // SAFETY: `check` bound the matrices to the tensors, and the scratch memory has room for the logits of a part. Their
    // gradients take their place, and are complete before they are multiplied.
    unsafe {
        if part.rows > 0 {
            multiply(&p.product_of_logits(part), &Operands::product(x, w, logits), launch.tier, None);
        }
        let own = part.first..part.first + part.rows;
        let (targets, to) = (&targets[own.clone()], Losses(losses[own].as_mut_ptr()));
        parallel_for(part.rows, 1, |rows| {
            with_float!(p.dtype, T => {
                let (targets, to) = (targets, &to);
                dispatch(launch.tier, Rows::<T> { p, logits, targets, to, rows, t: PhantomData });
            });
        });
        if let Some(product) = p.product_of_dx(part) {
            let dx = p.row_at(args.address(DX), &p.dx.unwrap_or(p.x), part.first);
            multiply(&product, &Operands::product(logits, w, dx), launch.tier, None);
        }
        if let Some(product) = p.product_of_dw(part) {
            let operands = Operands::product(logits, x, args.address(DW));
            let operands = if product.has_residual { operands.adding() } else { operands };
            multiply(&product, &operands, launch.tier, None);
        }
    }
}

/// A place for the loss of each row.
struct Losses(*mut f32);

// SAFETY: each row is written by one thread.
unsafe impl Sync for Losses {}

/// Some rows of a part: from their logits to their losses, and to gradients in the place of the logits.
struct Rows<'a, T> {
    p: &'a Problem,
    logits: usize,
    targets: &'a [usize],
    to: &'a Losses,
    rows: Range<usize>,
    t: PhantomData<T>,
}

impl<T: CpuElement> Task for Rows<'_, T> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        // Two vectors in lock-step: exponentials are chains of a dozen operations.
        let s = s.pair();
        let p = self.p;
        for row in self.rows {
            let x = (self.logits as *mut f32).wrapping_add(row * p.pitch());
            let dz = x.cast::<T>();
            let mut loss = 0.0;
            // SAFETY: the part has this row of logits, and no other thread does; a target is a column.
            unsafe {
                if self.targets[row] == IGNORED {
                    std::ptr::write_bytes(dz, 0, p.vocab);
                } else {
                    let found = rows::loss(s, &p.options, x, p.vocab, self.targets[row]);
                    loss = found.loss;
                    if p.has_gradients() {
                        let slope = Slope { lse: found.lse, factor: 1.0, stream: false };
                        rows::gradient(s, &p.options, (x, dz, p.vocab), self.targets[row], slope);
                    }
                }
                *self.to.0.add(row) = loss;
            }
        }
    }
}

/// The fewest elements a thread multiplies: less does not pay for waking a thread.
const GRAIN: usize = 1 << 14;

pub(super) fn run_backward(launch: &Launch<'_, backward::Problem>) -> Result<()> {
    let (p, args) = (launch.problem, launch.args);
    // SAFETY: `check` bound both to one number.
    let (count, dloss) = unsafe {
        let value = |index: usize| *(args.address(index) as *const f32);
        (value(backward::COUNT), value(backward::DLOSS))
    };
    let factor = match p.is_mean {
        true if count == 0.0 => 0.0,
        true => dloss / count,
        false => dloss,
    };
    let pairs = [(Some(p.dx), backward::DX_SUM, backward::DX), (p.dw, backward::DW_SUM, backward::DW)];
    for (pair, from, to) in pairs {
        let Some(pair) = pair else { continue };
        let (from, to) = (args.address(from), args.address(to));
        let need = DenseRows::<f32>::need(p.dtype, p.hidden, &pair.steps);
        parallel_for_with_scratch(pair.num_rows, GRAIN.div_ceil(p.hidden.max(1)), need, |rows, region| {
            with_float!(p.dtype, T => {
                let scaled = Scaled::<T> { pair: &pair, hidden: p.hidden, from, to, factor, rows, region, t: PhantomData };
                dispatch(launch.tier, scaled);
            });
        });
    }
    Ok(())
}

/// Some rows of a gradient, times a factor.
struct Scaled<'a, T> {
    pair: &'a Pair,
    hidden: usize,
    from: usize,
    to: usize,
    factor: f32,
    rows: Range<usize>,
    region: Region<'a>,
    t: PhantomData<T>,
}

impl<T: CpuElement> Task for Scaled<'_, T> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let (pair, hidden) = (self.pair, self.hidden);
        let mut scratch = DenseRows::<T>::new(&mut self.region, hidden, &pair.steps);
        let factor = s.splat(self.factor);
        for row in self.rows {
            let [from, to, ..] = pair.rows.offsets(row);
            // SAFETY: `check` bound both shapes to these sizes and strides; threads get disjoint rows; one tensor is the other
            // only element for element, and each is read before it is written.
            unsafe {
                let from = scratch.gather(0, (self.from as *const T).wrapping_add(from), pair.steps[0]);
                let place = (self.to as *mut T).wrapping_add(to);
                let dense = scratch.target(1, place, pair.steps[1]);
                for_vectors::<S>(
                    hidden,
                    #[inline(always)]
                    |i, count| {
                        let v = s.mul(load_unordered_at(s, from, i, count), factor);
                        put_unordered_at(s, dense, i, count, v, false);
                    },
                );
                scratch.scatter(1, place, pair.steps[1]);
            }
        }
    }
}
