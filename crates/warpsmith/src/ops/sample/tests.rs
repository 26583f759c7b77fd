use super::*;
use crate::device::Device;
use crate::lab::proof::kernels_on;
use crate::ops::devices;

fn one<T: crate::tensor::Element>(value: T, rows: usize, device: Device) -> Tensor {
    Tensor::from_slice(&vec![value; rows], &[rows], device).unwrap()
}

/// How often each token is drawn, by position.
fn draws(logits: &[f32], count: usize, parameters: [f32; 3], top_k: i32) -> Vec<f64> {
    let [temperature, top_p, min_p] = parameters;
    let mut times = vec![0.0; logits.len()];
    let rows = Tensor::from_slice(&logits.repeat(count), &[count, logits.len()], Device::Cpu).unwrap();
    let positions: Vec<i64> = (0..count as i64).collect();
    let positions = Tensor::from_slice(&positions, &[count], Device::Cpu).unwrap();
    let (seed, temperature) = (one(11i64, count, Device::Cpu), one(temperature, count, Device::Cpu));
    let (top_p, min_p) = (one(top_p, count, Device::Cpu), one(min_p, count, Device::Cpu));
    let top_k = one(top_k, count, Device::Cpu);
    let call = Sample::new(&rows, &seed, &positions).temperature(&temperature).top_k(&top_k);
    let (tokens, _) = call.top_p(&top_p).min_p(&min_p).run().unwrap();
    tokens.to_vec::<i32>().unwrap().iter().for_each(|&token| times[token as usize] += 1.0 / count as f64);
    times
}

fn softmax(logits: &[f32], temperature: f64, stays: impl Fn(usize) -> bool) -> Vec<f64> {
    let e = |(j, l): (usize, &f32)| if stays(j) { (f64::from(*l) / temperature).exp() } else { 0.0 };
    let weights: Vec<f64> = logits.iter().enumerate().map(e).collect();
    let sum: f64 = weights.iter().sum();
    weights.iter().map(|w| w / sum).collect()
}

/// Shares of draws are the probabilities, within four standard deviations.
#[test]
fn tokens_are_drawn_with_their_probabilities() {
    let logits = [0.3f32, 2.0, -1.0, 1.9, f32::NAN, 0.0, -6.0, 1.0];
    let number = |j: usize| !logits[j].is_nan();
    let count = 40_000;
    let judge = |times: Vec<f64>, expected: Vec<f64>, what: &str| {
        for (j, (got, want)) in times.iter().zip(&expected).enumerate() {
            let deviation = (want * (1.0 - want) / count as f64).sqrt();
            assert!(
                (got - want).abs() <= 4.0 * deviation + 1e-9,
                "{what}: token {j}: {got}, expected {want}"
            );
        }
    };
    judge(draws(&logits, count, [1.0, 1.0, 0.0], 0), softmax(&logits, 1.0, number), "plain");
    judge(draws(&logits, count, [0.5, 1.0, 0.0], 0), softmax(&logits, 0.5, number), "temperature");
    let three = |j: usize| [1, 3, 7].contains(&j);
    judge(draws(&logits, count, [1.0, 1.0, 0.0], 3), softmax(&logits, 1.0, three), "top_k");
    // 0.379 + 0.343 < 0.8 <= 0.379 + 0.343 + 0.139.
    judge(draws(&logits, count, [1.0, 0.8, 0.0], 0), softmax(&logits, 1.0, three), "top_p");
    judge(draws(&logits, count, [1.0, 1.0, 0.3], 0), softmax(&logits, 1.0, three), "min_p");
    let first = |j: usize| j == 1;
    judge(draws(&logits, count, [1.0, 0.0, 0.0], 0), softmax(&logits, 1.0, first), "top_p of nothing");
}

/// A seed gives the same token in any row, in any batch, with any kernel.
#[test]
fn a_row_is_drawn_by_itself_alone() {
    let (rows, vocab) = (37, 1500);
    for device in devices() {
        let logits = Tensor::randn(&[rows, vocab], DType::BF16, device, 3).unwrap();
        let same = Tensor::randn(&[1, vocab], DType::BF16, device, 4).unwrap();
        let (seed, position, p) =
            (one(42i64, rows, device), one(9i64, rows, device), one(0.9f32, rows, device));
        let mut expected: Option<Vec<i32>> = None;
        for kernel in kernels_on(&Forward, device) {
            let draw = |logits: TensorView<'_>, rows: usize| {
                let [seed, position, p] =
                    [&seed, &position, &p].map(|t| t.view().narrow(0, 0, rows).unwrap());
                let call = Sample::new(logits, seed, position).top_p(p).kernel(kernel.name);
                call.run().unwrap().0.to_vec::<i32>().unwrap()
            };
            let all = draw(logits.view(), rows);
            for row in 0..rows {
                assert_eq!(
                    draw(logits.view().narrow(0, row, 1).unwrap(), 1),
                    all[row..=row],
                    "{}",
                    kernel.name
                );
            }
            let expected = expected.get_or_insert(all.clone());
            assert_eq!(all, *expected, "{}", kernel.name);
            let one = draw(same.view(), 1);
            assert!(one[0] >= 0 && (one[0] as usize) < vocab);
        }
    }
}

#[test]
fn rows_without_numbers_fail_alone() {
    let (inf, nan) = (f32::INFINITY, f32::NAN);
    let rows = [[nan, nan, nan], [1.0, nan, 0.0], [-inf, -inf, nan], [-inf, 3.0, inf]];
    for device in devices() {
        let logits = Tensor::from_slice(rows.as_flattened(), &[4, 3], device).unwrap();
        for kernel in kernels_on(&Forward, device) {
            let (zero, cold) = (one(0i64, 4, device), one(0f32, 4, device));
            let call = Sample::new(&logits, &zero, &zero).temperature(&cold).kernel(kernel.name);
            let (token, logprob) = call.run().unwrap();
            assert_eq!(token.to_vec::<i32>().unwrap(), [-1, 0, -1, 2], "{}", kernel.name);
            let logprob = logprob.to_vec::<f32>().unwrap();
            assert!(logprob[0].is_nan() && logprob[2].is_nan() && logprob[3] == 0.0, "{logprob:?}");
            assert!((logprob[1] + 0.313_261_7).abs() < 1e-5, "{logprob:?}");
        }
    }
}

#[test]
fn a_vocabulary_beyond_the_columns_is_refused() {
    let logits = Tensor::zeros(&[2, 5], DType::F32, Device::Cpu).unwrap();
    let zero = one(0i64, 2, Device::Cpu);
    let error = Sample::new(&logits, &zero, &zero).vocab(6).run().map(|_| ()).unwrap_err().to_string();
    assert_eq!(error, "sample: argument `vocab`: expected a whole number from 0 to columns=5, got 6");
}
