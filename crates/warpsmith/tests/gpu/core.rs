//! What callers build on: plans with other addresses, tensors on several streams, workspaces of graphs, memory of others.

use crate::common::{gpu, hopper};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use warpsmith::cuda::{DeviceBuffer, Graph};
use warpsmith::op::Plan;
use warpsmith::ops::{Attention, Linear, LinearBackward, MulAdd, PagedAttention, RmsNorm};
use warpsmith::tensor::{Foreign, Layout, Shape};
use warpsmith::{DType, Device, Error, Stream, Tensor, cuda};

const GPU: Device = Device::Cuda(0);

crate::harness::tests! {
    a_plan_serves_other_tensors;
    tensors_made_on_one_stream_are_ready_on_another;
    writers_wait_for_readers_on_other_streams;
    a_captured_decode_of_many_layers_holds_the_workspace_of_one;
    graphs_on_two_streams_do_not_share_a_workspace_at_once;
    downloads_do_not_wait_and_bring_what_was_there;
    memory_of_others_is_given_back_after_the_last_use;
    a_capture_of_others_is_served_with_their_tensors_and_refuses_ours;
    copies_between_tensors_of_the_device_go_direct;
}

fn random(shape: &[usize], dtype: DType, seed: u64) -> Tensor {
    Tensor::randn(shape, dtype, GPU, seed).unwrap()
}

/// A CUDA stream of our own, as both layers see it.
fn new_stream() -> (Stream, cuda::Stream) {
    let Stream::Cuda(raw) = Stream::new(GPU).unwrap() else { unreachable!("a stream of the GPU") };
    (Stream::Cuda(raw.clone()), raw)
}

/// Repeated calls put new addresses into what was recorded, those inside of tensor maps too: results on other tensors must be
/// those of a fresh process, which the CPU stands for.
fn a_plan_serves_other_tensors() {
    let Some(_gpu) = hopper() else { return };
    let dtype = DType::BF16;
    let mut plan: Option<Plan> = None;
    let mut plans = [const { None::<Plan> }; 3];
    for seed in 0..4 {
        let [x, w, bias] = [
            random(&[96, 256], dtype, seed),
            random(&[128, 256], dtype, 10 + seed),
            random(&[128], dtype, 20 + seed),
        ];
        let out = Linear::new(&x, &w).bias(&bias).gelu().keep_plan(&mut plan).run().unwrap();
        let [cx, cw, cb] = [&x, &w, &bias].map(|t| t.to_device(Device::Cpu).unwrap());
        assert_close(&out, &Linear::new(&cx, &cw).bias(&cb).gelu().run().unwrap());
        let [q, k, v] = [1, 2, 3].map(|i| random(&[2, 200, 4, 64], dtype, 100 * seed + i));
        let [cq, ck, cv] = [&q, &k, &v].map(|t| t.to_device(Device::Cpu).unwrap());
        let out = Attention::new(&q, &k, &v).causal().keep_plan(&mut plans[0]).run().unwrap();
        assert_close(&out, &Attention::new(&cq, &ck, &cv).causal().run().unwrap());
        let [mut dx, mut dw] =
            [Tensor::zeros(&[96, 256], dtype, GPU).unwrap(), Tensor::zeros(&[128, 256], dtype, GPU).unwrap()];
        let dout = random(&[96, 128], dtype, 30 + seed);
        let stream = GPU.default_stream().unwrap();
        LinearBackward::new(&x, &w, &dout)
            .dx(&mut dx)
            .dw(&mut dw)
            .keep_plan(&mut plans[1])
            .run(&stream)
            .unwrap();
        let [mut cdx, mut cdw] = [&dx, &dw].map(|t| Tensor::zeros(t.shape(), dtype, Device::Cpu).unwrap());
        let cdout = dout.to_device(Device::Cpu).unwrap();
        LinearBackward::new(&cx, &cw, &cdout).dx(&mut cdx).dw(&mut cdw).run(&Stream::Host).unwrap();
        assert_close(&dx, &cdx);
        assert_close(&dw, &cdw);
        let [pages_k, pages_v] = [4, 5].map(|i| random(&[40, 16, 2, 64], dtype, 100 * seed + i));
        let q = random(&[600, 8, 64], dtype, 40 + seed);
        let table: Vec<i32> = (0..40).map(|i| (i * 7 + seed as i32) % 40).collect();
        let table = Tensor::from_slice(&table, &[1, 40], GPU).unwrap();
        let lens = Tensor::from_slice(&[600 + seed as i32], &[1], GPU).unwrap();
        let paged = PagedAttention::new(&q, &pages_k, &pages_v, &table, &lens);
        let out = paged.keep_plan(&mut plans[2]).run().unwrap();
        let [q, k, v, t, l] =
            [&q, &pages_k, &pages_v, &table, &lens].map(|tensor| tensor.to_device(Device::Cpu).unwrap());
        assert_close(&out, &PagedAttention::new(&q, &k, &v, &t, &l).run().unwrap());
    }
}

