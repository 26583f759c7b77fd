//! The memory behind tensors: ours, or somebody else's with a deleter.

mod host;

pub(crate) use host::{HostBuffer, out_of_memory as host_out_of_memory, room_for, zeroed};

#[cfg(feature = "cuda")]
use crate::cuda::{Access, Allocation, Capture};
use crate::device::{Device, Stream};
use crate::error::{Error, Result};
#[cfg(feature = "cuda")]
use std::sync::Arc;
use std::sync::Mutex;

/// Returns foreign memory to its owner.
pub(crate) type Deleter = Box<dyn FnOnce() + Send>;

/// Bytes on a device, shared by the tensors that are views of them.
pub(crate) struct Storage {
    memory: Memory,
    address: usize,
    len: usize,
    read_only: bool,
    constant: bool,
}

enum Memory {
    /// Held only for its memory.
    Host(#[allow(dead_code)] HostBuffer),
    /// Foreign host memory, whose owner is told when it is no longer used.
    Foreign(Mutex<Option<Deleter>>),
    #[cfg(feature = "cuda")]
    Cuda(Arc<Allocation>),
}

impl Storage {
    /// New memory; zeros on the host, undefined on a device.
    pub fn allocate(bytes: usize, stream: &Stream) -> Result<Storage> {
        let (memory, address) = match stream {
            Stream::Host => {
                let buffer = HostBuffer::new(bytes)?;
                let address = buffer.as_ptr() as usize;
                (Memory::Host(buffer), address)
            }
            #[cfg(feature = "cuda")]
            Stream::Cuda(stream) => {
                let allocation = Allocation::new(stream, bytes)?;
                let address = allocation.address();
                (Memory::Cuda(allocation), address)
            }
        };
        Ok(Storage { memory, address, len: bytes, read_only: false, constant: false })
    }

    /// Foreign memory. `deleter` is called exactly once, when no work uses it any more. On a GPU, `home` is the stream
    /// in whose order its owner makes and frees it.
    ///
    /// # Safety
    /// `address` must be `len` bytes of `device`'s memory until the deleter is called, written by nobody else unless
    /// ordered with the work given to streams, and not at all while it is `read_only` or on the host.
    pub unsafe fn foreign(
        address: usize,
        len: usize,
        device: Device,
        home: Option<&Stream>,
        read_only: bool,
        deleter: Deleter,
    ) -> Result<Storage> {
        let memory = match device {
            Device::Cpu => Memory::Foreign(Mutex::new(Some(deleter))),
            #[cfg(feature = "cuda")]
            Device::Cuda(ordinal) => {
                let context = crate::cuda::Context::get(ordinal)?;
                let home = match home {
                    Some(Stream::Cuda(stream)) => Some(stream.clone()),
                    _ => None,
                };
                // SAFETY: passed on.
                let allocation = unsafe { Allocation::foreign(context, address as u64, len, home, deleter) };
                Memory::Cuda(allocation)
            }
            #[cfg(not(feature = "cuda"))]
            Device::Cuda(_) => return Err(crate::device::no_cuda_feature()),
        };
        let _ = home;
        Ok(Storage { memory, address, len, read_only, constant: false })
    }

    /// Its first byte.
    pub fn address(&self) -> usize {
        self.address
    }

    /// Its size in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it must not be written.
    pub fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// Whether nothing that was given to a device can still write it.
    pub fn is_constant(&self) -> bool {
        self.constant
    }

    /// Waits for all work with the memory, and makes it constant for good. It must be ours, and no graph may use it.
    pub fn make_constant(&mut self) -> Result<()> {
        let refuse = |got: &str| {
            let expected = "memory of this library that no graph uses";
            Err(Error::parse("tensor to make constant", expected, got))
        };
        match &mut self.memory {
            Memory::Host(_) => {}
            Memory::Foreign(_) => return refuse("memory of somebody else"),
            #[cfg(feature = "cuda")]
            Memory::Cuda(allocation) if allocation.is_foreign() => return refuse("memory of somebody else"),
            #[cfg(feature = "cuda")]
            Memory::Cuda(allocation) => match Arc::get_mut(allocation) {
                Some(allocation) => allocation.wait_for_uses()?,
                None => return refuse("memory that a graph uses"),
            },
        }
        (self.read_only, self.constant) = (true, true);
        Ok(())
    }

