//! Models by name from the Hugging Face hub.
//!
//! A name is `owner/name`, or `owner/name:file.gguf` for one file of a repository of GGUF files. Only the files that a
//! model is run from are downloaded, into the cache that the hub's own programs use. Files in the cache are used
//! without asking the hub; delete them to get a newer version. Interrupted downloads are resumed. A stalled connection
//! never times out: `hf-hub` has no setting for that.

pub use crate::error::HubError;

use crate::env;
use crate::error::{Error, Result};
use crate::models::config::Config;
use crate::weights::{Metadata, read_json, shard_files};
use hf_hub::api::sync::{ApiBuilder, ApiError, ApiRepo};
use hf_hub::{Cache, CacheRepo, Repo};
use std::path::{Path, PathBuf};
use std::time::Duration;
use warpsmith::env::{path, system};

/// Files besides weights: required ones and optional ones.
const CONFIG: &str = "config.json";
const TOKENIZER: &str = "tokenizer.json";
const OTHERS: [&str; 4] =
    [TOKENIZER, "tokenizer_config.json", "generation_config.json", "chat_template.jinja"];
const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";
/// How often a file is tried, and the wait before the second attempt; twice as long before the third.
const ATTEMPTS: u32 = 3;
const WAIT: Duration = Duration::from_millis(300);

/// The name of a model on the hub.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelName {
    /// `owner/name`.
    pub repository: String,
    /// A GGUF file of it.
    pub file: Option<String>,
}

impl ModelName {
    /// Reads a name; `None` if the text can only be a path.
    pub fn parse(text: &str) -> Option<ModelName> {
        let (repository, file) = match text.split_once(':') {
            Some((repository, file)) => (repository, Some(file)),
            None => (text, None),
        };
        let is_word = |word: &str| {
            let known = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
            !word.is_empty() && !word.starts_with('.') && word.chars().all(known)
        };
        let (owner, name) = repository.split_once('/')?;
        let is_file = |name: &str| [".gguf", ".safetensors"].iter().any(|end| name.ends_with(end));
        let is_gguf = |file: &str| file.ends_with(".gguf") && file.split('/').all(is_word);
        let named = is_word(owner) && is_word(name) && !is_file(name) && file.is_none_or(is_gguf);
        named.then(|| ModelName { repository: repository.into(), file: file.map(Into::into) })
    }
}

impl std::fmt::Display for ModelName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.file {
            Some(file) => write!(f, "{}:{file}", self.repository),
            None => f.write_str(&self.repository),
        }
    }
}

/// How far the download of a file has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Download<'a> {
    /// Its name in the repository.
    pub file: &'a str,
    /// Bytes that are there.
    pub bytes: u64,
    /// Bytes of the file.
    pub total: u64,
}

/// Where models come from.
#[derive(Debug, Clone)]
pub struct Hub {
    /// The hub's address.
    pub endpoint: String,
    /// Folder of what was downloaded.
    pub cache: PathBuf,
    /// Sent to the hub.
    pub token: Option<String>,
    /// Whether only what was downloaded before is used.
    pub offline: bool,
}

impl Hub {
    /// As the environment says.
    ///
    /// # Errors
    /// If there is no folder for the cache.
    pub fn from_env() -> Result<Hub> {
        Hub::of(&path)
    }

    /// As variables say; `path` gives those that are set and not empty.
    fn of(path: &dyn Fn(&str) -> Option<PathBuf>) -> Result<Hub> {
        let text = |name: &str| path(name)?.into_os_string().into_string().ok();
        let home = path(env::hub::HOME)
            .or_else(|| path(system::XDG_CACHE_HOME).map(|caches| caches.join("huggingface")))
            .or_else(|| path(system::HOME).map(|home| home.join(".cache/huggingface")));
        let inside = home.map(|home| home.join("hub"));
        let Some(cache) = path(env::hub::CACHE).or_else(|| inside.clone()) else {
            let names = [env::hub::CACHE, env::hub::HOME, system::XDG_CACHE_HOME];
            let expected = format!("a folder in {} or {}", names.join(", "), system::HOME);
            return Err(warpsmith::Error::parse("folder of the hub", expected, "nothing").into());
        };
        // A token is often the output of a program, with the end of its line.
        let token = text(env::hub::TOKEN).map(|token| token.trim().to_string());
        let offline = text(env::hub::OFFLINE).map(|value| value.to_ascii_uppercase());
        Ok(Hub {
            endpoint: text(env::hub::ENDPOINT).unwrap_or_else(|| "https://huggingface.co".into()),
            // The file with the token is beside the folder `hub`, wherever the cache is.
            token: token.filter(|token| !token.is_empty()).or_else(|| Cache::new(inside?).token()),
            cache,
            offline: offline.is_some_and(|value| ["1", "ON", "YES", "TRUE"].contains(&value.as_str())),
        })
    }

