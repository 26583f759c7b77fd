//! Timing: how long a kernel takes, and how close that is to the limit of the machine.
//!
//! A measurement is a median over samples with its spread, on random normal data, after warm-up. Unless the whole
//! case easily fits in the cache, calls rotate over several copies of the tensors, so that each call reads from
//! memory. On a GPU, calls are replayed from a graph between two events. The ceilings, a plain copy and products of
//! nearby operands, are measured in the same run.

mod baseline;
mod ceilings;
#[cfg(feature = "cuda")]
mod cuda;
mod host;
mod memory;
mod overhead;
#[cfg(feature = "cuda")]
mod products;
mod samples;

pub use baseline::{Baseline, Peer, Peers};
pub use ceilings::{Bound, Ceilings};
pub use overhead::{HostTime, host_times};
#[cfg(feature = "cuda")]
pub use products::device_functions;
pub use samples::Samples;

use crate::device::{Device, DeviceInfo, Stream};
use crate::error::Result;
use crate::lab::AnyProvable;
use crate::lab::proof::{BenchTensors, kernels_on};
use crate::lab::{ArgPlan, Case};
use crate::op::{OpSpec, Select};
use serde::{Deserialize, Serialize};

/// How thoroughly to measure.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Settings {
    /// Seconds of sampling; repeated on a GPU until there are enough samples.
    pub seconds: f64,
    /// Seconds of rest before each sampling period on a GPU. Under matrix products it lowers its clock after about
    /// fifty milliseconds, which would show in the next measurement.
    pub rest: f64,
    /// Minimum number of samples. On the CPU there may be fewer if they take far longer than `seconds`.
    pub samples: usize,
    /// Bytes of the copy that measures the ceiling, if memory allows.
    pub copy_bytes: usize,
    /// Bytes over which CPU cases rotate if they do not fit in the caches of the cores. This does not guarantee a
    /// cold last-level cache: a server's can hold hundreds of megabytes, shared with others.
    pub host_rotation: usize,
}

impl Settings {
    /// For results that are kept.
    pub fn thorough(device: Device) -> Self {
        match device {
            Device::Cpu => Settings {
                seconds: 0.3,
                rest: 0.0,
                samples: 20,
                copy_bytes: 512 << 20,
                host_rotation: 512 << 20,
            },
            Device::Cuda(_) => {
                Settings { seconds: 0.04, rest: 0.25, samples: 20, copy_bytes: 4 << 30, host_rotation: 0 }
            }
        }
    }

    /// For many cases in turn with their peers, where the median of few samples tells enough.
    pub fn brief(device: Device) -> Self {
        match device {
            Device::Cpu => Settings {
                seconds: 0.1,
                rest: 0.0,
                samples: 7,
                copy_bytes: 128 << 20,
                host_rotation: 512 << 20,
            },
            Device::Cuda(_) => {
                Settings { seconds: 0.02, rest: 0.04, samples: 9, copy_bytes: 1 << 30, host_rotation: 0 }
            }
        }
    }

    /// For a first look.
    pub fn quick(device: Device) -> Self {
        match device {
            Device::Cpu => Settings {
                seconds: 0.06,
                rest: 0.0,
                samples: 5,
                copy_bytes: 128 << 20,
                host_rotation: 128 << 20,
            },
            Device::Cuda(_) => {
                Settings { seconds: 0.02, rest: 0.0, samples: 10, copy_bytes: 1 << 30, host_rotation: 0 }
            }
        }
    }
}

/// Whether the tensors of a call were in the cache when it began.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Cache {
    /// The same small tensors in every call.
    Warm,
    /// Calls rotate over more memory than the cache holds.
    Cold,
}

/// One case timed on one kernel.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Measurement {
    /// The op.
    pub op: String,
    /// The case's name.
    pub case: String,
    /// Its dtype.
    pub dtype: String,
    /// The device's marketing name.
    pub device: String,
    /// The kernel that ran.
    pub kernel: String,
    /// Its configuration.
    pub config: String,
    /// Identifies the kernel's code.
    pub source_hash: String,
    /// Milliseconds of one call: the median.
    pub median_ms: f64,
    /// The fastest sample.
    pub best_ms: f64,
    /// A tenth of the samples were faster.
    pub p10_ms: f64,
    /// A tenth of the samples were slower.
    pub p90_ms: f64,
    /// Number of calls that were timed.
    pub runs: usize,
    /// The fewest bytes the op can move.
    pub bytes: f64,
    /// Arithmetic operations.
    pub flops: f64,
    /// `bytes` over the median.
    pub gbps: f64,
    /// `flops` over the median.
    pub tflops: f64,
    /// The least time, by the ceilings measured in this run.
    pub limit_ms: f64,
    /// The ceiling that gives this limit.
    #[serde(default)]
    pub bound: Bound,
    /// `limit_ms` over the median. Above 100 is possible on a GPU in a warm cache.
    pub percent_of_ceiling: f64,
    /// State of the L2 (on the CPU, of all caches).
    pub l2: Cache,
}

