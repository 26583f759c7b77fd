//! Blocks of columns: where they are, which are worked on side by side, and what is left of a row.

use super::super::{Grid, MAX_STREAMS};
use crate::cpu::prefetch::{LINE, SIDE_BY_SIDE, side_by_side};
use crate::cpu::rows::DenseRows;
use crate::cpu::simd::{Four, MAX_LANES};
use crate::cpu::{CpuElement, Region, Simd, Task, Tier, dispatch};
use std::marker::PhantomData;
use std::ops::Range;

/// Most columns of a block: strided ones are gathered first, and the copies must stay in the caches.
const BLOCK: usize = 4096;

/// How rows are cut into blocks: as equal as they can be, so that several can be worked on side by side.
#[derive(Clone, Copy)]
pub(super) struct Cut {
    /// Columns of a block, whole vectors of any tier; the last of a row has what is left.
    pub columns: usize,
    /// Blocks of a row.
    pub blocks: usize,
}

impl Cut {
    pub fn new(columns: usize) -> Cut {
        let fewest = columns.div_ceil(BLOCK).max(1);
        let each = columns.div_ceil(fewest).next_multiple_of(MAX_LANES).max(MAX_LANES);
        Cut { columns: each, blocks: columns.div_ceil(each) }
    }
}

/// The tensors of an expression.
#[derive(Clone, Copy)]
pub(super) struct Form {
    pub inputs: usize,
    pub outputs: usize,
    /// Whether the first two inputs, and the outputs if there are two, are the even and odd elements of one tensor.
    pub paired: bool,
    /// Whether the last input is read once if it is the same for blocks side by side.
    pub shares: bool,
}

impl Form {
    /// How many neighbouring elements of tensor `t` a column has.
    #[inline(always)]
    pub const fn width(&self, t: usize) -> usize {
        match t {
            0 if self.paired => 2,
            1 if self.paired => 0,
            _ if t == self.inputs && self.paired && self.outputs == 2 => 2,
            _ if t == self.inputs + 1 && self.paired => 0,
            _ => 1,
        }
    }
}

/// Some blocks of columns.
pub(super) struct Part<'a, T> {
    pub grid: &'a Grid,
    pub cut: Cut,
    pub addresses: &'a [usize],
    pub units: Range<usize>,
    pub stream: bool,
    pub region: Region<'a>,
    pub t: PhantomData<T>,
}

impl<T> Part<'_, T> {
    /// The blocks from `unit` on that can be worked on side by side, `most` of them at most: they are as long as the first.
    fn group(&self, unit: usize, most: usize) -> Group<T> {
        let mut group = Group { at: [[std::ptr::null_mut(); MAX_STREAMS]; SIDE_BY_SIDE], n: 0, blocks: 0 };
        for unit in unit..self.units.end.min(unit.saturating_add(most)) {
            let Part { grid, cut, .. } = *self;
            let start = unit % cut.blocks * cut.columns;
            let n = cut.columns.min(grid.columns - start);
            if group.blocks > 0 && n != group.n {
                break;
            }
            let offsets = grid.rows.offsets(unit / cut.blocks);
            for (t, (at, address)) in group.at[group.blocks].iter_mut().zip(self.addresses).enumerate() {
                let offset = offsets[t] as isize + start as isize * grid.steps[t];
                *at = (*address as *mut T).wrapping_offset(offset);
            }
            (group.n, group.blocks) = (n, group.blocks + 1);
        }
        group
    }
}

/// Blocks that are worked on side by side.
struct Group<T> {
    /// Where they begin in each tensor.
    at: [[*mut T; MAX_STREAMS]; SIDE_BY_SIDE],
    /// Columns of each.
    n: usize,
    blocks: usize,
}

/// Whole vectors of columns of blocks side by side.
pub(super) struct Pass<'a, T> {
    /// Where each block begins in each input, dense.
    pub from: &'a [[*const T; MAX_STREAMS]],
    /// And in each output.
    pub to: &'a [[*mut T; MAX_STREAMS]],
    /// Where the elements to prefetch begin.
    pub ahead: &'a [[*const T; MAX_STREAMS]],
    pub columns: Range<usize>,
    /// Whether the last input is the same for all blocks.
    pub common: bool,
    /// Whether results go past the caches; `to` is aligned for it then.
    pub stream: bool,
}

/// What a tier needs: columns of one step, and the alignment in bytes of streamed results.
struct Step<T>(PhantomData<T>);

impl<T: CpuElement> Task for Step<T> {
    type Out = (usize, usize);

    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> (usize, usize) {
        // Pairs are streamed a cache line at a time.
        (<Four<S> as Simd>::N, (<S::Pair as Simd>::N * size_of::<T>()).min(LINE))
    }
}

