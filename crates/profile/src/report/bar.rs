//! Where the time of a phase went, as a bar.

use super::escape;
use crate::model::Phase;
use crate::summary::Summary;
use crate::text::time;

/// Kernels that have a piece of their own.
const PIECES: usize = 8;
const WIDTH: f64 = 1000.0;
const HEIGHT: f64 = 36.0;

/// The bar and its legend.
pub fn figure(phase: &Phase, summary: &Summary) -> String {
    let wall = summary.wall_ns.max(1.0);
    // Kernels that overlap share the time that one of them took.
    let all: f64 = summary.kernels.iter().map(|row| row.time_ns).sum();
    let busy = summary.busy_ns / all.max(1.0);
    let mut pieces: Vec<(String, String, f64)> = Vec::new();
    for (place, row) in summary.kernels.iter().take(PIECES).enumerate() {
        pieces.push((format!("c{place}"), row.kernel.clone(), row.time_ns * busy));
    }
    let rest: f64 = summary.kernels.iter().skip(PIECES).map(|row| row.time_ns * busy).sum();
    if rest > 0.0 {
        let others = summary.kernels.len() - PIECES;
        pieces.push(("other".into(), format!("{others} others"), rest));
    }
    pieces.push(("idle".into(), "idle: the host between kernels".into(), summary.idle_ns));
    let label = format!("Where the time of {} went", phase.name);
    let mut svg = format!(
        "<svg class=\"bar\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{}\" preserveAspectRatio=\"none\">\n",
        escape(&label)
    );
    let mut legend = String::from("<ul class=\"legend\">\n");
    let mut at = 0.0;
    for (class, name, ns) in &pieces {
        let width = WIDTH * ns / wall;
        let told = format!("{}: {}, {:.1} %", escape(name), time(*ns), 100.0 * ns / wall);
        svg += &format!(
            "<rect class=\"{class}\" x=\"{at:.2}\" y=\"0\" width=\"{width:.2}\" height=\"{HEIGHT}\">\
            <title>{told}</title></rect>\n"
        );
        legend += &format!("<li><span class=\"swatch {class}\" aria-hidden=\"true\"></span>{told}</li>\n");
        at += width;
    }
    format!(
        "<h3>Where the time went</h3>\n<figure>\n{svg}</svg>\n<figcaption>{legend}</ul></figcaption>\n</figure>\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::{overlapping, sample};

    #[test]
    fn the_pieces_fill_the_bar() {
        for profile in [sample(), overlapping()] {
            for phase in &profile.phases {
                let figure = figure(phase, &Summary::of(phase));
                let widths = figure.split(" width=\"").skip(1).filter_map(|rest| rest.split('"').next());
                let sum: f64 = widths.map(|width| width.parse::<f64>().unwrap()).sum();
                assert!((sum - WIDTH).abs() < 0.1, "{sum} in {figure}");
            }
        }
    }
}
