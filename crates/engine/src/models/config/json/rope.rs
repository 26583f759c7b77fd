//! `rope_parameters` of transformers 5, or `rope_theta` and `rope_scaling` of the versions before.

use super::super::keys::{Keys, Setting};
use super::super::{RopeConfig, RopeScaling};
use super::keys_of;
use crate::error::{Error, Result};
use serde_json::{Map, Value};

/// What else decides what the keys mean.
pub struct About<'a> {
    pub family: &'a str,
    /// The base that holds without a key.
    pub theta: f64,
    pub head_dim: usize,
    pub max_positions: usize,
}

/// The rotations of a model.
pub struct Ropes {
    pub rope: RopeConfig,
    pub local_rope: Option<RopeConfig>,
    pub rotary_dim: Option<usize>,
}

pub fn read(json: &Value, keys: &Keys<'_>, about: &About<'_>) -> Result<Ropes> {
    let scaling = object(json, "rope_scaling")?;
    let parameters = object(json, "rope_parameters")?;
    if about.family == "gemma3_text" {
        return by_layers(keys, about, scaling, parameters);
    }
    let (key, entries) = match (scaling, parameters) {
        (Some(entries), _) => ("rope_scaling.", Some(entries)),
        (None, Some(entries)) => ("rope_parameters.", Some(entries)),
        (None, None) => ("", None),
    };
    let get = |key: &str| entries.and_then(|entries| entries.get(key)).and_then(Setting::from_json);
    let inner = keys_of(key, &get);
    // One for each kind of layer.
    if let Some((key, value)) = entries.into_iter().flatten().find(|(_, value)| value.is_object()) {
        return Err(inner.wrong(key, "one rotation for all layers", shown(value)));
    }
    let mut rotary_dim = None;
    if about.family == "phi3" {
        let part = match inner.real_if_any("partial_rotary_factor")? {
            Some(part) => part,
            None => keys.real_or("partial_rotary_factor", 1.0)?,
        };
        let dim = (about.head_dim as f64 * part) as usize;
        if !(2..=about.head_dim).contains(&dim) || dim % 2 == 1 {
            let expected = format!("a part of a head of {} with an even number of elements", about.head_dim);
            let prefix = inner.find("partial_rotary_factor").map_or(keys, |_| &inner);
            return Err(prefix.wrong("partial_rotary_factor", expected, part));
        }
        rotary_dim = (dim != about.head_dim).then_some(dim);
    } else {
        for keys in [&inner, keys] {
            keys.must_be_one_of("partial_rotary_factor", &[1.0])?;
        }
    }
    let theta = match inner.real_if_any("rope_theta")? {
        Some(theta) => theta,
        None => keys.real_or("rope_theta", about.theta)?,
    };
    let outer = keys.real_if_any("original_max_position_embeddings")?;
    let original = match (about.family, outer) {
        // The class has a number of its own, which goes before.
        ("phi3", outer) => outer.unwrap_or(4096.0),
        (_, Some(outer)) => outer,
        (_, None) => inner.real_or("original_max_position_embeddings", about.max_positions as f64)?,
    };
    let scaling = read_scaling(&inner, entries, about, rotary_dim, original)?;
    Ok(Ropes { rope: RopeConfig { theta, scaling }, local_rope: None, rotary_dim })
}

/// Gemma 3: layers with windows have a rotation of their own.
fn by_layers(
    keys: &Keys<'_>,
    about: &About<'_>,
    scaling: Option<&Map<String, Value>>,
    parameters: Option<&Map<String, Value>>,
) -> Result<Ropes> {
    keys.must_be_one_of("partial_rotary_factor", &[1.0])?;
    const KINDS: [&str; 2] = ["full_attention", "sliding_attention"];
    let both = "nothing beside rope_parameters";
    if let (Some(scaling), Some(_)) = (scaling, parameters) {
        return Err(keys.wrong("rope_scaling", both, shown(&Value::Object(scaling.clone()))));
    }
    if let Some((key, value)) =
        parameters.into_iter().flatten().find(|(key, _)| !KINDS.contains(&key.as_str()))
    {
        let inner = keys_of("rope_parameters.", keys.get);
        return Err(inner.wrong(key, "objects for full_attention and sliding_attention", shown(value)));
    }
    let rope = |kind: &str, outer_theta: &str, theta: f64| -> Result<RopeConfig> {
        let own = parameters.and_then(|parameters| parameters.get(kind)).filter(|own| !own.is_null());
        let prefix = format!("rope_parameters.{kind}");
        let (prefix, entries) = match own {
            Some(Value::Object(entries)) => (prefix + ".", Some(entries)),
            Some(other) => return Err(Error::config(&prefix, "an object", other)),
            None if kind == KINDS[0] => ("rope_scaling.".into(), scaling),
            None => (prefix + ".", None),
        };
        let get = |key: &str| entries.and_then(|entries| entries.get(key)).and_then(Setting::from_json);
        let inner = keys_of(&prefix, &get);
        inner.must_be_one_of("partial_rotary_factor", &[1.0])?;
        let theta = match inner.real_if_any("rope_theta")? {
            Some(theta) => theta,
            None => keys.real_or(outer_theta, theta)?,
        };
        let original = inner.real_or("original_max_position_embeddings", about.max_positions as f64)?;
        Ok(RopeConfig { theta, scaling: read_scaling(&inner, entries, about, None, original)? })
    };
    let local_rope = Some(rope(KINDS[1], "rope_local_base_freq", 10_000.0)?);
    Ok(Ropes { rope: rope(KINDS[0], "rope_theta", about.theta)?, local_rope, rotary_dim: None })
}

