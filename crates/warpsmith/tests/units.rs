//! Runs the unit tests that are part of the library, as the standard harness would.

use libtest_mimic::{Arguments, Trial};
use std::collections::BTreeMap;
use std::path::Path;
use warpsmith::unit_tests;

fn main() {
    let arguments = Arguments::from_args();
    let mut trials: Vec<Trial> = unit_tests::all()
        .map(|test| {
            let run = || {
                (test.run)();
                Ok(())
            };
            Trial::test(test.name(), run).with_ignored_flag(test.ignored)
        })
        .collect();
    trials.push(Trial::test("no_test_is_left_out", || {
        no_test_is_left_out();
        Ok(())
    }));
    trials.sort_by(|a, b| a.name().cmp(b.name()));
    libtest_mimic::run(&arguments, trials).exit();
}

/// Tests are found by the linker, which may leave out what nobody refers to.
fn no_test_is_left_out() {
    let mut written = BTreeMap::new();
    count(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), "", &mut written);
    let mut linked = BTreeMap::new();
    // The sources of templates stand elsewhere.
    let is_of_template =
        |name: &str| name.starts_with("ops::new_op::") || name.starts_with("ops::new_row_op::");
    for name in unit_tests::all().map(|test| test.name()).filter(|name| !is_of_template(name)) {
        let room = name.split("::").next().expect("a room").to_string();
        *linked.entry(room).or_insert(0) += 1;
    }
    if cfg!(feature = "cuda") {
        assert_eq!(written, linked, "the tests of each room, as written and as linked");
    }
}

/// Adds the attributes in the sources below a folder to the tests of each room.
fn count(folder: &Path, room: &str, written: &mut BTreeMap<String, usize>) {
    for entry in std::fs::read_dir(folder).expect("the sources of the library") {
        let path = entry.expect("a file or folder").path();
        let stem = path.file_stem().and_then(|stem| stem.to_str()).expect("a name");
        let room = if room.is_empty() { stem } else { room };
        if path.is_dir() {
            count(&path, room, written);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let source = std::fs::read_to_string(&path).expect("a source");
            let tests = source.lines().filter(|line| line.trim() == "#[test]").count();
            if tests > 0 {
                *written.entry(room.to_string()).or_insert(0) += tests;
            }
        }
    }
}
