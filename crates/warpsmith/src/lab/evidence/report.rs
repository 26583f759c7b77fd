//! What the evidence amounts to: rows for programs, a table for people, and the kernels that lack it.

use super::{Record, Timing, UNPROVEN};
use crate::error::{Error, Result};
use crate::lab::bench::Bound;
use crate::ops;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
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
    /// The case passed; of a timing, all cases of the kernel did.
    pub ok: bool,
    /// `‖out - truth‖ / ‖truth‖`; of a timing, the largest of the kernel's cases.
    pub error: Option<f64>,
    /// Median milliseconds, of a timing.
    pub ms: Option<f64>,
    /// The fastest peer in the same run.
    pub peer: Option<String>,
    /// Its milliseconds.
    pub peer_ms: Option<f64>,
    /// What a copy of the fewest bytes would have taken.
    pub limit_ms: Option<f64>,
    /// The device.
    pub gpu: String,
    /// The code that was run.
    pub source_hash: String,
    /// That is the present code, and it passed all its cases.
    pub proven: bool,
}

/// The present code of every registered kernel: its hash, by name.
pub struct PresentCode(BTreeMap<&'static str, String>);

impl PresentCode {
    /// Of this program.
    pub fn new() -> PresentCode {
        let kernels = ops::PROVABLE.iter().flat_map(|op| {
            op.kernels()
                .into_iter()
                .map(|kernel| (kernel.name, crate::lab::source_hash(&kernel, op.spec().name)))
        });
        PresentCode(kernels.collect())
    }

    /// Whether that hash is the present code of the kernel.
    pub fn is(&self, kernel: &str, source_hash: &str) -> bool {
        self.0.get(kernel).is_some_and(|now| now == source_hash)
    }

    /// What marks the time of a timing: nothing, or a dagger if the kernel has changed since.
    pub fn mark(&self, timing: &Timing) -> &'static str {
        if self.is(&timing.kernel, &timing.source_hash) { "" } else { " †" }
    }
}

impl Default for PresentCode {
    fn default() -> Self {
        PresentCode::new()
    }
}

/// What the dagger of a timing says.
pub const EARLIER: &str = "† timed with an earlier version of the kernel";

/// Everything recorded: the cases, then the timings, device by device.
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
            let peer = t.best_peer();
            Row {
                op: t.op.clone(),
                kernel: t.kernel.clone(),
                case: t.case.clone(),
                dtype: t.dtype.clone(),
                ok: checked.is_some_and(|k| !k.cases.is_empty() && k.cases.iter().all(|case| case.ok)),
                error: errors.reduce(f64::max),
                ms: Some(t.ms),
                peer: peer.map(|(name, _)| name.to_string()),
                peer_ms: peer.map(|(_, ms)| ms),
                limit_ms: Some(t.limit_ms),
                gpu: record.machine.device.clone(),
                source_hash: t.source_hash.clone(),
                proven: proven(&t.kernel, &t.source_hash),
            }
        }));
    }
    rows
}

/// A kernel whose evidence, or whose line in `unproven.txt`, is not in order. Reads as a line of that file.
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

/// Compares the registered CUDA kernels with a folder of evidence: every kernel must be proven, in its present
/// code, on some GPU, or be named in `unproven.txt` with a reason; and nothing else may be named there.
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

/// How much a table shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Detail {
    /// The largest case of each op, in bf16 where it was timed.
    Summary,
    /// Every case.
    Full,
}

/// The timings as Markdown, a table for each device. Those of code that has changed since are marked.
pub fn markdown(records: &[Record], detail: Detail) -> String {
    tables(records, detail, &PresentCode::new())
}

