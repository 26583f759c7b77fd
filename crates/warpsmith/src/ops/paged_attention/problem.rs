//! The checked call of `paged_attention`: sizes, strides, types and options.

use super::{
    ALWAYS_SHARE, CAUSAL, GROUP_STARTS, K_PAGES, K_SCALE, KV_LENS, LSE, OUT, PAGE_TABLE, PREFIX_LENS, Q,
    Q_STARTS, SCALE, SINKS, SOFTCAP, SPEC, V_PAGES, V_SCALE, WINDOW,
};
use crate::error::{Error, Result};
use crate::op::{Args, Attrs, Cost, Matcher, Products};
use crate::tensor::{DType, TensorView};
use std::ops::Range;

/// The sizes of a head that kernels are written for.
pub const HEAD_DIMS: [usize; 8] = [32, 64, 80, 96, 128, 160, 192, 256];
/// The types of a cache that holds less than the queries' type.
pub(super) const NARROW: [DType; 2] = [DType::F8E4M3, DType::F8E5M2];
pub(super) const LARGEST_PAGE: usize = 256;
/// Groups within groups.
pub(super) const MOST_LEVELS: usize = 8;
/// No request has more keys than this.
pub(in crate::ops) const MOST_KEYS: usize = 1 << 30;

/// Levels of groups of requests that begin with the same pages.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(in crate::ops) struct Shared {
    pub levels: usize,
    pub groups: usize,
    /// Distances of neighbouring levels and groups in `group_starts`.
    pub starts: [isize; 2],
    /// The same in `prefix_lens`.
    pub lens: [isize; 2],
}

/// A checked call.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Problem {
    pub(in crate::ops) dtype: DType,
    pub(in crate::ops) cache_dtype: DType,
    pub(in crate::ops) requests: usize,
    pub(in crate::ops) num_tokens: usize,
    /// Queries of every request, where there are no `q_starts`.
    pub(in crate::ops) queries: Option<usize>,
    /// Whether every request has as many keys as there is room for.
    pub(in crate::ops) full: bool,
    pub(in crate::ops) num_heads: usize,
    pub(in crate::ops) num_kv_heads: usize,
    pub(in crate::ops) head_dim: usize,
    pub(in crate::ops) num_pages: usize,
    pub(in crate::ops) page_size: usize,
    pub(in crate::ops) max_pages: usize,
    /// Strides of tokens, heads and elements.
    pub(in crate::ops) q: [isize; 3],
    /// Strides of pages, slots, heads and elements.
    pub(in crate::ops) k: [isize; 4],
    pub(in crate::ops) v: [isize; 4],
    pub(in crate::ops) out: [isize; 3],
    /// Strides of tokens and heads.
    pub(in crate::ops) lse: Option<[isize; 2]>,
    /// Strides of requests and pages.
    pub(in crate::ops) page_table: [isize; 2],
    pub(in crate::ops) kv_lens_step: isize,
    pub(in crate::ops) q_starts_step: isize,
    /// Distance of the scales of neighbouring KV heads: zero if they share one.
    pub(in crate::ops) k_scale_step: isize,
    pub(in crate::ops) v_scale_step: isize,
    pub(in crate::ops) sinks_step: isize,
    pub(in crate::ops) shared: Option<Shared>,
    /// Share prefixes even where it is not expected to pay.
    pub(in crate::ops) always_share: bool,
    pub(in crate::ops) causal: bool,
    /// Keys before its own position that a query sees; zero for all.
    pub(in crate::ops) window: usize,
    /// Zero for none.
    pub(in crate::ops) softcap_bits: u32,
    pub(in crate::ops) scale_bits: u32,
    /// Heads of queries, keys, values and results are dense and begin at multiples of 16 bytes.
    pub(in crate::ops) vectors: bool,
}

impl Problem {
    /// The factor of the scores.
    pub(super) fn scale(&self) -> f32 {
        f32::from_bits(self.scale_bits)
    }

