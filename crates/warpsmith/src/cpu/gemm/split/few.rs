//! Few rows of f32 on tiles: the weights are read once, split in the first cache and used at once.

use super::mend::{Exponents, Magnitudes, Mender};
use super::planes::{Largest, STEP, STEP_BYTES, split_columns, split_row};
use super::steps::{begin, step, store};
use super::{Operand, STAGE, SplitProduct, split_panel};
use crate::cpu::gemm::amx::Tiles;
use crate::cpu::gemm::buffer::{Slot, with_scratch};
use crate::cpu::gemm::drive::{Depth, TILE, end};
use crate::cpu::gemm::epilogue::Epilogue;
use crate::cpu::gemm::isa::Isa;
use crate::cpu::gemm::matrix::{Block, Unit, copy_rows};
use crate::cpu::gemm::panel::{HALF, PANEL, Panels, Side};
use crate::cpu::parallel_for;
use crate::cpu::prefetch::{LINE, fetch_line};
use std::arch::x86_64::*;
use std::ops::Range;

/// Steps of weights in the first cache: what was stored a moment ago cannot be loaded at once.
const RING: usize = 4;
/// How many bytes ahead in its row a weight is asked for.
const AHEAD: usize = 1024;

/// Few rows and weights as they are, which are the left operand.
///
/// # Safety
/// As for [`super::unpacked`]; at most [`PANEL`] rows, and weights of f32 with contiguous rows.
pub(super) unsafe fn unpacked<E: Epilogue>(product: &SplitProduct<'_, E>) {
    let Operand::Rows(x) = product.right else { unreachable!("rows are split here") };
    let steps = x.k().div_ceil(STEP);
    let mut seen = [0; PANEL];
    with_rows(steps, |planes, stage| {
        let k = Depth { from: 0, len: steps, last: true };
        // SAFETY: the scratch has room for the steps of a panel; AMX implies the instructions.
        unsafe { split_panel(&product.right, 0, k, x.k(), planes, stage, &mut seen) };
        // SAFETY: passed on.
        unsafe { stream(product, planes, &seen, &WeightRows(product.left)) };
    });
}

/// Few rows and weights in panels, which are the right operand.
///
/// # Safety
/// As for [`super::packed`]; at most [`PANEL`] rows.
pub(super) unsafe fn packed<E: Epilogue>(product: &SplitProduct<'_, E>, panels: Panels) {
    let x = product.left;
    let (k, steps) = (x.k(), x.k().div_ceil(STEP));
    let mut seen = [0; PANEL];
    with_rows(steps, |planes, stage| {
        for from in (0..k).step_by(STAGE) {
            let len = STAGE.min(k - from);
            let block = Block { matrix: &x.halves[0], row: 0, rows: x.len(), k: from, len };
            let planes = planes.wrapping_add(from / STEP * STEP_BYTES);
            // SAFETY: the stage has room for the elements of all rows, the planes for their steps.
            unsafe {
                copy_rows(Isa::Amx.tier(), Unit::F32, block, stage.cast(), STAGE, len);
                split_rows(stage, x.len(), len, planes, &mut seen);
            }
        }
        // SAFETY: passed on.
        unsafe { stream(product, planes, &seen, &WeightPanels { panels, k }) };
    });
}

/// Calls `f` with room for the steps of all rows, and for a stage.
fn with_rows(steps: usize, f: impl FnOnce(*mut u8, *mut f32)) {
    let planes = steps * STEP_BYTES;
    with_scratch(Slot::Shared, planes + STAGE * PANEL * size_of::<f32>(), |scratch| {
        f(scratch, scratch.wrapping_add(planes).cast());
    });
}

/// Splits `len` elements of rows that lie [`STAGE`] apart.
///
/// # Safety
/// The rows must be readable and `dst` hold their steps.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn split_rows(rows: *const f32, count: usize, len: usize, dst: *mut u8, seen: &mut Magnitudes) {
    for (row, seen) in seen.iter_mut().enumerate().take(count) {
        let mut largest = _mm512_setzero_si512();
        for from in (0..len).step_by(STEP) {
            let src = rows.wrapping_add(row * STAGE + from);
            let dst = dst.wrapping_add(from / STEP * STEP_BYTES);
            // SAFETY: passed on.
            largest = unsafe { split_row(src, STEP.min(len - from), row, dst, largest) };
        }
        *seen = (*seen).max(_mm512_reduce_max_epu32(largest));
    }
}

