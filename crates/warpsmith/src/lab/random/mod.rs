//! Random calls: drawn from a seed, judged like cases, and made smaller where they fail.

mod draw;
mod reduce;

pub use draw::{Draws, Pinned};
pub use reduce::reduce;

use crate::cpu::Tier;
use crate::cpu::gemm::Isa;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::lab::proof::{Drawn, Outcome, Prepared};
use crate::lab::{AnyProvable, Case};
use crate::op::KernelInfo;
use crate::tensor::Random;
use rayon::prelude::*;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// A random case, with the seed of its values.
#[derive(Debug, Clone, PartialEq)]
pub struct Draw {
    /// The case.
    pub case: Case,
    /// The seed of its values.
    pub seed: u64,
}

/// The outcome of a draw.
pub enum Verdict {
    /// The op does not take it.
    Refused(Error),
    /// The outcome of each kernel that supports it.
    Judged(Vec<(KernelInfo, Outcome)>),
}

/// The instructions that matrix products may use while it lives. A tier of the CPU has several.
pub struct Instructions(Option<Isa>);

impl Instructions {
    /// One of those that the highest tier has here, at random; those in use where there is nothing to choose.
    pub fn draw(op: &Draws, device: Device, seed: u64) -> Instructions {
        let best = Isa::of_tier(Tier::Avx512);
        let all: Vec<Isa> = Isa::available().filter(|isa| (Isa::Avx512..=best).contains(isa)).collect();
        if device != Device::Cpu || !op.multiplies() || all.len() < 2 {
            return Instructions(None);
        }
        let chosen = all[Random::new(seed).below(all.len() as u64) as usize];
        Isa::limit(chosen);
        Instructions(Some(chosen).filter(|isa| *isa != best))
    }

    /// The setting with which another process uses the same for `kernel`: empty, or ending in a space.
    pub fn setting(&self, kernel: &KernelInfo) -> String {
        match self.0.filter(|_| kernel.tier == Some(Tier::Avx512)) {
            Some(isa) => format!("{}={} ", crate::env::CPU_MATRIX, isa.name()),
            None => String::new(),
        }
    }
}

impl Drop for Instructions {
    fn drop(&mut self) {
        // Nothing else limits them: this leaves what the machine has and the user allows.
        Isa::limit(Isa::AmxF16);
    }
}

/// Judges the kernels on each of the draws, on all threads.
///
/// # Errors
/// What makes the device unusable.
pub fn judge(
    op: &'static dyn AnyProvable,
    draws: &[Draw],
    kernels: &[KernelInfo],
    device: Device,
) -> Result<Vec<Verdict>> {
    let prepare = |draw: &Draw| Prepared::new(op, &draw.case, device, draw.seed);
    match device {
        Device::Cpu => draws.par_iter().map(|draw| verdict(prepare(draw), kernels, device)).collect(),
        // One thread at a time uses the GPU.
        Device::Cuda(_) => {
            let info = device.info()?;
            let mut prepared: Vec<Result<Prepared>> = draws.iter().map(prepare).collect();
            prepared.par_iter_mut().flatten().for_each(|prepared| prepared.evaluate(kernels, &info));
            prepared.into_iter().map(|prepared| verdict(prepared, kernels, device)).collect()
        }
    }
}

fn verdict(prepared: Result<Prepared>, kernels: &[KernelInfo], device: Device) -> Result<Verdict> {
    let mut prepared = match prepared {
        Ok(prepared) => prepared,
        Err(error @ (Error::Argument { .. } | Error::Unsupported { .. })) => {
            return Ok(Verdict::Refused(error));
        }
        Err(error) => return Err(error),
    };
    let stream = device.default_stream()?;
    let mut outcomes = Vec::new();
    for kernel in kernels {
        let judged = catch_unwind(AssertUnwindSafe(|| prepared.judge(kernel, &stream)));
        let outcome = match judged {
            Ok(Ok(outcome)) => outcome,
            // A device in this state judges nothing else.
            Ok(Err(error @ (Error::Cuda { .. } | Error::Poisoned { .. }))) => return Err(error),
            Ok(Err(error)) => Some(Outcome::failed(error.to_string())),
            Err(panic) => Some(Outcome::failed(format!("panicked: {}", message(&*panic)))),
        };
        outcomes.extend(outcome.map(|outcome| (*kernel, outcome)));
    }
    Ok(Verdict::Judged(outcomes))
}

/// Runs each kernel once on a draw, without judging it; `None` if the op refuses the draw, otherwise the number of
/// kernels that ran.
///
/// # Errors
/// What a kernel reports.
pub fn launch(
    op: &'static dyn AnyProvable,
    draw: &Draw,
    kernels: &[KernelInfo],
    device: Device,
) -> Result<Option<usize>> {
    let mut drawn = match Drawn::new(op, &draw.case, device, draw.seed) {
        Ok(drawn) => drawn,
        Err(Error::Argument { .. } | Error::Unsupported { .. }) => return Ok(None),
        Err(error) => return Err(error),
    };
    let stream = device.default_stream()?;
    let mut launched = 0;
    for kernel in kernels {
        launched += usize::from(drawn.launch(kernel, &stream)?);
    }
    Ok(Some(launched))
}

fn message(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message")
}

#[cfg(feature = "tests")]
mod tests;
