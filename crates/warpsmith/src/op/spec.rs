//! The static description of an op.

use super::shape::ShapeSpec;
use crate::op::Gradient;
use crate::tensor::DType;
use std::fmt;

/// Most tensor arguments of one op.
pub const MAX_ARGS: usize = 18;
/// Most options of one op.
pub const MAX_ATTRS: usize = 10;

/// The static description of an op.
pub struct OpSpec {
    /// The one name it has everywhere.
    pub name: &'static str,
    /// One line for listings.
    pub summary: &'static str,
    /// Tensor arguments; kernels use their positions.
    pub args: &'static [ArgSpec],
    /// Options.
    pub attrs: &'static [AttrSpec],
    /// The sizes that determine all shapes of a case.
    pub sizes: &'static [SizeSpec],
    /// Sizes in the arguments' shapes that options decide.
    pub derived: &'static [DerivedSize],
    /// The op that computes its gradients, if there is one.
    pub gradient: Option<Gradient>,
    /// What happens to its inputs under mixed precision.
    pub autocast: Autocast,
}

impl OpSpec {
    /// An empty description, for fields that a description does not mention: no options, no gradient.
    pub const EMPTY: OpSpec = OpSpec {
        name: "",
        summary: "",
        args: &[],
        attrs: &[],
        sizes: &[],
        derived: &[],
        gradient: None,
        autocast: Autocast::Unchanged,
    };

    /// Whether arguments made for one description may be given to an op with the other: it has the same name and reads
    /// and writes the same positions. Nothing more: shapes and types are checked by the op's own description.
    /// (Descriptions of one op can have several addresses, so comparing addresses is not enough.)
    pub(super) fn takes_the_same(&self, other: &OpSpec) -> bool {
        std::ptr::eq(self, other)
            || (self.name == other.name
                && self.args.len() == other.args.len()
                && self.args.iter().zip(other.args).all(|(one, other)| one.role == other.role))
    }

    /// Whether rows depend on each other where the shapes do not tell. Such a call is not divided by rows, and several are not
    /// joined in one.
    pub fn is_across_rows(&self) -> bool {
        self.args.iter().any(|arg| arg.across_rows)
    }

    /// The position of an argument.
    pub fn arg(&self, name: &str) -> Option<usize> {
        self.args.iter().position(|arg| arg.name == name)
    }
}

/// What happens to an op's floating-point inputs where a framework computes in mixed precision.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Autocast {
    /// They stay as they are.
    Unchanged,
    /// They are cast to the low precision.
    Low,
    /// They are cast to f32 on GPUs. On the CPU, as [`Autocast::Rows`]: so does PyTorch.
    F32,
    /// They are cast to the widest type among them.
    Widest,
    /// As the widest; results are then cast to the widest type among the inputs that have rows. That of parameters does not
    /// count.
    Rows,
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

/// The types an argument may have, and the one it gets where it is allocated for the call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DTypeRule {
    /// One of these; allocated, the first.
    OneOf(&'static [DType]),
    /// That of another argument.
    Same(usize),
    /// That of another argument, or one of these; allocated, that of the argument.
    SameOr(usize, &'static [DType]),
    /// By the type of another argument: those that are listed with it, or the same where nothing is listed.
    With(usize, &'static [(DType, &'static [DType])]),
    /// One of `types`; allocated, the one that the choice of `option` names. A choice that names no type stands for that
    /// of argument `like` or, where that is none of `types`, for bf16.
    Chosen {
        /// What it may be.
        types: &'static [DType],
        /// The option that decides where it is allocated.
        option: usize,
        /// The argument it is like unless the option says otherwise.
        like: usize,
    },
}

impl DTypeRule {
    /// The types that most ops compute in.
    pub const FLOAT: DTypeRule = DTypeRule::OneOf(&[DType::F32, DType::F16, DType::BF16]);
    /// 32-bit floating point alone.
    pub const F32: DTypeRule = DTypeRule::OneOf(&[DType::F32]);
    /// 32-bit whole numbers alone.
    pub const I32: DTypeRule = DTypeRule::OneOf(&[DType::I32]);
    /// What positions and slots are counted in.
    pub const INDEX: DTypeRule = DTypeRule::OneOf(&[DType::I64, DType::I32]);
    /// Any type there is.
    pub const ANY: DTypeRule = DTypeRule::OneOf(&DType::ALL);
}

/// `f32`, `i64 or i32`, as in help and errors.
pub fn list_types(types: &[DType]) -> String {
    types.iter().map(|dtype| dtype.name()).collect::<Vec<_>>().join(" or ")
}

impl OpSpec {
    /// All types that an argument may have in some call, whatever those of the others are.
    pub fn types_of(&self, index: usize) -> Vec<DType> {
        let (like, more) = match self.args[index].dtype {
            DTypeRule::OneOf(types) | DTypeRule::Chosen { types, .. } => (None, types.to_vec()),
            DTypeRule::Same(other) => (Some(other), Vec::new()),
            DTypeRule::SameOr(other, types) => (Some(other), types.to_vec()),
            DTypeRule::With(other, listed) => {
                (Some(other), listed.iter().flat_map(|(_, types)| types.iter().copied()).collect())
            }
        };
        let mut found = like.map_or(Vec::new(), |other| self.types_of(other));
        for dtype in more {
            if !found.contains(&dtype) {
                found.push(dtype);
            }
        }
        found
    }
}

