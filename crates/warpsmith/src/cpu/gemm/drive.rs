//! Blocks and threads: which part of a product is computed when, and where its operands are at that time.

use super::amx::{self, Tiles};
use super::buffer::{Slot, with_scratch};
use super::epilogue::{Epilogue, Tile};
use super::isa::Isa;
use super::matrix::{Block, Matrix, Unit, copy_rows};
use super::panel::{HALF, PANEL, PackedWeights, Panels, Side, transpose_sums};
use super::vector::{self, LEFT_STRIDE};
use crate::cpu::{Simd, Task, dispatch, num_threads, parallel_for};
use std::ops::Range;

/// Sums of one tile.
pub(super) const TILE: usize = PANEL * PANEL;
/// Units of k in a block on vectors: 14 rows of the left operand stay in the first cache.
pub(super) const VECTOR_BLOCK: usize = 512;
/// Units of k in a block on tiles. The sums of a tile cost as much to bring back as two steps, so cuts are few.
const TILE_BLOCK: usize = 512;
/// Bytes of the right operand that are packed before they are used, per thread. The left operand is read once for each
/// chunk, so chunks are larger than a second cache; tasks take parts of them that fit.
const CHUNK: usize = 4 << 20;

/// The product with packed weights.
///
/// # Safety
/// The matrix of `x` must be readable and `epilogue` be able to store the product.
pub(super) unsafe fn packed<E: Epilogue>(x: &Side, w: &PackedWeights, epilogue: &E) {
    let panel_len = if w.is_gated() { HALF } else { PANEL };
    let right = Right { panels: w.panels(), first: 0, len: w.n(), panel_len };
    // SAFETY: passed on.
    unsafe { Blocked { isa: w.isa(), left: x, right, swapped: false, epilogue }.run() }
}

/// The product with weights as they are.
///
/// # Safety
/// The matrices must be readable and `epilogue` be able to store the product.
pub(super) unsafe fn unpacked<E: Epilogue>(isa: Isa, unit: Unit, x: &Side, w: &Side, epilogue: &E) {
    let on_tiles = isa == Isa::Amx && unit != Unit::F32;
    if !on_tiles && x.len() <= vector::block_rows(isa) {
        // SAFETY: passed on.
        return unsafe { super::stream::run(isa, unit, x, w, epilogue) };
    }
    // Rows are best left where they are if they are contiguous; else the smaller operand is packed.
    let contiguous = |side: &Side| side.halves.iter().all(|m| m.k_stride == 1);
    let swapped = on_tiles
        && match (contiguous(x), contiguous(w)) {
            (true, false) => false,
            (false, true) => true,
            _ => x.len() <= 2 * w.len(),
        };
    let (left, right) = if swapped { (w, x) } else { (x, w) };
    let units = unit.packed_len(right.k());
    let width = if swapped && right.len() <= HALF { right.len() } else { PANEL };
    let mut panels = Panels { data: std::ptr::null_mut(), unit, units, width };
    let at_once = (CHUNK * num_threads() / panels.bytes(1).max(1)).clamp(1, right.panels().max(1));
    with_scratch(Slot::Shared, panels.bytes(at_once), |scratch| {
        panels.data = scratch.cast();
        let mut panel = 0;
        while panel < right.panels() {
            let count = at_once.min(right.panels() - panel);
            let first = panel * right.panel_len();
            let len = (right.len() - first).min(count * right.panel_len());
            let chunk = Right { panels, first, len, panel_len: right.panel_len() };
            // SAFETY: the scratch holds `at_once` panels; nobody reads them while they are packed.
            unsafe {
                panels.pack(isa.tier(), right, panel, count);
                Blocked { isa, left, right: chunk, swapped, epilogue }.run();
            }
            panel += count;
        }
    });
}

