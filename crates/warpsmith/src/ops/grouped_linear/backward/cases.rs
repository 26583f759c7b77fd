//! The cases of `grouped_linear_backward`: what every kernel must pass, and what is timed.

use super::{ACT, Activation, Backward, COUNTS, DBIAS, DOUT, DW, DX, SCALE, SPEC, Z};
use crate::lab::{ArgPlan, Arrangement, Array, Case, Fill, Inputs, Provable, Real, Values};
use crate::op::Attrs;
use crate::ops::FLOATS;
use crate::ops::grouped_linear::{cases::counts_of, reference};
use crate::tensor::DType;

impl Provable for Backward {
    fn reference<R: Real>(inputs: &Inputs<'_, R>, attrs: &Attrs) -> Vec<Option<Array<R>>> {
        reference::backward(inputs, attrs)
    }

    fn plan(case: &Case) -> Vec<Option<ArgPlan>> {
        let [rows, groups, n, k] = case.sizes[..] else { unreachable!("four sizes") };
        let given = |index: usize, plan: Option<ArgPlan>| plan.filter(|_| case.gives(index));
        let factors = |shape: &[usize]| ArgPlan::shared(shape, case.dtype).map(ArgPlan::factors);
        let of_counts = ArgPlan {
            shape: vec![groups],
            dtype: DType::I32,
            fill: Fill::Generated(draw_counts),
            batch_dim: None,
        };
        vec![
            factors(&[rows, k]),
            factors(&[groups, n, k]),
            Some(of_counts),
            factors(&[rows, n]),
            given(Z, ArgPlan::shared(&[rows, n], case.dtype)),
            given(DX, ArgPlan::shared(&[rows, k], case.dtype)),
            given(DW, ArgPlan::shared(&[groups, n, k], case.dtype)),
            given(DBIAS, ArgPlan::shared(&[groups, n], case.dtype)),
        ]
    }

    fn constrain(case: &mut Case) {
        if case.attrs.choice(ACT) != 0 {
            *case = case.clone().give(Z);
        }
        if [DX, DW, DBIAS].iter().all(|&index| !case.gives(index)) {
            *case = case.clone().give(DX);
        }
    }

    // The output's gradient is scaled before it is multiplied.
    fn is_factor(index: usize) -> bool {
        ![DOUT, Z].contains(&index)
    }

    fn cases() -> Vec<Case> {
        let mut cases = Vec::new();
        for dtype in FLOATS {
            let plain = Case::new(&SPEC, dtype).give(DX).give(DW).give(DBIAS);
            let with = |activation: Activation| plain.clone().give(Z).attr(ACT, activation as u8 as f64);
            for (at, sizes) in [
                [0, 4, 8, 8],
                [3, 0, 8, 8],
                [3, 4, 0, 8],
                [3, 4, 8, 0],
                [1, 1, 1, 1],
                [3, 40, 5, 7],
                [65, 3, 40, 24],
                [33, 5, 70, 65],
                [300, 2, 6, 9],
                [70, 4, 33, 130],
                [600, 2, 17, 33],
            ]
            .into_iter()
            .enumerate()
            {
                cases.push(plain.clone().sizes(&sizes));
                let activation = Activation::ALL[at % Activation::ALL.len()];
                cases.push(with(activation).attr(SCALE, -0.5).sizes(&sizes));
            }
            let sizes = [19, 4, 40, 24];
            cases.extend(Activation::ALL[1..].iter().map(|activation| with(*activation).sizes(&sizes)));
            cases.push(plain.clone().sizes(&sizes).attr(SCALE, 3.0));
            for gradient in [DX, DW, DBIAS] {
                let one = Case::new(&SPEC, dtype).give(gradient).sizes(&sizes);
                cases.push(one.clone());
                cases.push(one.give(Z).attr(ACT, Activation::Silu as u8 as f64));
            }
            for arrangement in [Arrangement::PaddedRows, Arrangement::Transposed, Arrangement::Misaligned] {
                cases.push(plain.clone().sizes(&[24, 3, 40, 16]).arranged(arrangement));
                cases.push(with(Activation::GeluTanh).sizes(&[35, 3, 33, 72]).arranged(arrangement));
            }
            cases.push(with(Activation::Silu).sizes(&[9, 2, 24, 40]).values(Values::Large));
            cases.push(with(Activation::Relu).sizes(&[19, 3, 24, 40]).values(Values::Special));
        }
        cases
    }

    fn bench_cases() -> Vec<Case> {
        let case = |dtype| Case::new(&SPEC, dtype).give(DX).give(DW);
        let large = case(DType::BF16).sizes(&[32_768, 128, 1536, 2048]).gpu_only();
        vec![case(DType::BF16), case(DType::F32), large]
    }
}

fn draw_counts(case: &Case, seed: u64) -> Vec<Vec<f64>> {
    let mut all = vec![Vec::new(); SPEC.args.len()];
    all[COUNTS] = counts_of(case, seed);
    all
}
