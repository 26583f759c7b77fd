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
    let records = evidence::load(&repository().join("evidence")).unwrap();
    let text = std::fs::read_to_string(repository().join("README.md")).unwrap();
    let updated = evidence::embed(&text, &evidence::overview(&records)).expect("the README has a table");
    assert_eq!(text, updated, "README.md is out of date: {UPDATE}");
}

#[test]
fn every_record_has_its_page_and_no_page_is_left_over() {
    let folder = repository().join("evidence");
    // The ledger of random calls is no page of a device.
    let mut pages = BTreeSet::from(["random.md".to_string()]);
    for record in evidence::load(&folder).unwrap() {
        let name = evidence::page_name(&record);
        let text = std::fs::read_to_string(folder.join(&name)).unwrap_or_default();
        assert_eq!(text, evidence::page(&record), "evidence/{name} is out of date: {UPDATE}");
        pages.insert(name);
    }
    let files = std::fs::read_dir(&folder).unwrap().map(|file| file.unwrap().file_name());
    let files = files.map(|name| name.into_string().unwrap()).filter(|name| name.ends_with(".md"));
    assert_eq!(files.collect::<BTreeSet<_>>(), pages, "a page without a record");
}
