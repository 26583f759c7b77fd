//! The lab: reference arithmetic, cases, proof, benchmarks and evidence. Programs that only run kernels
//! need none of it: it is compiled with the feature `lab`.

pub mod bench;
mod case;
pub mod evidence;
mod fill;
pub mod proof;
mod provable;
pub mod random;
pub mod reference;
mod sources;

pub use case::{ArgPlan, Arrangement, Case, ROW_SIZES, Values};
pub(crate) use case::{MANY_ROWS, ODD_ROWS};
pub(crate) use fill::sum_repeating;
pub use fill::{Fill, Generator, Lengths};
pub use provable::{AnyProvable, Expected, Naively, Probed, Provable};
pub use reference::{Array, Inputs, Real};
pub use sources::source_hash;

/// The op with this name, with its cases and its reference; also a registered one.
pub fn find(name: &str) -> Option<&'static dyn AnyProvable> {
    crate::ops::provable().into_iter().find(|op| op.spec().name == name)
}
