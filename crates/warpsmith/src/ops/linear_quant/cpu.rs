//! `linear_quant` on the CPU.
//!
//! First the rows of `x` are quantised, in groups of up to eight rows that are multiplied at once. Then threads share out
//! strips of columns: a strip's panels of weights are multiplied with the groups, and the sums finished while they are in
//! the first cache. A weight that was not packed beforehand is packed strip by strip.

use super::finish::{Finish, STRIP};
use super::format::GROUP;
use super::packed::PackedQuantWeight;
use super::quantize::Quantize;
use super::tiles::pack::{Rows, pack_panel};
use super::tiles::{self, Instructions, MOST, Product, ROWS, Record};
use super::{Problem, W, X};
use crate::cpu::scratch::{self, Need, Plain};
use crate::cpu::{dispatch, parallel_for, parallel_for_with_scratch};
use crate::error::Result;
use crate::op::Launch;
use crate::ops::linear::Gate;
use std::ops::Range;

// SAFETY: numbers of four bytes, without padding.
unsafe impl Plain for Record {}

/// Panels of a strip, without a gate.
const PANELS: usize = STRIP / ROWS;
/// Groups of rows that a packed strip is multiplied with before the next: their records stay in the second cache.
const CHUNK: usize = 8;
/// Activations that a thread quantises at least, and bytes of weights times groups of rows that it multiplies.
const QUANTIZE_GRAIN: usize = 1 << 14;
const GRAIN: usize = 1 << 15;

/// How many groups the rows of `x` are multiplied in: eight rows each, the rest in groups of four, two and one.
fn num_groups(m: usize) -> usize {
    m / MOST + (m % MOST).count_ones() as usize
}

/// The rows of a group. Their number shows in no bit of the result.
fn group(m: usize, index: usize) -> Range<usize> {
    let whole = m / MOST;
    if index < whole {
        return index * MOST..(index + 1) * MOST;
    }
    let mut start = whole * MOST;
    let mut left = index - whole;
    for rows in [4, 2, 1] {
        if (m % MOST) & rows != 0 {
            if left == 0 {
                return start..start + rows;
            }
            left -= 1;
            start += rows;
        }
    }
    start..start
}

/// The order of a weight's panels: for each 16 columns of the result one, or with a gate one of gates and one of up.
#[derive(Clone, Copy)]
pub(super) struct Panels {
    pub weight: Rows,
    pub gate: Gate,
    pub n: usize,
    pub k: usize,
}

impl Panels {
    /// Panels for 16 columns.
    pub fn halves(&self) -> usize {
        1 + (self.gate != Gate::None) as usize
    }

    /// Bytes of one.
    pub fn bytes(&self) -> usize {
        self.k / GROUP * tiles::tile_bytes(self.weight.format)
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.n.div_ceil(ROWS) * self.halves()
    }

    /// Packs panel `index` to `to`.
    ///
    /// # Safety
    /// `to` must have room for it, and the weight must exist.
    pub unsafe fn pack(&self, index: usize, to: *mut u8) {
        let (first, half) = (index / self.halves() * ROWS, index % self.halves());
        let row = |column: usize| match self.gate {
            Gate::None => column,
            Gate::Halves => half * self.n + column,
            Gate::Interleaved => 2 * column + half,
        };
        // SAFETY: passed on.
        unsafe { pack_panel(&self.weight, (first..self.n.min(first + ROWS)).map(row), self.k, to) };
    }
}

pub(super) fn run(launch: &Launch<'_, Problem>) -> Result<()> {
    let p = launch.problem;
    let num_tiles = p.k / GROUP;
    scratch::with(Need::of::<Record>(p.m * num_tiles), |mut region| {
        let records = region.slice::<Record>(p.m * num_tiles).as_mut_ptr() as usize;
        let groups = num_groups(p.m);
        parallel_for(groups, QUANTIZE_GRAIN.div_ceil(MOST * p.k.max(1)), |part| {
            for rows in part.map(|index| group(p.m, index)) {
                let records = (records as *mut Record).wrapping_add(rows.start * num_tiles);
                dispatch(launch.tier, Quantize { p, x: launch.args.address(X), rows, records });
            }
        });
        multiply(launch, records, groups);
    });
    Ok(())
}

