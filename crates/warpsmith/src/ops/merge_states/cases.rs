//! The cases of `merge_states`: what every kernel must pass, and what is timed.

use super::{COUNTS, Forward, LSE, TO, reference};
use crate::lab::{ArgPlan, Arrangement, Array, Case, Fill, Inputs, Provable, Real, Values};
use crate::op::{Attrs, Op};
use crate::ops::FLOATS;
use crate::tensor::DType;

impl Provable for Forward {
    fn reference<R: Real>(inputs: &Inputs<'_, R>, _: &Attrs) -> Vec<Option<Array<R>>> {
        reference::merged(inputs)
    }

    fn plan(case: &Case) -> Vec<Option<ArgPlan>> {
        let [tokens, parts, heads, head_dim] = case.sizes[..] else { unreachable!("four sizes") };
        let plan = |shape: &[usize], dtype, fill, batch_dim| {
            Some(ArgPlan { shape: shape.to_vec(), dtype, fill, batch_dim: Some(batch_dim) })
        };
        let normal = Fill::Normal(0.0, 1.0);
        let to = [case.dtype, DType::F32, DType::F16, DType::BF16][case.attrs.choice(TO)];
        vec![
            plan(&[parts, tokens, heads, head_dim], case.dtype, normal, 1),
            plan(&[parts, tokens, heads], DType::F32, Fill::Normal(3.0, 2.0), 1),
            plan(&[tokens], DType::I32, Fill::Below(parts + 1), 0).filter(|_| case.gives(COUNTS)),
            plan(&[tokens, heads, head_dim], to, normal, 0),
            plan(&[tokens, heads], DType::F32, normal, 0).filter(|_| case.gives(LSE)),
        ]
    }

    fn cases() -> Vec<Case> {
        let mut cases = Vec::new();
        for dtype in FLOATS {
            let case = Case::new(&Self::SPEC, dtype);
            for sizes in [
                [0, 2, 4, 64],
                [3, 0, 2, 8],
                [1, 1, 1, 1],
                [5, 2, 3, 7],
                [9, 3, 8, 64],
                [4, 5, 4, 80],
                [2, 33, 2, 128],
                [70, 2, 1, 128],
                [3, 4, 2, 256],
                [2, 2, 1, 4099],
            ] {
                cases.push(case.clone().sizes(&sizes));
                cases.push(case.clone().sizes(&sizes).give(LSE).give(COUNTS));
            }
            for to in [1.0, 2.0, 3.0] {
                cases.push(case.clone().sizes(&[6, 4, 3, 64]).give(LSE).attr(TO, to));
            }
            let case = case.sizes(&[13, 6, 3, 40]).give(LSE).give(COUNTS);
            for arrangement in [Arrangement::PaddedRows, Arrangement::Transposed, Arrangement::Misaligned] {
                cases.push(case.clone().arranged(arrangement));
            }
            cases.push(case.clone().values(Values::Large));
            cases.push(case.values(Values::Special));
        }
        cases
    }

    fn bench_cases() -> Vec<Case> {
        let case = |dtype, sizes: &[usize]| Case::new(&Self::SPEC, dtype).sizes(sizes).give(LSE);
        vec![
            case(DType::BF16, &[8192, 2, 32, 128]),
            case(DType::BF16, &[128, 2, 32, 128]),
            case(DType::F32, &[64, 16, 32, 128]).attr(TO, 3.0),
            case(DType::F32, &[8192, 4, 32, 128]).attr(TO, 3.0),
        ]
    }
}
