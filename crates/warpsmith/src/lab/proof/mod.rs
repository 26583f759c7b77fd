//! Proof: runs kernels over their op's cases and checks every property the contract promises.

mod bench_tensors;
mod compare;
mod generated;
mod large;
mod tensors;
mod values;

pub use bench_tensors::BenchTensors;
use compare::{Allowance, compare_within};
pub use compare::{Error as Deviation, Expectation, Mismatch, compare};
pub use large::Large;
pub use tensors::{Tensors, arrange};
pub(crate) use values::draw;

use crate::cpu::Tier;
use crate::cpu::gemm::Isa;
use crate::device::{Device, DeviceInfo, Stream};
use crate::error::{Error, Result};
use crate::lab::AnyProvable;
use crate::lab::{ArgPlan, Array, Case, Expected, Naively, Probed, Values};
use crate::op::{Cost, KernelInfo, Select};
use crate::tensor::DType;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use std::sync::OnceLock;

/// The kernels of an op that a device can run at all.
pub fn kernels_on(op: &dyn AnyProvable, device: Device) -> Vec<KernelInfo> {
    let runs = |kernel: &KernelInfo| match device {
        Device::Cpu => kernel.tier.is_some_and(|tier| tier <= Tier::best()),
        Device::Cuda(_) => kernel.is_cuda(),
    };
    op.kernels().into_iter().filter(runs).collect()
}

/// The outcome of one case on one kernel.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// Everything held.
    pub ok: bool,
    /// `‖out - truth‖ / ‖truth‖`, the largest over the outputs.
    pub error: f64,
    /// Largest elementwise error divided by the tolerance; passes up to 1.
    pub worst: f64,
    /// What went wrong.
    pub failure: Option<String>,
}

impl Outcome {
    /// The outcome of a kernel that did something wrong.
    pub(crate) fn failed(why: String) -> Outcome {
        Outcome { ok: false, error: f64::NAN, worst: f64::NAN, failure: Some(why) }
    }
}

/// The tensors of a case: drawn once, used for every kernel.
pub struct Drawn {
    op: &'static dyn AnyProvable,
    case: Case,
    plan: Vec<Option<ArgPlan>>,
    tensors: Tensors,
}

impl Drawn {
    /// Draws the inputs of a case.
    ///
    /// # Errors
    /// What [`AnyProvable::check`] says about a case that is no valid call.
    pub fn new(op: &'static dyn AnyProvable, case: &Case, device: Device, seed: u64) -> Result<Drawn> {
        let plan = op.plan(case);
        let mut tensors = Tensors::new(op.spec(), case, &plan, device, seed)?;
        op.check(&tensors.args(&plan, None), &case.attrs)?;
        Ok(Drawn { op, case: case.clone(), plan, tensors })
    }

