//! An op that is defined here and registered with the library: checked against its reference, and called.
//!
//! `cargo run --release` in this folder.

mod proof;
pub mod relu_squared;

use relu_squared::{ReluSquared, relu_squared};
use warpsmith::lab::proof::{Prepared, kernels_on};
use warpsmith::{Device, Result, Tensor, lab, ops};

pub fn main() -> Result<()> {
    ops::register_provable(&ReluSquared)?;
    let device = Device::best();
    check(device)?;
    let x = Tensor::from_slice(&[-1.0f32, 0.5, 3.0], &[3], device)?;
    println!("relu_squared of [-1, 0.5, 3]: {:?}", relu_squared(&x)?.to_vec::<f32>()?);
    Ok(())
}

/// Runs every kernel of the device on every case, as the library's own ops are checked.
pub fn check(device: Device) -> Result<()> {
    let op = lab::find("relu_squared").expect("it is registered");
    let kernels = kernels_on(op, device);
    let stream = device.default_stream()?;
    for (seed, case) in (0..).zip(op.cases()) {
        let mut prepared = Prepared::new(op, &case, device, seed)?;
        for kernel in &kernels {
            let outcome = prepared.judge(kernel, &stream)?.expect("its kernels run every case");
            assert!(outcome.ok, "{} on {}: {:?}", kernel.name, case.name(op.spec()), outcome.failure);
        }
    }
    println!("{} kernels pass {} cases on {device}", kernels.len(), op.cases().len());
    Ok(())
}
