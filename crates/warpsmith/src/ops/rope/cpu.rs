//! `rope` and its gradient on the CPU, one source for all tiers: cosine and sine are worked out once a token and
//! used for all its heads.

use super::angles::{cos_sin, frequencies, reduced};
use super::{COS, OUT, POSITIONS, Problem, SIN, Tables, X};
use crate::cpu::prefetch::{AHEAD, fetch};
use crate::cpu::rows::{
    Scratch, can_stream, for_vectors, load_at, load_unordered_at, put_unordered_at, store_at, with_float,
};
use crate::cpu::simd::Pair;
use crate::cpu::{CpuElement, Simd, Task, dispatch, parallel_for, should_stream};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::registry::Launch;
use std::marker::PhantomData;
use std::ops::Range;

/// Elements a thread works on at least: less is not worth waking one.
const GRAIN: usize = 1 << 15;

pub(super) fn run(launch: &Launch<'_, Problem>) -> Result<()> {
    let p = launch.problem;
    if let Some(tables) = p.tables {
        check_positions(launch, &tables)?;
    }
    let frequencies = frequencies(p.rotary_dim, f64::from_bits(p.theta_bits), f64::from_bits(p.scale_bits));
    let frequencies = &*frequencies;
    let token = p.num_heads * p.head_dim;
    let stream = should_stream(p.num_tokens * token * p.dtype.size());
    parallel_for(p.num_tokens, GRAIN.div_ceil(token.max(1)), |tokens| {
        with_float!(p.dtype, T => {
            dispatch(launch.tier, Rotate::<T> { launch, tokens, stream, frequencies, t: PhantomData })
        });
    });
    Ok(())
}

/// The tables are read at these rows, so they are looked at before anything is written.
fn check_positions(launch: &Launch<'_, Problem>, tables: &Tables) -> Result<()> {
    let p = launch.problem;
    for token in 0..p.num_tokens {
        // SAFETY: `token` is one of the tensor's.
        let position = unsafe { position(launch, p.tokens.offsets(token)[2]) };
        if usize::try_from(position).is_err() || position as usize >= tables.max_pos {
            let expected = format!("positions from 0 to below max_pos={}", tables.max_pos);
            return Err(Error::argument(
                launch.args.spec().name,
                "positions",
                expected,
                format!("{position} for token {token}"),
            ));
        }
    }
    Ok(())
}

/// The position at an offset into `positions`.
///
/// # Safety
/// The offset must be that of one of the tensor's elements.
#[inline(always)]
unsafe fn position(launch: &Launch<'_, Problem>, offset: usize) -> i64 {
    let base = launch.args.address(POSITIONS);
    // SAFETY: the tensor has this dtype and the offset lies in it.
    unsafe {
        match launch.problem.position_dtype {
            DType::I32 => *(base as *const i32).add(offset) as i64,
            _ => *(base as *const i64).add(offset),
        }
    }
}

struct Rotate<'a, T> {
    launch: &'a Launch<'a, Problem>,
    tokens: Range<usize>,
    stream: bool,
    frequencies: &'a [u64],
    t: PhantomData<T>,
}

impl<T: CpuElement> Task for Rotate<'_, T> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let p = self.launch.problem;
        let args = self.launch.args;
        let at = |index: usize, offset: usize| (args.address(index) as *mut T).wrapping_add(offset);
        let in_place = args.address(X) == args.address(OUT);
        let copied = if in_place { p.rotary_dim } else { p.head_dim };
        let mut scratch = Scratch::<T>::new(p.head_dim, &p.steps);
        let [x_step, out_step] = p.steps;
        let mut row = Row::new(p);
        // SAFETY: `check` bound all shapes to these sizes and strides and `run` the positions to the tables; threads
        // get disjoint tokens; out overlaps x only element for element, and a pair is read before it is written.
        unsafe {
            for token in self.tokens {
                let [x_at, out_at, position_at, _] = p.tokens.offsets(token);
                row.fill::<S, T>(s, self.launch, self.frequencies, position(self.launch, position_at));
                for head in 0..p.num_heads {
                    let x_head = at(X, x_at + head * p.head_strides[0] as usize);
                    let out_head = at(OUT, out_at + head * p.head_strides[1] as usize);
                    let x = scratch.gather(0, x_head, x_step);
                    let out = scratch.target(1, out_head, out_step);
                    let stream = self.stream && can_stream::<Pair<S>, T>(out);
                    if p.interleaved {
                        rotate_neighbours(Pair(s), &row, x, out, p.rotary_dim, stream);
                    } else {
                        rotate_halves(Pair(s), &row, x, out, p.pairs(), stream);
                    }
                    // What is gathered and scattered must be whole, also in place.
                    let copied = if out_step == 1 { copied } else { p.head_dim };
                    if copied > p.rotary_dim {
                        std::ptr::copy(x.add(p.rotary_dim), out.add(p.rotary_dim), copied - p.rotary_dim);
                    }
                    scratch.scatter(1, out_head, out_step);
                }
            }
        }
        if self.stream {
            s.fence();
        }
    }
}

/// Factors for one token. `half`: cosine and sine of each pair. `interleaved`: the factor of each element and of
/// the other element of its pair, which is minus or plus the sine.
struct Row {
    cos: Vec<f32>,
    sin: Vec<f32>,
    quarters: Vec<f32>,
    rests: Vec<f32>,
}

