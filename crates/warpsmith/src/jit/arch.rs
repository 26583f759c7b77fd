//! GPU architectures as NVRTC names them.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// A GPU architecture to compile for, such as `sm_80` or `sm_90a`.
#[derive(Copy, Clone, Debug, Eq, Hash, PartialEq, Ord, PartialOrd, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Arch {
    /// Major compute capability.
    pub major: u8,
    /// Minor compute capability, 0 to 9.
    pub minor: u8,
    /// Whether instructions specific to this chip may be used (`a`: wgmma, tcgen05). Such code runs on no other chip.
    pub accel: bool,
}

/// Integrated (Tegra) GPUs are not binary compatible with other minor versions, in either direction.
const INTEGRATED: [(u8, u8); 4] = [(5, 3), (6, 2), (7, 2), (8, 7)];

impl Arch {
    /// `sm_<major><minor>`, with the suffix `a` if `accel`.
    pub const fn new(major: u8, minor: u8, accel: bool) -> Self {
        Arch { major, minor, accel }
    }

    /// The architecture that uses all of a device of this compute capability: the `a` variant from 9.0 on.
    pub const fn for_device(major: u8, minor: u8) -> Self {
        Arch { major, minor, accel: major >= 9 }
    }

    /// The number NVRTC uses in its list: 90 for `sm_90a`.
    pub const fn number(self) -> i32 {
        self.major as i32 * 10 + self.minor as i32
    }

    /// The virtual architecture, for PTX: `compute_90a`.
    pub fn virtual_name(self) -> String {
        format!("compute_{}{}{}", self.major, self.minor, self.suffix())
    }

    /// Architectures whose cubins run on a device this one is native to, best first and starting with itself.
    ///
    /// A cubin runs on every device of the same major and the same or a higher minor version, so `sm_80` code runs on
    /// 8.6 and 8.9. Code for an `a` architecture runs only on that chip.
    pub fn loadable(self) -> Vec<Arch> {
        let mut list = vec![self];
        if self.accel {
            list.push(Arch { accel: false, ..self });
        }
        if !INTEGRATED.contains(&(self.major, self.minor)) {
            let lower = (0..self.minor).rev().filter(|&minor| !INTEGRATED.contains(&(self.major, minor)));
            list.extend(lower.map(|minor| Arch::new(self.major, minor, false)));
        }
        list
    }

    fn suffix(self) -> &'static str {
        if self.accel { "a" } else { "" }
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sm_{}{}{}", self.major, self.minor, self.suffix())
    }
}

impl FromStr for Arch {
    type Err = Error;

    /// Reads `90a`, `sm_90a` or `9.0a`.
    fn from_str(text: &str) -> Result<Self> {
        let error = || Error::parse("GPU architecture", "one like `sm_90a`, `90a` or `9.0a`", text);
        let bare = text.strip_prefix("sm_").unwrap_or(text);
        let (number, accel) = match bare.strip_suffix('a') {
            Some(number) => (number, true),
            None => (bare, false),
        };
        let (major, minor) = match number.split_once('.') {
            Some(parts) => parts,
            None => number.split_at_checked(number.len().saturating_sub(1)).ok_or_else(error)?,
        };
        let plain = |digits: &str| !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
        if !plain(major) || !plain(minor) || minor.len() != 1 || major.starts_with('0') {
            return Err(error());
        }
        let read = |digits: &str| digits.parse::<u8>().map_err(|_| error());
        Ok(Arch { major: read(major)?, minor: read(minor)?, accel })
    }
}

impl TryFrom<String> for Arch {
    type Error = Error;

    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}

impl From<Arch> for String {
    fn from(arch: Arch) -> String {
        arch.to_string()
    }
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;

    #[test]
    fn reads_every_spelling() {
        for text in ["90a", "sm_90a", "9.0a"] {
            assert_eq!(text.parse::<Arch>().unwrap(), Arch::new(9, 0, true), "{text}");
        }
        assert_eq!("120".parse::<Arch>().unwrap(), Arch::new(12, 0, false));
        assert_eq!("10.3a".parse::<Arch>().unwrap().to_string(), "sm_103a");
        assert_eq!(Arch::new(9, 0, true).virtual_name(), "compute_90a");
        assert_eq!(Arch::new(12, 1, false).number(), 121);
    }

    #[test]
    fn refuses_what_is_no_architecture() {
        for text in
            ["", "9", "a", "sm_", "90b", "9.", ".0", "9.00", "09", "+9.0", "sm_sm_90", "99999", "é0", "9é"]
        {
            assert!(matches!(text.parse::<Arch>(), Err(Error::Parse { .. })), "{text}");
        }
    }

    #[test]
    fn loads_lower_minors_of_the_same_major() {
        let names = |arch: Arch| arch.loadable().iter().map(Arch::to_string).collect::<Vec<_>>();
        assert_eq!(
            names(Arch::new(8, 9, false)),
            ["sm_89", "sm_88", "sm_86", "sm_85", "sm_84", "sm_83", "sm_82", "sm_81", "sm_80"]
        );
        assert_eq!(names(Arch::new(9, 0, true)), ["sm_90a", "sm_90"]);
        assert_eq!(names(Arch::new(8, 7, false)), ["sm_87"]);
        assert_eq!(Arch::for_device(9, 0), Arch::new(9, 0, true));
        assert_eq!(Arch::for_device(8, 6), Arch::new(8, 6, false));
    }
}
