//! The block formats of GGUF and their exact meaning.

mod small;

use half::f16;
use std::fmt;

/// A format in which blocks of weights share their scales.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum Quantization {
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q4K,
    Q5K,
    Q6K,
    Q2K,
    Q3K,
    Iq4Nl,
    Iq4Xs,
    Mxfp4,
}

impl Quantization {
    /// Every format there is.
    pub const ALL: [Quantization; 13] = [
        Quantization::Q4_0,
        Quantization::Q4_1,
        Quantization::Q5_0,
        Quantization::Q5_1,
        Quantization::Q8_0,
        Quantization::Q4K,
        Quantization::Q5K,
        Quantization::Q6K,
        Quantization::Q2K,
        Quantization::Q3K,
        Quantization::Iq4Nl,
        Quantization::Iq4Xs,
        Quantization::Mxfp4,
    ];

    /// Weights of a block.
    pub const fn block_len(self) -> usize {
        match self {
            Quantization::Q2K
            | Quantization::Q3K
            | Quantization::Q4K
            | Quantization::Q5K
            | Quantization::Q6K
            | Quantization::Iq4Xs => 256,
            _ => 32,
        }
    }

    /// Bytes of a block.
    pub const fn block_bytes(self) -> usize {
        match self {
            Quantization::Q4_0 => 18,
            Quantization::Q4_1 => 20,
            Quantization::Q5_0 => 22,
            Quantization::Q5_1 => 24,
            Quantization::Q8_0 => 34,
            Quantization::Q4K => 144,
            Quantization::Q5K => 176,
            Quantization::Q6K => 210,
            Quantization::Q2K => 84,
            Quantization::Q3K => 110,
            Quantization::Iq4Nl => 18,
            Quantization::Iq4Xs => 136,
            Quantization::Mxfp4 => 17,
        }
    }

    /// The name GGUF gives it, in small letters.
    pub const fn name(self) -> &'static str {
        match self {
            Quantization::Q4_0 => "q4_0",
            Quantization::Q4_1 => "q4_1",
            Quantization::Q5_0 => "q5_0",
            Quantization::Q5_1 => "q5_1",
            Quantization::Q8_0 => "q8_0",
            Quantization::Q4K => "q4_k",
            Quantization::Q5K => "q5_k",
            Quantization::Q6K => "q6_k",
            Quantization::Q2K => "q2_k",
            Quantization::Q3K => "q3_k",
            Quantization::Iq4Nl => "iq4_nl",
            Quantization::Iq4Xs => "iq4_xs",
            Quantization::Mxfp4 => "mxfp4",
        }
    }

    /// Writes the weights of whole blocks. Each weight is the f32 nearest to its exact value `scale * q (+ min)`: the product
    /// is exact, so only the sum is rounded, once, and a fused multiply-add would give the same bits.
    ///
    /// # Panics
    /// If the sizes do not belong together.
    pub fn dequantize(self, blocks: &[u8], weights: &mut [f32]) {
        assert!(
            blocks.len().is_multiple_of(self.block_bytes())
                && weights.len() == blocks.len() / self.block_bytes() * self.block_len(),
            "{} bytes of {self} for {} weights",
            blocks.len(),
            weights.len()
        );
        match self {
            Quantization::Q4_0 => each(blocks, weights, q4_0),
            Quantization::Q4_1 => each(blocks, weights, q4_1),
            Quantization::Q5_0 => each(blocks, weights, q5_0),
            Quantization::Q5_1 => each(blocks, weights, q5_1),
            Quantization::Q8_0 => each(blocks, weights, q8_0),
            Quantization::Q4K => each(blocks, weights, q4_k),
            Quantization::Q5K => each(blocks, weights, q5_k),
            Quantization::Q6K => each(blocks, weights, q6_k),
            Quantization::Q2K => each(blocks, weights, small::q2_k),
            Quantization::Q3K => each(blocks, weights, small::q3_k),
            Quantization::Iq4Nl => each(blocks, weights, small::iq4_nl),
            Quantization::Iq4Xs => each(blocks, weights, small::iq4_xs),
            Quantization::Mxfp4 => each(blocks, weights, small::mxfp4),
        }
    }
}

