//! Graphs as text: formulas and JSON.

pub mod formula;
pub mod json;
mod lexer;
pub mod show;

pub use formula::{Inputs, parse};
