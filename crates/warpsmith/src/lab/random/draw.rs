//! Drawing calls that an op takes, from its description and its cases.

use super::Draw;
use crate::device::Device;
use crate::lab::proof::Drawn;
use crate::lab::{AnyProvable, Arrangement, Case, Values};
use crate::op::{AttrKind, Role, Value};
use crate::tensor::{DType, Random};

/// Fixed properties of all draws.
#[derive(Debug, Clone, Copy, Default)]
pub struct Pinned {
    /// The element type.
    pub dtype: Option<DType>,
    /// The memory layout.
    pub arrangement: Option<Arrangement>,
    /// The kind of values.
    pub values: Option<Values>,
}

/// The random calls of an op.
///
/// A draw begins with one of the op's own cases, which have options and arguments that go together, and changes some of
/// its sizes, options, optional arguments, layout and values. Options get values of other cases, or values near them.
/// [`constrain`](crate::lab::Provable::constrain) enforces what an op requires beyond its description.
pub struct Draws {
    op: &'static dyn AnyProvable,
    cases: Vec<Case>,
    pinned: Pinned,
    multiplies: bool,
}

/// Elements of all tensors of most draws, at most; the bound itself is drawn.
const ELEMENTS: u32 = 17;
/// Elements of one draw among [`RARE`].
const MANY_ELEMENTS: u32 = 20;
const RARE: u64 = 64;
/// More operations for each element than any op has that does not multiply matrices.
const OPERATIONS: f64 = 40.0;
/// Multiplications for each element, at most.
const MULTIPLICATIONS: usize = 32;

impl Draws {
    /// The random calls of `op`. None if it has no case of the type that is asked for.
    pub fn new(op: &'static dyn AnyProvable, pinned: Pinned) -> Option<Draws> {
        let mut cases = op.cases();
        // What a case of some size says about all.
        let typical = cases.iter().filter(|case| elements(op, case) < 1 << 14);
        let typical = typical.max_by_key(|case| elements(op, case)).and_then(|case| {
            let cost = Drawn::new(op, case, Device::Cpu, 0).ok()?.cost().ok()?;
            Some(cost.flops / elements(op, case) as f64)
        });
        let multiplies = typical.is_some_and(|operations| operations > OPERATIONS);
        cases.retain(|case| pinned.dtype.is_none_or(|dtype| dtype == case.dtype));
        (!cases.is_empty()).then_some(Draws { op, cases, pinned, multiplies })
    }

    /// Whether the op multiplies matrices.
    pub fn multiplies(&self) -> bool {
        self.multiplies
    }

    /// Draw `number` of `seed`. It does not depend on other draws.
    pub fn draw(&self, seed: u64, number: u64) -> Draw {
        let name = self.op.spec().name.bytes();
        let op = name.fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        let mut rng = Random::new(Random::new(seed ^ op).bits().wrapping_add(number));
        let mut case = self.any(&mut rng).clone();
        // Features that only chosen cases need, and no command line can express.
        (case.gpu_only, case.selective) = (false, false);
        case.kv_lens.clear();
        if let Some(dtype) =
            self.pinned.dtype.or_else(|| one_in(&mut rng, 2).then(|| self.any(&mut rng).dtype))
        {
            case.dtype = dtype;
        }
        self.draw_options(&mut rng, &mut case);
        self.draw_arguments(&mut rng, &mut case);
        case.arrangement = self.pinned.arrangement.unwrap_or_else(|| arrangement(&mut rng));
        case.values = self.pinned.values.unwrap_or_else(|| values(&mut rng));
        let in_place = |role: Role| matches!(role, Role::Out { in_place_of: Some(_) });
        case.in_place = one_in(&mut rng, 6) && self.op.spec().args.iter().any(|arg| in_place(arg.role));
        self.draw_sizes(&mut rng, &mut case);
        Draw { case, seed: rng.below(1 << 16) }
    }

    fn any(&self, rng: &mut Random) -> &Case {
        &self.cases[rng.below(self.cases.len() as u64) as usize]
    }

