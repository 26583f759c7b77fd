//! `add_gelu_backward` on CUDA devices where `x`, `dout` and `dx` are one run of elements each: host half of `run.cu`.

use super::backward::Problem;
use super::cuda::{BLOCKS_PER_UNIT, ITEMS, Sums, THREADS, own};
use super::{BIAS, DBIAS, DOUT, DX, KINDS, X};
use crate::cuda::LaunchConfig;
use crate::cuda::rows::element;
use crate::device::DeviceInfo;
use crate::error::Result;
use crate::jit::{Arch, CudaKernel, Defines, Source};
use crate::kernel_params;
use crate::op::Launch;
use crate::ops::FLOATS;
use crate::ops::elementwise::function::Kind;
use crate::tensor::DType;

kernel_params! {
    struct AddGeluRunParams {
        x: u64, bias: u64, dout: u64, dx: u64, partial: u64, dbias: u64,
        length: i64, bias_step: i64, dbias_step: i64,
        hidden: u32, num_threads: u32, shift: u32,
        /// Of the first unit's first element.
        first_column: u32,
        /// Those that blocks leave without adding them up.
        num_sums: u32,
        is_narrow: i32,
    }
}

fn defines(dtype: DType, sums: Sums, kind: Kind) -> Defines {
    let shape = vec![element(dtype), ("ITEMS", ITEMS.to_string()), ("SUMS", (sums as u8).to_string())];
    [shape, own(kind)].concat()
}

pub(super) static DEVICE: CudaKernel = CudaKernel {
    source: Source { name: "add_gelu_backward_run", code: include_str!("run.cu") },
    prelude: AddGeluRunParams::prelude,
    function: "add_gelu_backward_run",
    min_arch: Arch::new(6, 0, false),
    fast_math: false,
    overlaps: true,
    variants: || {
        let mut all = Vec::new();
        for dtype in FLOATS {
            for kind in KINDS {
                all.extend([Sums::None, Sums::Partial, Sums::Final].map(|sums| defines(dtype, sums, kind)));
            }
        }
        all
    },
};

/// How the units of a run, 16 bytes each, are divided.
#[derive(Clone, Copy, Debug)]
pub(super) struct Run {
    /// Elements of the first unit before the run.
    shift: usize,
    /// Threads with units, of all blocks.
    pub threads: usize,
    /// Blocks have several sums of each column, and add them up.
    narrow: bool,
    /// Rows of sums that are left.
    pub rows_of_sums: usize,
}

impl Run {
    /// `None` if the tensors are no runs, or if their rows are divided better.
    pub fn new(p: &Problem, info: &DeviceInfo) -> Option<Run> {
        let shift = p.run.filter(|_| p.num_rows > 0)?;
        let unit = 16 / p.dtype.size();
        let narrow = 2 * p.hidden <= THREADS * unit;
        if p.vector_rows && !narrow {
            return None;
        }
        let units = (shift + p.num_rows * p.hidden).div_ceil(unit);
        // The period in units after which columns repeat.
        let period = p.hidden >> p.hidden.trailing_zeros().min(unit.ilog2());
        let wanted = units.div_ceil(ITEMS).min(info.units * BLOCKS_PER_UNIT * THREADS);
        let threads = if units <= period { units } else { (wanted / period).max(1) * period };
        // The device code counts columns of all threads, idle ones too, in 32 bits.
        u32::try_from((threads + THREADS) * unit + p.hidden).ok()?;
        let rows_of_sums = match narrow {
            true => threads.div_ceil(THREADS),
            false if threads.is_multiple_of(period) => threads * unit / p.hidden,
            false => p.num_rows,
        };
        Some(Run { shift, threads, narrow, rows_of_sums })
    }

