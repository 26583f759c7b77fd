//! Compiled kernels on disk, shared by all processes of one user.
//!
//! `<root>/kernels/<arch>/<key>-nvrtc<major>.<minor>.cubin`, one file per kernel: a checksum, a description, and the
//! cubin. Files are written under a temporary name and renamed into place, so a reader sees a whole entry or none. An
//! entry is code that will run with the user's rights. Anything that is not a regular file owned by this user,
//! writable only by this user, with an intact checksum and the right key, counts as absent and is rebuilt. A failure
//! here never fails a kernel call; [`Cache::warning`] returns the last one.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use super::{Arch, Key};
use crate::env::{self, system};
use crate::{Error, Result};

const MAGIC: &[u8; 8] = b"WSMTHCB1";
const HASH_LEN: usize = 32;
/// Magic, checksum of all that follows, length of the description.
const PREFIX_LEN: usize = MAGIC.len() + HASH_LEN + 4;
/// Larger files cannot be ours: no cubin comes near this size.
const MAX_ENTRY: u64 = 256 << 20;
/// A temporary file of this age was left by a process that died.
const STALE: Duration = Duration::from_secs(3600);
const ASIDE: &str = ".aside-";
const LOCKS: &str = "locks";

/// A folder of compiled kernels.
#[derive(Debug)]
pub struct Cache {
    root: Option<PathBuf>,
    warning: Mutex<Option<String>>,
}

/// The key of an entry.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct EntryId {
    /// Identity of the request.
    pub key: Key,
    /// Architecture of the cubin.
    pub arch: Arch,
    /// Version of the NVRTC that compiled it.
    pub nvrtc: (i32, i32),
}

/// An entry, as listed by [`Cache::entries`].
#[derive(Clone, Debug)]
pub struct Entry {
    /// Its key.
    pub id: EntryId,
    /// The kernel's name.
    pub kernel: String,
    /// Size of the file.
    pub bytes: u64,
    /// When it was written.
    pub modified: SystemTime,
    /// The file.
    pub path: PathBuf,
}

/// An entry's contents.
#[derive(Clone, Debug)]
pub struct Hit {
    /// The compiled code.
    pub cubin: Arc<[u8]>,
    /// The compiler's log.
    pub log: String,
    /// The file.
    pub path: PathBuf,
}

/// What [`Cache::clear`] removed.
#[derive(Copy, Clone, Debug, Default, Eq, PartialEq)]
pub struct Cleared {
    /// Number of files.
    pub files: u64,
    /// Their total size.
    pub bytes: u64,
}

/// The description stored in an entry.
#[derive(Serialize, Deserialize)]
struct Description {
    key: Key,
    arch: Arch,
    nvrtc: (i32, i32),
    kernel: String,
    log: String,
}

/// Held by the process that compiles a key, while others wait. The system releases it when the process ends.
#[derive(Debug)]
pub struct Lock {
    path: PathBuf,
    _file: File,
}

impl Drop for Lock {
    fn drop(&mut self) {
        // Nobody else touches this file while the lock is held. Processes that wait for it notice that it is gone.
        let _ = fs::remove_file(&self.path);
    }
}

impl Cache {
    /// `$WARPSMITH_CACHE_DIR`, else `warpsmith` in `$XDG_CACHE_HOME` or `~/.cache`.
    pub fn default_location() -> Cache {
        let user = || {
            let caches = env::path(system::XDG_CACHE_HOME).filter(|path| path.is_absolute());
            let caches = caches.or_else(|| Some(env::path(system::HOME)?.join(".cache")));
            Some(caches?.join("warpsmith"))
        };
        match env::path(env::CACHE_DIR).or_else(user) {
            Some(root) => Cache::at(root),
            None => Cache {
                root: None,
                warning: Mutex::new(Some(format!(
                    "no kernel cache: neither {} nor HOME is set",
                    env::CACHE_DIR
                ))),
            },
        }
    }

    /// The cache in this folder. The folder is created when something is first stored.
    pub fn at(root: impl Into<PathBuf>) -> Cache {
        Cache { root: Some(root.into()), warning: Mutex::new(None) }
    }

    /// Its folder, if one could be determined.
    pub fn root(&self) -> Option<&Path> {
        self.root.as_deref()
    }

