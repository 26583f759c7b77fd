//! Few rows of f32 on tiles, times weights whose columns are contiguous: `dz · w`, the gradient of a linear layer's input.
//!
//! A line of such weights is one element of k of all outputs, and a panel has 128 bytes of it. So that memory is not
//! read in such small pieces, a thread takes a wide strip of panels one step of k at a time: it goes along 32 lines at
//! once. Columns are split in place: nothing is packed.

use super::few::{RING, XTerms, panel_magnitudes, with_left_rows};
use super::operand::SplitProduct;
use super::range::{Exponents, Magnitudes};
use super::recompute::Recompute;
use super::terms::{Largest, STEP, STEP_BYTES, split_columns};
use crate::cpu::gemm::amx::Tiles;
use crate::cpu::gemm::epilogue::{Epilogue, end};
use crate::cpu::gemm::isa::Isa;
use crate::cpu::gemm::matrix::Unit;
use crate::cpu::gemm::panel::{HALF, PANEL, Panels, Side, TILE};
use crate::cpu::gemm::partition::{share, strips};
use crate::cpu::parallel_for_with_scratch;
use crate::cpu::scratch::{Need, Region};
use std::arch::x86_64::*;
use std::ops::Range;

/// The most panels of a strip. The run read of a line is far longer than the prefetch distance.
const WIDEST: usize = 64;
/// How many panels ahead of the one being split to prefetch.
const AHEAD: usize = 8;

/// The product with `w`, the right operand.
///
/// # Safety
/// As for [`super::unpacked`]; at most [`PANEL`] rows, and weights that [`Side::lies_in_columns`].
pub(super) unsafe fn run<E: Epilogue>(product: &SplitProduct<'_, E>, w: &Side) {
    if product.left.len() == 0 || w.len() == 0 {
        return;
    }
    let panels = w.panels();
    let across = strips(panels, WIDEST);
    let grain = (1 << 12) / (w.k() * panels.div_ceil(across)) + 1;
    // SAFETY: passed on; AMX implies the instructions, and the scratch is each thread's own.
    unsafe {
        with_left_rows(product.left, |rows, rows_seen| {
            parallel_for_with_scratch(across, grain, Workspace::NEED, |range, region| {
                let mut space = Workspace::new(region);
                let mut tiles = Tiles::new();
                tiles.configure(rows.shape());
                for strip in range {
                    let strip = Strip { w, panels: share(panels, strip, across) };
                    multiply(product, (&rows, rows_seen), &strip, &mut space);
                }
                end(Isa::Amx, product.results.epilogue);
            });
        });
    }
}

/// The memory one thread works in.
struct Workspace {
    ring: *mut u8,
    /// A step of a panel that is not whole.
    stage: *mut f32,
    /// The rows of a tile for each panel.
    sums: *mut f32,
    /// A tile that is computed anew.
    spare: *mut f32,
    recompute: Recompute,
}

impl Workspace {
    const RING: usize = RING * STEP_BYTES;
    const STAGE: usize = STEP * PANEL;
    const SUMS: usize = WIDEST * TILE;
    const NEED: Need = Need::of::<u8>(Self::RING)
        .and::<f32>(Self::STAGE)
        .and::<f32>(Self::SUMS)
        .and::<f32>(TILE)
        .plus(Recompute::NEED);

    fn new(mut region: Region<'_>) -> Workspace {
        Workspace {
            ring: region.slice(Self::RING).as_mut_ptr(),
            stage: region.slice(Self::STAGE).as_mut_ptr(),
            sums: region.slice(Self::SUMS).as_mut_ptr(),
            spare: region.slice(TILE).as_mut_ptr(),
            recompute: Recompute::new(&mut region),
        }
    }
}

/// Some panels of the weights, at most [`WIDEST`].
struct Strip<'a> {
    w: &'a Side,
    panels: Range<usize>,
}

