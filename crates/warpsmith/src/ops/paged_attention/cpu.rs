//! `paged_attention` on the CPU, one source for all tiers.
//!
//! The rows of a KV head (queries of a request, and query heads that share it) are taken in blocks, so that a key is read
//! once for all of them; the keys in splits of fixed length. What a row has seen in a split is a state: the largest
//! score, the sum of weights and the sum of weighted values. States are folded in order. Where there are few blocks,
//! threads share the splits of each.

use super::numbers::{Request, requests};
use super::{K_PAGES, K_SCALE, LSE, OUT, PAGE_TABLE, Problem, Q, SINKS, V_PAGES, V_SCALE};
use crate::cpu::prefetch::fetch;
use crate::cpu::rows::{for_vectors, load_at, replace_rest, store_at, with_float};
use crate::cpu::{CpuElement, Simd, Task, dispatch, math, num_threads, parallel_for};
use crate::dtype::{DType, F8E4M3, F8E5M2};
use crate::error::Result;
use crate::registry::Launch;
use std::marker::PhantomData;
use std::ops::Range;

/// Keys of a split.
const SPLIT: usize = 512;
/// Rows of a block.
const ROWS: usize = 16;
/// Keys whose values are added up before the sums go back to memory.
const TILE: usize = 16;
/// Keys that are asked for ahead of their use.
const AHEAD: usize = 8;
/// Blocks for each thread from which on their splits are not shared.
const BLOCKS_PER_THREAD: usize = 4;

/// Some rows of a request and KV head.
struct Block<'a> {
    request: &'a Request,
    head: usize,
    /// Counted over tokens, and query heads of the KV head within.
    rows: Range<usize>,
}

/// What rows have seen: of each the sum of weighted values, the largest score and the sum of weights.
struct States<'a> {
    o: &'a mut [f32],
    m: &'a mut [f32],
    l: &'a mut [f32],
}

pub(super) fn run(launch: &Launch<'_, Problem>) -> Result<()> {
    let p = launch.problem;
    let requests = requests(launch)?;
    let mut blocks = Vec::new();
    for request in &requests {
        let rows = request.count * p.group();
        for head in 0..p.num_kv_heads {
            let block = |first| Block { request, head, rows: first..(first + ROWS).min(rows) };
            blocks.extend((0..rows).step_by(ROWS).map(block));
        }
    }
    let run = match p.cache_dtype {
        DType::F8E4M3 => run_blocks::<F8E4M3>,
        DType::F8E5M2 => run_blocks::<F8E5M2>,
        dtype => with_float!(dtype, T => run_blocks::<T>),
    };
    run(launch, &blocks);
    Ok(())
}

fn run_blocks<C: CpuElement>(launch: &Launch<'_, Problem>, blocks: &[Block<'_>]) {
    let p = launch.problem;
    let splits = |block: &Block<'_>| {
        let keys = block.keys(p);
        keys.start / SPLIT..keys.end.div_ceil(SPLIT)
    };
    let size = ROWS * (p.head_dim + 2);
    if blocks.len() >= BLOCKS_PER_THREAD * num_threads() {
        parallel_for(blocks.len(), 1, |range| {
            let mut memory = vec![0.0; size];
            for block in &blocks[range] {
                let states = States::empty(&mut memory, p.head_dim);
                dispatch(
                    launch.tier,
                    Attend::<C> { launch, block, splits: splits(block), states, c: PhantomData },
                );
                finish(launch, block, &States::of(&mut memory, p.head_dim));
            }
        });
        return;
    }
    let parts: Vec<(&Block<'_>, usize)> =
        blocks.iter().flat_map(|block| splits(block).map(move |split| (block, split))).collect();
    let mut memory = vec![0.0f32; parts.len() * size];
    let base = memory.as_mut_ptr() as usize;
    parallel_for(parts.len(), 1, |range| {
        for part in range {
            let (block, split) = parts[part];
            // SAFETY: parts are disjoint pieces of `memory`, and each is given to one thread.
            let memory = unsafe { std::slice::from_raw_parts_mut((base as *mut f32).add(part * size), size) };
            let states = States::empty(memory, p.head_dim);
            dispatch(
                launch.tier,
                Attend::<C> { launch, block, splits: split..split + 1, states, c: PhantomData },
            );
        }
    });
    let mut parts = memory.chunks_exact_mut(size);
    let mut total = vec![0.0; size];
    for block in blocks {
        let mut states = States::empty(&mut total, p.head_dim);
        for part in parts.by_ref().take(splits(block).len()) {
            let (next, rows) = (States::of(part, p.head_dim), block.rows.len());
            dispatch(launch.tier, Fold { states: &mut states, next: &next, rows });
        }
        finish(launch, block, &states);
    }
}

