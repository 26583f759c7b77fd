//! `copy` on the CPU, one source for all tiers.

use super::{OUT, Part, Problem, X};
use crate::cpu::{Simd, Task, copy_bytes, dispatch, parallel_for, should_stream};
use crate::error::Result;
use crate::op::Launch;
use std::ops::Range;

/// The fewest bytes a thread copies: less does not pay for waking a thread.
const GRAIN: usize = 1 << 16;
/// Lines and columns of a square tile of a plane: a cache line of the smallest elements, and few enough pages for the
/// TLB.
const TILE: usize = 64;

pub(super) fn run(launch: &Launch<'_, Problem>) -> Result<()> {
    let p = launch.problem;
    let stream = should_stream(p.elements().saturating_mul(p.size));
    match p.part {
        Part::Runs => {
            // Long runs are divided in pieces.
            let bytes = p.len * p.size;
            let pieces = bytes.div_ceil(GRAIN).max(1);
            parallel_for(p.starts.len() * pieces, GRAIN.div_ceil(bytes.max(1)), |range| {
                dispatch(launch.tier, Runs { launch, range, pieces, stream });
            });
        }
        Part::Lines => parallel_for(p.starts.len(), GRAIN.div_ceil((p.len * p.size).max(1)), |range| {
            let copy = Elements { launch, range };
            match p.size {
                1 => copy.lines::<u8>(),
                2 => copy.lines::<u16>(),
                4 => copy.lines::<u32>(),
                _ => copy.lines::<u64>(),
            }
        }),
        Part::Planes => {
            let tiles = p.starts.len() * p.lines.div_ceil(TILE) * p.len.div_ceil(TILE);
            parallel_for(tiles, GRAIN.div_ceil(TILE * TILE * p.size), |range| {
                let copy = Elements { launch, range };
                match p.size {
                    1 => copy.tiles::<u8>(),
                    2 => copy.tiles::<u16>(),
                    4 => copy.tiles::<u32>(),
                    _ => copy.tiles::<u64>(),
                }
            });
        }
    }
    Ok(())
}

/// Pieces `range` of the runs, `pieces` of each.
struct Runs<'a> {
    launch: &'a Launch<'a, Problem>,
    range: Range<usize>,
    pieces: usize,
    stream: bool,
}

impl Task for Runs<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let p = self.launch.problem;
        let (from, to) = (self.launch.args.address(X), self.launch.args.address(OUT));
        let bytes = p.len * p.size;
        for index in self.range {
            let [x, out, ..] = p.starts.offsets(index / self.pieces).map(|offset| offset * p.size);
            let at = index % self.pieces * GRAIN;
            let n = (bytes - at).min(GRAIN);
            // SAFETY: `check` bound runs to the tensors, which are apart, and the piece lies in its run. No other piece
            // writes the same bytes.
            unsafe {
                copy_bytes(s, (from + x + at) as *const u8, (to + out + at) as *mut u8, n, self.stream, false)
            };
        }
        if self.stream {
            s.fence();
        }
    }
}

/// Lines or tiles `range`, element by element.
struct Elements<'a> {
    launch: &'a Launch<'a, Problem>,
    range: Range<usize>,
}

impl Elements<'_> {
    /// The addresses of part `index` in x and out.
    fn part<T>(&self, index: usize) -> (*const T, *mut T) {
        let [x, out, ..] = self.launch.problem.starts.offsets(index).map(|offset| offset * size_of::<T>());
        ((self.launch.args.address(X) + x) as *const T, (self.launch.args.address(OUT) + out) as *mut T)
    }

    fn lines<T: Copy>(self) {
        let p = self.launch.problem;
        let [from_step, to_step] = p.steps.map(|step| step as usize);
        for index in self.range.clone() {
            let (from, to) = self.part::<T>(index);
            for i in 0..p.len {
                // SAFETY: the element's places in the two tensors, as `check` bound them; `T` has the size of an element,
                // whose alignment was checked.
                unsafe { *to.add(i * to_step) = *from.add(i * from_step) };
            }
        }
    }

    /// A tile is read along the lines of `out`, which is across those of `x`: its cache lines stay until they are used
    /// up.
    fn tiles<T: Copy>(self) {
        let p = self.launch.problem;
        let (down, across) = (p.lines.div_ceil(TILE), p.len.div_ceil(TILE));
        let [from_step, to_step] = p.steps.map(|step| step as usize);
        let [from_pitch, to_pitch] = p.pitches.map(|pitch| pitch as usize);
        for index in self.range.clone() {
            let (from, to) = self.part::<T>(index / (down * across));
            let (line, column) = (index / across % down * TILE, index % across * TILE);
            for i in line..(line + TILE).min(p.lines) {
                for j in column..(column + TILE).min(p.len) {
                    // SAFETY: as in `lines`.
                    unsafe {
                        *to.add(i * to_pitch + j * to_step) = *from.add(i * from_pitch + j * from_step);
                    }
                }
            }
        }
    }
}
