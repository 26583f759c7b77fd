//! The cases of `attention`: what every kernel must pass, and what is timed.

use super::problem::{BLOCKS_KV, BLOCKS_Q, HEAD_DIMS};
use super::{
    BIAS, BLOCK_KV, BLOCK_Q, CAUSAL, DROPOUT, Forward, KV_STARTS, LSE, MASK, OFFSET, Q_STARTS, SCALE, SEED,
    SINKS, SOFTCAP, SPEC, WINDOW, reference,
};
use crate::lab::{ArgPlan, Arrangement, Array, Case, Fill, Inputs, Lengths, Provable, Real, Values};
use crate::op::Attrs;
use crate::ops::FLOATS;
use crate::tensor::DType;

impl Provable for Forward {
    fn reference<R: Real>(inputs: &Inputs<'_, R>, attrs: &Attrs) -> Vec<Option<Array<R>>> {
        reference::forward(inputs, attrs)
    }

    fn plan(case: &Case) -> Vec<Option<ArgPlan>> {
        let [batch, q_len, kv_len, num_heads, num_kv_heads, head_dim] = case.sizes[..] else {
            unreachable!("six sizes")
        };
        let normal = Fill::Normal(0.0, 1.0);
        let given = |index: usize, plan: ArgPlan| case.gives(index).then_some(plan);
        // What is dropped depends on the place in the batch.
        let batch_dim = (case.attrs.float(DROPOUT) == 0.0).then_some(0);
        let by_batch =
            |shape: &[usize], dtype, fill| ArgPlan { shape: shape.to_vec(), dtype, fill, batch_dim };
        let shared =
            |shape: &[usize], dtype, fill| ArgPlan { shape: shape.to_vec(), dtype, fill, batch_dim: None };
        let sinks = given(SINKS, shared(&[num_heads], DType::F32, normal));
        if case.gives(Q_STARTS) {
            // Requests over their own tokens have as many keys as queries; others also have none of either.
            let queries = Lengths { longest: q_len, shift: 0 };
            let keys = Lengths { longest: kv_len, shift: if q_len == kv_len { 0 } else { 3 } };
            let (q_len, kv_len) = (queries.sum(batch), keys.sum(batch));
            let starts = |lengths| Some(shared(&[batch + 1], DType::I32, Fill::Starts(lengths)));
            let q = shared(&[1, q_len, num_heads, head_dim], case.dtype, Fill::Exponent(case.dtype));
            let k = shared(&[1, kv_len, num_kv_heads, head_dim], case.dtype, Fill::Exponent(case.dtype));
            let lse = given(LSE, shared(&[1, num_heads, q_len], DType::F32, normal));
            let (q_starts, kv_starts) = (starts(queries), starts(keys));
            return vec![
                Some(q.clone()),
                Some(k.clone()),
                Some(ArgPlan { fill: Fill::Weighted, ..k }),
                q_starts,
                kv_starts,
                None,
                None,
                sinks,
                Some(q),
                lse,
            ];
        }
        let q = by_batch(&[batch, q_len, num_heads, head_dim], case.dtype, Fill::Exponent(case.dtype));
        let k = by_batch(&[batch, kv_len, num_kv_heads, head_dim], case.dtype, Fill::Exponent(case.dtype));
        // Which kind and shape of mask and bias a case gets, so that all are reached.
        let mask_dtype = if case.dtype == DType::F16 { DType::U8 } else { DType::Bool };
        let bias_dtype = if kv_len % 2 == 1 { DType::F32 } else { case.dtype };
        let mask = match q_len % 3 {
            0 => shared(&[1, 1, q_len, kv_len], mask_dtype, Fill::Below(2)),
            1 => by_batch(&[batch, 1, q_len, kv_len], mask_dtype, Fill::Below(2)),
            _ => by_batch(&[batch, num_heads, q_len, kv_len], mask_dtype, Fill::Below(2)),
        };
        let bias = match q_len % 3 {
            0 => shared(&[1, num_heads, q_len, kv_len], bias_dtype, normal),
            1 => shared(&[1, 1, q_len, kv_len], bias_dtype, normal),
            _ => by_batch(&[batch, num_heads, q_len, kv_len], bias_dtype, normal),
        };
        vec![
            Some(q.clone()),
            Some(k.clone()),
            Some(ArgPlan { fill: Fill::Weighted, ..k }),
            None,
            None,
            given(MASK, mask),
            given(BIAS, bias),
            sinks,
            Some(q),
            given(LSE, by_batch(&[batch, num_heads, q_len], DType::F32, normal)),
        ]
    }

