//! Summaries of the evidence: a row per case and timing for programs, and the kernels without evidence.

use super::{Record, Sweep, Timing, UNPROVEN};
use crate::error::{Error, Result};
use crate::ops;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// One case or one timing of one kernel.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Row {
    /// The op.
    pub op: String,
    /// The kernel.
    pub kernel: String,
    /// The case's name.
    pub case: String,
    /// Its dtype.
    pub dtype: String,
    /// Whether the case passed; for a timing, whether all cases of its kernel did.
    pub ok: bool,
    /// `‖out - truth‖ / ‖truth‖`; for a timing, the largest over the kernel's cases.
    pub error: Option<f64>,
    /// Median milliseconds of a timing.
    pub ms: Option<f64>,
    /// The fastest peer.
    pub peer: Option<String>,
    /// Its milliseconds.
    pub peer_ms: Option<f64>,
    /// The least milliseconds by the ceilings of the same run.
    pub limit_ms: Option<f64>,
    /// The device.
    pub gpu: String,
    /// Identifies the code that ran.
    pub source_hash: String,
    /// Whether that is the present code and it passed all its cases.
    pub proven: bool,
}

/// The source hash of every registered kernel, by name.
pub struct PresentCode(BTreeMap<&'static str, String>);

impl PresentCode {
    /// The kernels of this program.
    pub fn new() -> PresentCode {
        let kernels = ops::provable().into_iter().flat_map(|op| {
            op.kernels()
                .into_iter()
                .map(|kernel| (kernel.name, crate::lab::source_hash(&kernel, op.spec().name)))
        });
        PresentCode(kernels.collect())
    }

    /// Whether this is the hash of the kernel as it is now.
    pub fn is(&self, kernel: &str, source_hash: &str) -> bool {
        self.0.get(kernel).is_some_and(|now| now == source_hash)
    }

    /// The hash of a kernel as it is now.
    pub(super) fn hash(&self, kernel: &str) -> Option<&str> {
        self.0.get(kernel).map(String::as_str)
    }

    /// Whether a timing was taken with the present code of its kernel.
    pub fn is_of(&self, timing: &Timing) -> bool {
        self.is(&timing.kernel, &timing.source_hash)
    }

    /// The marks of timings that are shown as one number: a dagger if a kernel has changed since, a double dagger if the
    /// machine was not as fast as when the peers were timed.
    pub fn marks(&self, timings: &[&Timing]) -> &'static str {
        let (earlier, off) =
            (timings.iter().any(|timing| !self.is_of(timing)), timings.iter().any(|timing| timing.is_off()));
        match (earlier, off) {
            (false, false) => "",
            (true, false) => " †",
            (false, true) => " ‡",
            (true, true) => " †‡",
        }
    }

    /// The mark of a sweep: nothing, or a dagger if a kernel that ran in it has changed since.
    pub fn sweep_mark(&self, sweep: &Sweep) -> &'static str {
        if sweep.kernels.iter().all(|(kernel, hash)| self.is(kernel, hash)) { "" } else { " †" }
    }

    #[cfg(feature = "tests")]
    pub(super) fn of(hashes: BTreeMap<&'static str, String>) -> PresentCode {
        PresentCode(hashes)
    }
}

impl Default for PresentCode {
    fn default() -> Self {
        PresentCode::new()
    }
}

/// What the marks mean.
const LEGEND: [(char, &str); 2] = [
    ('†', "with an earlier version of the kernel"),
    ('‡', "calibration off: a peer took more or less than when it was timed for the comparison, by over 2 %"),
];

/// A paragraph on the marks that a text has, if it has any.
pub fn legend(text: &str) -> String {
    let found = LEGEND.iter().filter(|(mark, _)| text.contains(*mark));
    found.map(|(mark, meaning)| format!("\n{mark} {meaning}\n")).collect()
}

