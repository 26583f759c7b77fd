//! Products on AMX tiles: a strip of the right operand stays in L2 while the left one streams past it.
//!
//! Tiles of the left operand are loaded from the matrix itself where its rows have the unit's layout, and each product
//! prefetches rows of the next block. A strip is packed by the thread that uses it, so that it never leaves that
//! thread's cache; where there are too few strips for the threads, all of them pack together and divide the blocks of
//! the left operand among themselves instead.

use super::amx::{self, Ahead, Shape, Tiles};
use super::epilogue::{Epilogue, end};
use super::isa::Isa;
use super::matrix::{Block, Matrix, Unit, copy_rows};
use super::packed::PackedWeights;
use super::panel::{HALF, PANEL, Panels, Right, Side, TILE};
use super::partition::{Depth, Part, grid, is_swapped, share};
use super::results::{Results, Unfinished};
use crate::cpu::scratch::{self, LINE, Need, Region};
use crate::cpu::{num_threads, parallel_for_with_scratch};
use std::ops::Range;

/// Units of all panels of a strip: 1 MiB, half of an L2.
const STRIP: usize = 1 << 13;
/// Panels of a strip that make it worth reading the left operand again for the next one.
const FULL: usize = 8;
/// Units of k in a block where the left operand is copied.
const COPIED_DEPTH: usize = 512;
/// Up to how many panels use rows in place even if they do not start on cache lines: each row of a tile is then two
/// loads, and a copy costs as much as a few of them.
const FEW: usize = 4;
/// Tiles whose sums are kept while k is cut: 1 MiB.
const KEPT: usize = 1 << 8;
/// Left operands up to this many bytes, or up to half the bytes of the right one, are read in full by every thread.
const SMALL: usize = 1 << 20;
/// Bytes of the right operand that are packed before they are used, per thread, where threads share them.
const CHUNK: usize = 4 << 20;
/// Steps that tiles run before vectors get a turn. Every turn costs some fifty cycles, so an epilogue that only stores
/// runs in one go.
const AT_ONCE: usize = 8;
/// Rows of the next block that a product prefetches.
const AHEAD: usize = amx::AHEAD;

/// The product with packed weights, whose panels are `packed`.
///
/// # Safety
/// As for [`super::run`], with AMX.
pub(super) unsafe fn packed<E: Epilogue>(x: &Side, w: &PackedWeights, packed: Panels, epilogue: &E) {
    let panel_len = w.panel_len();
    let panels = w.n().div_ceil(panel_len);
    let direct = is_direct(w.unit(), x, panels);
    let results = Results { left: x, len: w.n(), panel_len, swapped: false, epilogue };
    let product = Tiled { unit: w.unit(), left: x, direct, results };
    let right = Right { panels: packed, panel: 0, unit: 0 };
    // SAFETY: passed on.
    unsafe { product.shared(&right, 0..panels) }
}

/// The product with weights as they are.
///
/// # Safety
/// As for [`super::run`], with AMX.
pub(super) unsafe fn unpacked<E: Epilogue>(unit: Unit, x: &Side, w: &Side, epilogue: &E) {
    let swapped = is_swapped(x, w);
    let (left, right) = if swapped { (w, x) } else { (x, w) };
    let (panels, panel_len) = (right.panels(), right.panel_len());
    let direct = is_direct(unit, left, panels);
    let results = Results { left, len: right.len(), panel_len, swapped, epilogue };
    let product = Tiled { unit, left, direct, results };
    let units = unit.packed_len(right.k());
    let threads = num_threads();
    let bytes = |side: &Side| side.len() * side.k() * side.halves[0].dtype.size();
    let small = bytes(left) <= SMALL.max(bytes(right) / 2);
    let own = panels >= threads && (small || panels >= FULL * threads);
    // SAFETY: passed on; the scratch holds `at_once` panels, which nobody reads while they are packed.
    unsafe {
        if own {
            return product.strips(right);
        }
        let width = if swapped && right.len() <= HALF { right.len() } else { PANEL };
        let mut to = Panels { data: std::ptr::null_mut(), unit, units, width };
        let at_once = (CHUNK * threads / to.bytes(1).max(1)).clamp(1, panels.max(1));
        scratch::with(to.need(at_once), |mut region| {
            to.data = region.slice(at_once * to.units * to.width).as_mut_ptr();
            for first in (0..panels).step_by(at_once) {
                let count = at_once.min(panels - first);
                to.pack(Isa::Amx.tier(), right, first, count);
                product.shared(&Right { panels: to, panel: first, unit: 0 }, first..first + count);
            }
        });
    }
}

