//! Why a model cannot be obtained from the hub.

use std::path::PathBuf;

/// Why a model cannot be had from the hub.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HubError {
    /// Nothing may be downloaded.
    #[error("HF_HUB_OFFLINE is set, and {cache} does not have all of it", cache = .cache.display())]
    Offline {
        /// The address that was tried.
        cache: PathBuf,
    },

    /// There is no answer.
    #[error(
        "{endpoint} cannot be reached: {why}; set HF_ENDPOINT to use another address, or give the path of a model"
    )]
    Unreachable {
        /// The hub's address.
        endpoint: String,
        /// What the system says.
        why: String,
    },

    /// The hub does not know the repository.
    #[error("there is no such repository; if it is a path, there is no such file either")]
    NoRepository,

    /// The hub asks for a token. It answers the same for repositories that do not exist.
    #[error(
        "there is no such repository, or it is private{}; if it is a path, there is no such file either",
        if *.with_token { ", and the token is not good for it" } else { "; set HF_TOKEN to a token that may read it" }
    )]
    Unauthorised {
        /// Whether a token was sent.
        with_token: bool,
    },

    /// The hub refuses this token.
    #[error("the token may not read it; ask for access on the model's page")]
    Forbidden,

    /// The repository lacks a file.
    #[error("the repository has no {file}; {hint}")]
    NoFile {
        /// The file.
        file: String,
        /// What there is instead.
        hint: String,
    },

    /// The downloaded data is not the file.
    #[error(
        "{file} should have {expected} bytes, but {got} came; it was removed, so that it can be downloaded again"
    )]
    WrongSize {
        /// The file.
        file: String,
        /// Its size in bytes, as the hub says.
        expected: u64,
        /// Bytes that were there at the end.
        got: u64,
    },

    /// A partial download cannot be resumed.
    #[error("what is left of an interrupted download does not fit the file; delete {}", .folder.join("*.part").display())]
    WrongPart {
        /// Where it is.
        folder: PathBuf,
    },

    /// Another process is downloading the file.
    #[error("another download of it is running and holds {}; wait for its end", .lock.display())]
    Busy {
        /// The file that is locked.
        lock: PathBuf,
    },

    /// Anything else.
    #[error("{why}")]
    Broken {
        /// What happened.
        why: String,
    },
}

impl HubError {
    /// Whether the cause is the hub, and not this machine.
    pub(crate) fn is_of_the_hub(&self) -> bool {
        !matches!(self, HubError::WrongSize { .. } | HubError::WrongPart { .. } | HubError::Busy { .. })
    }
}
