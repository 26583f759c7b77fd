//! The gradients of both norms on CUDA devices: host half.

use super::super::cuda::{addressable, device, fits, long_tiling, long_tilings};
use super::{DBIAS, DOUT, DSUM, DWEIGHT, DX, Problem, WEIGHT, X};
use crate::cuda::rows::{DENSE, RowKind, RowTable, RowTiling, Rows, SPREAD, SPREAD_ANY, element, flag};
use crate::device::DeviceInfo;
use crate::error::Result;
use crate::jit::{Arch, CudaKernel, Defines, Source};
use crate::kernel_params;
use crate::op::{Kernel, Launch};
use crate::ops::{FLOATS, column_sum};
use crate::tensor::DType;

const SOURCE: Source = Source { name: "norm_backward", code: include_str!("../backward.cu") };

/// x, dout, weight and two sums in f32, so fewer elements a thread; as many for each type.
const fn table(dtype: DType) -> RowTable {
    match dtype.size() {
        4 => &[(16, 1), (32, 1), (32, 2), (64, 2), (128, 2), (256, 2), (512, 2), (512, 4)],
        _ => &[(16, 1), (32, 1), (32, 2), (64, 2), (128, 2), (256, 2), (512, 2)],
    }
}

/// Rows that the blocks of a cluster share. For lengths that are in the table above too, threads and chunks are the
/// same, so that both kernels give the same bits. A warp has as much to do for a row whether its lanes have one chunk
/// or three, so steps are small enough for lanes to have most of theirs.
const fn split_table(dtype: DType) -> RowTable {
    match dtype.size() {
        4 => &[(512, 2), (512, 4), (512, 6), (1024, 4), (1024, 6), (2048, 4)],
        _ => &[(512, 2), (512, 3), (1024, 2), (1024, 3), (2048, 2)],
    }
}

/// Threads of one row that each block of a cluster has, at most.
const SPLIT_LANES: usize = 256;

/// Threads of one row that each block of a cluster has: of those with many chunks, fewer find registers.
const fn split_lanes(items: usize) -> usize {
    if items.is_multiple_of(3) { SPLIT_LANES / 2 } else { SPLIT_LANES }
}

kernel_params! {
    struct NormBackwardParams {
        x: u64, weight: u64, dout: u64, dsum: u64, dx: u64, partial: u64,
        num_rows: i64, num_groups: i64, hidden: i32, eps: f32,
        x_step: i64, dout_step: i64, dx_step: i64, dsum_step: i64, weight_step: i64,
        rows: Rows,
    }
}

/// Of the tensors with rows.
fn row_kind(p: &Problem) -> RowKind {
    RowKind::new(&p.steps[..4], p.vector_rows)
}

/// Whether the weight is gathered, because rows are dense and it is not.
fn is_apart(p: &Problem) -> bool {
    match row_kind(p) {
        RowKind::Aligned => !p.vector_weight,
        RowKind::Dense => p.steps[4] != 1,
        RowKind::Any => false,
    }
}

/// Whether the kernel has registers for rows of this kind: those that begin anywhere take more.
fn has_room(tiling: &RowTiling, vector: u8, center: bool) -> bool {
    !is_unaligned(vector) || !center || tiling.lanes < 512
}

/// Whether the blocks of a cluster can share a row.
fn has_clusters(info: &DeviceInfo) -> bool {
    info.arch.is_some_and(|arch| arch.major >= 9)
}

/// How far ahead of its use a row is fetched, in rows and the one in use; zero where rows cannot be staged. The fewer
/// chunks a thread has, the more rows it takes to keep memory busy.
fn stages(tiling: &RowTiling, vector: u8, info: &DeviceInfo) -> usize {
    let wanted = if tiling.items == 1 { 5 } else { 3 };
    stages_of(tiling, vector, wanted, info)
}

