//! `kv_store` on the CPU, one source for all tiers.

use super::{COS, K, K_CACHE, K_SCALE, POSITIONS, Problem, SIN, SLOTS, V, V_CACHE, V_SCALE};
use crate::cpu::rows::{DenseRows, Narrow, for_vectors, index_at, load_at, store_at, with_float};
use crate::cpu::scratch;
use crate::cpu::{
    CpuElement, Need, Region, Simd, Task, Tier, copy_bytes, dispatch, parallel_for_with_scratch,
    should_stream,
};
use crate::error::Result;
use crate::op::Launch;
use crate::ops::rope::cpu::{Factors, Head, Row};
use crate::tensor::{DType, F8E4M3, F8E5M2};
use std::marker::PhantomData;
use std::ops::Range;

/// The fewest elements a thread works on: less does not pay for waking a thread.
const GRAIN: usize = 1 << 15;

pub(super) fn run(launch: &Launch<'_, Problem>) -> Result<()> {
    let p = launch.problem;
    let tokens = p.num_tokens;
    scratch::with(Need::of::<i64>(tokens).and::<i64>(tokens), |mut region| {
        let (address, slots) = (launch.args.address(SLOTS), region.slice::<i64>(tokens));
        // SAFETY: the call's slots, which are in the host's memory.
        unsafe { p.slots.check(launch.args.spec().name, address) }?;
        for (token, slot) in slots.iter_mut().enumerate() {
            // SAFETY: as above; there are as many as tokens.
            *slot = unsafe { p.slots.at(address, token) };
        }
        let differ = all_differ(slots, region.slice(tokens));
        run_checked(launch, slots, differ)
    })
}

/// [`run`] with validated slots; `differ` if no two tokens have the same slot.
fn run_checked(launch: &Launch<'_, Problem>, slots: &[i64], differ: bool) -> Result<()> {
    let p = launch.problem;
    if let (Some(rotation), Some((dtype, stride))) = (p.rotation, p.positions) {
        let base = launch.args.address(POSITIONS);
        // SAFETY: the offsets of the tensor's elements.
        let at = |token: usize| unsafe { index_at(base, dtype, token * stride as usize) };
        rotation.check_positions(launch.args.spec().name, (0..p.num_tokens).map(at))?;
    }
    let frequencies = p.rotation.map_or(Ok(None), |rotation| Factors::frequencies(&rotation))?;
    let tables = [COS, SIN].map(|index| launch.args.address(index));
    let factors = p.rotation.map(|rotation| Factors::new(&rotation, tables, frequencies.as_ref()));
    let factors = factors.as_ref();
    let token = 2 * p.num_heads * p.head_dim;
    let stream = should_stream(p.num_tokens * token * p.to.size());
    // In order, so that of tokens with the same slot the last one stays.
    let grain = if differ { GRAIN.div_ceil(token.max(1)) } else { p.num_tokens };
    parallel_for_with_scratch(p.num_tokens, grain, need(p), |tokens, region| {
        with_float!(p.from, T => {
            dispatch(launch.tier, Store::<T> { launch, slots, factors, tokens, stream, region, t: PhantomData })
        });
    });
    Ok(())
}

/// Scratch of [`Store`].
fn need(p: &Problem) -> Need {
    let sources = DenseRows::<f32>::need(p.from, p.head_dim, &p.sides.map(|side| side.source[2]));
    let factors = p.rotation.map_or(Need::default(), |rotation| Row::need(&rotation));
    sources.plus(factors).and::<f32>(wide_len(p)).and::<u8>(p.head_dim * p.from.size())
}

/// Elements of a token that are rotated in f32 before they become 8-bit floats.
fn wide_len(p: &Problem) -> usize {
    if p.from == p.to { 0 } else { p.num_heads * p.head_dim }
}

/// Whether all slots differ; `sorted` is scratch for all of them.
fn all_differ(slots: &[i64], sorted: &mut [i64]) -> bool {
    let increase = |slots: &[i64]| slots.windows(2).all(|two| two[0] < two[1] || two[1] == -1);
    if increase(slots) && !slots.contains(&-1) {
        return true;
    }
    sorted.copy_from_slice(slots);
    sorted.sort_unstable();
    increase(sorted)
}

struct Store<'a, T> {
    launch: &'a Launch<'a, Problem>,
    slots: &'a [i64],
    factors: Option<&'a Factors<'a>>,
    tokens: Range<usize>,
    stream: bool,
    region: Region<'a>,
    t: PhantomData<T>,
}

