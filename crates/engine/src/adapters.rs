//! LoRA adapters as PEFT writes them: a folder with `adapter_config.json` and `adapter_model.safetensors`.
//!
//! An adapter adds `scaling * B · (A · x)` to the products of some matrices. What its configuration asks for beyond that is
//! refused by name when it is opened, before anything is loaded.

use crate::error::{Error, Result};
use crate::weights::Checkpoint;
use serde_json::{Map, Value};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use warpsmith::{DType, Tensor};

const CONFIG: &str = "adapter_config.json";
const WEIGHTS: &str = "adapter_model.safetensors";
/// In front of the names of all modules.
const WRAPPER: &str = "base_model.model.";
/// The largest configuration that is read.
const MAX_CONFIG: u64 = 16 << 20;
/// The largest rank: larger adapters are no smaller than what they adapt.
const MAX_RANK: usize = 1024;

/// What only an adapter of another kind has. Each may be absent, null, false or empty.
const OTHER_KINDS: [&str; 10] = [
    "use_dora",
    "use_qalora",
    "lora_bias",
    "modules_to_save",
    "trainable_token_indices",
    "layer_replication",
    "target_parameters",
    "megatron_config",
    "alora_invocation_tokens",
    "arrow_config",
];

/// The name under which requests ask for an adapter, and its folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AdapterPath {
    /// The name.
    pub name: String,
    /// The folder.
    pub path: PathBuf,
}

/// An opened adapter.
#[derive(Debug)]
pub struct Adapter {
    name: String,
    folder: PathBuf,
    scaling: Scaling,
    weights: Checkpoint,
    /// The tensors of each module that it adapts, by the module's name in transformers.
    modules: BTreeMap<String, Names>,
    /// The modules that a model has asked for.
    used: RefCell<BTreeSet<String>>,
}

/// The names of a module's two matrices.
#[derive(Debug, Default)]
struct Names {
    a: Option<String>,
    b: Option<String>,
}

/// The two matrices that adapt another: `out += b · (a · x)`.
pub(crate) struct Pair {
    /// `[rank, in]`.
    pub a: Tensor,
    /// `[out, rank]`, with the adapter's scaling in it.
    pub b: Tensor,
}

/// What products with an adapter's matrices are multiplied by.
#[derive(Debug)]
struct Scaling {
    alpha: f64,
    /// Divide by the root of the rank instead of the rank.
    by_root: bool,
    /// Others for modules whose names end so.
    patterns: Vec<(String, f64)>,
}

impl Scaling {
    fn of(&self, module: &str, rank: usize) -> f64 {
        let ends =
            |end: &str| module.strip_suffix(end).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'));
        let alpha = self.patterns.iter().find(|(end, _)| ends(end)).map_or(self.alpha, |(_, alpha)| *alpha);
        alpha / if self.by_root { (rank as f64).sqrt() } else { rank as f64 }
    }
}

impl Adapter {
    /// Opens an adapter's folder.
    ///
    /// # Errors
    /// If a file cannot be read, or the adapter is of a kind that is not supported.
    pub fn open(name: &str, folder: impl AsRef<Path>) -> Result<Adapter> {
        let folder = folder.as_ref();
        let scaling = read_config(folder).map_err(|error| error.in_file(Some(&folder.join(CONFIG))))?;
        let weights = Checkpoint::open(folder.join(WEIGHTS))?;
        let mut modules: BTreeMap<String, Names> = BTreeMap::new();
        for tensor in weights.tensors() {
            let full = tensor.name();
            let bare = full.strip_prefix(WRAPPER).unwrap_or(full);
            // PEFT leaves the adapter's own name out where it is the default; other programs do not.
            let split =
                [".lora_A.weight", ".lora_A.default.weight"].iter().find_map(|end| bare.strip_suffix(end));
            let (module, is_a) = match split {
                Some(module) => (module, true),
                None => {
                    let ends = [".lora_B.weight", ".lora_B.default.weight"];
                    match ends.iter().find_map(|end| bare.strip_suffix(end)) {
                        Some(module) => (module, false),
                        None => {
                            let expected = "`lora_A.weight` or `lora_B.weight` of a linear layer";
                            let error = Error::tensor(full, expected, "a tensor of another kind of adapter");
                            return Err(error.in_file(Some(&folder.join(WEIGHTS))));
                        }
                    }
                }
            };
            let names = modules.entry(module.to_owned()).or_default();
            *(if is_a { &mut names.a } else { &mut names.b }) = Some(full.to_owned());
        }
        if modules.is_empty() {
            let error = Error::tensor("lora_A.weight", "tensors of an adapter", "a file without any");
            return Err(error.in_file(Some(&folder.join(WEIGHTS))));
        }
        let (name, folder) = (name.to_owned(), folder.to_owned());
        Ok(Adapter { name, folder, scaling, weights, modules, used: RefCell::default() })
    }

