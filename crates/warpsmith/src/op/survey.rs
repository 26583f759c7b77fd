//! Surveys: which device functions calls would need on a GPU that is only described.
//!
//! While a survey runs, calls of its thread compute nothing. Each is checked, a kernel is chosen for the described GPU,
//! and the host half of the kernel says which functions it would launch. Tensors of the host stand for those of the
//! GPU: their shapes, strides and alignment are read, never their contents. So a program can run unchanged, in memory
//! that is never touched, to find what must be compiled for it.

use super::kernel::{Launch, Target};
use super::plan::Asked;
use super::select::{checked, select_kernel};
use super::{Op, Plan};
use crate::cpu::Tier;
use crate::cuda::{self, Recorder};
use crate::device::{Device, DeviceInfo, Stream};
use crate::error::{Error, Result};
use crate::jit::{CudaKernel, Defines};
use std::cell::RefCell;
use std::collections::{HashMap, HashSet};

/// A device function and what it is compiled with.
#[derive(Clone)]
pub struct Needed {
    /// The function and its source.
    pub kernel: &'static CudaKernel,
    /// Its compile-time values.
    pub defines: Defines,
}

impl Needed {
    /// Loads it into a GPU, compiled unless it was before: calls that need it find it there.
    ///
    /// # Errors
    /// If it cannot be compiled or loaded, or the device is no GPU.
    pub fn load(&self, device: Device) -> Result<()> {
        let Device::Cuda(ordinal) = device else {
            return Err(Error::argument("load", "device", "a GPU", device.to_string()));
        };
        cuda::load(cuda::Context::get(ordinal)?, self.kernel, &self.defines).map(|_| ())
    }
}

struct Survey {
    info: DeviceInfo,
    /// Calls that were noted before.
    plans: HashMap<u64, Vec<Plan>>,
    known: HashSet<(usize, Defines)>,
    found: Vec<Needed>,
}

thread_local! {
    static RUNNING: RefCell<Option<Survey>> = const { RefCell::new(None) };
}

/// Whether this thread runs a survey.
pub fn is_running() -> bool {
    RUNNING.with_borrow(Option::is_some)
}

/// Runs `work`, and returns what its calls would need on the GPU that `info` describes, each function once.
///
/// # Errors
/// Those of `work`; if `info` describes no GPU, or a survey runs already.
pub fn survey<R>(info: DeviceInfo, work: impl FnOnce() -> R) -> Result<(R, Vec<Needed>)> {
    /// Ends the survey also if `work` panics.
    struct End;
    impl Drop for End {
        fn drop(&mut self) {
            RUNNING.take();
        }
    }
    let refuse = |expected: &str, got: &str| Err(Error::argument("survey", "info", expected, got));
    if info.arch.is_none() {
        return refuse("a GPU", &info.name);
    }
    if is_running() {
        return refuse("one survey at a time", "one within another");
    }
    RUNNING.set(Some(Survey { info, plans: HashMap::new(), known: HashSet::new(), found: Vec::new() }));
    let end = End;
    let result = work();
    let found = RUNNING.take().map(|survey| survey.found).unwrap_or_default();
    drop(end);
    Ok((result, found))
}

/// The plan of a call during a survey. It does nothing; what the call needs is noted.
pub(super) fn plan(hash: u64, asked: &Asked<'_>) -> Result<Option<Plan>> {
    let known = |survey: &Survey| {
        let same = survey.plans.get(&hash).into_iter().flatten();
        (survey.info.clone(), same.into_iter().find(|plan| plan.is_of(asked)).cloned())
    };
    let plan = match RUNNING.with_borrow(|running| running.as_ref().map(known)) {
        None => return Ok(None),
        Some((_, Some(plan))) => return Ok(Some(plan)),
        Some((info, None)) => {
            (asked.maker.note)(&info, asked)?;
            Plan::empty(asked)
        }
    };
    RUNNING.with_borrow_mut(|running| {
        if let Some(survey) = running {
            survey.plans.entry(hash).or_default().push(plan.clone());
        }
    });
    Ok(Some(plan))
}

