//! `linear_quant` on the CPU.
//!
//! First the rows of `x` are quantised (in full precision widened to f32), in groups of rows that are multiplied at
//! once: up to eight, or 16 on AMX. Then strips of columns are divided among threads: a strip's panels of weights are
//! multiplied with the groups, and the sums finished while they are in L1. A weight that was not packed beforehand is
//! packed strip by strip. In full precision the panels of a strip are expanded to f32 first.

use super::finish::{Finish, STRIP, ask_for_memory};
use super::format::GROUP;
use super::packed::PackedQuantWeight;
use super::quantize::{Quantize, Widen};
use super::tiles::full::{self, Expand, FullProduct};
use super::tiles::pack::{Rows, pack_panel};
use super::tiles::wide::{self, Multiplier, WIDE, WideProduct, widen};
use super::tiles::{self, Instructions, MOST, Product, ROWS, Record};
use super::{Problem, QuantPrecision, W, X};
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
/// Groups of rows that a packed strip is multiplied with before the next: their records stay in L2.
const CHUNK: usize = 8;
/// The same for groups of [`WIDE`] rows, for which strips are unpacked: the more of them, the less often.
const WIDE_CHUNK: usize = 16;
/// Activations that a thread quantises at least, and bytes of weights times groups of rows that it multiplies.
const QUANTIZE_GRAIN: usize = 1 << 14;
const GRAIN: usize = 1 << 15;

/// How the rows of `x` are divided into groups that are multiplied at once. It does not affect the bits of the result.
#[derive(Clone, Copy)]
struct Groups {
    m: usize,
    /// Rows of the groups; the rest is in groups of eight, four, two and one.
    most: usize,
}

impl Groups {
    fn count(self) -> usize {
        self.m / self.most + (self.m % self.most).count_ones() as usize
    }

    fn rows(self, index: usize) -> Range<usize> {
        let whole = self.m / self.most;
        if index < whole {
            return index * self.most..(index + 1) * self.most;
        }
        let mut start = whole * self.most;
        let mut left = index - whole;
        for rows in [8, 4, 2, 1] {
            if (self.m % self.most) & rows != 0 {
                if left == 0 {
                    return start..start + rows;
                }
                left -= 1;
                start += rows;
            }
        }
        start..start
    }
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
        self.num_tiles() * tiles::tile_bytes(self.weight.format)
    }

    /// Bytes of one in its wide form.
    pub fn wide_bytes(&self) -> usize {
        wide::panel_bytes(self.weight.format, self.num_tiles())
    }

    /// Tiles of one.
    pub fn num_tiles(&self) -> usize {
        self.k / GROUP
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
    let instructions = Instructions::of_tier(launch.tier, p.m);
    let groups = Groups { m: p.m, most: instructions.most_rows() };
    let packed = match launch.args.prepared::<PackedQuantWeight>() {
        Some(weight) => weight.matching(p.format, p.gate)?,
        None => None,
    };
    if p.precision == QuantPrecision::Full {
        run_full(launch, packed);
        return Ok(());
    }
    scratch::with(Need::of::<Record>(p.m * num_tiles), |mut region| {
        let records = region.slice::<Record>(p.m * num_tiles).as_mut_ptr() as usize;
        parallel_for(groups.count(), QUANTIZE_GRAIN.div_ceil(groups.most * p.k.max(1)), |part| {
            for rows in part.map(|index| groups.rows(index)) {
                let records = (records as *mut Record).wrapping_add(rows.start * num_tiles);
                dispatch(launch.tier, Quantize { p, x: launch.args.address(X), rows, records });
            }
        });
        multiply(launch, packed, records, groups, instructions);
    });
    Ok(())
}

/// In full precision.
fn run_full(launch: &Launch<'_, Problem>, packed: Option<*const u8>) {
    let p = launch.problem;
    let groups = Groups { m: p.m, most: MOST };
    scratch::with(Need::of::<f32>(p.m * p.k), |mut region| {
        let x = region.slice::<f32>(p.m * p.k).as_mut_ptr() as usize;
        parallel_for(p.m, QUANTIZE_GRAIN.div_ceil(p.k.max(1)), |rows| {
            let to = (x as *mut f32).wrapping_add(rows.start * p.k);
            dispatch(launch.tier, Widen { p, x: launch.args.address(X), rows, to });
        });
        multiply(launch, packed, x, groups, Instructions::of_tier(launch.tier, p.m));
    });
}

