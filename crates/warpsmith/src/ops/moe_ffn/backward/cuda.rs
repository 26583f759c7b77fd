//! `moe_ffn_backward` on CUDA devices: host half. The slots of all tokens are sorted by expert; two products of `grouped_linear` make
//! `z` and `da` in that order, the first of `x`, the second of `dy`, whose rows they gather; a pass over both makes what the others
//! need; then come the gradients of biases and matrices, the product that makes the rows of `dx`, and their sum. The shared expert is
//! the same with one group of all tokens. Nothing waits for the host, so a call can be captured whatever its ids are.

use super::{
    B1, B2, BackwardProblem, DB1, DB2, DOUT, DROUTING, DSHARED_W1, DSHARED_W2, DW1, DW2, DX, IDS, ROUTING,
    SHARED_W1, SHARED_W2, W1, W2, X,
};
use crate::cuda::LaunchConfig;
use crate::cuda::rows::{Rows, element, flag, grid_blocks};
use crate::device::DeviceInfo;
use crate::error::Result;
use crate::jit::{Arch, CudaKernel, Defines, Source};
use crate::kernel_params;
use crate::op::{Kernel, Launch};
use crate::ops::FLOATS;
use crate::ops::elementwise::function::Kind;
use crate::ops::grouped::Matrices;
use crate::ops::grouped_linear::backward::weights::{self, SumOperands, Sums, Weights};
use crate::ops::grouped_linear::cuda::{self as grouped, Operands};
use crate::ops::grouped_linear::problem::{Numbers, Problem as Grouped};
use crate::ops::grouped_linear::sm90;
use crate::ops::linear::problem::{Matrix, Problem as Product, Strides};
use crate::ops::moe_ffn::cuda::{
    MoeFfnSumParams, Places, Regions, SORT, SUM, SUM_COLUMNS, Supports, THREADS, copies_x, countable,
    has_pieces, record_sort, record_sum, rows_of, whole,
};
use crate::ops::moe_ffn::problem::{Problem, ROW_IDS, ROW_OUT, ROW_RESIDUAL, ROW_ROUTING, ROW_X};
use crate::tensor::{DType, MAX_RANK, Space};

/// Slots that a block of the pass has: one for each of its warps.
const PASS_SLOTS: usize = THREADS / 32;

kernel_params! {
    /// Addresses are zero for what is left out. Rows are those of ids and weights; and those of the gradient of weights.
    struct MoeFfnPassParams {
        z: u64, da: u64, dz: u64, h: u64, positions: u64, ids: u64, weights: u64, dy: u64, bias: u64, z_bias: u64,
        scores: u64, row_weights: u64, one: u64,
        units: i64, id_step: i64, weight_step: i64, score_step: i64,
        dy_row: i64, dy_col: i64, bias_expert: i64, bias_step: i64, z_bias_expert: i64, z_bias_step: i64,
        ffn: i32, hidden: i32, top_k: i32, gate: i32, keeps_exact: i32, wide_ids: i32, wide_weights: i32,
        tokens_of: Rows, scores_of: Rows,
    }
}

kernel_params! {
    struct MoeFfnRowsParams {
        from: u64, to: u64, tokens: i64, hidden: i64, step: i64, scale: f32, tokens_of: Rows,
    }
}

static PASS: CudaKernel = CudaKernel {
    source: Source { name: "moe_ffn_backward_pass", code: include_str!("pass.cu") },
    prelude: MoeFfnPassParams::prelude,
    function: "moe_ffn_backward_pass",
    min_arch: Arch::new(7, 0, false),
    fast_math: false,
    overlaps: true,
    variants: || {
        let kinds = [None, Some(Kind::Gelu), Some(Kind::GeluTanh), Some(Kind::Silu), Some(Kind::Relu)];
        let of = |dtype| {
            kinds.into_iter().flat_map(move |kind| [false, true].map(|v| pass_defines(dtype, kind, v)))
        };
        FLOATS.iter().flat_map(|&dtype| of(dtype)).collect()
    },
};

static ROWS: CudaKernel = CudaKernel {
    source: Source { name: "moe_ffn_backward_rows", code: include_str!("rows.cu") },
    prelude: MoeFfnRowsParams::prelude,
    function: "moe_ffn_backward_rows",
    min_arch: Arch::new(7, 0, false),
    fast_math: false,
    overlaps: true,
    variants: || FLOATS.iter().map(|&dtype| vec![element(dtype)]).collect(),
};

