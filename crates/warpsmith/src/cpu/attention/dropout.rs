//! Which weights of attention dropout keeps, as in `attention_dropout.cuh`.
//!
//! That is a function of the seed, the offset, the number of the request in the call, the head, and the query and the key
//! in the request: not of blocks, kernels or other requests. 64 random bits decide about four pairs, 16 bits each: queries
//! `i` and `i + 8` with keys `j` and `j + 8`, because fragments of matrices on GPUs have these in one thread, whichever of
//! the two are rows.

use crate::cpu::gemm::Blocks;
use crate::cpu::random::RandomStream;

const PANEL: usize = Blocks::PANEL;
/// Probabilities are multiples of its inverse.
const STEPS: u32 = 1 << 16;

/// Dropout of a call.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Dropout {
    stream: RandomStream,
    /// Weights whose 16 bits are below are dropped.
    below: u32,
}

/// Dropout of a head of a request.
#[derive(Clone, Copy)]
pub(crate) struct HeadDropout {
    stream: RandomStream,
    below: u32,
}

/// The number of a query or key among those that share a place in their sixteen, and bits from its own place on.
#[inline(always)]
fn cell(index: usize) -> (u64, u32) {
    ((index / 16 * 8 + index % 8) as u64, (index / 8 % 2) as u32)
}

impl Dropout {
    /// Nothing if nothing is dropped. `probability` is from 0 to below 1.
    pub fn new(probability: f64, seed: i64, offset: i64) -> Option<Dropout> {
        let below = ((probability * f64::from(STEPS)).round() as u32).min(STEPS - 1);
        (below > 0).then(|| Dropout { stream: RandomStream::new(seed, offset), below })
    }

    /// The factor of weights that are kept: their sum then has the same expectation.
    pub fn factor(&self) -> f32 {
        STEPS as f32 / (STEPS - self.below) as f32
    }

    #[inline(always)]
    pub fn of_head(&self, request: usize, head: usize) -> HeadDropout {
        let stream = RandomStream::at(self.stream.bits((request as u64) << 32 | head as u64));
        HeadDropout { stream, below: self.below }
    }

    /// What a GPU needs: the stream, and what it compares with.
    #[cfg(feature = "cuda")]
    pub fn parts(&self) -> (u64, u32) {
        (self.stream.start(), self.below)
    }
}

impl HeadDropout {
    /// Whether the weight of a query and a key counts.
    #[cfg(any(test, feature = "lab"))]
    pub fn keeps(&self, query: usize, key: usize) -> bool {
        let ((query, row), (key, column)) = (cell(query), cell(key));
        let bits = self.stream.bits(query << 32 | key);
        (bits >> (32 * row + 16 * column)) as u32 % STEPS >= self.below
    }

    /// Ones for the keys that count for a query, and zeros, from the key `first` on, a multiple of 16.
    #[inline(always)]
    pub fn of_keys(&self, query: usize, first: usize, kept: &mut [f32; PANEL]) {
        let (query, row) = cell(query);
        self.fill(query << 32, 1, first, [32 * row, 16], kept);
    }

    /// The same for the queries that a key counts for.
    #[inline(always)]
    pub fn of_queries(&self, key: usize, first: usize, kept: &mut [f32; PANEL]) {
        let (key, column) = cell(key);
        self.fill(key, 1 << 32, first, [16 * column, 32], kept);
    }

    #[inline(always)]
    fn fill(&self, own: u64, step: u64, first: usize, [shift, apart]: [u32; 2], kept: &mut [f32; PANEL]) {
        debug_assert!(first.is_multiple_of(16), "halves of cells");
        for (index, sixteen) in kept.chunks_exact_mut(16).enumerate() {
            let (low, high) = sixteen.split_at_mut(8);
            let cells = (first / 2 + 8 * index) as u64;
            for i in 0..8 {
                let bits = self.stream.bits(own.wrapping_add((cells + i as u64).wrapping_mul(step))) >> shift;
                let at = |shift: u32| f32::from(u8::from((bits >> shift) as u32 % STEPS >= self.below));
                (low[i], high[i]) = (at(0), at(apart));
            }
        }
    }
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;

    #[test]
    fn rows_and_columns_agree_with_single_pairs() {
        let head = Dropout::new(0.3, 7, 1).unwrap().of_head(2, 5);
        for own in [0, 3, 8, 15, 16, 1000] {
            for first in [0, 16, 32, 4096] {
                let [mut keys, mut queries] = [[0.0; PANEL]; 2];
                head.of_keys(own, first, &mut keys);
                head.of_queries(own, first, &mut queries);
                for i in 0..PANEL {
                    assert_eq!(keys[i] == 1.0, head.keeps(own, first + i));
                    assert_eq!(queries[i] == 1.0, head.keeps(first + i, own));
                }
            }
        }
    }

    #[test]
    fn shares_are_those_asked_for() {
        assert!(Dropout::new(0.0, 1, 2).is_none());
        for p in [0.1, 0.5, 0.9] {
            let dropout = Dropout::new(p, 3, 0).unwrap();
            let head = dropout.of_head(0, 0);
            let pairs = (0..512).flat_map(|i| (0..512).map(move |j| (i, j)));
            let kept = pairs.filter(|&(i, j)| head.keeps(i, j)).count() as f64 / (512.0 * 512.0);
            // Five standard deviations.
            assert!((kept - (1.0 - p)).abs() < 5.0 * (p * (1.0 - p)).sqrt() / 512.0, "{p}: {kept}");
            assert!((f64::from(dropout.factor()) * (1.0 - p) - 1.0).abs() < 1e-4);
        }
    }

    #[test]
    fn each_part_of_the_place_matters() {
        let mask = |seed, offset, request, head| {
            let of = Dropout::new(0.5, seed, offset).unwrap().of_head(request, head);
            (0..64).map(|i| u64::from(of.keeps(i / 8 * 5, i % 8 * 3)) << i).sum::<u64>()
        };
        let masks =
            [mask(1, 0, 0, 0), mask(2, 0, 0, 0), mask(1, 1, 0, 0), mask(1, 0, 1, 0), mask(1, 0, 0, 1)];
        for (i, a) in masks.iter().enumerate() {
            assert!(masks[..i].iter().all(|b| (a ^ b).count_ones() > 16));
        }
    }
}
