//! Softmax on the CPU, one source for all tiers.

use super::backward::{DOUT, DX, Y};
use super::{OUT, Problem, X};
use crate::cpu::math16::{Bf16, F16, Precision};
use crate::cpu::prefetch::{AHEAD, Ahead, fetch, fetch_near};
use crate::cpu::rows::{
    DenseRows, can_stream, for_vectors, keep_first, load_at, load_unordered_at, put_near_at,
    put_unordered_at, replace_rest, store_at, sum_vectors, with_float,
};
use crate::cpu::scratch::Plain;
use crate::cpu::simd::{Four, MAX_LANES};
use crate::cpu::{
    CpuElement, Need, Region, Simd, Task, dispatch, l2_bytes, math, parallel_for_with_scratch, should_stream,
};
use crate::error::Result;
use crate::op::Launch;
use crate::tensor::DType;
use std::marker::PhantomData;
use std::ops::Range;

/// The fewest elements a thread works on: less does not pay for waking a thread.
const GRAIN: usize = 1 << 14;

/// How many bytes ahead of its loads a row is brought from L2 into the first.
const NEXT: usize = 1024;

/// Rows are processed in pieces of this many elements, which stay in L1.
const PIECE: usize = 4096;

/// Vectors whose products the gradient adds before the sum goes to a total in f64: an error in the sum affects the
/// whole row, and the longer a sum, the more each addition rounds.
const PART: usize = 16;

pub(super) fn run(launch: &Launch<'_, Problem>) -> Result<()> {
    let p = launch.problem;
    let stream = should_stream(p.tensor_bytes());
    parallel_for_with_scratch(
        p.num_rows,
        GRAIN.div_ceil(p.hidden.max(1)),
        forward_need(p),
        |rows, region| {
            with_float!(p.dtype, T => {
                dispatch(launch.tier, Forward::<T> { launch, rows, stream, region, t: PhantomData })
            })
        },
    );
    Ok(())
}

/// Scratch of [`Forward`]: two rows, the exponentials of one, its pieces and their factors.
fn forward_need(p: &Problem) -> Need {
    let rows = DenseRows::<f32>::need(p.dtype, p.hidden, &p.steps[..2]);
    let pieces = p.hidden.div_ceil(PIECE);
    rows.plus(rows).and::<f32>(kept_powers(p)).and::<Piece>(pieces).and::<f32>(pieces)
}

/// How many exponentials of a row are kept: all if they fit in a quarter of L2 (the rest is for the row itself and for
/// the next), else none.
fn kept_powers(p: &Problem) -> usize {
    if p.hidden * size_of::<f32>() <= l2_bytes() / 4 { p.hidden } else { 0 }
}

struct Forward<'a, T> {
    launch: &'a Launch<'a, Problem>,
    rows: Range<usize>,
    stream: bool,
    region: Region<'a>,
    t: PhantomData<T>,
}

