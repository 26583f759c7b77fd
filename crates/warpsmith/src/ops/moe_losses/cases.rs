//! The cases of `moe_losses` and its gradient: what every kernel must pass, and what is timed.

use super::{Backward, ENTROPY, Forward, IDS, LOAD, PROBABILITY, SCORE, backward as back, reference};
use crate::lab::proof::draw;
use crate::lab::{ArgPlan, Arrangement, Array, Case, Fill, Inputs, Provable, Real, Values};
use crate::op::{Attrs, Op, OpSpec};
use crate::ops::FLOATS;
use crate::ops::moe_route::MOST_EXPERTS;
use crate::tensor::{DType, Random};

const ARRANGEMENTS: [Arrangement; 3] =
    [Arrangement::PaddedRows, Arrangement::Transposed, Arrangement::Misaligned];

/// Tokens, experts and `top_k`.
const SHAPES: [[usize; 3]; 13] = [
    [0, 8, 2],
    [1, 1, 1],
    [1, 128, 8],
    [7, 3, 3],
    [65, 31, 4],
    [64, 128, 8],
    [129, 33, 2],
    [5, 256, 0],
    [300, 8, 2],
    [17, 100, 33],
    [9, 1024, 10],
    [2, 1023, 1023],
    [1500, 16, 4],
];

impl Provable for Forward {
    fn reference<R: Real>(inputs: &Inputs<'_, R>, attrs: &Attrs) -> Vec<Option<Array<R>>> {
        reference::forward(inputs, attrs)
    }

    fn plan(case: &Case) -> Vec<Option<ArgPlan>> {
        let [tokens, experts, top_k] = case.sizes[..] else { unreachable!("three sizes") };
        let given = |index: usize, plan: Option<ArgPlan>| plan.filter(|_| case.gives(index));
        let number = || ArgPlan::shared(&[], DType::F32);
        let skewed = |plan: ArgPlan| ArgPlan { fill: Fill::Generated(ids), ..plan };
        vec![
            ArgPlan::shared(&[tokens, experts], case.dtype).map(spread),
            ArgPlan::shared(&[tokens, top_k], DType::I32).map(skewed),
            number(),
            number(),
            number(),
            given(LOAD, ArgPlan::shared(&[experts], DType::F32)),
            given(PROBABILITY, ArgPlan::shared(&[experts], DType::F32)),
            given(ENTROPY, number()),
        ]
    }

    fn constrain(case: &mut Case) {
        case.sizes[1] = case.sizes[1].clamp(1, MOST_EXPERTS);
        case.sizes[2] = case.sizes[2].min(case.sizes[1]);
    }

    fn cases() -> Vec<Case> {
        let give = |(at, case): (usize, Case)| match at % 3 {
            0 => case,
            1 => case.give(LOAD).give(PROBABILITY),
            _ => case.give(LOAD).give(PROBABILITY).give(ENTROPY),
        };
        let mut cases: Vec<Case> = cases(&Self::SPEC, |sizes| sizes.to_vec());
        cases.push(Case::new(&Self::SPEC, DType::BF16).sizes(&[9001, 64, 6]));
        cases.into_iter().enumerate().map(give).collect()
    }

    fn bench_cases() -> Vec<Case> {
        let of = |dtype: DType| {
            let case = move |sizes: [usize; 3]| Case::new(&Self::SPEC, dtype).sizes(&sizes);
            [[4096, 128, 8], [16_384, 8, 2]].map(|sizes| case(sizes).give(LOAD).give(PROBABILITY))
        };
        [DType::BF16, DType::F32].into_iter().flat_map(of).collect()
    }
}

impl Provable for Backward {
    fn reference<R: Real>(inputs: &Inputs<'_, R>, attrs: &Attrs) -> Vec<Option<Array<R>>> {
        reference::backward(inputs, attrs)
    }

    fn plan(case: &Case) -> Vec<Option<ArgPlan>> {
        let [tokens, experts] = case.sizes[..] else { unreachable!("two sizes") };
        let number = || ArgPlan::shared(&[], DType::F32);
        let made = |plan: ArgPlan| ArgPlan { fill: Fill::Generated(shares), ..plan };
        // The number of tokens divides everything.
        vec![
            ArgPlan::shared(&[tokens, experts], case.dtype).map(spread),
            ArgPlan::shared(&[experts], DType::F32).map(made),
            ArgPlan::shared(&[experts], DType::F32).map(made),
            number(),
            number(),
            number(),
            ArgPlan::shared(&[tokens, experts], case.dtype),
        ]
    }

    fn constrain(case: &mut Case) {
        case.sizes[1] = case.sizes[1].clamp(1, MOST_EXPERTS);
    }

    fn cases() -> Vec<Case> {
        let mut all = cases(&Self::SPEC, |sizes| sizes[..2].to_vec());
        for dtype in FLOATS {
            let case = Case::new(&Self::SPEC, dtype).sizes(&[70, 24]).in_place();
            all.push(case.clone());
            all.push(case.attr(SCORE, 1.0).arranged(Arrangement::Transposed));
        }
        all
    }

    fn bench_cases() -> Vec<Case> {
        let of = |dtype: DType| {
            [[4096, 128], [16_384, 8]].map(|sizes| Case::new(&Self::SPEC, dtype).sizes(&sizes))
        };
        [DType::BF16, DType::F32].into_iter().flat_map(of).collect()
    }
}

fn cases(spec: &OpSpec, sizes_of: fn(&[usize; 3]) -> Vec<usize>) -> Vec<Case> {
    let mut cases = Vec::new();
    for dtype in FLOATS {
        for score in 0..2 {
            let plain = Case::new(spec, dtype).attr(SCORE, score as f64);
            cases.extend(SHAPES.iter().map(|sizes| plain.clone().sizes(&sizes_of(sizes))));
            let case = plain.sizes(&sizes_of(&[70, 24, 4]));
            cases.extend(ARRANGEMENTS.map(|arrangement| case.clone().arranged(arrangement)));
            cases.extend([Values::Large, Values::Special].map(|values| case.clone().values(values)));
        }
    }
    cases
}

/// Logits as routers have them.
fn spread(plan: ArgPlan) -> ArgPlan {
    ArgPlan { fill: Fill::Normal(0.0, 2.0), ..plan }
}

/// Experts of which the first have more slots than the others, distinct or not.
fn ids(case: &Case, seed: u64) -> Vec<Vec<f64>> {
    let [tokens, experts, top_k] = case.sizes[..] else { unreachable!("three sizes") };
    let mut random = Random::new(seed.wrapping_mul(43) + 1);
    let mut all = vec![Vec::new(); Forward::SPEC.args.len()];
    let mut id = || (random.below(experts as u64) * random.below(experts as u64) / experts as u64) as f64;
    all[IDS] = (0..tokens * top_k).map(|_| id()).collect();
    all
}

/// Loads and probabilities: positive, with a sum of one, some of them zero.
fn shares(case: &Case, seed: u64) -> Vec<Vec<f64>> {
    let experts = case.sizes[1];
    let mut all = vec![Vec::new(); Backward::SPEC.args.len()];
    for index in [back::LOAD, back::PROBABILITY] {
        let plan = ArgPlan::shared(&[experts], DType::F32).expect("a plan");
        let mut parts: Vec<f64> =
            draw(&plan, Values::Typical, index, seed).into_iter().map(|x| (x + 0.5).max(0.0)).collect();
        parts[0] += 0.25;
        let sum: f64 = parts.iter().sum();
        all[index] = parts.into_iter().map(|part| part / sum).collect();
    }
    all
}
