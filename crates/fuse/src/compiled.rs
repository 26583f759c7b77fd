//! Graphs that can be called.

use crate::cpu::CpuKernel;
use crate::error::{Error, Result};
use crate::graph::{Graph, NodeId};
use crate::plan::Plan;
use crate::shape::Sizes;
use crate::text::show::node_name;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use warpsmith::tensor::TensorView;
use warpsmith::{DType, Device, Tensor};

/// Most elements of a tensor, so that nothing computed from shapes overflows.
const MAX_ELEMENTS: usize = 1 << 46;

/// A tensor in memory that somebody else keeps.
#[derive(Clone, Copy, Debug)]
pub struct Memory<'a> {
    /// Address of the first element; 0 if it is not known yet, which only preparing a call allows.
    pub address: usize,
    /// Type of the elements.
    pub dtype: DType,
    /// Sizes.
    pub shape: &'a [usize],
    /// Elements from one to the next along each dimension; any, also 0 and negative ones for inputs.
    pub strides: &'a [isize],
}

impl<'a> Memory<'a> {
    /// The memory of a view.
    pub fn of(view: &'a TensorView<'a>) -> Memory<'a> {
        Memory {
            address: view.address(),
            dtype: view.dtype(),
            shape: view.shape(),
            strides: view.layout().strides(),
        }
    }

    /// The bytes it lies in.
    fn range(&self) -> std::ops::Range<usize> {
        if self.shape.contains(&0) || self.address == 0 {
            return self.address..self.address;
        }
        let (mut low, mut high) = (0isize, 0isize);
        for (&size, &stride) in self.shape.iter().zip(self.strides) {
            let reach = stride.saturating_mul(size as isize - 1);
            if reach < 0 { low = low.saturating_add(reach) } else { high = high.saturating_add(reach) }
        }
        let size = self.dtype.size() as isize;
        let end = high.saturating_add(1).saturating_mul(size);
        self.address.saturating_add_signed(low.saturating_mul(size))..self.address.saturating_add_signed(end)
    }

    /// Whether two of its elements may be one. Exact for what strides usually are.
    fn overlaps_itself(&self) -> bool {
        let mut dims: Vec<(usize, usize)> = self
            .shape
            .iter()
            .zip(self.strides)
            .filter(|(size, _)| **size > 1)
            .map(|(size, stride)| (stride.unsigned_abs(), *size))
            .collect();
        dims.sort_unstable();
        let mut reach = 0usize;
        for (stride, size) in dims {
            if stride <= reach {
                return true;
            }
            reach = reach.saturating_add(stride.saturating_mul(size - 1));
        }
        false
    }
}

/// What goes from kernel to kernel: a node, its sizes and its strides.
type Between = (NodeId, Vec<usize>, Vec<isize>);

/// A graph ready to be called on the CPU, with tensors of any sizes that fit it and any strides. Can be shared by threads.
pub struct Compiled {
    graph: Arc<Graph>,
    plan: Plan,
    kernels: Vec<CpuKernel>,
    /// Memory for what goes from kernel to kernel, of calls that have ended.
    spare: Mutex<Vec<Vec<u64>>>,
}

impl Compiled {
    /// Plans a graph and prepares its kernels.
    ///
    /// # Errors
    /// If a node has no code.
    pub fn new(graph: Graph) -> Result<Compiled> {
        let plan = Plan::new(&graph);
        Compiled::with_plan(graph, plan)
    }

    /// As [`Compiled::new`], with a plan of this graph.
    ///
    /// # Errors
    /// If a node has no code.
    pub fn with_plan(graph: Graph, plan: Plan) -> Result<Compiled> {
        let graph = Arc::new(graph);
        let kernels =
            plan.kernels.iter().map(|kernel| CpuKernel::new(&graph, kernel)).collect::<Result<_>>()?;
        Ok(Compiled { graph, plan, kernels, spare: Mutex::default() })
    }

    /// The graph.
    pub fn graph(&self) -> &Graph {
        &self.graph
    }

