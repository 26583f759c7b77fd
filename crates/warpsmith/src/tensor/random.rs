//! Seeded random numbers for tests, benchmarks and fills: the same on every machine.

/// A small generator (xoshiro256++), seeded through splitmix64 so that near seeds give unrelated streams.
#[derive(Clone, Debug)]
pub struct Random {
    state: [u64; 4],
    spare: Option<f64>,
}

impl Random {
    /// A generator for `seed`.
    pub fn new(seed: u64) -> Self {
        let mut x = seed;
        let state = std::array::from_fn(|_| {
            x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let z = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            z ^ (z >> 31)
        });
        Random { state, spare: None }
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        let s = &mut self.state;
        let out = s[0].wrapping_add(s[3]).rotate_left(23).wrapping_add(s[0]);
        let t = s[1] << 17;
        s[2] ^= s[0];
        s[3] ^= s[1];
        s[1] ^= s[2];
        s[0] ^= s[3];
        s[2] ^= t;
        s[3] = s[3].rotate_left(45);
        out
    }

    /// Uniform in [0, 1).
    pub fn uniform(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Uniform in [0, bound); zero if `bound` is zero.
    pub fn below(&mut self, bound: u64) -> u64 {
        ((self.bits() as u128 * bound as u128) >> 64) as u64
    }

    /// The numbers below `bound` in random order, again and again if `count` is larger; nothing if `bound` is zero.
    pub fn distinct(&mut self, count: usize, bound: usize) -> Vec<u64> {
        let mut all: Vec<u64> = (0..bound as u64).collect();
        for i in 0..count.min(bound) {
            let other = i + self.below((bound - i) as u64) as usize;
            all.swap(i, other);
        }
        all.into_iter().cycle().take(count).collect()
    }

    /// Standard normal (Box-Muller, both values used).
    pub fn normal(&mut self) -> f64 {
        if let Some(spare) = self.spare.take() {
            return spare;
        }
        let radius = (-2.0 * (1.0 - self.uniform()).ln()).sqrt();
        let (sin, cos) = (std::f64::consts::TAU * self.uniform()).sin_cos();
        self.spare = Some(radius * sin);
        radius * cos
    }
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;

    #[test]
    fn seeds_repeat_and_differ() {
        let draw =
            |seed| (0..4).map(|_| 0).scan(Random::new(seed), |r, _| Some(r.bits())).collect::<Vec<_>>();
        assert_eq!(draw(7), draw(7));
        assert_ne!(draw(7), draw(8));
    }

    #[test]
    fn distinct_numbers_are_in_random_order_and_repeat_only_after_all() {
        let mut rng = Random::new(3);
        let some = rng.distinct(50, 1000);
        assert!(some.iter().all(|&n| n < 1000) && !some.is_sorted());
        let sorted = |mut numbers: Vec<u64>| {
            numbers.sort_unstable();
            numbers
        };
        assert!(sorted(some).windows(2).all(|pair| pair[0] < pair[1]));
        assert_eq!(sorted(rng.distinct(6, 3)), [0, 0, 1, 1, 2, 2]);
        assert!(rng.distinct(5, 0).is_empty());
    }

    #[test]
    fn normal_has_unit_moments() {
        let mut rng = Random::new(1);
        let n = 200_000;
        let (mut sum, mut squares) = (0.0, 0.0);
        for _ in 0..n {
            let x = rng.normal();
            sum += x;
            squares += x * x;
        }
        assert!((sum / n as f64).abs() < 0.01, "mean {}", sum / n as f64);
        assert!((squares / n as f64 - 1.0).abs() < 0.02, "variance {}", squares / n as f64);
    }
}
