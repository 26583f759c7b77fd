//! A profile for a terminal, in 80 columns.

use crate::memory::peaks;
use crate::model::{Ceilings, Phase, Profile, Work};
use crate::summary::{Row, Summary, Threads};

/// The most characters of a line.
pub const WIDTH: usize = 80;
/// Rows of a table, before the rest is summed up.
const ROWS: usize = 12;

/// The whole report.
pub fn report(profile: &Profile) -> String {
    let mut text = String::new();
    let mut line = |line: String| {
        for line in wrap(&line, WIDTH) {
            text += &line;
            text.push('\n');
        }
    };
    line(profile.about.title.clone());
    let machine: Vec<String> =
        profile.about.machine.iter().map(|(name, value)| format!("{name}: {value}")).collect();
    line(machine.join(", "));
    line(ceilings(&profile.about.ceilings));
    for phase in &profile.phases {
        line(String::new());
        phase_lines(phase).into_iter().for_each(&mut line);
    }
    text
}

/// The measured limits in one line.
pub fn ceilings(ceilings: &Ceilings) -> String {
    if ceilings.copy_gbps <= 0.0 {
        return "limits were not measured".into();
    }
    let read = ceilings.read_gbps.map(|read| format!(", read {read:.1}")).unwrap_or_default();
    // Types that are multiplied equally fast are named together.
    let mut rates: Vec<(String, String)> = Vec::new();
    for (name, rate) in ceilings.products.iter().map(|(name, rate)| (name, digits(*rate))) {
        match rates.iter_mut().find(|(_, other)| *other == rate) {
            Some((names, _)) => *names = format!("{names}, {name}"),
            None => rates.push((name.clone(), rate)),
        }
    }
    let rates: Vec<String> = rates.iter().map(|(names, rate)| format!("{rate} ({names})")).collect();
    let products =
        if rates.is_empty() { String::new() } else { format!("; products {} TFLOP/s", rates.join(", ")) };
    format!("limits: copy {:.1}{read} GB/s{products}", ceilings.copy_gbps)
}

fn phase_lines(phase: &Phase) -> Vec<String> {
    let summary = Summary::of(phase);
    let mut lines = Vec::new();
    match &phase.step {
        Some(step) => {
            lines.push(format!(
                "{}: {} of {} untraced",
                phase.name,
                plural(step.count, "step"),
                time(step.untraced_ns)
            ));
            let more = 100.0 * (step.traced_ns / step.untraced_ns.max(1.0) - 1.0);
            lines.push(format!(
                "  a step while traced: {} ({more:+.1} %), of which {} busy + {} idle",
                time(step.traced_ns),
                time(summary.busy_ns / step.count.max(1) as f64),
                time(summary.idle_ns / step.count.max(1) as f64)
            ));
        }
        None => lines.push(format!(
            "{}: {}, of which {} busy + {} idle",
            phase.name,
            time(summary.wall_ns),
            time(summary.busy_ns),
            time(summary.idle_ns)
        )),
    }
    if let Some(threads) = &summary.threads {
        lines.push(format!("  {}", thread_words(threads)));
    }
    if summary.backward_ns > 0.0 {
        let all: f64 = summary.kernels.iter().map(|row| row.time_ns).sum();
        lines.push(format!(
            "  forward {} + backward {}",
            time(all - summary.backward_ns),
            time(summary.backward_ns)
        ));
    }
    if !summary.layers.is_empty() {
        lines.push(layers(&summary));
    }
    for peak in peaks(phase) {
        let device = peak.device.map_or("host".into(), |device| format!("cuda:{device}"));
        let holders: Vec<String> = peak
            .holders
            .iter()
            .take(2)
            .map(|held| format!("{} {}", amount(held.bytes as f64, "B"), held.place))
            .collect();
        lines.push(format!(
            "  memory allocated meanwhile on {device}: at most {} ({})",
            amount(peak.bytes as f64, "B"),
            holders.join("; ")
        ));
    }
    if !phase.work.is_empty() {
        lines.push(format!("  times of kernels by {}", phase.clock.words()));
        lines.extend(transfers(&phase.work));
    }
    lines.extend(table(&summary));
    if let Some(row) = summary.most_to_win().filter(|row| row.to_win >= 0.005) {
        lines.push(format!(
            "  most to win: {}, {:.0} % of the kernels' time if it ran at its limit",
            row.kernel,
            100.0 * row.to_win
        ));
    }
    lines.extend(phase.notes.iter().map(|note| format!("  note: {note}")));
    lines
}

