//! What can go wrong, each with the node, place or argument at fault.

/// `Result` with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything that can go wrong between a formula and its result.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A node of a graph does not fit its arguments.
    #[error("node `{node}`: {what}")]
    Node {
        /// The node, as it would be written.
        node: String,
        /// What is wrong with it.
        what: String,
    },

    /// An expression could not be read.
    #[error("{what}\n  {line}\n  {caret:>width$}", caret = "^", width = .column + 1)]
    Syntax {
        /// What is wrong.
        what: String,
        /// The line of the expression.
        line: String,
        /// Characters of that line before the fault.
        column: usize,
    },

    /// A graph in JSON is not one.
    #[error("graph: {0}")]
    Json(String),

    /// A call does not fit the graph.
    #[error("argument `{argument}`: expected {expected}, got {got}")]
    Argument {
        /// The input or output.
        argument: String,
        /// What the graph asks for.
        expected: String,
        /// What the caller gave.
        got: String,
    },

    /// What the library refused.
    #[error(transparent)]
    Library(#[from] warpsmith::Error),
}

impl Error {
    pub(crate) fn node(node: impl Into<String>, what: impl Into<String>) -> Error {
        Error::Node { node: node.into(), what: what.into() }
    }

    pub(crate) fn argument(
        argument: impl Into<String>,
        expected: impl Into<String>,
        got: impl Into<String>,
    ) -> Error {
        Error::Argument { argument: argument.into(), expected: expected.into(), got: got.into() }
    }
}
