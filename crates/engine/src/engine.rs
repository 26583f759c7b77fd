//! The engine: requests in, events out, one step at a time.

mod compute;
mod embed;
mod flight;
mod life;
mod view;
mod warm;

use crate::decode::Decode;
use crate::error::{Error, Result};
use crate::kv::KvCache;
use crate::models::Model;
use crate::models::layers::Buffer;
use crate::output::Output;
use crate::pages::Pages;
use crate::request::{Event, EventKind, FinishReason, Request, RequestId, Salt, SamplingParams, Usage};
use crate::sampler::{self, Choice};
use crate::scheduler::{Limits, Scheduler};
use crate::sequence::{Key, Sequence};
use crate::settings::{EngineOptions, Stats};
use crate::text::{ChatTemplate, Tokenizer};
use flight::Flight;
use life::Life;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;
use warpsmith::profile::{self, Kind};
use warpsmith::{DType, Stream};

pub use embed::Pooling;
pub use view::{SequenceView, View};

/// A request that has outputs to come.
struct Active {
    priority: i32,
    deadline: Option<Instant>,
    params: Arc<SamplingParams>,
    /// The outputs that have not ended.
    outputs: BTreeMap<usize, Output>,
    /// Outputs that begin when the first has its first token.
    has_forks: bool,
    /// While a profile is recorded.
    life: Option<Life>,
}

/// Runs a model for many requests at the same time.
pub struct Engine {
    model: Box<dyn Model>,
    kv: KvCache,
    /// Everything runs on it.
    stream: Stream,
    /// Of the last step, unless `decode` has them.
    logits: Buffer,
    /// Rows after the final norm, of the last embedding.
    hidden: Buffer,
    /// Created by the first decode step.
    decode: Option<Decode>,
    /// The step after the last reported one, if it was launched already.
    flight: Option<Flight>,
    scheduler: Scheduler,
    options: EngineOptions,
    requests: BTreeMap<RequestId, Active>,
    tokenizer: Option<Arc<Tokenizer>>,
    template: Option<Arc<ChatTemplate>>,
    /// The error that made the device unusable.
    fault: Option<Error>,
    /// What happened between steps.
    pending: Vec<Event>,
    next_request: u64,
    stats: Stats,
    /// By their numbers.
    adapters: Vec<AdapterKey>,
}

/// An adapter as requests name it.
struct AdapterKey {
    name: String,
    /// Salts its prefixes, so that the same tokens without the adapter are not taken for them.
    salt: Salt,
}

impl Engine {
    /// An engine for a model.
    ///
    /// # Errors
    /// If an option is out of range, or there is no memory for the pages.
    pub fn new(model: Box<dyn Model>, options: EngineOptions) -> Result<Engine> {
        let config = model.config();
        options.validate(config)?;
        profile::listen_to_tools();
        let kv_dtype = options.kv_dtype()?;
        let kv =
            KvCache::new(config.kv_shape(), options.num_pages, options.page_size, kv_dtype, options.device)?;
        let stream = match model.stream() {
            Some(stream) => stream.clone(),
            None => Stream::new(options.device)?,
        };
        let logits = Buffer::new(0, config.vocab_size, DType::F32, &stream)?;
        let hidden = Buffer::new(0, config.hidden_size, options.dtype, &stream)?;
        let pages = Pages::new(options.num_pages, options.page_size, options.prefix_cache)?;
        let limits = Limits {
            max_batch_tokens: options.max_batch_tokens,
            max_running: options.max_running,
            max_chunk: options.max_chunk,
        };
        Ok(Engine {
            model,
            kv,
            stream,
            logits,
            hidden,
            decode: None,
            flight: None,
            scheduler: Scheduler::new(limits, pages),
            options,
            requests: BTreeMap::new(),
            tokenizer: None,
            template: None,
            fault: None,
            pending: Vec::new(),
            next_request: 0,
            stats: Stats::default(),
            adapters: Vec::new(),
        })
    }

    /// The model.
    pub fn model(&self) -> &dyn Model {
        &*self.model
    }

    /// Gives the engine text: events carry it, stop texts work, and the tokenizer's end tokens end outputs.
    #[must_use]
    pub fn with_text(mut self, tokenizer: Tokenizer, template: Option<ChatTemplate>) -> Engine {
        self.options.end_ids.extend(tokenizer.final_ids().iter().map(|&id| id as i32));
        let tokens = tokenizer.len().min(self.model.config().vocab_size);
        self.options.vocab_size.get_or_insert(tokens);
        (self.tokenizer, self.template) = (Some(Arc::new(tokenizer)), template.map(Arc::new));
        // Which tokens exist may have changed.
        (self.decode, self.flight) = (None, None);
        self
    }

