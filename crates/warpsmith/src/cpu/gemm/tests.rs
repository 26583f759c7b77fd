//! Every instruction set against a loop in f64, and the promises about bits.

use super::*;
use crate::cpu::{CpuElement, Simd, math, rows, with_threads};
use crate::tensor::{F8E4M3, F8E5M2};
use half::{bf16, f16};

/// Numbers in `-1..1` from a fixed sequence.
fn values(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

fn elements<T: CpuElement>(len: usize, seed: u64) -> Vec<T> {
    values(len, seed).into_iter().map(T::from_f32).collect()
}

/// How a matrix lies in memory.
#[derive(Copy, Clone, Debug, PartialEq)]
enum Arrangement {
    Dense,
    /// Rows with gaps between them.
    Gaps,
    /// Rows that start on cache lines.
    Lines,
    /// Columns are contiguous.
    Transposed,
    /// Every third element, rows from the last to the first.
    Backwards,
}

/// The `[rows, k]` matrix of `dense` laid out as `arrangement`, with NaN in every gap.
struct Laid<T> {
    data: Vec<T>,
    matrix: Matrix,
}

fn lay<T: CpuElement>(dense: &[T], rows: usize, k: usize, arrangement: Arrangement) -> Laid<T> {
    let (r, c) = (rows as isize, k as isize);
    let line = (64 / size_of::<T>()) as isize;
    let (row_stride, k_stride, mut first, len) = match arrangement {
        Arrangement::Dense => (c, 1, 0, r * c),
        Arrangement::Gaps => (c + 5, 1, 3, r * (c + 5) + 3),
        Arrangement::Lines => (c.div_euclid(line) * line + line, 1, 0, (r + 1) * (c + line) + line),
        Arrangement::Transposed => (1, r, 0, r * c),
        Arrangement::Backwards => (-3 * c - 1, 3, (r - 1).max(0) * (3 * c + 1), r * (3 * c + 1)),
    };
    let mut data = vec![T::from_f32(f32::NAN); len as usize];
    if arrangement == Arrangement::Lines {
        first = data.as_ptr().align_offset(64) as isize;
    }
    for i in 0..rows {
        for j in 0..k {
            data[(first + i as isize * row_stride + j as isize * k_stride) as usize] = dense[i * k + j];
        }
    }
    let start = data.as_ptr().wrapping_add(first as usize).cast();
    Laid { matrix: Matrix { data: start, dtype: T::DTYPE, rows, k, row_stride, k_stride }, data }
}

/// For each element of `x · wᵀ`: the product in f64, in plain f32, and the sum of the magnitudes.
fn reference<T: CpuElement>(x: &[T], w: &[T], m: usize, n: usize, k: usize) -> Vec<(f64, f32, f64)> {
    let wide = |v: &[T]| v.iter().map(|v| v.to_f32()).collect::<Vec<_>>();
    let (x, w) = (wide(x), wide(w));
    let mut out = Vec::with_capacity(m * n);
    for i in 0..m {
        for j in 0..n {
            let (mut exact, mut naive, mut size) = (0f64, 0f32, 0f64);
            for (a, b) in x[i * k..][..k].iter().zip(&w[j * k..][..k]) {
                let product = f64::from(*a) * f64::from(*b);
                exact += product;
                naive += a * b;
                size += product.abs();
            }
            out.push((exact, naive, size));
        }
    }
    out
}

fn product(gemm: &Gemm<'_>, n: usize) -> Vec<f32> {
    let mut out = vec![f32::NAN; gemm.x.rows * n];
    // SAFETY: the matrices of the tests own their memory, and `out` holds m x n.
    unsafe { run(gemm, &Output::dense(&mut out, n)) };
    out
}

/// Unpacked and packed, on every instruction set, against the loop; both must agree bit for bit.
fn check<T: CpuElement>(m: usize, n: usize, k: usize, arrangements: (Arrangement, Arrangement)) {
    let (x, w) = (elements::<T>(m * k, 1), elements::<T>(n * k, 2));
    let expected = reference(&x, &w, m, n, k);
    let (x, w) = (lay(&x, m, k, arrangements.0), lay(&w, n, k, arrangements.1));
    for isa in Isa::available() {
        let what = format!("{} {m} x {n} x {k} {arrangements:?} on {isa:?}", T::DTYPE);
        let gemm = Gemm { x: x.matrix, weights: Weights::Plain(w.matrix), isa };
        let out = product(&gemm, n);
        let (mut error, mut naive_error) = (0f64, 0f64);
        for (i, (&got, &(exact, naive, size))) in out.iter().zip(&expected).enumerate() {
            let e = (f64::from(got) - exact).abs();
            // What any order of f32 sums keeps.
            assert!(
                e <= (k as f64 + 2.0) * 2f64.powi(-24) * size,
                "{what}: element {i} is {got}, not {exact}"
            );
            error += e * e;
            naive_error += (f64::from(naive) - exact).powi(2);
        }
        if m * n >= 200 {
            assert!(error.sqrt() <= 2.0 * naive_error.sqrt(), "{what}: {error:e} against {naive_error:e}");
        }
        // SAFETY: the matrix is alive.
        let packed = unsafe { pack(isa, T::DTYPE, &gemm.weights) }.unwrap().unwrap();
        assert_eq!((packed.n(), packed.k(), packed.isa()), (n, k, isa));
        let from_packed = product(&Gemm { weights: Weights::Packed(&packed), ..gemm }, n);
        assert_eq!(bits(&out), bits(&from_packed), "{what}: packed");
    }
    drop((x.data, w.data));
}

fn bits(v: &[f32]) -> Vec<u32> {
    v.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn awkward_sizes_match_a_loop_in_f64() {
    let sizes = [0, 1, 15, 17, 31, 33, 65];
    for m in sizes {
        for n in sizes {
            for k in sizes {
                check::<f32>(m, n, k, (Arrangement::Dense, Arrangement::Dense));
                check::<bf16>(m, n, k, (Arrangement::Dense, Arrangement::Dense));
            }
        }
    }
}

#[test]
fn blocks_of_k_rows_and_columns_match_a_loop_in_f64() {
    for (m, n, k) in [(257, 33, 65), (33, 257, 1537), (3, 1100, 1030), (300, 520, 257), (1, 129, 2049)] {
        check::<f32>(m, n, k, (Arrangement::Dense, Arrangement::Gaps));
        check::<bf16>(m, n, k, (Arrangement::Gaps, Arrangement::Dense));
        check::<bf16>(m, n, k, (Arrangement::Lines, Arrangement::Lines));
    }
}

/// Sizes for which the operands change places, k is cut, and blocks and strips are not whole.
#[test]
fn strips_match_a_loop_in_f64() {
    for (m, n, k) in [(70, 300, 4200), (300, 70, 4200), (200, 530, 96), (530, 200, 96), (520, 600, 33)] {
        for threads in [1, 3] {
            with_threads(threads, || check::<bf16>(m, n, k, (Arrangement::Lines, Arrangement::Lines)));
        }
        for threads in [1, 3] {
            with_threads(threads, || check::<f32>(m, n, k, (Arrangement::Dense, Arrangement::Dense)));
        }
    }
}

#[test]
fn every_type_and_layout_matches_a_loop_in_f64() {
    let arrangements =
        [Arrangement::Dense, Arrangement::Gaps, Arrangement::Transposed, Arrangement::Backwards];
    for (m, n, k) in [(1, 40, 70), (5, 31, 33), (37, 45, 131)] {
        for a in arrangements {
            for b in arrangements {
                check::<f32>(m, n, k, (a, b));
                check::<bf16>(m, n, k, (a, b));
                check::<f16>(m, n, k, (a, b));
                check::<F8E4M3>(m, n, k, (a, b));
                check::<F8E5M2>(m, n, k, (a, b));
            }
        }
    }
}

#[test]
fn types_may_differ() {
    let (m, n, k) = (19, 35, 77);
    let (x, w) = (elements::<bf16>(m * k, 1), elements::<F8E4M3>(n * k, 2));
    let wide: Vec<f32> = x.iter().map(|&v| v.to_f32()).collect();
    let w_wide: Vec<f32> = w.iter().map(|v| v.to_f32()).collect();
    let expected = reference(&wide, &w_wide, m, n, k);
    for isa in Isa::available() {
        for x in [Matrix::dense(&x, m, k), Matrix::dense(&wide, m, k)] {
            let out = product(&Gemm { x, weights: Weights::Plain(Matrix::dense(&w, n, k)), isa }, n);
            for (got, (exact, _, size)) in out.iter().zip(&expected) {
                assert!((f64::from(*got) - exact).abs() <= 1e-5 * size, "{isa:?} {got} {exact}");
            }
        }
    }
}

/// The rows of a large product, each alone and in batches of many sizes.
fn check_batch_invariance<T: CpuElement>(n: usize, k: usize) {
    const M: usize = 300;
    let (x, w) = (elements::<T>(M * k, 3), elements::<T>(n * k, 4));
    for isa in Isa::available() {
        let weights = Weights::Plain(Matrix::dense(&w, n, k));
        // SAFETY: the matrix is alive.
        let packed = unsafe { pack(isa, T::DTYPE, &weights) }.unwrap().unwrap();
        let all = product(&Gemm { x: Matrix::dense(&x, M, k), weights, isa }, n);
        for m in 1..=40 {
            let first = (m * 7) % (M - m);
            for (threads, weights) in [(1, weights), (3, weights), (2, Weights::Packed(&packed))] {
                let gemm = Gemm { x: Matrix::dense(&x[first * k..], m, k), weights, isa };
                let some = with_threads(threads, || product(&gemm, n));
                assert!(bits(&some) == bits(&all[first * n..][..m * n]), "{} {isa:?}: {m} rows", T::DTYPE);
            }
        }
    }
}

#[test]
fn a_rows_bits_do_not_depend_on_the_batch() {
    check_batch_invariance::<f32>(70, 600);
    check_batch_invariance::<f32>(130, 1500);
    check_batch_invariance::<f32>(40, 20);
    check_batch_invariance::<bf16>(70, 1100);
    check_batch_invariance::<f16>(33, 50);
    check_batch_invariance::<F8E4M3>(48, 545);
}

/// Weights whose columns are contiguous, as in a gradient: few rows use them in place, many do not.
#[test]
fn few_rows_of_weights_in_columns_have_the_bits_of_many() {
    const M: usize = 40;
    check::<f32>(3, 40, 0, (Arrangement::Gaps, Arrangement::Transposed));
    for (n, k) in [(1, 9), (31, 33), (33, 40), (300, 70), (2500, 33), (70, 1030)] {
        check::<f32>(3, n, k, (Arrangement::Gaps, Arrangement::Transposed));
        let (mut x, mut w) = (values(M * k, 30), values(n * k, 31));
        for special in [false, true] {
            if special {
                // What tiles cannot multiply, in some rows and columns.
                (x[3 * k], x[20 * k + k / 2]) = (f32::INFINITY, 1e30);
                (w[n / 2 * k + k / 2], w[(n - 1) * k], w[k - 1]) = (1e30, f32::NAN, 1e-35);
            }
            let laid = lay(&w, n, k, Arrangement::Transposed);
            for isa in Isa::available() {
                let rows = |m: usize| {
                    let weights = Weights::Plain(laid.matrix);
                    product(&Gemm { x: Matrix::dense(&x, m, k), weights, isa }, n)
                };
                let all = rows(M);
                for m in [1, 2, 5, 14, 16, 17, 32] {
                    for threads in [1, 3] {
                        let some = with_threads(threads, || rows(m));
                        assert!(bits(&some) == bits(&all[..m * n]), "{isa:?}: {m} x {n} x {k} {special}");
                    }
                }
            }
        }
    }
}

#[test]
fn nan_and_infinity_go_where_a_loop_puts_them() {
    let (m, n, k) = (37, 70, 45);
    for isa in Isa::available() {
        for (special, row, at) in [(f32::NAN, 0, 0), (f32::INFINITY, 36, 44), (f32::NEG_INFINITY, 16, 31)] {
            for in_x in [true, false] {
                let (mut x, mut w) = (elements::<bf16>(m * k, 5), elements::<bf16>(n * k, 6));
                w[3 * k + at] = bf16::ZERO;
                x[5 * k + at] = bf16::ZERO;
                if in_x {
                    x[row * k + at] = bf16::from_f32(special)
                } else {
                    w[row * k + at] = bf16::from_f32(special)
                };
                for few in [m, 1] {
                    let wide = |v: &[bf16]| v.iter().map(|v| v.to_f32()).collect::<Vec<_>>();
                    let expected = reference(&wide(&x), &wide(&w), few, n, k);
                    let (xf, wf) = (wide(&x), wide(&w));
                    for (x, w) in [
                        (Matrix::dense(&x, few, k), Matrix::dense(&w, n, k)),
                        (Matrix::dense(&xf, few, k), Matrix::dense(&wf, n, k)),
                    ] {
                        let out = product(&Gemm { x, weights: Weights::Plain(w), isa }, n);
                        for (i, (got, (exact, ..))) in out.iter().zip(&expected).enumerate() {
                            let same = got.is_nan() == exact.is_nan()
                                && got.is_infinite() == exact.is_infinite()
                                && (!got.is_infinite() || f64::from(*got) == *exact);
                            assert!(same, "{isa:?} {} {special} in_x {in_x}: {i}: {got} {exact}", x.dtype);
                        }
                    }
                }
            }
        }
    }
}

/// Rows of every size: those that tiles cannot multiply are multiplied otherwise, wherever they are in a batch.
#[test]
fn numbers_of_any_size_keep_their_precision() {
    let scales = [1.0, 1e30, 0.0, 1e-30, 1e-12, 3e12, 1e-40, 1e22, 1e-22];
    for (m, n, k) in [(40, 70, 600), (3, 50, 100), (90, 33, 2500)] {
        let scaled = |rows: usize, seed| -> Vec<f32> {
            let mut all = values(rows * k, seed);
            for (row, all) in all.chunks_mut(k).enumerate() {
                all.iter_mut().for_each(|v| *v *= if row < rows / 2 { scales[row % 9] } else { 1.0 });
            }
            all
        };
        let (x, w) = (scaled(m, 20), scaled(n, 21));
        let expected = reference(&x, &w, m, n, k);
        for isa in Isa::available() {
            let weights = Weights::Plain(Matrix::dense(&w, n, k));
            let all = product(&Gemm { x: Matrix::dense(&x, m, k), weights, isa }, n);
            for (i, (&got, &(exact, naive, size))) in all.iter().zip(&expected).enumerate() {
                // Subnormals have a precision of their own.
                let allowed = (k as f64 + 2.0) * (2f64.powi(-24) * size + 2f64.powi(-149));
                let good = match (exact as f32).is_finite() && naive.is_finite() {
                    true => (f64::from(got) - exact).abs() <= allowed,
                    false => got == naive || !naive.is_finite() && !got.is_finite(),
                };
                assert!(good, "{isa:?} {m} x {n} x {k}: element {i} is {got}, not {exact} or {naive}");
            }
            // SAFETY: the matrix is alive.
            let packed = unsafe { pack(isa, DType::F32, &weights) }.unwrap().unwrap();
            for rows in [1, 2, 17, 40] {
                let rows = rows.min(m);
                for first in [0, m - rows] {
                    for weights in [weights, Weights::Packed(&packed)] {
                        let x = Matrix::dense(&x[first * k..], rows, k);
                        let some = product(&Gemm { x, weights, isa }, n);
                        assert!(bits(&some) == bits(&all[first * n..][..rows * n]), "{isa:?}: {rows} rows");
                    }
                }
            }
        }
    }
}

/// Bits, with all NaN alike.
fn bits_but_nan(v: &[f32]) -> Vec<u32> {
    v.iter().map(|x| if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() }).collect()
}

/// Weights of 16 bits beside f32 have the bits of the same weights in f32, packed or not.
fn check_widened<T: CpuElement>(x: &[f32], w: &[T], (m, n, k): (usize, usize, usize), at: Arrangement) {
    let wide: Vec<f32> = w.iter().map(|w| w.to_f32()).collect();
    let (laid, wide) = (lay(w, n, k, at), Matrix::dense(&wide, n, k));
    let x = Matrix::dense(x, m, k);
    for isa in Isa::available() {
        let expected = bits_but_nan(&product(&Gemm { x, weights: Weights::Plain(wide), isa }, n));
        let plain = Weights::Plain(laid.matrix);
        // SAFETY: the matrix is alive.
        let packed = unsafe { pack(isa, DType::F32, &plain) }.unwrap().unwrap();
        assert!(packed.fits(DType::F32));
        // Whole panels, and no more than the weights themselves.
        assert_eq!(packed.bytes(), n.next_multiple_of(32) * k * size_of::<T>(), "{isa:?}");
        for (threads, weights) in
            [(1, plain), (3, plain), (1, Weights::Packed(&packed)), (3, Weights::Packed(&packed))]
        {
            let out = with_threads(threads, || product(&Gemm { x, weights, isa }, n));
            assert!(bits_but_nan(&out) == expected, "{} {m} x {n} x {k} {at:?} on {isa:?}", T::DTYPE);
        }
    }
}

#[test]
fn weights_of_16_bits_are_widened_exactly() {
    for (m, n, k) in
        [(1, 1, 1), (1, 300, 70), (2, 33, 1030), (3, 31, 0), (4, 200, 33), (5, 70, 600), (40, 700, 65)]
    {
        let x = values(m * k, 40);
        for at in [Arrangement::Dense, Arrangement::Gaps, Arrangement::Transposed, Arrangement::Backwards] {
            check_widened::<f16>(&x, &elements(n * k, 41), (m, n, k), at);
            check_widened::<bf16>(&x, &elements(n * k, 42), (m, n, k), at);
        }
    }
    // All numbers that there are, each alone in a sum, and all at once.
    let (n, k) = (1 << 10, 1 << 6);
    let every_f16: Vec<f16> = (0..=u16::MAX).map(f16::from_bits).collect();
    let every_bf16: Vec<bf16> = (0..=u16::MAX).map(bf16::from_bits).collect();
    let mut one_each = vec![0f32; k * k];
    (0..k).for_each(|i| one_each[i * k + i] = 1.0);
    for x in [one_each, values(k * k, 43)] {
        for m in [1, 4, 64] {
            check_widened(&x[..m * k], &every_f16, (m, n, k), Arrangement::Dense);
            check_widened(&x[..m * k], &every_bf16, (m, n, k), Arrangement::Dense);
        }
    }
}

/// Numbers with any exponent from that of the least subnormal to `2^most`, `most` of each row in turn; every fifth is zero.
fn any_exponents(rows: usize, k: usize, seed: u64) -> Vec<f32> {
    const MOST: [i32; 5] = [0, 20, -40, 60, -90];
    let mut all = values(rows * k, seed);
    for (row, all) in all.chunks_mut(k).enumerate() {
        for (i, v) in all.iter_mut().enumerate() {
            let spread = (149 + MOST[row % 5]) as f32;
            // The digits of a number that is not used otherwise.
            let exponent = -149 + ((*v * 4096.0).fract().abs() * spread) as i32;
            *v = if i % 5 == 4 { 0.0 } else { (f64::from(*v) * 2f64.powi(exponent)) as f32 };
        }
    }
    all
}

/// Each sum is as exact as one of f32, however small its factors are and however large others in the same rows.
#[test]
fn factors_of_every_exponent_keep_their_precision() {
    for (m, n, k) in [(40, 70, 600), (3, 50, 64), (70, 33, 40)] {
        let (mut x, mut w) = (any_exponents(m, k, 40), any_exponents(n, k, 41));
        // Rows of usual numbers with a tiny one among them, in pairs with its neighbours.
        x[..k].fill(0.5);
        w[..k].fill(1.0);
        (x[k / 2], x[k - 1]) = (1.37 * f32::MIN_POSITIVE, f32::from_bits(3));
        (w[k / 2 + 2], w[1]) = (-1.37 * f32::MIN_POSITIVE, f32::from_bits(0x7f_ffff));
        let expected = reference(&x, &w, m, n, k);
        for arrangement in [Arrangement::Dense, Arrangement::Transposed] {
            let laid = lay(&w, n, k, arrangement);
            for isa in Isa::available() {
                let weights = Weights::Plain(laid.matrix);
                let all = product(&Gemm { x: Matrix::dense(&x, m, k), weights, isa }, n);
                for (i, (&got, &(exact, _, size))) in all.iter().zip(&expected).enumerate() {
                    let allowed = (k as f64 + 2.0) * (2f64.powi(-24) * size + 2f64.powi(-149));
                    let error = (f64::from(got) - exact).abs();
                    let what = format!("{isa:?} {arrangement:?} {m} x {n} x {k}");
                    assert!(
                        error <= allowed,
                        "{what}: element {i} is {got:e}, not {exact:e} within {allowed:e}"
                    );
                }
                // SAFETY: the matrix is alive.
                let packed = unsafe { pack(isa, DType::F32, &weights) }.unwrap().unwrap();
                for rows in [1, 2, 17, 33] {
                    let rows = rows.min(m);
                    for weights in [weights, Weights::Packed(&packed)] {
                        let some = product(&Gemm { x: Matrix::dense(&x, rows, k), weights, isa }, n);
                        assert!(
                            bits(&some) == bits(&all[..rows * n]),
                            "{isa:?} {arrangement:?}: {rows} rows"
                        );
                    }
                }
            }
        }
    }
}

/// One accumulator for all of a long row would round more with every addition.
#[test]
fn long_sums_are_made_of_blocks() {
    let (m, n, k) = (20, 40, 16_384);
    let (x, w) = (values(m * k, 50), values(n * k, 51));
    let expected = reference(&x, &w, m, n, k);
    let naive: f64 = expected.iter().map(|(exact, naive, _)| (f64::from(*naive) - exact).powi(2)).sum();
    for arrangement in [Arrangement::Dense, Arrangement::Transposed] {
        let laid = lay(&w, n, k, arrangement);
        for isa in Isa::available() {
            for rows in [1, 7, m] {
                let x = Matrix::dense(&x, rows, k);
                let out = product(&Gemm { x, weights: Weights::Plain(laid.matrix), isa }, n);
                let error: f64 = out
                    .iter()
                    .zip(&expected)
                    .map(|(&got, (exact, ..))| (f64::from(got) - exact).powi(2))
                    .sum();
                let ratio = (naive * rows as f64 / m as f64 / error).sqrt();
                let least = if isa.has_tiles() { 1.5 } else { 3.0 };
                assert!(ratio >= least, "{isa:?} {arrangement:?} {rows} rows: 1/{ratio} of the naive error");
            }
        }
    }
}

/// `act(x · gateᵀ) * (x · upᵀ)` with a bias on the gate.
struct Swiglu<'a> {
    bias: &'a [f32],
    out: Output<f32>,
}

