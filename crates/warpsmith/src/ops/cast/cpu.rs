//! `cast` on the CPU, one source for all tiers.

use super::{OUT, Problem, SCALE, Scaling, X};
use crate::cpu::e4m3::{Scaled, bf16_to_e4m3};
use crate::cpu::prefetch::{SIDE_BY_SIDE, side_by_side};
use crate::cpu::rows::{Divide, with_element};
use crate::cpu::{CpuElement, Runs, Simd, Task, dispatch, parallel_for, should_stream};
use crate::error::Result;
use crate::op::Launch;
use crate::tensor::DType;
use std::marker::PhantomData;
use std::ops::Range;

/// The fewest elements a thread works on: less does not pay for waking a thread.
const GRAIN: usize = 1 << 15;
/// The most elements of a row processed in one go. Several of these are processed side by side.
const BLOCK: usize = 8192;

pub(super) fn run(launch: &Launch<'_, Problem>) -> Result<()> {
    let p = launch.problem;
    let stream = should_stream(p.num_rows * p.num_cols * p.to.size());
    let blocks = p.num_cols.div_ceil(BLOCK);
    let grain = GRAIN.div_ceil(p.num_cols.clamp(1, BLOCK));
    with_element!(p.from, T => with_element!(p.to, U => {
        parallel_for(p.num_rows * blocks, grain, |units| {
            dispatch(launch.tier, Convert::<T, U> { launch, units, stream, types: PhantomData });
        });
    }));
    Ok(())
}

/// Blocks of rows, counted row by row.
struct Convert<'a, T, U> {
    launch: &'a Launch<'a, Problem>,
    units: Range<usize>,
    stream: bool,
    types: PhantomData<(T, U)>,
}

/// Blocks of one length that are worked on side by side.
struct Group<T, U> {
    at: [(*const T, *mut U); SIDE_BY_SIDE],
    scales: [f32; SIDE_BY_SIDE],
    /// Elements of each.
    n: usize,
    blocks: usize,
}

impl<T: CpuElement, U: CpuElement> Convert<'_, T, U> {
    /// The blocks from `unit` on that are as long as the first.
    fn group(&self, unit: usize) -> Group<T, U> {
        let (p, args) = (self.launch.problem, self.launch.args);
        let per_row = p.num_cols.div_ceil(BLOCK);
        let at = [(std::ptr::null(), std::ptr::null_mut()); SIDE_BY_SIDE];
        let mut group = Group { at, scales: [1.0; SIDE_BY_SIDE], n: 0, blocks: 0 };
        for unit in unit..self.units.end.min(unit.saturating_add(side_by_side(self.stream).0)) {
            let start = unit % per_row * BLOCK;
            let n = BLOCK.min(p.num_cols - start);
            if group.blocks > 0 && n != group.n {
                break;
            }
            let [x_at, out_at, scale_at, _] = p.rows.offsets(unit / per_row);
            let [x, out] = [0, 1].map(|t| start as isize * p.steps[t]);
            group.at[group.blocks] = (
                (args.address(X) as *const T).wrapping_add(x_at).wrapping_offset(x),
                (args.address(OUT) as *mut U).wrapping_add(out_at).wrapping_offset(out),
            );
            if p.scaling != Scaling::None {
                // SAFETY: `check` bound its shape to the rows.
                group.scales[group.blocks] = unsafe { *(args.address(SCALE) as *const f32).add(scale_at) };
            }
            (group.n, group.blocks) = (n, group.blocks + 1);
        }
        group
    }
}

impl<T: CpuElement, U: CpuElement> Task for Convert<'_, T, U> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let p = self.launch.problem;
        let mut unit = self.units.start;
        let mut group = self.group(unit);
        while group.blocks > 0 {
            unit += group.blocks;
            let next = self.group(unit);
            // SAFETY: `check` bound all shapes to these sizes and strides; threads get disjoint blocks; out overlaps
            // x only element for element.
            unsafe {
                if p.steps == [1, 1] {
                    convert_dense(s.pair(), p.scaling, &group, &next, self.stream);
                } else {
                    convert_strided(p, &group);
                }
            }
            group = next;
        }
        if self.stream {
            s.fence();
        }
    }
}