    /// Where it is.
    pub fn device(&self) -> Device {
        match &self.memory {
            Memory::Host(_) | Memory::Foreign(_) => Device::Cpu,
            #[cfg(feature = "cuda")]
            Memory::Cuda(allocation) => Device::Cuda(allocation.context().ordinal()),
        }
    }

    /// The memory of a GPU.
    #[cfg(feature = "cuda")]
    pub fn allocation(&self) -> Option<&Arc<Allocation>> {
        match &self.memory {
            Memory::Cuda(allocation) => Some(allocation),
            _ => None,
        }
    }

    /// The stream whose work with the memory came last, if that is known: copies on it wait for nothing else.
    #[cfg(feature = "cuda")]
    pub fn last_stream(&self) -> Option<crate::cuda::Stream> {
        self.allocation()?.last_stream()
    }

    /// Called before work that uses the memory is enqueued on `stream`: makes the stream wait for what must come first.
    #[cfg(feature = "cuda")]
    pub fn order(&self, stream: &crate::cuda::Stream, access: Access, capture: Capture) -> Result<()> {
        self.allocation().map_or(Ok(()), |memory| memory.order_and_keep(stream, access, capture))
    }

    /// Called after the work was enqueued, even if only part of it could be.
    #[cfg(feature = "cuda")]
    pub fn note(&self, stream: &crate::cuda::Stream, access: Access) {
        if let Some(memory) = self.allocation() {
            memory.note(stream, access);
        }
    }

    /// Gives `stream` work with the memory of a GPU, in order with all other uses of it.
    #[cfg(feature = "cuda")]
    pub fn with<R>(
        &self,
        stream: &crate::cuda::Stream,
        access: Access,
        work: impl FnOnce() -> Result<R>,
    ) -> Result<R> {
        self.order(stream, access, stream.capture()?)?;
        let result = work();
        self.note(stream, access);
        result
    }

    /// Sets every byte.
    ///
    /// # Safety
    /// Nobody else may use the memory meanwhile.
    pub unsafe fn fill(&self, byte: u8, stream: &Stream) -> Result<()> {
        match stream {
            Stream::Host if self.device() == Device::Cpu => {
                // SAFETY: the bytes are ours, and the caller says that nobody else uses them.
                unsafe { (self.address as *mut u8).write_bytes(byte, self.len) };
                Ok(())
            }
            #[cfg(feature = "cuda")]
            Stream::Cuda(stream) if self.device() == Device::Cuda(stream.context().ordinal()) => {
                self.with(stream, Access::Write, || {
                    // SAFETY: the memory's own bytes, and the use is noted.
                    unsafe { crate::cuda::fill_u8(stream, self.address as u64, byte, self.len) }
                })
            }
            other => Err(wrong_stream(self.device(), other)),
        }
    }

    /// Copies host bytes into the memory, `offset` bytes from its start. The host bytes are free when it returns.
    ///
    /// # Safety
    /// Nobody else may use that part of the memory meanwhile.
    pub unsafe fn upload(&self, offset: usize, bytes: &[u8], stream: &Stream) -> Result<()> {
        assert!(offset.checked_add(bytes.len()).is_some_and(|end| end <= self.len), "upload past the end");
        match stream {
            Stream::Host if self.device() == Device::Cpu => {
                let target = (self.address + offset) as *mut u8;
                // SAFETY: the range was checked above, and the caller says that nobody else uses it.
                unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), target, bytes.len()) };
                Ok(())
            }
            #[cfg(feature = "cuda")]
            Stream::Cuda(stream) if self.device() == Device::Cuda(stream.context().ordinal()) => {
                self.with(stream, Access::Write, || {
                    // SAFETY: the range was checked above, and the use is noted.
                    unsafe { crate::cuda::upload(stream, (self.address + offset) as u64, bytes) }
                })
            }
            other => Err(wrong_stream(self.device(), other)),
        }
    }
}

impl Drop for Storage {
    fn drop(&mut self) {
        if let Memory::Foreign(deleter) = &mut self.memory
            && let Some(deleter) = deleter.get_mut().unwrap_or_else(|e| e.into_inner()).take()
        {
            deleter();
        }
    }
}

fn wrong_stream(device: Device, stream: &Stream) -> Error {
    Error::parse("stream", format!("a stream of {device}, where the memory is"), stream.device().to_string())
}
