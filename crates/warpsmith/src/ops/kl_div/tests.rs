//! What the cases cannot say: exact values, infinities, and calls that are refused.

use super::*;
use crate::{Device, Tensor};

fn tensor(values: &[f32], shape: &[usize]) -> Tensor {
    Tensor::from_slice(values, shape, Device::Cpu).unwrap()
}

fn targets(values: &[i64]) -> Tensor {
    Tensor::from_slice(values, &[values.len()], Device::Cpu).unwrap()
}

fn values(tensor: &Tensor) -> Vec<f32> {
    tensor.to_vec::<f32>().unwrap()
}

#[test]
fn options_without_a_meaning_are_refused() {
    let logits = tensor(&[0.0; 6], &[2, 3]);
    for temperature in [0.0, -1.0, f32::NAN, f32::INFINITY, 1e-45, f32::MAX] {
        let error = KlDiv::new(&logits, &logits).temperature(temperature).run().unwrap_err().to_string();
        assert!(error.contains("kl_div: argument `temperature`: expected a number from"), "{error}");
        assert!(error.ends_with(&format!("got {temperature}")), "{error}");
    }
    let empty = tensor(&[], &[0, 0]);
    let error = KlDiv::new(&empty, &empty).run().unwrap_err().to_string();
    assert!(error.contains("`student`: expected a vocab from 1 to 2147483647"), "{error}");
    let wider = tensor(&[0.0; 8], &[2, 4]);
    let error = KlDiv::new(&logits, &wider).run().unwrap_err().to_string();
    assert!(error.contains("`teacher`: expected shape [2, vocab=3], got [2, 4]"), "{error}");
}

/// Any target but the one of ignored rows counts, whether it is a column or not.
#[test]
fn targets_only_say_which_rows_count() {
    let student = Tensor::randn(&[3, 40], DType::F32, Device::Cpu, 1).unwrap();
    let teacher = Tensor::randn(&[3, 40], DType::F32, Device::Cpu, 2).unwrap();
    let by_row = KlDiv::new(&student, &teacher).reduction(Reduction::None).run().unwrap();
    let losses = values(&by_row);
    assert!(losses.iter().all(|&loss| loss > 0.1));
    let some = targets(&[-100, i64::MAX, -5]);
    let (loss, kept) = KlDiv::new(&student, &teacher).targets(&some).run_for_gradient().unwrap();
    assert!((values(&loss)[0] - (losses[1] + losses[2]) / 2.0).abs() < 1e-6);
    assert_eq!(values(&kept.row_losses), [0.0, losses[1], losses[2]]);
    assert_eq!((values(&kept.count), values(&kept.lse)[0]), (vec![2.0], 0.0));
}

#[test]
fn without_rows_that_count_the_mean_is_no_number_and_the_gradient_zero() {
    let (logits, ignored) = (tensor(&[f32::NAN; 6], &[2, 3]), targets(&[-100, -100]));
    for tier in Tier::available() {
        let call = || {
            let call = KlDiv::new(&logits, &logits).targets(&ignored);
            call.kernel(format!("kl_div_{tier}"))
        };
        assert!(values(&call().run().unwrap())[0].is_nan());
        assert_eq!(values(&call().reduction(Reduction::Sum).run().unwrap()), [0.0]);
        let (_, kept) = call().run_for_gradient().unwrap();
        assert_eq!((values(&kept.lse), values(&kept.count)), (vec![0.0, 0.0], vec![0.0]));
        let dloss = tensor(&[1.0], &[]);
        let gradient = KlDivBackward::new(&logits, &logits, &kept, &dloss).targets(&ignored);
        assert_eq!(values(&gradient.run().unwrap()), [0.0; 6]);
    }
    let none = tensor(&[], &[0, 3]);
    assert_eq!(values(&KlDiv::new(&none, &none).reduction(Reduction::Sum).run().unwrap()), [0.0]);
}

