//! `cast`: elements in another type, optionally scaled: `out = round(x)`, `round(x * scale)` or, with `inverse`,
//! `round(x / scale)`.
//!
//! - Shapes: `x` and `out` are `[..., hidden]`; `scale` is f32, `[1]` for one scale or the leading shape `[...]` for
//!   one a row; any strides.
//! - Types: f32, f16, bf16, f8e4m3 and f8e5m2, any to any. The type of `out` decides; the option `to` says which one to
//!   allocate where no `out` is given.
//! - Rounding: to nearest, ties to even. Product and quotient are formed in f32, correctly rounded, and then rounded
//!   to the type of `out`. Values too large for f16 and bf16 become infinity; the 8-bit floats saturate: what is too
//!   large for them, infinity too, becomes their largest finite value with its sign.
//! - Every result but NaN has the same bits on every device. NaN stays NaN, without a promise about sign and payload.
//! - `out` may be `x`, in place, if the types are the same. An empty tensor is left alone.
//!
//! The gradient of a cast is the gradient of its result cast back (times or over the same scale): there is no
//! separate op.

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
use crate::error::{Error, Result};
use crate::op::{
    ArgSpec, Args, AttrKind, AttrSpec, Attrs, Call, Cost, DTypeRule, Kernel, Matcher, Op, OpSpec, ShapeSpec,
    SizeSpec, dims, shape,
};
use crate::tensor::{DType, Layout, Shape, Space, Tensor, TensorView, TensorViewMut};

const X: usize = 0;
const SCALE: usize = 1;
const OUT: usize = 2;
const TO: usize = 0;
const INVERSE: usize = 1;

/// The types that can be cast, in the order of the option `to`.
const TYPES: [DType; 5] = [DType::F32, DType::F16, DType::BF16, DType::F8E4M3, DType::F8E5M2];

/// What happens to an element before it is rounded.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Scaling {
    None,
    Multiply,
    Divide,
}

/// A checked call.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Problem {
    from: DType,
    to: DType,
    scaling: Scaling,
    num_scales: usize,
    num_rows: usize,
    /// Length of a row: everything that is one run in all tensors, or `hidden` with one scale per row.
    num_cols: usize,
    /// Starts of the rows in x, out, scale (twice).
    rows: Space<4>,
    /// Stride along a row of x and out.
    steps: [isize; 2],
    /// Rows are dense and aligned for accesses of [`access_bytes`].
    vector_rows: bool,
}

/// Elements a device thread moves at once: 16 bytes of the wider type and at least 8 of the narrower.
const fn group(from: DType, to: DType) -> usize {
    let (a, b) = (from.size(), to.size());
    let (wide, narrow) = if a > b { (a, b) } else { (b, a) };
    if 16 / wide > 8 / narrow { 16 / wide } else { 8 / narrow }
}

/// Bytes of one access to a tensor of `dtype` in groups of `group` elements.
fn access_bytes(dtype: DType, group: usize) -> usize {
    (group * dtype.size()).min(16)
}

fn check(args: &Args<'_>, attrs: &Attrs) -> Result<Problem> {
    let op = Forward::SPEC.name;
    let sizes = Matcher::of(args, attrs)?;
    let (x, out, scale) = (args.at(X), args.at(OUT), args.get(SCALE));
    let (from, to) = (x.dtype(), out.dtype());
    let inverse = attrs.bool(INVERSE);
    if inverse && scale.is_none() {
        return Err(Error::argument(op, "scale", "a tensor, because `inverse` is set", "nothing"));
    }
    let scaling = match (scale.is_some(), inverse) {
        (false, _) => Scaling::None,
        (true, false) => Scaling::Multiply,
        (true, true) => Scaling::Divide,
    };

    let num_scales = scale.map_or(0, |s| s.layout().numel());
    let per_row = num_scales > 1;
    let rank = x.layout().rank();
    let same = Layout::strided(Shape::new(x.shape())?, &vec![0; rank])?;
    let (rows, num_cols, steps) = match scale.filter(|_| per_row) {
        Some(scale) => {
            let rows = Space::new(rank - 1, [x.layout(), out.layout(), scale.layout(), scale.layout()]);
            (rows, sizes.size("hidden"), [x.layout().step(), out.layout().step()])
        }
        None => split_last(Space::new(rank, [x.layout(), out.layout(), &same, &same])),
    };
    let group = group(from, to);
    let vector = |tensor: &TensorView<'_>, t: usize| {
        let bytes = access_bytes(tensor.dtype(), group);
        let apart = |&stride: &isize| (stride as usize * tensor.dtype().size()).is_multiple_of(bytes);
        steps[t] == 1 && tensor.is_aligned(bytes) && rows.strides[t][..rows.rank].iter().all(apart)
    };
    Ok(Problem {
        from,
        to,
        scaling,
        num_scales,
        num_rows: rows.len(),
        num_cols,
        rows,
        steps,
        vector_rows: vector(x, 0) && vector(out, 1),
    })
}

