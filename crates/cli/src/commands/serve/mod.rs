//! `warpsmith serve`: an OpenAI-compatible server.

mod config;
mod warm;

use crate::model::{ModelArgs, at_least_one, resolve};
use crate::progress::show_compilation;
use crate::source::{self, Source};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use warpsmith::env;
use warpsmith_engine::env::MODEL;
use warpsmith_engine::{EngineOptions, OpenOptions, Pooling, Result};
use warpsmith_server::bridge::Bridge;
use warpsmith_server::{Ended, Limits, Metrics, Parser, Room, Server, ServerOptions};

/// Serve a model over HTTP, compatible with OpenAI's API
///
/// Serves /v1/chat/completions, /v1/completions, /v1/responses, /v1/embeddings, /v1/models, /tokenize, /detokenize, /health, /metrics,
/// /server_info, /flush_cache and /openapi.json. Without a model it serves the small default model, if it was fetched. Options
/// have the names of SGLang; those of vLLM are understood too. Ctrl-C or SIGTERM ends the server: running requests may finish.
#[derive(clap::Args, Clone)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// The model: a .gguf or .safetensors file, a folder with config.json, or a name on the Hugging Face hub
    #[arg(value_name = "MODEL")]
    path: Option<PathBuf>,
    #[command(flatten)]
    model: ModelArgs,
    #[arg(long, value_name = "CONFIG", conflicts_with_all = ["path", "model"], help = source::RANDOM)]
    random: Option<String>,
    /// Options from a TOML file: `port = 8000`, `api-key = ["..."]`; those of the command line come first
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// The address to listen on; 0.0.0.0 for all
    #[arg(long, default_value = "127.0.0.1")]
    host: String,
    /// The port to listen on; 0 for any that is free
    #[arg(long, default_value_t = 30000)]
    port: u16,
    /// The name of the model in requests; can be repeated [default: the file's or folder's name]
    #[arg(long, value_name = "NAME")]
    served_model_name: Vec<String>,
    /// A key that requests must have; can be repeated. Each has prefixes of its own in the cache [default: none is needed]
    #[arg(long, value_name = "KEY")]
    api_key: Vec<String>,
    /// The most outputs that are generated at the same time
    #[arg(long, value_name = "COUNT", default_value_t = MAX_RUNNING, value_parser = at_least_one(), alias = "max-num-seqs")]
    max_running_requests: usize,
    /// The most outputs that wait beyond those; further requests get 429
    #[arg(long, value_name = "COUNT", default_value_t = 256)]
    max_queued_requests: usize,
    /// The most tokens of a step, prompts and outputs together [default: 1024, or as many as may run]
    #[arg(long, value_name = "TOKENS", value_parser = at_least_one(), alias = "max-num-batched-tokens")]
    max_prefill_tokens: Option<usize>,
    /// The most tokens of one prompt in a step [default: 512]
    #[arg(long, value_name = "TOKENS", value_parser = at_least_one())]
    chunked_prefill_size: Option<usize>,
    /// Tokens whose keys and values are kept [default: on a GPU by the memory, on the CPU two contexts]
    #[arg(long, value_name = "TOKENS", value_parser = at_least_one())]
    max_total_tokens: Option<usize>,
    /// Tokens of a page, from 1 to 256 [default: 16 on the CPU, 64 on a GPU]
    #[arg(long, value_name = "TOKENS", value_parser = at_least_one(), alias = "block-size")]
    page_size: Option<usize>,
    /// Keep no prefixes for later requests
    #[arg(long, alias = "no-enable-prefix-caching")]
    disable_radix_cache: bool,
    /// How calls of tools are written: auto, none, qwen, hermes or llama3
    #[arg(long, value_name = "FORM", default_value = "auto")]
    tool_call_parser: String,
    /// How reasoning is written: auto, none or qwen3
    #[arg(long, value_name = "FORM", default_value = "auto")]
    reasoning_parser: String,
    /// What embeddings are: the hidden state of the last token, or the mean of all; `last` or `mean`. Requests can say it too
    #[arg(long, value_name = "FORM", default_value = "last", value_parser = pooling)]
    pooling: Pooling,
    /// Bytes of a request
    #[arg(long, value_name = "BYTES", default_value_t = Limits::default().max_body, value_parser = at_least_one())]
    max_body_bytes: usize,
    /// Connections at the same time; further ones wait
    #[arg(long, value_name = "COUNT", default_value_t = Limits::default().max_connections, value_parser = at_least_one())]
    max_connections: usize,
    /// Outputs for a prompt
    #[arg(long, value_name = "COUNT", default_value_t = Limits::default().max_n, value_parser = at_least_one())]
    max_n: usize,
    /// Seconds until the headers of a request must be there
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = seconds)]
    header_timeout: Duration,
    /// Seconds until the body of a request must be there
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = seconds)]
    body_timeout: Duration,
    /// Seconds that a client may read nothing of its answer
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = seconds)]
    stall_timeout: Duration,
    /// Seconds until a request must have ended [default: no limit]
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    request_timeout: Option<Duration>,
    /// Seconds that running requests have when the server is told to end
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = seconds)]
    shutdown_timeout: Duration,
    /// On a GPU, be ready before kernels are compiled and graphs captured: the first requests wait for what they need
    #[arg(long)]
    skip_server_warmup: bool,
    /// Seconds of one step after which the server is no longer healthy
    #[arg(long, value_name = "SECONDS", default_value = "300", value_parser = seconds)]
    watchdog_timeout: Duration,
}

