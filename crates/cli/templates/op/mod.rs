//! `new_op`: `out = x * alpha`, element by element.
//!
//! - Shapes: `x` and `out` are `[..., hidden]`; any strides.
//! - Types: f32, f16 or bf16, the same for both tensors. The product is computed in f32 and rounded once.
//! - NaN and infinity in `x` propagate as the formula says; `alpha` must be finite.
//! - `out` may be `x`, in place. An empty tensor is left alone.

#[cfg(feature = "lab")]
mod cases;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(feature = "lab")]
mod reference;

use crate::cpu::Tier;
use crate::device::Stream;
use crate::error::Result;
use crate::op::{
    ArgSpec, Args, AttrKind, AttrSpec, Attrs, Call, Cost, DTypeRule, Kernel, Matcher, OneOutput, Op, OpSpec,
    SizeSpec, shape,
};
use crate::tensor::{DType, Space, TensorView, TensorViewMut};

const X: usize = 0;
const OUT: usize = 1;
const ALPHA: usize = 0;

/// A checked call.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Problem {
    dtype: DType,
    count: usize,
    /// Where the elements of x and out are. (The device's form has room for four tensors, so both are there twice.)
    elements: Space<4>,
    /// The elements of each tensor are contiguous.
    dense: bool,
    /// Dense, 16-byte aligned and a multiple of 16 bytes long.
    vector: bool,
    alpha_bits: u32,
}

/// The op, as listed in [`crate::ops::ALL`].
#[derive(Default)]
pub struct Forward;

// SAFETY: only `check` makes a problem; it holds the types, sizes and strides of the arguments it judged, and the kernels
// go by these alone.
unsafe impl Op for Forward {
    type Problem = Problem;

    const SPEC: OpSpec = OpSpec {
        name: "new_op",
        summary: "Multiplication by a number",
        args: &[
            ArgSpec::input("x", shape![.., hidden], DTypeRule::FLOAT, ""),
            ArgSpec::output("out", shape![.., hidden], DTypeRule::Same(X), "").in_place_of(X),
        ],
        attrs: &[AttrSpec { name: "alpha", kind: AttrKind::Float(1.0), doc: "the factor" }],
        sizes: &[
            SizeSpec { name: "num_tokens", default: 8192, doc: "number of rows" },
            SizeSpec { name: "hidden", default: 4096, doc: "length of a row" },
        ],
        ..OpSpec::EMPTY
    };

    fn check(args: &Args<'_>, attrs: &Attrs) -> Result<Problem> {
        let sizes = Matcher::of(args, attrs)?;
        let alpha = attrs.float(ALPHA);
        sizes.option("alpha", alpha, "a finite number", (alpha as f32).is_finite())?;
        let (x, out) = (args.at(X).layout(), args.at(OUT).layout());
        let elements = Space::new(x.rank(), [x, out, x, out]);
        let dense = elements.rank == 1 && elements.strides.iter().all(|strides| strides[0] == 1);
        Ok(Problem {
            dtype: args.at(X).dtype(),
            count: x.numel(),
            elements,
            dense,
            vector: dense && args.have_vector_rows(),
            alpha_bits: (alpha as f32).to_bits(),
        })
    }

    fn kernels() -> &'static [Kernel<Problem>] {
        KERNELS
    }

    fn cost(problem: &Problem) -> Cost {
        let elements = problem.count as f64;
        Cost::moving(2.0 * elements * problem.dtype.size() as f64, elements)
    }
}

static KERNELS: &[Kernel<Problem>] = &[
    #[cfg(feature = "cuda")]
    cuda::kernel("new_op_elementwise"),
    Kernel::cpu("new_op_avx512", Tier::Avx512, cpu::run),
    Kernel::cpu("new_op_avx2", Tier::Avx2, cpu::run),
    Kernel::cpu("new_op_portable", Tier::Portable, cpu::run),
];

/// A call of `new_op`.
///
/// ```
/// use warpsmith::{DType, Device, Tensor, ops::NewOp};
/// let x = Tensor::from_slice(&[1.0f32, 2.0, 3.0], &[3], Device::Cpu)?;
/// let out = NewOp::new(&x).alpha(2.0).run()?;
/// assert_eq!(out.to_vec::<f32>()?, [2.0, 4.0, 6.0]);
/// # Ok::<(), warpsmith::Error>(())
/// ```
pub type NewOp<'a> = Call<'a, Forward>;

impl OneOutput for Forward {
    const OUTPUT: usize = OUT;
}

impl<'a> Call<'a, Forward> {
    /// Multiplies the elements of `x`.
    pub fn new(x: impl Into<TensorView<'a>>) -> Self {
        Call::start().input(X, x)
    }

    /// A call whose tensor is given to [`Self::run_in_place`].
    pub fn in_place() -> Self {
        Call::start()
    }

    /// The factor (1 unless set).
    pub fn alpha(self, alpha: f32) -> Self {
        self.float(ALPHA, alpha)
    }

    /// Multiplies the elements of `x` in place. Set options on a call made with [`Self::in_place`].
    pub fn run_in_place<'b>(self, x: impl Into<TensorViewMut<'b>>, stream: &Stream) -> Result<()>
    where
        'a: 'b,
    {
        self.launch_in_place(X, OUT, x.into(), stream)
    }
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;
    use crate::{Device, Tensor};

    #[test]
    fn what_does_not_fit_is_named() {
        let x = Tensor::zeros(&[2, 8], DType::F32, Device::Cpu).unwrap();
        let stream = Device::Cpu.default_stream().unwrap();
        let mut short = Tensor::zeros(&[2, 7], DType::F32, Device::Cpu).unwrap();
        let error = NewOp::new(&x).run_into(&mut short, &stream).unwrap_err().to_string();
        assert_eq!(error, "new_op: argument `out`: expected shape [2, hidden=8], got [2, 7]");
        let mut narrow = Tensor::zeros(&[2, 8], DType::F16, Device::Cpu).unwrap();
        let error = NewOp::new(&x).run_into(&mut narrow, &stream).unwrap_err().to_string();
        assert_eq!(error, "new_op: argument `out`: expected dtype f32, got f16");
        let error = NewOp::new(&x).alpha(f32::NAN).run().unwrap_err().to_string();
        assert_eq!(error, "new_op: argument `alpha`: expected a finite number, got NaN");
    }
}
