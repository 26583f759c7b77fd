//! Options that commands which run models share, and how they talk while a model answers.

use indicatif::{ProgressBar, ProgressStyle};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use warpsmith::{DType, Device, env};
use warpsmith_engine::{
    Engine, EngineOptions, Error, EventKind, FinishReason, OpenOptions, Request, Result, SamplingParams,
    TokenLogprob, Usage,
};

/// Names the model of commands that are given none.
const MODEL: &str = "WARPSMITH_MODEL";

/// Which model, and where it runs.
#[derive(clap::Args)]
pub struct ModelArgs {
    /// A .gguf or .safetensors file, or a folder with config.json [default: $WARPSMITH_MODEL]
    #[arg(long, short, value_name = "PATH")]
    model: Option<PathBuf>,
    /// Where to run: `cpu`, `cuda` or `cuda:N` [default: cpu]
    #[arg(long)]
    device: Option<Device>,
    /// The type of weights and activations: `f32`, `bf16` or `f16` [default: f32 on the CPU, bf16 on a GPU]
    #[arg(long)]
    dtype: Option<DType>,
    /// Expand quantised weights when they are loaded: slower and larger, but without rounding activations to 8 bits
    #[arg(long)]
    expand: bool,
    /// The most tokens of prompt and answer together [default: the model's]
    #[arg(long, value_name = "TOKENS")]
    context: Option<usize>,
    /// On a GPU, the part of the free memory that weights and the cache of keys and values may take [default: 0.85]
    #[arg(long, value_name = "PART")]
    mem_fraction_static: Option<f64>,
    /// On a GPU, do not capture steps that only generate as CUDA graphs: slower, with the same tokens
    #[arg(long)]
    no_cuda_graphs: bool,
    /// Do not give steps to the device before the tokens of the step ahead are known: slower, with the same tokens
    #[arg(long)]
    no_overlap: bool,
}

impl ModelArgs {
    /// A model, and the rest as it is by default.
    pub fn of(path: &Path) -> ModelArgs {
        ModelArgs {
            model: Some(path.to_path_buf()),
            device: None,
            dtype: None,
            expand: false,
            context: None,
            mem_fraction_static: None,
            no_cuda_graphs: false,
            no_overlap: false,
        }
    }

    /// Where the model runs.
    pub fn device(&self) -> Device {
        self.device.unwrap_or(Device::Cpu)
    }

    /// The type of its weights, if no file says otherwise.
    pub fn dtype(&self) -> DType {
        let default = if self.device() == Device::Cpu { DType::F32 } else { DType::BF16 };
        self.dtype.unwrap_or(default)
    }

    /// The model's path.
    pub fn path(&self) -> Result<PathBuf> {
        self.model.clone().or_else(|| env::path(MODEL)).ok_or_else(|| {
            let expected = format!("--model PATH, or a path in ${MODEL}");
            warpsmith::Error::parse("model", expected, "nothing").into()
        })
    }

    /// Opens the model.
    pub fn open(&self, engine: EngineOptions) -> Result<Engine> {
        let path = self.path()?;
        let options = self.options(engine);
        loading(&path.display().to_string(), || Engine::open(&path, options))
    }

    /// How the model is opened.
    pub fn options(&self, engine: EngineOptions) -> OpenOptions {
        OpenOptions {
            device: self.device,
            dtype: self.dtype,
            expand: self.expand,
            max_positions: self.context,
            pool_tokens: None,
            mem_fraction_static: self.mem_fraction_static,
            page_size: None,
            engine: EngineOptions { cuda_graphs: !self.no_cuda_graphs, overlap: !self.no_overlap, ..engine },
        }
    }
}

/// Shows that something takes time.
pub fn loading<T>(what: &str, work: impl FnOnce() -> T) -> T {
    let spinner = ProgressBar::new_spinner().with_message(format!("loading {what}"));
    if let Ok(style) = ProgressStyle::with_template("{spinner} {msg} {elapsed}") {
        spinner.set_style(style);
    }
    spinner.enable_steady_tick(Duration::from_millis(100));
    let result = work();
    spinner.finish_and_clear();
    result
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
    /// Only the most likely tokens whose probabilities add up to this are possible
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
    /// With the same seed the same prompt gives the same answer [default: another each time]
    #[arg(long)]
    seed: Option<u64>,
    /// A text that ends the answer and is not part of it; can be repeated
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// Goes on when the model wants to end
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

impl Answer {
    /// One line for people.
    pub fn summary(&self) -> String {
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
        line
    }
}

/// Asks the engine, which does nothing else meanwhile. `show` gets the text as it comes.
pub fn answer(engine: &mut Engine, request: Request, mut show: impl FnMut(&str)) -> Result<Answer> {
    let start = Instant::now();
    let (mut text, mut tokens, mut first) = (String::new(), Vec::new(), Duration::ZERO);
    let (mut logprobs, mut top) = (Vec::new(), Vec::new());
    engine.add_request(request)?;
    loop {
        for event in engine.step()? {
            match event.kind {
                EventKind::Token { token, text: delta, logprob, top_logprobs: best } => {
                    if tokens.is_empty() {
                        first = start.elapsed();
                    }
                    tokens.push(token);
                    if let Some(logprob) = logprob {
                        logprobs.push(logprob);
                        top.push(best);
                    }
                    show(&delta);
                    text += &delta;
                }
                EventKind::Finished { reason, text: rest, usage } => {
                    show(&rest);
                    text += &rest;
                    let rest = start.elapsed().saturating_sub(first);
                    return Ok(Answer { text, tokens, logprobs, top, reason, usage, first, rest });
                }
            }
        }
        if !engine.has_work() {
            return Err(Error::Broken("a request ended without a word".into()));
        }
    }
}

/// Writes text to standard output at once. A reader that is gone ends the process by its signal.
pub fn print(text: &str) {
    let mut out = std::io::stdout().lock();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}
