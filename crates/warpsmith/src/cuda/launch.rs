//! Launching kernels.

use super::context::{DeviceProps, cu};
use super::module::{Function, FunctionAttributes};
use super::stream::Stream;
use crate::error::{Error, Result};
use cudarc::driver::sys::{
    CUlaunchAttribute, CUlaunchAttributeID, CUlaunchAttributeValue,
    CUlaunchAttributeValue_union__bindgen_ty_1, CUlaunchConfig,
};
use std::ffi::c_void;

/// Blocks of a cluster on any device that has clusters.
const PORTABLE_CLUSTER: u32 = 8;
/// Blocks of a cluster on the devices that allow the most.
const LARGEST_CLUSTER: u32 = 16;
/// Bytes of kernel parameters everywhere.
const PARAM_BYTES: usize = 4096;
/// Bytes of kernel parameters since CUDA 12.1 on compute capability 7.0.
const LARGE_PARAM_BYTES: usize = 32764;

/// The shape of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LaunchConfig {
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub block: [u32; 3],
    /// Dynamic shared memory of a block in bytes.
    pub shared_bytes: u32,
    /// Blocks of a cluster, if the kernel uses clusters.
    pub cluster: Option<[u32; 3]>,
    /// Programmatic dependent launch: the kernel may start before the one ahead of it in the stream has ended,
    /// and waits in its own code (`griddepcontrol.wait`) before it touches that one's results. Only a hint:
    /// devices without it run the kernels one after the other.
    pub pdl: bool,
}

impl LaunchConfig {
    /// A launch without cluster or overlap.
    pub fn new(grid: [u32; 3], block: [u32; 3], shared_bytes: u32) -> LaunchConfig {
        LaunchConfig { grid, block, shared_bytes, cluster: None, pdl: false }
    }
}

/// Checks a launch against the limits of the device and the kernel, so that a bad one is an error with a name and
/// two numbers instead of `CUDA_ERROR_INVALID_VALUE`.
pub fn check_limits(
    kernel: &str,
    props: &DeviceProps,
    function: &FunctionAttributes,
    cfg: &LaunchConfig,
) -> Result<()> {
    let fail =
        |what, got: u64, limit: u64| Err(Error::Launch { kernel: kernel.to_string(), what, got, limit });
    let extents = [
        (["grid.x", "grid.y", "grid.z"], cfg.grid, props.max_grid),
        (["block.x", "block.y", "block.z"], cfg.block, props.max_block),
    ];
    for (names, values, limits) in extents {
        for ((what, got), limit) in names.into_iter().zip(values).zip(limits) {
            // Zero is as wrong as too much, and the driver's error would say neither.
            if got == 0 || got > limit {
                return fail(what, got.into(), limit.into());
            }
        }
    }
    let threads = product(cfg.block);
    let most_threads = u64::from(props.max_threads_per_block.min(function.max_threads_per_block));
    if threads > most_threads {
        return fail("threads per block", threads, most_threads);
    }
    let shared = u64::from(function.static_shared) + u64::from(cfg.shared_bytes);
    let most_shared = u64::from(props.shared_per_block_optin.max(props.shared_per_block));
    if shared > most_shared {
        return fail("shared memory per block", shared, most_shared);
    }
    if let Some(cluster) = cfg.cluster {
        let blocks = product(cluster);
        let most_blocks = if props.cluster_launch { LARGEST_CLUSTER.into() } else { 1 };
        if blocks == 0 || blocks > most_blocks {
            return fail("blocks per cluster", blocks, most_blocks);
        }
        let names = [
            "cluster.x (must divide grid.x)",
            "cluster.y (must divide grid.y)",
            "cluster.z (must divide grid.z)",
        ];
        for ((what, cluster), grid) in names.into_iter().zip(cluster).zip(cfg.grid) {
            if grid % cluster != 0 {
                return fail(what, cluster.into(), grid.into());
            }
        }
    }
    Ok(())
}

/// Checks the size of the parameter struct against what the kernel declares and the driver can pass.
pub(super) fn check_params(
    kernel: &str,
    props: &DeviceProps,
    function: &FunctionAttributes,
    bytes: usize,
) -> Result<()> {
    let large = props.major >= 7 && props.driver_version >= 12010;
    let most = if large { LARGE_PARAM_BYTES } else { PARAM_BYTES };
    let fail = |what, limit: usize| {
        Err(Error::Launch { kernel: kernel.to_string(), what, got: bytes as u64, limit: limit as u64 })
    };
    match function.param_bytes {
        Some(declared) if declared != bytes => {
            fail("size of the parameters (must be what the kernel declares)", declared)
        }
        _ if bytes > most => fail("size of the parameters", most),
        _ => Ok(()),
    }
}

fn product(extents: [u32; 3]) -> u64 {
    extents.into_iter().map(u64::from).fold(1, u64::saturating_mul)
}

