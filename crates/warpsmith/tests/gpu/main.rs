//! The CUDA driver layer on a real device, and what the cases of ops cannot show of their kernels there. Without a device
//! the tests are ignored. With `WARPSMITH_RECORD=evidence` what passed is added to the evidence of the device.

#[cfg(feature = "cuda")]
mod attention;
#[cfg(feature = "cuda")]
mod common;
#[cfg(feature = "cuda")]
mod core;
#[cfg(feature = "cuda")]
mod device;
#[cfg(feature = "cuda")]
mod far;
#[cfg(feature = "cuda")]
mod faults;
#[cfg(feature = "cuda")]
mod graphs;
#[cfg(feature = "cuda")]
mod harness;
#[cfg(feature = "cuda")]
mod linear;
#[cfg(feature = "cuda")]
mod memory;
#[cfg(feature = "cuda")]
mod paged;
#[cfg(feature = "cuda")]
mod prefix;
#[cfg(feature = "cuda")]
mod streams;

/// The tests of modules with the text of their files.
#[cfg(feature = "cuda")]
macro_rules! modules {
    ($($module:ident),*) => {
        &[$(($module::TESTS, include_str!(concat!(stringify!($module), ".rs")))),*]
    };
}

#[cfg(feature = "cuda")]
fn main() -> std::process::ExitCode {
    harness::main(modules![
        attention, core, device, far, faults, graphs, linear, memory, paged, prefix, streams
    ])
}

/// There is nothing to test.
#[cfg(not(feature = "cuda"))]
fn main() {}