    /// The name under which requests ask for it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether it adapts a module.
    pub(crate) fn adapts(&self, module: &str) -> bool {
        self.modules.contains_key(module)
    }

    /// The matrices that adapt a module of this many outputs and inputs, on the CPU in `dtype`.
    pub(crate) fn pair(&self, module: &str, [out, input]: [usize; 2], dtype: DType) -> Result<Option<Pair>> {
        let Some(names) = self.modules.get(module) else { return Ok(None) };
        self.used.borrow_mut().insert(module.to_owned());
        let read = |name: &Option<String>, end: &str| -> Result<Tensor> {
            let Some(name) = name else {
                return Err(self.wrong(
                    &format!("{module}.{end}"),
                    "a tensor, as there is its other half",
                    "nothing",
                ));
            };
            Ok(self.weights.tensor(name)?.to_tensor(DType::F32)?)
        };
        let (a, b) = (read(&names.a, "lora_A.weight")?, read(&names.b, "lora_B.weight")?);
        let rank = a.shape().first().copied().unwrap_or(0);
        if a.shape() != [rank, input] || !(1..=MAX_RANK).contains(&rank) {
            let expected =
                format!("shape [rank, {input}] with a rank from 1 to {MAX_RANK}, as the model's layer");
            return Err(self.wrong(&format!("{module}.lora_A.weight"), expected, format!("{:?}", a.shape())));
        }
        if b.shape() != [out, rank] {
            let expected = format!("shape [{out}, {rank}], as the model's layer and lora_A");
            return Err(self.wrong(&format!("{module}.lora_B.weight"), expected, format!("{:?}", b.shape())));
        }
        let scaling = self.scaling.of(module, rank) as f32;
        let scaled: Vec<f32> = b.to_vec::<f32>()?.iter().map(|x| x * scaling).collect();
        let b = Tensor::from_slice(&scaled, &[out, rank], warpsmith::Device::Cpu)?;
        Ok(Some(Pair { a: a.to_dtype(dtype)?, b: b.to_dtype(dtype)? }))
    }

    /// Refuses an adapter with modules that the model does not have: it belongs to another model.
    pub(crate) fn refuse_unused(&self, family: &str) -> Result<()> {
        let used = self.used.borrow();
        self.refuse_other(family, |module| used.contains(module))
    }

    /// Refuses an adapter of modules for which `is_known` does not hold.
    pub(crate) fn refuse_other(&self, family: &str, is_known: impl Fn(&str) -> bool) -> Result<()> {
        match self.modules.keys().find(|module| !is_known(module)) {
            Some(module) => {
                let expected =
                    format!("a projection of attention or of a feed-forward layer of this {family}");
                Err(self.wrong(
                    &format!("{module}.lora_A.weight"),
                    expected,
                    "a module that cannot be adapted",
                ))
            }
            None => Ok(()),
        }
    }

    fn wrong(&self, tensor: &str, expected: impl Into<String>, got: impl ToString) -> Error {
        Error::tensor(tensor, expected, got).in_file(Some(&self.folder.join(WEIGHTS)))
    }
}

