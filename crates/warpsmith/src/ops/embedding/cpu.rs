//! `embedding` and its gradient on the CPU, one source for all tiers.

use super::backward::{self, DOUT, DWEIGHT};
use super::{IDS, OUT, Problem, WEIGHT};
use crate::cpu::rows::{DenseRows, for_vectors, index_at, load_at, store_at, with_float};
use crate::cpu::scratch::{self, Need, Region};
use crate::cpu::{
    CpuElement, Simd, Task, copy_bytes, dispatch, parallel_for, parallel_for_with_scratch, should_stream,
};
use crate::error::{Error, Result};
use crate::op::Launch;
use crate::tensor::{DType, Space};
use std::marker::PhantomData;
use std::ops::Range;

/// The fewest bytes a thread moves: less does not pay for waking a thread.
const GRAIN: usize = 1 << 15;

/// Reads the ids, all of which must be rows of a table of `vocab`.
fn read_ids(
    op: &'static str,
    base: usize,
    dtype: DType,
    places: &Space<4>,
    vocab: usize,
    ids: &mut [usize],
) -> Result<()> {
    let id = |index: usize| {
        // SAFETY: the offset of an element of the tensor, which has this type.
        let id = unsafe { index_at(base, dtype, places.offsets(index)[0]) };
        usize::try_from(id).ok().filter(|&id| id < vocab).ok_or_else(|| {
            let expected = format!("ids from 0 to below vocab={vocab}");
            Error::argument(op, "ids", expected, format!("{id} at {index}"))
        })
    };
    ids.iter_mut().enumerate().try_for_each(|(index, to)| {
        *to = id(index)?;
        Ok(())
    })
}

pub(super) fn forward(launch: &Launch<'_, Problem>) -> Result<()> {
    let p = launch.problem;
    let (op, base) = (launch.args.spec().name, launch.args.address(IDS));
    scratch::with(Need::of::<usize>(p.num_ids), |mut region| {
        let ids = region.slice(p.num_ids);
        read_ids(op, base, p.id_dtype, &p.rows, p.vocab, ids)?;
        let (ids, bytes) = (&*ids, p.hidden * p.dtype.size());
        let stream = should_stream(p.num_ids.saturating_mul(bytes));
        parallel_for(p.num_ids, GRAIN.div_ceil(bytes.max(1)), |range| {
            dispatch(launch.tier, Forward { launch, ids, range, stream });
        });
        Ok(())
    })
}

/// Rows `range` of the result.
struct Forward<'a> {
    launch: &'a Launch<'a, Problem>,
    ids: &'a [usize],
    range: Range<usize>,
    stream: bool,
}

impl Task for Forward<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let p = self.launch.problem;
        let size = p.dtype.size();
        let (weight, out) = (self.launch.args.address(WEIGHT), self.launch.args.address(OUT));
        let [from_step, to_step] = p.steps.map(|step| step as usize * size);
        for index in self.range {
            let from = (weight + self.ids[index] * p.weight_pitch as usize * size) as *const u8;
            let to = (out + p.rows.offsets(index)[1] * size) as *mut u8;
            // SAFETY: the id is a row of the weight, and `check` bound rows and strides to the tensors, which are apart. No
            // other index writes the same row.
            unsafe {
                if p.steps == [1, 1] {
                    copy_bytes(s, from, to, p.hidden * size, self.stream, false);
                } else {
                    for i in 0..p.hidden {
                        std::ptr::copy_nonoverlapping(from.add(i * from_step), to.add(i * to_step), size);
                    }
                }
            }
        }
        if self.stream {
            s.fence();
        }
    }
}

pub(super) fn backward(launch: &Launch<'_, backward::Problem>) -> Result<()> {
    let p = launch.problem;
    let (op, base) = (launch.args.spec().name, launch.args.address(backward::IDS));
    let need = Need::of::<usize>(p.num_ids).and::<usize>(p.num_ids);
    let need = need.and::<usize>(p.vocab + 1).and::<usize>(p.vocab + 1);
    scratch::with(need, |mut region| {
        let ids = region.slice(p.num_ids);
        read_ids(op, base, p.id_dtype, &p.rows, p.vocab, ids)?;
        // The places of each id, in order: those of row v are order[starts[v]..starts[v + 1]].
        let starts = region.filled(p.vocab + 1, 0usize);
        ids.iter().for_each(|&id| starts[id + 1] += 1);
        (0..p.vocab).for_each(|v| starts[v + 1] += starts[v]);
        let next = region.slice::<usize>(p.vocab + 1);
        next.copy_from_slice(starts);
        let order = region.slice::<usize>(p.num_ids);
        for (place, &id) in ids.iter().enumerate() {
            order[next[id]] = place;
            next[id] += 1;
        }
        let (starts, order) = (&*starts, &*order);
        let bytes = p.hidden * p.dtype.size();
        let need = DenseRows::<f32>::need(p.dtype, p.hidden, &p.steps).and::<f32>(p.hidden);
        parallel_for_with_scratch(p.vocab, GRAIN.div_ceil(bytes.max(1)), need, |rows, region| {
            with_float!(p.dtype, T => {
                dispatch(launch.tier, Backward::<T> { launch, starts, order, rows, region, t: PhantomData })
            });
        });
        Ok(())
    })
}

/// Rows `rows` of dweight.
struct Backward<'a, T> {
    launch: &'a Launch<'a, backward::Problem>,
    starts: &'a [usize],
    order: &'a [usize],
    rows: Range<usize>,
    region: Region<'a>,
    t: PhantomData<T>,
}

impl<T: CpuElement> Task for Backward<'_, T> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let p = self.launch.problem;
        let dout = self.launch.args.address(DOUT) as *const T;
        let dweight = self.launch.args.address(DWEIGHT) as *mut T;
        let mut scratch = DenseRows::<T>::new(&mut self.region, p.hidden, &p.steps);
        let sums = self.region.slice::<f32>(p.hidden);
        for row in self.rows {
            sums.fill(0.0);
            for &place in &self.order[self.starts[row]..self.starts[row + 1]] {
                // SAFETY: `check` bound the rows of dout and their step; the sums are as long as a row.
                unsafe {
                    let from = scratch.gather(0, dout.add(p.rows.offsets(place)[1]), p.steps[0]);
                    let sums = sums.as_mut_ptr();
                    for_vectors::<S>(p.hidden, |i, count| {
                        let sum = s.add(load_at(s, sums, i, count), load_at(s, from, i, count));
                        store_at(s, sums, i, count, sum);
                    });
                }
            }
            // SAFETY: `check` bound the rows of dweight and their step; no other thread has this row.
            unsafe {
                let to = dweight.add(row * p.weight_pitch as usize);
                let dense = scratch.target(1, to, p.steps[1]);
                for_vectors::<S>(p.hidden, |i, count| {
                    store_at(s, dense, i, count, load_at(s, sums.as_ptr(), i, count));
                });
                scratch.scatter(1, to, p.steps[1]);
            }
        }
    }
}
