//! `linear` on the CPU, one source for all tiers.
//!
//! The engine of `cpu::gemm` makes the sums and gives them to [`Finish`] while they are in the cache. Only sums that
//! are scaled block by block are computed here: panels of columns are divided among threads. The rows of `w` that a
//! panel needs are widened to f32 once; then blocks of rows of `x` are multiplied with them, [`ROWS`] x [`COLUMNS`]
//! sums at a time, each in the lanes of one vector over all of K. So the order of a sum, and its bits, depend on K and
//! the tier alone.

use super::problem::{Dequant, Part, SCALE_BLOCK, Strides};
use super::{Gate, PackedWeight, Problem, SPEC};
use crate::cpu::gemm::{self, Epilogue, Gemm, Isa, Matrix, Output, PackedWeights, Tile, Weights};
use crate::cpu::rows::{for_vectors, load_at, with_element, with_float};
use crate::cpu::scratch::{self, Need, Region};
use crate::cpu::{CpuElement, Simd, Task, Tier, dispatch, parallel_for_with_scratch, should_stream};
use crate::error::{Error, Result};
use crate::op::Launch;
use crate::ops::elementwise::function::{Function, Kind, with_function};
use crate::tensor::DType;
use half::{bf16, f16};
use panels::Panels;
use std::ops::Range;

mod panels;

/// Rows of `x` and rows of `w` whose products are summed at a time: their vectors and sums fit the registers.
const ROWS: usize = 4;
const COLUMNS: usize = 4;
/// Columns of the result in a panel: a multiple of every tier's lanes.
const PANEL: usize = 32;

pub(super) fn run(launch: &Launch<'_, Problem>) -> Result<()> {
    let p = launch.problem;
    let weight = launch.args.prepared::<PackedWeight>();
    let packed = match weight {
        Some(weight) if p.dequant != Dequant::Blocks => weight.matching(Isa::of_tier(launch.tier), p)?,
        Some(weight) if !weight.has_tensor() => {
            let expected = "a weight that kept its tensor, because of scales by block";
            return Err(Error::argument(SPEC.name, "w", expected, "one without"));
        }
        _ => None,
    };
    // SAFETY: the parts are those of the call's own tensors.
    p.parts(launch.args).for_each(|part| unsafe { multiply(p, &part, launch.tier, packed) });
    Ok(())
}

/// Computes one part of a problem.
///
/// # Safety
/// `part` must hold the tensors of `p`; nothing else may use `out`, nor write to the others, meanwhile. `packed` must be
/// the weight, packed for this tier.
pub(in crate::ops) unsafe fn multiply(p: &Problem, part: &Part, tier: Tier, packed: Option<&PackedWeights>) {
    if p.dequant != Dequant::Blocks {
        let isa = Isa::of_tier(tier);
        for batch in 0..p.batch {
            let part = part_of_batch(p, part, batch);
            let weights = packed.map_or_else(|| weights_of(p, &part, 0..p.n), Weights::Packed);
            // SAFETY: passed on.
            unsafe { multiply_matrix(p, &part, 0..p.n, isa, weights) };
        }
        return;
    }
    let panels = p.batch * p.n.div_ceil(PANEL);
    parallel_for_with_scratch(panels, 1, Panels::need(p), |panels, region| {
        dispatch(tier, Panels { p, part, panels, region });
    });
}

/// Computes some columns of one matrix, with the bits they have if all are computed.
///
/// # Safety
/// As [`multiply`], for these columns; `p` must have a batch of one and no scales.
pub(in crate::ops) unsafe fn multiply_columns(p: &Problem, part: &Part, columns: Range<usize>, tier: Tier) {
    debug_assert!(p.batch == 1 && p.dequant == Dequant::None && columns.end <= p.n);
    let weights = weights_of(p, part, columns.clone());
    // SAFETY: passed on.
    unsafe { multiply_matrix(p, part, columns, Isa::of_tier(tier), weights) };
}

/// The rows of `w` that give some columns.
fn weights_of(p: &Problem, part: &Part, columns: Range<usize>) -> Weights<'static> {
    let weight = Weight { data: part.w, dtype: p.w_dtype, n: p.n, k: p.k, row: p.w.row, col: p.w.col };
    weight.columns(p.gate, columns)
}

