//! Graphs that replay what was captured.

use crate::common::{gpu, read, stream_with_buffers};
use warpsmith::cuda::{DeviceBuffer, Graph};
use warpsmith::{Error, Result};

crate::harness::tests! {
    a_graph_replays_fills_copies_and_uploads;
    a_graph_keeps_the_memory_it_uses;
    a_failed_capture_leaves_the_stream_usable;
}

fn a_graph_replays_fills_copies_and_uploads() {
    let Some(gpu) = gpu() else { return };
    let (stream, mut first, mut second) = stream_with_buffers(gpu.ctx, 4096);
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

fn a_graph_keeps_the_memory_it_uses() {
    let Some(gpu) = gpu() else { return };
    const LEN: usize = 32 << 20;
    let (stream, before, mut result) = stream_with_buffers(gpu.ctx, LEN);
    let other = DeviceBuffer::alloc(&stream, LEN).unwrap();
    let mut before = Some(before);
    let mut inside = None;
    let graph = Graph::capture(&stream, |stream| {
        let mut scratch = DeviceBuffer::alloc(stream, LEN)?;
        scratch.fill(stream, 3)?;
        let mut dropped = before.take().expect("called once");
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
    let mut fresh: Vec<_> = (0..4).map(|_| DeviceBuffer::alloc(&stream, LEN).unwrap()).collect();
    for buffer in &mut fresh {
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

fn a_failed_capture_leaves_the_stream_usable() {
    let Some(gpu) = gpu() else { return };
    let (stream, mut buffer, _) = stream_with_buffers(gpu.ctx, 4096);
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
