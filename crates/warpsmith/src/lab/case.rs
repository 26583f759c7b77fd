//! One point of an op's problem space, to be checked or timed.

use super::fill::Fill;
use crate::op::{Attrs, OpSpec};
use crate::tensor::{DType, Random};

/// Row counts and lengths that reach every path of a row kernel: empty, one element, one less and one more than vector,
/// warp and block sizes, and rows that do not fit in registers.
pub const ROW_SIZES: &[&[usize]] = &[
    &[0, 64],
    &[1, 1],
    &[3, 7],
    &[2, 8],
    &[65, 31],
    &[17, 129],
    &[4, 256],
    &[3, 1023],
    &[2, 4096],
    &[2, 4099],
    &[1, 70_001],
];

/// Rows of odd length, of which each begins at another place of a 16-byte vector.
pub(crate) const ODD_ROWS: &[&[usize]] = &[&[9, 127], &[3, 1025], &[9, 4097], &[2, 50_257]];

/// So many short rows that several of them share the threads of a block, and a last block that is not full.
pub(crate) const MANY_ROWS: &[&[usize]] = &[&[40_001, 9], &[40_001, 16], &[4_801, 521]];

/// How a case lays out the tensors in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Arrangement {
    /// Row-major without gaps, aligned.
    Contiguous,
    /// Rows padded by an odd number of elements.
    PaddedRows,
    /// The last dimension is not the fastest: neighbouring elements of a row are not adjacent.
    Transposed,
    /// Contiguous, but starting one element after an aligned address.
    Misaligned,
    /// The second and third last dimensions are swapped in memory: `[..., tokens, heads, dim]` as `[..., heads,
    /// tokens, dim]`.
    HeadsFirst,
    /// Each argument has one of the above, by the seed.
    Mixed,
}

impl Arrangement {
    /// The layout of argument `index` in a case of this seed.
    pub(super) fn of(self, index: usize, seed: u64) -> Arrangement {
        const ALL: [Arrangement; 5] = [
            Arrangement::Contiguous,
            Arrangement::PaddedRows,
            Arrangement::Transposed,
            Arrangement::Misaligned,
            Arrangement::HeadsFirst,
        ];
        let drawn =
            || ALL[Random::new(seed.wrapping_mul(37) + index as u64).below(ALL.len() as u64) as usize];
        if self == Arrangement::Mixed { drawn() } else { self }
    }
}

/// The kind of values a case uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Values {
    /// What [`ArgPlan::fill`] says.
    Typical,
    /// Typical values a thousand times larger.
    Large,
    /// Typical values mixed with NaN, infinities, zeros and subnormals; unusual values of generated arguments.
    Special,
    /// Numbers from the smallest subnormal to the largest of the type, in rows that span everything, rows of one
    /// magnitude, and typical rows with a few tiny ones. Sums of them do not overflow.
    Exponents,
    /// Typical values, except that generated choices are skewed: that of rank `r` is made `1 / r` as often as the first (Zipf).
    Zipf,
    /// Typical values, except that all generated choices are the same.
    AllToOne,
}

/// The tensor of one argument in a case.
#[derive(Debug, Clone)]
pub struct ArgPlan {
    /// Sizes.
    pub shape: Vec<usize>,
    /// Element type.
    pub dtype: DType,
    /// Values (of inputs).
    pub fill: Fill,
    /// The batch dimension, if the argument has one. Its rows are independent: a call on some of them must give the
    /// same bits.
    pub batch_dim: Option<usize>,
}

impl ArgPlan {
    /// Normal values, with the first dimension as the batch: of a vector, every element is a row of its own.
    pub fn batched(shape: &[usize], dtype: DType) -> Option<Self> {
        let batch_dim = (!shape.is_empty()).then_some(0);
        Some(ArgPlan { shape: shape.to_vec(), dtype, fill: Fill::Normal(0.0, 1.0), batch_dim })
    }

    /// The same tensor with factors of products as values, each of which may meet any other.
    pub fn factors(self) -> Self {
        ArgPlan { fill: Fill::AnyFactor, ..self }
    }

    /// Normal values shared by the whole batch (weights, biases).
    pub fn shared(shape: &[usize], dtype: DType) -> Option<Self> {
        Some(ArgPlan { shape: shape.to_vec(), dtype, fill: Fill::Normal(0.0, 1.0), batch_dim: None })
    }
}

