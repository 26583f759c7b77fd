//! `moe_ffn` on CUDA devices: host half. For each part of the tokens: one launch sorts their slots by expert, two are the products of
//! `grouped_linear`, the first of which gathers its rows by that order, and one adds up the rows of each token in the order of its
//! slots. The shared expert is two products of one group. Nothing waits for the host, so a call can be captured whatever its ids are.

use super::problem::{ROW_IDS, ROW_OUT, ROW_RESIDUAL, ROW_ROUTING, ROW_X};
use super::{B1, B2, IDS, OUT, Problem, RESIDUAL, ROUTING, SHARED_W1, SHARED_W2, W1, W2, X};
use crate::cuda::LaunchConfig;
use crate::cuda::rows::{Rows, element, flag, grid_blocks};
use crate::device::DeviceInfo;
use crate::error::Result;
use crate::jit::{Arch, CudaKernel, Defines, Source};
use crate::kernel_params;
use crate::op::{Kernel, Launch};
use crate::ops::FLOATS;
use crate::ops::grouped::Matrices;
use crate::ops::grouped_linear::cuda::{self as grouped, Operands};
use crate::ops::grouped_linear::problem::{Numbers, Problem as Grouped};
use crate::ops::grouped_linear::sm90;
use crate::ops::linear::problem::{Matrix, Problem as Product, Strides};
use crate::tensor::{DType, Space};

/// Bytes of what is between the products, at most, unless a token alone has more. Enough for all tokens of most calls: each part
/// reads all weights.
const PART_BYTES: usize = 1 << 31;
/// Threads of the blocks that sort, and of those that add and copy; columns of one of these, as in the device code.
const SORT_THREADS: usize = 1024;
pub(super) const THREADS: usize = 256;
pub(super) const SUM_COLUMNS: usize = 4;
/// Shared memory of a block that sorts besides what it counts in.
const SORT_RESERVED: usize = 1024;

kernel_params! {
    struct MoeFfnSortParams {
        ids: u64, counts: u64, order: u64, positions: u64,
        first: i64, id_step: i64,
        tokens: i32, top_k: i32, experts: i32, lines: i32, wide_ids: i32,
        tokens_of: Rows,
    }
}

kernel_params! {
    /// Rows and steps are those of ids, weights, residual and result.
    pub(super) struct MoeFfnSumParams {
        y: u64, shared: u64, positions: u64, ids: u64, weights: u64, bias: u64, residual: u64, out: u64,
        first: i64, bias_expert: i64, bias_step: i64, steps: [i64; 4],
        tokens: i32, hidden: i32, top_k: i32, wide_ids: i32, wide_weights: i32, scale: f32,
        tokens_of: Rows,
    }
}

kernel_params! {
    struct MoeFfnCopyParams { x: u64, to: u64, first: i64, tokens: i64, hidden: i64, step: i64, tokens_of: Rows }
}

pub(super) static SORT: CudaKernel = CudaKernel {
    source: Source { name: "moe_ffn_sort", code: include_str!("sort.cu") },
    prelude: MoeFfnSortParams::prelude,
    function: "moe_ffn_sort",
    min_arch: Arch::new(7, 0, false),
    fast_math: false,
    overlaps: true,
    variants: || vec![Vec::new()],
};

pub(super) static SUM: CudaKernel = CudaKernel {
    source: Source { name: "moe_ffn_sum", code: include_str!("sum.cu") },
    prelude: MoeFfnSumParams::prelude,
    function: "moe_ffn_sum",
    min_arch: Arch::new(6, 0, false),
    fast_math: false,
    overlaps: true,
    variants: || {
        let flags = [[false, false], [false, true], [true, false]];
        FLOATS
            .iter()
            .flat_map(|&dtype| flags.map(|[vector, bias]| sum_defines(dtype, vector, bias)))
            .collect()
    },
};

static COPY: CudaKernel = CudaKernel {
    source: Source { name: "moe_ffn_copy", code: include_str!("copy.cu") },
    prelude: MoeFfnCopyParams::prelude,
    function: "moe_ffn_copy",
    min_arch: Arch::new(6, 0, false),
    fast_math: false,
    overlaps: true,
    variants: || FLOATS.iter().map(|&dtype| vec![element(dtype)]).collect(),
};

fn sum_defines(dtype: DType, vector: bool, bias: bool) -> Defines {
    vec![element(dtype), flag("VECTOR", vector), flag("HAS_BIAS", bias)]
}