/// Writes the results of a block.
fn finish(launch: &Launch<'_, Problem>, block: &Block<'_>, states: &States<'_>) {
    let p = launch.problem;
    for (i, row) in block.rows.clone().enumerate() {
        let (token, head) = block.row(p, row);
        let token = (block.request.first + token) as isize;
        let (m, l) = (states.m[i], states.l[i]);
        // SAFETY: the sink of one of the heads.
        let sink = (launch.args.address(SINKS) != 0).then(|| unsafe {
            *(launch.args.address(SINKS) as *const f32).offset(head as isize * p.sinks_step)
        });
        let sink = sink.unwrap_or(f32::NEG_INFINITY);
        let most = if sink > m || sink.is_nan() { sink } else { m };
        let base = if most == f32::NEG_INFINITY { 0.0 } else { most };
        let keep = (m - base).exp();
        let sum = l * keep + (sink - base).exp();
        let factor =
            if l == 0.0 { 0.0 } else { keep * (scale(launch, V_SCALE, p.v_scale_step, block.head) / sum) };
        let values = &states.o[i * p.head_dim..][..p.head_dim];
        let at = token * p.out[0] + head as isize * p.out[1];
        with_float!(p.dtype, T => for (d, &value) in values.iter().enumerate() {
            // SAFETY: an element of a row that no other block has.
            unsafe {
                let out = (launch.args.address(OUT) as *mut T).offset(at + d as isize * p.out[2]);
                *out = <T as CpuElement>::from_f32(value * factor);
            }
        });
        if let Some([tokens, heads]) = p.lse {
            let lse = if sum == 0.0 { f32::NEG_INFINITY } else { most + sum.ln() };
            // SAFETY: as above.
            unsafe {
                *(launch.args.address(LSE) as *mut f32).offset(token * tokens + head as isize * heads) = lse
            };
        }
    }
}

/// The factor of the cache's keys or values.
fn scale(launch: &Launch<'_, Problem>, arg: usize, step: isize, head: usize) -> f32 {
    match launch.args.address(arg) {
        0 => 1.0,
        // SAFETY: the scale of one of the KV heads, or the one they share.
        address => unsafe { *(address as *const f32).offset(head as isize * step) },
    }
}

impl Block<'_> {
    /// The token, counted from the request's first, and the query head of a row.
    fn row(&self, p: &Problem, row: usize) -> (usize, usize) {
        (row / p.group(), self.head * p.group() + row % p.group())
    }

    /// The keys a row sees.
    fn keys_of(&self, p: &Problem, row: usize) -> Range<usize> {
        p.keys(row / p.group(), self.request.count, self.request.kv_len)
    }

    /// The keys any row sees.
    fn keys(&self, p: &Problem) -> Range<usize> {
        let end = self.keys_of(p, self.rows.end - 1).end;
        self.keys_of(p, self.rows.start).start.min(end)..end
    }
}

impl<'a> States<'a> {
    fn of(memory: &'a mut [f32], head_dim: usize) -> Self {
        let (o, rest) = memory.split_at_mut(ROWS * head_dim);
        let (m, l) = rest.split_at_mut(ROWS);
        States { o, m, l }
    }

