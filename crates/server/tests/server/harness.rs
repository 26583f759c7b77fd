//! A server for tests, in the test's own process.

use serde_json::{Value, json};
use std::path::Path;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use warpsmith_engine::models::{Config, RandomWeights};
use warpsmith_engine::text::{ChatTemplate, Tokenizer};
use warpsmith_engine::{Engine, EngineOptions, Error, OpenOptions};
use warpsmith_server::bridge::{Bridge, State};
use warpsmith_server::client::{Answer, Target};
use warpsmith_server::{Ended, Limits, Metrics, Room, Server, ServerOptions};

/// What is special about a test's server.
pub struct Setup {
    pub options: ServerOptions,
    pub engine: EngineOptions,
    pub pool_tokens: usize,
    pub template: &'static str,
}

impl Default for Setup {
    fn default() -> Setup {
        Setup {
            options: ServerOptions {
                served_names: vec!["tiny".into(), "alias".into()],
                shutdown_timeout: Duration::from_secs(5),
                ..ServerOptions::default()
            },
            engine: EngineOptions { max_running: 32, ..EngineOptions::default() },
            pool_tokens: 8192,
            template: TEMPLATE,
        }
    }
}

impl Setup {
    /// With other limits.
    pub fn limits(change: impl FnOnce(&mut Limits)) -> Setup {
        let mut setup = Setup::default();
        change(&mut setup.options.limits);
        setup
    }
}

const TEMPLATE: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n\
    {% if m.content == 'refuse' %}{{ raise_exception('not that') }}{% endif %}{{ m.content }}<|im_end|>\n\
    {% endfor %}{% if tools %}{{ tools | length }}{% endif %}{% if add_generation_prompt %}<|im_start|>assistant\n\
    {% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}";

/// Tokens of the model.
pub const VOCAB: usize = 593;
/// Its context.
pub const CONTEXT: usize = 1024;

/// A Llama of two small layers with random weights, that speaks.
pub fn engine(setup: &Setup) -> Result<Engine, Error> {
    let json = json!({
        "model_type": "llama", "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
        "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "tie_word_embeddings": false, "hidden_act": "silu",
    });
    let config = Config::from_json(&json)?;
    let weights = RandomWeights::new(&config, false, 1)?;
    let options = OpenOptions {
        engine: setup.engine.clone(),
        pool_tokens: Some(setup.pool_tokens),
        ..OpenOptions::default()
    };
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../engine/tests/fixtures/tokenizer");
    let template = ChatTemplate::new(setup.template, serde_json::Map::new())?;
    Ok(Engine::with_weights(&config, &weights, options)?
        .with_text(Tokenizer::from_folder(folder)?, Some(template)))
}

/// A server that runs.
pub struct Running {
    pub target: Target,
    pub address: String,
    pub bridge: Bridge,
    stop: Option<oneshot::Sender<()>>,
    pub ended: Option<tokio::task::JoinHandle<Ended>>,
}

impl Running {
    /// Starts a server and waits until it is ready.
    pub async fn start(setup: Setup) -> Running {
        let running = Running::open(setup, engine).await;
        let mut state = running.bridge.watch();
        state.wait_for(|state| *state == State::Ready).await.unwrap();
        running
    }

    /// Starts a server whose engine is opened by `open`.
    pub async fn open(
        setup: Setup,
        open: impl FnOnce(&Setup) -> Result<Engine, Error> + Send + 'static,
    ) -> Running {
        let options = setup.options.clone();
        let limits = options.limits.clone();
        let metrics = Metrics::new(&options.served_names[0]);
        let room = Room { bytes: limits.max_backlog, time: limits.stall_timeout };
        let bridge = Bridge::start(move || open(&setup), metrics, room, limits.max_waiting);
        let key = options.api_keys.first().cloned();
        let server = Server::new(options, bridge.clone()).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let target = Target::new(&format!("http://{address}"), key).unwrap();
        let (stop, stopped) = oneshot::channel();
        let ended = tokio::spawn(server.run(listener, async move {
            let _ = stopped.await;
        }));
        Running { target, address, bridge, stop: Some(stop), ended: Some(ended) }
    }

    /// With another key.
    pub fn with_key(&self, key: Option<&str>) -> Target {
        Target::new(&format!("http://{}", self.address), key.map(String::from)).unwrap()
    }

    pub async fn get(&self, path: &str) -> Answer {
        self.target.send("GET", path, None).await.unwrap()
    }

    pub async fn post(&self, path: &str, body: Value) -> Answer {
        self.target.send("POST", path, Some(&body)).await.unwrap()
    }

    /// An answer that must be one.
    pub async fn ask(&self, path: &str, body: Value) -> Value {
        let answer = self.post(path, body).await;
        assert_eq!(answer.status, 200, "{}", answer.json());
        answer.json()
    }

    /// All events of a stream but the last, `[DONE]`.
    pub async fn events(&self, path: &str, body: Value) -> Vec<Value> {
        let mut events = Vec::new();
        let mut is_done = false;
        let answer = self.target.stream(path, &body, |data| {
            is_done = data == "[DONE]";
            if !is_done {
                events.push(serde_json::from_str(data).unwrap());
            }
            true
        });
        let answer = answer.await.unwrap();
        assert_eq!(answer.status, 200, "{}", answer.json());
        assert!(is_done, "{events:?}");
        events
    }

    /// Tells the server to end, and waits for it.
    pub async fn stop(mut self) -> Ended {
        self.tell_to_stop();
        self.ended.take().unwrap().await.unwrap()
    }

    pub fn tell_to_stop(&mut self) {
        let _ = self.stop.take().unwrap().send(());
    }

    /// Waits until nothing is running.
    pub async fn quiet(&self) {
        for _ in 0..2000 {
            let now = self.bridge.snapshot();
            if self.bridge.open_outputs() == 0 && now.stats.running + now.stats.waiting == 0 {
                return;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        panic!("something is still running: {:?}", self.bridge.snapshot());
    }
}

/// A message of a user.
pub fn user(text: &str) -> Value {
    json!([{ "role": "user", "content": text }])
}
