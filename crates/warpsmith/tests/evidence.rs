//! The evidence in the repository is about the code in the repository, and the documents say what it says.

use std::path::{Path, PathBuf};
use warpsmith::lab::evidence::{self, Detail};

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

#[test]
fn every_cuda_kernel_is_proven_or_says_why_not() {
    let problems = evidence::unproven(&repository().join("evidence")).unwrap();
    let lines: Vec<String> = problems.iter().map(|problem| problem.to_string()).collect();
    assert!(
        lines.is_empty(),
        "record the evidence on a GPU with `warpsmith check --record`, or name the kernel in evidence/unproven.txt:\n{}",
        lines.join("\n")
    );
}

#[test]
fn documents_show_what_the_evidence_says() {
    let records = evidence::load(&repository().join("evidence")).unwrap();
    for (file, detail) in [("README.md", Detail::Summary), ("docs/performance.md", Detail::Full)] {
        let Ok(text) = std::fs::read_to_string(repository().join(file)) else { continue };
        let Some(updated) = evidence::embed(&text, &evidence::markdown(&records, detail)) else { continue };
        assert_eq!(text, updated, "{file} is out of date: run `warpsmith evidence --update-readme`");
    }
}
