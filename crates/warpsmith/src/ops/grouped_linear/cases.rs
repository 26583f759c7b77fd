//! The cases of `grouped_linear`: what every kernel must pass, and what is timed.

use super::{ACT, BIAS, COUNTS, Forward, GATE, INDEX, RESIDUAL, ROW_SCALE, SCALE, SPEC, reference};
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
        let [rows, groups, n, k, x_rows] = case.sizes[..] else { unreachable!("five sizes") };
        let x_rows = if case.gives(INDEX) { x_rows } else { rows };
        let w_rows = if case.attrs.choice(GATE) == 0 { n } else { 2 * n };
        let given = |index: usize, plan: Option<ArgPlan>| plan.filter(|_| case.gives(index));
        // A row's group follows from its number: no part of the rows is a call of its own.
        let plan = |shape: &[usize], dtype: DType, fill: Fill| {
            Some(ArgPlan { shape: shape.to_vec(), dtype, fill, batch_dim: None })
        };
        let normal = Fill::Normal(0.0, 1.0);
        // One of the types has the wide index and one the narrow scales, so that cases reach both kinds.
        let index_dtype = if case.dtype == DType::F16 { DType::I64 } else { DType::I32 };
        let scale_dtype = if case.dtype == DType::BF16 { DType::BF16 } else { DType::F32 };
        let index = plan(&[rows], index_dtype, Fill::Generated(draw_index));
        let row_scale = plan(&[rows], scale_dtype, Fill::Normal(0.5, 0.25));
        vec![
            plan(&[x_rows, k], case.dtype, Fill::Factor),
            plan(&[groups, w_rows, k], case.dtype, Fill::Factor),
            plan(&[groups], DType::I32, Fill::Generated(draw_counts)),
            given(INDEX, index),
            given(BIAS, plan(&[groups, w_rows], case.dtype, normal)),
            given(ROW_SCALE, row_scale),
            given(RESIDUAL, plan(&[rows, n], case.dtype, normal)),
            plan(&[rows, n], case.dtype, normal),
        ]
    }

    fn cases() -> Vec<Case> {
        let mut cases = Vec::new();
        for dtype in FLOATS {
            let plain = Case::new(&SPEC, dtype);
            let option = |case: &Case, activation: Activation, gate: Gate| {
                case.clone().attr(ACT, activation as u8 as f64).attr(GATE, gate as u8 as f64)
            };
            let full = |case: &Case| {
                let given = [BIAS, INDEX, ROW_SCALE, RESIDUAL].into_iter().fold(case.clone(), Case::give);
                given.attr(SCALE, -0.5)
            };
            // Rows, groups, n, k, and rows of x where there is an index.
            for (at, sizes) in [
                // Empty in each way; without groups, and without rows of x, there are only zeros.
                [0, 4, 8, 8, 3],
                [3, 0, 8, 8, 3],
                [3, 4, 0, 8, 3],
                [3, 4, 8, 0, 3],
                [3, 4, 8, 8, 0],
                [1, 1, 1, 1, 1],
                [3, 40, 17, 24, 5],
                [19, 5, 33, 65, 7],
                [65, 3, 31, 40, 100],
                [300, 4, 130, 24, 16],
                [70, 2, 64, 129, 3],
                [600, 3, 24, 40, 40],
                [40, 4, 20, 1030, 8],
            ]
            .into_iter()
            .enumerate()
            {
                let gate = [Gate::None, Gate::Halves, Gate::Interleaved][at % 3];
                cases.push(plain.clone().sizes(&sizes));
                cases.push(full(&option(&plain, Activation::Silu, gate)).sizes(&sizes));
            }
            let case = plain.clone().sizes(&[19, 4, 33, 40, 11]);
            for activation in Activation::ALL {
                for gate in [Gate::None, Gate::Halves] {
                    cases.push(option(&case, *activation, gate).give(BIAS));
                }
            }
            for given in [BIAS, INDEX, ROW_SCALE, RESIDUAL] {
                cases.push(case.clone().give(given));
                cases.push(
                    option(&case, Activation::GeluTanh, Gate::Interleaved).give(given).attr(SCALE, 3.0),
                );
            }
            for arrangement in [Arrangement::PaddedRows, Arrangement::Transposed, Arrangement::Misaligned] {
                cases.push(plain.clone().sizes(&[24, 4, 40, 64, 16]).arranged(arrangement));
                for gate in [Gate::None, Gate::Halves, Gate::Interleaved] {
                    let case = option(&plain, Activation::Silu, gate).sizes(&[35, 3, 67, 72, 9]);
                    cases.push(full(&case).arranged(arrangement));
                    cases.push(case.give(BIAS).arranged(arrangement));
                }
            }
            cases.push(full(&case).in_place());
            cases.push(case.clone().give(RESIDUAL).in_place());
            for values in [Values::Large, Values::Special] {
                cases.push(case.clone().values(values));
                cases.push(full(&case).values(values));
            }
        }
        cases
    }

    fn bench_cases() -> Vec<Case> {
        let mut cases = Vec::new();
        for dtype in [DType::BF16, DType::F32] {
            let case = |sizes: [usize; 4]| Case::new(&SPEC, dtype).sizes(&[&sizes[..], &[1]].concat());
            for rows in [8, 128, 2048] {
                cases.push(case([rows, 64, 512, 512]));
            }
            let gated = |case: Case| {
                let case = case.attr(ACT, Activation::Silu as u8 as f64);
                case.attr(GATE, Gate::Halves as u8 as f64)
            };
            cases.push(gated(case([512, 8, 2816, 1024])));
            cases.push(gated(case([32_768, 128, 768, 2048])).gpu_only());
            cases.push(case([32_768, 128, 2048, 768]).gpu_only());
            if dtype == DType::BF16 {
                let up = gated(case([32_768, 128, 768, 2048])).gpu_only();
                cases.extend([Values::Zipf, Values::AllToOne].map(|values| up.clone().values(values)));
            }
        }
        cases
    }
}

