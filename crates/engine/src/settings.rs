//! Engine settings and statistics.

use crate::error::{Error, Result};
use crate::models::Config;
use warpsmith::{DType, Device};

/// The settings of an engine.
#[derive(Debug, Clone, PartialEq)]
pub struct EngineOptions {
    /// Tokens of a page, from 1 to 256.
    pub page_size: usize,
    /// Pages of the pool.
    pub num_pages: usize,
    /// The most tokens of a step, at least `max_running`.
    pub max_batch_tokens: usize,
    /// The most tokens of one request in a step.
    pub max_chunk: usize,
    /// The most outputs that are generated at the same time.
    pub max_running: usize,
    /// Whether prefixes are kept for later requests.
    pub prefix_cache: bool,
    /// Tokens that end an output.
    pub end_ids: Vec<i32>,
    /// Tokens that exist; models may have more logits. All of the model's if `None`.
    pub vocab_size: Option<usize>,
    /// The type of the model's activations.
    pub dtype: DType,
    /// The type of keys and values: that of the activations if `None`, or f8e4m3, which takes less memory and loses
    /// precision.
    pub kv_dtype: Option<DType>,
    /// The device of the model.
    pub device: Device,
    /// On a GPU, whether decode steps are captured as CUDA graphs. It changes no bits.
    pub cuda_graphs: bool,
    /// Whether such a step is launched before the tokens of the one ahead of it are known, where possible. The host
    /// then works while the device does. It changes no bits.
    pub overlap: bool,
    /// Whether prefixes that sequences share are read once for all of them. It changes no bits.
    pub cascade: Cascade,
    /// On the CPU, whether decode steps run in the fixed memory that graphs have on a GPU: slower, for tests.
    pub fixed_decode: bool,
}

/// Where decode steps read a prefix once for all sequences that share it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Cascade {
    /// Nowhere.
    Off,
    /// On a GPU, where at least four sequences share at least 1024 tokens and that is expected to save time.
    #[default]
    WherePays,
    /// Wherever two sequences share a page: slower, for tests.
    Always,
}

impl Default for EngineOptions {
    fn default() -> Self {
        EngineOptions {
            page_size: 16,
            num_pages: 1024,
            max_batch_tokens: 1024,
            max_chunk: 512,
            max_running: 64,
            prefix_cache: true,
            end_ids: Vec::new(),
            vocab_size: None,
            dtype: DType::F32,
            kv_dtype: None,
            device: Device::Cpu,
            cuda_graphs: true,
            overlap: true,
            cascade: Cascade::WherePays,
            fixed_decode: false,
        }
    }
}

impl EngineOptions {
    /// Whether decode steps have memory of their own.
    pub(crate) fn has_fixed_decode(&self) -> bool {
        match self.device {
            Device::Cpu => self.fixed_decode,
            Device::Cuda(_) => self.cuda_graphs,
        }
    }

    /// The type of keys and values.
    pub(crate) fn kv_dtype(&self) -> Result<DType> {
        let dtype = self.kv_dtype.unwrap_or(self.dtype);
        if dtype != self.dtype && dtype != DType::F8E4M3 {
            let expected = format!("{}, as the activations, or {}", self.dtype, DType::F8E4M3);
            return Err(Error::settings("kv_dtype", expected, dtype));
        }
        Ok(dtype)
    }

    /// Whether pages have a size that kernels know.
    pub(crate) fn validate_page_size(&self) -> Result<()> {
        count("page_size", self.page_size, 1, 256)
    }

    /// Whether all options are in their ranges.
    pub(crate) fn validate(&self, config: &Config) -> Result<()> {
        self.validate_page_size()?;
        // Slots are numbers of 32 bits.
        count("num_pages", self.num_pages, 1, i32::MAX as usize / self.page_size)?;
        count("max_running", self.max_running, 1, self.max_batch_tokens)?;
        count("max_chunk", self.max_chunk, 1, self.max_batch_tokens)?;
        count("vocab_size", self.vocab_size.unwrap_or(1), 1, config.vocab_size)
    }
}

fn count(what: &'static str, value: usize, least: usize, most: usize) -> Result<()> {
    match (least..=most).contains(&value) {
        true => Ok(()),
        false => Err(Error::settings(what, format!("a number from {least} to {most}"), value)),
    }
}

/// What the engine has done so far, and what it is doing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stats {
    /// Steps that computed something.
    pub steps: u64,
    /// Tokens that were computed in them.
    pub computed_tokens: u64,
    /// Tokens that were generated.
    pub generated_tokens: u64,
    /// CUDA graphs that were captured.
    pub graphs: usize,
    /// Steps that were launches of a graph.
    pub graph_launches: u64,
    /// Steps in which prefixes were read once for all that share them.
    pub cascade_steps: u64,
    /// Steps that were launched before the tokens of the one ahead of them were known.
    pub steps_ahead: u64,
    /// How often an output lost its pages.
    pub preemptions: usize,
    /// Outputs that are being generated.
    pub running: usize,
    /// Outputs that wait.
    pub waiting: usize,
    /// Available pages.
    pub available_pages: usize,
    /// Pages that hold prefixes.
    pub cached_pages: usize,
}
