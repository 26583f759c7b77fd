use super::*;
use crate::device::{Device, Stream};
use crate::error::Error;
use crate::lab::proof::kernels_on;
use crate::ops::devices;
use crate::tensor::Tensor;

#[test]
fn ids_out_of_range_are_refused_on_the_cpu_before_anything_is_written() {
    let weight = Tensor::zeros(&[4, 2], DType::F32, Device::Cpu).unwrap();
    for ids in [[0i64, 4, 1], [0, 1, -1], [i64::MIN, 0, 0], [0, 0, i64::MAX]] {
        let ids = Tensor::from_slice(&ids, &[3], Device::Cpu).unwrap();
        let mut out = Tensor::from_slice(&[7f32; 6], &[3, 2], Device::Cpu).unwrap();
        let error = Embedding::new(&weight, &ids).run_into(&mut out, &Stream::Host).unwrap_err();
        assert!(matches!(error, Error::Argument { ref arg, .. } if arg == "ids"), "{error}");
        assert_eq!(out.to_vec::<f32>().unwrap(), [7.0; 6]);
        let mut dweight = Tensor::from_slice(&[7f32; 8], &[4, 2], Device::Cpu).unwrap();
        let error = EmbeddingBackward::new(&ids, &out, 4).run_into(&mut dweight, &Stream::Host).unwrap_err();
        assert!(matches!(error, Error::Argument { ref arg, .. } if arg == "ids"), "{error}");
        assert_eq!(dweight.to_vec::<f32>().unwrap(), [7.0; 8]);
    }
}

#[test]
fn ids_out_of_range_give_zeros_on_a_gpu_and_add_nothing() {
    for device in devices().into_iter().filter(|device| *device != Device::Cpu) {
        let weight = Tensor::from_slice(&[1f32, 2.0, 3.0, 4.0], &[2, 2], device).unwrap();
        let ids = Tensor::from_slice(&[1i32, 2, -1, 0, i32::MIN, 40], &[6], device).unwrap();
        let out = Embedding::new(&weight, &ids).run().unwrap();
        let rows = [3.0, 4.0, 0.0, 0.0, 0.0, 0.0, 1.0, 2.0, 0.0, 0.0, 0.0, 0.0];
        assert_eq!(out.to_vec::<f32>().unwrap(), rows);
        let dout = Tensor::from_slice(&[1f32; 12], &[6, 2], device).unwrap();
        let dweight = EmbeddingBackward::new(&ids, &dout, 2).run().unwrap();
        assert_eq!(dweight.to_vec::<f32>().unwrap(), [1.0; 4]);
    }
}

/// Additions are in the order of the ids: any other order would round these otherwise.
#[test]
fn gradients_are_added_in_the_order_of_the_ids() {
    let values = [1e8f32, 1.0, -1e8, 3.0, 1e-8];
    let expected = values.iter().fold(0f32, |sum, x| sum + x);
    assert_ne!(expected, values.iter().rev().fold(0f32, |sum, x| sum + x));
    for device in devices() {
        let ids = Tensor::from_slice(&[2i64, 2, 0, 2, 2, 0, 2], &[7], device).unwrap();
        let [a, b, c, d, e] = values;
        let dout = Tensor::from_slice(&[a, b, 5.0, c, d, 6.0, e], &[7, 1], device).unwrap();
        for kernel in kernels_on(&Backward, device) {
            let dweight = EmbeddingBackward::new(&ids, &dout, 4).kernel(kernel.name).run().unwrap();
            assert_eq!(dweight.to_vec::<f32>().unwrap(), [11.0, 0.0, expected, 0.0], "{}", kernel.name);
        }
    }
}
