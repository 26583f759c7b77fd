//! What the cases cannot show: that a row has the same bits however it is called, and how bad starts and blocks are
//! handled.

mod bits;
mod dropout;
mod starts;

use super::problem::{BLOCKS_Q, Problem};
use super::{Attention, Forward};
use crate::cpu::gemm::Isa;
use crate::cpu::{Tier, with_threads};
use crate::op::{Args, Attrs, Op};
use crate::ops::FLOATS;
use crate::{DType, Device, Error, Tensor, TensorView};

const KERNELS: [&str; 3] = ["attention_portable", "attention_avx2", "attention_avx512"];

/// Two query heads to a KV head.
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const DIM: usize = 64;

struct Tensors {
    q: Tensor,
    k: Tensor,
    v: Tensor,
}

impl Tensors {
    fn random([batch, q_len, kv_len]: [usize; 3], dim: usize, dtype: DType, device: Device) -> Tensors {
        let random =
            |len, heads, seed| Tensor::randn(&[batch, len, heads, dim], dtype, device, seed).unwrap();
        Tensors { q: random(q_len, HEADS, 0), k: random(kv_len, KV_HEADS, 1), v: random(kv_len, KV_HEADS, 2) }
    }
}

fn tensors(dtype: DType, q_len: usize, kv_len: usize) -> Tensors {
    Tensors::random([1, q_len, kv_len], DIM, dtype, Device::Cpu)
}

/// Some tokens of a tensor.
fn cut(tensor: &Tensor, tokens: std::ops::Range<usize>) -> TensorView<'_> {
    tensor.view().narrow(1, tokens.start, tokens.len()).unwrap()
}

/// Calls `test` with each kernel of the CPU that runs here and each type.
fn for_kernels(test: impl Fn(&'static str, DType)) {
    for (kernel, _) in KERNELS.iter().zip(Tier::available()) {
        FLOATS.iter().for_each(|dtype| test(kernel, *dtype));
    }
}

/// The bits of every query: of its heads' results, and of the logarithms of their sums.
fn rows((out, lse): (Tensor, Tensor)) -> Vec<Vec<u8>> {
    let &[batch, len, heads, dim] = out.shape() else { panic!("four dimensions") };
    assert_eq!(lse.shape(), [batch, heads, len]);
    let width = heads * dim * out.dtype().size();
    let (out, lse) = (out.view().to_bytes().unwrap(), lse.view().to_bytes().unwrap());
    let row = |token: usize| {
        let sums = (0..heads).map(|head| (token / len * heads + head) * len + token % len);
        let sums = sums.flat_map(|at| lse[at * size_of::<f32>()..][..size_of::<f32>()].to_vec());
        out[token * width..][..width].iter().copied().chain(sums).collect()
    };
    (0..batch * len).map(row).collect()
}

fn causal<'a>(kernel: &'static str, q: TensorView<'a>, k: TensorView<'a>, v: TensorView<'a>) -> Vec<Vec<u8>> {
    rows(Attention::new(q, k, v).causal().kernel(kernel).run_with_lse().unwrap())
}

#[test]
fn segments_have_the_same_bits_on_any_number_of_threads() {
    for_kernels(|kernel, dtype| {
        let Tensors { q, k, v } = tensors(dtype, 3, 5000);
        let alone = with_threads(1, || causal(kernel, q.view(), k.view(), v.view()));
        for threads in [2, 7, 64] {
            let many = with_threads(threads, || causal(kernel, q.view(), k.view(), v.view()));
            assert!(many == alone, "{kernel} {dtype} with {threads} threads");
        }
        // As the last rows of a call with so many queries that nothing is split.
        let padding = Tensor::randn(&[1, 400, HEADS, DIM], dtype, Device::Cpu, 9).unwrap();
        let both = [padding.view().to_bytes().unwrap(), q.view().to_bytes().unwrap()].concat();
        let long = Tensor::from_bytes(&both, &[1, 403, HEADS, DIM], dtype, Device::Cpu).unwrap();
        let rows = causal(kernel, long.view(), k.view(), v.view());
        assert!(rows.ends_with(&alone), "{kernel} {dtype} behind other queries");
    });
}