fn assert_close(gpu: &Tensor, cpu: &Tensor) {
    let (a, b) = (gpu.to_f64().unwrap(), cpu.to_f64().unwrap());
    let norm = |v: &mut dyn Iterator<Item = f64>| v.map(|x| x * x).sum::<f64>().sqrt();
    let error = norm(&mut a.iter().zip(&b).map(|(a, b)| a - b)) / norm(&mut b.iter().copied());
    assert!(error < 0.01, "{error}");
}

/// Without an order, the second stream would read before the first has written.
fn tensors_made_on_one_stream_are_ready_on_another() {
    let Some(gpu) = gpu() else { return };
    let n = 64 << 20;
    let ((first, raw), (second, _)) = (new_stream(), new_stream());
    let ones = Tensor::from_slice(&vec![1f32; n], &[n], GPU).unwrap();
    for round in 0..5 {
        // Work that keeps the first stream busy for milliseconds before the tensor is written.
        let mut busy = DeviceBuffer::alloc(&raw, 1 << 30).unwrap();
        for value in 0..8 {
            busy.fill(&raw, value).unwrap();
        }
        let mut made = Tensor::empty_on(&[n], DType::F32, &first).unwrap();
        MulAdd::new(&ones, &ones, &ones).run_into(&mut made, &first).unwrap();
        let mut seen = Tensor::empty_on(&[n], DType::F32, &second).unwrap();
        MulAdd::new(&made, &ones, &ones).run_into(&mut seen, &second).unwrap();
        // Freed at once, and very likely handed out again: also that must wait for the second stream.
        drop(made);
        let mut next = Tensor::empty_on(&[n], DType::F32, &first).unwrap();
        MulAdd::new(&ones, &ones, &ones).run_into(&mut next, &first).unwrap();
        let seen = seen.narrow(0, n - 1000, 1000).unwrap().to_vec::<f32>().unwrap();
        assert!(seen.iter().all(|&x| x == 3.0), "round {round}: {}", seen[0]);
    }
    gpu.ctx.check().unwrap();
}

fn writers_wait_for_readers_on_other_streams() {
    let Some(gpu) = gpu() else { return };
    let n = 64 << 20;
    let ((first, _), (second, raw)) = (new_stream(), new_stream());
    let ones = Tensor::from_slice(&vec![1f32; n], &[n], GPU).unwrap();
    let mut source = Tensor::from_slice(&vec![2f32; n], &[n], GPU).unwrap();
    let mut busy = DeviceBuffer::alloc(&raw, 1 << 30).unwrap();
    for round in 0..5 {
        let before = (round + 2) as f32;
        for value in 0..8 {
            busy.fill(&raw, value).unwrap();
        }
        // The second stream reads late what the first then overwrites.
        let mut seen = Tensor::empty_on(&[n], DType::F32, &second).unwrap();
        MulAdd::new(&source, &ones, &ones).run_into(&mut seen, &second).unwrap();
        source.write(0, &vec![before + 1.0; n], &first).unwrap();
        let seen = seen.narrow(0, n - 1000, 1000).unwrap().to_vec::<f32>().unwrap();
        assert!(seen.iter().all(|&x| x == before + 1.0), "round {round}: {}", seen[0]);
    }
    gpu.ctx.check().unwrap();
}

