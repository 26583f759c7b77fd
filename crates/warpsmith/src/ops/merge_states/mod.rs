//! `merge_states`: combines attention outputs over parts of the context into the output over all of it, using the
//! logarithms of their sums of exponentials: with `w[p] = exp(lses[p])`, `out = sum(w[p] outs[p]) / sum(w[p])`, `lse =
//! ln(sum(w[p]))`.
//!
//! - Shapes: `outs` is `[num_parts, num_tokens, num_heads, head_dim]`, `lses` is `[num_parts, num_tokens, num_heads]`, `counts` is
//!   `[num_tokens]`, `out` is `[num_tokens, num_heads, head_dim]`, `lse` is `[num_tokens, num_heads]`; any strides.
//! - Types: f32, f16 or bf16 for `outs`, any of them for `out`: its type decides, and the option `to` says which one to
//!   allocate where nobody gives `out`. f32 for `lses` and `lse`, natural logarithms. i32 for `counts`.
//! - Empty parts: one whose lse is minus infinity has no weight, and its output is not used, even if it is NaN. If all
//!   parts are empty, or there are none, the result is zero and its lse minus infinity.
//! - With `counts`, only the first `counts[t]` parts of token `t` exist. Counts are clamped to `0..=num_parts` on every
//!   device.
//! - Arithmetic is f32: weights relative to the largest, added in the order of the parts, and the quotient rounded
//!   once. So the bits of a token depend only on its own parts.
//! - An lse of NaN or plus infinity makes the token's head NaN. NaN and infinity in a part that has weight reach the
//!   result as the formula says.

#[cfg(feature = "lab")]
mod cases;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(feature = "lab")]
mod reference;
#[cfg(feature = "tests")]
mod tests;

use crate::cpu::Tier;
use crate::device::Stream;
use crate::error::Result;
use crate::op::{
    ArgSpec, Args, AttrKind, AttrSpec, Attrs, Call, Cost, DTypeRule, Kernel, Matcher, Op, OpSpec, SizeSpec,
    shape,
};
use crate::ops::FLOATS;
use crate::tensor::{DType, Space, Tensor, TensorView, TensorViewMut};

const OUTS: usize = 0;
const LSES: usize = 1;
const COUNTS: usize = 2;
const OUT: usize = 3;
const LSE: usize = 4;
const TO: usize = 0;

/// A checked call.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Problem {
    from: DType,
    to: DType,
    num_parts: usize,
    num_tokens: usize,
    num_heads: usize,
    head_dim: usize,
    /// Tokens and heads of the parts' outputs and lses, of out and lse.
    rows: Space<4>,
    /// Distance of parts in outs and lses.
    part_strides: [isize; 2],
    /// Distance of neighbours in a head of outs and out.
    steps: [isize; 2],
    /// Distance of the counts, if there are any.
    counts: Option<isize>,
    has_lse: bool,
    /// Heads consist of 16-byte pieces of outs, whose results can be stored at once.
    vector: bool,
}

fn check(args: &Args<'_>, attrs: &Attrs) -> Result<Problem> {
    let sizes = Matcher::of(args, attrs)?;
    let (outs, lses, out) = (args.at(OUTS), args.at(LSES), args.at(OUT));
    let (from, to) = (outs.dtype(), out.dtype());
    let [num_parts, num_tokens, num_heads, head_dim] =
        ["num_parts", "num_tokens", "num_heads", "head_dim"].map(|name| sizes.size(name));

    // Parts last, so that tokens and heads lead in every layout.
    let (outs_layout, lses_layout) =
        (outs.layout().permute(&[1, 2, 0, 3]), lses.layout().permute(&[1, 2, 0]));
    let lse_layout = args.get(LSE).map_or(lses_layout, |lse| *lse.layout());
    let rows = Space::new(2, [&outs_layout, &lses_layout, out.layout(), &lse_layout]);
    let piece = 16 / from.size();
    Ok(Problem {
        from,
        to,
        num_parts,
        num_tokens,
        num_heads,
        head_dim,
        rows,
        part_strides: [outs.layout().strides()[0], lses.layout().strides()[0]],
        steps: [outs.layout().step(), out.layout().step()],
        counts: args.get(COUNTS).map(|counts| counts.layout().step()),
        has_lse: args.get(LSE).is_some(),
        vector: outs.has_rows_of(piece) && out.has_rows_of(piece),
    })
}

/// The op, as listed in [`crate::ops::PROVABLE`].
#[derive(Default)]
pub struct Forward;

// SAFETY: only `check` makes a problem; it holds the types, sizes and strides of the arguments it judged, and the kernels
// go by these alone.
unsafe impl Op for Forward {
    type Problem = Problem;