/// `q`, `k` and `v` of some tokens, each with `heads` heads, as f32.
fn numbers(len: usize, heads: [usize; 3], dim: usize) -> [Vec<f32>; 3] {
    [0, 1, 2].map(|i| {
        let shape = [1, len, heads[i], dim];
        let random = Tensor::randn(&shape, DType::F32, Device::Cpu, i as u64).unwrap();
        random.to_f64().unwrap().into_iter().map(|x| x as f32).collect()
    })
}

/// Causal attention of the queries `from..len` over all keys, as bits.
fn bits_of(
    kernel: &'static str,
    tensors: &[Vec<f32>; 3],
    heads: [usize; 3],
    dim: usize,
    from: usize,
) -> Vec<u32> {
    let bytes = bytes_of(kernel, DType::F32, tensors, heads, dim, from);
    bytes.chunks(4).map(|b| u32::from_ne_bytes(b.try_into().unwrap())).collect()
}

/// The same of any type, as bytes.
fn bytes_of(
    kernel: &'static str,
    dtype: DType,
    tensors: &[Vec<f32>; 3],
    heads: [usize; 3],
    dim: usize,
    from: usize,
) -> Vec<u8> {
    let [q, k, v] = [0, 1, 2].map(|i| {
        let first = if i == 0 { from * heads[0] * dim } else { 0 };
        let data: Vec<f64> = tensors[i][first..].iter().copied().map(f64::from).collect();
        let shape = [1, data.len() / (heads[i] * dim), heads[i], dim];
        Tensor::from_f64(&data, &shape, dtype, Device::Cpu).unwrap()
    });
    Attention::new(&q, &k, &v).causal().kernel(kernel).run().unwrap().view().to_bytes().unwrap()
}

/// Replaces element `i` of a token of `q`, `k` or `v`.
type Change = (usize, fn(usize, f32) -> f32);

/// Numbers that tiles cannot multiply, in single elements and in whole heads.
const CHANGES: [Change; 12] = [
    (0, |i, x| if i == 3 { f32::NAN } else { x }),
    (0, |_, x| x * 1e30),
    (0, |_, x| x * 1e-30),
    (1, |i, x| if i == 7 { f32::NAN } else { x }),
    (1, |i, x| if i == 7 { f32::INFINITY } else { x }),
    (1, |_, x| x * 1e30),
    (1, |_, x| x * 1e-38),
    (1, |_, x| x * 0.0),
    (2, |i, x| if i == 5 { f32::NAN } else { x }),
    (2, |i, x| if i == 40 { f32::NEG_INFINITY } else { x }),
    (2, |_, x| x * 1e35),
    (2, |_, x| x * 1e-35),
];

#[test]
fn odd_numbers_reach_the_rows_that_see_them_alone() {
    let (heads, dim, len, odd) = ([HEADS, KV_HEADS, KV_HEADS], DIM, 200, 70);
    for (kernel, _) in KERNELS.iter().zip(Tier::available()) {
        let clean = numbers(len, heads, dim);
        let before = bits_of(kernel, &clean, heads, dim, 0);
        for (number, (tensor, change)) in CHANGES.iter().enumerate() {
            let mut changed = clean.clone();
            let token = odd * heads[*tensor] * dim;
            for (i, x) in changed[*tensor][token..][..dim].iter_mut().enumerate() {
                *x = change(i, *x);
            }
            let name = format!("{kernel}, change {number}");
            let bits = bits_of(kernel, &changed, heads, dim, 0);
            // Values that are not finite may reach rows of other tiers that do not see them.
            if *tensor != 2 || Isa::of_tier(Tier::Avx512).has_tiles() && kernel.ends_with("avx512") {
                let row = HEADS * dim;
                assert!(bits[..odd * row] == before[..odd * row], "{name}: rows before");
            }
            // The same rows one by one, as single tokens, have the same bits.
            for row in [odd, odd + 1, len - 1] {
                let alone = changed.clone().map(|mut x| {
                    x.truncate(x.len() / len * (row + 1));
                    x
                });
                let alone = bits_of(kernel, &alone, heads, dim, row);
                assert!(alone == bits[row * HEADS * dim..][..HEADS * dim], "{name}: row {row} alone");
            }
            // And they are what the formula says, as another tier computes it.
            let expected = bits_of("attention_portable", &changed, heads, dim, 0);
            for (i, (&a, &b)) in bits.iter().zip(&expected).enumerate().skip(odd * HEADS * dim) {
                let (a, b) = (f32::from_bits(a), f32::from_bits(b));
                let close = (a - b).abs() <= 1e-5 * (1.0 + b.abs());
                assert!(a == b || a.is_nan() && b.is_nan() || close, "{name}: {a} and {b} at {i}");
            }
        }
    }
}

