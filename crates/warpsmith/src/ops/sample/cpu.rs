//! `sample` on the CPU, one source for all tiers. Rows are divided among threads.

use super::arithmetic::{COLD, LEAST, Noise, ordered, target, weights, whole};
use super::{LOGITS, LOGPROB, MIN_P, POSITION, Problem, RAW, SEED, TEMPERATURE, TOKEN, TOP_K, TOP_P};
use crate::cpu::rows::{load_at, sum_vectors, with_float};
use crate::cpu::scratch::Need;
use crate::cpu::simd::MAX_LANES;
use crate::cpu::{CpuElement, Simd, Task, dispatch, math, parallel_for_with_scratch};
use crate::error::Result;
use crate::op::Launch;

pub(super) fn run(launch: &Launch<'_, Problem>) -> Result<()> {
    let p = launch.problem;
    let padded = p.vocab.next_multiple_of(MAX_LANES);
    let need = Need::of::<f32>(padded).and::<u32>(padded).and::<f32>(padded).and::<u32>(padded);
    parallel_for_with_scratch(p.num_rows, 1, need, |rows, mut region| {
        let room = &mut Room {
            logits: region.slice(padded),
            ids: region.slice(padded),
            shares: region.slice(padded),
            keys: region.slice(padded),
        };
        for row in rows {
            dispatch(launch.tier, Row { launch, row, room });
        }
    });
    Ok(())
}

/// Scratch for a row: a number of each kind for every token, and some more to make whole vectors.
struct Room<'a> {
    logits: &'a mut [f32],
    ids: &'a mut [u32],
    shares: &'a mut [f32],
    keys: &'a mut [u32],
}

/// One row.
struct Row<'a, 'b> {
    launch: &'a Launch<'a, Problem>,
    row: usize,
    room: &'a mut Room<'b>,
}

/// A row's part of the arguments.
struct RowOf<'a> {
    launch: &'a Launch<'a, Problem>,
    row: usize,
}

impl RowOf<'_> {
    /// The row's value of an argument, if that is given.
    fn value<T: Copy>(&self, arg: usize) -> Option<T> {
        let step = self.launch.problem.step(arg)?;
        let at = (self.launch.args.address(arg) as *const T).wrapping_offset(self.row as isize * step);
        // SAFETY: `check` bound the argument to the rows, and its description to this type.
        Some(unsafe { *at })
    }

    /// Writes the row's value of an output, if that is given.
    fn put<T>(&self, arg: usize, value: T) {
        if let Some(step) = self.launch.problem.step(arg) {
            let at = (self.launch.args.address(arg) as *mut T).wrapping_offset(self.row as isize * step);
            // SAFETY: as above; each row is written by one thread.
            unsafe { *at = value };
        }
    }

    /// Widens a row of logits; returns the largest.
    #[inline(always)]
    fn widen<S: Simd>(&self, s: S, arg: usize, strides: [isize; 2], to: &mut [f32]) -> f32 {
        let p = self.launch.problem;
        with_float!(p.dtype, T => {
            let x = self.launch.args.address(arg) as *const T;
            // SAFETY: `check` bound the row to its tensor.
            unsafe { widen(s, x.wrapping_offset(self.row as isize * strides[0]), strides[1], p.vocab, to) }
        })
    }
}

impl Task for Row<'_, '_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Row { launch, row, room } = self;
        let p = launch.problem;
        let call = RowOf { launch, row };
        let Room { logits, ids, shares, keys } = room;
        let most = call.widen(s, LOGITS, p.logits, logits);
        if most == f32::NEG_INFINITY {
            call.put(TOKEN, -1i32);
            return call.put(LOGPROB, f32::NAN);
        }
        let temperature = call.value::<f32>(TEMPERATURE).unwrap_or(1.0);
        let token = match temperature >= COLD {
            false => first_of(s, logits, most),
            true => {
                let mut left = Remaining { logits, ids, shares, keys, count: 0 };
                left.collect(s, most, 1.0 / temperature);
                left.cut(call.value(MIN_P), call.value(TOP_K), call.value(TOP_P));
                let noise = Noise::new(call.value(SEED).unwrap_or(0), call.value(POSITION).unwrap_or(0));
                left.draw(noise)
            }
        };
        call.put(TOKEN, token as i32);
        if p.step(LOGPROB).is_some() {
            // There is room for all tokens.
            let most = match p.raw {
                Some(strides) => call.widen(s, RAW, strides, logits),
                None => most,
            };
            call.put(LOGPROB, logprob(s, logits, most, token));
        }
    }
}

/// Writes a row in f32, NaN as minus infinity, and minus infinity up to the end of `to`; returns the largest.
///
/// # Safety
/// The elements must exist.
#[inline(always)]
pub(in crate::ops) unsafe fn widen<S: Simd, T: CpuElement>(
    s: S,
    x: *const T,
    step: isize,
    count: usize,
    to: &mut [f32],
) -> f32 {
    let (low, high) = (s.splat(f32::NEG_INFINITY), s.splat(f32::MAX));
    to[count..].fill(f32::NEG_INFINITY);
    let dense = step == 1;
    if !dense {
        for (i, to) in to[..count].iter_mut().enumerate() {
            // SAFETY: passed on.
            *to = unsafe { *x.wrapping_offset(i as isize * step) }.to_f32();
        }
    }
    let mut most = low;
    for i in (0..to.len()).step_by(S::N) {
        // SAFETY: passed on; `to` is whole vectors.
        unsafe {
            let at = to.as_mut_ptr().add(i);
            let v = match dense && i + S::N <= count {
                true => T::load(s, x.add(i)),
                false if dense && i < count => {
                    s.store_partial(at, load_at(s, x, i, count - i), count - i);
                    s.load(at)
                }
                false => s.load(at),
            };
            // The sum makes zeros of either sign the same.
            let v = s.add(s.min(s.select(s.is_nan(v), low, v), high), s.zero());
            most = s.max(v, most);
            s.store(at, v);
        }
    }
    s.reduce_max(most)
}

