//! A model's files as one collection of tensors.

use super::error::{Error, Result, shown};
use super::json::Entries;
use super::{Keys, Metadata, StoredTensor, TensorInfo, gguf, safetensors};
use serde::Deserialize;
use std::collections::HashMap;
use std::path::{Component, Path, PathBuf};
use warpsmith::tensor::MappedFile;

/// The limit of JSON files beside the weights. The largest indexes have some ten MB.
const MAX_JSON: u64 = 256 << 20;

/// In which format weights are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Format {
    Gguf,
    Safetensors,
}

/// The weights of a model: the tensors of one file or of several, and what the files say about the model.
pub struct Checkpoint {
    path: PathBuf,
    format: Format,
    metadata: Metadata,
    files: Vec<(PathBuf, MappedFile)>,
    tensors: Vec<TensorInfo>,
    index: HashMap<String, usize>,
}

impl Checkpoint {
    /// Opens a GGUF file, a safetensors file, or a folder with `config.json` and `model.safetensors` or its shards with
    /// `model.safetensors.index.json`. Files of more than 16 MiB are mapped: only their headers are read. As long as the
    /// checkpoint or a tensor over its memory lives, they must not be written to. One that has become shorter is an error
    /// where tensors of it are asked for; to shorten one that is being computed with ends the process. A new file is
    /// put in place of an old one by renaming it.
    ///
    /// Names of models on a hub are not understood here: whoever downloads one passes its folder.
    pub fn open(path: impl AsRef<Path>) -> Result<Checkpoint> {
        Checkpoint::open_judged(path.as_ref(), |_| Ok(()))
    }

    /// Gives the memory of all that was read back to the system. What is used again is read again.
    pub fn release_memory(&self) {
        self.files.iter().for_each(|(_, file)| file.release());
    }

    /// As [`Checkpoint::open`]; `judge` sees what the files say about the model before any tensor is looked at, and may refuse
    /// it.
    pub(crate) fn open_judged<E: From<Error>>(
        path: &Path,
        judge: impl Fn(&Metadata) -> Result<(), E>,
    ) -> Result<Checkpoint, E> {
        if path.is_dir() {
            let metadata = folder_metadata(path)?;
            judge(&metadata)?;
            return Ok(Checkpoint::open_folder(path, metadata)?);
        }
        let file = open_mapped(path)?;
        if gguf::recognize(file.bytes()) {
            let judge = |keys: &Keys| judge(&Metadata::Gguf(keys.clone()));
            let header = gguf::parse_judged(file.bytes(), path, judge)?;
            if let Some(parts) = header.keys.get::<u64>("split.count")?.filter(|&parts| parts > 1) {
                let got = format!("one of {parts} parts; merge them with llama-gguf-split --merge");
                return Err(Error::format(path, "key `split.count`", "a whole model", got).into());
            }
            let metadata = Metadata::Gguf(header.keys);
            let files = vec![(path.into(), file)];
            return Ok(Checkpoint::new(path, Format::Gguf, metadata, files, header.tensors)?);
        }
        Ok(Checkpoint::open_safetensors(path, file)?)
    }

    fn open_safetensors(path: &Path, file: MappedFile) -> Result<Checkpoint> {
        if path.extension().is_none_or(|extension| extension != "safetensors") {
            let got = file.bytes()[..file.len().min(4)].escape_ascii().to_string();
            return Err(Error::format(path, "first bytes", "GGUF, or a name that ends in .safetensors", got));
        }
        let tensors = safetensors::parse(file.bytes(), path)?.tensors;
        let metadata = Metadata::Config(serde_json::Map::new());
        Checkpoint::new(path, Format::Safetensors, metadata, vec![(path.into(), file)], tensors)
    }

    fn open_folder(folder: &Path, metadata: Metadata) -> Result<Checkpoint> {
        let index = folder.join("model.safetensors.index.json");
        let names = if index.is_file() { shard_names(&index)? } else { Shards::single() };
        let mut files = Vec::with_capacity(names.files.len());
        let mut tensors = Vec::new();
        for (i, name) in names.files.iter().enumerate() {
            let path = folder.join(name);
            let file = open_mapped(&path)?;
            let parsed = safetensors::parse(file.bytes(), &path)?;
            tensors.extend(parsed.tensors.into_iter().map(|tensor| TensorInfo { file: i, ..tensor }));
            files.push((path, file));
        }
        let checkpoint = Checkpoint::new(folder, Format::Safetensors, metadata, files, tensors)?;
        for (tensor, file) in names.tensors {
            let found = checkpoint.index.get(&tensor).map(|&i| checkpoint.tensors[i].file);
            if found != Some(file) {
                let what = format!("tensor `{}`", shown(&tensor));
                let expected = format!("to be in {}, as the index says", names.files[file]);
                let got = found.map_or("in none".to_owned(), |found| format!("in {}", names.files[found]));
                return Err(Error::format(&index, what, expected, got));
            }
        }
        Ok(checkpoint)
    }