impl<T: CpuElement> Task for Forward<'_, T> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        // Four vectors in lock-step: exponentials are chains of a dozen operations.
        let s = s.pair().pair();
        let p = self.launch.problem;
        let args = self.launch.args;
        let at = |index: usize, offset: usize| (args.address(index) as *mut T).wrapping_add(offset);
        // Buffers for a row and the one before it, which is stored meanwhile.
        let region = &mut self.region;
        let mut scratch = [0, 1].map(|_| DenseRows::<T>::new(region, p.hidden, &p.steps[..2]));
        // Those of the next row take their place one by one: rows of usual length then leave room in L1.
        let powers = region.slice::<f32>(kept_powers(p));
        let fits = powers.len() == p.hidden;
        let pieces = region.slice::<Piece>(p.hidden.div_ceil(PIECE));
        let scale = Scale::new(s, p.scale());
        let factors = region.slice::<f32>(pieces.len());
        // Where the row before goes, and what remains to be done for it.
        let mut before: Option<(usize, Pending<T>)> = None;
        let last = self.rows.end.wrapping_sub(1);
        for row in self.rows {
            let [x_at, out_at, _, _] = p.rows.offsets(row);
            let (this, other) = (row % 2, (row + 1) % 2);
            // SAFETY: `check` bound both shapes to these sizes and strides, so every row lies in its tensor; threads
            // get disjoint rows; out is x only element for element, and each is read for the last time before it is
            // written.
            unsafe {
                let x = scratch[this].gather(0, at(X, x_at), p.steps[0]);
                let out = scratch[this].target(1, at(OUT, out_at), p.steps[1]);
                let stream = self.stream && p.steps[1] == 1 && can_stream::<S::Pair, T>(out);
                if fits {
                    let next = p.rows.offsets((row + 1).min(p.num_rows - 1))[0];
                    let soon = if p.steps[0] == 1 { at(X, next).cast_const() } else { x };
                    // A result of f32 that stays in cache has room for its exponentials.
                    let in_place = T::DTYPE == DType::F32 && !stream;
                    let powers = if in_place { out.cast() } else { powers.as_mut_ptr() };
                    let mut pivot = Pivot::first(s, x, p.hidden, &scale);
                    let (top, sum) = loop {
                        let pending = before.map(|(_, pending)| pending);
                        let (top, sum) = sum_pieces(
                            s,
                            (x, p.hidden),
                            soon,
                            (&scale, pivot),
                            pieces,
                            #[inline(always)]
                            |piece, i, count, e| {
                                if let Some(pending) = pending {
                                    pending.store(s, factors[piece], i, count);
                                }
                                if in_place {
                                    put_unordered_at(s, powers, i, count, e, false);
                                } else {
                                    store_at(s, powers, i, count, e);
                                }
                            },
                        );
                        if let Some((at_before, _)) = before.take() {
                            scratch[other].scatter(1, at(OUT, at_before), p.steps[1]);
                        }
                        if pivot.serves(sum) {
                            break (top, sum);
                        }
                        pivot = Pivot::Row(largest(s, x, p.hidden, &scale));
                    };
                    for (factor, piece) in factors.iter_mut().zip(&*pieces) {
                        *factor = piece.factor(s, top, &scale) / sum;
                    }
                    before = Some((out_at, Pending { powers, out, stream }));
                } else {
                    long_row(s, (x, out, p.hidden), &scale, pieces, stream);
                    scratch[this].scatter(1, at(OUT, out_at), p.steps[1]);
                }
            }
        }
        if let Some((at_before, pending)) = before {
            // SAFETY: as above.
            unsafe {
                for (piece, &factor) in factors.iter().enumerate() {
                    let start = piece * PIECE;
                    for_vectors::<Four<S>>(
                        PIECE.min(p.hidden - start),
                        #[inline(always)]
                        |i, count| pending.store(s, factor, start.wrapping_add(i), count),
                    );
                }
                scratch[last % 2].scatter(1, at(OUT, at_before), p.steps[1]);
            }
        }
        if self.stream {
            s.fence();
        }
    }
}

/// The scale as a sign and a magnitude: with the sign applied first, the row's largest element is the best pivot.
struct Scale<S: Simd> {
    negative: bool,
    magnitude: S::V,
    /// The magnitude for powers of two.
    binary: f64,
}

impl<S: Simd> Scale<S> {
    #[inline(always)]
    fn new(s: S, scale: f64) -> Self {
        Scale {
            negative: scale < 0.0,
            magnitude: s.splat(scale.abs() as f32),
            binary: scale.abs() * std::f64::consts::LOG2_E,
        }
    }
}

/// The pivot that exponentials are relative to.
#[derive(Clone, Copy)]
enum Pivot {
    /// The largest element of each piece: exponents of elements near it are hardly rounded.
    Pieces,
    /// For narrow results: any element of the row, unless others are so much larger that their exponentials overflow.
    Guess(f32),
    /// The largest element of the row.
    Row(f32),
}

