//! The CUDA driver layer on a real device. Without one, each test says so and passes.
#![cfg(feature = "cuda")]

use std::sync::{Mutex, MutexGuard, PoisonError};
use warpsmith::cuda::{self, Context, DeviceBuffer, Event, Graph, Module, PinnedBuffer, Stream};
use warpsmith::layout::{Layout, Shape};
use warpsmith::ops::{Activation, Attention, Linear, PagedAttention, PrefixMatch, Softmax};
use warpsmith::radix::{Mirror, RadixTree};
use warpsmith::{DType, Device, Error, Result, Tensor, TensorView};

/// Pageable copies are staged in chunks of this size; sizes around it are where they go wrong.
const CHUNK: usize = 4 << 20;

/// The first device, for one test at a time: several read the statistics of the pools they share.
struct Gpu {
    ctx: &'static Context,
    _alone: MutexGuard<'static, ()>,
}

fn gpu() -> Option<Gpu> {
    static ALONE: Mutex<()> = Mutex::new(());
    if cuda::device_count() == 0 {
        return None;
    }
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    Some(Gpu { ctx: Context::get(0).expect("the first device has a context"), _alone: alone })
}

/// Starts a test: binds `$gpu`, or returns after saying that there is none.
macro_rules! need {
    ($gpu:ident) => {
        let Some($gpu) = gpu() else {
            eprintln!("skipped: no GPU");
            return;
        };
    };
}

/// Bytes that differ from place to place, also across chunks.
fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i ^ (i >> 8) ^ (i >> 16) ^ (i >> 22)) as u8).collect()
}

fn read(buffer: &DeviceBuffer, stream: &Stream) -> Vec<u8> {
    let mut bytes = vec![0xee; buffer.len()];
    buffer.download(stream, 0, &mut bytes).unwrap();
    bytes
}

/// Buffers of both kinds on a fresh stream, for the graph tests.
fn stream_with_buffers(ctx: &'static Context, len: usize) -> (Stream, DeviceBuffer, DeviceBuffer) {
    let stream = Stream::new(ctx).unwrap();
    let (first, second) =
        (DeviceBuffer::alloc(&stream, len).unwrap(), DeviceBuffer::alloc(&stream, len).unwrap());
    (stream, first, second)
}

#[test]
fn the_device_describes_itself() {
    need!(gpu);
    let info = gpu.ctx.info();
    assert!(!info.name.is_empty());
    assert!(info.uuid.starts_with("GPU-") && info.uuid.len() == 40, "{}", info.uuid);
    assert!(info.arch() >= 50 && info.sm_count > 0 && info.bus_width > 0 && info.l2_bytes > 0, "{info:?}");
    assert!(info.max_threads_per_block >= 1024 && info.shared_per_block_optin >= info.shared_per_block);
    assert_eq!(info.cluster_launch, info.major >= 9);
    assert!(info.driver_version >= 12000);
    assert!(std::ptr::eq(gpu.ctx, Context::get(0).unwrap()));
}

#[test]
fn buffers_count_in_the_pool_and_trimming_returns_them() {
    need!(gpu);
    const LEN: usize = 64 << 20;
    let stream = gpu.ctx.default_stream();
    gpu.ctx.synchronize().unwrap();
    gpu.ctx.trim(0).unwrap();
    let before = gpu.ctx.memory().unwrap();
    let buffer = DeviceBuffer::alloc(stream, LEN).unwrap();
    assert_eq!(buffer.ptr() % 256, 0);
    let during = gpu.ctx.memory().unwrap();
    assert!(during.pool_used >= before.pool_used + LEN as u64, "{before:?} {during:?}");
    assert!(during.pool_high >= during.pool_used && during.pool_reserved >= during.pool_used);
    drop(buffer);
    stream.synchronize().unwrap();
    let after = gpu.ctx.memory().unwrap();
    assert_eq!(after.pool_used, before.pool_used);
    assert!(after.pool_reserved >= LEN as u64, "freed memory stays cached: {after:?}");
    gpu.ctx.trim(0).unwrap();
    let trimmed = gpu.ctx.memory().unwrap();
    assert!(trimmed.pool_reserved < LEN as u64, "{trimmed:?}");
    gpu.ctx.check().unwrap();
}

