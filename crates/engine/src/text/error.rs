//! What can go wrong between text and tokens.

use std::path::{Path, PathBuf};

/// `Result` with the [`Error`] of text.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why text cannot be turned into tokens, or a template not be rendered.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The tokenizer of a model cannot be used.
    #[error("{file}: tokenizer: {what}: expected {expected}, got {got}", file = .file.display())]
    Tokenizer {
        /// The file or folder it comes from.
        file: PathBuf,
        /// The part of it at fault.
        what: String,
        /// What would have been understood.
        expected: String,
        /// What is there.
        got: String,
    },

    /// A text could not be encoded.
    #[error("encoding a text of {bytes} bytes failed: {cause}")]
    Encode {
        /// Length of the text.
        bytes: usize,
        /// What the tokenizer said.
        cause: String,
    },

    /// A chat template is wrong, or refuses the messages.
    #[error("chat template: {0}")]
    Template(String),

    /// Rendering a chat template takes more than it may.
    #[error("chat template: its {what} is over the limit of {limit}")]
    TemplateLimit {
        /// What ran out.
        what: &'static str,
        /// How much there was of it.
        limit: u64,
    },

    /// An argument is not allowed.
    #[error("{what}: expected {expected}, got {got}")]
    Argument {
        /// The argument.
        what: &'static str,
        /// What is allowed.
        expected: String,
        /// What was given.
        got: String,
    },

    /// A file could not be read.
    #[error(transparent)]
    Weights(#[from] crate::weights::Error),
}

impl Error {
    pub(super) fn tokenizer(
        file: &Path,
        what: impl Into<String>,
        expected: impl Into<String>,
        got: impl Into<String>,
    ) -> Error {
        Error::Tokenizer { file: file.into(), what: what.into(), expected: expected.into(), got: got.into() }
    }
}
