//! SmolLM3: a Llama some of whose layers know no positions, by default each fourth.

use super::decoder::{Decoder, Form};
use super::loader::Loader;
use super::{Config, Model};
use crate::error::Result;

/// Loads a SmolLM3.
pub(super) fn load(config: &Config, loader: &Loader<'_>) -> Result<Box<dyn Model>> {
    Ok(Box::new(Decoder::load(config, loader, Form::default())?))
}
