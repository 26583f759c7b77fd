//! `qkv_store` on the CPU, one source for all tiers. Each head of queries and keys is computed in f32, in scratch.

use super::{
    COS, K_CACHE, K_SCALE, K_WEIGHT, POSITIONS, Problem, Q_WEIGHT, QKV, SIN, SLOTS, V_CACHE, V_SCALE,
};
use crate::cpu::rows::{for_vectors, index_at, load_at, store_at, with_float};
use crate::cpu::{CpuElement, Need, Region, Simd, Task, dispatch, parallel_for_with_scratch};
use crate::error::Result;
use crate::op::Launch;
use crate::ops::kv_store::cpu::{narrow, scatter as scatter_bytes};
use crate::ops::rope::cpu::{Factors, Head, Row};
use std::marker::PhantomData;
use std::ops::Range;

/// The fewest elements a thread works on: less does not pay for waking a thread.
const GRAIN: usize = 1 << 14;

pub(super) fn run(launch: &Launch<'_, Problem>) -> Result<()> {
    let p = launch.problem;
    // SAFETY: the call's slots, which are in the host's memory.
    unsafe { p.slots.check(launch.args.spec().name, launch.args.address(SLOTS)) }?;
    if let Some(rotation) = p.rotation {
        let positions = (0..p.num_tokens).map(|token| position(launch, token));
        rotation.check_positions(launch.args.spec().name, positions)?;
    }
    let frequencies = p.rotation.map_or(Ok(None), |rotation| Factors::frequencies(&rotation))?;
    let tables = [COS, SIN].map(|index| launch.args.address(index));
    let factors = p.rotation.map(|rotation| Factors::new(&rotation, tables, frequencies.as_ref()));
    let factors = factors.as_ref();
    let mut need = Need::of::<f32>(p.head_dim).and::<f32>(p.head_dim).and::<f32>(p.head_dim);
    need = need.and::<u8>(p.head_dim);
    if let Some(rotation) = p.rotation {
        need = need.plus(Row::need(&rotation));
    }
    let grain = GRAIN.div_ceil((p.heads() * p.head_dim).max(1));
    parallel_for_with_scratch(p.num_tokens, grain, need, |tokens, region| {
        with_float!(p.dtype, T => {
            dispatch(launch.tier, Store::<T> { launch, factors, tokens, region, t: PhantomData })
        });
    });
    Ok(())
}

fn position(launch: &Launch<'_, Problem>, token: usize) -> i64 {
    let (dtype, stride) = launch.problem.positions.expect("heads are rotated by positions");
    // SAFETY: one of the tensor's elements.
    unsafe { index_at(launch.args.address(POSITIONS), dtype, token * stride as usize) }
}

struct Store<'a, T> {
    launch: &'a Launch<'a, Problem>,
    factors: Option<&'a Factors<'a>>,
    tokens: Range<usize>,
    region: Region<'a>,
    t: PhantomData<T>,
}

impl<T: CpuElement> Task for Store<'_, T> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let (p, args) = (self.launch.problem, self.launch.args);
        let dim = p.head_dim;
        let values = self.region.slice::<f32>(dim);
        let weights = [Q_WEIGHT, K_WEIGHT].map(|index| {
            let weight = self.region.slice::<f32>(dim);
            if let Some(steps) = p.weights {
                let at = (args.address(index) as *const T, steps[index - Q_WEIGHT]);
                // SAFETY: the weight has an element for each of a head.
                unsafe { gather(s, at, weight) };
            }
            weight
        });
        // A head of 8-bit floats whose places are apart, before it is put there.
        let dense = self.region.slice::<u8>(dim).as_mut_ptr();
        let mut row = p.rotation.map(|rotation| Row::new(&mut self.region, &rotation));
        for token in self.tokens.clone() {
            if let (Some(row), Some(factors)) = (&mut row, self.factors) {
                // SAFETY: `run` has bound the positions to the tables.
                unsafe { row.fill(s, factors, position(self.launch, token)) };
            }
            // SAFETY: the call's slots; there are as many as tokens.
            let slot = unsafe { p.slots.at(args.address(SLOTS), token) };
            let slot = usize::try_from(slot).ok();
            for head in 0..p.heads() {
                let is_query = head < p.num_heads;
                let is_value = head >= p.num_heads + p.num_kv_heads;
                let offset = token as isize * p.qkv[0] + head as isize * p.qkv[1];
                let x = (args.address(QKV) as *mut T).wrapping_offset(offset);
                let side = is_value as usize;
                let kv_head = head.wrapping_sub(p.num_heads + side * p.num_kv_heads);
                let target = if is_query {
                    p.computes().then_some((x, p.qkv[2]))
                } else {
                    slot.map(|slot| self.target(side, kv_head, slot))
                };
                let Some(target) = target else { continue };
                let casts = !is_query && p.to != p.dtype;
                // SAFETY: `check` bound all shapes to these sizes and strides, `run` the slots to the caches; threads get
                // disjoint tokens, whose slots differ. A head is read before it is written.
                unsafe {
                    let computes = !is_value && p.computes();
                    if !computes && !casts {
                        copy((x, p.qkv[2]), target, dim);
                        continue;
                    }
                    gather(s, (x.cast_const(), p.qkv[2]), values);
                    if computes && p.weights.is_some() {
                        normalise(s, values, weights[!is_query as usize], f32::from_bits(p.eps_bits));
                    }
                    if let Some(row) = row.as_ref().filter(|_| computes) {
                        let at = values.as_mut_ptr();
                        Head { row, x: at.cast_const(), out: at, stream: false }.rotate(self.launch.tier);
                    }
                    if casts {
                        let (out, step) = (target.0.cast::<u8>(), target.1);
                        let to = (p.to, if step == 1 { out } else { dense });
                        let x = (values.as_ptr(), dim);
                        narrow(self.launch.tier, x, self.divisor(side, kv_head), to, false);
                        if step != 1 {
                            scatter_bytes(dense, out, step, 1, dim);
                        }
                    } else {
                        scatter(s, values, target);
                    }
                }
            }
        }
    }
}

