//! The checked call of `linear_quant`.

use super::{
    ACT, BIAS, FORMAT, GATE, OUT, PRECISION, QuantFormat, QuantPrecision, RESIDUAL, SCALE, SPEC, TOLERANCE,
    W, X,
};
use crate::error::{Error, Result};
use crate::op::{Args, Attrs, Matcher};
use crate::ops::elementwise::function::Kind;
use crate::ops::linear::{Activation, Gate};
use crate::tensor::{DType, Space};

/// A checked call.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Problem {
    pub(super) format: QuantFormat,
    pub(super) x_dtype: DType,
    /// Also the type of bias and residual.
    pub(super) out_dtype: DType,
    pub(super) m: usize,
    /// Columns of `out`; with a gate, half the rows of `w`.
    pub(super) n: usize,
    pub(super) k: usize,
    /// Where rows of x, residual (out, if there is none) and out are, and of x again.
    pub(super) rows: Space<4>,
    pub(super) x_step: isize,
    pub(super) out_step: isize,
    /// If there is one.
    pub(super) residual_step: Option<isize>,
    pub(super) bias_step: Option<isize>,
    /// Of rows and of bytes.
    pub(super) w_strides: [isize; 2],
    /// Blocks are on even addresses, and their bytes neighbours.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    pub(super) w_aligned: bool,
    pub(super) activation: Option<Kind>,
    pub(super) gate: Gate,
    pub(super) scale_bits: u32,
    pub(super) precision: QuantPrecision,
}

pub(super) fn check(args: &Args<'_>, attrs: &Attrs) -> Result<Problem> {
    let mut sizes = Matcher::new(args, attrs);
    sizes.arg(X)?;
    sizes.arg(W)?;
    let (x, w, out) = (args.at(X), args.at(W), args.at(OUT));
    let (format, gate) = (QuantFormat::ALL[attrs.choice(FORMAT)], Gate::ALL[attrs.choice(GATE)]);
    let k = sizes.size("k");
    let wrong = |expected: String| Err(Error::argument(SPEC.name, "w", expected, format!("{:?}", w.shape())));
    if gate != Gate::None && !sizes.size("rows").is_multiple_of(2) {
        return wrong("an even number of rows, because of the gate".into());
    }
    match format.row_bytes(k) {
        Some(bytes) if bytes == sizes.size("bytes") => {}
        Some(bytes) => return wrong(format!("rows of {bytes} bytes, {k} weights in {}", format.name())),
        None => {
            let expected =
                format!("a multiple of {} columns, for blocks of {}", format.block_len(), format.name());
            return Err(Error::argument(SPEC.name, "x", expected, format!("{:?}", x.shape())));
        }
    }
    sizes.all()?;
    let scale = attrs.float(SCALE);
    sizes.option("scale", scale, "a finite number", (scale as f32).is_finite())?;
    let tolerance = attrs.float(TOLERANCE);
    let is_error = tolerance.is_finite() && tolerance >= 0.0;
    sizes.option("tolerance", tolerance, "a finite number of at least 0", is_error)?;
    let residual = args.get(RESIDUAL);
    let added = residual.unwrap_or(out).layout();
    let strides = w.layout().strides();
    Ok(Problem {
        format,
        x_dtype: x.dtype(),
        out_dtype: out.dtype(),
        m: sizes.leading_count(),
        n: sizes.size("n"),
        k,
        rows: Space::new(sizes.leading_rank(), [x.layout(), added, out.layout(), x.layout()]),
        x_step: x.layout().step(),
        out_step: out.layout().step(),
        residual_step: residual.map(|residual| residual.layout().step()),
        bias_step: args.get(BIAS).map(|bias| bias.layout().step()),
        w_strides: [strides[0], strides[1]],
        w_aligned: w.is_aligned(2) && strides[0] % 2 == 0 && strides[1] == 1 && format.block_bytes() % 2 == 0,
        activation: Activation::ALL[attrs.choice(ACT)].kind(),
        gate,
        scale_bits: (scale as f32).to_bits(),
        precision: QuantPrecision::ALL[attrs.choice(PRECISION)].chosen(tolerance),
    })
}
