//! The cases of `moe_ffn_backward`: what every kernel must pass, and what is timed.

use super::{
    ACT, B1, B2, Backward, DB1, DB2, DOUT, DROUTING, DSHARED_W1, DSHARED_W2, DW1, DW2, DX, GATE, IDS,
    ROUTING, SCALE, SHARED_W1, SHARED_W2, SPEC, W1, W2, X,
};
use crate::lab::{ArgPlan, Arrangement, Array, Case, Fill, Inputs, Provable, Real, Values};
use crate::op::Attrs;
use crate::ops::FLOATS;
use crate::ops::linear::{Activation, Gate};
use crate::ops::moe_ffn::{self, cases, reference};
use crate::tensor::DType;

/// The inputs and their gradients.
const GRADIENTS: [(usize, usize); 8] = [
    (X, DX),
    (W1, DW1),
    (W2, DW2),
    (ROUTING, DROUTING),
    (B1, DB1),
    (B2, DB2),
    (SHARED_W1, DSHARED_W1),
    (SHARED_W2, DSHARED_W2),
];

impl Provable for Backward {
    fn reference<R: Real>(inputs: &Inputs<'_, R>, attrs: &Attrs) -> Vec<Option<Array<R>>> {
        reference::backward(inputs, attrs)
    }

    fn plan(case: &Case) -> Vec<Option<ArgPlan>> {
        let mut of_forward = cases::plan(case, case.attrs.choice(GATE) != 0, |index| {
            let optional = [
                (moe_ffn::B1, B1),
                (moe_ffn::B2, B2),
                (moe_ffn::SHARED_W1, SHARED_W1),
                (moe_ffn::SHARED_W2, SHARED_W2),
            ];
            optional.iter().any(|&(of, here)| of == index && case.gives(here))
        });
        let mut plans = vec![None; SPEC.args.len()];
        for (from, to) in [
            (moe_ffn::X, X),
            (moe_ffn::W1, W1),
            (moe_ffn::W2, W2),
            (moe_ffn::IDS, IDS),
            (moe_ffn::ROUTING, ROUTING),
            (moe_ffn::OUT, DOUT),
            (moe_ffn::B1, B1),
            (moe_ffn::B2, B2),
            (moe_ffn::SHARED_W1, SHARED_W1),
            (moe_ffn::SHARED_W2, SHARED_W2),
        ] {
            plans[to] = of_forward[from].take();
        }
        // What is between the products, and its gradients, must stay in the range of the type.
        let narrow = case.dtype == DType::F16;
        for index in [W2, SHARED_W2, DOUT] {
            let fill = if narrow { Fill::Normal(0.125, 0.5) } else { Fill::AnyFactor };
            plans[index] = plans[index].take().map(|plan| ArgPlan { fill, ..plan });
        }
        for (of, gradient) in GRADIENTS {
            plans[gradient] = plans[of].clone().filter(|_| case.gives(gradient));
        }
        plans[IDS] = plans[IDS].take().map(|plan| ArgPlan { fill: Fill::Generated(draw_routing), ..plan });
        plans
    }

    fn constrain(case: &mut Case) {
        cases::constrain(case);
        for (of, gradient) in GRADIENTS {
            if SPEC.args[of].optional && !case.gives(of) {
                case.withhold(gradient);
            }
        }
        if GRADIENTS.iter().all(|&(_, gradient)| !case.gives(gradient)) {
            *case = case.clone().give(DX);
        }
    }

    // The output's gradient is weighted before it is multiplied.
    fn is_factor(index: usize) -> bool {
        ![DOUT, ROUTING].contains(&index)
    }

