//! Earlier results, and results of other libraries, to compare with.

use super::Measurement;
use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;

/// Measurements of an earlier run, as printed by `warpsmith bench --json`.
#[derive(Debug, Clone, Default)]
pub struct Baseline {
    /// The fastest median, by op, case, dtype and device.
    fastest_ms: BTreeMap<[String; 4], f64>,
}

fn key(m: &Measurement) -> [String; 4] {
    [&m.op, &m.case, &m.dtype, &m.device].map(String::clone)
}

impl Baseline {
    /// Reads a file with one JSON object per line.
    pub fn read(path: &Path) -> Result<Baseline> {
        Ok(Baseline::of(&lines::<Measurement>(path)?))
    }

    /// From measurements. If several kernels ran a case, the fastest counts.
    pub fn of(measurements: &[Measurement]) -> Baseline {
        let mut baseline = Baseline::default();
        for m in measurements {
            let ms = baseline.fastest_ms.entry(key(m)).or_insert(f64::INFINITY);
            *ms = ms.min(m.median_ms);
        }
        baseline
    }

    /// The time of this run divided by that of the earlier one; `None` if the earlier run does not have the case on
    /// that device.
    pub fn ratio(&self, m: &Measurement) -> Option<f64> {
        self.fastest_ms.get(&key(m)).map(|before| m.median_ms / before)
    }

    /// The cases whose fastest kernel is now slower by more than the fraction `tolerance`, with their ratios.
    pub fn regressions<'a>(
        &self,
        measurements: &'a [Measurement],
        tolerance: f64,
    ) -> Vec<(&'a Measurement, f64)> {
        let now = Baseline::of(measurements);
        let fastest = measurements.iter().filter(|m| now.fastest_ms[&key(m)] == m.median_ms);
        fastest
            .filter_map(|m| Some((m, self.ratio(m)?)))
            .filter(|(_, ratio)| *ratio > 1.0 + tolerance)
            .collect()
    }
}

/// One case timed with another library.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Peer {
    /// The op, by its name here.
    pub op: String,
    /// The case, by its name here.
    pub case: String,
    /// The dtype.
    pub dtype: String,
    /// `cpu` or `cuda`.
    pub device: String,
    /// The other library.
    pub peer: String,
    /// Milliseconds of one call.
    pub ms: f64,
    /// The library and its version.
    #[serde(default)]
    pub version: Option<String>,
    /// Not to be compared with, but with the time that was kept of the same peer.
    #[serde(default)]
    pub calibration: bool,
}

/// Timings of other libraries.
#[derive(Debug, Clone, Default)]
pub struct Peers(Vec<Peer>);

impl Peers {
    /// Reads a file with one JSON object per line.
    pub fn read(path: &Path) -> Result<Peers> {
        lines(path).map(Peers)
    }

    /// From rows.
    pub fn of_rows(rows: Vec<Peer>) -> Peers {
        Peers(rows)
    }

    /// The names of all peers.
    pub fn names(&self) -> Vec<String> {
        let mut names: Vec<String> =
            self.0.iter().filter(|peer| !peer.calibration).map(|peer| peer.peer.clone()).collect();
        names.sort();
        names.dedup();
        names
    }

    /// The times of every peer on a case; `device` as `cpu` or `cuda:0`.
    pub fn of(&self, op: &str, case: &str, dtype: &str, device: &str) -> BTreeMap<String, f64> {
        self.on(op, case, dtype, device).map(|p| (p.peer.clone(), p.ms)).collect()
    }

    /// The rows of a case.
    pub fn on(&self, op: &str, case: &str, dtype: &str, device: &str) -> impl Iterator<Item = &Peer> {
        let same = move |p: &&Peer| [&*p.op, &*p.case, &*p.dtype] == [op, case, dtype] && !p.calibration;
        self.on_device(device).filter(same)
    }

    /// The rows that tell whether the machine is as fast as it was.
    pub fn calibration(&self, device: &str) -> impl Iterator<Item = &Peer> {
        self.on_device(device).filter(|peer| peer.calibration)
    }

