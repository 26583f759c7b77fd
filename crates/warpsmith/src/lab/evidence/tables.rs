//! The evidence as Markdown: a table with one line per op, and a page for each device with every timing and every proof.

use super::{PresentCode, Record, Sweep, Timing, legend, stem};
use crate::lab::bench::{Bound, Cache};
use crate::op::OpSpec;
use crate::ops;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

/// For each op what it computes, and for each device that was timed its speed-up over the fastest peer; then the sweeps.
pub fn overview(records: &[Record]) -> String {
    let specs: Vec<&OpSpec> = ops::PROVABLE.iter().map(|op| op.spec()).collect();
    overview_of(&specs, records, &PresentCode::new())
}

fn overview_of(specs: &[&OpSpec], records: &[Record], present: &PresentCode) -> String {
    let timed = timed(records);
    let mut out = String::from("| op | what it computes |");
    for record in &timed {
        let _ = write!(out, " {} |", record.machine.device);
    }
    let _ = writeln!(out, "\n|---|---|{}", "---:|".repeat(timed.len()));
    for spec in specs {
        let _ = write!(out, "| `{}` | {} |", spec.name, spec.summary);
        for record in &timed {
            let timings: Vec<&Timing> =
                fastest(record).into_iter().filter(|timing| timing.op == spec.name).collect();
            let _ = write!(out, " {}{} |", speed_up(record, &timings), present.marks(&timings));
        }
        out.push('\n');
    }
    sweep_overview(&timed, present, &mut out);
    let marks = legend(&out);
    out + &marks
}

/// The devices that were timed, GPUs first.
pub(super) fn timed(records: &[Record]) -> Vec<&Record> {
    let mut timed: Vec<&Record> = records.iter().filter(|record| !record.timings.is_empty()).collect();
    timed.sort_by_key(|record| !record.machine.is_gpu());
    timed
}

/// Writes a line for every family that was swept.
fn sweep_overview(records: &[&Record], present: &PresentCode, out: &mut String) {
    let swept: Vec<&&Record> = records.iter().filter(|record| !record.sweeps.is_empty()).collect();
    if swept.is_empty() {
        return;
    }
    let keys: BTreeSet<[&str; 2]> =
        swept.iter().flat_map(|record| &record.sweeps).map(|sweep| [&*sweep.family, &*sweep.types]).collect();
    let _ = write!(
        out,
        "\nRandom shapes and options ([`bench/sweep.py`](../docs/measuring.md#random-shapes)), geometric mean:\n\n\
         | family | types |"
    );
    for record in &swept {
        let _ = write!(out, " {} |", record.machine.device);
    }
    let _ = writeln!(out, "\n|---|---|{}", "---:|".repeat(swept.len()));
    for [family, types] in keys {
        let _ = write!(out, "| {family} | {types} |");
        for record in &swept {
            let found = record.sweeps.iter().find(|sweep| sweep.family == family && sweep.types == types);
            let text = found.map_or("-".into(), |sweep| sweep.text() + present.sweep_mark(sweep));
            let _ = write!(out, " {text} |");
        }
        out.push('\n');
    }
}

/// The speed-ups over the fastest peer in ascending order.
pub(super) fn speed_ups(record: &Record, timings: &[&Timing]) -> Vec<f64> {
    let ratios = timings.iter().filter_map(|timing| Some(record.best_peer(timing)?.ms / timing.ms));
    let mut ratios: Vec<f64> = ratios.collect();
    ratios.sort_by(f64::total_cmp);
    ratios
}

/// The median of ascending numbers, of which there is one at least.
pub(super) fn median(ascending: &[f64]) -> f64 {
    let (lower, upper) = ((ascending.len() - 1) / 2, ascending.len() / 2);
    (ascending[lower] + ascending[upper]) / 2.0
}

