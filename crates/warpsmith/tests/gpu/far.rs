//! Elements that signed offsets of 32 bits cannot reach.

use crate::common::{Gpu, gpu};
use crate::harness::skip;
use half::bf16;
use warpsmith::ops::{Attention, KvCopy, KvStore, PagedAttention};
use warpsmith::tensor::Element;
use warpsmith::{DType, Device, Tensor, TensorView};

crate::harness::tests! {
    pages_past_32_bits_are_stored_copied_and_read;
    attention_in_16_bits_reaches_what_is_far;
    attention_in_32_bits_reaches_what_is_far;
}

const DEVICE: Device = Device::Cuda(0);
const REACH: usize = 1 << 31;
const DIM: usize = 128;

/// Whether there is memory for so many elements and some more. If not, the test counts as ignored.
fn has_room(gpu: &Gpu, elements: usize, dtype: DType) -> bool {
    gpu.ctx.trim(0).unwrap();
    let (needed, free) = ((elements * dtype.size()) as u64 + (2 << 30), gpu.ctx.memory().unwrap().free);
    if free < needed {
        skip::<()>(format!("less than {} GB of memory free", needed >> 30));
    }
    free >= needed
}

fn is_hopper(gpu: &Gpu) -> bool {
    gpu.ctx.info().arch() == 90
}

fn random(shape: &[usize], dtype: DType, seed: u64) -> Tensor {
    Tensor::randn(shape, dtype, DEVICE, seed).unwrap()
}

fn bytes(view: TensorView<'_>) -> Vec<u8> {
    view.to_bytes().unwrap()
}

fn pages_past_32_bits_are_stored_copied_and_read() {
    let Some(gpu) = gpu() else { return };
    const PAGE: usize = 16;
    const HEADS: usize = 16;
    const KV_HEADS: usize = 8;
    // More than a span of keys, so that they are divided.
    const KEYS: usize = 1500;
    let each = KEYS.div_ceil(PAGE);
    let page = PAGE * KV_HEADS * DIM;
    let first_far = REACH / page;
    let pages = first_far + each + 2;
    if !has_room(&gpu, 2 * pages * page, DType::BF16) {
        return;
    }
    let cache = || Tensor::zeros(&[pages, PAGE, KV_HEADS, DIM], DType::BF16, DEVICE).unwrap();
    let (mut k_cache, mut v_cache) = (cache(), cache());
    let [k, v] = [1, 2].map(|seed| random(&[KEYS, KV_HEADS, DIM], DType::BF16, seed));
    // The same keys in the first pages and, backwards, in the last.
    let near: Vec<i32> = (0..each as i32).collect();
    let far: Vec<i32> = near.iter().map(|i| pages as i32 - 1 - i).collect();
    for table in [&near, &far] {
        let slot = |key: usize| table[key / PAGE] as i64 * PAGE as i64 + (key % PAGE) as i64;
        let slots = Tensor::from_slice(&(0..KEYS).map(slot).collect::<Vec<i64>>(), &[KEYS], DEVICE).unwrap();
        KvStore::new(&k, &v, &slots).run(&mut k_cache, &mut v_cache).unwrap();
        for (cache, new) in [(&k_cache, &k), (&v_cache, &v)] {
            for (i, &number) in table.iter().enumerate() {
                let count = PAGE.min(KEYS - i * PAGE);
                let stored = cache.view().narrow(0, number as usize, 1).unwrap().narrow(1, 0, count).unwrap();
                let want = new.view().narrow(0, i * PAGE, count).unwrap();
                assert!(bytes(stored) == bytes(want), "kv_store: page {number}");
            }
        }
    }

    // From the last page to one that is near, and from the first to one that is far.
    let moves = [[pages - 1, each], [0, first_far]];
    let pairs: Vec<i64> = moves.as_flattened().iter().map(|&page| page as i64).collect();
    let pairs = Tensor::from_slice(&pairs, &[2, 2], DEVICE).unwrap();
    KvCopy::new(&pairs).run(&mut k_cache).unwrap();
    for [from, to] in moves {
        let [source, copy] = [from, to].map(|page| bytes(k_cache.view().narrow(0, page, 1).unwrap()));
        assert!(source == copy && source.iter().any(|&byte| byte != 0), "kv_copy: {from} to {to}");
    }

    let lens = Tensor::from_slice(&[KEYS as i32], &[1], DEVICE).unwrap();
    for queries in [1, 100] {
        let q = random(&[queries, HEADS, DIM], DType::BF16, 3);
        for kernel in ["paged_attention_sm90", "paged_attention_sm80", "paged_attention_generic"] {
            if kernel.ends_with("sm90") && (queries == 1 || !is_hopper(&gpu)) {
                continue;
            }
            let [near, far] = [&near, &far].map(|table| {
                let table = Tensor::from_slice(table, &[1, each], DEVICE).unwrap();
                let call = PagedAttention::new(&q, &k_cache, &v_cache, &table, &lens).kernel(kernel);
                let (out, lse) = call.run_with_lse().unwrap();
                [out, lse].map(|tensor| bytes(tensor.view()))
            });
            assert!(near == far, "{kernel}: {queries} queries");
        }
    }
    gpu.ctx.check().unwrap();
}

/// Heads of the tensors of `attention`: q, k and v lie beside each other.
const HEADS: usize = 4;
/// Tokens that lie far from each other, and requests that do.
const TOKENS: usize = 384;
const REQUESTS: usize = 24;
/// Elements from one token to the next.
const APART: usize = 5_888_000;
const ALL: usize = TOKENS * APART;

