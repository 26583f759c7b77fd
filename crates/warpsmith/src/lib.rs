//! Warpsmith: LLM kernels for CUDA and CPU behind one API: checked, measured, deterministic.
//!
//! ```
//! use warpsmith::{DType, Device, Tensor, ops::RmsNorm};
//! let device = Device::best(); // a CUDA device if there is one, else the CPU
//! let x = Tensor::randn(&[8, 4096], DType::BF16, device, 0)?;
//! let weight = Tensor::randn(&[4096], DType::BF16, device, 1)?;
//! let y = RmsNorm::new(&x).weight(&weight).eps(1e-5).run()?;
//! assert_eq!(y.shape(), [8, 4096]);
//! # Ok::<(), warpsmith::Error>(())
//! ```
//!
//! # Debug builds
//! CPU kernels rely on compiler optimisation. Without it they are very slow and need up to 4 MiB of stack, twice what
//! Rust threads have by default: calls then end the process with a stack overflow. A program that uses the library
//! should have it optimised in its debug builds too:
//!
//! ```toml
//! [profile.dev.package.warpsmith]
//! opt-level = 1
//! ```

pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod device;
pub mod env;
pub mod error;
pub mod jit;
#[cfg(feature = "lab")]
pub mod lab;
pub mod op;
pub mod ops;
pub mod profile;
pub mod radix;
pub mod tensor;
#[cfg(feature = "tests")]
pub mod unit_tests;

// Its attribute is `#[test]` in all of the library, in place of the standard one.
#[cfg(feature = "tests")]
#[macro_use]
extern crate warpsmith_test;

pub use device::{Device, Stream};
pub use error::{Error, Result};
pub use tensor::{DType, Tensor, TensorView, TensorViewMut};

#[cfg(doctest)]
mod soundness;

/// The examples of the README, compiled and run with the tests.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;

/// The examples of the guide to serving, likewise.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/ops-serving.md")]
struct Serving;
