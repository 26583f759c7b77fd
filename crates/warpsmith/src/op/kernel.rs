//! Kernels: what they are, what they can run, and what they are given.

use super::args::Args;
use crate::cpu::Tier;
use crate::device::{DeviceInfo, Stream};
use crate::error::Result;
use crate::jit::{Arch, CudaKernel};
#[cfg(feature = "cuda")]
use crate::{
    cuda::{LaunchConfig, Recorder, TensorMap, Tiled},
    jit::{CType, Defines},
};

/// The most device functions that a kernel launches besides its first.
pub(super) const MOST_ALSO: usize = 6;

/// Why a kernel cannot run a problem.
pub type Why = String;

/// A library of the GPU's vendor, with kernels of its own.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct VendorLibrary {
    /// Its name.
    pub name: &'static str,
    /// The sources of the calls into it, which identify the kernel instead of device code.
    pub sources: &'static [&'static str],
}

/// What a kernel runs on.
pub enum Target {
    /// The host, with the instructions of a tier.
    Cpu(Tier),
    /// A CUDA device.
    Cuda(&'static CudaKernel),
    /// A CUDA device, through a library.
    Library(VendorLibrary),
}

/// One implementation of an op.
pub struct Kernel<P: 'static> {
    /// Its name, unique over all ops.
    pub name: &'static str,
    /// Where it runs.
    pub target: Target,
    /// Further device functions the kernel launches.
    pub also: [Option<&'static CudaKernel>; MOST_ALSO],
    /// Whether it also runs on devices too old for those, without them.
    pub also_optional: bool,
    /// Whether a row's bits are independent of the other rows. Only such kernels are chosen unless the caller
    /// allows others.
    pub batch_invariant: bool,
    /// Whether its products flush subnormals: of bf16, as CPU instructions do, or of the parts that GPUs split f32
    /// into.
    pub flushes_subnormals: bool,
    /// Whether it can run a problem, beyond what the target implies.
    pub supports: fn(&P, &DeviceInfo) -> std::result::Result<(), Why>,
    /// The configuration it would use, as text.
    pub config: fn(&P, &DeviceInfo) -> String,
    /// Bytes of workspace it needs on the device.
    pub workspace: fn(&P, &DeviceInfo) -> usize,
    /// Runs it.
    pub run: fn(&Launch<'_, P>) -> Result<()>,
}

impl<P> Kernel<P> {
    /// A batch-invariant CPU kernel without conditions.
    pub const fn cpu(name: &'static str, tier: Tier, run: fn(&Launch<'_, P>) -> Result<()>) -> Self {
        Kernel {
            name,
            target: Target::Cpu(tier),
            also: [None; MOST_ALSO],
            also_optional: false,
            batch_invariant: true,
            flushes_subnormals: false,
            supports: |_, _| Ok(()),
            config: |_, info| format!("{} threads", info.units),
            workspace: |_, _| 0,
            run,
        }
    }

    /// A batch-invariant CUDA kernel without conditions.
    pub const fn cuda(
        name: &'static str,
        kernel: &'static CudaKernel,
        run: fn(&Launch<'_, P>) -> Result<()>,
    ) -> Self {
        Self::on_device(name, Target::Cuda(kernel), true, run)
    }

    /// A kernel of a vendor's library, which promises nothing about the rest of the batch.
    pub const fn library(
        name: &'static str,
        library: VendorLibrary,
        run: fn(&Launch<'_, P>) -> Result<()>,
    ) -> Self {
        Self::on_device(name, Target::Library(library), false, run)
    }

    const fn on_device(
        name: &'static str,
        target: Target,
        batch_invariant: bool,
        run: fn(&Launch<'_, P>) -> Result<()>,
    ) -> Self {
        Kernel {
            name,
            target,
            also: [None; MOST_ALSO],
            also_optional: false,
            batch_invariant,
            flushes_subnormals: false,
            supports: |_, _| Ok(()),
            config: |_, _| String::new(),
            workspace: |_, _| 0,
            run,
        }
    }

    /// With conditions.
    pub const fn when(mut self, supports: fn(&P, &DeviceInfo) -> std::result::Result<(), Why>) -> Self {
        self.supports = supports;
        self
    }

    /// Taking subnormal factors of bf16, or parts of f32, for zero.
    pub const fn flushing_subnormals(mut self) -> Self {
        self.flushes_subnormals = true;
        self
    }

    /// With a printable configuration.
    pub const fn configured(mut self, config: fn(&P, &DeviceInfo) -> String) -> Self {
        self.config = config;
        self
    }

    /// With a further device function.
    pub const fn and(mut self, device: &'static CudaKernel) -> Self {
        let mut at = 0;
        while self.also[at].is_some() {
            at += 1;
            assert!(at < MOST_ALSO, "a kernel has at most seven device functions");
        }
        self.also[at] = Some(device);
        self
    }

    /// Where the device is too old for the further functions, the kernel runs without them.
    pub const fn or_without(mut self) -> Self {
        self.also_optional = true;
        self
    }

    /// The most demanding of the device functions that it cannot do without.
    fn most_demanding(&self) -> Option<&'static CudaKernel> {
        let Target::Cuda(cuda) = self.target else { return None };
        let also = self.also.into_iter().flatten().filter(|_| !self.also_optional);
        also.chain([cuda]).max_by_key(|kernel| (kernel.min_arch.accel, kernel.min_arch.number()))
    }

    /// With a workspace.
    pub const fn with_workspace(mut self, workspace: fn(&P, &DeviceInfo) -> usize) -> Self {
        self.workspace = workspace;
        self
    }

    /// Whether the kernel can run `problem` on the device.
    pub fn refuses(&self, problem: &P, info: &DeviceInfo) -> Option<Why> {
        match (&self.target, info.arch) {
            (Target::Cpu(_), Some(_)) => Some("runs on the CPU only".into()),
            (Target::Cuda(_) | Target::Library(_), None) => Some("runs on CUDA devices only".into()),
            (Target::Cpu(tier), None) if *tier > info.tier => {
                Some(format!("needs {tier}, the best here is {}", info.tier))
            }
            (_, arch) => match (self.most_demanding(), arch) {
                (Some(kernel), Some(arch)) if !kernel.is_for(arch) => {
                    Some(format!("needs {}, the device is {arch}", kernel.min_arch))
                }
                _ => (self.supports)(problem, info).err(),
            },
        }
    }
}

/// One call of a kernel: everything its `run` gets.
///
/// Kernels of the CPU and of libraries run each time they are called. Those of a GPU are called once for a plan, and record
/// their launches: the addresses they see are stand-ins, which later calls replace.
///
/// Only this library makes one, from arguments that the op's check has accepted: kernels trust it.
#[non_exhaustive]
pub struct Launch<'a, P> {
    /// The checked problem.
    pub problem: &'a P,
    /// The tensors.
    pub args: &'a Args<'a>,
    /// The device.
    pub info: &'a DeviceInfo,
    /// The order of execution.
    pub stream: &'a Stream,
    /// Address of the workspace asked for.
    pub workspace: usize,
    /// The tier of a CPU kernel.
    pub tier: Tier,
    /// The device half of a CUDA kernel.
    pub cuda: Option<&'static CudaKernel>,
    #[cfg(feature = "cuda")]
    pub(super) recorder: Option<&'a Recorder>,
}

#[cfg(feature = "cuda")]
impl<P> Launch<'_, P> {
    fn recorder(&self) -> &Recorder {
        self.recorder.expect("CUDA kernels are recorded")
    }

    /// Records a launch of the call's CUDA kernel.
    ///
    /// # Safety
    /// `params` must be what the kernel's prelude declares, and its addresses good for the accesses the kernel makes under
    /// `defines` and `config`, whatever the addresses of a call with this problem are.
    pub unsafe fn record<T: CType>(
        &self,
        defines: &Defines,
        config: &LaunchConfig,
        params: &T,
    ) -> Result<()> {
        let kernel = self.cuda.expect("a CUDA kernel's launch has its device half");
        self.recorder().launch(kernel, defines, config, params)
    }

    /// Records a launch of one of several device functions that a call consists of.
    ///
    /// # Safety
    /// As [`Launch::record`].
    pub unsafe fn record_part<T: CType>(
        &self,
        kernel: &'static CudaKernel,
        defines: &Defines,
        config: &LaunchConfig,
        params: &T,
    ) -> Result<()> {
        self.recorder().launch(kernel, defines, config, params)
    }

    /// The copy engine's description of a tensor of the call.
    pub fn tensor_map(&self, tensor: &Tiled<'_>) -> Result<TensorMap> {
        self.recorder().tensor_map(tensor)
    }
}

/// Facts about a kernel, for listings, packs and evidence.
#[derive(Clone, Copy)]
pub struct KernelInfo {
    /// Its name.
    pub name: &'static str,
    /// CPU tier, if it is a CPU kernel.
    pub tier: Option<Tier>,
    /// Device half, if it is a CUDA kernel.
    pub cuda: Option<&'static CudaKernel>,
    /// Further device functions it launches.
    pub also: [Option<&'static CudaKernel>; MOST_ALSO],
    /// The vendor's library it calls, if any.
    pub library: Option<VendorLibrary>,
    /// The oldest architecture it runs on, if it is a CUDA kernel.
    pub min_arch: Option<Arch>,
    /// Whether results are independent of the rest of the batch.
    pub batch_invariant: bool,
    /// See [`Kernel::flushes_subnormals`].
    pub flushes_subnormals: bool,
}

impl KernelInfo {
    /// Whether it runs on CUDA devices rather than on the CPU.
    pub fn is_cuda(&self) -> bool {
        self.tier.is_none()
    }

