//! What the cases cannot say: the parts that the op is made of, and calls that are refused.

use super::*;
use crate::ops::{RmsNorm, Rope};
use crate::{Device, Tensor};

fn randn(shape: &[usize], seed: u64) -> Tensor {
    Tensor::randn(shape, DType::F32, Device::Cpu, seed).unwrap()
}

fn values(tensor: &Tensor) -> Vec<f32> {
    tensor.to_vec::<f32>().unwrap()
}

/// More dimensions of tokens than one, and every kind of heads as the norm and the rotation alone leave them.
#[test]
fn it_is_the_norm_and_then_the_rotation() {
    let (q, k, w, v) = (randn(&[2, 3, 4, 64], 0), randn(&[2, 3, 1, 64], 1), randn(&[64], 2), randn(&[64], 3));
    let positions = Tensor::from_slice(&[0i64, 7, 900, 3, 1, 2], &[2, 3], Device::Cpu).unwrap();
    let parts = |x: &Tensor, weight: &Tensor| {
        let normed = RmsNorm::new(x).weight(weight).eps(1e-5).run().unwrap();
        values(&Rope::new(&normed, &positions).theta(1e6).rotary_dim(32).run().unwrap())
    };
    for tier in Tier::available() {
        let call = QkNormRope::new(&q, &k, &w, &v, &positions).eps(1e-5).theta(1e6).rotary_dim(32);
        let (q_out, k_out) = call.kernel(format!("qk_norm_rope_{tier}")).run().unwrap();
        assert_eq!((q_out.shape(), k_out.shape()), (q.shape(), k.shape()));
        for (found, expected) in [(&q_out, parts(&q, &w)), (&k_out, parts(&k, &v))] {
            let most = values(found).iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(most < 2e-6, "{tier}: {most}");
        }
    }
}

#[test]
fn calls_without_a_meaning_are_refused() {
    let (q, k, w) = (randn(&[3, 4, 64], 0), randn(&[3, 1, 64], 1), randn(&[64], 2));
    let positions = Tensor::from_slice(&[0i64, 1, 2], &[3], Device::Cpu).unwrap();
    let refused = |call: QkNormRope<'_>, expected: &str| {
        let error = call.run().unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    };
    let call = || QkNormRope::new(&q, &k, &w, &w, &positions);
    refused(call().eps(-1.0), "`eps`: expected a finite number, zero or more, got -1");
    refused(call().rotary_dim(65), "`rotary_dim`: expected an even number up to head_dim=64");
    refused(call().theta(0.0), "`theta`: expected a finite number above zero");
    let table = randn(&[2, 32], 3);
    refused(
        call().tables(&table, &table),
        "`positions`: expected positions from 0 to below max_pos=2, got 2",
    );
    let longer = randn(&[3, 1, 32], 4);
    refused(QkNormRope::new(&q, &longer, &w, &w, &positions), "`k`: expected shape");
    let narrow = Tensor::randn(&[64], DType::BF16, Device::Cpu, 5).unwrap();
    refused(QkNormRope::new(&q, &k, &narrow, &narrow, &positions), "`q_weight`");
}
