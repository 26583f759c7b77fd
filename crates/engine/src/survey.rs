//! What must be compiled before a model can run on a GPU, found without one.
//!
//! The model is loaded and its passes run in a survey of the library's calls: nothing is computed, tensors are memory
//! that is never touched, and every call says which kernels it would need. So the result follows from the code that
//! runs the model, for all forms of captured steps and prompts of all lengths.

use crate::batch::{Batch, Chunk};
use crate::decode::{Decode, Sizes, widths};
use crate::error::Result;
use crate::kv::KvCache;
use crate::models::WeightSource;
use crate::models::names::Naming;
use crate::models::{self, Config, LoadOptions, Model};
use crate::open::{OpenOptions, open_adapters};
use crate::request::SamplingParams;
use crate::sampler::{self, Draw, History};
use crate::settings::EngineOptions;
use warpsmith::device::DeviceInfo;
use warpsmith::op::survey::{Needed, survey};
use warpsmith::ops::QuantFormat;
use warpsmith::{DType, Device, Stream, Tensor};

/// Tokens of prompts that are tried behind each length of cached beginnings.
const AFTER_CACHED: [usize; 8] = [1, 2, 8, 16, 33, 64, 128, 512];

/// The kernels that a model needs on the GPU that `info` describes, if it is opened with `options` there.
///
/// # Errors
/// If the model is not one that can be run there.
pub fn needed_kernels(
    config: &Config,
    weights: &dyn WeightSource,
    options: &OpenOptions,
    info: DeviceInfo,
) -> Result<Vec<Needed>> {
    let options = OpenOptions { device: Some(Device::Cuda(0)), ..options.clone() };
    let (result, needed) = survey(info, || run_all(config, weights, &options))?;
    result.map(|()| needed)
}

/// Everything that an engine does with a model, in all forms.
fn run_all(config: &Config, weights: &dyn WeightSource, options: &OpenOptions) -> Result<()> {
    let engine = options.for_device();
    let load = LoadOptions {
        dtype: engine.dtype,
        // Tensors of the host stand for those of the GPU.
        device: Device::Cpu,
        quantized: !options.expand,
        max_positions: options.max_positions,
        reserve_tokens: engine.max_batch_tokens,
    };
    let adapters = open_adapters(&options.adapters)?;
    let model = models::load_adapted(config, &Outline(weights), load, &adapters)?;
    engine.validate(model.config())?;
    let max_pages = model.config().max_positions.div_ceil(engine.page_size);
    let kv_dtype = engine.kv_dtype()?;
    let kv =
        KvCache::new(model.config().kv_shape(), max_pages.max(2), engine.page_size, kv_dtype, Device::Cpu)?;
    let columns = model.config().vocab_size;
    // Sequences without an adapter, and with each.
    let adapters = std::iter::once(None).chain((0..adapters.len()).map(Some)).collect();
    let mut passes = Passes { model, kv, columns, max_pages, engine, adapters };
    passes.run()
}

/// A model with what its passes need.
struct Passes {
    model: Box<dyn Model>,
    kv: KvCache,
    columns: usize,
    max_pages: usize,
    engine: EngineOptions,
    adapters: Vec<Option<usize>>,
}

impl Passes {
    fn run(&mut self) -> Result<()> {
        let EngineOptions { page_size, max_running, max_batch_tokens, max_chunk, .. } = self.engine;
        let max_positions = self.model.config().max_positions;
        self.kv.copy_pages(&[[0, 1]], &Stream::Host)?;
        let sizes = Sizes {
            max_rows: max_running,
            max_pages: self.max_pages,
            page_size,
            columns: self.columns,
            vocab: self.columns,
            cascade: self.engine.cascade,
        };
        Decode::new(sizes, &Stream::Host)?.run_forms(&mut *self.model, &mut self.kv)?;
        for tokens in 1..=max_chunk.min(max_positions) {
            self.pass(&[(0, tokens)])?;
        }
        // Several prompts in one step, whose products have as many rows as all of them together.
        for tokens in 2..=max_batch_tokens.min(max_positions) {
            self.pass(&[(0, tokens / 2), (0, tokens - tokens / 2)])?;
        }
        for width in widths(page_size, self.max_pages) {
            let length = (width * page_size).min(max_positions);
            for tokens in AFTER_CACHED.into_iter().filter(|&tokens| tokens <= length.min(max_chunk)) {
                self.pass(&[(length - tokens, tokens)])?;
                self.pass(&[(length - tokens, tokens), (0, 1)])?;
            }
        }
        for rows in 1..=max_running {
            self.pass(&vec![(1, 1); rows])?;
            self.pass(&vec![(0, 2); rows])?;
            self.choose(rows)?;
        }
        Ok(())
    }

