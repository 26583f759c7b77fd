//! The cases of `kv_store`.

use super::{COS, Forward, K_SCALE, POSITIONS, SIN, V_SCALE, reference};
use crate::lab::{ArgPlan, Arrangement, Array, Case, Fill, Inputs, Provable, Real, Values};
use crate::op::{Attrs, Op};
use crate::ops::FLOATS;
use crate::ops::rope::cases::make_rotatable;
use crate::ops::rope::{LAYOUT, ROTARY_DIM, SCALE, THETA};
use crate::tensor::DType;

/// The option for the type of the caches of a case; calls give it with their tensors.
const TO: usize = 4;

impl Provable for Forward {
    fn reference<R: Real>(inputs: &Inputs<'_, R>, attrs: &Attrs) -> Vec<Option<Array<R>>> {
        reference::stored(inputs, attrs)
    }

    fn plan(case: &Case) -> Vec<Option<ArgPlan>> {
        let [tokens, heads, head_dim, page_size, pages, num_scales] = case.sizes[..] else {
            unreachable!("six sizes")
        };
        let rotary_dim = match case.attrs.int(ROTARY_DIM) as usize {
            0 => head_dim,
            some => some,
        };
        // Heads do not depend on each other.
        let heads_at = |shape: &[usize], dim: usize, dtype| {
            let fill = Fill::Normal(0.0, 1.0);
            Some(ArgPlan { shape: shape.to_vec(), dtype, fill, batch_dim: Some(dim) })
        };
        // One of the types has the narrow indices, so that cases reach both kinds.
        let dtype = if case.dtype == DType::F16 { DType::I32 } else { DType::I64 };
        let indices = |fill| ArgPlan { shape: vec![tokens], dtype, fill, batch_dim: None };
        let table = || ArgPlan::shared(&[TABLE_ROWS, rotary_dim / 2], DType::F32);
        let scale = || ArgPlan {
            shape: vec![num_scales],
            dtype: DType::F32,
            fill: Fill::Normal(0.5, 0.05),
            batch_dim: (num_scales > 1).then_some(0),
        };
        let given = |index: usize, plan: Option<ArgPlan>| plan.filter(|_| case.gives(index));
        let positions = indices(Fill::Below(if case.gives(COS) { TABLE_ROWS } else { LARGEST_POSITION }));
        let cache_dtype = [case.dtype, DType::F8E4M3, DType::F8E5M2][case.attrs.choice(TO)];
        let cache = heads_at(&[pages, page_size, heads, head_dim], 2, cache_dtype);
        let x = heads_at(&[tokens, heads, head_dim], 1, case.dtype);
        vec![
            x.clone(),
            x,
            Some(indices(Fill::Distinct(pages * page_size))),
            given(POSITIONS, Some(positions)),
            given(COS, table()),
            given(SIN, table()),
            given(K_SCALE, Some(scale())),
            given(V_SCALE, Some(scale())),
            cache.clone(),
            cache,
        ]
    }

    fn constrain(case: &mut Case) {
        constrain_store(case, [2, 1, 3, 4, 5], [POSITIONS, COS, SIN, K_SCALE, V_SCALE], TO);
    }

