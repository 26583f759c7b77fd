//! The cases of `softmax` and its gradient: what every kernel must pass, and what is timed.

use super::{Backward, Forward, SCALE, reference};
use crate::lab::{
    ArgPlan, Arrangement, Array, Case, Inputs, MANY_ROWS, ODD_ROWS, Provable, ROW_SIZES, Real, Values,
};
use crate::op::{Attrs, Op, OpSpec};
use crate::ops::FLOATS;
use crate::tensor::DType;

impl Provable for Forward {
    fn reference<R: Real>(inputs: &Inputs<'_, R>, attrs: &Attrs) -> Vec<Option<Array<R>>> {
        reference::forward(inputs, attrs)
    }

    fn plan(case: &Case) -> Vec<Option<ArgPlan>> {
        plan(&Self::SPEC, case)
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
        plan(&Self::SPEC, case)
    }

    fn cases() -> Vec<Case> {
        cases(&Self::SPEC)
    }

    fn bench_cases() -> Vec<Case> {
        bench_cases(&Self::SPEC)
    }
}

fn plan(spec: &OpSpec, case: &Case) -> Vec<Option<ArgPlan>> {
    spec.args.iter().map(|_| ArgPlan::batched(&case.sizes, case.dtype)).collect()
}

fn cases(spec: &OpSpec) -> Vec<Case> {
    let mut cases = Vec::new();
    for dtype in FLOATS {
        let plain = Case::new(spec, dtype);
        cases.extend(ROW_SIZES.iter().map(|sizes| plain.clone().sizes(sizes)));
        cases.extend(ODD_ROWS.iter().map(|sizes| plain.clone().sizes(sizes)));
        let odd = plain.clone().sizes(&[5, 1025]);
        cases.extend(SHIFTED.map(|arrangement| odd.clone().arranged(arrangement)));
        cases.push(odd.in_place());
        // Rows of a vocabulary, and one too long for any CPU's cache.
        cases.push(plain.clone().sizes(&[2, 40_000]));
        cases.push(plain.clone().sizes(&[1, 600_001]));
        // Rows that the blocks of a cluster share, whole and odd, few and many.
        for sizes in [
            &[6, 10_442],
            &[40, 10_624],
            &[3, 20_001],
            &[2, 64_723],
            &[20, 65_536],
            &[2, 131_072],
            &[2, 200_003],
        ] {
            cases.push(plain.clone().sizes(sizes));
        }
        let long = plain.clone().sizes(&[3, 16_385]);
        cases.extend(SHIFTED.map(|arrangement| long.clone().arranged(arrangement)));
        cases.push(long.clone().arranged(Arrangement::Transposed));
        cases.push(long.in_place());
        for scale in [0.125, 3.7, -1.5, 0.0] {
            cases.push(plain.clone().sizes(&[5, 1000]).attr(SCALE, scale));
        }
        let case = plain.sizes(&[33, 264]);
        for arrangement in [Arrangement::PaddedRows, Arrangement::Transposed, Arrangement::Misaligned] {
            cases.push(case.clone().arranged(arrangement));
        }
        cases.push(case.clone().values(Values::Large));
        cases.push(case.clone().values(Values::Special));
        cases.push(case.clone().values(Values::Special).attr(SCALE, -0.7));
        cases.push(case.in_place());
    }
    let many = Case::new(spec, DType::BF16);
    cases.extend(MANY_ROWS.iter().map(|sizes| many.clone().sizes(sizes)));
    cases.push(many.sizes(MANY_ROWS[0]).in_place());
    cases
}

/// Dense rows at any alignment.
const SHIFTED: [Arrangement; 2] = [Arrangement::PaddedRows, Arrangement::Misaligned];

fn bench_cases(spec: &OpSpec) -> Vec<Case> {
    let mut cases = Vec::new();
    for dtype in [DType::BF16, DType::F32] {
        for sizes in [[128, 4096], [8192, 4096], [32768, 8192], [256, 128_256]] {
            cases.push(Case::new(spec, dtype).sizes(&sizes));
        }
    }
    cases
}
