//! `softmax`: `out = exp(t - max(t)) / sum(exp(t - max(t)))` over the last dimension, where `t = scale x`.
//!
//! - Shapes: `x` and `out` are `[..., hidden]`; any strides.
//! - Types: f32, f16 or bf16, the same for both. Everything is computed in f32; the result is rounded once.
//! - Differences to the largest element are taken before they are scaled, which loses nothing however large the
//!   elements are, as long as the differences themselves are numbers in f32.
//! - NaN or `+inf` (after scaling) anywhere in a row makes the row NaN, and so does a row that is all `-inf`; any other
//!   `-inf` gives zero.
//! - `scale` must be finite; it may be negative or zero. `out` may be `x`, in place. An empty tensor is left alone.
//!
//! `softmax_backward` computes the gradient of `x` from the result and its gradient.

mod backward;
#[cfg(feature = "lab")]
mod cases;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(feature = "lab")]
mod reference;

pub use backward::{Backward, SoftmaxBackward};

use crate::cpu::Tier;
use crate::device::Stream;
use crate::error::Result;
use crate::op::gradient::{InputGradient, Source};
use crate::op::{
    ArgSpec, Args, AttrKind, AttrSpec, Attrs, Autocast, Call, Cost, DTypeRule, Gradient, Kernel, Matcher,
    OneOutput, Op, OpSpec, SizeSpec, shape,
};
use crate::tensor::{DType, Space, TensorView, TensorViewMut};

const X: usize = 0;
const OUT: usize = 1;
const SCALE: usize = 0;

const ATTRS: &[AttrSpec] =
    &[AttrSpec { name: "scale", kind: AttrKind::Float(1.0), doc: "multiplies x before the exponential" }];
const SIZES: &[SizeSpec] = &[
    SizeSpec { name: "num_tokens", default: 8192, doc: "number of rows" },
    SizeSpec { name: "hidden", default: 4096, doc: "length of a row" },
];

/// A checked call of `softmax` or `softmax_backward`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Problem {
    dtype: DType,
    hidden: usize,
    num_rows: usize,
    /// Leading dimensions of the op's tensors, in the order of its arguments; the last repeats.
    rows: Space<4>,
    /// Stride along a row of each tensor, in the same order.
    steps: [isize; 4],
    /// All rows are dense, 16-byte aligned and multiples of 16 bytes long.
    vector_rows: bool,
    scale_bits: u64,
}

impl Problem {
    fn check(args: &Args<'_>, attrs: &Attrs) -> Result<Problem> {
        let sizes = Matcher::of(args, attrs)?;
        let scale = attrs.float(SCALE);
        sizes.option("scale", scale, "a finite number", (scale as f32).is_finite())?;
        let layouts: [_; 4] = std::array::from_fn(|t| args.at(t.min(args.spec().args.len() - 1)).layout());
        Ok(Problem {
            dtype: args.at(X).dtype(),
            hidden: sizes.size("hidden"),
            num_rows: sizes.leading_count(),
            rows: Space::new(sizes.leading_rank(), layouts),
            steps: layouts.map(|layout| layout.step()),
            vector_rows: args.have_vector_rows(),
            scale_bits: scale.to_bits(),
        })
    }

    fn scale(&self) -> f64 {
        f64::from_bits(self.scale_bits)
    }

    /// Bytes of one of the tensors.
    fn tensor_bytes(&self) -> usize {
        self.num_rows * self.hidden * self.dtype.size()
    }

    /// The cost of moving each of `tensors` once and doing `flops` operations on each element.
    fn cost(&self, tensors: f64, flops: f64) -> Cost {
        let bytes = tensors * self.tensor_bytes() as f64;
        Cost::moving(bytes, flops * (self.num_rows * self.hidden) as f64)
    }
}

/// The op, as listed in [`crate::ops::ALL`].
#[derive(Default)]
pub struct Forward;

// SAFETY: only `check` makes a problem; it holds the types, sizes and strides of the arguments it judged, and the kernels
// go by these alone.
unsafe impl Op for Forward {
    type Problem = Problem;

