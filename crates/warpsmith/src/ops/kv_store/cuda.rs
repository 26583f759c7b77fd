//! `kv_store` on CUDA devices: host half.

use super::slots::Slots;
use super::{COS, K, K_CACHE, K_SCALE, POSITIONS, Problem, SIN, SLOTS, Side, V, V_CACHE, V_SCALE};
use crate::cuda::LaunchConfig;
use crate::cuda::rows::{element, flag, grid_blocks};
use crate::device::DeviceInfo;
use crate::error::Result;
use crate::jit::{Arch, Bits64, CudaKernel, Defines, Source};
use crate::kernel_params;
use crate::op::{Kernel, Launch};
use crate::ops::FLOATS;
use crate::ops::rope::cuda::{Heads, ITEMS as ROTATED_ITEMS, MAX_PAIRS, Rotary, Shape, THREADS};
use crate::tensor::DType;

const SOURCE: Source = Source { name: "kv_store", code: include_str!("kernel.cu") };
/// Tokens of a thread that casts, where there are enough for all multiprocessors. Threads that only copy are fastest with
/// one each.
const ITEMS: usize = 4;
/// Blocks per multiprocessor that count as enough.
const FULL_BLOCKS: usize = 4;

kernel_params! {
    /// The slots of a call's tokens, as `kv_cache.cuh` takes them.
    pub(in crate::ops) struct KvSlots {
        at: u64,
        stride: i64,
        count: Bits64,
        page_size: u32,
        /// The page of a slot is `slot * page_factor >> page_shift`.
        page_factor: u32, page_shift: u32,
        wide: i32,
    }
}

impl KvSlots {
    /// There must be fewer than 2^31.
    pub fn new(slots: &Slots, at: u64) -> KvSlots {
        let (page_factor, page_shift) = division(slots.page_size);
        KvSlots {
            at,
            stride: slots.stride as i64,
            count: Bits64(slots.count() as u64),
            page_size: slots.page_size as u32,
            page_factor,
            page_shift,
            wide: (slots.dtype == DType::I64) as i32,
        }
    }
}

kernel_params! {
    struct KvSide {
        x: u64, cache: u64, scale: u64,
        token_stride: i64, head_stride: i64, step: i64,
        page_stride: i64, place_stride: i64, cache_head_stride: i64, cache_step: i64,
        scale_stride: i64,
        /// Heads, or one if all of them are one run, and columns of each.
        heads: u32, columns: u32,
        lane_bits: i32, unused: i32,
    }
}

kernel_params! {
    struct KvStoreParams {
        slots: KvSlots,
        positions: u64,
        position_stride: i64,
        num_tokens: i64,
        v_per_k: u32, wide_positions: i32,
        /// Keys, then values.
        sides: [KvSide; 2],
        rotary: Rotary,
    }
}

static DEVICE: CudaKernel = CudaKernel {
    source: SOURCE,
    prelude: KvStoreParams::prelude,
    function: "kv_store",
    min_arch: Arch::new(6, 0, false),
    fast_math: false,
    overlaps: true,
    variants,
};

/// What a kernel is compiled for.
#[derive(Clone, Copy)]
struct Variant {
    from: DType,
    to: DType,
    vector: bool,
    /// 0: none, 1: angles, 2: tables.
    rope: u8,
    interleaved: bool,
    items: usize,
}

impl Variant {
    fn defines(self) -> Defines {
        vec![
            element(self.from),
            ("CACHE", self.to.name().into()),
            flag("VECTOR", self.vector),
            ("ROPE", self.rope.to_string()),
            flag("INTERLEAVED", self.interleaved),
            ("ITEMS", self.items.to_string()),
        ]
    }
}

