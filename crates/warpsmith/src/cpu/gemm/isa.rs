//! What the GEMM kernels run on: the tiers of the other kernels, and two that only matrix products know.

use crate::cpu::Tier;
use crate::env;
use crate::error::{Error, Result};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Index of the highest one in use.
static LIMIT: AtomicUsize = AtomicUsize::new(Isa::AmxF16 as usize);

/// An instruction set of the GEMM kernels, lowest first. A machine that has one has all below it.
#[derive(Copy, Clone, Eq, PartialEq, Ord, PartialOrd, Hash, Debug)]
pub enum Isa {
    /// Plain Rust.
    Portable,
    /// AVX2 and FMA.
    Avx2,
    /// AVX-512.
    Avx512,
    /// AVX-512 with the dot products of BF16.
    Avx512Dot,
    /// AMX tiles for bf16, and for f32 as sums of bf16.
    Amx,
    /// AMX tiles for f16 too.
    AmxF16,
}

impl Isa {
    /// Every instruction set, lowest first.
    pub const ALL: [Isa; 6] = [Isa::Portable, Isa::Avx2, Isa::Avx512, Isa::Avx512Dot, Isa::Amx, Isa::AmxF16];

    /// The highest this machine has, and the operating system lets the process use.
    pub fn supported() -> Isa {
        static SUPPORTED: OnceLock<Isa> = OnceLock::new();
        *SUPPORTED.get_or_init(detect)
    }

    /// Those this machine has, lowest first.
    pub fn available() -> impl Iterator<Item = Isa> {
        Isa::ALL.into_iter().filter(|&isa| isa <= Isa::supported())
    }

    /// The name used in [`env::CPU_MATRIX`].
    pub const fn name(self) -> &'static str {
        match self {
            Isa::Portable => "portable",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
            Isa::Avx512Dot => "avx512-dot",
            Isa::Amx => "amx",
            Isa::AmxF16 => "amx-f16",
        }
    }

    /// The one matrix products use in the highest tier: the highest supported one not above [`env::CPU_MATRIX`].
    ///
    /// # Errors
    /// If the variable is set to anything but such a name.
    pub fn configured() -> Result<Isa> {
        match env::get(env::CPU_MATRIX) {
            None => Ok(Isa::supported()),
            Some(text) => Ok(text.parse::<Isa>()?.min(Isa::supported())),
        }
    }

    /// [`Isa::configured`], read once; an unreadable setting counts as none.
    fn best() -> Isa {
        static BEST: OnceLock<Isa> = OnceLock::new();
        let best = *BEST.get_or_init(|| Isa::configured().unwrap_or_else(|_| Isa::supported()));
        best.min(Isa::ALL[LIMIT.load(Ordering::Relaxed)])
    }

    /// Limits matrix products of this process to `limit`: for tests, which cover all sets of a machine. No product may
    /// run meanwhile, and operands packed for other sets can no longer be used.
    #[cfg(any(test, feature = "lab"))]
    #[doc(hidden)]
    pub fn limit(limit: Isa) {
        LIMIT.store(limit as usize, Ordering::Relaxed);
    }

    /// The highest this machine has, and the user allows, that a kernel of `tier` may use.
    pub fn of_tier(tier: Tier) -> Isa {
        let wanted = match tier {
            Tier::Portable => Isa::Portable,
            Tier::Avx2 => Isa::Avx2,
            Tier::Avx512 => Isa::AmxF16,
        };
        wanted.min(Isa::best())
    }

    /// Whether it has tiles.
    pub fn has_tiles(self) -> bool {
        self >= Isa::Amx
    }

    /// Whether it multiplies signed bytes on tiles, with sums in 32 bits.
    pub fn has_byte_tiles(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        return self.has_tiles() && amx_int8_in_processor();
        #[cfg(not(target_arch = "x86_64"))]
        false
    }

    /// The vector tier that goes with it.
    pub const fn tier(self) -> Tier {
        match self {
            Isa::Portable => Tier::Portable,
            Isa::Avx2 => Tier::Avx2,
            Isa::Avx512 | Isa::Avx512Dot | Isa::Amx | Isa::AmxF16 => Tier::Avx512,
        }
    }
}

impl std::str::FromStr for Isa {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let named = Isa::ALL.into_iter().find(|isa| isa.name() == text);
        named.ok_or_else(|| {
            Error::parse("instructions of matrix products", Isa::ALL.map(Isa::name).join(", "), text)
        })
    }
}

#[cfg(target_arch = "x86_64")]
fn detect() -> Isa {
    use std::arch::is_x86_feature_detected as has;
    match Tier::supported() {
        Tier::Portable => Isa::Portable,
        Tier::Avx2 => Isa::Avx2,
        Tier::Avx512 if !has!("avx512bf16") => Isa::Avx512,
        Tier::Avx512 if !(amx_in_processor() && amx_permitted()) => Isa::Avx512Dot,
        Tier::Avx512 if !amx_f16_in_processor() => Isa::Amx,
        Tier::Avx512 => Isa::AmxF16,
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn detect() -> Isa {
    Isa::Portable
}

/// AMX-TILE and AMX-BF16, with the tile state enabled by the operating system.
#[cfg(target_arch = "x86_64")]
fn amx_in_processor() -> bool {
    use std::arch::x86_64::{__cpuid, __cpuid_count};
    const BF16_TILE: u32 = 1 << 22 | 1 << 24;
    const OSXSAVE: u32 = 1 << 27;
    const TILE_STATE: u64 = 1 << 17 | 1 << 18;
    if __cpuid(0).eax < 7 || __cpuid(1).ecx & OSXSAVE == 0 {
        return false;
    }
    let enabled: u64;
    // SAFETY: reads a register that OSXSAVE says exists; touches no memory.
    unsafe {
        let (low, high): (u32, u32);
        std::arch::asm!("xgetbv", in("ecx") 0, out("eax") low, out("edx") high, options(nomem, nostack));
        enabled = u64::from(high) << 32 | u64::from(low);
    }
    __cpuid_count(7, 0).edx & BF16_TILE == BF16_TILE && enabled & TILE_STATE == TILE_STATE
}

/// AMX-FP16, on a processor that is known to have tiles.
#[cfg(target_arch = "x86_64")]
fn amx_f16_in_processor() -> bool {
    use std::arch::x86_64::__cpuid_count;
    __cpuid_count(7, 0).eax >= 1 && __cpuid_count(7, 1).eax & 1 << 21 != 0
}

/// AMX-INT8, on a processor that is known to have tiles.
#[cfg(target_arch = "x86_64")]
fn amx_int8_in_processor() -> bool {
    static FOUND: OnceLock<bool> = OnceLock::new();
    *FOUND.get_or_init(|| std::arch::x86_64::__cpuid_count(7, 0).edx & 1 << 25 != 0)
}

/// Asks the kernel for the tile state, which Linux grants per process and only on demand.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn amx_permitted() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    // SAFETY: the call only adds to the register state that the process may save.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
}

#[cfg(all(target_arch = "x86_64", not(target_os = "linux")))]
fn amx_permitted() -> bool {
    false
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;

    #[test]
    fn tiers_bound_the_choice() {
        assert_eq!(Isa::of_tier(Tier::Portable), Isa::Portable);
        assert_eq!(Isa::of_tier(Tier::Avx512), Isa::supported());
        for isa in Isa::available() {
            assert!(isa.tier() <= Tier::supported());
            assert!(Isa::of_tier(isa.tier()) >= isa);
        }
    }
}