    fn constrain(case: &mut Case) {
        case.sizes[5] = nearest(&HEAD_DIMS, case.sizes[5]);
        share_heads(&mut case.sizes[3..5]);
        if case.gives(Q_STARTS) {
            case.withhold(MASK);
            case.withhold(BIAS);
        }
        for (option, known) in [(BLOCK_Q, &BLOCKS_Q[..]), (BLOCK_KV, &BLOCKS_KV)] {
            if !known.contains(&(case.attrs.int(option) as usize)) {
                case.set(option, 0.0);
            }
        }
        case.set(SOFTCAP, case.attrs.float(SOFTCAP).max(0.0));
        case.set(DROPOUT, case.attrs.float(DROPOUT).min(MOST_DROPOUT));
        // Values of keys that a row does not see must be finite.
        let hides_keys = case.attrs.bool(CAUSAL) || case.attrs.int(WINDOW) > 0 || case.gives(MASK);
        if hides_keys && case.values == Values::Special {
            case.values = Values::Large;
        }
    }

    fn cases() -> Vec<Case> {
        let mut cases = Vec::new();
        for dtype in FLOATS {
            let case = |sizes: [usize; 6]| Case::new(&SPEC, dtype).sizes(&sizes);
            let causal = |sizes: [usize; 6]| case(sizes).attr(CAUSAL, 1.0);
            let packed = |sizes: [usize; 6]| case(sizes).give(Q_STARTS).give(KV_STARTS);
            cases.push(case([0, 5, 7, 2, 2, 64]));
            cases.push(case([2, 2, 2, 2, 2, 32]));
            for head_dim in HEAD_DIMS {
                cases.push(case([2, 18, 70, 2, 1, head_dim]).give(LSE));
                cases.push(causal([1, 66, 70, 1, 1, head_dim]));
            }
            for [q_len, kv_len] in LENGTHS {
                cases.push(case([1, q_len, kv_len, 2, 1, 32]).give(LSE));
                cases.push(causal([1, q_len, kv_len, 1, 1, 32]).give(LSE));
            }
            for [num_heads, num_kv_heads] in GROUPS {
                cases.push(causal([2, 5, 40, num_heads, num_kv_heads, 64]));
                cases.push(case([3, 1, 150, num_heads, num_kv_heads, 64]).give(LSE));
            }
            // Decoding of a few keys, of a segment, of a warp's segment for each of two and four, in tiles of eight and of
            // sixteen rows.
            for head_dim in HEAD_DIMS {
                cases.push(case([2, 1, 4, 3, 3, head_dim]).give(LSE));
                cases.push(case([2, 1, 30, 11, 1, head_dim]));
                cases.push(case([3, 1, 100, 6, 2, head_dim]));
                cases.push(case([2, 1, 137, 6, 1, head_dim]));
                cases.push(case([2, 1, 422, 7, 1, head_dim]).arranged(Arrangement::HeadsFirst));
            }
            cases.push(causal([2, 3, 14, 2, 1, 64]).attr(WINDOW, 4.0).give(SINKS).give(LSE));
            // Long enough for decoding to be split.
            cases.push(causal([1, 1, 5000, 2, 1, 32]).give(LSE).give(SINKS));
            // Several blocks of either: each size that some kernel has, of the heads that have most of them.
            let blocks = |case: Case, block_q: usize, block_kv: usize| {
                case.attr(BLOCK_Q, block_q as f64).attr(BLOCK_KV, block_kv as f64).selective()
            };
            if dtype != DType::F16 {
                for (i, block_q) in BLOCKS_Q.into_iter().enumerate() {
                    for (j, block_kv) in BLOCKS_KV.into_iter().enumerate() {
                        let case = blocks(causal([1, 300, 300, 2, 1, 64]), block_q, block_kv);
                        // On the CPU the two do not meet, and blocks of 80 keys do not exist: each size once is enough.
                        let is_for_all = i == j || (block_q, block_kv) == (128, 64);
                        cases.push(if is_for_all { case } else { case.gpu_only() });
                    }
                }
            }
            if dtype == DType::BF16 {
                for (head_dim, block_q, block_kv) in
                    [(80, 64, 32), (128, 192, 80), (128, 128, 128), (128, 128, 64), (192, 128, 64)]
                {
                    cases.push(blocks(causal([1, 300, 300, 2, 2, head_dim]), block_q, block_kv));
                }
                cases.push(blocks(packed([5, 300, 300, 2, 1, 128]).attr(CAUSAL, 1.0), 192, 80));
            }
            // Several blocks of keys of every head; decoding that is cut into blocks of several spans; and into one block a
            // multiprocessor.
            for head_dim in HEAD_DIMS {
                cases.push(causal([1, 130, 300, 2, 1, head_dim]).give(LSE));
                cases.push(case([1, 1, 1300, 4, 2, head_dim]));
            }
            if dtype == DType::BF16 {
                cases.push(case([8, 1, 8320, 16, 8, 128]).gpu_only());
                cases.push(case([16, 1, 1100, 16, 8, 128]).give(LSE).gpu_only());
                for head_dim in [80, 96, 160, 192, 256] {
                    let sinks = packed([5, 150, 400, 4, 2, head_dim]).attr(CAUSAL, 1.0).give(SINKS);
                    cases.push(sinks.attr(WINDOW, 200.0));
                    cases.push(case([2, 140, 300, 2, 2, head_dim]).arranged(Arrangement::HeadsFirst));
                    cases.push(case([1, 140, 300, 2, 2, head_dim]).attr(SOFTCAP, 20.0));
                }
            }
            // Many keys of a long head, with few rows and with many.
            cases.push(case([1, 66, 1100, 1, 1, 128]).give(LSE));
            cases.push(causal([1, 600, 1100, 1, 1, 128]));
            for window in [1.0, 16.0, 64.0, 1e9] {
                cases.push(causal([2, 70, 150, 2, 1, 32]).attr(WINDOW, window).give(LSE));
                cases.push(case([1, 130, 70, 1, 1, 32]).attr(WINDOW, window));
            }
            cases.push(case([2, 20, 70, 2, 2, 64]).attr(SOFTCAP, 5.0).attr(SCALE, 1.0).give(LSE));
            cases.push(causal([1, 70, 70, 2, 1, 64]).attr(SOFTCAP, 50.0));
            cases.push(case([1, 20, 70, 2, 2, 64]).attr(SCALE, -0.3));
            cases.push(case([2, 20, 70, 4, 2, 64]).give(SINKS).give(LSE));
            cases.push(causal([1, 40, 9, 4, 2, 64]).give(SINKS).give(LSE));
            for q_len in [2, 3, 4, 65, 66, 67] {
                // So few keys that some rows see no key.
                cases.push(case([2, q_len, 2, 2, 2, 32]).give(MASK).give(LSE));
                cases.push(case([2, q_len, 70, 2, 2, 32]).give(MASK));
                cases.push(case([2, q_len, 70 + q_len % 2, 2, 2, 32]).give(BIAS));
                cases.push(causal([2, q_len, 131, 2, 2, 32]).give(MASK).give(BIAS).give(LSE));
            }
            let all = |sizes: [usize; 6]| {
                let case = causal(sizes).attr(WINDOW, 50.0).attr(SOFTCAP, 20.0).attr(SCALE, 0.5);
                case.give(SINKS).give(LSE)
            };
            cases.push(all([2, 66, 130, 4, 2, 128]));
            cases.push(all([2, 68, 130, 4, 2, 64]).give(MASK).give(BIAS));
            cases.push(packed([8, 1000, 1000, 1, 1, 32]).attr(CAUSAL, 1.0).give(LSE));
            cases.push(packed([8, 129, 65, 2, 1, 64]).give(LSE));
            cases.push(packed([9, 65, 1000, 4, 2, 32]).attr(CAUSAL, 1.0).attr(WINDOW, 100.0).give(SINKS));
            cases.push(packed([2, 64, 64, 2, 2, 128]));
            cases.extend(dropout_cases(dtype).into_iter().map(|case| case.give(LSE)));
            for arrangement in [
                Arrangement::PaddedRows,
                Arrangement::Transposed,
                Arrangement::Misaligned,
                Arrangement::HeadsFirst,
            ] {
                cases.push(case([2, 35, 70, 4, 2, 64]).arranged(arrangement));
                cases.push(all([2, 68, 75, 4, 2, 32]).give(MASK).give(BIAS).arranged(arrangement));
                cases.push(causal([2, 1, 140, 4, 2, 64]).give(LSE).arranged(arrangement));
                cases.push(packed([5, 65, 70, 2, 1, 64]).attr(CAUSAL, 1.0).give(LSE).arranged(arrangement));
            }
            for values in [Values::Large, Values::Special] {
                cases.push(case([2, 35, 70, 4, 2, 64]).give(LSE).values(values));
                cases.push(case([2, 1, 70, 4, 2, 64]).give(SINKS).values(values));
                cases.push(case([2, 8, 140, 2, 1, 32]).give(BIAS).give(SINKS).give(LSE).values(values));
            }
            cases.push(causal([2, 70, 75, 2, 1, 64]).give(LSE).values(Values::Large));
            cases.push(all([1, 70, 75, 2, 1, 64]).values(Values::Large));
        }
        cases
    }

