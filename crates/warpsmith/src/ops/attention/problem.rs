//! The checked call of `attention`: sizes, strides, types and options.

use super::{
    BIAS, BLOCK_KV, BLOCK_Q, CAUSAL, DROPOUT, K, KV_STARTS, LSE, MASK, OFFSET, OUT, Q, Q_STARTS, SCALE, SEED,
    SINKS, SOFTCAP, SPEC, V, WINDOW,
};
use crate::cpu::attention::Dropout;
use crate::error::{Error, Result};
use crate::op::{Args, Attrs, Matcher};
use crate::tensor::{DType, TensorView};
use std::ops::Range;

/// The sizes of a head that kernels are written for.
pub(in crate::ops) const HEAD_DIMS: [usize; 8] = [32, 64, 80, 96, 128, 160, 192, 256];
/// Block sizes, in rows and in keys, that some kernel offers.
pub(super) const BLOCKS_Q: [usize; 5] = [16, 64, 128, 192, 256];
pub(super) const BLOCKS_KV: [usize; 5] = [32, 64, 80, 96, 128];

/// Strides in elements of `q`, `k`, `v` or `out`, and what they say about vector access.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(in crate::ops) struct Heads {
    /// From one batch to the next. Meaningless for packed requests, whose batch is 1.
    pub batch: isize,
    /// From one token to the next.
    pub token: isize,
    /// From one head to the next.
    pub head: isize,
    /// From one element of a head to the next.
    pub dim: isize,
    /// Heads are dense and begin at multiples of 16 bytes, so that they can be moved in pieces of that size.
    pub vectors: bool,
}

/// Strides in elements of `mask` or `bias`; zero along what all share.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(in crate::ops) struct Grid {
    pub batch: isize,
    pub head: isize,
    pub query: isize,
    pub key: isize,
    /// Elements of the tensor.
    pub elements: usize,
}

/// What is added to scores.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(in crate::ops) struct Bias {
    pub grid: Grid,
    pub dtype: DType,
}

/// Strides in elements of `lse`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub(in crate::ops) struct Rows {
    pub batch: isize,
    pub head: isize,
    pub query: isize,
}

/// A checked call.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Problem {
    pub(in crate::ops) dtype: DType,
    /// 1 for packed requests.
    pub(in crate::ops) batch: usize,
    /// Queries per batch entry; of all requests where they are packed.
    pub(in crate::ops) q_len: usize,
    /// Keys per batch entry; of all requests where they are packed.
    pub(in crate::ops) kv_len: usize,
    pub(in crate::ops) num_heads: usize,
    pub(in crate::ops) num_kv_heads: usize,
    pub(in crate::ops) head_dim: usize,
    pub(in crate::ops) q: Heads,
    pub(in crate::ops) k: Heads,
    pub(in crate::ops) v: Heads,
    pub(in crate::ops) out: Heads,
    /// Requests packed along the length, if they are, and strides of `q_starts` and `kv_starts`.
    pub(in crate::ops) packed: Option<Packed>,
    pub(in crate::ops) mask: Option<Grid>,
    pub(in crate::ops) bias: Option<Bias>,
    /// Stride of `sinks`.
    pub(in crate::ops) sinks: Option<isize>,
    pub(in crate::ops) lse: Rows,
    pub(in crate::ops) has_lse: bool,
    pub(in crate::ops) causal: bool,
    /// Keys before its own position that a query sees; zero for all.
    pub(in crate::ops) window: usize,
    /// Zero for none.
    pub(in crate::ops) softcap_bits: u32,
    pub(in crate::ops) scale_bits: u32,
    pub(in crate::ops) dropout: Option<Dropout>,
    /// Rows and keys of the blocks that the caller wants; zero for any.
    pub(in crate::ops) block_q: usize,
    pub(in crate::ops) block_kv: usize,
}

/// Requests packed along the length.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(in crate::ops) struct Packed {
    pub requests: usize,
    /// Stride of `q_starts`.
    pub q_step: isize,
    /// Stride of `kv_starts`.
    pub kv_step: isize,
}

impl Problem {
    /// The factor of the scores.
    pub(in crate::ops) fn scale(&self) -> f32 {
        f32::from_bits(self.scale_bits)
    }

    /// What scores approach; zero for none.
    pub(in crate::ops) fn softcap(&self) -> f32 {
        f32::from_bits(self.softcap_bits)
    }

    /// Whether a kernel with blocks of these numbers of rows and keys offers what the caller wants.
    pub(super) fn admits(&self, rows: &[usize], keys: &[usize]) -> std::result::Result<(), String> {
        for (what, wanted, offered) in [("rows", self.block_q, rows), ("keys", self.block_kv, keys)] {
            if wanted != 0 && !offered.contains(&wanted) {
                return Err(format!("its blocks have {} {what}, not {wanted}", listed(offered, " or ")));
            }
        }
        Ok(())
    }

