//! `moe_losses` and its gradient on the CPU, one source for all tiers. Tokens are in chunks, each of which has sums of its own;
//! those are added in order.

use super::backward::{self, DLOGITS};
use super::{ENTROPY, IDS, IMPORTANCE, LOAD, LOAD_BALANCE, LOGITS, PROBABILITY, Problem, RouteScore, Z_LOSS};
use crate::cpu::rows::{DenseRows, for_vectors, load_at, replace_rest, store_at, sum_vectors, with_float};
use crate::cpu::scratch::{self, Need};
use crate::cpu::simd::MAX_LANES;
use crate::cpu::{CpuElement, Region, Simd, Task, dispatch, math, parallel_for_with_scratch};
use crate::error::{Error, Result};
use crate::op::Launch;
use crate::ops::moe_route::places::Chunks;
use std::marker::PhantomData;
use std::ops::Range;

/// The fewest logits a thread works on: less does not pay for waking a thread.
const GRAIN: usize = 1 << 12;
/// Sums of a chunk behind those of its experts: of squares of lse, and of entropies.
const OTHERS: usize = 2;

fn padded(experts: usize) -> usize {
    experts.next_multiple_of(MAX_LANES)
}

pub(super) fn run(launch: &Launch<'_, Problem>) -> Result<()> {
    let p = launch.problem;
    let (chunks, width) = (Chunks::of(p.num_tokens), padded(p.experts) + OTHERS);
    let need = Need::of::<f32>(chunks.count() * width).and::<u64>(p.experts);
    let need = need.and::<f32>(p.experts).and::<f32>(p.experts);
    scratch::with(need, |mut region| {
        let sums = region.slice::<f32>(chunks.count() * width);
        let counts = region.slice::<u64>(p.experts);
        count(launch, counts)?;
        let all = Sums { start: sums.as_mut_ptr(), width };
        let need = Row::need(p.experts).plus(DenseRows::<f32>::need(p.dtype, p.experts, &p.steps[..1]));
        parallel_for_with_scratch(chunks.count(), 1, need, |range, mut region| {
            let row = Row::new(p.experts, &mut region);
            with_float!(p.dtype, T => {
                let task = Forward::<T> { launch, chunks, range, sums: &all, row, region, t: PhantomData };
                dispatch(launch.tier, task)
            });
        });
        let [load, probability] = [region.slice::<f32>(p.experts), region.slice::<f32>(p.experts)];
        let tokens = (p.num_tokens as f64).max(1.0);
        let slots = ((p.num_tokens * p.top_k) as f64).max(1.0);
        let total = |at: usize| sums.chunks(width).fold(0f64, |sum, chunk| sum + f64::from(chunk[at]));
        for expert in 0..p.experts {
            load[expert] = (counts[expert] as f64 / slots) as f32;
            probability[expert] = (total(expert) / tokens) as f32;
        }
        let others = [width - 2, width - 1].map(|at| (total(at) / tokens) as f32);
        finish(launch, load, probability, others);
        Ok(())
    })
}

/// Counts the slots of each expert.
fn count(launch: &Launch<'_, Problem>, counts: &mut [u64]) -> Result<()> {
    let p = launch.problem;
    counts.fill(0);
    for token in 0..p.num_tokens {
        let [_, row, ..] = p.rows.offsets(token);
        for slot in 0..p.top_k {
            let at = (launch.args.address(IDS) as *const i32).wrapping_add(row);
            // SAFETY: `check` bound the ids to the tokens and `top_k`.
            let id = unsafe { *at.wrapping_offset(slot as isize * p.steps[1]) };
            match usize::try_from(id).ok().and_then(|id| counts.get_mut(id)) {
                Some(count) => *count += 1,
                None => {
                    let expected = format!("from 0 to below experts={}", p.experts);
                    let got = format!("{id} in slot {slot} of token {token}");
                    return Err(Error::argument(launch.args.spec().name, "ids", expected, got));
                }
            }
        }
    }
    Ok(())
}

