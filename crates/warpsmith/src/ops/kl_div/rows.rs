//! The arithmetic of two rows of logits on the CPU, for losses and for their gradients.

use super::options::Options;
use crate::cpu::rows::{
    can_stream, for_vectors, keep_first, load_unordered_at, put_unordered_at, replace_rest, sum_vectors,
};
use crate::cpu::{CpuElement, Simd, math};

/// Rows are read in pieces of this many elements, of which two stay in L1 while they are looked at twice.
const PIECE: usize = 2048;

/// What the loss of a row leaves. Of the two rows, the first is that of the distribution that weighs.
#[derive(Clone, Copy, Default)]
pub(super) struct Loss {
    pub loss: f32,
    /// Of the first and of the second.
    pub lse: [f32; 2],
}

/// Sums over two rows, or over some pieces of them.
#[derive(Clone, Copy)]
struct Sums {
    /// The largest logits.
    top: [f32; 2],
    /// The sums of exponentials relative to those.
    powers: [f32; 2],
    /// The sum of what the first logits are above the second, both below their largest, weighed by the first exponentials.
    above: f32,
    /// Whether the second distribution lacks a column that the first has.
    lacks: bool,
}

impl Sums {
    /// Relative to larger logits.
    fn below(self, top: [f32; 2], inverse: f32) -> Sums {
        let [first, second] = [0, 1].map(|at| (top[at] - self.top[at]) * inverse);
        // What is nothing stays so, however far down it goes.
        let lowered = |powers: f32, by: f32| if powers == 0.0 { 0.0 } else { powers * (-by).exp() };
        let factor = if self.powers[0] == 0.0 { 0.0 } else { (-first).exp() };
        let above =
            if factor == 0.0 { 0.0 } else { factor * (self.above + self.powers[0] * (second - first)) };
        Sums { top, powers: [lowered(self.powers[0], first), lowered(self.powers[1], second)], above, ..self }
    }

    /// Those of both.
    fn join(self, other: Sums, inverse: f32) -> Sums {
        let top = [0, 1].map(|at| if other.top[at] > self.top[at] { other.top[at] } else { self.top[at] });
        let (one, other) = (self.below(top, inverse), other.below(top, inverse));
        Sums {
            top,
            powers: [0, 1].map(|at| one.powers[at] + other.powers[at]),
            above: one.above + other.above,
            lacks: one.lacks || other.lacks,
        }
    }
}

/// The loss of rows of `n` logits, `x` the first and `y` the second.
///
/// # Safety
/// Both must be readable for `n` elements.
#[inline(always)]
pub(super) unsafe fn loss<S: Simd, T: CpuElement>(
    s: S,
    options: &Options,
    [x, y]: [*const T; 2],
    n: usize,
) -> Loss {
    let inverse = options.inverse();
    let mut all: Option<Sums> = None;
    for start in (0..n).step_by(PIECE) {
        let len = PIECE.min(n - start);
        // SAFETY: the piece lies in the rows.
        let piece = unsafe { sums(s, inverse, [x.add(start), y.add(start)], len) };
        all = Some(all.map_or(piece, |all| all.join(piece, inverse)));
    }
    let Some(sums) = all else { return Loss { loss: f32::NAN, lse: [f32::NAN; 2] } };
    // Only a row that is all minus infinity has no powers.
    let [first, second] = sums.powers.map(|powers| if powers == 0.0 { f32::NAN } else { powers.ln() });
    let loss = match sums.lacks {
        _ if first.is_nan() || second.is_nan() => f32::NAN,
        true => f32::INFINITY,
        false => sums.above / sums.powers[0] + (second - first),
    };
    let temperature = options.temperature();
    Loss { loss, lse: [sums.top[0] + temperature * first, sums.top[1] + temperature * second] }
}

