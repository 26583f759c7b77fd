//! The cases of `kv_copy`: what every kernel must pass, and what is timed.

use super::{Forward, reference};
use crate::lab::{ArgPlan, Arrangement, Array, Case, Fill, Inputs, Provable, Real, Values};
use crate::op::{Attrs, Op};
use crate::tensor::DType;

impl Provable for Forward {
    fn reference<R: Real>(inputs: &Inputs<'_, R>, _: &Attrs) -> Vec<Option<Array<R>>> {
        reference::copied(inputs)
    }

    fn plan(case: &Case) -> Vec<Option<ArgPlan>> {
        let [num_pairs, ref cache @ ..] = case.sizes[..] else { unreachable!("six sizes") };
        let pairs = ArgPlan {
            shape: vec![num_pairs, 2],
            // One of the types has the narrow pairs, so that cases reach both kinds.
            dtype: if case.dtype == DType::F16 { DType::I32 } else { DType::I64 },
            fill: Fill::Distinct(cache[1]),
            batch_dim: None,
        };
        let fill = match case.dtype {
            DType::Bool => Fill::Below(2),
            dtype if dtype.is_float() => Fill::Normal(0.0, 1.0),
            _ => Fill::Below(100),
        };
        // Layers do not depend on each other.
        let cache = ArgPlan { shape: cache.to_vec(), dtype: case.dtype, fill, batch_dim: Some(0) };
        vec![Some(pairs), Some(cache)]
    }

    fn constrain(case: &mut Case) {
        // A page must not be read and written, nor written twice.
        case.sizes[2] = case.sizes[2].max(2 * case.sizes[0]);
    }

    fn cases() -> Vec<Case> {
        let mut cases = Vec::new();
        for dtype in DType::ALL {
            let case = Case::new(&Self::SPEC, dtype);
            for sizes in [
                [0, 2, 4, 2, 2, 8],
                [3, 0, 8, 2, 2, 8],
                [1, 1, 2, 1, 1, 1],
                [2, 3, 7, 4, 3, 5],
                [3, 2, 9, 16, 2, 64],
                [5, 4, 12, 1, 1, 16],
                [9, 1, 20, 16, 4, 128],
            ] {
                cases.push(case.clone().sizes(&sizes));
            }
            let case = case.sizes(&[4, 3, 11, 4, 2, 24]);
            for arrangement in [Arrangement::PaddedRows, Arrangement::Transposed, Arrangement::Misaligned] {
                cases.push(case.clone().arranged(arrangement));
            }
            cases.push(case.values(Values::Special));
        }
        cases
    }

    fn bench_cases() -> Vec<Case> {
        let case = Case::new(&Self::SPEC, DType::BF16);
        // Two layers are the keys and values of one.
        let sizes = [
            [16, 64, 128, 16, 8, 128],
            [2048, 1, 8192, 16, 8, 128],
            [2048, 2, 8192, 16, 8, 128],
            [64, 64, 256, 16, 8, 128],
        ];
        let mut cases: Vec<Case> = sizes.iter().map(|sizes| case.clone().sizes(sizes)).collect();
        cases.push(Case::new(&Self::SPEC, DType::F8E4M3).sizes(&sizes[1]));
        cases
    }
}
