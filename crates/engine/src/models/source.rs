//! Files as a source of weights and configurations.

use super::Config;
use super::names::{Naming, WeightSource};
use crate::error::{Error, Result};
use crate::weights::{Checkpoint, Encoding, Format, Metadata, Quantization, Value};
use warpsmith::ops::QuantFormat;
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

    fn blocks(&self, name: &str) -> Result<Option<(Tensor, QuantFormat)>> {
        let tensor = Checkpoint::tensor(self, name)?;
        match tensor.quantization() {
            Some(quantization) => Ok(Some((tensor.raw()?, format_of(quantization)))),
            None => Ok(None),
        }
    }

    fn tensor(&self, name: &str, dtype: DType) -> Result<Tensor> {
        Ok(Checkpoint::tensor(self, name)?.to_tensor(dtype)?)
    }

    fn dtype(&self, name: &str) -> Option<DType> {
        match self.get(name)?.encoding() {
            Encoding::Plain(dtype) => Some(dtype),
            Encoding::Quantized(_) => None,
        }
    }

    fn release(&self) {
        self.release_memory();
    }
}

/// The formats, under the names of both crates.
const FORMATS: [(Quantization, QuantFormat); 8] = [
    (Quantization::Q4_0, QuantFormat::Q4_0),
    (Quantization::Q4_1, QuantFormat::Q4_1),
    (Quantization::Q5_0, QuantFormat::Q5_0),
    (Quantization::Q5_1, QuantFormat::Q5_1),
    (Quantization::Q8_0, QuantFormat::Q8_0),
    (Quantization::Q4K, QuantFormat::Q4_K),
    (Quantization::Q5K, QuantFormat::Q5_K),
    (Quantization::Q6K, QuantFormat::Q6_K),
];

/// The library's name of a format.
fn format_of(quantization: Quantization) -> QuantFormat {
    let (_, format) = FORMATS.iter().find(|(of, _)| *of == quantization).expect("every format is listed");
    *format
}

/// The weights' name of a format.
pub(super) fn quantization_of(format: QuantFormat) -> Quantization {
    let (quantization, _) = FORMATS.iter().find(|(_, of)| *of == format).expect("every format is listed");
    *quantization
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
