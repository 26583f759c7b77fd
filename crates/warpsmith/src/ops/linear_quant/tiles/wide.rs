//! Many rows at a time: what AMX multiplies.
//!
//! A step is as many k as have one scale: 32, or 16 where halves have scales of their own. A wide panel has, for each
//! step, signed bytes `[k / 4][16][4]`, which are the quants less their zero point, then the rows' scales in f32, then
//! their minima if there are any. It is made from a panel, and used for as many rows of `x` as there are.

use super::{QuantFormat, ROWS, Record, Shape, Tile};
use crate::cpu::scratch::Plain;

/// Rows of `x` that are multiplied at once.
pub(in crate::ops::linear_quant) const WIDE: usize = 16;
/// With fewer rows of `x` than this, it would take longer to make wide panels than they save.
pub(in crate::ops::linear_quant) const LEAST_ROWS: usize = 2 * WIDE;

/// 32 activations of each of [`WIDE`] rows. It fits into the memory of as many [`Record`]s.
#[derive(Clone, Copy)]
#[repr(C)]
pub(in crate::ops::linear_quant) struct WideRecord {
    /// Signed bytes.
    pub quants: [[u8; 32]; WIDE],
    pub scales: [f32; WIDE],
    /// Sums of the activations, of all 32 or of each half.
    pub totals: [[f32; WIDE]; 2],
}

impl WideRecord {
    /// Puts the activations of one row.
    #[inline(always)]
    pub fn put(&mut self, row: usize, record: &Record) {
        for (four, bytes) in record.quants.iter().zip(self.quants[row].chunks_exact_mut(4)) {
            bytes.copy_from_slice(&four.to_ne_bytes());
        }
        self.scales[row] = record.scale;
        // Meant for formats with a minimum, and read for no others.
        for (totals, bits) in self.totals.iter_mut().zip(record.offsets) {
            totals[row] = f32::from_bits(bits as u32);
        }
    }
}

const _: () = assert!(size_of::<WideRecord>() == WIDE * size_of::<Record>());

// SAFETY: numbers without padding.
unsafe impl Plain for WideRecord {}

/// Numbers of a wide panel that follow from the shape of the tiles it is made from.
pub(super) trait Steps: Shape {
    /// Steps for each tile.
    const IN_TILE: usize = 1 + Self::HALVES as usize;
    /// Bytes of the quants of a step.
    const STEP_QUANTS: usize = 512 / Self::IN_TILE;
    /// Bytes of a step.
    const STEP_BYTES: usize = Self::STEP_QUANTS + 64 * (1 + Self::MIN as usize);
}

impl<S: Shape> Steps for S {}

/// Bytes of a wide panel.
pub(in crate::ops::linear_quant) fn panel_bytes(format: QuantFormat, num_tiles: usize) -> usize {
    with_shape!(format, S => num_tiles * S::IN_TILE * S::STEP_BYTES)
}

/// Makes a wide panel at `to` from a panel.
///
/// # Safety
/// The pointers must be good for what the numbers say, `to` must be on a cache line, and the machine must have AVX-512.
pub(in crate::ops::linear_quant) unsafe fn widen(
    format: QuantFormat,
    panel: *const u8,
    num_tiles: usize,
    to: *mut u8,
) {
    #[cfg(not(target_arch = "x86_64"))]
    unreachable!("{format:?} at {panel:?}, {num_tiles} tiles, to {to:?}: only x86-64 multiplies wide panels");
    #[cfg(target_arch = "x86_64")]
    // SAFETY: passed on.
    with_shape!(format, S => unsafe { super::amx::widen::<S>(format.zero_point(), panel, num_tiles, to) })
}

/// A wide panel, and rows of `x` to multiply it with.
#[derive(Clone, Copy)]
pub(in crate::ops::linear_quant) struct WideProduct {
    pub format: QuantFormat,
    /// Made by [`widen`].
    pub panel: *const u8,
    pub num_tiles: usize,
    /// One for each tile.
    pub x: *const WideRecord,
    /// Where the sums go: [`WIDE`] rows of [`ROWS`], `pitch` apart.
    pub sums: *mut f32,
    pub pitch: usize,
}

/// A thread's right to multiply panels of one format.
pub(in crate::ops::linear_quant) struct Multiplier {
    format: QuantFormat,
    #[cfg(target_arch = "x86_64")]
    _tiles: crate::cpu::gemm::Tiles,
}

impl Multiplier {
    /// # Safety
    /// The machine must have [`super::Instructions::Amx`], and nothing else may use its tiles on this thread while this
    /// value is alive.
    pub unsafe fn new(format: QuantFormat) -> Multiplier {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: passed on.
        let mut tiles = unsafe { crate::cpu::gemm::Tiles::new() };
        #[cfg(target_arch = "x86_64")]
        tiles.configure_bytes(with_shape!(format, S => 32 / S::IN_TILE));
        Multiplier {
            format,
            #[cfg(target_arch = "x86_64")]
            _tiles: tiles,
        }
    }

    /// Makes the sums.
    ///
    /// # Safety
    /// The pointers must be good for what the numbers say, panel and records on cache lines.
    pub unsafe fn run(&mut self, product: &WideProduct) {
        debug_assert!(product.format == self.format && ROWS == 16);
        #[cfg(not(target_arch = "x86_64"))]
        unreachable!("only x86-64 multiplies wide panels");
        #[cfg(target_arch = "x86_64")]
        // SAFETY: passed on; the tiles are configured for the format.
        with_shape!(product.format, S => unsafe { super::amx::sums::<S>(product) })
    }
}
