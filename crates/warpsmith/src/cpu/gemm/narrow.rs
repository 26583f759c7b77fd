//! Packed weights of 16 bits that are multiplied as f32: they stay as they are, and are widened when they are read.
//!
//! With few rows, reading the weights takes all the time, so half the bytes take half the time. A panel of them is
//! `[k][32]`, as one of f32 is. Very few rows are multiplied with what was just loaded; for more, parts of panels
//! become f32 in the cache first. Every f16 and bf16 is an f32, so sums have the bits that weights of f32 would give.

use super::epilogue::{Epilogue, Tile, end, finish};
use super::isa::Isa;
use super::matrix::{Block, Unit, copy_rows};
use super::panel::{HALF, PANEL, Panels, Side, TILE};
use super::partition::block_len;
use super::vector::add_product;
use crate::cpu::prefetch::{FAR_AHEAD, LINE, fetch_near};
use crate::cpu::scratch::{self, Need};
use crate::cpu::{CpuElement, Simd, Task, Tier, dispatch, map, parallel_for, parallel_for_with_scratch};
use crate::tensor::DType;
use half::{bf16, f16};
use std::ops::Range;

/// The most rows that are multiplied with weights as they are loaded: sums and weights fit the registers.
pub(super) const MOST_ROWS: usize = 4;

/// Whether weights of this type are packed as they are, for products in `unit`.
pub(super) fn is_narrow(unit: Unit, dtype: DType) -> bool {
    unit == Unit::F32 && matches!(dtype, DType::F16 | DType::BF16)
}

/// Panels of 16-bit elements: `[panels][k][32]`.
#[derive(Copy, Clone)]
pub(super) struct NarrowPanels {
    pub data: *mut u16,
    pub dtype: DType,
    pub k: usize,
}

// SAFETY: written before it is shared, only read afterwards.
unsafe impl Send for NarrowPanels {}
// SAFETY: as above.
unsafe impl Sync for NarrowPanels {}

impl NarrowPanels {
    /// Bytes that `panels` panels take.
    pub fn bytes(k: usize, panels: usize) -> usize {
        panels * k * PANEL * size_of::<u16>()
    }

    /// Where element `k` of the columns of a panel is.
    #[inline(always)]
    pub fn at(&self, panel: usize, k: usize) -> *mut u16 {
        self.data.wrapping_add((panel * self.k + k) * PANEL)
    }

    /// Packs all panels of `side`, on all threads. Missing columns are not written.
    ///
    /// # Safety
    /// `data` must hold the panels, which nobody else uses, and the matrices must be readable, of this type.
    pub unsafe fn pack(&self, side: &Side) {
        /// Elements of k whose part of the panel stays in L1.
        const DEPTH: usize = 64;
        let grain = (1 << 12) / (self.k * HALF).max(1) + 1;
        parallel_for(2 * side.panels(), grain, |range| {
            for i in range {
                let (panel, g) = (i / 2, i % 2);
                let (matrix, first, rows) = side.half(panel, g);
                for from in (0..self.k).step_by(DEPTH) {
                    for row in 0..rows {
                        let to = self.at(panel, from).wrapping_add(g * HALF + row);
                        for k in 0..DEPTH.min(self.k - from) {
                            let element = matrix.at(first + row, from + k).cast::<u16>();
                            // SAFETY: the element is inside the matrix; each half of a panel is written by one thread.
                            unsafe { *to.add(k * PANEL) = element.read_unaligned() };
                        }
                    }
                }
            }
        });
    }

    /// Writes the elements `from .. from + len` of a panel as f32.
    ///
    /// # Safety
    /// They must be inside the panel, and `to` have room for [`PANEL`] of each.
    pub unsafe fn widen(&self, tier: Tier, panel: usize, from: usize, len: usize, to: *mut f32) {
        let (from, count) = (self.at(panel, from).cast_const(), len * PANEL);
        match self.dtype {
            DType::F16 => dispatch(tier, Widen { from: from.cast::<f16>(), count, to }),
            _ => dispatch(tier, Widen { from: from.cast::<bf16>(), count, to }),
        }
    }

    /// Writes the elements `from .. from + to.units` of some panels as f32, one panel after the other.
    ///
    /// # Safety
    /// They must be inside the panels, and `to` have room for them.
    pub unsafe fn widen_all(&self, tier: Tier, panels: Range<usize>, from: usize, to: &Panels) {
        for (index, panel) in panels.enumerate() {
            // SAFETY: passed on.
            unsafe { self.widen(tier, panel, from, to.units, to.at(index, 0).cast()) };
        }
    }
}

/// Elements being widened to f32.
struct Widen<T> {
    from: *const T,
    count: usize,
    to: *mut f32,
}

