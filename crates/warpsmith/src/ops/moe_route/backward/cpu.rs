//! `moe_route_backward` on the CPU, one source for all tiers. Tokens are divided among threads.

use super::super::cpu::GUARD;
use super::{DLOGITS, DWEIGHTS, IDS, LOGITS, Problem, RouteScore, WEIGHTS};
use crate::cpu::rows::{DenseRows, for_vectors, store_at, sum_vectors, with_float};
use crate::cpu::scratch::Need;
use crate::cpu::simd::MAX_LANES;
use crate::cpu::{CpuElement, Region, Simd, Task, dispatch, math, parallel_for_with_scratch};
use crate::error::{Error, Result};
use crate::op::Launch;
use crate::ops::sample::cpu::widen;
use std::marker::PhantomData;
use std::ops::Range;

/// The fewest logits a thread works on: less does not pay for waking a thread.
const GRAIN: usize = 1 << 12;

pub(super) fn run(launch: &Launch<'_, Problem>) -> Result<()> {
    let p = launch.problem;
    check_ids(launch)?;
    let padded = |count: usize| count.next_multiple_of(MAX_LANES);
    let rows = Need::of::<f32>(padded(p.experts)).and::<f32>(padded(p.experts));
    let slots = Need::of::<f32>(padded(p.top_k)).and::<f32>(padded(p.top_k)).and::<u32>(p.top_k);
    let need = rows.plus(slots).plus(DenseRows::<f32>::need(p.dtype, p.experts, &[p.out_step]));
    parallel_for_with_scratch(p.num_tokens, GRAIN.div_ceil(p.experts), need, |tokens, mut region| {
        let room = Room {
            logits: region.slice(padded(p.experts)),
            out: region.slice(padded(p.experts)),
            chosen: region.slice(padded(p.top_k)),
            gradients: region.slice(padded(p.top_k)),
            ids: region.slice(p.top_k),
        };
        with_float!(p.dtype, T => {
            dispatch(launch.tier, Tokens::<T> { launch, tokens, room, region, t: PhantomData })
        });
    });
    Ok(())
}

/// Where a slot's element of an argument is.
fn of_slot<T>(launch: &Launch<'_, Problem>, arg: usize, offsets: &[usize; 4], slot: usize) -> *const T {
    let row = (launch.args.address(arg) as *const T).wrapping_add(offsets[arg]);
    row.wrapping_offset(slot as isize * launch.problem.steps[arg])
}

fn check_ids(launch: &Launch<'_, Problem>) -> Result<()> {
    let p = launch.problem;
    for token in 0..p.num_tokens {
        let offsets = p.rows.offsets(token);
        for slot in 0..p.top_k {
            // SAFETY: `check` bound the ids to the tokens and `top_k`.
            let id = unsafe { *of_slot::<i32>(launch, IDS, &offsets, slot) };
            if !usize::try_from(id).is_ok_and(|id| id < p.experts) {
                let expected = format!("from 0 to below experts={}", p.experts);
                let got = format!("{id} in slot {slot} of token {token}");
                return Err(Error::argument(launch.args.spec().name, "ids", expected, got));
            }
        }
    }
    Ok(())
}

/// Scratch for a token: whole vectors of logits and of their gradients, of the logits of its slots and of what arrives there.
struct Room<'a> {
    logits: &'a mut [f32],
    out: &'a mut [f32],
    chosen: &'a mut [f32],
    gradients: &'a mut [f32],
    ids: &'a mut [u32],
}

/// Some tokens.
struct Tokens<'a, T> {
    launch: &'a Launch<'a, Problem>,
    tokens: Range<usize>,
    room: Room<'a>,
    region: Region<'a>,
    t: PhantomData<T>,
}

