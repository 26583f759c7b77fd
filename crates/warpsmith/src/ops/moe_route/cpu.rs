//! `moe_route` on the CPU, one source for all tiers. Tokens are divided among threads.

use super::arithmetic::{clean, key, number, sigmoid, softmax, with_noise};
use super::options::{GroupScore, RouteScore};
use super::places::{self, Chunks, Token};
use super::{BIAS, LOGITS, Problem};
use crate::cpu::rows::{sum_vectors, with_float};
use crate::cpu::scratch::{self, Need};
use crate::cpu::simd::MAX_LANES;
use crate::cpu::{Region, Simd, Task, dispatch, math, parallel_for, parallel_for_with_scratch};
use crate::error::Result;
use crate::op::Launch;
use crate::ops::sample::arithmetic::Noise;
use crate::ops::sample::cpu::widen;
use std::ops::Range;

/// The fewest logits a thread works on: less does not pay for waking a thread.
const GRAIN: usize = 1 << 12;
/// Up to so many experts of a token are found by insertion.
const FEW: usize = 32;
/// Added to a sum of sigmoids.
pub(super) const GUARD: f32 = 1e-20;

pub(super) fn run(launch: &Launch<'_, Problem>) -> Result<()> {
    let p = launch.problem;
    let need = Room::need(p);
    let route = |tokens: Range<usize>, room: &mut Room<'_>, counts: &mut [u32]| {
        dispatch(launch.tier, Tokens { launch, tokens, room, counts });
    };
    if !p.has_places() {
        let grain = GRAIN.div_ceil(p.experts);
        parallel_for_with_scratch(p.num_tokens, grain, need, |tokens, mut region| {
            route(tokens, &mut Room::new(p, &mut region), &mut []);
        });
        return Ok(());
    }
    let chunks = Chunks::of(p.num_tokens);
    let all = chunks.count() * p.experts;
    scratch::with(Need::of::<u32>(all).and::<u32>(p.experts), |mut region| {
        let (counts, starts) = (region.slice::<u32>(all), region.slice::<u32>(p.experts));
        counts.fill(0);
        let of_chunk = Counts { counts: counts.as_mut_ptr(), experts: p.experts };
        parallel_for_with_scratch(chunks.count(), 1, need, |range, mut region| {
            let mut room = Room::new(p, &mut region);
            // SAFETY: each chunk is in one part.
            range.for_each(|chunk| route(chunks.tokens(chunk), &mut room, unsafe { of_chunk.chunk(chunk) }));
        });
        places::scan(launch, counts, starts);
        let (starts, of_chunk) = (&*starts, Counts { counts: counts.as_mut_ptr(), experts: p.experts });
        parallel_for(chunks.count(), 1, |range| {
            // SAFETY: as above.
            range.for_each(|chunk| unsafe {
                places::put(launch, chunks.tokens(chunk), of_chunk.chunk(chunk), starts);
            });
        });
    });
    Ok(())
}

/// The counts of all chunks.
struct Counts {
    counts: *mut u32,
    experts: usize,
}

// SAFETY: each chunk's are used by one thread.
unsafe impl Sync for Counts {}

impl Counts {
    /// # Safety
    /// The chunk must exist, and nobody else use its counts.
    #[allow(clippy::mut_from_ref, reason = "the caller promises that no two are of the same chunk")]
    unsafe fn chunk(&self, chunk: usize) -> &mut [u32] {
        // SAFETY: passed on.
        unsafe { std::slice::from_raw_parts_mut(self.counts.add(chunk * self.experts), self.experts) }
    }
}

/// Scratch for a token.
struct Room<'a> {
    /// Whole vectors of logits, and of scores.
    logits: &'a mut [f32],
    scores: &'a mut [f32],
    keys: &'a mut [u32],
    groups: &'a mut [u32],
    picks: &'a mut [u64],
    /// Whole vectors of what the chosen experts have.
    chosen: &'a mut [f32],
}

