//! The least an op costs, from which every report computes its distance to the machine's limits.

use crate::tensor::DType;

/// The least work an op can be done with.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Cost {
    /// Bytes: each input read once, each output written once.
    pub bytes: f64,
    /// Arithmetic operations.
    pub flops: f64,
    /// The kind of the operations, where they can take longer than moving the bytes.
    pub products: Option<Products>,
}

impl Cost {
    /// Of an op that moving its bytes limits.
    pub fn moving(bytes: f64, flops: f64) -> Cost {
        Cost { bytes, flops, products: None }
    }

    /// Of an op that multiplies matrices.
    pub fn multiplying(bytes: f64, flops: f64, products: Products) -> Cost {
        Cost { bytes, flops, products: Some(products) }
    }
}

/// Products of matrices by what a machine has units for; sums are f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Products {
    /// f32 in full precision.
    F32,
    /// f32 whose mantissa may be cut to 10 bits.
    Tf32,
    /// f16 or bf16.
    Half,
    /// 8-bit floats.
    Fp8,
}

impl Products {
    /// All of them.
    pub const ALL: [Products; 4] = [Products::F32, Products::Tf32, Products::Half, Products::Fp8];

    /// Its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Products::F32 => "f32",
            Products::Tf32 => "TF32",
            Products::Half => "bf16",
            Products::Fp8 => "fp8",
        }
    }

    /// Of operands of a type.
    pub fn of(dtype: DType) -> Products {
        match dtype.size() {
            1 => Products::Fp8,
            2 => Products::Half,
            _ => Products::F32,
        }
    }
}
