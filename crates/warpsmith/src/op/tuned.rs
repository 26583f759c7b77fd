//! Tuned choices: which kernel won for a problem on a device, kept on disk with the hash of the winner's source.

use crate::error::{Error, Result};
use crate::jit::cache::Cache;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock, RwLock};

/// A remembered winner.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Choice {
    /// The kernel's name.
    pub kernel: String,
    /// Hash of its source when it won: a changed kernel must win again.
    pub source_hash: String,
}

/// Choices of one device: op, then problem.
type Choices = BTreeMap<String, BTreeMap<String, Choice>>;

static LOADED: LazyLock<RwLock<HashMap<String, Arc<Choices>>>> = LazyLock::new(Default::default);

fn file(device: &str) -> PathBuf {
    let slug: String = device
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '-' })
        .collect();
    let root = Cache::default_location().root().map_or_else(std::env::temp_dir, Path::to_path_buf);
    root.join("tuned").join(format!("{slug}.json"))
}

fn load(device: &str) -> Arc<Choices> {
    if let Some(choices) = LOADED.read().unwrap_or_else(|e| e.into_inner()).get(device) {
        return choices.clone();
    }
    let choices = Arc::new(read(&file(device)));
    LOADED.write().unwrap_or_else(|e| e.into_inner()).entry(device.into()).or_insert(choices).clone()
}

/// An unreadable or damaged store is an empty one: tuning is an optimisation, never a reason to fail.
fn read(path: &Path) -> Choices {
    std::fs::read(path).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_default()
}

/// The stored choice for a problem. `key` is only computed if the device has choices for the op.
pub fn lookup(device: &str, op: &str, key: impl FnOnce() -> String) -> Option<Choice> {
    load(device).get(op)?.get(&key()).cloned()
}

/// Stores a choice for a problem.
pub fn store(device: &str, op: &str, key: String, kernel: &str, source_hash: &str) -> Result<()> {
    store_at(
        &file(device),
        device,
        op,
        key,
        Choice { kernel: kernel.into(), source_hash: source_hash.into() },
    )
}

fn store_at(path: &Path, device: &str, op: &str, key: String, choice: Choice) -> Result<()> {
    let folder = path.parent().expect("the store lies in a folder");
    std::fs::create_dir_all(folder).map_err(|e| Error::io(folder, "creating the folder", &e))?;
    // Another process may tune at the same time: the whole read-change-write happens under a lock.
    let lock_path = path.with_extension("lock");
    let lock =
        std::fs::File::create(&lock_path).map_err(|e| Error::io(&lock_path, "creating the lock", &e))?;
    lock.lock().map_err(|e| Error::io(&lock_path, "locking", &e))?;
    let mut choices = read(path);
    choices.entry(op.into()).or_default().insert(key, choice);
    let aside = path.with_extension(format!("{}.tmp", std::process::id()));
    let text = serde_json::to_vec_pretty(&choices).expect("strings serialise");
    std::fs::write(&aside, text).map_err(|e| Error::io(&aside, "writing", &e))?;
    std::fs::rename(&aside, path).map_err(|e| Error::io(path, "renaming into place", &e))?;
    LOADED.write().unwrap_or_else(|e| e.into_inner()).insert(device.into(), Arc::new(choices));
    Ok(())
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;

    #[test]
    fn choices_survive_and_damage_is_ignored() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tuned/gpu.json");
        let choice = |k: &str| Choice { kernel: k.into(), source_hash: "h".into() };
        store_at(&path, "test gpu", "op", "p1".into(), choice("a")).unwrap();
        store_at(&path, "test gpu", "op", "p2".into(), choice("b")).unwrap();
        assert_eq!(read(&path)["op"]["p1"], choice("a"));
        assert_eq!(lookup("test gpu", "op", || "p2".into()), Some(choice("b")));
        assert_eq!(lookup("test gpu", "other", || unreachable!("no choices for this op")), None);
        std::fs::write(&path, b"{ damaged").unwrap();
        assert!(read(&path).is_empty());
    }

    #[test]
    fn concurrent_stores_lose_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("gpu.json");
        std::thread::scope(|scope| {
            for t in 0..8 {
                let path = &path;
                scope.spawn(move || {
                    for i in 0..10 {
                        let choice = Choice { kernel: "k".into(), source_hash: "h".into() };
                        store_at(path, "another gpu", "op", format!("{t}-{i}"), choice).unwrap();
                    }
                });
            }
        });
        assert_eq!(read(&path)["op"].len(), 80);
    }
}
