//! Where CUDA's libraries and tools may be installed. Nothing is executed to find out.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::env::{self, system};

/// A place to look for a library.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) enum Place {
    /// Wherever the dynamic loader finds it by name.
    Loader,
    /// One folder.
    Folder(PathBuf),
}

impl Place {
    /// The files of a library in this place, named like `libnvrtc.so`, newest first; the loader is asked for bare
    /// names. Files that name a full version (which the short names link to) are left out.
    pub fn libraries(&self, name: &str) -> Vec<PathBuf> {
        match self {
            Place::Loader => {
                [".13", ".12", ""].map(|version| PathBuf::from(format!("{name}{version}"))).into()
            }
            Place::Folder(folder) => {
                let numbered = format!("{name}.");
                let mut versions: Vec<u32> = names(folder)
                    .iter()
                    .filter_map(|file| file.strip_prefix(&numbered)?.parse().ok())
                    .collect();
                versions.sort_unstable_by(|a, b| b.cmp(a));
                let mut files: Vec<PathBuf> =
                    versions.iter().map(|major| folder.join(format!("{numbered}{major}"))).collect();
                if files.is_empty() {
                    files.extend(Some(folder.join(name)).filter(|path| path.exists()));
                }
                files
            }
        }
    }
}

/// The environment of a search; tests provide their own.
pub(crate) struct Surroundings<'a> {
    pub var: &'a dyn Fn(&str) -> Option<PathBuf>,
    /// `/`, below which the usual places of a system are.
    pub root: PathBuf,
}

impl Surroundings<'_> {
    /// The environment of this process.
    pub fn of_process() -> Surroundings<'static> {
        Surroundings { var: &env::path, root: "/".into() }
    }

    /// Places of CUDA's libraries, in the order they are tried: what the user named, what the loader knows, Python
    /// environments, and the toolkit's usual place.
    pub fn library_places(&self) -> Vec<Place> {
        let mut folders = Vec::new();
        for toolkit in self.named_toolkits() {
            folders.extend(toolkit_libraries(&toolkit).map(Place::Folder));
        }
        folders.push(Place::Loader);
        for package in self.nvidia_packages() {
            folders.extend(subfolders(&package, "cu", "lib").map(Place::Folder));
        }
        for toolkit in self.usual_toolkits() {
            folders.extend(toolkit_libraries(&toolkit).map(Place::Folder));
        }
        dedup(folders)
    }

    /// The first executable of this name: named toolkits, `PATH`, Python environments, usual toolkits.
    pub fn tool(&self, name: &str) -> Option<PathBuf> {
        let mut folders: Vec<PathBuf> = self.named_toolkits().map(|toolkit| toolkit.join("bin")).collect();
        folders.extend(self.path_folders());
        for package in self.nvidia_packages() {
            folders.extend(subfolders(&package, "cu", "bin"));
        }
        folders.extend(self.usual_toolkits().into_iter().map(|toolkit| toolkit.join("bin")));
        folders.into_iter().map(|folder| folder.join(name)).find(|path| {
            fs::metadata(path).is_ok_and(|metadata| metadata.is_file() && metadata.mode() & 0o111 != 0)
        })
    }

    fn named_toolkits(&self) -> impl Iterator<Item = PathBuf> {
        [system::CUDA_HOME, system::CUDA_PATH].into_iter().filter_map(|name| (self.var)(name))
    }

    fn usual_toolkits(&self) -> Vec<PathBuf> {
        listing(&self.root.join("usr/local"), |name| name.starts_with("cuda"))
    }

    fn path_folders(&self) -> Vec<PathBuf> {
        let Some(path) = (self.var)(system::PATH) else { return Vec::new() };
        // An empty or relative entry means the current folder, which may contain anything.
        std::env::split_paths(&path).filter(|folder| folder.is_absolute()).collect()
    }

    /// The folders `site-packages/nvidia` of the Python environments found.
    fn nvidia_packages(&self) -> Vec<PathBuf> {
        let mut prefixes: Vec<PathBuf> = [system::VIRTUAL_ENV, system::CONDA_PREFIX]
            .into_iter()
            .filter_map(|name| (self.var)(name))
            .collect();
        let interpreter =
            self.path_folders().into_iter().map(|folder| folder.join("python3")).find(|path| path.exists());
        if let Some(interpreter) = interpreter {
            // In an environment the prefix is the folder of the link; elsewhere it is that of the program.
            let real = fs::canonicalize(&interpreter).ok();
            prefixes.extend(
                [Some(interpreter), real]
                    .into_iter()
                    .flatten()
                    .filter_map(|path| Some(path.parent()?.parent()?.to_path_buf())),
            );
        }
        prefixes.extend((self.var)(system::HOME).map(|home| home.join(".local")));
        prefixes.push(self.root.join("usr/local"));
        prefixes.push(self.root.join("usr"));
        let mut packages = Vec::new();
        for prefix in dedup(prefixes) {
            for lib in ["lib", "lib64"] {
                for python in listing(&prefix.join(lib), |name| name.starts_with("python3")) {
                    packages.extend(
                        ["site-packages", "dist-packages"].map(|site| python.join(site).join("nvidia")),
                    );
                }
            }
        }
        packages.retain(|package| package.is_dir());
        dedup(packages)
    }
}

/// The library of built-in functions beside an NVRTC of this version.
pub(super) fn builtins_beside(nvrtc: &Path, (major, minor): (i32, i32)) -> Option<PathBuf> {
    let path = nvrtc.parent()?.join(format!("libnvrtc-builtins.so.{major}.{minor}"));
    path.exists().then_some(path)
}

