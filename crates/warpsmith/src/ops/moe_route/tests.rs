//! What the cases cannot say: exact values, properties, and calls that are refused.

use super::*;
use crate::Device;
use crate::lab::proof::kernels_on;
use crate::ops::devices;

fn tensor(values: &[f32], shape: &[usize], device: Device) -> Tensor {
    Tensor::from_slice(values, shape, device).unwrap()
}

fn ints(tensor: &Tensor) -> Vec<i32> {
    tensor.to_vec().unwrap()
}

fn floats(tensor: &Tensor) -> Vec<f32> {
    tensor.to_vec().unwrap()
}

/// Every kernel of every device here.
fn on_every_kernel(test: impl Fn(Device, &'static str)) {
    for device in devices() {
        kernels_on(&Forward, device).iter().for_each(|kernel| test(device, kernel.name));
    }
}

#[test]
fn of_equal_experts_the_lowest_are_taken() {
    on_every_kernel(|device, kernel| {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for (experts, top_k) in [(5, 3), (64, 8), (1024, 40)] {
                let logits = Tensor::zeros(&[3, experts], dtype, device).unwrap();
                let zeros = Tensor::zeros(&[experts], DType::F32, device).unwrap();
                let groups = if experts == 64 { (8, 4) } else { (1, 0) };
                let call = || MoeRoute::new(&logits, top_k).kernel(kernel);
                let grouped = call().bias(&zeros).groups(groups.0, groups.1, GroupScore::Sum);
                for call in [call(), call().score(RouteScore::Sigmoid), grouped] {
                    let route = call.run().unwrap();
                    let lowest: Vec<i32> = (0..top_k as i32).collect();
                    assert_eq!(ints(&route.ids), lowest.repeat(3), "{kernel}");
                    let even = 1.0 / top_k as f32;
                    assert!(floats(&route.weights).iter().all(|w| (w - even).abs() < 1e-6), "{kernel}");
                }
            }
        }
    });
}

#[test]
fn nan_is_chosen_last_has_no_weight_and_no_expert_is_chosen_twice() {
    let (nan, inf) = (f32::NAN, f32::INFINITY);
    let rows = [[nan, 1.0, nan, 2.0], [nan; 4], [-inf, nan, 0.0, -inf], [inf, 1.0, inf, nan]];
    on_every_kernel(|device, kernel| {
        let logits = tensor(rows.as_flattened(), &[4, 4], device);
        let high = tensor(&[9.0, 0.0, 0.0, nan], &[4], device);
        for score in [RouteScore::Softmax, RouteScore::Sigmoid] {
            let route = MoeRoute::new(&logits, 3).score(score).kernel(kernel).run().unwrap();
            assert_eq!(ints(&route.ids), [3, 1, 0, 0, 1, 2, 2, 0, 1, 0, 2, 1], "{kernel}");
            let weights = floats(&route.weights);
            let none = [2, 3, 4, 5, 7, 8];
            assert!(none.iter().all(|&at| weights[at] == 0.0), "{kernel} {weights:?}");
            assert!(weights.iter().all(|w| (0.0..=1.0).contains(w)), "{kernel} {weights:?}");
            assert!((weights[0] + weights[1] - 1.0).abs() < 1e-6 && weights[9] == weights[10]);
            // A bias does not raise what has no weight, and one of NaN counts as minus infinity.
            let biased = MoeRoute::new(&logits, 3).score(score).bias(&high).kernel(kernel).run().unwrap();
            assert_eq!(ints(&biased.ids)[..3], [1, 0, 2], "{kernel}");
            assert_eq!(ints(&biased.ids)[6..9], [2, 0, 1], "{kernel}");
        }
        let all = MoeRoute::new(&logits, 4).kernel(kernel).run().unwrap();
        for ids in ints(&all.ids).chunks_mut(4) {
            ids.sort_unstable();
            assert_eq!(ids, [0, 1, 2, 3], "{kernel}");
        }
    });
}

#[test]
fn a_bias_changes_the_choice_and_not_the_weights() {
    on_every_kernel(|device, kernel| {
        let logits = tensor(&[0.0, 1.0, -1.0], &[1, 3], device);
        let bias = tensor(&[0.0, -1.0, 0.5], &[3], device);
        let call = MoeRoute::new(&logits, 2).score(RouteScore::Sigmoid).bias(&bias).scale(2.0);
        let route = call.kernel(kernel).run().unwrap();
        assert_eq!(ints(&route.ids), [2, 0], "{kernel}");
        let (a, b) = (1.0 / (1.0 + 1f32.exp()), 0.5);
        let weights = floats(&route.weights);
        assert!((weights[0] - 2.0 * a / (a + b)).abs() < 1e-6, "{kernel} {weights:?}");
        assert!((weights[1] - 2.0 * b / (a + b)).abs() < 1e-6, "{kernel} {weights:?}");
    });
}