#[test]
fn an_empty_buffer_holds_no_memory() {
    need!(gpu);
    let stream = gpu.ctx.default_stream();
    let empty = DeviceBuffer::alloc(stream, 0).unwrap();
    assert_eq!((empty.ptr(), empty.len()), (0, 0));
    empty.upload(stream, 0, &[]).unwrap();
    empty.fill(stream, 1).unwrap();
    empty.download(stream, 0, &mut []).unwrap();
    assert!(matches!(empty.upload(stream, 0, &[1]), Err(Error::Argument { .. })));
}

#[test]
fn pageable_copies_survive_every_chunk_edge() {
    need!(gpu);
    let stream = gpu.ctx.default_stream();
    for len in [1, 4095, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 3, 5 * CHUNK + 17] {
        let bytes = pattern(len);
        // One byte to each side shows writes outside the range.
        let buffer = DeviceBuffer::alloc(stream, len + 2).unwrap();
        buffer.fill(stream, 0xcc).unwrap();
        buffer.upload(stream, 1, &bytes).unwrap();
        let back = read(&buffer, stream);
        assert_eq!((back[0], back[len + 1]), (0xcc, 0xcc), "{len}");
        assert!(back[1..=len] == bytes[..], "{len} bytes came back changed");
    }
    gpu.ctx.check().unwrap();
}

#[test]
fn ranges_outside_a_buffer_are_refused() {
    need!(gpu);
    let stream = gpu.ctx.default_stream();
    let buffer = DeviceBuffer::alloc(stream, 16).unwrap();
    for offset in [9, 17, usize::MAX] {
        assert!(matches!(buffer.upload(stream, offset, &[0; 8]), Err(Error::Argument { .. })), "{offset}");
        assert!(
            matches!(buffer.download(stream, offset, &mut [0; 8]), Err(Error::Argument { .. })),
            "{offset}"
        );
    }
    assert!(matches!(buffer.copy_from(stream, 0, &buffer), Err(Error::Argument { .. })));
}

#[test]
fn running_out_of_memory_is_typed_and_passes() {
    need!(gpu);
    let stream = gpu.ctx.default_stream();
    let all = usize::try_from(gpu.ctx.info().total_memory).unwrap();
    // More than there is, which we refuse, and all there is, which the driver refuses.
    for requested in [usize::MAX, all + 1, all] {
        match DeviceBuffer::alloc(stream, requested) {
            Err(Error::OutOfMemory { device, requested: said, total, .. }) => {
                assert_eq!((device.as_str(), said), ("cuda:0", requested as u64));
                assert!(total > 0);
            }
            other => panic!("{requested}: {other:?}"),
        }
        let buffer = DeviceBuffer::alloc(stream, 1 << 20).unwrap();
        buffer.fill(stream, 7).unwrap();
        assert!(read(&buffer, stream).iter().all(|&byte| byte == 7));
    }
    gpu.ctx.check().unwrap();
}

#[test]
fn events_order_and_time() {
    need!(gpu);
    let (stream, buffer, _) = stream_with_buffers(gpu.ctx, 256 << 20);
    let (start, end) = (Event::new(gpu.ctx, true).unwrap(), Event::new(gpu.ctx, true).unwrap());
    assert!(start.query().unwrap(), "an event that was never recorded is reached");
    stream.record(&start).unwrap();
    buffer.fill(&stream, 1).unwrap();
    end.record(&stream).unwrap();
    end.synchronize().unwrap();
    assert!(end.query().unwrap());
    let milliseconds = Event::elapsed_ms(&start, &end).unwrap();
    assert!(milliseconds > 0.0 && milliseconds < 10_000.0, "{milliseconds}");
    let untimed = Event::new(gpu.ctx, false).unwrap();
    untimed.record(&stream).unwrap();
    untimed.synchronize().unwrap();
    assert!(matches!(Event::elapsed_ms(&start, &untimed), Err(Error::Cuda { .. })));
}

