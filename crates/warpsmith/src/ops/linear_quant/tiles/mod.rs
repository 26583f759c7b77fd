//! Products of quantised weights with quantised activations, 16 rows of the weight at a time; [`full`] has those with
//! activations that are not quantised.
//!
//! A tile holds 32 weights of each of 16 rows, as unsigned bytes `[8][16][4]` (k in fours, rows, k within the four) or as
//! nibbles `[4][16][4]` (k 0 to 15 low, 16 to 31 high), followed by the rows' scales and minima. A panel is the tiles of
//! 16 rows over all of K.
//!
//! What a row of the result is, bit for bit, on every tier and for any number of rows: `sum = 0`, then for each 32 of K,
//! with the exact integer `dot` of the quants less their zero point, `sum = fma(dot, scale_x * scale_w, sum)`; for formats
//! with a minimum then `sum = fma(total_x, min_w, sum)`, where `total_x` is the sum of the 32 activations. For formats whose
//! halves have scales of their own, this is done for each half.

/// Runs `$body` with `$shape` as the shape of a format's tiles.
macro_rules! with_shape {
    ($format:expr, $shape:ident => $body:expr) => {
        match $format {
            QuantFormat::Q4_0 => {
                type $shape = Tile<true, true, false, false>;
                $body
            }
            QuantFormat::Q4_1 => {
                type $shape = Tile<true, true, true, false>;
                $body
            }
            QuantFormat::Q5_0 | QuantFormat::Q8_0 | QuantFormat::IQ4_NL => {
                type $shape = Tile<false, true, false, false>;
                $body
            }
            QuantFormat::Q5_1 => {
                type $shape = Tile<false, true, true, false>;
                $body
            }
            QuantFormat::Q4_K => {
                type $shape = Tile<true, false, true, false>;
                $body
            }
            QuantFormat::Q5_K => {
                type $shape = Tile<false, false, true, false>;
                $body
            }
            QuantFormat::Q6_K => {
                type $shape = Tile<false, false, false, true>;
                $body
            }
            QuantFormat::Q2_K => {
                type $shape = Tile<true, false, true, true>;
                $body
            }
            QuantFormat::Q3_K => {
                type $shape = Tile<true, false, false, true>;
                $body
            }
            QuantFormat::IQ4_XS | QuantFormat::MXFP4 => {
                type $shape = Tile<false, false, false, false>;
                $body
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
pub(super) mod full;
pub(super) mod pack;
mod portable;
#[cfg(target_arch = "x86_64")]
mod vnni;
pub(super) mod wide;

use super::format::QuantFormat;
use crate::cpu::Tier;
#[cfg(target_arch = "x86_64")]
use crate::cpu::gemm::Isa;

/// Rows of the weight in a tile.
pub(super) const ROWS: usize = 16;
/// The most rows of `x` that are multiplied at once, except by AMX.
pub(super) const MOST: usize = 8;

/// How many bytes ahead of its loads a panel is prefetched: hardware prefetchers stop at the end of a page.
#[cfg(target_arch = "x86_64")]
const AHEAD: usize = 2048;

/// 32 activations of one row.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Record {
    /// Signed bytes, in fours.
    pub quants: [i32; 8],
    pub scale: f32,
    /// For weights with a minimum: the bits of the sum of the activations, in f32. For others: minus the zero point times
    /// the sum of the quants. Over all 32, and nothing; or over each half, where these have scales of their own.
    pub offsets: [i32; 2],
}

/// The instructions of the products.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Instructions {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Vnni,
    /// For [`wide::WIDE`] rows; what is left is VNNI's.
    #[cfg(target_arch = "x86_64")]
    Amx,
}

impl Instructions {
    /// The best for `m` rows of `x` that a kernel of `tier` may use. For a tier above the machine's, the best it has.
    pub fn of_tier(tier: Tier, m: usize) -> Instructions {
        #[cfg(target_arch = "x86_64")]
        return match tier.min(Tier::supported()) {
            Tier::Portable => Instructions::Portable,
            Tier::Avx512 if std::arch::is_x86_feature_detected!("avx512vnni") => {
                let tiles = m >= wide::LEAST_ROWS && Isa::of_tier(tier).has_byte_tiles();
                if tiles { Instructions::Amx } else { Instructions::Vnni }
            }
            _ => Instructions::Avx2,
        };
        #[cfg(not(target_arch = "x86_64"))]
        {
            let _ = (tier, m);
            Instructions::Portable
        }
    }

    /// The most rows of `x` that are multiplied at once.
    pub fn most_rows(self) -> usize {
        match self {
            #[cfg(target_arch = "x86_64")]
            Instructions::Amx => wide::WIDE,
            _ => MOST,
        }
    }
}

/// What a tile consists of.
pub(super) trait Shape {
    /// Nibbles rather than bytes.
    const NIBBLES: bool;
    /// Scales and minima in f16, as in the file, rather than in f32.
    const F16: bool;
    /// There are minima; then the zero point is zero.
    const MIN: bool;
    /// Two scales for each row, and two minima: of k 0 to 15 and of k 16 to 31.
    const HALVES: bool;

    /// Bytes of the quants.
    const QUANTS: usize = if Self::NIBBLES { 256 } else { 512 };
    /// Bytes of one scale of each row.
    const SCALES: usize = if Self::F16 { 32 } else { 64 };
    /// Scales of a row, and as many minima if there are any.
    const PARTS: usize = 1 + Self::HALVES as usize;
    /// Numbers that a row has beside its quants: scales, then minima.
    const NUMBERS: usize = Self::PARTS * (1 + Self::MIN as usize);
    /// Bytes of a tile.
    const BYTES: usize = Self::QUANTS + Self::SCALES * Self::NUMBERS;
    /// Whether quants may have more than seven bits.
    const WIDE: bool = !Self::NIBBLES && !Self::MIN && !Self::HALVES;
}

/// The shape with these properties.
pub(super) struct Tile<const NIBBLES: bool, const F16: bool, const MIN: bool, const HALVES: bool>;

impl<const NIBBLES: bool, const F16: bool, const MIN: bool, const HALVES: bool> Shape
    for Tile<NIBBLES, F16, MIN, HALVES>
{
    const NIBBLES: bool = NIBBLES;
    const F16: bool = F16;
    const MIN: bool = MIN;
    const HALVES: bool = HALVES;
}

/// Bytes of a tile of a format.
pub(super) fn tile_bytes(format: QuantFormat) -> usize {
    with_shape!(format, S => S::BYTES)
}

/// Whether the halves of 32 weights have scales of their own.
pub(super) fn has_halves(format: QuantFormat) -> bool {
    with_shape!(format, S => S::HALVES)
}

/// A panel of weights, and rows of `x` to multiply it with.
#[derive(Clone, Copy)]
pub(super) struct Product {
    pub format: QuantFormat,
    /// Tiles, one after the other.
    pub panel: *const u8,
    pub num_tiles: usize,
    /// For each tile, a record of each row.
    pub x: *const Record,
    /// Rows of `x`: 1, 2, 4 or 8.
    pub rows: usize,
    /// Where the sums go: rows of [`ROWS`], `pitch` apart.
    pub sums: *mut f32,
    pub pitch: usize,
}

impl Product {
    /// Makes the sums.
    ///
    /// # Safety
    /// The pointers must be good for what the numbers say, and the machine must have the instructions.
    pub unsafe fn run(self, instructions: Instructions) {
        macro_rules! rows {
            ($module:ident, $shape:ident) => {
                match self.rows {
                    1 => $module::sums::<$shape, 1>(&self),
                    2 => $module::sums::<$shape, 2>(&self),
                    4 => $module::sums::<$shape, 4>(&self),
                    _ => $module::sums::<$shape, 8>(&self),
                }
            };
        }
        // SAFETY: passed on.
        unsafe {
            match instructions {
                Instructions::Portable => with_shape!(self.format, S => portable::sums::<S>(&self)),
                #[cfg(target_arch = "x86_64")]
                Instructions::Avx2 => with_shape!(self.format, S => rows!(avx2, S)),
                #[cfg(target_arch = "x86_64")]
                Instructions::Vnni | Instructions::Amx => with_shape!(self.format, S => rows!(vnni, S)),
            }
        }
    }
}
