//! `warpsmith evidence --report`: everything on record as one page that loads nothing from elsewhere.

mod plot;

use crate::table;
use serde_json::json;
use std::collections::BTreeMap;
use std::fmt::Write;
use warpsmith::lab::bench::Cache;
use warpsmith::lab::evidence::{PresentCode, Record, Timing};

const STYLE: &str = include_str!("report/style.css");
const SCRIPT: &str = include_str!("report/script.js");

/// The page.
pub fn page(records: &[Record], present: &PresentCode) -> String {
    let timed = |record: &&Record| !record.timings.is_empty() || !record.kernels.is_empty();
    let mut records: Vec<&Record> = records.iter().filter(timed).collect();
    records.sort_by_key(|record| !record.machine.is_gpu());
    let mut out = String::from(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <link rel=\"icon\" href=\"data:,\">\n<title>Warpsmith: evidence</title>\n",
    );
    let _ = write!(
        out,
        "<style>\n{STYLE}</style>\n</head>\n<body>\n<a class=\"skip\" href=\"#main\">To the content</a>\n"
    );
    out += "<header>\n<h1>Warpsmith: what was proven and measured</h1>\n\
            <p>Speed-ups are over the fastest other library on the same case; above 1 is ours. Errors are the largest of \
            an element over what is allowed; up to 1 passes. A dagger (†) marks an earlier version of a kernel, a double \
            dagger (‡) a run on a machine that was not as fast as before.</p>\n<nav aria-label=\"Devices\"><ul>\n";
    for (at, record) in records.iter().enumerate() {
        let _ = writeln!(out, "<li><a href=\"#device{at}\">{}</a></li>", escape(&record.machine.device));
    }
    out += "</ul></nav>\n<label for=\"filter\">Show only rows with</label>\n<input id=\"filter\" type=\"search\" \
            placeholder=\"attention bf16\">\n<p><button id=\"save\" class=\"plain\" type=\"button\">Save the data as JSON\
            </button></p>\n<p id=\"announce\" class=\"dim\" role=\"status\"></p>\n</header>\n<main id=\"main\">\n";
    for (at, record) in records.iter().enumerate() {
        device(&mut out, at, record, present);
    }
    let _ = write!(
        out,
        "</main>\n<script type=\"application/json\" id=\"data\">{}</script>\n\
         <script>\n{SCRIPT}</script>\n</body>\n</html>\n",
        embedded(&data(&records, present))
    );
    out
}

/// JSON as it may stand in a script: nothing in it ends the script or begins a comment.
fn embedded(value: &serde_json::Value) -> String {
    value.to_string().replace('<', "\\u003c")
}

/// Text as it may stand in HTML.
fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

fn data(records: &[&Record], present: &PresentCode) -> serde_json::Value {
    let timing = |record: &Record, t: &Timing| {
        let peer = record.best_peer(t);
        json!({
            "op": t.op, "case": t.case, "dtype": t.dtype, "kernel": t.kernel, "ms": t.ms, "gbps": t.gbps,
            "tflops": t.tflops, "limit_ms": t.limit_ms, "in_cache": t.l2 == Cache::Warm,
            "peer": peer.map(|peer| &peer.peer), "peer_ms": peer.map(|peer| peer.ms), "present": present.is_of(t),
        })
    };
    let device = |record: &Record| {
        json!({
            "device": record.machine.device,
            "ceilings": record.ceilings,
            "timings": record.timings.iter().map(|t| timing(record, t)).collect::<Vec<_>>(),
        })
    };
    json!({ "devices": records.iter().map(|record| device(record)).collect::<Vec<_>>() })
}

/// A cell: its text, what it is sorted by if that is a number, and its class.
struct Cell {
    text: String,
    number: Option<f64>,
    class: &'static str,
}

fn words(text: impl Into<String>) -> Cell {
    Cell { text: text.into(), number: None, class: "" }
}

fn number(text: String, number: Option<f64>) -> Cell {
    Cell { text, number, class: "number" }
}

/// A speed-up: green above 1, red below 1, and in words for those who do not see it.
fn speed_up(ratio: Option<f64>) -> Cell {
    let class = match ratio {
        Some(ratio) if ratio >= 1.0 => "number win",
        Some(_) => "number loss",
        None => "number",
    };
    Cell { text: ratio.map_or("no peer".into(), |ratio| format!("{ratio:.2}x")), number: ratio, class }
}

