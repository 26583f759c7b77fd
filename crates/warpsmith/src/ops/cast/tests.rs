use super::*;
use crate::device::Device;

/// Every kernel that can run here, with its device.
fn kernels() -> Vec<(&'static str, Device)> {
    let tiers = Tier::available();
    let gpu = Device::best();
    let place = |k: crate::op::KernelInfo| match (k.tier, k.cuda) {
        (Some(tier), _) => tiers.contains(&tier).then_some((k.name, Device::Cpu)),
        (_, Some(_)) => (gpu != Device::Cpu).then_some((k.name, gpu)),
        _ => None,
    };
    crate::op::AnyOp::kernels(&Forward).into_iter().filter_map(place).collect()
}

/// The bytes of every value of the narrow types, and of f32 every exponent with mantissas around the ties of all other
/// types.
fn samples(dtype: DType) -> Vec<u8> {
    match dtype.size() {
        1 => (0..=u8::MAX).collect(),
        2 => (0..=u16::MAX).flat_map(u16::to_ne_bytes).collect(),
        _ => {
            let mut state = 1u32;
            let mut all = Vec::new();
            for high in 0..1u32 << 9 {
                for step in 0..32u32 {
                    // Ties of e5m2, e4m3, bf16 and f16 lie half a unit of their last place past their values.
                    for tie in [20, 19, 15, 12] {
                        all.push(
                            (high << 23 | step << 18 | 1 << tie).wrapping_add(state % 3).wrapping_sub(1),
                        );
                        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    }
                    all.push(high << 23 | state >> 9);
                }
            }
            all.into_iter().flat_map(u32::to_ne_bytes).collect()
        }
    }
}

#[test]
fn every_pair_of_types_rounds_exactly_on_every_kernel() {
    for from in TYPES {
        let bytes = samples(from);
        let values: Vec<f64> = bytes.chunks_exact(from.size()).map(|b| from.read(b)).collect();
        for to in TYPES {
            for (kernel, device) in kernels() {
                let x = Tensor::from_bytes(&bytes, &[values.len()], from, device).unwrap();
                let out = Cast::new(&x).kernel(kernel).run(to).unwrap().to_f64().unwrap();
                for (&value, got) in values.iter().zip(out) {
                    let want = to.round(value);
                    let same = got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan());
                    assert!(same, "{kernel} {from} to {to}: {value:e} became {got:e}, not {want:e}");
                }
            }
        }
    }
}

#[test]
fn small_floats_saturate_and_half_floats_overflow() {
    let x = [1e9, -1e9, f64::INFINITY, f64::NEG_INFINITY, f64::NAN];
    for (kernel, device) in kernels() {
        let x = Tensor::from_f64(&x, &[5], DType::F32, device).unwrap();
        let cast = |to| Cast::new(&x).kernel(kernel).run(to).unwrap().to_f64().unwrap();
        for (to, max) in [(DType::F8E4M3, 448.0), (DType::F8E5M2, 57344.0), (DType::F16, f64::INFINITY)] {
            let out = cast(to);
            assert_eq!(out[..4], [max, -max, max, -max], "{kernel} {to}");
            assert!(out[4].is_nan(), "{kernel} {to}");
        }
    }
}

#[test]
fn scales_are_applied_in_f32_before_the_rounding() {
    let (rows, cols) = (3, 37);
    let scales = [0.3f32, 7.0, 1e-3];
    for (kernel, device) in kernels() {
        let x = Tensor::randn(&[1, rows, cols], DType::BF16, device, 3).unwrap();
        let scale = Tensor::from_slice(&scales, &[1, rows], device).unwrap();
        let values = x.to_f64().unwrap();
        for to in TYPES {
            for inverse in [false, true] {
                let call = Cast::new(&x).kernel(kernel).scale(&scale);
                let out = if inverse { call.inverse() } else { call }.run(to).unwrap().to_f64().unwrap();
                for (i, (&value, got)) in values.iter().zip(out).enumerate() {
                    let (value, scale) = (value as f32, scales[i / cols]);
                    let want = to.round(if inverse { value / scale } else { value * scale } as f64);
                    assert_eq!(got.to_bits(), want.to_bits(), "{kernel} {to} inverse={inverse} element {i}");
                }
            }
        }
    }
}

#[test]
fn every_bf16_is_scaled_and_rounded_exactly() {
    let rows = 4;
    let all: Vec<u8> = samples(DType::BF16);
    let values: Vec<f64> = all.chunks_exact(2).map(|b| DType::BF16.read(b)).collect();
    let mut scales = vec![1.0f32, 448.0, 1.0 / 448.0, 1.5, 2.1, 1e-3, 7e17, 2e-18, 3e30, 1e-30, -0.7];
    scales.extend([1.0f32.next_down(), 1.0f32.next_up(), 0.0, f32::INFINITY, f32::NAN, 1e-40]);
    scales.extend((0..15u32).map(|i| f32::from_bits(0x3e80_0000 + i * 3_355_443)));
    for (kernel, device) in kernels() {
        let x = Tensor::from_bytes(&all, &[rows, values.len() / rows], DType::BF16, device).unwrap();
        for i in 0..scales.len() {
            let scale: Vec<f32> = (i..i + rows).map(|i| scales[i % scales.len()]).collect();
            let scale_of = |at: usize| scale[at / (values.len() / rows)];
            let tensor = Tensor::from_slice(&scale, &[rows], device).unwrap();
            for inverse in [false, true] {
                let call = Cast::new(&x).kernel(kernel).scale(&tensor);
                let out = if inverse { call.inverse() } else { call }.run(DType::F8E4M3).unwrap();
                for (at, (&value, got)) in values.iter().zip(out.to_f64().unwrap()).enumerate() {
                    let (value, scale) = (value as f32, scale_of(at));
                    let exact = if inverse { value / scale } else { value * scale };
                    let want = DType::F8E4M3.round(exact as f64);
                    let same = got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan());
                    assert!(
                        same,
                        "{kernel} {value:e} scale {scale:e} inverse={inverse}: {got:e}, want {want:e}"
                    );
                }
            }
        }
    }
}

#[test]
fn mistakes_are_named() {
    let tensor = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, Device::Cpu).unwrap();
    let x = tensor(&[4, 8], DType::F32);
    let bad = |result: Result<Tensor>, text: &str| {
        let error = result.unwrap_err().to_string();
        assert!(error.contains(text), "{error}");
    };
    bad(Cast::new(&x).run(DType::I32), "`out`: expected dtype f32 or f16");
    bad(Cast::new(&x).inverse().run(DType::F16), "because `inverse` is set");
    bad(
        Cast::new(&x).scale(&tensor(&[8], DType::F32)).run(DType::F16),
        "`scale`: expected shape [1] or [4], got [8]",
    );
    bad(Cast::new(&x).scale(&tensor(&[4], DType::F16)).run(DType::F16), "`scale`: expected dtype f32");
}
