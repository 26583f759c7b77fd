//! GPUs that are only described, for work that needs none: kernels compiled ahead, choices explained.

use super::{Device, DeviceInfo};
use crate::cpu::Tier;
use crate::error::{Error, Result};
use crate::jit::Arch;

/// A card of an architecture: name, multiprocessors, kilobytes of shared memory of a block, megabytes of L2.
const CARDS: [(i32, &str, usize, usize, usize); 11] = [
    (60, "Tesla P100", 56, 48, 4),
    (61, "GeForce GTX 1080", 20, 48, 2),
    (70, "Tesla V100", 80, 96, 6),
    (75, "Tesla T4", 40, 64, 4),
    (80, "A100", 108, 163, 40),
    (86, "GeForce RTX 3090", 82, 99, 6),
    (89, "L40S", 142, 99, 48),
    (90, "H200", 132, 227, 50),
    (100, "B200", 148, 227, 126),
    (103, "B300", 148, 227, 126),
    (120, "GeForce RTX 5090", 170, 99, 96),
];

/// Architectures without a card above; each is treated like the one before it.
const OTHERS: [i32; 6] = [62, 72, 87, 88, 110, 121];

/// Reads an architecture that exists.
pub fn known_arch(text: &str) -> Result<Arch> {
    let arch: Arch = text.parse()?;
    let mut known: Vec<i32> = CARDS.iter().map(|card| card.0).chain(OTHERS).collect();
    known.sort();
    if known.contains(&arch.number()) && (arch.major >= 9 || !arch.accel) {
        return Ok(arch);
    }
    let known: Vec<String> = known.iter().map(i32::to_string).collect();
    let expected = format!("one of {}, from 90 on also with an `a`", known.join(", "));
    Err(Error::parse("GPU architecture", expected, text))
}

impl DeviceInfo {
    /// A typical GPU of this architecture, with as many multiprocessors as it usually has unless that is said.
    pub fn typical_gpu(arch: Arch, units: Option<u16>) -> DeviceInfo {
        let known = CARDS.iter().rev().find(|card| card.0 <= arch.number()).unwrap_or(&CARDS[0]);
        let &(_, card, typical_units, shared_kib, l2_mib) = known;
        let units = units.map_or(typical_units, usize::from);
        DeviceInfo {
            device: Device::Cuda(0),
            // Not the name of a real device: choices tuned on one must not be used for a hypothetical one.
            name: format!("an imagined {arch} with {units} multiprocessors, otherwise like {card}"),
            tier: Tier::Portable,
            arch: Some(arch),
            units,
            shared_per_block: shared_kib << 10,
            cache_bytes: l2_mib << 20,
        }
    }
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;

    #[test]
    fn only_architectures_that_exist_are_imagined() {
        for text in ["60", "sm_80", "8.7", "90", "90a", "120a"] {
            assert!(known_arch(text).is_ok(), "{text}");
        }
        for text in ["52", "99", "80a", "x"] {
            assert!(matches!(known_arch(text), Err(Error::Parse { .. })), "{text}");
        }
        assert_eq!(DeviceInfo::typical_gpu(known_arch("87").unwrap(), Some(7)).units, 7);
    }
}
