//! `sample`: one token for each row of logits, drawn with the row's own parameters, and its log-probability.
//!
//! - Shapes: `logits` is `[rows, columns]`; `seed`, `position`, `temperature`, `top_k`, `top_p`, `min_p`, `token` and
//!   `logprob` are `[rows]`; `raw` is `[rows, columns]`. Any strides. Columns from the option `vocab` on (if it is not
//!   zero) do not exist: they are never drawn and have no probability.
//! - Types: f32, f16 or bf16 for `logits`, the same for `raw`; i64 for `seed` and `position`; f32 for `temperature` (1 if
//!   left out), `top_p` (1) and `min_p` (0); i32 for `top_k` (0) and `token`; f32 for `logprob`.
//! - A logit of NaN counts as minus infinity, plus infinity as the largest number of f32. A row without a logit above
//!   minus infinity gets token -1 and a logprob of NaN; other rows are not affected.
//! - A temperature that is not at least 1e-5 takes the largest logit, the lowest token of equal ones. Otherwise token `j`
//!   has the weight `e[j] = exp((logits[j] - max) / temperature)`. These tokens remain, one cut after the other:
//!   1. those with `e[j] >= 2^-40`;
//!   2. with `min_p` above 0: those with `e[j] >= min(min_p, 1)`;
//!   3. with `top_k` above 0: those whose logit is at least the `top_k`-th largest of those that remain;
//!   4. with `top_p` below 1: those whose logit is at least the largest `c` such that the weights of logits from `c` on
//!      are at least `top_p` of the weights of those that remain. Weights are added as whole multiples of 2^-40.
//!
//! So tokens with equal logits stay or go together, and the order of summation has no effect.
//! - Of the tokens that remain the one with the largest `e[j] / noise[j]` is drawn, the lowest of equal ones. `noise[j]`
//!   is exponentially distributed and depends on the row's `seed` and `position` and on `j` alone: this draws each token
//!   with its probability (it is the argmax of logits with Gumbel noise). So a row's token depends on nothing but the row.
//! - Weights and noise are defined operation by operation (see `arithmetic`), with roundings that all devices share:
//!   the token is the same on each of them, for the same logits.
//! - `logprob` is that of the drawn token in the softmax of `raw`, or of `logits` where `raw` is left out, before
//!   temperature and cuts: give the logits of the model as `raw` if `logits` were changed by penalties. It is computed in
//!   f32, and not bit for bit the same on every device.

pub(in crate::ops) mod arithmetic;
#[cfg(feature = "lab")]
mod cases;
pub(in crate::ops) mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(feature = "lab")]
mod reference;
#[cfg(feature = "tests")]
mod tests;

use crate::cpu::Tier;
use crate::device::Stream;
use crate::error::{Error, Result};
use crate::op::{
    ArgSpec, Args, AttrKind, AttrSpec, Attrs, Call, Cost, DTypeRule, Kernel, Matcher, Op, OpSpec, SizeSpec,
    shape,
};
use crate::tensor::{DType, Tensor, TensorView, TensorViewMut};

const LOGITS: usize = 0;
const SEED: usize = 1;
const POSITION: usize = 2;
const TEMPERATURE: usize = 3;
const TOP_K: usize = 4;
const TOP_P: usize = 5;
const MIN_P: usize = 6;
const RAW: usize = 7;
const TOKEN: usize = 8;
const LOGPROB: usize = 9;
const VOCAB: usize = 0;

/// The arguments with one value for each row.
const PER_ROW: [usize; 8] = [SEED, POSITION, TEMPERATURE, TOP_K, TOP_P, MIN_P, TOKEN, LOGPROB];

/// A checked call.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Problem {
    dtype: DType,
    num_rows: usize,
    /// Columns that exist.
    vocab: usize,
    /// Distance of rows and of neighbours in logits and in raw.
    logits: [isize; 2],
    raw: Option<[isize; 2]>,
    /// Distance of the values of [`PER_ROW`], if they are given.
    steps: [Option<isize>; 8],
}