    /// The tokenizer, if the engine was given one.
    pub fn tokenizer(&self) -> Option<&Tokenizer> {
        self.tokenizer.as_deref()
    }

    /// The chat template, if the engine was given one.
    pub fn template(&self) -> Option<&ChatTemplate> {
        self.template.as_deref()
    }

    /// The tokenizer and the chat template, for threads that prepare prompts.
    pub fn text(&self) -> (Option<Arc<Tokenizer>>, Option<Arc<ChatTemplate>>) {
        (self.tokenizer.clone(), self.template.clone())
    }

    /// The settings, as they were completed for the model.
    pub fn options(&self) -> &EngineOptions {
        &self.options
    }

    /// The most tokens, prompt and output together, that any request can have: by the model's context, and by the pages.
    /// The last token of all is never computed, so it needs no place in a page.
    pub fn room(&self) -> usize {
        self.model.config().max_positions.min(self.scheduler.capacity() + 1)
    }

    /// The error that made the device unusable, if one has: nothing can be computed any more, and only another process can
    /// go on.
    pub fn fault(&self) -> Option<&Error> {
        self.fault.as_ref()
    }

    /// The requests that began to be computed in the last step.
    pub fn started(&self) -> &[RequestId] {
        self.scheduler.started()
    }

    /// Tells the engine which adapters its model was loaded with.
    pub(crate) fn with_adapters(mut self, names: impl Iterator<Item = String>) -> Engine {
        self.adapters = names.map(|name| AdapterKey { name, salt: random_salt() }).collect();
        self
    }

    /// The names of the adapters that requests can ask for.
    pub fn adapters(&self) -> impl ExactSizeIterator<Item = &str> {
        self.adapters.iter().map(|adapter| adapter.name.as_str())
    }

    /// The number of an adapter.
    fn adapter(&self, name: &str) -> Result<usize> {
        self.adapters.iter().position(|adapter| adapter.name == name).ok_or_else(|| {
            let names: Vec<&str> = self.adapters().collect();
            let expected = if names.is_empty() { "none, as none is loaded".into() } else { names.join(", ") };
            Error::request("adapter", expected, format!("`{name}`"))
        })
    }

    /// The salt of prefixes that are computed with an adapter. Adapters' own salts are random numbers that nobody is told, so no
    /// choice of a salt meets them. The first half of a salt stays: callers may mark there whose it is.
    fn salt_with(&self, salt: Option<Salt>, adapter: Option<usize>) -> Option<Salt> {
        let Some(adapter) = adapter else { return salt };
        let own = self.adapters[adapter].salt;
        Some(salt.map_or(own, |salt| std::array::from_fn(|i| salt[i] ^ own[i])))
    }

    /// The number of tokens that exist.
    pub fn vocab_size(&self) -> usize {
        self.options.vocab_size.unwrap_or(self.model.config().vocab_size)
    }

    /// Adds a request. It is worked on from the next [`step`](Self::step) on.
    ///
    /// # Errors
    /// If an option is out of range, or the request can never fit.
    pub fn add_request(&mut self, request: Request) -> Result<RequestId> {
        let Request { prompt, params, priority, deadline, grammar, salt, adapter } = request;
        let adapter = adapter.map(|name| self.adapter(&name)).transpose()?;
        let salt = self.salt_with(salt, adapter);
        params.validate(self.vocab_size())?;
        if self.tokenizer.is_none() && !params.stop.is_empty() {
            return Err(Error::request(
                "stop",
                "no texts, because the engine has no tokenizer",
                params.stop.len(),
            ));
        }
        let max_len = self.max_len(&prompt, &params)?;
        let id = RequestId(self.next_request);
        self.next_request += 1;
        let params = Arc::new(params);
        let seed = params.seed.unwrap_or_else(random_seed);
        let output = |index| {
            let (seed, text) = (sampler::seed_of_output(seed, index), self.tokenizer.clone());
            Ok((index, Output::new(params.clone(), seed, &prompt, text, grammar.as_ref())?))
        };
        let outputs = (0..params.n).map(output).collect::<Result<_>>()?;
        let has_forks = params.n > 1;
        let key = Key { priority, request: id, index: 0 };
        let life = Life::begin(id);
        self.requests.insert(id, Active { priority, deadline, params, outputs, has_forks, life });
        self.scheduler.add(Sequence { salt, adapter, ..Sequence::new(key, prompt, max_len) });
        Ok(id)
    }