/// The first index of a value.
#[inline(always)]
fn first_of<S: Simd>(s: S, x: &[f32], value: f32) -> u32 {
    let wanted = s.splat(value);
    for i in (0..x.len()).step_by(S::N) {
        // SAFETY: whole vectors.
        if s.any(s.eq(unsafe { s.load(x.as_ptr().add(i)) }, wanted)) {
            return (i + x[i..].iter().position(|&v| v == value).unwrap_or(0)) as u32;
        }
    }
    0
}

/// The logarithm of a token's probability.
#[inline(always)]
fn logprob<S: Simd>(s: S, logits: &[f32], most: f32, token: u32) -> f32 {
    let wide = s.pair();
    let top = wide.splat(most);
    let [sum] = sum_vectors(
        wide,
        logits.len(),
        #[inline(always)]
        |i, _, sums| {
            // SAFETY: whole vectors.
            let v = unsafe { wide.load(logits.as_ptr().add(i)) };
            sums[0] = wide.add(sums[0], math::exp(wide, wide.sub(v, top)));
        },
    );
    (f64::from(logits[token as usize]) - f64::from(most) - f64::from(sum).ln()) as f32
}

/// The tokens that can be drawn, in their order.
struct Remaining<'a> {
    logits: &'a [f32],
    /// The tokens and their weights, `count` of each.
    ids: &'a mut [u32],
    shares: &'a mut [f32],
    /// Room for as many numbers.
    keys: &'a mut [u32],
    count: usize,
}

impl Remaining<'_> {
    #[inline(always)]
    fn collect<S: Simd>(&mut self, s: S, most: f32, inverse: f32) {
        let (top, inverse) = (s.splat(most), s.splat(inverse));
        // A little below the logarithm of the least weight.
        let least = s.splat(-28.0);
        for i in (0..self.logits.len()).step_by(S::N) {
            // SAFETY: whole vectors.
            let t = s.mul(s.sub(unsafe { s.load(self.logits.as_ptr().add(i)) }, top), inverse);
            if !s.any(s.lt(least, t)) {
                continue;
            }
            let mut lanes = [0f32; MAX_LANES];
            // SAFETY: no vector has more lanes.
            unsafe { s.store(lanes.as_mut_ptr(), weights(s, t)) };
            for (lane, &share) in lanes[..S::N].iter().enumerate() {
                // Written in any case: there is a place for each token.
                (self.ids[self.count], self.shares[self.count]) = ((i + lane) as u32, share);
                self.count += (share >= LEAST) as usize;
            }
        }
    }

    fn key(&self, index: usize) -> u32 {
        ordered(self.logits[self.ids[index] as usize])
    }

    /// Keeps those for which `stays` holds.
    fn retain(&mut self, stays: impl Fn(&Self, usize) -> bool) {
        let mut kept = 0;
        for index in 0..self.count {
            if stays(self, index) {
                (self.ids[kept], self.shares[kept]) = (self.ids[index], self.shares[index]);
                kept += 1;
            }
        }
        self.count = kept;
    }

    fn cut(&mut self, min_p: Option<f32>, top_k: Option<i32>, top_p: Option<f32>) {
        if let Some(least) = min_p.filter(|&min_p| min_p > 0.0) {
            self.retain(|all, index| all.shares[index] >= least.min(1.0));
        }
        let top_k = top_k.map_or(0, |k| usize::try_from(k).unwrap_or(0));
        if (1..self.count).contains(&top_k) {
            for index in 0..self.count {
                self.keys[index] = self.key(index);
            }
            let keys = &mut self.keys[..self.count];
            let (_, &mut least, _) = keys.select_nth_unstable_by(top_k - 1, |a, b| b.cmp(a));
            self.retain(|all, index| all.key(index) >= least);
        }
        if let Some(top_p) = top_p.filter(|&top_p| top_p < 1.0) {
            let least = self.least_of(top_p);
            self.retain(|all, index| all.key(index) >= least);
        }
    }

    /// The largest key from which on the weights are `top_p` of all, found eight bits at a time.
    fn least_of(&self, top_p: f32) -> u32 {
        let total = self.shares[..self.count].iter().map(|&share| whole(share)).sum();
        let mut missing = target(top_p, total);
        let (mut found, mut known) = (0u32, 0u32);
        for shift in [24, 16, 8, 0] {
            let mut sums = [0u64; 256];
            for index in 0..self.count {
                let key = self.key(index);
                if key & known == found {
                    sums[(key >> shift & 255) as usize] += whole(self.shares[index]);
                }
            }
            let mut digit = 255;
            while digit > 0 && sums[digit] < missing {
                missing -= sums[digit];
                digit -= 1;
            }
            found |= (digit as u32) << shift;
            known |= 255 << shift;
        }
        found
    }

    #[inline(always)]
    fn draw(&self, noise: Noise) -> u32 {
        let mut best = (0f32, self.ids[0]);
        for (&id, &share) in self.ids[..self.count].iter().zip(self.shares.iter()) {
            let score = share / noise.of(id);
            if score > best.0 {
                best = (score, id);
            }
        }
        best.1
    }
}
