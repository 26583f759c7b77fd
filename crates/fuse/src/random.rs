//! Random graphs, and the proof of their kernels against f64.

mod draw;
mod judge;

pub use draw::{Draw, draw};
pub use judge::{Fault, judge};
