//! Phi-3, and the Phi-4 of the same form: a Llama with one matrix for queries, keys and values, one for gate and up, LongRoPE,
//! and in Phi-4-mini heads of which a part is rotated.

use super::decoder::{Decoder, Form};
use super::loader::Loader;
use super::{Config, Model};
use crate::error::Result;

/// Loads a Phi-3.
pub(super) fn load(config: &Config, loader: &Loader<'_>) -> Result<Box<dyn Model>> {
    let form = Form { has_joined_matrices: true, ..Form::default() };
    Ok(Box::new(Decoder::load(config, loader, form)?))
}
