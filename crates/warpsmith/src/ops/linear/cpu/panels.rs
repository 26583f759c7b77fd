//! Products whose operands have a scale for every block of K: their sums are scaled block by block, which the general
//! matrix product cannot do.

use super::*;
use crate::cpu::array;

/// Some panels of all matrices of a batch.
pub(super) struct Panels<'a> {
    pub p: &'a Problem,
    pub part: &'a Part,
    pub panels: Range<usize>,
    pub region: Region<'a>,
}

impl Panels<'_> {
    /// Scratch of a thread.
    pub fn need(p: &Problem) -> Need {
        let Sizes { padded, w_rows, blocks } = Sizes::of(p);
        Need::of::<f32>(w_rows * padded).and::<f32>(ROWS * padded).and::<f32>(w_rows * blocks)
    }
}

impl Task for Panels<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let (p, per_matrix) = (self.p, self.p.n.div_ceil(PANEL));
        let mut work = Work::new(&mut self.region, p);
        for panel in self.panels {
            let (batch, first) = (panel / per_matrix, panel % per_matrix * PANEL);
            let columns = PANEL.min(p.n - first);
            let part = part_of_batch(p, self.part, batch);
            // SAFETY: `check` bound all shapes to these sizes and strides; panels are disjoint columns of `out`, which
            // overlaps `residual` only element for element, and each is read before it is written.
            unsafe {
                work.prepare(s, p, &part, first, columns);
                for row in (0..p.m).step_by(ROWS) {
                    work.multiply(s, p, &part, row);
                    work.finish(s, p, &part, row, first, columns);
                }
            }
        }
    }
}

/// Scratch memory of a thread, all in f32.
struct Work<'a> {
    padded: usize,
    /// Rows of `w` of the panel: gate rows and then up rows.
    w: &'a mut [f32],
    /// [`ROWS`] rows of `x`.
    x: &'a mut [f32],
    /// Scale of each of those rows of `w` in each block of K, of which there are none if K is empty; one block unless
    /// scaled by block.
    w_scales: &'a mut [f32],
    bias: [f32; 2 * PANEL],
    sums: [[f32; 2 * PANEL]; ROWS],
    w_rows: usize,
    blocks: usize,
}

/// Sizes of what a thread works in.
struct Sizes {
    /// Elements of a row, padded with zeros to whole vectors.
    padded: usize,
    /// Rows of `w` of a panel; a multiple of [`COLUMNS`], the last ones may be zeros.
    w_rows: usize,
    /// Blocks of K that have a scale.
    blocks: usize,
}

impl Sizes {
    fn of(p: &Problem) -> Sizes {
        let gates = if p.gate == Gate::None { 1 } else { 2 };
        let blocks = if p.dequant == Dequant::Blocks { p.k.div_ceil(SCALE_BLOCK) } else { 1 };
        Sizes { padded: p.k.next_multiple_of(64), w_rows: gates * PANEL, blocks }
    }
}

