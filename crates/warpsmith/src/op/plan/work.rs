//! What a plan does: a problem, and a kernel that is ready to solve it.

use super::check_stream;
use super::signature::Asked;
use crate::cpu::{Tier, scratch};
use crate::device::{Device, DeviceInfo, Stream};
#[cfg(feature = "cuda")]
use crate::error::Error;
use crate::error::Result;
use crate::op::kernel::{Kernel, Launch, Target};
use crate::op::select::{checked, select_kernel};
use crate::op::{Args, Cost, Op};
use std::collections::HashMap;
use std::sync::{LazyLock, RwLock};

/// What a call has to do, whatever the tensors are.
pub(super) struct Work {
    pub kernel: &'static str,
    pub workspace: usize,
    pub run: Box<dyn Run>,
    /// The cost of the problem, zero if it is unknown; evaluated only for profiles.
    pub cost: Box<dyn Fn() -> Cost + Send + Sync>,
}

/// The part of a plan that knows the op's problem.
pub(super) trait Run: Send + Sync {
    fn run(&self, args: &Args<'_>, stream: &Stream, workspace: usize) -> Result<()>;
}

/// What a call has to do; nothing if its outputs are empty.
pub(super) fn make<O: Op>(asked: &Asked<'_>, stream: Option<&Stream>) -> Result<Option<Work>> {
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
    // Profiles do not know the values.
    let cost = move || if O::COST_IS_A_BOUND { Cost::default() } else { O::cost(&problem) };
    Ok(Work { kernel: kernel.name, workspace, run, cost: Box::new(cost) })
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

/// Facts about a device, read once per process.
fn device_info(device: Device) -> Result<&'static DeviceInfo> {
    static KNOWN: LazyLock<RwLock<HashMap<Device, &'static DeviceInfo>>> = LazyLock::new(Default::default);
    if let Some(info) = KNOWN.read().unwrap_or_else(|e| e.into_inner()).get(&device) {
        return Ok(info);
    }
    let info: &'static DeviceInfo = Box::leak(Box::new(device.info()?));
    Ok(KNOWN.write().unwrap_or_else(|e| e.into_inner()).entry(device).or_insert(info))
}
