//! The tolerance: error at most twice that of the naive computation in the same dtype, against `f64`, for every
//! element and as a norm.
//!
//! A single element of the naive result may be right by luck. So the naive error of an element is the largest of
//! three numbers: the error of the naive computation there; three standard deviations of its error if roundings are
//! random, which reflects how badly the element is conditioned; and half a unit in the last place of the output plus
//! one of the f32 arithmetic, because a correctly rounded result must pass. The naive error as a norm is at least three standard
//! deviations of the worst element: a few may all be right by luck, and one may outweigh all others. Where one cause makes all errors,
//! such as the sum of a row, a second sample of the naive computation, with other roundings, shows whether it was luck.

use crate::tensor::DType;
use std::fmt;

/// How far a result is from the truth.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Error {
    /// Largest `|out - truth|` divided by the tolerance; passes up to 1.
    pub worst: f64,
    /// `‖out - truth‖ / ‖truth‖` over finite elements (the absolute norm if the truth is zero).
    pub relative_norm: f64,
    /// Largest `|out - truth|`.
    pub max_abs: f64,
}

/// Why a result does not pass.
#[derive(Debug, Clone, PartialEq)]
pub struct Mismatch {
    /// The first bad element; none if only the norm of the error is too large.
    pub element: Option<usize>,
    why: String,
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.element {
            Some(element) => write!(f, "element {element}: {}", self.why),
            None => f.write_str(&self.why),
        }
    }
}

/// The tolerated multiple of the naive error.
const FACTOR: f64 = 2.0;
/// Standard deviations of a naive error that are expected to occur.
const DEVIATIONS: f64 = 3.0;

/// The expected values of one output.
#[derive(Clone, Copy)]
pub struct Expectation<'a> {
    /// The reference in `f64`.
    pub truth: &'a [f64],
    /// The reference in naive arithmetic, not yet rounded to the output's dtype.
    pub naive: &'a [f64],
    /// Standard deviation of the naive error.
    pub deviation: &'a [f64],
    /// The output's dtype.
    pub dtype: DType,
}

impl Expectation<'_> {
    /// The tolerance of element `i` if it should be `truth`.
    fn allowed(&self, i: usize, truth: f64) -> f64 {
        let naive = (self.dtype.round(self.naive[i]) - truth).abs();
        let random = DEVIATIONS * self.deviation[i];
        // A naive result that overflowed gives no bound.
        let lost = if naive.is_nan() || random.is_nan() { f64::INFINITY } else { naive.max(random) };
        FACTOR * lost.max(floor(truth.abs(), self.dtype) + random)
    }

    /// Whether the tolerance around a number beyond the output's range reaches back to `out`, a number within it. The naive
    /// error is that before the result is rounded, because after it everything may be infinite.
    fn reaches(&self, i: usize, out: f64, slack: f64) -> bool {
        let (truth, naive) = (self.truth[i], self.naive[i]);
        let random = DEVIATIONS * self.deviation[i];
        let lost = (naive - truth).abs().max(random).max(floor(truth.abs(), self.dtype) + random);
        // Nothing is near an infinite truth, and a naive result that overflowed gives no bound.
        lost.is_finite() && (out - truth).abs() <= FACTOR * lost + slack
    }
}

/// Half a unit in the last place of the output plus one of the f32 arithmetic behind it.
fn floor(magnitude: f64, dtype: DType) -> f64 {
    let inside = 2.0 * DType::F32.unit_roundoff() * magnitude;
    dtype.unit_roundoff() * magnitude + inside + dtype.smallest_subnormal() / 2.0
}

/// Judges `out` (widened elements of `dtype`) against the truth. The error names the first bad element.
pub fn compare(expected: Expectation<'_>, out: &[f64]) -> Result<Error, Mismatch> {
    compare_within(expected, out, Allowance::default())
}

/// What else is allowed besides the tolerance.
#[derive(Clone, Copy, Default)]
pub(super) struct Allowance<'a> {
    /// An error of each element.
    pub slack: f64,
    /// The largest number on the way to each element. Where f32 could overflow in some order of the operations, nothing is
    /// judged.
    pub peak: Option<&'a [f64]>,
    /// A second sample of the naive result, for the norm of its error.
    pub sample: Option<&'a [f64]>,
    /// What the naive result is if subnormal numbers are not taken for zero: as right where one of the two is not finite.
    pub unflushed: Option<&'a [f64]>,
}

