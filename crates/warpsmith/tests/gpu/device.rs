//! What a device says of itself, how fast it copies, and modules it refuses.

use crate::common::gpu;
use warpsmith::Error;
use warpsmith::cuda::{self, Context, Module};

crate::harness::tests! {
    the_device_describes_itself;
    copy_speed_is_that_of_memory;
    a_bad_module_is_an_error_and_harms_nothing;
}

fn the_device_describes_itself() {
    let Some(gpu) = gpu() else { return };
    let info = gpu.ctx.info();
    assert!(!info.name.is_empty());
    assert!(info.uuid.starts_with("GPU-") && info.uuid.len() == 40, "{}", info.uuid);
    assert!(info.arch() >= 50 && info.sm_count > 0 && info.bus_width > 0 && info.l2_bytes > 0, "{info:?}");
    assert!(info.max_threads_per_block >= 1024 && info.shared_per_block_optin >= info.shared_per_block);
    assert_eq!(info.cluster_launch, info.major >= 9);
    assert!(info.driver_version >= 12000);
    assert!(std::ptr::eq(gpu.ctx, Context::get(0).unwrap()));
}

fn copy_speed_is_that_of_memory() {
    let Some(gpu) = gpu() else { return };
    let info = gpu.ctx.info();
    let speed = cuda::measure_copy(gpu.ctx, 8 * info.l2_bytes as usize).unwrap();
    // Two transfers per clock, over the width of the bus.
    let peak = 2.0 * f64::from(info.memory_clock_khz) * 1e3 * f64::from(info.bus_width) / 8.0 / 1e9;
    eprintln!("copies at {speed:.0} of {peak:.0} GB/s");
    assert!(speed > 0.2 * peak && speed < 1.1 * peak, "{speed} of {peak} GB/s");
}

fn a_bad_module_is_an_error_and_harms_nothing() {
    let Some(gpu) = gpu() else { return };
    let text = Module::get(gpu.ctx, "text", b"not a cubin");
    assert!(matches!(text, Err(Error::Parse { .. })), "{text:?}");
    // A whole ELF file, but without any code: for the driver to refuse.
    let mut empty = [0u8; 64];
    empty[..7].copy_from_slice(b"\x7fELF\x02\x01\x01");
    let empty = Module::get(gpu.ctx, "empty", &empty);
    assert!(matches!(empty, Err(Error::Cuda { call: "cuModuleLoadData", .. })), "{empty:?}");
    assert!(Module::loaded(gpu.ctx, "empty").is_none());
    gpu.ctx.synchronize().unwrap();
}
