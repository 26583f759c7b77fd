use super::*;
use crate::cpu::Tier;

#[repr(align(64))]
struct Step([u16; STEP_BYTES / 2]);

impl Step {
    fn new() -> Step {
        Step([7; STEP_BYTES / 2])
    }

    /// The terms of element `k` of row or column `lane`.
    fn terms(&self, left: bool, lane: usize, k: usize) -> [f32; 3] {
        let at = if left { lane % HALF * 32 + k } else { k / 2 * 32 + lane % HALF * 2 + k % 2 };
        std::array::from_fn(|p| {
            let bits = self.0[p * TERM / 2 + lane / HALF * TILE / 2 + at];
            f32::from_bits(u32::from(bits) << 16)
        })
    }
}

/// Both packers on the first `len` elements of 32 rows: a left and a right step.
fn split_both(numbers: &[f32], len: usize) -> [Step; 2] {
    let (mut left, mut right) = (Step::new(), Step::new());
    for lane in 0..PANEL {
        let row = &numbers[lane * STEP..][..STEP];
        // SAFETY: the instructions are there, and the memory is the test's.
        let largest = unsafe {
            let zero = _mm512_setzero_si512();
            magnitude(split_row(row.as_ptr(), len, lane, left.0.as_mut_ptr().cast(), zero))
        };
        assert_eq!(largest, expected_magnitude(&row[..len]));
    }
    for g in 0..2 {
        let columns: Vec<f32> =
            (0..STEP * HALF).map(|i| numbers[(g * HALF + i % HALF) * STEP + i / HALF]).collect();
        // SAFETY: as above.
        let largest = unsafe {
            let zero = _mm512_setzero_si512();
            let to = right.0.as_mut_ptr().cast();
            let largest = split_columns(columns.as_ptr(), (HALF, 0), len, g, to, zero);
            std::mem::transmute::<__m512i, [u32; 16]>(magnitudes(largest))
        };
        for (lane, largest) in largest.into_iter().enumerate() {
            assert_eq!(largest, expected_magnitude(&numbers[(g * HALF + lane) * STEP..][..len]));
        }
    }
    [left, right]
}

fn expected_magnitude(numbers: &[f32]) -> u32 {
    let magnitude = |x: &f32| {
        let bits = x.abs().to_bits();
        (bits + 0x8000) & !0xffff & 0x7fff_ffff | u32::from(bits & 0xffff != 0) << 16
    };
    numbers.iter().map(magnitude).max().unwrap_or(0)
}

/// A step of numbers: every fourth has the exponent `field`, the others any up to that of 2^99.
fn numbers(field: u32) -> Vec<f32> {
    let mut state = 12345 + field;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state
    };
    (0..STEP * PANEL)
        .map(|i| {
            let (mantissa, any) = (next(), next() >> 9);
            let exponent = if i % 4 == 3 { field } else { any % 227 };
            f32::from_bits(mantissa & 0x807f_ffff | exponent << 23)
        })
        .collect()
}

/// What the three terms of a finite number are, written as its definition.
fn expected_terms(x: f32) -> [f32; 3] {
    let upper = |x: f32| f32::from_bits(x.to_bits() & !0xffff);
    let rounded = |x: f32| f32::from_bits((x.to_bits() + 0x8000) & !0xffff);
    let x0 = rounded(x);
    let x1 = rounded(x - x0);
    [x0, x1, upper(x - x0 - x1)]
}

/// 2 to the power of `n`.
fn power(n: i32) -> f64 {
    2f64.powi(n)
}

/// The packers need no tiles, so they are tested on every machine with their instructions.
fn has_instructions() -> bool {
    Tier::supported() >= Tier::Avx512
}

