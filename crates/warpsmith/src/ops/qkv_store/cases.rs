//! The cases of `qkv_store`.

use super::{COS, Forward, K_SCALE, K_WEIGHT, POSITIONS, Q_WEIGHT, SIN, V_SCALE, reference};
use crate::lab::{ArgPlan, Arrangement, Array, Case, Fill, Inputs, Provable, Real, Values};
use crate::op::{Attrs, Op};
use crate::ops::FLOATS;
use crate::ops::kv_store::cases::constrain_store;
use crate::ops::rope::{LAYOUT, ROTARY_DIM, SCALE, THETA};
use crate::tensor::DType;

/// The option for the type of the caches of a case; calls give it with their tensors.
const TO: usize = 5;

impl Provable for Forward {
    fn reference<R: Real>(inputs: &Inputs<'_, R>, attrs: &Attrs) -> Vec<Option<Array<R>>> {
        reference::stored(inputs, attrs)
    }

    fn plan(case: &Case) -> Vec<Option<ArgPlan>> {
        let [tokens, heads, kv_heads, head_dim, page_size, pages, num_scales] = case.sizes[..] else {
            unreachable!("seven sizes")
        };
        let rotary_dim = match case.attrs.int(ROTARY_DIM) as usize {
            0 => head_dim,
            some => some,
        };
        // One of the types has the narrow indices, so that cases reach both kinds.
        let dtype = if case.dtype == DType::F16 { DType::I32 } else { DType::I64 };
        let indices = |fill| Some(ArgPlan { shape: vec![tokens], dtype, fill, batch_dim: Some(0) });
        let table = || ArgPlan::shared(&[TABLE_ROWS, rotary_dim / 2], DType::F32);
        let weight = || ArgPlan::shared(&[head_dim], case.dtype);
        let scale = || ArgPlan {
            shape: vec![num_scales],
            dtype: DType::F32,
            fill: Fill::Normal(0.5, 0.05),
            batch_dim: None,
        };
        let given = |index: usize, plan: Option<ArgPlan>| plan.filter(|_| case.gives(index));
        let cache_dtype = [case.dtype, DType::F8E4M3, DType::F8E5M2][case.attrs.choice(TO)];
        let cache = || ArgPlan::shared(&[pages, page_size, kv_heads, head_dim], cache_dtype);
        let positions = Fill::Below(if case.gives(COS) { TABLE_ROWS } else { LARGEST_POSITION });
        vec![
            indices(Fill::Distinct(pages * page_size)),
            given(POSITIONS, indices(positions)),
            given(COS, table()),
            given(SIN, table()),
            given(Q_WEIGHT, weight()),
            given(K_WEIGHT, weight()),
            given(K_SCALE, Some(scale())),
            given(V_SCALE, Some(scale())),
            ArgPlan::batched(&[tokens, heads, head_dim], case.dtype),
            cache(),
            cache(),
        ]
    }

    fn constrain(case: &mut Case) {
        constrain_store(case, [3, 2, 4, 5, 6], [POSITIONS, COS, SIN, K_SCALE, V_SCALE], TO);
        // Queries, keys and values.
        case.sizes[1] = case.sizes[1].max(2 * case.sizes[2]);
    }

    fn cases() -> Vec<Case> {
        let mut cases = Vec::new();
        for dtype in FLOATS {
            let plain = Case::new(&Self::SPEC, dtype);
            let rope = plain.clone().give(POSITIONS);
            let normed = |case: &Case| case.clone().give(Q_WEIGHT).give(K_WEIGHT);
            let full = normed(&rope);
            let tables = full.clone().give(COS).give(SIN);
            for sizes in [
                [0, 6, 2, 64, 4, 3, 1],
                [3, 0, 0, 64, 4, 3, 1],
                [3, 5, 0, 64, 4, 3, 1],
                [2, 4, 2, 64, 4, 3, 1],
                [1, 3, 1, 2, 1, 1, 1],
                [5, 7, 2, 6, 2, 4, 1],
                [9, 32, 8, 128, 16, 2, 1],
                [70, 6, 2, 64, 16, 6, 1],
                [3, 9, 3, 256, 1, 4, 1],
                [4, 9, 4, 96, 4, 4, 1],
            ] {
                cases.extend([&plain, &rope, &normed(&plain), &full].map(|case| case.clone().sizes(&sizes)));
            }
            for layout in [0.0, 1.0] {
                let partly = full.clone().sizes(&[20, 8, 2, 80, 16, 3, 1]).attr(ROTARY_DIM, 32.0);
                cases.push(partly.attr(LAYOUT, layout));
                cases.push(full.clone().sizes(&[6, 8, 2, 128, 4, 4, 1]).attr(LAYOUT, layout));
                cases.push(tables.clone().sizes(&[12, 12, 4, 128, 8, 3, 1]).attr(LAYOUT, layout));
                cases.push(
                    tables.clone().sizes(&[9, 5, 1, 20, 8, 2, 1]).attr(ROTARY_DIM, 14.0).attr(LAYOUT, layout),
                );
            }
            cases.push(rope.clone().sizes(&[7, 8, 3, 64, 4, 4, 1]).attr(THETA, 500_000.0).attr(SCALE, 0.25));
            for to in [1.0, 2.0] {
                let eight = |case: &Case| case.clone().attr(TO, to);
                let scaled = |case: &Case| eight(case).give(K_SCALE).give(V_SCALE);
                cases.push(eight(&plain).sizes(&[11, 8, 2, 64, 4, 5, 1]));
                cases.push(eight(&full).sizes(&[11, 8, 2, 128, 4, 5, 1]));
                cases.push(scaled(&plain).sizes(&[11, 7, 3, 20, 4, 5, 1]));
                cases.push(scaled(&plain).sizes(&[10, 6, 2, 64, 4, 4, 1]).values(Values::Large));
                cases.push(scaled(&full).sizes(&[33, 16, 4, 128, 16, 3, 4]));
                cases.push(scaled(&full).sizes(&[10, 12, 5, 64, 4, 4, 5]).attr(LAYOUT, 1.0));
                cases.push(scaled(&full).sizes(&[10, 7, 3, 80, 4, 4, 3]).attr(ROTARY_DIM, 32.0));
                cases.push(scaled(&tables).sizes(&[10, 8, 3, 256, 4, 4, 3]));
            }
            let scaled = full.clone().attr(TO, 1.0).give(K_SCALE).give(V_SCALE);
            let scaled = scaled.sizes(&[13, 9, 3, 64, 4, 5, 3]);
            for case in
                [scaled, full.clone().sizes(&[13, 9, 3, 64, 4, 5, 1]), plain.sizes(&[13, 9, 3, 40, 4, 5, 1])]
            {
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

    fn bench_cases() -> Vec<Case> {
        let bf16 = Case::new(&Self::SPEC, DType::BF16).give(POSITIONS);
        let normed = bf16.clone().give(Q_WEIGHT).give(K_WEIGHT);
        let sizes =
            [[1, 32, 8, 128, 64, 256, 1], [128, 48, 8, 128, 16, 1024, 1], [8192, 48, 8, 128, 16, 1024, 1]];
        let eight = normed.clone().attr(TO, 1.0).give(K_SCALE).give(V_SCALE);
        [bf16, normed, eight].iter().flat_map(|case| sizes.map(|sizes| case.clone().sizes(&sizes))).collect()
    }
}

/// Rows of the tables of a case.
const TABLE_ROWS: usize = 50;
/// Positions of a case without tables.
const LARGEST_POSITION: usize = 131_072;
