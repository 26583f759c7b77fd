//! Few rows on vectors: the weights are read once, where they are.

use super::buffer::{Slot, with_scratch};
use super::drive::{TILE, VECTOR_BLOCK, Workspace, end, finish};
use super::epilogue::{Epilogue, Tile};
use super::isa::Isa;
use super::matrix::{Block, Unit, copy_rows};
use super::panel::{PANEL, Panels, Side};
use super::vector::{self, LEFT_STRIDE};
use crate::cpu::parallel_for;

/// Units of a panel that are packed at once for few rows: the first cache holds them beside what they are made from.
const STREAM_BLOCK: usize = 128;

/// The product of few rows on vectors: each panel is packed in the first cache and used once, so that the weights are
/// read once and nothing else is moved.
///
/// # Safety
/// As for [`super::drive::unpacked`]; at most one block of rows.
pub(super) unsafe fn run<E: Epilogue>(isa: Isa, unit: Unit, x: &Side, w: &Side, epilogue: &E) {
    let rows = x.len();
    let panels = Panels { data: std::ptr::null_mut(), unit, units: unit.packed_len(w.k()), width: PANEL };
    let blocks = panels.units.div_ceil(VECTOR_BLOCK);
    let left_block = vector::block_rows(isa) * LEFT_STRIDE;
    if rows == 0 {
        return;
    }
    with_scratch(Slot::Shared, blocks * left_block * size_of::<u32>(), |left| {
        let left = SharedLeft(left.cast());
        for block in 0..blocks {
            let k = block * VECTOR_BLOCK * unit.elements();
            let units = VECTOR_BLOCK.min(panels.units - block * VECTOR_BLOCK);
            let len = (x.k() - k.min(x.k())).min(units * unit.elements());
            let rows = Block { matrix: &x.halves[0], row: 0, rows, k, len };
            // SAFETY: the scratch holds `blocks` blocks; the elements are inside x.
            unsafe { copy_rows(isa.tier(), unit, rows, left.at(block * left_block), LEFT_STRIDE, units) };
        }
        let grain = (1 << 12) / panels.units.max(1) + 1;
        parallel_for(w.panels(), grain, |range| {
            Workspace::with(STREAM_BLOCK * PANEL / TILE, 0, |space| {
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
                            let product =
                                vector::Product { rows, units: len, left, right, right_width, out, resume };
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
                    unsafe {
                        finish(isa, Tile { sums, row: 0, col, rows, cols }, unit == Unit::Int8, epilogue)
                    };
                }
                end(isa, epilogue);
            });
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
