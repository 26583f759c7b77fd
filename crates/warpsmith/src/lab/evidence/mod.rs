//! Evidence: what was proven and measured on real machines, keyed by the source hash of each kernel.
//!
//! One file per device in a folder of the repository. `warpsmith check --record` and `warpsmith bench --record`
//! write it; tests on machines without a GPU read it.

mod age;
mod date;
mod machine;
mod peers;
mod picture;
mod readme;
mod report;
mod sweep;
mod tables;
mod text;

pub use age::{Age, SANITIZERS};
pub use date::today;
pub use machine::{Clocks, Cpu, Machine};
pub use peers::PeerTime;
pub use readme::{pages, readme};
pub use report::{PresentCode, Problem, Row, legend, rows, unproven};
pub use sweep::{Sweep, read_sweeps};
pub use tables::{overview, page, page_name};

use crate::error::{Error, Result};
use crate::lab::bench::{Bound, Cache, Ceilings, HostTime, Measurement};
use crate::lab::proof::Outcome;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Version of the files' format.
const FORMAT: u32 = 2;
/// The file in the folder that names kernels without evidence, one `kernel-name: reason` per line.
pub const UNPROVEN: &str = "unproven.txt";

/// One case on one kernel.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CaseRecord {
    /// The case's name.
    pub case: String,
    /// Its dtype.
    pub dtype: String,
    /// Everything held.
    pub ok: bool,
    /// `‖out - truth‖ / ‖truth‖`; `None` if it could not be computed.
    pub error: Option<f64>,
    /// Largest elementwise error over what is allowed.
    pub worst: Option<f64>,
}

impl CaseRecord {
    /// From the outcome of a case.
    pub fn new(case: String, dtype: &str, outcome: &Outcome) -> Self {
        let digits = |x: f64| x.is_finite().then(|| significant(x, 3));
        CaseRecord {
            case,
            dtype: dtype.into(),
            ok: outcome.ok,
            error: digits(outcome.error),
            worst: digits(outcome.worst),
        }
    }
}

/// The results of one kernel.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct KernelRecord {
    /// Its op.
    pub op: String,
    /// The code that was run.
    pub source_hash: String,
    /// Every case it was run on.
    pub cases: Vec<CaseRecord>,
    /// The verdict of each compute-sanitizer tool over all cases: `clean` or `errors`.
    #[serde(default)]
    pub sanitizer: BTreeMap<String, String>,
    /// The day of the last full run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub date: Option<String>,
}

/// One case timed on one kernel.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Timing {
    /// The op.
    pub op: String,
    /// The kernel.
    pub kernel: String,
    /// The code that was run.
    pub source_hash: String,
    /// The case's name.
    pub case: String,
    /// Its dtype.
    pub dtype: String,
    /// Median milliseconds of one call.
    pub ms: f64,
    /// Half the distance between the 10th and 90th percentiles, divided by the median.
    pub spread: f64,
    /// Fewest bytes over the median.
    pub gbps: f64,
    /// Operations over the median.
    pub tflops: f64,
    /// The least time by the ceilings of the same run.
    pub limit_ms: f64,
    /// The ceiling that gives this limit.
    #[serde(default)]
    pub bound: Bound,
    /// State of the cache.
    pub l2: Cache,
    /// The day.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub date: Option<String>,
    /// If the peers were timed in an earlier run: the time of one of them in this run over that in the earlier one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub calibration: Option<f64>,
}

impl Timing {
    /// From a measurement of today and the calibration of its run.
    pub fn new(m: &Measurement, calibration: Option<f64>) -> Self {
        Timing {
            op: m.op.clone(),
            kernel: m.kernel.clone(),
            source_hash: m.source_hash.clone(),
            case: m.case.clone(),
            dtype: m.dtype.clone(),
            ms: significant(m.median_ms, 4),
            spread: significant(m.spread(), 2),
            gbps: significant(m.gbps, 4),
            tflops: significant(m.tflops, 4),
            limit_ms: significant(m.limit_ms, 4),
            bound: m.bound,
            l2: m.l2,
            date: Some(today()),
            calibration,
        }
    }
}

