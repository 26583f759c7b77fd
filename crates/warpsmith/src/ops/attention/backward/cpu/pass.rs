//! Jobs: blocks of one side go past some lines of the other.
//!
//! Lines are keys or queries, in *bands* of as many as one product takes; they are left operands. A block of the other side,
//! the columns, is packed once for all bands, twice over: as columns of the products that give scores and gradients of weights,
//! and as what the weights multiply.

use super::weights::{Columns, Line};
use super::{Call, Job, Kind};
use crate::cpu::attention::{Heads, Request};
use crate::cpu::gemm::{BlockProduct, Blocks, Isa, Matrix, Place};
use crate::cpu::scratch::{Need, Region};
use crate::cpu::{CpuElement, Simd, Task};
use crate::ops::attention::problem::Problem as Forward;
use std::marker::PhantomData;
use std::ops::Range;

const PANEL: usize = Blocks::PANEL;
/// Columns of a block: whole panels.
pub(super) const COLUMNS: usize = 4 * PANEL;
/// Bands of a job.
const BANDS: usize = 4;

/// Sizes of what a job works in, in units of 32 bits.
#[derive(Clone, Copy)]
pub(super) struct Space {
    /// Lines of a band, and of a job.
    rows: usize,
    pub lines: usize,
    head_dim: usize,
    /// Panels of a head, and units of one.
    panels: usize,
    units: usize,
    /// Units of the columns of a block.
    column_units: usize,
    per_unit: usize,
    /// Operands that weights multiply: of `dk` or `dq`, and of `dv`.
    sums: usize,
}

impl Space {
    pub fn new(f: &Forward, blocks: &Blocks, kind: Kind) -> Space {
        Space {
            rows: blocks.rows(),
            lines: BANDS * blocks.rows(),
            head_dim: f.head_dim,
            panels: f.head_dim.div_ceil(PANEL),
            units: blocks.units(f.head_dim),
            column_units: COLUMNS / blocks.per_unit(),
            per_unit: blocks.per_unit(),
            sums: match kind {
                Kind::Keys => 2,
                Kind::Queries => 1,
                Kind::Bias => 0,
            },
        }
    }

    fn left(&self) -> usize {
        self.rows * Blocks::ROW
    }

    fn right(&self) -> usize {
        COLUMNS * self.units
    }

    fn values(&self) -> usize {
        self.panels * PANEL * self.column_units
    }

    fn sum(&self) -> usize {
        self.panels * self.rows * PANEL
    }

    /// All of it.
    fn total(&self) -> usize {
        let operands = 2 * BANDS * self.left() + 2 * self.right() + self.sums * self.values();
        let results = self.sums * BANDS * self.sum() + 2 * self.rows * COLUMNS + 2 * self.left();
        operands + results + 3 * COLUMNS
    }

    pub fn need(&self) -> Need {
        Need::of::<f32>(self.total())
    }
}

/// Where everything is that a job works in.
struct Memory {
    /// The lines: what scores are products of, and what gradients of weights are.
    left: [*mut f32; 2],
    right: [*mut f32; 2],
    values: [*mut f32; 2],
    sums: [*mut f32; 2],
    /// Products of a band with a block, panel by panel: scores, and gradients of weights.
    products: [*mut f32; 2],
    /// Weights, and gradients of scores, as rows of left operands.
    weights: [*mut f32; 2],
    columns: *mut f32,
}

impl Memory {
    fn new(space: &Space, region: &mut Region<'_>) -> Memory {
        let mut next = region.slice::<f32>(space.total()).as_mut_ptr();
        let mut take = |len: usize| {
            let first = next;
            next = first.wrapping_add(len);
            first
        };
        let mut two = |len: usize| [take(len), take(len)];
        let left = two(BANDS * space.left());
        let right = two(space.right());
        let products = two(space.rows * COLUMNS);
        let weights = two(space.left());
        let mut some = |len: usize| [0, 1].map(|index| take(if index < space.sums { len } else { 0 }));
        let values = some(space.values());
        let sums = some(BANDS * space.sum());
        Memory { left, right, values, sums, products, weights, columns: take(3 * COLUMNS) }
    }
}

/// Computes jobs.
pub(super) struct Compute<'a, T> {
    pub call: &'a Call<'a>,
    pub kind: Kind,
    pub jobs: &'a [Job],
    pub space: Space,
    pub region: Region<'a>,
    pub t: PhantomData<T>,
}

