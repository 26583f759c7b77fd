//! Plans: what a call needs to know, found out once.
//!
//! The first call of a kind checks its arguments, chooses a kernel, compiles and loads it, and prepares its launches. All
//! that is kept in a plan, under everything it depends on: types, shapes, strides and alignment of the arguments, whether
//! they are constant, options, and the choice of kernels. Later calls compare that, check what depends on addresses alone, and launch.

use super::kernel::{Kernel, Launch, Target};
use super::select::{Select, checked, select_kernel};
use super::{Args, Attrs, Cost, Op, OpSpec};
use crate::cpu::{Tier, scratch};
use crate::device::{Device, DeviceInfo, Stream};
use crate::error::{Error, Result};
use crate::profile;
use crate::tensor::storage::HostBuffer;
use crate::tensor::{DType, Layout, Refusal, Tensor, TensorView};
use std::any::TypeId;
use std::cell::Cell;
use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hash, Hasher};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, RwLock};

/// Only the lowest bits of addresses matter: no kernel moves more than 16 bytes at once.
const ALIGNMENT: usize = 16;
/// Most plans that are kept.
const MOST_PLANS: usize = 4096;
/// What kernels may assume about a workspace.
const WORKSPACE_ALIGNMENT: usize = 64;

/// A prepared call of an op: launches with any tensors of the same types, shapes, strides and alignment.
///
/// Calls find their plans by themselves. Holding one saves the look-up, and proves that all slow work is done.
#[derive(Clone)]
pub struct Plan(Arc<Inner>);

struct Inner {
    signature: Signature,
    /// Nothing if there is nothing to do.
    work: Option<Work>,
    device: Device,
    /// Whether it was found again since it was last spared.
    found_again: AtomicBool,
}

struct Work {
    kernel: &'static str,
    workspace: usize,
    run: Box<dyn Run>,
    /// Of the problem; evaluated for profiles alone.
    cost: Box<dyn Fn() -> Cost + Send + Sync>,
}

/// The part of a plan that knows the op's problem.
trait Run: Send + Sync {
    fn run(&self, args: &Args<'_>, stream: &Stream, workspace: usize) -> Result<()>;
}

/// Everything a plan depends on.
struct Signature {
    /// The op itself: two ops of different crates may have one name.
    op: TypeId,
    spec: &'static OpSpec,
    attrs: Attrs,
    select: Select,
    args: Box<[Option<Form>]>,
}

/// What a plan depends on of one argument.
#[derive(Clone, Copy, PartialEq)]
struct Form {
    dtype: DType,
    device: Device,
    layout: Layout,
    misalignment: u8,
    constant: bool,
}

impl Form {
    fn of(view: &TensorView<'_>) -> Form {
        let misalignment = (view.address() % ALIGNMENT) as u8;
        Form {
            dtype: view.dtype(),
            device: view.device(),
            layout: *view.layout(),
            misalignment,
            constant: view.is_constant(),
        }
    }

    fn is(&self, view: &TensorView<'_>) -> bool {
        self.misalignment == (view.address() % ALIGNMENT) as u8
            && self.dtype == view.dtype()
            && self.device == view.device()
            && self.constant == view.is_constant()
            && self.layout == *view.layout()
    }
}

impl Signature {
    fn of(asked: &Asked<'_>) -> Signature {
        let (spec, args) = (asked.maker.spec, asked.args);
        let args = (0..spec.args.len()).map(|index| args.get(index).map(Form::of)).collect();
        Signature { op: asked.maker.op, spec, attrs: *asked.attrs, select: asked.select.clone(), args }
    }

    fn is(&self, asked: &Asked<'_>) -> bool {
        self.op == asked.maker.op
            && self.attrs == *asked.attrs
            && self.select == *asked.select
            && self.fits(asked.args)
    }

