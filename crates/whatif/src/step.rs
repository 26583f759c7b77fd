//! A decode step of a model as the ops that the engine runs in it.

use crate::families;
use crate::machine::Machine;
use crate::model::{MeasuredStep, Model};
use crate::work::Work;
use serde_json::Value;
use warpsmith::{Error, Result};

/// The sizes of a dense decoder: a Llama or a Qwen3.
#[derive(Debug, Clone, PartialEq)]
pub struct Layers {
    /// The model's name.
    pub name: String,
    /// Number of layers.
    pub layers: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of the feed-forward layers.
    pub inner: usize,
    /// Query heads.
    pub heads: usize,
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Tokens that are known.
    pub vocab: usize,
    /// Whether the heads of queries and keys are normalised.
    pub head_norms: bool,
}

/// One decode step.
#[derive(Debug, Clone, PartialEq)]
pub struct Step {
    /// The model.
    pub layers: Layers,
    /// Sequences that get a token.
    pub sequences: usize,
    /// Keys of each.
    pub context: usize,
}

/// An op of a step.
#[derive(Debug, Clone)]
pub struct StepOp {
    /// What it is for.
    pub name: &'static str,
    /// The call.
    pub work: Work,
    /// How often it runs.
    pub times: usize,
    /// Bytes of its result that only the next op reads, which would not go through memory if the two were one.
    pub between: Option<f64>,
}

/// Bytes of an element.
const ELEMENT: f64 = 2.0;

/// Microseconds that an op of a step waits for the one before. Ops are timed with calls beside them that need nothing of each
/// other, and there is nothing to wait for. Chosen so that the large and the small model of the record agree.
const WAIT: f64 = 0.42;

impl Layers {
    /// Bytes of keys and values of a token in all layers.
    pub fn kv_bytes(&self) -> f64 {
        (self.layers * 2 * self.kv_heads * self.head_dim) as f64 * ELEMENT
    }
}

impl Step {
    /// A step of this many sequences with this many keys.
    ///
    /// # Errors
    /// If a size is zero.
    pub fn new(layers: Layers, sequences: usize, context: usize) -> Result<Step> {
        let Layers { layers: count, hidden, inner, heads, kv_heads, head_dim, vocab, .. } = layers;
        if [count, hidden, inner, heads, kv_heads, head_dim, vocab, sequences, context].contains(&0) {
            return Err(Error::parse("decode step", "sizes above 0", format!("{layers:?}")));
        }
        Ok(Step { layers, sequences, context })
    }

    /// As text.
    pub fn describe(&self) -> String {
        format!("a decode step of {}, {} x {} keys", self.layers.name, self.sequences, self.context)
    }

    /// Its ops, in their order.
    pub fn ops(&self) -> Vec<StepOp> {
        let Layers { layers, hidden, inner, heads, kv_heads, head_dim, vocab, head_norms, .. } = self.layers;
        let rows = self.sequences as f64;
        let (queries, keys) = (heads * head_dim, kv_heads * head_dim);
        let of_rows = |width: usize| rows * width as f64 * ELEMENT;
        let op = |name, work, between| StepOp { name, work, times: layers, between };
        let once = |name, work| StepOp { name, work, times: 1, between: None };
        vec![
            once("embedding", self.rows("embedding", "embedding_cuda", 2.0 * of_rows(hidden))),
            op("norm", self.norm(), Some(of_rows(hidden))),
            op("query, key, value", self.product(queries + 2 * keys, hidden, ""), None),
            op("rotate and store", self.store(head_norms), Some(of_rows(queries))),
            op("attention", self.attention(), Some(of_rows(queries))),
            op("out", self.product(hidden, queries, "+residual"), None),
            op("norm", self.norm(), Some(of_rows(hidden))),
            op("gate, up", self.product(inner, hidden, "act=silu gate=halves"), Some(of_rows(inner))),
            op("down", self.product(hidden, inner, "+residual"), None),
            once("norm", self.norm()),
            once("head", self.product(vocab, hidden, "")),
            once("argmax", self.argmax()),
        ]
    }

    fn rows(&self, op: &str, kernel: &str, bytes: f64) -> Work {
        let case = format!("num_tokens={} hidden={}", self.sequences, self.layers.hidden);
        Work::new(op, kernel, &case, "bf16").costing(bytes, 0.0)
    }