impl<T: CpuElement> Task for Tokens<'_, T> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let (launch, p) = (self.launch, self.launch.problem);
        let mut rows = DenseRows::<T>::new(&mut self.region, p.experts, &[p.out_step]);
        let room = &mut self.room;
        for token in self.tokens {
            let offsets = p.rows.offsets(token);
            // SAFETY: `check` bound all shapes to these sizes and strides; ids are experts.
            unsafe {
                let x = (launch.args.address(LOGITS) as *const T).wrapping_add(offsets[LOGITS]);
                let most = widen(s, x, p.steps[LOGITS], p.experts, room.logits);
                room.chosen[p.top_k..].fill(f32::NEG_INFINITY);
                for slot in 0..p.top_k {
                    let id = *of_slot::<i32>(launch, IDS, &offsets, slot) as u32;
                    let weight = *of_slot::<f32>(launch, WEIGHTS, &offsets, slot);
                    let arrives = *of_slot::<f32>(launch, DWEIGHTS, &offsets, slot);
                    room.ids[slot] = id;
                    room.chosen[slot] = room.logits[id as usize];
                    room.gradients[slot] = if weight == 0.0 { 0.0 } else { arrives };
                }
                room.out.fill(0.0);
                gradient(s, p, most, room);
                let [offset] = p.out.offsets(token);
                let to = (launch.args.address(DLOGITS) as *mut T).wrapping_add(offset);
                let out = rows.target(0, to, p.out_step);
                for_vectors::<S>(
                    p.experts,
                    #[inline(always)]
                    |i, count| store_at(s, out, i, count, s.load(room.out.as_ptr().add(i))),
                );
                rows.scatter(0, to, p.out_step);
            }
        }
    }
}

/// Adds the gradient of a token's logits to `out`. `most` is the largest logit.
#[inline(always)]
fn gradient<S: Simd>(s: S, p: &Problem, most: f32, room: &mut Room<'_>) {
    let top_k = p.top_k;
    let largest = room.chosen.iter().fold(f32::NEG_INFINITY, |largest, &x| largest.max(x));
    let of_all = p.score == RouteScore::Softmax && !p.normalize;
    let top = if of_all { most } else { largest };
    if top == f32::NEG_INFINITY {
        return;
    }
    let pivot = s.splat(top);
    // From logits to scores; with sigmoids, what arrives is multiplied by the rest of their slope afterwards.
    for i in (0..room.chosen.len()).step_by(S::N) {
        // SAFETY: whole vectors.
        unsafe {
            let at = room.chosen.as_mut_ptr().add(i);
            let x = s.load(at);
            let score = match p.score {
                RouteScore::Softmax => math::exp(s, s.sub(x, pivot)),
                RouteScore::Sigmoid => math::sigmoid(s, x),
            };
            s.store(at, score);
        }
    }
    let shares = &mut room.chosen[..top_k];
    let gradients = &room.gradients[..top_k];
    let mut divisor = match p.score {
        RouteScore::Softmax if p.normalize => shares.iter().sum(),
        RouteScore::Sigmoid if p.normalize => shares.iter().sum::<f32>() + GUARD,
        _ => 1.0,
    };
    if of_all {
        let logits = &mut *room.logits;
        // The exponentials of all, in the place of the logits.
        [divisor] = sum_vectors(
            s,
            logits.len(),
            #[inline(always)]
            |i, _, sums| {
                // SAFETY: whole vectors.
                unsafe {
                    let at = logits.as_mut_ptr().add(i);
                    let e = math::exp(s, s.sub(s.load(at), pivot));
                    s.store(at, e);
                    sums[0] = s.add(sums[0], e);
                }
            },
        );
    }
    shares.iter_mut().for_each(|share| *share /= divisor);
    let dot: f32 = shares.iter().zip(gradients).map(|(share, gradient)| share * gradient).sum();
    let scale = p.scale();
    if of_all {
        for (&id, &arrives) in room.ids.iter().zip(gradients) {
            room.out[id as usize] += arrives;
        }
        for (out, &e) in room.out[..p.experts].iter_mut().zip(&*room.logits) {
            *out = scale * (e / divisor * (*out - dot));
        }
        return;
    }
    let dot = if p.normalize { dot } else { 0.0 };
    for (slot, &id) in room.ids.iter().enumerate() {
        let mut value = shares[slot] * (gradients[slot] - dot);
        if p.score == RouteScore::Sigmoid {
            value *= below_one(room.logits[id as usize]);
        }
        room.out[id as usize] += scale * value;
    }
}

/// `1 - sigmoid(x)`.
fn below_one(x: f32) -> f32 {
    let e = (-x.abs()).exp();
    (if x > 0.0 { e } else { 1.0 }) / (1.0 + e)
}