/// Makes earlier results that went past the caches visible before later ones.
struct Fence;

impl Task for Fence {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        s.fence();
    }
}

/// Calls `pass` for all columns of `part`.
///
/// # Safety
/// The tensors must lie at the addresses as the grid describes, and outputs overlap inputs only element for element; `pass`
/// must read each element before it writes it.
pub(super) unsafe fn walk<T: CpuElement>(
    tier: Tier,
    mut part: Part<'_, T>,
    form: Form,
    pass: &dyn Fn(&Pass<'_, T>),
) {
    let (inputs, tensors) = (form.inputs, form.inputs + form.outputs);
    let (lanes, line) = dispatch(tier, Step::<T>(PhantomData));
    let mut steps = part.grid.steps;
    for (t, step) in steps.iter_mut().enumerate().take(tensors) {
        *step = if form.width(t) == 1 { *step } else { 1 };
    }
    let steps = &steps[..tensors];
    let dense = steps.iter().all(|&step| step == 1);
    let (most, reach) = side_by_side(part.stream && dense);
    let mut scratch = DenseRows::<T>::new(&mut part.region, part.cut.columns, steps);
    // The tail of a row is processed in copies of a whole vector: one body for both cases halves the code.
    let mut ends = [[T::from_f32(0.0); MAX_LANES]; MAX_STREAMS];
    let end = |t: usize| t * MAX_LANES;
    let mut unit = part.units.start;
    let mut group = part.group(unit, most);
    while group.blocks > 0 {
        let Group { at, n, blocks } = group;
        unit += blocks;
        let next = part.group(unit, most);
        scratch.set_len(n);
        // SAFETY: the caller promised the tensors; blocks are disjoint.
        unsafe {
            let mut from = [[std::ptr::null::<T>(); MAX_STREAMS]; SIDE_BY_SIDE];
            let mut to = [[std::ptr::null_mut::<T>(); MAX_STREAMS]; SIDE_BY_SIDE];
            let (mut ahead, mut stream) = (from, part.stream);
            let tail = n % lanes;
            let whole = n - tail;
            // Prefetches elements of this block while there are any, then those of the next.
            let near = n.saturating_sub(reach / size_of::<T>()) / lanes * lanes;
            for k in 0..blocks {
                for t in 0..inputs {
                    from[k][t] = scratch.gather(t, at[k][t], steps[t]);
                    ahead[k][t] = from[k][t].wrapping_add((n - near) * form.width(t));
                }
                for t in inputs..tensors {
                    let p = scratch.target(t, at[k][t], steps[t]);
                    to[k][t - inputs] = p;
                    let streams = steps[t] == 1 && (p as usize).is_multiple_of(line);
                    stream &= streams || form.width(t) == 0;
                }
            }
            let common = form.shares
                && blocks > 1
                && from[..blocks].iter().all(|from| from[inputs - 1] == at[0][inputs - 1].cast_const());
            let go = |columns: Range<usize>, from: &_, to: &_, ahead: &_, common, stream| {
                if !columns.is_empty() {
                    pass(&Pass { from, to, ahead, columns, common, stream });
                }
            };
            // Columns with others ahead of them in the block, the rest of the whole vectors, and for each block what is left.
            go(0..near, &from[..blocks], &to[..blocks], &ahead[..blocks], common, stream);
            for k in 0..blocks {
                for t in 0..inputs {
                    let p = if k < next.blocks && steps[t] == 1 { next.at[k][t] } else { at[k][t] };
                    ahead[k][t] = p.cast_const().wrapping_sub(near * form.width(t));
                }
            }
            go(near..whole, &from[..blocks], &to[..blocks], &ahead[..blocks], common, stream);
            for k in 0..if tail > 0 { blocks } else { 0 } {
                let ends = ends.as_mut_ptr().cast::<T>();
                for t in 0..inputs {
                    let width = form.width(t);
                    let p = from[k][t].wrapping_add(whole * width);
                    std::ptr::copy_nonoverlapping(p, ends.add(end(t)), tail * width);
                    from[k][t] = ends.add(end(t));
                }
                let results = to[k];
                for t in inputs..tensors {
                    to[k][t - inputs] = ends.add(end(t));
                }
                go(0..lanes, &from[k..=k], &to[k..=k], &from[k..=k], false, false);
                for t in inputs..tensors {
                    let width = form.width(t);
                    let p = results[t - inputs].wrapping_add(whole * width);
                    std::ptr::copy_nonoverlapping(ends.add(end(t)), p, tail * width);
                }
            }
            for t in inputs..tensors {
                scratch.scatter(t, at[0][t], steps[t]);
            }
        }
        group = next;
    }
    if part.stream {
        dispatch(tier, Fence);
    }
}
