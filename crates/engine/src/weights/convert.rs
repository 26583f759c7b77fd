//! Stored elements as numbers of another type.

use super::Encoding;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use warpsmith::tensor::{Element, F8E4M3, F8E5M2};
use warpsmith::{DType, Device, Result, Stream, Tensor};

/// Elements converted at a time: they stay in the first-level cache. A multiple of every block.
const PIECE: usize = 2048;

/// Writes elements as f32. `bytes` and `out` belong together.
pub fn to_f32(encoding: Encoding, bytes: &[u8], out: &mut [f32]) {
    match encoding {
        Encoding::Quantized(quantization) => quantization.dequantize(bytes, out),
        Encoding::Plain(DType::F32) => {
            for (bytes, slot) in bytes.as_chunks::<4>().0.iter().zip(out) {
                *slot = f32::from_le_bytes(*bytes);
            }
        }
        Encoding::Plain(DType::F16) => {
            for (bytes, slot) in bytes.as_chunks::<2>().0.iter().zip(out) {
                *slot = f16::from_le_bytes(*bytes).to_f32();
            }
        }
        Encoding::Plain(DType::BF16) => {
            for (bytes, slot) in bytes.as_chunks::<2>().0.iter().zip(out) {
                *slot = bf16::from_le_bytes(*bytes).to_f32();
            }
        }
        Encoding::Plain(dtype) => {
            for (bytes, slot) in bytes.chunks_exact(dtype.size()).zip(out) {
                *slot = dtype.read(bytes) as f32;
            }
        }
    }
}

/// A tensor on the CPU with the elements rounded to a floating-point type.
pub fn to_tensor(encoding: Encoding, bytes: &[u8], shape: &[usize], dtype: DType) -> Result<Tensor> {
    match dtype {
        DType::F16 => convert(encoding, bytes, shape, |from, to: &mut [f16]| to.convert_from_f32_slice(from)),
        DType::BF16 => {
            convert(encoding, bytes, shape, |from, to: &mut [bf16]| to.convert_from_f32_slice(from))
        }
        DType::F8E4M3 => convert(encoding, bytes, shape, |from, to: &mut [F8E4M3]| {
            from.iter().zip(to).for_each(|(from, to)| *to = F8E4M3::from_f32(*from));
        }),
        DType::F8E5M2 => convert(encoding, bytes, shape, |from, to: &mut [F8E5M2]| {
            from.iter().zip(to).for_each(|(from, to)| *to = F8E5M2::from_f32(*from));
        }),
        _ => convert(encoding, bytes, shape, |from, to: &mut [f32]| to.copy_from_slice(from)),
    }
}

fn convert<T: Element + Default>(
    encoding: Encoding,
    bytes: &[u8],
    shape: &[usize],
    round: impl Fn(&[f32], &mut [T]),
) -> Result<Tensor> {
    let mut tensor = Tensor::empty(shape, T::DTYPE, Device::Cpu)?;
    let count: usize = shape.iter().product();
    let (mut wide, mut narrow) = ([0f32; PIECE], vec![T::default(); PIECE]);
    for start in (0..count).step_by(PIECE) {
        let len = PIECE.min(count - start);
        let bytes_at = |element: usize| element / encoding.block_len() * encoding.block_bytes();
        to_f32(encoding, &bytes[bytes_at(start)..bytes_at(start + len)], &mut wide[..len]);
        round(&wide[..len], &mut narrow[..len]);
        tensor.write(start, &narrow[..len], &Stream::Host)?;
    }
    Ok(tensor)
}
