//! Products on vectors: the order in which parts are computed, and where their operands are.

use super::epilogue::{Epilogue, Tile, end, finish};
use super::isa::Isa;
use super::matrix::{Block, Unit, copy_rows};
use super::narrow::NarrowPanels;
use super::packed::PackedWeights;
use super::panel::{PANEL, Panels, Right, Side, TILE};
use super::partition::{Depth, Part, block_len, grid, share, strips};
use super::vector::{self, AHEAD, Ahead, LEFT_STRIDE, Start};
use crate::cpu::array;
use crate::cpu::scratch::{self, Need, Region};
use crate::cpu::{Tier, num_threads, parallel_for, parallel_for_with_scratch};
use std::ops::Range;

/// Panels of a strip, whose units of one block of k fill half of L2: the more there are, the fewer times the left
/// operand is copied.
const WIDEST: usize = 16;
/// Blocks of rows that a strip is multiplied with before it is packed for the next block of k. Their sums leave L2 and
/// are prefetched again in time.
const KEPT: usize = 80;
/// Bytes of the right operand that are packed before they are used, per thread, where threads share them. The left
/// operand is read once for each chunk, so chunks are larger than an L2; tasks take parts of them that fit.
const CHUNK: usize = 4 << 20;
/// Blocks of rows and panels of a task of packed panels.
const LARGEST: (usize, usize) = (18, 16);
/// Fewer panels than this for each thread are packed by all threads together.
const LEAST_PANELS: usize = 2;

/// The product with packed weights, whose panels are `packed`.
///
/// # Safety
/// As for [`super::run`].
pub(super) unsafe fn packed<E: Epilogue>(x: &Side, w: &PackedWeights, packed: Panels, epilogue: &E) {
    let panel_len = w.panel_len();
    let panels = w.n().div_ceil(panel_len);
    let product = Blocked { isa: w.isa(), unit: w.unit(), left: x, len: w.n(), panel_len, epilogue };
    // SAFETY: passed on.
    unsafe { product.shared(&Right { panels: packed, panel: 0, unit: 0 }, 0..panels) };
}

/// The product with packed weights of 16 bits.
///
/// # Safety
/// As for [`super::run`].
pub(super) unsafe fn narrow<E: Epilogue>(x: &Side, w: &PackedWeights, packed: NarrowPanels, epilogue: &E) {
    let panel_len = w.panel_len();
    let product = Blocked { isa: w.isa(), unit: w.unit(), left: x, len: w.n(), panel_len, epilogue };
    // SAFETY: passed on.
    unsafe { product.made_ready(&Source::Narrow(packed)) };
}

/// The product with weights as they are.
///
/// # Safety
/// As for [`super::run`].
pub(super) unsafe fn unpacked<E: Epilogue>(isa: Isa, unit: Unit, x: &Side, w: &Side, epilogue: &E) {
    let product = Blocked { isa, unit, left: x, len: w.len(), panel_len: w.panel_len(), epilogue };
    // SAFETY: passed on.
    unsafe { product.made_ready(&Source::Rows(w)) };
}

/// What panels of the right operand are made from.
enum Source<'a> {
    /// Rows, to be transposed.
    Rows(&'a Side),
    /// Panels of 16 bits, to be widened.
    Narrow(NarrowPanels),
}

impl Source<'_> {
    /// Makes the units `from .. from + to.units` of some panels, on this thread.
    ///
    /// # Safety
    /// They must exist, and `to` have room for them.
    unsafe fn make_here(&self, tier: Tier, panels: Range<usize>, from: usize, to: &Panels) {
        // SAFETY: passed on.
        unsafe {
            match self {
                Source::Rows(side) => to.pack_here(tier, side, panels, from, to.units),
                Source::Narrow(narrow) => narrow.widen_all(tier, panels, from, to),
            }
        }
    }

    /// Makes all units of some panels, on all threads.
    ///
    /// # Safety
    /// As for [`Source::make_here`].
    unsafe fn make(&self, tier: Tier, panels: Range<usize>, to: &Panels) {
        match self {
            // SAFETY: passed on.
            Source::Rows(side) => unsafe { to.pack(tier, side, panels.start, panels.len()) },
            Source::Narrow(narrow) => parallel_for(panels.len(), 1, |part| {
                for index in part {
                    // SAFETY: passed on; each panel is written by one thread.
                    unsafe { narrow.widen(tier, panels.start + index, 0, to.units, to.at(index, 0).cast()) };
                }
            }),
        }
    }
}

/// A product of a left operand with panels of a right one of `len` outputs.
struct Blocked<'a, E> {
    isa: Isa,
    unit: Unit,
    left: &'a Side,
    len: usize,
    /// Outputs in a panel.
    panel_len: usize,
    epilogue: &'a E,
}

/// What will be packed next: `panels` of a side, from unit `from` on.
struct Upcoming<'a> {
    side: &'a Side,
    panels: Range<usize>,
    from: usize,
}

