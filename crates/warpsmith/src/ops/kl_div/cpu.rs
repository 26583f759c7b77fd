//! `kl_div` and its gradient on the CPU, one source for all tiers. Rows are divided among threads.

use super::backward::{self, COUNT as BACK_COUNT, DLOSS, DSTUDENT};
use super::rows::{self, Slope};
use super::{COUNT, LOSS, Options, Problem, ROW_LOSSES, Reduction, TARGETS, logits_of, lse_of};
use crate::cpu::rows::{DenseRows, index_at, with_float};
use crate::cpu::scratch::{self, Need};
use crate::cpu::{CpuElement, Region, Simd, Task, dispatch, parallel_for_with_scratch, should_stream};
use crate::error::Result;
use crate::op::Launch;
use crate::ops::cross_entropy::cpu::reduce;
use crate::tensor::DType;
use std::marker::PhantomData;
use std::ops::Range;

/// The fewest elements a thread works on: less does not pay for waking a thread.
const GRAIN: usize = 1 << 12;

/// Where the targets of a call are.
#[derive(Clone, Copy)]
struct Targets {
    address: usize,
    /// `None` without targets.
    dtype: Option<DType>,
    ignore_index: i64,
}

impl Targets {
    /// Whether the row counts whose target is at this offset.
    ///
    /// # Safety
    /// The offset must be that of an element of the targets, if there are any.
    #[inline(always)]
    unsafe fn counts(&self, offset: usize) -> bool {
        // SAFETY: passed on.
        self.dtype.is_none_or(|dtype| unsafe { index_at(self.address, dtype, offset) } != self.ignore_index)
    }
}

pub(super) fn run(launch: &Launch<'_, Problem>) -> Result<()> {
    let p = launch.problem;
    let args = launch.args;
    let by_row = p.options.reduction == Reduction::None;
    let address = if p.target_dtype.is_some() { args.address(TARGETS) } else { 0 };
    let targets = Targets { address, dtype: p.target_dtype, ignore_index: p.options.ignore_index };
    scratch::with(Need::of::<f32>(p.num_rows), |mut region| {
        let losses = region.slice::<f32>(p.num_rows);
        let to = &Losses(losses.as_mut_ptr());
        let need = DenseRows::<f32>::need(p.dtype, p.vocab, &p.steps);
        parallel_for_with_scratch(p.num_rows, GRAIN.div_ceil(p.vocab), need, |rows, region| {
            with_float!(p.dtype, T => {
                dispatch(launch.tier, Forward::<T> { launch, targets, to, rows, region, t: PhantomData })
            });
        });
        if by_row && !p.has_count {
            return Ok(());
        }
        // SAFETY: the offsets of targets; `check` bound both results to one number.
        unsafe {
            let count = (0..p.num_rows).filter(|&row| targets.counts(p.rows.offsets(row)[2])).count();
            if p.has_count {
                *(args.address(COUNT) as *mut f32) = count as f32;
            }
            if !by_row {
                *(args.address(LOSS) as *mut f32) = reduce(losses, count, p.options.reduction);
            }
        }
        Ok(())
    })
}

/// A place for the loss of each row.
struct Losses(*mut f32);

// SAFETY: each row is written by one thread.
unsafe impl Sync for Losses {}

/// Some rows.
struct Forward<'a, T> {
    launch: &'a Launch<'a, Problem>,
    targets: Targets,
    to: &'a Losses,
    rows: Range<usize>,
    region: Region<'a>,
    t: PhantomData<T>,
}

