//! Fused graphs as functions of PyTorch's tensors.

use super::FusedGraph;
use super::ahead;
use super::form::{Form, Forms, Given, Known, Made, are_aligned};
use crate::dlpack::{Exchange, View};
use crate::errors::OrRaise;
use crate::torch::{Place, Shim, Workspace, with_threads_of_torch};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use std::sync::Arc;
use warpsmith::{DType, Device};
use warpsmith_fuse::cuda::CudaCompiled;
use warpsmith_fuse::{Compiled, Memory};

/// An output as PyTorch shall see it.
struct Output {
    dtype: Py<PyAny>,
    /// The graph's dimension of each of PyTorch's. Those that PyTorch lacks have size 1.
    dims: Vec<usize>,
    /// PyTorch's dimensions, from the one with the largest stride to that with the smallest.
    order: Vec<usize>,
}

/// A fused graph as a function of PyTorch's tensors, all on one device.
#[pyclass(module = "warpsmith", frozen)]
pub struct FusedCall {
    name: String,
    compiled: Arc<Compiled>,
    cuda: Option<Arc<CudaCompiled>>,
    device: Device,
    /// PyTorch's types of the inputs.
    dtypes: Vec<Py<PyAny>>,
    /// Of each input PyTorch's dimension for each of the graph's; none for those that it lacks, of size 1.
    inputs: Vec<Vec<Option<usize>>>,
    outputs: Vec<Output>,
    allocator: Allocator,
    forms: Forms,
}

#[pymethods]
impl FusedCall {
    /// A function of PyTorch's tensors, whose dimensions may be others than the graph's. `inputs` has for each of a graph's
    /// dimensions PyTorch's, or none for one of size 1 that PyTorch lacks. `outputs` has the graph's dimension for each of
    /// PyTorch's, and PyTorch's dimensions from the one with the largest stride on. The tensors are on the CPU, or with `device`
    /// "cuda" or "cuda:N" on one GPU; the number counts where there are no inputs.
    #[new]
    #[pyo3(signature = (graph, name, inputs, outputs, device = "cpu"))]
    fn new(
        py: Python<'_>,
        graph: &FusedGraph,
        name: String,
        inputs: Vec<Vec<Option<usize>>>,
        outputs: Vec<(Vec<usize>, Vec<usize>)>,
        device: &str,
    ) -> PyResult<FusedCall> {
        let compiled = graph.compiled.clone();
        let torch = py.import("torch")?;
        let dtype = |id| Ok(torch.getattr(torch_name(compiled.graph().node(id).dtype))?.unbind());
        let dtypes = compiled.graph().inputs().iter().map(|&id| dtype(id)).collect::<PyResult<_>>()?;
        let (given, declared) = (compiled.graph().inputs(), compiled.graph().outputs());
        if given.len() != inputs.len() || declared.len() != outputs.len() {
            return Err(PyValueError::new_err("the dimensions of each input and each output"));
        }
        for (&id, dims) in given.iter().zip(&inputs) {
            let own: Vec<usize> = dims.iter().flatten().copied().collect();
            if dims.len() != compiled.graph().node(id).shape.len() || !is_permutation(&own, own.len()) {
                return Err(PyValueError::new_err("one of PyTorch's dimensions for each of the graph's"));
            }
        }
        let mut forms = vec![];
        for ((_, id), (dims, order)) in declared.iter().zip(outputs) {
            let rank = compiled.graph().node(*id).shape.len();
            let mut sorted = dims.clone();
            sorted.sort_unstable();
            sorted.dedup();
            let apart = sorted.len() == dims.len() && sorted.last().is_none_or(|&dim| dim < rank);
            if !apart || !is_permutation(&order, dims.len()) {
                return Err(PyValueError::new_err("one of the graph's dimensions for each of PyTorch's"));
            }
            forms.push(Output { dtype: dtype(*id)?, dims, order });
        }
        let device = device.parse::<Device>().or_raise(py)?;
        let cuda = match device {
            Device::Cpu => None,
            Device::Cuda(_) => Some(Arc::new(CudaCompiled::of(compiled.clone()).or_raise(py)?)),
        };
        let allocator = Allocator::new(py, device)?;
        let known = Forms::default();
        Ok(FusedCall {
            name,
            compiled,
            cuda,
            device,
            dtypes,
            inputs,
            outputs: forms,
            allocator,
            forms: known,
        })
    }

