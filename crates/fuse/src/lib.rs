//! Operator fusion.

mod compiled;
mod cpu;
pub mod cuda;
mod error;
pub mod eval;
pub mod functions;
mod geometry;
pub mod gradient;
pub mod graph;
mod kernel;
pub mod op;
pub mod plan;
pub mod random;
pub mod shape;
pub mod text;
pub mod types;

pub use compiled::{Compiled, Memory};
pub use error::{Error, Result};
pub use graph::{Builder, Graph, NodeId};
pub use shape::Dim;
pub use text::parse;
