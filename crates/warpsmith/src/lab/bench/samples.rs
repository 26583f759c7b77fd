//! Samples of a running time.

/// Milliseconds of one call, many times.
#[derive(Debug, Clone, PartialEq)]
pub struct Samples {
    sorted_ms: Vec<f64>,
    /// Number of calls in all samples.
    pub runs: usize,
}

impl Samples {
    /// Samples in any order; each is the mean over some calls, `runs` in all.
    ///
    /// # Panics
    /// If there is none.
    pub fn new(mut ms: Vec<f64>, runs: usize) -> Self {
        assert!(!ms.is_empty(), "a measurement has samples");
        ms.sort_by(f64::total_cmp);
        Samples { sorted_ms: ms, runs }
    }

    /// The quantile `q` of the samples, interpolated.
    pub fn quantile(&self, q: f64) -> f64 {
        let at = q.clamp(0.0, 1.0) * (self.sorted_ms.len() - 1) as f64;
        let (low, high) = (self.sorted_ms[at.floor() as usize], self.sorted_ms[at.ceil() as usize]);
        low + (high - low) * at.fract()
    }
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;

    #[test]
    fn quantiles_interpolate_between_sorted_samples() {
        let samples = Samples::new(vec![3.0, 1.0, 2.0, 4.0], 8);
        assert_eq!([0.0, 0.5, 1.0].map(|q| samples.quantile(q)), [1.0, 2.5, 4.0]);
        assert_eq!(Samples::new(vec![7.0], 1).quantile(0.9), 7.0);
    }
}