    /// Begins to compile what a call with tensors of these sizes and strides needs, aligned as PyTorch allocates them, and does
    /// not wait for it: there is more to be done before the first call. On the CPU there is nothing to compile.
    fn compile_ahead(&self, py: Python<'_>, inputs: Vec<(Vec<usize>, Vec<isize>)>) -> PyResult<()> {
        let (Some(cuda), Device::Cuda(ordinal)) = (&self.cuda, self.device) else { return Ok(()) };
        let graph = self.compiled.graph();
        let seen = inputs.into_iter().zip(&self.inputs).zip(graph.inputs()).map(
            |(((shape, strides), dims), &id)| {
                Form { dtype: graph.node(id).dtype, shape, strides }.seen_as(dims)
            },
        );
        let seen: Option<Vec<Form>> = seen.collect();
        let inputs = seen.ok_or_else(|| PyTypeError::new_err("tensors of other numbers of dimensions"))?;
        let shapes = self.compiled.outputs(inputs.iter().map(|form| &form.shape[..])).or_raise(py)?;
        let outputs = shapes.into_iter().zip(&self.outputs).map(|((dtype, shape), output)| {
            let strides = output.strides(&shape);
            Form { dtype, shape, strides }
        });
        ahead::begin(cuda.clone(), ordinal, inputs, outputs.collect());
        Ok(())
    }

    /// Waits for what [`FusedCall::compile_ahead`] began. The compiler must not be at work when the process ends.
    #[staticmethod]
    fn finish_compiling(py: Python<'_>) {
        py.detach(ahead::finish);
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
        let given = self.given(py, tensors)?;
        let inputs = given.addresses.clone();
        // On a GPU, that of the tensors is PyTorch's current one until the end of the call.
        let place = match given.device {
            Device::Cpu => None,
            device => Some(Shim::get().and_then(|shim| Place::enter(shim, device)).or_raise(py)?),
        };
        let known = match self.forms.find(&given) {
            Some(known) => known,
            None => self.find_out(py, given, &inputs, place.as_ref())?,
        };
        let (mut made, mut outputs) = (Vec::with_capacity(known.outputs.len()), vec![]);
        for (output, Output { dtype, .. }) in known.outputs.iter().zip(&self.outputs) {
            let tensor = self.allocator.allocate(py, output, dtype)?;
            outputs.push(address(py, &tensor)?);
            made.push(tensor);
        }
        // The inputs are alive, PyTorch knows where they lie, and nobody else has the outputs yet. Who writes an input
        // meanwhile breaks PyTorch's own rules.
        py.detach(|| match &place {
            None => self.call_on_cpu(&known, &inputs, &outputs),
            Some(place) => self.call_on_cuda(place, &known, &inputs, &outputs),
        })
        .or_raise(py)?;
        match made.len() {
            1 => Ok(made.remove(0)),
            _ => Ok(PyTuple::new(py, made)?.into_any()),
        }
    }
}

impl FusedCall {
    /// What the call depends on.
    fn given(&self, py: Python<'_>, tensors: &Bound<'_, PyTuple>) -> PyResult<Given> {
        let exchange = Exchange::get(py)?;
        let graph = self.compiled.graph();
        let mut given: Option<Given> = None;
        for (at, tensor) in tensors.iter().enumerate() {
            let expected = graph.node(graph.inputs()[at]).dtype;
            let view = exchange.map_or(Ok(None), |exchange| exchange.view(&tensor))?;
            let (mut shape, mut strides) = (vec![], vec![]);
            let view = match view {
                Some(view) => view,
                None => self.asked(py, at, &tensor, &mut shape, &mut strides)?,
            };
            let device = view.device.filter(|device| match &given {
                None => matches!(device, Device::Cpu) == matches!(self.device, Device::Cpu),
                Some(given) => given.device == *device,
            });
            let (Some(device), Some(_)) = (device, view.dtype.filter(|dtype| *dtype == expected)) else {
                return Err(self.misfit(py, at, &tensor));
            };
            let all = given.get_or_insert_with(|| Given::new(device, tensors.len()));
            all.add(view.address, view.shape, view.strides);
        }
        Ok(given.unwrap_or_else(|| Given::new(self.device, 0)))
    }

