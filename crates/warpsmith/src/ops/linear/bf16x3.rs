//! `linear` in f32 at full precision on tensor cores, each element as three numbers of bf16: host half. The device half
//! is `bf16x3.cu`.

use super::cuda::{Epilogue, LinearParams, addressable, columns, load_mode, tiles};
use super::finish::{self, Parts};
use super::problem::{Order, Part, Strides};
use super::{Gate, Problem};
use crate::cuda::LaunchConfig;
use crate::cuda::rows::flag;
use crate::device::DeviceInfo;
use crate::error::Result;
use crate::jit::{Arch, CudaKernel, Defines, Source};
use crate::op::{Kernel, Launch};
use crate::tensor::DType;

/// The shape of a block's work. Each element is summed in the same order in tiles of any size.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Tile {
    /// Rows of `x`.
    m: usize,
    /// Rows of `w`.
    n: usize,
    /// Elements of K in a stage: in small tiles more, because they have fewer products between barriers.
    step: usize,
    stages: usize,
    /// Blocks per multiprocessor that registers allow.
    resident: usize,
    /// The time of a sum, in hundredths of that in the largest tile: small tiles split their elements more often.
    cost: usize,
}

/// Square tiles, largest first.
const SQUARE: [Tile; 3] = [
    Tile { m: 128, n: 128, step: 32, stages: 3, resident: 1, cost: 100 },
    Tile { m: 64, n: 64, step: 32, stages: 3, resident: 3, cost: 125 },
    Tile { m: 32, n: 32, step: 64, stages: 3, resident: 3, cost: 200 },
];
/// For few rows, where reading `w` takes the time: more stages keep more loads in flight.
const FLAT: [Tile; 4] = [flat(8, 64), flat(8, 32), flat(16, 64), flat(16, 32)];

const fn flat(m: usize, n: usize) -> Tile {
    Tile { m, n, step: 64, stages: 4, resident: 2, cost: 200 }
}

impl Tile {
    fn choose(p: &Problem, units: usize) -> Tile {
        let units = units.max(1);
        if let Some(&wide) = FLAT.iter().find(|tile| p.m <= tile.m) {
            // Narrow tiles split the rows of `x` more often, but leave fewer multiprocessors without work. Gate and up of a
            // warp's columns need the wide ones.
            let narrow = p.gate == Gate::None && wide.blocks(p) < units * 3 / 4;
            return if narrow { flat(wide.m, 32) } else { wide };
        }
        let time = |tile: &Tile| tile.blocks(p).div_ceil(units) * tile.m * tile.n * tile.cost;
        SQUARE.into_iter().min_by_key(time).expect("there are tiles")
    }

    fn blocks(&self, p: &Problem) -> usize {
        p.m.div_ceil(self.m) * p.n.div_ceil(columns(p, self.n)) * p.batch
    }

    fn threads(&self) -> u32 {
        if self.m >= 128 { 256 } else { 128 }
    }

    fn shared_bytes(&self) -> usize {
        self.stages * (self.m + self.n) * self.step * size_of::<f32>()
    }

    fn defines(&self, epilogue: &Epilogue, [x, w]: [usize; 2], pairs: bool) -> Defines {
        let mut defines = epilogue.defines();
        defines.extend([
            ("TILE_M", self.m.to_string()),
            ("TILE_N", self.n.to_string()),
            ("STEP", self.step.to_string()),
            ("STAGES", self.stages.to_string()),
            ("RESIDENT", self.resident.to_string()),
            ("LOAD_X", x.to_string()),
            ("LOAD_W", w.to_string()),
            flag("OUT_PAIRS", pairs),
        ]);
        defines
    }
}

pub(in crate::ops) static DEVICE: CudaKernel = CudaKernel {
    source: Source { name: "linear_bf16x3", code: include_str!("bf16x3.cu") },
    prelude: LinearParams::prelude,
    function: "linear_bf16x3",
    min_arch: Arch::new(8, 0, false),
    fast_math: false,
    overlaps: true,
    variants: || {
        let covering = Epilogue::covering(DType::F32);
        let mut all: Vec<_> = covering.iter().map(|e| SQUARE[0].defines(e, [1, 1], true)).collect();
        let plain = &covering[0];
        for tile in SQUARE {
            for loads in [[0, 0], [1, 1], [1, 2], [2, 2], [0, 3], [3, 3]] {
                all.push(tile.defines(plain, loads, false));
            }
        }
        for tile in FLAT {
            for loads in [[0, 0], [1, 1], [1, 2], [0, 3]] {
                all.push(tile.defines(plain, loads, false));
            }
        }
        all
    },
};

