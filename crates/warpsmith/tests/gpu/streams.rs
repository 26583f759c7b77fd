//! Streams and events.

use crate::common::{gpu, pattern, read, stream_with_buffers};
use warpsmith::Error;
use warpsmith::cuda::{DeviceBuffer, Event, Graph, Stream};

crate::harness::tests! {
    events_order_and_time;
    a_buffer_is_freed_after_the_other_streams_that_use_it;
    foreign_and_legacy_streams_work;
    all_work_of_a_device_can_be_waited_for;
}

fn events_order_and_time() {
    let Some(gpu) = gpu() else { return };
    let (stream, mut buffer, _) = stream_with_buffers(gpu.ctx, 256 << 20);
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

fn a_buffer_is_freed_after_the_other_streams_that_use_it() {
    let Some(gpu) = gpu() else { return };
    const LEN: usize = 128 << 20;
    let (first, second) = (Stream::new(gpu.ctx).unwrap(), Stream::new(gpu.ctx).unwrap());
    for round in 0..4u8 {
        let mut used = DeviceBuffer::alloc(&first, LEN).unwrap();
        for _ in 0..8 {
            used.fill(&second, 0xaa).unwrap();
        }
        drop(used);
        // Very likely the same memory: the fills above must not land in it.
        let mut next = DeviceBuffer::alloc(&first, LEN).unwrap();
        next.fill(&first, round).unwrap();
        second.synchronize().unwrap();
        assert!(read(&next, &first).iter().all(|&byte| byte == round), "round {round}");
    }
    gpu.ctx.check().unwrap();
}

fn foreign_and_legacy_streams_work() {
    let Some(gpu) = gpu() else { return };
    let owner = Stream::new(gpu.ctx).unwrap();
    // SAFETY: `owner` outlives the borrowed handle and the buffers on it.
    let foreign = unsafe { Stream::from_raw(gpu.ctx, owner.raw()) };
    assert_eq!(foreign, owner);
    let legacy = Stream::legacy(gpu.ctx);
    for stream in [&foreign, &legacy] {
        let mut buffer = DeviceBuffer::alloc(stream, 1000).unwrap();
        let bytes = pattern(1000);
        buffer.upload(stream, 0, &bytes).unwrap();
        assert_eq!(read(&buffer, stream), bytes);
    }
    drop(foreign);
    owner.synchronize().unwrap();
    assert!(matches!(Graph::capture(&legacy, |_| Ok(())), Err(Error::Argument { .. })));
    gpu.ctx.check().unwrap();
}

fn all_work_of_a_device_can_be_waited_for() {
    let Some(gpu) = gpu() else { return };
    let ours = Stream::new(gpu.ctx).unwrap();
    let (other, mut buffer, _) = stream_with_buffers(gpu.ctx, 256 << 20);
    let (done, mark) = (Event::new(gpu.ctx, false).unwrap(), Event::new(gpu.ctx, false).unwrap());
    for _ in 0..200 {
        buffer.fill(&other, 1).unwrap();
    }
    done.record(&other).unwrap();
    ours.wait_for_device().unwrap();
    mark.record(&ours).unwrap();
    mark.synchronize().unwrap();
    assert!(done.query().unwrap(), "the other stream's work came first");
    gpu.ctx.check().unwrap();
}
