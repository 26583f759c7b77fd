//! The sums of rows against f64, where one pass is enough and where it is not.

use super::*;
use half::bf16;

struct Moments<'a> {
    x: &'a [f32],
    center: bool,
}

impl Task for Moments<'_> {
    type Out = (f32, f32);

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> (f32, f32) {
        let s = s.pair();
        let load = inlined(
            #[inline(always)]
            // SAFETY: `moments` asks for elements of the slice alone.
            |i, count| unsafe { load_at(s, self.x.as_ptr(), i, count) },
        );
        moments(s, self.x.len(), self.center, load)
    }
}

/// The mean may be off by so many deviations, squares by so much of them.
fn check(name: &str, x: &[f32], [far, of_squares]: [f64; 2]) {
    let n = x.len() as f64;
    let mean = x.iter().map(|&x| x as f64).sum::<f64>() / n;
    let variance = x.iter().map(|&x| (x as f64 - mean).powi(2)).sum::<f64>() / n;
    for tier in Tier::available() {
        let (got, squares) = dispatch(tier, Moments { x, center: true });
        let off = (got as f64 - mean).abs() / variance.sqrt();
        assert!(off <= far, "{name} {tier}: mean {got}, want {mean}");
        let off = (squares as f64 / n / variance - 1.0).abs();
        assert!(off <= of_squares, "{name} {tier}: variance {}, want {variance}", squares as f64 / n);
        let (zero, squares) = dispatch(tier, Moments { x, center: false });
        let want = variance + mean * mean;
        assert!(
            zero == 0.0 && (squares as f64 / n / want - 1.0).abs() <= of_squares,
            "{name} {tier}: {squares}"
        );
    }
}

#[test]
fn moments_survive_large_means_misleading_beginnings_and_long_rows() {
    let wave = |n: usize| (0..n).map(|i| ((i * i) as f32 * 0.37).sin() * 1.4);
    check("short", &wave(3).collect::<Vec<_>>(), [1e-6; 2]);
    check("plain", &wave(4096).collect::<Vec<_>>(), [1e-6; 2]);
    check("a large mean", &wave(4099).map(|x| x + 100.0).collect::<Vec<_>>(), [1e-5; 2]);
    // The first elements mislead, and the second pass corrects it.
    let misled = wave(70_001).enumerate().map(|(i, x)| if i < 64 { 1e4 + x } else { x });
    check("misled", &misled.collect::<Vec<_>>(), [1e-6, 1e-4]);
    // Elements on a grid, and a beginning that misleads a little: distances must not all be rounded in one direction.
    let beginning = |i: usize| if i < 64 { 0.3173 } else { 0.0 };
    let grid = wave(70_001).enumerate().map(|(i, x)| bf16::from_f32(x + 1.0 + beginning(i)).to_f32());
    check("on a grid", &grid.collect::<Vec<_>>(), [2e-6, 2e-5]);
    // A beginning that misleads so little that there is no second pass: every distance is too long, on narrow vectors too.
    for seed in 0..8 {
        let numbers = wave(4099 + seed).skip(seed).enumerate();
        let beginning = |i: usize| if i < 64 { 1.0 } else { 0.0 };
        check("misled a little", &numbers.map(|(i, x)| x + beginning(i)).collect::<Vec<_>>(), [1e-7, 1e-6]);
    }
    let row = vec![3.25f32; 777];
    for tier in Tier::available() {
        assert_eq!(dispatch(tier, Moments { x: &row, center: true }), (3.25, 0.0), "{tier}");
    }
}
