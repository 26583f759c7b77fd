//! What a kernel's code depends on beside its graph, and how its threads are laid out for that.

use super::source::Writer;
use crate::graph::Graph;
use crate::kernel::Role;
use crate::plan::{Kernel, Kind};
use warpsmith::DType;

/// Bytes of registers of a thread for the elements of its rows, at most.
const MAX_HELD: usize = 384;
/// Registers of a multiprocessor, and those of a thread that compute.
const REGISTERS: usize = 64 << 10;
const WORKING: usize = 64;
/// Threads of a row, at most; as long as it is read four times at most, and beyond.
const LANES: usize = 256;
const MAX_LANES: usize = 1024;
/// Columns of a thread where none of the tensors is dense.
const APART: usize = 4;
/// Threads of a block that has several rows.
const BLOCK: usize = 256;
/// Threads that sums over rows are spread over: two blocks for each multiprocessor of an H200.
const SUM_THREADS: usize = 264 * BLOCK;
/// Rows that a thread adds up, at least, and those of a thread whose rows are reduced too.
const PIECE: usize = 4;
const REDUCED_PIECE: usize = 2;
/// Bytes of rows that a thread loads ahead, at most.
const AHEAD: usize = 128;
/// Nodes beyond which fewer rows are loaded ahead: the code for each is its own.
const MANY: usize = 32;
/// Bytes of registers of a thread for the elements of its rows, where a row belongs to a warp.
const WARP_HELD: usize = 192;
/// Bytes of shared memory for what the rows of a block have added up.
const SHARED: usize = 32 << 10;

/// What a kernel's code depends on beside its graph.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Variant {
    /// Columns of a row.
    pub columns: usize,
    /// Whether the graph itself says how many.
    pub fixed: bool,
    /// Dimensions of the rows, after those that can be merged were.
    pub rank: usize,
    /// Where there are sums over rows: rows that become one, and those that are left.
    pub summed: usize,
    /// See `summed`.
    pub kept: usize,
    /// Of each tensor in order, whether its rows are dense and aligned to 16 bytes.
    pub dense: Vec<bool>,
    /// Whether positions take more than 31 bits.
    pub large: bool,
}

impl Variant {
    /// Rows of this many columns, of tensors that are all dense and aligned or none.
    pub fn plain(columns: usize, dense: bool) -> Variant {
        let dense = vec![dense; 64];
        Variant { columns, fixed: false, rank: 1, summed: 1024, kept: 1, dense, large: false }
    }
}

/// Whether rows fit into the registers of their threads.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Rows {
    /// Every thread keeps its columns.
    Kept,
    /// Columns are read again after each reduction.
    ReadAgain,
}

/// How a kernel's threads are laid out.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Config {
    /// Columns that a thread takes at once.
    pub vector: usize,
    /// Columns from one of those to the next.
    pub jump: usize,
    /// Times that many a thread has in registers.
    pub items: usize,
    /// Threads of a row.
    pub lanes: usize,
    /// Rows of a block.
    pub rows: usize,
    /// Whether rows stay in registers.
    pub kept: Rows,
    /// In how many pieces rows are summed.
    pub pieces: usize,
    /// Sums over rows: the rows that a thread loads before it computes with the first of them.
    pub ahead: usize,
    /// Whether all columns of all threads exist.
    pub exact: bool,
}

impl Config {
    /// The layout for a variant.
    pub fn new(graph: &Graph, kernel: &Kernel, variant: &Variant) -> Config {
        let writer = Writer::new(graph, kernel, Rows::Kept);
        let vector = vector(&writer, variant);
        let columns = variant.columns.max(1);
        let mut this = Config {
            vector: vector.unwrap_or(APART),
            jump: 1,
            items: 1,
            lanes: 1,
            rows: 1,
            kept: Rows::Kept,
            pieces: 1,
            ahead: 1,
            exact: false,
        };
        let units = columns.div_ceil(this.vector);
        match kernel.kind {
            Kind::Elements => {
                if vector.is_none() {
                    this.lanes = units.next_power_of_two().min(LANES);
                }
            }
            Kind::Columns if writer.phases == 1 => {
                this.lanes = units.next_power_of_two().clamp(8, 32);
                let most = SHARED / (this.lanes * this.vector * size_of::<f32>());
                this.rows = (BLOCK / this.lanes).min(most).min(variant.summed.next_power_of_two());
                // Whole warps, so that blocks are not smaller than that.
                this.rows = this.rows.max(32 / this.lanes);
            }
            kind => this.lay_rows(&writer, kind, units),
        }
        if vector.is_none() {
            this.jump = this.lanes;
        }
        let span = this.span();
        this.exact = match kernel.kind {
            Kind::Elements => columns.is_multiple_of(this.lanes * this.vector),
            Kind::Columns if writer.phases == 1 => columns.is_multiple_of(span),
            _ => this.kept == Rows::Kept && columns == span,
        };
        if kernel.kind == Kind::Columns {
            let threads = variant.kept * this.tiles(columns) * this.lanes * this.rows;
            let least = if writer.phases == 1 { PIECE } else { REDUCED_PIECE };
            let most = variant.summed.div_ceil(this.rows * least).max(1);
            this.pieces = (SUM_THREADS / threads.max(1)).clamp(1, most);
            this.ahead = this.rows_ahead(&writer);
        }
        this
    }

