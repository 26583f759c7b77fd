//! The engine on the CPU, one source for all tiers.

use super::{Grid, MAX_STREAMS};
use crate::cpu::prefetch::{SIDE_BY_SIDE, claim_ahead, fetch, side_by_side};
use crate::cpu::rows::{DenseRows, can_stream, with_float};
use crate::cpu::simd::{Four, MAX_LANES, Pair};
use crate::cpu::{CpuElement, Region, Simd, Task, Tier, dispatch, parallel_for_with_scratch, should_stream};
use crate::tensor::DType;
use std::marker::PhantomData;
use std::ops::Range;

/// Most columns of a block: strided ones are gathered first, and the copies must stay in the caches.
const BLOCK: usize = 4096;
/// Elements a thread works on at least: less is not worth waking one.
const GRAIN: usize = 1 << 15;

/// What is computed for each element: `I` inputs to `O` outputs, on vectors. `T` is the type in memory: expressions
/// need only be as accurate as it can tell.
pub(in crate::ops) trait Expression<const I: usize, const O: usize>:
    Copy + Send + Sync
{
    /// Whether the first two inputs may be the even and odd elements of one tensor; the code for that is only made
    /// where it can be needed.
    const PAIRS: bool = false;
    /// Whether results are approximations, for which it does not matter how halfway cases are rounded.
    const NEAR: bool = false;
    /// Whether the last input often is the same for all rows, as a bias is. It is then read once for blocks side by side. Not
    /// with pairs.
    const SHARES: bool = false;

    /// Implementations must be `#[inline(always)]`.
    fn apply<S: Simd, T: CpuElement>(self, s: S, x: [S::V; I]) -> [S::V; O];
}

/// Evaluates `expression` over `grid`; `addresses` are those of the inputs, then of the outputs.
///
/// # Safety
/// The tensors must lie at the addresses as `grid` describes, and outputs overlap inputs only element for element.
pub(in crate::ops) unsafe fn run<const I: usize, const O: usize>(
    grid: &Grid,
    tier: Tier,
    addresses: &[usize],
    expression: impl Expression<I, O>,
) {
    const { assert!(I + O <= MAX_STREAMS) };
    assert_eq!(addresses.len(), I + O);
    let stream = should_stream(grid.len() * O * grid.dtype.size());
    let cut = Cut::new(grid.columns);
    let e = expression;
    let grain = GRAIN.div_ceil(grid.columns.clamp(1, cut.columns));
    let need = DenseRows::<f32>::need(grid.dtype, cut.columns, &grid.steps[..I + O]);
    parallel_for_with_scratch(grid.num_rows * cut.blocks, grain, need, |units, region| {
        with_float!(grid.dtype, T => {
            let part = Part::<T, _> { grid, cut, addresses, units, stream, region, e, t: PhantomData };
            run_part::<T, _, I, O>(tier, part);
        })
    });
}

/// How rows are cut into blocks: as equal as they can be, so that several can be worked on side by side.
#[derive(Clone, Copy)]
struct Cut {
    /// Columns of a block, whole vectors of any tier; the last of a row has what is left.
    columns: usize,
    /// Blocks of a row.
    blocks: usize,
}

impl Cut {
    fn new(columns: usize) -> Cut {
        let fewest = columns.div_ceil(BLOCK).max(1);
        let each = columns.div_ceil(fewest).next_multiple_of(MAX_LANES).max(MAX_LANES);
        Cut { columns: each, blocks: columns.div_ceil(each) }
    }
}

fn run_part<T: CpuElement, E: Expression<I, O>, const I: usize, const O: usize>(
    tier: Tier,
    part: Part<'_, T, E>,
) {
    const { assert!(!(E::SHARES && E::PAIRS)) };
    if E::PAIRS && part.grid.paired {
        return dispatch(tier, Walk::<T, _, I, O, true>(part));
    }
    dispatch(tier, Walk::<T, _, I, O, false>(part));
}

/// Some blocks of columns.
struct Part<'a, T, E> {
    grid: &'a Grid,
    cut: Cut,
    addresses: &'a [usize],
    units: Range<usize>,
    stream: bool,
    region: Region<'a>,
    e: E,
    t: PhantomData<T>,
}

