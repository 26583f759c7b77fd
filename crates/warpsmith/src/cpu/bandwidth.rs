//! The machine's limits: its name, its caches and how fast it moves memory.

use super::simd::{Simd, Task, dispatch};
use super::threads::{num_threads, parallel_for, with_threads};
use super::tier::Tier;
use crate::error::Result;
use crate::tensor::storage::HostBuffer;
use std::sync::OnceLock;
use std::time::Instant;

/// The processor's brand string, or the architecture where it has none.
pub fn cpu_name() -> &'static str {
    static NAME: OnceLock<String> = OnceLock::new();
    NAME.get_or_init(|| brand_string().unwrap_or_else(|| std::env::consts::ARCH.to_owned()))
}

/// Bytes of one core's L2 cache; 1 MiB where the processor does not say.
pub fn l2_bytes() -> usize {
    static BYTES: OnceLock<usize> = OnceLock::new();
    *BYTES.get_or_init(|| detect_l2().unwrap_or(1 << 20))
}

#[cfg(target_arch = "x86_64")]
fn brand_string() -> Option<String> {
    use std::arch::x86_64::__cpuid;
    if __cpuid(0x8000_0000).eax < 0x8000_0004 {
        return None;
    }
    let mut bytes = Vec::with_capacity(48);
    for leaf in 0x8000_0002..=0x8000_0004 {
        let r = __cpuid(leaf);
        for register in [r.eax, r.ebx, r.ecx, r.edx] {
            bytes.extend(register.to_le_bytes());
        }
    }
    let text: String = bytes.iter().take_while(|&&b| b != 0).map(|&b| b as char).collect();
    let name = text.split_whitespace().collect::<Vec<_>>().join(" ");
    (!name.is_empty()).then_some(name)
}

#[cfg(not(target_arch = "x86_64"))]
fn brand_string() -> Option<String> {
    None
}

#[cfg(target_arch = "x86_64")]
fn detect_l2() -> Option<usize> {
    use std::arch::x86_64::{__cpuid, __cpuid_count};
    // Deterministic cache parameters: Intel's leaf 4, AMD's copy of it at 0x8000001d.
    let leaf = [(0, 4), (0x8000_0000, 0x8000_001d)]
        .into_iter()
        .find(|&(base, leaf)| __cpuid(base).eax >= leaf && __cpuid_count(leaf, 0).eax & 0x1f != 0)?
        .1;
    (0..16).map(|i| __cpuid_count(leaf, i)).take_while(|r| r.eax & 0x1f != 0).find_map(|r| {
        let (kind, level) = (r.eax & 0x1f, (r.eax >> 5) & 7);
        let sizes = [r.ebx >> 22, (r.ebx >> 12) & 0x3ff, r.ebx & 0xfff, r.ecx];
        let bytes = sizes.into_iter().try_fold(1usize, |bytes, n| bytes.checked_mul(n as usize + 1))?;
        (kind != 2 && level == 2).then_some(bytes)
    })
}

#[cfg(not(target_arch = "x86_64"))]
fn detect_l2() -> Option<usize> {
    None
}

/// Copies with non-temporal stores.
struct StreamCopy<'a> {
    src: &'a [f32],
    dst: &'a mut [f32],
}

impl Task for StreamCopy<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        assert_eq!(self.src.len(), self.dst.len());
        // SAFETY: both slices hold `len` elements and are borrowed apart.
        unsafe {
            super::map(
                s,
                self.src.as_ptr(),
                self.dst.as_mut_ptr(),
                self.src.len(),
                true,
                #[inline(always)]
                |v| v,
            )
        }
    }
}