impl<'a> Work<'a> {
    fn new(region: &mut Region<'a>, p: &Problem) -> Work<'a> {
        let Sizes { padded, w_rows, blocks } = Sizes::of(p);
        Work {
            padded,
            w: region.filled(w_rows * padded, 0.0),
            x: region.filled(ROWS * padded, 0.0),
            w_scales: region.filled(w_rows * blocks, 1.0),
            bias: [0.0; 2 * PANEL],
            sums: [[0.0; 2 * PANEL]; ROWS],
            w_rows,
            blocks,
        }
    }

    /// The rows of `w` of a panel, with their scales and biases.
    ///
    /// # Safety
    /// `part` must hold the tensors of `p`, and `columns` from `first` on must exist.
    #[inline(always)]
    unsafe fn prepare<S: Simd>(&mut self, s: S, p: &Problem, part: &Part, first: usize, columns: usize) {
        for slot in 0..self.w_rows {
            let (half, column) = (slot / PANEL, slot % PANEL);
            let to = self.w[slot * self.padded..].as_mut_ptr();
            if column >= columns {
                // Leftovers of an earlier panel may be NaN; sums with them are not used, but cost time.
                self.w[slot * self.padded..][..self.padded].fill(0.0);
                continue;
            }
            let j = first + column;
            let row = if half == 0 { p.gate_row(j) } else { p.up_row(j) };
            // SAFETY: the row exists, and `to` has room for `k` elements.
            unsafe {
                with_element!(p.w_dtype, T => widen::<S, T>(s, part.w, row as isize * p.w.row, p.w.col, p.k, to));
                if p.has_bias {
                    self.bias[slot] = value_at(part.bias, row as isize * p.bias_step, p.out_dtype);
                }
                if p.dequant != Dequant::None {
                    let at = if p.dequant == Dequant::Blocks { row / SCALE_BLOCK } else { row } as isize;
                    for block in 0..self.blocks {
                        let offset = at * p.w_scale.row + block as isize * p.w_scale.col;
                        self.w_scales[slot * self.blocks + block] =
                            value_at(part.w_scale, offset, DType::F32);
                    }
                }
            }
        }
    }

    /// The sums of up to [`ROWS`] rows of `x` with the panel's rows of `w`, scaled.
    ///
    /// # Safety
    /// `part` must hold the tensors of `p`, and `first` be a row of `x`.
    #[inline(always)]
    unsafe fn multiply<S: Simd>(&mut self, s: S, p: &Problem, part: &Part, first: usize) {
        let rows = ROWS.min(p.m - first);
        for (r, to) in self.x.chunks_exact_mut(self.padded.max(1)).enumerate().take(rows) {
            let offset = (first + r) as isize * p.x.row;
            // SAFETY: the row exists, and `to` has room for `k` elements.
            unsafe {
                with_element!(p.x_dtype, T => widen::<S, T>(s, part.x, offset, p.x.col, p.k, to.as_mut_ptr()));
            }
        }
        let x_scale = |row: usize, block: usize| {
            let offset = (first + row) as isize * p.x_scale.row + block as isize * p.x_scale.col;
            // SAFETY: `check` bound the scales' shapes.
            unsafe { value_at(part.x_scale, offset, DType::F32) }
        };
        for column in (0..self.w_rows).step_by(COLUMNS) {
            let mut totals = [[0f32; COLUMNS]; ROWS];
            for block in 0..self.blocks {
                let range = match p.dequant {
                    Dequant::Blocks => block * SCALE_BLOCK..((block + 1) * SCALE_BLOCK).min(self.padded),
                    _ => 0..self.padded,
                };
                // SAFETY: both hold whole rows of `padded` elements, and the range is a part of that.
                let sums = unsafe {
                    let w = self.w.as_ptr().add(column * self.padded);
                    tile(s, self.x.as_ptr(), w, self.padded, range)
                };
                for r in 0..rows {
                    for c in 0..COLUMNS {
                        let scaled = match p.dequant {
                            Dequant::None => sums[r][c],
                            _ => {
                                sums[r][c]
                                    * x_scale(r, block)
                                    * self.w_scales[(column + c) * self.blocks + block]
                            }
                        };
                        totals[r][c] = if block == 0 { scaled } else { totals[r][c] + scaled };
                    }
                }
            }
            for (sums, totals) in self.sums.iter_mut().zip(&totals) {
                sums[column..column + COLUMNS].copy_from_slice(totals);
            }
        }
    }

    /// From the sums to the result.
    ///
    /// # Safety
    /// `part` must hold the tensors of `p`, `row` be a row, and `columns` from `first` on exist.
    #[inline(always)]
    unsafe fn finish<S: Simd>(
        &self,
        s: S,
        p: &Problem,
        part: &Part,
        row: usize,
        first: usize,
        columns: usize,
    ) {
        for (r, sums) in self.sums.iter().enumerate().take(ROWS.min(p.m - row)) {
            let at = |strides: &Strides| (row + r) as isize * strides.row + first as isize * strides.col;
            let mut residual = [0f32; PANEL];
            // SAFETY: passed on.
            unsafe {
                if p.has_residual {
                    let from = at(&p.residual);
                    with_float!(p.out_dtype, T => widen::<S, T>(
                        s, part.residual, from, p.residual.col, columns, residual.as_mut_ptr()));
                }
                let line = Line { p, sums, bias: &self.bias, residual: &residual };
                let result = match p.out_dtype {
                    // A residual could cancel all but the error of an approximate activation.
                    DType::BF16 if !p.has_residual => line.result::<S, bf16>(s, columns),
                    DType::F16 if !p.has_residual => line.result::<S, f16>(s, columns),
                    _ => line.result::<S, f32>(s, columns),
                };
                let to = at(&p.out);
                with_float!(p.out_dtype, T => narrow::<S, T>(s, &result, part.out, to, p.out.col, columns));
            }
        }
    }
}

/// The sums of one row of a panel and what else makes its result.
struct Line<'a> {
    p: &'a Problem,
    sums: &'a [f32; 2 * PANEL],
    bias: &'a [f32; 2 * PANEL],
    residual: &'a [f32; PANEL],
}

