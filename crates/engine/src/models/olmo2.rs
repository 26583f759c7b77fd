//! OLMo 2: a Llama whose norms come after attention and after the feed-forward layer, before their results are added; and
//! which normalises all queries of a token together, and all its keys.

use super::decoder::{Decoder, Form, NormPlaces, QueryKeyNorms};
use super::loader::Loader;
use super::{Config, Model};
use crate::error::Result;

/// Loads an OLMo 2.
pub(super) fn load(config: &Config, loader: &Loader<'_>) -> Result<Box<dyn Model>> {
    let form = Form { norms: NormPlaces::After, query_key_norms: QueryKeyNorms::Tokens, ..Form::default() };
    Ok(Box::new(Decoder::load(config, loader, form)?))
}