/// The median speed-up over the fastest peer, with the range over all cases.
pub(super) fn speed_up(record: &Record, timings: &[&Timing]) -> String {
    let ratios = speed_ups(record, timings);
    match (timings, &ratios[..]) {
        ([], _) => "-".into(),
        (_, []) => "no peer".into(),
        (_, [only]) => format!("{only:.2}x"),
        (_, [least, .., most]) => format!("{:.2}x ({least:.2} to {most:.2})", median(&ratios)),
    }
}

/// The name of a record's page: `nvidia-h200.md` for `NVIDIA H200`.
pub fn page_name(record: &Record) -> String {
    stem(&record.machine.device) + ".md"
}

/// Everything recorded about one device.
pub fn page(record: &Record) -> String {
    page_of(record, &PresentCode::new())
}

fn page_of(record: &Record, present: &PresentCode) -> String {
    let device = &record.machine.device;
    let mut out = format!(
        "# {device}\n\nGenerated from `{}.json` by `warpsmith evidence --update-readme`; do not edit. What the columns \
         mean: [measuring.md](../docs/measuring.md).\n\n{}\n",
        stem(device),
        facts(record).join(" · ")
    );
    host_table(record, &mut out);
    sweep_table(record, present, &mut out);
    timing_table(record, present, &mut out);
    proof_table(record, present, &mut out);
    let marks = legend(&out);
    out + &marks
}

/// The machine, its software, and its ceilings.
fn facts(record: &Record) -> Vec<String> {
    let machine = &record.machine;
    let mut facts = Vec::new();
    facts.extend(machine.driver.iter().map(|version| format!("driver {version}")));
    facts.extend(machine.nvrtc.iter().map(|version| format!("NVRTC {version}")));
    facts.extend(machine.cpu.iter().map(|cpu| format!("{} threads, {}", cpu.threads, cpu.tier)));
    facts.extend(record.ceilings.iter().map(|latest| match copy_range(&fastest(record)) {
        None => latest.to_string(),
        Some(range) => {
            format!("{latest} in the latest run; each row is limited by its own run's, copy {range}")
        }
    }));
    facts
}

/// Writes what calls cost the host.
fn host_table(record: &Record, out: &mut String) {
    if record.host_times.is_empty() {
        return;
    }
    let _ = writeln!(out, "\n## Host time of one repeated call, without a graph\n");
    let _ = writeln!(out, "| op | case | time | peers |\n|---|---|---:|---|");
    for t in &record.host_times {
        let peers: Vec<String> = t.peers.iter().map(|(name, us)| format!("{name} {us} us")).collect();
        let peers = if peers.is_empty() { "-".into() } else { peers.join(", ") };
        let _ = writeln!(out, "| {} | {} | {} us | {peers} |", t.op, t.case, t.us);
    }
}

/// Writes the summaries of sweeps.
fn sweep_table(record: &Record, present: &PresentCode, out: &mut String) {
    if record.sweeps.is_empty() {
        return;
    }
    let _ = writeln!(out, "\n## Random shapes\n");
    let _ = writeln!(out, "| family | types | cases | speed-up, geometric mean | worst case | seeds |");
    let _ = writeln!(out, "|---|---|---:|---:|---|---|");
    for sweep in &record.sweeps {
        let Sweep { family, types, compared, .. } = sweep;
        let mark = present.sweep_mark(sweep);
        let alone = match sweep.without_peer {
            0 => String::new(),
            some => format!(" and {some} without a peer"),
        };
        let worst = sweep.worst_case.as_deref().unwrap_or("-");
        let seeds: Vec<String> = sweep.seeds.iter().map(u64::to_string).collect();
        let (text, seeds) = (sweep.text(), seeds.join(", "));
        let _ =
            writeln!(out, "| {family} | {types} | {compared}{alone} | {text}{mark} | {worst} | {seeds} |");
    }
}

