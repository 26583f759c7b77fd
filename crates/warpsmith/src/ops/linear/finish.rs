//! Products of `linear` with few columns and long sums: in parts along K, whose sums a further launch adds and finishes. The
//! device half is `finish.cu`.

use super::cuda::{Epilogue, LinearParams};
use super::problem::{Order, Part, Strides};
use super::sm90::Divisor;
use super::split::{self, Split};
use super::{Gate, Problem};
use crate::cuda::LaunchConfig;
use crate::error::{Error, Result};
use crate::jit::{Arch, CudaKernel, Source};
use crate::kernel_params;
use crate::op::Launch;
use crate::ops::FLOATS;

const THREADS: usize = 256;
/// Scratch memory starts at multiples of this many bytes.
const SCRATCH_UNIT: usize = 256;
/// The most scratch memory, before rounding up. Products with more rows are computed in bands of a multiple of so many
/// rows: L2 then keeps many of the sums until they are added.
const MOST_BYTES: usize = 64 << 20;
const BAND_UNIT: usize = 256;

kernel_params! {
    /// The result has `units` of neighbouring columns, `per_row` of them in a row and `per_matrix` in a matrix. The `count`
    /// sums of an element are `between` elements apart, and rows of sums `pitch`.
    struct FinishParams {
        linear: LinearParams,
        parts: u64,
        between: i64, pitch: i64,
        per_row: Divisor, per_matrix: Divisor,
        units: u32, count: i32, vector: i32,
    }
}

pub(super) static DEVICE: CudaKernel = CudaKernel {
    source: Source { name: "linear_finish", code: include_str!("finish.cu") },
    prelude: FinishParams::prelude,
    function: "linear_finish",
    min_arch: Arch::new(8, 0, false),
    fast_math: false,
    overlaps: true,
    variants: || {
        let all = FLOATS.into_iter().flat_map(Epilogue::covering);
        let mut all: Vec<_> = all.map(|epilogue| of_sums(epilogue).defines()).collect();
        all.sort();
        all.dedup();
        all
    },
};

/// The defines of the epilogue alone, without the product.
fn of_sums(epilogue: Epilogue) -> Epilogue {
    Epilogue { x: epilogue.out, w: epilogue.out, ..epilogue }
}

/// The product whose sums a problem is made of.
fn plain(p: &Problem) -> Problem {
    Problem {
        n: p.weight_rows(),
        gate: Gate::None,
        activation: None,
        has_bias: false,
        has_residual: false,
        residual: Strides::default(),
        residual_order: Order::Any,
        scale_bits: 1f32.to_bits(),
        ..*p
    }
}

