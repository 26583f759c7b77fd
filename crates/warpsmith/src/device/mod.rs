//! Devices, and the streams and events that order their work.

mod cards;
mod stream;

pub use cards::known_arch;
pub use stream::{Event, Stream};

use crate::cpu::{self, Tier};
use crate::error::{Error, Result};
use crate::jit::Arch;
use std::fmt;

/// Where a tensor lives and an op runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Device {
    /// The host processor.
    Cpu,
    /// A CUDA device by ordinal.
    Cuda(u32),
}

impl Device {
    /// The first usable CUDA device, else the CPU.
    pub fn best() -> Device {
        if cuda_device_count() > 0 && Device::Cuda(0).info().is_ok() { Device::Cuda(0) } else { Device::Cpu }
    }

    /// The devices of this machine, the CPU first.
    pub fn all() -> Vec<Device> {
        std::iter::once(Device::Cpu).chain((0..cuda_device_count() as u32).map(Device::Cuda)).collect()
    }

    /// What kernels need to know of the device.
    pub fn info(self) -> Result<DeviceInfo> {
        match self {
            Device::Cpu => Ok(DeviceInfo::cpu(Tier::best())),
            #[cfg(feature = "cuda")]
            Device::Cuda(ordinal) => {
                Ok(DeviceInfo::of_cuda(ordinal, crate::cuda::Context::get(ordinal)?.info()))
            }
            #[cfg(not(feature = "cuda"))]
            Device::Cuda(_) => Err(no_cuda_feature()),
        }
    }

    /// Its memory now.
    pub fn memory(self) -> Result<Memory> {
        match self {
            Device::Cpu => Ok(Memory::of_host()),
            #[cfg(feature = "cuda")]
            Device::Cuda(ordinal) => {
                let memory = crate::cuda::Context::get(ordinal)?.memory()?;
                // Memory cached by the pool is available too.
                let cached = memory.pool_reserved.saturating_sub(memory.pool_used);
                Ok(Memory { free: memory.free + cached, total: memory.total })
            }
            #[cfg(not(feature = "cuda"))]
            Device::Cuda(_) => Err(no_cuda_feature()),
        }
    }

    /// Waits for all work of the device.
    pub fn synchronize(self) -> Result<()> {
        match self {
            Device::Cpu => Ok(()),
            #[cfg(feature = "cuda")]
            Device::Cuda(ordinal) => crate::cuda::Context::get(ordinal)?.synchronize(),
            #[cfg(not(feature = "cuda"))]
            Device::Cuda(_) => Err(no_cuda_feature()),
        }
    }

    /// The stream that calls without one use.
    pub fn default_stream(self) -> Result<Stream> {
        match self {
            Device::Cpu => Ok(Stream::Host),
            #[cfg(feature = "cuda")]
            Device::Cuda(ordinal) => {
                Ok(Stream::Cuda(crate::cuda::Context::get(ordinal)?.default_stream().clone()))
            }
            #[cfg(not(feature = "cuda"))]
            Device::Cuda(_) => Err(no_cuda_feature()),
        }
    }
}

/// Bytes of a device's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memory {
    /// What is available now.
    pub free: u64,
    /// All there is.
    pub total: u64,
}

