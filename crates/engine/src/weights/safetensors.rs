//! The safetensors format: the length of a JSON header, the header, the data of the tensors.

mod header;

use super::error::{Error, Result, shown};
use super::{Encoding, TensorInfo};
use header::{Described, Listed};
use std::path::Path;
use warpsmith::DType;

/// The limit that the reference implementation has.
const MAX_HEADER: usize = 100_000_000;
const LENGTH_BYTES: usize = 8;

/// What the header of a safetensors file says.
#[derive(Debug, Clone)]
pub struct Header {
    /// The texts under `__metadata__`.
    pub metadata: Vec<(String, String)>,
    /// The tensors in the order of their data.
    pub tensors: Vec<TensorInfo>,
}

/// Reads the header of a safetensors file and checks it against all of the file's bytes. `file` is for messages.
pub fn parse(bytes: &[u8], file: &Path) -> Result<Header> {
    let (header, data_start) = header_of(bytes, file)?;
    let Listed { metadata, mut tensors } = serde_json::from_slice(header).map_err(|error| {
        let expected = "a JSON object that describes each tensor once";
        Error::format(file, "header", expected, shown(&error.to_string()))
    })?;
    // The sort is stable and by both ends, so that empty tensors stand before the one that starts at the same place.
    tensors.sort_by_key(|(_, entry)| entry.data_offsets);
    let data = bytes.len() - data_start;
    let mut next = 0;
    let mut placed = Vec::with_capacity(tensors.len());
    for (name, entry) in tensors {
        let tensor = place(name, entry, next, data, data_start, file)?;
        next = tensor.range.end - data_start;
        placed.push(tensor);
    }
    if next != data {
        let (expected, got) = (format!("{next} bytes, as the tensors have"), data.to_string());
        return Err(Error::format(file, "data after the header", expected, got));
    }
    Ok(Header { metadata, tensors: placed })
}

/// The bytes of the header, and where the data starts.
fn header_of<'a>(bytes: &'a [u8], file: &Path) -> Result<(&'a [u8], usize)> {
    let Some((length, rest)) = bytes.split_first_chunk::<LENGTH_BYTES>() else {
        let got = format!("a file of {}", bytes.len());
        return Err(Error::format(file, "length of the header", "8 bytes", got));
    };
    let length = u64::from_le_bytes(*length);
    let most = rest.len().min(MAX_HEADER);
    match usize::try_from(length) {
        Ok(length) if length <= most => Ok((&rest[..length], LENGTH_BYTES + length)),
        _ => Err(Error::format(file, "length of the header", format!("at most {most}"), length.to_string())),
    }
}

/// Checks a tensor that must start at `next` of `data` bytes.
fn place(
    name: String,
    entry: Described,
    next: usize,
    data: usize,
    data_start: usize,
    file: &Path,
) -> Result<TensorInfo> {
    let what = || format!("tensor `{}`", shown(&name));
    let Some(dtype) = dtype(&entry.dtype) else {
        return Err(Error::UnsupportedType {
            file: file.into(),
            tensor: shown(&name),
            found: shown(&entry.dtype),
            supported: SUPPORTED.map(|(name, _)| name).join(", "),
        });
    };
    let (begin, end) = entry.data_offsets;
    if begin != next {
        let expected = format!("data from byte {next} on, where the tensor before it ends");
        return Err(Error::format(file, what(), expected, begin.to_string()));
    }
    if end < begin || end > data {
        let expected = format!("data that ends between {begin} and {data}");
        return Err(Error::format(file, what(), expected, end.to_string()));
    }
    let encoding = Encoding::Plain(dtype);
    if encoding.bytes_of(&entry.shape.0) != Some(end - begin) {
        let expected = format!("as many bytes as shape {:?} of {encoding} has", entry.shape.0);
        return Err(Error::format(file, what(), expected, (end - begin).to_string()));
    }
    Ok(TensorInfo {
        name,
        encoding,
        shape: entry.shape.0,
        range: data_start + begin..data_start + end,
        file: 0,
    })
}

const SUPPORTED: [(&str, DType); 9] = [
    ("F32", DType::F32),
    ("F16", DType::F16),
    ("BF16", DType::BF16),
    ("F8_E4M3", DType::F8E4M3),
    ("F8_E5M2", DType::F8E5M2),
    ("I64", DType::I64),
    ("I32", DType::I32),
    ("U8", DType::U8),
    ("BOOL", DType::Bool),
];

fn dtype(name: &str) -> Option<DType> {
    SUPPORTED.into_iter().find(|(known, _)| *known == name).map(|(_, dtype)| dtype)
}