/// The same for aligned rows of a block: with two rows in flight and one in use, reads and writes interfere. Only the
/// longest rows of 16-bit types, whose means take a block long, gain from it.
fn row_stages(p: &Problem, tiling: &RowTiling, vector: u8, info: &DeviceInfo) -> usize {
    let waits_long = p.center && p.dtype.size() == 2 && tiling.lanes == 512;
    match is_unaligned(vector) || tiling.items == 1 || waits_long {
        true => stages(tiling, vector, info),
        false => stages_of(tiling, vector, 2, info),
    }
}

/// As many as wanted, if they fit.
fn stages_of(tiling: &RowTiling, vector: u8, wanted: usize, info: &DeviceInfo) -> usize {
    let asynchronous = info.arch.is_some_and(|arch| arch.major >= 8) && [1, 2].contains(&vector);
    let room = (info.shared_per_block / blocks_at_once(tiling)).saturating_sub(RESERVED);
    let fitting = (room / stage_bytes(tiling, vector)).min(wanted);
    if (asynchronous || is_unaligned(vector)) && fitting >= 2 { fitting } else { 0 }
}

/// Shared memory for the x and dout of the rows of a block. Rows that begin anywhere have two vectors more: see
/// `shared_row.cuh`.
fn stage_bytes(tiling: &RowTiling, vector: u8) -> usize {
    2 * tiling.items * tiling.rows * (tiling.lanes + 2 * is_unaligned(vector) as usize) * 16
}

/// Dense rows that begin anywhere, which are always staged.
fn is_unaligned(vector: u8) -> bool {
    [DENSE, SPREAD].contains(&vector)
}

/// Shared memory of a block that the rest of the kernel needs.
const RESERVED: usize = 1024;

/// How the kernels divide rows, and how they move them.
#[derive(Clone, Copy)]
struct Tiling {
    /// Of one block.
    block: RowTiling,
    /// Blocks of a cluster that share a row, or one.
    split: usize,
    vector: u8,
    stages: usize,
    /// Whether the weight is gathered.
    apart: bool,
}

impl Tiling {
    fn alone(block: RowTiling, vector: u8, stages: usize) -> Self {
        Tiling { block, split: 1, vector, stages, apart: false }
    }

    fn of_call(self, p: &Problem) -> Self {
        Tiling { apart: is_apart(p), ..self }
    }

    fn defines(&self, dtype: DType, center: bool, sums: bool) -> Defines {
        let mut defines = self.block.defines();
        defines.extend([
            element(dtype),
            ("SPLIT", self.split.to_string()),
            ("VECTOR", self.vector.to_string()),
            ("STAGES", self.stages.to_string()),
            flag("CENTER", center),
            flag("SUMS", sums),
            flag("APART", self.apart),
        ]);
        defines
    }

    /// Groups of threads that the rows are divided among: as many as run at once, so that each leaves one partial sum.
    fn groups(&self, num_rows: usize, info: &DeviceInfo) -> usize {
        // Clusters live within a group of multiprocessors, of which there are 16 or a few more.
        let units = if self.split == 1 { info.units } else { (info.units / 16 * 16).max(1) };
        let at_once = units * (threads_at_once(&self.block) / self.block.lanes).max(1) / self.split;
        at_once.max(1).min(num_rows)
    }

    /// Shared memory of a block: stages, and so much that no more blocks share a multiprocessor than the number of
    /// groups counts on. A multiprocessor with more than its share would make the others wait.
    fn shared_bytes(&self, groups: usize, info: &DeviceInfo) -> usize {
        let staged = self.stages * stage_bytes(&self.block, self.vector);
        let blocks = blocks_at_once(&self.block);
        if staged == 0 || !has_clusters(info) || groups * self.split <= info.units {
            return staged;
        }
        let crowding = (info.shared_per_block + RESERVED) / (blocks + 1) - RESERVED + 128;
        staged.max(crowding.next_multiple_of(128))
    }
}

