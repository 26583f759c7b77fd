//! `linear_cross_entropy`: the loss of a language model's head, and both gradients, without ever holding the logits of all
//! rows. `loss` is the `cross_entropy` of the logits `x · wᵀ` against `targets`.
//!
//! With `dz` the gradient of the sum of the losses with respect to the logits, as `cross_entropy_backward` defines it:
//! `dx = dz · w` and `dw = dzᵀ · x`. They are the gradients of the sum, whatever the reduction: what `mean` divides by is
//! known only at the end, and f16 would lose small gradients. `linear_cross_entropy_backward` makes those of the loss of them.
//!
//! - Shapes: `x` and `dx` are `[..., hidden]`, `w` and `dw` are `[vocab, hidden]`, `targets` is `[...]`; `loss` and `count` are one
//!   number each, `[]`. Any strides within a matrix, but rows must be the same distance apart over all leading dimensions.
//!   `count`, `dx` and `dw` are optional. There is at least one column of logits.
//! - Types: f32, f16 or bf16 for `x`, the same for `w`, `dx` and `dw`; i64 or i32 for `targets`; f32 for `loss` and `count`.
//! - Options and the reductions `mean` and `sum` are those of `cross_entropy`, and so is what a row's loss is.
//! - Rounding: logits are sums in f32 and are not rounded to a narrower type. `dz` is computed in f32 and rounded to the type of
//!   `x` before it is multiplied. Sums are in f32. Rows are taken in parts, of as many rows as [`part_rows`] says: `dw` adds up the
//!   sums of the parts, in their order, and is rounded to its type after each.
//! - What products on CPUs with AMX or AVX-512 BF16 take for zero is as in `linear`.
//! - Rows whose target is `ignore_index` have a `dz` of zeros, and count for nothing. Where `x` or `w` is not finite, products
//!   with these zeros are NaN, in `dx` and `dw`.
//! - NaN and infinities give what the formulas give. Targets must be `ignore_index` or from 0 to below the vocabulary. On the
//!   CPU others are an error, found before anything is written; on a GPU the loss of such a row is NaN.
//! - Bits: sums have a fixed order, and two calls give the same bits. A row of `dx` has the same bits whatever the other rows are.
//! - Memory: the logits of one part, in f32.

mod backward;
#[cfg(feature = "lab")]
mod cases;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(feature = "lab")]
mod reference;
#[cfg(feature = "tests")]
mod tests;

pub use backward::{Backward, LinearCrossEntropyBackward};

use super::cross_entropy::check_vocab;
use super::cross_entropy::options::{
    ATTRS_OF_A_NUMBER, IGNORE_INDEX, LABEL_SMOOTHING, Options, REDUCTION, Reduction, SOFTCAP, Z_LOSS,
};
use super::linear::problem::{Matrix, Problem as Product};
use crate::cpu::Tier;
use crate::error::Result;
use crate::op::gradient::{InputGradient, Source};
use crate::op::{
    ArgSpec, Args, Attrs, Autocast, Call, Cost, DTypeRule, Gradient, Kernel, Matcher, OneOutput, Op, OpSpec,
    Products, SizeSpec, shape,
};
use crate::tensor::{DType, Space, Tensor, TensorView, TensorViewMut};

const X: usize = 0;
const W: usize = 1;
const TARGETS: usize = 2;
const LOSS: usize = 3;
const COUNT: usize = 4;
const DX: usize = 5;
const DW: usize = 6;

/// The most rows of a part, and the fewest.
const MOST_ROWS: usize = 1024;
const FEWEST_ROWS: usize = 128;
/// Logits of a part, at most, unless rows are so long that the fewest have more.
const PART_LOGITS: usize = 1 << 26;

/// How many rows a part has over a vocabulary; the last may have fewer. A multiple of 128.
pub fn part_rows(vocab: usize) -> usize {
    (PART_LOGITS / vocab.max(1) / FEWEST_ROWS * FEWEST_ROWS).clamp(FEWEST_ROWS, MOST_ROWS)
}