fn variants() -> Vec<Defines> {
    let mut all = Vec::new();
    for from in FLOATS {
        for to in [from, DType::F8E4M3, DType::F8E5M2] {
            for vector in [false, true] {
                for (rope, interleaved) in [(0, false), (1, false), (1, true), (2, false), (2, true)] {
                    let many = match rope {
                        0 if from == to => 1,
                        0 => ITEMS,
                        _ => ROTATED_ITEMS,
                    };
                    let mut choices = vec![1, many];
                    choices.dedup();
                    for items in choices {
                        all.push(Variant { from, to, vector, rope, interleaved, items }.defines());
                    }
                }
            }
        }
    }
    all
}

pub(super) const fn kernel(name: &'static str) -> Kernel<Problem> {
    Kernel::cuda(name, &DEVICE, run).configured(|p, info| Tiling::new(p, info).to_string()).when(|p, _| {
        let most = i32::MAX as usize;
        if p.num_tokens.max(p.slots.count()) > most || p.num_heads.saturating_mul(p.head_dim) > most / 2 {
            return Err(format!("more than {most} tokens or slots, or {} elements of a token", most / 2));
        }
        match p.rotation.is_some_and(|rotation| rotation.pairs() > MAX_PAIRS) {
            true => Err(format!("more than {} elements of a head are rotated", 2 * MAX_PAIRS)),
            false => Ok(()),
        }
    })
}

/// How heads that are not rotated are divided among threads.
#[derive(Clone, Copy)]
struct Plain {
    heads: usize,
    columns: usize,
    lanes: usize,
}

impl Plain {
    fn new(p: &Problem, side: &Side) -> Plain {
        let piece = if p.vector { 16 / p.from.size() } else { 1 };
        let (heads, head_dim) = match side.is_one_run(p.head_dim) {
            true => (1, p.num_heads * p.head_dim),
            false => (p.num_heads, p.head_dim),
        };
        let columns = head_dim / piece;
        Plain { heads, columns, lanes: (heads * columns).max(1).next_power_of_two().min(THREADS) }
    }

    fn blocks(&self, num_tokens: usize, items: usize) -> usize {
        num_tokens.div_ceil(items * (THREADS / self.lanes))
    }
}

/// How the work is divided among threads. Every element is computed on its own, so none of this affects the bits.
struct Tiling {
    sides: [Plain; 2],
    rotated: Option<Shape>,
    items: usize,
    k_blocks: usize,
    v_blocks: usize,
}

impl Tiling {
    fn new(p: &Problem, info: &DeviceInfo) -> Tiling {
        let sides = [0, 1].map(|t| Plain::new(p, &p.sides[t]));
        let rotated = p.rotation.map(|rotation| {
            let piece = if p.vector { 16 / p.from.size() } else { 1 };
            let [_, head, step] = p.sides[0].source;
            let Problem { num_tokens, num_heads, head_dim, .. } = *p;
            let strides = [head, step];
            Shape::new(
                Heads { rotation, num_tokens, num_heads, head_dim, piece, strides, in_place: false },
                info,
            )
        });
        let items = match &rotated {
            Some(shape) => shape.items,
            None if p.from == p.to => 1,
            None if sides[0].blocks(p.num_tokens, ITEMS) < FULL_BLOCKS * info.units => 1,
            None => ITEMS,
        };
        let k_blocks = rotated.as_ref().map_or(sides[0].blocks(p.num_tokens, items), Shape::blocks);
        let v_blocks = sides[1].blocks(p.num_tokens, items);
        Tiling { sides, rotated, items, k_blocks, v_blocks }
    }

    /// Blocks of values to each block of keys.
    fn v_per_k(&self) -> usize {
        self.v_blocks.div_ceil(self.k_blocks)
    }
}

impl std::fmt::Display for Tiling {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Tiling { sides, items, k_blocks, v_blocks, .. } = self;
        write!(f, "{} threads x {items} tokens, {k_blocks} + {v_blocks} blocks", sides[1].lanes)
    }
}

