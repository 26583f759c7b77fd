//! Gemma 3, text: norms before and after both attention and the feed-forward layer, norms of heads, and scaled vectors of
//! tokens. Most layers see a window of keys and have a rotation of their own.

use super::decoder::{Decoder, Form, NormPlaces, QueryKeyNorms};
use super::loader::Loader;
use super::{Config, Model};
use crate::error::{Error, Result};
use warpsmith::Device;
use warpsmith::op::survey;

/// Loads a Gemma 3.
pub(super) fn load(config: &Config, loader: &Loader<'_>) -> Result<Box<dyn Model>> {
    if let Some(cap) = config.logit_softcap.filter(|_| loader.device() != Device::Cpu || survey::is_running())
    {
        return Err(Error::config("final_logit_softcapping", "none, because the model runs on a GPU", cap));
    }
    let form = Form { norms: NormPlaces::Around, query_key_norms: QueryKeyNorms::Heads, ..Form::default() };
    Ok(Box::new(Decoder::load(config, loader, form)?))
}