    /// The file or folder of a model, downloaded where it is not in the cache yet.
    ///
    /// # Errors
    /// [`Error::Hub`] says why a model cannot be obtained.
    pub fn fetch(&self, model: &ModelName, progress: &mut dyn FnMut(Download<'_>)) -> Result<PathBuf> {
        let repository = Repo::model(model.repository.clone());
        let cache = Cache::new(self.cache.clone()).repo(repository.clone());
        let found = self.cached(model, &cache)?;
        // Other programs download weights without the tokenizer.
        let has_text = model.file.is_some() || cache.get(TOKENIZER).is_some();
        if let Some(found) = found.as_ref().filter(|_| self.offline || has_text) {
            return Ok(found.clone());
        }
        let fail = |why: HubError| Error::Hub { model: model.to_string(), why };
        if self.offline {
            return Err(fail(HubError::Offline { cache: self.cache.clone() }));
        }
        let api = ApiBuilder::from_cache(Cache::new(self.cache.clone()))
            .with_endpoint(self.endpoint.trim_end_matches('/').into())
            .with_token(self.token.clone())
            .with_user_agent("warpsmith", env!("CARGO_PKG_VERSION"))
            .with_progress(false)
            .build()
            .map_err(|error| fail(self.why(&error, &cache)))?;
        let mut remote = Remote { hub: self, model, cache: &cache, repo: api.repo(repository), progress };
        match (remote.download(), found) {
            // If the hub does not answer, or no longer knows the model, the cache is still used.
            (Err(Error::Hub { why, .. }), Some(found)) if why.is_of_the_hub() => return Ok(found),
            (downloaded, _) => downloaded?,
        }
        self.cached(model, &cache)?.ok_or_else(|| {
            fail(HubError::Broken { why: format!("what was downloaded is not in {}", self.cache.display()) })
        })
    }

    /// The file or folder of a model, if all required files are in the cache.
    fn cached(&self, model: &ModelName, cache: &CacheRepo) -> Result<Option<PathBuf>> {
        if let Some(file) = &model.file {
            return Ok(cache.get(file));
        }
        let Some(config) = cache.get(CONFIG) else { return Ok(None) };
        let shards = match cache.get(INDEX) {
            Some(index) => shard_files(&index)?,
            None => vec![SINGLE.into()],
        };
        let whole = shards.iter().all(|shard| cache.get(shard).is_some());
        Ok(config.parent().filter(|_| whole).map(Path::to_path_buf))
    }

    /// The error for an answer of the hub.
    fn why(&self, error: &ApiError, cache: &CacheRepo) -> HubError {
        let endpoint = self.endpoint.clone();
        // The part of a file that is there already is longer than the file, or as long.
        let wrong_part = || {
            let blob = cache.blob_path("part");
            HubError::WrongPart { folder: blob.parent().unwrap_or(&self.cache).into() }
        };
        match error {
            ApiError::InvalidResume => wrong_part(),
            ApiError::LockAcquisition(lock) => HubError::Busy { lock: lock.clone() },
            ApiError::RequestError(error) => match **error {
                ureq::Error::StatusCode(401) => HubError::Unauthorised { with_token: self.token.is_some() },
                ureq::Error::StatusCode(403) => HubError::Forbidden,
                ureq::Error::StatusCode(404) => HubError::NoRepository,
                ureq::Error::StatusCode(416) => wrong_part(),
                ureq::Error::StatusCode(status) => {
                    HubError::Broken { why: format!("{endpoint} answers with status {status}") }
                }
                _ => HubError::Unreachable { endpoint, why: error.to_string() },
            },
            other => HubError::Broken { why: other.to_string() },
        }
    }
}

/// One download.
struct Remote<'a, 'p> {
    hub: &'a Hub,
    model: &'a ModelName,
    cache: &'a CacheRepo,
    repo: ApiRepo,
    progress: &'p mut dyn FnMut(Download<'_>),
}