#[test]
fn a_buffer_is_freed_after_the_other_streams_that_use_it() {
    need!(gpu);
    const LEN: usize = 128 << 20;
    let (first, second) = (Stream::new(gpu.ctx).unwrap(), Stream::new(gpu.ctx).unwrap());
    for round in 0..4u8 {
        let used = DeviceBuffer::alloc(&first, LEN).unwrap();
        second.wait_for(&first).unwrap();
        for _ in 0..8 {
            used.fill(&second, 0xaa).unwrap();
        }
        drop(used);
        // Very likely the same memory: the fills above must not land in it.
        let next = DeviceBuffer::alloc(&first, LEN).unwrap();
        next.fill(&first, round).unwrap();
        second.synchronize().unwrap();
        assert!(read(&next, &first).iter().all(|&byte| byte == round), "round {round}");
    }
    gpu.ctx.check().unwrap();
}

#[test]
fn foreign_and_legacy_streams_work() {
    need!(gpu);
    let owner = Stream::new(gpu.ctx).unwrap();
    // SAFETY: `owner` outlives the borrowed handle and the buffers on it.
    let foreign = unsafe { Stream::from_raw(gpu.ctx, owner.raw()) };
    assert_eq!(foreign, owner);
    let legacy = Stream::legacy(gpu.ctx);
    for stream in [&foreign, &legacy] {
        let buffer = DeviceBuffer::alloc(stream, 1000).unwrap();
        let bytes = pattern(1000);
        buffer.upload(stream, 0, &bytes).unwrap();
        assert_eq!(read(&buffer, stream), bytes);
    }
    drop(foreign);
    owner.synchronize().unwrap();
    assert!(matches!(Graph::capture(&legacy, |_| Ok(())), Err(Error::Argument { .. })));
    gpu.ctx.check().unwrap();
}

#[test]
fn a_graph_replays_fills_copies_and_uploads() {
    need!(gpu);
    let (stream, first, second) = stream_with_buffers(gpu.ctx, 4096);
    first.fill(&stream, 1).unwrap();
    second.fill(&stream, 2).unwrap();
    let graph = Graph::capture(&stream, |stream| {
        assert!(stream.is_capturing()?);
        second.copy_from(stream, 0, &first)?;
        first.fill(stream, 9)?;
        first.upload(stream, 16, &[5; 16])
    })
    .unwrap();
    assert!(!stream.is_capturing().unwrap());
    assert_eq!(graph.node_count().unwrap(), 3);
    assert!(read(&second, &stream).iter().all(|&byte| byte == 2), "recording must not run the work");
    let exec = graph.instantiate().unwrap();
    drop(graph);
    exec.upload(&stream).unwrap();
    exec.launch(&stream).unwrap();
    assert!(read(&second, &stream).iter().all(|&byte| byte == 1));
    exec.launch(&stream).unwrap();
    let mut expected = vec![9; 4096];
    expected[16..32].fill(5);
    assert_eq!(read(&first, &stream), expected);
    assert_eq!(read(&second, &stream), expected, "the second replay sees what the first left");
    gpu.ctx.check().unwrap();
}

#[test]
fn a_graph_keeps_the_memory_it_uses() {
    need!(gpu);
    const LEN: usize = 32 << 20;
    let (stream, before, result) = stream_with_buffers(gpu.ctx, LEN);
    let other = DeviceBuffer::alloc(&stream, LEN).unwrap();
    let mut before = Some(before);
    let mut inside = None;
    let graph = Graph::capture(&stream, |stream| {
        let scratch = DeviceBuffer::alloc(stream, LEN)?;
        scratch.fill(stream, 3)?;
        let dropped = before.take().expect("called once");
        dropped.copy_from(stream, 0, &scratch)?;
        result.copy_from(stream, 0, &dropped)?;
        inside = Some(scratch);
        Ok(())
    })
    .unwrap();
    drop(inside);
    let exec = graph.instantiate().unwrap();
    drop(graph);
    // Memory that was freed by mistake would be handed out here and overwritten by the replay.
    let fresh: Vec<_> = (0..4).map(|_| DeviceBuffer::alloc(&stream, LEN).unwrap()).collect();
    for buffer in &fresh {
        buffer.fill(&stream, 0x77).unwrap();
    }
    exec.launch(&stream).unwrap();
    for buffer in &fresh {
        assert!(
            read(buffer, &stream).iter().all(|&byte| byte == 0x77),
            "the replay wrote into another buffer"
        );
    }
    assert!(read(&result, &stream).iter().all(|&byte| byte == 3));
    drop((fresh, other, result));
    stream.synchronize().unwrap();
    let held = gpu.ctx.memory().unwrap().pool_used;
    drop(exec);
    gpu.ctx.synchronize().unwrap();
    let after = gpu.ctx.memory().unwrap().pool_used;
    assert!(held >= after + 2 * LEN as u64, "dropping the graph frees its memory: {held} then {after}");
    gpu.ctx.check().unwrap();
}

