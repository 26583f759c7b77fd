//! Few rows of f32 on tiles: the weights are read once, split in L1 and used at once.

use super::narrow::NarrowWeights;
use super::operand::{Operand, STAGE, SplitProduct, split_panel};
use super::range::{Exponents, Magnitudes};
use super::recompute::Recompute;
use super::steps::{Form, Narrow, begin, narrow_step, step, store};
use super::terms::{Largest, STEP, STEP_BYTES, TERM, magnitude, magnitudes, split_columns, split_row};
use crate::cpu::gemm::amx::{Shape, Tiles};
use crate::cpu::gemm::epilogue::{Epilogue, end};
use crate::cpu::gemm::isa::Isa;
use crate::cpu::gemm::matrix::{Block, Unit, copy_rows};
use crate::cpu::gemm::packed::Packed;
use crate::cpu::gemm::panel::{HALF, PANEL, Panels, Side, TILE};
use crate::cpu::gemm::partition::Depth;
use crate::cpu::parallel_for_with_scratch;
use crate::cpu::prefetch::{LINE, fetch_line};
use crate::cpu::scratch::{self, Need, Region};
use crate::tensor::DType;
use std::arch::x86_64::*;
use std::ops::Range;

/// Steps of weights in L1: loading data right after it was stored stalls.
pub(super) const RING: usize = 2;
/// How many bytes ahead in its row a weight is prefetched.
const AHEAD: usize = 1024;
/// The same in a panel, whose rows are 32 columns.
pub(super) const PANEL_AHEAD: isize = 8 << 10;

/// The forms of a step of more than 16 rows: one tile of the weights where they are left, two where they are right.
const SWAPPED: Form = Form { tall: false, wide: true, swapped: true };
const STRAIGHT: Form = Form { tall: true, wide: true, swapped: false };

/// Few rows and weights as they are, which are the left operand.
///
/// # Safety
/// As for [`super::unpacked`]; at most [`PANEL`] rows, and weights of f32 with contiguous rows.
pub(super) unsafe fn unpacked<E: Epilogue>(product: &SplitProduct<'_, E>) {
    let Operand::Rows(x) = product.right else { unreachable!("rows are split here") };
    let (k, mut seen) = (x.k(), [0; PANEL]);
    with_rows(x, true, |rows, stage| {
        for step in 0..k.div_ceil(STEP) {
            let one = Depth { from: step, len: 1, last: true };
            // SAFETY: the scratch has room for what is staged and for the steps; AMX implies the instructions.
            unsafe {
                split_panel(&product.right, 0, one, k, rows.place(step), stage, &mut seen);
                rows.compact(step);
            }
        }
        // SAFETY: passed on.
        unsafe { stream(product, rows, &seen, &WeightRows(product.left)) };
    });
}

/// Few rows and weights in panels, which are the right operand.
///
/// # Safety
/// As for [`super::packed`]; at most [`PANEL`] rows.
pub(super) unsafe fn packed<E: Epilogue>(product: &SplitProduct<'_, E>, panels: Packed) {
    let k = product.left.k();
    // SAFETY: passed on.
    unsafe {
        with_left_rows(product.left, |rows, seen| match panels {
            Packed::Wide(panels) => stream(product, rows, seen, &WeightPanels { panels, k }),
            Packed::Narrow(panels) if panels.dtype == DType::F16 => {
                stream(product, rows, seen, &NarrowWeights::<false>(panels));
            }
            Packed::Narrow(panels) => stream(product, rows, seen, &NarrowWeights::<true>(panels)),
        });
    }
}

