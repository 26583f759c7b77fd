//! Which forms of quantised checkpoints are read: 8-bit floating-point weights with scales. All others are refused by name.

use super::keys::{Keys, Setting};
use crate::error::{Error, Result};
use serde_json::Value;

/// Weights of 8 bits with scales, as a configuration describes them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fp8Config {
    /// Rows and columns that share a scale, where scales belong to blocks.
    pub block: Option<[usize; 2]>,
}

const METHODS: &str = "fp8, fbgemm_fp8 or compressed-tensors";

impl Fp8Config {
    /// Reads `quantization_config`; `None` if the model is not quantised.
    pub(super) fn from_json(json: &Value) -> Result<Option<Fp8Config>> {
        // The second is the name that older compressed-tensors had.
        let found = ["quantization_config", "compression_config"]
            .into_iter()
            .find_map(|key| Some((key, json.get(key).filter(|value| !value.is_null())?)));
        let Some((key, value)) = found else { return Ok(None) };
        let Value::Object(entries) = value else { return Err(Error::config(key, "an object", value)) };
        let get = |key: &str| entries.get(key).and_then(Setting::from_json);
        let keys = Keys { prefix: format!("{key}."), get: &get };
        let method = keys.text_if_any("quant_method")?;
        let block = match method.as_deref() {
            Some("fp8") => {
                only(&keys, "fmt", &["e4m3", "float8_e4m3fn"])?;
                match value.get("weight_block_size") {
                    // What transformers takes for granted.
                    None => Some([128, 128]),
                    Some(size) => block(&keys, "weight_block_size", size)?,
                }
            }
            Some("fbgemm_fp8") => None,
            Some("compressed-tensors") => compressed(&keys, value)?,
            other => {
                let got =
                    other.map_or_else(|| "nothing".into(), |name| Setting::Text(name.into()).to_string());
                return Err(keys.wrong("quant_method", METHODS, got));
            }
        };
        Ok(Some(Fp8Config { block }))
    }
}

/// A text that must be one of `known`, if it is there.
fn only(keys: &Keys<'_>, key: &str, known: &[&str]) -> Result<()> {
    match keys.text_if_any(key)? {
        Some(text) if !known.contains(&text.as_str()) => {
            Err(keys.wrong(key, known.join(" or "), Setting::Text(text)))
        }
        _ => Ok(()),
    }
}

/// The two sizes of a block; `None` for null.
fn block(keys: &Keys<'_>, key: &str, value: &Value) -> Result<Option<[usize; 2]>> {
    if value.is_null() {
        return Ok(None);
    }
    let sizes: Option<Vec<usize>> = value.as_array().and_then(|sizes| {
        sizes
            .iter()
            .map(|size| size.as_u64().filter(|n| (1..1 << 32).contains(n)).map(|n| n as usize))
            .collect()
    });
    match sizes.as_deref() {
        Some(&[rows, columns]) => Ok(Some([rows, columns])),
        _ => Err(keys.wrong(key, "two whole numbers from 1 to below 2^32", value)),
    }
}

/// Groups of compressed-tensors: each must have weights of 8 bits.
fn compressed(keys: &Keys<'_>, config: &Value) -> Result<Option<[usize; 2]>> {
    const FORMATS: [&str; 2] = ["float-quantized", "naive-quantized"];
    only(keys, "format", &FORMATS)?;
    for key in ["sparsity_config", "transform_config"] {
        let entries = config.get(key).and_then(Value::as_object).filter(|entries| !entries.is_empty());
        let is_dense = |format: &Value| format.as_str() == Some("dense");
        if let Some(entries) = entries.filter(|entries| !entries.get("format").is_some_and(is_dense)) {
            return Err(keys.wrong(key, "nothing", Value::Object(entries.clone())));
        }
    }
    let groups = config.get("config_groups").and_then(Value::as_object);
    let Some(groups) = groups.filter(|groups| !groups.is_empty()) else {
        return Err(keys.wrong("config_groups", "an object with groups", "nothing"));
    };
    let mut of_all = None;
    for (name, group) in groups {
        let weights = group.get("weights").unwrap_or(&Value::Null);
        let get = |key: &str| weights.get(key).and_then(Setting::from_json);
        let prefix = format!("{}config_groups.{name}.weights.", keys.prefix);
        let keys = Keys { prefix, get: &get };
        if keys.text_if_any("type")?.as_deref() != Some("float")
            || keys.find("num_bits") != Some(Setting::Whole(8))
        {
            let got = weights.get("type").zip(weights.get("num_bits"));
            let got = got.map_or("something else".into(), |(kind, bits)| format!("{kind} of {bits}"));
            return Err(keys.wrong("type", "\"float\" of 8 bits", got));
        }
        keys.must_be("symmetric", true)?;
        let size = match keys.text_if_any("strategy")?.as_deref() {
            None | Some("tensor" | "channel") => None,
            Some("block") => {
                block(&keys, "block_structure", weights.get("block_structure").unwrap_or(&Value::Null))?
            }
            Some(other) => {
                return Err(keys.wrong("strategy", "tensor, channel or block", Setting::Text(other.into())));
            }
        };
        if size.is_some() && of_all.is_some_and(|other| Some(other) != size) {
            return Err(keys.wrong("block_structure", "the same in all groups", format!("{size:?}")));
        }
        of_all = of_all.or(size);
    }
    Ok(of_all)
}
