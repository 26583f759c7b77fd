//! Attention: the memory it takes, and the bits of its rows.

use crate::common::{gpu, hopper};
use crate::harness::skip;
use warpsmith::cuda::Context;
use warpsmith::ops::{Attention, Linear, Softmax};
use warpsmith::{DType, Device, Result, Tensor};

crate::harness::tests! {
    attention_over_long_sequences_takes_a_tenth_of_the_memory_of_its_parts;
    rows_of_hopper_attention_have_the_same_bits_in_blocks_of_any_size;
    scores_of_hopper_attention_may_rise_by_any_amount;
}

/// The most memory that `work` had in use at once, besides what was there before.
fn peak(ctx: &Context, work: impl FnOnce() -> Result<()>) -> u64 {
    ctx.default_stream().synchronize().unwrap();
    ctx.reset_pool_high().unwrap();
    let before = ctx.memory().unwrap().pool_used;
    work().unwrap();
    ctx.default_stream().synchronize().unwrap();
    ctx.memory().unwrap().pool_high - before
}

fn attention_over_long_sequences_takes_a_tenth_of_the_memory_of_its_parts() {
    let Some(gpu) = gpu() else { return };
    const HEADS: usize = 2;
    const LEN: usize = 32_768;
    const DIM: usize = 128;
    let scores = (HEADS * LEN * LEN * DType::BF16.size()) as u64;
    if gpu.ctx.memory().unwrap().free < 2 * scores {
        skip::<()>(format!("less than {} GB of memory free", (2 * scores) >> 30));
        return;
    }
    let random = |seed| Tensor::randn(&[1, LEN, HEADS, DIM], DType::BF16, Device::Cuda(0), seed).unwrap();
    let (q, k, v) = (random(1), random(2), random(3));
    let stream = gpu.ctx.default_stream();
    let fused = peak(gpu.ctx, || Attention::new(&q, &k, &v).run().map(drop));
    let apart = peak(gpu.ctx, || {
        let [q, k] = [&q, &k].map(|tensor| tensor.view().permute(&[0, 2, 1, 3]).unwrap());
        let mut weights = Linear::new(q, k).scale((DIM as f32).sqrt().recip()).run()?;
        Softmax::in_place().run_in_place(&mut weights, &warpsmith::Stream::Cuda(stream.clone()))?;
        Linear::new(&weights, v.view().permute(&[0, 2, 3, 1]).unwrap()).run().map(drop)
    });
    println!("at once {} MB, apart {} MB", fused >> 20, apart >> 20);
    assert!(apart >= scores && fused * 10 <= apart, "{fused} and {apart} bytes");
}

fn rows_of_hopper_attention_have_the_same_bits_in_blocks_of_any_size() {
    let Some(gpu) = hopper() else { return };
    const LEN: usize = 1000;
    const HEADS: usize = 4;
    const DIM: usize = 128;
    let blocks = [(128, 64), (128, 80), (128, 128), (192, 64), (192, 80)];
    // Scores that grow along the keys until weights relative to the first one would be infinite, and some that do not.
    for growth in [0.0, 6.0, 20.0, 500.0] {
        let shape = [1, LEN, HEADS, DIM];
        let noise = |seed| Tensor::randn(&shape, DType::F32, Device::Cpu, seed).unwrap().to_f64().unwrap();
        let q: Vec<f64> = noise(1).iter().map(|x| 1.0 + x / 4.0).collect();
        let grown = |i: usize| growth * (i / (HEADS * DIM)) as f64 / LEN as f64;
        let k: Vec<f64> = noise(2).iter().enumerate().map(|(i, x)| x / 2.0 + grown(i)).collect();
        let v = noise(3);
        let tensors =
            |device| [&q, &k, &v].map(|x| Tensor::from_f64(x, &shape, DType::BF16, device).unwrap());
        let (device, host) = (tensors(Device::Cuda(0)), tensors(Device::Cpu));
        for (causal, window) in [(true, 0), (true, 150), (false, 0)] {
            fn call(tensors: &[Tensor; 3], causal: bool, window: usize) -> Attention<'_> {
                let [q, k, v] = tensors;
                let call = Attention::new(q, k, v).window(window);
                if causal { call.causal() } else { call }
            }
            let run = |(rows, keys)| {
                let call = call(&device, causal, window).blocks(rows, keys).kernel("attention_sm90");
                let (out, lse) = call.run_with_lse().unwrap();
                [out, lse].map(|tensor| tensor.to_f64().unwrap())
            };
            let first = run(blocks[0]);
            for size in &blocks[1..] {
                assert!(run(*size) == first, "{size:?}: {growth}, {causal}, {window}");
            }
            let expected = call(&host, causal, window).run().unwrap().to_f64().unwrap();
            let far = first[0].iter().zip(&expected).any(|(a, b)| (a - b).abs() > 0.0625);
            assert!(!far, "{growth}, {causal}, {window}");
        }
    }
    gpu.ctx.check().unwrap();
}

