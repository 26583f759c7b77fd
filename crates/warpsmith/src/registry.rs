//! Kernels, how one is chosen for a call, and the object-safe face of every op.

use crate::cpu::Tier;
use crate::device::{Device, DeviceInfo, Stream};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::infer::Form;
use crate::jit::{Arch, Source};
use crate::op::{ArgPlan, Args, Attrs, Case, Cost, Op, OpSpec};
use crate::reference::{Array, Inputs, Naive, Random, Real, with_stored};
use crate::storage::Storage;
use crate::tuned;
use std::fmt;
#[cfg(feature = "cuda")]
use std::hash::Hash;

/// Why a kernel cannot run a problem.
pub type Why = String;

/// The device half of a CUDA kernel.
pub struct CudaKernel {
    /// The embedded source.
    pub source: Source,
    /// C declarations of its parameter struct, put before the source.
    pub prelude: fn() -> String,
    /// The `extern "C"` function.
    pub function: &'static str,
    /// Oldest architecture it is written for.
    pub min_arch: Arch,
    /// Compile with fast math.
    pub fast_math: bool,
    /// What a kernel pack holds and the compile tests build: every set of defines `run` may ask for or, where these are
    /// thousands, some that together have each value of each define.
    pub variants: fn() -> Vec<Defines>,
}

/// Compile-time values of a specialised kernel.
pub type Defines = Vec<(&'static str, String)>;

/// A library of the GPU's vendor, with kernels of its own.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct VendorLibrary {
    /// Its name.
    pub name: &'static str,
    /// The sources of the calls into it, which identify the kernel instead of device code.
    pub sources: &'static [&'static str],
}