    /// The most tokens, prompt and output together, that a request may have.
    fn max_len(&self, prompt: &[i32], params: &SamplingParams) -> Result<usize> {
        let context = self.model.config().max_positions;
        if prompt.is_empty() || prompt.len() >= context {
            let expected = format!("1 to {} tokens", context.saturating_sub(1));
            return Err(Error::request("prompt", expected, prompt.len()));
        }
        self.check_exist("prompt", prompt)?;
        let room = self.room();
        if prompt.len() >= room {
            let expected = format!("at most {} tokens, which the page pool can hold", room - 1);
            return Err(Error::request("prompt", expected, prompt.len()));
        }
        match params.max_tokens {
            None => Ok(room),
            Some(most) if most <= room - prompt.len() => Ok(prompt.len() + most),
            Some(most) => {
                let limit = if room == context { "context" } else { "page pool" };
                let expected = format!("at most {} after this prompt, by the {limit}", room - prompt.len());
                Err(Error::request("max_tokens", expected, most))
            }
        }
    }

    /// Refuses tokens that do not exist.
    fn check_exist(&self, what: &'static str, tokens: &[i32]) -> Result<()> {
        let vocab = self.vocab_size();
        match tokens.iter().find(|&&id| !usize::try_from(id).is_ok_and(|id| id < vocab)) {
            Some(&id) => Err(Error::request(what, format!("tokens from 0 to below {vocab}"), id)),
            None => Ok(()),
        }
    }

    /// Ends a request in any state. Its last events come with the next [`step`](Self::step). `false` if it has ended.
    ///
    /// # Errors
    /// If an internal invariant is broken.
    pub fn cancel(&mut self, id: RequestId) -> Result<bool> {
        let mut events = Vec::new();
        let found = self.end_request(id, &FinishReason::Cancelled, &mut events)?;
        self.pending.append(&mut events);
        Ok(found)
    }

    /// Whether there is anything to compute or to report.
    pub fn has_work(&self) -> bool {
        !self.requests.is_empty() || !self.pending.is_empty()
    }

    /// What the engine has done so far, and what it is doing.
    pub fn stats(&self) -> Stats {
        let (running, waiting) = self.scheduler.counts();
        let graphs = self.decode.as_ref().map(Decode::graphs).unwrap_or_default();
        Stats {
            graphs: graphs.captured,
            graph_launches: graphs.launches,
            cascade_steps: self.decode.as_ref().map_or(0, |decode| decode.cascade_steps),
            preemptions: self.scheduler.num_preemptions(),
            running,
            waiting,
            available_pages: self.scheduler.pages().available(),
            cached_pages: self.scheduler.pages().num_cached(),
            ..self.stats
        }
    }

    /// Why no CUDA graphs are captured any more, if that failed. Steps then run call by call.
    pub fn graph_failure(&self) -> Option<String> {
        self.decode.as_ref()?.graphs().failure
    }

    /// Forgets all prefixes that nobody uses now.
    pub fn clear_prefix_cache(&mut self) {
        self.scheduler.clear_cache();
    }

    /// Checks every rule that holds between steps. For tests: it takes time linear in the pages.
    ///
    /// # Errors
    /// Says what is broken.
    pub fn check(&self) -> Result<()> {
        self.scheduler.check()
    }

    /// One step: plans, computes, and reports the results.
    ///
    /// A request that cannot be computed fails alone if it is the cause, and together with the others of its step if
    /// the cause is unknown. The engine continues.
    ///
    /// # Errors
    /// If a rule that always holds is broken.
    pub fn step(&mut self) -> Result<Vec<Event>> {
        let mut step = profile::span(Kind::Step, || "step".into());
        let mut events = std::mem::take(&mut self.pending);
        self.scheduler.forget_started();
        self.end_late_requests(&mut events)?;
        let scheduling = profile::span(Kind::Host, || "schedule".into());
        let (plan, landing) = match self.land() {
            Some((plan, landing)) => (plan, Some(landing)),
            None => {
                let mut plan = self.scheduler.schedule()?;
                self.arrange(&mut plan);
                (plan, None)
            }
        };
        drop(scheduling);
        if plan.shares.is_empty() {
            return Ok(events);
        }
        step.rename(|| plan.title());
        self.note_started();
        match self.run(&plan, landing) {
            Ok(tokens) => self.process(&plan, tokens.as_deref(), &mut events)?,
            Err(error) => {
                self.flight = None;
                self.note_fault(&error);
                let reason = FinishReason::Failed(error.to_string());
                for share in &plan.shares {
                    self.end_request(share.key.request, &reason, &mut events)?;
                }
            }
        }
        Ok(events)
    }

