//! The cases of `moe_ffn`: what every kernel must pass, and what is timed.

use super::{ACT, B1, B2, Forward, GATE, OUT, RESIDUAL, SCALE, SHARED_W1, SHARED_W2, SPEC, reference};
use super::{IDS, ROUTING, W1, W2, X};
use crate::lab::{ArgPlan, Arrangement, Array, Case, Fill, Inputs, Provable, Real, Values};
use crate::op::Attrs;
use crate::ops::FLOATS;
use crate::ops::grouped::skew::Zipf;
use crate::ops::linear::{Activation, Gate};
use crate::tensor::{DType, Random};

impl Provable for Forward {
    fn reference<R: Real>(inputs: &Inputs<'_, R>, attrs: &Attrs) -> Vec<Option<Array<R>>> {
        reference::forward(inputs, attrs)
    }

    fn plan(case: &Case) -> Vec<Option<ArgPlan>> {
        plan(case, case.attrs.choice(GATE) != 0, |index| case.gives(index))
    }

    fn constrain(case: &mut Case) {
        constrain(case);
    }

    fn cases() -> Vec<Case> {
        let mut cases = Vec::new();
        let option = |case: &Case, activation: Activation, gate: Gate| {
            case.clone().attr(ACT, activation as u8 as f64).attr(GATE, gate as u8 as f64)
        };
        for dtype in FLOATS {
            let plain = Case::new(&SPEC, dtype);
            let gated = |gate: Gate| option(&plain, Activation::Silu, gate);
            let full = |case: Case| {
                [B1, B2, SHARED_W1, SHARED_W2, RESIDUAL].into_iter().fold(case, Case::give).attr(SCALE, -0.5)
            };
            // Tokens, experts, top-k, hidden, ffn, and ffn of the shared expert.
            for (at, sizes) in [
                // Empty in each way; without experts all slots are dropped.
                [0, 4, 2, 8, 8, 8],
                [3, 0, 2, 8, 8, 8],
                [3, 4, 0, 8, 8, 8],
                [3, 4, 2, 0, 8, 8],
                [3, 4, 2, 8, 0, 8],
                [3, 4, 2, 8, 8, 0],
                // One of each; one token; more experts than tokens; as many slots as experts, and more.
                [1, 1, 1, 1, 1, 1],
                [1, 8, 2, 33, 17, 5],
                [3, 40, 2, 16, 24, 9],
                [9, 4, 4, 40, 24, 16],
                [7, 3, 5, 24, 7, 3],
                // One less and one more than vectors and tiles, and many tokens.
                [19, 5, 2, 65, 33, 31],
                [70, 2, 1, 31, 130, 64],
                [300, 4, 2, 24, 16, 8],
                [150, 7, 3, 40, 72, 33],
                [5, 4, 2, 520, 24, 8],
            ]
            .into_iter()
            .enumerate()
            {
                let gate = [Gate::Halves, Gate::None, Gate::Interleaved][at % 3];
                cases.push(gated(gate).sizes(&sizes));
                cases.push(full(gated(gate)).sizes(&sizes));
            }
            for (activation, gate) in
                Activation::ALL.iter().zip([Gate::None, Gate::Halves].into_iter().cycle())
            {
                cases.push(option(&plain, *activation, gate).sizes(&[9, 4, 2, 33, 24, 8]));
            }
            let case = gated(Gate::Halves).sizes(&[19, 5, 2, 40, 24, 17]);
            for given in [B1, B2, RESIDUAL] {
                cases.push(case.clone().give(given));
                cases.push(case.clone().attr(GATE, Gate::None as u8 as f64).give(given));
            }
            cases.push(case.clone().give(SHARED_W1).give(SHARED_W2));
            cases.push(case.clone().attr(SCALE, 3.0));
            for arrangement in [Arrangement::PaddedRows, Arrangement::Transposed, Arrangement::Misaligned] {
                for gate in [Gate::None, Gate::Halves, Gate::Interleaved] {
                    let case = full(gated(gate));
                    cases.push(case.clone().sizes(&[24, 4, 2, 40, 24, 16]).arranged(arrangement));
                    cases.push(case.sizes(&[11, 3, 2, 67, 35, 9]).arranged(arrangement));
                }
            }
            cases.push(full(case.clone()).in_place());
            if dtype != DType::F16 {
                cases.push(full(case.clone()).values(Values::Large));
            }
            cases.push(case.clone().values(Values::Special));
            cases.push(full(case).values(Values::Special));
        }
        cases
    }

    fn bench_cases() -> Vec<Case> {
        let mut cases = Vec::new();
        for dtype in [DType::BF16, DType::F32] {
            let gated = Case::new(&SPEC, dtype)
                .attr(ACT, Activation::Silu as u8 as f64)
                .attr(GATE, Gate::Halves as u8 as f64);
            let case = |sizes: [usize; 5]| gated.clone().sizes(&[&sizes[..], &[1]].concat());
            for tokens in [1, 16, 256] {
                cases.push(case([tokens, 64, 8, 512, 256]));
                cases.push(case([tokens, 8, 2, 1024, 2816]));
            }
            for sizes in [[64, 128, 8, 2048, 768], [4096, 128, 8, 2048, 768], [16_384, 8, 2, 4096, 14_336]] {
                cases.push(case(sizes).gpu_only());
                if dtype == DType::BF16 {
                    let skews = [Values::Zipf, Values::AllToOne];
                    cases.extend(skews.map(|values| case(sizes).gpu_only().values(values)));
                }
            }
        }
        cases
    }
}

