//! The cases of `penalize`: what every kernel must pass, and what is timed.

use super::{BIAS, COUNTS, FREQUENCY, Forward, IDS, LOGITS, PRESENCE, REPETITION, reference};
use crate::lab::{ArgPlan, Arrangement, Array, Case, Fill, Inputs, Provable, Real, Values};
use crate::op::{Attrs, Op};
use crate::ops::FLOATS;
use crate::tensor::{DType, Random};

impl Provable for Forward {
    fn reference<R: Real>(inputs: &Inputs<'_, R>, _: &Attrs) -> Vec<Option<Array<R>>> {
        reference::forward(inputs)
    }

    fn plan(case: &Case) -> Vec<Option<ArgPlan>> {
        let [rows, slots, columns] = case.sizes[..] else { unreachable!("three sizes") };
        let plan = |arg: usize| {
            let (shape, dtype, fill) = match arg {
                IDS | COUNTS => (vec![rows, slots], DType::I32, Fill::Generated(lists)),
                BIAS => (vec![rows, slots], DType::F32, Fill::Normal(0.0, 5.0)),
                REPETITION => (vec![rows], DType::F32, Fill::Normal(1.2, 0.05)),
                PRESENCE | FREQUENCY => (vec![rows], DType::F32, Fill::Normal(0.3, 0.3)),
                _ => (vec![rows, columns], case.dtype, Fill::Normal(0.0, 3.0)),
            };
            Some(ArgPlan { shape, dtype, fill, batch_dim: Some(0) })
        };
        (0..=LOGITS)
            .map(|arg| if Self::SPEC.args[arg].optional && !case.gives(arg) { None } else { plan(arg) })
            .collect()
    }

    fn cases() -> Vec<Case> {
        let mut cases = Vec::new();
        let optional = [BIAS, REPETITION, PRESENCE, FREQUENCY];
        for dtype in FLOATS {
            let bare = Case::new(&Self::SPEC, dtype);
            let full = optional.into_iter().fold(bare.clone(), Case::give);
            for sizes in
                [[0, 3, 8], [2, 0, 8], [2, 3, 0], [1, 1, 1], [3, 5, 7], [5, 300, 1000], [2, 257, 49_152]]
            {
                cases.push(full.clone().sizes(&sizes));
            }
            cases.extend(optional.map(|arg| bare.clone().give(arg).sizes(&[4, 20, 100])));
            cases.push(bare.sizes(&[3, 9, 30]));
            let case = full.sizes(&[9, 40, 264]);
            for arrangement in [Arrangement::PaddedRows, Arrangement::Transposed, Arrangement::Misaligned] {
                cases.push(case.clone().arranged(arrangement));
            }
            cases.push(case.clone().values(Values::Large));
            cases.push(case.values(Values::Special));
        }
        cases
    }

    fn bench_cases() -> Vec<Case> {
        let case = Case::new(&Self::SPEC, DType::F32).give(REPETITION).give(PRESENCE).give(FREQUENCY);
        [[1, 1024, 49_152], [256, 1024, 131_072]].map(|sizes| case.clone().sizes(&sizes)).to_vec()
    }
}

/// Distinct ids in each row, some of them no column, and counts of every kind.
fn lists(case: &Case, seed: u64) -> Vec<Vec<f64>> {
    let [rows, slots, columns] = case.sizes[..] else { unreachable!("three sizes") };
    let mut random = Random::new(seed);
    let mut all = vec![Vec::new(); LOGITS + 1];
    for _ in 0..rows {
        let mut row: Vec<f64> = random.distinct(slots, columns + slots).iter().map(|&id| id as f64).collect();
        row.iter_mut().filter(|_| random.below(5) == 0).for_each(|id| *id = -1.0);
        all[IDS].extend(row);
        all[COUNTS].extend((0..slots).map(|_| random.below(6) as f64 - 1.0));
    }
    all
}
