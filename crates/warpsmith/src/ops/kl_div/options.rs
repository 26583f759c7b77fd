//! The options of `kl_div`, which its gradient has at the same positions.

use crate::error::Result;
use crate::op::{AttrKind, AttrSpec, Attrs, Choice, Matcher};
use crate::ops::cross_entropy::Reduction;

// The first is where the losses against targets have it.
pub(super) const IGNORE_INDEX: usize = 0;
pub(super) const TEMPERATURE: usize = 1;
pub(super) const DIRECTION: usize = 2;
pub(super) const REDUCTION: usize = 3;

/// Which of the two distributions weighs the difference of the logarithms.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Direction {
    /// The teacher's: `sum(p (ln p - ln q))`. The student is to cover what the teacher does.
    #[default]
    Forward,
    /// The student's: `sum(q (ln q - ln p))`. The student is to do nothing that the teacher does not.
    Reverse,
}

impl Choice for Direction {
    fn position(self) -> u8 {
        self as u8
    }
}

pub(super) const ATTRS: &[AttrSpec] = &[
    AttrSpec {
        name: "ignore_index",
        kind: AttrKind::Int(-100),
        doc: "the target of rows that do not count; all others do",
    },
    AttrSpec { name: "temperature", kind: AttrKind::Float(1.0), doc: "divides all logits" },
    AttrSpec {
        name: "direction",
        kind: AttrKind::Choice(&["forward", "reverse"]),
        doc: "forward: of the teacher from the student; reverse: of the student from the teacher",
    },
    AttrSpec {
        name: "reduction",
        kind: AttrKind::Choice(&["mean", "sum", "none"]),
        doc: "of the losses of rows",
    },
];

/// The checked options.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct Options {
    pub ignore_index: i64,
    temperature_bits: u32,
    pub direction: Direction,
    pub reduction: Reduction,
}

impl Options {
    pub fn check(sizes: &Matcher<'_>, attrs: &Attrs) -> Result<Options> {
        let temperature = attrs.float(TEMPERATURE) as f32;
        // What logits are multiplied by must be a number, and not zero.
        let range = f32::MIN_POSITIVE..=1.0 / f32::MIN_POSITIVE;
        let expected = format!("a number from {:e} to {:e}", range.start(), range.end());
        sizes.option("temperature", temperature, &expected, range.contains(&temperature))?;
        Ok(Options {
            ignore_index: attrs.int(IGNORE_INDEX),
            temperature_bits: temperature.to_bits(),
            direction: [Direction::Forward, Direction::Reverse][attrs.choice(DIRECTION)],
            reduction: [Reduction::Mean, Reduction::Sum, Reduction::None][attrs.choice(REDUCTION)],
        })
    }

    pub fn temperature(&self) -> f32 {
        f32::from_bits(self.temperature_bits)
    }

    /// What logits are multiplied by.
    pub fn inverse(&self) -> f32 {
        1.0 / self.temperature()
    }

    pub fn is_reverse(&self) -> bool {
        self.direction == Direction::Reverse
    }
}
