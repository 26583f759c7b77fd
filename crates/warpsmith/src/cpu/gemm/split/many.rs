//! Many rows of f32 on tiles.
//!
//! Each thread takes some panels of the right operand and some blocks of the left one. It splits panels for a block of k, and
//! rows of the left operand one block before they are multiplied: between the products of a step, while the tiles
//! are busy. Largest magnitudes are found on the way, and sums of rows with numbers that tiles cannot multiply are made by
//! vectors ([`super::recompute`]) before they are finished.

use super::operand::{STAGE, SplitProduct, split_panel};
use super::range::{Exponents, Magnitudes};
use super::recompute::Recompute;
use super::steps::{Form, product};
use super::terms::{Largest, STEP, STEP_BYTES, magnitude, split_row};
use crate::cpu::gemm::amx::Tiles;
use crate::cpu::gemm::epilogue::{Epilogue, end};
use crate::cpu::gemm::isa::Isa;
use crate::cpu::gemm::matrix::{Block, Matrix, Unit, copy_rows};
use crate::cpu::gemm::panel::{HALF, PANEL, TILE};
use crate::cpu::gemm::partition::{Depth, Part};
use crate::cpu::gemm::results::Unfinished;
use crate::cpu::prefetch::{LINE, fetch_line, fetch_near};
use crate::cpu::scratch::{Need, Region};
use crate::cpu::{num_threads, parallel_for_with_scratch};
use std::arch::x86_64::*;

/// The most panels of a task. The more there are, the more products a split row is used for.
const WIDEST: usize = 16;
/// Steps of all panels of a task in a block of k: 768 KiB.
const STRIP: usize = 1 << 7;
/// The fewest and most steps in a block of k.
const DEPTHS: (usize, usize) = (8, 32);
/// Tiles whose sums are kept while k is cut. They leave L2 and are prefetched again in time.
const KEPT: usize = 1 << 10;
/// How a product is divided.
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

/// The largest tasks of a product.
#[derive(Copy, Clone)]
struct Extent {
    /// Steps in a block of k.
    depth: usize,
    blocks: usize,
    panels: usize,
    /// Tiles whose sums are kept.
    tiles: usize,
}

/// The memory one thread works in.
struct Workspace<'a> {
    /// The split rows of a block and of the next one.
    left: [*mut u8; 2],
    /// The split panels of a task.
    strip: *mut u8,
    /// Rows that cannot be split in place.
    rows: *mut f32,
    /// A part of a panel, before it is split.
    stage: *mut f32,
    /// A tile, transposed.
    turned: *mut f32,
    /// The sums of a task: one tile for each block and panel, or two in turn where k is not cut.
    sums: *mut f32,
    /// The largest magnitudes of a task's rows and columns, over the blocks of k so far.
    left_seen: &'a mut [Magnitudes],
    right_seen: &'a mut [Magnitudes],
    recompute: Recompute,
}

impl<'a> Workspace<'a> {
    fn need(extent: Extent) -> Need {
        let Extent { depth, blocks, panels, tiles } = extent;
        let split = Need::of::<u8>(depth * STEP_BYTES).and::<u8>(depth * STEP_BYTES);
        let operands = split.and::<u8>(panels * depth * STEP_BYTES).and::<f32>(PANEL * depth * STEP);
        let sums = operands.and::<f32>(STAGE * PANEL).and::<f32>(TILE).and::<f32>(tiles * TILE);
        sums.and::<Magnitudes>(blocks).and::<Magnitudes>(panels).plus(Recompute::NEED)
    }

