//! The cases of `paged_attention`: what every kernel must pass, and what is timed.

use super::problem::{HEAD_DIMS, LARGEST_PAGE, NARROW};
use super::{
    ALWAYS_SHARE, CAUSAL, Forward, GROUP_STARTS, K_SCALE, KV_LENS, LSE, PAGE_TABLE, PREFIX_LENS, Q_STARTS,
    SCALE, SINKS, SOFTCAP, SPEC, V_SCALE, WINDOW, reference,
};
use crate::lab::{ArgPlan, Arrangement, Array, Case, Fill, Inputs, Provable, Real, Values, sum_repeating};
use crate::op::Attrs;
use crate::ops::FLOATS;
use crate::ops::attention::cases::{nearest, share_heads};
use crate::tensor::{DType, Random};

impl Provable for Forward {
    fn reference<R: Real>(inputs: &Inputs<'_, R>, attrs: &Attrs) -> Vec<Option<Array<R>>> {
        reference::forward(inputs, attrs)
    }

    fn plan(case: &Case) -> Vec<Option<ArgPlan>> {
        let [requests, q_len, _, num_heads, num_kv_heads, head_dim, page_size, _] = case.sizes[..] else {
            unreachable!("eight sizes")
        };
        let groups = groups(case);
        let num_tokens = sum_repeating(requests, MIXED.len(), |r| length(case, r)[0]);
        let (each, pool) = pages(case);
        // One query of each request: then tokens and requests are the same batch.
        let by_request = (q_len == 1 && !case.gives(Q_STARTS) && !case.gives(GROUP_STARTS)).then_some(0);
        let (normal, factors) = (Fill::Normal(0.0, 1.0), Fill::Normal(1.0, 0.25));
        let batched = |shape: &[usize], dtype, fill| ArgPlan {
            shape: shape.to_vec(),
            dtype,
            fill,
            batch_dim: by_request,
        };
        let shared =
            |shape: &[usize], dtype, fill| ArgPlan { shape: shape.to_vec(), dtype, fill, batch_dim: None };
        let given = |index: usize, plan: ArgPlan| case.gives(index).then_some(plan);
        // Each type of queries with each narrow cache: one where keys have a scale, the other where values alone have.
        let cache_dtype = match (case.gives(K_SCALE), case.gives(V_SCALE)) {
            (false, false) => case.dtype,
            (scaled_keys, _) => NARROW[usize::from((case.dtype == DType::F16) == scaled_keys)],
        };
        let cache =
            shared(&[pool, page_size, num_kv_heads, head_dim], cache_dtype, Fill::Exponent(case.dtype));
        let q = batched(&[num_tokens, num_heads, head_dim], case.dtype, Fill::Exponent(cache_dtype));
        let made = Fill::Generated(numbers);
        vec![
            Some(q.clone()),
            Some(cache.clone()),
            Some(ArgPlan { fill: Fill::Weighted, ..cache }),
            Some(batched(&[requests, each], DType::I32, made)),
            Some(batched(&[requests], DType::I32, made)),
            given(Q_STARTS, shared(&[requests + 1], DType::I32, made)),
            given(
                K_SCALE,
                shared(&[if case.gives(V_SCALE) { num_kv_heads } else { 1 }], DType::F32, factors),
            ),
            given(V_SCALE, shared(&[if page_size == 7 { 1 } else { num_kv_heads }], DType::F32, factors)),
            given(SINKS, shared(&[num_heads], DType::F32, normal)),
            given(GROUP_STARTS, shared(&[levels(case), groups + 1], DType::I32, made)),
            given(PREFIX_LENS, shared(&[levels(case), groups], DType::I32, made)),
            Some(q),
            given(LSE, batched(&[num_tokens, num_heads], DType::F32, normal)),
        ]
    }

    fn constrain(case: &mut Case) {
        case.sizes[5] = nearest(&HEAD_DIMS, case.sizes[5]);
        share_heads(&mut case.sizes[3..5]);
        case.sizes[6] = case.sizes[6].clamp(1, LARGEST_PAGE);
        // Of what requests share, some keys are left to each.
        let [_, q_len, kv_len, ..] = case.sizes[..] else { unreachable!("eight sizes") };
        case.sizes[7] = case.sizes[7].min(kv_len.saturating_sub(q_len));
        if case.gives(GROUP_STARTS) {
            case.set(WINDOW, 0.0);
        }
        case.set(SOFTCAP, case.attrs.float(SOFTCAP).max(0.0));
        // Values of keys that a row does not see must be finite.
        let hides_keys = case.attrs.bool(CAUSAL) && q_len > 1 || case.attrs.int(WINDOW) > 0;
        if hides_keys && case.values == Values::Special {
            case.values = Values::Large;
        }
    }

