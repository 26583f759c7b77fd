//! What the arguments of cases are filled with.

use crate::lab::Case;

/// How an argument is filled.
#[derive(Debug, Clone, Copy)]
pub enum Fill {
    /// Normal with the given mean and deviation.
    Normal(f64, f64),
    /// Whole numbers from 0 to below the bound.
    Below(usize),
    /// Whole numbers from 0 to below the bound, no two the same unless there are more elements than numbers; among
    /// [`Values::Special`], -1 for some.
    Distinct(usize),
    /// A constant.
    Constant(f64),
    /// What the generator makes at the argument's position: values with structure, which may have to agree with
    /// those of other arguments (page tables with lengths, a table with what it points to).
    Generated(Generator),
    /// Where requests begin that lie one after the other: 0, the length of the first, and so on.
    Starts(Lengths),
}

/// Makes the inputs of a case that are filled by it, from a seed: by position in the spec and in row-major order,
/// nothing at the other positions. The case alone decides the number of values, as it decides the shapes.
pub type Generator = fn(&Case, u64) -> Vec<Vec<f64>>;

/// The lengths of requests of very different sizes, empty ones among them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lengths {
    /// No request is longer.
    pub longest: usize,
    /// By how many requests the lengths are shifted.
    pub shift: usize,
}

impl Lengths {
    /// One short of and one past the tiles that kernels cut lengths into.
    const MIXED: [usize; 8] = [65, 0, 1, 129, 63, 1000, 64, 127];

    /// The length of request `index`.
    pub fn of(&self, index: usize) -> usize {
        Self::MIXED[(index + self.shift) % Self::MIXED.len()].min(self.longest)
    }

    /// The length of the first `count` requests together.
    pub fn sum(&self, count: usize) -> usize {
        sum_repeating(count, Self::MIXED.len(), |index| self.of(index))
    }
}

/// The sum of `value` over the first `count` indices, if it repeats itself every `period`: however large the count.
pub(crate) fn sum_repeating(count: usize, period: usize, value: impl Fn(usize) -> usize) -> usize {
    let first = |n: usize| (0..n).map(&value).sum::<usize>();
    count / period * first(period) + first(count % period)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_those_of_the_lengths_one_by_one() {
        let lengths = Lengths { longest: 100, shift: 3 };
        for count in [0, 1, 7, 8, 9, 100] {
            let one_by_one: usize = (0..count).map(|index| lengths.of(index)).sum();
            assert_eq!(lengths.sum(count), one_by_one, "{count}");
        }
        // Would take minutes one by one.
        assert_eq!(lengths.sum(8 << 40), lengths.sum(8) << 40);
    }
}