/// Of a multiprocessor. The most threads that have registers for a row's elements and sums: `kThreadsAtOnce` in the
/// device code.
fn threads_at_once(block: &RowTiling) -> usize {
    if block.items.is_multiple_of(3) { 384 } else { 512 }
}

/// Blocks of a multiprocessor.
fn blocks_at_once(block: &RowTiling) -> usize {
    (threads_at_once(block) / block.threads() as usize).max(1)
}

/// Without and with sums over rows, and with sums for a weight that is gathered.
fn variants(tiling: Tiling, dtype: DType, center: bool) -> Vec<Defines> {
    let mut all: Vec<_> = [false, true].map(|sums| tiling.defines(dtype, center, sums)).into();
    if [1, 2, DENSE, SPREAD].contains(&tiling.vector) {
        all.push(Tiling { apart: true, ..tiling }.defines(dtype, center, true));
    }
    all
}

fn row_variants(center: bool) -> Vec<Defines> {
    let mut all = Vec::new();
    for dtype in FLOATS {
        for block in RowTiling::all(table(dtype)) {
            let mut add = |vector, stages| {
                all.extend(variants(Tiling::alone(block, vector, stages), dtype, center));
            };
            let stages: &[usize] = if block.items == 1 { &[2, 3, 4, 5] } else { &[2, 3] };
            for vector in [1, 2] {
                add(vector, 0);
                stages.iter().for_each(|&stages| add(vector, stages));
            }
            for vector in [DENSE, SPREAD].into_iter().filter(|&vector| has_room(&block, vector, center)) {
                stages.iter().for_each(|&stages| add(vector, stages));
            }
        }
    }
    all
}

fn split_variants(center: bool) -> Vec<Defines> {
    let mut all = Vec::new();
    for dtype in FLOATS {
        for &(lanes, items) in split_table(dtype) {
            let (block, split) = (RowTiling::alone(split_lanes(items), items), lanes / split_lanes(items));
            let staged = [1, 2, DENSE, SPREAD].into_iter().flat_map(|vector| [(vector, 2), (vector, 3)]);
            for (vector, stages) in staged.chain([(0, 0), (SPREAD_ANY, 0)]) {
                let tiling = Tiling { split, ..Tiling::alone(block, vector, stages) };
                all.extend(variants(tiling, dtype, center));
            }
        }
    }
    all
}

fn long_variants(center: bool) -> Vec<Defines> {
    let mut all = Vec::new();
    for dtype in FLOATS {
        for tiling in long_tilings(table(dtype)) {
            for vector in [0, 1, DENSE, SPREAD, SPREAD_ANY] {
                all.extend(variants(Tiling::alone(tiling, vector, 0), dtype, center));
            }
        }
    }
    all
}

/// The kernel of rows in registers, with the blocks of a cluster for each.
const fn in_clusters(variants: fn() -> Vec<Defines>) -> CudaKernel {
    let device = device(SOURCE, NormBackwardParams::prelude, "norm_backward_row", variants);
    CudaKernel { min_arch: Arch::new(9, 0, false), ..device }
}

static RMS_ROW: CudaKernel =
    device(SOURCE, NormBackwardParams::prelude, "norm_backward_row", || row_variants(false));
static LAYER_ROW: CudaKernel =
    device(SOURCE, NormBackwardParams::prelude, "norm_backward_row", || row_variants(true));
static RMS_SPLIT: CudaKernel = in_clusters(|| split_variants(false));
static LAYER_SPLIT: CudaKernel = in_clusters(|| split_variants(true));
static RMS_LONG: CudaKernel =
    device(SOURCE, NormBackwardParams::prelude, "norm_backward_long", || long_variants(false));
static LAYER_LONG: CudaKernel =
    device(SOURCE, NormBackwardParams::prelude, "norm_backward_long", || long_variants(true));

