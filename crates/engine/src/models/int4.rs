//! Weights of 4 bits as GPTQ and AWQ pack them, as a source of weights: under the names and with the shapes that they have
//! in a model that is not quantised.
//!
//! No weight changes. Where scales belong to whole runs of 32 inputs, a matrix becomes blocks that `linear_quant` multiplies:
//! `q4_0` if all zero points are 8, otherwise `q8_0`, which holds the differences of quants and zero points. All other
//! matrices are expanded.

use super::config::{Int4Config, Int4Packing};
use super::names::Naming;
use super::source::WeightSource;
use crate::error::{Error, Result};
use half::f16;
use std::path::Path;
use warpsmith::ops::QuantFormat;
use warpsmith::{DType, Device, Tensor};

/// Quants in a word.
const IN_WORD: usize = 8;
/// Where a word of AWQ has each of its eight outputs.
const AWQ_PLACES: [usize; IN_WORD] = [0, 4, 1, 5, 2, 6, 3, 7];
/// Weights of a block.
const BLOCK: usize = 32;

/// A source with packed weights, as one without.
pub(super) struct Unpacked<'a> {
    source: &'a dyn WeightSource,
    config: Int4Config,
}

/// A packed matrix.
struct Packed {
    packing: Int4Packing,
    /// Outputs and inputs.
    n: usize,
    k: usize,
    words: Vec<i32>,
    /// The group of each input.
    groups: Vec<usize>,
    /// Of each group, the scales and zero points of all outputs.
    scales: Vec<f32>,
    zeros: Vec<u8>,
}

impl<'a> Unpacked<'a> {
    pub fn new(source: &'a dyn WeightSource, config: Int4Config) -> Unpacked<'a> {
        Unpacked { source, config }
    }

    /// The name of a packed matrix without its end, if this is the name of one that a model has.
    fn packed_base<'n>(&self, name: &'n str) -> Option<&'n str> {
        let base = name.strip_suffix(".weight")?;
        self.source.shape(&format!("{base}.qweight")).map(|_| base)
    }

    /// Outputs and inputs of a packed matrix.
    fn sizes(&self, base: &str) -> Option<[usize; 2]> {
        match self.source.shape(&format!("{base}.qweight"))?[..] {
            [rows, columns] => match self.config.packing {
                Int4Packing::Gptq | Int4Packing::GptqV2 => Some([columns, rows.checked_mul(IN_WORD)?]),
                Int4Packing::Awq => Some([columns.checked_mul(IN_WORD)?, rows]),
            },
            _ => None,
        }
    }

    fn wrong(&self, name: &str, expected: impl Into<String>, got: impl ToString) -> Error {
        Error::tensor(name, expected, got).in_file(self.source.file(name))
    }

    /// The numbers of a tensor of this shape.
    fn words(&self, name: &str, shape: &[usize]) -> Result<Vec<i32>> {
        self.check(name, shape)?;
        match self.source.stored_dtype(name) {
            Some(DType::I32) => Ok(self.source.tensor(name, DType::I32)?.to_vec()?),
            other => {
                let got = other.map_or_else(|| "another type".into(), |dtype| dtype.to_string());
                Err(self.wrong(name, "i32", got))
            }
        }
    }

    fn check(&self, name: &str, shape: &[usize]) -> Result<()> {
        match self.source.shape(name) {
            Some(found) if found == shape => Ok(()),
            Some(found) => Err(self.wrong(name, format!("shape {shape:?}"), format!("{found:?}"))),
            None => Err(self.wrong(name, format!("shape {shape:?}"), "no such tensor")),
        }
    }

    fn read(&self, base: &str) -> Result<Packed> {
        let name = |end: &str| format!("{base}.{end}");
        let packing = self.config.packing;
        let Some([n, k]) = self.sizes(base).filter(|[n, _]| n.is_multiple_of(IN_WORD)) else {
            let found = self.source.shape(&name("qweight"));
            let expected = "two dimensions, and outputs that are a multiple of 8";
            return Err(self.wrong(&name("qweight"), expected, format!("{found:?}")));
        };
        let group = self.config.group.unwrap_or(k).max(1);
        let count = k.div_ceil(group);
        let packed_shape = self.source.shape(&name("qweight")).unwrap_or_default();
        let words = self.words(&name("qweight"), &packed_shape)?;
        self.check(&name("scales"), &[count, n])?;
        let scales = self.source.tensor(&name("scales"), DType::F32)?.to_vec()?;
        let packed_zeros = self.words(&name("qzeros"), &[count, n / IN_WORD])?;
        let zero = |at: usize| {
            let (row, column) = (at / n, at % n);
            let word = packed_zeros[row * (n / IN_WORD) + column / IN_WORD];
            let place = match packing {
                Int4Packing::Awq => AWQ_PLACES[column % IN_WORD],
                _ => column % IN_WORD,
            };
            nibble(word, place) + u8::from(packing == Int4Packing::Gptq)
        };
        let zeros = (0..count * n).map(zero).collect();
        let listed = name("g_idx");
        let groups = match self.source.shape(&listed) {
            Some(_) if packing != Int4Packing::Awq => {
                let groups = self.words(&listed, &[k])?;
                let group = |group: &i32| usize::try_from(*group).ok().filter(|group| *group < count);
                if let Some(wrong) = groups.iter().find(|index| group(index).is_none()) {
                    return Err(self.wrong(&listed, format!("numbers of groups, below {count}"), wrong));
                }
                groups.iter().filter_map(group).collect()
            }
            _ => (0..k).map(|k| k / group).collect(),
        };
        Ok(Packed { packing, n, k, words, groups, scales, zeros })
    }
}