const EXAMPLES: &str = "\
Examples:
  warpsmith serve
  warpsmith serve Qwen/Qwen3-0.6B --port 8000
  warpsmith serve model.gguf --host 0.0.0.0 --api-key secret \\
      --served-model-name chat
  warpsmith serve model.gguf --lora poems=adapters/poems --lora law=adapters/law
  warpsmith serve --config server.toml
  warpsmith serve --random qwen3-8b --device cuda --max-running-requests 256
  curl http://127.0.0.1:30000/v1/chat/completions \\
      -H 'Content-Type: application/json' \\
      -d '{\"messages\": [{\"role\": \"user\", \"content\": \"Hello\"}]}'";

/// Outputs that are generated at the same time.
pub const MAX_RUNNING: usize = 64;

/// The default model, as `scripts/model.sh` fetches it.
const DEFAULT: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";

/// A time above 0.
fn seconds(text: &str) -> std::result::Result<Duration, String> {
    let told = || format!("expected seconds above 0, got `{text}`");
    let seconds: f64 = text.parse().map_err(|_| told())?;
    Duration::try_from_secs_f64(seconds).ok().filter(|time| !time.is_zero()).ok_or_else(told)
}

fn pooling(name: &str) -> std::result::Result<Pooling, String> {
    name.parse().map_err(|error: warpsmith_engine::Error| error.to_string())
}

fn parser(name: &str) -> Parser {
    match name {
        "auto" => Parser::Auto,
        "none" => Parser::Off,
        name => Parser::Named(name.into()),
    }
}

/// Where the default model is, if it was fetched.
fn default_model() -> Result<PathBuf> {
    let cache = env::path(env::system::XDG_CACHE_HOME)
        .or_else(|| env::path(env::system::HOME).map(|home| home.join(".cache")));
    let path = cache.unwrap_or_default().join("warpsmith/models").join(DEFAULT);
    if path.is_file() {
        return Ok(path);
    }
    let expected = format!(
        "a model, one in ${MODEL}, or the default model, which `scripts/model.sh python3` fetches (92 MB) into {}",
        path.display()
    );
    Err(warpsmith::Error::parse("model", expected, "nothing").into())
}

/// The engine of a server: the most outputs at the same time, tokens of a step, and tokens of one prompt in it.
pub fn engine_options(max_running: usize, tokens: Option<usize>, chunk: Option<usize>) -> EngineOptions {
    let tokens = tokens.unwrap_or(1024.max(max_running));
    EngineOptions {
        max_running,
        max_batch_tokens: tokens,
        max_chunk: chunk.unwrap_or(512).min(tokens),
        ..EngineOptions::default()
    }
}

impl Args {
    fn source(&self) -> Result<(Source, String)> {
        let mut path = None;
        let source = Source::new(self.random.as_deref(), || {
            let named = match (&self.path, self.model.is_given()) {
                (Some(path), _) => resolve(path.clone())?,
                (None, true) => self.model.path()?,
                (None, false) => match env::path(MODEL) {
                    Some(_) => self.model.path()?,
                    None => default_model()?,
                },
            };
            path = Some(named.clone());
            Ok(named)
        })?;
        let stem =
            path.as_ref().and_then(|path| path.file_stem()).map(|stem| stem.to_string_lossy().into_owned());
        // A model of the hub is known by the name it has there.
        let given =
            self.path.as_ref().filter(|given| !given.exists()).map(|given| given.display().to_string());
        let name = given.or_else(|| self.random.clone()).or(stem).unwrap_or_else(|| "default".into());
        Ok((source, name))
    }