fn pass_defines(dtype: DType, kind: Option<Kind>, vector: bool) -> Defines {
    let function = kind.map_or("Identity", Kind::device_name);
    vec![element(dtype), ("FUNCTION", function.into()), flag("VECTOR", vector)]
}

/// Dense rows of so many elements.
fn dense(columns: usize) -> Matrix {
    Matrix { row: columns as isize, col: 1, aligned: true }
}

fn turned(w: Matrices) -> Matrices {
    Matrices { row: w.col, col: w.row, ..w }
}

impl BackwardProblem {
    /// Whether `dy` is not `dout` itself, but a copy with whole aligned rows.
    fn copies_dout(&self) -> bool {
        let in_place = |dout: Matrix| dout.row > 0 && has_pieces(&self.forward, &dout);
        self.forward.scale() != 1.0 || !self.dout.is_some_and(in_place)
    }

    fn dy(&self) -> Matrix {
        self.dout.filter(|_| !self.copies_dout()).unwrap_or(dense(self.forward.hidden))
    }

    fn x(&self) -> Matrix {
        self.forward.x.filter(|_| !copies_x(&self.forward)).unwrap_or(dense(self.forward.hidden))
    }

    fn slots(&self) -> usize {
        self.forward.tokens.saturating_mul(self.forward.top_k)
    }
}

/// The experts that tokens are sent to, or the shared one, and their part of the call.
#[derive(Clone, Copy)]
struct Experts {
    /// Whether it is the shared one: then rows are tokens.
    shared: bool,
    rows: usize,
    groups: usize,
    ffn: usize,
    w: [Matrices; 2],
    /// Numbers of the matrices among all four.
    numbers: [usize; 2],
    dw: [Option<(Matrices, bool)>; 2],
    /// Where the matrices and their gradients are among the arguments.
    w_at: [usize; 2],
    dw_at: [usize; 2],
}

impl Experts {
    fn all(p: &BackwardProblem) -> impl Iterator<Item = Experts> {
        let f = &p.forward;
        let routed = Experts {
            shared: false,
            rows: p.slots(),
            groups: f.experts,
            ffn: f.ffn,
            w: [f.w1, f.w2],
            numbers: [0, 1],
            dw: [p.dw1.zip(Some(p.dw_pieces[0])), p.dw2.zip(Some(p.dw_pieces[1]))],
            w_at: [W1, W2],
            dw_at: [DW1, DW2],
        };
        let shared = f.shared_ffn.map(|ffn| Experts {
            shared: true,
            rows: f.tokens,
            groups: 1,
            ffn,
            w: [f.shared_w1, f.shared_w2],
            numbers: [2, 3],
            dw: [p.dshared_w1.zip(Some(p.dw_pieces[2])), p.dshared_w2.zip(Some(p.dw_pieces[3]))],
            w_at: [SHARED_W1, SHARED_W2],
            dw_at: [DSHARED_W1, DSHARED_W2],
        });
        [Some(routed), shared].into_iter().flatten()
    }

    /// A product with results in f32, of the rows of `x` with matrix number `number`, or the same turned.
    /// Biases are left to the pass: beside results in f32 they would have to be in f32 too.
    fn product(&self, f: &Problem, number: usize, turns: bool, x: Matrix) -> Grouped {
        let (w, rows) = (self.w[number], f.rows_of(self.ffn));
        let [n, k] = if number == 0 { [rows, f.hidden] } else { [f.hidden, self.ffn] };
        let ([n, k], w) = if turns { ([k, n], turned(w)) } else { ([n, k], w) };
        let pieces = [f.w_pieces[self.numbers[number]], f.w_across[self.numbers[number]]];
        let [w_pieces, w_across] = if turns { [pieces[1], pieces[0]] } else { pieces };
        let product = f.product(w, [n, k], None).into_f32();
        Grouped {
            product: Product { x: Strides { batch: 0, row: x.row, col: x.col }, ..product },
            rows: self.rows,
            x_rows: self.rows,
            groups: self.groups,
            w,
            bias: None,
            counts_step: 1,
            index: None,
            row_scale: None,
            x_pieces: x.aligned && x.col == 1 && whole(f, k) && whole(f, x.row.unsigned_abs()),
            w_pieces,
            w_across,
            out_pieces: n.is_multiple_of(SUM_COLUMNS),
            clears: false,
        }
    }

