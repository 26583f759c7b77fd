//! What an op is: its contract, its cases, its reference and its cost.
//!
//! An op is a marker type that implements [`Op`]; everything generic (conformance, benchmarks, the command line,
//! docs) works on `&dyn AnyOp`, which every [`Op`] is.

pub use crate::cost::{Cost, Products};
use crate::device::Device;
use crate::dtype::DType;
use crate::error::{Error, Result};
pub use crate::fill::{Fill, Generator, Lengths};
use crate::infer::{self, Form};
use crate::reference::{Array, Inputs, Real};
use crate::registry::Kernel;
use crate::tensor::{TensorView, TensorViewMut};
use std::any::Any;
use std::fmt;
use std::hash::Hash;

/// Most tensor arguments of one op.
pub const MAX_ARGS: usize = 16;
/// Most options of one op.
pub const MAX_ATTRS: usize = 8;

/// The static description of an op.
pub struct OpSpec {
    /// The one name it has everywhere.
    pub name: &'static str,
    /// One line for listings.
    pub summary: &'static str,
    /// Tensor arguments, inputs before outputs; kernels use their positions.
    pub args: &'static [ArgSpec],
    /// Options.
    pub attrs: &'static [AttrSpec],
    /// The sizes that determine all shapes.
    pub sizes: &'static [SizeSpec],
}

/// Whether an argument is read or written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Read only.
    In,
    /// Written in full; may share memory, element for element, with the named input.
    Out {
        /// Position of the input whose memory it may be.
        in_place_of: Option<usize>,
    },
    /// Changed in part: what the op does not write stays as it was.
    InOut,
}

/// One tensor argument.
pub struct ArgSpec {
    /// Its name.
    pub name: &'static str,
    /// Read or written.
    pub role: Role,
    /// Whether a call may leave it out.
    pub optional: bool,
    /// One line of help, with the shape.
    pub doc: &'static str,
}

impl ArgSpec {
    /// A required input.
    pub const fn input(name: &'static str, doc: &'static str) -> Self {
        ArgSpec { name, role: Role::In, optional: false, doc }
    }

    /// A required output.
    pub const fn output(name: &'static str, doc: &'static str) -> Self {
        ArgSpec { name, role: Role::Out { in_place_of: None }, optional: false, doc }
    }

    /// A required argument that is changed in part.
    pub const fn in_out(name: &'static str, doc: &'static str) -> Self {
        ArgSpec { name, role: Role::InOut, optional: false, doc }
    }

    /// This argument, but it may be left out.
    pub const fn optional(mut self) -> Self {
        self.optional = true;
        self
    }

    /// This output, which may be the memory of input `index`.
    pub const fn in_place_of(mut self, index: usize) -> Self {
        self.role = Role::Out { in_place_of: Some(index) };
        self
    }

    /// Whether it is written.
    pub const fn is_output(&self) -> bool {
        !matches!(self.role, Role::In)
    }

    /// Whether what it holds before the call counts.
    pub const fn is_input(&self) -> bool {
        !matches!(self.role, Role::Out { .. })
    }
}

/// The type and default of an option.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum AttrKind {
    /// A real number.
    Float(f64),
    /// A whole number.
    Int(i64),
    /// A switch.
    Bool(bool),
    /// One of several names; the first is the default.
    Choice(&'static [&'static str]),
}

/// One option.
#[derive(Clone, Copy)]
pub struct AttrSpec {
    /// Its name.
    pub name: &'static str,
    /// Type and default.
    pub kind: AttrKind,
    /// One line of help.
    pub doc: &'static str,
}

/// One named size.
pub struct SizeSpec {
    /// Its name.
    pub name: &'static str,
    /// Used when none is given.
    pub default: usize,
    /// One line of help.
    pub doc: &'static str,
}

/// The values of an op's options, by position in [`OpSpec::attrs`].
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Attrs {
    values: [f64; MAX_ATTRS],
}

impl Attrs {
    /// All defaults.
    pub fn defaults(spec: &OpSpec) -> Self {
        let mut values = [0.0; MAX_ATTRS];
        for (value, attr) in values.iter_mut().zip(spec.attrs) {
            *value = match attr.kind {
                AttrKind::Float(x) => x,
                AttrKind::Int(x) => x as f64,
                AttrKind::Bool(x) => x as u8 as f64,
                AttrKind::Choice(_) => 0.0,
            };
        }
        Attrs { values }
    }

    /// With one value replaced (switches as 0/1, choices by position).
    pub fn with(mut self, index: usize, value: f64) -> Self {
        self.values[index] = value;
        self
    }

    /// A number.
    pub fn f64(&self, index: usize) -> f64 {
        self.values[index]
    }

