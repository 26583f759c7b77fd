//! What the cases cannot say: counts and indices that are refused, and rows that do not depend on others.

use super::*;
use crate::ops::Linear;
use crate::{Device, Error, Tensor};

fn randn(shape: &[usize], seed: u64) -> Tensor {
    Tensor::randn(shape, DType::F32, Device::Cpu, seed).unwrap()
}

fn numbers(numbers: &[i32]) -> Tensor {
    Tensor::from_slice(numbers, &[numbers.len()], Device::Cpu).unwrap()
}

fn bits(tensor: &Tensor) -> Vec<u32> {
    tensor.to_vec::<f32>().unwrap().into_iter().map(f32::to_bits).collect()
}

#[test]
fn wrong_counts_and_indices_are_refused_before_anything_is_written() {
    let (x, w, mut out) = (randn(&[5, 8], 0), randn(&[3, 4, 8], 1), randn(&[4, 4], 2));
    let before = bits(&out);
    let stream = Device::Cpu.default_stream().unwrap();
    let good = ([1, 0, 3], [0, 4, -1, 2]);
    for (counts, index, argument) in [
        ([1, -1, 2], good.1, "`counts`: expected 0 or more, got -1 at 1"),
        ([1, 2, 2], good.1, "`counts`: expected at most rows=4 in all, got 5 up to group 2"),
        ([i32::MAX; 3], good.1, "`counts`: expected at most rows=4 in all"),
        (good.0, [0, 1, 5, 0], "`index`: expected -1 or rows from 0 to below x_rows=5, got 5 at 2"),
        (good.0, [0, 1, 0, -2], "`index`: expected -1 or rows from 0 to below x_rows=5, got -2 at 3"),
    ] {
        let (counts, index) = (numbers(&counts), numbers(&index));
        let call = GroupedLinear::new(&x, &w, &counts).gather(&index);
        let error = call.run_into(&mut out, &stream).unwrap_err();
        assert!(matches!(error, Error::Argument { .. }));
        assert!(error.to_string().contains(argument), "{error}");
        assert_eq!(bits(&out), before);
    }
}

/// The matrix or the bias of a group.
fn part(tensor: &Tensor, group: usize) -> TensorView<'_> {
    tensor.view().narrow(0, group, 1).unwrap().reshape(&tensor.shape()[1..]).unwrap()
}

/// Each group is a call of `linear`, with and without index, whatever the other groups are.
#[test]
fn a_group_is_a_product_of_its_own() {
    let (x, w, bias) = (randn(&[70, 40], 0), randn(&[4, 2 * 24, 40], 1), randn(&[4, 2 * 24], 2));
    let index: Vec<i32> = (0..70).map(|i| (i * 37 + 5) % 70).collect();
    let gathered: Vec<f32> = {
        let x = x.to_vec::<f32>().unwrap();
        index.iter().flat_map(|&i| x[i as usize * 40..][..40].to_vec()).collect()
    };
    let gathered = Tensor::from_slice(&gathered, &[70, 40], Device::Cpu).unwrap();
    for counts in [[0, 70, 0, 0], [1, 40, 7, 12], [0, 0, 0, 3]] {
        let rows = numbers(&counts);
        let call = GroupedLinear::new(&x, &w, &rows).gated(Gate::Halves, Activation::Silu).bias(&bias);
        let out = bits(&call.gather(&numbers(&index)).run().unwrap());
        let mut first = 0;
        for (group, &count) in counts.iter().enumerate() {
            let count = count as usize;
            let x = gathered.view().narrow(0, first, count).unwrap();
            let call = Linear::new(x, part(&w, group))
                .gated(Gate::Halves, Activation::Silu)
                .bias(part(&bias, group));
            assert_eq!(bits(&call.run().unwrap()), out[first * 24..][..count * 24], "{counts:?} {group}");
            first += count;
        }
        assert!(out[first * 24..].iter().all(|&bits| bits == 0));
    }
}
