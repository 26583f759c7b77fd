//! Calls of a graph with tensors of one form: everything about them but addresses.

use super::params::launch_words;
use super::{CudaSource, Rows, Variant};
use crate::compiled::{Compiled, Memory};
use crate::error::{Error, Result};
use crate::geometry::Geometry;
use crate::graph::NodeId;
use crate::kernel::{Role, Shape};
use crate::plan::{Kernel, Kind};
use crate::shape::Sizes;
use std::collections::HashMap;
use warpsmith::cuda::{Context, Function, LaunchConfig, Module, Stream};
use warpsmith::jit::{self, Arch};

/// Most blocks of a grid; threads go on to further rows.
const MAX_BLOCKS: usize = 1 << 20;
/// What tensors in the workspace begin at multiples of.
const ALIGNMENT: usize = 256;
/// Bytes that a thread moves at once, at most.
const VECTOR_BYTES: usize = 16;

/// Where a tensor of a kernel is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Source {
    Input(usize),
    Output(usize),
    /// Bytes from the beginning of the workspace.
    Workspace(usize),
}

/// A launch of a kernel, and where its addresses come from.
struct Launch {
    function: &'static Function,
    config: LaunchConfig,
    words: Vec<u64>,
    addresses: Vec<(usize, Source)>,
}

/// Calls of a graph with tensors of one form on one device, ready but for addresses. Nothing of a call waits for the device,
/// allocates or compiles, so that it can be captured.
pub struct Prepared {
    context: &'static Context,
    launches: Vec<Launch>,
    workspace: usize,
}

impl Prepared {
    /// Bytes that a call needs while its kernels run, at an address that is a multiple of 256.
    pub fn workspace(&self) -> usize {
        self.workspace
    }

    /// The device.
    pub fn context(&self) -> &'static Context {
        self.context
    }

    /// Gives the kernels of a call to a stream. An index out of range reads the first row, which the device does not report.
    ///
    /// # Errors
    /// If a kernel cannot be launched.
    ///
    /// # Safety
    /// The addresses must be those of tensors of the types, shapes, strides and alignment that this was made for, in memory of
    /// the device, and `workspace` that of as many bytes as [`Prepared::workspace`] says. Until the stream has run the kernels
    /// nobody may write the inputs, or use the outputs or the workspace. Outputs overlap neither themselves nor others.
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        inputs: &[usize],
        outputs: &[usize],
        workspace: usize,
    ) -> Result<()> {
        let address = |source: Source| match source {
            Source::Input(at) => inputs[at],
            Source::Output(at) => outputs[at],
            Source::Workspace(offset) => workspace + offset,
        };
        for launch in &self.launches {
            let addresses = launch.addresses.iter().map(|&(at, source)| (at, address(source) as u64));
            // SAFETY: the words were made for the kernel; the caller promised the tensors.
            unsafe { launch_words(launch.function, stream, &launch.config, &launch.words, addresses)? };
        }
        Ok(())
    }
}

/// Makes a [`Prepared`].
pub(super) struct Preparation<'a> {
    pub compiled: &'a Compiled,
    pub context: &'static Context,
    pub sizes: Sizes,
    made: Prepared,
}

/// A tensor of the call: where it is, and its form. Of addresses only the alignment counts.
type Place<'a> = (Source, Memory<'a>);

