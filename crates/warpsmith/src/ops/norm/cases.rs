//! The cases of both norms and their gradients.

use super::{BIAS, EPS, RESIDUAL, SUM, WEIGHT, backward as back};
use crate::lab::{ArgPlan, Arrangement, Case, MANY_ROWS, ODD_ROWS, ROW_SIZES, Values};
use crate::op::OpSpec;
use crate::ops::FLOATS;
use crate::tensor::DType;

pub(in crate::ops) fn plan(spec: &OpSpec, case: &Case) -> Vec<Option<ArgPlan>> {
    (0..spec.args.len())
        .map(|index| match index {
            _ if spec.args[index].optional && !case.gives(index) => None,
            WEIGHT | BIAS => ArgPlan::shared(&case.sizes[1..], case.dtype),
            _ => ArgPlan::batched(&case.sizes, case.dtype),
        })
        .collect()
}

/// `vectors`: the optional weight and bias of the op.
pub(in crate::ops) fn cases(spec: &OpSpec, vectors: &[usize]) -> Vec<Case> {
    let mut cases = Vec::new();
    for dtype in FLOATS {
        let plain = vectors.iter().fold(Case::new(spec, dtype), |case, &v| case.give(v));
        let fused = plain.clone().give(RESIDUAL).give(SUM);
        for sizes in ROW_SIZES.iter().chain(ODD_ROWS) {
            cases.push(plain.clone().sizes(sizes));
            cases.push(fused.clone().sizes(sizes));
        }
        for arrangement in SHIFTED {
            cases.push(fused.clone().sizes(&[5, 1025]).arranged(arrangement));
        }
        cases.push(fused.clone().sizes(&[4, 10_624]));
        cases.push(plain.clone().sizes(&[3, 5000]));
        cases.push(Case::new(spec, dtype).sizes(&[5, 1000]));
        cases.push(plain.clone().sizes(&[5, 1000]).attr(EPS, 0.5));
        for case in [plain, fused] {
            let case = case.sizes(&[33, 264]);
            for arrangement in [Arrangement::PaddedRows, Arrangement::Transposed, Arrangement::Misaligned] {
                cases.push(case.clone().arranged(arrangement));
            }
            cases.push(case.clone().values(Values::Large));
            cases.push(case.clone().values(Values::Special));
            cases.push(case.in_place());
        }
    }
    let many = vectors.iter().fold(Case::new(spec, DType::BF16), |case, &v| case.give(v));
    for sizes in MANY_ROWS {
        cases.push(many.clone().sizes(sizes));
    }
    cases.push(many.give(RESIDUAL).give(SUM).sizes(MANY_ROWS[0]).in_place());
    cases
}

/// Rows that the blocks of a cluster share, whole and odd, few and more than are worked on at once; and longer ones.
const LONG_ROWS: &[&[usize]] =
    &[&[3, 5717], &[2, 8193], &[70, 9243], &[2, 16384], &[40, 19_200], &[3, 32_768], &[2, 40_001]];

/// Dense rows at any alignment.
const SHIFTED: [Arrangement; 2] = [Arrangement::PaddedRows, Arrangement::Misaligned];

pub(in crate::ops) fn bench_cases(spec: &OpSpec, vectors: &[usize]) -> Vec<Case> {
    let mut cases = Vec::new();
    for dtype in [DType::BF16, DType::F32] {
        for sizes in [[128, 4096], [8192, 4096], [32768, 8192]] {
            let plain = vectors.iter().fold(Case::new(spec, dtype), |case, &v| case.give(v)).sizes(&sizes);
            cases.push(plain.clone());
            cases.push(plain.give(RESIDUAL).give(SUM));
        }
    }
    cases
}

pub(in crate::ops) fn backward_plan(spec: &OpSpec, case: &Case) -> Vec<Option<ArgPlan>> {
    (0..spec.args.len())
        .map(|index| match index {
            _ if spec.args[index].optional && !case.gives(index) => None,
            back::WEIGHT | back::DWEIGHT | back::DBIAS => ArgPlan::shared(&case.sizes[1..], case.dtype),
            _ => ArgPlan::batched(&case.sizes, case.dtype),
        })
        .collect()
}

/// `vectors`: the weight and the summed gradients of the op.
pub(in crate::ops) fn backward_cases(spec: &OpSpec, vectors: &[usize]) -> Vec<Case> {
    let mut cases = Vec::new();
    for dtype in FLOATS {
        let full = vectors.iter().fold(Case::new(spec, dtype), |case, &v| case.give(v));
        for sizes in ROW_SIZES.iter().chain(ODD_ROWS) {
            cases.push(full.clone().sizes(sizes));
        }
        for arrangement in SHIFTED {
            cases.push(full.clone().give(back::DSUM).sizes(&[5, 1025]).arranged(arrangement));
        }
        for sizes in LONG_ROWS {
            cases.push(full.clone().sizes(sizes));
        }
        for arrangement in SHIFTED.into_iter().chain([Arrangement::Transposed]) {
            cases.push(full.clone().give(back::DSUM).sizes(&[3, 9243]).arranged(arrangement));
        }
        cases.push(full.clone().sizes(&[200, 9000]));
        cases.push(full.clone().sizes(&[300, 72]));
        cases.push(full.clone().sizes(&[7, 200]).give(back::DSUM));
        cases.push(Case::new(spec, dtype).sizes(&[5, 1000]));
        cases.push(Case::new(spec, dtype).give(back::DWEIGHT).sizes(&[5, 1000]));
        let case = full.give(back::DSUM).sizes(&[33, 264]);
        for arrangement in [Arrangement::PaddedRows, Arrangement::Transposed, Arrangement::Misaligned] {
            cases.push(case.clone().arranged(arrangement));
        }
        cases.push(case.clone().values(Values::Special));
        cases.push(case.in_place());
    }
    let many = vectors.iter().fold(Case::new(spec, DType::BF16), |case, &v| case.give(v));
    for sizes in MANY_ROWS {
        cases.push(many.clone().sizes(sizes));
    }
    cases
}

pub(in crate::ops) fn backward_bench_cases(spec: &OpSpec, vectors: &[usize]) -> Vec<Case> {
    let mut cases = Vec::new();
    for dtype in [DType::BF16, DType::F32] {
        for sizes in [[8192, 4096], [32768, 8192]] {
            cases.push(vectors.iter().fold(Case::new(spec, dtype), |case, &v| case.give(v)).sizes(&sizes));
        }
    }
    cases
}