    fn cases() -> Vec<Case> {
        let mut cases = Vec::new();
        for dtype in FLOATS {
            let plain = Case::new(&Self::SPEC, dtype);
            for sizes in [
                [0, 2, 64, 4, 3, 1],
                [3, 0, 64, 4, 3, 1],
                [1, 1, 2, 1, 1, 1],
                [5, 3, 6, 2, 4, 3],
                [9, 8, 64, 16, 2, 8],
                [70, 2, 128, 16, 6, 1],
                [3, 5, 1032, 1, 4, 1],
            ] {
                cases.push(plain.clone().sizes(&sizes));
                if sizes[2] <= 512 {
                    cases.push(plain.clone().sizes(&sizes).give(POSITIONS));
                }
            }
            let rope = plain.clone().give(POSITIONS);
            let tables = rope.clone().give(COS).give(SIN);
            cases.push(rope.clone().sizes(&[20, 4, 80, 16, 3, 1]).attr(ROTARY_DIM, 32.0).attr(LAYOUT, 1.0));
            cases.push(rope.clone().sizes(&[7, 3, 64, 4, 4, 1]).attr(THETA, 500_000.0).attr(SCALE, 0.25));
            cases.push(tables.clone().sizes(&[9, 3, 20, 8, 2, 3]).attr(ROTARY_DIM, 14.0));
            cases.push(tables.clone().sizes(&[12, 8, 128, 8, 3, 1]).attr(LAYOUT, 1.0));
            for to in [1.0, 2.0] {
                let eight = |case: &Case| case.clone().attr(TO, to);
                let scaled = |case: &Case| eight(case).give(K_SCALE).give(V_SCALE);
                cases.push(eight(&plain).sizes(&[11, 4, 64, 4, 5, 1]));
                cases.push(scaled(&plain).sizes(&[11, 3, 20, 4, 5, 1]));
                cases.push(scaled(&plain).sizes(&[33, 4, 128, 16, 3, 4]));
                cases.push(scaled(&plain).sizes(&[10, 2, 64, 4, 4, 1]).values(Values::Large));
                cases.push(scaled(&rope).sizes(&[10, 5, 64, 4, 4, 5]).attr(LAYOUT, 1.0));
                cases.push(scaled(&rope).sizes(&[10, 3, 80, 4, 4, 3]).attr(ROTARY_DIM, 32.0));
                cases.push(scaled(&tables).sizes(&[10, 3, 64, 4, 4, 3]));
            }
            let scaled = rope.clone().attr(TO, 1.0).give(K_SCALE).give(V_SCALE);
            for case in [
                plain.sizes(&[13, 2, 40, 4, 5, 1]),
                rope.sizes(&[13, 3, 48, 4, 5, 1]).attr(ROTARY_DIM, 16.0),
                scaled.sizes(&[13, 3, 64, 4, 5, 3]),
            ] {
                for arrangement in [Arrangement::PaddedRows, Arrangement::Transposed, Arrangement::Misaligned]
                {
                    cases.push(case.clone().arranged(arrangement));
                }
                cases.push(case.values(Values::Special));
            }
        }
        cases
    }

    fn bench_cases() -> Vec<Case> {
        let bf16 = Case::new(&Self::SPEC, DType::BF16);
        let rope = bf16.clone().give(POSITIONS);
        let scaled = bf16.clone().attr(TO, 1.0).give(K_SCALE).give(V_SCALE);
        let kinds = [bf16, rope.clone(), scaled.clone(), scaled.give(POSITIONS)];
        let sizes = [[128, 8, 128, 16, 1024, 1], [8192, 8, 128, 16, 1024, 1]];
        let mut cases: Vec<Case> =
            kinds.iter().flat_map(|kind| sizes.map(|sizes| kind.clone().sizes(&sizes))).collect();
        cases.push(Case::new(&Self::SPEC, DType::F32).sizes(&sizes[1]));
        cases
    }
}

/// Rows of the tables of a case.
const TABLE_ROWS: usize = 50;
/// Positions of a case without tables.
const LARGEST_POSITION: usize = 131_072;

/// For `kv_store` and `qkv_store`: makes heads that can be rotated, slots for all tokens, scales for all heads or one,
/// and drops options without effect. The sizes are the length of a head, KV heads, the size of a page, pages and
/// scales.
pub(in crate::ops) fn constrain_store(
    case: &mut Case,
    [head_dim, heads, page_size, pages, num_scales]: [usize; 5],
    [positions, cos, sin, k_scale, v_scale]: [usize; 5],
    to: usize,
) {
    if case.gives(positions) {
        make_rotatable(case, head_dim);
    } else {
        case.withhold(cos);
        case.withhold(sin);
    }
    // The tables of cases that do not rotate have this size too.
    case.set(ROTARY_DIM, (case.attrs.int(ROTARY_DIM) as usize).min(case.sizes[head_dim]) as f64);
    // Two tokens must not write to one slot.
    case.sizes[page_size] = case.sizes[page_size].max(1);
    case.sizes[pages] = case.sizes[pages].max(case.sizes[0].div_ceil(case.sizes[page_size]));
    if case.attrs.choice(to) == 0 {
        case.withhold(k_scale);
        case.withhold(v_scale);
    }
    if case.sizes[num_scales] != 1 {
        case.sizes[num_scales] = case.sizes[heads];
    }
}
