//! Which probabilities dropout drops, beside the definition in `cpu/attention/dropout.rs`.

use super::*;
use crate::cpu::attention::Dropout;

/// Keys, as many as a head has elements.
const KEYS: usize = 64;

/// A number for each key that a query of a head sees: where values are unit vectors and all scores are equal, results are the
/// weights.
fn weights(out: &[f64], token: usize, head: usize) -> &[f64] {
    &out[(token * HEADS + head) * KEYS..][..KEYS]
}

/// Queries of zeros, keys of zeros and values that are unit vectors, over the tokens of these requests.
fn unit(dtype: DType, batch: usize, q_len: usize, kv_len: usize, lens: &[usize]) -> [Tensor; 3] {
    let zeros = |len, heads| Tensor::zeros(&[batch, len, heads, KEYS], dtype, Device::Cpu).unwrap();
    let places = lens.iter().flat_map(|&len| 0..len);
    let values: Vec<f64> = places
        .flat_map(|place| (0..KV_HEADS * KEYS).map(move |i| f64::from(u8::from(i % KEYS == place))))
        .collect();
    let v = Tensor::from_f64(&values, &[batch, kv_len, KV_HEADS, KEYS], dtype, Device::Cpu).unwrap();
    [zeros(q_len, HEADS), zeros(kv_len, KV_HEADS), v]
}

fn starts(numbers: &[i32]) -> Tensor {
    Tensor::from_slice(numbers, &[numbers.len()], Device::Cpu).unwrap()
}

#[test]
fn weights_are_those_of_the_definition_in_any_call() {
    let (p, seed) = (0.3, 0xfedc_ba98_7654_3210);
    let dropout = Dropout::new(p, seed as i64, 5).unwrap();
    let check = |out: &[f64], dtype: DType, token: usize, request: usize, query: usize, kv_len: usize| {
        for head in 0..HEADS {
            let head_dropout = dropout.of_head(request, head);
            for (key, &weight) in weights(out, token, head).iter().enumerate().take(kv_len) {
                let full = f64::from(dropout.factor()) / kv_len as f64;
                let expected = if head_dropout.keeps(query, key) { full } else { 0.0 };
                assert!((weight - expected).abs() < 1e-2 * full, "{dtype} {query} {key}: {weight}");
            }
        }
    };
    for_kernels(|kernel, dtype| {
        // Few queries and many have different strategies.
        for q_len in [1, 70] {
            let [q, k, v] = unit(dtype, 2, q_len, KEYS, &[KEYS, KEYS]);
            let out = Attention::new(&q, &k, &v).dropout(p, seed).offset(5).kernel(kernel).run().unwrap();
            let out = out.to_f64().unwrap();
            for token in 0..2 * q_len {
                check(&out, dtype, token, token / q_len, token % q_len, KEYS);
            }
        }
        // The second of three packed requests is the second of a batch, whatever is beside it.
        let [q, k, v] = unit(dtype, 1, 90, 100, &[17, 63, 20]);
        let (q_starts, kv_starts) = (starts(&[0, 5, 75, 90]), starts(&[0, 17, 80, 100]));
        let call = Attention::new(&q, &k, &v).starts(&q_starts, &kv_starts);
        let out = call.dropout(p, seed).offset(5).kernel(kernel).run().unwrap();
        let out = out.to_f64().unwrap();
        for (request, (queries, kv_len)) in [(0..5, 17), (5..75, 63), (75..90, 20)].into_iter().enumerate() {
            for token in queries.clone() {
                check(&out, dtype, token, request, token - queries.start, kv_len);
            }
        }
    });
}

#[test]
fn gradients_of_values_are_the_weights_of_the_forward_call() {
    for (forward, _) in KERNELS.iter().zip(Tier::available()) {
        let kernel: &'static str = match *forward {
            "attention_portable" => "attention_backward_portable",
            "attention_avx2" => "attention_backward_avx2",
            _ => "attention_backward_avx512",
        };
        for dtype in FLOATS {
            let [q, k, v] = unit(dtype, 2, KEYS, KEYS, &[KEYS, KEYS]);
            let call = Attention::new(&q, &k, &v).dropout(0.5, 3).kernel(*forward);
            let (out, lse) = call.run_with_lse().unwrap();
            // Query i's gradient is unit vector i, so element i of the gradient of value j is the weight of j for i, of both heads.
            let unit = |i: usize| f64::from(u8::from(i % KEYS == i / (HEADS * KEYS) % KEYS));
            let dout: Vec<f64> = (0..2 * KEYS * HEADS * KEYS).map(unit).collect();
            let dout = Tensor::from_f64(&dout, q.shape(), dtype, Device::Cpu).unwrap();
            let call = crate::ops::AttentionBackward::new(&q, &k, &v, &out, &lse, &dout);
            let (_, _, dv) = call.dropout(0.5, 3).kernel(kernel).run().unwrap();
            let (dv, out) = (dv.to_f64().unwrap(), out.to_f64().unwrap());
            for at in 0..dv.len() {
                let (i, kv_head, j, batch) = (
                    at % KEYS,
                    at / KEYS % KV_HEADS,
                    at / (KEYS * KV_HEADS) % KEYS,
                    at / (KEYS * KV_HEADS * KEYS),
                );
                let group = HEADS / KV_HEADS;
                let heads = kv_head * group..(kv_head + 1) * group;
                let sum: f64 = heads.map(|head| out[((batch * KEYS + i) * HEADS + head) * KEYS + j]).sum();
                assert!(
                    (dv[at] - sum).abs() < 1e-3,
                    "{kernel} {dtype} {batch} {kv_head} {i} {j}: {}, {sum}",
                    dv[at]
                );
            }
        }
    }
}

#[test]
fn none_has_the_bits_of_a_call_without() {
    for_kernels(|kernel, dtype| {
        let Tensors { q, k, v } = tensors(dtype, 40, 70);
        let plain = rows(Attention::new(&q, &k, &v).kernel(kernel).run_with_lse().unwrap());
        let none = Attention::new(&q, &k, &v).dropout(0.0, 9).offset(1).kernel(kernel);
        assert!(rows(none.run_with_lse().unwrap()) == plain, "{kernel} {dtype}");
        // What is dropped still counts in the sums of exponentials.
        let (_, lse) = Attention::new(&q, &k, &v).kernel(kernel).run_with_lse().unwrap();
        let dropped = Attention::new(&q, &k, &v).dropout(0.5, 9).kernel(kernel);
        let (_, with) = dropped.run_with_lse().unwrap();
        assert!(lse.view().to_bytes().unwrap() == with.view().to_bytes().unwrap(), "{kernel} {dtype}");
    });
}

#[test]
fn other_probabilities_are_refused() {
    let Tensors { q, k, v } = tensors(DType::F32, 2, 3);
    for p in [-0.1, 1.0, 1.5, f64::NAN, f64::INFINITY] {
        let error = Attention::new(&q, &k, &v).dropout(p, 1).run().unwrap_err();
        let Error::Argument { op, arg, expected, .. } = &error else { panic!("{error}") };
        assert_eq!((*op, &arg[..], &expected[..]), ("attention", "dropout", "a number from 0 to below 1"));
    }
}
