use super::*;
use crate::device::{Device, Stream};
use crate::error::Error;
use crate::lab::proof::kernels_on;
use crate::ops::devices;
use crate::tensor::{DType, Tensor};

/// Every bit pattern, quiet and signalling NaN among them.
fn patterns(shape: &[usize], dtype: DType, device: Device) -> Tensor {
    let count = shape.iter().product::<usize>() * dtype.size();
    let bytes: Vec<u8> = (0..count).map(|i| (i * 151 + i / 256 * 7 + i / 65536) as u8).collect();
    Tensor::from_bytes(&bytes, shape, dtype, device).unwrap()
}

/// Every order of dimensions of `x` to every order of dimensions of `out`.
#[test]
fn every_bit_arrives_from_any_order_in_any_order() {
    let orders: [[usize; 3]; 4] = [[0, 1, 2], [2, 1, 0], [0, 2, 1], [1, 2, 0]];
    for device in devices() {
        for kernel in kernels_on(&Forward, device) {
            for dtype in [DType::U8, DType::BF16, DType::F32, DType::I64] {
                for from in orders {
                    for to in orders {
                        let x = patterns(&[5, 67, 130], dtype, device);
                        let x = x.view().permute(&from).unwrap();
                        let shape = x.shape().to_vec();
                        let mut inverse = [0; 3];
                        to.iter().enumerate().for_each(|(at, &dim)| inverse[dim] = at);
                        let mut memory = Tensor::zeros(&to.map(|d| shape[d]), dtype, device).unwrap();
                        let out = memory.view_mut().permute(&inverse).unwrap();
                        let stream = device.default_stream().unwrap();
                        Copy::new(x).kernel(kernel.name).run_into(out, &stream).unwrap();
                        let out = memory.view().permute(&inverse).unwrap();
                        let what = format!("{} {dtype} {from:?} {to:?}", kernel.name);
                        assert_eq!(out.to_bytes().unwrap(), x.to_bytes().unwrap(), "{what}");
                    }
                }
            }
        }
    }
}

#[test]
fn each_layout_is_copied_in_its_best_parts() {
    let part = |shape: &[usize], from: &[usize], order: u8| {
        let x = Tensor::zeros(shape, DType::F32, Device::Cpu).unwrap();
        let x = x.view().permute(from).unwrap();
        let mut to = x.shape().to_vec();
        if order == 1 {
            to.reverse();
        }
        let mut out = Tensor::zeros(&to, DType::F32, Device::Cpu).unwrap();
        let args = Args::new(const { &Forward::SPEC }).input(X, x).output(OUT, out.view_mut());
        let attrs = Attrs::defaults(&Forward::SPEC).with(ORDER, crate::op::Value::Choice(order));
        let p = check(&args, &attrs).unwrap();
        (p.part, p.starts.len(), p.lines, p.len)
    };
    assert_eq!(part(&[4, 6, 8], &[0, 1, 2], 0), (Part::Runs, 1, 1, 192));
    assert_eq!(part(&[4, 6, 8], &[1, 0, 2], 0), (Part::Runs, 24, 1, 8));
    assert_eq!(part(&[6, 8], &[1, 0], 0), (Part::Planes, 1, 8, 6));
    assert_eq!(part(&[6, 8], &[0, 1], 1), (Part::Planes, 1, 8, 6));
    assert_eq!(part(&[6, 8], &[1, 0], 1), (Part::Runs, 1, 1, 48));
    assert_eq!(part(&[1, 1], &[0, 1], 0).1, 1);
}

#[test]
fn columns_of_a_larger_tensor_are_written_alone() {
    for device in devices() {
        let x = Tensor::from_slice(&[1i32, 2, 3], &[3], device).unwrap();
        let mut out = Tensor::zeros(&[3, 4], DType::I32, device).unwrap();
        for j in 0..4 {
            let column = out.view_mut().narrow(1, j, 1).unwrap();
            let stream = device.default_stream().unwrap();
            Copy::new(x.view().reshape(&[3, 1]).unwrap()).run_into(column, &stream).unwrap();
        }
        assert_eq!(out.to_vec::<i32>().unwrap(), [1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]);
    }
}

#[test]
fn parts_are_joined_along_any_dimension() {
    for device in devices() {
        let a = Tensor::from_slice(&[1i64, 2, 3, 4], &[2, 2], device).unwrap();
        let b = Tensor::from_slice(&[5i64, 6], &[2, 1], device).unwrap();
        let joined = concat(&[a.view(), b.view(), a.view()], 1).unwrap();
        assert_eq!(joined.shape(), [2, 5]);
        assert_eq!(joined.to_vec::<i64>().unwrap(), [1, 2, 5, 1, 2, 3, 4, 6, 3, 4]);
        let joined = concat(&[a.view(), b.view().permute(&[1, 0]).unwrap()], 0).unwrap();
        assert_eq!(joined.to_vec::<i64>().unwrap(), [1, 2, 3, 4, 5, 6]);
    }
}

#[test]
fn parts_that_do_not_fit_are_refused_and_nothing_is_written() {
    let tensor = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, Device::Cpu).unwrap();
    let (a, b) = (tensor(&[2, 2], DType::F32), tensor(&[3, 2], DType::F32));
    let refused = |result: Result<Tensor>, arg: &str| {
        assert!(matches!(result, Err(Error::Argument { arg: blamed, .. }) if blamed == arg));
    };
    refused(concat(&[], 0), "parts");
    refused(concat(&[a.view()], 2), "dim");
    refused(concat(&[a.view(), b.view()], 1), "x");
    refused(concat(&[a.view(), tensor(&[2], DType::F32).view()], 0), "x");
    refused(concat(&[a.view(), tensor(&[2, 2], DType::F16).view()], 0), "x");
    let mut out = Tensor::from_slice(&[7f32; 8], &[4, 2], Device::Cpu).unwrap();
    assert!(concat_into(&[a.view(), b.view()], 0, &mut out, &Stream::Host).is_err());
    assert_eq!(out.to_vec::<f32>().unwrap(), [7.0; 8]);
}
