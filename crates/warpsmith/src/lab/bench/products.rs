//! The rate of matrix products on a GPU when operands need not be moved.

use super::{Settings, cuda};
use crate::cuda::{Context, DeviceBuffer, LaunchConfig, Stream, launch, load};
use crate::device;
use crate::error::Result;
use crate::jit::{Arch, Source};
use crate::jit::{CudaKernel, Defines};
use crate::kernel_params;
use crate::op::Products;

const SOURCE: Source = Source { name: "products", code: include_str!("products.cu") };
/// Threads of a block, as in the device code.
const THREADS: usize = 256;
const WARPS: usize = THREADS / 32;
/// Operations of a launch for each multiprocessor: half a millisecond for the fastest units there are.
const OPERATIONS: f64 = 4e9;

kernel_params! {
    struct ProductsParams {
        out: u64,
        rounds: i32,
    }
}

/// Instructions that multiply.
struct Method {
    device: CudaKernel,
    /// Blocks a multiprocessor is given: enough to keep its units busy.
    blocks: usize,
    /// Bytes of K that a round of a block multiplies, and rows times columns.
    round_bytes: usize,
    round_tile: usize,
}

const fn device(function: &'static str, min_arch: Arch, variants: fn() -> Vec<Defines>) -> CudaKernel {
    CudaKernel {
        source: SOURCE,
        prelude: ProductsParams::prelude,
        function,
        min_arch,
        fast_math: false,
        overlaps: true,
        variants,
    }
}

/// Each thread multiplies single numbers: sixteen sums, one product each.
static FMA: Method = Method {
    device: device("fma_rate", Arch::new(6, 0, false), || vec![defines(0, "f32")]),
    blocks: 8,
    round_bytes: 4,
    round_tile: 16 * THREADS,
};
/// Each warp adds to eight tiles of 16 x 8.
static MMA: Method = Method {
    device: device("mma_rate", Arch::new(8, 0, false), || ["bf16", "f32"].map(|e| defines(1, e)).into()),
    blocks: 4,
    round_bytes: 32,
    round_tile: 8 * 16 * 8 * WARPS,
};
/// Two warpgroups, tiles of 64 x 256, four steps.
static WGMMA: Method = Method {
    device: device("wgmma_rate", Arch::new(9, 0, true), || {
        ["bf16", "f32", "f8e4m3"].map(|e| defines(2, e)).into()
    }),
    blocks: 1,
    round_bytes: 128,
    round_tile: 2 * 64 * 256,
};

/// The device functions that measure: part of a pack, and compiled by the tests.
pub fn device_functions() -> [&'static CudaKernel; 3] {
    [&FMA.device, &MMA.device, &WGMMA.device]
}

fn defines(method: usize, element: &str) -> Defines {
    vec![("WAY", method.to_string()), ("ELEM", element.to_string())]
}

/// How an architecture multiplies: the instruction, its number and the element type. `None` if there is none, or only
/// one that is known not to be the fastest.
fn method(products: Products, arch: Arch) -> Option<(&'static Method, Defines)> {
    let element = match products {
        Products::F32 => return Some((&FMA, defines(0, "f32"))),
        Products::Tf32 => "f32",
        Products::Half => "bf16",
        Products::Fp8 => "f8e4m3",
    };
    // Later data-centre GPUs have faster instructions of their own, so a measurement of these would be too low.
    match arch.number() {
        90 => Some((&WGMMA, defines(2, element))),
        80..90 | 120.. if products != Products::Fp8 => Some((&MMA, defines(1, element))),
        _ => None,
    }
}

/// TFLOP/s of a device.
pub(super) fn rate(
    context: &'static Context,
    settings: &Settings,
    products: Products,
) -> Result<Option<f64>> {
    let props = context.info();
    let arch = Arch::for_device(props.major as u8, props.minor as u8);
    let Some((method, defines)) = method(products, arch) else { return Ok(None) };
    let element_bytes = match products {
        Products::F32 | Products::Tf32 => 4,
        Products::Half => 2,
        Products::Fp8 => 1,
    };
    let blocks = method.blocks * props.sm_count as usize;
    let per_round = (2 * method.round_tile * method.round_bytes / element_bytes) as f64;
    let rounds = (OPERATIONS / (per_round * method.blocks as f64)).ceil();
    let stream = Stream::new(context)?;
    let out = DeviceBuffer::alloc(&stream, blocks * THREADS * size_of::<f32>())?;
    stream.synchronize()?;
    let params = ProductsParams { out: out.ptr(), rounds: rounds as i32 };
    let config =
        LaunchConfig { pdl: true, ..LaunchConfig::new([blocks as u32, 1, 1], [THREADS as u32, 1, 1], 0) };
    let function = load(context, &method.device, &defines)?;
    let samples = cuda::sample(context, 1, settings, |_, stream| {
        let device::Stream::Cuda(stream) = stream else {
            unreachable!("samples are taken on a stream of the device")
        };
        // SAFETY: a thread writes one f32 of `out`, which has room for all and outlives the samples.
        unsafe { launch(function, stream, &config, &params) }
    })?;
    Ok(Some(per_round * rounds * blocks as f64 / (samples.quantile(0.5) * 1e9)))
}

/// A launch of a nearly empty kernel, by the driver alone: the lower bound of any call.
pub(super) fn empty_launch(
    context: &'static Context,
    overlaps: bool,
) -> Result<impl Fn(&Stream) -> Result<()>> {
    let function = load(context, &FMA.device, &defines(0, "f32"))?;
    let stream = Stream::new(context)?;
    let out = DeviceBuffer::alloc(&stream, THREADS * size_of::<f32>())?;
    stream.synchronize()?;
    let config = LaunchConfig { pdl: overlaps, ..LaunchConfig::new([1, 1, 1], [THREADS as u32, 1, 1], 0) };
    Ok(move |stream: &Stream| {
        let params = ProductsParams { out: out.ptr(), rounds: 0 };
        // SAFETY: a thread writes one f32 of `out`, which has room for all; the closure keeps it until the caller, who waits
        // for the stream, drops it.
        unsafe { launch(function, stream, &config, &params) }
    })
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;

    #[test]
    fn every_way_is_among_the_variants_of_its_function() {
        for number in [60, 75, 80, 86, 89, 90, 100, 120] {
            let arch = Arch::for_device(number / 10, number % 10);
            for products in [Products::F32, Products::Tf32, Products::Half, Products::Fp8] {
                let Some((method, defines)) = method(products, arch) else { continue };
                assert!(method.device.is_for(arch), "{} for {arch}", method.device.function);
                assert!((method.device.variants)().contains(&defines), "{defines:?}");
            }
        }
        assert!(method(Products::Half, Arch::for_device(7, 5)).is_none());
    }
}
