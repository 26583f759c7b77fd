//! The cases of `attention_backward`: what every kernel must pass, and what is timed.

use super::super::cases::{MOST_DROPOUT, nearest, share_heads};
use super::super::problem::HEAD_DIMS;
use super::super::reference as forward;
use super::{
    BIAS, Backward, CAUSAL, DBIAS, DLSE, DOUT, DROPOUT, DSINKS, K, KV_STARTS, LSE, MASK, OFFSET, OUT, Q,
    Q_STARTS, SCALE, SEED, SINKS, SOFTCAP, SPEC, V, WINDOW, reference,
};
use crate::lab::proof::draw;
use crate::lab::{ArgPlan, Arrangement, Array, Case, Fill, Inputs, Lengths, Provable, Real, Values};
use crate::op::Attrs;
use crate::ops::{FLOATS, attention};
use crate::tensor::DType;

impl Provable for Backward {
    fn reference<R: Real>(inputs: &Inputs<'_, R>, attrs: &Attrs) -> Vec<Option<Array<R>>> {
        reference::backward(inputs, attrs)
    }

    fn plan(case: &Case) -> Vec<Option<ArgPlan>> {
        let mut plans = plans(case);
        let [batch, q_len, kv_len, num_heads, _, head_dim] = case.sizes[..] else {
            unreachable!("six sizes")
        };
        let work = [q_len, kv_len, num_heads, head_dim].into_iter().fold(batch, usize::saturating_mul);
        if work > MOST_EXACT {
            // Timed alone: results of about the right size are enough, and take no time to make.
            let mean = (kv_len.max(1) as f64).ln() + 0.5;
            plans[LSE].iter_mut().for_each(|plan| plan.fill = Fill::Normal(mean, 0.0));
            return plans;
        }
        for index in [Q, K, V, OUT, LSE, DOUT, MASK, BIAS, SINKS] {
            plans[index].iter_mut().for_each(|plan| plan.fill = Fill::Generated(generate));
        }
        plans
    }