/// Weights that are split step by step: blocks of rows, or panels.
trait Stream: Sync {
    /// What is seen of a block: the largest magnitudes by lane, of one row after another or of two halves.
    const SEEN: usize;

    /// Splits a step of a block.
    ///
    /// # Safety
    /// AVX-512 with BF16 must be there, `dst` hold a step, and block and step be inside the weights.
    unsafe fn split(&self, block: usize, at: usize, dst: *mut u8, seen: &mut [Largest]);

    /// The largest magnitudes of a block's rows.
    ///
    /// # Safety
    /// AVX-512 must be there.
    unsafe fn magnitudes(&self, seen: &[Largest]) -> Magnitudes;
}

struct WeightRows<'a>(&'a Side);

impl Stream for WeightRows<'_> {
    const SEEN: usize = PANEL;

    #[inline(always)]
    unsafe fn split(&self, block: usize, at: usize, dst: *mut u8, seen: &mut [Largest]) {
        let k = self.0.k();
        let len = STEP.min(k - at);
        for g in 0..2 {
            let (matrix, first, rows) = self.0.half(block, g);
            let stride = matrix.row_bytes();
            let mut src = matrix.at(first, at);
            // To the rows that are needed next where this one ends.
            let left = (k - at) * size_of::<f32>();
            let ahead = match left > AHEAD {
                true => AHEAD as isize,
                false => {
                    self.0.panel_len() as isize * stride + AHEAD as isize - (k * size_of::<f32>()) as isize
                }
            };
            for row in 0..rows {
                let soon = src.wrapping_offset(ahead);
                fetch_line(soon);
                fetch_line(soon.wrapping_add(LINE));
                let lane = g * HALF + row;
                // SAFETY: passed on; the row is inside the weights.
                seen[lane] = unsafe { split_row(src.cast(), len, lane, dst, seen[lane]) };
                src = src.wrapping_offset(stride);
            }
        }
    }

    #[inline(always)]
    unsafe fn magnitudes(&self, seen: &[Largest]) -> Magnitudes {
        // SAFETY: passed on.
        std::array::from_fn(|lane| unsafe { _mm512_reduce_max_epu32(seen[lane]) })
    }
}

struct WeightPanels {
    panels: Panels,
    k: usize,
}

impl Stream for WeightPanels {
    const SEEN: usize = 2;

    #[inline(always)]
    unsafe fn split(&self, block: usize, at: usize, dst: *mut u8, seen: &mut [Largest]) {
        let src = self.panels.at(block, at).cast::<f32>().cast_const();
        for line in 0..STEP * PANEL * size_of::<f32>() / LINE {
            fetch_line(src.cast::<u8>().wrapping_add(AHEAD * HALF / 2 + line * LINE));
        }
        for (g, seen) in seen.iter_mut().enumerate() {
            // SAFETY: passed on; the panel holds the elements.
            *seen = unsafe {
                split_columns(src.wrapping_add(g * HALF), PANEL, STEP.min(self.k - at), g, dst, *seen)
            };
        }
    }

    #[inline(always)]
    unsafe fn magnitudes(&self, seen: &[Largest]) -> Magnitudes {
        let mut all = [0; PANEL];
        for (g, &seen) in seen.iter().enumerate() {
            // SAFETY: half a block's magnitudes are one vector.
            unsafe { _mm512_storeu_si512(all[g * HALF..].as_mut_ptr().cast(), seen) };
        }
        all
    }
}

/// The split rows of `x`, which all threads read.
#[derive(Copy, Clone)]
struct Shared(*const u8);

// SAFETY: written before the loop that shares it, only read in it.
unsafe impl Sync for Shared {}

impl Shared {
    fn at(&self, step: usize) -> *const u8 {
        self.0.wrapping_add(step * STEP_BYTES)
    }
}