/// Everything recorded, device by device: the cases, then the timings.
pub fn rows(records: &[Record]) -> Vec<Row> {
    let present = PresentCode::new();
    let mut rows = Vec::new();
    for record in records {
        let proven =
            |kernel: &str, hash: &str| present.is(kernel, hash) && record.proves(kernel, hash).is_ok();
        for (name, kernel) in &record.kernels {
            rows.extend(kernel.cases.iter().map(|case| Row {
                op: kernel.op.clone(),
                kernel: name.clone(),
                case: case.case.clone(),
                dtype: case.dtype.clone(),
                ok: case.ok,
                error: case.error,
                ms: None,
                peer: None,
                peer_ms: None,
                limit_ms: None,
                gpu: record.machine.device.clone(),
                source_hash: kernel.source_hash.clone(),
                proven: proven(name, &kernel.source_hash),
            }));
        }
        rows.extend(record.timings.iter().map(|t| {
            let checked = record.kernels.get(&t.kernel).filter(|k| k.source_hash == t.source_hash);
            let errors = checked.into_iter().flat_map(|k| k.cases.iter().filter_map(|case| case.error));
            let peer = record.best_peer(t);
            Row {
                op: t.op.clone(),
                kernel: t.kernel.clone(),
                case: t.case.clone(),
                dtype: t.dtype.clone(),
                ok: checked.is_some_and(|k| !k.cases.is_empty() && k.cases.iter().all(|case| case.ok)),
                error: errors.reduce(f64::max),
                ms: Some(t.ms),
                peer: peer.map(|peer| peer.peer.clone()),
                peer_ms: peer.map(|peer| peer.ms),
                limit_ms: Some(t.limit_ms),
                gpu: record.machine.device.clone(),
                source_hash: t.source_hash.clone(),
                proven: proven(&t.kernel, &t.source_hash),
            }
        }));
    }
    rows
}

/// A kernel with missing evidence or a wrong line in `unproven.txt`. Formatted as a line of that file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// The kernel.
    pub kernel: String,
    /// What is wrong.
    pub why: String,
}

impl std::fmt::Display for Problem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.kernel, self.why)
    }
}

/// Compares the registered CUDA kernels with a folder of evidence. Every kernel must be proven with its present
/// source on some GPU, or be named in `unproven.txt` with a reason; nothing else may be named there.
pub fn unproven(folder: &Path) -> Result<Vec<Problem>> {
    let path = folder.join(UNPROVEN);
    let excuses = match std::fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
        Err(error) => return Err(Error::io(&path, "reading", &error)),
    };
    let present = PresentCode::new();
    let cuda = ops::PROVABLE.iter().flat_map(|op| op.kernels()).filter(|kernel| kernel.is_cuda());
    let kernels: Vec<(&str, &str)> =
        cuda.map(|kernel| (kernel.name, present.0[kernel.name].as_str())).collect();
    Ok(judge(&kernels, &super::load(folder)?, &excuses))
}

fn judge(kernels: &[(&str, &str)], records: &[Record], excuses: &str) -> Vec<Problem> {
    let problem = |kernel: &str, why: &str| Problem { kernel: kernel.into(), why: why.into() };
    let mut problems = Vec::new();
    let mut excused = BTreeSet::new();
    for line in excuses.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')) {
        let (name, reason) = line.split_once(':').unwrap_or((line, ""));
        if reason.trim().is_empty() {
            problems.push(problem(name, "is named in unproven.txt without a reason"));
        }
        if !kernels.iter().any(|(kernel, _)| *kernel == name) {
            problems.push(problem(name, "is named in unproven.txt but is no CUDA kernel"));
        }
        if !excused.insert(name) {
            problems.push(problem(name, "is named in unproven.txt twice"));
        }
    }
    for &(kernel, hash) in kernels {
        let gpus = records.iter().filter(|record| record.machine.is_gpu());
        let verdicts: Vec<_> = gpus.map(|record| record.proves(kernel, hash)).collect();
        let proven = verdicts.iter().any(|verdict| verdict.is_ok());
        match (proven, excused.contains(kernel)) {
            (true, true) => problems.push(problem(kernel, "is proven; remove it from unproven.txt")),
            (false, false) => {
                let whys: Vec<String> = verdicts.into_iter().filter_map(|verdict| verdict.err()).collect();
                let why = if whys.is_empty() { "has no evidence".into() } else { whys.join("; ") };
                problems.push(Problem { kernel: kernel.into(), why });
            }
            _ => {}
        }
    }
    problems
}

#[cfg(feature = "tests")]
pub(super) mod tests {
    use super::*;
    use crate::lab::bench::{Bound, Cache};
    use crate::lab::evidence::{CaseRecord, Cpu, Machine, PeerTime};