/// Calls `f` with the split rows of a left `x` and their largest magnitudes.
///
/// # Safety
/// AMX must be there, and at most [`PANEL`] rows be readable.
pub(super) unsafe fn with_left_rows(x: &Side, f: impl FnOnce(XTerms, &Magnitudes)) {
    let (k, mut seen) = (x.k(), [0; PANEL]);
    with_rows(x, false, |rows, stage| {
        for step in 0..k.div_ceil(STEP) {
            let from = step * STEP;
            let len = STEP.min(k - from);
            let block = Block { matrix: &x.halves[0], row: 0, rows: x.len(), k: from, len };
            // SAFETY: as above.
            unsafe {
                copy_rows(Isa::Amx.tier(), Unit::F32, block, stage.cast(), STEP, len);
                split_rows(stage, x.len(), len, rows.place(step), &mut seen);
                rows.compact(step);
            }
        }
        f(rows, &seen);
    });
}

/// The split rows of `x`, which all threads read.
///
/// Up to 16 rows are tiles of 16 pairs of k for each row, or of each row, and nothing between them, so that L1 holds
/// them.
#[derive(Copy, Clone)]
pub(super) struct XTerms {
    data: *mut u8,
    /// A step as it is split.
    loose: *mut u8,
    rows: usize,
    /// Whether the weights are left.
    swapped: bool,
}

// SAFETY: written before the loop that shares it, only read in it.
unsafe impl Sync for XTerms {}

impl XTerms {
    fn is_narrow(&self) -> bool {
        self.rows <= HALF
    }

    /// Rows of a tile, and their bytes.
    fn tile(&self) -> (usize, usize) {
        match (self.is_narrow(), self.swapped) {
            (false, _) => (HALF, 4 * HALF),
            (true, true) => (HALF, 4 * self.rows),
            (true, false) => (self.rows, 4 * HALF),
        }
    }

    /// Bytes of a term of a step.
    fn term(&self) -> usize {
        let (rows, bytes) = self.tile();
        if self.is_narrow() { rows * bytes } else { TERM }
    }

    fn step(&self, step: usize) -> *mut u8 {
        self.data.wrapping_add(step * 3 * self.term())
    }

    /// Where to split a step to.
    fn place(&self, step: usize) -> *mut u8 {
        if self.is_narrow() { self.loose } else { self.step(step) }
    }

    /// Copies a step from where it was split to where it is used.
    ///
    /// # Safety
    /// The step must have been split.
    unsafe fn compact(&self, step: usize) {
        if !self.is_narrow() {
            return;
        }
        let (rows, bytes) = self.tile();
        for term in 0..3 {
            for row in 0..rows {
                let from = self.loose.wrapping_add(term * TERM + row * 4 * HALF);
                let to = self.step(step).wrapping_add(term * self.term() + row * bytes);
                // SAFETY: both are inside what the scratch holds.
                unsafe { std::ptr::copy_nonoverlapping(from, to, bytes) };
            }
        }
    }

    /// The shape of the tiles: of one tile of the weights where they are left, of two where they are right.
    pub fn shape(&self) -> Shape {
        let x = [self.rows.min(HALF), if self.is_narrow() { 0 } else { HALF }];
        match (self.is_narrow(), self.swapped) {
            (false, _) => Shape { rows: [HALF; 2], cols: [HALF; 2] },
            (true, true) => Shape { rows: [HALF, 0], cols: x },
            (true, false) => Shape { rows: x, cols: [HALF; 2] },
        }
    }

    /// Sums that [`XTerms::store`] writes for a panel, those past its columns included.
    pub fn sums(&self) -> usize {
        PANEL * if self.is_narrow() { self.rows } else { PANEL }
    }

    /// Which sums there are.
    #[inline(always)]
    fn form(&self) -> Form {
        match (self.is_narrow(), self.swapped) {
            (true, swapped) => Form { tall: false, wide: !swapped, swapped },
            (false, true) => SWAPPED,
            (false, false) => STRAIGHT,
        }
    }

    /// Zeros the sums, or loads those at `from`.
    ///
    /// # Safety
    /// The tiles must have [`XTerms::shape`], and sums be readable.
    #[inline(always)]
    pub unsafe fn begin(&self, from: Option<*const f32>) {
        // SAFETY: passed on.
        unsafe { begin(self.form(), from) }
    }

