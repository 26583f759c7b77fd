//! From products to weights and gradients of scores.

use super::pass::COLUMNS;
use super::{Call, Kind};
use crate::cpu::attention::{Grid, Request};
use crate::cpu::gemm::Blocks;
use crate::cpu::{CpuElement, Simd, math};
use crate::tensor::DType;
use half::{bf16, f16};
use std::ops::Range;

const PANEL: usize = Blocks::PANEL;

/// The columns of a block.
pub(super) struct Columns<'a> {
    call: &'a Call<'a>,
    kind: Kind,
    request: &'a Request,
    /// The query head.
    head: usize,
    /// The first column.
    first: usize,
    /// Where the columns are queries: what their scores are taken less of, and what gradients of their weights are.
    base: *mut f32,
    delta: *mut f32,
    /// What is added to the scores of a line.
    bias: *mut f32,
}

/// A line and its products with the block.
pub(super) struct Line {
    /// The key or query.
    pub number: usize,
    /// The columns of the block that it sees, masks aside.
    pub seen: Range<usize>,
    /// Scores before the scale, and gradients of weights; `panel` floats from panel to panel.
    pub products: [*mut f32; 2],
    pub panel: usize,
    /// Where weights and gradients of scores go, as rows of left operands.
    pub weights: [*mut f32; 2],
    /// They are stored in 16 bits.
    pub narrow: bool,
}

/// Lane numbers, for choosing columns.
static INDICES: [f32; 16] = [0., 1., 2., 3., 4., 5., 6., 7., 8., 9., 10., 11., 12., 13., 14., 15.];

/// Elements of 16 bits as products take them. Those of f16 multiply subnormals, those of bf16 do not.
#[inline(always)]
fn halves<T: CpuElement, S: Simd>(s: S, v: S::V) -> S::H {
    match T::DTYPE {
        DType::F16 => s.f32_to_f16(v),
        _ => s.f32_to_bf16_flushed(v),
    }
}

/// The lanes whose index is from the one to below the other; zero in all others.
#[inline(always)]
fn within<S: Simd>(s: S, v: S::V, index: S::V, [from, to]: [S::V; 2]) -> S::V {
    let below = s.select(s.lt(index, to), v, s.zero());
    s.select(s.lt(index, from), s.zero(), below)
}