/// A matrix of weights in memory.
pub(super) struct Weight {
    pub data: usize,
    pub dtype: DType,
    /// Columns of the result; with a gate, half the rows.
    pub n: usize,
    pub k: usize,
    pub row: isize,
    pub col: isize,
}

impl Weight {
    /// As the engine takes it.
    pub fn matrices(&self, gate: Gate) -> Weights<'static> {
        self.columns(gate, 0..self.n)
    }

    /// The rows that give some columns of the result, as the engine takes them.
    fn columns(&self, gate: Gate, columns: Range<usize>) -> Weights<'static> {
        let rows = |first: usize, row_stride: isize| {
            let skipped = first as isize * self.row + columns.start as isize * row_stride;
            Matrix {
                data: self.data.wrapping_add_signed(skipped * self.dtype.size() as isize) as *const u8,
                dtype: self.dtype,
                rows: columns.len(),
                k: self.k,
                row_stride,
                k_stride: self.col,
            }
        };
        match gate {
            Gate::None => Weights::Plain(rows(0, self.row)),
            Gate::Halves => Weights::Gated { gate: rows(0, self.row), up: rows(self.n, self.row) },
            Gate::Interleaved => Weights::Gated { gate: rows(0, 2 * self.row), up: rows(1, 2 * self.row) },
        }
    }
}

/// Computes columns of one matrix of a batch with the engine; `weights` has those alone.
///
/// # Safety
/// As [`multiply`].
unsafe fn multiply_matrix(p: &Problem, part: &Part, columns: Range<usize>, isa: Isa, weights: Weights<'_>) {
    let x = Matrix {
        data: part.x as *const u8,
        dtype: p.x_dtype,
        rows: p.m,
        k: p.k,
        row_stride: p.x.row,
        k_stride: p.x.col,
    };
    scratch::with(Finish::need(p, columns.len()), |region| {
        // SAFETY: `check` bound all shapes to these sizes and strides; `out` overlaps `residual` only element for element,
        // and each is read before it is written.
        unsafe { gemm::run(&Gemm { x, weights, isa }, &Finish::new(p, part, columns, region)) }
    });
}

