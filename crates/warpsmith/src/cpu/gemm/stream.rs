//! Few rows on vectors: the weights are read once, where they are.

use super::blocked::Workspace;
#[cfg(target_arch = "x86_64")]
use super::dot;
use super::epilogue::{Epilogue, Tile, end, finish};
use super::isa::Isa;
use super::matrix::{Block, Unit, copy_rows};
use super::panel::{PANEL, Panels, Side, TILE};
use super::partition::block_len;
use super::vector::{self, LEFT_STRIDE, Start, add_block};
use crate::cpu::scratch::{self, Need};
use crate::cpu::{Tier, parallel_for_with_scratch};

/// Units of a panel that are packed at once for few rows: L1 holds them beside what they are made from.
const STREAM_BLOCK: usize = 128;

/// The product of few rows on vectors: each panel is packed in L1 and used once, so that the weights are read once and
/// nothing else goes to memory.
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
    if rows == 0 {
        return;
    }
    let multiply = |left: &Left| {
        let grain = (1 << 12) / panels.units.max(1) + 1;
        // A part of a panel, and the sums of a block of k.
        let room = STREAM_BLOCK * PANEL + TILE;
        let need = Workspace::need(room, 0);
        parallel_for_with_scratch(w.panels(), grain, need, |range, region| {
            let space = Workspace::new(region, room, 0);
            let right = space.sums.cast::<u32>();
            let (sums, block_sums) = (space.spare, space.sums.wrapping_add(STREAM_BLOCK * PANEL));
            for panel in range {
                let mut from = 0;
                loop {
                    let within = from % left.depth;
                    let len = STREAM_BLOCK.min(left.depth - within).min(panels.units - from);
                    let out = if from < left.depth { sums } else { block_sums };
                    // SAFETY: the workspace holds STREAM_BLOCK units of a panel; the left blocks are packed.
                    unsafe {
                        for g in 0..2 {
                            panels.pack_half(isa.tier(), w, panel, g, from, len, right);
                        }
                        let product = vector::Product {
                            rows,
                            units: len,
                            left: left.at(from),
                            right,
                            right_width: PANEL as isize,
                            right_ahead: vector::PANEL_AHEAD,
                            out,
                            start: Start::resuming(within > 0),
                            ahead: None,
                        };
                        vector::multiply(isa, unit, product);
                        from += len;
                        if out != sums && (from.is_multiple_of(left.depth) || from == panels.units) {
                            add_block(sums, block_sums, rows);
                        }
                    }
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
    };
    // SAFETY: passed on.
    unsafe { with_left(isa, unit, x, multiply) };
}

/// Whether weights are used in place, without a panel.
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

/// The rows of a left operand as units, side by side in blocks of k, which all threads read.
pub(super) struct Left {
    data: *mut u32,
    /// From a block to the next.
    block: usize,
    /// Units of k in a block.
    pub depth: usize,
}

// SAFETY: written before the loop that shares it, only read in it.
unsafe impl Sync for Left {}

impl Left {
    /// A unit of the first row; the block goes on up to the next multiple of `depth`.
    pub fn at(&self, unit: usize) -> *const u32 {
        self.data.wrapping_add(unit / self.depth * self.block + unit % self.depth)
    }
}

/// Calls `f` with the rows of `x`.
///
/// # Safety
/// The matrix must be readable, and have at most one block of rows.
pub(super) unsafe fn with_left(isa: Isa, unit: Unit, x: &Side, f: impl FnOnce(&Left)) {
    let units = unit.packed_len(x.k());
    let depth = block_len(units);
    let (blocks, block) = (units.div_ceil(depth), vector::block_rows(isa) * LEFT_STRIDE);
    scratch::with(Need::of::<u32>(blocks * block), |mut region| {
        let left = Left { data: region.slice(blocks * block).as_mut_ptr(), block, depth };
        for from in (0..units).step_by(depth) {
            let k = from * unit.elements();
            let units = depth.min(units - from);
            let len = (x.k() - k.min(x.k())).min(units * unit.elements());
            let rows = Block { matrix: &x.halves[0], row: 0, rows: x.len(), k, len };
            let to = left.at(from).cast_mut();
            // SAFETY: the scratch holds all blocks; the elements are inside x.
            unsafe { copy_rows(isa.tier(), unit, rows, to, LEFT_STRIDE, units) };
        }
        f(&left);
    });
}
