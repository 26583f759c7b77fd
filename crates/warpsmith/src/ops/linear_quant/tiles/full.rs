//! Products with activations that are not rounded, in f32.
//!
//! What a row of the result is, bit for bit, on every tier and for any number of rows: weights are `scale * (quant - zero)`,
//! which is exact, plus the minimum, rounded to f32; `sum = 0`, then for each 32 of K, with `part = 0` and
//! `part = fma(x, weight, part)` for one after the other, `sum = sum + part`.

use super::{MOST, QuantFormat, ROWS, Shape, Tile};
use crate::cpu::array;
use crate::cpu::{Simd, Task};
use crate::ops::linear_quant::format::GROUP;
use half::f16;

/// Bytes of a panel of f32, `[k][16]`.
pub(in crate::ops::linear_quant) fn panel_bytes(num_tiles: usize) -> usize {
    num_tiles * GROUP * ROWS * size_of::<f32>()
}

/// Makes a panel of f32 from a packed one.
pub(in crate::ops::linear_quant) struct Expand {
    pub format: QuantFormat,
    pub panel: *const u8,
    pub num_tiles: usize,
    /// Has room for [`panel_bytes`], on four bytes.
    pub to: *mut f32,
}

impl Task for Expand {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        // SAFETY: the fields say so.
        with_shape!(self.format, T => unsafe { self.tiles::<T>() })
    }
}

impl Expand {
    #[inline(always)]
    unsafe fn tiles<S: Shape>(&self) {
        for b in 0..self.num_tiles {
            // SAFETY: tile `b` is in the panel, and its weights have room.
            let (tile, to) = unsafe {
                let tile = std::slice::from_raw_parts(self.panel.add(b * S::BYTES), S::BYTES);
                let to = self.to.add(b * GROUP * ROWS).cast::<[[f32; ROWS]; GROUP]>();
                (tile, &mut *to)
            };
            expand_tile::<S>(tile, self.format.zero_point(), to);
        }
    }
}

#[inline(always)]
fn expand_tile<S: Shape>(tile: &[u8], zero: i32, to: &mut [[f32; ROWS]; GROUP]) {
    let number = |which: usize, row: usize| {
        let at = &tile[S::QUANTS + which * S::SCALES..];
        match S::F16 {
            true => f16::from_ne_bytes([at[2 * row], at[2 * row + 1]]).to_f32(),
            false => f32::from_ne_bytes(array(|i| at[4 * row + i])),
        }
    };
    let scales: [[f32; ROWS]; 2] = array(|half| array(|row| number(half * S::HALVES as usize, row)));
    let min = |half: usize, row: usize| {
        if S::MIN { number(S::PARTS + half * S::HALVES as usize, row) } else { 0.0 }
    };
    let mins: [[f32; ROWS]; 2] = array(|half| array(|row| min(half, row)));
    for (k, to) in to.iter_mut().enumerate() {
        let (at, shift) = if S::NIBBLES { (k % 16, k / 16 * 4) } else { (k, 0) };
        let mask = if S::NIBBLES { 15 } else { 255 };
        let quants = &tile[at / 4 * 4 * ROWS + at % 4..];
        for (row, weight) in to.iter_mut().enumerate() {
            let quant = i32::from(quants[4 * row] >> shift & mask) - zero;
            let product = scales[k / 16][row] * quant as f32;
            // A sum with zero would lose the sign of a product that is zero.
            *weight = if S::MIN { product + mins[k / 16][row] } else { product };
        }
    }
}

/// A panel of f32, and rows of `x` to multiply it with.
pub(in crate::ops::linear_quant) struct FullProduct {
    /// Made by [`Expand`].
    pub panel: *const f32,
    pub num_tiles: usize,
    /// Rows of `num_tiles` times 32 activations, one after the other.
    pub x: *const f32,
    /// Rows of `x`: 1, 2, 4 or 8.
    pub rows: usize,
    /// Where the sums go: rows of [`ROWS`], `pitch` apart.
    pub sums: *mut f32,
    pub pitch: usize,
}

impl Task for FullProduct {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        // SAFETY: the fields say so.
        unsafe {
            match self.rows {
                1 => self.sums::<S, 1>(s),
                2 => self.sums::<S, 2>(s),
                4 => self.sums::<S, 4>(s),
                _ => self.sums::<S, MOST>(s),
            }
        }
    }
}

impl FullProduct {
    #[inline(always)]
    unsafe fn sums<S: Simd, const R: usize>(&self, s: S) {
        const { assert!(ROWS.is_multiple_of(S::N)) };
        debug_assert_eq!(self.rows, R);
        let k = self.num_tiles * GROUP;
        for lane in (0..ROWS).step_by(S::N) {
            let mut sums = [s.zero(); R];
            for first in (0..k).step_by(GROUP) {
                let mut parts = [s.zero(); R];
                for at in first..first + GROUP {
                    // SAFETY: the panel has a vector for each of K, and each row of `x` a number.
                    unsafe {
                        let w = s.load(self.panel.add(at * ROWS + lane));
                        for (r, part) in parts.iter_mut().enumerate() {
                            *part = s.fma(s.splat(*self.x.add(r * k + at)), w, *part);
                        }
                    }
                }
                for (sum, part) in sums.iter_mut().zip(parts) {
                    *sum = s.add(*sum, part);
                }
            }
            for (r, sum) in sums.into_iter().enumerate() {
                // SAFETY: there is room for the sums of each row.
                unsafe { s.store(self.sums.add(r * self.pitch + lane), sum) };
            }
        }
    }
}
