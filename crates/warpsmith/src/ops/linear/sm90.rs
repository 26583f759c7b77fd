//! `linear` on Hopper: host half. The device half is `sm90.cu`.

mod config;
mod maps;
#[cfg(feature = "tests")]
mod tests;
mod tile;
mod variants;

use super::align;
use super::cuda::{LinearParams, addressable};
use super::finish::{self, Parts};
use super::problem::{Order, Part};
use super::{Gate, Problem};
use crate::cuda::{LaunchConfig, TensorMap};
use crate::device::DeviceInfo;
use crate::error::{Error, Result};
use crate::jit::{Arch, CudaKernel, Source};
use crate::kernel_params;
use crate::op::{Kernel, Launch};
use crate::tensor::DType;
use config::Config;
use maps::{Operand, out_map};
use tile::Tile;

/// Threads of a warpgroup.
const WARPGROUP: usize = 128;

kernel_params! {
    struct Sm90Params {
        x_map: TensorMap, w_map: TensorMap, out_map: TensorMap,
        x_edge: Edge, w_edge: Edge,
        linear: LinearParams,
        k_tiles: i32, ahead: i32, early: i32, tiles: u32,
        per_batch: Divisor, per_band: Divisor, band: Divisor, last_band: Divisor,
    }
}

kernel_params! {
    /// The boxes of an operand's last tile, where that has fewer rows than the others.
    struct Edge { map: TensorMap, box_rows: i32 }
}

kernel_params! {
    /// A divisor of numbers below 2^31, with what turns the division into a multiplication: `n / value` is the upper half
    /// of `n * factor`, plus `n`, shifted right.
    pub(super) struct Divisor { value: u32, factor: u32, shift: u32 }
}

impl Divisor {
    pub(super) fn new(value: usize) -> Divisor {
        let shift = value.next_power_of_two().trailing_zeros();
        let factor = ((1u64 << 32) * ((1u64 << shift) - value as u64)) / value as u64 + 1;
        Divisor { value: value as u32, factor: factor as u32, shift }
    }
}

const SOURCE: Source = Source { name: "linear_sm90", code: include_str!("sm90.cu") };

pub(in crate::ops) static DEVICE: CudaKernel = CudaKernel {
    source: SOURCE,
    prelude: Sm90Params::prelude,
    function: "linear_sm90",
    min_arch: Arch::new(9, 0, true),
    fast_math: false,
    overlaps: true,
    variants: variants::variants,
};

/// Tensor cores through `wgmma`, fed by the copy engine: whatever that engine can load, and aligned copies of the rest.
/// The products of a call follow each other, so that their copies can use the same memory.
pub(super) const SM90: Kernel<Problem> =
    Kernel::cuda("linear_sm90", &DEVICE, |launch: &Launch<'_, Problem>| {
        let p = launch.problem;
        let copies = launch.workspace + Parts::bytes(p);
        p.parts(launch.args).try_for_each(|part| {
            // SAFETY: the parts are those of the call's own tensors; the scratch memory has the size that was asked for.
            unsafe {
                let products = align::run(launch, [(*p, part)], copies)?;
                products.iter().try_for_each(|(product, part)| match Parts::of(product) {
                    Some(parts) => parts.run(launch, product, part, launch.workspace, run_for_scratch),
                    None => run(launch, product, part),
                })
            }
        })
    })
    .and(&align::DEVICE)
    .and(&finish::DEVICE)
    .with_workspace(|p, _| Parts::bytes(p) + align::bytes(p))
    .when(|p, info| supports(&align::aligned(p), info))
    .configured(|p, info| {
        let product = Parts::longest(&align::aligned(p));
        let Some(tile) = Tile::choose(&product, info.units) else { return String::new() };
        let config = Config::of(&product, tile, info.units).describe();
        let (parts, copies) = (Parts::describe(p), align::describe(p));
        format!("{}, {config}{parts}{copies}", p.tensor_arithmetic())
    });

