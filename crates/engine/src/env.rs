//! The environment variables that the engine and its commands read, beside those of the library.

/// The model of commands that are given none: its path.
pub const MODEL: &str = "WARPSMITH_MODEL";
