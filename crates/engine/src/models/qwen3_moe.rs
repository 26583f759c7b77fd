//! Qwen3 with experts in place of most feed-forward layers.

use super::decoder::{Decoder, Form, QueryKeyNorms};
use super::loader::Loader;
use super::{Config, Model};
use crate::error::Result;

/// Loads a Qwen3-MoE.
pub(super) fn load(config: &Config, loader: &Loader<'_>) -> Result<Box<dyn Model>> {
    let form = Form { query_key_norms: QueryKeyNorms::Heads, ..Form::default() };
    Ok(Box::new(Decoder::load(config, loader, form)?))
}
