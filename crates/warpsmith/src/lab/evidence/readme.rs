//! What the README shows of the evidence, and the files that are made from it.

use super::tables::{self, fastest, speed_up, time, timed};
use super::{PresentCode, Record, Timing, legend, picture};
use crate::error::{Error, Result};
use crate::ops;
use std::fmt::Write;
use std::path::Path;

/// Ops that share a line in the README, together with their gradients.
const FAMILIES: [&[&str]; 10] = [
    &["rms_norm", "layer_norm", "softmax"],
    &["cross_entropy", "linear_cross_entropy", "kl_div"],
    &["rope", "qk_norm_rope"],
    &["activation", "add_gelu", "mul_add", "gated_act", "cast", "copy"],
    &["embedding", "argmax", "sample", "penalize"],
    &["linear", "linear_quant"],
    &["moe_route", "moe_losses", "moe_ffn", "grouped_linear"],
    &["attention"],
    &["paged_attention", "merge_states"],
    &["kv_store", "qkv_store", "kv_copy", "prefix_match"],
];

/// The case of `attention` that is among the results.
const ATTENTION: &str =
    "batch=1 q_len=16384 kv_len=16384 num_heads=16 num_kv_heads=16 head_dim=128 causal=true";

/// The README with its generated parts made anew from the evidence in `folder`; only those that it has markers for.
///
/// # Errors
/// If the results of whole models cannot be read.
pub fn readme(document: &str, folder: &Path, records: &[Record]) -> Result<String> {
    let present = PresentCode::new();
    let text = embed(document, "evidence", || Ok(families(&FAMILIES, records, &present)))?;
    embed(&text, "results", || results(folder, records, &present))
}

/// The files of the evidence folder that are made from the records: their names and contents.
pub fn pages(records: &[Record]) -> Vec<(String, String)> {
    let head = "# Evidence\n\n\
        Generated from the records of this folder by `warpsmith evidence --update-readme`; do not edit. The pages of the \
        devices have every case, [models](models) has whole models, and [random.md](random.md) the random calls. \
        [measuring.md](../docs/measuring.md) explains how everything is measured.\n\n\
        Speed-up over the fastest peer: the median over all timed cases, and their range.\n\n";
    let index = head.to_string() + &tables::overview(records);
    let mut pages =
        vec![("README.md".to_string(), index), ("speedup.svg".to_string(), picture::draw(records))];
    pages.extend(records.iter().map(|record| (tables::page_name(record), tables::page(record))));
    pages
}

/// A document with the text between the markers of this name replaced, if it has them.
fn embed(document: &str, name: &str, text: impl FnOnce() -> Result<String>) -> Result<String> {
    let (begin, end) = (format!("<!-- {name}:begin -->"), format!("<!-- {name}:end -->"));
    let parts = document.split_once(&begin).and_then(|(head, rest)| Some((head, rest.split_once(&end)?.1)));
    match parts {
        Some((head, tail)) => Ok(format!("{head}{begin}\n{}\n{end}{tail}", text()?.trim_end())),
        None => Ok(document.into()),
    }
}

/// The speed-ups of families of ops; those of ops in none of them share a last line.
fn families(families: &[&[&str]], records: &[Record], present: &PresentCode) -> String {
    let timed = timed(records);
    let mut out = String::from("| ops |");
    for record in &timed {
        let _ = write!(out, " {} |", record.machine.device);
    }
    let _ = writeln!(out, "\n|---|{}", "---:|".repeat(timed.len()));
    let forward = |op: &str| op.strip_suffix("_backward").unwrap_or(op).to_string();
    let names = ops::PROVABLE.iter().map(|op| op.spec().name).filter(|name| forward(name) == *name);
    let others: Vec<&str> = names.filter(|name| !families.iter().any(|ops| ops.contains(name))).collect();
    for family in families.iter().copied().chain([&others[..]]).filter(|family| !family.is_empty()) {
        let _ = write!(out, "| `{}` |", family.join("`, `"));
        for record in &timed {
            let is_family = |timing: &&Timing| family.contains(&forward(&timing.op).as_str());
            let timings: Vec<&Timing> = fastest(record).into_iter().filter(is_family).collect();
            let _ = write!(out, " {}{} |", speed_up(record, &timings), present.marks(&timings));
        }
        out.push('\n');
    }
    with_legend(out)
}

fn with_legend(table: String) -> String {
    let marks = legend(&table);
    table + &marks
}