/// Whether the kernel takes a product as it is, without copies.
pub(in crate::ops) fn supports(p: &Problem, info: &DeviceInfo) -> std::result::Result<(), String> {
    if info.arch.is_none_or(|arch| (arch.major, arch.minor) != (9, 0)) {
        return Err("its instructions are those of sm_90a alone".into());
    }
    if p.x_dtype == DType::F32 && !p.tf32 {
        return Err("f32 in full precision would have to be split".into());
    }
    if p.full && p.x_dtype.size() == 1 {
        return Err("tensor cores add 8-bit products with fewer bits than f32 has".into());
    }
    if p.k == 0 {
        return Err("there is nothing to load".into());
    }
    if p.x_dtype.size() != p.w_dtype.size() {
        return Err("x and w have types of different size".into());
    }
    for (name, order, strides, rows, gated) in
        [("x", p.x_order, p.x, p.m, false), ("w", p.w_order, p.w, p.weight_rows(), p.gate != Gate::None)]
    {
        let reason = match order {
            Order::Any => {
                "has lines that do not start at multiples of 16 bytes, and is too large to be copied"
            }
            Order::Columns if p.x_dtype.size() != 2 => "is transposed, which only 16-bit types can be",
            Order::Columns if gated => "is transposed, which it cannot be with a gate",
            _ if rows > 1 && strides.row <= 0 || p.k > 1 && strides.col <= 0 => "repeats elements",
            _ if name == "x" && p.batch > 1 && strides.batch <= 0 => "repeats matrices",
            _ => continue,
        };
        return Err(format!("`{name}` {reason}"));
    }
    if Tile::choose(p, info.units).is_none() {
        return Err("no tile has its columns in one block of scales".into());
    }
    addressable(p)
}

/// Launches the kernel on a product whose result is scratch memory. Threads store it, not the copy engine, because
/// initcheck does not see what the copy engine writes.
///
/// # Safety
/// As for [`run`].
pub(in crate::ops) unsafe fn run_for_scratch<P>(
    launch: &Launch<'_, P>,
    p: &Problem,
    part: &Part,
) -> Result<()> {
    // SAFETY: passed on.
    unsafe { run(launch, &Problem { out_order: Order::Any, ..*p }, part) }
}

/// Launches the kernel on a product.
///
/// # Safety
/// `part` must hold the tensors of `p`, until the work on the stream is done.
pub(in crate::ops) unsafe fn run<P>(launch: &Launch<'_, P>, p: &Problem, part: &Part) -> Result<()> {
    let tile = Tile::choose(p, launch.info.units).expect("`supports` has passed");
    let config = Config::of(p, tile, launch.info.units);
    let x = Operand {
        address: part.x,
        dtype: p.x_dtype,
        strides: p.x,
        rows: p.m,
        batch: p.batch,
        columns: config.x_columns,
    };
    let w = Operand {
        address: part.w,
        dtype: p.w_dtype,
        strides: p.w,
        rows: p.weight_rows(),
        batch: if p.w.batch == 0 { 1 } else { p.batch },
        columns: config.w_columns,
    };
    let [m_tiles, n_tiles] = tile.grid(p);
    let tiles = m_tiles * n_tiles * p.batch;
    // Tile indices run up to two rounds past the end.
    if tiles > i32::MAX as usize {
        return Err(Error::Launch {
            kernel: "linear_sm90".into(),
            what: "number of tiles",
            got: tiles as u64,
            limit: i32::MAX as u64,
        });
    }
    let band = tile.band(p);
    let (x_map, x_edge) = x.maps(launch, p.k, tile.x_rows, tile.cluster_n(), Gate::None)?;
    let (w_map, w_edge) = match config.direct {
        true => (TensorMap::UNUSED, Edge { map: TensorMap::UNUSED, box_rows: 0 }),
        false => w.maps(launch, p.k, tile.n, tile.cluster_m(), p.gate)?,
    };
    let params = Sm90Params {
        x_map,
        w_map,
        x_edge,
        w_edge,
        out_map: if config.tma_store { out_map(launch, p, part, tile)? } else { TensorMap::UNUSED },
        linear: LinearParams::new(p, part),
        k_tiles: tile.k_tiles(p) as i32,
        early: config.early(p, launch.info.units) as i32,
        ahead: config.ahead(p, launch.info.units) as i32,
        tiles: tiles as u32,
        per_batch: Divisor::new(m_tiles * n_tiles),
        per_band: Divisor::new(band * n_tiles),
        band: Divisor::new(band),
        last_band: Divisor::new(if m_tiles.is_multiple_of(band) { band } else { m_tiles % band }),
    };
    let cluster = tile.cluster_blocks();
    let blocks = tile.blocks(p, launch.info.units) as u32;
    let threads = ((1 + tile.consumers()) * WARPGROUP) as u32;
    let launch_config = LaunchConfig {
        cluster: (cluster > 1).then_some([cluster as u32, 1, 1]),
        ..LaunchConfig::new([blocks, 1, 1], [threads, 1, 1], config.shared_bytes() as u32)
    };
    // SAFETY: the caller vouches for the tensors; the maps keep the copy engine inside them.
    unsafe { launch.record_part(&DEVICE, &config.defines(), &launch_config, &params) }
}