/// Where things begin in the scratch memory of a part of `tokens` tokens.
struct Scratch {
    counts: usize,
    order: usize,
    positions: usize,
    x: usize,
    h: usize,
    y: usize,
    shared_h: usize,
    shared_y: usize,
    bytes: usize,
}

/// Regions of scratch memory, one behind the other.
#[derive(Default)]
pub(super) struct Regions {
    pub bytes: usize,
}

impl Regions {
    /// The place of the next one.
    pub fn take(&mut self, rows: usize, columns: usize, size: usize) -> usize {
        let at = self.bytes;
        let more = rows.saturating_mul(columns).saturating_mul(size);
        self.bytes = at.saturating_add(more).checked_next_multiple_of(256).unwrap_or(usize::MAX);
        at
    }
}

impl Scratch {
    fn of(p: &Problem, tokens: usize) -> Scratch {
        let mut regions = Regions::default();
        let mut take = |rows: usize, columns: usize, size: usize| regions.take(rows, columns, size);
        let slots = tokens.saturating_mul(p.top_k);
        let (size, word, shared) = (p.dtype.size(), size_of::<i32>(), p.shared_ffn.is_some() as usize);
        let mut scratch = Scratch {
            counts: take(p.experts + 1, 1, word),
            order: take(slots, 1, word),
            positions: take(slots, 1, word),
            x: take(tokens * copies_x(p) as usize, p.hidden, size),
            h: take(slots, p.ffn, size),
            y: take(slots, p.hidden, size_of::<f32>()),
            shared_h: take(tokens, p.shared_ffn.unwrap_or(0), size),
            shared_y: take(tokens * shared, p.hidden, size_of::<f32>()),
            bytes: 0,
        };
        scratch.bytes = regions.bytes;
        scratch
    }
}

/// The most tokens that are computed together.
fn part_tokens(p: &Problem) -> usize {
    let token = p.token_bytes().saturating_add(p.top_k.saturating_mul(2 * size_of::<i32>()));
    let most = (PART_BYTES / token.max(1)).min((1 << 30) / p.top_k.max(1)).max(1);
    p.tokens.div_ceil(p.tokens.div_ceil(most).max(1)).max(1)
}

/// Whether rows of so many elements consist of whole pieces of 16 bytes, if they are dense and begin at one.
pub(super) fn whole(p: &Problem, columns: usize) -> bool {
    (columns * p.dtype.size()).is_multiple_of(16)
}

/// Whether products can read the rows of `x` where they are in whole pieces of 16 bytes.
pub(super) fn has_pieces(p: &Problem, x: &Matrix) -> bool {
    x.aligned && x.col == 1 && whole(p, p.hidden) && whole(p, x.row.unsigned_abs())
}

/// Whether products read copies of the rows of `x`, because these are not the same distance apart, or would have pieces if only they
/// were aligned: how a row is multiplied does not depend on where it is.
pub(super) fn copies_x(p: &Problem) -> bool {
    p.x.is_none_or(|x| whole(p, p.hidden) && !has_pieces(p, &x))
}

/// The products of one kind of expert, for a part of the tokens.
struct Stage {
    /// With the rows of `x` and of `h`.
    first: Grouped,
    /// With results in f32.
    second: Grouped,
}

impl Stage {
    /// That of the experts.
    fn routed(p: &Problem, tokens: usize) -> Stage {
        let stage = Stage::new(p, [p.w1, p.w2], p.ffn, p.b1, [0, 1]);
        let rows = tokens * p.top_k;
        let index = Some(Numbers { dtype: DType::I32, step: 1 });
        Stage {
            first: Grouped { rows, x_rows: tokens, groups: p.experts, index, ..stage.first },
            second: Grouped { rows, x_rows: rows, groups: p.experts, ..stage.second },
        }
    }

    /// That of the shared expert.
    fn shared(p: &Problem, tokens: usize) -> Option<Stage> {
        let ffn = p.shared_ffn?;
        let stage = Stage::new(p, [p.shared_w1, p.shared_w2], ffn, None, [2, 3]);
        let of_tokens = |product| Grouped { rows: tokens, x_rows: tokens, groups: 1, ..product };
        Some(Stage { first: of_tokens(stage.first), second: of_tokens(stage.second) })
    }

