//! `argmax`: the index of the largest element of each row.
//!
//! - Shapes: `x` is `[..., n]` with at least one column, `out` is `[...]`; any strides.
//! - Types: f32, f16 or bf16 for `x`; i32 or i64 for `out`: the option `to` chooses where no `out` is given.
//! - Of equal elements the one with the lowest index is taken; zeros of either sign are equal.
//! - NaN is never taken, unless a row has nothing else: then the result is 0.
//! - The result of a row depends on that row alone. An empty `out` is left alone.

#[cfg(feature = "lab")]
mod cases;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(feature = "lab")]
mod reference;

use crate::cpu::Tier;
use crate::error::{Error, Result};
use crate::op::{
    ArgSpec, Args, AttrKind, AttrSpec, Attrs, Call, Cost, DTypeRule, Kernel, Matcher, OneOutput, Op, OpSpec,
    SizeSpec, shape,
};
use crate::tensor::{DType, Space, TensorView};

const X: usize = 0;
const OUT: usize = 1;
const TO: usize = 0;

/// The types of the result, in the order of the option `to`.
const RESULTS: [DType; 2] = [DType::I32, DType::I64];

/// A checked call.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Problem {
    dtype: DType,
    out_dtype: DType,
    num_rows: usize,
    n: usize,
    /// Where rows of x and elements of out are (each twice), in elements.
    rows: Space<4>,
    /// Stride in elements along a row.
    step: isize,
    /// Rows are dense, 16-byte aligned and a multiple of 16 bytes long.
    vector: bool,
}

fn check(args: &Args<'_>, attrs: &Attrs) -> Result<Problem> {
    let sizes = Matcher::of(args, attrs)?;
    let (x, out) = (args.at(X), args.at(OUT));
    let n = sizes.size("n");
    // Requires a number of columns that the type of `out` can count.
    let most = if out.dtype() == DType::I32 { i32::MAX as usize } else { u32::MAX as usize };
    if n == 0 || n > most {
        let expected = format!("from 1 to {most} columns, for an index of type {}", out.dtype());
        return Err(Error::argument("argmax", "x", expected, format!("shape {:?}", x.shape())));
    }
    Ok(Problem {
        dtype: x.dtype(),
        out_dtype: out.dtype(),
        num_rows: sizes.leading_count(),
        n,
        rows: Space::new(sizes.leading_rank(), [x.layout(), out.layout(), x.layout(), out.layout()]),
        step: x.layout().step(),
        vector: x.has_rows_of(16 / x.dtype().size()),
    })
}

/// The op, as listed in [`crate::ops::ALL`].
#[derive(Default)]
pub struct Forward;

// SAFETY: only `check` makes a problem; it holds the types, sizes and strides of the arguments it judged, and the kernels
// go by these alone.
unsafe impl Op for Forward {
    type Problem = Problem;

    const SPEC: OpSpec = OpSpec {
        name: "argmax",
        summary: "Index of the largest element of each row",
        args: &[
            ArgSpec::input("x", shape![.., n], DTypeRule::FLOAT, ""),
            ArgSpec::output(
                "out",
                shape![..],
                DTypeRule::Chosen { types: &RESULTS, option: TO, like: X },
                "the lowest index of equal ones",
            ),
        ],
        attrs: &[AttrSpec {
            name: "to",
            kind: AttrKind::Choice(&["i32", "i64"]),
            doc: "type of `out` where it is allocated for the call",
        }],
        sizes: &[
            SizeSpec { name: "num_tokens", default: 64, doc: "number of rows" },
            SizeSpec { name: "n", default: 131_072, doc: "length of a row" },
        ],
        ..OpSpec::EMPTY
    };

    fn check(args: &Args<'_>, attrs: &Attrs) -> Result<Problem> {
        check(args, attrs)
    }

    fn kernels() -> &'static [Kernel<Problem>] {
        KERNELS
    }

    fn cost(p: &Problem) -> Cost {
        let elements = (p.num_rows * p.n) as f64;
        let bytes = elements * p.dtype.size() as f64 + (p.num_rows * p.out_dtype.size()) as f64;
        Cost::moving(bytes, elements)
    }
}

static KERNELS: &[Kernel<Problem>] = &[
    #[cfg(feature = "cuda")]
    cuda::KERNEL,
    Kernel::cpu("argmax_avx512", Tier::Avx512, cpu::run),
    Kernel::cpu("argmax_avx2", Tier::Avx2, cpu::run),
    Kernel::cpu("argmax_portable", Tier::Portable, cpu::run),
];

/// A call of `argmax`.
///
/// ```
/// use warpsmith::{Device, Tensor, ops::Argmax};
/// let x = Tensor::from_slice(&[0.0f32, 7.0, 7.0, -1.0, f32::NAN, -2.0], &[2, 3], Device::Cpu)?;
/// assert_eq!(Argmax::new(&x).run()?.to_vec::<i32>()?, [1, 0]);
/// # Ok::<(), warpsmith::Error>(())
/// ```
pub type Argmax<'a> = Call<'a, Forward>;

impl OneOutput for Forward {
    const OUTPUT: usize = OUT;
}

impl<'a> Call<'a, Forward> {
    /// The indices of the largest elements of the rows of `x`.
    pub fn new(x: impl Into<TensorView<'a>>) -> Self {
        Call::start().input(X, x)
    }

    /// The type of the tensor that [`Argmax::run`] returns, i32 or i64; others are refused when it runs.
    pub fn out_dtype(self, dtype: DType) -> Self {
        let index = RESULTS.iter().position(|&known| known == dtype);
        self.choice(TO, index.unwrap_or(RESULTS.len()) as u8)
    }
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;
    use crate::{Device, Tensor};

    #[test]
    fn rows_without_columns_are_refused() {
        let x = Tensor::zeros(&[2, 0], DType::F32, Device::Cpu).unwrap();
        let error = Argmax::new(&x).run().unwrap_err().to_string();
        assert!(error.contains("argmax: argument `x`: expected from 1 to 2147483647 columns"), "{error}");
    }

    #[test]
    fn ties_nan_and_infinity_at_every_place() {
        let (inf, nan) = (f32::INFINITY, f32::NAN);
        for device in crate::ops::devices() {
            for n in [1usize, 2, 15, 16, 17, 63, 64, 65, 200, 20_000, 40_001] {
                for at in [0, n / 2, n - 1] {
                    let mut rows = vec![nan; 5 * n];
                    rows[n + at] = -inf;
                    rows[2 * n..3 * n].fill(-inf);
                    // Two equal ones: the first is taken.
                    rows[3 * n..4 * n].fill(0.0);
                    rows[3 * n + at] = 1.0;
                    rows[3 * n + (at + 1).min(n - 1)] = 1.0;
                    rows[4 * n + at..5 * n].fill(inf);
                    let x = Tensor::from_slice(&rows, &[5, n], device).unwrap();
                    for kernel in crate::lab::proof::kernels_on(&Forward, device) {
                        let out = Argmax::new(&x).kernel(kernel.name).run().unwrap().to_vec::<i32>().unwrap();
                        let at = at as i32;
                        assert_eq!(out, [0, at, 0, at, at], "{} n={n}", kernel.name);
                    }
                }
            }
        }
    }
}
