//! The Llama family: RMS norms before attention and a gated feed-forward layer, rotated queries and keys.

use super::decoder::{Decoder, Form};
use super::loader::Loader;
use super::{Config, Model};
use crate::error::Result;

/// Loads a Llama.
pub(super) fn load(config: &Config, loader: &Loader<'_>) -> Result<Box<dyn Model>> {
    Ok(Box::new(Decoder::load(config, loader, Form::default())?))
}