    /// Adds the products with a step of weights.
    ///
    /// # Safety
    /// As for [`XTerms::begin`]; `weights` must hold a step.
    #[inline(always)]
    pub unsafe fn multiply(&self, index: usize, weights: *const u8) {
        let (x, swapped) = (self.step(index).cast_const(), self.swapped);
        // SAFETY: passed on.
        unsafe {
            if self.is_narrow() {
                let x = [0, 1, 2].map(|term| x.wrapping_add(term * self.term()));
                return narrow_step(Narrow { x, x_stride: self.tile().1, w: weights, swapped });
            }
            match swapped {
                true => step(SWAPPED, weights, x, || ()),
                false => step(STRAIGHT, x, weights, || ()),
            }
        }
    }

    /// Stores what [`XTerms::begin`] began.
    ///
    /// # Safety
    /// As for [`XTerms::begin`]; `sums` must hold a tile from half `g` of its rows on, and as much again.
    #[inline(always)]
    pub unsafe fn store(&self, sums: *mut f32, g: usize) {
        // SAFETY: passed on.
        unsafe { store(self.form(), sums.wrapping_add(g * HALF * PANEL)) }
    }
}

/// Calls `f` with memory for the steps of all rows, and for a step of f32.
fn with_rows(x: &Side, swapped: bool, f: impl FnOnce(XTerms, *mut f32)) {
    let mut terms =
        XTerms { data: std::ptr::null_mut(), loose: std::ptr::null_mut(), rows: x.len(), swapped };
    let bytes = x.k().div_ceil(STEP) * 3 * terms.term();
    let need = Need::of::<u8>(STEP_BYTES).and::<u8>(bytes).and::<f32>(STAGE * PANEL);
    scratch::with(need, |mut region| {
        terms.loose = region.slice(STEP_BYTES).as_mut_ptr();
        terms.data = region.slice(bytes).as_mut_ptr();
        f(terms, region.slice(STAGE * PANEL).as_mut_ptr());
    });
}

/// Splits `len` elements of rows that lie [`STEP`] apart.
///
/// # Safety
/// The rows must be readable and `dst` hold a step.
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn split_rows(rows: *const f32, count: usize, len: usize, dst: *mut u8, seen: &mut Magnitudes) {
    for (row, seen) in seen.iter_mut().enumerate().take(count) {
        // SAFETY: passed on.
        let largest =
            unsafe { split_row(rows.wrapping_add(row * STEP), len, row, dst, _mm512_setzero_si512()) };
        *seen = (*seen).max(magnitude(largest));
    }
}

/// Weights that are split step by step, piece by piece: 16 rows, or a panel. More than 16 rows are more pages than the
/// hardware prefetcher follows.
pub(super) trait Stream: Sync {
    /// Pieces in a block of 32.
    const PIECES: usize;
    /// The largest magnitudes of a piece: of its rows in turn, or of two halves.
    const SEEN: usize;

    /// Splits a step of a piece.
    ///
    /// # Safety
    /// AVX-512 must be there, `dst` hold a step, and the piece and the step be inside the weights.
    unsafe fn split(&self, piece: usize, at: usize, dst: *mut u8, seen: &mut [Largest]);

    /// The largest magnitudes of the rows of a piece of a block.
    ///
    /// # Safety
    /// AVX-512 must be there.
    unsafe fn magnitudes(&self, seen: &[Largest], of: &mut [u32]);
}

struct WeightRows<'a>(&'a Side);