    /// Of rows that have seen nothing.
    fn empty(memory: &'a mut [f32], head_dim: usize) -> Self {
        memory.fill(0.0);
        let states = States::of(memory, head_dim);
        states.m.fill(f32::NEG_INFINITY);
        states
    }

    /// Takes up what `rows` rows have seen in the keys that come next.
    #[inline(always)]
    fn fold<S: Simd>(&mut self, s: S, next: &States<'_>, rows: usize) {
        let head_dim = self.o.len() / ROWS;
        for row in 0..rows {
            let (m, next_m, next_l) = (self.m[row], next.m[row], next.l[row]);
            if next_l == 0.0 {
                continue;
            }
            let most = if next_m > m || next_m.is_nan() { next_m } else { m };
            let (keep, add) = (s.splat((m - most).exp()), s.splat((next_m - most).exp()));
            self.m[row] = most;
            let fold = |a: *mut f32, b: *const f32, n: usize| {
                for_vectors::<S>(
                    n,
                    #[inline(always)]
                    |i, count| {
                        // SAFETY: both have `n` elements.
                        unsafe {
                            let kept = s.mul(load_at(s, a.cast_const(), i, count), keep);
                            store_at(s, a, i, count, s.fma(load_at(s, b, i, count), add, kept));
                        }
                    },
                );
            };
            fold(&mut self.l[row], &next_l, 1);
            fold(
                self.o[row * head_dim..][..head_dim].as_mut_ptr(),
                next.o[row * head_dim..].as_ptr(),
                head_dim,
            );
        }
    }
}

/// [`States::fold`] of a part that another thread has worked on.
struct Fold<'a, 'b> {
    states: &'a mut States<'b>,
    next: &'a States<'b>,
    rows: usize,
}

impl Task for Fold<'_, '_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        self.states.fold(s, self.next, self.rows);
    }
}

/// Folds what a block's rows see in `splits` into `states`.
struct Attend<'a, C> {
    launch: &'a Launch<'a, Problem>,
    block: &'a Block<'a>,
    splits: Range<usize>,
    states: States<'a>,
    c: PhantomData<C>,
}

impl<C: CpuElement> Task for Attend<'_, C> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let p = self.launch.problem;
        let (rows, head_dim) = (self.block.rows.len(), p.head_dim);
        let queries = queries(self.launch, self.block);
        let mut memory = vec![0.0; ROWS * (head_dim + 2)];
        let mut weights = vec![0.0; ROWS * SPLIT];
        let mut cache = Cache::<C>::new(p);
        let seen = self.block.keys(p);
        for split in self.splits.clone() {
            let keys = seen.start.max(split * SPLIT)..seen.end.min((split + 1) * SPLIT);
            let next = States::empty(&mut memory, head_dim);
            // SAFETY: `requests` has judged the pages of all keys, `keys` are a split's at most, and all buffers have
            // room for ROWS rows.
            unsafe {
                let k = cache.find(self.launch, K_PAGES, self.block, keys.clone());
                for_rows(
                    rows,
                    #[inline(always)]
                    |first, four| match four {
                        true => scores::<S, C, 4>(s, &queries, k, head_dim, first, &mut weights),
                        false => scores::<S, C, 1>(s, &queries, k, head_dim, first, &mut weights),
                    },
                );
                for row in 0..rows {
                    let sees = self.block.keys_of(p, self.block.rows.start + row);
                    let sees = sees.start.clamp(keys.start, keys.end) - keys.start
                        ..sees.end.clamp(keys.start, keys.end) - keys.start;
                    let weights = &mut weights[row * SPLIT..][..keys.len()];
                    (next.m[row], next.l[row]) = weigh(s, p.softcap(), weights, sees);
                }
                let v = cache.find(self.launch, V_PAGES, self.block, keys.clone());
                for_rows(
                    rows,
                    #[inline(always)]
                    |first, four| match four {
                        true => add_values::<S, C, 4>(s, &weights, v, head_dim, first, next.o),
                        false => add_values::<S, C, 1>(s, &weights, v, head_dim, first, next.o),
                    },
                );
            }
            self.states.fold(s, &next, rows);
        }
    }
}