#[test]
fn terms_are_those_of_the_number_for_every_exponent() {
    if !has_instructions() {
        return;
    }
    // Up to the largest number whose first term is finite.
    for field in 0..=253 {
        let numbers = numbers(field);
        let [left, right] = split_both(&numbers, STEP);
        for (at, &x) in numbers.iter().enumerate() {
            let (lane, k) = (at / STEP, at % STEP);
            let [a, b] = [left.terms(true, lane, k), right.terms(false, lane, k)];
            assert_eq!(a.map(f32::to_bits), expected_terms(x).map(f32::to_bits), "{x:e} in a row");
            assert_eq!(b.map(f32::to_bits), a.map(f32::to_bits), "{x:e} in a column");
            let lost = (a.iter().map(|&t| f64::from(t)).sum::<f64>() - f64::from(x)).abs();
            let most = if f64::from(x.abs()) >= power(-110) { 0.0 } else { power(-133) };
            assert!(lost <= most, "{x:e}: {a:?} lose {lost:e}");
            let [x0, x1, x2] = a.map(|t| f64::from(t.abs()));
            // Half a unit in the last place of bf16, whose units end at 2^-133.
            assert!(x1 <= (x0 / 256.0).max(power(-133)) && x2 <= (x0 / 65536.0).max(power(-133)), "{a:?}");
        }
    }
}

#[test]
fn numbers_at_the_borders_of_terms() {
    if !has_instructions() {
        return;
    }
    let mut numbers = numbers(100);
    let least = f32::from_bits(1);
    let special = [0.0, -0.0, 1.0, 2.5e-20, least, -least, f32::MIN_POSITIVE, 1.37 * f32::MIN_POSITIVE];
    numbers[..8].copy_from_slice(&special);
    for (number, bits) in numbers[8..].iter_mut().zip([0x3f80_8000, 0xbf7f_ffff, 0x7fff, 0x8000, 0x807f_ffff])
    {
        *number = f32::from_bits(bits);
    }
    for len in [STEP, 31, 17, 16, 15, 1, 0] {
        let [left, right] = split_both(&numbers, len);
        for at in 0..STEP * PANEL {
            let (lane, k) = (at / STEP, at % STEP);
            let expected = if k < len { expected_terms(numbers[at]) } else { [0.0; 3] };
            assert_eq!(left.terms(true, lane, k), expected, "{at}");
            assert_eq!(right.terms(false, lane, k), expected, "{at}");
        }
    }
}

/// Numbers whose terms are all zero are no zeros: their sums are not those of nothing.
#[test]
fn numbers_too_small_for_terms_are_seen() {
    if !has_instructions() {
        return;
    }
    for bits in [1, 0x8000_0001, 0x3fff, 0x7fff] {
        let mut numbers = vec![0.0; STEP * PANEL];
        numbers.iter_mut().step_by(7).for_each(|number| *number = f32::from_bits(bits));
        let row: [_; STEP] = std::array::from_fn(|i| numbers[i]);
        assert_eq!(expected_magnitude(&row), 0x1_0000);
        let [left, _] = split_both(&numbers, STEP);
        assert_eq!(left.terms(true, 0, 0), [0.0; 3]);
    }
}

/// What is not finite either has a first term that is not, by which its row is known, or reaches every product.
#[test]
fn what_is_not_finite_stays_so() {
    if !has_instructions() {
        return;
    }
    let odd = [0x7f80_0000, 0xff80_0000, 0x7fc0_0000, 0x7f80_0001, 0x7fff_ffff, 0xffff_8000, 0x7f7f_ffff];
    for bits in odd {
        let mut numbers = vec![1.0; STEP * PANEL];
        numbers[5 * STEP + 4] = f32::from_bits(bits);
        let mut steps = [Step::new(), Step::new()];
        for lane in 0..PANEL {
            // SAFETY: the instructions are there, and the memory is the test's.
            unsafe {
                let to = steps[0].0.as_mut_ptr().cast();
                split_row(numbers[lane * STEP..].as_ptr(), STEP, lane, to, _mm512_setzero_si512());
            }
        }
        let columns: Vec<f32> = (0..STEP * HALF).map(|i| numbers[i % HALF * STEP + i / HALF]).collect();
        // SAFETY: as above.
        unsafe {
            let to = steps[1].0.as_mut_ptr().cast();
            split_columns(columns.as_ptr(), (HALF, 0), STEP, 0, to, _mm512_setzero_si512());
        }
        for (left, step) in [true, false].into_iter().zip(&steps) {
            let terms = step.terms(left, 5, 4);
            assert!(!terms[0].is_finite() || terms[2].is_nan(), "{bits:#x}: {terms:?}");
            assert_eq!(step.terms(left, 5, 5), [1.0, 0.0, 0.0], "the neighbour of {bits:#x}");
        }
    }
}