impl Stream for WeightRows<'_> {
    const PIECES: usize = 2;
    const SEEN: usize = HALF;

    #[inline(always)]
    unsafe fn split(&self, piece: usize, at: usize, dst: *mut u8, seen: &mut [Largest]) {
        let k = self.0.k();
        let (matrix, first, rows) = self.0.half(piece / 2, piece % 2);
        let stride = matrix.row_bytes();
        let mut src = matrix.at(first, at);
        let left = (k - at) * size_of::<f32>();
        let ahead = if left > AHEAD {
            AHEAD as isize
        } else {
            // The rows that are needed next.
            let next = piece + 1;
            let (matrix, first, _) = self.0.half(next / 2, next % 2);
            (matrix.at(first, 0) as isize).wrapping_sub(src as isize).wrapping_add((AHEAD - left) as isize)
        };
        for (row, seen) in seen.iter_mut().enumerate().take(rows) {
            let soon = src.wrapping_offset(ahead);
            fetch_line(soon);
            fetch_line(soon.wrapping_add(LINE));
            // SAFETY: passed on; the row is inside the weights.
            *seen = unsafe { split_row(src.cast(), STEP.min(k - at), row, dst, *seen) };
            src = src.wrapping_offset(stride);
        }
    }

    #[inline(always)]
    unsafe fn magnitudes(&self, seen: &[Largest], of: &mut [u32]) {
        for (of, &seen) in of.iter_mut().zip(seen) {
            // SAFETY: passed on.
            *of = unsafe { magnitude(seen) };
        }
    }
}

struct WeightPanels {
    panels: Panels,
    k: usize,
}

impl Stream for WeightPanels {
    const PIECES: usize = 1;
    const SEEN: usize = 2;

    #[inline(always)]
    unsafe fn split(&self, piece: usize, at: usize, dst: *mut u8, seen: &mut [Largest]) {
        let src = self.panels.at(piece, at).cast::<f32>().cast_const();
        for (g, seen) in seen.iter_mut().enumerate() {
            let src = src.wrapping_add(g * HALF);
            // SAFETY: passed on; the panel holds the elements.
            *seen = unsafe { split_columns(src, (PANEL, PANEL_AHEAD), STEP.min(self.k - at), g, dst, *seen) };
        }
    }

    #[inline(always)]
    unsafe fn magnitudes(&self, seen: &[Largest], of: &mut [u32]) {
        // SAFETY: passed on.
        unsafe { panel_magnitudes(seen, of) };
    }
}

/// The largest magnitudes of the columns of a panel, given those of its halves.
///
/// # Safety
/// AVX-512 must be there, and `of` have room for each half.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
pub(super) unsafe fn panel_magnitudes(seen: &[Largest], of: &mut [u32]) {
    for (of, &seen) in of.chunks_mut(HALF).zip(seen) {
        // SAFETY: the magnitudes of half a panel are one vector.
        unsafe { _mm512_storeu_si512(of.as_mut_ptr().cast(), magnitudes(seen)) };
    }
}

/// # Safety
/// As for [`super::run`], with AMX; `rows` must hold all steps of `x`.
unsafe fn stream<E: Epilogue, S: Stream>(
    product: &SplitProduct<'_, E>,
    rows: XTerms,
    rows_seen: &Magnitudes,
    weights: &S,
) {
    let k = product.left.k();
    let blocks = match product.results.swapped {
        true => product.left.panels(),
        false => product.results.len.div_ceil(product.results.panel_len),
    };
    if product.left.len() == 0 || product.results.len == 0 {
        return;
    }
    let grain = (1 << 12) / k.max(1) + 1;
    parallel_for_with_scratch(blocks, grain, Workspace::NEED, |range, region| {
        let mut space = Workspace::new(region);
        // SAFETY: the caller promised AMX, which implies the instructions; the scratch is this thread's.
        unsafe {
            let mut tiles = Tiles::new();
            tiles.configure(rows.shape());
            multiply(product, &rows, rows_seen, weights, range, &mut space);
        }
        end(Isa::Amx, product.results.epilogue);
    });
}

/// The memory one thread works in.
struct Workspace {
    ring: *mut u8,
    /// A tile, transposed.
    turned: *mut f32,
    sums: *mut f32,
    recompute: Recompute,
}

