//! The GGUF format, versions 2 and 3: a header of keys, a list of tensors, their data.

mod reader;

use super::error::{Error, Result, shown};
use super::metadata::Keys;
use super::value::{Array, Strings, Value, ids};
use super::{Encoding, Quantization, TensorInfo};
use reader::Reader;
use std::collections::HashSet;
use std::path::Path;
use warpsmith::DType;

const MAGIC: &[u8; 4] = b"GGUF";
const DEFAULT_ALIGNMENT: usize = 32;
const MAX_DIMENSIONS: u32 = 4;
/// Far more than any model has. Without a limit a file of tiny keys would take several times its size in memory.
const MAX_KEYS: usize = 1 << 16;
const MAX_TENSORS: usize = 1 << 20;
/// The least a key takes: the length of its name, its type, a value of one byte.
const KEY_BYTES: usize = 8 + 4 + 1;
/// The least a tensor takes: the length of its name, its number of dimensions, its type and its offset.
const TENSOR_BYTES: usize = 8 + 4 + 4 + 8;

const TYPE_BOOL: u32 = 7;
const TYPE_STRING: u32 = 8;
const TYPE_ARRAY: u32 = 9;

/// What the header of a GGUF file says.
#[derive(Debug, Clone)]
pub struct Header {
    /// Version of the format.
    pub version: u32,
    /// The keys.
    pub keys: Keys,
    /// The tensors in the order of the file, with their bytes in the file.
    pub tensors: Vec<TensorInfo>,
}

/// Whether a file starts as GGUF files do.
pub fn recognize(bytes: &[u8]) -> bool {
    bytes.starts_with(MAGIC)
}

/// Reads the header of a GGUF file and checks it against all of the file's bytes. `file` is for messages.
///
/// Bytes after the last tensor are left alone, as other readers do.
pub fn parse(bytes: &[u8], file: &Path) -> Result<Header> {
    parse_judged(bytes, file, |_| Ok(()))
}

/// As [`parse`]; `judge` sees the keys before anything else is looked at, and may refuse the file.
pub(super) fn parse_judged<E: From<Error>>(
    bytes: &[u8],
    file: &Path,
    judge: impl FnOnce(&Keys) -> Result<(), E>,
) -> Result<Header, E> {
    let mut reader = Reader::new(bytes, file);
    let magic = reader.take(4, || "magic bytes".into())?;
    if magic != MAGIC {
        let got = magic.escape_ascii().to_string();
        return Err(Error::format(file, "magic bytes", "GGUF", got).into());
    }
    let version = reader.u32(|| "version".into())?;
    match version {
        2 | 3 => {}
        _ if [2, 3].contains(&version.swap_bytes()) => {
            return Err(Error::format(file, "byte order", "little-endian", "big-endian").into());
        }
        _ => return Err(Error::format(file, "version", "2 or 3", version.to_string()).into()),
    }
    let tensors = reader.count(TENSOR_BYTES, MAX_TENSORS, || "number of tensors".into())?;
    let keys = reader.count(KEY_BYTES, MAX_KEYS, || "number of keys".into())?;
    let keys = read_keys(&mut reader, keys)?;
    judge(&keys)?;
    let alignment = alignment(&keys)?;
    let tensors = read_tensors(&mut reader, tensors, alignment)?;
    Ok(Header { version, keys, tensors })
}

fn read_keys(reader: &mut Reader<'_>, count: usize) -> Result<Keys> {
    let mut keys = Keys::new(reader.file);
    for i in 0..count {
        let key = reader.string(|| format!("name of key {i}"))?.to_owned();
        let what = || format!("key `{}`", shown(&key));
        let kind = reader.u32(what)?;
        let value = read_value(reader, kind, &what)?;
        if keys.value(&key).is_some() {
            return Err(Error::format(reader.file, what(), "one value", "a second one"));
        }
        keys.insert(key, value);
    }
    Ok(keys)
}