fn tables(records: &[Record], detail: Detail, present: &PresentCode) -> String {
    let mut out = String::new();
    for record in records {
        let timings = table(record, detail);
        if timings.is_empty() {
            continue;
        }
        let mut facts = vec![format!("**{}**", record.machine.device)];
        facts.extend(record.machine.driver.iter().map(|version| format!("driver {version}")));
        facts.extend(record.machine.nvrtc.iter().map(|version| format!("NVRTC {version}")));
        facts.extend(record.machine.cpu.iter().map(|cpu| format!("{} threads, {}", cpu.threads, cpu.tier)));
        facts.extend(record.ceilings.iter().map(|latest| match copy_range(&timings) {
            None => latest.to_string(),
            Some(range) => format!("{latest} in the latest run; each row by its own run's, copy {range}"),
        }));
        let separator = if out.is_empty() { "" } else { "\n" };
        let _ = writeln!(out, "{separator}{}", facts.join(" · "));
        let _ =
            writeln!(out, "\n| op | case | dtype | time | rate | of the limit | fastest peer | speed-up |");
        let _ = writeln!(out, "|---|---|---|---:|---:|---:|---|---:|");
        let mut marked = false;
        for t in timings {
            let mark = present.mark(t);
            marked |= !mark.is_empty();
            let (peer, gain) = match t.best_peer() {
                Some((name, ms)) => (format!("{name}, {}", time(ms)), format!("{:.2}x", ms / t.ms)),
                None => ("-".into(), "-".into()),
            };
            let Timing { op, case, dtype, .. } = t;
            let rate = t.bound.rate(t.gbps, t.tflops);
            let share = 100.0 * t.limit_ms / t.ms;
            let cached = if t.l2 == crate::lab::bench::Cache::Warm { " (in cache)" } else { "" };
            let _ = writeln!(
                out,
                "| {op} | {case} | {dtype} | {}{mark} | {rate} | {share:.0} %{cached} | {peer} | {gain} |",
                time(t.ms),
            );
        }
        if marked {
            let _ = writeln!(out, "\n{EARLIER}");
        }
    }
    out
}

/// The rates of a copy that timings limited by memory are compared with, lowest and highest, if they differ by more than
/// a hundredth: timings of several runs, each with the ceilings of its own.
fn copy_range(timings: &[&Timing]) -> Option<String> {
    let limited = timings.iter().filter(|t| t.bound == Bound::Memory && t.limit_ms > 0.0);
    let rates = limited.map(|t| t.gbps * t.ms / t.limit_ms);
    let (low, high) = rates.fold((f64::INFINITY, 0.0), |(low, high), r| (r.min(low), r.max(high)));
    let rate = |gbps| Bound::Memory.rate(gbps, 0.0);
    (high > 1.01 * low).then(|| format!("{} to {}", rate(low), rate(high)))
}

fn time(ms: f64) -> String {
    if ms < 1.0 { format!("{:.1} us", ms * 1e3) } else { format!("{ms:.2} ms") }
}

/// The timings a table shows: of each case the fastest kernel; ops in their order, larger cases later.
fn table(record: &Record, detail: Detail) -> Vec<&Timing> {
    let mut fastest: BTreeMap<[&str; 3], &Timing> = BTreeMap::new();
    for t in &record.timings {
        let best = fastest.entry([&t.op, &t.case, &t.dtype]).or_insert(t);
        if t.ms < best.ms {
            *best = t;
        }
    }
    let rank =
        |op: &str| ops::PROVABLE.iter().position(|known| known.spec().name == op).unwrap_or(usize::MAX);
    let mut timings: Vec<&Timing> = fastest.into_values().collect();
    timings.sort_by(|a, b| {
        let dtype = |t: &Timing| (t.dtype != "bf16", t.dtype.clone());
        rank(&a.op)
            .cmp(&rank(&b.op))
            .then_with(|| dtype(a).cmp(&dtype(b)))
            .then_with(|| a.limit_ms.total_cmp(&b.limit_ms))
    });
    if detail == Detail::Full {
        return timings;
    }
    // bf16 comes first within an op, and the largest case comes last within a dtype.
    let mut chosen: Vec<&Timing> = Vec::new();
    for t in timings {
        match chosen.last_mut() {
            Some(last) if last.op == t.op && last.dtype == t.dtype => *last = t,
            Some(last) if last.op == t.op => {}
            _ => chosen.push(t),
        }
    }
    chosen
}

const BEGIN: &str = "<!-- evidence:begin -->";
const END: &str = "<!-- evidence:end -->";

