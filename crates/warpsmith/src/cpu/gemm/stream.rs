//! Few rows on vectors: the weights are read once, where they are.

use super::blocked::Workspace;
#[cfg(target_arch = "x86_64")]
use super::dot;
use super::epilogue::{Epilogue, Tile, end, finish};
use super::isa::Isa;
use super::matrix::{Block, Unit, copy_rows};
use super::panel::{PANEL, Panels, Side};
use super::vector::{self, LEFT_STRIDE};
use crate::cpu::scratch::{self, Need};
use crate::cpu::{Tier, parallel_for_with_scratch};

/// Units of a panel that are packed at once for few rows: the first cache holds them beside what they are made from.
const STREAM_BLOCK: usize = 128;
/// Units of the rows that are side by side.
const VECTOR_BLOCK: usize = 512;

/// The product of few rows on vectors: each panel is packed in the first cache and used once, so that the weights are
/// read once and nothing else is moved.
///
/// # Safety
/// As for [`super::run`]; at most one block of rows.
pub(super) unsafe fn run<E: Epilogue>(isa: Isa, unit: Unit, x: &Side, w: &Side, epilogue: &E) {
    let rows = x.len();
    let panels = Panels { data: std::ptr::null_mut(), unit, units: unit.packed_len(w.k()), width: PANEL };
    #[cfg(target_arch = "x86_64")]
    if is_dot(isa, unit, x, w) {
        // SAFETY: passed on.
        return unsafe { dots(isa, x, w, epilogue) };
    }
    let blocks = panels.units.div_ceil(VECTOR_BLOCK);
    let left_block = vector::block_rows(isa) * LEFT_STRIDE;
    if rows == 0 {
        return;
    }
    scratch::with(Need::of::<u32>(blocks * left_block), |mut region| {
        let left = SharedLeft(region.slice(blocks * left_block).as_mut_ptr());
        for block in 0..blocks {
            let k = block * VECTOR_BLOCK * unit.elements();
            let units = VECTOR_BLOCK.min(panels.units - block * VECTOR_BLOCK);
            let len = (x.k() - k.min(x.k())).min(units * unit.elements());
            let rows = Block { matrix: &x.halves[0], row: 0, rows, k, len };
            // SAFETY: the scratch holds `blocks` blocks; the elements are inside x.
            unsafe { copy_rows(isa.tier(), unit, rows, left.at(block * left_block), LEFT_STRIDE, units) };
        }
        let grain = (1 << 12) / panels.units.max(1) + 1;
        let need = Workspace::need(STREAM_BLOCK * PANEL, 0);
        parallel_for_with_scratch(w.panels(), grain, need, |range, region| {
            let space = Workspace::new(region, STREAM_BLOCK * PANEL, 0);
            let right = space.sums.cast::<u32>();
            let sums = space.spare;
            for panel in range {
                let mut from = 0;
                loop {
                    let len = STREAM_BLOCK.min(panels.units - from);
                    let at = from / VECTOR_BLOCK * left_block + from % VECTOR_BLOCK;
                    // SAFETY: the workspace holds STREAM_BLOCK units of a panel; the left blocks are packed.
                    unsafe {
                        for g in 0..2 {
                            panels.pack_half(isa.tier(), w, panel, g, from, len, right);
                        }
                        let (left, out) = (left.at(at).cast_const(), sums);
                        let (right_width, resume) = (PANEL as isize, from > 0);
                        let product = vector::Product {
                            rows,
                            units: len,
                            left,
                            right,
                            right_width,
                            right_ahead: vector::PANEL_AHEAD,
                            out,
                            resume,
                            ahead: None,
                        };
                        vector::multiply(isa, unit, product);
                    }
                    from += len;
                    if from >= panels.units {
                        break;
                    }
                }
                let col = panel * w.panel_len();
                let cols = w.panel_len().min(w.len() - col);
                // SAFETY: the tile is whole; each is finished once.
                unsafe { finish(isa, Tile { sums, row: 0, col, rows, cols }, epilogue) };
            }
            end(isa, epilogue);
        });
    });
}

/// Whether weights are used from where they are, without a panel.
#[cfg(target_arch = "x86_64")]
fn is_dot(isa: Isa, unit: Unit, x: &Side, w: &Side) -> bool {
    let in_place = w.halves.iter().all(|matrix| matrix.is_units(unit));
    unit == Unit::F32 && isa.tier() == Tier::Avx512 && (1..=dot::MOST_ROWS).contains(&x.len()) && in_place
}

/// [`run`] without panels.
///
/// # Safety
/// As for [`run`], if [`is_dot`].
#[cfg(target_arch = "x86_64")]
unsafe fn dots<E: Epilogue>(isa: Isa, x: &Side, w: &Side, epilogue: &E) {
    let (rows, k) = (x.len(), x.k());
    scratch::with(Need::of::<f32>(rows * k), |mut region| {
        let copy = region.slice::<f32>(rows * k).as_mut_ptr();
        let block = Block { matrix: &x.halves[0], row: 0, rows, k: 0, len: k };
        // SAFETY: the scratch holds the rows.
        unsafe { copy_rows(isa.tier(), Unit::F32, block, copy.cast(), k, k) };
        let left = dot::Rows { data: copy, stride: k, count: rows };
        let grain = (1 << 12) / k.max(1) + 1;
        parallel_for_with_scratch(w.panels(), grain, Workspace::need(0, 0), |range, region| {
            let left = &left;
            let space = Workspace::new(region, 0, 0);
            for panel in range {
                let col = panel * w.panel_len();
                let cols = w.panel_len().min(w.len() - col);
                let tile = Tile { sums: space.spare, row: 0, col, rows, cols };
                // SAFETY: the tier has the instructions; a tile has room for the sums, and each is finished once.
                unsafe {
                    dot::multiply(*left, w, panel, space.spare);
                    finish(isa, tile, epilogue);
                }
            }
            end(isa, epilogue);
        });
    });
}

/// The packed rows that all threads read.
#[derive(Copy, Clone)]
struct SharedLeft(*mut u32);

// SAFETY: written before the loop that shares it, only read in it.
unsafe impl Sync for SharedLeft {}

impl SharedLeft {
    fn at(&self, unit: usize) -> *mut u32 {
        self.0.wrapping_add(unit)
    }
}