/// Into how many tasks to split `blocks` and `panels`, over `units` units of k.
///
/// A task is no larger than `largest` blocks and panels: its panels (of one block of k) then fill half of the second
/// cache, its sums a quarter. There are enough tasks, in a multiple of what the threads take at once, to keep the
/// threads equally busy, unless they became too small to pay for their start.
fn grid(blocks: usize, panels: usize, units: usize, largest: (usize, usize)) -> (usize, usize) {
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
fn share(len: usize, index: usize, parts: usize) -> Range<usize> {
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
    /// Whether the left operand is the weights.
    swapped: bool,
    epilogue: &'a E,
}

/// The memory one thread works in.
pub(super) struct Workspace {
    /// A block of rows of the left operand.
    left: *mut u32,
    /// Their last, partial step.
    tail: *mut u32,
    /// A tile, transposed.
    pub turned: *mut f32,
    /// The sums of a task: one tile for each block and panel, or one for all where k is not cut.
    pub sums: *mut f32,
}

impl Workspace {
    const LEFT: usize = PANEL * (TILE_BLOCK + 16);
    const TAIL: usize = PANEL * amx::STEP;

    /// Calls `f` with this thread's workspace, with room for the sums of `tiles` tiles.
    pub fn with<R>(tiles: usize, f: impl FnOnce(Workspace) -> R) -> R {
        let units = Self::LEFT + Self::TAIL + TILE + tiles * TILE;
        with_scratch(Slot::Own, units * size_of::<u32>(), |scratch| {
            let left = scratch.cast::<u32>();
            let tail = left.wrapping_add(Self::LEFT);
            let turned = tail.wrapping_add(Self::TAIL).cast::<f32>();
            f(Workspace { left, tail, turned, sums: turned.wrapping_add(TILE) })
        })
    }
}

const _: () = assert!(Workspace::LEFT >= 14 * LEFT_STRIDE && LEFT_STRIDE >= VECTOR_BLOCK);

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

impl<E: Epilogue> Blocked<'_, E> {
    fn unit(&self) -> Unit {
        self.right.panels.unit
    }

    fn on_tiles(&self) -> bool {
        self.isa == Isa::Amx && self.unit() != Unit::F32
    }

    /// Outputs of the left side in a block.
    fn block_len(&self) -> usize {
        if self.on_tiles() { self.left.panel_len() } else { vector::block_rows(self.isa) }
    }

    /// Units of k in a block.
    fn depth(&self) -> usize {
        if self.on_tiles() { TILE_BLOCK } else { VECTOR_BLOCK }
    }

    /// # Safety
    /// As for [`unpacked`], with the panels packed.
    unsafe fn run(&self) {
        let blocks = self.left.len().div_ceil(self.block_len());
        let panels = self.right.len.div_ceil(self.right.panel_len);
        if blocks == 0 || panels == 0 {
            return;
        }
        let largest = if self.on_tiles() { (8, 16) } else { (18, 16) };
        let (down, across) = grid(blocks, panels, self.right.panels.units, largest);
        let tiles_of_task = blocks.div_ceil(down) * panels.div_ceil(across);
        parallel_for(down * across, 1, |tasks| {
            let cuts = self.right.panels.units > self.depth();
            Workspace::with(if cuts { tiles_of_task } else { 1 }, |space| {
                // SAFETY: `Isa::Amx` is only used where supported; otherwise the tiles stay unused.
                let mut tiles = unsafe { Tiles::new() };
                for task in tasks {
                    // Down first: the panels stay in the cache.
                    let blocks = share(blocks, task % down, down);
                    let panels = share(panels, task / down, across);
                    // SAFETY: tasks are disjoint, and the workspace is this thread's.
                    unsafe { self.task(&mut tiles, blocks, panels, &space) };
                }
            });
        });
    }

    /// # Safety
    /// As for [`Self::run`]; the workspace must hold the sums of the task.
    unsafe fn task(&self, tiles: &mut Tiles, blocks: Range<usize>, panels: Range<usize>, space: &Workspace) {
        let units = self.right.panels.units;
        let depth = self.depth();
        let cuts = units > depth;
        let mut from = 0;
        loop {
            let len = depth.min(units - from);
            let last = from + len == units;
            for block in blocks.clone() {
                // SAFETY: the block is inside the left operand, the workspace holds it.
                let left = unsafe { self.load_left(block, from, len, panels.len(), space) };
                for panel in panels.clone() {
                    let index = (block - blocks.start) * panels.len() + (panel - panels.start);
                    let sums = space.sums.wrapping_add(if cuts { index * TILE } else { 0 });
                    let right = self.right.panels.at(panel, from);
                    // SAFETY: the operands hold `len` units and the sums a tile.
                    unsafe {
                        match &left {
                            Left::Vectors { rows } => vector::multiply(
                                self.isa,
                                self.unit(),
                                vector::Product {
                                    rows: *rows,
                                    units: len,
                                    left: space.left,
                                    right,
                                    right_width: PANEL as isize,
                                    out: sums,
                                    resume: from > 0,
                                },
                            ),
                            Left::Tiles(left) => {
                                self.multiply_tiles(tiles, left, panel, right, sums, from > 0, space)
                            }
                        }
                        if last {
                            self.finish(block, panel, sums, space);
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

    /// Brings units `from .. from + len` of a block of the left operand where the kernels want them.
    ///
    /// # Safety
    /// The block must be inside the left operand; the workspace must be this thread's.
    unsafe fn load_left(
        &self,
        block: usize,
        from: usize,
        len: usize,
        uses: usize,
        space: &Workspace,
    ) -> Left {
        let unit = self.unit();
        let k = from * unit.elements();
        let elements = (len * unit.elements()).min(self.left.k() - k.min(self.left.k()));
        let copy = |matrix: &Matrix, row, rows, k, count, dst: *mut u32, stride, padded| {
            let block = Block { matrix, row, rows, k, len: count };
            // SAFETY: rows and elements are inside the matrix; the workspace holds them.
            unsafe { copy_rows(self.isa.tier(), unit, block, dst, stride, padded) }
        };
        if !self.on_tiles() {
            let row = block * self.block_len();
            let rows = self.block_len().min(self.left.len() - row);
            copy(&self.left.halves[0], row, rows, k, elements, space.left, LEFT_STRIDE, len);
            return Left::Vectors { rows };
        }
        let halves = [self.left.half(block, 0), self.left.half(block, 1)];
        let rows = [halves[0].2, halves[1].2];
        let per_step = amx::STEP * unit.elements();
        // Copied rows lie densely in the first cache; that pays once they are used often enough.
        if uses <= DIRECT_USES && halves.iter().all(|(matrix, ..)| matrix.is_units(unit)) && self.left.k() > 0
        {
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
            return Left::Tiles(LeftTiles {
                rows,
                start,
                stride: halves[0].0.row_bytes(),
                steps,
                tail: rest > 0,
            });
        }
        let stride = TILE_BLOCK + 16;
        let start = [0, 1].map(|g| space.left.wrapping_add(g * HALF * stride));
        for (g, (matrix, row, rows)) in halves.into_iter().enumerate() {
            copy(matrix, row, rows, k, elements, start[g], stride, len);
        }
        let (start, stride) = (start.map(|p| p.cast_const().cast()), (stride * size_of::<u32>()) as isize);
        Left::Tiles(LeftTiles { rows, start, stride, steps: len / amx::STEP, tail: false })
    }

    /// # Safety
    /// `left` and `right` must hold what they say, `sums` a tile.
    #[allow(clippy::too_many_arguments)]
    unsafe fn multiply_tiles(
        &self,
        tiles: &mut Tiles,
        left: &LeftTiles,
        panel: usize,
        right: *const u32,
        sums: *mut f32,
        resume: bool,
        space: &Workspace,
    ) {
        let (_, count) = self.columns(panel);
        let width = self.right.panels.width;
        let paired = self.right.panel_len == HALF;
        let second = if paired { count } else { count.saturating_sub(HALF) };
        let shape = amx::Shape { rows: left.rows, cols: [count.min(HALF), second] };
        let product = amx::Product {
            shape,
            steps: left.steps,
            left: left.start,
            left_stride: left.stride,
            right,
            right_width: width,
            out: sums,
            resume,
        };
        // SAFETY: the caller's promise; the tail lies in the workspace.
        unsafe {
            tiles.multiply(self.unit(), &product);
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
                tiles.multiply(self.unit(), &product);
            }
        }
    }

    /// The first output of a panel, and how many it has.
    fn columns(&self, panel: usize) -> (usize, usize) {
        let first = panel * self.right.panel_len;
        (self.right.first + first, (self.right.len - first).min(self.right.panel_len))
    }

    /// Hands a finished tile to the epilogue.
    ///
    /// # Safety
    /// `sums` must hold the tile.
    unsafe fn finish(&self, block: usize, panel: usize, sums: *mut f32, space: &Workspace) {
        let first = block * self.block_len();
        let (row, rows) = (first, self.block_len().min(self.left.len() - first));
        let (col, cols) = self.columns(panel);
        let integers = self.unit() == Unit::Int8;
        // SAFETY: the tile's memory is the caller's promise; each tile is finished once.
        unsafe {
            let tile = if self.swapped {
                transpose_sums(self.isa.tier(), sums, cols, space.turned);
                Tile { sums: space.turned, row: col, col: row, rows: cols, cols: rows }
            } else {
                Tile { sums, row, col, rows, cols }
            };
            finish(self.isa, tile, integers, self.epilogue);
        }
    }
}

/// A block of the left operand.
enum Left {
    /// In the workspace, rows [`LEFT_STRIDE`] apart.
    Vectors {
        rows: usize,
    },
    Tiles(LeftTiles),
}

/// Up to how many panels use rows of the left operand from where they are.
const DIRECT_USES: usize = 4;

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