    pub(in super::super) fn record(kernel: &str, hash: &str, ok: bool) -> Record {
        let mut record = Record::new(Machine { device: "GPU".into(), ..Machine::default() });
        let case =
            CaseRecord { case: "n=1".into(), dtype: "f32".into(), ok, error: Some(1e-7), worst: Some(0.5) };
        record.add_cases("rms_norm", kernel, hash, vec![case], true);
        record
    }

    pub(in super::super) fn timing(op: &str, case: &str, dtype: &str, limit_ms: f64) -> Timing {
        Timing {
            op: op.into(),
            kernel: "k".into(),
            source_hash: "h".into(),
            case: case.into(),
            dtype: dtype.into(),
            ms: 2.0 * limit_ms,
            spread: 0.01,
            gbps: 100.0,
            tflops: 1.0,
            limit_ms,
            bound: Bound::Memory,
            l2: Cache::Cold,
            date: None,
            calibration: None,
        }
    }

    /// A peer on the work of a timing.
    pub(in super::super) fn peer(timing: &Timing, peer: &str, ms: f64) -> PeerTime {
        let Timing { op, case, dtype, l2, .. } = timing.clone();
        let (peer, version, date) = (peer.into(), "torch 9".into(), "2026-11-18".into());
        PeerTime { op, case, dtype, l2, peer, version, date, ms }
    }

    #[test]
    fn kernels_need_evidence_or_an_excuse_but_not_both() {
        let kernels = [("a", "1"), ("b", "2")];
        let whys = |records: &[Record], excuses: &str| -> Vec<String> {
            judge(&kernels, records, excuses).iter().map(Problem::to_string).collect()
        };
        let proven = [record("a", "1", true)];
        assert_eq!(whys(&[], "# why\na: later\nb: later\n"), [""; 0]);
        assert_eq!(whys(&proven, "b: later"), [""; 0]);
        assert_eq!(whys(&proven, ""), ["b: has no evidence on GPU"]);
        assert_eq!(whys(&[], "a: later"), ["b: has no evidence"]);
        assert_eq!(whys(&proven, "a: x\nb: x"), ["a: is proven; remove it from unproven.txt"]);
        assert_eq!(whys(&[record("a", "0", true)], "b: x"), ["a: has changed since its evidence on GPU"]);
        assert_eq!(whys(&[record("a", "1", false)], "b: x"), ["a: failed [n=1 f32] on GPU"]);
        assert_eq!(whys(&[record("a", "0", true), proven[0].clone()], "b: x"), [""; 0], "one GPU suffices");
        let odd = whys(&proven, "b:\nb: x\nzzz: x");
        assert!(odd[0].contains("without a reason") && odd[1].contains("twice"), "{odd:?}");
        assert!(odd[2].contains("no CUDA kernel") && odd.len() == 3, "{odd:?}");
        let mut on_cpu = proven[0].clone();
        on_cpu.machine.cpu = Some(Cpu { threads: 1, tier: "avx2".into() });
        assert_eq!(whys(&[on_cpu], "b: x"), ["a: has no evidence"], "a CPU proves no CUDA kernel");
    }

    #[test]
    fn rows_hold_cases_and_timings_with_todays_verdict() {
        let op = crate::lab::find("rms_norm").unwrap();
        let kernel = op.kernels()[0];
        let hash = crate::lab::source_hash(&kernel, "rms_norm");
        let mut record = record(kernel.name, &hash, true);
        let ours = Timing {
            kernel: kernel.name.into(),
            source_hash: hash.clone(),
            ..timing("rms_norm", "n=1", "f32", 1.0)
        };
        record.add_timing(ours);
        record.add_timing(timing("rms_norm", "n=1", "f32", 1.0));
        let rows = rows(&[record]);
        let verdicts: Vec<_> = rows.iter().map(|row| (row.ms, row.ok, row.proven)).collect();
        assert!(verdicts.contains(&(None, true, true)) && verdicts.contains(&(Some(2.0), true, true)));
        assert!(verdicts.contains(&(Some(2.0), false, false)), "a timing of unknown code proves nothing");
        let keys = serde_json::to_value(&rows[0]).unwrap();
        let mut keys: Vec<_> = keys.as_object().unwrap().keys().cloned().collect();
        keys.sort();
        let mut expected = [
            "op",
            "kernel",
            "case",
            "dtype",
            "ok",
            "error",
            "ms",
            "peer",
            "peer_ms",
            "limit_ms",
            "gpu",
            "source_hash",
            "proven",
        ];
        expected.sort();
        assert_eq!(keys, expected);
    }
}