/// One of the tests that need the device itself, beyond the cases of ops.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TestRecord {
    /// The file it is in.
    pub source_hash: String,
    /// The version of the library it tested.
    pub version: String,
    /// It passed.
    pub ok: bool,
}

impl TestRecord {
    /// From the text of the test's file and its result, with this version of the library.
    pub fn new(source: &str, ok: bool) -> TestRecord {
        let source_hash = blake3::hash(source.as_bytes()).to_hex().to_string();
        TestRecord { source_hash, version: env!("CARGO_PKG_VERSION").into(), ok }
    }
}

/// The evidence of one device: one file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Record {
    format: u32,
    /// The device and what ran on it.
    #[serde(flatten)]
    pub machine: Machine,
    /// The ceilings of the latest timed run.
    pub ceilings: Option<Ceilings>,
    /// By kernel.
    pub kernels: BTreeMap<String, KernelRecord>,
    /// Sorted by op, kernel, case and dtype.
    pub timings: Vec<Timing>,
    /// Other libraries, sorted by op, case, dtype, state of the cache and name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub peers: Vec<PeerTime>,
    /// Host time of single calls.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub host_times: Vec<HostTime>,
    /// Random shapes, sorted by family and types.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sweeps: Vec<Sweep>,
    /// Tests that need the device, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub tests: BTreeMap<String, TestRecord>,
}

impl Record {
    /// An empty record.
    pub fn new(machine: Machine) -> Record {
        Record {
            format: FORMAT,
            machine,
            ceilings: None,
            kernels: BTreeMap::new(),
            timings: Vec::new(),
            peers: Vec::new(),
            host_times: Vec::new(),
            sweeps: Vec::new(),
            tests: BTreeMap::new(),
        }
    }

    /// The device's record in the folder, or a new one, with the given facts about the machine.
    pub fn open(folder: &Path, machine: Machine) -> Result<Record> {
        let path = folder.join(file_name(&machine.device));
        match path.exists() {
            true => Ok(Record { machine, ..read(&path)? }),
            false => Ok(Record::new(machine)),
        }
    }

    /// Adds the cases of one kernel. Cases of other versions of the kernel are dropped. `full` means that these are
    /// all the cases the kernel supports; then earlier failures that were not run again are dropped too.
    ///
    /// Returns false, recording nothing, if these are only some cases of a version without a full run: an existing
    /// record must stand for all cases.
    pub fn add_cases(
        &mut self,
        op: &str,
        kernel: &str,
        source_hash: &str,
        cases: Vec<CaseRecord>,
        full: bool,
    ) -> bool {
        let current = self.kernels.get(kernel).is_some_and(|record| record.source_hash == source_hash);
        if !current && !full {
            return false;
        }
        if !current {
            let record = KernelRecord {
                op: op.into(),
                source_hash: source_hash.into(),
                cases: Vec::new(),
                sanitizer: BTreeMap::new(),
                date: None,
            };
            self.kernels.insert(kernel.into(), record);
        }
        let record = self.kernels.get_mut(kernel).expect("inserted above");
        if full {
            record.date = Some(today());
        }
        let key = |case: &CaseRecord| (case.case.clone(), case.dtype.clone());
        let mut merged: BTreeMap<_, _> =
            record.cases.drain(..).filter(|case| case.ok || !full).map(|case| (key(&case), case)).collect();
        merged.extend(cases.into_iter().map(|case| (key(&case), case)));
        record.cases = merged.into_values().collect();
        true
    }

    /// Adds the verdict of a compute-sanitizer tool; false if there is no record of this version of the kernel.
    pub fn add_sanitizer(&mut self, kernel: &str, source_hash: &str, tool: &str, clean: bool) -> bool {
        let record = self.kernels.get_mut(kernel).filter(|record| record.source_hash == source_hash);
        let verdict = if clean { "clean" } else { "errors" };
        record.map(|record| record.sanitizer.insert(tool.into(), verdict.into())).is_some()
    }