    /// Whether arguments are of the op and of the forms that the plan was made for.
    fn fits(&self, args: &Args<'_>) -> bool {
        self.spec.takes_the_same(args.spec())
            && self.args.iter().enumerate().all(|(index, form)| match (form, args.get(index)) {
                (None, None) => true,
                (Some(form), Some(view)) => form.is(view),
                _ => false,
            })
    }
}

/// What plans need of an op's type, so that looking for them is compiled once and not for each op.
pub(super) struct Maker {
    op: TypeId,
    /// The op's own description, not that of the arguments: it decides which of them exist.
    spec: &'static OpSpec,
    make: fn(&Asked<'_>, Option<&Stream>) -> Result<Option<Work>>,
    /// Notes what a call needs on a GPU that is only described.
    #[cfg(feature = "cuda")]
    pub(super) note: fn(&DeviceInfo, &Asked<'_>) -> Result<()>,
}

impl Maker {
    fn of<O: Op>() -> &'static Maker {
        const {
            &Maker {
                op: TypeId::of::<O>(),
                spec: &O::SPEC,
                make: make::<O>,
                #[cfg(feature = "cuda")]
                note: super::survey::note::<O>,
            }
        }
    }
}

/// A call that a plan is wanted for.
#[derive(Clone, Copy)]
pub(super) struct Asked<'a> {
    pub maker: &'static Maker,
    pub args: &'a Args<'a>,
    pub attrs: &'a Attrs,
    pub select: &'a Select,
}

impl<'a> Asked<'a> {
    pub fn of<O: Op>(args: &'a Args<'_>, attrs: &'a Attrs, select: &'a Select) -> Asked<'a> {
        Asked { maker: Maker::of::<O>(), args, attrs, select }
    }
}

/// A quick hash of everything a plan depends on. Plans with the same hash are compared.
fn hash(asked: &Asked<'_>) -> u64 {
    let Asked { maker, args, attrs, select } = asked;
    let mut mix = Mix(0);
    maker.op.hash(&mut mix);
    for (index, view) in args.given() {
        let layout = view.layout();
        mix.add(((index << 16) | (layout.rank() << 8) | (view.address() % ALIGNMENT)) as u64);
        mix.add(view.dtype() as u64);
        for (&size, &stride) in layout.shape().iter().zip(layout.strides()) {
            mix.add(size as u64);
            mix.add(stride as u64);
        }
    }
    attrs.bits().for_each(|bits| mix.add(bits));
    mix.add(select.allow_batch_variant as u64);
    mix.0
}

/// Multiplies and rotates each word into the state.
struct Mix(u64);

impl Mix {
    fn add(&mut self, word: u64) {
        self.0 = (self.0.rotate_left(5) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

impl Hasher for Mix {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.add(byte.into()));
    }
    fn write_u64(&mut self, word: u64) {
        self.add(word);
    }
    fn finish(&self) -> u64 {
        self.0
    }
}

/// The plans that are kept: beyond [`MOST_PLANS`] each new one takes the place of an old one that is not in use.
#[derive(Default)]
struct Table {
    /// By their hash, which is one already.
    by_hash: HashMap<u64, Vec<Plan>, BuildHasherDefault<Identity>>,
    /// All of them with their hashes. The first goes next, unless it was found again since it came to the end of the queue.
    queue: VecDeque<(u64, Plan)>,
}

impl Table {
    fn find(&self, hash: u64, asked: &Asked<'_>) -> Option<&Plan> {
        let plan = self.by_hash.get(&hash)?.iter().find(|plan| plan.is_of(asked))?;
        // Read before writing, so that a flag many threads check stays in all their caches.
        if !plan.0.found_again.load(Ordering::Relaxed) {
            plan.0.found_again.store(true, Ordering::Relaxed);
        }
        Some(plan)
    }

    fn insert(&mut self, hash: u64, plan: Plan) {
        while self.queue.len() >= MOST_PLANS
            && let Some((old_hash, old)) = self.queue.pop_front()
        {
            if old.0.found_again.swap(false, Ordering::Relaxed) {
                self.queue.push_back((old_hash, old));
            } else if let Entry::Occupied(mut same) = self.by_hash.entry(old_hash) {
                same.get_mut().retain(|plan| !Arc::ptr_eq(&plan.0, &old.0));
                if same.get().is_empty() {
                    same.remove();
                }
            }
        }
        self.by_hash.entry(hash).or_default().push(plan.clone());
        self.queue.push_back((hash, plan));
    }