impl<'a> Columns<'a> {
    /// `count` columns from `first` on.
    ///
    /// # Safety
    /// `memory` must hold three times [`COLUMNS`] floats, and the rows of the queries have their numbers.
    pub unsafe fn new(
        call: &'a Call<'a>,
        kind: Kind,
        request: &'a Request,
        head: usize,
        first: usize,
        count: usize,
        memory: *mut f32,
    ) -> Columns<'a> {
        let [base, delta, bias] = [0, 1, 2].map(|index| memory.wrapping_add(index * COLUMNS));
        if kind == Kind::Keys {
            let row = call.row(request, head, first);
            for i in 0..COLUMNS {
                // SAFETY: passed on.
                unsafe {
                    let exists = i < count;
                    *base.add(i) = if exists { *call.base.add(row + i) } else { 0.0 };
                    *delta.add(i) = if exists { *call.delta.add(row + i) } else { 0.0 };
                }
            }
        }
        Columns { call, kind, request, head, first, base, delta, bias }
    }

    /// Where the element of a mask or bias is, for a line and a column of the block.
    #[inline(always)]
    fn at(&self, grid: &Grid, line: &Line, column: usize) -> isize {
        let (query, key) = match self.kind {
            Kind::Keys => (self.first + column, line.number),
            _ => (line.number, self.first + column),
        };
        let place =
            [(self.request.batch, grid.batch), (self.head, grid.head), (query, grid.query), (key, grid.key)];
        place.iter().map(|&(index, stride)| index as isize * stride).sum()
    }

    /// Turns the products of a line with some panels into weights and gradients, zero where it does not see a column; in the
    /// pass of the bias, adds the gradients to it instead.
    ///
    /// # Safety
    /// The products must be there, and the weights have room; the tensors be as the call says.
    #[inline(always)]
    pub unsafe fn weigh<T: CpuElement, S: Simd>(&self, s: S, line: &Line, panels: Range<usize>) {
        let (call, f) = (self.call, &self.call.p.forward);
        let cap = f.softcap();
        let row = call.row(self.request, self.head, line.number);
        // SAFETY: passed on; scratch is whole panels.
        unsafe {
            if let Some((grid, dtype)) = &call.bias {
                for column in line.seen.clone() {
                    let offset = self.at(grid, line, column);
                    *self.bias.add(column) = match dtype {
                        DType::F16 => (*(grid.data as *const f16).offset(offset)).to_f32(),
                        DType::BF16 => (*(grid.data as *const bf16).offset(offset)).to_f32(),
                        _ => *(grid.data as *const f32).offset(offset),
                    };
                }
            }
            let [own_base, own_delta] = match self.kind {
                Kind::Keys => [s.zero(); 2],
                _ => [s.splat(*call.base.add(row)), s.splat(*call.delta.add(row))],
            };
            let (scale, one) = (s.splat(f.scale()), s.splat(1.0));
            let [from, to] = [line.seen.start, line.seen.end].map(|column| s.splat(column as f32));
            let dropout = f.dropout.map(|dropout| dropout.of_head(self.request.number, self.head));
            let factor = s.splat(f.dropout.map_or(1.0, |dropout| dropout.factor()));
            let mut kept = [1.0; PANEL];
            for panel in panels {
                if let Some(dropout) = &dropout {
                    let first = self.first.wrapping_add(panel.wrapping_mul(PANEL));
                    match self.kind {
                        Kind::Keys => dropout.of_queries(line.number, first, &mut kept),
                        _ => dropout.of_keys(line.number, first, &mut kept),
                    }
                }
                let [scores, gradients] = line.products.map(|at| at.wrapping_add(panel * line.panel));
                let mut i = 0;
                while i < PANEL {
                    let column = panel * PANEL + i;
                    let mut x = s.mul(s.load(scores.add(i)), scale);
                    let mut slope = one;
                    if cap != 0.0 {
                        let tanh = math::tanh(s, s.div(x, s.splat(cap)));
                        x = s.mul(s.splat(cap), tanh);
                        slope = s.fnma(tanh, tanh, one);
                    }
                    if call.bias.is_some() {
                        x = s.add(x, s.load(self.bias.add(column)));
                    }
                    let [base, delta] = match self.kind {
                        Kind::Keys => [s.load(self.base.add(column)), s.load(self.delta.add(column))],
                        _ => [own_base, own_delta],
                    };
                    let index = s.add(s.load(INDICES.as_ptr()), s.splat(column as f32));
                    let p = within(s, math::exp(s, s.sub(x, base)), index, [from, to]);
                    let (mut weight, mut change) = (p, s.load(gradients.add(i)));
                    if dropout.is_some() {
                        let counts = s.lt(s.zero(), s.load(kept.as_ptr().add(i)));
                        weight = s.select(counts, p, s.zero());
                        change = s.select(counts, s.mul(change, factor), s.zero());
                    }
                    let mut gradient = s.mul(p, s.sub(change, delta));
                    // The bias is added after the cap.
                    if self.kind != Kind::Bias {
                        gradient = s.mul(gradient, slope);
                    }
                    // Last: the slope of a column that is not seen may be NaN.
                    let gradient = within(s, gradient, index, [from, to]);
                    if self.kind == Kind::Bias {
                        s.store(gradients.add(i), gradient);
                    } else {
                        self.store::<T, S>(s, line, column, [weight, gradient]);
                    }
                    i = i.wrapping_add(S::N);
                }
            }
            if let Some(mask) = &call.mask {
                for column in line.seen.clone() {
                    if *(mask.data as *const u8).offset(self.at(mask, line, column)) == 0 {
                        self.clear(line, column);
                    }
                }
            }
            if self.kind == Kind::Bias {
                for column in line.seen.clone() {
                    let to = (call.dbias.data as *mut f32).offset(self.at(&call.dbias, line, column));
                    *to += *line.gradient(column);
                }
            }
        }
    }

    /// Stores weights and gradients from `column` on.
    ///
    /// # Safety
    /// The line must have room.
    #[inline(always)]
    unsafe fn store<T: CpuElement, S: Simd>(&self, s: S, line: &Line, column: usize, values: [S::V; 2]) {
        for (row, v) in line.weights.into_iter().zip(values) {
            // SAFETY: passed on.
            unsafe {
                if line.narrow {
                    s.store_h(row.cast::<u16>().add(column), halves::<T, S>(s, v));
                } else {
                    s.store(row.add(column), T::rounded(s, v));
                }
            }
        }
    }

    /// Makes what was stored for a column that a mask hides zero.
    ///
    /// # Safety
    /// It must have been stored.
    unsafe fn clear(&self, line: &Line, column: usize) {
        // SAFETY: passed on.
        unsafe {
            if self.kind == Kind::Bias {
                *line.gradient(column) = 0.0;
                return;
            }
            for row in line.weights {
                if line.narrow {
                    *row.cast::<u16>().add(column) = 0;
                } else {
                    *row.add(column) = 0.0;
                }
            }
        }
    }
}

impl Line {
    /// Where the gradient of a weight, or of a score, is.
    fn gradient(&self, column: usize) -> *mut f32 {
        self.products[1].wrapping_add(column / PANEL * self.panel + column % PANEL)
    }
}