    /// The plan.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The sizes of names in a call with inputs of these shapes.
    ///
    /// # Errors
    /// If they do not fit the graph.
    pub fn sizes<'a>(&self, shapes: impl ExactSizeIterator<Item = &'a [usize]>) -> Result<Sizes> {
        let expected = self.graph.inputs().len();
        if shapes.len() != expected {
            return Err(Error::argument("inputs", format!("{expected} tensors"), shapes.len().to_string()));
        }
        let mut sizes = Sizes::default();
        for (&id, shape) in self.graph.inputs().iter().zip(shapes) {
            sizes.bind(self.graph.input_name(id), &self.graph.node(id).shape, shape)?;
        }
        for id in self.graph.ids() {
            let shape = sizes.shape(&self.graph.node(id).shape)?;
            // A size of zero would hide the product of the others.
            let count = shape.iter().map(|size| (*size).max(1)).try_fold(1usize, usize::checked_mul);
            if count.is_none_or(|count| count > MAX_ELEMENTS) {
                let name = node_name(&self.graph, id);
                return Err(Error::argument(
                    name,
                    format!("at most {MAX_ELEMENTS} elements"),
                    format!("{shape:?}"),
                ));
            }
        }
        Ok(sizes)
    }

    /// The types and shapes of the outputs of such a call.
    ///
    /// # Errors
    /// If the shapes do not fit the graph.
    pub fn outputs<'a>(
        &self,
        shapes: impl ExactSizeIterator<Item = &'a [usize]>,
    ) -> Result<Vec<(DType, Vec<usize>)>> {
        let sizes = self.sizes(shapes)?;
        let outputs = self.graph.outputs().iter().map(|(_, id)| self.graph.node(*id));
        outputs.map(|node| Ok((node.dtype, sizes.shape(&node.shape)?))).collect()
    }

    /// Calls the graph.
    ///
    /// # Errors
    /// If types or shapes do not fit, outputs overlap themselves or others, an index is out of range, or memory runs out.
    /// Outputs may have been written then.
    ///
    /// # Safety
    /// Each tensor must be in host memory where it says, aligned to its elements. Until the call returns nobody may write the
    /// inputs, or use the outputs.
    pub unsafe fn call(&self, inputs: &[Memory<'_>], outputs: &[Memory<'_>]) -> Result<()> {
        let sizes = self.sizes(inputs.iter().map(|memory| memory.shape).collect::<Vec<_>>().into_iter())?;
        self.check(&sizes, inputs, outputs)?;
        let mut places: HashMap<NodeId, Memory<'_>> = HashMap::new();
        for (&id, memory) in self.graph.inputs().iter().zip(inputs) {
            places.insert(id, *memory);
        }
        let mut written: HashMap<NodeId, Memory<'_>> = HashMap::new();
        for ((_, id), memory) in self.graph.outputs().iter().zip(outputs) {
            written.entry(*id).or_insert(*memory);
        }
        let between = self.between(&sizes, &written)?;
        let mut lent = vec![];
        for (id, shape, strides) in &between {
            let dtype = self.graph.node(*id).dtype;
            let memory = self.borrow(shape.iter().product::<usize>() * dtype.size())?;
            written.insert(*id, Memory { address: memory.as_ptr() as usize, dtype, shape, strides });
            lent.push(memory);
        }
        let mut result = Ok(());
        for kernel in &self.kernels {
            let tensors: Vec<Memory<'_>> = kernel
                .tensors()
                .enumerate()
                .map(|(at, id)| if at < kernel.reads() { places[&id] } else { written[&id] })
                .collect();
            // SAFETY: the caller promised its tensors, and what is between kernels is this call's own.
            result = unsafe { kernel.run(&sizes, &tensors) };
            if result.is_err() {
                break;
            }
            for id in kernel.tensors().skip(kernel.reads()) {
                places.entry(id).or_insert(written[&id]);
            }
        }
        if result.is_ok() {
            self.repeat(&written, outputs);
        }
        self.spare.lock().unwrap_or_else(PoisonError::into_inner).extend(lent);
        result
    }

    /// Outputs that are another output once more.
    fn repeat(&self, written: &HashMap<NodeId, Memory<'_>>, outputs: &[Memory<'_>]) {
        for ((_, id), memory) in self.graph.outputs().iter().zip(outputs) {
            let first = &written[id];
            if first.address == memory.address {
                continue;
            }
            let count: usize = memory.shape.iter().product();
            let size = memory.dtype.size();
            for index in 0..count {
                let (from, to) = (element(first, index), element(memory, index));
                // SAFETY: both lie in tensors that the caller promised.
                unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, size) };
            }
        }
    }

    pub(crate) fn check(&self, sizes: &Sizes, inputs: &[Memory<'_>], outputs: &[Memory<'_>]) -> Result<()> {
        let wanted = self.graph.outputs();
        if outputs.len() != wanted.len() {
            return Err(Error::argument(
                "outputs",
                format!("{} tensors", wanted.len()),
                outputs.len().to_string(),
            ));
        }
        let given = self.graph.inputs().iter().map(|&id| (self.graph.input_name(id), id)).zip(inputs);
        let taken = wanted.iter().map(|(name, id)| (&**name, *id)).zip(outputs);
        for ((name, id), memory) in given.chain(taken) {
            let node = self.graph.node(id);
            if memory.dtype != node.dtype {
                return Err(Error::argument(name, node.dtype.name(), memory.dtype.name()));
            }
            let shape = sizes.shape(&node.shape)?;
            if memory.shape != shape || memory.strides.len() != shape.len() {
                return Err(Error::argument(name, format!("shape {shape:?}"), format!("{:?}", memory.shape)));
            }
            if memory.address % memory.dtype.size() != 0 {
                return Err(Error::argument(name, "an address that is aligned to its elements", "another"));
            }
        }
        for (at, ((name, _), memory)) in wanted.iter().zip(outputs).enumerate() {
            if memory.overlaps_itself() {
                return Err(Error::argument(
                    &**name,
                    "elements that are apart",
                    format!("strides {:?}", memory.strides),
                ));
            }
            let range = memory.range();
            let apart = |other: &Memory<'_>| {
                let other = other.range();
                range.is_empty() || other.is_empty() || range.end <= other.start || other.end <= range.start
            };
            if !inputs.iter().chain(&outputs[..at]).all(apart) {
                return Err(Error::argument(&**name, "memory of its own", "memory of another argument"));
            }
        }
        Ok(())
    }

    /// What kernels leave for later ones.
    pub(crate) fn between(
        &self,
        sizes: &Sizes,
        written: &HashMap<NodeId, Memory<'_>>,
    ) -> Result<Vec<Between>> {
        let ids = self.plan.kernels.iter().flat_map(|kernel| &kernel.writes);
        let own = ids.filter(|id| !written.contains_key(id));
        own.map(|&id| {
            let shape = sizes.shape(&self.graph.node(id).shape)?;
            let mut strides = vec![1isize; shape.len()];
            for d in (1..shape.len()).rev() {
                strides[d - 1] = strides[d] * shape[d] as isize;
            }
            Ok((id, shape, strides))
        })
        .collect()
    }

    fn borrow(&self, bytes: usize) -> Result<Vec<u64>> {
        let words = bytes.div_ceil(8).max(1);
        let mut spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = |memory: &Vec<u64>| memory.len() >= words && memory.len() / 4 <= words;
        if let Some(at) = spare.iter().position(fits) {
            return Ok(spare.swap_remove(at));
        }
        // What is too small or too large for this call is so for the next.
        spare.clear();
        allocate(words)
    }

    /// Calls the graph with tensors on the CPU.
    ///
    /// # Errors
    /// As [`Compiled::call`], and for tensors that are elsewhere.
    pub fn run(&self, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        for (tensor, &id) in inputs.iter().zip(self.graph.inputs()) {
            if tensor.device() != Device::Cpu {
                let name = self.graph.input_name(id);
                return Err(Error::argument(name, "a tensor on the CPU", tensor.device().to_string()));
            }
        }
        let shapes = self.outputs(inputs.iter().map(|tensor| tensor.shape()))?;
        let mut made: Vec<Tensor> = shapes
            .iter()
            .map(|(dtype, shape)| Tensor::empty(shape, *dtype, Device::Cpu))
            .collect::<warpsmith::Result<_>>()?;
        self.run_into(inputs, &mut made)?;
        Ok(made)
    }

    /// [`Compiled::run`] into tensors of the caller, of which there must be no other handles.
    ///
    /// # Errors
    /// As [`Compiled::run`], and for outputs that others have too.
    pub(crate) fn run_into(&self, inputs: &[&Tensor], outputs: &mut [Tensor]) -> Result<()> {
        let names = self.graph.outputs().iter().map(|(name, _)| name);
        for (tensor, name) in outputs.iter().zip(names) {
            if tensor.device() != Device::Cpu || tensor.is_constant() {
                return Err(Error::argument(&**name, "a tensor on the CPU that can be written", "another"));
            }
        }
        let given: Vec<TensorView<'_>> = inputs.iter().map(|tensor| tensor.view()).collect();
        let taken: Vec<TensorView<'_>> = outputs.iter().map(Tensor::view).collect();
        let given: Vec<Memory<'_>> = given.iter().map(Memory::of).collect();
        let taken: Vec<Memory<'_>> = taken.iter().map(Memory::of).collect();
        // SAFETY: the inputs are borrowed, the outputs mutably.
        unsafe { self.call(&given, &taken) }
    }
}

/// The address of element `index`.
fn element(memory: &Memory<'_>, mut index: usize) -> usize {
    let mut offset = 0isize;
    for (&size, &stride) in memory.shape.iter().zip(memory.strides).rev() {
        offset += (index % size) as isize * stride;
        index /= size;
    }
    memory.address.wrapping_add_signed(offset * memory.dtype.size() as isize)
}

/// Zeros.
pub(crate) fn allocate(words: usize) -> Result<Vec<u64>> {
    let mut memory = Vec::new();
    memory.try_reserve_exact(words).map_err(|_| {
        let all = Device::Cpu.memory().ok();
        let (free, total) = all.map_or((0, 0), |all| (all.free, all.total));
        let requested = words as u64 * 8;
        Error::Library(warpsmith::Error::OutOfMemory { device: "cpu".into(), requested, free, total })
    })?;
    memory.resize(words, 0);
    Ok(memory)
}
