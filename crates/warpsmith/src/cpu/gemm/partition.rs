//! How a product is cut into parts: tasks for the threads, blocks of k, and which operand is left.

use super::panel::{PANEL, Side};
use super::vector::{LEFT_STRIDE, LINE_UNITS};
use crate::cpu::num_threads;
use std::ops::Range;

/// Into how many tasks to split `blocks` and `panels`, over `units` units of k.
///
/// A task is no larger than `largest` blocks and panels, so that its panels and sums stay in L2. There are enough
/// tasks, in a multiple of what the threads take at once, to keep the threads equally busy, unless they became too
/// small to pay for their start.
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

/// Into how many strips of at most `widest` to split `panels`: the same number for each thread, if there are enough.
pub(super) fn strips(panels: usize, widest: usize) -> usize {
    panels.div_ceil(widest).next_multiple_of(num_threads()).min(panels)
}

/// Units of k in a block on vectors, at most. With fewer, starting and finishing a product would dominate; with more,
/// additions round more.
const BLOCK: usize = 512;

/// Units of k that are summed before they are added to the sum of those before, on vectors: all, or a part of about the same size
/// as the others. It follows from the length of k alone, so that every product of a row has the same bits.
pub(super) fn block_len(units: usize) -> usize {
    let units = units.max(1);
    units.div_ceil(units.div_ceil(BLOCK)).next_multiple_of(LINE_UNITS)
}

const _: () = assert!(LEFT_STRIDE >= BLOCK && BLOCK.is_multiple_of(LINE_UNITS));

/// A block of k, in units.
#[derive(Copy, Clone)]
pub(super) struct Depth {
    pub from: usize,
    pub len: usize,
    pub last: bool,
}

impl Depth {
    /// The blocks of `units` units, `depth` each.
    pub fn all(units: usize, depth: usize) -> impl Iterator<Item = Depth> {
        (0..units.max(1)).step_by(depth).map(move |from| {
            let len = depth.min(units - from);
            Depth { from, len, last: from + len == units }
        })
    }
}

/// A part of a product: some blocks of the left operand and some panels of the right one.
pub(super) struct Part {
    pub blocks: Range<usize>,
    pub panels: Range<usize>,
}

impl Part {
    /// Part `task` of `down` x `across` parts of some blocks and panels.
    pub fn of_task(
        task: usize,
        (down, across): (usize, usize),
        blocks: usize,
        panels: &Range<usize>,
    ) -> Part {
        // Down first: the panels stay in the cache.
        let columns = share(panels.len(), task / down, across);
        let panels = panels.start + columns.start..panels.start + columns.end;
        Part { blocks: share(blocks, task % down, down), panels }
    }
}

/// Whether the weights are the left operand.
///
/// The left operand is used in place if its rows are contiguous. If both have contiguous rows, or neither, the cost of
/// transposing decides: of the right operand, once for each row of the left, or of the sums, once for each unit of k,
/// both in blocks of 16 x 16 units.
pub(super) fn is_swapped(x: &Side, w: &Side) -> bool {
    let contiguous = |side: &Side| side.halves.iter().all(|m| m.k_stride == 1);
    match (contiguous(x), contiguous(w)) {
        (true, false) => false,
        (false, true) => true,
        _ => {
            let share = |n: usize| 1.0 / n.max(1) as f64;
            share(w.panels() * PANEL) + 2.0 * share(x.k()) < share(x.len())
        }
    }
}