impl Remote<'_, '_> {
    fn fail(&self, why: HubError) -> Error {
        Error::Hub { model: self.model.to_string(), why }
    }

    fn download(&mut self) -> Result<()> {
        let info = self.repo.info().map_err(|error| self.fail(self.hub.why(&error, self.cache)))?;
        let commit = info.sha;
        let files: Vec<String> = info.siblings.into_iter().map(|file| file.rfilename).collect();
        let has = |name: &str| files.iter().any(|file| file == name);
        let ggufs = || {
            let found: Vec<&str> =
                files.iter().map(String::as_str).filter(|file| file.ends_with(".gguf")).collect();
            if found.is_empty() {
                "no GGUF file either".into()
            } else {
                format!("it has {}", found.join(", "))
            }
        };
        if let Some(file) = self.model.file.clone() {
            if !has(&file) {
                return Err(self.fail(HubError::NoFile { file, hint: ggufs() }));
            }
            return self.get(&commit, &file).map(drop);
        }
        for needed in [CONFIG, if has(INDEX) { INDEX } else { SINGLE }] {
            if !has(needed) {
                let file = needed.into();
                let name = format!("{}; name one as {}:FILE", ggufs(), self.model.repository);
                return Err(self.fail(HubError::NoFile { file, hint: name }));
            }
        }
        for file in OTHERS.into_iter().filter(|file| has(file)) {
            self.get(&commit, file)?;
        }
        let config = self.get(&commit, CONFIG)?;
        // Checked before gigabytes of weights are downloaded for nothing.
        let metadata = Metadata::Config(read_json(&config, "an object")?);
        Config::judge(&metadata).map_err(|error| error.in_file(Some(&config)))?;
        let mut weights = vec![SINGLE.to_string()];
        if has(INDEX) {
            weights = shard_files(&self.get(&commit, INDEX)?)?;
        }
        weights.iter().try_for_each(|file| self.get(&commit, file).map(drop))
    }

    /// The file of a commit, downloaded if it is not there. Files get their names only when they are complete.
    fn get(&mut self, commit: &str, file: &str) -> Result<PathBuf> {
        let present = self.cache.pointer_path(commit).join(file);
        if present.exists() {
            if self.cache.get(file).is_none() {
                let to_error = |error| warpsmith::Error::io(&present, "noting the version of", &error);
                self.cache.create_ref(commit).map_err(to_error)?;
            }
            return Ok(present);
        }
        let mut attempt = 1;
        let (path, total) = loop {
            let mut total = 0;
            let watch = Watch { tell: &mut *self.progress, file: file.into(), bytes: 0, total: &mut total };
            // Not repeated by `hf-hub`, which then appends the whole file to the part that is there.
            match self.repo.download_with_progress(file, watch) {
                Ok(path) => break (path, total),
                Err(error) if attempt < ATTEMPTS && may_pass(&error) => {
                    std::thread::sleep(WAIT * attempt);
                    attempt += 1;
                }
                Err(error) => return Err(self.why_not(file, &error)),
            }
        };
        // Servers may send a different range than the one requested.
        let to_error = |error| warpsmith::Error::io(&path, "reading the size of", &error);
        let got = path.metadata().map_err(to_error)?.len();
        if got != total {
            // Otherwise it would count as complete the next time.
            let blob = path.canonicalize().unwrap_or_else(|_| path.clone());
            for unusable in [&blob, &path] {
                let _ = std::fs::remove_file(unusable);
            }
            return Err(self.fail(HubError::WrongSize { file: file.into(), expected: total, got }));
        }
        Ok(path)
    }

    /// Why a file that the repository lists cannot be downloaded.
    fn why_not(&self, file: &str, error: &ApiError) -> Error {
        self.fail(match self.hub.why(error, self.cache) {
            HubError::NoRepository => HubError::NoFile {
                file: file.into(),
                hint: "it was listed a moment ago, or an index names it".into(),
            },
            other => other,
        })
    }
}

/// Whether another attempt may succeed.
fn may_pass(error: &ApiError) -> bool {
    match error {
        ApiError::IoError(_) => true,
        ApiError::RequestError(error) => match **error {
            ureq::Error::StatusCode(status) => matches!(status, 408 | 429 | 500..),
            _ => true,
        },
        _ => false,
    }
}

