//! Copies between devices, and to the host without waiting.

use super::storage::{room_for, zeroed};
use super::{DType, Element, Tensor, TensorView};
use crate::device::Device;
#[cfg(feature = "cuda")]
use crate::device::Stream;
use crate::error::{Error, Result};

impl Tensor {
    /// A copy on another device, or the same. Between GPUs it goes direct, in the order of the target's default stream.
    pub fn to_device(&self, device: Device) -> Result<Tensor> {
        #[cfg(feature = "cuda")]
        if let (Device::Cuda(_), Stream::Cuda(stream)) = (self.device(), device.default_stream()?) {
            use crate::cuda::Access;
            let copy = Tensor::with_layout(self.layout, self.dtype, &Stream::Cuda(stream.clone()))?;
            let bytes = self.layout.span() * self.dtype.size();
            let (to, from) = (copy.view().address() as u64, self.view().address() as u64);
            self.storage.with(&stream, Access::Read, || {
                copy.storage.with(&stream, Access::Write, || {
                    // SAFETY: both memories hold the layout's span, and both uses are noted.
                    unsafe { crate::cuda::copy_d2d(&stream, to, from, bytes) }
                })
            })?;
            return Ok(copy);
        }
        Tensor::from_bytes(&self.view().to_bytes()?, self.shape(), self.dtype, device)
    }

    /// Starts a copy of the elements to the host, in the order of `stream`, and returns at once.
    ///
    /// ```
    /// use warpsmith::{Device, Tensor};
    /// let x = Tensor::from_slice(&[1f32, 2.0], &[2], Device::best())?;
    /// let copy = x.download(&x.device().default_stream()?)?;
    /// // Other work ...
    /// assert_eq!(copy.wait::<f32>()?, [1.0, 2.0]);
    /// # Ok::<(), warpsmith::Error>(())
    /// ```
    ///
    /// # Errors
    /// If the tensor is not contiguous, or the stream one of another device or under capture.
    pub fn download(&self, stream: &crate::device::Stream) -> Result<Download> {
        if !self.layout.is_contiguous() {
            let got = format!("{:?}", self.layout);
            return Err(Error::argument("download", "tensor", "a contiguous tensor", got));
        }
        let source = match (self.device(), stream) {
            (Device::Cpu, _) => Source::Here(self.view().to_bytes()?),
            #[cfg(feature = "cuda")]
            (Device::Cuda(_), Stream::Cuda(stream)) => {
                use crate::cuda::{Access, Capture, Event, PinnedBuffer, download_async};
                if stream.capture()? != Capture::None {
                    let expected = "a stream that is not being captured, since the bytes are asked for once";
                    return Err(Error::argument("download", "stream", expected, "a capturing stream"));
                }
                let bytes = self.layout.numel() * self.dtype.size();
                let buffer = PinnedBuffer::alloc(stream.context(), bytes)?;
                let done = Event::new(stream.context(), false)?;
                let address = self.view().address() as u64;
                self.storage.with(stream, Access::Read, || {
                    // SAFETY: the elements lie there, the use is noted, and the buffer is not read before `done`.
                    unsafe { download_async(stream, address, &buffer, 0..bytes) }
                })?;
                done.record(stream)?;
                Source::Coming(buffer, done)
            }
            #[cfg(feature = "cuda")]
            (device, crate::device::Stream::Host) => {
                return Err(Error::argument(
                    "download",
                    "stream",
                    format!("a stream of {device}"),
                    "the host's",
                ));
            }
            #[cfg(not(feature = "cuda"))]
            (Device::Cuda(_), _) => return Err(crate::device::no_cuda_feature()),
        };
        Ok(Download { source, dtype: self.dtype })
    }
}

/// A copy of a tensor's elements that is on its way to the host.
pub struct Download {
    source: Source,
    dtype: DType,
}