    /// The same of rows of tokens.
    fn gathered(&self, f: &Problem, product: Grouped) -> Grouped {
        let index = (!self.shared).then_some(Numbers { dtype: DType::I32, step: 1 });
        Grouped { x_rows: f.tokens, index, ..product }
    }

    fn z(&self, p: &BackwardProblem) -> Grouped {
        self.gathered(&p.forward, self.product(&p.forward, 0, false, p.x()))
    }

    fn da(&self, p: &BackwardProblem) -> Grouped {
        self.gathered(&p.forward, self.product(&p.forward, 1, true, p.dy()))
    }

    fn dx(&self, p: &BackwardProblem) -> Option<Grouped> {
        let rows = dense(p.forward.rows_of(self.ffn));
        p.has_dx.then(|| self.product(&p.forward, 0, true, rows))
    }

    /// The gradient of a matrix, if it is asked for.
    fn dw(&self, p: &BackwardProblem, number: usize) -> Option<Weights> {
        let f = &p.forward;
        let (out, out_pieces) = self.dw[number]?;
        let rows = |matrix: Matrix, count: usize, gathered: bool| weights::Rows {
            matrix,
            count,
            gathered,
            pieces: matrix.aligned
                && matrix.col == 1
                && whole(f, count)
                && whole(f, matrix.row.unsigned_abs()),
        };
        let of_tokens = |matrix: Matrix| rows(matrix, f.hidden, !self.shared);
        let own = |columns: usize| rows(dense(columns), columns, false);
        let [a, b] = match number {
            0 => [own(f.rows_of(self.ffn)), of_tokens(p.x())],
            _ => [of_tokens(p.dy()), own(self.ffn)],
        };
        let (rows, groups) = (self.rows, self.groups);
        Some(Weights { dtype: f.dtype, rows, groups, counts_step: 1, a, b, out, out_pieces })
    }
}

/// Where things begin in the scratch memory; those with two places are of the experts and of the shared one.
struct Scratch {
    counts: usize,
    order: usize,
    positions: usize,
    row_weights: usize,
    one: usize,
    x: usize,
    dy: usize,
    /// `z`, then the unrounded `dz`, then rows of `dx`.
    z: [usize; 2],
    da: [usize; 2],
    dz: [usize; 2],
    h: [usize; 2],
    bytes: usize,
}

impl Scratch {
    fn of(p: &BackwardProblem) -> Scratch {
        let f = &p.forward;
        let mut regions = Regions::default();
        let mut take = |rows: usize, columns: usize, size: usize| regions.take(rows, columns, size);
        let (slots, narrow, wide) = (p.slots(), f.dtype.size(), size_of::<f32>());
        let (shared, shared_ffn) = (f.tokens * f.shared_ffn.is_some() as usize, f.shared_ffn.unwrap_or(0));
        let [rows, shared_rows] = [f.rows_of(f.ffn), f.rows_of(shared_ffn)];
        // Of z, which is as wide as what takes its place.
        let widest = |rows: usize| if p.has_dx { rows.max(f.hidden) } else { rows };
        let mut scratch = Scratch {
            counts: take(f.experts + 1, 1, size_of::<i32>()),
            order: take(slots, 1, size_of::<i32>()),
            positions: take(slots, 1, size_of::<i32>()),
            row_weights: take(slots * p.db2.is_some() as usize, 1, wide),
            one: take(1, 1, wide),
            x: take(f.tokens * copies_x(f) as usize, f.hidden, narrow),
            dy: take(f.tokens * p.copies_dout() as usize, f.hidden, narrow),
            z: [take(slots, widest(rows), wide), take(shared, widest(shared_rows), wide)],
            da: [take(slots, f.ffn, wide), take(shared, shared_ffn, wide)],
            dz: [take(slots, rows, narrow), take(shared, shared_rows, narrow)],
            h: [take(slots, f.ffn, narrow), take(shared, shared_ffn, narrow)],
            bytes: 0,
        };
        scratch.bytes = regions.bytes;
        scratch
    }
}

