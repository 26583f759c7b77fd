//! Options shared by the commands that run models, and their output while a model answers.

use crate::progress::{Downloading, Loading, show_compilation};
use clap::builder::{PossibleValue, PossibleValuesParser, RangedU64ValueParser, TypedValueParser};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use warpsmith::{DType, Device, cpu, env};
use warpsmith_engine::env::MODEL;
use warpsmith_engine::hub::{Hub, ModelName};
use warpsmith_engine::models::Watched;
use warpsmith_engine::models::{Config, RandomWeights};
use warpsmith_engine::{
    AdapterPath, Engine, EngineOptions, Error, EventKind, FinishReason, OpenOptions, Request, Result,
    SamplingParams, TokenLogprob, Usage,
};

/// Which model to run, and in which form.
#[derive(clap::Args, Clone, Default)]
pub struct WeightsArgs {
    /// A .gguf or .safetensors file, a folder with config.json, or a name on the Hugging Face hub: owner/name, or
    /// owner/name:file.gguf [default: $WARPSMITH_MODEL]
    #[arg(long, short, value_name = "MODEL", alias = "model-path")]
    model: Option<PathBuf>,
    /// The type of weights and activations [default: f32 on the CPU, bf16 on a GPU]
    #[arg(long, value_parser = dtype_parser())]
    dtype: Option<DType>,
    /// The type of keys and values; `fp8_e4m3` keeps twice as many tokens as `bf16`, less precisely [default: auto]
    #[arg(long, alias = "kv-cache-dtype")]
    kv_dtype: Option<KvDtype>,
    /// Expand quantised weights when they are loaded: slower and larger, but without rounding activations to 8 bits
    #[arg(long)]
    expand: bool,
    /// The most tokens of prompt and answer together, at most the model's [default: the model's]
    #[arg(long, value_name = "TOKENS", value_parser = at_least_one(), aliases = ["context-length", "max-model-len"])]
    context: Option<usize>,
}

/// A model, and where it runs.
#[derive(clap::Args, Clone, Default)]
pub struct ModelArgs {
    #[command(flatten)]
    weights: WeightsArgs,
    /// Where to run: `cpu`, `cuda` or `cuda:N` [default: a GPU if there is one]
    #[arg(long)]
    device: Option<Device>,
    /// CPU threads, from 1 to 4096 [default: $WARPSMITH_NUM_THREADS, else as many as there are]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u16).range(1..=4096))]
    threads: Option<u16>,
    /// On a GPU, the part of the free memory that weights and the KV cache may take: above 0, at most 1 [default: 0.85]
    #[arg(long, value_name = "PART", value_parser = parse_part, alias = "gpu-memory-utilization")]
    mem_fraction_static: Option<f64>,
    /// On a GPU, do not capture decode steps as CUDA graphs: slower, with the same tokens
    #[arg(long, aliases = ["disable-cuda-graph", "enforce-eager"])]
    no_cuda_graphs: bool,
    /// Do not launch a step before the tokens of the step ahead of it are known: slower, with the same tokens
    #[arg(long, alias = "disable-overlap-schedule")]
    no_overlap: bool,
    /// A LoRA adapter: a folder as PEFT writes it, under a name [default: the folder's]. In `serve` it can be repeated, and
    /// requests name one as their model
    #[arg(long, value_name = "[NAME=]FOLDER", value_parser = parse_adapter, aliases = ["lora-modules", "lora-paths"])]
    lora: Vec<AdapterPath>,
}

/// The types that models are computed in.
fn dtype_parser() -> impl TypedValueParser<Value = DType> {
    const TYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];
    PossibleValuesParser::new(TYPES.map(|dtype| PossibleValue::new(dtype.name()).aliases(dtype.aliases())))
        .try_map(|name| name.parse::<DType>())
}

/// A count that cannot be zero.
pub fn at_least_one() -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..)
}

/// A number above 0 and at most 1.
fn parse_part(text: &str) -> std::result::Result<f64, String> {
    let part: f64 = text.parse().map_err(|error| format!("{error}"))?;
    if part > 0.0 && part <= 1.0 { Ok(part) } else { Err("expected a number above 0 and at most 1".into()) }
}