impl Allowance<'_> {
    /// Whether no order of the operations can make f32 overflow on the way to element `i`.
    fn stays_in_range(&self, i: usize) -> bool {
        self.peak.is_none_or(|peak| peak[i] <= DType::F32.max_finite() / RANGE_MARGIN)
    }
}

/// How far intermediate results must stay below the largest f32 to be judged: kernels may multiply by a constant early.
const RANGE_MARGIN: f64 = 16.0;

/// [`compare`], with some more allowed.
pub(super) fn compare_within(
    expected: Expectation<'_>,
    out: &[f64],
    allowance: Allowance<'_>,
) -> Result<Error, Mismatch> {
    let Expectation { truth, naive, deviation, dtype } = expected;
    if [truth.len(), naive.len(), deviation.len()] != [out.len(); 3] {
        let why = format!("{} elements instead of {}", out.len(), truth.len());
        return Err(Mismatch { element: None, why });
    }
    let mut result = Error { worst: 0.0, relative_norm: 0.0, max_abs: 0.0 };
    let slack = allowance.slack;
    let (mut out_error, mut naive_error, mut sample_error, mut norm) = (0.0, 0.0, 0.0, 0.0);
    let mut random_error: f64 = 0.0;
    let mut first_bad: Option<(usize, String)> = None;
    let naively = |i: usize, out: f64| {
        naive_agrees(naive[i], out, dtype)
            || allowance.unflushed.is_some_and(|naive| naive_agrees(naive[i], out, dtype))
    };
    for (i, ((&t, &n), &o)) in truth.iter().zip(naive).zip(out).enumerate() {
        if !allowance.stays_in_range(i) {
            continue;
        }
        let (rounded, most) = (dtype.round(t), dtype.max_finite());
        if !(t.is_finite() && rounded.is_finite()) {
            // An intermediate result may have become infinite.
            if t.is_finite() && deviation[i] == f64::INFINITY && !o.is_nan() {
                continue;
            }
            let agrees = if t.is_nan() { o.is_nan() } else { o == rounded || o == most.copysign(t) };
            if !agrees && !naively(i, o) && !expected.reaches(i, o, slack) {
                first_bad.get_or_insert_with(|| (i, format!("expected {t}, got {o}")));
            }
            continue;
        }
        // Types without infinity saturate: a value beyond their range must become the largest one, not anything else.
        let t = t.clamp(-most, most);
        // Infinity stands for the first number beyond the range.
        let beyond = most * (1.0 + dtype.unit_roundoff());
        let error = (o.clamp(-beyond, beyond) - t).abs();
        let allowed = expected.allowed(i, t) + slack;
        if error.is_nan() {
            // Infinity times a number that counts as zero is NaN.
            if !(allowance.unflushed.is_some() && naively(i, o)) {
                first_bad.get_or_insert_with(|| (i, format!("expected {t:e}, got {o}")));
            }
            continue;
        }
        if error > allowed {
            first_bad.get_or_insert_with(|| {
                (i, format!("expected {t:e}, got {o:e}, off by {error:.3e} where {allowed:.3e} is allowed"))
            });
        }
        if error.is_finite() && allowed.is_finite() {
            result.worst = result.worst.max(error / allowed);
            result.max_abs = result.max_abs.max(error);
            out_error += error * error;
            let n = dtype.round(n) - t;
            naive_error += n * n;
            let s = allowance.sample.map_or(0.0, |sample| dtype.round(sample[i]) - t);
            sample_error += s * s;
            random_error = random_error.max(DEVIATIONS * deviation[i]);
            norm += t * t;
        }
    }
    if let Some((element, why)) = first_bad {
        return Err(Mismatch { element: Some(element), why });
    }
    let (out_error, naive_error, norm) = (f64::sqrt(out_error), f64::sqrt(naive_error), f64::sqrt(norm));
    result.relative_norm = if norm > 0.0 { out_error / norm } else { out_error };
    let slack = slack * f64::sqrt(out.len() as f64);
    let naive_error = naive_error.max(f64::sqrt(sample_error));
    let allowed = FACTOR * naive_error.max(random_error).max(floor(norm, dtype)) + slack;
    if out_error > allowed {
        let why = format!("error norm {out_error:.3e} where {allowed:.3e} is allowed");
        return Err(Mismatch { element: None, why });
    }
    Ok(result)
}

