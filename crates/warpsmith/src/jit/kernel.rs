//! The compilable part of a kernel.

use super::{Arch, Source};

/// The device half of a CUDA kernel.
pub struct CudaKernel {
    /// The embedded source.
    pub source: Source,
    /// C declarations of its parameter struct, put before the source.
    pub prelude: fn() -> String,
    /// The `extern "C"` function.
    pub function: &'static str,
    /// Oldest architecture it is written for.
    pub min_arch: Arch,
    /// Compile with fast math.
    pub fast_math: bool,
    /// Whether it may start before the kernel ahead of it in the stream has ended. It then waits by itself
    /// (`griddepcontrol.wait`) before it touches memory that others write.
    pub overlaps: bool,
    /// What a kernel pack holds and the compile tests build: every set of defines `run` may ask for or, where these are
    /// thousands, some that together have each value of each define.
    pub variants: fn() -> Vec<Defines>,
}

/// Compile-time values of a specialised kernel.
pub type Defines = Vec<(&'static str, String)>;

impl CudaKernel {
    /// Whether it is written for this architecture: code for an `a` architecture runs only on that one.
    pub fn is_for(&self, arch: Arch) -> bool {
        match self.min_arch.accel {
            true => self.min_arch.number() == arch.number(),
            false => self.min_arch.number() <= arch.number(),
        }
    }
}
