//! `warpsmith new-op`: the files of a new op.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use warpsmith::{Error, Result};

/// Scaffold a new op that builds, runs and passes its checks
///
/// Writes the six files of an op that multiplies by a number, or with --rows subtracts the mean of each row, on CPU and
/// CUDA, and adds it to ops/mod.rs. Change them into the op you want: contract and checks in mod.rs, the definition in
/// reference.rs, what it must pass in cases.rs, the kernels in cpu.rs, cuda.rs and kernel.cu.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Name of the op, in snake_case: it is the name of the folder, the CUDA function and, in CamelCase, the Rust type
    name: String,
    /// An op in which the elements of a row depend on each other, instead of an elementwise one
    #[arg(long)]
    rows: bool,
    /// The folder of the ops [default: crates/warpsmith/src/ops here or in a folder above]
    #[arg(long, value_name = "DIR")]
    path: Option<PathBuf>,
}

const EXAMPLES: &str = "\
Examples:
  warpsmith new-op scale
  warpsmith new-op center --rows
  cargo fmt && cargo test --release -p warpsmith --test conformance";

type Files = [(&'static str, &'static str); 6];

/// The files of the template in a folder.
macro_rules! template {
    ($folder:literal) => {
        template!($folder, "mod.rs", "cases.rs", "reference.rs", "cpu.rs", "cuda.rs", "kernel.cu")
    };
    ($folder:literal, $($file:literal),*) => {
        [$(($file, include_str!(concat!("../../templates/", $folder, "/", $file)))),*]
    };
}

const ELEMENTWISE: Files = template!("op");
const ROWS: Files = template!("row-op");

const OPS: &str = "crates/warpsmith/src/ops";

pub fn run(args: &Args) -> Result<ExitCode> {
    let name = check_name(&args.name)?;
    let ops = match &args.path {
        Some(path) => path.clone(),
        None => find_ops()?,
    };
    for path in scaffold(&ops, name, if args.rows { &ROWS } else { &ELEMENTWISE })? {
        println!("{}", path.display());
    }
    println!("\nNext:");
    println!("  cargo fmt && cargo test --release -p warpsmith --test conformance");
    println!("  warpsmith check {name}, warpsmith bench {name}, then make it the op you want");
    Ok(ExitCode::SUCCESS)
}

/// The folder of the ops, searched for from the current folder upwards.
fn find_ops() -> Result<PathBuf> {
    let here = std::env::current_dir().map_err(|error| Error::io(".", "look for the ops", &error))?;
    let found = here.ancestors().map(|folder| folder.join(OPS)).find(|ops| ops.join("mod.rs").exists());
    found.ok_or_else(|| Error::Unavailable {
        what: format!("the folder {OPS}"),
        why: format!("it is neither in {} nor in a folder above", here.display()),
        fix: "Run this inside the repository, or give --path".into(),
    })
}

fn check_name(name: &str) -> Result<&str> {
    let words = || name.split('_');
    let lower = |word: &str| word.bytes().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit());
    let fits = words().all(|word| !word.is_empty() && lower(word))
        && name.starts_with(|c: char| c.is_ascii_lowercase())
        && !KEYWORDS.contains(&name);
    let expected = "snake_case that is no Rust keyword, such as `add_gelu`";
    if fits { Ok(name) } else { Err(Error::parse("name of the op", expected, name)) }
}

/// The keywords that are valid snake_case names.
const KEYWORDS: [&str; 49] = [
    "abstract", "as", "async", "await", "become", "box", "break", "const", "continue", "crate", "do", "dyn",
    "else", "enum", "extern", "false", "final", "fn", "for", "gen", "if", "impl", "in", "let", "loop",
    "macro", "match", "mod", "move", "mut", "override", "priv", "pub", "ref", "return", "self", "static",
    "struct", "super", "trait", "true", "try", "type", "typeof", "unsafe", "use", "virtual", "where",
    "while",
];

fn camel_case(name: &str) -> String {
    let upper = |word: &str| word[..1].to_ascii_uppercase() + &word[1..];
    name.split('_').map(upper).collect()
}

/// Writes the files of op `name` and its lines in `mod.rs`; returns what was written.
fn scaffold(ops: &Path, name: &str, files: &Files) -> Result<Vec<PathBuf>> {
    let list = ops.join("mod.rs");
    let text = std::fs::read_to_string(&list).map_err(|error| Error::io(&list, "read", &error))?;
    // Refuse everything that must be refused before anything is written.
    let registered = register(&text, name).ok_or_else(|| Error::Io {
        path: list.clone(),
        what: format!("`{name}` is there already, or the list of ops was not found"),
    })?;
    let folder = ops.join(name);
    std::fs::create_dir(&folder).map_err(|error| Error::io(&folder, "create", &error))?;
    let mut written = Vec::new();
    for (file, template) in files {
        written.push(write(folder.join(file), &fill(template, name))?);
    }
    written.push(write(list, &registered)?);
    Ok(written)
}

fn write(path: PathBuf, text: &str) -> Result<PathBuf> {
    std::fs::write(&path, text).map_err(|error| Error::io(&path, "write", &error))?;
    Ok(path)
}

