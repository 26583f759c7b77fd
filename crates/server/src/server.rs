//! Connections: how they are accepted, limited and ended.

use crate::bridge::{Bridge, EmbedFailure, Facts, Job, Refusal, State, Ticket};
use crate::error::{ApiError, Result};
use crate::grammar::Grammars;
use crate::keys::Keys;
use crate::options::ServerOptions;
use crate::output::Forms;
use crate::routes;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use std::future::Future;
use std::io;
use std::os::fd::AsRawFd;
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, oneshot, watch};
use warpsmith_engine::Pooling;

/// How long connections may take to end when everything else has.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// How long a server that has failed still tells its clients so.
const AFTERLIFE: Duration = Duration::from_secs(2);
/// How long after a refusal a client should try again.
const RETRY_AFTER: u64 = 1;

/// What all handlers share.
pub struct App {
    /// The way to the engine.
    pub bridge: Bridge,
    /// As the server was started.
    pub options: ServerOptions,
    /// Who may use it.
    pub keys: Keys,
    grammars: OnceLock<Result<Grammars, String>>,
    forms: OnceLock<Forms>,
    /// Prompts that are prepared at the same time.
    preparing: Arc<Semaphore>,
    /// Connections that are open.
    pub connections: AtomicUsize,
    /// When it began, in seconds since 1970.
    pub started: u64,
}

impl App {
    /// About the model.
    ///
    /// # Errors
    /// If the server does not serve.
    pub fn facts(&self) -> Result<&Facts> {
        match (self.bridge.state(), self.bridge.facts()) {
            (State::Ready, Some(facts)) => Ok(facts),
            (state, _) => Err(refused(Refusal::State(state))),
        }
    }

    /// What the output of the model may have in it.
    pub fn forms(&self, facts: &Facts) -> Forms {
        let ServerOptions { reasoning, tools, .. } = &self.options;
        // Names were checked when the server was started.
        *self
            .forms
            .get_or_init(|| Forms::new(facts.tokenizer.as_deref(), reasoning, tools).unwrap_or_default())
    }

    /// Grammars for the model's tokens.
    ///
    /// # Errors
    /// If it has none.
    pub fn grammars(&self, facts: &Facts) -> Result<&Grammars> {
        let make = || {
            let tokenizer = facts.tokenizer.clone().ok_or("the model has no tokenizer")?;
            Grammars::new(tokenizer, facts.vocab_size, &facts.end_ids)
        };
        self.grammars.get_or_init(make).as_ref().map_err(|why| ApiError::server(why.clone()))
    }

    /// Whether requests ask for the model under this name.
    ///
    /// # Errors
    /// If not.
    pub fn check_model(&self, name: &str) -> Result<()> {
        if self.options.served_names.iter().chain(&self.options.adapters).any(|served| served == name) {
            return Ok(());
        }
        let told =
            format!("`model`: there is no model `{}` here", name.chars().take(100).collect::<String>());
        let mut error = ApiError::not_found(told).code("model_not_found");
        error.param = Some("model".into());
        Err(error)
    }

    /// The name that answers tell.
    pub fn model_name(&self) -> &str {
        self.options.served_names.first().map_or("default", String::as_str)
    }

    /// Does work that takes time, on a thread that may wait.
    ///
    /// # Errors
    /// Those of the work.
    pub async fn prepare<T: Send + 'static>(
        self: &Arc<App>,
        work: impl FnOnce(&App) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let gone = |_| ApiError::unavailable("the server is ending", None);
        let permit = self.preparing.clone().acquire_owned().await.map_err(|_| gone(()))?;
        let app = self.clone();
        let work = move || {
            let _permit = permit;
            work(&app)
        };
        let done = tokio::task::spawn_blocking(work).await;
        done.map_err(|_| ApiError::server("preparing the request failed"))?
    }

    /// Hands requests to the engine.
    ///
    /// # Errors
    /// If it does not take them.
    pub fn submit(&self, jobs: Vec<Job>, arrived: Instant) -> Result<Ticket> {
        self.bridge.submit(jobs, arrived).map_err(refused)
    }

    /// Asks the engine for embeddings.
    ///
    /// # Errors
    /// If it does not take the request.
    pub(crate) fn embed(
        &self,
        inputs: Vec<Vec<i32>>,
        pooling: Pooling,
        adapter: Option<String>,
        arrived: Instant,
    ) -> Result<oneshot::Receiver<Result<Vec<Vec<f32>>, EmbedFailure>>> {
        self.bridge.embed(inputs, pooling, adapter, self.deadline(arrived)).map_err(refused)
    }

    /// Whether this many outputs could be taken now.
    ///
    /// # Errors
    /// If not.
    pub fn check_room(&self, outputs: usize) -> Result<()> {
        self.bridge.check(outputs).map_err(refused)
    }

    /// When a request that arrived at some time must have ended.
    pub fn deadline(&self, arrived: Instant) -> Option<Instant> {
        self.options.limits.request_timeout.map(|time| arrived + time)
    }
}

