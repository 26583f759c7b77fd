//! Host time of a call: its cost to the program, however little work it does.

use crate::device::{Device, Stream};
use crate::error::Result;
use crate::ops::{Linear, PagedAttention, RmsNorm};
use crate::tensor::{DType, Tensor};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::time::Instant;

/// Calls between two waits for the device: few enough that its queue does not fill.
const BATCH: usize = 100;
/// Batches that are timed, after a few that are not.
const BATCHES: usize = 60;
const WARM_UP: usize = 5;

/// Host time of one repeated call without a graph, into existing memory.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct HostTime {
    /// The op.
    pub op: String,
    /// Its tensors.
    pub case: String,
    /// Median microseconds.
    pub us: f64,
    /// Of the fastest batch.
    pub best_us: f64,
    /// Microseconds of other libraries in the same run.
    #[serde(default)]
    pub peers: BTreeMap<String, f64>,
}

/// The host times of calls that models repeat most, on tensors so small that the device is never behind.
pub fn host_times(device: Device) -> Result<Vec<HostTime>> {
    let stream = Stream::new(device)?;
    let random = |shape: &[usize], seed| Tensor::randn(shape, DType::BF16, device, seed);
    let mut times = Vec::new();
    #[cfg(feature = "cuda")]
    if let Stream::Cuda(raw) = &stream {
        for (case, overlaps) in [("one kernel", false), ("one kernel, overlapping", true)] {
            let launch = super::products::empty_launch(raw.context(), overlaps)?;
            times.push(time("driver launch", case, &stream, || launch(raw))?);
        }
    }
    let (x, weight) = (random(&[4, 64], 0)?, random(&[64], 1)?);
    let mut out = Tensor::empty_on(&[4, 64], DType::BF16, &stream)?;
    times.push(time("rms_norm", "num_tokens=4 hidden=64 +weight bf16", &stream, || {
        RmsNorm::new(&x).weight(&weight).run_into(&mut out, &stream)
    })?);

    let (w, bias) = (random(&[64, 64], 2)?, random(&[64], 3)?);
    times.push(time("linear", "m=4 n=64 k=64 +bias bf16", &stream, || {
        Linear::new(&x, &w).bias(&bias).run_into(&mut out, &stream)
    })?);

    let (heads, kv_heads, dim, page, pages) = (32, 8, 128, 16, 16);
    let q = random(&[1, heads, dim], 4)?;
    let [k, v] = [random(&[pages, page, kv_heads, dim], 5)?, random(&[pages, page, kv_heads, dim], 6)?];
    let table: Vec<i32> = (0..pages as i32).collect();
    let table = Tensor::from_slice(&table, &[1, pages], device)?;
    let lens = Tensor::from_slice(&[(page * pages) as i32], &[1], device)?;
    let mut attended = Tensor::empty_on(&[1, heads, dim], DType::BF16, &stream)?;
    let case = "requests=1 q_len=1 kv_len=256 num_heads=32 num_kv_heads=8 head_dim=128 page_size=16 bf16";
    times.push(time("paged_attention", case, &stream, || {
        PagedAttention::new(&q, &k, &v, &table, &lens).run_into(&mut attended, &stream)
    })?);
    Ok(times)
}

fn time(op: &str, case: &str, stream: &Stream, mut call: impl FnMut() -> Result<()>) -> Result<HostTime> {
    let mut samples = Vec::with_capacity(BATCHES);
    for batch in 0..WARM_UP + BATCHES {
        let start = Instant::now();
        for _ in 0..BATCH {
            call()?;
        }
        let us = start.elapsed().as_secs_f64() * 1e6 / BATCH as f64;
        // Not part of the time: the host only gives work.
        stream.synchronize()?;
        if batch >= WARM_UP {
            samples.push(us);
        }
    }
    samples.sort_by(f64::total_cmp);
    Ok(HostTime {
        op: op.into(),
        case: case.into(),
        us: samples[samples.len() / 2],
        best_us: samples[0],
        peers: BTreeMap::new(),
    })
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;

    #[test]
    fn every_call_is_timed() {
        let times = host_times(Device::Cpu).unwrap();
        assert_eq!(times.len(), 3);
        assert!(times.iter().all(|t| t.best_us > 0.0 && t.best_us <= t.us), "{times:?}");
    }
}
