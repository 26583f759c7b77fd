//! A tensor in a file, and ways to read it.

use super::error::{Error, Result};
use super::{Checkpoint, Encoding, Quantization, convert};
use std::ops::Range;
use std::path::Path;
use warpsmith::tensor::MappedFile;
use warpsmith::{DType, Tensor};

/// What a file says about a tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    pub(super) name: String,
    pub(super) encoding: Encoding,
    pub(super) shape: Vec<usize>,
    pub(super) range: Range<usize>,
    /// Index of its file among those of the checkpoint.
    pub(super) file: usize,
}

impl TensorInfo {
    /// Its name in the file.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The type of its elements.
    pub fn encoding(&self) -> Encoding {
        self.encoding
    }

    /// Its sizes in row-major order: elements of the last one lie next to each other. (GGUF writes them the other way round.)
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Number of elements.
    pub fn numel(&self) -> usize {
        self.shape.iter().product()
    }

    /// Its bytes, counted from the start of the file.
    pub fn range(&self) -> Range<usize> {
        self.range.clone()
    }
}

/// A tensor of a [`Checkpoint`]. It derefs to its [`TensorInfo`].
#[derive(Debug, Clone, Copy)]
pub struct StoredTensor<'a> {
    pub(super) checkpoint: &'a Checkpoint,
    pub(super) info: &'a TensorInfo,
}

impl std::ops::Deref for StoredTensor<'_> {
    type Target = TensorInfo;

    fn deref(&self) -> &TensorInfo {
        self.info
    }
}

impl<'a> StoredTensor<'a> {
    /// The file it is in.
    pub fn file(&self) -> &'a Path {
        self.checkpoint.file_of(self.info).0
    }

    /// Refuses a file that has been cut since it was mapped: to read what is gone would end the process.
    fn file_as_long_as_it_was(&self) -> Result<&'a MappedFile> {
        let file = self.checkpoint.file_of(self.info).1;
        file.check_length()?;
        Ok(file)
    }

    /// Its bytes as they are in the file, not copied.
    pub fn bytes(&self) -> &'a [u8] {
        &self.checkpoint.file_of(self.info).1.bytes()[self.info.range.clone()]
    }

    /// The format of its blocks, if it has any.
    pub fn quantization(&self) -> Option<Quantization> {
        match self.info.encoding {
            Encoding::Quantized(quantization) => Some(quantization),
            Encoding::Plain(_) => None,
        }
    }

    /// Its bytes as a tensor `[rows, bytes of a row]` of u8 over the mapped file, not copied: what ops on quantised weights
    /// take. All sizes but the last one count as rows.
    pub fn raw(&self) -> Result<Tensor> {
        let row = self.info.shape.last().copied().unwrap_or(1);
        let row = row / self.info.encoding.block_len() * self.info.encoding.block_bytes();
        let rows = self.info.shape.iter().rev().skip(1).product();
        let file = self.file_as_long_as_it_was()?;
        Ok(file.tensor(self.info.range.start, &[rows, row], DType::U8)?)
    }

    /// A read-only tensor over the mapped file, not copied. `None` if the elements are quantised, or do not lie at a multiple
    /// of their size.
    pub fn mapped(&self) -> Option<Tensor> {
        let Encoding::Plain(dtype) = self.info.encoding else { return None };
        self.checkpoint.file_of(self.info).1.tensor(self.info.range.start, &self.info.shape, dtype).ok()
    }

    /// Writes all elements as f32, in row-major order. Quantised elements get the nearest f32 to their exact value.
    ///
    /// # Errors
    /// If `out` has another number of elements, or these are not floating-point numbers.
    pub fn dequantize_into(&self, out: &mut [f32]) -> Result<()> {
        if out.len() != self.info.numel() {
            let (expected, got) = (format!("{} elements", self.info.numel()), out.len().to_string());
            return Err(self.wrong("place to dequantise into", expected, got));
        }
        self.refuse_integers(DType::F32)?;
        self.file_as_long_as_it_was()?;
        convert::to_f32(self.info.encoding, self.bytes(), out);
        Ok(())
    }

    /// A tensor on the CPU with elements of type `dtype`. It shares the memory of the file where type and alignment allow;
    /// else elements are dequantised, then rounded (nearest, ties to even).
    ///
    /// # Errors
    /// If elements would have to be converted and are not floating-point numbers, or there is no memory.
    pub fn to_tensor(&self, dtype: DType) -> Result<Tensor> {
        self.file_as_long_as_it_was()?;
        if self.info.encoding == Encoding::Plain(dtype) {
            if let Some(mapped) = self.mapped() {
                return Ok(mapped);
            }
            return Ok(Tensor::from_bytes(self.bytes(), &self.info.shape, dtype, warpsmith::Device::Cpu)?);
        }
        self.refuse_integers(dtype)?;
        Ok(convert::to_tensor(self.info.encoding, self.bytes(), &self.info.shape, dtype)?)
    }

    fn refuse_integers(&self, wanted: DType) -> Result<()> {
        let is_float = |encoding| !matches!(encoding, Encoding::Plain(dtype) if !dtype.is_float());
        if is_float(self.info.encoding) && wanted.is_float() {
            return Ok(());
        }
        let expected = format!("floating-point numbers, to be read as {wanted}");
        Err(self.wrong("elements", expected, self.info.encoding.name()))
    }

    fn wrong(&self, part: &str, expected: impl Into<String>, got: impl Into<String>) -> Error {
        let what = format!("tensor `{}`: {part}", super::error::shown(&self.info.name));
        Error::format(self.file(), what, expected, got)
    }
}
