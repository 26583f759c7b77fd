//! The options of losses over a vocabulary, which all of their ops have at the same positions.

use crate::error::Result;
use crate::op::{AttrKind, AttrSpec, Attrs, Choice, Matcher};

pub(in crate::ops) const IGNORE_INDEX: usize = 0;
pub(in crate::ops) const SOFTCAP: usize = 1;
pub(in crate::ops) const LABEL_SMOOTHING: usize = 2;
pub(in crate::ops) const Z_LOSS: usize = 3;
pub(in crate::ops) const REDUCTION: usize = 4;

/// From losses of rows to the result.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Reduction {
    /// Their sum over the number of rows that are not ignored.
    #[default]
    Mean,
    /// Their sum.
    Sum,
    /// The losses themselves.
    None,
}

impl Reduction {
    /// The names of all.
    const NAMES: &[&str] = &["mean", "sum", "none"];
    /// The names of those that leave one number.
    pub(in crate::ops) const TO_A_NUMBER: &[&str] = &["mean", "sum"];
    const ALL: [Reduction; 3] = [Reduction::Mean, Reduction::Sum, Reduction::None];
}

impl Choice for Reduction {
    fn position(self) -> u8 {
        self as u8
    }
}

const fn described(reductions: &'static [&'static str]) -> [AttrSpec; 5] {
    [
        AttrSpec {
            name: "ignore_index",
            kind: AttrKind::Int(-100),
            doc: "the target of rows that do not count",
        },
        AttrSpec {
            name: "softcap",
            kind: AttrKind::Float(0.0),
            doc: "bounds logits by softcap * tanh(logit / softcap); 0: none",
        },
        AttrSpec {
            name: "label_smoothing",
            kind: AttrKind::Float(0.0),
            doc: "how much of the target is spread over the vocabulary, from 0 to 1",
        },
        AttrSpec {
            name: "z_loss",
            kind: AttrKind::Float(0.0),
            doc: "factor of the square of lse in the loss",
        },
        AttrSpec { name: "reduction", kind: AttrKind::Choice(reductions), doc: "of the losses of rows" },
    ]
}

/// The options of ops on logits.
pub(in crate::ops) const ATTRS: &[AttrSpec] = &described(Reduction::NAMES);
/// The options of ops whose loss is one number.
pub(in crate::ops) const ATTRS_OF_A_NUMBER: &[AttrSpec] = &described(Reduction::TO_A_NUMBER);

/// The checked options.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(in crate::ops) struct Options {
    pub ignore_index: i64,
    softcap_bits: u32,
    label_smoothing_bits: u32,
    z_loss_bits: u32,
    pub reduction: Reduction,
}

impl Options {
    pub fn check(sizes: &Matcher<'_>, attrs: &Attrs) -> Result<Options> {
        let float = |index: usize, expected: &str, holds: fn(f32) -> bool| {
            let value = attrs.float(index);
            sizes.option(ATTRS[index].name, value, expected, holds(value as f32))?;
            Ok((value as f32).to_bits())
        };
        let not_negative = "a finite number that is not negative";
        Ok(Options {
            ignore_index: attrs.int(IGNORE_INDEX),
            softcap_bits: float(SOFTCAP, not_negative, |x| x.is_finite() && x >= 0.0)?,
            label_smoothing_bits: float(LABEL_SMOOTHING, "a number from 0 to 1", |x| {
                (0.0..=1.0).contains(&x)
            })?,
            z_loss_bits: float(Z_LOSS, not_negative, |x| x.is_finite() && x >= 0.0)?,
            reduction: Reduction::ALL[attrs.choice(REDUCTION)],
        })
    }

    /// Zero for none.
    pub fn softcap(&self) -> f32 {
        f32::from_bits(self.softcap_bits)
    }

    pub fn label_smoothing(&self) -> f32 {
        f32::from_bits(self.label_smoothing_bits)
    }

    pub fn z_loss(&self) -> f32 {
        f32::from_bits(self.z_loss_bits)
    }
}
