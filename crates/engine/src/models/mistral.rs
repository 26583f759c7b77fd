//! Mistral: a Llama whose queries may see a window of keys. GGUF files call it a Llama, and know no window.

use super::decoder::{Decoder, Form};
use super::loader::Loader;
use super::{Config, Model};
use crate::error::Result;

/// Loads a Mistral.
pub(super) fn load(config: &Config, loader: &Loader<'_>) -> Result<Box<dyn Model>> {
    Ok(Box::new(Decoder::load(config, loader, Form::default())?))
}
