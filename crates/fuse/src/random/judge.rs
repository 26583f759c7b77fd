//! Whether what a compiled graph computes is right.

use super::Draw;
use crate::compiled::{Compiled, Memory};
use crate::cuda::CudaCompiled;
use crate::error::{Error, Result};
use crate::eval::{Elements, Given, evaluate_stored};
use crate::graph::Graph;
use crate::plan::Plan;
use std::fmt;
use warpsmith::cuda::{Context, DeviceBuffer};
use warpsmith::{DType, Device};

/// What lies around outputs, to find writes that went astray.
const GUARD: u8 = 0xa5;
/// Bytes of it on either side.
const GUARD_BYTES: usize = 256;

/// A result that is wrong, or a call that failed.
#[derive(Clone, Debug)]
pub struct Fault {
    /// The graph as a formula.
    pub formula: String,
    /// What is wrong.
    pub what: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}\n{}", self.what, self.formula)
    }
}

/// A tensor in memory, in some order of dimensions, perhaps with gaps.
pub(crate) struct Block {
    bytes: Vec<u64>,
    offset: usize,
    shape: Vec<usize>,
    strides: Vec<isize>,
    dtype: DType,
}

impl Block {
    pub fn new(dtype: DType, shape: &[usize], (order, gaps): &(Vec<usize>, bool)) -> Block {
        let mut strides = vec![0isize; shape.len()];
        let mut step = if *gaps { 2 } else { 1 };
        for &d in order.iter().rev() {
            strides[d] = step;
            step *= shape[d].max(1) as isize;
        }
        let words = (step as usize * dtype.size() + 2 * GUARD_BYTES).div_ceil(8);
        let bytes = vec![u64::from_ne_bytes([GUARD; 8]); words];
        // Only as aligned as elements must be.
        let offset = GUARD_BYTES + if *gaps { dtype.size() } else { 0 };
        Block { bytes, offset, shape: shape.to_vec(), strides, dtype }
    }

    pub fn memory(&mut self) -> Memory<'_> {
        let address = self.bytes.as_mut_ptr() as usize + self.offset;
        Memory { address, dtype: self.dtype, shape: &self.shape, strides: &self.strides }
    }

    /// The same tensor in a copy of the memory.
    fn on(&self, buffer: &DeviceBuffer) -> Memory<'_> {
        let address = buffer.ptr() as usize + self.offset;
        Memory { address, dtype: self.dtype, shape: &self.shape, strides: &self.strides }
    }

    fn raw(&mut self) -> &mut [u8] {
        let len = self.bytes.len() * 8;
        // SAFETY: the words are initialised, and any bytes are words.
        unsafe { std::slice::from_raw_parts_mut(self.bytes.as_mut_ptr().cast(), len) }
    }

    fn at(&self, mut index: usize) -> usize {
        let mut place = 0isize;
        for (&size, &stride) in self.shape.iter().zip(&self.strides).rev() {
            place += (index % size) as isize * stride;
            index /= size;
        }
        self.offset + place as usize * self.dtype.size()
    }

    fn fill(&mut self, given: &Given) {
        let (dtype, size) = (self.dtype, self.dtype.size());
        let count: usize = self.shape.iter().product();
        for index in 0..count {
            let at = self.at(index);
            let to = &mut self.raw()[at..at + size];
            match given {
                Given::Floats(all) => dtype.write(all[index], to),
                Given::Ints(all) if dtype == DType::I32 => {
                    to.copy_from_slice(&(all[index] as i32).to_ne_bytes())
                }
                Given::Ints(all) => to.copy_from_slice(&all[index].to_ne_bytes()),
            }
        }
    }

    fn float(&mut self, index: usize) -> f64 {
        let (at, dtype) = (self.at(index), self.dtype);
        dtype.read(&self.raw()[at..])
    }

    fn int(&mut self, index: usize) -> i64 {
        let (at, dtype) = (self.at(index), self.dtype);
        let bytes = &self.raw()[at..];
        match dtype {
            DType::I32 => i32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]).into(),
            _ => i64::from_ne_bytes([
                bytes[0], bytes[1], bytes[2], bytes[3], bytes[4], bytes[5], bytes[6], bytes[7],
            ]),
        }
    }

    /// Whether nothing around the elements, or in gaps, was written.
    fn is_intact(&mut self) -> bool {
        let size = self.dtype.size();
        let count: usize = self.shape.iter().product();
        let places: Vec<usize> = (0..count).map(|index| self.at(index)).collect();
        let raw = self.raw();
        places.into_iter().for_each(|at| raw[at..at + size].fill(GUARD));
        raw.iter().all(|byte| *byte == GUARD)
    }
}

/// Compiles a graph, calls it on a device, and compares every element of every output with f64. Gives the share of elements
/// about which nothing can be said.
///
/// # Errors
/// With the graph as a formula.
pub fn judge(draw: &Draw, device: Device) -> Result<f64, Fault> {
    let fault = |what: String| Fault { formula: draw.graph.to_string(), what };
    let judged = match device {
        Device::Cpu => judge_with(draw, &Compiled::new),
        Device::Cuda(ordinal) => OnCuda::new(&draw.graph, ordinal).and_then(|on| judge_on(draw, &on)),
    };
    judged.map_err(|error| fault(error.to_string()))
}

