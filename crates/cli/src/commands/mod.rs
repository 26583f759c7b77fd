//! The commands, a file each: `Args` is its command line, `run` does it.

pub mod completions;
pub mod list;
