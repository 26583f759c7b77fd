//! `argmax` on the CPU, one source for all tiers.

use super::{OUT, Problem, X};
use crate::cpu::rows::{for_vectors, load_at, replace_rest, with_float};
use crate::cpu::scratch::{self, Need, Plain};
use crate::cpu::{CpuElement, Simd, Task, dispatch, parallel_for};
use crate::error::Result;
use crate::op::Launch;
use crate::tensor::DType;
use std::marker::PhantomData;

/// Rows are processed in pieces of this many elements, which are divided among threads.
const PIECE: usize = 1 << 14;

/// The largest element of a piece. All zeros means that the piece is all NaN.
#[derive(Clone, Copy)]
#[repr(C)]
struct Best {
    /// One more than the index; zero where there is none.
    place: u64,
    value: f32,
    unused: u32,
}

// SAFETY: plain numbers without padding.
unsafe impl Plain for Best {}

/// The results of the pieces, for all threads.
struct Slots(*mut Best);

// SAFETY: each piece is written by one thread.
unsafe impl Sync for Slots {}

pub(super) fn run(launch: &Launch<'_, Problem>) -> Result<()> {
    let p = launch.problem;
    let pieces = p.n.div_ceil(PIECE);
    scratch::with(Need::of::<Best>(p.num_rows * pieces), |mut region| {
        let found = region.slice::<Best>(p.num_rows * pieces);
        let slots = Slots(found.as_mut_ptr());
        parallel_for(found.len(), PIECE.div_ceil(p.n), |items| {
            let slots = &slots;
            for item in items {
                let (row, piece) = (item / pieces, item % pieces);
                let first = piece * PIECE;
                let count = PIECE.min(p.n - first);
                let x = p.rows.offsets(row)[0].wrapping_add_signed(first as isize * p.step);
                let best = with_float!(p.dtype, T => {
                    let x = (launch.args.address(X) as *const T).wrapping_add(x);
                    dispatch(launch.tier, Largest { x, step: p.step, count, t: PhantomData })
                });
                let best = match best {
                    Some((at, value)) => Best { place: (first + at) as u64 + 1, value, unused: 0 },
                    None => Best { place: 0, value: 0.0, unused: 0 },
                };
                // SAFETY: there is a slot for each item, and this one has it alone.
                unsafe { *slots.0.add(item) = best };
            }
        });
        for (row, pieces) in found.chunks_exact(pieces).enumerate() {
            let better = |best: Best, next: &Best| match best.place == 0 || next.value > best.value {
                true if next.place > 0 => *next,
                _ => best,
            };
            let best = pieces.iter().skip(1).fold(pieces[0], better);
            let (index, at) = (best.place.saturating_sub(1), p.rows.offsets(row)[1]);
            let out = launch.args.address(OUT);
            // SAFETY: `check` bound out to the rows of x and refused rows that its type cannot count.
            unsafe {
                match p.out_dtype {
                    DType::I32 => *(out as *mut i32).add(at) = index as i32,
                    _ => *(out as *mut i64).add(at) = index as i64,
                }
            }
        }
    });
    Ok(())
}

/// The first of the largest among `count` elements `step` apart, and its value; none if all are NaN.
struct Largest<T> {
    x: *const T,
    step: isize,
    count: usize,
    t: PhantomData<T>,
}

impl<T: CpuElement> Task for Largest<T> {
    type Out = Option<(usize, f32)>;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Self::Out {
        let Largest { x, step, count, .. } = self;
        if step != 1 {
            // SAFETY: `check` bound the row to its tensor.
            let at = |i: usize| unsafe { *x.wrapping_offset(i as isize * step) }.to_f32();
            let mut best = None;
            for (i, value) in (0..count).map(|i| (i, at(i))).filter(|(_, value)| !value.is_nan()) {
                if best.is_none_or(|(_, most)| value > most) {
                    best = Some((i, value));
                }
            }
            return best;
        }
        // Four vectors in lock-step: each comparison depends on the one before.
        let wide = s.pair().pair();
        let mut most = wide.splat(f32::NEG_INFINITY);
        for_vectors::<crate::cpu::simd::Four<S>>(
            count,
            #[inline(always)]
            |i, n| {
                // SAFETY: as above.
                let v = unsafe { load_at(wide, x, i, n) };
                // The second where the first is NaN.
                most = wide.max(replace_rest(wide, v, n, f32::NEG_INFINITY), most);
            },
        );
        let most = wide.reduce_max(most);
        let (mut i, top) = (0, s.splat(most));
        while i < count {
            let n = S::N.min(count - i);
            // SAFETY: as above.
            let v = replace_rest(s, unsafe { load_at(s, x, i, n) }, n, f32::NAN);
            if s.any(s.eq(v, top)) {
                // SAFETY: as above.
                let is_top = |j: &usize| unsafe { *x.add(i + j) }.to_f32() == most;
                return (0..n).find(is_top).map(|j| (i + j, most));
            }
            i += S::N;
        }
        None
    }
}
