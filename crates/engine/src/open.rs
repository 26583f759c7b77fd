//! From a path to an engine, and from text to a prompt.

use crate::adapters::{Adapter, AdapterPath};
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::models::{self, Config, LoadOptions};
use crate::models::{LoadProgress, Watched, WeightSource};
use crate::settings::EngineOptions;
use crate::text::{Chat, ChatTemplate, Tokenizer};
use crate::weights::{Checkpoint, Metadata};
use std::path::Path;
use warpsmith::{DType, Device};

/// How a model is opened. A `None` is derived from the model and the machine.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct OpenOptions {
    /// Where it runs; the CPU.
    pub device: Option<Device>,
    /// The type of weights and activations; f32 on the CPU, bf16 on a GPU.
    pub dtype: Option<DType>,
    /// The type of keys and values: that of the activations, or f8e4m3.
    pub kv_dtype: Option<DType>,
    /// Expands quantised matrices to `dtype` when they are loaded, instead of multiplying them as they are.
    pub expand: bool,
    /// The most tokens of a request [default: as many as the model has positions].
    pub max_positions: Option<usize>,
    /// Tokens that the page pool holds. On a GPU as many as `mem_fraction_static` leaves room for; on the CPU as many as two
    /// of the longest requests need, within a quarter of the free memory.
    pub pool_tokens: Option<usize>,
    /// On a GPU, the part of the memory that is free before the model is loaded that weights and pages together may take, from
    /// 0 to 1; 0.85. The rest is for activations, workspaces and logits.
    pub mem_fraction_static: Option<f64>,
    /// Tokens of a page, from 1 to 256; 16 on the CPU, 64 on a GPU.
    pub page_size: Option<usize>,
    /// LoRA adapters that requests can ask for by name. Decode steps are not captured in graphs then.
    pub adapters: Vec<AdapterPath>,
    /// The engine's options. Its pages, type and device follow from those above.
    pub engine: EngineOptions,
}

impl OpenOptions {
    /// Where the model runs.
    pub fn device(&self) -> Device {
        self.device.unwrap_or(Device::Cpu)
    }

    /// The type of weights and activations.
    pub fn dtype(&self) -> DType {
        self.dtype.unwrap_or(match self.device() {
            Device::Cpu => DType::F32,
            Device::Cuda(_) => DType::BF16,
        })
    }

    /// The engine's options, without the number of pages, which depends on the memory that a model leaves.
    pub(crate) fn for_device(&self) -> EngineOptions {
        EngineOptions {
            page_size: self.page_size(),
            dtype: self.dtype(),
            kv_dtype: self.kv_dtype,
            device: self.device(),
            // Which tokens have which adapter differs from step to step.
            fixed_decode: self.engine.fixed_decode && self.adapters.is_empty(),
            cuda_graphs: self.engine.cuda_graphs && self.adapters.is_empty(),
            ..self.engine.clone()
        }
    }

    /// The part of the memory that weights and pages may take.
    fn mem_fraction_static(&self) -> Result<f64> {
        let fraction = self.mem_fraction_static.unwrap_or(0.85);
        match fraction > 0.0 && fraction <= 1.0 {
            true => Ok(fraction),
            false => Err(Error::settings("mem_fraction_static", "a number above 0 and at most 1", fraction)),
        }
    }

    fn page_size(&self) -> usize {
        let default = if self.device() == Device::Cpu { 16 } else { 64 };
        self.page_size.unwrap_or(default)
    }
}

impl Engine {
    /// Opens a model: a GGUF file, or a folder with `config.json`. One without a tokenizer can be given token ids only.
    ///
    /// # Errors
    /// If the file cannot be read, or the model is not one that can be run.
    pub fn open(path: impl AsRef<Path>, options: OpenOptions) -> Result<Engine> {
        Engine::open_with(path, options, &mut |_| ())
    }

