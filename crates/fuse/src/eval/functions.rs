//! Functions of elements in f64, with bounds.

use super::{Approx, TINY, U};
use crate::op::{Binary, Reduce, Unary};
use warpsmith::DType;

pub(super) fn known(value: Option<f64>) -> Approx {
    value.map_or(Approx::unknown(), Approx::exact)
}

/// Past the largest number of f32, a result is infinite.
pub(super) fn overflowed(x: Approx) -> Approx {
    let largest = f64::from(f32::MAX);
    if !x.value.is_finite() || x.value.abs() + x.error <= largest {
        return x;
    }
    match x.value.abs() - x.error > largest * (1.0 + U) {
        true => Approx::exact(f64::INFINITY.copysign(x.value)),
        false => Approx::unknown(),
    }
}

/// The value in f64.
pub(crate) fn value(f: Unary, x: f64) -> f64 {
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    let phi = |x: f64| 0.5 * libm::erfc(-x / std::f64::consts::SQRT_2);
    let density = |x: f64| (-0.5 * x * x).exp() * 0.398_942_280_401_432_7;
    let softplus = |x: f64| x.max(0.0) + (-x.abs()).exp().ln_1p();
    match f {
        Unary::Neg => -x,
        Unary::Detach => x,
        Unary::Abs => x.abs(),
        Unary::Sign if x > 0.0 => 1.0,
        Unary::Sign if x < 0.0 => -1.0,
        Unary::Sign => 0.0,
        Unary::Square => x * x,
        Unary::Relu if x < 0.0 => 0.0,
        Unary::Relu => x,
        Unary::Floor => x.floor(),
        Unary::Ceil => x.ceil(),
        Unary::Round => x.round_ties_even(),
        Unary::Trunc => x.trunc(),
        Unary::Exp => x.exp(),
        Unary::Log => x.ln(),
        Unary::Log1p => x.ln_1p(),
        Unary::Sqrt => x.sqrt(),
        Unary::Rsqrt => 1.0 / x.sqrt(),
        Unary::Reciprocal => 1.0 / x,
        Unary::Tanh => x.tanh(),
        Unary::Sigmoid => sigmoid(x),
        Unary::Silu => x * sigmoid(x),
        Unary::Gelu => x * phi(x),
        Unary::GeluTanh => x * sigmoid(1.595_769_121_605_730_7 * (x + 0.044_715 * x * x * x)),
        Unary::Mish if x.is_nan() => x,
        Unary::Softplus if x.is_nan() => x,
        Unary::Mish => x * softplus(x).tanh(),
        Unary::Softplus => softplus(x),
        Unary::Erf => libm::erf(x),
        Unary::Erfc => libm::erfc(x),
        Unary::Sin => x.sin(),
        Unary::Cos => x.cos(),
        Unary::DSilu => sigmoid(x) * (1.0 + x * sigmoid(-x)),
        Unary::DGelu => phi(x) + x * density(x),
        Unary::DGeluTanh => {
            let s = sigmoid(1.595_769_121_605_730_7 * (x + 0.044_715 * x * x * x));
            s + x * s * (1.0 - s) * 1.595_769_121_605_730_7 * (1.0 + 3.0 * 0.044_715 * x * x)
        }
        Unary::DMish => {
            let t = softplus(x).tanh();
            t + x * (1.0 - t * t) * sigmoid(x)
        }
        Unary::Not => f64::from(x == 0.0),
        Unary::IsNan => f64::from(x.is_nan()),
    }
}

/// How steep a function that is not monotone can be, and how many roundings its computation has.
fn character(f: Unary) -> (Option<f64>, f64) {
    match f {
        Unary::Neg | Unary::Abs | Unary::Detach => (Some(1.0), 0.0),
        Unary::Relu => (Some(1.0), 0.0),
        Unary::Sign | Unary::Floor | Unary::Ceil | Unary::Round | Unary::Trunc => (None, 0.0),
        Unary::Sqrt | Unary::Reciprocal => (None, 1.0),
        Unary::Rsqrt => (None, 2.0),
        Unary::Exp | Unary::Log | Unary::Log1p => (None, 3.0),
        Unary::Tanh | Unary::Sigmoid => (None, 4.0),
        Unary::Softplus => (None, 5.0),
        Unary::Erf | Unary::Erfc => (None, 6.0),
        Unary::Sin | Unary::Cos => (Some(1.0), 4.0),
        Unary::Silu | Unary::Gelu | Unary::GeluTanh | Unary::Mish => (Some(1.13), 6.0),
        // Their zeros are lost in rounding.
        Unary::DSilu | Unary::DGelu | Unary::DGeluTanh | Unary::DMish => (Some(1.2), 8.0),
        Unary::Square => (None, 1.0),
        Unary::Not | Unary::IsNan => (None, 0.0),
    }
}