    /// Identifies a CUDA kernel's code by its device sources, headers and parameters; a library's by the code that calls
    /// it. CPU kernels have the library's version: their sources are not in the program.
    pub fn identity(&self) -> String {
        if let Some(library) = self.library {
            return blake3::hash(library.sources.concat().as_bytes()).to_hex().to_string();
        }
        let Some(cuda) = self.cuda else { return env!("CARGO_PKG_VERSION").into() };
        let hash = |k: &CudaKernel| crate::jit::source_hash(&k.source, &(k.prelude)());
        if self.also[0].is_none() {
            return hash(cuda);
        }
        let all = self.also.iter().flatten().fold(hash(cuda), |all, also| all + &hash(also));
        blake3::hash(all.as_bytes()).to_hex().to_string()
    }
}

pub(super) fn info_of<P>(kernel: &Kernel<P>) -> KernelInfo {
    let (tier, cuda, library) = match kernel.target {
        Target::Cpu(tier) => (Some(tier), None, None),
        Target::Cuda(cuda) => (None, Some(cuda), None),
        Target::Library(library) => (None, None, Some(library)),
    };
    KernelInfo {
        name: kernel.name,
        tier,
        cuda,
        also: kernel.also,
        library,
        min_arch: kernel.most_demanding().map(|cuda| cuda.min_arch),
        batch_invariant: kernel.batch_invariant,
        flushes_subnormals: kernel.flushes_subnormals,
    }
}