/// A document with the part between its evidence markers replaced; `None` if it has no markers.
pub fn embed(document: &str, table: &str) -> Option<String> {
    let start = document.find(BEGIN)? + BEGIN.len();
    let end = start + document[start..].find(END)?;
    Some(format!("{}\n{}\n{}", &document[..start], table.trim_end(), &document[end..]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lab::bench::{Cache, Ceilings};
    use crate::lab::evidence::{CaseRecord, Cpu, Machine};

    fn record(kernel: &str, hash: &str, ok: bool) -> Record {
        let mut record = Record::new(Machine { device: "GPU".into(), ..Machine::default() });
        let case =
            CaseRecord { case: "n=1".into(), dtype: "f32".into(), ok, error: Some(1e-7), worst: Some(0.5) };
        record.add_cases("rms_norm", kernel, hash, vec![case], true);
        record
    }

    fn timing(op: &str, case: &str, dtype: &str, limit_ms: f64) -> Timing {
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
            peers: BTreeMap::from([("torch".to_string(), 3.0 * limit_ms)]),
        }
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

    #[test]
    fn the_summary_shows_the_largest_case_in_bf16() {
        let mut record = Record::new(Machine { device: "GPU".into(), ..Machine::default() });
        record.ceilings = Some(Ceilings::copy(4281.0));
        for (op, case, dtype, limit) in [
            ("layer_norm", "n=1", "f32", 0.5),
            ("rms_norm", "n=9", "f32", 9.0),
            ("rms_norm", "n=2", "bf16", 2.0),
            ("rms_norm", "n=1", "bf16", 0.001),
        ] {
            record.add_timing(timing(op, case, dtype, limit));
        }
        let present = PresentCode(BTreeMap::from([("k", "h".to_string())]));
        let summary = tables(std::slice::from_ref(&record), Detail::Summary, &present);
        let lines: Vec<_> = summary.lines().skip(4).collect();
        assert_eq!(
            lines,
            [
                "| rms_norm | n=2 | bf16 | 4.00 ms | 100 GB/s | 50 % | torch, 6.00 ms | 1.50x |",
                "| layer_norm | n=1 | f32 | 1.00 ms | 100 GB/s | 50 % | torch, 1.50 ms | 1.50x |",
            ]
        );
        assert!(summary.starts_with("**GPU** · copy 4281 GB/s\n"));
        assert_eq!(tables(&[record], Detail::Full, &present).lines().count(), 4 + 4);
        assert_eq!(markdown(&[], Detail::Full), "");
    }

    #[test]
    fn timings_of_other_code_and_of_other_ceilings_are_told_apart() {
        let mut record = Record::new(Machine { device: "GPU".into(), ..Machine::default() });
        record.ceilings = Some(Ceilings::copy(100.0));
        record.add_timing(timing("rms_norm", "n=1", "bf16", 1.0));
        // 100 GB/s that were 80 % of the ceiling then.
        let changed = Timing { kernel: "l".into(), ms: 1.25, ..timing("layer_norm", "n=1", "bf16", 1.0) };
        record.add_timing(changed);
        let present = PresentCode(BTreeMap::from([("k", "h".to_string()), ("l", "new".to_string())]));
        let text = tables(&[record], Detail::Full, &present);
        assert!(text.contains("| 2.00 ms | 100 GB/s | 50 % |"), "{text}");
        assert!(text.contains("| 1.25 ms † | 100 GB/s | 80 % |"), "{text}");
        assert!(text.ends_with(&format!("|\n\n{EARLIER}\n")), "{text}");
        assert!(
            text.contains(
                "copy 100 GB/s in the latest run; each row by its own run's, copy 125 GB/s to 200 GB/s\n"
            ),
            "{text}"
        );
    }

    #[test]
    fn only_what_lies_between_the_markers_is_replaced() {
        let document = format!("head\n{BEGIN}\nold\n{END}\ntail\n");
        let updated = embed(&document, "new\n").unwrap();
        assert_eq!(updated, format!("head\n{BEGIN}\nnew\n{END}\ntail\n"));
        assert_eq!(embed(&updated, "new\n").unwrap(), updated);
        assert_eq!(embed("no markers", "new"), None);
    }
}
