//! Fused graphs: compiled from JSON, and called with PyTorch's tensors or with addresses.

mod ahead;
mod call;
mod form;

pub use call::FusedCall;

use crate::errors::OrRaise;
use pyo3::prelude::*;
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
