//! Tells a program that kernels are being compiled, so that it can tell its user what takes so long.

use std::sync::OnceLock;

/// A step of a compilation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CompileEvent<'a> {
    /// The compiler was started.
    Started {
        /// Name of the source.
        kernel: &'a str,
    },
    /// The compiler has ended, with code or with an error.
    Ended {
        /// Name of the source.
        kernel: &'a str,
        /// How long it took, in milliseconds.
        ms: u64,
    },
}

type Observer = Box<dyn Fn(CompileEvent<'_>) + Send + Sync>;

static OBSERVER: OnceLock<Observer> = OnceLock::new();

/// Calls `observer` for every kernel that this process compiles from now on, on the thread that compiles it. Kernels
/// from packs or the cache are not reported. There can be one observer: `false` if there is one already.
pub fn observe_compilation(observer: impl Fn(CompileEvent<'_>) + Send + Sync + 'static) -> bool {
    OBSERVER.set(Box::new(observer)).is_ok()
}

pub(super) fn tell(event: CompileEvent<'_>) {
    if let Some(observer) = OBSERVER.get() {
        observer(event);
    }
}
