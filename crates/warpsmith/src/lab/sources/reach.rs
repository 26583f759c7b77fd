//! Which files the CPU kernels of an op reach.
//!
//! Found from the text: a file reaches the modules it declares, and what its imports and paths name. Where that is not
//! certain, more files are taken rather than fewer. The lists of modules, `cpu/mod.rs` and `ops/mod.rs`, reach only what is
//! asked of them by name.

use super::tokens::{of_the_cpu, tokens};
use std::collections::{BTreeMap, BTreeSet};

/// The modules that are lists of others.
const LISTS: [&str; 2] = ["cpu", "ops"];

/// Sources by module.
pub(super) struct Sources {
    modules: BTreeMap<String, Module>,
}

struct Module {
    /// The path of the file.
    file: &'static str,
    /// What is hashed.
    code: Vec<&'static str>,
    /// The modules declared in it.
    children: Vec<&'static str>,
    imports: Vec<Import>,
    /// Paths in its code: `math::exp`.
    paths: Vec<Vec<&'static str>>,
}

/// One name brought in by a `use`.
#[derive(Clone)]
struct Import {
    /// `*` for all of a module.
    name: &'static str,
    path: Vec<&'static str>,
}

impl Sources {
    /// Of files by their path below `src`.
    pub fn new(files: &[(&'static str, &'static str)]) -> Sources {
        let module = |&(file, text): &(&'static str, &'static str)| {
            let name = file.strip_suffix(".rs").unwrap_or(file);
            let name = name.strip_suffix("/mod").unwrap_or(name).replace('/', "::");
            (name, Module::new(file, of_the_cpu(&tokens(text))))
        };
        Sources { modules: files.iter().map(module).collect() }
    }

    /// The folders of ops. A folder whose cases prove no op is shared by several.
    pub fn ops(&self) -> impl Iterator<Item = &str> {
        self.modules.iter().filter_map(|(name, module)| {
            let folder = name.strip_prefix("ops::")?.strip_suffix("::cases")?;
            let proves = module.code.windows(2).any(|pair| pair == ["Provable", "for"]);
            (proves && !folder.contains("::")).then_some(folder)
        })
    }

    /// Identifies the code of the CPU kernels in the folder of an op.
    pub fn hash(&self, op: &str) -> String {
        let mut hasher = blake3::Hasher::new();
        for name in self.reached(op) {
            let module = &self.modules[&name];
            for part in [module.file].iter().chain(&module.code) {
                hasher.update(part.as_bytes());
                hasher.update(b"\n");
            }
        }
        hasher.finalize().to_hex().to_string()
    }

    /// The modules that the CPU kernels in the folder of an op reach.
    fn reached(&self, op: &str) -> BTreeSet<String> {
        let mut reached = BTreeSet::new();
        let mut waiting = vec![format!("ops::{op}")];
        while let Some(name) = waiting.pop() {
            let Some(module) = self.modules.get(&name) else { continue };
            if LISTS.contains(&name.as_str()) || !reached.insert(name.clone()) {
                continue;
            }
            waiting.extend(module.children.iter().map(|child| format!("{name}::{child}")));
            for path in module.imports.iter().map(|import| &import.path).chain(&module.paths) {
                self.follow(&name, path, &mut waiting, 0);
            }
        }
        reached
    }