/// A launch of a product.
pub(super) type Multiply = unsafe fn(&Launch<'_, Problem>, &Problem, &Part) -> Result<()>;

/// How a problem is computed in parts.
#[derive(Clone, Copy, Debug)]
pub(super) struct Parts {
    split: Split,
    /// Rows of a band.
    rows: usize,
}

impl Parts {
    /// For a problem that is faster in parts.
    pub fn of(p: &Problem) -> Option<Parts> {
        let split = Split::of_product(p)?;
        let of_a_row = split.bytes(&Problem { m: 1, ..plain(p) });
        let bands = (p.m * of_a_row).div_ceil(MOST_BYTES).max(1);
        let rows = p.m.div_ceil(bands).next_multiple_of(BAND_UNIT).min(p.m);
        Some(Parts { split, rows })
    }

    /// Bytes of scratch memory for a problem; none if it is not computed in parts.
    pub fn bytes(p: &Problem) -> usize {
        Parts::of(p).map_or(0, |parts| {
            parts.split.bytes(&Problem { m: parts.rows, ..plain(p) }).next_multiple_of(SCRATCH_UNIT)
        })
    }

    /// The product that takes most of the time, which is the problem itself if there are no parts.
    pub fn longest(p: &Problem) -> Problem {
        Parts::of(p).map_or(*p, |parts| {
            let band = Problem { m: parts.rows, ..plain(p) };
            parts.split.products(&band, &Part::product(0, 0, 0), 0)[0].0
        })
    }

    /// For people; empty without parts.
    pub fn describe(p: &Problem) -> String {
        Parts::of(p).map_or(String::new(), |parts| format!(", K in {} parts", parts.split.parts()))
    }

    /// Multiplies with `multiply` into the memory at `scratch`, and finishes the results.
    ///
    /// # Safety
    /// `part` must hold the tensors of `p`, and `scratch` must have [`Parts::bytes`], until the work on the stream is done.
    pub unsafe fn run(
        &self,
        launch: &Launch<'_, Problem>,
        p: &Problem,
        part: &Part,
        scratch: usize,
        multiply: Multiply,
    ) -> Result<()> {
        for (band, part) in self.bands(p, part) {
            let products = self.split.products(&plain(&band), &part, scratch);
            // SAFETY: the caller vouches for the tensors and the scratch memory, of which the stream has the sums complete
            // before they are added, and added before the next band's are written.
            unsafe {
                products.iter().try_for_each(|(product, part)| multiply(launch, product, part))?;
                self.finish(launch, &band, &part, scratch)?;
            }
        }
        Ok(())
    }

    /// The rows of `p`, some at a time.
    fn bands(&self, p: &Problem, part: &Part) -> impl Iterator<Item = (Problem, Part)> {
        let (p, part, rows) = (*p, *part, self.rows);
        (0..p.m).step_by(rows).map(move |first| {
            let down = |address: usize, strides: Strides, size: usize| {
                address.wrapping_add_signed(first as isize * strides.row * size as isize)
            };
            let band = Part {
                x: down(part.x, p.x, p.x_dtype.size()),
                out: down(part.out, p.out, p.out_dtype.size()),
                residual: down(part.residual, p.residual, p.out_dtype.size()),
                ..part
            };
            (Problem { m: rows.min(p.m - first), ..p }, band)
        })
    }

    /// Adds the parts at `scratch` and finishes the results.
    ///
    /// # Safety
    /// As for [`Parts::run`].
    unsafe fn finish(
        &self,
        launch: &Launch<'_, Problem>,
        p: &Problem,
        part: &Part,
        scratch: usize,
    ) -> Result<()> {
        let sums = plain(p);
        // The gate and up of adjacent columns need not be adjacent.
        let unit = if p.gate == Gate::None { split::ROW_UNIT } else { 1 };
        let per_row = p.n.div_ceil(unit);
        let units = p.batch * p.m * per_row;
        // Threads past the last unit divide their number too.
        if units > i32::MAX as usize - THREADS {
            return Err(Error::Launch {
                kernel: DEVICE.function.into(),
                what: "number of threads",
                got: units as u64,
                limit: i32::MAX as u64,
            });
        }
        let residual_rows = !p.has_residual || p.residual_order == Order::Rows;
        let params = FinishParams {
            linear: LinearParams::new(p, part),
            parts: scratch as u64,
            between: split::between(&sums) as i64,
            pitch: split::pitch(&sums) as i64,
            per_row: Divisor::new(per_row),
            per_matrix: Divisor::new(p.m * per_row),
            units: units as u32,
            count: self.split.parts() as i32,
            vector: (p.out_order == Order::Rows && residual_rows) as i32,
        };
        let config = LaunchConfig::new([units.div_ceil(THREADS) as u32, 1, 1], [THREADS as u32, 1, 1], 0);
        // SAFETY: the caller vouches for the memory; the blocks cover every unit.
        unsafe { launch.record_part(&DEVICE, &of_sums(Epilogue::of(p)).defines(), &config, &params) }
    }
}

#[cfg(feature = "tests")]
mod tests {
    use super::super::problem::Matrix;
    use super::*;
    use crate::tensor::DType;

    fn problem([m, n, k]: [usize; 3], gate: Gate) -> Problem {
        let dense = |columns: usize| Matrix { row: columns as isize, col: 1, aligned: true };
        let product = Problem::product(DType::F32, false, [m, n, k], [dense(k), dense(k), dense(n)]);
        Problem { gate, ..product }
    }

    #[test]
    fn few_rows_are_one_band() {
        let p = problem([33, 40, 4096], Gate::Halves);
        let parts = Parts::of(&p).unwrap();
        assert_eq!(parts.bands(&p, &Part::product(4096, 0, 8192)).count(), 1);
        assert_eq!(Parts::bytes(&p), 4 * 33 * 80 * 4);
        assert_eq!((Parts::longest(&p).n, Parts::longest(&p).batch), (80, 4));
        assert_eq!(Parts::describe(&p), ", K in 4 parts");
        assert_eq!(Parts::bytes(&problem([33, 40, 1024], Gate::Halves)), 0);
    }

    #[test]
    fn bands_cover_every_row_once() {
        for m in [1, 255, 256, 4096, 40_000, 1_000_001] {
            let p = problem([m, 1152, 4008], Gate::None);
            let parts = Parts::of(&p).unwrap();
            let mut rows = 0;
            for (band, part) in parts.bands(&p, &Part::product(1 << 20, 1 << 40, 1 << 50)) {
                assert_eq!(part.x, (1 << 20) + rows * 4008 * 4);
                assert_eq!((part.w, part.out), (1 << 40, (1 << 50) + rows * 1152 * 4));
                assert_eq!(part.residual, 0);
                assert!(band.m <= parts.rows && band.m > 0);
                rows += band.m;
            }
            assert_eq!(rows, m);
            assert!(Parts::bytes(&p) <= MOST_BYTES + BAND_UNIT * 3 * 1152 * 4, "{m}");
        }
    }
}
