//! Measures a server under load: throughput and latencies, as `vllm bench serve` does.

use crate::client::Target;
use serde_json::{Map, Value, json};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::Semaphore;
use warpsmith::tensor::Random;

/// What is sent.
#[derive(Debug, Clone)]
pub struct Load {
    /// The path, `/v1/completions` or `/v1/chat/completions`.
    pub endpoint: String,
    /// The name of the model.
    pub model: String,
    /// Requests.
    pub count: usize,
    /// Requests in a second, at random times; all at once if infinite.
    pub rate: f64,
    /// The most requests at the same time.
    pub concurrency: Option<usize>,
    /// Tokens of a prompt, or words of a message.
    pub input: usize,
    /// Tokens of an answer.
    pub output: usize,
    /// Tokens that prompts have in common at their beginning.
    pub prefix: usize,
    /// Tokens that exist.
    pub vocab: usize,
    /// Of the random numbers.
    pub seed: u64,
    /// Whether answers may end before their length.
    pub ends: bool,
    /// Limits in milliseconds that good requests keep: of the first token, of each other, of the whole.
    pub goodput: [Option<f64>; 3],
}

/// What became of a request.
#[derive(Debug, Clone, Default)]
struct Done {
    /// Why it failed.
    error: Option<String>,
    first: Duration,
    gaps: Vec<Duration>,
    whole: Duration,
    prompt: usize,
    output: usize,
}

/// What a load has shown.
#[derive(Debug, Clone)]
pub struct Report {
    load: Load,
    duration: Duration,
    done: Vec<Done>,
}

/// Sends a load.
pub async fn run(target: &Target, load: &Load) -> Report {
    let mut random = Random::new(load.seed);
    let shared: Vec<usize> = (0..load.prefix).map(|_| random.below(load.vocab as u64) as usize).collect();
    let bodies: Vec<Value> = (0..load.count).map(|_| body(load, &shared, &mut random)).collect();
    let permits = Arc::new(Semaphore::new(load.concurrency.unwrap_or(load.count).max(1)));
    let begin = Instant::now();
    let mut tasks = Vec::new();
    let mut at = 0.0;
    for body in bodies {
        if load.rate.is_finite() {
            // The times between arrivals are exponentially distributed.
            let uniform = (random.below(1 << 53) as f64 + 1.0) / (1u64 << 53) as f64;
            at += -uniform.ln() / load.rate;
            tokio::time::sleep_until((begin + Duration::from_secs_f64(at)).into()).await;
        }
        let (target, load, permits) = (target.clone(), load.clone(), permits.clone());
        tasks.push(tokio::spawn(async move {
            let _permit = permits.acquire().await;
            one(&target, &load, &body).await
        }));
    }
    let mut done = Vec::new();
    for task in tasks {
        let failed = || Done { error: Some("the request panicked".into()), ..Done::default() };
        done.push(task.await.unwrap_or_else(|_| failed()));
    }
    Report { load: load.clone(), duration: begin.elapsed(), done }
}

fn body(load: &Load, shared: &[usize], random: &mut Random) -> Value {
    let own = load.input.saturating_sub(shared.len()).max(1);
    let tokens: Vec<usize> =
        shared.iter().copied().chain((0..own).map(|_| random.below(load.vocab as u64) as usize)).collect();
    let mut body = json!({
        "model": load.model, "stream": true, "temperature": 0, "max_tokens": load.output,
        "ignore_eos": !load.ends, "stream_options": { "include_usage": true },
    });
    if load.endpoint.contains("chat") {
        let words: Vec<String> = tokens.iter().map(|token| format!("w{token}")).collect();
        body["messages"] = json!([{ "role": "user", "content": words.join(" ") }]);
    } else {
        body["prompt"] = json!(tokens);
    }
    body
}

async fn one(target: &Target, load: &Load, body: &Value) -> Done {
    let mut done = Done::default();
    let begin = Instant::now();
    let mut last = None;
    let mut texts = 0;
    let answer = target.stream(&load.endpoint, body, |data| {
        if data == "[DONE]" {
            return false;
        }
        let now = Instant::now();
        let event: Value = serde_json::from_str(data).unwrap_or_default();
        if let Some(message) = event["error"]["message"].as_str() {
            done.error = Some(message.to_owned());
            return false;
        }
        if let Some(usage) = event["usage"].as_object() {
            let count = |name: &str| usage.get(name).and_then(Value::as_u64).unwrap_or(0) as usize;
            (done.prompt, done.output) = (count("prompt_tokens"), count("completion_tokens"));
        }
        if event["choices"].as_array().is_some_and(|choices| !choices.is_empty()) {
            match last.replace(now) {
                None => done.first = now - begin,
                Some(last) => done.gaps.push(now - last),
            }
            texts += 1;
            done.whole = now - begin;
        }
        true
    });
    match answer.await {
        Err(error) => done.error = Some(error.to_string()),
        Ok(answer) if answer.status != 200 => {
            let message = answer.json()["error"]["message"].as_str().unwrap_or_default().to_owned();
            done.error = Some(format!("{}: {message}", answer.status));
        }
        Ok(_) if texts == 0 && done.error.is_none() => done.error = Some("an empty answer".into()),
        Ok(_) => {}
    }
    if done.output == 0 {
        done.output = texts;
    }
    done
}

impl Report {
    /// Requests that failed, and why the first of them did.
    pub fn failures(&self) -> (usize, Option<&str>) {
        let mut errors = self.done.iter().filter_map(|done| done.error.as_deref());
        let first = errors.next();
        (first.iter().count() + errors.count(), first)
    }

