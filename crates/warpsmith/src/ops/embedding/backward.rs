//! `embedding_backward`: the gradient of `embedding`.

use super::cpu;
use crate::cpu::Tier;
use crate::error::Result;
use crate::op::{
    ArgSpec, Args, AttrKind, AttrSpec, Attrs, Call, Cost, DTypeRule, DerivedSize, Kernel, Matcher, OneOutput,
    Op, OpSpec, SizeRule, SizeSpec, shape,
};
use crate::tensor::{DType, Space, TensorView};

pub(super) const IDS: usize = 0;
pub(super) const DOUT: usize = 1;
pub(super) const DWEIGHT: usize = 2;
pub(super) const VOCAB: usize = 0;

/// A checked call.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Problem {
    pub(super) dtype: DType,
    pub(super) id_dtype: DType,
    pub(super) vocab: usize,
    pub(super) hidden: usize,
    pub(super) num_ids: usize,
    /// Where ids and rows of dout are (each twice), in elements.
    pub(super) rows: Space<4>,
    /// Elements from one row of dweight to the next.
    pub(super) weight_pitch: isize,
    /// Stride in elements along a row of dout and of dweight.
    pub(super) steps: [isize; 2],
}

/// The op, as listed in [`crate::ops::PROVABLE`].
#[derive(Default)]
pub struct Backward;

// SAFETY: only `check` makes a problem; it holds the types, sizes and strides of the arguments it judged, and the kernels
// go by these alone. Indices that tensors hold are checked or clamped where they are used.
unsafe impl Op for Backward {
    type Problem = Problem;

    const SPEC: OpSpec = OpSpec {
        name: "embedding_backward",
        summary: "Gradient of embedding with respect to weight",
        args: &[
            ArgSpec::input("ids", shape![..], DTypeRule::INDEX, "of the forward call"),
            ArgSpec::input("dout", shape![.., hidden], DTypeRule::FLOAT, "gradient of out"),
            ArgSpec::output(
                "dweight",
                shape![vocab, hidden],
                DTypeRule::Same(DOUT),
                "gradient of weight, summed in f32 in the order of the ids",
            ),
        ],
        attrs: &[AttrSpec { name: "vocab", kind: AttrKind::Int(32_768), doc: "rows of dweight" }],
        sizes: &[
            SizeSpec { name: "num_tokens", default: 8192, doc: "number of ids" },
            SizeSpec { name: "hidden", default: 4096, doc: "length of a row" },
        ],
        derived: &[DerivedSize {
            name: "vocab",
            rule: SizeRule::Option { option: VOCAB, most: i32::MAX as usize },
        }],
        ..OpSpec::EMPTY
    };

    fn check(args: &Args<'_>, attrs: &Attrs) -> Result<Problem> {
        let sizes = Matcher::of(args, attrs)?;
        let [ids, dout, dweight] = [IDS, DOUT, DWEIGHT].map(|index| args.at(index).layout());
        Ok(Problem {
            dtype: args.at(DOUT).dtype(),
            id_dtype: args.at(IDS).dtype(),
            vocab: sizes.size("vocab"),
            hidden: sizes.size("hidden"),
            num_ids: sizes.leading_count(),
            rows: Space::new(sizes.leading_rank(), [ids, dout, ids, dout]),
            weight_pitch: dweight.strides()[0],
            steps: [dout.step(), dweight.step()],
        })
    }

    fn kernels() -> &'static [Kernel<Problem>] {
        KERNELS
    }

    fn cost(p: &Problem) -> Cost {
        let elements = (p.num_ids + p.vocab) as f64 * p.hidden as f64;
        let ids = (p.num_ids * p.id_dtype.size()) as f64;
        Cost::moving(elements * p.dtype.size() as f64 + ids, p.num_ids as f64 * p.hidden as f64)
    }
}

static KERNELS: &[Kernel<Problem>] = &[
    #[cfg(feature = "cuda")]
    super::cuda::backward("embedding_backward_cuda"),
    Kernel::cpu("embedding_backward_avx512", Tier::Avx512, cpu::backward),
    Kernel::cpu("embedding_backward_avx2", Tier::Avx2, cpu::backward),
    Kernel::cpu("embedding_backward_portable", Tier::Portable, cpu::backward),
];

/// A call of `embedding_backward`.
pub type EmbeddingBackward<'a> = Call<'a, Backward>;

impl OneOutput for Backward {
    const OUTPUT: usize = DWEIGHT;
}

impl<'a> Call<'a, Backward> {
    /// The gradient of a weight of `vocab` rows, given that of the rows which `ids` named.
    pub fn new(ids: impl Into<TensorView<'a>>, dout: impl Into<TensorView<'a>>, vocab: usize) -> Self {
        Call::start().input(IDS, ids).input(DOUT, dout).int(VOCAB, vocab)
    }
}
