//! The CUDA driver layer on a real device, and what the cases of ops cannot show of their kernels there. Without a device, each
//! test says so and passes.
#![cfg(feature = "cuda")]

mod attention;
mod common;
mod device;
mod far;
mod faults;
mod graphs;
mod memory;
mod paged;
mod prefix;
mod streams;