#[test]
fn only_experts_of_the_best_groups_are_chosen() {
    on_every_kernel(|device, kernel| {
        // The group of the largest is the worst by sums of two.
        let logits = tensor(&[5.0, -9.0, 3.0, 3.0, 2.5, 2.5], &[1, 6], device);
        let of = |score: GroupScore| {
            let call = MoeRoute::new(&logits, 3).score(RouteScore::Sigmoid).groups(3, 2, score);
            ints(&call.kernel(kernel).run().unwrap().ids)
        };
        assert_eq!(of(GroupScore::Sum), [2, 3, 4], "{kernel}");
        assert_eq!(of(GroupScore::Max), [0, 2, 3], "{kernel}");
    });
}

#[test]
fn a_capacity_keeps_the_first_tokens_of_an_expert() {
    on_every_kernel(|device, kernel| {
        let logits = tensor(&[2.0, 1.0, 0.0, 2.0, 0.0, 1.0, 2.0, 1.0, 0.0], &[3, 3], device);
        let route = MoeRoute::new(&logits, 2).capacity(1).kernel(kernel).run().unwrap();
        assert_eq!(ints(&route.ids), [0, 1, 0, 2, 0, 1], "{kernel}");
        assert_eq!(ints(&route.counts), [1, 1, 1], "{kernel}");
        assert_eq!(ints(&route.dropped), [2, 1, 0], "{kernel}");
        assert_eq!(ints(&route.order), [0, 1, 3, -1, -1, -1], "{kernel}");
        assert_eq!(ints(&route.positions), [0, 1, -1, 2, -1, -1], "{kernel}");
        let weights = floats(&route.weights);
        assert!(weights[2] == 0.0 && weights[4] == 0.0 && weights[5] == 0.0, "{kernel} {weights:?}");
        // Normalised before anything is dropped.
        assert!((weights[3] - 0.268_941_4).abs() < 1e-6, "{kernel} {weights:?}");
    });
}

#[test]
fn without_tokens_all_counts_are_zero() {
    on_every_kernel(|device, kernel| {
        let logits = Tensor::zeros(&[2, 0, 7], DType::BF16, device).unwrap();
        let route = MoeRoute::new(&logits, 3).kernel(kernel).run().unwrap();
        assert_eq!((ints(&route.counts), ints(&route.dropped)), (vec![0; 7], vec![0; 7]), "{kernel}");
        assert_eq!(route.order.shape(), [2, 0, 3]);
    });
}

/// Experts are drawn with the noise alone where logits are equal: evenly, differently for each token and seed.
#[test]
fn noise_is_a_function_of_seed_token_and_expert() {
    let (tokens, experts) = (20_000, 5);
    let mut known: Option<Vec<i32>> = None;
    on_every_kernel(|device, kernel| {
        let logits = Tensor::zeros(&[tokens, experts], DType::F32, device).unwrap();
        let of = |seed: i64| MoeRoute::new(&logits, 1).noise(1.0, seed).kernel(kernel).run().unwrap();
        let (one, other) = (of(1), of(2));
        for count in ints(&one.counts) {
            let expected = tokens as f64 / experts as f64;
            assert!((f64::from(count) - expected).abs() < 4.0 * (expected * 0.8).sqrt(), "{kernel} {count}");
        }
        assert_eq!(ints(&one.ids), ints(&of(1).ids), "{kernel}");
        let same = ints(&one.ids).iter().zip(ints(&other.ids)).filter(|(a, b)| *a == b).count();
        assert!((same as f64 / tokens as f64 - 0.2).abs() < 0.02, "{kernel} {same}");
        assert!(floats(&one.weights).iter().all(|&w| w == 1.0));
    });
    // The same on every kernel.
    for device in devices() {
        for kernel in kernels_on(&Forward, device) {
            let logits = Tensor::zeros(&[100, experts], DType::F32, device).unwrap();
            let ids = ints(&MoeRoute::new(&logits, 2).noise(0.5, -9).kernel(kernel.name).run().unwrap().ids);
            assert_eq!(*known.get_or_insert(ids.clone()), ids, "{}", kernel.name);
        }
    }
}

#[test]
fn noise_is_normally_distributed() {
    use crate::ops::sample::arithmetic::Noise;
    let noise = Noise::new(3, 4);
    let count = 200_000;
    let draws: Vec<f64> =
        (0..count).map(|i| f64::from(arithmetic::with_noise(0.0, 1.0, noise.bits(i)))).collect();
    let mean_of = |f: &dyn Fn(f64) -> f64| draws.iter().map(|&x| f(x)).sum::<f64>() / f64::from(count);
    let near = |found: f64, expected: f64, deviation: f64| {
        let allowed = 4.0 * deviation / f64::from(count).sqrt();
        assert!((found - expected).abs() < allowed, "{found}, expected {expected}");
    };
    near(mean_of(&|x| x), 0.0, 1.0);
    near(mean_of(&|x| x * x), 1.0, 2f64.sqrt());
    near(mean_of(&|x| x * x * x), 0.0, 15f64.sqrt());
    near(mean_of(&|x| x.powi(4)), 3.0, 96f64.sqrt());
    for (bound, share) in [(-2.0, 0.022_750_1), (-1.0, 0.158_655_3), (0.0, 0.5), (1.5, 0.933_192_8)] {
        near(mean_of(&|x| f64::from(x < bound)), share, (share * (1.0 - share)).sqrt());
    }
}