    /// `numbers` are those of the matrices among all four.
    fn new(
        p: &Problem,
        [w1, w2]: [Matrices; 2],
        ffn: usize,
        bias: Option<[isize; 2]>,
        numbers: [usize; 2],
    ) -> Stage {
        let product = |product: Product, w: Matrices, number: usize| Grouped {
            product,
            rows: 0,
            x_rows: 0,
            groups: 0,
            w,
            bias: None,
            counts_step: 1,
            index: None,
            row_scale: None,
            x_pieces: false,
            w_pieces: p.w_pieces[number],
            w_across: p.w_across[number],
            out_pieces: false,
            clears: false,
        };
        let (x, x_pieces) = match p.x {
            Some(x) if !copies_x(p) => (Strides { batch: 0, row: x.row, col: x.col }, has_pieces(p, &x)),
            _ => (Strides { batch: 0, row: p.hidden as isize, col: 1 }, whole(p, p.hidden)),
        };
        let first = Product { x, ..p.first(w1, ffn, bias) };
        let first = Grouped { bias, x_pieces, out_pieces: whole(p, ffn), ..product(first, w1, numbers[0]) };
        let second = Grouped {
            x_pieces: whole(p, ffn),
            out_pieces: p.hidden.is_multiple_of(SUM_COLUMNS),
            ..product(p.second(w2, ffn, None), w2, numbers[1])
        };
        Stage { first, second }
    }

    /// Those of a call, with as many tokens as are computed together.
    fn all(p: &Problem) -> impl Iterator<Item = Stage> {
        let tokens = part_tokens(p);
        [Some(Stage::routed(p, tokens)), Stage::shared(p, tokens)].into_iter().flatten()
    }
}

/// Warps of the sorting block that have slots: as many as there is shared memory for, a number of each expert for each warp.
fn lines(p: &Problem, info: &DeviceInfo) -> usize {
    let counts = (info.shared_per_block.saturating_sub(SORT_RESERVED) / size_of::<i32>()) / p.experts.max(1);
    counts.min(SORT_THREADS / 32)
}

pub(super) type Supports = fn(&Grouped, &DeviceInfo) -> std::result::Result<(), String>;

/// Whether the slots of a call can be sorted.
pub(super) fn countable(p: &Problem, info: &DeviceInfo) -> std::result::Result<(), String> {
    if lines(p, info) == 0 {
        return Err(format!("experts = {} is more than a block has shared memory to count", p.experts));
    }
    for (name, size) in [("num_tokens", p.tokens), ("top_k", p.top_k)] {
        if size >= 1 << 30 {
            return Err(format!("{name} = {size} is not below 2^30"));
        }
    }
    Ok(())
}

fn supports(p: &Problem, info: &DeviceInfo, product: Supports) -> std::result::Result<(), String> {
    countable(p, info)?;
    Stage::all(p)
        .try_for_each(|stage| product(&stage.first, info).and_then(|()| product(&stage.second, info)))
}