fn multiply(
    launch: &Launch<'_, Problem>,
    packed: Option<*const u8>,
    records: usize,
    groups: Groups,
    instructions: Instructions,
) {
    let p = launch.problem;
    let weight =
        Rows { format: p.format, data: launch.args.address(W), row: p.w_strides[0], col: p.w_strides[1] };
    let panels = Panels { weight, gate: p.gate, n: p.n, k: p.k };
    let strips = p.n.div_ceil(STRIP);
    let in_strip = PANELS * panels.halves();
    let is_full = p.precision == QuantPrecision::Full;
    let wide_bytes = match groups.most {
        _ if is_full => in_strip * full::panel_bytes(panels.num_tiles()),
        WIDE => in_strip * panels.wide_bytes(),
        _ => 0,
    };
    let strip = |strip: usize, at: *const u8, part: Range<usize>, wide: *mut u8| {
        let cols = strip * STRIP..p.n.min((strip + 1) * STRIP);
        let work = Strip { launch, panels: &panels, at, wide, records, instructions };
        let mut part = part.map(|index| groups.rows(index)).peekable();
        if is_full {
            return work.multiply_full(&cols, part);
        }
        if part.peek().is_some_and(|rows| rows.len() == WIDE) {
            work.multiply_wide(&cols, std::iter::from_fn(|| part.next_if(|rows| rows.len() == WIDE)));
        }
        part.for_each(|rows| work.multiply(&cols, rows));
    };
    let strip_bytes = in_strip * panels.bytes();
    match packed {
        Some(packed) => {
            let (packed, count) = (packed as usize, groups.count());
            let size = if groups.most == WIDE || is_full { WIDE_CHUNK } else { CHUNK };
            let grain = GRAIN.div_ceil((strip_bytes * count.min(size)).max(1));
            let need = Need::of::<u8>(wide_bytes);
            parallel_for_with_scratch(strips * count.div_ceil(size), grain, need, |items, mut region| {
                let wide = region.slice::<u8>(wide_bytes).as_mut_ptr();
                for item in items {
                    let (chunk, index) = (item / strips, item % strips);
                    let at = (packed + index * strip_bytes) as *const u8;
                    strip(index, at, chunk * size..count.min((chunk + 1) * size), wide);
                }
            });
        }
        None => {
            let need = Need::of::<u8>(strip_bytes).and::<u8>(wide_bytes);
            parallel_for_with_scratch(strips, 1, need, |items, mut region| {
                let at = region.slice::<u8>(strip_bytes).as_mut_ptr();
                let wide = region.slice::<u8>(wide_bytes).as_mut_ptr();
                for index in items {
                    for i in (0..in_strip).filter(|i| index * in_strip + i < panels.count()) {
                        // SAFETY: the scratch has room for the panels of a strip, and the weight is that of the call.
                        unsafe { panels.pack(index * in_strip + i, at.add(i * panels.bytes())) };
                    }
                    strip(index, at, 0..groups.count(), wide);
                }
            });
        }
    }
}

/// What the products with the panels of one strip need.
struct Strip<'a> {
    launch: &'a Launch<'a, Problem>,
    panels: &'a Panels,
    at: *const u8,
    /// Room for the panels in their wide form, or in f32.
    wide: *mut u8,
    /// The activations: records, or in full precision rows of f32.
    records: usize,
    instructions: Instructions,
}