impl Pivot {
    /// The pivot to try first for a row of `n` elements: finding the largest takes a pass over all of them.
    ///
    /// # Safety
    /// `x` must be readable for `n` elements.
    #[inline(always)]
    unsafe fn first<S: Simd, T: CpuElement>(s: S, x: *const T, n: usize, scale: &Scale<S>) -> Self {
        match T::DTYPE {
            DType::F32 => Pivot::Pieces,
            // SAFETY: passed on.
            _ => Pivot::Guess(unsafe { largest(s, x, n.min(S::N), scale) }),
        }
    }

    /// Whether exponentials with this sum are usable.
    #[inline(always)]
    fn serves(self, sum: f32) -> bool {
        const MOST: f32 = (1u128 << 100) as f32;
        // NaN is not usable either: an infinite guess gives one, and so does a NaN that `max` skipped.
        !matches!(self, Pivot::Guess(_)) || sum <= MOST
    }
}

/// Exponentials relative to a pivot, as accurate as `T` can tell.
struct Powers<S: Simd> {
    slope: S::V,
    start: S::V,
    magnitude: S::V,
}

impl<S: Simd> Powers<S> {
    /// `exp(magnitude (sign x - pivot))`; for bf16, times a factor that is the same for the whole row. With it those that are
    /// subnormal numbers of the result are not yet zero.
    #[inline(always)]
    fn new<T: CpuElement>(s: S, scale: &Scale<S>, pivot: f32) -> Self {
        let mut slope = 1.0;
        if T::DTYPE != DType::F32 {
            // Of narrow elements past this, those that differ at all differ by more than an exponential can show; and up to
            // it the rounding of `start` is no more than a unit.
            const FARTHEST: f64 = (1 << 24) as f64;
            let reach = FARTHEST / pivot.abs().max(1e-8) as f64;
            slope = (if scale.binary > reach { reach } else { scale.binary }) as f32;
        }
        // Powers end at 2^-126, numbers of bf16 at half of 2^-133.
        let lift = if T::DTYPE == DType::BF16 { 8.0 } else { 0.0 };
        Powers {
            slope: s.splat(if scale.negative { -slope } else { slope }),
            // Rounded, but the same for the whole row.
            start: s.splat((lift - pivot as f64 * slope as f64) as f32),
            magnitude: scale.magnitude,
        }
    }

    #[inline(always)]
    fn of<T: CpuElement>(&self, s: S, x: S::V) -> S::V {
        let exponent = s.fma(x, self.slope, self.start);
        match T::DTYPE {
            DType::BF16 => Bf16::exp2(s, exponent),
            DType::F16 => F16::exp2(s, exponent),
            _ => math::exp(s, s.mul(exponent, self.magnitude)),
        }
    }
}

/// The largest of `sign x` over `n` elements, at least the lowest finite number: a pivot of `-inf` would turn parts of
/// a row that are all `-inf` into NaN. NaN is skipped here; it shows in the sum.
///
/// # Safety
/// `x` must be readable for `n` elements.
#[inline(always)]
unsafe fn largest<S: Simd, T: CpuElement>(s: S, x: *const T, n: usize, scale: &Scale<S>) -> f32 {
    let mut top = s.splat(f32::MIN);
    // SAFETY: all positions are below `n`. The operand order of `max` passes over NaN, and lanes past the end hold
    // what cannot be larger.
    unsafe {
        if scale.negative {
            for_vectors::<S>(
                n,
                #[inline(always)]
                |i, count| {
                    let v = s.neg(load_unordered_at(s, x, i, count));
                    top = s.max(replace_rest(s, v, count, f32::MIN), top);
                },
            );
        } else {
            for_vectors::<S>(
                n,
                #[inline(always)]
                |i, count| {
                    let v = load_unordered_at(s, x, i, count);
                    top = s.max(replace_rest(s, v, count, f32::MIN), top);
                },
            );
        }
    }
    s.reduce_max(top)
}

// SAFETY: two numbers.
unsafe impl Plain for Piece {}

/// A piece of a row: what its exponentials are relative to, and their sum.
#[derive(Clone, Copy, Default)]
struct Piece {
    pivot: f32,
    sum: f32,
}