/// One of the eight quants of a word.
fn nibble(word: i32, place: usize) -> u8 {
    (word >> (4 * place)) as u8 & 15
}

impl Packed {
    /// The quant of an output and an input.
    fn quant(&self, n: usize, k: usize) -> u8 {
        match self.packing {
            Int4Packing::Gptq | Int4Packing::GptqV2 => {
                nibble(self.words[k / IN_WORD * self.n + n], k % IN_WORD)
            }
            Int4Packing::Awq => {
                nibble(self.words[k * (self.n / IN_WORD) + n / IN_WORD], AWQ_PLACES[n % IN_WORD])
            }
        }
    }

    /// The form in which the matrix can be blocks, if there is one.
    fn format(&self) -> Option<QuantFormat> {
        let is_whole = |run: &[usize]| run.len() == BLOCK && run.iter().all(|group| *group == run[0]);
        let is_half = |scale: &f32| f16::from_f32(*scale).to_f32().to_bits() == scale.to_bits();
        let fits = self.groups.chunks(BLOCK).all(is_whole) && self.scales.iter().all(is_half);
        let is_symmetric = self.zeros.iter().all(|zero| *zero == 8);
        fits.then_some(if is_symmetric { QuantFormat::Q4_0 } else { QuantFormat::Q8_0 })
    }

    /// The matrix in blocks of a form that it fits.
    fn blocks(&self, format: QuantFormat) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.n * (self.k / BLOCK) * format.block_bytes());
        for n in 0..self.n {
            for first in (0..self.k).step_by(BLOCK) {
                let at = self.groups[first] * self.n + n;
                let quant = |i: usize| self.quant(n, first + i);
                bytes.extend(f16::from_f32(self.scales[at]).to_le_bytes());
                match format {
                    QuantFormat::Q4_0 => bytes.extend((0..16).map(|i| quant(i) | quant(i + 16) << 4)),
                    _ => bytes.extend((0..BLOCK).map(|i| quant(i).wrapping_sub(self.zeros[at]))),
                }
            }
        }
        bytes
    }

    /// The weights, `[n, k]`: products of 11 and 5 bits, which are exact.
    fn expanded(&self) -> Vec<f32> {
        let mut weights = Vec::with_capacity(self.n * self.k);
        for n in 0..self.n {
            weights.extend((0..self.k).map(|k| {
                let at = self.groups[k] * self.n + n;
                self.scales[at] * f32::from(self.quant(n, k) as i8 - self.zeros[at] as i8)
            }));
        }
        weights
    }
}

impl WeightSource for Unpacked<'_> {
    fn naming(&self) -> Naming {
        self.source.naming()
    }

    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        match self.packed_base(name) {
            Some(base) => self.sizes(base).map(|sizes| sizes.to_vec()),
            None => self.source.shape(name),
        }
    }

    fn names(&self) -> Vec<String> {
        const PARTS: [&str; 3] = [".qzeros", ".scales", ".g_idx"];
        let is_part = |name: &str| {
            let base = PARTS.iter().find_map(|end| name.strip_suffix(end));
            base.is_some_and(|base| self.source.shape(&format!("{base}.qweight")).is_some())
        };
        let names = self.source.names().into_iter().filter(|name| !is_part(name));
        names
            .map(|name| match name.strip_suffix(".qweight") {
                Some(base) => format!("{base}.weight"),
                None => name,
            })
            .collect()
    }

    fn stored_dtype(&self, name: &str) -> Option<DType> {
        match self.packed_base(name) {
            Some(_) => None,
            None => self.source.stored_dtype(name),
        }
    }

    fn file(&self, name: &str) -> Option<&Path> {
        match self.packed_base(name) {
            Some(base) => self.source.file(&format!("{base}.qweight")),
            None => self.source.file(name),
        }
    }

    fn blocks(&self, name: &str) -> Result<Option<(Tensor, QuantFormat)>> {
        let Some(base) = self.packed_base(name) else { return self.source.blocks(name) };
        let packed = self.read(base)?;
        let Some(format) = packed.format() else { return Ok(None) };
        let bytes = packed.blocks(format);
        let row = bytes.len() / packed.n.max(1);
        Ok(Some((Tensor::from_slice(&bytes, &[packed.n, row], Device::Cpu)?, format)))
    }

    fn tensor(&self, name: &str, dtype: DType) -> Result<Tensor> {
        let Some(base) = self.packed_base(name) else { return self.source.tensor(name, dtype) };
        let packed = self.read(base)?;
        let weights = Tensor::from_slice(&packed.expanded(), &[packed.n, packed.k], Device::Cpu)?;
        Ok(if dtype == DType::F32 { weights } else { weights.to_dtype(dtype)? })
    }

    fn release(&self) {
        self.source.release();
    }
}
