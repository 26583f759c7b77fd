//! Copies between host and device, fills, and the speed of copies.

use super::context::{Context, cu};
use super::memory::DeviceBuffer;
use super::order::Access;
use super::pinned::PinnedBuffer;
use super::stream::{Event, Stream};
use crate::error::{Error, Result};
use std::ops::Range;

/// Pageable memory is staged through page-locked chunks of this size, two of them: while the device copies one,
/// the host fills the other.
const CHUNK: usize = 4 << 20;

/// Copies host memory to device address `dst`, in the order of `stream`. The host memory may be changed or
/// freed as soon as this returns. During a capture, the graph keeps a copy of the bytes and uploads them at
/// every replay.
///
/// # Safety
/// `dst` must be `src.len()` bytes of device memory of the stream's context, alive and used by nothing else
/// until the stream has done the copy.
pub unsafe fn upload(stream: &Stream, dst: u64, src: &[u8]) -> Result<()> {
    if src.is_empty() {
        return Ok(());
    }
    let ctx = stream.context();
    // A graph replays the copy later, so each byte needs a place of its own that lasts.
    let chunk = match stream.capture_id()? {
        None => CHUNK.min(src.len()),
        Some(id) if ctx.captures.is_open(id) => src.len(),
        Some(_) => {
            let expected =
                "a stream that no other library is capturing, since its graph would not keep the bytes";
            return Err(Error::argument("upload", "stream", expected, "such a stream"));
        }
    };
    let mut staging: [Option<(PinnedBuffer, Event)>; 2] = [None, None];
    for (i, part) in src.chunks(chunk).enumerate() {
        let slot = &mut staging[i % 2];
        let (mut buffer, done) = match slot.take() {
            Some((buffer, done)) => {
                done.synchronize()?;
                (buffer, done)
            }
            None => (PinnedBuffer::alloc(ctx, chunk)?, Event::new(ctx, false)?),
        };
        buffer.as_mut_slice()[..part.len()].copy_from_slice(part);
        // SAFETY: the caller vouches for `dst`; the buffer is not written before `done`, and when dropped not
        // reused before the stream has passed.
        unsafe { upload_async(stream, dst + (i * chunk) as u64, &buffer, 0..part.len()) }?;
        done.record(stream)?;
        *slot = Some((buffer, done));
    }
    Ok(())
}

/// Copies device memory at `src` to host memory and waits for it, and so for all the stream was given before.
///
/// # Safety
/// `src` must be `dst.len()` bytes of device memory of the stream's context, alive during the call.
pub unsafe fn download(stream: &Stream, src: u64, dst: &mut [u8]) -> Result<()> {
    if stream.is_capturing()? {
        let expected = "a stream that is not being captured, since the host waits for it";
        return Err(Error::argument("download", "stream", expected, "a capturing stream"));
    }
    let ctx = stream.context();
    let chunk = CHUNK.min(dst.len()).max(1);
    // One part is in flight while the one before it is copied out.
    let mut flying: Option<(PinnedBuffer, Event, &mut [u8])> = None;
    let mut spare: Option<(PinnedBuffer, Event)> = None;
    let land = |(buffer, done, part): (PinnedBuffer, Event, &mut [u8])| -> Result<(PinnedBuffer, Event)> {
        done.synchronize()?;
        part.copy_from_slice(&buffer.as_slice()[..part.len()]);
        Ok((buffer, done))
    };
    for (i, part) in dst.chunks_mut(chunk).enumerate() {
        let (buffer, done) = match spare.take() {
            Some(spare) => spare,
            None => (PinnedBuffer::alloc(ctx, chunk)?, Event::new(ctx, false)?),
        };
        // SAFETY: the caller vouches for `src`; the buffer is not read before `done`.
        unsafe { download_async(stream, src + (i * chunk) as u64, &buffer, 0..part.len()) }?;
        done.record(stream)?;
        if let Some(landing) = flying.replace((buffer, done, part)) {
            spare = Some(land(landing)?);
        }
    }
    match flying {
        Some(landing) => land(landing).map(|_| ()),
        None => stream.synchronize(),
    }
}