fn thread_words(threads: &Threads) -> String {
    let all = (threads.work_ns + threads.waiting_ns + threads.undivided_ns).max(1.0);
    let percent = |part: f64| 100.0 * part / all;
    format!(
        "{} threads: {:.1} % work, {:.1} % waiting in loops, {:.1} % nothing to divide",
        threads.count,
        percent(threads.work_ns),
        percent(threads.waiting_ns),
        percent(threads.undivided_ns)
    )
}

fn layers(summary: &Summary) -> String {
    let each = |row: &crate::summary::SpanRow| row.time_ns / row.count.max(1) as f64;
    let numbered: Vec<f64> =
        summary.layers.iter().filter(|row| row.name.starts_with("layer ")).map(each).collect();
    let others: Vec<String> = summary
        .layers
        .iter()
        .filter(|row| !row.name.starts_with("layer "))
        .map(|row| format!("{} {}", row.name, time(each(row))))
        .collect();
    let least = numbered.iter().copied().fold(f64::INFINITY, f64::min);
    let most = numbered.iter().copied().fold(0.0, f64::max);
    let mut words = Vec::new();
    if !numbered.is_empty() {
        words.push(format!("{} of {} to {}", plural(numbered.len(), "layer"), time(least), time(most)));
    }
    words.extend(others);
    format!("  each step: {}", words.join(", "))
}

/// Copies between the host and a GPU.
fn transfers(work: &[Work]) -> Option<String> {
    let copies: Vec<&Work> = work.iter().filter(|work| work.name.starts_with("copy ")).collect();
    let time_of = |copies: &[&Work]| copies.iter().map(|copy| (copy.end - copy.start) as f64).sum::<f64>();
    (!copies.is_empty())
        .then(|| format!("  {}, {}", plural(copies.len(), "transfer"), time(time_of(&copies))))
}

/// The table of kernels.
fn table(summary: &Summary) -> Vec<String> {
    let heading = format!(
        "  {:<28}{:>10}{:>8}{:>7}{:>9}{:>8}{:>8}",
        "kernel", "time", "share", "calls", "bytes", "ops", "limit"
    );
    let rule = format!("  {}", "─".repeat(heading.chars().count() - 2));
    let mut lines = vec![heading, rule];
    lines.extend(summary.kernels.iter().take(ROWS).map(row));
    if let Some(rest) = summary.kernels.get(ROWS..).filter(|rest| !rest.is_empty()) {
        let sum = |of: fn(&Row) -> f64| rest.iter().map(of).sum::<f64>();
        lines.push(row(&Row {
            kernel: format!("{} others", rest.len()),
            time_ns: sum(|row| row.time_ns),
            share: sum(|row| row.share),
            launches: rest.iter().map(|row| row.launches).sum(),
            bytes: sum(|row| row.bytes),
            flops: sum(|row| row.flops),
            ..Row::default()
        }));
    }
    lines
}

fn row(row: &Row) -> String {
    let limit = row.of_limit().map_or("-".into(), |part| format!("{:.0} %", 100.0 * part));
    let known = |value: f64, unit| if value > 0.0 { amount(value, unit) } else { "-".into() };
    format!(
        "  {:<28}{:>10}{:>6.1} %{:>7}{:>9}{:>8}{:>8}",
        cut(&row.kernel, 27),
        time(row.time_ns),
        100.0 * row.share,
        row.launches,
        known(row.bytes, "B"),
        known(row.flops, ""),
        limit
    )
}

fn cut(text: &str, most: usize) -> String {
    match text.chars().count() > most {
        true => text.chars().take(most - 1).chain(['…']).collect(),
        false => text.into(),
    }
}

