//! Few rows of f32 on tiles, times packed weights of 16 bits: they are widened and split as they are read.

use super::few::{PANEL_AHEAD, Stream, panel_magnitudes};
use super::terms::{Largest, ROW, STEP, TILE, split_pair};
use crate::cpu::gemm::narrow::NarrowPanels;
use crate::cpu::gemm::panel::{HALF, PANEL};
use crate::cpu::prefetch::{LINE, fetch_near};
use std::arch::x86_64::*;

/// Panels of f16, or of bf16.
pub(super) struct NarrowWeights<const BF16: bool>(pub NarrowPanels);

impl<const BF16: bool> Stream for NarrowWeights<BF16> {
    const PIECES: usize = 1;
    const SEEN: usize = 2;

    #[inline(always)]
    unsafe fn split(&self, piece: usize, at: usize, dst: *mut u8, seen: &mut [Largest]) {
        let len = STEP.min(self.0.k - at);
        // SAFETY: passed on; the panel holds as many elements.
        unsafe { split_panel::<BF16>(self.0.at(piece, at), len, dst, seen) };
    }

    #[inline(always)]
    unsafe fn magnitudes(&self, seen: &[Largest], of: &mut [u32]) {
        // SAFETY: passed on.
        unsafe { panel_magnitudes(seen, of) };
    }
}

/// Splits `len <= 32` elements of the 32 columns of a panel into the right tiles of the step at `dst`; what is past them becomes
/// zero.
///
/// # Safety
/// The elements must be readable and `dst` hold a step, on a cache line.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
unsafe fn split_panel<const BF16: bool>(panel: *const u16, len: usize, dst: *mut u8, seen: &mut [Largest]) {
    for pair in 0..HALF {
        let rows = panel.wrapping_add(2 * pair * PANEL);
        fetch_near(rows.cast::<u8>().wrapping_offset(PANEL_AHEAD), 2 * LINE);
        for (g, seen) in seen.iter_mut().enumerate() {
            let load = |row: usize| match 2 * pair + row < len {
                // SAFETY: the panel has the element.
                true => unsafe { widened::<BF16>(rows.wrapping_add(row * PANEL + g * HALF)) },
                false => _mm512_setzero_si512(),
            };
            let (even, odd) = (load(0), load(1));
            // SAFETY: the pair is inside the step.
            *seen = unsafe { split_pair(even, odd, dst.add(g * TILE + pair * ROW), *seen) };
        }
    }
}

/// Sixteen numbers of 16 bits as bits of f32.
///
/// # Safety
/// They must be readable.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
unsafe fn widened<const BF16: bool>(from: *const u16) -> __m512i {
    // SAFETY: passed on.
    let narrow = unsafe { _mm256_loadu_si256(from.cast()) };
    match BF16 {
        true => _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(narrow)),
        false => _mm512_castps_si512(_mm512_cvtph_ps(narrow)),
    }
}

#[cfg(feature = "tests")]
mod tests {
    use super::super::terms::{STEP_BYTES, split_columns};
    use super::*;
    use crate::cpu::Tier;
    use half::{bf16, f16};

    #[derive(PartialEq)]
    #[repr(align(64))]
    struct Step([u8; STEP_BYTES]);

    /// Every number that there is, split from 16 bits and from the same numbers in f32. Needs no tiles.
    fn check<const BF16: bool>(widen: fn(u16) -> f32) {
        for first in (0..=u16::MAX).step_by(STEP * PANEL) {
            let number = |i: u16| if widen(first + i).is_nan() { 0 } else { first + i };
            let panel: Vec<u16> = (0..(STEP * PANEL) as u16).map(number).collect();
            let wide: Vec<f32> = panel.iter().map(|&bits| widen(bits)).collect();
            for len in [STEP, STEP - 1, 1] {
                let (mut got, mut expected) = (Step([7; STEP_BYTES]), Step([9; STEP_BYTES]));
                // SAFETY: the instructions are there, and the memory is the test's.
                unsafe {
                    let zero = _mm512_setzero_si512();
                    let mut seen = [zero; 2];
                    split_panel::<BF16>(panel.as_ptr(), len, got.0.as_mut_ptr(), &mut seen);
                    for (g, seen) in seen.into_iter().enumerate() {
                        let (from, to) = (wide.as_ptr().add(g * HALF), expected.0.as_mut_ptr());
                        let largest = split_columns(from, (PANEL, 0), len, g, to, zero);
                        assert_eq!(_mm512_cmpneq_epi32_mask(seen, largest), 0, "{first} {len}");
                    }
                }
                assert!(got == expected, "numbers from {first:#x} on, {len} rows");
            }
        }
    }

    #[test]
    fn panels_of_16_bits_are_split_as_the_same_in_f32() {
        if Tier::supported() == Tier::Avx512 {
            check::<false>(|bits| f16::from_bits(bits).to_f32());
            check::<true>(|bits| bf16::from_bits(bits).to_f32());
        }
    }
}