impl<'a> Room<'a> {
    fn sizes(p: &Problem) -> [usize; 5] {
        let padded = p.experts.next_multiple_of(MAX_LANES);
        let picks = if p.options.top_k > FEW { p.experts } else { p.options.top_k + 1 };
        [padded, p.experts, p.options.groups, picks, p.options.top_k.next_multiple_of(MAX_LANES)]
    }

    fn need(p: &Problem) -> Need {
        let [padded, experts, groups, picks, chosen] = Self::sizes(p);
        let rows = Need::of::<f32>(padded).and::<f32>(padded).and::<f32>(chosen);
        rows.and::<u32>(experts).and::<u32>(groups).and::<u64>(picks)
    }

    fn new(p: &Problem, region: &mut Region<'a>) -> Self {
        let [padded, experts, groups, picks, chosen] = Self::sizes(p);
        Room {
            logits: region.slice(padded),
            scores: region.slice(padded),
            keys: region.slice(experts),
            groups: region.slice(groups),
            picks: region.slice(picks),
            chosen: region.slice(chosen),
        }
    }
}

/// Some tokens.
struct Tokens<'a, 'b> {
    launch: &'a Launch<'a, Problem>,
    tokens: Range<usize>,
    room: &'a mut Room<'b>,
    /// Of each expert; empty where they are not wanted.
    counts: &'a mut [u32],
}

impl Task for Tokens<'_, '_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Tokens { launch, tokens, room, counts } = self;
        let p = launch.problem;
        for number in tokens {
            let token = Token::new(launch, number);
            let most = with_float!(p.dtype, T => {
                let x = (launch.args.address(LOGITS) as *const T).wrapping_add(token.offsets[0]);
                // SAFETY: `check` bound the row to its tensor.
                unsafe { widen(s, x, p.steps[0], p.experts, room.logits) }
            });
            make_keys(s, launch, number, most, room);
            let picks = choose(p, room);
            for slot in 0..p.options.top_k {
                let expert = !(room.picks[slot] as u32) as usize;
                room.chosen[slot] = room.logits[expert];
                // SAFETY: `check` bound the ids to the tokens and `top_k`.
                unsafe { *token.id(slot) = expert as i32 };
                if let Some(count) = counts.get_mut(expert) {
                    *count += 1;
                }
            }
            debug_assert_eq!(picks, p.options.top_k);
            weigh(s, p, most, room);
            for slot in 0..p.options.top_k {
                // SAFETY: as above.
                unsafe { *token.weight(slot) = room.chosen[slot] };
            }
        }
    }
}

/// What experts are compared by: zero for those that no group admits.
#[inline(always)]
fn make_keys<S: Simd>(s: S, launch: &Launch<'_, Problem>, token: usize, most: f32, room: &mut Room<'_>) {
    let p = launch.problem;
    let options = &p.options;
    let scores: &mut [f32] = &mut *room.scores;
    scores.copy_from_slice(room.logits);
    let mut most = most;
    if options.noise() > 0.0 {
        let noise = Noise::new(options.seed, token as i64);
        for (expert, score) in scores[..p.experts].iter_mut().enumerate() {
            *score = with_noise(*score, options.noise(), noise.bits(expert as u32));
        }
        most = scores.iter().fold(f32::NEG_INFINITY, |most, &x| most.max(x));
    }
    if p.compares_scores() {
        match options.score {
            RouteScore::Softmax => softmax(s, scores, most),
            RouteScore::Sigmoid => sigmoid(s, scores),
        }
        if p.gives(BIAS) {
            let bias = launch.args.address(BIAS) as *const f32;
            for (expert, score) in scores[..p.experts].iter_mut().enumerate() {
                // SAFETY: `check` bound the bias to the experts.
                let bias = unsafe { *bias.wrapping_offset(expert as isize * p.by_expert[0]) };
                *score = if *score == f32::NEG_INFINITY { *score } else { *score + bias };
            }
        }
    }
    for (key_of, &score) in room.keys.iter_mut().zip(&*scores) {
        *key_of = key(score);
    }
    if options.has_groups() {
        keep_best_groups(p, room.keys, room.groups);
    }
}