fn read_value(reader: &mut Reader<'_>, kind: u32, what: &dyn Fn() -> String) -> Result<Value> {
    macro_rules! read {
        ($($variant:ident),*) => {
            match kind {
                $(ids::$variant => Value::$variant(reader.number(what)?),)*
                TYPE_BOOL => Value::Bool(reader.bool(what)?),
                TYPE_STRING => Value::String(reader.string(what)?.to_owned()),
                TYPE_ARRAY => Value::Array(read_array(reader, what)?),
                _ => return Err(Error::format(reader.file, what(), "a type from 0 to 12", kind.to_string())),
            }
        };
    }
    Ok(read!(U8, I8, U16, I16, U32, I32, F32, U64, I64, F64))
}

fn read_array(reader: &mut Reader<'_>, what: &dyn Fn() -> String) -> Result<Array> {
    let kind = reader.u32(what)?;
    macro_rules! read {
        ($($variant:ident),*) => {
            match kind {
                $(ids::$variant => Array::$variant(reader.numbers(what)?),)*
                TYPE_BOOL => {
                    let count = reader.count(1, usize::MAX, what)?;
                    Array::Bool((0..count).map(|_| reader.bool(what)).collect::<Result<_>>()?)
                }
                TYPE_STRING => Array::String(read_strings(reader, what)?),
                TYPE_ARRAY => return Err(Error::format(reader.file, what(), "an array of plain values", "an array of arrays")),
                _ => {
                    let expected = "an array with a type of elements from 0 to 12";
                    return Err(Error::format(reader.file, what(), expected, kind.to_string()));
                }
            }
        };
    }
    Ok(read!(U8, I8, U16, I16, U32, I32, F32, U64, I64, F64))
}

fn read_strings(reader: &mut Reader<'_>, what: &dyn Fn() -> String) -> Result<Strings> {
    // Each string takes at least the eight bytes of its length.
    let count = reader.count(8, usize::MAX, what)?;
    let mut strings = Strings::with_capacity(count);
    for i in 0..count {
        strings.push(reader.string(|| format!("{}, string {i}", what()))?);
    }
    Ok(strings)
}

fn alignment(keys: &Keys) -> Result<usize> {
    let key = "general.alignment";
    match keys.value(key) {
        None => Ok(DEFAULT_ALIGNMENT),
        Some(Value::U32(n)) if n.is_power_of_two() => Ok(*n as usize),
        Some(other) => {
            let got = format!("{} {other}", other.type_name());
            Err(Error::format(keys.file(), format!("key `{key}`"), "a power of two as u32", got))
        }
    }
}

/// A tensor as it stands in the header, before its place in the file is known.
struct Listed {
    name: String,
    encoding: Encoding,
    shape: Vec<usize>,
    bytes: usize,
    /// From the start of the data.
    offset: u64,
}

fn read_tensors(reader: &mut Reader<'_>, count: usize, alignment: usize) -> Result<Vec<TensorInfo>> {
    let file = reader.file;
    let mut listed = Vec::with_capacity(count);
    for i in 0..count {
        listed.push(read_listed(reader, i)?);
    }
    let mut names = HashSet::with_capacity(count);
    if let Some(twice) = listed.iter().find(|tensor| !names.insert(tensor.name.as_str())) {
        let what = format!("tensor `{}`", shown(&twice.name));
        return Err(Error::format(file, what, "one of this name", "a second one"));
    }
    drop(names);
    let too_large = || Error::format(file, "data of the tensors", "sizes that can be addressed", "more");
    let start = reader.position().checked_next_multiple_of(alignment).ok_or_else(too_large)?;
    let mut next = 0usize;
    let mut tensors = Vec::with_capacity(count);
    for Listed { name, encoding, shape, bytes, offset } in listed {
        let what = || format!("tensor `{}`", shown(&name));
        if offset != next as u64 {
            let expected = format!("offset {next}, where the tensor before it ends");
            return Err(Error::format(file, what(), expected, offset.to_string()));
        }
        let begin = start.checked_add(next).ok_or_else(too_large)?;
        let end = begin.checked_add(bytes).ok_or_else(too_large)?;
        if end > reader.len() {
            let expected = format!("its {bytes} bytes up to {end}");
            return Err(Error::format(file, what(), expected, format!("a file of {} bytes", reader.len())));
        }
        next = (next + bytes).checked_next_multiple_of(alignment).ok_or_else(too_large)?;
        tensors.push(TensorInfo { name, encoding, shape, range: begin..end, file: 0 });
    }
    Ok(tensors)
}

