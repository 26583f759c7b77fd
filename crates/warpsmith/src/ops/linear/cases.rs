//! The cases of `linear`: what every kernel must pass, and what is timed.

use super::problem::{FP8, INPUTS, SCALE_BLOCK};
use super::{
    ACT, Activation, BIAS, Forward, GATE, Gate, PRECISION, RESIDUAL, SCALE, SCALING, SPEC, Scaling, TO,
    TOLERANCE, reference,
};
use super::{Precision, RESULTS, W_SCALE, X_SCALE};
use crate::lab::{ArgPlan, Arrangement, Array, Case, Fill, Inputs, Provable, Real, Values};
use crate::op::Attrs;
use crate::ops::FLOATS;
use crate::tensor::DType;

impl Provable for Forward {
    fn reference<R: Real>(inputs: &Inputs<'_, R>, attrs: &Attrs) -> Vec<Option<Array<R>>> {
        reference::forward(inputs, attrs)
    }

    fn plan(case: &Case) -> Vec<Option<ArgPlan>> {
        let [m, n, k, batch] = case.sizes[..] else { unreachable!("four sizes") };
        let rows = if case.attrs.choice(GATE) == 0 { n } else { 2 * n };
        // With one product, tensors have no dimension for the batch.
        let shape = |sizes: &[usize]| match batch {
            1 => sizes.to_vec(),
            _ => [&[batch], sizes].concat(),
        };
        let by_row = |sizes: &[usize], dtype: DType, fill: Fill| ArgPlan {
            shape: shape(sizes),
            dtype,
            fill,
            batch_dim: Some((batch != 1) as usize),
        };
        let shared =
            |shape: Vec<usize>, dtype: DType, fill: Fill| ArgPlan { shape, dtype, fill, batch_dim: None };
        let (normal, factors) = (Fill::Normal(0.0, 1.0), Fill::Normal(1.0, 0.25));
        let like_x = if FP8.contains(&case.dtype) { DType::BF16 } else { case.dtype };
        let out = RESULTS[case.attrs.choice(TO)].unwrap_or(like_x);
        let (blocks, row_blocks) = (k.div_ceil(SCALE_BLOCK), rows.div_ceil(SCALE_BLOCK));
        let (x_scale, w_scale) = match Scaling::ALL[case.attrs.choice(SCALING)] {
            Scaling::Tensor => (shared(vec![1], DType::F32, factors), shared(vec![1], DType::F32, factors)),
            Scaling::Row => (by_row(&[m], DType::F32, factors), shared(shape(&[rows]), DType::F32, factors)),
            Scaling::Block => (
                by_row(&[m, blocks], DType::F32, factors),
                shared(shape(&[row_blocks, blocks]), DType::F32, factors),
            ),
        };
        vec![
            Some(by_row(&[m, k], case.dtype, Fill::Factor)),
            Some(shared(shape(&[rows, k]), case.dtype, Fill::Factor)),
            case.gives(BIAS).then(|| shared(vec![rows], out, normal)),
            case.gives(RESIDUAL).then(|| by_row(&[m, n], out, normal)),
            case.gives(X_SCALE).then_some(x_scale),
            case.gives(W_SCALE).then_some(w_scale),
            Some(by_row(&[m, n], out, normal)),
        ]
    }

    fn constrain(case: &mut Case) {
        if !FP8.contains(&case.dtype) {
            case.withhold(X_SCALE);
            case.withhold(W_SCALE);
        }
        if case.dtype != DType::F32 && Precision::ALL[case.attrs.choice(PRECISION)] == Precision::Tf32 {
            case.set(PRECISION, 0.0);
        }
        case.sizes[3] = case.sizes[3].max(1);
    }