/// A kernel whose products are those of a device function of `grouped_linear`.
const fn kernel(
    name: &'static str,
    products: &'static CudaKernel,
    run: fn(&Launch<'_, Problem>) -> Result<()>,
) -> Kernel<Problem> {
    Kernel::cuda(name, &SORT, run)
        .and(products)
        .and(&SUM)
        .and(&COPY)
        .with_workspace(|p, _| Scratch::of(p, part_tokens(p)).bytes)
}

/// The products on Hopper's tensor cores.
pub(super) const SM90: Kernel<Problem> = kernel("moe_ffn_sm90", &sm90::DEVICE, |launch| {
    // SAFETY: passed on.
    run(launch, |p, at| unsafe { sm90::run(launch, p, at) })
})
.when(|p, info| supports(p, info, sm90::supports))
.configured(|p, info| describe(p, info, sm90::describe));

/// The products on tensor cores through `mma.sync`.
pub(super) const SM80: Kernel<Problem> = kernel("moe_ffn_sm80", &grouped::SM80_DEVICE, |launch| {
    // SAFETY: passed on.
    run(launch, |p, at| unsafe { grouped::run_sm80(launch, p, at) })
})
.when(|p, info| supports(p, info, grouped::sm80_supports))
.configured(|p, info| describe(p, info, grouped::describe_sm80));

/// The products without tensor cores.
pub(super) const GENERIC: Kernel<Problem> = kernel("moe_ffn_generic", &grouped::GENERIC_DEVICE, |launch| {
    // SAFETY: passed on.
    run(launch, |p, at| unsafe { grouped::run_generic(launch, p, at) })
})
.when(|p, info| supports(p, info, |p, _| grouped::addressable(p)))
.configured(|p, info| describe(p, info, grouped::describe_generic));

fn describe(p: &Problem, info: &DeviceInfo, product: fn(&Grouped, &DeviceInfo) -> String) -> String {
    let tokens = part_tokens(p);
    let (parts, scratch) = (p.tokens.div_ceil(tokens), Scratch::of(p, tokens).bytes >> 20);
    let copies = if copies_x(p) { ", of copies of x" } else { "" };
    let product = product(&Stage::routed(p, tokens).first, info);
    format!("{product}{copies}, {parts} parts of {tokens} tokens, {scratch} MiB of scratch memory")
}

/// Records the launches of a call. `multiply` records that of a product, whose operands the caller vouches for.
fn run(launch: &Launch<'_, Problem>, multiply: impl Fn(&Grouped, &Operands) -> Result<()>) -> Result<()> {
    let p = launch.problem;
    let most = part_tokens(p);
    for first in (0..p.tokens).step_by(most) {
        let part = Part::new(launch, first, most.min(p.tokens - first), most);
        part.sort()?;
        let x = part.x()?;
        let product = |product: &Grouped, operands: Operands| match product.rows * product.product.n {
            0 => Ok(()),
            _ => multiply(product, &operands),
        };
        let (args, scratch) = (launch.args, &part.scratch);
        let at = |offset: usize| launch.workspace + offset;
        let stage = Stage::routed(p, part.tokens);
        let counts = at(scratch.counts);
        let gathered = Operands { index: at(scratch.order), bias: args.address(B1), ..Operands::NONE };
        product(&stage.first, Operands { x, w: args.address(W1), counts, out: at(scratch.h), ..gathered })?;
        let second = Operands { x: at(scratch.h), w: args.address(W2), counts, ..Operands::NONE };
        product(&stage.second, Operands { out: at(scratch.y), ..second })?;
        if let Some(stage) = Stage::shared(p, part.tokens) {
            let counts = counts + p.experts * size_of::<i32>();
            let (h, y) = (at(scratch.shared_h), at(scratch.shared_y));
            let shared = Operands { counts, ..Operands::NONE };
            product(&stage.first, Operands { x, w: args.address(SHARED_W1), out: h, ..shared })?;
            product(&stage.second, Operands { x: h, w: args.address(SHARED_W2), out: y, ..shared })?;
        }
        part.sum()?;
    }
    Ok(())
}

/// Some tokens, from number `first` on.
struct Part<'a> {
    launch: &'a Launch<'a, Problem>,
    first: usize,
    tokens: usize,
    scratch: Scratch,
}

impl<'a> Part<'a> {
    /// `most` are the tokens of the largest part.
    fn new(launch: &'a Launch<'a, Problem>, first: usize, tokens: usize, most: usize) -> Part<'a> {
        Part { launch, first, tokens, scratch: Scratch::of(launch.problem, most) }
    }

    fn at(&self, offset: usize) -> u64 {
        (self.launch.workspace + offset) as u64
    }

    /// Sorts the slots.
    fn sort(&self) -> Result<()> {
        let scratch = &self.scratch;
        let [counts, order, positions] =
            [scratch.counts, scratch.order, scratch.positions].map(|offset| self.launch.workspace + offset);
        let places = Places { counts, order, positions };
        let ids = self.launch.args.address(IDS);
        record_sort(self.launch, self.launch.problem, ids, &places, self.first, self.tokens)
    }

    /// The address of the rows of `x`, or of copies that it makes.
    fn x(&self) -> Result<usize> {
        let p = self.launch.problem;
        let x = self.launch.args.address(X);
        if let (Some(matrix), false) = (p.x, copies_x(p)) {
            return Ok(x.wrapping_add_signed(self.first as isize * matrix.row * p.dtype.size() as isize));
        }
        let to = self.launch.workspace + self.scratch.x;
        let params = MoeFfnCopyParams {
            x: x as u64,
            to: to as u64,
            first: self.first as i64,
            tokens: self.tokens as i64,
            hidden: p.hidden as i64,
            step: p.steps[ROW_X] as i64,
            tokens_of: rows_of(&p.space, [ROW_X; 4]),
        };
        let blocks = grid_blocks(COPY.function, (self.tokens * p.hidden).div_ceil(THREADS))?;
        let config = LaunchConfig::new([blocks, 1, 1], [THREADS as u32, 1, 1], 0);
        // SAFETY: `check` bound x to tokens and `hidden`, and the scratch memory has room for the copies.
        unsafe { self.launch.record_part(&COPY, &vec![element(p.dtype)], &config, &params)? };
        Ok(to)
    }

    /// Adds up the rows of each token.
    fn sum(&self) -> Result<()> {
        let p = self.launch.problem;
        let args = self.launch.args;
        let tensors = [ROW_IDS, ROW_ROUTING, ROW_RESIDUAL, ROW_OUT];
        let params = MoeFfnSumParams {
            y: self.at(self.scratch.y),
            shared: if p.shared_ffn.is_some() { self.at(self.scratch.shared_y) } else { 0 },
            positions: self.at(self.scratch.positions),
            ids: args.address(IDS) as u64,
            weights: args.address(ROUTING) as u64,
            bias: args.address(B2) as u64,
            residual: args.address(RESIDUAL) as u64,
            out: args.address(OUT) as u64,
            first: self.first as i64,
            bias_expert: p.b2.map_or(0, |[apart, _]| apart as i64),
            bias_step: p.b2.map_or(0, |[_, step]| step as i64),
            steps: tensors.map(|tensor| p.steps[tensor] as i64),
            tokens: self.tokens as i32,
            hidden: p.hidden as i32,
            top_k: p.top_k as i32,
            wide_ids: (p.id_dtype == DType::I64) as i32,
            wide_weights: (p.weight_dtype == DType::F32) as i32,
            scale: p.scale(),
            tokens_of: rows_of(&p.space, tensors),
        };
        record_sum(self.launch, p, p.b2.is_some(), &params)
    }
}