/// Writes the timings.
fn timing_table(record: &Record, present: &PresentCode, out: &mut String) {
    let timings = fastest(record);
    if timings.is_empty() {
        return;
    }
    let _ = writeln!(out, "\n## Timings\n");
    let _ = writeln!(
        out,
        "| op | case | dtype | kernel | time | rate | of the limit | fastest peer | speed-up |"
    );
    let _ = writeln!(out, "|---|---|---|---|---:|---:|---:|---|---:|");
    for t in &timings {
        let (peer, gain) = match record.best_peer(t) {
            Some(best) => (format!("{}, {}", best.peer, time(best.ms)), format!("{:.2}x", best.ms / t.ms)),
            None => ("-".into(), "-".into()),
        };
        let Timing { op, case, dtype, kernel, .. } = t;
        let rate = t.bound.rate(t.gbps, t.tflops);
        let share = 100.0 * t.limit_ms / t.ms;
        let cached = if t.l2 == Cache::Warm { " (in cache)" } else { "" };
        let (time, mark) = (time(t.ms), present.marks(&[t]));
        let _ = writeln!(
            out,
            "| {op} | {case} | {dtype} | {kernel} | {time}{mark} | {rate} | {share:.0} %{cached} | {peer} | {gain} |"
        );
    }
}

/// Writes what was checked.
fn proof_table(record: &Record, present: &PresentCode, out: &mut String) {
    if record.kernels.is_empty() {
        return;
    }
    let _ = writeln!(out, "\n## Checks\n\n| op | kernel | cases passed | largest error | sanitizer |");
    let _ = writeln!(out, "|---|---|---:|---:|---|");
    let mut kernels: Vec<_> = record.kernels.iter().collect();
    kernels.sort_by_key(|(_, kernel)| rank(&kernel.op));
    for (name, kernel) in kernels {
        let mark = if present.is(name, &kernel.source_hash) { "" } else { " †" };
        let passed = kernel.cases.iter().filter(|case| case.ok).count();
        let worst = kernel.cases.iter().filter_map(|case| case.worst).fold(0.0, f64::max);
        let tools = kernel.sanitizer.iter().map(|(tool, verdict)| format!("{tool} {verdict}"));
        let tools: Vec<String> = tools.collect();
        let tools = if tools.is_empty() { "-".into() } else { tools.join(", ") };
        let cases = kernel.cases.len();
        let _ =
            writeln!(out, "| {} | {name} | {passed} of {cases}{mark} | {worst:.2} | {tools} |", kernel.op);
    }
}

/// The lowest and highest copy rates that memory-bound timings are limited by, if they differ by more than one percent.
/// Timings come from several runs, and each run measures its own ceilings.
fn copy_range(timings: &[&Timing]) -> Option<String> {
    let limited = timings.iter().filter(|t| t.bound == Bound::Memory && t.limit_ms > 0.0);
    let rates = limited.map(|t| t.gbps * t.ms / t.limit_ms);
    let (low, high) = rates.fold((f64::INFINITY, 0.0), |(low, high), r| (r.min(low), r.max(high)));
    let rate = |gbps| Bound::Memory.rate(gbps, 0.0);
    (high > 1.01 * low).then(|| format!("{} to {}", rate(low), rate(high)))
}

pub(super) fn time(ms: f64) -> String {
    if ms < 1.0 { format!("{:.1} us", ms * 1e3) } else { format!("{ms:.2} ms") }
}

/// The position of an op in the list of ops.
fn rank(op: &str) -> usize {
    ops::PROVABLE.iter().position(|known| known.spec().name == op).unwrap_or(usize::MAX)
}

/// The fastest kernel of each case. Ops are in the order of their list; within one, bf16 comes first and larger cases come
/// later.
pub(super) fn fastest(record: &Record) -> Vec<&Timing> {
    let mut fastest: BTreeMap<[&str; 3], &Timing> = BTreeMap::new();
    for t in &record.timings {
        let best = fastest.entry([&t.op, &t.case, &t.dtype]).or_insert(t);
        if t.ms < best.ms {
            *best = t;
        }
    }
    let mut timings: Vec<&Timing> = fastest.into_values().collect();
    timings.sort_by(|a, b| {
        let key = |t: &Timing| (rank(&t.op), t.dtype != "bf16", t.dtype.clone());
        key(a).cmp(&key(b)).then_with(|| a.limit_ms.total_cmp(&b.limit_ms))
    });
    timings
}

