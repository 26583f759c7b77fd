//! The options of `moe_route`, of which its gradient has some.

use crate::error::{Error, Result};
use crate::op::{AttrKind, AttrSpec, Attrs, Choice, Matcher};

pub(super) const TOP_K: usize = 0;
pub(super) const SCORE: usize = 1;
pub(super) const NORMALIZE: usize = 2;
pub(super) const SCALE: usize = 3;
pub(super) const GROUPS: usize = 4;
pub(super) const TOP_GROUPS: usize = 5;
pub(super) const GROUP_SCORE: usize = 6;
pub(super) const NOISE: usize = 7;
pub(super) const SEED: usize = 8;
pub(super) const CAPACITY: usize = 9;

/// From logits to scores.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum RouteScore {
    /// Of all experts together.
    #[default]
    Softmax,
    /// Of each expert alone.
    Sigmoid,
}

/// From the scores of a group's experts to that of the group.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum GroupScore {
    /// The sum of the two largest.
    #[default]
    Sum,
    /// The largest.
    Max,
}

impl RouteScore {
    const ALL: [RouteScore; 2] = [RouteScore::Softmax, RouteScore::Sigmoid];

    /// At this position of the option.
    pub(in crate::ops) fn at(position: usize) -> RouteScore {
        Self::ALL[position]
    }
}

impl Choice for RouteScore {
    fn position(self) -> u8 {
        self as u8
    }
}

impl Choice for GroupScore {
    fn position(self) -> u8 {
        self as u8
    }
}

/// The option `score` of ops on the logits of a router.
pub(in crate::ops) const SCORE_SPEC: AttrSpec = AttrSpec {
    name: "score",
    kind: AttrKind::Choice(&["softmax", "sigmoid"]),
    doc: "from logits to scores; softmax is over all experts",
};

pub(super) const NORMALIZE_SPEC: AttrSpec = AttrSpec {
    name: "normalize",
    kind: AttrKind::Bool(true),
    doc: "divide the weights of a token by their sum",
};

pub(super) const SCALE_SPEC: AttrSpec =
    AttrSpec { name: "scale", kind: AttrKind::Float(1.0), doc: "factor of all weights" };

pub(super) const ATTRS: &[AttrSpec] = &[
    AttrSpec { name: "top_k", kind: AttrKind::Int(2), doc: "experts that each token gets" },
    SCORE_SPEC,
    NORMALIZE_SPEC,
    SCALE_SPEC,
    AttrSpec { name: "groups", kind: AttrKind::Int(1), doc: "equal groups that the experts are in" },
    AttrSpec {
        name: "top_groups",
        kind: AttrKind::Int(0),
        doc: "groups that a token's experts may be from; 0: all",
    },
    AttrSpec {
        name: "group_score",
        kind: AttrKind::Choice(&["sum", "max"]),
        doc: "of a group: the sum of its two largest scores, or the largest",
    },
    AttrSpec {
        name: "noise",
        kind: AttrKind::Float(0.0),
        doc: "standard deviation of the noise that is added to logits for the choice",
    },
    AttrSpec { name: "seed", kind: AttrKind::Int(0), doc: "of the noise" },
    AttrSpec { name: "capacity", kind: AttrKind::Int(0), doc: "most tokens of an expert; 0: any number" },
];

/// The checked options.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct Options {
    pub top_k: usize,
    pub score: RouteScore,
    pub normalize: bool,
    scale_bits: u32,
    pub groups: usize,
    pub top_groups: usize,
    pub group_score: GroupScore,
    noise_bits: u32,
    pub seed: i64,
    /// Zero for any.
    pub capacity: usize,
}

/// `scale`, as bits.
pub(super) fn check_scale(sizes: &Matcher<'_>, attrs: &Attrs, index: usize) -> Result<u32> {
    let scale = attrs.float(index);
    sizes.option("scale", scale, "a finite number", (scale as f32).is_finite())?;
    Ok((scale as f32).to_bits())
}

impl Options {
    pub fn check(sizes: &Matcher<'_>, attrs: &Attrs, op: &'static str, experts: usize) -> Result<Options> {
        let whole = |index: usize, expected: &str, most: usize| -> Result<usize> {
            let value = attrs.int(index);
            let least = usize::from(index == TOP_K || index == GROUPS);
            let found = usize::try_from(value).ok().filter(|value| (least..=most).contains(value));
            let name = ATTRS[index].name;
            found.ok_or_else(|| Error::argument(op, name, format!("{expected}{most}"), value.to_string()))
        };
        let top_k = whole(TOP_K, "a whole number from 1 to experts=", experts)?;
        let groups = whole(GROUPS, "a whole number from 1 to experts=", experts)?;
        let divides = experts.is_multiple_of(groups);
        sizes.option("groups", groups, &format!("a number that divides experts={experts}"), divides)?;
        let top_groups = whole(TOP_GROUPS, "a whole number from 0 to groups=", groups)?;
        let top_groups = if top_groups == 0 { groups } else { top_groups };
        let enough = top_groups * (experts / groups) >= top_k;
        let expected = format!("groups that have top_k={top_k} experts, of {} each", experts / groups);
        sizes.option("top_groups", top_groups, &expected, enough)?;
        let noise = attrs.float(NOISE);
        let holds = (noise as f32).is_finite() && noise >= 0.0;
        sizes.option("noise", noise, "a finite number that is not negative", holds)?;
        Ok(Options {
            top_k,
            score: RouteScore::at(attrs.choice(SCORE)),
            normalize: attrs.bool(NORMALIZE),
            scale_bits: check_scale(sizes, attrs, SCALE)?,
            groups,
            top_groups,
            group_score: [GroupScore::Sum, GroupScore::Max][attrs.choice(GROUP_SCORE)],
            noise_bits: (noise as f32).to_bits(),
            seed: attrs.int(SEED),
            capacity: whole(CAPACITY, "a whole number from 0 to ", i32::MAX as usize)?,
        })
    }

    pub fn scale(&self) -> f32 {
        f32::from_bits(self.scale_bits)
    }

    /// Zero for none.
    pub fn noise(&self) -> f32 {
        f32::from_bits(self.noise_bits)
    }

    /// Whether groups leave experts out.
    pub fn has_groups(&self) -> bool {
        self.top_groups < self.groups
    }

    /// Whether the choice is by scores as numbers, not only by their order.
    pub fn compares_scores(&self, has_bias: bool) -> bool {
        has_bias || self.has_groups() && self.group_score == GroupScore::Sum
    }
}
