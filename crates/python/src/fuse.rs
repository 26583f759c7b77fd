//! Fused graphs: compiled from JSON, and called with PyTorch's tensors or with addresses.

use crate::errors::OrRaise;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use std::sync::Arc;
use warpsmith::DType;
use warpsmith_fuse::gradient::gradient;
use warpsmith_fuse::text::json;
use warpsmith_fuse::{Compiled, Graph, Memory};

/// A graph of operations, planned and ready to be called.
#[pyclass(module = "warpsmith", frozen)]
pub struct FusedGraph {
    compiled: Arc<Compiled>,
}

/// Address, type, sizes and strides of a tensor.
type Place = (usize, String, Vec<usize>, Vec<isize>);

impl FusedGraph {
    fn of(py: Python<'_>, graph: Graph) -> PyResult<FusedGraph> {
        let compiled = py.detach(|| Compiled::new(graph)).or_raise(py)?;
        Ok(FusedGraph { compiled: Arc::new(compiled) })
    }

    fn graph(&self) -> &Graph {
        self.compiled.graph()
    }
}

#[pymethods]
impl FusedGraph {
    #[new]
    fn new(py: Python<'_>, source: &str) -> PyResult<FusedGraph> {
        let graph = json::read(source).or_raise(py)?;
        FusedGraph::of(py, graph)
    }

    /// Names of the inputs, in the order of a call.
    #[getter]
    fn inputs(&self) -> Vec<&str> {
        self.graph().inputs().iter().map(|&id| self.graph().input_name(id)).collect()
    }

    /// Names of the outputs, in the order of a call.
    #[getter]
    fn outputs(&self) -> Vec<&str> {
        self.graph().outputs().iter().map(|(name, _)| &**name).collect()
    }

    /// Number of kernels.
    #[getter]
    fn kernels(&self) -> usize {
        self.compiled.plan().kernels.len()
    }

    /// The graph as a formula.
    fn formula(&self) -> String {
        self.graph().to_string()
    }

    /// The plan as text.
    fn plan(&self) -> String {
        self.compiled.plan().show(self.graph())
    }

    /// Types and shapes of the outputs for inputs of these shapes.
    fn forms(&self, py: Python<'_>, shapes: Vec<Vec<usize>>) -> PyResult<Vec<(&'static str, Vec<usize>)>> {
        let forms = self.compiled.outputs(shapes.iter().map(Vec::as_slice)).or_raise(py)?;
        Ok(forms.into_iter().map(|(dtype, shape)| (dtype.name(), shape)).collect())
    }

    /// Kernels of a call with inputs of these shapes, and the bytes that they read and write.
    fn traffic(&self, py: Python<'_>, shapes: Vec<Vec<usize>>) -> PyResult<(usize, u128)> {
        let sizes = self.compiled.sizes(shapes.iter().map(Vec::as_slice)).or_raise(py)?;
        let traffic = self.compiled.plan().traffic(self.graph(), &sizes).or_raise(py)?;
        Ok((traffic.launches, traffic.bytes))
    }

    /// The graphs of the derivative with respect to these inputs: forward, which also gives what is kept, and backward.
    fn gradient(&self, py: Python<'_>, wrt: Vec<String>) -> PyResult<(FusedGraph, FusedGraph)> {
        let names: Vec<&str> = wrt.iter().map(String::as_str).collect();
        let found = gradient(self.graph(), &names).or_raise(py)?;
        Ok((FusedGraph::of(py, found.forward)?, FusedGraph::of(py, found.backward)?))
    }

    /// Calls the graph with tensors in host memory that the caller keeps. The addresses are believed.
    fn call(&self, py: Python<'_>, inputs: Vec<Place>, outputs: Vec<Place>) -> PyResult<()> {
        let (inputs, outputs) = (parsed(py, &inputs)?, parsed(py, &outputs)?);
        // SAFETY: the caller vouches for the addresses. Types and shapes are checked.
        py.detach(|| unsafe { self.compiled.call(&inputs, &outputs) }).or_raise(py)
    }
}

