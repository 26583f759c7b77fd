//! The speed-ups of all ops as a picture.

use super::Record;
use super::tables::{fastest, median, speed_ups, timed};
use crate::ops;
use std::fmt::Write;

const WIDTH: f64 = 860.0;
/// Where bars may be: from the lowest speed-up that is shown to the highest, on a logarithmic scale.
const LEFT: f64 = 170.0;
const RIGHT: f64 = 790.0;
const LOWEST: f64 = 0.5;
const HIGHEST: f64 = 32.0;
const TOP: f64 = 62.0;
const BAR: f64 = 9.0;
const GAP: f64 = 7.0;
/// Colours that are readable on white and on black, one for each device.
const COLOURS: [&str; 4] = ["#4c8dff", "#e08a1e", "#2fa36b", "#b267d6"];

fn x(speed_up: f64) -> f64 {
    let place = (speed_up.clamp(LOWEST, HIGHEST) / LOWEST).log2() / (HIGHEST / LOWEST).log2();
    LEFT + place * (RIGHT - LEFT)
}

/// A bar per op and device from 1x to the median, a line over the range of all cases, and the median in digits.
pub(super) fn draw(records: &[Record]) -> String {
    let records = timed(records);
    let rows: Vec<(&str, Vec<Vec<f64>>)> = ops::PROVABLE
        .iter()
        .map(|op| {
            let of_op = |record: &Record| {
                let timings: Vec<_> =
                    fastest(record).into_iter().filter(|t| t.op == op.spec().name).collect();
                speed_ups(record, &timings)
            };
            (op.spec().name, records.iter().map(|record| of_op(record)).collect::<Vec<_>>())
        })
        .filter(|(_, devices)| devices.iter().any(|ratios| !ratios.is_empty()))
        .collect();
    let pitch = BAR * records.len() as f64 + GAP;
    let bottom = TOP + pitch * rows.len() as f64;
    let height = bottom + 12.0;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" height=\"{height}\" \
         font-family=\"system-ui, sans-serif\" font-size=\"11\">\n\
         <title>Speed-up over the fastest peer, by op</title>\n\
         <style>text {{ fill: #57606a }} line {{ stroke: #8b949e }} \
         @media (prefers-color-scheme: dark) {{ text {{ fill: #b1bac4 }} }}</style>\n\
         <text x=\"{LEFT}\" y=\"16\" font-size=\"14\">Speed-up over the fastest peer: median and range of all cases</text>\n"
    );
    for (at, record) in records.iter().enumerate() {
        let (left, colour) = (LEFT + 200.0 * at as f64, COLOURS[at % COLOURS.len()]);
        let _ = writeln!(out, "<rect x=\"{left}\" y=\"25\" width=\"10\" height=\"10\" fill=\"{colour}\"/>");
        let _ = writeln!(out, "<text x=\"{}\" y=\"34\">{}</text>", left + 15.0, record.machine.device);
    }
    for power in -1..=5 {
        let value = 2f64.powi(power);
        let (at, width) = (x(value), if power == 0 { 1.5 } else { 0.4 });
        let _ = writeln!(
            out,
            "<line x1=\"{at:.1}\" y1=\"{TOP}\" x2=\"{at:.1}\" y2=\"{bottom}\" stroke-width=\"{width}\"/>\n\
             <text x=\"{at:.1}\" y=\"54\" text-anchor=\"middle\">{value}x</text>"
        );
    }
    for (row, (name, devices)) in rows.iter().enumerate() {
        let top = TOP + pitch * row as f64 + GAP / 2.0;
        let _ = writeln!(
            out,
            "<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{name}</text>",
            LEFT - 8.0,
            top + (pitch - GAP) / 2.0 + 4.0
        );
        for (at, ratios) in devices.iter().enumerate().filter(|(_, ratios)| !ratios.is_empty()) {
            let (middle, from) = (median(ratios), top + BAR * at as f64);
            let (start, end) = (x(1.0).min(x(middle)), x(1.0).max(x(middle)));
            let (least, most) = (x(ratios[0]), x(ratios[ratios.len() - 1]));
            let (colour, y) = (COLOURS[at % COLOURS.len()], from + BAR / 2.0);
            let _ = writeln!(
                out,
                "<rect x=\"{start:.1}\" y=\"{from:.1}\" width=\"{:.1}\" height=\"{}\" fill=\"{colour}\"/>\n\
                 <line x1=\"{least:.1}\" y1=\"{y:.1}\" x2=\"{most:.1}\" y2=\"{y:.1}\" stroke-width=\"1\"/>\n\
                 <text x=\"{:.1}\" y=\"{:.1}\" font-size=\"9\">{middle:.2}x</text>",
                end - start,
                BAR - 1.0,
                most.max(end) + 4.0,
                y + 3.0
            );
        }
    }
    out + "</svg>\n"
}

#[cfg(feature = "tests")]
mod tests {
    use super::super::Machine;
    use super::super::report::tests::{peer, timing};
    use super::*;

    #[test]
    fn the_picture_has_a_bar_for_each_op_with_a_peer() {
        let mut record = Record::new(Machine { device: "GPU 9".into(), ..Machine::default() });
        for op in ["rms_norm", "softmax"] {
            let timing = timing(op, "n=1", "bf16", 1.0);
            record.keep_peer(peer(&timing, "torch", 3.0));
            record.add_timing(timing);
        }
        let text = draw(&[record]);
        assert_eq!((text.matches("<rect").count(), text.matches("1.50x").count()), (3, 2), "{text}");
        assert!(text.contains(">rms_norm</text>") && !text.contains(">rope<"), "{text}");
        assert_eq!((x(LOWEST), x(HIGHEST), x(99.0)), (LEFT, RIGHT, RIGHT));
    }
}