/// # Safety
/// Both must be readable for `n` elements.
#[inline(always)]
unsafe fn sums<S: Simd, T: CpuElement>(s: S, inverse: f32, [x, y]: [*const T; 2], n: usize) -> Sums {
    // The lowest finite number at least: with minus infinity, differences to it would be NaN. NaN is passed over here and
    // shows in the sums.
    let lowest = s.splat(f32::MIN);
    let (mut top_x, mut top_y, mut gap) = (lowest, lowest, s.zero());
    let half = s.splat(0.5);
    // SAFETY: all positions are below `n`.
    unsafe {
        for_vectors::<S>(
            n,
            #[inline(always)]
            |i, count| {
                let a = replace_rest(s, load_unordered_at(s, x, i, count), count, f32::MIN);
                let b = replace_rest(s, load_unordered_at(s, y, i, count), count, f32::MIN);
                top_x = s.max(a, top_x);
                top_y = s.max(b, top_y);
                // Of halves, so that it is infinite only where a logit is. Of two infinities it is NaN, and passed over.
                gap = s.max(s.sub(s.mul(a, half), s.mul(b, half)), gap);
            },
        );
        let top = [s.reduce_max(top_x), s.reduce_max(top_y)];
        let lacks = s.reduce_max(gap) == f32::INFINITY;
        let (pivot_x, pivot_y) = (s.splat(top[0]), s.splat(top[1]));
        let factor = s.splat(inverse);
        let [first, second, above] = sum_vectors(
            s,
            n,
            #[inline(always)]
            |i, count, sums: &mut [S::V; 3]| {
                let a = s.mul(s.sub(load_unordered_at(s, x, i, count), pivot_x), factor);
                let b = s.mul(s.sub(load_unordered_at(s, y, i, count), pivot_y), factor);
                let (p, q) = (keep_first(s, math::exp(s, a), count), keep_first(s, math::exp(s, b), count));
                sums[0] = s.add(sums[0], p);
                sums[1] = s.add(sums[1], q);
                // What has no weight adds nothing, infinite or not.
                let weighed = s.mul(p, s.sub(a, b));
                sums[2] = s.add(sums[2], s.select(s.gt(p, s.zero()), weighed, s.zero()));
            },
        );
        Sums { top, powers: [first, second], above, lacks }
    }
}

/// What the gradient of a row is made with.
#[derive(Clone, Copy)]
pub(super) struct Slope {
    /// Of the student and of the teacher.
    pub lse: [f32; 2],
    pub loss: f32,
    /// The gradient of the row's loss.
    pub dloss: f32,
    /// Bypasses the caches where `out` allows it: call [`Simd::fence`] before others read it.
    pub stream: bool,
}

/// The gradient of a row of `n` logits, `x` the student's and `y` the teacher's.
///
/// # Safety
/// `x` and `y` must be readable and `out` writable for `n` elements. `out` may be `x`; otherwise it must be apart from both.
#[inline(always)]
pub(super) unsafe fn gradient<S: Simd, T: CpuElement>(
    s: S,
    options: &Options,
    [x, y]: [*const T; 2],
    (out, n): (*mut T, usize),
    slope: Slope,
) {
    // SAFETY: passed on.
    unsafe {
        match options.is_reverse() {
            false => gradient_of::<S, T, false>(s, options, [x, y], (out, n), slope),
            true => gradient_of::<S, T, true>(s, options, [x, y], (out, n), slope),
        }
    }
}

/// # Safety
/// As [`gradient`].
#[inline(always)]
unsafe fn gradient_of<S: Simd, T: CpuElement, const REVERSE: bool>(
    s: S,
    options: &Options,
    [x, y]: [*const T; 2],
    (out, n): (*mut T, usize),
    slope: Slope,
) {
    let inverse = s.splat(options.inverse());
    let lse = (s.splat(slope.lse[0]), s.splat(slope.lse[1]));
    // An infinite loss has no gradient: zero times it is NaN.
    let dloss = if REVERSE { slope.dloss + slope.loss * 0.0 } else { slope.dloss };
    let (factor, loss) = (s.splat(dloss * options.inverse()), s.splat(slope.loss));
    // SAFETY: all positions are below `n`. A vector is read before it may be overwritten.
    unsafe {
        let stream = slope.stream && can_stream::<S, T>(out);
        for_vectors::<S>(
            n,
            #[inline(always)]
            |i, count| {
                let a = s.mul(s.sub(load_unordered_at(s, x, i, count), lse.0), inverse);
                let b = s.mul(s.sub(load_unordered_at(s, y, i, count), lse.1), inverse);
                let q = math::exp(s, a);
                let d = if REVERSE {
                    let d = s.mul(q, s.sub(s.sub(a, b), loss));
                    // What has no probability keeps none, however much the teacher has. NaN is not zero.
                    s.select(s.eq(q, s.zero()), s.zero(), d)
                } else {
                    s.sub(q, math::exp(s, b))
                };
                put_unordered_at(s, out, i, count, s.mul(d, factor), stream);
            },
        );
    }
}
