//! `rope` and its gradient on the CPU, one source for all tiers: cosine and sine are worked out once a token and
//! used for all its heads.

use super::angles::{cos_sin, frequencies, reduced};
use super::rotation::Tables;
use super::{COS, OUT, POSITIONS, Problem, Rotation, SIN, X};
use crate::cpu::prefetch::{AHEAD, SIDE_BY_SIDE, fetch, side_by_side};
use crate::cpu::rows::{
    DenseRows, can_stream, for_vectors, index_at, load_at, load_unordered_at, put_near_at, store_at,
    with_float,
};
use crate::cpu::{
    CpuElement, Need, Region, Simd, Task, Tier, dispatch, parallel_for_with_scratch, should_stream,
};
use crate::error::Result;
use crate::op::Launch;
use crate::tensor::DType;
use std::marker::PhantomData;
use std::ops::Range;
use std::rc::Rc;

/// The fewest elements a thread works on: less does not pay for waking a thread.
const GRAIN: usize = 1 << 15;

pub(super) fn run(launch: &Launch<'_, Problem>) -> Result<()> {
    let p = launch.problem;
    // SAFETY: these are the offsets of the tensor's elements.
    let positions = (0..p.num_tokens).map(|token| unsafe { position(launch, p.tokens.offsets(token)[2]) });
    p.rotation.check_positions(launch.args.spec().name, positions)?;
    let frequencies = Factors::frequencies(&p.rotation)?;
    let tables = [COS, SIN].map(|index| launch.args.address(index));
    let factors = Factors::new(&p.rotation, tables, frequencies.as_ref());
    let token = p.num_heads * p.head_dim;
    let stream = should_stream(p.num_tokens * token * p.dtype.size());
    let mut need = DenseRows::<f32>::need(p.dtype, p.head_dim, &p.steps);
    for _ in 0..SIDE_BY_SIDE {
        need = need.plus(Row::need(&p.rotation));
    }
    let factors = &factors;
    parallel_for_with_scratch(p.num_tokens, GRAIN.div_ceil(token.max(1)), need, |tokens, region| {
        with_float!(p.dtype, T => {
            dispatch(launch.tier, Rotate::<T> { launch, tokens, stream, factors, region, t: PhantomData })
        });
    });
    Ok(())
}

/// The position at an offset into `positions`.
///
/// # Safety
/// The offset must be that of one of the tensor's elements.
#[inline(always)]
unsafe fn position(launch: &Launch<'_, Problem>, offset: usize) -> i64 {
    // SAFETY: passed on; the tensor has this dtype.
    unsafe { index_at(launch.args.address(POSITIONS), launch.problem.position_dtype, offset) }
}

struct Rotate<'a, T> {
    launch: &'a Launch<'a, Problem>,
    tokens: Range<usize>,
    stream: bool,
    factors: &'a Factors<'a>,
    region: Region<'a>,
    t: PhantomData<T>,
}

impl<T: CpuElement> Task for Rotate<'_, T> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let p = self.launch.problem;
        let args = self.launch.args;
        let at = |index: usize, offset: usize| (args.address(index) as *mut T).wrapping_add(offset);
        let in_place = args.address(X) == args.address(OUT);
        let rotary_dim = p.rotation.rotary_dim;
        let copied = if in_place { rotary_dim } else { p.head_dim };
        let mut scratch = DenseRows::<T>::new(&mut self.region, p.head_dim, &p.steps);
        let [x_step, out_step] = p.steps;
        // Several tokens side by side, head by head; strided tokens go one at a time.
        let (side, reach) = side_by_side(self.stream && p.steps == [1, 1]);
        let mut rows = [0; SIDE_BY_SIDE].map(|_| Row::new(&mut self.region, &p.rotation));
        let heads_ahead = reach.div_ceil((p.head_dim * size_of::<T>()).max(1));
        let last = self.tokens.end.saturating_sub(1);
        // SAFETY: `check` bound all shapes to these sizes and strides and `run` the positions to the tables; threads
        // get disjoint tokens; out overlaps x only element for element, and a pair is read before it is written.
        unsafe {
            for first in self.tokens.clone().step_by(side) {
                let rows = &mut rows[..side.min(self.tokens.end - first)];
                // Where x and out begin, and the x to process next.
                let mut starts = [[0; 3]; SIDE_BY_SIDE];
                for (k, row) in rows.iter_mut().enumerate() {
                    let [x_at, out_at, position_at, _] = p.tokens.offsets(first + k);
                    starts[k] = [x_at, out_at, p.tokens.offsets(last.min(first + side + k))[0]];
                    row.fill(s, self.factors, position(self.launch, position_at));
                    row.arrange::<_, T>(s);
                }
                for head in 0..p.num_heads {
                    let ahead = head + heads_ahead;
                    for (row, [x_at, out_at, next_at]) in rows.iter().zip(starts) {
                        let x_head = at(X, x_at + head * p.head_strides[0] as usize);
                        let out_head = at(OUT, out_at + head * p.head_strides[1] as usize);
                        let (token, ahead) = match ahead.checked_sub(p.num_heads) {
                            None => (x_at, ahead),
                            Some(ahead) => (next_at, ahead),
                        };
                        let ahead = at(X, token).wrapping_offset(ahead as isize * p.head_strides[0]);
                        let x = scratch.gather(0, x_head, x_step);
                        let out = scratch.target(1, out_head, out_step);
                        rotate_head(s.pair(), row, x, out, ahead, self.stream && out_step == 1);
                        // What is gathered and scattered must be whole, also in place.
                        let copied = if out_step == 1 { copied } else { p.head_dim };
                        if copied > rotary_dim {
                            std::ptr::copy(x.add(rotary_dim), out.add(rotary_dim), copied - rotary_dim);
                        }
                        scratch.scatter(1, out_head, out_step);
                    }
                }
            }
        }
        if self.stream {
            s.fence();
        }
    }
}

