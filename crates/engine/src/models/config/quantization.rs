//! Which forms of quantised checkpoints are read: 8-bit floating-point weights with scales, and 4-bit integers as GPTQ and AWQ
//! pack them. All others are refused by name.

use super::keys::{Keys, Setting};
use crate::error::{Error, Result};
use serde_json::Value;

/// Weights of 8 bits with scales, as a configuration describes them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fp8Config {
    /// Rows and columns that share a scale, where scales belong to blocks.
    pub block: Option<[usize; 2]>,
}

/// Weights of 4 bits, packed into words, with scales and zero points for groups of inputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Int4Config {
    /// How they are packed.
    pub packing: Int4Packing,
    /// Inputs that share a scale; `None` if all do.
    pub group: Option<usize>,
}

/// How weights of 4 bits are packed into words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Int4Packing {
    /// Eight inputs of an output to a word; stored zero points are less by one.
    Gptq,
    /// The same, with zero points as they are.
    GptqV2,
    /// Eight outputs of an input to a word, the even ones first.
    Awq,
}

const METHODS: &str = "fp8, fbgemm_fp8, compressed-tensors, gptq or awq";

/// `quantization_config` with its key, or the name that older compressed-tensors had for it.
fn described(json: &Value) -> Result<Option<(&'static str, &serde_json::Map<String, Value>)>> {
    let found = ["quantization_config", "compression_config"]
        .into_iter()
        .find_map(|key| Some((key, json.get(key).filter(|value| !value.is_null())?)));
    match found {
        None => Ok(None),
        Some((key, Value::Object(entries))) => Ok(Some((key, entries))),
        Some((key, value)) => Err(Error::config(key, "an object", value)),
    }
}

impl Int4Config {
    /// Reads `quantization_config`; `None` if the model is not quantised, or in another way.
    pub(super) fn from_json(json: &Value) -> Result<Option<Int4Config>> {
        let Some((key, entries)) = described(json)? else { return Ok(None) };
        let get = |key: &str| entries.get(key).and_then(Setting::from_json);
        let keys = Keys { prefix: format!("{key}."), get: &get };
        let packing = match keys.text_if_any("quant_method")?.as_deref() {
            Some("gptq") => {
                keys.must_be("is_marlin_format", false)?;
                keys.must_be("lm_head", false)?;
                if let Some(found) = entries.get("dynamic").filter(|found| !is_empty(found)) {
                    return Err(keys.wrong("dynamic", "nothing: all layers are packed alike", found));
                }
                let key =
                    if entries.contains_key("checkpoint_format") { "checkpoint_format" } else { "format" };
                only(&keys, key, &["gptq", "gptq_v2"])?;
                match keys.text_if_any(key)?.as_deref() {
                    Some("gptq_v2") => Int4Packing::GptqV2,
                    _ => Int4Packing::Gptq,
                }
            }
            Some("awq") => {
                only(&keys, "version", &["gemm", "GEMM"])?;
                keys.must_be("zero_point", true)?;
                Int4Packing::Awq
            }
            _ => return Ok(None),
        };
        // The second name is AWQ's own.
        let named = |names: [&'static str; 2]| {
            names.into_iter().find(|name| entries.contains_key(*name)).unwrap_or(names[0])
        };
        let bits = named(["bits", "w_bit"]);
        if keys.size_or(bits, 4)? != 4 {
            return Err(keys.wrong(bits, "4", keys.size(bits)?));
        }
        let size = named(["group_size", "q_group_size"]);
        let group = match keys.find(size) {
            Some(Setting::Whole(-1)) => None,
            _ => Some(keys.size_or(size, 128)?),
        };
        Ok(Some(Int4Config { packing, group }))
    }
}

/// Whether there is nothing in a value.
fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Object(entries) => entries.is_empty(),
        Value::Array(entries) => entries.is_empty(),
        _ => false,
    }
}

impl Fp8Config {
    /// Reads `quantization_config`; `None` if the model is not quantised.
    pub(super) fn from_json(json: &Value) -> Result<Option<Fp8Config>> {
        let Some((key, entries)) = described(json)? else { return Ok(None) };
        let get = |key: &str| entries.get(key).and_then(Setting::from_json);
        let keys = Keys { prefix: format!("{key}."), get: &get };
        let method = keys.text_if_any("quant_method")?;
        let block = match method.as_deref() {
            Some("fp8") => {
                only(&keys, "fmt", &["e4m3", "float8_e4m3fn"])?;
                match entries.get("weight_block_size") {
                    // What transformers takes for granted.
                    None => Some([128, 128]),
                    Some(size) => block(&keys, "weight_block_size", size)?,
                }
            }
            Some("fbgemm_fp8") => None,
            Some("compressed-tensors") => compressed(&keys, entries)?,
            Some("gptq" | "awq") => return Ok(None),
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
fn compressed(keys: &Keys<'_>, config: &serde_json::Map<String, Value>) -> Result<Option<[usize; 2]>> {
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