    /// The figures, under vLLM's names.
    pub fn json(&self, percentiles: &[f64]) -> Value {
        let good: Vec<&Done> = self.done.iter().filter(|done| done.error.is_none()).collect();
        let seconds = self.duration.as_secs_f64().max(1e-9);
        let sum = |count: fn(&Done) -> usize| good.iter().map(|done| count(done)).sum::<usize>();
        let (input, output) = (sum(|done| done.prompt), sum(|done| done.output));
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        let tpot = |done: &Done| {
            let rest = done.whole.saturating_sub(done.first);
            (done.output > 1).then(|| ms(rest) / (done.output - 1) as f64)
        };
        let [first, each, whole] = self.load.goodput;
        let keeps = |limit: Option<f64>, time: f64| limit.is_none_or(|limit| time <= limit);
        let kept = good.iter().filter(|done| {
            keeps(first, ms(done.first))
                && keeps(each, tpot(done).unwrap_or(0.0))
                && keeps(whole, ms(done.whole))
        });
        let has_goal = self.load.goodput.iter().any(Option::is_some);
        let rate = if self.load.rate.is_finite() { json!(self.load.rate) } else { json!("inf") };
        let mut report = json!({
            "endpoint": self.load.endpoint,
            "model_id": self.load.model,
            "num_prompts": self.load.count,
            "request_rate": rate,
            "max_concurrency": self.load.concurrency,
            "duration": seconds,
            "completed": good.len(),
            "failed": self.done.len() - good.len(),
            "total_input_tokens": input,
            "total_output_tokens": output,
            "request_throughput": good.len() as f64 / seconds,
            "request_goodput": has_goal.then(|| kept.count() as f64 / seconds),
            "output_throughput": output as f64 / seconds,
            "total_token_throughput": (input + output) as f64 / seconds,
        });
        if let Some(report) = report.as_object_mut() {
            let times =
                |of: &dyn Fn(&Done) -> Vec<f64>| good.iter().flat_map(|done| of(done)).collect::<Vec<f64>>();
            add(report, "ttft", times(&|done| vec![ms(done.first)]), percentiles);
            add(report, "tpot", times(&|done| tpot(done).into_iter().collect()), percentiles);
            add(report, "itl", times(&|done| done.gaps.iter().map(|gap| ms(*gap)).collect()), percentiles);
            add(report, "e2el", times(&|done| vec![ms(done.whole)]), percentiles);
        }
        report
    }
}

/// Mean, median, deviation and percentiles of some times.
fn add(report: &mut Map<String, Value>, name: &str, mut times: Vec<f64>, percentiles: &[f64]) {
    times.sort_by(f64::total_cmp);
    let count = times.len().max(1) as f64;
    let mean = times.iter().sum::<f64>() / count;
    let deviation = (times.iter().map(|time| (time - mean).powi(2)).sum::<f64>() / count).sqrt();
    report.insert(format!("mean_{name}_ms"), json!(mean));
    report.insert(format!("median_{name}_ms"), json!(percentile(&times, 50.0)));
    report.insert(format!("std_{name}_ms"), json!(deviation));
    for &p in percentiles {
        report.insert(format!("p{p}_{name}_ms"), json!(percentile(&times, p)));
    }
}

/// A percentile of sorted times, between its neighbours.
fn percentile(times: &[f64], percent: f64) -> f64 {
    let Some(last) = times.len().checked_sub(1) else { return 0.0 };
    let at = percent / 100.0 * last as f64;
    let (low, high) = (times[at.floor() as usize], times[at.ceil() as usize]);
    low + (high - low) * at.fract()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_have_the_names_and_values_of_vllm() {
        let done = |first: u64, gaps: &[u64]| Done {
            first: Duration::from_millis(first),
            gaps: gaps.iter().map(|&gap| Duration::from_millis(gap)).collect(),
            whole: Duration::from_millis(first + gaps.iter().sum::<u64>()),
            prompt: 10,
            output: gaps.len() + 1,
            error: None,
        };
        let load = Load {
            endpoint: "/v1/completions".into(),
            model: "m".into(),
            count: 3,
            rate: f64::INFINITY,
            concurrency: None,
            input: 10,
            output: 3,
            prefix: 0,
            vocab: 100,
            seed: 0,
            ends: false,
            goodput: [Some(15.0), None, None],
        };
        let failed = Done { error: Some("no".into()), ..Done::default() };
        let done = vec![done(10, &[2, 4]), done(20, &[6, 8]), failed];
        let report = Report { load, duration: Duration::from_secs(2), done };
        assert_eq!(report.failures(), (1, Some("no")));
        let json = report.json(&[99.0, 50.0]);
        for (name, expected) in [
            ("completed", 2.0),
            ("failed", 1.0),
            ("total_input_tokens", 20.0),
            ("total_output_tokens", 6.0),
            ("output_throughput", 3.0),
            ("request_throughput", 1.0),
            ("request_goodput", 0.5),
            ("mean_ttft_ms", 15.0),
            ("median_ttft_ms", 15.0),
            ("std_ttft_ms", 5.0),
            ("p99_ttft_ms", 19.9),
            ("mean_tpot_ms", 5.0),
            ("p50_itl_ms", 5.0),
            ("mean_e2el_ms", 25.0),
        ] {
            assert!((json[name].as_f64().unwrap() - expected).abs() < 1e-9, "{name}: {}", json[name]);
        }
        assert_eq!(json["request_rate"], "inf");
    }
}