impl Epilogue for Swiglu<'_> {
    #[inline(always)]
    unsafe fn finish<S: Simd>(&self, s: S, tile: &Tile) {
        tile.for_pairs(
            s,
            #[inline(always)]
            // SAFETY: the test's memory holds the tile.
            |row, col, count, gate, up| unsafe {
                let bias = rows::load_at(s, self.bias.as_ptr(), col, count);
                let gate = math::silu(s, s.add(gate, bias));
                self.out.store(s, row, col, count, s.mul(gate, up), false);
            },
        );
    }
}

#[test]
fn gated_products_meet_in_one_tile() {
    for (m, n, k) in [(1, 40, 70), (20, 16, 33), (37, 53, 600), (4, 1, 1)] {
        let x = elements::<bf16>(m * k, 7);
        // Interleaved: gate rows are even, the others odd. Halves: all gate rows first.
        let w = elements::<bf16>(2 * n * k, 8);
        let bias = values(n, 9);
        let all = Matrix::dense(&w, 2 * n, k);
        let even = Matrix { rows: n, row_stride: 2 * k as isize, ..all };
        let odd = Matrix { data: w[k..].as_ptr().cast(), ..even };
        let first = Matrix { rows: n, ..all };
        let second = Matrix { data: w[n * k..].as_ptr().cast(), ..first };
        for isa in Isa::available() {
            for (gate, up) in [(even, odd), (first, second)] {
                let plain =
                    |w| product(&Gemm { x: Matrix::dense(&x, m, k), weights: Weights::Plain(w), isa }, n);
                let (gates, ups) = (plain(gate), plain(up));
                let weights = Weights::Gated { gate, up };
                // SAFETY: the matrices are alive.
                let packed = unsafe { pack(isa, DType::BF16, &weights) }.unwrap().unwrap();
                for weights in [weights, Weights::Packed(&packed)] {
                    let mut out = vec![f32::NAN; m * n];
                    let epilogue = Swiglu { bias: &bias, out: Output::dense(&mut out, n) };
                    // SAFETY: the matrices are alive and `out` holds the product.
                    unsafe { run(&Gemm { x: Matrix::dense(&x, m, k), weights, isa }, &epilogue) };
                    for i in 0..m * n {
                        let gate = f64::from(gates[i] + bias[i % n]);
                        let expected = gate / (1.0 + (-gate).exp()) * f64::from(ups[i]);
                        let close = (f64::from(out[i]) - expected).abs() <= 1e-6 * expected.abs() + 1e-30;
                        assert!(close, "{isa:?} {m} x {n} x {k}: {i}: {} is not {expected}", out[i]);
                    }
                }
            }
        }
    }
}

#[test]
fn outputs_may_have_any_strides() {
    let (m, n, k) = (20, 37, 50);
    let (x, w) = (elements::<f32>(m * k, 10), elements::<f32>(n * k, 11));
    for isa in Isa::available() {
        let gemm = Gemm { x: Matrix::dense(&x, m, k), weights: Weights::Plain(Matrix::dense(&w, n, k)), isa };
        let expected = product(&gemm, n);
        // Transposed, every second element.
        let mut out = vec![bf16::MAX; 2 * m * n];
        let output = Output { data: out.as_mut_ptr(), row_stride: 2, col_stride: 2 * m as isize };
        // SAFETY: `out` holds every element the strides reach.
        unsafe { run(&gemm, &output) };
        for i in 0..m {
            for j in 0..n {
                assert_eq!(out[2 * (j * m + i)], bf16::from_f32(expected[i * n + j]), "{isa:?} {i} {j}");
                assert_eq!(out[2 * (j * m + i) + 1], bf16::MAX);
            }
        }
    }
}
