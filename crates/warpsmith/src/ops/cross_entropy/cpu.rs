//! `cross_entropy` and its gradient on the CPU, one source for all tiers. Rows are divided among threads.

use super::backward::{self, COUNT as BACK_COUNT, DLOGITS, DLOSS, LSE as BACK_LSE};
use super::rows::{self, Slope};
use super::{COUNT, LOGITS, LOSS, LSE, Options, Problem, Reduction, TARGETS};
use crate::cpu::rows::{DenseRows, index_at, with_float};
use crate::cpu::scratch::{self, Need};
use crate::cpu::{CpuElement, Region, Simd, Task, dispatch, parallel_for_with_scratch, should_stream};
use crate::error::{Error, Result};
use crate::op::Launch;
use crate::tensor::{DType, Space};
use std::marker::PhantomData;
use std::ops::Range;

/// The fewest elements a thread works on: less does not pay for waking a thread.
const GRAIN: usize = 1 << 13;

/// In place of the target of a row that is ignored.
pub(in crate::ops) const IGNORED: usize = usize::MAX;

/// Where the targets of a call are.
pub(in crate::ops) struct Targets<'a> {
    pub op: &'static str,
    pub address: usize,
    pub dtype: DType,
    /// Their offsets are those of tensor `tensor`.
    pub rows: &'a Space<4>,
    pub tensor: usize,
    pub vocab: usize,
    pub ignore_index: i64,
}

impl Targets<'_> {
    /// Reads them: columns, or [`IGNORED`]. Returns how many are not.
    pub fn read(&self, to: &mut [usize]) -> Result<usize> {
        let mut count = 0;
        for (row, to) in to.iter_mut().enumerate() {
            // SAFETY: the offset of an element of the tensor, which has this type.
            let target = unsafe { index_at(self.address, self.dtype, self.rows.offsets(row)[self.tensor]) };
            *to = IGNORED;
            if target == self.ignore_index {
                continue;
            }
            let column = usize::try_from(target).ok().filter(|&column| column < self.vocab);
            *to = column.ok_or_else(|| {
                let expected =
                    format!("ignore_index={} or from 0 to below vocab={}", self.ignore_index, self.vocab);
                Error::argument(self.op, "targets", expected, format!("{target} at {row}"))
            })?;
            count += 1;
        }
        Ok(count)
    }
}

/// From the losses of rows to that of all: `count` are not ignored. They are added in their order, in f64: that rounds less
/// than any order in f32.
pub(in crate::ops) fn reduce(losses: &[f32], count: usize, reduction: Reduction) -> f32 {
    let sum = losses.iter().fold(0f64, |sum, &loss| sum + f64::from(loss));
    (if reduction == Reduction::Mean { sum / count as f64 } else { sum }) as f32
}

