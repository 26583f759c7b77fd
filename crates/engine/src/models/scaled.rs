//! Tensors as the loader reads them: 8-bit numbers multiplied by their scales, with a record of which tensors were
//! read.

use super::loader::Loader;
use crate::error::{Error, Result};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use warpsmith::op::survey;
use warpsmith::tensor::Element;
use warpsmith::{DType, Device, Stream, Tensor};

/// Tensors that a file may have although nothing reads them: frequencies and masks that old versions of transformers
/// saved, which follow from the configuration, and scales of activations, which are not rounded to 8 bits here.
const WITHOUT_EFFECT: [&str; 8] = [
    "rotary_emb.inv_freq",
    "attn_rot_embd.weight",
    ".attn.bias",
    ".attn.masked_bias",
    ".input_scale",
    ".input_scale_ub",
    ".q_scale",
    ".prob_scale",
];

impl Loader<'_> {
    /// An error about a tensor, with the file it is in.
    pub(super) fn wrong(&self, name: &str, expected: impl Into<String>, got: impl ToString) -> Error {
        Error::tensor(name, expected, got).in_file(self.source.file(name))
    }

    /// A tensor was read.
    pub(super) fn note(&self, name: &str) {
        self.read.borrow_mut().insert(name.into());
    }

    /// An error if the file has a tensor that was not read: the model that it holds would compute something else.
    pub(super) fn refuse_unread(&self) -> Result<()> {
        let read = self.read.borrow();
        let unread =
            |name: &String| !read.contains(name) && !WITHOUT_EFFECT.iter().any(|end| name.ends_with(end));
        let mut names: Vec<String> = self.source.names().into_iter().filter(unread).collect();
        names.sort();
        let Some(first) = names.first() else { return Ok(()) };
        let expected = format!("a part of {}, as the configuration describes it", self.config.architecture);
        let got = match names.len() {
            1 => "one that it has no use for".into(),
            count => format!("one that it has no use for, nor for {} others", count - 1),
        };
        Err(self.wrong(first, expected, got))
    }

    /// A tensor on the CPU in this type. If it has scales, it is multiplied by them.
    pub(super) fn numbers_as(&self, name: &str, dtype: DType) -> Result<Tensor> {
        self.note(name);
        let plain = || self.source.tensor(name, dtype);
        let Some(stored) = self.source.stored_dtype(name).filter(|stored| is_8_bits(*stored)) else {
            return plain();
        };
        let base = name.strip_suffix(".weight").unwrap_or(name);
        let scale_names = ["weight_scale_inv", "weight_scale"].map(|scale| format!("{base}.{scale}"));
        let Some(scale_name) = scale_names.iter().find(|name| self.has(name)) else {
            // Numbers of 8 bits need no scales, unless the model was quantised.
            return match self.config.quantization {
                None => plain(),
                Some(_) => {
                    Err(self.wrong(&scale_names[0], format!("the scales of {name}"), "no such tensor"))
                }
            };
        };
        self.note(scale_name);
        if survey::is_running() {
            return plain();
        }
        let shape = self.source.shape(name).unwrap_or_default();
        let scales = self.scales(scale_name, &shape)?;
        let bytes = self.source.tensor(name, stored)?.view().to_bytes()?;
        expand(&bytes, stored, &shape, &scales, dtype)
    }

    /// The scales of a matrix of this shape.
    fn scales(&self, name: &str, of: &[usize]) -> Result<Scales> {
        let shape = self.source.shape(name).unwrap_or_default();
        let (rows, columns) = rows_and_columns(of);
        let block = self.config.quantization.and_then(|quantization| quantization.block);
        let blocks = block.map(|[height, width]| [rows.div_ceil(height), columns.div_ceil(width)]);
        let (block, width) = match (&shape[..], block) {
            ([] | [1] | [1, 1], _) => ([rows.max(1), columns.max(1)], 1),
            (&[count] | &[count, 1], _) if count == rows => ([1, columns.max(1)], 1),
            (&[down, across], Some(block)) if blocks == Some([down, across]) => (block, across),
            _ => {
                let blocks =
                    blocks.map_or(String::new(), |blocks| format!(", or shape {blocks:?} for blocks"));
                let expected = format!("one scale, or one for each of {rows} rows{blocks}");
                return Err(self.wrong(name, expected, format!("shape {shape:?}")));
            }
        };
        let values: Vec<f32> = self.source.tensor(name, DType::F32)?.to_vec()?;
        if let Some(wrong) = values.iter().find(|scale| !(scale.is_finite() && **scale >= 0.0)) {
            return Err(self.wrong(name, "finite numbers of at least 0", wrong));
        }
        Ok(Scales { values, block, width })
    }
}

fn is_8_bits(dtype: DType) -> bool {
    [DType::F8E4M3, DType::F8E5M2].contains(&dtype)
}

/// All sizes but the last one count as rows.
fn rows_and_columns(shape: &[usize]) -> (usize, usize) {
    let columns = shape.last().copied().unwrap_or(1);
    (shape.iter().rev().skip(1).product(), columns)
}

/// Factors of the blocks of a matrix, row by row.
struct Scales {
    values: Vec<f32>,
    /// Rows and columns of a block.
    block: [usize; 2],
    /// Blocks next to each other.
    width: usize,
}

/// Numbers of 8 bits times their scales, in f32, then rounded.
fn expand(bytes: &[u8], stored: DType, shape: &[usize], scales: &Scales, dtype: DType) -> Result<Tensor> {
    let number = |byte: usize| stored.read(&[byte as u8]) as f32;
    let numbers: [f32; 256] = std::array::from_fn(number);
    match dtype {
        DType::F16 => {
            rounded(bytes, &numbers, shape, scales, |from, to: &mut [f16]| to.convert_from_f32_slice(from))
        }
        DType::BF16 => {
            rounded(bytes, &numbers, shape, scales, |from, to: &mut [bf16]| to.convert_from_f32_slice(from))
        }
        _ => rounded(bytes, &numbers, shape, scales, |from, to: &mut [f32]| to.copy_from_slice(from)),
    }
}

fn rounded<T: Element + Default>(
    bytes: &[u8],
    numbers: &[f32; 256],
    shape: &[usize],
    scales: &Scales,
    round: impl Fn(&[f32], &mut [T]),
) -> Result<Tensor> {
    let mut tensor = Tensor::empty(shape, T::DTYPE, Device::Cpu)?;
    let (_, columns) = rows_and_columns(shape);
    let (mut wide, mut narrow) = (vec![0f32; columns], vec![T::default(); columns]);
    let [height, width] = scales.block;
    for (row, bytes) in bytes.chunks_exact(columns.max(1)).enumerate() {
        let row_scales = &scales.values[row / height * scales.width..];
        for (block, (from, to)) in bytes.chunks(width).zip(wide.chunks_mut(width)).enumerate() {
            let scale = row_scales[block];
            from.iter().zip(to).for_each(|(from, to)| *to = numbers[usize::from(*from)] * scale);
        }
        round(&wide, &mut narrow);
        tensor.write(row * columns, &narrow, &Stream::Host)?;
    }
    Ok(tensor)
}