fn a_captured_decode_of_many_layers_holds_the_workspace_of_one() {
    let Some(gpu) = gpu() else { return };
    const LAYERS: usize = 32;
    let dtype = DType::BF16;
    let q = random(&[4, 32, 128], dtype, 1);
    let [k, v] = [2, 3].map(|seed| random(&[1024, 16, 8, 128], dtype, seed));
    let table: Vec<i32> = (0..4 * 256).collect();
    let table = Tensor::from_slice(&table, &[4, 256], GPU).unwrap();
    let lens = Tensor::from_slice(&[4096; 4], &[4], GPU).unwrap();
    let mut out = random(&[4, 32, 128], dtype, 4);
    let (stream, raw) = new_stream();
    let mut plan = None;
    let mut run = |plan: &mut Option<Plan>| {
        PagedAttention::new(&q, &k, &v, &table, &lens).keep_plan(plan).run_into(&mut out, &stream)
    };
    run(&mut plan).unwrap();
    let one = plan.as_ref().unwrap().workspace_bytes();
    assert!(one > 0, "a decode of long requests has a workspace");
    let held = stream.workspace_bytes();
    assert!((one..one + (2 << 20)).contains(&held), "{one} bytes needed, {held} held");
    stream.synchronize().unwrap();
    let before = gpu.ctx.memory().unwrap().pool_used;
    let graph = Graph::capture(&raw, |_| (0..LAYERS).try_for_each(|_| run(&mut plan))).unwrap();
    let exec = graph.instantiate().unwrap();
    let during = gpu.ctx.memory().unwrap().pool_used;
    assert_eq!(stream.workspace_bytes(), held);
    assert_eq!(during, before, "the graph took {} bytes more", during - before);
    // Two graphs of one stream share it, too.
    let second = Graph::capture(&raw, |_| run(&mut plan)).unwrap().instantiate().unwrap();
    assert_eq!(gpu.ctx.memory().unwrap().pool_used, before);
    exec.launch(&raw).unwrap();
    second.launch(&raw).unwrap();
    stream.synchronize().unwrap();
    gpu.ctx.check().unwrap();
}

/// A graph may be launched on another stream than it was recorded on, whose workspace it has.
fn graphs_on_two_streams_do_not_share_a_workspace_at_once() {
    let Some(gpu) = gpu() else { return };
    let dtype = DType::BF16;
    let [k, v] = [2, 3].map(|seed| random(&[512, 16, 8, 128], dtype, seed));
    let table: Vec<i32> = (0..512).collect();
    let table = Tensor::from_slice(&table, &[2, 256], GPU).unwrap();
    let lens = Tensor::from_slice(&[4096; 2], &[2], GPU).unwrap();
    let queries = [10, 11].map(|seed| random(&[2, 32, 128], dtype, seed));
    let alone = queries.each_ref().map(|q| {
        PagedAttention::new(q, &k, &v, &table, &lens).run().unwrap().to_vec::<half::bf16>().unwrap()
    });
    let ((stream, raw), (_, other)) = (new_stream(), new_stream());
    let mut outs = queries.each_ref().map(|q| random(q.shape(), dtype, 5));
    let [first, second] = &mut outs;
    PagedAttention::new(&queries[0], &k, &v, &table, &lens).run_into(&mut *first, &stream).unwrap();
    let graph = Graph::capture(&raw, |_| {
        PagedAttention::new(&queries[0], &k, &v, &table, &lens).run_into(&mut *first, &stream)
    });
    let graph = graph.unwrap().instantiate().unwrap();
    for _ in 0..50 {
        // The replay on the other stream and the call on the graph's own use the same workspace.
        graph.launch(&other).unwrap();
        PagedAttention::new(&queries[1], &k, &v, &table, &lens).run_into(&mut *second, &stream).unwrap();
    }
    for (out, alone) in outs.iter().zip(&alone) {
        assert!(out.to_vec::<half::bf16>().unwrap() == *alone);
    }
    gpu.ctx.check().unwrap();
}