impl<'a> Preparation<'a> {
    pub fn new(compiled: &'a Compiled, context: &'static Context, sizes: Sizes) -> Preparation<'a> {
        let made = Prepared { context, launches: vec![], workspace: 0 };
        Preparation { compiled, context, sizes, made }
    }

    pub fn run(mut self, inputs: &[Memory<'_>], outputs: &[Memory<'_>]) -> Result<Prepared> {
        let (compiled, graph) = (self.compiled, self.compiled.graph());
        let mut places: HashMap<NodeId, Place<'_>> = HashMap::new();
        for (at, (&id, memory)) in graph.inputs().iter().zip(inputs).enumerate() {
            places.insert(id, (Source::Input(at), *memory));
        }
        let mut written: HashMap<NodeId, Place<'_>> = HashMap::new();
        let mut repeated = vec![];
        for (at, ((_, id), memory)) in graph.outputs().iter().zip(outputs).enumerate() {
            let place = (Source::Output(at), *memory);
            match written.contains_key(id) {
                true => repeated.push((*id, place)),
                false => drop(written.insert(*id, place)),
            }
        }
        let known: HashMap<NodeId, Memory<'_>> = written.iter().map(|(id, place)| (*id, place.1)).collect();
        let between = compiled.between(&self.sizes, &known)?;
        for (id, shape, strides) in &between {
            let dtype = graph.node(*id).dtype;
            let offset = self.reserve(shape.iter().product::<usize>() * dtype.size());
            written.insert(*id, (Source::Workspace(offset), Memory { address: 0, dtype, shape, strides }));
        }
        for kernel in &compiled.plan().kernels {
            let shape = Shape::new(graph, kernel);
            let reads = shape.reads.len();
            let pick = |(at, id): (usize, NodeId)| if at < reads { places[&id] } else { written[&id] };
            let tensors: Vec<Place<'_>> = shape.tensors().enumerate().map(pick).collect();
            self.kernel(kernel, &shape, &tensors)?;
            for id in shape.tensors().skip(reads) {
                places.entry(id).or_insert(written[&id]);
            }
        }
        // Outputs that are another output once more.
        for (id, place) in repeated {
            let domain = graph.node(id).shape.clone();
            let kernel =
                Kernel { kind: Kind::Elements, domain, nodes: vec![], reads: vec![id], writes: vec![id] };
            self.kernel(&kernel, &Shape::new(graph, &kernel), &[written[&id], place])?;
        }
        Ok(self.made)
    }

    /// Bytes of the workspace.
    fn reserve(&mut self, bytes: usize) -> usize {
        let offset = self.made.workspace;
        self.made.workspace = offset.saturating_add(bytes.next_multiple_of(ALIGNMENT));
        offset
    }

    fn kernel(&mut self, kernel: &Kernel, shape: &Shape, tensors: &[Place<'_>]) -> Result<()> {
        let graph = self.compiled.graph();
        let memories: Vec<Memory<'_>> = tensors.iter().map(|(_, memory)| *memory).collect();
        let geometry = Geometry::new(graph, shape, &self.sizes, &memories)?;
        let variant = variant(kernel, &geometry, &memories);
        let (rows, columns) = (geometry.rows(), geometry.columns);
        let empty = match kernel.kind {
            Kind::Elements => rows * columns == 0,
            Kind::Rows => rows == 0,
            Kind::Columns => variant.kept * columns == 0,
        };
        if empty {
            return Ok(());
        }
        let source = CudaSource::new(graph, kernel, &variant)?;
        let module = self.module(&source)?;
        let config = source.config;
        let mut addresses: Vec<(usize, Source)> =
            tensors.iter().map(|(source, _)| *source).enumerate().collect();
        let mut numbers = vec![];
        for dim in &source.sizes {
            numbers.push(self.sizes.of(dim)? as f32);
        }
        let words = |pieces| source.extents.words(&geometry, variant.kept, pieces, &numbers);
        let (blocks, threads) = match kernel.kind {
            Kind::Elements => {
                let units = rows * columns.div_ceil(config.vector * config.lanes) * config.lanes;
                (units.div_ceil(256).min(MAX_BLOCKS), 256)
            }
            Kind::Rows => (rows.div_ceil(config.rows).min(MAX_BLOCKS), config.lanes * config.rows),
            Kind::Columns => {
                (config.pieces * variant.kept * config.tiles(columns), config.lanes * config.rows)
            }
        };
        let totals = source.has_totals(kernel.kind);
        // Rows that are read again are summed in memory, where no rows leave nothing.
        let nothing = config.kept == Rows::ReadAgain && variant.summed == 0 && totals;
        let pieces = if nothing { 0 } else { config.pieces };
        if totals {
            let bytes = pieces * shape.sums.len() * variant.kept * columns * size_of::<f32>();
            let partials = self.reserve(bytes);
            addresses.push((source.extents.partials(), Source::Workspace(partials)));
        }
        if !nothing {
            let function = module.function(&source.name)?;
            let config = launch_config([blocks, 1], threads)?;
            self.made.launches.push(Launch {
                function,
                config,
                words: words(pieces),
                addresses: addresses.clone(),
            });
        }
        if totals {
            let function = module.function(&format!("{}_total", source.name))?;
            let config = launch_config([(variant.kept * columns).div_ceil(32), shape.sums.len()], 256)?;
            self.made.launches.push(Launch { function, config, words: words(pieces), addresses });
        }
        Ok(())
    }

    fn module(&self, source: &CudaSource) -> Result<&'static Module> {
        let props = self.context.info();
        let arch = Arch::for_device(props.major as u8, props.minor as u8);
        let key = source.with_request(arch, |request| request.key().to_string());
        if let Some(module) = Module::loaded(self.context, &key) {
            return Ok(module);
        }
        let compiled = source.with_request(arch, jit::get)?;
        Ok(Module::get(self.context, &compiled.key.to_string(), &compiled.cubin)?)
    }
}

fn launch_config([x, y]: [usize; 2], threads: usize) -> Result<LaunchConfig> {
    let blocks = |count: usize| {
        u32::try_from(count).map_err(|_| Error::node("kernel", format!("needs {count} blocks of threads")))
    };
    let grid = [blocks(x)?, blocks(y)?, 1];
    Ok(LaunchConfig { pdl: true, ..LaunchConfig::new(grid, [threads as u32, 1, 1], 0) })
}

/// What a kernel's code depends on in a call.
fn variant(kernel: &Kernel, geometry: &Geometry, memories: &[Memory<'_>]) -> Variant {
    let columns = geometry.columns;
    let aligned = |bytes: &isize| bytes % VECTOR_BYTES as isize == 0;
    let dense = geometry.places.iter().zip(&geometry.tables).zip(memories).map(|((place, table), memory)| {
        let rows = match table {
            Some(table) => aligned(&table.stride),
            None => place.rows.iter().all(aligned),
        };
        place.role != Role::PerRow
            && place.step == 1
            && memory.address.is_multiple_of(VECTOR_BYTES)
            && (rows || geometry.outer.is_empty() && table.is_none())
    });
    let last = kernel.domain.last();
    let fixed = last == Some(&crate::Dim::Fixed(columns));
    let kept = geometry.outer[geometry.summed..].iter().product();
    let summed = geometry.outer[..geometry.summed].iter().product();
    let elements = geometry.rows().saturating_mul(columns.max(1)).saturating_mul(2);
    Variant {
        columns,
        fixed: fixed && columns > 0,
        rank: geometry.outer.len(),
        summed,
        kept,
        dense: dense.collect(),
        large: elements >= 1 << 31,
    }
}
