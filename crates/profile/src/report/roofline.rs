//! The roofline: operations per second over operations per byte, both in powers of ten, with what the machine can do.

use super::escape;
use crate::model::{Bound, Profile};
use crate::summary::{FormRow, Summary};
use crate::text::{amount, time};
use std::fmt::Write;

const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 460.0;
const LEFT: f64 = 76.0;
const RIGHT: f64 = 14.0;
const TOP: f64 = 16.0;
const BOTTOM: f64 = 52.0;
/// The area of the dot of a kernel that took all of the time.
const AREA: f64 = 2400.0;
const SMALLEST_RADIUS: f64 = 2.5;

/// Both axes, in powers of ten.
struct Axes {
    x: [i32; 2],
    y: [i32; 2],
}

impl Axes {
    /// Around all points and where the lines meet.
    fn around(points: &[(f64, f64)]) -> Axes {
        let range = |values: &mut dyn Iterator<Item = f64>| {
            let (mut least, mut most) = (f64::INFINITY, f64::NEG_INFINITY);
            for value in values.filter(|value| *value > 0.0 && value.is_finite()) {
                (least, most) = (least.min(value.log10()), most.max(value.log10()));
            }
            match least <= most {
                true => [least.floor() as i32, (most.ceil() as i32).max(least.floor() as i32 + 1)],
                false => [-1, 1],
            }
        };
        Axes { x: range(&mut points.iter().map(|(x, _)| *x)), y: range(&mut points.iter().map(|(_, y)| *y)) }
    }

    fn x(&self, value: f64) -> f64 {
        let part = (value.log10() - f64::from(self.x[0])) / f64::from(self.x[1] - self.x[0]);
        LEFT + part.clamp(0.0, 1.0) * (WIDTH - LEFT - RIGHT)
    }

    fn y(&self, value: f64) -> f64 {
        let part = (value.log10() - f64::from(self.y[0])) / f64::from(self.y[1] - self.y[0]);
        HEIGHT - BOTTOM - part.clamp(0.0, 1.0) * (HEIGHT - TOP - BOTTOM)
    }

    /// The values at the ends.
    fn x_ends(&self) -> [f64; 2] {
        self.x.map(|power| 10f64.powi(power))
    }

    fn y_ends(&self) -> [f64; 2] {
        self.y.map(|power| 10f64.powi(power))
    }
}

/// A dot: a form of a phase.
struct Dot<'a> {
    phase: usize,
    form: &'a FormRow,
    /// Operations per byte.
    intensity: f64,
    /// Operations per second.
    rate: f64,
}

/// The figure; nothing if nothing could be placed in it.
pub fn figure(profile: &Profile, summaries: &[Summary]) -> String {
    let ceilings = &profile.about.ceilings;
    let all = || {
        let phases = summaries.iter().enumerate();
        phases.flat_map(|(phase, summary)| summary.forms.iter().map(move |form| (phase, form)))
    };
    let computes = |form: &FormRow| form.row.flops > 0.0 && form.row.bytes > 0.0;
    let intensity = |form: &FormRow| form.row.flops / form.row.bytes;
    let least = all().filter(|(_, form)| computes(form)).map(|(_, form)| intensity(form)).fold(0.1, f64::min);
    // What only moves bytes is placed at the left end, at the same distance from the diagonal as it is from the limit.
    let left = 10f64.powf(least.log10().floor());
    let dots: Vec<Dot<'_>> = all()
        .filter(|(_, form)| form.row.bytes > 0.0 && form.row.time_ns > 0.0)
        .map(|(phase, form)| {
            let intensity = if computes(form) { intensity(form) } else { left };
            Dot { phase, form, intensity, rate: intensity * form.row.bytes / form.row.time_ns * 1e9 }
        })
        .collect();
    if dots.is_empty() || ceilings.copy_gbps <= 0.0 {
        return String::new();
    }
    let mut points: Vec<(f64, f64)> = dots.iter().map(|dot| (dot.intensity, dot.rate)).collect();
    for (_, tflops) in &ceilings.products {
        points.push((tflops * 1e3 / ceilings.copy_gbps * 2.0, tflops * 1e12));
    }
    points.push((left, left * ceilings.copy_gbps * 1e9));
    let axes = Axes::around(&points);
    let mut svg = format!(
        "<svg id=\"roofline\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
        role=\"img\" aria-labelledby=\"roofline-title\">\n<title \
        id=\"roofline-title\">Roofline: operations per second over operations per byte, one dot for each kernel and shape</title>\n"
    );
    grid(&mut svg, &axes);
    limits(&mut svg, &axes, profile);
    // Large dots first, so that small ones are not hidden.
    let mut order: Vec<&Dot<'_>> = dots.iter().collect();
    order.sort_by(|a, b| b.form.row.share.total_cmp(&a.form.row.share));
    for dot in order {
        draw(&mut svg, &axes, dot, profile);
    }
    let legend: String = profile
        .phases
        .iter()
        .enumerate()
        .map(|(number, phase)| {
            format!(
                "<li><span class=\"swatch p{}\" aria-hidden=\"true\"></span>{}</li>",
                number % 4,
                escape(&phase.name)
            )
        })
        .collect();
    format!(
        "<section>\n<h2>Roofline</h2>\n<figure>\n<div class=\"scroll\" tabindex=\"0\" \
        role=\"region\" aria-label=\"Roofline\">{svg}</svg></div>\n<figcaption><ul class=\"legend\">{legend}</ul>\
         A dot is a kernel with arguments of one shape; its area is its share of the time. Hollow: its tensors fit into the caches. \
         At the left end are those that only move bytes.</figcaption>\n</figure>\n</section>\n"
    )
}