    fn cases() -> Vec<Case> {
        let mut cases = Vec::new();
        for dtype in INPUTS {
            let plain = Case::new(&SPEC, dtype);
            let full = plain
                .clone()
                .give(BIAS)
                .give(RESIDUAL)
                .attr(ACT, Activation::Silu as u8 as f64)
                .attr(SCALE, -0.5);
            cases.extend(SIZES.map(|sizes| plain.clone().sizes(&sizes)));
            cases.push(plain.clone().sizes(&MANY_TILES));
            if matches!(dtype, DType::BF16 | DType::F32) {
                cases.push(plain.clone().sizes(&MANY_ROWS));
            }
            let small = [[3, 5, 7, 2], [19, 40, 72, 1]];
            cases.extend(small.map(|sizes| full.clone().sizes(&sizes)));
            cases.extend(
                (0..RESULTS.len()).map(|to| full.clone().sizes(&[17, 40, 64, 1]).attr(TO, to as f64)),
            );
            for (activation, sizes) in
                Activation::ALL.iter().zip([[3, 5, 9, 2], [9, 33, 40, 1]].into_iter().cycle())
            {
                cases.push(plain.clone().give(BIAS).sizes(&sizes).attr(ACT, *activation as u8 as f64));
            }
            for gate in [Gate::Halves, Gate::Interleaved] {
                let gated = |case: &Case| case.clone().attr(GATE, gate as u8 as f64);
                cases.push(gated(&plain).sizes(&[3, 5, 7, 2]).attr(ACT, Activation::Silu as u8 as f64));
                cases.push(gated(&plain).sizes(&[9, 70, 40, 1]));
                cases.push(gated(&full).sizes(&[35, 33, 72, 1]).attr(ACT, Activation::GeluTanh as u8 as f64));
            }
            for arrangement in [Arrangement::PaddedRows, Arrangement::Transposed, Arrangement::Misaligned] {
                cases.push(plain.clone().sizes(&[24, 40, 64, 1]).arranged(arrangement));
                cases.push(full.clone().sizes(&[19, 35, 72, 1]).arranged(arrangement));
                cases.push(full.clone().sizes(&[9, 8, 24, 2]).arranged(arrangement));
            }
            for values in [Values::Large, Values::Special] {
                cases.push(plain.clone().sizes(&[9, 21, 40, 1]).values(values));
                cases.push(full.clone().sizes(&[9, 24, 40, 1]).values(values));
            }
            cases.push(full.clone().sizes(&[19, 40, 72, 1]).in_place());
            cases.push(plain.give(RESIDUAL).sizes(&[3, 5, 9, 2]));
        }
        for dtype in [DType::F16, DType::BF16] {
            cases.extend(unaligned(dtype));
        }
        for dtype in FLOATS {
            cases.extend(long(&Case::new(&SPEC, dtype)));
        }
        for dtype in FP8 {
            for scaling in Scaling::ALL {
                let case =
                    Case::new(&SPEC, dtype).give(X_SCALE).give(W_SCALE).attr(SCALING, *scaling as u8 as f64);
                cases.push(case.clone().sizes(&[5, 9, 300, 1]));
                cases.push(case.clone().sizes(&[3, 5, 7, 2]));
                cases.push(case.clone().sizes(&[3, 5, 0, 1]));
                cases.push(
                    case.clone().give(BIAS).sizes(&[9, 70, 256, 1]).attr(GATE, Gate::Halves as u8 as f64),
                );
                cases.push(
                    case.clone().give(RESIDUAL).sizes(&[9, 150, 136, 1]).arranged(Arrangement::Transposed),
                );
                cases.push(case.sizes(&[5, 130, 144, 2]).arranged(Arrangement::PaddedRows));
            }
        }
        // What tensor cores may do to 8-bit sums is not allowed to the kernels that add in f32.
        let eight_bits = cases.iter().filter(|case| FP8.contains(&case.dtype));
        let full: Vec<Case> =
            eight_bits.map(|case| case.clone().attr(PRECISION, Precision::Full as u8 as f64)).collect();
        cases.extend(full);
        let large = Case::new(&SPEC, DType::F32).sizes(&LARGE_TILES);
        cases.push(large.clone().arranged(Arrangement::Transposed));
        cases.push(large.clone().sizes(&[1399, 1501, 37, 1]).give(BIAS).give(RESIDUAL));
        cases.push(large);
        // Tolerances on both sides of what the faster way keeps.
        for (dtype, tolerance) in
            [(DType::F32, 0.001), (DType::F32, 0.01), (DType::F8E4M3, 0.001), (DType::F8E4M3, 1.0)]
        {
            cases.push(Case::new(&SPEC, dtype).sizes(&[70, 64, 128, 1]).attr(TOLERANCE, tolerance));
        }
        let tf32 = Case::new(&SPEC, DType::F32).attr(PRECISION, Precision::Tf32 as u8 as f64);
        cases.push(tf32.clone().sizes(&[33, 40, 64, 1]));
        cases.push(
            tf32.clone().sizes(&[35, 130, 41, 1]).give(BIAS).attr(GATE, Gate::Interleaved as u8 as f64),
        );
        cases.push(tf32.clone().sizes(&[3, 9, 2052, 1]));
        cases.push(tf32.clone().sizes(&[70, 40, 333, 1]).arranged(Arrangement::Misaligned));
        cases.push(tf32.clone().sizes(&[33, 70, 130, 2]).arranged(Arrangement::PaddedRows));
        cases.push(tf32.clone().sizes(&[24, 40, 64, 1]).arranged(Arrangement::Transposed));
        cases.extend(long(&tf32));
        cases
    }