/// An object that is not empty.
fn object<'a>(json: &'a Value, key: &str) -> Result<Option<&'a Map<String, Value>>> {
    match json.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::Object(entries)) => Ok(Some(entries).filter(|entries| !entries.is_empty())),
        Some(other) => Err(Error::config(key, "an object", other)),
    }
}

/// What is done to the frequencies. `original` is the number of positions that the model was first trained with.
fn read_scaling(
    inner: &Keys<'_>,
    entries: Option<&Map<String, Value>>,
    about: &About<'_>,
    rotary_dim: Option<usize>,
    original: f64,
) -> Result<RopeScaling> {
    let kind = match inner.text_if_any("rope_type")? {
        Some(kind) => Some(kind),
        None => inner.text_if_any("type")?,
    };
    let stretched = || -> Result<f64> {
        Ok(match inner.real_if_any("factor")? {
            Some(factor) => factor,
            None => about.max_positions as f64 / original,
        })
    };
    let is_phi3 = about.family == "phi3";
    Ok(match kind.as_deref() {
        None | Some("default") => RopeScaling::None,
        // Old files of Phi-3 have other names for it.
        Some("longrope") | Some("su" | "yarn") if is_phi3 || kind.as_deref() == Some("longrope") => {
            let pairs = rotary_dim.unwrap_or(about.head_dim) / 2;
            let factors = |key: &str| factors(inner, entries, key, pairs);
            let (short, long) = (factors("short_factor")?, factors("long_factor")?);
            let attention_factor = match (inner.real_if_any("attention_factor")?, stretched()?) {
                (Some(factor), _) => factor,
                (None, factor) if factor <= 1.0 => 1.0,
                (None, factor) => (1.0 + factor.ln() / original.ln()).sqrt(),
            };
            RopeScaling::LongRope { short, long, original, attention_factor }
        }
        Some("linear") if !is_phi3 => RopeScaling::Linear(inner.real("factor")?),
        Some("llama3") if !is_phi3 => RopeScaling::Llama3 {
            factor: inner.real("factor")?,
            low_freq_factor: inner.real("low_freq_factor")?,
            high_freq_factor: inner.real("high_freq_factor")?,
            original,
        },
        Some("yarn") => {
            let factor = stretched()?;
            let scaled = |mscale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 };
            let mscales = (inner.real_if_any("mscale")?, inner.real_if_any("mscale_all_dim")?);
            RopeScaling::Yarn {
                factor,
                original,
                beta_fast: inner.real_or("beta_fast", 32.0)?,
                beta_slow: inner.real_or("beta_slow", 1.0)?,
                // Looked for where Gemma 3 has no keys but kinds of layers.
                truncate: inner.flag_or("truncate", true)? || about.family == "gemma3_text",
                attention_factor: match (inner.real_if_any("attention_factor")?, mscales) {
                    (Some(factor), _) => factor,
                    (None, (Some(some), Some(all))) => scaled(some) / scaled(all),
                    (None, _) => scaled(1.0),
                },
            }
        }
        Some(other) => {
            let known =
                if is_phi3 { "default or longrope" } else { "default, linear, llama3, yarn or longrope" };
            return Err(inner.wrong("rope_type", known, Setting::Text(other.into())));
        }
    })
}

/// A list of divisors, one for each pair that is rotated.
fn factors(
    inner: &Keys<'_>,
    entries: Option<&Map<String, Value>>,
    key: &str,
    pairs: usize,
) -> Result<Vec<f64>> {
    let list = entries.and_then(|entries| entries.get(key)).and_then(Value::as_array);
    let numbers = list.filter(|list| list.len() == pairs).and_then(|list| {
        let number = |value: &Value| value.as_f64().filter(|n| n.is_finite() && *n > 0.0);
        list.iter().map(number).collect::<Option<Vec<f64>>>()
    });
    numbers.ok_or_else(|| {
        let got = inner.find(key).map_or_else(|| "nothing".into(), |found| found.to_string());
        inner.wrong(key, format!("{pairs} finite numbers above zero, one for each pair"), got)
    })
}

fn shown(value: &Value) -> String {
    crate::weights::shown(&value.to_string())
}