/// # Safety
/// The blocks must be those of a checked call.
unsafe fn convert_strided<T: CpuElement, U: CpuElement>(p: &Problem, group: &Group<T, U>) {
    let [x_step, out_step] = p.steps;
    for (&(x, out), scale) in group.at[..group.blocks].iter().zip(group.scales) {
        for i in 0..group.n as isize {
            // SAFETY: passed on.
            unsafe {
                let value = (*x.offset(i * x_step)).to_f32();
                *out.offset(i * out_step) = U::from_f32(match p.scaling {
                    Scaling::None => value,
                    Scaling::Multiply => value * scale,
                    Scaling::Divide => value / scale,
                });
            }
        }
    }
}

/// # Safety
/// The blocks of `group` must be those of a checked call, and dense.
#[inline(always)]
unsafe fn convert_dense<S: Simd, T: CpuElement, U: CpuElement>(
    s: S,
    scaling: Scaling,
    group: &Group<T, U>,
    next: &Group<T, U>,
    stream: bool,
) {
    let scales = group.scales;
    // Loops, not `map` on arrays: this is compiled for every pair of types, and they are much shorter.
    let (mut at, mut following) = (group.at, [std::ptr::null(); SIDE_BY_SIDE]);
    for (following, (x, _)) in following.iter_mut().zip(&next.at) {
        *following = *x;
    }
    let (at, next) = (&mut at[..group.blocks], &following[..next.blocks]);
    let (mut n, ahead) = (group.n, side_by_side(stream).1);
    if Types::<T, U>::TO_E4M3 {
        let scaled = scales.map(|scale| match scaling {
            Scaling::None => Scaled::Times(1.0),
            Scaling::Multiply => Scaled::Times(scale),
            Scaling::Divide => Scaled::Over(scale),
        });
        let bits = group.at.map(|(x, out)| (x.cast(), out.cast()));
        let next_bits = following.map(|x| x.cast());
        let runs = Runs { at: &bits[..group.blocks], next: &next_bits[..next.len()], n, ahead };
        // SAFETY: passed on; both types are transparent wrappers of their bits, and tensors of two types are apart.
        let done = unsafe { bf16_to_e4m3(s, &runs, &scaled[..group.blocks], stream) };
        n -= done;
        for (x, out) in at.iter_mut() {
            (*x, *out) = (x.wrapping_add(done), out.wrapping_add(done));
        }
    }
    let runs = Runs { at, next, n, ahead };
    // An 8-bit result is no quotient of those that may be off by a unit. No `map`: its closure would not be inlined.
    let mut divide = [Divide::by(s, scales[0]); SIDE_BY_SIDE];
    for k in 1..group.blocks {
        divide[k] = Divide::by(s, scales[k]);
    }
    // SAFETY: passed on.
    unsafe {
        match scaling {
            Scaling::None if Types::<T, U>::UNORDERED => with(
                s,
                &runs,
                stream,
                true,
                #[inline(always)]
                |_, v| v,
            ),
            // Without a scale by one: memory takes the time, and a loop of its own for each pair of types much code.
            Scaling::None | Scaling::Multiply => with(
                s,
                &runs,
                stream,
                false,
                #[inline(always)]
                |k, v| s.mul(v, s.splat(scales[k])),
            ),
            Scaling::Divide => with(
                s,
                &runs,
                stream,
                false,
                #[inline(always)]
                |k, v| {
                    if size_of::<U>() == 1 { divide[k].quotient(s, v) } else { s.div(v, s.splat(scales[k])) }
                },
            ),
        }
    }
}

/// What is known of two types when code is made for them: only the branch that is taken is compiled.
struct Types<T, U>(PhantomData<(T, U)>);

impl<T: CpuElement, U: CpuElement> Types<T, U> {
    /// bf16 to e4m3 has a loop of its own.
    const TO_E4M3: bool = matches!((T::DTYPE, U::DTYPE), (DType::BF16, DType::F8E4M3));
    /// Whether [`Runs::map_unordered`] can be used.
    const UNORDERED: bool = Self::TO_E4M3 || matches!((T::DTYPE, U::DTYPE), (DType::F8E4M3, DType::BF16));
}

/// `unchanged` says that results are the elements themselves.
///
/// # Safety
/// As [`Runs::map`].
#[inline(always)]
unsafe fn with<S: Simd, T: CpuElement, U: CpuElement>(
    s: S,
    runs: &Runs<'_, T, U>,
    stream: bool,
    unchanged: bool,
    f: impl Fn(usize, S::V) -> S::V,
) {
    // SAFETY: passed on. Every value of e4m3 is one of bf16, however it would be rounded.
    unsafe {
        if Types::<T, U>::UNORDERED {
            runs.map_unordered(s, stream, unchanged, f)
        } else {
            runs.map(s, stream, f)
        }
    }
}
