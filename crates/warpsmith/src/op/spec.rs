//! The static description of an op.

use std::fmt;

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