fn supports(
    p: &BackwardProblem,
    info: &DeviceInfo,
    product: Supports,
    sum: fn(&Weights, &DeviceInfo) -> std::result::Result<(), String>,
) -> std::result::Result<(), String> {
    let f = &p.forward;
    countable(f, info)?;
    weights::addressable([p.slots(), f.experts, f.rows_of(f.ffn), f.hidden])?;
    weights::addressable([f.tokens, f.rows_of(f.shared_ffn.unwrap_or(0)), 0, 0])?;
    if f.tokens.saturating_mul(f.hidden.div_ceil(SUM_COLUMNS)) >= 1 << 32 {
        return Err("`dx` has more elements than its sums are counted in".into());
    }
    for experts in Experts::all(p) {
        for of in [Some(experts.z(p)), Some(experts.da(p)), experts.dx(p)].into_iter().flatten() {
            product(&of, info)?;
        }
        for of in [0, 1].into_iter().filter_map(|number| experts.dw(p, number)) {
            sum(&of, info)?;
        }
    }
    Ok(())
}

/// A kernel whose products are those of device functions of `grouped_linear` and of its gradients.
const fn kernel(
    name: &'static str,
    products: &'static CudaKernel,
    sums: &'static CudaKernel,
    run: fn(&Launch<'_, BackwardProblem>) -> Result<()>,
) -> Kernel<BackwardProblem> {
    Kernel::cuda(name, &SORT, run)
        .and(products)
        .and(sums)
        .and(&weights::SUMS)
        .and(&SUM)
        .and(&ROWS)
        .and(&PASS)
        .with_workspace(|p, _| Scratch::of(p).bytes)
}

/// The products on Hopper's tensor cores, but for those of gradients of matrices.
pub(super) const SM90: Kernel<BackwardProblem> =
    kernel("moe_ffn_backward_sm90", &sm90::DEVICE, &weights::SM80_DEVICE, |launch| {
        // SAFETY: passed on.
        unsafe { run(launch, |p, at| sm90::run(launch, p, at), |p, at| weights::run_sm80(launch, p, at)) }
    })
    .when(|p, info| supports(p, info, sm90::supports, weights::sm80_supports));

/// The products on tensor cores through `mma.sync`.
pub(super) const SM80: Kernel<BackwardProblem> =
    kernel("moe_ffn_backward_sm80", &grouped::SM80_DEVICE, &weights::SM80_DEVICE, |launch| {
        // SAFETY: passed on.
        unsafe {
            run(launch, |p, at| grouped::run_sm80(launch, p, at), |p, at| weights::run_sm80(launch, p, at))
        }
    })
    .when(|p, info| supports(p, info, grouped::sm80_supports, weights::sm80_supports));

/// The products without tensor cores.
pub(super) const GENERIC: Kernel<BackwardProblem> =
    kernel("moe_ffn_backward_generic", &grouped::GENERIC_DEVICE, &weights::GENERIC_DEVICE, |launch| {
        // SAFETY: passed on.
        unsafe {
            run(
                launch,
                |p, at| grouped::run_generic(launch, p, at),
                |p, at| weights::run_generic(launch, p, at),
            )
        }
    })
    .when(|p, info| supports(p, info, |p, _| grouped::addressable(p), |_, _| Ok(())));

/// A call, with its scratch memory.
struct Call<'a> {
    launch: &'a Launch<'a, BackwardProblem>,
    scratch: Scratch,
}