/// The factor and the shift that divide numbers below 2^31 by `divisor`, which is not larger: `n * factor >> shift`. The
/// factor is too large by less than 2^-31 of it, the quotient therefore by less than `1 / divisor`, which changes no whole
/// part.
fn division(divisor: usize) -> (u32, u32) {
    let shift = 31 + divisor.max(1).next_power_of_two().trailing_zeros();
    ((1u64 << shift).div_ceil(divisor.max(1) as u64) as u32, shift)
}

fn run(launch: &Launch<'_, Problem>) -> Result<()> {
    let p = launch.problem;
    if p.num_tokens == 0 {
        return Ok(());
    }
    let at = |index| launch.args.address(index) as u64;
    let tiling = Tiling::new(p, launch.info);
    let blocks = grid_blocks("kv_store", tiling.k_blocks * (tiling.v_per_k() + 1))?;
    let side = |t: usize, x, cache, scale| {
        let (side, plain) = (&p.sides[t], tiling.sides[t]);
        KvSide {
            x: at(x),
            cache: at(cache),
            scale: at(scale),
            token_stride: side.source[0] as i64,
            head_stride: side.source[1] as i64,
            step: side.source[2] as i64,
            page_stride: side.cache[0] as i64,
            place_stride: side.cache[1] as i64,
            cache_head_stride: side.cache[2] as i64,
            cache_step: side.cache[3] as i64,
            scale_stride: side.scale.unwrap_or(0) as i64,
            heads: plain.heads as u32,
            columns: plain.columns as u32,
            lane_bits: plain.lanes.trailing_zeros() as i32,
            unused: 0,
        }
    };
    let tables = [COS, SIN].map(|index| launch.args.address(index));
    let params = KvStoreParams {
        slots: KvSlots::new(&p.slots, at(SLOTS)),
        positions: at(POSITIONS),
        position_stride: p.positions.map_or(0, |(_, stride)| stride as i64),
        num_tokens: p.num_tokens as i64,
        v_per_k: tiling.v_per_k() as u32,
        wide_positions: p.positions.is_some_and(|(dtype, _)| dtype == DType::I64) as i32,
        sides: [side(0, K, K_CACHE, K_SCALE), side(1, V, V_CACHE, V_SCALE)],
        rotary: tiling.rotated.as_ref().map_or(Rotary::NONE, |shape| shape.rotary(tables, 0)),
    };
    let shared =
        tiling.rotated.as_ref().map_or(0, |shape| shape.shared_bytes(params.rotary.num_pairs as usize));
    let config = LaunchConfig::new([blocks, 1, 1], [THREADS as u32, 1, 1], shared as u32);
    let variant = Variant {
        from: p.from,
        to: p.to,
        vector: p.vector,
        rope: p.rotation.map_or(0, |rotation| 1 + rotation.tables.is_some() as u8),
        interleaved: p.rotation.is_some_and(|rotation| rotation.interleaved),
        items: tiling.items,
    };
    // SAFETY: `check` bound shapes and strides to the parameters, `supports` the numbers that are narrowed here; the
    // kernel skips slots out of range, and shared memory holds both factors of every pair of a block's tokens.
    unsafe { launch.record(&variant.defines(), &config, &params) }
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;

    #[test]
    fn pages_are_found_by_multiplication() {
        for divisor in (1..=300).chain([1000, 4095, 4096, 65537, (1 << 30) - 1, 1 << 30, i32::MAX as usize]) {
            let (factor, shift) = division(divisor);
            let most = i32::MAX as usize / divisor;
            let near =
                (0..=most).step_by(1 + most / 500).map(|k| k * divisor).flat_map(|n| [n.wrapping_sub(1), n]);
            for n in near.chain([i32::MAX as usize]).filter(|&n| n <= i32::MAX as usize) {
                assert_eq!((n as u64 * factor as u64) >> shift, (n / divisor) as u64, "{n} / {divisor}");
            }
        }
    }
}
