//! The tables of the page. Each cell has the number that it is sorted by.

use super::escape;
use crate::memory::peaks;
use crate::model::{Bound, Phase};
use crate::summary::{Row, SpanRow, Summary};
use crate::text::{amount, time};

/// A cell: what it shows, and the number it is sorted by, if it is one.
type Cell = (String, Option<f64>);

fn words(text: &str) -> Cell {
    (text.into(), None)
}

fn number(text: String, value: f64) -> Cell {
    (text, Some(value))
}

/// A table that can be sorted. `name` is its heading, columns have a name and whether they hold numbers.
fn table(id: &str, name: &str, columns: &[(&str, bool)], rows: &[Vec<Cell>]) -> String {
    if rows.is_empty() {
        return String::new();
    }
    let mut out = format!(
        "<h3>{}</h3>\n<div class=\"scroll\" tabindex=\"0\" role=\"region\" aria-label=\"{}\">\n<table \
        class=\"sortable\" data-table=\"{id}\">\n<thead><tr>",
        escape(name),
        escape(name)
    );
    for (column, is_number) in columns {
        let class = if *is_number { " class=\"number\"" } else { "" };
        out += &format!("<th scope=\"col\"{class}><button type=\"button\">{}</button></th>", escape(column));
    }
    out += "</tr></thead>\n<tbody>\n";
    for row in rows {
        out += "<tr>";
        for (text, value) in row {
            match value {
                Some(value) => {
                    out += &format!("<td class=\"number\" data-value=\"{value}\">{}</td>", escape(text))
                }
                None => out += &format!("<td>{}</td>", escape(text)),
            }
        }
        out += "</tr>\n";
    }
    out + "</tbody>\n</table>\n</div>\n"
}

fn percent(part: f64) -> Cell {
    number(format!("{:.1} %", 100.0 * part), part)
}

fn maybe_percent(part: Option<f64>) -> Cell {
    part.map_or(number("–".into(), -1.0), percent)
}

fn known(value: f64, unit: &str) -> Cell {
    number(if value > 0.0 { amount(value, unit) } else { "–".into() }, value)
}

/// The numbers of a row that all tables have.
fn numbers(row: &Row) -> Vec<Cell> {
    vec![
        number(time(row.time_ns), row.time_ns),
        percent(row.share),
        number(row.launches.to_string(), row.launches as f64),
        number(time(row.time_ns / row.launches.max(1) as f64), row.time_ns / row.launches.max(1) as f64),
        known(row.bytes, "B"),
        known(row.flops, ""),
        maybe_percent(row.of_limit()),
        percent(row.to_win),
    ]
}

const NUMBERS: [(&str, bool); 8] = [
    ("time", true),
    ("share", true),
    ("calls", true),
    ("each", true),
    ("bytes", true),
    ("operations", true),
    ("of limit", true),
    ("to win", true),
];

/// By kernel.
pub fn kernels(phase: &Phase, summary: &Summary) -> String {
    let on_gpu = summary.kernels.iter().any(|row| row.registers > 0);
    let mut columns = vec![("kernel", false), ("op", false)];
    columns.extend(NUMBERS);
    if summary.threads.is_some() {
        columns.push(("threads used", true));
    }
    if on_gpu {
        columns.extend([("registers", true), ("shared memory", true)]);
    }
    let row = |row: &Row| {
        let mut cells = vec![words(&row.kernel), words(&row.op)];
        cells.extend(numbers(row));
        if summary.threads.is_some() {
            cells.push(maybe_percent(row.threads_used));
        }
        if on_gpu {
            cells.push(known(row.registers.into(), ""));
            cells.push(known(row.shared_bytes.into(), "B"));
        }
        cells
    };
    let rows: Vec<Vec<Cell>> = summary.kernels.iter().map(row).collect();
    let table = table("kernels", "Kernels", &columns, &rows);
    let by =
        if phase.work.is_empty() { String::new() } else { format!(" Times by {}.", phase.clock.words()) };
    format!(
        "{table}<p class=\"note\">“To win” is the part of the kernels' time that would be saved if the kernel ran at its limit.{by}</p>\n"
    )
}

