//! The cases of `cross_entropy` and its gradient: what every kernel must pass, and what is timed.

use super::backward as back;
use super::options::{IGNORE_INDEX, LABEL_SMOOTHING, REDUCTION, SOFTCAP, Z_LOSS};
use super::{Backward, COUNT, Forward, LSE, TARGETS, reference};
use crate::lab::proof::draw;
use crate::lab::{
    ArgPlan, Arrangement, Array, Case, Fill, Inputs, MANY_ROWS, ODD_ROWS, Provable, ROW_SIZES, Real, Values,
};
use crate::op::{Attrs, Op, OpSpec};
use crate::ops::FLOATS;
use crate::tensor::{DType, Random};
use reference::NONE;

impl Provable for Forward {
    fn reference<R: Real>(inputs: &Inputs<'_, R>, attrs: &Attrs) -> Vec<Option<Array<R>>> {
        reference::forward(inputs, attrs)
    }

    fn plan(case: &Case) -> Vec<Option<ArgPlan>> {
        let [rows, vocab] = case.sizes[..] else { unreachable!("two sizes") };
        let given = |index: usize, plan: Option<ArgPlan>| plan.filter(|_| case.gives(index));
        vec![
            ArgPlan::batched(&[rows, vocab], case.dtype).map(spread),
            targets(case, rows, forward_targets),
            loss(case, rows),
            given(LSE, ArgPlan::batched(&[rows], DType::F32)),
            given(COUNT, ArgPlan::shared(&[], DType::F32)),
        ]
    }

    fn constrain(case: &mut Case) {
        constrain(case);
    }

    fn cases() -> Vec<Case> {
        let bare = cases(&Self::SPEC);
        let give = |(at, case): (usize, Case)| match at % 3 {
            0 => case,
            1 => case.give(LSE),
            _ => case.give(LSE).give(COUNT),
        };
        bare.into_iter().enumerate().map(give).collect()
    }

    fn bench_cases() -> Vec<Case> {
        bench_cases(&Self::SPEC).into_iter().map(|case| case.give(LSE).give(COUNT)).collect()
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
        vec![
            made(ArgPlan::batched(&[rows, vocab], case.dtype)),
            targets(case, rows, generate),
            made(ArgPlan::batched(&[rows], DType::F32)),
            made(ArgPlan::shared(&[], DType::F32)),
            loss(case, rows),
            ArgPlan::batched(&[rows, vocab], case.dtype),
        ]
    }

    fn constrain(case: &mut Case) {
        constrain(case);
    }

