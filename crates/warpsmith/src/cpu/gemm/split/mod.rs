//! f32 on AMX tiles: every number is the sum of three bf16, and six products of those make one of f32.
//!
//! With `x = x0 + x1 + x2` and `w` likewise, the products `x2·w0`, `x1·w0`, `x1·w1`, `x0·w1`, `x0·w2` and `x0·w0` are
//! exact in f32, and what the other three would add is below its precision. All six are summed over 32 elements of k and
//! then added to the same accumulator: six roundings of a large sum for every 32 elements, where plain f32 has 32. So
//! errors are smaller than those of vectors, at twice their speed.
//!
//! Each thread takes some panels of the right operand and some blocks of the left one. It splits panels for a block of k, and
//! rows of the left operand one block before they are multiplied: between the products of a step, while the tiles
//! are busy. Largest magnitudes are found on the way, and sums of rows with numbers that tiles cannot multiply are made by
//! vectors ([`mend`]) before they are finished.

mod block;
mod few;
mod mend;
pub(super) mod planes;
mod steps;

pub(crate) use block::{
    Piece, RowSplitter, SplitBlock, SplitBlocks, Turned, ValueSplitter, left_element, split_block,
    split_left, turn_sums,
};
pub(crate) use mend::Sizes;

use super::amx::Tiles;
use super::buffer::{Slot, with_scratch};
use super::drive::{Depth, Part, TILE, end};
use super::epilogue::Epilogue;
use super::isa::Isa;
use super::matrix::{Block, Matrix, Unit, copy_rows};
use super::panel::{HALF, PANEL, PackedWeights, Panels, Side};
use super::results::{Results, Unfinished};
use super::tiles::is_swapped;
use crate::cpu::prefetch::{LINE, fetch_line, fetch_near};
use crate::cpu::{num_threads, parallel_for};
use mend::{Exponents, Magnitudes, Mender};
use planes::{Largest, STEP, STEP_BYTES, magnitude, magnitudes, split_columns, split_row};
use std::arch::x86_64::*;
use steps::{Form, product};

/// The most panels of a task. The more there are, the more products a split row is used for.
const WIDEST: usize = 16;
/// Steps of all panels of a task in a block of k: 768 KiB.
const STRIP: usize = 1 << 7;
/// The fewest and most steps in a block of k.
const DEPTHS: (usize, usize) = (8, 32);
/// Tiles whose sums are kept while k is cut. They leave the second cache, and are asked for in time.
const KEPT: usize = 1 << 10;
/// Elements of k of a panel that are transposed before they are split.
const STAGE: usize = 4 * STEP;

/// The right operand.
#[derive(Copy, Clone)]
enum Operand<'a> {
    Rows(&'a Side),
    /// Panels of f32.
    Packed(Panels),
}

/// The product with packed weights.
///
/// # Safety
/// As for [`super::run`], with AMX.
pub(super) unsafe fn packed<E: Epilogue>(x: &Side, w: &PackedWeights, epilogue: &E) {
    let panel_len = if w.is_gated() { HALF } else { PANEL };
    let results = Results { left: x, len: w.n(), panel_len, swapped: false, integers: false, epilogue };
    let product = SplitProduct { left: x, right: Operand::Packed(w.panels()), results };
    // SAFETY: passed on.
    unsafe { if x.len() <= PANEL { few::packed(&product, w.panels()) } else { product.run() } }
}

/// The product with weights as they are.
///
/// # Safety
/// As for [`super::run`], with AMX.
pub(super) unsafe fn unpacked<E: Epilogue>(x: &Side, w: &Side, epilogue: &E) {
    let few = x.len() <= PANEL && is_direct(w);
    let swapped = few || is_swapped(x, w);
    let (left, right) = if swapped { (w, x) } else { (x, w) };
    let panel_len = right.panel_len();
    let results = Results { left, len: right.len(), panel_len, swapped, integers: false, epilogue };
    let product = SplitProduct { left, right: Operand::Rows(right), results };
    // SAFETY: passed on.
    unsafe { if few { few::unpacked(&product) } else { product.run() } }
}

/// Whether rows are split from where they are.
fn is_direct(side: &Side) -> bool {
    side.halves.iter().all(|m| m.is_units(Unit::F32))
}

struct SplitProduct<'a, E> {
    left: &'a Side,
    right: Operand<'a>,
    results: Results<'a, E>,
}

/// How a product is shared out.
struct Plan {
    /// Tasks along the blocks and along the panels.
    grid: (usize, usize),
    /// Steps in a block of k.
    depth: usize,
}