impl Measurement {
    /// Half the distance between the 10th and 90th percentiles, divided by the median.
    pub fn spread(&self) -> f64 {
        (self.p90_ms - self.p10_ms) / (2.0 * self.median_ms)
    }
}

/// The result of tuning a case.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Tuning {
    /// Every kernel that was timed, the fastest first.
    pub measured: Vec<Measurement>,
    /// The kernel that was used before.
    pub before: &'static str,
    /// The kernel that is used from now on, if one of those timed may be chosen.
    pub chosen: Option<String>,
}

impl Tuning {
    /// The measurement of a kernel.
    pub fn of(&self, kernel: &str) -> Option<&Measurement> {
        self.measured.iter().find(|m| m.kernel == kernel)
    }

    /// The speed-up of the chosen kernel over the one used before, if both were timed.
    pub fn gain(&self) -> Option<f64> {
        Some(self.of(self.before)?.median_ms / self.of(self.chosen.as_ref()?)?.median_ms)
    }
}

/// The tensors of one case, ready to be timed on any number of kernels.
pub struct Bench {
    op: &'static dyn AnyProvable,
    case: Case,
    info: DeviceInfo,
    ceilings: Ceilings,
    settings: Settings,
    sets: Vec<BenchTensors>,
    cache: Cache,
    /// Of all tensors.
    bytes: usize,
    /// Bytes of the outputs, unless one is changed only in part.
    written: Option<usize>,
}

impl Bench {
    /// Allocates and fills as many copies of the tensors as the rotation needs.
    ///
    /// # Errors
    /// [`OutOfMemory`](crate::Error::OutOfMemory) if not even one copy fits with room to spare.
    pub fn new(
        op: &'static dyn AnyProvable,
        case: &Case,
        device: Device,
        ceilings: Ceilings,
        settings: Settings,
    ) -> Result<Bench> {
        let info = device.info()?;
        let plan = op.plan(case);
        let bytes = BenchTensors::bytes(&plan, case.arrangement)?;
        let memory = device.memory()?;
        let usable = memory.free / 10 * 8;
        if bytes as u64 > usable {
            return Err(memory.exceeded(device.to_string(), bytes as u64));
        }
        let (cache, wanted) = rotation(bytes, &info, &settings);
        let fitting = (usable / (bytes.max(1) as u64)) as usize;
        let sets = BenchTensors::copies(op.spec(), case, &plan, device, wanted.min(fitting).max(1))?;
        let written = written(op.spec(), &plan);
        Ok(Bench { op, case: case.clone(), info, ceilings, settings, sets, cache, bytes, written })
    }

    /// The ceilings for this case: on the CPU, with sweeps over memory in the state of the caches that the case has.
    fn limits(&self) -> Result<Ceilings> {
        if self.info.device != Device::Cpu {
            return Ok(self.ceilings);
        }
        let bytes = match self.cache {
            Cache::Warm => return self.ceilings.in_cache(self.bytes),
            Cache::Cold => ceilings::copy_bytes(self.info.device, &self.settings)?,
        };
        Ok(self.ceilings.with_memory(memory::rates(bytes, ceilings::MORE_SWEEPS)?))
    }

    /// Copies of the tensors that calls rotate over.
    pub fn sets(&self) -> usize {
        self.sets.len()
    }

    /// The ceilings that limits come from.
    pub fn ceilings(&self) -> Ceilings {
        self.ceilings
    }

    /// Bytes of all tensors of one copy.
    pub fn tensor_bytes(&self) -> usize {
        self.bytes
    }

    /// Measures the ceilings again, for the rounds from now on.
    pub fn renew_ceilings(&mut self) -> Result<()> {
        self.ceilings = Ceilings::measure(self.info.device, &self.settings)?;
        Ok(())
    }