fn grid(svg: &mut String, axes: &Axes) {
    let (bottom, right) = (HEIGHT - BOTTOM, WIDTH - RIGHT);
    for power in axes.x[0]..=axes.x[1] {
        let x = axes.x(10f64.powi(power));
        let _ = writeln!(
            svg,
            "<line class=\"grid\" x1=\"{x:.1}\" y1=\"{TOP}\" x2=\"{x:.1}\" y2=\"{bottom}\"/><text x=\"{x:.1}\" \
            y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
            bottom + 18.0,
            plain(power)
        );
    }
    for power in axes.y[0]..=axes.y[1] {
        let y = axes.y(10f64.powi(power));
        let _ = writeln!(
            svg,
            "<line class=\"grid\" x1=\"{LEFT}\" y1=\"{y:.1}\" x2=\"{right}\" y2=\"{y:.1}\"/><text x=\"{:.1}\" \
            y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            LEFT - 6.0,
            y + 4.0,
            plain(power)
        );
    }
    let _ = writeln!(
        svg,
        "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">operations per byte</text>\n<text \
        transform=\"translate(14 {:.1}) rotate(-90)\" text-anchor=\"middle\">operations per second</text>",
        (LEFT + right) / 2.0,
        HEIGHT - 10.0,
        (TOP + bottom) / 2.0
    );
}

/// A power of ten in short: 0.01, 1, 100 G.
fn plain(power: i32) -> String {
    if power < 0 {
        return format!("{:.*}", power.unsigned_abs() as usize, 10f64.powi(power));
    }
    let prefix = ["", " k", " M", " G", " T", " P", " E"].get(power as usize / 3).unwrap_or(&" ?");
    format!("{}{prefix}", 10u32.pow(power as u32 % 3))
}

/// Diagonals for moving bytes, flats for multiplying.
fn limits(svg: &mut String, axes: &Axes, profile: &Profile) {
    let ceilings = &profile.about.ceilings;
    let highest = ceilings.products.iter().map(|(_, tflops)| tflops * 1e12).fold(0.0, f64::max);
    let highest = if highest > 0.0 { highest } else { axes.y_ends()[1] };
    let diagonals = [("copy", Some(ceilings.copy_gbps), 0.0), ("read", ceilings.read_gbps, 20.0)];
    for (name, gbps, lower) in diagonals {
        let Some(gbps) = gbps.filter(|gbps| *gbps > 0.0) else { continue };
        let rate = gbps * 1e9;
        let [x0, x1] = axes.x_ends();
        let start = x0.max(axes.y_ends()[0] / rate);
        let end = x1.min(highest / rate);
        if start >= end {
            continue;
        }
        // Named in the corner that is empty: above the diagonals.
        let (key, line) = (LEFT + 14.0, TOP + 22.0 + lower);
        let _ = writeln!(
            svg,
            "<line class=\"limit {name}\" x1=\"{:.1}\" y1=\"{:.1}\" x2=\"{:.1}\" y2=\"{:.1}\"/>\
             <line class=\"limit {name}\" x1=\"{key}\" y1=\"{line}\" x2=\"{}\" y2=\"{line}\"/>\
             <text class=\"limit\" x=\"{}\" y=\"{}\">{name} {gbps:.1} GB/s</text>",
            axes.x(start),
            axes.y(start * rate),
            axes.x(end),
            axes.y(end * rate),
            key + 30.0,
            key + 38.0,
            line + 4.5
        );
    }
    // Types that are multiplied equally fast have one line.
    let mut flats: Vec<(String, f64)> = Vec::new();
    for (name, tflops) in ceilings.products.iter().filter(|(_, tflops)| *tflops > 0.0) {
        match flats.iter_mut().find(|(_, other)| (other / tflops - 1.0).abs() < 0.02) {
            Some((names, _)) => *names = format!("{names}, {name}"),
            None => flats.push((name.clone(), *tflops)),
        }
    }
    let fastest = ceilings.read_gbps.unwrap_or(0.0).max(ceilings.copy_gbps) * 1e9;
    flats.sort_by(|a, b| a.1.total_cmp(&b.1));
    let mut above = f64::INFINITY;
    for (names, tflops) in flats {
        let rate = tflops * 1e12;
        let y = axes.y(rate);
        // Not over the name of the line below.
        let name = (y - 5.0).min(above - 16.0);
        above = name;
        let _ = writeln!(
            svg,
            "<line class=\"limit flat\" x1=\"{:.1}\" y1=\"{y:.1}\" x2=\"{:.1}\" y2=\"{y:.1}\"/><text class=\"limit\" \
            x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{} {}</text>",
            axes.x(rate / fastest),
            WIDTH - RIGHT,
            WIDTH - RIGHT - 4.0,
            name,
            escape(&names),
            amount(rate, "FLOP/s")
        );
    }
}