fn downloads_do_not_wait_and_bring_what_was_there() {
    let Some(gpu) = gpu() else { return };
    let n = 1 << 20;
    let (stream, raw) = new_stream();
    let ones = Tensor::from_slice(&vec![1f32; n], &[n], GPU).unwrap();
    let mut busy = DeviceBuffer::alloc(&raw, 4 << 30).unwrap();
    let mut out = Tensor::empty_on(&[n], DType::F32, &stream).unwrap();
    for value in 0..8 {
        busy.fill(&raw, value).unwrap();
    }
    MulAdd::new(&ones, &ones, &ones).run_into(&mut out, &stream).unwrap();
    let copy = out.download(&stream).unwrap();
    assert!(!copy.is_done().unwrap(), "the device has milliseconds of work before it");
    // Overwritten in the order of the stream, so after the copy.
    RmsNorm::new(&out.reshape(&[1024, 1024]).unwrap()).run().unwrap();
    assert!(copy.wait::<f32>().unwrap().iter().all(|&x| x == 2.0));
    let wrong = out.download(&stream).unwrap().wait::<i32>();
    assert!(matches!(wrong, Err(Error::Parse { .. })));
    let failed = Graph::capture(&raw, |_| out.download(&stream).map(|_| ()));
    assert!(matches!(failed, Err(Error::Argument { op: "download", .. })));
    gpu.ctx.check().unwrap();
}

fn memory_of_others_is_given_back_after_the_last_use() {
    let Some(gpu) = gpu() else { return };
    let n = 64 << 20;
    let deleted = Arc::new(AtomicUsize::new(0));
    let (stream, raw) = new_stream();
    let ones = Tensor::from_slice(&vec![1f32; n], &[n], GPU).unwrap();
    for home in [None, Some(GPU.default_stream().unwrap())] {
        let owner = Tensor::from_slice(&vec![3f32; n], &[n], GPU).unwrap();
        GPU.synchronize().unwrap();
        let before = deleted.load(Ordering::SeqCst);
        let memory = Foreign {
            address: owner.view().address(),
            dtype: DType::F32,
            layout: Layout::contiguous(Shape::new(&[n]).unwrap()),
            device: GPU,
            stream: home.clone(),
            read_only: true,
        };
        let count = deleted.clone();
        let give_back = move || {
            drop(owner);
            count.fetch_add(1, Ordering::SeqCst);
        };
        // SAFETY: the owner lives in the deleter.
        let foreign = unsafe { Tensor::from_foreign(memory, give_back) }.unwrap();
        let mut busy = DeviceBuffer::alloc(&raw, 4 << 30).unwrap();
        for value in 0..8 {
            busy.fill(&raw, value).unwrap();
        }
        let mut out = Tensor::empty_on(&[n], DType::F32, &stream).unwrap();
        MulAdd::new(&foreign, &ones, &ones).run_into(&mut out, &stream).unwrap();
        drop(foreign);
        // With a home the memory is given back in its order; without one only when the device is done.
        assert_eq!(deleted.load(Ordering::SeqCst), before + home.is_some() as usize);
        assert!(out.to_vec::<f32>().unwrap().iter().all(|&x| x == 4.0));
        stream.synchronize().unwrap();
        // Parked memory is looked at when something is allocated.
        drop(DeviceBuffer::alloc(&raw, 1).unwrap());
        assert_eq!(deleted.load(Ordering::SeqCst), before + 1);
    }
    gpu.ctx.check().unwrap();
}

