//! Values that tiles cannot multiply, because their products are out of range: tiles see zeros, and vectors add them.

use crate::cpu::attention::band::{Band, View};
use crate::cpu::attention::call::KEYS;
use crate::cpu::gemm::{Blocks, left_element};
use std::ops::Range;

const PANEL: usize = Blocks::PANEL;

/// The values of a block that are not among the split ones, of one panel of columns: a bit for each key, by panel of keys.
pub(super) type LeftOut = [u32; KEYS / PANEL];

/// Whether some of the keys of these panels were left out.
pub(super) fn is_left_out(left_out: &[LeftOut], panels: &Range<usize>) -> bool {
    left_out.iter().any(|of_column| of_column[panels.clone()].iter().any(|&keys| keys != 0))
}

/// Adds the values that were left out, one after the other, to the sums of the rows that see them.
///
/// # Safety
/// `row` must give 32 values of a key of the block from some panel of columns on, and the view's exponentials be split. AVX-512
/// must be there.
#[cold]
#[inline(never)]
#[target_feature(enable = "avx512f,fma")]
pub(super) unsafe fn add_values(
    band: &Band<'_>,
    view: &View,
    left_out: &[LeftOut],
    row: impl Fn(usize, usize) -> *const f32,
) {
    let panels = view.panels();
    for (column, left_out) in left_out.iter().enumerate() {
        let keys = panels.start * PANEL..panels.end * PANEL;
        for key in keys.filter(|key| left_out[key / PANEL] >> (key % PANEL) & 1 != 0) {
            let step = view.exponentials().wrapping_add(key / PANEL * Blocks::SPLIT);
            let values = row(key, column);
            for r in (0..band.rows()).filter(|&r| band.sees(r, view.first() + key)) {
                let sums = band.sums(column).wrapping_add(r * PANEL);
                // SAFETY: the exponentials of the panel are there, and rows of sums are whole panels.
                unsafe {
                    let e = left_element(step, r, key % PANEL);
                    for i in 0..PANEL {
                        *sums.add(i) = e.mul_add(*values.add(i), *sums.add(i));
                    }
                }
            }
        }
    }
}
