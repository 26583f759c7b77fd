//! From a path to an engine, and from text to a prompt.

use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::kv::KvCache;
use crate::models::{self, Config, LoadOptions};
use crate::settings::EngineOptions;
use crate::text::{Chat, ChatTemplate, Tokenizer};
use crate::weights::{Checkpoint, Metadata};
use std::path::Path;
use warpsmith::{DType, Device};

/// How a model is opened. What is `None` follows from the model and the machine.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct OpenOptions {
    /// Where it runs; the CPU.
    pub device: Option<Device>,
    /// The type of weights, activations, keys and values; f32 on the CPU, bf16 on a GPU.
    pub dtype: Option<DType>,
    /// Expands quantised matrices to `dtype` when they are loaded, instead of multiplying them as they are.
    pub expand: bool,
    /// The most tokens of a request; the model's.
    pub max_positions: Option<usize>,
    /// Tokens that the page pool holds; as many as two of the longest requests need, within a quarter of the free memory.
    pub pool_tokens: Option<usize>,
    /// The engine's options. Its pages, type and device follow from those above.
    pub engine: EngineOptions,
}

impl Engine {
    /// Opens a model: a GGUF file, or a folder with `config.json`. One without a tokenizer can be given token ids only.
    ///
    /// # Errors
    /// If the file cannot be read, or the model is not one that can be run.
    pub fn open(path: impl AsRef<Path>, options: OpenOptions) -> Result<Engine> {
        let checkpoint = Checkpoint::open(path)?;
        let config = Config::from_checkpoint(&checkpoint)?;
        let device = options.device.unwrap_or(Device::Cpu);
        let dtype = options.dtype.unwrap_or(match device {
            Device::Cpu => DType::F32,
            Device::Cuda(_) => DType::BF16,
        });
        let load =
            LoadOptions { dtype, device, quantized: !options.expand, max_positions: options.max_positions };
        let model = models::load(&config, &checkpoint, load)?;
        let engine = EngineOptions {
            num_pages: num_pages(model.config(), &options, dtype, device)?,
            dtype,
            device,
            ..options.engine
        };
        let engine = Engine::new(model, engine)?;
        if !has_tokenizer(&checkpoint) {
            return Ok(engine);
        }
        let tokenizer = Tokenizer::from_checkpoint(&checkpoint)?;
        Ok(engine.with_text(tokenizer, ChatTemplate::from_checkpoint(&checkpoint)?))
    }

    /// The prompt that a text is, with the token that the model wants in front. Names of control tokens in it are text.
    ///
    /// # Errors
    /// If the engine has no tokenizer.
    pub fn encode(&self, text: &str) -> Result<Vec<i32>> {
        let tokenizer = self.tokenizer().ok_or_else(no_tokenizer)?;
        let ids = tokenizer.first().into_iter().chain(tokenizer.encode(text)?);
        Ok(ids.map(|id| id as i32).collect())
    }

    /// The prompt that asks the model to go on with a chat.
    ///
    /// # Errors
    /// If the engine has no tokenizer or the model no chat template, or the template refuses the messages.
    pub fn encode_chat(&self, chat: &Chat) -> Result<Vec<i32>> {
        let tokenizer = self.tokenizer().ok_or_else(no_tokenizer)?;
        let Some(template) = self.template() else {
            return Err(Error::request("messages", "a model with a chat template", "one without"));
        };
        Ok(tokenizer.encode_chat(template, chat)?.ids.into_iter().map(|id| id as i32).collect())
    }
}

fn has_tokenizer(checkpoint: &Checkpoint) -> bool {
    match checkpoint.metadata() {
        Metadata::Gguf(keys) => keys.value("tokenizer.ggml.model").is_some(),
        Metadata::Config(_) => checkpoint.path().join("tokenizer.json").is_file(),
    }
}

fn no_tokenizer() -> Error {
    Error::request("prompt", "token ids, because the engine has no tokenizer", "text")
}

fn num_pages(config: &Config, options: &OpenOptions, dtype: DType, device: Device) -> Result<usize> {
    let page_size = options.engine.page_size.max(1);
    if let Some(tokens) = options.pool_tokens {
        return Ok(tokens.div_ceil(page_size));
    }
    let wanted = (2 * config.max_positions).div_ceil(page_size);
    let page_bytes = KvCache::page_bytes(config, page_size, dtype).max(1) as u64;
    Ok(wanted.min((device.memory()?.free / 4 / page_bytes) as usize).max(1))
}
