//! The checked call of `attention_backward`.

use super::super::problem::{
    self as forward, Bias, Grid, Heads, Rows, Sizes, check_dropout, check_grid, check_options, check_sizes,
    check_starts, heads, rows,
};
use super::{
    BIAS, CAUSAL, DBIAS, DK, DLSE, DOUT, DQ, DROPOUT, DSINKS, DV, K, KV_STARTS, LSE, MASK, OFFSET, OUT, Q,
    Q_STARTS, SCALE, SEED, SINKS, SOFTCAP, SPEC, V, WINDOW,
};
use crate::error::{Error, Result};
use crate::op::{Args, Attrs, Matcher};

/// A checked call.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Problem {
    /// The forward call: what it read and wrote is read here.
    pub(super) forward: forward::Problem,
    pub(super) dout: Heads,
    pub(super) dq: Heads,
    pub(super) dk: Heads,
    pub(super) dv: Heads,
    pub(super) dlse: Option<Rows>,
    /// Distances of neighbours of `dbias`, and those of the requests and heads that share it.
    pub(super) dbias: Option<Grid>,
    /// Sizes of `bias`: 1 or those of the call.
    pub(super) bias_batch: usize,
    pub(super) bias_heads: usize,
    /// Distance of neighbours of `dsinks`.
    pub(super) dsinks: Option<isize>,
}

pub(super) fn check(args: &Args<'_>, attrs: &Attrs) -> Result<Problem> {
    let op = SPEC.name;
    let sizes = Matcher::of(args, attrs)?;
    let dtype = args.at(Q).dtype();
    let Sizes { batch, q_len, kv_len, num_heads, num_kv_heads, head_dim } = check_sizes(op, &sizes)?;
    let packed = check_starts(op, &sizes, args.get(Q_STARTS), args.get(KV_STARTS))?;
    let grid = |index: usize| {
        let name = SPEC.args[index].name;
        args.get(index).map(|view| check_grid(op, name, view, packed.is_some())).transpose()
    };
    let mask = grid(MASK)?;
    let bias = grid(BIAS)?.map(|grid| Bias { grid, dtype: args.at(BIAS).dtype() });
    let [bias_batch, bias_heads] = match args.get(BIAS) {
        None => [1, 1],
        Some(view) => {
            for (what, &got, all) in
                [("batch", &view.shape()[0], batch), ("num_heads", &view.shape()[1], num_heads)]
            {
                if got != 1 && got != all {
                    let expected = format!("1 or {what}={all} in its place");
                    return Err(Error::argument(op, "bias", expected, format!("{:?}", view.shape())));
                }
            }
            [view.shape()[0], view.shape()[1]]
        }
    };
    for (gradient, of) in [(DBIAS, BIAS), (DSINKS, SINKS)] {
        if args.get(gradient).is_some() && args.get(of).is_none() {
            let expected = format!("a tensor, because `{}` is given", SPEC.args[gradient].name);
            return Err(Error::argument(op, SPEC.args[of].name, expected, "nothing"));
        }
    }
    let options = check_options(
        &sizes,
        attrs.int(WINDOW),
        attrs.float(SOFTCAP),
        attrs.optional_float(SCALE),
        head_dim,
    )?;
    let heads = |index: usize| heads(args.at(index));
    Ok(Problem {
        forward: forward::Problem {
            dtype,
            batch,
            q_len,
            kv_len,
            num_heads,
            num_kv_heads,
            head_dim,
            q: heads(Q),
            k: heads(K),
            v: heads(V),
            out: heads(OUT),
            packed,
            mask,
            bias,
            sinks: args.get(SINKS).map(|sinks| sinks.layout().step()),
            lse: rows(args.at(LSE)),
            has_lse: true,
            causal: attrs.bool(CAUSAL),
            window: options.window,
            softcap_bits: options.softcap.to_bits(),
            scale_bits: options.scale.to_bits(),
            dropout: check_dropout(&sizes, attrs, [DROPOUT, SEED, OFFSET])?,
            block_q: 0,
            block_kv: 0,
        },
        dout: heads(DOUT),
        dq: heads(DQ),
        dk: heads(DK),
        dv: heads(DV),
        dlse: args.get(DLSE).map(rows),
        dbias: grid(DBIAS)?,
        bias_batch,
        bias_heads,
        dsinks: args.get(DSINKS).map(|dsinks| dsinks.layout().step()),
    })
}