    fn cases() -> Vec<Case> {
        let mut cases = Vec::new();
        for dtype in FLOATS {
            let case = |sizes: [usize; 7]| Case::new(&SPEC, dtype).sizes(&[&sizes[..], &[0]].concat());
            let mixed = |sizes: [usize; 7]| case(sizes).give(Q_STARTS).give(LSE);
            cases.push(case([0, 1, 20, 2, 2, 64, 16]));
            cases.push(case([2, 2, 2, 2, 2, 32, 2]));
            for head_dim in HEAD_DIMS {
                cases.push(case([2, 1, 70, 4, 2, head_dim, 16]).give(LSE));
                cases.push(case([1, 20, 150, 2, 2, head_dim, 8]));
            }
            for (i, keys) in KEYS.into_iter().enumerate() {
                cases.push(case([3, 1, keys, 4, 1, 32, [16, 1, 7, 64, 256][i % 5]]).give(LSE));
            }
            for [num_heads, num_kv_heads] in GROUPS {
                cases.push(case([2, 3, 90, num_heads, num_kv_heads, 64, 16]));
            }
            for page_size in [1, 5, 16, 48, 256] {
                cases.push(case([2, 5, 700, 2, 1, 32, page_size]).give(LSE));
            }
            cases.push(mixed([8, 1000, 1000, 1, 1, 32, 16]));
            cases.push(mixed([9, 65, 1000, 4, 2, 64, 32]).give(SINKS));
            cases.push(mixed([5, 40, 600, 2, 1, 128, 16]).attr(CAUSAL, 0.0));
            if dtype != DType::F32 {
                // Tiles enough for the largest: of requests that are all alike, and of one with many queries among others.
                cases.push(case([10, 150, 300, 8, 4, 128, 16]).give(LSE).gpu_only());
                cases.push(case([12, 150, 200, 6, 3, 64, 32]));
                let mixed = mixed([16, 170, 200, 36, 36, 128, 64]);
                cases.push(mixed.give(SINKS).attr(WINDOW, 90.0).gpu_only());
            }
            if dtype == DType::BF16 {
                // Room for so many keys that requests are cut, if they are as long as that.
                cases.push(case([18, 1, 4200, 16, 8, 32, 16]).give(LSE).gpu_only());
                cases.push(mixed([34, 1, 4200, 8, 4, 32, 16]));
                // Blocks of three spans; and eight warps, alone on a multiprocessor.
                cases.push(case([8, 1, 8320, 16, 8, 128, 16]).gpu_only());
                cases.push(case([16, 1, 1100, 16, 8, 128, 16]).give(LSE).gpu_only());
            }
            if dtype != DType::F32 {
                // Several blocks of keys, many rows: every length of heads, with pages longer than a block.
                for (i, head_dim) in HEAD_DIMS.into_iter().enumerate() {
                    let sizes = [2, 100, 300, 4, 2, head_dim, [128, 256, 64][i % 3]];
                    cases.push(if i % 2 == 0 { case(sizes) } else { mixed(sizes).give(SINKS) });
                }
            }
            for window in [1.0, 64.0, 1e9] {
                cases.push(case([2, 1, 700, 4, 2, 32, 16]).attr(WINDOW, window).give(LSE));
                cases.push(
                    mixed([8, 130, 1000, 2, 1, 32, 7])
                        .attr(WINDOW, window)
                        .attr(CAUSAL, (window != 64.0).into()),
                );
            }
            cases.push(case([2, 5, 90, 2, 2, 64, 16]).attr(SOFTCAP, 5.0).attr(SCALE, 1.0).give(LSE));
            cases.push(case([2, 1, 600, 8, 2, 128, 16]).attr(SOFTCAP, 50.0));
            cases.push(case([2, 20, 70, 2, 2, 64, 16]).attr(SCALE, -0.3));
            let all = |sizes: [usize; 7]| {
                mixed(sizes).attr(WINDOW, 50.0).attr(SOFTCAP, 20.0).attr(SCALE, 0.5).give(SINKS)
            };
            cases.push(all([5, 66, 130, 4, 2, 128, 16]));
            let sharing = |sizes: [usize; 7], prefix_len: usize| {
                let case = Case::new(&SPEC, dtype).sizes(&[&sizes[..], &[prefix_len]].concat());
                case.give(GROUP_STARTS).give(PREFIX_LENS).give(LSE).attr(ALWAYS_SHARE, 1.0)
            };
            cases.push(sharing([2, 2, 6, 2, 2, 32, 2], 2));
            cases.push(sharing([40, 1, 90, 4, 2, 32, 16], 0));
            cases.push(sharing([5, 1, 700, 4, 2, 64, 16], 256));
            cases.push(sharing([6, 3, 600, 4, 1, 128, 7], 290).give(SINKS).attr(SOFTCAP, 20.0));
            cases.push(sharing([3, 1, 4500, 4, 2, 32, 16], 2048));
            cases.push(sharing([2, 30, 1700, 2, 2, 64, 16], 1500).attr(CAUSAL, 0.0));
            cases.push(sharing([9, 65, 700, 4, 2, 80, 16], 300).give(Q_STARTS));
            if dtype == DType::BF16 {
                // Many requests with few keys of their own: a warp each.
                cases.push(sharing([64, 1, 1200, 16, 8, 128, 16], 1024).gpu_only());
            }
            let narrow = |case: Case| case.give(K_SCALE).give(V_SCALE);
            cases.push(narrow(case([3, 1, 600, 8, 2, 128, 16])).give(LSE));
            cases.push(narrow(sharing([4, 1, 1500, 8, 2, 128, 16], 1300)));
            cases.push(narrow(case([2, 3, 70, 6, 3, 80, 7])));
            cases.push(case([2, 1, 600, 8, 2, 128, 16]).give(K_SCALE));
            cases.push(case([2, 3, 300, 4, 2, 64, 16]).give(V_SCALE).give(LSE));
            cases.push(narrow(all([8, 100, 300, 4, 2, 64, 16])));
            for arrangement in [Arrangement::PaddedRows, Arrangement::Transposed, Arrangement::Misaligned] {
                cases.push(case([2, 1, 140, 4, 2, 64, 16]).give(LSE).arranged(arrangement));
                cases.push(all([5, 65, 70, 2, 1, 32, 16]).arranged(arrangement));
                cases.push(narrow(case([2, 2, 70, 4, 2, 64, 16])).arranged(arrangement));
            }
            for values in [Values::Large, Values::Special] {
                cases.push(case([3, 1, 70, 4, 2, 64, 16]).give(LSE).values(values));
                cases.push(case([2, 1, 600, 4, 2, 64, 16]).give(SINKS).give(LSE).values(values));
            }
            cases.push(mixed([5, 70, 200, 2, 1, 64, 16]).values(Values::Large));
        }
        cases
    }

