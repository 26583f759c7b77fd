//! Calls of a graph with tensors of one form: everything about them but addresses.

use super::params::launch_words;
use super::{CudaSource, Rows, Variant};
use crate::compiled::{Compiled, Memory};
use crate::error::{Error, Result};
use crate::geometry::Geometry;
use crate::graph::NodeId;
use crate::kernel::{Role, Shape};
use crate::op::{Op, Reduce};
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

/// A tensor of the call: where it is, and its form. Of addresses only the alignment counts.
type Place<'a> = (Source, Memory<'a>);

/// A kernel of a call: everything that its code depends on, and where its tensors are.
struct Laid {
    kind: Kind,
    /// Sums over rows.
    sums: usize,
    geometry: Geometry,
    variant: Variant,
    source: CudaSource,
    tensors: Vec<Source>,
}

/// The kernels of a call with tensors of one form, before anything is compiled. No device is needed for that.
pub(super) struct Layout<'a> {
    compiled: &'a Compiled,
    sizes: Sizes,
    workspace: usize,
    kernels: Vec<Laid>,
}

impl<'a> Layout<'a> {
    pub fn new(
        compiled: &'a Compiled,
        sizes: Sizes,
        inputs: &[Memory<'_>],
        outputs: &[Memory<'_>],
    ) -> Result<Layout<'a>> {
        let mut this = Layout { compiled, sizes, workspace: 0, kernels: vec![] };
        this.lay_out(inputs, outputs)?;
        Ok(this)
    }

    fn lay_out(&mut self, inputs: &[Memory<'_>], outputs: &[Memory<'_>]) -> Result<()> {
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
        Ok(())
    }

    /// Bytes of the workspace.
    fn reserve(&mut self, bytes: usize) -> usize {
        let offset = self.workspace;
        self.workspace = offset.saturating_add(bytes.next_multiple_of(ALIGNMENT));
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
        // As on the CPU, the largest of nothing is an error.
        let largest = |id: &&NodeId| matches!(graph.node(**id).op, Op::Reduce(Reduce::Max | Reduce::Min));
        if let Some(id) = kernel.nodes.iter().find(largest).filter(|_| columns == 0 && rows > 0) {
            return Err(Error::node(graph.node(*id).op.name(), "has no elements"));
        }
        if !empty {
            self.kernels.push(Laid {
                kind: kernel.kind,
                sums: shape.sums.len(),
                source: CudaSource::new(graph, kernel, &variant)?,
                geometry,
                variant,
                tensors: tensors.iter().map(|(source, _)| *source).collect(),
            });
        }
        Ok(())
    }

    /// Compiles the kernels that no earlier call needed, side by side.
    ///
    /// # Errors
    /// If one cannot be compiled.
    pub fn compile(&self, arch: Arch) -> Result<()> {
        let compile = |kernel: &Laid| kernel.source.with_request(arch, jit::get).map(drop);
        let Some((first, rest)) = self.kernels.split_first() else { return Ok(()) };
        let results: Vec<warpsmith::Result<()>> = std::thread::scope(|scope| {
            let others: Vec<_> = rest.iter().map(|kernel| scope.spawn(move || compile(kernel))).collect();
            let own = compile(first);
            let joined = others.into_iter().map(|other| {
                // A thread ends without a result only if the compiler panicked.
                other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            });
            std::iter::once(own).chain(joined).collect()
        });
        results.into_iter().collect::<warpsmith::Result<()>>().map_err(Into::into)
    }

    /// Compiles and loads the kernels for a device.
    ///
    /// # Errors
    /// If one cannot be compiled or loaded.
    pub fn prepare(mut self, context: &'static Context) -> Result<Prepared> {
        let props = context.info();
        let arch = Arch::for_device(props.major as u8, props.minor as u8);
        let key = |kernel: &Laid| kernel.source.with_request(arch, |request| request.key().to_string());
        if self.kernels.iter().any(|kernel| Module::loaded(context, &key(kernel)).is_none()) {
            self.compile(arch)?;
        }
        let mut launches = vec![];
        for kernel in std::mem::take(&mut self.kernels) {
            let module = match Module::loaded(context, &key(&kernel)) {
                Some(module) => module,
                None => {
                    let compiled = kernel.source.with_request(arch, jit::get)?;
                    Module::get(context, &compiled.key.to_string(), &compiled.cubin)?
                }
            };
            self.launch(kernel, module, &mut launches)?;
        }
        Ok(Prepared { context, launches, workspace: self.workspace })
    }

    fn launch(&mut self, kernel: Laid, module: &'static Module, launches: &mut Vec<Launch>) -> Result<()> {
        let Laid { kind, sums, geometry, variant, source, tensors } = kernel;
        let (rows, columns) = (geometry.rows(), geometry.columns);
        let config = source.config;
        let mut addresses: Vec<(usize, Source)> = tensors.into_iter().enumerate().collect();
        let mut numbers = vec![];
        for dim in &source.sizes {
            numbers.push(self.sizes.of(dim)? as f32);
        }
        let words = |pieces| source.extents.words(&geometry, variant.kept, pieces, &numbers);
        let (blocks, threads) = match kind {
            Kind::Elements => {
                let units = rows * columns.div_ceil(config.vector * config.lanes) * config.lanes;
                (units.div_ceil(256).min(MAX_BLOCKS), 256)
            }
            Kind::Rows => (rows.div_ceil(config.rows).min(MAX_BLOCKS), config.lanes * config.rows),
            Kind::Columns => {
                (config.pieces * variant.kept * config.tiles(columns), config.lanes * config.rows)
            }
        };
        let totals = source.has_totals(kind);
        // Rows that are read again are summed in memory, where no rows leave nothing.
        let nothing = config.kept == Rows::ReadAgain && variant.summed == 0 && totals;
        let pieces = if nothing { 0 } else { config.pieces };
        if totals {
            let bytes = pieces * sums * variant.kept * columns * size_of::<f32>();
            let partials = self.reserve(bytes);
            addresses.push((source.extents.partials(), Source::Workspace(partials)));
        }
        if !nothing {
            let function = module.function(&source.name)?;
            let config = launch_config([blocks, 1], threads)?;
            launches.push(Launch { function, config, words: words(pieces), addresses: addresses.clone() });
        }
        if totals {
            let function = module.function(&format!("{}_total", source.name))?;
            let threads = 32 * config.groups();
            let config = launch_config([(variant.kept * columns).div_ceil(32), sums], threads)?;
            launches.push(Launch { function, config, words: words(pieces), addresses });
        }
        Ok(())
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