impl Row {
    fn new(p: &Problem) -> Self {
        let factors = if p.interleaved { p.rotary_dim } else { p.pairs() };
        let zeros = |n| vec![0.0; n];
        Row { cos: zeros(factors), sin: zeros(factors), quarters: zeros(p.pairs()), rests: zeros(p.pairs()) }
    }

    /// Works out the factors of a token at `position`, in the order in which whole vectors of `T` are loaded.
    ///
    /// # Safety
    /// With tables, the position must be a row of theirs.
    #[inline(always)]
    unsafe fn fill<S: Simd, T: CpuElement>(
        &mut self,
        s: S,
        launch: &Launch<'_, Problem>,
        frequencies: &[u64],
        position: i64,
    ) {
        let p = launch.problem;
        let n = p.pairs();
        match p.tables {
            Some(Tables { strides, .. }) => {
                let table = |index: usize, [row, step]: [isize; 2], i: usize| {
                    let offset = position as isize * row + i as isize * step;
                    // SAFETY: the caller promised the row, and `i` is a column.
                    unsafe { *(launch.args.address(index) as *const f32).offset(offset) }
                };
                for i in 0..n {
                    (self.cos[i], self.sin[i]) = (table(COS, strides[0], i), table(SIN, strides[1], i));
                }
            }
            None => {
                let slots = self.quarters.iter_mut().zip(&mut self.rests);
                for ((quarter, rest), &frequency) in slots.zip(frequencies) {
                    let (q, r) = reduced(frequency.wrapping_mul(position as u64));
                    (*quarter, *rest) = (f32::from_bits(q as u32), r);
                }
                let (cos, sin) = (self.cos.as_mut_ptr(), self.sin.as_mut_ptr());
                let (quarters, rests) = (self.quarters.as_ptr(), self.rests.as_ptr());
                for_vectors::<S>(
                    n,
                    #[inline(always)]
                    |i, count| {
                        // SAFETY: all four hold `n` values or more.
                        unsafe {
                            let quarter = s.bits_of(load_at(s, quarters, i, count));
                            let (c, n) = cos_sin(s, quarter, load_at(s, rests, i, count));
                            store_at(s, cos, i, count, c);
                            store_at(s, sin, i, count, n);
                        }
                    },
                );
            }
        }
        if p.backward {
            self.sin[..n].iter_mut().for_each(|sin| *sin = -*sin);
        }
        if p.interleaved {
            // From the end, so that no value is overwritten before it is spread.
            for i in (0..n).rev() {
                let (cos, sin) = (self.cos[i], self.sin[i]);
                (self.cos[2 * i], self.cos[2 * i + 1]) = (cos, cos);
                (self.sin[2 * i], self.sin[2 * i + 1]) = (-sin, sin);
            }
        }
        let pairs = Pair(s);
        for factors in [&mut self.cos, &mut self.sin] {
            for vector in factors.chunks_exact_mut(<Pair<S>>::N) {
                let p = vector.as_mut_ptr();
                // SAFETY: the chunk holds a vector.
                unsafe { pairs.store(p, T::to_unordered(pairs, pairs.load(p))) };
            }
        }
    }
}

/// # Safety
/// `x` must be readable and `out` writable for `2 n` elements, `n` the number of pairs.
#[inline(always)]
unsafe fn rotate_halves<S: Simd, T: CpuElement>(
    s: S,
    row: &Row,
    x: *const T,
    out: *mut T,
    n: usize,
    stream: bool,
) {
    let stream = stream && can_stream::<S, T>(out.wrapping_add(n));
    let ahead = x.wrapping_byte_add(AHEAD);
    let (cos, sin) = (row.cos.as_ptr(), row.sin.as_ptr());
    for_vectors::<S>(
        n,
        #[inline(always)]
        |i, count| {
            // SAFETY: `i + count <= n`.
            unsafe {
                fetch::<S, T>(ahead.wrapping_add(i));
                fetch::<S, T>(ahead.wrapping_add(n.wrapping_add(i)));
                let (a, b) = (load_unordered_at(s, x, i, count), load_unordered_at(s, x.add(n), i, count));
                let (c, d) = (load_at(s, cos, i, count), load_at(s, sin, i, count));
                put_unordered_at(s, out, i, count, s.fnma(b, d, s.mul(a, c)), stream);
                put_unordered_at(s, out.add(n), i, count, s.fma(b, c, s.mul(a, d)), stream);
            }
        },
    );
}

/// # Safety
/// `x` must be readable and `out` writable for `n` elements, `n` even.
#[inline(always)]
unsafe fn rotate_neighbours<S: Simd, T: CpuElement>(
    s: S,
    row: &Row,
    x: *const T,
    out: *mut T,
    n: usize,
    stream: bool,
) {
    let (cos, sin) = (row.cos.as_ptr(), row.sin.as_ptr());
    for_vectors::<S>(
        n,
        #[inline(always)]
        |i, count| {
            // SAFETY: `i + count <= n`. Vectors have an even number of lanes, so none divides a pair.
            unsafe {
                fetch::<S, T>(x.wrapping_add(i).wrapping_byte_add(AHEAD));
                let v = load_unordered_at(s, x, i, count);
                // What is left of a row is in order.
                let other = if count == S::N { T::swap_pairs_unordered(s, v) } else { s.swap_pairs(v) };
                let (c, d) = (load_at(s, cos, i, count), load_at(s, sin, i, count));
                put_unordered_at(s, out, i, count, s.fma(v, c, s.mul(other, d)), stream);
            }
        },
    );
}
