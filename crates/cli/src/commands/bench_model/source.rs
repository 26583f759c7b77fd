//! Where the weights of a measured model come from.

use crate::model::{ModelArgs, loading};
use std::path::Path;
use warpsmith_engine::models::{Config, RandomWeights};
use warpsmith_engine::weights::Checkpoint;
use warpsmith_engine::{Engine, EngineOptions, Error, Result};

/// A file, or random numbers.
pub struct Source {
    /// Of all weights.
    pub bytes: usize,
    pub parameters: usize,
    random: Option<(Config, RandomWeights)>,
}

impl Source {
    /// `random` names a configuration.
    pub fn new(random: Option<&str>, model: &ModelArgs) -> Result<Source> {
        let Some(random) = random else {
            let checkpoint = Checkpoint::open(model.path()?)?;
            let bytes = checkpoint.tensors().map(|tensor| tensor.range().len()).sum();
            let parameters = checkpoint.tensors().map(|tensor| tensor.numel()).sum();
            return Ok(Source { bytes, parameters, random: None });
        };
        let json = match RandomWeights::config(random) {
            Some(json) => json,
            None => read(random)?,
        };
        let config = Config::from_json(&json)?;
        // What transformers takes for granted where a configuration does not say.
        let tied = json.get("tie_word_embeddings").and_then(serde_json::Value::as_bool).unwrap_or(false);
        let weights = RandomWeights::new(&config, tied, 0)?;
        let parameters = weights.parameters();
        Ok(Source { bytes: parameters * model.dtype().size(), parameters, random: Some((config, weights)) })
    }

    pub fn open(&self, model: &ModelArgs, engine: EngineOptions) -> Result<Engine> {
        match &self.random {
            None => model.open(engine),
            Some((config, weights)) => {
                loading("random weights", || Engine::with_weights(config, weights, model.options(engine)))
            }
        }
    }

    pub fn name(&self, engine: &Engine) -> String {
        let family = &engine.model().config().architecture;
        if self.random.is_some() { format!("{family}, random") } else { family.clone() }
    }
}

/// A configuration from a file, or from the folder that it is in.
fn read(path: &str) -> Result<serde_json::Value> {
    let refuse = |got: String| Error::Settings {
        what: "random",
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
