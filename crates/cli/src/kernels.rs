//! The device code behind kernels: the variants that packs hold.

use crate::inputs::one_of_many;
use indicatif::{ProgressBar, ProgressStyle};
use warpsmith::jit::{self, Arch, CudaKernel, Defines, Profile, Request};
use warpsmith::op::KernelInfo;
use warpsmith::op::survey::Needed;
use warpsmith::{Error, Result, ops};

/// One specialisation of a device function.
pub struct Variant {
    /// The function and its source.
    pub device: &'static CudaKernel,
    /// Its compile-time values.
    pub defines: Defines,
    prelude: String,
}

impl Variant {
    /// The request for the compiler.
    pub fn request(&self, arch: Arch, profile: Profile) -> Request<'_> {
        Request {
            prelude: &self.prelude,
            defines: &self.defines,
            profile,
            fast_math: self.device.fast_math || jit::fast_math(),
            ..Request::new(&self.device.source, arch)
        }
    }

    /// `NAME=value` of every define.
    pub fn describe(&self) -> String {
        let defines: Vec<String> =
            self.defines.iter().map(|(name, value)| format!("{name}={value}")).collect();
        defines.join(" ")
    }
}

impl From<Needed> for Variant {
    fn from(needed: Needed) -> Variant {
        Variant { device: needed.kernel, defines: needed.defines, prelude: (needed.kernel.prelude)() }
    }
}

/// The variants of the device functions of a kernel; none for CPU kernels.
pub fn variants(kernel: &KernelInfo) -> Vec<Variant> {
    kernel.cuda.into_iter().chain(kernel.also.into_iter().flatten()).flat_map(device_variants).collect()
}

/// The variants of a device function.
pub fn device_variants(device: &'static CudaKernel) -> impl Iterator<Item = Variant> {
    let prelude = (device.prelude)();
    (device.variants)().into_iter().map(move |defines| Variant { device, defines, prelude: prelude.clone() })
}

/// Every device function of every op once, always in the same order.
pub fn device_functions() -> Vec<&'static CudaKernel> {
    let kernels = ops::provable().into_iter().flat_map(|op| op.kernels());
    let all = kernels.flat_map(|kernel| kernel.cuda.into_iter().chain(kernel.also.into_iter().flatten()));
    let mut seen = std::collections::HashSet::new();
    all.filter(|device| seen.insert(std::ptr::from_ref(*device) as usize)).collect()
}

/// Whether a device function can be compiled for an architecture. One written for an `a` architecture uses
/// instructions that only that architecture has.
pub fn compiles_for(device: &CudaKernel, arch: Arch) -> bool {
    device.is_for(arch) && (arch.accel || !device.min_arch.accel)
}

/// The kernel with this name, and the name of its op.
pub fn find_kernel(name: &str) -> Result<(&'static str, KernelInfo)> {
    let all = ops::provable()
        .into_iter()
        .flat_map(|op| op.kernels().into_iter().map(|kernel| (op.spec().name, kernel)));
    let mut known = Vec::new();
    for (op, kernel) in all {
        if kernel.name == name {
            return Ok((op, kernel));
        }
        known.push(kernel.name);
    }
    Err(Error::parse("kernel", one_of_many("a kernel", &known, "warpsmith list OP", name), name))
}

/// A progress bar on stderr for `total` steps; hidden if stderr is no terminal.
pub fn progress_bar(total: usize) -> ProgressBar {
    let style = ProgressStyle::with_template("{bar:30} {pos}/{len} {elapsed} (eta {eta}) {msg}");
    ProgressBar::new(total as u64).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variants_of_all_device_functions_are_listed_and_distinct() {
        let (op, kernel) = find_kernel("rms_norm_backward_row").unwrap();
        assert_eq!(op, "rms_norm_backward");
        let variants = variants(&kernel);
        let functions: std::collections::HashSet<&str> = variants.iter().map(|v| v.device.function).collect();
        assert!(functions.contains("norm_backward_row") && functions.contains("column_sum"));
        let arch = Arch::new(9, 0, true);
        let keys: std::collections::HashSet<_> =
            variants.iter().map(|v| v.request(arch, Profile::Release).key()).collect();
        assert_eq!(keys.len(), variants.len());
        assert!(self::variants(&find_kernel("rms_norm_portable").unwrap().1).is_empty());
        assert!(find_kernel("rms_norm_rows").err().unwrap().to_string().contains("rms_norm_row"));
    }

    #[test]
    fn older_and_plainer_architectures_are_left_out() {
        let device =
            |min_arch| CudaKernel { min_arch, ..*find_kernel("rms_norm_row").unwrap().1.cuda.unwrap() };
        let arch = |text: &str| text.parse::<Arch>().unwrap();
        assert!(compiles_for(&device(arch("80")), arch("90a")));
        assert!(!compiles_for(&device(arch("80")), arch("75")));
        assert!(compiles_for(&device(arch("90a")), arch("90a")));
        assert!(!compiles_for(&device(arch("90a")), arch("90")));
    }
}
