//! What proves `relu_squared`: its definition, and the cases that every kernel must pass.

use super::relu_squared::{ReluSquared, X};
use warpsmith::DType;
use warpsmith::lab::{ArgPlan, Arrangement, Array, Case, Inputs, Provable, ROW_SIZES, Real, Values};
use warpsmith::op::{Attrs, Op};

impl Provable for ReluSquared {
    /// out = max(x, 0)²
    fn reference<R: Real>(inputs: &Inputs<'_, R>, _: &Attrs) -> Vec<Option<Array<R>>> {
        let mut out = inputs[X].clone();
        for value in &mut out.data {
            let positive = if value.f64() < 0.0 { R::zero() } else { *value };
            *value = positive * positive;
        }
        vec![None, Some(out)]
    }

    fn plan(case: &Case) -> Vec<Option<ArgPlan>> {
        vec![ArgPlan::batched(&case.sizes, case.dtype); Self::SPEC.args.len()]
    }

    fn cases() -> Vec<Case> {
        let plain = Case::new(&Self::SPEC, DType::F32);
        let mut cases: Vec<Case> = ROW_SIZES.iter().map(|sizes| plain.clone().sizes(sizes)).collect();
        let case = plain.sizes(&[33, 264]);
        cases.push(case.clone().arranged(Arrangement::Misaligned));
        cases.push(case.clone().values(Values::Large));
        cases.push(case.clone().values(Values::Special));
        cases.push(case.in_place());
        cases
    }

    fn bench_cases() -> Vec<Case> {
        [[128, 4096], [8192, 4096]].map(|sizes| Case::new(&Self::SPEC, DType::F32).sizes(&sizes)).into()
    }
}