/// Where the factors of a rotation come from.
pub(in crate::ops) struct Factors<'a> {
    rotation: Rotation,
    /// Addresses of the tables.
    tables: [usize; 2],
    frequencies: &'a [u64],
}

impl<'a> Factors<'a> {
    /// The frequencies that [`Factors::new`] needs: none with tables.
    pub fn frequencies(rotation: &Rotation) -> Result<Option<Rc<Vec<u64>>>> {
        let Rotation { rotary_dim, theta, scale, tables, .. } = rotation;
        tables.is_none().then(|| frequencies(*rotary_dim, theta.get(), scale.get())).transpose()
    }

    pub fn new(
        rotation: &Rotation,
        tables: [usize; 2],
        frequencies: Option<&'a Rc<Vec<u64>>>,
    ) -> Factors<'a> {
        Factors { rotation: *rotation, tables, frequencies: frequencies.map_or(&[], |all| all) }
    }
}

/// Factors for one token. `half`: cosine and sine of each pair. `interleaved`: the factor of each element and of
/// the other element of its pair, which is minus or plus the sine.
pub(in crate::ops) struct Row<'a> {
    rotary_dim: usize,
    interleaved: bool,
    cos: &'a mut [f32],
    sin: &'a mut [f32],
    quarters: &'a mut [f32],
    rests: &'a mut [f32],
}

impl<'a> Row<'a> {
    /// Numbers of cosines, and of angles.
    fn sizes(rotation: &Rotation) -> (usize, usize) {
        let angles = rotation.rotary_dim / 2;
        (if rotation.interleaved { rotation.rotary_dim } else { angles }, angles)
    }

    /// Scratch for [`Row::new`].
    pub fn need(rotation: &Rotation) -> Need {
        let (factors, angles) = Self::sizes(rotation);
        Need::of::<f32>(factors).and::<f32>(factors).and::<f32>(angles).and::<f32>(angles)
    }

    /// Room for the factors of any token.
    pub fn new(region: &mut Region<'a>, rotation: &Rotation) -> Self {
        let (factors, angles) = Self::sizes(rotation);
        Row {
            rotary_dim: rotation.rotary_dim,
            interleaved: rotation.interleaved,
            cos: region.slice(factors),
            sin: region.slice(factors),
            quarters: region.slice(angles),
            rests: region.slice(angles),
        }
    }

    /// Elements of a head that are rotated.
    pub fn rotary_dim(&self) -> usize {
        self.rotary_dim
    }