impl Plan {
    /// The plan that takes the least time, counted in cycles of a step.
    fn new(blocks: usize, panels: usize, steps: usize, threads: usize) -> Plan {
        const PACK: usize = 500;
        const SPLIT: usize = 200;
        const MULTIPLY: usize = 400;
        let mut best = (usize::MAX, Plan { grid: (1, 1), depth: 1 });
        for width in 1..=WIDEST.min(panels.max(1)) {
            let most = (STRIP / width).clamp(DEPTHS.0, DEPTHS.1);
            let cuts = steps.div_ceil(most).max(1);
            let fewest = if cuts > 1 { blocks.div_ceil(KEPT / width) } else { 1 };
            let across = panels.div_ceil(width);
            for down in fewest..=(fewest + 2 * threads).min(blocks).max(fewest) {
                let rounds = (down * across).div_ceil(threads);
                let time = rounds * (width * PACK + blocks.div_ceil(down) * (SPLIT + width * MULTIPLY));
                if time < best.0 {
                    best = (time, Plan { grid: (down, across), depth: steps.div_ceil(cuts).max(1) });
                }
            }
        }
        best.1
    }
}

/// The memory one thread works in.
struct Workspace {
    /// The split rows of a block and of the next one.
    left: [*mut u8; 2],
    /// The split panels of a task.
    strip: *mut u8,
    /// Rows that cannot be split from where they are.
    rows: *mut f32,
    /// A part of a panel, before it is split.
    stage: *mut f32,
    /// A tile, transposed.
    turned: *mut f32,
    /// The sums of a task: one tile for each block and panel, or two in turn where k is not cut.
    sums: *mut f32,
}

impl Workspace {
    /// Calls `f` with this thread's workspace: for `depth` steps, `width` panels and the sums of `tiles` tiles.
    fn with<R>(depth: usize, width: usize, tiles: usize, f: impl FnOnce(Workspace) -> R) -> R {
        let left = depth * STEP_BYTES;
        let sizes = [
            left,
            left,
            width * left,
            PANEL * depth * STEP * size_of::<f32>(),
            STAGE * PANEL * size_of::<f32>(),
            TILE * size_of::<f32>(),
            tiles * TILE * size_of::<f32>(),
        ];
        with_scratch(Slot::Own, sizes.iter().sum(), |scratch| {
            let mut at = scratch;
            let [first, second, strip, rows, stage, turned, sums] = sizes.map(|size| {
                let start = at;
                at = at.wrapping_add(size);
                start
            });
            f(Workspace {
                left: [first, second],
                strip,
                rows: rows.cast(),
                stage: stage.cast(),
                turned: turned.cast(),
                sums: sums.cast(),
            })
        })
    }
}

/// The largest magnitudes of a task's rows and columns, over the blocks of k so far.
struct Seen {
    left: Vec<Magnitudes>,
    right: Vec<Magnitudes>,
}

/// A block of rows that is being split, row by row.
struct Splitter {
    /// Of both halves: the first row, the bytes between rows and their number.
    halves: [(*const u8, isize, usize); 2],
    /// Bytes from a row to one that is needed soon.
    ahead: isize,
    /// Elements of k, and steps.
    len: usize,
    steps: usize,
    dst: *mut u8,
    lane: usize,
    step: usize,
    largest: Largest,
}

impl Splitter {
    /// Splits the next `count` steps of rows.
    ///
    /// # Safety
    /// The rows must be readable, `dst` hold a block.
    #[target_feature(enable = "avx512f,avx512bw")]
    #[inline]
    unsafe fn advance(&mut self, count: usize, seen: &mut Magnitudes) {
        for _ in 0..count {
            let (start, stride, rows) = self.halves[usize::from(self.lane >= HALF)];
            if self.lane % HALF >= rows || self.lane >= PANEL {
                // The other half, or the end.
                self.lane = if self.lane < HALF && self.halves[1].2 > 0 { HALF } else { PANEL };
                if self.lane == PANEL {
                    return;
                }
                continue;
            }
            let at = self.step * STEP;
            let src =
                start.wrapping_offset((self.lane % HALF) as isize * stride).cast::<f32>().wrapping_add(at);
            fetch_near(src.cast::<u8>().wrapping_offset(self.ahead), 2 * LINE);
            let dst = self.dst.wrapping_add(self.step * STEP_BYTES);
            // SAFETY: passed on.
            self.largest = unsafe { split_row(src, STEP.min(self.len - at), self.lane, dst, self.largest) };
            self.step += 1;
            if self.step == self.steps {
                let seen = &mut seen[self.lane];
                *seen = (*seen).max(magnitude(self.largest));
                self.largest = _mm512_setzero_si512();
                self.step = 0;
                self.lane += 1;
            }
        }
    }
}

