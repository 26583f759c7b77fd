use super::*;
use crate::device::Device;
use crate::lab::proof::kernels_on;
use crate::ops::devices;

const EMPTY: f64 = f64::NEG_INFINITY;

#[test]
fn empty_parts_have_no_say_even_if_they_hold_nan() {
    let (parts, tokens, dim) = (3, 4, 64);
    // Token 0: parts 0 and 2. Token 1: part 1 alone. Token 2: none. Token 3: all, of which it has one.
    let lses = [[1.0, EMPTY, EMPTY, 0.5], [EMPTY, -80.0, EMPTY, 1.0], [1.0, EMPTY, EMPTY, 1.0]];
    let counts = [3, 100, -5, 1];
    let value =
        |part: usize, token: usize| if lses[part][token] == EMPTY { f64::NAN } else { 1.0 + part as f64 };
    let rows = (0..parts * tokens).flat_map(|row| vec![value(row / tokens, row % tokens); dim]);
    let rows: Vec<f64> = rows.collect();
    for device in devices() {
        let lses = Tensor::from_f64(lses.as_flattened(), &[parts, tokens, 1], DType::F32, device).unwrap();
        let counts = Tensor::from_slice(&counts, &[tokens], device).unwrap();
        for dtype in FLOATS {
            let outs = Tensor::from_f64(&rows, &[parts, tokens, 1, dim], dtype, device).unwrap();
            for kernel in kernels_on(&Forward, device) {
                let call = MergeStates::new(&outs, &lses).counts(&counts).to(DType::F32);
                let (out, lse) = call.kernel(kernel.name).run().unwrap();
                let (out, lse) = (out.to_f64().unwrap(), lse.to_f64().unwrap());
                for (token, want) in [2.0, 2.0, 0.0, 1.0].into_iter().enumerate() {
                    let row = &out[token * dim..][..dim];
                    assert!(row.iter().all(|&x| x == want), "{} {dtype} token {token}: {row:?}", kernel.name);
                }
                assert!((lse[0] - (1.0 + 2f64.ln())).abs() < 1e-6, "{} {lse:?}", kernel.name);
                assert_eq!(lse[1..], [-80.0, EMPTY, 0.5], "{}", kernel.name);
            }
        }
    }
}

#[test]
fn one_part_comes_through_bit_for_bit() {
    for device in devices() {
        let outs = Tensor::randn(&[1, 5, 3, 40], DType::BF16, device, 1).unwrap();
        let lses = Tensor::randn(&[1, 5, 3], DType::F32, device, 2).unwrap();
        for kernel in kernels_on(&Forward, device) {
            let (out, lse) = MergeStates::new(&outs, &lses).kernel(kernel.name).run().unwrap();
            assert_eq!(out.to_f64().unwrap(), outs.to_f64().unwrap(), "{}", kernel.name);
            assert_eq!(lse.to_f64().unwrap(), lses.to_f64().unwrap(), "{}", kernel.name);
        }
    }
}

#[test]
fn an_lse_that_is_no_number_spoils_its_own_head_alone() {
    for device in devices() {
        let outs = Tensor::randn(&[2, 3, 1, 8], DType::F32, device, 1).unwrap();
        let lses = [0.0, f64::NAN, f64::INFINITY, 1.0, 1.0, 1.0];
        let lses = Tensor::from_f64(&lses, &[2, 3, 1], DType::F32, device).unwrap();
        for kernel in kernels_on(&Forward, device) {
            let (out, lse) = MergeStates::new(&outs, &lses).kernel(kernel.name).run().unwrap();
            let (out, lse) = (out.to_f64().unwrap(), lse.to_f64().unwrap());
            assert!(out[..8].iter().all(|x| x.is_finite()) && out[8..].iter().all(|x| x.is_nan()));
            assert!(lse[0].is_finite() && lse[1..].iter().all(|x| x.is_nan()), "{} {lse:?}", kernel.name);
        }
    }
}

#[test]
fn mistakes_are_named() {
    let tensor = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, Device::Cpu).unwrap();
    let (outs, lses) = (tensor(&[2, 3, 4, 8], DType::BF16), tensor(&[2, 3, 4], DType::F32));
    let bad = |call: MergeStates<'_>, text: &str| {
        let error = call.run().unwrap_err().to_string();
        assert!(error.contains(text), "{error}");
    };
    bad(MergeStates::new(&outs, &lses).to(DType::I32), "`to`: expected one of auto, f32, f16, bf16");
    bad(MergeStates::new(&outs, &tensor(&[2, 3, 4], DType::BF16)), "`lses`: expected dtype f32");
    bad(MergeStates::new(&outs, &tensor(&[3, 2, 4], DType::F32)), "`lses`: expected shape [num_parts=2");
    bad(
        MergeStates::new(&outs, &lses).counts(&tensor(&[2], DType::I32)),
        "`counts`: expected shape [num_tokens=3]",
    );
    bad(MergeStates::new(&outs, &lses).counts(&tensor(&[3], DType::I64)), "`counts`: expected dtype i32");
}
