//! Kernel packs: folders of kernels compiled ahead of time, for machines that cannot or must not compile.
//!
//! A pack holds `index.json` and one cubin per entry. It is found by the key of a request, which does not depend on
//! NVRTC's version, so a pack works where no NVRTC is installed. It answers only for the very sources, defines and
//! options it was built from; anything else counts as absent.

use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::{Arch, Compiler, Key, Request, nvrtc};
use crate::{Error, Result};

const FORMAT: u32 = 1;
const INDEX: &str = "index.json";

/// An open kernel pack.
#[derive(Debug)]
pub struct Pack {
    folder: PathBuf,
    nvrtc: (i32, i32),
    entries: Vec<Entry>,
    by_key: HashMap<Key, usize>,
}

/// One kernel of a pack.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    /// The kernel's name.
    pub kernel: String,
    /// Architecture of the cubin.
    pub arch: Arch,
    /// Identity of the request it answers.
    pub key: Key,
    /// Name of the cubin's file in the pack.
    pub file: String,
    /// Its size.
    pub bytes: u64,
    /// blake3 of its contents, in hexadecimal.
    pub blake3: String,
}

#[derive(Serialize, Deserialize)]
struct Index {
    format: u32,
    nvrtc: (i32, i32),
    entries: Vec<Entry>,
}

/// Progress of [`build`], reported after each kernel.
#[derive(Copy, Clone, Debug)]
pub struct Progress<'a> {
    /// Kernels compiled so far.
    pub done: usize,
    /// Kernels in all.
    pub total: usize,
    /// The one just compiled.
    pub kernel: &'a str,
    /// Its architecture.
    pub arch: Arch,
}

/// Compiles all requests with this machine's NVRTC, on all cores, into the pack `out`. See [`build_with`].
pub fn build(requests: &[Request], out: &Path, progress: &(dyn Fn(Progress) + Sync)) -> Result<Pack> {
    let archs: Vec<Arch> = requests.iter().map(|request| request.arch).collect();
    build_with(nvrtc::find_for(&archs)?, requests, out, progress)
}

/// Compiles all requests into the pack `out`.
///
/// The pack is written to a temporary folder and renamed into place: `out` is a complete pack at all times, except
/// for the moment between two renames when it replaces an older one. A folder that holds anything but a pack is
/// left alone. If any kernel fails to compile, nothing is written.
pub fn build_with(
    compiler: &dyn Compiler,
    requests: &[Request],
    out: &Path,
    progress: &(dyn Fn(Progress) + Sync),
) -> Result<Pack> {
    refuse_foreign(out)?;
    let mut unique: Vec<(Key, &Request)> = requests.iter().map(|request| (request.key(), request)).collect();
    unique.sort_by_key(|(key, request)| (request.source.name, request.arch, *key));
    unique.dedup_by_key(|(key, _)| *key);

    let aside = Aside::beside(out)?;
    let (done, total) = (AtomicUsize::new(0), unique.len());
    let entries = unique
        .par_iter()
        .map(|&(key, request)| {
            request.check()?;
            let cubin = compiler.compile(request)?.cubin;
            let kernel = request.source.name;
            let file =
                format!("{}.{}.{}.cubin", kernel.replace('/', "-"), request.arch, &key.to_string()[..16]);
            write_synced(&aside.0.join(&file), &cubin)?;
            let done = done.fetch_add(1, Ordering::Relaxed) + 1;
            progress(Progress { done, total, kernel, arch: request.arch });
            let blake3 = blake3::hash(&cubin).to_hex().to_string();
            Ok(Entry {
                kernel: kernel.into(),
                arch: request.arch,
                key,
                file,
                bytes: cubin.len() as u64,
                blake3,
            })
        })
        .collect::<Result<Vec<Entry>>>()?;

    let index = Index { format: FORMAT, nvrtc: compiler.version(), entries };
    let mut json = serde_json::to_vec_pretty(&index)
        .map_err(|error| Error::Io { path: out.join(INDEX), what: format!("write: {error}") })?;
    json.push(b'\n');
    write_synced(&aside.0.join(INDEX), &json)?;
    // Compiling takes a while, in which somebody may have put something there.
    refuse_foreign(out)?;
    aside.rename_to(out)?;
    Pack::open(out)
}

impl Pack {
    /// Opens a pack, checking its index and that every file is there in its full size. Contents are checked
    /// when they are used, and by [`Pack::verify`].
    pub fn open(folder: impl Into<PathBuf>) -> Result<Pack> {
        let folder = folder.into();
        let path = folder.join(INDEX);
        let text =
            fs::read(&path).map_err(|error| Error::io(&path, "read the kernel pack's index", &error))?;
        let bad = |what: String| Error::Io { path: path.clone(), what };
        // Check the format first: the rest of a newer index may look different.
        #[derive(Deserialize)]
        struct Format {
            format: u32,
        }
        let Format { format } = serde_json::from_slice(&text)
            .map_err(|error| bad(format!("not a kernel pack's index: {error}")))?;
        if format != FORMAT {
            return Err(bad(format!(
                "kernel pack of format {format}, this version reads {FORMAT}; build it again"
            )));
        }
        let index: Index = serde_json::from_slice(&text)
            .map_err(|error| bad(format!("not a kernel pack's index: {error}")))?;

        let mut by_key = HashMap::new();
        for (position, entry) in index.entries.iter().enumerate() {
            if entry.file.contains(['/', '\0']) || entry.file.starts_with('.') || entry.file.is_empty() {
                return Err(bad(format!("`{}` is not the name of a file in the pack", entry.file)));
            }
            let file = folder.join(&entry.file);
            let metadata = fs::symlink_metadata(&file).map_err(|error| Error::io(&file, "read", &error))?;
            if !metadata.is_file() || metadata.len() != entry.bytes {
                return Err(Error::Io { path: file, what: format!("not a file of {} bytes", entry.bytes) });
            }
            if by_key.insert(entry.key, position).is_some() {
                return Err(bad(format!("key {} is listed twice", entry.key)));
            }
        }
        Ok(Pack { folder, nvrtc: index.nvrtc, entries: index.entries, by_key })
    }