    /// A pass for sequences with this many tokens before, and this many new ones, with each adapter. A step with several
    /// adapters needs what each needs for its own tokens.
    fn pass(&mut self, sequences: &[(usize, usize)]) -> Result<()> {
        for adapter in self.adapters.clone() {
            self.pass_with(sequences, adapter)?;
        }
        Ok(())
    }

    fn pass_with(&mut self, sequences: &[(usize, usize)], adapter: Option<usize>) -> Result<()> {
        let longest = sequences.iter().map(|(start, count)| start + count).max().unwrap_or(0);
        let (ids, pages) = (vec![0; longest], vec![0; self.max_pages]);
        let chunk = |&(start, count): &(usize, usize)| Chunk {
            tokens: &ids[..count],
            start,
            pages: &pages[..(start + count).div_ceil(self.engine.page_size)],
            wants_logits: true,
            adapter,
        };
        let chunks: Vec<Chunk<'_>> = sequences.iter().map(chunk).collect();
        let batch = Batch::new(&chunks, self.engine.page_size, &Stream::Host)?;
        let mut logits = Tensor::zeros(&[batch.num_logits(), self.columns], DType::F32, Device::Cpu)?;
        self.model.forward(&batch, &mut self.kv, logits.view_mut())
    }

    /// Chooses tokens from this many rows, in every way.
    fn choose(&self, rows: usize) -> Result<()> {
        let logits = Tensor::zeros(&[rows, self.columns], DType::F32, Device::Cpu)?;
        let plain = SamplingParams::greedy();
        // Log-probabilities need no kernel.
        let full = SamplingParams { logit_bias: vec![(0, 1.0)], ..SamplingParams::greedy() };
        let history = History::default();
        // Biases and masks of grammars, in every combination.
        let mask = [u32::MAX];
        let ways = [(&plain, None), (&full, None), (&plain, Some(&mask[..])), (&full, Some(&mask[..]))];
        for (params, allowed) in ways {
            // Each its own row, and all the first.
            for shared in [false, true] {
                let draw = |i| Draw {
                    row: if shared { 0 } else { i },
                    params,
                    seed: 0,
                    position: 0,
                    history: &history,
                    constrained: allowed.is_some(),
                    allowed,
                };
                let draws: Vec<Draw<'_>> = (0..rows).map(draw).collect();
                sampler::choose(logits.view(), &draws, self.columns, &Stream::Host)?;
            }
        }
        Ok(())
    }
}

/// The names and shapes of weights. Their matrices are never read.
struct Outline<'a>(&'a dyn WeightSource);

impl WeightSource for Outline<'_> {
    fn naming(&self) -> Naming {
        self.0.naming()
    }

    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        self.0.shape(name)
    }

    fn names(&self) -> Vec<String> {
        self.0.names()
    }

    fn stored_dtype(&self, name: &str) -> Option<DType> {
        self.0.stored_dtype(name)
    }

    fn file(&self, name: &str) -> Option<&std::path::Path> {
        self.0.file(name)
    }

    fn blocks(&self, name: &str) -> Result<Option<(Tensor, QuantFormat)>> {
        self.0.blocks(name)
    }

    fn tensor(&self, name: &str, dtype: DType) -> Result<Tensor> {
        match self.0.shape(name) {
            Some(shape) if shape.len() > 1 => Ok(Tensor::zeros(&shape, dtype, Device::Cpu)?),
            // Some vectors are looked at, such as scales.
            _ => self.0.tensor(name, dtype),
        }
    }
}