    fn bench_cases() -> Vec<Case> {
        let case = |dtype, [requests, q_len, kv_len]: [usize; 3]| {
            Case::new(&SPEC, dtype).sizes(&[requests, q_len, kv_len, 32, 8, 128, 16, 0])
        };
        let mut cases = Vec::new();
        // Decoding.
        for sizes in [[1, 1, 8192], [1, 1, 131_072], [16, 1, 4096], [64, 1, 4096], [256, 1, 2048]] {
            let bf16 = case(DType::BF16, sizes);
            let fp8 = bf16.clone().give(K_SCALE).give(V_SCALE).gpu_only();
            cases.extend([if sizes[0] * sizes[2] > 1 << 17 { bf16.gpu_only() } else { bf16 }, fp8]);
        }
        cases.push(case(DType::F32, [1, 1, 8192]));
        // A prefix that all share.
        let shared = Case::new(&SPEC, DType::BF16).sizes(&[64, 1, 8192 + 128, 32, 8, 128, 16, 8192]);
        cases.push(shared.clone().gpu_only());
        cases.push(shared.give(GROUP_STARTS).give(PREFIX_LENS).gpu_only());
        // Prompts, at once and after what is cached already.
        cases.push(case(DType::BF16, [2, 8192, 8192]).gpu_only());
        cases.push(case(DType::BF16, [4, 512, 8192]).gpu_only());
        cases.push(case(DType::BF16, [1, 512, 1024]));
        cases
    }
}

/// Queries and keys of requests of very different sizes, up to the case's: nothing, the usual, all keys new, more
/// queries than keys.
const MIXED: [[usize; 2]; 8] = [[1, 65], [0, 9], [63, 1000], [1, 0], [1000, 1000], [5, 129], [0, 0], [7, 3]];