impl Strip<'_> {
    /// The results of some columns for a group of rows.
    fn multiply(&self, cols: &Range<usize>, rows: Range<usize>) {
        let mut sums = [[[0f32; STRIP]; MOST]; 2];
        self.for_panels(cols, |panel, half, index| {
            let product = Product {
                format: self.panels.weight.format,
                panel: self.at.wrapping_add(index * self.panels.bytes()),
                num_tiles: self.panels.num_tiles(),
                x: self.records(rows.start),
                rows: rows.len(),
                sums: sums[half].as_flattened_mut()[panel * ROWS..].as_mut_ptr(),
                pitch: STRIP,
            };
            // SAFETY: the panels are packed, the group has its records, the sums have room for a panel's columns of each
            // row, and the instructions are the machine's.
            unsafe { product.run(self.instructions) };
        });
        self.finish(cols, rows, &mut sums);
    }

    /// The results of some columns for groups of [`WIDE`] rows.
    fn multiply_wide(&self, cols: &Range<usize>, groups: impl Iterator<Item = Range<usize>>) {
        let (format, num_tiles) = (self.panels.weight.format, self.panels.num_tiles());
        let wide = |index: usize| self.wide.wrapping_add(index * self.panels.wide_bytes());
        self.for_panels(cols, |_, _, index| {
            let panel = self.at.wrapping_add(index * self.panels.bytes());
            // SAFETY: the panels are packed, there is room for all of a strip in wide form, and a machine with tiles has
            // AVX-512.
            unsafe { widen(format, panel, num_tiles, wide(index)) };
        });
        // SAFETY: groups of this size are made for machines with tiles, which nothing else here uses.
        let mut multiplier = unsafe { Multiplier::new(format) };
        let mut sums = [[[0f32; STRIP]; WIDE]; 2];
        for rows in groups {
            let products = cols.len().div_ceil(ROWS) * self.panels.halves();
            self.for_panels(cols, |panel, half, index| {
                // A share of the rows with each product: the processor has few prefetches in flight at a time.
                let share = |index: usize| rows.start + index * WIDE / products;
                ask_for_memory(self.launch, share(index)..share(index + 1), cols);
                let product = WideProduct {
                    format,
                    panel: wide(index),
                    num_tiles,
                    x: self.records(rows.start).cast(),
                    sums: sums[half].as_flattened_mut()[panel * ROWS..].as_mut_ptr(),
                    pitch: STRIP,
                };
                // SAFETY: the panels were widened, the group has its records, which with those of whole groups before it
                // start on cache lines, and the sums have room for a panel's columns of each row.
                unsafe { multiplier.run(&product) };
            });
            self.finish(cols, rows, &mut sums);
        }
    }

    /// The results of some columns for groups of rows, in full precision.
    fn multiply_full(&self, cols: &Range<usize>, groups: impl Iterator<Item = Range<usize>>) {
        let (format, num_tiles) = (self.panels.weight.format, self.panels.num_tiles());
        let tier = self.launch.tier;
        let wide = |index: usize| self.wide.wrapping_add(index * full::panel_bytes(num_tiles)).cast::<f32>();
        self.for_panels(cols, |_, _, index| {
            let panel = self.at.wrapping_add(index * self.panels.bytes());
            dispatch(tier, Expand { format, panel, num_tiles, to: wide(index) });
        });
        let mut sums = [[[0f32; STRIP]; MOST]; 2];
        for rows in groups {
            self.for_panels(cols, |panel, half, index| {
                let product = FullProduct {
                    panel: wide(index),
                    num_tiles,
                    x: (self.records as *const f32).wrapping_add(rows.start * self.panels.k),
                    rows: rows.len(),
                    sums: sums[half].as_flattened_mut()[panel * ROWS..].as_mut_ptr(),
                    pitch: STRIP,
                };
                dispatch(tier, product);
            });
            self.finish(cols, rows, &mut sums);
        }
    }

    /// Calls `f` with the number of each panel among those of its half, its half, and its place in the strip.
    fn for_panels(&self, cols: &Range<usize>, mut f: impl FnMut(usize, usize, usize)) {
        let halves = self.panels.halves();
        for panel in 0..cols.len().div_ceil(ROWS) {
            for half in 0..halves {
                f(panel, half, panel * halves + half);
            }
        }
    }

    /// The records of the group that begins with a row.
    fn records(&self, row: usize) -> *const Record {
        (self.records as *const Record).wrapping_add(row * self.panels.num_tiles())
    }

    fn finish<const R: usize>(
        &self,
        cols: &Range<usize>,
        rows: Range<usize>,
        sums: &mut [[[f32; STRIP]; R]; 2],
    ) {
        let [sums, ups] = sums;
        let (sums, ups) = (&mut sums[..rows.len()], &mut ups[..rows.len()]);
        dispatch(self.launch.tier, Finish { launch: self.launch, rows, cols: cols.clone(), sums, ups });
    }
}

/// The instructions that multiply in a tier, as text.
pub(super) fn config(tier: crate::cpu::Tier, p: &Problem) -> String {
    if p.precision == QuantPrecision::Full {
        return "activations in f32".into();
    }
    format!("activations in 8 bits, {:?}", Instructions::of_tier(tier, p.m)).to_lowercase()
}