fn toolkit_libraries(toolkit: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    ["lib64", "lib"].map(|lib| toolkit.join(lib)).into_iter().filter(|folder| folder.is_dir())
}

/// `parent/<prefix>*/<leaf>`, last name first, so that `cu13` comes before `cuda_nvrtc`'s older releases.
fn subfolders(parent: &Path, prefix: &str, leaf: &str) -> impl Iterator<Item = PathBuf> {
    let mut found = listing(parent, |name| name.starts_with(prefix));
    // Packages from CUDA 13 on share one folder `cu<major>`; before, each had its own.
    found.sort_by_key(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("cuda")));
    found.into_iter().map(move |path| path.join(leaf)).filter(|path| path.is_dir())
}

/// Folders in `parent` whose name satisfies `wanted`, in descending order of their names.
fn listing(parent: &Path, wanted: impl Fn(&str) -> bool) -> Vec<PathBuf> {
    let mut found: Vec<String> = names(parent).into_iter().filter(|name| wanted(name)).collect();
    // Numbers compare as numbers: python3.9 is older than python3.11.
    found.sort_by_key(|name| std::cmp::Reverse(natural(name)));
    found.into_iter().map(|name| parent.join(name)).filter(|path| path.is_dir()).collect()
}

fn names(folder: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

fn natural(name: &str) -> Vec<u64> {
    name.split(|letter: char| !letter.is_ascii_digit()).filter_map(|digits| digits.parse().ok()).collect()
}

fn dedup<T: PartialEq>(items: Vec<T>) -> Vec<T> {
    let mut unique: Vec<T> = Vec::with_capacity(items.len());
    for item in items {
        if !unique.contains(&item) {
            unique.push(item);
        }
    }
    unique
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;

    fn folder(root: &Path, path: &str) -> PathBuf {
        let folder = root.join(path);
        fs::create_dir_all(&folder).unwrap();
        folder
    }

    #[test]
    fn looks_in_the_documented_order() {
        let temp = tempfile::tempdir().unwrap();
        let root = temp.path();
        let home = folder(root, "opt/cuda/lib64");
        let venv13 = folder(root, "venv/lib/python3.11/site-packages/nvidia/cu13/lib");
        let venv12 = folder(root, "venv/lib/python3.11/site-packages/nvidia/cuda_nvrtc/lib");
        let older = folder(root, "venv/lib/python3.9/site-packages/nvidia/cuda_nvrtc/lib");
        let conda = folder(root, "conda/lib/python3.12/site-packages/nvidia/cu13/lib");
        folder(root, "other/bin");
        fs::write(root.join("other/bin/python3"), "").unwrap();
        let other = folder(root, "other/lib/python3.10/site-packages/nvidia/cuda_nvrtc/lib");
        let usual = ["usr/local/cuda-13.1/lib64", "usr/local/cuda-12.9/lib64"].map(|path| folder(root, path));

        let var = |name: &str| match name {
            system::CUDA_HOME => Some(root.join("opt/cuda")),
            system::CUDA_PATH => Some(root.join("opt/missing")),
            system::VIRTUAL_ENV => Some(root.join("venv")),
            system::CONDA_PREFIX => Some(root.join("conda")),
            system::PATH => {
                Some(std::env::join_paths(["relative".into(), root.join("other/bin")]).unwrap().into())
            }
            _ => None,
        };
        let around = Surroundings { var: &var, root: root.into() };
        let [new, old] = usual;
        let folders: Vec<Place> = [venv13, venv12, older, conda, other, new, old].map(Place::Folder).into();
        let expected: Vec<Place> = [Place::Folder(home), Place::Loader].into_iter().chain(folders).collect();
        assert_eq!(around.library_places(), expected);
    }

    #[test]
    fn what_lies_in_the_current_folder_is_not_loaded() {
        let temp = tempfile::tempdir().unwrap();
        let here = std::env::current_dir().unwrap();
        let var = |name: &str| (name == system::PATH).then(|| PathBuf::from(".:bin:"));
        let around = Surroundings { var: &var, root: temp.path().into() };
        let places = around.library_places();
        assert!(
            places
                .iter()
                .all(|place| !matches!(place, Place::Folder(f) if f.starts_with(&here) || f.is_relative()))
        );
        assert_eq!(around.tool("python3"), None);
    }

    #[test]
    fn takes_the_newest_library_and_no_variant() {
        let temp = tempfile::tempdir().unwrap();
        let names =
            ["libnvrtc.so", "libnvrtc.so.9", "libnvrtc.so.13", "libnvrtc.alt.so.13", "libnvrtc.so.13.0.88"];
        for name in names {
            fs::write(temp.path().join(name), "").unwrap();
        }
        let expected = ["libnvrtc.so.13", "libnvrtc.so.9"].map(|name| temp.path().join(name));
        assert_eq!(Place::Folder(temp.path().into()).libraries("libnvrtc.so"), expected);
    }

    #[test]
    fn finds_only_executable_tools() {
        use std::os::unix::fs::PermissionsExt;
        let temp = tempfile::tempdir().unwrap();
        let (first, second) = (folder(temp.path(), "a"), folder(temp.path(), "b"));
        for folder in [&first, &second] {
            fs::write(folder.join("nvdisasm"), "").unwrap();
        }
        fs::set_permissions(second.join("nvdisasm"), fs::Permissions::from_mode(0o755)).unwrap();
        let path = std::env::join_paths([&first, &second]).unwrap();
        let var = |name: &str| (name == system::PATH).then(|| path.clone().into());
        let around = Surroundings { var: &var, root: temp.path().into() };
        assert_eq!(around.tool("nvdisasm"), Some(second.join("nvdisasm")));
        assert_eq!(around.tool("cuobjdump"), None);
    }
}