    /// The workspace of a thread, as large as [`Workspace::need`] says.
    fn new(mut region: Region<'a>, extent: Extent) -> Workspace<'a> {
        let Extent { depth, blocks, panels, tiles } = extent;
        Workspace {
            left: [0; 2].map(|_| region.slice(depth * STEP_BYTES).as_mut_ptr()),
            strip: region.slice(panels * depth * STEP_BYTES).as_mut_ptr(),
            rows: region.slice(PANEL * depth * STEP).as_mut_ptr(),
            stage: region.slice(STAGE * PANEL).as_mut_ptr(),
            turned: region.slice(TILE).as_mut_ptr(),
            sums: region.slice(tiles * TILE).as_mut_ptr(),
            left_seen: region.slice(blocks),
            right_seen: region.slice(panels),
            recompute: Recompute::new(&mut region),
        }
    }
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
    /// As for [`crate::cpu::gemm::run`], with AMX.
    pub unsafe fn run(&self) {
        let (blocks, panels) = (self.left.panels(), self.results.len.div_ceil(self.results.panel_len));
        if blocks == 0 || panels == 0 {
            return;
        }
        let steps = self.left.k().div_ceil(STEP);
        let plan = Plan::new(blocks, panels, steps, num_threads());
        let (down, across) = plan.grid;
        let (tall, wide) = (blocks.div_ceil(down), panels.div_ceil(across));
        let tiles_kept = if steps > plan.depth { tall * wide } else { 2 };
        let extent = Extent { depth: plan.depth, blocks: tall, panels: wide, tiles: tiles_kept };
        parallel_for_with_scratch(down * across, 1, Workspace::need(extent), |tasks, region| {
            let mut space = Workspace::new(region, extent);
            // SAFETY: the caller promised AMX.
            let mut tiles = unsafe { Tiles::new() };
            tiles.configure_whole();
            for task in tasks {
                let part = Part::of_task(task, plan.grid, blocks, &(0..panels));
                space.left_seen.fill([0; PANEL]);
                space.right_seen.fill([0; PANEL]);
                for k in Depth::all(steps, plan.depth) {
                    // SAFETY: tasks are disjoint, the workspace is this thread's, and AMX implies the instructions.
                    unsafe { self.sweep(&part, k, &mut space) };
                }
            }
            end(Isa::Amx, self.results.epilogue);
        });
    }

    /// Multiplies all blocks of a part with all its panels over one block of k, in steps.
    ///
    /// # Safety
    /// AMX must be there with its tiles configured, and the workspace hold the sums of the part.
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn sweep(&self, part: &Part, k: Depth, space: &mut Workspace<'_>) {
        let width = part.panels.len();
        let panel_bytes = k.len * STEP_BYTES;
        let whole = k.from == 0 && k.last;
        let shares = self.results.epilogue.computes();
        // SAFETY: blocks and panels are inside the operands; the workspace holds what is made of them.
        unsafe {
            for (index, panel) in part.panels.clone().enumerate() {
                let dst = space.strip.wrapping_add(index * panel_bytes);
                let seen = &mut space.right_seen[index];
                split_panel(&self.right, panel, k, self.left.k(), dst, space.stage, seen);
            }
            let mut exponents = [None; WIDEST];
            if k.last {
                for (exponents, seen) in exponents.iter_mut().zip(&space.right_seen[..width]) {
                    *exponents = Some(Exponents::of(seen));
                }
            }
            let mut next = self.splitter(part.blocks.start, part, k, space, 0);
            next.advance(usize::MAX, &mut space.left_seen[0]);
            // A tile is finished while the next one is multiplied: loading data right after it was stored stalls.
            let mut pending = Unfinished::default();
            for (number, block) in part.blocks.clone().enumerate() {
                let left = space.left[number % 2];
                let mut none = [0; PANEL];
                let mut next = self.splitter(block + 1, part, k, space, (number + 1) % 2);
                let (rows_seen, next_seen) = match space.left_seen.get_disjoint_mut([number, number + 1]) {
                    Ok([rows, next]) => (rows, next),
                    Err(_) => (&mut space.left_seen[number], &mut none),
                };
                let left_exponents = Exponents::of(rows_seen);
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
                        let right_seen = &space.right_seen[index];
                        let is_needed = |right| {
                            let left = (&*rows_seen, left_exponents);
                            Recompute::is_needed(self.left.k(), left, (right_seen, right), sums)
                        };
                        if exponents[index].is_some_and(is_needed) {
                            let right = (&self.right, panel, right_seen);
                            space.recompute.tile((self.left, block, rows_seen), right, sums);
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

    /// The splitter of a block of rows; `None` if the block is not in the part. The rows before must have been split.
    ///
    /// # Safety
    /// The workspace must be this thread's.
    #[target_feature(enable = "avx512f")]
    unsafe fn splitter(
        &self,
        block: usize,
        part: &Part,
        k: Depth,
        space: &Workspace<'_>,
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
