//! Blocks and threads on vectors: which part of a product is computed when, and where its operands are at that time.

use super::buffer::{Slot, with_scratch};
use super::epilogue::{Epilogue, Tile};
use super::isa::Isa;
use super::matrix::{Block, Unit, copy_rows};
use super::panel::{HALF, PANEL, PackedWeights, Panels, Side};
use super::vector::{self, LEFT_STRIDE};
use crate::cpu::{Simd, Task, dispatch, num_threads, parallel_for};
use std::ops::Range;

/// Sums of one tile.
pub(super) const TILE: usize = PANEL * PANEL;
/// Units of k in a block on vectors: 14 rows of the left operand stay in the first cache.
pub(super) const VECTOR_BLOCK: usize = 512;
/// Bytes of the right operand that are packed before they are used, per thread. The left operand is read once for each
/// chunk, so chunks are larger than a second cache; tasks take parts of them that fit.
const CHUNK: usize = 4 << 20;
/// Blocks of rows and panels of a task: its panels (of one block of k) then fill a quarter of the second cache, and so do its
/// sums.
const LARGEST: (usize, usize) = (18, 8);
/// Bytes of a strip that one thread packs: they are kept from call to call.
const STRIP: usize = 16 << 20;
/// Panels of a strip that make it worth copying the rows again for the next one.
const FULL: usize = 8;
/// Fewer panels than this for each thread are packed by all threads together.
const LEAST_PANELS: usize = 2;

/// The product with packed weights.
///
/// # Safety
/// The matrix of `x` must be readable and `epilogue` be able to store the product.
pub(super) unsafe fn packed<E: Epilogue>(x: &Side, w: &PackedWeights, epilogue: &E) {
    // SAFETY: passed on.
    unsafe {
        if is_on_tiles(w.isa(), w.unit()) {
            return super::tiles::packed(x, w, epilogue);
        }
        let panel_len = if w.is_gated() { HALF } else { PANEL };
        let right = Right { panels: w.panels(), first: 0, len: w.n(), panel_len };
        Blocked { isa: w.isa(), left: x, right, epilogue }.run();
    }
}

/// The product with weights as they are.
///
/// # Safety
/// The matrices must be readable and `epilogue` be able to store the product.
pub(super) unsafe fn unpacked<E: Epilogue>(isa: Isa, unit: Unit, x: &Side, w: &Side, epilogue: &E) {
    // SAFETY: passed on.
    unsafe {
        if is_on_tiles(isa, unit) {
            return super::tiles::unpacked(unit, x, w, epilogue);
        }
        if x.len() <= vector::block_rows(isa) {
            return super::stream::run(isa, unit, x, w, epilogue);
        }
    }
    let mut panels = Panels { data: std::ptr::null_mut(), unit, units: unit.packed_len(w.k()), width: PANEL };
    if w.panels() >= LEAST_PANELS * num_threads() {
        // SAFETY: passed on.
        return unsafe { strips(isa, panels, x, w, epilogue) };
    }
    let at_once = (CHUNK * num_threads() / panels.bytes(1).max(1)).clamp(1, w.panels().max(1));
    with_scratch(Slot::Shared, panels.bytes(at_once), |scratch| {
        panels.data = scratch.cast();
        let mut panel = 0;
        while panel < w.panels() {
            let count = at_once.min(w.panels() - panel);
            let first = panel * w.panel_len();
            let len = (w.len() - first).min(count * w.panel_len());
            let chunk = Right { panels, first, len, panel_len: w.panel_len() };
            // SAFETY: the scratch holds `at_once` panels; nobody reads them while they are packed.
            unsafe {
                panels.pack(isa.tier(), w, panel, count);
                Blocked { isa, left: x, right: chunk, epilogue }.run();
            }
            panel += count;
        }
    });
}

/// Each thread packs strips of the weights and multiplies all rows with them: what it packed is still in its cache then, and
/// no thread waits for another.
///
/// # Safety
/// As for [`unpacked`].
unsafe fn strips<E: Epilogue>(isa: Isa, panels: Panels, x: &Side, w: &Side, epilogue: &E) {
    let (threads, count) = (num_threads(), w.panels());
    let largest = (STRIP / panels.bytes(1).max(1)).clamp(1, LARGEST.1);
    let fewest = count.div_ceil(largest).max((2 * threads).min(count / FULL));
    let across = fewest.next_multiple_of(threads).min(count);
    let width = count.div_ceil(across);
    parallel_for(across, 1, |range| {
        let cuts = panels.units > VECTOR_BLOCK;
        let tiles = if cuts { LARGEST.0 * width } else { 1 };
        Workspace::with(tiles, width * panels.units, |space| {
            let mut panels = panels;
            panels.data = space.strip;
            for index in range {
                let strip = share(count, index, across);
                let first = strip.start * w.panel_len();
                let len = (w.len() - first).min(strip.len() * w.panel_len());
                let right = Right { panels, first, len, panel_len: w.panel_len() };
                let product = Blocked { isa, left: x, right, epilogue };
                let blocks = x.len().div_ceil(product.block_len());
                // SAFETY: the workspace holds the strip and is this thread's; strips are disjoint.
                unsafe {
                    panels.pack_here(isa.tier(), w, strip.clone(), 0, panels.units);
                    for first in (0..blocks).step_by(LARGEST.0) {
                        product.task(first..blocks.min(first + LARGEST.0), 0..strip.len(), &space);
                    }
                }
            }
            end(isa, epilogue);
        });
    });
}

