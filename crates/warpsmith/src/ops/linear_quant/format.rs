//! The block formats of quantised weights, as GGUF files have them.

use crate::cpu::array;
use crate::error::{Error, Result};
use half::f16;

/// Weights that are decoded at a time: the smallest block of any format.
pub(super) const GROUP: usize = 32;
/// Bytes of the largest block.
pub(super) const MAX_BLOCK_BYTES: usize = 210;
/// Weights of a block of the K formats.
const SUPER_BLOCK: usize = 256;

/// How weights are stored in blocks, each with its own scales.
///
/// ```
/// use warpsmith::ops::QuantFormat;
/// let format = QuantFormat::Q4_1;
/// assert_eq!((format.block_len(), format.block_bytes(), format.row_bytes(576)), (32, 20, Some(360)));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[allow(missing_docs, non_camel_case_types)]
pub enum QuantFormat {
    #[default]
    Q8_0,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q4_K,
    Q5_K,
    Q6_K,
    Q2_K,
    Q3_K,
    IQ4_NL,
    IQ4_XS,
    MXFP4,
}
use QuantFormat::*;

/// The numbers that the nibbles of the IQ4 formats stand for, plus 128.
const IQ4: [u8; 16] = [1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241];
/// The numbers that the nibbles of MXFP4 stand for, twice, plus 12.
const FP4: [u8; 16] = [12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0];

/// 32 weights: weight `i` is `scales[i / 16] * (quants[i] - zero point) + mins[i / 16]`.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Group {
    pub quants: [u8; GROUP],
    pub scales: [f32; 2],
    pub mins: [f32; 2],
}

impl QuantFormat {
    /// Every format.
    pub const ALL: [QuantFormat; 13] =
        [Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K, Q2_K, Q3_K, IQ4_NL, IQ4_XS, MXFP4];

    /// Their names, in the same order.
    pub(super) const NAMES: &[&str] = &[
        "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q4_k", "q5_k", "q6_k", "q2_k", "q3_k", "iq4_nl", "iq4_xs",
        "mxfp4",
    ];