/// A folder, or a name and a folder.
fn parse_adapter(text: &str) -> std::result::Result<AdapterPath, String> {
    let (name, path) = match text.split_once('=') {
        Some((name, path)) => (name.to_owned(), PathBuf::from(path)),
        None => {
            let path = PathBuf::from(text);
            (path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default(), path)
        }
    };
    match name.is_empty() || path.as_os_str().is_empty() {
        true => Err("expected a folder, or a name, `=` and a folder".into()),
        false => Ok(AdapterPath { name, path }),
    }
}

/// The type of keys and values.
#[derive(Clone, Copy, clap::ValueEnum)]
enum KvDtype {
    /// That of the activations
    Auto,
    /// For activations of the same type
    Bf16,
    /// 8 bits, with the scales of the checkpoint or without
    #[value(name = "fp8_e4m3")]
    Fp8E4m3,
}

impl KvDtype {
    /// `None` for that of the activations.
    fn dtype(self) -> Option<DType> {
        match self {
            KvDtype::Auto => None,
            KvDtype::Bf16 => Some(DType::BF16),
            KvDtype::Fp8E4m3 => Some(DType::F8E4M3),
        }
    }
}

/// The path that a path or a name stands for. A model of the hub is downloaded, unless it was before.
pub fn resolve(model: PathBuf) -> Result<PathBuf> {
    if model.exists() {
        return Ok(model);
    }
    let Some(name) = model.to_str().and_then(ModelName::parse) else { return Ok(model) };
    let mut downloading = Downloading::default();
    Hub::from_env()?.fetch(&name, &mut |download| downloading.show(download))
}

impl WeightsArgs {
    /// Whether a model was named on the command line.
    pub fn is_given(&self) -> bool {
        self.model.is_some()
    }

    /// The first option that says how a model is run, if there is one.
    pub fn first_option(&self) -> Option<&'static str> {
        [
            ("--dtype", self.dtype.is_some()),
            ("--kv-dtype", self.kv_dtype.is_some()),
            ("--expand", self.expand),
            ("--context", self.context.is_some()),
        ]
        .into_iter()
        .find_map(|(name, is_given)| is_given.then_some(name))
    }

    /// The model's path. A model of the hub is downloaded unless it is in the cache.
    pub fn path(&self) -> Result<PathBuf> {
        let Some(model) = self.model.clone().or_else(|| env::path(MODEL)) else {
            let expected = format!("--model with a path or a name, or one in ${MODEL}");
            return Err(warpsmith::Error::parse("model", expected, "nothing").into());
        };
        resolve(model)
    }

    /// How the model is opened, wherever that is.
    pub fn options(&self, engine: EngineOptions) -> OpenOptions {
        OpenOptions {
            dtype: self.dtype,
            kv_dtype: self.kv_dtype.and_then(KvDtype::dtype),
            expand: self.expand,
            max_positions: self.context,
            engine,
            ..OpenOptions::default()
        }
    }
}

impl ModelArgs {
    /// A model on a device, with defaults for the rest.
    pub fn of(path: &Path, device: Option<Device>) -> ModelArgs {
        ModelArgs { device, ..ModelArgs::default() }.with_model(Some(path.to_path_buf()))
    }

    /// With another model, if there is one.
    pub fn with_model(mut self, model: Option<PathBuf>) -> ModelArgs {
        self.weights.model = model.or(self.weights.model);
        self
    }

    /// Whether a model was named on the command line.
    pub fn is_given(&self) -> bool {
        self.weights.is_given()
    }

    /// Runs a closure with the requested number of threads.
    pub fn on_threads<R>(&self, work: impl FnOnce() -> R) -> R {
        match self.threads {
            Some(threads) => cpu::with_threads(threads.into(), work),
            None => work(),
        }
    }

    /// The names of the adapters.
    pub fn adapters(&self) -> Vec<String> {
        self.lora.iter().map(|adapter| adapter.name.clone()).collect()
    }