/// Copies a range of a page-locked buffer to device address `dst`, in the order of `stream`. Returns at once.
///
/// # Safety
/// As [`upload`] for `dst`; and the range must not be written before the stream has done the copy (or, if the
/// stream is being captured, while the graph runs). Dropping the buffer is safe.
pub unsafe fn upload_async(stream: &Stream, dst: u64, src: &PinnedBuffer, range: Range<usize>) -> Result<()> {
    let bytes = check_range("upload_async", src.len(), &range)?;
    src.note_use(stream)?;
    // SAFETY: the range lies in the buffer, which lives until the stream has passed; the caller vouches for `dst`.
    unsafe {
        let from = src.address().cast::<u8>().add(range.start).cast_const().cast();
        cu!(stream.context(), cuMemcpyHtoDAsync_v2(dst, from, bytes, stream.handle()))
    }
}

/// Copies device memory at `src` to a range of a page-locked buffer, in the order of `stream`. Returns at once.
///
/// # Safety
/// As [`download`] for `src`, until the stream has done the copy; and the range must neither be read nor written
/// before then (or, if the stream is being captured, while the graph runs). Dropping the buffer is safe.
pub unsafe fn download_async(
    stream: &Stream,
    src: u64,
    dst: &PinnedBuffer,
    range: Range<usize>,
) -> Result<()> {
    let bytes = check_range("download_async", dst.len(), &range)?;
    dst.note_use(stream)?;
    // SAFETY: the range lies in the buffer, which lives until the stream has passed; the caller vouches for `src`.
    unsafe {
        let to = dst.address().cast::<u8>().add(range.start).cast();
        cu!(stream.context(), cuMemcpyDtoHAsync_v2(to, src, bytes, stream.handle()))
    }
}

/// Copies `bytes` from one device address to another, in the order of `stream`.
///
/// # Safety
/// Both must be `bytes` bytes of device memory, not overlapping, alive until the stream has done the copy.
pub unsafe fn copy_d2d(stream: &Stream, dst: u64, src: u64, bytes: usize) -> Result<()> {
    if bytes == 0 {
        return Ok(());
    }
    // SAFETY: the caller vouches for both addresses.
    unsafe { cu!(stream.context(), cuMemcpyDtoDAsync_v2(dst, src, bytes, stream.handle())) }
}

/// Sets `count` bytes at `dst` to `value`, in the order of `stream`.
///
/// # Safety
/// `dst` must be that many bytes of device memory, alive until the stream has done it.
pub unsafe fn fill_u8(stream: &Stream, dst: u64, value: u8, count: usize) -> Result<()> {
    if count == 0 {
        return Ok(());
    }
    // SAFETY: the caller vouches for the address.
    unsafe { cu!(stream.context(), cuMemsetD8Async(dst, value, count, stream.handle())) }
}

/// Sets `count` 32-bit words at `dst`, which must be aligned to 4, to `value`, in the order of `stream`.
///
/// # Safety
/// `dst` must be that many words of device memory, alive until the stream has done it.
pub unsafe fn fill_u32(stream: &Stream, dst: u64, value: u32, count: usize) -> Result<()> {
    if count == 0 {
        return Ok(());
    }
    // SAFETY: the caller vouches for the address.
    unsafe { cu!(stream.context(), cuMemsetD32Async(dst, value, count, stream.handle())) }
}

impl DeviceBuffer {
    /// Writes `src` at byte `offset`, in the order of `stream`; see [`upload`].
    pub fn upload(&mut self, stream: &Stream, offset: usize, src: &[u8]) -> Result<()> {
        check_range("DeviceBuffer::upload", self.len(), &(offset..offset.saturating_add(src.len())))?;
        // SAFETY: the range was checked, and the use is noted.
        self.with(stream, Access::Write, || unsafe { upload(stream, self.ptr() + offset as u64, src) })
    }