enum Source {
    Here(Vec<u8>),
    #[cfg(feature = "cuda")]
    Coming(crate::cuda::PinnedBuffer, crate::cuda::Event),
}

impl Download {
    /// Whether waiting would return at once.
    pub fn is_done(&self) -> Result<bool> {
        match &self.source {
            Source::Here(_) => Ok(true),
            #[cfg(feature = "cuda")]
            Source::Coming(_, done) => done.query(),
        }
    }

    /// Waits for the copy, and for nothing else. The dtype must be `T`'s.
    pub fn wait<T: Element>(self) -> Result<Vec<T>> {
        if T::DTYPE != self.dtype {
            return Err(Error::parse("tensor elements", self.dtype.name(), T::DTYPE.name()));
        }
        match &self.source {
            Source::Here(bytes) => elements(bytes),
            #[cfg(feature = "cuda")]
            Source::Coming(buffer, done) => {
                done.synchronize()?;
                elements(buffer.as_slice())
            }
        }
    }
}

/// Raw bytes as elements.
fn elements<T: Element>(bytes: &[u8]) -> Result<Vec<T>> {
    let count = bytes.len() / size_of::<T>();
    let mut out = room_for::<T>(count)?;
    // SAFETY: `out` has room for `count` elements, the byte copy initialises them all, and every bit pattern is valid for
    // an `Element`.
    unsafe {
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), out.as_mut_ptr().cast::<u8>(), count * size_of::<T>());
        out.set_len(count);
    }
    Ok(out)
}

impl TensorView<'_> {
    /// The elements in row-major order as raw bytes, fetched from the device if needed. Waits for the work that makes them,
    /// and for no other.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        let size = self.dtype.size();
        let mut raw = zeroed::<u8>(self.layout.span() * size)?;
        self.fetch(&mut raw)?;
        if self.layout.is_contiguous() {
            return Ok(raw);
        }
        let mut out = room_for(self.layout.numel() * size)?;
        for i in 0..self.layout.numel() {
            let at = self.layout.offset_of(i) * size;
            out.extend_from_slice(&raw[at..at + size]);
        }
        Ok(out)
    }

    /// Copies everything from the first to the last element.
    fn fetch(&self, out: &mut [u8]) -> Result<()> {
        if out.is_empty() {
            return Ok(());
        }
        match self.device {
            Device::Cpu => {
                // SAFETY: the view's own span, and `out` is exclusively borrowed.
                unsafe {
                    std::ptr::copy_nonoverlapping(self.address as *const u8, out.as_mut_ptr(), out.len())
                };
                Ok(())
            }
            #[cfg(feature = "cuda")]
            Device::Cuda(ordinal) => {
                use crate::cuda::{Access, Context, download};
                let context = Context::get(ordinal)?;
                let last = self.storage.and_then(|storage| storage.last_stream());
                let stream = last.as_ref().unwrap_or(context.default_stream());
                // SAFETY: the view's own span. Views with a storage are ordered after its writers; whoever made one without
                // promised that nothing writes.
                let mut copy = || unsafe { download(stream, self.address as u64, out) };
                match self.storage {
                    Some(storage) => storage.with(stream, Access::Read, copy),
                    None => copy(),
                }
            }
            #[cfg(not(feature = "cuda"))]
            Device::Cuda(_) => Err(crate::device::no_cuda_feature()),
        }
    }

    /// The elements in row-major order. The dtype must be `T`'s.
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        if T::DTYPE != self.dtype {
            return Err(Error::parse("tensor elements", self.dtype.name(), T::DTYPE.name()));
        }
        elements(&self.to_bytes()?)
    }

    /// The elements in row-major order, widened.
    pub fn to_f64(&self) -> Result<Vec<f64>> {
        let mut out = room_for(self.layout.numel())?;
        out.extend(self.to_bytes()?.chunks_exact(self.dtype.size()).map(|b| self.dtype.read(b)));
        Ok(out)
    }
}