/// From sums to results. `others` are the means of squares of lse, and of entropies.
fn finish(launch: &Launch<'_, Problem>, load: &[f32], probability: &[f32], others: [f32; 2]) {
    let p = launch.problem;
    let experts = p.experts as f64;
    let products: f64 = load.iter().zip(probability).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum();
    let Spread { mean, variation, .. } = Spread::of(probability);
    let importance = if mean == 0.0 { 0.0 } else { variation / experts / (mean * mean) };
    let put = |index: usize, at: isize, value: f32| {
        // SAFETY: `check` bound the results to one number, or to the experts.
        unsafe { *(launch.args.address(index) as *mut f32).wrapping_offset(at) = value };
    };
    put(LOAD_BALANCE, 0, (experts * products) as f32);
    put(Z_LOSS, 0, others[0]);
    put(IMPORTANCE, 0, importance as f32);
    for (index, step, values) in [(LOAD, p.by_expert[0], load), (PROBABILITY, p.by_expert[1], probability)] {
        let Some(step) = step else { continue };
        values.iter().enumerate().for_each(|(expert, &value)| put(index, expert as isize * step, value));
    }
    if p.has_entropy {
        put(ENTROPY, 0, others[1]);
    }
}

/// How far numbers are from each other.
struct Spread {
    mean: f64,
    sum: f64,
    /// The sum of the squares of differences to the mean.
    variation: f64,
}

impl Spread {
    fn of(values: &[f32]) -> Spread {
        let sum: f64 = values.iter().map(|&value| f64::from(value)).sum();
        let mean = sum / values.len() as f64;
        let square = |value: &f32| (f64::from(*value) - mean) * (f64::from(*value) - mean);
        Spread { mean, sum, variation: values.iter().map(square).sum() }
    }
}

/// The sums of all chunks.
struct Sums {
    start: *mut f32,
    width: usize,
}

// SAFETY: each chunk's are used by one thread.
unsafe impl Sync for Sums {}

impl Sums {
    /// # Safety
    /// The chunk must exist, and nobody else use its sums.
    #[allow(clippy::mut_from_ref, reason = "the caller promises that no two are of the same chunk")]
    unsafe fn of(&self, chunk: usize) -> &mut [f32] {
        // SAFETY: passed on.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(chunk * self.width), self.width) }
    }
}

/// Scratch for a token: whole vectors.
struct Row<'a> {
    /// Logits, and then what probabilities are the softmax of.
    x: &'a mut [f32],
    /// Exponentials.
    powers: &'a mut [f32],
}

/// What the softmax of a row is made of, beside its exponentials.
#[derive(Clone, Copy)]
struct Softmax {
    top: f32,
    powers: f32,
    /// The sum of exponentials, each times what its number is below the largest.
    below: f32,
}

impl Softmax {
    /// The logarithm of the sum of exponentials relative to the largest. Only a row that is all minus infinity has none.
    fn log(&self) -> f32 {
        if self.powers == 0.0 { f32::NAN } else { self.powers.ln() }
    }
}

impl<'a> Row<'a> {
    fn need(experts: usize) -> Need {
        Need::of::<f32>(padded(experts)).and::<f32>(padded(experts))
    }

    fn new(experts: usize, region: &mut Region<'a>) -> Self {
        Row { x: region.slice(padded(experts)), powers: region.slice(padded(experts)) }
    }

    /// Reads logits; minus infinity behind them.
    ///
    /// # Safety
    /// `x` must be readable for `n` elements, no more than there is room for.
    #[inline(always)]
    unsafe fn load<S: Simd, T: CpuElement>(&mut self, s: S, x: *const T, n: usize) {
        self.x[n..].fill(f32::NEG_INFINITY);
        for_vectors::<S>(
            n,
            #[inline(always)]
            // SAFETY: passed on; there is room for whole vectors.
            |i, count| unsafe {
                let v = replace_rest(s, load_at(s, x, i, count), count, f32::NEG_INFINITY);
                s.store(self.x.as_mut_ptr().add(i), v);
            },
        );
    }

    /// Writes the exponentials of `x` relative to its largest element.
    #[inline(always)]
    fn softmax<S: Simd>(&mut self, s: S) -> Softmax {
        // The lowest finite number at least: with minus infinity, differences to it would be NaN. NaN is passed over here and
        // shows in the sum.
        let mut top = s.splat(f32::MIN);
        let (x, powers) = (&*self.x, &mut *self.powers);
        for i in (0..x.len()).step_by(S::N) {
            // SAFETY: whole vectors.
            top = s.max(unsafe { s.load(x.as_ptr().add(i)) }, top);
        }
        let top = s.reduce_max(top);
        let pivot = s.splat(top);
        let [sum, below] = sum_vectors(
            s,
            x.len(),
            #[inline(always)]
            |i, _, sums| {
                // SAFETY: whole vectors.
                unsafe {
                    let less = s.sub(s.load(x.as_ptr().add(i)), pivot);
                    let e = math::exp(s, less);
                    s.store(powers.as_mut_ptr().add(i), e);
                    sums[0] = s.add(sums[0], e);
                    // Minus infinity has no part.
                    let part = s.select(s.eq(e, s.zero()), s.zero(), s.mul(e, less));
                    sums[1] = s.sub(sums[1], part);
                }
            },
        );
        Softmax { top, powers: sum, below }
    }

