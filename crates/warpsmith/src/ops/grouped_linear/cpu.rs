//! `grouped_linear` on the CPU. Rows of `x` are multiplied where they are; with an index they are gathered first, and with a
//! scale of rows the results are finished in a pass of their own, both part by part.

use super::problem::Numbers;
use super::{BIAS, COUNTS, INDEX, OUT, Problem, RESIDUAL, ROW_SCALE, SPEC, W, X};
use crate::cpu::rows::{DenseRows, for_vectors, index_at, load_at, store_at, with_float};
use crate::cpu::scratch::{self, Need, Region};
use crate::cpu::{CpuElement, Simd, Task, Tier, dispatch, parallel_for, parallel_for_with_scratch};
use crate::error::{Error, Result};
use crate::op::{Kernel, Launch};
use crate::ops::grouped::cpu::{Group, multiply};
use crate::ops::linear::problem::{Part, Problem as Product, Strides};
use std::marker::PhantomData;
use std::ops::Range;

/// The kernel of a tier.
pub(super) const fn kernel(name: &'static str, tier: Tier) -> Kernel<Problem> {
    Kernel::cpu(name, tier, run).configured(|p, _| p.product.arithmetic())
}

/// The fewest elements a thread moves: less does not pay for waking a thread.
const GRAIN: usize = 1 << 14;
/// Bytes of gathered rows and unfinished results, at most, unless a row alone has more.
const PART_BYTES: usize = 1 << 27;
/// In place of the row of `x` where there is none.
const NONE: usize = usize::MAX;

/// The end of each group's rows; an error if a count is negative or there are more rows than `rows`.
pub(super) fn read_counts(
    op: &'static str,
    address: usize,
    step: isize,
    rows: usize,
    ends: &mut [usize],
) -> Result<()> {
    let mut end = 0;
    for (group, to) in ends.iter_mut().enumerate() {
        // SAFETY: an element of the tensor, whose type is i32.
        let count = unsafe { *(address as *const i32).offset(group as isize * step) };
        let more = usize::try_from(count)
            .map_err(|_| Error::argument(op, "counts", "0 or more", format!("{count} at {group}")))?;
        end += more;
        if end > rows {
            let expected = format!("at most rows={rows} in all");
            return Err(Error::argument(op, "counts", expected, format!("{end} up to group {group}")));
        }
        *to = end;
    }
    Ok(())
}

/// The rows of `x`, or [`NONE`]; an error if `x` has no such row.
fn read_index(p: &Problem, numbers: Numbers, address: usize, to: &mut [usize]) -> Result<()> {
    for (row, to) in to.iter_mut().enumerate() {
        // SAFETY: an element of the tensor, which has this type.
        let from = unsafe { index_at(address, numbers.dtype, row.wrapping_mul(numbers.step as usize)) };
        *to = match from {
            -1 => NONE,
            _ => usize::try_from(from).ok().filter(|&from| from < p.x_rows).ok_or_else(|| {
                let expected = format!("-1 or rows from 0 to below x_rows={}", p.x_rows);
                Error::argument(SPEC.name, "index", expected, format!("{from} at {row}"))
            })?,
        };
    }
    Ok(())
}