/// Records the launches of a call.
///
/// # Safety
/// `multiply` and `add` must record products and sums of what they are given, which is the call's own or in scratch memory.
unsafe fn run(
    launch: &Launch<'_, BackwardProblem>,
    multiply: impl Fn(&Grouped, &Operands) -> Result<()>,
    add: impl Fn(&Weights, &weights::Operands) -> Result<()>,
) -> Result<()> {
    let (p, f, args) = (launch.problem, &launch.problem.forward, launch.args);
    let call = Call { launch, scratch: Scratch::of(p) };
    let scratch = &call.scratch;
    let at = |offset: usize| launch.workspace + offset;
    let places =
        Places { counts: at(scratch.counts), order: at(scratch.order), positions: at(scratch.positions) };
    record_sort(launch, f, args.address(IDS), &places, 0, f.tokens)?;
    let x = call.rows(X, ROW_X, copies_x(f), scratch.x, 1.0)?;
    let dy = call.rows(DOUT, ROW_RESIDUAL, p.copies_dout(), scratch.dy, f.scale())?;
    let product = |product: &Grouped, operands: Operands| match product.rows * product.product.n {
        0 => Ok(()),
        _ => multiply(product, &operands),
    };
    for experts in Experts::all(p) {
        let number = experts.shared as usize;
        let counts =
            if experts.shared { places.counts + f.experts * size_of::<i32>() } else { places.counts };
        let index = if experts.shared { 0 } else { places.order };
        let [z, da, dz, h] =
            [scratch.z, scratch.da, scratch.dz, scratch.h].map(|offsets| at(offsets[number]));
        let w = experts.w_at.map(|index| args.address(index));
        let of_tokens = Operands { counts, index, ..Operands::NONE };
        product(&experts.z(p), Operands { x, w: w[0], out: z, ..of_tokens })?;
        product(&experts.da(p), Operands { x: dy, w: w[1], out: da, ..of_tokens })?;
        call.pass(&experts, dy)?;
        for (number, a, b) in [(0, dz, x), (1, dy, h)] {
            let some = |dw: &Weights| dw.groups * dw.a.count * dw.b.count > 0;
            if let Some(dw) = experts.dw(p, number).filter(some) {
                let out = args.address(experts.dw_at[number]);
                add(&dw, &weights::Operands { a, b, counts, order: places.order, out })?;
            }
        }
        if !experts.shared {
            call.biases(&places, dy)?;
        }
        // In place of z, which no other launch reads.
        if let Some(dx) = experts.dx(p) {
            product(&dx, Operands { x: dz, w: w[0], counts, out: z, ..Operands::NONE })?;
        }
    }
    if p.has_dx && f.tokens * f.hidden > 0 { call.sum(&places) } else { Ok(()) }
}

