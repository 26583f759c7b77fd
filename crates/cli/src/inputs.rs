//! Arguments that several commands share: ops by name, `name=value` pairs, sizes, options.

use std::time::Duration;
use warpsmith::jit::{self, Profile};
use warpsmith::lab::AnyProvable;
use warpsmith::lab::{ArgPlan, Case};
use warpsmith::op::{Attrs, OpSpec};
use warpsmith::{Device, Error, Result, ops};

/// Upper bound of a size, so that products of two sizes cannot overflow and loops over one end.
const MAX_SIZE: usize = 1 << 31;
/// Upper bound of a tensor's bytes, so that nothing computed from shapes can overflow.
const MAX_BYTES: usize = 1 << 46;
/// Names that users look for as ops, with the op they are part of.
const ELSEWHERE: [(&str, &str); 1] =
    [("cascade", "the op paged_attention, with its arguments group_starts and prefix_lens")];

/// The op with this name.
pub fn find_op(name: &str) -> Result<&'static dyn AnyProvable> {
    warpsmith::lab::find(name).ok_or_else(|| {
        let known: Vec<&str> = ops::provable().iter().map(|op| op.spec().name).collect();
        let expected = match ELSEWHERE.iter().find(|(other, _)| *other == name) {
            Some((_, place)) => place.to_string(),
            None => one_of_many("an op", &known, "warpsmith list", name),
        };
        Error::parse("op", expected, name)
    })
}

/// What was expected instead of `name`: the most similar names, and where to find all of them. A full list would bury
/// them.
pub fn one_of_many(what: &str, known: &[&str], all: &str, name: &str) -> String {
    /// The similarity from which a name is suggested, and the most suggestions.
    const ALIKE: f64 = 0.8;
    const MOST: usize = 3;
    let alike = known.iter().map(|known| (strsim::jaro_winkler(known, name), *known));
    let mut close: Vec<(f64, &str)> = alike.filter(|(alike, _)| *alike >= ALIKE).collect();
    close.sort_by(|a, b| b.0.total_cmp(&a.0));
    let names: Vec<&str> = close.iter().take(MOST).map(|(_, name)| *name).collect();
    match &names[..] {
        [] => format!("{what} (`{all}` shows all)"),
        names => format!("{what}, perhaps {} (`{all}` shows all)", names.join(" or ")),
    }
}

/// Reads `60s`, `10m` or `2h`.
pub fn parse_duration(text: &str) -> Result<Duration> {
    let unit = |unit: char, seconds: u32| {
        let number: u32 = text.strip_suffix(unit)?.parse().ok()?;
        number.checked_mul(seconds)
    };
    let seconds = unit('s', 1).or(unit('m', 60)).or(unit('h', 3600));
    let time = seconds.map(|seconds| Duration::from_secs(seconds.into()));
    time.ok_or_else(|| Error::parse("time", "a time such as 60s, 10m or 2h", text))
}

/// `name=value` texts as pairs.
pub fn parse_pairs(texts: &[String]) -> Result<Vec<(String, String)>> {
    let pair = |text: &String| match text.split_once('=') {
        Some((name, value)) if !name.is_empty() && !value.is_empty() => Ok((name.into(), value.into())),
        _ => Err(Error::parse("argument", "name=value", text)),
    };
    texts.iter().map(pair).collect()
}

/// The sizes of an op: those given, with defaults for the others.
pub fn parse_sizes(spec: &OpSpec, texts: &[String]) -> Result<Vec<usize>> {
    let mut sizes: Vec<usize> = spec.sizes.iter().map(|size| size.default).collect();
    for (name, value) in parse_pairs(texts)? {
        let index = spec.sizes.iter().position(|size| size.name == name).ok_or_else(|| {
            let known: Vec<&str> = spec.sizes.iter().map(|size| size.name).collect();
            Error::parse(format!("{}: size", spec.name), format!("one of {}", known.join(", ")), &*name)
        })?;
        sizes[index] = value.parse().ok().filter(|size| *size <= MAX_SIZE).ok_or_else(|| {
            Error::parse(
                format!("{}: size `{name}`", spec.name),
                format!("a whole number up to {MAX_SIZE}"),
                value,
            )
        })?;
    }
    Ok(sizes)
}

/// The tensors of a case described on the command line. Refuses impossibly large ones.
pub fn plan_case(op: &dyn AnyProvable, case: &Case) -> Result<Vec<Option<ArgPlan>>> {
    let plan = op.plan(case);
    for (arg, plan) in op.spec().args.iter().zip(&plan) {
        let Some(plan) = plan else { continue };
        // A size of zero would hide the product of the others.
        let sizes = plan.shape.iter().map(|&size| size.max(1));
        let bytes = sizes.fold(plan.dtype.size(), usize::saturating_mul);
        if bytes > MAX_BYTES {
            let expected = format!("a tensor of at most {MAX_BYTES} bytes");
            return Err(Error::argument(
                op.spec().name,
                arg.name,
                expected,
                format!("shape {:?} of {}", plan.shape, plan.dtype),
            ));
        }
    }
    Ok(plan)
}

