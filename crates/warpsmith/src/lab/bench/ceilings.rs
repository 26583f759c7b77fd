//! The ceilings of a machine: how fast it copies and how fast it multiplies.

use super::{Settings, memory};
use crate::cpu;
use crate::cpu::gemm::{self, Isa};
use crate::device::Device;
use crate::error::Result;
use crate::op::{Cost, Products};
use serde::{Deserialize, Serialize};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// Sweeps of each kind that are timed for a ceiling, and again with each case.
const FIRST_SWEEPS: usize = 7;
pub(super) const MORE_SWEEPS: usize = 2;

/// Bytes of each of the two buffers of a copy; as much again is left alone.
pub(super) fn copy_bytes(device: Device, settings: &Settings) -> Result<usize> {
    Ok(settings.copy_bytes.min((device.memory()?.free / 4) as usize))
}

/// What limits an op.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Bound {
    /// Moving its bytes.
    #[default]
    Memory,
    /// Multiplying.
    Products,
}

impl Bound {
    /// The rate that is limited, with its unit.
    pub fn rate(self, gbps: f64, tflops: f64) -> String {
        match self {
            Bound::Memory => format!("{} GB/s", rounded(gbps)),
            Bound::Products => format!("{} TFLOP/s", rounded(tflops)),
        }
    }
}

/// The measured rates of a device.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Ceilings {
    /// Copy bandwidth in GB/s, counting bytes read and bytes written.
    pub copy_gbps: f64,
    /// GB/s of a sweep that only reads, on the CPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_gbps: Option<f64>,
    /// GB/s of a sweep that only writes, on the CPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub write_gbps: Option<f64>,
    /// TFLOP/s of products of f32.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub f32_tflops: Option<f64>,
    /// TFLOP/s of products of TF32.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tf32_tflops: Option<f64>,
    /// TFLOP/s of products of bf16 or f16.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub half_tflops: Option<f64>,
    /// TFLOP/s of products of 8-bit floats.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fp8_tflops: Option<f64>,
}

impl Ceilings {
    /// Only the rate of a copy.
    pub fn copy(copy_gbps: f64) -> Ceilings {
        Ceilings {
            copy_gbps,
            read_gbps: None,
            write_gbps: None,
            f32_tflops: None,
            tf32_tflops: None,
            half_tflops: None,
            fp8_tflops: None,
        }
    }

    /// Measures a device.
    pub fn measure(device: Device, settings: &Settings) -> Result<Ceilings> {
        let bytes = copy_bytes(device, settings)?;
        match device {
            Device::Cpu => {
                let (threads, isa) = (cpu::num_threads(), Isa::of_tier(cpu::Tier::best()));
                let time = Duration::from_secs_f64(settings.seconds.min(0.1));
                static FASTEST: Mutex<[f64; 2]> = Mutex::new([0.0; 2]);
                let mut fastest = FASTEST.lock().unwrap_or_else(PoisonError::into_inner);
                let measured = [gemm::f32_rate(isa, threads, time), gemm::bf16_rate(isa, threads, time)];
                *fastest = std::array::from_fn(|i| fastest[i].max(measured[i]));
                let [f32_tflops, half_tflops] = fastest.map(Some);
                // Without units for the narrower types, they are multiplied as the next wider type.
                let ceilings = Ceilings {
                    f32_tflops,
                    tf32_tflops: f32_tflops,
                    half_tflops,
                    fp8_tflops: half_tflops,
                    ..Ceilings::copy(0.0)
                };
                Ok(ceilings.with_memory(memory::rates(bytes, FIRST_SWEEPS)?))
            }
            #[cfg(feature = "cuda")]
            Device::Cuda(ordinal) => {
                let context = crate::cuda::Context::get(ordinal)?;
                let rate = |products| super::products::rate(context, settings, products);
                Ok(Ceilings {
                    f32_tflops: rate(Products::F32)?,
                    tf32_tflops: rate(Products::Tf32)?,
                    half_tflops: rate(Products::Half)?,
                    fp8_tflops: rate(Products::Fp8)?,
                    ..Ceilings::copy(crate::cuda::measure_copy(context, bytes.max(1))?)
                })
            }
            #[cfg(not(feature = "cuda"))]
            Device::Cuda(_) => Err(crate::device::no_cuda_feature()),
        }
    }

    /// With the rates of sweeps over the host's memory.
    pub(super) fn with_memory(self, rates: memory::Rates) -> Ceilings {
        Ceilings { copy_gbps: rates.copy, read_gbps: Some(rates.read), write_gbps: Some(rates.write), ..self }
    }

    /// These ceilings for a call of the host whose tensors, of `bytes` bytes in all, are in the caches when it begins: the
    /// rates of memory are those of sweeps of that size.
    pub fn in_cache(&self, bytes: usize) -> Result<Ceilings> {
        Ok(self.with_memory(memory::rates(bytes / 2, MORE_SWEEPS)?))
    }

    /// TFLOP/s of products, if they were measured.
    pub fn tflops(&self, products: Products) -> Option<f64> {
        match products {
            Products::F32 => self.f32_tflops,
            Products::Tf32 => self.tf32_tflops,
            Products::Half => self.half_tflops,
            Products::Fp8 => self.fp8_tflops,
        }
    }