/// What a kernel runs on.
pub enum Target {
    /// The host, with the instructions of a tier.
    Cpu(Tier),
    /// A CUDA device.
    Cuda(&'static CudaKernel),
    /// A CUDA device, through a library.
    Library(VendorLibrary),
}

/// One implementation of an op.
pub struct Kernel<P: 'static> {
    /// Its name, unique over all ops.
    pub name: &'static str,
    /// Where it runs.
    pub target: Target,
    /// Further device functions the kernel launches.
    pub also: [Option<&'static CudaKernel>; 2],
    /// Whether it runs on devices too old for those: it then does without.
    pub also_optional: bool,
    /// Whether a row's bits are independent of the other rows. Only such kernels are chosen unless the caller
    /// allows others.
    pub batch_invariant: bool,
    /// Whether it can run a problem, beyond what the target implies.
    pub supports: fn(&P, &DeviceInfo) -> std::result::Result<(), Why>,
    /// The configuration it would use, for people.
    pub config: fn(&P, &DeviceInfo) -> String,
    /// Bytes of scratch memory it needs on the device.
    pub workspace: fn(&P, &DeviceInfo) -> usize,
    /// Runs it.
    pub run: fn(&Launch<'_, P>) -> Result<()>,
}

impl<P> Kernel<P> {
    /// A batch-invariant CPU kernel without conditions.
    pub const fn cpu(name: &'static str, tier: Tier, run: fn(&Launch<'_, P>) -> Result<()>) -> Self {
        Kernel {
            name,
            target: Target::Cpu(tier),
            also: [None; 2],
            also_optional: false,
            batch_invariant: true,
            supports: |_, _| Ok(()),
            config: |_, info| format!("{} threads", info.units),
            workspace: |_, _| 0,
            run,
        }
    }

    /// A batch-invariant CUDA kernel without conditions.
    pub const fn cuda(
        name: &'static str,
        kernel: &'static CudaKernel,
        run: fn(&Launch<'_, P>) -> Result<()>,
    ) -> Self {
        Self::on_device(name, Target::Cuda(kernel), true, run)
    }

    /// A kernel of a vendor's library, which promises nothing about the rest of the batch.
    pub const fn library(
        name: &'static str,
        library: VendorLibrary,
        run: fn(&Launch<'_, P>) -> Result<()>,
    ) -> Self {
        Self::on_device(name, Target::Library(library), false, run)
    }

    const fn on_device(
        name: &'static str,
        target: Target,
        batch_invariant: bool,
        run: fn(&Launch<'_, P>) -> Result<()>,
    ) -> Self {
        Kernel {
            name,
            target,
            also: [None; 2],
            also_optional: false,
            batch_invariant,
            supports: |_, _| Ok(()),
            config: |_, _| String::new(),
            workspace: |_, _| 0,
            run,
        }
    }

    /// With conditions.
    pub const fn when(mut self, supports: fn(&P, &DeviceInfo) -> std::result::Result<(), Why>) -> Self {
        self.supports = supports;
        self
    }

    /// With a printable configuration.
    pub const fn configured(mut self, config: fn(&P, &DeviceInfo) -> String) -> Self {
        self.config = config;
        self
    }

    /// With a further device function.
    pub const fn and(mut self, device: &'static CudaKernel) -> Self {
        self.also = match self.also {
            [None, _] => [Some(device), None],
            [first, None] => [first, Some(device)],
            _ => panic!("a kernel has at most three device functions"),
        };
        self
    }

    /// Where the device is too old for the further functions, it does without them.
    pub const fn or_without(mut self) -> Self {
        self.also_optional = true;
        self
    }

    /// The most demanding of the device functions that it cannot do without.
    fn most_demanding(&self) -> Option<&'static CudaKernel> {
        let Target::Cuda(cuda) = self.target else { return None };
        let also = self.also.into_iter().flatten().filter(|_| !self.also_optional);
        also.chain([cuda]).max_by_key(|kernel| (kernel.min_arch.accel, kernel.min_arch.number()))
    }

    /// With scratch memory.
    pub const fn with_workspace(mut self, workspace: fn(&P, &DeviceInfo) -> usize) -> Self {
        self.workspace = workspace;
        self
    }

    /// Whether the kernel can run `problem` on the device.
    pub fn refuses(&self, problem: &P, info: &DeviceInfo) -> Option<Why> {
        match (&self.target, info.arch) {
            (Target::Cpu(_), Some(_)) => Some("runs on the CPU only".into()),
            (Target::Cuda(_) | Target::Library(_), None) => Some("runs on CUDA devices only".into()),
            (Target::Cpu(tier), None) if *tier > info.tier => {
                Some(format!("needs {tier}, the best here is {}", info.tier))
            }
            (_, arch) => match (self.most_demanding(), arch) {
                (Some(kernel), Some(arch)) if !kernel.is_for(arch) => {
                    Some(format!("needs {}, the device is {arch}", kernel.min_arch))
                }
                _ => (self.supports)(problem, info).err(),
            },
        }
    }
}

/// One call of a kernel: everything its `run` gets.
pub struct Launch<'a, P> {
    /// The checked problem.
    pub problem: &'a P,
    /// The tensors.
    pub args: &'a Args<'a>,
    /// The device.
    pub info: &'a DeviceInfo,
    /// The order of execution.
    pub stream: &'a Stream,
    /// Address of the scratch memory asked for.
    pub workspace: usize,
    /// The tier of a CPU kernel.
    pub tier: Tier,
    /// The device half of a CUDA kernel.
    pub cuda: Option<&'static CudaKernel>,
}

impl CudaKernel {
    /// Whether it is written for this architecture: code for an `a` architecture runs on that one alone.
    pub fn is_for(&self, arch: Arch) -> bool {
        match self.min_arch.accel {
            true => self.min_arch.number() == arch.number(),
            false => self.min_arch.number() <= arch.number(),
        }
    }
}

/// How a kernel is chosen.
#[derive(Debug, Clone, Default)]
pub struct Select {
    /// Use this kernel or fail.
    pub kernel: Option<String>,
    /// Also consider kernels whose results depend on the rest of the batch.
    pub allow_batch_variant: bool,
}

/// What was chosen and what was not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Explanation {
    /// The kernel.
    pub kernel: &'static str,
    /// Why this one: named, tuned, or first that supports the problem.
    pub reason: String,
    /// Its configuration.
    pub config: String,
    /// Every other kernel of the op with the reason it was not taken.
    pub others: Vec<(&'static str, Why)>,
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} ({}) {}", self.kernel, self.reason, self.config)?;
        for (kernel, why) in &self.others {
            writeln!(f, "  not {kernel}: {why}")?;
        }
        Ok(())
    }
}

/// Facts about a kernel, for listings, packs and evidence.
#[derive(Clone, Copy)]
pub struct KernelInfo {
    /// Its name.
    pub name: &'static str,
    /// CPU tier, if it is a CPU kernel.
    pub tier: Option<Tier>,
    /// Device half, if it is a CUDA kernel.
    pub cuda: Option<&'static CudaKernel>,
    /// Further device functions it launches.
    pub also: [Option<&'static CudaKernel>; 2],
    /// The library it calls, if it is one of a vendor's library.
    pub library: Option<VendorLibrary>,
    /// The oldest architecture it runs on, if it is a CUDA kernel.
    pub min_arch: Option<Arch>,
    /// Whether results are independent of the rest of the batch.
    pub batch_invariant: bool,
}

impl KernelInfo {
    /// Whether it runs on CUDA devices rather than on the CPU.
    pub fn is_cuda(&self) -> bool {
        self.tier.is_none()
    }

