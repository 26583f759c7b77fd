//! The one error type of the library.
//!
//! Every variant names what was asked, what was found, and, where there is one, the way out.

use std::path::PathBuf;

/// `Result` with the library's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything that can go wrong in a call to this library.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument of an op does not fit its contract.
    #[error("{op}: argument `{arg}`: expected {expected}, got {got}")]
    Argument {
        /// The op that was called.
        op: &'static str,
        /// The argument or option at fault.
        arg: String,
        /// What the contract asks for.
        expected: String,
        /// What the caller gave.
        got: String,
    },

    /// No kernel of the op can run the (valid) problem.
    #[error("{op}: no kernel can run this on {device}{}", list_refusals(.refusals))]
    Unsupported {
        /// The op that was called.
        op: &'static str,
        /// The device the arguments live on.
        device: String,
        /// Each kernel considered and why it was refused.
        refusals: Vec<(String, String)>,
    },

    /// A kernel was named that the op does not have.
    #[error("{op}: no kernel is named `{kernel}`; it has: {}", .known.join(", "))]
    UnknownKernel {
        /// The op.
        op: &'static str,
        /// The name given.
        kernel: String,
        /// The names it has.
        known: Vec<String>,
    },

    /// Device or host memory ran out. The device stays usable.
    #[error("out of memory on {device}: asked for {requested} bytes, {free} of {total} bytes are free")]
    OutOfMemory {
        /// The device.
        device: String,
        /// Bytes asked for.
        requested: u64,
        /// Bytes free at that time.
        free: u64,
        /// Bytes the device has.
        total: u64,
    },

    /// A CUDA driver call failed without damage to the context.
    #[error("{call} failed: {name} ({code}): {detail}")]
    Cuda {
        /// The driver function.
        call: &'static str,
        /// Numeric `CUresult`.
        code: u32,
        /// Symbolic name.
        name: String,
        /// The driver's description.
        detail: String,
    },

    /// An earlier CUDA error destroyed the device's context; only a new process can use the device again.
    #[error(
        "{device} is unusable in this process since an earlier CUDA error: {cause}. \
         The error is sticky: restart the process (and run it under compute-sanitizer to find the cause)"
    )]
    Poisoned {
        /// The device.
        device: String,
        /// The first fatal error.
        cause: String,
    },

    /// Something this machine lacks is needed.
    #[error("{what} is not available: {why}. {fix}")]
    Unavailable {
        /// The thing needed (a library, a device, a symbol).
        what: String,
        /// How we know.
        why: String,
        /// What the user can do.
        fix: String,
    },

    /// NVRTC rejected a kernel.
    #[error("compiling `{kernel}` for {arch} failed:\n{log}")]
    Compile {
        /// The kernel's name.
        kernel: String,
        /// The architecture, such as `sm_90a`.
        arch: String,
        /// The compiler's log.
        log: String,
    },

    /// A launch would break a limit of the device.
    #[error("launching `{kernel}`: {what} is {got}, the device allows {limit}")]
    Launch {
        /// The kernel's name.
        kernel: String,
        /// The launch parameter.
        what: &'static str,
        /// Its value.
        got: u64,
        /// The device's limit.
        limit: u64,
    },

    /// A file could not be read or written.
    #[error("{path}: {what}", path = .path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What was tried and what the system said.
        what: String,
    },

    /// A value given as text (dtype, device, architecture, size) was not understood.
    #[error("{what}: expected {expected}, got `{got}`")]
    Parse {
        /// What was being read.
        what: String,
        /// What would have been understood.
        expected: String,
        /// The text.
        got: String,
    },
}

impl Error {
    /// An [`Error::Argument`].
    pub fn argument(
        op: &'static str,
        arg: impl Into<String>,
        expected: impl Into<String>,
        got: impl Into<String>,
    ) -> Self {
        Error::Argument { op, arg: arg.into(), expected: expected.into(), got: got.into() }
    }

    /// An [`Error::Io`] from a failed system call.
    pub fn io(path: impl Into<PathBuf>, doing: &str, source: &std::io::Error) -> Self {
        Error::Io { path: path.into(), what: format!("{doing}: {source}") }
    }

    /// An [`Error::Parse`].
    pub fn parse(what: impl Into<String>, expected: impl Into<String>, got: impl Into<String>) -> Self {
        Error::Parse { what: what.into(), expected: expected.into(), got: got.into() }
    }
}

fn list_refusals(refusals: &[(String, String)]) -> String {
    if refusals.is_empty() {
        return ": it has none for this device".into();
    }
    refusals.iter().map(|(kernel, why)| format!("\n  {kernel}: {why}")).collect()
}