    /// A switch.
    pub fn bool(&self, index: usize) -> bool {
        self.values[index] != 0.0
    }

    /// The position of a choice, or a whole number.
    pub fn index(&self, index: usize) -> usize {
        self.values[index] as usize
    }

    /// Sets an option from text, as the command line does.
    pub fn parse(&mut self, spec: &OpSpec, name: &str, text: &str) -> Result<()> {
        let known = || spec.attrs.iter().map(|a| a.name).collect::<Vec<_>>().join(", ");
        let index = spec.attrs.iter().position(|a| a.name == name).ok_or_else(|| {
            Error::argument(spec.name, name, format!("one of the options {}", known()), "no such option")
        })?;
        let kind = spec.attrs[index].kind;
        let value = match kind {
            AttrKind::Float(_) => text.parse().ok(),
            AttrKind::Int(_) => text.parse::<i64>().ok().map(|x| x as f64),
            AttrKind::Bool(_) => text.parse::<bool>().ok().map(|x| x as u8 as f64),
            AttrKind::Choice(names) => names.iter().position(|n| *n == text).map(|i| i as f64),
        };
        self.values[index] = value.ok_or_else(|| Error::argument(spec.name, name, kind.to_string(), text))?;
        Ok(())
    }

    /// `name=value` of every option that differs from its default.
    pub fn describe(&self, spec: &OpSpec) -> Vec<String> {
        let defaults = Attrs::defaults(spec);
        (0..spec.attrs.len())
            .filter(|&i| self.values[i] != defaults.values[i])
            .map(|i| {
                let value = match spec.attrs[i].kind {
                    AttrKind::Float(_) | AttrKind::Int(_) => self.values[i].to_string(),
                    AttrKind::Bool(_) => self.bool(i).to_string(),
                    AttrKind::Choice(names) => names[self.index(i)].to_string(),
                };
                format!("{}={value}", spec.attrs[i].name)
            })
            .collect()
    }
}

impl fmt::Display for AttrKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            AttrKind::Float(_) => write!(f, "a number"),
            AttrKind::Int(_) => write!(f, "a whole number"),
            AttrKind::Bool(_) => write!(f, "true or false"),
            AttrKind::Choice(names) => write!(f, "one of {}", names.join(", ")),
        }
    }
}

/// The tensors of one call, by position in [`OpSpec::args`].
#[derive(Clone)]
pub struct Args<'a> {
    spec: &'static OpSpec,
    slots: [Option<TensorView<'a>>; MAX_ARGS],
    prepared: Option<&'a (dyn Any + Sync)>,
}

impl<'a> Args<'a> {
    /// No tensors yet.
    pub fn new(spec: &'static OpSpec) -> Self {
        Args { spec, slots: [None; MAX_ARGS], prepared: None }
    }

    /// Sets an input.
    ///
    /// # Panics
    /// If the op's argument `index` is an output: a mistake in the op, not in the call.
    pub fn input(mut self, index: usize, view: TensorView<'a>) -> Self {
        assert!(!self.spec.args[index].is_output(), "{} is an output", self.spec.args[index].name);
        self.slots[index] = Some(view);
        self
    }

    /// Sets an input if there is one.
    pub fn maybe(self, index: usize, view: Option<TensorView<'a>>) -> Self {
        match view {
            Some(view) => self.input(index, view),
            None => self,
        }
    }

    /// Sets an output.
    ///
    /// # Panics
    /// If the op's argument `index` is an input: a mistake in the op, not in the call.
    pub fn output(mut self, index: usize, view: TensorViewMut<'a>) -> Self {
        assert!(self.spec.args[index].is_output(), "{} is an input", self.spec.args[index].name);
        self.slots[index] = Some(view.raw());
        self
    }

    /// Sets an output and the input it is computed in place of to the same memory.
    pub fn in_place(mut self, input: usize, output: usize, view: TensorViewMut<'a>) -> Self {
        assert_eq!(self.spec.args[output].role, Role::Out { in_place_of: Some(input) });
        self.slots[input] = Some(view.raw());
        self.slots[output] = Some(view.raw());
        self
    }

    /// Hands kernels what was made of an input beforehand. Only a hint: those that cannot use it take the input as it is.
    pub(crate) fn with_prepared<T: Any + Sync>(mut self, prepared: &'a T) -> Self {
        self.prepared = Some(prepared);
        self
    }

