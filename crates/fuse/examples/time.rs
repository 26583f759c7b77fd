//! Times a formula: `time 'x * sigmoid(x)' x=f32:1024,4096 ...`.

use std::time::Duration;
use warpsmith::{DType, Tensor};
use warpsmith_fuse::bench::{sample, time};
use warpsmith_fuse::{Compiled, Dim, parse};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let formula = arguments.next().ok_or("a formula is missing")?;
    let mut inputs: Vec<(String, DType, Vec<Dim>)> = vec![];
    for text in arguments {
        let (name, rest) = text.split_once('=').ok_or("inputs are NAME=TYPE:SIZES")?;
        let (dtype, sizes) = rest.split_once(':').ok_or("inputs are NAME=TYPE:SIZES")?;
        let sizes: Result<Vec<Dim>, _> =
            sizes.split(',').filter(|size| !size.is_empty()).map(str::parse).collect();
        inputs.push((name.into(), dtype.parse()?, sizes?));
    }
    let listed: Vec<(&str, DType, &[Dim])> =
        inputs.iter().map(|(name, dtype, shape)| (name.as_str(), *dtype, &shape[..])).collect();
    let compiled = Compiled::new(parse(&formula, &listed)?)?;
    let mut tensors = vec![];
    for (seed, (_, dtype, shape)) in inputs.iter().enumerate() {
        let sizes: Result<Vec<usize>, String> = shape
            .iter()
            .map(|dim| match dim {
                Dim::Fixed(size) => Ok(*size),
                Dim::Named(name) => Err(format!("{name} has no size")),
            })
            .collect();
        tensors.push(sample(*dtype, &sizes?, 16, seed as u64)?);
    }
    let tensors: Vec<&Tensor> = tensors.iter().collect();
    let times = time(&compiled, &tensors, Duration::from_millis(400))?;
    println!("{:.2} us (best {:.2} us)", times.median * 1e6, times.best * 1e6);
    Ok(())
}