    fn bench_cases() -> Vec<Case> {
        let case = |dtype, [m, n, k]: [usize; 3]| {
            let case = Case::new(&SPEC, dtype).sizes(&[m, n, k, 1]);
            if 2.0 * (m * n) as f64 * k as f64 > 2e10 { case.gpu_only() } else { case }
        };
        let bf16 = |sizes| case(DType::BF16, sizes);
        let act = |case: Case, act: Activation| case.attr(ACT, act as u8 as f64);
        let mut cases = Vec::new();
        for m in [1usize, 8, 16, 32, 64, 128, 256, 1024, 2048, 4096, 16384] {
            // The whole grid would take minutes, so this is every other layer for every other size.
            let layers =
                LAYERS.iter().skip(usize::from(m > 16 && m.ilog2() % 2 == 1)).step_by(1 + usize::from(m > 1));
            cases.extend(layers.map(|&[n, k]| bf16([m, n, k])));
        }
        cases.extend(AWKWARD.map(bf16));
        for size in [256, 512, 1024, 2048, 8192] {
            cases.push(bf16([size; 3]));
        }
        for sizes in FUSED {
            cases.push(bf16(sizes));
            for kind in [Activation::Gelu, Activation::Silu, Activation::Relu] {
                cases.push(act(bf16(sizes).give(BIAS), kind));
            }
            cases.push(act(bf16(sizes), Activation::Silu).attr(GATE, Gate::Halves as u8 as f64));
        }
        cases.push(act(bf16([512, 3072, 768]).give(BIAS), Activation::Gelu));
        for size in [256, 512, 1024, 2048] {
            cases.push(case(DType::F32, [size; 3]));
        }
        cases.push(case(DType::F32, [1, 8192, 2048]));
        cases.push(act(case(DType::F32, [512, 3072, 768]).give(BIAS), Activation::Gelu));
        for sizes in [[1024, 4096, 4096], [4096, 4096, 4096], [8192, 8192, 8192], [16384, 2048, 512]] {
            cases.push(case(DType::F32, sizes).attr(PRECISION, Precision::Tf32 as u8 as f64).gpu_only());
            for scaling in [Scaling::Row, Scaling::Block] {
                let fp8 = case(DType::F8E4M3, sizes).give(X_SCALE).give(W_SCALE);
                cases.push(fp8.attr(SCALING, scaling as u8 as f64).gpu_only());
            }
        }
        cases
    }
}

/// Lines that start anywhere, as long as a copy's segment or a stage of a product, shorter and longer, for few rows and
/// many, with everything that reads a row of `w` or writes one of `out`.
fn unaligned(dtype: DType) -> Vec<Case> {
    let plain = Case::new(&SPEC, dtype);
    let full = plain.clone().give(BIAS).give(RESIDUAL).attr(ACT, Activation::Gelu as u8 as f64);
    let mut cases = Vec::new();
    for m in [1, 5, 33, 200] {
        cases.push(plain.clone().sizes(&[m, 72, 321, 1]));
        cases.push(full.clone().sizes(&[m, 33, 1033, 1]));
        cases.push(plain.clone().give(BIAS).sizes(&[m, 70, 255, 2]));
        for gate in [Gate::Halves, Gate::Interleaved] {
            let gated = full.clone().attr(GATE, gate as u8 as f64).attr(ACT, Activation::Silu as u8 as f64);
            cases.push(gated.sizes(&[m, 40, 257, 1]));
        }
        for arrangement in [Arrangement::PaddedRows, Arrangement::Misaligned] {
            cases.push(plain.clone().sizes(&[m, 136, 256, 1]).arranged(arrangement));
            cases.push(full.clone().sizes(&[m, 72, 515, 1]).arranged(arrangement));
            let gated = plain.clone().attr(GATE, Gate::Halves as u8 as f64);
            cases.push(gated.sizes(&[m, 70, 192, 1]).arranged(arrangement));
        }
        cases.push(plain.clone().sizes(&[m, 70, 130, 1]).arranged(Arrangement::Transposed));
    }
    // So many rows of w that two blocks of a multiprocessor load them.
    cases.push(plain.clone().sizes(&[5, 10_000, 131, 1]));
    cases.push(full.clone().sizes(&[9, 6000, 131, 1]).attr(GATE, Gate::Halves as u8 as f64));
    // Few rows of w that are long enough to be copied, and K that ends inside of a large stage.
    for k in [1601, 1608] {
        cases.push(full.clone().sizes(&[12, 24, k, 1]).attr(GATE, Gate::Halves as u8 as f64));
        cases.push(plain.clone().sizes(&[3, 72, k, 1]));
    }
    cases.push(full.clone().sizes(&[5, 40, 321, 1]).values(Values::Special));
    cases.push(full.sizes(&[70, 40, 321, 1]).values(Values::Special));
    cases
}

