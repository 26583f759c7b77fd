//! The arithmetic of one row of logits on the CPU, for losses and for their gradients.

use super::options::Options;
use crate::cpu::rows::{
    can_stream, for_vectors, keep_first, load_at, load_unordered_at, put_unordered_at, replace_rest,
    store_at, sum_vectors,
};
use crate::cpu::simd::MAX_LANES;
use crate::cpu::{CpuElement, Simd, math};

/// Rows are read in pieces of this many elements, which stay in L1 while they are looked at twice.
const PIECE: usize = 4096;

/// What the loss of a row leaves.
#[derive(Clone, Copy)]
pub(in crate::ops) struct Loss {
    pub loss: f32,
    pub lse: f32,
}

/// Sums over a row, or over some pieces of it.
#[derive(Clone, Copy)]
struct Sums {
    /// The largest logit.
    top: f32,
    /// The sum of exponentials relative to that.
    powers: f32,
    /// The sum of what the logits are below it.
    below: f32,
    count: usize,
}

impl Sums {
    /// Those of both.
    fn join(self, other: Sums) -> Sums {
        let (high, low) = if other.top > self.top { (other, self) } else { (self, other) };
        let apart = high.top - low.top;
        Sums {
            top: high.top,
            // Pieces that are all minus infinity have no powers.
            powers: high.powers + if low.powers == 0.0 { 0.0 } else { low.powers * (-apart).exp() },
            below: high.below + low.below + low.count as f32 * apart,
            count: high.count + low.count,
        }
    }
}

/// The loss of a row of `n` logits.
///
/// # Safety
/// `x` must be readable for `n` elements, which are more than `target`.
#[inline(always)]
pub(in crate::ops) unsafe fn loss<S: Simd, T: CpuElement>(
    s: S,
    options: &Options,
    x: *const T,
    n: usize,
    target: usize,
) -> Loss {
    // SAFETY: passed on.
    unsafe {
        match (options.softcap() != 0.0, options.label_smoothing() != 0.0) {
            (false, false) => loss_with::<S, T, false, false>(s, options, x, n, target),
            (false, true) => loss_with::<S, T, false, true>(s, options, x, n, target),
            (true, false) => loss_with::<S, T, true, false>(s, options, x, n, target),
            (true, true) => loss_with::<S, T, true, true>(s, options, x, n, target),
        }
    }
}

/// # Safety
/// As [`loss`].
#[inline(always)]
unsafe fn loss_with<S: Simd, T: CpuElement, const CAPPED: bool, const SMOOTH: bool>(
    s: S,
    options: &Options,
    x: *const T,
    n: usize,
    target: usize,
) -> Loss {
    let cap = Cap::<S, CAPPED>::new(s, options);
    let mut all: Option<Sums> = None;
    for start in (0..n).step_by(PIECE) {
        let len = PIECE.min(n - start);
        // SAFETY: the piece lies in the row.
        let piece = unsafe { sums::<S, T, CAPPED, SMOOTH>(s, &cap, x.add(start), len) };
        all = Some(all.map_or(piece, |all| all.join(piece)));
    }
    let Some(sums) = all else { return Loss { loss: f32::NAN, lse: f32::NAN } };
    // SAFETY: the target is an element.
    let (z, _) = cap.apply(s, s.splat(unsafe { *x.add(target) }.to_f32()));
    let below = sums.top - first(s, z);
    // Only a row that is all minus infinity has no powers.
    let log = if sums.powers == 0.0 { f32::NAN } else { sums.powers.ln() };
    let lse = sums.top + log;
    let smooth = options.label_smoothing();
    let spread = if SMOOTH { smooth * (sums.below / n as f32) } else { 0.0 };
    let sharp = if smooth == 1.0 { 0.0 } else { (1.0 - smooth) * below };
    let squared = if options.z_loss() == 0.0 { 0.0 } else { options.z_loss() * (lse * lse) };
    Loss { loss: log + sharp + spread + squared, lse }
}

/// # Safety
/// `x` must be readable for `n` elements.
#[inline(always)]
unsafe fn sums<S: Simd, T: CpuElement, const CAPPED: bool, const SMOOTH: bool>(
    s: S,
    cap: &Cap<S, CAPPED>,
    x: *const T,
    n: usize,
) -> Sums {
    // The lowest finite number at least: with minus infinity, differences to it would be NaN. NaN is passed over here and
    // shows in the sum.
    let mut top = s.splat(f32::MIN);
    // SAFETY: all positions are below `n`.
    unsafe {
        for_vectors::<S>(
            n,
            #[inline(always)]
            |i, count| {
                let v = load_unordered_at(s, x, i, count);
                top = s.max(replace_rest(s, v, count, f32::MIN), top);
            },
        );
        let (z, _) = cap.apply(s, s.splat(s.reduce_max(top)));
        let top = first(s, z);
        let pivot = s.splat(top);
        let [powers, below] = sum_vectors(
            s,
            n,
            #[inline(always)]
            |i, count, sums: &mut [S::V; 2]| {
                let (z, _) = cap.apply(s, load_unordered_at(s, x, i, count));
                let less = s.sub(z, pivot);
                sums[0] = s.add(sums[0], keep_first(s, math::exp(s, less), count));
                if SMOOTH {
                    sums[1] = s.sub(sums[1], keep_first(s, less, count));
                }
            },
        );
        Sums { top, powers, below, count: n }
    }
}