impl<T: CpuElement> Task for Widen<T> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        // SAFETY: `widen` was promised both.
        unsafe {
            map(
                s,
                self.from,
                self.to,
                self.count,
                false,
                #[inline(always)]
                |v| v,
            );
        }
    }
}

/// The product of very few rows on vectors.
///
/// # Safety
/// As for [`super::run`]; at most [`MOST_ROWS`] rows, and panels of `n` outputs, `panel_len` in each.
pub(super) unsafe fn few<E: Epilogue>(
    isa: Isa,
    x: &Side,
    w: &NarrowPanels,
    (n, panel_len): (usize, usize),
    epilogue: &E,
) {
    let (rows, k) = (x.len(), x.k());
    if rows == 0 {
        return;
    }
    scratch::with(Need::of::<f32>(rows * k), |mut region| {
        let left = Left(region.slice::<f32>(rows * k).as_mut_ptr());
        let block = Block { matrix: &x.halves[0], row: 0, rows, k: 0, len: k };
        // SAFETY: the scratch holds the rows.
        unsafe { copy_rows(isa.tier(), Unit::F32, block, left.0.cast(), k, k) };
        let grain = (1 << 12) / k.max(1) + 1;
        parallel_for_with_scratch(
            n.div_ceil(panel_len),
            grain,
            Need::of::<f32>(TILE),
            |range, mut region| {
                let (left, sums) = (&left, region.slice::<f32>(TILE).as_mut_ptr());
                for panel in range {
                    let col = panel * panel_len;
                    let tile = Tile { sums, row: 0, col, rows, cols: panel_len.min(n - col) };
                    let product = (left.0.cast_const(), rows, k, w.at(panel, 0).cast_const(), sums);
                    // SAFETY: rows and panel have k elements, a tile holds the sums, and each is finished once.
                    unsafe {
                        match w.dtype {
                            DType::F16 => dispatch(isa.tier(), Few::<f16>::new(product)),
                            _ => dispatch(isa.tier(), Few::<bf16>::new(product)),
                        }
                        finish(isa, tile, epilogue);
                    }
                }
                end(isa, epilogue);
            },
        );
    });
}

/// Rows of f32 that all threads read.
struct Left(*mut f32);

// SAFETY: written before the loop that shares it, only read in it.
unsafe impl Sync for Left {}

/// Rows of `k` elements times a panel: rows of [`PANEL`] sums at `out`.
struct Few<T> {
    rows: *const f32,
    count: usize,
    k: usize,
    panel: *const T,
    out: *mut f32,
}

impl<T: CpuElement> Few<T> {
    /// # Safety
    /// Rows and panel must be readable, `out` hold the sums, and there be at most [`MOST_ROWS`] rows.
    unsafe fn new((rows, count, k, panel, out): (*const f32, usize, usize, *const u16, *mut f32)) -> Few<T> {
        debug_assert!((1..=MOST_ROWS).contains(&count));
        Few { rows, count, k, panel: panel.cast(), out }
    }

    /// The sums of `R` rows, in the blocks of k and the order that [`super::vector`] has.
    #[inline(always)]
    fn multiply<S: Simd, const R: usize>(&self, s: S) {
        let block = block_len(self.k);
        for column in (0..PANEL).step_by(2 * S::N) {
            for from in (0..self.k.max(1)).step_by(block) {
                let mut sums = [[s.zero(); 2]; R];
                for k in from..self.k.min(from + block) {
                    let weights = self.panel.wrapping_add(k * PANEL + column);
                    fetch_near(weights.wrapping_byte_add(FAR_AHEAD).cast(), LINE);
                    // SAFETY: `new` was promised the memory.
                    unsafe {
                        let w = [T::load(s, weights), T::load(s, weights.add(S::N))];
                        for (row, sums) in sums.iter_mut().enumerate() {
                            let x = s.splat(*self.rows.add(row * self.k + k));
                            *sums = [add_product(s, sums[0], x, w[0]), add_product(s, sums[1], x, w[1])];
                        }
                    }
                }
                for (row, sums) in sums.into_iter().enumerate() {
                    for (half, sum) in sums.into_iter().enumerate() {
                        let out = self.out.wrapping_add(row * PANEL + column + half * S::N);
                        // SAFETY: as above; the blocks before were stored.
                        unsafe { s.store(out, if from > 0 { s.add(s.load(out), sum) } else { sum }) };
                    }
                }
            }
        }
    }
}

impl<T: CpuElement> Task for Few<T> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        const { assert!(PANEL.is_multiple_of(2 * S::N)) };
        match self.count {
            1 => self.multiply::<S, 1>(s),
            2 => self.multiply::<S, 2>(s),
            3 => self.multiply::<S, 3>(s),
            _ => self.multiply::<S, MOST_ROWS>(s),
        }
    }
}
