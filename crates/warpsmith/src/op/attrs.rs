//! The values of an op's options.

use super::spec::{AttrKind, MAX_ATTRS, OpSpec};
use crate::error::{Error, Result};

/// The values of an op's options, by position in [`OpSpec::attrs`].
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Attrs {
    values: [f64; MAX_ATTRS],
}

impl Attrs {
    /// All defaults.
    pub fn defaults(spec: &OpSpec) -> Self {
        let mut values = [0.0; MAX_ATTRS];
        for (value, attr) in values.iter_mut().zip(spec.attrs) {
            *value = match attr.kind {
                AttrKind::Float(x) => x,
                AttrKind::Int(x) => x as f64,
                AttrKind::Bool(x) => x as u8 as f64,
                AttrKind::Choice(_) => 0.0,
            };
        }
        Attrs { values }
    }

    /// With one value replaced (switches as 0/1, choices by position).
    pub fn with(mut self, index: usize, value: f64) -> Self {
        self.values[index] = value;
        self
    }

    /// A number.
    pub fn f64(&self, index: usize) -> f64 {
        self.values[index]
    }

    /// A switch.
    pub fn bool(&self, index: usize) -> bool {
        self.values[index] != 0.0
    }

    /// The position of a choice, or a whole number.
    pub fn index(&self, index: usize) -> usize {
        self.values[index] as usize
    }

    /// The values as numbers that differ if the values do.
    pub(super) fn bits(&self) -> impl Iterator<Item = u64> {
        self.values.iter().map(|value| value.to_bits())
    }

    /// Sets an option from text, as the command line does.
    pub fn parse(&mut self, spec: &OpSpec, name: &str, text: &str) -> Result<()> {
        let known = || spec.attrs.iter().map(|a| a.name).collect::<Vec<_>>().join(", ");
        let index = spec.attrs.iter().position(|a| a.name == name).ok_or_else(|| {
            Error::argument(spec.name, name, format!("one of the options {}", known()), "no such option")
        })?;
        let kind = spec.attrs[index].kind;
        let value = match kind {
            AttrKind::Float(_) => text.parse().ok(),
            AttrKind::Int(_) => text.parse::<i64>().ok().map(|x| x as f64),
            AttrKind::Bool(_) => text.parse::<bool>().ok().map(|x| x as u8 as f64),
            AttrKind::Choice(names) => names.iter().position(|n| *n == text).map(|i| i as f64),
        };
        self.values[index] = value.ok_or_else(|| Error::argument(spec.name, name, kind.to_string(), text))?;
        Ok(())
    }

    /// `name=value` of every option that differs from its default.
    pub fn describe(&self, spec: &OpSpec) -> Vec<String> {
        let defaults = Attrs::defaults(spec);
        (0..spec.attrs.len())
            .filter(|&i| self.values[i] != defaults.values[i])
            .map(|i| {
                let value = match spec.attrs[i].kind {
                    AttrKind::Float(_) | AttrKind::Int(_) => self.values[i].to_string(),
                    AttrKind::Bool(_) => self.bool(i).to_string(),
                    AttrKind::Choice(names) => names[self.index(i)].to_string(),
                };
                format!("{}={value}", spec.attrs[i].name)
            })
            .collect()
    }
}
