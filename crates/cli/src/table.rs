//! Tables and numbers as text that fits the terminal.

use std::fmt;
use std::sync::LazyLock;

/// The columns that text may take: those of the terminal, 80 elsewhere.
pub fn width() -> usize {
    static WIDTH: LazyLock<usize> = LazyLock::new(|| {
        let size = terminal_size::terminal_size_of(std::io::stdout());
        size.map_or(80, |(width, _)| usize::from(width.0).max(40))
    });
    *WIDTH
}

/// Spaces between two columns.
const GAP: usize = 2;

/// A table with a line under its headings. Rows that are too long for one line take two or more: the texts in the first,
/// the numbers below.
pub struct Table {
    headings: Vec<String>,
    /// The columns from this one on are numbers, aligned to the right.
    numbers: usize,
    rows: Vec<Vec<String>>,
}

/// A table with these headings; columns from `numbers` on are aligned to the right.
pub fn new(headings: &[String], numbers: usize) -> Table {
    Table { headings: headings.to_vec(), numbers, rows: Vec::new() }
}

impl Table {
    /// Adds a row: a cell for each heading.
    pub fn add_row(&mut self, row: impl Into<Vec<String>>) {
        self.rows.push(row.into());
    }

    fn lines(&self, width: usize) -> Vec<String> {
        let all = || std::iter::once(&self.headings).chain(&self.rows);
        let widths: Vec<usize> =
            (0..self.headings.len()).map(|at| all().map(|row| chars(&row[at])).max().unwrap_or(0)).collect();
        let total = widths.iter().sum::<usize>() + GAP * widths.len().saturating_sub(1);
        let line = |row: &[String], columns: &[usize]| {
            let cells = columns.iter().map(|&at| match at < self.numbers {
                true => format!("{:<1$}", row[at], widths[at]),
                false => format!("{:>1$}", row[at], widths[at]),
            });
            cells.collect::<Vec<_>>().join(&" ".repeat(GAP)).trim_end().to_string()
        };
        let columns: Vec<usize> = (0..widths.len()).collect();
        let row_lines = |row: &Vec<String>| -> Vec<String> {
            if total <= width {
                return vec![line(row, &columns)];
            }
            let texts: Vec<&str> = row[..self.numbers].iter().map(String::as_str).collect();
            let mut lines = wrap(&texts.join(&" ".repeat(GAP)), width, 4);
            for group in groups(&widths, &columns[self.numbers..], width - GAP) {
                lines.push(" ".repeat(GAP) + &line(row, group));
            }
            lines
        };
        let mut lines = row_lines(&self.headings);
        lines.push("─".repeat(total.min(width)));
        lines.extend(self.rows.iter().flat_map(row_lines));
        lines
    }
}

/// As many columns at a time as fit in `width`.
fn groups<'a>(widths: &[usize], mut columns: &'a [usize], width: usize) -> Vec<&'a [usize]> {
    let mut groups = Vec::new();
    while !columns.is_empty() {
        let mut end = 0;
        let fitting = columns.iter().take_while(|&&at| {
            end += widths[at] + GAP;
            end <= width + GAP
        });
        let (group, rest) = columns.split_at(fitting.count().max(1));
        groups.push(group);
        columns = rest;
    }
    groups
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.lines(width()).join("\n"))
    }
}

/// Rows in columns without headings. The last one is broken into lines that fit.
pub fn columns(rows: &[Vec<String>], indent: usize) -> Vec<String> {
    columns_in(rows, indent, width())
}

fn columns_in(rows: &[Vec<String>], indent: usize, width: usize) -> Vec<String> {
    let last = rows.iter().map(Vec::len).max().unwrap_or(1).saturating_sub(1);
    let longest = |at: usize| rows.iter().filter_map(|row| Some(chars(row.get(at)?))).max().unwrap_or(0);
    let widths: Vec<usize> = (0..last).map(longest).collect();
    let mut lines = Vec::new();
    for row in rows {
        let cells = row.iter().zip(&widths).filter(|(_, width)| **width > 0);
        let head: String = cells.map(|(cell, width)| format!("{cell:<width$}{:GAP$}", "")).collect();
        let head = " ".repeat(indent) + &head;
        let text = row.get(last).map_or("", String::as_str);
        lines.extend(hang(&head, text, width, chars(&head)));
    }
    lines
}

/// Text behind what its first line begins with; all others begin with `indent` spaces.
pub fn headed(head: &str, text: &str, indent: usize) -> String {
    hang(head, text, width(), indent).join("\n")
}

/// Text that fits the terminal.
pub fn fit(text: &str, indent: usize) -> String {
    wrap(text, width(), indent).join("\n")
}