impl<T: CpuElement> Task for Compute<'_, T> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let blocks = Blocks::new(Isa::of_tier(self.call.tier), T::DTYPE);
        let memory = Memory::new(&self.space, &mut self.region);
        let mut work = Work { call: self.call, kind: self.kind, space: self.space, memory, blocks };
        for job in self.jobs {
            // SAFETY: the memory holds the space; no two jobs write the same elements.
            unsafe {
                match self.kind {
                    Kind::Bias => work.bias::<T, S>(s, job),
                    _ => work.gradients::<T, S>(s, job),
                }
            }
        }
    }
}

/// What a thread works with.
struct Work<'a> {
    call: &'a Call<'a>,
    kind: Kind,
    space: Space,
    memory: Memory,
    blocks: Blocks,
}

impl Work<'_> {
    /// Some lines of a head, as a matrix.
    fn matrix<T: CpuElement>(&self, heads: &Heads, place: [usize; 3], rows: usize) -> Matrix {
        Matrix {
            data: heads.at(size_of::<T>(), place) as *const u8,
            dtype: T::DTYPE,
            rows,
            k: self.space.head_dim,
            row_stride: heads.token,
            k_stride: heads.dim,
        }
    }

    /// `dk` and `dv` of some keys, or `dq` of some queries.
    ///
    /// # Safety
    /// The memory must hold the space, and the job be one of the call's.
    #[inline(always)]
    unsafe fn gradients<T: CpuElement, S: Simd>(&mut self, s: S, job: &Job) {
        let (call, f) = (self.call, &self.call.p.forward);
        let request = &call.requests[job.request];
        let group = f.group();
        let mut has_sums = [false; BANDS];
        // SAFETY: passed on.
        unsafe {
            if self.kind == Kind::Keys {
                self.pack_lines::<T>(request, [&call.k, &call.v], request.first_key, job.head, &job.lines);
                for head in job.head * group..(job.head + 1) * group {
                    self.walk::<T, S>(s, request, head, &job.lines, &mut has_sums);
                }
            } else {
                self.pack_lines::<T>(
                    request,
                    [&call.q, &call.dout],
                    request.first_query,
                    job.head,
                    &job.lines,
                );
                self.walk::<T, S>(s, request, job.head, &job.lines, &mut has_sums);
            }
            let (scale, kept) = (f.scale(), f.dropout.map_or(1.0, |dropout| dropout.factor()));
            match self.kind {
                Kind::Keys => {
                    self.store::<T, S>(s, 0, &call.dk, request.first_key, request, job, &has_sums, scale);
                    self.store::<T, S>(s, 1, &call.dv, request.first_key, request, job, &has_sums, kept);
                }
                _ => self.store::<T, S>(s, 0, &call.dq, request.first_query, request, job, &has_sums, scale),
            }
        }
    }

    /// `dbias` of some queries.
    ///
    /// # Safety
    /// As for [`Self::gradients`].
    #[inline(always)]
    unsafe fn bias<T: CpuElement, S: Simd>(&mut self, s: S, job: &Job) {
        let (call, p) = (self.call, self.call.p);
        let all =
            |size: usize, index: usize, count: usize| if size == 1 { 0..count } else { index..index + 1 };
        for index in all(p.bias_batch, job.request, call.requests.len()) {
            let request = &call.requests[index];
            for head in all(p.bias_heads, job.head, p.forward.num_heads) {
                // SAFETY: passed on.
                unsafe {
                    self.pack_lines::<T>(
                        request,
                        [&call.q, &call.dout],
                        request.first_query,
                        head,
                        &job.lines,
                    );
                    self.walk::<T, S>(s, request, head, &job.lines, &mut [false; BANDS]);
                }
            }
        }
    }

    /// Packs the lines of a job as left operands. `first` is the request's first token, on the side of the lines.
    ///
    /// # Safety
    /// As for [`Self::gradients`].
    unsafe fn pack_lines<T: CpuElement>(
        &self,
        request: &Request,
        operands: [&Heads; 2],
        first: usize,
        head: usize,
        lines: &Range<usize>,
    ) {
        for (heads, to) in operands.into_iter().zip(self.memory.left) {
            let matrix = self.matrix::<T>(heads, [request.batch, first + lines.start, head], lines.len());
            // SAFETY: passed on; bands follow each other.
            unsafe { self.blocks.pack_rows(&matrix, 0..lines.len(), to.cast()) };
        }
    }

    /// The columns that a line sees, masks aside: both ends ascend with the line.
    fn seen(&self, request: &Request, line: usize) -> Range<usize> {
        let f = &self.call.p.forward;
        if self.kind != Kind::Keys {
            return f.keys(line, request.q_len, request.kv_len);
        }
        let shift = request.kv_len as isize - request.q_len as isize;
        let own = line as isize - shift;
        let first = if f.causal { own.clamp(0, request.q_len as isize) as usize } else { 0 };
        let end = own.saturating_add_unsigned(f.window).saturating_add(1).clamp(0, request.q_len as isize);
        let end = if f.window == 0 { request.q_len } else { end as usize };
        first.min(end)..end
    }

    /// Lets all columns of a query head that the lines see go past them.
    ///
    /// # Safety
    /// As for [`Self::gradients`]; the lines must be packed.
    #[inline(always)]
    unsafe fn walk<T: CpuElement, S: Simd>(
        &mut self,
        s: S,
        request: &Request,
        head: usize,
        lines: &Range<usize>,
        has_sums: &mut [bool; BANDS],
    ) {
        let (call, f, space) = (self.call, &self.call.p.forward, self.space);
        let union = |lines: Range<usize>| {
            self.seen(request, lines.start).start..self.seen(request, lines.end - 1).end
        };
        let bands = lines.len().div_ceil(space.rows);
        let band_lines = |band: usize| {
            let first = lines.start + band * space.rows;
            first..(first + space.rows).min(lines.end)
        };
        let mut seen = [(0, 0); BANDS];
        for (band, seen) in seen.iter_mut().enumerate().take(bands) {
            let range = union(band_lines(band));
            *seen = (range.start, range.end);
        }
        let all = union(lines.clone());
        let (of_columns, first_token, column_head, len) = match self.kind {
            Kind::Keys => ([&call.q, &call.dout], request.first_query, head, request.q_len),
            _ => ([&call.k, &call.v], request.first_key, head / f.group(), request.kv_len),
        };
        let mut block = all.start / COLUMNS * COLUMNS;
        while block < all.end {
            let count = COLUMNS.min(len - block);
            // SAFETY: passed on; the columns are the request's.
            unsafe {
                self.pack_block::<T>(request, of_columns, first_token + block, column_head, count);
                let columns = Columns::new(call, self.kind, request, head, block, count, self.memory.columns);
                for (band, &(from, to)) in seen.iter().enumerate().take(bands) {
                    let (from, to) = (from.max(block), to.min(block + COLUMNS));
                    if from >= to {
                        continue;
                    }
                    let panels = (from - block) / PANEL..(to - block).div_ceil(PANEL);
                    let rows = band_lines(band);
                    self.multiply(band, rows.len(), &panels);
                    for (r, line) in rows.clone().enumerate() {
                        let seen = self.seen(request, line);
                        let line = Line {
                            number: line,
                            seen: seen.start.saturating_sub(block)..seen.end.saturating_sub(block).min(count),
                            products: self.memory.products.map(|at| at.wrapping_add(r * PANEL)),
                            panel: space.rows * PANEL,
                            weights: self.memory.weights.map(|at| at.wrapping_add(r * Blocks::ROW)),
                            narrow: space.per_unit == 2,
                        };
                        columns.weigh::<T, S>(s, &line, panels.clone());
                    }
                    self.accumulate(band, rows.len(), &panels, has_sums[band]);
                    has_sums[band] = true;
                }
            }
            block += COLUMNS;
        }
    }

    /// Packs a block of columns.
    ///
    /// # Safety
    /// The tokens must be there.
    unsafe fn pack_block<T: CpuElement>(
        &self,
        request: &Request,
        operands: [&Heads; 2],
        token: usize,
        head: usize,
        count: usize,
    ) {
        let space = &self.space;
        for (index, heads) in operands.into_iter().enumerate() {
            let matrix = self.matrix::<T>(heads, [request.batch, token, head], count);
            let columns = 0..count.next_multiple_of(PANEL);
            let place = Place { columns, units: 0..space.units, panel: space.units };
            // SAFETY: passed on; the panels hold all columns of a block.
            unsafe { self.blocks.pack_panels(&matrix, 0, &place, self.memory.right[index].cast()) };
            if index < space.sums {
                let turned = Matrix {
                    rows: matrix.k,
                    k: matrix.rows,
                    row_stride: matrix.k_stride,
                    k_stride: matrix.row_stride,
                    ..matrix
                };
                let units = 0..space.column_units;
                let place = Place { columns: 0..space.panels * PANEL, units, panel: space.column_units };
                // SAFETY: as above.
                unsafe { self.blocks.pack_panels(&turned, 0, &place, self.memory.values[index].cast()) };
            }
        }
    }

    /// The products of a band with some panels of the block.
    ///
    /// # Safety
    /// Both must be packed.
    #[inline(always)]
    unsafe fn multiply(&mut self, band: usize, rows: usize, panels: &Range<usize>) {
        let Space { units, .. } = self.space;
        for index in 0..2 {
            for panel in panels.clone() {
                let product = BlockProduct {
                    left: self.memory.left[index].wrapping_add(band * self.space.left()).cast(),
                    rows,
                    right: self.memory.right[index].wrapping_add(panel * PANEL * units).cast(),
                    right_width: PANEL as isize,
                    right_ahead: Blocks::PANEL_AHEAD,
                    cols: PANEL,
                    units,
                    out: self.memory.products[index].wrapping_add(panel * self.space.rows * PANEL),
                    resume: false,
                };
                // SAFETY: passed on.
                unsafe { self.blocks.multiply(&product) };
            }
        }
    }

    /// Adds the products of what `weigh` left with the columns to the sums of a band.
    ///
    /// # Safety
    /// As for [`Self::multiply`], with weights for the panels.
    #[inline(always)]
    unsafe fn accumulate(&mut self, band: usize, rows: usize, panels: &Range<usize>, resume: bool) {
        let space = self.space;
        let per_panel = PANEL / space.per_unit;
        let from = panels.start * per_panel;
        for index in 0..space.sums {
            // Gradients of scores multiply the first operand, weights the second.
            let left = self.memory.weights[1 - index].cast::<u32>().wrapping_add(from);
            for column in 0..space.panels {
                let right =
                    self.memory.values[index].wrapping_add((column * space.column_units + from) * PANEL);
                let sums =
                    self.memory.sums[index].wrapping_add(band * space.sum() + column * space.rows * PANEL);
                let product = BlockProduct {
                    left,
                    rows,
                    right: right.cast(),
                    right_width: PANEL as isize,
                    right_ahead: Blocks::PANEL_AHEAD,
                    cols: PANEL.min(space.head_dim - column * PANEL),
                    units: panels.len() * per_panel,
                    out: sums,
                    resume,
                };
                // SAFETY: passed on.
                unsafe { self.blocks.multiply(&product) };
            }
        }
    }

    /// Writes sums times `factor` to the lines of a job.
    ///
    /// # Safety
    /// The tensor must have the lines, which are this job's alone.
    #[inline(always)]
    #[allow(clippy::too_many_arguments)]
    unsafe fn store<T: CpuElement, S: Simd>(
        &self,
        s: S,
        index: usize,
        heads: &Heads,
        first: usize,
        request: &Request,
        job: &Job,
        has_sums: &[bool; BANDS],
        factor: f32,
    ) {
        let space = &self.space;
        for (number, line) in job.lines.clone().enumerate() {
            let (band, r) = (number / space.rows, number % space.rows);
            let to = heads.at(size_of::<T>(), [request.batch, first + line, job.head]) as *mut T;
            let mut column = 0;
            while column < space.head_dim {
                let place = (column / PANEL * space.rows + r) * PANEL + column % PANEL;
                let at = self.memory.sums[index].wrapping_add(band * space.sum() + place);
                // SAFETY: the sums are whole panels, and the tensor has the line.
                unsafe {
                    let sum = if has_sums[band] { s.load(at) } else { s.zero() };
                    let value = s.mul(sum, s.splat(factor));
                    if heads.dim == 1 {
                        T::store(s, to.add(column), value);
                    } else {
                        s.store(at, value);
                        for i in 0..S::N {
                            *to.offset((column + i) as isize * heads.dim) = T::from_f32(*at.add(i));
                        }
                    }
                }
                column = column.wrapping_add(S::N);
            }
        }
    }
}
