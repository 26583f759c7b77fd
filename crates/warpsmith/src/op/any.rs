//! The object-safe face of every op.

use super::kernel::{KernelInfo, Launch, Target, info_of};
use super::select::{Explanation, Select, named, problem_key, select_kernel};
use super::{Args, Attrs, Cost, Form, Op, OpSpec, infer, tuned};
use crate::cpu::Tier;
use crate::device::{Device, DeviceInfo, Stream};
use crate::error::{Error, Result};
use crate::tensor::storage::Storage;

/// Every [`Op`] behind one object-safe face.
pub trait AnyOp: Sync {
    /// Name, arguments, options, sizes.
    fn spec(&self) -> &'static OpSpec;
    /// The kernels.
    fn kernels(&self) -> Vec<KernelInfo>;
    /// What each output must be: required ones, optional ones at positions in `wanted`, and those that a given input
    /// implies.
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
}

impl<O: Op> AnyOp for O {
    fn spec(&self) -> &'static OpSpec {
        const { &O::SPEC }
    }

    fn kernels(&self) -> Vec<KernelInfo> {
        O::kernels().iter().map(info_of).collect()
    }

    fn outputs(&self, args: &Args<'_>, attrs: &Attrs, wanted: &[usize]) -> Result<Vec<Option<Form>>> {
        attrs.validate(const { &O::SPEC })?;
        infer::outputs(args, attrs, wanted)
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
        let hash = info_of(kernel).identity();
        tuned::store(&info.name, O::SPEC.name, problem_key(&problem, any_batch), kernel.name, &hash)
    }
}

fn checked<O: Op>(args: &Args<'_>, attrs: &Attrs) -> Result<O::Problem> {
    args.validate()?;
    attrs.validate(const { &O::SPEC })?;
    O::check(args, attrs)
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