impl Memory {
    /// The host's. Free is what the system reports as available without swapping; where it does not report that, what
    /// is unused.
    pub(crate) fn of_host() -> Memory {
        // SAFETY: sysconf only reads its argument.
        let pages = |which| unsafe { libc::sysconf(which) }.max(0) as u64;
        let size = pages(libc::_SC_PAGESIZE);
        let total = pages(libc::_SC_PHYS_PAGES) * size;
        let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let kib = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
        let kib = kib.and_then(|rest| rest.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
        Memory { free: kib.map_or(pages(libc::_SC_AVPHYS_PAGES) * size, |kib| kib << 10), total }
    }

    /// The error of asking for more of it than there is.
    pub fn exceeded(self, device: impl Into<String>, requested: u64) -> Error {
        Error::OutOfMemory { device: device.into(), requested, free: self.free, total: self.total }
    }
}

fn cuda_device_count() -> usize {
    #[cfg(feature = "cuda")]
    return crate::cuda::device_count();
    #[cfg(not(feature = "cuda"))]
    0
}

#[cfg(not(feature = "cuda"))]
pub(crate) fn no_cuda_feature() -> Error {
    Error::Unavailable {
        what: "CUDA".into(),
        why: "this build has no CUDA support".into(),
        fix: "Build with the feature `cuda` (on by default)".into(),
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Device::Cpu => f.pad("cpu"),
            Device::Cuda(ordinal) => f.pad(&format!("cuda:{ordinal}")),
        }
    }
}

impl std::str::FromStr for Device {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let expected = "`cpu`, `cuda` or `cuda:N`";
        match text.split_once(':') {
            None if text == "cpu" => Ok(Device::Cpu),
            None if text == "cuda" => Ok(Device::Cuda(0)),
            Some(("cuda", n)) => {
                n.parse().map(Device::Cuda).map_err(|_| Error::parse("device", expected, text))
            }
            _ => Err(Error::parse("device", expected, text)),
        }
    }
}

/// The facts about a device that selection and configuration use. Plain data: tests make their own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    /// The device.
    pub device: Device,
    /// Its marketing name.
    pub name: String,
    /// CPU: the best instruction tier that may be used.
    pub tier: Tier,
    /// CUDA: the compute capability; `None` on the CPU.
    pub arch: Option<Arch>,
    /// CUDA: number of multiprocessors. CPU: number of threads.
    pub units: usize,
    /// CUDA: most shared memory of one block after opting in.
    pub shared_per_block: usize,
    /// Bytes of last-level cache that a kernel can count on (CUDA: L2).
    pub cache_bytes: usize,
}

impl DeviceInfo {
    /// The host processor, used up to `tier`.
    pub fn cpu(tier: Tier) -> Self {
        DeviceInfo {
            device: Device::Cpu,
            name: cpu::cpu_name().into(),
            tier,
            arch: None,
            units: cpu::num_threads(),
            shared_per_block: 0,
            cache_bytes: cpu::l2_bytes(),
        }
    }

    #[cfg(feature = "cuda")]
    fn of_cuda(ordinal: u32, props: &crate::cuda::DeviceProps) -> Self {
        DeviceInfo {
            device: Device::Cuda(ordinal),
            name: props.name.clone(),
            tier: Tier::Portable,
            arch: Some(Arch::for_device(props.major as u8, props.minor as u8)),
            units: props.sm_count as usize,
            shared_per_block: props.shared_per_block_optin as usize,
            cache_bytes: props.l2_bytes as usize,
        }
    }
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;

    #[test]
    fn device_names_round_trip() {
        for d in [Device::Cpu, Device::Cuda(0), Device::Cuda(3)] {
            assert_eq!(d.to_string().parse::<Device>().unwrap(), d);
        }
        assert_eq!("cuda".parse::<Device>().unwrap(), Device::Cuda(0));
        assert!("gpu".parse::<Device>().is_err());
        assert!("cuda:x".parse::<Device>().is_err());
    }

    #[test]
    fn a_missing_gpu_is_an_error_not_a_panic() {
        assert!(Device::Cuda(4096).info().is_err());
        assert!(Device::Cuda(4096).synchronize().is_err());
        assert!(Device::Cuda(4096).memory().is_err());
    }

    #[test]
    fn memory_that_is_short_is_told_in_numbers() {
        let memory = Device::Cpu.memory().unwrap();
        assert!((1 << 20..memory.total).contains(&memory.free), "{memory:?}");
        let told = Memory { free: 1, total: 2 }.exceeded("cpu", 3).to_string();
        assert_eq!(told, "out of memory on cpu: asked for 3 bytes, 1 of 2 bytes are free");
    }
}