#[test]
fn a_failed_capture_leaves_the_stream_usable() {
    need!(gpu);
    let (stream, buffer, _) = stream_with_buffers(gpu.ctx, 4096);
    buffer.fill(&stream, 4).unwrap();
    let failed = Graph::capture(&stream, |stream| -> Result<()> {
        buffer.fill(stream, 5)?;
        buffer.download(stream, 0, &mut [0; 16])
    });
    assert!(matches!(failed, Err(Error::Argument { op: "download", .. })));
    assert!(!stream.is_capturing().unwrap());
    let nested = Graph::capture(&stream, |stream| Graph::capture(stream, |_| Ok(())).map(|_| ()));
    assert!(matches!(nested, Err(Error::Argument { op: "Graph::capture", .. })));
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let _ = Graph::capture(&stream, |_| panic!("in the middle of a capture"));
    }));
    assert!(panicked.is_err());
    assert!(!stream.is_capturing().unwrap());
    assert!(read(&buffer, &stream).iter().all(|&byte| byte == 4));
    gpu.ctx.check().unwrap();
}

#[test]
fn pinned_memory_is_reused_after_the_device_is_done_with_it() {
    need!(gpu);
    const LEN: usize = (1 << 20) - 5;
    let stream = gpu.ctx.default_stream();
    gpu.ctx.synchronize().unwrap();
    gpu.ctx.trim(0).unwrap();
    let before = gpu.ctx.pinned_stats();
    assert_eq!(before.cached, 0);
    let device = DeviceBuffer::alloc(stream, LEN).unwrap();
    for round in 0..3u8 {
        let mut host = PinnedBuffer::alloc(gpu.ctx, LEN).unwrap();
        host.as_mut_slice().fill(round);
        // SAFETY: the buffers have this size, and the host's is dropped without being written.
        unsafe { cuda::upload_async(stream, device.ptr(), &host, 0..LEN) }.unwrap();
        drop(host);
        assert!(read(&device, stream).iter().all(|&byte| byte == round), "round {round}");
    }
    let after = gpu.ctx.pinned_stats();
    assert!(after.hits > before.hits, "{before:?} {after:?}");
    stream.synchronize().unwrap();
    gpu.ctx.trim(0).unwrap();
    let trimmed = gpu.ctx.pinned_stats();
    assert_eq!((trimmed.used, trimmed.cached), (0, 0), "{trimmed:?}");
    assert!(matches!(PinnedBuffer::alloc(gpu.ctx, usize::MAX), Err(Error::OutOfMemory { .. })));
    gpu.ctx.check().unwrap();
}

#[test]
fn a_bad_module_is_an_error_and_harms_nothing() {
    need!(gpu);
    let text = Module::get(gpu.ctx, "text", b"not a cubin");
    assert!(matches!(text, Err(Error::Parse { .. })), "{text:?}");
    // A whole ELF file, but without any code: for the driver to refuse.
    let mut empty = [0u8; 64];
    empty[..7].copy_from_slice(b"\x7fELF\x02\x01\x01");
    let empty = Module::get(gpu.ctx, "empty", &empty);
    assert!(matches!(empty, Err(Error::Cuda { call: "cuModuleLoadData", .. })), "{empty:?}");
    assert!(Module::loaded(gpu.ctx, "empty").is_none());
    gpu.ctx.synchronize().unwrap();
}

#[test]
fn copy_speed_is_that_of_memory() {
    need!(gpu);
    let info = gpu.ctx.info();
    let speed = cuda::measure_copy(gpu.ctx, 8 * info.l2_bytes as usize).unwrap();
    // Two transfers per clock, over the width of the bus.
    let peak = 2.0 * f64::from(info.memory_clock_khz) * 1e3 * f64::from(info.bus_width) / 8.0 / 1e9;
    eprintln!("copies at {speed:.0} of {peak:.0} GB/s");
    assert!(speed > 0.2 * peak && speed < 1.1 * peak, "{speed} of {peak} GB/s");
}

