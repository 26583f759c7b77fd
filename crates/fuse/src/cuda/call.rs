//! Calls on a GPU: parameters, grids and launches. Nothing here waits for the device.

use super::CudaSource;
use crate::compiled::{Compiled, Memory};
use crate::error::{Error, Result};
use crate::geometry::Geometry;
use crate::graph::{Graph, NodeId};
use crate::kernel::{Role, Shape};
use crate::plan::{Kind, Plan};
use crate::shape::Sizes;
use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use warpsmith::cuda::{DeviceBuffer, Function, LaunchConfig, Module, Stream, launch};
use warpsmith::jit::{self, Arch};

const TENSORS: usize = 26;
const OUTER: usize = 7;
const SIZES: usize = 8;
/// Most blocks of a grid; threads go on to further rows.
const MAX_BLOCKS: usize = 1 << 20;
/// Blocks that sums over rows are spread over, and rows of a piece, at least.
const SUM_BLOCKS: usize = 512;
const PIECE: usize = 16;
/// Largest second or third dimension of a grid.
const MAX_GRID: usize = 65_535;

/// The twin of the struct in `support.cuh`.
#[derive(Clone, Copy)]
#[repr(C)]
struct Params {
    address: [u64; TENSORS],
    rows: [[i64; OUTER]; TENSORS],
    step: [i64; TENSORS],
    table_rows: [i64; TENSORS],
    outer: [i64; OUTER],
    num_rows: i64,
    columns: i64,
    kept: i64,
    pieces: i64,
    partials: u64,
    astray: u64,
    sizes: [f32; SIZES],
    rank: i32,
    unused: i32,
}

/// A kernel for one layout, loaded.
#[derive(Clone, Copy)]
struct Loaded {
    kernel: &'static Function,
    total: Option<&'static Function>,
}

/// What a loaded kernel depends on beside its graph: the device, its place in the plan, and its macros.
type Key = (u32, usize, String, Vec<(String, String)>);

/// A graph ready to be called on GPUs. Running it has not been proven on a device yet; its sources compile.
pub struct CudaCompiled {
    compiled: Compiled,
    loaded: Mutex<HashMap<Key, Loaded>>,
}

impl CudaCompiled {
    /// Plans a graph. Kernels are compiled when a call needs them.
    ///
    /// # Errors
    /// If a node has no code, or two outputs are one node.
    pub fn new(graph: Graph) -> Result<CudaCompiled> {
        let outputs = graph.outputs();
        for (i, (name, id)) in outputs.iter().enumerate() {
            if outputs[..i].iter().any(|(_, other)| other == id) {
                return Err(Error::node(
                    &**name,
                    "is another output too; on a GPU, outputs are different nodes",
                ));
            }
        }
        let compiled = Compiled::new(graph)?;
        for kernel in &compiled.plan().kernels {
            CudaSource::new(compiled.graph(), kernel, 1, &|_| false)?;
        }
        Ok(CudaCompiled { compiled, loaded: Mutex::default() })
    }

    /// The graph.
    pub fn graph(&self) -> &Graph {
        self.compiled.graph()
    }

    /// The plan.
    pub fn plan(&self) -> &Plan {
        self.compiled.plan()
    }

    /// Gives the graph to a stream. An index out of range reads the first row, which the device does not report.
    ///
    /// # Errors
    /// As [`Compiled::call`], and if a kernel cannot be compiled or launched.
    ///
    /// # Safety
    /// As [`Compiled::call`], for memory of the stream's device, and until the stream has run the kernels.
    pub unsafe fn call(&self, stream: &Stream, inputs: &[Memory<'_>], outputs: &[Memory<'_>]) -> Result<()> {
        let compiled = &self.compiled;
        let shapes: Vec<&[usize]> = inputs.iter().map(|memory| memory.shape).collect();
        let sizes = compiled.sizes(shapes.into_iter())?;
        compiled.check(&sizes, inputs, outputs)?;
        let mut places: HashMap<NodeId, Memory<'_>> = HashMap::new();
        places.extend(self.graph().inputs().iter().copied().zip(inputs.iter().copied()));
        let mut written: HashMap<NodeId, Memory<'_>> = HashMap::new();
        written.extend(self.graph().outputs().iter().map(|(_, id)| *id).zip(outputs.iter().copied()));
        let between = compiled.between(&sizes, &written)?;
        let mut lent = vec![];
        for (id, shape, strides) in &between {
            let dtype = self.graph().node(*id).dtype;
            let memory =
                DeviceBuffer::alloc(stream, (shape.iter().product::<usize>() * dtype.size()).max(1))?;
            written.insert(*id, Memory { address: memory.ptr() as usize, dtype, shape, strides });
            lent.push(memory);
        }
        for (index, kernel) in self.plan().kernels.iter().enumerate() {
            let shape = Shape::new(self.graph(), kernel);
            let reads = shape.reads.len();
            let pick = |(at, id): (usize, NodeId)| if at < reads { places[&id] } else { written[&id] };
            let tensors: Vec<Memory<'_>> = shape.tensors().enumerate().map(pick).collect();
            // SAFETY: the caller promised its tensors; what is between kernels is freed in the order of the stream.
            unsafe { self.launch(stream, index, &shape, &sizes, &tensors)? };
            for id in shape.tensors().skip(reads) {
                places.entry(id).or_insert(written[&id]);
            }
        }
        Ok(())
    }

