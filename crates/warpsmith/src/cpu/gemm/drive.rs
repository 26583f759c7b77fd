//! Which kernels multiply: tiles, tiles of split f32, or vectors.

use super::blocked;
use super::epilogue::Epilogue;
use super::isa::Isa;
use super::matrix::Unit;
use super::packed::{Packed, PackedWeights};
use super::panel::Side;
use super::{lines, narrow, stream, tiles, vector};

/// The product with packed weights.
///
/// # Safety
/// The matrix of `x` must be readable and `epilogue` be able to store the product.
pub(super) unsafe fn packed<E: Epilogue>(x: &Side, w: &PackedWeights, epilogue: &E) {
    // SAFETY: passed on.
    unsafe {
        let panels = w.panels();
        if let Packed::Wide(panels) = panels
            && is_on_tiles(w.isa(), w.unit())
        {
            return tiles::packed(x, w, panels, epilogue);
        }
        #[cfg(target_arch = "x86_64")]
        if is_split(w.isa(), w.k()) {
            return super::split::packed(x, w, panels, epilogue);
        }
        match panels {
            Packed::Wide(panels) => blocked::packed(x, w, panels, epilogue),
            Packed::Narrow(panels) if x.len() <= narrow::MOST_ROWS => {
                narrow::few(w.isa(), x, &panels, (w.n(), w.panel_len()), epilogue);
            }
            Packed::Narrow(panels) => blocked::narrow(x, w, panels, epilogue),
        }
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
            return tiles::unpacked(unit, x, w, epilogue);
        }
        #[cfg(target_arch = "x86_64")]
        if is_split(isa, x.k()) {
            return super::split::unpacked(x, w, epilogue);
        }
        if x.len() <= vector::block_rows(isa) {
            if unit == Unit::F32 && w.lies_in_columns() {
                return lines::run(isa, x, w, epilogue);
            }
            return stream::run(isa, unit, x, w, epilogue);
        }
        blocked::unpacked(isa, unit, x, w, epilogue);
    }
}

/// Whether tiles multiply the units as they are.
fn is_on_tiles(isa: Isa, unit: Unit) -> bool {
    isa.has_tiles() && unit != Unit::F32
}

/// The longest k over which f32 is multiplied on vectors although there are tiles. Tiles always multiply 32 elements of
/// k, padding included, and their operands must be split first.
#[cfg(target_arch = "x86_64")]
const SHORT: usize = 8;

/// Whether tiles multiply f32 in terms.
#[cfg(target_arch = "x86_64")]
fn is_split(isa: Isa, k: usize) -> bool {
    isa.has_tiles() && k > SHORT
}
