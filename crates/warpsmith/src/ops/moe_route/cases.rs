//! The cases of `moe_route` and its gradient: what every kernel must pass, and what is timed.

use super::options::{
    CAPACITY, GROUP_SCORE, GROUPS, NOISE, NORMALIZE, SCALE, SCORE, SEED, TOP_GROUPS, TOP_K,
};
use super::{
    BIAS, Backward, COUNTS, DROPPED, Forward, MOST_EXPERTS, ORDER, POSITIONS, backward as back, reference,
};
use crate::lab::proof::draw;
use crate::lab::{ArgPlan, Arrangement, Array, Case, Fill, Inputs, Provable, Real, Values};
use crate::op::{Attrs, Op};
use crate::ops::FLOATS;
use crate::tensor::{DType, Random};

const ARRANGEMENTS: [Arrangement; 3] =
    [Arrangement::PaddedRows, Arrangement::Transposed, Arrangement::Misaligned];

/// Tokens, experts and `top_k`: none, one, sizes one less and one more than warps, vectors and blocks, more experts than
/// tokens, all experts, and more slots than lanes.
const SHAPES: [[usize; 3]; 14] = [
    [0, 8, 2],
    [1, 1, 1],
    [1, 128, 8],
    [7, 3, 3],
    [65, 31, 4],
    [64, 128, 8],
    [129, 33, 2],
    [5, 256, 8],
    [300, 8, 2],
    [17, 100, 33],
    [3, 300, 300],
    [9, 1024, 10],
    [2, 1023, 1023],
    [1500, 16, 4],
];

impl Provable for Forward {
    fn reference<R: Real>(inputs: &Inputs<'_, R>, attrs: &Attrs) -> Vec<Option<Array<R>>> {
        reference::forward(inputs, attrs)
    }

    fn plan(case: &Case) -> Vec<Option<ArgPlan>> {
        let [tokens, experts] = case.sizes[..] else { unreachable!("two sizes") };
        let top_k = case.attrs.int(TOP_K) as usize;
        let given = |index: usize, plan: Option<ArgPlan>| plan.filter(|_| case.gives(index));
        // What a capacity drops, noise and places depend on where in the batch a token is.
        let alone = case.attrs.int(CAPACITY) == 0
            && case.attrs.float(NOISE) == 0.0
            && !case.gives(ORDER)
            && !case.gives(POSITIONS);
        let rows = |last: usize, dtype: DType| {
            let plan = ArgPlan::batched(&[tokens, last], dtype);
            plan.map(|plan| ArgPlan { batch_dim: plan.batch_dim.filter(|_| alone), ..plan })
        };
        vec![
            rows(experts, case.dtype).map(spread),
            given(BIAS, ArgPlan::shared(&[experts], DType::F32)),
            rows(top_k, DType::F32),
            rows(top_k, DType::I32),
            given(COUNTS, ArgPlan::shared(&[experts], DType::I32)),
            given(ORDER, rows(top_k, DType::I32)),
            given(POSITIONS, rows(top_k, DType::I32)),
            given(DROPPED, ArgPlan::shared(&[experts], DType::I32)),
        ]
    }

    fn constrain(case: &mut Case) {
        let experts = case.sizes[1].clamp(1, MOST_EXPERTS);
        case.sizes[1] = experts;
        let top_k = (case.attrs.int(TOP_K) as usize).clamp(1, experts);
        let divisor =
            |wanted: usize| (1..=wanted.clamp(1, experts)).rev().find(|n| experts.is_multiple_of(*n));
        let groups = divisor(case.attrs.int(GROUPS).max(1) as usize).unwrap_or(1);
        let least = top_k.div_ceil(experts / groups);
        let top_groups = case.attrs.int(TOP_GROUPS).max(0) as usize;
        let top_groups = if top_groups == 0 { 0 } else { top_groups.clamp(least, groups) };
        for (option, value) in [(TOP_K, top_k), (GROUPS, groups), (TOP_GROUPS, top_groups)] {
            case.set(option, value as f64);
        }
        case.set(NOISE, case.attrs.float(NOISE).max(0.0));
        case.set(CAPACITY, case.attrs.int(CAPACITY).max(0) as f64);
    }