    /// Reads from byte `offset` into `dst` and waits for it; see [`download`].
    pub fn download(&self, stream: &Stream, offset: usize, dst: &mut [u8]) -> Result<()> {
        check_range("DeviceBuffer::download", self.len(), &(offset..offset.saturating_add(dst.len())))?;
        // SAFETY: as above.
        self.with(stream, Access::Read, || unsafe { download(stream, self.ptr() + offset as u64, dst) })
    }

    /// Copies all of `src` to byte `offset`, in the order of `stream`.
    pub fn copy_from(&mut self, stream: &Stream, offset: usize, src: &DeviceBuffer) -> Result<()> {
        check_range("DeviceBuffer::copy_from", self.len(), &(offset..offset.saturating_add(src.len())))?;
        self.with(stream, Access::Write, || {
            src.with(stream, Access::Read, || {
                // SAFETY: the range was checked, two buffers do not overlap, and both uses are noted.
                unsafe { copy_d2d(stream, self.ptr() + offset as u64, src.ptr(), src.len()) }
            })
        })
    }

    /// Sets every byte to `value`, in the order of `stream`.
    pub fn fill(&mut self, stream: &Stream, value: u8) -> Result<()> {
        // SAFETY: all of our memory, and the use is noted.
        self.with(stream, Access::Write, || unsafe { fill_u8(stream, self.ptr(), value, self.len()) })
    }
}

/// The length of `range`, if it lies in a buffer of `len` bytes.
fn check_range(op: &'static str, len: usize, range: &Range<usize>) -> Result<usize> {
    if range.start > range.end || range.end > len {
        let (expected, got) = (format!("a range in 0..{len}"), format!("{range:?}"));
        return Err(Error::argument(op, "range", expected, got));
    }
    Ok(range.end - range.start)
}

/// The device's copy speed in GB/s (10^9 bytes per second, counting bytes read and bytes written), as the median
/// of 20 copies of `bytes` bytes. Use several times the L2 cache to measure memory.
pub fn measure_copy(ctx: &'static Context, bytes: usize) -> Result<f64> {
    const WARM_UP: usize = 3;
    const REPETITIONS: usize = 20;
    if bytes == 0 {
        return Err(Error::argument("measure_copy", "bytes", "at least 1", "0"));
    }
    let stream = Stream::new(ctx)?;
    let (mut from, mut to) = (DeviceBuffer::alloc(&stream, bytes)?, DeviceBuffer::alloc(&stream, bytes)?);
    from.fill(&stream, 0x5a)?;
    let mut marks = Vec::new();
    for repetition in 0..WARM_UP + REPETITIONS {
        let (start, end) = (Event::new(ctx, true)?, Event::new(ctx, true)?);
        start.record(&stream)?;
        to.copy_from(&stream, 0, &from)?;
        end.record(&stream)?;
        if repetition >= WARM_UP {
            marks.push((start, end));
        }
    }
    stream.synchronize()?;
    let mut times = Vec::new();
    for (start, end) in &marks {
        times.push(Event::elapsed_ms(start, end)?);
    }
    times.sort_by(f32::total_cmp);
    let median = f64::from(times[REPETITIONS / 2 - 1] + times[REPETITIONS / 2]) / 2.0;
    Ok(2.0 * bytes as f64 / (median * 1e6))
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;

    #[test]
    fn ranges_outside_the_buffer_are_refused() {
        assert_eq!(check_range("t", 10, &(3..10)).unwrap(), 7);
        assert_eq!(check_range("t", 10, &(10..10)).unwrap(), 0);
        for range in [Range { start: 4, end: 3 }, 0..11, 11..11, usize::MAX..usize::MAX] {
            let error = check_range("t", 10, &range).unwrap_err();
            assert!(error.to_string().contains("0..10"), "{error}");
        }
    }
}