/// The driver's launch attributes of a configuration.
#[derive(Clone, Copy)]
pub(super) struct Attributes {
    all: [CUlaunchAttribute; 2],
    used: u32,
}

// SAFETY: plain numbers; the pointers that a union of attributes could hold are never set.
unsafe impl Send for Attributes {}
// SAFETY: as above.
unsafe impl Sync for Attributes {}

impl Attributes {
    /// Those that a launch on a device needs.
    pub fn of(cfg: &LaunchConfig, props: &DeviceProps) -> Attributes {
        let mut all: [CUlaunchAttribute; 2] = [attribute(CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_IGNORE); 2];
        let mut used = 0;
        if let Some([x, y, z]) = cfg.cluster {
            all[used] = attribute(CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION);
            all[used].value.clusterDim = CUlaunchAttributeValue_union__bindgen_ty_1 { x, y, z };
            used += 1;
        }
        if cfg.pdl && props.major >= 9 {
            all[used] = attribute(CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION);
            all[used].value.programmaticStreamSerializationAllowed = 1;
            used += 1;
        }
        Attributes { all, used: used as u32 }
    }
}

impl Function {
    /// Raises the limits that a launch needs raised.
    pub(super) fn prepare(&self, cfg: &LaunchConfig) -> Result<()> {
        self.allow_shared(cfg.shared_bytes)?;
        match cfg.cluster {
            Some(cluster) if product(cluster) > PORTABLE_CLUSTER.into() => self.allow_large_clusters(),
            _ => Ok(()),
        }
    }
}

/// Gives a kernel with one by-value parameter to `stream`. Returns at once.
///
/// # Safety
/// `P` must be the `#[repr(C)]` twin of the kernel's parameter. Every address in it must be good for what the
/// kernel does there, until the stream has run the kernel (or as long as the graph, if it is captured), and the
/// kernel must not race with other streams.
pub unsafe fn launch<P: Copy>(f: &Function, stream: &Stream, cfg: &LaunchConfig, params: &P) -> Result<()> {
    let props = f.context().info();
    check_limits(f.name(), props, f.attributes(), cfg)?;
    check_params(f.name(), props, f.attributes(), size_of::<P>())?;
    f.prepare(cfg)?;
    let params = (&raw const *params).cast_mut().cast();
    // SAFETY: passed on.
    unsafe { launch_raw(f, stream, cfg, &Attributes::of(cfg, props), params) }
}

/// As [`launch`], for a configuration that was checked and prepared.
///
/// # Safety
/// As [`launch`]; `params` must point to the kernel's parameter.
pub(super) unsafe fn launch_raw(
    f: &Function,
    stream: &Stream,
    cfg: &LaunchConfig,
    attributes: &Attributes,
    params: *mut c_void,
) -> Result<()> {
    let ctx = f.context();
    if !std::ptr::eq(ctx, stream.context()) {
        let (expected, got) =
            (format!("a stream of {}", ctx.name()), format!("one of {}", stream.context().name()));
        return Err(Error::argument("launch", "stream", expected, got));
    }
    let mut arguments: [*mut c_void; 1] = [params];
    let ([gx, gy, gz], [bx, by, bz]) = (cfg.grid, cfg.block);
    if attributes.used == 0 {
        // SAFETY: the driver copies the parameter during the call; the caller vouches for what it points to.
        return unsafe {
            cu!(
                ctx,
                cuLaunchKernel(
                    f.handle(),
                    gx,
                    gy,
                    gz,
                    bx,
                    by,
                    bz,
                    cfg.shared_bytes,
                    stream.handle(),
                    arguments.as_mut_ptr(),
                    std::ptr::null_mut()
                )
            )
        };
    }
    let launch_ex = ctx.api().cuLaunchKernelEx.ok_or_else(|| Error::Unavailable {
        what: "cuLaunchKernelEx".into(),
        why: "the driver does not have it".into(),
        fix: "Update the driver to CUDA 12 or newer".into(),
    })?;
    let config = CUlaunchConfig {
        gridDimX: gx,
        gridDimY: gy,
        gridDimZ: gz,
        blockDimX: bx,
        blockDimY: by,
        blockDimZ: bz,
        sharedMemBytes: cfg.shared_bytes,
        hStream: stream.handle(),
        attrs: attributes.all.as_ptr().cast_mut(),
        numAttrs: attributes.used,
    };
    ctx.bind()?;
    // SAFETY: as above; the driver only reads the attributes, which live through the call.
    let code = unsafe { launch_ex(&config, f.handle(), arguments.as_mut_ptr(), std::ptr::null_mut()) };
    ctx.check_code("cuLaunchKernelEx", code)
}