impl<T, E> Part<'_, T, E> {
    /// The blocks from `unit` on that can be worked on side by side, `most` of them at most: they are as long as the first.
    #[inline(always)]
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

/// With `PAIRED`, the first two inputs, and the outputs if there are two, are the even and odd elements of one dense tensor: that
/// is where the first of the two is, and the second is no tensor of its own.
struct Walk<'a, T, E, const I: usize, const O: usize, const PAIRED: bool>(Part<'a, T, E>);

impl<T: CpuElement, E: Expression<I, O>, const I: usize, const O: usize, const PAIRED: bool>
    Walk<'_, T, E, I, O, PAIRED>
{
    /// How many neighbouring elements of tensor `t` a column has.
    const fn width(t: usize) -> usize {
        match t {
            0 if PAIRED => 2,
            1 if PAIRED => 0,
            _ if t == I && PAIRED && O == 2 => 2,
            _ if t == I + 1 && PAIRED => 0,
            _ => 1,
        }
    }

    /// Reads the inputs at column `i` of a block that begins at `from`, but the last if it is `common`. Pairs come apart in
    /// order, so what is beside them is in order too.
    ///
    /// # Safety
    /// A vector of columns must be readable.
    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, from: &[*const T; I], i: usize, common: Option<S::V>) -> [S::V; I] {
        let mut x = [s.zero(); I];
        // SAFETY: passed on.
        unsafe {
            for (t, x) in x.iter_mut().enumerate().skip(if PAIRED { 2 } else { 0 }) {
                let p = from[t].add(i);
                *x = match common {
                    Some(common) if E::SHARES && t + 1 == I => common,
                    _ if PAIRED => T::load(s, p),
                    _ => T::load_unordered(s, p),
                };
            }
            if PAIRED {
                let p = from[0].add(i.wrapping_mul(2));
                (x[0], x[1]) = if T::DTYPE == DType::BF16 {
                    let [even, odd] = T::load_unordered(Pair(s), p);
                    (even, odd)
                } else {
                    let [a, b] = T::load(Pair(s), p);
                    s.unzip(a, b)
                };
            }
        }
        x
    }

    /// Writes the outputs at column `i` of a block that begins at `to`.
    ///
    /// # Safety
    /// A vector of columns must be writable; with `stream`, aligned as [`can_stream`] says.
    #[inline(always)]
    unsafe fn store<S: Simd>(s: S, to: &[*mut T; O], i: usize, y: [S::V; O], stream: bool) {
        // SAFETY: passed on.
        unsafe {
            if PAIRED && O == 2 {
                let p = to[0].add(i.wrapping_mul(2));
                let both = if T::DTYPE == DType::BF16 {
                    [y[0], y[1]]
                } else {
                    let (a, b) = s.zip(y[0], y[1]);
                    [a, b]
                };
                if !stream {
                    claim_ahead::<Pair<S>, T>(p);
                }
                return if E::NEAR {
                    T::put_near(Pair(s), p, both, stream)
                } else {
                    T::put_unordered(Pair(s), p, both, stream)
                };
            }
            for (y, output) in y.into_iter().zip(to) {
                let p = output.add(i);
                if !stream {
                    claim_ahead::<S, T>(p);
                }
                if PAIRED {
                    T::put(s, p, y, stream);
                } else if E::NEAR {
                    T::put_near(s, p, y, stream);
                } else {
                    T::put_unordered(s, p, y, stream);
                }
            }
        }
    }
}