/// The options of an op: those given, with defaults for the others.
pub fn parse_attrs(spec: &OpSpec, texts: &[String]) -> Result<Attrs> {
    let mut attrs = Attrs::defaults(spec);
    for (name, value) in parse_pairs(texts)? {
        attrs.parse(spec, &name, &value)?;
    }
    Ok(attrs)
}

/// The positions of arguments given by name; only `eligible` ones are accepted.
pub fn find_args(
    spec: &'static OpSpec,
    names: &[String],
    eligible: impl Fn(&warpsmith::op::ArgSpec) -> bool,
    what: &str,
) -> Result<Vec<usize>> {
    let position = |name: &String| {
        spec.args.iter().position(|arg| arg.name == name && eligible(arg)).ok_or_else(|| {
            let known: Vec<&str> = spec.args.iter().filter(|arg| eligible(arg)).map(|arg| arg.name).collect();
            let known = if known.is_empty() { "nothing: it has none".into() } else { known.join(", ") };
            Error::parse(format!("{}: {what}", spec.name), format!("one of {known}"), name)
        })
    };
    names.iter().map(position).collect()
}

/// How device code is compiled.
#[derive(clap::Args)]
pub struct ProfileArgs {
    /// Compile with line numbers, for profilers and sanitizers
    #[arg(long, conflicts_with = "debug")]
    lineinfo: bool,
    /// Compile without optimisation, for debuggers
    #[arg(long)]
    debug: bool,
}

impl ProfileArgs {
    /// The requested profile.
    pub fn profile(&self) -> Profile {
        match (self.lineinfo, self.debug) {
            (_, true) => Profile::Debug,
            (true, false) => Profile::LineInfo,
            (false, false) => Profile::Release,
        }
    }
}

/// Sets fast math for all kernels of this process, if it is asked for.
///
/// # Errors
/// If it is asked for on the CPU.
pub fn set_fast_math(asked: bool, device: Device) -> Result<()> {
    if asked && device == Device::Cpu {
        return Err(Error::parse(
            "--fast-math",
            "a GPU: only CUDA code is compiled with it",
            device.to_string(),
        ));
    }
    jit::set_fast_math(asked);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(texts: &[&str]) -> Vec<String> {
        texts.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn pairs_split_at_the_first_equals_sign() {
        let pairs = parse_pairs(&texts(&["hidden=64", "expr=a=b"])).unwrap();
        assert_eq!(pairs, [("hidden".into(), "64".into()), ("expr".into(), "a=b".into())]);
        for bad in ["hidden", "=64", "hidden=", ""] {
            assert!(matches!(parse_pairs(&texts(&[bad])), Err(Error::Parse { .. })), "{bad}");
        }
    }

    #[test]
    fn what_is_part_of_an_op_is_found_there() {
        let error = find_op("cascade").err().unwrap().to_string();
        assert!(error.contains("paged_attention, with its arguments group_starts"), "{error}");
        assert!(ELSEWHERE.iter().all(|(name, _)| warpsmith::lab::find(name).is_none()));
    }

    #[test]
    fn sizes_default_and_wrong_ones_are_named() {
        let spec = find_op("rms_norm").unwrap().spec();
        assert_eq!(parse_sizes(spec, &texts(&["hidden=64"])).unwrap(), [8192, 64]);
        let error = parse_sizes(spec, &texts(&["width=64"])).unwrap_err().to_string();
        assert!(error.contains("num_tokens, hidden") && error.contains("width"), "{error}");
        for bad in ["hidden=x", "hidden=-1", "hidden=2147483649", "hidden=18446744073709551615"] {
            assert!(parse_sizes(spec, &texts(&[bad])).unwrap_err().to_string().contains("hidden"), "{bad}");
        }
    }

    /// Also for an empty shape, and for the largest sizes that can be given.
    #[test]
    fn tensors_beyond_all_memory_are_named() {
        let op = find_op("rms_norm").unwrap();
        for (sizes, fits) in [
            ([1 << 31, 1 << 13], true),
            ([1 << 31, 1 << 14], false),
            ([0, 1 << 31], true),
            ([MAX_SIZE, MAX_SIZE], false),
        ] {
            let planned = plan_case(op, &Case::new(op.spec(), warpsmith::DType::F32).sizes(&sizes));
            assert_eq!(planned.is_ok(), fits, "{sizes:?}");
            assert!(planned.err().is_none_or(|error| error.to_string().contains("`x`")));
        }
        for op in ops::PROVABLE {
            for given in [0, u32::MAX] {
                let mut case = Case::new(op.spec(), warpsmith::DType::F32);
                case = case.sizes(&vec![MAX_SIZE; op.spec().sizes.len()]);
                case.optional = given;
                assert!(plan_case(*op, &case).is_err(), "{}", op.spec().name);
            }
        }
    }

    #[test]
    fn arguments_are_found_among_the_eligible() {
        let spec = find_op("rms_norm").unwrap().spec();
        assert_eq!(find_args(spec, &texts(&["weight"]), |arg| arg.optional, "argument").unwrap(), [1]);
        let error = find_args(spec, &texts(&["x"]), |arg| arg.optional, "argument").unwrap_err().to_string();
        assert!(error.contains("weight, residual, sum"), "{error}");
        assert!(find_op("rms_nrm").err().unwrap().to_string().contains("rms_norm"));
    }
}