impl Piece {
    /// The factor from the piece's exponentials to those relative to `pivot`, which is no smaller.
    #[inline(always)]
    fn factor<S: Simd>(&self, s: S, pivot: f32, scale: &Scale<S>) -> f32 {
        if self.pivot == pivot {
            return 1.0;
        }
        let mut lanes = [0f32; MAX_LANES];
        let below = s.mul(s.splat(self.pivot - pivot), scale.magnitude);
        // SAFETY: no vector has more lanes.
        unsafe { s.store(lanes.as_mut_ptr(), math::exp(s, below)) };
        lanes[0]
    }
}

/// A row whose exponentials stay in cache until it is stored, which is done while those of the next row are computed:
/// so memory is busy meanwhile. Each element is read from memory once, and each exponential computed once.
#[derive(Clone, Copy)]
struct Pending<T> {
    /// The exponentials; may be `out`.
    powers: *const f32,
    out: *mut T,
    stream: bool,
}

impl<T: CpuElement> Pending<T> {
    /// Stores a vector of the row, given the factor of its piece.
    ///
    /// # Safety
    /// The elements must exist; if streamed, they must be as [`can_stream`] says.
    #[inline(always)]
    unsafe fn store<S: Simd>(&self, s: S, factor: f32, i: usize, count: usize) {
        // SAFETY: passed on.
        unsafe {
            let e = load_at(s, self.powers, i, count);
            put_near_at(s, self.out, i, count, s.mul(e, s.splat(factor)), self.stream);
        }
    }
}

/// Fills in the pieces of a row of `n` elements; returns their largest pivot, and the sum of all exponentials relative to
/// that. `see` is given the piece's number, and the exponentials relative to its pivot. `soon` is what is read after the row.
///
/// # Safety
/// `x` must be readable for `n` elements; `pieces` are as many as the row has.
#[inline(always)]
unsafe fn sum_pieces<S: Simd, T: CpuElement>(
    s: S,
    (x, n): (*const T, usize),
    soon: *const T,
    (scale, pivot): (&Scale<S>, Pivot),
    pieces: &mut [Piece],
    see: impl Fn(usize, usize, usize, S::V),
) -> (f32, f32) {
    let mut top = f32::MIN;
    for (index, piece) in pieces.iter_mut().enumerate() {
        let start = index * PIECE;
        let len = PIECE.min(n - start);
        // SAFETY: all positions are below `n`.
        unsafe {
            let x = x.add(start);
            let soon = if n - start <= PIECE { soon } else { x.wrapping_add(PIECE) };
            piece.pivot = match pivot {
                Pivot::Pieces => largest(s, x, len, scale),
                Pivot::Guess(pivot) | Pivot::Row(pivot) => pivot,
            };
            top = top.max(piece.pivot);
            let powers = Powers::new::<T>(s, scale, piece.pivot);
            [piece.sum] = sum_vectors(
                s,
                len,
                #[inline(always)]
                |i, count, sums: &mut [S::V; 1]| {
                    fetch_near(soon.wrapping_add(i).cast(), S::N * size_of::<T>());
                    fetch::<S, T>(x.wrapping_add(i).wrapping_byte_add(NEXT));
                    let e = powers.of::<T>(s, load_unordered_at(s, x, i, count));
                    see(index, start.wrapping_add(i), count, e);
                    sums[0] = s.add(sums[0], keep_first(s, e, count));
                },
            );
        }
    }
    let sum = pieces.iter().fold(0.0, |sum, piece| sum + piece.sum * piece.factor(s, top, scale));
    (top, sum)
}

