//! The evidence in the repository is about the code in the repository, and its tables say what it says.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use warpsmith::lab::evidence;

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

const UPDATE: &str = "run `warpsmith evidence --update-readme`";

#[test]
fn the_readme_shows_what_the_evidence_says() {
    let folder = repository().join("evidence");
    let records = evidence::load(&folder).unwrap();
    let text = std::fs::read_to_string(repository().join("README.md")).unwrap();
    for name in ["results", "evidence"] {
        assert!(text.contains(&format!("<!-- {name}:begin -->")), "the README has no part `{name}`");
    }
    let updated = evidence::readme(&text, &folder, &records).unwrap();
    assert_eq!(text, updated, "README.md is out of date: {UPDATE}");
}

#[test]
fn every_generated_file_is_up_to_date_and_none_is_left_over() {
    let folder = repository().join("evidence");
    // The ledger of random calls is not made from the records.
    let mut pages = BTreeSet::from(["random.md".to_string()]);
    for (name, expected) in evidence::pages(&evidence::load(&folder).unwrap()) {
        let text = std::fs::read_to_string(folder.join(&name)).unwrap_or_default();
        assert_eq!(text, expected, "evidence/{name} is out of date: {UPDATE}");
        pages.insert(name);
    }
    let files = std::fs::read_dir(&folder).unwrap().map(|file| file.unwrap().file_name());
    let made = |name: &String| [".md", ".svg"].iter().any(|end| name.ends_with(end));
    let files = files.map(|name| name.into_string().unwrap()).filter(made);
    assert_eq!(files.collect::<BTreeSet<_>>(), pages, "a page without a record");
}