/// # Safety
/// As for [`super::run`], with AMX; `rows` must hold all steps of `x`.
unsafe fn stream<E: Epilogue, S: Stream>(
    product: &SplitProduct<'_, E>,
    rows: *const u8,
    rows_seen: &Magnitudes,
    weights: &S,
) {
    let (rows, k) = (Shared(rows), product.left.k());
    let blocks = match product.results.swapped {
        true => product.left.panels(),
        false => product.results.len.div_ceil(product.results.panel_len),
    };
    if product.left.len() == 0 || product.results.len == 0 {
        return;
    }
    let grain = (1 << 12) / k.max(1) + 1;
    parallel_for(blocks, grain, |range| {
        let bytes = RING * STEP_BYTES + 2 * TILE * size_of::<f32>();
        with_scratch(Slot::Own, bytes, |scratch| {
            // SAFETY: the caller promised AMX, which implies the instructions; the scratch is this thread's.
            unsafe {
                let mut tiles = Tiles::new();
                tiles.configure_whole();
                multiply(product, &rows, rows_seen, weights, range, scratch);
            }
            end(Isa::Amx, product.results.epilogue);
        });
    });
}

/// Multiplies some blocks of the weights with all rows.
///
/// # Safety
/// As for [`stream`], with tiles configured; the scratch must hold the ring and two tiles.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn multiply<E: Epilogue, S: Stream>(
    product: &SplitProduct<'_, E>,
    rows: &Shared,
    rows_seen: &Magnitudes,
    weights: &S,
    blocks: Range<usize>,
    scratch: *mut u8,
) {
    let k = product.left.k();
    let steps = k.div_ceil(STEP);
    let sums = scratch.wrapping_add(RING * STEP_BYTES).cast::<f32>();
    let turned = sums.wrapping_add(TILE);
    let slot = |position: usize| scratch.wrapping_add(position % RING * STEP_BYTES);
    let swapped = product.results.swapped;
    let mut mender = Mender::default();
    let rows_exponents = Exponents::of(rows_seen);
    // What is split and what is multiplied lie less than a ring apart, in steps and so in blocks.
    let mut seen = [[_mm512_setzero_si512(); PANEL]; RING];
    let (mut ahead_block, mut ahead_step) = (blocks.start, 0);
    let mut split_next = |position: usize, seen: &mut [[Largest; PANEL]; RING]| {
        if ahead_block < blocks.end && steps > 0 {
            let seen = &mut seen[ahead_block % RING][..S::SEEN];
            if ahead_step == 0 {
                seen.fill(_mm512_setzero_si512());
            }
            // SAFETY: the block and the step exist, the ring has room for a step.
            unsafe { weights.split(ahead_block, ahead_step * STEP, slot(position), seen) };
            ahead_step += 1;
            if ahead_step == steps {
                (ahead_block, ahead_step) = (ahead_block + 1, 0);
            }
        }
    };
    for position in 0..RING - 1 {
        split_next(position, &mut seen);
    }
    let mut position = 0;
    for block in blocks.clone() {
        let (left, right) = if swapped { (block, 0) } else { (0, block) };
        let form = product.form(left, right);
        product.results.expect(left, right);
        // SAFETY: the ring and the rows hold the steps; each tile is finished once.
        unsafe {
            begin(None);
            for index in 0..steps {
                let (weights, rows) = (slot(position).cast_const(), rows.at(index));
                if swapped {
                    step(form, weights, rows)
                } else {
                    step(form, rows, weights)
                }
                split_next(position + RING - 1, &mut seen);
                position += 1;
            }
            store(sums);
            let weights_seen = weights.magnitudes(&seen[block % RING][..S::SEEN]);
            if !Exponents::of(&weights_seen).fits(rows_exponents) {
                let (left_seen, right_seen) =
                    if swapped { (&weights_seen, rows_seen) } else { (rows_seen, &weights_seen) };
                mender.mend((product.left, left, left_seen), (&product.right, right, right_seen), sums);
            }
            let mut pending = product.results.unfinished(left, right, sums, turned);
            product.results.finish(&mut pending, 1, 1);
        }
    }
}