    fn clear(&mut self) {
        self.by_hash.clear();
        self.queue.clear();
    }
}

#[derive(Default)]
struct Identity(u64);

impl Hasher for Identity {
    fn write(&mut self, _: &[u8]) {
        unreachable!("only hashes are hashed");
    }
    fn write_u64(&mut self, hash: u64) {
        // The table uses the upper bits for something other than the lower ones.
        self.0 = hash ^ hash >> 32;
    }
    fn finish(&self) -> u64 {
        self.0
    }
}

static PLANS: LazyLock<RwLock<Table>> = LazyLock::new(Default::default);

/// Drops all cached plans, because kernel choices may change. Plans that callers hold are not affected.
pub(super) fn forget() {
    PLANS.write().unwrap_or_else(|e| e.into_inner()).clear();
}

impl Plan {
    /// The plan of a call: the one made before, or a new one. A call on a stream of another device has none.
    pub(super) fn find(asked: &Asked<'_>, stream: Option<&Stream>) -> Result<Plan> {
        let hash = hash(asked);
        #[cfg(feature = "cuda")]
        if let Some(plan) = super::survey::plan(hash, asked)? {
            return Ok(plan);
        }
        {
            let plans = PLANS.read().unwrap_or_else(|e| e.into_inner());
            if let Some(plan) = plans.find(hash, asked) {
                return Ok(plan.clone());
            }
        }
        let plan = Plan::of(asked, (asked.maker.make)(asked, stream)?);
        PLANS.write().unwrap_or_else(|e| e.into_inner()).insert(hash, plan.clone());
        Ok(plan)
    }

    fn of(asked: &Asked<'_>, work: Option<Work>) -> Plan {
        let signature = Signature::of(asked);
        Plan(Arc::new(Inner {
            signature,
            work,
            device: asked.args.device(),
            found_again: AtomicBool::new(false),
        }))
    }

    /// A plan that does nothing.
    #[cfg(feature = "cuda")]
    pub(super) fn empty(asked: &Asked<'_>) -> Plan {
        Plan::of(asked, None)
    }

    /// The kernel it launches; nothing if there is nothing to do.
    pub fn kernel(&self) -> Option<&'static str> {
        self.0.work.as_ref().map(|work| work.kernel)
    }

    /// Bytes of workspace a launch needs.
    pub fn workspace_bytes(&self) -> usize {
        self.0.work.as_ref().map_or(0, |work| work.workspace)
    }

    /// Whether it is the plan of such a call.
    pub(super) fn is_of(&self, asked: &Asked<'_>) -> bool {
        self.0.signature.is(asked)
    }

    /// Launches with other tensors of the same types, shapes, strides and alignment, and the plan's own options.
    pub fn run(&self, args: &mut Args<'_>, stream: &Stream) -> Result<()> {
        self.check_forms(args)?;
        self.launch(args, stream)
    }

    /// As [`Plan::run`], with a workspace of the caller's instead of the stream's: a contiguous tensor on the same device of
    /// at least [`Plan::workspace_bytes`] bytes.
    pub fn run_with_workspace(
        &self,
        args: &mut Args<'_>,
        workspace: &mut Tensor,
        stream: &Stream,
    ) -> Result<()> {
        self.check_forms(args)?;
        let refuse = |expected: String, got: String| {
            Err(Error::argument(args.spec().name, "workspace", expected, got))
        };
        let (view, refusal) = workspace.view_mut().into_parts();
        if let Some(refusal) = refusal {
            return refuse(Refusal::EXPECTED.into(), refusal.to_string());
        }
        let bytes = view.layout().numel() * view.dtype().size();
        let fits = bytes >= self.workspace_bytes() && view.layout().is_contiguous();
        if !fits || !view.is_aligned(WORKSPACE_ALIGNMENT) || view.device() != self.0.device {
            let need = self.workspace_bytes();
            let expected =
                format!("{need} contiguous bytes on {}, aligned to {WORKSPACE_ALIGNMENT}", self.0.device);
            return refuse(expected, format!("{view:?}"));
        }
        self.launch_in(args, stream, Some(&view))
    }

    fn check_forms(&self, args: &Args<'_>) -> Result<()> {
        let signature = &self.0.signature;
        if signature.fits(args) {
            return Ok(());
        }
        let expected = "a plan for arguments of these types, shapes, strides and alignment";
        let got = format!("one of `{}` for others", signature.spec.name);
        Err(Error::argument(args.spec().name, "plan", expected, got))
    }

    /// Launches with arguments that the plan was found for.
    pub(super) fn launch(&self, args: &Args<'_>, stream: &Stream) -> Result<()> {
        self.launch_in(args, stream, None)
    }

    /// As [`Plan::launch`]; in this workspace, or the stream's.
    fn launch_in(&self, args: &Args<'_>, stream: &Stream, given: Option<&TensorView<'_>>) -> Result<()> {
        args.check_writes()?;
        let Some(work) = &self.0.work else { return Ok(()) };
        check_stream(args, self.0.device, stream)?;
        match profile::begin_call() {
            None => self.give(work, args, stream, given),
            Some(start) => self.give_recorded(work, args, stream, given, start),
        }
    }