    /// Adds a timing, replacing one of the same kernel, case and dtype. Other timings of an earlier version of the kernel
    /// stay, and are marked as such where they are shown.
    pub fn add_timing(&mut self, timing: Timing) {
        let key = |t: &Timing| [&t.op, &t.kernel, &t.case, &t.dtype].map(String::clone);
        let new = key(&timing);
        match self.timings.binary_search_by(|old| key(old).cmp(&new)) {
            Ok(at) => self.timings[at] = timing,
            Err(at) => self.timings.insert(at, timing),
        }
    }

    /// Adds the result of a test. Results of the same file with another text are dropped, as those tests may be gone.
    pub fn add_test(&mut self, name: &str, test: TestRecord) {
        let file = |name: &str| name.split("::").next().unwrap_or_default().to_string();
        let changed =
            |old: &TestRecord| (&old.source_hash, &old.version) != (&test.source_hash, &test.version);
        self.tests.retain(|other, old| file(other) != file(name) || !changed(old));
        self.tests.insert(name.into(), test);
    }

    /// Sets the ceilings of the run that the added timings come from.
    pub fn set_ceilings(&mut self, ceilings: Ceilings) {
        self.ceilings = Some(ceilings.map(|rate| significant(rate, 4)));
    }

    /// Replaces the host times by those of one run.
    pub fn set_host_times(&mut self, times: Vec<HostTime>) {
        let digits = |us: f64| significant(us, 3);
        self.host_times = times
            .into_iter()
            .map(|t| HostTime {
                us: digits(t.us),
                best_us: digits(t.best_us),
                peers: t.peers.into_iter().map(|(name, us)| (name, digits(us))).collect(),
                ..t
            })
            .collect();
    }

    /// Adds summaries of sweeps, replacing those of the same families and types.
    pub fn add_sweeps(&mut self, sweeps: Vec<Sweep>) {
        let key = |sweep: &Sweep| (sweep.family.clone(), sweep.types.clone());
        let all = self.sweeps.drain(..).chain(sweeps).map(|sweep| (key(&sweep), sweep));
        let merged: BTreeMap<_, _> = all.collect();
        self.sweeps = merged.into_values().collect();
    }

    /// Whether the record proves this code of a kernel; if not, why not.
    pub fn proves(&self, kernel: &str, source_hash: &str) -> std::result::Result<(), String> {
        let record = self.passes(kernel, source_hash)?;
        match record.sanitizer.iter().find(|(_, verdict)| *verdict != "clean") {
            Some((tool, _)) => Err(format!("has errors under {tool} on {}", self.machine.device)),
            None => Ok(()),
        }
    }

    /// What is known of this code of a kernel if it passed all cases, whatever sanitizers say; if not, why not.
    pub fn passes(&self, kernel: &str, source_hash: &str) -> std::result::Result<&KernelRecord, String> {
        let Some(record) = self.kernels.get(kernel) else {
            return Err(format!("has no evidence on {}", self.machine.device));
        };
        if record.source_hash != source_hash {
            return Err(format!("has changed since its evidence on {}", self.machine.device));
        }
        if record.cases.is_empty() {
            return Err(format!("ran no case on {}", self.machine.device));
        }
        if let Some(case) = record.cases.iter().find(|case| !case.ok) {
            return Err(format!("failed [{} {}] on {}", case.case, case.dtype, self.machine.device));
        }
        Ok(record)
    }

    /// Writes the record to a temporary file in the folder and renames it into place; returns the path.
    pub fn save(&self, folder: &Path) -> Result<PathBuf> {
        let path = folder.join(file_name(&self.machine.device));
        let value = serde_json::to_value(self).expect("records are plain data");
        let aside = path.with_extension(format!("{}.tmp", std::process::id()));
        std::fs::write(&aside, text::pretty(&value)).map_err(|e| Error::io(&aside, "writing", &e))?;
        std::fs::rename(&aside, &path).map_err(|e| Error::io(&path, "renaming into place", &e))?;
        Ok(path)
    }
}

