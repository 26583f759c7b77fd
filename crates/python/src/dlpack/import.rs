//! Taking memory from others.

use super::{
    Managed, ManagedVersioned, NAME, NAME_VERSIONED, READ_ONLY, RawTensor, USED, USED_VERSIONED, VERSION,
    device_of, dtype_of,
};
use crate::errors::OrRaise;
use crate::tensor::Tensor;
use pyo3::exceptions::{PyBufferError, PyTypeError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict};
use warpsmith::tensor::{Foreign, Layout, MAX_RANK, Shape};
use warpsmith::{Device, Error, Result};

/// A tensor that was taken out of its capsule and is given back when this is dropped.
struct Taken(Raw);

enum Raw {
    Plain(*mut Managed),
    Versioned(*mut ManagedVersioned),
}

// SAFETY: DLPack allows the deleter to be called on any thread, and nothing else uses the pointers.
unsafe impl Send for Taken {}

impl Drop for Taken {
    fn drop(&mut self) {
        // Some producers' deleters count Python references without asking for the interpreter. Where it is gone, what it
        // owned went with it.
        let _ = Python::try_attach(|_| match self.0 {
            Raw::Plain(managed) => {
                // SAFETY: the capsule was renamed when it was taken, so this is the only call.
                unsafe { (*managed).deleter.into_iter().for_each(|delete| delete(managed)) }
            }
            Raw::Versioned(managed) => {
                // SAFETY: as above.
                unsafe { (*managed).deleter.into_iter().for_each(|delete| delete(managed)) }
            }
        });
    }
}

/// The tensor of an object with `__dlpack__`, without a copy. It is read-only where its owner says so, and where the
/// protocol is too old to say, unless the caller knows that it is `writable`.
pub fn import(object: &Bound<'_, PyAny>, writable: bool) -> PyResult<Tensor> {
    let py = object.py();
    if let Ok(tensor) = object.cast::<Tensor>() {
        return Ok(tensor.try_borrow()?.share());
    }
    let Ok(method) = object.getattr("__dlpack_device__") else {
        let message = format!(
            "expected a tensor of torch, an array of numpy, or anything else with __dlpack__, got {}",
            object.get_type().name()?
        );
        return Err(PyTypeError::new_err(message));
    };
    // PyTorch hands out the memory of such a tensor as if its values lay there.
    let is_negated = object.call_method0("is_neg").and_then(|answer| answer.extract()).unwrap_or(false);
    if is_negated {
        let got = "a tensor that is the negative of its memory; `resolve_neg()` makes a plain one";
        return Err(Error::parse("DLPack data", "memory that holds the values", got)).or_raise(py);
    }
    let (kind, id): (i32, i32) = method.call0()?.extract()?;
    let device = device_of(kind, id).ok_or_else(|| {
        PyBufferError::new_err(format!("expected memory of the CPU or of CUDA, got DLPack device {kind}"))
    })?;
    let options = PyDict::new(py);
    if let Some(stream) = handed_over(device).or_raise(py)? {
        options.set_item("stream", stream)?;
    }
    let latest = options.copy()?;
    latest.set_item("max_version", (VERSION.major, VERSION.minor))?;
    let capsule = match object.call_method("__dlpack__", (), Some(&latest)) {
        // Producers without versions do not know the argument.
        Err(error) if error.is_instance_of::<PyTypeError>(py) => {
            object.call_method("__dlpack__", (), Some(&options))?
        }
        other => other?,
    };
    take(&capsule.cast_into::<PyCapsule>()?, device, writable)
}

/// The stream that our calls use on a device, which the producer makes wait for its work.
fn handed_over(device: Device) -> Result<Option<u64>> {
    match device.default_stream()? {
        warpsmith::Stream::Host => Ok(None),
        warpsmith::Stream::Cuda(stream) => Ok(Some(stream.raw())),
    }
}

