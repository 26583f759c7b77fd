//! How a kernel is chosen for a problem.

use super::kernel::{Kernel, Why, info_of};
use super::{Args, Attrs, Op, OpSpec, tuned};
use crate::device::DeviceInfo;
use crate::error::{Error, Result};
use std::borrow::Cow;
use std::fmt;

/// How a kernel is chosen.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Select {
    /// Use this kernel or fail.
    pub kernel: Option<Cow<'static, str>>,
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

pub(super) fn named<O: Op>(name: &str) -> Result<&'static Kernel<O::Problem>> {
    O::kernels().iter().find(|k| k.name == name).ok_or_else(|| Error::UnknownKernel {
        op: O::SPEC.name,
        kernel: name.into(),
        known: O::kernels().iter().map(|k| k.name.to_string()).collect(),
    })
}

/// Why a kernel was taken.
#[derive(Clone, Copy)]
pub(super) enum Reason {
    Named,
    Tuned,
    Ranked,
}

impl Reason {
    /// For the kernel that was taken.
    pub(super) fn text(self) -> &'static str {
        match self {
            Reason::Named => "named by the caller",
            Reason::Tuned => "tuned on this device",
            Reason::Ranked => "first in rank that supports the problem",
        }
    }

    /// For one that could have been taken, too.
    pub(super) fn against_others(self) -> &'static str {
        match self {
            Reason::Named => "supported, but another was named",
            Reason::Tuned => "supported, but another was tuned for this problem",
            Reason::Ranked => "supported, but ranked lower",
        }
    }
}

/// The kernel for a problem and the reason it was taken.
pub(super) fn select_kernel<O: Op>(
    problem: &O::Problem,
    info: &DeviceInfo,
    select: &Select,
) -> Result<(&'static Kernel<O::Problem>, Reason)> {
    let unsupported = |refusals| Error::Unsupported {
        op: O::SPEC.name,
        device: format!("{} ({})", info.device, info.name),
        refusals,
    };
    if let Some(name) = &select.kernel {
        let kernel = named::<O>(name)?;
        return match kernel.refuses(problem, info) {
            None => Ok((kernel, Reason::Named)),
            Some(why) => Err(unsupported(vec![(kernel.name.into(), why)])),
        };
    }
    let allowed = |k: &&'static Kernel<O::Problem>| {
        (k.batch_invariant || select.allow_batch_variant) && k.refuses(problem, info).is_none()
    };
    let tuned_for = |any_batch: bool| {
        let choice = tuned::lookup(&info.name, O::SPEC.name, || problem_key(problem, any_batch))?;
        let kernel = O::kernels().iter().find(|k| k.name == choice.kernel).filter(allowed)?;
        (info_of(kernel).identity() == choice.source_hash).then_some(kernel)
    };
    let tuned = select.allow_batch_variant.then(|| tuned_for(true)).flatten();
    if let Some(kernel) = tuned.or_else(|| tuned_for(false)) {
        return Ok((kernel, Reason::Tuned));
    }
    if let Some(kernel) = O::kernels().iter().find(allowed) {
        return Ok((kernel, Reason::Ranked));
    }
    let refusals = O::kernels().iter().map(|k| {
        let why = k
            .refuses(problem, info)
            .unwrap_or_else(|| "not batch-invariant, and the caller did not allow that".into());
        (k.name.to_string(), why)
    });
    Err(unsupported(refusals.collect()))
}

/// A stable identity of a problem on one machine: a hash of its debug form. `any_batch`: for calls that allow results
/// to depend on the rest of the batch.
pub(super) fn problem_key<P: fmt::Debug>(problem: &P, any_batch: bool) -> String {
    let hash = &blake3::hash(format!("{problem:?}").as_bytes()).to_hex()[..32];
    if any_batch { format!("{hash}, any batch") } else { hash.to_string() }
}

/// The problem of a call, if it is a valid one.
pub(super) fn checked<O: Op>(args: &Args<'_>, attrs: &Attrs) -> Result<O::Problem> {
    let spec = own_spec::<O>(args)?;
    let args = &args.described_by(spec);
    args.validate()?;
    attrs.validate(spec)?;
    O::check(args, attrs)
}

/// The op's own description, by which arguments are checked, whatever they were made for; an error if they cannot be
/// its arguments at all.
pub(super) fn own_spec<O: Op>(args: &Args<'_>) -> Result<&'static OpSpec> {
    let spec = const { &O::SPEC };
    if spec.takes_the_same(args.spec()) {
        return Ok(spec);
    }
    let (expected, got) = (format!("those of `{}`", spec.name), format!("those of `{}`", args.spec().name));
    let got = if spec.name == args.spec().name {
        format!("{got} that are read and written otherwise")
    } else {
        got
    };
    Err(Error::argument(spec.name, "args", expected, got))
}
