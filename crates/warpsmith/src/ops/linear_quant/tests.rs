use super::*;
use crate::device::Device;
use crate::tensor::{Random, Tensor};
use half::f16;

/// Random blocks with moderate scales.
fn weight(format: QuantFormat, rows: usize, k: usize, seed: u64) -> Tensor {
    let mut random = Random::new(seed);
    let bytes = format.row_bytes(k).unwrap();
    let mut data: Vec<u8> = (0..rows * bytes).map(|_| random.below(256) as u8).collect();
    let places: &[usize] = match format {
        QuantFormat::Q6_K => &[208],
        QuantFormat::Q2_K => &[80, 82],
        QuantFormat::Q3_K => &[108],
        QuantFormat::Q8_0 | QuantFormat::Q4_0 | QuantFormat::Q5_0 => &[0],
        QuantFormat::IQ4_NL | QuantFormat::IQ4_XS => &[0],
        QuantFormat::MXFP4 => &[],
        _ => &[0, 2],
    };
    for block in data.chunks_mut(format.block_bytes()) {
        for &place in places {
            let scale = f16::from_f64(random.normal() / 64.0);
            block[place..place + 2].copy_from_slice(&scale.to_le_bytes());
        }
        if format == QuantFormat::MXFP4 {
            block[0] = 118 + random.below(6) as u8;
        }
    }
    Tensor::from_slice(&data, &[rows, bytes], Device::Cpu).unwrap()
}

fn bits(tensor: &Tensor) -> Vec<u32> {
    tensor.to_vec::<f32>().unwrap().iter().map(|x| x.to_bits()).collect()
}

/// One arithmetic: whatever the tier, the number of rows, and whether the weight was packed beforehand.
#[test]
fn tiers_batches_and_packed_weights_have_the_same_bits() {
    for format in QuantFormat::ALL {
        let (m, n, k) = (23, 37, 1024);
        let x = Tensor::randn(&[m, k], DType::F32, Device::Cpu, 5).unwrap();
        let w = weight(format, n, k, 6);
        let expected = bits(&LinearQuant::new(&x, &w, format).kernel("linear_quant_portable").run().unwrap());
        assert!(expected.iter().all(|&y| f32::from_bits(y).is_finite()), "{format:?}");
        let packed = PackedQuantWeight::new(weight(format, n, k, 6), format).unwrap();
        assert!(packed.packed_bytes() > 0);
        for tier in Tier::available() {
            let name = format!("linear_quant_{tier}");
            let out = LinearQuant::new(&x, &w, format).kernel(name.clone()).run().unwrap();
            assert_eq!(bits(&out), expected, "{format:?} {tier}");
            let out = LinearQuant::packed(&x, &packed).kernel(name.clone()).run().unwrap();
            assert_eq!(bits(&out), expected, "{format:?} {tier} packed");
            for row in [0, 7, m - 1] {
                let alone = x.view().narrow(0, row, 1).unwrap();
                let out = LinearQuant::packed(alone, &packed).kernel(name.clone()).run().unwrap();
                assert_eq!(bits(&out), expected[row * n..][..n], "{format:?} {tier} row {row}");
            }
        }
    }
}

/// A row has the same bits in a batch of any size: sizes decide which instructions multiply, and in what groups.
#[test]
fn batches_of_every_size_have_the_same_rows() {
    const MOST: usize = 70;
    for format in QuantFormat::ALL {
        let (n, k) = (35, 512);
        let x = Tensor::randn(&[MOST, k], DType::F32, Device::Cpu, 3).unwrap();
        let packed = PackedQuantWeight::gated(weight(format, 2 * n, k, 4), format, Gate::Halves).unwrap();
        let call = |m: usize, kernel: String| {
            let x = x.view().narrow(0, 0, m).unwrap();
            let call = LinearQuant::packed(x, &packed).activation(Activation::Silu).kernel(kernel);
            bits(&call.run().unwrap())
        };
        let expected = call(MOST, "linear_quant_portable".into());
        for tier in Tier::available() {
            // The portable kernel is slow, and has no groups that AVX2 has not.
            let sizes = if tier == Tier::Portable { 1..4 } else { 1..MOST + 1 };
            for m in sizes {
                assert_eq!(
                    call(m, format!("linear_quant_{tier}")),
                    expected[..m * n],
                    "{format:?} {tier} {m}"
                );
            }
        }
    }
}

/// Strides, types, bias and residual of a batch that is large enough for every kind of instruction.
#[test]
fn large_batches_of_any_layout_are_those_of_single_rows() {
    let (m, n, k) = (53, 41, 256);
    for format in QuantFormat::ALL {
        let x = Tensor::randn(&[k, m], DType::BF16, Device::Cpu, 7).unwrap();
        let x = x.view().permute(&[1, 0]).unwrap();
        let w = weight(format, n, k, 8);
        let bias = Tensor::randn(&[n], DType::F32, Device::Cpu, 9).unwrap();
        let residual = Tensor::randn(&[n, m], DType::F32, Device::Cpu, 10).unwrap();
        let residual = residual.view().permute(&[1, 0]).unwrap();
        let call = |rows: std::ops::Range<usize>| {
            let [x, residual] = [x, residual].map(|all| all.narrow(0, rows.start, rows.len()).unwrap());
            let call = LinearQuant::new(x, &w, format).bias(&bias).residual(residual);
            bits(&call.out_dtype(DType::F32).scale(0.5).run().unwrap())
        };
        let all = call(0..m);
        for row in 0..m {
            assert_eq!(all[row * n..][..n], call(row..row + 1), "{format:?} {row}");
        }
    }
}

