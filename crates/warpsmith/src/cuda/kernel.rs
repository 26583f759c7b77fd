//! From a registered kernel and its defines to a launch: compile or fetch, load, launch.

use super::{Context, Function, LaunchConfig, Module, Stream};
use crate::device;
use crate::error::{Error, Result};
use crate::jit::{self, CType, Request};
use crate::op::{CudaKernel, Defines, Launch, quick_hash};
use std::collections::HashMap;
use std::sync::{LazyLock, RwLock};

/// The compiled functions in use, by device, source and defines: after the first call of a configuration neither
/// the compiler's key nor any file is looked at again.
static READY: LazyLock<RwLock<HashMap<u64, Ready>>> = LazyLock::new(Default::default);

/// A function ready to be launched.
#[derive(Clone, Copy)]
struct Ready {
    function: &'static Function,
    /// Whether it may start before the kernel ahead of it has ended: it waits by itself.
    overlaps: bool,
}

/// Whether a kernel waits for the one before it before it touches memory, in its own file or in a header of its family.
fn waits(request: &Request<'_>) -> bool {
    let waits =
        |code: &str| ["begin_kernel();", "await_kernel_before();"].iter().any(|wait| code.contains(wait));
    waits(request.source.code) || request.headers().iter().any(|header| waits(header.code))
}

/// The function of `kernel` specialised by `defines` on a device.
fn ready(context: &'static Context, kernel: &'static CudaKernel, defines: &Defines) -> Result<Ready> {
    let id = quick_hash(&(context.ordinal(), std::ptr::from_ref(kernel) as usize, defines));
    if let Some(ready) = READY.read().unwrap_or_else(|e| e.into_inner()).get(&id) {
        return Ok(*ready);
    }
    let props = context.info();
    let prelude = (kernel.prelude)();
    let request = Request {
        prelude: &prelude,
        defines,
        fast_math: kernel.fast_math,
        profile: jit::profile(),
        ..Request::new(&kernel.source, jit::Arch::for_device(props.major as u8, props.minor as u8))
    };
    let compiled = jit::get(&request)?;
    let module = Module::get(context, &compiled.key.to_string(), &compiled.cubin)?;
    let ready =
        Ready { function: module.function(kernel.function)?, overlaps: props.major >= 9 && waits(&request) };
    READY.write().unwrap_or_else(|e| e.into_inner()).insert(id, ready);
    Ok(ready)
}

/// Launches the call's CUDA kernel.
///
/// # Safety
/// `params` must be what the kernel's prelude declares, and its addresses valid for the accesses the kernel makes
/// under `defines` and `config` until the work on the stream is done.
pub unsafe fn run<P, T: CType>(
    launch: &Launch<'_, P>,
    defines: &Defines,
    config: &LaunchConfig,
    params: &T,
) -> Result<()> {
    let kernel = launch.cuda.expect("a CUDA kernel's launch has its device half");
    // SAFETY: passed on.
    unsafe { run_part(launch, kernel, defines, config, params) }
}

/// Launches one of several device functions a call consists of.
///
/// # Safety
/// As [`run`].
pub unsafe fn run_part<P, T: CType>(
    launch: &Launch<'_, P>,
    kernel: &'static CudaKernel,
    defines: &Defines,
    config: &LaunchConfig,
    params: &T,
) -> Result<()> {
    // SAFETY: passed on.
    unsafe { run_on(launch.stream, kernel, defines, config, params) }
}

/// Launches a device function.
///
/// # Safety
/// As [`run`].
pub unsafe fn run_on<T: CType>(
    stream: &device::Stream,
    kernel: &'static CudaKernel,
    defines: &Defines,
    config: &LaunchConfig,
    params: &T,
) -> Result<()> {
    let device::Stream::Cuda(stream) = stream else {
        return Err(Error::parse("stream", "a CUDA stream", "the host stream"));
    };
    let stream: &Stream = stream;
    let ready = ready(stream.context(), kernel, defines)?;
    let config = LaunchConfig { pdl: config.pdl || ready.overlaps, ..*config };
    // SAFETY: passed on.
    unsafe { super::launch(ready.function, stream, &config, params) }
}
