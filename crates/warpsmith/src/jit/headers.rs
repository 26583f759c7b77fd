//! The device headers, embedded in the library. A new header is one line in [`HEADERS`].

/// A device header under the name kernels include it by.
#[derive(Debug)]
pub struct Header {
    /// Such as `warpsmith/base.cuh`.
    pub name: &'static str,
    /// Its text.
    pub code: &'static str,
}

macro_rules! headers {
    ($($file:literal),* $(,)?) => {
        &[$(Header {
            name: concat!("warpsmith/", $file),
            code: include_str!(concat!("../../include/warpsmith/", $file)),
        }),*]
    };
}

/// Every header a kernel can include.
pub static HEADERS: &[Header] = headers![
    "access.cuh",
    "async_copy.cuh",
    "attention.cuh",
    "attention_backward.cuh",
    "attention_backward_generic.cuh",
    "attention_backward_mma.cuh",
    "attention_backward_sm90.cuh",
    "attention_backward_sm90_keys.cuh",
    "attention_dropout.cuh",
    "attention_mma.cuh",
    "attention_producer.cuh",
    "attention_sm90.cuh",
    "attention_tiles.cuh",
    "attention_weights.cuh",
    "base.cuh",
    "cross_entropy.cuh",
    "dense.cuh",
    "division.cuh",
    "elementwise.cuh",
    "exchange.cuh",
    "fp8.cuh",
    "group.cuh",
    "grouped_generic.cuh",
    "grouped_linear.cuh",
    "grouped_mma.cuh",
    "grouped_tiles.cuh",
    "grouped_weights.cuh",
    "hash.cuh",
    "kl_div.cuh",
    "kv_cache.cuh",
    "l2.cuh",
    "linear.cuh",
    "linear_activation.cuh",
    "linear_direct.cuh",
    "linear_exchanged.cuh",
    "linear_output.cuh",
    "linear_pairs.cuh",
    "math.cuh",
    "mbarrier.cuh",
    "mma.cuh",
    "moe_losses.cuh",
    "moe_places.cuh",
    "moe_plain.cuh",
    "norm.cuh",
    "paged_attention.cuh",
    "paged_fragments.cuh",
    "paged_pieces.cuh",
    "paged_units.cuh",
    "random.cuh",
    "reduce.cuh",
    "rope.cuh",
    "rows.cuh",
    "shared.cuh",
    "shared_row.cuh",
    "spread.cuh",
    "tma.cuh",
    "unaligned.cuh",
    "vec.cuh",
    "wgmma.cuh", //
];

/// The headers `texts` include, directly or through other headers, sorted by name.
///
/// Preprocessor conditions are not evaluated, so the result may contain more than the compiler reads, never less; the
/// worst case is an unnecessary rebuild. Unknown names are left to the compiler to report.
pub fn included_by(texts: &[&str]) -> Vec<&'static Header> {
    let mut found: Vec<&'static Header> = Vec::new();
    let mut unread: Vec<&str> = texts.to_vec();
    while let Some(text) = unread.pop() {
        for name in text.lines().filter_map(include_name) {
            let Some(header) = HEADERS.iter().find(|header| header.name == name) else { continue };
            if !found.iter().any(|known| known.name == name) {
                found.push(header);
                unread.push(header.code);
            }
        }
    }
    found.sort_by_key(|header| header.name);
    found
}

/// The name in an `#include` line.
fn include_name(line: &str) -> Option<&str> {
    let rest = line.trim_start().strip_prefix('#')?.trim_start().strip_prefix("include")?.trim_start();
    let (open, rest) = rest.split_at_checked(1)?;
    let close = match open {
        "\"" => '"',
        "<" => '>',
        _ => return None,
    };
    rest.split_once(close).map(|(name, _)| name)
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;

    #[test]
    fn reads_include_lines() {
        assert_eq!(include_name("#include \"warpsmith/a.cuh\" // why"), Some("warpsmith/a.cuh"));
        assert_eq!(include_name("  #  include <warpsmith/b.cuh>"), Some("warpsmith/b.cuh"));
        for line in ["// #include \"a\"", "#include", "#include MACRO", "#include \"open", "#included é"] {
            assert_eq!(include_name(line), None, "{line}");
        }
    }

    #[test]
    fn embeds_every_header_and_each_includes_only_ours() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/include/warpsmith");
        let mut on_disk: Vec<String> = std::fs::read_dir(folder)
            .unwrap()
            .map(|file| format!("warpsmith/{}", file.unwrap().file_name().to_str().unwrap()))
            .collect();
        on_disk.sort();
        let mut embedded: Vec<&str> = HEADERS.iter().map(|header| header.name).collect();
        embedded.sort();
        assert_eq!(embedded, on_disk, "list every file of include/warpsmith in HEADERS");
        for header in HEADERS {
            assert!(header.code.contains("#pragma once"), "{}", header.name);
            for name in header.code.lines().filter_map(include_name) {
                assert!(
                    embedded.contains(&name),
                    "{} includes {name}, which is no header of ours",
                    header.name
                );
            }
        }
    }

    #[test]
    fn follows_includes_once() {
        let names = |text| included_by(&[text]).iter().map(|header| header.name).collect::<Vec<_>>();
        assert_eq!(
            names("#include \"warpsmith/base.cuh\"\n#include \"warpsmith/base.cuh\""),
            ["warpsmith/base.cuh"]
        );
        assert!(names("#include <cuda_fp16.h>\nint x;").is_empty());
    }
}