    fn cases() -> Vec<Case> {
        let mut cases = Vec::new();
        let everything = |case: Case| [COUNTS, ORDER, POSITIONS, DROPPED].into_iter().fold(case, Case::give);
        for dtype in FLOATS {
            let plain = Case::new(&Self::SPEC, dtype);
            for (at, [tokens, experts, top_k]) in SHAPES.into_iter().enumerate() {
                let case = plain.clone().sizes(&[tokens, experts]).attr(TOP_K, top_k as f64);
                let of = |shift: usize| {
                    let kind = (at + shift) % 4;
                    case.clone().attr(SCORE, (kind % 2) as f64).attr(NORMALIZE, (kind / 2) as f64)
                };
                cases.push(of(0));
                cases.push(everything(of(1)));
                cases.push(everything(of(2).give(BIAS)).attr(CAPACITY, (tokens * top_k / experts) as f64));
                cases.push(of(3).give(BIAS));
            }
            let case = plain.clone().sizes(&[70, 24]).attr(TOP_K, 4.0);
            for score in 0..2 {
                let case = case.clone().attr(SCORE, score as f64);
                // Groups of eight, two and one; as many as experts.
                for (groups, top_groups) in [(3, 1), (3, 2), (12, 3), (24, 5), (3, 0)] {
                    let grouped =
                        case.clone().attr(GROUPS, groups as f64).attr(TOP_GROUPS, top_groups as f64);
                    cases.push(grouped.clone());
                    cases.push(grouped.clone().attr(GROUP_SCORE, 1.0).attr(NORMALIZE, 0.0));
                    cases.push(everything(grouped.give(BIAS)));
                }
                cases.push(everything(case.clone().attr(NOISE, 1.0).attr(SEED, 7.0)));
                cases.push(case.clone().give(BIAS).attr(NOISE, 0.1).attr(SEED, -3.0).attr(SCALE, 2.5));
                for capacity in [1, 3, 1000] {
                    cases.push(everything(case.clone().attr(CAPACITY, capacity as f64)));
                }
                cases.push(case.clone().attr(CAPACITY, 2.0));
                for arrangement in ARRANGEMENTS {
                    cases.push(case.clone().arranged(arrangement));
                    cases.push(everything(case.clone().give(BIAS).attr(CAPACITY, 9.0)).arranged(arrangement));
                }
                for values in [Values::Large, Values::Special] {
                    let case = case.clone().values(values);
                    cases.push(case.clone());
                    cases.push(case.clone().attr(NORMALIZE, 0.0));
                    cases.push(case.clone().give(BIAS).attr(NOISE, 0.5));
                    cases.push(everything(case.give(BIAS).attr(GROUPS, 6.0).attr(TOP_GROUPS, 3.0)));
                }
            }
            // DeepSeek-V3, and V2.
            let large =
                plain.clone().sizes(&[40, 256]).attr(TOP_K, 8.0).attr(GROUPS, 8.0).attr(TOP_GROUPS, 4.0);
            cases.push(everything(large.clone().give(BIAS).attr(SCORE, 1.0).attr(SCALE, 2.5)));
            cases.push(large.attr(GROUP_SCORE, 1.0).attr(NORMALIZE, 0.0).attr(SCALE, 16.0));
            for one in [COUNTS, ORDER, POSITIONS, DROPPED] {
                cases.push(case.clone().give(one).attr(CAPACITY, 5.0));
            }
        }
        // Several blocks.
        let many = Case::new(&Self::SPEC, DType::BF16).sizes(&[9001, 64]).attr(TOP_K, 6.0);
        cases.push(everything(many.clone()));
        cases.push(everything(many.attr(CAPACITY, 700.0)));
        cases
    }

    fn bench_cases() -> Vec<Case> {
        let mut cases = Vec::new();
        for dtype in [DType::BF16, DType::F32] {
            for [tokens, experts, top_k] in [[64, 128, 8], [4096, 128, 8], [16_384, 8, 2]] {
                let case = Case::new(&Self::SPEC, dtype).sizes(&[tokens, experts]).attr(TOP_K, top_k as f64);
                cases.push([COUNTS, ORDER, POSITIONS].into_iter().fold(case, Case::give));
            }
        }
        let deepseek =
            Case::new(&Self::SPEC, DType::F32).sizes(&[4096, 256]).attr(TOP_K, 8.0).attr(SCORE, 1.0);
        let deepseek = deepseek.attr(GROUPS, 8.0).attr(TOP_GROUPS, 4.0).attr(SCALE, 2.5);
        cases.push([BIAS, COUNTS, ORDER, POSITIONS].into_iter().fold(deepseek, Case::give));
        cases
    }
}

