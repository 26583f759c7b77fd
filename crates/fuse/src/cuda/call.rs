//! Graphs that can be called on GPUs.

use super::prepared::{Layout, Prepared};
use super::{CudaSource, Variant};
use crate::compiled::{Compiled, Memory};
use crate::error::Result;
use crate::graph::Graph;
use crate::plan::Plan;
use std::sync::Arc;
use warpsmith::cuda::{Context, DeviceBuffer, Stream};
use warpsmith::jit::Arch;

/// A graph ready to be called on GPUs, with tensors of any sizes that fit it and any strides. Can be shared by threads.
pub struct CudaCompiled {
    compiled: Arc<Compiled>,
}

impl CudaCompiled {
    /// Plans a graph. Kernels are compiled when a call needs them.
    ///
    /// # Errors
    /// If a node has no code.
    pub fn new(graph: Graph) -> Result<CudaCompiled> {
        CudaCompiled::of(Arc::new(Compiled::new(graph)?))
    }

    /// The same graph as one that is called on the CPU.
    ///
    /// # Errors
    /// If a node has no code.
    pub fn of(compiled: Arc<Compiled>) -> Result<CudaCompiled> {
        for kernel in &compiled.plan().kernels {
            CudaSource::new(compiled.graph(), kernel, &Variant::plain(1, false))?;
        }
        Ok(CudaCompiled { compiled })
    }

    /// The graph.
    pub fn graph(&self) -> &Graph {
        self.compiled.graph()
    }

    /// The plan.
    pub fn plan(&self) -> &Plan {
        self.compiled.plan()
    }

    /// Checks and prepares calls with tensors of these types, shapes, strides and alignment: compiles and loads what they need.
    /// Outputs whose memory is not known yet have the address 0, and must be aligned to 16 bytes later.
    ///
    /// # Errors
    /// If types or shapes do not fit, outputs overlap themselves or others, or a kernel cannot be compiled.
    pub fn prepare(
        &self,
        context: &'static Context,
        inputs: &[Memory<'_>],
        outputs: &[Memory<'_>],
    ) -> Result<Prepared> {
        self.layout(inputs, outputs)?.prepare(context)
    }

    /// Compiles what calls with such tensors need on devices of an architecture, so that the first of them finds it done.
    /// Addresses count for their alignment alone.
    ///
    /// # Errors
    /// As [`CudaCompiled::prepare`].
    pub fn compile(&self, arch: Arch, inputs: &[Memory<'_>], outputs: &[Memory<'_>]) -> Result<()> {
        self.layout(inputs, outputs)?.compile(arch)
    }

    fn layout(&self, inputs: &[Memory<'_>], outputs: &[Memory<'_>]) -> Result<Layout<'_>> {
        let shapes: Vec<&[usize]> = inputs.iter().map(|memory| memory.shape).collect();
        let sizes = self.compiled.sizes(shapes.into_iter())?;
        self.compiled.check(&sizes, inputs, outputs)?;
        Layout::new(&self.compiled, sizes, inputs, outputs)
    }

    /// Gives the graph to a stream, once. Who calls it again keeps what [`CudaCompiled::prepare`] gives.
    ///
    /// # Errors
    /// As [`CudaCompiled::prepare`], and if a kernel cannot be launched.
    ///
    /// # Safety
    /// As [`Compiled::call`], for memory of the stream's device, and until the stream has run the kernels.
    pub unsafe fn call(&self, stream: &Stream, inputs: &[Memory<'_>], outputs: &[Memory<'_>]) -> Result<()> {
        let prepared = self.prepare(stream.context(), inputs, outputs)?;
        let addresses = |all: &[Memory<'_>]| all.iter().map(|memory| memory.address).collect::<Vec<_>>();
        // Freed in the order of the stream.
        let workspace = DeviceBuffer::alloc(stream, prepared.workspace().max(1))?;
        let (inputs, outputs) = (addresses(inputs), addresses(outputs));
        // SAFETY: the caller promised the tensors, and the workspace is this call's own.
        unsafe { prepared.launch(stream, &inputs, &outputs, workspace.ptr() as usize) }
    }
}
