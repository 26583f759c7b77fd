//! `mul_add`: `out = a * b + c` for each element.
//!
//! - Shapes: `a`, `b`, `c` and `out` have the same shape of one dimension or more; any strides.
//! - Types: f32, f16 or bf16, the same for all. The fused multiply-add rounds once in f32, and the result is rounded to
//!   the tensors' type.
//! - NaN and infinities give what the formula gives.
//! - `out` may be `c`, in place. An empty tensor is left alone.
//!
//! `mul_add_backward` computes `da = dout * b` and `db = dout * a`, either or both; the gradient of `c` is `dout`
//! itself. The kernels are those of `ops/elementwise`.

mod backward;
#[cfg(feature = "lab")]
mod cases;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(feature = "lab")]
mod reference;

pub use backward::{Backward, MulAddBackward};

use super::elementwise::{Grid, Stream as Operand};
use crate::cpu::Tier;
use crate::error::Result;
use crate::op::gradient::{InputGradient, Source};
use crate::op::{
    ArgSpec, Args, Attrs, Autocast, Call, Cost, DTypeRule, Gradient, Kernel, Matcher, OneOutput, Op, OpSpec,
    SizeSpec, shape,
};
use crate::tensor::TensorView;

const A: usize = 0;
const B: usize = 1;
const C: usize = 2;
const OUT: usize = 3;
const DOUT: usize = 2;
const DA: usize = 3;
const DB: usize = 4;

const SIZES: &[SizeSpec] = &[
    SizeSpec { name: "num_tokens", default: 32768, doc: "number of rows" },
    SizeSpec { name: "hidden", default: 4096, doc: "length of a row" },
];

/// A checked call.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Problem {
    grid: Grid,
}

/// The op, as listed in [`crate::ops::ALL`].
#[derive(Default)]
pub struct Forward;

// SAFETY: only `check` makes a problem; it holds the types, sizes and strides of the arguments it judged, and the kernels
// go by these alone.
unsafe impl Op for Forward {
    type Problem = Problem;

    const SPEC: OpSpec = OpSpec {
        name: "mul_add",
        summary: "Fused multiply-add: a * b + c",
        args: &[
            ArgSpec::input("a", shape![.., hidden], DTypeRule::FLOAT, ""),
            ArgSpec::input("b", shape![.., hidden], DTypeRule::Same(A), ""),
            ArgSpec::input("c", shape![.., hidden], DTypeRule::Same(A), ""),
            ArgSpec::output("out", shape![.., hidden], DTypeRule::Same(A), "").in_place_of(C),
        ],
        sizes: SIZES,
        gradient: Some(Gradient {
            op: "mul_add_backward",
            inputs: &[(A, Source::Input(A)), (B, Source::Input(B)), (DOUT, Source::Incoming(OUT))],
            results: &[
                (A, InputGradient::Output(DA)),
                (B, InputGradient::Output(DB)),
                (C, InputGradient::Incoming(OUT)),
            ],
            ..Gradient::EMPTY
        }),
        autocast: Autocast::Widest,
        ..OpSpec::EMPTY
    };

    fn check(args: &Args<'_>, attrs: &Attrs) -> Result<Problem> {
        Matcher::of(args, attrs)?;
        let dtype = args.at(A).dtype();
        Ok(Problem { grid: Grid::new(dtype, [A, B, C, OUT].map(|index| Operand::of(args, index)), &[]) })
    }

    fn kernels() -> &'static [Kernel<Problem>] {
        KERNELS
    }

    fn cost(problem: &Problem) -> Cost {
        let elements = problem.grid.len() as f64;
        Cost::moving(4.0 * elements * problem.grid.dtype.size() as f64, 2.0 * elements)
    }
}

static KERNELS: &[Kernel<Problem>] = &[
    #[cfg(feature = "cuda")]
    cuda::FORWARD,
    Kernel::cpu("mul_add_avx512", Tier::Avx512, cpu::forward),
    Kernel::cpu("mul_add_avx2", Tier::Avx2, cpu::forward),
    Kernel::cpu("mul_add_portable", Tier::Portable, cpu::forward),
];

/// A call of `mul_add`.
///
/// ```
/// use warpsmith::{ops::MulAdd, Device, Tensor};
/// let [a, b, c] = [2f32, 3.0, 4.0].map(|x| Tensor::from_slice(&[x; 5], &[5], Device::Cpu).unwrap());
/// assert_eq!(MulAdd::new(&a, &b, &c).run()?.to_vec::<f32>()?, [10.0; 5]);
/// # Ok::<(), warpsmith::Error>(())
/// ```
pub type MulAdd<'a> = Call<'a, Forward>;

impl OneOutput for Forward {
    const OUTPUT: usize = OUT;
}

impl<'a> Call<'a, Forward> {
    /// `a * b + c`.
    pub fn new(
        a: impl Into<TensorView<'a>>,
        b: impl Into<TensorView<'a>>,
        c: impl Into<TensorView<'a>>,
    ) -> Self {
        Call::start().input(A, a).input(B, b).input(C, c)
    }
}
