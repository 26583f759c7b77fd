//! `penalize`: changes the logits of some tokens of each row in place, by how often they occurred and by a bias.
//!
//! - Shapes: `logits` is `[rows, columns]`, changed in part; `ids`, `counts` and `bias` are `[rows, slots]`; `repetition`,
//!   `presence` and `frequency` are `[rows]`. Any strides.
//! - Types: f32, f16 or bf16 for `logits`; i32 for `ids` and `counts`; f32 for the rest. Computed in f32, rounded once.
//! - For each slot with an id that is a column: `l = logits[row, id]`; if `counts` is 0 or more (the token occurred in
//!   the prompt, or that many times in the output), `l = l / repetition` where `l` is positive and `l * repetition`
//!   elsewhere; if it is 1 or more, `l = l - (frequency * count + presence)`; then `l = l + bias`. Missing arguments
//!   change nothing.
//! - Other ids, such as -1, are skipped, so that rows may have lists of different lengths.
//! - The ids of a row must differ. If some are the same, each of them is applied to the logit as it was or as another of
//!   them left it.
//! - NaN and infinity give what the formula gives. An empty list changes nothing.

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
use crate::op::{ArgSpec, Args, Attrs, Call, Cost, DTypeRule, Kernel, Matcher, Op, OpSpec, SizeSpec, shape};
use crate::tensor::{DType, TensorView, TensorViewMut};

const IDS: usize = 0;
const COUNTS: usize = 1;
const BIAS: usize = 2;
const REPETITION: usize = 3;
const PRESENCE: usize = 4;
const FREQUENCY: usize = 5;
const LOGITS: usize = 6;

/// A checked call.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Problem {
    dtype: DType,
    num_rows: usize,
    columns: usize,
    slots: usize,
    /// Distance of rows, and of neighbours where there are any, of each argument; none for those left out.
    strides: [Option<[isize; 2]>; 7],
}

fn check(args: &Args<'_>, attrs: &Attrs) -> Result<Problem> {
    let sizes = Matcher::of(args, attrs)?;
    let strides = |arg: usize| {
        let strides = args.get(arg)?.layout().strides();
        Some([strides[0], strides.get(1).copied().unwrap_or(0)])
    };
    Ok(Problem {
        dtype: args.at(LOGITS).dtype(),
        num_rows: sizes.size("rows"),
        columns: sizes.size("columns"),
        slots: sizes.size("slots"),
        strides: std::array::from_fn(strides),
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
        name: "penalize",
        summary: "Penalties and biases for listed tokens, on logits in place",
        args: &[
            ArgSpec::input("ids", shape![rows, slots], DTypeRule::I32, "tokens; -1 to skip"),
            ArgSpec::input(
                "counts",
                shape![rows, slots],
                DTypeRule::I32,
                "occurrences in the output; -1: in no text",
            ),
            ArgSpec::input("bias", shape![rows, slots], DTypeRule::F32, "added to the logits").optional(),
            ArgSpec::input("repetition", shape![rows], DTypeRule::F32, "divides positive logits").optional(),
            ArgSpec::input("presence", shape![rows], DTypeRule::F32, "subtracted once").optional(),
            ArgSpec::input("frequency", shape![rows], DTypeRule::F32, "subtracted for each occurrence")
                .optional(),
            ArgSpec::in_out("logits", shape![rows, columns], DTypeRule::FLOAT, ""),
        ],
        sizes: &[
            SizeSpec { name: "rows", default: 64, doc: "number of rows" },
            SizeSpec { name: "slots", default: 1024, doc: "tokens that are listed for a row" },
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
        let lists = 2 + p.strides[BIAS].is_some() as usize;
        let slots = (p.num_rows * p.slots) as f64;
        Cost::moving(slots * (4 * lists + 2 * p.dtype.size()) as f64, 6.0 * slots)
    }
}

static KERNELS: &[Kernel<Problem>] = &[
    #[cfg(feature = "cuda")]
    cuda::KERNEL,
    Kernel::cpu("penalize_portable", Tier::Portable, cpu::run),
];

/// A call of `penalize`.
///
/// ```
/// use warpsmith::{ops::Penalize, Device, Tensor};
/// let mut logits = Tensor::from_slice(&[4.0f32, -1.0, 2.0], &[1, 3], Device::Cpu)?;
/// let ids = Tensor::from_slice(&[0i32, 1, -1], &[1, 3], Device::Cpu)?;
/// let counts = Tensor::from_slice(&[3i32, 0, 0], &[1, 3], Device::Cpu)?;
/// let [repetition, frequency] = [2.0f32, 0.25].map(|x| Tensor::from_slice(&[x], &[1], Device::Cpu));
/// Penalize::new(&ids, &counts).repetition(&repetition?).frequency(&frequency?).run(&mut logits)?;
/// assert_eq!(logits.to_vec::<f32>()?, [1.25, -2.0, 2.0]);
/// # Ok::<(), warpsmith::Error>(())
/// ```
pub type Penalize<'a> = Call<'a, Forward>;

impl<'a> Call<'a, Forward> {
    /// Tokens of each row, and how often they occurred.
    pub fn new(ids: impl Into<TensorView<'a>>, counts: impl Into<TensorView<'a>>) -> Self {
        Call::start().input(IDS, ids).input(COUNTS, counts)
    }

    /// Adds to the logits of the listed tokens.
    pub fn bias(self, bias: impl Into<TensorView<'a>>) -> Self {
        self.input(BIAS, bias)
    }

    /// Divides positive logits of tokens that occurred, and multiplies others.
    pub fn repetition(self, repetition: impl Into<TensorView<'a>>) -> Self {
        self.input(REPETITION, repetition)
    }

    /// Subtracts from logits of tokens in the output.
    pub fn presence(self, presence: impl Into<TensorView<'a>>) -> Self {
        self.input(PRESENCE, presence)
    }

    /// Subtracts from logits for each time the token is in the output.
    pub fn frequency(self, frequency: impl Into<TensorView<'a>>) -> Self {
        self.input(FREQUENCY, frequency)
    }

    /// Runs on the device's default stream.
    pub fn run<'b>(self, logits: impl Into<TensorViewMut<'b>>) -> Result<()>
    where
        'a: 'b,
    {
        let stream = self.default_stream()?;
        self.run_into(logits, &stream)
    }

    /// Runs on `stream`.
    pub fn run_into<'b>(self, logits: impl Into<TensorViewMut<'b>>, stream: &Stream) -> Result<()>
    where
        'a: 'b,
    {
        self.launch([(LOGITS, logits.into())], stream)
    }
}