    const SPEC: OpSpec = OpSpec {
        name: "merge_states",
        summary: "Combines attention over parts of a context into attention over all of it",
        args: &[
            ArgSpec::input("outs", shape![num_parts, num_tokens, num_heads, head_dim], DTypeRule::FLOAT, ""),
            ArgSpec::input(
                "lses",
                shape![num_parts, num_tokens, num_heads],
                DTypeRule::F32,
                "minus infinity for an empty part",
            ),
            ArgSpec::input("counts", shape![num_tokens], DTypeRule::I32, "how many parts a token has")
                .optional(),
            ArgSpec::output(
                "out",
                shape![num_tokens, num_heads, head_dim],
                DTypeRule::Chosen { types: &FLOATS, option: TO, like: OUTS },
                "",
            ),
            ArgSpec::output("lse", shape![num_tokens, num_heads], DTypeRule::F32, "").optional(),
        ],
        attrs: &[AttrSpec {
            name: "to",
            kind: AttrKind::Choice(&["auto", "f32", "f16", "bf16"]),
            doc: "type of `out` where it is allocated for the call; auto: that of outs",
        }],
        sizes: &[
            SizeSpec { name: "num_tokens", default: 8192, doc: "number of tokens" },
            SizeSpec { name: "num_parts", default: 2, doc: "parts of the context" },
            SizeSpec { name: "num_heads", default: 32, doc: "number of query heads" },
            SizeSpec { name: "head_dim", default: 128, doc: "elements of a head" },
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
        let rows = (p.num_tokens * p.num_heads) as f64;
        let (parts, dim) = (p.num_parts as f64, p.head_dim as f64);
        let lses = (parts + p.has_lse as u8 as f64) * rows * size_of::<f32>() as f64;
        let counts = if p.counts.is_some() { (p.num_tokens * size_of::<i32>()) as f64 } else { 0.0 };
        let states = rows * dim * (parts * p.from.size() as f64 + p.to.size() as f64);
        Cost::moving(states + lses + counts, rows * dim * (2.0 * parts + 1.0))
    }
}

static KERNELS: &[Kernel<Problem>] = &[
    #[cfg(feature = "cuda")]
    cuda::kernel("merge_states_cuda"),
    Kernel::cpu("merge_states_avx512", Tier::Avx512, cpu::run),
    Kernel::cpu("merge_states_avx2", Tier::Avx2, cpu::run),
    Kernel::cpu("merge_states_portable", Tier::Portable, cpu::run),
];

/// A call of `merge_states`.
///
/// ```
/// use warpsmith::{ops::MergeStates, DType, Device, Tensor};
/// let outs = Tensor::randn(&[2, 5, 8, 64], DType::BF16, Device::Cpu, 0)?;
/// let lses = Tensor::randn(&[2, 5, 8], DType::F32, Device::Cpu, 1)?;
/// let (out, lse) = MergeStates::new(&outs, &lses).run()?;
/// assert_eq!((out.shape(), lse.shape()), (&[5, 8, 64][..], &[5, 8][..]));
/// # Ok::<(), warpsmith::Error>(())
/// ```
pub type MergeStates<'a> = Call<'a, Forward>;

impl<'a> Call<'a, Forward> {
    /// Merges the parts' outputs by their lses.
    pub fn new(outs: impl Into<TensorView<'a>>, lses: impl Into<TensorView<'a>>) -> Self {
        Call::start().input(OUTS, outs).input(LSES, lses)
    }

    /// Merges only the first `counts[t]` parts of token `t`.
    pub fn counts(self, counts: impl Into<TensorView<'a>>) -> Self {
        self.input(COUNTS, counts)
    }

    /// The type of a new result, f32, f16 or bf16; that of the parts unless set.
    pub fn to(self, dtype: DType) -> Self {
        let choice = FLOATS.iter().position(|&known| known == dtype).unwrap_or(FLOATS.len());
        self.choice(TO, (choice + 1) as u8)
    }

    /// Runs on the device's default stream and returns the result and its lse as new tensors.
    pub fn run(self) -> Result<(Tensor, Tensor)> {
        let stream = self.default_stream()?;
        let (mut out, mut lse) = (self.allocate(OUT, &stream)?, self.allocate(LSE, &stream)?);
        self.run_into(&mut out, Some((&mut lse).into()), &stream)?;
        Ok((out, lse))
    }

    /// Runs on `stream` into the caller's memory; the lse is computed if there is a place for it.
    pub fn run_into<'b>(
        self,
        out: impl Into<TensorViewMut<'b>>,
        lse: Option<TensorViewMut<'b>>,
        stream: &Stream,
    ) -> Result<()>
    where
        'a: 'b,
    {
        match lse {
            Some(lse) => self.launch([(OUT, out.into()), (LSE, lse)], stream),
            None => self.launch([(OUT, out.into())], stream),
        }
    }
}
