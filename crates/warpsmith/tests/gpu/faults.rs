//! What a fault on the device leaves behind.

use crate::common::gpu;
use warpsmith::ops::Activation;
use warpsmith::tensor::{Layout, Shape};
use warpsmith::{DType, Device, Error, Tensor, TensorView};

crate::harness::tests! {
    a_fault_poisons_the_device_and_says_so;
    faults_on_purpose (alone: "loses the context: run by the test above in a process of its own");
}

/// A fault takes the whole context with it, so it happens in a process of its own: the test below.
fn a_fault_poisons_the_device_and_says_so() {
    let Some(_gpu) = gpu() else { return };
    let child = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "faults::faults_on_purpose"])
        .env_remove(warpsmith::env::RECORD)
        .output()
        .unwrap();
    let told = String::from_utf8_lossy(&child.stderr);
    assert!(child.status.success(), "{told}");
    assert!(told.contains("seen: ") && told.contains("illegal"), "{told}");
}

fn faults_on_purpose() {
    let Some(gpu) = gpu() else { return };
    let device = Device::Cuda(0);
    let good = Tensor::randn(&[4, 256], DType::F32, device, 0).unwrap();
    let layout = Layout::contiguous(Shape::new(&[4, 256]).unwrap());
    // SAFETY: there is no memory at this address, which is the point: the device faults, the host never reads it.
    let nowhere = unsafe { TensorView::from_raw(0x100, DType::F32, layout, device) };
    let fault = Activation::relu(nowhere).run().and_then(|_| gpu.ctx.synchronize());
    let Err(Error::Poisoned { cause, .. }) = &fault else {
        panic!("expected a poisoned device, got {fault:?}")
    };
    eprintln!("seen: {cause}");
    // Every later call is told the first cause instead of a consequence of it.
    let later = Activation::relu(&good).run().map(drop);
    assert!(matches!(&later, Err(Error::Poisoned { cause: again, .. }) if again == cause), "{later:?}");
    let memory = Tensor::randn(&[4], DType::F32, device, 0).map(drop);
    assert!(matches!(memory, Err(Error::Poisoned { .. })), "{memory:?}");
}
