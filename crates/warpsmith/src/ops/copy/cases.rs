//! The cases of `copy`.

use super::{Forward, ORDER, SWAPPED, reference};
use crate::lab::{ArgPlan, Arrangement, Array, Case, Fill, Inputs, Provable, Real, Values};
use crate::op::{Attrs, Op, OpSpec};
use crate::tensor::DType;

impl Provable for Forward {
    fn reference<R: Real>(inputs: &Inputs<'_, R>, attrs: &Attrs) -> Vec<Option<Array<R>>> {
        reference::copied(inputs, attrs)
    }

    fn plan(case: &Case) -> Vec<Option<ArgPlan>> {
        plan(case)
    }

    fn cases() -> Vec<Case> {
        cases(&Self::SPEC)
    }

    fn bench_cases() -> Vec<Case> {
        bench_cases(&Self::SPEC)
    }
}

fn plan(case: &Case) -> Vec<Option<ArgPlan>> {
    let [batch, rows, cols] = case.sizes[..] else { unreachable!("three sizes") };
    let fill = match case.dtype {
        DType::Bool => Fill::Below(2),
        dtype if dtype.is_float() => Fill::Normal(0.0, 1.0),
        _ => Fill::Below(100),
    };
    let arg = |shape: [usize; 3]| {
        Some(ArgPlan { shape: shape.to_vec(), dtype: case.dtype, fill, batch_dim: Some(0) })
    };
    let swapped = case.attrs.choice(ORDER) == SWAPPED;
    vec![arg([batch, rows, cols]), arg(if swapped { [batch, cols, rows] } else { [batch, rows, cols] })]
}

fn cases(spec: &OpSpec) -> Vec<Case> {
    let mut cases = Vec::new();
    for dtype in DType::ALL {
        for order in 0..2 {
            let case = Case::new(spec, dtype).attr(ORDER, f64::from(order));
            // Empty, one element, one less and one more than vectors and tiles.
            for sizes in [
                [0, 4, 8],
                [2, 0, 3],
                [1, 1, 1],
                [3, 5, 7],
                [2, 31, 33],
                [1, 64, 64],
                [2, 63, 129],
                [1, 130, 257],
                [5, 1, 100],
                [70, 3, 2],
            ] {
                cases.push(case.clone().sizes(&sizes));
            }
            let case = case.sizes(&[3, 40, 72]);
            for arrangement in [
                Arrangement::PaddedRows,
                Arrangement::Transposed,
                Arrangement::Misaligned,
                Arrangement::HeadsFirst,
            ] {
                cases.push(case.clone().arranged(arrangement));
            }
            cases.push(case.values(Values::Special));
        }
    }
    cases
}

fn bench_cases(spec: &OpSpec) -> Vec<Case> {
    let mut cases = Vec::new();
    for dtype in [DType::BF16, DType::F32, DType::U8] {
        let case = Case::new(spec, dtype);
        cases.push(case.clone());
        cases.push(case.clone().attr(ORDER, 1.0));
        cases.push(case.attr(ORDER, 1.0).sizes(&[512, 128, 64]));
    }
    cases.push(Case::new(spec, DType::BF16).sizes(&[1, 128, 4096]));
    cases
}
