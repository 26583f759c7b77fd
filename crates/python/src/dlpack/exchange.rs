//! PyTorch's table of functions for handing tensors over: without a capsule, and without a call of Python. Since 2.10.

use super::{RawTensor, RawType, VERSION, Version, device_of, dtype_of};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyCapsule, PyType};
use std::ffi::{c_int, c_void};
use warpsmith::{DType, Device};

const NAME: &std::ffi::CStr = c"dlpack_exchange_api";

/// The table, of which one function is used.
#[repr(C)]
struct Api {
    version: Version,
    previous: *const Api,
    allocate: *const c_void,
    take: *const c_void,
    give: *const c_void,
    view: Option<unsafe extern "C" fn(*mut ffi::PyObject, *mut RawTensor) -> c_int>,
    stream: *const c_void,
}

/// A tensor as PyTorch keeps it. Sizes and strides are its own: they are good until somebody else runs.
pub struct View<'a> {
    pub address: usize,
    /// None for a type that the library does not have.
    pub dtype: Option<DType>,
    /// None for another kind of device.
    pub device: Option<Device>,
    pub shape: &'a [i64],
    pub strides: &'a [i64],
}

/// Looks at tensors without taking them.
pub struct Exchange {
    view: unsafe extern "C" fn(*mut ffi::PyObject, *mut RawTensor) -> c_int,
    /// The types whose objects are tensors with memory; subclasses may be anything.
    plain: [Py<PyType>; 2],
}

impl Exchange {
    /// PyTorch's table, if it has one.
    pub fn get(py: Python<'_>) -> PyResult<Option<&'static Exchange>> {
        static FOUND: PyOnceLock<Option<Exchange>> = PyOnceLock::new();
        Ok(FOUND.get_or_try_init(py, || Exchange::find(py))?.as_ref())
    }

    fn find(py: Python<'_>) -> PyResult<Option<Exchange>> {
        let torch = py.import("torch")?;
        let tensor = torch.getattr("Tensor")?.cast_into::<PyType>()?;
        let Ok(capsule) = tensor.getattr("__dlpack_c_exchange_api__") else { return Ok(None) };
        let Ok(capsule) = capsule.cast_into::<PyCapsule>() else { return Ok(None) };
        let Ok(table) = capsule.pointer_checked(Some(NAME)) else { return Ok(None) };
        // SAFETY: a capsule of this name holds the table, which lives as long as PyTorch, whose modules are never unloaded. The
        // version comes first in every version.
        let api = unsafe { table.cast::<Api>().as_ref() };
        let Some(view) = api.view.filter(|_| api.version.major == VERSION.major) else { return Ok(None) };
        let parameter = torch.getattr("nn")?.getattr("Parameter")?.cast_into::<PyType>()?;
        Ok(Some(Exchange { view, plain: [tensor.unbind(), parameter.unbind()] }))
    }

    /// A plain tensor; none for other objects.
    pub fn view<'a>(&self, object: &'a Bound<'_, PyAny>) -> PyResult<Option<View<'a>>> {
        let of = object.get_type_ptr();
        if self.plain.iter().all(|class| class.as_ptr().cast() != of) {
            return Ok(None);
        }
        let mut raw = RawTensor {
            data: std::ptr::null_mut(),
            device: super::RawDevice { kind: 0, id: 0 },
            ndim: 0,
            dtype: RawType { code: 0, bits: 0, lanes: 0 },
            shape: std::ptr::null_mut(),
            strides: std::ptr::null_mut(),
            byte_offset: 0,
        };
        // SAFETY: the object is of the type that the table was found at, or of a subclass with the same layout.
        if unsafe { (self.view)(object.as_ptr(), &mut raw) } != 0 {
            return Err(PyErr::fetch(object.py()));
        }
        let rank = usize::try_from(raw.ndim).unwrap_or(0);
        let numbers = |at: *mut i64| match rank == 0 || at.is_null() {
            true => &[][..],
            // SAFETY: PyTorch keeps a size and a stride for each dimension as long as the tensor lives.
            false => unsafe { std::slice::from_raw_parts(at.cast_const(), rank) },
        };
        Ok(Some(View {
            address: raw.data as usize + raw.byte_offset as usize,
            dtype: dtype_of(raw.dtype),
            device: device_of(raw.device.kind, raw.device.id),
            shape: numbers(raw.shape),
            strides: numbers(raw.strides),
        }))
    }
}
