//! What the cases cannot say: parts, memory, and calls that are refused.

use super::*;
use crate::ops::{CrossEntropy, Linear};
use crate::{Device, Error, Tensor};

fn value(loss: &Tensor) -> f32 {
    loss.to_vec::<f32>().unwrap()[0]
}

#[test]
fn parts_cover_the_rows_once_and_fit_their_memory() {
    for (vocab, rows) in
        [(1, 1024), (50_257, 1024), (65_537, 896), (128_256, 512), (151_936, 384), (1 << 30, 128)]
    {
        assert_eq!(part_rows(vocab), rows, "{vocab}");
    }
    let x = Tensor::zeros(&[2049, 4], DType::F32, Device::Cpu).unwrap();
    let w = Tensor::zeros(&[9, 4], DType::F32, Device::Cpu).unwrap();
    let targets = Tensor::from_slice(&[0i32; 2049], &[2049], Device::Cpu).unwrap();
    let mut loss = Tensor::zeros(&[], DType::F32, Device::Cpu).unwrap();
    let args = Args::new(&Forward::SPEC).input(X, x.view()).input(W, w.view()).input(TARGETS, targets.view());
    let p = check(&args.output(LOSS, loss.view_mut()), &Attrs::defaults(&Forward::SPEC)).unwrap();
    let parts: Vec<(usize, usize)> = p.parts().map(|part| (part.first, part.rows)).collect();
    assert_eq!(parts, [(0, 1024), (1024, 1024), (2048, 1)]);
    assert_eq!(p.logits_bytes(), 1024 * 64 * 4);
    let none = Problem { rows: 0, ..p };
    assert_eq!(none.parts().collect::<Vec<_>>(), [Part { first: 0, rows: 0 }]);
}

#[test]
fn targets_that_are_no_rows_of_the_head_are_refused() {
    let x = Tensor::zeros(&[2, 3], DType::F32, Device::Cpu).unwrap();
    let w = Tensor::zeros(&[5, 3], DType::F32, Device::Cpu).unwrap();
    for wrong in [5i64, -1] {
        let targets = Tensor::from_slice(&[4, wrong], &[2], Device::Cpu).unwrap();
        let error = LinearCrossEntropy::new(&x, &w, &targets).run().unwrap_err();
        assert!(matches!(error, Error::Argument { .. }));
        let text = error.to_string();
        assert!(
            text.contains("linear_cross_entropy: argument `targets`: expected ignore_index=-100"),
            "{text}"
        );
    }
}

#[test]
fn rows_that_are_not_evenly_spaced_are_refused() {
    let x = Tensor::zeros(&[2, 4, 3], DType::F32, Device::Cpu).unwrap();
    let w = Tensor::zeros(&[5, 3], DType::F32, Device::Cpu).unwrap();
    let targets = Tensor::from_slice(&[0i64; 4], &[2, 2], Device::Cpu).unwrap();
    let some = x.view().narrow(1, 0, 2).unwrap();
    let error = LinearCrossEntropy::new(some, &w, &targets).run().unwrap_err().to_string();
    assert!(error.contains("`x`: expected rows that are the same distance apart"), "{error}");
}

/// In f32 there is nothing that the parts round: the loss and its gradients are those of the two ops.
#[test]
fn it_is_the_loss_of_the_product() {
    let x = Tensor::randn(&[3, 400, 24], DType::F32, Device::Cpu, 0).unwrap();
    let w = Tensor::randn(&[37, 24], DType::F32, Device::Cpu, 1).unwrap();
    let ids: Vec<i64> = (0..1200).map(|i| if i % 5 == 3 { -100 } else { i * 7 % 37 }).collect();
    let targets = Tensor::from_slice(&ids, &[3, 400], Device::Cpu).unwrap();
    let logits = Linear::new(&x, &w).run().unwrap();
    for reduction in [Reduction::Mean, Reduction::Sum] {
        let one = CrossEntropy::new(&logits, &targets).softcap(5.0).reduction(reduction).run().unwrap();
        let call = LinearCrossEntropy::new(&x, &w, &targets).softcap(5.0).reduction(reduction);
        let (loss, count, dx, dw) = call.run_for_gradient().unwrap();
        assert!((value(&loss) - value(&one)).abs() <= 1e-5 * value(&one).abs(), "{loss:?} {one:?}");
        assert_eq!((value(&count), dx.shape(), dw.shape()), (960.0, x.shape(), w.shape()));
    }
}
