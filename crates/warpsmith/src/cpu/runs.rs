//! Elementwise work on several runs of memory side by side.

use super::element::CpuElement;
use super::prefetch::{claim_ahead, fetch};
use super::simd::Simd;
use crate::tensor::DType;

/// Runs of elements that are processed side by side.
pub struct Runs<'a, T, U> {
    /// Where each begins, and where its results go.
    pub at: &'a [(*const T, *mut U)],
    /// Where the next runs begin, to be prefetched; at most as many, and any address is allowed.
    pub next: &'a [*const T],
    /// Elements of each.
    pub n: usize,
    /// How many bytes ahead to prefetch.
    pub ahead: usize,
}

impl<T: CpuElement, U: CpuElement> Runs<'_, T, U> {
    /// [`super::map`] of all runs; `f` is told the number of the run. Call [`Simd::fence`] after streams.
    ///
    /// # Safety
    /// As [`super::map`], for each of them.
    #[inline(always)]
    pub unsafe fn map<S: Simd>(&self, s: S, stream: bool, f: impl Fn(usize, S::V) -> S::V) {
        // SAFETY: passed on.
        unsafe {
            self.map_by(
                s,
                stream,
                #[inline(always)]
                |p| T::load(s, p),
                #[inline(always)]
                |p, v, stream| U::put(s, p, v, stream),
                f,
            )
        }
    }

    /// [`Runs::map`] between bf16 and e4m3, which have the same order of lanes where none is asked for. With `near`, results are
    /// those of [`CpuElement::put_near`].
    ///
    /// # Safety
    /// As [`super::map`]; the types must be these.
    #[inline(always)]
    pub unsafe fn map_unordered<S: Simd>(
        &self,
        s: S,
        stream: bool,
        near: bool,
        f: impl Fn(usize, S::V) -> S::V,
    ) {
        // SAFETY: passed on.
        unsafe {
            self.map_by(
                s,
                stream,
                #[inline(always)]
                |p| T::load_unordered(s, p),
                #[inline(always)]
                |p, v, stream| {
                    if near && U::DTYPE == DType::BF16 {
                        U::put_near(s, p, v, stream)
                    } else {
                        U::put_unordered(s, p, v, stream)
                    }
                },
                f,
            )
        }
    }

    /// [`Runs::map`] by these loads and stores of whole vectors.
    ///
    /// # Safety
    /// As [`super::map`].
    #[inline(always)]
    unsafe fn map_by<S: Simd>(
        &self,
        s: S,
        stream: bool,
        load: impl Fn(*const T) -> S::V,
        put: impl Fn(*mut U, S::V, bool),
        f: impl Fn(usize, S::V) -> S::V,
    ) {
        let Runs { at, next, n, ahead } = *self;
        // Elements up to where streams may begin: in all runs the same, or there are none.
        let to_line = |dst: *mut U| dst.align_offset((S::N * size_of::<U>()).min(64)).min(n);
        let head = at.first().map_or(0, |&(_, dst)| to_line(dst));
        let stream = stream && head < S::N && at.iter().all(|&(_, dst)| to_line(dst) == head);
        let head = if stream { head } else { 0 };
        let end = n - (n - head) % S::N;
        // SAFETY: `0..head`, whole vectors up to `end`, and the rest are the `n` elements of the caller's. Streams begin only
        // where `dst` is aligned.
        unsafe {
            let ends = [(0, head), (end, n - end)];
            for (i, count) in ends {
                for (k, &(src, dst)) in at.iter().enumerate() {
                    if count > 0 {
                        let v = f(k, T::load_partial(s, src.add(i), count));
                        U::store_partial(s, dst.add(i), v, count);
                    }
                }
            }
            let mut i = head;
            while i < end {
                // Elements of the same run as long as there are any, then those of the run after it.
                let reach = i.wrapping_add(ahead / size_of::<T>());
                let past = reach >= end;
                for (k, &(src, dst)) in at.iter().enumerate() {
                    let wanted = match next.get(k) {
                        Some(next) if past => next.wrapping_add(reach - end),
                        _ => src.wrapping_add(reach),
                    };
                    fetch::<S, T>(wanted);
                    let v = f(k, load(src.add(i)));
                    if !stream {
                        claim_ahead::<S, U>(dst.add(i));
                    }
                    put(dst.add(i), v, stream);
                }
                i = i.wrapping_add(S::N);
            }
        }
    }
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;
    use crate::cpu::{Task, Tier, dispatch};
    use half::bf16;

    /// Runs of `x` that begin where `starts` says, doubled, and the second and fourth with the sign changed.
    struct Doubled<'a>(&'a [f32], &'a mut [bf16], &'a [usize], usize, bool);

    impl Task for Doubled<'_> {
        type Out = ();

        #[inline(always)]
        fn run<S: Simd>(self, s: S) {
            let Doubled(x, out, starts, n, stream) = self;
            assert!(starts.iter().all(|start| start + n <= x.len().min(out.len())));
            let (x, out) = (x.as_ptr(), out.as_mut_ptr());
            let at: Vec<_> =
                starts.iter().map(|&start| (x.wrapping_add(start), out.wrapping_add(start))).collect();
            let runs = Runs { at: &at, next: &[x, x], n, ahead: 256 };
            // SAFETY: the runs are inside of two slices.
            unsafe {
                runs.map(
                    s.pair(),
                    stream,
                    #[inline(always)]
                    |k, v| s.pair().mul(v, s.pair().splat(if k % 2 == 0 { 2.0 } else { -2.0 })),
                );
            }
            s.fence();
        }
    }

    #[test]
    fn each_run_is_mapped_and_nothing_else_written() {
        const LEN: usize = 2000;
        let x: Vec<f32> = (0..LEN).map(|i| (i % 200) as f32 + 1.0).collect();
        let all: [&[usize]; 5] = [&[0], &[0, 512], &[3, 515, 1027, 1539], &[1, 700, 1100, 1530], &[]];
        for (tier, stream) in Tier::available().into_iter().flat_map(|tier| [(tier, false), (tier, true)]) {
            for (starts, n) in
                all.into_iter().flat_map(|starts| [0, 1, 31, 64, 200, 399].map(|n| (starts, n)))
            {
                let mut out = vec![bf16::ZERO; LEN];
                dispatch(tier, Doubled(&x, &mut out, starts, n, stream));
                for (i, got) in out.iter().enumerate() {
                    let run = starts.iter().position(|&start| (start..start + n).contains(&i));
                    let sign = run.map_or(0.0, |k| if k % 2 == 0 { 2.0 } else { -2.0 });
                    assert_eq!(got.to_f32(), sign * x[i], "{tier} {stream} {starts:?} {n} {i}");
                }
            }
        }
    }
}
