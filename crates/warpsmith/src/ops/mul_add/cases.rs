//! The cases of `mul_add` and its gradient: what every kernel must pass, and what is timed.

use super::{Backward, DA, DB, Forward, reference};
use crate::lab::{ArgPlan, Array, Case, Inputs, Provable, Real};
use crate::op::{Attrs, Op};
use crate::ops::elementwise::cases::every_path;
use crate::tensor::DType;

impl Provable for Forward {
    fn reference<R: Real>(inputs: &Inputs<'_, R>, _: &Attrs) -> Vec<Option<Array<R>>> {
        reference::forward(inputs)
    }

    fn plan(case: &Case) -> Vec<Option<ArgPlan>> {
        vec![ArgPlan::batched(&case.sizes, case.dtype); 4]
    }

    fn cases() -> Vec<Case> {
        every_path(&Self::SPEC, |case| vec![case])
    }

    fn bench_cases() -> Vec<Case> {
        bench_cases(|dtype| Case::new(&Self::SPEC, dtype))
    }
}

impl Provable for Backward {
    fn reference<R: Real>(inputs: &Inputs<'_, R>, _: &Attrs) -> Vec<Option<Array<R>>> {
        reference::backward(inputs)
    }

    fn plan(case: &Case) -> Vec<Option<ArgPlan>> {
        let plan =
            |index| (index < DA || case.gives(index)).then(|| ArgPlan::batched(&case.sizes, case.dtype));
        (0..Self::SPEC.args.len()).map(|index| plan(index).flatten()).collect()
    }

    fn cases() -> Vec<Case> {
        every_path(&Self::SPEC, |case| {
            vec![case.clone().give(DA).give(DB), case.clone().give(DA), case.give(DB)]
        })
    }

    fn bench_cases() -> Vec<Case> {
        bench_cases(|dtype| Case::new(&Self::SPEC, dtype).give(DA).give(DB))
    }
}

fn bench_cases(case: impl Fn(DType) -> Case) -> Vec<Case> {
    let types = [DType::BF16, DType::F32];
    types.into_iter().flat_map(|dtype| [case(dtype), case(dtype).sizes(&[128, 4096])]).collect()
}