    /// What was made of an input beforehand, if it is of this type.
    pub(crate) fn prepared<T: Any>(&self) -> Option<&'a T> {
        (self.prepared? as &dyn Any).downcast_ref()
    }

    /// The op's description.
    pub fn spec(&self) -> &'static OpSpec {
        self.spec
    }

    /// An argument, if given.
    pub fn get(&self, index: usize) -> Option<&TensorView<'a>> {
        self.slots[index].as_ref()
    }

    /// A required argument; present once [`Args::validate`] has passed.
    pub fn at(&self, index: usize) -> &TensorView<'a> {
        self.get(index)
            .unwrap_or_else(|| panic!("{}: `{}` is missing", self.spec.name, self.spec.args[index].name))
    }

    /// Address of an argument; zero if it was left out.
    pub fn address(&self, index: usize) -> usize {
        self.get(index).map_or(0, |view| view.address())
    }

    /// The device all arguments live on.
    pub fn device(&self) -> Device {
        self.slots.iter().flatten().next().map_or(Device::Cpu, |view| view.device())
    }

    /// Whether every tensor's rows (its last dimension) are dense, start on 16-byte boundaries and are whole
    /// multiples of 16 bytes long, so that they can be moved in 16-byte pieces.
    pub fn have_vector_rows(&self) -> bool {
        self.slots.iter().flatten().all(|view| {
            let (layout, size) = (view.layout(), view.dtype().size());
            let Some((row, leading)) = layout.shape().split_last() else { return false };
            let aligned = leading
                .iter()
                .zip(layout.strides())
                .all(|(&n, &s)| n <= 1 || (s as usize * size).is_multiple_of(16));
            aligned && layout.step() == 1 && (row * size).is_multiple_of(16) && view.is_aligned(16)
        })
    }

    /// Whether no output has any element, so that there is nothing to do.
    pub fn outputs_are_empty(&self) -> bool {
        let outputs = self.spec.args.iter().zip(&self.slots).filter(|(arg, _)| arg.is_output());
        outputs.filter_map(|(_, slot)| slot.as_ref()).all(|view| view.layout().numel() == 0)
    }

    /// The checks that are the same for every op: required arguments, one device, alignment, aliasing.
    pub fn validate(&self) -> Result<()> {
        let op = self.spec.name;
        for (index, arg) in self.spec.args.iter().enumerate() {
            let Some(view) = self.get(index) else {
                if arg.optional {
                    continue;
                }
                return Err(Error::argument(op, arg.name, "a tensor", "nothing"));
            };
            if view.device() != self.device() {
                let expected = format!("a tensor on {}, like the other arguments", self.device());
                return Err(Error::argument(op, arg.name, expected, view.device().to_string()));
            }
            if view.layout().numel() > 0 && !view.is_aligned(view.dtype().size()) {
                let expected = format!("an address that is a multiple of {} bytes", view.dtype().size());
                return Err(Error::argument(op, arg.name, expected, format!("{:#x}", view.address())));
            }
            if arg.is_output() {
                if view.layout().overlaps_itself() {
                    let got = format!("{:?}", view.layout());
                    return Err(Error::argument(
                        op,
                        arg.name,
                        "an output whose elements are all distinct",
                        got,
                    ));
                }
                self.check_aliases(index, view)?;
            }
        }
        Ok(())
    }

    fn check_aliases(&self, output: usize, view: &TensorView<'_>) -> Result<()> {
        let role = self.spec.args[output].role;
        for (index, other) in self.slots.iter().enumerate() {
            let Some(other) = other.as_ref().filter(|_| index != output) else { continue };
            let same = other.address() == view.address()
                && other.dtype() == view.dtype()
                && other.layout() == view.layout();
            let in_place = same && role == (Role::Out { in_place_of: Some(index) });
            if !in_place && !view.is_apart_from(other) {
                return Err(Error::argument(
                    self.spec.name,
                    self.spec.args[output].name,
                    "memory that no other argument uses",
                    format!("memory that overlaps `{}`", self.spec.args[index].name),
                ));
            }
        }
        Ok(())
    }
}

/// How a case lays out the tensors in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Arrangement {
    /// Row-major without gaps, aligned.
    Contiguous,
    /// Rows further apart than they are long, by an odd number of elements.
    PaddedRows,
    /// The last dimension is not the fastest: neighbours of a row are apart.
    Transposed,
    /// Contiguous, but starting one element after an aligned address.
    Misaligned,
    /// The last dimension but one before the one ahead of it: `[..., tokens, heads, dim]` as `[..., heads, tokens, dim]`.
    HeadsFirst,
}

/// What values a case feeds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Values {
    /// What [`ArgPlan::fill`] says.
    Typical,
    /// Typical values a thousand times larger.
    Large,
    /// Typical values with NaN, infinities, zeros and subnormals sprinkled in; of generated ones, the unusual.
    Special,
}