/// Queries and keys of request `r` of a case.
fn length(case: &Case, r: usize) -> [usize; 2] {
    let (q_len, kv_len) = (case.sizes[1], case.sizes[2]);
    if !case.kv_lens.is_empty() {
        return [q_len, case.kv_lens[r % case.kv_lens.len()].min(kv_len)];
    }
    if !case.gives(Q_STARTS) {
        return [q_len, kv_len];
    }
    let shared = if case.gives(GROUP_STARTS) { levels(case) * case.sizes[7] } else { 0 };
    let [queries, keys] = MIXED[r % MIXED.len()];
    let queries = queries.min(q_len);
    [queries, keys.max(if shared > 0 { shared + queries } else { 0 }).min(kv_len)]
}

/// Pages of a request in the table, and pages of the pool: some more than are used.
fn pages(case: &Case) -> (usize, usize) {
    let (requests, kv_len) = (case.sizes[0], case.sizes[2]);
    let each = kv_len.div_ceil(case.sizes[6].max(1));
    let used = match case.kv_lens.len() {
        0 => requests.saturating_mul(each),
        period => sum_repeating(requests, period, |r| own_pages(case, r)),
    };
    (each, used.saturating_add(3))
}

/// Pages that request `r` has to itself.
fn own_pages(case: &Case, r: usize) -> usize {
    let keys = if case.kv_lens.is_empty() { case.sizes[2] } else { length(case, r)[1] };
    keys.div_ceil(case.sizes[6].max(1))
}

/// Levels of groups: all requests, and, where there are keys enough, pairs of them that share twice as many.
fn levels(case: &Case) -> usize {
    1 + (2 * case.sizes[7] + case.sizes[1] <= case.sizes[2]) as usize
}

/// Groups of every level, some of them empty.
fn groups(case: &Case) -> usize {
    if levels(case) == 1 { 1 } else { case.sizes[0].div_ceil(2) }
}

/// Lengths, where requests begin, and pages in random order.
fn numbers(case: &Case, seed: u64) -> Vec<Vec<f64>> {
    let lengths: Vec<[usize; 2]> = (0..case.sizes[0]).map(|r| length(case, r)).collect();
    let (each, pool) = pages(case);
    let mut rng = Random::new(seed);
    let mut shuffled: Vec<f64> = (0..pool).map(|page| page as f64).collect();
    for i in (1..pool).rev() {
        shuffled.swap(i, rng.below(i as u64 + 1) as usize);
    }
    let mut table = vec![0.0; lengths.len() * each];
    let mut taken = 0;
    for r in 0..lengths.len() {
        let own = own_pages(case, r);
        table[r * each..][..own].copy_from_slice(&shuffled[taken..][..own]);
        taken += own;
    }
    // All pages that hold nothing but shared keys, or some.
    let (groups, shared) = (groups(case), case.sizes[7].div_ceil(case.sizes[6].max(1)));
    if case.sizes[7] > 0 {
        for r in 0..lengths.len() {
            for page in 0..each.min(levels(case) * shared) {
                let first = if page < shared { 0 } else { r / 2 * 2 };
                table[r * each + page] = table[first * each + page];
            }
        }
    }
    let all_then_none = (0..=groups).map(|g| if g == 0 { 0.0 } else { lengths.len() as f64 });
    let pairs = (0..=groups).map(|g| (2 * g).min(lengths.len()) as f64);
    let len = |level: usize| std::iter::repeat_n((level * case.sizes[7]) as f64, groups);
    let mut values = vec![Vec::new(); SPEC.args.len()];
    values[PAGE_TABLE] = table;
    values[GROUP_STARTS] = all_then_none.chain(pairs).take(levels(case) * (groups + 1)).collect();
    values[PREFIX_LENS] = len(1).chain(len(2)).take(levels(case) * groups).collect();
    values[KV_LENS] = lengths.iter().map(|[_, keys]| *keys as f64).collect();
    values[Q_STARTS] =
        (0..=lengths.len()).map(|r| lengths[..r].iter().map(|[q, _]| *q as f64).sum()).collect();
    values
}

/// Keys one short of and one past pages, steps and splits; none, one, and several splits.
const KEYS: [usize; 10] = [0, 1, 15, 17, 64, 65, 127, 513, 1000, 1100];
/// Query heads and KV heads.
const GROUPS: [[usize; 2]; 5] = [[3, 3], [6, 2], [8, 1], [32, 2], [71, 1]];
