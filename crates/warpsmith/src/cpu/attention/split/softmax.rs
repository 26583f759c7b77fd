//! The softmax of a band, in small pieces between the products of others.

use crate::cpu::Simd;
use crate::cpu::attention::band::{Band, Growth, View};
use crate::cpu::gemm::{Blocks, split_left};
use std::arch::x86_64::*;

const PANEL: usize = Blocks::PANEL;
const STEP_LEN: usize = Blocks::SPLIT;
/// Rows whose maxima are found at once.
const RAISED: usize = 2;
/// Panels of keys of a row that become exponentials at once.
const PANELS: usize = 2;

/// A softmax under way.
pub(super) struct Softmax<'a, 'b> {
    band: &'a mut Band<'b>,
    view: View,
    growth: Growth,
    /// Pieces to each call.
    at_once: usize,
    /// Whether all maxima are found; then the next row, and its next panel.
    raised: bool,
    row: usize,
    panel: usize,
}

impl<'a, 'b> Softmax<'a, 'b> {
    /// Begins; about `calls` calls of [`Self::advance`] will do it.
    ///
    /// # Safety
    /// As for [`Band::softmax`]; AVX-512 must be there.
    pub unsafe fn new(band: &'a mut Band<'b>, view: View, calls: usize) -> Self {
        // Maxima of some rows, and exponentials of parts of rows.
        let parts = view.panels().len().div_ceil(PANELS);
        let at_once = (band.rows().div_ceil(RAISED) + band.rows() * parts).div_ceil(calls.max(1));
        let (growth, panel) = (Growth::default(), view.panels().start);
        Softmax { band, view, growth, at_once, raised: false, row: 0, panel }
    }

    /// Does what is left.
    #[inline(always)]
    pub fn finish<S: Simd>(mut self, s: S) {
        self.at_once = usize::MAX;
        self.advance(s);
    }

    /// Does some pieces.
    #[inline(always)]
    pub fn advance<S: Simd>(&mut self, s: S) {
        // SAFETY: the caller of `new` promised the band and the instructions.
        unsafe { if self.raised { self.exponentiate(s) } else { self.raise(s) } }
    }

    /// Out of line, as products call it in many places.
    ///
    /// # Safety
    /// As for [`Softmax::new`].
    #[inline(never)]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi1,bmi2,lzcnt,popcnt")]
    unsafe fn raise<S: Simd>(&mut self, s: S) {
        let rows = self.band.rows();
        let end = rows.min(self.row.saturating_add(self.at_once.saturating_mul(RAISED)));
        for r in self.row..end {
            // SAFETY: the rows are the band's.
            unsafe { self.band.raise(s, &self.view, r, &mut self.growth) };
        }
        self.row = end;
        if end == rows {
            self.growth.make_scales(s);
            (self.raised, self.row) = (true, 0);
            if self.at_once == usize::MAX {
                // SAFETY: passed on.
                unsafe { self.exponentiate(s) };
            }
        }
    }

    /// As [`Self::raise`].
    ///
    /// # Safety
    /// As for [`Softmax::new`], with all maxima found.
    #[inline(never)]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi1,bmi2,lzcnt,popcnt")]
    unsafe fn exponentiate<S: Simd>(&mut self, s: S) {
        let (rows, panels) = (self.band.rows(), self.view.panels());
        let target = self.view.exponentials();
        for _ in 0..self.at_once {
            let r = self.row;
            if r >= rows {
                return;
            }
            let end = panels.end.min(self.panel.wrapping_add(PANELS));
            // SAFETY: the rows are the band's, and the exponentials of a block have room.
            unsafe {
                if self.panel == panels.start {
                    self.band.rescale(s, r, &self.growth);
                }
                self.band.exponentiate(
                    s,
                    &self.view,
                    r,
                    self.panel..end,
                    &self.growth,
                    #[inline(always)]
                    |column, a, b| {
                        let (a, b) = (bits::<S>(a), bits::<S>(b));
                        split_left(a, b, r, target.wrapping_add((column / PANEL).wrapping_mul(STEP_LEN)));
                    },
                );
            }
            let ended = end == panels.end;
            self.panel = if ended { panels.start } else { end };
            self.row = r.wrapping_add(usize::from(ended));
        }
    }
}

/// A vector of the tier that has tiles.
#[inline(always)]
fn bits<S: Simd>(v: S::V) -> __m512i {
    assert!(size_of::<S::V>() == size_of::<__m512i>());
    // SAFETY: both are 16 lanes of 32 bits.
    unsafe { std::mem::transmute_copy(&v) }
}