/// Calls `f` for rows by four, then (`false`) for each that is left.
#[inline(always)]
fn for_rows(rows: usize, mut f: impl FnMut(usize, bool)) {
    let whole = rows / 4 * 4;
    (0..whole).step_by(4).for_each(
        #[inline(always)]
        |first| f(first, true),
    );
    (whole..rows).for_each(
        #[inline(always)]
        |first| f(first, false),
    );
}

/// The queries of a block in f32, with all factors of the scores.
fn queries(launch: &Launch<'_, Problem>, block: &Block<'_>) -> Vec<f32> {
    let p = launch.problem;
    let factor = p.scale() * scale(launch, K_SCALE, p.k_scale_step, block.head);
    let mut queries = Vec::with_capacity(ROWS * p.head_dim);
    for row in block.rows.clone() {
        let (token, head) = block.row(p, row);
        let at = (block.request.first + token) as isize * p.q[0] + head as isize * p.q[1];
        with_float!(p.dtype, T => queries.extend((0..p.head_dim as isize).map(|d| {
            // SAFETY: an element of one of the rows.
            let value = unsafe { *(launch.args.address(Q) as *const T).offset(at + d * p.q[2]) };
            <T as CpuElement>::to_f32(value) * factor
        })));
    }
    queries
}

/// Where the keys or values of a split are.
struct Cache<C> {
    rows: Vec<*const C>,
    /// Copies, where elements of a head are apart.
    dense: Vec<C>,
}

impl<C: CpuElement> Cache<C> {
    fn new(p: &Problem) -> Self {
        let copied = if p.k[3] == 1 && p.v[3] == 1 { 0 } else { SPLIT * p.head_dim };
        Cache { rows: Vec::with_capacity(SPLIT), dense: vec![C::from_f32(0.0); copied] }
    }

    /// The rows of some keys, dense.
    ///
    /// # Safety
    /// The pages of the keys must exist, and the keys be a split's at most.
    unsafe fn find(
        &mut self,
        launch: &Launch<'_, Problem>,
        arg: usize,
        block: &Block<'_>,
        keys: Range<usize>,
    ) -> &[*const C] {
        let p = launch.problem;
        let [page_stride, slot_stride, head_stride, step] = if arg == K_PAGES { p.k } else { p.v };
        let table = launch.args.address(PAGE_TABLE) as *const i32;
        let cache = (launch.args.address(arg) as *const C).wrapping_offset(block.head as isize * head_stride);
        self.rows.clear();
        for (i, key) in keys.enumerate() {
            let page = (key / p.page_size) as isize;
            let at = block.request.index as isize * p.page_table[0] + page * p.page_table[1];
            // SAFETY: the table has this page.
            let id = unsafe { *table.offset(at) } as isize;
            let mut row =
                cache.wrapping_offset(id * page_stride + (key % p.page_size) as isize * slot_stride);
            if step != 1 {
                let copy = &mut self.dense[i * p.head_dim..][..p.head_dim];
                for (d, value) in copy.iter_mut().enumerate() {
                    // SAFETY: an element of the key's row.
                    *value = unsafe { *row.offset(d as isize * step) };
                }
                row = copy.as_ptr();
            }
            self.rows.push(row);
        }
        &self.rows
    }
}

