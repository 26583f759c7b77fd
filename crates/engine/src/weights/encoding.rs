//! How the elements of a tensor are stored.

use super::Quantization;
use std::fmt;
use warpsmith::DType;

/// How the elements of a stored tensor are encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Encoding {
    /// One number after the other.
    Plain(DType),
    /// Blocks of small integers with common scales.
    Quantized(Quantization),
}

impl Encoding {
    /// Elements that are stored together: 1, or the length of a block.
    pub const fn block_len(self) -> usize {
        match self {
            Encoding::Plain(_) => 1,
            Encoding::Quantized(quantization) => quantization.block_len(),
        }
    }

    /// Bytes of [`block_len`](Encoding::block_len) elements.
    pub const fn block_bytes(self) -> usize {
        match self {
            Encoding::Plain(dtype) => dtype.size(),
            Encoding::Quantized(quantization) => quantization.block_bytes(),
        }
    }

    /// Bytes of a tensor of this shape. `None` if they cannot be counted in a `usize`, or a row is not a whole number of
    /// blocks.
    pub fn bytes_of(self, shape: &[usize]) -> Option<usize> {
        // A zero size hides an overflow of the others, which would strike later: the product is over the non-zero ones.
        let all = shape.iter().filter(|&&size| size > 0).try_fold(1usize, |n, &size| n.checked_mul(size))?;
        let count = if shape.contains(&0) { 0 } else { all };
        if !shape.last().copied().unwrap_or(1).is_multiple_of(self.block_len()) {
            return None;
        }
        (count / self.block_len()).checked_mul(self.block_bytes())
    }

    /// The name of the type, as GGUF has it for blocks (`q4_k`), and as the library has it for numbers (`bf16`).
    pub const fn name(self) -> &'static str {
        match self {
            Encoding::Plain(dtype) => dtype.name(),
            Encoding::Quantized(quantization) => quantization.name(),
        }
    }
}

impl fmt::Display for Encoding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_checked() {
        let (f32, q4_k) = (Encoding::Plain(DType::F32), Encoding::Quantized(Quantization::Q4K));
        assert_eq!(f32.bytes_of(&[]), Some(4));
        assert_eq!(f32.bytes_of(&[3, 5]), Some(60));
        assert_eq!(f32.bytes_of(&[usize::MAX, 0, 2]), None);
        assert_eq!(f32.bytes_of(&[usize::MAX / 2]), None);
        assert_eq!(q4_k.bytes_of(&[3, 512]), Some(3 * 2 * 144));
        assert_eq!(q4_k.bytes_of(&[512, 3]), None, "rows consist of whole blocks");
    }
}
