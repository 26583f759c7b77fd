//! `cast` on the CPU, one source for all tiers.

use super::{OUT, Problem, SCALE, Scaling, X};
use crate::cpu::rows::{Divide, with_element};
use crate::cpu::simd::{Scaled, bf16_to_e4m3};
use crate::cpu::{CpuElement, Simd, Task, dispatch, map, map_unordered, parallel_for, should_stream};
use crate::dtype::DType;
use crate::error::Result;
use crate::registry::Launch;
use std::marker::PhantomData;
use std::ops::Range;

/// Elements a thread works on at least: less is not worth waking one.
const GRAIN: usize = 1 << 15;

pub(super) fn run(launch: &Launch<'_, Problem>) -> Result<()> {
    let p = launch.problem;
    let elements = p.num_rows * p.num_cols;
    let stream = should_stream(elements * p.to.size());
    with_element!(p.from, T => with_element!(p.to, U => {
        parallel_for(elements, GRAIN, |range| {
            dispatch(launch.tier, Convert::<T, U> { launch, range, stream, types: PhantomData });
        });
    }));
    Ok(())
}

/// Elements `range`, counted row by row.
struct Convert<'a, T, U> {
    launch: &'a Launch<'a, Problem>,
    range: Range<usize>,
    stream: bool,
    types: PhantomData<(T, U)>,
}

impl<T: CpuElement, U: CpuElement> Task for Convert<'_, T, U> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let p = self.launch.problem;
        let args = self.launch.args;
        let Range { mut start, end } = self.range;
        while start < end {
            let (row, col) = (start / p.num_cols, start % p.num_cols);
            let n = (p.num_cols - col).min(end - start);
            let [x_at, out_at, scale_at, _] = p.rows.offsets(row);
            let [x_step, out_step] = p.steps;
            let x = (args.address(X) as *const T).wrapping_add(x_at).wrapping_offset(col as isize * x_step);
            let out =
                (args.address(OUT) as *mut U).wrapping_add(out_at).wrapping_offset(col as isize * out_step);
            // SAFETY: `check` bound all shapes to these sizes and strides; threads get disjoint elements; out overlaps
            // x only element for element.
            unsafe {
                let scale = match p.scaling {
                    Scaling::None => 1.0,
                    _ => *(args.address(SCALE) as *const f32).add(scale_at),
                };
                if x_step == 1 && out_step == 1 {
                    convert_dense(s.pair(), p.scaling, scale, x, out, n, self.stream);
                } else {
                    for i in 0..n as isize {
                        let value = (*x.offset(i * x_step)).to_f32();
                        *out.offset(i * out_step) = U::from_f32(match p.scaling {
                            Scaling::None => value,
                            Scaling::Multiply => value * scale,
                            Scaling::Divide => value / scale,
                        });
                    }
                }
            }
            start += n;
        }
    }
}

/// # Safety
/// As [`map`].
#[inline(always)]
unsafe fn convert_dense<S: Simd, T: CpuElement, U: CpuElement>(
    s: S,
    scaling: Scaling,
    scale: f32,
    x: *const T,
    out: *mut U,
    n: usize,
    stream: bool,
) {
    let mut done = 0;
    if T::DTYPE == DType::BF16 && U::DTYPE == DType::F8E4M3 {
        let scaled = match scaling {
            Scaling::None => Scaled::Times(1.0),
            Scaling::Multiply => Scaled::Times(scale),
            Scaling::Divide => Scaled::Over(scale),
        };
        // SAFETY: passed on; both types are transparent wrappers of their bits, and tensors of two types are apart.
        done = unsafe { bf16_to_e4m3(s, (x.cast(), out.cast(), n), scaled, stream) };
        if stream {
            s.fence();
        }
    }
    let (x, out, n) = (x.wrapping_add(done), out.wrapping_add(done), n - done);
    // An 8-bit result is no quotient of those that may be off by a unit.
    let (divide, scale) = (Divide::by(s, scale), s.splat(scale));
    let map = Map { s, x, out, n, stream };
    // SAFETY: passed on.
    unsafe {
        match scaling {
            Scaling::None => map.with(
                true,
                #[inline(always)]
                |v| v,
            ),
            Scaling::Multiply => map.with(
                false,
                #[inline(always)]
                |v| s.mul(v, scale),
            ),
            Scaling::Divide => map.with(
                false,
                #[inline(always)]
                |v| if size_of::<U>() == 1 { divide.quotient(s, v) } else { s.div(v, scale) },
            ),
        }
    }
}

/// The arguments of [`map`] but for the function.
struct Map<S, T, U> {
    s: S,
    x: *const T,
    out: *mut U,
    n: usize,
    stream: bool,
}

impl<S: Simd, T: CpuElement, U: CpuElement> Map<S, T, U> {
    /// `unchanged` says that results are the elements themselves.
    ///
    /// # Safety
    /// As [`map`].
    #[inline(always)]
    unsafe fn with(self, unchanged: bool, f: impl Fn(S::V) -> S::V) {
        let Map { s, x, out, n, stream } = self;
        // SAFETY: passed on. Every value of e4m3 is one of bf16, however it would be rounded.
        unsafe {
            match (T::DTYPE, U::DTYPE) {
                (DType::BF16, DType::F8E4M3) | (DType::F8E4M3, DType::BF16) => {
                    map_unordered(s, (x, out, n, stream), unchanged, f)
                }
                _ => map(s, x, out, n, stream, f),
            }
        }
    }
}
