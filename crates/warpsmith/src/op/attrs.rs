//! The values of an op's options.

use super::spec::{AttrKind, AttrSpec, MAX_ATTRS, OpSpec};
use crate::error::{Error, Result};
use std::fmt;
use std::hash::{Hash, Hasher};

/// The value of one option. Equal values have equal bits: NaN equals itself, and 0.0 is not -0.0.
#[derive(Clone, Copy, Debug)]
pub enum Value {
    /// A real number.
    Float(f64),
    /// No value: the op chooses. See [`AttrKind::OptionalFloat`].
    Unset,
    /// A whole number. A 64-bit seed is stored by its bits, see [`Value::seed`].
    Int(i64),
    /// A switch.
    Bool(bool),
    /// A position in the list of names.
    Choice(u8),
}

/// The bits of [`Value::Unset`]: a NaN that arithmetic never gives, and that ops refuse.
const UNSET_BITS: u64 = u64::MAX;

impl Value {
    /// A 64-bit seed, bit for bit: those of 2^63 and above are negative as [`Value::Int`]. [`Attrs::seed`] reads it.
    pub const fn seed(seed: u64) -> Self {
        Value::Int(seed as i64)
    }

    /// Reads text as a value of `kind`.
    fn parse(kind: AttrKind, text: &str) -> Option<Self> {
        match kind {
            AttrKind::OptionalFloat if text == "none" => Some(Value::Unset),
            AttrKind::Float(_) | AttrKind::OptionalFloat => text.parse().ok().map(Value::Float),
            AttrKind::Int(_) => text.parse().ok().map(Value::Int),
            AttrKind::Bool(_) => text.parse().ok().map(Value::Bool),
            AttrKind::Choice(names) => {
                names.iter().position(|name| *name == text).map(|at| Value::Choice(at as u8))
            }
        }
    }

    /// Requires it to be of the option's kind and, if that is a choice, one of its names.
    fn check(self, op: &'static str, attr: &AttrSpec) -> Result<()> {
        let got = match (self, attr.kind) {
            (Value::Float(_), AttrKind::Float(_) | AttrKind::OptionalFloat)
            | (Value::Unset, AttrKind::OptionalFloat)
            | (Value::Int(_), AttrKind::Int(_))
            | (Value::Bool(_), AttrKind::Bool(_)) => return Ok(()),
            (Value::Choice(at), AttrKind::Choice(names)) if usize::from(at) < names.len() => return Ok(()),
            (Value::Choice(at), AttrKind::Choice(_)) => format!("none of these (position {at})"),
            (other, _) => format!("{other:?}"),
        };
        Err(Error::argument(op, attr.name, attr.kind.to_string(), got))
    }

    /// As text, for an option of `kind`.
    pub fn text(self, kind: AttrKind) -> String {
        match (self, kind) {
            (Value::Choice(at), AttrKind::Choice(names)) if usize::from(at) < names.len() => {
                names[usize::from(at)].into()
            }
            _ => self.to_string(),
        }
    }

    /// What is compared: the kind and the bits.
    fn bits(self) -> (u8, u64) {
        match self {
            Value::Float(x) => (0, x.to_bits()),
            Value::Int(x) => (1, x as u64),
            Value::Bool(x) => (2, x.into()),
            Value::Choice(at) => (3, at.into()),
            Value::Unset => (4, UNSET_BITS),
        }
    }
}

impl PartialEq for Value {
    fn eq(&self, other: &Self) -> bool {
        self.bits() == other.bits()
    }
}

impl Eq for Value {}

impl Hash for Value {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.bits().hash(state);
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Float(x) => write!(f, "{x}"),
            Value::Unset => write!(f, "none"),
            Value::Int(x) => write!(f, "{x}"),
            Value::Bool(x) => write!(f, "{x}"),
            Value::Choice(at) => write!(f, "choice {at}"),
        }
    }
}

impl AttrKind {
    /// The value an option has unless it is set.
    pub const fn default_value(self) -> Value {
        match self {
            AttrKind::Float(x) => Value::Float(x),
            AttrKind::OptionalFloat => Value::Unset,
            AttrKind::Int(x) => Value::Int(x),
            AttrKind::Bool(x) => Value::Bool(x),
            AttrKind::Choice(_) => Value::Choice(0),
        }
    }
}

/// A Rust type for the names of a choice.
pub trait Choice {
    /// Its position among the names.
    fn position(self) -> u8;
}

impl Choice for u8 {
    fn position(self) -> u8 {
        self
    }
}

/// The values of an op's options, by position in [`OpSpec::attrs`].
///
/// [`Attrs::set`] and [`Attrs::parse`] refuse invalid values. Values that came another way, with [`Attrs::with`] or
/// from another op, are checked by [`Attrs::validate`] before the op sees them.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Attrs {
    values: [Value; MAX_ATTRS],
}