#[test]
fn tiny_and_huge_values_are_as_precise_as_others() {
    let (heads, dim, len) = ([HEADS, KV_HEADS, KV_HEADS], DIM, 150);
    for (kernel, _) in KERNELS.iter().zip(Tier::available()) {
        for (queries, values) in [(1.0, 1e-33), (1e-25, 1e30), (1e-35, 1.0), (1e15, 1e-20), (1.0, 1e36)] {
            let mut tensors = numbers(len, heads, dim);
            tensors[0].iter_mut().for_each(|x| *x *= queries);
            tensors[1].iter_mut().for_each(|x| *x /= queries);
            tensors[2].iter_mut().for_each(|x| *x *= values);
            let expected = bits_of("attention_portable", &tensors, heads, dim, 0);
            for (a, b) in bits_of(kernel, &tensors, heads, dim, 0).iter().zip(&expected) {
                let (a, b) = (f32::from_bits(*a), f32::from_bits(*b));
                assert!((a - b).abs() <= 1e-5 * values, "{kernel}, {queries} and {values}: {a} and {b}");
            }
        }
    }
}

#[test]
fn single_tokens_have_the_bits_of_prompts_whatever_the_heads() {
    let len = 140;
    for_kernels(|kernel, dtype| {
        for (dim, group) in [(32, 1), (80, 4), (96, 3), (128, 4), (160, 16), (256, 2)] {
            let heads = [2 * group, 2, 2];
            let tensors = numbers(len, heads, dim);
            let whole = bytes_of(kernel, dtype, &tensors, heads, dim, 0);
            for from in [len - 1, len - 2, len - 9] {
                let part = bytes_of(kernel, dtype, &tensors, heads, dim, from);
                let row = heads[0] * dim * dtype.size();
                assert!(part == whole[from * row..], "{kernel} {dtype}: {group} heads of {dim}, {from}..");
            }
        }
    });
}

#[test]
fn sizes_that_no_kernel_has_are_named() {
    let message = |q: &[usize], k: &[usize]| {
        let zeros = |shape| Tensor::zeros(shape, DType::F32, Device::Cpu).unwrap();
        Attention::new(&zeros(q), &zeros(k), &zeros(k)).run().unwrap_err().to_string()
    };
    let error = message(&[1, 2, 4, 48], &[1, 2, 4, 48]);
    assert!(error.contains("32, 64, 80, 96, 128, 160, 192, 256") && error.contains("48"), "{error}");
    let error = message(&[1, 2, 4, 64], &[1, 2, 3, 64]);
    assert!(error.contains("`k`") && error.contains("num_heads=4") && error.contains('3'), "{error}");
}

/// The checked call of some queries and keys with these options.
pub(super) fn problem(q_len: usize, kv_len: usize, options: &[(usize, f64)]) -> crate::Result<Problem> {
    let Tensors { q, k, v } = tensors(DType::BF16, q_len, kv_len);
    let mut out = Tensor::zeros(q.shape(), DType::BF16, Device::Cpu).unwrap();
    let args = Args::new(const { &Forward::SPEC })
        .input(super::Q, q.view())
        .input(super::K, k.view())
        .input(super::V, v.view())
        .output(super::OUT, out.view_mut());
    let defaults = Attrs::defaults(&Forward::SPEC);
    let attrs = options.iter().fold(defaults, |attrs, &(index, value)| attrs.with_number(index, value));
    Forward::check(&args, &attrs)
}

