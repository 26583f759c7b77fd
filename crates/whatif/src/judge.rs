//! How far the model is off on rows that it was not fitted to.

use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// Relative errors of a set of rows.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct Errors {
    /// The median of the absolute errors.
    pub median: f64,
    /// Nine of ten are below this.
    pub ninth: f64,
    /// The largest.
    pub worst: f64,
    /// The mean with its sign: above 0, the model is too slow.
    pub bias: f64,
}

impl Errors {
    /// Of these relative errors.
    pub fn of(errors: &[f64]) -> Errors {
        if errors.is_empty() {
            return Errors::default();
        }
        let mut sizes: Vec<f64> = errors.iter().map(|error| error.abs()).collect();
        sizes.sort_by(f64::total_cmp);
        let at = |part: f64| sizes[((sizes.len() as f64 * part) as usize).min(sizes.len() - 1)];
        Errors {
            median: at(0.5),
            ninth: at(0.9),
            worst: at(1.0),
            bias: errors.iter().sum::<f64>() / errors.len() as f64,
        }
    }
}

/// Random splits besides those that hold back one group.
const SPLITS: usize = 20;
/// The part of the groups that these hold back.
const PART: usize = 4;

/// The groups that are held back, split by split: each alone, and a fourth of them at random. The same groups give the same
/// splits. Nothing can be held back of a single group.
pub fn splits(groups: &BTreeSet<String>) -> Vec<BTreeSet<&str>> {
    let all: Vec<&str> = groups.iter().map(String::as_str).collect();
    if all.len() < 2 {
        return Vec::new();
    }
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut draw = |below: usize| {
        // xorshift64: the splits must be the same everywhere, not good random numbers.
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % below as u64) as usize
    };
    let alone = all.iter().map(|group| BTreeSet::from([*group]));
    let quarters = (0..SPLITS).map(|_| {
        let mut left = all.clone();
        let count = (all.len() / PART).max(1);
        (0..count).map(|_| left.swap_remove(draw(left.len()))).collect()
    });
    let quarters: Vec<BTreeSet<&str>> = quarters.collect();
    alone.chain(quarters).collect()
}

/// The errors on what was held back. `errors` fits to the rows whose group it is told to keep, and returns the errors on the
/// others.
pub fn held_out(groups: &BTreeSet<String>, errors: impl Fn(&BTreeSet<&str>) -> Vec<f64>) -> Errors {
    let all: Vec<f64> = splits(groups).iter().flat_map(errors).collect();
    Errors::of(&all)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn groups(count: usize) -> BTreeSet<String> {
        (0..count).map(|i| format!("g{i}")).collect()
    }

    #[test]
    fn every_group_is_held_back_alone_and_quarters_at_random() {
        let groups = groups(12);
        let splits = splits(&groups);
        assert_eq!(splits.len(), 12 + SPLITS);
        assert!(splits[..12].iter().all(|split| split.len() == 1));
        assert!(splits[12..].iter().all(|split| split.len() == 3));
        let seen: BTreeSet<&str> = splits[12..].iter().flatten().copied().collect();
        assert!(seen.len() > 6, "{seen:?}");
        assert_eq!(splits, self::splits(&groups));
    }

    #[test]
    fn one_group_cannot_be_held_back() {
        assert!(splits(&groups(1)).is_empty());
        assert_eq!(held_out(&groups(1), |_| vec![1.0]), Errors::default());
    }

    #[test]
    fn errors_are_summed_up() {
        let errors = Errors::of(&[0.1, -0.2, 0.3, -0.4, 0.5, 0.0, 0.0, 0.0, 0.0, -2.0]);
        assert_eq!((errors.median, errors.ninth, errors.worst), (0.2, 2.0, 2.0));
        assert!((errors.bias - -0.17).abs() < 1e-12);
    }
}