    fn constrain(case: &mut Case) {
        case.sizes[5] = nearest(&HEAD_DIMS, case.sizes[5]);
        share_heads(&mut case.sizes[3..5]);
        if case.gives(Q_STARTS) {
            case.withhold(MASK);
            case.withhold(BIAS);
        }
        for (gradient, of) in [(DBIAS, BIAS), (DSINKS, SINKS)] {
            if !case.gives(of) {
                case.withhold(gradient);
            }
        }
        case.set(SOFTCAP, case.attrs.float(SOFTCAP).max(0.0));
        case.set(DROPOUT, case.attrs.float(DROPOUT).min(MOST_DROPOUT));
        // What does not see each other must be finite.
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
            let biased = |case: Case| case.give(BIAS).give(DBIAS);
            let sunk = |case: Case| case.give(SINKS).give(DSINKS);
            cases.push(case([0, 5, 7, 2, 2, 64]));
            cases.push(case([2, 2, 2, 2, 2, 32]));
            cases.push(biased(sunk(case([1, 5, 7, 0, 1, 32]))));
            for head_dim in HEAD_DIMS {
                cases.push(case([2, 18, 70, 2, 1, head_dim]).give(DLSE));
                cases.push(causal([1, 66, 70, 1, 1, head_dim]));
            }
            for [q_len, kv_len] in LENGTHS {
                cases.push(case([1, q_len, kv_len, 2, 1, 32]).give(DLSE));
                cases.push(causal([1, q_len, kv_len, 1, 1, 32]));
            }
            for [num_heads, num_kv_heads] in GROUPS {
                cases.push(causal([2, 9, 40, num_heads, num_kv_heads, 64]));
            }
            // Several blocks of either.
            for head_dim in [64, 128, 256] {
                cases.push(causal([1, 150, 300, 2, 1, head_dim]));
            }
            for window in [1.0, 16.0, 64.0, 1e9] {
                cases.push(causal([2, 70, 150, 2, 1, 32]).attr(WINDOW, window).give(DLSE));
                cases.push(case([1, 130, 70, 1, 1, 32]).attr(WINDOW, window));
            }
            cases.push(case([2, 20, 70, 2, 2, 64]).attr(SOFTCAP, 5.0).attr(SCALE, 1.0));
            cases.push(causal([1, 70, 70, 2, 1, 64]).attr(SOFTCAP, 50.0));
            cases.push(case([1, 20, 70, 2, 2, 64]).attr(SCALE, -0.3));
            cases.push(sunk(case([2, 20, 70, 4, 2, 64]).give(DLSE)));
            cases.push(sunk(causal([1, 40, 9, 4, 2, 64]).give(DLSE)));
            cases.push(case([1, 20, 9, 2, 2, 64]).give(SINKS));
            for q_len in [2, 3, 4, 65, 66, 67] {
                // So few keys that some rows see none.
                cases.push(case([2, q_len, 2, 2, 2, 32]).give(MASK));
                cases.push(case([2, q_len, 70, 2, 2, 32]).give(MASK).give(DLSE));
                cases.push(biased(case([2, q_len, 70 + q_len % 2, 2, 2, 32])));
                cases.push(biased(causal([2, q_len, 131, 4, 2, 32]).give(MASK)));
            }
            cases.push(case([2, 20, 70, 4, 2, 64]).give(BIAS));
            let all = |sizes: [usize; 6]| {
                let case = causal(sizes).attr(WINDOW, 50.0).attr(SOFTCAP, 20.0).attr(SCALE, 0.5);
                sunk(case.give(DLSE))
            };
            cases.push(all([2, 66, 130, 4, 2, 128]));
            cases.push(biased(all([2, 68, 130, 4, 2, 64]).give(MASK)));
            cases.push(packed([8, 200, 200, 1, 1, 32]).attr(CAUSAL, 1.0).give(DLSE));
            cases.push(packed([8, 129, 65, 2, 1, 64]));
            cases.push(sunk(packed([9, 65, 300, 4, 2, 32]).attr(CAUSAL, 1.0).attr(WINDOW, 100.0)));
            cases.push(packed([2, 64, 64, 2, 2, 128]));
            let dropped = |case: Case, share: f64, seed: f64| case.attr(DROPOUT, share).attr(SEED, seed);
            for head_dim in HEAD_DIMS {
                let case = causal([2, 70, 150, 4, 2, head_dim]).attr(OFFSET, 5.0);
                cases.push(dropped(case, 0.1, head_dim as f64));
            }
            for [q_len, kv_len] in [[1, 1], [5, 0], [1, 300], [65, 127], [200, 9]] {
                cases.push(dropped(case([2, q_len, kv_len, 2, 1, 64]).give(DLSE), 0.5, 3.0));
            }
            cases.push(dropped(case([1, 150, 300, 3, 3, 64]), 0.2, -7.0));
            cases.push(dropped(all([1, 150, 200, 6, 2, 128]), 0.3, 11.0));
            cases.push(dropped(biased(case([2, 67, 131, 4, 2, 64]).give(MASK)), 0.9, 1.0));
            cases.push(dropped(packed([8, 129, 65, 2, 1, 64]).attr(CAUSAL, 1.0), 0.1, 9.0));
            cases.push(dropped(packed([5, 200, 200, 4, 2, 32]), 0.4, 9.0));
            cases.push(dropped(case([2, 35, 70, 4, 2, 64]).arranged(Arrangement::Misaligned), 0.2, 2.0));
            cases.push(dropped(case([2, 35, 70, 4, 2, 64]).values(Values::Large), 0.2, 2.0));
            for arrangement in [
                Arrangement::PaddedRows,
                Arrangement::Transposed,
                Arrangement::Misaligned,
                Arrangement::HeadsFirst,
            ] {
                cases.push(case([2, 35, 70, 4, 2, 64]).arranged(arrangement));
                cases.push(biased(all([2, 68, 75, 4, 2, 32]).give(MASK)).arranged(arrangement));
                cases.push(packed([5, 65, 70, 2, 1, 64]).attr(CAUSAL, 1.0).arranged(arrangement));
            }
            for values in [Values::Large, Values::Special] {
                cases.push(case([2, 35, 70, 4, 2, 64]).values(values));
                cases.push(sunk(case([2, 8, 140, 2, 1, 32]).give(DLSE)).values(values));
                cases.push(biased(case([2, 8, 70, 2, 1, 32])).values(values));
                cases.push(case([1, 35, 70, 2, 1, 32]).attr(SOFTCAP, 5.0).values(values));
            }
            cases.push(causal([2, 70, 75, 2, 1, 64]).values(Values::Large));
            cases.push(all([1, 70, 75, 2, 1, 64]).values(Values::Large));
        }
        cases
    }

    fn bench_cases() -> Vec<Case> {
        let case = |dtype, sizes: [usize; 6], causal: bool| {
            Case::new(&SPEC, dtype).sizes(&sizes).attr(CAUSAL, causal.into())
        };
        let mut cases = Vec::new();
        let all = &[512, 2048, 8192, 16384][..];
        for (head_dim, lengths) in
            [(128, all), (64, all), (96, &all[1..3]), (192, &all[1..3]), (256, &all[1..3])]
        {
            let heads = HIDDEN / head_dim;
            for &len in lengths {
                for causal in [false, true] {
                    let sizes = [TOKENS / len, len, len, heads, heads, head_dim];
                    cases.push(case(DType::BF16, sizes, causal).gpu_only());
                }
            }
        }
        for sizes in [[2, 8192, 8192, 32, 8, 128], [4, 2048, 2048, 16, 8, 64]] {
            cases.push(case(DType::BF16, sizes, true).gpu_only());
        }
        cases.push(case(DType::F16, [2, 8192, 8192, 16, 16, 128], true).gpu_only());
        for dtype in [DType::BF16, DType::F32] {
            cases.push(case(dtype, [1, 1024, 1024, 8, 8, 64], true));
            cases.push(case(dtype, [1, 1024, 1024, 16, 8, 128], true));
        }
        cases
    }
}