/// What a case gives one argument.
#[derive(Debug, Clone)]
pub struct ArgPlan {
    /// Sizes.
    pub shape: Vec<usize>,
    /// Element type.
    pub dtype: DType,
    /// Values (of inputs).
    pub fill: Fill,
    /// The dimension along which rows are independent of each other, if the argument has one: a call on some of
    /// its indices must give the same bits for them.
    pub batch_dim: Option<usize>,
}

impl ArgPlan {
    /// Normal values, with the first dimension as the batch.
    pub fn batched(shape: &[usize], dtype: DType) -> Option<Self> {
        let batch_dim = (shape.len() > 1).then_some(0);
        Some(ArgPlan { shape: shape.to_vec(), dtype, fill: Fill::Normal(0.0, 1.0), batch_dim })
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
    /// Where the op allows it: compute in place.
    pub in_place: bool,
    /// Timed on GPUs alone: on a CPU it would take minutes.
    pub gpu_only: bool,
    /// It asks for what only some kernels have, on some devices none.
    pub selective: bool,
}

impl Case {
    /// Default sizes and options, no optional arguments.
    pub fn new(spec: &OpSpec, dtype: DType) -> Self {
        Case {
            sizes: spec.sizes.iter().map(|s| s.default).collect(),
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

    /// With one option set.
    pub fn attr(mut self, index: usize, value: f64) -> Self {
        self.attrs = self.attrs.with(index, value);
        self
    }

    /// With an optional argument given.
    pub fn give(mut self, index: usize) -> Self {
        self.optional |= 1 << index;
        self
    }

    /// Timed on GPUs alone.
    pub fn gpu_only(mut self) -> Self {
        self.gpu_only = true;
        self
    }

    /// For the kernels that have what it asks for, if there are any on the device.
    pub fn selective(mut self) -> Self {
        self.selective = true;
        self
    }

    /// With tensors laid out in memory in another way.
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

    /// A name that says everything but the dtype: `num_tokens=8 hidden=64 +residual eps=0.1 transposed`.
    pub fn name(&self, spec: &OpSpec) -> String {
        let mut parts: Vec<String> =
            spec.sizes.iter().zip(&self.sizes).map(|(s, v)| format!("{}={v}", s.name)).collect();
        parts.extend(
            (0..spec.args.len()).filter(|&i| self.gives(i)).map(|i| format!("+{}", spec.args[i].name)),
        );
        parts.extend(self.attrs.describe(spec));
        match self.arrangement {
            Arrangement::Contiguous => {}
            Arrangement::PaddedRows => parts.push("padded".into()),
            Arrangement::Transposed => parts.push("transposed".into()),
            Arrangement::Misaligned => parts.push("misaligned".into()),
            Arrangement::HeadsFirst => parts.push("heads-first".into()),
        }
        match self.values {
            Values::Typical => {}
            Values::Large => parts.push("large".into()),
            Values::Special => parts.push("special".into()),
        }
        if self.in_place {
            parts.push("in-place".into());
        }
        parts.join(" ")
    }
}

/// An op. See `docs/adding-an-op.md`.
pub trait Op: Sync + 'static {
    /// A checked call: shapes, strides, dtypes and options, without addresses. To hold one is proof that
    /// [`Op::check`] passed.
    type Problem: Copy + Eq + Hash + fmt::Debug + Send + Sync + 'static;

    /// Name, arguments, options, sizes.
    const SPEC: OpSpec;

    /// The only place that judges shapes, strides, dtypes and options. [`Args::validate`] has passed before.
    fn check(args: &Args<'_>, attrs: &Attrs) -> Result<Self::Problem>;

    /// Shapes and dtypes of the outputs where they are allocated for the call: what the documentation of the
    /// arguments says, unless an option decides.
    fn outputs(args: &Args<'_>, attrs: &Attrs, wanted: &[usize]) -> Result<Vec<Option<Form>>> {
        infer::outputs(args, attrs, wanted)
    }

    /// Kernels, the preferred ones first.
    fn kernels() -> &'static [Kernel<Self::Problem>];

    /// The definition: plain loops over `R`. Evaluated in `f64` it is the truth; evaluated in the naive
    /// arithmetic of a dtype it sets the tolerance. Returns one array per argument of the spec, `None` for
    /// inputs and outputs that were not asked for.
    fn reference<R: Real>(inputs: &Inputs<'_, R>, attrs: &Attrs) -> Vec<Option<Array<R>>>;

    /// The least bytes and operations.
    fn cost(problem: &Self::Problem) -> Cost;

    /// The tensors of a case, by position in the spec; `None` for optional arguments not given.
    fn plan(case: &Case) -> Vec<Option<ArgPlan>>;

    /// The cases every kernel must pass.
    fn cases() -> Vec<Case>;

    /// The cases that are timed and compared with peers.
    fn bench_cases() -> Vec<Case>;
}
