//! The memory behind owned tensors.

mod host;

pub(crate) use host::{HostBuffer, out_of_memory as host_out_of_memory};

use crate::device::{Device, Stream};
use crate::error::Result;

/// Owned bytes on a device.
pub(crate) enum Storage {
    Host(HostBuffer),
    #[cfg(feature = "cuda")]
    Cuda(crate::cuda::DeviceBuffer),
}

impl Storage {
    pub fn allocate(bytes: usize, stream: &Stream) -> Result<Storage> {
        match stream {
            Stream::Host => Ok(Storage::Host(HostBuffer::new(bytes)?)),
            #[cfg(feature = "cuda")]
            Stream::Cuda(stream) => Ok(Storage::Cuda(crate::cuda::DeviceBuffer::alloc(stream, bytes)?)),
        }
    }

    pub fn address(&self) -> usize {
        match self {
            Storage::Host(buffer) => buffer.as_ptr() as usize,
            #[cfg(feature = "cuda")]
            Storage::Cuda(buffer) => buffer.ptr() as usize,
        }
    }

    pub fn len(&self) -> usize {
        match self {
            Storage::Host(buffer) => buffer.len(),
            #[cfg(feature = "cuda")]
            Storage::Cuda(buffer) => buffer.len(),
        }
    }

    pub fn device(&self) -> Device {
        match self {
            Storage::Host(_) => Device::Cpu,
            #[cfg(feature = "cuda")]
            Storage::Cuda(buffer) => Device::Cuda(buffer.context().ordinal()),
        }
    }

    pub fn fill(&mut self, byte: u8, stream: &Stream) -> Result<()> {
        match (self, stream) {
            (Storage::Host(buffer), _) => {
                // SAFETY: the buffer owns as many bytes.
                unsafe { buffer.as_ptr().write_bytes(byte, buffer.len()) };
                Ok(())
            }
            #[cfg(feature = "cuda")]
            (Storage::Cuda(buffer), Stream::Cuda(stream)) => buffer.fill(stream, byte),
            #[cfg(feature = "cuda")]
            (Storage::Cuda(_), Stream::Host) => Err(host_stream()),
        }
    }

    /// Copies host bytes into the storage, `offset` bytes from its start; done when it returns.
    pub fn upload(&mut self, offset: usize, bytes: &[u8], stream: &Stream) -> Result<()> {
        assert!(offset.checked_add(bytes.len()).is_some_and(|end| end <= self.len()), "upload past the end");
        match (self, stream) {
            (Storage::Host(buffer), _) => {
                // SAFETY: the range was checked above and `bytes` cannot overlap exclusively borrowed memory.
                unsafe {
                    std::ptr::copy_nonoverlapping(bytes.as_ptr(), buffer.as_ptr().add(offset), bytes.len())
                };
                Ok(())
            }
            #[cfg(feature = "cuda")]
            (Storage::Cuda(buffer), Stream::Cuda(stream)) => buffer.upload(stream, offset, bytes),
            #[cfg(feature = "cuda")]
            (Storage::Cuda(_), Stream::Host) => Err(host_stream()),
        }
    }

    /// Remembers that `stream` uses the memory, so that it is not freed before that work is done.
    pub fn note_use(&self, stream: &Stream) -> Result<()> {
        match (self, stream) {
            #[cfg(feature = "cuda")]
            (Storage::Cuda(buffer), Stream::Cuda(stream)) => buffer.note_use(stream),
            _ => Ok(()),
        }
    }
}

#[cfg(feature = "cuda")]
fn host_stream() -> crate::Error {
    crate::Error::parse("stream", "a CUDA stream for CUDA memory", "the host stream")
}

/// Copies device or host memory into `out`; done when it returns.
pub(crate) fn download(device: Device, address: usize, out: &mut [u8]) -> Result<()> {
    if out.is_empty() {
        return Ok(());
    }
    match device {
        Device::Cpu => {
            // SAFETY: callers pass the address and span of a live view; `out` is exclusively borrowed.
            unsafe { std::ptr::copy_nonoverlapping(address as *const u8, out.as_mut_ptr(), out.len()) };
            Ok(())
        }
        #[cfg(feature = "cuda")]
        Device::Cuda(ordinal) => {
            let context = crate::cuda::Context::get(ordinal)?;
            context.synchronize()?;
            // SAFETY: callers pass the address and span of a live view, and the device is idle.
            unsafe { crate::cuda::download(context.default_stream(), address as u64, out) }
        }
        #[cfg(not(feature = "cuda"))]
        Device::Cuda(_) => Err(crate::device::no_cuda_feature()),
    }
}
