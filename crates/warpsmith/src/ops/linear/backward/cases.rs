//! The cases of `linear_backward`: what every kernel must pass, and what is timed.

use super::{
    ACT, Activation, Backward, DBIAS, DOUT, DW, DX, PRECISION, Precision, SCALE, SPEC, TOLERANCE, Z,
};
use crate::lab::{ArgPlan, Arrangement, Array, Case, Inputs, Provable, Real, Values};
use crate::op::Attrs;
use crate::ops::FLOATS;
use crate::ops::linear::reference;
use crate::tensor::DType;

impl Provable for Backward {
    fn reference<R: Real>(inputs: &Inputs<'_, R>, attrs: &Attrs) -> Vec<Option<Array<R>>> {
        reference::backward(inputs, attrs)
    }

    fn plan(case: &Case) -> Vec<Option<ArgPlan>> {
        let [m, n, k] = case.sizes[..] else { unreachable!("three sizes") };
        let given = |index: usize, plan: Option<ArgPlan>| plan.filter(|_| case.gives(index));
        vec![
            ArgPlan::batched(&[m, k], case.dtype).map(ArgPlan::factors),
            ArgPlan::shared(&[n, k], case.dtype).map(ArgPlan::factors),
            ArgPlan::batched(&[m, n], case.dtype).map(ArgPlan::factors),
            given(Z, ArgPlan::batched(&[m, n], case.dtype)),
            given(DX, ArgPlan::batched(&[m, k], case.dtype)),
            given(DW, ArgPlan::shared(&[n, k], case.dtype)),
            given(DBIAS, ArgPlan::shared(&[n], case.dtype)),
        ]
    }

    fn constrain(case: &mut Case) {
        if case.attrs.choice(ACT) != 0 {
            *case = case.clone().give(Z);
        }
        if [DX, DW, DBIAS].iter().all(|&index| !case.gives(index)) {
            *case = case.clone().give(DX);
        }
        if case.dtype != DType::F32 && Precision::ALL[case.attrs.choice(PRECISION)] == Precision::Tf32 {
            case.set(PRECISION, 0.0);
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
            for sizes in
                [[0, 8, 16], [3, 5, 0], [1, 1, 1], [3, 5, 7], [65, 40, 24], [33, 70, 65], [300, 6, 9]]
            {
                cases.push(plain.clone().sizes(&sizes));
            }
            for activation in &Activation::ALL[1..] {
                cases.push(with(*activation).sizes(&[19, 40, 24]));
            }
            cases.push(with(Activation::Gelu).sizes(&[3, 5, 7]));
            cases.push(with(Activation::Gelu).sizes(&[40, 33, 17]).attr(SCALE, -0.5));
            cases.push(plain.clone().sizes(&[9, 24, 40]).attr(SCALE, 3.0));
            for gradient in [DX, DW, DBIAS] {
                let one =
                    Case::new(&SPEC, dtype).give(gradient).give(Z).attr(ACT, Activation::Silu as u8 as f64);
                cases.push(one.sizes(&[17, 24, 40]));
            }
            for arrangement in [Arrangement::PaddedRows, Arrangement::Transposed, Arrangement::Misaligned] {
                cases.push(plain.clone().sizes(&[24, 40, 16]).arranged(arrangement));
                cases.push(with(Activation::GeluTanh).sizes(&[19, 35, 24]).arranged(arrangement));
            }
            // Lines that start anywhere, longer than a copy's segment: of all operands, and of dz in scratch memory.
            for sizes in [[1, 33, 321], [33, 321, 70], [200, 70, 259]] {
                cases.push(plain.clone().sizes(&sizes));
                cases.push(with(Activation::Gelu).sizes(&sizes));
            }
            for arrangement in [Arrangement::PaddedRows, Arrangement::Misaligned] {
                cases.push(plain.clone().sizes(&[70, 264, 320]).arranged(arrangement));
                cases.push(with(Activation::Silu).sizes(&[67, 40, 136]).arranged(arrangement));
            }
            cases.push(with(Activation::Silu).sizes(&[9, 24, 40]).values(Values::Large));
            cases.push(with(Activation::Relu).sizes(&[9, 24, 40]).values(Values::Special));
        }
        // The gradient of w has as many elements as GPUs compute in their largest tiles.
        cases.push(Case::new(&SPEC, DType::F32).give(DX).give(DW).sizes(&[36, 1400, 1500]));
        let tf32 =
            Case::new(&SPEC, DType::F32).give(DX).give(DW).attr(PRECISION, Precision::Tf32 as u8 as f64);
        cases.push(tf32.clone().sizes(&[33, 40, 24]));
        cases.push(tf32.sizes(&[33, 4128, 24]));
        cases.extend([0.001, 0.01].map(|error| {
            Case::new(&SPEC, DType::F32).give(DX).give(DW).attr(TOLERANCE, error).sizes(&[33, 40, 24])
        }));
        for dtype in FLOATS {
            let plain = Case::new(&SPEC, dtype).give(DX).give(DW).give(DBIAS);
            let with = |activation: Activation| plain.clone().give(Z).attr(ACT, activation as u8 as f64);
            // Sums over n, and over rows, that GPUs compute in parts: equal ones, and with a rest.
            for sizes in [[9, 6192, 72], [3, 4099, 40], [4128, 24, 17], [4100, 40, 16]] {
                cases.push(plain.clone().sizes(&sizes));
            }
            cases.push(with(Activation::Gelu).sizes(&[70, 4128, 17]));
            for arrangement in [Arrangement::PaddedRows, Arrangement::Transposed, Arrangement::Misaligned] {
                cases.push(plain.clone().sizes(&[6, 4104, 24]).arranged(arrangement));
            }
            // So few rows that the gradient of w is written without a product, in several blocks each way.
            for sizes in [[2, 300, 40], [8, 70, 1100], [13, 70, 600]] {
                cases.push(plain.clone().sizes(&sizes));
            }
            cases.push(with(Activation::Relu).sizes(&[5, 70, 1030]));
            cases.push(plain.clone().sizes(&[3, 24, 40]).values(Values::Special));
        }
        cases
    }

    fn bench_cases() -> Vec<Case> {
        let case = |dtype| Case::new(&SPEC, dtype).give(DX).give(DW).give(DBIAS);
        vec![
            case(DType::BF16),
            case(DType::BF16).give(Z).attr(ACT, Activation::Gelu as u8 as f64).sizes(&[4096, 4096, 1024]),
            case(DType::F32).sizes(&[1024, 1024, 1024]),
            case(DType::F32).sizes(&[1024, 1024, 1024]).attr(PRECISION, Precision::Tf32 as u8 as f64),
        ]
    }
}