    /// Runs one kernel once without judging it, for a sanitizer; `false` if the kernel does not support the case.
    pub fn launch(&mut self, kernel: &KernelInfo, stream: &Stream) -> Result<bool> {
        self.tensors.reset()?;
        match self.run(&only(kernel), stream, None) {
            Ok(()) => Ok(true),
            Err(Error::Unsupported { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// The least work of the call.
    pub(crate) fn cost(&mut self) -> Result<Cost> {
        self.op.cost(&self.tensors.args(&self.plan, None), &self.case.attrs)
    }

    fn run(&mut self, select: &Select, stream: &Stream, part: Option<std::ops::Range<usize>>) -> Result<()> {
        let mut args = self.tensors.args(&self.plan, part);
        self.op.run(&mut args, &self.case.attrs, stream, select)?;
        stream.synchronize()
    }

    fn outputs(&self) -> impl Iterator<Item = usize> + '_ {
        let args = self.op.spec().args.iter().enumerate();
        args.filter(|(i, arg)| arg.is_output() && self.plan[*i].is_some()).map(|(i, _)| i)
    }
}

/// The inputs with zeros for the subnormal numbers of factors.
fn flushed_inputs(op: &dyn AnyProvable, inputs: &[Option<Array<f64>>]) -> Vec<Option<Array<f64>>> {
    let flush = |x: &f64| if x.abs() < f64::from(f32::MIN_POSITIVE) { 0.0 } else { *x };
    let input = |(index, input): (usize, &Option<Array<f64>>)| {
        let mut input = input.clone();
        if let Some(array) = input.as_mut().filter(|_| op.is_factor(index)) {
            array.data = array.data.iter().map(flush).collect();
        }
        input
    };
    inputs.iter().enumerate().map(input).collect()
}

/// The tensors of a case and their expected values: computed once, used for every kernel.
pub struct Prepared {
    drawn: Drawn,
    expected: OnceLock<Expected>,
    probed: OnceLock<Probed>,
    /// The naive results of what kernels compute that take subnormal factors for zero.
    flushed: OnceLock<Naively>,
}

impl Prepared {
    /// Draws the inputs of a case. The reference is evaluated when a kernel is first judged.
    ///
    /// # Errors
    /// What [`AnyProvable::check`] says about a case that is no valid call: a reference is defined only for valid
    /// calls.
    pub fn new(op: &'static dyn AnyProvable, case: &Case, device: Device, seed: u64) -> Result<Prepared> {
        let drawn = Drawn::new(op, case, device, seed)?;
        Ok(Prepared { drawn, expected: OnceLock::new(), probed: OnceLock::new(), flushed: OnceLock::new() })
    }

    /// Draws the inputs of many cases, each from its seed, and evaluates the references of those that one of the
    /// kernels supports, on all threads. This takes most of the time of a check.
    ///
    /// # Errors
    /// As [`new`](Prepared::new).
    pub fn many(
        op: &'static dyn AnyProvable,
        cases: &[(u64, Case)],
        kernels: &[KernelInfo],
        device: Device,
    ) -> Result<Vec<Prepared>> {
        let info = device.info()?;
        let draw = |(seed, case): &(u64, Case)| Prepared::new(op, case, device, *seed);
        let mut prepared: Vec<Prepared> = match device {
            Device::Cpu => cases.par_iter().map(draw).collect::<Result<_>>()?,
            // One thread at a time uses the GPU.
            Device::Cuda(_) => cases.iter().map(draw).collect::<Result<_>>()?,
        };
        prepared.par_iter_mut().for_each(|prepared| prepared.evaluate(kernels, &info));
        Ok(prepared)
    }

    /// Evaluates the reference if one of the kernels supports the case.
    pub(crate) fn evaluate(&mut self, kernels: &[KernelInfo], info: &DeviceInfo) {
        let Drawn { op, case, plan, tensors } = &mut self.drawn;
        let args = tensors.args(plan, None);
        let supports = |kernel| op.explain(&args, &case.attrs, info, &only(kernel)).is_ok();
        if kernels.iter().any(supports) {
            self.expected();
        }
    }

    fn expected(&self) -> &Expected {
        self.expected.get_or_init(|| {
            let Drawn { op, case, tensors, .. } = &self.drawn;
            op.expected(case.dtype, &tensors.inputs, tensors.present(), &case.attrs)
        })
    }

    fn probed(&self) -> &Probed {
        self.probed.get_or_init(|| {
            let Drawn { op, case, tensors, .. } = &self.drawn;
            op.probed(case.dtype, &tensors.inputs, tensors.present(), &case.attrs)
        })
    }

    /// For a kernel that takes subnormal factors, products and sums for zero: the naive results with zeros for such factors,
    /// and how far a result may be off besides because sums become zero.
    fn flushed(&self, kernel: &KernelInfo) -> (Option<&Naively>, f64) {
        let Drawn { op, case, plan, tensors } = &self.drawn;
        // The slope of an activation far out is subnormal.
        let may_have = matches!(case.values, Values::Large | Values::Special | Values::Exponents);
        if !(kernel.flushes_subnormals && may_have) {
            return (None, 0.0);
        }
        let rows = plan.iter().flatten().filter(|plan| plan.dtype == case.dtype);
        let terms = rows.filter_map(|plan| plan.shape.iter().copied().max()).max().unwrap_or(0);
        let smallest = f64::from(f32::MIN_POSITIVE);
        if kernel.is_cuda() && case.dtype == DType::F32 {
            // The small part of TF32 ends at 2^-136, and weights are at most one.
            return (None, terms as f64 * smallest / 512.0);
        }
        // Below these instructions, the highest tier multiplies in f32 too.
        let isa = kernel.tier.map(Isa::of_tier);
        let flushes_factors = case.dtype == DType::BF16;
        let flushes = match case.dtype {
            DType::BF16 => isa >= Some(Isa::Avx512Dot),
            DType::F32 => isa.is_some_and(Isa::has_tiles),
            _ => false,
        };
        if !flushes {
            return (None, 0.0);
        }
        let flushed = self.flushed.get_or_init(|| {
            let flushed = flushes_factors.then(|| flushed_inputs(*op, &tensors.inputs));
            let inputs = flushed.as_deref().unwrap_or(&tensors.inputs);
            op.flushed(case.dtype, inputs, tensors.present(), &case.attrs)
        });
        (Some(flushed), if flushes_factors { 2.0 * terms as f64 * smallest } else { 0.0 })
    }

    /// Runs one kernel and judges it; `None` if the kernel does not support the case.
    pub fn judge(&mut self, kernel: &KernelInfo, stream: &Stream) -> Result<Option<Outcome>> {
        let select = only(kernel);
        self.drawn.tensors.reset()?;
        match self.drawn.run(&select, stream, None) {
            Ok(()) => {}
            Err(Error::Unsupported { .. }) => return Ok(None),
            Err(error) => return Ok(Some(Outcome::failed(error.to_string()))),
        }
        let outcome = self.judge_outputs(kernel)?;
        if !outcome.ok {
            return Ok(Some(outcome));
        }
        let failure = match self.drawn.tensors.damage()? {
            Some(damage) => Some(damage),
            None => self.judge_repetition(&select, stream, kernel.batch_invariant)?,
        };
        Ok(Some(Outcome { ok: failure.is_none(), failure, ..outcome }))
    }

    fn judge_outputs(&self, kernel: &KernelInfo) -> Result<Outcome> {
        let mut outcome = Outcome { ok: true, error: 0.0, worst: 0.0, failure: None };
        for index in self.drawn.outputs() {
            let name = self.drawn.op.spec().args[index].name;
            let dtype = self.drawn.plan[index].as_ref().expect("an output in the plan").dtype;
            let out: Vec<f64> =
                self.drawn.tensors.bytes(index)?.chunks_exact(dtype.size()).map(|b| dtype.read(b)).collect();
            let Expected { truth, naive, deviation } = self.expected();
            let [Some(truth), Some(naive), Some(deviation)] =
                [truth, naive, deviation].map(|e| e[index].as_ref())
            else {
                return Ok(Outcome::failed(format!("`{name}`: the reference gives no such output")));
            };
            let (flushed, slack) = self.flushed(kernel);
            // Instructions that keep what others flush give the result of neither, but one as right.
            let lost = |f: fn(&Naively) -> &[Option<Array<f64>>]| {
                flushed.and_then(|flushed| f(flushed)[index].as_ref())
            };
            let larger = lost(|flushed| &flushed.deviation).map(|lost| {
                deviation.data.iter().zip(&lost.data).map(|(a, b)| a.max(*b)).collect::<Vec<_>>()
            });
            let (unflushed, naive) = match lost(|flushed| &flushed.naive) {
                // In f32 no factor counts as zero, so none makes NaN of infinity.
                Some(lost) => (Some(&naive.data[..]).filter(|_| slack > 0.0), lost),
                None => (None, naive),
            };
            let untouched = |i: usize| deviation.data[i] == 0.0;
            let deviation = larger.as_ref().unwrap_or(&deviation.data);
            let expected = Expectation { truth: &truth.data, naive: &naive.data, deviation, dtype };
            let data = |of: fn(&Probed) -> &[Option<Array<f64>>]| {
                of(self.probed())[index].as_ref().map(|array| &array.data[..])
            };
            let exponents = self.drawn.case.values == Values::Exponents;
            let peak = if exponents { data(|probed| &probed.peak) } else { None };
            // Elements the reference leaves alone must keep their bits. A result that is the same by chance was rounded.
            let before = self.drawn.tensors.inputs[index].as_ref().map_or(&[][..], |before| &before.data);
            let changed = before
                .iter()
                .zip(&truth.data)
                .zip(&out)
                .enumerate()
                .find(|(i, ((before, truth), out))| before == truth && out != before && untouched(*i));
            if let Some((at, ((before, _), out))) = changed {
                return Ok(Outcome::failed(format!(
                    "`{name}`: element {at} must stay {before} and is {out}"
                )));
            }
            let mut judged =
                compare_within(expected, &out, Allowance { slack, peak, sample: None, unflushed });
            if matches!(&judged, Err(Mismatch { element: None, .. })) {
                let sample = data(|probed| &probed.sample);
                judged = compare_within(expected, &out, Allowance { slack, peak, sample, unflushed });
            }
            match judged {
                Ok(deviation) => {
                    outcome.error = outcome.error.max(deviation.relative_norm);
                    outcome.worst = outcome.worst.max(deviation.worst);
                }
                Err(why) => return Ok(Outcome::failed(format!("`{name}`: {why}"))),
            }
        }
        Ok(outcome)
    }

    /// A second run must give the same bits, and so must a run on a part of the batch.
    fn judge_repetition(
        &mut self,
        select: &Select,
        stream: &Stream,
        batch_invariant: bool,
    ) -> Result<Option<String>> {
        let first: Vec<(usize, Vec<u8>)> =
            self.drawn.outputs().map(|i| Ok((i, self.drawn.tensors.bytes(i)?))).collect::<Result<_>>()?;
        self.drawn.tensors.reset()?;
        self.drawn.run(select, stream, None)?;
        for (index, bytes) in &first {
            let dtype = self.drawn.plan[*index].as_ref().expect("an output in the plan").dtype;
            if differing(dtype, bytes, &self.drawn.tensors.bytes(*index)?).next().is_some() {
                return Ok(Some(format!("`{}`: two runs differ", self.drawn.op.spec().args[*index].name)));
            }
        }
        let batch = self.drawn.outputs().filter_map(|i| {
            let plan = self.drawn.plan[i].as_ref()?;
            Some(plan.shape[plan.batch_dim?])
        });
        let batch = batch.min().unwrap_or(0);
        if !batch_invariant || batch < 2 {
            return Ok(None);
        }
        for part in [0..1, batch / 2..batch / 2 + 1, batch - 1..batch, 0..batch / 2 + 1] {
            self.drawn.tensors.reset()?;
            match self.drawn.run(select, stream, Some(part.clone())) {
                Ok(()) => {}
                // The kernel may not support the alignment or shape of a part. Whichever kernel runs it by default
                // must give the same bits.
                Err(Error::Unsupported { .. }) => {
                    self.drawn.run(&Select::default(), stream, Some(part.clone()))?
                }
                Err(error) => return Err(error),
            }
            for (index, bytes) in &first {
                let plan = self.drawn.plan[*index].as_ref().expect("an output in the plan");
                let Some(dim) = plan.batch_dim else { continue };
                let now = self.drawn.tensors.bytes(*index)?;
                if let Some(at) = differs_in_part(plan, dim, &part, bytes, &now) {
                    let name = self.drawn.op.spec().args[*index].name;
                    return Ok(Some(format!(
                        "`{name}`: element {at} differs when only {part:?} of the batch is run"
                    )));
                }
            }
        }
        Ok(None)
    }
}

/// The first element with an index of `dim` inside `part` that differs.
fn differs_in_part(
    plan: &ArgPlan,
    dim: usize,
    part: &std::ops::Range<usize>,
    a: &[u8],
    b: &[u8],
) -> Option<usize> {
    let inner: usize = plan.shape[dim + 1..].iter().product();
    differing(plan.dtype, a, b).find(|i| part.contains(&(i / inner % plan.shape[dim])))
}

/// The elements whose bits differ, except those that are NaN in both.
///
/// The sign and payload of a NaN cannot be promised: the sum of two NaNs takes those of its first operand, and
/// compilers order operands as they like, differently in each copy of a loop. The first row of a thread may run in
/// another copy.
fn differing<'a>(dtype: DType, a: &'a [u8], b: &'a [u8]) -> impl Iterator<Item = usize> + 'a {
    let is_nan = move |bytes: &[u8]| dtype.read(bytes).is_nan();
    let elements = a.chunks_exact(dtype.size()).zip(b.chunks_exact(dtype.size())).enumerate();
    elements.filter(move |(_, (a, b))| a != b && !(is_nan(a) && is_nan(b))).map(|(i, _)| i)
}

/// Selects this kernel and no other.
fn only(kernel: &KernelInfo) -> Select {
    Select { kernel: Some(kernel.name.into()), allow_batch_variant: true }
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;

    #[test]
    fn only_numbers_need_the_same_bits() {
        let bytes = |values: [f32; 4]| values.map(f32::to_ne_bytes).concat();
        let of = |a, b| differing(DType::F32, &bytes(a), &bytes(b)).collect::<Vec<_>>();
        let nan = f32::NAN;
        assert_eq!(of([nan, 0.0, 1.0, nan], [-nan, -0.0, 1.0, f32::from_bits(nan.to_bits() + 1)]), [1]);
        assert_eq!(of([nan, 2.0, f32::INFINITY, 3.0], [4.0, nan, nan, 3.0000002]), [0, 1, 2, 3]);
        assert_eq!(differing(DType::I32, &bytes([nan; 4]), &bytes([-nan; 4])).count(), 4);
    }
    #[test]
    fn what_is_scaled_before_it_is_multiplied_is_no_factor() {
        let op = crate::lab::find("linear_backward").unwrap();
        let tiny = || Some(Array { shape: vec![1], data: vec![1e-39] });
        let flushed = flushed_inputs(op, &[tiny(), tiny(), tiny()]);
        let first = |index: usize| flushed[index].as_ref().unwrap().data[0];
        assert_eq!([0, 1, 2].map(first), [0.0, 0.0, 1e-39]);
    }
}