fn plural(count: usize, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

/// Nanoseconds in the unit that reads best.
pub fn time(ns: f64) -> String {
    match ns {
        ns if ns < 1e3 => format!("{ns:.0} ns"),
        ns if ns < 1e6 => format!("{:.1} us", ns / 1e3),
        ns if ns < 1e9 => format!("{:.2} ms", ns / 1e6),
        ns => format!("{:.2} s", ns / 1e9),
    }
}

/// A number with a decimal prefix.
pub fn amount(value: f64, unit: &str) -> String {
    let prefixes = ["", "k", "M", "G", "T", "P", "E"];
    let (mut scaled, mut index) = (value, 0);
    while scaled >= 999.5 && index + 1 < prefixes.len() {
        scaled /= 1000.0;
        index += 1;
    }
    let places = if index == 0 || scaled >= 99.95 { 0 } else { 1 };
    format!("{scaled:.places$} {}{unit}", prefixes[index]).trim_end().into()
}

/// Three digits.
fn digits(value: f64) -> String {
    match value {
        100.0.. => format!("{value:.0}"),
        10.0.. => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

/// Breaks a line at its spaces where it is too long; what follows is indented as the line is, and two more.
fn wrap(line: &str, width: usize) -> Vec<String> {
    if line.chars().count() <= width {
        return vec![line.to_owned()];
    }
    let indent = line.chars().take_while(|c| *c == ' ').count();
    let mut lines = vec![" ".repeat(indent)];
    for word in line.split_whitespace() {
        let mut word: Vec<char> = word.chars().collect();
        loop {
            let last = lines.last_mut().expect("there is a line");
            let used = last.chars().count();
            let is_empty = last.trim().is_empty();
            let space = usize::from(!is_empty);
            if used + space + word.len() <= width {
                last.push_str(&" ".repeat(space));
                last.extend(word);
                break;
            }
            if is_empty {
                let rest = word.split_off(width - used);
                last.extend(word);
                word = rest;
            }
            lines.push(" ".repeat(indent + 2));
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::{overlapping, sample};

    #[test]
    fn the_report_fits_eighty_columns_and_says_what_was_measured() {
        let mut profile = sample();
        profile.phases[0].notes.push("a note that goes on and on ".repeat(9));
        profile.phases[0].forms[0].kernel = "a_kernel_whose_name_is_far_longer_than_its_column".into();
        for profile in [&profile, &overlapping()] {
            let text = report(profile);
            let longest = text.lines().map(|line| line.chars().count()).max().unwrap();
            assert!(longest <= WIDTH, "{longest} columns in\n{text}");
        }
        let text = report(&profile);
        for part in [
            "limits: copy 20.0, read 25.0 GB/s; products 0.10 (f32), 0.20 (bf16) TFLOP/s",
            "decode: 4 steps of",
            "(+2.0 %)",
            "2 threads:",
            "% waiting in loops",
            "3 layers of 107.5 us to 107.5 us",
            "linear_avx2",
            "60 %",
            "most to win: linear_avx2",
            "memory allocated meanwhile on host: at most 16.4 kB",
        ] {
            assert!(text.contains(part), "no {part:?} in\n{text}");
        }
        let gpu = report(&overlapping());
        assert!(gpu.contains("CUPTI") && gpu.contains("sample_kernel"), "{gpu}");
        assert!(gpu.contains("10.0 us busy + 10.0 us idle"), "the union of overlapping kernels:\n{gpu}");
    }

    #[test]
    fn numbers_are_short() {
        assert_eq!([12.4, 1500.0, 2.5e6, 3e9].map(time), ["12 ns", "1.5 us", "2.50 ms", "3.00 s"]);
        assert_eq!(
            [0.0, 999.0, 999.6, 123_456.0, 1.5e9].map(|x| amount(x, "B")),
            ["0 B", "999 B", "1.0 kB", "123 kB", "1.5 GB"]
        );
        assert_eq!(cut("abcdef", 6), "abcdef");
        assert_eq!(cut("abcdefg", 6), "abcde…");
    }

    #[test]
    fn long_words_are_cut_and_every_line_fits() {
        let lines = wrap(&format!("  start {} end", "x".repeat(200)), 30);
        assert!(lines.iter().all(|line| line.chars().count() <= 30), "{lines:?}");
        assert_eq!(lines.concat().matches('x').count(), 200);
    }
}
