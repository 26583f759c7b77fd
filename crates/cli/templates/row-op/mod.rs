//! `new_op`: `out = x - mean(x)` over the last dimension.
//!
//! - Shapes: `x` and `out` are `[..., hidden]`; any strides.
//! - Types: f32, f16 or bf16, the same for both tensors. Sums are in f32, and the result is rounded once.
//! - NaN and infinity give what the formula gives.
//! - `out` may be `x`, in place. An empty tensor is left alone.

#[cfg(feature = "lab")]
mod cases;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(feature = "lab")]
mod reference;

use crate::cpu::Tier;
use crate::error::Result;
use crate::op::{
    ArgSpec, Args, Attrs, Call, Cost, DTypeRule, Kernel, Matcher, OneOutput, Op, OpSpec, SizeSpec, shape,
};
use crate::tensor::{DType, Space, TensorView};

const X: usize = 0;
const OUT: usize = 1;

/// A checked call.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Problem {
    dtype: DType,
    hidden: usize,
    num_rows: usize,
    /// Where the rows of x and out are. (The device's form has room for four tensors, so both are there twice.)
    rows: Space<4>,
    /// Strides along a row of x and out.
    steps: [isize; 2],
    /// Rows are dense, 16-byte aligned and a multiple of 16 bytes long.
    vector: bool,
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
        summary: "Rows with their mean subtracted",
        args: &[
            ArgSpec::input("x", shape![.., hidden], DTypeRule::FLOAT, ""),
            ArgSpec::output("out", shape![.., hidden], DTypeRule::Same(X), "").in_place_of(X),
        ],
        sizes: &[
            SizeSpec { name: "num_tokens", default: 8192, doc: "number of rows" },
            SizeSpec { name: "hidden", default: 4096, doc: "length of a row" },
        ],
        ..OpSpec::EMPTY
    };

    fn check(args: &Args<'_>, attrs: &Attrs) -> Result<Problem> {
        let sizes = Matcher::of(args, attrs)?;
        let (x, out) = (args.at(X).layout(), args.at(OUT).layout());
        Ok(Problem {
            dtype: args.at(X).dtype(),
            hidden: sizes.size("hidden"),
            num_rows: sizes.leading_count(),
            rows: Space::new(sizes.leading_rank(), [x, out, x, out]),
            steps: [x.step(), out.step()],
            vector: args.have_vector_rows(),
        })
    }

    fn kernels() -> &'static [Kernel<Problem>] {
        KERNELS
    }

    fn cost(p: &Problem) -> Cost {
        let elements = (p.num_rows * p.hidden) as f64;
        Cost::moving(2.0 * elements * p.dtype.size() as f64, 2.0 * elements)
    }
}

static KERNELS: &[Kernel<Problem>] = &[
    #[cfg(feature = "cuda")]
    cuda::kernel("new_op_rows"),
    Kernel::cpu("new_op_avx512", Tier::Avx512, cpu::run),
    Kernel::cpu("new_op_avx2", Tier::Avx2, cpu::run),
    Kernel::cpu("new_op_portable", Tier::Portable, cpu::run),
];

/// A call of `new_op`.
///
/// ```
/// use warpsmith::{Device, Tensor, ops::NewOp};
/// let x = Tensor::from_slice(&[1.0f32, 3.0, 5.0, 5.0], &[2, 2], Device::Cpu)?;
/// assert_eq!(NewOp::new(&x).run()?.to_vec::<f32>()?, [-1.0, 1.0, 0.0, 0.0]);
/// # Ok::<(), warpsmith::Error>(())
/// ```
pub type NewOp<'a> = Call<'a, Forward>;

impl OneOutput for Forward {
    const OUTPUT: usize = OUT;
}

impl<'a> Call<'a, Forward> {
    /// The rows of `x` with their mean subtracted.
    pub fn new(x: impl Into<TensorView<'a>>) -> Self {
        Call::start().input(X, x)
    }
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;
    use crate::{Device, Tensor};

    #[test]
    fn what_does_not_fit_is_named() {
        let x = Tensor::zeros(&[2, 8], DType::F32, Device::Cpu).unwrap();
        let mut short = Tensor::zeros(&[2, 7], DType::F32, Device::Cpu).unwrap();
        let stream = Device::Cpu.default_stream().unwrap();
        let error = NewOp::new(&x).run_into(&mut short, &stream).unwrap_err().to_string();
        assert_eq!(error, "new_op: argument `out`: expected shape [2, hidden=8], got [2, 7]");
    }
}