#[test]
fn rows_of_a_block_do_not_change_bits() {
    for_kernels(|kernel, dtype| {
        let Tensors { q, k, v } = tensors(dtype, 300, 1100);
        let run = |block_q: usize, block_kv: usize| {
            let call = Attention::new(&q, &k, &v).causal().blocks(block_q, block_kv).kernel(kernel);
            call.run().unwrap().view().to_bytes().unwrap()
        };
        let chosen = run(0, 0);
        for block_q in BLOCKS_Q {
            assert!(run(block_q, 0) == chosen, "{kernel} {dtype}: {block_q} rows");
        }
        assert!(run(0, 128) == chosen && run(0, 32) != chosen, "{kernel} {dtype}: keys");
    });
}

#[test]
fn blocks_that_no_kernel_has_are_named() {
    for (index, name, known) in [
        (super::BLOCK_Q, "block_q", "16, 64, 128, 192, 256"),
        (super::BLOCK_KV, "block_kv", "32, 64, 80, 96, 128"),
    ] {
        for bad in [-1.0, 1.0, 100.0, 512.0] {
            let error = problem(5, 5, &[(index, bad)]).unwrap_err();
            assert!(matches!(error, Error::Argument { ref arg, .. } if arg == name), "{error}");
            let message = error.to_string();
            let parts = ["attention", known, &format!("got {bad}")];
            assert!(parts.iter().all(|part| message.contains(part)), "{message}");
        }
    }
}

#[test]
fn a_kernel_without_the_blocks_says_so() {
    let zeros = |heads| Tensor::zeros(&[1, 2, heads, 64], DType::F32, Device::Cpu).unwrap();
    let (q, k) = (zeros(20), zeros(1));
    let error = Attention::new(&q, &k, &k).blocks(16, 0).run().unwrap_err();
    let Error::Unsupported { refusals, .. } = &error else { panic!("{error}") };
    let refused = refusals.iter().filter(|(_, why)| why.contains("20 heads") && why.contains("16 rows"));
    assert_eq!(refused.count(), Tier::available().len(), "{error}");
    Attention::new(&q, &k, &k).blocks(64, 96).run().unwrap();
}

#[test]
fn only_pairs_that_see_each_other_are_counted() {
    let flops = |q_len: usize, kv_len: usize, causal: bool, window: f64| {
        let options = [(super::CAUSAL, causal.into()), (super::WINDOW, window)];
        Forward::cost(&problem(q_len, kv_len, &options).unwrap()).flops / (4 * HEADS * DIM) as f64
    };
    assert_eq!(flops(5, 7, false, 0.0), 35.0);
    assert_eq!(flops(5, 7, true, 0.0), (3 + 4 + 5 + 6 + 7) as f64);
    assert_eq!(flops(4, 4, true, 1.0), (1 + 2 + 2 + 2) as f64);
    assert_eq!(flops(7, 5, true, 0.0), (1 + 2 + 3 + 4 + 5) as f64);
}

/// A scale of zero is not the default: all keys weigh the same, and those that are hidden nothing.
#[test]
fn a_scale_of_zero_is_zero() {
    for kernel in KERNELS {
        let t = tensors(DType::F32, 3, 5);
        let call = || Attention::new(&t.q, &t.k, &t.v).kernel(kernel);
        let out = match call().scale(0.0).causal().run() {
            Ok(out) => out.to_vec::<f32>().unwrap(),
            Err(Error::Unsupported { .. }) => continue,
            Err(error) => panic!("{error}"),
        };
        let v = t.v.to_vec::<f32>().unwrap();
        for (at, &got) in out.iter().enumerate() {
            let (query, head, d) = (at / (HEADS * DIM), at / DIM % HEADS, at % DIM);
            let seen = query + 3;
            let column = |key: usize| v[(key * KV_HEADS + head * KV_HEADS / HEADS) * DIM + d];
            let mean = (0..seen).map(column).sum::<f32>() / seen as f32;
            assert!((got - mean).abs() < 1e-5, "{kernel}: query {query}: expected {mean}, got {got}");
        }
        let usual = call().run().unwrap().to_vec::<f32>().unwrap();
        let given = call().scale(1.0 / (DIM as f32).sqrt()).run().unwrap().to_vec::<f32>().unwrap();
        assert_eq!(usual, given, "{kernel}");
    }
}