    /// Notes which requests begin to be computed, for profiles.
    fn note_started(&mut self) {
        if !profile::is_on() {
            return;
        }
        for id in self.scheduler.started() {
            if let Some(life) = self.requests.get_mut(id).and_then(|request| request.life.as_mut()) {
                life.start();
            }
        }
    }

    /// Remembers an error after which the device computes nothing more.
    fn note_fault(&mut self, error: &Error) {
        if matches!(error, Error::Library(warpsmith::Error::Poisoned { .. })) {
            self.fault.get_or_insert(error.clone());
        }
    }

    fn end_late_requests(&mut self, events: &mut Vec<Event>) -> Result<()> {
        if self.requests.values().all(|request| request.deadline.is_none()) {
            return Ok(());
        }
        let now = Instant::now();
        let is_late = |request: &Active| request.deadline.is_some_and(|deadline| deadline <= now);
        let late = self.requests.iter().filter(|(_, request)| is_late(request)).map(|(&id, _)| id);
        for id in late.collect::<Vec<_>>() {
            self.end_request(id, &FinishReason::Deadline, events)?;
        }
        Ok(())
    }

    /// Reports a token, and ends the output if it was the last, or if there is none.
    fn deliver(&mut self, key: Key, choice: Option<Choice>, events: &mut Vec<Event>) -> Result<()> {
        let Some(choice) = choice else {
            let output = self.requests.get(&key.request).and_then(|request| request.outputs.get(&key.index));
            let why = match output.and_then(Output::fault) {
                Some(fault) => format!("the grammar cannot go on: {fault}"),
                None => "the model gave logits that are not numbers".into(),
            };
            return self.end_output(key, FinishReason::Failed(why), events);
        };
        self.stats.generated_tokens += 1;
        let request = self.requests.get_mut(&key.request).expect("what runs belongs to a request");
        if let Some(life) = &mut request.life {
            life.token();
        }
        let output = request.outputs.get_mut(&key.index).expect("what runs has not ended");
        let ends = self.options.end_ids.contains(&choice.token);
        let (kind, mut reason) = output.push(choice, ends);
        events.push(Event { request: key.request, index: key.index, kind });
        if reason.is_none() && self.scheduler.is_at_full_length(key) {
            reason = Some(FinishReason::Length);
        }
        match reason {
            Some(reason) => self.end_output(key, reason, events),
            None => Ok(()),
        }
    }

    /// Ends one output of a request.
    fn end_output(&mut self, key: Key, reason: FinishReason, events: &mut Vec<Event>) -> Result<()> {
        let sequence = self.scheduler.remove(key)?;
        let Some(request) = self.requests.get_mut(&key.request) else { return Ok(()) };
        let Some(output) = request.outputs.remove(&key.index) else { return Ok(()) };
        let usage = Usage {
            prompt_tokens: output.prompt_len,
            cached_tokens: sequence.as_ref().and_then(|sequence| sequence.cached_tokens).unwrap_or(0),
            output_tokens: output.num_tokens,
            preemptions: sequence.map_or(0, |sequence| sequence.preemptions),
        };
        let kind = EventKind::Finished { reason, text: output.rest(), usage };
        events.push(Event { request: key.request, index: key.index, kind });
        if request.outputs.is_empty() {
            self.requests.remove(&key.request);
        }
        Ok(())
    }

    /// Ends all outputs of a request that have not ended. `false` if there is no such request.
    fn end_request(&mut self, id: RequestId, reason: &FinishReason, events: &mut Vec<Event>) -> Result<bool> {
        let Some(request) = self.requests.get(&id) else { return Ok(false) };
        let priority = request.priority;
        for index in request.outputs.keys().copied().collect::<Vec<_>>() {
            self.end_output(Key { priority, request: id, index }, reason.clone(), events)?;
        }
        Ok(true)
    }
}

/// A new salt each time, the first half of which is zero.
fn random_salt() -> Salt {
    let mut salt = Salt::default();
    salt[16..].chunks_exact_mut(8).for_each(|part| part.copy_from_slice(&random_seed().to_le_bytes()));
    salt
}

/// A new seed each time.
fn random_seed() -> u64 {
    use std::hash::{BuildHasher, Hasher, RandomState};
    RandomState::new().build_hasher().finish()
}