    /// Replaces logits by the logarithms of their sigmoids.
    #[inline(always)]
    fn log_sigmoids<S: Simd>(&mut self, s: S) {
        for chunk in self.x.chunks_exact_mut(S::N) {
            // SAFETY: whole vectors.
            unsafe {
                let x = s.load(chunk.as_ptr());
                s.store(chunk.as_mut_ptr(), s.neg(math::softplus(s, s.neg(x))));
            }
        }
    }
}

/// Some chunks.
struct Forward<'a, T> {
    launch: &'a Launch<'a, Problem>,
    chunks: Chunks,
    range: Range<usize>,
    sums: &'a Sums,
    row: Row<'a>,
    region: Region<'a>,
    t: PhantomData<T>,
}

impl<T: CpuElement> Task for Forward<'_, T> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let (p, row) = (self.launch.problem, &mut self.row);
        let mut rows = DenseRows::<T>::new(&mut self.region, p.experts, &p.steps[..1]);
        for chunk in self.range {
            // SAFETY: each chunk is in one part.
            let sums = unsafe { self.sums.of(chunk) };
            sums.fill(0.0);
            let (sums, others) = sums.split_at_mut(padded(p.experts));
            for token in self.chunks.tokens(chunk) {
                let [offset, ..] = p.rows.offsets(token);
                let x = (self.launch.args.address(LOGITS) as *const T).wrapping_add(offset);
                // SAFETY: `check` bound the row to its tensor.
                unsafe { row.load(s, rows.gather(0, x, p.steps[0]), p.experts) };
                let mut found = row.softmax(s);
                let lse = found.top + found.log();
                others[0] += lse * lse;
                if p.score == RouteScore::Sigmoid {
                    row.log_sigmoids(s);
                    found = row.softmax(s);
                }
                others[1] += found.log() + found.below / found.powers;
                let divisor = s.splat(found.powers);
                for i in (0..sums.len()).step_by(S::N) {
                    // SAFETY: whole vectors.
                    unsafe {
                        let share = s.div(s.load(row.powers.as_ptr().add(i)), divisor);
                        let at = sums.as_mut_ptr().add(i);
                        s.store(at, s.add(s.load(at), share));
                    }
                }
            }
        }
    }
}

pub(super) fn run_backward(launch: &Launch<'_, backward::Problem>) -> Result<()> {
    let p = launch.problem;
    scratch::with(Need::of::<f32>(padded(p.experts)).and::<f32>(2 * p.experts), |mut region| {
        let arrives = region.slice::<f32>(padded(p.experts));
        let (load, probability) = region.slice::<f32>(2 * p.experts).split_at_mut(p.experts);
        read(launch, backward::LOAD, p.by_expert[0], load);
        read(launch, backward::PROBABILITY, p.by_expert[1], probability);
        arriving(launch, load, probability, arrives);
        let arrives = &*arrives;
        let rows = DenseRows::<f32>::need(p.dtype, p.experts, &p.steps);
        let room = padded(p.experts);
        let need = Row::need(p.experts).and::<f32>(room).and::<f32>(room).plus(rows);
        parallel_for_with_scratch(p.num_tokens, GRAIN.div_ceil(p.experts), need, |tokens, mut region| {
            let row = Row::new(p.experts, &mut region);
            let (slopes, others) = (region.slice(room), region.slice(room));
            with_float!(p.dtype, T => {
                let t = PhantomData;
                let task = Backward::<T> { launch, tokens, arrives, row, slopes, others, region, t };
                dispatch(launch.tier, task)
            });
        });
    });
    Ok(())
}

fn read(launch: &Launch<'_, backward::Problem>, index: usize, step: isize, to: &mut [f32]) {
    let at = launch.args.address(index) as *const f32;
    for (expert, to) in to.iter_mut().enumerate() {
        // SAFETY: `check` bound the argument to the experts.
        *to = unsafe { *at.wrapping_offset(expert as isize * step) };
    }
}

/// A number that a gradient of a loss is.
fn number(launch: &Launch<'_, backward::Problem>, index: usize) -> f64 {
    // SAFETY: `check` bound the argument to one number.
    f64::from(unsafe { *(launch.args.address(index) as *const f32) })
}

