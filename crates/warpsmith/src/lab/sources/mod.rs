//! Hashes of the code of kernels, by which evidence names the code it is about.
//!
//! A CUDA kernel is its device code with the headers it includes. The CPU kernels of an op are the files of its folder and
//! those they reach in `cpu` and in other ops, without comments, tests, the lab and the other backend: a change of any of
//! these leaves the hash as it is.

mod reach;
mod tokens;

use crate::op::KernelInfo;
use reach::Sources;
use std::collections::BTreeMap;
use std::sync::LazyLock;

// The sources of `cpu` and `ops` by their path in `src`, from `build.rs`.
include!(concat!(env!("OUT_DIR"), "/sources.rs"));

/// Identifies the code of a kernel of an op: changes whenever its source, its headers or its parameters do.
pub fn source_hash(kernel: &KernelInfo, op: &str) -> String {
    if kernel.is_cuda() { kernel.identity() } else { cpu_hash(op) }
}

/// Identifies the code of an op's CPU kernels. An op and its gradient are one folder and share them.
pub(crate) fn cpu_hash(op: &str) -> String {
    static HASHES: LazyLock<BTreeMap<String, String>> = LazyLock::new(|| {
        let sources = Sources::new(SOURCES);
        sources.ops().map(|folder| (folder.to_string(), sources.hash(folder))).collect()
    });
    HASHES.get(op.strip_suffix("_backward").unwrap_or(op)).cloned().unwrap_or_default()
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;

    /// The hashes with one file changed.
    fn with(name: &str, change: impl Fn(&str) -> String) -> Sources {
        let mut files = SOURCES.to_vec();
        let file = files.iter_mut().find(|(file, _)| *file == name);
        let text = &mut file.unwrap_or_else(|| panic!("no file {name}")).1;
        let changed = change(text);
        assert_ne!(changed, *text, "{name} is changed");
        *text = changed.leak();
        Sources::new(&files)
    }

    /// The ops whose hashes differ if a file does.
    fn touched(name: &str, change: impl Fn(&str) -> String) -> Vec<String> {
        static OLD: LazyLock<Sources> = LazyLock::new(|| Sources::new(SOURCES));
        let (old, new) = (&*OLD, with(name, change));
        old.ops().filter(|op| old.hash(op) != new.hash(op)).map(String::from).collect()
    }

    fn with_code(text: &str) -> String {
        format!("{text}\nconst ANOTHER: usize = 7;\n")
    }

    #[test]
    fn every_op_has_a_hash() {
        for op in crate::ops::PROVABLE {
            assert_eq!(cpu_hash(op.spec().name).len(), 64, "{}", op.spec().name);
        }
        assert_eq!(cpu_hash("no_such_op"), "");
    }

    #[test]
    fn changed_code_is_seen_by_the_ops_that_reach_it() {
        let gemm = touched("cpu/gemm/tiles.rs", with_code);
        let reached = [
            "attention",
            "grouped_linear",
            "linear",
            "linear_cross_entropy",
            "linear_quant",
            "moe_ffn",
            "paged_attention",
        ];
        assert_eq!(gemm, reached);
        assert_eq!(touched("ops/norm/cpu.rs", with_code), ["layer_norm", "rms_norm"]);
        assert_eq!(touched("ops/softmax/cpu.rs", with_code), ["softmax"]);
        assert_eq!(
            touched("ops/rope/rotation.rs", with_code),
            ["kv_store", "qk_norm_rope", "qkv_store", "rope"]
        );
        let every = Sources::new(SOURCES).ops().count();
        assert_eq!(touched("cpu/threads.rs", with_code).len(), every);
    }

    #[test]
    fn comments_tests_the_lab_and_cuda_are_not_seen() {
        let nobody: [&str; 0] = [];
        assert_eq!(touched("ops/softmax/cpu.rs", |text| format!("// Another.\n{text}\n/* end */\n")), nobody);
        assert_eq!(touched("cpu/threads.rs", |text| text.replace("    ", "  ")), nobody);
        let test = "\n#[cfg(feature = \"tests\")]\nmod more_tests {\n    #[test]\n    fn passes() {}\n}\n";
        assert_eq!(touched("cpu/gemm/mod.rs", |text| text.to_string() + test), nobody);
        for file in ["softmax/cuda.rs", "softmax/cases.rs", "softmax/reference.rs", "linear/sm90.rs"] {
            assert_eq!(touched(&format!("ops/{file}"), with_code), nobody, "{file}");
        }
        for file in ["cpu/gemm/tests.rs", "ops/attention/tests/bits.rs"] {
            assert_eq!(touched(file, with_code), nobody, "{file}");
        }
        // A line more in the lists of ops and of CPU parts.
        assert_eq!(touched("ops/mod.rs", |text| text.to_string() + "\npub mod another;\n"), nobody);
        assert_eq!(touched("cpu/mod.rs", |text| text.to_string() + "\npub mod another;\n"), nobody);
    }

    /// They are in no hash, so they must contain no kernel code.
    #[test]
    fn the_list_of_cpu_parts_is_only_a_list() {
        let (_, text) = SOURCES.iter().find(|(name, _)| *name == "cpu/mod.rs").unwrap();
        let code = tokens::of_the_cpu(&tokens::tokens(text));
        for statement in code.split_inclusive(|&token| token == ";") {
            let is_listed = statement.contains(&"mod") || statement.contains(&"use");
            assert!(is_listed && !statement.contains(&"fn"), "{}", statement.join(" "));
        }
    }
}
