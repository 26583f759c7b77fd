//! The machine that evidence was recorded on.

use crate::cpu;
use crate::device::Device;
use crate::error::Result;
use crate::op::KernelInfo;
use serde::{Deserialize, Serialize};

/// The highest clocks of a GPU, in MHz.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Clocks {
    /// Of the multiprocessors.
    pub sm_mhz: u32,
    /// Of the memory.
    pub memory_mhz: u32,
}

/// The processor that runs CPU kernels.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Cpu {
    /// Threads in use.
    pub threads: usize,
    /// The best tier in use.
    pub tier: String,
}

/// A device and the software under it.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Machine {
    /// The device's marketing name.
    pub device: String,
    /// GPU: the driver's version.
    pub driver: Option<String>,
    /// GPU: the version of the compiler.
    pub nvrtc: Option<String>,
    /// GPU: its clocks.
    pub clocks: Option<Clocks>,
    /// CPU: how it is used.
    pub cpu: Option<Cpu>,
}

impl Machine {
    /// The facts about a device of this machine.
    pub fn of(device: Device) -> Result<Machine> {
        let name = device.info()?.name;
        match device {
            Device::Cpu => {
                let cpu = Cpu { threads: cpu::num_threads(), tier: cpu::Tier::best().name().into() };
                Ok(Machine { device: name, cpu: Some(cpu), ..Machine::default() })
            }
            #[cfg(feature = "cuda")]
            Device::Cuda(ordinal) => {
                let props = crate::cuda::Context::get(ordinal)?.info();
                let cuda =
                    format!("CUDA {}.{}", props.driver_version / 1000, props.driver_version % 1000 / 10);
                let driver = match driver_version() {
                    Some(version) => format!("{version} ({cuda})"),
                    None => cuda,
                };
                let nvrtc = crate::jit::nvrtc::find().ok().map(|nvrtc| nvrtc.version());
                Ok(Machine {
                    device: name,
                    driver: Some(driver),
                    nvrtc: nvrtc.map(|(major, minor)| format!("{major}.{minor}")),
                    clocks: Some(Clocks {
                        sm_mhz: props.clock_khz / 1000,
                        memory_mhz: props.memory_clock_khz / 1000,
                    }),
                    cpu: None,
                })
            }
            #[cfg(not(feature = "cuda"))]
            Device::Cuda(_) => Err(crate::device::no_cuda_feature()),
        }
    }

    /// Whether it runs kernels of this kind.
    pub fn runs(&self, kernel: &KernelInfo) -> bool {
        match (&self.cpu, kernel.tier) {
            (None, tier) => tier.is_none(),
            (Some(cpu), Some(tier)) => cpu.tier.parse().is_ok_and(|best: cpu::Tier| tier <= best),
            (Some(_), None) => false,
        }
    }

    /// Whether the device is a GPU.
    pub fn is_gpu(&self) -> bool {
        self.cpu.is_none()
    }
}

/// The version of the kernel driver, if the system shows it: the first word that consists of numbers and dots.
#[cfg(feature = "cuda")]
fn driver_version() -> Option<String> {
    let text = std::fs::read_to_string("/proc/driver/nvidia/version").ok()?;
    let is_version = |word: &&str| word.contains('.') && word.split('.').all(|n| n.parse::<u32>().is_ok());
    text.lines().next()?.split_whitespace().find(is_version).map(str::to_string)
}
