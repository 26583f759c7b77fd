//! The weights of a model in the one form that layers see.
//!
//! All differences between files are resolved here: names, the transposed matrices of GPT-2 in safetensors, and the
//! order of the rows of queries and keys that GGUF changes for Llama.

use super::config::Config;
use super::matrix::{Matrix, multiplied};
use super::names::{Naming, Part};
use super::source::WeightSource;
use crate::adapters::Adapter;
use crate::error::Result;
use std::cell::RefCell;
use std::collections::HashSet;
use warpsmith::op::survey;
use warpsmith::{DType, Device, Stream, Tensor, ops};

/// How a model is loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoadOptions {
    /// The type of weights and activations.
    pub dtype: DType,
    /// Where it runs.
    pub device: Device,
    /// Whether quantised matrices are multiplied as they are, with activations rounded to eight bits. Otherwise they are
    /// expanded to `dtype` first.
    pub quantized: bool,
    /// The most positions it is used with, at most the configuration's; these if `None`.
    pub max_positions: Option<usize>,
    /// Tokens of a pass for which there is room from the start. Larger passes make room for themselves.
    pub reserve_tokens: usize,
}

impl Default for LoadOptions {
    fn default() -> Self {
        LoadOptions {
            dtype: DType::F32,
            device: Device::Cpu,
            quantized: true,
            max_positions: None,
            reserve_tokens: 0,
        }
    }
}

/// The weights of one model, in the form that layers take: `[out, in]`, on the device, in one type.
pub struct Loader<'a> {
    pub(super) source: &'a dyn WeightSource,
    pub(super) config: Config,
    pub(super) options: LoadOptions,
    pub(super) adapters: &'a [Adapter],
    stream: Stream,
    /// The names of the tensors that were read.
    pub(super) read: RefCell<HashSet<String>>,
}