/// A table whose headings sort it. Headings with `#` are those of numbers.
fn sortable(out: &mut String, caption: &str, headings: &[&str], rows: &[Vec<Cell>]) {
    let _ = write!(
        out,
        "<div class=\"scroll\" tabindex=\"0\" role=\"region\" aria-label=\"{0}\"><table class=\"sortable\"><caption>{0}\
         </caption>\n<thead><tr>",
        escape(caption)
    );
    for heading in headings {
        let class = if heading.starts_with('#') { " class=\"number\"" } else { "" };
        let text = escape(heading.trim_start_matches('#'));
        let _ = write!(out, "<th scope=\"col\"{class}><button type=\"button\">{text}</button></th>");
    }
    out.push_str("</tr></thead>\n<tbody>\n");
    for row in rows {
        out.push_str("<tr>");
        for (at, cell) in row.iter().enumerate() {
            let sorted = match (cell.class.starts_with("number"), cell.number) {
                (false, _) => String::new(),
                (true, number) => format!(" data-v=\"{}\"", number.map_or(String::new(), |n| n.to_string())),
            };
            let class =
                if cell.class.is_empty() { String::new() } else { format!(" class=\"{}\"", cell.class) };
            let (begin, end) = if at == 0 { ("<th scope=\"row\"", "</th>") } else { ("<td", "</td>") };
            let _ = write!(out, "{begin}{class}{sorted}>{}{end}", escape(&cell.text));
        }
        out.push_str("</tr>\n");
    }
    out.push_str("</tbody></table></div>\n");
}

fn device(out: &mut String, at: usize, record: &Record, present: &PresentCode) {
    let name = &record.machine.device;
    let _ = writeln!(
        out,
        "<section id=\"device{at}\" aria-labelledby=\"name{at}\">\n<h2 id=\"name{at}\">{}</h2>",
        escape(name)
    );
    if let Some(ceilings) = &record.ceilings {
        let _ = writeln!(out, "<p class=\"dim\">Measured limits: {}.</p>", escape(&ceilings.to_string()));
    }
    if !record.timings.is_empty() {
        out.push_str("<h3>Roofline</h3>\n");
        plot::roofline(out, record);
        out.push_str("<h3>Ops</h3>\n");
    }
    ops(out, record, present);
    timings(out, record, present);
    kernels(out, record, present);
    out.push_str("</section>\n");
}

/// An op a row: the speed-up over the fastest peer and the largest error.
fn ops(out: &mut String, record: &Record, present: &PresentCode) {
    #[derive(Default)]
    struct Op<'a> {
        ratios: Vec<f64>,
        timings: Vec<&'a Timing>,
        cases: usize,
        failed: usize,
        worst: f64,
    }
    let mut ops: BTreeMap<&str, Op<'_>> = BTreeMap::new();
    for timing in fastest(record) {
        let op = ops.entry(&timing.op).or_default();
        op.timings.push(timing);
        op.ratios.extend(record.best_peer(timing).map(|peer| peer.ms / timing.ms));
    }
    for kernel in record.kernels.values() {
        let op = ops.entry(&kernel.op).or_default();
        op.cases += kernel.cases.len();
        op.failed += kernel.cases.iter().filter(|case| !case.ok).count();
        op.worst = kernel.cases.iter().filter_map(|case| case.worst).fold(op.worst, f64::max);
    }
    let rows: Vec<Vec<Cell>> = ops
        .into_iter()
        .map(|(name, mut op)| {
            op.ratios.sort_by(f64::total_cmp);
            let middle = op.ratios.get(op.ratios.len() / 2).copied();
            let verdict = match (op.cases, op.failed) {
                (0, _) => "not proven".to_string(),
                (cases, 0) => format!("{cases} passed"),
                (cases, failed) => format!("{failed} of {cases} failed"),
            };
            vec![
                words(format!("{name}{}", present.marks(&op.timings))),
                speed_up(middle),
                speed_up(op.ratios.first().copied()),
                speed_up(op.ratios.last().copied()),
                number(op.timings.len().to_string(), Some(op.timings.len() as f64)),
                number(format!("{:.2}", op.worst), Some(op.worst)),
                number(verdict, Some(op.cases as f64 - 1e6 * op.failed as f64)),
            ]
        })
        .collect();
    let headings = ["op", "#speed-up", "#least", "#most", "#timed cases", "#largest error", "#checks"];
    sortable(
        out,
        "Ops: speed-up over the fastest peer, and checks against the f64 reference",
        &headings,
        &rows,
    );
}

/// The fastest kernel of each case.
fn fastest(record: &Record) -> Vec<&Timing> {
    let mut best: BTreeMap<[&str; 3], &Timing> = BTreeMap::new();
    for timing in &record.timings {
        let place = best.entry([&timing.op, &timing.case, &timing.dtype]).or_insert(timing);
        if timing.ms < place.ms {
            *place = timing;
        }
    }
    best.into_values().collect()
}

fn timings(out: &mut String, record: &Record, present: &PresentCode) {
    if record.timings.is_empty() {
        return;
    }
    let row = |t: &Timing| {
        let peer = record.best_peer(t);
        let limit = (t.l2 == Cache::Cold).then_some(100.0 * t.limit_ms / t.ms);
        vec![
            words(&t.op),
            Cell { class: "case", ..words(&t.case) },
            words(&t.dtype),
            words(format!("{}{}", t.kernel, present.marks(&[t]))),
            number(table::time(t.ms), Some(t.ms)),
            number(t.bound.rate(t.gbps, t.tflops), Some(t.limit_ms / t.ms)),
            number(limit.map_or("in cache".into(), |limit| format!("{limit:.0} %")), limit),
            words(peer.map_or(String::from("-"), |peer| format!("{} {}", peer.peer, table::time(peer.ms)))),
            speed_up(peer.map(|peer| peer.ms / t.ms)),
        ]
    };
    let rows: Vec<Vec<Cell>> = record.timings.iter().map(row).collect();
    let headings =
        ["op", "case", "type", "kernel", "#time", "#rate", "#of limit", "fastest peer", "#speed-up"];
    out.push_str("<h3>Times</h3>\n");
    sortable(out, "Times of every kernel on every case", &headings, &rows);
}

