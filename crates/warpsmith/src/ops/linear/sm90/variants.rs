//! What packs hold of `linear` on Hopper, and tests compile.

use super::super::Gate;
use super::super::cuda::Epilogue;
use super::super::problem::{Dequant, INPUTS};
use super::config::Config;
use super::tile::{BLOCKS, DIRECT_PAIR, EXCHANGED, SKINNY, TILES, Tile};
use crate::jit::Defines;
use crate::ops::elementwise::function::Kind;
use crate::tensor::DType;

/// A covering set, as for the other kernels of `linear`: each epilogue with one tile, each tile with the plain epilogue
/// of one type.
pub(super) fn variants() -> Vec<Defines> {
    let mut all = Vec::new();
    for dtype in INPUTS {
        let mut add = |config: Config| all.push(config.with_all_stages().defines());
        let plain = Config {
            tile: TILES[0],
            epilogue: Epilogue::plain(dtype),
            x_columns: false,
            w_columns: false,
            tma_store: true,
            line_store: false,
            residual_rows: true,
            scale: false,
            small_steps: false,
            stages: 0,
            early: false,
            direct: false,
        };
        for epilogue in Epilogue::covering(dtype) {
            let tile = if epilogue.dequant == Dequant::Blocks { BLOCKS } else { TILES[0] };
            let small_steps = epilogue.residual && epilogue.gate != Gate::None;
            add(Config { epilogue, tile, small_steps, ..plain });
        }
        if dtype == DType::BF16 {
            every_tile(plain, &mut add);
        }
        for line_store in [false, true] {
            add(Config { tma_store: false, line_store, residual_rows: false, ..plain });
        }
        add(Config { scale: true, ..plain });
        add(Config { small_steps: true, ..plain });
        if dtype.size() == 2 {
            let activation = Some(Kind::Gelu);
            let epilogue = Epilogue { activation, bias: true, residual: true, ..plain.epilogue };
            EXCHANGED.iter().for_each(|&tile| add(Config { tile, epilogue, scale: true, ..plain }));
            for [x_columns, w_columns] in [[true, false], [false, true], [true, true]] {
                add(Config { x_columns, w_columns, ..plain });
            }
        }
    }
    all.sort();
    all.dedup();
    all
}

/// Each tile, with the ways to load `w` that it is used with.
fn every_tile(plain: Config, add: &mut impl FnMut(Config)) {
    TILES.into_iter().chain(EXCHANGED).for_each(|tile| add(Config { tile, ..plain }));
    for (early, m) in [(false, 8), (false, 64), (true, 8), (true, 64)] {
        add(Config { tile: Tile::skinny(m, 64, 4, false), early, ..plain });
    }
    let direct = Config { direct: true, ..plain };
    let pairs = |parts: usize| SKINNY.into_iter().filter(move |n| parts * n <= DIRECT_PAIR);
    let pair = |n| Tile { blocks_per_unit: 2, ..Tile::skinny(16, n, 1, false) };
    for n in SKINNY {
        for m in [8, 16, 32, 64] {
            add(Config { tile: Tile::skinny(m, n, 4, false), ..plain });
        }
        for m in [8, 64] {
            add(Config { tile: Tile::skinny(m, n, 1, false), ..direct });
        }
    }
    for gate in [Gate::Halves, Gate::Interleaved] {
        let activation = Some(Kind::Silu);
        let epilogue = Epilogue { activation, gate, bias: true, residual: true, ..plain.epilogue };
        let gated = Config {
            epilogue,
            tma_store: false,
            line_store: true,
            residual_rows: false,
            small_steps: true,
            ..direct
        };
        SKINNY.iter().for_each(|n| add(Config { tile: Tile::skinny(64, 2 * n, 1, false), ..gated }));
        pairs(2).for_each(|n| add(Config { tile: pair(2 * n), ..gated }));
    }
    pairs(1).for_each(|n| add(Config { tile: pair(n), ..direct }));
    add(Config { tile: Tile::skinny(8, 32, 4, true), ..plain });
    for n in [16, 32] {
        add(Config { tile: Tile::skinny(8, n, 1, false), ..plain });
    }
}