    /// The last reason why the cache could not be used, if any.
    pub fn warning(&self) -> Option<String> {
        self.warning.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The entry with this id, if it exists and is intact.
    pub fn get(&self, id: &EntryId) -> Option<Hit> {
        let folder = self.folder(&id.arch.to_string(), false)?;
        let path = folder.join(id.file_name());
        let (found, hit) = read_entry(&path)?;
        (found.id() == *id).then_some(hit)
    }

    /// The entry of this key compiled by the newest NVRTC, for machines without an NVRTC whose version could be used.
    pub fn get_any(&self, key: &Key, arch: Arch) -> Option<Hit> {
        let folder = self.folder(&arch.to_string(), false)?;
        let mut ids: Vec<EntryId> = ids_in(&folder, arch).into_iter().filter(|id| id.key == *key).collect();
        ids.sort_by_key(|id| std::cmp::Reverse(id.nvrtc));
        ids.iter().find_map(|id| self.get(id))
    }

    /// Stores an entry, replacing an existing one.
    pub fn put(&self, id: &EntryId, kernel: &str, cubin: &[u8], log: &str) -> Result<PathBuf> {
        let no_folder = || Error::Unavailable {
            what: "the kernel cache".into(),
            why: self.warning().unwrap_or_else(|| "it has no folder".into()),
            fix: format!("Set {} to a folder of yours", env::CACHE_DIR),
        };
        let folder = self.folder(&id.arch.to_string(), true).ok_or_else(no_folder)?;
        remove_stale(&folder);
        let path = folder.join(id.file_name());
        write_aside(&path, &encode(id, kernel, cubin, log)).map_err(|error| {
            self.warn(format!("{}: {error}", path.display()));
            Error::io(&path, "write", &error)
        })?;
        Ok(path)
    }

    /// Waits for the right to compile this entry. `None` if locks do not work here; then compile without one.
    pub fn lock(&self, id: &EntryId) -> Option<Lock> {
        let folder = self.folder(LOCKS, true)?;
        let path = folder.join(format!("{}-{}.lock", id.arch, id.stem()));
        loop {
            let file = OpenOptions::new()
                .write(true)
                .create(true)
                .truncate(false)
                .mode(0o600)
                .custom_flags(libc::O_NOFOLLOW)
                .open(&path)
                .and_then(|file| file.lock().map(|()| file));
            let file = match file {
                Ok(file) => file,
                Err(error) => {
                    self.warn(format!("{}: {error}", path.display()));
                    return None;
                }
            };
            // The previous holder removes the file: our lock counts only if the file still has its name.
            let held = file.metadata().map(|metadata| (metadata.dev(), metadata.ino())).ok()?;
            if fs::symlink_metadata(&path).is_ok_and(|metadata| (metadata.dev(), metadata.ino()) == held) {
                return Some(Lock { path, _file: file });
            }
        }
    }

    /// All intact entries, by kernel, architecture and compiler.
    pub fn entries(&self) -> Vec<Entry> {
        let mut entries = Vec::new();
        for (arch, folder) in self.arch_folders() {
            for id in ids_in(&folder, arch) {
                let path = folder.join(id.file_name());
                let Some((description, _)) = read_entry(&path) else { continue };
                let Ok(metadata) = fs::symlink_metadata(&path) else { continue };
                let modified = metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH);
                if description.id() == id {
                    entries.push(Entry {
                        id,
                        kernel: description.kernel,
                        bytes: metadata.len(),
                        modified,
                        path,
                    });
                }
            }
        }
        entries.sort_by(|a, b| {
            (&a.kernel, a.id.arch, a.id.nvrtc, a.id.key).cmp(&(&b.kernel, b.id.arch, b.id.nvrtc, b.id.key))
        });
        entries
    }

    /// Removes all entries, intact or not, and the leftovers of processes that died. Other files stay.
    pub fn clear(&self) -> Result<Cleared> {
        let mut cleared = Cleared::default();
        for (arch, folder) in self.arch_folders() {
            let mut names: Vec<String> = ids_in(&folder, arch).iter().map(EntryId::file_name).collect();
            names.extend(names_in(&folder).into_iter().filter(|name| name.starts_with(ASIDE)));
            for name in names {
                let path = folder.join(name);
                let Ok(metadata) = fs::symlink_metadata(&path) else { continue };
                match fs::remove_file(&path) {
                    Ok(()) => {
                        cleared = Cleared { files: cleared.files + 1, bytes: cleared.bytes + metadata.len() }
                    }
                    Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                    Err(error) => return Err(Error::io(path, "remove", &error)),
                }
            }
        }
        Ok(cleared)
    }

    fn arch_folders(&self) -> Vec<(Arch, PathBuf)> {
        let Some(root) = &self.root else { return Vec::new() };
        let archs = names_in(&root.join("kernels")).into_iter().filter_map(|name| name.parse::<Arch>().ok());
        archs.filter_map(|arch| Some((arch, self.folder(&arch.to_string(), false)?))).collect()
    }

    /// The folder `kernels/<name>` if it can be trusted.
    fn folder(&self, name: &str, create: bool) -> Option<PathBuf> {
        let root = self.root.as_ref()?;
        match trusted_folder(root, name, create) {
            Ok(folder) => folder,
            Err(problem) => {
                self.warn(problem);
                None
            }
        }
    }

    fn warn(&self, problem: String) {
        *self.warning.lock().unwrap_or_else(PoisonError::into_inner) = Some(problem);
    }
}

impl EntryId {
    fn stem(&self) -> String {
        format!("{}-nvrtc{}.{}", self.key, self.nvrtc.0, self.nvrtc.1)
    }

    fn file_name(&self) -> String {
        format!("{}.cubin", self.stem())
    }

