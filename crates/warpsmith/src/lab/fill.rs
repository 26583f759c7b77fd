//! The values of arguments in cases.

use crate::lab::Case;
use crate::tensor::DType;

/// How an argument is filled.
#[derive(Debug, Clone, Copy)]
pub enum Fill {
    /// Normal with the given mean and deviation.
    Normal(f64, f64),
    /// Normal around zero: factors of products that are summed along the rows. With [`Values::Exponents`], the large ones of
    /// an argument meet the small ones of the next.
    ///
    /// [`Values::Exponents`]: super::Values::Exponents
    Factor,
    /// As [`Factor`](Fill::Factor), but large ones meet small ones in every row, so that no sum is large, because its
    /// exponential is taken. With the dtype of the other factor.
    Exponent(DType),
    /// Normal around zero, and far from the largest f32: for values that are multiplied by weights whose sum is known
    /// only at the end.
    Weighted,
    /// As [`Factor`](Fill::Factor), but each element may meet any of another argument.
    AnyFactor,
    /// Whole numbers from 0 to below the bound.
    Below(usize),
    /// Distinct whole numbers from 0 to below the bound, repeating only if there are more elements than numbers. With
    /// [`Values::Special`], some are -1.
    Distinct(usize),
    /// A constant.
    Constant(f64),
    /// The generator's values for this argument. For values with structure, which may have to agree with other
    /// arguments (page tables with lengths, a table with what it points to).
    Generated(Generator),
    /// The starts of consecutive requests: 0, the length of the first, and so on.
    Starts(Lengths),
}

/// Makes inputs of a case from a seed: one vector per argument of the spec, in row-major order, empty for arguments
/// it does not fill. The number of values depends only on the case, as the shapes do.
pub type Generator = fn(&Case, u64) -> Vec<Vec<f64>>;

/// Lengths of requests of very different sizes, including empty ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lengths {
    /// Upper bound of a length.
    pub longest: usize,
    /// The request to begin with in the list of lengths.
    pub shift: usize,
}

impl Lengths {
    /// One short of and one past the tile sizes of the kernels.
    const MIXED: [usize; 8] = [65, 0, 1, 129, 63, 1000, 64, 127];

    /// The length of request `index`.
    pub fn of(&self, index: usize) -> usize {
        Self::MIXED[(index + self.shift) % Self::MIXED.len()].min(self.longest)
    }

    /// The total length of the first `count` requests.
    pub fn sum(&self, count: usize) -> usize {
        sum_repeating(count, Self::MIXED.len(), |index| self.of(index))
    }
}

/// The sum of a periodic `value` over the first `count` indices, in time independent of the count.
pub(crate) fn sum_repeating(count: usize, period: usize, value: impl Fn(usize) -> usize) -> usize {
    let first = |n: usize| (0..n).map(&value).sum::<usize>();
    count / period * first(period) + first(count % period)
}

#[cfg(feature = "tests")]
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
