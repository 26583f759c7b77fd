//! The cases of `kl_div` and its gradient: what every kernel must pass, and what is timed.

use super::backward as back;
use super::options::{DIRECTION, IGNORE_INDEX, REDUCTION, TEMPERATURE};
use super::{Backward, COUNT, Forward, LSE, ROW_LOSSES, STUDENT, TARGETS, TEACHER, TEACHER_LSE, reference};
use crate::lab::proof::draw;
use crate::lab::{
    ArgPlan, Arrangement, Array, Case, Fill, Inputs, MANY_ROWS, ODD_ROWS, Provable, ROW_SIZES, Real, Values,
};
use crate::op::{Attrs, Op, OpSpec};
use crate::ops::FLOATS;
use crate::ops::cross_entropy::cases::{draw_targets, targets};
use crate::tensor::DType;
use reference::NONE;

impl Provable for Forward {
    fn reference<R: Real>(inputs: &Inputs<'_, R>, attrs: &Attrs) -> Vec<Option<Array<R>>> {
        reference::forward(inputs, attrs)
    }

    fn plan(case: &Case) -> Vec<Option<ArgPlan>> {
        let [rows, vocab] = case.sizes[..] else { unreachable!("two sizes") };
        let given = |index: usize, plan: Option<ArgPlan>| plan.filter(|_| case.gives(index));
        let by_row = || ArgPlan::batched(&[rows], DType::F32);
        vec![
            ArgPlan::batched(&[rows, vocab], case.dtype).map(spread),
            ArgPlan::batched(&[rows, vocab], case.dtype).map(spread),
            given(TARGETS, targets(case, rows, forward_targets)),
            loss(case, rows),
            given(LSE, by_row()),
            given(TEACHER_LSE, by_row()),
            given(ROW_LOSSES, by_row()),
            given(COUNT, ArgPlan::shared(&[], DType::F32)),
        ]
    }

    fn constrain(case: &mut Case) {
        constrain(case);
    }

    fn cases() -> Vec<Case> {
        let bare = cases(&Self::SPEC, TARGETS);
        let give = |(at, case): (usize, Case)| match at % 5 {
            0 => case,
            1 => case.give(LSE),
            2 => case.give(TEACHER_LSE).give(COUNT),
            3 => case.give(ROW_LOSSES),
            _ => all_kept(case),
        };
        bare.into_iter().enumerate().map(give).collect()
    }

    fn bench_cases() -> Vec<Case> {
        bench_cases(&Self::SPEC).into_iter().map(all_kept).collect()
    }
}

impl Provable for Backward {
    fn reference<R: Real>(inputs: &Inputs<'_, R>, attrs: &Attrs) -> Vec<Option<Array<R>>> {
        reference::backward(inputs, attrs)
    }

    fn plan(case: &Case) -> Vec<Option<ArgPlan>> {
        let [rows, vocab] = case.sizes[..] else { unreachable!("two sizes") };
        let made =
            |plan: Option<ArgPlan>| plan.map(|plan| ArgPlan { fill: Fill::Generated(generate), ..plan });
        let by_row = || made(ArgPlan::batched(&[rows], DType::F32));
        vec![
            made(ArgPlan::batched(&[rows, vocab], case.dtype)),
            made(ArgPlan::batched(&[rows, vocab], case.dtype)),
            by_row(),
            by_row(),
            by_row(),
            made(ArgPlan::shared(&[], DType::F32)),
            loss(case, rows),
            targets(case, rows, generate).filter(|_| case.gives(back::TARGETS)),
            ArgPlan::batched(&[rows, vocab], case.dtype),
        ]
    }

    fn constrain(case: &mut Case) {
        constrain(case);
    }

    fn cases() -> Vec<Case> {
        let mut all = cases(&Self::SPEC, back::TARGETS);
        for dtype in FLOATS {
            let case = Case::new(&Self::SPEC, dtype);
            for sizes in [[33, 264], [5, 1025], [2, 50_257]] {
                all.push(case.clone().sizes(&sizes).give(back::TARGETS).in_place());
            }
            let reverse = case.sizes(&[9, 521]).attr(DIRECTION, 1.0).attr(TEMPERATURE, 2.0);
            all.push(reverse.clone().in_place());
            all.push(reverse.in_place().arranged(Arrangement::Transposed));
        }
        all
    }

    fn bench_cases() -> Vec<Case> {
        bench_cases(&Self::SPEC)
    }
}

/// Logits as models have them.
fn spread(plan: ArgPlan) -> ArgPlan {
    ArgPlan { fill: Fill::Normal(0.0, 2.0), ..plan }
}

fn all_kept(case: Case) -> Case {
    case.give(LSE).give(TEACHER_LSE).give(ROW_LOSSES).give(COUNT)
}

fn forward_targets(case: &Case, seed: u64) -> Vec<Vec<f64>> {
    let mut all = vec![Vec::new(); Forward::SPEC.args.len()];
    all[TARGETS] = draw_targets(case, case.sizes[0], case.sizes[1], seed);
    all
}

/// The loss, or its gradient.
fn loss(case: &Case, rows: usize) -> Option<ArgPlan> {
    match case.attrs.choice(REDUCTION) {
        NONE => ArgPlan::batched(&[rows], DType::F32),
        _ => ArgPlan::shared(&[], DType::F32),
    }
}

