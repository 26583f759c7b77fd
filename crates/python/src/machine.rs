//! What this machine has: devices, the CUDA compiler, settings.

use crate::errors::OrRaise;
use pyo3::prelude::*;
use warpsmith::jit::nvrtc;
use warpsmith::{Device, cpu, cuda, env};

/// The devices whose kernels can run, by name: "cpu", "cuda:0", ...
#[pyfunction]
pub fn devices(py: Python<'_>) -> Vec<(String, String)> {
    py.detach(|| {
        let found = Device::all().into_iter().filter_map(|device| Some((device, device.info().ok()?.name)));
        found.map(|(device, name)| (device.to_string(), name)).collect()
    })
}

/// Waits for all work of a device.
#[pyfunction]
pub fn synchronize(py: Python<'_>, device: &str) -> PyResult<()> {
    let device = device.parse::<Device>().or_raise(py)?;
    py.detach(|| device.synchronize()).or_raise(py)
}

/// Bytes of a device's memory: free and in all, and of the library's pool on a GPU what it holds, what of it is in use,
/// and the most that was since the last [`reset_peak_memory`]. The CPU has no pool: zeros.
#[pyfunction]
pub fn memory(py: Python<'_>, device: &str) -> PyResult<(u64, u64, u64, u64, u64)> {
    let device = device.parse::<Device>().or_raise(py)?;
    py.detach(|| match device {
        Device::Cpu => device.memory().map(|memory| (memory.free, memory.total, 0, 0, 0)),
        Device::Cuda(ordinal) => {
            let memory = cuda::Context::get(ordinal)?.memory()?;
            let pool = (memory.pool_reserved, memory.pool_used, memory.pool_high);
            Ok((memory.free, memory.total, pool.0, pool.1, pool.2))
        }
    })
    .or_raise(py)
}

/// Begins the peak of the pool's use anew. Nothing on the CPU.
#[pyfunction]
pub fn reset_peak_memory(py: Python<'_>, device: &str) -> PyResult<()> {
    let device = device.parse::<Device>().or_raise(py)?;
    py.detach(|| match device {
        Device::Cpu => Ok(()),
        Device::Cuda(ordinal) => cuda::Context::get(ordinal)?.reset_pool_high(),
    })
    .or_raise(py)
}

/// Waits for the device and gives what its pool holds without using it back to the system. Nothing on the CPU.
#[pyfunction]
pub fn empty_cache(py: Python<'_>, device: &str) -> PyResult<()> {
    let device = device.parse::<Device>().or_raise(py)?;
    py.detach(|| match device {
        Device::Cpu => Ok(()),
        Device::Cuda(ordinal) => {
            let context = cuda::Context::get(ordinal)?;
            context.synchronize()?;
            context.trim(0)
        }
    })
    .or_raise(py)
}

/// What was found, one line each: what it is, "ok", "missing" or "broken", what was found, and what to do about it.
#[pyfunction]
pub fn examine(py: Python<'_>) -> Vec<(String, &'static str, String, String)> {
    py.detach(|| {
        let mut lines = vec![processor(), driver()];
        for device in Device::all().into_iter().skip(1) {
            lines.push(match device.info() {
                Ok(info) => (device.to_string(), "ok", info.name, String::new()),
                Err(error) => (device.to_string(), "broken", error.to_string(), String::new()),
            });
        }
        lines.push(compiler());
        lines.extend(settings());
        lines
    })
}

type Line = (String, &'static str, String, String);

fn processor() -> Line {
    let found = format!("{}, {} threads, {:?}", cpu::cpu_name(), cpu::num_threads(), cpu::Tier::best());
    ("cpu".into(), "ok", found, String::new())
}

fn driver() -> Line {
    match cuda::status() {
        Ok(_) => ("cuda driver".into(), "ok", format!("{} devices", cuda::device_count()), String::new()),
        Err(error) => (
            "cuda driver".into(),
            "missing",
            error.to_string(),
            "Ops run on the CPU. For a GPU, install NVIDIA's driver".into(),
        ),
    }
}

fn compiler() -> Line {
    match nvrtc::find() {
        Ok(nvrtc) => {
            let (major, minor) = nvrtc.version();
            ("cuda compiler".into(), "ok", format!("NVRTC {major}.{minor}"), String::new())
        }
        Err(error) => (
            "cuda compiler".into(),
            "missing",
            error.to_string(),
            "Needed on a GPU alone: pip install 'warpsmith[cu13]' or 'warpsmith[cu12]'".into(),
        ),
    }
}

fn settings() -> Vec<Line> {
    let names = [
        env::CACHE_DIR,
        env::KERNEL_PACK,
        env::DISABLE_JIT,
        env::NUM_THREADS,
        env::CPU_TIER,
        env::CPU_MATRIX,
    ];
    let set = names.into_iter().filter_map(|name| Some((name, env::get(name)?)));
    set.map(|(name, value)| (name.to_string(), "ok", value, String::new())).collect()
}