/// f32 at full precision on tensor cores, through `mma.sync`.
pub(super) const BF16X3: Kernel<Problem> =
    Kernel::cuda("linear_bf16x3", &DEVICE, |launch: &Launch<'_, Problem>| {
        let p = launch.problem;
        // SAFETY: the parts are those of the call's own tensors; the scratch memory has the size that was asked for.
        p.parts(launch.args).try_for_each(|part| unsafe {
            match Parts::of(p) {
                Some(parts) => parts.run(launch, p, &part, launch.workspace, run),
                None => run(launch, p, &part),
            }
        })
    })
    .and(&finish::DEVICE)
    .with_workspace(|p, _| Parts::bytes(p))
    .when(supports)
    .configured(|p, info| {
        let product = Parts::longest(p);
        let tile = Tile::choose(&product, info.units);
        let (m, n, parts) = (tile.m, columns(&product, tile.n), Parts::describe(p));
        format!("f32 as three bf16 each, sums in f32, tiles of {m} x {n}{parts}")
    });

pub(in crate::ops) fn supports(p: &Problem, info: &DeviceInfo) -> std::result::Result<(), String> {
    if p.x_dtype != DType::F32 {
        return Err(format!("{} needs no splitting", p.x_dtype));
    }
    // Of each generation only the tensor cores of data centers are much more than six times as fast as the f32 units.
    if !info.arch.is_some_and(|arch| matches!((arch.major, arch.minor), (8, 0) | (9, 0) | (10, _))) {
        return Err("six products of bf16 take longer here than one of f32".into());
    }
    addressable(p)
}

/// Launches the kernel on a product.
///
/// # Safety
/// `part` must hold the tensors of `p`, until the work on the stream is done.
pub(in crate::ops) unsafe fn run<P>(launch: &Launch<'_, P>, p: &Problem, part: &Part) -> Result<()> {
    let tile = Tile::choose(p, launch.info.units);
    // The gate's blocks of rows need not start where 16 bytes do.
    let loads = [loads(p.x_order, p.x, tile.m, false), loads(p.w_order, p.w, tile.n, p.gate != Gate::None)];
    let pairs = p.out_order == Order::Rows && (!p.has_residual || p.residual_order == Order::Rows);
    let defines = tile.defines(&Epilogue::of(p), loads, pairs);
    let blocks = tiles(p, tile.m, columns(p, tile.n))?;
    let config = LaunchConfig::new([blocks, 1, 1], [tile.threads(), 1, 1], tile.shared_bytes() as u32);
    // SAFETY: the caller vouches for the tensors; the blocks cover every tile.
    unsafe { launch.record_part(&DEVICE, &defines, &config, &LinearParams::new(p, part)) }
}

/// How a tile of `rows` rows of an operand is moved.
fn loads(order: Order, strides: Strides, rows: usize, scattered: bool) -> usize {
    match load_mode(order) {
        // Columns stay columns from 32 rows on.
        2 if scattered || rows < 32 => 0,
        // Their neighbours would all go to the same bank of shared memory if they were stored along K.
        0 if strides.row == 1 && strides.col != 1 && rows >= 32 => 3,
        mode => mode,
    }
}

#[cfg(feature = "tests")]
mod tests {
    use super::super::problem::Matrix;
    use super::*;

    fn tile(m: usize, n: usize, k: usize) -> [usize; 2] {
        let dense = |row: usize| Matrix { row: row as isize, col: 1, aligned: true };
        let p = Problem::product(DType::F32, false, [m, n, k], [dense(k), dense(k), dense(n)]);
        let tile = Tile::choose(&p, 132);
        [tile.m, tile.n]
    }

    #[test]
    fn tiles_are_as_large_as_leaves_every_multiprocessor_work() {
        assert_eq!(tile(4096, 4096, 4096), [128, 128]);
        assert_eq!(tile(2048, 2048, 2048), [128, 128]);
        assert_eq!(tile(1024, 1024, 1024), [64, 64]);
        assert_eq!(tile(512, 3072, 768), [64, 64]);
        assert_eq!(tile(256, 256, 256), [32, 32]);
        assert_eq!(tile(20, 4096, 4096), [32, 32]);
        assert_eq!(tile(512, 512, 512), [32, 32]);
        assert_eq!(tile(16, 8192, 2048), [16, 64]);
        assert_eq!(tile(1, 8192, 2048), [8, 64]);
        assert_eq!(tile(1, 4096, 4096), [8, 32]);
    }

    #[test]
    fn every_tile_fits_the_smallest_multiprocessor_with_tensor_cores_for_bf16() {
        for tile in SQUARE.into_iter().chain(FLAT) {
            assert!(tile.shared_bytes() <= 99 << 10, "{tile:?}");
        }
    }
}
