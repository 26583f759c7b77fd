//! Figures for Prometheus, under the names that vLLM has given them.

use crate::bridge::Snapshot;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use std::borrow::Cow;
use std::sync::atomic::AtomicU64;
use std::time::Duration;
use warpsmith_engine::{FinishReason, Usage};

const FIRST_TOKEN: [f64; 22] = [
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0, 2560.0,
];
const BETWEEN_TOKENS: [f64; 19] = [
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
];
const WHOLE: [f64; 21] = [
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
    960.0, 1920.0, 7680.0,
];
const TOKENS: [f64; 16] = [
    1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10_000.0, 20_000.0,
    50_000.0, 100_000.0,
];

/// Why a request ended, as a label.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Finished {
    finished_reason: Reason,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelValue)]
#[allow(non_camel_case_types)]
enum Reason {
    stop,
    length,
    abort,
    error,
}

/// The answer of a request over HTTP, as a label.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Answered {
    status: u16,
}

type Real = Gauge<f64, AtomicU64>;

/// All figures.
pub struct Metrics {
    registry: Registry,
    running: Gauge,
    waiting: Gauge,
    cache_usage: Real,
    prompt_tokens: Counter,
    generation_tokens: Counter,
    cache_queries: Counter,
    cache_hits: Counter,
    preemptions: Counter,
    finished: Family<Finished, Counter>,
    answered: Family<Answered, Counter>,
    first_token: Histogram,
    between_tokens: Histogram,
    whole: Histogram,
    queue: Histogram,
    prefill: Histogram,
    decode: Histogram,
    prompt_size: Histogram,
    output_size: Histogram,
    step_tokens: Histogram,
}

impl Metrics {
    /// For a model with this name.
    pub fn new(model: &str) -> Metrics {
        let label = |name: &'static str, value: &str| (Cow::from(name), Cow::from(value.to_owned()));
        let labels = [label("model_name", model), label("engine", "0")].into_iter();
        let mut registry = Registry::with_labels(labels);
        let metrics = Metrics {
            running: Gauge::default(),
            waiting: Gauge::default(),
            cache_usage: Real::default(),
            prompt_tokens: Counter::default(),
            generation_tokens: Counter::default(),
            cache_queries: Counter::default(),
            cache_hits: Counter::default(),
            preemptions: Counter::default(),
            finished: Family::default(),
            answered: Family::default(),
            first_token: Histogram::new(FIRST_TOKEN),
            between_tokens: Histogram::new(BETWEEN_TOKENS),
            whole: Histogram::new(WHOLE),
            queue: Histogram::new(WHOLE),
            prefill: Histogram::new(WHOLE),
            decode: Histogram::new(WHOLE),
            prompt_size: Histogram::new(TOKENS),
            output_size: Histogram::new(TOKENS),
            step_tokens: Histogram::new(TOKENS),
            registry: Registry::default(),
        };
        // The registry adds the point at the end of the texts, and `_total` to the names of counters.
        let r = &mut registry;
        r.register("vllm:num_requests_running", "Outputs that are being generated", metrics.running.clone());
        r.register("vllm:num_requests_waiting", "Outputs that wait for their turn", metrics.waiting.clone());
        let help = "The part of the pages of keys and values in use, from 0 to 1";
        r.register("vllm:kv_cache_usage_perc", help, metrics.cache_usage.clone());
        r.register("vllm:prompt_tokens", "Tokens of prompts", metrics.prompt_tokens.clone());
        r.register("vllm:generation_tokens", "Tokens that were generated", metrics.generation_tokens.clone());
        let help = "Tokens of prompts that were looked up in the prefix cache";
        r.register("vllm:prefix_cache_queries", help, metrics.cache_queries.clone());
        let help = "Tokens of prompts that were found in the prefix cache";
        r.register("vllm:prefix_cache_hits", help, metrics.cache_hits.clone());
        r.register("vllm:num_preemptions", "Outputs that lost their pages", metrics.preemptions.clone());
        let help = "Outputs that ended, by the reason: stop, length, abort or error";
        r.register("vllm:request_success", help, metrics.finished.clone());
        r.register("http_requests", "Requests, by the status of the answer", metrics.answered.clone());
        let help = "Seconds from the arrival of a request to its first token";
        r.register("vllm:time_to_first_token_seconds", help, metrics.first_token.clone());
        let help = "Seconds between two tokens of an output";
        r.register("vllm:inter_token_latency_seconds", help, metrics.between_tokens.clone());
        let help = "Seconds from the arrival of a request to its end";
        r.register("vllm:e2e_request_latency_seconds", help, metrics.whole.clone());
        let help = "Seconds that a request waited before it was computed";
        r.register("vllm:request_queue_time_seconds", help, metrics.queue.clone());
        let help = "Seconds from the first step of a request to its first token";
        r.register("vllm:request_prefill_time_seconds", help, metrics.prefill.clone());
        let help = "Seconds from the first token of a request to its end";
        r.register("vllm:request_decode_time_seconds", help, metrics.decode.clone());
        r.register("vllm:request_prompt_tokens", "Tokens of a prompt", metrics.prompt_size.clone());
        r.register("vllm:request_generation_tokens", "Tokens of an output", metrics.output_size.clone());
        r.register("vllm:iteration_tokens_total", "Tokens that a step computed", metrics.step_tokens.clone());
        Metrics { registry, ..metrics }
    }