impl<'a> Loader<'a> {
    pub(super) fn new(
        source: &'a dyn WeightSource,
        config: &Config,
        options: LoadOptions,
    ) -> Result<Loader<'a>> {
        let stream = Stream::new(options.device)?;
        Ok(Loader {
            source,
            config: config.clone(),
            options,
            adapters: &[],
            stream,
            read: RefCell::default(),
        })
    }

    /// With the adapters that projections are to have.
    pub(super) fn with_adapters(self, adapters: &'a [Adapter]) -> Loader<'a> {
        Loader { adapters, ..self }
    }

    /// The stream that everything it returns is made on. Passes on the same stream need not be ordered with it.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// A tensor of the CPU, on the device.
    pub(super) fn place(&self, tensor: &Tensor) -> Result<Tensor> {
        let there = match survey::is_running() {
            // Memory that is aligned as on a device, and never touched.
            true => Tensor::empty_on(tensor.shape(), tensor.dtype(), &self.stream)?,
            false => tensor.to_device(self.options.device)?,
        };
        if self.options.device == Device::Cpu && !survey::is_running() {
            return Ok(there);
        }
        // Copies to a device go through its default stream. Memory that only one stream uses costs later calls nothing.
        let mut own = Tensor::empty_on(there.shape(), there.dtype(), &self.stream)?;
        ops::Copy::new(&there).run_into(&mut own, &self.stream)?;
        Ok(own)
    }

    /// The type of everything it returns.
    pub fn dtype(&self) -> DType {
        self.options.dtype
    }

    /// Where everything it returns lies.
    pub fn device(&self) -> Device {
        self.options.device
    }

    /// The name of a part in the file; `layer` matters for parts of layers only.
    fn name(&self, part: Part, layer: usize, suffix: &str) -> String {
        let name = part.name_in(self.source.naming(), &self.config.architecture);
        self.present(name.replace("{}", &layer.to_string()) + suffix)
    }

    /// The name of a part's module in transformers, which adapters are for; `None` if there is no such part.
    pub(super) fn module(&self, part: Part, layer: usize) -> Option<String> {
        let name = part.name_in(Naming::Transformers, &self.config.architecture);
        (name != "-").then(|| name.replace("{}", &layer.to_string()))
    }

    /// Refuses adapters of modules that no part of the model is.
    pub(super) fn refuse_other_adapters(&self) -> Result<()> {
        let parts = [
            Part::Query,
            Part::Key,
            Part::Value,
            Part::QueryKeyValue,
            Part::AttentionOut,
            Part::Gate,
            Part::Up,
            Part::GateUp,
            Part::Down,
        ];
        let layers = 0..self.config.num_layers;
        let modules = layers.flat_map(|layer| parts.iter().filter_map(move |&part| self.module(part, layer)));
        let known: HashSet<String> = modules.collect();
        let architecture = &self.config.architecture;
        self.adapters
            .iter()
            .try_for_each(|adapter| adapter.refuse_other(architecture, |module| known.contains(module)))
    }

    /// Whether an adapter adapts a part.
    pub(super) fn is_adapted(&self, part: Part, layer: usize) -> bool {
        let module = self.module(part, layer);
        module.is_some_and(|module| self.adapters.iter().any(|adapter| adapter.adapts(&module)))
    }

    /// A name as the file has it.
    pub(super) fn present(&self, name: String) -> String {
        // Checkpoints of a bare model lack the name of the wrapper that added the head.
        match name.split_once('.') {
            Some(("model" | "transformer", bare))
                if self.source.shape(&name).is_none() && self.source.shape(bare).is_some() =>
            {
                bare.into()
            }
            _ => name,
        }
    }

    fn is_gemma(&self) -> bool {
        self.config.architecture == "gemma3_text"
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.source.shape(name).is_some()
    }

    /// A tensor of this shape on the CPU.
    fn read(&self, name: &str, shape: &[usize]) -> Result<Tensor> {
        self.check_shape(name, shape)?;
        self.numbers_as(name, self.dtype())
    }

    /// The type in which a matrix is kept: the model's, or that of the file where products widen it as they read it, which
    /// changes no bit of theirs.
    pub(super) fn matrix_dtype(&self, name: &str) -> DType {
        let widens = self.device() == Device::Cpu && !survey::is_running() && self.dtype() == DType::F32;
        match self.source.stored_dtype(name) {
            Some(stored @ (DType::F16 | DType::BF16)) if widens => stored,
            _ => self.dtype(),
        }
    }

    /// Releases the memory of file parts that layers have converted.
    pub fn release(&self) {
        self.source.release();
    }

    pub(super) fn check_shape(&self, name: &str, shape: &[usize]) -> Result<()> {
        let Some(found) = self.source.shape(name) else {
            return Err(self.wrong(name, format!("shape {shape:?}"), "no such tensor"));
        };
        if found != shape {
            return Err(self.wrong(name, format!("shape {shape:?}"), format!("{found:?}")));
        }
        Ok(())
    }

    /// A vector, such as the weight of a norm.
    pub fn vector(&self, part: Part, layer: usize, len: usize) -> Result<Tensor> {
        let name = self.name(part, layer, ".weight");
        let mut vector = self.read(&name, &[len])?;
        // Gemma 3 multiplies by one more than the file says; in GGUF the one is part of it.
        if self.is_gemma() && self.source.naming() == Naming::Transformers && !survey::is_running() {
            let more: Vec<f64> =
                self.numbers_as(&name, DType::F32)?.to_f64()?.iter().map(|w| w + 1.0).collect();
            vector = Tensor::from_f64(&more, &[len], self.dtype(), Device::Cpu)?;
        }
        self.place(&vector)
    }

    /// Whether a part has a bias; `None` if the file decides.
    fn has_bias(&self, part: Part) -> Option<bool> {
        match part {
            Part::AttentionOut if self.config.architecture == "qwen2" => Some(false),
            Part::Query | Part::Key | Part::Value | Part::QueryKeyValue | Part::AttentionOut => {
                self.config.attention_bias
            }
            Part::Gate | Part::Up | Part::GateUp | Part::Down => self.config.mlp_bias,
            Part::AttentionNorm | Part::MlpNorm | Part::FinalNorm => Some(self.config.has_layer_norms()),
            _ => Some(false),
        }
    }

    /// A bias, if the part has one.
    pub fn bias(&self, part: Part, layer: usize, len: usize) -> Result<Option<Tensor>> {
        let name = self.name(part, layer, ".bias");
        if !self.has_bias(part).unwrap_or_else(|| self.has(&name)) {
            return Ok(None);
        }
        let mut bias = self.read(&name, &[len])?;
        if self.has_interleaved_rows(part) {
            bias = self.rows_by_halves(&bias.reshape(&[len, 1]).expect("a vector is one column"))?;
            bias = bias.reshape(&[len]).expect("one column is a vector");
        }
        Ok(Some(self.place(&bias)?))
    }

    /// A matrix of weights, `[out, in]`.
    pub fn matrix(&self, part: Part, layer: usize, out: usize, input: usize) -> Result<Matrix> {
        let name = self.name(part, layer, ".weight");
        let transposed = self.source.naming() == Naming::Transformers
            && self.config.architecture == "gpt2"
            && part.is_transposed_in_gpt2();
        if transposed {
            self.check_shape(&name, &[input, out])?;
            let matrix = self.numbers_as(&name, self.matrix_dtype(&name))?;
            let matrix = ops::Copy::new(matrix.view().permute(&[1, 0]).expect("two dimensions")).run()?;
            return Ok(Matrix::Plain(self.place(&matrix)?));
        }
        self.check_shape(&name, &[out, input])?;
        let matrix = match self.source.blocks(&name)?.filter(|_| self.options.quantized) {
            Some((blocks, format)) => {
                self.note(&name);
                Matrix::Blocks(blocks, format)
            }
            None => Matrix::Plain(self.numbers_as(&name, self.matrix_dtype(&name))?),
        };
        let mut rows = matrix.tensor().clone();
        if self.has_interleaved_rows(part) {
            rows = self.rows_by_halves(&rows)?;
        }
        Ok(matrix.with(self.place(&rows)?))
    }

    /// What keys and values of a layer are divided by in a cache of 8 bits: one number each, or one for each head. `None` if
    /// the file does not say.
    pub fn kv_scales(&self, layer: usize) -> Result<Option<(Tensor, Tensor)>> {
        let scale = |side: &str| -> Result<Option<Tensor>> {
            let attention = format!("model.layers.{layer}.self_attn.");
            // The places where quantisers put them.
            let names = [String::new(), "attn.".into(), format!("{side}_proj.")]
                .map(|place| format!("{attention}{place}{side}_scale"));
            let Some(name) = names.iter().find(|name| self.has(name)) else { return Ok(None) };
            let heads = self.config.num_kv_heads;
            let shape = self.source.shape(name).unwrap_or_default();
            let count = shape.iter().try_fold(1usize, |count, &size| count.checked_mul(size));
            let Some(count) = count.filter(|count| [1, heads].contains(count)) else {
                let expected = format!("one number, or {heads} for the heads");
                return Err(self.wrong(name, expected, format!("shape {shape:?}")));
            };
            self.note(name);
            let tensor = self.source.tensor(name, DType::F32)?;
            let values: Vec<f32> = tensor.to_vec()?;
            if let Some(wrong) = values.iter().find(|scale| !(scale.is_finite() && **scale > 0.0)) {
                return Err(self.wrong(name, "finite numbers above 0", wrong));
            }
            let flat = tensor.reshape(&[count]);
            let flat =
                flat.ok_or_else(|| self.wrong(name, "as many numbers as its shape says", values.len()))?;
            Ok(Some(self.place(&flat)?))
        };
        if self.source.naming() != Naming::Transformers {
            return Ok(None);
        }
        match (scale("k")?, scale("v")?) {
            (Some(k), Some(v)) => Ok(Some((k, v))),
            (None, None) => Ok(None),
            (k, _) => {
                let (there, missing) = if k.is_some() { ("k", "v") } else { ("v", "k") };
                let name = format!("model.layers.{layer}.self_attn.{missing}_scale");
                Err(self.wrong(&name, format!("a tensor, because there is one for {there}"), "nothing"))
            }
        }
    }

    /// The first rows of a matrix that may have more, to be looked up by number, and what they are multiplied by then. On the
    /// CPU in the form that the file has; on a GPU they are multiplied here.
    pub fn table(&self, part: Part, rows: usize, width: usize) -> Result<(Matrix, Option<f32>)> {
        let name = self.name(part, 0, ".weight");
        let stored =
            self.source.shape(&name).and_then(|shape| shape.first().copied()).unwrap_or(rows).max(rows);
        self.check_shape(&name, &[stored, width])?;
        let as_stored = self.device() == Device::Cpu && !survey::is_running();
        let matrix = match self.source.blocks(&name)?.filter(|_| as_stored) {
            Some((blocks, format)) => {
                self.note(&name);
                Matrix::Blocks(blocks, format)
            }
            None => Matrix::Plain(self.numbers_as(&name, self.matrix_dtype(&name))?),
        };
        let mut first = matrix.tensor().narrow(0, 0, rows).expect("it has as many rows");
        let scale = self.config.embedding_scale.filter(|_| part == Part::Embedding);
        let mut scale = scale.map(|scale| self.dtype().round(scale) as f32);
        if let Some(factor) = scale.take_if(|_| !as_stored && !survey::is_running()) {
            first = multiplied(&first, factor)?;
        }
        Ok((matrix.with(self.place(&first)?), scale.filter(|_| as_stored)))
    }

    /// The matrix of the logits: its own, or the embedding table's where the two are tied and the file has no other.
    pub fn head(&self) -> Result<Matrix> {
        let (vocab, hidden) = (self.config.vocab_size, self.config.hidden_size);
        let has_own = self.config.tied == Some(false) || self.has(&self.name(Part::Head, 0, ".weight"));
        self.matrix(if has_own { Part::Head } else { Part::Embedding }, 0, vocab, hidden)
    }

    /// GGUF stores the rows of queries and keys of Llama and SmolLM3 so that the pairs that rope rotates are neighbours.
    fn has_interleaved_rows(&self, part: Part) -> bool {
        self.source.naming() == Naming::Gguf
            && ["llama", "mixtral", "smollm3"].contains(&self.config.architecture.as_str())
            && matches!(part, Part::Query | Part::Key)
    }

    /// Rows `2 i` and `2 i + 1` of each head go to `i` and `i + head_dim / 2`, where transformers has them.
    fn rows_by_halves(&self, matrix: &Tensor) -> Result<Tensor> {
        let (rows, columns, pairs) = (matrix.shape()[0], matrix.shape()[1], self.config.head_dim / 2);
        let heads = rows / self.config.head_dim;
        let by_pairs = matrix.view().reshape(&[heads, pairs, 2, columns]);
        let by_halves = by_pairs.and_then(|view| view.permute(&[0, 2, 1, 3]));
        let by_halves = by_halves.expect("rows were checked to be whole heads, and files are contiguous");
        let copied = ops::Copy::new(by_halves).run()?;
        Ok(copied.reshape(&[rows, columns]).expect("the copy is contiguous"))
    }
}
