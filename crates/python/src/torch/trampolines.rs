//! A function for each op. PyTorch calls a kernel with its arguments and nothing else, so each op needs a function of its
//! own to know which it is.

use super::kernel::{Kernel, enter};
use super::shim::{BoxedKernel, Value};
use std::sync::{Mutex, OnceLock};
use warpsmith::{Error, Result};

const ROWS: usize = 32;
const COLUMNS: usize = 16;

static KERNELS: [OnceLock<Kernel>; ROWS * COLUMNS] = [const { OnceLock::new() }; ROWS * COLUMNS];

unsafe extern "C-unwind" fn trampoline<const SLOT: usize>(stack: *mut Value, inputs: u64, outputs: u64) {
    // SAFETY: PyTorch passes as many values as it says, and the function is registered only after its slot is filled.
    unsafe { enter(KERNELS[SLOT].get(), stack, inputs as usize, outputs as usize) }
}

macro_rules! row {
    ($row:literal) => {
        row!($row: 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15)
    };
    ($row:literal: $($column:literal)*) => {
        [$(trampoline::<{ $row * COLUMNS + $column }> as BoxedKernel),*]
    };
}

macro_rules! rows {
    ($($row:literal)*) => { [$(row!($row)),*] };
}

static FUNCTIONS: [[BoxedKernel; COLUMNS]; ROWS] =
    rows!(0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31);

/// A function that runs `kernel`.
pub fn assign(kernel: Kernel) -> Result<BoxedKernel> {
    static USED: Mutex<usize> = Mutex::new(0);
    let mut used = USED.lock().unwrap_or_else(|e| e.into_inner());
    let slot = *used;
    let Some(free) = KERNELS.get(slot) else {
        let most = KERNELS.len().to_string();
        return Err(Error::parse("ops registered with PyTorch", format!("at most {most}"), "one more"));
    };
    *used += 1;
    let _ = free.set(kernel);
    Ok(FUNCTIONS[slot / COLUMNS][slot % COLUMNS])
}