    fn from_file_name(arch: Arch, name: &str) -> Option<EntryId> {
        let (key, version) = name.strip_suffix(".cubin")?.split_once("-nvrtc")?;
        let (major, minor) = version.split_once('.')?;
        let id = EntryId { key: key.parse().ok()?, arch, nvrtc: (major.parse().ok()?, minor.parse().ok()?) };
        (id.file_name() == name).then_some(id)
    }
}

impl Description {
    fn id(&self) -> EntryId {
        EntryId { key: self.key, arch: self.arch, nvrtc: self.nvrtc }
    }
}

/// `root/kernels/name`, created if requested. `Ok(None)` if it does not exist; an error says why it must not be used.
fn trusted_folder(root: &Path, name: &str, create: bool) -> Result<Option<PathBuf>, String> {
    let kernels = root.join("kernels");
    let folder = kernels.join(name);
    for path in [root, &kernels, &folder] {
        let not_used = |error: io::Error| format!("kernel cache not used: {}: {error}", path.display());
        if create {
            // Created folders are accessible only to this user.
            DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(not_used)?;
        }
        // The root may be a link, as caches are often moved to another disk; the folders below it may not.
        let metadata = if path == root { fs::metadata(path) } else { fs::symlink_metadata(path) };
        let metadata = match metadata {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            found => found.map_err(not_used)?,
        };
        let problem = if !metadata.is_dir() {
            "is not a folder"
        } else if metadata.uid() != user() {
            "belongs to another user"
        } else if path != root && metadata.mode() & 0o022 != 0 {
            "can be written by other users"
        } else {
            continue;
        };
        return Err(format!("kernel cache not used: {} {problem}", path.display()));
    }
    Ok(Some(folder))
}

fn user() -> u32 {
    // SAFETY: geteuid has no preconditions and cannot fail.
    unsafe { libc::geteuid() }
}

fn names_in(folder: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

fn ids_in(folder: &Path, arch: Arch) -> Vec<EntryId> {
    names_in(folder).iter().filter_map(|name| EntryId::from_file_name(arch, name)).collect()
}

fn encode(id: &EntryId, kernel: &str, cubin: &[u8], log: &str) -> Vec<u8> {
    let description =
        Description { key: id.key, arch: id.arch, nvrtc: id.nvrtc, kernel: kernel.into(), log: log.into() };
    let description = serde_json::to_vec(&description).unwrap_or_default();
    let mut checked = (description.len() as u32).to_le_bytes().to_vec();
    checked.extend_from_slice(&description);
    checked.extend_from_slice(cubin);
    [MAGIC.as_slice(), blake3::hash(&checked).as_bytes(), &checked].concat()
}

fn decode(bytes: &[u8]) -> Option<(Description, Arc<[u8]>)> {
    let (prefix, rest) = bytes.split_at_checked(PREFIX_LEN)?;
    let checked = &bytes[MAGIC.len() + HASH_LEN..];
    if !prefix.starts_with(MAGIC)
        || blake3::hash(checked).as_bytes() != &prefix[MAGIC.len()..MAGIC.len() + HASH_LEN]
    {
        return None;
    }
    let length = u32::from_le_bytes(checked[..4].try_into().ok()?) as usize;
    let (description, cubin) = rest.split_at_checked(length)?;
    Some((serde_json::from_slice(description).ok()?, cubin.into()))
}

fn read_entry(path: &Path) -> Option<(Description, Hit)> {
    // Non-blocking, because the name may be that of a pipe.
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let mut file = OpenOptions::new().read(true).custom_flags(flags).open(path).ok()?;
    let metadata = file.metadata().ok()?;
    if !metadata.is_file()
        || metadata.uid() != user()
        || metadata.mode() & 0o022 != 0
        || metadata.len() > MAX_ENTRY
    {
        return None;
    }
    let mut bytes = Vec::with_capacity(metadata.len() as usize);
    Read::by_ref(&mut file).take(MAX_ENTRY).read_to_end(&mut bytes).ok()?;
    let (description, cubin) = decode(&bytes)?;
    let log = description.log.clone();
    Some((description, Hit { cubin, log, path: path.into() }))
}

/// Writes a file under a temporary name in the same folder and renames it into place.
fn write_aside(path: &Path, bytes: &[u8]) -> io::Result<()> {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let folder = path.parent().unwrap_or(Path::new("."));
    let (process, count) = (std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
    // The time distinguishes processes with the same id in different containers.
    let time = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_nanos());
    let aside = folder.join(format!("{ASIDE}{process}-{count}-{time:x}"));
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&aside)?;
    let written =
        file.write_all(bytes).and_then(|()| file.sync_all()).and_then(|()| fs::rename(&aside, path));
    if written.is_err() {
        let _ = fs::remove_file(&aside);
    }
    written
}

/// Removes temporary files of processes that died while writing.
fn remove_stale(folder: &Path) {
    for name in names_in(folder).iter().filter(|name| name.starts_with(ASIDE)) {
        let path = folder.join(name);
        let modified = fs::symlink_metadata(&path).and_then(|metadata| metadata.modified());
        if modified.is_ok_and(|time| time.elapsed().is_ok_and(|age| age > STALE)) {
            let _ = fs::remove_file(&path);
        }
    }
}
