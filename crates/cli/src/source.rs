//! Where the weights of a model come from: a file, or random numbers.

use crate::model::ModelArgs;
use crate::progress::Loading;
use std::path::{Path, PathBuf};
use warpsmith::device::DeviceInfo;
use warpsmith::op::survey::Needed;
use warpsmith_engine::models::Watched;
use warpsmith_engine::models::{self, Config, RandomWeights};
use warpsmith_engine::weights::Checkpoint;
use warpsmith_engine::{Engine, EngineOptions, Error, OpenOptions, Result, needed_kernels};

/// The help of `--random`.
pub const RANDOM: &str = "Random weights instead of a file: a config.json, a folder with one, or the name of a model that \
is known [possible names: qwen3-0.6b, qwen3-1.7b, qwen3-4b, qwen3-8b, qwen3-30b-a3b, llama-3.2-1b, llama-3.1-8b]";

/// The weights of a model.
pub enum Source {
    File(Checkpoint),
    Random(Box<Config>, RandomWeights),
}

impl Source {
    /// `random` names a configuration; without it, `path` is that of the model.
    pub fn new(random: Option<&str>, path: impl FnOnce() -> Result<PathBuf>) -> Result<Source> {
        let Some(random) = random else { return Ok(Source::File(models::open(path()?)?)) };
        let json = match RandomWeights::config(random) {
            Some(json) => json,
            None => read("random", random)?,
        };
        let config = Config::from_json(&json)?;
        // The default of transformers where a configuration has no value.
        let tied = json.get("tie_word_embeddings").and_then(serde_json::Value::as_bool).unwrap_or(false);
        let weights = RandomWeights::new(&config, tied, 0)?;
        Ok(Source::Random(Box::new(config), weights))
    }

    pub fn parameters(&self) -> usize {
        match self {
            Source::File(checkpoint) => checkpoint.tensors().map(|tensor| tensor.numel()).sum(),
            Source::Random(_, weights) => weights.parameters(),
        }
    }

    /// Bytes of all weights, as they are stored or made.
    pub fn bytes(&self, model: &ModelArgs) -> usize {
        match self {
            Source::File(checkpoint) => checkpoint.tensors().map(|tensor| tensor.range().len()).sum(),
            Source::Random(_, weights) => weights.parameters() * model.dtype().size(),
        }
    }

    pub fn open(&self, model: &ModelArgs, engine: EngineOptions) -> Result<Engine> {
        match self {
            Source::File(_) => model.open(engine),
            Source::Random(config, weights) => model.open_weights(config, weights, engine),
        }
    }

    /// Opens the model with these options alone.
    pub fn open_with(&self, options: OpenOptions) -> Result<Engine> {
        let loading = Loading::new(match self {
            Source::File(_) => "weights",
            Source::Random(..) => "random weights",
        });
        let mut tell = |progress| loading.show(progress);
        match self {
            Source::File(checkpoint) => Engine::open_with(checkpoint.path(), options, &mut tell),
            Source::Random(config, weights) => {
                let watched = Watched::new(weights, weights.parameters(), &mut tell);
                Engine::with_weights(config, &watched, options)
            }
        }
    }

    pub fn name(&self, engine: &Engine) -> String {
        let family = &engine.model().config().architecture;
        match self {
            Source::File(_) => family.clone(),
            Source::Random(..) => format!("{family}, random"),
        }
    }

    /// The kernels that the model needs on a GPU.
    pub fn needed_kernels(&self, options: &OpenOptions, info: DeviceInfo) -> Result<Vec<Needed>> {
        match self {
            Source::File(checkpoint) => {
                needed_kernels(&Config::from_checkpoint(checkpoint)?, checkpoint, options, info)
            }
            Source::Random(config, weights) => needed_kernels(config, weights, options, info),
        }
    }
}

/// A configuration from a file, or from the folder that it is in, for the option `what`.
pub fn read(what: &'static str, path: &str) -> Result<serde_json::Value> {
    let refuse = |got: String| Error::Settings {
        what,
        expected: format!("a config.json, a folder with one, or one of {}", RandomWeights::KNOWN.join(", ")),
        got,
    };
    let mut file = Path::new(path).to_path_buf();
    if file.is_dir() {
        file.push("config.json");
    }
    let text = std::fs::read_to_string(&file).map_err(|error| refuse(format!("{path} ({error})")))?;
    serde_json::from_str(&text).map_err(|error| refuse(format!("{path} ({error})")))
}
