//! The roofline plot: a dot for every timed case, under the limits that were measured.

use super::{escape, fastest};
use std::fmt::Write;
use warpsmith::lab::bench::{Cache, Ceilings};
use warpsmith::lab::evidence::Record;

const WIDTH: f64 = 900.0;
const HEIGHT: f64 = 420.0;
const LEFT: f64 = 60.0;
const RIGHT: f64 = 800.0;
const TOP: f64 = 15.0;
const BOTTOM: f64 = 370.0;

/// A logarithmic axis from a power of ten to another.
struct Axis {
    low: f64,
    high: f64,
    begin: f64,
    end: f64,
}

impl Axis {
    fn over(values: impl Iterator<Item = f64>, begin: f64, end: f64) -> Axis {
        let (low, high) = values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| {
            (low.min(value.log10()), high.max(value.log10()))
        });
        let (low, high) = (low.floor(), high.ceil());
        Axis { low, high: if high > low { high } else { low + 1.0 }, begin, end }
    }

    fn at(&self, value: f64) -> f64 {
        let part = (value.log10() - self.low) / (self.high - self.low);
        self.begin + part.clamp(0.0, 1.0) * (self.end - self.begin)
    }

    fn powers(&self) -> impl Iterator<Item = f64> + use<> {
        (self.low as i32..=self.high as i32).map(|power| 10f64.powi(power))
    }
}

/// The limits of products, by their names.
fn roofs(ceilings: &Ceilings) -> Vec<(&'static str, f64)> {
    let all = [
        ("f32", ceilings.f32_tflops),
        ("TF32", ceilings.tf32_tflops),
        ("16-bit", ceilings.half_tflops),
        ("fp8", ceilings.fp8_tflops),
    ];
    all.into_iter().filter_map(|(name, rate)| Some((name, rate?))).collect()
}

/// Writes the plot: operations for each byte to the right, TFLOP/s up.
pub fn roofline(out: &mut String, record: &Record) {
    let Some(ceilings) = &record.ceilings else { return };
    let timings = fastest(record);
    // An op without operations has no place here.
    let dots: Vec<_> = timings.iter().filter(|t| t.tflops > 0.0 && t.gbps > 0.0).collect();
    if dots.is_empty() {
        return;
    }
    let intensity = |tflops: f64, gbps: f64| 1e3 * tflops / gbps;
    let roofs = roofs(ceilings);
    let rates = dots.iter().map(|t| t.tflops).chain(roofs.iter().map(|roof| roof.1));
    let x = Axis::over(dots.iter().map(|t| intensity(t.tflops, t.gbps)), LEFT, RIGHT);
    let y = Axis::over(rates, BOTTOM, TOP);
    let title = format!("Roofline of {}: {} timed cases", record.machine.device, dots.len());
    let _ = writeln!(
        out,
        "<div class=\"scroll\" tabindex=\"0\" role=\"region\" aria-label=\"{0}\"><svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
         style=\"min-width:36rem\" role=\"img\" aria-label=\"{0}. The table of times has the same figures.\">",
        escape(&title)
    );
    for power in x.powers() {
        let at = x.at(power);
        let _ = writeln!(
            out,
            "<line class=\"axis\" x1=\"{at:.1}\" y1=\"{TOP}\" x2=\"{at:.1}\" y2=\"{BOTTOM}\"/>\
             <text x=\"{at:.1}\" y=\"388\" text-anchor=\"middle\">{power}</text>"
        );
    }
    for power in y.powers() {
        let at = y.at(power);
        let _ = writeln!(
            out,
            "<line class=\"axis\" x1=\"{LEFT}\" y1=\"{at:.1}\" x2=\"{RIGHT}\" y2=\"{at:.1}\"/>\
             <text x=\"52\" y=\"{:.1}\" text-anchor=\"end\">{power}</text>",
            at + 4.0
        );
    }
    let _ = writeln!(
        out,
        "<text x=\"430\" y=\"410\" text-anchor=\"middle\">operations for each byte (up: TFLOP/s; hollow: in cache)</text>"
    );
    roof_lines(out, ceilings.copy_gbps, &roofs, &x, &y);
    for t in dots {
        let class = if t.l2 == Cache::Warm { " class=\"cache\"" } else { "" };
        let _ = writeln!(
            out,
            "<circle{class} cx=\"{:.1}\" cy=\"{:.1}\" r=\"3.5\"><title>{}</title></circle>",
            x.at(intensity(t.tflops, t.gbps)),
            y.at(t.tflops),
            escape(&format!(
                "{} {} {}: {:.0} % of the limit",
                t.op,
                t.case,
                t.dtype,
                100.0 * t.limit_ms / t.ms
            ))
        );
    }
    out.push_str("</svg></div>\n");
}

/// The slope of the copy up to the highest roof, and the roofs.
fn roof_lines(out: &mut String, copy_gbps: f64, roofs: &[(&str, f64)], x: &Axis, y: &Axis) {
    let copied = |tflops: f64| 1e3 * tflops / copy_gbps;
    let highest = roofs.iter().map(|roof| roof.1).fold(0.0, f64::max);
    let (first, last) = (10f64.powf(x.low), copied(highest).min(10f64.powf(x.high)));
    let points: Vec<String> = (0..=40)
        .map(|step| first * (last / first).powf(f64::from(step) / 40.0))
        .filter(|&at| at * copy_gbps * 1e-3 >= 10f64.powf(y.low))
        .map(|at| format!("{:.1},{:.1}", x.at(at), y.at(at * copy_gbps * 1e-3)))
        .collect();
    let _ = writeln!(out, "<path class=\"roof\" d=\"M{}\"/>", points.join("L"));
    for (name, rate) in roofs {
        let (from, at) = (x.at(copied(*rate)), y.at(*rate));
        let _ = writeln!(
            out,
            "<line class=\"roof\" x1=\"{from:.1}\" y1=\"{at:.1}\" x2=\"{RIGHT}\" y2=\"{at:.1}\"/>\
             <text x=\"{:.0}\" y=\"{:.1}\">{name} {rate:.0}</text>",
            RIGHT + 6.0,
            at + 4.0
        );
    }
}