    fn misfit(&self, py: Python<'_>, at: usize, tensor: &Bound<'_, PyAny>) -> PyErr {
        let wanted = self.dtypes[at].bind(py);
        let graph = self.compiled.graph();
        let name = graph.input_name(graph.inputs()[at]);
        let place = match self.device {
            Device::Cpu => "on the CPU",
            Device::Cuda(_) => "on the GPU of the others",
        };
        let of = |attribute: &str| tensor.getattr(attribute).map_or_else(|_| "?".into(), |it| it.to_string());
        let (dtype, device) = (of("dtype"), of("device"));
        PyTypeError::new_err(format!(
            "argument `{name}`: expected a tensor of {wanted} {place}, got one of {dtype} on {device}"
        ))
    }

    /// As [`Exchange::view`], by asking the tensor for one thing after the other.
    fn asked<'a>(
        &self,
        py: Python<'_>,
        at: usize,
        tensor: &Bound<'_, PyAny>,
        shape: &'a mut Vec<i64>,
        strides: &'a mut Vec<i64>,
    ) -> PyResult<View<'a>> {
        let device = tensor.getattr(intern!(py, "device"))?.to_string();
        *shape = numbers(tensor.getattr(intern!(py, "shape"))?)?;
        *strides = numbers(tensor.call_method0(intern!(py, "stride"))?)?;
        let fits = tensor.getattr(intern!(py, "dtype"))?.is(&self.dtypes[at]);
        let graph = self.compiled.graph();
        Ok(View {
            address: tensor.call_method0(intern!(py, "data_ptr"))?.extract()?,
            dtype: fits.then(|| graph.node(graph.inputs()[at]).dtype),
            device: device.parse().ok(),
            shape,
            strides,
        })
    }

    /// Finds out what follows from a call's form: the outputs, and on a GPU the kernels.
    fn find_out(
        &self,
        py: Python<'_>,
        given: Given,
        addresses: &[usize],
        place: Option<&Place>,
    ) -> PyResult<Arc<Known>> {
        let graph = self.compiled.graph();
        let inputs = given.forms(graph.inputs().iter().map(|&id| graph.node(id).dtype));
        let inputs: Option<Vec<Form>> =
            inputs.into_iter().zip(&self.inputs).map(|(form, dims)| form.seen_as(dims)).collect();
        let inputs = inputs.ok_or_else(|| PyTypeError::new_err("tensors of other numbers of dimensions"))?;
        let shapes = self.compiled.outputs(inputs.iter().map(|form| &form.shape[..])).or_raise(py)?;
        let made = shapes.into_iter().zip(&self.outputs).map(|((dtype, shape), output)| {
            let strides = output.strides(&shape);
            let of = |numbers: Vec<isize>| PyTuple::new(py, numbers).map(Bound::unbind);
            let sizes = of(output.dims.iter().map(|&dim| shape[dim] as isize).collect())?;
            let of_torch = of(output.dims.iter().map(|&dim| strides[dim]).collect())?;
            Ok(Made { form: Form { dtype, shape, strides }, sizes, strides: of_torch })
        });
        let outputs: Vec<Made> = made.collect::<PyResult<_>>()?;
        let mut known = Known { inputs, outputs, prepared: None };
        if let (Some(cuda), Some(place)) = (&self.cuda, place) {
            let (from, to) = memories(&known, addresses, &vec![0; known.outputs.len()]);
            let prepared = py.detach(|| cuda.prepare(place.context()?, &from, &to)).or_raise(py)?;
            drop((from, to));
            known.prepared = Some(prepared);
        }
        let known = Arc::new(known);
        self.forms.keep(given, known.clone());
        Ok(known)
    }

    fn call_on_cpu(&self, known: &Known, inputs: &[usize], outputs: &[usize]) -> warpsmith_fuse::Result<()> {
        let (from, to) = memories(known, inputs, outputs);
        // SAFETY: as in `__call__`; all tensors are on the CPU.
        let call = || unsafe { self.compiled.call(&from, &to) };
        match Shim::get() {
            Ok(shim) => with_threads_of_torch(shim, Device::Cpu, call),
            Err(_) => call(),
        }
    }

    fn call_on_cuda(
        &self,
        place: &Place,
        known: &Known,
        inputs: &[usize],
        outputs: &[usize],
    ) -> warpsmith_fuse::Result<()> {
        let (Some(cuda), Some(prepared)) = (&self.cuda, &known.prepared) else { return Ok(()) };
        let other;
        let prepared = match are_aligned(outputs) {
            true => prepared,
            // An allocator that aligns less than PyTorch's own.
            false => {
                let (from, to) = memories(known, inputs, outputs);
                other = cuda.prepare(place.context()?, &from, &to)?;
                &other
            }
        };
        // Freed in the order of the stream, as soon as this returns.
        let workspace = match prepared.workspace() {
            0 => None,
            bytes => Some(Workspace::new(Shim::get()?, place, bytes)?),
        };
        let stream = place.cuda_stream()?;
        let at = workspace.as_ref().map_or(Ok(0), Workspace::address)?;
        // SAFETY: as in `__call__`; all tensors are on the device of the stream.
        unsafe { prepared.launch(stream, inputs, outputs, at) }
    }
}

