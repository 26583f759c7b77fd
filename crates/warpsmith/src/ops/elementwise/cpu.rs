//! The engine on the CPU, one source for all tiers.

mod blocks;

use super::{Grid, MAX_STREAMS};
use crate::cpu::prefetch::{claim_ahead, fetch};
use crate::cpu::rows::{DenseRows, with_float};
use crate::cpu::simd::{Four, Pair};
use crate::cpu::{CpuElement, Simd, Task, Tier, dispatch, parallel_for_with_scratch, should_stream};
use crate::tensor::DType;
use blocks::{Cut, Form, Part, Pass};
use std::marker::PhantomData;

/// The fewest elements a thread works on: less does not pay for waking a thread.
const GRAIN: usize = 1 << 15;

/// What is computed for each element: `I` inputs to `O` outputs, on vectors. `T` is the type in memory: expressions
/// need only be as accurate as it can tell.
pub(in crate::ops) trait Expression<const I: usize, const O: usize>:
    Copy + Send + Sync
{
    /// Whether the first two inputs may be the even and odd elements of one tensor; the code for that is only made
    /// where it can be needed.
    const PAIRS: bool = false;
    /// Whether results are approximations, so that the rounding of halfway cases does not matter.
    const NEAR: bool = false;
    /// Whether the last input is often the same for all rows, like a bias: then it is read once for blocks side by
    /// side. Not with pairs.
    const SHARES: bool = false;

    /// Implementations must be `#[inline(always)]`.
    fn apply<S: Simd, T: CpuElement>(self, s: S, x: [S::V; I]) -> [S::V; O];
}

/// Evaluates `expression` over `grid`; `addresses` are those of the inputs, then of the outputs.
///
/// # Safety
/// The tensors must be at the addresses as `grid` describes, and outputs may overlap inputs only element for element.
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
    let grain = GRAIN.div_ceil(grid.columns.clamp(1, cut.columns));
    let need = DenseRows::<f32>::need(grid.dtype, cut.columns, &grid.steps[..I + O]);
    parallel_for_with_scratch(grid.num_rows * cut.blocks, grain, need, |units, region| {
        with_float!(grid.dtype, T => {
            let part = Part::<T> { grid, cut, addresses, units, stream, region, t: PhantomData };
            // SAFETY: passed on.
            unsafe { run_part::<T, _, I, O>(tier, part, expression) };
        })
    });
}

/// # Safety
/// As [`run`].
unsafe fn run_part<T: CpuElement, E: Expression<I, O>, const I: usize, const O: usize>(
    tier: Tier,
    part: Part<'_, T>,
    e: E,
) {
    const { assert!(!(E::SHARES && E::PAIRS)) };
    let paired = E::PAIRS && part.grid.paired;
    let form = Form { inputs: I, outputs: O, paired, shares: E::SHARES };
    let pass = |pass: &Pass<'_, T>| {
        if E::PAIRS && paired {
            dispatch(tier, Columns::<T, _, I, O, true> { pass, e });
        } else {
            dispatch(tier, Columns::<T, _, I, O, false> { pass, e });
        }
    };
    // SAFETY: passed on.
    unsafe { blocks::walk(tier, part, form, &pass) }
}

/// The columns of one pass. Everything else is prepared once for all expressions: this part is compiled for every expression,
/// type and tier.
///
/// With `PAIRED`, the first two inputs, and the outputs if there are two, are the even and odd elements of one dense tensor: that
/// is where the first of the two is, and the second is no tensor of its own.
struct Columns<'a, T, E, const I: usize, const O: usize, const PAIRED: bool> {
    pass: &'a Pass<'a, T>,
    e: E,
}

impl<T: CpuElement, E: Expression<I, O>, const I: usize, const O: usize, const PAIRED: bool>
    Columns<'_, T, E, I, O, PAIRED>
{
    /// Reads the inputs at column `i` of a block that begins at `from`, but the last if it is `common`. Pairs are
    /// separated in order, so the inputs beside them are in order too.
    ///
    /// # Safety
    /// A vector of columns must be readable.
    #[inline(always)]
    unsafe fn load<S: Simd>(
        s: S,
        from: &[*const T; MAX_STREAMS],
        i: usize,
        common: Option<S::V>,
    ) -> [S::V; I] {
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
    unsafe fn store<S: Simd>(s: S, to: &[*mut T; MAX_STREAMS], i: usize, y: [S::V; O], stream: bool) {
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
                if PAIRED && E::NEAR {
                    // Rounded as where pairs are apart: a row has the same bits in every layout.
                    T::put_near(s, p, T::to_unordered(s, y), stream);
                } else if PAIRED {
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
    for Columns<'_, T, E, I, O, PAIRED>
{
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        // Four vectors in lock-step: the longest expressions are chains of dozens of operations.
        let s = s.pair().pair();
        let lanes = <Four<S> as Simd>::N;
        let Pass { from, to, ahead, ref columns, common, stream } = *self.pass;
        let form = Form { inputs: I, outputs: O, paired: PAIRED, shares: E::SHARES };
        let mut i = columns.start;
        while i < columns.end {
            // SAFETY: `walk` gives columns that the blocks have, and reads each before it is written.
            unsafe {
                let last = if E::SHARES && common {
                    Some(T::load_unordered(s, from[0][I - 1].add(i)))
                } else {
                    None
                };
                for ((from, to), ahead) in from.iter().zip(to).zip(ahead) {
                    for t in 0..I {
                        if E::SHARES && common && t + 1 == I {
                            break;
                        }
                        let width = form.width(t);
                        for part in 0..width {
                            let at = i.wrapping_mul(width).wrapping_add(part * lanes);
                            fetch::<Four<S>, T>(ahead[t].wrapping_add(at));
                        }
                    }
                    let x = Self::load(s, from, i, last);
                    Self::store(s, to, i, self.e.apply::<Four<S>, T>(s, x), stream);
                }
            }
            i = i.wrapping_add(lanes);
        }
    }
}

#[cfg(feature = "tests")]
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
            let part = Part::<T> { grid, cut, addresses, units, stream, region, t: PhantomData };
            // SAFETY: the tensors are parts of `memory`.
            unsafe { run_part(tier, part, Mixed) };
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
