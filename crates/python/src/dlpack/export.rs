//! Handing memory to others.

use super::{
    IS_COPIED, Managed, ManagedVersioned, NAME, NAME_VERSIONED, READ_ONLY, RawDevice, RawTensor, VERSION,
    device_pair, raw_type,
};
use crate::errors::OrRaise;
use crate::tensor::Tensor;
use pyo3::exceptions::{PyBufferError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use std::ffi::c_void;
use std::ptr::null_mut;
use warpsmith::{Device, Stream};

/// What the consumer asks for.
pub struct Request {
    /// The stream it will use the memory on.
    pub stream: Option<i64>,
    /// The latest version it understands.
    pub max_version: Option<(u32, u32)>,
    /// Where it wants the memory.
    pub device: Option<(i32, i32)>,
    /// Whether it wants a copy; without a wish, none is made unless it is needed.
    pub copy: Option<bool>,
}

/// What lives as long as the consumer needs it: the header it sees, and the memory behind it.
#[repr(C)]
struct Exported<Header> {
    /// First, so that a pointer to it is one to all.
    header: Header,
    shape: Vec<i64>,
    strides: Vec<i64>,
    tensor: Option<warpsmith::Tensor>,
    consumer: Option<Consumer>,
}

/// Who uses memory that was handed over, after our own work with it.
enum Consumer {
    /// A default stream, which lives as long as the device.
    Default(Stream),
    /// A stream that somebody made: by the time the memory comes back, it may not exist any more.
    Other,
}

impl<Header> Drop for Exported<Header> {
    fn drop(&mut self) {
        // The consumer may be done on the host while its stream still uses the memory. What is freed in the order of our own
        // stream then comes after that. Nothing can be done about a failure here.
        if let (Some(consumer), Some(tensor)) = (&self.consumer, &self.tensor)
            && let Ok(ours) = tensor.device().default_stream()
        {
            let _ = match (consumer, &ours) {
                (Consumer::Default(stream), _) => ours.wait_for(stream),
                (Consumer::Other, Stream::Cuda(ours)) => ours.wait_for_device(),
                (Consumer::Other, _) => Ok(()),
            };
        }
        self.tensor = None;
    }
}

/// A capsule with a tensor's memory.
pub fn export(py: Python<'_>, tensor: &Tensor, request: &Request) -> PyResult<Py<PyAny>> {
    let ours = tensor.get();
    let target = request.device.filter(|wanted| *wanted != device_pair(ours.device()));
    let copied = match (target, request.copy) {
        (None, Some(true)) => Some(py.detach(|| ours.to_device(ours.device())).or_raise(py)?),
        (None, _) => None,
        (Some(_), Some(false)) => {
            return Err(PyBufferError::new_err("the memory is on another device and may not be copied"));
        }
        (Some(pair), _) if pair == device_pair(Device::Cpu) => {
            Some(py.detach(|| ours.to_device(Device::Cpu)).or_raise(py)?)
        }
        (Some((kind, id)), _) => {
            return Err(PyBufferError::new_err(format!(
                "cannot move the memory to DLPack device {kind}:{id}"
            )));
        }
    };
    let is_copied = copied.is_some();
    let read_only = tensor.is_read_only() && !is_copied;
    let memory = copied.unwrap_or_else(|| ours.clone());
    let consumer = synchronise(&memory, request.stream).or_else(|error| match error {
        Wrong::Stream(stream) => Err(PyValueError::new_err(format!(
            "stream: expected None, -1 or a stream of {}, got {stream}",
            memory.device()
        ))),
        Wrong::Library(error) => Err(error).or_raise(py),
    })?;
    if request.max_version.is_some_and(|(major, _)| major >= VERSION.major) {
        let flags = if read_only { READ_ONLY } else { 0 } | if is_copied { IS_COPIED } else { 0 };
        let header = |context, tensor| ManagedVersioned {
            version: VERSION,
            context,
            deleter: Some(delete_versioned),
            flags,
            tensor,
        };
        return capsule(py, memory, consumer, header, |exported| &raw mut exported.header);
    }
    if read_only {
        return Err(PyBufferError::new_err("read-only memory needs a consumer of DLPack 1.0 or later"));
    }
    let header = |context, tensor| Managed { tensor, context, deleter: Some(delete) };
    capsule(py, memory, consumer, header, |exported| &raw mut exported.header)
}

enum Wrong {
    Stream(i64),
    Library(warpsmith::Error),
}

/// Makes the consumer's stream wait for our work with the memory.
fn synchronise(memory: &warpsmith::Tensor, stream: Option<i64>) -> Result<Option<Consumer>, Wrong> {
    let ours = memory.device().default_stream().map_err(Wrong::Library)?;
    let Stream::Cuda(cuda) = &ours else {
        return match stream {
            None | Some(-1) => Ok(None),
            Some(other) => Err(Wrong::Stream(other)),
        };
    };
    // 1 and 2 are the driver's own names of the legacy and the per-thread default stream.
    let raw = match stream {
        Some(-1) => return Ok(None),
        None | Some(1) => 0,
        Some(stream @ 2..) => stream as u64,
        Some(other) => return Err(Wrong::Stream(other)),
    };
    // SAFETY: the consumer names a stream of the device that exists during this call; default streams always do.
    let consumer = Stream::Cuda(unsafe { warpsmith::cuda::Stream::from_raw(cuda.context(), raw) });
    consumer.wait_for(&ours).map_err(Wrong::Library)?;
    Ok(Some(if raw <= 2 { Consumer::Default(consumer) } else { Consumer::Other }))
}

/// The header types, by what differs between their capsules.
trait Header: Sized {
    const CAPSULE: &std::ffi::CStr;
    unsafe fn delete(this: *mut Self);
}

impl Header for Managed {
    const CAPSULE: &std::ffi::CStr = NAME;
    unsafe fn delete(this: *mut Self) {
        // SAFETY: passed on.
        unsafe { delete(this) }
    }
}

impl Header for ManagedVersioned {
    const CAPSULE: &std::ffi::CStr = NAME_VERSIONED;
    unsafe fn delete(this: *mut Self) {
        // SAFETY: passed on.
        unsafe { delete_versioned(this) }
    }
}

fn capsule<H: Header>(
    py: Python<'_>,
    memory: warpsmith::Tensor,
    consumer: Option<Consumer>,
    header: impl FnOnce(*mut c_void, RawTensor) -> H,
    at: impl FnOnce(&mut Exported<H>) -> *mut H,
) -> PyResult<Py<PyAny>> {
    let (view, layout) = (memory.view(), *memory.layout());
    let mut shape: Vec<i64> = layout.shape().iter().map(|&size| size as i64).collect();
    let mut strides: Vec<i64> = layout.strides().iter().map(|&stride| stride as i64).collect();
    let (kind, id) = device_pair(memory.device());
    let empty = layout.numel() == 0;
    let raw = RawTensor {
        data: if empty { null_mut() } else { view.address() as *mut c_void },
        device: RawDevice { kind, id },
        ndim: layout.rank() as i32,
        dtype: raw_type(memory.dtype()),
        // The vectors' elements stay where they are when the vectors move into the box.
        shape: shape.as_mut_ptr(),
        strides: strides.as_mut_ptr(),
        byte_offset: 0,
    };
    let header = header(null_mut(), raw);
    let exported = Box::new(Exported { header, shape, strides, tensor: Some(memory), consumer });
    debug_assert_eq!(exported.shape.len(), exported.strides.len());
    let exported = Box::leak(exported);
    let pointer = at(exported);
    // SAFETY: the pointer is to a header that lives until its deleter is called; the destructor calls it unless a consumer
    // has renamed the capsule.
    let object = unsafe { ffi::PyCapsule_New(pointer.cast(), H::CAPSULE.as_ptr(), Some(destroy::<H>)) };
    if object.is_null() {
        // SAFETY: no capsule was made, so nobody else deletes it.
        unsafe { H::delete(pointer) };
        return Err(PyErr::fetch(py));
    }
    // SAFETY: a new reference.
    Ok(unsafe { Bound::from_owned_ptr(py, object) }.unbind())
}

/// Called when a capsule dies: what nobody took is deleted.
unsafe extern "C" fn destroy<H: Header>(capsule: *mut ffi::PyObject) {
    // SAFETY: Python calls this with the capsule it destroys; the pointer is one of ours.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, H::CAPSULE.as_ptr()) == 1 {
            H::delete(ffi::PyCapsule_GetPointer(capsule, H::CAPSULE.as_ptr()).cast());
        }
    }
}

/// Called by the consumer, once, on any thread and without the interpreter: it is not needed.
unsafe extern "C" fn delete(managed: *mut Managed) {
    // SAFETY: the header is the first field of the box it was leaked from.
    drop(unsafe { Box::from_raw(managed.cast::<Exported<Managed>>()) });
}

unsafe extern "C" fn delete_versioned(managed: *mut ManagedVersioned) {
    // SAFETY: as above.
    drop(unsafe { Box::from_raw(managed.cast::<Exported<ManagedVersioned>>()) });
}
