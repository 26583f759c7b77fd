//! Activations as the products take them: signed bytes with a scale for each 32, or f32.

use super::format::GROUP;
use super::tiles::wide::{WIDE, WideRecord};
use super::tiles::{self, Record};
use super::{Problem, QuantFormat};
use crate::cpu::array;
use crate::cpu::rows::{load_at, with_float};
use crate::cpu::simd::MAX_LANES;
use crate::cpu::{CpuElement, Simd, Task};
use std::marker::PhantomData;
use std::ops::Range;

/// Largest magnitude of a quant.
pub(super) const MOST_QUANT: f32 = 127.0;
/// 32 activations that are all below this count as zero: the inverse of their scale would overflow.
pub(super) const LEAST: f32 = f32::from_bits(27 << 23); // 2^-100

/// A group of rows of `x`, made into records: `[tile][row]`, or [`WideRecord`]s for [`WIDE`] rows.
pub(super) struct Quantize<'a> {
    pub p: &'a Problem,
    pub x: usize,
    /// The rows of the group.
    pub rows: Range<usize>,
    pub records: *mut Record,
}

impl Task for Quantize<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        with_float!(self.p.x_dtype, T => self.convert::<S, T>(s))
    }
}

impl Quantize<'_> {
    #[inline(always)]
    fn convert<S: Simd, T: CpuElement>(&self, s: S) {
        let (count, step) = (self.rows.len(), self.p.x_step);
        for (r, row) in self.rows.clone().enumerate() {
            let x = (self.x as *const T).wrapping_add(self.p.rows.offsets(row)[0]);
            for b in 0..self.p.k / GROUP {
                let values = Values::<S, T> { s, t: PhantomData };
                let mut dense = [0f32; GROUP];
                // SAFETY: `check` bound the row to its tensor, and the group has a record for each of its rows and tiles.
                unsafe {
                    values.load(x.wrapping_offset((b * GROUP) as isize * step), step, &mut dense);
                    let record = record(s, &dense, self.p.format);
                    match count {
                        WIDE => (*self.records.cast::<WideRecord>().add(b)).put(r, &record),
                        _ => *self.records.add(b * count + r) = record,
                    }
                }
            }
        }
    }
}

/// Rows of `x` in f32, one after the other.
pub(super) struct Widen<'a> {
    pub p: &'a Problem,
    pub x: usize,
    pub rows: Range<usize>,
    /// Has room for the rows.
    pub to: *mut f32,
}

impl Task for Widen<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        with_float!(self.p.x_dtype, T => self.convert::<S, T>(s))
    }
}

impl Widen<'_> {
    #[inline(always)]
    fn convert<S: Simd, T: CpuElement>(&self, s: S) {
        let (k, step) = (self.p.k, self.p.x_step);
        for (r, row) in self.rows.clone().enumerate() {
            let x = (self.x as *const T).wrapping_add(self.p.rows.offsets(row)[0]);
            for b in (0..k).step_by(GROUP) {
                // SAFETY: `check` bound the row to its tensor, K is whole groups, and there is room for the rows.
                unsafe {
                    let to = &mut *self.to.add(r * k + b).cast::<[f32; GROUP]>();
                    Values::<S, T> { s, t: PhantomData }.load(x.wrapping_offset(b as isize * step), step, to);
                }
            }
        }
    }
}

struct Values<S, T> {
    s: S,
    t: PhantomData<T>,
}

impl<S: Simd, T: CpuElement> Values<S, T> {
    /// 32 elements in f32.
    #[inline(always)]
    unsafe fn load(&self, x: *const T, step: isize, dense: &mut [f32; GROUP]) {
        // SAFETY: the caller has the elements.
        unsafe {
            if step == 1 {
                for i in (0..GROUP).step_by(S::N) {
                    self.s.store(dense.as_mut_ptr().add(i), load_at(self.s, x, i, S::N));
                }
            } else {
                for (i, value) in dense.iter_mut().enumerate() {
                    *value = (*x.wrapping_offset(i as isize * step)).to_f32();
                }
            }
        }
    }
}

/// The definition is in the contract of the op: `scale = most / 127`, `quant = round(x * (127 / most))`, ties to even.
#[inline(always)]
fn record<S: Simd>(s: S, x: &[f32; GROUP], format: QuantFormat) -> Record {
    const { assert!(S::N <= GROUP && GROUP <= MAX_LANES) };
    let mut most = s.zero();
    for i in (0..GROUP).step_by(S::N) {
        // SAFETY: the array has whole vectors.
        most = s.max_nan(s.abs(unsafe { s.load(x.as_ptr().add(i)) }), most);
    }
    let most = s.reduce_max(most);
    if !(LEAST..f32::INFINITY).contains(&most) {
        // Zeros, or NaN if there is one or infinity among the activations.
        let scale = if most < LEAST { 0.0 } else { f32::NAN };
        let total = if format.zero_point() == 0 { scale.to_bits() as i32 } else { 0 };
        return Record { quants: [0; 8], scale, offsets: [total; 2] };
    }
    let (scale, inverse) = (most / MOST_QUANT, s.splat(MOST_QUANT / most));
    let (mut quants, mut sums) = ([0u8; GROUP], [0f32; 2]);
    for i in (0..GROUP).step_by(S::N) {
        // SAFETY: as above.
        unsafe {
            let rounded = s.round(s.mul(s.load(x.as_ptr().add(i)), inverse));
            s.store_b(quants.as_mut_ptr().add(i), s.i_to_b(s.f32_to_i(rounded)));
            // Sums of small whole numbers: exact in any order.
            sums[i / (GROUP / 2)] += s.reduce_add(rounded);
        }
    }
    let offsets = match format.zero_point() {
        0 if tiles::has_halves(format) => sums.map(|sum| (sum * scale).to_bits() as i32),
        0 => [((sums[0] + sums[1]) * scale).to_bits() as i32, 0],
        zero if tiles::has_halves(format) => [-zero * sums[0] as i32, -zero * sums[1] as i32],
        zero => [-zero * (sums[0] + sums[1]) as i32, 0],
    };
    let four = |g: usize| i32::from_ne_bytes(array(|i| quants[4 * g + i]));
    Record { quants: array(four), scale, offsets }
}