/// The kernels of `attention` for a type, with the queries they are asked.
fn kernels<T: Element>(gpu: &Gpu) -> Vec<(&'static str, usize)> {
    let mut all = match T::DTYPE {
        DType::F32 => {
            vec![("attention_split_generic", 8), ("attention_sm80_f32", 200), ("attention_generic", 200)]
        }
        _ => vec![("attention_split", 8), ("attention_sm80", 200), ("attention_generic", 200)],
    };
    if T::DTYPE != DType::F32 && is_hopper(gpu) {
        all.push(("attention_sm90", 200));
    }
    all
}

/// Writes the rows of `data`, `apart` elements from each other, from element `at` of `memory` on.
fn scatter<T: Element>(memory: &mut Tensor, at: usize, apart: usize, row: usize, data: &[T]) {
    let stream = DEVICE.default_stream().unwrap();
    for (i, row) in data.chunks(row).enumerate() {
        memory.write(at + i * apart, row, &stream).unwrap();
    }
}

/// Asserts that rows have the same bits if no offset of 32 bits reaches the last keys and values.
fn assert_reads_tokens_that_are_far<T: Element>(gpu: &Gpu, memory: &mut Tensor) {
    let shape = [1, TOKENS, HEADS, DIM];
    let near = [1, 2].map(|seed| random(&shape, T::DTYPE, seed));
    for (which, tensor) in near.iter().enumerate() {
        let row = HEADS * DIM;
        scatter(memory, which * row, APART, row, &tensor.to_vec::<T>().unwrap());
    }
    let spread = memory.view().reshape(&[1, TOKENS, APART / DIM, DIM]).unwrap();
    let far = [0, 1].map(|which| spread.narrow(2, which * HEADS, HEADS).unwrap());
    assert!(far[0].layout().strides()[1] as usize * (TOKENS - 10) > REACH);
    for (kernel, queries) in kernels::<T>(gpu) {
        let q = random(&[1, queries, HEADS, DIM], T::DTYPE, 3);
        let run = |[k, v]: [TensorView<'_>; 2]| {
            let out = Attention::new(&q, k, v).causal().kernel(kernel).run().unwrap();
            bytes(out.view())
        };
        assert!(run(far) == run([near[0].view(), near[1].view()]), "{kernel}: tokens that are far");
    }
}

/// Asserts that rows have the same bits if no offset of 32 bits reaches the last request, of its results neither.
fn assert_knows_requests_that_are_far<T: Element>(gpu: &Gpu, memory: &mut Tensor, results: &mut Tensor) {
    const LEN: usize = 200;
    let (row, request) = (HEADS * DIM, ALL / REQUESTS);
    assert!((REQUESTS - 1) * request > REACH);
    let compared = [0, REQUESTS - 1];
    let near: Vec<[Tensor; 3]> = (compared.iter())
        .map(|&r| [0, 1, 2].map(|which| random(&[1, LEN, HEADS, DIM], T::DTYPE, (10 * r + which) as u64)))
        .collect();
    // One after the other in the first tokens of a request.
    for (&r, tensors) in compared.iter().zip(&near) {
        for (which, tensor) in tensors.iter().enumerate() {
            let data = tensor.to_vec::<T>().unwrap();
            scatter(memory, r * request + which * LEN * row, data.len(), data.len(), &data);
        }
    }
    let spread = memory.view().reshape(results.shape()).unwrap();
    let stream = DEVICE.default_stream().unwrap();
    for (kernel, queries) in kernels::<T>(gpu) {
        let [q, k, v] = [0, 1, 2].map(|which| {
            let count = if which == 0 { queries } else { LEN };
            spread.narrow(1, which * LEN, count).unwrap()
        });
        let spread_out = results.view_mut().narrow(1, 0, queries).unwrap();
        Attention::new(q, k, v).causal().kernel(kernel).run_into(spread_out, &stream).unwrap();
        for (&r, [q, k, v]) in compared.iter().zip(&near) {
            let q = q.view().narrow(1, 0, queries).unwrap();
            let want = Attention::new(q, k, v).causal().kernel(kernel).run().unwrap();
            let out = results.view().narrow(0, r, 1).unwrap().narrow(1, 0, queries).unwrap();
            assert!(bytes(out) == bytes(want.view()), "{kernel}: request {r} of {REQUESTS}");
        }
    }
}

fn assert_attention_reaches_what_is_far<T: Element>() {
    let Some(gpu) = gpu() else { return };
    if !has_room(&gpu, 2 * ALL, T::DTYPE) {
        return;
    }
    let zeros = |shape: &[usize]| Tensor::zeros(shape, T::DTYPE, DEVICE).unwrap();
    let mut inputs = zeros(&[ALL]);
    let mut results = zeros(&[REQUESTS, ALL / (REQUESTS * HEADS * DIM), HEADS, DIM]);
    assert_reads_tokens_that_are_far::<T>(&gpu, &mut inputs);
    assert_knows_requests_that_are_far::<T>(&gpu, &mut inputs, &mut results);
    gpu.ctx.check().unwrap();
    drop((inputs, results));
    gpu.ctx.synchronize().unwrap();
    gpu.ctx.trim(0).unwrap();
}

fn attention_in_16_bits_reaches_what_is_far() {
    assert_attention_reaches_what_is_far::<bf16>();
}

fn attention_in_32_bits_reaches_what_is_far() {
    assert_attention_reaches_what_is_far::<f32>();
}
