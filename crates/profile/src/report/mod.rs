//! A profile as a page: one file that loads nothing from elsewhere.
//!
//! The page is complete without its script, which sorts tables and draws the timeline. What the script needs is in the
//! page as JSON, in an element that browsers do not run.

mod bar;
mod roofline;
mod tables;
mod timeline;

use crate::model::{Phase, Profile};
use crate::summary::Summary;
use crate::{Result, text, write};
use std::path::Path;

const STYLE: &str = include_str!("style.css");
const SCRIPT: &str = include_str!("script.js");

/// Writes the page. Returns its bytes.
///
/// # Errors
/// If the file cannot be written.
pub fn save(profile: &Profile, path: &Path) -> Result<usize> {
    let page = html(profile);
    write(path, page.as_bytes())?;
    Ok(page.len())
}

/// The page.
pub fn html(profile: &Profile) -> String {
    let about = &profile.about;
    let summaries: Vec<Summary> = profile.phases.iter().map(Summary::of).collect();
    let title = escape(&about.title);
    let mut body =
        format!("<header><h1>{title}</h1>\n<p>{}</p></header>\n<main>\n", intro(profile, &summaries));
    body += &roofline::figure(profile, &summaries);
    for (number, (phase, summary)) in profile.phases.iter().zip(&summaries).enumerate() {
        body += &section(number, phase, summary);
    }
    body += &machine(profile);
    body += "</main>\n";
    let data = in_script(&timeline::data(profile).to_string());
    format!(
        r#"<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>Profile: {title}</title>
<style>
{STYLE}</style>
</head>
<body>
{body}<script type="application/json" id="data">{data}</script>
<script>
{SCRIPT}</script>
</body>
</html>
"#
    )
}

/// JSON that cannot end the element it stands in.
fn in_script(json: &str) -> String {
    json.replace("</", "<\\/").replace("<!--", "<\\u0021--")
}

/// Text for HTML, and for attributes in double quotes.
fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out += "&amp;",
            '<' => out += "&lt;",
            '>' => out += "&gt;",
            '"' => out += "&quot;",
            '\'' => out += "&#39;",
            c => out.push(c),
        }
    }
    out
}

/// What matters most, in a sentence for each phase.
fn intro(profile: &Profile, summaries: &[Summary]) -> String {
    let of = |(phase, summary): (&Phase, &Summary)| {
        let name = escape(&phase.name);
        let (time, idle) = match &phase.step {
            Some(step) => (
                format!("{} a step", text::time(step.untraced_ns)),
                summary.idle_ns / summary.wall_ns.max(1.0),
            ),
            None => (text::time(summary.wall_ns), summary.idle_ns / summary.wall_ns.max(1.0)),
        };
        let win = summary.most_to_win().map_or(String::new(), |row| {
            format!(
                "; most to win: <code>{}</code>, {:.0} % of the time of the kernels",
                escape(&row.kernel),
                100.0 * row.to_win
            )
        });
        format!("<strong>{name}</strong>: {time}, {:.1} % of it idle{win}.", 100.0 * idle)
    };
    profile.phases.iter().zip(summaries).map(of).collect::<Vec<_>>().join(" ")
}

fn section(number: usize, phase: &Phase, summary: &Summary) -> String {
    let mut out = format!("<section id=\"phase-{number}\">\n<h2>{}</h2>\n", escape(&phase.name));
    out += &tables::facts(phase, summary);
    out += &bar::figure(phase, summary);
    out += &timeline::figure(number, phase);
    out += &tables::kernels(phase, summary);
    out += &tables::forms(summary);
    out += &tables::spans("Layers", &summary.layers);
    out += &tables::spans("Host and named spans", &summary.spans);
    out += &tables::memory(phase);
    out + "</section>\n"
}

fn machine(profile: &Profile) -> String {
    let about = &profile.about;
    let mut rows: Vec<(String, String)> = about.machine.clone();
    rows.push(("measured limits".into(), text::ceilings(&about.ceilings).replace("limits: ", "")));
    rows.push(("program".into(), about.program.clone()));
    let mut out = String::from("<section>\n<h2>Machine and command</h2>\n<dl class=\"facts\">\n");
    for (name, value) in rows {
        out += &format!("<div><dt>{}</dt><dd>{}</dd></div>\n", escape(&name), escape(&value));
    }
    out + &format!("</dl>\n<pre tabindex=\"0\"><code>{}</code></pre>\n</section>\n", escape(&about.command))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::{overlapping, sample};

    #[test]
    fn the_page_is_whole_and_nothing_in_it_becomes_markup() {
        let page = html(&sample());
        assert!(!page.contains("<script>window.hacked"), "a name became a script");
        assert!(page.contains("&lt;/script&gt;&lt;script&gt;window.hacked"));
        // One element for the data and one for the script: no name in the data can end either.
        assert_eq!(page.matches("</script>").count(), 2);
        let links = ["http://", "https://", "src=", "@import", "url("];
        for link in links {
            let at = page.match_indices(link).map(|(at, _)| &page[at..(at + 60).min(page.len())]);
            // The name of SVG's language is no address that is loaded.
            let at: Vec<&str> = at.filter(|text| !text.starts_with("http://www.w3.org/2000/svg")).collect();
            assert!(at.is_empty(), "{at:?}");
        }
        for id in ["phase-0", "phase-1", "timeline-0", "roofline"] {
            assert_eq!(page.matches(&format!("id=\"{id}\"")).count(), 1, "{id}");
        }
        assert!(page.contains("a b.html"), "the command is not there");
        assert!(html(&overlapping()).contains("sample_kernel"));
        assert!(html(&Profile::default()).contains("</html>"));
    }

    #[test]
    fn data_cannot_end_its_element() {
        let json = in_script(r#"{"a":"</script><!-- <b>"}"#);
        assert!(!json.contains("</") && !json.contains("<!--"), "{json}");
        let back: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert_eq!(back["a"], "</script><!-- <b>");
    }
}
