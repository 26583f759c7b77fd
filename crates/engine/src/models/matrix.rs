//! Matrices of weights, plain or quantised.

use crate::error::Result;
use warpsmith::ops::{self, QuantFormat};
use warpsmith::{DType, Device, Stream, Tensor, TensorView};

/// A matrix of weights, as the file stores it.
pub enum Matrix {
    /// Numbers of the model's type, or of 16 bits where products take them beside it, `[out, in]`.
    Plain(Tensor),
    /// Quantised, `[out, bytes of a row]`.
    Blocks(Tensor, QuantFormat),
}

impl Matrix {
    pub(super) fn tensor(&self) -> &Tensor {
        match self {
            Matrix::Plain(tensor) | Matrix::Blocks(tensor, _) => tensor,
        }
    }

    /// Another tensor stored in the same way.
    pub(super) fn with(&self, tensor: Tensor) -> Matrix {
        match self {
            Matrix::Plain(_) => Matrix::Plain(tensor),
            Matrix::Blocks(_, format) => Matrix::Blocks(tensor, *format),
        }
    }

    /// The number of rows.
    pub fn rows(&self) -> usize {
        self.tensor().shape()[0]
    }

    /// Whether the rows of both can be in one matrix.
    pub fn is_stored_like(&self, other: &Matrix) -> bool {
        match (self, other) {
            (Matrix::Plain(a), Matrix::Plain(b)) => a.dtype() == b.dtype(),
            (Matrix::Blocks(_, a), Matrix::Blocks(_, b)) => a == b,
            _ => false,
        }
    }

    /// Matrices that are stored alike, one below the other.
    pub(super) fn joined(mut parts: Vec<Matrix>, stream: &Stream) -> Result<Matrix> {
        if parts.len() == 1 {
            return Ok(parts.swap_remove(0));
        }
        let rows: Vec<TensorView<'_>> = parts.iter().map(|matrix| matrix.tensor().view()).collect();
        Ok(parts[0].with(stacked(&rows, stream)?))
    }
}

/// Tensors of the same type and width, one below the other, made in the order of `stream`.
pub(super) fn stacked(parts: &[TensorView<'_>], stream: &Stream) -> Result<Tensor> {
    let mut shape = parts[0].shape().to_vec();
    shape[0] = parts.iter().map(|part| part.shape()[0]).sum();
    let mut all = Tensor::empty_on(&shape, parts[0].dtype(), stream)?;
    ops::concat_into(parts, 0, &mut all, stream)?;
    Ok(all)
}

/// A matrix times a number.
pub(super) fn multiplied(matrix: &Tensor, factor: f32) -> Result<Tensor> {
    let (rows, width, dtype) = (matrix.shape()[0], matrix.shape()[1], matrix.dtype());
    let mut product = Tensor::empty(matrix.shape(), dtype, Device::Cpu)?;
    // Some rows at a time, because tables are large.
    const ROWS: usize = 256;
    for first in (0..rows).step_by(ROWS) {
        let count = ROWS.min(rows - first);
        let part = matrix.narrow(0, first, count).expect("within the matrix").to_dtype(DType::F32)?;
        let numbers: Vec<f32> = part.to_vec::<f32>()?.iter().map(|x| x * factor).collect();
        let numbers = Tensor::from_slice(&numbers, &[count, width], Device::Cpu)?.to_dtype(dtype)?;
        let place = product.view_mut().narrow(0, first, count).expect("within the matrix");
        ops::Copy::new(&numbers).run_into(place, &Stream::Host)?;
    }
    Ok(product)
}