    fn cases() -> Vec<Case> {
        let mut all = cases(&Self::SPEC);
        for dtype in FLOATS {
            let case = Case::new(&Self::SPEC, dtype);
            for sizes in [[33, 264], [5, 1025], [2, 50_257]] {
                all.push(case.clone().sizes(&sizes).in_place());
            }
            let capped = case.sizes(&[9, 521]).attr(SOFTCAP, 4.0).attr(LABEL_SMOOTHING, 0.1);
            all.push(capped.clone().in_place());
            all.push(capped.in_place().arranged(Arrangement::Transposed));
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

/// One of the types has narrow targets, so that cases reach both kinds.
pub(in crate::ops) fn targets(case: &Case, rows: usize, generator: crate::lab::Generator) -> Option<ArgPlan> {
    let dtype = if case.dtype == DType::F16 { DType::I32 } else { DType::I64 };
    Some(ArgPlan { shape: vec![rows], dtype, fill: Fill::Generated(generator), batch_dim: Some(0) })
}

/// Targets of a case: of most rows any column, first and last ones, and rows that are ignored.
pub(in crate::ops) fn draw_targets(case: &Case, rows: usize, vocab: usize, seed: u64) -> Vec<f64> {
    let mut random = Random::new(seed.wrapping_mul(29) + 5);
    let ignored = case.attrs.int(IGNORE_INDEX) as f64;
    // Some cases ignore every row.
    let all = rows > 1 && seed % 16 == 3 && case.values == Values::Special;
    let of_row = |row: usize| match (row + seed as usize) % 7 {
        _ if all => ignored,
        2 => ignored,
        4 => 0.0,
        5 => (vocab - 1) as f64,
        _ => random.below(vocab as u64) as f64,
    };
    (0..rows).map(of_row).collect()
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
    let logits = Array { data: draw(&plan, case.values, back::LOGITS, seed), shape: plan.shape };
    let targets = Array { shape: vec![rows], data: draw_targets(case, rows, vocab, seed) };
    let inputs = [Some(logits), Some(targets), None, None, None];
    let results = reference::forward::<f64>(&Inputs::new(&inputs, 1 << LSE | 1 << COUNT), &case.attrs);
    let [logits, targets, ..] = inputs;
    let mut all = vec![Vec::new(); Backward::SPEC.args.len()];
    let mut keep = |index: usize, array: Option<Array<f64>>| all[index] = array.expect("made above").data;
    keep(back::LOGITS, logits);
    keep(back::TARGETS, targets);
    let mut results = results.into_iter().skip(LSE);
    keep(back::LSE, results.next().flatten());
    keep(back::COUNT, results.next().flatten());
    all
}

/// What random calls must keep to.
pub(in crate::ops) fn constrain(case: &mut Case) {
    case.sizes[1] = case.sizes[1].max(1);
    case.set(SOFTCAP, case.attrs.float(SOFTCAP).max(0.0));
    case.set(LABEL_SMOOTHING, case.attrs.float(LABEL_SMOOTHING).clamp(0.0, 1.0));
    case.set(Z_LOSS, case.attrs.float(Z_LOSS).max(0.0));
}

fn cases(spec: &OpSpec) -> Vec<Case> {
    let mut cases = Vec::new();
    for dtype in FLOATS {
        let plain = Case::new(spec, dtype);
        let reduced = |case: Case, at: usize| case.attr(REDUCTION, (at % 3) as f64);
        let sizes = ROW_SIZES.iter().chain(ODD_ROWS).enumerate();
        cases.extend(sizes.map(|(at, sizes)| reduced(plain.clone().sizes(sizes), at)));
        let odd = plain.clone().sizes(&[9, 1025]);
        for (at, arrangement) in ARRANGEMENTS.into_iter().enumerate() {
            cases.push(reduced(odd.clone().arranged(arrangement), at + 2));
            cases.push(reduced(plain.clone().sizes(&[33, 264]).arranged(arrangement), at));
        }
        // A vocabulary, in several pieces.
        cases.push(plain.clone().sizes(&[3, 128_256]).attr(REDUCTION, 1.0));
        cases.push(plain.clone().sizes(&[2, 151_936]).attr(LABEL_SMOOTHING, 0.1).attr(Z_LOSS, 1e-4));
        // Each option alone, and in pairs.
        let case = plain.clone().sizes(&[17, 300]);
        let options = [(IGNORE_INDEX, 7.0), (SOFTCAP, 3.0), (LABEL_SMOOTHING, 0.25), (Z_LOSS, 0.01)];
        for (at, (index, value)) in options.into_iter().enumerate() {
            let one = case.clone().attr(index, value);
            cases.push(reduced(one.clone(), at));
            for (other, value) in options.into_iter().skip(at + 1) {
                cases.push(reduced(one.clone().attr(other, value), at + other));
            }
        }
        cases.push(case.clone().attr(LABEL_SMOOTHING, 1.0).attr(REDUCTION, 2.0));
        cases.push(case.clone().attr(SOFTCAP, 30.0).attr(LABEL_SMOOTHING, 0.1).attr(Z_LOSS, 1e-3));
        let case = plain.sizes(&[34, 264]);
        for values in [Values::Large, Values::Special] {
            for reduction in 0..3 {
                cases.push(reduced(case.clone().values(values), reduction));
            }
            let smooth = case.clone().attr(LABEL_SMOOTHING, 0.1).attr(REDUCTION, 2.0);
            cases.push(smooth.clone().values(values));
            cases.push(smooth.attr(SOFTCAP, 50.0).attr(Z_LOSS, 1e-4).values(values));
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
        for sizes in [[512, 32_000], [512, 50_257], [512, 128_256]] {
            cases.push(Case::new(spec, dtype).sizes(&sizes));
        }
    }
    cases.push(Case::new(spec, DType::BF16).sizes(&[4096, 50_257]).gpu_only());
    cases.push(Case::new(spec, DType::BF16).sizes(&[8192, 128_256]).gpu_only());
    cases.push(Case::new(spec, DType::BF16).sizes(&[8192, 151_936]).gpu_only());
    cases
}