impl<T: CpuElement> Task for Store<'_, T> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let p = self.launch.problem;
        let args = self.launch.args;
        let size = p.to.size() as isize;
        let region = &mut self.region;
        let mut sources = DenseRows::<T>::new(region, p.head_dim, &p.sides.map(|side| side.source[2]));
        let mut row = p.rotation.map(|rotation| Row::new(region, &rotation));
        let run = p.num_heads * p.head_dim;
        let wide = region.slice::<f32>(wide_len(p));
        // A head of the cache with strided elements, before it is scattered.
        let dense = region.slice::<T>(p.head_dim).as_mut_ptr().cast::<u8>();
        for token in self.tokens {
            let Ok(slot) = usize::try_from(self.slots[token]) else { continue };
            if let (Some(row), Some(factors), Some((dtype, stride))) = (&mut row, self.factors, p.positions) {
                // SAFETY: one of the tensor's elements; `run` has bound the positions to the tables.
                unsafe {
                    let position = index_at(args.address(POSITIONS), dtype, token * stride as usize);
                    row.fill(s, factors, position);
                    // Heads that become 8-bit floats are rotated in f32.
                    if p.from == p.to {
                        row.arrange::<_, T>(s);
                    }
                }
            }
            for (t, x, cache, scale) in [(0, K, K_CACHE, K_SCALE), (1, V, V_CACHE, V_SCALE)] {
                let side = &p.sides[t];
                let row = row.as_ref().filter(|_| t == 0);
                let whole = row.is_none() && side.is_one_run(p.head_dim);
                let (heads, n) = if whole { (1, run) } else { (p.num_heads, p.head_dim) };
                let [token_stride, head_stride, step] = side.source;
                let [_, _, cache_head, cache_step] = side.cache;
                let from = (args.address(x) as *const T).wrapping_offset(token as isize * token_stride);
                let at = p.slots.place(slot, side.cache);
                for head in 0..heads as isize {
                    let out = args.address(cache) as *mut u8;
                    let out = out.wrapping_offset((at + head * cache_head) * size);
                    let target = if cache_step == 1 { out } else { dense };
                    let stream = self.stream && cache_step == 1;
                    // SAFETY: `check` bound all shapes to these sizes and strides, `run` the slots to the cache; threads
                    // get disjoint tokens, whose slots differ. Caches and inputs are apart.
                    unsafe {
                        let x = sources.gather(t, from.wrapping_offset(head * head_stride), step);
                        if p.from == p.to {
                            let rotated = rotate(self.launch.tier, row, x, target.cast(), stream);
                            let (x, out) = (x.add(rotated), target.cast::<T>().add(rotated));
                            let bytes = (n - rotated) * size_of::<T>();
                            copy_bytes(s, x.cast(), out.cast(), bytes, stream, true);
                        } else {
                            let divisor = side.scale.map_or(1.0, |stride| {
                                *(args.address(scale) as *const f32).offset(head * stride)
                            });
                            let (to, tier) = ((p.to, target), self.launch.tier);
                            match row {
                                None => narrow(tier, (x, n), divisor, to, stream),
                                Some(_) => {
                                    let values = wide.as_mut_ptr();
                                    widen(s, x, values, n);
                                    rotate(tier, row, values, values, false);
                                    narrow(tier, (values.cast_const(), n), divisor, to, stream);
                                }
                            }
                        }
                        if cache_step != 1 {
                            scatter(dense, out, cache_step * size, size as usize, p.head_dim);
                        }
                    }
                }
            }
        }
        if self.stream {
            s.fence();
        }
    }
}

/// Puts `n` dense elements of `size` bytes in their places, `step` bytes apart.
///
/// # Safety
/// The elements must be readable, and their places from `out` on writable.
pub(in crate::ops) unsafe fn scatter(elements: *const u8, out: *mut u8, step: isize, size: usize, n: usize) {
    for i in 0..n {
        // SAFETY: `i < n`.
        unsafe { std::ptr::copy_nonoverlapping(elements.add(i * size), out.offset(i as isize * step), size) };
    }
}

/// Rotates a head by `row`, if there is one; returns how many elements that were.
///
/// # Safety
/// `x` must be readable and `out` writable for these elements, the two apart or the same.
unsafe fn rotate<T: CpuElement>(
    tier: Tier,
    row: Option<&Row<'_>>,
    x: *const T,
    out: *mut T,
    stream: bool,
) -> usize {
    row.map_or(0, |row| {
        // SAFETY: passed on.
        unsafe { Head { row, x, out, stream }.rotate(tier) };
        row.rotary_dim()
    })
}

/// Stores `n` dense values over `divisor` as 8-bit floats.
///
/// # Safety
/// `x` must be readable and `out` writable for `n` elements, the two apart.
pub(in crate::ops) unsafe fn narrow<T: CpuElement>(
    tier: Tier,
    (x, n): (*const T, usize),
    divisor: f32,
    (to, out): (DType, *mut u8),
    stream: bool,
) {
    // SAFETY: passed on.
    unsafe {
        match to {
            DType::F8E4M3 => Narrow { x, out: out.cast::<F8E4M3>(), n, divisor, stream }.store(tier),
            _ => Narrow { x, out: out.cast::<F8E5M2>(), n, divisor, stream }.store(tier),
        }
    }
}

/// # Safety
/// `x` must be readable and `out` writable for `n` elements.
#[inline(always)]
unsafe fn widen<S: Simd, T: CpuElement>(s: S, x: *const T, out: *mut f32, n: usize) {
    for_vectors::<S>(
        n,
        #[inline(always)]
        |i, count| {
            // SAFETY: `i + count <= n`.
            unsafe { store_at(s, out, i, count, load_at(s, x, i, count)) }
        },
    );
}