pub(super) fn unary(f: Unary, x: Approx) -> Approx {
    match f {
        Unary::IsNan if x.is_unknown() => return Approx::unknown(),
        Unary::IsNan => return Approx::exact(value(f, x.value)),
        Unary::Not => return truth(x, true),
        _ if x.is_unknown() => return Approx { value: value(f, x.value), error: f64::INFINITY },
        _ => {}
    }
    let y = value(f, x.value);
    if x.value.is_nan() || (x.error == 0.0 && !y.is_finite()) {
        return Approx::exact(y);
    }
    let (steepest, roundings) = character(f);
    let (low, high) = (x.value - x.error, x.value + x.error);
    let reach = match steepest {
        Some(slope) => slope * x.error,
        None if f == Unary::Square => 2.0 * x.value.abs() * x.error + x.error * x.error,
        None if matches!(f, Unary::Reciprocal) && low <= 0.0 && high >= 0.0 && x.error > 0.0 => f64::INFINITY,
        None => match [low, high].map(|x| (value(f, x) - y).abs()) {
            ends if ends.iter().any(|end| end.is_nan()) => f64::NAN,
            [below, above] => below.max(above),
        },
    };
    // A NaN or an infinity that a small error makes or hides.
    if reach.is_nan() || (!y.is_finite() && x.error > 0.0) {
        return Approx::unknown();
    }
    let derivative = matches!(f, Unary::DSilu | Unary::DGelu | Unary::DGeluTanh | Unary::DMish);
    // In its lower tail this one is as wrong as the exponent is.
    let roundings = match f {
        Unary::GeluTanh | Unary::DGeluTanh if x.value < 0.0 => {
            roundings + 3.0 * (x.value * (1.6 + 0.0714 * x.value * x.value)).abs()
        }
        _ => roundings,
    };
    let size = y.abs() + if derivative { 0.2 } else { 0.0 };
    // A factor that is rounded to the smallest numbers is multiplied by `x`.
    let product = matches!(f, Unary::Silu | Unary::Gelu | Unary::GeluTanh | Unary::Mish);
    let tiny = tiny(roundings) + if product { x.value.abs() * TINY } else { 0.0 };
    overflowed(Approx { value: y, error: reach + roundings * U * (size + reach) + tiny })
}

/// Results of rounded operations are rounded to the smallest numbers too.
fn tiny(roundings: f64) -> f64 {
    if roundings > 0.0 { 4.0 * TINY } else { 0.0 }
}

/// Whether `x` is not zero, or the opposite.
pub(super) fn truth(x: Approx, negate: bool) -> Approx {
    if x.is_unknown() || (x.error > 0.0 && x.value.abs() <= x.error) {
        return Approx { value: f64::from((x.value != 0.0) != negate), error: f64::INFINITY };
    }
    Approx::exact(f64::from((x.value != 0.0) != negate))
}

pub(super) fn compare<T: PartialOrd>(f: Binary, x: T, y: T) -> bool {
    match f {
        Binary::Lt => x < y,
        Binary::Le => x <= y,
        Binary::Gt => x > y,
        Binary::Ge => x >= y,
        Binary::Eq => x == y,
        _ => x != y,
    }
}

/// The value, of which nothing is known.
fn plain(f: Binary, a: Approx, b: Approx) -> Approx {
    let (x, y) = (a.value, b.value);
    let value = match f {
        Binary::Add => x + y,
        Binary::Sub => x - y,
        Binary::Mul | Binary::And => x * y,
        Binary::Div => x / y,
        Binary::Pow => x.powf(y),
        Binary::Max | Binary::Or => x.max(y),
        Binary::Min => x.min(y),
        Binary::Xor => f64::from(x != y),
        _ => compare(f, x, y).into(),
    };
    Approx { value, error: f64::INFINITY }
}

