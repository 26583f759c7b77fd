//! The definition of `linear_quant`.

use super::{
    ACT, BIAS, FORMAT, GATE, PRECISION, QuantFormat, QuantPrecision, RESIDUAL, SCALE, TOLERANCE, W, X,
};
use crate::lab::{Array, Inputs, Real};
use crate::op::Attrs;
use crate::ops::linear::{Activation, Gate};
use half::f16;

/// x: [m, k], w: [rows, bytes]. out = residual + scale act(x wᵀ + bias), or residual + scale (act(gate) up).
pub fn forward<R: Real>(inputs: &Inputs<'_, R>, attrs: &Attrs) -> Vec<Option<Array<R>>> {
    let (x, w) = (&inputs[X], &inputs[W]);
    let (format, gate) = (QuantFormat::ALL[attrs.choice(FORMAT)], Gate::ALL[attrs.choice(GATE)]);
    let rows = w.shape[0];
    let n = if gate == Gate::None { rows } else { rows / 2 };
    let row = |j: usize| &w.data[j * w.row_len()..][..w.row_len()];
    let weights: Vec<Vec<Weight>> = (0..rows).map(|j| decode(row(j), format)).collect();
    let precision = QuantPrecision::ALL[attrs.choice(PRECISION)].chosen(attrs.float(TOLERANCE));
    let is_full = precision == QuantPrecision::Full;
    let activation = Activation::ALL[attrs.choice(ACT)].kind();
    let scale = R::of(attrs.float(SCALE) as f32 as f64);
    let m = x.shape[..x.shape.len() - 1].iter().product::<usize>();
    let mut shape = x.shape.clone();
    *shape.last_mut().expect("a row") = n;
    let mut out = Array::zeros(&shape);
    let act = |z: R| activation.map_or(z, |kind| kind.value(z));
    for i in 0..m {
        let row = &x.data[i * x.row_len()..][..x.row_len()];
        let quantized: Vec<(f32, Vec<i64>)> = row.chunks(32).map(quantize).collect();
        let sum = |j: usize| {
            let z = match is_full {
                true => full_product(row, &weights[j]),
                false => product::<R>(&quantized, &weights[j]),
            };
            inputs.get(BIAS).map_or(z, |bias| z + bias.data[j])
        };
        for j in 0..n {
            let mut y = match gate {
                Gate::None => act(sum(j)),
                Gate::Halves => act(sum(j)) * sum(n + j),
                Gate::Interleaved => act(sum(2 * j)) * sum(2 * j + 1),
            };
            y = y * scale;
            if let Some(residual) = inputs.get(RESIDUAL) {
                y = y + residual.data[i * n + j];
            }
            out.data[i * n + j] = y;
        }
    }
    vec![None, None, None, None, Some(out)]
}

/// The scale and the eight-bit values of 32 activations. In f32 whatever `R` is: the roundings are part of the definition.
fn quantize<R: Real>(x: &[R]) -> (f32, Vec<i64>) {
    let x: Vec<f32> = x.iter().map(|v| v.f64() as f32).collect();
    if x.iter().any(|v| !v.is_finite()) {
        return (f32::NAN, vec![0; x.len()]);
    }
    let most = x.iter().fold(0f32, |most, v| most.max(v.abs()));
    if most < 2f32.powi(-100) {
        return (0.0, vec![0; x.len()]);
    }
    (most / 127.0, x.iter().map(|v| (v * (127.0 / most)).round_ties_even() as i64).collect())
}

