//! The cases of `embedding` and its gradient.

use super::backward::{Backward, VOCAB};
use super::{Forward, reference};
use crate::lab::{ArgPlan, Arrangement, Array, Case, Fill, Inputs, Provable, Real, Values};
use crate::op::{Attrs, Op, OpSpec};
use crate::ops::FLOATS;
use crate::tensor::DType;

impl Provable for Forward {
    fn reference<R: Real>(inputs: &Inputs<'_, R>, _: &Attrs) -> Vec<Option<Array<R>>> {
        reference::forward(inputs)
    }

    fn plan(case: &Case) -> Vec<Option<ArgPlan>> {
        plan(case)
    }

    fn constrain(case: &mut Case) {
        // An id needs a row.
        case.sizes[1] = case.sizes[1].max(1);
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
        backward_plan(case)
    }

    fn cases() -> Vec<Case> {
        backward_cases(&Self::SPEC)
    }

    fn bench_cases() -> Vec<Case> {
        backward_bench_cases(&Self::SPEC)
    }
}

const ARRANGEMENTS: [Arrangement; 3] =
    [Arrangement::PaddedRows, Arrangement::Transposed, Arrangement::Misaligned];

/// One of the types has the narrow ids, so that cases reach both kinds.
fn ids(count: usize, vocab: usize, dtype: DType) -> Option<ArgPlan> {
    let dtype = if dtype == DType::F16 { DType::I32 } else { DType::I64 };
    Some(ArgPlan { shape: vec![count], dtype, fill: Fill::Below(vocab.max(1)), batch_dim: Some(0) })
}

fn plan(case: &Case) -> Vec<Option<ArgPlan>> {
    let [num_tokens, vocab, hidden] = case.sizes[..] else { unreachable!("three sizes") };
    vec![
        ArgPlan::shared(&[vocab, hidden], case.dtype),
        ids(num_tokens, vocab, case.dtype),
        ArgPlan::batched(&[num_tokens, hidden], case.dtype),
    ]
}

fn cases(spec: &OpSpec) -> Vec<Case> {
    let mut cases = Vec::new();
    for dtype in FLOATS {
        let case = Case::new(spec, dtype);
        // Empty, one element, one less and one more than vectors and blocks.
        for sizes in [
            [0, 5, 8],
            [3, 5, 0],
            [1, 1, 1],
            [7, 3, 5],
            [33, 100, 8],
            [65, 17, 31],
            [5, 9, 129],
            [300, 50, 64],
            [3, 7, 1023],
            [2, 4, 4099],
            [9, 300, 4096],
        ] {
            cases.push(case.clone().sizes(&sizes));
        }
        let case = case.sizes(&[33, 40, 264]);
        cases.extend(ARRANGEMENTS.map(|arrangement| case.clone().arranged(arrangement)));
        cases.push(case.values(Values::Special));
    }
    cases
}

fn bench_cases(spec: &OpSpec) -> Vec<Case> {
    let mut cases = Vec::new();
    for dtype in [DType::BF16, DType::F32] {
        for sizes in [[64, 131_072, 4096], [8192, 32_768, 4096]] {
            cases.push(Case::new(spec, dtype).sizes(&sizes));
        }
    }
    cases
}

fn backward_plan(case: &Case) -> Vec<Option<ArgPlan>> {
    let [num_tokens, hidden] = case.sizes[..] else { unreachable!("two sizes") };
    let vocab = case.attrs.int(VOCAB) as usize;
    // Every row of the result depends on all of the batch.
    let alone = |plan: Option<ArgPlan>| plan.map(|plan| ArgPlan { batch_dim: None, ..plan });
    vec![
        alone(ids(num_tokens, vocab, case.dtype)),
        ArgPlan::shared(&[num_tokens, hidden], case.dtype),
        ArgPlan::shared(&[vocab, hidden], case.dtype),
    ]
}

fn backward_cases(spec: &OpSpec) -> Vec<Case> {
    let mut cases = Vec::new();
    for dtype in FLOATS {
        let case = |vocab: usize| Case::new(spec, dtype).attr(VOCAB, vocab as f64);
        // Without ids, without columns, one element, all in one row, rows with many ids and with none.
        for (vocab, sizes) in [
            (5, [0, 8]),
            (5, [3, 0]),
            (1, [1, 1]),
            (1, [70, 33]),
            (3, [7, 5]),
            (100, [33, 8]),
            (17, [300, 129]),
            (2, [3000, 40]),
            (33, [64, 1023]),
            (70, [5, 1030]),
            (300, [9, 4099]),
        ] {
            cases.push(case(vocab).sizes(&sizes));
        }
        let case = case(40).sizes(&[99, 264]);
        cases.extend(ARRANGEMENTS.map(|arrangement| case.clone().arranged(arrangement)));
        cases.push(case.values(Values::Special));
    }
    cases
}

fn backward_bench_cases(spec: &OpSpec) -> Vec<Case> {
    [DType::BF16, DType::F32].map(|dtype| Case::new(spec, dtype)).to_vec()
}