/// A fault takes the whole context with it, so it happens in a process of its own: the test below.
#[test]
fn a_fault_poisons_the_device_and_says_so() {
    need!(_gpu);
    let child = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "faults_on_purpose", "--nocapture"])
        .output()
        .unwrap();
    let told = String::from_utf8_lossy(&child.stderr);
    assert!(child.status.success(), "{told}");
    assert!(told.contains("seen: ") && told.contains("illegal"), "{told}");
}

#[test]
#[ignore = "loses the context: run by the test above in a process of its own"]
fn faults_on_purpose() {
    need!(gpu);
    let device = Device::Cuda(0);
    let good = Tensor::randn(&[4, 256], DType::F32, device, 0).unwrap();
    let layout = Layout::contiguous(Shape::new(&[4, 256]).unwrap());
    // SAFETY: there is no memory at this address, which is the point: the device faults, the host never reads it.
    let nowhere = unsafe { TensorView::from_raw(0x100, DType::F32, layout, device) };
    let fault = Activation::relu(nowhere).run().and_then(|_| gpu.ctx.synchronize());
    let Err(Error::Poisoned { cause, .. }) = &fault else {
        panic!("expected a poisoned device, got {fault:?}")
    };
    eprintln!("seen: {cause}");
    // Every later call is told the first cause instead of a consequence of it.
    let later = Activation::relu(&good).run().map(drop);
    assert!(matches!(&later, Err(Error::Poisoned { cause: again, .. }) if again == cause), "{later:?}");
    let memory = Tensor::randn(&[4], DType::F32, device, 0).map(drop);
    assert!(matches!(memory, Err(Error::Poisoned { .. })), "{memory:?}");
}

/// The suite's poison is what `pages` ends with, and its cases have valid starts; here neither is so.
#[test]
fn a_mirrored_tree_is_searched_and_what_is_out_of_range_does_no_harm() {
    need!(gpu);
    let device = Device::Cuda(gpu.ctx.ordinal());
    let stream = device.default_stream().unwrap();
    let mut tree = RadixTree::new(16, 5000).unwrap();
    let mut mirror = Mirror::new(&mut tree, &stream).unwrap();
    let sequence = |i: i32| -> Vec<i32> { (0..1600).map(|t| if t < 800 { t } else { i * t }).collect() };
    let mut next = 0..5000;
    for i in 1..=40 {
        let pages: Vec<i32> = next.by_ref().take(100).collect();
        let present = tree.insert(&sequence(i), &pages).unwrap().present;
        assert_eq!(present, if i == 1 { 0 } else { 50 });
        mirror.update(&mut tree, &stream).unwrap();
    }
    let tokens: Vec<i32> = (1..=40).flat_map(sequence).collect();
    let search = |mirror: &Mirror, starts: &[i32], max_pages: usize| {
        let tensor = |data: &[i32], shape: &[usize]| Tensor::from_slice(data, shape, device).unwrap();
        let (count, all) = (starts.len() - 1, tensor(&tokens, &[tokens.len()]));
        let [mut matched, mut nodes] = [(); 2].map(|()| tensor(&vec![77; count], &[count]));
        let mut pages = tensor(&vec![77; count * max_pages], &[count, max_pages]);
        let starts = tensor(starts, &[count + 1]);
        let call = PrefixMatch::new(mirror, &all, &starts).max_pages(max_pages);
        call.run_into(&mut matched, &mut nodes, &mut pages, &stream).unwrap();
        [matched, nodes, pages].map(|tensor| tensor.to_vec::<i32>().unwrap())
    };
    let starts: Vec<i32> = (0..=40).map(|i| i * 1600).collect();
    let [matched, nodes, pages] = search(&mirror, &starts, 103);
    for i in 0..40 {
        let found = tree.find(&sequence(i as i32 + 1));
        assert_eq!((matched[i] as usize, nodes[i] as u32), (found.tokens, found.node));
        assert_eq!(pages[103 * i..103 * (i + 1)], [&found.pages[..], &[-1; 3]].concat());
    }
    let [matched, _, pages] = search(&mirror, &[i32::MIN, 1600, 1600, 5, -7, i32::MAX], 2);
    assert_eq!(matched, [1600, 0, 0, 0, 1600]);
    assert_eq!(pages, [0, 1, -1, -1, -1, -1, -1, -1, 0, 1]);
    let freed = tree.evict(usize::MAX).len();
    assert_eq!(freed, 50 + 40 * 50);
    mirror.update(&mut tree, &stream).unwrap();
    let [matched, nodes, pages] = search(&mirror, &starts[..3], 1);
    assert_eq!((matched, nodes, pages), (vec![0; 2], vec![0; 2], vec![-1; 2]));
}