    /// Works out the factors of a token at `position`.
    ///
    /// # Safety
    /// `factors` must be of the rotation given to `new`. With tables, the position must be a row of theirs.
    #[inline(always)]
    pub unsafe fn fill<S: Simd>(&mut self, s: S, factors: &Factors<'_>, position: i64) {
        let n = self.rotary_dim / 2;
        match factors.rotation.tables {
            Some(Tables { strides, .. }) => {
                let table = |t: usize, i: usize| {
                    let offset = position as isize * strides[t][0] + i as isize * strides[t][1];
                    // SAFETY: the caller promised the row, and `i` is a column.
                    let factor = unsafe { *(factors.tables[t] as *const f32).offset(offset) };
                    // Results are rounded in a way that could lose a NaN with other bits.
                    if factor.is_nan() { f32::NAN } else { factor }
                };
                for i in 0..n {
                    (self.cos[i], self.sin[i]) = (table(0, i), table(1, i));
                }
            }
            None => {
                let slots = self.quarters.iter_mut().zip(&mut *self.rests);
                for ((quarter, rest), &frequency) in slots.zip(factors.frequencies) {
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
        if factors.rotation.backward {
            self.sin[..n].iter_mut().for_each(|sin| *sin = -*sin);
        }
        if self.interleaved {
            // From the end, so that no value is overwritten before it is spread.
            let whole = n - n % S::N;
            for i in (whole..n).rev() {
                let (cos, sin) = (self.cos[i], self.sin[i]);
                (self.cos[2 * i], self.cos[2 * i + 1]) = (cos, cos);
                (self.sin[2 * i], self.sin[2 * i + 1]) = (-sin, sin);
            }
            let (cos, sin) = (self.cos.as_mut_ptr(), self.sin.as_mut_ptr());
            for i in (0..whole).step_by(S::N).rev() {
                // SAFETY: the tables hold `2 n` values.
                unsafe {
                    let (c, d) = (s.load(cos.add(i)), s.load(sin.add(i)));
                    for (table, even, odd) in [(cos, c, c), (sin, s.neg(d), d)] {
                        let (low, high) = s.zip(even, odd);
                        s.store(table.add(2 * i), low);
                        s.store(table.add(2 * i + S::N), high);
                    }
                }
            }
        }
    }
}

impl Row<'_> {
    /// Puts the factors into the order in which elements of `T` are loaded. Call it once they are filled in, with the
    /// token that heads will be rotated with.
    #[inline(always)]
    pub fn arrange<S: Simd, T: CpuElement>(&mut self, s: S) {
        if T::DTYPE != DType::BF16 {
            return;
        }
        let s = s.pair();
        for table in [&mut *self.cos, &mut *self.sin] {
            for factors in table.chunks_exact_mut(<S::Pair as Simd>::N) {
                // SAFETY: the chunk is as long as the vector.
                unsafe { s.store(factors.as_mut_ptr(), T::to_unordered(s, s.load(factors.as_ptr()))) };
            }
        }
    }
}

/// One head, rotated by an op that does more than that: a task of its own, because inlined into each of them the loops
/// would take minutes to compile.
pub(in crate::ops) struct Head<'a, T> {
    /// Arranged for elements of `T`.
    pub row: &'a Row<'a>,
    pub x: *const T,
    pub out: *mut T,
    pub stream: bool,
}

impl<T: CpuElement> Head<'_, T> {
    /// Rotates the head and leaves what is not rotated to the caller; with `stream`, call [`Simd::fence`] before others
    /// read it.
    ///
    /// # Safety
    /// `x` must be readable and `out` writable for the elements that `row` rotates, the two apart or the same.
    pub unsafe fn rotate(self, tier: Tier) {
        dispatch(tier, self);
    }
}

impl<T: CpuElement> Task for Head<'_, T> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        // SAFETY: [`Head::rotate`] asks its caller for this.
        unsafe {
            let ahead = self.x.wrapping_byte_add(AHEAD);
            rotate_head(s.pair(), self.row, self.x, self.out, ahead, self.stream)
        };
    }
}

/// Rotates the head at `x` into `out`, bypassing the caches if `stream` and the alignment allow it. The rest of the
/// head is left to the caller. The head at `ahead`, any address, is prefetched.
///
/// # Safety
/// `x` must be readable and `out` writable for the elements that `row` rotates, the two apart or the same. `row` must be
/// arranged for vectors of `S` and `T`.
#[inline(always)]
unsafe fn rotate_head<S: Simd, T: CpuElement>(
    s: S,
    row: &Row<'_>,
    x: *const T,
    out: *mut T,
    ahead: *const T,
    stream: bool,
) {
    let (cos, sin) = (row.cos.as_ptr(), row.sin.as_ptr());
    let mut stream = stream && can_stream::<S, T>(out);
    if row.interleaved {
        for_vectors::<S>(
            row.rotary_dim,
            #[inline(always)]
            |i, count| {
                // SAFETY: inside the rotated part. Vectors have an even number of lanes, so none divides a pair.
                unsafe {
                    fetch::<S, T>(ahead.wrapping_add(i));
                    let x = load_unordered_at(s, x, i, count);
                    let (c, d) = (load_at(s, cos, i, count), load_at(s, sin, i, count));
                    let other = if count == S::N { T::swap_pairs_unordered(s, x) } else { s.swap_pairs(x) };
                    put_near_at(s, out, i, count, s.fma(x, c, s.mul(other, d)), stream);
                }
            },
        );
        return;
    }
    let n = row.rotary_dim / 2;
    stream &= can_stream::<S, T>(out.wrapping_add(n));
    for_vectors::<S>(
        n,
        #[inline(always)]
        |i, count| {
            // SAFETY: `i + count <= n`.
            unsafe {
                for half in [ahead, ahead.wrapping_add(n)] {
                    fetch::<S, T>(half.wrapping_add(i));
                }
                let (a, b) = (load_unordered_at(s, x, i, count), load_unordered_at(s, x.add(n), i, count));
                let (c, d) = (load_at(s, cos, i, count), load_at(s, sin, i, count));
                put_near_at(s, out, i, count, s.fnma(b, d, s.mul(a, c)), stream);
                put_near_at(s, out.add(n), i, count, s.fma(b, c, s.mul(a, d)), stream);
            }
        },
    );
}