/// As PyTorch's `torch.cuda.graph` does it: another library begins a capture on a stream of its own.
fn a_capture_of_others_is_served_with_their_tensors_and_refuses_ours() {
    let Some(gpu) = gpu() else { return };
    let driver = Driver::load();
    let theirs = driver.stream();
    // SAFETY: the stream lives until the process ends.
    let stream = Stream::Cuda(unsafe { cuda::Stream::from_raw(gpu.ctx, theirs) });
    let dtype = DType::BF16;
    let ours = [
        random(&[2, 32, 128], dtype, 1),
        random(&[512, 16, 8, 128], dtype, 2),
        random(&[512, 16, 8, 128], dtype, 3),
        Tensor::from_slice(&(0..512).collect::<Vec<i32>>(), &[2, 256], GPU).unwrap(),
        Tensor::from_slice(&[4096; 2], &[2], GPU).unwrap(),
    ];
    GPU.synchronize().unwrap();
    // Their memory: the same, but kept alive by them.
    let their = |tensor: &Tensor| {
        let memory = Foreign {
            address: tensor.view().address(),
            dtype: tensor.dtype(),
            layout: *tensor.layout(),
            device: GPU,
            stream: Some(stream.clone()),
            read_only: false,
        };
        // SAFETY: the tensors of this library outlive the test.
        unsafe { Tensor::from_foreign(memory, || ()) }.unwrap()
    };
    let spare = random(&[2, 32, 128], dtype, 4);
    let mut out = their(&spare);
    let result = random(&[2, 32, 128], dtype, 5);
    let mut out_of_theirs = their(&result);
    let [q, k, v, table, lens] = ours.each_ref().map(their);
    let alone = PagedAttention::new(&ours[0], &ours[1], &ours[2], &ours[3], &ours[4]).run().unwrap();
    driver.begin_capture(theirs);
    // The library's own tensors would not be kept alive by their graph.
    let refused = PagedAttention::new(&ours[0], &k, &v, &table, &lens).run_into(&mut out, &stream);
    let message = refused.unwrap_err().to_string();
    assert!(message.contains("paged_attention: argument `q`") && message.contains("captur"), "{message}");
    let refused = Tensor::empty_on(&[4], dtype, &stream).unwrap_err().to_string();
    assert!(refused.contains("captur"), "{refused}");
    PagedAttention::new(&q, &k, &v, &table, &lens).run_into(&mut out_of_theirs, &stream).unwrap();
    let graph = driver.end_capture(theirs);
    // Calls with a workspace in between must not touch the graph's.
    for _ in 0..3 {
        PagedAttention::new(&ours[0], &ours[1], &ours[2], &ours[3], &ours[4]).run().unwrap();
        driver.launch(graph, theirs);
    }
    stream.synchronize().unwrap();
    assert!(result.to_vec::<half::bf16>().unwrap() == alone.to_vec::<half::bf16>().unwrap());
    gpu.ctx.check().unwrap();
}

fn copies_between_tensors_of_the_device_go_direct() {
    let Some(gpu) = gpu() else { return };
    let x = random(&[300, 70], DType::F32, 1);
    let part = x.narrow(1, 3, 50).unwrap();
    let pinned = gpu.ctx.pinned_stats();
    let copy = part.to_device(GPU).unwrap();
    let after = gpu.ctx.pinned_stats();
    assert_eq!((after.hits, after.misses), (pinned.hits, pinned.misses), "nothing went through the host");
    assert!(!copy.shares_memory_with(&part));
    assert_eq!(copy.to_vec::<f32>().unwrap(), part.to_vec::<f32>().unwrap());
}

/// The few functions of the driver by which another library would capture.
struct Driver(libloading::Library);

impl Driver {
    fn load() -> Driver {
        // SAFETY: the driver's own library, which is loaded already.
        Driver(unsafe { libloading::Library::new("libcuda.so.1") }.expect("a device has a driver"))
    }

    fn call<F: Copy>(&self, name: &str) -> F {
        // SAFETY: the callers below name functions with their types.
        *unsafe { self.0.get::<F>(name.as_bytes()) }.expect("a function of every driver")
    }

    fn stream(&self) -> u64 {
        let create: unsafe extern "C" fn(*mut u64, u32) -> u32 = self.call("cuStreamCreate");
        let mut stream = 0;
        // SAFETY: the driver writes one handle; 1 asks for a stream of its own order.
        assert_eq!(unsafe { create(&mut stream, 1) }, 0);
        stream
    }

    fn begin_capture(&self, stream: u64) {
        let begin: unsafe extern "C" fn(u64, u32) -> u32 = self.call("cuStreamBeginCapture_v2");
        // SAFETY: a live stream; mode 0 is the strictest, and PyTorch's.
        assert_eq!(unsafe { begin(stream, 0) }, 0);
    }

    fn end_capture(&self, stream: u64) -> u64 {
        let end: unsafe extern "C" fn(u64, *mut u64) -> u32 = self.call("cuStreamEndCapture");
        let instantiate: unsafe extern "C" fn(*mut u64, u64, u64) -> u32 =
            self.call("cuGraphInstantiateWithFlags");
        let (mut graph, mut exec) = (0, 0);
        // SAFETY: the driver writes one handle each.
        assert_eq!(unsafe { end(stream, &mut graph) }, 0);
        // SAFETY: as above.
        assert_eq!(unsafe { instantiate(&mut exec, graph, 0) }, 0);
        exec
    }

    fn launch(&self, graph: u64, stream: u64) {
        let launch: unsafe extern "C" fn(u64, u64) -> u32 = self.call("cuGraphLaunch");
        // SAFETY: live handles.
        assert_eq!(unsafe { launch(graph, stream) }, 0);
    }
}