    /// Records the launch.
    ///
    /// # Safety
    /// `check` must have made the problem of the call's tensors, and its scratch memory must hold the rows of sums.
    pub unsafe fn record(&self, launch: &Launch<'_, Problem>, sums: Sums) -> Result<()> {
        let p = launch.problem;
        let at = |index| launch.args.address(index) as u64;
        let params = AddGeluRunParams {
            x: at(X),
            bias: at(BIAS),
            dout: at(DOUT),
            dx: at(DX),
            partial: launch.workspace as u64,
            dbias: at(DBIAS),
            length: (p.num_rows * p.hidden) as i64,
            bias_step: p.steps[3] as i64,
            dbias_step: p.steps[4] as i64,
            hidden: p.hidden as u32,
            num_threads: self.threads as u32,
            shift: self.shift as u32,
            first_column: ((p.hidden - self.shift % p.hidden) % p.hidden) as u32,
            num_sums: (self.rows_of_sums * p.hidden) as u32,
            is_narrow: self.narrow as i32,
        };
        let blocks = self.threads.div_ceil(THREADS) as u32;
        let config = LaunchConfig::new([blocks, 1, 1], [THREADS as u32, 1, 1], 0);
        // SAFETY: passed on; threads cover all units.
        unsafe { launch.record_part(&DEVICE, &defines(p.dtype, sums, p.kind), &config, &params) }
    }
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;
    use crate::device::Device;
    use crate::tensor::{Layout, Shape, Space};

    fn run(num_rows: usize, hidden: usize, dtype: DType, shift: usize) -> Option<Run> {
        let rows = Layout::contiguous(Shape::new(&[num_rows, hidden]).unwrap());
        let problem = Problem {
            dtype,
            kind: Kind::Gelu,
            hidden,
            num_rows,
            rows: Space::new(1, [&rows; 4]),
            steps: [1; 5],
            has_dbias: true,
            vector_rows: shift == 0 && (hidden * dtype.size()).is_multiple_of(16),
            run: Some(shift),
        };
        Run::new(&problem, &DeviceInfo { units: 132, ..Device::Cpu.info().unwrap() })
    }

    #[test]
    fn threads_keep_their_columns_and_all_sums_have_a_place() {
        for dtype in [DType::F32, DType::BF16] {
            let unit = 16 / dtype.size();
            for hidden in (1..70).chain([163, 409, 1020, 1023, 1025, 4099, 50_257, 200_003]) {
                for num_rows in [1, 2, 3, 8, 100, 30_000] {
                    for shift in [0, 1, unit - 1] {
                        let Some(run) = run(num_rows, hidden, dtype, shift) else { continue };
                        let (covered, length) = (run.threads * unit, num_rows * hidden);
                        let case = format!("{num_rows} x {hidden} {dtype} + {shift}: {run:?}");
                        let repeats = covered < length + shift;
                        assert!(!repeats || covered.is_multiple_of(hidden), "{case}");
                        let places = run.rows_of_sums * hidden;
                        // A column that comes before the run's first element is one of its later rows.
                        let whole = covered.is_multiple_of(hidden) && places == covered;
                        assert!(run.narrow || whole || (!repeats && places == length), "{case}");
                    }
                }
            }
        }
    }

    #[test]
    fn rows_that_vectors_divide_are_a_run_if_they_are_short() {
        assert!(run(1000, 4096, DType::BF16, 0).is_none());
        assert!(run(1000, 4096, DType::BF16, 1).is_some());
        assert!(run(1000, 384, DType::BF16, 0).is_some_and(|run| run.narrow));
        assert!(run(0, 7, DType::BF16, 0).is_none());
    }

    #[test]
    fn nearly_all_threads_of_a_device_have_units() {
        let all = 132 * BLOCKS_PER_UNIT * THREADS;
        for hidden in [3, 163, 409, 1023, 4099] {
            let run = run(1_000_000, hidden, DType::BF16, 0).unwrap();
            assert!(run.threads <= all && run.threads * 100 >= all * 96, "{hidden}: {run:?}");
        }
    }
}
