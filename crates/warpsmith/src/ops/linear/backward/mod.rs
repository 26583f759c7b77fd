//! `linear_backward`: the gradients of `linear` with respect to `x`, `w` and `bias`, given that of its result.
//!
//! With `z = x · wᵀ + bias` and `out = scale * act(z)`: `dz = dout * scale * act'(z)`, `dx = dz · w`, `dw = dzᵀ · x`, and
//! `dbias` is the sum of `dz` over all rows.
//!
//! - Shapes: `x` and `dx` are `[..., k]`, `w` and `dw` are `[n, k]`, `dout` and `z` are `[..., n]`, `dbias` is `[n]`;
//!   any strides within a matrix, but rows must be the same distance apart over all leading dimensions. Each gradient
//!   is optional, but at least one must be asked for. `z` is needed, and read, only with an activation.
//! - Types: f32, f16 or bf16, the same for all. `dz` is computed in f32 and rounded to that type before the products,
//!   whose sums are in f32; `dbias` adds the unrounded values. `precision` is that of `linear`, which also says where
//!   products take subnormal numbers of bf16 for zero.
//! - A gate is undone by `gated_act_backward`, whose result is the `dout` of this op. The gradient of a residual is `dout`.
//! - A row of `dx` has the same bits whatever the other rows are.

#[cfg(feature = "cuda")]
mod add;
#[cfg(feature = "lab")]
mod cases;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(feature = "cuda")]
mod outer;
#[cfg(feature = "cuda")]
mod transpose;

use super::problem::{Matrix, Part, check_options};
use super::{Activation, Precision, Problem, TOLERANCE_DOC};
use crate::cpu::Tier;
use crate::device::Stream;
use crate::error::{Error, Result};
use crate::op::{
    ArgSpec, Args, AttrKind, AttrSpec, Attrs, Call, Cost, DTypeRule, Kernel, Matcher, Op, OpSpec, Products,
    SizeSpec, shape,
};
use crate::ops::elementwise::function::Kind;
use crate::tensor::{DType, TensorView, TensorViewMut};

pub(super) const X: usize = 0;
pub(super) const W: usize = 1;
pub(super) const DOUT: usize = 2;
pub(super) const Z: usize = 3;
pub(super) const DX: usize = 4;
pub(super) const DW: usize = 5;
pub(super) const DBIAS: usize = 6;

pub(super) const ACT: usize = 0;
pub(super) const SCALE: usize = 1;
pub(super) const PRECISION: usize = 2;
pub(super) const TOLERANCE: usize = 3;

/// A checked call.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct BackwardProblem {
    dtype: DType,
    lines: usize,
    n: usize,
    k: usize,
    activation: Option<Kind>,
    scale_bits: u32,
    dout: Matrix,
    z: Matrix,
    dbias_step: isize,
    has_dbias: bool,
    /// `dz` differs from `dout`, and a product needs it: it goes into scratch memory, row by row.
    stores_dz: bool,
    /// `dz · w` and `dzᵀ · x`, as asked for.
    dx: Option<Problem>,
    dw: Option<Problem>,
}

impl BackwardProblem {
    /// Bytes of scratch memory.
    fn workspace(&self) -> usize {
        if self.stores_dz { self.lines * self.n * self.dtype.size() } else { 0 }
    }

    /// Whether a pass over `dout` must precede the products.
    fn has_pass(&self) -> bool {
        self.stores_dz || self.has_dbias
    }

    /// The products that are asked for.
    #[cfg(feature = "cuda")]
    fn products(&self) -> impl Iterator<Item = &Problem> {
        [&self.dx, &self.dw].into_iter().flatten()
    }

    /// The addresses of the products that are asked for; `dz` is at `workspace` or is `dout`.
    fn parts(&self, args: &Args<'_>, workspace: usize) -> impl Iterator<Item = (&Problem, Part)> {
        let dz = if self.stores_dz { workspace } else { args.address(DOUT) };
        let dx = Part::product(dz, args.address(W), args.address(DX));
        let dw = Part::product(dz, args.address(X), args.address(DW));
        [(self.dx.as_ref(), dx), (self.dw.as_ref(), dw)]
            .into_iter()
            .filter_map(|(problem, part)| Some((problem?, part)))
            .filter(|(problem, _)| problem.m * problem.n > 0)
    }
}