    unsafe fn launch(
        &self,
        stream: &Stream,
        index: usize,
        shape: &Shape,
        sizes: &Sizes,
        tensors: &[Memory<'_>],
    ) -> Result<()> {
        let kernel = &self.plan().kernels[index];
        let geometry = Geometry::new(self.graph(), shape, sizes, tensors)?;
        let (rows, columns) = (geometry.rows(), geometry.columns);
        if geometry.places.len() > TENSORS || geometry.outer.len() > OUTER {
            return Err(Error::node("kernel", "has too many tensors or dimensions for a GPU"));
        }
        if rows * columns == 0 && kernel.kind == Kind::Elements {
            return Ok(());
        }
        let vector = super::Config::new(self.graph(), kernel, columns).vector;
        let dense = |t: usize| {
            let place = &geometry.places[t];
            let stride = |stride: &isize| stride % 16 == 0;
            let rows = match &geometry.tables[t] {
                Some(table) => stride(&table.stride),
                None => place.rows.iter().all(stride),
            };
            place.step == 1
                && (place.address as usize).is_multiple_of(16)
                && rows
                && columns.is_multiple_of(vector)
        };
        let source = CudaSource::new(self.graph(), kernel, columns, &dense)?;
        let loaded = self.load(stream, index, &source, kernel.kind)?;
        let mut params = self.params(&geometry, &source, sizes)?;
        let config = source.config;
        // Indices out of range leave a note, which nobody reads so far.
        let astray = DeviceBuffer::alloc(stream, 8)?;
        params.astray = astray.ptr();
        let run = |function: &Function, grid: [usize; 3], threads: usize, params: &Params| {
            let grid = grid.map(|blocks| u32::try_from(blocks).unwrap_or(u32::MAX));
            let config = LaunchConfig { pdl: true, ..LaunchConfig::new(grid, [threads as u32, 1, 1], 0) };
            // SAFETY: `Params` is the twin of the kernels' parameter; the caller promised the tensors.
            unsafe { launch(function, stream, &config, params) }
        };
        match kernel.kind {
            Kind::Elements => {
                let units = rows * columns.div_ceil(config.vector);
                run(loaded.kernel, [units.div_ceil(256).min(MAX_BLOCKS), 1, 1], 256, &params)?;
            }
            Kind::Rows if rows > 0 => {
                let blocks = rows.div_ceil(config.rows).min(MAX_BLOCKS);
                run(loaded.kernel, [blocks, 1, 1], config.lanes * config.rows, &params)?;
            }
            Kind::Rows => {}
            Kind::Columns => {
                let kept: usize = geometry.outer[geometry.summed..].iter().product();
                let summed: usize = geometry.outer[..geometry.summed].iter().product();
                if kept * columns == 0 {
                    return Ok(());
                }
                let tiles = columns.div_ceil(config.lanes * config.vector * config.items);
                if kept > MAX_GRID || tiles > MAX_GRID {
                    return Err(Error::node("sum_to", "keeps too many rows for a GPU"));
                }
                let pieces = (SUM_BLOCKS / (kept * tiles)).clamp(1, summed.div_ceil(PIECE).max(1));
                let bytes = pieces * shape.sums.len() * kept * columns * size_of::<f32>();
                let partials = DeviceBuffer::alloc(stream, bytes)?;
                params.kept = kept as i64;
                params.pieces = pieces as i64;
                params.partials = partials.ptr();
                run(loaded.kernel, [pieces, kept, tiles], config.lanes, &params)?;
                if let Some(total) = loaded.total {
                    run(total, [(kept * columns).div_ceil(256), 1, 1], 256, &params)?;
                }
            }
        }
        Ok(())
    }

    fn params(&self, geometry: &Geometry, source: &CudaSource, sizes: &Sizes) -> Result<Params> {
        let mut params = Params {
            address: [0; TENSORS],
            rows: [[0; OUTER]; TENSORS],
            step: [0; TENSORS],
            table_rows: [0; TENSORS],
            outer: [1; OUTER],
            num_rows: geometry.rows() as i64,
            columns: geometry.columns as i64,
            kept: 1,
            pieces: 1,
            partials: 0,
            astray: 0,
            sizes: [0.0; SIZES],
            rank: geometry.outer.len() as i32,
            unused: 0,
        };
        for (t, place) in geometry.places.iter().enumerate() {
            params.address[t] = place.address as u64;
            params.step[t] = place.step as i64;
            place.rows.iter().zip(&mut params.rows[t]).for_each(|(from, to)| *to = *from as i64);
            if let (Role::Table, Some(table)) = (place.role, geometry.tables[t]) {
                params.rows[t][0] = table.stride as i64;
                params.table_rows[t] = table.rows as i64;
            }
        }
        geometry.outer.iter().zip(&mut params.outer).for_each(|(from, to)| *to = *from as i64);
        if source.sizes.len() > SIZES {
            return Err(Error::node("size", format!("of more than {SIZES} names in one kernel")));
        }
        for (to, dim) in params.sizes.iter_mut().zip(&source.sizes) {
            *to = sizes.of(dim)? as f32;
        }
        Ok(params)
    }

    fn load(&self, stream: &Stream, index: usize, source: &CudaSource, kind: Kind) -> Result<Loaded> {
        let context = stream.context();
        let key = (context.ordinal(), index, source.name.clone(), source.defines.clone());
        let mut all = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(loaded) = all.get(&key) {
            return Ok(*loaded);
        }
        let props = context.info();
        let arch = Arch::for_device(props.major as u8, props.minor as u8);
        let compiled = source.with_request(arch, jit::get)?;
        let module = Module::get(context, &compiled.key.to_string(), &compiled.cubin)?;
        let total = match kind {
            Kind::Columns => Some(module.function(&format!("{}_total", source.name))?),
            _ => None,
        };
        let loaded = Loaded { kernel: module.function(&source.name)?, total };
        all.insert(key, loaded);
        Ok(loaded)
    }
}
