//! Where the time of a run went: the data of a profile, what follows from it, and its forms: text, a trace, a page.
//!
//! [`Profile`] is plain data, made from the library's records with the feature `capture`. [`summary`] computes tables from
//! it, [`text`] writes them for a terminal, [`trace`] writes a timeline that Perfetto and chrome://tracing open, and
//! [`report`] a page that loads nothing from elsewhere.

#[cfg(feature = "capture")]
pub mod capture;
pub mod intervals;
mod memory;
mod model;
pub mod report;
#[cfg(test)]
#[path = "../tests/report/sample.rs"]
mod sample;
pub mod summary;
pub mod text;
pub mod trace;

pub use memory::{Holder, Peak, peaks as memory_peaks};
pub use model::{
    About, Bound, Call, Ceilings, Clock, Form, Kernel, Loop, Memory, Part, Phase, Profile, Span, SpanKind,
    Step, Work,
};

/// What can go wrong when a profile is written.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file could not be written.
    #[error("{path}: {source}", path = .path.display())]
    Write {
        /// The file.
        path: std::path::PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
}

/// `Result` with [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Writes a file.
fn write(path: &std::path::Path, bytes: &[u8]) -> Result<()> {
    std::fs::write(path, bytes).map_err(|source| Error::Write { path: path.into(), source })
}
