//! Element types and their conversions.

use crate::error::{Error, Result};
use half::{bf16, f16};

/// 8-bit float, 4 exponent and 3 mantissa bits, no infinities (the `fn` variant).
pub type F8E4M3 = float8::F8E4M3;
/// 8-bit float, 5 exponent and 2 mantissa bits.
pub type F8E5M2 = float8::F8E5M2;

/// The type of a tensor's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)]
pub enum DType {
    F32,
    F16,
    BF16,
    F8E4M3,
    F8E5M2,
    I64,
    I32,
    U8,
    Bool,
}

impl DType {
    /// Every type there is.
    pub const ALL: [DType; 9] = [
        DType::F32,
        DType::F16,
        DType::BF16,
        DType::F8E4M3,
        DType::F8E5M2,
        DType::I64,
        DType::I32,
        DType::U8,
        DType::Bool,
    ];

    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            DType::I64 => 8,
            DType::F32 | DType::I32 => 4,
            DType::F16 | DType::BF16 => 2,
            DType::F8E4M3 | DType::F8E5M2 | DType::U8 | DType::Bool => 1,
        }
    }

    /// The name used on the command line, in evidence and in errors.
    pub const fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::F16 => "f16",
            DType::BF16 => "bf16",
            DType::F8E4M3 => "f8e4m3",
            DType::F8E5M2 => "f8e5m2",
            DType::I64 => "i64",
            DType::I32 => "i32",
            DType::U8 => "u8",
            DType::Bool => "bool",
        }
    }

    /// Whether this is a floating-point type.
    pub const fn is_float(self) -> bool {
        matches!(self, DType::F32 | DType::F16 | DType::BF16 | DType::F8E4M3 | DType::F8E5M2)
    }

    /// Half the distance between 1 and the next larger value: the largest relative error of one rounding.
    /// Zero for the exact types.
    pub const fn unit_roundoff(self) -> f64 {
        match self {
            DType::F32 => 1.0 / (1u64 << 24) as f64,
            DType::F16 => 1.0 / (1u64 << 11) as f64,
            DType::BF16 => 1.0 / (1u64 << 8) as f64,
            DType::F8E4M3 => 1.0 / (1u64 << 4) as f64,
            DType::F8E5M2 => 1.0 / (1u64 << 3) as f64,
            _ => 0.0,
        }
    }

    /// The smallest positive subnormal value: the grid on which tiny results are rounded. Zero for exact types.
    pub fn smallest_subnormal(self) -> f64 {
        match self {
            DType::F32 => 2f64.powi(-149),
            DType::F16 => 2f64.powi(-24),
            DType::BF16 => 2f64.powi(-133),
            DType::F8E4M3 => 2f64.powi(-9),
            DType::F8E5M2 => 2f64.powi(-16),
            _ => 0.0,
        }
    }

    /// Names of it in other libraries, which are accepted too.
    pub const fn aliases(self) -> &'static [&'static str] {
        match self {
            DType::F32 => &["float32", "fp32"],
            DType::F16 => &["float16", "fp16", "half"],
            DType::BF16 => &["bfloat16"],
            DType::F8E4M3 => &["float8_e4m3fn", "fp8_e4m3"],
            DType::F8E5M2 => &["float8_e5m2", "fp8_e5m2"],
            _ => &[],
        }
    }

    /// The largest finite value of a floating type; `f64::MAX` for the others.
    pub const fn max_finite(self) -> f64 {
        match self {
            DType::F32 => f32::MAX as f64,
            DType::F16 => 65504.0,
            DType::BF16 => 3.389_531_389_251_535_5e38,
            DType::F8E4M3 => 448.0,
            DType::F8E5M2 => 57344.0,
            _ => f64::MAX,
        }
    }

    /// Rounds `value` to this type (nearest, ties to even) and widens it again.
    /// fp8 saturates to its largest finite value; the wider floats overflow to infinity.
    pub fn round(self, value: f64) -> f64 {
        let mut bytes = [0u8; 8];
        self.write(value, &mut bytes);
        self.read(&bytes)
    }

    /// Reads one element, widened to `f64`. `i64` beyond 2^53 loses low bits.
    ///
    /// # Panics
    /// If `bytes` is shorter than the element.
    #[inline]
    pub fn read(self, bytes: &[u8]) -> f64 {
        match self {
            DType::F32 => f32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]) as f64,
            DType::F16 => f16::from_ne_bytes([bytes[0], bytes[1]]).to_f64(),
            DType::BF16 => bf16::from_ne_bytes([bytes[0], bytes[1]]).to_f64(),
            DType::F8E4M3 => F8E4M3::from_bits(bytes[0]).to_f64(),
            DType::F8E5M2 => F8E5M2::from_bits(bytes[0]).to_f64(),
            DType::I64 => i64::from_ne_bytes(bytes[..8].try_into().expect("eight bytes")) as f64,
            DType::I32 => i32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]) as f64,
            DType::U8 => bytes[0] as f64,
            DType::Bool => (bytes[0] != 0) as u8 as f64,
        }
    }

    /// Writes one element rounded from `f64`; see [`DType::round`].
    ///
    /// # Panics
    /// If `bytes` is shorter than the element.
    #[inline]
    pub fn write(self, value: f64, bytes: &mut [u8]) {
        match self {
            DType::F32 => bytes[..4].copy_from_slice(&(value as f32).to_ne_bytes()),
            DType::F16 => bytes[..2].copy_from_slice(&f16::from_f32(toward_odd(value)).to_ne_bytes()),
            DType::BF16 => bytes[..2].copy_from_slice(&bf16::from_f32(toward_odd(value)).to_ne_bytes()),
            DType::F8E4M3 => bytes[0] = F8E4M3::from_f32(toward_odd(value)).to_bits(),
            DType::F8E5M2 => bytes[0] = F8E5M2::from_f32(toward_odd(value)).to_bits(),
            DType::I64 => bytes[..8].copy_from_slice(&(value as i64).to_ne_bytes()),
            DType::I32 => bytes[..4].copy_from_slice(&(value as i32).to_ne_bytes()),
            DType::U8 => bytes[0] = value as u8,
            DType::Bool => bytes[0] = (value != 0.0) as u8,
        }
    }
}

