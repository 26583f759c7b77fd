//! Where a call runs: the CPU, or PyTorch's current stream of a GPU.

use super::shim::{Shim, succeeded};
use super::tensor::{Owned, dtype_code};
use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, Ordering};
use warpsmith::{DType, Device, Error, Result, Stream, TensorViewMut};

/// A device that is PyTorch's current one while this lives, and the stream to work on.
pub struct Place {
    device: Device,
    stream: Stream,
    guard: Option<(&'static Shim, *mut c_void)>,
}

// SAFETY: what can be done with a shared place is to read its device and its stream; the guard is touched when it is dropped.
unsafe impl Sync for Place {}

impl Place {
    /// Enters a device.
    pub fn enter(shim: &'static Shim, device: Device) -> Result<Place> {
        let Device::Cuda(ordinal) = device else {
            return Ok(Place { device, stream: Stream::Host, guard: None });
        };
        refuse_after_fork(device)?;
        let cuda = shim.cuda.as_ref().ok_or_else(|| Error::Unavailable {
            what: "PyTorch's current CUDA stream".into(),
            why: "libtorch_cuda has no stable interface for it".into(),
            fix: "Install PyTorch 2.9 or later with CUDA".into(),
        })?;
        let index = ordinal as i32;
        let (mut guard, mut stream) = (std::ptr::null_mut(), std::ptr::null_mut());
        // The library makes the context of the tensors' device current; the guard restores the caller's.
        // SAFETY: the device is that of a tensor, so it exists.
        succeeded("the device of a call", unsafe { (cuda.create_guard)(index, &mut guard) })?;
        let mut place = Place { device, stream: Stream::Host, guard: Some((shim, guard)) };
        // SAFETY: as above.
        succeeded("the current stream", unsafe { (cuda.current_stream)(index, &mut stream) })?;
        let context = warpsmith::cuda::Context::get(ordinal)?;
        // SAFETY: a stream of the device's primary context, which is the library's too. PyTorch's streams live as long as the
        // process; one of another owner is kept by that owner while it is current.
        let stream = unsafe { warpsmith::cuda::Stream::from_raw(context, stream as u64) };
        place.stream = Stream::Cuda(stream);
        Ok(place)
    }

    /// The device.
    pub fn device(&self) -> Device {
        self.device
    }

    /// The stream.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// The stream, on a GPU.
    pub fn cuda_stream(&self) -> Result<&warpsmith::cuda::Stream> {
        match &self.stream {
            Stream::Cuda(stream) => Ok(stream),
            Stream::Host => Err(Error::parse("stream", "one of a GPU", "the host")),
        }
    }

    /// The context of the stream, on a GPU.
    pub fn context(&self) -> Result<&'static warpsmith::cuda::Context> {
        Ok(self.cuda_stream()?.context())
    }

    /// Fills new memory with zeros.
    pub fn clear(&self, memory: &TensorViewMut<'_>) -> Result<()> {
        let range = memory.as_view().byte_range();
        match &self.stream {
            Stream::Host if range.is_empty() => Ok(()),
            Stream::Host => {
                // SAFETY: the memory is the caller's alone, and of this length.
                unsafe { (range.start as *mut u8).write_bytes(0, range.len()) };
                Ok(())
            }
            // SAFETY: as above, in the order of the stream.
            Stream::Cuda(stream) => unsafe {
                warpsmith::cuda::fill_u8(stream, range.start as u64, 0, range.len())
            },
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Some((shim, guard)) = self.guard
            && let Some(cuda) = &shim.cuda
        {
            // SAFETY: made by `create_guard`, and deleted once.
            unsafe { (cuda.delete_guard)(guard) };
        }
    }
}

/// Memory of PyTorch's for the time of a call: on a GPU it is given back in the order of the stream, and while that is captured it
/// belongs to the graph.
pub struct Workspace(Owned);

impl Workspace {
    /// So many bytes, with arbitrary content.
    pub fn new(shim: &'static Shim, place: &Place, bytes: usize) -> Result<Workspace> {
        let (kind, index) = codes(place.device());
        let mut handle = std::ptr::null_mut();
        // SAFETY: the arrays hold a number for the one dimension.
        let code = unsafe {
            (shim.empty_strided)(1, &(bytes as i64), &1, dtype_code(DType::U8), kind, index, &mut handle)
        };
        if code != 0 {
            return Err(place.device().memory()?.exceeded(place.device().to_string(), bytes as u64));
        }
        // SAFETY: a new reference.
        Ok(Workspace(unsafe { Owned::new(shim, handle) }))
    }

    /// Where it begins.
    pub fn address(&self) -> Result<usize> {
        self.0.address()
    }
}

/// PyTorch's numbers for a device.
pub fn codes(device: Device) -> (i32, i32) {
    match device {
        Device::Cpu => (0, -1),
        Device::Cuda(ordinal) => (1, ordinal as i32),
    }
}

/// Refuses CUDA in a child of the process that used it first: the driver does not survive a fork.
pub fn refuse_after_fork(device: Device) -> Result<()> {
    static USER: AtomicU32 = AtomicU32::new(0);
    let this = std::process::id();
    match USER.compare_exchange(0, this, Ordering::Relaxed, Ordering::Relaxed) {
        Err(other) if other != this => Err(Error::Unavailable {
            what: device.to_string(),
            why: "the process was forked after it had used CUDA".into(),
            fix: "Start new processes with the method `spawn`".into(),
        }),
        _ => Ok(()),
    }
}
