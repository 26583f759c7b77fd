//! The native half of the Python package `warpsmith`.
//!
//! It describes and calls ops, and hands memory over. What is derived from the descriptions (PyTorch's schemas, fake
//! kernels, gradients, functions) is made in Python, where PyTorch's own tools are.

mod call;
mod describe;
mod dlpack;
mod errors;
mod fuse;
mod judge;
mod machine;
mod profile;
mod signature;
mod tensor;
mod torch;
mod user_kernel;

use pyo3::prelude::*;

#[pymodule]
mod _native {
    #[pymodule_export]
    use super::call::{call, explain};
    #[pymodule_export]
    use super::describe::describe_ops;
    #[pymodule_export]
    use super::errors::take_last_error;
    #[pymodule_export]
    use super::fuse::{FusedCall, FusedGraph};
    #[pymodule_export]
    use super::judge::judge;
    #[pymodule_export]
    use super::machine::{devices, empty_cache, examine, memory, reset_peak_memory, synchronize};
    #[pymodule_export]
    use super::profile::{NamedSpan, Recording};
    #[pymodule_export]
    use super::tensor::{Tensor, from_dlpack};
    #[pymodule_export]
    use super::torch::{register_kernel, register_kernels, torch_is_native};
    #[pymodule_export]
    use super::user_kernel::CudaKernel;

    #[pymodule_export]
    #[allow(non_upper_case_globals)]
    const __version__: &str = env!("CARGO_PKG_VERSION");
}