/// The templates are a working op called `new_op`.
fn fill(template: &str, name: &str) -> String {
    template.replace("new_op", name).replace("NewOp", &camel_case(name))
}

/// `mod.rs` with the module, its type and its entry in the list of all ops; `None` if it cannot be added.
fn register(text: &str, name: &str) -> Option<String> {
    let camel = camel_case(name);
    let mut lines: Vec<String> = text.lines().map(String::from).collect();
    let module_name = |line: &str| {
        let line = line.strip_prefix("pub ").unwrap_or(line);
        Some(line.strip_prefix("mod ")?.strip_suffix(';')?.to_string())
    };
    let use_path = |line: &str| Some(line.strip_prefix("pub use ")?.strip_suffix(';')?.to_string());
    if lines.iter().any(|line| module_name(line).as_deref() == Some(name)) {
        return None;
    }
    insert_sorted(&mut lines, format!("pub mod {name};"), name, module_name)?;
    insert_sorted(&mut lines, format!("pub use {name}::{camel};"), &format!("{name}::"), use_path)?;

    let begin = lines.iter().position(|line| line == "list![")?;
    let end = begin + lines[begin..].iter().position(|line| line == "];")?;
    lines.insert(end, format!("    {name}::Forward,"));
    Some(lines.join("\n") + "\n")
}

/// Inserts a line among those with a key, in the order of the keys.
fn insert_sorted(
    lines: &mut Vec<String>,
    line: String,
    key: &str,
    key_of: impl Fn(&str) -> Option<String>,
) -> Option<()> {
    let first = lines.iter().position(|line| key_of(line).is_some())?;
    let before = |line: &String| key_of(line).is_some_and(|other| other.as_str() < key);
    let at = first + lines[first..].iter().take_while(|line| before(line)).count();
    lines.insert(at, line);
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_checked_and_turned_into_types() {
        for name in ["scale", "add_gelu", "cast8", "top_2_gate"] {
            assert!(check_name(name).is_ok(), "{name}");
        }
        for name in ["", "Scale", "add-gelu", "_x", "x_", "a__b", "2x", "../x", "é", "match", "self"] {
            assert!(matches!(check_name(name), Err(Error::Parse { .. })), "{name}");
        }
        assert_eq!(camel_case("add_gelu"), "AddGelu");
    }

    #[test]
    fn the_list_keeps_its_order_and_form() {
        let text =
            "pub mod b;\nmod c;\n\npub use b::{B, BBackward};\n\nlist![\n    b::Forward,\n];\n\nlast\n";
        let expected = "pub mod b;\npub mod bb;\nmod c;\n\npub use b::{B, BBackward};\npub use bb::Bb;\n\n\
            list![\n    b::Forward,\n    bb::Forward,\n];\n\nlast\n";
        assert_eq!(register(text, "bb").unwrap(), expected);
        assert!(register(text, "a").unwrap().starts_with("pub mod a;\npub mod b;\n"));
        assert_eq!(register(text, "b"), None);
        assert_eq!(register("no ops here", "a"), None);
        assert_eq!(register(&text.replace("list![", "other!["), "a"), None);
    }

    /// A suite gives every op NaN for each of its options, and it must be refused.
    #[test]
    fn the_template_judges_its_options() {
        let template = ELEMENTWISE[0].1;
        let options: Vec<&str> = template.split("AttrSpec { name: \"").skip(1).collect();
        assert!(!options.is_empty());
        for name in options.iter().map(|rest| rest.split('"').next().unwrap()) {
            assert!(template.contains(&format!("sizes.option(\"{name}\"")), "{name}");
        }
    }

    /// A copy of the real folder, so that the scaffold keeps working as the list grows.
    #[test]
    fn scaffolds_beside_the_real_ops() {
        let real = Path::new(env!("CARGO_MANIFEST_DIR")).join("../warpsmith/src/ops/mod.rs");
        let folder = tempfile::tempdir().unwrap();
        std::fs::copy(&real, folder.path().join("mod.rs")).unwrap();
        let written = scaffold(folder.path(), "zz_scale", &ELEMENTWISE).unwrap();
        assert_eq!(written.len(), ELEMENTWISE.len() + 1);
        for path in written.iter().chain(&scaffold(folder.path(), "zz_center", &ROWS).unwrap()) {
            let text = std::fs::read_to_string(path).unwrap();
            // The list names the template itself, which the library's tests compile.
            let is_list = path.ends_with("mod.rs") && path.parent() == Some(folder.path());
            assert!(is_list || !text.contains("new_op") && !text.contains("NewOp"), "{}", path.display());
            let count = |c: char| text.matches(c).count();
            assert_eq!((count('{'), count('(')), (count('}'), count(')')), "{}", path.display());
        }
        let list = std::fs::read_to_string(folder.path().join("mod.rs")).unwrap();
        for line in ["pub mod zz_scale;", "pub use zz_scale::ZzScale;", "    zz_scale::Forward,"] {
            assert_eq!(list.matches(line).count(), 1, "{line}");
        }
        assert!(scaffold(folder.path(), "zz_scale", &ROWS).is_err(), "an op is never overwritten");
        assert!(scaffold(&folder.path().join("elsewhere"), "x", &ROWS).is_err());
    }
}