/// The most memory that `work` had in use at once, besides what was there before.
fn peak(ctx: &Context, work: impl FnOnce() -> Result<()>) -> u64 {
    ctx.default_stream().synchronize().unwrap();
    ctx.reset_pool_high().unwrap();
    let before = ctx.memory().unwrap().pool_used;
    work().unwrap();
    ctx.default_stream().synchronize().unwrap();
    ctx.memory().unwrap().pool_high - before
}

#[test]
fn attention_over_long_sequences_takes_a_tenth_of_the_memory_of_its_parts() {
    need!(gpu);
    const HEADS: usize = 2;
    const LEN: usize = 32_768;
    const DIM: usize = 128;
    let scores = (HEADS * LEN * LEN * DType::BF16.size()) as u64;
    if gpu.ctx.memory().unwrap().free < 2 * scores {
        return eprintln!("skipped: less than {} GB of memory free", (2 * scores) >> 30);
    }
    let random = |seed| Tensor::randn(&[1, LEN, HEADS, DIM], DType::BF16, Device::Cuda(0), seed).unwrap();
    let (q, k, v) = (random(1), random(2), random(3));
    let stream = gpu.ctx.default_stream();
    let fused = peak(gpu.ctx, || Attention::new(&q, &k, &v).run().map(drop));
    let apart = peak(gpu.ctx, || {
        let [q, k] = [&q, &k].map(|tensor| tensor.view().permute(&[0, 2, 1, 3]).unwrap());
        let mut weights = Linear::new(q, k).scale((DIM as f32).sqrt().recip()).run()?;
        Softmax::in_place().run_in_place(&mut weights, &warpsmith::Stream::Cuda(stream.clone()))?;
        Linear::new(&weights, v.view().permute(&[0, 2, 3, 1]).unwrap()).run().map(drop)
    });
    println!("at once {} MB, apart {} MB", fused >> 20, apart >> 20);
    assert!(apart >= scores && fused * 10 <= apart, "{fused} and {apart} bytes");
}

#[test]
fn a_captured_decode_follows_lengths_that_change() {
    need!(gpu);
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

#[test]
fn rows_of_hopper_attention_have_the_same_bits_in_blocks_of_any_size() {
    need!(gpu);
    if gpu.ctx.info().arch() != 90 {
        return eprintln!("skipped: no Hopper GPU");
    }
    const LEN: usize = 1000;
    const HEADS: usize = 4;
    const DIM: usize = 128;
    let blocks = [(128, 64), (128, 80), (128, 128), (192, 64), (192, 80)];
    // Scores that grow along the keys until weights relative to the first one would be infinite, and some that do not.
    for growth in [0.0, 6.0, 20.0, 500.0] {
        let shape = [1, LEN, HEADS, DIM];
        let noise = |seed| Tensor::randn(&shape, DType::F32, Device::Cpu, seed).unwrap().to_f64().unwrap();
        let q: Vec<f64> = noise(1).iter().map(|x| 1.0 + x / 4.0).collect();
        let grown = |i: usize| growth * (i / (HEADS * DIM)) as f64 / LEN as f64;
        let k: Vec<f64> = noise(2).iter().enumerate().map(|(i, x)| x / 2.0 + grown(i)).collect();
        let v = noise(3);
        let tensors =
            |device| [&q, &k, &v].map(|x| Tensor::from_f64(x, &shape, DType::BF16, device).unwrap());
        let (device, host) = (tensors(Device::Cuda(0)), tensors(Device::Cpu));
        for (causal, window) in [(true, 0), (true, 150), (false, 0)] {
            fn call(tensors: &[Tensor; 3], causal: bool, window: usize) -> Attention<'_> {
                let [q, k, v] = tensors;
                let call = Attention::new(q, k, v).window(window);
                if causal { call.causal() } else { call }
            }
            let run = |(rows, keys)| {
                let call = call(&device, causal, window).blocks(rows, keys).kernel("attention_sm90");
                let (out, lse) = call.run_with_lse().unwrap();
                [out, lse].map(|tensor| tensor.to_f64().unwrap())
            };
            let first = run(blocks[0]);
            for size in &blocks[1..] {
                assert!(run(*size) == first, "{size:?}: {growth}, {causal}, {window}");
            }
            let expected = call(&host, causal, window).run().unwrap().to_f64().unwrap();
            let far = first[0].iter().zip(&expected).any(|(a, b)| (a - b).abs() > 0.0625);
            assert!(!far, "{growth}, {causal}, {window}");
        }
    }
    gpu.ctx.check().unwrap();
}