fn draw(svg: &mut String, axes: &Axes, dot: &Dot<'_>, profile: &Profile) {
    let FormRow { row, args, in_cache, bound, products, .. } = dot.form;
    let radius = (AREA * row.share / std::f64::consts::PI).sqrt().max(SMALLEST_RADIUS);
    let hollow = if *in_cache { " hollow" } else { "" };
    let limit = match (row.of_limit(), bound, products) {
        (Some(part), Bound::Products, Some(products)) => {
            format!("{:.0} % of products of {products}", 100.0 * part)
        }
        (Some(part), ..) => format!("{:.0} % of moving its bytes", 100.0 * part),
        (None, ..) => "limit unknown".into(),
    };
    let told = format!(
        "{} {}\n{}: {} calls, {}, {:.1} % of the kernels' time\n{limit}",
        row.kernel,
        args,
        profile.phases[dot.phase].name,
        row.launches,
        time(row.time_ns),
        100.0 * row.share
    );
    let _ = writeln!(
        svg,
        "<circle class=\"dot p{}{hollow}\" cx=\"{:.1}\" cy=\"{:.1}\" r=\"{radius:.1}\"><title>{}</title></circle>",
        dot.phase % 4,
        axes.x(dot.intensity),
        axes.y(dot.rate),
        escape(&told)
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::sample;

    #[test]
    fn every_form_is_a_dot_whose_area_is_its_share() {
        let profile = sample();
        let summaries: Vec<Summary> = profile.phases.iter().map(Summary::of).collect();
        let figure = figure(&profile, &summaries);
        assert_eq!(figure.matches("<circle").count(), 6);
        assert_eq!(figure.matches(" hollow").count(), 2);
        assert!(figure.contains("copy 20.0 GB/s") && figure.contains("read 25.0 GB/s"));
        assert!(figure.contains("f32 100 GFLOP/s") && figure.contains("bf16 200 GFLOP/s"));
        let radius = |kernel: &str| -> f64 {
            let at = figure.find(&format!("<title>{kernel}")).unwrap();
            let tag = &figure[figure[..at].rfind("<circle").unwrap()..at];
            tag.split(" r=\"").nth(1).unwrap().split('"').next().unwrap().parse().unwrap()
        };
        let share = summaries[0].forms[0].row.share;
        let area = radius("linear_avx2").powi(2) * std::f64::consts::PI;
        assert!((area / AREA - share).abs() < 0.02, "{area} for {share}");
        assert!(radius("copy_avx2") >= SMALLEST_RADIUS);
    }

    #[test]
    fn a_profile_without_limits_or_kernels_has_no_plot() {
        assert_eq!(figure(&Profile::default(), &[]), "");
        let mut profile = sample();
        profile.about.ceilings.copy_gbps = 0.0;
        let summaries: Vec<Summary> = profile.phases.iter().map(Summary::of).collect();
        assert_eq!(figure(&profile, &summaries), "");
    }

    #[test]
    fn points_are_inside_of_the_axes() {
        let axes = Axes::around(&[(0.05, 3e9), (700.0, 2e12)]);
        assert_eq!((axes.x, axes.y), ([-2, 3], [9, 13]));
        assert_eq!(axes.x(0.01), LEFT);
        assert_eq!(axes.x(1e3), WIDTH - RIGHT);
        assert_eq!(axes.y(1e9), HEIGHT - BOTTOM);
        assert!((axes.y(1e13) - TOP).abs() < 1e-9);
        assert_eq!(plain(-2), "0.01");
        assert_eq!([0, 1, 3, 11, 12].map(plain), ["1", "10", "1 k", "100 G", "1 T"]);
    }
}