    /// The adapter of a command whose answers all have the same, if it has one.
    ///
    /// # Errors
    /// If there are several.
    pub fn adapter(&self) -> Result<Option<String>> {
        match &self.lora[..] {
            [] => Ok(None),
            [adapter] => Ok(Some(adapter.name.clone())),
            several => Err(warpsmith::Error::parse("lora", "one adapter", several.len().to_string()).into()),
        }
    }

    /// Where the model runs.
    pub fn device(&self) -> Device {
        self.options(EngineOptions::default()).device()
    }

    /// The type of its weights, if no file says otherwise.
    pub fn dtype(&self) -> DType {
        self.options(EngineOptions::default()).dtype()
    }

    /// The model's path.
    pub fn path(&self) -> Result<PathBuf> {
        self.weights.path()
    }

    /// Opens the model.
    pub fn open(&self, engine: EngineOptions) -> Result<Engine> {
        let path = self.path()?;
        show_compilation();
        let loading = Loading::new(&path.display().to_string());
        Engine::open_with(&path, self.options(engine), &mut |progress| loading.show(progress))
    }

    /// Opens a model with weights that are in no file.
    pub fn open_weights(
        &self,
        config: &Config,
        weights: &RandomWeights,
        engine: EngineOptions,
    ) -> Result<Engine> {
        show_compilation();
        let loading = Loading::new("random weights");
        let mut tell = |progress| loading.show(progress);
        let watched = Watched::new(weights, weights.parameters(), &mut tell);
        Engine::with_weights(config, &watched, self.options(engine))
    }

    /// How the model is opened.
    pub fn options(&self, engine: EngineOptions) -> OpenOptions {
        let engine = EngineOptions { cuda_graphs: !self.no_cuda_graphs, overlap: !self.no_overlap, ..engine };
        OpenOptions {
            device: Some(self.device.unwrap_or_else(Device::best)),
            mem_fraction_static: self.mem_fraction_static,
            adapters: self.lora.clone(),
            ..self.weights.options(engine)
        }
    }
}

/// How tokens are chosen.
#[derive(clap::Args)]
pub struct SamplingArgs {
    /// The most tokens of an answer [default: as many as fit]
    #[arg(long, short = 'n', value_name = "TOKENS")]
    max_tokens: Option<usize>,
    /// Divides logits; 0 takes the most likely token each time
    #[arg(long, default_value_t = 0.0)]
    temperature: f32,
    /// Only this many of the most likely tokens are possible; 0 for all
    #[arg(long, default_value_t = 0)]
    top_k: usize,
    /// Only the most likely tokens whose probabilities add up to this are possible: above 0, 1 for all
    #[arg(long, default_value_t = 1.0)]
    top_p: f32,
    /// Only tokens at least this probable, relative to the most likely, are possible
    #[arg(long, default_value_t = 0.0)]
    min_p: f32,
    /// Weakens tokens that occur in prompt or answer; 1 for none
    #[arg(long, default_value_t = 1.0)]
    repetition_penalty: f32,
    /// Subtracted from the logits of tokens that occur in the answer
    #[arg(long, default_value_t = 0.0, allow_negative_numbers = true)]
    presence_penalty: f32,
    /// Subtracted from the logits of tokens each time that they occur in the answer
    #[arg(long, default_value_t = 0.0, allow_negative_numbers = true)]
    frequency_penalty: f32,
    /// With the same seed, the same prompt gives the same answer [default: a new seed each time]
    #[arg(long)]
    seed: Option<u64>,
    /// A text that ends the answer and is not part of it; can be repeated
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// Continue when the model wants to end
    #[arg(long)]
    ignore_eos: bool,
}

impl SamplingArgs {
    pub fn params(&self) -> SamplingParams {
        SamplingParams {
            max_tokens: self.max_tokens,
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            seed: self.seed,
            stop: self.stop.clone(),
            ignore_eos: self.ignore_eos,
            ..SamplingParams::default()
        }
    }
}

/// An answer, and how long it took.
#[derive(Debug)]
pub struct Answer {
    pub text: String,
    pub tokens: Vec<i32>,
    /// The log-probability of each token, if asked for.
    pub logprobs: Vec<f32>,
    /// The most likely tokens at each place, if asked for.
    pub top: Vec<Vec<TokenLogprob>>,
    pub reason: FinishReason,
    pub usage: Usage,
    /// Until the first token.
    pub first: Duration,
    /// From there to the end.
    pub rest: Duration,
}