/// The tensors of a case, in the order of the arguments of `moe_ffn`, of which `gives` says which are given.
pub(super) fn plan(case: &Case, gated: bool, gives: impl Fn(usize) -> bool) -> Vec<Option<ArgPlan>> {
    let [tokens, experts, top_k, hidden, ffn, shared] = case.sizes[..] else { unreachable!("six sizes") };
    let given = |index: usize, plan: Option<ArgPlan>| plan.filter(|_| gives(index));
    let filled = |plan: Option<ArgPlan>, fill: Fill| plan.map(|plan| ArgPlan { fill, ..plan });
    let rows = |ffn: usize| if gated { 2 * ffn } else { ffn };
    let shared_of = |shape: [usize; 2], fill: Fill| filled(ArgPlan::shared(&shape, case.dtype), fill);
    let stacked = |shape: &[usize], fill: Fill| filled(ArgPlan::shared(shape, case.dtype), fill);
    // What is between the products must stay in the range of the type.
    let (inner, between) = (Fill::Exponent(case.dtype), Fill::AnyFactor);
    // One of the types has the wide ids and one the narrow weights, so that cases reach both kinds.
    let id_dtype = if case.dtype == DType::F16 { DType::I64 } else { DType::I32 };
    let weight_dtype = if case.dtype == DType::BF16 { DType::BF16 } else { DType::F32 };
    let token =
        |columns: usize, dtype: DType, fill: Fill| filled(ArgPlan::batched(&[tokens, columns], dtype), fill);
    let normal = Fill::Normal(0.0, 1.0);
    let mut plans = vec![None; OUT + 1];
    plans[X] = token(hidden, case.dtype, inner);
    plans[W1] = stacked(&[experts, rows(ffn), hidden], inner);
    plans[W2] = stacked(&[experts, hidden, ffn], between);
    plans[IDS] = token(top_k, id_dtype, Fill::Generated(draw_routing));
    plans[ROUTING] = token(top_k, weight_dtype, Fill::Normal(0.5, 0.25));
    plans[B1] = given(B1, stacked(&[experts, rows(ffn)], Fill::Normal(0.25, 1.0)));
    plans[B2] = given(B2, stacked(&[experts, hidden], normal));
    plans[SHARED_W1] = given(SHARED_W1, shared_of([rows(shared), hidden], inner));
    plans[SHARED_W2] = given(SHARED_W2, shared_of([hidden, shared], between));
    plans[RESIDUAL] = given(RESIDUAL, token(hidden, case.dtype, normal));
    plans[OUT] = token(hidden, case.dtype, normal);
    plans
}

/// Ids by the seed: as a router gives them (what is timed too), with repetitions, all of one expert, of few experts. Some are
/// dropped, of those of a router only where values are special.
pub(super) fn ids(case: &Case, seed: u64) -> Vec<f64> {
    let (tokens, experts, top_k) = (case.sizes[0], case.sizes[1], case.sizes[2]);
    let mut rng = Random::new(seed.wrapping_mul(31) + IDS as u64);
    let (kind, favourite) = (seed % 4, rng.below(experts.max(1) as u64) as f64);
    let mut ids = Vec::with_capacity(tokens * top_k);
    let zipf = (case.values == Values::Zipf).then(|| Zipf::new(experts));
    for _ in 0..tokens {
        match &zipf {
            _ if experts == 0 => {}
            _ if case.values == Values::AllToOne => {
                ids.extend(vec![(experts / 2) as f64; top_k]);
                continue;
            }
            Some(zipf) if top_k <= experts => {
                ids.extend(zipf.distinct(top_k, &mut rng).into_iter().map(|id| id as f64));
                continue;
            }
            _ => {}
        }
        let distinct = rng.distinct(top_k, experts.max(1));
        ids.extend(distinct.into_iter().map(|id| {
            let special = kind != 1 || case.values == Values::Special;
            let dropped = experts == 0 || (special && rng.below(8) == 0);
            match kind {
                _ if dropped => -1.0,
                1 => id as f64,
                0 => rng.below(experts as u64) as f64,
                2 => favourite,
                _ => rng.below(experts.div_ceil(3) as u64) as f64,
            }
        }));
    }
    ids
}

fn draw_routing(case: &Case, seed: u64) -> Vec<Vec<f64>> {
    let mut all = vec![Vec::new(); SPEC.args.len()];
    all[IDS] = ids(case, seed);
    all
}

/// Nothing between the products of f16 may be beyond its range: its values are not made larger.
pub(super) fn constrain(case: &mut Case) {
    // No router sends a token to more experts than there are. Errors of the slots of one expert would add up.
    case.sizes[2] = case.sizes[2].min(case.sizes[1].max(1));
    if case.dtype == DType::F16 && case.values == Values::Large {
        case.values = Values::Typical;
    }
}