/// Breaks text at its spaces into lines of at most `width` characters. All lines but the first begin with `indent`
/// spaces. A word that is too long has a line of its own and stays whole: it can be copied.
pub fn wrap(text: &str, width: usize, indent: usize) -> Vec<String> {
    hang("", text, width, indent)
}

/// The same behind what the first line begins with.
fn hang(head: &str, text: &str, width: usize, indent: usize) -> Vec<String> {
    let mut lines = vec![head.to_string()];
    let (mut used, mut empty) = (chars(head), true);
    for word in text.split(' ') {
        let length = chars(word);
        if !empty && used + 1 + length > width {
            lines.push(" ".repeat(indent));
            (used, empty) = (indent, true);
        }
        let line = lines.last_mut().expect("there is a line");
        if !empty {
            line.push(' ');
            used += 1;
        }
        line.push_str(word);
        (used, empty) = (used + length, false);
    }
    lines.iter().map(|line| line.trim_end().to_string()).collect()
}

fn chars(text: &str) -> usize {
    text.chars().count()
}

/// Milliseconds in the unit that reads best.
pub fn time(ms: f64) -> String {
    match ms {
        ms if ms < 1.0 => format!("{:.2} us", ms * 1e3),
        ms if ms < 1e3 => format!("{ms:.3} ms"),
        ms => format!("{:.2} s", ms / 1e3),
    }
}

/// A fraction as a percentage.
pub fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}

/// A number with a decimal prefix: `268.4 MB`.
pub fn amount(value: f64, unit: &str) -> String {
    let prefixes = ["", "k", "M", "G", "T", "P", "E"];
    let mut scaled = value;
    let mut index = 0;
    while scaled >= 1000.0 && index + 1 < prefixes.len() {
        scaled /= 1000.0;
        index += 1;
    }
    let digits = if index == 0 { 0 } else { 1 };
    format!("{scaled:.digits$} {}{unit}", prefixes[index]).trim_end().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        text.split('|').map(String::from).collect()
    }

    #[test]
    fn lines_are_broken_at_spaces_and_words_stay_whole() {
        assert_eq!(wrap("", 9, 2), [""]);
        assert_eq!(wrap("one two three four", 9, 2), ["one two", "  three", "  four"]);
        assert_eq!(wrap("one two three four", 100, 2), ["one two three four"]);
        assert_eq!(wrap("a 0123456789abcdef b", 6, 1), ["a", " 0123456789abcdef", " b"]);
        assert_eq!(wrap("a  b", 9, 0), ["a  b"]);
    }

    #[test]
    fn tables_take_one_line_for_each_row_where_they_fit_and_more_where_not() {
        let mut table = new(&words("op|case|time|rate"), 2);
        table.add_row(words("linear|m=1 n=2|1.5 us|20"));
        table.add_row(words("copy|all|10 us|3"));
        let lines = table.lines(80);
        assert_eq!(lines[0], "op      case       time  rate");
        assert!(lines[1].chars().all(|c| c == '─') && chars(&lines[1]) == chars(&lines[0]));
        assert_eq!(lines[2..], ["linear  m=1 n=2  1.5 us    20", "copy    all       10 us     3"]);
        let mut lines = table.lines(20);
        assert_eq!(lines.remove(2), "─".repeat(20));
        let head = ["op  case", "    time  rate"];
        let rows = ["linear  m=1 n=2", "  1.5 us    20", "copy  all", "   10 us     3"];
        assert_eq!(lines, [&head[..], &rows].concat());
        assert_eq!(table.lines(12)[8..], ["copy  all", "   10 us", "     3"]);
        assert!(table.lines(12).iter().all(|line| chars(line) <= 12));
    }

    #[test]
    fn the_last_column_is_broken_below_itself() {
        let rows = [words("eps||added to the mean square"), words("x|optional|a row")];
        assert_eq!(
            columns_in(&rows, 2, 30),
            ["  eps            added to the", "                 mean square", "  x    optional  a row"]
        );
    }

    #[test]
    fn times_choose_their_unit() {
        assert_eq!([0.0034, 2.0, 12345.0].map(time), ["3.40 us", "2.000 ms", "12.35 s"]);
        assert_eq!(percent(0.1234), "12.3 %");
    }

    #[test]
    fn amounts_are_short() {
        assert_eq!(amount(0.0, "B"), "0 B");
        assert_eq!(amount(999.0, ""), "999");
        assert_eq!(amount(268_435_456.0, "B"), "268.4 MB");
        assert_eq!(amount(1e30, "B"), "1000000000000.0 EB");
    }
}