    /// All of it as text.
    pub fn text(&self, now: &Snapshot) -> String {
        self.running.set(now.stats.running as i64);
        self.waiting.set(now.stats.waiting as i64 + now.arriving as i64);
        let used = now.num_pages.saturating_sub(now.stats.available_pages);
        self.cache_usage.set(used as f64 / now.num_pages.max(1) as f64);
        let missed = (now.stats.preemptions as u64).saturating_sub(self.preemptions.get());
        self.preemptions.inc_by(missed);
        let mut text = String::new();
        // Writing to a string does not fail.
        let _ = encode(&mut text, &self.registry);
        text
    }

    /// A request was answered over HTTP.
    pub fn answered(&self, status: u16) {
        self.answered.get_or_create(&Answered { status }).inc();
    }

    /// A step computed this many tokens.
    pub fn step(&self, tokens: u64) {
        self.step_tokens.observe(tokens as f64);
    }

    /// A request was admitted after this time.
    pub fn admitted(&self, waited: Duration) {
        self.queue.observe(waited.as_secs_f64());
    }

    /// The first token of an output came: after its arrival, and after its first step.
    pub fn first(&self, whole: Duration, computing: Duration) {
        self.first_token.observe(whole.as_secs_f64());
        self.prefill.observe(computing.as_secs_f64());
    }

    /// Another token came.
    pub fn next(&self, between: Duration) {
        self.between_tokens.observe(between.as_secs_f64());
    }

    /// So many tokens were embedded.
    pub fn embedded(&self, tokens: usize) {
        self.prompt_tokens.inc_by(tokens as u64);
        self.prompt_size.observe(tokens as f64);
    }

    /// An output ended. Prompts count once for each request.
    pub fn end(
        &self,
        reason: &FinishReason,
        usage: &Usage,
        is_first: bool,
        whole: Duration,
        decode: Duration,
    ) {
        let finished_reason = match reason {
            FinishReason::Stop => Reason::stop,
            FinishReason::Length => Reason::length,
            FinishReason::Cancelled | FinishReason::Deadline => Reason::abort,
            FinishReason::Failed(_) => Reason::error,
        };
        self.finished.get_or_create(&Finished { finished_reason }).inc();
        self.generation_tokens.inc_by(usage.output_tokens as u64);
        self.output_size.observe(usage.output_tokens as f64);
        self.whole.observe(whole.as_secs_f64());
        self.decode.observe(decode.as_secs_f64());
        if is_first {
            self.prompt_tokens.inc_by(usage.prompt_tokens as u64);
            self.prompt_size.observe(usage.prompt_tokens as f64);
            self.cache_queries.inc_by(usage.prompt_tokens as u64);
            self.cache_hits.inc_by(usage.cached_tokens as u64);
        }
    }
}