impl Attrs {
    /// All defaults.
    pub fn defaults(spec: &OpSpec) -> Self {
        let mut values = [Value::Bool(false); MAX_ATTRS];
        for (value, attr) in values.iter_mut().zip(spec.attrs) {
            *value = attr.kind.default_value();
        }
        Attrs { values }
    }

    /// Sets the option at `index`; an error if it cannot have this value.
    pub fn set(&mut self, spec: &OpSpec, index: usize, value: Value) -> Result<()> {
        let Some(attr) = spec.attrs.get(index) else {
            let expected = format!("a position below {}", spec.attrs.len());
            return Err(Error::argument(spec.name, "option", expected, index.to_string()));
        };
        value.check(spec.name, attr)?;
        self.values[index] = value;
        Ok(())
    }

    /// Sets the option called `name`; an error if there is none or if it cannot have this value.
    pub fn set_named(&mut self, spec: &OpSpec, name: &str, value: Value) -> Result<()> {
        self.set(spec, Self::position(spec, name)?, value)
    }

    /// The values as numbers that differ if the values do.
    pub(super) fn bits(&self) -> impl Iterator<Item = u64> {
        self.values.iter().map(|value| value.bits().1)
    }

    /// Sets an option from text, as the command line does.
    pub fn parse(&mut self, spec: &OpSpec, name: &str, text: &str) -> Result<()> {
        let index = Self::position(spec, name)?;
        let kind = spec.attrs[index].kind;
        let value = Value::parse(kind, text)
            .ok_or_else(|| Error::argument(spec.name, name, kind.to_string(), text))?;
        self.set(spec, index, value)
    }

    fn position(spec: &OpSpec, name: &str) -> Result<usize> {
        spec.attrs.iter().position(|attr| attr.name == name).ok_or_else(|| {
            let known = spec.attrs.iter().map(|attr| attr.name).collect::<Vec<_>>().join(", ");
            Error::argument(spec.name, name, format!("one of the options {known}"), "no such option")
        })
    }

    /// With one value replaced. The value is checked with the call.
    ///
    /// # Panics
    /// If `index` is not below [`MAX_ATTRS`].
    pub fn with(mut self, index: usize, value: Value) -> Self {
        self.values[index] = value;
        self
    }

    /// With one value replaced by a number: whole numbers, switches (0 or 1) and choices (positions) as the option is.
    #[cfg(feature = "lab")]
    pub(crate) fn with_number(self, index: usize, number: f64) -> Self {
        let value = match self.values[index] {
            Value::Float(_) | Value::Unset => Value::Float(number),
            Value::Int(_) => Value::Int(number as i64),
            Value::Bool(_) => Value::Bool(number != 0.0),
            Value::Choice(_) => Value::Choice(number as u8),
        };
        self.with(index, value)
    }

    /// Requires each value to be one its option can have.
    pub fn validate(&self, spec: &OpSpec) -> Result<()> {
        spec.attrs.iter().zip(self.values).try_for_each(|(attr, value)| value.check(spec.name, attr))
    }

    /// The value at `index`.
    pub fn value(&self, index: usize) -> Value {
        self.values[index]
    }

    /// A real number.
    pub fn float(&self, index: usize) -> f64 {
        match self.values[index] {
            Value::Float(x) => x,
            other => Self::mistaken("a real number", other),
        }
    }

    /// A real number, if one was given.
    pub fn optional_float(&self, index: usize) -> Option<f64> {
        match self.values[index] {
            Value::Float(x) => Some(x),
            Value::Unset => None,
            other => Self::mistaken("a real number or none", other),
        }
    }

    /// A whole number.
    pub fn int(&self, index: usize) -> i64 {
        match self.values[index] {
            Value::Int(x) => x,
            other => Self::mistaken("a whole number", other),
        }
    }

    /// A seed, see [`Value::seed`].
    pub fn seed(&self, index: usize) -> u64 {
        self.int(index) as u64
    }

    /// A switch.
    pub fn bool(&self, index: usize) -> bool {
        match self.values[index] {
            Value::Bool(x) => x,
            other => Self::mistaken("a switch", other),
        }
    }

    /// The position of a choice.
    pub fn choice(&self, index: usize) -> usize {
        match self.values[index] {
            Value::Choice(at) => at.into(),
            other => Self::mistaken("a choice", other),
        }
    }

    /// An op read an option as a kind that its own description does not give it. No call can cause this: values of
    /// another kind do not pass [`Attrs::validate`].
    fn mistaken(kind: &str, value: Value) -> ! {
        panic!("an option was read as {kind}, but is {value:?}")
    }

    /// `name=value` of every option that differs from its default.
    pub fn describe(&self, spec: &OpSpec) -> Vec<String> {
        let options = spec.attrs.iter().zip(self.values);
        options
            .filter(|(attr, value)| *value != attr.kind.default_value())
            .map(|(attr, value)| format!("{}={}", attr.name, value.text(attr.kind)))
            .collect()
    }
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;

