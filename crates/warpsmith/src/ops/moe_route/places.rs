//! Where slots are among those of their experts, on the CPU: tokens are in chunks, each of which counts its experts; the sums
//! of the counts before a chunk say where its slots go. GPUs do the same with blocks (`moe_route.cuh`).

use super::{COUNTS, DROPPED, IDS, ORDER, POSITIONS, Problem, WEIGHTS};
use crate::op::Launch;
use std::ops::Range;

/// The most chunks, whatever the number of tokens.
const MOST_CHUNKS: usize = 64;
/// The fewest tokens of a chunk: less does not pay for its counts.
const LEAST_TOKENS: usize = 64;

/// How tokens are divided.
#[derive(Clone, Copy)]
pub(in crate::ops) struct Chunks {
    tokens: usize,
    each: usize,
}

impl Chunks {
    pub fn of(tokens: usize) -> Chunks {
        Chunks { tokens, each: tokens.div_ceil(MOST_CHUNKS).max(LEAST_TOKENS) }
    }

    pub fn count(&self) -> usize {
        self.tokens.div_ceil(self.each)
    }

    pub fn tokens(&self, chunk: usize) -> Range<usize> {
        chunk * self.each..self.tokens.min((chunk + 1) * self.each)
    }
}

/// A token's part of the arguments.
#[derive(Clone, Copy)]
pub(super) struct Token<'a> {
    pub launch: &'a Launch<'a, Problem>,
    /// Offsets of logits, weights, ids and positions.
    pub offsets: [usize; 4],
}

impl<'a> Token<'a> {
    pub fn new(launch: &'a Launch<'a, Problem>, token: usize) -> Self {
        Token { launch, offsets: launch.problem.rows.offsets(token) }
    }

    /// The element of an argument that is number `row` of those with rows.
    fn at<T>(&self, arg: usize, row: usize, slot: usize) -> *mut T {
        let row_start = (self.launch.args.address(arg) as *mut T).wrapping_add(self.offsets[row]);
        row_start.wrapping_offset(slot as isize * self.launch.problem.steps[row])
    }

    pub fn weight(&self, slot: usize) -> *mut f32 {
        self.at(WEIGHTS, 1, slot)
    }

    pub fn id(&self, slot: usize) -> *mut i32 {
        self.at(IDS, 2, slot)
    }

    fn position(&self, slot: usize) -> *mut i32 {
        self.at(POSITIONS, 3, slot)
    }
}

/// Element `expert` of an argument with one for each.
fn of_expert<T>(launch: &Launch<'_, Problem>, arg: usize, step: usize, expert: usize) -> *mut T {
    let by = launch.problem.by_expert[step] * expert as isize;
    (launch.args.address(arg) as *mut T).wrapping_offset(by)
}

/// Where slot number `slot` of the call is in the order.
fn in_order(launch: &Launch<'_, Problem>, place: usize) -> *mut i32 {
    let p = launch.problem;
    let [row] = p.order.offsets(place / p.options.top_k);
    let row = (launch.args.address(ORDER) as *mut i32).wrapping_add(row);
    row.wrapping_offset((place % p.options.top_k) as isize * p.order_step)
}

/// From the counts of each chunk to how many come before it, expert by expert; writes what is known of experts. `starts` gets
/// where each expert begins in the order.
pub(super) fn scan(launch: &Launch<'_, Problem>, counts: &mut [u32], starts: &mut [u32]) {
    let p = launch.problem;
    let most = if p.options.capacity == 0 { u32::MAX } else { p.options.capacity as u32 };
    let mut end = 0;
    for (expert, start) in starts.iter_mut().enumerate() {
        let mut total = 0;
        for count in counts.iter_mut().skip(expert).step_by(p.experts) {
            total += std::mem::replace(count, total);
        }
        let kept = total.min(most);
        // SAFETY: `check` bound both to the experts.
        unsafe {
            if p.gives(COUNTS) {
                *of_expert(launch, COUNTS, 1, expert) = kept as i32;
            }
            if p.gives(DROPPED) {
                *of_expert(launch, DROPPED, 2, expert) = (total - kept) as i32;
            }
        }
        *start = end;
        end += kept;
    }
    if p.gives(ORDER) {
        for place in end as usize..p.num_slots() {
            // SAFETY: `check` bound the order to the slots.
            unsafe { *in_order(launch, place) = -1 };
        }
    }
}

/// Puts the slots of some tokens in their places. `before` has how many slots of each expert come before them.
pub(super) fn put(launch: &Launch<'_, Problem>, tokens: Range<usize>, before: &mut [u32], starts: &[u32]) {
    let p = launch.problem;
    let (top_k, capacity) = (p.options.top_k, p.options.capacity as u32);
    for number in tokens {
        let token = Token::new(launch, number);
        for slot in 0..top_k {
            // SAFETY: `check` bound the arguments to the tokens and `top_k`; ids are experts, and each place below the number of
            // slots is that of one slot.
            unsafe {
                let expert = *token.id(slot) as usize;
                let rank = before[expert];
                before[expert] += 1;
                let kept = capacity == 0 || rank < capacity;
                let place = starts[expert] + rank;
                if p.gives(POSITIONS) {
                    *token.position(slot) = if kept { place as i32 } else { -1 };
                }
                if kept && p.gives(ORDER) {
                    *in_order(launch, place as usize) = (number * top_k + slot) as i32;
                }
                if !kept {
                    *token.weight(slot) = 0.0;
                }
            }
        }
    }
}