/// A launch attribute with a value of all zeros.
fn attribute(id: CUlaunchAttributeID) -> CUlaunchAttribute {
    CUlaunchAttribute { id, pad: [0; 4], value: CUlaunchAttributeValue { pad: [0; 64] } }
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;

    fn h200() -> DeviceProps {
        DeviceProps {
            name: "H200".into(),
            uuid: String::new(),
            major: 9,
            minor: 0,
            sm_count: 132,
            max_threads_per_block: 1024,
            max_threads_per_sm: 2048,
            max_blocks_per_sm: 32,
            max_block: [1024, 1024, 64],
            max_grid: [2147483647, 65535, 65535],
            shared_per_block: 49152,
            shared_per_block_optin: 232448,
            shared_per_sm: 233472,
            regs_per_block: 65536,
            regs_per_sm: 65536,
            l2_bytes: 50 << 20,
            total_memory: 150 << 30,
            clock_khz: 1980000,
            memory_clock_khz: 3201000,
            bus_width: 6144,
            cluster_launch: true,
            driver_version: 13000,
        }
    }

    fn kernel() -> FunctionAttributes {
        FunctionAttributes { max_threads_per_block: 512, static_shared: 1024, ..Default::default() }
    }

    /// The parameter an error names, its value and the limit.
    fn refusal(props: &DeviceProps, cfg: &LaunchConfig) -> Option<(&'static str, u64, u64)> {
        match check_limits("k", props, &kernel(), cfg) {
            Ok(()) => None,
            Err(Error::Launch { what, got, limit, .. }) => Some((what, got, limit)),
            Err(other) => panic!("{other}"),
        }
    }

    #[test]
    fn every_limit_is_named() {
        let good = LaunchConfig::new([1000, 65535, 65535], [128, 4, 1], 232448 - 1024);
        let props = h200();
        assert_eq!(refusal(&props, &good), None);
        let cases = [
            (LaunchConfig { grid: [0, 1, 1], ..good }, ("grid.x", 0, 2147483647)),
            (LaunchConfig { grid: [1, 65536, 1], ..good }, ("grid.y", 65536, 65535)),
            (LaunchConfig { grid: [1, 1, 65536], ..good }, ("grid.z", 65536, 65535)),
            (LaunchConfig { block: [1, 0, 1], ..good }, ("block.y", 0, 1024)),
            (LaunchConfig { block: [1, 1, 65], ..good }, ("block.z", 65, 64)),
            (LaunchConfig { block: [513, 1, 1], ..good }, ("threads per block", 513, 512)),
            (LaunchConfig { block: [1024, 1024, 64], ..good }, ("threads per block", 67108864, 512)),
            (LaunchConfig { shared_bytes: 231425, ..good }, ("shared memory per block", 232449, 232448)),
            (
                LaunchConfig { shared_bytes: u32::MAX, ..good },
                ("shared memory per block", 4294968319, 232448),
            ),
            (LaunchConfig { cluster: Some([32, 1, 1]), ..good }, ("blocks per cluster", 32, 16)),
            (LaunchConfig { cluster: Some([0, 1, 1]), ..good }, ("blocks per cluster", 0, 16)),
            (LaunchConfig { cluster: Some([3, 1, 1]), ..good }, ("cluster.x (must divide grid.x)", 3, 1000)),
        ];
        for (cfg, expected) in cases {
            assert_eq!(refusal(&props, &cfg), Some(expected), "{cfg:?}");
        }
        assert_eq!(refusal(&props, &LaunchConfig { cluster: Some([8, 1, 1]), ..good }), None);
        assert_eq!(refusal(&props, &LaunchConfig { cluster: Some([2, 5, 1]), ..good }), None);
    }

    #[test]
    fn a_device_without_clusters_allows_clusters_of_one() {
        let props = DeviceProps { cluster_launch: false, ..h200() };
        let cfg = LaunchConfig::new([4, 1, 1], [32, 1, 1], 0);
        assert_eq!(refusal(&props, &LaunchConfig { cluster: Some([1, 1, 1]), ..cfg }), None);
        let refused = refusal(&props, &LaunchConfig { cluster: Some([2, 1, 1]), ..cfg });
        assert_eq!(refused, Some(("blocks per cluster", 2, 1)));
    }

    #[test]
    fn parameters_must_fit_the_kernel_and_the_driver() {
        let (new, old) = (h200(), DeviceProps { driver_version: 12000, ..h200() });
        assert!(check_params("k", &new, &kernel(), LARGE_PARAM_BYTES).is_ok());
        assert!(check_params("k", &new, &kernel(), LARGE_PARAM_BYTES + 1).is_err());
        assert!(check_params("k", &old, &kernel(), PARAM_BYTES).is_ok());
        assert!(check_params("k", &old, &kernel(), PARAM_BYTES + 1).is_err());
        let declared = FunctionAttributes { param_bytes: Some(64), ..kernel() };
        assert!(check_params("k", &new, &declared, 64).is_ok());
        let error = check_params("k", &new, &declared, 60).unwrap_err();
        assert!(error.to_string().contains("is 60, the device allows 64"), "{error}");
    }
}