    /// As [`Engine::open`]; `progress` is told how far the weights are loaded.
    ///
    /// # Errors
    /// As [`Engine::open`].
    pub fn open_with(
        path: impl AsRef<Path>,
        options: OpenOptions,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Engine> {
        let checkpoint = models::open(path)?;
        let config = Config::from_checkpoint(&checkpoint)?;
        let total = checkpoint.tensors().map(|tensor| tensor.numel()).sum();
        let engine = Engine::with_weights(&config, &Watched::new(&checkpoint, total, progress), options)?;
        if !has_tokenizer(&checkpoint) {
            return Ok(engine);
        }
        let tokenizer = Tokenizer::from_checkpoint(&checkpoint)?;
        Ok(engine.with_text(tokenizer, ChatTemplate::from_checkpoint(&checkpoint)?))
    }

    /// An engine for a model with weights from anywhere. It can be given token ids only.
    ///
    /// # Errors
    /// If the model is not one that can be run.
    pub fn with_weights(config: &Config, weights: &dyn WeightSource, options: OpenOptions) -> Result<Engine> {
        let engine = options.for_device();
        let EngineOptions { dtype, device, .. } = engine;
        // Refused before anything is loaded.
        let kv_dtype = engine.kv_dtype()?;
        engine.validate_page_size()?;
        let fraction = options.mem_fraction_static()?;
        let load = LoadOptions {
            dtype,
            device,
            quantized: !options.expand,
            max_positions: options.max_positions,
            reserve_tokens: if device == Device::Cpu { 0 } else { options.engine.max_batch_tokens },
        };
        let adapters = open_adapters(&options.adapters)?;
        let before = device.memory()?.free;
        let model = models::load_adapted(config, weights, load, &adapters)?;
        let num_pages = num_pages(model.config(), &options, kv_dtype, (before, fraction))?;
        let engine = EngineOptions { num_pages, ..engine };
        let names = adapters.iter().map(|adapter| adapter.name().to_owned());
        Ok(Engine::new(model, engine)?.with_adapters(names))
    }

    /// Encodes a text as a prompt, with the start token that the model expects. Names of control tokens in it are text.
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

/// Opens adapters, each under a name of its own.
pub(crate) fn open_adapters(paths: &[AdapterPath]) -> Result<Vec<Adapter>> {
    let mut adapters: Vec<Adapter> = Vec::with_capacity(paths.len());
    for AdapterPath { name, path } in paths {
        if name.is_empty() || adapters.iter().any(|adapter| adapter.name() == name) {
            return Err(Error::settings("adapters", "a name of its own for each", format!("`{name}`")));
        }
        adapters.push(Adapter::open(name, path)?);
    }
    Ok(adapters)
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

/// The pages of the pool, for a model that is loaded by now. `before` is the memory that was free before, and `fraction` the
/// part of it that may be taken.
fn num_pages(
    config: &Config,
    options: &OpenOptions,
    kv_dtype: DType,
    (before, fraction): (u64, f64),
) -> Result<usize> {
    let (device, page_size) = (options.device(), options.page_size());
    if let Some(tokens) = options.pool_tokens {
        return Ok(tokens.div_ceil(page_size));
    }
    let page_bytes = config.kv_shape().page_bytes(page_size, kv_dtype).max(1) as u64;
    // Slots are numbers of 32 bits.
    let most = (i32::MAX as usize / page_size) as u64;
    if device == Device::Cpu {
        let wanted = (2 * config.max_positions).div_ceil(page_size) as u64;
        return Ok(wanted.min(device.memory()?.free / 4 / page_bytes).clamp(1, most) as usize);
    }
    // Memory freed while the model was loaded becomes free only when the device is done with it.
    device.synchronize()?;
    let pages = pages_within(fraction, before, device.memory()?.free, page_bytes)?;
    Ok(pages.min(most) as usize)
}

/// The pages that fit in a part of the memory that was free `before`, of which the model has left `after`.
fn pages_within(fraction: f64, before: u64, after: u64, page_bytes: u64) -> Result<u64> {
    let taken = before.saturating_sub(after);
    let allowed = (before as f64 * fraction) as u64;
    match allowed.saturating_sub(taken).min(after) / page_bytes {
        0 => {
            let expected = format!(
                "more than {:.3}, because the weights take {taken} of {before} bytes and a page takes {page_bytes}",
                taken as f64 / before.max(1) as f64
            );
            Err(Error::settings("mem_fraction_static", expected, fraction))
        }
        pages => Ok(pages),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_take_what_the_weights_leave_of_their_part() {
        assert_eq!(pages_within(0.5, 1000, 800, 10).unwrap(), 30);
        assert_eq!(pages_within(1.0, 1000, 300, 10).unwrap(), 30);
        for (fraction, after) in [(0.5, 500), (0.5, 400)] {
            let told = pages_within(fraction, 1000, after, 10).unwrap_err().to_string();
            assert!(told.contains("`mem_fraction_static`"), "{told}");
        }
        assert_eq!(OpenOptions::default().mem_fraction_static().unwrap(), 0.85);
        for fraction in [0.0, -0.1, 1.5, f64::NAN] {
            let options = OpenOptions { mem_fraction_static: Some(fraction), ..OpenOptions::default() };
            let told = options.mem_fraction_static().unwrap_err().to_string();
            assert!(told.contains("`mem_fraction_static`"), "{told}");
        }
    }
}