    /// Identifies the kernel's code: changes whenever its source, its headers or its parameters do. CPU kernels
    /// are identified by the sources of their op and of the shared CPU parts.
    pub fn source_hash(&self, op: &str) -> String {
        if let Some(library) = self.library {
            return blake3::hash(library.sources.concat().as_bytes()).to_hex().to_string();
        }
        match self.cuda {
            Some(cuda) => {
                let hash = |k: &CudaKernel| crate::jit::source_hash(&k.source, &(k.prelude)());
                if self.also[0].is_none() {
                    return hash(cuda);
                }
                let all = self.also.iter().flatten().fold(hash(cuda), |all, also| all + &hash(also));
                blake3::hash(all.as_bytes()).to_hex().to_string()
            }
            None => crate::sources::cpu_hash(op),
        }
    }
}

/// Truth, naive result and conditioning of one case: per output argument, in `f64`.
pub struct Expected {
    /// The reference in `f64`.
    pub truth: Vec<Option<Array<f64>>>,
    /// The reference in the naive arithmetic of the dtype.
    pub naive: Vec<Option<Array<f64>>>,
    /// The standard deviation of the naive arithmetic's error, element by element.
    pub deviation: Vec<Option<Array<f64>>>,
}

/// Every [`Op`] behind one object-safe face.
pub trait AnyOp: Sync {
    /// Name, arguments, options, sizes.
    fn spec(&self) -> &'static OpSpec;
    /// The kernels.
    fn kernels(&self) -> Vec<KernelInfo>;
    /// The cases every kernel must pass.
    fn cases(&self) -> Vec<Case>;
    /// The cases that are timed.
    fn bench_cases(&self) -> Vec<Case>;
    /// The tensors of a case.
    fn plan(&self, case: &Case) -> Vec<Option<ArgPlan>>;
    /// What each output must be: see [`Op::outputs`].
    fn outputs(&self, args: &Args<'_>, attrs: &Attrs, wanted: &[usize]) -> Result<Vec<Option<Form>>>;
    /// Checks the arguments without running anything.
    fn check(&self, args: &Args<'_>, attrs: &Attrs) -> Result<()>;
    /// The least work of a call.
    fn cost(&self, args: &Args<'_>, attrs: &Attrs) -> Result<Cost>;
    /// Which kernel would run on `info`'s device, and why.
    fn explain(
        &self,
        args: &Args<'_>,
        attrs: &Attrs,
        info: &DeviceInfo,
        select: &Select,
    ) -> Result<Explanation>;
    /// Checks, selects and runs; returns what was chosen. `None` if there was nothing to do.
    fn run(
        &self,
        args: &Args<'_>,
        attrs: &Attrs,
        stream: &Stream,
        select: &Select,
    ) -> Result<Option<&'static str>>;
    /// Stores `kernel` as the tuned choice for the problem on the device; with `any_batch` only for calls that allow
    /// results to depend on the rest of the batch.
    fn remember(
        &self,
        args: &Args<'_>,
        attrs: &Attrs,
        info: &DeviceInfo,
        kernel: &str,
        any_batch: bool,
    ) -> Result<()>;
    /// Evaluates the reference in `f64` and in naive arithmetic on inputs given in `f64`. `wanted` has a bit for
    /// each argument of the call.
    fn expected(&self, dtype: DType, inputs: &[Option<Array<f64>>], wanted: u32, attrs: &Attrs) -> Expected;
}

impl<O: Op> AnyOp for O {
    fn spec(&self) -> &'static OpSpec {
        const { &O::SPEC }
    }

    fn kernels(&self) -> Vec<KernelInfo> {
        O::kernels().iter().map(info_of).collect()
    }

    fn cases(&self) -> Vec<Case> {
        O::cases()
    }

    fn bench_cases(&self) -> Vec<Case> {
        O::bench_cases()
    }

    fn plan(&self, case: &Case) -> Vec<Option<ArgPlan>> {
        O::plan(case)
    }

    fn outputs(&self, args: &Args<'_>, attrs: &Attrs, wanted: &[usize]) -> Result<Vec<Option<Form>>> {
        O::outputs(args, attrs, wanted)
    }

    fn check(&self, args: &Args<'_>, attrs: &Attrs) -> Result<()> {
        checked::<O>(args, attrs).map(|_| ())
    }

    fn cost(&self, args: &Args<'_>, attrs: &Attrs) -> Result<Cost> {
        Ok(O::cost(&checked::<O>(args, attrs)?))
    }

    fn explain(
        &self,
        args: &Args<'_>,
        attrs: &Attrs,
        info: &DeviceInfo,
        select: &Select,
    ) -> Result<Explanation> {
        let problem = checked::<O>(args, attrs)?;
        let (chosen, reason) = select_kernel::<O>(&problem, info, select)?;
        let others = O::kernels().iter().filter(|k| k.name != chosen.name).map(|k| {
            let why = k.refuses(&problem, info).unwrap_or_else(|| match k.batch_invariant {
                true => "supported, but ranked lower".into(),
                false => "supported, but not batch-invariant".into(),
            });
            (k.name, why)
        });
        Ok(Explanation {
            kernel: chosen.name,
            reason,
            config: (chosen.config)(&problem, info),
            others: others.collect(),
        })
    }

    fn run(
        &self,
        args: &Args<'_>,
        attrs: &Attrs,
        stream: &Stream,
        select: &Select,
    ) -> Result<Option<&'static str>> {
        let problem = checked::<O>(args, attrs)?;
        if args.outputs_are_empty() {
            return Ok(None);
        }
        if stream.device() != args.device() {
            let expected = format!("a stream of {}, where the tensors are", args.device());
            return Err(Error::argument(O::SPEC.name, "stream", expected, stream.device().to_string()));
        }
        let info = device_info(args.device())?;
        let (kernel, _) = select_kernel::<O>(&problem, info, select)?;
        // Stream-ordered: allocated before and freed after the kernel without waiting, and capturable.
        let scratch = match (kernel.workspace)(&problem, info) {
            0 => None,
            bytes => Some(Storage::allocate(bytes, stream)?),
        };
        (kernel.run)(&Launch {
            problem: &problem,
            args,
            info,
            stream,
            workspace: scratch.as_ref().map_or(0, Storage::address),
            tier: match kernel.target {
                Target::Cpu(tier) => tier,
                Target::Cuda(_) | Target::Library(_) => Tier::Portable,
            },
            cuda: match kernel.target {
                Target::Cpu(_) | Target::Library(_) => None,
                Target::Cuda(cuda) => Some(cuda),
            },
        })?;
        for view in (0..O::SPEC.args.len()).filter_map(|i| args.get(i)) {
            if let Some(storage) = view.storage {
                storage.note_use(stream)?;
            }
        }
        Ok(Some(kernel.name))
    }

    fn remember(
        &self,
        args: &Args<'_>,
        attrs: &Attrs,
        info: &DeviceInfo,
        kernel: &str,
        any_batch: bool,
    ) -> Result<()> {
        let problem = checked::<O>(args, attrs)?;
        let kernel = named::<O>(kernel)?;
        let hash = info_of(kernel).source_hash(O::SPEC.name);
        tuned::store(&info.name, O::SPEC.name, problem_key(&problem, any_batch), kernel.name, &hash)
    }

    fn expected(&self, dtype: DType, inputs: &[Option<Array<f64>>], wanted: u32, attrs: &Attrs) -> Expected {
        let truth = O::reference(&Inputs::new(inputs, wanted), attrs);
        let (naive, deviation) = with_stored!(dtype, T => {
            let naive = evaluate::<O, Naive<T>>(inputs, wanted, attrs, |x| x.f64());
            (naive, evaluate::<O, Random<T>>(inputs, wanted, attrs, |x| x.deviation()))
        });
        Expected { truth, naive, deviation }
    }
}

/// The reference in another arithmetic, each result seen through `read`.
fn evaluate<O: Op, R: Real>(
    inputs: &[Option<Array<f64>>],
    wanted: u32,
    attrs: &Attrs,
    read: fn(&R) -> f64,
) -> Vec<Option<Array<f64>>> {
    let inputs: Vec<Option<Array<R>>> =
        inputs.iter().map(|input| input.as_ref().map(|a| Array::of(&a.shape, &a.data))).collect();
    let outputs = O::reference(&Inputs::new(&inputs, wanted), attrs);
    let seen = |a: Array<R>| Array { shape: a.shape, data: a.data.iter().map(read).collect() };
    outputs.into_iter().map(|output| output.map(seen)).collect()
}

fn info_of<P>(kernel: &Kernel<P>) -> KernelInfo {
    let (tier, cuda, library) = match kernel.target {
        Target::Cpu(tier) => (Some(tier), None, None),
        Target::Cuda(cuda) => (None, Some(cuda), None),
        Target::Library(library) => (None, None, Some(library)),
    };
    KernelInfo {
        name: kernel.name,
        tier,
        cuda,
        also: kernel.also,
        library,
        min_arch: kernel.most_demanding().map(|cuda| cuda.min_arch),
        batch_invariant: kernel.batch_invariant,
    }
}

fn checked<O: Op>(args: &Args<'_>, attrs: &Attrs) -> Result<O::Problem> {
    args.validate()?;
    O::check(args, attrs)
}

fn named<O: Op>(name: &str) -> Result<&'static Kernel<O::Problem>> {
    O::kernels().iter().find(|k| k.name == name).ok_or_else(|| Error::UnknownKernel {
        op: O::SPEC.name,
        kernel: name.into(),
        known: O::kernels().iter().map(|k| k.name.to_string()).collect(),
    })
}

/// The kernel for a problem and the reason it was taken.
fn select_kernel<O: Op>(
    problem: &O::Problem,
    info: &DeviceInfo,
    select: &Select,
) -> Result<(&'static Kernel<O::Problem>, String)> {
    let unsupported = |refusals| Error::Unsupported {
        op: O::SPEC.name,
        device: format!("{} ({})", info.device, info.name),
        refusals,
    };
    if let Some(name) = &select.kernel {
        let kernel = named::<O>(name)?;
        return match kernel.refuses(problem, info) {
            None => Ok((kernel, "named by the caller".into())),
            Some(why) => Err(unsupported(vec![(kernel.name.into(), why)])),
        };
    }
    let allowed = |k: &&'static Kernel<O::Problem>| {
        (k.batch_invariant || select.allow_batch_variant) && k.refuses(problem, info).is_none()
    };
    let tuned_for = |any_batch: bool| {
        let choice = tuned::lookup(&info.name, O::SPEC.name, || problem_key(problem, any_batch))?;
        let kernel = O::kernels().iter().find(|k| k.name == choice.kernel).filter(allowed)?;
        (info_of(kernel).source_hash(O::SPEC.name) == choice.source_hash).then_some(kernel)
    };
    let tuned = select.allow_batch_variant.then(|| tuned_for(true)).flatten();
    if let Some(kernel) = tuned.or_else(|| tuned_for(false)) {
        return Ok((kernel, "tuned on this device".into()));
    }
    if let Some(kernel) = O::kernels().iter().find(allowed) {
        return Ok((kernel, "first in rank that supports the problem".into()));
    }
    let refusals = O::kernels().iter().map(|k| {
        let why = k
            .refuses(problem, info)
            .unwrap_or_else(|| "not batch-invariant, and the caller did not allow that".into());
        (k.name.to_string(), why)
    });
    Err(unsupported(refusals.collect()))
}