/// By form.
pub fn forms(summary: &Summary) -> String {
    let mut columns = vec![("kernel", false), ("arguments", false)];
    columns.extend(NUMBERS);
    columns.push(("limited by", false));
    let rows: Vec<Vec<Cell>> = summary
        .forms
        .iter()
        .map(|form| {
            let mut cells = vec![words(&form.row.kernel), words(&form.args)];
            cells.extend(numbers(&form.row));
            let by = match (form.bound, &form.products, form.in_cache) {
                _ if form.row.limit_ns.is_none() => "operations of an unmeasured rate".into(),
                (Bound::Products, Some(products), _) => format!("products of {products}"),
                (_, _, true) => "moving bytes in the caches".into(),
                _ => "moving bytes".into(),
            };
            cells.push(words(&by));
            cells
        })
        .collect();
    table("forms", "Kernels by arguments", &columns, &rows)
}

/// Spans of a kind.
pub fn spans(name: &str, rows: &[SpanRow]) -> String {
    let columns = [("span", false), ("times", true), ("time", true), ("each", true), ("of the phase", true)];
    let rows: Vec<Vec<Cell>> = rows
        .iter()
        .map(|row| {
            let each = row.time_ns / row.count.max(1) as f64;
            vec![
                words(&row.name),
                number(row.count.to_string(), row.count as f64),
                number(time(row.time_ns), row.time_ns),
                number(time(each), each),
                percent(row.share),
            ]
        })
        .collect();
    table("spans", name, &columns, &rows)
}

/// What held memory when it was most.
pub fn memory(phase: &Phase) -> String {
    let mut out = String::new();
    for peak in peaks(phase) {
        let device = peak.device.map_or("the host".into(), |device| format!("cuda:{device}"));
        let name = format!(
            "Memory allocated on {device}: at most {}, {} allocations",
            amount(peak.bytes as f64, "B"),
            peak.allocations
        );
        let rows: Vec<Vec<Cell>> = peak
            .holders
            .iter()
            .map(|held| {
                vec![
                    words(&held.place),
                    number(held.count.to_string(), held.count as f64),
                    number(amount(held.bytes as f64, "B"), held.bytes as f64),
                ]
            })
            .collect();
        out += &table("memory", &name, &[("allocated in", false), ("tensors", true), ("bytes", true)], &rows);
    }
    out
}

/// The times of the phase as a list.
pub fn facts(phase: &Phase, summary: &Summary) -> String {
    let mut facts: Vec<(&str, String)> = Vec::new();
    if let Some(step) = &phase.step {
        let more = 100.0 * (step.traced_ns / step.untraced_ns.max(1.0) - 1.0);
        facts.push(("steps", step.count.to_string()));
        facts
            .push(("a step, untraced", format!("{} (median of {} runs)", time(step.untraced_ns), step.runs)));
        facts.push(("a step, traced", format!("{} ({more:+.1} %)", time(step.traced_ns))));
    }
    facts.push(("traced", time(summary.wall_ns)));
    facts.push((
        "busy",
        format!("{} ({:.1} %)", time(summary.busy_ns), 100.0 * summary.busy_ns / summary.wall_ns.max(1.0)),
    ));
    facts.push((
        "idle",
        format!("{} ({:.1} %)", time(summary.idle_ns), 100.0 * summary.idle_ns / summary.wall_ns.max(1.0)),
    ));
    if summary.backward_ns > 0.0 {
        facts.push(("backward", time(summary.backward_ns)));
    }
    if let Some(threads) = &summary.threads {
        let words =
            format!("{:.1} % of the time of {} while kernels ran", 100.0 * threads.used(), threads.count);
        facts.push(("threads used", words));
    }
    let mut out = String::from("<dl class=\"facts\">\n");
    for (name, value) in facts {
        out += &format!("<div><dt>{name}</dt><dd>{}</dd></div>\n", escape(&value));
    }
    out += "</dl>\n";
    for note in &phase.notes {
        out += &format!("<p class=\"note\">{}</p>\n", escape(note));
    }
    out
}