    fn norm(&self) -> Work {
        let hidden = self.layers.hidden as f64;
        self.rows("rms_norm", "rms_norm_row", (2.0 * self.sequences as f64 + 1.0) * hidden * ELEMENT)
    }

    /// `linear`; with a gate, of two matrices of `n` columns.
    fn product(&self, n: usize, k: usize, options: &str) -> Work {
        let (m, n, k) = (self.sequences as f64, n as f64, k as f64);
        let matrices = if options.contains("gate=") { 2.0 } else { 1.0 };
        let residual = if options.contains("+residual") { m * n } else { 0.0 };
        let bytes = (m * k + matrices * n * k + m * n + residual) * ELEMENT;
        Work::new("linear", "linear_sm90", &format!("m={m} n={n} k={k} {options}"), "bf16")
            .costing(bytes, 2.0 * m * n * k * matrices)
    }

    fn store(&self, head_norms: bool) -> Work {
        let Layers { heads, kv_heads, head_dim, .. } = self.layers;
        let all = heads + 2 * kv_heads;
        let norms = if head_norms { "+q_weight +k_weight" } else { "" };
        let case = format!(
            "num_tokens={} heads={all} num_kv_heads={kv_heads} head_dim={head_dim} +positions {norms}",
            self.sequences
        );
        let bytes = 2.0 * (self.sequences * all * head_dim) as f64 * ELEMENT;
        Work::new("qkv_store", "qkv_store_cuda", &case, "bf16").costing(bytes, 0.0)
    }

    fn attention(&self) -> Work {
        let Layers { heads, kv_heads, head_dim, .. } = self.layers;
        let case = format!(
            "requests={} q_len=1 kv_len={} num_heads={heads} num_kv_heads={kv_heads} head_dim={head_dim} prefix_len=0",
            self.sequences, self.context
        );
        let pairs = (self.sequences * self.context * head_dim) as f64;
        let bytes =
            (2.0 * pairs * kv_heads as f64 + 2.0 * (self.sequences * heads * head_dim) as f64) * ELEMENT;
        Work::new("paged_attention", "paged_attention_sm80", &case, "bf16")
            .costing(bytes, 4.0 * pairs * heads as f64)
    }

    fn argmax(&self) -> Work {
        let case = format!("num_tokens={} n={}", self.sequences, self.layers.vocab);
        let elements = (self.sequences * self.layers.vocab) as f64;
        Work::new("argmax", "argmax_cuda", &case, "f32").costing(4.0 * elements, elements)
    }

    /// The microseconds of its ops one after the other, and those in which each waits for the one before. `streaming`: results
    /// that only the next op reads are handed to it on the chip, and the two run as one.
    ///
    /// # Errors
    /// If the model has no family for one of them.
    pub fn ops_time(&self, model: &Model, machine: &Machine, streaming: bool) -> Result<(f64, f64)> {
        let on_chip = machine.kv_on_chip / self.layers.layers as f64;
        let machine = Machine { kv_on_chip: on_chip, ..machine.clone() };
        let ops = self.ops();
        let parts = ops.iter().map(|op| model.parts(&op.work, &machine)).collect::<Result<Vec<_>>>()?;
        let (mut total, mut launches, mut at) = (0.0, 0.0, 0);
        while at < ops.len() {
            let times = ops[at].times as f64;
            launches += times;
            total += times
                * match ops[at].between.filter(|_| streaming) {
                    Some(bytes) => {
                        let saved = machine.moving(2.0 * bytes);
                        let both = parts[at].streamed_into(&parts[at + 1], saved);
                        at += 1;
                        both.total()
                    }
                    None => parts[at].total(),
                };
            at += 1;
        }
        Ok((total, launches * WAIT))
    }

    /// The microseconds of each op of the step, with how often it runs, the largest share first.
    ///
    /// # Errors
    /// As [`ops_time`](Self::ops_time).
    pub fn shares(&self, model: &Model, machine: &Machine) -> Result<Vec<(&'static str, usize, f64)>> {
        let time = |op: &StepOp| Ok((op.name, op.times, model.parts(&op.work, machine)?.total()));
        let mut shares = self.ops().iter().map(time).collect::<Result<Vec<_>>>()?;
        shares.sort_by(|a, b| (b.1 as f64 * b.2).total_cmp(&(a.1 as f64 * a.2)));
        Ok(shares)
    }

