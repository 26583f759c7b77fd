//! The cases of `new_op`: what every kernel must pass, and what is timed.

use super::{Forward, reference};
use crate::lab::{ArgPlan, Arrangement, Array, Case, Inputs, Provable, ROW_SIZES, Real, Values};
use crate::op::{Attrs, Op};
use crate::ops::FLOATS;
use crate::tensor::DType;

impl Provable for Forward {
    fn reference<R: Real>(inputs: &Inputs<'_, R>, _: &Attrs) -> Vec<Option<Array<R>>> {
        reference::forward(inputs)
    }

    fn plan(case: &Case) -> Vec<Option<ArgPlan>> {
        vec![ArgPlan::batched(&case.sizes, case.dtype); Self::SPEC.args.len()]
    }

    fn cases() -> Vec<Case> {
        let mut cases = Vec::new();
        for dtype in FLOATS {
            let plain = Case::new(&Self::SPEC, dtype);
            cases.extend(ROW_SIZES.iter().map(|sizes| plain.clone().sizes(sizes)));
            let case = plain.sizes(&[33, 264]);
            for arrangement in [Arrangement::PaddedRows, Arrangement::Transposed, Arrangement::Misaligned] {
                cases.push(case.clone().arranged(arrangement));
            }
            cases.push(case.clone().values(Values::Large));
            cases.push(case.clone().values(Values::Special));
            cases.push(case.in_place());
        }
        cases
    }

    fn bench_cases() -> Vec<Case> {
        let sizes = [[128, 4096], [8192, 4096], [32768, 8192]];
        let of = |dtype| sizes.iter().map(move |sizes| Case::new(&Self::SPEC, dtype).sizes(sizes));
        [DType::BF16, DType::F32].into_iter().flat_map(of).collect()
    }
}
