//! Tables and numbers as text.

use comfy_table::{CellAlignment, ContentArrangement, LineStyle, Table, TableStyle};

/// Only a line under the headings: easy to read and to paste.
const STYLE: TableStyle = TableStyle::new().header_separator(LineStyle::none().fill('─').junction('─'));

/// A table with these headings; columns from `numbers` on are aligned to the right.
pub fn new(headings: &[String], numbers: usize) -> Table {
    let mut table = Table::new();
    table.load_style(STYLE);
    table.set_content_arrangement(ContentArrangement::Dynamic);
    table.set_header(headings);
    for column in table.column_iter_mut().skip(numbers) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

/// Breaks text at its spaces into lines of at most `width` characters. All lines but the first begin with `indent`
/// spaces. A word that is too long for a line is cut.
pub fn wrap(text: &str, width: usize, indent: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    let mut used = 0;
    for word in text.split(' ') {
        let mut word: Vec<char> = word.chars().collect();
        if used > 0 && used + 1 + word.len() <= width {
            lines.last_mut().expect("there is a line").push(' ');
            used += 1;
        } else if used > 0 {
            lines.push(" ".repeat(indent));
            used = indent;
        }
        while used + word.len() > width {
            let rest = word.split_off(width - used);
            lines.last_mut().expect("there is a line").extend(word);
            lines.push(" ".repeat(indent));
            (word, used) = (rest, indent);
        }
        used += word.len();
        lines.last_mut().expect("there is a line").extend(word);
    }
    lines
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

    #[test]
    fn lines_are_broken_at_spaces_and_never_too_long() {
        assert_eq!(wrap("", 9, 2), [""]);
        assert_eq!(wrap("one two three four", 9, 2), ["one two", "  three", "  four"]);
        assert_eq!(wrap("one two three four", 100, 2), ["one two three four"]);
        assert_eq!(wrap("a 0123456789abcdef b", 6, 1), ["a", " 01234", " 56789", " abcde", " f b"]);
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
