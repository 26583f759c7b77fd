//! What the cases cannot say: exact values, and calls that are refused.

use super::*;
use crate::Device;
use crate::lab::proof::kernels_on;
use crate::ops::devices;

fn tensor(values: &[f32], shape: &[usize], device: Device) -> Tensor {
    Tensor::from_slice(values, shape, device).unwrap()
}

fn number(tensor: &Tensor) -> f32 {
    tensor.to_vec::<f32>().unwrap()[0]
}

/// Every kernel of every device here.
fn on_every_kernel(test: impl Fn(Device, &'static str)) {
    for device in devices() {
        kernels_on(&Forward, device).iter().for_each(|kernel| test(device, kernel.name));
    }
}

/// `load_balancing_loss_func` of transformers, which is `top_k` times as much.
#[test]
fn the_load_balance_loss_is_that_of_transformers() {
    let (tokens, experts, top_k) = (37, 8, 2);
    on_every_kernel(|device, kernel| {
        let logits = Tensor::randn(&[tokens, experts], DType::F32, device, 3).unwrap();
        let ids = crate::ops::MoeRoute::new(&logits, top_k).run().unwrap().ids;
        let found = MoeLosses::new(&logits, &ids).kernel(kernel).run().unwrap();
        let (x, ids) = (logits.to_vec::<f32>().unwrap(), ids.to_vec::<i32>().unwrap());
        let mut by_slot = vec![0.0; top_k * experts];
        for (at, &id) in ids.iter().enumerate() {
            by_slot[at % top_k * experts + id as usize] += 1.0 / tokens as f64;
        }
        let mut probability = vec![0.0; experts];
        for row in x.chunks(experts) {
            let sum: f64 = row.iter().map(|&x| f64::from(x).exp()).sum();
            let add = |(p, &x): (&mut f64, &f32)| *p += f64::from(x).exp() / sum / tokens as f64;
            probability.iter_mut().zip(row).for_each(add);
        }
        let overall: f64 = by_slot.iter().enumerate().map(|(at, f)| f * probability[at % experts]).sum();
        let expected = overall * experts as f64 / top_k as f64;
        assert!((f64::from(number(&found.load_balance)) - expected).abs() < 1e-6, "{kernel} {expected}");
    });
}

#[test]
fn uneven_experts_cost_and_even_ones_do_not() {
    on_every_kernel(|device, kernel| {
        let logits = tensor(&[20.0, 0.0, 0.0, 0.0, 20.0, 0.0, 0.0, 0.0], &[2, 4], device);
        let ids = Tensor::from_slice(&[0i32, 0], &[2, 1], device).unwrap();
        for score in [RouteScore::Softmax, RouteScore::Sigmoid] {
            let one = MoeLosses::new(&logits, &ids).score(score).kernel(kernel).run().unwrap();
            let p = if score == RouteScore::Softmax { 1.0 } else { 1.0 / 2.5 };
            assert!((number(&one.load_balance) - 4.0 * p).abs() < 1e-5, "{kernel}");
            // (p - 1/4)² + 3 ((1 - p) / 3 - 1/4)² = 4/3 (p - 1/4)², a quarter of it over 1/16.
            let variation = 16.0 / 3.0 * (p - 0.25) * (p - 0.25);
            assert!((number(&one.importance) - variation).abs() < 1e-5, "{kernel}");
            assert!((number(&one.z_loss) - 400.0).abs() < 1e-3, "{kernel}");
            assert_eq!(one.load.to_vec::<f32>().unwrap(), [1.0, 0.0, 0.0, 0.0], "{kernel}");
        }
    });
}

#[test]
fn without_tokens_everything_is_zero() {
    on_every_kernel(|device, kernel| {
        let logits = Tensor::zeros(&[0, 4], DType::F32, device).unwrap();
        let ids = Tensor::zeros(&[0, 2], DType::I32, device).unwrap();
        let all = MoeLosses::new(&logits, &ids).kernel(kernel).run().unwrap();
        for one in [&all.load_balance, &all.z_loss, &all.importance, &all.entropy] {
            assert_eq!(one.to_vec::<f32>().unwrap(), [0.0], "{kernel}");
        }
        for each in [&all.load, &all.probability] {
            assert_eq!(each.to_vec::<f32>().unwrap(), [0.0; 4], "{kernel}");
        }
    });
}

#[test]
fn minus_infinity_has_no_probability_and_nan_shows() {
    on_every_kernel(|device, kernel| {
        let of = |rows: [[f32; 3]; 2], score: RouteScore| {
            let logits = tensor(rows.as_flattened(), &[2, 3], device);
            let ids = Tensor::from_slice(&[0i32, 1], &[2, 1], device).unwrap();
            MoeLosses::new(&logits, &ids).score(score).kernel(kernel).run().unwrap()
        };
        let inf = f32::INFINITY;
        for score in [RouteScore::Softmax, RouteScore::Sigmoid] {
            let masked = of([[0.0, 0.0, -inf]; 2], score);
            assert_eq!(masked.probability.to_vec::<f32>().unwrap(), [0.5, 0.5, 0.0], "{kernel}");
            assert!((number(&masked.entropy) - 2f32.ln()).abs() < 1e-6, "{kernel}");
            assert!((number(&masked.load_balance) - 1.5).abs() < 1e-6, "{kernel}");
            for row in [[0.0, f32::NAN, 0.0], [-inf; 3]] {
                let wrong = of([[0.0; 3], row], score);
                let losses = [&wrong.load_balance, &wrong.z_loss, &wrong.importance, &wrong.entropy];
                assert!(losses.iter().all(|loss| number(loss).is_nan()), "{kernel} {score:?} {row:?}");
                assert_eq!(wrong.load.to_vec::<f32>().unwrap(), [0.5, 0.5, 0.0], "{kernel}");
            }
        }
    });
}

#[test]
fn ids_that_are_no_experts_are_refused_before_anything_is_written() {
    let logits = tensor(&[0.0; 6], &[2, 3], Device::Cpu);
    let stream = Device::Cpu.default_stream().unwrap();
    for wrong in [3, -1, i32::MIN] {
        let ids = Tensor::from_slice(&[0i32, wrong], &[2, 1], Device::Cpu).unwrap();
        let [mut a, mut b, mut c] = [7.0f32; 3].map(|x| tensor(&[x], &[], Device::Cpu));
        let call = MoeLosses::new(&logits, &ids);
        let error = call.run_into(&mut a, &mut b, &mut c, &stream).unwrap_err().to_string();
        let expected = format!("`ids`: expected from 0 to below experts=3, got {wrong} in slot 0 of token 1");
        assert!(error.contains(&expected), "{error}");
        assert_eq!([&a, &b, &c].map(number), [7.0; 3]);
    }
}