    fn bench_cases() -> Vec<Case> {
        let case = |dtype, sizes: [usize; 6], causal: bool| {
            Case::new(&SPEC, dtype).sizes(&sizes).attr(CAUSAL, causal.into())
        };
        let mut cases = Vec::new();
        for (head_dim, lengths) in [(128, &[512, 2048, 8192, 16384][..]), (64, &[2048, 8192])] {
            let heads = HIDDEN / head_dim;
            for &len in lengths {
                for causal in [false, true] {
                    let sizes = [TOKENS / len, len, len, heads, heads, head_dim];
                    cases.push(case(DType::BF16, sizes, causal).gpu_only());
                }
            }
        }
        cases.push(case(DType::BF16, [2, 8192, 8192, 32, 8, 128], true).gpu_only());
        cases.push(case(DType::F16, [2, 8192, 8192, 16, 16, 128], true).gpu_only());
        cases.push(case(DType::BF16, [8, 2048, 2048, 8, 8, 256], true).gpu_only());
        for dtype in [DType::BF16, DType::F32] {
            for len in [1024, 4096] {
                cases.push(case(dtype, [1, len, len, 8, 8, 64], true));
            }
            cases.push(case(dtype, [1, 1024, 1024, 16, 8, 128], true));
            cases.push(case(dtype, [1, 1, 8192, 32, 8, 128], true));
            cases.push(case(dtype, [16, 1, 4096, 32, 8, 128], true).gpu_only());
        }
        cases
    }
}