/// The last steps of every sum, and what they need of rows and columns, in f32.
struct Finish<'a> {
    p: &'a Problem,
    out: usize,
    residual: usize,
    /// Of gate and up; empty where there are none.
    bias: [&'a [f32]; 2],
    /// The scales of the rows of `w`, of gate and up.
    w_scales: [&'a [f32]; 2],
    x_scales: &'a [f32],
    /// Whether results bypass the caches: then memory need not be read before it is written.
    stream: bool,
}

impl<'a> Finish<'a> {
    /// How many values of bias, of scales of `w`, and of scales of `x` there are; of the first two for each half.
    fn sizes(p: &Problem, columns: usize) -> ([usize; 2], [usize; 2], usize) {
        let scaled = p.dequant == Dequant::Whole;
        let of = |given: bool| if given { columns } else { 0 };
        let halves = |given: bool| [of(given), of(given && p.gate != Gate::None)];
        (halves(p.has_bias), halves(scaled), if scaled { p.m } else { 0 })
    }

    /// Scratch for [`Finish::new`].
    fn need(p: &Problem, columns: usize) -> Need {
        let (bias, w_scales, x_scales) = Self::sizes(p, columns);
        let columns = bias.into_iter().chain(w_scales);
        columns.fold(Need::of::<f32>(x_scales), |need, len| need.and::<f32>(len))
    }

    /// The last steps of some columns, which the engine counts from zero.
    ///
    /// # Safety
    /// `part` must hold the tensors of `p`.
    unsafe fn new(p: &'a Problem, part: &Part, columns: Range<usize>, mut region: Region<'a>) -> Self {
        let (bias, w_scales, x_scales) = Self::sizes(p, columns.len());
        let row = |half: usize, j: usize| {
            let column = columns.start + j;
            (if half == 0 { p.gate_row(column) } else { p.up_row(column) }) as isize
        };
        let skip = |base: usize, strides: &Strides| {
            base.wrapping_add_signed(columns.start as isize * strides.col * p.out_dtype.size() as isize)
        };
        // SAFETY: `check` bound bias and scales to the rows of `w`, and the scales of `x` to its rows.
        unsafe {
            let bias_at = |half, j| value_at(part.bias, row(half, j) * p.bias_step, p.bias_dtype);
            let scale_at = |half, j| value_at(part.w_scale, row(half, j) * p.w_scale.row, DType::F32);
            let x_scale_at = |i: usize| value_at(part.x_scale, i as isize * p.x_scale.row, DType::F32);
            Finish {
                p,
                out: skip(part.out, &p.out),
                residual: skip(part.residual, &p.residual),
                bias: [0, 1].map(|half| values(&mut region, bias[half], |j| bias_at(half, j))),
                w_scales: [0, 1].map(|half| values(&mut region, w_scales[half], |j| scale_at(half, j))),
                x_scales: values(&mut region, x_scales, x_scale_at),
                // Gated tiles write the halves of a cache line too far apart in time.
                stream: p.gate == Gate::None && should_stream(p.batch * p.m * p.n * p.out_dtype.size()),
            }
        }
    }

    /// Scale and bias of a vector of sums.
    #[inline(always)]
    fn scaled<S: Simd>(&self, s: S, half: usize, row: usize, col: usize, count: usize, sums: S::V) -> S::V {
        // SAFETY: both hold a value for each of the matrix's columns, and the tile lies inside it.
        unsafe {
            let mut z = sums;
            if !self.x_scales.is_empty() {
                let columns = load_at(s, self.w_scales[half].as_ptr(), col, count);
                z = s.mul(s.mul(z, s.splat(self.x_scales[row])), columns);
            }
            match self.p.has_bias {
                true => s.add(z, load_at(s, self.bias[half].as_ptr(), col, count)),
                false => z,
            }
        }
    }

    /// Factor and residual, and the one rounding.
    ///
    /// # Safety
    /// The elements must exist, and be of type `T`.
    #[inline(always)]
    unsafe fn store<S: Simd, T: CpuElement, const RESIDUAL: bool>(
        &self,
        s: S,
        row: usize,
        col: usize,
        count: usize,
        y: S::V,
    ) {
        let (p, factor) = (self.p, s.splat(self.p.scale()));
        // SAFETY: passed on.
        unsafe {
            let y = match RESIDUAL {
                true => s.fma(factor, y, matrix::<T>(self.residual, &p.residual).load(s, row, col, count)),
                false => s.mul(factor, y),
            };
            matrix::<T>(self.out, &p.out).store(s, row, col, count, y, self.stream);
        }
    }

    /// The results of a tile, with `act` on each sum.
    ///
    /// # Safety
    /// As [`Self::store`].
    #[inline(always)]
    unsafe fn with<S: Simd, T: CpuElement, const RESIDUAL: bool>(
        &self,
        s: S,
        tile: &Tile,
        act: impl Fn(S::V) -> S::V,
    ) {
        // SAFETY: the engine gives tiles of the matrix.
        unsafe {
            tile.for_vectors(
                s,
                #[inline(always)]
                |row, col, count, sums| {
                    let y = act(self.scaled(s, 0, row, col, count, sums));
                    self.store::<S, T, RESIDUAL>(s, row, col, count, y);
                },
            );
        }
    }

    /// [`Finish::with`] of a gated product.
    ///
    /// # Safety
    /// As [`Self::store`].
    #[inline(always)]
    unsafe fn with_gate<S: Simd, T: CpuElement, const RESIDUAL: bool>(
        &self,
        s: S,
        tile: &Tile,
        act: impl Fn(S::V) -> S::V,
    ) {
        // SAFETY: the engine gives tiles of the matrix.
        unsafe {
            tile.for_pairs(
                s,
                #[inline(always)]
                |row, col, count, gate, up| {
                    let y = act(self.scaled(s, 0, row, col, count, gate));
                    let y = s.mul(y, self.scaled(s, 1, row, col, count, up));
                    self.store::<S, T, RESIDUAL>(s, row, col, count, y);
                },
            );
        }
    }

    /// The results of a tile, of type `T`, with activations as precise as results of type `P` need them.
    ///
    /// # Safety
    /// As [`Self::store`].
    #[inline(always)]
    unsafe fn activated<S: Simd, T: CpuElement, P: CpuElement, const RESIDUAL: bool>(
        &self,
        s: S,
        tile: &Tile,
    ) {
        // Rows of a gate hold half as many results: too few for pairs of vectors.
        let pair = s.pair();
        // SAFETY: passed on.
        unsafe {
            match (self.p.activation, self.p.gate) {
                (None, Gate::None) => self.with::<S::Pair, T, RESIDUAL>(
                    pair,
                    tile,
                    #[inline(always)]
                    |z| z,
                ),
                (None, _) => self.with_gate::<S, T, RESIDUAL>(
                    s,
                    tile,
                    #[inline(always)]
                    |z| z,
                ),
                (Some(kind), Gate::None) => with_function!(kind, F in Gelu GeluTanh Silu Relu => {
                    self.with::<S::Pair, T, RESIDUAL>(
                        pair,
                        tile,
                        #[inline(always)]
                        |z| F::value_anywhere::<S::Pair, P>(pair, z),
                    )
                }),
                (Some(kind), _) => with_function!(kind, F in Gelu GeluTanh Silu Relu => {
                    self.with_gate::<S, T, RESIDUAL>(s, tile, #[inline(always)] |z| F::value_anywhere::<S, P>(s, z))
                }),
            }
        }
    }
}

impl Epilogue for Finish<'_> {
    // The type of the results and the residual are decided here: for each vector, it cost 15 % of a prompt.
    #[inline(always)]
    unsafe fn finish<S: Simd>(&self, s: S, tile: &Tile) {
        // A residual could cancel all but the error of an approximate activation.
        // SAFETY: passed on.
        unsafe {
            match (self.p.out_dtype, self.p.has_residual) {
                (DType::BF16, false) => self.activated::<S, bf16, bf16, false>(s, tile),
                (DType::BF16, true) => self.activated::<S, bf16, f32, true>(s, tile),
                (DType::F16, false) => self.activated::<S, f16, f16, false>(s, tile),
                (DType::F16, true) => self.activated::<S, f16, f32, true>(s, tile),
                (_, false) => self.activated::<S, f32, f32, false>(s, tile),
                (_, true) => self.activated::<S, f32, f32, true>(s, tile),
            }
        }
    }

    fn expect(&self, rows: Range<usize>, cols: Range<usize>) {
        if !self.stream {
            with_float!(self.p.out_dtype, T => matrix::<T>(self.out, &self.p.out).claim(rows, cols));
        }
    }

    fn computes(&self) -> bool {
        !matches!(self.p.activation, None | Some(Kind::Relu))
    }

    #[inline(always)]
    fn end<S: Simd>(&self, s: S) {
        if self.stream {
            s.fence();
        }
    }
}

/// The values of a function, in scratch.
fn values<'a>(region: &mut Region<'a>, len: usize, value: impl Fn(usize) -> f32) -> &'a [f32] {
    let values = region.slice(len);
    values.iter_mut().enumerate().for_each(|(i, slot)| *slot = value(i));
    values
}