    /// Gives the work to the stream, and records when.
    #[cold]
    fn give_recorded(
        &self,
        work: &Work,
        args: &Args<'_>,
        stream: &Stream,
        given: Option<&TensorView<'_>>,
        start: u64,
    ) -> Result<()> {
        let _range = profile::Range::begin(self.0.signature.spec.name);
        #[cfg(feature = "cuda")]
        if let Stream::Cuda(cuda) = stream {
            let id = profile::next_call();
            let timing = crate::cuda::Timing::begin(cuda, Some(id));
            let result = self.give(work, args, stream, given);
            let captured = timing.is_captured();
            let timed = timing.end(work.kernel);
            profile::end_call(self.0.clone(), id, args.main_data(), start, captured, timed);
            return result;
        }
        let result = self.give(work, args, stream, given);
        profile::end_call(self.0.clone(), profile::next_call(), args.main_data(), start, false, None);
        result
    }

    fn give(
        &self,
        work: &Work,
        args: &Args<'_>,
        stream: &Stream,
        given: Option<&TensorView<'_>>,
    ) -> Result<()> {
        match stream {
            Stream::Host => match given {
                Some(given) => work.run.run(args, stream, given.address()),
                None => {
                    with_host_workspace(work.workspace, |workspace| work.run.run(args, stream, workspace))
                }
            },
            #[cfg(feature = "cuda")]
            Stream::Cuda(cuda) => {
                order(args, cuda)?;
                let result = match given.and_then(|given| Some((given, given.storage?))) {
                    Some((given, storage)) => storage.with(cuda, crate::cuda::Access::Write, || {
                        work.run.run(args, stream, given.address())
                    }),
                    None => cuda.with_workspace(work.workspace, |at| work.run.run(args, stream, at)),
                };
                // Noted even if only some launches succeeded: those use the memory.
                for (index, view) in args.given() {
                    if let Some(storage) = view.storage {
                        storage.note(cuda, access(args.spec(), index));
                    }
                }
                result
            }
        }
    }
}

/// Requires the stream to be one of the device that the tensors are on.
fn check_stream(args: &Args<'_>, device: Device, stream: &Stream) -> Result<()> {
    if stream.device() == device {
        return Ok(());
    }
    let expected = format!("a stream of {device}, where the tensors are");
    Err(Error::argument(args.spec().name, "stream", expected, stream.device().to_string()))
}

impl std::fmt::Debug for Plan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let kernel = self.kernel().unwrap_or("nothing to do");
        write!(
            f,
            "Plan({}: {kernel}, {} bytes of workspace)",
            self.0.signature.spec.name,
            self.workspace_bytes()
        )
    }
}

#[cfg(feature = "cuda")]
fn access(spec: &OpSpec, index: usize) -> crate::cuda::Access {
    if spec.args[index].is_output() { crate::cuda::Access::Write } else { crate::cuda::Access::Read }
}

/// Makes the stream wait for whatever must come before this use of the arguments.
#[cfg(feature = "cuda")]
fn order(args: &Args<'_>, stream: &crate::cuda::Stream) -> Result<()> {
    let capture = stream.capture()?;
    let spec = args.spec();
    for (index, view) in args.given() {
        let Some(storage) = view.storage else { continue };
        storage.order(stream, access(spec, index), capture).map_err(|error| match error {
            Error::Argument { expected, got, .. } => {
                Error::argument(spec.name, spec.args[index].name, expected, got)
            }
            other => other,
        })?;
    }
    Ok(())
}

/// What a call has to do; nothing if its outputs are empty.
fn make<O: Op>(asked: &Asked<'_>, stream: Option<&Stream>) -> Result<Option<Work>> {
    let args = asked.args;
    let problem = checked::<O>(args, asked.attrs)?;
    let device = args.device();
    if let Some(stream) = stream {
        check_stream(args, device, stream)?;
    }
    if args.outputs_are_empty() {
        return Ok(None);
    }
    if device == Device::Cpu {
        crate::cpu::check_settings()?;
    }
    let info = device_info(device)?;
    let (kernel, _) = select_kernel::<O>(&problem, info, asked.select)?;
    prepare::<O>(problem, kernel, info, args).map(Some)
}