fn run(launch: &Launch<'_, Problem>) -> Result<()> {
    let (p, args) = (launch.problem, launch.args);
    let indices = if p.index.is_some() { p.rows } else { 0 };
    scratch::with(Need::of::<usize>(p.groups).and::<usize>(indices), |mut region| {
        let (ends, index) = (region.slice(p.groups), region.slice(indices));
        read_counts(SPEC.name, args.address(COUNTS), p.counts_step, p.rows, ends)?;
        if let Some(numbers) = p.index {
            read_index(p, numbers, args.address(INDEX), index)?;
        }
        let used = ends.last().copied().unwrap_or(0);
        // SAFETY: `check` bound the result to these sizes and strides.
        unsafe { clear(&p.product, args.address(OUT), used..p.rows) };
        let row = if p.index.is_some() { p.product.k.saturating_mul(p.product.x_dtype.size()) } else { 0 };
        let results = if p.row_scale.is_some() { p.product.n.saturating_mul(size_of::<f32>()) } else { 0 };
        let most = match row.saturating_add(results) {
            0 => used.max(1),
            bytes => (PART_BYTES / bytes).max(1),
        };
        for first in (0..used).step_by(most) {
            let rows = first..used.min(first + most);
            let need = Need::of::<u8>(rows.len() * row).and::<u8>(rows.len() * results);
            scratch::with(need.and::<Group>(p.groups), |mut region| {
                let x = region.slice::<u8>(rows.len() * row).as_mut_ptr() as usize;
                let y = region.slice::<u8>(rows.len() * results).as_mut_ptr() as usize;
                compute(&Rows { launch, ends, index, rows, x, y }, region);
            });
        }
        Ok(())
    })
}

/// Writes rows of zeros.
///
/// # Safety
/// `out` must hold them, as `p` says.
pub(super) unsafe fn clear(p: &Product, out: usize, rows: Range<usize>) {
    let (out, size) = (out, p.out_dtype.size());
    parallel_for(rows.len(), GRAIN.div_ceil(p.n.max(1)), |part| {
        for row in part {
            let row = (rows.start + row) as isize * p.out.row;
            for j in 0..p.n as isize {
                let to = out.wrapping_add_signed((row + j * p.out.col) * size as isize) as *mut u8;
                // SAFETY: passed on. Zero is zero in every type.
                unsafe { std::ptr::write_bytes(to, 0, size) };
            }
        }
    });
}

/// Some rows of the result, and what is made of them on the way.
struct Rows<'a> {
    launch: &'a Launch<'a, Problem>,
    ends: &'a [usize],
    index: &'a [usize],
    rows: Range<usize>,
    /// Gathered rows of `x`, if there is an index.
    x: usize,
    /// Unfinished results, if rows have a scale.
    y: usize,
}

fn compute(part: &Rows<'_>, mut region: Region<'_>) {
    let (p, args, first) = (part.launch.problem, part.launch.args, part.rows.start);
    let mut product = p.product;
    let dense = |columns: usize| Strides { batch: 0, row: columns as isize, col: 1 };
    let row_at = |base: usize, strides: &Strides, size: usize, row: usize| {
        base.wrapping_add_signed(row as isize * strides.row * size as isize)
    };
    let size = product.x_dtype.size();
    if p.index.is_some() {
        product.x = dense(product.k);
        parallel_for(part.rows.len(), GRAIN.div_ceil(product.k.max(1)), |rows| part.gather(rows));
    }
    if p.row_scale.is_some() {
        product.out = dense(product.n);
        product.out_dtype = crate::tensor::DType::F32;
        (product.has_residual, product.scale_bits) = (false, 1f32.to_bits());
    }
    // A bias has the type of the result. Where that is not the one of the sums, it is added later.
    let mut groups = region.list::<Group>(p.groups);
    let mut start = 0;
    for (group, &end) in part.ends.iter().enumerate() {
        let (from, to) = (start.max(part.rows.start), end.min(part.rows.end));
        start = end;
        if from >= to {
            continue;
        }
        let (x, x_row) = if p.index.is_some() { (part.x, from - first) } else { (args.address(X), from) };
        let (out, out_row) =
            if p.row_scale.is_some() { (part.y, from - first) } else { (args.address(OUT), from) };
        let at = |base: usize, apart: isize, size: usize| {
            base.wrapping_add_signed(group as isize * apart * size as isize)
        };
        let w = at(args.address(W), p.w.group, product.w_dtype.size());
        let operands = Part {
            bias: p.bias.map_or(0, |[apart, _]| at(args.address(BIAS), apart, size)),
            residual: row_at(args.address(RESIDUAL), &product.residual, size, from),
            ..Part::product(
                row_at(x, &product.x, size, x_row),
                w,
                row_at(out, &product.out, product.out_dtype.size(), out_row),
            )
        };
        groups.push(Group { rows: to - from, depth: product.k, product: 0, part: operands });
    }
    // SAFETY: `check` bound all tensors to the product's sizes and strides, counts and index are inside them, and scratch has
    // room for the rows.
    unsafe { multiply(&[product], &groups, part.launch.tier) };
    if let Some(numbers) = p.row_scale {
        let steps = [product_step(&p.product.residual, &p.product), p.product.out.col];
        let need = DenseRows::<f32>::need(p.product.out_dtype, p.product.n, &steps);
        parallel_for_with_scratch(
            part.rows.len(),
            GRAIN.div_ceil(p.product.n.max(1)),
            need,
            |rows, region| {
                with_float!(p.product.out_dtype, T => {
                    dispatch(part.launch.tier, Finish::<T> { part, numbers, steps, rows, region, t: PhantomData });
                });
            },
        );
    }
}