/// Results, or what is added to them, as the engine takes them.
#[inline(always)]
fn matrix<T>(data: usize, strides: &Strides) -> Output<T> {
    Output { data: data as *mut T, row_stride: strides.row, col_stride: strides.col }
}

/// The addresses of one matrix of the batch.
fn part_of_batch(p: &Problem, part: &Part, batch: usize) -> Part {
    let at = |base: usize, strides: &Strides, dtype: DType| {
        base.wrapping_add(batch.wrapping_mul(strides.batch as usize).wrapping_mul(dtype.size()))
    };
    Part {
        x: at(part.x, &p.x, p.x_dtype),
        w: at(part.w, &p.w, p.w_dtype),
        out: at(part.out, &p.out, p.out_dtype),
        residual: at(part.residual, &p.residual, p.out_dtype),
        x_scale: at(part.x_scale, &p.x_scale, DType::F32),
        w_scale: at(part.w_scale, &p.w_scale, DType::F32),
        bias: part.bias,
    }
}

/// One element.
///
/// # Safety
/// It must exist.
unsafe fn value_at(base: usize, offset: isize, dtype: DType) -> f32 {
    // SAFETY: passed on.
    with_element!(dtype, T => unsafe { (*(base as *const T).wrapping_offset(offset)).to_f32() })
}