fn parsed<'a>(py: Python<'_>, places: &'a [Place]) -> PyResult<Vec<Memory<'a>>> {
    let one = |(address, dtype, shape, strides): &'a Place| {
        let dtype = dtype.parse::<DType>().or_raise(py)?;
        Ok(Memory { address: *address, dtype, shape, strides })
    };
    places.iter().map(one).collect()
}

/// An output as PyTorch shall see it.
struct Output {
    dtype: Py<PyAny>,
    /// Dimensions of the graph's output that it lacks; their size is 1.
    dropped: Vec<usize>,
    /// The dimensions that are left, from the one with the largest stride to that with the smallest.
    order: Vec<usize>,
}

/// A fused graph as a function of PyTorch's tensors on the CPU.
#[pyclass(module = "warpsmith", frozen)]
pub struct FusedCall {
    name: String,
    compiled: Arc<Compiled>,
    /// PyTorch's types of the inputs.
    dtypes: Vec<Py<PyAny>>,
    outputs: Vec<Output>,
    empty_strided: Py<PyAny>,
}

/// A tensor's sizes and strides, and where it begins.
struct Held {
    address: usize,
    dtype: DType,
    shape: Vec<usize>,
    strides: Vec<isize>,
}

impl Held {
    fn memory(&self) -> Memory<'_> {
        Memory { address: self.address, dtype: self.dtype, shape: &self.shape, strides: &self.strides }
    }
}

#[pymethods]
impl FusedCall {
    /// A function that returns outputs without the dimensions `dropped`, and with the others laid out in `order`.
    #[new]
    fn new(
        py: Python<'_>,
        graph: &FusedGraph,
        name: String,
        outputs: Vec<(Vec<usize>, Vec<usize>)>,
    ) -> PyResult<FusedCall> {
        let compiled = graph.compiled.clone();
        let torch = py.import("torch")?;
        let dtype = |id| Ok(torch.getattr(torch_name(compiled.graph().node(id).dtype))?.unbind());
        let dtypes = compiled.graph().inputs().iter().map(|&id| dtype(id)).collect::<PyResult<_>>()?;
        let declared = compiled.graph().outputs();
        if declared.len() != outputs.len() {
            return Err(PyValueError::new_err("one layout for each output"));
        }
        let mut forms = vec![];
        for ((_, id), (dropped, order)) in declared.iter().zip(outputs) {
            let rank = compiled.graph().node(*id).shape.len();
            let mut seen = order.clone();
            seen.sort_unstable();
            let kept = rank.checked_sub(dropped.len());
            let fits = dropped.iter().all(|&dim| dim < rank) && kept == Some(order.len());
            if !fits || !seen.iter().copied().eq(0..order.len()) {
                return Err(PyValueError::new_err("an order of all dimensions that are left"));
            }
            forms.push(Output { dtype: dtype(*id)?, dropped, order });
        }
        let empty_strided = torch.getattr("empty_strided")?.unbind();
        Ok(FusedCall { name, compiled, dtypes, outputs: forms, empty_strided })
    }

    /// As functions have it, so that generated code can refer to the call.
    #[getter]
    fn __name__(&self) -> &str {
        &self.name
    }

