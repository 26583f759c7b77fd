//! The processor: its name, its caches, and the output size from which stores bypass them.

use super::threads::num_threads;
use std::sync::OnceLock;

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

/// Whether non-temporal stores pay for an output of this many bytes in all.
///
/// They spare the read that a plain store makes to own the line, but whoever reads the output next finds it in memory.
/// So it pays from a quarter of the L2 of the writing threads on. Measured with rms_norm over `bf16` on two cores with
/// 2 MiB of L2 each: with a reader right behind it, both together take as long either way at 1 MiB, and a tenth to a
/// fifth less with streamed stores from 4 MiB on; below 1 MiB the reader loses more than the writer gains.
pub fn should_stream(total_output_bytes: usize) -> bool {
    total_output_bytes >= l2_bytes().saturating_mul(num_threads()) / 4
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;
    use crate::cpu::with_threads;

    #[test]
    fn the_machine_describes_itself() {
        assert!(!cpu_name().is_empty() && cpu_name().trim() == cpu_name());
        assert!((1 << 16..=1 << 28).contains(&l2_bytes()), "{} bytes", l2_bytes());
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