pub(crate) fn judge_with(draw: &Draw, compile: &dyn Fn(Graph) -> Result<Compiled>) -> Result<f64> {
    judge_on(draw, &compile(draw.graph.clone())?)
}

/// What can be judged.
trait Callable {
    fn plan(&self) -> &Plan;
    fn call(&self, inputs: &mut [Block], outputs: &mut [Block]) -> Result<()>;
}

impl Callable for Compiled {
    fn plan(&self) -> &Plan {
        self.plan()
    }

    fn call(&self, inputs: &mut [Block], outputs: &mut [Block]) -> Result<()> {
        let from: Vec<Memory<'_>> = inputs.iter_mut().map(Block::memory).collect();
        let to: Vec<Memory<'_>> = outputs.iter_mut().map(Block::memory).collect();
        // SAFETY: the blocks hold the tensors, and nobody else has them.
        unsafe { self.call(&from, &to) }
    }
}

/// A graph on a GPU.
struct OnCuda {
    compiled: CudaCompiled,
    context: &'static Context,
}

impl OnCuda {
    fn new(graph: &Graph, ordinal: u32) -> Result<OnCuda> {
        Ok(OnCuda { compiled: CudaCompiled::new(graph.clone())?, context: Context::get(ordinal)? })
    }

    /// One call, and the bytes of the outputs after it.
    fn call_once(&self, inputs: &mut [Block], outputs: &mut [Block]) -> Result<Vec<Vec<u8>>> {
        let stream = self.context.default_stream();
        let mut buffers = vec![];
        for block in inputs.iter_mut().chain(outputs.iter_mut()) {
            let mut buffer = DeviceBuffer::alloc(stream, block.raw().len())?;
            buffer.upload(stream, 0, block.raw())?;
            buffers.push(buffer);
        }
        let (given, taken) = buffers.split_at(inputs.len());
        let from: Vec<Memory<'_>> = inputs.iter().zip(given).map(|(block, at)| block.on(at)).collect();
        let to: Vec<Memory<'_>> = outputs.iter().zip(taken).map(|(block, at)| block.on(at)).collect();
        // SAFETY: the buffers hold the tensors, and live until the stream is done.
        unsafe { self.compiled.call(stream, &from, &to)? };
        let mut after = vec![];
        for buffer in taken {
            let mut bytes = vec![0; buffer.len()];
            buffer.download(stream, 0, &mut bytes)?;
            after.push(bytes);
        }
        stream.synchronize()?;
        Ok(after)
    }
}

impl Callable for OnCuda {
    fn plan(&self) -> &Plan {
        self.compiled.plan()
    }

    fn call(&self, inputs: &mut [Block], outputs: &mut [Block]) -> Result<()> {
        let first = self.call_once(inputs, outputs)?;
        if self.call_once(inputs, outputs)? != first {
            return Err(Error::argument("outputs", "the same bits in every run", "others"));
        }
        outputs.iter_mut().zip(first).for_each(|(block, bytes)| block.raw().copy_from_slice(&bytes));
        Ok(())
    }
}

fn judge_on(draw: &Draw, compiled: &dyn Callable) -> Result<f64> {
    let Draw { graph, inputs, layouts } = draw;
    let expected = evaluate_stored(graph, inputs, &|id| compiled.plan().passes(id))?;
    let mut given: Vec<Block> = vec![];
    for ((&id, (shape, elements)), layout) in graph.inputs().iter().zip(inputs).zip(layouts) {
        let mut block = Block::new(graph.node(id).dtype, shape, layout);
        block.fill(elements);
        given.push(block);
    }
    let mut taken: Vec<Block> = vec![];
    for (i, (_, id)) in graph.outputs().iter().enumerate() {
        let value = &expected[id.index()];
        let mut order: Vec<usize> = (0..value.shape.len()).collect();
        if i % 2 == 1 {
            order.reverse();
        }
        taken.push(Block::new(graph.node(*id).dtype, &value.shape, &(order, i % 3 == 2)));
    }
    compiled.call(&mut given, &mut taken)?;
    let (mut unknown, mut all) = (0usize, 0usize);
    for ((name, id), block) in graph.outputs().iter().zip(&mut taken) {
        let value = &expected[id.index()];
        let dtype = graph.node(*id).dtype;
        let wrong = |index: usize, expected: String, got: String| {
            Error::argument(format!("{name}[{index}] of {:?}", value.shape), expected, got)
        };
        match &value.elements {
            Elements::Floats(elements) => {
                for (index, element) in elements.iter().enumerate() {
                    let got = block.float(index);
                    unknown += element.is_unknown() as usize;
                    if !element.allows(got, dtype) {
                        let expected = format!("{:e} within {:e}", element.value, element.error);
                        return Err(wrong(index, expected, format!("{got:e}")));
                    }
                }
            }
            Elements::Ints(elements) => {
                for (index, element) in elements.iter().enumerate() {
                    let got = block.int(index);
                    match element {
                        None => unknown += 1,
                        Some(element) if *element != got => {
                            return Err(wrong(index, element.to_string(), got.to_string()));
                        }
                        _ => {}
                    }
                }
            }
        }
        all += value.elements.len();
        if !block.is_intact() {
            return Err(Error::argument(&**name, "writes inside the output", "a write outside"));
        }
    }
    Ok(unknown as f64 / all.max(1) as f64)
}
