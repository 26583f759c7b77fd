//! The cases of `layer_norm` and its gradient: what every kernel must pass, and what is timed.

use super::{Backward, Forward, reference};
use crate::lab::{ArgPlan, Array, Case, Inputs, Provable, Real};
use crate::op::{Attrs, Op};
use crate::ops::norm::{BIAS, WEIGHT, backward as back, cases as norm};

impl Provable for Forward {
    fn reference<R: Real>(inputs: &Inputs<'_, R>, attrs: &Attrs) -> Vec<Option<Array<R>>> {
        reference::forward(inputs, attrs)
    }

    fn plan(case: &Case) -> Vec<Option<ArgPlan>> {
        norm::plan(&Self::SPEC, case)
    }

    fn cases() -> Vec<Case> {
        norm::cases(&Self::SPEC, &[WEIGHT, BIAS])
    }

    fn bench_cases() -> Vec<Case> {
        norm::bench_cases(&Self::SPEC, &[WEIGHT, BIAS])
    }
}

impl Provable for Backward {
    fn reference<R: Real>(inputs: &Inputs<'_, R>, attrs: &Attrs) -> Vec<Option<Array<R>>> {
        reference::backward(inputs, attrs)
    }

    fn plan(case: &Case) -> Vec<Option<ArgPlan>> {
        norm::backward_plan(&Self::SPEC, case)
    }

    fn cases() -> Vec<Case> {
        norm::backward_cases(&Self::SPEC, &[back::WEIGHT, back::DWEIGHT, back::DBIAS])
    }

    fn bench_cases() -> Vec<Case> {
        norm::backward_bench_cases(&Self::SPEC, &[back::WEIGHT, back::DWEIGHT, back::DBIAS])
    }
}