fn take(capsule: &Bound<'_, PyCapsule>, device: Device, writable: bool) -> PyResult<Tensor> {
    let (py, object) = (capsule.py(), capsule.as_ptr());
    // SAFETY: the object is a capsule, and a pointer is taken by the name it is stored under. Renaming the capsule makes
    // us the owner of what it holds; the new names are static.
    let taken = unsafe {
        if ffi::PyCapsule_IsValid(object, NAME_VERSIONED.as_ptr()) == 1 {
            let managed: *mut ManagedVersioned =
                ffi::PyCapsule_GetPointer(object, NAME_VERSIONED.as_ptr()).cast();
            ffi::PyCapsule_SetName(object, USED_VERSIONED.as_ptr());
            Taken(Raw::Versioned(managed))
        } else if ffi::PyCapsule_IsValid(object, NAME.as_ptr()) == 1 {
            let managed: *mut Managed = ffi::PyCapsule_GetPointer(object, NAME.as_ptr()).cast();
            ffi::PyCapsule_SetName(object, USED.as_ptr());
            Taken(Raw::Plain(managed))
        } else {
            return Err(PyBufferError::new_err("expected a DLPack capsule that nobody has used yet"));
        }
    };
    // From here on every way out gives the memory back once.
    let (tensor, read_only) = match taken.0 {
        // SAFETY: the producer keeps it until the deleter is called.
        Raw::Plain(managed) => (unsafe { &(*managed).tensor }, !writable),
        Raw::Versioned(managed) => {
            // SAFETY: as above; the version comes first in every version.
            let version = unsafe { (*managed).version };
            if version.major != VERSION.major {
                let message = format!("expected DLPack {}, got {}", VERSION.major, version.major);
                return Err(PyBufferError::new_err(message));
            }
            // SAFETY: as above, and the version has these fields.
            unsafe { (&(*managed).tensor, (*managed).flags & READ_ONLY != 0) }
        }
    };
    let memory = describe(tensor, device, read_only).or_raise(py)?;
    // SAFETY: the producer promises the memory until its deleter is called, which `taken` does when it is dropped. Who
    // writes to it meanwhile is up to the caller, as with every array of Python.
    let tensor = unsafe { warpsmith::Tensor::from_foreign(memory, move || drop(taken)) }.or_raise(py)?;
    Ok(Tensor::new(tensor, read_only))
}

fn describe(tensor: &RawTensor, device: Device, read_only: bool) -> Result<Foreign> {
    let wrong =
        |what: &str, expected: &str, got: String| Error::parse(format!("DLPack {what}"), expected, got);
    let dtype = dtype_of(tensor.dtype).ok_or_else(|| {
        let raw = tensor.dtype;
        let known = warpsmith::DType::ALL.map(|dtype| dtype.name()).join(", ");
        wrong("dtype", &known, format!("code {}, {} bits, {} lanes", raw.code, raw.bits, raw.lanes))
    })?;
    let rank = usize::try_from(tensor.ndim)
        .ok()
        .filter(|&rank| rank <= MAX_RANK)
        .ok_or_else(|| wrong("rank", &format!("at most {MAX_RANK} dimensions"), tensor.ndim.to_string()))?;
    let numbers = |pointer: *mut i64| -> &[i64] {
        // SAFETY: the producer stores one number for each dimension.
        if pointer.is_null() { &[] } else { unsafe { std::slice::from_raw_parts(pointer, rank) } }
    };
    let sizes: Option<Vec<usize>> =
        numbers(tensor.shape).iter().map(|&size| usize::try_from(size).ok()).collect();
    let sizes = sizes
        .filter(|sizes| sizes.len() == rank)
        .ok_or_else(|| wrong("shape", "sizes of zero or more", format!("{:?}", numbers(tensor.shape))))?;
    let shape = Shape::new(&sizes)?;
    let layout = match tensor.strides.is_null() {
        true => Layout::contiguous(shape),
        false => {
            let strides: Vec<isize> = numbers(tensor.strides).iter().map(|&stride| stride as isize).collect();
            Layout::strided(shape, &strides)?
        }
    };
    let address = tensor.data as usize + tensor.byte_offset as usize;
    if layout.numel() > 0 && tensor.data.is_null() {
        return Err(wrong("data", "an address", "null (a tensor without memory)".into()));
    }
    Ok(Foreign { address, dtype, layout, device, stream: None, read_only })
}