    /// The kernels that can run the case here.
    pub fn kernels(&mut self) -> Vec<&'static str> {
        let (op, args) = (self.op, self.sets[0].args());
        let can = |kernel: &&'static str| {
            op.explain(&args, &self.case.attrs, &self.info, &select(Some(kernel))).is_ok()
        };
        kernels_on(op, self.info.device).iter().map(|kernel| kernel.name).filter(can).collect()
    }

    /// Times a kernel, or the one that would be chosen.
    pub fn measure(&mut self, kernel: Option<&str>) -> Result<Measurement> {
        let select = select(kernel);
        let args = self.sets[0].args();
        let chosen = self.op.explain(&args, &self.case.attrs, &self.info, &select)?;
        let cost = self.op.cost(&args, &self.case.attrs)?;
        let samples = self.sample(&select)?;
        let name = self.op.spec().name;
        let source_hash = self.op.kernels().into_iter().find(|k| k.name == chosen.kernel);
        let source_hash =
            source_hash.map(|kernel| crate::lab::source_hash(&kernel, name)).unwrap_or_default();
        let median_ms = samples.quantile(0.5);
        let written = self.written.map_or(cost.bytes / 2.0, |bytes| bytes as f64);
        let (limit_ms, bound) = self.limits()?.limit_ms(&cost, written);
        Ok(Measurement {
            op: name.into(),
            case: self.case.name(self.op.spec()),
            dtype: self.case.dtype.name().into(),
            device: self.info.name.clone(),
            kernel: chosen.kernel.into(),
            config: chosen.config,
            source_hash,
            median_ms,
            best_ms: samples.quantile(0.0),
            p10_ms: samples.quantile(0.1),
            p90_ms: samples.quantile(0.9),
            runs: samples.runs,
            bytes: cost.bytes,
            flops: cost.flops,
            gbps: cost.bytes / (median_ms * 1e6),
            tflops: cost.flops / (median_ms * 1e9),
            limit_ms,
            bound,
            percent_of_ceiling: 100.0 * limit_ms / median_ms,
            l2: self.cache,
        })
    }

    /// The measurement with the median time over several rounds; of an even number the slower of the two in the middle;
    /// none without rounds. Its limit is the median of the limits, but on the CPU the lowest: there the limit is the
    /// fastest seen.
    pub fn median(&self, mut rounds: Vec<Measurement>) -> Option<Measurement> {
        let middle = rounds.len() / 2;
        rounds.sort_by(|a, b| a.limit_ms.total_cmp(&b.limit_ms));
        let limit = if self.info.device == Device::Cpu { 0 } else { middle };
        let Measurement { limit_ms, bound, .. } = *rounds.get(limit)?;
        rounds.sort_by(|a, b| a.median_ms.total_cmp(&b.median_ms));
        let median = rounds.swap_remove(middle);
        Some(Measurement {
            limit_ms,
            bound,
            percent_of_ceiling: 100.0 * limit_ms / median.median_ms,
            ..median
        })
    }

    /// Times those of `candidates` that can run the case, and remembers the fastest: one for every call, whose bits do
    /// not depend on the rest of the batch, and one for calls that allow them to.
    pub fn tune(&mut self, candidates: &[&str]) -> Result<Tuning> {
        let args = self.sets[0].args();
        let before = self.op.explain(&args, &self.case.attrs, &self.info, &Select::default())?.kernel;
        let names = self.kernels().into_iter().filter(|name| candidates.contains(name));
        let mut measured = names.map(|name| self.measure(Some(name))).collect::<Result<Vec<_>>>()?;
        measured.sort_by(|a, b| a.median_ms.total_cmp(&b.median_ms));
        let kernels = self.op.kernels();
        let is_invariant = |m: &&Measurement| kernels.iter().any(|k| k.name == m.kernel && k.batch_invariant);
        let chosen = measured.iter().find(is_invariant).map(|m| m.kernel.clone());
        let args = self.sets[0].args();
        for (winner, any_batch) in [(chosen.as_ref(), false), (measured.first().map(|m| &m.kernel), true)] {
            if let Some(kernel) = winner {
                self.op.remember(&args, &self.case.attrs, &self.info, kernel, any_batch)?;
            }
        }
        Ok(Tuning { measured, before, chosen })
    }

    fn sample(&mut self, select: &Select) -> Result<Samples> {
        let (op, case, num_sets) = (self.op, &self.case, self.sets.len());
        let sets = &mut self.sets;
        let mut call = |set: usize, stream: &Stream| -> Result<()> {
            op.run(&mut sets[set].args(), &case.attrs, stream, select).map(|_| ())
        };
        match self.info.device {
            Device::Cpu => host::sample(num_sets, &self.settings, |set| call(set, &Stream::Host)),
            #[cfg(feature = "cuda")]
            Device::Cuda(ordinal) => {
                let context = crate::cuda::Context::get(ordinal)?;
                let samples = cuda::sample(context, num_sets, &self.settings, call);
                if samples.is_err() {
                    // Calls before the one that failed may still use tensors that the caller drops now. If waiting
                    // fails too, the first error is the one to report.
                    let _ = context.synchronize();
                }
                samples
            }
            #[cfg(not(feature = "cuda"))]
            Device::Cuda(_) => Err(crate::device::no_cuda_feature()),
        }
    }
}

/// Times one case on one kernel, or on the one that would be chosen.
pub fn measure(
    op: &'static dyn AnyProvable,
    case: &Case,
    device: Device,
    kernel: Option<&str>,
    settings: Settings,
) -> Result<Measurement> {
    let ceilings = Ceilings::measure(device, &settings)?;
    Bench::new(op, case, device, ceilings, settings)?.measure(kernel)
}

