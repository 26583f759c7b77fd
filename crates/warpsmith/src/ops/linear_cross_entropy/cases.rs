//! The cases of `linear_cross_entropy` and its gradient: what every kernel must pass, and what is timed.

use super::{Backward, COUNT, DW, DX, Forward, LOSS, TARGETS, backward as back, reference};
use crate::lab::{ArgPlan, Arrangement, Array, Case, Fill, Inputs, Provable, Real, Values};
use crate::op::{Attrs, Op};
use crate::ops::FLOATS;
use crate::ops::cross_entropy::cases::{constrain, draw_targets, targets};
use crate::ops::cross_entropy::options::{IGNORE_INDEX, LABEL_SMOOTHING, REDUCTION, SOFTCAP, Z_LOSS};
use crate::tensor::DType;

impl Provable for Forward {
    fn reference<R: Real>(inputs: &Inputs<'_, R>, attrs: &Attrs) -> Vec<Option<Array<R>>> {
        reference::forward(inputs, attrs)
    }

    fn plan(case: &Case) -> Vec<Option<ArgPlan>> {
        let [m, v, k] = case.sizes[..] else { unreachable!("three sizes") };
        let given = |index: usize, plan: Option<ArgPlan>| plan.filter(|_| case.gives(index));
        // Products of these are exponents.
        let exponents =
            |plan: Option<ArgPlan>| plan.map(|p| ArgPlan { fill: Fill::Exponent(case.dtype), ..p });
        let mut plans = vec![None; DW + 1];
        plans[super::X] = exponents(ArgPlan::batched(&[m, k], case.dtype));
        plans[super::W] = exponents(ArgPlan::shared(&[v, k], case.dtype));
        plans[TARGETS] = targets(case, m, generate_targets);
        plans[LOSS] = ArgPlan::shared(&[], DType::F32);
        plans[COUNT] = given(COUNT, ArgPlan::shared(&[], DType::F32));
        plans[DX] = given(DX, ArgPlan::batched(&[m, k], case.dtype));
        plans[DW] = given(DW, ArgPlan::shared(&[v, k], case.dtype));
        plans
    }

    fn constrain(case: &mut Case) {
        constrain(case);
    }

    fn cases() -> Vec<Case> {
        let mut cases = Vec::new();
        for dtype in FLOATS {
            let loss = Case::new(&Self::SPEC, dtype);
            let all = loss.clone().give(COUNT).give(DX).give(DW);
            // Empty, one element, one less and one more than vectors and tiles.
            for (at, sizes) in [
                [0, 5, 8],
                [3, 5, 0],
                [1, 1, 1],
                [3, 5, 7],
                [17, 33, 16],
                [33, 127, 65],
                [65, 300, 40],
                [5, 1025, 33],
                [130, 70, 129],
            ]
            .into_iter()
            .enumerate()
            {
                cases.push(all.clone().sizes(&sizes).attr(REDUCTION, (at % 2) as f64));
                cases.push(loss.clone().sizes(&sizes).attr(REDUCTION, (at % 2) as f64));
            }
            cases.push(loss.clone().give(DX).sizes(&[20, 65, 24]));
            cases.push(loss.clone().give(DW).sizes(&[20, 65, 24]));
            // Two and three parts, whole and not.
            cases.push(all.clone().sizes(&[1025, 19, 9]));
            cases.push(all.clone().sizes(&[2048, 10, 16]).attr(REDUCTION, 1.0));
            cases.push(all.clone().sizes(&[2100, 17, 8]));
            let case = all.clone().sizes(&[19, 70, 32]);
            let options = [(IGNORE_INDEX, 7.0), (SOFTCAP, 3.0), (LABEL_SMOOTHING, 0.25), (Z_LOSS, 0.01)];
            for (at, (index, value)) in options.into_iter().enumerate() {
                let one = case.clone().attr(index, value);
                cases.push(one.clone());
                for (other, value) in options.into_iter().skip(at + 1) {
                    cases.push(one.clone().attr(other, value).attr(REDUCTION, ((at + other) % 2) as f64));
                }
            }
            for arrangement in [Arrangement::PaddedRows, Arrangement::Transposed, Arrangement::Misaligned] {
                cases.push(all.clone().sizes(&[24, 40, 16]).arranged(arrangement));
                cases.push(all.clone().sizes(&[19, 131, 67]).arranged(arrangement));
                cases.push(all.clone().sizes(&[1030, 9, 24]).arranged(arrangement));
            }
            cases.push(case.clone().values(Values::Large));
            cases.push(case.clone().attr(SOFTCAP, 30.0).values(Values::Large));
            cases.push(case.values(Values::Special));
            cases.push(loss.sizes(&[19, 70, 32]).values(Values::Special));
        }
        cases
    }