pub(super) fn run(launch: &Launch<'_, Problem>) -> Result<()> {
    let p = launch.problem;
    let args = launch.args;
    let by_row = p.options.reduction == Reduction::None;
    let need = Need::of::<usize>(p.num_rows).and::<f32>(p.num_rows);
    scratch::with(need, |mut region| {
        let targets = region.slice(p.num_rows);
        let count = Targets {
            op: args.spec().name,
            address: args.address(TARGETS),
            dtype: p.target_dtype,
            rows: &p.rows,
            tensor: 1,
            vocab: p.vocab,
            ignore_index: p.options.ignore_index,
        }
        .read(targets)?;
        let losses = region.slice::<f32>(p.num_rows);
        let to = Losses(losses.as_mut_ptr());
        let (targets, to) = (&*targets, &to);
        let need = DenseRows::<f32>::need(p.dtype, p.vocab, &[p.step]);
        parallel_for_with_scratch(p.num_rows, GRAIN.div_ceil(p.vocab), need, |rows, region| {
            with_float!(p.dtype, T => {
                dispatch(launch.tier, Forward::<T> { launch, targets, to, rows, region, t: PhantomData })
            });
        });
        // SAFETY: `check` bound both to one number.
        unsafe {
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
    targets: &'a [usize],
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
        let mut scratch = DenseRows::<T>::new(&mut self.region, p.vocab, &[p.step]);
        for row in self.rows {
            let [logits, _, lse, loss] = p.rows.offsets(row);
            let mut found = rows::Loss { loss: 0.0, lse: 0.0 };
            // SAFETY: `check` bound all shapes to these sizes and strides; a target is a column.
            unsafe {
                if self.targets[row] != IGNORED {
                    let x = (args.address(LOGITS) as *const T).wrapping_add(logits);
                    let x = scratch.gather(0, x, p.step);
                    found = rows::loss(s, &p.options, x, p.vocab, self.targets[row]);
                }
                match p.options.reduction {
                    Reduction::None => *(args.address(LOSS) as *mut f32).wrapping_add(loss) = found.loss,
                    _ => *self.to.0.add(row) = found.loss,
                }
                if p.has_lse {
                    *(args.address(LSE) as *mut f32).wrapping_add(lse) = found.lse;
                }
            }
        }
    }
}

/// What the gradients of losses are multiplied by, with `dloss` and the number of rows that count.
pub(in crate::ops) fn factor(options: &Options, dloss: f32, count: f32) -> f32 {
    if options.reduction == Reduction::Mean { dloss / count } else { dloss }
}

pub(super) fn run_backward(launch: &Launch<'_, backward::Problem>) -> Result<()> {
    let p = launch.problem;
    let args = launch.args;
    scratch::with(Need::of::<usize>(p.num_rows), |mut region| {
        let targets = region.slice(p.num_rows);
        Targets {
            op: args.spec().name,
            address: args.address(backward::TARGETS),
            dtype: p.target_dtype,
            rows: &p.rows,
            tensor: 1,
            vocab: p.vocab,
            ignore_index: p.options.ignore_index,
        }
        .read(targets)?;
        let targets = &*targets;
        // What is read is in cache, and then written.
        let in_place = args.address(backward::LOGITS) == args.address(DLOGITS);
        let stream = !in_place && should_stream(p.num_rows * p.vocab * p.dtype.size());
        let need = DenseRows::<f32>::need(p.dtype, p.vocab, &p.steps);
        parallel_for_with_scratch(p.num_rows, GRAIN.div_ceil(p.vocab), need, |rows, region| {
            with_float!(p.dtype, T => {
                dispatch(launch.tier, Backward::<T> { launch, targets, rows, stream, region, t: PhantomData })
            });
        });
        Ok(())
    })
}

/// Some rows of the gradient.
struct Backward<'a, T> {
    launch: &'a Launch<'a, backward::Problem>,
    targets: &'a [usize],
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
            let [logits, _, lse, dlogits] = p.rows.offsets(row);
            let by_row = match p.options.reduction {
                Reduction::None => p.dloss.offsets(row)[0],
                _ => 0,
            };
            // SAFETY: `check` bound all shapes to these sizes and strides; a target is a column; threads get disjoint rows.
            unsafe {
                let to = (args.address(DLOGITS) as *mut T).wrapping_add(dlogits);
                let out = scratch.target(1, to, p.steps[1]);
                if self.targets[row] == IGNORED {
                    std::ptr::write_bytes(out, 0, p.vocab);
                } else {
                    let x = (args.address(backward::LOGITS) as *const T).wrapping_add(logits);
                    let x = scratch.gather(0, x, p.steps[0]);
                    let dloss = *(args.address(DLOSS) as *const f32).wrapping_add(by_row);
                    let count = *(args.address(BACK_COUNT) as *const f32);
                    let slope = Slope {
                        lse: *(args.address(BACK_LSE) as *const f32).wrapping_add(lse),
                        factor: factor(&p.options, dloss, count),
                        stream: self.stream && p.steps[1] == 1,
                    };
                    rows::gradient(s, &p.options, (x, out, p.vocab), self.targets[row], slope);
                }
                scratch.scatter(1, to, p.steps[1]);
            }
        }
        if self.stream {
            s.fence();
        }
    }
}