#[test]
fn options_without_a_meaning_are_refused() {
    let logits = tensor(&[0.0; 12], &[2, 6], Device::Cpu);
    let call = |top_k: usize| MoeRoute::new(&logits, top_k);
    for (call, expected) in [
        (call(0), "`top_k`: expected a whole number from 1 to experts=6, got 0"),
        (call(7), "`top_k`: expected a whole number from 1 to experts=6, got 7"),
        (
            call(2).groups(0, 0, GroupScore::Sum),
            "`groups`: expected a whole number from 1 to experts=6, got 0",
        ),
        (call(2).groups(4, 2, GroupScore::Sum), "`groups`: expected a number that divides experts=6, got 4"),
        (
            call(2).groups(3, 4, GroupScore::Sum),
            "`top_groups`: expected a whole number from 0 to groups=3, got 4",
        ),
        (
            call(3).groups(3, 1, GroupScore::Max),
            "`top_groups`: expected groups that have top_k=3 experts, of 2 each, got 1",
        ),
        (call(2).noise(-1.0, 0), "`noise`: expected a finite number that is not negative, got -1"),
        (call(2).noise(f32::NAN, 0), "`noise`: expected a finite number that is not negative, got NaN"),
        (call(2).scale(f32::INFINITY), "`scale`: expected a finite number, got inf"),
        (call(2).capacity(1 << 40), "`capacity`: expected a whole number from 0 to 2147483647"),
    ] {
        let error = call.run().unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    for experts in [0, MOST_EXPERTS + 1] {
        let logits = Tensor::zeros(&[1, experts], DType::F32, Device::Cpu).unwrap();
        let error = MoeRoute::new(&logits, 1).run().unwrap_err().to_string();
        assert!(error.contains("`logits`: expected from 1 to 1024 experts, got [1,"), "{error}");
    }
    let most = i32::MAX as usize;
    assert!(check_slots("moe_route", most / 8, 8, &[]).is_ok());
    for (tokens, top_k) in [(most / 8 + 1, 8), (usize::MAX, 2), (most + 1, 0)] {
        let error = check_slots("moe_route", tokens, top_k, &[]).unwrap_err().to_string();
        assert!(error.contains("`logits`: expected at most 2147483647 slots"), "{error}");
    }
}

#[test]
fn ids_that_are_no_experts_are_refused_before_anything_is_written() {
    let logits = tensor(&[0.0; 6], &[2, 3], Device::Cpu);
    let ones = tensor(&[1.0; 4], &[2, 2], Device::Cpu);
    let stream = Device::Cpu.default_stream().unwrap();
    for wrong in [3, -1, i32::MIN] {
        let ids = Tensor::from_slice(&[0i32, 1, 2, wrong], &[2, 2], Device::Cpu).unwrap();
        let mut dlogits = tensor(&[7.0; 6], &[2, 3], Device::Cpu);
        let call = MoeRouteBackward::new(&logits, &ids, &ones, &ones);
        let error = call.run_into(&mut dlogits, &stream).unwrap_err().to_string();
        let expected = format!("`ids`: expected from 0 to below experts=3, got {wrong} in slot 1 of token 1");
        assert!(error.contains(&expected), "{error}");
        assert_eq!(floats(&dlogits), [7.0; 6]);
    }
}

/// The gradient is the slope of the forward call, for all scores.
#[test]
fn gradients_are_slopes() {
    let (tokens, experts, top_k) = (3, 6, 3);
    let logits = floats(&Tensor::randn(&[tokens, experts], DType::F32, Device::Cpu, 5).unwrap());
    let dweights = floats(&Tensor::randn(&[tokens, top_k], DType::F32, Device::Cpu, 6).unwrap());
    for score in [RouteScore::Softmax, RouteScore::Sigmoid] {
        for normalize in [false, true] {
            let route = |logits: &[f32]| {
                let logits = tensor(logits, &[tokens, experts], Device::Cpu);
                let call = MoeRoute::new(&logits, top_k).score(score).normalize(normalize).scale(1.5);
                call.capacity(2).run().unwrap()
            };
            let value = |logits: &[f32]| -> f64 {
                let weights = floats(&route(logits).weights);
                weights.iter().zip(&dweights).map(|(w, d)| f64::from(*w) * f64::from(*d)).sum()
            };
            let at = route(&logits);
            let (x, d) = (
                tensor(&logits, &[tokens, experts], Device::Cpu),
                tensor(&dweights, &[tokens, top_k], Device::Cpu),
            );
            let call = MoeRouteBackward::new(&x, &at.ids, &at.weights, &d).score(score).normalize(normalize);
            let found = floats(&call.scale(1.5).run().unwrap());
            for i in 0..logits.len() {
                let moved = |by: f32| {
                    let mut logits = logits.clone();
                    logits[i] += by;
                    value(&logits)
                };
                let slope = (moved(1e-2) - moved(-1e-2)) / 2e-2;
                assert!((slope - f64::from(found[i])).abs() < 1e-3, "{score:?} {i}: {slope} {}", found[i]);
            }
        }
    }
}