/// The largest share of random calls: with more, results are sums of single values.
pub(in crate::ops) const MOST_DROPOUT: f64 = 0.9;

/// Dropout of every size of head, of groups, of several blocks and segments, and beside the other options.
fn dropout_cases(dtype: DType) -> Vec<Case> {
    let case = |sizes: [usize; 6], share: f64, seed: f64| {
        Case::new(&SPEC, dtype).sizes(&sizes).attr(DROPOUT, share).attr(SEED, seed)
    };
    let causal = |sizes, share, seed| case(sizes, share, seed).attr(CAUSAL, 1.0);
    let mut cases = Vec::new();
    for head_dim in HEAD_DIMS {
        cases.push(causal([2, 70, 150, 4, 2, head_dim], 0.1, head_dim as f64).attr(OFFSET, 5.0));
    }
    for [q_len, kv_len] in [[1, 1], [5, 0], [1, 1100], [65, 127], [200, 9]] {
        cases.push(case([2, q_len, kv_len, 2, 1, 64], 0.5, 3.0));
    }
    cases.push(case([1, 150, 1300, 3, 3, 64], 0.2, -7.0));
    cases.push(
        causal([1, 300, 300, 6, 2, 128], 0.3, 11.0).attr(WINDOW, 100.0).attr(SOFTCAP, 20.0).give(SINKS),
    );
    cases.push(case([2, 67, 131, 4, 2, 64], 0.9, 1.0).give(MASK).give(BIAS));
    for (sizes, share) in [([8, 129, 65, 2, 1, 64], 0.1), ([5, 200, 200, 4, 2, 32], 0.4)] {
        cases.push(causal(sizes, share, 9.0).give(Q_STARTS).give(KV_STARTS));
    }
    cases.push(case([2, 35, 70, 4, 2, 64], 0.2, 2.0).arranged(Arrangement::Misaligned));
    cases.push(case([2, 35, 70, 4, 2, 64], 0.2, 2.0).arranged(Arrangement::HeadsFirst));
    cases.push(case([2, 35, 70, 4, 2, 64], 0.2, 2.0).values(Values::Large));
    cases
}

/// Queries and keys one short of and one past the blocks kernels work in, empty, one, and long.
const LENGTHS: [[usize; 2]; 12] = [
    [0, 5],
    [5, 0],
    [1, 1],
    [1, 64],
    [63, 65],
    [64, 63],
    [65, 64],
    [127, 129],
    [129, 127],
    [1, 1000],
    [3, 1000],
    [200, 9],
];
/// Query heads and KV heads.
const GROUPS: [[usize; 2]; 5] = [[3, 3], [6, 2], [8, 1], [16, 2], [71, 1]];

/// Tokens of all requests of a case for GPUs, and elements of all heads of a token.
const TOKENS: usize = 16384;
const HIDDEN: usize = 2048;

/// The known number that is closest from below, or the least.
pub(in crate::ops) fn nearest(known: &[usize], number: usize) -> usize {
    let least = known.iter().copied().min().unwrap_or(0);
    known.iter().copied().filter(|&known| known <= number).max().unwrap_or(least)
}

/// Makes the number of query heads, the first, a multiple of the number of KV heads.
pub(in crate::ops) fn share_heads(heads: &mut [usize]) {
    heads[1] = heads[1].clamp(1, heads[0].max(1));
    heads[0] = heads[0] / heads[1] * heads[1];
}
