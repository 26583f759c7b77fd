//! Sums over the rows of each group on CUDA devices: gradients of grouped matrices, which are products along those rows, and of biases.
//! The gradients of `grouped_linear` and of `moe_ffn` share them.

use super::super::cuda::{SM80_TILE_N, THREADS, sm80_shared_bytes};
use crate::cuda::LaunchConfig;
use crate::cuda::rows::{element, flag, grid_blocks};
use crate::device::DeviceInfo;
use crate::error::Result;
use crate::jit::{Arch, CudaKernel, Defines, Source};
use crate::kernel_params;
use crate::op::Launch;
use crate::ops::FLOATS;
use crate::ops::grouped::Matrices;
use crate::ops::linear::problem::Matrix;
use crate::tensor::DType;

kernel_params! {
    struct GroupedWeightsParams {
        a: u64, b: u64, out: u64, counts: u64, order: u64,
        a_row: i64, a_col: i64, b_row: i64, b_col: i64,
        out_group: i64, out_row: i64, out_col: i64, counts_step: i64,
        rows: i32, groups: i32, m: i32, n: i32, gathers_a: i32, gathers_b: i32,
    }
}

kernel_params! {
    struct GroupedSumsParams {
        from: u64, weights: u64, order: u64, counts: u64, out: u64,
        row: i64, col: i64, out_group: i64, out_step: i64, counts_step: i64,
        rows: i32, groups: i32, n: i32,
    }
}

/// One of two sets of rows.
#[derive(Clone, Copy)]
pub(in crate::ops) struct Rows {
    pub matrix: Matrix,
    /// Elements of a row.
    pub count: usize,
    /// Whether the order says which row each is.
    pub gathered: bool,
    /// Whether rows consist of whole aligned pieces of 16 bytes.
    pub pieces: bool,
}

/// `out[g]` = the sum over the rows `r` of group `g` of `a[r]ᵀ · b[r]`.
#[derive(Clone, Copy)]
pub(in crate::ops) struct Weights {
    pub dtype: DType,
    pub rows: usize,
    pub groups: usize,
    pub counts_step: isize,
    pub a: Rows,
    pub b: Rows,
    pub out: Matrices,
    pub out_pieces: bool,
}

/// Where its tensors are.
#[derive(Clone, Copy)]
pub(in crate::ops) struct Operands {
    pub a: usize,
    pub b: usize,
    pub counts: usize,
    /// The rows of `a` or `b`, if they are gathered: valid ones, in 32 bits.
    pub order: usize,
    pub out: usize,
}

impl Weights {
    fn params(&self, at: &Operands) -> GroupedWeightsParams {
        GroupedWeightsParams {
            a: at.a as u64,
            b: at.b as u64,
            out: at.out as u64,
            counts: at.counts as u64,
            order: at.order as u64,
            a_row: self.a.matrix.row as i64,
            a_col: self.a.matrix.col as i64,
            b_row: self.b.matrix.row as i64,
            b_col: self.b.matrix.col as i64,
            out_group: self.out.group as i64,
            out_row: self.out.row as i64,
            out_col: self.out.col as i64,
            counts_step: self.counts_step as i64,
            rows: self.rows as i32,
            groups: self.groups as i32,
            m: self.a.count as i32,
            n: self.b.count as i32,
            gathers_a: self.a.gathered as i32,
            gathers_b: self.b.gathered as i32,
        }
    }

    /// The launch of a block for each tile of `m` x `n` of each group.
    fn config(&self, name: &str, [m, n]: [usize; 2], shared: usize) -> Result<LaunchConfig> {
        let tiles = self.groups * self.a.count.div_ceil(m) * self.b.count.div_ceil(n);
        Ok(LaunchConfig::new([grid_blocks(name, tiles)?, 1, 1], [THREADS, 1, 1], shared as u32))
    }
}

/// Rows, groups and columns are counted in 32 bits, with headroom for sums of two and for a tile past the end.
pub(in crate::ops) fn addressable(sizes: [usize; 4]) -> std::result::Result<(), String> {
    match sizes.into_iter().find(|&size| size >= 1 << 30) {
        Some(size) => Err(format!("a size of {size} is not below 2^30")),
        None => Ok(()),
    }
}

/// Where they run: for GPUs after Hopper the compiler keeps arrays of theirs in local memory.
pub(super) const PROVEN: Arch = Arch::new(9, 0, true);

pub(in crate::ops) static GENERIC_DEVICE: CudaKernel = CudaKernel {
    source: Source { name: "grouped_weights_generic", code: include_str!("weights_generic.cu") },
    prelude: GroupedWeightsParams::prelude,
    function: "grouped_weights_generic",
    min_arch: PROVEN,
    fast_math: false,
    overlaps: true,
    variants: || {
        FLOATS.iter().flat_map(|&dtype| [64, 128].map(|tile| generic_defines(dtype, tile))).collect()
    },
};

fn generic_defines(dtype: DType, tile: usize) -> Defines {
    vec![element(dtype), ("TILE", tile.to_string())]
}