fn row_tiling(p: &Problem, info: &DeviceInfo) -> Option<Tiling> {
    let block = RowTiling::new(p.hidden, p.dtype, table(p.dtype))?;
    let vector = block.vector_level(p.hidden, p.dtype, row_kind(p));
    Some(Tiling::alone(block, vector, row_stages(p, &block, vector, info)).of_call(p))
}

/// Of rows that are too long for the threads of one block of a cluster.
fn split_tiling(p: &Problem, info: &DeviceInfo) -> Option<Tiling> {
    let short = RowTiling::new(p.hidden, p.dtype, table(p.dtype)).filter(|t| t.lanes <= SPLIT_LANES);
    let row = RowTiling::new(p.hidden, p.dtype, split_table(p.dtype)).filter(|_| short.is_none())?;
    let block = RowTiling::alone(split_lanes(row.items), row.items);
    let vector = row.vector_level(p.hidden, p.dtype, row_kind(p));
    let alone = Tiling::alone(block, vector, stages(&block, vector, info)).of_call(p);
    Some(Tiling { split: row.lanes / block.lanes, ..alone })
}

fn long_row_tiling(p: &Problem) -> Tiling {
    let block = long_tiling(p.hidden, p.dtype, table(p.dtype));
    Tiling::alone(block, row_kind(p).row_level(p.hidden, p.dtype), 0).of_call(p)
}

/// Rows in registers, sums over rows in registers too.
pub(in crate::ops) const fn row(name: &'static str, center: bool) -> Kernel<Problem> {
    Kernel::cuda(name, if center { &LAYER_ROW } else { &RMS_ROW }, run_row)
        .when(|p, info| {
            let (kind, vector) = (row_kind(p), row_kind(p).row_level(p.hidden, p.dtype));
            // Rows that begin anywhere are better divided among more blocks.
            let shared = is_unaligned(vector) && has_clusters(info);
            let is_staged = |t: &RowTiling| !is_unaligned(vector) || stages(t, vector, info) > 0;
            let room =
                |t: &RowTiling| has_room(t, vector, p.center) && !(shared && t.lanes == 512) && is_staged(t);
            fits(p.hidden, p.num_rows, p.dtype, kind, table(p.dtype), room)
        })
        .configured(|p, info| match row_tiling(p, info) {
            Some(t) => format!("{}, {} groups of rows", t.block, t.groups(p.num_rows, info)),
            None => String::new(),
        })
        .with_workspace(|p, info| row_tiling(p, info).map_or(0, |t| workspace(p, info, &t)))
        .and(&column_sum::cuda::DEVICE)
}

/// The same with the blocks of a cluster for each row.
pub(in crate::ops) const fn split(name: &'static str, center: bool) -> Kernel<Problem> {
    Kernel::cuda(name, if center { &LAYER_SPLIT } else { &RMS_SPLIT }, run_split)
        .when(|p, info| match split_tiling(p, info) {
            None => Err("the row needs less or more threads than a cluster has".into()),
            Some(t) if is_unaligned(t.vector) && t.stages == 0 => {
                Err("shared memory has no room for rows".into())
            }
            Some(_) => addressable(p.hidden, p.num_rows),
        })
        .configured(|p, info| match split_tiling(p, info) {
            Some(t) => {
                let (split, groups) = (t.split, t.groups(p.num_rows, info));
                format!("{split} blocks of {}, {groups} groups of rows", t.block)
            }
            None => String::new(),
        })
        .with_workspace(|p, info| split_tiling(p, info).map_or(0, |t| workspace(p, info, &t)))
        .and(&column_sum::cuda::DEVICE)
}