impl Call<'_> {
    fn at(&self, offset: usize) -> u64 {
        (self.launch.workspace + offset) as u64
    }

    /// The address of the rows of a tensor, or of dense ones that this makes, times a factor.
    fn rows(&self, arg: usize, tensor: usize, copies: bool, to: usize, scale: f32) -> Result<usize> {
        let f = &self.launch.problem.forward;
        let from = self.launch.args.address(arg);
        if !copies {
            return Ok(from);
        }
        let elements = f.tokens * f.hidden;
        if elements > 0 {
            let params = MoeFfnRowsParams {
                from: from as u64,
                to: self.at(to),
                tokens: f.tokens as i64,
                hidden: f.hidden as i64,
                step: f.steps[tensor] as i64,
                scale,
                tokens_of: rows_of(&f.space, [tensor; 4]),
            };
            let blocks = grid_blocks(ROWS.function, elements.div_ceil(THREADS))?;
            let config = LaunchConfig::new([blocks, 1, 1], [THREADS as u32, 1, 1], 0);
            // SAFETY: `check` bound the tensor to tokens and `hidden`, and the scratch memory has room for the rows.
            unsafe { self.launch.record_part(&ROWS, &vec![element(f.dtype)], &config, &params)? };
        }
        Ok(self.launch.workspace + to)
    }

    /// The pass over the rows of some experts.
    fn pass(&self, experts: &Experts, dy: usize) -> Result<()> {
        let (p, args, scratch) = (self.launch.problem, self.launch.args, &self.scratch);
        let (f, number) = (&p.forward, experts.shared as usize);
        if experts.rows == 0 {
            return Ok(());
        }
        // Of the experts that tokens are sent to alone.
        let routed = |address: u64| if experts.shared { 0 } else { address };
        let given = |index: usize| routed(args.address(index) as u64);
        let scores_of =
            p.dweights.map_or(rows_of(&f.space, [ROW_IDS; 4]), |(space, _)| rows_of(&space, [0; 4]));
        let params = MoeFfnPassParams {
            z: self.at(scratch.z[number]),
            da: self.at(scratch.da[number]),
            dz: self.at(scratch.dz[number]),
            h: self.at(scratch.h[number]),
            positions: routed(self.at(scratch.positions)),
            ids: given(IDS),
            weights: given(ROUTING),
            dy: dy as u64,
            bias: given(B2),
            z_bias: given(B1),
            scores: given(DROUTING),
            row_weights: if p.db2.is_some() { routed(self.at(scratch.row_weights)) } else { 0 },
            one: routed(self.at(scratch.one)),
            units: experts.rows as i64,
            id_step: f.steps[ROW_IDS] as i64,
            weight_step: f.steps[ROW_ROUTING] as i64,
            score_step: p.dweights.map_or(0, |(_, step)| step as i64),
            dy_row: p.dy().row as i64,
            dy_col: p.dy().col as i64,
            bias_expert: f.b2.map_or(0, |[apart, _]| apart as i64),
            bias_step: f.b2.map_or(0, |[_, step]| step as i64),
            z_bias_expert: f.b1.map_or(0, |[apart, _]| apart as i64),
            z_bias_step: f.b1.map_or(0, |[_, step]| step as i64),
            ffn: experts.ffn as i32,
            hidden: f.hidden as i32,
            top_k: f.top_k as i32,
            gate: f.gate as i32,
            keeps_exact: (p.db1.is_some() && !experts.shared) as i32,
            wide_ids: (f.id_dtype == DType::I64) as i32,
            wide_weights: (f.weight_dtype == DType::F32) as i32,
            tokens_of: rows_of(&f.space, [ROW_IDS, ROW_ROUTING, ROW_IDS, ROW_IDS]),
            scores_of,
        };
        let blocks = grid_blocks(PASS.function, experts.rows.div_ceil(PASS_SLOTS))?;
        let config = LaunchConfig::new([blocks, 1, 1], [THREADS as u32, 1, 1], 0);
        let vector = experts.ffn.is_multiple_of(SUM_COLUMNS);
        // SAFETY: `check` bound the tensors to tokens, `top_k`, experts and `hidden`; the launches before it wrote the positions, and
        // the rows that they name.
        unsafe {
            self.launch.record_part(&PASS, &pass_defines(f.dtype, f.activation, vector), &config, &params)
        }
    }

    /// The gradients of the biases.
    fn biases(&self, places: &Places, dy: usize) -> Result<()> {
        let (p, args) = (self.launch.problem, self.launch.args);
        let f = &p.forward;
        let sums = |dtype: DType, n: usize, matrix: Matrix, strides: [isize; 2]| Sums {
            dtype,
            out_dtype: f.dtype,
            rows: p.slots(),
            groups: f.experts,
            n,
            counts_step: 1,
            matrix,
            strides,
        };
        let of = |from: usize, weights: usize, order: usize, out: usize| SumOperands {
            from,
            weights,
            order,
            counts: places.counts,
            out: args.address(out),
        };
        let (n, workspace) = (f.rows_of(f.ffn), self.launch.workspace);
        let first = p.db1.map(|strides| {
            let from = workspace + self.scratch.z[0];
            (sums(DType::F32, n, dense(n), strides), of(from, 0, 0, DB1))
        });
        let second = p.db2.map(|strides| {
            let weights = workspace + self.scratch.row_weights;
            (sums(f.dtype, f.hidden, p.dy(), strides), of(dy, weights, places.order, DB2))
        });
        for (sums, operands) in [first, second].into_iter().flatten() {
            if sums.groups * sums.n > 0 {
                // SAFETY: `check` bound the gradients to experts and columns; the pass wrote what is in the scratch memory.
                unsafe { sums.run(self.launch, &operands)? };
            }
        }
        Ok(())
    }

    /// Adds up the rows of `dx` of each token, each with a weight of one.
    fn sum(&self, places: &Places) -> Result<()> {
        let (f, scratch) = (&self.launch.problem.forward, &self.scratch);
        let space = &f.space;
        let mut strides = [ROW_IDS, ROW_ROUTING, ROW_RESIDUAL, ROW_OUT].map(|tensor| space.strides[tensor]);
        strides[1] = [0; MAX_RANK];
        let params = MoeFfnSumParams {
            y: self.at(scratch.z[0]),
            shared: if f.shared_ffn.is_some() { self.at(scratch.z[1]) } else { 0 },
            positions: places.positions as u64,
            ids: self.launch.args.address(IDS) as u64,
            weights: self.at(scratch.one),
            bias: 0,
            residual: 0,
            out: self.launch.args.address(DX) as u64,
            first: 0,
            bias_expert: 0,
            bias_step: 0,
            steps: [f.steps[ROW_IDS] as i64, 0, 0, f.steps[ROW_OUT] as i64],
            tokens: f.tokens as i32,
            hidden: f.hidden as i32,
            top_k: f.top_k as i32,
            wide_ids: (f.id_dtype == DType::I64) as i32,
            wide_weights: 1,
            scale: 1.0,
            tokens_of: Rows::new(&Space { rank: space.rank, sizes: space.sizes, strides }),
        };
        record_sum(self.launch, f, false, &params)
    }
}