impl Line<'_> {
    /// The result before it is rounded; the activation as accurate as `T` can tell.
    #[inline(always)]
    fn result<S: Simd, T: CpuElement>(&self, s: S, columns: usize) -> [f32; PANEL] {
        match self.p.activation {
            None => self.with(
                s,
                columns,
                #[inline(always)]
                |z| z,
            ),
            Some(kind) => with_function!(kind, F in Gelu GeluTanh Silu Relu => {
                self.with(s, columns, #[inline(always)] |z| F::value_anywhere::<S, T>(s, z))
            }),
        }
    }

    #[inline(always)]
    fn with<S: Simd>(&self, s: S, columns: usize, act: impl Fn(S::V) -> S::V) -> [f32; PANEL] {
        let mut result = [0f32; PANEL];
        let factor = s.splat(self.p.scale());
        for i in (0..columns).step_by(S::N) {
            // SAFETY: a panel is a whole number of vectors, and the arrays hold one panel or two.
            unsafe {
                let biased = |i: usize| {
                    let sum = s.load(self.sums.as_ptr().add(i));
                    if self.p.has_bias { s.add(sum, s.load(self.bias.as_ptr().add(i))) } else { sum }
                };
                let mut y = act(biased(i));
                if self.p.gate != Gate::None {
                    y = s.mul(y, biased(PANEL + i));
                }
                y = match self.p.has_residual {
                    true => s.fma(factor, y, s.load(self.residual.as_ptr().add(i))),
                    false => s.mul(factor, y),
                };
                s.store(result.as_mut_ptr().add(i), y);
            }
        }
        result
    }
}

/// [`ROWS`] x [`COLUMNS`] sums of products over a range of K.
///
/// # Safety
/// `x` and `w` must hold that many rows of `padded` elements, a multiple of 64, and `range` be whole vectors of those.
#[inline(always)]
unsafe fn tile<S: Simd>(
    s: S,
    x: *const f32,
    w: *const f32,
    padded: usize,
    range: Range<usize>,
) -> [[f32; COLUMNS]; ROWS] {
    let mut sums = [[s.zero(); COLUMNS]; ROWS];
    let mut i = range.start;
    while i < range.end {
        // SAFETY: passed on.
        unsafe {
            let columns: [S::V; COLUMNS] = array(
                #[inline(always)]
                |c| s.load(w.add(c.wrapping_mul(padded).wrapping_add(i))),
            );
            for (r, sums) in sums.iter_mut().enumerate() {
                let row = s.load(x.add(r.wrapping_mul(padded).wrapping_add(i)));
                for (sum, column) in sums.iter_mut().zip(columns) {
                    *sum = s.fma(row, column, *sum);
                }
            }
        }
        i = i.wrapping_add(S::N);
    }
    let mut totals = [[0f32; COLUMNS]; ROWS];
    for (totals, sums) in totals.iter_mut().zip(sums) {
        for (total, sum) in totals.iter_mut().zip(sums) {
            *total = s.reduce_add(sum);
        }
    }
    totals
}

/// `n` elements `step` apart in f32, one after the other.
///
/// # Safety
/// The elements must exist from `offset` on at `base`, and `to` have room for `n`.
#[inline(always)]
unsafe fn widen<S: Simd, T: CpuElement>(
    s: S,
    base: usize,
    offset: isize,
    step: isize,
    n: usize,
    to: *mut f32,
) {
    let from = (base as *const T).wrapping_offset(offset);
    // SAFETY: passed on.
    unsafe {
        if step == 1 {
            for_vectors::<S>(
                n,
                #[inline(always)]
                |i, count| match count == S::N {
                    true => s.store(to.add(i), T::load(s, from.add(i))),
                    false => s.store_partial(to.add(i), T::load_partial(s, from.add(i), count), count),
                },
            );
        } else {
            for i in 0..n {
                *to.add(i) = (*from.offset(i as isize * step)).to_f32();
            }
        }
    }
}

/// Undoes [`widen`], rounding.
///
/// # Safety
/// The elements must exist from `offset` on at `base`.
#[inline(always)]
unsafe fn narrow<S: Simd, T: CpuElement>(
    s: S,
    from: &[f32; PANEL],
    base: usize,
    offset: isize,
    step: isize,
    n: usize,
) {
    let to = (base as *mut T).wrapping_offset(offset);
    let mut rounded = [T::from_f32(0.0); PANEL];
    // SAFETY: passed on; a panel is a whole number of vectors.
    unsafe {
        for i in (0..PANEL).step_by(S::N) {
            T::store(s, rounded.as_mut_ptr().add(i), s.load(from.as_ptr().add(i)));
        }
        if step == 1 {
            std::ptr::copy_nonoverlapping(rounded.as_ptr(), to, n);
        } else {
            for (i, value) in rounded[..n].iter().enumerate() {
                *to.offset(i as isize * step) = *value;
            }
        }
    }
}
