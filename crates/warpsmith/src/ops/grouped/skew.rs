//! Choices that are skewed as those of routers may be, for cases.

use crate::tensor::Random;

/// Draws numbers below a bound, of which number `r` is drawn `1 / (r + 1)` as often as the first (Zipf).
pub(in crate::ops) struct Zipf {
    /// The sums of what the numbers up to each are worth.
    sums: Vec<f64>,
}

impl Zipf {
    /// Of numbers below `bound`.
    pub fn new(bound: usize) -> Zipf {
        let mut sum = 0.0;
        let sums = (1..=bound).map(|rank| {
            sum += 1.0 / rank as f64;
            sum
        });
        Zipf { sums: sums.collect() }
    }

    /// One number.
    pub fn draw(&self, random: &mut Random) -> usize {
        let Some(&all) = self.sums.last() else { return 0 };
        let at = random.uniform() * all;
        self.sums.partition_point(|&sum| sum <= at).min(self.sums.len() - 1)
    }

    /// Different numbers, at most as many as there are.
    pub fn distinct(&self, count: usize, random: &mut Random) -> Vec<usize> {
        let mut drawn = Vec::with_capacity(count);
        while drawn.len() < count.min(self.sums.len()) {
            let number = self.draw(random);
            if !drawn.contains(&number) {
                drawn.push(number);
            }
        }
        drawn
    }
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;

    #[test]
    fn the_first_is_drawn_as_often_as_its_rank_says() {
        let (zipf, mut random) = (Zipf::new(8), Random::new(3));
        let mut counts = [0; 8];
        (0..20_000).for_each(|_| counts[zipf.draw(&mut random)] += 1);
        let first = counts[0] as f64;
        for (rank, &count) in (1..).zip(&counts) {
            let expected = first / rank as f64;
            assert!((count as f64 - expected).abs() < 0.1 * expected + 30.0, "{counts:?}");
        }
        let mut all = zipf.distinct(9, &mut random);
        all.sort_unstable();
        assert_eq!(all, [0, 1, 2, 3, 4, 5, 6, 7]);
    }
}