/// Rows of any length and layout.
pub(in crate::ops) const fn long(name: &'static str, center: bool) -> Kernel<Problem> {
    Kernel::cuda(name, if center { &LAYER_LONG } else { &RMS_LONG }, run_long)
        .when(|p, _| addressable(p.hidden, p.num_rows))
        .configured(|p, info| {
            let t = long_row_tiling(p);
            format!("{} threads a row, {} groups of rows", t.block.lanes, t.groups(p.num_rows, info))
        })
        .with_workspace(|p, info| workspace(p, info, &long_row_tiling(p)))
        .and(&column_sum::cuda::DEVICE)
}

/// Sums over rows that the kernel forms if any is wanted: of dweight, and of dbias for layer_norm.
fn num_partials(p: &Problem) -> usize {
    if p.num_sums() == 0 { 0 } else { 1 + p.center as usize }
}

fn workspace(p: &Problem, info: &DeviceInfo, tiling: &Tiling) -> usize {
    num_partials(p) * tiling.groups(p.num_rows, info) * p.hidden * size_of::<f32>()
}

fn run_row(launch: &Launch<'_, Problem>) -> Result<()> {
    run(launch, &row_tiling(launch.problem, launch.info).expect("`supports` has passed"))
}

fn run_split(launch: &Launch<'_, Problem>) -> Result<()> {
    run(launch, &split_tiling(launch.problem, launch.info).expect("`supports` has passed"))
}

fn run_long(launch: &Launch<'_, Problem>) -> Result<()> {
    run(launch, &long_row_tiling(launch.problem))
}

fn run(launch: &Launch<'_, Problem>, tiling: &Tiling) -> Result<()> {
    let p = launch.problem;
    let at = |index| launch.args.address(index) as u64;
    let groups = tiling.groups(p.num_rows, launch.info);
    let [x_step, dout_step, dx_step, dsum_step, weight_step, _, _] = p.steps.map(|s| s as i64);
    if groups > 0 {
        let params = NormBackwardParams {
            x: at(X),
            weight: at(WEIGHT),
            dout: at(DOUT),
            dsum: at(DSUM),
            dx: at(DX),
            partial: launch.workspace as u64,
            num_rows: p.num_rows as i64,
            num_groups: groups as i64,
            hidden: p.hidden as i32,
            eps: f32::from_bits(p.eps_bits),
            x_step,
            dout_step,
            dx_step,
            dsum_step,
            weight_step,
            rows: Rows::new(&p.rows),
        };
        let defines = tiling.defines(p.dtype, p.center, p.num_sums() > 0);
        let mut config = tiling.block.launch(groups * tiling.split)?;
        config.shared_bytes = tiling.shared_bytes(groups, launch.info) as u32;
        config.cluster = (tiling.split > 1).then_some([tiling.split as u32, 1, 1]);
        // SAFETY: `check` bound shapes and strides to the parameters, the tiling covers the row, and the
        // workspace holds the partial sums of every group.
        unsafe { launch.record(&defines, &config, &params)? };
    }
    if p.num_sums() == 0 {
        return Ok(());
    }
    // Both sums of layer_norm are formed if either is wanted; a null target is skipped.
    let target = |index: usize, step| (launch.args.address(index), step);
    let targets = [target(DWEIGHT, p.steps[5]), target(DBIAS, p.steps[6])];
    // SAFETY: as above; the workspace holds the partial sums of `num_partials` gradients.
    unsafe { column_sum::cuda::add(launch, groups, p.hidden, p.dtype, &targets[..num_partials(p)]) }
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;

    #[test]
    fn rows_of_clusters_have_the_threads_that_rows_of_blocks_have() {
        for dtype in FLOATS {
            for hidden in (4097..9000).chain([12_345, 16_384, 19_200, 32_768]) {
                let block = RowTiling::new(hidden, dtype, table(dtype));
                let cluster = RowTiling::new(hidden, dtype, split_table(dtype)).expect("long enough");
                if let Some(t) = block.filter(|t| t.lanes > SPLIT_LANES) {
                    assert_eq!((t.lanes, t.items), (cluster.lanes, cluster.items), "{hidden} {dtype}");
                }
            }
        }
    }
}