    /// Its folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Version of the NVRTC it was built with.
    pub fn nvrtc_version(&self) -> (i32, i32) {
        self.nvrtc
    }

    /// Its kernels.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// The cubin for a request, or one for another architecture whose code also runs on the requested one. An error
    /// means that the pack is damaged.
    pub fn find(&self, request: &Request) -> Result<Option<(PathBuf, Arc<[u8]>)>> {
        if self.entries.is_empty() {
            return Ok(None);
        }
        for arch in request.arch.loadable() {
            if let Some(&position) = self.by_key.get(&request.with_arch(arch).key()) {
                return self.load(&self.entries[position]).map(Some);
            }
        }
        Ok(None)
    }

    /// Checks the contents of every file.
    pub fn verify(&self) -> Result<()> {
        self.entries.iter().try_for_each(|entry| self.load(entry).map(drop))
    }

    fn load(&self, entry: &Entry) -> Result<(PathBuf, Arc<[u8]>)> {
        let path = self.folder.join(&entry.file);
        let cubin = fs::read(&path).map_err(|error| Error::io(&path, "read", &error))?;
        if blake3::hash(&cubin).to_hex().as_str() != entry.blake3 {
            let what =
                "its contents are not those the pack's index lists; build or copy the pack again".into();
            return Err(Error::Io { path, what });
        }
        Ok((path, cubin.into()))
    }
}

/// An error if `out` holds something that is not part of a pack.
fn refuse_foreign(out: &Path) -> Result<()> {
    let present = match fs::read_dir(out) {
        Ok(entries) => entries.collect::<io::Result<Vec<fs::DirEntry>>>(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => Err(error),
    };
    let present = present.map_err(|error| Error::io(out, "list", &error))?;
    let files = listed_files(&out.join(INDEX)).unwrap_or_default();
    let is_ours = |entry: &fs::DirEntry| {
        let is_file = entry.file_type().is_ok_and(|kind| kind.is_file());
        is_file && entry.file_name().to_str().is_some_and(|name| files.contains(name))
    };
    if present.iter().all(is_ours) {
        return Ok(());
    }
    Err(Error::Io {
        path: out.into(),
        what: "holds something that is not a kernel pack and is left alone; name another folder".into(),
    })
}

/// The names of all files of a pack of any format, with that of the index; `None` if it is no pack's index.
fn listed_files(index: &Path) -> Option<HashSet<String>> {
    #[derive(Deserialize)]
    struct Listed {
        file: String,
    }
    #[derive(Deserialize)]
    struct AnyIndex {
        #[serde(rename = "format")]
        _format: u32,
        entries: Vec<Listed>,
    }
    let index: AnyIndex = serde_json::from_slice(&fs::read(index).ok()?).ok()?;
    Some(index.entries.into_iter().map(|entry| entry.file).chain([INDEX.into()]).collect())
}

fn write_synced(path: &Path, bytes: &[u8]) -> Result<()> {
    let written =
        File::create_new(path).and_then(|mut file| file.write_all(bytes).and_then(|()| file.sync_all()));
    written.map_err(|error| Error::io(path, "write", &error))
}

/// A temporary folder beside the final one, removed on drop unless it was renamed.
struct Aside(PathBuf);

impl Aside {
    fn beside(out: &Path) -> Result<Aside> {
        let name = out
            .file_name()
            .ok_or_else(|| Error::parse("kernel pack", "a folder's path", out.to_string_lossy()))?;
        let parent = out.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        fs::create_dir_all(parent).map_err(|error| Error::io(parent, "create", &error))?;
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let (process, count) = (std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let aside = Aside(parent.join(format!(".{}.aside-{process}-{count}", name.to_string_lossy())));
        // A folder of this name was left by a process that died and had our id.
        let _ = fs::remove_dir_all(&aside.0);
        fs::create_dir(&aside.0).map_err(|error| Error::io(&aside.0, "create", &error))?;
        Ok(aside)
    }

    fn rename_to(&self, out: &Path) -> Result<()> {
        let rename =
            |from: &Path, to: &Path| fs::rename(from, to).map_err(|error| Error::io(to, "rename to", &error));
        if !out.exists() {
            return rename(&self.0, out);
        }
        let old = Aside::beside(out)?;
        // A folder may be renamed over an empty one.
        rename(out, &old.0)?;
        rename(&self.0, out).inspect_err(|_| {
            let _ = fs::rename(&old.0, out);
        })
    }
}

impl Drop for Aside {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