    fn cases() -> Vec<Case> {
        let mut cases = Vec::new();
        for dtype in FLOATS {
            let option = |case: Case, activation: Activation, gate: Gate| {
                case.attr(ACT, activation as u8 as f64).attr(GATE, gate as u8 as f64)
            };
            let none = Case::new(&SPEC, dtype);
            let plain = [DX, DW1, DW2, DROUTING].into_iter().fold(none.clone(), Case::give);
            let full = [B1, B2, SHARED_W1, SHARED_W2, DB1, DB2, DSHARED_W1, DSHARED_W2];
            let full = full.into_iter().fold(plain.clone(), Case::give).attr(SCALE, -0.5);
            // Tokens, experts, top-k, hidden, ffn, and ffn of the shared expert.
            for (at, sizes) in [
                [0, 4, 2, 8, 8, 8],
                [3, 0, 2, 8, 8, 8],
                [3, 4, 0, 8, 8, 8],
                [3, 4, 2, 0, 8, 8],
                [3, 4, 2, 8, 0, 8],
                [3, 4, 2, 8, 8, 0],
                [1, 1, 1, 1, 1, 1],
                [1, 8, 2, 33, 17, 5],
                [3, 40, 2, 16, 24, 9],
                [9, 4, 4, 40, 24, 16],
                [7, 3, 5, 24, 7, 3],
                [19, 5, 2, 65, 33, 31],
                [70, 2, 1, 31, 66, 40],
                [150, 4, 2, 24, 16, 8],
            ]
            .into_iter()
            .enumerate()
            {
                let gate = [Gate::Halves, Gate::None, Gate::Interleaved][at % 3];
                cases.push(option(plain.clone(), Activation::Silu, gate).sizes(&sizes));
                cases.push(option(full.clone(), Activation::Silu, gate).sizes(&sizes));
            }
            let sizes = [19, 5, 2, 40, 24, 17];
            for activation in Activation::ALL {
                for gate in [Gate::None, Gate::Interleaved] {
                    cases.push(option(full.clone(), *activation, gate).sizes(&[9, 4, 2, 33, 24, 8]));
                }
            }
            let gated = |case: Case| option(case, Activation::Silu, Gate::Halves).sizes(&sizes);
            for (of, gradient) in GRADIENTS {
                let case = gated(none.clone()).give(gradient);
                let is_shared = [SHARED_W1, SHARED_W2].contains(&of);
                let needs: &[usize] = if is_shared { &[SHARED_W1, SHARED_W2] } else { &[of] };
                let optional = needs.iter().filter(|&&index| SPEC.args[index].optional);
                cases.push(optional.fold(case, |case, &index| case.give(index)));
            }
            for arrangement in [Arrangement::PaddedRows, Arrangement::Transposed, Arrangement::Misaligned] {
                for gate in [Gate::None, Gate::Halves, Gate::Interleaved] {
                    let case = option(full.clone(), Activation::GeluTanh, gate);
                    cases.push(case.sizes(&[11, 3, 2, 67, 35, 9]).arranged(arrangement));
                }
            }
            if dtype != DType::F16 {
                cases.push(gated(full.clone()).values(Values::Large));
            }
            cases.push(gated(plain.clone()).values(Values::Special));
            cases.push(gated(full.clone()).values(Values::Special));
        }
        cases
    }

    fn bench_cases() -> Vec<Case> {
        let case = |dtype, sizes: [usize; 5]| {
            let case = [DX, DW1, DW2, DROUTING].into_iter().fold(Case::new(&SPEC, dtype), Case::give);
            let case = case.attr(ACT, Activation::Silu as u8 as f64).attr(GATE, Gate::Halves as u8 as f64);
            case.sizes(&[&sizes[..], &[1]].concat())
        };
        let mut cases: Vec<Case> =
            [DType::BF16, DType::F32].map(|dtype| case(dtype, [256, 64, 8, 512, 256])).to_vec();
        cases.push(case(DType::BF16, [4096, 128, 8, 2048, 768]).gpu_only());
        cases
    }
}

fn draw_routing(case: &Case, seed: u64) -> Vec<Vec<f64>> {
    let mut all = vec![Vec::new(); SPEC.args.len()];
    all[IDS] = cases::ids(case, seed);
    all
}