/// What the gradient of a row is made with.
#[derive(Clone, Copy)]
pub(in crate::ops) struct Slope {
    pub lse: f32,
    /// The gradient of the row's loss.
    pub factor: f32,
    /// Bypasses the caches where `out` allows it: call [`Simd::fence`] before others read it.
    pub stream: bool,
}

/// The gradient of a row of `n` logits.
///
/// # Safety
/// `x` must be readable and `out` writable for `n` elements, which are more than `target`. `out` may begin where `x` does, if its
/// elements are no larger; otherwise the two must be apart.
#[inline(always)]
pub(in crate::ops) unsafe fn gradient<S: Simd, T: CpuElement, U: CpuElement>(
    s: S,
    options: &Options,
    (x, out, n): (*const T, *mut U, usize),
    target: usize,
    slope: Slope,
) {
    // SAFETY: passed on.
    unsafe {
        match options.softcap() != 0.0 {
            false => gradient_with::<S, T, U, false>(s, options, (x, out, n), target, slope),
            true => gradient_with::<S, T, U, true>(s, options, (x, out, n), target, slope),
        }
    }
}

/// # Safety
/// As [`gradient`].
#[inline(always)]
unsafe fn gradient_with<S: Simd, T: CpuElement, U: CpuElement, const CAPPED: bool>(
    s: S,
    options: &Options,
    (x, out, n): (*const T, *mut U, usize),
    target: usize,
    Slope { lse, factor, stream }: Slope,
) {
    let even = -options.label_smoothing() / n as f32;
    let weight = 1.0 + 2.0 * options.z_loss() * lse;
    let of = Formula {
        cap: Cap::<S, CAPPED>::new(s, options),
        lse: s.splat(lse),
        weight: s.splat(if options.z_loss() == 0.0 { 1.0 } else { weight }),
        factor: s.splat(factor),
    };
    // SAFETY: all positions are below `n`. An element of the result ends no further than what was read before it.
    unsafe {
        // Read before it may be overwritten.
        let own = (*x.add(target)).to_f32();
        let stream = stream && can_stream::<S, U>(out);
        let hit = s.splat(even - (1.0 - options.label_smoothing()));
        let even = s.splat(even);
        for_vectors::<S>(
            n,
            #[inline(always)]
            |i, count| {
                if T::DTYPE == U::DTYPE {
                    let d = of.value(s, load_unordered_at(s, x, i, count), even);
                    put_unordered_at(s, out, i, count, d, stream);
                } else {
                    store_at(s, out, i, count, of.value(s, load_at(s, x, i, count), even));
                }
            },
        );
        let d = first(s, of.value(s, s.splat(own), hit));
        if stream {
            // Not to be overtaken by the vector it belongs to.
            s.fence();
        }
        *out.add(target) = U::from_f32(d);
    }
}

/// From a logit to its gradient.
struct Formula<S: Simd, const CAPPED: bool> {
    cap: Cap<S, CAPPED>,
    lse: S::V,
    /// Of the probability.
    weight: S::V,
    factor: S::V,
}

impl<S: Simd, const CAPPED: bool> Formula<S, CAPPED> {
    /// `target` is what the logit's share of the target is below zero.
    #[inline(always)]
    fn value(&self, s: S, x: S::V, target: S::V) -> S::V {
        let (z, slope) = self.cap.apply(s, x);
        let power = math::exp(s, s.sub(z, self.lse));
        let d = s.mul(s.fma(power, self.weight, target), self.factor);
        if CAPPED { s.mul(d, slope) } else { d }
    }
}

/// The soft cap of logits.
struct Cap<S: Simd, const CAPPED: bool> {
    cap: S::V,
    one: S::V,
}

impl<S: Simd, const CAPPED: bool> Cap<S, CAPPED> {
    #[inline(always)]
    fn new(s: S, options: &Options) -> Self {
        Cap { cap: s.splat(options.softcap()), one: s.splat(1.0) }
    }

    /// Logits with the cap, and its slope there.
    #[inline(always)]
    fn apply(&self, s: S, x: S::V) -> (S::V, S::V) {
        if !CAPPED {
            return (x, self.one);
        }
        let tanh = math::tanh(s, s.div(x, self.cap));
        (s.mul(self.cap, tanh), s.fnma(tanh, tanh, self.one))
    }
}

/// The first lane.
#[inline(always)]
fn first<S: Simd>(s: S, v: S::V) -> f32 {
    let mut lanes = [0f32; MAX_LANES];
    // SAFETY: no vector has more lanes.
    unsafe { s.store(lanes.as_mut_ptr(), v) };
    lanes[0]
}