impl Strip<'_> {
    fn steps(&self) -> usize {
        self.w.k().div_ceil(STEP)
    }

    /// Bytes from a step of a panel to the one prefetched with it: further along the lines, on the lines that follow,
    /// or in the next strip.
    fn ahead(&self, index: usize, step: usize) -> isize {
        let (width, matrix) = (self.panels.len(), &self.w.halves[0]);
        let (panel, lines) = match index + AHEAD {
            next if next < width => (next, 0),
            next if step + 1 < self.steps() => (next % width, STEP as isize),
            next => (width + next % width, -((step * STEP) as isize)),
        };
        let columns = (panel as isize - index as isize) * PANEL as isize;
        (columns + lines * matrix.k_stride) * size_of::<f32>() as isize
    }

    /// Splits a step of a panel to `dst`.
    ///
    /// # Safety
    /// The panel and the step must exist, `dst` hold a step and `stage` its elements.
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn split(
        &self,
        (index, step): (usize, usize),
        dst: *mut u8,
        stage: *mut f32,
        seen: &mut [Largest; 2],
    ) {
        let (panel, from) = (self.panels.start + index, step * STEP);
        let matrix = &self.w.halves[0];
        let len = STEP.min(matrix.k - from);
        let is_whole = (panel + 1) * PANEL <= matrix.rows;
        let (src, apart) = if is_whole {
            (matrix.at(panel * PANEL, from).cast(), (matrix.k_stride as usize, self.ahead(index, step)))
        } else {
            let panels = Panels { data: stage.cast(), unit: Unit::F32, units: len, width: PANEL };
            for g in 0..2 {
                // SAFETY: the stage holds a step.
                unsafe { panels.pack_half(Isa::Amx.tier(), self.w, panel, g, from, len, stage.cast()) };
            }
            (stage.cast_const(), (PANEL, 0))
        };
        for (g, seen) in seen.iter_mut().enumerate() {
            // SAFETY: the panel is whole, or the stage holds it.
            *seen = unsafe { split_columns(src.wrapping_add(g * HALF), apart, len, g, dst, *seen) };
        }
    }
}

/// Multiplies all rows with a strip.
///
/// # Safety
/// As for [`run`], with tiles configured; the workspace must be this thread's.
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn multiply<E: Epilogue>(
    product: &SplitProduct<'_, E>,
    (rows, rows_seen): (&XTerms, &Magnitudes),
    strip: &Strip<'_>,
    space: &mut Workspace,
) {
    let Workspace { ring, stage, sums, spare, ref mut recompute } = *space;
    let slot = |position: usize| ring.wrapping_add(position % RING * STEP_BYTES);
    let rows_exponents = Exponents::of(rows_seen);
    let (width, turns) = (strip.panels.len(), strip.panels.len() * strip.steps());
    let mut seen = [[_mm512_setzero_si512(); 2]; WIDEST];
    // Panel and step of a turn: all panels of a step, then those of the next.
    let split = |turn: usize, seen: &mut [[Largest; 2]; WIDEST]| {
        if turn < turns {
            let (index, step) = (turn % width, turn / width);
            // SAFETY: the turn is one of the strip, and the ring has room for a step.
            unsafe { strip.split((index, step), slot(turn), stage, &mut seen[index]) };
        }
    };
    for turn in 0..RING - 1 {
        split(turn, &mut seen);
    }
    for turn in 0..turns {
        let (index, step) = (turn % width, turn / width);
        let sums = sums.wrapping_add(index * rows.sums());
        // SAFETY: the ring and the rows hold the step, and the sums those of each panel, which is finished once.
        unsafe {
            rows.begin((step > 0).then_some(sums.cast_const()));
            rows.multiply(step, slot(turn));
            split(turn + RING - 1, &mut seen);
            rows.store(sums, 0);
            if step + 1 < strip.steps() {
                continue;
            }
            let (panel, mut sums, mut panel_seen) = (strip.panels.start + index, sums, [0; PANEL]);
            panel_magnitudes(&seen[index], &mut panel_seen);
            let panel_exponents = Exponents::of(&panel_seen);
            let of_rows = (rows_seen, rows_exponents);
            if Recompute::is_needed(strip.w.k(), of_rows, (&panel_seen, panel_exponents), sums) {
                std::ptr::copy_nonoverlapping(sums, spare, rows.sums());
                sums = spare;
                let right = (&product.right, panel, &panel_seen);
                recompute.tile((product.left, 0, rows_seen), right, sums);
            }
            let mut pending = product.results.unfinished(0, panel, sums, std::ptr::null_mut());
            product.results.finish(&mut pending, 1, 1);
        }
    }
}
