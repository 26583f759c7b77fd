//! Rows of tokens: gathered in the order of the experts, and added up again.

use crate::cpu::rows::{DenseRows, for_vectors, load_at, store_at, with_float};
use crate::cpu::scratch::Region;
use crate::cpu::{CpuElement, Simd, Task, Tier, dispatch, parallel_for, parallel_for_with_scratch};
use crate::ops::grouped::slots::{DROPPED, Sorted};
use crate::ops::moe_ffn::Problem;
use crate::ops::moe_ffn::problem::{ROW_OUT, ROW_RESIDUAL};
use crate::tensor::DType;
use std::marker::PhantomData;
use std::ops::Range;

/// The fewest elements a thread moves or adds: less does not pay for waking a thread.
const GRAIN: usize = 1 << 14;

/// Some tokens, from number `first` on, and where their slots are.
#[derive(Clone, Copy)]
pub(in crate::ops::moe_ffn) struct Tokens<'a> {
    pub p: &'a Problem,
    pub first: usize,
    pub count: usize,
    pub sorted: &'a Sorted<'a>,
}

impl Tokens<'_> {
    /// Rows of the shared expert: one for each token, if there is one. They come behind those of the others.
    pub fn shared(&self) -> usize {
        if self.p.shared_ffn.is_some() { self.count } else { 0 }
    }

    /// All rows that are multiplied.
    pub fn rows(&self) -> usize {
        self.sorted.slots.len() + self.shared()
    }

    /// The token of a row.
    fn token(&self, row: usize) -> usize {
        match self.sorted.slots.get(row) {
            Some(slot) => slot / self.p.top_k,
            None => row - self.sorted.slots.len(),
        }
    }

    /// Copies rows of the tensor at `from`, whose places are those of tensor `tensor` of the tokens, to dense rows at `to`.
    ///
    /// # Safety
    /// The tensor must have rows of `hidden` elements of the type of `x` there, and `to` room for all rows.
    pub unsafe fn gather(&self, from: usize, tensor: usize, to: usize) {
        let (p, step) = (self.p, self.p.steps[tensor]);
        let (hidden, size) = (p.hidden, p.dtype.size());
        parallel_for(self.rows(), GRAIN.div_ceil(hidden.max(1)), |rows| {
            for row in rows {
                let offset = p.space.offsets(self.first + self.token(row))[tensor];
                let from = from.wrapping_add(offset.wrapping_mul(size));
                let to = to + row * hidden * size;
                // SAFETY: passed on; nobody else writes this row.
                unsafe {
                    if step == 1 {
                        std::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, hidden * size);
                        continue;
                    }
                    for i in 0..hidden {
                        let from = from.wrapping_add_signed(i as isize * step * size as isize) as *const u8;
                        std::ptr::copy_nonoverlapping(from, (to + i * size) as *mut u8, size);
                    }
                }
            }
        });
    }
}

/// The sums of the rows of each token, and the last steps.
#[derive(Clone, Copy)]
pub(in crate::ops::moe_ffn) struct Sums<'a> {
    pub tokens: Tokens<'a>,
    /// Dense rows in the order of [`Tokens`].
    pub y: usize,
    /// Of the slots, if they are not all one.
    pub weights: Option<&'a [f32]>,
    pub scale: f32,
    /// The tensor that is added, if there is one.
    pub residual: Option<usize>,
    pub out: usize,
}

impl Sums<'_> {
    /// Strides along rows of residual and result.
    fn steps(&self) -> [isize; 2] {
        [self.tokens.p.steps[ROW_RESIDUAL], self.tokens.p.steps[ROW_OUT]]
    }

    /// Writes the results of all tokens.
    ///
    /// # Safety
    /// The addresses must hold what they say; the residual may be the result, element for element.
    pub unsafe fn run(&self, tier: Tier) {
        let p = self.tokens.p;
        let need = DenseRows::<f32>::need(p.dtype, p.hidden, &self.steps()).and::<Term>(p.top_k);
        let grain = GRAIN.div_ceil((p.hidden * p.top_k).max(1));
        parallel_for_with_scratch(self.tokens.count, grain, need, |tokens, region| {
            let sums = self;
            with_float!(p.dtype, T => dispatch(tier, Sum::<T> { sums, tokens, region, t: PhantomData }));
        });
    }
}