/// The part of a plan that depends on the kernel's target.
fn prepare<O: Op>(
    problem: O::Problem,
    kernel: &'static Kernel<O::Problem>,
    info: &'static DeviceInfo,
    args: &Args<'_>,
) -> Result<Work> {
    let workspace = (kernel.workspace)(&problem, info);
    let run: Box<dyn Run> = match kernel.target {
        Target::Cpu(_) | Target::Library(_) => Box::new(Direct { problem, kernel, info }),
        #[cfg(feature = "cuda")]
        Target::Cuda(_) => Box::new(record(&problem, kernel, info, args)?),
        #[cfg(not(feature = "cuda"))]
        Target::Cuda(_) => return Err(crate::device::no_cuda_feature()),
    };
    let _ = args;
    Ok(Work { kernel: kernel.name, workspace, run, cost: Box::new(move || O::cost(&problem)) })
}

/// A kernel that runs when it is called: of the CPU, or of a library.
struct Direct<P: 'static> {
    problem: P,
    kernel: &'static Kernel<P>,
    info: &'static DeviceInfo,
}

impl<P: Send + Sync> Run for Direct<P> {
    fn run(&self, args: &Args<'_>, stream: &Stream, workspace: usize) -> Result<()> {
        let launch = Launch {
            problem: &self.problem,
            args,
            info: self.info,
            stream,
            workspace,
            tier: match self.kernel.target {
                Target::Cpu(tier) => tier,
                Target::Cuda(_) | Target::Library(_) => Tier::Portable,
            },
            cuda: None,
            #[cfg(feature = "cuda")]
            recorder: None,
        };
        scratch::or_out_of_memory(|| (self.kernel.run)(&launch))
    }
}

/// Records the launches of a CUDA kernel.
#[cfg(feature = "cuda")]
fn record<P>(
    problem: &P,
    kernel: &'static Kernel<P>,
    info: &'static DeviceInfo,
    args: &Args<'_>,
) -> Result<crate::cuda::Recording> {
    use crate::cuda::{Context, Recorder};
    let Device::Cuda(ordinal) = info.device else { unreachable!("the kernel was chosen for a CUDA device") };
    let context = Context::get(ordinal)?;
    let addresses = (0..args.spec().args.len()).map(|index| args.address(index)).collect();
    let recorder = Recorder::new(context, addresses);
    let stream = Stream::Cuda(context.default_stream().clone());
    (kernel.run)(&Launch {
        problem,
        args: &args.with_addresses(|index| recorder.argument(index)),
        info,
        stream: &stream,
        workspace: recorder.workspace(),
        tier: Tier::Portable,
        cuda: match kernel.target {
            Target::Cuda(cuda) => Some(cuda),
            _ => None,
        },
        recorder: Some(&recorder),
    })?;
    Ok(recorder.finish())
}

#[cfg(feature = "cuda")]
impl Run for crate::cuda::Recording {
    fn run(&self, args: &Args<'_>, stream: &Stream, workspace: usize) -> Result<()> {
        let Stream::Cuda(stream) = stream else {
            return Err(Error::parse("stream", "a CUDA stream", "the host stream"));
        };
        // SAFETY: the arguments have the forms that the plan was made for, so the kernel stays inside them; the uses of their
        // memory are noted, and the workspace has the size the plan says.
        unsafe { self.launch(stream, |index| args.address(index), workspace) }
    }
}

/// Calls `work` with the address of `bytes` bytes of this thread's workspace. It is kept: fresh memory costs page faults.
fn with_host_workspace<R>(bytes: usize, work: impl FnOnce(usize) -> Result<R>) -> Result<R> {
    thread_local! {
        static KEPT: Cell<Option<HostBuffer>> = const { Cell::new(None) };
    }
    if bytes == 0 {
        return work(0);
    }
    // A nested call finds none and makes its own.
    let buffer = match KEPT.take().filter(|buffer| buffer.len() >= bytes) {
        Some(buffer) => buffer,
        None => HostBuffer::new(bytes)?,
    };
    let result = work(buffer.as_ptr() as usize);
    KEPT.set(Some(buffer));
    result
}

/// Facts about a device, read once per process.
fn device_info(device: Device) -> Result<&'static DeviceInfo> {
    static KNOWN: LazyLock<RwLock<HashMap<Device, &'static DeviceInfo>>> = LazyLock::new(Default::default);
    if let Some(info) = KNOWN.read().unwrap_or_else(|e| e.into_inner()).get(&device) {
        return Ok(info);
    }
    let info: &'static DeviceInfo = Box::leak(Box::new(device.info()?));
    Ok(KNOWN.write().unwrap_or_else(|e| e.into_inner()).entry(device).or_insert(info))
}

#[path = "plan_profile.rs"]
mod profiled;

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
