//! Buffers of the device and of the host.

use crate::common::{gpu, pattern, read};
use warpsmith::Error;
use warpsmith::cuda::{self, DeviceBuffer, PinnedBuffer};

crate::harness::tests! {
    buffers_count_in_the_pool_and_trimming_returns_them;
    an_empty_buffer_holds_no_memory;
    pageable_copies_survive_every_chunk_edge;
    ranges_outside_a_buffer_are_refused;
    running_out_of_memory_is_typed_and_passes;
    pinned_memory_is_reused_after_the_device_is_done_with_it;
}

/// Pageable copies are staged in chunks of this size; sizes around it are where they go wrong.
const CHUNK: usize = 4 << 20;

fn buffers_count_in_the_pool_and_trimming_returns_them() {
    let Some(gpu) = gpu() else { return };
    // Much more than the workspaces of streams that other tests have left, and the pool's own granularity.
    const LEN: usize = 512 << 20;
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

fn an_empty_buffer_holds_no_memory() {
    let Some(gpu) = gpu() else { return };
    let stream = gpu.ctx.default_stream();
    let mut empty = DeviceBuffer::alloc(stream, 0).unwrap();
    assert_eq!((empty.ptr(), empty.len()), (0, 0));
    empty.upload(stream, 0, &[]).unwrap();
    empty.fill(stream, 1).unwrap();
    empty.download(stream, 0, &mut []).unwrap();
    assert!(matches!(empty.upload(stream, 0, &[1]), Err(Error::Argument { .. })));
}

fn pageable_copies_survive_every_chunk_edge() {
    let Some(gpu) = gpu() else { return };
    let stream = gpu.ctx.default_stream();
    for len in [1, 4095, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 3, 5 * CHUNK + 17] {
        let bytes = pattern(len);
        // One byte to each side shows writes outside the range.
        let mut buffer = DeviceBuffer::alloc(stream, len + 2).unwrap();
        buffer.fill(stream, 0xcc).unwrap();
        buffer.upload(stream, 1, &bytes).unwrap();
        let back = read(&buffer, stream);
        assert_eq!((back[0], back[len + 1]), (0xcc, 0xcc), "{len}");
        assert!(back[1..=len] == bytes[..], "{len} bytes came back changed");
    }
    gpu.ctx.check().unwrap();
}

fn ranges_outside_a_buffer_are_refused() {
    let Some(gpu) = gpu() else { return };
    let stream = gpu.ctx.default_stream();
    let mut buffer = DeviceBuffer::alloc(stream, 16).unwrap();
    for offset in [9, 17, usize::MAX] {
        assert!(matches!(buffer.upload(stream, offset, &[0; 8]), Err(Error::Argument { .. })), "{offset}");
        assert!(
            matches!(buffer.download(stream, offset, &mut [0; 8]), Err(Error::Argument { .. })),
            "{offset}"
        );
    }
    let longer = DeviceBuffer::alloc(stream, 17).unwrap();
    assert!(matches!(buffer.copy_from(stream, 0, &longer), Err(Error::Argument { .. })));
}

fn running_out_of_memory_is_typed_and_passes() {
    let Some(gpu) = gpu() else { return };
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
        let mut buffer = DeviceBuffer::alloc(stream, 1 << 20).unwrap();
        buffer.fill(stream, 7).unwrap();
        assert!(read(&buffer, stream).iter().all(|&byte| byte == 7));
    }
    gpu.ctx.check().unwrap();
}

fn pinned_memory_is_reused_after_the_device_is_done_with_it() {
    let Some(gpu) = gpu() else { return };
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
