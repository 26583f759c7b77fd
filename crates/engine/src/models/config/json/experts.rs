//! Mixtures of experts: Qwen3-MoE and Mixtral.

use super::super::ExpertsConfig;
use super::super::keys::Keys;
use crate::error::Result;
use serde_json::Value;

/// The experts of a family that has some.
pub fn read(
    json: &Value,
    keys: &Keys<'_>,
    family: &str,
    num_layers: usize,
    intermediate_size: usize,
) -> Result<Option<ExpertsConfig>> {
    let (count, used) = match family {
        "qwen3_moe" => (128, 8),
        "mixtral" => (8, 2),
        _ => return Ok(None),
    };
    // Two names of one key.
    keys.must_be_as("num_experts", "num_local_experts")?;
    let count = match keys.size_if_any("num_local_experts")? {
        Some(count) => count,
        None => keys.size_or("num_experts", count)?,
    };
    let used = keys.size_or("num_experts_per_tok", used)?;
    if used > count {
        return Err(keys.wrong("num_experts_per_tok", format!("at most the {count} experts"), used));
    }
    if family == "mixtral" {
        let dense_layers = Vec::new();
        return Ok(Some(ExpertsConfig { count, used, intermediate_size, normalize: true, dense_layers }));
    }
    let step = keys.size_or("decoder_sparse_step", 1)?;
    let listed = dense_layers(json, keys)?;
    let is_dense = |layer: &usize| listed.contains(layer) || !(layer + 1).is_multiple_of(step);
    Ok(Some(ExpertsConfig {
        count,
        used,
        intermediate_size: keys.size_or("moe_intermediate_size", 768)?,
        normalize: keys.flag_or("norm_topk_prob", false)?,
        dense_layers: (0..num_layers).filter(is_dense).collect(),
    }))
}

/// `mlp_only_layers`: numbers of layers. Those that the model has not do nothing.
fn dense_layers(json: &Value, keys: &Keys<'_>) -> Result<Vec<usize>> {
    const KEY: &str = "mlp_only_layers";
    let Some(found) = json.get(KEY).filter(|found| !found.is_null()) else { return Ok(Vec::new()) };
    let numbers = found.as_array().map(|layers| layers.iter().map(Value::as_u64).collect::<Option<Vec<_>>>());
    match numbers {
        Some(Some(numbers)) => Ok(numbers.into_iter().map(|number| number as usize).collect()),
        _ => {
            let got = keys.find(KEY).map_or_else(String::new, |found| found.to_string());
            Err(keys.wrong(KEY, "a list of numbers of layers", got))
        }
    }
}
