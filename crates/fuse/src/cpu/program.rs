//! What a kernel does with one tile: steps on registers, in phases.
//!
//! A *tile* is some whole rows of the domain, one row, or one chunk of a row. Registers hold it, padded, in the L1 cache; a
//! reduction needs every chunk of its row, so what uses its result comes in a later phase, which goes through the chunks
//! again.

use super::ops::{BlockFn, Link, MAX_OPERANDS};
use crate::op::Reduce;
use crate::shape::Dim;

/// How tiles lie in the domain.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub(super) enum Mode {
    /// Several rows.
    Many,
    /// One row.
    One,
    /// One chunk of a row.
    Long,
}

/// Where a register lies and how much it holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Space {
    /// A tile.
    Tile,
    /// One element for each row of the tile; where a tile has one row, [`super::ops::PAD`] copies of it.
    Row,
    /// A whole row, kept from phase to phase or from tile to tile.
    Line,
    /// [`super::ops::PAD`] copies of a number.
    Number,
}

/// A register. Before registers are assigned, each result has its own.
#[derive(Clone, Copy, Debug)]
pub(super) struct Register {
    pub space: Space,
    /// Whether it holds whole numbers, in 8 bytes rather than 4.
    pub wide: bool,
}

/// One of the program's registers.
pub(super) type Slot = u16;

/// One step.
#[derive(Clone, Debug)]
pub(super) enum Step {
    /// Loads the part of a tensor that belongs to the tile, or one element for each row.
    Load { tensor: usize, to: Slot },
    /// Loads rows of the tensor `table` by the numbers in the tensor `index`.
    Gather { table: usize, index: usize, to: Slot },
    /// An operation, and the link it would be in a chain. `count` operands count.
    Apply { f: BlockFn, link: Option<Link>, to: Slot, from: [Slot; MAX_OPERANDS], count: usize },
    /// One element for each row becomes a tile.
    Spread { from: Slot, to: Slot },
    /// Exchanges the halves of the rows of a tile, and negates what comes first.
    Rotate { from: Slot, to: Slot },
    /// Reduces the rows of a tile, or of a chunk, into the register of rows. With two operands, sums their products.
    Reduce { f: Reduce, from: [Slot; 2], count: usize, to: Slot },
    /// Stores a tile, or one element for each row.
    Store { tensor: usize, from: Slot },
    /// Adds the rows of a tile to the sums over rows.
    Accumulate { sum: usize, from: Slot },
}

impl Step {
    pub fn result(&self) -> Option<Slot> {
        match *self {
            Step::Load { to, .. }
            | Step::Gather { to, .. }
            | Step::Apply { to, .. }
            | Step::Rotate { to, .. }
            | Step::Spread { to, .. } => Some(to),
            Step::Reduce { to, .. } => Some(to),
            Step::Store { .. } | Step::Accumulate { .. } => None,
        }
    }

    pub fn operands(&self) -> &[Slot] {
        match self {
            Step::Load { .. } | Step::Gather { .. } => &[],
            Step::Apply { from, count, .. } => &from[..*count],
            Step::Reduce { from, count, .. } => &from[..*count],
            Step::Spread { from, .. }
            | Step::Rotate { from, .. }
            | Step::Store { from, .. }
            | Step::Accumulate { from, .. } => std::slice::from_ref(from),
        }
    }

    pub fn rename(&mut self, of: impl Fn(Slot) -> Slot) {
        match self {
            Step::Load { to, .. } | Step::Gather { to, .. } => *to = of(*to),
            Step::Apply { to, from, count, .. } => {
                *to = of(*to);
                from[..*count].iter_mut().for_each(|slot| *slot = of(*slot));
            }
            Step::Spread { from, to } | Step::Rotate { from, to } => (*from, *to) = (of(*from), of(*to)),
            Step::Reduce { from, count, to, .. } => {
                *to = of(*to);
                from[..*count].iter_mut().for_each(|slot| *slot = of(*slot));
            }
            Step::Store { from, .. } | Step::Accumulate { from, .. } => *from = of(*from),
        }
    }
}

/// What is done before and during one walk through the chunks of a tile.
#[derive(Clone, Debug, Default)]
pub(super) struct Phase {
    /// On elements of rows, once.
    pub rows: Vec<Step>,
    /// For each chunk.
    pub tiles: Vec<Step>,
}

/// The steps of a kernel in one mode.
#[derive(Clone, Debug)]
pub(super) struct Program {
    pub mode: Mode,
    pub registers: Vec<Register>,
    /// Numbers, and the registers that hold them.
    pub numbers: Vec<(Slot, f64)>,
    /// Whole numbers, likewise.
    pub integers: Vec<(Slot, i64)>,
    /// Sizes, likewise.
    pub sizes: Vec<(Slot, Dim)>,
    /// On whole columns, once for each part of the work.
    pub columns: Vec<Step>,
    pub phases: Vec<Phase>,
    /// Registers whose contents are an output as they are, with the tensor.
    pub direct: Vec<(Slot, usize)>,
}

impl Program {
    /// The bytes that registers of tiles have for each element.
    pub fn tile_bytes(&self) -> usize {
        let tiles = self.registers.iter().filter(|register| register.space == Space::Tile);
        tiles.map(|register| if register.wide { 8 } else { 4 }).sum()
    }

    pub fn has_reductions(&self) -> bool {
        self.phases.len() > 1
    }
}