/// The results of a forward call, and what it was given.
fn generate(case: &Case, seed: u64) -> Vec<Vec<f64>> {
    let [rows, vocab] = case.sizes[..] else { unreachable!("two sizes") };
    let plan = ArgPlan::batched(&[rows, vocab], case.dtype).map(spread).expect("a plan");
    let logits =
        |index: usize| Array { data: draw(&plan, case.values, index, seed), shape: plan.shape.clone() };
    let mut inputs = vec![None; Forward::SPEC.args.len()];
    inputs[STUDENT] = Some(logits(back::STUDENT));
    inputs[TEACHER] = Some(logits(back::TEACHER));
    if case.gives(back::TARGETS) {
        inputs[TARGETS] = Some(Array { shape: vec![rows], data: draw_targets(case, rows, vocab, seed) });
    }
    let wanted = [LSE, TEACHER_LSE, ROW_LOSSES, COUNT];
    let wants = wanted.iter().fold(0, |bits, index| bits | 1 << index);
    let mut results = reference::forward::<f64>(&Inputs::new(&inputs, wants), &case.attrs);
    let mut all = vec![Vec::new(); Backward::SPEC.args.len()];
    let mut keep =
        |to: usize, from: Option<Array<f64>>| all[to] = from.map_or(Vec::new(), |array| array.data);
    let kept = [back::LSE, back::TEACHER_LSE, back::ROW_LOSSES, back::COUNT];
    kept.into_iter().zip(wanted).for_each(|(to, from)| keep(to, results[from].take()));
    let given = [(back::STUDENT, STUDENT), (back::TEACHER, TEACHER), (back::TARGETS, TARGETS)];
    given.into_iter().for_each(|(to, from)| keep(to, inputs[from].take()));
    all
}

/// What random calls must keep to.
fn constrain(case: &mut Case) {
    case.sizes[1] = case.sizes[1].max(1);
    let temperature = case.attrs.float(TEMPERATURE).abs();
    case.set(TEMPERATURE, if temperature.is_nan() { 1.0 } else { temperature.clamp(0.125, 8.0) });
}

fn cases(spec: &OpSpec, targets: usize) -> Vec<Case> {
    let mut cases = Vec::new();
    for dtype in FLOATS {
        let plain = Case::new(spec, dtype);
        // Every second case has targets, and every second pair of them the other direction.
        let varied = |case: Case, at: usize| {
            let case = case.attr(REDUCTION, (at % 3) as f64).attr(DIRECTION, (at / 2 % 2) as f64);
            if at % 2 == 1 { case.give(targets) } else { case }
        };
        let sizes = ROW_SIZES.iter().chain(ODD_ROWS).enumerate();
        cases.extend(sizes.map(|(at, sizes)| varied(plain.clone().sizes(sizes), at)));
        let odd = plain.clone().sizes(&[9, 1025]);
        for (at, arrangement) in ARRANGEMENTS.into_iter().enumerate() {
            cases.push(varied(odd.clone().arranged(arrangement), at + 2));
            cases.push(varied(plain.clone().sizes(&[33, 264]).arranged(arrangement), at));
        }
        // A vocabulary, in many pieces.
        cases.push(varied(plain.clone().sizes(&[3, 128_256]), 4).attr(REDUCTION, 1.0));
        cases.push(varied(plain.clone().sizes(&[2, 151_936]), 3).attr(TEMPERATURE, 2.0));
        // Each option alone, and in pairs.
        let case = plain.clone().sizes(&[17, 300]);
        let options = [(IGNORE_INDEX, 7.0), (TEMPERATURE, 3.0), (DIRECTION, 1.0), (REDUCTION, 2.0)];
        for (at, (index, value)) in options.into_iter().enumerate() {
            let one = case.clone().give(targets).attr(index, value);
            cases.push(one.clone());
            for (other, value) in options.into_iter().skip(at + 1) {
                cases.push(one.clone().attr(other, value));
            }
        }
        cases.push(case.clone().attr(TEMPERATURE, 0.5));
        cases.push(case.attr(TEMPERATURE, 0.7).attr(DIRECTION, 1.0).attr(REDUCTION, 2.0));
        let case = plain.sizes(&[34, 264]);
        for values in [Values::Large, Values::Special] {
            for at in 0..6 {
                cases.push(varied(case.clone().values(values), at));
            }
            for direction in [0.0, 1.0] {
                let warm =
                    case.clone().attr(TEMPERATURE, 4.0).attr(REDUCTION, 2.0).attr(DIRECTION, direction);
                cases.push(warm.values(values));
            }
        }
    }
    let many = Case::new(spec, DType::BF16);
    cases.extend(MANY_ROWS.iter().map(|sizes| many.clone().sizes(sizes)));
    cases
}

const ARRANGEMENTS: [Arrangement; 3] =
    [Arrangement::PaddedRows, Arrangement::Transposed, Arrangement::Misaligned];

fn bench_cases(spec: &OpSpec) -> Vec<Case> {
    let mut cases = Vec::new();
    for dtype in [DType::BF16, DType::F32] {
        for sizes in [[512, 32_000], [512, 50_257], [256, 128_256]] {
            cases.push(Case::new(spec, dtype).sizes(&sizes));
        }
    }
    cases
        .push(Case::new(spec, DType::BF16).sizes(&[512, 32_000]).attr(DIRECTION, 1.0).attr(TEMPERATURE, 2.0));
    for sizes in [[4096, 50_257], [4096, 128_256], [4096, 151_936]] {
        cases.push(Case::new(spec, DType::BF16).sizes(&sizes).gpu_only());
    }
    cases
}