fn select(kernel: Option<&str>) -> Select {
    Select { kernel: kernel.map(|name| name.to_string().into()), allow_batch_variant: kernel.is_some() }
}

/// Bytes of the outputs of a case. None if an argument is changed only in part: what is written of it is not known.
fn written(spec: &OpSpec, plan: &[Option<ArgPlan>]) -> Option<usize> {
    let outputs = spec.args.iter().zip(plan).filter(|(arg, _)| arg.is_output());
    let bytes = outputs.filter_map(|(arg, plan)| Some((arg, plan.as_ref()?))).map(|(arg, plan)| {
        let elements: usize = plan.shape.iter().product();
        (!arg.is_input()).then_some(elements * plan.dtype.size())
    });
    bytes.sum()
}

/// State of the cache for a case of this many bytes, and the number of copies of its tensors this requires.
fn rotation(bytes: usize, info: &DeviceInfo, settings: &Settings) -> (Cache, usize) {
    match info.device {
        Device::Cpu if bytes < info.cache_bytes * info.units / 2 => (Cache::Warm, 1),
        Device::Cpu => (Cache::Cold, settings.host_rotation.div_ceil(bytes.max(1)).max(2)),
        Device::Cuda(_) if bytes < info.cache_bytes / 8 => (Cache::Warm, 1),
        // One copy is in use. The others must evict it from the cache before its next turn.
        Device::Cuda(_) => (Cache::Cold, (3 * info.cache_bytes).div_ceil(bytes.max(1)) + 1),
    }
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;
    use crate::cpu::Tier;
    use crate::tensor::DType;

    #[test]
    fn a_cold_gpu_case_rotates_over_three_times_the_cache() {
        let cache_bytes = 50 << 20;
        let info = DeviceInfo { device: Device::Cuda(0), cache_bytes, ..DeviceInfo::cpu(Tier::Portable) };
        let settings = Settings::thorough(info.device);
        assert_eq!(rotation(0, &info, &settings), (Cache::Warm, 1));
        assert_eq!(rotation(1 << 20, &info, &settings), (Cache::Warm, 1));
        for bytes in [cache_bytes / 8, 10 << 20, cache_bytes, 8 << 30] {
            let (cache, sets) = rotation(bytes, &info, &settings);
            assert_eq!(cache, Cache::Cold);
            assert!((2..=25).contains(&sets) && (sets - 1) * bytes >= 3 * cache_bytes, "{sets} of {bytes}");
        }
    }

    #[test]
    fn the_chosen_and_a_named_kernel_are_measured() {
        let op = crate::lab::find("rms_norm").unwrap();
        let case = Case::new(op.spec(), DType::F32).sizes(&[64, 256]);
        let settings =
            Settings { seconds: 0.001, rest: 0.0, samples: 3, copy_bytes: 1 << 20, host_rotation: 1 << 20 };
        let mut bench = Bench::new(op, &case, Device::Cpu, Ceilings::copy(10.0), settings).unwrap();
        let chosen = bench.measure(None).unwrap();
        assert!(bench.kernels().contains(&chosen.kernel.as_str()));
        assert_eq!(chosen.bytes, 2.0 * 64.0 * 256.0 * 4.0);
        assert!(
            chosen.p10_ms <= chosen.median_ms && chosen.median_ms <= chosen.p90_ms && chosen.best_ms > 0.0
        );
        // The copy of the case's own size, in the cache as it is, not the one given.
        let copy = memory::rates(bench.bytes / 2, 1).unwrap().copy;
        assert_eq!((chosen.l2, bench.written), (Cache::Warm, Some(64 * 256 * 4)));
        assert!(chosen.limit_ms > 0.0 && chosen.limit_ms >= 0.999 * chosen.bytes / (copy * 1e6));
        assert_eq!(bench.measure(Some("rms_norm_portable")).unwrap().kernel, "rms_norm_portable");
        assert!(bench.measure(Some("nothing")).is_err());
        let before = bench.ceilings;
        bench.renew_ceilings().unwrap();
        assert_ne!(bench.ceilings, before);
        let rounds = [(3.0, 0.5), (1.0, 1.0), (2.0, 1.5)];
        let rounds =
            rounds.map(|(median_ms, limit_ms)| Measurement { median_ms, limit_ms, ..chosen.clone() });
        let median = bench.median(rounds.to_vec()).unwrap();
        assert_eq!([median.median_ms, median.limit_ms, median.percent_of_ceiling], [2.0, 0.5, 25.0]);
        assert_eq!(bench.median(rounds[..2].to_vec()).unwrap().median_ms, 3.0);
        assert_eq!(bench.median(Vec::new()), None);
        bench.info.device = Device::Cuda(0);
        assert_eq!(bench.median(rounds.to_vec()).unwrap().limit_ms, 1.0);
    }
}
