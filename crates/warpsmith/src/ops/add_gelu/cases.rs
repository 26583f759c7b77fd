//! The cases of `add_gelu` and its gradient: what every kernel must pass, and what is timed.

use super::{APPROXIMATE, Backward, DBIAS, Forward, reference};
use crate::lab::{ArgPlan, Arrangement, Array, Case, Inputs, Provable, Real};
use crate::op::{Attrs, Op, OpSpec};
use crate::ops::FLOATS;
use crate::ops::elementwise::cases::every_path;
use crate::tensor::DType;

impl Provable for Forward {
    fn reference<R: Real>(inputs: &Inputs<'_, R>, attrs: &Attrs) -> Vec<Option<Array<R>>> {
        reference::forward(inputs, attrs)
    }

    fn plan(case: &Case) -> Vec<Option<ArgPlan>> {
        let rows = ArgPlan::batched(&case.sizes, case.dtype);
        vec![rows.clone(), ArgPlan::shared(&case.sizes[1..], case.dtype), rows]
    }

    fn cases() -> Vec<Case> {
        cases(&Self::SPEC, &[])
    }

    fn bench_cases() -> Vec<Case> {
        bench_cases(&Self::SPEC, &[])
    }
}

impl Provable for Backward {
    fn reference<R: Real>(inputs: &Inputs<'_, R>, attrs: &Attrs) -> Vec<Option<Array<R>>> {
        reference::backward(inputs, attrs)
    }

    fn plan(case: &Case) -> Vec<Option<ArgPlan>> {
        let rows = ArgPlan::batched(&case.sizes, case.dtype);
        let vector = ArgPlan::shared(&case.sizes[1..], case.dtype);
        let dbias = if case.gives(DBIAS) { vector.clone() } else { None };
        vec![rows.clone(), vector, rows.clone(), rows, dbias]
    }

    fn cases() -> Vec<Case> {
        let mut cases = cases(&Self::SPEC, &[DBIAS]);
        // Enough rows for every thread or group to have several: along one run, where blocks add up sums of a column
        // or leave them as they lie, and in rows, with all columns of a thread or fewer.
        for dtype in FLOATS {
            let many = Case::new(&Self::SPEC, dtype).give(DBIAS);
            for sizes in [[3000, 24], [4001, 9], [801, 521], [601, 1027]] {
                cases.push(many.clone().sizes(&sizes));
                cases.push(many.clone().sizes(&sizes).arranged(Arrangement::Misaligned));
                cases.push(many.clone().sizes(&sizes).arranged(Arrangement::PaddedRows));
            }
            // More than a thread loads at once.
            cases.push(many.sizes(&[4801, 521]));
        }
        cases
    }

    fn bench_cases() -> Vec<Case> {
        bench_cases(&Self::SPEC, &[DBIAS])
    }
}

fn cases(spec: &OpSpec, optional: &[usize]) -> Vec<Case> {
    every_path(spec, |case| {
        let full = optional.iter().fold(case.clone(), |case, &index| case.give(index));
        let tanh = full.clone().attr(APPROXIMATE, 1.0);
        if optional.is_empty() { vec![full, tanh] } else { vec![full, tanh, case] }
    })
}

fn bench_cases(spec: &OpSpec, optional: &[usize]) -> Vec<Case> {
    let mut cases = Vec::new();
    for dtype in [DType::BF16, DType::F32] {
        let case = optional.iter().fold(Case::new(spec, dtype), |case, &index| case.give(index));
        cases.push(case.clone());
        cases.push(case.clone().attr(APPROXIMATE, 1.0));
        cases.push(case.sizes(&[128, 4096]));
    }
    cases
}