fn read_listed(reader: &mut Reader<'_>, i: usize) -> Result<Listed> {
    let file = reader.file;
    let name = reader.string(|| format!("name of tensor {i}"))?.to_owned();
    let what = || format!("tensor `{}`", shown(&name));
    let dimensions = reader.u32(what)?;
    if dimensions > MAX_DIMENSIONS {
        let expected = format!("at most {MAX_DIMENSIONS} dimensions");
        return Err(Error::format(file, what(), expected, dimensions.to_string()));
    }
    let mut shape = Vec::with_capacity(dimensions as usize);
    for _ in 0..dimensions {
        let size: u64 = reader.number(what)?;
        // They are signed in the format.
        let fitting = i64::try_from(size).ok().and_then(|size| usize::try_from(size).ok());
        shape.push(fitting.ok_or_else(|| Error::format(file, what(), "sizes below 2^63", size.to_string()))?);
    }
    // The format starts with the size whose elements lie next to each other.
    shape.reverse();
    let id = reader.u32(what)?;
    let Some(encoding) = encoding(id) else {
        return Err(Error::UnsupportedType {
            file: file.into(),
            tensor: shown(&name),
            found: type_name(id),
            supported: SUPPORTED.map(|(_, encoding)| encoding.name()).join(", "),
        });
    };
    let offset = reader.number(what)?;
    let Some(bytes) = encoding.bytes_of(&shape) else {
        let expected = format!(
            "rows of whole blocks of {} {encoding} elements and a size that can be addressed",
            encoding.block_len()
        );
        return Err(Error::format(file, what(), expected, format!("shape {shape:?}")));
    };
    Ok(Listed { name, encoding, shape, bytes, offset })
}

const SUPPORTED: [(u32, Encoding); 18] = [
    (0, Encoding::Plain(DType::F32)),
    (1, Encoding::Plain(DType::F16)),
    (30, Encoding::Plain(DType::BF16)),
    (26, Encoding::Plain(DType::I32)),
    (27, Encoding::Plain(DType::I64)),
    (2, Encoding::Quantized(Quantization::Q4_0)),
    (3, Encoding::Quantized(Quantization::Q4_1)),
    (6, Encoding::Quantized(Quantization::Q5_0)),
    (7, Encoding::Quantized(Quantization::Q5_1)),
    (8, Encoding::Quantized(Quantization::Q8_0)),
    (10, Encoding::Quantized(Quantization::Q2K)),
    (11, Encoding::Quantized(Quantization::Q3K)),
    (12, Encoding::Quantized(Quantization::Q4K)),
    (13, Encoding::Quantized(Quantization::Q5K)),
    (14, Encoding::Quantized(Quantization::Q6K)),
    (20, Encoding::Quantized(Quantization::Iq4Nl)),
    (23, Encoding::Quantized(Quantization::Iq4Xs)),
    (39, Encoding::Quantized(Quantization::Mxfp4)),
];

fn encoding(id: u32) -> Option<Encoding> {
    SUPPORTED.into_iter().find(|(known, _)| *known == id).map(|(_, encoding)| encoding)
}

/// The name of a type that is known but not read, with its id.
fn type_name(id: u32) -> String {
    let name = match id {
        9 => "Q8_1",
        15 => "Q8_K",
        16 => "IQ2_XXS",
        17 => "IQ2_XS",
        18 => "IQ3_XXS",
        19 => "IQ1_S",
        21 => "IQ3_S",
        22 => "IQ2_S",
        24 => "I8",
        25 => "I16",
        28 => "F64",
        29 => "IQ1_M",
        34 => "TQ1_0",
        35 => "TQ2_0",
        _ => return format!("number {id}"),
    };
    format!("{name} (number {id})")
}