    /// Adds the modules that `path`, written in module `from`, leads through.
    fn follow(&self, from: &str, path: &[&'static str], found: &mut Vec<String>, depth: usize) {
        // A name can be brought in by way of itself.
        if depth > 4 {
            return;
        }
        let Some((mut module, rest)) = self.start(from, path) else { return };
        for (at, &segment) in rest.iter().enumerate() {
            found.push(module.clone());
            let child = format!("{module}::{segment}");
            let child = child.strip_prefix("::").unwrap_or(&child).to_string();
            if self.modules.contains_key(&child) {
                module = child;
                continue;
            }
            // Of other modules all imports are followed anyway, once they are reached.
            let is_list = LISTS.contains(&module.as_str());
            if let Some(here) = self.modules.get(&module).filter(|_| is_list || module == from) {
                let brings = |import: &&Import| [segment, "*"].contains(&import.name);
                for import in here.imports.iter().filter(brings) {
                    let longer = [&import.path[..], &rest[at + 1..]].concat();
                    self.follow(&module, &longer, found, depth + 1);
                }
                if segment == "*" && is_list {
                    found.extend(here.children.iter().map(|child| format!("{module}::{child}")));
                }
            }
            break;
        }
        found.push(module);
    }

    /// Where a path begins, with what is left of it.
    fn start<'p>(&self, from: &str, path: &'p [&'static str]) -> Option<(String, &'p [&'static str])> {
        let supers = path.iter().take_while(|&&segment| segment == "super").count();
        let mut above = from;
        for _ in 0..supers {
            above = above.rsplit_once("::").map_or("", |(parent, _)| parent);
        }
        match path {
            ["crate", rest @ ..] => Some((String::new(), rest)),
            ["self", rest @ ..] => Some((from.to_string(), rest)),
            ["super", ..] => Some((above.to_string(), &path[supers..])),
            [first, ..] if self.modules.contains_key(&format!("{from}::{first}")) => {
                Some((from.to_string(), path))
            }
            // A name that was brought in: through the lists it may lead anywhere.
            [first, ..] if self.imports(from, first) => Some((from.to_string(), path)),
            _ => None,
        }
    }

    fn imports(&self, module: &str, name: &str) -> bool {
        self.modules.get(module).is_some_and(|module| module.imports.iter().any(|import| import.name == name))
    }
}

impl Module {
    fn new(file: &'static str, code: Vec<&'static str>) -> Module {
        let mut module = Module { file, code, children: vec![], imports: vec![], paths: vec![] };
        let code = &module.code;
        // Open braces, and how many were open where each module written inside the file begins.
        let (mut depth, mut inside) = (0, vec![]);
        let mut at = 0;
        while at < code.len() {
            match code[at..] {
                ["mod", name, ";", ..] => {
                    module.children.push(name);
                    at += 3;
                }
                ["mod", _, "{", ..] => {
                    inside.push(depth);
                    depth += 1;
                    at += 3;
                }
                ["use", ..] => {
                    let first = module.imports.len();
                    at += 1 + tree(&code[at + 1..], &[], &mut module.imports);
                    for import in &mut module.imports[first..] {
                        import.path = seen_from_the_file(&import.path, inside.len());
                    }
                }
                [first, "::", ..] if is_name(first) => {
                    let mut path = vec![first];
                    while let ["::", next, ..] = code[at + 1..] {
                        if !is_name(next) {
                            break;
                        }
                        path.push(next);
                        at += 2;
                    }
                    at += 1;
                    module.paths.push(seen_from_the_file(&path, inside.len()));
                }
                [token, ..] => {
                    depth += (token == "{") as usize;
                    depth -= (token == "}" && depth > 0) as usize;
                    if token == "}" && inside.last() == Some(&depth) {
                        inside.pop();
                    }
                    at += 1;
                }
                [] => break,
            }
        }
        module
    }
}

/// A path written inside as many modules of a file, as the file itself would write it.
fn seen_from_the_file(path: &[&'static str], inside: usize) -> Vec<&'static str> {
    let supers = path.iter().take_while(|&&segment| segment == "super").count();
    match supers {
        0 => path.to_vec(),
        _ if supers > inside => path[inside..].to_vec(),
        _ => [&["self"], &path[supers..]].concat(),
    }
}

fn is_name(token: &str) -> bool {
    token.starts_with(|c: char| c.is_alphabetic() || c == '_')
}

/// Reads the tree of a `use` below `path`; returns its length in tokens.
fn tree(tokens: &[&'static str], path: &[&'static str], imports: &mut Vec<Import>) -> usize {
    let mut path = path.to_vec();
    let mut at = 0;
    while at < tokens.len() {
        match tokens[at..] {
            ["{", ..] => {
                at += 1;
                while at < tokens.len() && tokens[at] != "}" {
                    at += tree(&tokens[at..], &path, imports);
                    at += (tokens.get(at) == Some(&",")) as usize;
                }
                return at + 1;
            }
            ["::", ..] => at += 1,
            // `{self}` is the module itself.
            ["self", ..] if !path.is_empty() => {
                at += 1;
            }
            [name, ..] if is_name(name) && name != "as" || name == "*" => {
                path.push(name);
                at += 1;
            }
            _ => break,
        }
    }
    let mut name = path.last().copied().unwrap_or_default();
    if let ["as", alias, ..] = tokens[at..] {
        name = alias;
        at += 2;
    }
    imports.push(Import { name, path });
    at
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;

    fn reached(files: &[(&'static str, &'static str)]) -> Vec<String> {
        Sources::new(files).reached("a").into_iter().collect()
    }

    #[test]
    fn imports_paths_and_modules_are_followed() {
        let files = [
            ("cpu/mod.rs", "mod used; pub mod named; mod idle; pub use used::{Deep, Used as Renamed};"),
            ("cpu/used.rs", "use super::deeper::Deep; pub struct Used;"),
            ("cpu/deeper.rs", ""),
            ("cpu/named.rs", "fn f() {} mod within { use super::*; } use super::far::X;"),
            ("cpu/far.rs", "mod within { mod deeper { use super::super::super::farther; } }"),
            ("cpu/farther.rs", ""),
            ("cpu/idle.rs", ""),
            ("ops/mod.rs", "mod a; mod b; pub mod c;"),
            (
                "ops/a/mod.rs",
                "mod cpu; #[cfg(feature = \"tests\")] mod tests; #[cfg(feature = \"cuda\")] mod cuda;",
            ),
            (
                "ops/a/cpu.rs",
                "use crate::cpu::{self, Renamed}; fn f() { cpu::named::g(); super::super::c::h() }",
            ),
            ("ops/a/tests.rs", "use crate::cpu::idle;"),
            ("ops/a/cuda.rs", "use crate::ops::b;"),
            ("ops/b/mod.rs", ""),
            ("ops/c.rs", ""),
        ];
        assert_eq!(
            reached(&files),
            [
                "cpu::deeper",
                "cpu::far",
                "cpu::farther",
                "cpu::named",
                "cpu::used",
                "ops::a",
                "ops::a::cpu",
                "ops::c"
            ]
        );
    }

    #[test]
    fn imports_in_a_circle_come_to_an_end() {
        let files = [
            ("cpu/mod.rs", "pub mod x; pub mod y;"),
            ("cpu/x.rs", "pub use super::y::Name;"),
            ("cpu/y.rs", "pub use super::x::Name;"),
            ("ops/a/mod.rs", "use crate::cpu::x::Name;"),
        ];
        assert_eq!(reached(&files), ["cpu::x", "cpu::y", "ops::a"]);
    }

    #[test]
    fn all_of_a_list_is_all_of_its_modules() {
        let files = [
            ("cpu/mod.rs", "mod x; pub mod y;"),
            ("cpu/x.rs", ""),
            ("cpu/y.rs", ""),
            ("ops/a/mod.rs", "use crate::cpu::*;"),
        ];
        assert_eq!(reached(&files), ["cpu::x", "cpu::y", "ops::a"]);
    }
}
