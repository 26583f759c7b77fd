//! The polynomials of pieces, worked out by the compiler.

use crate::cpu::math::{GELU_TANH_A, GELU_TANH_B};

/// What an activation multiplies `x` by.
#[derive(Clone, Copy)]
pub enum Factor {
    /// GELU.
    NormalDistribution,
    /// The tanh form of GELU.
    TanhOfGelu,
    /// SiLU.
    Sigmoid,
    /// Mish.
    TanhOfSoftplus,
}

/// The most terms of a polynomial.
const MOST: usize = 8;

/// The polynomial in `x - center` of so many `terms` for `factor` between two places, or for its `product` with `x`, with about
/// the least relative error: the error of this one is the same, in turn too large and too small, at the extrema of a
/// Chebyshev polynomial.
pub const fn minimax(
    factor: Factor,
    [low, high]: [f64; 2],
    center: f64,
    terms: usize,
    product: bool,
) -> [f64; MOST] {
    let radius = 0.5 * (high - low);
    let mut rows = [[0.0; MOST + 2]; MOST + 1];
    let mut i = 0;
    while i <= terms {
        let x = low + radius * (1.0 + cos(i as f64 * std::f64::consts::PI / terms as f64));
        let f = factor.at(x);
        // In units of the radius, so that coefficients are of a size.
        let mut power = if product { 1.0 / (x * f) } else { 1.0 / f };
        let mut k = 0;
        while k < terms {
            rows[i][k] = power;
            power *= (x - center) / radius;
            k += 1;
        }
        rows[i][terms] = if i % 2 == 0 { 1.0 } else { -1.0 };
        rows[i][MOST + 1] = 1.0;
        i += 1;
    }
    let solution = solve(rows, terms + 1);
    let mut coefficients = [0.0; MOST];
    let (mut k, mut unit) = (0, 1.0);
    while k < terms {
        coefficients[k] = solution[k] / unit;
        unit *= radius;
        k += 1;
    }
    coefficients
}

/// Solves the first `n` of linear equations, given as coefficients and, last, the right side.
const fn solve(mut rows: [[f64; MOST + 2]; MOST + 1], n: usize) -> [f64; MOST + 1] {
    let mut k = 0;
    while k < n {
        let mut pivot = k;
        let mut i = k + 1;
        while i < n {
            if rows[i][k].abs() > rows[pivot][k].abs() {
                pivot = i;
            }
            i += 1;
        }
        (rows[k], rows[pivot]) = (rows[pivot], rows[k]);
        let mut i = 0;
        while i < n {
            if i != k {
                let ratio = rows[i][k] / rows[k][k];
                let mut j = k;
                while j < MOST + 2 {
                    rows[i][j] -= ratio * rows[k][j];
                    j += 1;
                }
            }
            i += 1;
        }
        k += 1;
    }
    let mut solution = [0.0; MOST + 1];
    let mut k = 0;
    while k < n {
        solution[k] = rows[k][MOST + 1] / rows[k][k];
        k += 1;
    }
    solution
}

impl Factor {
    const fn at(self, x: f64) -> f64 {
        match self {
            Factor::NormalDistribution => normal_distribution(x),
            Factor::TanhOfGelu => sigmoid(x * (GELU_TANH_A as f64 + GELU_TANH_B as f64 * x * x)),
            Factor::Sigmoid => sigmoid(x),
            Factor::TanhOfSoftplus => {
                let w = exp(x);
                let n = w * (w + 2.0);
                n / (n + 2.0)
            }
        }
    }
}

/// `e^x`.
const fn exp(x: f64) -> f64 {
    // The Taylor series of e^(x/1024), and squares.
    let t = x / 1024.0;
    let (mut sum, mut term, mut k) = (1.0, 1.0, 1);
    while k < 12 {
        term *= t / k as f64;
        sum += term;
        k += 1;
    }
    let mut k = 0;
    while k < 10 {
        sum *= sum;
        k += 1;
    }
    sum
}

/// The cosine, for `0 <= x <= pi`.
const fn cos(x: f64) -> f64 {
    let (mut sum, mut term, mut k) = (0.0, 1.0, 0);
    while k < 16 {
        sum += term;
        term *= -x * x / ((2 * k + 1) * (2 * k + 2)) as f64;
        k += 1;
    }
    sum
}

const fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + exp(-x))
}

/// The normal distribution function.
const fn normal_distribution(x: f64) -> f64 {
    let t = x.abs();
    let density = 0.398_942_280_401_432_7 * exp(-0.5 * t * t);
    // The tail: a continued fraction where t is large, else what a series leaves of one half.
    let tail = if t > 3.0 {
        let (mut fraction, mut k) = (t, 100);
        while k > 0 {
            fraction = t + k as f64 / fraction;
            k -= 1;
        }
        density / fraction
    } else {
        let (mut sum, mut term, mut k) = (0.0, t, 1);
        while k < 100 {
            sum += term;
            term *= t * t / (2 * k + 1) as f64;
            k += 1;
        }
        0.5 - density * sum
    };
    if x < 0.0 { tail } else { 1.0 - tail }
}
