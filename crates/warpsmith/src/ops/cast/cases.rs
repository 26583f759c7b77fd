//! The cases of `cast`: what every kernel must pass, and what is timed.

use super::{Forward, INVERSE, SCALE, TO, TYPES, reference};
use crate::lab::{ArgPlan, Arrangement, Array, Case, Fill, Inputs, Provable, Real, Values};
use crate::op::{Attrs, Op};
use crate::tensor::DType;

impl Provable for Forward {
    fn reference<R: Real>(inputs: &Inputs<'_, R>, attrs: &Attrs) -> Vec<Option<Array<R>>> {
        reference::cast(inputs, attrs)
    }

    fn plan(case: &Case) -> Vec<Option<ArgPlan>> {
        let [rows, hidden, num_scales] = case.sizes[..] else { unreachable!("three sizes") };
        let scale = ArgPlan {
            shape: vec![num_scales],
            dtype: DType::F32,
            fill: Fill::Normal(2.0, 0.25),
            batch_dim: (num_scales > 1).then_some(0),
        };
        let to = TYPES[case.attrs.choice(TO)];
        vec![
            ArgPlan::batched(&[rows, hidden], case.dtype),
            case.gives(SCALE).then_some(scale),
            ArgPlan::batched(&[rows, hidden], to),
        ]
    }

    fn constrain(case: &mut Case) {
        if case.sizes[2] != 1 {
            case.sizes[2] = case.sizes[0];
        }
        if !case.gives(SCALE) {
            case.set(INVERSE, 0.0);
        }
        case.in_place &= TYPES[case.attrs.choice(TO)] == case.dtype;
    }

    fn cases() -> Vec<Case> {
        let mut cases = Vec::new();
        for from in TYPES {
            for (index, to) in TYPES.into_iter().enumerate() {
                let case = Case::new(&Self::SPEC, from).attr(TO, index as f64);
                let scaled = case.clone().give(SCALE);
                cases.push(case.clone().sizes(&[7, 129, 1]).values(Values::Special));
                cases.push(case.clone().sizes(&[3, 64, 1]).values(Values::Large));
                cases.push(scaled.clone().sizes(&[5, 80, 5]).values(Values::Special));
                cases.push(scaled.clone().sizes(&[4, 33, 1]).attr(INVERSE, 1.0));
                if from == to {
                    cases.push(scaled.clone().sizes(&[6, 48, 6]).in_place());
                }
                for arrangement in [Arrangement::PaddedRows, Arrangement::Transposed, Arrangement::Misaligned]
                {
                    cases.push(scaled.clone().sizes(&[9, 40, 9]).arranged(arrangement));
                    cases.push(case.clone().sizes(&[9, 40, 1]).arranged(arrangement));
                }
            }
            let case = Case::new(&Self::SPEC, from).attr(TO, 2.0);
            for sizes in [[0, 64, 1], [1, 1, 1], [2, 8, 1], [1, 70_001, 1]] {
                cases.push(case.clone().sizes(&sizes));
            }
            cases.push(case.clone().give(SCALE).sizes(&[300, 7, 300]));
            cases.push(case.give(SCALE).sizes(&[2, 9001, 2]).attr(INVERSE, 1.0));
        }
        cases
    }

    fn bench_cases() -> Vec<Case> {
        let case = |from, to: f64| Case::new(&Self::SPEC, from).attr(TO, to);
        let kinds = [
            case(DType::BF16, 3.0).give(SCALE),
            case(DType::F32, 2.0),
            case(DType::BF16, 0.0),
            case(DType::F8E4M3, 2.0),
        ];
        let sizes = [[128, 4096, 1], [8192, 4096, 1]];
        let mut cases: Vec<Case> =
            kinds.iter().flat_map(|kind| sizes.map(|sizes| kind.clone().sizes(&sizes))).collect();
        cases.push(kinds[0].clone().sizes(&[8192, 4096, 8192]));
        cases
    }
}