    static SPEC: OpSpec = OpSpec {
        name: "test_op",
        attrs: &[
            AttrSpec { name: "eps", kind: AttrKind::Float(0.5), doc: "" },
            AttrSpec { name: "seed", kind: AttrKind::Int(7), doc: "" },
            AttrSpec { name: "causal", kind: AttrKind::Bool(true), doc: "" },
            AttrSpec { name: "act", kind: AttrKind::Choice(&["none", "gelu"]), doc: "" },
        ],
        ..OpSpec::EMPTY
    };

    #[test]
    fn whole_numbers_stay_whole() {
        let mut attrs = Attrs::defaults(&SPEC);
        for seed in [0, (1 << 53) + 1, i64::MAX as u64, u64::MAX] {
            attrs.set(&SPEC, 1, Value::seed(seed)).unwrap();
            assert_eq!(attrs.seed(1), seed);
        }
        attrs.parse(&SPEC, "seed", "9007199254740993").unwrap();
        assert_eq!(attrs.int(1), 9007199254740993);
        assert_eq!(attrs.describe(&SPEC), ["seed=9007199254740993"]);
        attrs.parse(&SPEC, "act", "gelu").unwrap();
        attrs.parse(&SPEC, "causal", "false").unwrap();
        assert_eq!((attrs.choice(3), attrs.bool(2), attrs.float(0)), (1, false, 0.5));
    }

    /// Zero is a number like any other, and neither it nor NaN means "not given".
    #[test]
    fn numbers_may_be_left_open() {
        static OPEN: OpSpec = OpSpec {
            name: "test_op",
            attrs: &[AttrSpec { name: "scale", kind: AttrKind::OptionalFloat, doc: "" }],
            ..OpSpec::EMPTY
        };
        let mut attrs = Attrs::defaults(&OPEN);
        assert_eq!((attrs.optional_float(0), attrs.describe(&OPEN)), (None, Vec::<String>::new()));
        for number in [0.0, -0.0, 0.5] {
            attrs.set(&OPEN, 0, Value::Float(number)).unwrap();
            assert_eq!(attrs.optional_float(0), Some(number));
            assert_ne!(attrs, Attrs::defaults(&OPEN));
        }
        assert_ne!(attrs.with(0, Value::Float(f64::NAN)), Attrs::defaults(&OPEN));
        attrs.parse(&OPEN, "scale", "0").unwrap();
        assert_eq!(attrs.describe(&OPEN), ["scale=0"]);
        attrs.parse(&OPEN, "scale", "none").unwrap();
        assert_eq!(attrs, Attrs::defaults(&OPEN));
        assert!(attrs.parse(&OPEN, "scale", "").is_err() && attrs.set(&OPEN, 0, Value::Int(0)).is_err());
        assert!(Attrs::defaults(&SPEC).set(&SPEC, 0, Value::Unset).is_err());
    }

    #[test]
    fn what_an_option_cannot_be_is_refused_by_name() {
        let mut attrs = Attrs::defaults(&SPEC);
        let values = [Value::Float(1.0), Value::Int(1), Value::Bool(false), Value::Choice(1)];
        for (index, attr) in SPEC.attrs.iter().enumerate() {
            for (other, &value) in values.iter().enumerate() {
                let set = attrs.set_named(&SPEC, attr.name, value);
                assert_eq!(set.is_ok(), index == other, "{}={value}", attr.name);
                let message = set.err().map(|error| error.to_string()).unwrap_or_default();
                assert!(index == other || message.contains(&format!("`{}`", attr.name)), "{message}");
            }
        }
        let error = attrs.set(&SPEC, 3, Value::Choice(2)).unwrap_err().to_string();
        assert_eq!(
            error,
            "test_op: argument `act`: expected one of none, gelu, got none of these (position 2)"
        );
        assert!(
            attrs.set(&SPEC, 4, Value::Int(0)).is_err() && attrs.set_named(&SPEC, "x", values[0]).is_err()
        );
        for (name, text) in [("eps", "x"), ("seed", "1.5"), ("causal", "1"), ("act", "relu"), ("none", "1")] {
            assert!(attrs.parse(&SPEC, name, text).unwrap_err().to_string().contains(name));
        }
        attrs.validate(&SPEC).unwrap();
        assert!(attrs.with(3, Value::Choice(2)).validate(&SPEC).is_err());
        assert!(attrs.with(0, Value::Int(0)).validate(&SPEC).is_err());
    }

    /// Attrs are part of what plans are found by.
    #[test]
    fn values_are_equal_by_their_bits() {
        let with = |value| Attrs::defaults(&SPEC).with(0, value);
        assert_eq!(with(Value::Float(f64::NAN)), with(Value::Float(f64::NAN)));
        assert_ne!(with(Value::Float(0.0)), with(Value::Float(-0.0)));
        assert_ne!(with(Value::Float(0.0)), with(Value::Int(0)));
        let known = std::collections::HashSet::from([with(Value::Float(0.25))]);
        assert!(known.contains(&with(Value::Float(0.25))) && !known.contains(&with(Value::Float(0.5))));
    }
}