impl<T: CpuElement, E: Expression<I, O>, const I: usize, const O: usize, const PAIRED: bool> Task
    for Walk<'_, T, E, I, O, PAIRED>
{
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mut part = self.0;
        // Four vectors in lock-step: the longest expressions are chains of dozens of operations.
        let s = s.pair().pair();
        let lanes = <Four<S> as Simd>::N;
        let mut steps = part.grid.steps;
        for (t, step) in steps.iter_mut().enumerate().take(I + O) {
            *step = if Self::width(t) == 1 { *step } else { 1 };
        }
        let steps = &steps[..I + O];
        let dense = steps.iter().all(|&step| step == 1);
        let (most, reach) = side_by_side(part.stream && dense);
        let mut scratch = DenseRows::<T>::new(&mut part.region, part.cut.columns, steps);
        // What is left of a row is worked on in copies of a whole vector: one body for both halves the code.
        let mut ends = [[T::from_f32(0.0); MAX_LANES]; MAX_STREAMS];
        let end = |t: usize| t * MAX_LANES;
        let mut unit = part.units.start;
        let mut group = part.group(unit, most);
        while group.blocks > 0 {
            let Group { at, n, blocks } = group;
            unit += blocks;
            let next = part.group(unit, most);
            scratch.set_len(n);
            // SAFETY: the caller of `run` promised the tensors; blocks are disjoint; outputs overlap inputs only
            // element for element, and each element is read before it is written.
            unsafe {
                let mut from = [[std::ptr::null::<T>(); I]; SIDE_BY_SIDE];
                let mut to = [[std::ptr::null_mut::<T>(); O]; SIDE_BY_SIDE];
                let (mut ahead, mut stream) = (from, part.stream);
                let tail = n % lanes;
                let whole = n - tail;
                // What is asked for are elements of this block as long as there are any, then the next block's.
                let near = n.saturating_sub(reach / size_of::<T>()) / lanes * lanes;
                for k in 0..blocks {
                    for t in 0..I {
                        from[k][t] = scratch.gather(t, at[k][t], steps[t]);
                        ahead[k][t] = from[k][t].wrapping_add((n - near) * Self::width(t));
                    }
                    for t in 0..O {
                        to[k][t] = scratch.target(I + t, at[k][I + t], steps[I + t]);
                        let streams = steps[I + t] == 1 && can_stream::<S::Pair, T>(to[k][t]);
                        stream &= streams || Self::width(I + t) == 0;
                    }
                }
                // Columns with others ahead of them in the block, the rest of the whole vectors, and for each block what is left.
                for pass in 0..2 + blocks {
                    let (range, members) = match pass {
                        0 => (0..near, 0..blocks),
                        1 => (near..whole, 0..blocks),
                        _ => (0..if tail > 0 { lanes } else { 0 }, pass - 2..pass - 1),
                    };
                    if pass == 1 {
                        for k in 0..blocks {
                            for t in 0..I {
                                let p =
                                    if k < next.blocks && steps[t] == 1 { next.at[k][t] } else { at[k][t] };
                                ahead[k][t] = p.cast_const().wrapping_sub(near * Self::width(t));
                            }
                        }
                    } else if pass > 1 && tail > 0 {
                        let (k, ends) = (pass - 2, ends.as_mut_ptr().cast::<T>());
                        for t in 0..I {
                            let (p, width) =
                                (from[k][t].wrapping_add(whole * Self::width(t)), Self::width(t));
                            std::ptr::copy_nonoverlapping(p, ends.add(end(t)), tail * width);
                            from[k][t] = ends.add(end(t));
                        }
                        (ahead[k], stream) = (from[k], false);
                        for t in 0..O {
                            to[k][t] = ends.add(end(I + t));
                        }
                    }
                    let (from, to, ahead) = (&from[members.clone()], &to[members.clone()], &ahead[members]);
                    let shared =
                        E::SHARES && from.len() > 1 && from.iter().all(|from| from[I - 1] == at[0][I - 1]);
                    let mut i = range.start;
                    while i < range.end {
                        let common =
                            if shared { Some(T::load_unordered(s, from[0][I - 1].add(i))) } else { None };
                        for ((from, to), ahead) in from.iter().zip(to).zip(ahead) {
                            for (t, ahead) in ahead.iter().enumerate() {
                                if shared && t + 1 == I {
                                    break;
                                }
                                let width = Self::width(t);
                                for part in 0..width {
                                    let at = i.wrapping_mul(width).wrapping_add(part * lanes);
                                    fetch::<Four<S>, T>(ahead.wrapping_add(at));
                                }
                            }
                            let x = Self::load(s, from, i, common);
                            Self::store(s, to, i, part.e.apply::<Four<S>, T>(s, x), stream);
                        }
                        i = i.wrapping_add(lanes);
                    }
                    if pass > 1 && tail > 0 {
                        for t in 0..O {
                            let width = Self::width(I + t);
                            let out = scratch.target(I + t, at[pass - 2][I + t], steps[I + t]);
                            let ends = ends.as_ptr().cast::<T>().add(end(I + t));
                            std::ptr::copy_nonoverlapping(
                                ends,
                                out.wrapping_add(whole * width),
                                tail * width,
                            );
                        }
                    }
                }
                for t in I..I + O {
                    scratch.scatter(t, at[0][t], steps[t]);
                }
            }
            group = next;
        }
        if part.stream {
            s.fence();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Stream;
    use super::*;
    use crate::cpu::scratch;
    use crate::tensor::{Layout, Shape};
    use half::{bf16, f16};

    #[derive(Clone, Copy)]
    struct Mixed;

    impl Expression<3, 2> for Mixed {
        const PAIRS: bool = true;

        #[inline(always)]
        fn apply<S: Simd, T: CpuElement>(self, s: S, [a, b, c]: [S::V; 3]) -> [S::V; 2] {
            [s.fma(a, b, c), s.sub(b, a)]
        }
    }

    /// Two outputs of three inputs, the first two of each as pairs or apart, past the caches or not.
    fn results<T: CpuElement>(
        tier: Tier,
        [rows, columns]: [usize; 2],
        paired: bool,
        stream: bool,
    ) -> Vec<f32> {
        let n = rows * columns;
        // From a cache line on, so that results can go past the caches.
        let mut memory = vec![T::from_f32(0.0); 5 * n + 64];
        let skipped = memory.as_ptr().align_offset(64);
        let memory = &mut memory[skipped..];
        memory.iter_mut().enumerate().for_each(|(i, x)| *x = input(i));
        let base = memory.as_mut_ptr();
        let step = if paired { 2 } else { 1 };
        let tensor = |at: usize, step: usize| Stream {
            layout: Layout::strided(
                Shape::new(&[rows, columns]).unwrap(),
                &[(columns * step) as isize, step as isize],
            )
            .unwrap(),
            address: base.wrapping_add(at) as usize,
        };
        let second = if paired { 1 } else { n };
        let streams = [
            tensor(0, step),
            tensor(second, step),
            tensor(2 * n, 1),
            tensor(3 * n, step),
            tensor(3 * n + second, step),
        ];
        let grid = Grid::new(T::DTYPE, streams, if paired { &[0, 3] } else { &[] });
        assert_eq!(grid.paired, paired);
        let cut = Cut::new(grid.columns);
        let units = 0..grid.num_rows * cut.blocks;
        let addresses = streams.map(|stream| stream.address);
        let (grid, addresses) = (&grid, &addresses);
        let need = DenseRows::<T>::need(T::DTYPE, cut.columns, &grid.steps[..5]);
        scratch::with(need, |region| {
            run_part(
                tier,
                Part::<T, _> { grid, cut, addresses, units, stream, region, e: Mixed, t: PhantomData },
            );
        });
        memory[3 * n..5 * n].iter().map(|x| x.to_f32()).collect()
    }

    fn input<T: CpuElement>(i: usize) -> T {
        T::from_f32((i * 37 % 251) as f32 / 8.0)
    }

    fn check<T: CpuElement>() {
        let at = |i: usize| input::<T>(i).to_f32();
        for [rows, columns] in [[1, 64], [7, 100], [2, 4099], [5, 4096], [1, 30_000]] {
            let n = rows * columns;
            for paired in [false, true] {
                for (tier, stream) in Tier::available().into_iter().flat_map(|t| [(t, false), (t, true)]) {
                    let got = results::<T>(tier, [rows, columns], paired, stream);
                    for i in 0..n {
                        let [a, b] = if paired { [2 * i, 2 * i + 1] } else { [i, n + i] };
                        let want = [at(a).mul_add(at(b), at(2 * n + i)), at(b) - at(a)];
                        let want = want.map(|x| T::from_f32(x).to_f32());
                        assert_eq!([got[a], got[b]], want, "{tier} {rows} {columns} {i} {paired} {stream}");
                    }
                }
            }
        }
    }

    #[test]
    fn blocks_side_by_side_have_the_results_of_single_ones() {
        check::<f32>();
        check::<bf16>();
        check::<f16>();
    }
}
