//! Files as a source of weights and configurations.

use super::Config;
use super::names::{Naming, WeightSource};
use crate::error::{Error, Result};
use crate::weights::{Checkpoint, Format, Metadata, Value};
use warpsmith::{DType, Tensor};

impl WeightSource for Checkpoint {
    fn naming(&self) -> Naming {
        match self.format() {
            Format::Gguf => Naming::Gguf,
            Format::Safetensors => Naming::Transformers,
        }
    }

    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        self.get(name).map(|tensor| tensor.shape().to_vec())
    }

    fn tensor(&self, name: &str, dtype: DType) -> Result<Tensor> {
        Ok(Checkpoint::tensor(self, name)?.to_tensor(dtype)?)
    }
}

impl Config {
    /// Reads the configuration that belongs to weights.
    ///
    /// # Errors
    /// As [`Config::from_json`].
    pub fn from_checkpoint(checkpoint: &Checkpoint) -> Result<Config> {
        match checkpoint.metadata() {
            Metadata::Config(config) => Config::from_json(&serde_json::Value::Object(config.clone())),
            Metadata::Gguf(keys) => {
                const TABLE: &str = "token_embd.weight";
                let shape = checkpoint.shape(TABLE);
                let Some(&[vocab, _]) = shape.as_deref() else {
                    return Err(Error::tensor(TABLE, "two dimensions", format!("{shape:?}")));
                };
                Config::from_gguf(&|key| keys.value(key).and_then(as_json), vocab)
            }
        }
    }
}

/// A single value as JSON. Arrays have no use in a configuration.
fn as_json(value: &Value) -> Option<serde_json::Value> {
    Some(match value {
        Value::U8(n) => (*n).into(),
        Value::I8(n) => (*n).into(),
        Value::U16(n) => (*n).into(),
        Value::I16(n) => (*n).into(),
        Value::U32(n) => (*n).into(),
        Value::I32(n) => (*n).into(),
        Value::U64(n) => (*n).into(),
        Value::I64(n) => (*n).into(),
        // The shortest decimal of an f32 is what was meant: 1e-5, not 9.99999974737875e-6. It rounds back to the same f32.
        Value::F32(n) => n.to_string().parse::<f64>().ok()?.into(),
        Value::F64(n) => (*n).into(),
        Value::Bool(value) => (*value).into(),
        Value::String(text) => text.as_str().into(),
        Value::Array(_) => return None,
    })
}