    const SPEC: OpSpec = OpSpec {
        name: "softmax",
        summary: "Softmax of scaled rows",
        args: &[
            ArgSpec::input("x", shape![.., hidden], DTypeRule::FLOAT, ""),
            ArgSpec::output("out", shape![.., hidden], DTypeRule::Same(X), "rows that sum to one")
                .in_place_of(X),
        ],
        attrs: ATTRS,
        sizes: SIZES,
        gradient: Some(Gradient {
            op: "softmax_backward",
            inputs: &[(backward::Y, Source::Output(OUT)), (backward::DOUT, Source::Incoming(OUT))],
            results: &[(X, InputGradient::Output(backward::DX))],
            ..Gradient::EMPTY
        }),
        autocast: Autocast::F32,
        ..OpSpec::EMPTY
    };

    fn check(args: &Args<'_>, attrs: &Attrs) -> Result<Problem> {
        Problem::check(args, attrs)
    }

    fn kernels() -> &'static [Kernel<Problem>] {
        KERNELS
    }

    fn cost(problem: &Problem) -> Cost {
        problem.cost(2.0, 5.0)
    }
}

static KERNELS: &[Kernel<Problem>] = &[
    #[cfg(feature = "cuda")]
    cuda::ROW,
    #[cfg(feature = "cuda")]
    cuda::LONG_ROW,
    Kernel::cpu("softmax_avx512", Tier::Avx512, cpu::run),
    Kernel::cpu("softmax_avx2", Tier::Avx2, cpu::run),
    Kernel::cpu("softmax_portable", Tier::Portable, cpu::run),
];

/// A call of `softmax`.
///
/// ```
/// use warpsmith::{ops::Softmax, Device, Tensor};
/// let x = Tensor::from_slice(&[0.0f32, 0.0, 0.0, 8.0], &[2, 2], Device::Cpu)?;
/// let out = Softmax::new(&x).scale(0.5).run()?.to_vec::<f32>()?;
/// assert_eq!(out[..2], [0.5, 0.5]);
/// assert!((out[3] - 0.982_014).abs() < 1e-6);
/// # Ok::<(), warpsmith::Error>(())
/// ```
pub type Softmax<'a> = Call<'a, Forward>;

impl OneOutput for Forward {
    const OUTPUT: usize = OUT;
}

impl<'a> Call<'a, Forward> {
    /// The softmax of the rows of `x`.
    pub fn new(x: impl Into<TensorView<'a>>) -> Self {
        Call::start().input(X, x)
    }

    /// A call whose rows are given to [`Self::run_in_place`].
    pub fn in_place() -> Self {
        Call::start()
    }

    /// Multiplies `x` by `scale` first (1 unless set).
    pub fn scale(self, scale: f32) -> Self {
        self.float(SCALE, scale)
    }

    /// Replaces the rows of `x` by their softmax. Set options on a call made with [`Self::in_place`].
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
    fn a_scale_that_is_no_number_is_refused() {
        let x = Tensor::zeros(&[2, 3], DType::F32, Device::Cpu).unwrap();
        for scale in [f32::NAN, f32::INFINITY] {
            let error = Softmax::new(&x).scale(scale).run().unwrap_err().to_string();
            assert!(error.contains("softmax: argument `scale`: expected a finite number"), "{error}");
        }
    }

    #[test]
    fn tensors_that_do_not_match_are_refused() {
        let x = Tensor::zeros(&[2, 3], DType::F32, Device::Cpu).unwrap();
        let stream = Device::Cpu.default_stream().unwrap();
        let mut out = Tensor::zeros(&[2, 4], DType::F32, Device::Cpu).unwrap();
        let error = Softmax::new(&x).run_into(&mut out, &stream).unwrap_err().to_string();
        assert!(error.contains("`out`") && error.contains("hidden=3"), "{error}");
        let dout = Tensor::zeros(&[2, 3], DType::BF16, Device::Cpu).unwrap();
        let error = SoftmaxBackward::new(&x, &dout).run().unwrap_err().to_string();
        assert!(error.contains("softmax_backward: argument `dout`: expected dtype f32"), "{error}");
    }