    /// What scores approach; zero for none.
    pub(super) fn softcap(&self) -> f32 {
        f32::from_bits(self.softcap_bits)
    }

    /// Query heads that share a KV head.
    pub(super) fn group(&self) -> usize {
        self.num_heads / self.num_kv_heads
    }

    /// Keys that a row of the page table can hold.
    pub(super) fn max_keys(&self) -> usize {
        self.max_pages * self.page_size
    }

    /// The keys that query `i` of `count` sees.
    pub(super) fn keys(&self, i: usize, count: usize, kv_len: usize) -> Range<usize> {
        let position = i as isize + kv_len as isize - count as isize;
        let end = if self.causal { (position + 1).max(0) as usize } else { kv_len };
        let first = position.saturating_sub_unsigned(self.window).max(0) as usize;
        if self.window == 0 { 0..end } else { first.min(end)..end }
    }

    /// The least work if every request fills its table; where prefixes are shared, one table may be all there is to read.
    pub(super) fn cost(&self) -> Cost {
        let keys = self.max_keys();
        let count = self.num_tokens.checked_div(self.requests).unwrap_or(0);
        let read = match self.window {
            0 => keys,
            window => keys.min(window + count.max(1)),
        };
        let tables = if self.shared.is_some() { self.requests.min(1) } else { self.requests };
        let cache = 2 * tables * read * self.num_kv_heads * self.head_dim * self.cache_dtype.size();
        let tokens = 2 * self.num_tokens * self.num_heads * self.head_dim * self.dtype.size();
        let pairs: f64 = (0..count).map(|i| self.keys(i, count, keys).len() as f64).sum();
        let flops = 4.0 * (self.requests * self.num_heads * self.head_dim) as f64 * pairs;
        Cost::multiplying((cache + tokens) as f64, flops, Products::of(self.dtype))
    }
}

/// Whether the heads of a tensor can be moved in 16-byte pieces.
fn has_vectors(view: &TensorView<'_>) -> bool {
    let (layout, size) = (view.layout(), view.dtype().size());
    let apart = layout.shape().iter().zip(layout.strides()).rev().skip(1);
    let aligned =
        apart.into_iter().all(|(&n, &stride)| n <= 1 || (stride as usize * size).is_multiple_of(16));
    aligned && layout.step() == 1 && view.is_aligned(16)
}

fn strides<const N: usize>(view: &TensorView<'_>) -> [isize; N] {
    view.layout().strides().try_into().expect("the rank was checked")
}

