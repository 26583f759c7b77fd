//! Random graphs against f64, on every tier.

use warpsmith::Device;
use warpsmith_fuse::random::{draw, judge};

/// `FUSE_SEEDS=from..to` judges others.
fn seeds() -> std::ops::Range<u64> {
    let text = std::env::var("FUSE_SEEDS").unwrap_or_default();
    let ends = text.split_once("..").and_then(|(from, to)| Some(from.parse().ok()?..to.parse().ok()?));
    ends.unwrap_or(0..300)
}

#[test]
fn random_graphs_compute_what_they_say() {
    let (mut unknown, mut count) = (0.0, 0.0);
    let mut faults = vec![];
    for seed in seeds() {
        let draw = draw(seed).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        match judge(&draw, Device::Cpu) {
            Ok(share) => unknown += share,
            Err(fault) => faults.push(format!("seed {seed}: {fault}")),
        }
        count += 1.0;
    }
    assert!(
        faults.is_empty(),
        "{} of {count} wrong:\n{}",
        faults.len(),
        faults[..faults.len().min(12)].join("\n\n")
    );
    assert!(unknown / count < 0.1, "nothing can be said about {} of the elements", unknown / count);
}