    fn on_device(&self, device: &str) -> impl Iterator<Item = &Peer> {
        let kind = |device: &str| device.split(':').next().unwrap_or_default().to_string();
        let wanted = kind(device);
        self.0.iter().filter(move |peer| kind(&peer.device) == wanted)
    }
}

fn lines<T: for<'a> Deserialize<'a>>(path: &Path) -> Result<Vec<T>> {
    let text = std::fs::read_to_string(path).map_err(|e| Error::io(path, "reading", &e))?;
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    lines
        .map(|(number, line)| {
            serde_json::from_str(line).map_err(|error| Error::Io {
                path: path.into(),
                what: format!("line {}: {error}", number + 1),
            })
        })
        .collect()
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;
    use crate::lab::bench::Cache;

    fn measured(kernel: &str, case: &str, median_ms: f64) -> Measurement {
        Measurement {
            op: "op".into(),
            case: case.into(),
            dtype: "f32".into(),
            device: "gpu".into(),
            kernel: kernel.into(),
            config: String::new(),
            source_hash: "h".into(),
            median_ms,
            best_ms: median_ms,
            p10_ms: median_ms,
            p90_ms: median_ms,
            runs: 1,
            bytes: 1.0,
            flops: 1.0,
            gbps: 1.0,
            tflops: 1.0,
            limit_ms: 1.0,
            bound: crate::lab::bench::Bound::Memory,
            percent_of_ceiling: 100.0,
            l2: Cache::Cold,
        }
    }

    #[test]
    fn only_a_slower_fastest_kernel_is_a_regression() {
        let baseline =
            Baseline::of(&[measured("a", "1", 1.0), measured("b", "1", 2.0), measured("a", "2", 1.0)]);
        let now = [
            measured("a", "1", 1.3),
            measured("b", "1", 1.05),
            measured("a", "2", 1.2),
            measured("a", "3", 9.0),
        ];
        assert_eq!(baseline.ratio(&now[0]), Some(1.3));
        assert_eq!(baseline.ratio(&now[3]), None, "no such case before");
        let slower: Vec<_> = baseline.regressions(&now, 0.1).iter().map(|(m, _)| m.case.clone()).collect();
        assert_eq!(slower, ["2"]);
        let elsewhere = Measurement { device: "another gpu".into(), ..measured("a", "2", 5.0) };
        assert!(baseline.regressions(&[elsewhere], 0.1).is_empty());
    }

    #[test]
    fn files_round_trip_and_say_which_line_is_broken() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("base.jsonl");
        let text = serde_json::to_string(&measured("a", "1", 2.0)).unwrap();
        std::fs::write(&path, format!("{text}\n\n")).unwrap();
        assert_eq!(Baseline::read(&path).unwrap().ratio(&measured("a", "1", 3.0)), Some(1.5));
        std::fs::write(&path, format!("{text}\n{{")).unwrap();
        assert!(Baseline::read(&path).unwrap_err().to_string().contains("line 2"));
        assert!(Baseline::read(&folder.path().join("none")).is_err());
    }

    #[test]
    fn peers_are_found_by_case_dtype_and_kind_of_device() {
        let peer = |name: &str, device: &str, ms| Peer {
            op: "op".into(),
            case: "n=1".into(),
            dtype: "f32".into(),
            device: device.into(),
            peer: name.into(),
            ms,
            version: None,
            calibration: false,
        };
        let peers = Peers::of_rows(vec![
            peer("torch", "cuda", 1.0),
            peer("flash", "cuda:0", 2.0),
            peer("torch", "cpu", 3.0),
        ]);
        assert_eq!(peers.names(), ["flash", "torch"]);
        assert_eq!(peers.of("op", "n=1", "f32", "cuda:1").len(), 2);
        assert_eq!(peers.of("op", "n=1", "f32", "cpu")["torch"], 3.0);
        assert!(peers.of("op", "n=2", "f32", "cpu").is_empty());
    }
}