/// A checked call.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Problem {
    dtype: DType,
    target_dtype: DType,
    rows: usize,
    hidden: usize,
    vocab: usize,
    options: Options,
    x: Matrix,
    w: Matrix,
    dx: Option<Matrix>,
    dw: Option<Matrix>,
    /// Leading dimensions of the targets.
    targets: Space<4>,
    has_count: bool,
}

/// Rows that are computed together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Part {
    first: usize,
    rows: usize,
}

impl Problem {
    /// The parts, in their order. Without rows there is one of none: `dw` is to be written all the same.
    fn parts(&self) -> impl Iterator<Item = Part> + use<> {
        let (rows, most) = (self.rows, part_rows(self.vocab));
        (0..rows.div_ceil(most).max(1)).map(move |index| {
            let first = index * most;
            Part { first, rows: most.min(rows - first) }
        })
    }

    /// Elements of f32 from one row of logits to the next: rows begin on cache lines, and not at powers of two, which share
    /// few places in a cache.
    fn pitch(&self) -> usize {
        self.vocab.next_multiple_of(32) + 32
    }

    /// Bytes of the logits of the largest part.
    fn logits_bytes(&self) -> usize {
        let rows = part_rows(self.vocab).min(self.rows);
        rows.saturating_mul(self.pitch()).saturating_mul(size_of::<f32>())
    }

    /// The logits of a part.
    fn logits(&self) -> Matrix {
        Matrix { row: self.pitch() as isize, col: 1, aligned: true }
    }

    /// Their gradient, which takes their place.
    fn dz(&self) -> Matrix {
        let narrower = size_of::<f32>() / self.dtype.size();
        Matrix { row: (self.pitch() * narrower) as isize, col: 1, aligned: true }
    }

    /// The product that gives the logits of a part.
    fn product_of_logits(&self, part: Part) -> Product {
        let matrices = [self.x, self.w, self.logits()];
        Product::product(self.dtype, false, [part.rows, self.vocab, self.hidden], matrices).into_f32()
    }

    /// The product that gives rows of `dx`, if that is asked for.
    fn product_of_dx(&self, part: Part) -> Option<Product> {
        let matrices = [self.dz(), self.w.transposed(), self.dx?];
        let product = Product::product(self.dtype, false, [part.rows, self.hidden, self.vocab], matrices);
        (product.m * product.n > 0).then_some(product)
    }

    /// The product that a part adds to `dw`, if that is asked for.
    fn product_of_dw(&self, part: Part) -> Option<Product> {
        let matrices = [self.dz().transposed(), self.x.transposed(), self.dw?];
        let product = Product::product(self.dtype, false, [self.vocab, self.hidden, part.rows], matrices);
        let product = if part.first > 0 { product.adding() } else { product };
        (product.m * product.n > 0).then_some(product)
    }

    /// Whether a gradient is asked for.
    fn has_gradients(&self) -> bool {
        self.dx.is_some() || self.dw.is_some()
    }

    /// The address of row `row` of `x` or `dx`.
    fn row_at(&self, address: usize, matrix: &Matrix, row: usize) -> usize {
        address.wrapping_add_signed(row as isize * matrix.row * self.dtype.size() as isize)
    }
}

fn check(args: &Args<'_>, attrs: &Attrs) -> Result<Problem> {
    let op = Forward::SPEC.name;
    let sizes = Matcher::of(args, attrs)?;
    let options = Options::check(&sizes, attrs)?;
    let (x, w, targets, vocab) = (args.at(X), args.at(W), args.at(TARGETS), sizes.size("vocab"));
    check_vocab(op, "w", vocab, w.shape())?;
    let dx = args.get(DX).map(|dx| Matrix::of_rows(op, "dx", dx)).transpose()?;
    Ok(Problem {
        dtype: x.dtype(),
        target_dtype: targets.dtype(),
        rows: sizes.leading_count(),
        hidden: sizes.size("hidden"),
        vocab,
        options,
        x: Matrix::of_rows(op, "x", x)?,
        w: Matrix::of_weight(w),
        dx,
        dw: args.get(DW).map(Matrix::of_weight),
        targets: Space::new(sizes.leading_rank(), [targets.layout(); 4]),
        has_count: args.get(COUNT).is_some(),
    })
}