    /// The name on the command line.
    pub const fn name(self) -> &'static str {
        Self::NAMES[self as usize]
    }

    /// Weights of a block.
    pub const fn block_len(self) -> usize {
        match self {
            Q2_K | Q3_K | Q4_K | Q5_K | Q6_K | IQ4_XS => SUPER_BLOCK,
            _ => GROUP,
        }
    }

    /// Bytes of a block.
    pub const fn block_bytes(self) -> usize {
        match self {
            Q8_0 => 34,
            Q4_0 | IQ4_NL => 18,
            Q4_1 => 20,
            Q5_0 => 22,
            Q5_1 => 24,
            Q4_K => 144,
            Q5_K => 176,
            Q6_K => MAX_BLOCK_BYTES,
            Q2_K => 84,
            Q3_K => 110,
            IQ4_XS => 136,
            MXFP4 => 17,
        }
    }

    /// Bytes of a row of `k` weights; none if that is no whole number of blocks.
    pub const fn row_bytes(self, k: usize) -> Option<usize> {
        match k.is_multiple_of(self.block_len()) {
            true => (k / self.block_len()).checked_mul(self.block_bytes()),
            false => None,
        }
    }

    /// Weights of a row of `bytes`; none if that is no whole number of blocks.
    pub const fn row_len(self, bytes: usize) -> Option<usize> {
        match bytes.is_multiple_of(self.block_bytes()) {
            true => (bytes / self.block_bytes()).checked_mul(self.block_len()),
            false => None,
        }
    }

    /// What is subtracted from the unsigned quants; formats with a minimum have none.
    pub(super) const fn zero_point(self) -> i32 {
        match self {
            Q8_0 | IQ4_NL | IQ4_XS => 128,
            Q4_0 => 8,
            Q5_0 => 16,
            Q6_K => 32,
            Q3_K => 4,
            MXFP4 => 12,
            Q4_1 | Q5_1 | Q4_K | Q5_K | Q2_K => 0,
        }
    }

    /// Weights `32 part .. 32 part + 32` of a block.
    pub(super) fn decode(self, block: &[u8], part: usize) -> Group {
        let half = |at: usize| f16::from_le_bytes([block[at], block[at + 1]]).to_f32();
        match self {
            Q8_0 => {
                let bytes = first::<GROUP>(&block[2..]);
                group(half(0), 0.0, array(|i| bytes[i] ^ 0x80))
            }
            Q4_0 => group(half(0), 0.0, nibbles(&block[2..])),
            Q4_1 => group(half(0), half(2), nibbles(&block[4..])),
            Q5_0 => group(half(0), 0.0, with_fifth_bits(nibbles(&block[6..]), &block[2..])),
            Q5_1 => group(half(0), half(2), with_fifth_bits(nibbles(&block[8..]), &block[4..])),
            Q4_K | Q5_K => {
                let (scale, min) = six_bit_pair(&block[4..16], part);
                // Products of 11 and 6 bits: exact.
                let (scale, min) = (half(0) * f32::from(scale), -(half(2) * f32::from(min)));
                let low = first::<GROUP>(&block[if self == Q4_K { 16 } else { 48 } + part / 2 * 32..]);
                let shift = part % 2 * 4;
                match self {
                    Q4_K => group(scale, min, array(|i| low[i] >> shift & 15)),
                    _ => {
                        let high = first::<GROUP>(&block[16..]);
                        group(scale, min, array(|i| low[i] >> shift & 15 | (high[i] >> part & 1) << 4))
                    }
                }
            }
            Q6_K => {
                let (h, g) = (part / 4, part % 4);
                let low = first::<GROUP>(&block[64 * h + 32 * (g % 2)..]);
                let high = first::<GROUP>(&block[128 + 32 * h..]);
                let scales = &block[192..208];
                let quants = array(|i| low[i] >> (g / 2 * 4) & 15 | (high[i] >> (2 * g) & 3) << 4);
                let scale = |at: usize| half(208) * f32::from(scales[2 * part + at] as i8);
                Group { quants, scales: [scale(0), scale(1)], mins: [0.0; 2] }
            }
            Q2_K => {
                let low = first::<GROUP>(&block[16 + part / 4 * 32..]);
                let pair = |at: usize| block[2 * part + at];
                // Products of 11 and 4 bits: exact.
                let scale = |at: usize| half(80) * f32::from(pair(at) & 15);
                let min = |at: usize| -(half(82) * f32::from(pair(at) >> 4));
                let quants = array(|i| low[i] >> (part % 4 * 2) & 3);
                Group { quants, scales: [scale(0), scale(1)], mins: [min(0), min(1)] }
            }
            Q3_K => {
                let high = first::<GROUP>(block);
                let low = first::<GROUP>(&block[32 + part / 4 * 32..]);
                let s = &block[96..108];
                let scale = |at: usize| {
                    let j = 2 * part + at;
                    let six = s[j % 8] >> (j / 8 * 4) & 15 | (s[8 + j % 4] >> (j / 4 * 2) & 3) << 4;
                    half(108) * f32::from(six as i8 - 32)
                };
                let quants = array(|i| low[i] >> (part % 4 * 2) & 3 | (high[i] >> part & 1) << 2);
                Group { quants, scales: [scale(0), scale(1)], mins: [0.0; 2] }
            }
            IQ4_NL => group(half(0), 0.0, nibbles(&block[2..]).map(|n| IQ4[usize::from(n)])),
            IQ4_XS => {
                let high = u16::from_le_bytes([block[2], block[3]]) >> (2 * part) & 3;
                let six = block[4 + part / 2] >> (part % 2 * 4) & 15 | (high as u8) << 4;
                let quants = nibbles(&block[8 + 16 * part..]).map(|n| IQ4[usize::from(n)]);
                group(half(0) * f32::from(six as i8 - 32), 0.0, quants)
            }
            MXFP4 => group(half_power(block[0]), 0.0, nibbles(&block[1..]).map(|n| FP4[usize::from(n)])),
        }
    }

    /// The weights of a row, in f32: `scale * quant` is exact, and a minimum is added with one rounding.
    ///
    /// # Errors
    /// If `bytes` is not a row of `weights.len()` weights.
    pub fn dequantize(self, bytes: &[u8], weights: &mut [f32]) -> Result<()> {
        if self.row_bytes(weights.len()) != Some(bytes.len()) {
            let expected = format!("a row of {} weights in blocks of {}", weights.len(), self.block_len());
            return Err(Error::argument("dequantize", "bytes", expected, format!("{} bytes", bytes.len())));
        }
        let blocks = bytes.chunks_exact(self.block_bytes()).zip(weights.chunks_exact_mut(self.block_len()));
        for (block, weights) in blocks {
            for (part, weights) in weights.chunks_exact_mut(GROUP).enumerate() {
                let Group { quants, scales, mins } = self.decode(block, part);
                for (i, (weight, quant)) in weights.iter_mut().zip(quants).enumerate() {
                    let product = scales[i / 16] * (i32::from(quant) - self.zero_point()) as f32;
                    // A sum with zero would lose the sign of a product that is zero.
                    *weight = if self.zero_point() == 0 { product + mins[i / 16] } else { product };
                }
            }
        }
        Ok(())
    }
}

/// 32 weights with one scale.
fn group(scale: f32, min: f32, quants: [u8; GROUP]) -> Group {
    Group { quants, scales: [scale; 2], mins: [min; 2] }
}

/// `2^(exponent - 128)`: half the scale that the exponent of MXFP4 stands for, because its numbers are doubled. The first
/// two are subnormal.
fn half_power(exponent: u8) -> f32 {
    f32::from_bits(match exponent {
        0 | 1 => 0x0020_0000 << exponent,
        _ => u32::from(exponent - 1) << 23,
    })
}

/// The first bytes of a part of a block: checked once, so that loops over them become vectors.
fn first<const N: usize>(bytes: &[u8]) -> &[u8; N] {
    bytes.first_chunk().expect("a whole block")
}

/// The low halves of 16 bytes, then the high ones.
fn nibbles(bytes: &[u8]) -> [u8; GROUP] {
    let bytes = first::<16>(bytes);
    array(|i| if i < 16 { bytes[i] & 15 } else { bytes[i - 16] >> 4 })
}

/// Quants with a fifth bit, which lie side by side.
fn with_fifth_bits(quants: [u8; GROUP], bits: &[u8]) -> [u8; GROUP] {
    let bits = u32::from_le_bytes(*first::<4>(bits));
    array(|i| quants[i] | ((bits >> i & 1) as u8) << 4)
}

/// Scale and minimum of part `j` of a block of the K formats, six bits each.
fn six_bit_pair(s: &[u8], j: usize) -> (u8, u8) {
    match j < 4 {
        true => (s[j] & 63, s[j + 4] & 63),
        false => (s[j + 4] & 15 | s[j - 4] >> 6 << 4, s[j + 4] >> 4 | s[j] >> 6 << 4),
    }
}