#[test]
fn scores_of_hopper_attention_may_rise_by_any_amount() {
    need!(gpu);
    if gpu.ctx.info().arch() != 90 {
        return eprintln!("skipped: no Hopper GPU");
    }
    const LEN: usize = 700;
    const HEADS: usize = 2;
    // Every seventh row, in the midst of rows whose scores fall.
    let rises = |row: usize| row % 7 == 3;
    for (dim, dtype) in
        [(64, DType::BF16), (64, DType::F16), (96, DType::BF16), (128, DType::BF16), (128, DType::F16)]
    {
        let (shape, width) = ([1, LEN, HEADS, dim], HEADS * dim);
        let noise = |seed| Tensor::randn(&shape, DType::F32, Device::Cpu, seed).unwrap().to_f64().unwrap();
        let q: Vec<f64> = noise(1)
            .iter()
            .enumerate()
            .map(|(i, x)| if rises(i / width) { 1.0 + x / 4.0 } else { -1.0 - x / 4.0 })
            .collect();
        // The same with a row that falls in place of each that rises.
        let falling: Vec<f64> =
            (0..q.len()).map(|i| q[if rises(i / width) { i % width } else { i }]).collect();
        // By how many powers of two weights grow, at once or from key to key: within what sums can hold, and beyond.
        for (at_once, each) in
            [(20.0, 0.0), (33.0, 0.0), (130.0, 0.0), (3000.0, 0.0), (0.0, 0.3), (0.0, 2.0), (0.0, 10.0)]
        {
            let unit = std::f64::consts::LN_2 / (dim as f64).sqrt();
            let grown = |key: usize| unit * (if key >= 333 { at_once } else { 0.0 } + each * key as f64);
            let k: Vec<f64> = noise(2).iter().enumerate().map(|(i, x)| x / 2.0 + grown(i / width)).collect();
            let v = noise(3);
            let run = |q: &[f64], device: Device, rows: usize| {
                let [q, k, v] = [q, &k, &v].map(|x| Tensor::from_f64(x, &shape, dtype, device).unwrap());
                let call = Attention::new(&q, &k, &v).causal().blocks(rows, 0);
                let call = if rows == 0 { call } else { call.kernel("attention_sm90") };
                let (out, lse) = call.run_with_lse().unwrap();
                [out, lse].map(|tensor| tensor.to_f64().unwrap())
            };
            let what = format!("{dim} {dtype}: {at_once}, {each}");
            let [out, lse] = run(&q, Device::Cuda(0), 128);
            let [expected, expected_lse] = run(&q, Device::Cpu, 0);
            assert!(out.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 0.0625), "{what}");
            let near = |(a, b): (&f64, &f64)| (a - b).abs() < 1e-3 * b.abs().max(1.0);
            assert!(lse.iter().zip(&expected_lse).all(near), "{what}: lse");
            if dim != 96 {
                assert!(run(&q, Device::Cuda(0), 192)[0] == out, "{what}: tiles of 192 rows");
            }
            let alone = &run(&falling, Device::Cuda(0), 128)[0];
            let same = |i: usize| rises(i / width) || alone[i] == out[i];
            assert!((0..out.len()).all(same), "{what}: rows have bits of their neighbours");
        }
    }
    gpu.ctx.check().unwrap();
}