/// One tensor argument.
pub struct ArgSpec {
    /// Its name.
    pub name: &'static str,
    /// Read or written.
    pub role: Role,
    /// Whether a call may leave it out.
    pub optional: bool,
    /// Whether calls that give arguments by position have it after the other optional ones.
    pub late: bool,
    /// The other optional argument that it is given exactly together with; an output of this kind is implied by that
    /// input.
    pub with: Option<usize>,
    /// The input with which the op leaves rows of this output unwritten: whoever allocates it for a call that has this input
    /// fills it with zeros first.
    pub zeroed_with: Option<usize>,
    /// Whether a row of this output depends on other rows of the inputs, as with a capacity or a mean over all of them.
    pub across_rows: bool,
    /// Its shape.
    pub shape: ShapeSpec,
    /// Its type.
    pub dtype: DTypeRule,
    /// What it is, in a few words, beside shape and type.
    pub doc: &'static str,
}

impl ArgSpec {
    const fn new(
        name: &'static str,
        role: Role,
        shape: ShapeSpec,
        dtype: DTypeRule,
        doc: &'static str,
    ) -> Self {
        ArgSpec {
            name,
            role,
            optional: false,
            late: false,
            with: None,
            zeroed_with: None,
            across_rows: false,
            shape,
            dtype,
            doc,
        }
    }

    /// A required input.
    pub const fn input(name: &'static str, shape: ShapeSpec, dtype: DTypeRule, doc: &'static str) -> Self {
        Self::new(name, Role::In, shape, dtype, doc)
    }

    /// A required output.
    pub const fn output(name: &'static str, shape: ShapeSpec, dtype: DTypeRule, doc: &'static str) -> Self {
        Self::new(name, Role::Out { in_place_of: None }, shape, dtype, doc)
    }

    /// A required argument that is changed in part.
    pub const fn in_out(name: &'static str, shape: ShapeSpec, dtype: DTypeRule, doc: &'static str) -> Self {
        Self::new(name, Role::InOut, shape, dtype, doc)
    }

    /// This argument, but it may be left out.
    pub const fn optional(mut self) -> Self {
        self.optional = true;
        self
    }

    /// This argument, but after the other optional ones where calls go by position.
    pub const fn late(mut self) -> Self {
        self.late = true;
        self
    }

    /// This argument, but it is given exactly when argument `index` is.
    pub const fn with(mut self, index: usize) -> Self {
        self.optional = true;
        self.with = Some(index);
        self
    }

    /// This output, some rows of which may stay unwritten when argument `index` is given.
    pub const fn zeroed_with(mut self, index: usize) -> Self {
        self.zeroed_with = Some(index);
        self
    }

    /// This output, rows of which depend on other rows of the inputs.
    pub const fn across_rows(mut self) -> Self {
        self.across_rows = true;
        self
    }

    /// This output, which may share memory with input `index`.
    pub const fn in_place_of(mut self, index: usize) -> Self {
        self.role = Role::Out { in_place_of: Some(index) };
        self
    }

    /// Whether it is written.
    pub const fn is_output(&self) -> bool {
        !matches!(self.role, Role::In)
    }

    /// Whether its contents before the call matter.
    pub const fn is_input(&self) -> bool {
        !matches!(self.role, Role::Out { .. })
    }

    /// One line of help: shape, type where it is not the op's usual one, and what it is.
    pub fn help(&self) -> String {
        let types = match self.dtype {
            DTypeRule::FLOAT | DTypeRule::Same(_) | DTypeRule::SameOr(..) | DTypeRule::With(..) => None,
            DTypeRule::ANY => Some("any type".to_string()),
            DTypeRule::OneOf(types) | DTypeRule::Chosen { types, .. } => Some(list_types(types)),
        };
        match (types, self.doc) {
            (None, "") => self.shape.to_string(),
            (Some(types), "") => format!("{}, {types}", self.shape),
            (None, doc) => format!("{}, {doc}", self.shape),
            (Some(types), doc) => format!("{}, {types}: {doc}", self.shape),
        }
    }
}

/// The type and default of an option.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum AttrKind {
    /// A real number.
    Float(f64),
    /// A real number that may be left unset, for the op to choose. Every number, including zero, means itself.
    OptionalFloat,
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

/// One named size of a case.
#[derive(Clone, Copy)]
pub struct SizeSpec {
    /// Its name.
    pub name: &'static str,
    /// Used when none is given.
    pub default: usize,
    /// One line of help.
    pub doc: &'static str,
}

/// A size in the arguments' shapes that an option, or an optional argument, decides.
pub struct DerivedSize {
    /// Its name in the shapes.
    pub name: &'static str,
    /// How it is found.
    pub rule: SizeRule,
}

/// How a size is decided.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SizeRule {
    /// The value of an option that is a whole number.
    Option {
        /// The option.
        option: usize,
        /// The largest it may be.
        most: usize,
    },
    /// The value of an option that is a whole number, or another size while that is zero.
    OptionOr {
        /// The option.
        option: usize,
        /// The other size.
        size: &'static str,
    },
    /// Another size, divided by the number at the position of an option's choice.
    Divided {
        /// The other size.
        size: &'static str,
        /// The option.
        option: usize,
        /// The divisors.
        by: &'static [usize],
    },
    /// A size that only an optional argument has, or another one where it is not given. The argument must come before those
    /// whose shapes need it.
    Else {
        /// The size of the optional argument.
        size: &'static str,
        /// The other size.
        or: &'static str,
    },
}

impl fmt::Display for AttrKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            AttrKind::Float(_) => write!(f, "a number"),
            AttrKind::OptionalFloat => write!(f, "a number or none"),
            AttrKind::Int(_) => write!(f, "a whole number"),
            AttrKind::Bool(_) => write!(f, "true or false"),
            AttrKind::Choice(names) => write!(f, "one of {}", names.join(", ")),
        }
    }
}
