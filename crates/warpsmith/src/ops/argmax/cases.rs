//! The cases of `argmax`: what every kernel must pass, and what is timed.

use super::{Forward, RESULTS, TO, reference};
use crate::lab::{ArgPlan, Arrangement, Array, Case, Fill, Inputs, Provable, ROW_SIZES, Real, Values};
use crate::op::{Attrs, Op};
use crate::ops::FLOATS;
use crate::tensor::{DType, Random};

impl Provable for Forward {
    fn reference<R: Real>(inputs: &Inputs<'_, R>, _: &Attrs) -> Vec<Option<Array<R>>> {
        reference::forward(inputs)
    }

    fn plan(case: &Case) -> Vec<Option<ArgPlan>> {
        let [num_tokens, n] = case.sizes[..] else { unreachable!("two sizes") };
        let out = RESULTS[case.attrs.choice(TO)];
        let fill = Fill::Generated(values);
        vec![
            Some(ArgPlan { shape: vec![num_tokens, n], dtype: case.dtype, fill, batch_dim: Some(0) }),
            Some(ArgPlan { shape: vec![num_tokens], dtype: out, fill, batch_dim: Some(0) }),
        ]
    }

    fn constrain(case: &mut Case) {
        case.sizes[1] = case.sizes[1].max(1);
    }

    fn cases() -> Vec<Case> {
        let mut cases = Vec::new();
        for dtype in FLOATS {
            // One of the types has the wide result, so that cases reach both kinds.
            let plain = Case::new(&Self::SPEC, dtype).attr(TO, (dtype == DType::BF16) as u8 as f64);
            cases.extend(ROW_SIZES.iter().map(|sizes| plain.clone().sizes(sizes)));
            // A vocabulary; rows of several pieces, the last of them short.
            cases.push(plain.clone().sizes(&[3, 151_936]));
            cases.push(plain.clone().sizes(&[2, 49_153]));
            let case = plain.sizes(&[33, 264]);
            for arrangement in [Arrangement::PaddedRows, Arrangement::Transposed, Arrangement::Misaligned] {
                cases.push(case.clone().arranged(arrangement));
            }
            cases.push(case.clone().values(Values::Large));
            cases.push(case.clone().values(Values::Special));
            cases.push(case.sizes(&[9, 40_003]).values(Values::Special));
        }
        cases
    }

    fn bench_cases() -> Vec<Case> {
        let mut cases = Vec::new();
        for dtype in [DType::BF16, DType::F32] {
            for sizes in [[1, 151_936], [32, 151_936], [256, 131_072]] {
                cases.push(Case::new(&Self::SPEC, dtype).sizes(&sizes));
            }
        }
        cases
    }
}

/// Normal numbers. Special rows have NaN among them, nothing else, or nothing but minus infinity besides.
fn values(case: &Case, seed: u64) -> Vec<Vec<f64>> {
    let [num_tokens, n] = case.sizes[..] else { unreachable!("two sizes") };
    let mut random = Random::new(seed);
    let scale = if case.values == Values::Large { 1000.0 } else { 1.0 };
    let mut x = Vec::with_capacity(num_tokens * n);
    for row in 0..num_tokens {
        let level = row as f64 / num_tokens as f64;
        for _ in 0..n {
            let value = scale * random.normal();
            // Rows of one exponent, down to the smallest subnormals.
            let value = match case.values {
                Values::Exponents => value * (case.dtype.smallest_subnormal().log2() * level).exp2(),
                _ => value,
            };
            let special = case.values == Values::Special;
            x.push(match (special, row % 5) {
                (true, 1) if random.below(4) == 0 => f64::NAN,
                (true, 2) => f64::NAN,
                (true, 3) if random.below(8) != 0 => f64::NAN,
                (true, 3) => f64::NEG_INFINITY,
                (true, 4) if random.below(16) == 0 => f64::INFINITY,
                _ => value,
            });
        }
    }
    vec![x, Vec::new()]
}