    /// Rows that a thread loads before it computes with the first of them.
    fn rows_ahead(&self, writer: &Writer<'_>) -> usize {
        let loaded = (writer.loaded_bytes(self.vector).1 * self.items).max(1);
        if writer.phases > 1 {
            let held = writer.held_bytes(self.vector) * self.items;
            return if loaded <= AHEAD && held + loaded <= MAX_HELD { 2 } else { 1 };
        }
        if writer.shape.gathers() {
            return 1;
        }
        let most = if writer.shape.nodes.len() > MANY { 2 } else { PIECE };
        (AHEAD / loaded).clamp(1, most)
    }

    /// Threads that add up the pieces of a column.
    pub fn groups(&self) -> usize {
        if self.pieces <= 64 { 8 } else { 32 }
    }

    /// Lays out threads for kernels that reduce rows.
    fn lay_rows(&mut self, writer: &Writer<'_>, kind: Kind, units: usize) {
        let held = writer.held_bytes(self.vector).max(1);
        let sums = kind == Kind::Columns;
        // Within a warp nobody waits for a barrier, and a thread has more loads on their way.
        let warp = (1..=4).map(|items| (items, lanes_for(units.div_ceil(items))));
        if let Some((items, lanes)) = warp.into_iter().find(|(_, lanes)| *lanes <= 32)
            && held * items <= WARP_HELD
        {
            return self.keep_rows(items, lanes, sums);
        }
        for items in 1..=4 {
            let lanes = lanes_for(units.div_ceil(items));
            let most = if items < 4 { LANES } else { MAX_LANES };
            if lanes <= most && held * items <= MAX_HELD {
                return self.keep_rows(items, lanes, sums);
            }
        }
        if sums {
            // Sums over rows that are read again go through memory: better have a multiprocessor for each block.
            let alone = (1..=8).map(|items| (items, lanes_for(units.div_ceil(items))));
            let alone = alone.filter(|(_, lanes)| *lanes <= MAX_LANES);
            let left =
                |&(items, lanes): &(usize, usize)| registers_alone(lanes).checked_sub(held * items / 4);
            if let Some((items, lanes)) = alone.max_by_key(left)
                && left(&(items, lanes)) >= Some(WORKING)
            {
                return self.keep_rows(items, lanes, sums);
            }
        }
        (self.items, self.lanes, self.rows, self.kept) = (1, 512, 1, Rows::ReadAgain);
    }

    /// Lays out threads so that each keeps the columns of `items` steps.
    fn keep_rows(&mut self, items: usize, lanes: usize, sums: bool) {
        (self.items, self.lanes) = (items, if sums { lanes.max(32) } else { lanes });
        self.rows = match self.lanes {
            ..=32 if sums => {
                let row = self.lanes * items * self.vector * size_of::<f32>();
                (BLOCK / self.lanes).min(SHARED / row).max(1)
            }
            ..=32 => 128 / self.lanes,
            _ => 1,
        };
    }

    /// Columns of a block.
    pub fn span(&self) -> usize {
        self.items * self.lanes * self.vector
    }

    /// Blocks that the columns of sums are dealt to. Rows that are reduced too belong to one.
    pub fn tiles(&self, columns: usize) -> usize {
        if self.kept == Rows::ReadAgain { 1 } else { columns.div_ceil(self.span()) }
    }
}

/// Registers of each of this many threads, if there is no other block. They are dealt to four warps at a time.
fn registers_alone(lanes: usize) -> usize {
    (REGISTERS / lanes.next_multiple_of(128) / 8 * 8).min(255)
}

/// A part of a warp, or whole warps.
fn lanes_for(units: usize) -> usize {
    if units <= 32 { units.next_power_of_two().max(4) } else { units.next_multiple_of(32) }
}

/// Neighbouring columns that threads take at once; none if no tensor has them side by side.
fn vector(writer: &Writer<'_>, variant: &Variant) -> Option<usize> {
    let sums = writer.shape.sums.len();
    let all = writer.shape.reads.iter().chain(&writer.shape.writes);
    let elements = all.enumerate().filter(|(_, tensor)| matches!(tensor.role, Role::Elements | Role::Table));
    let elements: Vec<(usize, DType)> = elements.map(|(t, tensor)| (t, tensor.dtype)).collect();
    let any = elements.iter().any(|(t, _)| variant.dense.get(*t).copied().unwrap_or(false));
    if !(any || elements.is_empty() && sums > 0) {
        return None;
    }
    let narrow = elements.iter().any(|(_, dtype)| dtype.size() == 2);
    Some(if narrow { 8 } else { 4 })
}