/// Columns that one distribution, the other or both lack, as where a vocabulary is padded; in several pieces, and in rows whose
/// first pieces lack everything.
#[test]
fn infinities_give_what_the_formula_gives() {
    let inf = f32::INFINITY;
    const V: usize = 5000;
    let row = |fill: f32, changes: &[(usize, f32)]| {
        let mut row = vec![fill; V];
        changes.iter().for_each(|&(at, value)| row[at] = value);
        row
    };
    let two = |at: usize| [(at, 0.0), (V - 1, 3f32.ln())];
    // Of the distribution that weighs, of the other, and the loss.
    let same = row(-inf, &two(4000));
    let quarter = 0.25 * 0.25f32.ln() + 0.75 * 0.75f32.ln();
    let pairs: Vec<(Vec<f32>, Vec<f32>, f32)> = vec![
        (same.clone(), same.clone(), 0.0),
        (same.clone(), row(0.0, &[]), quarter + (V as f32).ln()),
        (row(0.0, &[]), same.clone(), inf),
        (row(-inf, &two(4001)), same.clone(), inf),
        // Far below: no weight in f32, and yet not nothing.
        (row(-inf, &[(3, -500.0), (7, 0.0)]), row(-inf, &[(7, 0.0)]), inf),
        (row(-inf, &[(7, 0.0)]), row(-inf, &[(3, -500.0), (7, 0.0)]), 0.0),
        (row(-inf, &[]), same.clone(), f32::NAN),
        (same.clone(), row(-inf, &[]), f32::NAN),
        (row(0.0, &[(4321, f32::NAN)]), same.clone(), f32::NAN),
        (row(0.0, &[(4321, inf)]), row(0.0, &[]), f32::NAN),
        (row(0.0, &[]), row(0.0, &[(1, f32::NAN)]), f32::NAN),
    ];
    type Row = (Vec<f32>, Vec<f32>, f32);
    let rows = |of: fn(&Row) -> &Vec<f32>| {
        let all: Vec<f32> = pairs.iter().flat_map(|pair| of(pair).clone()).collect();
        tensor(&all, &[pairs.len(), V])
    };
    let (first, second) = (rows(|pair| &pair.0), rows(|pair| &pair.1));
    let dloss = tensor(&vec![1.0; pairs.len()], &[pairs.len()]);
    for device in crate::ops::devices() {
        let on = |tensor: &Tensor| tensor.to_device(device).unwrap();
        let (first, second, dloss) = (on(&first), on(&second), on(&dloss));
        let kernels: Vec<String> = match device {
            Device::Cpu => Tier::available().iter().map(|tier| tier.to_string()).collect(),
            _ => vec!["generic".into()],
        };
        for (kernel, direction) in kernels
            .iter()
            .flat_map(|kernel| [Direction::Forward, Direction::Reverse].map(|direction| (kernel, direction)))
        {
            let (student, teacher) =
                if direction == Direction::Forward { (&second, &first) } else { (&first, &second) };
            let call = KlDiv::new(student, teacher).reduction(Reduction::None).direction(direction);
            let (loss, kept) = call.kernel(format!("kl_div_{kernel}")).run_for_gradient().unwrap();
            let losses = values(&loss);
            for (row, (loss, (_, _, want))) in losses.iter().zip(&pairs).enumerate() {
                let agrees = loss == want || (loss - want).abs() < 1e-5 || (loss.is_nan() && want.is_nan());
                assert!(agrees, "{kernel} {direction:?} row {row}: {loss} instead of {want}");
            }
            let call = KlDivBackward::new(student, teacher, &kept, &dloss).direction(direction);
            let call = call.reduction(Reduction::None).kernel(format!("kl_div_backward_{kernel}"));
            let gradient = values(&call.run().unwrap());
            for (row, (gradient, (_, _, want))) in gradient.chunks(V).zip(&pairs).enumerate() {
                let no_number = want.is_nan() || (*want == inf && direction == Direction::Reverse);
                let all = gradient.iter().all(|d| d.is_nan() == no_number);
                assert!(all, "{kernel} {direction:?} row {row}");
                let sum: f64 = gradient.iter().map(|&d| f64::from(d)).sum();
                assert!(no_number || sum.abs() < 1e-4, "{kernel} {direction:?} row {row} sums to {sum}");
            }
        }
    }
}

/// Losses keep their digits where the logits are large.
#[test]
fn large_logits_cost_no_digits() {
    let near = [0.0f64, -1.0, -2.0];
    let far = [0.0f64, -1.5, -2.0];
    let logs = |x: &[f64]| {
        let lse = x.iter().map(|x| x.exp()).sum::<f64>().ln();
        x.iter().map(|x| x - lse).collect::<Vec<_>>()
    };
    let want: f64 = logs(&near).iter().zip(logs(&far)).map(|(p, q)| p.exp() * (p - q)).sum();
    let at = |x: &[f64], offset: f64| {
        let x: Vec<f32> = x.iter().map(|x| (x + offset) as f32).collect();
        tensor(&x, &[1, 3])
    };
    let (teacher, student) = (at(&near, 1e6), at(&far, -2e6));
    for tier in Tier::available() {
        let loss = KlDiv::new(&student, &teacher).kernel(format!("kl_div_{tier}")).run().unwrap();
        assert!((f64::from(values(&loss)[0]) - want).abs() < 2e-7, "{tier} {loss:?} {want}");
    }
}

/// Any shape of rows: the result is that of one row after the other. In place, the student's logits become their gradient.
#[test]
fn rows_may_have_any_shape_and_gradients_their_place() {
    let student = Tensor::randn(&[2, 3, 7], DType::F32, Device::Cpu, 1).unwrap();
    let teacher = Tensor::randn(&[2, 3, 7], DType::F32, Device::Cpu, 2).unwrap();
    let call = || KlDiv::new(&student, &teacher).temperature(2.0).direction(Direction::Reverse);
    let by_row = call().reduction(Reduction::None).run().unwrap();
    assert_eq!(by_row.shape(), [2, 3]);
    let (mean, kept) = call().run_for_gradient().unwrap();
    assert!((values(&mean)[0] - values(&by_row).iter().sum::<f32>() / 6.0).abs() < 1e-6);
    assert!(mean.shape().is_empty() && kept.lse.shape() == [2, 3]);
    let dloss = tensor(&[2.0], &[]);
    let gradient = KlDivBackward::new(&student, &teacher, &kept, &dloss);
    let gradient = gradient.temperature(2.0).direction(Direction::Reverse).run().unwrap();
    let mut own = student.to_device(Device::Cpu).unwrap();
    let stream = Device::Cpu.default_stream().unwrap();
    let call = KlDivBackward::in_place(&teacher, &kept, &dloss).temperature(2.0);
    call.direction(Direction::Reverse).run_in_place(&mut own, &stream).unwrap();
    assert_eq!(values(&own), values(&gradient));
}
