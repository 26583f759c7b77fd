//! `new_op`: `out = x * alpha`, element by element.
//!
//! - Shapes: `x` and `out` are `[..., hidden]`; any strides.
//! - Types: f32, f16 or bf16, the same for both tensors. The product is computed in f32 and rounded once.
//! - NaN and infinity in `x` go the way the formula says; `alpha` must be finite.
//! - `out` may be `x`, in place. An empty tensor is left alone.

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod reference;

use crate::call::{Call, OneOutput};
use crate::check::Matcher;
use crate::cpu::Tier;
use crate::device::Stream;
use crate::dtype::DType;
use crate::error::Result;
use crate::layout::Space;
use crate::op::{
    ArgPlan, ArgSpec, Args, Arrangement, AttrKind, AttrSpec, Attrs, Case, Cost, DTypeRule, Op, OpSpec, SizeSpec,
    Values, shape,
};
use crate::ops::{FLOATS, ROW_SIZES};
use crate::reference::{Array, Inputs, Real};
use crate::registry::Kernel;
use crate::tensor::{TensorView, TensorViewMut};

const X: usize = 0;
const OUT: usize = 1;
const ALPHA: usize = 0;

/// A checked call.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Problem {
    dtype: DType,
    count: usize,
    /// Where the elements of x and out are (the device's form has room for four tensors: both are there twice).
    elements: Space<4>,
    /// The elements of each tensor follow each other without gaps.
    dense: bool,
    /// Dense, 16-byte aligned and a multiple of 16 bytes long.
    vector: bool,
    alpha_bits: u32,
}

/// The op, as listed in [`crate::ops::ALL`].
#[derive(Default)]
pub struct Forward;

impl Op for Forward {
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

    fn reference<R: Real>(inputs: &Inputs<'_, R>, attrs: &Attrs) -> Vec<Option<Array<R>>> {
        reference::forward(inputs, attrs)
    }

    fn cost(problem: &Problem) -> Cost {
        let elements = problem.count as f64;
        Cost::moving(2.0 * elements * problem.dtype.size() as f64, elements)
    }

    fn plan(case: &Case) -> Vec<Option<ArgPlan>> {
        vec![ArgPlan::batched(&case.sizes, case.dtype); Self::SPEC.args.len()]
    }

    fn cases() -> Vec<Case> {
        let mut cases = Vec::new();
        for dtype in FLOATS {
            let plain = Case::new(&Self::SPEC, dtype).attr(ALPHA, 1.7);
            cases.extend(ROW_SIZES.iter().map(|sizes| plain.clone().sizes(sizes)));
            let case = plain.sizes(&[33, 264]);
            for arrangement in [Arrangement::PaddedRows, Arrangement::Transposed, Arrangement::Misaligned] {
                cases.push(case.clone().arranged(arrangement));
            }
            cases.push(case.clone().values(Values::Large));
            cases.push(case.clone().values(Values::Special));
            cases.push(case.in_place());
        }
        cases
    }

    fn bench_cases() -> Vec<Case> {
        let mut cases = Vec::new();
        for dtype in [DType::BF16, DType::F32] {
            let sizes = [[128, 4096], [8192, 4096], [32768, 8192]];
            cases.extend(
                sizes.iter().map(|sizes| Case::new(&Self::SPEC, dtype).attr(ALPHA, 1.7).sizes(sizes)),
            );
        }
        cases
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

#[cfg(test)]
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