/// What the configuration says, as far as it is not in the tensors.
fn read_config(folder: &Path) -> Result<Scaling> {
    let path = folder.join(CONFIG);
    let unreadable = |why: String| Error::config(CONFIG, "a file with the adapter's configuration", why);
    let size = std::fs::metadata(&path).map_err(|error| unreadable(error.to_string()))?.len();
    if size > MAX_CONFIG {
        return Err(unreadable(format!("{size} bytes")));
    }
    let text = std::fs::read_to_string(&path).map_err(|error| unreadable(error.to_string()))?;
    let config: Map<String, Value> = serde_json::from_str(&text)
        .map_err(|error| unreadable(format!("JSON that cannot be read: {error}")))?;
    let is = |key: &str, only: &str| match config.get(key) {
        None | Some(Value::Null) => Ok(()),
        Some(Value::String(value)) if value.eq_ignore_ascii_case(only) => Ok(()),
        Some(other) => Err(Error::config(key, format!("`{only}`"), other)),
    };
    if config.get("peft_type").is_none() {
        return Err(Error::config("peft_type", "`LORA`", "nothing"));
    }
    is("peft_type", "LORA")?;
    is("task_type", "CAUSAL_LM")?;
    is("bias", "none")?;
    for key in OTHER_KINDS {
        let is_unset = match config.get(key) {
            None | Some(Value::Null | Value::Bool(false)) => true,
            Some(Value::Array(items)) => items.is_empty(),
            Some(Value::Object(items)) => items.is_empty(),
            Some(_) => false,
        };
        if !is_unset {
            return Err(Error::config(key, "nothing: plain LoRA is what is supported", &config[key]));
        }
    }
    let number = |key: &str, value: &Value| match value.as_f64().filter(|number| number.is_finite()) {
        Some(number) => Ok(number),
        None => Err(Error::config(key, "a finite number", value)),
    };
    let alpha = config.get("lora_alpha").map_or(Ok(8.0), |value| number("lora_alpha", value))?;
    let by_root = match config.get("use_rslora") {
        None | Some(Value::Null) => false,
        Some(Value::Bool(by_root)) => *by_root,
        Some(other) => return Err(Error::config("use_rslora", "true or false", other)),
    };
    let mut patterns = Vec::new();
    match config.get("alpha_pattern") {
        None | Some(Value::Null) => (),
        Some(Value::Object(all)) => {
            for (end, value) in all {
                // They are regular expressions; those in use are plain ends of names.
                let plain = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '.';
                if end.is_empty() || !end.chars().all(plain) {
                    return Err(Error::config(
                        "alpha_pattern",
                        "names of modules or their ends",
                        format!("`{end}`"),
                    ));
                }
                patterns.push((end.clone(), number("alpha_pattern", value)?));
            }
        }
        Some(other) => return Err(Error::config("alpha_pattern", "an object", other)),
    }
    Ok(Scaling { alpha, by_root, patterns })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(text: &str) -> Result<Scaling> {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join(CONFIG), text).unwrap();
        read_config(folder.path())
    }

    #[test]
    fn scalings_follow_alpha_rank_and_patterns() {
        let plain = config(r#"{"peft_type": "LORA", "lora_alpha": 16, "r": 8, "bias": "none"}"#).unwrap();
        assert_eq!(plain.of("model.layers.0.self_attn.q_proj", 8), 2.0);
        let text =
            r#"{"peft_type": "LORA", "lora_alpha": 16, "use_rslora": true, "alpha_pattern": {"q_proj": 4}}"#;
        let other = config(text).unwrap();
        assert_eq!(other.of("model.layers.0.self_attn.q_proj", 4), 2.0);
        assert_eq!(other.of("model.layers.0.self_attn.eq_proj", 4), 8.0);
        assert_eq!(config(r#"{"peft_type": "LORA"}"#).unwrap().of("x", 4), 2.0);
    }

    #[test]
    fn adapters_of_other_kinds_are_refused_by_key() {
        for (key, value) in [
            ("use_dora", "true"),
            ("modules_to_save", r#"["lm_head"]"#),
            ("lora_bias", "true"),
            ("bias", r#""all""#),
            ("task_type", r#""SEQ_CLS""#),
            ("lora_alpha", r#""16""#),
            ("use_rslora", "1"),
            ("layer_replication", "[[0, 4]]"),
            ("alpha_pattern", r#"{"(a|b)": 1}"#),
        ] {
            let told =
                config(&format!(r#"{{"peft_type": "LORA", "{key}": {value}}}"#)).unwrap_err().to_string();
            assert!(told.contains(&format!("`{key}`")), "{told}");
        }
        for text in ["", "[]", "{}", r#"{"peft_type": "LOHA"}"#] {
            let told = config(text).unwrap_err().to_string();
            assert!(told.contains("adapter_config.json") || told.contains("`peft_type`"), "{told}");
        }
    }
}