/// Tells about the download of a file.
struct Watch<'p> {
    tell: &'p mut dyn FnMut(Download<'_>),
    file: String,
    bytes: u64,
    total: &'p mut u64,
}

impl hf_hub::api::Progress for Watch<'_> {
    /// Called again for each attempt.
    fn init(&mut self, size: usize, _: &str) {
        (self.bytes, *self.total) = (0, size as u64);
        self.update(0);
    }

    fn update(&mut self, size: usize) {
        self.bytes += size as u64;
        (self.tell)(Download { file: &self.file, bytes: self.bytes, total: *self.total });
    }

    fn finish(&mut self) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_mean_what_they_mean_to_the_hub_s_own_programs() {
        let of = |variables: &[(&str, &str)]| {
            let find = |name: &str| variables.iter().find(|(set, _)| *set == name).map(|(_, to)| to.into());
            Hub::of(&find)
        };
        for (value, offline) in [("1", true), ("on", true), ("Yes", true), ("TRUE", true), ("0", false)] {
            assert_eq!(of(&[("HOME", "/h"), ("HF_HUB_OFFLINE", value)]).unwrap().offline, offline, "{value}");
        }
        for value in ["false", "no", "off", "2"] {
            assert!(!of(&[("HOME", "/h"), ("HF_HUB_OFFLINE", value)]).unwrap().offline, "{value}");
        }
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("token"), "hf_file\n").unwrap();
        let home = ("HF_HOME", folder.path().to_str().unwrap());
        let hub = of(&[("HOME", "/h"), home]).unwrap();
        assert_eq!((hub.cache, hub.token.as_deref()), (folder.path().join("hub"), Some("hf_file")));
        let hub = of(&[home, ("HF_HUB_CACHE", "/big"), ("HF_TOKEN", " hf_set\n")]).unwrap();
        assert_eq!((hub.cache, hub.token.as_deref()), ("/big".into(), Some("hf_set")));
        let hub = of(&[home, ("HF_HUB_CACHE", "/big"), ("HF_TOKEN", " ")]).unwrap();
        assert_eq!(hub.token.as_deref(), Some("hf_file"), "of the home, not beside the cache");
        assert_eq!(of(&[("HF_HUB_CACHE", "/big")]).unwrap().cache, Path::new("/big"));
        assert_eq!(of(&[("HOME", "/h")]).unwrap().cache, Path::new("/h/.cache/huggingface/hub"));
        assert!(of(&[]).unwrap_err().to_string().contains("HF_HUB_CACHE"));
    }

    #[test]
    fn a_download_of_somebody_else_is_named() {
        let hub = Hub { endpoint: String::new(), cache: "/cache".into(), token: None, offline: false };
        let cache = Cache::new(hub.cache.clone()).repo(Repo::model("tiny/llama".into()));
        let told = hub.why(&ApiError::LockAcquisition("/cache/a.lock".into()), &cache).to_string();
        assert!(told.contains("another download") && told.contains("/cache/a.lock"), "{told}");
        let told = hub.why(&ApiError::InvalidResume, &cache).to_string();
        assert!(told.contains("delete /cache/models--tiny--llama/blobs/*.part"), "{told}");
    }

    #[test]
    fn names_and_paths_are_told_apart() {
        let name = |text: &str| ModelName::parse(text).map(|name| (name.repository, name.file));
        assert_eq!(name("Qwen/Qwen3-0.6B"), Some(("Qwen/Qwen3-0.6B".into(), None)));
        let gguf = "unsloth/Qwen3-0.6B-GGUF:sub/Qwen3-0.6B-Q4_K_M.gguf";
        assert_eq!(ModelName::parse(gguf).unwrap().to_string(), gguf);
        for path in [
            "model.gguf",
            "/no/such/model.gguf",
            "./Qwen/Qwen3",
            "../Qwen3",
            "models/model.gguf",
            "models/model.safetensors",
            "a/b/c",
            "Qwen/",
            "/Qwen3",
            "Qwen/Qwen3:",
            "Qwen/Qwen3:file.bin",
            "Qwen/Qwen3:../file.gguf",
            "Qwen/Qwen3:/file.gguf",
            "Qwen/Q wen",
        ] {
            assert_eq!(name(path), None, "{path}");
        }
    }
}