impl Output {
    /// The strides of an output as the graph sees it.
    fn strides(&self, shape: &[usize]) -> Vec<isize> {
        let (mut strides, mut step) = (vec![1isize; shape.len()], 1usize);
        for &at in self.order.iter().rev() {
            let dim = self.dims[at];
            strides[dim] = step as isize;
            step = step.saturating_mul(shape[dim].max(1));
        }
        strides
    }
}

/// Whether these are the numbers below `count`, each once.
fn is_permutation(numbers: &[usize], count: usize) -> bool {
    let mut sorted = numbers.to_vec();
    sorted.sort_unstable();
    sorted.into_iter().eq(0..count)
}

/// The tensors of a call.
fn memories<'a>(known: &'a Known, inputs: &[usize], outputs: &[usize]) -> (Vec<Memory<'a>>, Vec<Memory<'a>>) {
    let from = known.inputs.iter().zip(inputs).map(|(form, &address)| form.memory(address));
    let to = known.outputs.iter().zip(outputs).map(|(made, &address)| made.form.memory(address));
    (from.collect(), to.collect())
}

/// Makes tensors in PyTorch's memory.
enum Allocator {
    /// PyTorch's function for generated code, which takes sizes, strides and a type, for its current device.
    Quick(Py<PyAny>),
    /// `torch.empty_strided` and its other arguments.
    Public(Py<PyAny>, &'static str),
}

impl Allocator {
    fn new(py: Python<'_>, device: Device) -> PyResult<Allocator> {
        let (name, kind) = match device {
            Device::Cpu => ("_empty_strided_cpu", "cpu"),
            Device::Cuda(_) => ("_empty_strided_cuda", "cuda"),
        };
        let quick = py.import("torch._C._dynamo.guards").and_then(|module| module.getattr(name));
        if let Ok(function) = quick {
            return Ok(Allocator::Quick(function.unbind()));
        }
        Ok(Allocator::Public(py.import("torch")?.getattr("empty_strided")?.unbind(), kind))
    }

    fn allocate<'py>(
        &self,
        py: Python<'py>,
        output: &Made,
        dtype: &Py<PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        match self {
            Allocator::Quick(function) => {
                function.bind(py).call1((output.sizes.bind(py), output.strides.bind(py), dtype.bind(py)))
            }
            Allocator::Public(function, device) => {
                let settings = PyDict::new(py);
                settings.set_item(intern!(py, "dtype"), dtype)?;
                settings.set_item(intern!(py, "device"), device)?;
                let given = (output.sizes.bind(py), output.strides.bind(py));
                function.bind(py).call(given, Some(&settings))
            }
        }
    }
}

/// Where a new tensor begins.
fn address(py: Python<'_>, tensor: &Bound<'_, PyAny>) -> PyResult<usize> {
    let exchange = Exchange::get(py)?;
    if let Some(view) = exchange.map_or(Ok(None), |exchange| exchange.view(tensor))? {
        return Ok(view.address);
    }
    tensor.call_method0(intern!(py, "data_ptr"))?.extract()
}

fn numbers(tuple: Bound<'_, PyAny>) -> PyResult<Vec<i64>> {
    tuple.cast_into::<PyTuple>()?.iter().map(|number| number.extract()).collect()
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
