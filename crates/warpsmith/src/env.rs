//! The environment variables the library reads, all of them, in one place.
//!
//! Those about the CPU are checked when a call is planned: an invalid value is an error that names the variable.

use std::path::PathBuf;

/// Folder of the kernel cache and the tuned choices, instead of the one under the XDG cache folder.
pub const CACHE_DIR: &str = "WARPSMITH_CACHE_DIR";
/// Kernel pack (a folder made by `warpsmith build-kernels`) that is looked in before anything is compiled.
pub const KERNEL_PACK: &str = "WARPSMITH_KERNEL_PACK";
/// `1`: never compile at run time; a kernel that is in no pack and no cache is an error.
pub const DISABLE_JIT: &str = "WARPSMITH_DISABLE_JIT";
/// Number of CPU threads, instead of all the process may use.
pub const NUM_THREADS: &str = "WARPSMITH_NUM_THREADS";
/// Highest CPU tier to use: `avx512`, `avx2` or `portable`.
pub const CPU_TIER: &str = "WARPSMITH_CPU_TIER";
/// Highest instructions to use for matrix products on the CPU, within the tier: `amx-f16` (tiles of BF16 and F16), `amx`
/// (tiles of BF16), `avx512-dot` (the dot products of BF16) or `avx512`, `avx2`, `portable`.
pub const CPU_MATRIX: &str = "WARPSMITH_CPU_MATRIX";

/// `1`: name spans and calls for Nsight and other tools that listen to NVTX.
pub const NVTX: &str = "WARPSMITH_NVTX";

/// Folder of evidence into which the tests of `tests/gpu` record what passed.
pub const RECORD: &str = "WARPSMITH_RECORD";

/// Other programs' variables that are respected: where CUDA, Python environments, programs and caches are.
pub mod system {
    /// The CUDA toolkit.
    pub const CUDA_HOME: &str = "CUDA_HOME";
    /// The CUDA toolkit, by its other name.
    pub const CUDA_PATH: &str = "CUDA_PATH";
    /// The library of a tool that listens to NVTX, named by the tool when it starts a program.
    pub const NVTX_INJECTION: &str = "NVTX_INJECTION64_PATH";
    /// The active Python environment.
    pub const VIRTUAL_ENV: &str = "VIRTUAL_ENV";
    /// The active Conda environment.
    pub const CONDA_PREFIX: &str = "CONDA_PREFIX";
    /// Folders of programs.
    pub const PATH: &str = "PATH";
    /// The user's folder.
    pub const HOME: &str = "HOME";
    /// The user's folder of caches, `~/.cache` where unset.
    pub const XDG_CACHE_HOME: &str = "XDG_CACHE_HOME";
}

/// The value of one of the variables above, if it is set and not empty.
pub fn get(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// Like [`get`], as a path.
pub fn path(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}

/// Whether a switch such as [`DISABLE_JIT`] is on.
pub fn flag(name: &str) -> bool {
    get(name).is_some_and(|value| value != "0")
}
