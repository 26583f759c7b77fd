//! What connects an op with the op that is its gradient.

use super::attrs::Value;

/// The op that computes an op's gradients, and how the arguments of the two belong together.
///
/// Its options have the values of the forward call's options of the same names; one that the forward op does not have is
/// named after a size of the forward call's shapes and has that value. Calls that the gradient's own check refuses have
/// no gradient.
#[derive(Debug, Clone, Copy)]
pub struct Gradient {
    /// Its name.
    pub op: &'static str,
    /// Where each of its inputs comes from: their positions, and the sources.
    pub inputs: &'static [(usize, Source)],
    /// The forward inputs that have a gradient: their positions, and what it is.
    pub results: &'static [(usize, InputGradient)],
    /// Options of the forward op that must have these values for there to be a gradient.
    pub only_if: &'static [(usize, Value)],
    /// Arguments of the forward op that rule out a gradient if they are given.
    pub without: &'static [usize],
}

impl Gradient {
    /// For fields that a description does not mention: no conditions.
    pub const EMPTY: Gradient = Gradient { op: "", inputs: &[], results: &[], only_if: &[], without: &[] };
}

/// Where an input of a gradient comes from.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Source {
    /// An input of the forward call, which is kept. Left out where the forward call had none.
    Input(usize),
    /// An output of the forward call, which is kept.
    Output(usize),
    /// An output of the forward call where it has one, else an input.
    OutputOrInput(usize, usize),
    /// The gradient that arrives for an output of the forward call. Left out where the forward call had no such output.
    Incoming(usize),
    /// The `output` of the forward call with some options changed and some arguments left out. Left out where the first
    /// option has that value anyway.
    Recomputed {
        /// The output.
        output: usize,
        /// The options and their values.
        options: &'static [(usize, Value)],
        /// The arguments that are left out.
        without: &'static [usize],
    },
}

/// What the gradient of a forward input is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InputGradient {
    /// An output of the gradient op.
    Output(usize),
    /// The gradient that arrives for an output of the forward call, unchanged.
    Incoming(usize),
}
