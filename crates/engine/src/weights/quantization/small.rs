//! The formats of two and three bits, and those whose nibbles stand for numbers that are not evenly spaced.

use super::half_at;

/// The numbers that nibbles stand for in the IQ4 formats.
const IQ4: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];
/// Those of MXFP4, twice: floats with two bits of exponent and one of mantissa.
const FP4: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

pub fn q2_k(block: &[u8; 84], out: &mut [f32; 256]) {
    let (d, dmin) = (half_at(block, 80), half_at(block, 82));
    for (i, out) in out.iter_mut().enumerate() {
        let (half, quarter, l) = (i / 128, i % 128 / 32, i % 32);
        let both = block[i / 16];
        let q = block[16 + 32 * half + l] >> (2 * quarter) & 3;
        *out = d * f32::from(both & 15) * f32::from(q) - dmin * f32::from(both >> 4);
    }
}

pub fn q3_k(block: &[u8; 110], out: &mut [f32; 256]) {
    let (d, scales) = (half_at(block, 108), &block[96..108]);
    for (i, out) in out.iter_mut().enumerate() {
        let (half, quarter, l, j) = (i / 128, i % 128 / 32, i % 32, i / 16);
        let scale = scales[j % 8] >> (4 * (j / 8)) & 15 | (scales[8 + j % 4] >> (2 * (j / 4)) & 3) << 4;
        let low = block[32 + 32 * half + l] >> (2 * quarter) & 3;
        let high = block[l] >> (i / 32) & 1;
        *out = d * f32::from(scale as i8 - 32) * f32::from((low | high << 2) as i8 - 4);
    }
}

/// 32 weights in nibbles, the low ones first.
fn from_table(scale: f32, nibbles: &[u8], table: &[i8; 16], out: &mut [f32]) {
    let (first, second) = out.split_at_mut(16);
    for ((pair, first), second) in nibbles.iter().zip(first).zip(second) {
        *first = scale * f32::from(table[usize::from(pair & 15)]);
        *second = scale * f32::from(table[usize::from(pair >> 4)]);
    }
}

pub fn iq4_nl(block: &[u8; 18], out: &mut [f32; 32]) {
    from_table(half_at(block, 0), &block[2..], &IQ4, out);
}

pub fn iq4_xs(block: &[u8; 136], out: &mut [f32; 256]) {
    let (d, high) = (half_at(block, 0), u16::from_le_bytes([block[2], block[3]]));
    for (j, out) in out.chunks_exact_mut(32).enumerate() {
        let scale = block[4 + j / 2] >> (4 * (j % 2)) & 15 | ((high >> (2 * j) & 3) as u8) << 4;
        from_table(d * f32::from(scale as i8 - 32), &block[8 + 16 * j..][..16], &IQ4, out);
    }
}

pub fn mxfp4(block: &[u8; 17], out: &mut [f32; 32]) {
    // A power of two, halved because the table is doubled: the first two are subnormal.
    let scale = match block[0] {
        exponent @ (0 | 1) => 0x0020_0000 << exponent,
        exponent => u32::from(exponent - 1) << 23,
    };
    from_table(f32::from_bits(scale), &block[1..], &FP4, out);
}
