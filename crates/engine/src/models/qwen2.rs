//! Qwen2 and Qwen2.5, dense: a Llama with biases of queries, keys and values, and windows in layers that the configuration
//! names.

use super::decoder::{Decoder, Form};
use super::loader::Loader;
use super::{Config, Model};
use crate::error::Result;

/// Loads a Qwen2.
pub(super) fn load(config: &Config, loader: &Loader<'_>) -> Result<Box<dyn Model>> {
    Ok(Box::new(Decoder::load(config, loader, Form::default())?))
}
