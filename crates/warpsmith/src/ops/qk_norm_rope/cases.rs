//! The cases of `qk_norm_rope`: what every kernel must pass, and what is timed.

use super::{COS, EPS, Forward, SIN, reference};
use crate::lab::{ArgPlan, Arrangement, Array, Case, Fill, Inputs, Provable, Real, Values};
use crate::op::{Attrs, Op};
use crate::ops::FLOATS;
use crate::ops::rope::cases::make_rotatable;
use crate::ops::rope::{LAYOUT, ROTARY_DIM, SCALE, THETA};
use crate::tensor::DType;

/// Rows of the tables of a case.
const TABLE_ROWS: usize = 50;

/// Positions of a case without tables.
const LARGEST_POSITION: usize = 131_072;

impl Provable for Forward {
    fn reference<R: Real>(inputs: &Inputs<'_, R>, attrs: &Attrs) -> Vec<Option<Array<R>>> {
        reference::forward(inputs, attrs)
    }

    fn plan(case: &Case) -> Vec<Option<ArgPlan>> {
        let [tokens, heads, kv_heads, head_dim] = case.sizes[..] else { unreachable!("four sizes") };
        let rotary_dim = match case.attrs.int(ROTARY_DIM) as usize {
            0 => head_dim,
            some => some,
        };
        let given = case.gives(COS);
        let table = || given.then(|| ArgPlan::shared(&[TABLE_ROWS, rotary_dim / 2], DType::F32)).flatten();
        // Every second number of heads has weights in f32, so that cases reach both kinds.
        let wide = (heads + kv_heads).is_multiple_of(2);
        let weight = || ArgPlan::shared(&[head_dim], if wide { DType::F32 } else { case.dtype });
        let positions = ArgPlan {
            shape: vec![tokens],
            // One of the types has the narrow positions.
            dtype: if case.dtype == DType::F16 { DType::I32 } else { DType::I64 },
            fill: Fill::Below(if given { TABLE_ROWS } else { LARGEST_POSITION }),
            batch_dim: Some(0),
        };
        let of = |heads: usize| ArgPlan::batched(&[tokens, heads, head_dim], case.dtype);
        vec![
            of(heads),
            of(kv_heads),
            weight(),
            weight(),
            Some(positions),
            table(),
            table(),
            of(heads),
            of(kv_heads),
        ]
    }

    fn constrain(case: &mut Case) {
        make_rotatable(case, 3);
        case.set(EPS, case.attrs.float(EPS).max(0.0));
    }

    fn cases() -> Vec<Case> {
        let mut cases = Vec::new();
        for dtype in FLOATS {
            for layout in [0.0, 1.0] {
                let case = Case::new(&Self::SPEC, dtype).attr(LAYOUT, layout);
                for sizes in [
                    [0, 4, 2, 64],
                    [3, 0, 0, 64],
                    [3, 5, 0, 64],
                    [3, 0, 2, 64],
                    [1, 1, 1, 2],
                    [7, 3, 2, 6],
                    [5, 2, 1, 10],
                    [9, 8, 3, 64],
                    [3, 32, 4, 80],
                    [4, 32, 8, 128],
                    [70, 5, 2, 128],
                    [2, 5, 4, 256],
                    [3, 29, 2, 256],
                    [2, 1, 1, 512],
                ] {
                    cases.push(case.clone().sizes(&sizes));
                }
                cases.push(case.clone().sizes(&[5, 8, 3, 80]).attr(ROTARY_DIM, 32.0));
                cases.push(case.clone().sizes(&[3, 3, 3, 128]).attr(ROTARY_DIM, 10.0));
                let scaled = case.clone().sizes(&[5, 4, 1, 64]).attr(THETA, 500_000.0);
                cases.push(scaled.attr(SCALE, 0.25).attr(EPS, 0.5));
                let tables = case.clone().give(COS).give(SIN);
                cases.push(tables.clone().sizes(&[9, 8, 2, 128]));
                cases.push(tables.clone().sizes(&[9, 8, 3, 128]));
                cases.push(tables.clone().sizes(&[9, 3, 1, 20]).attr(ROTARY_DIM, 14.0));
                for case in
                    [case.sizes(&[33, 4, 3, 64]), tables.sizes(&[12, 2, 2, 48]).attr(ROTARY_DIM, 16.0)]
                {
                    for arrangement in [
                        Arrangement::PaddedRows,
                        Arrangement::Transposed,
                        Arrangement::Misaligned,
                        Arrangement::HeadsFirst,
                    ] {
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

    fn bench_cases() -> Vec<Case> {
        let mut cases = Vec::new();
        for dtype in [DType::BF16, DType::F32] {
            for sizes in [[128, 32, 8, 128], [8192, 32, 8, 128], [8192, 16, 8, 64]] {
                cases.push(Case::new(&Self::SPEC, dtype).sizes(&sizes));
            }
        }
        cases
    }
}
