//! What the cases cannot say: ids that are refused, other types of weights, parts, and who is sent where.

use super::*;
use crate::ops::Linear;
use crate::{Device, Error, Tensor, cpu};

fn randn(shape: &[usize], dtype: DType, seed: u64) -> Tensor {
    Tensor::randn(shape, dtype, Device::Cpu, seed).unwrap()
}

fn ids(ids: &[i32], top_k: usize) -> Tensor {
    Tensor::from_slice(ids, &[ids.len() / top_k, top_k], Device::Cpu).unwrap()
}

fn bits(tensor: &Tensor) -> Vec<u32> {
    tensor.to_vec::<f32>().unwrap().into_iter().map(f32::to_bits).collect()
}

#[test]
fn ids_that_are_no_experts_are_refused_before_anything_is_written() {
    let (x, w1, w2) =
        (randn(&[2, 8], DType::F32, 0), randn(&[3, 4, 8], DType::F32, 1), randn(&[3, 8, 4], DType::F32, 2));
    let weights = Tensor::zeros(&[2, 2], DType::F32, Device::Cpu).unwrap();
    for wrong in [3, -2, i32::MAX, i32::MIN] {
        let ids = ids(&[0, 1, 2, wrong], 2);
        let mut out = randn(&[2, 8], DType::F32, 3);
        let before = bits(&out);
        let stream = Device::Cpu.default_stream().unwrap();
        let error = MoeFfn::new(&x, &w1, &w2, &ids, &weights).run_into(&mut out, &stream).unwrap_err();
        assert!(matches!(error, Error::Argument { .. }));
        let expected = format!(
            "moe_ffn: argument `ids`: expected -1 or ids from 0 to below experts=3, got {wrong} at [1, 1]"
        );
        assert_eq!(error.to_string(), expected);
        assert_eq!(bits(&out), before);
    }
}

#[test]
fn odd_rows_cannot_be_gated() {
    let (x, w1, w2) =
        (randn(&[2, 8], DType::F32, 0), randn(&[3, 5, 8], DType::F32, 1), randn(&[3, 8, 2], DType::F32, 2));
    let weights = Tensor::zeros(&[2, 1], DType::F32, Device::Cpu).unwrap();
    let ids = ids(&[0, 1], 1);
    let call = MoeFfn::new(&x, &w1, &w2, &ids, &weights).gated(Gate::Halves, Activation::Silu);
    let error = call.run().unwrap_err().to_string();
    assert!(error.contains("`w1`: expected an even number of rows"), "{error}");
}

/// In f32 nothing is rounded between the products: with one expert and a weight of one it is two calls of `linear`.
#[test]
fn one_expert_is_two_products() {
    let (x, w1, w2) = (
        randn(&[5, 3, 40], DType::F32, 0),
        randn(&[1, 48, 40], DType::F32, 1),
        randn(&[1, 40, 24], DType::F32, 2),
    );
    let ids = Tensor::from_slice(&[0i64; 15], &[5, 3, 1], Device::Cpu).unwrap();
    let weights = Tensor::from_slice(&[1f32; 15], &[5, 3, 1], Device::Cpu).unwrap();
    let out =
        MoeFfn::new(&x, &w1, &w2, &ids, &weights).gated(Gate::Interleaved, Activation::Gelu).run().unwrap();
    let [w1, w2] = [&w1, &w2].map(|w| w.view().reshape(&w.shape()[1..]).unwrap());
    let h = Linear::new(&x, w1).gated(Gate::Interleaved, Activation::Gelu).run().unwrap();
    assert_eq!(bits(&out), bits(&Linear::new(&h, w2).run().unwrap()));
}

/// Results have the same bits as with weights in f32.
#[test]
fn weights_may_be_narrower_than_tokens() {
    for dtype in [DType::F16, DType::BF16] {
        let x = randn(&[9, 40], DType::F32, 0);
        let (w1, w2) = (randn(&[4, 48, 40], dtype, 1), randn(&[4, 40, 24], dtype, 2));
        let routing = ids(&[0, 1, 2, 3, 0, 2, 1, 1, 3, 0, 0, 1, -1, 2, 3, 3, 1, 0], 2);
        let weights = randn(&[9, 2], DType::F32, 3);
        let run = |w1: &Tensor, w2: &Tensor| {
            MoeFfn::new(&x, w1, w2, &routing, &weights).gated(Gate::Halves, Activation::Silu).run().unwrap()
        };
        let wide = |w: &Tensor| crate::ops::Cast::new(w).run(DType::F32).unwrap();
        assert_eq!(bits(&run(&w1, &w2)), bits(&run(&wide(&w1), &wide(&w2))), "{dtype}");
    }
}

#[test]
fn parts_are_even_and_bounded() {
    let (x, w1, w2) =
        (randn(&[2, 8], DType::F32, 0), randn(&[3, 4, 8], DType::F32, 1), randn(&[3, 8, 4], DType::F32, 2));
    let weights = Tensor::zeros(&[2, 2], DType::F32, Device::Cpu).unwrap();
    let (routing, mut out) =
        (ids(&[0, 1, 2, 1], 2), Tensor::zeros(&[2, 8], DType::F32, Device::Cpu).unwrap());
    let inputs = [(X, &x), (W1, &w1), (W2, &w2), (IDS, &routing), (ROUTING, &weights)];
    let args =
        inputs.into_iter().fold(Args::new(&SPEC), |args, (index, tensor)| args.input(index, tensor.view()));
    let p = problem::check(&args.output(OUT, out.view_mut()), &Attrs::defaults(&SPEC)).unwrap();
    assert_eq!(p.part_tokens(), 2);
    // 8 slots of 2048 * 2 + 768 * 2 + 2048 * 4 bytes.
    let large = Problem { tokens: 5000, top_k: 8, hidden: 2048, ffn: 768, dtype: DType::BF16, ..p };
    assert_eq!(large.part_tokens(), 1667);
    let huge = Problem { hidden: 1 << 40, ffn: 1 << 60, ..large };
    assert_eq!(huge.part_tokens(), 1);
}

/// A token's bits depend neither on the other tokens, nor on the number of threads.
#[test]
fn bits_are_those_of_the_token_alone() {
    let (tokens, top_k, experts) = (40, 3, 6);
    let x = randn(&[tokens, 70], DType::F32, 0);
    let (w1, w2) = (randn(&[experts, 2 * 100, 70], DType::F32, 1), randn(&[experts, 70, 100], DType::F32, 2));
    let weights = randn(&[tokens, top_k], DType::F32, 3);
    for skew in [1, 5, 1000] {
        let routing: Vec<i32> =
            (0..tokens * top_k).map(|i| (i * 7919 % 1013 / skew % experts) as i32).collect();
        let routing = ids(&routing, top_k);
        let run = |range: std::ops::Range<usize>| {
            let [x, ids, weights] = [&x, &routing, &weights]
                .map(|tensor| tensor.view().narrow(0, range.start, range.len()).unwrap());
            let call = MoeFfn::new(x, &w1, &w2, ids, weights).gated(Gate::Halves, Activation::Silu);
            bits(&call.run().unwrap())
        };
        let all = cpu::with_threads(1, || run(0..tokens));
        assert_eq!(cpu::with_threads(5, || run(0..tokens)), all);
        for token in [0, 17, 39] {
            assert_eq!(run(token..token + 1), all[token * 70..][..70], "{skew} {token}");
        }
    }
}