impl Default for Answer {
    /// Nothing yet.
    fn default() -> Answer {
        Answer {
            text: String::new(),
            tokens: Vec::new(),
            logprobs: Vec::new(),
            top: Vec::new(),
            reason: FinishReason::Cancelled,
            usage: Usage::default(),
            first: Duration::ZERO,
            rest: Duration::ZERO,
        }
    }
}

impl Answer {
    /// One line as text. Of an answer that failed there is no speed.
    pub fn summary(&self) -> Option<String> {
        if matches!(self.reason, FinishReason::Failed(_)) {
            return None;
        }
        let Usage { prompt_tokens, cached_tokens, output_tokens, .. } = self.usage;
        let rate = |tokens: usize, time: Duration| tokens as f64 / time.as_secs_f64().max(1e-9);
        let computed = prompt_tokens - cached_tokens;
        let mut line = format!(
            "{prompt_tokens} prompt tokens, {cached_tokens} cached, {:.0} tok/s; first token after {:.0} ms",
            rate(computed, self.first),
            self.first.as_secs_f64() * 1e3
        );
        if output_tokens > 1 {
            line += &format!("; {output_tokens} tokens, {:.1} tok/s", rate(output_tokens - 1, self.rest));
        }
        Some(line)
    }
}

/// Asks the engine, which serves nothing else meanwhile. `show` gets the text as it is generated.
pub fn answer(engine: &mut Engine, request: Request, show: impl FnMut(&str) -> Result<()>) -> Result<Answer> {
    answer_until(engine, request, show, || false)
}

/// Like [`answer`]. The request is cancelled as soon as `is_enough`.
pub fn answer_until(
    engine: &mut Engine,
    request: Request,
    mut show: impl FnMut(&str) -> Result<()>,
    is_enough: impl Fn() -> bool,
) -> Result<Answer> {
    let mut all = answers(engine, request, |_, text| show(text), is_enough)?;
    all.pop().ok_or_else(|| Error::Broken("a request without an output".into()))
}

/// All outputs of a request. `show` gets the number of the output and the text that came.
pub fn answers(
    engine: &mut Engine,
    request: Request,
    mut show: impl FnMut(usize, &str) -> Result<()>,
    is_enough: impl Fn() -> bool,
) -> Result<Vec<Answer>> {
    let start = Instant::now();
    let mut all: Vec<Answer> = (0..request.params.n).map(|_| Answer::default()).collect();
    let mut unfinished = all.len();
    let id = engine.add_request(request)?;
    let mut is_cancelled = false;
    while unfinished > 0 {
        if !is_cancelled && is_enough() {
            is_cancelled = true;
            engine.cancel(id)?;
        }
        if !engine.has_work() {
            return Err(Error::Broken("a request ended without a word".into()));
        }
        for event in engine.step()? {
            let Some(answer) = all.get_mut(event.index).filter(|_| event.request == id) else { continue };
            match event.kind {
                EventKind::Token { token, text, logprob, top_logprobs } => {
                    if answer.tokens.is_empty() {
                        answer.first = start.elapsed();
                    }
                    answer.tokens.push(token);
                    if let Some(logprob) = logprob {
                        answer.logprobs.push(logprob);
                        answer.top.push(top_logprobs);
                    }
                    show(event.index, &text)?;
                    answer.text += &text;
                }
                EventKind::Finished { reason, text, usage } => {
                    show(event.index, &text)?;
                    answer.text += &text;
                    (answer.reason, answer.usage) = (reason, usage);
                    answer.rest = start.elapsed().saturating_sub(answer.first);
                    unfinished -= 1;
                }
            }
        }
    }
    Ok(all)
}

/// Writes text to standard output at once. If the reader has gone, SIGPIPE ends the process.
pub fn print(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    Ok(written.map_err(|error| warpsmith::Error::io("standard output", "writing to", &error))?)
}
