//! The cases of `activation` and its gradient: what every kernel must pass, and what is timed.

use super::{Backward, Forward, KIND, KINDS, reference};
use crate::lab::{ArgPlan, Array, Case, Inputs, Provable, Real};
use crate::op::{Attrs, Op, OpSpec};
use crate::ops::elementwise::cases::every_path;
use crate::tensor::DType;

impl Provable for Forward {
    fn reference<R: Real>(inputs: &Inputs<'_, R>, attrs: &Attrs) -> Vec<Option<Array<R>>> {
        reference::forward(inputs, attrs)
    }

    fn plan(case: &Case) -> Vec<Option<ArgPlan>> {
        vec![ArgPlan::batched(&case.sizes, case.dtype); 2]
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
        reference::backward(inputs, attrs)
    }

    fn plan(case: &Case) -> Vec<Option<ArgPlan>> {
        vec![ArgPlan::batched(&case.sizes, case.dtype); 3]
    }

    fn cases() -> Vec<Case> {
        cases(&Self::SPEC)
    }

    fn bench_cases() -> Vec<Case> {
        bench_cases(&Self::SPEC)
    }
}

/// Every function in every case.
fn cases(spec: &OpSpec) -> Vec<Case> {
    every_path(spec, |case| (0..KINDS.len()).map(|kind| case.clone().attr(KIND, kind as f64)).collect())
}

fn bench_cases(spec: &OpSpec) -> Vec<Case> {
    let mut cases = Vec::new();
    for dtype in [DType::BF16, DType::F32] {
        for kind in 0..KINDS.len() {
            cases.push(Case::new(spec, dtype).attr(KIND, kind as f64));
        }
        cases.push(Case::new(spec, dtype).sizes(&[128, 4096]));
    }
    cases
}
