//! One call of an op, as far as its time depends on it.

use std::collections::BTreeMap;
use warpsmith::lab::bench::Cache;
use warpsmith::lab::evidence::Timing;

/// One call of an op: its sizes, options and cost.
#[derive(Debug, Clone, PartialEq)]
pub struct Work {
    /// The op.
    pub op: String,
    /// The kernel that runs it.
    pub kernel: String,
    /// The element type, by its name.
    pub dtype: String,
    /// Whether its tensors stay in the L2 between calls.
    pub in_cache: bool,
    /// The fewest bytes.
    pub bytes: f64,
    /// Operations.
    pub flops: f64,
    sizes: BTreeMap<String, f64>,
    words: BTreeMap<String, String>,
}

impl Work {
    /// A call by the name of its case, such as `m=64 n=4096 k=1024 batch=1 +bias act=gelu`.
    pub fn new(op: &str, kernel: &str, case: &str, dtype: &str) -> Work {
        let (mut sizes, mut words) = (BTreeMap::new(), BTreeMap::new());
        for word in case.split_whitespace() {
            let (name, value) = word.split_once('=').unwrap_or((word, ""));
            match value.parse::<f64>() {
                Ok(number) => drop(sizes.insert(name.to_string(), number)),
                Err(_) => drop(words.insert(name.to_string(), value.to_string())),
            }
        }
        let (op, kernel, dtype) = (op.into(), kernel.into(), dtype.into());
        Work { op, kernel, dtype, in_cache: false, bytes: 0.0, flops: 0.0, sizes, words }
    }

    /// What a recorded time was taken of.
    pub fn of(timing: &Timing) -> Work {
        let seconds = timing.ms * 1e-3;
        Work {
            in_cache: timing.l2 == Cache::Warm,
            ..Work::new(&timing.op, &timing.kernel, &timing.case, &timing.dtype)
                .costing(timing.gbps * 1e9 * seconds, timing.tflops * 1e12 * seconds)
        }
    }

    /// The same call with this cost.
    pub fn costing(self, bytes: f64, flops: f64) -> Work {
        Work { bytes, flops, ..self }
    }

    /// A size of the call, or 1 where it has none of this name.
    pub fn size(&self, name: &str) -> f64 {
        self.size_or(name, 1.0)
    }

    /// A size of the call, or another number where it has none of this name.
    pub fn size_or(&self, name: &str, other: f64) -> f64 {
        self.sizes.get(name).copied().unwrap_or(other)
    }

    /// Whether the case names this: an argument as `+bias`, an option as `act`.
    pub fn has(&self, name: &str) -> bool {
        self.words.contains_key(name) || self.sizes.contains_key(name)
    }

    /// One if the case names this, zero if not: for what takes time only where it is given.
    pub fn if_has(&self, name: &str) -> f64 {
        if self.has(name) { 1.0 } else { 0.0 }
    }

    /// The value of an option that was set.
    pub fn option(&self, name: &str) -> &str {
        self.words.get(name).map_or("", String::as_str)
    }

    /// Whether it computes in a type of two bytes.
    pub fn is_half(&self) -> bool {
        ["bf16", "f16"].contains(&self.dtype.as_str())
    }

    /// Number of sequences, under the name that its op has for it.
    pub fn sequences(&self) -> f64 {
        self.size("batch") * self.size("requests")
    }

    /// The sizes as text, for grouping rows.
    pub fn key(&self, names: &[&str]) -> String {
        names.iter().map(|name| format!("{name}={} ", self.size(name))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_a_case_is_read() {
        let work = Work::new("linear", "linear_sm90", "m=64 n=4096 +bias act=gelu", "bf16");
        assert_eq!((work.size("m"), work.size("n"), work.size("batch")), (64.0, 4096.0, 1.0));
        assert!(work.has("+bias") && work.has("act") && !work.has("+residual") && work.is_half());
        assert_eq!((work.if_has("+bias"), work.if_has("+residual")), (1.0, 0.0));
        assert_eq!((work.option("act"), work.option("gate")), ("gelu", ""));
        assert_eq!(work.key(&["n", "m"]), "n=4096 m=64 ");
    }
}