    /// The families of its ops, each once.
    pub fn families(&self) -> Vec<&'static str> {
        let mut names: Vec<&str> =
            self.ops().iter().filter_map(|op| families::find(&op.work)).map(|family| family.name).collect();
        names.sort();
        names.dedup();
        names
    }
}

/// Keys of the sequences of a recorded `tg128` in the middle of its 128 steps, which begin after one token.
const MIDDLE: usize = 65;

/// The decode steps in a record of whole models (`evidence/models`): its rows `tg128` and `tg128@SEQUENCES`. `layers` knows
/// the sizes of a model by its name; `None` leaves its rows out.
///
/// # Errors
/// If the text is no such record.
pub fn measured(text: &str, layers: impl Fn(&str) -> Result<Option<Layers>>) -> Result<Vec<MeasuredStep>> {
    let broken = |why: String| Error::parse("a record of models", "JSON with `rows`", why);
    let json: Value = serde_json::from_str(text).map_err(|error| broken(error.to_string()))?;
    let rows = json["rows"].as_array().ok_or_else(|| broken("none".into()))?;
    let mut steps = Vec::new();
    for row in rows {
        let (Some(name), Some(test), Some(ms)) =
            (row["model"].as_str(), row["test"].as_str(), row["milliseconds"].as_f64())
        else {
            return Err(broken(row.to_string()));
        };
        let sequences = match test.strip_prefix("tg128") {
            Some("") => Some(1),
            Some(at) => at.strip_prefix('@').and_then(|count| count.parse().ok()),
            None => None,
        };
        let Some((sequences, layers)) = sequences.zip(layers(name)?) else { continue };
        steps.push(MeasuredStep { step: Step::new(layers, sequences, MIDDLE)?, us: 1e3 * ms });
    }
    Ok(steps)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Qwen3-0.6B and Qwen3-8B.
    pub(crate) fn qwen3(name: &str) -> Layers {
        let (layers, hidden, inner, heads) = match name {
            "qwen3-0.6b" => (28, 1024, 3072, 16),
            _ => (36, 4096, 12288, 32),
        };
        let (kv_heads, head_dim, vocab) = (8, 128, 151_936);
        Layers {
            name: name.into(),
            layers,
            hidden,
            inner,
            heads,
            kv_heads,
            head_dim,
            vocab,
            head_norms: true,
        }
    }

    #[test]
    fn the_weights_that_a_step_reads_are_those_of_the_model() {
        for (name, bytes) in [("qwen3-0.6b", 1_192_099_840.0), ("qwen3-8b", 16_381_470_720.0)] {
            let step = Step::new(qwen3(name), 1, 1).unwrap();
            let weights = step.ops().into_iter().filter(|op| op.work.op == "linear");
            let read: f64 = weights.map(|op| op.work.bytes * op.times as f64).sum();
            // The file of the larger one has an embedding table besides the head.
            let table = if name == "qwen3-8b" { 2.0 * 151_936.0 * 4096.0 } else { 0.0 };
            assert!((read / (bytes - table) - 1.0).abs() < 0.002, "{name}: {read} of {bytes}");
        }
    }

    #[test]
    fn decode_steps_are_read_from_a_record() {
        let text = r#"{"rows": [{"model": "a", "test": "tg128@32", "milliseconds": 2.0},
            {"model": "a", "test": "pp512", "milliseconds": 9.0}, {"model": "b", "test": "tg128", "milliseconds": 1.0}]}"#;
        let known = |name: &str| Ok((name == "a").then(|| qwen3("qwen3-8b")));
        let steps = measured(text, known).unwrap();
        assert_eq!((steps.len(), steps[0].step.sequences, steps[0].us), (1, 32, 2000.0));
        assert!(measured("{}", known).is_err() && measured("{\"rows\": [1]}", known).is_err());
    }

    #[test]
    fn its_ops_have_families_and_sizes_of_zero_are_refused() {
        let step = Step::new(qwen3("qwen3-8b"), 4, 100).unwrap();
        assert!(step.ops().iter().all(|op| families::find(&op.work).is_some()));
        assert!(step.families().contains(&"attention, decode"));
        assert_eq!(step.layers.kv_bytes(), 147_456.0);
        assert!(Step::new(qwen3("qwen3-8b"), 0, 1).is_err());
    }
}
