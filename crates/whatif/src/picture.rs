//! Plots as SVG: what changes buy, and how far the model is off. They are readable on light and dark ground.

use crate::change::Comparison;
use std::fmt::Write;

const WIDTH: f64 = 720.0;
const STYLE: &str = "<style>text{fill:#57606a}.dim{fill:#8b949e}line,path{stroke:#8b949e}\
@media(prefers-color-scheme:dark){text{fill:#b1bac4}}</style>";

fn begin(height: f64, title: &str) -> String {
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" height=\"{height}\" \
         role=\"img\" font-family=\"system-ui, sans-serif\" font-size=\"12\">\n<title>{0}</title>\n{STYLE}\n\
         <text x=\"10\" y=\"20\" font-size=\"14\">{0}</text>\n",
        escape(title)
    )
}

/// Text as it may stand in XML.
fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// A bar for each change: its time, as a part of the time now, and around the end of the bar the model's error.
pub fn changes(title: &str, comparison: &Comparison) -> String {
    const LEFT: f64 = 250.0;
    const RIGHT: f64 = 610.0;
    const TOP: f64 = 48.0;
    const PITCH: f64 = 24.0;
    let rows: Vec<(&str, f64, bool)> = std::iter::once(("now", comparison.now_us, true))
        .chain(comparison.outcomes.iter().map(|o| (o.change.as_str(), o.us, o.faster.is_some())))
        .collect();
    let most = rows.iter().map(|row| row.1).fold(0.0, f64::max) * (1.0 + comparison.least_difference);
    let x = |us: f64| LEFT + (RIGHT - LEFT) * us / most;
    let bottom = TOP + PITCH * rows.len() as f64;
    let mut out = begin(bottom + 30.0, title);
    for (at, (name, us, counts)) in rows.iter().enumerate() {
        let top = TOP + PITCH * at as f64;
        let (least, most) =
            (x(us * (1.0 - comparison.least_difference)), x(us * (1.0 + comparison.least_difference)));
        let (colour, middle) = (if *counts { "#4c8dff" } else { "#8b949e" }, top + 8.0);
        let _ = writeln!(
            out,
            "<text x=\"{:.0}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>\n\
             <rect x=\"{LEFT}\" y=\"{top:.1}\" width=\"{:.1}\" height=\"16\" fill=\"{colour}\"/>\n\
             <line x1=\"{least:.1}\" y1=\"{middle:.1}\" x2=\"{most:.1}\" y2=\"{middle:.1}\" stroke-width=\"2\"/>\n\
             <text x=\"{:.1}\" y=\"{:.1}\">{}</text>",
            LEFT - 8.0,
            middle + 4.0,
            escape(name),
            x(*us) - LEFT,
            most + 6.0,
            middle + 4.0,
            time(*us)
        );
    }
    let now = x(comparison.now_us);
    let _ = writeln!(
        out,
        "<line x1=\"{now:.1}\" y1=\"{TOP}\" x2=\"{now:.1}\" y2=\"{bottom}\" stroke-dasharray=\"3 3\"/>\n\
         <text class=\"dim\" x=\"10\" y=\"{:.0}\">lines: the model's median error on rows held back, {:.1} %; grey: no \
         difference beyond it</text>\n</svg>",
        bottom + 18.0,
        100.0 * comparison.least_difference
    );
    out
}

fn time(us: f64) -> String {
    if us < 1000.0 { format!("{us:.2} us") } else { format!("{:.3} ms", us / 1e3) }
}

/// One family of dots: name, and measured and modelled microseconds.
pub type Dots<'a> = (&'a str, Vec<(f64, f64)>);