/// Launches the kernel without tensor cores.
///
/// # Safety
/// `at` must hold the tensors of `p`, until the work on the stream is done.
pub(in crate::ops) unsafe fn run_generic<P>(
    launch: &Launch<'_, P>,
    p: &Weights,
    at: &Operands,
) -> Result<()> {
    let tile = if p.a.count.min(p.b.count) > 64 { 128 } else { 64 };
    let config = p.config(GENERIC_DEVICE.function, [tile; 2], 0)?;
    // SAFETY: the caller vouches for the tensors; counts that are beyond them are cut.
    unsafe { launch.record_part(&GENERIC_DEVICE, &generic_defines(p.dtype, tile), &config, &p.params(at)) }
}

pub(in crate::ops) static SM80_DEVICE: CudaKernel = CudaKernel {
    source: Source { name: "grouped_weights_sm80", code: include_str!("weights_sm80.cu") },
    prelude: GroupedWeightsParams::prelude,
    function: "grouped_weights_sm80",
    min_arch: PROVEN,
    fast_math: false,
    overlaps: true,
    variants: || {
        let of = |dtype| {
            [64, 128]
                .into_iter()
                .flat_map(move |tile| [false, true].map(|pairs| sm80_defines(dtype, tile, pairs)))
        };
        [DType::F16, DType::BF16].into_iter().flat_map(of).collect()
    },
};

fn sm80_defines(dtype: DType, tile: usize, pairs: bool) -> Defines {
    let x = ("X_T", dtype.name().into());
    vec![element(dtype), x, ("TILE_M", tile.to_string()), flag("OUT_PAIRS", pairs)]
}

pub(in crate::ops) fn sm80_supports(p: &Weights, _: &DeviceInfo) -> std::result::Result<(), String> {
    if p.dtype.size() != 2 {
        return Err("f32 in full precision would have to be split".into());
    }
    if !p.a.pieces || !p.b.pieces {
        return Err(
            "rows that gradients of matrices are made of are no whole aligned pieces of 16 bytes".into()
        );
    }
    Ok(())
}

/// Launches the kernel for tensor cores.
///
/// # Safety
/// As for [`run_generic`].
pub(in crate::ops) unsafe fn run_sm80<P>(launch: &Launch<'_, P>, p: &Weights, at: &Operands) -> Result<()> {
    let tile = if p.a.count > 64 { 128 } else { 64 };
    let config = p.config(SM80_DEVICE.function, [tile, SM80_TILE_N], sm80_shared_bytes(tile))?;
    let defines = sm80_defines(p.dtype, tile, p.out_pieces);
    // SAFETY: as above.
    unsafe { launch.record_part(&SM80_DEVICE, &defines, &config, &p.params(at)) }
}

pub(in crate::ops) static SUMS: CudaKernel = CudaKernel {
    source: Source { name: "grouped_sums", code: include_str!("sums.cu") },
    prelude: GroupedSumsParams::prelude,
    function: "grouped_sums",
    min_arch: PROVEN,
    fast_math: false,
    overlaps: true,
    variants: || {
        let of = |dtype| [dtype, DType::F32].map(|rows| sums_defines(rows, dtype));
        let mut all: Vec<Defines> = FLOATS.into_iter().flat_map(of).collect();
        all.dedup();
        all
    },
};

fn sums_defines(rows: DType, out: DType) -> Defines {
    vec![element(out), ("ROW_T", rows.name().into())]
}

/// `out[g, j]` = the sum over the rows `r` of group `g` of `weights[r] * rows[r, j]`, in f32 and in their order.
pub(in crate::ops) struct Sums {
    /// Of the rows.
    pub dtype: DType,
    pub out_dtype: DType,
    pub rows: usize,
    pub groups: usize,
    pub n: usize,
    pub counts_step: isize,
    pub matrix: Matrix,
    /// From group to group and along a row of the result.
    pub strides: [isize; 2],
}

/// Where its tensors are; weights and order are zero if absent.
pub(in crate::ops) struct SumOperands {
    pub from: usize,
    /// In f32.
    pub weights: usize,
    /// Which row each is: valid ones, in 32 bits.
    pub order: usize,
    pub counts: usize,
    pub out: usize,
}

impl Sums {
    /// Launches the sums.
    ///
    /// # Safety
    /// `at` must hold the tensors, until the work on the stream is done.
    pub unsafe fn run<P>(&self, launch: &Launch<'_, P>, at: &SumOperands) -> Result<()> {
        const COLUMNS: usize = 128;
        let params = GroupedSumsParams {
            from: at.from as u64,
            weights: at.weights as u64,
            order: at.order as u64,
            counts: at.counts as u64,
            out: at.out as u64,
            row: self.matrix.row as i64,
            col: self.matrix.col as i64,
            out_group: self.strides[0] as i64,
            out_step: self.strides[1] as i64,
            counts_step: self.counts_step as i64,
            rows: self.rows as i32,
            groups: self.groups as i32,
            n: self.n as i32,
        };
        let blocks = grid_blocks(SUMS.function, self.groups * self.n.div_ceil(COLUMNS))?;
        let config = LaunchConfig::new([blocks, 1, 1], [COLUMNS as u32, 1, 1], 0);
        // SAFETY: the caller vouches for the tensors; counts that are beyond them are cut.
        unsafe { launch.record_part(&SUMS, &sums_defines(self.dtype, self.out_dtype), &config, &params) }
    }
}