impl<E: Epilogue> SplitProduct<'_, E> {
    /// Computes the product.
    ///
    /// # Safety
    /// As for [`super::run`], with AMX.
    unsafe fn run(&self) {
        let (blocks, panels) = (self.left.panels(), self.results.len.div_ceil(self.results.panel_len));
        if blocks == 0 || panels == 0 {
            return;
        }
        let steps = self.left.k().div_ceil(STEP);
        let plan = Plan::new(blocks, panels, steps, num_threads());
        let (down, across) = plan.grid;
        let (tall, wide) = (blocks.div_ceil(down), panels.div_ceil(across));
        let tiles_kept = if steps > plan.depth { tall * wide } else { 2 };
        parallel_for(down * across, 1, |tasks| {
            Workspace::with(plan.depth, wide, tiles_kept, |space| {
                // SAFETY: the caller promised AMX.
                let mut tiles = unsafe { Tiles::new() };
                let mut mender = Mender::default();
                tiles.configure_whole();
                for task in tasks {
                    let part = Part::of_task(task, plan.grid, blocks, &(0..panels));
                    let mut seen = Seen {
                        left: vec![[0; PANEL]; part.blocks.len()],
                        right: vec![[0; PANEL]; part.panels.len()],
                    };
                    for k in Depth::all(steps, plan.depth) {
                        // SAFETY: tasks are disjoint, the workspace is this thread's, and AMX implies the instructions.
                        unsafe { self.sweep(&part, k, &space, &mut seen, &mut mender) };
                    }
                }
                end(Isa::Amx, self.results.epilogue);
            });
        });
    }

    /// Multiplies all blocks of a part with all its panels over one block of k, in steps.
    ///
    /// # Safety
    /// AMX must be there with its tiles configured, and the workspace hold the sums of the part.
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn sweep(&self, part: &Part, k: Depth, space: &Workspace, seen: &mut Seen, mender: &mut Mender) {
        let width = part.panels.len();
        let panel_bytes = k.len * STEP_BYTES;
        let whole = k.from == 0 && k.last;
        let shares = self.results.epilogue.computes();
        // SAFETY: blocks and panels are inside the operands; the workspace holds what is made of them.
        unsafe {
            for (index, panel) in part.panels.clone().enumerate() {
                let dst = space.strip.wrapping_add(index * panel_bytes);
                split_panel(&self.right, panel, k, self.left.k(), dst, space.stage, &mut seen.right[index]);
            }
            let exponents: Vec<Exponents> = match k.last {
                true => seen.right.iter().map(Exponents::of).collect(),
                false => Vec::new(),
            };
            let mut next = self.splitter(part.blocks.start, part, k, space, 0);
            next.advance(usize::MAX, &mut seen.left[0]);
            // A tile is finished while the next one is multiplied: what was stored a moment ago cannot be loaded at once.
            let mut pending = Unfinished::default();
            for (number, block) in part.blocks.clone().enumerate() {
                let left = space.left[number % 2];
                let mut none = [0; PANEL];
                let (rows_seen, next_seen) = match seen.left.get_disjoint_mut([number, number + 1]) {
                    Ok([rows, next]) => (rows, next),
                    Err(_) => (&mut seen.left[number], &mut none),
                };
                let left_exponents = Exponents::of(rows_seen);
                let mut next = self.splitter(block + 1, part, k, space, (number + 1) % 2);
                for (index, panel) in part.panels.clone().enumerate() {
                    let tile = number * width + index;
                    let sums = space.sums.wrapping_add(TILE * if whole { tile % 2 } else { tile });
                    let following = sums.wrapping_add(TILE).cast::<u8>();
                    let lines = if k.from > 0 { (TILE * size_of::<f32>() / LINE).div_ceil(k.len) } else { 0 };
                    if k.last {
                        self.results.expect(block, panel);
                    }
                    let right = space.strip.wrapping_add(index * panel_bytes);
                    let form = self.form(block, panel);
                    let between = |done: usize| {
                        next.advance(PANEL.div_ceil(width), next_seen);
                        for line in (done - 1) * lines..done * lines {
                            fetch_line(following.wrapping_add(line * LINE));
                        }
                        if shares {
                            self.results.finish(&mut pending, done, k.len);
                        }
                    };
                    product(form, left, right, k.len, (sums, k.from > 0), between);
                    self.results.finish(&mut pending, 1, 1);
                    if k.last {
                        if !left_exponents.fits(exponents[index]) {
                            let right = (&self.right, panel, &seen.right[index]);
                            mender.mend((self.left, block, rows_seen), right, sums);
                        }
                        pending = self.results.unfinished(block, panel, sums, space.turned);
                    }
                }
                next.advance(usize::MAX, next_seen);
            }
            self.results.finish(&mut pending, 1, 1);
        }
    }

    /// Which tiles of a product count.
    fn form(&self, block: usize, panel: usize) -> Form {
        let (_, columns) = self.results.columns(panel);
        let paired = self.results.panel_len == HALF;
        let tall = self.left.half(block, 1).2 > 0;
        Form { tall, wide: paired || columns > HALF, swapped: self.results.swapped }
    }

    /// What splits a block of rows; nothing, if it is not in the part. The rows before must have been split.
    ///
    /// # Safety
    /// The workspace must be this thread's.
    #[target_feature(enable = "avx512f")]
    unsafe fn splitter(
        &self,
        block: usize,
        part: &Part,
        k: Depth,
        space: &Workspace,
        side: usize,
    ) -> Splitter {
        let from = k.from * STEP;
        let len = (k.len * STEP).min(self.left.k() - from.min(self.left.k()));
        let exists = part.blocks.contains(&block) && len > 0;
        let halves = [0, 1].map(|g| {
            let (matrix, row, rows) = self.left.half(block, g);
            if !exists || rows == 0 {
                return (matrix.data, 0, 0);
            }
            if matrix.is_units(Unit::F32) {
                return (matrix.at(row, from), matrix.row_bytes(), rows);
            }
            let to = space.rows.wrapping_add(g * HALF * len).cast::<u32>();
            let block = Block { matrix, row, rows, k: from, len };
            // SAFETY: the rows are inside the matrix, and the workspace has room for them.
            unsafe { copy_rows(Isa::Amx.tier(), Unit::F32, block, to, len, len) };
            (to.cast_const().cast(), (len * size_of::<f32>()) as isize, rows)
        });
        let apart = |m: &Matrix| {
            if m.is_units(Unit::F32) { self.left.panel_len() as isize * m.row_bytes() } else { 0 }
        };
        Splitter {
            halves,
            ahead: apart(&self.left.halves[0]),
            len,
            steps: k.len,
            dst: space.left[side],
            lane: if exists { 0 } else { PANEL },
            step: 0,
            largest: _mm512_setzero_si512(),
        }
    }
}

