//! f32 on AMX tiles: every number is the sum of three bf16, and six products of those make one of f32.
//!
//! With `x = x0 + x1 + x2` and `w` likewise, the products `x2·w0`, `x1·w0`, `x1·w1`, `x0·w1`, `x0·w2` and `x0·w0` are
//! exact in f32, and what the other three would add is below its precision. All six are summed over 32 elements of k and
//! then added to the same accumulator: six roundings of a large sum for every 32 elements, where plain f32 has 32. So
//! errors are smaller than those of vectors, at twice their speed.

mod block;
mod columns;
mod few;
mod many;
mod narrow;
mod operand;
mod range;
mod recompute;
mod steps;
pub(super) mod terms;

pub(crate) use block::{
    Piece, RowSplitter, SplitBlock, SplitBlocks, Turned, ValueSplitter, left_element, split_block,
    split_left, turn_sums,
};
pub(crate) use range::Sizes;

use super::epilogue::Epilogue;
use super::matrix::Unit;
use super::packed::{Packed, PackedWeights};
use super::panel::{PANEL, Side};
use super::partition::is_swapped;
use super::results::Results;
use operand::{Operand, SplitProduct};

/// The product with packed weights, whose panels are `panels`.
///
/// # Safety
/// As for [`super::run`], with AMX.
pub(super) unsafe fn packed<E: Epilogue>(x: &Side, w: &PackedWeights, panels: Packed, epilogue: &E) {
    let results = Results { left: x, len: w.n(), panel_len: w.panel_len(), swapped: false, epilogue };
    let product = SplitProduct { left: x, right: Operand::Packed(panels), results };
    // SAFETY: passed on.
    unsafe { if x.len() <= PANEL { few::packed(&product, panels) } else { product.run() } }
}

/// The product with weights as they are.
///
/// # Safety
/// As for [`super::run`], with AMX.
pub(super) unsafe fn unpacked<E: Epilogue>(x: &Side, w: &Side, epilogue: &E) {
    if x.len() <= PANEL && w.lies_in_columns() {
        let results = Results { left: x, len: w.len(), panel_len: w.panel_len(), swapped: false, epilogue };
        // SAFETY: passed on.
        return unsafe { columns::run(&SplitProduct { left: x, right: Operand::Rows(w), results }, w) };
    }
    let few = x.len() <= PANEL && is_direct(w);
    let swapped = few || is_swapped(x, w);
    let (left, right) = if swapped { (w, x) } else { (x, w) };
    let panel_len = right.panel_len();
    let results = Results { left, len: right.len(), panel_len, swapped, epilogue };
    let product = SplitProduct { left, right: Operand::Rows(right), results };
    // SAFETY: passed on.
    unsafe { if few { few::unpacked(&product) } else { product.run() } }
}

/// Whether rows are split in place.
fn is_direct(side: &Side) -> bool {
    side.halves.iter().all(|m| m.is_units(Unit::F32))
}