/// What arrives at the probabilities of every token; zero behind the experts.
fn arriving(launch: &Launch<'_, backward::Problem>, load: &[f32], probability: &[f32], arrives: &mut [f32]) {
    let p = launch.problem;
    let (experts, tokens) = (p.experts as f64, p.num_tokens as f64);
    let dbalance = number(launch, backward::DLOAD_BALANCE);
    let dimportance = number(launch, backward::DIMPORTANCE);
    let Spread { mean, sum, variation } = Spread::of(probability);
    arrives.fill(0.0);
    for (expert, arrives) in arrives[..p.experts].iter_mut().enumerate() {
        let apart = f64::from(probability[expert]) - mean - variation / sum;
        let slope = 2.0 * experts / (sum * sum) * apart;
        *arrives = ((experts * f64::from(load[expert]) * dbalance + slope * dimportance) / tokens) as f32;
    }
}

/// Some tokens of the gradient.
struct Backward<'a, T> {
    launch: &'a Launch<'a, backward::Problem>,
    tokens: Range<usize>,
    /// Whole vectors.
    arrives: &'a [f32],
    row: Row<'a>,
    /// With sigmoids: slopes of their logarithms, and what the z-loss adds. Whole vectors.
    slopes: &'a mut [f32],
    others: &'a mut [f32],
    region: Region<'a>,
    t: PhantomData<T>,
}

impl<T: CpuElement> Task for Backward<'_, T> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let (launch, p, row) = (self.launch, self.launch.problem, &mut self.row);
        let mut rows = DenseRows::<T>::new(&mut self.region, p.experts, &p.steps);
        let is_sigmoid = p.score == RouteScore::Sigmoid;
        let dz = number(launch, backward::DZ_LOSS) / p.num_tokens as f64;
        let (arrives, slopes, others) = (self.arrives, &mut *self.slopes, &mut *self.others);
        for token in self.tokens {
            let [from, to, ..] = p.rows.offsets(token);
            let x = (launch.args.address(backward::LOGITS) as *const T).wrapping_add(from);
            // SAFETY: `check` bound the row to its tensor.
            unsafe { row.load(s, rows.gather(0, x, p.steps[0]), p.experts) };
            let mut found = row.softmax(s);
            let factor = s.splat((2.0 * f64::from(found.top + found.log()) * dz) as f32);
            if is_sigmoid {
                let divisor = s.splat(found.powers);
                for i in (0..slopes.len()).step_by(S::N) {
                    // SAFETY: whole vectors.
                    unsafe {
                        let slope = math::sigmoid(s, s.neg(s.load(row.x.as_ptr().add(i))));
                        s.store(slopes.as_mut_ptr().add(i), slope);
                        let plain = s.div(s.load(row.powers.as_ptr().add(i)), divisor);
                        s.store(others.as_mut_ptr().add(i), s.mul(factor, plain));
                    }
                }
                row.log_sigmoids(s);
                found = row.softmax(s);
            }
            let powers = &*row.powers;
            let [dot] = sum_vectors(
                s,
                powers.len(),
                #[inline(always)]
                |i, _, sums| {
                    // SAFETY: whole vectors.
                    unsafe {
                        let part = s.mul(s.load(powers.as_ptr().add(i)), s.load(arrives.as_ptr().add(i)));
                        sums[0] = s.add(sums[0], part);
                    }
                },
            );
            let (dot, divisor) = (s.splat(dot / found.powers), s.splat(found.powers));
            // SAFETY: as above; threads get disjoint rows, and scratch is whole vectors.
            unsafe {
                let to = (launch.args.address(DLOGITS) as *mut T).wrapping_add(to);
                let out = rows.target(1, to, p.steps[1]);
                for_vectors::<S>(
                    p.experts,
                    #[inline(always)]
                    |i, count| {
                        let share = s.div(s.load(powers.as_ptr().add(i)), divisor);
                        let apart = s.sub(s.load(arrives.as_ptr().add(i)), dot);
                        let d = if is_sigmoid {
                            let part = s.mul(s.mul(share, apart), s.load(slopes.as_ptr().add(i)));
                            s.add(part, s.load(others.as_ptr().add(i)))
                        } else {
                            s.fma(share, factor, s.mul(share, apart))
                        };
                        store_at(s, out, i, count, d);
                    },
                );
                rows.scatter(1, to, p.steps[1]);
            }
        }
    }
}
