//! Qwen3, dense: a Llama whose heads of queries and keys are normalised before they are rotated.

use super::layers::Norm;
use super::llama::Decoder;
use super::names::{Loader, Part};
use super::{Config, Model};
use crate::error::Result;

/// Loads a Qwen3.
pub(super) fn load(config: &Config, loader: &Loader<'_>) -> Result<Box<dyn Model>> {
    let norm = |part, layer| Norm::load(loader, part, layer, config.head_dim, config.norm_eps);
    let model = Decoder::load(config, loader, |layer, attention| {
        Ok(attention.norms(norm(Part::QueryNorm, layer)?, norm(Part::KeyNorm, layer)?))
    })?;
    Ok(Box::new(model))
}