pub(super) fn binary(f: Binary, a: Approx, b: Approx) -> Approx {
    let (x, y) = (a.value, b.value);
    match f {
        Binary::And | Binary::Or | Binary::Xor => {
            let certain = |p: Approx, value: f64| !p.is_unknown() && p.value == value;
            return match f {
                Binary::And if certain(a, 0.0) || certain(b, 0.0) => Approx::exact(0.0),
                Binary::Or if certain(a, 1.0) || certain(b, 1.0) => Approx::exact(1.0),
                _ if a.is_unknown() || b.is_unknown() => plain(f, a, b),
                Binary::And => Approx::exact(f64::from(x != 0.0 && y != 0.0)),
                Binary::Or => Approx::exact(f64::from(x != 0.0 || y != 0.0)),
                _ => Approx::exact(f64::from((x != 0.0) != (y != 0.0))),
            };
        }
        _ if a.is_unknown() || b.is_unknown() => return plain(f, a, b),
        _ if f.is_comparison() => {
            let close = (x - y).abs() <= a.error + b.error && a.error + b.error > 0.0;
            return if close { plain(f, a, b) } else { Approx::exact(compare(f, x, y).into()) };
        }
        _ => {}
    }
    let exact = a.error == 0.0 && b.error == 0.0;
    let (result, reach, roundings) = match f {
        Binary::Add => (x + y, a.error + b.error, 1.0),
        Binary::Sub => (x - y, a.error + b.error, 1.0),
        Binary::Mul => (x * y, x.abs() * b.error + y.abs() * a.error + a.error * b.error, 1.0),
        Binary::Div => {
            let nearest = y.abs() - b.error;
            let unsafe_divisor = b.error > 0.0 && nearest <= 0.0;
            let reach = if unsafe_divisor {
                f64::INFINITY
            } else if nearest == 0.0 {
                0.0
            } else {
                (a.error + (x / y).abs() * b.error) / nearest
            };
            (x / y, reach, 1.0)
        }
        Binary::Pow => {
            let corners = [(-1.0, -1.0), (-1.0, 1.0), (1.0, -1.0), (1.0, 1.0)];
            let power = x.powf(y);
            let reach = corners.map(|(s, t)| ((x + s * a.error).powf(y + t * b.error) - power).abs());
            (
                power,
                reach.into_iter().fold(0.0, |most: f64, one| if one.is_nan() { one } else { most.max(one) }),
                2.0,
            )
        }
        // Max and min.
        _ => {
            let nan = x.is_nan() || y.is_nan();
            let first = if f == Binary::Max { x >= y } else { x <= y };
            let result = if nan {
                f64::NAN
            } else if first {
                x
            } else {
                y
            };
            let join = |x: f64, y: f64| if f == Binary::Max { x.max(y) } else { x.min(y) };
            let (low, high) = (join(x - a.error, y - b.error), join(x + a.error, y + b.error));
            let reach = if exact || nan { 0.0 } else { (high - result).max(result - low) };
            (result, reach, 0.0)
        }
    };
    // With exact arguments the result is what it is. So is it if it is NaN or infinite because an argument is.
    if exact && !result.is_finite() {
        return Approx::exact(result);
    }
    let infinite = !x.is_finite() || !y.is_finite();
    if !result.is_finite() || reach.is_nan() {
        let settled = infinite && matches!(f, Binary::Add | Binary::Sub | Binary::Max | Binary::Min);
        return if settled || x.is_nan() || y.is_nan() { Approx::exact(result) } else { Approx::unknown() };
    }
    if reach.is_infinite() {
        return Approx::unknown();
    }
    overflowed(Approx {
        value: result,
        error: reach
            + roundings * U * (result.abs() + reach)
            + if exact { tiny(roundings) / 4.0 } else { tiny(roundings) },
    })
}

pub(super) fn select(condition: Approx, a: Approx, b: Approx) -> Approx {
    if !condition.is_unknown() {
        return if condition.value != 0.0 { a } else { b };
    }
    let apart = (a.value - b.value).abs();
    match apart.is_finite() && !a.is_unknown() && !b.is_unknown() {
        true => Approx { error: apart + a.error.max(b.error), ..if condition.value != 0.0 { a } else { b } },
        false => Approx { error: f64::INFINITY, ..if condition.value != 0.0 { a } else { b } },
    }
}

/// Whole numbers of a type wrap around.
fn wrap(x: i64, dtype: DType) -> i64 {
    if dtype == DType::I32 { i64::from(x as i32) } else { x }
}

pub(super) fn unary_int(f: Unary, x: i64, dtype: DType) -> i64 {
    let y = match f {
        Unary::Neg => x.wrapping_neg(),
        Unary::Abs => x.wrapping_abs(),
        Unary::Sign => x.signum(),
        Unary::Square => x.wrapping_mul(x),
        Unary::Relu => x.max(0),
        _ => x,
    };
    wrap(y, dtype)
}

pub(super) fn binary_int(f: Binary, x: i64, y: i64, dtype: DType) -> i64 {
    let z = match f {
        Binary::Add => x.wrapping_add(y),
        Binary::Sub => x.wrapping_sub(y),
        Binary::Mul => x.wrapping_mul(y),
        Binary::Max => x.max(y),
        _ => x.min(y),
    };
    wrap(z, dtype)
}

pub(super) fn reduce_int(f: Reduce, row: &[Option<i64>]) -> Option<i64> {
    let row: Option<Vec<i64>> = row.iter().copied().collect();
    let row = row?;
    Some(match f {
        Reduce::Max => row.into_iter().max().unwrap_or(i64::MIN),
        Reduce::Min => row.into_iter().min().unwrap_or(i64::MAX),
        _ => row.into_iter().fold(0, i64::wrapping_add),
    })
}