impl fmt::Display for Quantization {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Applies `block` to every block. Arrays of known size let the compiler drop the bounds checks and use vectors.
fn each<const BYTES: usize, const LEN: usize>(
    blocks: &[u8],
    weights: &mut [f32],
    block: fn(&[u8; BYTES], &mut [f32; LEN]),
) {
    let (blocks, weights) = (blocks.as_chunks::<BYTES>().0, weights.as_chunks_mut::<LEN>().0);
    for (bytes, out) in blocks.iter().zip(weights) {
        block(bytes, out);
    }
}

/// The half-precision number at byte `at`.
fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

fn q4_0(block: &[u8; 18], out: &mut [f32; 32]) {
    let d = half_at(block, 0);
    for i in 0..16 {
        let pair = block[2 + i];
        out[i] = d * f32::from((pair & 15) as i8 - 8);
        out[i + 16] = d * f32::from((pair >> 4) as i8 - 8);
    }
}

fn q4_1(block: &[u8; 20], out: &mut [f32; 32]) {
    let (d, m) = (half_at(block, 0), half_at(block, 2));
    for i in 0..16 {
        let pair = block[4 + i];
        out[i] = d * f32::from(pair & 15) + m;
        out[i + 16] = d * f32::from(pair >> 4) + m;
    }
}

/// The fifth bits of a block, one for each weight.
fn high_bits(block: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
}

fn q5_0(block: &[u8; 22], out: &mut [f32; 32]) {
    let (d, high) = (half_at(block, 0), high_bits(block, 2));
    for i in 0..16 {
        let pair = block[6 + i];
        let low = i32::from(pair & 15) + ((high >> i & 1) << 4) as i32;
        let up = i32::from(pair >> 4) + ((high >> (i + 16) & 1) << 4) as i32;
        out[i] = d * (low - 16) as f32;
        out[i + 16] = d * (up - 16) as f32;
    }
}

fn q5_1(block: &[u8; 24], out: &mut [f32; 32]) {
    let (d, m, high) = (half_at(block, 0), half_at(block, 2), high_bits(block, 4));
    for i in 0..16 {
        let pair = block[8 + i];
        let low = u32::from(pair & 15) + ((high >> i & 1) << 4);
        let up = u32::from(pair >> 4) + ((high >> (i + 16) & 1) << 4);
        out[i] = d * low as f32 + m;
        out[i + 16] = d * up as f32 + m;
    }
}

fn q8_0(block: &[u8; 34], out: &mut [f32; 32]) {
    let d = half_at(block, 0);
    for i in 0..32 {
        out[i] = d * f32::from(block[2 + i] as i8);
    }
}

/// Scale and minimum of the `j`-th run of 32 weights, from twelve bytes that hold eight pairs of six bits.
fn scale_and_min(packed: &[u8; 12], j: usize) -> (f32, f32) {
    let (scale, min) = if j < 4 {
        (packed[j] & 63, packed[j + 4] & 63)
    } else {
        ((packed[j + 4] & 15) | (packed[j - 4] >> 6) << 4, (packed[j + 4] >> 4) | (packed[j] >> 6) << 4)
    };
    (f32::from(scale), f32::from(min))
}

/// The twelve bytes of scales that stand after `d` and `dmin`.
fn packed_scales(block: &[u8]) -> &[u8; 12] {
    block[4..16].first_chunk().expect("twelve bytes")
}

fn q4_k(block: &[u8; 144], out: &mut [f32; 256]) {
    let (d, dmin, scales) = (half_at(block, 0), half_at(block, 2), packed_scales(block));
    for j in 0..8 {
        let (scale, min) = scale_and_min(scales, j);
        let (scale, min, shift) = (d * scale, dmin * min, 4 * (j % 2));
        for l in 0..32 {
            let q = block[16 + 32 * (j / 2) + l] >> shift & 15;
            out[32 * j + l] = scale * f32::from(q) - min;
        }
    }
}

fn q5_k(block: &[u8; 176], out: &mut [f32; 256]) {
    let (d, dmin, scales) = (half_at(block, 0), half_at(block, 2), packed_scales(block));
    for j in 0..8 {
        let (scale, min) = scale_and_min(scales, j);
        let (scale, min, shift) = (d * scale, dmin * min, 4 * (j % 2));
        for l in 0..32 {
            let low = block[48 + 32 * (j / 2) + l] >> shift & 15;
            let q = low | (block[16 + l] >> j & 1) << 4;
            out[32 * j + l] = scale * f32::from(q) - min;
        }
    }
}

fn q6_k(block: &[u8; 210], out: &mut [f32; 256]) {
    let d = half_at(block, 208);
    for half in 0..2 {
        for g in 0..4 {
            for l in 0..32 {
                let i = 128 * half + 32 * g + l;
                let low = block[64 * half + 32 * (g % 2) + l] >> (4 * (g / 2)) & 15;
                let high = block[128 + 32 * half + l] >> (2 * g) & 3;
                let scale = f32::from(block[192 + i / 16] as i8);
                out[i] = d * scale * f32::from((low | high << 4) as i8 - 32);
            }
        }
    }
}
