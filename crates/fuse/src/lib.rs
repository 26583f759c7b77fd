//! Operator fusion: write the formula, get one kernel.
//!
//! ```
//! use warpsmith::{DType, Device, Tensor};
//! use warpsmith_fuse::{Compiled, Dim, parse};
//!
//! let (rows, hidden) = (Dim::named("rows"), Dim::Fixed(8));
//! let matrix = [rows, hidden.clone()];
//! let inputs: &[(&str, DType, &[Dim])] = &[("x", DType::BF16, &matrix), ("w", DType::F32, &[hidden])];
//! let norm = Compiled::new(parse("rms_norm(x + 1.0) * w", inputs)?)?;
//! assert_eq!(norm.plan().kernels.len(), 1);
//!
//! let x = Tensor::randn(&[3, 8], DType::BF16, Device::Cpu, 0)?; // any number of rows
//! let w = Tensor::randn(&[8], DType::F32, Device::Cpu, 1)?;
//! let y = norm.run(&[&x, &w])?;
//! assert_eq!((y[0].shape(), y[0].dtype()), (&[3, 8][..], DType::F32));
//! # Ok::<(), warpsmith_fuse::Error>(())
//! ```
//!
//! # The way of a graph
//! [`parse`] reads a formula, [`text::json::read`] a graph in JSON, and a [`Builder`] makes one call by call. All three check
//! types and shapes as they go; errors name the node. A [`plan::Plan`] says which nodes become one kernel. [`Compiled`] runs
//! them on the CPU, [`cuda::CudaCompiled`] on GPUs. [`gradient::gradient`] derives a graph into two others. What a graph means
//! is defined by [`eval`], in f64; [`random`] judges kernels by it.
//!
//! # Bindings
//! A program in another language hands over a graph as JSON ([`text::json`]), keeps the [`Compiled`], which threads may share,
//! asks it for the types and shapes of the outputs ([`Compiled::outputs`]), and calls it with addresses, shapes and strides
//! ([`Compiled::call`]). Sizes that have names in the graph may differ from call to call; nothing is compiled again.

pub mod bench;
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