/// The last dimension of a merged space as the columns, the others as rows.
fn split_last(mut space: Space<4>) -> (Space<4>, usize, [isize; 2]) {
    let last = space.rank - 1;
    let cols = space.sizes[last];
    let steps = if cols > 1 { [space.strides[0][last], space.strides[1][last]] } else { [1, 1] };
    if last > 0 {
        space.rank = last;
    } else {
        space.sizes[0] = 1;
        space.strides.iter_mut().for_each(|strides| strides[0] = 0);
    }
    (space, cols, steps)
}

/// The op, as listed in [`crate::ops::ALL`].
#[derive(Default)]
pub struct Forward;

// SAFETY: only `check` makes a problem; it holds the types, sizes and strides of the arguments it judged, and the kernels
// go by these alone.
unsafe impl Op for Forward {
    type Problem = Problem;

    const SPEC: OpSpec = OpSpec {
        name: "cast",
        summary: "Conversion between floating types, with an optional scale",
        args: &[
            ArgSpec::input("x", shape![.., hidden], DTypeRule::OneOf(&TYPES), ""),
            ArgSpec::input(
                "scale",
                ShapeSpec::any(&[dims![1], dims![..]]),
                DTypeRule::F32,
                "one for all, or one a row",
            )
            .optional(),
            ArgSpec::output(
                "out",
                shape![.., hidden],
                DTypeRule::Chosen { types: &TYPES, option: TO, like: X },
                "of the type to cast to",
            )
            .in_place_of(X),
        ],
        attrs: &[
            AttrSpec {
                name: "to",
                kind: AttrKind::Choice(&["f32", "f16", "bf16", "f8e4m3", "f8e5m2"]),
                doc: "type of `out` where it is allocated for the call",
            },
            AttrSpec {
                name: "inverse",
                kind: AttrKind::Bool(false),
                doc: "divide by the scale instead of multiplying",
            },
        ],
        sizes: &[
            SizeSpec { name: "num_tokens", default: 8192, doc: "number of rows" },
            SizeSpec { name: "hidden", default: 4096, doc: "length of a row" },
            SizeSpec { name: "num_scales", default: 1, doc: "scales, if given: 1 or num_tokens" },
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
        let elements = (p.num_rows * p.num_cols) as f64;
        let flops = if p.scaling == Scaling::None { 0.0 } else { elements };
        let scales = (p.num_scales * size_of::<f32>()) as f64;
        Cost::moving(elements * (p.from.size() + p.to.size()) as f64 + scales, flops)
    }
}

static KERNELS: &[Kernel<Problem>] = &[
    #[cfg(feature = "cuda")]
    cuda::kernel("cast_cuda"),
    Kernel::cpu("cast_avx512", Tier::Avx512, cpu::run),
    Kernel::cpu("cast_avx2", Tier::Avx2, cpu::run),
    Kernel::cpu("cast_portable", Tier::Portable, cpu::run),
];

/// A call of `cast`.
///
/// ```
/// use warpsmith::{ops::Cast, DType, Device, Tensor};
/// let x = Tensor::randn(&[4, 64], DType::F32, Device::Cpu, 0)?;
/// let scale = Tensor::from_slice(&[16.0f32], &[1], Device::Cpu)?;
/// let quantised = Cast::new(&x).scale(&scale).run(DType::F8E4M3)?;
/// let back = Cast::new(&quantised).scale(&scale).inverse().run(DType::F32)?;
/// assert_eq!(back.shape(), [4, 64]);
/// # Ok::<(), warpsmith::Error>(())
/// ```
pub type Cast<'a> = Call<'a, Forward>;

impl<'a> Call<'a, Forward> {
    /// Casts `x`.
    pub fn new(x: impl Into<TensorView<'a>>) -> Self {
        Call::start().input(X, x)
    }

    /// Multiplies by `scale` first: one for the whole tensor, or one a row.
    pub fn scale(self, scale: impl Into<TensorView<'a>>) -> Self {
        self.input(SCALE, scale)
    }

    /// Divides by the scale instead of multiplying.
    pub fn inverse(self) -> Self {
        self.flag(INVERSE, true)
    }

    /// Runs on the device's default stream and returns a new tensor of type `to`.
    pub fn run(self, to: DType) -> Result<Tensor> {
        let stream = self.default_stream()?;
        let mut out = self.like_as(X, to, &stream)?;
        self.run_into(&mut out, &stream)?;
        Ok(out)
    }

    /// Runs on `stream` into the caller's memory, whose type is the one cast to.
    pub fn run_into<'b>(self, out: impl Into<TensorViewMut<'b>>, stream: &Stream) -> Result<()>
    where
        'a: 'b,
    {
        self.launch([(OUT, out.into())], stream)
    }
}