/// A row of any length, read from memory twice: once for the sum and once for the result.
///
/// # Safety
/// `x` must be readable and `out` writable for `n` elements; with `stream`, `out` must be aligned as [`can_stream`]
/// says. `pieces` are as many as the row has.
#[inline(always)]
unsafe fn long_row<S: Simd, T: CpuElement>(
    s: S,
    (x, out, n): (*const T, *mut T, usize),
    scale: &Scale<S>,
    pieces: &mut [Piece],
    stream: bool,
) {
    // SAFETY: all positions are below `n`.
    unsafe {
        let mut pivot = Pivot::first(s, x, n, scale);
        let (top, sum) = loop {
            let (top, sum) = sum_pieces(
                s,
                (x, n),
                x,
                (scale, pivot),
                pieces,
                #[inline(always)]
                |_, _, _, _| {},
            );
            if pivot.serves(sum) {
                break (top, sum);
            }
            pivot = Pivot::Row(largest(s, x, n, scale));
        };
        let (powers, inverse) = (Powers::new::<T>(s, scale, top), s.splat(1.0 / sum));
        for_vectors::<S>(
            n,
            #[inline(always)]
            |i, count| {
                fetch::<S, T>(x.wrapping_add(i).wrapping_byte_add(AHEAD));
                let e = powers.of::<T>(s, load_unordered_at(s, x, i, count));
                put_near_at(s, out, i, count, s.mul(e, inverse), stream);
            },
        );
    }
}

pub(super) fn run_backward(launch: &Launch<'_, Problem>) -> Result<()> {
    let p = launch.problem;
    let stream = should_stream(p.tensor_bytes());
    let need = DenseRows::<f32>::need(p.dtype, p.hidden, &p.steps[..3]);
    parallel_for_with_scratch(p.num_rows, GRAIN.div_ceil(p.hidden.max(1)), need, |rows, region| {
        with_float!(p.dtype, T => {
            dispatch(launch.tier, Backward::<T> { launch, rows, stream, region, t: PhantomData })
        })
    });
    Ok(())
}

struct Backward<'a, T> {
    launch: &'a Launch<'a, Problem>,
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
        let p = self.launch.problem;
        let args = self.launch.args;
        let at = |index: usize, offset: usize| (args.address(index) as *mut T).wrapping_add(offset);
        let mut scratch = DenseRows::<T>::new(&mut self.region, p.hidden, &p.steps[..3]);
        let scale = s.splat(p.scale() as f32);
        for row in self.rows {
            let [y_at, dout_at, dx_at, _] = p.rows.offsets(row);
            // SAFETY: `check` bound all shapes to these sizes and strides, so every row lies in its tensor; threads
            // get disjoint rows; dx is dout only element for element, and each is read for the last time before it
            // is written.
            unsafe {
                let y = scratch.gather(0, at(Y, y_at), p.steps[0]);
                let dout = scratch.gather(1, at(DOUT, dout_at), p.steps[1]);
                let dx = scratch.target(2, at(DX, dx_at), p.steps[2]);
                let [y_next, dout_next, _, _] = p.rows.offsets((row + 1).min(p.num_rows - 1));
                let y_ahead = Ahead::new(at(Y, y_next).cast_const(), p.hidden, p.steps[0]);
                let dout_ahead = Ahead::new(at(DOUT, dout_next).cast_const(), p.hidden, p.steps[1]);
                let mut dot = 0f64;
                let part = PART * <S::Pair as Simd>::N;
                for start in (0..p.hidden).step_by(part) {
                    let [of_part] = sum_vectors(
                        s,
                        part.min(p.hidden - start),
                        #[inline(always)]
                        |i, count, sums: &mut [<S::Pair as Simd>::V; 1]| {
                            let dout = load_unordered_at(s, dout, start + i, count);
                            sums[0] = s.fma(load_unordered_at(s, y, start + i, count), dout, sums[0]);
                        },
                    );
                    dot += f64::from(of_part);
                }
                let dot = s.splat(dot as f32);
                let stream = self.stream && p.steps[2] == 1 && can_stream::<S::Pair, T>(dx);
                for_vectors::<S::Pair>(
                    p.hidden,
                    #[inline(always)]
                    |i, count| {
                        y_ahead.fetch::<S::Pair>(i);
                        dout_ahead.fetch::<S::Pair>(i);
                        let slope = s.mul(scale, load_unordered_at(s, y, i, count));
                        let v = s.mul(slope, s.sub(load_unordered_at(s, dout, i, count), dot));
                        put_near_at(s, dx, i, count, v, stream);
                    },
                );
                scratch.scatter(2, at(DX, dx_at), p.steps[2]);
            }
        }
        if self.stream {
            s.fence();
        }
    }
}
