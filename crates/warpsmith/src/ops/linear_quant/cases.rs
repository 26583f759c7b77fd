//! The cases of `linear_quant`: what every kernel must pass, and what is timed.

use super::{
    ACT, BIAS, FORMAT, Forward, GATE, PRECISION, QuantFormat, QuantPrecision, RESIDUAL, SCALE, SPEC, TO,
    TOLERANCE, reference,
};
use crate::lab::{ArgPlan, Arrangement, Array, Case, Fill, Inputs, Provable, Real, Values};
use crate::op::Attrs;
use crate::ops::FLOATS;
use crate::ops::linear::{Activation, Gate};
use crate::tensor::{DType, Random};
use half::f16;

impl Provable for Forward {
    fn reference<R: Real>(inputs: &Inputs<'_, R>, attrs: &Attrs) -> Vec<Option<Array<R>>> {
        reference::forward(inputs, attrs)
    }

    fn plan(case: &Case) -> Vec<Option<ArgPlan>> {
        let [m, n, k] = case.sizes[..] else { unreachable!("three sizes") };
        let (rows, bytes) = weight_shape(case);
        let out = match case.attrs.choice(TO) {
            0 => case.dtype,
            to => FLOATS[to - 1],
        };
        let bytes = Fill::Generated(weight).with(vec![rows, bytes], DType::U8, None);
        let normal = Fill::Normal(0.0, 1.0);
        vec![
            Some(Fill::Factor.with(vec![m, k], case.dtype, Some(0))),
            Some(bytes),
            case.gives(BIAS).then(|| normal.with(vec![rows], out, None)),
            case.gives(RESIDUAL).then(|| normal.with(vec![m, n], out, Some(0))),
            Some(normal.with(vec![m, n], out, Some(0))),
        ]
    }

    fn constrain(case: &mut Case) {
        let block = QuantFormat::ALL[case.attrs.choice(FORMAT)].block_len();
        case.sizes[2] = case.sizes[2].next_multiple_of(block);
    }

    fn cases() -> Vec<Case> {
        let mut cases = Vec::new();
        let of = |format: QuantFormat, dtype| Case::new(&SPEC, dtype).attr(FORMAT, format as u8 as f64);
        for format in QuantFormat::ALL {
            // Blocks of one size or the other, and sizes one short of and past tiles and groups of rows.
            let k = format.block_len();
            let plain = of(format, DType::F32);
            let full = plain.clone().give(BIAS).give(RESIDUAL).attr(SCALE, -0.5);
            cases.extend([1, 2, 3, 5, 8, 15].map(|m| plain.clone().sizes(&[m, 33, 2 * k])));
            cases.push(of(format, DType::BF16).sizes(&[70, 17, 3 * k]));
            cases.push(plain.clone().sizes(&[2, 3, 2048]));
            cases.push(full.clone().attr(ACT, Activation::Silu as u8 as f64).sizes(&[9, 40, k]));
            cases.push(full.clone().attr(GATE, Gate::Halves as u8 as f64).sizes(&[3, 21, 2 * k]));
            for values in [Values::Large, Values::Special] {
                cases.push(plain.clone().sizes(&[9, 21, 2 * k]).values(values));
            }
            for arrangement in [Arrangement::PaddedRows, Arrangement::Transposed, Arrangement::Misaligned] {
                cases.push(full.clone().sizes(&[5, 19, k]).arranged(arrangement));
            }
            let exact = |case: &Case| case.clone().attr(PRECISION, QuantPrecision::Full as u8 as f64);
            cases.extend([1, 15].map(|m| exact(&plain).sizes(&[m, 33, 2 * k])));
            cases.push(exact(&of(format, DType::BF16)).sizes(&[70, 17, 3 * k]));
            cases.extend([0.001, 0.01].map(|error| plain.clone().attr(TOLERANCE, error).sizes(&[3, 33, k])));
            cases.push(exact(&full).attr(GATE, Gate::Interleaved as u8 as f64).sizes(&[3, 21, 2 * k]));
            cases.push(exact(&full).sizes(&[5, 19, k]).arranged(Arrangement::Transposed));
            for values in [Values::Large, Values::Special] {
                cases.push(exact(&plain).sizes(&[9, 21, 2 * k]).values(values));
            }
        }
        for dtype in FLOATS {
            let plain = of(QuantFormat::Q4_1, dtype);
            for sizes in [[0, 8, 32], [3, 0, 32], [3, 5, 0], [1, 1, 32], [1, 64, 576], [130, 48, 96]] {
                cases.push(plain.clone().sizes(&sizes));
            }
            let full = plain.give(BIAS).give(RESIDUAL);
            for &act in Activation::ALL {
                cases.push(full.clone().sizes(&[5, 35, 64]).attr(ACT, act as u8 as f64));
            }
            for gate in [Gate::Halves, Gate::Interleaved] {
                let gated = full.clone().attr(GATE, gate as u8 as f64);
                cases.push(gated.clone().sizes(&[11, 48, 64]).attr(ACT, Activation::Silu as u8 as f64));
                cases.push(gated.sizes(&[2, 7, 32]).attr(ACT, Activation::GeluTanh as u8 as f64));
            }
            cases.extend((0..=FLOATS.len()).map(|to| full.clone().sizes(&[3, 20, 64]).attr(TO, to as f64)));
            cases.push(full.sizes(&[9, 40, 96]).in_place());
        }
        cases
    }

