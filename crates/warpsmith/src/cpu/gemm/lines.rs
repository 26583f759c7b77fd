//! Few rows of f32 on vectors, times weights whose columns are contiguous: `dz · w`, the gradient of a linear layer's input.
//!
//! A line of such weights is one element of k of all outputs: a vector of it is loaded and multiplied, and nothing is packed.
//! So that memory is not read in pieces of 128 bytes, a thread takes a wide strip of panels and goes along a few lines at once,
//! with the sums of the strip in the cache.

use super::epilogue::{Epilogue, Tile, end, finish};
use super::isa::Isa;
use super::matrix::Unit;
use super::panel::{PANEL, Panels, Side};
use super::partition::{Depth, block_len, share, strips};
use super::stream::{Left, with_left};
use super::vector::{self, LINE_UNITS, Start, add_block};
use crate::cpu::parallel_for_with_scratch;
use crate::cpu::scratch::Need;

/// The most panels of a strip. The run read of a line is far longer than the prefetch distance.
const WIDEST: usize = 64;
/// Lines at once: as many streams as the hardware prefetcher follows.
const DEPTH: usize = 16;
/// How many panels ahead of the one being multiplied to prefetch.
const AHEAD: usize = 8;

// Blocks of k are whole lines of units.
const _: () = assert!(LINE_UNITS.is_multiple_of(DEPTH));

/// The product with `w`.
///
/// # Safety
/// As for [`super::run`]; at most one block of rows, and weights that [`Side::lies_in_columns`].
pub(super) unsafe fn run<E: Epilogue>(isa: Isa, x: &Side, w: &Side, epilogue: &E) {
    let (rows, panels, matrix) = (x.len(), w.panels(), &w.halves[0]);
    if rows == 0 || panels == 0 {
        return;
    }
    let across = strips(panels, WIDEST);
    let grain = (1 << 12) / (matrix.k * panels.div_ceil(across)).max(1) + 1;
    let tile_len = rows * PANEL;
    // The sums of blocks of k are added to those of the blocks before.
    let is_cut = matrix.k > block_len(matrix.k);
    let block_room = if is_cut { WIDEST * tile_len } else { 0 };
    let need = Need::of::<f32>(WIDEST * tile_len).and::<f32>(block_room).and::<u32>(DEPTH * PANEL);
    let multiply = |left: &Left| {
        parallel_for_with_scratch(across, grain, need, |range, mut region| {
            let sums = region.slice::<f32>(WIDEST * tile_len).as_mut_ptr();
            let block_sums = region.slice::<f32>(block_room).as_mut_ptr();
            let stage = region.slice::<u32>(DEPTH * PANEL).as_mut_ptr();
            for strip in range {
                let strip = share(panels, strip, across);
                for k in Depth::all(matrix.k, DEPTH) {
                    let start = Start::resuming(!k.from.is_multiple_of(left.depth));
                    let ends_block = k.last || (k.from + k.len).is_multiple_of(left.depth);
                    for (index, panel) in strip.clone().enumerate() {
                        let col = panel * PANEL;
                        let cols = PANEL.min(matrix.rows - col);
                        let sums = sums.wrapping_add(index * tile_len);
                        let block_sums = block_sums.wrapping_add(index * tile_len);
                        let out = if k.from < left.depth { sums } else { block_sums };
                        // SAFETY: the panel is whole, or the stage holds it; the sums have a tile for each panel, which is
                        // finished once.
                        unsafe {
                            let (right, right_width) = match cols == PANEL {
                                true => (matrix.at(col, k.from).cast(), matrix.k_stride),
                                false => (packed(isa, w, panel, k, stage), PANEL as isize),
                            };
                            let product = vector::Product {
                                rows,
                                units: k.len,
                                left: left.at(k.from),
                                right,
                                right_width,
                                right_ahead: (AHEAD * PANEL) as isize,
                                out,
                                start,
                                ahead: None,
                            };
                            vector::multiply(isa, Unit::F32, product);
                            if ends_block && out != sums {
                                add_block(sums, block_sums, rows);
                            }
                            if k.last {
                                finish(isa, Tile { sums, row: 0, col, rows, cols }, epilogue);
                            }
                        }
                    }
                }
            }
            end(isa, epilogue);
        });
    };
    // SAFETY: passed on.
    unsafe { with_left(isa, Unit::F32, x, multiply) };
}

/// A panel that is not whole, packed to `to`.
///
/// # Safety
/// The panel must be inside `w`, and `to` hold the units.
unsafe fn packed(isa: Isa, w: &Side, panel: usize, k: Depth, to: *mut u32) -> *const u32 {
    let panels = Panels { data: to, unit: Unit::F32, units: k.len, width: PANEL };
    for g in 0..2 {
        // SAFETY: passed on.
        unsafe { panels.pack_half(isa.tier(), w, panel, g, k.from, k.len, to) };
    }
    to
}
