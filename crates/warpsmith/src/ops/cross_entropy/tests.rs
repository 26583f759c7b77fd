//! What the cases cannot say: exact values, and calls that are refused.

use super::*;
use crate::{Device, Error, Tensor};

fn tensor(values: &[f32], shape: &[usize]) -> Tensor {
    Tensor::from_slice(values, shape, Device::Cpu).unwrap()
}

fn targets(values: &[i64]) -> Tensor {
    Tensor::from_slice(values, &[values.len()], Device::Cpu).unwrap()
}

fn value(loss: &Tensor) -> f32 {
    loss.to_vec::<f32>().unwrap()[0]
}

#[test]
fn targets_that_are_no_columns_are_refused_before_anything_is_written() {
    let logits = tensor(&[0.0; 6], &[2, 3]);
    let stream = Device::Cpu.default_stream().unwrap();
    for wrong in [3, -1, -100, i64::MIN] {
        let targets = targets(&[0, wrong]);
        let mut loss = tensor(&[7.0], &[]);
        let call = CrossEntropy::new(&logits, &targets).ignore_index(5);
        let error = call.run_into(&mut loss, &stream).unwrap_err();
        assert!(matches!(error, Error::Argument { .. }));
        let (text, got) = (error.to_string(), format!("got {wrong} at 1"));
        assert!(text.contains("`targets`: expected ignore_index=5 or from 0 to below vocab=3"), "{text}");
        assert!(text.ends_with(&got) && value(&loss) == 7.0, "{text}");
    }
}

#[test]
fn options_without_a_meaning_are_refused() {
    let (logits, targets) = (tensor(&[0.0; 6], &[2, 3]), targets(&[0, 1]));
    let call = || CrossEntropy::new(&logits, &targets);
    for (call, expected) in [
        (call().softcap(-1.0), "`softcap`: expected a finite number that is not negative, got -1"),
        (call().softcap(f32::INFINITY), "`softcap`: expected a finite number"),
        (call().label_smoothing(1.5), "`label_smoothing`: expected a number from 0 to 1, got 1.5"),
        (call().label_smoothing(f32::NAN), "`label_smoothing`: expected a number from 0 to 1, got NaN"),
        (call().z_loss(-0.5), "`z_loss`: expected a finite number that is not negative"),
    ] {
        let error = call.run().unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    let empty = tensor(&[], &[0, 0]);
    let error = CrossEntropy::new(&empty, &super::tests::targets(&[])).run().unwrap_err().to_string();
    assert!(error.contains("`logits`: expected a vocab from 1 to 2147483647"), "{error}");
}

#[test]
fn without_rows_that_count_the_mean_is_no_number_and_the_gradient_zero() {
    let (logits, ignored) = (tensor(&[f32::NAN; 6], &[2, 3]), targets(&[-100, -100]));
    for tier in Tier::available() {
        let call = || CrossEntropy::new(&logits, &ignored).kernel(format!("cross_entropy_{tier}"));
        assert!(value(&call().run().unwrap()).is_nan());
        assert_eq!(value(&call().reduction(Reduction::Sum).run().unwrap()), 0.0);
        let (_, lse, count) = call().run_for_gradient().unwrap();
        assert_eq!((lse.to_vec::<f32>().unwrap(), value(&count)), (vec![0.0, 0.0], 0.0));
        let dloss = tensor(&[1.0], &[]);
        let dlogits = CrossEntropyBackward::new(&logits, &ignored, &lse, &count, &dloss);
        assert_eq!(dlogits.run().unwrap().to_vec::<f32>().unwrap(), [0.0; 6]);
    }
    let none = tensor(&[], &[0, 3]);
    assert_eq!(value(&CrossEntropy::new(&none, &targets(&[])).reduction(Reduction::Sum).run().unwrap()), 0.0);
}

#[test]
fn infinities_give_what_the_formula_gives() {
    let inf = f32::INFINITY;
    let rows = [[-inf, 0.0, 0.0], [0.0, -inf, 0.0], [-inf; 3], [inf, 0.0, 0.0], [f32::NAN, 0.0, 0.0]];
    let (logits, targets) = (tensor(rows.as_flattened(), &[5, 3]), targets(&[1; 5]));
    for tier in Tier::available() {
        let call = || {
            let call = CrossEntropy::new(&logits, &targets).reduction(Reduction::None);
            call.kernel(format!("cross_entropy_{tier}"))
        };
        let losses = call().run().unwrap().to_vec::<f32>().unwrap();
        assert!((losses[0] - 2f32.ln()).abs() < 1e-6 && losses[1] == inf, "{losses:?}");
        assert!(losses[2..].iter().all(|loss| loss.is_nan()), "{losses:?}");
        let smooth = call().label_smoothing(0.1).run().unwrap().to_vec::<f32>().unwrap();
        assert!(smooth[..2] == [inf; 2] && smooth[2..].iter().all(|loss| loss.is_nan()), "{smooth:?}");
    }
}

/// Losses near zero keep their digits where the logits are large.
#[test]
fn large_logits_cost_no_digits() {
    let (logits, targets) = (tensor(&[1e6, 1e6 - 8.0, 1e6 - 16.0], &[1, 3]), targets(&[0]));
    let want = ((-8f64).exp() + (-16f64).exp()).ln_1p();
    for tier in Tier::available() {
        let loss =
            CrossEntropy::new(&logits, &targets).kernel(format!("cross_entropy_{tier}")).run().unwrap();
        assert!((f64::from(value(&loss)) - want).abs() < 2e-7, "{tier} {loss:?} {want}");
    }
}

/// Any shape of rows, and lists of options: the result is that of one row after the other.
#[test]
fn rows_may_have_any_shape() {
    let logits = Tensor::randn(&[2, 3, 7], DType::F32, Device::Cpu, 1).unwrap();
    let of = |shape: &[usize]| Tensor::from_slice(&[0i32, 6, 2, 3, 4, 1], shape, Device::Cpu).unwrap();
    let by_row = CrossEntropy::new(&logits, &of(&[2, 3])).reduction(Reduction::None).run().unwrap();
    assert_eq!(by_row.shape(), [2, 3]);
    let losses = by_row.to_vec::<f32>().unwrap();
    let mean = CrossEntropy::new(&logits, &of(&[2, 3])).run().unwrap();
    assert!((value(&mean) - losses.iter().sum::<f32>() / 6.0).abs() < 1e-6 && mean.shape().is_empty());
    let error = CrossEntropy::new(&logits, &of(&[6])).run().unwrap_err().to_string();
    assert!(error.contains("`targets`: expected shape [2, 3]"), "{error}");
}