fn check(args: &Args<'_>, attrs: &Attrs) -> Result<BackwardProblem> {
    let op = SPEC.name;
    let sizes = Matcher::of(args, attrs)?;
    let dtype = args.at(X).dtype();
    let activation = Activation::ALL[attrs.choice(ACT)];
    if activation != Activation::None && args.get(Z).is_none() {
        let expected = format!("a tensor, because of act={}", activation.name());
        return Err(Error::argument(op, "z", expected, "nothing"));
    }
    if [DX, DW, DBIAS].iter().all(|&index| args.get(index).is_none()) {
        return Err(Error::argument(op, "dx", "at least one of dx, dw and dbias", "nothing"));
    }
    let (lines, n, k) = (sizes.leading_count(), sizes.size("n"), sizes.size("k"));
    let asked = (attrs.choice(PRECISION), attrs.float(TOLERANCE));
    let (precision, scale) = check_options(&sizes, op, (dtype, k), asked, attrs.float(SCALE))?;
    let matrix = |index: usize| match args.get(index) {
        Some(view) => Matrix::of_rows(op, SPEC.args[index].name, view),
        None => Ok(Matrix { row: 0, col: 0, aligned: false }),
    };
    let of_weight = |index: usize| Matrix::of_weight(args.at(index));
    let (dout, z, tf32) = (matrix(DOUT)?, matrix(Z)?, precision == Precision::Tf32);
    let has_products = args.get(DX).is_some() || args.get(DW).is_some();
    let stores_dz = has_products && (activation != Activation::None || scale != 1.0);
    let dz = if stores_dz { Matrix { row: n as isize, col: 1, aligned: true } } else { dout };
    let dx = match args.get(DX) {
        None => None,
        Some(_) => {
            let matrices = [dz, of_weight(W).transposed(), matrix(DX)?];
            Some(Problem::product(dtype, tf32, [lines, k, n], matrices))
        }
    };
    let dw = match args.get(DW) {
        None => None,
        Some(_) => {
            let matrices = [dz.transposed(), matrix(X)?.transposed(), of_weight(DW)];
            Some(Problem::product(dtype, tf32, [n, k, lines], matrices))
        }
    };
    Ok(BackwardProblem {
        dtype,
        lines,
        n,
        k,
        activation: activation.kind(),
        scale_bits: scale.to_bits(),
        dout,
        z,
        dbias_step: args.get(DBIAS).map_or(0, |dbias| dbias.layout().step()),
        has_dbias: args.get(DBIAS).is_some(),
        stores_dz,
        dx,
        dw,
    })
}

const SPEC: OpSpec = OpSpec {
    name: "linear_backward",
    summary: "Gradients of linear with respect to its input, weight and bias",
    args: &[
        ArgSpec::input("x", shape![.., k], DTypeRule::FLOAT, "input of the forward call"),
        ArgSpec::input("w", shape![n, k], DTypeRule::Same(X), "its weight"),
        ArgSpec::input("dout", shape![.., n], DTypeRule::Same(X), "gradient of its result"),
        ArgSpec::input(
            "z",
            shape![.., n],
            DTypeRule::Same(X),
            "what its activation was applied to, if it had one",
        )
        .optional(),
        ArgSpec::output("dx", shape![.., k], DTypeRule::Same(X), "gradient of x").optional(),
        ArgSpec::output("dw", shape![n, k], DTypeRule::Same(X), "gradient of w").optional(),
        ArgSpec::output("dbias", shape![n], DTypeRule::Same(X), "gradient of the bias").optional(),
    ],
    attrs: &[
        AttrSpec { name: "act", kind: AttrKind::Choice(Activation::NAMES), doc: "the activation" },
        AttrSpec { name: "scale", kind: AttrKind::Float(1.0), doc: "factor of the forward result" },
        AttrSpec {
            name: "precision",
            kind: AttrKind::Choice(Precision::NAMES),
            doc: "of f32 products; auto is full unless the tolerance allows less",
        },
        AttrSpec { name: "tolerance", kind: AttrKind::Float(0.0), doc: TOLERANCE_DOC },
    ],
    sizes: &[
        SizeSpec { name: "m", default: 4096, doc: "rows of x" },
        SizeSpec { name: "n", default: 4096, doc: "columns of dout" },
        SizeSpec { name: "k", default: 4096, doc: "columns of x" },
    ],
    ..OpSpec::EMPTY
};

/// The op, as listed in [`crate::ops::ALL`].
#[derive(Default)]
pub struct Backward;

// SAFETY: only `check` makes a problem; it holds the types, sizes and strides of the arguments it judged, and the kernels
// go by these alone.
unsafe impl Op for Backward {
    type Problem = BackwardProblem;

    const SPEC: OpSpec = SPEC;