/// One point of an op's problem space, to be checked or timed.
#[derive(Debug, Clone, PartialEq)]
pub struct Case {
    /// Values of [`OpSpec::sizes`].
    pub sizes: Vec<usize>,
    /// Keys of the requests, in turn, where they are not as many as the sizes say.
    pub kv_lens: Vec<usize>,
    /// The main element type.
    pub dtype: DType,
    /// Options.
    pub attrs: Attrs,
    /// Bit `i` set: optional argument `i` is given.
    pub optional: u32,
    /// Memory layout of the tensors.
    pub arrangement: Arrangement,
    /// Values.
    pub values: Values,
    /// Compute in place, if the op allows it.
    pub in_place: bool,
    /// Judged and timed only on GPUs: a CPU would take minutes to time it, or has no branch that it alone reaches.
    pub gpu_only: bool,
    /// Uses a feature that only some kernels have, and on some devices none.
    pub selective: bool,
}

impl Case {
    /// Default sizes and options, no optional arguments.
    pub fn new(spec: &OpSpec, dtype: DType) -> Self {
        Case {
            sizes: spec.sizes.iter().map(|s| s.default).collect(),
            kv_lens: Vec::new(),
            dtype,
            attrs: Attrs::defaults(spec),
            optional: 0,
            arrangement: Arrangement::Contiguous,
            values: Values::Typical,
            in_place: false,
            gpu_only: false,
            selective: false,
        }
    }

    /// With sizes, in the order of [`OpSpec::sizes`].
    pub fn sizes(mut self, sizes: &[usize]) -> Self {
        self.sizes = sizes.to_vec();
        self
    }

    /// With requests of these numbers of keys, in turn; none may be more than the sizes say.
    pub fn kv_lens(mut self, lengths: &[usize]) -> Self {
        self.kv_lens = lengths.to_vec();
        self
    }

    /// With one option set: to a number, to 0 or 1 if it is a switch, to a position if it is a choice.
    pub fn attr(mut self, index: usize, value: f64) -> Self {
        self.attrs = self.attrs.with_number(index, value);
        self
    }

    /// With an optional argument given.
    pub fn give(mut self, index: usize) -> Self {
        self.optional |= 1 << index;
        self
    }

    /// Sets an option, as [`attr`](Self::attr) does.
    pub(crate) fn set(&mut self, index: usize, value: f64) {
        self.attrs = self.attrs.with_number(index, value);
    }

    /// Leaves an optional argument out.
    pub(crate) fn withhold(&mut self, index: usize) {
        self.optional &= !(1 << index);
    }

    /// Judged and timed only on GPUs.
    pub fn gpu_only(mut self) -> Self {
        self.gpu_only = true;
        self
    }

    /// Only for kernels that have the feature it uses.
    pub fn selective(mut self) -> Self {
        self.selective = true;
        self
    }

    /// With another memory layout.
    pub fn arranged(mut self, arrangement: Arrangement) -> Self {
        self.arrangement = arrangement;
        self
    }

    /// With other values.
    pub fn values(mut self, values: Values) -> Self {
        self.values = values;
        self
    }

    /// Computing in place.
    pub fn in_place(mut self) -> Self {
        self.in_place = true;
        self
    }

    /// Whether optional argument `index` is given.
    pub fn gives(&self, index: usize) -> bool {
        self.optional & (1 << index) != 0
    }

    /// A name with everything but the dtype: `num_tokens=8 hidden=64 +residual eps=0.1 transposed`.
    pub fn name(&self, spec: &OpSpec) -> String {
        let mut parts: Vec<String> =
            spec.sizes.iter().zip(&self.sizes).map(|(s, v)| format!("{}={v}", s.name)).collect();
        parts.extend(
            (0..spec.args.len()).filter(|&i| self.gives(i)).map(|i| format!("+{}", spec.args[i].name)),
        );
        parts.extend(self.attrs.describe(spec));
        if !self.kv_lens.is_empty() {
            let lengths: Vec<String> = self.kv_lens.iter().map(usize::to_string).collect();
            parts.push(format!("kv_lens={}", lengths.join("/")));
        }
        match self.arrangement {
            Arrangement::Contiguous => {}
            Arrangement::PaddedRows => parts.push("padded".into()),
            Arrangement::Transposed => parts.push("transposed".into()),
            Arrangement::Misaligned => parts.push("misaligned".into()),
            Arrangement::HeadsFirst => parts.push("heads-first".into()),
            Arrangement::Mixed => parts.push("mixed".into()),
        }
        match self.values {
            Values::Typical => {}
            Values::Large => parts.push("large".into()),
            Values::Special => parts.push("special".into()),
            Values::Exponents => parts.push("exponents".into()),
            Values::Zipf => parts.push("zipf".into()),
            Values::AllToOne => parts.push("all-to-one".into()),
        }
        if self.in_place {
            parts.push("in-place".into());
        }
        parts.join(" ")
    }
}