/// `value` in f32, rounded so that rounding it once more to a type of at most 22 bits gives what rounding `value`
/// itself would: truncated, with the last bit set if anything was cut off.
fn toward_odd(value: f64) -> f32 {
    let nearest = value as f32;
    if f64::from(nearest) == value || value.is_nan() {
        return nearest;
    }
    let beyond = f64::from(nearest).abs() > value.abs();
    let truncated = if beyond { f32::from_bits(nearest.to_bits() - 1) } else { nearest };
    f32::from_bits(truncated.to_bits() | 1)
}

impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

impl std::str::FromStr for DType {
    type Err = Error;

    /// By our name or one that other libraries have, such as `float16`, `fp16` and `half`.
    fn from_str(text: &str) -> Result<Self> {
        DType::ALL
            .into_iter()
            .find(|d| d.name() == text || d.aliases().contains(&text))
            .ok_or_else(|| Error::parse("dtype", DType::ALL.map(DType::name).join(", "), text))
    }
}

/// A Rust type that is stored in tensors of one [`DType`].
///
/// # Safety
/// `DTYPE.size()` must equal `size_of::<Self>()`, and every bit pattern a tensor of that type can hold must be
/// a valid value of `Self`.
pub unsafe trait Element: Copy + Send + Sync + 'static {
    /// The matching [`DType`].
    const DTYPE: DType;
}

macro_rules! elements {
    ($($t:ty => $d:ident),* $(,)?) => {$(
        // SAFETY: sizes match and every bit pattern of these plain number types is valid.
        unsafe impl Element for $t { const DTYPE: DType = DType::$d; }
    )*};
}
elements!(f32 => F32, f16 => F16, bf16 => BF16, F8E4M3 => F8E4M3, F8E5M2 => F8E5M2, i64 => I64, i32 => I32, u8 => U8);

#[cfg(feature = "tests")]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for d in DType::ALL {
            assert_eq!(d.name().parse::<DType>().unwrap(), d);
        }
        assert!("float".parse::<DType>().unwrap_err().to_string().contains("bf16"));
        for (name, dtype) in [("half", DType::F16), ("float32", DType::F32), ("fp8_e4m3", DType::F8E4M3)] {
            assert_eq!(name.parse::<DType>().unwrap(), dtype);
        }
    }

    #[test]
    fn fp8_saturates_and_keeps_nan() {
        assert_eq!(DType::F8E4M3.round(1e9), 448.0);
        assert_eq!(DType::F8E4M3.round(-1e9), -448.0);
        assert_eq!(DType::F8E5M2.round(1e9), 57344.0);
        assert!(DType::F8E4M3.round(f64::NAN).is_nan());
        assert!(DType::F8E5M2.round(f64::NAN).is_nan());
    }

    #[test]
    fn unit_roundoff_is_half_an_ulp_at_one() {
        for d in DType::ALL.into_iter().filter(|d| d.is_float()) {
            let u = d.unit_roundoff();
            assert_eq!(d.round(1.0 + 2.0 * u), 1.0 + 2.0 * u, "{d}");
            assert_eq!(d.round(1.0 + u), 1.0, "{d}: ties go to even");
            assert!(d.round(1.0 + 1.5 * u) > 1.0, "{d}");
            let tiny = d.smallest_subnormal();
            for (tie, below, above) in [(1.0 + u, 1.0, 1.0 + 2.0 * u), (2.5 * tiny, 2.0 * tiny, 3.0 * tiny)] {
                assert_eq!(d.round(tie), below, "{d}: {tie:e}");
                assert_eq!(d.round(tie * (1.0 + f64::EPSILON)), above, "{d}: just past {tie:e}");
                assert_eq!(d.round(-tie * (1.0 - f64::EPSILON)), -below, "{d}: just before {tie:e}");
            }
        }
    }
}