/// Whether tiles are loaded from the left operand itself, for products with `panels` panels.
fn is_direct(unit: Unit, left: &Side, panels: usize) -> bool {
    let lines = |m: &Matrix| (m.data as usize).is_multiple_of(LINE) && m.row_bytes() % LINE as isize == 0;
    left.k() > 0 && left.halves.iter().all(|m| m.is_units(unit) && (panels <= FEW || lines(m)))
}

/// A product of a left operand with panels of a right one.
struct Tiled<'a, E> {
    unit: Unit,
    left: &'a Side,
    /// Whether tiles are loaded from the left operand itself.
    direct: bool,
    results: Results<'a, E>,
}

/// The memory one thread works in.
struct Workspace {
    /// The last, partial step of a block of rows.
    tail: *mut u32,
    /// A tile, transposed.
    turned: *mut f32,
    /// A block of rows, where they cannot be used in place.
    copy: *mut u32,
    /// The panels of a strip that is packed by its thread.
    strip: *mut u32,
    /// The sums of a task: one tile for each block and panel, or two in turn where k is not cut.
    sums: *mut f32,
}

impl Workspace {
    const TAIL: usize = PANEL * amx::STEP;
    /// Units from one copied row to the next.
    const ROW: usize = COPIED_DEPTH + 16;
    const COPY: usize = PANEL * Self::ROW;

    /// Room for a strip of `strip` units and the sums of `tiles` tiles.
    fn need(strip: usize, tiles: usize) -> Need {
        let fixed = Need::of::<u32>(Self::TAIL).and::<f32>(TILE).and::<u32>(Self::COPY);
        fixed.and::<u32>(strip * PANEL).and::<f32>(tiles * TILE)
    }

    /// The workspace of a thread, as large as [`Workspace::need`] says.
    fn new(mut region: Region<'_>, strip: usize, tiles: usize) -> Workspace {
        Workspace {
            tail: region.slice(Self::TAIL).as_mut_ptr(),
            turned: region.slice(TILE).as_mut_ptr(),
            copy: region.slice(Self::COPY).as_mut_ptr(),
            strip: region.slice(strip * PANEL).as_mut_ptr(),
            sums: region.slice(tiles * TILE).as_mut_ptr(),
        }
    }
}

/// Rows of the left operand, ready for tiles.
struct LeftTiles {
    rows: [usize; 2],
    /// First rows and bytes between rows, for `steps` steps.
    start: [*const u8; 2],
    stride: isize,
    steps: usize,
    /// Whether one more step is in the workspace's tail.
    tail: bool,
}

