//! What an op is: its description, its arguments, its check, its kernels, and how a call finds and runs one.
//!
//! An op is a marker type that implements [`Op`]; everything generic (the command line, bindings, docs) works on
//! `&dyn AnyOp`, which every [`Op`] is. What proves and measures it is in `lab`.

mod any;
mod args;
mod attrs;
mod call;
mod check;
mod cost;
mod description;
pub mod gradient;
mod infer;
mod kernel;
mod plan;
mod select;
mod shape;
mod spec;
#[cfg(feature = "tests")]
mod spec_tests;
#[cfg(feature = "cuda")]
pub mod survey;
pub mod tuned;

pub use any::AnyOp;
pub use args::Args;
pub use attrs::{Attrs, Choice, Value};
pub use call::{Call, OneOutput};
pub use check::Matcher;
pub use cost::{Cost, Products};
pub(crate) use description::check as check_description;
pub use gradient::Gradient;
pub use infer::Form;
pub use kernel::{Kernel, KernelInfo, Launch, Target, VendorLibrary, Why};
pub use plan::Plan;
pub use select::{Explanation, Select};
pub use shape::{Dim, Dims, Leading, ShapeSpec, dims, shape};
pub use spec::{
    ArgSpec, AttrKind, AttrSpec, Autocast, DTypeRule, DerivedSize, MAX_ARGS, MAX_ATTRS, OpSpec, Role,
    SizeRule, SizeSpec, list_types,
};

/// Surveys are of CUDA kernels.
#[cfg(not(feature = "cuda"))]
pub(crate) mod survey {
    /// Never.
    pub const fn is_running() -> bool {
        false
    }
}

use crate::error::Result;
use std::fmt;
use std::hash::Hash;

/// An op. See `docs/adding-an-op.md`.
///
/// # Safety
/// Kernels get addresses, and go by the problem alone. Let [`check`](Op::check) return a problem for some arguments. Then
/// each of the [`kernels`](Op::kernels) that supports the problem must, on arguments of the same types, shapes, strides and
/// alignment, wherever they are and whatever they hold,
/// - read no memory but elements of its arguments and the workspace it asked for,
/// - write no memory but elements of those that [`Op::SPEC`] calls outputs, and that workspace,
/// - keep no address for longer than the call, or on a GPU for longer than its launches.
///
/// A kernel of another op relies on that op's check: it may be listed here only if the other check would have returned the
/// same problem for the same arguments.
pub unsafe trait Op: Sync + 'static {
    /// A checked call: shapes, strides, dtypes and options, without addresses. To hold one is proof that
    /// [`Op::check`] passed.
    type Problem: Copy + Eq + Hash + fmt::Debug + Send + Sync + 'static;

    /// Name, arguments, options, sizes.
    const SPEC: OpSpec;

    /// The only place that judges shapes, strides, dtypes and options. [`Args::validate`] has passed before. The arguments'
    /// description is [`Op::SPEC`], whatever they were made for.
    fn check(args: &Args<'_>, attrs: &Attrs) -> Result<Self::Problem>;

    /// Kernels, the preferred ones first.
    fn kernels() -> &'static [Kernel<Self::Problem>];

    /// Whether the sizes only bound what a call reads, which depends on values: the lengths of requests, say. [`Op::cost`] is then
    /// that of the longest, which benchmarks have, and profiles name no limit.
    const COST_IS_A_BOUND: bool = false;

    /// The least bytes and operations.
    fn cost(problem: &Self::Problem) -> Cost;
}
