//! The operands of a product of split f32, and how a panel of the right one is split.

use super::range::Magnitudes;
use super::terms::{STEP, STEP_BYTES, magnitudes, split_columns};
use crate::cpu::gemm::isa::Isa;
use crate::cpu::gemm::matrix::Unit;
use crate::cpu::gemm::packed::Packed;
use crate::cpu::gemm::panel::{HALF, PANEL, Panels, Side};
use crate::cpu::gemm::partition::Depth;
use crate::cpu::gemm::results::Results;
use std::arch::x86_64::*;

/// Elements of k of a panel that are transposed before they are split.
pub(super) const STAGE: usize = 4 * STEP;

/// The right operand.
#[derive(Copy, Clone)]
pub(super) enum Operand<'a> {
    Rows(&'a Side),
    /// Panels of f32, or of 16 bits.
    Packed(Packed),
}

/// A product and where its results go.
pub(super) struct SplitProduct<'a, E> {
    pub left: &'a Side,
    pub right: Operand<'a>,
    pub results: Results<'a, E>,
}

/// Splits the steps `k` of a panel of a right operand of `elements` elements of k to `dst`.
///
/// # Safety
/// The panel must be inside the operand, `dst` hold the steps, and `stage` [`STAGE`] units of a panel.
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) unsafe fn split_panel(
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
                Operand::Packed(Packed::Wide(panels)) => panels.at(panel, from).cast::<f32>(),
                Operand::Packed(Packed::Narrow(panels)) => {
                    panels.widen(Isa::Amx.tier(), panel, from, units, stage);
                    stage
                }
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
                    *largest = split_columns(src, (PANEL, 0), STEP.min(units - step), g, to, *largest);
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
