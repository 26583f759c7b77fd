//! The activation functions the elementwise ops share: which there are, what they mean, and how the CPU computes them.

use crate::cpu::math16::{self, Bf16, F16, derivatives};
use crate::cpu::piecewise::{for_bf16, for_f32};
use crate::cpu::{CpuElement, Simd, math};
use crate::tensor::DType;

/// An activation function.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(in crate::ops) enum Kind {
    Gelu,
    GeluTanh,
    Silu,
    Relu,
    Mish,
}

impl Kind {
    /// Every function.
    pub const ALL: [Kind; 5] = [Kind::Gelu, Kind::GeluTanh, Kind::Silu, Kind::Relu, Kind::Mish];

    /// The name users know it by.
    pub const fn name(self) -> &'static str {
        match self {
            Kind::Gelu => "gelu",
            Kind::GeluTanh => "gelu_tanh",
            Kind::Silu => "silu",
            Kind::Relu => "relu",
            Kind::Mish => "mish",
        }
    }

    /// The struct of `math.cuh` that computes it.
    #[cfg(feature = "cuda")]
    pub const fn device_name(self) -> &'static str {
        match self {
            Kind::Gelu => "Gelu",
            Kind::GeluTanh => "GeluTanh",
            Kind::Silu => "Silu",
            Kind::Relu => "Relu",
            Kind::Mish => "Mish",
        }
    }
}

/// A function on vectors, as accurate as results rounded to `T` can show. Derivatives have zeros, near which rough ones
/// would have no digits left; only bf16 has few enough numbers there.
pub(in crate::ops) trait Function: Copy + Send + Sync + 'static {
    fn value<S: Simd, T: CpuElement>(s: S, x: S::V) -> S::V;
    /// [`Function::value`] where inputs may be of any size: never in pieces, which are slower where many inputs lie outside
    /// them.
    fn value_anywhere<S: Simd, T: CpuElement>(s: S, x: S::V) -> S::V;
    fn derivative<S: Simd, T: CpuElement>(s: S, x: S::V) -> S::V;
}

macro_rules! functions {
    ($($name:ident: $value:path, $bf16:path;
        $any:path, $any_f16:path, $any_bf16:path;
        $derivative:path, $bf16_derivative:path;)*) => {$(
        #[derive(Clone, Copy)]
        pub(in crate::ops) struct $name;

        impl Function for $name {
            #[inline(always)]
            fn value<S: Simd, T: CpuElement>(s: S, x: S::V) -> S::V {
                match T::DTYPE {
                    DType::BF16 => $bf16(s, x),
                    DType::F16 => $any_f16(s, x),
                    _ => $value(s, x),
                }
            }

            #[inline(always)]
            fn value_anywhere<S: Simd, T: CpuElement>(s: S, x: S::V) -> S::V {
                match T::DTYPE {
                    DType::BF16 => $any_bf16(s, x),
                    DType::F16 => $any_f16(s, x),
                    _ => $any(s, x),
                }
            }

            #[inline(always)]
            fn derivative<S: Simd, T: CpuElement>(s: S, x: S::V) -> S::V {
                match T::DTYPE {
                    DType::BF16 => $bf16_derivative(s, x),
                    _ => $derivative(s, x),
                }
            }
        }
    )*};
}
functions! {
    Gelu: for_f32::gelu, for_bf16::gelu;
        math::gelu, math16::gelu::<F16, _>, math16::gelu::<Bf16, _>;
        math::d_gelu, derivatives::d_gelu;
    GeluTanh: for_f32::gelu_tanh, for_bf16::gelu_tanh;
        math::gelu_tanh, math16::gelu_tanh::<F16, _>, math16::gelu_tanh::<Bf16, _>;
        math::d_gelu_tanh, derivatives::d_gelu_tanh;
    Silu: for_f32::silu, for_bf16::silu;
        math::silu, math16::silu::<F16, _>, math16::silu::<Bf16, _>;
        math::d_silu, derivatives::d_silu;
    Relu: math::relu, math::relu;
        math::relu, math::relu, math::relu;
        math::d_relu, math::d_relu;
    Mish: for_f32::mish, for_bf16::mish;
        math::mish, math16::mish::<F16, _>, math16::mish::<Bf16, _>;
        math::d_mish, derivatives::d_mish;
}

/// Runs `$body` with `$F` set to the [`Function`] of a [`Kind`], which must be one of those listed: code is made for
/// each.
macro_rules! with_function {
    ($kind:expr, $F:ident in $($name:ident)* => $body:expr) => {
        match $kind {
            $($crate::ops::elementwise::function::Kind::$name => {
                type $F = $crate::ops::elementwise::function::$name;
                $body
            })*
            #[allow(unreachable_patterns)]
            other => unreachable!("the op has no option {other:?}"),
        }
    };
}
pub(in crate::ops) use with_function;
