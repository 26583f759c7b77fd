//! The cases of `gated_act` and its gradient: what every kernel must pass, and what is timed.

use super::{Backward, Forward, INTERLEAVED, KIND, KINDS, LAYOUT, reference};
use crate::lab::{ArgPlan, Array, Case, Inputs, Provable, Real};
use crate::op::{Attrs, Op, OpSpec};
use crate::ops::elementwise::cases::every_path;
use crate::tensor::DType;

impl Provable for Forward {
    fn reference<R: Real>(inputs: &Inputs<'_, R>, attrs: &Attrs) -> Vec<Option<Array<R>>> {
        reference::forward(inputs, attrs)
    }

    fn plan(case: &Case) -> Vec<Option<ArgPlan>> {
        plan(case, &[true, false])
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
        plan(case, &[true, false, true])
    }

    fn cases() -> Vec<Case> {
        cases(&Self::SPEC)
    }

    fn bench_cases() -> Vec<Case> {
        bench_cases(&Self::SPEC)
    }
}

fn plan(case: &Case, packed: &[bool]) -> Vec<Option<ArgPlan>> {
    let [rows, hidden] = case.sizes[..] else { unreachable!("the op has two sizes") };
    packed
        .iter()
        .map(|&p| ArgPlan::batched(&[rows, if p { 2 * hidden } else { hidden }], case.dtype))
        .collect()
}

/// Both layouts in every case, with alternating functions.
fn cases(spec: &OpSpec) -> Vec<Case> {
    every_path(spec, |case| {
        let all = (0..2 * KINDS.len()).map(|i| (i / 2, i % 2));
        all.map(|(kind, layout)| case.clone().attr(KIND, kind as f64).attr(LAYOUT, layout as f64)).collect()
    })
}

fn bench_cases(spec: &OpSpec) -> Vec<Case> {
    let mut cases = Vec::new();
    for dtype in [DType::BF16, DType::F32] {
        let case = Case::new(spec, dtype);
        cases.push(case.clone());
        cases.push(case.clone().attr(LAYOUT, INTERLEAVED as f64));
        cases.push(case.clone().attr(KIND, 1.0));
        cases.push(case.sizes(&[128, 14336]));
    }
    cases
}