    /// Refuses dropout, for kernels that have none.
    #[cfg(feature = "cuda")]
    pub(in crate::ops) fn without_dropout(&self) -> std::result::Result<(), String> {
        match self.dropout {
            Some(_) => Err("it has no dropout".into()),
            None => Ok(()),
        }
    }

    /// Query heads that share a KV head; zero if there is none.
    pub(in crate::ops) fn group(&self) -> usize {
        self.num_heads.checked_div(self.num_kv_heads).unwrap_or(0)
    }

    /// Requests, packed or not.
    pub(in crate::ops) fn requests(&self) -> usize {
        self.packed.map_or(self.batch, |packed| packed.requests)
    }

    /// The keys that query `i` of a request of these lengths sees, before masking.
    pub(in crate::ops) fn keys(&self, i: usize, q_len: usize, kv_len: usize) -> Range<usize> {
        let position = i as isize + kv_len as isize - q_len as isize;
        let end = if self.causal { (position + 1).clamp(0, kv_len as isize) as usize } else { kv_len };
        let first = position.saturating_sub_unsigned(self.window).max(0) as usize;
        if self.window == 0 { 0..end } else { first.min(end)..end }
    }

    /// Pairs of queries and keys that see each other, before masking. Packed requests count as equally long.
    pub(super) fn seen_pairs(&self) -> f64 {
        let requests = self.requests().max(1);
        let (q_len, kv_len) = (self.batch * self.q_len / requests, self.batch * self.kv_len / requests);
        let seen = |i: usize| self.keys(i, q_len, kv_len).len() as f64;
        // Long calls are sampled: between two samples the number grows linearly, except at corners.
        let step = q_len.div_ceil(1 << 16).max(1);
        let sum: f64 = (0..q_len).step_by(step).map(|i| seen(i) * step.min(q_len - i) as f64).sum();
        requests as f64 * sum
    }
}

pub(super) fn listed(numbers: &[usize], separator: &str) -> String {
    numbers.iter().map(usize::to_string).collect::<Vec<_>>().join(separator)
}

pub(super) fn heads(view: &TensorView<'_>) -> Heads {
    let layout = view.layout();
    let &[batch, token, head, dim] = layout.strides() else { unreachable!("four dimensions were checked") };
    let per_vector = 16 / view.dtype().size();
    let apart = layout.shape().iter().zip(layout.strides()).take(3);
    let aligned =
        apart.into_iter().all(|(&n, &stride)| n <= 1 || (stride as usize).is_multiple_of(per_vector));
    Heads { batch, token, head, dim, vectors: dim == 1 && aligned && view.is_aligned(16) }
}

pub(super) fn check(args: &Args<'_>, attrs: &Attrs) -> Result<Problem> {
    let op = SPEC.name;
    let sizes = Matcher::of(args, attrs)?;
    let (q, k, v, out) = (args.at(Q), args.at(K), args.at(V), args.at(OUT));
    let dtype = q.dtype();
    let Sizes { batch, q_len, kv_len, num_heads, num_kv_heads, head_dim } = check_sizes(op, &sizes)?;
    let packed = check_starts(op, &sizes, args.get(Q_STARTS), args.get(KV_STARTS))?;
    let lse = args.get(LSE).map_or(Rows::default(), rows);
    let grid = |index: usize| {
        let name = SPEC.args[index].name;
        args.get(index).map(|view| check_grid(op, name, view, packed.is_some())).transpose()
    };
    let mask = grid(MASK)?;
    let bias = grid(BIAS)?.map(|grid| Bias { grid, dtype: args.at(BIAS).dtype() });

    let options = check_options(
        &sizes,
        attrs.int(WINDOW),
        attrs.float(SOFTCAP),
        attrs.optional_float(SCALE),
        head_dim,
    )?;
    let blocks =
        [("block_q", attrs.int(BLOCK_Q), &BLOCKS_Q[..]), ("block_kv", attrs.int(BLOCK_KV), &BLOCKS_KV)];
    for (name, block, known) in blocks {
        let expected = format!("{}, or 0 to let the kernel choose", listed(known, ", "));
        let ok = block == 0 || known.iter().any(|&n| n as i64 == block);
        sizes.option(name, block, &expected, ok)?;
    }
    Ok(Problem {
        dtype,
        batch,
        q_len,
        kv_len,
        num_heads,
        num_kv_heads,
        head_dim,
        q: heads(q),
        k: heads(k),
        v: heads(v),
        out: heads(out),
        packed,
        mask,
        bias,
        sinks: args.get(SINKS).map(|sinks| sinks.layout().step()),
        lse,
        has_lse: args.get(LSE).is_some(),
        causal: attrs.bool(CAUSAL),
        window: options.window,
        softcap_bits: options.softcap.to_bits(),
        scale_bits: options.scale.to_bits(),
        dropout: check_dropout(&sizes, attrs, [DROPOUT, SEED, OFFSET])?,
        block_q: attrs.int(BLOCK_Q) as usize,
        block_kv: attrs.int(BLOCK_KV) as usize,
    })
}

