//! What tests share: the device, which they have one at a time, and buffers with something in them.

use crate::harness::skip;
use std::sync::{Mutex, MutexGuard, PoisonError};
use warpsmith::cuda::{self, Context, DeviceBuffer, Stream};

/// The first device, for one test at a time: several read the statistics of the pools they share.
pub struct Gpu {
    pub ctx: &'static Context,
    _alone: MutexGuard<'static, ()>,
}

/// The device. Without one the test that asks for it counts as ignored.
pub fn gpu() -> Option<Gpu> {
    static ALONE: Mutex<()> = Mutex::new(());
    if cuda::device_count() == 0 {
        return skip("no GPU");
    }
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    Some(Gpu { ctx: Context::get(0).expect("the first device has a context"), _alone: alone })
}

/// The same if it is of the Hopper generation.
pub fn hopper() -> Option<Gpu> {
    let gpu = gpu()?;
    if gpu.ctx.info().arch() != 90 {
        return skip("no Hopper GPU");
    }
    Some(gpu)
}

/// Bytes that differ from place to place, also across chunks.
pub fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i ^ (i >> 8) ^ (i >> 16) ^ (i >> 22)) as u8).collect()
}

/// All bytes of a buffer.
pub fn read(buffer: &DeviceBuffer, stream: &Stream) -> Vec<u8> {
    let mut bytes = vec![0xee; buffer.len()];
    buffer.download(stream, 0, &mut bytes).unwrap();
    bytes
}

/// A new stream and two buffers on it.
pub fn stream_with_buffers(ctx: &'static Context, len: usize) -> (Stream, DeviceBuffer, DeviceBuffer) {
    let stream = Stream::new(ctx).unwrap();
    let (first, second) =
        (DeviceBuffer::alloc(&stream, len).unwrap(), DeviceBuffer::alloc(&stream, len).unwrap());
    (stream, first, second)
}