impl Workspace {
    const RING: usize = RING * STEP_BYTES;
    /// The second half of the sums is stored as a whole tile.
    const SUMS: usize = 2 * TILE;
    const NEED: Need =
        Need::of::<u8>(Self::RING).and::<f32>(TILE).and::<f32>(Self::SUMS).plus(Recompute::NEED);

    fn new(mut region: Region<'_>) -> Workspace {
        Workspace {
            ring: region.slice(Self::RING).as_mut_ptr(),
            turned: region.slice(TILE).as_mut_ptr(),
            sums: region.slice(Self::SUMS).as_mut_ptr(),
            recompute: Recompute::new(&mut region),
        }
    }
}

/// Multiplies some blocks of the weights with all rows.
///
/// # Safety
/// As for [`stream`], with tiles configured; the workspace must be this thread's.
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn multiply<E: Epilogue, S: Stream>(
    product: &SplitProduct<'_, E>,
    rows: &XTerms,
    rows_seen: &Magnitudes,
    weights: &S,
    blocks: Range<usize>,
    space: &mut Workspace,
) {
    let k = product.left.k();
    let steps = k.div_ceil(STEP);
    let Workspace { ring, turned, sums, ref mut recompute } = *space;
    let slot = |position: usize| ring.wrapping_add(position % RING * STEP_BYTES);
    let swapped = product.results.swapped;
    let rows_exponents = Exponents::of(rows_seen);
    // What is split and what is multiplied lie less than a ring apart, in steps and so in pieces.
    let mut seen = [[_mm512_setzero_si512(); HALF]; RING];
    let (mut ahead_piece, mut ahead_step) = (blocks.start * S::PIECES, 0);
    let mut split_next = |position: usize, seen: &mut [[Largest; HALF]; RING]| {
        if ahead_piece < blocks.end * S::PIECES && steps > 0 {
            let seen = &mut seen[ahead_piece % RING][..S::SEEN];
            if ahead_step == 0 {
                seen.fill(_mm512_setzero_si512());
            }
            // SAFETY: the piece and the step exist, the ring has room for a step.
            unsafe { weights.split(ahead_piece, ahead_step * STEP, slot(position), seen) };
            ahead_step += 1;
            if ahead_step == steps {
                (ahead_piece, ahead_step) = (ahead_piece + 1, 0);
            }
        }
    };
    for position in 0..RING - 1 {
        split_next(position, &mut seen);
    }
    let mut position = 0;
    for block in blocks.clone() {
        let (left, right) = if swapped { (block, 0) } else { (0, block) };
        product.results.expect(left, right);
        let mut weights_seen = [0; PANEL];
        // SAFETY: the ring and the rows hold the steps; each tile is finished once.
        unsafe {
            for g in 0..S::PIECES {
                rows.begin(None);
                for index in 0..steps {
                    rows.multiply(index, slot(position));
                    split_next(position + RING - 1, &mut seen);
                    position += 1;
                }
                rows.store(sums, g);
                let seen = &seen[(block * S::PIECES + g) % RING][..S::SEEN];
                weights.magnitudes(seen, &mut weights_seen[g * HALF..]);
            }
            let weights_exponents = Exponents::of(&weights_seen);
            let (of_weights, of_rows) = ((&weights_seen, weights_exponents), (rows_seen, rows_exponents));
            let is_needed = match swapped {
                true => Recompute::is_needed(k, of_weights, of_rows, sums),
                false => Recompute::is_needed(k, of_rows, of_weights, sums),
            };
            if is_needed {
                let (left_seen, right_seen) =
                    if swapped { (&weights_seen, rows_seen) } else { (rows_seen, &weights_seen) };
                recompute.tile((product.left, left, left_seen), (&product.right, right, right_seen), sums);
            }
            let mut pending = product.results.unfinished(left, right, sums, turned);
            product.results.finish(&mut pending, 1, 1);
        }
    }
}
