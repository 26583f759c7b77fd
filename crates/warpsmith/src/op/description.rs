//! Whether an op's description is consistent.

use super::spec::{ArgSpec, DTypeRule, MAX_ARGS, MAX_ATTRS, OpSpec, Role, SizeRule};
use crate::error::{Error, Result};

/// Refuses a description with invalid or duplicate names, or with positions out of range.
pub fn check(spec: &'static OpSpec) -> Result<()> {
    require(spec, "name", is_identifier(spec.name), IDENTIFIER, || format!("`{}`", spec.name))?;
    let most = |what, count: usize, limit: usize| {
        require(spec, what, count <= limit, &format!("at most {limit}"), || count.to_string())
    };
    most("args", spec.args.len(), MAX_ARGS)?;
    most("attrs", spec.attrs.len(), MAX_ATTRS)?;
    let writes = spec.args.iter().any(ArgSpec::is_output);
    require(spec, "args", writes, "an output", || "none".into())?;
    let names = || spec.args.iter().map(|arg| arg.name).chain(spec.attrs.iter().map(|attr| attr.name));
    for (at, name) in names().enumerate() {
        require(spec, name, is_identifier(name), IDENTIFIER, || format!("`{name}`"))?;
        let is_first = !names().take(at).any(|other| other == name);
        require(spec, name, is_first, "a name that occurs once", || "another of this name".into())?;
    }
    spec.args.iter().enumerate().try_for_each(|(index, arg)| check_argument(spec, index, arg))?;
    for derived in spec.derived {
        let (SizeRule::Option { option, .. }
        | SizeRule::OptionOr { option, .. }
        | SizeRule::Divided { option, .. }) = derived.rule
        else {
            continue;
        };
        let known = option < spec.attrs.len();
        require(spec, derived.name, known, "the position of an option", || option.to_string())?;
    }
    Ok(())
}

fn check_argument(spec: &'static OpSpec, index: usize, arg: &ArgSpec) -> Result<()> {
    let require =
        |holds: bool, expected: &str, got: &dyn Fn() -> String| require(spec, arg.name, holds, expected, got);
    require(!arg.shape.forms.is_empty(), "a shape", &|| "none".into())?;
    if let Some(option) = arg.shape.option {
        let decides = option < spec.attrs.len() && arg.shape.forms.len() > 1;
        require(decides, "several shapes, and the option that decides", &|| format!("option {option}"))?;
    }
    if let Role::Out { in_place_of: Some(input) } = arg.role {
        let fits = spec.args.get(input).is_some_and(|other| other.is_input() && other.shape == arg.shape);
        require(fits, "to be in place of an input of its shape", &|| format!("argument {input}"))?;
    }
    if let Some(other) = arg.with {
        let both = other != index && arg.optional && spec.args.get(other).is_some_and(|other| other.optional);
        require(both, "to be given with another optional argument", &|| format!("argument {other}"))?;
    }
    if let Some(other) = arg.zeroed_with {
        let fits = spec.args.get(other).is_some_and(ArgSpec::is_input);
        require(fits, "to be filled with zeros because of an input", &|| format!("argument {other}"))?;
    }
    let is_required = |like: usize| like != index && spec.args.get(like).is_some_and(|like| !like.optional);
    match arg.dtype {
        DTypeRule::OneOf(types) => require(!types.is_empty(), "a type", &|| "none".into()),
        DTypeRule::Same(like) | DTypeRule::SameOr(like, _) | DTypeRule::With(like, _) => {
            require(is_required(like), "the type of a required argument", &|| format!("argument {like}"))
        }
        DTypeRule::Chosen { option, like, .. } => {
            let known = option < spec.attrs.len() && is_required(like);
            let expected = "a type that an option or a required argument decides";
            require(known, expected, &|| format!("option {option} and argument {like}"))
        }
    }
}

const IDENTIFIER: &str = "an identifier: lower-case letters, digits and `_`, a letter first";

fn is_identifier(name: &str) -> bool {
    let known = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_';
    name.bytes().all(known) && name.starts_with(|first: char| first.is_ascii_lowercase())
}

fn require(
    spec: &'static OpSpec,
    about: &str,
    holds: bool,
    expected: &str,
    got: impl Fn() -> String,
) -> Result<()> {
    if holds { Ok(()) } else { Err(Error::argument(spec.name, about, expected, got())) }
}
