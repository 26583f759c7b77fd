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
    /// It was refused with 429, as a server with enough to do should.
    is_refused: bool,
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
            // Who is not told when to come again comes again at once.
            done.is_refused = answer.status == 429 && answer.headers.contains_key("retry-after");
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

/// A server at its capacity, and under many times as many requests as it can serve.
#[derive(Debug, Clone)]
pub struct Overload {
    /// As many requests as fill its places, each followed by the next.
    pub full: Report,
    /// Those that come however many are there already, at `factor` times the rate that it has served.
    pub over: Report,
    factor: f64,
}

/// Measures what is left of a server's goodput when `factor` times as many requests come as it can serve: first what it serves
/// with its places full, and then for about as long under the larger load. `load` says how many places that are; its rate is not
/// used.
///
/// # Errors
/// If not one request of the first part was served.
pub async fn overload(target: &Target, load: &Load, factor: f64) -> Result<Overload, String> {
    let full = run(target, &Load { rate: f64::INFINITY, ..load.clone() }).await;
    let rate = full.throughput() * factor;
    if rate <= 0.0 {
        return Err(format!("no request was served: {}", full.failures().1.unwrap_or("there are none")));
    }
    let count = (load.count as f64 * factor).ceil() as usize;
    // Other prompts: those of before may be cached.
    let seed = load.seed.wrapping_add(1);
    let over = run(target, &Load { count, rate, concurrency: None, seed, ..load.clone() }).await;
    Ok(Overload { full, over, factor })
}

impl Overload {
    /// What is left of the goodput: 1 if the load takes nothing from it.
    pub fn kept(&self) -> f64 {
        self.over.goodput() / self.full.goodput().max(f64::MIN_POSITIVE)
    }

    /// Both reports, and what they come to.
    pub fn json(&self, percentiles: &[f64]) -> Value {
        json!({
            "factor": self.factor,
            "capacity": self.full.json(percentiles),
            "overload": self.over.json(percentiles),
            "refused": self.over.refused(),
            "goodput_kept": self.kept(),
        })
    }
}

impl Report {
    fn seconds(&self) -> f64 {
        self.duration.as_secs_f64().max(1e-9)
    }

    /// Requests that were served in a second.
    pub fn throughput(&self) -> f64 {
        self.done.iter().filter(|done| done.error.is_none()).count() as f64 / self.seconds()
    }

    /// Requests that were served in a second and kept the limits of the load, if it has any.
    pub fn goodput(&self) -> f64 {
        self.done.iter().filter(|done| done.error.is_none() && self.is_good(done)).count() as f64
            / self.seconds()
    }

    /// Requests that were told to come again later.
    pub fn refused(&self) -> usize {
        self.done.iter().filter(|done| done.is_refused).count()
    }

    /// Requests that failed in another way, and why the first of them did.
    pub fn broken(&self) -> (usize, Option<&str>) {
        let mut broken =
            self.done.iter().filter(|done| !done.is_refused).filter_map(|done| done.error.as_deref());
        let first = broken.next();
        (first.iter().count() + broken.count(), first)
    }

    /// Whether a request kept the limits of the load.
    fn is_good(&self, done: &Done) -> bool {
        let [first, each, whole] = self.load.goodput;
        let keeps = |limit: Option<f64>, time: f64| limit.is_none_or(|limit| time <= limit);
        keeps(first, ms(done.first))
            && keeps(each, per_token(done).unwrap_or(0.0))
            && keeps(whole, ms(done.whole))
    }

    /// Requests that failed, and why the first of them did.
    pub fn failures(&self) -> (usize, Option<&str>) {
        let mut errors = self.done.iter().filter_map(|done| done.error.as_deref());
        let first = errors.next();
        (first.iter().count() + errors.count(), first)
    }

    /// The figures, under vLLM's names.
    pub fn json(&self, percentiles: &[f64]) -> Value {
        let good: Vec<&Done> = self.done.iter().filter(|done| done.error.is_none()).collect();
        let seconds = self.seconds();
        let sum = |count: fn(&Done) -> usize| good.iter().map(|done| count(done)).sum::<usize>();
        let (input, output) = (sum(|done| done.prompt), sum(|done| done.output));
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
            "request_throughput": self.throughput(),
            "request_goodput": has_goal.then(|| self.goodput()),
            "output_throughput": output as f64 / seconds,
            "total_token_throughput": (input + output) as f64 / seconds,
        });
        if let Some(report) = report.as_object_mut() {
            let times =
                |of: &dyn Fn(&Done) -> Vec<f64>| good.iter().flat_map(|done| of(done)).collect::<Vec<f64>>();
            add(report, "ttft", times(&|done| vec![ms(done.first)]), percentiles);
            add(report, "tpot", times(&|done| per_token(done).into_iter().collect()), percentiles);
            add(report, "itl", times(&|done| done.gaps.iter().map(|gap| ms(*gap)).collect()), percentiles);
            add(report, "e2el", times(&|done| vec![ms(done.whole)]), percentiles);
        }
        report
    }
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// Milliseconds of each token after the first, if there are any.
fn per_token(done: &Done) -> Option<f64> {
    let rest = done.whole.saturating_sub(done.first);
    (done.output > 1).then(|| ms(rest) / (done.output - 1) as f64)
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
            ..Done::default()
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
        // Ten times as many for as long: half of the goodput is left, and a refusal is no failure.
        let mut over = Report { duration: Duration::from_secs(4), ..report.clone() };
        over.done.push(Done { error: Some("429".into()), is_refused: true, ..Done::default() });
        assert_eq!((over.refused(), over.broken(), over.failures().0), (1, (1, Some("no")), 2));
        let overload = Overload { full: report, over, factor: 10.0 };
        let json = overload.json(&[]);
        assert_eq!((overload.kept(), &json["goodput_kept"], &json["refused"]), (0.5, &json!(0.5), &json!(1)));
        assert_eq!(json["overload"]["request_goodput"], 0.25);
    }
}