#[cfg(feature = "tests")]
mod tests {
    use super::super::report::tests::{peer, record, timing};
    use super::super::sweep::tests::sweep;
    use super::*;
    use crate::lab::bench::Ceilings;
    use crate::lab::evidence::{Cpu, Machine};

    fn gpu() -> Record {
        Record::new(Machine { device: "GPU 9".into(), ..Machine::default() })
    }

    fn present(kernels: &[(&'static str, &str)]) -> PresentCode {
        PresentCode::of(kernels.iter().map(|(name, hash)| (*name, hash.to_string())).collect())
    }

    #[test]
    fn the_overview_has_a_line_for_every_op_and_a_column_for_every_timed_device() {
        let spec = |name| crate::lab::find(name).unwrap().spec();
        let specs = [spec("rms_norm"), spec("softmax"), spec("cast"), spec("linear")];
        let mut gpu = gpu();
        for (case, dtype, peer_ms) in
            [("n=1", "f32", 1.0), ("n=2", "bf16", 3.0), ("n=3", "bf16", 5.0), ("n=4", "bf16", 4.0)]
        {
            let timing = Timing { ms: 2.0, ..timing("rms_norm", case, dtype, 1.0) };
            gpu.keep_peer(peer(&timing, "torch", peer_ms));
            gpu.keep_peer(peer(&timing, "slow", 99.0));
            gpu.add_timing(timing);
        }
        // A slower kernel of the same case does not count.
        gpu.add_timing(Timing { kernel: "slow".into(), ms: 200.0, ..timing("rms_norm", "n=1", "f32", 1.0) });
        gpu.add_timing(timing("softmax", "n=1", "bf16", 1.0));
        let mut cpu = Record::new(Machine {
            device: "CPU".into(),
            cpu: Some(Cpu { threads: 2, tier: "avx2".into() }),
            ..Machine::default()
        });
        let old = Timing { source_hash: "old".into(), ..timing("cast", "n=1", "bf16", 1.0) };
        cpu.keep_peer(peer(&old, "torch", 3.0));
        cpu.add_timing(Timing { calibration: Some(0.9), ..old });
        let untimed = Record::new(Machine { device: "idle".into(), ..Machine::default() });
        let text = overview_of(&specs, &[cpu, untimed, gpu], &present(&[("k", "h"), ("slow", "h")]));
        let expected = format!(
            "| op | what it computes | GPU 9 | CPU |\n|---|---|---:|---:|\n\
             | `rms_norm` | {} | 1.75x (0.50 to 2.50) | - |\n\
             | `softmax` | {} | no peer | - |\n\
             | `cast` | {} | - | 1.50x †‡ |\n\
             | `linear` | {} | - | - |\n{}",
            specs[0].summary,
            specs[1].summary,
            specs[2].summary,
            specs[3].summary,
            legend("†‡")
        );
        assert_eq!(text, expected);
    }

    #[test]
    fn a_page_shows_every_case_in_order_with_its_kernel() {
        let mut record = gpu();
        record.ceilings = Some(Ceilings::copy(4281.0));
        for (op, case, dtype, limit) in [
            ("layer_norm", "n=1", "f32", 0.5),
            ("rms_norm", "n=9", "f32", 9.0),
            ("rms_norm", "n=2", "bf16", 2.0),
            ("rms_norm", "n=1", "bf16", 0.001),
        ] {
            let timing = timing(op, case, dtype, limit);
            record.keep_peer(peer(&timing, "torch", 3.0 * limit));
            record.add_timing(timing);
        }
        record.add_timing(Timing { kernel: "l".into(), ms: 99.0, ..timing("rms_norm", "n=2", "bf16", 2.0) });
        let text = page_of(&record, &present(&[("k", "h"), ("l", "h")]));
        assert!(text.starts_with("# GPU 9\n\nGenerated from `gpu-9.json` by "), "{text}");
        assert!(text.contains("\n\ncopy 4281 GB/s\n"), "{text}");
        let rows: Vec<&str> = text.lines().filter(|line| line.contains("_norm")).collect();
        assert_eq!(
            rows,
            [
                "| rms_norm | n=1 | bf16 | k | 2.0 us | 100 GB/s | 50 % | torch, 3.0 us | 1.50x |",
                "| rms_norm | n=2 | bf16 | k | 4.00 ms | 100 GB/s | 50 % | torch, 6.00 ms | 1.50x |",
                "| rms_norm | n=9 | f32 | k | 18.00 ms | 100 GB/s | 50 % | torch, 27.00 ms | 1.50x |",
                "| layer_norm | n=1 | f32 | k | 1.00 ms | 100 GB/s | 50 % | torch, 1.50 ms | 1.50x |",
            ]
        );
        assert!(!text.contains("## Checks") && !text.contains('†'), "{text}");
        assert_eq!(page_name(&record), "gpu-9.md");
    }

    #[test]
    fn sweeps_have_a_line_for_each_family_on_the_page_and_in_the_overview() {
        let mut record = gpu();
        record.add_sweeps(vec![sweep("norms", "f32", 1.5), sweep("norms", "16-bit", 9.0)]);
        record.add_sweeps(vec![sweep("norms", "16-bit", 1.25), sweep("linear", "16-bit", 1.1)]);
        record.add_timing(timing("rms_norm", "n=1", "bf16", 1.0));
        let (now, changed) = (present(&[("k", "h")]), present(&[("k", "new")]));
        let text = page_of(&record, &now);
        let rows: Vec<&str> = text.lines().filter(|line| line.contains("| 1, 7 |")).collect();
        assert_eq!(
            rows,
            [
                "| linear | 16-bit | 8 and 1 without a peer | 1.10x (worst 0.50x, 25 % below 1) | op n=1 bf16 | 1, 7 |",
                "| norms | 16-bit | 8 and 1 without a peer | 1.25x (worst 0.50x, 25 % below 1) | op n=1 bf16 | 1, 7 |",
                "| norms | f32 | 8 and 1 without a peer | 1.50x (worst 0.50x, 25 % below 1) | op n=1 bf16 | 1, 7 |",
            ]
        );
        assert!(page_of(&record, &changed).contains("below 1) † |"));
        let text = overview_of(&[], &[record], &now);
        assert!(
            text.contains("| family | types | GPU 9 |\n|---|---|---:|\n| linear | 16-bit | 1.10x"),
            "{text}"
        );
    }

    #[test]
    fn what_was_measured_on_earlier_code_or_under_other_ceilings_is_marked() {
        let mut record = gpu();
        record.ceilings = Some(Ceilings::copy(100.0));
        record.add_timing(timing("rms_norm", "n=1", "bf16", 1.0));
        // 100 GB/s that were 80 % of the ceiling then.
        let changed = Timing { kernel: "l".into(), ms: 1.25, ..timing("layer_norm", "n=1", "bf16", 1.0) };
        record.add_timing(changed);
        let text = page_of(&record, &present(&[("k", "h"), ("l", "new")]));
        assert!(text.contains("| 2.00 ms | 100 GB/s | 50 % |"), "{text}");
        assert!(text.contains("| 1.25 ms † | 100 GB/s | 80 % |"), "{text}");
        assert!(text.ends_with(&format!("|\n{}", legend("†"))), "{text}");
        assert!(
            text.contains("in the latest run; each row is limited by its own run's, copy 125 GB/s to 200")
        );
    }

    #[test]
    fn checks_are_listed_with_their_sanitizer_runs() {
        let mut record = record("a", "1", true);
        record.add_sanitizer("a", "1", "memcheck", true);
        let row = |code: &str| {
            let text = page_of(&record, &present(&[("a", code)]));
            text.lines().find(|line| line.starts_with("| rms_norm ")).unwrap().to_string()
        };
        assert_eq!(row("1"), "| rms_norm | a | 1 of 1 | 0.50 | memcheck clean |");
        assert_eq!(row("2"), "| rms_norm | a | 1 of 1 † | 0.50 | memcheck clean |");
    }
}
