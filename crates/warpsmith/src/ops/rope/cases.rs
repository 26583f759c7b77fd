//! The cases of `rope` and its gradient: what every kernel must pass, and what is timed.

use super::{Backward, COS, Forward, LAYOUT, ROTARY_DIM, SCALE, SIN, THETA, reference};
use crate::lab::{ArgPlan, Arrangement, Array, Case, Fill, Inputs, Provable, Real, Values};
use crate::op::{Attrs, Op, OpSpec};
use crate::ops::FLOATS;
use crate::tensor::DType;

impl Provable for Forward {
    fn reference<R: Real>(inputs: &Inputs<'_, R>, attrs: &Attrs) -> Vec<Option<Array<R>>> {
        reference::rotated(inputs, attrs, R::one())
    }

    fn plan(case: &Case) -> Vec<Option<ArgPlan>> {
        plan(case)
    }

    fn constrain(case: &mut Case) {
        make_rotatable(case, 2);
    }

    fn cases() -> Vec<Case> {
        cases(&Self::SPEC)
    }

    fn bench_cases() -> Vec<Case> {
        bench_cases(&Self::SPEC)
    }
}

impl Provable for Backward {
    fn reference<R: Real>(inputs: &Inputs<'_, R>, attrs: &Attrs) -> Vec<Option<Array<R>>> {
        reference::rotated(inputs, attrs, -R::one())
    }

    fn plan(case: &Case) -> Vec<Option<ArgPlan>> {
        plan(case)
    }

    fn constrain(case: &mut Case) {
        make_rotatable(case, 2);
    }

    fn cases() -> Vec<Case> {
        cases(&Self::SPEC)
    }

    fn bench_cases() -> Vec<Case> {
        bench_cases(&Self::SPEC)
    }
}

/// Rows of the tables of a case.
const TABLE_ROWS: usize = 50;

/// Positions of a case without tables.
const LARGEST_POSITION: usize = 131_072;

fn plan(case: &Case) -> Vec<Option<ArgPlan>> {
    let [tokens, _, head_dim] = case.sizes[..] else { unreachable!("three sizes") };
    let rotary_dim = match case.attrs.int(ROTARY_DIM) as usize {
        0 => head_dim,
        some => some,
    };
    let given = case.gives(COS);
    let table = || given.then(|| ArgPlan::shared(&[TABLE_ROWS, rotary_dim / 2], DType::F32)).flatten();
    let positions = ArgPlan {
        shape: vec![tokens],
        // One of the types has the narrow positions, so that cases reach both kinds.
        dtype: if case.dtype == DType::F16 { DType::I32 } else { DType::I64 },
        fill: Fill::Below(if given { TABLE_ROWS } else { LARGEST_POSITION }),
        batch_dim: Some(0),
    };
    let x = ArgPlan::batched(&case.sizes, case.dtype);
    vec![x.clone(), Some(positions), table(), table(), x]
}

fn cases(spec: &OpSpec) -> Vec<Case> {
    let mut cases = Vec::new();
    for dtype in FLOATS {
        for layout in [0.0, 1.0] {
            let case = Case::new(spec, dtype).attr(LAYOUT, layout);
            for sizes in [
                [0, 4, 64],
                [3, 0, 64],
                [1, 1, 2],
                [7, 3, 6],
                [5, 2, 10],
                [9, 8, 64],
                [3, 32, 80],
                [4, 32, 128],
                [2, 5, 256],
                [3, 29, 256],
                [70, 1, 128],
                [2, 1, 1032],
            ] {
                cases.push(case.clone().sizes(&sizes));
            }
            if dtype == DType::BF16 {
                // Enough to be written past the caches, which heads that are no whole cache lines do not allow.
                cases.push(case.clone().sizes(&[256, 32, 80]));
            }
            cases.push(case.clone().sizes(&[5, 8, 80]).attr(ROTARY_DIM, 32.0));
            cases.push(case.clone().sizes(&[3, 3, 96]).attr(ROTARY_DIM, 10.0));
            cases.push(case.clone().sizes(&[5, 4, 64]).attr(THETA, 500_000.0).attr(SCALE, 0.25));
            let tables = case.clone().give(COS).give(SIN);
            cases.push(tables.clone().sizes(&[9, 8, 128]));
            cases.push(tables.clone().sizes(&[9, 3, 20]).attr(ROTARY_DIM, 14.0));
            for case in [case.sizes(&[33, 4, 64]), tables.sizes(&[12, 2, 48]).attr(ROTARY_DIM, 16.0)] {
                for arrangement in [Arrangement::PaddedRows, Arrangement::Transposed, Arrangement::Misaligned]
                {
                    cases.push(case.clone().arranged(arrangement));
                }
                cases.push(case.clone().values(Values::Large));
                cases.push(case.clone().values(Values::Special));
                cases.push(case.in_place());
            }
        }
    }
    cases
}

fn bench_cases(spec: &OpSpec) -> Vec<Case> {
    let mut cases = Vec::new();
    for dtype in [DType::BF16, DType::F32] {
        for layout in [0.0, 1.0] {
            for num_tokens in [128, 8192] {
                cases.push(Case::new(spec, dtype).attr(LAYOUT, layout).sizes(&[num_tokens, 32, 128]));
            }
        }
    }
    cases
}

/// Makes the size at `head_dim` and the option for the part that is rotated even, and the part no more than the whole.
pub(in crate::ops) fn make_rotatable(case: &mut Case, head_dim: usize) {
    case.sizes[head_dim] = case.sizes[head_dim].next_multiple_of(2);
    let whole = case.sizes[head_dim] as i64;
    let part = case.attrs.int(ROTARY_DIM).clamp(0, whole);
    case.set(ROTARY_DIM, (part - part % 2) as f64);
}