/// The rate of a copy of `bytes` bytes on `threads` threads, in GB/s counting both what is read and what is written.
///
/// Of two ways to copy, plain `memcpy` and non-temporal vector stores, the faster: the ceiling for kernels that read as much as
/// they write. The median of several runs of it, as kernels are timed, so that other load on the machine counts for both.
/// Memory is what tensors have, and written once before the clock starts.
///
/// # Errors
/// [`OutOfMemory`](crate::Error::OutOfMemory) if there is not twice as much.
pub fn measure_copy(bytes: usize, threads: usize) -> Result<f64> {
    const RUNS: usize = 7;
    let len = (bytes / size_of::<f32>()).max(1);
    let buffers = [HostBuffer::new(len * size_of::<f32>())?, HostBuffer::new(len * size_of::<f32>())?];
    // SAFETY: each slice is all of a buffer, which lives to the end and starts out as floats.
    let [src, dst] =
        buffers.each_ref().map(|b| unsafe { std::slice::from_raw_parts_mut(b.as_ptr().cast::<f32>(), len) });
    src.fill(1.0);
    dst.fill(2.0);
    let target = SharedMut(dst.as_mut_ptr());
    let grain = 1 << 14;
    let copy = |stream: bool| {
        parallel_for(len, grain, |range| {
            let src = &src[range.clone()];
            // SAFETY: parts of one loop do not overlap and `dst` outlives it.
            let dst = unsafe { std::slice::from_raw_parts_mut(target.get().add(range.start), src.len()) };
            if stream {
                dispatch(Tier::best(), StreamCopy { src, dst });
            } else {
                dst.copy_from_slice(src);
            }
        });
    };
    let mut times = [[0.0; RUNS]; 2];
    with_threads(threads, || {
        for run in 0..RUNS {
            for (way, times) in times.iter_mut().enumerate() {
                let start = Instant::now();
                copy(way == 0);
                times[run] = start.elapsed().as_secs_f64();
            }
        }
    });
    assert!(dst[0] == 1.0 && dst[len - 1] == 1.0, "the copy was not made");
    let medians = times.map(|mut times| {
        times.sort_by(f64::total_cmp);
        times[RUNS / 2]
    });
    Ok(2.0 * (len * size_of::<f32>()) as f64 / medians[0].min(medians[1]) / 1e9)
}

/// A pointer that parts of a parallel loop write through, each to its own range.
#[derive(Clone, Copy)]
struct SharedMut(*mut f32);

// SAFETY: the pointer is used inside one loop whose parts write disjoint ranges.
unsafe impl Sync for SharedMut {}

impl SharedMut {
    fn get(self) -> *mut f32 {
        self.0
    }
}

/// Whether non-temporal stores pay for an output of this many bytes in all.
///
/// They spare the read that a plain store makes to own the line, but whoever reads the output next finds it in
/// memory. So: yes from a quarter of the L2 of the threads that write it on. Measured with rms_norm over `bf16` on two
/// cores with 2 MiB of L2 each: with a reader right behind it, both together take as long either way at 1 MiB, and a
/// tenth to a fifth less with streamed stores from 4 MiB on; below 1 MiB the reader loses more than the writer gains.
pub fn should_stream(total_output_bytes: usize) -> bool {
    total_output_bytes >= l2_bytes().saturating_mul(num_threads()) / 4
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machine_describes_itself() {
        assert!(!cpu_name().is_empty() && cpu_name().trim() == cpu_name());
        assert!((1 << 16..=1 << 28).contains(&l2_bytes()), "{} bytes", l2_bytes());
    }

    #[test]
    fn a_copy_has_a_plausible_rate() {
        for (bytes, threads) in [(0, 1), (1 << 20, 1), (3 << 20, 2)] {
            let rate = measure_copy(bytes, threads).unwrap();
            assert!(rate > 0.0 && rate < 1e5, "{rate} GB/s for {bytes} bytes");
        }
    }

    #[test]
    fn only_outputs_that_fill_a_good_part_of_the_caches_are_streamed() {
        with_threads(2, || {
            assert!(!should_stream(0));
            assert!(!should_stream(l2_bytes() / 2 - 2));
            assert!(should_stream(l2_bytes() / 2));
            assert!(should_stream(usize::MAX));
        });
    }
}
