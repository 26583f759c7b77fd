//! What can go wrong in the engine.

#[cfg(feature = "hub")]
mod hub;

#[cfg(feature = "hub")]
pub use hub::HubError;

use std::path::{Path, PathBuf};

/// `Result` with the engine's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything that can go wrong in a call to the engine.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The library refused or failed.
    #[error(transparent)]
    Library(#[from] warpsmith::Error),

    /// A file of weights cannot be read.
    #[error(transparent)]
    Weights(#[from] crate::weights::Error),

    /// Text cannot be turned into tokens.
    #[error(transparent)]
    Text(#[from] crate::text::Error),

    /// A model's configuration cannot be used.
    #[error("{}model configuration: `{key}`: expected {expected}, got {got}", in_front(.file))]
    Config {
        /// The file it is from, if it is from one.
        file: Option<PathBuf>,
        /// The key at fault.
        key: String,
        /// What could be used.
        expected: String,
        /// What is there.
        got: String,
    },

    /// A tensor of the weights is missing or does not fit the configuration.
    #[error("{}weights: tensor `{name}`: expected {expected}, got {got}", in_front(.file))]
    Tensor {
        /// The file or folder it is in, or should be in, if it is in one.
        file: Option<PathBuf>,
        /// Its name in the file.
        name: String,
        /// What the model needs.
        expected: String,
        /// What is there.
        got: String,
    },

    /// A request cannot be served.
    #[error("request: `{what}`: expected {expected}, got {got}")]
    Request {
        /// The option or property at fault.
        what: &'static str,
        /// What would be served.
        expected: String,
        /// What was asked for.
        got: String,
    },

    /// Something in the engine's own settings is out of range.
    #[error("engine settings: `{what}`: expected {expected}, got {got}")]
    Settings {
        /// The setting at fault.
        what: &'static str,
        /// What is possible.
        expected: String,
        /// What was given.
        got: String,
    },

    /// A model cannot be obtained from the hub.
    #[cfg(feature = "hub")]
    #[error("model `{model}`: {why}")]
    Hub {
        /// Its name.
        model: String,
        /// The reason.
        why: HubError,
    },

    /// An internal invariant was violated: a bug in the engine.
    #[error("the engine is broken: {0}")]
    Broken(String),
}

impl Error {
    pub(crate) fn config(key: &str, expected: impl Into<String>, got: impl ToString) -> Error {
        Error::Config { file: None, key: key.into(), expected: expected.into(), got: got.to_string() }
    }

    pub(crate) fn tensor(name: &str, expected: impl Into<String>, got: impl ToString) -> Error {
        Error::Tensor { file: None, name: name.into(), expected: expected.into(), got: got.to_string() }
    }

    /// The same error of a configuration or a tensor, with its file, unless it has one.
    pub(crate) fn in_file(mut self, path: Option<&Path>) -> Error {
        if let Error::Config { file, .. } | Error::Tensor { file, .. } = &mut self {
            *file = file.take().or_else(|| path.map(Path::to_path_buf));
        }
        self
    }

    pub(crate) fn request(what: &'static str, expected: impl Into<String>, got: impl ToString) -> Error {
        Error::Request { what, expected: expected.into(), got: got.to_string() }
    }

    pub(crate) fn settings(what: &'static str, expected: impl Into<String>, got: impl ToString) -> Error {
        Error::Settings { what, expected: expected.into(), got: got.to_string() }
    }
}

/// A file as the prefix of a message.
fn in_front(file: &Option<PathBuf>) -> String {
    file.as_ref().map_or_else(String::new, |file| format!("{}: ", file.display()))
}