fn multiply(launch: &Launch<'_, Problem>, records: usize, groups: usize) {
    let p = launch.problem;
    let weight =
        Rows { format: p.format, data: launch.args.address(W), row: p.w_strides[0], col: p.w_strides[1] };
    let panels = Panels { weight, gate: p.gate, n: p.n, k: p.k };
    let strips = p.n.div_ceil(STRIP);
    let in_strip = PANELS * panels.halves();
    let instructions = Instructions::of_tier(launch.tier);
    let strip = |strip: usize, at: *const u8, groups: Range<usize>| {
        let work = Strip { launch, panels: &panels, at, records, instructions };
        for rows in groups.map(|index| group(p.m, index)) {
            work.multiply(strip * STRIP..p.n.min((strip + 1) * STRIP), rows);
        }
    };
    let strip_bytes = in_strip * panels.bytes();
    let packed =
        launch.args.prepared::<PackedQuantWeight>().and_then(|weight| weight.matching(p.format, p.gate));
    match packed {
        Some(packed) => {
            let packed = packed as usize;
            let grain = GRAIN.div_ceil((strip_bytes * groups.min(CHUNK)).max(1));
            parallel_for(strips * groups.div_ceil(CHUNK), grain, |items| {
                for item in items {
                    let (chunk, index) = (item / strips, item % strips);
                    let at = (packed + index * strip_bytes) as *const u8;
                    strip(index, at, chunk * CHUNK..groups.min((chunk + 1) * CHUNK));
                }
            });
        }
        None => parallel_for_with_scratch(strips, 1, Need::of::<u8>(strip_bytes), |items, mut region| {
            let at = region.slice::<u8>(strip_bytes).as_mut_ptr();
            for index in items {
                for i in (0..in_strip).filter(|i| index * in_strip + i < panels.count()) {
                    // SAFETY: the scratch has room for the panels of a strip, and the weight is that of the call.
                    unsafe { panels.pack(index * in_strip + i, at.add(i * panels.bytes())) };
                }
                strip(index, at, 0..groups);
            }
        }),
    }
}

/// What the products with the panels of one strip need.
struct Strip<'a> {
    launch: &'a Launch<'a, Problem>,
    panels: &'a Panels,
    at: *const u8,
    records: usize,
    instructions: Instructions,
}

impl Strip<'_> {
    /// The results of some columns for a group of rows.
    fn multiply(&self, cols: Range<usize>, rows: Range<usize>) {
        let num_tiles = self.panels.k / GROUP;
        let mut sums = [[[0f32; STRIP]; MOST]; 2];
        let halves = self.panels.halves();
        for panel in 0..cols.len().div_ceil(ROWS) {
            for (half, sums) in sums.iter_mut().enumerate().take(halves) {
                let product = Product {
                    format: self.panels.weight.format,
                    panel: self.at.wrapping_add((panel * halves + half) * self.panels.bytes()),
                    num_tiles,
                    x: (self.records as *const Record).wrapping_add(rows.start * num_tiles),
                    rows: rows.len(),
                    sums: sums.as_flattened_mut()[panel * ROWS..].as_mut_ptr(),
                    pitch: STRIP,
                };
                // SAFETY: the panels are packed, the group has its records, the sums have room for a panel's columns of
                // each row, and the instructions are the machine's.
                unsafe { product.run(self.instructions) };
            }
        }
        let [sums, ups] = &mut sums;
        let count = rows.len();
        let (sums, ups) = (&mut sums[..count], &mut ups[..count]);
        dispatch(self.launch.tier, Finish { launch: self.launch, rows, cols, sums, ups });
    }
}

/// What multiplies in a tier, for people.
pub(super) fn config(tier: crate::cpu::Tier) -> String {
    format!("activations in 8 bits, {:?}", Instructions::of_tier(tier)).to_lowercase()
}
