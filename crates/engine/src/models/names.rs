//! Where weights come from, and the names they have in each format.
//!
//! All differences between files are resolved here: names, the transposed matrices of GPT-2 in safetensors, and the
//! order of the rows of queries and keys that GGUF changes for Llama. Layers see one form.

use super::config::Config;
use crate::adapters::Adapter;
use crate::error::{Error, Result};
use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::path::Path;
use warpsmith::op::survey;
use warpsmith::ops::{self, QuantFormat};
use warpsmith::{DType, Device, Stream, Tensor, TensorView};

/// A format of weights, as far as names are concerned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Naming {
    /// As transformers saves a model.
    Transformers,
    /// As in a GGUF file.
    Gguf,
}

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

/// Weights that tell how many of their numbers were read.
pub struct Watched<'a> {
    source: &'a dyn WeightSource,
    total: usize,
    state: RefCell<WatchState<'a>>,
}

struct WatchState<'a> {
    read: HashSet<String>,
    numbers: usize,
    tell: &'a mut dyn FnMut(LoadProgress),
}

/// How far the weights of a model are loaded, in numbers that they consist of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoadProgress {
    /// Those that were read.
    pub done: usize,
    /// All that there are. A model may need fewer.
    pub total: usize,
}

impl<'a> Watched<'a> {
    /// `tell` is called for each tensor that is read; `total` is the count of all numbers.
    pub fn new(
        source: &'a dyn WeightSource,
        total: usize,
        tell: &'a mut dyn FnMut(LoadProgress),
    ) -> Watched<'a> {
        let state = WatchState { read: HashSet::new(), numbers: 0, tell };
        Watched { source, total, state: RefCell::new(state) }
    }

    /// Tensors are counted once: tied ones are read twice.
    fn note(&self, name: &str) {
        let mut state = self.state.borrow_mut();
        if state.read.insert(name.into()) {
            state.numbers += self.source.shape(name).map_or(0, |shape| shape.iter().product());
            let progress = LoadProgress { done: state.numbers, total: self.total };
            (state.tell)(progress);
        }
    }
}

impl WeightSource for Watched<'_> {
    fn naming(&self) -> Naming {
        self.source.naming()
    }

    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        self.source.shape(name)
    }

    fn names(&self) -> Vec<String> {
        self.source.names()
    }

    fn stored_dtype(&self, name: &str) -> Option<DType> {
        self.source.stored_dtype(name)
    }

    fn file(&self, name: &str) -> Option<&Path> {
        self.source.file(name)
    }

    fn blocks(&self, name: &str) -> Result<Option<(Tensor, QuantFormat)>> {
        let blocks = self.source.blocks(name)?;
        if blocks.is_some() {
            self.note(name);
        }
        Ok(blocks)
    }

    fn tensor(&self, name: &str, dtype: DType) -> Result<Tensor> {
        let tensor = self.source.tensor(name, dtype)?;
        self.note(name);
        Ok(tensor)
    }

    fn release(&self) {
        self.source.release();
    }
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

/// A matrix of weights in the form that the file has it in.
pub enum Matrix {
    /// Numbers of the model's type, or of 16 bits where products take them beside it, `[out, in]`.
    Plain(Tensor),
    /// Quantised, `[out, bytes of a row]`.
    Blocks(Tensor, QuantFormat),
}

impl Matrix {
    fn tensor(&self) -> &Tensor {
        match self {
            Matrix::Plain(tensor) | Matrix::Blocks(tensor, _) => tensor,
        }
    }

    /// Another tensor stored in the same way.
    fn with(&self, tensor: Tensor) -> Matrix {
        match self {
            Matrix::Plain(_) => Matrix::Plain(tensor),
            Matrix::Blocks(_, format) => Matrix::Blocks(tensor, *format),
        }
    }

    /// The number of rows.
    pub fn rows(&self) -> usize {
        self.tensor().shape()[0]
    }

    /// Whether the rows of both can be in one matrix.
    pub fn is_stored_like(&self, other: &Matrix) -> bool {
        match (self, other) {
            (Matrix::Plain(a), Matrix::Plain(b)) => a.dtype() == b.dtype(),
            (Matrix::Blocks(_, a), Matrix::Blocks(_, b)) => a == b,
            _ => false,
        }
    }

    /// Matrices that are stored alike, one below the other.
    pub(super) fn joined(mut parts: Vec<Matrix>, stream: &Stream) -> Result<Matrix> {
        if parts.len() == 1 {
            return Ok(parts.swap_remove(0));
        }
        let rows: Vec<TensorView<'_>> = parts.iter().map(|matrix| matrix.tensor().view()).collect();
        Ok(parts[0].with(stacked(&rows, stream)?))
    }
}