    /// The least milliseconds in which this can be done, and what takes them. `written` of the bytes are written; bytes
    /// that are only read, or only written, move at that rate where it was measured.
    pub fn limit_ms(&self, cost: &Cost, written: f64) -> (f64, Bound) {
        let one_way = |rate: Option<f64>| rate.unwrap_or(self.copy_gbps);
        let (read, write) = (one_way(self.read_gbps), one_way(self.write_gbps));
        let moving = memory::Rates { copy: self.copy_gbps, read, write }.least_ms(cost.bytes, written);
        let rate = cost.products.and_then(|products| self.tflops(products));
        match rate.map(|tflops| cost.flops / (tflops * 1e9)) {
            Some(multiplying) if multiplying > moving => (multiplying, Bound::Products),
            _ => (moving, Bound::Memory),
        }
    }

    /// The same with `round` applied to every rate.
    pub(crate) fn map(&self, round: impl Fn(f64) -> f64) -> Ceilings {
        Ceilings {
            copy_gbps: round(self.copy_gbps),
            read_gbps: self.read_gbps.map(&round),
            write_gbps: self.write_gbps.map(&round),
            f32_tflops: self.f32_tflops.map(&round),
            tf32_tflops: self.tf32_tflops.map(&round),
            half_tflops: self.half_tflops.map(&round),
            fp8_tflops: self.fp8_tflops.map(&round),
        }
    }
}

impl std::fmt::Display for Ceilings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "copy {} GB/s", rounded(self.copy_gbps))?;
        let rates = [
            ("f32", self.f32_tflops),
            ("TF32", self.tf32_tflops),
            ("bf16", self.half_tflops),
            ("fp8", self.fp8_tflops),
        ];
        let measured = rates.iter().filter_map(|(name, rate)| Some(format!("{name} {}", rounded((*rate)?))));
        match measured.collect::<Vec<_>>() {
            rates if rates.is_empty() => Ok(()),
            rates => write!(f, ", products {} TFLOP/s", rates.join(", ")),
        }
    }
}

/// Four digits at most.
fn rounded(rate: f64) -> String {
    match rate {
        100.0.. => format!("{rate:.0}"),
        10.0.. => format!("{rate:.1}"),
        _ => format!("{rate:.2}"),
    }
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;

    #[test]
    fn the_slower_of_moving_and_multiplying_is_the_limit() {
        let ceilings = Ceilings { half_tflops: Some(2.0), ..Ceilings::copy(100.0) };
        assert_eq!(ceilings.limit_ms(&Cost::moving(1e8, 1e15), 0.0), (1.0, Bound::Memory));
        assert_eq!(
            ceilings.limit_ms(&Cost::multiplying(1e8, 1e9, Products::Half), 0.0),
            (1.0, Bound::Memory)
        );
        assert_eq!(
            ceilings.limit_ms(&Cost::multiplying(1e8, 4e9, Products::Half), 0.0),
            (2.0, Bound::Products)
        );
        // What is only read is moved as fast as can be read.
        let reading = Ceilings { read_gbps: Some(200.0), ..ceilings };
        assert_eq!(reading.limit_ms(&Cost::moving(1e8, 0.0), 0.0), (0.5, Bound::Memory));
        assert_eq!(reading.limit_ms(&Cost::moving(1e8, 0.0), 5e7), (1.0, Bound::Memory));
        // Rates that were not measured do not limit.
        assert_eq!(ceilings.limit_ms(&Cost::multiplying(1e8, 4e9, Products::Fp8), 0.0), (1.0, Bound::Memory));
    }

    #[test]
    fn rates_have_the_unit_of_what_limits_them() {
        assert_eq!(Bound::Memory.rate(25.62, 0.1), "25.6 GB/s");
        assert_eq!(Bound::Products.rate(25.62, 0.123), "0.12 TFLOP/s");
        assert_eq!(Bound::default(), Bound::Memory);
    }

    #[test]
    fn the_host_multiplies_narrow_types_too() {
        let settings =
            Settings { seconds: 0.002, rest: 0.0, samples: 1, copy_bytes: 1 << 20, host_rotation: 0 };
        let measured = Ceilings::measure(Device::Cpu, &settings).unwrap();
        let of = |products| measured.tflops(products).unwrap();
        assert!(of(Products::F32) > 0.0 && of(Products::Half) > 0.0, "{measured}");
        assert_eq!(of(Products::Fp8), of(Products::Half));
    }

    #[test]
    fn ceilings_print_what_was_measured() {
        let ceilings = Ceilings::copy(36.94);
        assert_eq!(ceilings.to_string(), "copy 36.9 GB/s");
        let all = Ceilings { f32_tflops: Some(0.2812), half_tflops: Some(801.6), ..ceilings };
        assert_eq!(all.to_string(), "copy 36.9 GB/s, products f32 0.28, bf16 802 TFLOP/s");
        assert_eq!(serde_json::to_string(&ceilings).unwrap(), r#"{"copy_gbps":36.94}"#);
    }
}