/// Where the tokens are in some of the tensors with a row for each.
pub(super) fn rows_of<const N: usize>(space: &Space<N>, tensors: [usize; 4]) -> Rows {
    let strides = tensors.map(|tensor| space.strides[tensor]);
    Rows::new(&Space { rank: space.rank, sizes: space.sizes, strides })
}

/// Where sorting puts the slots: how many each expert has, and the shared one; the token of each sorted row; the row of each slot.
pub(super) struct Places {
    pub counts: usize,
    pub order: usize,
    pub positions: usize,
}

/// Sorts the slots of tokens from number `first` on by their experts.
pub(super) fn record_sort<P>(
    launch: &Launch<'_, P>,
    p: &Problem,
    ids: usize,
    places: &Places,
    first: usize,
    tokens: usize,
) -> Result<()> {
    let lines = lines(p, launch.info);
    let params = MoeFfnSortParams {
        ids: ids as u64,
        counts: places.counts as u64,
        order: places.order as u64,
        positions: places.positions as u64,
        first: first as i64,
        id_step: p.steps[ROW_IDS] as i64,
        tokens: tokens as i32,
        top_k: p.top_k as i32,
        experts: p.experts as i32,
        lines: lines as i32,
        wide_ids: (p.id_dtype == DType::I64) as i32,
        tokens_of: rows_of(&p.space, [ROW_IDS; 4]),
    };
    let shared = lines * p.experts * size_of::<i32>();
    let config = LaunchConfig::new([1, 1, 1], [SORT_THREADS as u32, 1, 1], shared as u32);
    // SAFETY: `check` bound the ids to tokens and `top_k`; the scratch memory has room for the experts and the slots, and ids that are
    // no experts are not used as such.
    unsafe { launch.record_part(&SORT, &Vec::new(), &config, &params) }
}

/// Adds up the rows of each token, with a bias or without.
pub(super) fn record_sum<P>(
    launch: &Launch<'_, P>,
    p: &Problem,
    bias: bool,
    params: &MoeFfnSumParams,
) -> Result<()> {
    // Both together spill on sm_120a.
    let vector = p.row_pieces && p.hidden.is_multiple_of(SUM_COLUMNS) && !bias;
    let threads = params.tokens as usize * p.hidden.div_ceil(SUM_COLUMNS);
    let blocks = grid_blocks(SUM.function, threads.div_ceil(THREADS))?;
    let config = LaunchConfig::new([blocks, 1, 1], [THREADS as u32, 1, 1], 0);
    // SAFETY: `check` bound the tensors to tokens, `top_k` and `hidden`, and biases to the experts; the launches before it wrote the
    // positions, and the rows that they name.
    unsafe { launch.record_part(&SUM, &sum_defines(p.dtype, vector, bias), &config, params) }
}