/// Counts of `groups` groups with at most `rows` rows in all, by the seed: of about the same size, very different, or all of one
/// group. Those of about the same size, which are timed too, have all rows; the others may leave some.
pub(super) fn counts(rows: usize, groups: usize, seed: u64) -> Vec<f64> {
    let mut rng = Random::new(seed.wrapping_mul(31) + COUNTS as u64);
    let mut counts = vec![0.0; groups];
    let kind = seed % 3;
    if groups == 0 {
        return counts;
    }
    let favourite = rng.below(groups as u64) as usize;
    let used = if kind == 1 { rows } else { rows - rng.below(rows as u64 / 2 + 1) as usize };
    for _ in 0..used {
        let group = rng.below(groups as u64) as usize;
        counts[match kind {
            1 => group,
            0 => favourite,
            _ => group * rng.below(groups as u64) as usize / groups,
        }] += 1.0;
    }
    counts
}

/// The counts of a case.
pub(super) fn counts_of(case: &Case, seed: u64) -> Vec<f64> {
    let (rows, groups) = (case.sizes[0], case.sizes[1]);
    let mut skewed = vec![0.0; groups];
    match case.values {
        _ if groups == 0 => {}
        Values::Zipf => {
            let (zipf, mut random) = (Zipf::new(groups), Random::new(seed));
            (0..rows).for_each(|_| skewed[zipf.draw(&mut random)] += 1.0);
        }
        Values::AllToOne => skewed[groups / 2] = rows as f64,
        _ => return counts(rows, groups, seed),
    }
    skewed
}

fn draw_counts(case: &Case, seed: u64) -> Vec<Vec<f64>> {
    let mut all = vec![Vec::new(); SPEC.args.len()];
    all[COUNTS] = counts_of(case, seed);
    all
}

/// Rows of x, some several times, some not at all; some rows are made from none.
fn draw_index(case: &Case, seed: u64) -> Vec<Vec<f64>> {
    let (rows, x_rows) = (case.sizes[0], case.sizes[4]);
    let mut rng = Random::new(seed.wrapping_mul(37) + INDEX as u64);
    let mut all = vec![Vec::new(); SPEC.args.len()];
    all[INDEX] = (0..rows)
        .map(|_| if x_rows == 0 || rng.below(8) == 0 { -1.0 } else { rng.below(x_rows as u64) as f64 })
        .collect();
    all
}
