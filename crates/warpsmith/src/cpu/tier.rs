//! The instruction sets the CPU kernels are compiled for.

use crate::env;
use crate::error::{Error, Result};
use std::sync::OnceLock;

/// An instruction set, from the one every machine has to the widest. A machine that has a tier has all below it.
#[derive(Copy, Clone, Eq, PartialEq, Ord, PartialOrd, Hash, Debug)]
pub enum Tier {
    /// Plain Rust, vectorised as far as the compiler can for the build target.
    Portable,
    /// AVX2, FMA and F16C: 8 lanes.
    Avx2,
    /// AVX-512 F, BW, DQ and VL: 16 lanes.
    Avx512,
}

impl Tier {
    /// Every tier, lowest first.
    pub const ALL: [Tier; 3] = [Tier::Portable, Tier::Avx2, Tier::Avx512];

    /// The name used on the command line and in [`env::CPU_TIER`].
    pub const fn name(self) -> &'static str {
        match self {
            Tier::Portable => "portable",
            Tier::Avx2 => "avx2",
            Tier::Avx512 => "avx512",
        }
    }

    /// The highest tier this machine has, whatever the environment asks for.
    pub fn supported() -> Tier {
        static SUPPORTED: OnceLock<Tier> = OnceLock::new();
        *SUPPORTED.get_or_init(detect)
    }

    /// The tiers this machine has, lowest first.
    pub fn available() -> Vec<Tier> {
        Tier::ALL.into_iter().filter(|&tier| tier <= Tier::supported()).collect()
    }

    /// The tier kernels use: the highest supported one not above [`env::CPU_TIER`].
    ///
    /// # Errors
    /// If the variable is set to something that is not a tier.
    pub fn configured() -> Result<Tier> {
        match env::get(env::CPU_TIER) {
            None => Ok(Tier::supported()),
            Some(text) => Ok(text.parse::<Tier>()?.min(Tier::supported())),
        }
    }

    /// [`Tier::configured`], read once; an unreadable setting counts as none here, and is refused where a call is planned.
    pub fn best() -> Tier {
        static BEST: OnceLock<Tier> = OnceLock::new();
        *BEST.get_or_init(|| Tier::configured().unwrap_or_else(|_| Tier::supported()))
    }
}

#[cfg(target_arch = "x86_64")]
fn detect() -> Tier {
    use std::arch::is_x86_feature_detected as has;
    let avx2 = has!("avx2") && has!("fma") && has!("f16c") && has!("bmi1") && has!("bmi2") && has!("lzcnt");
    let avx512 = has!("avx512f") && has!("avx512bw") && has!("avx512dq") && has!("avx512vl");
    match (avx2, avx512) {
        (true, true) => Tier::Avx512,
        (true, false) => Tier::Avx2,
        _ => Tier::Portable,
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn detect() -> Tier {
    Tier::Portable
}

impl std::fmt::Display for Tier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

impl std::str::FromStr for Tier {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Tier::ALL
            .into_iter()
            .find(|tier| tier.name() == text)
            .ok_or_else(|| Error::parse("CPU tier", Tier::ALL.map(Tier::name).join(", "), text))
    }
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip_and_errors_list_the_choices() {
        for tier in Tier::ALL {
            assert_eq!(tier.to_string().parse::<Tier>().unwrap(), tier);
        }
        let error = "sse9".parse::<Tier>().unwrap_err().to_string();
        assert!(error.contains("avx512") && error.contains("sse9"), "{error}");
    }

    #[test]
    fn available_tiers_start_at_portable_and_end_at_the_supported_one() {
        let available = Tier::available();
        assert_eq!(available.first(), Some(&Tier::Portable));
        assert_eq!(available.last(), Some(&Tier::supported()));
        assert!(Tier::best() <= Tier::supported());
    }
}