    fn bench_cases() -> Vec<Case> {
        let case = |dtype, sizes: [usize; 3]| {
            Case::new(&Self::SPEC, dtype).sizes(&sizes).give(COUNT).give(DX).give(DW)
        };
        let mut cases = Vec::new();
        for sizes in [[8192, 128_256, 4096], [8192, 151_936, 1024], [4096, 50_257, 2048]] {
            cases.push(case(DType::BF16, sizes).gpu_only());
        }
        for dtype in [DType::BF16, DType::F32] {
            for sizes in [[512, 50_257, 768], [2048, 32_000, 512], [256, 8_192, 256]] {
                cases.push(case(dtype, sizes));
            }
        }
        cases
    }
}

fn generate_targets(case: &Case, seed: u64) -> Vec<Vec<f64>> {
    let mut all = vec![Vec::new(); Forward::SPEC.args.len()];
    all[TARGETS] = draw_targets(case, case.sizes[0], case.sizes[1], seed);
    all
}

impl Provable for Backward {
    fn reference<R: Real>(inputs: &Inputs<'_, R>, attrs: &Attrs) -> Vec<Option<Array<R>>> {
        reference::backward(inputs, attrs)
    }

    fn plan(case: &Case) -> Vec<Option<ArgPlan>> {
        let [m, v, k] = case.sizes[..] else { unreachable!("three sizes") };
        let dw = || ArgPlan::shared(&[v, k], case.dtype).filter(|_| case.gives(back::DW_SUM));
        // Some cases have no row that counts.
        let count = if m % 5 == 4 { 0.0 } else { m as f64 };
        let number = |fill| Some(ArgPlan { shape: vec![], dtype: DType::F32, fill, batch_dim: None });
        let mut plans = vec![None; back::DW + 1];
        plans[back::DX_SUM] = ArgPlan::batched(&[m, k], case.dtype);
        plans[back::COUNT] = number(Fill::Constant(count));
        plans[back::DLOSS] = number(Fill::Normal(0.0, 1.0));
        plans[back::DW_SUM] = dw();
        plans[back::DX] = ArgPlan::batched(&[m, k], case.dtype);
        plans[back::DW] = dw();
        plans
    }

    fn cases() -> Vec<Case> {
        let mut cases = Vec::new();
        for dtype in FLOATS {
            let both = Case::new(&Self::SPEC, dtype).give(back::DW_SUM).give(back::DW);
            for (at, sizes) in
                [[0, 5, 8], [3, 5, 0], [1, 1, 1], [4, 7, 33], [3, 0, 5], [33, 70, 129], [70, 33, 1025]]
                    .into_iter()
                    .enumerate()
            {
                cases.push(both.clone().sizes(&sizes).attr(back::REDUCTION, (at % 2) as f64));
                cases.push(Case::new(&Self::SPEC, dtype).sizes(&sizes));
            }
            let case = both.sizes(&[35, 40, 264]);
            for arrangement in [Arrangement::PaddedRows, Arrangement::Transposed, Arrangement::Misaligned] {
                cases.push(case.clone().arranged(arrangement));
                cases.push(case.clone().arranged(arrangement).in_place());
            }
            cases.push(case.clone().in_place());
            cases.push(case.clone().values(Values::Large));
            cases.push(case.values(Values::Special));
        }
        cases
    }

    fn bench_cases() -> Vec<Case> {
        let case = |dtype| Case::new(&Self::SPEC, dtype).give(back::DW_SUM).give(back::DW);
        [DType::BF16, DType::F32].map(case).to_vec()
    }
}