/// The memory one thread works in.
pub(super) struct Workspace {
    /// A block of rows of the left operand.
    left: *mut u32,
    /// A tile, or what a panel is packed to.
    pub spare: *mut f32,
    /// The sums of a part: one tile for each block and panel, or one for all where k is not cut.
    pub sums: *mut f32,
    /// Panels that are packed by the thread that uses them.
    strip: *mut u32,
}

impl Workspace {
    const LEFT: usize = 14 * LEFT_STRIDE;

    /// Room for `sums` sums and `units` units of a panel.
    pub fn need(sums: usize, units: usize) -> Need {
        Need::of::<u32>(Self::LEFT).and::<f32>(TILE).and::<f32>(sums).and::<u32>(units * PANEL)
    }

    /// The workspace of a thread, as large as [`Workspace::need`] says.
    pub fn new(mut region: Region<'_>, sums: usize, units: usize) -> Workspace {
        Workspace {
            left: region.slice(Self::LEFT).as_mut_ptr(),
            spare: region.slice(TILE).as_mut_ptr(),
            sums: region.slice(sums).as_mut_ptr(),
            strip: region.slice(units * PANEL).as_mut_ptr(),
        }
    }
}

impl<E: Epilogue> Blocked<'_, E> {
    fn units(&self) -> usize {
        self.unit.packed_len(self.left.k())
    }

    /// Units of k in a block.
    fn depth(&self) -> usize {
        block_len(self.units())
    }

    /// Rows of the left side in a block.
    fn block_len(&self) -> usize {
        vector::block_rows(self.isa)
    }

    /// Sums of a block and a panel.
    fn tile_len(&self) -> usize {
        self.block_len() * PANEL
    }

    /// The product with panels that have to be made first.
    ///
    /// # Safety
    /// As for [`unpacked`].
    unsafe fn made_ready(&self, source: &Source<'_>) {
        let (unit, units) = (self.unit, self.units());
        let panels = self.len.div_ceil(self.panel_len);
        if panels >= LEAST_PANELS * num_threads() {
            // SAFETY: passed on.
            return unsafe { self.strips(source, panels) };
        }
        let mut to = Panels { data: std::ptr::null_mut(), unit, units, width: PANEL };
        let at_once = (CHUNK * num_threads() / to.bytes(1).max(1)).clamp(1, panels.max(1));
        scratch::with(to.need(at_once), |mut region| {
            to.data = region.slice(at_once * to.units * PANEL).as_mut_ptr();
            for first in (0..panels).step_by(at_once) {
                let part = first..panels.min(first + at_once);
                // SAFETY: the scratch holds `at_once` panels; nobody reads them while they are made.
                unsafe {
                    source.make(self.isa.tier(), part.clone(), &to);
                    self.shared(&Right { panels: to, panel: first, unit: 0 }, part);
                }
            }
        });
    }

    /// Each thread packs strips of the weights and multiplies all rows with them: what it packed is still in its cache then,
    /// and no thread waits for another.
    ///
    /// # Safety
    /// As for [`unpacked`].
    unsafe fn strips(&self, source: &Source<'_>, panels: usize) {
        let blocks = self.left.len().div_ceil(self.block_len());
        let across = strips(panels, WIDEST);
        let width = panels.div_ceil(across);
        let depth = self.depth();
        let cuts = self.units() > depth;
        let kept = if cuts { blocks.div_ceil(blocks.div_ceil(KEPT)) } else { blocks };
        let sums = self.tile_len() * if cuts { kept * width } else { 1 };
        let need = Workspace::need(sums, width * depth);
        parallel_for_with_scratch(across, 1, need, |strips, region| {
            let space = Workspace::new(region, sums, width * depth);
            for strip in strips {
                let panels = share(panels, strip, across);
                for first in (0..blocks).step_by(kept) {
                    let blocks = first..blocks.min(first + kept);
                    let part = Part { blocks, panels: panels.clone() };
                    for k in Depth::all(self.units(), depth) {
                        let to = Panels { data: space.strip, unit: self.unit, units: k.len, width: PANEL };
                        let from = if k.last { 0 } else { k.from + k.len };
                        // Panels are read in order, which the hardware prefetcher follows.
                        let upcoming = match source {
                            Source::Rows(side) => Some(Upcoming { side, panels: panels.clone(), from }),
                            Source::Narrow(_) => None,
                        };
                        // SAFETY: the strip has room for its panels, and parts are disjoint.
                        unsafe {
                            source.make_here(self.isa.tier(), panels.clone(), k.from, &to);
                            let right = Right { panels: to, panel: panels.start, unit: k.from };
                            self.sweep(&right, &part, k, upcoming.as_ref(), &space);
                        }
                    }
                }
            }
            end(self.isa, self.epilogue);
        });
    }

    /// Threads share out blocks of the left operand and panels that are packed already.
    ///
    /// # Safety
    /// As for [`unpacked`], with `panels` packed.
    unsafe fn shared(&self, right: &Right, panels: Range<usize>) {
        let blocks = self.left.len().div_ceil(self.block_len());
        if blocks == 0 || panels.is_empty() {
            return;
        }
        let (down, across) = grid(blocks, panels.len(), self.units(), LARGEST);
        let depth = self.depth();
        let tiles = blocks.div_ceil(down) * panels.len().div_ceil(across);
        let sums = self.tile_len() * if self.units() > depth { tiles } else { 1 };
        parallel_for_with_scratch(down * across, 1, Workspace::need(sums, 0), |tasks, region| {
            let space = Workspace::new(region, sums, 0);
            for task in tasks {
                let part = Part::of_task(task, (down, across), blocks, &panels);
                for k in Depth::all(self.units(), depth) {
                    // SAFETY: tasks are disjoint, and the workspace is this thread's.
                    unsafe { self.sweep(right, &part, k, None, &space) };
                }
            }
            end(self.isa, self.epilogue);
        });
    }

    /// Multiplies all blocks of a part with all its panels over one block of k.
    ///
    /// # Safety
    /// The panels must be packed; the workspace must hold the sums of the part.
    unsafe fn sweep(
        &self,
        right: &Right,
        part: &Part,
        k: Depth,
        upcoming: Option<&Upcoming<'_>>,
        space: &Workspace,
    ) {
        let whole = k.from == 0 && k.last;
        let tile_len = if whole { 0 } else { self.tile_len() };
        let mut sums = space.sums;
        let mut rest = upcoming.map(Upcoming::rows).into_iter().flatten();
        for block in part.blocks.clone() {
            // SAFETY: the block is inside the left operand, the workspace holds it.
            let rows = unsafe { self.load_left(block, k, space) };
            let mut next = self.rows_of(block + 1, k);
            for (index, panel) in part.panels.clone().enumerate() {
                let of_left = next.len().div_ceil(part.panels.len() - index).min(AHEAD);
                let ahead = array(|slot| {
                    let row = if slot < of_left { next.next() } else { rest.next() };
                    row.unwrap_or(space.left.cast_const().cast())
                });
                let (col, cols) = self.columns(panel);
                let row = block * self.block_len();
                if k.last {
                    self.epilogue.expect(row..row + rows, col..col + cols);
                }
                let product = vector::Product {
                    rows,
                    units: k.len,
                    left: space.left,
                    right: right.at(panel, k.from),
                    right_width: PANEL as isize,
                    right_ahead: vector::PANEL_AHEAD,
                    out: sums,
                    start: Start::of_block(k.from),
                    ahead: Some(Ahead { rows: ahead, sums: sums.wrapping_add(tile_len) }),
                };
                // SAFETY: the operands hold `k.len` units and the sums a tile; each tile is finished once.
                unsafe {
                    vector::multiply(self.isa, self.unit, product);
                    if k.last {
                        let tile = Tile { sums, row, col, rows, cols };
                        finish(self.isa, tile, self.epilogue);
                    }
                }
                sums = sums.wrapping_add(tile_len);
            }
        }
    }

    /// Where the units of the rows of a block begin, if memory has them in the unit's layout.
    fn rows_of(&self, block: usize, k: Depth) -> impl ExactSizeIterator<Item = *const u8> {
        let matrix = &self.left.halves[0];
        let first = (block * self.block_len()).min(matrix.rows);
        let end =
            if matrix.is_units(self.unit) { (first + self.block_len()).min(matrix.rows) } else { first };
        (first..end).map(move |row| matrix.at(row, k.from * self.unit.elements()))
    }

    /// Copies units `from .. from + len` of a block of the left operand to the workspace and returns its rows.
    ///
    /// # Safety
    /// The block must be inside the left operand; the workspace must be this thread's.
    unsafe fn load_left(&self, block: usize, depth: Depth, space: &Workspace) -> usize {
        let unit = self.unit;
        let k = (depth.from * unit.elements()).min(self.left.k());
        let row = block * self.block_len();
        let rows = self.block_len().min(self.left.len() - row);
        let matrix = &self.left.halves[0];
        let block = Block { matrix, row, rows, k, len: (depth.len * unit.elements()).min(matrix.k - k) };
        // SAFETY: rows and elements are inside the matrix; the workspace holds them.
        unsafe { copy_rows(self.isa.tier(), unit, block, space.left, LEFT_STRIDE, depth.len) };
        rows
    }

    /// The first output of a panel, and how many it has.
    fn columns(&self, panel: usize) -> (usize, usize) {
        let first = panel * self.panel_len;
        (first, (self.len - first).min(self.panel_len))
    }
}

impl Upcoming<'_> {
    /// Where the rows begin.
    fn rows(&self) -> impl Iterator<Item = *const u8> {
        let k_bytes = self.from * size_of::<u32>();
        self.panels.clone().flat_map(move |panel| {
            (0..2).flat_map(move |g| {
                let (matrix, first, rows) = self.side.half(panel, g);
                (first..first + rows).map(move |row| matrix.at(row, 0).wrapping_add(k_bytes))
            })
        })
    }
}