/// The op, as listed in [`crate::ops::ALL`].
#[derive(Default)]
pub struct Forward;

// SAFETY: only `check` makes a problem; it holds the types, sizes and strides of the arguments it judged, and the kernels
// go by these alone. Targets, which are values of a tensor, are checked where they are used.
unsafe impl Op for Forward {
    type Problem = Problem;

    const SPEC: OpSpec = OpSpec {
        name: "linear_cross_entropy",
        summary: "Cross-entropy of the logits of a head, and its gradients, in parts",
        args: &[
            ArgSpec::input("x", shape![.., hidden], DTypeRule::FLOAT, "hidden states"),
            ArgSpec::input("w", shape![vocab, hidden], DTypeRule::Same(X), "weight of the head"),
            ArgSpec::input("targets", shape![..], DTypeRule::INDEX, "rows of w, or ignore_index"),
            ArgSpec::output("loss", shape![], DTypeRule::F32, ""),
            ArgSpec::output("count", shape![], DTypeRule::F32, "rows that are not ignored").optional(),
            ArgSpec::output(
                "dx",
                shape![.., hidden],
                DTypeRule::Same(X),
                "gradient of the sum of losses with respect to x",
            )
            .optional(),
            ArgSpec::output(
                "dw",
                shape![vocab, hidden],
                DTypeRule::Same(X),
                "gradient of the sum of losses with respect to w",
            )
            .optional(),
        ],
        attrs: ATTRS_OF_A_NUMBER,
        sizes: &[
            SizeSpec { name: "num_tokens", default: 512, doc: "rows of x" },
            SizeSpec { name: "vocab", default: 32_000, doc: "rows of w" },
            SizeSpec { name: "hidden", default: 1024, doc: "columns of x" },
        ],
        gradient: Some(Gradient {
            op: "linear_cross_entropy_backward",
            inputs: &[
                (backward::DX_SUM, Source::Output(DX)),
                (backward::DW_SUM, Source::Output(DW)),
                (backward::COUNT, Source::Output(COUNT)),
                (backward::DLOSS, Source::Incoming(LOSS)),
            ],
            results: &[(X, InputGradient::Output(backward::DX)), (W, InputGradient::Output(backward::DW))],
            ..Gradient::EMPTY
        }),
        autocast: Autocast::Low,
        ..OpSpec::EMPTY
    };

    fn check(args: &Args<'_>, attrs: &Attrs) -> Result<Problem> {
        check(args, attrs)
    }

    fn kernels() -> &'static [Kernel<Problem>] {
        KERNELS
    }

    fn cost(p: &Problem) -> Cost {
        let (rows, vocab, hidden) = (p.rows as f64, p.vocab as f64, p.hidden as f64);
        let twice = |is: bool| 1.0 + f64::from(u8::from(is));
        let elements = hidden * (rows * twice(p.dx.is_some()) + vocab * twice(p.dw.is_some()));
        let products = 1 + u8::from(p.dx.is_some()) + u8::from(p.dw.is_some());
        let flops = 2.0 * f64::from(products) * rows * vocab * hidden;
        let bytes = elements * p.dtype.size() as f64 + rows * p.target_dtype.size() as f64;
        Cost::multiplying(bytes, flops, Products::of(p.dtype))
    }
}

