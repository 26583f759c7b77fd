//! Products in plain Rust.

use super::{MOST, Product, ROWS, Shape};
use crate::cpu::array;
use half::f16;

/// The sums of all rows of `x`, one function for any number of them: unrolled for each number, these took the compiler longer
/// than any other part of the library.
///
/// # Safety
/// As [`Product::run`].
#[inline(never)]
pub(super) unsafe fn sums<S: Shape>(p: &Product) {
    let mut room = [[0f32; ROWS]; MOST];
    let sums = &mut room[..p.rows];
    for b in 0..p.num_tiles {
        // SAFETY: tile `b` is in the panel.
        let tile = unsafe { std::slice::from_raw_parts(p.panel.add(b * S::BYTES), S::BYTES) };
        let mut quants = [[[0u8; 4]; ROWS]; 8];
        for (g, fours) in tile[..S::QUANTS].chunks_exact(4 * ROWS).enumerate() {
            for (row, bytes) in fours.chunks_exact(4).enumerate() {
                for (i, &byte) in bytes.iter().enumerate() {
                    match S::NIBBLES {
                        true => (quants[g][row][i], quants[g + 4][row][i]) = (byte & 15, byte >> 4),
                        false => quants[g][row][i] = byte,
                    }
                }
            }
        }
        let number = |which: usize, row: usize| {
            let at = &tile[S::QUANTS + which * S::SCALES..];
            match S::F16 {
                true => f16::from_ne_bytes([at[2 * row], at[2 * row + 1]]).to_f32(),
                false => f32::from_ne_bytes(array(|i| at[4 * row + i])),
            }
        };
        for (r, sums) in sums.iter_mut().enumerate() {
            // SAFETY: there is a record of each row for each tile.
            let x = unsafe { &*p.x.add(b * p.rows + r) };
            let signed: [[i8; 4]; 8] = x.quants.map(|four| four.to_ne_bytes().map(|byte| byte as i8));
            for (row, sum) in sums.iter_mut().enumerate() {
                let mut dots = if S::MIN { [0; 2] } else { x.offsets };
                for g in 0..8 {
                    let half = if S::HALVES { g / 4 } else { 0 };
                    for i in 0..4 {
                        dots[half] += i32::from(quants[g][row][i]) * i32::from(signed[g][i]);
                    }
                }
                for half in 0..S::PARTS {
                    *sum = (dots[half] as f32).mul_add(x.scale * number(half, row), *sum);
                    if S::MIN {
                        let total = f32::from_bits(x.offsets[half] as u32);
                        *sum = total.mul_add(number(S::PARTS + half, row), *sum);
                    }
                }
            }
        }
    }
    for (r, sums) in sums.iter().enumerate() {
        for (row, &sum) in sums.iter().enumerate() {
            // SAFETY: there is room for the sums of each row.
            unsafe { *p.sums.add(r * p.pitch + row) = sum };
        }
    }
}