/// Logits as routers have them.
fn spread(plan: ArgPlan) -> ArgPlan {
    ArgPlan { fill: Fill::Normal(0.0, 2.0), ..plan }
}

impl Provable for Backward {
    fn reference<R: Real>(inputs: &Inputs<'_, R>, attrs: &Attrs) -> Vec<Option<Array<R>>> {
        reference::backward(inputs, attrs)
    }

    fn plan(case: &Case) -> Vec<Option<ArgPlan>> {
        let [tokens, experts, top_k] = case.sizes[..] else { unreachable!("three sizes") };
        let made =
            |plan: Option<ArgPlan>| plan.map(|plan| ArgPlan { fill: Fill::Generated(generate), ..plan });
        vec![
            made(ArgPlan::batched(&[tokens, experts], case.dtype)),
            made(ArgPlan::batched(&[tokens, top_k], DType::I32)),
            made(ArgPlan::batched(&[tokens, top_k], DType::F32)),
            ArgPlan::batched(&[tokens, top_k], DType::F32),
            ArgPlan::batched(&[tokens, experts], case.dtype),
        ]
    }

    fn constrain(case: &mut Case) {
        case.sizes[1] = case.sizes[1].clamp(1, MOST_EXPERTS);
        case.sizes[2] = case.sizes[2].min(case.sizes[1]);
    }

    fn cases() -> Vec<Case> {
        let mut cases = Vec::new();
        for dtype in FLOATS {
            for kind in 0..4 {
                let plain = Case::new(&Self::SPEC, dtype).attr(back::SCORE, (kind % 2) as f64);
                let plain = plain.attr(back::NORMALIZE, (kind / 2) as f64);
                cases.extend(SHAPES.iter().map(|sizes| plain.clone().sizes(sizes)));
                let case = plain.sizes(&[70, 24, 4]);
                cases.push(case.clone().sizes(&[5, 24, 0]));
                cases.push(case.clone().attr(back::SCALE, 2.5));
                cases.extend(ARRANGEMENTS.map(|arrangement| case.clone().arranged(arrangement)));
                cases.extend([Values::Large, Values::Special].map(|values| case.clone().values(values)));
            }
        }
        cases
    }

    fn bench_cases() -> Vec<Case> {
        let of = |dtype: DType| {
            [[4096, 128, 8], [16_384, 8, 2]].map(|sizes| Case::new(&Self::SPEC, dtype).sizes(&sizes))
        };
        [DType::BF16, DType::F32].into_iter().flat_map(of).collect()
    }
}

/// Logits; for each token distinct experts, whichever; and weights that are zero where the expert has none, or was dropped.
fn generate(case: &Case, seed: u64) -> Vec<Vec<f64>> {
    let [tokens, experts, top_k] = case.sizes[..] else { unreachable!("three sizes") };
    let plan = ArgPlan::batched(&[tokens, experts], case.dtype).map(spread).expect("a plan");
    let logits = draw(&plan, case.values, back::LOGITS, seed);
    let mut random = Random::new(seed.wrapping_mul(41) + 3);
    let (mut ids, mut weights) = (Vec::new(), Vec::new());
    for row in logits.chunks(experts) {
        for id in random.distinct(top_k, experts) {
            let has_none = row[id as usize].is_nan() || row[id as usize] == f64::NEG_INFINITY;
            weights.push(if has_none || random.below(5) == 0 { 0.0 } else { 0.25 });
            ids.push(id as f64);
        }
    }
    let mut all = vec![Vec::new(); Backward::SPEC.args.len()];
    (all[back::LOGITS], all[back::IDS], all[back::WEIGHTS]) = (logits, ids, weights);
    debug_assert_eq!(all[back::IDS].len(), tokens * top_k);
    all
}