impl<T: CpuElement> Task for Forward<'_, T> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        // Two vectors in lock-step: exponentials are chains of a dozen operations.
        let s = s.pair();
        let (p, args) = (self.launch.problem, self.launch.args);
        let (logits, lse_at) = (logits_of(&p.options), lse_of(&p.options));
        let mut scratch = DenseRows::<T>::new(&mut self.region, p.vocab, &p.steps);
        for row in self.rows {
            let [first, second, target, loss] = p.rows.offsets(row);
            let [first_lse, second_lse, row_loss, _] = p.values.offsets(row);
            let mut found = rows::Loss::default();
            // SAFETY: `check` bound all shapes to these sizes and strides.
            unsafe {
                if self.targets.counts(target) {
                    let x = (args.address(logits[0]) as *const T).wrapping_add(first);
                    let y = (args.address(logits[1]) as *const T).wrapping_add(second);
                    let x = scratch.gather(0, x, p.steps[0]);
                    let y = scratch.gather(1, y, p.steps[1]);
                    found = rows::loss(s, &p.options, [x, y], p.vocab);
                }
                let put = |index: usize, offset: usize, value: f32| {
                    *(args.address(index) as *mut f32).wrapping_add(offset) = value;
                };
                match p.options.reduction {
                    Reduction::None => put(LOSS, loss, found.loss),
                    _ => *self.to.0.add(row) = found.loss,
                }
                if p.has_lse[0] {
                    put(lse_at[0], first_lse, found.lse[0]);
                }
                if p.has_lse[1] {
                    put(lse_at[1], second_lse, found.lse[1]);
                }
                if p.has_row_losses {
                    put(ROW_LOSSES, row_loss, found.loss);
                }
            }
        }
    }
}

/// The gradient of a row's loss, from that of the loss and the number of rows that count.
fn factor(options: &Options, dloss: f32, count: f32) -> f32 {
    if options.reduction == Reduction::Mean { dloss / count } else { dloss }
}

pub(super) fn run_backward(launch: &Launch<'_, backward::Problem>) -> Result<()> {
    let p = launch.problem;
    let args = launch.args;
    let address = if p.target_dtype.is_some() { args.address(backward::TARGETS) } else { 0 };
    let targets = Targets { address, dtype: p.target_dtype, ignore_index: p.options.ignore_index };
    // What is read is in cache, and then written.
    let in_place = args.address(backward::STUDENT) == args.address(DSTUDENT);
    let stream = !in_place && should_stream(p.num_rows * p.vocab * p.dtype.size());
    let need = DenseRows::<f32>::need(p.dtype, p.vocab, &p.steps);
    parallel_for_with_scratch(p.num_rows, GRAIN.div_ceil(p.vocab), need, |rows, region| {
        with_float!(p.dtype, T => {
            dispatch(launch.tier, Backward::<T> { launch, targets, rows, stream, region, t: PhantomData })
        });
    });
    Ok(())
}

/// Some rows of the gradient.
struct Backward<'a, T> {
    launch: &'a Launch<'a, backward::Problem>,
    targets: Targets,
    rows: Range<usize>,
    stream: bool,
    region: Region<'a>,
    t: PhantomData<T>,
}

impl<T: CpuElement> Task for Backward<'_, T> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let s = s.pair();
        let (p, args) = (self.launch.problem, self.launch.args);
        let mut scratch = DenseRows::<T>::new(&mut self.region, p.vocab, &p.steps);
        for row in self.rows {
            let [student, teacher, dstudent, target] = p.rows.offsets(row);
            let [lse, teacher_lse, row_loss, by_row] = p.values.offsets(row);
            let by_row = if p.options.reduction == Reduction::None { by_row } else { 0 };
            // SAFETY: `check` bound all shapes to these sizes and strides; threads get disjoint rows.
            unsafe {
                let to = (args.address(DSTUDENT) as *mut T).wrapping_add(dstudent);
                let out = scratch.target(2, to, p.steps[2]);
                if self.targets.counts(target) {
                    let x = (args.address(backward::STUDENT) as *const T).wrapping_add(student);
                    let y = (args.address(backward::TEACHER) as *const T).wrapping_add(teacher);
                    let x = scratch.gather(0, x, p.steps[0]);
                    let y = scratch.gather(1, y, p.steps[1]);
                    let value = |index: usize, offset: usize| {
                        *(args.address(index) as *const f32).wrapping_add(offset)
                    };
                    let slope = Slope {
                        lse: [value(backward::LSE, lse), value(backward::TEACHER_LSE, teacher_lse)],
                        loss: value(backward::ROW_LOSSES, row_loss),
                        dloss: factor(&p.options, value(DLOSS, by_row), value(BACK_COUNT, 0)),
                        stream: self.stream && p.steps[2] == 1,
                    };
                    rows::gradient(s, &p.options, [x, y], (out, p.vocab), slope);
                } else {
                    std::ptr::write_bytes(out, 0, p.vocab);
                }
                scratch.scatter(2, to, p.steps[2]);
            }
        }
        if self.stream {
            s.fence();
        }
    }
}
