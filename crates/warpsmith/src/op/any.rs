//! The object-safe face of every op.

use super::kernel::{KernelInfo, info_of};
use super::plan::Asked;
use super::select::{Explanation, Select, checked, named, own_spec, problem_key, select_kernel};
use super::{Args, Attrs, Cost, Form, Op, OpSpec, Plan, infer, plan, tuned};
use crate::device::{DeviceInfo, Stream};
use crate::error::Result;

mod sealed {
    /// Seals [`AnyOp`]: code that works on `&dyn AnyOp` may rely on what [`Op`](super::Op) promises.
    pub trait IsOp {}
    impl<O: super::Op> IsOp for O {}
}

/// Every [`Op`] behind one object-safe face. Nothing else can implement it.
pub trait AnyOp: sealed::IsOp + Sync {
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
    /// The prepared form of a call.
    fn prepare(&self, args: &Args<'_>, attrs: &Attrs, select: &Select) -> Result<Plan>;
    /// Checks, selects and runs; returns what was chosen. `None` if there was nothing to do.
    fn run(
        &self,
        args: &mut Args<'_>,
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
        let spec = own_spec::<O>(args)?;
        attrs.validate(spec)?;
        infer::outputs(spec, args, attrs, wanted)
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
            let may = k.batch_invariant || select.allow_batch_variant;
            let why = k.refuses(&problem, info).unwrap_or_else(|| match may {
                true => reason.against_others().into(),
                false => "supported, but not batch-invariant".into(),
            });
            (k.name, why)
        });
        Ok(Explanation {
            kernel: chosen.name,
            reason: reason.text().into(),
            config: (chosen.config)(&problem, info),
            others: others.collect(),
        })
    }

    fn prepare(&self, args: &Args<'_>, attrs: &Attrs, select: &Select) -> Result<Plan> {
        Plan::find(&Asked::of::<O>(args, attrs, select), None)
    }

    fn run(
        &self,
        args: &mut Args<'_>,
        attrs: &Attrs,
        stream: &Stream,
        select: &Select,
    ) -> Result<Option<&'static str>> {
        let plan = Plan::find(&Asked::of::<O>(args, attrs, select), Some(stream))?;
        plan.launch(args, stream)?;
        Ok(plan.kernel())
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
        tuned::store(&info.name, O::SPEC.name, problem_key(&problem, any_batch), kernel.name, &hash)?;
        plan::forget();
        Ok(())
    }
}
