//! Timing on the host.

use super::{Samples, Settings};
use crate::error::Result;
use std::time::Instant;

/// A sample lasts at least this long, so that reading the clock does not show in it.
const SAMPLE_SECONDS: f64 = 2e-4;
/// Sampling stops after this many times the requested time, however few samples there are.
const PATIENCE: f64 = 6.0;
/// But never before this many samples.
const FEWEST: usize = 3;

/// Times `call`, which is given the number of the set of tensors to use, rotating over all `sets`.
pub fn sample(
    sets: usize,
    settings: &Settings,
    mut call: impl FnMut(usize) -> Result<()>,
) -> Result<Samples> {
    // Warm-up: pages, threads, instruction caches.
    for set in 0..sets {
        call(set)?;
    }
    let start = Instant::now();
    call(0)?;
    let once = start.elapsed().as_secs_f64();
    let calls = (SAMPLE_SECONDS / once.max(1e-9)).ceil().clamp(1.0, 100_000.0) as usize;
    let (mut samples, mut runs, mut set) = (Vec::new(), 0, 0);
    let begin = Instant::now();
    loop {
        let start = Instant::now();
        for _ in 0..calls {
            set = (set + 1) % sets;
            call(set)?;
        }
        samples.push(start.elapsed().as_secs_f64() * 1e3 / calls as f64);
        runs += calls;
        let spent = begin.elapsed().as_secs_f64();
        let enough = spent >= settings.seconds && samples.len() >= settings.samples;
        if enough || (spent >= PATIENCE * settings.seconds && samples.len() >= FEWEST) {
            return Ok(Samples::new(samples, runs));
        }
    }
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;
    use std::cell::RefCell;

    #[test]
    fn calls_rotate_over_the_sets_and_errors_stop() {
        let settings = Settings { seconds: 0.0, rest: 0.0, samples: 4, copy_bytes: 0, host_rotation: 0 };
        let seen = RefCell::new(vec![0usize; 3]);
        let samples = sample(3, &settings, |set| {
            seen.borrow_mut()[set] += 1;
            Ok(())
        });
        let (runs, seen) = (samples.unwrap().runs, seen.into_inner());
        assert_eq!(seen.iter().sum::<usize>(), runs + 4, "and the warm-up");
        assert!(seen.iter().all(|n| n.abs_diff(seen[0]) <= 2), "{seen:?}");
        assert!(sample(1, &settings, |_| Err(crate::Error::parse("a", "b", "c"))).is_err());
    }
}