/// Notes the functions that a call needs.
pub(super) fn note<O: Op>(info: &DeviceInfo, asked: &Asked<'_>) -> Result<()> {
    let args = asked.args;
    let problem = checked::<O>(args, asked.attrs)?;
    if args.outputs_are_empty() {
        return Ok(());
    }
    let (kernel, _) = select_kernel::<O>(&problem, info, asked.select)?;
    // Kernels of libraries are compiled by others.
    let Target::Cuda(cuda) = kernel.target else { return Ok(()) };
    let recorder = Recorder::imagined((0..args.spec().args.len()).map(|index| args.address(index)).collect());
    (kernel.run)(&Launch {
        problem: &problem,
        args: &args.with_addresses(|index| recorder.argument(index)),
        info,
        stream: &Stream::Host,
        workspace: recorder.workspace(),
        tier: Tier::Portable,
        cuda: Some(cuda),
        recorder: Some(&recorder),
    })?;
    RUNNING.with_borrow_mut(|running| {
        let Some(survey) = running else { return };
        for (kernel, defines) in recorder.into_functions() {
            if survey.known.insert((std::ptr::from_ref(kernel) as usize, defines.clone())) {
                survey.found.push(Needed { kernel, defines });
            }
        }
    });
    Ok(())
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;
    use crate::ops::{Linear, RmsNorm};
    use crate::tensor::{DType, Tensor};

    fn hopper() -> DeviceInfo {
        DeviceInfo::typical_gpu("90a".parse().unwrap(), None)
    }

    /// Ops that only the CPU computes are refused where tensors represent those of a GPU.
    #[test]
    fn weights_of_16_bits_beside_f32_are_refused_for_a_gpu() {
        let tensor = |dtype| Tensor::zeros(&[8, 64], dtype, Device::Cpu).unwrap();
        let (x, w) = (tensor(DType::F32), tensor(DType::BF16));
        assert!(Linear::new(&x, &w).run().is_ok());
        let (refused, _) = survey(hopper(), || Linear::new(&x, &w).run()).unwrap();
        let told = refused.unwrap_err().to_string();
        assert!(told.contains("argument `w`") && told.contains("only the CPU mixes them"), "{told}");
    }

    #[test]
    fn calls_are_listed_and_compute_nothing() {
        let x = Tensor::from_slice(&[1f32; 64], &[1, 64], Device::Cpu).unwrap();
        let norm = || RmsNorm::new(&x).run().unwrap().to_vec::<f32>().unwrap();
        let (out, needed) = survey(hopper(), norm).unwrap();
        assert!(out.iter().all(|&y| y == 0.0), "memory that was never written");
        assert_eq!(needed.len(), 1);
        assert!(needed[0].defines.iter().any(|(name, value)| *name == "ELEM" && value == "f32"));
        let told = needed[0].load(Device::Cpu).unwrap_err().to_string();
        assert!(told.contains("`device`") && told.contains("a GPU"), "{told}");
        assert!(!is_running() && norm().iter().all(|&y| y > 0.9), "calls compute again");
        // The same call needs nothing more.
        let (_, twice) = survey(hopper(), || [norm(), norm()]).unwrap();
        assert_eq!(twice.len(), 1);
    }

    #[test]
    fn sizes_that_no_host_has_memory_for_are_surveyed() {
        let big = |rows: usize| Tensor::zeros(&[rows, 8192], DType::BF16, Device::Cpu).unwrap();
        let (shape, needed) = survey(hopper(), || {
            let (x, w) = (big(64), big(1 << 20));
            Linear::new(&x, &w).run().unwrap().shape().to_vec()
        })
        .unwrap();
        assert_eq!(shape, [64, 1 << 20]);
        assert!(!needed.is_empty());
    }

    #[test]
    fn bad_calls_fail_as_they_would_and_surveys_end() {
        let x = Tensor::zeros(&[2, 64], DType::F32, Device::Cpu).unwrap();
        let weight = Tensor::zeros(&[63], DType::F32, Device::Cpu).unwrap();
        let (result, needed) = survey(hopper(), || RmsNorm::new(&x).weight(&weight).run()).unwrap();
        assert!(result.unwrap_err().to_string().contains("weight") && needed.is_empty());
        assert!(std::panic::catch_unwind(|| survey(hopper(), || panic!("as tests do"))).is_err());
        assert!(!is_running());
        assert!(survey(Device::Cpu.info().unwrap(), || ()).err().unwrap().to_string().contains("a GPU"));
    }
}
