//! A counter-based generator of random bits, as in `random.cuh`: what is drawn depends on its number alone.

const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// Random bits by number. A seed has such a stream for each position.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct RandomStream {
    start: u64,
}

impl RandomStream {
    #[inline(always)]
    pub fn new(seed: i64, position: i64) -> RandomStream {
        let seed = mix((seed as u64).wrapping_add(GOLDEN));
        RandomStream { start: mix(seed.wrapping_add((position as u64).wrapping_mul(GOLDEN))) }
    }

    /// The stream that begins with these bits.
    #[inline(always)]
    pub fn at(start: u64) -> RandomStream {
        RandomStream { start }
    }

    /// What [`Self::at`] takes.
    #[cfg(feature = "cuda")]
    pub fn start(self) -> u64 {
        self.start
    }

    /// 64 random bits.
    #[inline(always)]
    pub fn bits(self, number: u64) -> u64 {
        mix(self.start.wrapping_add(number.wrapping_add(1).wrapping_mul(GOLDEN)))
    }
}

/// A permutation of 64-bit numbers in which every bit changes about half of the bits.
#[inline(always)]
fn mix(mut z: u64) -> u64 {
    z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}