static KERNELS: &[Kernel<Problem>] = &[
    #[cfg(feature = "cuda")]
    cuda::SM90,
    #[cfg(feature = "cuda")]
    cuda::SM80,
    #[cfg(feature = "cuda")]
    cuda::BF16X3,
    #[cfg(feature = "cuda")]
    cuda::GENERIC,
    cpu::kernel("linear_cross_entropy_avx512", Tier::Avx512).flushing_subnormals(),
    cpu::kernel("linear_cross_entropy_avx2", Tier::Avx2),
    cpu::kernel("linear_cross_entropy_portable", Tier::Portable),
];

/// A call of `linear_cross_entropy`.
///
/// ```
/// use warpsmith::{ops::{LinearCrossEntropy, LinearCrossEntropyBackward}, DType, Device, Tensor};
/// let x = Tensor::randn(&[4, 64], DType::F32, Device::Cpu, 0)?;
/// let w = Tensor::randn(&[100, 64], DType::F32, Device::Cpu, 1)?;
/// let targets = Tensor::from_slice(&[3i64, 99, -100, 0], &[4], Device::Cpu)?;
/// let (loss, count, dx, dw) = LinearCrossEntropy::new(&x, &w, &targets).run_for_gradient()?;
/// assert_eq!(count.to_vec::<f32>()?, [3.0]);
/// let dloss = Tensor::from_slice(&[1.0f32], &[], Device::Cpu)?;
/// let (dx, dw) = LinearCrossEntropyBackward::new(&dx, &dw, &count, &dloss).run()?;
/// assert_eq!((dx.shape(), dw.shape()), (x.shape(), w.shape()));
/// # Ok::<(), warpsmith::Error>(())
/// ```
pub type LinearCrossEntropy<'a> = Call<'a, Forward>;

impl OneOutput for Forward {
    const OUTPUT: usize = LOSS;
}

impl<'a> Call<'a, Forward> {
    /// The loss of the head `w` for the hidden states `x`, against `targets`.
    pub fn new(
        x: impl Into<TensorView<'a>>,
        w: impl Into<TensorView<'a>>,
        targets: impl Into<TensorView<'a>>,
    ) -> Self {
        Call::start().input(X, x).input(W, w).input(TARGETS, targets)
    }

    /// The target of rows that do not count (-100 unless set).
    pub fn ignore_index(self, index: i64) -> Self {
        self.int(IGNORE_INDEX, index)
    }

    /// Bounds logits by `softcap * tanh(logit / softcap)`.
    pub fn softcap(self, softcap: f32) -> Self {
        self.float(SOFTCAP, softcap)
    }

    /// How much of the target is spread over the vocabulary, from 0 to 1.
    pub fn label_smoothing(self, label_smoothing: f32) -> Self {
        self.float(LABEL_SMOOTHING, label_smoothing)
    }

    /// Adds `z_loss * lse²` to the loss of each row.
    pub fn z_loss(self, z_loss: f32) -> Self {
        self.float(Z_LOSS, z_loss)
    }

    /// From losses of rows to the result: the mean unless set, or the sum.
    pub fn reduction(self, reduction: Reduction) -> Self {
        self.choice(REDUCTION, reduction)
    }

    /// Also writes the number of rows that are not ignored.
    pub fn count(self, count: impl Into<TensorViewMut<'a>>) -> Self {
        self.output(COUNT, count)
    }

    /// Also writes the gradient of the sum of losses with respect to `x`.
    pub fn dx(self, dx: impl Into<TensorViewMut<'a>>) -> Self {
        self.output(DX, dx)
    }

    /// Also writes the gradient of the sum of losses with respect to `w`.
    pub fn dw(self, dw: impl Into<TensorViewMut<'a>>) -> Self {
        self.output(DW, dw)
    }

    /// Runs on the device's default stream and returns the loss and what its gradients are made of: `count`, `dx` and `dw`.
    pub fn run_for_gradient(self) -> Result<(Tensor, Tensor, Tensor, Tensor)> {
        Ok(self.run_for([LOSS, COUNT, DX, DW])?.into())
    }
}
