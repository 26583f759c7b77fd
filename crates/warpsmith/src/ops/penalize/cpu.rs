//! `penalize` on the CPU. A few accesses here and there: plain code is as fast as memory.

use super::{BIAS, COUNTS, FREQUENCY, IDS, LOGITS, PRESENCE, Problem, REPETITION};
use crate::cpu::rows::with_float;
use crate::cpu::{CpuElement, parallel_for};
use crate::error::Result;
use crate::op::Launch;

/// The fewest elements a thread works on.
const GRAIN: usize = 1 << 12;

pub(super) fn run(launch: &Launch<'_, Problem>) -> Result<()> {
    let p = launch.problem;
    parallel_for(p.num_rows, GRAIN.div_ceil(p.slots.max(1)), |rows| {
        with_float!(p.dtype, T => rows.for_each(|row| change::<T>(launch, row)));
    });
    Ok(())
}

fn change<T: CpuElement>(launch: &Launch<'_, Problem>, row: usize) {
    let p = launch.problem;
    /// An element of an argument, or nothing where it is left out.
    fn at<E>(launch: &Launch<'_, Problem>, arg: usize, row: usize, column: usize) -> Option<*mut E> {
        let [rows, columns] = launch.problem.strides[arg]?;
        let offset = row as isize * rows + column as isize * columns;
        Some((launch.args.address(arg) as *mut E).wrapping_offset(offset))
    }
    // SAFETY: `check` bound all arguments to these rows and columns, and their descriptions to these types; threads have
    // rows of their own.
    let number = |arg: usize, column: usize| at::<f32>(launch, arg, row, column).map(|p| unsafe { *p });
    // SAFETY: as above.
    let whole = |arg: usize, slot: usize| at::<i32>(launch, arg, row, slot).map_or(-1, |p| unsafe { *p });
    let (repetition, presence) = (number(REPETITION, 0).unwrap_or(1.0), number(PRESENCE, 0).unwrap_or(0.0));
    let frequency = number(FREQUENCY, 0).unwrap_or(0.0);
    for slot in 0..p.slots {
        let Some(id) = usize::try_from(whole(IDS, slot)).ok().filter(|&id| id < p.columns) else { continue };
        let Some(logit) = at::<T>(launch, LOGITS, row, id) else { continue };
        // SAFETY: as above; the id is a column.
        let mut l = unsafe { *logit }.to_f32();
        let count = whole(COUNTS, slot);
        if count >= 0 {
            l = if l > 0.0 { l / repetition } else { l * repetition };
        }
        if count > 0 {
            l -= frequency * count as f32 + presence;
        }
        if let Some(bias) = number(BIAS, slot) {
            l += bias;
        }
        // SAFETY: as above.
        unsafe { *logit = T::from_f32(l) };
    }
}