/// Whether a result is the naive one, which is right where the truth or the result is not finite: f32 overflows before f64 does.
fn naive_agrees(naive: f64, out: f64, dtype: DType) -> bool {
    let naive = dtype.round(naive);
    naive == out || (naive.is_nan() && out.is_nan())
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;

    fn judge(truth: &[f64], naive: &[f64], out: &[f64], dtype: DType) -> Result<Error, Mismatch> {
        compare(Expectation { truth, naive, deviation: &vec![0.0; truth.len()], dtype }, out)
    }

    fn ramp(n: usize) -> Vec<f64> {
        (0..n).map(|i| 1.0 + i as f64 / n as f64).collect()
    }

    #[test]
    fn correct_rounding_passes_and_two_ulps_fail() {
        let truth = ramp(1000);
        let round =
            |f: &dyn Fn(f64) -> f64| truth.iter().map(|&t| f(DType::BF16.round(t))).collect::<Vec<_>>();
        let exact = round(&|x| x);
        assert!(judge(&truth, &exact, &exact, DType::BF16).unwrap().worst <= 0.5 + 1e-3);
        let off = round(&|x| x + 2.0 / 128.0);
        assert!(judge(&truth, &exact, &off, DType::BF16).is_err());
    }

    #[test]
    fn one_wrong_element_fails() {
        let truth = ramp(100_000);
        let mut out: Vec<f64> = truth.iter().map(|&t| DType::F32.round(t)).collect();
        let naive = out.clone();
        out[77_777] += 1e-3;
        assert!(judge(&truth, &naive, &out, DType::F32).unwrap_err().element == Some(77_777));
    }

    #[test]
    fn a_small_bias_everywhere_fails_the_norm() {
        let truth = ramp(1000);
        // An error of this size is expected now and then; in every element it is far worse as a norm.
        let out: Vec<f64> = truth.iter().map(|t| t + 1e-4).collect();
        let expected =
            Expectation { truth: &truth, naive: &truth, deviation: &[1e-4; 1000], dtype: DType::F32 };
        assert!(compare(expected, &out).unwrap_err().to_string().contains("norm"));
    }

    #[test]
    fn nan_never_passes_for_a_number_and_must_be_kept() {
        let one = [1.0];
        assert!(judge(&one, &one, &[f64::NAN], DType::F32).is_err());
        assert!(judge(&[f64::NAN], &[f64::NAN], &one, DType::F32).is_err());
        assert!(judge(&[f64::NAN], &[f64::NAN], &[f64::NAN], DType::F32).is_ok());
        let inf = [f64::INFINITY];
        assert!(judge(&inf, &inf, &[f64::NEG_INFINITY], DType::F32).is_err());
        assert!(judge(&inf, &inf, &inf, DType::F32).is_ok());
    }

    #[test]
    fn infinity_passes_where_the_tolerance_reaches_beyond_the_range() {
        let of = |truth: f64, deviation: f64| {
            let expected =
                Expectation { truth: &[truth], naive: &[truth], deviation: &[deviation], dtype: DType::F16 };
            compare(expected, &[f64::INFINITY]).is_ok()
        };
        assert!(of(65504.0, 0.0) && of(60000.0, 1e3) && of(0.0, 2e4));
        assert!(!of(60000.0, 10.0) && !of(0.0, 5e3) && !of(-65504.0, 2e3));
    }

    #[test]
    fn numbers_pass_where_the_tolerance_around_one_beyond_the_range_reaches_them() {
        let most = DType::F16.max_finite();
        let (truth, naive) = ([most + 1500.0], [most + 600.0]);
        assert!(judge(&truth, &naive, &[most - 100.0], DType::F16).is_ok());
        assert!(judge(&truth, &naive, &[most - 1000.0], DType::F16).is_err());
        assert!(judge(&truth, &truth, &[most - 1000.0], DType::F16).is_err());
        assert!(judge(&truth, &naive, &[-most], DType::F16).is_err());
        assert!(judge(&truth, &naive, &[f64::NAN], DType::F16).is_err());
        let beyond = [f64::INFINITY];
        assert!(judge(&beyond, &naive, &[most - 100.0], DType::F16).is_err());
        assert!(judge(&truth, &beyond, &[most - 100.0], DType::F16).is_err());
    }

    #[test]
    fn either_infinity_passes_where_something_on_the_way_may_have_overflowed() {
        let of = |deviation: f64, out: f64| {
            let expected =
                Expectation { truth: &[78e3], naive: &[78e3], deviation: &[deviation], dtype: DType::F16 };
            compare(expected, &[out]).is_ok()
        };
        assert!(of(f64::INFINITY, f64::NEG_INFINITY) && of(1e3, f64::INFINITY));
        assert!(!of(f64::INFINITY, f64::NAN) && !of(1e3, f64::NEG_INFINITY));
    }

    #[test]
    fn nan_does_not_pass_where_the_naive_result_overflowed() {
        for naive in [f64::INFINITY, f64::NAN] {
            assert!(judge(&[1.0], &[naive], &[f64::NAN], DType::F32).is_err(), "{naive}");
            assert!(judge(&[1.0], &[naive], &[2.0], DType::F32).is_ok(), "{naive}");
        }
    }

    #[test]
    fn nan_passes_where_a_factor_of_infinity_counts_as_zero() {
        let of = |naive: f64, unflushed: Option<&[f64]>, out: f64| {
            let expected =
                Expectation { truth: &[1.0], naive: &[naive], deviation: &[0.0], dtype: DType::F32 };
            compare_within(expected, &[out], Allowance { unflushed, ..Allowance::default() })
        };
        assert!(of(f64::NAN, Some(&[1.0]), f64::NAN).is_ok());
        assert!(of(1.0, Some(&[1.0]), f64::NAN).is_err() && of(f64::NAN, None, f64::NAN).is_err());
        // Instructions that keep it: minus infinity hides a key, where zero times infinity would show.
        let nan =
            Expectation { truth: &[f64::NAN], naive: &[f64::NAN], deviation: &[0.0], dtype: DType::F32 };
        let judge = |unflushed| compare_within(nan, &[0.0], Allowance { unflushed, ..Allowance::default() });
        assert!(judge(Some(&[0.0])).is_ok() && judge(None).is_err());
    }

    #[test]
    fn nothing_is_judged_where_some_order_overflows() {
        let of = |peak: f64, out: f64| {
            let expected = Expectation { truth: &[1.0], naive: &[1.0], deviation: &[0.0], dtype: DType::F32 };
            compare_within(expected, &[out], Allowance { peak: Some(&[peak]), ..Allowance::default() })
        };
        for out in [f64::NAN, f64::INFINITY, 2.0] {
            assert!(of(1e38, out).is_ok() && of(f64::INFINITY, out).is_ok());
            assert!(of(1e37, out).is_err());
        }
        assert!(of(1e37, 1.0).is_ok());
    }

    #[test]
    fn a_second_sample_tells_whether_the_naive_norm_was_luck() {
        let (truth, out, deviation) = ([1.0; 100], [1.0 + 1e-3; 100], [1e-3; 100]);
        let expected = Expectation { truth: &truth, naive: &truth, deviation: &deviation, dtype: DType::F32 };
        let of = |error: f64| {
            let sample = [1.0 + error; 100];
            compare_within(expected, &out, Allowance { sample: Some(&sample), ..Allowance::default() })
        };
        assert!(compare(expected, &out).unwrap_err().element.is_none());
        assert!(of(0.49e-3).is_err() && of(-0.51e-3).is_ok());
    }

    #[test]
    fn the_norm_of_few_elements_may_be_that_of_one() {
        let of = |count: usize, error: f64| {
            let (truth, out) = (vec![1.0; count], vec![1.0 + error; count]);
            let deviation = vec![1e-3; count];
            compare(
                Expectation { truth: &truth, naive: &truth, deviation: &deviation, dtype: DType::F32 },
                &out,
            )
        };
        assert!(of(1, 5.9e-3).is_ok() && of(1, 6.1e-3).is_err(), "twice three deviations");
        assert!(of(100, 0.59e-3).is_ok() && of(100, 0.61e-3).is_err(), "of one of them, not of each");
    }

    #[test]
    fn what_saturates_keeps_its_sign() {
        for dtype in [DType::F16, DType::F8E4M3, DType::F8E5M2] {
            let most = dtype.max_finite();
            for truth in [f64::INFINITY, f64::NEG_INFINITY, 1e9, -1e9] {
                let right = most.copysign(truth);
                assert!(judge(&[truth], &[truth], &[right], dtype).is_ok(), "{truth} in {dtype}");
                assert!(judge(&[truth], &[truth], &[-right], dtype).is_err(), "{truth} in {dtype}");
                assert!(judge(&[truth], &[truth], &[0.0], dtype).is_err(), "{truth} in {dtype}");
            }
        }
    }
}