/// Splits the steps `k` of a panel of a right operand of `elements` elements of k to `dst`.
///
/// # Safety
/// The panel must be inside the operand, `dst` hold the steps, and `stage` [`STAGE`] units of a panel.
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn split_panel(
    right: &Operand<'_>,
    panel: usize,
    k: Depth,
    elements: usize,
    dst: *mut u8,
    stage: *mut f32,
    seen: &mut Magnitudes,
) {
    // SAFETY: rows and steps are inside the operand; 32 magnitudes are two vectors.
    unsafe {
        let seen = seen.as_mut_ptr();
        let mut largest = [_mm512_setzero_si512(); 2];
        let end = ((k.from + k.len) * STEP).min(elements);
        let mut from = k.from * STEP;
        let mut to = dst;
        while from < end {
            let units = STAGE.min(end - from);
            let columns = match *right {
                Operand::Packed(panels) => panels.at(panel, from).cast::<f32>(),
                Operand::Rows(side) => {
                    let panels = Panels { data: stage.cast(), unit: Unit::F32, units, width: PANEL };
                    for g in 0..2 {
                        panels.pack_half(Isa::Amx.tier(), side, panel, g, from, units, stage.cast());
                    }
                    stage
                }
            };
            for step in (0..units).step_by(STEP) {
                for (g, largest) in largest.iter_mut().enumerate() {
                    let src = columns.wrapping_add(step * PANEL + g * HALF);
                    *largest = split_columns(src, PANEL, STEP.min(units - step), g, to, *largest);
                }
                to = to.wrapping_add(STEP_BYTES);
            }
            from += units;
        }
        for (g, largest) in largest.into_iter().enumerate() {
            let seen = seen.wrapping_add(g * HALF).cast();
            _mm512_storeu_si512(seen, _mm512_max_epu32(_mm512_loadu_si512(seen), magnitudes(largest)));
        }
    }
}