/// The folder of evidence: the one given, or `evidence` beside the `Cargo.toml` of the repository around the
/// working directory.
pub fn folder(given: Option<&Path>) -> Result<PathBuf> {
    let missing = |why: String| Error::Unavailable {
        what: "the evidence folder".into(),
        why,
        fix: "Run inside the repository, or name the folder with --evidence DIR".into(),
    };
    if let Some(folder) = given {
        return match folder.is_dir() {
            true => Ok(folder.into()),
            false => Err(missing(format!("{} is not a folder", folder.display()))),
        };
    }
    let here = std::env::current_dir().map_err(|e| Error::io(".", "finding the working directory", &e))?;
    let roots = here.ancestors().filter(|root| root.join("Cargo.toml").is_file());
    let folder = roots.map(|root| root.join("evidence")).find(|folder| folder.is_dir());
    folder.ok_or_else(|| missing(format!("no folder above {} has one", here.display())))
}

/// Every record of a folder, by file name.
pub fn load(folder: &Path) -> Result<Vec<Record>> {
    let entries = std::fs::read_dir(folder).map_err(|e| Error::io(folder, "listing", &e))?;
    let mut paths: Vec<PathBuf> = entries
        .map(|entry| entry.map(|entry| entry.path()).map_err(|e| Error::io(folder, "listing", &e)))
        .collect::<Result<_>>()?;
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "json"));
    paths.sort();
    paths.iter().map(|path| read(path)).collect()
}

fn read(path: &Path) -> Result<Record> {
    let bytes = std::fs::read(path).map_err(|e| Error::io(path, "reading", &e))?;
    let broken = |what: String| Error::Io { path: path.into(), what };
    let mut record: Record = serde_json::from_slice(&bytes).map_err(|e| broken(e.to_string()))?;
    match record.format {
        FORMAT => Ok(record),
        1 => {
            record.keep_peers_of_format_1(&bytes).map_err(|e| broken(e.to_string()))?;
            Ok(Record { format: FORMAT, ..record })
        }
        other => Err(broken(format!("format {other} is not {FORMAT}, the one this version reads"))),
    }
}

fn file_name(device: &str) -> String {
    stem(device) + ".json"
}

/// The name of a device's files without their extension: `nvidia-h200` for `NVIDIA H200`.
fn stem(device: &str) -> String {
    let words = device.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
    words.map(str::to_ascii_lowercase).collect::<Vec<_>>().join("-")
}