/// The products of `R` rows from `first` on with all keys.
///
/// # Safety
/// Every key must have `head_dim` elements, a multiple of the lanes.
#[inline(always)]
unsafe fn scores<S: Simd, C: CpuElement, const R: usize>(
    s: S,
    queries: &[f32],
    keys: &[*const C],
    head_dim: usize,
    first: usize,
    scores: &mut [f32],
) {
    let q = queries[first * head_dim..][..R * head_dim].as_ptr();
    for (j, &key) in keys.iter().enumerate() {
        let ahead = *keys.get(j + AHEAD).unwrap_or(&key);
        let mut sums = [s.zero(); R];
        let mut d = 0;
        while d < head_dim {
            // SAFETY: all rows have `head_dim` elements.
            unsafe {
                fetch::<S, C>(ahead.wrapping_add(d));
                let k = C::load(s, key.add(d));
                for (r, sum) in sums.iter_mut().enumerate() {
                    *sum = s.fma(s.load(q.add(r * head_dim + d)), k, *sum);
                }
            }
            d += S::N;
        }
        for (r, sum) in sums.into_iter().enumerate() {
            scores[(first + r) * SPLIT + j] = s.reduce_add(sum);
        }
    }
}

/// Turns the scores a row sees into weights, the others into zeros; returns the largest score and the sum of weights.
#[inline(always)]
fn weigh<S: Simd>(s: S, softcap: f32, weights: &mut [f32], sees: Range<usize>) -> (f32, f32) {
    let (before, rest) = weights.split_at_mut(sees.start);
    let (seen, after) = rest.split_at_mut(sees.len());
    before.fill(0.0);
    after.fill(0.0);
    let row = seen.as_mut_ptr();
    let mut most = s.splat(f32::NEG_INFINITY);
    for_vectors::<S>(
        seen.len(),
        #[inline(always)]
        |i, count| {
            // SAFETY: inside the row.
            unsafe {
                let mut v = load_at(s, row.cast_const(), i, count);
                if softcap != 0.0 {
                    let cap = s.splat(softcap);
                    v = s.mul(cap, math::tanh(s, s.div(v, cap)));
                    store_at(s, row, i, count, v);
                }
                most = s.max_nan(most, replace_rest(s, v, count, f32::NEG_INFINITY));
            }
        },
    );
    let most = s.reduce_max(most);
    if most == f32::NEG_INFINITY {
        seen.fill(0.0);
        return (most, 0.0);
    }
    let mut sum = s.zero();
    for_vectors::<S>(
        seen.len(),
        #[inline(always)]
        |i, count| {
            // SAFETY: inside the row.
            unsafe {
                let v = math::exp(s, s.sub(load_at(s, row.cast_const(), i, count), s.splat(most)));
                store_at(s, row, i, count, v);
                sum = s.add(sum, replace_rest(s, v, count, 0.0));
            }
        },
    );
    (most, s.reduce_add(sum))
}

/// Adds the weighted values of all keys to `R` rows from `first` on.
///
/// # Safety
/// Every value must have `head_dim` elements, a multiple of the lanes.
#[inline(always)]
unsafe fn add_values<S: Simd, C: CpuElement, const R: usize>(
    s: S,
    weights: &[f32],
    values: &[*const C],
    head_dim: usize,
    first: usize,
    o: &mut [f32],
) {
    let o = o[first * head_dim..][..R * head_dim].as_mut_ptr();
    for tile in (0..values.len()).step_by(TILE) {
        let keys = tile..(tile + TILE).min(values.len());
        let mut d = 0;
        while d < head_dim {
            // SAFETY: all rows have `head_dim` elements.
            unsafe {
                let mut sums = [s.zero(); R];
                for (r, sum) in sums.iter_mut().enumerate() {
                    *sum = s.load(o.add(r * head_dim + d));
                }
                for j in keys.clone() {
                    fetch::<S, C>(values.get(j + TILE).unwrap_or(&values[j]).wrapping_add(d));
                    let v = C::load(s, values[j].add(d));
                    for (r, sum) in sums.iter_mut().enumerate() {
                        *sum = s.fma(s.splat(weights[(first + r) * SPLIT + j]), v, *sum);
                    }
                }
                for (r, sum) in sums.into_iter().enumerate() {
                    s.store(o.add(r * head_dim + d), sum);
                }
            }
            d += S::N;
        }
    }
}
