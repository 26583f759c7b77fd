//! What can be wrong with a file of weights.

use std::path::{Path, PathBuf};

/// `Result` with the [`Error`] of weights.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why weights cannot be read.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file is not what its format asks for.
    #[error("{file}: {what}: expected {expected}, got {got}", file = .file.display())]
    Format {
        /// The file.
        file: PathBuf,
        /// The part of it at fault, such as a key or a tensor.
        what: String,
        /// What the format asks for.
        expected: String,
        /// What is there.
        got: String,
    },

    /// A tensor has a type that is not supported.
    #[error("{file}: tensor `{tensor}`: its type {found} is not supported; these are: {supported}", file = .file.display())]
    UnsupportedType {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its type.
        found: String,
        /// The types that can be read.
        supported: String,
    },

    /// Something asked for is not there.
    #[error("{file}: there is no {what}{}", .hint.as_ref().map(|hint| format!("; {hint}")).unwrap_or_default(), file = .file.display())]
    Missing {
        /// The file or folder.
        file: PathBuf,
        /// What was asked for, such as a key or a tensor.
        what: String,
        /// What may help.
        hint: Option<String>,
    },

    /// Reading a file or making a tensor failed.
    #[error(transparent)]
    Library(#[from] warpsmith::Error),
}

impl Error {
    pub(crate) fn format(
        file: &Path,
        what: impl Into<String>,
        expected: impl Into<String>,
        got: impl Into<String>,
    ) -> Error {
        Error::Format { file: file.into(), what: what.into(), expected: expected.into(), got: got.into() }
    }

    pub(crate) fn missing(file: &Path, what: impl Into<String>, hint: Option<String>) -> Error {
        Error::Missing { file: file.into(), what: what.into(), hint }
    }
}

/// Text from a file as it may stand in a message: control characters made visible, not endlessly long.
pub(crate) fn shown(text: &str) -> String {
    const MOST: usize = 160;
    let mut shown = String::new();
    for c in text.chars().take(MOST) {
        if c.is_control() { shown.extend(c.escape_debug()) } else { shown.push(c) }
    }
    if text.chars().nth(MOST).is_some() {
        shown.push_str("...");
    }
    shown
}
