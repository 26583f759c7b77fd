//! How fast the processor multiplies when it does nothing else: the ceiling of products whose operands are in cache.

#[cfg(target_arch = "x86_64")]
use super::amx::Tiles;
use super::isa::Isa;
use crate::cpu::{Simd, Task, dispatch, parallel_for, with_threads};
#[cfg(target_arch = "x86_64")]
use std::arch::asm;
use std::hint::black_box;
use std::time::{Duration, Instant};

/// Sums in flight: enough to hide the latency of a multiply-add, few enough for sixteen registers.
const CHAINS: usize = 12;
/// Multiply-adds of each chain between two looks at the clock.
const ROUNDS: usize = 10_000;

/// TFLOP/s of products of f32 on `threads` threads: on vectors, or as six of bf16 on tiles where those are faster.
pub fn f32_rate(isa: Isa, threads: usize, time: Duration) -> f64 {
    let vectors = rate(threads, time, || dispatch(isa.tier(), Fma));
    if isa.has_tiles() { vectors.max(bf16_rate(isa, threads, time) / 6.0) } else { vectors }
}

/// TFLOP/s of products of bf16 on `threads` threads; those of f32 where nothing multiplies bf16 faster.
pub fn bf16_rate(isa: Isa, threads: usize, time: Duration) -> f64 {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Amx | Isa::AmxF16 => rate(threads, time, || {
            // SAFETY: the caller's `Isa` says there are tiles.
            unsafe { Tiles::new() }.spin(ROUNDS)
        }),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512Dot => rate(threads, time, || {
            // SAFETY: the caller's `Isa` says there is AVX512_BF16.
            unsafe { dot_products() }
        }),
        _ => f32_rate(isa, threads, time),
    }
}

/// TFLOP/s of `work`, which returns its operations: the best of the loops that fit into `time`, so that other load on
/// the machine shows as little as possible.
fn rate(threads: usize, time: Duration, work: impl Fn() -> f64 + Sync) -> f64 {
    // Shares per thread, so that a thread that starts late does not hold up the loop.
    let shares = 8 * threads;
    let operations = shares as f64 * work();
    let mut best = f64::INFINITY;
    with_threads(threads, || {
        let begin = Instant::now();
        while best == f64::INFINITY || begin.elapsed() < time {
            let start = Instant::now();
            parallel_for(shares, 1, |range| range.for_each(|_| _ = black_box(work())));
            best = best.min(start.elapsed().as_secs_f64());
        }
    });
    operations / best / 1e12
}

/// Multiply-adds of f32 vectors.
struct Fma;

impl Task for Fma {
    type Out = f64;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f64 {
        // Below one, so that sums stay ordinary numbers.
        let factor = s.splat(black_box(0.75));
        let mut sums = [factor; CHAINS];
        for _ in 0..ROUNDS {
            for sum in &mut sums {
                *sum = s.fma(*sum, factor, factor);
            }
        }
        black_box(sums);
        (2 * S::N * CHAINS * ROUNDS) as f64
    }
}

/// Dot products of pairs of bf16, added to f32.
///
/// # Safety
/// The processor must have AVX512_BF16.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn dot_products() -> f64 {
    const PAIRS: usize = 16;
    // SAFETY: registers only, and all that are written are named.
    unsafe {
        asm!(
            "vpxord zmm12, zmm12, zmm12",
            "2:",
            "vdpbf16ps zmm0, zmm12, zmm12",
            "vdpbf16ps zmm1, zmm12, zmm12",
            "vdpbf16ps zmm2, zmm12, zmm12",
            "vdpbf16ps zmm3, zmm12, zmm12",
            "vdpbf16ps zmm4, zmm12, zmm12",
            "vdpbf16ps zmm5, zmm12, zmm12",
            "vdpbf16ps zmm6, zmm12, zmm12",
            "vdpbf16ps zmm7, zmm12, zmm12",
            "vdpbf16ps zmm8, zmm12, zmm12",
            "vdpbf16ps zmm9, zmm12, zmm12",
            "vdpbf16ps zmm10, zmm12, zmm12",
            "vdpbf16ps zmm11, zmm12, zmm12",
            "dec {rounds}",
            "jnz 2b",
            rounds = inout(reg) ROUNDS => _,
            out("zmm0") _, out("zmm1") _, out("zmm2") _, out("zmm3") _, out("zmm4") _, out("zmm5") _,
            out("zmm6") _, out("zmm7") _, out("zmm8") _, out("zmm9") _, out("zmm10") _, out("zmm11") _,
            out("zmm12") _,
            options(nomem, nostack)
        );
    }
    (4 * PAIRS * CHAINS * ROUNDS) as f64
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;

    #[test]
    fn every_instruction_set_has_plausible_rates() {
        for isa in Isa::available() {
            for (name, rate) in [("f32", f32_rate as fn(_, _, _) -> f64), ("bf16", bf16_rate)] {
                let one = rate(isa, 1, Duration::from_millis(1));
                assert!(one > 1e-5 && one < 1e3, "{one} TFLOP/s of {name} with {isa:?}");
            }
        }
    }
}