    fn check(args: &Args<'_>, attrs: &Attrs) -> Result<BackwardProblem> {
        check(args, attrs)
    }

    fn kernels() -> &'static [Kernel<BackwardProblem>] {
        KERNELS
    }

    fn cost(p: &BackwardProblem) -> Cost {
        let (lines, n, k) = (p.lines as f64, p.n as f64, p.k as f64);
        let products = p.dx.is_some() as u8 + p.dw.is_some() as u8;
        let given = |is: bool, elements: f64| if is { elements } else { 0.0 };
        let elements = lines * n
            + given(p.activation.is_some(), lines * n)
            + given(p.dx.is_some(), n * k + lines * k)
            + given(p.dw.is_some(), lines * k + n * k)
            + given(p.has_dbias, n);
        let flops = 2.0 * f64::from(products) * lines * n * k + given(p.has_pass(), 3.0 * lines * n);
        let tf32 = [&p.dx, &p.dw].into_iter().flatten().any(|product| product.tf32);
        let units = if tf32 { Products::Tf32 } else { Products::of(p.dtype) };
        Cost::multiplying(elements * p.dtype.size() as f64, flops, units)
    }
}

static KERNELS: &[Kernel<BackwardProblem>] = &[
    #[cfg(feature = "cuda")]
    cuda::SM90,
    #[cfg(feature = "cuda")]
    cuda::SM80,
    #[cfg(feature = "cuda")]
    cuda::BF16X3,
    #[cfg(feature = "cuda")]
    cuda::GENERIC,
    cpu::kernel("linear_backward_avx512", Tier::Avx512).flushing_subnormals(),
    cpu::kernel("linear_backward_avx2", Tier::Avx2),
    cpu::kernel("linear_backward_portable", Tier::Portable),
];

/// A call of `linear_backward`.
///
/// ```
/// use warpsmith::{ops::LinearBackward, DType, Device, Tensor};
/// let x = Tensor::randn(&[4, 64], DType::F32, Device::Cpu, 0)?;
/// let w = Tensor::randn(&[32, 64], DType::F32, Device::Cpu, 1)?;
/// let dout = Tensor::randn(&[4, 32], DType::F32, Device::Cpu, 2)?;
/// let stream = Device::Cpu.default_stream()?;
/// let (mut dx, mut dw) = (Tensor::zeros(&[4, 64], DType::F32, Device::Cpu)?, Tensor::zeros(&[32, 64], DType::F32, Device::Cpu)?);
/// LinearBackward::new(&x, &w, &dout).dx(&mut dx).dw(&mut dw).run(&stream)?;
/// # Ok::<(), warpsmith::Error>(())
/// ```
pub type LinearBackward<'a> = Call<'a, Backward>;

impl<'a> Call<'a, Backward> {
    /// The gradients of `x · wᵀ`, given that of the result.
    pub fn new(
        x: impl Into<TensorView<'a>>,
        w: impl Into<TensorView<'a>>,
        dout: impl Into<TensorView<'a>>,
    ) -> Self {
        Call::start().input(X, x).input(W, w).input(DOUT, dout)
    }

    /// The forward call had an activation, which was applied to `z`.
    pub fn activation(self, activation: Activation, z: impl Into<TensorView<'a>>) -> Self {
        self.choice(ACT, activation).input(Z, z)
    }

    /// The factor of the forward call.
    pub fn scale(self, scale: f32) -> Self {
        self.float(SCALE, scale)
    }

    /// How f32 inputs are multiplied.
    pub fn precision(self, precision: Precision) -> Self {
        self.choice(PRECISION, precision)
    }

    /// What a sum may be off, of the sum of the absolute products: with [`Precision::Auto`], the fastest way that keeps it is
    /// taken.
    pub fn tolerance(self, tolerance: f32) -> Self {
        self.float(TOLERANCE, tolerance)
    }

    /// Writes the gradient of `x`.
    pub fn dx(self, dx: impl Into<TensorViewMut<'a>>) -> Self {
        self.output(DX, dx)
    }

    /// Writes the gradient of `w`.
    pub fn dw(self, dw: impl Into<TensorViewMut<'a>>) -> Self {
        self.output(DW, dw)
    }

    /// Writes the gradient of the bias.
    pub fn dbias(self, dbias: impl Into<TensorViewMut<'a>>) -> Self {
        self.output(DBIAS, dbias)
    }

    /// Computes the gradients that were asked for.
    pub fn run(self, stream: &Stream) -> Result<()> {
        self.launch([], stream)
    }
}
