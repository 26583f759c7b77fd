//! Operations as CUDA C++.

use crate::op::{Binary, Op, Unary};
use crate::types::{Scalar, is_int};
use warpsmith::DType;

/// The C++ type of an element in memory.
pub(super) fn memory_type(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "f32",
        DType::BF16 => "bf16",
        DType::F16 => "f16",
        DType::I32 => "i32",
        DType::I64 => "i64",
        _ => "boolean",
    }
}

/// The C++ type of an element in a register.
pub(super) fn register_type(dtype: DType) -> &'static str {
    if is_int(dtype) { "i64" } else { "float" }
}

/// A number.
pub(super) fn number(value: Scalar, dtype: DType) -> String {
    if is_int(dtype) {
        // The smallest number has no literal of its own.
        return format!("(i64)0x{:x}ull", value.value() as i64);
    }
    format!("bits_float(0x{:08x}u)", (value.value() as f32).to_bits())
}

/// The value of an operation on these; none if there is no code for it.
pub(super) fn value(op: &Op, dtype: DType, operand: DType, args: &[String]) -> Option<String> {
    let whole = is_int(operand);
    let arg = |at: usize| args[at].as_str();
    Some(match op {
        Op::Unary(f) if whole => wrapped(unary_int(*f, arg(0))?, dtype),
        Op::Unary(f) => unary(*f, arg(0)),
        Op::Binary(f) if whole => {
            let text = binary_int(*f, arg(0), arg(1))?;
            if f.is_comparison() { text } else { wrapped(text, dtype) }
        }
        Op::Binary(f) => binary(*f, arg(0), arg(1)),
        Op::Where => format!("({} != 0.0f ? {} : {})", arg(0), arg(1), arg(2)),
        Op::Cast(to) => cast(arg(0), operand, *to),
        Op::Expand => arg(0).to_string(),
        _ => return None,
    })
}

fn wrapped(text: String, dtype: DType) -> String {
    if dtype == DType::I32 { format!("(i64)(i32)({text})") } else { text }
}

fn cast(x: &str, from: DType, to: DType) -> String {
    match (is_int(from), to) {
        (true, DType::I32) => format!("(i64)(i32)({x})"),
        (true, DType::I64) => x.into(),
        (true, DType::Bool) => format!("truth({x} != 0)"),
        (true, DType::BF16 | DType::F16) => format!("rounded<{}>((float)({x}))", memory_type(to)),
        (true, _) => format!("(float)({x})"),
        (false, DType::I32) => format!("to_i32({x})"),
        (false, DType::I64) => format!("to_i64({x})"),
        (false, DType::Bool) if from != DType::Bool => format!("truth({x} != 0.0f)"),
        (false, DType::BF16 | DType::F16) if from != to && from != DType::Bool => {
            format!("rounded<{}>({x})", memory_type(to))
        }
        _ => x.into(),
    }
}

fn unary(f: Unary, x: &str) -> String {
    match f {
        Unary::Neg => format!("(-{x})"),
        Unary::Abs => format!("fabsf({x})"),
        Unary::Sign => format!("(truth({x} > 0.0f) - truth({x} < 0.0f))"),
        Unary::Square => format!("({x} * {x})"),
        Unary::Relu => format!("({x} < 0.0f ? 0.0f : {x})"),
        Unary::Floor => format!("floorf({x})"),
        Unary::Ceil => format!("ceilf({x})"),
        Unary::Round => format!("rintf({x})"),
        Unary::Trunc => format!("truncf({x})"),
        Unary::Detach => x.into(),
        Unary::Exp => format!("expf({x})"),
        Unary::Log => format!("logf({x})"),
        Unary::Log1p => format!("log1pf({x})"),
        Unary::Sqrt => format!("sqrtf({x})"),
        Unary::Rsqrt => format!("rsqrtf({x})"),
        Unary::Reciprocal => format!("divided(1.0f, {x})"),
        Unary::Tanh => format!("tanhf({x})"),
        Unary::Sigmoid => format!("sigmoid({x})"),
        Unary::Silu => format!("Silu::value<f32>({x})"),
        Unary::Gelu => format!("Gelu::value<f32>({x})"),
        Unary::GeluTanh => format!("GeluTanh::value<f32>({x})"),
        Unary::Mish => format!("Mish::value<f32>({x})"),
        Unary::Softplus => format!("softplus({x})"),
        Unary::Erf => format!("erff({x})"),
        Unary::Erfc => format!("erfcf({x})"),
        Unary::Sin => format!("sinf({x})"),
        Unary::Cos => format!("cosf({x})"),
        Unary::DSilu => format!("Silu::derivative<f32>({x})"),
        Unary::DGelu => format!("Gelu::derivative<f32>({x})"),
        Unary::DGeluTanh => format!("GeluTanh::derivative<f32>({x})"),
        Unary::DMish => format!("Mish::derivative<f32>({x})"),
        Unary::Not => format!("truth({x} == 0.0f)"),
        Unary::IsNan => format!("truth({x} != {x})"),
    }
}

fn binary(f: Binary, a: &str, b: &str) -> String {
    match f {
        Binary::Div => format!("divided({a}, {b})"),
        Binary::Pow => format!("powf({a}, {b})"),
        Binary::Max => format!("larger({a}, {b})"),
        Binary::Min => format!("smaller({a}, {b})"),
        Binary::And => format!("({a} * {b})"),
        Binary::Or => format!("fmaxf({a}, {b})"),
        Binary::Xor => format!("truth({a} != {b})"),
        f if f.is_comparison() => format!("truth({a} {} {b})", f.symbol()),
        f => format!("({a} {} {b})", f.symbol()),
    }
}

fn unary_int(f: Unary, x: &str) -> Option<String> {
    // Unsigned, because signed numbers must not overflow.
    Some(match f {
        Unary::Neg => format!("(i64)(0ull - (u64){x})"),
        Unary::Abs => format!("({x} < 0 ? (i64)(0ull - (u64){x}) : {x})"),
        Unary::Sign => format!("((i64)({x} > 0) - (i64)({x} < 0))"),
        Unary::Square => format!("(i64)((u64){x} * (u64){x})"),
        Unary::Relu => format!("({x} < 0 ? 0ll : {x})"),
        Unary::Not => format!("truth({x} == 0)"),
        Unary::Detach => x.into(),
        _ => return None,
    })
}

fn binary_int(f: Binary, a: &str, b: &str) -> Option<String> {
    Some(match f {
        Binary::Add | Binary::Sub | Binary::Mul => format!("(i64)((u64){a} {} (u64){b})", f.symbol()),
        Binary::Max => format!("({a} > {b} ? {a} : {b})"),
        Binary::Min => format!("({a} < {b} ? {a} : {b})"),
        f if f.is_comparison() => format!("truth({a} {} {b})", f.symbol()),
        _ => return None,
    })
}
