//! From rows of blocks, as a file has them, to tiles.

use super::{QuantFormat, ROWS, Shape, Tile};
use crate::ops::linear_quant::format::{GROUP, Group, MAX_BLOCK_BYTES};
use half::f16;

/// Rows of a weight in memory.
#[derive(Clone, Copy)]
pub(in crate::ops::linear_quant) struct Rows {
    pub format: QuantFormat,
    /// The first byte.
    pub data: usize,
    /// Bytes from one row to the next, and from one byte of a row to the next.
    pub row: isize,
    pub col: isize,
}

impl Rows {
    /// A block of a row, in `copy` if its bytes are apart.
    ///
    /// # Safety
    /// The row must have the block.
    unsafe fn block<'a>(&self, row: usize, block: usize, copy: &'a mut [u8; MAX_BLOCK_BYTES]) -> &'a [u8] {
        let bytes = self.format.block_bytes();
        let first = self.row * row as isize + self.col * (block * bytes) as isize;
        let first = self.data.wrapping_add_signed(first) as *const u8;
        let copy = &mut copy[..bytes];
        if self.col == 1 {
            // SAFETY: passed on.
            copy.copy_from_slice(unsafe { std::slice::from_raw_parts(first, bytes) });
            return copy;
        }
        for (i, byte) in copy.iter_mut().enumerate() {
            // SAFETY: passed on.
            *byte = unsafe { *first.wrapping_offset(self.col * i as isize) };
        }
        copy
    }
}

/// Writes the tiles of up to [`ROWS`] rows of `k` weights to `panel`; rows that are missing are zero.
///
/// # Safety
/// `panel` must have room for the tiles, and the rows must exist.
pub(in crate::ops::linear_quant) unsafe fn pack_panel(
    weight: &Rows,
    rows: impl Iterator<Item = usize>,
    k: usize,
    panel: *mut u8,
) {
    // SAFETY: passed on.
    with_shape!(weight.format, S => unsafe { pack::<S>(weight, rows, k, panel) })
}

unsafe fn pack<S: Shape>(weight: &Rows, rows: impl Iterator<Item = usize>, k: usize, panel: *mut u8) {
    let num_tiles = k / GROUP;
    let parts = weight.format.block_len() / GROUP;
    // SAFETY: the caller has room for the tiles.
    let panel = unsafe {
        std::ptr::write_bytes(panel, 0, num_tiles * S::BYTES);
        std::slice::from_raw_parts_mut(panel, num_tiles * S::BYTES)
    };
    for (lane, row) in rows.take(ROWS).enumerate() {
        let mut copy = [0; MAX_BLOCK_BYTES];
        for block in 0..num_tiles / parts {
            // SAFETY: the caller has the rows.
            let bytes = unsafe { weight.block(row, block, &mut copy) };
            for part in 0..parts {
                let tile = &mut panel[(block * parts + part) * S::BYTES..][..S::BYTES];
                put::<S>(&weight.format.decode(bytes, part), lane, tile);
            }
        }
    }
}

/// Puts the weights of one row into their tile.
fn put<S: Shape>(group: &Group, lane: usize, tile: &mut [u8]) {
    let (quants, rest) = tile.split_at_mut(S::QUANTS);
    // Four weights of a row lie side by side, then those of the next row.
    for (four, place) in quants.chunks_exact_mut(4 * ROWS).enumerate() {
        let place: &mut [u8; 4] = place[4 * lane..].first_chunk_mut().expect("a lane of the tile");
        for (i, place) in place.iter_mut().enumerate() {
            let quant = group.quants[4 * four + i];
            *place = if S::NIBBLES { quant | group.quants[4 * four + i + 16] << 4 } else { quant };
        }
    }
    let numbers = group.scales[..S::PARTS].iter().chain(&group.mins[..S::PARTS]).copied();
    for (number, rest) in numbers.zip(rest.chunks_exact_mut(S::SCALES)) {
        match S::F16 {
            // It came from f16.
            true => rest[2 * lane..][..2].copy_from_slice(&f16::from_f32(number).to_ne_bytes()),
            false => rest[4 * lane..][..4].copy_from_slice(&number.to_ne_bytes()),
        }
    }
}