impl<T: CpuElement> Store<'_, T> {
    /// Where a head of keys or values goes, and the distance of its elements, which have the size of the cache's.
    #[inline(always)]
    fn target(&self, side: usize, head: usize, slot: usize) -> (*mut T, isize) {
        let p = self.launch.problem;
        let [_, _, head_stride, step] = p.caches[side];
        let at = p.slots.place(slot, p.caches[side]) + head as isize * head_stride;
        let cache = self.launch.args.address([K_CACHE, V_CACHE][side]) as *mut u8;
        (cache.wrapping_offset(at * p.to.size() as isize).cast(), step)
    }

    /// What a head of keys or values is divided by.
    fn divisor(&self, side: usize, head: usize) -> f32 {
        self.launch.problem.scales[side].map_or(1.0, |step| {
            let scales = self.launch.args.address([K_SCALE, V_SCALE][side]) as *const f32;
            // SAFETY: one scale, or one for each head.
            unsafe { *scales.offset(head as isize * step) }
        })
    }
}

/// # Safety
/// `from` must be readable and `to` writable for `n` elements at their distances.
unsafe fn copy<T: Copy>((from, from_step): (*mut T, isize), (to, to_step): (*mut T, isize), n: usize) {
    // SAFETY: passed on.
    unsafe {
        if from_step == 1 && to_step == 1 {
            return std::ptr::copy_nonoverlapping(from, to, n);
        }
        for i in 0..n as isize {
            *to.offset(i * to_step) = *from.offset(i * from_step);
        }
    }
}

/// # Safety
/// As many elements as `values` has must be readable at the address, at their distance.
#[inline(always)]
unsafe fn gather<S: Simd, T: CpuElement>(s: S, (x, step): (*const T, isize), values: &mut [f32]) {
    if step != 1 {
        for (i, value) in values.iter_mut().enumerate() {
            // SAFETY: passed on.
            *value = unsafe { *x.offset(i as isize * step) }.to_f32();
        }
        return;
    }
    let out = values.as_mut_ptr();
    for_vectors::<S>(
        values.len(),
        #[inline(always)]
        |i, count| {
            // SAFETY: passed on; both sides have these elements.
            unsafe { store_at(s, out, i, count, load_at(s, x, i, count)) }
        },
    );
}

/// # Safety
/// As many elements as `values` has must be writable at the address, at their distance.
#[inline(always)]
unsafe fn scatter<S: Simd, T: CpuElement>(s: S, values: &[f32], (out, step): (*mut T, isize)) {
    if step != 1 {
        for (i, &value) in values.iter().enumerate() {
            // SAFETY: passed on.
            unsafe { *out.offset(i as isize * step) = T::from_f32(value) };
        }
        return;
    }
    let x = values.as_ptr();
    for_vectors::<S>(
        values.len(),
        #[inline(always)]
        |i, count| {
            // SAFETY: passed on; both sides have these elements.
            unsafe { store_at(s, out, i, count, load_at(s, x, i, count)) }
        },
    );
}

/// `x / sqrt(mean(x²) + eps) * weight`, in place.
#[inline(always)]
fn normalise<S: Simd>(s: S, x: &mut [f32], weight: &[f32], eps: f32) {
    let (n, x) = (x.len(), x.as_mut_ptr());
    let mut squares = s.zero();
    for_vectors::<S>(
        n,
        #[inline(always)]
        |i, count| {
            // SAFETY: `i + count <= n`; lanes past the count are zero.
            let v = unsafe { load_at(s, x.cast_const(), i, count) };
            squares = s.fma(v, v, squares);
        },
    );
    let scale = s.splat(1.0 / (s.reduce_add(squares) / n as f32 + eps).sqrt());
    for_vectors::<S>(
        n,
        #[inline(always)]
        |i, count| {
            // SAFETY: as above; the weight has `n` elements too.
            unsafe {
                let v = s.mul(load_at(s, x.cast_const(), i, count), scale);
                store_at(s, x, i, count, s.mul(v, load_at(s, weight.as_ptr(), i, count)));
            }
        },
    );
}