/// Tensors of the same type and width, one below the other, made in the order of `stream`.
pub(super) fn stacked(parts: &[TensorView<'_>], stream: &Stream) -> Result<Tensor> {
    let mut shape = parts[0].shape().to_vec();
    shape[0] = parts.iter().map(|part| part.shape()[0]).sum();
    let mut all = Tensor::empty_on(&shape, parts[0].dtype(), stream)?;
    ops::concat_into(parts, 0, &mut all, stream)?;
    Ok(all)
}

/// A matrix times a number.
fn multiplied(matrix: &Tensor, factor: f32) -> Result<Tensor> {
    let (rows, width, dtype) = (matrix.shape()[0], matrix.shape()[1], matrix.dtype());
    let mut product = Tensor::empty(matrix.shape(), dtype, Device::Cpu)?;
    // Some rows at a time, because tables are large.
    const ROWS: usize = 256;
    for first in (0..rows).step_by(ROWS) {
        let count = ROWS.min(rows - first);
        let part = matrix.narrow(0, first, count).expect("within the matrix").to_dtype(DType::F32)?;
        let numbers: Vec<f32> = part.to_vec::<f32>()?.iter().map(|x| x * factor).collect();
        let numbers = Tensor::from_slice(&numbers, &[count, width], Device::Cpu)?.to_dtype(dtype)?;
        let place = product.view_mut().narrow(0, first, count).expect("within the matrix");
        ops::Copy::new(&numbers).run_into(place, &Stream::Host)?;
    }
    Ok(product)
}

/// A part of a model that has a weight, and maybe a bias.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Part {
    Embedding,
    Positions,
    FinalNorm,
    Head,
    AttentionNorm,
    Query,
    Key,
    Value,
    QueryKeyValue,
    QueryNorm,
    KeyNorm,
    AttentionOut,
    AttentionOutNorm,
    MlpNorm,
    Gate,
    Up,
    GateUp,
    Down,
    MlpOutNorm,
    Router,
}

impl Part {
    /// The names in GGUF, in transformers' Llama and its relatives, and in transformers' GPT-2, without `.weight` and
    /// `.bias`. `{}` is the number of the layer. `-` where a family has no such part.
    pub(super) fn names(self) -> [&'static str; 3] {
        match self {
            Part::Embedding => ["token_embd", "model.embed_tokens", "transformer.wte"],
            Part::Positions => ["position_embd", "-", "transformer.wpe"],
            Part::FinalNorm => ["output_norm", "model.norm", "transformer.ln_f"],
            Part::Head => ["output", "lm_head", "lm_head"],
            Part::AttentionNorm => {
                ["blk.{}.attn_norm", "model.layers.{}.input_layernorm", "transformer.h.{}.ln_1"]
            }
            Part::Query => ["blk.{}.attn_q", "model.layers.{}.self_attn.q_proj", "-"],
            Part::Key => ["blk.{}.attn_k", "model.layers.{}.self_attn.k_proj", "-"],
            Part::Value => ["blk.{}.attn_v", "model.layers.{}.self_attn.v_proj", "-"],
            Part::QueryKeyValue => {
                ["blk.{}.attn_qkv", "model.layers.{}.self_attn.qkv_proj", "transformer.h.{}.attn.c_attn"]
            }
            Part::QueryNorm => ["blk.{}.attn_q_norm", "model.layers.{}.self_attn.q_norm", "-"],
            Part::KeyNorm => ["blk.{}.attn_k_norm", "model.layers.{}.self_attn.k_norm", "-"],
            Part::AttentionOut => {
                ["blk.{}.attn_output", "model.layers.{}.self_attn.o_proj", "transformer.h.{}.attn.c_proj"]
            }
            // What Llama calls so is the norm before the feed-forward layer.
            Part::AttentionOutNorm => {
                ["blk.{}.post_attention_norm", "model.layers.{}.post_attention_layernorm", "-"]
            }
            Part::MlpNorm => {
                ["blk.{}.ffn_norm", "model.layers.{}.post_attention_layernorm", "transformer.h.{}.ln_2"]
            }
            Part::Gate => ["blk.{}.ffn_gate", "model.layers.{}.mlp.gate_proj", "-"],
            Part::GateUp => ["blk.{}.ffn_up", "model.layers.{}.mlp.gate_up_proj", "-"],
            Part::Up => ["blk.{}.ffn_up", "model.layers.{}.mlp.up_proj", "transformer.h.{}.mlp.c_fc"],
            Part::Down => ["blk.{}.ffn_down", "model.layers.{}.mlp.down_proj", "transformer.h.{}.mlp.c_proj"],
            Part::MlpOutNorm => ["blk.{}.post_ffw_norm", "model.layers.{}.post_feedforward_layernorm", "-"],
            Part::Router => ["blk.{}.ffn_gate_inp", "model.layers.{}.mlp.gate", "-"],
        }
    }

    /// Whether GPT-2 stores it with inputs before outputs.
    fn is_transposed_in_gpt2(self) -> bool {
        matches!(self, Part::QueryKeyValue | Part::AttentionOut | Part::Up | Part::Down)
    }
}

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
        let name = self.name_in(self.source.naming(), part);
        self.present(name.replace("{}", &layer.to_string()) + suffix)
    }

    /// The name of a part's module in transformers, which adapters are for; `None` if there is no such part.
    pub(super) fn module(&self, part: Part, layer: usize) -> Option<String> {
        let name = self.name_in(Naming::Transformers, part);
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

    /// The name of a part, with `{}` for its layer.
    fn name_in(&self, naming: Naming, part: Part) -> &'static str {
        let [gguf, llama, gpt2] = part.names();
        match naming {
            Naming::Gguf => gguf,
            Naming::Transformers if self.config.architecture == "gpt2" => gpt2,
            Naming::Transformers if self.is_gemma() && part == Part::MlpNorm => {
                "model.layers.{}.pre_feedforward_layernorm"
            }
            Naming::Transformers if self.config.architecture == "mixtral" && part == Part::Router => {
                "model.layers.{}.block_sparse_moe.gate"
            }
            Naming::Transformers => llama,
        }
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
