//! Mixtral: a Mistral with experts in place of the feed-forward layers. GGUF files call it a Llama.

use super::decoder::{Decoder, Form};
use super::loader::Loader;
use super::{Config, Model};
use crate::error::Result;

/// Loads a Mixtral.
pub(super) fn load(config: &Config, loader: &Loader<'_>) -> Result<Box<dyn Model>> {
    Ok(Box::new(Decoder::load(config, loader, Form::default())?))
}