/// Multiplications of a product of queries and keys up to which a case has the very results of a forward call.
const MOST_EXACT: usize = 1 << 28;

/// The tensors of a case with values that are drawn one by one.
fn plans(case: &Case) -> Vec<Option<ArgPlan>> {
    let [batch, q_len, kv_len, num_heads, num_kv_heads, head_dim] = case.sizes[..] else {
        unreachable!("six sizes")
    };
    let normal = Fill::Normal(0.0, 1.0);
    let given = |index: usize, plan: ArgPlan| case.gives(index).then_some(plan);
    // What is dropped depends on the place in the batch.
    let batch_dim = (case.attrs.float(DROPOUT) == 0.0).then_some(0);
    let by_batch = |shape: &[usize], dtype, fill| ArgPlan { shape: shape.to_vec(), dtype, fill, batch_dim };
    let shared =
        |shape: &[usize], dtype, fill| ArgPlan { shape: shape.to_vec(), dtype, fill, batch_dim: None };
    let is_packed = case.gives(Q_STARTS);
    // Requests over their own tokens have as many keys as queries; others also have none of either.
    let queries = Lengths { longest: q_len, shift: 0 };
    let keys = Lengths { longest: kv_len, shift: if q_len == kv_len { 0 } else { 3 } };
    let starts = |lengths| is_packed.then(|| shared(&[batch + 1], DType::I32, Fill::Starts(lengths)));
    let (count, q_tokens, kv_tokens) = match is_packed {
        true => (1, queries.sum(batch), keys.sum(batch)),
        false => (batch, q_len, kv_len),
    };
    let tensor = |shape: &[usize], dtype, fill| match is_packed {
        true => shared(shape, dtype, fill),
        false => by_batch(shape, dtype, fill),
    };
    let exponent = Fill::Exponent(case.dtype);
    let q = |fill| Some(tensor(&[count, q_tokens, num_heads, head_dim], case.dtype, fill));
    let k = |fill| Some(tensor(&[count, kv_tokens, num_kv_heads, head_dim], case.dtype, fill));
    let lse = tensor(&[count, num_heads, q_tokens], DType::F32, normal);
    // Which of their kinds and shapes a case gets, so that all are reached.
    let mask_dtype = if case.dtype == DType::F16 { DType::U8 } else { DType::Bool };
    let bias_dtype = if kv_len % 2 == 1 { DType::F32 } else { case.dtype };
    let mask = match q_len % 3 {
        0 => shared(&[1, 1, q_len, kv_len], mask_dtype, Fill::Below(2)),
        1 => by_batch(&[batch, 1, q_len, kv_len], mask_dtype, Fill::Below(2)),
        _ => by_batch(&[batch, num_heads, q_len, kv_len], mask_dtype, Fill::Below(2)),
    };
    let bias = |dtype| match q_len % 3 {
        0 => shared(&[1, num_heads, q_len, kv_len], dtype, normal),
        1 => shared(&[1, 1, q_len, kv_len], dtype, normal),
        _ => by_batch(&[batch, num_heads, q_len, kv_len], dtype, normal),
    };
    let sinks = shared(&[num_heads], DType::F32, normal);
    vec![
        q(exponent),
        k(exponent),
        k(Fill::AnyFactor),
        q(normal),
        Some(lse.clone()),
        q(Fill::AnyFactor),
        starts(queries),
        starts(keys),
        given(MASK, mask),
        given(BIAS, bias(bias_dtype)),
        given(SINKS, sinks.clone()),
        given(DLSE, lse),
        q(normal),
        k(normal),
        k(normal),
        given(DBIAS, bias(DType::F32)),
        given(DSINKS, sinks),
    ]
}