fn scores_of_hopper_attention_may_rise_by_any_amount() {
    let Some(gpu) = hopper() else { return };
    const LEN: usize = 700;
    const HEADS: usize = 2;
    // Every seventh row, in the midst of rows whose scores fall.
    let rises = |row: usize| row % 7 == 3;
    for (dim, dtype) in
        [(64, DType::BF16), (64, DType::F16), (96, DType::BF16), (128, DType::BF16), (128, DType::F16)]
    {
        let (shape, width) = ([1, LEN, HEADS, dim], HEADS * dim);
        let noise = |seed| Tensor::randn(&shape, DType::F32, Device::Cpu, seed).unwrap().to_f64().unwrap();
        let q: Vec<f64> = noise(1)
            .iter()
            .enumerate()
            .map(|(i, x)| if rises(i / width) { 1.0 + x / 4.0 } else { -1.0 - x / 4.0 })
            .collect();
        // The same with a row that falls in place of each that rises.
        let falling: Vec<f64> =
            (0..q.len()).map(|i| q[if rises(i / width) { i % width } else { i }]).collect();
        // By how many powers of two weights grow, at once or from key to key: within what sums can hold, and beyond.
        for (at_once, each) in
            [(20.0, 0.0), (33.0, 0.0), (130.0, 0.0), (3000.0, 0.0), (0.0, 0.3), (0.0, 2.0), (0.0, 10.0)]
        {
            let unit = std::f64::consts::LN_2 / (dim as f64).sqrt();
            let grown = |key: usize| unit * (if key >= 333 { at_once } else { 0.0 } + each * key as f64);
            let k: Vec<f64> = noise(2).iter().enumerate().map(|(i, x)| x / 2.0 + grown(i / width)).collect();
            let v = noise(3);
            let run = |q: &[f64], device: Device, rows: usize| {
                let [q, k, v] = [q, &k, &v].map(|x| Tensor::from_f64(x, &shape, dtype, device).unwrap());
                let call = Attention::new(&q, &k, &v).causal().blocks(rows, 0);
                let call = if rows == 0 { call } else { call.kernel("attention_sm90") };
                let (out, lse) = call.run_with_lse().unwrap();
                [out, lse].map(|tensor| tensor.to_f64().unwrap())
            };
            let what = format!("{dim} {dtype}: {at_once}, {each}");
            let [out, lse] = run(&q, Device::Cuda(0), 128);
            let [expected, expected_lse] = run(&q, Device::Cpu, 0);
            assert!(out.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 0.0625), "{what}");
            let near = |(a, b): (&f64, &f64)| (a - b).abs() < 1e-3 * b.abs().max(1.0);
            assert!(lse.iter().zip(&expected_lse).all(near), "{what}: lse");
            if dim != 96 {
                assert!(run(&q, Device::Cuda(0), 192)[0] == out, "{what}: tiles of 192 rows");
            }
            let alone = &run(&falling, Device::Cuda(0), 128)[0];
            let same = |i: usize| rises(i / width) || alone[i] == out[i];
            assert!((0..out.len()).all(same), "{what}: rows have bits of their neighbours");
        }
    }
    gpu.ctx.check().unwrap();
}