/// The stride along a row of the residual; of one that is not there, that of a dense row.
fn product_step(residual: &Strides, p: &Product) -> isize {
    if p.has_residual { residual.col } else { 1 }
}

impl Rows<'_> {
    /// Copies rows of `x` to their places.
    fn gather(&self, rows: Range<usize>) {
        let (p, x) = (self.launch.problem, self.launch.args.address(X));
        let (Strides { row, col, .. }, k, size) = (p.product.x, p.product.k, p.product.x_dtype.size());
        for place in rows {
            let to = self.x + place * k * size;
            let from = self.index[self.rows.start + place];
            // SAFETY: `check` bound the rows of x, of which the index is one, and there is room for each; nobody else writes
            // this one.
            unsafe {
                if from == NONE {
                    std::ptr::write_bytes(to as *mut u8, 0, k * size);
                    continue;
                }
                let from = x.wrapping_add_signed(from as isize * row * size as isize);
                if col == 1 {
                    std::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, k * size);
                    continue;
                }
                for i in 0..k {
                    let from = from.wrapping_add_signed(i as isize * col * size as isize) as *const u8;
                    std::ptr::copy_nonoverlapping(from, (to + i * size) as *mut u8, size);
                }
            }
        }
    }
}

/// The last steps of some rows: their scale, the factor and the residual.
struct Finish<'a, T> {
    part: &'a Rows<'a>,
    numbers: Numbers,
    /// Strides along rows of residual and result.
    steps: [isize; 2],
    rows: Range<usize>,
    region: Region<'a>,
    t: PhantomData<T>,
}

impl<T: CpuElement> Task for Finish<'_, T> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let args = self.part.launch.args;
        let p = &self.part.launch.problem.product;
        let mut scratch = DenseRows::<T>::new(&mut self.region, p.n, &self.steps);
        for place in self.rows {
            let row = (self.part.rows.start + place) as isize;
            let y = (self.part.y as *const f32).wrapping_add(place * p.n);
            let at =
                |index: usize, stride: isize| (args.address(index) as *mut T).wrapping_offset(row * stride);
            // SAFETY: `check` bound rows and strides to the tensors, and the part has these results. The residual is the result
            // only element for element, and each is read before it is written.
            unsafe {
                let scales = args.address(ROW_SCALE);
                let offset = row * self.numbers.step;
                let own =
                    with_float!(self.numbers.dtype, U => (*(scales as *const U).offset(offset)).to_f32());
                let factor = s.splat(own * p.scale());
                let to = at(OUT, p.out.row);
                let dense = scratch.target(1, to, self.steps[1]);
                let residual =
                    p.has_residual.then(|| scratch.gather(0, at(RESIDUAL, p.residual.row), self.steps[0]));
                for_vectors::<S>(
                    p.n,
                    #[inline(always)]
                    |i, count| {
                        let y = load_at(s, y, i, count);
                        let y = match residual {
                            Some(residual) => s.fma(factor, y, load_at(s, residual, i, count)),
                            None => s.mul(factor, y),
                        };
                        store_at(s, dense, i, count, y);
                    },
                );
                scratch.scatter(1, to, self.steps[1]);
            }
        }
    }
}
