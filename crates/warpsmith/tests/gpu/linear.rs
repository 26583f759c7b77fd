//! `linear` in f32 on tensor cores: values that cannot be split, and the bits of rows.

use crate::common::{Gpu, gpu};
use crate::harness::skip;
use warpsmith::ops::Linear;
use warpsmith::{DType, Device, Tensor};

crate::harness::tests! {
    what_bf16_cannot_split_has_the_bits_of_plain_f32;
    rows_in_f32_have_the_same_bits_in_tiles_of_any_size;
}

const SPLIT: &str = "linear_bf16x3";

/// The device if it has the kernel.
fn with_tensor_cores() -> Option<Gpu> {
    let gpu = gpu()?;
    let has = matches!(gpu.ctx.info().arch(), 80 | 90 | 100..110);
    if has { Some(gpu) } else { skip("tensor cores too slow for f32") }
}

fn tensor(values: &[f32], shape: &[usize]) -> Tensor {
    Tensor::from_slice(values, shape, Device::Cuda(0)).unwrap()
}

fn noise(shape: &[usize], seed: u64) -> Vec<f32> {
    Tensor::randn(shape, DType::F32, Device::Cpu, seed).unwrap().to_vec().unwrap()
}

/// NaN counts as equal to NaN.
fn bits(out: &[f32]) -> Vec<u32> {
    out.iter().map(|y| if y.is_nan() { f32::NAN.to_bits() } else { y.to_bits() }).collect()
}

fn what_bf16_cannot_split_has_the_bits_of_plain_f32() {
    let Some(gpu) = with_tensor_cores() else { return };
    const N: usize = 70;
    const K: usize = 200;
    // What each kind of row does to an element.
    let kinds: [fn(usize, f32) -> f32; 6] = [
        |_, _| 0.0,
        |_, x| x * 1e-40,
        |k, x| if k % 50 == 7 { f32::INFINITY } else { x },
        |k, x| if k % 50 == 7 { f32::MAX.copysign(x) } else { x },
        |k, x| if k == 150 { f32::NAN } else { x },
        |_, x| x * 1e37,
    ];
    for m in [6, 12, 30, 66] {
        let x: Vec<f32> = (noise(&[m, K], 1).iter().enumerate())
            .map(|(i, &x)| kinds[i / K % kinds.len()](i % K, x))
            .collect();
        let (rows, columns) = (x, noise(&[N, K], 2));
        let (x, w) = (tensor(&rows, &[m, K]), tensor(&columns, &[N, K]));
        let run = |kernel| {
            let out = Linear::new(&x, &w).kernel(kernel).run().unwrap();
            bits(&out.to_vec::<f32>().unwrap())
        };
        let (split, plain) = (run(SPLIT), run("linear_generic"));
        for (row, (split, plain)) in split.chunks(N).zip(plain.chunks(N)).enumerate() {
            // Sums of the last kind differ in their last bits where they are finite. On the way there a sum may be too large
            // in one order and not in the other, so finite ones are compared with the exact sum.
            let close = |column: usize| {
                let ours = f32::from_bits(split[column]);
                let (x, w) = (&rows[row * K..][..K], &columns[column * K..][..K]);
                let terms = x.iter().zip(w).map(|(x, w)| f64::from(*x) * f64::from(*w));
                let (sum, size) = terms.fold((0.0, 0.0), |(sum, size), term| (sum + term, size + term.abs()));
                match ours.is_finite() {
                    true => (f64::from(ours) - sum).abs() <= 1e-5 * size,
                    false => split[column] == plain[column],
                }
            };
            let agree = if row % 6 == 5 { (0..N).all(close) } else { split == plain };
            assert!(agree, "row {row} of {m}: {split:x?} instead of {plain:x?}");
        }
    }
    gpu.ctx.check().unwrap();
}

fn rows_in_f32_have_the_same_bits_in_tiles_of_any_size() {
    let Some(gpu) = with_tensor_cores() else { return };
    const N: usize = 1500;
    const K: usize = 404;
    const M: usize = 1400;
    let (x, w) = (tensor(&noise(&[M, K], 1), &[M, K]), tensor(&noise(&[N, K], 2), &[N, K]));
    let run = |m: usize| {
        let rows = x.view().narrow(0, 0, m).unwrap();
        bits(&Linear::new(rows, &w).kernel(SPLIT).run().unwrap().to_vec::<f32>().unwrap())
    };
    let all = run(M);
    for m in [1, 5, 8, 9, 16, 17, 32, 64, 65, 130, 500] {
        assert!(run(m) == all[..m * N], "{m} rows");
    }
    gpu.ctx.check().unwrap();
}
