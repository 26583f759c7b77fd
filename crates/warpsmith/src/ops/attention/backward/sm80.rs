//! `attention_backward` on the tensor cores of sm_80 and later: host half.

use super::super::cuda::{Scores, addressable, with_dropout};
use super::super::problem::HEAD_DIMS;
use super::Problem;
use super::cuda::{
    AttentionBackwardParams, BIAS_DEVICE, ROWS, SINKS_DEVICE, Tiles, all_vectors, finish, prepare, record,
    stats_bytes,
};
use crate::cuda::LaunchConfig;
use crate::jit::{Arch, CudaKernel, Defines, Source};
use crate::op::{Kernel, Launch};
use crate::tensor::DType;

/// Lines of a block, keys or queries, as in the device code.
const LEFT: usize = 64;
const THREADS: u32 = 128;

/// What goes past the lines of a block, for heads of one size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shape {
    /// Lines that go past at a time, and how many times as many are in shared memory.
    lines: usize,
    stages: usize,
    /// Blocks that share the columns of the gradients of some keys.
    parts: usize,
}

impl Shape {
    /// As many lines as leave room for the sums in registers, and for the tiles in the 99 KiB of the smallest devices.
    fn of(head_dim: usize, scores: &Scores) -> Shape {
        let (lines, stages) = match head_dim {
            ..=64 => (64, 2),
            65..=160 => (32, 2),
            161..=192 => (32, 1),
            _ => (16, 1),
        };
        // With a softcap and a bias, the scores of heads of 128 need registers that the sums of both gradients have.
        let crowded = head_dim > 96 && scores.softcap && scores.bias.is_some();
        Shape { lines, stages, parts: if head_dim > 128 || crowded { 2 } else { 1 } }
    }

    /// Bytes of shared memory: two operands of the lines of a block, two of what goes past, in lines of a head and 16 bytes more,
    /// and two f32 for each query that goes past.
    fn shared(&self, head_dim: usize) -> usize {
        2 * (LEFT + self.stages * self.lines) * (head_dim * 2 + 16) + self.stages * self.lines * 8
    }

    fn defines(&self, scores: &Scores, dtype: DType, head_dim: usize) -> Defines {
        let mut defines = scores.defines(dtype, head_dim);
        defines.push(("LINES", self.lines.to_string()));
        defines.push(("STAGES", self.stages.to_string()));
        defines
    }

    fn keys_defines(&self, scores: &Scores, dtype: DType, head_dim: usize) -> Defines {
        let mut defines = self.defines(scores, dtype, head_dim);
        defines.push(("PARTS", self.parts.to_string()));
        defines
    }
}

/// A few calls that together have each value of each define.
fn covering() -> impl Iterator<Item = (Shape, Scores, DType, usize)> {
    [DType::F16, DType::BF16].into_iter().flat_map(|dtype| {
        let plain =
            HEAD_DIMS.map(|head_dim| (Shape::of(head_dim, &Scores::PLAIN), Scores::PLAIN, dtype, head_dim));
        let others = Scores::covering(dtype).map(|scores| (Shape::of(128, &scores), scores, dtype, 128));
        plain.into_iter().chain(others.into_iter().skip(1))
    })
}

/// The defines of those calls, and of plain ones and one with options with dropout.
fn with_and_without_dropout(defines: impl Fn(&Shape, &Scores, DType, usize) -> Defines) -> Vec<Defines> {
    let of = |(shape, scores, dtype, head_dim)| defines(&shape, &scores, dtype, head_dim);
    let dropped = covering().filter(|(_, scores, ..)| !scores.softcap || scores.mask);
    let dropped = dropped.map(|call| with_dropout(of(call), true));
    covering().map(of).chain(dropped).collect()
}

static KEYS_DEVICE: CudaKernel = CudaKernel {
    source: Source { name: "attention_backward_sm80_keys", code: include_str!("sm80_keys.cu") },
    prelude: AttentionBackwardParams::prelude,
    function: "attention_backward_sm80_keys",
    min_arch: Arch::new(8, 0, false),
    fast_math: false,
    overlaps: true,
    variants: || {
        with_and_without_dropout(|shape, scores, dtype, head_dim| shape.keys_defines(scores, dtype, head_dim))
    },
};

static QUERIES_DEVICE: CudaKernel = CudaKernel {
    source: Source { name: "attention_backward_sm80_queries", code: include_str!("sm80_queries.cu") },
    prelude: AttentionBackwardParams::prelude,
    function: "attention_backward_sm80_queries",
    min_arch: Arch::new(8, 0, false),
    fast_math: false,
    overlaps: true,
    variants: || {
        with_and_without_dropout(|shape, scores, dtype, head_dim| shape.defines(scores, dtype, head_dim))
    },
};

/// Tensor cores through `mma.sync`.
pub(super) const SM80: Kernel<Problem> =
    Kernel::cuda("attention_backward_sm80", &KEYS_DEVICE, |launch: &Launch<'_, Problem>| {
        let f = &launch.problem.forward;
        let scores = Scores::of(f);
        let shape = Shape::of(f.head_dim, &scores);
        let keys = Tiles::of_keys(f, LEFT)?;
        let queries = Tiles::of_queries(f, LEFT)?;
        let shared = shape.shared(f.head_dim) as u32;
        let config = |blocks: u32| LaunchConfig::new([blocks, 1, 1], [THREADS, 1, 1], shared);
        let [keys_defines, queries_defines] =
            [shape.keys_defines(&scores, f.dtype, f.head_dim), shape.defines(&scores, f.dtype, f.head_dim)]
                .map(|defines| with_dropout(defines, f.dropout.is_some()));
        let keys_config = config(keys.times(shape.parts)?);
        // SAFETY: the addresses are those of the checked tensors and of the workspace, which has the size that was asked for;
        // the blocks cover every key and every query.
        unsafe {
            prepare(launch)?;
            record(launch, &KEYS_DEVICE, &keys_defines, &keys_config, keys.of_request)?;
            record(launch, &QUERIES_DEVICE, &queries_defines, &config(queries.blocks), queries.of_request)?;
            finish(launch)
        }
    })
    .and(&ROWS)
    .and(&QUERIES_DEVICE)
    .and(&SINKS_DEVICE)
    .and(&BIAS_DEVICE)
    .with_workspace(|p, _| stats_bytes(p))
    .when(|p, info| {
        let f = &p.forward;
        if f.dtype == DType::F32 {
            return Err("its products are those of f16 and bf16".into());
        }
        let shared = Shape::of(f.head_dim, &Scores::of(f)).shared(f.head_dim);
        if shared > info.shared_per_block {
            let has = info.shared_per_block;
            return Err(format!("needs {shared} bytes of shared memory, the device has {has}"));
        }
        all_vectors(p)?;
        addressable(f)
    })
    .configured(|p, _| format!("{LEFT} by {} lines", Shape::of(p.forward.head_dim, &Scores::PLAIN).lines));

#[cfg(feature = "tests")]
mod tests {
    use super::*;

    #[test]
    fn tiles_fit_the_smallest_devices() {
        for head_dim in HEAD_DIMS {
            let shape = Shape::of(head_dim, &Scores::PLAIN);
            assert!(shape.shared(head_dim) <= 99 << 10, "{head_dim}: {}", shape.shared(head_dim));
            assert!((head_dim / shape.parts).is_multiple_of(16), "pairs of columns of 8");
        }
    }
}