/// A stable identity of a problem on one machine: its debug form, hashed. `any_batch`: for calls that allow results to
/// depend on the rest of the batch.
fn problem_key<P: fmt::Debug>(problem: &P, any_batch: bool) -> String {
    let hash = &blake3::hash(format!("{problem:?}").as_bytes()).to_hex()[..32];
    if any_batch { format!("{hash}, any batch") } else { hash.to_string() }
}

/// Facts about a device, read once per process.
fn device_info(device: Device) -> Result<&'static DeviceInfo> {
    use std::collections::HashMap;
    use std::sync::{LazyLock, RwLock};
    static KNOWN: LazyLock<RwLock<HashMap<Device, &'static DeviceInfo>>> = LazyLock::new(Default::default);
    if let Some(info) = KNOWN.read().unwrap_or_else(|e| e.into_inner()).get(&device) {
        return Ok(info);
    }
    let info: &'static DeviceInfo = Box::leak(Box::new(device.info()?));
    Ok(KNOWN.write().unwrap_or_else(|e| e.into_inner()).entry(device).or_insert(info))
}

/// A hash for in-process tables.
#[cfg(feature = "cuda")]
pub(crate) fn quick_hash(value: &impl Hash) -> u64 {
    use std::hash::Hasher;
    let mut hasher = std::hash::DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}