pub(super) fn check(args: &Args<'_>, attrs: &Attrs) -> Result<Problem> {
    let op = SPEC.name;
    let sizes = Matcher::of(args, attrs)?;
    let (q, k, v, out) = (args.at(Q), args.at(K_PAGES), args.at(V_PAGES), args.at(OUT));
    let (dtype, cache_dtype, table) = (q.dtype(), k.dtype(), args.at(PAGE_TABLE));
    let [num_tokens, num_heads, num_kv_heads, head_dim] =
        ["num_tokens", "num_heads", "num_kv_heads", "head_dim"].map(|name| sizes.size(name));
    let [num_pages, page_size, requests, max_pages] =
        ["num_pages", "page_size", "requests", "max_pages"].map(|name| sizes.size(name));
    let wrong =
        |arg: &str, expected: String, got: usize| Err(Error::argument(op, arg, expected, got.to_string()));
    if !HEAD_DIMS.contains(&head_dim) {
        let known = HEAD_DIMS.map(|d| d.to_string()).join(", ");
        return wrong("q", format!("a head_dim out of {known}"), head_dim);
    }
    if num_heads > 0 && (num_kv_heads == 0 || num_heads % num_kv_heads != 0) {
        return wrong(
            "k_pages",
            format!("a number of heads that divides num_heads={num_heads}"),
            num_kv_heads,
        );
    }
    if page_size == 0 || page_size > LARGEST_PAGE {
        return wrong("k_pages", format!("a page_size from 1 to {LARGEST_PAGE}"), page_size);
    }
    if max_pages > MOST_KEYS / page_size {
        return wrong("page_table", format!("at most {} pages", MOST_KEYS / page_size), max_pages);
    }
    let mut queries = None;
    match args.get(Q_STARTS) {
        Some(_) => {}
        None if requests == 0 && num_tokens > 0 => {
            return wrong("q", "no tokens without requests".into(), num_tokens);
        }
        None if requests > 0 && num_tokens % requests > 0 => {
            return wrong(
                "q",
                format!("tokens for requests={requests}, the same number for each"),
                num_tokens,
            );
        }
        None => queries = Some(num_tokens.checked_div(requests).unwrap_or(0)),
    }
    let scale_step = |index: usize| match args.get(index) {
        None => Ok(0),
        Some(view) => {
            let name = SPEC.args[index].name;
            if !NARROW.contains(&cache_dtype) {
                let expected = format!("nothing, because the cache is {cache_dtype}");
                return Err(Error::argument(op, name, expected, "a tensor"));
            }
            Ok(if view.layout().numel() == 1 { 0 } else { view.layout().step() })
        }
    };
    let (k_scale_step, v_scale_step) = (scale_step(K_SCALE)?, scale_step(V_SCALE)?);
    let shared = check_shared(&sizes, args)?;
    let (window, softcap) = (attrs.int(WINDOW), attrs.float(SOFTCAP));
    let scale = attrs.optional_float(SCALE).unwrap_or_else(|| 1.0 / (head_dim as f64).sqrt());
    sizes.option("window", window, "a number of keys, or 0", window >= 0)?;
    let alone = window == 0 || shared.is_none();
    sizes.option("window", window, "0, because `group_starts` is given", alone)?;
    let within = |x: f64| (x as f32).is_finite();
    sizes.option("softcap", softcap, "a finite number of zero or more", softcap >= 0.0 && within(softcap))?;
    sizes.option("scale", scale, "a finite number", within(scale))?;
    let step = |index: usize| args.get(index).map_or(0, |view| view.layout().step());
    Ok(Problem {
        dtype,
        cache_dtype,
        requests,
        num_tokens,
        queries,
        full: false,
        num_heads,
        num_kv_heads,
        head_dim,
        num_pages,
        page_size,
        max_pages,
        q: strides(q),
        k: strides(k),
        v: strides(v),
        out: strides(out),
        lse: args.get(LSE).map(strides),
        page_table: strides(table),
        kv_lens_step: step(KV_LENS),
        q_starts_step: step(Q_STARTS),
        k_scale_step,
        v_scale_step,
        sinks_step: step(SINKS),
        shared,
        always_share: attrs.bool(ALWAYS_SHARE),
        causal: attrs.bool(CAUSAL),
        // A window wider than any request is treated as the widest request.
        window: (window as usize).min(MOST_KEYS),
        softcap_bits: (softcap as f32).to_bits(),
        scale_bits: (scale as f32).to_bits(),
        vectors: [q, k, v, out].into_iter().all(has_vectors),
    })
}

fn check_shared(sizes: &Matcher<'_>, args: &Args<'_>) -> Result<Option<Shared>> {
    let (Some(starts), Some(lens)) = (args.get(GROUP_STARTS), args.get(PREFIX_LENS)) else {
        return Ok(None);
    };
    let (levels, groups) = (sizes.size("levels"), sizes.size("groups"));
    if levels > MOST_LEVELS {
        let expected = format!("at most {MOST_LEVELS} levels");
        return Err(Error::argument(SPEC.name, "group_starts", expected, levels.to_string()));
    }
    Ok(Some(Shared { levels, groups, starts: strides(starts), lens: strides(lens) }))
}