fn is_on_tiles(isa: Isa, unit: Unit) -> bool {
    isa == Isa::Amx && unit != Unit::F32
}

/// Into how many tasks to split `blocks` and `panels`, over `units` units of k.
///
/// A task is no larger than `largest` blocks and panels, so that its panels and sums stay in the second cache. There are
/// enough tasks, in a multiple of what the threads take at once, to keep the
/// threads equally busy, unless they became too small to pay for their start.
pub(super) fn grid(blocks: usize, panels: usize, units: usize, largest: (usize, usize)) -> (usize, usize) {
    const LEAST: usize = 1 << 10;
    let parts = 4 * num_threads();
    let (mut down, mut across) = (blocks.div_ceil(largest.0), panels.div_ceil(largest.1));
    if parts == 4 {
        return (down, across);
    }
    let size = |down, across| (blocks / down, panels / across);
    loop {
        let (rows, cols) = size(down, across);
        if down * across >= parts || rows * cols * units < 2 * LEAST || rows.max(cols) < 2 {
            break;
        }
        if rows >= cols { down *= 2 } else { across *= 2 }
    }
    if down * across > parts / 2 {
        let even = (down..=blocks.min(down * 2)).find(|down| (down * across).is_multiple_of(parts));
        down = even.unwrap_or(down);
    }
    (down, across)
}

/// Part `index` of `0..len` split evenly into `parts`.
pub(super) fn share(len: usize, index: usize, parts: usize) -> Range<usize> {
    index * len / parts..(index + 1) * len / parts
}

/// A packed right operand, or a chunk of one: `len` outputs from `first` on.
#[derive(Copy, Clone)]
struct Right {
    panels: Panels,
    first: usize,
    len: usize,
    /// Outputs in a panel.
    panel_len: usize,
}

/// A product of a left operand with panels.
struct Blocked<'a, E> {
    isa: Isa,
    left: &'a Side,
    right: Right,
    epilogue: &'a E,
}

/// The memory one thread works in.
pub(super) struct Workspace {
    /// A block of rows of the left operand.
    left: *mut u32,
    /// A tile, or what a panel is packed to.
    pub spare: *mut f32,
    /// The sums of a task: one tile for each block and panel, or one for all where k is not cut.
    pub sums: *mut f32,
    /// Panels that are packed by the thread that uses them.
    strip: *mut u32,
}

impl Workspace {
    const LEFT: usize = 14 * LEFT_STRIDE;

    /// Calls `f` with this thread's workspace, with room for the sums of `tiles` tiles and `units` units of a panel.
    pub fn with<R>(tiles: usize, units: usize, f: impl FnOnce(Workspace) -> R) -> R {
        let units = Self::LEFT + TILE + tiles * TILE + units * PANEL;
        with_scratch(Slot::Own, units * size_of::<u32>(), |scratch| {
            let left = scratch.cast::<u32>();
            let spare = left.wrapping_add(Self::LEFT).cast::<f32>();
            let sums = spare.wrapping_add(TILE);
            f(Workspace { left, spare, sums, strip: sums.wrapping_add(tiles * TILE).cast() })
        })
    }
}

const _: () = assert!(LEFT_STRIDE >= VECTOR_BLOCK);

