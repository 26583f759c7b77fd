//! `warpsmith.Tensor`: a tensor of the library's, for programs without PyTorch and for whatever speaks DLPack.

use crate::dlpack;
use crate::errors::OrRaise;
use pyo3::BoundObject;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple};
use warpsmith::DType;

/// A tensor. Arrays of numpy, JAX, CuPy and PyTorch become one with `warpsmith.from_dlpack`, and it becomes one of theirs
/// with their `from_dlpack`; no elements are copied.
#[pyclass(module = "warpsmith", weakref)]
pub struct Tensor {
    tensor: warpsmith::Tensor,
    read_only: bool,
}

impl Tensor {
    /// A tensor; `read_only` if its memory must not be written.
    pub fn new(tensor: warpsmith::Tensor, read_only: bool) -> Tensor {
        Tensor { tensor, read_only }
    }

    /// Another handle to the same memory.
    pub fn share(&self) -> Tensor {
        Tensor { tensor: self.tensor.clone(), read_only: self.read_only }
    }

    /// The library's tensor.
    pub fn get(&self) -> &warpsmith::Tensor {
        &self.tensor
    }

    /// The library's tensor, to be written.
    pub fn get_mut(&mut self) -> &mut warpsmith::Tensor {
        &mut self.tensor
    }

    /// Whether its memory must not be written.
    pub fn is_read_only(&self) -> bool {
        self.read_only
    }
}

#[pymethods]
impl Tensor {
    /// Sizes of the dimensions.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.tensor.shape())
    }

    /// Distances between neighbours of each dimension, in elements.
    #[getter]
    fn strides<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.tensor.layout().strides())
    }

    /// Name of the element type, such as "bf16".
    #[getter]
    fn dtype(&self) -> &'static str {
        self.tensor.dtype().name()
    }

    /// Where it is: "cpu" or "cuda:0".
    #[getter]
    fn device(&self) -> String {
        self.tensor.device().to_string()
    }

    /// Number of dimensions.
    #[getter]
    fn ndim(&self) -> usize {
        self.tensor.layout().rank()
    }

    /// Number of elements.
    #[getter]
    fn size(&self) -> usize {
        self.tensor.layout().numel()
    }

    /// Bytes of its elements.
    #[getter]
    fn nbytes(&self) -> usize {
        self.size() * self.tensor.dtype().size()
    }

    /// Whether its memory must not be written.
    #[getter]
    fn read_only(&self) -> bool {
        self.read_only
    }

    /// A capsule with its memory, for the `from_dlpack` of another library.
    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__(
        &self,
        py: Python<'_>,
        stream: Option<i64>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Py<PyAny>> {
        let request = dlpack::Request { stream, max_version, device: dl_device, copy };
        dlpack::export(py, self, &request)
    }

    /// Kind and number of its device, as DLPack counts them.
    fn __dlpack_device__(&self) -> (i32, i32) {
        dlpack::device_pair(self.tensor.device())
    }

    /// The same memory as an array of numpy. Types that numpy has not, and memory of a GPU, are refused.
    fn numpy<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        slf.py().import("numpy")?.call_method1("from_dlpack", (slf,))
    }

    /// The same memory as a tensor of PyTorch.
    fn torch<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        slf.py().import("torch")?.call_method1("from_dlpack", (slf,))
    }

    /// For `numpy.asarray`.
    #[pyo3(signature = (dtype=None, copy=None))]
    fn __array__<'py>(
        slf: &Bound<'py, Self>,
        dtype: Option<Bound<'py, PyAny>>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let options = PyDict::new(slf.py());
        options.set_item("dtype", dtype)?;
        if let Some(copy) = copy {
            options.set_item("copy", copy)?;
        }
        slf.py().import("numpy")?.call_method("array", (Self::numpy(slf)?,), Some(&options))
    }

    /// The elements as numbers, in lists as deep as the tensor has dimensions.
    fn tolist<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let tensor = &self.tensor;
        let shape = tensor.shape();
        match tensor.dtype() {
            DType::I64 => nest(py, shape, &py.detach(|| tensor.to_vec::<i64>()).or_raise(py)?, |value| value),
            of => {
                let values = py.detach(|| tensor.to_f64()).or_raise(py)?;
                // Without another list of them: it might not fit into memory.
                match of {
                    DType::I32 | DType::U8 => nest(py, shape, &values, |value| value as i64),
                    DType::Bool => nest(py, shape, &values, |value| value != 0.0),
                    _ => nest(py, shape, &values, |value| value),
                }
            }
        }
    }

    fn __len__(&self) -> PyResult<usize> {
        let first = self.tensor.shape().first().copied();
        first.ok_or_else(|| {
            pyo3::exceptions::PyTypeError::new_err("a tensor without dimensions has no length")
        })
    }

    fn __repr__(&self) -> String {
        let read_only = if self.read_only { ", read-only" } else { "" };
        let tensor = &self.tensor;
        format!("warpsmith.Tensor({:?}, {}, {}{read_only})", tensor.shape(), tensor.dtype(), tensor.device())
    }
}

/// Elements in row-major order as nested lists of what `number` makes of each.
fn nest<'py, T, N>(
    py: Python<'py>,
    shape: &[usize],
    values: &[T],
    number: impl Fn(T) -> N + Copy,
) -> PyResult<Bound<'py, PyAny>>
where
    T: Copy,
    N: IntoPyObject<'py>,
{
    let Some((&first, rest)) = shape.split_first() else {
        let value = number(values[0]).into_pyobject(py).map_err(Into::into)?;
        return Ok(value.into_any().into_bound());
    };
    let list = PyList::empty(py);
    let part = values.len() / first.max(1);
    for index in 0..first {
        list.append(nest(py, rest, &values[index * part..(index + 1) * part], number)?)?;
    }
    Ok(list.into_any())
}

/// The tensor of an object with `__dlpack__`, without a copy. It is read-only where its owner says so and where the protocol is
/// too old to say, unless `writable` vouches for it.
#[pyfunction]
#[pyo3(signature = (object, writable=false))]
pub fn from_dlpack(object: &Bound<'_, PyAny>, writable: bool) -> PyResult<Tensor> {
    dlpack::import(object, writable)
}
