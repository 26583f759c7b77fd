//! Plans: what a call needs to know, found out once.
//!
//! The first call of a kind checks its arguments, chooses a kernel, compiles and loads it, and prepares its launches. All
//! that is kept in a plan, under everything it depends on: types, shapes, strides and alignment of the arguments, whether
//! they are constant, options, and the choice of kernels. Later calls compare that, check what depends on addresses alone, and launch.

mod profiled;
mod signature;
mod table;
#[cfg(feature = "tests")]
mod tests;
mod work;

pub(super) use signature::Asked;
pub(super) use table::forget;

use super::Args;
#[cfg(feature = "cuda")]
use super::OpSpec;
use crate::device::{Device, Stream};
use crate::error::{Error, Result};
use crate::profile;
use crate::tensor::storage::HostBuffer;
use crate::tensor::{Refusal, Tensor, TensorView};
use signature::{Signature, hash};
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use table::PLANS;
use work::Work;

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
            timing.note(self.0.clone(), args.main_data());
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