/// The numbers of the nibbles of the IQ4 formats, and of MXFP4, twice.
const IQ4: [i64; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];
const FP4: [i64; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// A weight: scale * quant + min.
struct Weight {
    scale: f64,
    quant: i64,
    min: f64,
}

/// The weights of a row of blocks. Products of scales are exact in f64, and in f32.
fn decode<R: Real>(row: &[R], format: QuantFormat) -> Vec<Weight> {
    let bytes: Vec<u8> = row.iter().map(|byte| byte.f64() as u8).collect();
    let mut weights = Vec::new();
    for b in bytes.chunks(format.block_bytes()) {
        let f16_at = |at: usize| f16::from_le_bytes([b[at], b[at + 1]]).to_f64();
        let nibble = |at: usize, i: usize| (b[at + i % 16] >> (4 * (i / 16)) & 15) as i64;
        let bit = |at: usize, i: usize| (b[at + i / 8] >> (i % 8) & 1) as i64;
        // Scale and minimum j of the K formats.
        let pair = |j: usize| {
            let s = |i: usize| b[4 + i] as i64;
            if j < 4 {
                (s(j) & 63, s(j + 4) & 63)
            } else {
                (s(j + 4) & 15 | s(j - 4) >> 6 << 4, s(j + 4) >> 4 | s(j) >> 6 << 4)
            }
        };
        for i in 0..format.block_len() {
            let (scale, quant, min) = match format {
                QuantFormat::Q8_0 => (f16_at(0), b[2 + i] as i8 as i64, 0.0),
                QuantFormat::Q4_0 => (f16_at(0), nibble(2, i) - 8, 0.0),
                QuantFormat::Q4_1 => (f16_at(0), nibble(4, i), f16_at(2)),
                QuantFormat::Q5_0 => (f16_at(0), nibble(6, i) + 16 * bit(2, i) - 16, 0.0),
                QuantFormat::Q5_1 => (f16_at(0), nibble(8, i) + 16 * bit(4, i), f16_at(2)),
                QuantFormat::Q4_K | QuantFormat::Q5_K => {
                    let j = i / 32;
                    let (scale, min) = pair(j);
                    let low = if format == QuantFormat::Q4_K { 16 } else { 48 };
                    let mut quant = (b[low + 32 * (i / 64) + i % 32] >> (4 * (j % 2)) & 15) as i64;
                    if format == QuantFormat::Q5_K {
                        quant += 16 * (b[16 + i % 32] >> j & 1) as i64;
                    }
                    (f16_at(0) * scale as f64, quant, -f16_at(2) * min as f64)
                }
                QuantFormat::Q6_K => {
                    let (h, g, l) = (i / 128, i % 128 / 32, i % 32);
                    let low = (b[64 * h + 32 * (g % 2) + l] >> (4 * (g / 2)) & 15) as i64;
                    let high = (b[128 + 32 * h + l] >> (2 * g) & 3) as i64;
                    (f16_at(208) * (b[192 + i / 16] as i8) as f64, low + 16 * high - 32, 0.0)
                }
                QuantFormat::Q2_K => {
                    let (h, s, l) = (i / 128, i % 128 / 32, i % 32);
                    let pair = b[i / 16] as i64;
                    let quant = (b[16 + 32 * h + l] >> (2 * s) & 3) as i64;
                    (f16_at(80) * (pair & 15) as f64, quant, -f16_at(82) * (pair >> 4) as f64)
                }
                QuantFormat::Q3_K => {
                    let (h, s, l, j) = (i / 128, i % 128 / 32, i % 32, i / 16);
                    let six = (b[96 + j % 8] >> (4 * (j / 8)) & 15) as i64
                        + 16 * (b[104 + j % 4] >> (2 * (j / 4)) & 3) as i64;
                    let quant =
                        (b[32 + 32 * h + l] >> (2 * s) & 3) as i64 + 4 * (b[l] >> (i / 32) & 1) as i64;
                    (f16_at(108) * (six - 32) as f64, quant - 4, 0.0)
                }
                QuantFormat::IQ4_NL => (f16_at(0), IQ4[nibble(2, i) as usize], 0.0),
                QuantFormat::IQ4_XS => {
                    let j = i / 32;
                    let high = (u16::from_le_bytes([b[2], b[3]]) >> (2 * j) & 3) as i64;
                    let six = (b[4 + j / 2] >> (4 * (j % 2)) & 15) as i64 + 16 * high;
                    (f16_at(0) * (six - 32) as f64, IQ4[nibble(8 + 16 * j, i % 32) as usize], 0.0)
                }
                QuantFormat::MXFP4 => (2f64.powi(b[0] as i32 - 128), FP4[nibble(1, i) as usize], 0.0),
            };
            weights.push(Weight { scale, quant, min });
        }
    }
    weights
}

/// Activations as they are, times weights of which scale times quant is exact.
fn full_product<R: Real>(x: &[R], w: &[Weight]) -> R {
    let weight = |w: &Weight| R::of(w.scale * w.quant as f64) + R::of(w.min);
    x.iter().zip(w).fold(R::zero(), |sum, (&x, w)| sum + x * weight(w))
}

/// Sums of whole numbers over 16 weights, which share scale and minimum, are exact; what they are multiplied with is added
/// one after the other.
fn product<R: Real>(x: &[(f32, Vec<i64>)], w: &[Weight]) -> R {
    let mut sum = R::zero();
    for (index, w) in w.chunks(16).enumerate() {
        let (scale, quants) = &x[index / 2];
        let quants = &quants[index % 2 * 16..];
        let dot: i64 = w.iter().zip(quants).map(|(w, q)| w.quant * q).sum();
        let total: i64 = quants.iter().take(16).sum();
        let scale = R::of(*scale as f64);
        sum = sum + scale * R::of(w[0].scale) * R::of(dot as f64);
        sum = sum + scale * R::of(total as f64) * R::of(w[0].min);
    }
    sum
}