/// The inputs that must agree: those of a forward call, its results, and the gradient of the first.
fn generate(case: &Case, seed: u64) -> Vec<Vec<f64>> {
    let plans = plans(case);
    let drawn = |index: usize| {
        let plan = plans[index].as_ref()?;
        // Products of large values and gradients are beyond what f16 can hold.
        let values = match case.values {
            Values::Large if index == DOUT || index == V && case.dtype == DType::F16 => Values::Typical,
            values => values,
        };
        Some(Array { shape: plan.shape.clone(), data: draw(plan, values, index, seed) })
    };
    let mut inputs = vec![None; attention::LSE + 1];
    let same = [
        (attention::Q, Q),
        (attention::K, K),
        (attention::V, V),
        (attention::Q_STARTS, Q_STARTS),
        (attention::KV_STARTS, KV_STARTS),
        (attention::MASK, MASK),
        (attention::BIAS, BIAS),
        (attention::SINKS, SINKS),
    ];
    for (there, here) in same {
        inputs[there] = drawn(here);
    }
    // Both ops have these options, dropout among them, at the same positions.
    let mut results = forward::forward::<f64>(&Inputs::new(&inputs, 1 << attention::LSE), &case.attrs);
    let mut all = vec![Vec::new(); SPEC.args.len()];
    let mut keep = |index: usize, array: Option<Array<f64>>| {
        all[index] = array.map_or(Vec::new(), |array| array.data);
    };
    keep(OUT, results[attention::OUT].take());
    keep(LSE, results[attention::LSE].take());
    keep(DOUT, drawn(DOUT));
    for (there, here) in same {
        keep(here, inputs[there].take());
    }
    all
}

/// Queries and keys one short of and one past the blocks kernels work in, empty, one, and long.
const LENGTHS: [[usize; 2]; 11] = [
    [0, 5],
    [5, 0],
    [1, 1],
    [1, 64],
    [63, 65],
    [64, 63],
    [65, 64],
    [127, 129],
    [129, 127],
    [3, 500],
    [200, 9],
];
/// Query heads and KV heads.
const GROUPS: [[usize; 2]; 4] = [[3, 3], [6, 2], [8, 1], [16, 2]];

/// Tokens of all requests of a case for GPUs, and elements of all heads of a token.
const TOKENS: usize = 16384;
const HIDDEN: usize = 2048;