/// Modelled over measured times of all rows, on logarithmic scales.
pub fn fits(title: &str, families: &[Dots<'_>]) -> String {
    const LEFT: f64 = 60.0;
    const RIGHT: f64 = 470.0;
    const TOP: f64 = 40.0;
    const BOTTOM: f64 = 450.0;
    const COLOURS: [&str; 8] =
        ["#4c8dff", "#e08a1e", "#2fa36b", "#b267d6", "#d64550", "#00a0a8", "#8a7a2c", "#7d828a"];
    let all = families.iter().flat_map(|(_, dots)| dots).flat_map(|(a, b)| [*a, *b]);
    let (least, most) = all.fold((f64::INFINITY, 0.0f64), |(l, m), x| (l.min(x), m.max(x)));
    if most <= 0.0 {
        return begin(60.0, title) + "</svg>\n";
    }
    let (low, high) = (least.log10().floor(), most.log10().ceil());
    let place = |us: f64| (us.log10() - low) / (high - low).max(1.0);
    let x = |us: f64| LEFT + (RIGHT - LEFT) * place(us);
    let y = |us: f64| BOTTOM - (BOTTOM - TOP) * place(us);
    let mut out = begin(500.0, title);
    for power in low as i32..=high as i32 {
        let us = 10f64.powi(power);
        let _ = writeln!(
            out,
            "<line x1=\"{0:.1}\" y1=\"{TOP}\" x2=\"{0:.1}\" y2=\"{BOTTOM}\" stroke-width=\"0.3\"/>\
             <line x1=\"{LEFT}\" y1=\"{1:.1}\" x2=\"{RIGHT}\" y2=\"{1:.1}\" stroke-width=\"0.3\"/>\
             <text x=\"{0:.1}\" y=\"466\" text-anchor=\"middle\">{us}</text>\
             <text x=\"54\" y=\"{2:.1}\" text-anchor=\"end\">{us}</text>",
            x(us),
            y(us),
            y(us) + 4.0
        );
    }
    let _ = writeln!(
        out,
        "<line x1=\"{LEFT}\" y1=\"{BOTTOM}\" x2=\"{RIGHT}\" y2=\"{TOP}\"/>\n\
         <text x=\"265\" y=\"490\" text-anchor=\"middle\">measured, us (up: modelled, us)</text>"
    );
    for (at, (name, dots)) in families.iter().enumerate() {
        let colour = COLOURS[at % COLOURS.len()];
        let hollow = at >= COLOURS.len();
        let fill = if hollow { "none" } else { colour };
        for (measured, modelled) in dots {
            let _ = writeln!(
                out,
                "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"3\" fill=\"{fill}\" stroke=\"{colour}\"/>",
                x(*measured),
                y(*modelled)
            );
        }
        let top = TOP + 18.0 * at as f64;
        let _ = writeln!(
            out,
            "<circle cx=\"490\" cy=\"{:.1}\" r=\"4\" fill=\"{fill}\" stroke=\"{colour}\"/>\
             <text x=\"500\" y=\"{:.1}\">{}</text>",
            top,
            top + 4.0,
            escape(name)
        );
    }
    out + "</svg>\n"
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::change::Outcome;

    #[test]
    fn every_change_has_a_bar_and_text_is_escaped() {
        let outcome = |change: &str, us, faster| Outcome { change: change.into(), us, faster };
        let comparison = Comparison {
            family: "rows".into(),
            now_us: 100.0,
            parts: Vec::new(),
            held_out: Default::default(),
            least_difference: 0.05,
            outcomes: vec![outcome("a <b>", 50.0, Some(2.0)), outcome("L2 2x", 100.0, None)],
        };
        let text = changes("x & y", &comparison);
        assert_eq!((text.matches("<rect").count(), text.matches("#4c8dff").count()), (3, 2), "{text}");
        assert!(text.contains("a &lt;b&gt;") && text.contains("x &amp; y") && text.ends_with("</svg>\n"));
        // Half the time is half as long a bar.
        let widths: Vec<f64> = text
            .split("<rect")
            .skip(1)
            .map(|part| part.split("width=\"").nth(1).unwrap().split('"').next().unwrap().parse().unwrap())
            .collect();
        assert!((widths[0] / widths[1] - 2.0).abs() < 0.01, "{widths:?}");
    }

    #[test]
    fn a_dot_on_the_line_is_a_row_without_error() {
        let text = fits("fit", &[("rows", vec![(10.0, 10.0), (10.0, 100.0)])]);
        let place = |part: &str, name: &str| -> f64 {
            part.split(&format!("{name}=\"")).nth(1).unwrap().split('"').next().unwrap().parse().unwrap()
        };
        let dots: Vec<&str> = text.split("<circle").skip(1).collect();
        assert_eq!(dots.len(), 3);
        assert_eq!(place(dots[0], "cx") - 60.0, 450.0 - place(dots[0], "cy"));
        assert!(place(dots[1], "cy") < place(dots[0], "cy"));
        assert!(fits("empty", &[]).ends_with("</svg>\n"));
    }
}
