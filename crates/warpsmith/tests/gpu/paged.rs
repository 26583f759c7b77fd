//! Attention over a paged cache.

use crate::common::gpu;
use warpsmith::cuda::{Graph, Stream};
use warpsmith::ops::PagedAttention;
use warpsmith::{DType, Device, Tensor};

crate::harness::tests! {
    a_captured_decode_follows_lengths_that_change;
}

fn a_captured_decode_follows_lengths_that_change() {
    let Some(gpu) = gpu() else { return };
    // Blocks enough for the lengths to decide whether requests are cut.
    const REQUESTS: usize = 40;
    const LONGEST: usize = 5000;
    const PAGE: usize = 16;
    let [heads, kv_heads, dim, pages] = [32, 8, 64, 700];
    let each = LONGEST.div_ceil(PAGE);
    let random = |shape: &[usize], seed| Tensor::randn(shape, DType::BF16, Device::Cuda(0), seed).unwrap();
    let q = random(&[REQUESTS, heads, dim], 1);
    let [k, v] = [2, 3].map(|seed| random(&[pages, PAGE, kv_heads, dim], seed));
    let table: Vec<i32> = (0..REQUESTS * each).map(|i| (i * 37 % pages) as i32).collect();
    let table = Tensor::from_slice(&table, &[REQUESTS, each], Device::Cuda(0)).unwrap();
    let mut lens = Tensor::from_slice(&[1; REQUESTS], &[REQUESTS], Device::Cuda(0)).unwrap();
    let mut out = random(&[REQUESTS, heads, dim], 4);
    let cuda_stream = Stream::new(gpu.ctx).unwrap();
    let stream = warpsmith::Stream::Cuda(cuda_stream.clone());
    PagedAttention::new(&q, &k, &v, &table, &lens).run_into(&mut out, &stream).unwrap();
    let graph = Graph::capture(&cuda_stream, |_| {
        PagedAttention::new(&q, &k, &v, &table, &lens).run_into(&mut out, &stream)
    });
    let exec = graph.unwrap().instantiate().unwrap();
    let lengths: [fn(usize) -> i32; 5] = [
        |_| LONGEST as i32,
        |r| if r == 7 { LONGEST as i32 } else { 3 },
        |r| (r * 129 % (LONGEST + 1)) as i32,
        |_| 0,
        |_| 1000,
    ];
    for length in lengths {
        let new: Vec<i32> = (0..REQUESTS).map(length).collect();
        lens.write(0, &new, &stream).unwrap();
        exec.launch(&cuda_stream).unwrap();
        cuda_stream.synchronize().unwrap();
        let rows = out.to_f64().unwrap();
        for (r, row) in rows.chunks(heads * dim).enumerate() {
            let [q, table, lens] = [&q, &table, &lens].map(|tensor| tensor.view().narrow(0, r, 1).unwrap());
            let alone = PagedAttention::new(q, &k, &v, table, lens).run().unwrap();
            assert!(alone.to_f64().unwrap() == row, "request {r} of {} keys", new[r]);
        }
    }
    gpu.ctx.check().unwrap();
}
