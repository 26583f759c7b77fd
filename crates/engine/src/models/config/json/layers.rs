//! What differs between the layers of a model: windows, and whether positions rotate.

use super::super::keys::Keys;
use super::super::{LayerConfig, Rotation};
use crate::error::Result;
use serde_json::Value;

/// One for each layer; none if they are all alike and have nothing particular.
pub fn read(json: &Value, keys: &Keys<'_>, family: &str, num_layers: usize) -> Result<Vec<LayerConfig>> {
    let types = layer_types(json, keys, num_layers)?;
    let rotates = match family {
        "smollm3" => rotated_layers(json, keys, num_layers)?,
        _ => vec![true; num_layers],
    };
    // Keys that a query sees where a layer has a window, and the layers that have one where no key lists them.
    let (window, slides): (Option<usize>, Box<dyn Fn(usize) -> bool>) = match family {
        "qwen2" | "qwen3" => {
            let first = keys.size_or_zero("max_window_layers", 28)?;
            let window = window(json, keys, Some(4096))?;
            let is_used = keys.flag_or("use_sliding_window", false)?;
            (window.filter(|_| is_used), Box::new(move |layer| layer >= first))
        }
        "qwen3_moe" => {
            let window = window(json, keys, Some(4096))?;
            let is_used = keys.flag_or("use_sliding_window", false)?;
            (window.filter(|_| is_used), Box::new(|_| true))
        }
        "mistral" => (window(json, keys, Some(4096))?, Box::new(|_| true)),
        "mixtral" => (window(json, keys, None)?, Box::new(|_| true)),
        "phi3" => (window(json, keys, None)?, Box::new(|_| true)),
        "smollm3" => {
            let (is_used, rotates) = (keys.flag_or("use_sliding_window", false)?, rotates.clone());
            (window(json, keys, None)?, Box::new(move |layer| is_used && !rotates[layer]))
        }
        "gemma3_text" => {
            let period = keys.size_or("sliding_window_pattern", 6)?;
            (window(json, keys, Some(4096))?, Box::new(move |layer| !(layer + 1).is_multiple_of(period)))
        }
        _ => {
            if keys.flag_or("use_sliding_window", false)? {
                return Err(keys.wrong("use_sliding_window", "false: this family has no windows", true));
            }
            (None, Box::new(|_| false))
        }
    };
    let lists_them = matches!(family, "qwen2" | "qwen3" | "smollm3" | "gemma3_text");
    if !lists_them && types.as_ref().is_some_and(|types| types.contains(&true)) {
        let got = keys.find("layer_types").map_or_else(String::new, |found| found.to_string());
        return Err(keys.wrong("layer_types", format!("full_attention for {num_layers} layers"), got));
    }
    let types = types.filter(|_| lists_them);
    let mut layers = Vec::new();
    for layer in 0..num_layers {
        let is_listed = types.as_ref().map(|types| types[layer]);
        let is_local = is_listed.unwrap_or_else(|| slides(layer));
        // Null turns windows off, unless layers must have one.
        let needs_one = is_listed == Some(true) || (family == "gemma3_text" && is_local);
        if needs_one && window.is_none() {
            let expected = "a number of keys that are used: there are layers with sliding_attention";
            return Err(keys.wrong("sliding_window", expected, "none"));
        }
        let rotation = match family {
            "gemma3_text" if is_local => Rotation::Local,
            _ if !rotates[layer] => Rotation::None,
            _ => Rotation::Main,
        };
        layers.push(LayerConfig { window: window.filter(|_| is_local), rotation });
    }
    let nothing = layers.iter().all(|layer| *layer == LayerConfig::default());
    Ok(if nothing { Vec::new() } else { layers })
}

/// For each layer, whether `layer_types` says that it has a window.
fn layer_types(json: &Value, keys: &Keys<'_>, num_layers: usize) -> Result<Option<Vec<bool>>> {
    let Some(found) = json.get("layer_types").filter(|found| !found.is_null()) else { return Ok(None) };
    let is_sliding = |kind: &Value| match kind.as_str() {
        Some("full_attention" | "attention") => Some(false),
        Some("sliding_attention") => Some(true),
        _ => None,
    };
    let types = found.as_array().filter(|types| types.len() == num_layers);
    let types = types.and_then(|types| types.iter().map(is_sliding).collect::<Option<Vec<bool>>>());
    match types {
        Some(types) => Ok(Some(types)),
        None => {
            let got = keys.find("layer_types").map_or_else(String::new, |found| found.to_string());
            let expected = format!("full_attention or sliding_attention for each of {num_layers} layers");
            Err(keys.wrong("layer_types", expected, got))
        }
    }
}

/// `sliding_window`. Null is none; what holds without the key depends on the class.
fn window(json: &Value, keys: &Keys<'_>, without: Option<usize>) -> Result<Option<usize>> {
    let found = match json.get("sliding_window") {
        None => return Ok(without),
        Some(_) => keys.size_if_any("sliding_window")?,
    };
    match found {
        Some(1) => Err(keys.wrong("sliding_window", "2 keys or more", 1)),
        found => Ok(found),
    }
}

/// For each layer of a SmolLM3, whether positions rotate it.
fn rotated_layers(json: &Value, keys: &Keys<'_>, num_layers: usize) -> Result<Vec<bool>> {
    let Some(found) = json.get("no_rope_layers").filter(|found| !found.is_null()) else {
        let interval = keys.size_or("no_rope_layer_interval", 4)?;
        return Ok((0..num_layers).map(|layer| !(layer + 1).is_multiple_of(interval)).collect());
    };
    let flags = found.as_array().filter(|flags| flags.len() >= num_layers);
    let flag = |flag: &Value| match flag.as_u64() {
        Some(0) => Some(false),
        Some(1) => Some(true),
        _ => flag.as_bool(),
    };
    let flags = flags.and_then(|flags| flags[..num_layers].iter().map(flag).collect::<Option<Vec<bool>>>());
    flags.ok_or_else(|| {
        let got = keys.find("no_rope_layers").map_or_else(String::new, |found| found.to_string());
        keys.wrong(
            "no_rope_layers",
            format!("1 for layers with rope and 0 for others, {num_layers} of them"),
            got,
        )
    })
}
