//! Lengths of requests for cases of ops that take several at once.

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
        (0..count).map(|index| self.of(index)).sum()
    }
}