impl<E: Epilogue> Blocked<'_, E> {
    fn unit(&self) -> Unit {
        self.right.panels.unit
    }

    /// Rows of the left side in a block.
    fn block_len(&self) -> usize {
        vector::block_rows(self.isa)
    }

    /// # Safety
    /// As for [`unpacked`], with the panels packed.
    unsafe fn run(&self) {
        let blocks = self.left.len().div_ceil(self.block_len());
        let panels = self.right.len.div_ceil(self.right.panel_len);
        if blocks == 0 || panels == 0 {
            return;
        }
        let (down, across) = grid(blocks, panels, self.right.panels.units, LARGEST);
        let tiles_of_task = blocks.div_ceil(down) * panels.div_ceil(across);
        parallel_for(down * across, 1, |tasks| {
            let cuts = self.right.panels.units > VECTOR_BLOCK;
            Workspace::with(if cuts { tiles_of_task } else { 1 }, 0, |space| {
                for task in tasks {
                    // Down first: the panels stay in the cache.
                    let blocks = share(blocks, task % down, down);
                    let panels = share(panels, task / down, across);
                    // SAFETY: tasks are disjoint, and the workspace is this thread's.
                    unsafe { self.task(blocks, panels, &space) };
                }
                end(self.isa, self.epilogue);
            });
        });
    }

    /// # Safety
    /// As for [`Self::run`]; the workspace must hold the sums of the task.
    unsafe fn task(&self, blocks: Range<usize>, panels: Range<usize>, space: &Workspace) {
        let units = self.right.panels.units;
        let cuts = units > VECTOR_BLOCK;
        let mut from = 0;
        loop {
            let len = VECTOR_BLOCK.min(units - from);
            let last = from + len == units;
            for block in blocks.clone() {
                // SAFETY: the block is inside the left operand, the workspace holds it.
                let rows = unsafe { self.load_left(block, from, len, space) };
                for panel in panels.clone() {
                    let index = (block - blocks.start) * panels.len() + (panel - panels.start);
                    let sums = space.sums.wrapping_add(if cuts { index * TILE } else { 0 });
                    let product = vector::Product {
                        rows,
                        units: len,
                        left: space.left,
                        right: self.right.panels.at(panel, from),
                        right_width: PANEL as isize,
                        out: sums,
                        resume: from > 0,
                    };
                    // SAFETY: the operands hold `len` units and the sums a tile; each tile is finished once.
                    unsafe {
                        vector::multiply(self.isa, self.unit(), product);
                        if last {
                            let row = block * self.block_len();
                            let (col, cols) = self.columns(panel);
                            let tile = Tile { sums, row, col, rows, cols };
                            finish(self.isa, tile, self.unit() == Unit::Int8, self.epilogue);
                        }
                    }
                }
            }
            from += len;
            if last {
                return;
            }
        }
    }

    /// Copies units `from .. from + len` of a block of the left operand to the workspace and returns its rows.
    ///
    /// # Safety
    /// The block must be inside the left operand; the workspace must be this thread's.
    unsafe fn load_left(&self, block: usize, from: usize, len: usize, space: &Workspace) -> usize {
        let unit = self.unit();
        let k = (from * unit.elements()).min(self.left.k());
        let row = block * self.block_len();
        let rows = self.block_len().min(self.left.len() - row);
        let matrix = &self.left.halves[0];
        let block = Block { matrix, row, rows, k, len: (len * unit.elements()).min(matrix.k - k) };
        // SAFETY: rows and elements are inside the matrix; the workspace holds them.
        unsafe { copy_rows(self.isa.tier(), unit, block, space.left, LEFT_STRIDE, len) };
        rows
    }

    /// The first output of a panel, and how many it has.
    fn columns(&self, panel: usize) -> (usize, usize) {
        let first = panel * self.right.panel_len;
        (self.right.first + first, (self.right.len - first).min(self.right.panel_len))
    }
}

/// Runs the epilogue on the tier's vectors; i32 sums become f32 first.
///
/// # Safety
/// The tile must hold whole rows of [`PANEL`] sums.
pub(super) unsafe fn finish<E: Epilogue>(isa: Isa, tile: Tile, integers: bool, epilogue: &E) {
    struct Finish<'a, E>(Tile, bool, &'a E);
    impl<E: Epilogue> Task for Finish<'_, E> {
        type Out = ();

        #[inline(always)]
        fn run<S: Simd>(self, s: S) {
            let Finish(tile, integers, epilogue) = self;
            // SAFETY: a tile holds whole rows; the epilogue's memory is the promise of `run`'s caller.
            unsafe {
                if integers {
                    let sums = tile.sums.cast_mut();
                    for i in 0..tile.rows * PANEL / S::N {
                        let p = sums.add(i * S::N);
                        s.store(p, s.i_to_f32(s.bits_of(s.load(p))));
                    }
                }
                epilogue.finish(s, &tile);
            }
        }
    }
    dispatch(isa.tier(), Finish(tile, integers, epilogue));
}

/// Tells the epilogue that this thread has no more tiles for now.
pub(super) fn end<E: Epilogue>(isa: Isa, epilogue: &E) {
    struct End<'a, E>(&'a E);
    impl<E: Epilogue> Task for End<'_, E> {
        type Out = ();

        #[inline(always)]
        fn run<S: Simd>(self, s: S) {
            self.0.end(s);
        }
    }
    dispatch(isa.tier(), End(epilogue));
}
