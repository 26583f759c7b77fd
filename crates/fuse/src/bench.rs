//! How long calls take.

use crate::compiled::Compiled;
use crate::error::Result;
use std::time::{Duration, Instant};
use warpsmith::{DType, Device, Tensor};

/// Times of calls.
#[derive(Clone, Copy, Debug)]
pub struct Times {
    /// The time that half of the calls were faster than, in seconds.
    pub median: f64,
    /// That of the fastest.
    pub best: f64,
    /// Calls that were timed.
    pub calls: usize,
}

/// A tensor of normal numbers; of whole numbers from 0 on, below `bound`.
///
/// # Errors
/// If there is no memory for it.
pub fn sample(dtype: DType, shape: &[usize], bound: usize, seed: u64) -> Result<Tensor> {
    let count: usize = shape.iter().product();
    let number = |i: usize| (i.wrapping_mul(7919).wrapping_add(seed as usize)) % bound.max(1);
    Ok(match dtype {
        DType::I64 => {
            let all: Vec<i64> = (0..count).map(|i| number(i) as i64).collect();
            Tensor::from_slice(&all, shape, Device::Cpu)?
        }
        DType::I32 => {
            let all: Vec<i32> = (0..count).map(|i| number(i) as i32).collect();
            Tensor::from_slice(&all, shape, Device::Cpu)?
        }
        DType::Bool => {
            let all: Vec<u8> = (0..count).map(|i| (number(i) % 2) as u8).collect();
            Tensor::from_bytes(&all, shape, dtype, Device::Cpu)?
        }
        _ => Tensor::randn(shape, dtype, Device::Cpu, seed)?,
    })
}

/// Times calls with these inputs for so long, after some that are not timed. The outputs are the same memory each time.
///
/// # Errors
/// If a call fails.
pub fn time(compiled: &Compiled, inputs: &[&Tensor], budget: Duration) -> Result<Times> {
    let mut outputs = compiled.run(inputs)?;
    let start = Instant::now();
    let mut times: Vec<f64> = vec![];
    let mut warm = 0;
    while times.len() < 5 || start.elapsed() < budget {
        let begin = Instant::now();
        compiled.run_into(inputs, &mut outputs)?;
        if warm < 3 {
            warm += 1;
        } else {
            times.push(begin.elapsed().as_secs_f64());
        }
    }
    times.sort_by(f64::total_cmp);
    Ok(Times { median: times[times.len() / 2], best: times[0], calls: times.len() })
}