    #[test]
    fn infinities_give_what_the_formula_gives() {
        let inf = f32::INFINITY;
        let rows = [[-inf, 0.0, -inf, 0.0], [-inf; 4], [inf, 0.0, 1.0, 2.0], [f32::NAN, 0.0, 1.0, 2.0]];
        let x = Tensor::from_slice(rows.as_flattened(), &[4, 4], Device::Cpu).unwrap();
        let out = Softmax::new(&x).run().unwrap().to_vec::<f32>().unwrap();
        assert_eq!(out[..4], [0.0, 0.5, 0.0, 0.5]);
        assert!(out[4..].iter().all(|y| y.is_nan()), "{out:?}");
    }

    #[test]
    fn subnormal_results_are_not_lost() {
        // From the least normal numbers down to where the result is zero, before the largest element and after it.
        let small = |i: usize| -86.0 - i as f64 / 2.0;
        let row: Vec<f64> = (0..41).map(|i| if i == 20 { 0.0 } else { small(i) }).collect();
        let sum: f64 = row.iter().map(|x| x.exp()).sum();
        for (dtype, least) in [(DType::F32, 2f64.powi(-149)), (DType::BF16, 2f64.powi(-133))] {
            let x = Tensor::from_f64(&row, &[row.len()], dtype, Device::Cpu).unwrap();
            for tier in Tier::available() {
                let out = Softmax::new(&x).kernel(format!("softmax_{tier}")).run().unwrap().to_f64().unwrap();
                for (x, got) in row.iter().zip(out) {
                    let want = x.exp() / sum;
                    let allowed = want * 1.1 * dtype.unit_roundoff().max(2f64.powi(-17)) + 0.6 * least;
                    assert!((got - want).abs() <= allowed, "{dtype} {tier} {x}: {got:e}, want {want:e}");
                }
            }
        }
    }

    #[test]
    fn rows_that_do_not_begin_with_their_largest_elements_are_as_good() {
        let n = 300;
        let (inf, most) = (f32::INFINITY, 3e38f32);
        let rows: [&dyn Fn(usize) -> f32; 6] = [
            &|i| if i < 200 { -inf } else { i as f32 / 64.0 },
            &|i| if i < 250 { i as f32 / 64.0 } else { 500.0 + i as f32 },
            &|i| if i < 250 { -20_000.0 } else { 20_000.0 },
            &|i| if i % 100 == 99 { most } else { -most },
            &|i| if i == 0 { most } else { i as f32 - most },
            &|i| -40.0 - (i % 7) as f32,
        ];
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let values: Vec<f64> = rows.iter().flat_map(|f| (0..n).map(|i| f(i) as f64)).collect();
            let x = Tensor::from_f64(&values, &[rows.len(), n], dtype, Device::Cpu).unwrap();
            for (kernel, scale) in Tier::available().iter().flat_map(|t| [1.0f32, -0.5, 1e-3].map(|s| (t, s)))
            {
                let call = Softmax::new(&x).scale(scale).kernel(format!("softmax_{kernel}"));
                let out = call.run().unwrap().to_f64().unwrap();
                for (row, got) in x.to_f64().unwrap().chunks(n).zip(out.chunks(n)) {
                    let scaled: Vec<f64> = row.iter().map(|x| x * scale as f64).collect();
                    let top = scaled.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                    let sum: f64 = scaled.iter().map(|t| (t - top).exp()).sum();
                    for (t, got) in scaled.iter().zip(got) {
                        let want = (t - top).exp() / sum;
                        let bound = 2.0 * dtype.unit_roundoff() * want + 1e-7;
                        let same = (got - want).abs() <= bound || (got.is_nan() && want.is_nan());
                        assert!(same, "{dtype} {kernel} scale {scale}: {got:e}, want {want:e}");
                    }
                }
            }
        }
    }
}