fn refused(refusal: Refusal) -> ApiError {
    match refusal {
        Refusal::Busy => ApiError::busy(RETRY_AFTER),
        Refusal::State(State::Loading) => ApiError::unavailable("the model is being loaded", Some(5)),
        Refusal::State(State::Failed(why)) => {
            ApiError::unavailable(format!("the engine has failed: {why}"), None)
        }
        Refusal::State(_) => ApiError::unavailable("the server is ending", None),
    }
}

/// How a server ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ended {
    /// As it was told to.
    Told,
    /// Because the engine could not go on.
    Failed(String),
}

/// A server that has not started to listen.
pub struct Server {
    app: Arc<App>,
}

impl Server {
    /// On an engine that may still be loading.
    ///
    /// # Errors
    /// If an option has a name that is not known.
    pub fn new(options: ServerOptions, bridge: Bridge) -> Result<Server, String> {
        Forms::new(None, &options.reasoning, &options.tools)?;
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let app = App {
            bridge,
            keys: Keys::new(&options.api_keys),
            options,
            grammars: OnceLock::new(),
            forms: OnceLock::new(),
            preparing: Arc::new(Semaphore::new(cores)),
            connections: AtomicUsize::new(0),
            started: crate::http::now(),
        };
        Ok(Server { app: Arc::new(app) })
    }

    /// Serves until `stop`, or until the engine fails.
    ///
    /// Then nothing new is taken; running requests have the time that the options give them.
    pub async fn run(self, listener: TcpListener, stop: impl Future<Output = ()>) -> Ended {
        let app = self.app;
        let router = routes::router(app.clone());
        let (end, ending) = watch::channel(false);
        let room = Arc::new(Semaphore::new(app.options.limits.max_connections));
        let accepting = async {
            loop {
                // Further clients wait in the system's queue.
                let Ok(permit) = room.clone().acquire_owned().await else { return };
                match listener.accept().await {
                    Ok((stream, _)) => {
                        let (app, router, ending) = (app.clone(), router.clone(), ending.clone());
                        tokio::spawn(async move {
                            app.connections.fetch_add(1, Ordering::Relaxed);
                            connection(stream, router, &app, ending).await;
                            app.connections.fetch_sub(1, Ordering::Relaxed);
                            drop(permit);
                        });
                    }
                    // Without file descriptors for instance: others will be closed.
                    Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
                }
            }
        };
        let mut state = app.bridge.watch();
        let mut finished = pin!(async move {
            loop {
                match state.borrow_and_update().clone() {
                    State::Failed(why) => return Ended::Failed(why),
                    State::Ended => return Ended::Told,
                    _ => {}
                }
                if state.changed().await.is_err() {
                    return Ended::Told;
                }
            }
        });
        let life = async {
            let ended = tokio::select! {
                () = stop => {
                    let deadline = Instant::now() + app.options.shutdown_timeout;
                    app.bridge.end(deadline);
                    let latest = tokio::time::Instant::from_std(deadline) + AFTERLIFE;
                    // While a model is loaded, nobody listens to the engine's door.
                    tokio::time::timeout_at(latest, &mut finished).await.unwrap_or(Ended::Told)
                }
                ended = &mut finished => ended,
            };
            // Who was served before is told. If nobody was, nobody waits.
            if matches!(ended, Ended::Failed(_)) && app.bridge.facts().is_some() {
                tokio::time::sleep(AFTERLIFE).await;
            }
            ended
        };
        let ended = tokio::select! {
            ended = life => ended,
            () = accepting => Ended::Told,
        };
        let _ = end.send(true);
        let since = Instant::now();
        while app.connections.load(Ordering::Relaxed) > 0 && since.elapsed() < LAST_WORDS {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        ended
    }
}

/// Serves one connection.
async fn connection(stream: TcpStream, router: axum::Router, app: &App, mut ending: watch::Receiver<bool>) {
    let limits = &app.options.limits;
    let _ = stream.set_nodelay(true);
    let _ = give_up_after(&stream, limits.stall_timeout);
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(limits.header_timeout).max_buf_size(64 << 10);
    let mut connection =
        pin!(builder.serve_connection(TokioIo::new(stream), TowerToHyperService::new(router)));
    tokio::select! {
        // Errors are those of a client that has gone or is too slow: there is nobody to tell.
        _ = &mut connection => return,
        _ = ending.wait_for(|ending| *ending) => {}
    }
    connection.as_mut().graceful_shutdown();
    let _ = tokio::time::timeout(LAST_WORDS, connection).await;
}

/// Closes a connection whose client takes nothing for so long: writes have no time limit otherwise.
fn give_up_after(stream: &TcpStream, time: Duration) -> io::Result<()> {
    let millis = libc::c_uint::try_from(time.as_millis()).unwrap_or(libc::c_uint::MAX);
    // SAFETY: the descriptor is that of a socket that is open as long as `stream`, and the option takes a number of this size.
    let result = unsafe {
        libc::setsockopt(
            stream.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_USER_TIMEOUT,
            (&raw const millis).cast(),
            size_of::<libc::c_uint>() as libc::socklen_t,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