/// Three results with the commands that measure them.
fn results(folder: &Path, records: &[Record], present: &PresentCode) -> Result<String> {
    let mut out =
        String::from("| what | Warpsmith | others | speed-up | command |\n|---|---:|---:|---:|---|\n");
    let read = |name: &str| {
        let path = folder.join("models").join(name);
        std::fs::read_to_string(&path).map_err(|e| Error::io(&path, "reading", &e))
    };
    for line in read("llama-cpp.txt")?.lines() {
        let rows = [("pp512: ", "a prompt of 512 tokens"), ("tg128: ", "decoding")];
        let Some((rest, what)) = rows.iter().find_map(|(name, what)| Some((line.strip_prefix(name)?, what)))
        else {
            continue;
        };
        let broken = || Error::parse("models/llama-cpp.txt", "warpsmith N tok/s, llama.cpp N: Nx", line);
        let (ours, rest) = rest.split_once(", ").ok_or_else(broken)?;
        let (theirs, gain) = rest.split_once(": ").ok_or_else(broken)?;
        let ours = ours.strip_prefix("warpsmith ").ok_or_else(broken)?;
        let _ = writeln!(
            out,
            "| SmolLM2-135M Q4_1 on two CPU cores, {what} | {ours} | {theirs} tok/s | {gain} | `bench/llama.py` |"
        );
    }
    let models: serde_json::Value = serde_json::from_str(&read("nvidia-h200.json")?)
        .map_err(|e| Error::parse("models/nvidia-h200.json", "JSON", e.to_string()))?;
    for row in models["rows"].as_array().into_iter().flatten().filter(|row| row["test"] == "tg128") {
        let [ours, theirs] = ["milliseconds", "transformers_ms"].map(|key| row[key].as_f64());
        if let (Some(ours), Some(theirs), Some(name)) = (ours, theirs, row["model"].as_str()) {
            let _ = writeln!(
                out,
                "| {name} in bf16 on an H200, a decode step | {} | transformers {} | {:.2}x | `bench/models.py` |",
                time(ours),
                time(theirs),
                theirs / ours
            );
        }
    }
    for record in timed(records) {
        let of = |t: &&&Timing| (&*t.op, &*t.case, &*t.dtype) == ("attention", ATTENTION, "bf16");
        if let Some(t) = fastest(record).iter().find(of) {
            let peers = [("torch (cudnn)", "cuDNN"), ("flashinfer (fa3)", "FlashAttention-3")];
            let peers = peers.map(|(name, shown)| {
                let peer = record.peers_of(t).find(|peer| peer.peer == name);
                peer.map(|peer| format!("{shown} {}", time(peer.ms)))
            });
            let _ = writeln!(
                out,
                "| causal attention in bf16 on an H200, 16,384 tokens, 16 heads of 128 | {}{} | {} | {} | \
                 `bench/gpu.py attention` |",
                time(t.ms),
                present.marks(&[t]),
                peers.into_iter().flatten().collect::<Vec<_>>().join(", "),
                speed_up(record, &[t]),
            );
        }
    }
    Ok(with_legend(out))
}

#[cfg(feature = "tests")]
mod tests {
    use super::super::report::tests::{peer, timing};
    use super::*;
    use crate::lab::evidence::Machine;

    #[test]
    fn every_op_is_in_one_family() {
        for op in ops::PROVABLE {
            let name = op.spec().name.strip_suffix("_backward").unwrap_or(op.spec().name);
            assert_eq!(FAMILIES.iter().filter(|family| family.contains(&name)).count(), 1, "{name}");
        }
    }

    #[test]
    fn a_family_has_the_cases_of_its_ops_and_their_gradients() {
        let mut record = Record::new(Machine { device: "GPU 9".into(), ..Machine::default() });
        for (op, ms) in [("rms_norm", 2.0), ("rms_norm_backward", 4.0), ("layer_norm", 1.0), ("softmax", 9.0)]
        {
            let timing = Timing { ms, ..timing(op, "n=1", "bf16", 1.0) };
            record.keep_peer(peer(&timing, "torch", 4.0));
            record.add_timing(timing);
        }
        let present = PresentCode::of([("k", "h".to_string())].into());
        let text = families(&[&["rms_norm", "layer_norm"]], &[record], &present);
        assert!(text.starts_with("| ops | GPU 9 |\n|---|---:|\n"), "{text}");
        assert!(text.contains("\n| `rms_norm`, `layer_norm` | 2.00x (1.00 to 4.00) |\n"), "{text}");
        let last = text.lines().last().unwrap();
        assert!(last.starts_with("| `softmax`, `rope`, ") && last.ends_with(" | 0.44x |"), "{text}");
    }

    #[test]
    fn only_the_text_between_the_markers_is_replaced() {
        let document = "head\n<!-- a:begin -->\nold\n<!-- a:end -->\ntail\n";
        let put = |document: &str, name| embed(document, name, || Ok("new\n".into())).unwrap();
        let updated = put(document, "a");
        assert_eq!(updated, document.replace("old", "new"));
        assert_eq!(put(&updated, "a"), updated);
        assert_eq!(put(document, "b"), document);
    }
}