impl Problem {
    /// Whether an argument of [`PER_ROW`] is given, and the distance of its values.
    fn step(&self, arg: usize) -> Option<isize> {
        self.steps[PER_ROW.iter().position(|&known| known == arg).expect("an argument by row")]
    }
}

fn check(args: &Args<'_>, attrs: &Attrs) -> Result<Problem> {
    let sizes = Matcher::of(args, attrs)?;
    let columns = sizes.size("columns");
    let limit = attrs.int(VOCAB);
    let vocab = match limit {
        0 => columns,
        _ => usize::try_from(limit).unwrap_or(usize::MAX),
    };
    sizes.option("vocab", limit, &format!("a whole number from 0 to columns={columns}"), vocab <= columns)?;
    if vocab == 0 || vocab > i32::MAX as usize {
        let expected = format!("from 1 to {} columns", i32::MAX);
        return Err(Error::argument("sample", "logits", expected, format!("{:?}", args.at(LOGITS).shape())));
    }
    let strides = |arg: usize| {
        let strides = args.get(arg)?.layout().strides();
        Some([strides[0], strides[1]])
    };
    Ok(Problem {
        dtype: args.at(LOGITS).dtype(),
        num_rows: sizes.size("rows"),
        vocab,
        logits: strides(LOGITS).expect("a required argument"),
        raw: strides(RAW),
        steps: PER_ROW.map(|arg| Some(args.get(arg)?.layout().step())),
    })
}

/// The op, as listed in [`crate::ops::ALL`].
#[derive(Default)]
pub struct Forward;

// SAFETY: only `check` makes a problem; it holds the types, sizes and strides of the arguments it judged, and the kernels
// go by these alone. Indices that tensors hold are checked or clamped where they are used.
unsafe impl Op for Forward {
    type Problem = Problem;

    const SPEC: OpSpec = OpSpec {
        name: "sample",
        summary: "One token drawn for each row of logits, with its log-probability",
        args: &[
            ArgSpec::input("logits", shape![rows, columns], DTypeRule::FLOAT, ""),
            ArgSpec::input("seed", shape![rows], DTypeRule::OneOf(&[DType::I64]), "of the row's noise"),
            ArgSpec::input(
                "position",
                shape![rows],
                DTypeRule::OneOf(&[DType::I64]),
                "of the token in its text",
            ),
            ArgSpec::input("temperature", shape![rows], DTypeRule::F32, "0: the largest logit").optional(),
            ArgSpec::input("top_k", shape![rows], DTypeRule::I32, "how many tokens remain; 0: all")
                .optional(),
            ArgSpec::input("top_p", shape![rows], DTypeRule::F32, "how much probability remains").optional(),
            ArgSpec::input("min_p", shape![rows], DTypeRule::F32, "least share of the largest probability")
                .optional(),
            ArgSpec::input(
                "raw",
                shape![rows, columns],
                DTypeRule::Same(LOGITS),
                "logits that logprob is of",
            )
            .optional(),
            ArgSpec::output("token", shape![rows], DTypeRule::I32, "-1 where there is none"),
            ArgSpec::output("logprob", shape![rows], DTypeRule::F32, "of the token").optional(),
        ],
        attrs: &[AttrSpec { name: "vocab", kind: AttrKind::Int(0), doc: "columns that exist; 0: all" }],
        sizes: &[
            SizeSpec { name: "rows", default: 64, doc: "number of rows" },
            SizeSpec { name: "columns", default: 131_072, doc: "length of a row" },
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
        let elements = (p.num_rows * p.vocab) as f64 * (1 + p.raw.is_some() as usize) as f64;
        let by_row = PER_ROW.iter().zip(p.steps).filter(|(_, step)| step.is_some());
        let by_row: usize = by_row.map(|(&arg, _)| if [SEED, POSITION].contains(&arg) { 8 } else { 4 }).sum();
        Cost::moving(elements * p.dtype.size() as f64 + (p.num_rows * by_row) as f64, 10.0 * elements)
    }
}

static KERNELS: &[Kernel<Problem>] = &[
    #[cfg(feature = "cuda")]
    cuda::KERNEL,
    Kernel::cpu("sample_avx512", Tier::Avx512, cpu::run),
    Kernel::cpu("sample_avx2", Tier::Avx2, cpu::run),
    Kernel::cpu("sample_portable", Tier::Portable, cpu::run),
];

/// A call of `sample`.
///
/// ```
/// use warpsmith::{ops::Sample, DType, Device, Tensor};
/// let logits = Tensor::from_slice(&[0.0f32, 3.0, 1.0, 2.0], &[1, 4], Device::Cpu)?;
/// let [seed, position] = [7i64, 0].map(|x| Tensor::from_slice(&[x], &[1], Device::Cpu));
/// let cold = Tensor::from_slice(&[0.0f32], &[1], Device::Cpu)?;
/// let (token, logprob) = Sample::new(&logits, &seed?, &position?).temperature(&cold).run()?;
/// assert_eq!(token.to_vec::<i32>()?, [1]);
/// assert!((logprob.to_vec::<f32>()?[0] + 0.440_19).abs() < 1e-4);
/// # Ok::<(), warpsmith::Error>(())
/// ```
pub type Sample<'a> = Call<'a, Forward>;

impl<'a> Call<'a, Forward> {
    /// A token for each row of `logits`, with noise by the row's seed and position.
    pub fn new(
        logits: impl Into<TensorView<'a>>,
        seed: impl Into<TensorView<'a>>,
        position: impl Into<TensorView<'a>>,
    ) -> Self {
        Call::start().input(LOGITS, logits).input(SEED, seed).input(POSITION, position)
    }