/// A row of the unit matrix, which eight bits hold exactly, gives back a column of the weights.
#[test]
fn single_weights_are_those_of_the_dequantised_row() {
    for format in QuantFormat::ALL {
        let (n, k) = (3, 512);
        let mut data = weight(format, n, k, 1).to_vec::<u8>().unwrap();
        // A subnormal scale, and a negative one with the lowest quants.
        let block = format.block_bytes();
        let place = match format {
            QuantFormat::Q6_K => 208,
            QuantFormat::Q2_K => 80,
            QuantFormat::Q3_K => 108,
            _ => 0,
        };
        data[place..place + 2].copy_from_slice(&[0x03, 0x00]);
        let second = format.row_bytes(k).unwrap();
        data[second..second + block].fill(0x80);
        data[second + place..second + place + 2].copy_from_slice(&[0x00, 0xbc]);
        let w = Tensor::from_slice(&data, &[n, second], Device::Cpu).unwrap();
        let unit: Vec<f32> = (0..k * k).map(|i| if i / k == i % k { 127.0 } else { 0.0 }).collect();
        let x = Tensor::from_slice(&unit, &[k, k], Device::Cpu).unwrap();
        let out = LinearQuant::new(&x, &w, format).run().unwrap().to_vec::<f32>().unwrap();
        let mut row = vec![0.0; k];
        for j in 0..n {
            format.dequantize(&data[j * second..(j + 1) * second], &mut row).unwrap();
            for (i, weight) in row.iter().enumerate() {
                let (got, want) = (out[i * n + j], 127.0 * weight);
                assert!((got - want).abs() <= 1e-5 * want.abs() + 1e-6, "{format:?} {i} {j}: {got}, {want}");
            }
        }
    }
}

/// The packed form has the shape of its own weight: with a different tensor it would be read past its end.
#[test]
fn another_weight_in_the_place_of_a_packed_one_is_taken_as_it_is() {
    let (format, k) = (QuantFormat::Q8_0, 64);
    let x = Tensor::randn(&[3, k], DType::F32, Device::Cpu, 1).unwrap();
    let packed = PackedQuantWeight::new(weight(format, 2, k, 6), format).unwrap();
    let large = weight(format, 500, k, 7);
    let out = LinearQuant::packed(&x, &packed).input(W, &large).run().unwrap();
    assert_eq!(bits(&out), bits(&LinearQuant::new(&x, &large, format).run().unwrap()));
}

#[test]
fn what_does_not_fit_is_named() {
    let x = Tensor::zeros(&[2, 64], DType::F32, Device::Cpu).unwrap();
    let w = |rows, bytes| Tensor::zeros(&[rows, bytes], DType::U8, Device::Cpu).unwrap();
    let error = |x: &Tensor, w: &Tensor, format| {
        LinearQuant::new(x, w, format).run().map(|_| ()).unwrap_err().to_string()
    };
    let prefix = "linear_quant: argument ";
    assert_eq!(
        error(&x, &w(3, 40), QuantFormat::Q8_0),
        format!("{prefix}`w`: expected rows of 68 bytes, 64 weights in q8_0, got [3, 40]")
    );
    assert_eq!(
        error(&x, &w(3, 144), QuantFormat::Q4_K),
        format!("{prefix}`x`: expected a multiple of 256 columns, for blocks of q4_k, got [2, 64]")
    );
    let odd = LinearQuant::new(&x, &w(3, 68), QuantFormat::Q8_0).gated(Gate::Halves, Activation::Silu).run();
    assert!(odd.unwrap_err().to_string().contains("`w`: expected an even number of rows"));
    for (tensor, format) in [(w(3, 35), QuantFormat::Q8_0), (x.clone(), QuantFormat::Q4_0)] {
        let error = PackedQuantWeight::new(tensor, format).unwrap_err().to_string();
        assert!(error.contains("linear_quant: argument `w`: expected "), "{error}");
    }
    let mut row = [0.0; 64];
    assert!(QuantFormat::Q4_1.dequantize(&[0; 39], &mut row).is_err());
}

