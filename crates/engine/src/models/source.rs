//! Where weights and configurations come from: files, or tensors in memory.

use super::Config;
use super::names::Naming;
use crate::error::{Error, Result};
use crate::weights::{Checkpoint, Encoding, Format, Metadata, Quantization};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use warpsmith::ops::QuantFormat;
use warpsmith::{DType, Tensor};

/// A source of tensors by name.
pub trait WeightSource {
    /// How its tensors are named.
    fn naming(&self) -> Naming;

    /// The sizes of a tensor, row-major; `None` if there is none of this name.
    fn shape(&self, name: &str) -> Option<Vec<usize>>;

    /// The names of all tensors.
    fn names(&self) -> Vec<String>;

    /// The type of a tensor's numbers as they are stored; `None` if it consists of blocks, or there is none of this name.
    fn stored_dtype(&self, name: &str) -> Option<DType>;

    /// The file that a tensor is in, or should be in, for messages.
    fn file(&self, _: &str) -> Option<&Path> {
        None
    }

    /// The blocks of a quantised tensor as they are, `[rows, bytes of a row]`; `None` if it is not quantised.
    ///
    /// # Errors
    /// If there is none of this name, or it cannot be read.
    fn blocks(&self, name: &str) -> Result<Option<(Tensor, QuantFormat)>>;

    /// A tensor on the CPU, converted to `dtype`.
    ///
    /// # Errors
    /// If there is none of this name, or it cannot be converted.
    fn tensor(&self, name: &str, dtype: DType) -> Result<Tensor>;

    /// Gives back the memory of what was read, where it can be read again.
    fn release(&self) {}
}

/// Tensors in memory, under the names transformers gives them.
impl WeightSource for HashMap<String, Tensor> {
    fn naming(&self) -> Naming {
        Naming::Transformers
    }

    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        self.get(name).map(|tensor| tensor.shape().to_vec())
    }

    fn names(&self) -> Vec<String> {
        self.keys().cloned().collect()
    }

    fn stored_dtype(&self, name: &str) -> Option<DType> {
        self.get(name).map(Tensor::dtype)
    }

    fn blocks(&self, _: &str) -> Result<Option<(Tensor, QuantFormat)>> {
        Ok(None)
    }

    fn tensor(&self, name: &str, dtype: DType) -> Result<Tensor> {
        let tensor = self.get(name).ok_or_else(|| Error::tensor(name, "a tensor", "nothing"))?;
        Ok(if tensor.dtype() == dtype { tensor.clone() } else { tensor.to_dtype(dtype)? })
    }
}

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

    fn names(&self) -> Vec<String> {
        self.tensors().map(|tensor| tensor.name().to_owned()).collect()
    }

    fn stored_dtype(&self, name: &str) -> Option<DType> {
        match self.get(name)?.encoding() {
            Encoding::Plain(dtype) => Some(dtype),
            Encoding::Quantized(_) => None,
        }
    }

    fn file(&self, name: &str) -> Option<&Path> {
        Some(self.get(name).map_or(self.path(), |tensor| tensor.file()))
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

    fn release(&self) {
        self.release_memory();
    }
}

/// The formats, under the names of both crates.
const FORMATS: [(Quantization, QuantFormat); 13] = [
    (Quantization::Q4_0, QuantFormat::Q4_0),
    (Quantization::Q4_1, QuantFormat::Q4_1),
    (Quantization::Q5_0, QuantFormat::Q5_0),
    (Quantization::Q5_1, QuantFormat::Q5_1),
    (Quantization::Q8_0, QuantFormat::Q8_0),
    (Quantization::Q4K, QuantFormat::Q4_K),
    (Quantization::Q5K, QuantFormat::Q5_K),
    (Quantization::Q6K, QuantFormat::Q6_K),
    (Quantization::Q2K, QuantFormat::Q2_K),
    (Quantization::Q3K, QuantFormat::Q3_K),
    (Quantization::Iq4Nl, QuantFormat::IQ4_NL),
    (Quantization::Iq4Xs, QuantFormat::IQ4_XS),
    (Quantization::Mxfp4, QuantFormat::MXFP4),
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

/// Opens the files of a model. Its family and the size of its heads are judged before its tensors are looked at.
///
/// # Errors
/// If there are no such models here, or the files cannot be read.
pub fn open(path: impl AsRef<Path>) -> Result<Checkpoint> {
    let path = path.as_ref();
    Checkpoint::open_judged(path, |metadata| {
        Config::judge(metadata).map_err(|error| error.in_file(Some(&described_in(path))))
    })
}

impl Config {
    /// Reads the configuration that belongs to weights.
    ///
    /// # Errors
    /// As [`Config::from_json`].
    pub fn from_checkpoint(checkpoint: &Checkpoint) -> Result<Config> {
        let config = match checkpoint.metadata() {
            Metadata::Config(config) => Config::from_json(&serde_json::Value::Object(config.clone())),
            Metadata::Gguf(keys) => {
                const TABLE: &str = "token_embd.weight";
                Config::judge(checkpoint.metadata()).and_then(|()| {
                    let shape = checkpoint.shape(TABLE);
                    let Some(&[vocab, _]) = shape.as_deref() else {
                        return Err(Error::tensor(TABLE, "two dimensions", format!("{shape:?}")));
                    };
                    Config::from_gguf(&|key| keys.value(key).cloned(), vocab)
                })
            }
        };
        config.map_err(|error| error.in_file(Some(&described_in(checkpoint.path()))))
    }
}

/// The file with the configuration of a model that was opened by this path.
fn described_in(path: &Path) -> PathBuf {
    if path.is_dir() { path.join("config.json") } else { path.into() }
}