fn kernels(out: &mut String, record: &Record, present: &PresentCode) {
    let row = |(name, kernel): (&String, &warpsmith::lab::evidence::KernelRecord)| {
        let passed = kernel.cases.iter().filter(|case| case.ok).count();
        let worst = kernel.cases.iter().filter_map(|case| case.worst).fold(0.0, f64::max);
        let error = kernel.cases.iter().filter_map(|case| case.error).fold(0.0, f64::max);
        let proven =
            present.is(name, &kernel.source_hash) && record.proves(name, &kernel.source_hash).is_ok();
        let tools: Vec<String> =
            kernel.sanitizer.iter().map(|(tool, verdict)| format!("{tool} {verdict}")).collect();
        vec![
            words(name),
            words(&kernel.op),
            number(format!("{passed} of {}", kernel.cases.len()), Some(passed as f64)),
            number(format!("{worst:.2}"), Some(worst)),
            number(format!("{error:.1e}"), Some(error)),
            words(if tools.is_empty() { "-".into() } else { tools.join(", ") }),
            words(if proven { "yes" } else { "no" }),
        ]
    };
    let rows: Vec<Vec<Cell>> = record.kernels.iter().map(row).collect();
    let headings = [
        "kernel",
        "op",
        "#cases passed",
        "#largest error",
        "#relative error",
        "sanitizers",
        "proven as it is now",
    ];
    out.push_str("<h3>Checks</h3>\n");
    sortable(out, "Checks of every kernel", &headings, &rows);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;
    use warpsmith::lab::evidence;

    fn of_the_repository() -> String {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../evidence");
        page(&evidence::load(&folder).unwrap(), &PresentCode::new())
    }

    /// The names of open elements at the end, after checking that each end fits its begin.
    fn balance(html: &str) -> Vec<String> {
        const VOID: [&str; 5] = ["meta", "link", "input", "line", "circle"];
        let (mut open, mut rest): (Vec<String>, &str) = (Vec::new(), html);
        while let Some(at) = rest.find('<') {
            rest = &rest[at + 1..];
            let end = rest.find('>').expect("a tag ends");
            let tag = &rest[..end];
            rest = &rest[end + 1..];
            let name = tag.trim_start_matches('/').split([' ', '\n']).next().unwrap().to_string();
            match tag {
                _ if tag.starts_with('!') || tag.ends_with('/') || VOID.contains(&name.as_str()) => {}
                _ if tag.starts_with('/') => {
                    assert_eq!(open.pop().as_deref(), Some(name.as_str()), "</{name}>")
                }
                _ => {
                    if ["script", "style"].contains(&name.as_str()) {
                        rest = &rest[rest.find(&format!("</{name}>")).expect("it ends")..];
                    }
                    open.push(name);
                }
            }
        }
        open
    }

    #[test]
    fn the_page_is_whole_and_loads_nothing() {
        let html = of_the_repository();
        assert_eq!(balance(&html), Vec::<String>::new());
        for outside in ["http://", "https://", "src=", "@import", "url("] {
            let found = html.find(outside).map(|at| &html[at.saturating_sub(60)..(at + 60).min(html.len())]);
            assert_eq!(found, None, "{outside}");
        }
        assert_eq!(html.matches("<svg").count(), html.matches("</svg>").count());
        assert!(html.matches("<circle").count() > 300);
        for target in html.split("href=\"#").skip(1).map(|part| part.split('"').next().unwrap()) {
            assert!(html.contains(&format!("id=\"{target}\"")), "#{target}");
        }
    }

    #[test]
    fn the_data_in_it_is_that_of_the_records() {
        let html = of_the_repository();
        let text = html.split("id=\"data\">").nth(1).unwrap().split("</script>").next().unwrap();
        let data: serde_json::Value = serde_json::from_str(text).unwrap();
        let devices = data["devices"].as_array().unwrap();
        assert_eq!((devices.len(), devices[0]["device"].as_str()), (2, Some("NVIDIA H200")));
        let rows: usize = devices.iter().map(|device| device["timings"].as_array().unwrap().len()).sum();
        let table = html.matches("<td class=\"case\">").count();
        assert_eq!(rows, table);
    }

    #[test]
    fn nothing_in_the_data_ends_the_script() {
        let text = embedded(&json!({ "case": "</script><!-- x" }));
        assert!(!text.contains('<'), "{text}");
        assert_eq!(serde_json::from_str::<serde_json::Value>(&text).unwrap()["case"], "</script><!-- x");
        assert_eq!(escape("<a & \"b\">"), "&lt;a &amp; &quot;b&quot;&gt;");
    }
}
