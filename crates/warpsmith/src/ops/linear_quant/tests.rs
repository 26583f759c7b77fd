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
        QuantFormat::Q8_0 | QuantFormat::Q4_0 | QuantFormat::Q5_0 => &[0],
        _ => &[0, 2],
    };
    for block in data.chunks_mut(format.block_bytes()) {
        for &place in places {
            let scale = f16::from_f64(random.normal() / 64.0);
            block[place..place + 2].copy_from_slice(&scale.to_le_bytes());
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

/// A row of the unit matrix, which eight bits hold exactly, gives back a column of the weights.
#[test]
fn single_weights_are_those_of_the_dequantised_row() {
    for format in QuantFormat::ALL {
        let (n, k) = (3, 512);
        let mut data = weight(format, n, k, 1).to_vec::<u8>().unwrap();
        // A subnormal scale, and a negative one with the lowest quants.
        let block = format.block_bytes();
        let place = if format == QuantFormat::Q6_K { 208 } else { 0 };
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

/// NaN and infinity make their row NaN, and nothing else.
#[test]
fn a_row_that_is_not_finite_fails_alone() {
    let w = weight(QuantFormat::Q4_1, 5, 64, 2);
    let mut x = vec![1f32; 3 * 64];
    (x[64 + 3], x[2 * 64 + 40]) = (f32::NAN, f32::NEG_INFINITY);
    let x = Tensor::from_slice(&x, &[3, 64], Device::Cpu).unwrap();
    for tier in Tier::available() {
        let call = LinearQuant::new(&x, &w, QuantFormat::Q4_1).kernel(format!("linear_quant_{tier}"));
        let out = call.run().unwrap().to_vec::<f32>().unwrap();
        assert!(out[..5].iter().all(|y| y.is_finite()) && out[5..].iter().all(|y| y.is_nan()), "{out:?}");
    }
}