    fn bench_cases() -> Vec<Case> {
        // The layers of SmolLM2-135M and of an 8B model.
        let mut cases = Vec::new();
        for m in [1, 8, 64, 512] {
            for (format, [n, k]) in [
                (QuantFormat::Q4_1, [576, 576]),
                (QuantFormat::Q4_1, [1536, 576]),
                (QuantFormat::Q4_1, [576, 1536]),
                (QuantFormat::Q8_0, [49_152, 576]),
                (QuantFormat::Q4_K, [4096, 4096]),
                (QuantFormat::Q6_K, [4096, 4096]),
            ] {
                let case = Case::new(&SPEC, DType::F32).attr(FORMAT, format as u8 as f64).sizes(&[m, n, k]);
                cases.push(if m * n * k > 1 << 33 { case.gpu_only() } else { case });
            }
        }
        cases
    }
}

impl Fill {
    fn with(self, shape: Vec<usize>, dtype: DType, batch_dim: Option<usize>) -> ArgPlan {
        ArgPlan { shape, dtype, fill: self, batch_dim }
    }
}

/// Rows of the weight, and bytes of one.
fn weight_shape(case: &Case) -> (usize, usize) {
    let [_, n, k] = case.sizes[..] else { unreachable!("three sizes") };
    let format = QuantFormat::ALL[case.attrs.choice(FORMAT)];
    let rows = if case.attrs.choice(GATE) == 0 { n } else { 2 * n };
    // The op refuses what is no whole number of blocks.
    (rows, k.div_ceil(format.block_len()) * format.block_bytes())
}

/// Random bytes, with scales that make weights of about one; special ones are zero, negative and subnormal too.
fn weight(case: &Case, seed: u64) -> Vec<Vec<f64>> {
    let (rows, bytes) = weight_shape(case);
    let format = QuantFormat::ALL[case.attrs.choice(FORMAT)];
    let mut random = Random::new(seed);
    let mut weight: Vec<f64> = (0..rows * bytes).map(|_| random.below(256) as f64).collect();
    // Where scales are, and what a quant may be at most, or a quant and a smaller scale.
    let (places, most): (&[usize], f64) = match format {
        QuantFormat::Q8_0 => (&[0], 128.0),
        QuantFormat::Q4_0 => (&[0], 8.0),
        QuantFormat::Q4_1 => (&[0, 2], 15.0),
        QuantFormat::Q5_0 => (&[0], 16.0),
        QuantFormat::Q5_1 => (&[0, 2], 31.0),
        QuantFormat::Q4_K => (&[0, 2], 15.0 * 63.0),
        QuantFormat::Q5_K => (&[0, 2], 31.0 * 63.0),
        QuantFormat::Q6_K => (&[208], 32.0 * 128.0),
        QuantFormat::Q2_K => (&[80, 82], 3.0 * 15.0),
        QuantFormat::Q3_K => (&[108], 4.0 * 32.0),
        QuantFormat::IQ4_NL => (&[0], 127.0),
        QuantFormat::IQ4_XS => (&[0], 127.0 * 32.0),
        QuantFormat::MXFP4 => (&[], 12.0),
    };
    for block in weight.chunks_mut(format.block_bytes()) {
        for &place in places {
            let scale = match (case.values, random.below(6)) {
                (Values::Special, 0) => 0.0,
                (Values::Special, 1) => f64::from(f16::from_bits(random.below(0x400) as u16)),
                // The largest of these with the largest factors sum up to no infinity.
                (Values::Exponents, octaves) => random.normal() / most / f64::from(1u32 << (4 * octaves)),
                _ => random.normal() / most,
            };
            let bytes = f16::from_f64(scale).to_le_bytes();
            (block[place], block[place + 1]) = (bytes[0].into(), bytes[1].into());
        }
        if format == QuantFormat::MXFP4 {
            // Of weights of about one, and for special ones also the smallest: subnormal in f32.
            block[0] = match (case.values, random.below(6)) {
                (Values::Special, 0) => 0.0,
                (Values::Exponents, octaves) => 125.0 - 4.0 * octaves as f64,
                (_, less) => 125.0 - (less / 2) as f64,
            };
        }
    }
    vec![Vec::new(), weight, Vec::new(), Vec::new(), Vec::new()]
}
