//! Element types of nodes and how they combine, as in PyTorch.

use warpsmith::DType;

/// A number written in a formula. It takes the type of what it meets.
#[derive(Clone, Copy, Debug)]
pub enum Scalar {
    /// `true` or `false`.
    Bool(bool),
    /// A whole number.
    Int(i64),
    /// Any other.
    Float(f64),
}

impl Scalar {
    /// Its value; whole numbers past 2^53 lose digits.
    pub fn value(self) -> f64 {
        match self {
            Scalar::Bool(b) => b.into(),
            Scalar::Int(i) => i as f64,
            Scalar::Float(x) => x,
        }
    }

    /// The type it has where nothing else decides.
    pub fn dtype(self) -> DType {
        match self {
            Scalar::Bool(_) => DType::Bool,
            Scalar::Int(_) => DType::I64,
            Scalar::Float(_) => DType::F32,
        }
    }

    /// Equal numbers of a type have equal bits, NaN included.
    pub(crate) fn bits(self) -> (u8, u64) {
        match self {
            Scalar::Bool(b) => (0, b.into()),
            Scalar::Int(i) => (1, i as u64),
            Scalar::Float(x) => (2, x.to_bits()),
        }
    }
}

/// The types that tensors of a graph may have.
pub const DTYPES: [DType; 6] = [DType::F32, DType::BF16, DType::F16, DType::I64, DType::I32, DType::Bool];

/// Whether a type holds whole numbers.
pub fn is_int(dtype: DType) -> bool {
    matches!(dtype, DType::I32 | DType::I64)
}

/// How much an operand has to say about the type of a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Weight {
    /// A number written in the formula.
    Number,
    /// A tensor without dimensions.
    ZeroDim,
    /// Any other tensor.
    Tensor,
}

/// The common type of two types of the same weight.
pub fn promote(a: DType, b: DType) -> DType {
    use DType::*;
    match (a, b) {
        _ if a == b => a,
        (Bool, other) | (other, Bool) => other,
        (I32, I64) | (I64, I32) => I64,
        (float, int) | (int, float) if is_int(int) => float,
        // bf16 and f16: neither holds the other. And f32 with either.
        _ => F32,
    }
}

fn category(dtype: DType) -> u8 {
    match dtype {
        DType::Bool => 0,
        DType::I32 | DType::I64 => 1,
        _ => 2,
    }
}

/// The type in which operands meet: those of less weight count only if they are of a higher category (floats above
/// integers above bools).
pub(crate) fn result_type(operands: &[(DType, Weight)]) -> DType {
    let of = |weight: Weight| {
        operands.iter().filter(|(_, w)| *w == weight).map(|(dtype, _)| *dtype).reduce(promote)
    };
    let combine = |higher: Option<DType>, lower: Option<DType>| match (higher, lower) {
        (Some(h), Some(l)) if category(h) < category(l) => Some(promote(h, l)),
        (Some(h), _) => Some(h),
        (None, lower) => lower,
    };
    let below = combine(of(Weight::ZeroDim), of(Weight::Number));
    combine(of(Weight::Tensor), below).unwrap_or(DType::F32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use DType::*;

    /// What `torch.result_type` says.
    #[test]
    fn types_combine_as_in_pytorch() {
        let cases = [
            ([(BF16, Weight::Tensor), (F16, Weight::Tensor)], F32),
            ([(BF16, Weight::Tensor), (F32, Weight::ZeroDim)], BF16),
            ([(BF16, Weight::Tensor), (F32, Weight::Number)], BF16),
            ([(I64, Weight::Tensor), (F32, Weight::Number)], F32),
            ([(I32, Weight::Tensor), (I64, Weight::Number)], I32),
            ([(I32, Weight::Tensor), (I64, Weight::ZeroDim)], I32),
            ([(I32, Weight::Tensor), (I64, Weight::Tensor)], I64),
            ([(Bool, Weight::Tensor), (I64, Weight::Number)], I64),
            ([(Bool, Weight::Tensor), (Bool, Weight::Tensor)], Bool),
            ([(I64, Weight::Tensor), (BF16, Weight::ZeroDim)], BF16),
            ([(I64, Weight::Tensor), (BF16, Weight::Tensor)], BF16),
            ([(F32, Weight::Tensor), (BF16, Weight::Tensor)], F32),
        ];
        for (operands, expected) in cases {
            assert_eq!(result_type(&operands), expected, "{operands:?}");
        }
    }
}