    /// Calls the graph. Returns the output, or a tuple of the outputs if there are several.
    #[pyo3(signature = (*tensors))]
    fn __call__<'py>(&self, py: Python<'py>, tensors: &Bound<'py, PyTuple>) -> PyResult<Bound<'py, PyAny>> {
        if tensors.len() != self.dtypes.len() {
            let (expected, got) = (self.dtypes.len(), tensors.len());
            return Err(PyTypeError::new_err(format!("a fused graph takes {expected} tensors, got {got}")));
        }
        let mut given = Vec::with_capacity(self.dtypes.len());
        for (at, (tensor, dtype)) in tensors.iter().zip(&self.dtypes).enumerate() {
            given.push(self.held(py, at, &tensor, dtype)?);
        }
        let forms = self.compiled.outputs(given.iter().map(|held| &held.shape[..])).or_raise(py)?;
        let (mut made, mut taken) = (Vec::with_capacity(forms.len()), Vec::with_capacity(forms.len()));
        for ((dtype, shape), output) in forms.into_iter().zip(&self.outputs) {
            let (tensor, held) = self.allocate(py, dtype, shape, output)?;
            made.push(tensor);
            taken.push(held);
        }
        let inputs: Vec<Memory<'_>> = given.iter().map(Held::memory).collect();
        let outputs: Vec<Memory<'_>> = taken.iter().map(Held::memory).collect();
        // SAFETY: the tensors are alive and on the CPU with these types, PyTorch knows where they lie, and nobody else has the
        // outputs yet. Who writes an input meanwhile breaks PyTorch's own rules.
        py.detach(|| unsafe { self.compiled.call(&inputs, &outputs) }).or_raise(py)?;
        match made.len() {
            1 => Ok(made.remove(0)),
            _ => Ok(PyTuple::new(py, made)?.into_any()),
        }
    }
}

impl FusedCall {
    fn held(
        &self,
        py: Python<'_>,
        at: usize,
        tensor: &Bound<'_, PyAny>,
        expected: &Py<PyAny>,
    ) -> PyResult<Held> {
        let graph = self.compiled.graph();
        let id = graph.inputs()[at];
        let dtype = tensor.getattr(intern!(py, "dtype"))?;
        if !dtype.is(expected) || !tensor.getattr(intern!(py, "is_cpu"))?.is_truthy()? {
            let device = tensor.getattr(intern!(py, "device"))?;
            let (name, wanted) = (graph.input_name(id), expected.bind(py));
            return Err(PyTypeError::new_err(format!(
                "argument `{name}`: expected a tensor of {wanted} on the CPU, got one of {dtype} on {device}"
            )));
        }
        Ok(Held {
            address: tensor.call_method0(intern!(py, "data_ptr"))?.extract()?,
            dtype: graph.node(id).dtype,
            shape: numbers(tensor.getattr(intern!(py, "shape"))?)?,
            strides: numbers(tensor.call_method0(intern!(py, "stride"))?)?,
        })
    }

    /// A new tensor for an output, and its memory as the graph sees it.
    fn allocate<'py>(
        &self,
        py: Python<'py>,
        dtype: DType,
        shape: Vec<usize>,
        output: &Output,
    ) -> PyResult<(Bound<'py, PyAny>, Held)> {
        let kept: Vec<usize> = (0..shape.len()).filter(|dim| !output.dropped.contains(dim)).collect();
        let (mut strides, mut step) = (vec![1isize; shape.len()], 1usize);
        for &at in output.order.iter().rev() {
            strides[kept[at]] = step as isize;
            step = step.saturating_mul(shape[kept[at]].max(1));
        }
        let of_torch = (
            PyTuple::new(py, kept.iter().map(|&dim| shape[dim]))?,
            PyTuple::new(py, kept.iter().map(|&dim| strides[dim]))?,
        );
        let settings = pyo3::types::PyDict::new(py);
        settings.set_item(intern!(py, "dtype"), &output.dtype)?;
        let tensor = self.empty_strided.bind(py).call(of_torch, Some(&settings))?;
        let address = tensor.call_method0(intern!(py, "data_ptr"))?.extract()?;
        Ok((tensor, Held { address, dtype, shape, strides }))
    }
}

fn numbers<T>(tuple: Bound<'_, PyAny>) -> PyResult<Vec<T>>
where
    T: for<'a, 'py> FromPyObject<'a, 'py, Error = PyErr>,
{
    tuple.cast_into::<PyTuple>()?.iter().map(|number| number.extract::<T>()).collect()
}

/// PyTorch's name of a type.
fn torch_name(dtype: DType) -> &'static str {
    match dtype {
        DType::BF16 => "bfloat16",
        DType::F16 => "float16",
        DType::I64 => "int64",
        DType::I32 => "int32",
        DType::Bool => "bool",
        _ => "float32",
    }
}