    fn draw_options(&self, rng: &mut Random, case: &mut Case) {
        for (index, attr) in self.op.spec().attrs.iter().enumerate() {
            if one_in(rng, 2) {
                continue;
            }
            // Rare values of cases are as likely as the default.
            let known = self.any(rng).attrs.value(index);
            let near = one_in(rng, 4);
            let value = match (attr.kind, known) {
                (AttrKind::Bool(_), _) => Value::Bool(one_in(rng, 2)),
                (AttrKind::Choice(names), _) => Value::Choice(rng.below(names.len() as u64) as u8),
                (_, Value::Float(x)) if near => Value::Float(x * (0.25 + 2.0 * rng.uniform())),
                (_, Value::Int(x)) if near && x > 0 => Value::Int(1 + rng.below(2 * x as u64) as i64),
                (_, known) => known,
            };
            case.attrs = case.attrs.with(index, value);
        }
    }

    fn draw_arguments(&self, rng: &mut Random, case: &mut Case) {
        let args = self.op.spec().args;
        for (index, _) in args.iter().enumerate().filter(|(_, arg)| arg.optional) {
            if one_in(rng, 3) {
                case.optional ^= 1 << index;
            }
        }
        for (index, other) in args.iter().enumerate().filter_map(|(index, arg)| Some((index, arg.with?))) {
            case.optional &= !(1 << index);
            case.optional |= u32::from(case.gives(other)) << index;
        }
    }

    fn draw_sizes(&self, rng: &mut Random, case: &mut Case) {
        let least = rng.below(u64::from(ELEMENTS - 6)) as u32 + 6;
        let most = 1 << if one_in(rng, RARE) { MANY_ELEMENTS } else { least };
        for index in 0..case.sizes.len() {
            case.sizes[index] = match rng.below(4) {
                0 => case.sizes[index],
                1 => self.any(rng).sizes[index],
                _ => size(rng),
            };
        }
        self.op.constrain(case);
        self.fit(rng, case, most);
    }

    /// Halves sizes until the case is small enough.
    fn fit(&self, rng: &mut Random, case: &mut Case, most: usize) {
        let mut order: Vec<usize> = (0..case.sizes.len()).collect();
        while self.work(case) > most {
            order.sort_by_key(|&index| std::cmp::Reverse(case.sizes[index]));
            let odd = rng.below(2) as usize;
            let smaller = |index: &usize| {
                let mut smaller = case.clone();
                smaller.sizes[*index] =
                    (case.sizes[*index] / 2 + odd).min(case.sizes[*index].saturating_sub(1));
                self.op.constrain(&mut smaller);
                (self.work(&smaller) < self.work(case)).then_some(smaller)
            };
            match order.iter().find_map(smaller) {
                Some(smaller) => *case = smaller,
                // As small as the op allows.
                None => return,
            }
        }
    }

    /// A bound of what a reference takes.
    fn work(&self, case: &Case) -> usize {
        let elements = elements(self.op, case);
        let longest = case.sizes.iter().copied().max().unwrap_or(1);
        // A product has at most as many multiplications as its tensors have elements, times the longest dimension.
        if self.multiplies {
            elements.max(elements.saturating_mul(longest) / MULTIPLICATIONS)
        } else {
            elements
        }
    }
}

/// The elements of all tensors of a case.
fn elements(op: &dyn AnyProvable, case: &Case) -> usize {
    let sizes = |shape: &[usize]| shape.iter().copied().fold(1, usize::saturating_mul);
    op.plan(case).iter().flatten().map(|plan| sizes(&plan.shape)).fold(0, usize::saturating_add)
}

/// One, few, around powers of two and multiples of tiles, and any; rarely none.
fn size(rng: &mut Random) -> usize {
    let below = |rng: &mut Random, bound: u64| rng.below(bound) as usize;
    match below(rng, 40) {
        0 => 0,
        1..=5 => 1,
        6..=12 => 2 + below(rng, 8),
        13..=22 => ((1usize << (1 + below(rng, 13))) + below(rng, 3)) - 1,
        23..=28 => (16 * (1 + below(rng, 24)) + below(rng, 3)) - 1,
        _ => (13.0 * rng.uniform()).exp2() as usize,
    }
}

fn arrangement(rng: &mut Random) -> Arrangement {
    match rng.below(12) {
        0..=3 => Arrangement::Contiguous,
        4..=7 => Arrangement::Mixed,
        8 => Arrangement::PaddedRows,
        9 => Arrangement::Transposed,
        10 => Arrangement::Misaligned,
        _ => Arrangement::HeadsFirst,
    }
}

fn values(rng: &mut Random) -> Values {
    match rng.below(8) {
        0..=2 => Values::Typical,
        3 => Values::Large,
        4..=5 => Values::Special,
        _ => Values::Exponents,
    }
}

fn one_in(rng: &mut Random, count: u64) -> bool {
    rng.below(count) == 0
}