/// Rounds to this many digits, so that files hold no noise.
fn significant(x: f64, digits: usize) -> f64 {
    format!("{x:.*e}", digits - 1).parse().unwrap_or(x)
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;

    fn case(name: &str, ok: bool) -> CaseRecord {
        CaseRecord { case: name.into(), dtype: "f32".into(), ok, error: ok.then_some(1e-7), worst: None }
    }

    fn timing(kernel: &str, hash: &str, case: &str, ms: f64) -> Timing {
        Timing {
            op: "op".into(),
            kernel: kernel.into(),
            source_hash: hash.into(),
            case: case.into(),
            dtype: "f32".into(),
            ms,
            spread: 0.01,
            gbps: 1.0,
            tflops: 1.0,
            limit_ms: 1.0,
            bound: Bound::Memory,
            l2: Cache::Cold,
            date: None,
            calibration: None,
        }
    }

    fn record() -> Record {
        Record::new(Machine { device: "Some GPU (TM) 9".into(), ..Machine::default() })
    }

    #[test]
    fn a_full_run_of_new_code_replaces_everything_known_of_the_kernel() {
        let mut record = record();
        assert!(record.add_cases("op", "k", "old", vec![case("a", true), case("b", true)], true));
        assert!(record.add_cases("op", "other", "old", vec![case("a", true)], true));
        assert!(record.add_sanitizer("k", "old", "memcheck", true));
        record.add_timing(timing("k", "old", "a", 1.0));
        record.add_timing(timing("other", "old", "a", 1.0));
        assert_eq!(record.proves("k", "old"), Ok(()));
        assert!(record.proves("k", "new").unwrap_err().contains("changed"));

        assert!(
            !record.add_cases("op", "k", "new", vec![case("a", true)], false),
            "some cases prove nothing"
        );
        assert_eq!(record.proves("k", "old"), Ok(()));
        assert!(record.add_cases("op", "k", "new", vec![case("b", true)], true));
        assert_eq!(record.proves("k", "new"), Ok(()));
        assert_eq!(record.kernels["k"].cases, [case("b", true)]);
        assert!(record.kernels["k"].sanitizer.is_empty());
        assert!(!record.add_sanitizer("k", "old", "memcheck", true));
        assert_eq!(
            record.timings.len(),
            2,
            "times of the earlier version stay until the cases are timed again"
        );
        assert_eq!(record.proves("other", "old"), Ok(()));
    }

    #[test]
    fn cases_of_the_same_code_are_merged_and_a_failure_disproves() {
        let mut record = record();
        record.add_cases("op", "k", "h", vec![case("a", true), case("c", false)], true);
        assert!(record.proves("k", "h").unwrap_err().contains("[c f32]"));
        assert!(record.add_cases("op", "k", "h", vec![case("b", true)], false));
        assert!(record.proves("k", "h").is_err(), "the failure stays until it is run again");
        assert!(record.add_cases("op", "k", "h", vec![case("a", true)], true));
        assert_eq!(record.kernels["k"].cases, [case("a", true), case("b", true)]);
        assert_eq!(record.proves("k", "h"), Ok(()));
        record.add_sanitizer("k", "h", "racecheck", false);
        assert!(
            record.proves("k", "h").unwrap_err().contains("racecheck") && record.passes("k", "h").is_ok()
        );
        record.add_cases("op", "empty", "h", vec![], true);
        assert!(record.proves("empty", "h").is_err());
    }

    #[test]
    fn timings_are_replaced_by_case() {
        let mut record = record();
        for t in [timing("k", "h", "b", 1.0), timing("k", "h", "a", 2.0), timing("k", "h", "b", 3.0)] {
            record.add_timing(t);
        }
        assert_eq!(record.timings.iter().map(|t| t.ms).collect::<Vec<_>>(), [2.0, 3.0]);
        record.add_timing(timing("k", "new", "b", 4.0));
        let times: Vec<_> = record.timings.iter().map(|t| (t.source_hash.as_str(), t.ms)).collect();
        assert_eq!(times, [("h", 2.0), ("new", 4.0)]);
    }

    #[test]
    fn tests_are_kept_until_their_file_changes() {
        let mut record = record();
        record.add_test("memory::a", TestRecord::new("old", true));
        record.add_test("memory::b", TestRecord::new("old", false));
        record.add_test("streams::c", TestRecord::new("other", true));
        record.add_test("memory::b", TestRecord::new("old", true));
        assert!(record.tests.len() == 3 && record.tests["memory::b"].ok);
        record.add_test("memory::b", TestRecord::new("new", true));
        assert_eq!(record.tests.keys().collect::<Vec<_>>(), ["memory::b", "streams::c"]);
        let next = TestRecord { version: "99.0.0".into(), ..TestRecord::new("other", true) };
        record.add_test("streams::d", next);
        assert_eq!(record.tests.keys().collect::<Vec<_>>(), ["memory::b", "streams::d"]);
    }

    #[test]
    fn files_survive_and_other_formats_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let mut record = record();
        record.add_cases("op", "k", "h", vec![case("a", true), case("b", false)], true);
        record.add_timing(timing("k", "h", "a", 1.0));
        record.add_test("memory::a", TestRecord::new("text", true));
        let path = record.save(folder.path()).unwrap();
        assert_eq!(path.file_name().unwrap(), "some-gpu-tm-9.json");
        assert_eq!(load(folder.path()).unwrap(), [record.clone()]);
        let today = Machine { driver: Some("999".into()), ..record.machine.clone() };
        let opened = Record::open(folder.path(), today.clone()).unwrap();
        assert_eq!((opened.machine, opened.kernels), (today, record.kernels));
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, text.replace("\"format\": 2", "\"format\": 3")).unwrap();
        assert!(load(folder.path()).unwrap_err().to_string().contains("format 3"));
        assert!(folder.path().read_dir().unwrap().count() == 1, "nothing is left aside");
    }

    #[test]
    fn numbers_are_rounded_to_digits_that_mean_something() {
        assert_eq!(significant(0.0123456, 3), 0.0123);
        assert_eq!(significant(4281.49, 4), 4281.0);
        assert_eq!(significant(0.0, 4), 0.0);
    }
}