    /// What the rows' logits are divided by; 1 unless given.
    pub fn temperature(self, temperature: impl Into<TensorView<'a>>) -> Self {
        self.input(TEMPERATURE, temperature)
    }

    /// How many of the most likely tokens remain; all unless given, and where it is 0.
    pub fn top_k(self, top_k: impl Into<TensorView<'a>>) -> Self {
        self.input(TOP_K, top_k)
    }

    /// How much of the probability remains, in the most likely tokens.
    pub fn top_p(self, top_p: impl Into<TensorView<'a>>) -> Self {
        self.input(TOP_P, top_p)
    }

    /// Least probability of tokens that remain, as a share of the largest.
    pub fn min_p(self, min_p: impl Into<TensorView<'a>>) -> Self {
        self.input(MIN_P, min_p)
    }

    /// The logits that log-probabilities are of, if not those that tokens are drawn from.
    pub fn raw(self, raw: impl Into<TensorView<'a>>) -> Self {
        self.input(RAW, raw)
    }

    /// How many columns exist, if not all.
    pub fn vocab(self, vocab: usize) -> Self {
        self.int(VOCAB, vocab)
    }

    /// Runs on the device's default stream and returns tokens and log-probabilities as new tensors.
    pub fn run(self) -> Result<(Tensor, Tensor)> {
        let stream = self.default_stream()?;
        let (mut token, mut logprob) = (self.allocate(TOKEN, &stream)?, self.allocate(LOGPROB, &stream)?);
        self.run_into(&mut token, Some((&mut logprob).into()), &stream)?;
        Ok((token, logprob))
    }

    /// Runs on `stream` into the caller's memory; log-probabilities are computed if there is a place for them.
    pub fn run_into<'b>(
        self,
        token: impl Into<TensorViewMut<'b>>,
        logprob: Option<TensorViewMut<'b>>,
        stream: &Stream,
    ) -> Result<()>
    where
        'a: 'b,
    {
        match logprob {
            Some(logprob) => self.launch([(TOKEN, token.into()), (LOGPROB, logprob)], stream),
            None => self.launch([(TOKEN, token.into())], stream),
        }
    }
}