/// NaN and infinity make their row NaN, and nothing else; rows of zeros are zero.
#[test]
fn a_row_that_is_not_finite_fails_alone() {
    let (n, k) = (5, 256);
    for (format, m) in QuantFormat::ALL.into_iter().flat_map(|format| [(format, 3), (format, 40)]) {
        let w = weight(format, n, k, 2);
        let mut x = vec![1f32; m * k];
        (x[k + 3], x[2 * k + 40]) = (f32::NAN, f32::NEG_INFINITY);
        x[(m - 1) * k..].fill(if m > 3 { 0.0 } else { f32::NAN });
        let x = Tensor::from_slice(&x, &[m, k], Device::Cpu).unwrap();
        for tier in Tier::available() {
            let call = LinearQuant::new(&x, &w, format).kernel(format!("linear_quant_{tier}"));
            let out = call.run().unwrap().to_vec::<f32>().unwrap();
            for (row, y) in out.chunks(n).enumerate() {
                let good = match row {
                    1 | 2 => y.iter().all(|y| y.is_nan()),
                    _ if row == m - 1 => y.iter().all(|&y| y == 0.0),
                    _ => y.iter().all(|y| y.is_finite()),
                };
                assert!(good, "{format:?} {tier} row {row} of {m}: {y:?}");
            }
        }
    }
}

#[test]
fn a_weight_without_its_tensor_serves_the_calls_it_was_packed_for() {
    let (m, n, k) = (3, 40, 64);
    let format = QuantFormat::Q4_1;
    let x = Tensor::randn(&[m, k], DType::F32, Device::Cpu, 1).unwrap();
    let whole = PackedQuantWeight::new(weight(format, n, k, 6), format).unwrap();
    let expected = LinearQuant::packed(&x, &whole).run().unwrap().to_vec::<f32>().unwrap();
    let alone = whole.without_tensor().unwrap();
    assert!(alone.tensor().is_none() && alone.packed_bytes() > 0);
    assert_eq!(LinearQuant::packed(&x, &alone).run().unwrap().to_vec::<f32>().unwrap(), expected);
    let gated = LinearQuant::packed(&x, &alone).choice(GATE, Gate::Halves).run();
    let error = gated.unwrap_err().to_string();
    assert!(error.contains("argument `w`") && error.contains("for which it was packed"), "{error}");
}

#[test]
fn a_tolerance_chooses_whether_activations_are_rounded() {
    let x = Tensor::randn(&[3, 64], DType::F32, Device::Cpu, 7).unwrap();
    let w = weight(QuantFormat::Q4_1, 5, 64, 8);
    let run = |call: fn(LinearQuant<'_>) -> LinearQuant<'_>| {
        bits(&call(LinearQuant::new(&x, &w, QuantFormat::Q4_1)).run().unwrap())
    };
    let (rounded, full) = (run(|call| call), run(|call| call.precision(QuantPrecision::Full)));
    assert_ne!(rounded, full);
    assert_eq!(run(|call| call.tolerance(0.004)), rounded);
    assert_eq!(run(|call| call.tolerance(0.0039)), full);
    assert_eq!(run(|call| call.precision(QuantPrecision::Full).tolerance(0.1)), full);
    let wrong = LinearQuant::new(&x, &w, QuantFormat::Q4_1).tolerance(-1.0).run();
    assert!(wrong.unwrap_err().to_string().contains("`tolerance`"));
}

/// In full precision results are those of the expanded weights, with the same bits on every tier and in every batch.
#[test]
fn full_precision_rounds_no_activation() {
    for format in QuantFormat::ALL {
        let (m, n, k) = (11, 37, 512);
        let x = Tensor::randn(&[m, k], DType::F32, Device::Cpu, 7).unwrap();
        let w = weight(format, n, k, 8);
        let bytes = w.to_vec::<u8>().unwrap();
        let mut weights = vec![0f32; n * k];
        for (bytes, weights) in bytes.chunks(bytes.len() / n).zip(weights.chunks_mut(k)) {
            format.dequantize(bytes, weights).unwrap();
        }
        let rows = x.to_vec::<f32>().unwrap();
        let exact = |i: usize, size: fn(f64) -> f64| {
            let (row, column) = (&rows[i / n * k..][..k], &weights[i % n * k..][..k]);
            row.iter().zip(column).map(|(&x, &w)| size(f64::from(x) * f64::from(w))).sum::<f64>()
        };
        let full = |kernel: &str| {
            let call = LinearQuant::new(&x, &w, format).precision(QuantPrecision::Full);
            call.kernel(kernel.to_string()).run().unwrap()
        };
        let expected = full("linear_quant_portable");
        for (i, got) in expected.to_vec::<f32>().unwrap().into_iter().enumerate() {
            let (want, size) = (exact(i, |p| p), exact(i, f64::abs));
            assert!((f64::from(got) - want).abs() <= 1e-6 * size, "{format:?}: {got}, want {want}");
        }
        let rounded = LinearQuant::new(&x, &w, format).run().unwrap();
        assert_ne!(bits(&rounded), bits(&expected), "{format:?}");
        let packed = PackedQuantWeight::new(weight(format, n, k, 8), format).unwrap();
        for tier in Tier::available() {
            let name = format!("linear_quant_{tier}");
            assert_eq!(bits(&full(&name)), bits(&expected), "{format:?} {tier}");
            for row in [0, m - 1] {
                let alone = x.view().narrow(0, row, 1).unwrap();
                let call = LinearQuant::packed(alone, &packed).precision(QuantPrecision::Full);
                let out = call.kernel(name.clone()).run().unwrap();
                assert_eq!(bits(&out), bits(&expected)[row * n..][..n], "{format:?} {tier} row {row}");
            }
        }
    }
}