    fn new(
        path: &Path,
        format: Format,
        metadata: Metadata,
        files: Vec<(PathBuf, MappedFile)>,
        tensors: Vec<TensorInfo>,
    ) -> Result<Checkpoint> {
        let mut index = HashMap::with_capacity(tensors.len());
        for (i, tensor) in tensors.iter().enumerate() {
            if let Some(first) = index.insert(tensor.name.clone(), i) {
                let what = format!("tensor `{}`", shown(&tensor.name));
                let got = format!("another in {}", files[tensors[first].file].0.display());
                return Err(Error::format(&files[tensor.file].0, what, "one of this name", got));
            }
        }
        Ok(Checkpoint { path: path.into(), format, metadata, files, tensors, index })
    }

    /// The file or folder that was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The format of its files.
    pub fn format(&self) -> Format {
        self.format
    }

    /// What the files say about the model.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// The files with weights.
    pub fn files(&self) -> impl ExactSizeIterator<Item = &Path> {
        self.files.iter().map(|(path, _)| path.as_path())
    }

    /// All tensors in the order of the files.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = StoredTensor<'_>> {
        self.tensors.iter().map(|info| StoredTensor { checkpoint: self, info })
    }

    /// The tensor of this name, if there is one.
    pub fn get(&self, name: &str) -> Option<StoredTensor<'_>> {
        let info = &self.tensors[*self.index.get(name)?];
        Some(StoredTensor { checkpoint: self, info })
    }

    /// The tensor of this name.
    ///
    /// # Errors
    /// If there is none.
    pub fn tensor(&self, name: &str) -> Result<StoredTensor<'_>> {
        self.get(name).ok_or_else(|| Error::missing(&self.path, format!("tensor `{}`", shown(name)), None))
    }

    pub(super) fn file_of(&self, info: &TensorInfo) -> (&Path, &MappedFile) {
        let (path, file) = &self.files[info.file];
        (path, file)
    }
}

impl std::fmt::Debug for Checkpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Checkpoint({}, {} tensors)", self.path.display(), self.tensors.len())
    }
}

/// Smaller files are read: that takes a few milliseconds, and nothing can happen to what was read.
const MAPPED_FROM: u64 = 16 << 20;

/// A file with weights, in memory.
fn open_mapped(path: &Path) -> Result<MappedFile> {
    let size = std::fs::metadata(path).map_or(0, |metadata| metadata.len());
    if size < MAPPED_FROM {
        return Ok(MappedFile::read(path)?);
    }
    // SAFETY: not to change files of a model that is in use is asked of whoever opens one, see [`Checkpoint::open`]: models
    // can be larger than the memory, and a copy of all weights would double what packed ones take.
    Ok(unsafe { MappedFile::map(path) }?)
}

/// What the `config.json` of a folder says.
fn folder_metadata(folder: &Path) -> Result<Metadata> {
    let config = folder.join("config.json");
    if !config.is_file() {
        let hint = "a folder of safetensors has one; a GGUF file is named itself".to_owned();
        return Err(Error::missing(folder, "file config.json", Some(hint)));
    }
    Ok(Metadata::Config(read_json(&config, "an object")?))
}

/// Files with weights, and for each tensor of the index the file it should be in.
struct Shards {
    files: Vec<String>,
    tensors: Vec<(String, usize)>,
}

impl Shards {
    fn single() -> Shards {
        Shards { files: vec!["model.safetensors".into()], tensors: Vec::new() }
    }
}

#[derive(Deserialize)]
struct Index {
    weight_map: Entries<String>,
}

/// The files with weights that an index names.
#[cfg(feature = "hub")]
pub(crate) fn shard_files(index: &Path) -> Result<Vec<String>> {
    Ok(shard_names(index)?.files)
}

fn shard_names(index: &Path) -> Result<Shards> {
    let Index { weight_map: Entries(entries) } = read_json(index, "an object with the object `weight_map`")?;
    let mut files: Vec<String> = entries.iter().map(|(_, file)| file.clone()).collect();
    files.sort();
    files.dedup();
    for file in &files {
        // A downloaded index must not reach for files elsewhere.
        let mut parts = Path::new(file).components();
        if !matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None)) {
            return Err(Error::format(index, "file of `weight_map`", "a name without folders", shown(file)));
        }
    }
    let number = |file: &String| files.binary_search(file).expect("it was collected from here");
    let tensors = entries.into_iter().map(|(tensor, file)| (tensor, number(&file))).collect();
    Ok(Shards { files, tensors })
}

/// Reads a JSON file.
pub(crate) fn read_json<T: serde::de::DeserializeOwned>(path: &Path, expected: &str) -> Result<T> {
    serde_json::from_slice(&read_limited(path)?)
        .map_err(|error| Error::format(path, "content", expected, shown(&error.to_string())))
}

/// Reads a file of a sensible size.
pub(crate) fn read_limited(path: &Path) -> Result<Vec<u8>> {
    let failed = |doing: &str, error: &std::io::Error| warpsmith::Error::io(path, doing, error);
    let size = std::fs::metadata(path).map_err(|error| failed("reading its size", &error))?.len();
    if size > MAX_JSON {
        return Err(Error::format(path, "size", format!("at most {MAX_JSON} bytes"), size.to_string()));
    }
    Ok(std::fs::read(path).map_err(|error| failed("reading", &error))?)
}