/// Sums so long that GPUs compute them in parts where there are few columns: parts of equal length and a rest, for few rows
/// and many, with everything that comes after the sums.
fn long(plain: &Case) -> Vec<Case> {
    let full = plain.clone().give(BIAS).give(RESIDUAL).attr(SCALE, -0.5);
    let full = full.attr(ACT, Activation::Gelu as u8 as f64);
    let mut cases = vec![
        plain.clone().sizes(&[1, 9, 8192, 1]),
        plain.clone().sizes(&[150, 24, 8200, 1]),
        full.clone().sizes(&[5, 21, 8195, 1]),
        full.clone().sizes(&[70, 16, 8192, 1]).in_place(),
        full.clone().sizes(&[3, 12, 8192, 2]),
        full.clone().sizes(&[3, 12, 8192, 1]).values(Values::Special),
        full.clone().sizes(&[17, 12, 8195, 1]).arranged(Arrangement::Misaligned),
        full.clone().sizes(&[17, 16, 8192, 1]).arranged(Arrangement::Transposed),
    ];
    for (gate, sizes) in [(Gate::Halves, [9, 11, 8192, 1]), (Gate::Interleaved, [35, 8, 8195, 1])] {
        cases.push(full.clone().attr(GATE, gate as u8 as f64).sizes(&sizes));
    }
    cases
}

/// Sizes one short of and past vectors and tiles, empty ones, and sums long enough for their order to matter.
const SIZES: [[usize; 4]; 13] = [
    [0, 8, 16, 1],
    [3, 0, 16, 1],
    [3, 5, 0, 1],
    [1, 1, 1, 1],
    [3, 5, 7, 2],
    [1, 33, 129, 1],
    [7, 64, 64, 1],
    [33, 17, 65, 1],
    [65, 130, 24, 1],
    [130, 66, 40, 1],
    [3, 6, 4099, 1],
    [16, 24, 1024, 1],
    [5, 9, 33, 3],
];
/// More tiles than a GPU has multiprocessors, so that blocks go through several.
const MANY_TILES: [usize; 4] = [700, 776, 24, 1];
/// As many results as GPUs compute in their largest tiles.
const LARGE_TILES: [usize; 4] = [1400, 1500, 36, 1];
/// As many rows as a row's bits must not depend on.
const MANY_ROWS: [usize; 4] = [4096, 40, 72, 1];

/// Columns and K of the layers of models from 0.6 to 70 billion parameters, as far as they differ much.
const LAYERS: [[usize; 2]; 8] = [
    [4096, 1024],
    [6144, 1024],
    [1024, 3072],
    [6144, 4096],
    [4096, 4096],
    [24576, 4096],
    [4096, 12288],
    [10240, 8192],
];
/// Sizes that no tile divides.
const AWKWARD: [[usize; 3]; 5] =
    [[333, 5000, 1032], [1000, 3000, 2056], [4100, 4104, 4104], [777, 11008, 4096], [3000, 152_064, 1024]];
/// The sizes fused layers are compared on: M, N, K.
const FUSED: [[usize; 3]; 5] =
    [[512, 4096, 1024], [4096, 4096, 1024], [8192, 16384, 4096], [16384, 2048, 512], [64, 14336, 4096]];