/// The sizes of a call.
pub(super) struct Sizes {
    pub batch: usize,
    pub q_len: usize,
    pub kv_len: usize,
    pub num_heads: usize,
    pub num_kv_heads: usize,
    pub head_dim: usize,
}

pub(super) fn check_sizes(op: &'static str, sizes: &Matcher<'_>) -> Result<Sizes> {
    let [batch, q_len, kv_len, num_heads, num_kv_heads, head_dim] =
        ["batch", "q_len", "kv_len", "num_heads", "num_kv_heads", "head_dim"].map(|name| sizes.size(name));
    if !HEAD_DIMS.contains(&head_dim) {
        let known = listed(&HEAD_DIMS, ", ");
        return Err(Error::argument(op, "q", format!("a head_dim out of {known}"), head_dim.to_string()));
    }
    if num_heads > 0 && (num_kv_heads == 0 || num_heads % num_kv_heads != 0) {
        let expected = format!("a number of heads that divides num_heads={num_heads}");
        return Err(Error::argument(op, "k", expected, num_kv_heads.to_string()));
    }
    Ok(Sizes { batch, q_len, kv_len, num_heads, num_kv_heads, head_dim })
}

/// What options say about scores.
pub(super) struct Options {
    pub window: usize,
    pub softcap: f32,
    pub scale: f32,
}

pub(super) fn check_options(
    sizes: &Matcher<'_>,
    window: i64,
    softcap: f64,
    scale: Option<f64>,
    head_dim: usize,
) -> Result<Options> {
    let scale = scale.unwrap_or_else(|| 1.0 / (head_dim as f64).sqrt());
    sizes.option("window", window, "a number of keys, or 0", window >= 0)?;
    let within = |x: f64| (x as f32).is_finite();
    sizes.option("softcap", softcap, "a finite number of zero or more", softcap >= 0.0 && within(softcap))?;
    sizes.option("scale", scale, "a finite number", within(scale))?;
    Ok(Options { window: window as usize, softcap: softcap as f32, scale: scale as f32 })
}

/// The dropout that is asked for, by the positions of its options.
pub(super) fn check_dropout(
    sizes: &Matcher<'_>,
    attrs: &Attrs,
    [dropout, seed, offset]: [usize; 3],
) -> Result<Option<Dropout>> {
    let probability = attrs.float(dropout);
    let ok = (0.0..1.0).contains(&probability);
    sizes.option("dropout", probability, "a number from 0 to below 1", ok)?;
    Ok(Dropout::new(probability, attrs.int(seed), attrs.int(offset)))
}

/// The strides of an `lse`, or of its gradient.
pub(super) fn rows(view: &TensorView<'_>) -> Rows {
    let strides = view.layout().strides();
    Rows { batch: strides[0], head: strides[1], query: strides[2] }
}

/// The packed requests, if starts are given.
pub(super) fn check_starts(
    op: &'static str,
    sizes: &Matcher<'_>,
    q_starts: Option<&TensorView<'_>>,
    kv_starts: Option<&TensorView<'_>>,
) -> Result<Option<Packed>> {
    let (Some(q_starts), Some(kv_starts)) = (q_starts, kv_starts) else { return Ok(None) };
    let (requests, batch) = (sizes.size("requests"), sizes.size("batch"));
    if batch != 1 {
        let expected = "a batch of 1, because the requests are packed";
        return Err(Error::argument(op, "q", expected, format!("batch={batch}")));
    }
    let step = |view: &TensorView<'_>| view.layout().step();
    Ok(Some(Packed { requests, q_step: step(q_starts), kv_step: step(kv_starts) }))
}

/// The strides of a mask or bias.
pub(super) fn check_grid(
    op: &'static str,
    name: &'static str,
    view: &TensorView<'_>,
    packed: bool,
) -> Result<Grid> {
    if packed {
        let expected = "nothing, because the requests are packed";
        return Err(Error::argument(op, name, expected, "a tensor"));
    }
    let stride = |dim: usize| match view.shape()[dim] {
        1 => 0,
        _ => view.layout().strides()[dim],
    };
    Ok(Grid {
        batch: stride(0),
        head: stride(1),
        query: stride(2),
        key: stride(3),
        elements: view.layout().numel(),
    })
}
