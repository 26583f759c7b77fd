//! Tables and numbers for people.

use comfy_table::{CellAlignment, ContentArrangement, LineStyle, Table, TableStyle};

/// One line under the headings, nothing else: reads well, and survives being pasted.
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

/// Milliseconds in the unit that reads best.
pub fn time(ms: f64) -> String {
    match ms {
        ms if ms < 1.0 => format!("{:.2} us", ms * 1e3),
        ms if ms < 1e3 => format!("{ms:.3} ms"),
        ms => format!("{:.2} s", ms / 1e3),
    }
}

/// A share of one as a percentage.
pub fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_choose_their_unit() {
        assert_eq!([0.0034, 2.0, 12345.0].map(time), ["3.40 us", "2.000 ms", "12.35 s"]);
        assert_eq!(percent(0.1234), "12.3 %");
    }
}
