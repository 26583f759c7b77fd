//! The cases of `sample`: what every kernel must pass, and what is timed.

use super::{
    Forward, LOGPROB, MIN_P, PER_ROW, POSITION, RAW, SEED, TEMPERATURE, TOP_K, TOP_P, VOCAB, reference,
};
use crate::lab::{ArgPlan, Arrangement, Array, Case, Fill, Inputs, Provable, Real, Values};
use crate::op::{Attrs, Op};
use crate::ops::FLOATS;
use crate::tensor::{DType, Random};

const PARAMETERS: [usize; 4] = [TEMPERATURE, TOP_K, TOP_P, MIN_P];

impl Provable for Forward {
    fn reference<R: Real>(inputs: &Inputs<'_, R>, attrs: &Attrs) -> Vec<Option<Array<R>>> {
        reference::forward(inputs, attrs)
    }

    fn plan(case: &Case) -> Vec<Option<ArgPlan>> {
        let [rows, columns] = case.sizes[..] else { unreachable!("two sizes") };
        let plan = |arg: usize| {
            let by_row = PER_ROW.contains(&arg);
            let shape = if by_row { vec![rows] } else { vec![rows, columns] };
            let dtype = match arg {
                SEED | POSITION => DType::I64,
                TOP_K | super::TOKEN => DType::I32,
                _ if by_row => DType::F32,
                _ => case.dtype,
            };
            let fill = if by_row { Fill::Generated(parameters) } else { Fill::Normal(0.0, 3.0) };
            Some(ArgPlan { shape, dtype, fill, batch_dim: Some(0) })
        };
        let args = Self::SPEC.args.iter().enumerate();
        args.map(|(arg, spec)| if spec.optional && !case.gives(arg) { None } else { plan(arg) }).collect()
    }

    fn constrain(case: &mut Case) {
        case.sizes[1] = case.sizes[1].max(1);
        case.set(VOCAB, case.attrs.int(VOCAB).clamp(0, case.sizes[1] as i64) as f64);
    }

    fn cases() -> Vec<Case> {
        let mut cases = Vec::new();
        for dtype in FLOATS {
            let bare = Case::new(&Self::SPEC, dtype);
            let full = PARAMETERS.into_iter().fold(bare.clone().give(LOGPROB), Case::give);
            // Empty, one column, sizes one less and one more than vectors and blocks.
            for sizes in [[0, 8], [1, 1], [16, 7], [33, 64], [16, 257], [20, 1023], [16, 4099]] {
                cases.push(full.clone().sizes(&sizes));
                cases.push(bare.clone().sizes(&sizes));
            }
            cases.push(full.clone().sizes(&[9, 49_152]));
            for (arg, rows) in PARAMETERS.into_iter().zip([16, 17, 18, 19]) {
                cases.push(bare.clone().give(arg).give(LOGPROB).sizes(&[rows, 700]));
            }
            cases.push(full.clone().give(RAW).sizes(&[12, 300]));
            cases.push(full.clone().give(RAW).attr(VOCAB, 290.0).sizes(&[12, 300]));
            cases.push(full.clone().attr(VOCAB, 1.0).sizes(&[3, 40]));
            let case = full.sizes(&[33, 264]);
            for arrangement in [Arrangement::PaddedRows, Arrangement::Transposed, Arrangement::Misaligned] {
                cases.push(case.clone().arranged(arrangement));
            }
            cases.push(case.clone().values(Values::Large));
            cases.push(case.clone().give(RAW).values(Values::Special));
            cases.push(case.values(Values::Special));
        }
        cases
    }

    fn bench_cases() -> Vec<Case> {
        let mut cases = Vec::new();
        for dtype in [DType::BF16, DType::F32] {
            for sizes in [[1, 49_152], [1, 151_936], [32, 151_936], [256, 131_072]] {
                let case = Case::new(&Self::SPEC, dtype).sizes(&sizes).give(TEMPERATURE).give(LOGPROB);
                cases.push(case.clone());
                cases.push(case.give(TOP_K).give(TOP_P));
            }
        }
        cases
    }
}

/// Parameters of every kind, on the borders and beyond them too, in another order for each argument.
fn parameters(case: &Case, seed: u64) -> Vec<Vec<f64>> {
    let rows = case.sizes[0];
    let mut random = Random::new(seed);
    let of = |values: &[f64], shift: usize| -> Vec<f64> {
        (0..rows).map(|row| values[(row * (shift + 1) + shift) % values.len()]).collect()
    };
    let mut all = vec![Vec::new(); Forward::SPEC.args.len()];
    all[SEED] = (0..rows).map(|_| random.below(1 << 40) as f64 - (1u64 << 39) as f64).collect();
    all[POSITION] = (0..rows).map(|_| random.below(10_000) as f64).collect();
    all[TEMPERATURE] = of(&[1.0, 0.0, 0.7, 2.5, 0.05, 1e-6, 30.0], 0);
    all[TOP_K] = of(&[0.0, 1.0, 40.0, 3.0, -1.0, 1e6], 1);
    all[TOP_P] = of(&[1.0, 0.9, 0.5, 0.0, 0.999, 2.0, 1e-3], 2);
    all[MIN_P] = of(&[0.0, 0.05, 0.5, 1.0, 1e-4, 3.0], 0);
    all
}