/// Zeroes the keys of all but the best groups.
fn keep_best_groups(p: &Problem, keys: &mut [u32], groups: &mut [u32]) {
    let size = p.experts / p.options.groups;
    for (group, keys) in groups.iter_mut().zip(keys.chunks_exact(size)) {
        let (mut first, mut second) = (0, 0);
        for &key in keys {
            second = second.max(key.min(first));
            first = first.max(key);
        }
        *group = match p.options.group_score {
            GroupScore::Sum if size > 1 => key(number(first) + number(second)),
            _ => first,
        };
    }
    for (at, keys) in keys.chunks_exact_mut(size).enumerate() {
        let better = groups
            .iter()
            .enumerate()
            .filter(|&(other, &score)| score > groups[at] || score == groups[at] && other < at);
        if better.count() >= p.options.top_groups {
            keys.fill(0);
        }
    }
}

/// The best experts, in order, as keys above the bits of their numbers, flipped. Returns how many.
#[inline(always)]
fn choose(p: &Problem, room: &mut Room<'_>) -> usize {
    let top_k = p.options.top_k;
    let pick = |(expert, &key): (usize, &u32)| u64::from(key) << 32 | u64::from(!(expert as u32));
    let candidates = room.keys.iter().enumerate().filter(|(_, key)| **key > 0);
    if top_k > FEW {
        let mut count = 0;
        for candidate in candidates.map(pick) {
            room.picks[count] = candidate;
            count += 1;
        }
        room.picks[..count].sort_unstable_by(|a, b| b.cmp(a));
        return count.min(top_k);
    }
    let mut count = 0;
    for (expert, key) in candidates {
        // Of equal ones, those found before are lower.
        if count == top_k && *key <= (room.picks[top_k - 1] >> 32) as u32 {
            continue;
        }
        let new = pick((expert, key));
        let mut at = count;
        while at > 0 && room.picks[at - 1] < new {
            room.picks[at] = room.picks[at - 1];
            at -= 1;
        }
        room.picks[at] = new;
        count = (count + 1).min(top_k);
    }
    count
}

/// From the logits of the chosen experts to their weights. `most` is the largest logit of all.
#[inline(always)]
fn weigh<S: Simd>(s: S, p: &Problem, most: f32, room: &mut Room<'_>) {
    let options = &p.options;
    let (chosen, top_k) = (&mut *room.chosen, options.top_k);
    chosen[top_k..].fill(f32::NEG_INFINITY);
    let largest = chosen.iter().fold(f32::NEG_INFINITY, |largest, &x| largest.max(x));
    if largest == f32::NEG_INFINITY {
        return chosen.fill(0.0);
    }
    let of_all = options.score == RouteScore::Softmax && !options.normalize;
    let top = s.splat(if of_all { most } else { largest });
    for chunk in chosen.chunks_exact_mut(S::N) {
        // SAFETY: whole vectors.
        unsafe {
            let x = s.load(chunk.as_ptr());
            let score = match options.score {
                RouteScore::Softmax => math::exp(s, s.sub(x, top)),
                RouteScore::Sigmoid => math::sigmoid(s, x),
            };
            s.store(chunk.as_mut_ptr(), score);
        }
    }
    let chosen = &mut chosen[..top_k];
    let divisor = match options.score {
        RouteScore::Softmax if of_all => {
            let logits = &*room.logits;
            let [sum] = sum_vectors(
                s,
                logits.len(),
                #[inline(always)]
                |i, _, sums| {
                    // SAFETY: whole vectors.
                    let x = unsafe { s.load(logits.as_ptr().add(i)) };
                    sums[0] = s.add(sums[0], math::exp(s, s.sub(x, top)));
                },
            );
            sum
        }
        RouteScore::Sigmoid if !options.normalize => 1.0,
        RouteScore::Softmax => chosen.iter().sum(),
        RouteScore::Sigmoid => chosen.iter().sum::<f32>() + GUARD,
    };
    let scale = options.scale();
    chosen.iter_mut().for_each(|weight| *weight = *weight / divisor * scale);
    debug_assert!(clean(divisor) > 0.0);
}