/// A row that is added to the sum of a token.
#[derive(Clone, Copy)]
struct Term {
    row: *const f32,
    weight: f32,
}

/// The results of some tokens.
struct Sum<'a, T> {
    sums: &'a Sums<'a>,
    tokens: Range<usize>,
    region: Region<'a>,
    t: PhantomData<T>,
}

impl<T: CpuElement> Task for Sum<'_, T> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let Sums { tokens: all, y, weights, residual, out, .. } = *self.sums;
        let (p, steps) = (all.p, self.sums.steps());
        let mut scratch = DenseRows::<T>::new(&mut self.region, p.hidden, &steps);
        let mut terms = self.region.list::<Term>(p.top_k);
        let scale = s.splat(self.sums.scale);
        let row_at = |row: usize| (y as *const f32).wrapping_add(row * p.hidden);
        for token in self.tokens {
            terms.clear();
            for slot in token * p.top_k..(token + 1) * p.top_k {
                let place = all.sorted.places[slot];
                if place != DROPPED {
                    terms.push(Term { row: row_at(place), weight: weights.map_or(1.0, |of| of[slot]) });
                }
            }
            let shared = (all.shared() > 0).then(|| row_at(all.sorted.slots.len() + token));
            let offsets = p.space.offsets(all.first + token);
            let to = (out as *mut T).wrapping_add(offsets[ROW_OUT]);
            // SAFETY: whoever called `run` promised the tensors and the rows. Each element of the residual is read before that
            // of the result is written.
            unsafe {
                let dense = scratch.target(1, to, steps[1]);
                let residual = residual.map(|from| {
                    scratch.gather(0, (from as *const T).wrapping_add(offsets[ROW_RESIDUAL]), steps[0])
                });
                for_vectors::<S>(
                    p.hidden,
                    #[inline(always)]
                    |i, count| {
                        let mut sum = s.zero();
                        for term in terms.iter() {
                            let y = load_at(s, term.row, i, count);
                            sum = s.add(sum, s.mul(s.splat(term.weight), y));
                        }
                        if let Some(shared) = shared {
                            sum = s.add(sum, load_at(s, shared, i, count));
                        }
                        let y = match residual {
                            Some(residual) => s.fma(scale, sum, load_at(s, residual, i, count)),
                            None => s.mul(scale, sum),
                        };
                        store_at(s, dense, i, count, y);
                    },
                );
                scratch.scatter(1, to, steps[1]);
            }
        }
    }
}

/// Multiplies dense elements by a number, in place.
///
/// # Safety
/// `at` must hold `len` elements of `dtype`.
pub(in crate::ops::moe_ffn) unsafe fn scale(at: usize, dtype: DType, len: usize, factor: f32, tier: Tier) {
    struct Scaled<T> {
        at: *mut T,
        len: usize,
        factor: f32,
    }
    impl<T: CpuElement> Task for Scaled<T> {
        type Out = ();

        #[inline(always)]
        fn run<S: Simd>(self, s: S) {
            let factor = s.splat(self.factor);
            for_vectors::<S>(
                self.len,
                #[inline(always)]
                // SAFETY: `scale` was promised the elements.
                |i, count| unsafe {
                    store_at(s, self.at, i, count, s.mul(load_at(s, self.at, i, count), factor))
                },
            );
        }
    }
    parallel_for(len, GRAIN, |part| {
        with_float!(dtype, T => {
            let at = (at as *mut T).wrapping_add(part.start);
            dispatch(tier, Scaled { at, len: part.len(), factor });
        });
    });
}