    fn server_options(&self, name: String) -> ServerOptions {
        ServerOptions {
            served_names: if self.served_model_name.is_empty() {
                vec![name]
            } else {
                self.served_model_name.clone()
            },
            adapters: self.model.adapters(),
            api_keys: self.api_key.clone(),
            reasoning: parser(&self.reasoning_parser),
            tools: parser(&self.tool_call_parser),
            pooling: self.pooling,
            limits: Limits {
                max_body: self.max_body_bytes,
                max_connections: self.max_connections,
                max_waiting: self.max_queued_requests,
                max_n: self.max_n,
                header_timeout: self.header_timeout,
                body_timeout: self.body_timeout,
                stall_timeout: self.stall_timeout,
                request_timeout: self.request_timeout,
                ..Limits::default()
            },
            shutdown_timeout: self.shutdown_timeout,
            watchdog: self.watchdog_timeout,
        }
    }

    /// How the model is opened.
    fn open_options(&self) -> OpenOptions {
        let engine =
            engine_options(self.max_running_requests, self.max_prefill_tokens, self.chunked_prefill_size);
        let engine = EngineOptions { prefix_cache: !self.disable_radix_cache, ..engine };
        OpenOptions {
            pool_tokens: self.max_total_tokens,
            page_size: self.page_size,
            ..self.model.options(engine)
        }
    }
}

pub fn run(args: &Args) -> std::result::Result<ExitCode, Box<dyn std::error::Error>> {
    let merged;
    let args = match &args.config {
        None => args,
        Some(path) => {
            merged = config::merge(path)?;
            &merged
        }
    };
    if let Some(i) = args.api_key.iter().position(|key| key.trim().is_empty()) {
        return Err(format!("--api-key number {} is empty", i + 1).into());
    }
    let (source, name) = args.source()?;
    let options = args.server_options(name);
    if let Some(name) = options.adapters.iter().find(|name| options.served_names.contains(name)) {
        return Err(format!(
            "--lora {name}: the model itself has this name; give the adapter another with NAME=FOLDER"
        )
        .into());
    }
    raise_file_limit();
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(cores.clamp(1, 8)).enable_all().build()?;
    let ended = runtime.block_on(serve(args, source, options))?;
    // Threads that prepare prompts may still run; nobody waits for them.
    runtime.shutdown_background();
    match ended {
        Ended::Told => Ok(ExitCode::SUCCESS),
        Ended::Failed(why) => {
            eprintln!("error: {why}");
            Ok(ExitCode::FAILURE)
        }
    }
}

async fn serve(
    args: &Args,
    source: Source,
    options: ServerOptions,
) -> std::result::Result<Ended, Box<dyn std::error::Error>> {
    let address = format!("{}:{}", args.host, args.port);
    let listener = TcpListener::bind((args.host.as_str(), args.port))
        .await
        .map_err(|error| format!("cannot listen on {address}: {error}"))?;
    let address = listener.local_addr()?;
    let name = options.served_names.join(", ");
    let limits = options.limits.clone();
    let room = Room { bytes: limits.max_backlog, time: limits.stall_timeout };
    let (around, open) = (args.model.clone(), args.clone());
    let bridge = Bridge::start_in(
        move |work: &mut dyn FnMut()| around.on_threads(work),
        move || {
            show_compilation();
            warm::open(&source, open.open_options(), open.skip_server_warmup)
        },
        Metrics::new(&options.served_names[0]),
        room,
        limits.max_waiting,
    );
    let server = Server::new(options, bridge.clone())?;
    eprintln!("loading {name}; http://{address}/health answers 503 until it can be used");
    tokio::spawn(async move {
        let mut state = bridge.watch();
        let ready = state.wait_for(|state| *state == warpsmith_server::bridge::State::Ready).await.is_ok();
        if let Some(facts) = bridge.facts().filter(|_| ready) {
            eprintln!(
                "serving {name} ({}, {} on {}) at http://{address}/v1: up to {} requests at once, {} tokens each",
                facts.architecture, facts.dtype, facts.device, facts.max_running, facts.room
            );
        }
    });
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let stop = async move {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
        eprintln!("ending; running requests may finish. Again to end at once");
        tokio::spawn(async move {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            }
            std::process::exit(130);
        });
    };
    Ok(server.run(listener, stop).await)
}

/// Allows as many open files as the system lets this process have: each connection is one.
fn raise_file_limit() {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: both calls take a pointer to one `rlimit`, which lives as long as they run.
    unsafe {
        if libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) == 0 {
            limit.rlim_cur = limit.rlim_max;
            libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit);
        }
    }
}