impl<E: Epilogue> Tiled<'_, E> {
    fn units(&self) -> usize {
        self.unit.packed_len(self.left.k())
    }

    /// Units of k in a block, for strips of at most `panels` panels: all, or a part of about the same size as the others.
    fn depth(&self, panels: usize) -> usize {
        let most = if self.direct { STRIP / panels.clamp(1, FULL) } else { COPIED_DEPTH };
        let units = self.units().max(1);
        units.div_ceil(units.div_ceil(most)).next_multiple_of(amx::STEP)
    }

    /// Each thread packs its own strips.
    ///
    /// # Safety
    /// As for [`unpacked`].
    unsafe fn strips(&self, right: &Side) {
        let (blocks, panels, threads) = (self.left.panels(), right.panels(), num_threads());
        let depth = self.depth(panels);
        let largest = (STRIP / depth).clamp(1, panels);
        // Two per thread, if they stay full, so that a thread that is slowed down does less.
        let across = panels.div_ceil(largest).max((2 * threads).min(panels / FULL));
        let across = across.next_multiple_of(threads).min(panels);
        let cuts = self.units() > depth;
        let width = panels.div_ceil(across);
        let kept = if cuts { (KEPT / width).clamp(1, blocks.max(1)) } else { blocks.max(1) };
        let (strip_units, sums) = (width * depth, if cuts { kept * width } else { 2 });
        parallel_for_with_scratch(across, 1, Workspace::need(strip_units, sums), |strips, region| {
            let space = Workspace::new(region, strip_units, sums);
            // SAFETY: the caller promised AMX.
            let mut tiles = unsafe { Tiles::new() };
            for strip in strips {
                let panels = share(panels, strip, across);
                for first in (0..blocks).step_by(kept) {
                    let blocks = first..blocks.min(first + kept);
                    let part = Part { blocks, panels: panels.clone() };
                    for k in Depth::all(self.units(), depth) {
                        let to = Panels { data: space.strip, unit: self.unit, units: k.len, width: PANEL };
                        // SAFETY: the strip has room for its panels, and parts are disjoint.
                        unsafe {
                            to.pack_here(Isa::Amx.tier(), right, panels.clone(), k.from, k.len);
                            let right = Right { panels: to, panel: panels.start, unit: k.from };
                            self.sweep(&mut tiles, &right, &part, k, &space);
                        }
                    }
                }
            }
            end(Isa::Amx, self.results.epilogue);
        });
    }

    /// Threads share out blocks of the left operand and panels that are packed already.
    ///
    /// # Safety
    /// As for [`unpacked`], with `panels` packed.
    unsafe fn shared(&self, right: &Right, panels: Range<usize>) {
        let blocks = self.left.panels();
        if blocks == 0 || panels.is_empty() {
            return;
        }
        let depth = self.depth(panels.len());
        let cuts = self.units() > depth;
        let wide = (STRIP / depth).max(1);
        let largest = (if cuts { (KEPT / wide).max(1) } else { blocks }, wide);
        let (down, across) = grid(blocks, panels.len(), self.units(), largest);
        let tiles_of_task = blocks.div_ceil(down) * panels.len().div_ceil(across);
        let sums = if cuts { tiles_of_task } else { 2 };
        parallel_for_with_scratch(down * across, 1, Workspace::need(0, sums), |tasks, region| {
            let space = Workspace::new(region, 0, sums);
            // SAFETY: the caller promised AMX.
            let mut tiles = unsafe { Tiles::new() };
            for task in tasks {
                let part = Part::of_task(task, (down, across), blocks, &panels);
                for k in Depth::all(self.units(), depth) {
                    // SAFETY: tasks are disjoint, and the workspace is this thread's.
                    unsafe { self.sweep(&mut tiles, right, &part, k, &space) };
                }
            }
            end(Isa::Amx, self.results.epilogue);
        });
    }

    /// Multiplies all blocks of a part with all its panels over one block of k.
    ///
    /// # Safety
    /// The panels must be packed; the workspace must hold the sums of the part.
    unsafe fn sweep(&self, tiles: &mut Tiles, right: &Right, part: &Part, k: Depth, space: &Workspace) {
        let whole = k.from == 0 && k.last;
        // A tile is finished while the next one is multiplied: loading data right after it was stored stalls.
        let mut pending = Unfinished::default();
        let at_once = if self.results.epilogue.computes() { AT_ONCE } else { usize::MAX };
        for block in part.blocks.clone() {
            // SAFETY: the block is inside the left operand, the workspace holds it.
            let left = unsafe { self.load_left(block, k, space) };
            for (index, panel) in part.panels.clone().enumerate() {
                let tile = (block - part.blocks.start) * part.panels.len() + index;
                let sums = space.sums.wrapping_add(TILE * if whole { tile % 2 } else { tile });
                let ahead = if block + 1 < part.blocks.end { self.ahead(block + 1, index, k) } else { None };
                if k.last {
                    self.results.expect(block, panel);
                }
                // SAFETY: the operands hold `k.len` units and the sums a tile; each tile is finished once.
                unsafe {
                    let between = |done: usize| self.results.finish(&mut pending, done, left.steps);
                    self.multiply(tiles, &left, panel, right, sums, k.from, ahead, space, at_once, between);
                    self.results.finish(&mut pending, 1, 1);
                    if k.last {
                        pending = self.results.unfinished(block, panel, sums, space.turned);
                    }
                }
            }
        }
        // SAFETY: as above.
        unsafe { self.results.finish(&mut pending, 1, 1) };
    }

    /// The rows of a block that the product of the block before with panel `index` prefetches.
    fn ahead(&self, block: usize, index: usize, k: Depth) -> Option<Ahead> {
        let row = index * AHEAD;
        if row >= PANEL || !self.left.halves[0].is_units(self.unit) {
            return None;
        }
        let (matrix, first, _) = self.left.half(block, row / HALF);
        let start = matrix.at(first + row % HALF, k.from * self.unit.elements());
        Some(Ahead { start, stride: matrix.row_bytes() })
    }

    /// Puts units of a block of the left operand where the kernels need them.
    ///
    /// # Safety
    /// The block must be inside the left operand; the workspace must be this thread's.
    unsafe fn load_left(&self, block: usize, depth: Depth, space: &Workspace) -> LeftTiles {
        let unit = self.unit;
        let k = depth.from * unit.elements();
        let elements = (depth.len * unit.elements()).min(self.left.k() - k.min(self.left.k()));
        let copy = |matrix: &Matrix, row, rows, k, count, dst: *mut u32, stride, padded| {
            let block = Block { matrix, row, rows, k, len: count };
            // SAFETY: rows and elements are inside the matrix; the workspace holds them.
            unsafe { copy_rows(Isa::Amx.tier(), unit, block, dst, stride, padded) }
        };
        let halves = [self.left.half(block, 0), self.left.half(block, 1)];
        let rows = [halves[0].2, halves[1].2];
        let per_step = amx::STEP * unit.elements();
        if self.direct {
            let steps = elements / per_step;
            let rest = elements % per_step;
            if rest > 0 {
                for (g, (matrix, row, rows)) in halves.into_iter().enumerate() {
                    let dst = space.tail.wrapping_add(g * HALF * amx::STEP);
                    copy(matrix, row, rows, k + steps * per_step, rest, dst, amx::STEP, amx::STEP);
                }
            }
            let start =
                halves.map(|(matrix, row, rows)| if rows > 0 { matrix.at(row, k) } else { matrix.data });
            return LeftTiles { rows, start, stride: halves[0].0.row_bytes(), steps, tail: rest > 0 };
        }
        let start = [0, 1].map(|g| space.copy.wrapping_add(g * HALF * Workspace::ROW));
        for (g, (matrix, row, rows)) in halves.into_iter().enumerate() {
            copy(matrix, row, rows, k, elements, start[g], Workspace::ROW, depth.len);
        }
        let stride = (Workspace::ROW * size_of::<u32>()) as isize;
        let start = start.map(|p| p.cast_const().cast());
        LeftTiles { rows, start, stride, steps: depth.len / amx::STEP, tail: false }
    }

    /// # Safety
    /// `left` and `right` must hold what they say, `sums` a tile.
    #[allow(clippy::too_many_arguments)]
    unsafe fn multiply(
        &self,
        tiles: &mut Tiles,
        left: &LeftTiles,
        panel: usize,
        right: &Right,
        sums: *mut f32,
        from: usize,
        ahead: Option<Ahead>,
        space: &Workspace,
        at_once: usize,
        between: impl FnMut(usize),
    ) {
        let (_, count) = self.results.columns(panel);
        let width = right.panels.width;
        let right = right.at(panel, from);
        let paired = self.results.panel_len == HALF;
        let second = if paired { count } else { count.saturating_sub(HALF) };
        let product = amx::Product {
            shape: Shape { rows: left.rows, cols: [count.min(HALF), second] },
            steps: left.steps,
            left: left.start,
            left_stride: left.stride,
            right,
            right_width: width,
            out: sums,
            resume: from > 0,
        };
        // SAFETY: the caller's promise; the tail lies in the workspace.
        unsafe {
            tiles.stream(self.unit, &product, ahead, at_once, between);
            if left.tail {
                let start = [0, 1].map(|g| space.tail.wrapping_add(g * HALF * amx::STEP).cast_const().cast());
                let product = amx::Product {
                    steps: 1,
                    left: start,
                    left_stride: (amx::STEP * size_of::<u32>()) as isize,
                    right: right.wrapping_add(left.steps * amx::STEP * width),
                    resume: true,
                    ..product
                };
                tiles.multiply(self.unit, &product);
            }
        }
    }
}
